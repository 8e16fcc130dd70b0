//! Where the dynamic linker finds a library that a program loads by name.

use super::System;
use super::elf_note::u32_at;

/// `ldconfig`'s list of libraries.
const CACHE: &str = "/etc/ld.so.cache";
const CACHE_MAGIC: &[u8] = b"glibc-ld.so.cache1.1";
const CACHE_HEADER: usize = 48;
const CACHE_ENTRY: usize = 24;
/// An entry's flags for libraries of this processor: the C library's version and the ABI.
#[cfg(target_arch = "x86_64")]
const CACHE_FLAGS: u32 = 0x0303;
#[cfg(target_arch = "aarch64")]
const CACHE_FLAGS: u32 = 0x0a03;
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
const CACHE_FLAGS: u32 = 0x0003;

/// The folders that glibc searches at last; distributions differ.
const DEFAULT_FOLDERS: [&str; 6] = [
    "/lib/x86_64-linux-gnu",
    "/usr/lib/x86_64-linux-gnu",
    "/lib64",
    "/usr/lib64",
    "/lib",
    "/usr/lib",
];

/// The variables that say where a program's libraries are.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LibraryPath {
    /// `LD_PRELOAD`: files, separated by colons or spaces.
    pub preload: String,
    /// `LD_LIBRARY_PATH`: folders, separated by colons or semicolons.
    pub folders: String,
}

/// A library as the dynamic linker finds it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundLibrary {
    /// The file.
    pub path: String,
    /// Where the linker found it: `LD_PRELOAD`, `LD_LIBRARY_PATH`, `ld.so.cache`, `default folders`
    /// or `path as given`.
    pub by: &'static str,
}

impl System {
    /// The file that `dlopen(name)` opens in a program with these variables, which has no search
    /// path of its own (`RPATH`, `RUNPATH`): a name with a slash is a path; others are looked for
    /// among the preloaded libraries, in `LD_LIBRARY_PATH`, in `ld.so.cache` and in the default
    /// folders, in this order.
    pub fn find_library(&self, name: &str, path: &LibraryPath) -> Option<FoundLibrary> {
        let found = |path: String, by| Some(FoundLibrary { path, by });
        if name.is_empty() {
            return None;
        }
        if name.contains('/') {
            return self
                .exists(name)
                .then(|| name.to_owned())
                .and_then(|p| found(p, "path as given"));
        }
        let preloaded = path.preload.split([':', ' ']).find(|file| {
            // The linker compares with the library's SONAME, which its file name begins with.
            let last = file.rsplit('/').next().unwrap_or_default();
            file.contains('/') && last.starts_with(name) && self.exists(file)
        });
        if let Some(file) = preloaded {
            return found(file.to_owned(), "LD_PRELOAD");
        }
        let folders = path.folders.split([':', ';']).filter(|folder| folder.starts_with('/'));
        let in_folder = |folder: &str| {
            let file = format!("{}/{name}", folder.trim_end_matches('/'));
            self.exists(&file).then_some(file)
        };
        if let Some(file) = folders.into_iter().find_map(in_folder) {
            return found(file, "LD_LIBRARY_PATH");
        }
        if let Some(file) = self.in_cache(name).filter(|file| self.exists(file)) {
            return found(file, "ld.so.cache");
        }
        found(DEFAULT_FOLDERS.into_iter().find_map(in_folder)?, "default folders")
    }

    fn in_cache(&self, name: &str) -> Option<String> {
        let bytes = self.read_bytes(CACHE)?;
        let start = bytes.windows(CACHE_MAGIC.len()).position(|window| window == CACHE_MAGIC)?;
        let cache = bytes.get(start..)?;
        let count = u32_at(cache, CACHE_MAGIC.len())? as usize;
        let entries = cache.get(CACHE_HEADER..)?.chunks_exact(CACHE_ENTRY).take(count);
        // Entries for a kind of processor (with `hwcap`) follow the general one; both are the same
        // library.
        let mut entries = entries.filter(|entry| u32_at(entry, 0) == Some(CACHE_FLAGS));
        entries.find_map(|entry| {
            let text = |at: usize| text_at(cache, u32_at(entry, at)? as usize);
            if text(4)? == name { Some(text(8)?.to_owned()) } else { None }
        })
    }
}

/// The NUL-terminated text at an offset.
fn text_at(bytes: &[u8], at: usize) -> Option<&str> {
    let rest = bytes.get(at..)?;
    let end = rest.iter().position(|byte| *byte == 0)?;
    std::str::from_utf8(rest.get(..end)?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::MachineFiles;

    /// A cache in glibc's format, after one in the older format.
    fn cache(entries: &[(u32, &str, &str)]) -> Vec<u8> {
        let mut strings = Vec::new();
        let mut table = Vec::new();
        let base = CACHE_HEADER + entries.len() * CACHE_ENTRY;
        for (flags, name, path) in entries {
            let mut add = |text: &str| {
                let at = (base + strings.len()) as u32;
                strings.extend(text.bytes().chain([0]));
                at
            };
            let words = [*flags, add(name), add(path), 0, 0, 0];
            table.extend(words.iter().flat_map(|word| word.to_le_bytes()));
        }
        let mut bytes = b"ld.so-1.7.0\0\0\0\0\0".to_vec();
        bytes.extend(CACHE_MAGIC);
        bytes.extend((entries.len() as u32).to_le_bytes());
        bytes.resize(16 + CACHE_HEADER, 0);
        bytes.extend(table);
        bytes.extend(strings);
        bytes
    }

    fn machine() -> MachineFiles {
        let mut files = MachineFiles::parse(
            "/opt/a/libx.so =\n/opt/b/libx.so =\n/opt/c/libx.so =\n/opt/c/liby.so.1.2 =\n\
             /usr/lib/libz.so =\n/opt/old/libx.so =",
        )
        .unwrap();
        let entries = [
            (CACHE_FLAGS ^ 0x0800, "libx.so", "/opt/old/libx.so"),
            (CACHE_FLAGS, "libx.so", "/opt/c/libx.so"),
            (CACHE_FLAGS, "libgone.so", "/opt/c/libgone.so"),
        ];
        files.set_bytes(CACHE, &cache(&entries));
        files
    }

    #[test]
    fn libraries_are_found_in_the_linkers_order() {
        let system = System::of(machine());
        let find = |name: &str, preload: &str, folders: &str| {
            let path = LibraryPath { preload: preload.into(), folders: folders.into() };
            system.find_library(name, &path).map(|found| (found.path, found.by))
        };
        let some = |path: &str, by| Some((path.to_owned(), by));
        assert_eq!(find("libx.so", "", ""), some("/opt/c/libx.so", "ld.so.cache"));
        assert_eq!(
            find("libx.so", "", "/none:/opt/b/;/opt/a"),
            some("/opt/b/libx.so", "LD_LIBRARY_PATH")
        );
        assert_eq!(
            find("libx.so", "/gone/libx.so /opt/a/libx.so", "/opt/b"),
            some("/opt/a/libx.so", "LD_PRELOAD")
        );
        assert_eq!(find("liby.so.1", "/opt/c/liby.so.1.2", "").unwrap().1, "LD_PRELOAD");
        assert_eq!(find("libz.so", "", ""), some("/usr/lib/libz.so", "default folders"));
        assert_eq!(find("/opt/a/libx.so", "", ""), some("/opt/a/libx.so", "path as given"));
        for missing in ["libgone.so", "/opt/d/libx.so", "libx.s", ""] {
            assert_eq!(find(missing, "", ""), None, "{missing}");
        }
    }

    #[test]
    fn malformed_caches_are_ignored() {
        let good = cache(&[(CACHE_FLAGS, "libx.so", "/opt/c/libx.so")]);
        let mut files = machine();
        for bad in [&good[..good.len() / 2], &[0xff; 200], b"", &good[..70]] {
            files.set_bytes(CACHE, bad);
            let found = System::of(files.clone()).find_library("libx.so", &LibraryPath::default());
            assert_eq!(found, None);
        }
    }

    #[test]
    fn this_machine_has_a_c_library() {
        let found = System::live().find_library("libc.so.6", &LibraryPath::default());
        assert!(found.as_ref().is_some_and(|found| found.path.ends_with("libc.so.6")), "{found:?}");
    }
}

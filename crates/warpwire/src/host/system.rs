//! Access to a machine's files, live or recorded.

use std::cmp::Ordering;
use std::ffi::OsString;
use std::fs;
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::path::{Component, Path, PathBuf};

use crate::error::{Error, Kind, Result};

/// The kernel's limit on symlinks in a path; beyond it, the path counts as a loop.
const MAX_SYMLINKS: usize = 40;

/// Maximum number of bytes read from a file. The files of interest are far shorter, but a recorded
/// file may have any length.
const MAX_FILE: u64 = 1 << 20;

/// The current user's permissions on a file or device node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileAccess {
    /// The file does not exist.
    Missing,
    /// The file exists, but this user may not read it.
    Denied,
    /// This user may read the file, but not write it.
    ReadOnly,
    /// This user may read and write the file.
    ReadWrite,
}

/// A machine's files: those of the running machine, or a recording below a directory.
///
/// Paths are written as on the machine itself (`/sys/class/net`), whatever the root is, and
/// symlinks are resolved inside the root.
///
/// ```
/// use warpwire::host::{FileAccess, System};
/// let folder = std::env::temp_dir().join(format!("warpwire-doc-{}", std::process::id()));
/// std::fs::create_dir_all(folder.join("proc/sys/kernel"))?;
/// std::fs::write(folder.join("proc/sys/kernel/osrelease"), "6.1.0-18-amd64\n")?;
///
/// let system = System::at(&folder)?;
/// assert_eq!(system.read("/proc/sys/kernel/osrelease").as_deref(), Some("6.1.0-18-amd64"));
/// assert_eq!(system.access("/dev/nvidiactl"), FileAccess::Missing);
/// # std::fs::remove_dir_all(&folder)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct System {
    root: PathBuf,
    live: bool,
}

impl System {
    /// The running machine.
    pub fn live() -> Self {
        Self { root: PathBuf::from("/"), live: true }
    }

    /// A recorded machine, whose files are below `root` (`root/sys`, `root/proc`, `root/dev`, …).
    /// If `root` is `/`, the running machine.
    ///
    /// # Errors
    /// If `root` is not a directory, cannot be read, or is empty.
    pub fn at(root: &Path) -> Result<Self> {
        let what = format!("read the recorded machine in {}", root.display());
        let fix = "pass a directory that contains the machine's sys, proc and dev directories";
        let unreadable = |source| Error::os(what.clone(), &source).fix(fix);
        let root = fs::canonicalize(root).map_err(unreadable)?;
        if root == Path::new("/") {
            return Ok(Self::live());
        }
        if fs::read_dir(&root).map_err(unreadable)?.next().is_none() {
            return Err(Error::new(Kind::InvalidArgument, what)
                .why("the directory is empty")
                .fix(fix));
        }
        Ok(Self { root, live: false })
    }

    /// Whether this is the running machine, on which probes can be run.
    pub fn is_live(&self) -> bool {
        self.live
    }

    /// A file's text without surrounding white space; `None` if it cannot be read. Invalid UTF-8 is
    /// replaced by U+FFFD.
    pub fn read(&self, path: &str) -> Option<String> {
        let bytes = self.read_bytes(path)?;
        Some(String::from_utf8_lossy(&bytes).trim().to_owned())
    }

    /// A file's bytes, at most the first MiB; `None` if it cannot be read or is not a regular file.
    pub fn read_bytes(&self, path: &str) -> Option<Vec<u8>> {
        let file = self.locate(path)?;
        // Opening a FIFO would block, and opening a device node may have side effects.
        if !fs::metadata(&file).ok()?.is_file() {
            return None;
        }
        let mut bytes = Vec::new();
        let opened = fs::File::open(&file).ok()?;
        opened.take(MAX_FILE).read_to_end(&mut bytes).ok()?;
        Some(bytes)
    }

    /// The names in a directory, in natural order (`mlx5_2` before `mlx5_10`); empty if it cannot
    /// be read.
    pub fn list(&self, folder: &str) -> Vec<String> {
        let entries = self.locate(folder).and_then(|path| fs::read_dir(path).ok());
        let mut names: Vec<String> = entries
            .into_iter()
            .flatten()
            .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
            .collect();
        names.sort_by(|a, b| natural_cmp(a, b));
        names
    }

    /// Whether the path exists, after following symlinks.
    pub fn exists(&self, path: &str) -> bool {
        self.locate(path).is_some()
    }

    /// The path with all symlinks resolved, as on the machine itself; `None` if it does not exist
    /// or is a symlink loop.
    pub fn real_path(&self, path: &str) -> Option<String> {
        let located = self.locate(path)?;
        let inside = located.strip_prefix(&self.root).ok()?;
        Some(format!("/{}", inside.to_str()?))
    }

    /// The last component of a symlink's target, whether or not the target exists: `nvidia` for
    /// `driver -> ../../../bus/pci/drivers/nvidia`. `None` if the path is not a symlink.
    pub fn link_name(&self, path: &str) -> Option<String> {
        let (folder, name) = path.trim_end_matches('/').rsplit_once('/')?;
        let target = fs::read_link(self.locate(folder)?.join(name)).ok()?;
        Some(target.file_name()?.to_str()?.to_owned())
    }

    /// The current user's permissions on a file.
    ///
    /// On the running machine by `access(2)`, which does not see a container's device cgroup: only
    /// opening the node does. In a recording by the permission bits for "other", since the user is
    /// not recorded.
    pub fn access(&self, path: &str) -> FileAccess {
        let Some(file) = self.locate(path) else {
            return FileAccess::Missing;
        };
        let (read, write) = if self.live {
            let may = |mode| rustix::fs::access(&file, mode).is_ok();
            (may(rustix::fs::Access::READ_OK), may(rustix::fs::Access::WRITE_OK))
        } else {
            let mode = fs::metadata(&file).map_or(0, |meta| meta.permissions().mode());
            (mode & 0o4 != 0, mode & 0o2 != 0)
        };
        match (read, write) {
            (true, true) => FileAccess::ReadWrite,
            (true, false) => FileAccess::ReadOnly,
            (false, _) => FileAccess::Denied,
        }
    }

    /// The file's path on the running machine, with all symlinks resolved below the root.
    fn locate(&self, path: &str) -> Option<PathBuf> {
        let mut resolved = self.root.clone();
        let mut pending: Vec<OsString> = Vec::new();
        push_components(&mut pending, Path::new(path));
        let mut links_left = MAX_SYMLINKS;
        while let Some(name) = pending.pop() {
            if name == ".." {
                if resolved != self.root {
                    resolved.pop();
                }
                continue;
            }
            let candidate = resolved.join(&name);
            if !fs::symlink_metadata(&candidate).ok()?.is_symlink() {
                resolved = candidate;
                continue;
            }
            links_left = links_left.checked_sub(1)?;
            let target = fs::read_link(&candidate).ok()?;
            if target.is_absolute() {
                resolved.clone_from(&self.root);
            }
            push_components(&mut pending, &target);
        }
        Some(resolved)
    }
}

/// Pushes a path's components on the stack, the first on top; skips `/` and `.`.
fn push_components(pending: &mut Vec<OsString>, path: &Path) {
    for component in path.components().rev() {
        match component {
            Component::Normal(name) => pending.push(name.to_owned()),
            Component::ParentDir => pending.push("..".into()),
            Component::RootDir | Component::CurDir | Component::Prefix(_) => {}
        }
    }
}

/// Natural order: runs of digits are compared as numbers.
fn natural_cmp(a: &str, b: &str) -> Ordering {
    let (mut left, mut right) = (a, b);
    while !left.is_empty() && !right.is_empty() {
        let (left_number, left_rest) = split_digits(left);
        let (right_number, right_rest) = split_digits(right);
        let order = if left_number.is_empty() || right_number.is_empty() {
            left.chars().next().cmp(&right.chars().next())
        } else {
            // Without leading zeros the longer number is larger; no parsing, so no overflow.
            let (x, y) =
                (left_number.trim_start_matches('0'), right_number.trim_start_matches('0'));
            x.len().cmp(&y.len()).then_with(|| x.cmp(y))
        };
        if order != Ordering::Equal {
            return order;
        }
        if left_number.is_empty() || right_number.is_empty() {
            left = skip_char(left);
            right = skip_char(right);
        } else {
            left = left_rest;
            right = right_rest;
        }
    }
    left.len().cmp(&right.len()).then_with(|| a.cmp(b))
}

fn split_digits(text: &str) -> (&str, &str) {
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    text.split_at(end)
}

fn skip_char(text: &str) -> &str {
    let mut chars = text.chars();
    chars.next();
    chars.as_str()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    fn recorded() -> (tempfile::TempDir, System) {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        fs::create_dir_all(root.join("sys/devices/a")).unwrap();
        fs::write(root.join("sys/devices/a/size"), " 17\n").unwrap();
        let system = System::at(root).unwrap();
        (folder, system)
    }

    #[test]
    fn an_invalid_root_is_rejected_with_advice() {
        let folder = tempfile::tempdir().unwrap();
        let missing = System::at(&folder.path().join("nowhere")).unwrap_err();
        assert_eq!(missing.kind(), &Kind::Unavailable);
        assert!(missing.to_string().contains("nowhere"), "{missing}");
        let empty = System::at(folder.path()).unwrap_err();
        assert!(empty.to_string().contains("the directory is empty; pass a directory"));
        fs::write(folder.path().join("file"), "").unwrap();
        assert!(System::at(&folder.path().join("file")).is_err());
    }

    #[test]
    fn links_stay_inside_the_root() {
        let (folder, system) = recorded();
        let root = folder.path();
        symlink("/sys/devices/a", root.join("sys/absolute")).unwrap();
        symlink("devices/../../../../../sys/devices/a", root.join("sys/climbing")).unwrap();
        for link in ["/sys/absolute", "/sys/climbing", "/sys/absolute/../a"] {
            assert_eq!(system.real_path(link).as_deref(), Some("/sys/devices/a"), "{link}");
            assert_eq!(system.read(&format!("{link}/size")).as_deref(), Some("17"));
        }
        symlink("/etc/passwd", root.join("sys/outside")).unwrap();
        assert_eq!(system.read("/sys/outside"), None);
        assert_eq!(system.read("/../../../../etc/passwd"), None);
    }

    #[test]
    fn symlink_loops_and_missing_files_do_not_exist() {
        let (folder, system) = recorded();
        symlink("loop", folder.path().join("sys/loop")).unwrap();
        assert_eq!(system.real_path("/sys/loop"), None);
        assert_eq!(system.access("/sys/loop"), FileAccess::Missing);
        assert_eq!(system.read("/sys/devices"), None);
        assert_eq!(system.list("/sys/devices/a/size"), Vec::<String>::new());
        assert!(!system.exists("/sys/devices/b"));
        assert_eq!(system.link_name("/sys/loop").as_deref(), Some("loop"));
        assert_eq!(system.link_name("/sys/devices/a"), None);
    }

    #[test]
    fn recorded_permissions_are_those_of_other_users() {
        let (folder, system) = recorded();
        let file = folder.path().join("sys/devices/a/size");
        for (mode, access) in [
            (0o666, FileAccess::ReadWrite),
            (0o644, FileAccess::ReadOnly),
            (0o660, FileAccess::Denied),
            (0o662, FileAccess::Denied),
        ] {
            fs::set_permissions(&file, fs::Permissions::from_mode(mode)).unwrap();
            assert_eq!(system.access("/sys/devices/a/size"), access, "{mode:o}");
        }
    }

    #[test]
    fn the_running_machine_can_be_read() {
        let system = System::live();
        assert_eq!(system.access("/dev/null"), FileAccess::ReadWrite);
        assert_eq!(system.access("/dev/no such node"), FileAccess::Missing);
        assert!(system.read("/proc/sys/kernel/osrelease").is_some());
        assert_eq!(system.read("/dev/zero"), None, "device nodes are never opened");
        assert!(System::at(Path::new("/")).unwrap().is_live());
    }

    #[test]
    fn names_are_in_natural_order() {
        let mut names = vec!["mlx5_10", "mlx5_2", "mlx5", "é", "mlx5_02", "a1b", "a1a"];
        names.sort_by(|a, b| natural_cmp(a, b));
        assert_eq!(names, ["a1a", "a1b", "mlx5", "mlx5_02", "mlx5_2", "mlx5_10", "é"]);
    }
}

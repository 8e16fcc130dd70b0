//! PTX of kernels that only tests use. It is not in git: `tools/ptx --tests` builds it.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

/// The variable that names the folder with the PTX.
const ENV_VAR: &str = "WARPWIRE_TEST_PTX";
const TOOL: &str = "tools/ptx";

/// The PTX of `crates/warpwire/tests/NAME.cu`, or the reason why there is none and what to do.
///
/// The PTX is searched for in the folder that `WARPWIRE_TEST_PTX` names, in `ptx` beside the test
/// binary, where `tools/stage` puts it, and in `.cache/ptx-tests` of the workspace. In the latter
/// it is built if it is missing or outdated, which may download a compiler: call this only if there
/// is a GPU. In the others, PTX that does not match the sources is an error.
pub fn ptx(name: &str) -> Result<String, String> {
    Store::find().get(name)
}

/// A folder with PTX.
struct Store {
    folder: PathBuf,
    /// Whether the PTX was built elsewhere; then this process does not write to the folder.
    prebuilt: bool,
    /// The workspace; it does not exist on a machine that has binaries only.
    root: PathBuf,
}

impl Store {
    fn find() -> Self {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let root = root.canonicalize().unwrap_or(root);
        let staged = || {
            let folder = env::current_exe().ok()?.parent()?.join("ptx");
            folder.is_dir().then_some(folder)
        };
        let prebuilt = env::var_os(ENV_VAR).map(PathBuf::from).or_else(staged);
        let folder = prebuilt.clone().unwrap_or_else(|| root.join(".cache/ptx-tests"));
        Self { folder, prebuilt: prebuilt.is_some(), root }
    }

    fn get(&self, name: &str) -> Result<String, String> {
        let found = self.read(name);
        if found.is_ok() || self.prebuilt || !self.has_sources() {
            return found;
        }
        let tool_output = self.make();
        self.read(name).map_err(|why| format!("{why} (its output: {tool_output})"))
    }

    fn read(&self, name: &str) -> Result<String, String> {
        let path = self.folder.join(format!("{name}.ptx"));
        let text = fs::read_to_string(&path).map_err(|why| why.to_string());
        text.and_then(|text| self.check(&text).map(|()| text)).map_err(|why| {
            let then_stage = if self.prebuilt { ", then tools/stage, or copy it" } else { "" };
            format!("{}: {why}; run tools/ptx --tests{then_stage}", path.display())
        })
    }

    /// Compares the sources, if they exist, with the checksums in the first lines.
    fn check(&self, text: &str) -> Result<(), String> {
        let mut sources = text.lines().map_while(|line| line.strip_prefix("// from ")).peekable();
        if sources.peek().is_none() {
            return Err("it does not list its sources".into());
        }
        match sources.find(|line| self.has_sources() && !self.is_unchanged(line)) {
            Some(line) => Err(format!("a source has changed since it was built ({line})")),
            None => Ok(()),
        }
    }

    fn is_unchanged(&self, line: &str) -> bool {
        let Some((crc, path)) = line.split_once(' ') else { return false };
        let bytes = fs::read(self.root.join(path));
        bytes.is_ok_and(|bytes| format!("{:08x}", crc32fast::hash(&bytes)) == crc)
    }

    fn has_sources(&self) -> bool {
        self.root.join(TOOL).is_file()
    }

    /// Runs the tool and returns the last line of its output.
    fn make(&self) -> String {
        eprintln!("building the PTX of tests: {TOOL} --tests");
        let output = match Command::new(self.root.join(TOOL)).arg("--tests").output() {
            Ok(output) => output,
            Err(why) => return why.to_string(),
        };
        let text = [output.stdout, output.stderr].concat();
        let text = String::from_utf8_lossy(&text);
        text.lines().last().unwrap_or_default().to_owned()
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::process::Stdio;

    use super::*;

    const SOURCE: &str = "tests/a.cu";

    /// A workspace with one source, and a tool with this script.
    fn workspace(tool: &str) -> (tempfile::TempDir, Store) {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().to_owned();
        for file in ["tools", "tests", "made"] {
            fs::create_dir(root.join(file)).unwrap();
        }
        fs::write(root.join(SOURCE), "123456789").unwrap();
        let path = root.join(TOOL);
        // Written by a child: a descriptor of this process would be inherited by those of other
        // tests, and Linux executes no file that is open for writing.
        let mut writer = Command::new("sh")
            .args(["-c", "cat >\"$0\" && chmod +x \"$0\""])
            .arg(&path)
            .stdin(Stdio::piped())
            .spawn()
            .unwrap();
        let script = format!("#!/bin/sh\ncd \"$(dirname \"$0\")/..\"\n{tool}");
        writer.stdin.take().unwrap().write_all(script.as_bytes()).unwrap();
        assert!(writer.wait().unwrap().success());
        let store = Store { folder: root.join("made"), prebuilt: false, root };
        (folder, store)
    }

    fn put(store: &Store, text: &str) {
        fs::write(store.folder.join("a.ptx"), text).unwrap();
    }

    /// CRC-32 as `zlib.crc32`, which the tool uses, computes it.
    const FRESH: &str = "// from cbf43926 tests/a.cu\n\n.version 8.2\n";

    #[test]
    fn fresh_ptx_needs_no_tool() {
        let (_folder, store) = workspace("exit 1");
        put(&store, FRESH);
        assert_eq!(store.get("a").unwrap(), FRESH);
    }

    #[test]
    fn missing_and_outdated_ptx_is_built() {
        let (_folder, store) = workspace(
            "test $1 = --tests && printf '// from cbf43926 tests/a.cu\\nnew' > made/a.ptx",
        );
        assert!(store.get("a").unwrap().ends_with("new"));
        put(&store, &FRESH.replace("cbf", "abf"));
        assert!(store.get("a").unwrap().ends_with("new"));
        put(&store, ".version 8.2\n");
        assert!(store.get("a").unwrap().ends_with("new"));
    }

    #[test]
    fn the_tool_output_is_reported() {
        let (_folder, store) = workspace("echo one; echo 'skipped: no network'");
        let why = store.get("a").unwrap_err();
        assert!(why.contains("run tools/ptx --tests (its output: skipped: no net"), "{why}");
        fs::remove_file(store.root.join(TOOL)).unwrap();
        let why = store.get("a").unwrap_err();
        assert!(why.ends_with("run tools/ptx --tests"), "{why}");
    }

    #[test]
    fn prebuilt_ptx_is_used_or_rejected_but_never_built() {
        let (_folder, store) = workspace("touch ran");
        let store = Store { prebuilt: true, ..store };
        assert!(store.get("a").unwrap_err().contains("tools/stage"));
        put(&store, FRESH);
        assert_eq!(store.get("a").unwrap(), FRESH);
        fs::write(store.root.join(SOURCE), "12345678").unwrap();
        let why = store.get("a").unwrap_err();
        assert!(why.contains("has changed since it was built (cbf43926 tests/a.cu)"), "{why}");
        fs::remove_file(store.root.join(SOURCE)).unwrap();
        assert!(store.get("a").is_err(), "the source is missing, but the tool exists");
        assert!(!store.root.join("ran").exists());
        // Without sources there is nothing to compare with.
        fs::remove_file(store.root.join(TOOL)).unwrap();
        assert_eq!(store.get("a").unwrap(), FRESH);
    }
}

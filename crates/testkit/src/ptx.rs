//! PTX of kernels that only tests have. It is not in git: `tools/ptx --tests` makes it.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

/// Names the folder with the PTX.
const ENV_VAR: &str = "WARPWIRE_TEST_PTX";
const TOOL: &str = "tools/ptx";

/// The PTX of `crates/warpwire/tests/NAME.cu`, or why there is none and what to do then.
///
/// It lies in the folder that `WARPWIRE_TEST_PTX` names, else in `ptx` beside the test binary,
/// where `tools/stage` puts it, else in `.cache/ptx-tests` of the workspace. There it is made if it
/// is absent or its sources have changed, which may download a compiler: to be called where there
/// is a GPU. Anywhere else PTX that is not of the sources at hand is an error.
pub fn ptx(name: &str) -> Result<String, String> {
    Store::find().get(name)
}

/// Where PTX is kept.
struct Store {
    folder: PathBuf,
    /// Whether it came from elsewhere, and is not ours to write to.
    carried: bool,
    /// The workspace; on a machine that was given binaries only, there is none.
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
        let carried = env::var_os(ENV_VAR).map(PathBuf::from).or_else(staged);
        let folder = carried.clone().unwrap_or_else(|| root.join(".cache/ptx-tests"));
        Self { folder, carried: carried.is_some(), root }
    }

    fn get(&self, name: &str) -> Result<String, String> {
        let found = self.read(name);
        if found.is_ok() || self.carried || !self.has_sources() {
            return found;
        }
        let said = self.make();
        self.read(name).map_err(|why| format!("{why} (which now said: {said})"))
    }

    fn read(&self, name: &str) -> Result<String, String> {
        let path = self.folder.join(format!("{name}.ptx"));
        let text = fs::read_to_string(&path).map_err(|why| why.to_string());
        text.and_then(|text| self.check(&text).map(|()| text)).map_err(|why| {
            let again = if self.carried { ", then tools/stage or a copy by hand" } else { "" };
            format!("{}: {why}; run tools/ptx --tests{again}", path.display())
        })
    }

    /// Compares the sources, if they are here, with what the first lines say of them.
    fn check(&self, text: &str) -> Result<(), String> {
        let mut sources = text.lines().map_while(|line| line.strip_prefix("// from ")).peekable();
        if sources.peek().is_none() {
            return Err("it does not say what it was made from".into());
        }
        match sources.find(|line| self.has_sources() && !self.is_unchanged(line)) {
            Some(line) => Err(format!("a source has changed since it was made ({line})")),
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

    /// Runs the tool, and returns the last line that it says.
    fn make(&self) -> String {
        eprintln!("making the PTX of tests: {TOOL} --tests");
        let output = match Command::new(self.root.join(TOOL)).arg("--tests").output() {
            Ok(output) => output,
            Err(why) => return why.to_string(),
        };
        let said = [output.stdout, output.stderr].concat();
        let said = String::from_utf8_lossy(&said);
        said.lines().last().unwrap_or_default().to_owned()
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    const SOURCE: &str = "tests/a.cu";

    /// A workspace with a source, and a tool of these lines.
    fn workspace(tool: &str) -> (tempfile::TempDir, Store) {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().to_owned();
        for file in ["tools", "tests", "made"] {
            fs::create_dir(root.join(file)).unwrap();
        }
        fs::write(root.join(SOURCE), "123456789").unwrap();
        let path = root.join(TOOL);
        fs::write(&path, format!("#!/bin/sh\ncd \"$(dirname \"$0\")/..\"\n{tool}")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        let store = Store { folder: root.join("made"), carried: false, root };
        (folder, store)
    }

    fn put(store: &Store, text: &str) {
        fs::write(store.folder.join("a.ptx"), text).unwrap();
    }

    /// As `zlib.crc32` has it, which the tool uses.
    const FRESH: &str = "// from cbf43926 tests/a.cu\n\n.version 8.2\n";

    #[test]
    fn fresh_ptx_needs_no_tool() {
        let (_folder, store) = workspace("exit 1");
        put(&store, FRESH);
        assert_eq!(store.get("a").unwrap(), FRESH);
    }

    #[test]
    fn absent_and_stale_ptx_is_made() {
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
    fn what_the_tool_said_is_told() {
        let (_folder, store) = workspace("echo one; echo 'skipped: no network'");
        let why = store.get("a").unwrap_err();
        assert!(why.contains("run tools/ptx --tests (which now said: skipped: no net"), "{why}");
        fs::remove_file(store.root.join(TOOL)).unwrap();
        let why = store.get("a").unwrap_err();
        assert!(why.ends_with("run tools/ptx --tests"), "{why}");
    }

    #[test]
    fn carried_ptx_is_taken_or_refused_but_never_made() {
        let (_folder, store) = workspace("touch ran");
        let store = Store { carried: true, ..store };
        assert!(store.get("a").unwrap_err().contains("tools/stage"));
        put(&store, FRESH);
        assert_eq!(store.get("a").unwrap(), FRESH);
        fs::write(store.root.join(SOURCE), "12345678").unwrap();
        let why = store.get("a").unwrap_err();
        assert!(why.contains("has changed since it was made (cbf43926 tests/a.cu)"), "{why}");
        fs::remove_file(store.root.join(SOURCE)).unwrap();
        assert!(store.get("a").is_err(), "the source is gone, and the tool is not");
        assert!(!store.root.join("ran").exists());
        // Where there are no sources there is nothing to compare with.
        fs::remove_file(store.root.join(TOOL)).unwrap();
        assert_eq!(store.get("a").unwrap(), FRESH);
    }
}

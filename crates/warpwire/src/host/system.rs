//! Access to a machine's files, live or recorded.

use std::cmp::Ordering;
use std::fs;
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::Mutex;

use super::machine::{MachineEntry, MachineFiles};
use crate::error::{Error, Kind, Result};

/// The kernel's limit on symlinks in a path; beyond it, the path counts as a loop.
const MAX_SYMLINKS: usize = 40;

/// Maximum number of bytes read from a file. The files of interest are far shorter, but a recorded
/// file may have any length.
pub(super) const MAX_FILE: u64 = 1 << 20;

/// Maximum number of bytes of a machine file.
const MAX_MACHINE: u64 = 32 << 20;

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

/// A machine's files: those of the running machine, or a recording in a directory or in a machine
/// file.
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
    source: Source,
    /// Everything that was read so far, if it is to be recorded.
    trace: Option<Arc<Mutex<MachineFiles>>>,
}

#[derive(Clone, Debug)]
enum Source {
    Live,
    Folder(PathBuf),
    Files(Arc<MachineFiles>),
}

/// What a path is, without following a symlink.
enum Node {
    File,
    Folder,
    Link(String),
    /// A device node, socket or FIFO, which is never opened.
    Other,
}

impl System {
    /// The running machine.
    pub fn live() -> Self {
        Self { source: Source::Live, trace: None }
    }

    /// A recorded machine: a directory with its files (`root/sys`, `root/proc`, `root/dev`, …), or
    /// a machine file ([`MachineFiles`]). If `root` is `/`, the running machine.
    ///
    /// # Errors
    /// If `root` cannot be read, is an empty directory, or is a malformed machine file.
    pub fn at(root: &Path) -> Result<Self> {
        let what = format!("read the recorded machine in {}", root.display());
        let fix = "pass a directory that contains the machine's sys, proc and dev directories, or \
                   a file written by `warpwire doctor --record FILE`";
        let unreadable = |source| Error::os(what.clone(), &source).fix(fix);
        let root = fs::canonicalize(root).map_err(unreadable)?;
        if root == Path::new("/") {
            return Ok(Self::live());
        }
        if root.is_file() {
            let mut bytes = Vec::new();
            let file = fs::File::open(&root).map_err(unreadable)?;
            file.take(MAX_MACHINE).read_to_end(&mut bytes).map_err(unreadable)?;
            let files = MachineFiles::parse(&String::from_utf8_lossy(&bytes)).map_err(|error| {
                Error::new(Kind::Malformed, what.clone()).why(error.reason().to_owned()).fix(fix)
            })?;
            if files.entries().is_empty() {
                return Err(Error::new(Kind::InvalidArgument, what)
                    .why("the file is empty")
                    .fix(fix));
            }
            return Ok(Self::of(files));
        }
        if fs::read_dir(&root).map_err(unreadable)?.next().is_none() {
            return Err(Error::new(Kind::InvalidArgument, what)
                .why("the directory is empty")
                .fix(fix));
        }
        Ok(Self { source: Source::Folder(root), trace: None })
    }

    /// A recorded machine in memory.
    pub fn of(files: MachineFiles) -> Self {
        Self { source: Source::Files(Arc::new(files)), trace: None }
    }

    /// The same machine; what is read through the returned system and its clones is kept, for
    /// [`traced`](Self::traced).
    pub fn tracing(&self) -> Self {
        Self { source: self.source.clone(), trace: Some(Arc::default()) }
    }

    /// What was read through a system of [`tracing`](Self::tracing) so far; empty for others.
    /// Permission bits are those with which a recording answers [`access`](Self::access) as this
    /// system did.
    pub fn traced(&self) -> MachineFiles {
        self.trace.as_ref().map(|trace| trace.lock().clone()).unwrap_or_default()
    }

    /// Whether this is the running machine, on which probes can be run.
    pub fn is_live(&self) -> bool {
        matches!(self.source, Source::Live)
    }

    /// A file's text without surrounding white space; `None` if it cannot be read. Invalid UTF-8 is
    /// replaced by U+FFFD.
    pub fn read(&self, path: &str) -> Option<String> {
        let bytes = self.read_bytes(path)?;
        Some(String::from_utf8_lossy(&bytes).trim().to_owned())
    }

    /// A file's bytes, at most the first MiB; `None` if it cannot be read or is not a regular file.
    pub fn read_bytes(&self, path: &str) -> Option<Vec<u8>> {
        let real = self.real_path(path)?;
        // Opening a FIFO would block, and opening a device node may have side effects.
        let Some(Node::File) = self.node(&real) else { return None };
        let bytes = match &self.source {
            Source::Files(files) => files.file(&real)?.to_vec(),
            Source::Live | Source::Folder(_) => {
                let mut bytes = Vec::new();
                let opened = fs::File::open(self.host_path(&real)).ok()?;
                opened.take(MAX_FILE).read_to_end(&mut bytes).ok()?;
                bytes
            }
        };
        self.note(&real, |files| files.set_bytes(&real, &bytes));
        Some(bytes)
    }

    /// The names in a directory, in natural order (`mlx5_2` before `mlx5_10`); empty if it cannot
    /// be read.
    pub fn list(&self, folder: &str) -> Vec<String> {
        let Some(real) = self.real_path(folder) else { return Vec::new() };
        let mut names: Vec<String> = match &self.source {
            Source::Files(files) => files.names(&real),
            Source::Live | Source::Folder(_) => fs::read_dir(self.host_path(&real))
                .into_iter()
                .flatten()
                .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
                .collect(),
        };
        names.sort_by(|a, b| natural_cmp(a, b));
        for name in names.iter().filter(|_| self.trace.is_some()) {
            self.note_node(&join(&real, name));
        }
        names
    }

    /// Whether the path exists, after following symlinks.
    pub fn exists(&self, path: &str) -> bool {
        self.real_path(path).is_some()
    }

    /// The path with all symlinks resolved, as on the machine itself; `None` if it does not exist
    /// or is a symlink loop.
    pub fn real_path(&self, path: &str) -> Option<String> {
        let mut resolved = String::from("/");
        let mut pending: Vec<String> = Vec::new();
        push_components(&mut pending, path);
        let mut links_left = MAX_SYMLINKS;
        while let Some(name) = pending.pop() {
            if name == ".." {
                let parent = resolved.rsplit_once('/').map_or("", |(parent, _)| parent);
                resolved = if parent.is_empty() { "/".to_owned() } else { parent.to_owned() };
                continue;
            }
            let candidate = join(&resolved, &name);
            let Node::Link(target) = self.node(&candidate)? else {
                resolved = candidate;
                continue;
            };
            self.note_node(&candidate);
            links_left = links_left.checked_sub(1)?;
            if target.starts_with('/') {
                "/".clone_into(&mut resolved);
            }
            push_components(&mut pending, &target);
        }
        self.note_node(&resolved);
        Some(resolved)
    }

    /// The last component of a symlink's target, whether or not the target exists: `nvidia` for
    /// `driver -> ../../../bus/pci/drivers/nvidia`. `None` if the path is not a symlink.
    pub fn link_name(&self, path: &str) -> Option<String> {
        let (folder, name) = path.trim_end_matches('/').rsplit_once('/')?;
        let link = join(&self.real_path(folder)?, name);
        let Node::Link(target) = self.node(&link)? else { return None };
        self.note_node(&link);
        target.trim_end_matches('/').rsplit('/').next().map(str::to_owned)
    }

    /// The current user's permissions on a file.
    ///
    /// On the running machine by `access(2)`, which does not see a container's device cgroup: only
    /// opening the node does. In a recording by the permission bits for "other", since the user is
    /// not recorded.
    pub fn access(&self, path: &str) -> FileAccess {
        let Some(real) = self.real_path(path) else {
            return FileAccess::Missing;
        };
        let (read, write) = match &self.source {
            Source::Live => {
                let may = |mode| rustix::fs::access(self.host_path(&real), mode).is_ok();
                (may(rustix::fs::Access::READ_OK), may(rustix::fs::Access::WRITE_OK))
            }
            Source::Folder(_) => {
                let meta = fs::metadata(self.host_path(&real));
                bits(meta.map_or(0, |meta| meta.permissions().mode()))
            }
            Source::Files(files) => bits(files.mode(&real)),
        };
        let (access, mode) = match (read, write) {
            (true, true) => (FileAccess::ReadWrite, 0o666),
            (true, false) => (FileAccess::ReadOnly, 0o644),
            (false, _) => (FileAccess::Denied, 0o600),
        };
        self.note(&real, |files| files.set_mode(&real, mode));
        access
    }

    /// Part of a regular file; `None` if it cannot be read or is shorter. Not recorded.
    pub(super) fn read_range(&self, path: &str, offset: u64, len: usize) -> Option<Vec<u8>> {
        use std::os::unix::fs::FileExt;
        let real = self.real_path(path)?;
        let Some(Node::File) = self.node(&real) else { return None };
        if let Source::Files(files) = &self.source {
            let start = usize::try_from(offset).ok()?;
            return Some(files.file(&real)?.get(start..start.checked_add(len)?)?.to_vec());
        }
        let mut bytes = vec![0; len];
        let file = fs::File::open(self.host_path(&real)).ok()?;
        file.read_exact_at(&mut bytes, offset).ok()?;
        Some(bytes)
    }

    /// What a path without symlinks in its folders is; `None` if it does not exist.
    fn node(&self, path: &str) -> Option<Node> {
        if let Source::Files(files) = &self.source {
            return match files.entry(path)? {
                MachineEntry::File { .. } => Some(Node::File),
                MachineEntry::Folder => Some(Node::Folder),
                MachineEntry::Link(target) => Some(Node::Link(target.clone())),
            };
        }
        let host_path = self.host_path(path);
        let kind = fs::symlink_metadata(&host_path).ok()?.file_type();
        Some(if kind.is_symlink() {
            Node::Link(fs::read_link(&host_path).ok()?.to_str()?.to_owned())
        } else if kind.is_dir() {
            Node::Folder
        } else if kind.is_file() {
            Node::File
        } else {
            Node::Other
        })
    }

    /// Where the file of a path without symlinks is on the running machine.
    fn host_path(&self, path: &str) -> PathBuf {
        match &self.source {
            Source::Folder(root) => root.join(path.trim_start_matches('/')),
            Source::Live | Source::Files(_) => PathBuf::from(path),
        }
    }

    fn note(&self, path: &str, change: impl FnOnce(&mut MachineFiles)) {
        if let Some(trace) = self.trace.as_ref().filter(|_| path != "/") {
            change(&mut trace.lock());
        }
    }

    /// Records that the path exists, and what it is.
    fn note_node(&self, path: &str) {
        if self.trace.is_none() || path == "/" {
            return;
        }
        let Some(node) = self.node(path) else { return };
        self.note(path, |files| match node {
            Node::Folder => files.add_folder(path),
            Node::Link(target) => files.add_link(path, &target),
            Node::File | Node::Other => files.add_stub(path),
        });
    }
}

/// Whether others may read and write.
fn bits(mode: u32) -> (bool, bool) {
    (mode & 0o4 != 0, mode & 0o2 != 0)
}

fn join(folder: &str, name: &str) -> String {
    if folder == "/" { format!("/{name}") } else { format!("{folder}/{name}") }
}

/// Pushes a path's components on the stack, the first on top; skips `/` and `.`.
fn push_components(pending: &mut Vec<String>, path: &str) {
    let names = path.split('/').filter(|name| !name.is_empty() && *name != ".");
    pending.extend(names.rev().map(str::to_owned));
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

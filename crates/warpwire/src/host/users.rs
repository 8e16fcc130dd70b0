//! Which other users a process trusts, and a folder that they cannot enter.

use std::ffi::OsString;
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

/// Whether a process or a file of this user may be trusted: it is this process's effective user,
/// or root.
pub fn is_trusted_user(uid: u32) -> bool {
    uid == 0 || is_own_user(uid)
}

/// Whether this is the process's effective user.
///
/// In a user namespace every user without a mapping appears as the overflow user (65534, `nobody`),
/// so that one is nobody's own unless all users are mapped.
pub fn is_own_user(uid: u32) -> bool {
    let own = rustix::process::geteuid().as_raw();
    uid == own && !is_ambiguous(uid, Path::new("/proc"))
}

/// Whether other users than this one appear with this number.
fn is_ambiguous(uid: u32, proc: &Path) -> bool {
    let read = |path: &str| std::fs::read_to_string(proc.join(path)).ok();
    let overflow = read("sys/kernel/overflowuid").and_then(|text| text.trim().parse().ok());
    let mapped = read("self/uid_map").unwrap_or_default();
    // The only mapping of the initial namespace.
    let all_are_mapped = mapped.split_whitespace().eq(["0", "0", "4294967295"]);
    uid == overflow.unwrap_or(65_534) && !all_are_mapped
}

/// The folder for files that processes of this user find each other by: `warpwire-UID` in
/// `xdg_runtime_dir` (the value of `XDG_RUNTIME_DIR`) if that is a folder of this user, else in the
/// temporary folder. [`make_private_folder`] creates it.
pub fn runtime_folder(xdg_runtime_dir: Option<OsString>) -> PathBuf {
    let runtime = xdg_runtime_dir.map(PathBuf::from).filter(|path| is_private_folder(path));
    let name = format!("warpwire-{}", rustix::process::geteuid().as_raw());
    runtime.unwrap_or_else(std::env::temp_dir).join(name)
}

/// Creates a folder that only this user can enter, or checks that an existing one is such.
///
/// # Errors
/// If it cannot be created, or is another user's, or a link.
pub fn make_private_folder(path: &Path) -> io::Result<()> {
    match std::fs::DirBuilder::new().mode(0o700).create(path) {
        Err(why) if why.kind() == io::ErrorKind::AlreadyExists => {}
        other => return other,
    }
    if is_private_folder(path) {
        return Ok(());
    }
    let why = format!("{} is not a folder that only this user can enter", path.display());
    Err(io::Error::new(io::ErrorKind::PermissionDenied, why))
}

fn is_private_folder(path: &Path) -> bool {
    let own = rustix::process::geteuid().as_raw();
    std::fs::symlink_metadata(path)
        .is_ok_and(|found| found.is_dir() && found.uid() == own && found.mode() & 0o077 == 0)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn the_runtime_folder_is_private() {
        let folder = tempfile::tempdir().unwrap();
        let private = std::fs::Permissions::from_mode(0o700);
        std::fs::set_permissions(folder.path(), private).unwrap();
        let path = runtime_folder(Some(folder.path().into()));
        assert_eq!(path.parent(), Some(folder.path()));
        make_private_folder(&path).unwrap();
        make_private_folder(&path).unwrap();
        // One that others may enter, a link, a file, and no folder at all.
        let open = folder.path().join("open");
        std::fs::create_dir(&open).unwrap();
        std::fs::set_permissions(&open, std::fs::Permissions::from_mode(0o755)).unwrap();
        let link = folder.path().join("link");
        std::os::unix::fs::symlink(&path, &link).unwrap();
        let file = folder.path().join("file");
        std::fs::write(&file, "").unwrap();
        for wrong in [open, link, file, "/no/such/folder".into()] {
            let elsewhere = runtime_folder(Some(wrong.clone().into()));
            assert_eq!(elsewhere.parent(), Some(&*std::env::temp_dir()), "{wrong:?}");
            make_private_folder(&wrong).unwrap_err();
        }
    }

    #[test]
    fn the_overflow_user_of_a_namespace_is_nobody_in_particular() {
        let folder = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = folder.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        write("sys/kernel/overflowuid", "1234\n");
        write("self/uid_map", "         0          0 4294967295\n");
        assert!(!is_ambiguous(1234, folder.path()));
        write("self/uid_map", "      1000       1000          1\n");
        assert!(is_ambiguous(1234, folder.path()));
        assert!(!is_ambiguous(1000, folder.path()));
        // Without /proc, the number that Linux starts with.
        assert!(is_ambiguous(65_534, Path::new("/no/such/proc")));
        let own = rustix::process::geteuid().as_raw();
        assert!(is_trusted_user(0) && is_trusted_user(own) && is_own_user(own));
        assert!(!is_trusted_user(own ^ 0x4000) && !is_own_user(own ^ 0x4000));
    }
}

//! The built command: `warpwire verbs`.

use std::fs;

use crate::{stderr, stdout};

/// A folder that looks like an installation.
fn folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for name in ["libibverbs.so.1", "librdmacm.so.1", "libwarpwire_ibpaths.so"] {
        fs::write(folder.path().join(name), "").unwrap();
    }
    folder
}

#[test]
fn variables_for_a_shell() {
    let folder = folder();
    let path = folder.path().canonicalize().unwrap();
    let path = path.to_str().unwrap();
    let mut command = crate::warpwire();
    command.env("LD_LIBRARY_PATH", "/else where").env_remove("LD_PRELOAD");
    command.env_remove("NCCL_GIN_TYPE");
    command.args(["verbs", "--env", "--devices", "it's=lo", "--libraries", path]);
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    let expected = format!(
        "export LD_LIBRARY_PATH='{path}:/else where'\n\
         export LD_PRELOAD='{path}/libibverbs.so.1:{path}/librdmacm.so.1:\
         {path}/libwarpwire_ibpaths.so'\n\
         export NCCL_IBVERBS_LIB='{path}/libibverbs.so.1'\n\
         export NCCL_GIN_TYPE='2'\n\
         export WARPWIRE_IB_DEVICES='it'\\''s=lo'\n"
    );
    assert_eq!(stdout(&output), expected);
}

/// An installation of before has no connection manager.
#[test]
fn without_a_connection_manager() {
    let folder = folder();
    fs::remove_file(folder.path().join("librdmacm.so.1")).unwrap();
    let mut command = crate::warpwire();
    command.env_remove("LD_PRELOAD").args(["verbs", "--env", "--libraries"]).arg(folder.path());
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(!stdout(&output).contains("librdmacm"), "{}", stdout(&output));
}

#[test]
fn the_program_gets_them_and_its_status_is_returned() {
    // Empty libraries cannot be loaded, so the dynamic linker only warns about them.
    let folder = folder();
    let script = "echo $NCCL_GIN_TYPE $WARPWIRE_IB_DEVICES; exit 7";
    let mut command = crate::warpwire();
    command.env("NCCL_GIN_TYPE", "3").args(["verbs", "--devices", "lo", "--libraries"]);
    command.arg(folder.path()).args(["--", "sh", "-c", script]);
    let output = command.output().unwrap();
    assert_eq!((stdout(&output).as_str(), output.status.code()), ("3 lo\n", Some(7)));
}

#[test]
fn bad_command_lines() {
    let (empty, full) = (tempfile::tempdir().unwrap(), folder());
    let run = |folder: &tempfile::TempDir, rest: &[&str]| {
        let mut command = crate::warpwire();
        command.args(["verbs", "--libraries"]).arg(folder.path()).args(rest).output().unwrap()
    };
    // A folder with a libibverbs of somebody else is not ours.
    fs::write(empty.path().join("libibverbs.so.1"), "").unwrap();
    let output = run(&empty, &["--", "true"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("tools/install-ibverbs DIR"), "{}", stderr(&output));
    let output = run(&full, &["--", "/nowhere/program"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("cannot start /nowhere/program"), "{}", stderr(&output));
    assert_eq!(run(&full, &[]).status.code(), Some(2));
    assert_eq!(run(&full, &["--env", "--", "true"]).status.code(), Some(2));
}

//! The built command: `warpwire nccl`.

use std::fs;

use crate::{stderr, stdout};

#[test]
fn variables_for_a_shell_and_for_a_program() {
    for name in ["libnccl-net-warpwire.so", "libnccl_net_warpwire.so"] {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join(name), "").unwrap();
        let path = folder.path().canonicalize().unwrap();
        let path = path.to_str().unwrap();
        let mut command = crate::warpwire();
        command.args(["nccl", "--env", "--libraries", path]);
        command.args(["--devices", "it's", "--link", "udp"]);
        let output = command.output().unwrap();
        assert!(output.status.success(), "{}", stderr(&output));
        let expected = format!(
            "export NCCL_NET_PLUGIN='{path}/{name}'\n\
             export NCCL_NET='Warpwire'\n\
             export NCCL_NET_PLUGIN_REF_COUNT='1'\n\
             export WARPWIRE_NCCL_DEVICES='it'\\''s'\n\
             export WARPWIRE_NCCL_LINK='udp'\n"
        );
        assert_eq!(stdout(&output), expected);
        let mut command = crate::warpwire();
        command.args(["nccl", "--libraries", path, "--", "sh", "-c", "echo $NCCL_NET; exit 7"]);
        let output = command.output().unwrap();
        assert_eq!((stdout(&output).as_str(), output.status.code()), ("Warpwire\n", Some(7)));
    }
}

#[test]
fn mistakes_say_what_to_do() {
    let empty = tempfile::tempdir().unwrap();
    let run = |rest: &[&str]| {
        let mut command = crate::warpwire();
        command.args(["nccl", "--libraries"]).arg(empty.path()).args(rest).output().unwrap()
    };
    let output = run(&["--env"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("tools/install-nccl DIR"), "{}", stderr(&output));
    for wrong in [&["--link", "tcp", "--env"][..], &[]] {
        assert_eq!(run(wrong).status.code(), Some(2), "{wrong:?}");
    }
}

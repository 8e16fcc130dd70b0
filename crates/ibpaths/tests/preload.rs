//! The library, preloaded into a C program.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::path::Path;
use std::process::Command;

/// Prints what `stat`, `access` and `realpath` answer for its arguments.
const PROGRAM: &str = r#"
#define _GNU_SOURCE
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>
int main(int count, char **paths) {
  for (int i = 1; i < count; i++) {
    struct stat status;
    char buffer[PATH_MAX], *into = realpath(paths[i], buffer), *own = realpath(paths[i], NULL);
    if (!into != !own || (into && into != buffer)) return 1;
    printf("%d %d %s %s\n", stat(paths[i], &status), access(paths[i], W_OK), into ? into : "-",
           own ? own : "-");
    free(own);
  }
  return realpath(NULL, NULL) != NULL;
}
"#;

#[test]
fn a_program_finds_devices_that_linux_does_not_have() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let (source, program) = (folder.join("paths.c"), folder.join("paths"));
    std::fs::write(&source, PROGRAM).unwrap();
    let made = Command::new("cc").arg(&source).arg("-o").arg(&program).output().unwrap();
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let library = std::env::current_exe().unwrap().with_file_name("libwarpwire_ibpaths.so");
    assert!(library.exists(), "{}", library.display());
    let folder = "/sys/devices/virtual";
    let device = format!("{folder}/infiniband/warp0");
    let cases = [
        ("/dev/infiniband/uverbs0", "0 0 - -".to_owned()),
        ("/dev/infiniband/rdma_cm", "-1 -1 - -".to_owned()),
        ("/", "0 0 / /".to_owned()),
        ("/usr/../tmp", "0 0 /tmp /tmp".to_owned()),
        ("/sys/class/infiniband/warp0", format!("-1 -1 {device} {device}")),
        ("/sys/class/infiniband/warp0/", format!("-1 -1 {device} {device}")),
        (
            "/sys/class/infiniband/warp0/..",
            format!("-1 -1 {folder}/infiniband {folder}/infiniband"),
        ),
        ("/sys/class/infiniband/warp0/../..", format!("-1 -1 {folder} {folder}")),
        ("/sys/class/infiniband/warp0/../../..", "-1 -1 - -".to_owned()),
        ("/sys/class/infiniband/warp0/device", "-1 -1 - -".to_owned()),
        ("/sys/class/infiniband/", "-1 -1 - -".to_owned()),
        ("/sys/class/infiniband/../net9", "-1 -1 - -".to_owned()),
        ("/sys/class/infiniband_verbs/uverbs0", "-1 -1 - -".to_owned()),
        ("", "-1 -1 - -".to_owned()),
    ];
    if Path::new("/sys/class/infiniband").exists() {
        println!("skipped: this machine has RDMA devices of its own");
        return;
    }
    let mut run = Command::new(&program);
    let output = run.args(cases.iter().map(|(path, _)| path)).env("LD_PRELOAD", &library).output();
    let output = output.unwrap();
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8(output.stdout).unwrap();
    for ((path, expected), line) in cases.iter().zip(text.lines()) {
        assert_eq!(line, expected, "{path}");
    }
    assert_eq!(text.lines().count(), cases.len());
}

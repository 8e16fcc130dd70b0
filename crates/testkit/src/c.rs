//! C programs and headers.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use crate::clock::deadline;
use crate::requirement::required;

/// The root of the workspace.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

/// Reports that something is missing: prints `skipped: why`, or fails if `WARPWIRE_REQUIRE` lists
/// it.
pub fn missing(name: &str, why: &str) {
    assert!(!required(name), "required: {why}");
    println!("skipped: {why}");
}

/// How long a command may take on an idle machine; none takes a tenth of it.
const LIMIT: Duration = Duration::from_secs(300);

/// Runs a command, which must succeed, and not hang; returns its output.
pub fn ok(command: &mut Command) -> String {
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let child = command.spawn().expect("the command starts");
    let (pid, (done, ended)) = (child.id().to_string(), mpsc::channel());
    thread::spawn(move || done.send(child.wait_with_output()));
    let output = ended.recv_timeout(deadline(LIMIT)).unwrap_or_else(|_| {
        let _ = Command::new("kill").args(["-9", &pid]).status();
        panic!("{command:?} does not end");
    });
    let Output { status, stdout, stderr } = output.expect("the command can be waited for");
    let (stdout, stderr) = (String::from_utf8_lossy(&stdout), String::from_utf8_lossy(&stderr));
    assert!(status.success(), "{command:?}: {status}\n{stdout}{stderr}");
    stdout.into_owned()
}

/// The values of these C expressions with a header of the system, such as `rdma/rdma_cma.h`. `None`
/// if there is no such header or no compiler: `package` is the Debian package that has it.
pub fn header_values<'a>(
    header: &str,
    package: &str,
    expressions: impl Iterator<Item = &'a String>,
) -> Option<BTreeMap<String, usize>> {
    let name = header.rsplit('/').next().unwrap_or(header);
    let path = Path::new("/usr/include").join(header);
    if !path.exists() {
        missing(name, &format!("no {} (Debian: {package})", path.display()));
        return None;
    }
    let mut text = format!(
        "#include <stddef.h>\n#include <stdio.h>\n#include <{header}>\nint main(void) {{\n"
    );
    for expression in expressions {
        let line = format!("printf(\"%s=%zu\\n\", \"{expression}\", (size_t){expression});");
        writeln!(text, "{line}").unwrap();
    }
    let folder = tempfile::tempdir().unwrap();
    let [source, binary] = ["layout.c", "layout"].map(|name| folder.path().join(name));
    std::fs::write(&source, text + "return 0; }\n").unwrap();
    let mut cc = Command::new("cc");
    if let Err(why) = cc.arg("--version").output() {
        missing(name, &format!("no C compiler ({why})"));
        return None;
    }
    ok(Command::new("cc").arg(&source).arg("-o").arg(&binary));
    let printed = ok(&mut Command::new(&binary));
    let values = printed.lines().filter_map(|line| line.rsplit_once('='));
    Some(values.map(|(name, value)| (name.to_owned(), value.parse().unwrap())).collect())
}

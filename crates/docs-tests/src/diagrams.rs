//! `tools/diagrams --check` accepts what is in git, and finds sources that changed, and mistakes.

use std::fs;
use std::path::Path;
use std::process::Command;

use crate::pages::root;

/// Runs `tools/diagrams --check` on a folder; what it printed if it fails. `None` without Python.
fn check(folder: &Path) -> Option<Result<(), String>> {
    let mut command = Command::new("python3");
    command.arg(root().join("tools/diagrams")).arg("--check").arg(folder);
    match command.output() {
        Err(why) => {
            println!("skipped: diagrams ({why})");
            None
        }
        Ok(output) if output.status.success() => Some(Ok(())),
        Ok(output) => Some(Err(String::from_utf8_lossy(&output.stderr).into_owned())),
    }
}

#[test]
fn diagrams_match_their_sources() {
    if let Some(result) = check(&root().join("docs/diagrams")) {
        assert_eq!(result, Ok(()));
    }
}

#[test]
fn changes_and_mistakes_are_found() {
    let folder = tempfile::tempdir().unwrap();
    let diagrams = root().join("docs/diagrams");
    let copy = |name: &str| {
        fs::copy(diagrams.join(name), folder.path().join(name)).unwrap();
        fs::read_to_string(diagrams.join(name)).unwrap()
    };
    for name in ["overview.txt", "overview.svg", "plot-nixl.txt", "plot-nixl.svg"] {
        copy(name);
    }
    if check(folder.path()).is_none() {
        return;
    }
    let failure = || check(folder.path()).unwrap().unwrap_err();
    assert_eq!(check(folder.path()), Some(Ok(())));
    for (name, from, to, why) in [
        ("overview", "CPU thread", "CPU threads", "overview.svg is not what overview.txt makes"),
        ("overview", "box blue", "box pink", "overview.txt:4: a box has the colour 'pink'"),
        ("overview", "row ", "rwo ", "overview.txt:3: 'rwo' does not stand here"),
        ("overview", "kind stack", "kind stuck", "overview.txt:1: the kind 'stuck' is unknown"),
        ("overview", "title", "titel", "overview.txt:1: a diagram begins with"),
        // A line continues after a backslash, and has the number of its first part.
        ("overview", "between its own memory", "\\", "overview.txt:17: this line ends with a"),
        ("overview", "orange RDMA NIC", "pink RDMA NIC", "overview.txt:14: a box has the colour"),
        ("plot-nixl", " 974 ", " 987654 ", "docs/nixl.md does not have the figures 987654"),
        ("plot-nixl", " 974 ", " ", "has 3 values; there are 4 bars"),
        ("plot-nixl", " 974 ", " fast ", "'fast' is no number"),
        ("plot-nixl", "docs/nixl.md", "docs/none.md", "there is no page docs/none.md"),
    ] {
        let source = format!("{name}.txt");
        let text = copy(&source);
        assert!(text.contains(from), "{source} has no {from:?} any more");
        fs::write(folder.path().join(&source), text.replacen(from, to, 1)).unwrap();
        let found = failure();
        assert!(found.contains(why), "{from} → {to}: {found}");
        copy(&source);
    }
    fs::remove_file(folder.path().join("overview.txt")).unwrap();
    assert!(failure().contains("overview.svg has no source overview.txt"));
}

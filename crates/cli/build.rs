//! The commit and the target, for `warpwire --version`.
//!
//! Outside of a git checkout, as in a package of crates.io, there is no commit.

use std::path::Path;
use std::process::Command;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed=WARPWIRE_COMMIT");
    let target = std::env::var("TARGET").unwrap_or_default();
    // For builds of an archive, which has no repository.
    let given = std::env::var("WARPWIRE_COMMIT").ok().filter(|commit| !commit.is_empty());
    let commit = given.or_else(commit).map_or_else(String::new, |commit| format!("{commit}, "));
    println!("cargo::rustc-env=WARPWIRE_BUILD={commit}{target}");
}

/// The commit of this crate's own repository.
fn commit() -> Option<String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2)?;
    // Another repository that happens to contain the sources of a package is not meant.
    if !root.join(".git").exists() {
        return None;
    }
    let git = |words: &[&str]| {
        let output = Command::new("git").arg("-C").arg(root).args(words).output().ok()?;
        let text = String::from_utf8(output.stdout).ok()?.trim().to_owned();
        output.status.success().then_some(text)
    };
    // A commit or a checkout changes these files.
    for name in ["HEAD", "logs/HEAD"] {
        let path = git(&["rev-parse", "--git-path", name])?;
        let path = root.join(path);
        if path.exists() {
            println!("cargo::rerun-if-changed={}", path.display());
        }
    }
    git(&["rev-parse", "--short=12", "HEAD"]).filter(|commit| !commit.is_empty())
}

//! Turns each ```` ```rust ```` block of README.md and docs/*.md into a test.
//!
//! A block becomes the body of a function that returns a `Result`. Lines that a reader need not see
//! stand in an HTML comment right before the block:
//!
//! ```markdown
//! <!-- setup
//! let gpu = warpwire::mem::open("sim:0")?;
//! -->
//! ```
//!
//! A block after `<!-- from FILE -->` quotes that file, and is no test (`src/quotes.rs`).
//!
//! A block that is ```` ```rust,no_run ```` is only compiled; its test prints `skipped: why`. A
//! block of unknown kind, or one that does not end, fails the build.

use std::path::{Path, PathBuf};
use std::{env, fs, io};

#[path = "src/blocks.rs"]
mod blocks;

fn main() -> io::Result<()> {
    let root = PathBuf::from(env::var("CARGO_MANIFEST_DIR").unwrap_or_default()).join("../..");
    let mut pages = vec![root.join("README.md")];
    for entry in fs::read_dir(root.join("docs"))? {
        pages.push(entry?.path());
    }
    pages.retain(|page| page.extension().is_some_and(|ending| ending == "md"));
    pages.sort();
    let mut tests = String::new();
    for page in pages {
        println!("cargo::rerun-if-changed={}", page.display());
        tests += &blocks::tests_of(&page, &fs::read_to_string(&page)?).map_err(io::Error::other)?;
    }
    println!("cargo::rerun-if-changed={}", root.join("docs").display());
    fs::write(Path::new(&env::var("OUT_DIR").unwrap_or_default()).join("blocks.rs"), tests)
}

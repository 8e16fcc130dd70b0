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
//! A block that is ```` ```rust,no_run ```` is only compiled; its test prints `skipped: why`.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::{env, fs, io};

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
        tests += &tests_of(&page, &fs::read_to_string(&page)?);
    }
    println!("cargo::rerun-if-changed={}", root.join("docs").display());
    fs::write(Path::new(&env::var("OUT_DIR").unwrap_or_default()).join("blocks.rs"), tests)
}

fn tests_of(page: &Path, text: &str) -> String {
    let stem = page.file_stem().unwrap_or_default().to_string_lossy().replace('-', "_");
    let (mut tests, mut setup, mut block) =
        (String::new(), None::<String>, None::<(usize, bool, String)>);
    let mut in_setup = false;
    for (number, line) in text.lines().enumerate() {
        if let Some((start, runs, mut body)) = block.take() {
            if line == "```" {
                let setup = setup.take().unwrap_or_default();
                tests +=
                    &test(&format!("{}_line_{start}", stem.to_lowercase()), runs, &(setup + &body));
            } else {
                let _ = writeln!(body, "{line}");
                block = Some((start, runs, body));
            }
        } else if in_setup {
            in_setup = line != "-->";
            if let (true, Some(setup)) = (in_setup, &mut setup) {
                let _ = writeln!(setup, "{line}");
            }
        } else if line == "<!-- setup" {
            (in_setup, setup) = (true, Some(String::new()));
        } else if let Some(kind) = line.strip_prefix("```rust") {
            block = Some((number + 1, kind.is_empty(), String::new()));
        } else if !line.is_empty() {
            setup = None;
        }
    }
    tests
}

fn test(name: &str, runs: bool, body: &str) -> String {
    let signature = "-> Result<(), Box<dyn std::error::Error>>";
    if runs {
        return format!("#[test]\nfn {name}() {signature} {{\n{body}\nOk(())\n}}\n\n");
    }
    format!(
        "#[test]\nfn {name}() {{\nfn block() {signature} {{\n{body}\nOk(())\n}}\n\
         let _: fn() {signature} = block;\n\
         println!(\"skipped: {name}: it needs hardware, and is only compiled\");\n}}\n\n"
    )
}

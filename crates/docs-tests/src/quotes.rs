//! A code block after `<!-- from FILE -->` quotes that file: its lines stand there, in this order
//! and without others in between. Their indentation may differ. The file itself is compiled or run
//! elsewhere.
//!
//! Programs in Python and C stand on pages that a test runs, or are quotes.

use std::fs;

use crate::pages::{Page, pages, root};

/// Pages whose blocks of a kind are run by a test, and which one.
const RUN: [(&str, &str); 3] = [
    ("python", "docs/python.md"), // crates/python/tests/test_docs.py
    ("python", "docs/nixl.md"),   // tools/nixl-test
    ("c", "docs/c.md"),           // crates/capi/tests/c_api.rs
];

/// Whether the lines of `part` stand in `text` one after the other; indentation is ignored.
fn stands_in(part: &[&str], text: &str) -> bool {
    let lines: Vec<&str> = text.lines().map(str::trim).collect();
    let part: Vec<&str> = part.iter().map(|line| line.trim()).collect();
    !part.is_empty() && lines.windows(part.len()).any(|window| window == part)
}

/// What is wrong with the quotes and programs of a page.
fn wrong(page: &Page, file: impl Fn(&str) -> Option<String>) -> Vec<String> {
    let mut wrong = Vec::new();
    for block in page.blocks() {
        let place = format!("{}:{}", page.path, block.line);
        match block.from.map(|from| (from, file(from))) {
            Some((from, None)) => wrong.push(format!("{place}: there is no {from}")),
            Some((from, Some(text))) if !stands_in(&block.body, &text) => {
                wrong.push(format!("{place}: this is not in {from}"));
            }
            Some(_) => {}
            None => {
                let runs = RUN.contains(&(block.kind, page.path.as_str()));
                if ["python", "c"].contains(&block.kind) && !runs {
                    let why = "nothing runs this program; quote one of a file that is run";
                    wrong.push(format!("{place}: {why}"));
                }
            }
        }
    }
    wrong
}

#[test]
fn quotes_are_in_their_files() {
    let file = |path: &str| fs::read_to_string(root().join(path)).ok();
    let pages = pages();
    let wrong: Vec<String> = pages.iter().flat_map(|page| wrong(page, file)).collect();
    assert!(wrong.is_empty(), "{wrong:#?}");
    let quotes = |page: &Page| page.blocks().iter().filter(|block| block.from.is_some()).count();
    assert!(pages.iter().map(quotes).sum::<usize>() >= 4);
}

#[test]
fn wrong_quotes_are_found() {
    let file =
        |path: &str| (path == "a.rs").then(|| "fn a() {\n    one();\n    two();\n}\n".into());
    let wrong =
        |text: &str| wrong(&Page { path: "docs/x.md".into(), text: text.into() }, file).join("\n");
    assert_eq!(wrong("<!-- from a.rs -->\n```rust\none();\ntwo();\n```\n"), "");
    assert_eq!(
        wrong("<!-- from a.rs -->\n\n```rust\none();\n}\n```\n"),
        "docs/x.md:3: this is not in a.rs"
    );
    assert_eq!(wrong("<!-- from a.rs -->\n```rust\n```\n"), "docs/x.md:2: this is not in a.rs");
    assert_eq!(wrong("<!-- from b.rs -->\n```c\n```\n"), "docs/x.md:2: there is no b.rs");
    // A comment that text follows belongs to no block.
    assert_eq!(wrong("<!-- from a.rs -->\ntext\n```rust\nnine();\n```\n"), "");
    for kind in ["python", "c"] {
        let found = wrong(&format!("```{kind}\n1\n```\n"));
        assert!(found.contains("nothing runs this program"), "{kind}: {found}");
    }
}

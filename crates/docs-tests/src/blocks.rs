//! Finds the code blocks of a page and makes tests of the Rust ones; `build.rs` uses it.

use std::fmt::Write as _;
use std::path::Path;

/// Kinds of code blocks that are not tests here. The tests of the crates `python` and `capi` run
/// theirs, those of `cli` the commands of `console`, and `tools/ptx --check` compiles `c++`.
const OTHER_KINDS: [&str; 7] = ["", "c", "c++", "console", "python", "text", "yaml"];

/// An open code block: the line of its fence, its kind, and its lines so far.
struct Block<'a> {
    line: usize,
    kind: &'a str,
    /// It quotes a file, which is compiled or run itself.
    quotes: bool,
    body: String,
}

/// The tests of a page, as Rust source.
///
/// # Errors
/// File and line of a code block of unknown kind, or of a block or `<!-- setup` that does not end.
pub fn tests_of(page: &Path, text: &str) -> Result<String, String> {
    let stem = page.file_stem().unwrap_or_default().to_string_lossy().replace('-', "_");
    let failure = |line: usize, why: &str| format!("{}:{line}: {why}", page.display());
    let (mut tests, mut block, mut setup) = (String::new(), None::<Block>, String::new());
    let (mut setup_from, mut quotes) = (None, false);
    for (line, text) in text.lines().enumerate().map(|(index, text)| (index + 1, text)) {
        if let Some(mut open) = block.take() {
            if text.trim() == "```" {
                let name = format!("{}_line_{}", stem.to_lowercase(), open.line);
                match open.kind {
                    _ if open.quotes => {}
                    "rust" => tests += &test(&name, true, &(setup + &open.body)),
                    "rust,no_run" => tests += &test(&name, false, &(setup + &open.body)),
                    _ => {}
                }
                setup = String::new();
            } else {
                let _ = writeln!(open.body, "{text}");
                block = Some(open);
            }
        } else if setup_from.is_some() {
            if text == "-->" {
                setup_from = None;
            } else {
                let _ = writeln!(setup, "{text}");
            }
        } else if text == "<!-- setup" {
            (setup_from, setup) = (Some(line), String::new());
        } else if let Some(kind) = text.trim_start().strip_prefix("```") {
            if !["rust", "rust,no_run"].contains(&kind) && !OTHER_KINDS.contains(&kind) {
                let why = format!(
                    "code blocks of kind {kind:?} are unknown; use rust, rust,no_run, c, \
                     c++, console, python, text or yaml"
                );
                return Err(failure(line, &why));
            }
            block = Some(Block { line, kind, quotes, body: String::new() });
            quotes = false;
        } else if !text.is_empty() {
            setup = String::new();
            quotes = text.starts_with("<!-- from ");
        }
    }
    match (block, setup_from) {
        (Some(open), _) => Err(failure(open.line, "this code block has no closing ```")),
        (_, Some(line)) => Err(failure(line, "this setup has no closing -->")),
        _ => Ok(tests),
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    fn of(text: &str) -> Result<String, String> {
        tests_of(Path::new("docs/a-page.md"), text)
    }

    #[test]
    fn rust_blocks_become_tests_after_their_setup() {
        let page = "a\n<!-- setup\nlet x = 1;\n-->\n```rust\nuse_it(x);\n```\n\
                    ```rust,no_run\nnever();\n```\n```console\n$ ls\n```\n```\n```\n```c++\n```\n";
        let tests = of(page).unwrap();
        assert_eq!(tests.matches("#[test]").count(), 2);
        assert!(tests.contains("fn a_page_line_5()"), "{tests}");
        assert!(tests.contains("let x = 1;\nuse_it(x);\n"), "{tests}");
        assert!(tests.contains("skipped: a_page_line_8"), "{tests}");
        assert!(
            !of("<!-- setup\nlet x = 1;\n-->\ntext\n```rust\n```\n").unwrap().contains("let x")
        );
    }

    #[test]
    fn quotes_are_no_tests() {
        let quote = "<!-- from a.rs -->\n```rust\nsome();\n```\n";
        assert_eq!(of(quote).unwrap(), "");
        assert_eq!(
            of(&format!("{quote}```rust\n1;\n```\n")).unwrap().matches("#[test]").count(),
            1
        );
        let apart = "<!-- from a.rs -->\ntext\n```rust\nsome();\n```\n";
        assert_eq!(of(apart).unwrap().matches("#[test]").count(), 1);
    }

    #[test]
    fn unknown_kinds_are_errors() {
        for kind in ["rust,xyz", "rust,ignore", "rsut", "rust ", "Rust", "rust,no_run,x"] {
            let why = of(&format!("text\n\n```{kind}\n```\n")).unwrap_err();
            assert!(why.starts_with("docs/a-page.md:3: ") && why.contains(kind), "{why}");
        }
        assert!(of("1. a list:\n   ```rust,xyz\n   ```\n").unwrap_err().contains(".md:2: "));
    }

    #[test]
    fn what_does_not_end_is_an_error() {
        for (page, line) in [
            ("```rust\n1\n", 1),
            ("a\n```console\n$ ls\n", 2),
            ("```\na\n```\nb\n```text\n```rust\n", 5),
            ("a\n\n<!-- setup\nlet x = 1;\n", 3),
        ] {
            let why = of(page).unwrap_err();
            assert!(why.starts_with(&format!("docs/a-page.md:{line}: ")), "{why}");
        }
    }
}

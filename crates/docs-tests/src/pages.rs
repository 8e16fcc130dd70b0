//! The pages of the repository, as the checks of links and code blocks read them.

use std::fs;
use std::path::{Path, PathBuf};

/// A page: its path from the root of the repository, and its text.
pub struct Page {
    pub path: String,
    pub text: String,
}

/// A code block: the line of its fence, its kind, the file that it quotes, its lines.
pub struct Block<'a> {
    pub line: usize,
    pub kind: &'a str,
    pub from: Option<&'a str>,
    pub body: Vec<&'a str>,
}

/// The comment before a block that quotes a file: `<!-- from crates/a/b.rs -->`.
pub fn quoted_file(line: &str) -> Option<&str> {
    Some(line.trim().strip_prefix("<!-- from ")?.strip_suffix("-->")?.trim())
}

impl Page {
    /// The lines outside of code blocks, with their numbers.
    pub fn prose(&self) -> Vec<(usize, &str)> {
        let (mut prose, mut in_code) = (Vec::new(), false);
        for (number, line) in self.text.lines().enumerate() {
            let fence = line.trim_start().starts_with("```");
            in_code ^= fence;
            if !in_code && !fence {
                prose.push((number + 1, line));
            }
        }
        prose
    }

    /// The code blocks.
    pub fn blocks(&self) -> Vec<Block<'_>> {
        let (mut blocks, mut open, mut from) = (Vec::new(), None::<Block<'_>>, None);
        for (number, line) in self.text.lines().enumerate() {
            match (&mut open, line.trim_start().strip_prefix("```")) {
                (Some(_), Some(_)) => blocks.extend(open.take()),
                (Some(block), None) => block.body.push(line),
                (None, Some(kind)) => {
                    let from = from.take();
                    open = Some(Block { line: number + 1, kind, from, body: Vec::new() });
                }
                (None, None) if line.is_empty() => {}
                (None, None) => from = quoted_file(line),
            }
        }
        blocks
    }
}

/// The root of the repository.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The Markdown pages of the root, of docs/, and of each crate.
pub fn pages() -> Vec<Page> {
    let mut found = Vec::new();
    for folder in ["", "docs", "docs/notes"] {
        found.extend(in_folder(folder));
    }
    for entry in fs::read_dir(root().join("crates")).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        found.extend(in_folder(&format!("crates/{name}")));
    }
    assert!(found.len() > 40, "{} pages", found.len());
    found
}

fn in_folder(folder: &str) -> Vec<Page> {
    let mut pages = Vec::new();
    for entry in fs::read_dir(root().join(folder)).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        if Path::new(&name).extension().is_some_and(|ending| ending == "md") {
            let path = Path::new(folder).join(name).to_str().unwrap().to_owned();
            pages.push(Page { text: fs::read_to_string(root().join(&path)).unwrap(), path });
        }
    }
    pages.sort_by(|a, b| a.path.cmp(&b.path));
    pages
}

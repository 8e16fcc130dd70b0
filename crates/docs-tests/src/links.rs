//! Relative links and anchors of all pages lead somewhere, by GitHub's rules. (`tools/book` checks
//! those of the book by MkDocs'.)

use std::path::{Component, Path, PathBuf};

use crate::pages::{Page, pages, root};

/// The targets of links and images in a line, without inline code.
fn targets(line: &str) -> Vec<String> {
    // Inside of backquotes nothing is a link; every second part is inside.
    let prose: String = line.split('`').step_by(2).collect();
    let parts = prose.split("](").skip(1);
    parts.filter_map(|part| Some(part.split_once(')')?.0.to_owned())).collect()
}

/// The anchors of a page's headings, as GitHub makes them: lower case, no punctuation, hyphens for
/// spaces, and a number where one comes again.
fn anchors(page: &Page) -> Vec<String> {
    let mut anchors: Vec<String> = Vec::new();
    for (_, line) in page.prose() {
        let text = line.trim_start_matches('#');
        if text.len() == line.len() || !text.starts_with(' ') {
            continue;
        }
        let kept = |c: &char| c.is_alphanumeric() || " -_".contains(*c);
        let slug: String = text.trim().to_lowercase().chars().filter(kept).collect();
        let slug = slug.replace(' ', "-");
        let before = anchors.iter().filter(|anchor| **anchor == slug).count();
        anchors.push(if before == 0 { slug } else { format!("{slug}-{before}") });
    }
    anchors
}

/// A path without `.` and `..`.
fn normal(path: &Path) -> PathBuf {
    let mut normal = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => assert!(normal.pop(), "{path:?} leaves the repository"),
            Component::CurDir => {}
            part => normal.push(part),
        }
    }
    normal
}

/// What is wrong with the links of these pages; `exists` knows the files of the repository.
fn broken(pages: &[Page], exists: impl Fn(&Path) -> bool) -> Vec<String> {
    let mut broken = Vec::new();
    for page in pages {
        for (number, line) in page.prose() {
            for target in targets(line) {
                if target.contains("://") || target.starts_with("mailto:") {
                    continue;
                }
                let (file, anchor) = target.split_once('#').unwrap_or((&target, ""));
                let folder = Path::new(&page.path).parent().unwrap();
                let path = match file {
                    "" => PathBuf::from(&page.path),
                    file => normal(&folder.join(file)),
                };
                let place = format!("{}:{number}: {target}", page.path);
                if !exists(&path) {
                    broken.push(format!("{place}: there is no {}", path.display()));
                    continue;
                }
                let there = pages.iter().find(|page| Path::new(&page.path) == path);
                let there = there.map(anchors).unwrap_or_default();
                if !anchor.is_empty() && !there.iter().any(|known| known == anchor) {
                    broken.push(format!("{place}: {} has no such heading", path.display()));
                }
            }
        }
    }
    broken
}

#[test]
fn links_lead_somewhere() {
    let broken = broken(&pages(), |path| root().join(path).exists());
    assert!(broken.is_empty(), "{broken:#?}");
}

#[test]
fn broken_links_are_found() {
    let page = |path: &str, text: &str| Page { path: path.into(), text: text.into() };
    let pages = [
        page("README.md", "# A `b`: c's\n[x](docs/y.md#two--three) ![i](docs/i.svg)\n[a](#a-b-cs)"),
        page("docs/y.md", "## Two & three\n## Same\n## Same\n[r](../README.md) [s](#same-1)"),
    ];
    let exists =
        |path: &Path| ["README.md", "docs/y.md", "docs/i.svg"].contains(&path.to_str().unwrap());
    assert_eq!(broken(&pages, exists), Vec::<String>::new());
    for (text, why) in [
        ("[x](docs/z.md)", "README.md:1: docs/z.md: there is no docs/z.md"),
        ("a\n\n![x](i.svg)", "README.md:3: i.svg: there is no i.svg"),
        ("[x](docs/y.md#three)", "README.md:1: docs/y.md#three: docs/y.md has no such heading"),
        ("[x](#nothing)", "README.md:1: #nothing: README.md has no such heading"),
        ("[one](docs/y.md), [x](docs/y.md#same-2)", "docs/y.md has no such heading"),
    ] {
        let pages = [page("README.md", text), page("docs/y.md", &pages[1].text)];
        let found = broken(&pages, exists);
        assert!(found.len() == 1 && found[0].contains(why), "{text}: {found:?}");
    }
    let code = [page("README.md", "```\n[x](nowhere)\n```\n`[x](nowhere)` [w](https://a.b/c)")];
    assert_eq!(broken(&code, exists), Vec::<String>::new());
}

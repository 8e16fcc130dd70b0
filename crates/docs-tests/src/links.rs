//! Relative links and anchors of all pages lead somewhere, by GitHub's rules. (`tools/book` checks
//! those of the book by MkDocs'.)

use std::path::{Component, Path, PathBuf};

use crate::pages::{Page, pages, root};

/// A line without inline code: inside of backquotes nothing is a link.
fn without_code(line: &str) -> String {
    line.split('`').step_by(2).collect() // every second part is inside
}

/// Label and target of a line that defines a reference: `[label]: target`.
fn definition(line: &str) -> Option<(&str, &str)> {
    line.strip_prefix('[')?.split_once("]: ")
}

/// The targets of links and images in a line, and that of a definition.
fn targets(line: &str) -> Vec<String> {
    let prose = without_code(line);
    let parts = prose.split("](").skip(1);
    let inline = parts.filter_map(|part| Some(part.split_once(')')?.0));
    let defined = definition(&prose).map(|(_, target)| target);
    inline.chain(defined).map(str::to_owned).collect()
}

/// The labels of references in a line: `[text][label]`.
fn references(line: &str) -> Vec<String> {
    let prose = without_code(line);
    let parts = prose.split("][").skip(1);
    parts.filter_map(|part| Some(part.split_once(']')?.0.to_owned())).collect()
}

/// What is wrong with the references of a page: those without a definition, and the reverse.
fn broken_references(page: &Page) -> Vec<String> {
    let prose = page.prose();
    let used: Vec<(usize, String)> = prose
        .iter()
        .flat_map(|(number, line)| references(line).into_iter().map(move |label| (*number, label)))
        .collect();
    let defined: Vec<(usize, &str)> =
        prose.iter().filter_map(|(number, line)| Some((*number, definition(line)?.0))).collect();
    let lost = used.iter().filter(|(_, label)| !defined.iter().any(|(_, known)| known == label));
    let lost =
        lost.map(|(number, label)| format!("{}:{number}: no definition of [{label}]", page.path));
    let idle = defined.iter().filter(|(_, label)| !used.iter().any(|(_, known)| known == label));
    let idle =
        idle.map(|(number, label)| format!("{}:{number}: no link uses [{label}]", page.path));
    lost.chain(idle).collect()
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
        broken.extend(broken_references(page));
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
        ("[`x`][y]\n[y]: docs/z.md", "README.md:2: docs/z.md: there is no docs/z.md"),
        ("[x][y]\n\n[z][y]\n[y]: docs/y.md#three", "README.md:4: docs/y.md#three: docs/y.md has"),
        ("![x][y], [z][w]\n[w]: docs/y.md", "README.md:1: no definition of [y]"),
        ("[y]: docs/y.md", "README.md:1: no link uses [y]"),
    ] {
        let pages = [page("README.md", text), page("docs/y.md", &pages[1].text)];
        let found = broken(&pages, exists);
        assert!(found.len() == 1 && found[0].contains(why), "{text}: {found:?}");
    }
    let fine = "[x][y]\n[y]: docs/y.md#same-1\n```\na[0][i]\n[z]: nowhere\n```\n`a[0][i]`";
    assert_eq!(
        broken(&[page("README.md", fine), page("docs/y.md", &pages[1].text)], exists),
        Vec::<String>::new()
    );
    let code = [page("README.md", "```\n[x](nowhere)\n```\n`[x](nowhere)` [w](https://a.b/c)")];
    assert_eq!(broken(&code, exists), Vec::<String>::new());
}

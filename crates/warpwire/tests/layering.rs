//! Rules that the compiler does not check: imports point down, unsafe code stays in listed files,
//! files stay small, comments and Markdown fit 100 columns.
#![allow(clippy::unwrap_used, clippy::expect_used)]
use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

/// Modules that every module may use.
const COMMON: [&str; 2] = ["error", "units"];

/// The only files that may lift the ban on unsafe code.
const UNSAFE_FILES: &[&str] = &[
    "agent/mod.rs",
    "hca/memory.rs",
    "host/nvml.rs",
    "ibv/mod.rs",
    "link/shm/sys.rs",
    "link/udp/sys.rs",
    "mem/bytes.rs",
    "mem/copy/mod.rs",
    "mem/cuda/mod.rs",
    "mem/share.rs",
    "mem/foreign.rs",
    "mem/sim/memory.rs",
    "mem/agent/mod.rs",
    "mem/copy_list/mod.rs",
    "mem/copy_list/queue.rs",
    "mem/device.rs",
    "mem/stream.rs",
    "mem/window.rs",
    "msg/buffer.rs",
    "msg/comm.rs",
    "mr/revocable_slot.rs",
    "mr/host.rs",
    "mr/cache.rs",
    "mr/cache/tests.rs",
    "mr/clients.rs",
    "mr/maps.rs",
    "mr/on_demand.rs",
    "mr/registry.rs",
    "mr/sync.rs",
    "mr/uffd.rs",
    "sock/sys.rs",
    "stream/hardware.rs",
    "stream/kernel/on.rs",
    "mem/mod.rs",
    "verbs/memory.rs",
    "verbs/queues.rs",
    "sync/biased.rs",
    "sync/primitives.rs",
    "sync/thread.rs",
    "verbs/mod.rs",
];

/// The same for the other crates that may have unsafe code; paths are relative to their `src`.
const UNSAFE_FILES_OF_CRATES: &[(&str, &[&str])] = &[
    ("doctor", &["trial.rs"]),
    // Pointers of C, and calls of libc without a typed wrapper.
    ("ibverbs", &["context.rs", "lib.rs", "memory.rs", "post.rs", "process.rs"]),
    ("cabi", &["interfaces.rs", "process.rs"]),
    (
        "capi",
        &["agent.rs", "block.rs", "kernel.rs", "memory.rs", "pointer.rs", "transfer.rs", "util.rs"],
    ),
    ("python", &["agent.rs", "buffer.rs", "comm.rs", "dlpack.rs", "stream.rs"]),
    (
        "nccl",
        &[
            "exports.rs",
            "gdr.rs",
            "gin/coll.rs",
            "gin/exports.rs",
            "log.rs",
            "memory.rs",
            "process.rs",
        ],
    ),
    ("rdmacm", &["addrinfo.rs", "boundary.rs", "lib.rs", "process.rs", "verbs.rs"]),
    // Each of these launches its own kernels.
    (
        "apps",
        &[
            "pattern/mod.rs",
            "pingpong/mod.rs",
            "pingpong_kernels/mod.rs",
            "programs/mod.rs",
            "serving.rs",
            "spin/mod.rs",
        ],
    ),
];

const MAX_FILE_LINES: usize = 800;
const MAX_COLUMNS: usize = 100;

fn workspace() -> PathBuf {
    // Staged binaries run on machines without the sources; then there is nothing to check.
    PathBuf::from(option_env!("CARGO_MANIFEST_DIR").unwrap_or(".")).join("../../..")
}

/// Files below a folder with one of these extensions, "" for none: path and text.
fn files(folder: &Path, extensions: &[&str]) -> Vec<(String, String)> {
    let mut found = Vec::new();
    let Ok(entries) = fs::read_dir(folder) else { return found };
    for entry in entries.flatten() {
        let path = entry.path();
        if path.is_dir() {
            found.extend(files(&path, extensions));
        } else if extensions
            .iter()
            .any(|known| path.extension().map_or(known.is_empty(), |has| has == *known))
        {
            found.push((path.display().to_string(), fs::read_to_string(&path).unwrap()));
        }
    }
    found
}

fn sources(folder: &Path) -> Vec<(String, String)> {
    files(folder, &["rs"])
}

/// The sources of a crate, each with its path below `src`.
fn crate_sources(name: &str) -> Vec<(String, String)> {
    let root = workspace().join("crates").join(name).join("src");
    let prefix = format!("{}/", root.display());
    let strip = |(path, text): (String, String)| (path.replace(&prefix, ""), text);
    sources(&root).into_iter().map(strip).collect()
}

fn library() -> Vec<(String, String)> {
    crate_sources("warpwire")
}

/// The layers of the table in `lib.rs`, top first; modules on one line are side by side.
fn layers(lib: &str) -> Vec<Vec<String>> {
    let table = lib.split("//! ```text\n").nth(1).and_then(|rest| rest.split("//! ```").next());
    let lines = table.expect("lib.rs has the table of layers").lines();
    let names = |line: &str| -> Vec<String> {
        let words = line.trim_start_matches("//! ").split("  ").next().unwrap_or_default();
        words
            .split('|')
            .map(|name| name.trim().to_owned())
            .filter(|name| !name.is_empty())
            .collect()
    };
    lines.map(names).filter(|names| !names.is_empty()).collect()
}

/// Every module that the text names by a path from the crate's root.
fn imports(text: &str) -> Vec<String> {
    let code: String = text
        .lines()
        .filter(|line| !line.trim_start().starts_with("//"))
        .flat_map(|line| [line, "\n"])
        .collect();
    let names = code.split("crate::").skip(1).map(|rest| {
        rest.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect::<String>()
    });
    names.filter(|name| name.chars().next().is_some_and(char::is_lowercase)).collect()
}

/// Imports of one file that do not point to a lower layer.
fn upward_imports(layers: &[Vec<String>], module: &str, text: &str) -> Vec<String> {
    let level =
        |name: &str| layers.iter().position(|names| names.iter().any(|known| known == name));
    let Some(mine) = level(module) else {
        return vec![format!("module {module:?} is not in the table")];
    };
    let wrong = imports(text).into_iter().filter(|name| {
        let common = COMMON.contains(&name.as_str()) || name == module;
        !common && level(name).is_some_and(|theirs| theirs <= mine)
    });
    wrong.map(|name| format!("{module} imports {name}")).collect()
}

#[test]
fn imports_point_down() {
    let library = library();
    let Some((_, lib)) = library.iter().find(|(path, _)| path == "lib.rs") else { return };
    let layers = layers(lib);
    assert!(layers.len() >= 3, "{layers:?}");
    let mut wrong = Vec::new();
    for (path, text) in &library {
        let module = path.split(['/', '.']).next().unwrap_or_default();
        if module != "lib" && !COMMON.contains(&module) {
            wrong.extend(
                upward_imports(&layers, module, text)
                    .into_iter()
                    .map(|what| format!("{path}: {what}")),
            );
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn the_check_notices_an_upward_import() {
    let layers = layers("//! ```text\n//! top      x\n//! left | right  y\n//! low   z\n//! ```\n");
    assert_eq!(layers.len(), 3);
    assert_eq!(
        upward_imports(&layers, "top", "use crate::low::X;\nuse crate::error::E;"),
        Vec::<String>::new()
    );
    assert_eq!(upward_imports(&layers, "low", "use crate::top::X;"), ["low imports top"]);
    assert_eq!(
        upward_imports(&layers, "left", "let x = crate::right::f();"),
        ["left imports right"]
    );
    assert_eq!(upward_imports(&layers, "low", "/// see crate::top::X"), Vec::<String>::new());
    assert_eq!(upward_imports(&layers, "attic", "").len(), 1);
}

#[test]
fn unsafe_code_stays_in_listed_files() {
    let allows_unsafe = |text: &str| text.contains("allow(unsafe_code)");
    let mut outside = Vec::new();
    for (package, allowed) in [("warpwire", UNSAFE_FILES)].iter().chain(UNSAFE_FILES_OF_CRATES) {
        for (path, text) in crate_sources(package) {
            if allows_unsafe(&text) && !allowed.contains(&path.as_str()) {
                outside.push(format!("{package}: {path}"));
            }
        }
    }
    assert!(outside.is_empty(), "{outside:?} allow unsafe code: list them here or avoid it");
}

#[test]
fn files_stay_small() {
    let of = |folder: &str| sources(&workspace().join(folder));
    let long: Vec<_> = of("crates")
        .into_iter()
        .chain(of("examples"))
        .map(|(path, text)| (text.lines().count(), path))
        .filter(|(lines, _)| *lines > MAX_FILE_LINES)
        .collect();
    assert!(long.is_empty(), "{long:?} have more than {MAX_FILE_LINES} lines");
}

/// Whether a line, marks of a comment aside, is one word that cannot be wrapped: a URL, or the
/// target of a reference, `[label]: target`.
fn is_one_target(line: &str) -> bool {
    let text =
        line.trim_start_matches(|c: char| c.is_whitespace() || "/!#*".contains(c)).trim_end();
    let definition = text.strip_prefix('[').and_then(|rest| rest.split_once("]: "));
    let target = definition.map_or(text, |(_, target)| target);
    let url = ["https://", "http://"].iter().any(|scheme| target.starts_with(scheme));
    (url || definition.is_some()) && !target.contains(char::is_whitespace)
}

/// Whether a line exceeds the width; the targets of links count.
fn is_wide(line: &str) -> bool {
    line.chars().count() > MAX_COLUMNS && !is_one_target(line)
}

/// Whether a line is a comment or ends with one, in a language whose comments begin with these
/// marks.
fn has_comment(line: &str, marks: &[&str]) -> bool {
    let begins = marks.iter().any(|mark| line.trim_start().starts_with(mark));
    // Inside of a comment, `* ` begins a line; after code it is a product.
    begins
        || marks.iter().filter(|mark| **mark != "* ").any(|mark| {
            // A mark after an odd number of quotes is inside of a string.
            let trailing = format!(" {mark} ");
            line.match_indices(&trailing)
                .any(|(at, _)| line[..at].matches('"').count().is_multiple_of(2))
        })
}

/// Lines with comments that exceed the width, in languages whose comments begin with these marks.
fn wide_comments(text: &str, marks: &[&str]) -> Vec<usize> {
    let lines = text.lines().enumerate();
    let wide = lines.filter(|(_, line)| is_wide(line) && has_comment(line, marks));
    wide.map(|(number, _)| number + 1).collect()
}

/// The same for scripts and manifests, where the docstrings of Python count too.
fn wide_script_comments(text: &str) -> Vec<usize> {
    let (mut wide, mut in_docstring) = (wide_comments(text, &["#"]), false);
    for (number, line) in text.lines().enumerate() {
        let quotes = line.matches("\"\"\"").count();
        if (in_docstring || quotes > 0) && is_wide(line) {
            wide.push(number + 1);
        }
        in_docstring ^= quotes % 2 == 1;
    }
    wide
}

/// Lines of Markdown that exceed the width: prose and tables, not code blocks.
fn wide_markdown(text: &str) -> Vec<usize> {
    let (mut wide, mut in_code) = (Vec::new(), false);
    for (number, line) in text.lines().enumerate() {
        in_code ^= line.trim_start().starts_with("```");
        if !in_code && is_wide(line) {
            wide.push(number + 1);
        }
    }
    wide
}

/// Lines of any kind that exceed the width.
fn wide_lines(text: &str) -> Vec<usize> {
    let wide = text.lines().enumerate().filter(|(_, line)| is_wide(line));
    wide.map(|(number, _)| number + 1).collect()
}

/// Scripts, manifests, lists and descriptions of machines, whose comments begin with `#`.
fn scripts() -> Vec<(String, String)> {
    let mut found = Vec::new();
    for folder in ["crates", "examples"] {
        found.extend(files(&workspace().join(folder), &["toml", "py", "pyi", "sh", "machine"]));
    }
    for folder in ["tools", "bench", ".ci", "fuzz/seeds", "packaging"] {
        found.extend(files(&workspace().join(folder), &["", "py", "sh", "txt"]));
    }
    found.extend(named(&["ci.sh", "Cargo.toml", "clippy.toml", "rustfmt.toml", "mkdocs.yml"]));
    found.extend(named(&["fuzz/Cargo.toml", "fuzz/libfuzzer/Cargo.toml"]));
    found
}

/// These files of the workspace, if they exist.
fn named(names: &[&str]) -> Vec<(String, String)> {
    let read =
        |name: &&str| Some(((*name).to_owned(), fs::read_to_string(workspace().join(name)).ok()?));
    names.iter().filter_map(read).collect()
}

#[test]
fn comments_and_markdown_fit_the_width() {
    let mut wide = Vec::new();
    let mut add = |path: &str, lines: Vec<usize>| {
        wide.extend(lines.into_iter().map(|line| format!("{path}:{line}")));
    };
    let code = ["rs", "cu", "cuh", "hpp", "cpp", "c", "h"];
    for folder in ["crates", "examples", "include", "fuzz", "tools", "bench"] {
        for (path, text) in files(&workspace().join(folder), &code) {
            add(&path, wide_comments(&text, &["//", "/*", "* "]));
        }
    }
    for (path, text) in scripts() {
        add(&path, wide_script_comments(&text));
    }
    let roots = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"];
    let mut pages = named(&roots);
    pages.extend(files(&workspace().join("docs"), &["md"]));
    pages.extend(files(&workspace().join("crates"), &["md"]));
    for (path, text) in pages {
        add(&path, wide_markdown(&text));
    }
    for (path, text) in files(&workspace().join("docs/diagrams"), &["txt"]) {
        add(&path, wide_lines(&text));
    }
    assert!(wide.is_empty(), "wider than {MAX_COLUMNS} columns: {wide:#?}");
}

#[test]
fn the_check_notices_wide_lines() {
    let (long, none) = ("x".repeat(MAX_COLUMNS), Vec::<usize>::new());
    let code = format!("// {long}\nlet y = \"{long}\";\n    /// {long}\n/* {long} */");
    assert_eq!(wide_comments(&code, &["//", "/*"]), [1, 3, 4]);
    let code = format!("f(\"{long}\"); // x\nf(\" // {long}\");\nx = y * \"{long}\"; /* x */");
    assert_eq!(wide_comments(&code, &["//", "/*", "* "]), [1, 3]);
    let code = format!("/// https://example.org/{long}\n// see https://example.org/{long}");
    assert_eq!(wide_comments(&code, &["//"]), [2]);
    let script = format!("# {long}\ny = \"{long}\"\n\"\"\"{long}\n{long}y\n\"\"\"\ny = {long}");
    assert_eq!(wide_script_comments(&script), [1, 3, 4]);
    let page = format!("{long}y\n```\n{long}y\n```\n| {long} |\n{long}y");
    assert_eq!(wide_markdown(&page), [1, 5, 6]);
    let page = format!("[a page](https://example.org/{long})\n[a]: b/{long} \"c\"\n[a]: b {long}");
    assert_eq!(wide_markdown(&page), [1, 2, 3]);
    let page =
        format!("https://example.org/{long}\n[a page]: https://example.org/{long}\n[a]: b/{long}");
    assert_eq!(wide_markdown(&page), none);
    assert_eq!(wide_lines(&format!("{long}\n{long}y")), [2]);
}

/// The names of the types and traits that a file declares `pub`; not of aliases.
fn public_types(text: &str) -> Vec<&str> {
    let names = text.lines().filter_map(|line| {
        let declared = line.trim_start().strip_prefix("pub ")?;
        let kinds = ["struct ", "enum ", "trait ", "union "];
        let rest = kinds.iter().find_map(|kind| declared.strip_prefix(kind))?;
        rest.split(|c: char| !c.is_alphanumeric() && c != '_').next()
    });
    names.collect()
}

#[test]
fn no_two_public_types_have_one_name() {
    let mut seen: HashMap<String, String> = HashMap::new();
    let mut twice = Vec::new();
    for name in ["proto", "warpwire", "doctor", "apps"] {
        // `ibv` mirrors libibverbs below `verbs`, with the same names; it is not part of the API.
        for (path, text) in crate_sources(name) {
            if name == "warpwire" && path.starts_with("ibv/") {
                continue;
            }
            for found in public_types(&text) {
                let path = format!("{name}/{path}");
                if let Some(other) = seen.insert(found.to_owned(), path.clone()) {
                    twice.push(format!("{found}: {other} and {path}"));
                }
            }
        }
    }
    assert!(twice.is_empty(), "one concept, one type, one name: {twice:#?}");
}

/// Public structs of options in a file that a program could build with a literal, so that a new
/// field would break it, or whose fields it could not set.
fn closed_options(text: &str) -> Vec<&str> {
    let options = public_types(text).into_iter().filter(|name| {
        name.ends_with("Options") || name.ends_with("Config") || *name == "QpAttributes"
    });
    let grows = |name: &&str| {
        let open = text.contains(&format!("#[non_exhaustive]\npub struct {name} {{"));
        open && text.contains(&format!("setters! {{\n    {name} {{"))
    };
    options.filter(|name| !grows(name)).collect()
}

#[test]
fn options_can_grow() {
    for name in ["proto", "warpwire"] {
        for (path, text) in crate_sources(name) {
            let closed = if path.starts_with("ibv/") { vec![] } else { closed_options(&text) };
            assert!(closed.is_empty(), "{name}/{path}: {closed:?} need non_exhaustive, setters!");
        }
    }
    assert_eq!(closed_options("pub struct XOptions {\n}\n#[non_exhaustive]"), ["XOptions"]);
}

#[test]
fn the_check_notices_public_types() {
    let text =
        "pub struct Qp<'a> {\n    pub enum Opcode {\npub(crate) struct No;\npub type Cq = u8;";
    assert_eq!(public_types(text), ["Qp", "Opcode"]);
}

#[test]
fn the_protocol_crate_imports_nothing() {
    let Ok(manifest) = fs::read_to_string(workspace().join("crates/proto/Cargo.toml")) else {
        return;
    };
    let after = manifest.split_once("[dependencies]").map_or("", |(_, after)| after);
    let own = after.split("\n[").next().unwrap_or_default().lines();
    for line in own.filter(|line| line.contains('=') && !line.starts_with('#')) {
        assert!(line.contains("optional = true"), "warpwire-proto needs nothing, but: {line}");
    }
}

//! The commands of README.md and docs/*.md run: each line of a `console` block that begins with `$`
//! is an example of a help page (`examples.rs`), has an entry in the tables below, or fails this
//! test.
//!
//! Where a page shows the output of a program that prints the same everywhere, it is compared,
//! numbers aside.
//!
//! Under `cargo test` the commands of README.md and docs/start.md run, under `./ci.sh` all.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use testkit::Effort;

use crate::examples::How::{self, Client, Run, Serve, Skip};
use crate::examples::{BRIEF_PERF, Bench, Edits, GPU, TABLE};

enum Page {
    /// As an example of a help page.
    Like(How),
    /// A program whose output stands below the command, with these arguments added.
    Shows(Edits, &'static str),
}
use Page::{Like, Shows};

const DEMO: Edits = &[("cargo run --release --", "warpwire")];
const SEND_RECV: Edits =
    &[("cargo run -q -p examples --example 15_send_recv", "{examples}/15_send_recv")];
const RANKS: Edits =
    &[("target/debug/warpwire", "warpwire"), ("target/debug/examples", "{examples}")];
const SIMILAR: &str =
    "warpwire sock similar -d sim:0 --family warp --vectors 500 --dimension 128 --bind 127.0.0.1:0";

/// Commands of the pages that are not examples of a help page.
const COMMANDS: &[(&str, Page)] = &[
    ("cargo run --release -- demo", Shows(DEMO, "--size 64KiB")),
    ("cargo run -q -p examples --example 15_send_recv", Shows(SEND_RECV, "")),
    ("target/debug/warpwire run -n 2 -- target/debug/examples/16_ranks", Shows(RANKS, "")),
    (
        "WARPWIRE_SIM=gpus=4,copy_delay=1ms cargo run --release -- demo",
        Like(Run(DEMO, "--size 64KiB")),
    ),
    ("warpwire mp sendrecv --mem sim:0 --json", Like(Run(&[], "-n 3 -s 8"))),
    ("warpwire mp pingpong --mem cuda:0 --kernel 20us", Like(GPU)),
    (
        "warpwire run -n 2 --link udp warpwire mp putget -s 64KiB,1MiB",
        Like(Run(&[("64KiB,1MiB", "8")], "-n 5")),
    ),
    ("warpwire mp broadcast -n 4 -r 1", Like(Run(&[], "-b 8 -e 64 --iters 3"))),
    ("warpwire perf write bw --local -s 64K", Like(Run(&[], BRIEF_PERF))),
    ("warpwire perf write lat --local -s 8 --cpu_util | tail -2", Like(Run(&[], BRIEF_PERF))),
    ("warpwire stat --all -c 1", Like(How::Watch(&[], ""))),
    (
        "warpwire sock kv --bind 127.0.0.1:6379",
        Like(Serve(&[("127.0.0.1:6379", "127.0.0.1:0")], "")),
    ),
    (
        "warpwire sock serve --service http --bind 127.0.0.1:8080",
        Like(Serve(&[("127.0.0.1:8080", "127.0.0.1:0")], "")),
    ),
    (
        "warpwire sock similar --family warp --vectors 10000 --dimension 128",
        Like(Serve(&[("10000", "500")], "--bind 127.0.0.1:0")),
    ),
    (
        "warpwire sock similar --family warp --vectors 10000 --dimension 128 --connect 127.0.0.1:7001 -n 400",
        Like(Client(
            SIMILAR,
            &[("10000", "500"), ("127.0.0.1:7001", "{address}"), ("400", "20")],
            "",
        )),
    ),
];

/// How commands begin that this test does not run, and why.
const NOT_HERE: &[(&str, &str)] = &[
    ("./ci.sh", "this test is a part of it"),
    ("tools/", "./ci.sh has steps for the tools"),
    ("bench/lines/run", "step lines of ./ci.sh runs it"),
    ("stage/", "needs a GPU machine"),
    ("WARPWIRE_SIM=fail=", "fails on purpose; crates/cli/tests/cli.rs tests it"),
    ("cargo build", "./ci.sh builds"),
    ("cargo run --release -p examples --example", "step demo of ./ci.sh runs examples"),
    ("WARPWIRE_EFFORT=change cargo test", "./ci.sh runs the suites"),
    ("WARPWIRE_SOAK=", "./ci.sh runs the suites"),
    ("WARPWIRE_SEED=", "./ci.sh runs the suites"),
    ("target/debug/examples/15_send_recv", "needs two machines; runs as one command above"),
    ("python3 crates/python/examples/", "tools/python-tests runs it"),
    ("warpwire verbs --libraries", "tools/ibverbs-clients runs such programs"),
    ("warpwire nccl --libraries", "needs a GPU and NCCL"),
    ("eval \"$(warpwire nccl --libraries", "needs a GPU and NCCL"),
    ("torchrun", "needs PyTorch"),
    ("NCCL_GDRCOPY_ENABLE=1", "needs a GPU and NCCL"),
    ("export PKG_CONFIG_PATH=", "crates/capi/tests/c_api.rs compiles the program"),
    ("cc hello.c", "crates/capi/tests/c_api.rs compiles the program"),
    ("pip install nixl", "tools/nixl-test installs it"),
    ("S=$(python3 -c", "tools/nixl-test installs it"),
    ("NIXL_PLUGIN_DIR=", "tools/nixl-test runs the program; servers need a GPU"),
    ("sudo apt-get install ./packages", "tools/stranger installs them in a clean root"),
    ("tar xzf dist/warpwire", "tools/stranger unpacks it in a clean root"),
    ("warpwire doctor --brief --require gpudirect", "fails without a GPU; the tests of doctor do"),
    ("docker", "no container engine; tools/containerfile runs the steps"),
    ("redis-cli", "tools/sock-clients runs it"),
    ("curl", "tools/sock-clients runs it"),
];

/// A command of a page, and the lines that the page shows below it.
struct Shown {
    page: String,
    command: String,
    output: Vec<String>,
}

/// The lines of a page without indentation; one that ends with a backslash continues on the next.
fn joined(text: &str) -> Vec<String> {
    let mut lines = Vec::<String>::new();
    for line in text.lines().map(str::trim) {
        match lines.last_mut() {
            Some(last) if last.ends_with('\\') => {
                last.pop();
                last.push_str(line);
            }
            _ => lines.push(line.to_owned()),
        }
    }
    lines
}

/// The commands of the `console` blocks of a page: after `$`, before a comment or `&`.
fn commands(page: &str, text: &str) -> Vec<Shown> {
    let (mut found, mut kind) = (Vec::<Shown>::new(), None);
    for line in joined(text).iter().map(String::as_str) {
        match (line.strip_prefix("```"), &kind) {
            (Some(name), None) => kind = Some(name.to_owned()),
            (Some(_), Some(_)) => kind = None,
            (None, Some(name)) if name == "console" => match line.split_once("$ ") {
                Some((prompt, rest)) if prompt.chars().all(char::is_alphanumeric) => {
                    let rest = rest.split("  ").next().unwrap().trim_end_matches([' ', '&']);
                    let (page, command) = (page.to_owned(), rest.to_owned());
                    found.push(Shown { page, command, output: Vec::new() });
                }
                _ => found.last_mut().unwrap().output.push(line.to_owned()),
            },
            _ => {}
        }
    }
    found
}

fn pages() -> Vec<Shown> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut paths = vec![root.join("README.md")];
    paths.extend(fs::read_dir(root.join("docs")).unwrap().map(|entry| entry.unwrap().path()));
    paths.retain(|path| path.extension().is_some_and(|ending| ending == "md"));
    paths.sort();
    let name = |path: &PathBuf| path.file_name().unwrap().to_string_lossy().into_owned();
    let of = |path: &PathBuf| commands(&name(path), &fs::read_to_string(path).unwrap());
    paths.iter().flat_map(of).collect()
}

/// Lines without what differs between runs: numbers, units, rules, spaces, the order of lines.
fn normal<'a>(lines: impl Iterator<Item = &'a str>) -> BTreeSet<String> {
    let varies = |word: &str| {
        let rest = word.trim_start_matches(|c: char| c.is_ascii_digit() || c == '.');
        ["", "KiB", "MiB", "GiB", "B"].contains(&rest) || rest.starts_with("---")
    };
    let words = |line: &'a str| {
        let words: Vec<&str> = line.split_whitespace().filter(|word| !varies(word)).collect();
        words.join(" ")
    };
    lines.map(words).filter(|line| !line.is_empty()).collect()
}

/// Runs a program and compares what it prints with the page.
fn compare(bench: &Bench, shown: &Shown, edits: Edits, more: &str) {
    let examples = Path::new(env!("CARGO_BIN_EXE_warpwire")).parent().unwrap().join("examples");
    let examples = examples.display().to_string();
    let line = bench.line(&shown.command, edits, more, &[("examples", &examples)]);
    let program = line.split_whitespace().find(|word| word.starts_with(&examples));
    if let Some(program) = program.filter(|program| !Path::new(program).exists()) {
        println!(
            "skipped: {} ({program} is not built; cargo test --workspace does)",
            shown.command
        );
        return;
    }
    let printed = bench.finish(&line);
    if printed.contains("cuda:0") {
        println!("skipped: the output of {} (this machine has a GPU)", shown.command);
        return;
    }
    let wanted = normal(shown.output.iter().map(String::as_str));
    assert_eq!(normal(printed.lines()), wanted, "{} shows another output of {line}", shown.page);
}

#[test]
fn commands_of_the_pages_run() {
    let bench = Bench::new(5);
    let (mut untested, mut used) = (Vec::new(), BTreeSet::new());
    for shown in pages() {
        let command = shown.command.as_str();
        if TABLE.iter().any(|(known, _)| *known == command) {
            continue;
        }
        if let Some((known, page)) = COMMANDS.iter().find(|(known, _)| *known == command) {
            let first = used.insert(*known);
            let now = ["README.md", "start.md"].contains(&shown.page.as_str());
            match page {
                _ if !now && Effort::current() == Effort::Quick => {}
                Shows(edits, more) => compare(&bench, &shown, edits, more),
                Like(how) if first => bench.test(command, how),
                Like(_) => {}
            }
            continue;
        }
        match NOT_HERE.iter().find(|(begin, _)| command.starts_with(begin)) {
            Some((begin, why)) => {
                used.insert(*begin);
                bench.test(command, &Skip(why));
            }
            None => untested.push(format!("{}: {command}", shown.page)),
        }
    }
    assert!(untested.is_empty(), "not in the tables of this test: {untested:#?}");
    let known =
        COMMANDS.iter().map(|(known, _)| known).chain(NOT_HERE.iter().map(|(known, _)| known));
    let stale: Vec<_> = known.filter(|known| !used.contains(*known)).collect();
    assert!(stale.is_empty(), "no page has them any more: {stale:#?}");
}

#[test]
fn commands_and_outputs_are_found() {
    let text = "```console\n$ warpwire a --b &       # why\n1 line\n\none$ warpwire c | head\n```\n\
                ```text\n$ no\n```\n  ```console\n  $ d \\\n      -e \\\n      -f  # g\n  ```\n";
    let found = commands("x.md", text);
    let names: Vec<_> = found.iter().map(|shown| shown.command.as_str()).collect();
    assert_eq!(names, ["warpwire a --b", "warpwire c | head", "d -e -f"]);
    assert_eq!(found[0].output, ["1 line", ""]);
    let set = |text: &str| normal(text.lines());
    assert_eq!(set("----\nb\na  64 KiB 1.5 us"), set("a 1 MiB 22.75  us\n\nb"));
    assert_ne!(set("a ok"), set("a WRONG"));
    assert_ne!(set("a\nb"), set("a"));
}

use super::data::{Machine, PeerRow, Point, Verdict};
use super::*;

fn figure(kind: Kind, name: &str, peer: bool, values: &[f64]) -> Figure {
    let point = |(at, value): (usize, &f64)| Point {
        bytes: 8 << (3 * at),
        value: *value,
        range: Some((*value / 2.0, *value * 2.0)),
    };
    let points: Vec<_> = values.iter().enumerate().map(point).collect();
    let skipped = points.is_empty().then(|| "no <device> & \"no\" driver".to_owned());
    let (name, command) = (name.to_owned(), format!("warpwire perf --name '{name}'"));
    Figure { kind, name, peer, command, points, skipped }
}

fn report() -> Report {
    let row = |name: &str, kind: &str, ours, samples| PeerRow {
        name: name.to_owned(),
        kind: kind.to_owned(),
        ours,
        samples,
        skipped: None,
    };
    let mut figures: Vec<Figure> =
        Kind::ALL.map(|kind| figure(kind, "shared memory", false, &[1.5, 2.0, 40.0])).into();
    figures.push(figure(Kind::Latency, "UCX <tcp>", true, &[20.0]));
    figures.push(figure(Kind::Bandwidth, "mlx5_0", false, &[]));
    Report {
        format: FORMAT,
        date: "2026-11-13T08:30:00Z".to_owned(),
        version: "warpwire 0.2.0".to_owned(),
        command: "warpwire report --out a&b.html".to_owned(),
        seconds: 41.0,
        machine: Machine {
            host: "<node>\u{1b}".to_owned(),
            cores: 2,
            facts: vec![("CPU".to_owned(), "A & B".to_owned())],
            busy: Some(0.5),
        },
        verdicts: vec![Verdict {
            capability: "GPU".to_owned(),
            answer: "no".to_owned(),
            text: "there is none".to_owned(),
        }],
        figures,
        peers: Some(Peers {
            columns: vec!["lat 8 B [us]".to_owned()],
            setting: "5 rounds".to_owned(),
            rows: vec![
                row("warpwire udp", "net", true, vec![vec![3.0, 1.0, 2.0]]),
                row("UCX tcp", "net", false, vec![vec![]]),
            ],
        }),
    }
}

/// The elements of a page, in order; panics where it is not well-formed XML.
fn elements(page: &str) -> Vec<String> {
    let body = page.strip_prefix("<!DOCTYPE html>\n").unwrap();
    let (mut open, mut seen) = (Vec::<String>::new(), Vec::new());
    let mut rest = body;
    while let Some(at) = rest.find('<') {
        let text = &rest[..at];
        assert!(!text.contains('>') || open.last().is_some_and(|name| name == "style"), "{text}");
        for entity in text.split('&').skip(1) {
            let names = ["amp;", "lt;", "gt;", "quot;"];
            assert!(names.iter().any(|name| entity.starts_with(name)), "&{entity}");
        }
        let end = at + rest[at..].find('>').unwrap();
        let tag = &rest[at + 1..end];
        rest = &rest[end + 1..];
        if let Some(name) = tag.strip_prefix('/') {
            assert_eq!(open.pop().as_deref(), Some(name), "closed out of order");
            continue;
        }
        let name = tag.split([' ', '/']).next().unwrap().to_owned();
        assert_eq!(tag.matches('"').count() % 2, 0, "<{tag}>");
        seen.push(name.clone());
        if !tag.ends_with('/') {
            open.push(name);
        }
    }
    assert!(open.is_empty(), "not closed: {open:?}");
    assert_eq!(rest.trim(), "");
    seen
}

#[test]
fn the_page_is_well_formed_and_has_every_section() {
    let page = page::html(&report());
    let elements = elements(&page);
    for id in ["machine", "verdicts", "rdma", "copies", "round-trips", "peers", "method"] {
        assert!(page.contains(&format!("<h2 id=\"{id}\">")), "{id}");
    }
    // Plots, and samples of lines in legends.
    assert!(elements.iter().filter(|name| *name == "svg").count() >= 5);
    assert!(page.contains("2.00 <span class=\"faint\">(1.00–3.00)</span>"), "median of samples");
    assert!(page.contains("not measured: no &lt;device&gt; &amp; &quot;no&quot; driver"));
    assert!(page.contains("UCX &lt;tcp&gt;") && page.contains("&lt;node&gt;\u{fffd}"));
    assert!(page.contains("used 50 % of the CPU time") && page.contains("has 2 cores"));
    assert!(!page.contains("http") && !page.contains("NaN") && !page.contains("inf\""));
}

#[test]
fn a_page_without_any_figure() {
    let mut report = report();
    (report.figures, report.peers, report.machine.busy) = (Vec::new(), None, None);
    report.verdicts.clear();
    let page = page::html(&report);
    elements(&page);
    assert!(page.contains("Nothing was measured") && !page.contains("id=\"peers\""));
    // Figures that make no plot: zero, and not a number.
    report.figures = vec![figure(Kind::Latency, "odd", false, &[0.0, f64::NAN])];
    let page = page::html(&report);
    assert!(elements(&page).contains(&"table".to_owned()));
}

#[test]
fn json_is_read_back() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("report.json");
    std::fs::write(&file, serde_json::to_string(&report()).unwrap()).unwrap();
    assert_eq!(page::html(&read(&file).unwrap()), page::html(&report()));
}

#[test]
fn files_that_are_no_report() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("report.json");
    for (text, why) in [
        ("{]", "line 1"),
        ("{}", "no number `format`"),
        (r#"{"format": 7}"#, "its format is 7"),
        (r#"{"format": 1, "date": 5}"#, "invalid type"),
    ] {
        std::fs::write(&file, text).unwrap();
        let Err(Failure::Usage(message)) = read(&file) else { panic!("{text}") };
        assert!(message.contains(why) && message.contains("warpwire report --json"), "{message}");
    }
    let short = r#"{"columns": ["a", "b"], "setting": "", "rows": [
        {"name": "x", "kind": "net", "ours": true, "samples": [[1.0]], "skipped": null}]}"#;
    std::fs::write(&file, short).unwrap();
    let Err(Failure::Usage(message)) = read_peers(&file) else { panic!("{short}") };
    assert!(message.contains("row \"x\" has not 2 columns"), "{message}");
    assert!(matches!(read(&folder.path().join("none")), Err(Failure::Usage(_))));
}

#[test]
fn paths_that_cannot_be_written() {
    let folder = tempfile::tempdir().unwrap();
    for (path, why) in [
        (folder.path().to_owned(), "it is a folder"),
        (folder.path().join("none/report.html"), "No such file"),
        (PathBuf::from("/dev/null/report.html"), "Not a directory"),
    ] {
        let Err(Failure::Usage(message)) = check_writable(&path) else { panic!("{path:?}") };
        assert!(message.contains(why) && message.contains("--out FILE"), "{message}");
    }
    let fine = folder.path().join("report.html");
    check_writable(&fine).unwrap();
    assert!(!fine.exists(), "the probe leaves nothing");
}

//! The report as one HTML page. It is well-formed XML too, and loads nothing.

use std::fmt::Write as _;

use super::data::{Figure, Kind, Peers, Report};
use super::headlines;
use super::plot::{COLOURS, Scale, svg};

const STYLE: &str = include_str!("page.css");

/// From this part of busy CPU time on, the page warns.
const BUSY: f64 = 0.2;

pub(crate) fn html(report: &Report) -> String {
    let host = escape(&report.machine.host);
    let mut page = format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\"/>\n\
         <meta name=\"viewport\" content=\"width=device-width\"/>\n\
         <title>Warpwire on {host}</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n"
    );
    head(&mut page, report);
    machine(&mut page, report);
    verdicts(&mut page, report);
    for section in SECTIONS {
        section.write(&mut page, report);
    }
    if let Some(peers) = &report.peers {
        other_projects(&mut page, peers);
    }
    method(&mut page, report);
    page += "</body>\n</html>\n";
    page
}

/// Text for XML: characters that it reserves, and those that it forbids.
pub(crate) fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => escaped += "&amp;",
            '<' => escaped += "&lt;",
            '>' => escaped += "&gt;",
            '"' => escaped += "&quot;",
            c if c.is_control() && !matches!(c, '\n' | '\t') => escaped.push('\u{fffd}'),
            '\u{fffe}' | '\u{ffff}' => escaped.push('\u{fffd}'),
            c => escaped.push(c),
        }
    }
    escaped
}

/// A size for people: `64 KiB`.
pub(crate) fn bytes(count: u64) -> String {
    warpwire::units::bytes(count)
}

/// A figure with three digits and its unit: `1.23 GB/s`, `45.6 µs`, `0.00123 GB/s`.
pub(crate) fn value(figure: f64, unit: &str) -> String {
    format!("{} {unit}", digits(figure))
}

fn digits(figure: f64) -> String {
    let decimals = match figure {
        figure if figure >= 100.0 => 0,
        figure if figure >= 10.0 => 1,
        figure if figure >= 1.0 => 2,
        figure if figure >= 0.1 => 3,
        figure if figure >= 0.01 => 4,
        _ => 5,
    };
    format!("{figure:.decimals$}")
}

fn head(page: &mut String, report: &Report) {
    let (host, date) = (escape(&report.machine.host), escape(&report.date.replace('T', " ")));
    let (version, command) = (escape(&report.version), escape(&report.command));
    let _ = writeln!(page, "<h1>Warpwire on {host}</h1>");
    let _ = writeln!(
        page,
        "<p class=\"faint\">{date} · {version} · <code>{command}</code>, {:.0} s</p>",
        report.seconds
    );
    if let Some(busy) = report.machine.busy.filter(|busy| *busy >= BUSY) {
        let _ = writeln!(
            page,
            "<p class=\"busy\">Other processes used {:.0} % of the CPU time just before the \
             measurements: these figures are worse than those of the idle machine, and not \
             repeatable.</p>",
            busy * 100.0
        );
    }
    if report.machine.cores < 4 {
        let _ = writeln!(
            page,
            "<p class=\"busy\">This machine has {} cores: both ends and their threads share them, so \
             that latencies contain waits for a CPU.</p>",
            report.machine.cores
        );
    }
    *page += "<ul class=\"cards\">\n";
    for headline in headlines(report) {
        let (what, value) = (escape(&headline.what), escape(&headline.value));
        let _ = writeln!(page, "<li><b>{value}</b>{what}</li>");
    }
    *page += "</ul>\n";
}

fn machine(page: &mut String, report: &Report) {
    *page += "<h2 id=\"machine\">Machine</h2>\n<table>\n";
    for (name, fact) in &report.machine.facts {
        let (name, fact) = (escape(name), escape(fact));
        let _ = writeln!(page, "<tr><th>{name}</th><td>{fact}</td></tr>");
    }
    *page += "</table>\n";
}

fn verdicts(page: &mut String, report: &Report) {
    *page += "<h2 id=\"verdicts\">What works here</h2>\n<table>\n";
    for verdict in &report.verdicts {
        let answer = verdict.answer.to_lowercase();
        let class = match answer.as_str() {
            "yes" | "pass" => "yes",
            "no" | "fail" => "no",
            _ => "partly",
        };
        let (capability, text) = (escape(&verdict.capability), escape(&verdict.text));
        let _ = writeln!(
            page,
            "<tr><th>{capability}</th><td class=\"answer {class}\">{}</td><td>{text}</td></tr>",
            escape(&answer)
        );
    }
    *page += "</table>\n<p class=\"faint\">By <code>warpwire doctor</code>, which also has each \
              check, its reason and the fix.</p>\n";
}

/// A heading with one or two plots beside each other.
struct Section {
    id: &'static str,
    title: &'static str,
    about: &'static str,
    plots: &'static [(Kind, &'static str, Scale)],
}

const SECTIONS: [Section; 3] = [
    Section {
        id: "rdma",
        title: "RDMA writes between two processes",
        about: "Both processes are on this machine. Latency is half a round trip, the median; \
                bandwidth has 128 writes in flight, in GB/s (10^9 bytes). Both axes are \
                logarithmic. Every write has the same buffers, as in perftest, so that small ones \
                stay in the CPU's caches. Solid lines are Warpwire, which verifies the data, \
                dashed ones other projects.",
        plots: &[
            (Kind::Latency, "Latency by size", Scale::Log),
            (Kind::Bandwidth, "Bandwidth by size", Scale::Log),
        ],
    },
    Section {
        id: "copies",
        title: "Copies between host and GPU memory",
        about: "Calls of one thread, from and to pageable host memory: size divided by the median \
                time. On a simulated GPU all of them are copies by the CPU, and show the overhead \
                of a call only.",
        plots: &[
            (Kind::CopyTo, "To GPU memory", Scale::Linear),
            (Kind::CopyFrom, "From GPU memory", Scale::Linear),
        ],
    },
    Section {
        id: "round-trips",
        title: "Messages sent by threads, streams and kernels",
        about: "Round trips between two endpoints of one process: posted by a CPU thread, by a \
                stream, by a graph, from inside a running kernel. Kernels of a simulated GPU are \
                threads of this CPU.",
        plots: &[(Kind::RoundTrip, "Round trip by size", Scale::Log)],
    },
];

impl Section {
    fn write(&self, page: &mut String, report: &Report) {
        let (id, title, about) = (self.id, self.title, self.about);
        let _ =
            writeln!(page, "<h2 id=\"{id}\">{title}</h2>\n<p>{about}</p>\n<div class=\"pair\">");
        for (kind, title, scale) in self.plots {
            let figures: Vec<&Figure> =
                report.figures.iter().filter(|figure| figure.kind == *kind).collect();
            *page += "<div>\n";
            plot(page, *kind, title, *scale, &figures);
            *page += "</div>\n";
        }
        *page += "</div>\n";
    }
}

fn plot(page: &mut String, kind: Kind, title: &str, scale: Scale, figures: &[&Figure]) {
    let _ = writeln!(page, "<h3>{title}</h3>");
    match svg(title, kind.unit(), scale, figures) {
        Some(svg) => *page += &svg,
        None => *page += "<p>Nothing was measured.</p>\n",
    }
    legend(page, figures);
    table(page, kind, figures);
}

/// Names of the lines, each with the command that makes it; equal commands are written once.
fn legend(page: &mut String, figures: &[&Figure]) {
    *page += "<ul class=\"legend\">\n";
    for (index, figure) in figures.iter().enumerate() {
        let (colour, style) = (index % COLOURS, if figure.peer { " peer" } else { "" });
        let name = escape(&figure.name);
        let sample = match figure.skipped {
            Some(_) => String::new(),
            None => format!(
                "<svg viewBox=\"0 0 26 12\" aria-hidden=\"true\">\
                 <path class=\"line s{colour}{style}\" d=\"M0 6H26\"/>\
                 <circle class=\"dot s{colour}{style}\" cx=\"13\" cy=\"6\" r=\"2.8\"/></svg>"
            ),
        };
        let why = figure.skipped.as_deref().map(escape);
        let why = why.map_or(String::new(), |why| format!(": not measured: {why}"));
        let is_last = figures.get(index + 1).is_none_or(|next| next.command != figure.command);
        let command = match is_last {
            true => format!("<code>{}</code>", escape(&figure.command)),
            false => String::new(),
        };
        let _ = writeln!(page, "<li>{sample}{name}{why}{command}</li>");
    }
    *page += "</ul>\n";
}

/// All figures by size, folded.
fn table(page: &mut String, kind: Kind, figures: &[&Figure]) {
    let figures: Vec<_> = figures.iter().filter(|figure| !figure.points.is_empty()).collect();
    let points = figures.iter().flat_map(|figure| &figure.points);
    let mut sizes: Vec<u64> = points.map(|point| point.bytes).collect();
    sizes.sort_unstable();
    sizes.dedup();
    if sizes.is_empty() {
        return;
    }
    let unit = kind.unit();
    let _ = write!(
        page,
        "<details><summary>All figures, in {unit}</summary>\n<div class=\"wide\"><table>\n\
         <tr><th class=\"number\">size</th>"
    );
    for figure in &figures {
        let _ = write!(page, "<th class=\"number\">{}</th>", escape(&figure.name));
    }
    *page += "</tr>\n";
    for size in sizes {
        let _ = write!(page, "<tr><td class=\"number\">{}</td>", bytes(size));
        for figure in &figures {
            let found = figure.points.iter().find(|point| point.bytes == size);
            let cell = found.map_or(String::new(), |point| digits(point.value));
            let title = found.and_then(|point| point.range).map_or(String::new(), |(low, high)| {
                format!(" title=\"least {}, 99 % below {}\"", digits(low), digits(high))
            });
            let _ = write!(page, "<td class=\"number\"{title}>{cell}</td>");
        }
        *page += "</tr>\n";
    }
    *page += "</table></div></details>\n";
}

/// The table of `bench/peers`.
fn other_projects(page: &mut String, peers: &Peers) {
    let setting = escape(&peers.setting);
    let _ = writeln!(
        page,
        "<h2 id=\"peers\">Beside other projects</h2>\n<p>By <code>bench/peers</code>: {setting}.</p>"
    );
    for (kind, title) in [("net", "Through the network stack"), ("mem", "Through shared memory")] {
        let _ = writeln!(page, "<h3>{title}</h3>\n<div class=\"wide\"><table>\n<tr><th></th>");
        for column in &peers.columns {
            let _ = write!(page, "<th class=\"number\">{}</th>", escape(column));
        }
        *page += "</tr>\n";
        for row in peers.rows.iter().filter(|row| row.kind == kind) {
            let name = escape(&row.name);
            let name = if row.ours { format!("<b>{name}</b>") } else { name };
            let _ = write!(page, "<tr><td>{name}</td>");
            if let Some(why) = &row.skipped {
                let (columns, why) = (peers.columns.len(), escape(why));
                let _ = write!(page, "<td colspan=\"{columns}\">not measured: {why}</td>");
            } else {
                for samples in &row.samples {
                    let _ = write!(page, "<td class=\"number\">{}</td>", median(samples));
                }
            }
            *page += "</tr>\n";
        }
        *page += "</table></div>\n";
    }
}

/// Median, and the least and largest of some samples.
fn median(samples: &[f64]) -> String {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    let (Some(least), Some(largest)) = (sorted.first(), sorted.last()) else {
        return "–".to_owned();
    };
    let half = sorted.len() / 2;
    let middle = match sorted.len() % 2 {
        1 => sorted[half],
        _ => f64::midpoint(sorted[half - 1], sorted[half]),
    };
    let range = format!("{}–{}", digits(*least), digits(*largest));
    format!("{} <span class=\"faint\">({range})</span>", digits(middle))
}

fn method(page: &mut String, report: &Report) {
    let _ = writeln!(
        page,
        "<h2 id=\"method\">How it was measured</h2>\n\
         <p>Each figure was measured once, one after the other, by the command beside its line; \
         <code>--json</code> of that command has more columns. Server and client are \
         pinned to two cores; copies and messages within one process are not. \
         <code>{}</code> makes this page again, <code>warpwire report --json</code> its figures as \
         JSON, and <code>bench/peers</code> compares with other projects in several rounds.</p>",
        escape(&report.command)
    );
}

//! Measurements by this command's own subcommands, which print JSON.

use std::process::Command;

use serde_json::Value;

use super::Effort;
use super::data::{Figure, Kind, Point, Verdict};
use super::spawn::{self, Cores};
use crate::output::Failure;

/// Verdicts of `warpwire doctor`.
///
/// # Errors
/// If it fails, as on a machine where nothing can be measured.
pub(crate) fn verdicts() -> Result<Vec<Verdict>, Failure> {
    let text = spawn::own(&["doctor", "--json"])?;
    let report: Value = serde_json::from_str(&text)
        .map_err(|why| Failure::Runtime(format!("warpwire doctor --json: {why}")))?;
    let field = |verdict: &Value, name: &str| verdict[name].as_str().unwrap_or("").to_owned();
    let verdict = |verdict: &Value| Verdict {
        capability: field(verdict, "capability"),
        answer: field(verdict, "answer"),
        text: field(verdict, "text"),
    };
    Ok(report["verdicts"].as_array().into_iter().flatten().map(verdict).collect())
}

/// All measurements that fit this machine.
///
/// # Errors
/// If `device` does not exist. A measurement that fails is a figure without points.
pub(crate) fn all(
    effort: Effort,
    device: Option<&str>,
    progress: fn(&str),
) -> Result<Vec<Figure>, Failure> {
    progress("copies to and from GPU memory");
    // The first one chooses the device, and fails if there is none of that name.
    let copies = copies(effort, device)?;
    let Device { name: gpu, simulated } = copies.device.clone();
    let mut figures = Vec::new();
    let memory = if simulated { "simulated GPU memory" } else { "GPU memory" };
    let mut links: Vec<(String, Vec<&str>)> = vec![
        ("shared memory".to_owned(), vec!["--link", "shm"]),
        ("UDP".to_owned(), vec!["--link", "udp"]),
        (format!("{memory}, shared memory"), vec!["--link", "shm", "--mem", &gpu]),
    ];
    let hardware = rdma_device();
    if let Some(name) = &hardware {
        links.push((name.clone(), vec!["--device", name]));
    }
    for (name, options) in &links {
        for (metric, kind) in [("lat", Kind::Latency), ("bw", Kind::Bandwidth)] {
            progress(&format!("RDMA write {metric}: {name}"));
            figures.push(perf(effort, metric, kind, name, options));
        }
    }
    figures.extend(copies.figures);
    progress("messages sent by streams and kernels");
    figures.extend(round_trips(effort, &gpu, simulated));
    Ok(figures)
}

/// The first RDMA device with a port that is active.
fn rdma_device() -> Option<String> {
    let devices: Value = serde_json::from_str(&spawn::own(&["devices", "--json"]).ok()?).ok()?;
    let is_active = |device: &&Value| {
        let ports = device["ports"].as_array().into_iter().flatten();
        ports.into_iter().any(|port| {
            port["state"].as_str().is_some_and(|state| state.to_lowercase().contains("active"))
        })
    };
    let found = devices["devices"].as_array()?.iter().find(is_active)?;
    found["name"].as_str().map(str::to_owned)
}

/// A size as one word of a command line: `4MiB`.
fn bytes(count: u64) -> String {
    warpwire::units::bytes(count).replace(' ', "")
}

fn command(words: &[&str]) -> String {
    format!("warpwire {}", words.join(" "))
}

fn failed(kind: Kind, name: &str, command: String, why: String) -> Figure {
    let name = name.to_owned();
    Figure { kind, name, peer: false, command, points: Vec::new(), skipped: Some(why) }
}

fn reason(failure: Failure) -> String {
    match failure {
        Failure::Usage(why) | Failure::Runtime(why) => why,
    }
}

fn perf(effort: Effort, metric: &str, kind: Kind, name: &str, options: &[&str]) -> Figure {
    let (max, seconds) = (bytes(effort.max), effort.seconds.to_string());
    let cores = Cores::choose();
    let words = [&["perf", "write", metric], options].concat();
    let client = [&words[..], &["127.0.0.1", "-a", "--max", &max, "-D", &seconds]].concat();
    let on = |core: fn(Cores) -> usize| {
        cores.map_or(String::new(), |cores| format!("taskset -c {} ", core(cores)))
    };
    let (server_on, client_on) = (on(|cores| cores.server), on(|cores| cores.client));
    let shown =
        format!("{server_on}{} & sleep 1; {client_on}{}", command(&words), command(&client));
    let points = perf_run(&words, &client, cores).and_then(|text| match kind {
        Kind::Latency => latencies(&text),
        _ => bandwidths(&text),
    });
    match points {
        Ok(points) => {
            let name = name.to_owned();
            Figure { kind, name, peer: false, command: shown, points, skipped: None }
        }
        Err(why) => failed(kind, name, shown, why),
    }
}

/// A server and its client, which prints JSON.
fn perf_run(server: &[&str], client: &[&str], cores: Option<Cores>) -> Result<String, String> {
    let port = spawn::free_port()?.to_string();
    let own = spawn::own_command().map_err(reason)?.get_program().to_owned();
    let command = |words: &[&str]| {
        let mut command = Command::new(&own);
        command.args(words).args(["-p", &port]);
        command
    };
    let client = || {
        let mut client = command(client);
        client.arg("--json");
        client
    };
    spawn::pair(&mut command(server), client, cores, spawn::LIMIT)
}

/// Rows of JSON, each made a point; `None` if a field is missing.
fn points(
    text: &str,
    command: &str,
    point: impl Fn(&Value) -> Option<Point>,
) -> Result<Vec<Point>, String> {
    let printed: Value = serde_json::from_str(text).map_err(|why| format!("{command}: {why}"))?;
    let rows = printed["rows"].as_array().ok_or_else(|| format!("{command} printed no rows"))?;
    let missing = || format!("{command} printed a row without its figures");
    rows.iter().map(|row| point(row).ok_or_else(missing)).collect()
}

fn latencies(text: &str) -> Result<Vec<Point>, String> {
    points(text, "perf", |row| {
        let field = |name: &str| row[name].as_f64();
        let range = field("min_us").zip(field("p99_us"));
        Some(Point { bytes: row["bytes"].as_u64()?, value: field("typical_us")?, range })
    })
}

fn bandwidths(text: &str) -> Result<Vec<Point>, String> {
    points(text, "perf", |row| {
        let value = row["average_gbits"].as_f64()? / 8.0;
        Some(Point { bytes: row["bytes"].as_u64()?, value, range: None })
    })
}

#[derive(Clone)]
struct Device {
    name: String,
    simulated: bool,
}

struct Copies {
    device: Device,
    figures: Vec<Figure>,
}

/// Columns of `copy lat`, and their names in the plot.
const COLUMNS: [(&str, &str); 3] =
    [("best", "Warpwire's choice"), ("window", "CPU window"), ("engine", "copy engine (cuMemcpy)")];

fn copies(effort: Effort, device: Option<&str>) -> Result<Copies, Failure> {
    let (max, repeats) = (bytes(effort.max), effort.repeats.to_string());
    let mut words = vec!["copy", "lat", "-s", &max, "-w", &repeats, "-r", &repeats];
    words.extend(device.into_iter().flat_map(|device| ["-d", device]));
    let shown = command(&words);
    words.push("--json");
    let text = spawn::own(&words)?;
    let incomplete = |what: &str| Failure::Runtime(format!("{shown} --json printed no {what}"));
    let printed: Value =
        serde_json::from_str(&text).map_err(|why| Failure::Runtime(format!("{shown}: {why}")))?;
    let setting = &printed["setting"];
    let name = setting["device"].as_str().ok_or_else(|| incomplete("device"))?.to_owned();
    let simulated = setting["simulated"].as_bool().unwrap_or(false);
    let rows = printed["rows"].as_array().ok_or_else(|| incomplete("rows"))?;
    let mut figures = Vec::new();
    for (test, kind) in [("copy_to_window", Kind::CopyTo), ("copy_from_window", Kind::CopyFrom)] {
        let rows: Vec<_> = rows.iter().filter(|row| row["test"] == test).collect();
        for (column, label) in COLUMNS {
            let points: Vec<_> = rows.iter().filter_map(|row| copy_point(row, column)).collect();
            let skipped = points.is_empty().then(|| format!("{shown} has no column {column}"));
            let (name, command) = (label.to_owned(), shown.clone());
            figures.push(Figure { kind, name, peer: false, command, points, skipped });
        }
    }
    Ok(Copies { device: Device { name, simulated }, figures })
}

fn copy_point(row: &Value, column: &str) -> Option<Point> {
    let bytes = row["size"].as_u64()?;
    let cell = row["cells"].as_array()?.iter().find(|cell| cell["column"] == column)?;
    let us = cell["median_us"].as_f64().filter(|us| *us > 0.0)?;
    Some(Point { bytes, value: bytes as f64 / us / 1e3, range: None })
}

fn round_trips(effort: Effort, gpu: &str, simulated: bool) -> Vec<Figure> {
    let kind = Kind::RoundTrip;
    // The simulated GPU's streams are threads that sleep: more rounds say no more.
    let rounds = if simulated { effort.repeats.min(50) } else { effort.repeats };
    let rounds = rounds.to_string();
    let mut words = vec!["async", "latency", "-d", gpu, "-n", &rounds];
    let shown = command(&words);
    words.push("--json");
    let parsed = spawn::own(&words).map_err(reason).and_then(|text| {
        serde_json::from_str::<Value>(&text).map_err(|why| format!("{shown}: {why}"))
    });
    let printed = match parsed {
        Ok(printed) => printed,
        Err(why) => return vec![failed(kind, "streams and kernels", shown, why)],
    };
    let mut figures: Vec<Figure> = Vec::new();
    for row in printed["rows"].as_array().into_iter().flatten() {
        for mode in row["modes"].as_array().into_iter().flatten() {
            let name = mode["mode"].as_str().unwrap_or("?");
            let point = row["bytes"].as_u64().zip(mode["plain"]["median_us"].as_f64());
            let Some((bytes, value)) = point else { continue };
            let point = Point { bytes, value, range: None };
            match figures.iter_mut().find(|figure| figure.name == name) {
                Some(figure) => figure.points.push(point),
                None => {
                    let (name, command) = (name.to_owned(), shown.clone());
                    let points = vec![point];
                    figures.push(Figure {
                        kind,
                        name,
                        peer: false,
                        command,
                        points,
                        skipped: None,
                    });
                }
            }
        }
    }
    if figures.is_empty() {
        let why = format!("{shown} --json printed no rows");
        return vec![failed(kind, "streams and kernels", shown, why)];
    }
    figures
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_become_points() {
        let text = r#"{"rows": [{"bytes": 8, "min_us": 1, "typical_us": 2.5, "p99_us": 9}]}"#;
        let points = latencies(text).unwrap();
        assert_eq!((points[0].bytes, points[0].value), (8, 2.5));
        assert_eq!(points[0].range, Some((1.0, 9.0)));
        let text = r#"{"rows": [{"bytes": 64, "average_gbits": 16.0}]}"#;
        assert_eq!(bandwidths(text).unwrap()[0].value, 2.0);
        let row = serde_json::json!({"size": 4096, "cells": [{"column": "best", "median_us": 2}]});
        assert_eq!(copy_point(&row, "best").unwrap().value, 2.048);
        assert!(copy_point(&row, "agent").is_none());
    }

    #[test]
    fn output_without_figures_is_an_error() {
        for text in ["", "{}", r#"{"rows": [{"bytes": 8}]}"#, r#"{"rows": 7}"#] {
            assert!(latencies(text).is_err() && bandwidths(text).is_err(), "{text}");
        }
    }
}

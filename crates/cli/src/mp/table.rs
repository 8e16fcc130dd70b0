//! The table and the JSON report.

use std::time::Duration;

use serde::Serialize;
use warpwire::msg::Comm;

use super::measure::Endpoint;
use super::{Mode, Test};
use crate::baseline::{self, Baseline, Ratio};
use crate::machine::Machine;
use crate::output::{Failure, digits};

/// One column of a row.
#[derive(Serialize)]
pub(super) struct Figure {
    pub(super) name: String,
    pub(super) microseconds: f64,
    pub(super) gigabytes_per_second: f64,
}

#[derive(Serialize)]
pub(super) struct Row {
    pub(super) size: u64,
    pub(super) iterations: u32,
    pub(super) figures: Vec<Figure>,
    pub(super) verified: bool,
}

#[derive(Serialize)]
pub(super) struct Report {
    pub(super) machine: Machine,
    test: &'static str,
    ranks: usize,
    /// Link path between the ranks.
    pub(super) path: String,
    /// How the device accesses the message memory.
    memory: String,
    pub(super) rows: Vec<Row>,
    /// Round trips without an HCA; `None` if only the CPU sends.
    pub(super) baseline: Option<Baseline>,
    /// Round trips of the smallest message, divided by the baseline.
    ratios: Vec<Ratio>,
}

impl Report {
    pub(super) fn new(
        machine: Machine,
        test: Test,
        comm: &Comm,
        endpoint: &Endpoint<'_>,
    ) -> Result<Self, Failure> {
        let test = test.name();
        let path = comm.path(1 - comm.rank())?.to_string();
        let memory = endpoint.out.registration().path().to_string();
        let (rows, ratios) = (Vec::new(), Vec::new());
        let ranks = comm.size();
        Ok(Self { machine, test, ranks, path, memory, rows, baseline: None, ratios })
    }

    pub(super) fn head(&self, columns: &[(Mode, Duration)]) -> String {
        let meaning = match self.test {
            "pingpong" => "half a round trip",
            "putget" => "until the data has arrived",
            _ => "both ranks send and receive",
        };
        let name = |(mode, compute): &(Mode, Duration)| {
            let kernel = if compute.is_zero() { "" } else { "+kernel" };
            let name = format!("{}{kernel}", mode.name());
            match self.test {
                "putget" => vec![format!("put {name}"), format!("get {name}")],
                _ => vec![name],
            }
        };
        let names: Vec<String> = columns.iter().flat_map(name).collect();
        let mut head = format!(
            "# mp {}: {meaning}, us (GB/s); {}; {}\n {:>10} {:>8}",
            self.test,
            self.memory,
            self.path.split([';', ':']).next().unwrap_or_default(),
            "bytes",
            "times"
        );
        names.iter().for_each(|name| head += &format!(" {name:>18}"));
        head + "\n"
    }

    /// Computes the ratios of the smallest round trips; returns the lines below the table.
    pub(super) fn compare(&mut self) -> String {
        let Some(baseline) = self.baseline else { return String::new() };
        let smallest = self.rows.iter().min_by_key(|row| row.size);
        let (Some(smallest), "pingpong") = (smallest, self.test) else { return baseline.line() };
        // The figures are half round trips.
        let round_trips =
            smallest.figures.iter().map(|one| (one.name.as_str(), 2.0 * one.microseconds));
        self.ratios = baseline::ratios(&baseline, round_trips);
        baseline.line() + &baseline::ratio_line(smallest.size, &self.ratios)
    }
}

impl Row {
    pub(super) fn render(&self) -> String {
        let mut line = format!(" {:>10} {:>8}", self.size, self.iterations);
        for figure in &self.figures {
            let (time, rate) = (figure.microseconds, figure.gigabytes_per_second);
            let text = format!("{} ({})", digits(time), digits(rate));
            line += &format!(" {text:>18}");
        }
        line + "\n"
    }
}

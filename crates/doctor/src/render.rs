//! Renders a report as text: verdicts first, then the checks in columns.

use std::fmt::Write;

use super::fold::{fold_checks, wrap};
use super::gpudirect;
use super::{Answer, Check, CheckStatus, Group, PairVerdict, Report, Verdict, printable};

const RESET: &str = "\x1b[0m";
const BOLD: &str = "\x1b[1m";
const RED: &str = "\x1b[31m";
const GREEN: &str = "\x1b[32m";
const YELLOW: &str = "\x1b[33m";
const BLUE: &str = "\x1b[34m";
const GREY: &str = "\x1b[90m";

/// Width of the status and the gap behind it.
const STATUS: usize = 6;
/// Names are padded to the longest of their group, but not further.
const MAX_NAME: usize = 32;
/// Below this width, the reason has a line of its own.
const NARROW: usize = 70;
const INDENT: usize = 4;

/// How text is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TextStyle {
    /// Whether answers and statuses are coloured by ANSI escape sequences; default: no.
    pub colour: bool,
    /// Columns after which lines are wrapped; default: 100.
    pub width: usize,
}

impl Default for TextStyle {
    fn default() -> Self {
        Self { colour: false, width: 100 }
    }
}

impl TextStyle {
    fn paint(self, text: &str, style: &str) -> String {
        if self.colour { format!("{style}{text}{RESET}") } else { text.to_owned() }
    }
}

impl Report {
    /// The report as text of 100 columns; see [`render`](Self::render).
    pub fn to_text(&self, colour: bool) -> String {
        self.render(TextStyle { colour, ..TextStyle::default() })
    }

    /// The report as text: the verdicts, each with its fix, then the checks by group. Checks that
    /// differ in the device only are one line: `mlx5_0…7 port 1`.
    pub fn render(&self, style: TextStyle) -> String {
        let mut text = format!("{}\n", style.paint("Verdicts", BOLD));
        for verdict in &self.verdicts {
            write_verdict(&mut text, verdict, style);
        }
        let folded = fold_checks(&self.checks);
        let mut rest = folded.as_slice();
        while let Some(first) = rest.first() {
            let count = rest.iter().take_while(|check| check.group == first.group).count();
            let (group, after) = rest.split_at(count);
            text.push_str(&format!("\n{}\n", style.paint(first.group.name(), BOLD)));
            write_checks(&mut text, group, style);
            rest = after;
        }
        text
    }

    /// The verdicts, one line each, not wrapped: `GPUDirect RDMA: NO, because …; fix: …`.
    pub fn brief(&self, style: TextStyle) -> String {
        let line = |verdict: &Verdict| {
            let fix = verdict.fix.as_ref().map_or(String::new(), |fix| format!("; fix: {fix}"));
            format!("{}{}\n", painted(verdict, &verdict.sentence(), style), printable(&fix))
        };
        self.verdicts.iter().map(line).collect()
    }
}

/// The sentence with its answer coloured, or, where it has none, its beginning.
fn painted(verdict: &Verdict, sentence: &str, style: TextStyle) -> String {
    let sentence = printable(sentence);
    let Verdict { capability, answer, .. } = verdict;
    let head = match verdict.states_a_use() {
        true => format!("{capability}:"),
        false => format!("{capability}: {}", answer.name()),
    };
    match sentence.strip_prefix(&head) {
        Some(rest) if verdict.states_a_use() => {
            format!("{}{rest}", style.paint(&head, answer.style()))
        }
        Some(rest) => {
            format!("{capability}: {}{rest}", style.paint(answer.name(), answer.style()))
        }
        None => sentence,
    }
}

fn write_verdict(text: &mut String, verdict: &Verdict, style: TextStyle) {
    let width = style.width.saturating_sub(INDENT);
    for (number, line) in wrap(&printable(&verdict.sentence()), width).into_iter().enumerate() {
        // Writing to a string cannot fail.
        let _ = match number {
            0 => writeln!(text, "{}", painted(verdict, &line, style)),
            _ => writeln!(text, "{:INDENT$}{line}", ""),
        };
    }
    if let Some(fix) = &verdict.fix {
        write_fix(text, fix, INDENT, style);
    }
    let pairs = gpudirect::folded(&verdict.pairs);
    if pairs.len() < 2 {
        return;
    }
    // The verdict says the same about those that it counts.
    let told = |pair: &PairVerdict| {
        pair.answer == verdict.answer && verdict.text.starts_with(pair.text.as_str())
    };
    for (names, pair) in pairs.into_iter().filter(|(_, pair)| !told(pair)) {
        let line = printable(&format!("{names}: {}, {}", pair.answer.name(), pair.text));
        for (number, line) in wrap(&line, width.saturating_sub(INDENT)).into_iter().enumerate() {
            let indent = if number == 0 { INDENT } else { 2 * INDENT };
            let _ = writeln!(text, "{:indent$}{line}", "");
        }
        if let Some(fix) = &pair.fix {
            write_fix(text, fix, 2 * INDENT, style);
        }
    }
}

fn write_fix(text: &mut String, fix: &str, indent: usize, style: TextStyle) {
    const MARK: &str = "fix: ";
    let width = style.width.saturating_sub(indent + MARK.len());
    for (number, line) in wrap(&printable(fix), width).into_iter().enumerate() {
        let mark = if number == 0 { MARK } else { "" };
        let _ = writeln!(text, "{:indent$}{mark:<5}{line}", "");
    }
}

/// Writes the checks of one group: status, name, reason; the fix below.
fn write_checks(text: &mut String, checks: &[Check], style: TextStyle) {
    let length = |check: &Check| check.name.chars().count();
    let widest = checks.iter().map(length).filter(|length| *length <= MAX_NAME).max();
    let name_width = widest.unwrap_or(MAX_NAME);
    let narrow = style.width < NARROW;
    let indent = if narrow { STATUS } else { STATUS + name_width + 2 };
    for check in checks {
        let status = style.paint(check.status.name(), check.status.style());
        let name = printable(&check.name);
        let mut lines =
            wrap(&printable(&check.why), style.width.saturating_sub(indent)).into_iter();
        if narrow || length(check) > name_width {
            let _ = writeln!(text, "{status}  {name}");
        } else {
            let pad = name_width - length(check);
            let why = lines.next().unwrap_or_default();
            let _ = writeln!(text, "{status}  {name}{:pad$}  {why}", "");
        }
        for line in lines {
            let _ = writeln!(text, "{:indent$}{line}", "");
        }
        if let Some(fix) = &check.fix {
            write_fix(text, fix, indent, style);
        }
    }
}

impl Group {
    fn name(self) -> &'static str {
        match self {
            Self::Gpu => "GPU",
            Self::CpuWindows => "CPU windows",
            Self::Registration => "Registration",
            Self::RdmaDevices => "RDMA devices",
            Self::Host => "Host",
            Self::Network => "Network",
        }
    }
}

impl CheckStatus {
    fn name(self) -> &'static str {
        match self {
            Self::Pass => "PASS",
            Self::Warn => "WARN",
            Self::Fail => "FAIL",
            Self::Info => "INFO",
            Self::Skip => "SKIP",
        }
    }

    fn style(self) -> &'static str {
        match self {
            Self::Pass => GREEN,
            Self::Warn => YELLOW,
            Self::Fail => RED,
            Self::Info => BLUE,
            Self::Skip => GREY,
        }
    }
}

impl Answer {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Yes => "YES",
            Self::No => "NO",
            Self::Partly => "PARTLY",
        }
    }

    fn style(self) -> &'static str {
        match self {
            Self::Yes => GREEN,
            Self::No => RED,
            Self::Partly => YELLOW,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::verdict::verdict;
    use super::super::{Evidence, Report};
    use super::*;
    use warpwire::host::{MachineFiles, System};

    fn report() -> Report {
        let nothing = System::of(MachineFiles::parse("/a =").unwrap());
        let mut report = Report::of(&Evidence::gather(nothing).unwrap());
        report.checks = vec![
            Group::Gpu.pass("driver", "version 580"),
            Group::Gpu.pass("/dev/nvidia0", "may be used").about(["/dev/nvidia0"]),
            Group::Gpu.pass("/dev/nvidia1", "may be used").about(["/dev/nvidia1"]),
            Group::Gpu.fail(
                "node",
                "miss\x1b[31ming\nhere and elsewhere",
                "run it, then run it again",
            ),
            Group::Host.info("virtual machine", "yes"),
            Group::Host.pass("a name that is longer than all names should be", "long"),
        ];
        let no = verdict("gpu", "GPU", Answer::No, "because there is none, or it is hidden");
        let uses = verdict("nccl", "NCCL would use", Answer::Partly, "Socket (TCP)");
        report.verdicts = vec![no.fixed_by(Some("buy one".to_owned())), uses];
        report
    }

    #[test]
    fn verdicts_come_first_and_checks_are_aligned() {
        assert_eq!(
            report().to_text(false),
            "Verdicts\n\
             GPU: NO, because there is none, or it is hidden\n    fix: buy one\n\
             NCCL would use: Socket (TCP) (expected, not tried)\n\
             \nGPU\n\
             PASS  driver          version 580\n\
             PASS  /dev/nvidia0…1  may be used\n\
             FAIL  node            miss [31ming here and elsewhere\n\
             \x20                     fix: run it, then run it again\n\
             \nHost\n\
             INFO  virtual machine  yes\n\
             PASS  a name that is longer than all names should be\n\
             \x20                      long\n"
        );
    }

    #[test]
    fn lines_are_wrapped() {
        let text = report().render(TextStyle { colour: false, width: 40 });
        assert!(text.lines().all(|line| line.chars().count() <= 52), "{text}");
        assert!(text.contains("NO, because there is none, or\n    it is hidden\n"), "{text}");
        assert!(text.contains("FAIL  node\n      miss [31ming here and elsewhere\n      fix: run"));
    }

    #[test]
    fn brief_has_a_line_for_each_verdict() {
        assert_eq!(
            report().brief(TextStyle::default()),
            "GPU: NO, because there is none, or it is hidden; fix: buy one\n\
             NCCL would use: Socket (TCP) (expected, not tried)\n"
        );
    }

    #[test]
    fn output_is_coloured_on_request_only() {
        let coloured = report().to_text(true);
        for part in
            ["\x1b[32mPASS\x1b[0m", "GPU: \x1b[31mNO\x1b[0m, because", "\x1b[33mNCCL would use:"]
        {
            assert!(coloured.contains(part), "{part:?} in {coloured:?}");
        }
        assert!(!report().to_text(false).contains('\x1b'));
    }
}

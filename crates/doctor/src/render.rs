//! Renders a report as text: one line per check, then the verdicts.

use std::fmt::Write;

use super::{Answer, Check, CheckStatus, Group, Report, printable};

const RESET: &str = "\x1b[0m";
const BOLD: &str = "\x1b[1m";
const RED: &str = "\x1b[31m";
const GREEN: &str = "\x1b[32m";
const YELLOW: &str = "\x1b[33m";
const GREY: &str = "\x1b[90m";

impl Report {
    /// The report as text: lines `PASS  name  — why  — fix`, ordered by group, then the verdicts.
    /// With `colour`, statuses are coloured by ANSI escape sequences.
    pub fn to_text(&self, colour: bool) -> String {
        let paint = |text: &str, style: &str| {
            if colour { format!("{style}{text}{RESET}") } else { text.to_owned() }
        };
        let mut text = String::new();
        let mut group = None;
        for check in &self.checks {
            if group != Some(check.group) {
                let gap = if group.is_some() { "\n" } else { "" };
                let heading = paint(check.group.name(), BOLD);
                // Writing to a string cannot fail.
                let _ = writeln!(text, "{gap}{heading}");
                group = Some(check.group);
            }
            let status = paint(check.status.name(), check.status.style());
            let _ = writeln!(text, "{status}  {}", one_line(check));
        }
        let _ = writeln!(text, "\n{}", paint("Verdicts", BOLD));
        for verdict in &self.verdicts {
            let answer = paint(verdict.answer.name(), verdict.answer.style());
            let _ =
                writeln!(text, "{}: {answer}, {}", verdict.capability, printable(&verdict.text));
        }
        text
    }
}

/// Name, reason and fix, without control characters.
fn one_line(check: &Check) -> String {
    let mut line = format!("{}  — {}", check.name, check.why);
    if let Some(fix) = &check.fix {
        line.push_str("  — ");
        line.push_str(fix);
    }
    printable(&line)
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
            Self::Skip => "SKIP",
        }
    }

    fn style(self) -> &'static str {
        match self {
            Self::Pass => GREEN,
            Self::Warn => YELLOW,
            Self::Fail => RED,
            Self::Skip => GREY,
        }
    }
}

impl Answer {
    fn name(self) -> &'static str {
        match self {
            Self::Yes => "yes",
            Self::No => "no",
            Self::Partly => "partly",
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
    use super::super::Verdict;
    use super::*;

    fn report() -> Report {
        Report {
            checks: vec![
                Group::Gpu.pass("driver", "version 580"),
                Group::Gpu.fail("node", "miss\x1b[31ming\nhere", "run it"),
                Group::Host.skip("NUMA", "one node"),
            ],
            verdicts: vec![Verdict {
                capability: "GPU".to_owned(),
                answer: Answer::No,
                text: "none".to_owned(),
            }],
        }
    }

    #[test]
    fn each_check_is_one_line_without_control_characters() {
        assert_eq!(
            report().to_text(false),
            "GPU\nPASS  driver  — version 580\nFAIL  node  — miss [31ming here  — run it\n\
             \nHost\nSKIP  NUMA  — one node\n\nVerdicts\nGPU: no, none\n"
        );
    }

    #[test]
    fn output_is_coloured_on_request_only() {
        assert!(report().to_text(true).contains("\x1b[32mPASS\x1b[0m"));
        assert!(!report().to_text(false).contains('\x1b'));
    }
}

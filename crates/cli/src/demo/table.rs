//! The demo's table.

use std::time::Duration;

use warpwire::units;

use super::Stage;

const HEADINGS: [&str; 8] = ["stage", "from", "to", "size", "times", "each", "rate", "checked"];

pub(super) fn render(stages: &[Stage]) -> String {
    let rows: Vec<[String; 8]> = stages.iter().map(row).collect();
    let mut widths = HEADINGS.map(str::len);
    for row in &rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let mut text = line(&HEADINGS.map(str::to_owned), &widths);
    text += &format!("{}\n", "-".repeat(text.trim_end().chars().count()));
    for row in &rows {
        text += &line(row, &widths);
    }
    text
}

fn row(stage: &Stage) -> [String; 8] {
    let not_done = match (&stage.skipped, &stage.failed) {
        (Some(why), _) => Some(format!("skipped: {why}")),
        (None, Some(why)) => Some(format!("FAILED: {why}")),
        (None, None) => None,
    };
    if let Some(why) = not_done {
        let (what, from, to) = (stage.what.clone(), stage.from.clone(), stage.to.clone());
        let none = String::new;
        return [what, from, to, units::bytes(stage.bytes), none(), none(), none(), why];
    }
    let each = Duration::from_nanos(stage.nanoseconds);
    // Small transfers measure latency; a rate would be meaningless.
    let rate = if stage.bytes < 4096 { String::new() } else { units::rate(stage.bytes, each) };
    [
        stage.what.clone(),
        stage.from.clone(),
        stage.to.clone(),
        units::bytes(stage.bytes),
        stage.times.to_string(),
        format!("{:.1} us", each.as_secs_f64() * 1e6),
        rate,
        if stage.verified { "ok" } else { "WRONG" }.to_owned(),
    ]
}

/// Text columns are left-aligned, numbers right-aligned.
fn line(cells: &[String; 8], widths: &[usize; 8]) -> String {
    let cells = cells.iter().zip(widths).enumerate().map(|(column, (cell, width))| match column {
        3..=6 => format!("{cell:>width$}"),
        _ => format!("{cell:<width$}"),
    });
    let line = cells.collect::<Vec<_>>().join("  ");
    format!("{}\n", line.trim_end())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_align() {
        let stages = [
            Stage::new("copy", "sim:0", "sim:1", 1 << 20)
                .took(Duration::from_millis(2), 2)
                .checked(true),
            Stage::new("word", "a", "b", 8).took(Duration::from_micros(3), 1),
            Stage::new("view", "a", "b", 8).skipped("no path"),
        ];
        let text = render(&stages);
        let expected = "\
stage  from   to      size  times       each       rate  checked
----------------------------------------------------------------
copy   sim:0  sim:1  1 MiB      2  1000.0 us  1.05 GB/s  ok
word   a      b        8 B      1     3.0 us             WRONG
view   a      b        8 B                               skipped: no path
";
        assert_eq!(text, expected);
    }
}

//! Formatting and parsing of sizes, rates and durations: `64KiB`, `2 GiB`, `50us`; text of peers
//! for the terminal.

use std::time::Duration;

use crate::error::{Error, Kind, Result};

const SIZES: [(&str, u64); 5] =
    [("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10), ("B", 1)];

/// Formats a byte count in the largest binary unit that gives at least one: `1.5 MiB`, `64 KiB`,
/// `17 B`.
///
/// ```
/// assert_eq!(warpwire::units::bytes(65_536), "64 KiB");
/// assert_eq!(warpwire::units::bytes(1_610_612_736), "1.5 GiB");
/// ```
pub fn bytes(count: u64) -> String {
    let (name, unit) = SIZES.into_iter().find(|(_, unit)| count >= *unit).unwrap_or(("B", 1));
    if count.is_multiple_of(unit) {
        return format!("{} {name}", count / unit);
    }
    format!("{:.1} {name}", count as f64 / unit as f64)
}

/// Formats a rate in decimal gigabytes per second, as network and memory rates are quoted, with no
/// more digits than mean something.
///
/// ```
/// use std::time::Duration;
/// assert_eq!(warpwire::units::rate(2_000_000_000, Duration::from_secs(1)), "2.00 GB/s");
/// assert_eq!(warpwire::units::rate(2_000_000_000, Duration::from_millis(1)), "2000 GB/s");
/// ```
pub fn rate(byte_count: u64, elapsed: Duration) -> String {
    let rate = byte_count as f64 / elapsed.as_secs_f64().max(1e-9) / 1e9;
    let digits = if rate < 99.995 { 2 } else { 0 };
    format!("{rate:.digits$} GB/s")
}

/// Maximum length of [`printable`] text, in characters.
const MAX_PRINTABLE: usize = 400;

/// Text from a peer, for a terminal or a log: control characters (which could be escape
/// sequences), line separators and marks that reorder text become `\u{fffd}`, and long text is cut.
///
/// ```
/// assert_eq!(warpwire::units::printable("a\u{1b}[2Jb"), "a\u{fffd}[2Jb");
/// assert_eq!(warpwire::units::printable("10.0.0.1: no route"), "10.0.0.1: no route");
/// ```
pub fn printable(text: &str) -> String {
    let is_harmful = |c: char| {
        let reorders = matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}')
            || matches!(c, '\u{2066}'..='\u{2069}');
        c.is_control() || reorders || matches!(c, '\u{2028}' | '\u{2029}')
    };
    let shown = text.chars().take(MAX_PRINTABLE);
    let mut shown: String =
        shown.map(|c| if is_harmful(c) { char::REPLACEMENT_CHARACTER } else { c }).collect();
    if text.chars().nth(MAX_PRINTABLE).is_some() {
        shown.push('…');
    }
    shown
}

/// Parses a byte count: a whole number with an optional unit (`B`, `K`, `KiB`, `M`, `MiB`, `G`,
/// `GiB`, `T`, `TiB`, in any case; all binary).
///
/// ```
/// assert_eq!(warpwire::units::parse_bytes("64KiB").unwrap(), 65_536);
/// assert!(warpwire::units::parse_bytes("64 parsecs").is_err());
/// ```
pub fn parse_bytes(text: &str) -> Result<u64> {
    let (digits, unit) = split_number(text);
    let unit = unit.to_ascii_lowercase();
    let scale = SIZES.into_iter().find(|(name, _)| {
        let name = name.to_ascii_lowercase();
        unit == name || (name.len() > 1 && unit == name[..1]) || (unit.is_empty() && name == "b")
    });
    scale
        .zip(digits.parse::<u64>().ok())
        .and_then(|((_, scale), number)| number.checked_mul(scale))
        .ok_or_else(|| malformed(text, "a size", "64KiB, 2GiB or 4096"))
}

/// Parses a duration: a whole number with a unit (`ns`, `us`, `ms`, `s`).
///
/// ```
/// use std::time::Duration;
/// assert_eq!(warpwire::units::parse_duration("50us").unwrap(), Duration::from_micros(50));
/// assert!(warpwire::units::parse_duration("soon").is_err());
/// ```
pub fn parse_duration(text: &str) -> Result<Duration> {
    let (digits, unit) = split_number(text);
    let nanos_per = match unit {
        "ns" => 1,
        "us" | "µs" => 1_000,
        "ms" => 1_000_000,
        "s" => 1_000_000_000,
        _ => 0_u64,
    };
    digits
        .parse::<u64>()
        .ok()
        .filter(|_| nanos_per != 0)
        .and_then(|number| number.checked_mul(nanos_per))
        .map(Duration::from_nanos)
        .ok_or_else(|| malformed(text, "a duration", "50us, 2ms or 1s"))
}

fn split_number(text: &str) -> (&str, &str) {
    let text = text.trim();
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    (&text[..end], text[end..].trim_start())
}

#[cold]
fn malformed(text: &str, what: &str, examples: &str) -> Error {
    Error::new(Kind::Malformed, format!("read {text:?} as {what}"))
        .why("it is not a whole number with a unit")
        .fix(format!("write it like {examples}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_parse_and_format() {
        for (text, value) in
            [("0", 0), ("17", 17), ("4k", 4096), ("2 GiB", 2 << 30), ("1TiB", 1 << 40)]
        {
            assert_eq!(parse_bytes(text).unwrap(), value, "{text}");
        }
        assert_eq!(bytes(0), "0 B");
        assert_eq!(bytes(1536), "1.5 KiB");
    }

    #[test]
    fn malformed_input_is_rejected_with_an_example() {
        for text in ["", "KiB", "-1", "1.5GiB", "99999999999999999999", "16777216TiB", "3 x"] {
            let error = parse_bytes(text).unwrap_err();
            assert!(error.to_string().contains("64KiB"), "{error}");
        }
        for text in ["", "5", "5 days", "99999999999999999999s", "18446744073709551615s"] {
            assert!(parse_duration(text).is_err(), "{text}");
        }
    }
}

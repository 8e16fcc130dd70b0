//! Folds equal checks and names of one kind, and wraps text.

use super::{Check, CheckStatus, Group};

/// Joins names, consecutive numbers of one kind with an ellipsis: `mlx5_0…7, ens1`.
pub(super) fn fold_names(names: &[String]) -> String {
    let mut folded: Vec<(String, Option<u64>, Option<u64>)> = Vec::new();
    for name in names {
        let (stem, number) = split_number(name);
        match folded.last_mut() {
            Some((known, Some(_), last))
                if known == stem
                    && number.is_some()
                    && *last == number.and_then(|n| n.checked_sub(1)) =>
            {
                *last = number;
            }
            _ => folded.push((stem.to_owned(), number, number)),
        }
    }
    let shown = folded.into_iter().map(|(stem, first, last)| match (first, last) {
        (Some(first), Some(last)) if first != last => format!("{stem}{first}…{last}"),
        (Some(first), _) => format!("{stem}{first}"),
        (None, _) => stem,
    });
    shown.collect::<Vec<_>>().join(", ")
}

/// A name and the number at its end. A number with leading zeros is a part of the name.
fn split_number(name: &str) -> (&str, Option<u64>) {
    let stem = name.trim_end_matches(|c: char| c.is_ascii_digit());
    let digits = name.get(stem.len()..).unwrap_or_default();
    match digits.parse() {
        Ok(number) if digits == "0" || !digits.starts_with('0') => (stem, Some(number)),
        _ => (name, None),
    }
}

/// Checks of which only the subjects differ become one, at the place of the first.
pub(super) fn fold_checks(checks: &[Check]) -> Vec<Check> {
    type Key = (Group, CheckStatus, String, String, Option<String>, usize);
    let mut folded: Vec<(Key, Vec<&Check>)> = Vec::new();
    for check in checks {
        let template = |text: &str| template(text, &check.subjects);
        let key = (
            check.group,
            check.status,
            template(&check.name),
            template(&check.why),
            check.fix.as_deref().map(template),
            check.subjects.len(),
        );
        match folded.iter_mut().find(|(known, _)| *known == key) {
            Some((_, members)) if !check.subjects.is_empty() => members.push(check),
            _ => folded.push((key, vec![check])),
        }
    }
    folded.into_iter().map(|(key, members)| merge(key.2, key.3, key.4, &members)).collect()
}

fn merge(name: String, why: String, fix: Option<String>, members: &[&Check]) -> Check {
    let subject = |at: usize| {
        let mut names: Vec<String> =
            members.iter().filter_map(|check| check.subjects.get(at).cloned()).collect();
        names.dedup();
        fold_names(&names)
    };
    let first = members.first().copied();
    let count = first.map_or(0, |check| check.subjects.len());
    let fill = |text: String| {
        (0..count).fold(text, |text, at| text.replace(&placeholder(at), &subject(at)))
    };
    Check {
        group: first.map_or(Group::Host, |check| check.group),
        status: first.map_or(CheckStatus::Skip, |check| check.status),
        name: fill(name),
        why: fill(why),
        fix: fix.map(fill),
        subjects: (0..count).map(subject).collect(),
    }
}

/// Stands for a subject; it does not occur in printable text.
fn placeholder(at: usize) -> String {
    format!("\u{1}{at}\u{2}")
}

/// The text with its subjects replaced by placeholders.
fn template(text: &str, subjects: &[String]) -> String {
    subjects
        .iter()
        .enumerate()
        .fold(text.to_owned(), |text, (at, subject)| replace_word(&text, subject, &placeholder(at)))
}

/// Replaces a name where it is not a part of a longer one (`mlx5_1` in `mlx5_10`).
fn replace_word(text: &str, name: &str, with: &str) -> String {
    if name.is_empty() {
        return text.to_owned();
    }
    let mut result = String::new();
    let mut rest = text;
    while let Some(at) = rest.find(name) {
        let (before, found) = rest.split_at(at);
        let after = found.get(name.len()..).unwrap_or_default();
        let inside = |c: Option<char>| c.is_some_and(|c| c.is_alphanumeric() || c == '_');
        let apart = !inside(before.chars().next_back()) && !inside(after.chars().next());
        result.push_str(before);
        result.push_str(if apart { with } else { name });
        rest = after;
    }
    result + rest
}

/// Breaks text into lines of at most `width` characters, at spaces; longer words stay whole.
pub(super) fn wrap(text: &str, width: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split_whitespace() {
        match lines.last_mut() {
            Some(line) if line.chars().count() + 1 + word.chars().count() <= width => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn consecutive_names_are_folded() {
        for (list, folded) in [
            (&["mlx5_0", "mlx5_1", "mlx5_2"][..], "mlx5_0…2"),
            (&["mlx5_9", "mlx5_10", "mlx5_12"], "mlx5_9…10, mlx5_12"),
            (&["/dev/nvidia0", "/dev/nvidia1", "/dev/nvidiactl"], "/dev/nvidia0…1, /dev/nvidiactl"),
            (&["cuda:0"], "cuda:0"),
            (&["mlx5_0", "rxe0", "rxe1"], "mlx5_0, rxe0…1"),
            (&["a01", "a02"], "a01, a02"),
            (&["eth", "eth"], "eth, eth"),
            (&["x99999999999999999999999", "7"], "x99999999999999999999999, 7"),
            (&[], ""),
        ] {
            assert_eq!(fold_names(&names(list)), folded);
        }
    }

    #[test]
    fn checks_that_differ_in_their_subject_are_folded() {
        let check = |name: &str, why: &str| {
            Group::RdmaDevices.pass(format!("{name} port 1"), why.to_owned()).about([name])
        };
        let plain = Group::RdmaDevices.pass("equal", "as the next");
        let checks = [
            check("mlx5_0", "mlx5_0 is fine"),
            check("mlx5_1", "mlx5_1 is fine"),
            check("mlx5_2", "is not"),
            check("mlx5_10", "mlx5_10 is fine, mlx5_1 too"),
            plain.clone(),
            plain,
        ];
        let folded = fold_checks(&checks);
        let shown: Vec<_> = folded.iter().map(|c| (c.name.as_str(), c.why.as_str())).collect();
        assert_eq!(
            shown,
            [
                ("mlx5_0…1 port 1", "mlx5_0…1 is fine"),
                ("mlx5_2 port 1", "is not"),
                ("mlx5_10 port 1", "mlx5_10 is fine, mlx5_1 too"),
                ("equal", "as the next"),
                ("equal", "as the next"),
            ]
        );
    }

    #[test]
    fn text_is_wrapped_at_spaces() {
        assert_eq!(wrap("one two  three", 7), ["one two", "three"]);
        assert_eq!(wrap("a-word-that-is-too-long b", 5), ["a-word-that-is-too-long", "b"]);
        assert_eq!(wrap("", 5), Vec::<String>::new());
        assert_eq!(wrap("é é é", 3), ["é é", "é"]);
    }
}

//! RESP, the protocol of Redis: parsing commands from received bytes, and writing replies.

use std::ops::Range;

/// Maximum number of arguments of a command, including its name.
pub(super) const MAX_ARGUMENTS: usize = 64;

/// The result of parsing.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Parsed {
    /// The command is incomplete.
    More,
    /// A complete command: the ranges of its arguments, and its length in bytes.
    Whole(Vec<Range<usize>>, usize),
    /// Malformed input, with the error reply.
    Bad(&'static str),
}

const BAD_COUNT: Parsed = Parsed::Bad("-ERR Protocol error: invalid multibulk length\r\n");
const BAD_LENGTH: Parsed = Parsed::Bad("-ERR Protocol error: invalid bulk length\r\n");
const BAD_TYPE: Parsed = Parsed::Bad("-ERR Protocol error: expected '$'\r\n");

/// A decimal number up to the end of its line, and the position behind it.
enum Number {
    More,
    Bad,
    Found(i64, usize),
}

fn number(bytes: &[u8], at: usize) -> Number {
    let negative = bytes.get(at) == Some(&b'-');
    let begin = at + usize::from(negative);
    let mut sum = 0_i64;
    let mut end = begin;
    while end < bytes.len() && bytes[end] != b'\r' {
        if !bytes[end].is_ascii_digit() || end - begin > 9 {
            return Number::Bad;
        }
        sum = sum * 10 + i64::from(bytes[end] - b'0');
        end += 1;
    }
    match bytes.get(end + 1) {
        None => Number::More,
        Some(b'\n') if end > begin => Number::Found(if negative { -sum } else { sum }, end + 2),
        Some(_) => Number::Bad,
    }
}

/// Parses the first command. No argument may be longer than `max_word`, no command longer than
/// `max_len`.
pub(super) fn parse(bytes: &[u8], max_word: usize, max_len: usize) -> Parsed {
    match bytes.first() {
        None => Parsed::More,
        Some(b'*') => parse_array(bytes, max_word, max_len),
        Some(_) => parse_line(bytes, max_len),
    }
}

fn parse_array(bytes: &[u8], max_word: usize, max_len: usize) -> Parsed {
    let (count, mut at) = match number(bytes, 1) {
        Number::More => return Parsed::More,
        Number::Found(count, at) if (0..=MAX_ARGUMENTS as i64).contains(&count) => (count, at),
        Number::Found(..) | Number::Bad => return BAD_COUNT,
    };
    let mut words = Vec::with_capacity(count as usize);
    for _ in 0..count {
        match bytes.get(at) {
            None => return Parsed::More,
            Some(b'$') => {}
            Some(_) => return BAD_TYPE,
        }
        let (len, begin) = match number(bytes, at + 1) {
            Number::More => return Parsed::More,
            Number::Found(len, begin) if (0..=max_word as i64).contains(&len) => {
                (len as usize, begin)
            }
            Number::Found(..) | Number::Bad => return BAD_LENGTH,
        };
        let end = begin + len;
        if end + 2 > max_len {
            return BAD_LENGTH;
        }
        if end + 2 > bytes.len() {
            return Parsed::More;
        }
        if &bytes[end..end + 2] != b"\r\n" {
            return BAD_LENGTH;
        }
        words.push(begin..end);
        at = end + 2;
    }
    Parsed::Whole(words, at)
}

/// An inline command: arguments on one line, separated by spaces.
fn parse_line(bytes: &[u8], max_len: usize) -> Parsed {
    let Some(end) = bytes.iter().position(|byte| *byte == b'\n') else {
        return if bytes.len() >= max_len { BAD_LENGTH } else { Parsed::More };
    };
    let mut words = Vec::new();
    let mut at = 0;
    for word in bytes[..end].split(|byte| matches!(byte, b' ' | b'\r')) {
        if !word.is_empty() {
            words.push(at..at + word.len());
        }
        at += word.len() + 1;
    }
    if words.len() > MAX_ARGUMENTS {
        return BAD_COUNT;
    }
    Parsed::Whole(words, end + 1)
}

/// A bulk string reply; `None` is a null bulk string.
pub(super) fn put_string(out: &mut Vec<u8>, text: Option<&[u8]>) {
    match text {
        None => out.extend(b"$-1\r\n"),
        Some(text) => {
            out.extend(format!("${}\r\n", text.len()).as_bytes());
            out.extend(text);
            out.extend(b"\r\n");
        }
    }
}

/// An integer reply.
pub(super) fn put_number(out: &mut Vec<u8>, value: i64) {
    out.extend(format!(":{value}\r\n").as_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(bytes: &[u8]) -> Vec<&[u8]> {
        match parse(bytes, 100, 1000) {
            Parsed::Whole(words, used) => {
                assert_eq!(used, bytes.len());
                words.into_iter().map(|word| &bytes[word]).collect()
            }
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn commands_are_parsed() {
        assert_eq!(words(b"*2\r\n$3\r\nGET\r\n$1\r\nk\r\n"), [&b"GET"[..], b"k"]);
        assert_eq!(words(b"*1\r\n$0\r\n\r\n"), [b""]);
        assert_eq!(words(b"SET  a b\r\n"), [&b"SET"[..], b"a", b"b"]);
        assert_eq!(words(b"PING\n"), [b"PING"]);
        assert!(words(b"\r\n").is_empty());
        assert!(words(b"*0\r\n").is_empty());
    }

    #[test]
    fn prefixes_of_a_command_are_incomplete() {
        let whole = b"*2\r\n$3\r\nGET\r\n$10\r\n0123456789\r\n";
        for len in 0..whole.len() {
            assert_eq!(parse(&whole[..len], 100, 1000), Parsed::More, "{len}");
        }
    }

    #[test]
    fn malformed_input_is_rejected() {
        for (bytes, bad) in [
            (&b"*-1\r\n"[..], BAD_COUNT),
            (b"*65\r\n", BAD_COUNT),
            (b"*x\r\n", BAD_COUNT),
            (b"*99999999999", BAD_COUNT),
            (b"*1\r\n$-1\r\n", BAD_LENGTH),
            (b"*1\r\n$101\r\n", BAD_LENGTH),
            (b"*1\r\n$4294967297\r\n", BAD_LENGTH),
            (b"*1\r\n$3\r\nGETxx", BAD_LENGTH),
            (b"*1\r\n+OK\r\n", BAD_TYPE),
        ] {
            assert_eq!(parse(bytes, 100, 1000), bad, "{:?}", String::from_utf8_lossy(bytes));
        }
        assert_eq!(parse(&[b'x'; 1000], 100, 1000), BAD_LENGTH);
    }
}

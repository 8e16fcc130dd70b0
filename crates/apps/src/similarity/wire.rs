//! The wire format of queries and replies; and the same search on the CPU, for comparison.

use std::io::{self, Read, Write};

use warpwire::error::{Error, Kind, Result};

/// Magic number at the start of queries and replies: the letters `WSIM`.
pub const MAGIC: u32 = u32::from_le_bytes(*b"WSIM");
/// Length of the header of a query and of a reply: four 32-bit words.
pub const HEAD: usize = 16;
/// Length of one match in a reply.
pub const MATCH: usize = 8;

/// ReplyStatus of a reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum ReplyStatus {
    /// Matches follow.
    Found = 0,
    /// The query did not begin with [`MAGIC`], or its last word was not 0.
    NoQuery = 1,
    /// The query's dimension differs from the server's.
    WrongDimension = 2,
    /// The query asks for no matches, or for more than the server's maximum.
    WrongCount = 3,
    /// A component of the query is infinite or NaN.
    NotFinite = 4,
    /// The server has reached its maximum number of clients.
    Full = 5,
}

impl ReplyStatus {
    const ALL: [Self; 6] = [
        Self::Found,
        Self::NoQuery,
        Self::WrongDimension,
        Self::WrongCount,
        Self::NotFinite,
        Self::Full,
    ];

    fn why(self) -> (&'static str, &'static str) {
        match self {
            Self::Found => ("", ""),
            Self::NoQuery => {
                ("the server did not recognize the query", "use a client of the same version")
            }
            Self::WrongDimension => {
                ("the server's vectors have another dimension", "use the server's dimension")
            }
            Self::WrongCount => {
                ("the number of matches is 0 or too large", "ask for 1 to the server's limit")
            }
            Self::NotFinite => ("a component is infinite or NaN", "use finite components"),
            Self::Full => ("the server has too many clients", "try again later"),
        }
    }
}

/// A vector that was found.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SearchHit {
    /// Index of the vector among the server's.
    pub id: u32,
    /// Inner product of the vector and the query.
    pub score: f32,
}

impl SearchHit {
    /// Whether it ranks before the other: a higher score, or the same score and a lower id. False
    /// for NaN.
    pub(super) fn beats(&self, other: &Self) -> bool {
        self.score > other.score || self.score == other.score && self.id < other.id
    }
}

/// Encodes a query: [`MAGIC`], the number of matches, the dimension, 0, then the components; all
/// little-endian 32-bit words.
pub fn query_bytes(k: u32, vector: &[f32]) -> Vec<u8> {
    let head = [MAGIC, k, vector.len() as u32, 0];
    let words = head.into_iter().map(u32::to_le_bytes);
    words.chain(vector.iter().map(|part| part.to_le_bytes())).flatten().collect()
}

/// Encodes the header of a reply: the status, and the number of matches that follow.
pub(super) fn head_bytes(status: ReplyStatus, count: u32) -> [u8; HEAD] {
    let mut bytes = [0; HEAD];
    for (into, word) in bytes.chunks_exact_mut(4).zip([MAGIC, status as u32, count, 0]) {
        into.copy_from_slice(&word.to_le_bytes());
    }
    bytes
}

fn words<const N: usize>(bytes: &[u8]) -> [u32; N] {
    let mut all = bytes.chunks_exact(4).map(|word| {
        let mut value = [0; 4];
        value.copy_from_slice(word);
        u32::from_le_bytes(value)
    });
    std::array::from_fn(|_| all.next().unwrap_or(0))
}

/// Checks the header of a query; returns the number of matches that it asks for.
pub(super) fn check_head(
    head: &[u8],
    dimension: u64,
    max_k: u64,
) -> std::result::Result<u32, ReplyStatus> {
    let [magic, k, found, zero] = words(head);
    match () {
        () if magic != MAGIC || zero != 0 => Err(ReplyStatus::NoQuery),
        () if u64::from(found) != dimension => Err(ReplyStatus::WrongDimension),
        () if k == 0 || u64::from(k) > max_k => Err(ReplyStatus::WrongCount),
        () => Ok(k),
    }
}

/// Sends a query over a connection of any kind and receives the matches, the best first.
///
/// # Errors
/// If the server rejects the query, or its reply is malformed
/// ([`InvalidData`](io::ErrorKind::InvalidData)), with the reason; otherwise the error of the
/// connection.
pub fn ask(mut server: impl Read + Write, k: u32, vector: &[f32]) -> io::Result<Vec<SearchHit>> {
    server.write_all(&query_bytes(k, vector))?;
    take_answer(&mut server, k)
}

/// The number of matches that follow a header; `None` if its status is not
/// [`ReplyStatus::Found`], or if there are more than `max`.
pub(super) fn matches_of(head: &[u8], max: usize) -> Option<usize> {
    let [magic, status, count, _] = words(head);
    let count = count as usize;
    (magic == MAGIC && status == ReplyStatus::Found as u32 && count <= max).then_some(count)
}

/// Receives a reply.
pub(super) fn take_answer(server: &mut impl Read, k: u32) -> io::Result<Vec<SearchHit>> {
    let mut head = [0; HEAD];
    server.read_exact(&mut head)?;
    let [magic, status, count, _] = words(&head);
    let wrong = |why: String, fix: &'static str| {
        let error = Error::new(Kind::Malformed, "query similar vectors").why(why).fix(fix);
        io::Error::new(io::ErrorKind::InvalidData, error)
    };
    let known = ReplyStatus::ALL.into_iter().find(|known| *known as u32 == status);
    match known {
        Some(ReplyStatus::Found) if magic == MAGIC && count <= k => {}
        Some(refused) if magic == MAGIC && refused != ReplyStatus::Found => {
            let (why, fix) = refused.why();
            return Err(wrong(why.to_owned(), fix));
        }
        _ => {
            let why = format!("the reply starts with {magic:#x}, {status}, {count}");
            return Err(wrong(why, "check that the peer is a similarity server"));
        }
    }
    let mut bytes = vec![0; count as usize * MATCH];
    server.read_exact(&mut bytes)?;
    let one = |bytes: &[u8]| {
        let [id, score] = words(bytes);
        SearchHit { id, score: f32::from_bits(score) }
    };
    Ok(bytes.chunks_exact(MATCH).map(one).collect())
}

/// The best matches among contiguous vectors, found by the CPU. Bitwise equal to the kernels'
/// result, since products are added in the same order.
///
/// ```
/// use warpwire_apps::similarity::search;
/// let vectors = [1.0, 0.0, 0.0, 1.0, 0.6, 0.8];
/// let found = search(&vectors, &[0.0, 2.0], 2);
/// assert_eq!(found.iter().map(|best| best.id).collect::<Vec<_>>(), [1, 2]);
/// assert_eq!(found[0].score, 2.0);
/// ```
pub fn search(vectors: &[f32], query: &[f32], k: u32) -> Vec<SearchHit> {
    let mut best = Best::new(k as usize);
    for (id, vector) in vectors.chunks_exact(query.len().max(1)).enumerate() {
        let product = |sum: f32, (a, b): (&f32, &f32)| a.mul_add(*b, sum);
        let score = query.iter().zip(vector).fold(0.0, product);
        best.offer(SearchHit { id: id as u32, score });
    }
    best.list
}

/// The best matches so far, in order.
pub(super) struct Best {
    pub(super) list: Vec<SearchHit>,
    max: usize,
}

impl Best {
    pub(super) fn new(max: usize) -> Self {
        Self { list: Vec::with_capacity(max.min(4096)), max }
    }

    #[inline]
    pub(super) fn offer(&mut self, one: SearchHit) {
        let full = self.list.len() >= self.max;
        let beaten = self.list.last().is_some_and(|last| !one.beats(last));
        if one.score.is_nan() || full && beaten {
            return;
        }
        if full {
            self.list.pop();
        }
        let place = self.list.partition_point(|other| other.beats(&one));
        self.list.insert(place, one);
    }
}

/// `count` vectors of that dimension with components in [-1, 1): deterministic for a given seed, on
/// every machine.
pub fn random_vectors(seed: u64, count: u64, dimension: u32) -> Vec<f32> {
    let total = count as usize * dimension as usize;
    let value = |at: usize| {
        let mut word = (at as u64 ^ seed << 40).wrapping_add(0x9e37_79b9_7f4a_7c15);
        for (shift, factor) in [(30, 0xbf58_476d_1ce4_e5b9_u64), (27, 0x94d0_49bb_1331_11eb)] {
            word = (word ^ word >> shift).wrapping_mul(factor);
        }
        // A float has 24 bits of precision.
        ((word ^ word >> 31) >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..total).map(value).collect()
}

/// Checks the vectors of a server; returns their number.
pub(super) fn check_vectors(vectors: &[f32], dimension: u32) -> Result<u64> {
    let wrong = |why: String, fix: &'static str| {
        Err(Error::new(Kind::InvalidArgument, "serve vectors").why(why).fix(fix))
    };
    if !(1..=16_384).contains(&dimension) {
        return wrong(format!("the dimension is {dimension}"), "use 1 to 16384 components");
    }
    let count = vectors.len() / dimension as usize;
    if count == 0 || !vectors.len().is_multiple_of(dimension as usize) {
        let why =
            format!("{} components do not form vectors of dimension {dimension}", vectors.len());
        return wrong(why, "pass all components of at least one vector");
    }
    if u32::try_from(count).is_err() {
        return wrong(format!("there are {count} vectors"), "serve fewer than 2^32");
    }
    match vectors.iter().position(|part| !part.is_finite()) {
        Some(at) => {
            let why =
                format!("vector {} has a component that is not finite", at / dimension as usize);
            wrong(why, "remove that vector")
        }
        None => Ok(count as u64),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn best_is_sorted_and_prefers_lower_ids_on_ties() {
        let mut best = Best::new(3);
        for (id, score) in [(4, 1.0), (1, 1.0), (9, 5.0), (2, f32::NAN), (3, -1.0), (0, 1.0)] {
            best.offer(SearchHit { id, score });
        }
        let found: Vec<_> = best.list.iter().map(|one| (one.id, one.score)).collect();
        assert_eq!(found, [(9, 5.0), (0, 1.0), (1, 1.0)]);
    }

    #[test]
    fn invalid_headers_are_rejected() {
        let good = query_bytes(3, &[1.0, 2.0]);
        assert_eq!(check_head(&good[..HEAD], 2, 10), Ok(3));
        assert_eq!(check_head(&good[..HEAD], 3, 10), Err(ReplyStatus::WrongDimension));
        assert_eq!(check_head(&good[..HEAD], 2, 2), Err(ReplyStatus::WrongCount));
        assert_eq!(
            check_head(&query_bytes(0, &[1.0, 2.0])[..HEAD], 2, 2),
            Err(ReplyStatus::WrongCount)
        );
        assert_eq!(check_head(b"GET / HTTP/1.1\r\n", 2, 2), Err(ReplyStatus::NoQuery));
    }

    #[test]
    fn malformed_replies_are_errors() {
        struct Recorded(io::Cursor<Vec<u8>>);
        impl Read for Recorded {
            fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
                self.0.read(into)
            }
        }
        impl Write for Recorded {
            fn write(&mut self, from: &[u8]) -> io::Result<usize> {
                Ok(from.len())
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let ask_of = |bytes: &[u8]| ask(Recorded(io::Cursor::new(bytes.to_vec())), 2, &[1.0]);
        let refused = ask_of(&head_bytes(ReplyStatus::Full, 0)).unwrap_err();
        assert!(refused.to_string().contains("too many clients"), "{refused}");
        let huge = ask_of(&head_bytes(ReplyStatus::Found, 3)).unwrap_err();
        assert_eq!(huge.kind(), io::ErrorKind::InvalidData, "more than requested");
        assert_eq!(ask_of(b"+PONG\r\n").unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
        assert!(ask_of(b"220 mail.example ESMTP\r\n").is_err());
        assert_eq!(ask_of(&head_bytes(ReplyStatus::Found, 0)).unwrap(), []);
    }

    #[test]
    fn random_vectors_are_deterministic() {
        let vectors = random_vectors(7, 100, 3);
        assert_eq!(vectors.len(), 300);
        assert!(vectors.iter().all(|part| (-1.0..1.0).contains(part)));
        assert_eq!(vectors, random_vectors(7, 100, 3));
        assert_ne!(vectors, random_vectors(8, 100, 3));
        assert_eq!(check_vectors(&vectors, 3).unwrap(), 100);
        for (wrong, dimension) in [(&vectors[..2], 3), (&vectors[..], 0), (&[f32::NAN][..], 1)] {
            check_vectors(wrong, dimension).unwrap_err();
        }
    }
}

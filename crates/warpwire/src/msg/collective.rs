//! What all ranks do together: small compositions of messages.
//!
//! Every rank makes these calls in the same order. Each has a number of its own, which is its messages' tag, so that
//! one is not taken for the other.

use std::time::{Duration, Instant};

use super::buffer::{Buffer, Part};
use super::comm::Comm;
use super::entries::Match;
use super::header::Channel;
use super::request::{Request, wait_all};
use crate::error::{Error, Kind, Result};

/// What is reduced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Element {
    /// 32-bit floating point.
    F32,
    /// 64-bit floating point.
    F64,
    /// 32-bit signed integers, which wrap.
    I32,
    /// 64-bit signed integers, which wrap.
    I64,
    /// 64-bit unsigned integers, which wrap.
    U64,
}

/// How it is reduced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reduce {
    /// The sum.
    Sum,
    /// The smallest.
    Min,
    /// The largest.
    Max,
}

/// Reductions go through so much memory at a time.
const CHUNK: u64 = 4 << 20;

impl Element {
    /// How many bytes.
    pub const fn bytes(self) -> u64 {
        match self {
            Self::F32 | Self::I32 => 4,
            Self::F64 | Self::I64 | Self::U64 => 8,
        }
    }
}

impl Comm {
    /// Returns when every rank has called it.
    pub fn barrier(&self, timeout: Duration) -> Result<()> {
        let (rank, size, tag) = (self.rank(), self.size(), self.next_round());
        let start = Instant::now();
        let mut step = 1;
        // After the step with distance d, a rank has heard of the 2 d before it.
        while step < size {
            let (to, from) = ((rank + step) % size, (rank + size - step) % size);
            let send = self.inner_send(to, tag, &[])?;
            let receive = self.inner_receive(from, tag, &[])?;
            let left = timeout.saturating_sub(start.elapsed());
            wait_all(&mut [receive, send], left).map_err(|why| why.during("meet all ranks"))?;
            step *= 2;
        }
        Ok(())
    }

    /// Every rank gets what `root` has in that memory. All give memory of one length.
    pub fn broadcast(&self, root: usize, part: impl Into<Part>, timeout: Duration) -> Result<()> {
        self.shared.check_rank(root, "get from")?;
        self.broadcast_part(root, &part.into(), timeout)
    }

    fn broadcast_part(&self, root: usize, part: &Part, timeout: Duration) -> Result<()> {
        let (size, tag, start) = (self.size(), self.next_round(), Instant::now());
        // Ranks are counted from the root on: a tree in which each hears from the one without its lowest bit.
        let place = (self.rank() + size - root) % size;
        let left = || timeout.saturating_sub(start.elapsed());
        let real = |place: usize| (place + root) % size;
        let lowest =
            if place == 0 { size.next_power_of_two() } else { place & place.wrapping_neg() };
        if place != 0 {
            let from = real(place - lowest);
            let parts = std::slice::from_ref(part);
            let came = self.inner_receive(from, tag, parts)?.wait(left())?;
            check_length(from, came.len, part.len)?;
        }
        let mut sends = Vec::new();
        let mut step = lowest / 2;
        while step > 0 {
            if place + step < size {
                sends.push(self.inner_send(real(place + step), tag, std::slice::from_ref(part))?);
            }
            step /= 2;
        }
        wait_all(&mut sends, left())
    }

    /// Every rank gets the reduction of what all have, element by element, in the place of its own. All give memory of
    /// one length. Sums are added in one order, so that all ranks get the same bits.
    pub fn all_reduce(
        &self,
        part: impl Into<Part>,
        element: Element,
        reduce: Reduce,
        timeout: Duration,
    ) -> Result<()> {
        let part = part.into();
        if part.len % element.bytes() != 0 {
            let error = Error::new(Kind::InvalidArgument, "reduce memory of all ranks");
            let why = format!("{} bytes are no number of {element:?}", part.len);
            return Err(error.why(why));
        }
        if self.size() == 1 || part.len == 0 {
            return Ok(());
        }
        let start = Instant::now();
        let scratch = self.alloc(part.len.min(CHUNK))?;
        let mut at = 0;
        while at < part.len {
            let len = (part.len - at).min(CHUNK);
            let chunk = part.buffer.part(part.offset + at, len)?;
            let left = || timeout.saturating_sub(start.elapsed());
            self.reduce_chunk(&chunk, &scratch, (element, reduce), left())?;
            self.broadcast_part(0, &chunk, left())?;
            at += len;
        }
        Ok(())
    }

    /// Rank 0 gets the reduction.
    fn reduce_chunk(
        &self,
        chunk: &Part,
        scratch: &Buffer,
        (element, reduce): (Element, Reduce),
        timeout: Duration,
    ) -> Result<()> {
        let (rank, size, tag, start) =
            (self.rank(), self.size(), self.next_round(), Instant::now());
        let left = || timeout.saturating_sub(start.elapsed());
        let room = scratch.part(0, chunk.len)?;
        let mut mine = vec![0; chunk.len as usize];
        let mut theirs = vec![0; chunk.len as usize];
        let mut step = 1;
        while step < size {
            if rank & step != 0 {
                return self
                    .inner_send(rank - step, tag, std::slice::from_ref(chunk))?
                    .wait(left())
                    .map(drop);
            }
            let from = rank + step;
            if from < size {
                let parts = std::slice::from_ref(&room);
                let came = self.inner_receive(from, tag, parts)?.wait(left())?;
                check_length(from, came.len, chunk.len)?;
                chunk.buffer.read(chunk.offset, &mut mine)?;
                scratch.read(0, &mut theirs)?;
                combine(&mut mine, &theirs, element, reduce);
                chunk.buffer.write(chunk.offset, &mine)?;
            }
            step *= 2;
        }
        Ok(())
    }

    /// What every rank gives, `len` bytes each, in the order of ranks.
    pub(super) fn gather_all(&self, mine: &[u8], len: usize) -> Result<Vec<u8>> {
        let (rank, size, tag) = (self.rank(), self.size(), self.next_round());
        let buffer = self.alloc((size * len) as u64)?;
        buffer.write((rank * len) as u64, mine)?;
        let part = |rank: usize| buffer.part((rank * len) as u64, len as u64);
        let mut requests = Vec::new();
        for other in (0..size).filter(|other| *other != rank) {
            requests.push(self.inner_receive(other, tag, &[part(other)?])?);
            requests.push(self.inner_send(other, tag, &[part(rank)?])?);
        }
        wait_all(&mut requests, self.shared.options.timeout)?;
        let mut all = vec![0; size * len];
        buffer.read(0, &mut all)?;
        Ok(all)
    }

    /// Tells every rank something of its own, `len` bytes each, and hears what each tells this one; in the order of
    /// ranks.
    pub(super) fn scatter_all(&self, told: &[u8], len: usize) -> Result<Vec<u8>> {
        let (rank, size, tag) = (self.rank(), self.size(), self.next_round());
        let (out, into) = (self.alloc((size * len) as u64)?, self.alloc((size * len) as u64)?);
        out.write(0, told)?;
        let part = |buffer: &Buffer, rank: usize| buffer.part((rank * len) as u64, len as u64);
        let mut requests = Vec::new();
        for other in (0..size).filter(|other| *other != rank) {
            requests.push(self.inner_receive(other, tag, &[part(&into, other)?])?);
            requests.push(self.inner_send(other, tag, &[part(&out, other)?])?);
        }
        wait_all(&mut requests, self.shared.options.timeout)?;
        let mut heard = vec![0; size * len];
        into.read(0, &mut heard)?;
        Ok(heard)
    }

    fn next_round(&self) -> u32 {
        let mut round = self.shared.round.lock();
        *round = round.wrapping_add(1);
        *round
    }

    fn inner_send(&self, to: usize, tag: u32, parts: &[Part]) -> Result<Request> {
        self.shared.send_on(Channel::Inner, to, tag, parts)
    }

    fn inner_receive(&self, from: usize, tag: u32, parts: &[Part]) -> Result<Request> {
        self.shared.receive_on(Channel::Inner, from, Match::Tag(tag), parts)
    }
}

fn check_length(from: usize, came: u64, wanted: u64) -> Result<()> {
    if came == wanted {
        return Ok(());
    }
    let error = Error::new(Kind::InvalidArgument, "do it together");
    Err(error.why(format!("rank {from} has {came} bytes, this one {wanted}")))
}

/// Reduces `theirs` into `mine`.
fn combine(mine: &mut [u8], theirs: &[u8], element: Element, reduce: Reduce) {
    macro_rules! each {
        ($type:ty, $add:expr, $min:expr, $max:expr) => {{
            const LEN: usize = size_of::<$type>();
            for (mine, theirs) in mine.chunks_exact_mut(LEN).zip(theirs.chunks_exact(LEN)) {
                let read = |bytes: &[u8]| {
                    <$type>::from_le_bytes(std::array::from_fn(|index| bytes[index]))
                };
                let (a, b) = (read(mine), read(theirs));
                let result = match reduce {
                    Reduce::Sum => $add(a, b),
                    Reduce::Min => $min(a, b),
                    Reduce::Max => $max(a, b),
                };
                mine.copy_from_slice(&result.to_le_bytes());
            }
        }};
    }
    match element {
        Element::F32 => each!(f32, |a: f32, b: f32| a + b, f32::min, f32::max),
        Element::F64 => each!(f64, |a: f64, b: f64| a + b, f64::min, f64::max),
        Element::I32 => each!(i32, i32::wrapping_add, Ord::min, Ord::max),
        Element::I64 => each!(i64, i64::wrapping_add, Ord::min, Ord::max),
        Element::U64 => each!(u64, u64::wrapping_add, Ord::min, Ord::max),
    }
}

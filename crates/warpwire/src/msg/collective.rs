//! Collectives, built from messages.
//!
//! Every rank makes these calls in the same order. Each call has a sequence number, which is the
//! tag of its messages, so that messages of different calls are not mixed up.

use std::time::{Duration, Instant};

use super::buffer::{Buffer, BufferSlice};
use super::comm::Comm;
use super::entries::Match;
use super::header::Channel;
use super::request::{Request, wait_all};
use crate::error::{Error, Kind, Result};

/// Element type of a reduction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DataType {
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

/// Operation of a reduction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReduceOp {
    /// The sum.
    Sum,
    /// The minimum.
    Min,
    /// The maximum.
    Max,
}

/// Reductions process this many bytes at a time, which bounds the scratch memory.
const CHUNK: u64 = 4 << 20;

impl DataType {
    /// Size in bytes.
    pub const fn bytes(self) -> u64 {
        match self {
            Self::F32 | Self::I32 => 4,
            Self::F64 | Self::I64 | Self::U64 => 8,
        }
    }
}

impl Comm {
    /// Returns once every rank has called it. Dissemination barrier: ⌈log₂ size⌉ rounds.
    pub fn barrier(&self, timeout: Duration) -> Result<()> {
        let (rank, size, tag) = (self.rank(), self.size(), self.next_round());
        let start = Instant::now();
        let mut step = 1;
        // After the round with distance d, a rank has a message from each of the 2d − 1 ranks
        // before it, directly or indirectly.
        while step < size {
            let (to, from) = ((rank + step) % size, (rank + size - step) % size);
            let send = self.internal_send(to, tag, &[])?;
            let receive = self.internal_receive(from, tag, &[])?;
            let left = timeout.saturating_sub(start.elapsed());
            wait_all(&mut [receive, send], left).map_err(|why| why.during("complete a barrier"))?;
            step *= 2;
        }
        Ok(())
    }

    /// Copies the memory of `root` to all ranks. The length must be the same on every rank.
    pub fn broadcast(
        &self,
        root: usize,
        slice: impl Into<BufferSlice>,
        timeout: Duration,
    ) -> Result<()> {
        self.shared.check_rank(root, "get from")?;
        self.broadcast_slice(root, &slice.into(), timeout)
    }

    fn broadcast_slice(&self, root: usize, slice: &BufferSlice, timeout: Duration) -> Result<()> {
        let (size, tag, start) = (self.size(), self.next_round(), Instant::now());
        // Binomial tree, with ranks relative to the root: each receives from the rank without its
        // lowest set bit.
        let relative_rank = (self.rank() + size - root) % size;
        let left = || timeout.saturating_sub(start.elapsed());
        let real = |relative_rank: usize| (relative_rank + root) % size;
        let lowest = if relative_rank == 0 {
            size.next_power_of_two()
        } else {
            relative_rank & relative_rank.wrapping_neg()
        };
        if relative_rank != 0 {
            let from = real(relative_rank - lowest);
            let slices = std::slice::from_ref(slice);
            let received = self.internal_receive(from, tag, slices)?.wait(left())?;
            check_length(from, received.len, slice.len)?;
        }
        let mut sends = Vec::new();
        let mut step = lowest / 2;
        while step > 0 {
            if relative_rank + step < size {
                sends.push(self.internal_send(
                    real(relative_rank + step),
                    tag,
                    std::slice::from_ref(slice),
                )?);
            }
            step /= 2;
        }
        wait_all(&mut sends, left())
    }

    /// Reduces the memory of all ranks element by element; the result replaces the input on every
    /// rank. The length must be the same on every rank. The order of operations is fixed, so that
    /// all ranks get the same bits.
    pub fn all_reduce(
        &self,
        slice: impl Into<BufferSlice>,
        element: DataType,
        reduce: ReduceOp,
        timeout: Duration,
    ) -> Result<()> {
        let slice = slice.into();
        if slice.len % element.bytes() != 0 {
            let error = Error::new(Kind::InvalidArgument, "reduce");
            let why = format!("{} bytes are not a multiple of {element:?}", slice.len);
            return Err(error.why(why));
        }
        if self.size() == 1 || slice.len == 0 {
            return Ok(());
        }
        let start = Instant::now();
        let scratch = self.alloc(slice.len.min(CHUNK))?;
        let mut at = 0;
        while at < slice.len {
            let len = (slice.len - at).min(CHUNK);
            let chunk = slice.buffer.slice(slice.offset + at, len)?;
            let left = || timeout.saturating_sub(start.elapsed());
            self.reduce_chunk(&chunk, &scratch, (element, reduce), left())?;
            self.broadcast_slice(0, &chunk, left())?;
            at += len;
        }
        Ok(())
    }

    /// Reduces to rank 0.
    fn reduce_chunk(
        &self,
        chunk: &BufferSlice,
        scratch: &Buffer,
        (element, reduce): (DataType, ReduceOp),
        timeout: Duration,
    ) -> Result<()> {
        let (rank, size, tag, start) =
            (self.rank(), self.size(), self.next_round(), Instant::now());
        let left = || timeout.saturating_sub(start.elapsed());
        let room = scratch.slice(0, chunk.len)?;
        let mut mine = vec![0; chunk.len as usize];
        let mut theirs = vec![0; chunk.len as usize];
        let mut step = 1;
        while step < size {
            if rank & step != 0 {
                return self
                    .internal_send(rank - step, tag, std::slice::from_ref(chunk))?
                    .wait(left())
                    .map(drop);
            }
            let from = rank + step;
            if from < size {
                let slices = std::slice::from_ref(&room);
                let received = self.internal_receive(from, tag, slices)?.wait(left())?;
                check_length(from, received.len, chunk.len)?;
                chunk.buffer.read(chunk.offset, &mut mine)?;
                scratch.read(0, &mut theirs)?;
                combine(&mut mine, &theirs, element, reduce);
                chunk.buffer.write(chunk.offset, &mine)?;
            }
            step *= 2;
        }
        Ok(())
    }

    /// Gathers `len` bytes of every rank, in the order of ranks.
    pub(super) fn all_gather(&self, mine: &[u8], len: usize) -> Result<Vec<u8>> {
        let (rank, size, tag) = (self.rank(), self.size(), self.next_round());
        let buffer = self.alloc((size * len) as u64)?;
        buffer.write((rank * len) as u64, mine)?;
        let slice = |rank: usize| buffer.slice((rank * len) as u64, len as u64);
        let mut requests = Vec::new();
        for other in (0..size).filter(|other| *other != rank) {
            requests.push(self.internal_receive(other, tag, &[slice(other)?])?);
            requests.push(self.internal_send(other, tag, &[slice(rank)?])?);
        }
        wait_all(&mut requests, self.shared.options.timeout)?;
        let mut all = vec![0; size * len];
        buffer.read(0, &mut all)?;
        Ok(all)
    }

    /// Sends `len` bytes to every rank, different for each, and returns those received, in the
    /// order of ranks.
    pub(super) fn all_to_all(&self, send_buf: &[u8], len: usize) -> Result<Vec<u8>> {
        let (rank, size, tag) = (self.rank(), self.size(), self.next_round());
        let (out, into) = (self.alloc((size * len) as u64)?, self.alloc((size * len) as u64)?);
        out.write(0, send_buf)?;
        let slice = |buffer: &Buffer, rank: usize| buffer.slice((rank * len) as u64, len as u64);
        let mut requests = Vec::new();
        for other in (0..size).filter(|other| *other != rank) {
            requests.push(self.internal_receive(other, tag, &[slice(&into, other)?])?);
            requests.push(self.internal_send(other, tag, &[slice(&out, other)?])?);
        }
        wait_all(&mut requests, self.shared.options.timeout)?;
        let mut recv_buf = vec![0; size * len];
        into.read(0, &mut recv_buf)?;
        Ok(recv_buf)
    }

    fn next_round(&self) -> u32 {
        let mut round = self.shared.round.lock();
        *round = round.wrapping_add(1);
        *round
    }

    fn internal_send(&self, to: usize, tag: u32, slices: &[BufferSlice]) -> Result<Request> {
        self.shared.start_send(Channel::Internal, to, tag, slices)
    }

    fn internal_receive(&self, from: usize, tag: u32, slices: &[BufferSlice]) -> Result<Request> {
        self.shared.start_receive(Channel::Internal, from, Match::Tag(tag), slices)
    }
}

fn check_length(from: usize, received: u64, wanted: u64) -> Result<()> {
    if received == wanted {
        return Ok(());
    }
    let error = Error::new(Kind::InvalidArgument, "run a collective");
    Err(error.why(format!("rank {from} has {received} bytes, this one {wanted}")))
}

/// Reduces `theirs` into `mine`.
fn combine(mine: &mut [u8], theirs: &[u8], element: DataType, reduce: ReduceOp) {
    macro_rules! each {
        ($type:ty, $add:expr, $min:expr, $max:expr) => {{
            const LEN: usize = size_of::<$type>();
            for (mine, theirs) in mine.chunks_exact_mut(LEN).zip(theirs.chunks_exact(LEN)) {
                let read = |bytes: &[u8]| {
                    <$type>::from_le_bytes(std::array::from_fn(|index| bytes[index]))
                };
                let (a, b) = (read(mine), read(theirs));
                let result = match reduce {
                    ReduceOp::Sum => $add(a, b),
                    ReduceOp::Min => $min(a, b),
                    ReduceOp::Max => $max(a, b),
                };
                mine.copy_from_slice(&result.to_le_bytes());
            }
        }};
    }
    match element {
        DataType::F32 => each!(f32, |a: f32, b: f32| a + b, f32::min, f32::max),
        DataType::F64 => each!(f64, |a: f64, b: f64| a + b, f64::min, f64::max),
        DataType::I32 => each!(i32, i32::wrapping_add, Ord::min, Ord::max),
        DataType::I64 => each!(i64, i64::wrapping_add, Ord::min, Ord::max),
        DataType::U64 => each!(u64, u64::wrapping_add, Ord::min, Ord::max),
    }
}

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
/// Reductions of fewer bytes are done by a tree, which has fewer steps.
const TREE_BELOW: u64 = 16 << 10;

/// A message to one rank, and one from another.
struct Exchange {
    to: usize,
    send: BufferSlice,
    from: usize,
    recv: BufferSlice,
}

/// Memory with a block for every rank.
struct Blocks {
    slice: BufferSlice,
    /// Offsets at which the blocks begin, and the end.
    bounds: Vec<u64>,
}

impl Blocks {
    fn get(&self, rank: usize) -> Result<BufferSlice> {
        let (from, to) = (self.bounds[rank], self.bounds[rank + 1]);
        self.slice.buffer.slice(self.slice.offset + from, to - from)
    }
}

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

    /// Gathers a block of every rank on all ranks, in place: `slice` has one block per rank, all of
    /// one length, and that of this rank is its input. The length must be the same on every rank.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use warpwire::msg::Comm;
    /// # let second = Duration::from_secs(10);
    /// # let ranks = Comm::local(2)?.into_iter().map(|comm| {
    /// #     std::thread::spawn(move || -> warpwire::Result<()> {
    /// let all = comm.alloc(2)?;
    /// all.write(comm.rank() as u64, &[10 + comm.rank() as u8])?;
    /// comm.all_gather(&all, second)?;
    /// let mut bytes = [0; 2];
    /// all.read(0, &mut bytes)?;
    /// assert_eq!(bytes, [10, 11]);
    /// # comm.finish(second)
    /// #     })
    /// # });
    /// # ranks.collect::<Vec<_>>().into_iter().try_for_each(|rank| rank.join().unwrap())?;
    /// # Ok::<(), warpwire::Error>(())
    /// ```
    pub fn all_gather(&self, slice: impl Into<BufferSlice>, timeout: Duration) -> Result<()> {
        let slice = slice.into();
        let block = self.block_len(&slice, "gather from all")?;
        let bounds = (0..=self.size() as u64).map(|index| index * block).collect();
        self.gather_blocks(&Blocks { slice, bounds }, timeout)
    }

    /// Reduces the memory of all ranks element by element, and leaves each rank with its block of
    /// the result, in place: `slice` has one block per rank, all of one length; the others keep
    /// this rank's input. The length must be the same on every rank.
    pub fn reduce_scatter(
        &self,
        slice: impl Into<BufferSlice>,
        element: DataType,
        reduce: ReduceOp,
        timeout: Duration,
    ) -> Result<()> {
        let (slice, start) = (slice.into(), Instant::now());
        let block = self.block_len(&slice, "reduce")?;
        check_elements(block, element)?;
        // Pieces of every block, so that the scratch memory is bounded.
        let piece = (CHUNK / self.size() as u64).max(element.bytes()) & !(element.bytes() - 1);
        let mut at = 0;
        while at < block {
            let len = piece.min(block - at);
            let part = |rank: u64| slice.buffer.slice(slice.offset + rank * block + at, len);
            let parts = (0..self.size() as u64).map(part).collect::<Result<Vec<_>>>()?;
            let left = timeout.saturating_sub(start.elapsed());
            self.reduce_parts(&parts, (element, reduce), left)?;
            at += len;
        }
        Ok(())
    }

    /// Sends a block to every rank: block `j` of `send` becomes block `rank` of `recv` at rank `j`.
    /// Both have one block per rank, all of one length, which must be the same on every rank; they
    /// must not overlap.
    pub fn all_to_all(
        &self,
        send: impl Into<BufferSlice>,
        recv: impl Into<BufferSlice>,
        timeout: Duration,
    ) -> Result<()> {
        let (send, recv) = (send.into(), recv.into());
        let block = self.block_len(&send, "exchange with all")?;
        if recv.len != send.len {
            let why = format!("{} bytes to send, {} to receive", send.len, recv.len);
            return Err(Error::new(Kind::InvalidArgument, "exchange with all").why(why));
        }
        let part = |slice: &BufferSlice, rank: usize| {
            slice.buffer.slice(slice.offset + rank as u64 * block, block)
        };
        // Also from this rank to itself: the memory may be a GPU's.
        let own = std::iter::once((self.rank(), self.rank()));
        let messages = own.chain(self.partners()).map(|(to, from)| {
            Ok(Exchange { to, send: part(&send, to)?, from, recv: part(&recv, from)? })
        });
        self.exchange(&messages.collect::<Result<Vec<_>>>()?, timeout, |_| Ok(()))
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
        let (slice, start) = (slice.into(), Instant::now());
        check_elements(slice.len, element)?;
        let mut at = 0;
        while at < slice.len && self.size() > 1 {
            let len = (slice.len - at).min(CHUNK);
            let chunk = slice.buffer.slice(slice.offset + at, len)?;
            let left = || timeout.saturating_sub(start.elapsed());
            if len < TREE_BELOW {
                self.reduce_to_first(&chunk, (element, reduce), left())?;
                self.broadcast_slice(0, &chunk, left())?;
            } else {
                // Every rank reduces a block, so that all links and processors work.
                let count = len / element.bytes();
                let size = self.size() as u64;
                let bounds = (0..=size).map(|rank| rank * count / size * element.bytes());
                let blocks = Blocks { slice: chunk, bounds: bounds.collect() };
                let parts = (0..self.size()).map(|rank| blocks.get(rank));
                let parts = parts.collect::<Result<Vec<_>>>()?;
                self.reduce_parts(&parts, (element, reduce), left())?;
                self.gather_blocks(&blocks, left())?;
            }
            at += len;
        }
        Ok(())
    }

    /// The length of a rank's block of this memory.
    fn block_len(&self, slice: &BufferSlice, what: &'static str) -> Result<u64> {
        let size = self.size() as u64;
        if slice.len.is_multiple_of(size) {
            return Ok(slice.len / size);
        }
        let why = format!("{} bytes are not a multiple of the {size} ranks", slice.len);
        Err(Error::new(Kind::InvalidArgument, what).why(why).fix("use blocks of one length"))
    }

    /// Sends this rank's block to every other rank. A ring would have as many bytes on every link
    /// and more steps, and a rank that fails would be noticed by its neighbours only.
    fn gather_blocks(&self, blocks: &Blocks, timeout: Duration) -> Result<()> {
        let own = blocks.get(self.rank())?;
        let messages = self.partners().map(|(to, from)| {
            Ok(Exchange { to, send: own.clone(), from, recv: blocks.get(from)? })
        });
        self.exchange(&messages.collect::<Result<Vec<_>>>()?, timeout, |_| Ok(()))
    }

    /// Sends and receives all messages at the same time. Calls `received` with the index of each,
    /// in order, when it has arrived.
    fn exchange(
        &self,
        messages: &[Exchange],
        timeout: Duration,
        mut received: impl FnMut(usize) -> Result<()>,
    ) -> Result<()> {
        let (tag, start) = (self.next_round(), Instant::now());
        let left = || timeout.saturating_sub(start.elapsed());
        let mut receives = Vec::with_capacity(messages.len());
        let mut sends = Vec::with_capacity(messages.len());
        for Exchange { to, send, from, recv } in messages {
            receives.push(self.internal_receive(*from, tag, std::slice::from_ref(recv))?);
            sends.push(self.internal_send(*to, tag, std::slice::from_ref(send))?);
        }
        for (index, receive) in receives.iter_mut().enumerate() {
            let Exchange { from, recv, .. } = &messages[index];
            check_length(*from, receive.wait(left())?.len, recv.len)?;
            received(index)?;
        }
        wait_all(&mut sends, left())
    }

    /// The other ranks in two orders, to send to and to receive from: at any time every rank has
    /// one sender and one receiver.
    fn partners(&self) -> impl Iterator<Item = (usize, usize)> {
        let (rank, size) = (self.rank(), self.size());
        (1..size).map(move |step| ((rank + step) % size, (rank + size - step) % size))
    }

    /// Reduces part `j` of all ranks on rank `j`.
    fn reduce_parts(
        &self,
        parts: &[BufferSlice],
        (element, reduce): (DataType, ReduceOp),
        timeout: Duration,
    ) -> Result<()> {
        let own = &parts[self.rank()];
        let scratch = self.take_scratch(own.len * self.size() as u64)?;
        let messages = self.partners().enumerate().map(|(index, (to, from))| {
            let recv = scratch.slice(index as u64 * own.len, own.len)?;
            Ok(Exchange { to, send: parts[to].clone(), from, recv })
        });
        let mut result = vec![0; own.len as usize];
        let mut theirs = vec![0; own.len as usize];
        own.buffer.read(own.offset, &mut result)?;
        self.exchange(&messages.collect::<Result<Vec<_>>>()?, timeout, |index| {
            scratch.read(index as u64 * own.len, &mut theirs)?;
            combine(&mut result, &theirs, element, reduce);
            Ok(())
        })?;
        own.buffer.write(own.offset, &result)?;
        self.keep_scratch(scratch);
        Ok(())
    }

    /// Reduces to rank 0, by a binomial tree.
    fn reduce_to_first(
        &self,
        chunk: &BufferSlice,
        (element, reduce): (DataType, ReduceOp),
        timeout: Duration,
    ) -> Result<()> {
        let (rank, size, tag) = (self.rank(), self.size(), self.next_round());
        let start = Instant::now();
        let left = || timeout.saturating_sub(start.elapsed());
        let scratch = self.take_scratch(chunk.len)?;
        let room = scratch.slice(0, chunk.len)?;
        let mut mine = vec![0; chunk.len as usize];
        let mut theirs = vec![0; chunk.len as usize];
        let mut step = 1;
        while step < size {
            if rank & step != 0 {
                let to = rank - step;
                self.internal_send(to, tag, std::slice::from_ref(chunk))?.wait(left())?;
                break;
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
        self.keep_scratch(scratch);
        Ok(())
    }

    /// At least `len` bytes to receive into. Those of a call that failed are not kept: a late
    /// message may still be written to them.
    fn take_scratch(&self, len: u64) -> Result<Buffer> {
        let kept = self.shared.scratch.lock().take();
        match kept.filter(|kept| kept.len() >= len) {
            Some(scratch) => Ok(scratch),
            None => self.alloc(len.next_power_of_two().max(TREE_BELOW)),
        }
    }

    fn keep_scratch(&self, scratch: Buffer) {
        *self.shared.scratch.lock() = Some(scratch);
    }

    /// Gathers `len` bytes of every rank, in the order of ranks.
    pub(super) fn all_gather_bytes(&self, mine: &[u8], len: usize) -> Result<Vec<u8>> {
        let buffer = self.alloc((self.size() * len) as u64)?;
        buffer.write((self.rank() * len) as u64, mine)?;
        self.all_gather(&buffer, self.shared.options.timeout)?;
        let mut all = vec![0; self.size() * len];
        buffer.read(0, &mut all)?;
        Ok(all)
    }

    /// Sends `len` bytes to every rank, different for each, and returns those received, in the
    /// order of ranks.
    pub(super) fn all_to_all_bytes(&self, send_buf: &[u8], len: usize) -> Result<Vec<u8>> {
        let total = (self.size() * len) as u64;
        let (out, into) = (self.alloc(total)?, self.alloc(total)?);
        out.write(0, send_buf)?;
        self.all_to_all(&out, &into, self.shared.options.timeout)?;
        let mut recv_buf = vec![0; self.size() * len];
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

fn check_elements(len: u64, element: DataType) -> Result<()> {
    if len.is_multiple_of(element.bytes()) {
        return Ok(());
    }
    let why = format!("{len} bytes are not a multiple of {element:?}");
    Err(Error::new(Kind::InvalidArgument, "reduce").why(why))
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

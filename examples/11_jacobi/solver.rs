//! The rows of one rank, and the halo exchange in each mode.
#![allow(unsafe_code)]

use std::time::{Duration, Instant};

use warpwire::error::Kind;
use warpwire::mem::{Allocation, Device, Kernel, Launch, Stream};
use warpwire::msg::{
    Buffer, BufferSlice, ChannelOptions, ChannelRequest, Comm, DeviceChannel, RmaWindow, wait_all,
};
use warpwire::{Error, Result};

use super::TIMEOUT;
use super::kernel::{self, SIDE_WORDS, WORDS};

/// What exchanges the rows: the CPU, the stream, or the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    Cpu,
    Stream,
    Kernel,
}

/// Two grids (double buffering): each step reads one and writes the other. Each has a halo row of
/// the neighbour above and one of the neighbour below.
pub struct Solver<'a> {
    comm: &'a Comm,
    device_channel: DeviceChannel,
    stream: Stream,
    step: Kernel,
    grids: Allocation,
    buffer: Buffer,
    window: RmaWindow,
    /// Number of rows received from above and from below; finished blocks; the first failure.
    words: Allocation,
    word_window: RmaWindow,
    exchange: Allocation,
    rows: u64,
    columns: u64,
}

/// First row and number of rows of a rank.
fn rows_of(size: u64, rank: usize, ranks: usize) -> (u64, u64) {
    let (rank, ranks) = (rank as u64, ranks as u64);
    let inner = size - 2;
    let first = inner * rank / ranks;
    (first, inner * (rank + 1) / ranks - first)
}

/// The top edge is 1, everything else 0.
fn initial(size: u64) -> Vec<f32> {
    let mut grid = vec![0.0; (size * size) as usize];
    grid[..size as usize].fill(1.0);
    grid
}

/// The solution computed on one CPU.
pub fn reference(size: u64, steps: u64) -> Vec<f32> {
    let (mut old, n) = (initial(size), size as usize);
    let mut next = old.clone();
    for _ in 0..steps {
        for row in 1..n - 1 {
            for column in 1..n - 1 {
                let at = row * n + column;
                next[at] = ((old[at - n] + old[at + n]) + (old[at - 1] + old[at + 1])) * 0.25;
            }
        }
        std::mem::swap(&mut old, &mut next);
    }
    old
}

impl<'a> Solver<'a> {
    pub fn new(comm: &'a Comm, device: &Device, size: u64) -> Result<Self> {
        let (_, rows) = rows_of(size, comm.rank(), comm.size());
        let device_channel = comm.device_channel(device, ChannelOptions::default())?;
        let grids = device.alloc(2 * (rows + 2) * size * 4)?;
        let buffer = comm.register(grids.whole()?)?;
        let window = comm.window(&buffer)?;
        let words = device.alloc(64)?;
        let word_window = comm.window(&comm.register(words.whole()?)?)?;
        let solver = Self {
            comm,
            device_channel,
            stream: device.stream()?,
            step: kernel::load(device)?,
            grids,
            buffer,
            window,
            words,
            word_window,
            exchange: device.alloc(WORDS as u64 * 8)?,
            rows,
            columns: size,
        };
        solver.write_exchange()?;
        solver.reset()?;
        Ok(solver)
    }

    fn row_bytes(&self) -> u64 {
        self.columns * 4
    }

    /// Byte offset of a row of a grid.
    fn row(&self, grid: u64, row: u64) -> u64 {
        (grid * (self.rows + 2) + row) * self.row_bytes()
    }

    fn slice(&self, grid: u64, row: u64) -> Result<BufferSlice> {
        self.buffer.slice(self.row(grid, row), self.row_bytes())
    }

    fn up(&self) -> Option<usize> {
        self.comm.rank().checked_sub(1)
    }

    fn down(&self) -> Option<usize> {
        Some(self.comm.rank() + 1).filter(|rank| *rank < self.comm.size())
    }

    /// Writes the kernel's parameters: the neighbours' queue pairs, addresses and keys.
    fn write_exchange(&self) -> Result<()> {
        let mut words = [0; WORDS];
        for (down, neighbour) in [self.up(), self.down()].into_iter().enumerate() {
            let Some(rank) = neighbour else { continue };
            let (_, rows) = rows_of(self.columns, rank, self.comm.size());
            // Our first row is the lower halo of the rank above, our last the upper halo of the one
            // below.
            let row = if down == 1 { 0 } else { rows + 1 };
            let at = |grid: u64| {
                let offset = (grid * (rows + 2) + row) * self.row_bytes();
                self.window.remote(rank, offset, self.row_bytes())
            };
            // For the rank above we are the neighbour below, and vice versa.
            let word = self.word_window.word(rank, if down == 1 { 0 } else { 8 }, 8)?;
            let own = self.words.address().raw() + down as u64 * 8;
            let side = [
                self.device_channel.kernel(rank)?.handle().raw(),
                at(0)?.address,
                at(1)?.address,
                at(0)?.rkey.into(),
                word.address,
                word.rkey.into(),
                own,
            ];
            words[down * SIDE_WORDS..(down + 1) * SIDE_WORDS].copy_from_slice(&side);
        }
        let base = self.words.address().raw();
        let shared = [
            self.buffer.registration().lkey().into(),
            base + 16,
            base + 24,
            TIMEOUT.as_nanos() as u64,
        ];
        words[2 * SIDE_WORDS..].copy_from_slice(&shared);
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        self.exchange.write(0, &bytes)
    }

    /// Restores the initial state. Collective.
    pub fn reset(&self) -> Result<()> {
        self.comm.barrier(TIMEOUT)?;
        let whole = initial(self.columns);
        let (first, rows) = rows_of(self.columns, self.comm.rank(), self.comm.size());
        let n = self.columns as usize;
        let mine = &whole[first as usize * n..(first + rows + 2) as usize * n];
        let bytes: Vec<u8> = mine.iter().flat_map(|value| value.to_le_bytes()).collect();
        self.grids.write(0, &bytes)?;
        self.grids.write(bytes.len() as u64, &bytes)?;
        self.words.write(0, &[0; 64])?;
        self.comm.barrier(TIMEOUT)
    }

    /// Runs `steps` steps and returns the time they took. Collective.
    pub fn run(&mut self, mode: Mode, steps: u64) -> Result<Duration> {
        self.comm.barrier(TIMEOUT)?;
        let start = Instant::now();
        for step in 0..steps {
            self.compute(step, mode == Mode::Kernel)?;
            let grid = (step + 1) % 2;
            match mode {
                Mode::Cpu => self.exchange_by_cpu(grid)?,
                Mode::Stream => self.exchange_by_stream(grid)?,
                Mode::Kernel => {}
            }
        }
        if mode == Mode::Kernel {
            // No kernel waits for the rows of the last step. They must arrive before a neighbour
            // starts over.
            for rank in [self.up(), self.down()].into_iter().flatten() {
                self.device_channel.kernel(rank)?.wait_on_stream(&self.stream)?;
            }
        }
        self.stream.synchronize(TIMEOUT)?;
        self.device_channel.check()?;
        let report = self.words.word64(24)?.load()?;
        assert_eq!(report, 0, "a kernel reports failure {report:#x}");
        let took = start.elapsed();
        self.comm.barrier(TIMEOUT)?;
        self.steps_done(steps).map(|()| took)
    }

    /// Copies the result to the first grid, if the last step wrote the second.
    fn steps_done(&mut self, steps: u64) -> Result<()> {
        if steps % 2 == 1 {
            let len = (self.rows + 2) * self.row_bytes();
            let (first, second) = (self.grids.region(0, len)?, self.grids.region(len, len)?);
            self.stream.copy(&first, &second)?;
            self.stream.synchronize(TIMEOUT)?;
        }
        Ok(())
    }

    fn compute(&self, step: u64, exchanges: bool) -> Result<()> {
        let base = self.grids.address().raw();
        let (from, to) = (step % 2, (step + 1) % 2);
        let exchange = if exchanges { self.exchange.address().raw() } else { 0 };
        let mut launch = Launch::new(&self.step)
            .grid((self.rows.min(64)) as u32)
            .threads(128)
            .value(base + self.row(from, 0))
            .value(base + self.row(to, 0))
            .value(self.rows)
            .value(self.columns)
            .value(step)
            .value(exchange)
            .keep_alive(&self.grids.whole()?)
            .keep_alive(&self.words.whole()?)
            .keep_alive(&self.exchange.whole()?);
        launch = launch.keep_alive(&self.grids.whole()?);
        // SAFETY: the kernel accesses the grids, the words and the parameters, which the launch
        // keeps alive, and the queue pairs of the device channel, which outlives the stream's work.
        unsafe { self.stream.launch(launch) }
    }

    /// The CPU waits for the stream, exchanges the rows, and waits for the messages.
    fn exchange_by_cpu(&self, grid: u64) -> Result<()> {
        self.stream.synchronize(TIMEOUT)?;
        let mut requests = Vec::new();
        let ends = [(self.up(), 0, 1), (self.down(), self.rows + 1, self.rows)];
        for (neighbour, halo, edge) in ends {
            let Some(rank) = neighbour else { continue };
            requests.push(self.comm.irecv(rank, 0, self.slice(grid, halo)?)?);
            requests.push(self.comm.isend(rank, 0, self.slice(grid, edge)?)?);
        }
        wait_all(&mut requests, TIMEOUT)
    }

    /// The CPU only enqueues; the stream sends and waits.
    fn exchange_by_stream(&self, grid: u64) -> Result<()> {
        let mut receives: Vec<ChannelRequest> = Vec::new();
        let ends = [(self.up(), 0, 1), (self.down(), self.rows + 1, self.rows)];
        for (neighbour, halo, edge) in ends {
            let Some(rank) = neighbour else { continue };
            let receive = || self.device_channel.receive(rank, self.slice(grid, halo)?);
            receives.push(self.retry_while_busy(receive)?);
            self.retry_while_busy(|| {
                self.device_channel
                    .send_on_stream(&self.stream, rank, self.slice(grid, edge)?)
                    .map(drop)
            })?;
        }
        receives.iter().try_for_each(|receive| {
            self.retry_while_busy(|| self.device_channel.wait_on_stream(&self.stream, receive))
        })
    }

    /// Retries while the queue is full.
    fn retry_while_busy<T>(&self, mut attempt: impl FnMut() -> Result<T>) -> Result<T> {
        let start = Instant::now();
        loop {
            match attempt() {
                Err(error) if error.kind() == &Kind::Busy && start.elapsed() < TIMEOUT => {
                    self.device_channel.progress()?;
                    std::thread::yield_now();
                }
                other => return other,
            }
        }
    }

    /// Collects all rows at rank 0; `None` on other ranks. Collective.
    pub fn gather(&self) -> Result<Option<Vec<f32>>> {
        let (n, rank) = (self.columns, self.comm.rank());
        if rank != 0 {
            let slice = self.buffer.slice(self.row(0, 1), self.rows * self.row_bytes())?;
            self.comm.send(0, 1, slice, TIMEOUT)?;
            return Ok(None);
        }
        let mut bytes = vec![0; ((self.rows + 2) * self.row_bytes()) as usize];
        self.grids.read(0, &mut bytes)?;
        let row_bytes = self.row_bytes() as usize;
        bytes.truncate((self.rows as usize + 1) * row_bytes);
        for other in 1..self.comm.size() {
            let (_, rows) = rows_of(n, other, self.comm.size());
            let into = self.comm.alloc(rows * self.row_bytes())?;
            let received = self.comm.recv(other, 1, &into, TIMEOUT)?.len;
            if received != into.len() {
                let error = Error::new(Kind::Malformed, "gather the rows");
                return Err(error.why(format!("rank {other} sent {received} bytes")));
            }
            let mut slice = vec![0; received as usize];
            into.read(0, &mut slice)?;
            bytes.extend(slice);
        }
        let value = |word: &[u8]| f32::from_le_bytes(std::array::from_fn(|index| word[index]));
        let mut grid: Vec<f32> = bytes.chunks_exact(4).map(value).collect();
        // The last row never changes.
        grid.resize((n * n) as usize, 0.0);
        Ok(Some(grid))
    }
}

//! The rows of one rank, and the exchange of the outermost ones in each mode.
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

/// Who exchanges rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    Cpu,
    Stream,
    Kernel,
}

/// Two grids, of which one is read and the other written, in turn. Each has a row of the neighbour above and one of the
/// neighbour below.
pub struct Solver<'a> {
    comm: &'a Comm,
    device_channel: DeviceChannel,
    stream: Stream,
    step: Kernel,
    grids: Allocation,
    buffer: Buffer,
    window: RmaWindow,
    /// Counts of rows that came from above and below; blocks that have finished; a report of what failed.
    words: Allocation,
    word_window: RmaWindow,
    exchange: Allocation,
    rows: u64,
    columns: u64,
}

/// The rows of a rank of so many.
fn rows_of(size: u64, rank: usize, ranks: usize) -> (u64, u64) {
    let (rank, ranks) = (rank as u64, ranks as u64);
    let inner = size - 2;
    let first = inner * rank / ranks;
    (first, inner * (rank + 1) / ranks - first)
}

/// One hot side, three cold ones.
fn initial(size: u64) -> Vec<f32> {
    let mut grid = vec![0.0; (size * size) as usize];
    grid[..size as usize].fill(1.0);
    grid
}

/// The same on one CPU.
pub fn alone(size: u64, steps: u64) -> Vec<f32> {
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
        solver.describe()?;
        solver.reset()?;
        Ok(solver)
    }

    fn row_bytes(&self) -> u64 {
        self.columns * 4
    }

    /// Where a row of a grid lies.
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

    /// Writes what the kernel must know of the neighbours.
    fn describe(&self) -> Result<()> {
        let mut words = [0; WORDS];
        for (down, neighbour) in [self.up(), self.down()].into_iter().enumerate() {
            let Some(rank) = neighbour else { continue };
            let (_, rows) = rows_of(self.columns, rank, self.comm.size());
            // Our first row is the last of the one above, with its halo; our last the first of the one below.
            let row = if down == 1 { 0 } else { rows + 1 };
            let at = |grid: u64| {
                let offset = (grid * (rows + 2) + row) * self.row_bytes();
                self.window.remote(rank, offset, self.row_bytes())
            };
            // There we are the other neighbour.
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

    /// Back to the beginning; all ranks together.
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

    /// So many steps; how long they took.
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
            // Nobody waits for the rows of the last step: they must not come when others have begun anew.
            for rank in [self.up(), self.down()].into_iter().flatten() {
                self.device_channel.kernel(rank)?.wait_on_stream(&self.stream)?;
            }
        }
        self.stream.synchronize(TIMEOUT)?;
        self.device_channel.check()?;
        let report = self.words.word64(24)?.load()?;
        assert_eq!(report, 0, "a kernel says {report:#x}");
        let took = start.elapsed();
        self.comm.barrier(TIMEOUT)?;
        self.steps_done(steps).map(|()| took)
    }

    /// The last grid that was written is the first, for whoever looks.
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
        // SAFETY: the kernel reads one grid and writes the other, the words and the parameters, all of which the launch
        // keeps; the queue pairs live as long as the lane, which outlives the stream's work.
        unsafe { self.stream.launch(launch) }
    }

    /// The CPU waits for the stream, exchanges, and waits for that.
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

    /// The CPU prepares, and goes on to the next step.
    fn exchange_by_stream(&self, grid: u64) -> Result<()> {
        let mut receives: Vec<ChannelRequest> = Vec::new();
        let ends = [(self.up(), 0, 1), (self.down(), self.rows + 1, self.rows)];
        for (neighbour, halo, edge) in ends {
            let Some(rank) = neighbour else { continue };
            receives
                .push(self.room(|| self.device_channel.receive(rank, self.slice(grid, halo)?))?);
            self.room(|| {
                self.device_channel
                    .send_on_stream(&self.stream, rank, self.slice(grid, edge)?)
                    .map(drop)
            })?;
        }
        receives.iter().try_for_each(|receive| {
            self.room(|| self.device_channel.wait_on_stream(&self.stream, receive))
        })
    }

    /// Waits while there is no room for more.
    fn room<T>(&self, mut attempt: impl FnMut() -> Result<T>) -> Result<T> {
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

    /// Rank 0 gets all rows.
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
            let came = self.comm.recv(other, 1, &into, TIMEOUT)?.len;
            if came != into.len() {
                let error = Error::new(Kind::Malformed, "gather the rows");
                return Err(error.why(format!("rank {other} sent {came} bytes")));
            }
            let mut slice = vec![0; came as usize];
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

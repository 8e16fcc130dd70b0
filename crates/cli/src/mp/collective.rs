//! Collectives between N ranks, measured and printed in the shape of nccl-tests.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use serde::Serialize;
use warpwire::msg::{Buffer, Comm, CommOptions, DataType, Launcher, RankInfo, ReduceOp};

use super::{duration, size};
use crate::machine::Machine;
use crate::output::{self, Failure, Reporter, digits};
use crate::perf::memory::{MemoryChoice, device};
use crate::run::{self, Job};

#[derive(Args)]
pub(crate) struct Arguments {
    /// Number of ranks that are started on this machine; under a launcher, all of its ranks
    #[arg(short = 'n', long, value_name = "N", default_value_t = 2,
        value_parser = clap::value_parser!(u16).range(1..=256))]
    ranks: u16,

    /// Smallest size
    #[arg(short = 'b', long, visible_alias = "minbytes", value_name = "SIZE", default_value = "8",
        value_parser = size)]
    min: u64,

    /// Largest size
    #[arg(short = 'e', long, visible_alias = "maxbytes", value_name = "SIZE",
        default_value = "1MiB", value_parser = size)]
    max: u64,

    /// Factor from one size to the next
    #[arg(short = 'f', long, visible_alias = "stepfactor", value_name = "N", default_value_t = 2,
        value_parser = clap::value_parser!(u64).range(2..))]
    factor: u64,

    /// Type of the elements
    #[arg(short = 'd', long, value_name = "TYPE", default_value = "float")]
    datatype: Type,

    /// Operation of a reduction
    #[arg(short = 'o', long, value_name = "OP", default_value = "sum")]
    op: Op,

    /// Rank that broadcasts
    #[arg(short = 'r', long, value_name = "RANK", default_value_t = 0)]
    root: usize,

    /// Calls per size [default: 20, more for small sizes]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    iters: Option<u32>,

    /// Memory of the ranks: host, sim:N or cuda:N
    #[arg(long, value_name = "MEMORY", default_value = "host")]
    mem: MemoryChoice,

    /// Link between ranks on this machine: auto, udp or shm [default: WARPWIRE_LINK, else auto]
    #[arg(long, value_name = "LINK", value_parser = ["auto", "udp", "shm"])]
    link: Option<String>,

    /// Timeout for the other ranks to connect, and for each call
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = duration)]
    timeout: Duration,

    /// Print JSON: {"machine": {…}, "test": …, "ranks": …, "rows": [{"size": …, "time_us": …}], …}
    #[arg(long)]
    json: bool,
}

/// Which collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Collective {
    AllReduce,
    AllGather,
    ReduceScatter,
    AllToAll,
    Broadcast,
}

impl Collective {
    fn name(self) -> &'static str {
        match self {
            Self::AllReduce => "all_reduce",
            Self::AllGather => "all_gather",
            Self::ReduceScatter => "reduce_scatter",
            Self::AllToAll => "all_to_all",
            Self::Broadcast => "broadcast",
        }
    }

    fn reduces(self) -> bool {
        matches!(self, Self::AllReduce | Self::ReduceScatter)
    }

    /// Blocks that the memory of a rank consists of.
    fn blocks(self, ranks: usize) -> u64 {
        match self {
            Self::AllReduce | Self::Broadcast => 1,
            Self::AllGather | Self::ReduceScatter | Self::AllToAll => ranks.max(1) as u64,
        }
    }

    /// Bandwidth of the bus by that of the algorithm, as nccl-tests define it: what a link carries
    /// at least.
    fn bus_factor(self, ranks: usize) -> f64 {
        let others = (ranks as f64 - 1.0) / ranks as f64;
        match self {
            Self::AllReduce => 2.0 * others,
            Self::AllGather | Self::ReduceScatter | Self::AllToAll => others,
            Self::Broadcast => 1.0,
        }
    }
}

/// Element types, with the names of nccl-tests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Type {
    Float,
    Double,
    Int32,
    Int64,
    Uint64,
}

impl Type {
    fn data_type(self) -> DataType {
        match self {
            Self::Float => DataType::F32,
            Self::Double => DataType::F64,
            Self::Int32 => DataType::I32,
            Self::Int64 => DataType::I64,
            Self::Uint64 => DataType::U64,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Float => "float",
            Self::Double => "double",
            Self::Int32 => "int32",
            Self::Int64 => "int64",
            Self::Uint64 => "uint64",
        }
    }

    /// Appends a small number, which every type represents exactly.
    fn push(self, number: u32, bytes: &mut Vec<u8>) {
        match self {
            Self::Float => bytes.extend((number as f32).to_le_bytes()),
            Self::Double => bytes.extend(f64::from(number).to_le_bytes()),
            Self::Int32 => bytes.extend((number as i32).to_le_bytes()),
            Self::Int64 => bytes.extend(i64::from(number).to_le_bytes()),
            Self::Uint64 => bytes.extend(u64::from(number).to_le_bytes()),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Op {
    Sum,
    Min,
    Max,
}

impl Op {
    fn reduce_op(self) -> ReduceOp {
        match self {
            Self::Sum => ReduceOp::Sum,
            Self::Min => ReduceOp::Min,
            Self::Max => ReduceOp::Max,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Sum => "sum",
            Self::Min => "min",
            Self::Max => "max",
        }
    }

    fn apply(self, numbers: impl Iterator<Item = u32>) -> u32 {
        let result = match self {
            Self::Sum => Some(numbers.sum()),
            Self::Min => numbers.min(),
            Self::Max => numbers.max(),
        };
        result.unwrap_or(0)
    }
}

/// Figures of one size.
#[derive(Clone, Debug, Serialize)]
struct Row {
    size: u64,
    count: u64,
    iterations: u32,
    /// Mean of all ranks.
    time_us: f64,
    algbw_gb_s: f64,
    busbw_gb_s: f64,
    /// Elements that differ from what they should be, of all ranks.
    wrong: u64,
}

#[derive(Serialize)]
struct Report {
    machine: Machine,
    test: &'static str,
    ranks: usize,
    #[serde(rename = "type")]
    datatype: &'static str,
    /// `None` if nothing is reduced.
    op: Option<&'static str>,
    /// `None` unless it is a broadcast.
    root: Option<usize>,
    memory: String,
    /// Link to the next rank; empty if there is one rank only.
    path: String,
    #[serde(rename = "in_place")]
    is_in_place: bool,
    rows: Vec<Row>,
    average_busbw_gb_s: f64,
}

impl Arguments {
    /// The sizes, in whole elements, of each of so many blocks.
    fn sizes(&self, blocks: u64) -> Result<Vec<u64>, Failure> {
        if self.min > self.max {
            return Err(Failure::Usage("-b is larger than -e: exchange them".to_owned()));
        }
        let element = self.datatype.data_type().bytes() * blocks;
        let sizes = std::iter::successors(Some(self.min), |size| size.checked_mul(self.factor));
        let whole = |size: u64| size / element * element;
        let mut sizes: Vec<u64> = sizes
            .take_while(|size| *size <= self.max)
            .map(whole)
            .filter(|size| *size > 0)
            .collect();
        sizes.dedup();
        if sizes.is_empty() {
            let name = self.datatype.name();
            let why = format!(
                "the least is {element} bytes, {blocks} x {name}: make -e larger, or choose another \
                 -d"
            );
            return Err(Failure::Usage(why));
        }
        Ok(sizes)
    }

    /// Fewer calls of large sizes, so that all rows take about as long.
    fn iterations(&self, size: u64) -> u32 {
        self.iters.unwrap_or((200_000_000 / size.max(1)).clamp(20, 500) as u32)
    }

    fn check_root(&self, ranks: usize) -> Result<(), Failure> {
        if self.root < ranks {
            return Ok(());
        }
        let last = ranks.saturating_sub(1);
        let why = format!("there is no rank {}: --root is 0 to {last} here", self.root);
        Err(Failure::Usage(why))
    }
}

pub(super) fn run(what: Collective, arguments: &Arguments) -> Result<ExitCode, Failure> {
    let rank_info = RankInfo::from_env()?;
    if rank_info.launcher == Launcher::Standalone {
        arguments.sizes(what.blocks(arguments.ranks.into()))?;
        arguments.check_root(arguments.ranks.into())?;
        device(&arguments.mem)?;
        return run::launch(&Job {
            command: "mp",
            ranks: arguments.ranks.into(),
            raw: true,
            grace: Duration::from_secs(2),
            link: arguments.link.clone(),
            program: super::this_command()?,
        });
    }
    arguments.check_root(rank_info.size)?;
    let mut options = CommOptions::from_env()?.with_timeout(arguments.timeout);
    if let Some(link) = &arguments.link {
        options.link = link.parse()?;
    }
    let comm = Comm::open(rank_info, options)?;
    let outcome = measure_all(what, arguments, &comm);
    if let Err(Failure::Runtime(why) | Failure::Usage(why)) = &outcome {
        comm.abort(why.clone());
    }
    outcome
}

fn measure_all(what: Collective, arguments: &Arguments, comm: &Comm) -> Result<ExitCode, Failure> {
    let sizes = arguments.sizes(what.blocks(comm.size()))?;
    let max = sizes.iter().copied().max().unwrap_or(8);
    let alloc = || -> Result<Buffer, Failure> {
        Ok(match device(&arguments.mem)? {
            None => comm.alloc(max)?,
            Some(device) => comm.register(device.alloc(max)?.whole()?)?,
        })
    };
    let buffer = alloc()?;
    let second = if what == Collective::AllToAll { Some(alloc()?) } else { None };
    let is_reporter = comm.rank() == 0;
    let reporter = Reporter::new(arguments.json || !is_reporter);
    let mut report = Report {
        machine: if is_reporter { reporter.machine() } else { Machine::now() },
        test: what.name(),
        ranks: comm.size(),
        datatype: arguments.datatype.name(),
        op: what.reduces().then(|| arguments.op.name()),
        root: (what == Collective::Broadcast).then_some(arguments.root),
        memory: buffer.registration().path().to_string(),
        path: match comm.size() {
            1 => String::new(),
            size => comm.path((comm.rank() + 1) % size)?.to_string(),
        },
        is_in_place: second.is_none(),
        rows: Vec::new(),
        average_busbw_gb_s: 0.0,
    };
    reporter.print(&report.head())?;
    let test = Measurement { what, arguments, comm, buffer, second };
    for size in sizes {
        reporter.set_status(format!("{}: {size} bytes", what.name()));
        let row = test.row(size)?;
        reporter.print(&report.render(&row))?;
        report.rows.push(row);
    }
    if let size @ 2.. = comm.size() {
        report.path = comm.path((comm.rank() + 1) % size)?.to_string();
    }
    comm.finish(arguments.timeout)?;
    let wrong = report.finish();
    if !is_reporter {
        return Ok(if wrong > 0 { ExitCode::FAILURE } else { ExitCode::SUCCESS });
    }
    reporter.finish_machine(&mut report.machine);
    reporter.print(&report.foot())?;
    reporter.print(&super::direct_access(&report.path))?;
    reporter.finish(&report)?;
    match wrong {
        0 => Ok(ExitCode::SUCCESS),
        wrong => Err(Failure::Runtime(format!("WRONG DATA: {wrong} elements"))),
    }
}

struct Measurement<'a> {
    what: Collective,
    arguments: &'a Arguments,
    comm: &'a Comm,
    buffer: Buffer,
    /// What is received, if not in place.
    second: Option<Buffer>,
}

/// Element `index` of a rank's input.
fn element(rank: usize, index: u64) -> u32 {
    ((index * 7 + rank as u64 * 3 + 1) % 16) as u32
}

impl Measurement<'_> {
    fn call(&self, size: u64) -> Result<(), Failure> {
        let Arguments { datatype, op, root, timeout, .. } = self.arguments;
        let slice = self.buffer.slice(0, size)?;
        match self.what {
            Collective::AllReduce => {
                self.comm.all_reduce(slice, datatype.data_type(), op.reduce_op(), *timeout)?;
            }
            Collective::ReduceScatter => {
                self.comm.reduce_scatter(slice, datatype.data_type(), op.reduce_op(), *timeout)?;
            }
            Collective::AllGather => self.comm.all_gather(slice, *timeout)?,
            Collective::AllToAll => {
                self.comm.all_to_all(slice, self.result().slice(0, size)?, *timeout)?;
            }
            Collective::Broadcast => self.comm.broadcast(*root, slice, *timeout)?,
        }
        Ok(())
    }

    /// The memory that has the result of a call.
    fn result(&self) -> &Buffer {
        self.second.as_ref().unwrap_or(&self.buffer)
    }

    /// A call with known data; returns how many elements of this rank are wrong.
    fn verify(&self, size: u64) -> Result<u64, Failure> {
        let Arguments { datatype, op, root, .. } = self.arguments;
        let count = size / datatype.data_type().bytes();
        let bytes = |value: &dyn Fn(u64) -> u32| {
            let mut bytes = Vec::with_capacity(size as usize);
            (0..count).for_each(|index| datatype.push(value(index), &mut bytes));
            bytes
        };
        let rank = self.comm.rank();
        self.buffer.write(0, &bytes(&|index| element(rank, index)))?;
        self.call(size)?;
        let ranks = self.comm.size();
        let block = count / self.what.blocks(ranks);
        let reduced = |index| op.apply((0..ranks).map(|rank| element(rank, index)));
        // The rank whose block an element is in; there are no elements without a block.
        let owner = |index: u64| (index / block.max(1)) as usize;
        let wanted = match self.what {
            Collective::AllReduce => bytes(&reduced),
            Collective::AllGather => bytes(&|index| element(owner(index), index)),
            Collective::ReduceScatter => bytes(&|index| match owner(index) == rank {
                true => reduced(index),
                false => element(rank, index),
            }),
            Collective::AllToAll => {
                bytes(&|index| element(owner(index), rank as u64 * block + index % block.max(1)))
            }
            Collective::Broadcast => bytes(&|index| element(*root, index)),
        };
        let mut found = vec![0; size as usize];
        self.result().read(0, &mut found)?;
        let width = datatype.data_type().bytes() as usize;
        let pairs = found.chunks_exact(width).zip(wanted.chunks_exact(width));
        Ok(pairs.filter(|(found, wanted)| found != wanted).count() as u64)
    }

    fn row(&self, size: u64) -> Result<Row, Failure> {
        let (comm, timeout) = (self.comm, self.arguments.timeout);
        let wrong = self.sum_u64(self.verify(size)?)?;
        let iterations = self.arguments.iterations(size);
        for _ in 0..(iterations / 10).clamp(1, 5) {
            self.call(size)?;
        }
        comm.barrier(timeout)?;
        let start = Instant::now();
        for _ in 0..iterations {
            self.call(size)?;
        }
        let each = start.elapsed().as_secs_f64() / f64::from(iterations);
        // In nanoseconds: whole numbers lose nothing that counts.
        let time_us = self.sum_u64((each * 1e9) as u64)? as f64 / 1e3 / comm.size().max(1) as f64;
        let algbw_gb_s = size as f64 / (time_us * 1e3).max(1e-9);
        Ok(Row {
            size,
            count: size
                / self.arguments.datatype.data_type().bytes()
                / self.what.blocks(comm.size()),
            iterations,
            time_us,
            algbw_gb_s,
            busbw_gb_s: algbw_gb_s * self.what.bus_factor(comm.size()),
            wrong,
        })
    }

    /// The sum over all ranks.
    fn sum_u64(&self, number: u64) -> Result<u64, Failure> {
        let word = self.comm.alloc(8)?;
        word.write(0, &number.to_le_bytes())?;
        let slice = word.slice(0, 8)?;
        self.comm.all_reduce(slice, DataType::U64, ReduceOp::Sum, self.arguments.timeout)?;
        let mut sum = [0; 8];
        word.read(0, &mut sum)?;
        Ok(u64::from_le_bytes(sum))
    }
}

impl Report {
    fn head(&self) -> String {
        let link = self.path.split_once(": ").map_or("", |(link, _)| link);
        let link = if link.is_empty() { String::new() } else { format!("; {link}") };
        let head = format!(
            "# mp {}: {} ranks, {}, verified; {}{link}",
            self.test,
            self.ranks,
            if self.is_in_place { "in place" } else { "out of place" },
            self.memory
        );
        output::fit(&head)
            + &format!(
                "\n# {:>10} {:>11} {:>7} {:>6} {:>5} {:>9} {:>9} {:>9} {:>7}\n\
                 # {:>10} {:>11} {:>7} {:>6} {:>5} {:>9} {:>9} {:>9}\n",
                "size",
                "count",
                "type",
                "redop",
                "root",
                "time",
                "algbw",
                "busbw",
                "#wrong",
                "(B)",
                "(elements)",
                "",
                "",
                "",
                "(us)",
                "(GB/s)",
                "(GB/s)"
            )
    }

    fn render(&self, row: &Row) -> String {
        let Row { size, count, time_us, algbw_gb_s, busbw_gb_s, wrong, .. } = row;
        let root = self.root.map_or_else(|| "-1".to_owned(), |root| root.to_string());
        let [time, algbw, busbw] = [*time_us, *algbw_gb_s, *busbw_gb_s].map(digits);
        format!(
            "  {size:>10} {count:>11} {:>7} {:>6} {root:>5} {time:>9} {algbw:>9} {busbw:>9} \
             {wrong:>7}\n",
            self.datatype,
            self.op.unwrap_or("none")
        )
    }

    /// Computes the average; returns the number of wrong elements.
    fn finish(&mut self) -> u64 {
        let sum: f64 = self.rows.iter().map(|row| row.busbw_gb_s).sum();
        self.average_busbw_gb_s = sum / self.rows.len().max(1) as f64;
        self.rows.iter().map(|row| row.wrong).sum()
    }

    fn foot(&self) -> String {
        let wrong: u64 = self.rows.iter().map(|row| row.wrong).sum();
        let verdict = if wrong == 0 { "OK" } else { "FAILED" };
        format!(
            "# Out of bounds values : {wrong} {verdict}\n# Avg bus bandwidth    : {} GB/s\n",
            digits(self.average_busbw_gb_s)
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(clap::Parser)]
    struct Line {
        #[command(flatten)]
        arguments: Arguments,
    }

    fn arguments(words: &str) -> Arguments {
        use clap::Parser;
        let words = std::iter::once("mp").chain(words.split_whitespace());
        Line::try_parse_from(words).unwrap_or_else(|error| panic!("{error}")).arguments
    }

    #[test]
    fn sizes_are_whole_elements() {
        assert_eq!(arguments("-b 8 -e 64 -f 2").sizes(1).unwrap(), [8, 16, 32, 64]);
        assert_eq!(arguments("-b 1 -e 20 -f 3").sizes(1).unwrap(), [8]);
        assert_eq!(arguments("-b 5 -e 5").sizes(1).unwrap(), [4]);
        assert_eq!(arguments("-b 8 -e 64 -f 2").sizes(3).unwrap(), [12, 24, 60], "3 blocks");
        assert!(arguments("-b 8 -e 64 -d double").sizes(9).is_err());
        assert!(arguments("-b 8 -e 4").sizes(1).is_err());
        assert!(arguments("-b 1 -e 7 -d double").sizes(1).is_err());
    }

    #[test]
    fn bus_bandwidth_is_that_of_nccl_tests() {
        assert_eq!(Collective::AllReduce.bus_factor(4), 1.5);
        assert_eq!(Collective::AllReduce.bus_factor(1), 0.0);
        assert_eq!(Collective::AllGather.bus_factor(4), 0.75);
        assert_eq!(Collective::Broadcast.bus_factor(8), 1.0);
    }

    #[test]
    fn inputs_and_results_are_exact_in_every_type() {
        // 256 ranks times 15 is far below 2^24.
        let sum = Op::Sum.apply((0..256).map(|rank| element(rank, 5)));
        assert!(sum < 1 << 24);
        assert_eq!(Op::Min.apply([3, 1, 2].into_iter()), 1);
        assert_eq!(Op::Max.apply([3, 1, 2].into_iter()), 3);
        let mut bytes = Vec::new();
        Type::Float.push(3, &mut bytes);
        assert_eq!(bytes, 3.0_f32.to_le_bytes());
        assert_ne!(element(0, 0), element(1, 0));
    }
}

//! GPU memory of another process, written and read in many pieces: one copy for each piece, and
//! one launch for the whole list.
//!
//! ```text
//! cargo run --release -p examples --example 13_copy_lists -- cuda:0
//! ```
//!
//! The process starts itself once more; the second one opens the first one's memory. A handle that
//! another program exported (`02_foreign_pointer.py`) can be given in its place:
//! `13_copy_lists cuda:0 HANDLE`.

use std::error::Error;
use std::process::Command;
use std::time::{Duration, Instant};

use warpwire::mem::{
    self, Allocation, Backend, CopyRange, Device, IpcHandle, MemoryKind, ScatterGather, Stream,
};
use warpwire::units;
use warpwire_apps::pattern;

const TIMEOUT: Duration = Duration::from_secs(60);
/// Of these many runs the best counts. After the last one all bytes are compared.
const ROUNDS: usize = 5;

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let gpu = mem::open(&arguments.next().unwrap_or_else(|| "sim:0".into()))?;
    if let Some(handle) = arguments.next() {
        return measure(&gpu, &handle);
    }
    let kind = if gpu.capabilities().vmm.is_yes() { MemoryKind::Vmm } else { MemoryKind::Plain };
    let memory = gpu.alloc_kind(total(&gpu), kind)?;
    let handle = to_hex(&memory.export_ipc()?.to_bytes());
    let status = Command::new(std::env::current_exe()?).args([gpu.label(), handle]).status()?;
    if status.success() { Ok(()) } else { Err("the second process failed".into()) }
}

/// Bytes that are shared.
fn total(gpu: &Device) -> u64 {
    if gpu.info().backend == Backend::Cuda { 2 << 30 } else { 32 << 20 }
}

/// The second process: copies to and from the memory of the first.
fn measure(gpu: &Device, handle: &str) -> Result<(), Box<dyn Error>> {
    let theirs = gpu.open_ipc(&IpcHandle::from_bytes(&from_hex(handle)?)?)?;
    let ours = gpu.alloc(theirs.len())?;
    let lists = ScatterGather::new(gpu)?;
    let stream = gpu.stream()?;
    println!("{} of another process on {}", units::bytes(theirs.len()), gpu.label());
    println!(
        "{:>18} {:>6} {:>12} {:>10} {:>12} {:>10} {:>8}",
        "pieces", "", "copies ms", "GB/s", "one list ms", "GB/s", "ratio"
    );
    for (count, size) in
        [(100_000, 16 << 10), (16_384, 48 << 10), (4096, 64 << 10), (1024, 1 << 20), (16, 64 << 20)]
    {
        let count = count.min(theirs.len() / size);
        if count == 0 {
            continue;
        }
        let bench = Bench { lists: &lists, stream: &stream, count, size };
        bench.run("write", &theirs, &ours)?;
        bench.run("read", &ours, &theirs)?;
    }
    Ok(())
}

struct Bench<'a> {
    lists: &'a ScatterGather,
    stream: &'a Stream,
    count: u64,
    size: u64,
}

impl Bench<'_> {
    /// Copies all pieces, in another order at the target, by both methods; compares the bytes.
    fn run(&self, name: &str, to: &Allocation, from: &Allocation) -> Result<(), Box<dyn Error>> {
        let &Self { lists, stream, count, size } = self;
        // Without a common divisor, so that every piece has a place of its own.
        let step = (count / 2 + 1..).find(|step| gcd(*step, count) == 1).unwrap_or(1);
        let place = |n: u64| n * step % count;
        let ranges: Vec<_> = (0..count)
            .map(|n| CopyRange { to: place(n) * size, from: n * size, len: size })
            .collect();
        let list = lists.prepare(&to.whole()?, &from.whole()?, &ranges)?;
        let mut best = [f64::INFINITY; 2];
        for round in 0..ROUNDS as u64 {
            for (method, best) in best.iter_mut().enumerate() {
                let seed = round * 2 + method as u64;
                fill(from, count * size, seed)?;
                let start = Instant::now();
                if method == 0 {
                    for range in &ranges {
                        stream
                            .copy(&to.region(range.to, size)?, &from.region(range.from, size)?)?;
                    }
                } else {
                    stream.copy_list(&list)?;
                }
                stream.synchronize(TIMEOUT)?;
                *best = best.min(start.elapsed().as_secs_f64());
                let some = if round + 1 < ROUNDS as u64 { count.div_ceil(8) } else { 1 };
                for n in (0..count).step_by(some as usize) {
                    check(to, place(n) * size, n * size, size, seed)?;
                }
            }
        }
        let rate = |time: f64| list.bytes() as f64 / time / 1e9;
        let [copies, one] = best;
        println!(
            "{count:>9} x {:>6} {name:>6} {:>12.3} {:>10.1} {:>12.3} {:>10.1} {:>7.1}x",
            units::bytes(size),
            copies * 1e3,
            rate(copies),
            one * 1e3,
            rate(one),
            copies / one
        );
        Ok(())
    }
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

fn fill(memory: &Allocation, len: u64, seed: u64) -> warpwire::Result<()> {
    let gpu = memory.device();
    let stream = gpu.stream()?;
    pattern::Pattern::load(gpu)?.fill(&stream, &memory.region(0, len)?, seed)?;
    stream.synchronize(TIMEOUT)
}

/// Checks that `size` bytes at `at` are those that the pattern has at `source`.
fn check(memory: &Allocation, at: u64, source: u64, size: u64, seed: u64) -> Result<(), String> {
    let (mut found, mut wanted) = (vec![0; size as usize], vec![0; size as usize]);
    memory.read(at, &mut found).map_err(|why| why.to_string())?;
    pattern::fill_bytes(&mut wanted, seed, source);
    if found == wanted { Ok(()) } else { Err(format!("wrong bytes at {at:#x}")) }
}

fn to_hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn from_hex(text: &str) -> Result<Vec<u8>, Box<dyn Error>> {
    let digits = text.as_bytes().chunks(2);
    digits.map(|pair| Ok(u8::from_str_radix(std::str::from_utf8(pair)?, 16)?)).collect()
}

//! Measures registration of 4 KiB to 64 GiB of reserved memory: its cost must not depend on the
//! size.
//!
//! ```text
//! cargo run --release -p examples --example 07_register_time
//! ```
//! Each figure is the best of 200 rounds, in microseconds. The last line has the ratios of the
//! longest range to the shortest.
#![allow(unsafe_code)] // to register memory by its address

use std::time::Instant;

use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};
use warpwire::mr::{Access, CacheOptions, HostMemory, MrCache, Registry, SoftMr};
use warpwire::{Result, units};

const SIZES: [u64; 7] = [4 << 10, 64 << 10, 1 << 20, 64 << 20, 1 << 30, 8 << 30, 64 << 30];
const ROUNDS: usize = 200;

/// The shortest time of an operation, in microseconds.
fn best<T>(mut operation: impl FnMut() -> Result<T>) -> Result<f64> {
    let mut fastest = f64::INFINITY;
    for _ in 0..ROUNDS {
        let start = Instant::now();
        let made = operation()?;
        fastest = fastest.min(start.elapsed().as_secs_f64() * 1e6);
        drop(made);
    }
    Ok(fastest)
}

fn main() -> Result<()> {
    let registry = Registry::new();
    let pd = registry.pd();
    let rights = Access::LOCAL_WRITE | Access::REMOTE_READ | Access::REMOTE_WRITE;
    let max_len = SIZES[SIZES.len() - 1];
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping at an address chosen by the kernel; it is never accessed.
    let base = unsafe { mmap_anonymous(std::ptr::null_mut(), max_len as usize, protection, flags) }
        .map_err(|error| warpwire::Error::os("reserve 64 GiB of addresses", &error.into()))?;
    let at = base.addr() as u64;
    let by = |len, access| -> Result<SoftMr> {
        // SAFETY: mapped until the end of this function, and never accessed.
        unsafe { registry.register_address(&pd, at, len, None, access) }
    };
    let cache = |watch| {
        MrCache::new(
            &registry,
            &pd,
            CacheOptions::default().with_watch(watch).with_access(rights).with_max_bytes(u64::MAX),
        )
    };
    let (watched, unwatched) = (cache(true)?, cache(false)?);

    println!(
        "{:>8} {:>10} {:>10} {:>10} {:>14} {:>14}",
        "size", "handle", "address", "on demand", "cache, watched", "cache, queried"
    );
    let mut rows = Vec::new();
    for len in SIZES {
        let memory = HostMemory::new(len)?;
        let hit = |cache: &MrCache| {
            // SAFETY: as above.
            let get = || unsafe { cache.get(at, len) };
            get()?;
            best(get)
        };
        let row = [
            best(|| registry.register(&pd, memory.clone(), None, rights))?,
            best(|| by(len, rights))?,
            best(|| by(len, rights | Access::ON_DEMAND))?,
            hit(&watched)?,
            hit(&unwatched)?,
        ];
        let [handle, address, demand, watched, unwatched] = row;
        println!(
            "{:>8} {handle:>10.2} {address:>10.2} {demand:>10.2} {watched:>14.2} {unwatched:>14.2}",
            units::bytes(len)
        );
        rows.push(row);
    }
    let ratio = |column: usize| rows[rows.len() - 1][column] / rows[0][column];
    let ratios: Vec<_> = (0..5).map(|column| format!("{:.2}", ratio(column))).collect();
    println!("64 GiB relative to 4 KiB: {}", ratios.join(", "));
    drop((watched, unwatched));
    // SAFETY: mapped above, and no longer registered.
    unsafe { munmap(base, max_len as usize) }
        .map_err(|error| warpwire::Error::os("unmap memory", &error.into()))
}

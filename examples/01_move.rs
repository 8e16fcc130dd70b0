//! Copies a megabyte from one GPU to another and from there to the host, and checks it.
//!
//! ```text
//! cargo run --release -p examples --example 01_move
//! ```

use std::time::Duration;

use warpwire::Result;
use warpwire::mem;
use warpwire_apps::pattern;

fn main() -> Result<()> {
    let found = mem::discover();
    let near = &found.devices[0]; // CUDA devices come first; a simulated GPU always exists
    let far = found.devices.get(1).filter(|far| far.info().backend == near.info().backend);
    let far = far.unwrap_or(near);
    println!("copy from {near:?} to {far:?}");

    let len = 1 << 20;
    let (from, to, host) = (near.alloc(len)?, far.alloc(len)?, near.alloc_pinned(len)?);
    let stream = near.stream()?;
    pattern::Pattern::load(near)?.fill(&stream, &from.whole()?, 42)?;
    stream.copy(&to.whole()?, &from.whole()?)?;
    stream.copy(&host.whole()?, &to.whole()?)?;
    stream.synchronize(Duration::from_secs(10))?;

    let (mut found, mut wanted) = (vec![0; len as usize], vec![0; len as usize]);
    host.read(0, &mut found)?;
    pattern::fill_bytes(&mut wanted, 42, 0);
    println!("{}", if found == wanted { "the data is correct" } else { "the data is WRONG" });
    Ok(())
}

//! Ranks: each sends a message from its GPU's memory to the next one, and receives one from the
//! previous.
//!
//! ```console
//! $ cargo build -p warpwire-cli -p examples --bins --examples
//! $ target/debug/warpwire run -n 2 -- target/debug/examples/16_ranks
//! $ torchrun --nproc-per-node 4 --no-python target/debug/examples/16_ranks cuda
//! ```
//!
//! The argument is the kind of GPU, `sim` (the default) or `cuda`. Without a launcher there is one
//! rank, which sends to itself.

use std::time::Duration;

use warpwire::mem;
use warpwire::msg::Comm;

const TIMEOUT: Duration = Duration::from_secs(60);

fn main() -> Result<(), Box<dyn std::error::Error>> {
    // The launcher's environment says which rank this is and where the others meet.
    let comm = Comm::from_env()?;
    let (rank, size) = (comm.rank(), comm.size());
    let (next, previous) = ((rank + 1) % size, (rank + size - 1) % size);

    // Memory of this rank's GPU, for a message out and a message in.
    let kind = std::env::args().nth(1).unwrap_or_else(|| "sim".into());
    let gpu = mem::open(&format!("{kind}:{}", comm.local_rank()))?;
    let memory = gpu.alloc(8192)?;
    let buffer = comm.register(memory.whole()?)?;
    memory.write(0, &[rank as u8 + 1; 4096])?;

    let mut receive = comm.irecv(previous, 7, buffer.slice(4096, 4096)?)?; // tag 7
    comm.send(next, 7, buffer.slice(0, 4096)?, TIMEOUT)?;
    let received = receive.wait(TIMEOUT)?.len;

    let mut bytes = vec![0; 4096];
    memory.read(4096, &mut bytes)?;
    assert_eq!((received, bytes), (4096, vec![previous as u8 + 1; 4096]));
    let (gpu, path) = (gpu.label(), comm.path(previous)?.kind);
    println!("{received} bytes from rank {previous} are on {gpu}, by {path}");
    comm.finish(TIMEOUT)?;
    Ok(())
}

//! Measures a write from post to completion over direct access, where the peer's memory is mapped:
//! one thread, two devices on a shared-memory link, one write at a time.
//!
//! ```console
//! $ cargo run --release -p examples --example 08_direct        # 8 bytes, a million times
//! $ cargo run --release -p examples --example 08_direct 65536 20000
//! $ cargo run --release -p examples --example 08_direct 65536 20000 64    # target offset 64
//! $ valgrind --tool=callgrind target/release/examples/08_direct 8 100000
//! ```
#![allow(missing_docs)]

use std::error::Error;
use std::time::Instant;

use warpwire::hca::HcaOptions;
use warpwire::link::{Shm, ShmOptions};
use warpwire::mr::HostMemory;
use warpwire::verbs::{Access, Completion, Context, ProgressMode, QpOptions, SendRequest, WrOp};

fn main() -> Result<(), Box<dyn Error>> {
    let mut words = std::env::args().skip(1);
    let size: u32 = words.next().map_or(Ok(8), |word| word.parse())?;
    let count: u64 = words.next().map_or(Ok(1_000_000), |word| word.parse())?;
    let offset: u64 = words.next().map_or(Ok(0), |word| word.parse())?;
    let open = || -> Result<Context, warpwire::Error> {
        let link = Shm::bind(([127, 0, 0, 1], 0).into(), ShmOptions::default())?;
        Context::open_with(link, HcaOptions::default().with_progress_mode(ProgressMode::Manual))
    };
    let (near, far) = (open()?, open()?);
    let (pd, their_pd) = (near.alloc_pd(), far.alloc_pd());
    let (cq, their_cq) = (near.create_cq(64)?, far.create_cq(64)?);
    let qp = near.create_qp(&pd, &cq, &cq, QpOptions::default())?;
    let peer = far.create_qp(&their_pd, &their_cq, &their_cq, QpOptions::default())?;
    qp.connect(&peer.endpoint())?;
    peer.connect(&qp.endpoint())?;
    let rights = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
    let from = near.register(&pd, HostMemory::new(size.max(8).into())?, rights)?;
    let target_len = offset + u64::from(size.max(8));
    let to = far.register(&their_pd, HostMemory::new(target_len)?, rights)?;

    let (bytes, range) = ([7; 64], [from.sge(0, size)]);
    let request = SendRequest::new(1, WrOp::Write(to.remote(offset)));
    let request = match size {
        0..=64 => request.inline(&bytes[..size as usize]),
        _ => request.with(&range),
    };
    let mut one = [Completion::EMPTY];
    let mut run = |polls_peer: bool| -> Result<(), warpwire::Error> {
        qp.post_send(&[request])?;
        while cq.poll(&mut one)? == 0 {
            if polls_peer && let Some(hca) = far.soft() {
                hca.poll()?;
            }
        }
        Ok(())
    };
    let operations = || near.stats().map_or(0, |stats| stats.direct.operations);
    while operations() == 0 {
        run(true)?;
    }
    let before = operations();
    let start = Instant::now();
    for _ in 0..count {
        run(false)?;
    }
    let each = start.elapsed().as_nanos() as f64 / count as f64;
    let direct = operations() - before;
    let rate = f64::from(size) / each;
    println!(
        "{size} bytes: {each:.1} ns from post to completion ({rate:.2} GB/s), \
         {direct} of {count} by direct access"
    );
    println!("{}", qp.path()?);
    Ok(())
}

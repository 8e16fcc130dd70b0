//! Registers memory that another library allocated, and accesses it by RDMA. Built as a C library;
//! `06_register.py` loads it and passes it addresses of PyTorch tensors.
//!
//! ```text
//! cargo build --release -p examples --example 06_register
//! cd examples
//! python3 06_register.py ../../../target/release/examples/lib06_register.so
//! ```
#![allow(unsafe_code)] // for `no_mangle` and for registering by address

use std::sync::Mutex;
use std::time::Duration;

use warpwire::link::Hub;
use warpwire::mem::{self, DeviceAddr};
use warpwire::mr::HostMemory;
use warpwire::verbs::{Access, AttachMode, Context, Cq, Mr, Pd, Qp, QpOptions, SendRequest, WrOp};
use warpwire::{Error, Result};

/// Two devices of this process; `far` registers the tensors.
struct Pair {
    near: Context,
    far: Context,
    pds: [Pd; 2],
    cqs: [Cq; 2],
    qps: [Qp; 2],
}

static REGISTERED: Mutex<Vec<(Pair, Mr)>> = Mutex::new(Vec::new());

impl Pair {
    fn connect() -> Result<Self> {
        let hub = Hub::new();
        let open = |last: u8| Context::open(hub.endpoint(([10, 0, 0, last], 4791).into())?);
        let (near, far) = (open(1)?, open(2)?);
        let pds = [near.alloc_pd(), far.alloc_pd()];
        let cqs = [near.create_cq(16)?, far.create_cq(16)?];
        let qp = near.create_qp(&pds[0], &cqs[0], &cqs[0], QpOptions::default())?;
        let peer = far.create_qp(&pds[1], &cqs[1], &cqs[1], QpOptions::default())?;
        qp.connect(&peer.endpoint())?;
        peer.connect(&qp.endpoint())?;
        Ok(Self { near, far, pds, cqs, qps: [qp, peer] })
    }

    /// Posts a request and waits for its completion. Returns `Some` with the status if it failed.
    fn run(&self, request: SendRequest<'_>) -> Result<Option<String>> {
        self.qps[0].post_send(&[request])?;
        let done = self.cqs[0].wait_next(Duration::from_secs(10))?;
        Ok(match done {
            Some(done) if done.is_success() => None,
            Some(done) => Some(format!("{:?}", done.status)),
            None => Some("no completion within 10 s".into()),
        })
    }
}

/// Registers `len` bytes at `address`: by address (`kind` 0), as a dma-buf (1 pinned, 2 movable) or
/// staged (3). Prints the access path and why there is no better one. Returns a number for
/// `warpwire_check`, or -1.
#[unsafe(no_mangle)]
pub extern "C" fn warpwire_register(address: u64, len: u64, kind: i32) -> i64 {
    report(register(address, len, kind))
}

fn register(address: u64, len: u64, kind: i32) -> Result<i64> {
    let pair = Pair::connect()?;
    let (far, pd) = (&pair.far, &pair.pds[1]);
    let device_addr = DeviceAddr::new(address);
    let mr = match kind {
        // SAFETY: the caller keeps the tensor. It frees one early on purpose, to show that later
        // accesses fail.
        0 => unsafe { far.register_address(pd, address, len, None, Access::ALL) }?,
        3 => {
            // SAFETY: as above.
            let memory = unsafe { mem::owner_of(device_addr)?.borrow(device_addr, len) }?;
            far.register(
                pd,
                warpwire::verbs::MemorySource::from(memory.whole()?).staged(),
                Access::ALL,
            )?
        }
        _ => {
            // SAFETY: as above.
            let buffer = unsafe { mem::export_address(device_addr, len) }?;
            let attach = if kind == 1 { AttachMode::Static } else { AttachMode::Dynamic };
            far.register_dmabuf(pd, (&buffer).into(), None, Access::ALL, attach)?
        }
    };
    println!("  access path: {}; registered by {}", mr.path(), mr.registered_by());
    for why in mr.why() {
        println!("    {why}");
    }
    let mut registered = REGISTERED.lock().map_err(|_| check_error("a lock is poisoned"))?;
    registered.push((pair, mr));
    Ok(registered.len() as i64 - 1)
}

/// Writes `len` bytes of `value` at `offset` by RDMA and reads them back. Returns 0 if they are
/// equal, 1 if not, 2 if a work request failed; the status is printed.
#[unsafe(no_mangle)]
pub extern "C" fn warpwire_check(number: i64, offset: u64, len: u32, value: u8) -> i64 {
    report(check(number, offset, len, value))
}

fn check(number: i64, offset: u64, len: u32, value: u8) -> Result<i64> {
    let registered = REGISTERED.lock().map_err(|_| check_error("a lock is poisoned"))?;
    let (pair, mr) =
        registered.get(number as usize).ok_or_else(|| check_error("no such number"))?;
    let local_memory = HostMemory::new(2 * u64::from(len))?;
    local_memory.bytes().fill(0, u64::from(len), &[value])?;
    let local = pair.near.register(&pair.pds[0], local_memory.clone(), Access::LOCAL_WRITE)?;
    let remote = mr.remote(offset);
    let write = SendRequest::new(1, WrOp::Write(remote));
    let read = SendRequest::new(2, WrOp::Read(remote));
    for request in [write.with(&[local.sge(0, len)]), read.with(&[local.sge(u64::from(len), len)])]
    {
        if let Some(failed) = pair.run(request)? {
            println!("  the work request failed: {failed}");
            return Ok(2);
        }
    }
    let mut back = vec![0; len as usize];
    local_memory.bytes().read(u64::from(len), &mut back)?;
    Ok(i64::from(back.iter().any(|byte| *byte != value)))
}

fn check_error(why: &'static str) -> Error {
    Error::new(warpwire::error::Kind::InvalidArgument, "check a registration").why(why)
}

fn report(outcome: Result<i64>) -> i64 {
    outcome.unwrap_or_else(|error| {
        println!("  {error}");
        -1
    })
}

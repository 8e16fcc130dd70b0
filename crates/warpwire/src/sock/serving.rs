//! Kernels that serve: the words by which they and the host talk, how the host learns that one listens, and what workers
//! have in common. serving.cuh is the same for CUDA.

use std::net::SocketAddr;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::SockHost;
use super::device::{self, Failure, Family, Outcome, Setting, Sock, Sockets};
use super::layout::{ADDRESS_LEN, address_bytes, address_from};
use crate::error::{Error, Kind, Result};
use crate::mem::sim::Block;
use crate::mem::{Allocation, DeviceAddr, Stream};

/// Where the host asks it to end, where it puts its listener, and where the errno if it failed. What else lies in its control
/// words is the program's own.
pub(super) const STOP: u64 = 0;
pub(super) const LISTENER: u64 = 8;
pub(super) const FAILED: u64 = 16;
/// Where servers with several workers put their name, and how long their words are.
pub(super) const NAME: u64 = 24;
pub(super) const CONTROL_LEN: u64 = 48;

/// How long a kernel may take to start, and to end.
pub(super) const SOON: Duration = Duration::from_secs(20);

/// Waits until a kernel that was asked to listen there does; returns where, which it wrote at `name`.
pub(super) fn await_listener(
    host: &SockHost,
    control: &Allocation,
    name: u64,
    asked: SocketAddr,
) -> Result<SocketAddr> {
    let begun = Instant::now();
    let bytes = control.host_bytes()?;
    let failed = |why: String| {
        Error::new(Kind::Unavailable, format!("listen at {asked}"))
            .on(host.device().label())
            .why(why)
    };
    loop {
        if bytes.load_u64(LISTENER)? != 0 {
            let mut found = [0; ADDRESS_LEN];
            bytes.read(name, &mut found)?;
            return Ok(address_from(&found).unwrap_or(asked));
        }
        let errno = bytes.load_u64(FAILED)? as i32;
        if errno != 0 {
            let why = std::io::Error::from_raw_os_error(errno).to_string();
            return Err(failed(why).fix("choose an address that is this machine's and free"));
        }
        if begun.elapsed() > SOON {
            return Err(failed(format!("the kernel did not start in {SOON:?}")));
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Workers at work.
pub(super) enum Play {
    Kernel(Stream),
    Threads(Mutex<Vec<JoinHandle<()>>>),
}

impl Play {
    /// Workers as threads: `run` gets the setup's address and the worker's number.
    pub(super) fn on_threads(
        workers: u32,
        setup: u64,
        run: impl Fn(u64, u64) + Clone + Send + 'static,
    ) -> Self {
        let workers = (0..u64::from(workers)).map(|worker| {
            let run = run.clone();
            std::thread::spawn(move || run(setup, worker))
        });
        Self::Threads(Mutex::new(workers.collect()))
    }

    /// Asks them to end, and waits until they have.
    pub(super) fn stop(&self, control: &Allocation) -> Result<()> {
        control.host_bytes()?.store_u64(STOP, 1)?;
        match self {
            Self::Kernel(stream) => stream.synchronize(SOON),
            Self::Threads(threads) => {
                for thread in std::mem::take(&mut *threads.lock()) {
                    let stopped = || Error::new(Kind::Unavailable, "end a server");
                    thread.join().map_err(|_| stopped().why("a worker panicked"))?;
                }
                Ok(())
            }
        }
    }
}

/// The listener of a server's workers: made by the first, and waited for by the others; `None` if there is none.
pub(super) fn listener(
    block: &Block<'_>,
    sockets: &Sockets<'_>,
    control: u64,
    address: &[u8; ADDRESS_LEN],
    kind: device::Kind,
) -> Outcome<Option<Sock>> {
    let word = |at: u64| DeviceAddr::new(control + at);
    if block.index() != 0 {
        let mut listener = 0;
        block.spin_until(|| {
            listener = block.load_u64(word(LISTENER))?;
            let failed = block.load_u64(word(FAILED))?;
            let stop = block.load_u64(word(STOP))?;
            Ok(listener != 0 || failed != 0 || stop != 0)
        })?;
        return Ok((listener != 0).then(|| Sock::from_raw(listener as i32 - 1)));
    }
    match open_listener(block, sockets, word(NAME), address, kind) {
        Ok(listener) => {
            block.store_u64(word(LISTENER), listener.raw() as u64 + 1)?;
            Ok(Some(listener))
        }
        Err(Failure::Errno(errno)) => {
            block.store_u64(word(FAILED), errno.raw_os_error() as u64)?;
            Ok(None)
        }
        Err(fault) => Err(fault),
    }
}

fn open_listener(
    block: &Block<'_>,
    sockets: &Sockets<'_>,
    name: DeviceAddr,
    address: &[u8; ADDRESS_LEN],
    kind: device::Kind,
) -> Outcome<Sock> {
    let address = address_from(address).ok_or(rustix::io::Errno::AFNOSUPPORT)?;
    let family = if address.is_ipv6() { Family::V6 } else { Family::V4 };
    let listener = sockets.socket(family, kind)?;
    sockets.bind(listener, address)?;
    sockets.listen(listener, 1024)?;
    sockets.set(listener, Setting::NonBlocking, 1)?;
    block.write(name, &address_bytes(Some(sockets.local_name(listener)?)))?;
    Ok(listener)
}

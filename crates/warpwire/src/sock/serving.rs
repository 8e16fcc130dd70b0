//! Kernels that serve: the words by which they and the host talk, and how the host learns that one listens.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use super::SockHost;
use super::layout::{ADDRESS_LEN, address_from};
use crate::error::{Error, Kind, Result};
use crate::mem::Allocation;

/// Where the host asks it to end, where it puts its listener, and where the errno if it failed. What else lies in its control
/// words is the program's own.
pub(super) const STOP: u64 = 0;
pub(super) const LISTENER: u64 = 8;
pub(super) const FAILED: u64 = 16;

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

//! Probes of the kernel: UDP with offloads, and memfds.

use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::net::{Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::{ProbeOutcome, UdpProbe};
use warpwire::error::{Error, Kind, Result};
use warpwire::link::UdpOptions;
use warpwire::link::{FlowId, Link, Udp};

const SEGMENT: usize = 1000;
const SEGMENTS: usize = 8;

/// Loopback delivers immediately; this bounds the wait on a machine that drops the datagrams.
const TIMEOUT: Duration = Duration::from_millis(500);

/// Creates a memfd, writes to it and reads it back.
pub(super) fn memfd() -> ProbeOutcome {
    let probe = || -> io::Result<bool> {
        let fd = rustix::fs::memfd_create("warpwire-doctor", rustix::fs::MemfdFlags::CLOEXEC)?;
        let mut file = File::from(fd);
        let mut read = [0; 8];
        file.write_all(b"warpwire")?;
        file.rewind()?;
        file.read_exact(&mut read)?;
        Ok(&read == b"warpwire")
    };
    match probe() {
        Ok(true) => ProbeOutcome::Worked,
        Ok(false) => ProbeOutcome::failed("the bytes read differ from the bytes written"),
        Err(source) => ProbeOutcome::failed(source.to_string()),
    }
}

/// Sends one segmented burst over the IPv4 loopback and receives it.
pub(super) fn udp() -> UdpProbe {
    try_udp().unwrap_or_else(|source| UdpProbe {
        loopback: ProbeOutcome::failed(source.to_string()),
        gso: ProbeOutcome::not_tried("no UDP over loopback"),
        gro: ProbeOutcome::not_tried("no UDP over loopback"),
    })
}

fn try_udp() -> Result<UdpProbe> {
    let bind = || Udp::bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)), UdpOptions::default());
    let (mut sender, mut receiver) = (bind()?, bind()?);
    let flow = sender.open(receiver.local(), 0)?;
    if !exchange(&mut sender, flow, &mut receiver, 1)? {
        return Err(Error::new(Kind::Timeout, "exchange a datagram over the loopback interface")
            .why("a datagram sent to 127.0.0.1 did not arrive"));
    }
    let whole = exchange(&mut sender, flow, &mut receiver, SEGMENTS)?;
    let gso = match sender.offloads().segmentation {
        Err(why) => ProbeOutcome::failed(why),
        Ok(()) if whole => ProbeOutcome::Worked,
        Ok(()) => ProbeOutcome::failed("the burst was sent, but did not arrive completely"),
    };
    let gro = match receiver.offloads().coalescing {
        Err(why) => ProbeOutcome::failed(why),
        Ok(()) if receiver.counters().coalesced > 0 => ProbeOutcome::Worked,
        Ok(()) if gso != ProbeOutcome::Worked => {
            ProbeOutcome::not_tried("needs a segmented burst to receive")
        }
        Ok(()) => ProbeOutcome::failed("the kernel accepts UDP_GRO, but returned single datagrams"),
    };
    Ok(UdpProbe { loopback: ProbeOutcome::Worked, gso, gro })
}

/// Sends `count` packets, and receives until all have arrived or the timeout has passed. Returns
/// whether all arrived.
fn exchange(sender: &mut Udp, flow: FlowId, receiver: &mut Udp, count: usize) -> Result<bool> {
    for _ in 0..count {
        if let Ok(packet) = sender.reserve(flow, SEGMENT) {
            packet.fill(0x5a);
            sender.commit();
        }
    }
    sender.flush()?;
    let deadline = Instant::now() + TIMEOUT;
    let mut received = 0;
    while received < count && Instant::now() < deadline {
        received += receiver.receive(&mut |_| ())?;
        if received < count {
            wait_readable(receiver, deadline)?;
        }
    }
    Ok(received == count)
}

fn wait_readable(link: &Udp, deadline: Instant) -> Result<()> {
    let left = deadline.saturating_duration_since(Instant::now());
    let (Some(fd), Ok(timeout)) = (link.wait_fd(), Timespec::try_from(left)) else { return Ok(()) };
    match poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&timeout)) {
        // After a signal the caller's loop waits again, until its deadline.
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(errno) => Err(Error::os("wait for a datagram", &errno.into())),
    }
}

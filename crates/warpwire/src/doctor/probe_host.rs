//! Tries what the host's kernel offers: UDP with offloads, and anonymous shareable memory.

use std::fs::File;
use std::io::{self, IoSliceMut, Read, Seek, Write};
use std::net::UdpSocket;
use std::time::{Duration, Instant};

use quinn_udp::{RecvMeta, Transmit, UdpSocketState};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::{Outcome, UdpProbe};

const SEGMENT: usize = 1000;
const SEGMENTS: usize = 8;

/// Loopback delivers at once; this only bounds the wait on a machine that drops what was sent.
const PATIENCE: Duration = Duration::from_millis(500);

/// What came back of the bytes that were sent.
struct Received {
    complete: bool,
    /// Whether one call returned several datagrams.
    coalesced: bool,
}

/// Makes an anonymous file, writes to it and reads it back.
pub(super) fn memfd() -> Outcome {
    let try_it = || -> io::Result<bool> {
        let fd = rustix::fs::memfd_create("warpwire-doctor", rustix::fs::MemfdFlags::CLOEXEC)?;
        let mut file = File::from(fd);
        let mut read = [0; 8];
        file.write_all(b"warpwire")?;
        file.rewind()?;
        file.read_exact(&mut read)?;
        Ok(&read == b"warpwire")
    };
    match try_it() {
        Ok(true) => Outcome::Worked,
        Ok(false) => Outcome::failed("what was written did not read back"),
        Err(source) => Outcome::failed(source.to_string()),
    }
}

/// Sends one segmented burst over the IPv4 loopback and receives it.
pub(super) fn udp() -> UdpProbe {
    try_udp().unwrap_or_else(|source| UdpProbe {
        loopback: Outcome::failed(source.to_string()),
        gso: Outcome::not_tried("no UDP over loopback"),
        gro: Outcome::not_tried("no UDP over loopback"),
    })
}

fn try_udp() -> io::Result<UdpProbe> {
    let receiver = UdpSocket::bind("127.0.0.1:0")?;
    let sender = UdpSocket::bind("127.0.0.1:0")?;
    let receiver_state = UdpSocketState::new((&receiver).into())?;
    let sender_state = UdpSocketState::new((&sender).into())?;
    let payload: Vec<u8> = (0..SEGMENT * SEGMENTS).map(|i| (i % 251) as u8).collect();
    let burst = |contents, segment_size| -> io::Result<Transmit<'_>> {
        Ok(Transmit {
            destination: receiver.local_addr()?,
            ecn: None,
            contents,
            segment_size,
            src_ip: None,
        })
    };

    let one = payload.get(..SEGMENT).unwrap_or(&payload);
    sender_state.try_send((&sender).into(), &burst(one, None)?)?;
    if !receive(&receiver, &receiver_state, one)?.complete {
        return Err(io::Error::new(
            io::ErrorKind::TimedOut,
            "a datagram sent to 127.0.0.1 did not arrive",
        ));
    }

    let mut probe = UdpProbe {
        loopback: Outcome::Worked,
        gso: Outcome::failed("the kernel refuses the UDP_SEGMENT socket option"),
        gro: Outcome::not_tried("needs a segmented burst to receive"),
    };
    if sender_state.max_gso_segments() <= 1 {
        return Ok(probe);
    }
    if let Err(source) = sender_state.try_send((&sender).into(), &burst(&payload, Some(SEGMENT))?) {
        probe.gso = Outcome::failed(source.to_string());
        return Ok(probe);
    }
    let received = receive(&receiver, &receiver_state, &payload)?;
    probe.gso = if received.complete {
        Outcome::Worked
    } else {
        Outcome::failed("the burst was sent and did not arrive whole")
    };
    probe.gro = match (received.coalesced, receiver_state.gro_segments() > 1) {
        (true, _) => Outcome::Worked,
        (false, true) => {
            Outcome::failed("the kernel accepts UDP_GRO, yet returned datagrams one by one")
        }
        (false, false) => Outcome::failed("the kernel refuses the UDP_GRO socket option"),
    };
    Ok(probe)
}

/// Receives until all that was sent has come back, in order, or patience runs out.
fn receive(socket: &UdpSocket, state: &UdpSocketState, sent: &[u8]) -> io::Result<Received> {
    let deadline = Instant::now() + PATIENCE;
    let mut buffer = vec![0; 1 << 16];
    let mut bytes = Vec::new();
    let mut coalesced = false;
    while bytes.len() < sent.len() && wait_readable(socket, deadline)? {
        let mut meta = [RecvMeta::default()];
        let mut slices = [IoSliceMut::new(&mut buffer)];
        match state.recv(socket.into(), &mut slices, &mut meta) {
            Ok(_) => {}
            Err(source) if source.kind() == io::ErrorKind::WouldBlock => continue,
            Err(source) => return Err(source),
        }
        let [RecvMeta { len, stride, .. }] = meta;
        coalesced |= len > stride;
        bytes.extend_from_slice(buffer.get(..len).unwrap_or_default());
    }
    Ok(Received { complete: bytes == sent, coalesced })
}

fn wait_readable(socket: &UdpSocket, deadline: Instant) -> io::Result<bool> {
    let left = deadline.saturating_duration_since(Instant::now());
    let timeout = Timespec::try_from(left).map_err(io::Error::other)?;
    let mut fds = [PollFd::new(socket, PollFlags::IN)];
    match poll(&mut fds, Some(&timeout)) {
        Ok(ready) => Ok(ready > 0),
        // A signal is no answer; the caller's loop ends by the clock.
        Err(rustix::io::Errno::INTR) => Ok(Instant::now() < deadline),
        Err(errno) => Err(errno.into()),
    }
}

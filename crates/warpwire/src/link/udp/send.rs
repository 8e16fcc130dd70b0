//! The transmit batch: packets back to back in one buffer, grouped into runs that the kernel
//! segments (GSO).
//!
//! A run consists of packets of one flow and one length; the last may be shorter. The kernel
//! numbers the packets of a run 0, 1, 2, … in the IPv4 identification, and gives 0 to single
//! packets: each ICRC is computed with the number that its packet will get.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::BorrowedFd;

use warpwire_proto::wire::icrc::IcrcPrefix;
use warpwire_proto::wire::packet::ICRC_LEN;

use super::sys::{CallMode, Headers, Outgoing, SockAddr};
use crate::link::flows::FlowId;
use crate::link::{Corruption, Counters, Flushed, Frame, SimdCrc32};

/// Capacity of a batch, in packets.
pub(super) const PACKETS: usize = 64;
/// Maximum length of a run in bytes: IP's limit less the headers, rounded down.
const MAX_RUN_BYTES: usize = 65_000;

/// The destination of a flow.
#[derive(Clone)]
pub(super) struct Flow {
    pub from: SocketAddr,
    pub to: SocketAddr,
    pub name: SockAddr,
    /// The source address to request if the socket has several.
    pub source: Option<IpAddr>,
    pub icrc_prefix: IcrcPrefix,
    /// The longest packet that the route carries, within the link's limit.
    pub max_packet: usize,
}

/// Contiguous packets to one peer.
struct GsoRun {
    id: FlowId,
    from: SocketAddr,
    to: SocketAddr,
    name: SockAddr,
    source: Option<IpAddr>,
    start: usize,
    end: usize,
    /// The length of every packet but the last, which may be shorter.
    segment: usize,
    packets: usize,
    /// The last packet was shorter: no packet may follow.
    closed: bool,
}

pub(super) struct TxBatch {
    buffer: Box<[u8]>,
    /// Offset of the next packet in the buffer.
    end: usize,
    packets: usize,
    runs: Vec<GsoRun>,
    /// Number of runs that have been sent.
    sent: usize,
    headers: Headers,
    reserved: Option<(FlowId, usize)>,
    /// Whether runs may have more than one packet.
    pub gso: bool,
    pub calls: CallMode,
}

impl TxBatch {
    pub(super) fn new(max_packet: usize, gso: bool, calls: CallMode) -> Self {
        Self {
            buffer: vec![0; PACKETS * max_packet].into_boxed_slice(),
            end: 0,
            packets: 0,
            runs: Vec::with_capacity(PACKETS),
            sent: 0,
            headers: Headers::new(PACKETS),
            reserved: None,
            gso,
            calls,
        }
    }

    /// Reserves a packet; `None` if the batch is full.
    #[inline]
    pub(super) fn reserve(&mut self, id: FlowId, len: usize) -> Option<&mut [u8]> {
        if self.packets == PACKETS {
            return None;
        }
        self.reserved = Some((id, len));
        self.buffer.get_mut(self.end..self.end + len)
    }

    /// The flow of the reserved packet.
    #[inline]
    pub(super) fn reserved(&self) -> Option<FlowId> {
        self.reserved.map(|(id, _)| id)
    }

    /// Appends the ICRC to the reserved packet, for the identification that it will get, and adds
    /// it to a run.
    pub(super) fn commit(&mut self, flow: &mut Flow, corruption: Corruption) -> Option<Frame<'_>> {
        let (id, len) = self.reserved.take()?;
        let gso = self.gso;
        let joins = |run: &&mut GsoRun| {
            gso && run.id == id
                && !run.closed
                && len <= run.segment
                && run.packets < PACKETS
                && run.end - run.start + len <= MAX_RUN_BYTES
        };
        let unsent = self.sent < self.runs.len();
        let run = self.runs.last_mut().filter(|_| unsent).filter(joins);
        let number = run.as_ref().map_or(0, |run| run.packets as u16);

        let packet = self.buffer.get_mut(self.end..self.end + len)?;
        append_icrc(packet, &mut flow.icrc_prefix, number);
        let kept = corruption.apply(packet);
        let start = self.end;
        self.end += kept;
        self.packets += 1;
        if let Some(run) = run {
            run.end = self.end;
            run.packets += 1;
            run.closed = kept < run.segment;
        } else {
            self.runs.push(GsoRun {
                id,
                from: flow.from,
                to: flow.to,
                name: flow.name,
                source: flow.source,
                start,
                end: self.end,
                segment: kept,
                packets: 1,
                closed: false,
            });
        }
        Some(Frame {
            from: flow.from,
            to: flow.to,
            bytes: self.buffer.get(start..self.end)?,
            traffic_class: Frame::TRAFFIC_CLASS,
            hop_limit: Frame::HOP_LIMIT,
            identification: if flow.to.is_ipv4() { number } else { 0 },
            has_icrc: true,
        })
    }

    /// Sends what the kernel accepts, and discards a reservation.
    pub(super) fn flush(&mut self, socket: BorrowedFd<'_>, counters: &mut Counters) -> Flushed {
        self.reserved = None;
        let flushed = self.send_runs(socket, counters);
        if flushed.waiting == 0 {
            self.runs.clear();
            (self.sent, self.end, self.packets) = (0, 0, 0);
        }
        flushed
    }

    fn send_runs(&mut self, socket: BorrowedFd<'_>, counters: &mut Counters) -> Flushed {
        let mut flushed = Flushed::default();
        while self.sent < self.runs.len() {
            let buffer = &self.buffer;
            let outgoing = self.runs[self.sent..].iter().map(|run| Outgoing {
                to: &run.name,
                bytes: buffer.get(run.start..run.end).unwrap_or_default(),
                segment: if run.packets > 1 { run.segment as u16 } else { 0 },
                source: run.source,
            });
            counters.calls += 1;
            // A single message is faster with `sendmsg` than with `sendmmsg`.
            let is_single = self.sent + 1 == self.runs.len();
            let calls = if is_single { CallMode::Single } else { self.calls };
            match self.headers.send(socket, outgoing, calls) {
                Ok(count) => {
                    let end = (self.sent + count).min(self.runs.len());
                    for run in &self.runs[self.sent..end] {
                        counters.sent += run.packets as u64;
                        counters.sent_bytes += (run.end - run.start) as u64;
                        flushed.sent += run.packets;
                    }
                    self.sent = end;
                }
                Err(source) => {
                    if !self.recover(&source, counters) {
                        break;
                    }
                }
            }
        }
        flushed.waiting = self.runs[self.sent..].iter().map(|run| run.packets).sum();
        flushed
    }

    /// Handles an error for the first unsent run; `false` if the caller must wait and retry.
    #[cold]
    pub(super) fn recover(&mut self, source: &io::Error, counters: &mut Counters) -> bool {
        let Some(run) = self.runs.get(self.sent) else { return false };
        match source.raw_os_error() {
            Some(libc::EINTR) => {}
            Some(libc::EAGAIN | libc::ENOBUFS | libc::ENOMEM) => return false,
            Some(libc::ENOSYS) if self.calls == CallMode::Batched => self.calls = CallMode::Single,
            // The route's device has no checksum offload, or the route is a tunnel: no segmentation
            // from now on.
            Some(libc::EIO | libc::EOPNOTSUPP) if run.packets > 1 => {
                self.gso = false;
                self.split_runs();
            }
            // The error concerns the run as such, or its packets: sending them singly shows which.
            Some(libc::EINVAL | libc::EMSGSIZE) if run.packets > 1 => self.split_runs(),
            _ => {
                counters.drops.refused += run.packets as u64;
                self.sent += 1;
            }
        }
        true
    }

    /// Splits the remaining runs into single packets, with ICRCs for identification 0. Does not
    /// reallocate: there are at most as many runs as packets.
    #[cold]
    fn split_runs(&mut self) {
        let runs = self.runs.split_off(self.sent);
        for run in runs {
            let mut icrc_prefix = IcrcPrefix::new(run.from, run.to);
            let mut start = run.start;
            for number in 0..run.packets {
                let end = (start + run.segment).min(run.end);
                let Some(packet) = self.buffer.get_mut(start..end) else { continue };
                // Injected corruption is preserved: only a valid ICRC is recomputed.
                if icrc_of(packet) == icrc_prefix.icrc::<SimdCrc32>(number as u16, packet) {
                    append_icrc(packet, &mut icrc_prefix, 0);
                }
                self.runs.push(GsoRun {
                    start,
                    end,
                    segment: end - start,
                    packets: 1,
                    closed: true,
                    ..run
                });
                start = end;
            }
        }
    }
}

fn icrc_of(packet: &[u8]) -> Option<u32> {
    packet.last_chunk::<ICRC_LEN>().map(|bytes| u32::from_le_bytes(*bytes))
}

#[inline]
fn append_icrc(packet: &mut [u8], icrc_prefix: &mut IcrcPrefix, number: u16) {
    if let Some(icrc) = icrc_prefix.icrc::<SimdCrc32>(number, packet)
        && let Some(trailer) = packet.last_chunk_mut::<ICRC_LEN>()
    {
        *trailer = icrc.to_le_bytes();
    }
}

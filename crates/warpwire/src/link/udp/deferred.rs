//! Deferred payloads: a long packet stays in the socket until its destination is known, and the
//! kernel copies the payload straight there, which saves a copy.
//!
//! The head of the next packet is peeked at (`MSG_PEEK`), which leaves the packet in the socket;
//! its queue pair parses the headers and decides where the payload goes. Only packets without an
//! ICRC are deferred: a packet with one must be verified as a whole before any of its bytes is
//! used. See `loopback.rs`.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd};

use warpwire_proto::wire::packet::{ICRC_LEN, MAX_HEADERS_LEN};

use super::check::IcrcChecker;
use super::sys::{self, CallMode, Received};
use super::{Incoming, Udp, verify};
use crate::error::Result;
use crate::link::{Counters, Deferred, Frame, PendingPayload, ReceivedPacket};
use crate::mem::SharedBytes;

/// Number of bytes to peek at: the longest headers, and the pad and ICRC that follow them in a
/// packet without payload.
const PEEK_LEN: usize = (MAX_HEADERS_LEN + 3 + ICRC_LEN).next_multiple_of(8);
/// The last bytes of a payload, which this thread stores after all others: a thread that polls the
/// last byte may read the rest once it changes.
const TAIL_LEN: usize = 64;
/// Packets received per call.
const MAX_PACKETS: usize = 8;
/// Number of packets to peek at after a long one: the last packet of a message is short, and the
/// first of the next message is long again.
pub(super) const LONG_LOOKAHEAD: u8 = 4;

impl Udp {
    /// Receives up to a batch of packets, peeking at each: it may be long.
    pub(super) fn receive_one_by_one(
        &mut self,
        take: &mut dyn FnMut(ReceivedPacket<'_>),
    ) -> Result<usize> {
        let mut delivered = 0;
        for _ in 0..MAX_PACKETS {
            let mut head = [0; PEEK_LEN];
            self.counters.calls += 1;
            if let Err(source) = self.incoming.headers.peek(self.socket.as_fd(), &mut head) {
                return self.on_receive_error(&source, CallMode::Single).map(|()| delivered);
            }
            if self.deliver_long(&head, take) {
                delivered += 1;
                self.incoming.expect_long = LONG_LOOKAHEAD;
                continue;
            }
            self.incoming.expect_long = self.incoming.expect_long.saturating_sub(1);
            delivered += self
                .receive_with(CallMode::Single, &mut |frame| take(ReceivedPacket::Read(frame)))?;
        }
        Ok(delivered)
    }

    /// Delivers the peeked packet if it is long; returns whether it was.
    fn deliver_long(
        &mut self,
        head: &[u8; PEEK_LEN],
        take: &mut dyn FnMut(ReceivedPacket<'_>),
    ) -> bool {
        let Self { socket, incoming, counters, checker, local, max_packet, .. } = self;
        let Some(message) = incoming.headers.received(0) else { return false };
        let (from, len) = (message.from, message.len);
        let to = message.to.unwrap_or(local.ip());
        // The regular path handles packets that are too long or coalesced.
        if message.segment != 0 || len > *max_packet || !checker.likely_without_icrc(from, to, len)
        {
            return false;
        }
        let frame = Frame {
            from,
            to: SocketAddr::new(to, local.port()),
            bytes: head,
            marked: message.is_marked(),
            identification: 0,
            has_icrc: false,
        };
        let socket = socket.as_fd();
        let mut pending_payload = SocketPayload {
            socket,
            incoming,
            counters,
            checker,
            head,
            message,
            to,
            in_socket: true,
            is_bad: false,
        };
        take(ReceivedPacket::Deferred(Deferred {
            head: frame,
            len,
            pending_payload: &mut pending_payload,
        }));
        if pending_payload.in_socket {
            pending_payload.counters.calls += 1;
            sys::discard(socket);
        }
        if pending_payload.is_bad {
            counters.drops.icrc += 1;
        } else {
            counters.received += 1;
            counters.received_bytes += len as u64;
        }
        true
    }
}

/// The peeked packet.
struct SocketPayload<'a> {
    socket: BorrowedFd<'a>,
    incoming: &'a mut Incoming,
    counters: &'a mut Counters,
    checker: &'a mut IcrcChecker,
    head: &'a [u8; PEEK_LEN],
    message: Received,
    to: IpAddr,
    /// The packet has not been consumed yet.
    in_socket: bool,
    /// The packet was invalid.
    is_bad: bool,
}

impl PendingPayload for SocketPayload<'_> {
    fn read(&mut self) -> Option<&[u8]> {
        if !std::mem::take(&mut self.in_socket) {
            return None;
        }
        let Incoming { headers, buffer, size, .. } = &mut *self.incoming;
        self.counters.calls += 1;
        let is_ok = headers.receive(self.socket, buffer, *size, CallMode::Single).is_ok();
        let message =
            headers.received(0).filter(|message| is_ok && is_same(message, &self.message));
        let packet = message.and_then(|message| buffer.get(..message.len)).filter(|packet| {
            let from = self.message.from;
            packet.starts_with(self.head) && verify(self.checker, from, self.to, packet).is_some()
        });
        self.is_bad = packet.is_none();
        packet
    }

    fn read_into(&mut self, headers: usize, into: &SharedBytes<'_>) -> bool {
        if !self.in_socket {
            return false;
        }
        let direct_placed = self.read_payload(headers, into).is_some();
        self.is_bad = !direct_placed;
        direct_placed
    }
}

impl SocketPayload<'_> {
    fn read_payload(&mut self, headers: usize, into: &SharedBytes<'_>) -> Option<()> {
        let (mut head, mut tail) = ([0; PEEK_LEN], [0; TAIL_LEN + 3 + ICRC_LEN]);
        let len = self.message.len;
        let payload = usize::try_from(into.len()).ok()?;
        let last = payload.min(TAIL_LEN);
        // The rest is the pad and the checksum: any other length does not match the payload.
        let behind = len.checked_sub(headers)?.checked_sub(payload)?;
        let behind = Some(behind).filter(|behind| (ICRC_LEN..ICRC_LEN + 4).contains(behind))?;
        let head = head.get_mut(..headers)?;
        let tail = tail.get_mut(..last + behind)?;
        let first = into.slice(0, (payload - last) as u64).ok()?;
        self.in_socket = false;
        self.counters.calls += 1;
        let incoming = &mut self.incoming.headers;
        incoming.receive_parts(self.socket, head, &first, tail).ok()?;
        incoming.received(0).filter(|message| is_same(message, &self.message))?;
        let from = self.message.from;
        let valid = self.head.starts_with(head)
            && self.checker.has_header_checksum(from, self.to, len, head, tail);
        if !valid {
            return None;
        }
        self.counters.direct_placed += 1;
        into.write_cached((payload - last) as u64, tail.get(..last)?).ok()
    }
}

/// Whether this is the message that was peeked at, and it was not truncated.
fn is_same(message: &Received, before: &Received) -> bool {
    !message.truncated
        && (message.from, message.len, message.segment) == (before.from, before.len, before.segment)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::link::UdpOptions;
    use crate::link::{Corruption, FlowId, Link, MAX_ROCE_PACKET};
    use crate::mem::Allocation;
    use crate::mem::sim::{Sim, SimConfig};

    const HEADERS: usize = 28;

    /// Two links, a flow from the first to the second, and long packets expected there.
    fn links(address: &str) -> Option<(Udp, Udp, FlowId)> {
        let bind = || Udp::bind(address.parse().unwrap(), UdpOptions::default());
        let (Ok(mut one), Ok(mut two)) = (bind(), bind()) else {
            println!("skipped: {address} does not belong to this machine");
            return None;
        };
        let flow = one.open(two.local(), 0).unwrap();
        send(&mut one, flow, 20_000, 0, Corruption::Intact);
        assert_eq!(
            receive(&mut two, 1, &mut leave),
            [(true, HEADERS + 20_000)],
            "not expected yet"
        );
        Some((one, two, flow))
    }

    fn memory(len: u64) -> Allocation {
        let gpu = Sim::start(SimConfig::default()).unwrap().device(0).unwrap();
        gpu.alloc_pinned(len).unwrap()
    }

    fn payload(len: usize, seed: u8) -> Vec<u8> {
        (0..len).map(|at| (at / 251) as u8 ^ (at as u8).wrapping_mul(31) ^ seed).collect()
    }

    fn send(link: &mut Udp, flow: FlowId, len: usize, seed: u8, corruption: Corruption) {
        let packet = link.reserve(flow, HEADERS + len.next_multiple_of(4) + ICRC_LEN).unwrap();
        packet[..HEADERS].fill(seed);
        packet[HEADERS..HEADERS + len].copy_from_slice(&payload(len, seed));
        packet[HEADERS + len..].fill(0);
        link.commit_corrupted(corruption).unwrap();
        assert_eq!(link.flush().unwrap().waiting, 0);
    }

    fn leave(_: Deferred<'_>) {}

    /// Receives `count` packets. Returns whether each was complete, and its length without the
    /// ICRC.
    fn receive(
        link: &mut Udp,
        count: usize,
        take: &mut dyn FnMut(Deferred<'_>),
    ) -> Vec<(bool, usize)> {
        let mut received = Vec::new();
        while received.len() < count {
            let delivered = link.receive_deferred(&mut |arrival| match arrival {
                ReceivedPacket::Read(frame) => received.push((true, frame.bytes.len() - ICRC_LEN)),
                ReceivedPacket::Deferred(deferred) => {
                    received.push((false, deferred.len - ICRC_LEN));
                    take(deferred);
                }
            });
            delivered.unwrap();
        }
        received
    }

    #[test]
    fn payloads_are_placed_at_their_destination_only() {
        for address in ["127.0.0.1:0", "[::1]:0"] {
            let Some((mut one, mut two, flow)) = links(address) else { continue };
            let memory = memory(1 << 17);
            let longest = one.max_packet() - HEADERS - ICRC_LEN;
            let lengths = [4200, 5001, 5002, 5003, 8192, 30_001, longest - 1, longest];
            for (seed, len) in lengths.into_iter().enumerate() {
                for offset in [64, 65, 4095] {
                    let seed = seed as u8;
                    memory.host_bytes().unwrap().write(0, &[0xee; 1 << 17]).unwrap();
                    send(&mut one, flow, len, seed, Corruption::Intact);
                    let received = receive(&mut two, 1, &mut |deferred| {
                        assert_eq!(
                            (deferred.head.from, deferred.head.has_icrc),
                            (one.local(), false)
                        );
                        assert_eq!(deferred.head.bytes[..HEADERS], [seed; HEADERS]);
                        let into = memory.host_bytes().unwrap().slice(offset, len as u64).unwrap();
                        assert!(
                            deferred.pending_payload.read_into(HEADERS, &into),
                            "{address} {len} {offset}"
                        );
                        assert!(
                            !deferred.pending_payload.read_into(HEADERS, &into),
                            "it can be consumed once"
                        );
                        assert!(
                            deferred.pending_payload.read().is_none(),
                            "it can be consumed once"
                        );
                    });
                    assert_eq!(received, [(false, HEADERS + len.next_multiple_of(4))]);
                    let mut found = vec![0; 1 << 17];
                    memory.host_bytes().unwrap().read(0, &mut found).unwrap();
                    let (start, end) = (offset as usize, offset as usize + len);
                    assert!(found[start..end] == payload(len, seed), "{address} {len} {offset}");
                    let others = found[..start].iter().chain(&found[end..]);
                    assert!(others.into_iter().all(|byte| *byte == 0xee), "{len} {offset}");
                }
            }
            assert_eq!(two.counters().direct_placed, 3 * lengths.len() as u64);
            assert_eq!(two.counters().drops.total(), 0);
        }
    }

    #[test]
    fn packets_are_read_or_skipped_and_order_is_kept() {
        let Some((mut one, mut two, flow)) = links("127.0.0.1:0") else { return };
        let lengths = [20_000, 100, 100, 30_000, 60_000, 100, 20_000, 100, 100, 100, 100, 100, 100];
        for (seed, len) in lengths.into_iter().enumerate() {
            send(&mut one, flow, len, seed as u8, Corruption::Intact);
        }
        let mut read = Vec::new();
        let received = receive(&mut two, lengths.len(), &mut |deferred| {
            // Packets of 20 000 bytes are left in the socket.
            if deferred.len != 20_000 + HEADERS + ICRC_LEN {
                let packet = deferred.pending_payload.read().unwrap();
                assert!(
                    packet[HEADERS..packet.len() - ICRC_LEN]
                        == payload(deferred.len - 32, packet[0])
                );
                read.push(packet.len() - HEADERS - ICRC_LEN);
            }
        });
        let wanted = lengths.map(|len| (len <= MAX_ROCE_PACKET, HEADERS + len));
        assert_eq!(received, wanted);
        assert_eq!(read, [30_000, 60_000]);
        let counters = two.counters();
        assert_eq!((counters.received, counters.drops.total()), (1 + lengths.len() as u64, 0));
        // After a while without long packets, the next one is delivered complete.
        send(&mut one, flow, 20_000, 1, Corruption::Intact);
        assert_eq!(receive(&mut two, 1, &mut leave), [(true, HEADERS + 20_000)]);
    }

    #[test]
    fn invalid_packets_are_dropped_and_counted() {
        let Some((mut one, mut two, flow)) = links("127.0.0.1:0") else { return };
        let memory = memory(1 << 16);
        let into = memory.host_bytes().unwrap().slice(0, 20_000).unwrap();
        let last = (HEADERS + 20_000 + ICRC_LEN) as u32 * 8 - 1;
        let mut dropped = 0;
        for bit in [0, 95, last - 31, last] {
            for whole in [false, true] {
                memory.host_bytes().unwrap().write(19_936, &[0xee; 64]).unwrap();
                send(&mut one, flow, 20_000, 1, Corruption::FlipBit(bit));
                receive(&mut two, 1, &mut |deferred| match whole {
                    false => {
                        assert!(!deferred.pending_payload.read_into(HEADERS, &into), "bit {bit}")
                    }
                    true => assert!(deferred.pending_payload.read().is_none(), "bit {bit}"),
                });
                dropped += 1;
                let mut end = [0; 64];
                memory.host_bytes().unwrap().read(19_936, &mut end).unwrap();
                assert_eq!(end, [0xee; 64], "the tail must not have been stored");
                // The next one is delivered complete, because it may have an ICRC; then deferral
                // resumes.
                send(&mut one, flow, 20_000, 1, Corruption::Intact);
                assert_eq!(receive(&mut two, 1, &mut leave), [(true, HEADERS + 20_000)]);
            }
        }
        // Lengths that do not match the packet.
        for (headers, len) in
            [(HEADERS, 19_990), (HEADERS, 20_001), (HEADERS + 4, 20_000), (90, 5), (0, 9)]
        {
            send(&mut one, flow, 20_000, 1, Corruption::Intact);
            receive(&mut two, 1, &mut |deferred| {
                let into = memory.host_bytes().unwrap().slice(0, len).unwrap();
                assert!(!deferred.pending_payload.read_into(headers, &into), "{headers} and {len}");
            });
            dropped += 1;
        }
        assert_eq!((two.counters().drops.icrc, two.counters().direct_placed), (dropped, 0));
    }

    #[test]
    fn packets_with_an_icrc_are_read_whole() {
        let Some((_, mut two, _)) = links("127.0.0.1:0") else { return };
        let here = "127.0.0.1:0".parse().unwrap();
        let mut with_icrc = Udp::bind(here, "always_icrc=on".parse().unwrap()).unwrap();
        let flow = with_icrc.open(two.local(), 0).unwrap();
        for seed in 0..3 {
            send(&mut with_icrc, flow, 20_000, seed, Corruption::Intact);
            assert_eq!(receive(&mut two, 1, &mut leave), [(true, HEADERS + 20_000)]);
        }
        assert_eq!(two.counters().drops.total(), 0);
    }
}

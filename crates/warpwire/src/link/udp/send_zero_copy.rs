//! Zero-copy sends: the kernel reads the payload from the caller's memory, which saves the copy
//! into a packet buffer.
//!
//! A zero-copy packet is sent immediately, by a system call of its own, so the memory is not needed
//! afterwards. Only the kernel reads the payload, and only once: an ICRC would require a second
//! read, and would be wrong if the payload changed in between. Hence only packets without an ICRC
//! are sent zero-copy: see `loopback.rs`.

use std::os::fd::BorrowedFd;

use warpwire_proto::wire::packet::ICRC_LEN;

use super::loopback;
use super::send::{Flow, TxBatch};
use super::sys::{self, PacketParts};
use crate::link::Counters;
use crate::mem::SharedBytes;

impl TxBatch {
    /// Sends the reserved packet, whose headers and pad are filled in, with this payload. `false`
    /// if it was not sent: it is still reserved.
    pub(super) fn send_zero_copy(
        &mut self,
        flow: &mut Flow,
        socket: BorrowedFd<'_>,
        counters: &mut Counters,
        headers: usize,
        payload: &SharedBytes<'_>,
    ) -> bool {
        let Some((_, len)) =
            self.reserved.filter(|(_, len)| self.omit_icrc && loopback::exceeds_roce(*len))
        else {
            return false;
        };
        // Packets committed before must be sent first.
        if self.send_runs(socket, counters).waiting > 0 {
            return false;
        }
        let Some(packet) = self.buffer.get_mut(self.end..self.end + len) else { return false };
        let Some((head, tail)) = split_payload(packet, headers, payload.len()) else {
            return false;
        };
        if loopback::write_header_checksum(&mut flow.icrc_prefix, len, head, tail).is_none() {
            return false;
        }
        let parts = PacketParts { to: &flow.name, source: flow.source, head, payload, tail };
        counters.calls += 1;
        // Whatever the cause, the copying path meets the same error and handles it.
        if sys::send_parts(socket, &parts).is_err() {
            return false;
        }
        counters.sent += 1;
        counters.zero_copy_sent += 1;
        counters.sent_bytes += len as u64;
        self.reserved = None;
        self.clear();
        true
    }
}

/// Splits a packet into the parts before and after its payload.
fn split_payload(
    packet: &mut [u8],
    headers: usize,
    payload: u64,
) -> Option<(&mut [u8], &mut [u8])> {
    let (head, rest) = packet.split_at_mut_checked(headers)?;
    let (_, tail) = rest.split_at_mut_checked(usize::try_from(payload).ok()?)?;
    // The tail is the pad and the checksum: any other length does not match the payload.
    (ICRC_LEN..ICRC_LEN + 4).contains(&tail.len()).then_some((head, tail))
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsFd;

    use super::*;
    use crate::link::tests::{receive, send};
    use crate::link::udp::{Udp, UdpOptions};
    use crate::link::{Corruption, FlowId, Flushed, Link, MAX_ROCE_PACKET};
    use crate::mem::Allocation;
    use crate::mem::sim::{Sim, SimConfig};

    const HEADERS: usize = 28;

    /// Two links, and a flow from the first to the second.
    fn links(address: &str) -> Option<(Udp, Udp, FlowId)> {
        let bind = || Udp::bind(address.parse().unwrap(), UdpOptions::default());
        let (Ok(mut one), Ok(two)) = (bind(), bind()) else {
            println!("skipped: {address} does not belong to this machine");
            return None;
        };
        let flow = one.open(two.local(), 0).unwrap();
        Some((one, two, flow))
    }

    /// Pinned memory with a distinct content at every offset.
    fn memory() -> Allocation {
        let gpu = Sim::start(SimConfig::default()).unwrap().device(0).unwrap();
        let memory = gpu.alloc_pinned(1 << 17).unwrap();
        let bytes: Vec<u8> =
            (0..1_u32 << 15).flat_map(|at| at.wrapping_mul(2_654_435_761).to_le_bytes()).collect();
        memory.host_bytes().unwrap().write(0, &bytes).unwrap();
        memory
    }

    fn reserve(link: &mut Udp, flow: FlowId, payload: usize, number: u8) {
        let len = HEADERS + payload.next_multiple_of(4) + ICRC_LEN;
        let packet = link.reserve(flow, len).unwrap();
        packet[..HEADERS].fill(number);
        packet[HEADERS + payload..].fill(0);
    }

    #[test]
    fn payloads_of_any_length_and_offset_arrive_unchanged() {
        for address in ["127.0.0.1:0", "[::1]:0"] {
            let Some((mut one, mut two, flow)) = links(address) else { continue };
            let memory = memory();
            let bytes = memory.host_bytes().unwrap();
            let longest = one.max_packet() - HEADERS - ICRC_LEN;
            let lengths = [5000, 5001, 5002, 5003, 8192, 16_384, 30_001, longest - 1, longest];
            for (number, len) in lengths.into_iter().enumerate() {
                for offset in [0, 1, 63, 4096 + 7] {
                    let slice = bytes.slice(offset, len as u64).unwrap();
                    reserve(&mut one, flow, len, number as u8);
                    assert!(one.commit_zero_copy(HEADERS, &slice), "{address} {len} {offset}");
                    let mut wanted = vec![number as u8; HEADERS];
                    wanted.resize(HEADERS + len, 0);
                    slice.read(0, &mut wanted[HEADERS..]).unwrap();
                    wanted.resize(HEADERS + len.next_multiple_of(4), 0);
                    let got = receive(&mut two, 1);
                    assert!(got == [(one.local(), wanted)], "{address} {len} {offset}");
                }
            }
            let count = 4 * lengths.len() as u64;
            assert_eq!((one.counters().zero_copy_sent, one.counters().sent), (count, count));
            assert_eq!(
                (two.counters().drops.total(), one.flush().unwrap()),
                (0, Flushed::default())
            );
        }
    }

    #[test]
    fn earlier_packets_are_sent_first() {
        let Some((mut one, mut two, flow)) = links("127.0.0.1:0") else { return };
        let memory = memory();
        let slice = memory.host_bytes().unwrap().slice(0, 20_000).unwrap();
        send(&mut one, flow, 100, 1);
        send(&mut one, flow, 100, 2);
        reserve(&mut one, flow, 20_000, 3);
        assert!(one.commit_zero_copy(HEADERS, &slice));
        send(&mut one, flow, 100, 4);
        assert_eq!(one.flush().unwrap(), Flushed { sent: 1, waiting: 0 });
        let lengths: Vec<usize> = receive(&mut two, 4).iter().map(|(_, got)| got.len()).collect();
        assert_eq!(lengths, [96, 96, HEADERS + 20_000, 96]);
    }

    /// A socket that returns `EAGAIN`, as a UDP socket on a slow network does.
    fn full_socket() -> (TcpStream, TcpStream) {
        use std::io::Write;
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut full = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let other_end = listener.accept().unwrap().0;
        full.set_nonblocking(true).unwrap();
        // A size that the kernel does not auto-tune.
        rustix::net::sockopt::set_socket_send_buffer_size(&full, 1 << 16).unwrap();
        // The other end reads nothing; the kernel must have finished moving bytes between its
        // buffers.
        let mut quiet = 0;
        while quiet < 10 {
            quiet += 1;
            while full.write(&[0; 1 << 10]).is_ok() {
                quiet = 0;
            }
            std::thread::sleep(std::time::Duration::from_millis(2));
        }
        (full, other_end)
    }

    #[test]
    fn a_packet_that_is_not_sent_stays_reserved() {
        let Some((mut one, mut two, flow)) = links("127.0.0.1:0") else { return };
        let memory = memory();
        let slice = memory.host_bytes().unwrap().slice(0, 20_000).unwrap();
        let (full, _other_end) = full_socket();
        let refused = |one: &mut Udp| {
            let flow_state = one.flows.get_mut(one.batch.reserved().unwrap()).unwrap();
            !one.batch.send_zero_copy(flow_state, full.as_fd(), &mut one.counters, HEADERS, &slice)
        };
        reserve(&mut one, flow, 20_000, 5);
        assert!(refused(&mut one), "the socket is full");
        // It is sent as a copy, and its headers are still filled in.
        assert_eq!(one.commit().unwrap().bytes[..HEADERS], [5; HEADERS]);
        reserve(&mut one, flow, 20_000, 6);
        assert!(refused(&mut one), "it must not overtake the waiting packet");
        assert_eq!(one.commit().unwrap().bytes[..HEADERS], [6; HEADERS]);
        assert_eq!(one.flush().unwrap(), Flushed { sent: 2, waiting: 0 });
        reserve(&mut one, flow, 20_000, 7);
        assert!(one.commit_zero_copy(HEADERS, &slice));
        let first: Vec<u8> = receive(&mut two, 3).iter().map(|(_, got)| got[0]).collect();
        assert_eq!(first, [5, 6, 7]);
        assert_eq!((one.counters().zero_copy_sent, one.counters().sent), (1, 3));
    }

    #[test]
    fn invalid_packets_are_not_sent() {
        let Some((mut one, mut two, flow)) = links("127.0.0.1:0") else { return };
        let memory = memory();
        let bytes = memory.host_bytes().unwrap();
        let slice = |len: usize| bytes.slice(0, len as u64).unwrap();
        assert!(!one.commit_zero_copy(HEADERS, &slice(5000)), "nothing is reserved");
        reserve(&mut one, flow, 5000, 1);
        let (more, less) = (HEADERS + 4, HEADERS - 4);
        for (headers, len) in [(HEADERS, 5004), (HEADERS, 4992), (more, 5000), (less, 5000)] {
            assert!(!one.commit_zero_copy(headers, &slice(len)), "{headers} and {len}");
        }
        assert!(!one.commit_zero_copy(11, &slice(5017)), "less than a BTH");
        assert!(
            !one.commit_zero_copy(9000, &slice(4)) && !one.commit_zero_copy(usize::MAX, &slice(4))
        );
        let payload = MAX_ROCE_PACKET - HEADERS - ICRC_LEN;
        reserve(&mut one, flow, payload, 1);
        assert!(!one.commit_zero_copy(HEADERS, &slice(payload)), "a packet that needs an ICRC");
        reserve(&mut one, flow, 5000, 1);
        one.close(flow);
        assert!(!one.commit_zero_copy(HEADERS, &slice(5000)), "the flow is closed");
        assert_eq!((one.counters().sent, receive(&mut two, 1).len()), (0, 0));
    }

    #[test]
    fn links_that_always_append_an_icrc_do_not_send_zero_copy() {
        let memory = memory();
        let slice = memory.host_bytes().unwrap().slice(0, 20_000).unwrap();
        let here = "127.0.0.1:0".parse().unwrap();
        let mut two = Udp::bind(here, UdpOptions::default()).unwrap();
        for (options, forced) in [("always_icrc=on", false), ("", true)] {
            let mut one = Udp::bind(here, options.parse().unwrap()).unwrap();
            let flow = one.open(two.local(), 0).unwrap();
            if forced {
                assert!(one.path().why.contains("without ICRC"));
                one.force_icrc();
            }
            assert!(!one.path().why.contains("without ICRC"));
            reserve(&mut one, flow, 20_000, 1);
            assert!(!one.commit_zero_copy(HEADERS, &slice));
            assert!(one.commit().unwrap().has_icrc);
            // Corruption of a long packet's payload is detected, as fault injection requires.
            reserve(&mut one, flow, 20_000, 2);
            one.commit_corrupted(Corruption::FlipBit(100_000));
            one.flush().unwrap();
        }
        let mut valid = 0;
        while valid + two.counters().drops.icrc < 4 {
            two.receive(&mut |frame| valid += u64::from(frame.has_icrc)).unwrap();
        }
        assert_eq!(valid, 2);
    }

    #[test]
    fn copies_of_long_packets_need_no_icrc_either() {
        let Some((mut one, mut two, flow)) = links("127.0.0.1:0") else { return };
        for (payload, has_icrc) in [(4096, true), (8192, false)] {
            reserve(&mut one, flow, payload, 1);
            assert_eq!(one.commit().unwrap().has_icrc, has_icrc);
            one.flush().unwrap();
            while two.receive(&mut |frame| assert_eq!(frame.has_icrc, has_icrc)).unwrap() == 0 {}
        }
        assert_eq!(two.counters().drops.total(), 0);
    }
}

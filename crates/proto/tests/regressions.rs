//! Regression tests of the queue pair, one per defect.

use warpwire_proto::qp::*;
use warpwire_proto::wire::{
    Aeth, AtomicEth, Extension, Headers, Nak, Opcode, Reth, Syndrome, UDP_PORT,
};
use warpwire_proto::{Instant, Psn};

/// A host that answers `Ready` unless a test sets something else.
struct TestHost {
    receive: bool,
    fetch: fn(Source) -> HostStatus,
    store: HostStatus,
}
impl Default for TestHost {
    fn default() -> Self {
        Self { receive: true, fetch: |_| HostStatus::Ready, store: HostStatus::Ready }
    }
}
impl Host for TestHost {
    fn take_receive(&mut self) -> Option<Receive> {
        self.receive.then_some(Receive { id: 1, capacity: 1 << 20 })
    }
    fn may_access(&mut self, _: Access, at: Remote, _: u32) -> HostStatus {
        if at.rkey == 666 { HostStatus::Denied } else { HostStatus::Ready }
    }
    fn place(&mut self, _: Target, _: u32) -> HostStatus {
        HostStatus::Ready
    }
    fn execute(&mut self, _: Remote, _: Atomic) -> Result<u64, HostStatus> {
        Ok(7)
    }
    fn invalidate(&mut self, _: u32) -> HostStatus {
        HostStatus::Ready
    }
    fn store_result(&mut self, _: u64, _: u64) -> HostStatus {
        self.store
    }
    fn fetch(&mut self, from: Source, _: u32, _: usize) -> HostStatus {
        (self.fetch)(from)
    }
}

fn t(micros: u64) -> Instant {
    Instant::from_nanos(micros * 1000)
}

fn connected_qp(options: TransportOptions, retry: u8, rnr: u8, rd: u8) -> RcQp {
    let mut qp = RcQp::new(0x11, options);
    let path = PathAttributes {
        peer: (std::net::Ipv4Addr::LOCALHOST, UDP_PORT).into(),
        traffic_class: 0,
        hop_limit: 64,
        flow_label: 0,
        source_port: None,
    };
    qp.modify(
        &QpAttributes::new(State::Init)
            .with_partition_index(0)
            .with_port(1)
            .with_access(Access::ALL),
    )
    .unwrap();
    qp.modify(
        &QpAttributes::new(State::Rtr)
            .with_path(path)
            .with_mtu(Mtu::new(256))
            .with_destination(0x22)
            .with_receive_psn(Psn::new(0))
            .with_max_dest_rd_atomic(4)
            .with_min_rnr_timer(1),
    )
    .unwrap();
    qp.modify(
        &QpAttributes::new(State::Rts)
            .with_send_psn(Psn::new(0))
            .with_timeout(8)
            .with_retry_count(retry)
            .with_rnr_retry(rnr)
            .with_max_rd_atomic(rd),
    )
    .unwrap();
    qp
}

/// Leaks the headers, which is fine in a test.
fn packet(opcode: Opcode, psn: u32, extension: Extension, len: u32) -> RxPacket<'static> {
    let headers =
        Headers { ack_request: true, ..Headers::new(opcode, 0x11, Psn::new(psn), extension) };
    RxPacket { headers: Box::leak(Box::new(headers)), payload_len: len, marked: false }
}
fn ack(psn: u32, syndrome: Syndrome) -> RxPacket<'static> {
    packet(Opcode::Acknowledge, psn, Extension::Aeth(Aeth { syndrome, msn: 0 }), 0)
}
fn reth(len: u32) -> Extension {
    Extension::Reth(Reth { address: 0x1000, rkey: 1, len })
}
const AT: Remote = Remote { address: 0x1000, rkey: 1 };

#[test]
fn rnr_nak_with_progress_resets_the_retries_first() {
    let mut qp = connected_qp(TransportOptions::default(), 7, 1, 4);
    let mut h = TestHost::default();
    for id in 0..2 {
        qp.post(SendWr::new(id, SendOp::Send, 8)).unwrap();
    }
    while qp.poll_transmit(t(0), &mut h).is_some() {}
    qp.handle_packet(t(1), &ack(0, Syndrome::RnrNak(1)), &mut h).unwrap(); // uses the only retry
    while qp.poll_transmit(t(100), &mut h).is_some() {}
    // Message 0 was accepted. Its ACK is piggy-backed on the RNR NAK for message 1, the first for
    // that message.
    qp.handle_packet(t(101), &ack(1, Syndrome::RnrNak(1)), &mut h).unwrap();
    assert_eq!(qp.state(), State::Rts);
}

#[test]
fn sequence_nak_with_progress_resets_the_retries_first() {
    let mut qp = connected_qp(TransportOptions::default(), 1, 7, 4);
    let mut h = TestHost::default();
    for id in 0..3 {
        qp.post(SendWr::new(id, SendOp::Send, 8)).unwrap();
    }
    while qp.poll_transmit(t(0), &mut h).is_some() {}
    let late = qp.poll_timeout(t(0));
    qp.handle_timeout(late);
    while qp.poll_transmit(late, &mut h).is_some() {}
    qp.handle_packet(late, &ack(2, Syndrome::Nak(Nak::Sequence)), &mut h).unwrap();
    assert_eq!(qp.state(), State::Rts, "two messages were acknowledged, which is progress");
}

#[test]
fn read_without_rd_atomic_completes() {
    let mut qp = connected_qp(TransportOptions::default(), 7, 7, 0);
    let mut h = TestHost::default();
    if qp.post(SendWr::new(0, SendOp::Read(AT), 8)).is_ok() {
        assert!(
            qp.poll_transmit(t(0), &mut h).is_some()
                || qp.poll_event().is_some()
                || qp.poll_timeout(t(0)) != Instant::NEVER,
            "hangs forever"
        );
    }
}

#[test]
fn a_marked_cnp_causes_no_cnp() {
    let mut qp = connected_qp(TransportOptions::default(), 7, 7, 4);
    let mut h = TestHost::default();
    let mut cnp = packet(Opcode::CongestionNotification, 0, Extension::Cnp, 0);
    cnp.marked = true;
    qp.handle_packet(t(100), &cnp, &mut h).unwrap();
    assert!(qp.poll_transmit(t(100), &mut h).is_none());
}

#[test]
fn no_bare_ack_has_the_psn_of_a_read() {
    let mut qp = connected_qp(TransportOptions::default(), 7, 7, 4);
    let mut h = TestHost::default();
    qp.handle_packet(t(0), &packet(Opcode::WriteOnly, 0, reth(8), 8), &mut h).unwrap();
    qp.handle_packet(t(0), &packet(Opcode::ReadRequest, 1, reth(8), 0), &mut h).unwrap();
    while qp.poll_transmit(t(0), &mut h).is_some() {} // all lost
    // The peer's timer expires: it repeats the WRITE, and the READ follows.
    let _ = qp.handle_packet(t(9), &packet(Opcode::WriteOnly, 0, reth(8), 8), &mut h);
    let response = qp.poll_transmit(t(9), &mut h).unwrap();
    assert_eq!(response.headers.opcode, Opcode::Acknowledge);
    assert_eq!(response.headers.psn, Psn::new(0), "rxe completes its READ at psn 1 without data");
}

#[test]
fn changing_max_dest_rd_atomic_in_sqd_keeps_pending_responses() {
    let mut qp = connected_qp(TransportOptions::default(), 7, 7, 4);
    let mut h = TestHost::default();
    qp.handle_packet(t(0), &packet(Opcode::ReadRequest, 0, reth(8), 0), &mut h).unwrap();
    qp.modify(&QpAttributes::new(State::Sqd)).unwrap();
    if qp.modify(&QpAttributes::new(State::Sqd).with_max_dest_rd_atomic(8)).is_ok() {
        let again = qp.handle_packet(t(1), &packet(Opcode::ReadRequest, 0, reth(8), 0), &mut h);
        assert_eq!(again, Err(DiscardReason::Duplicate));
        assert!(qp.poll_transmit(t(1), &mut h).is_some());
    }
}

#[test]
fn an_atomic_result_without_a_page_pauses() {
    let mut qp = connected_qp(TransportOptions::default(), 7, 7, 4);
    let mut h = TestHost { store: HostStatus::Retry, ..TestHost::default() };
    qp.post(SendWr::new(0, SendOp::Atomic(AT, Atomic::FetchAdd { add: 1 }), 8)).unwrap();
    assert!(qp.poll_transmit(t(0), &mut h).is_some());
    let result = Extension::AethAtomic(Aeth { syndrome: Syndrome::ACK, msn: 1 }, 5);
    let _ = qp.handle_packet(t(1), &packet(Opcode::AtomicAcknowledge, 0, result, 0), &mut h);
    assert!(
        qp.poll_transmit(t(1), &mut h).is_none(),
        "requested again immediately, once per round trip"
    );
}

#[test]
fn a_local_page_fault_does_not_count_as_an_unresponsive_peer() {
    let mut qp = connected_qp(TransportOptions::default(), 0, 7, 4);
    let stuck: fn(Source) -> HostStatus = |from| match from {
        Source::SendWr { offset, .. } if offset >= 512 => HostStatus::Retry,
        _ => HostStatus::Ready,
    };
    let mut h = TestHost { fetch: stuck, ..TestHost::default() };
    qp.post(SendWr::new(0, SendOp::Write(AT), 1024)).unwrap();
    while let Some(sent) = qp.poll_transmit(t(0), &mut h) {
        assert!(!sent.headers.ack_request); // the peer has no reason to respond
    }
    let deadline = qp.poll_timeout(t(0));
    if deadline != Instant::NEVER {
        qp.handle_timeout(deadline);
    }
    assert_eq!(qp.state(), State::Rts);
}

#[test]
fn a_repeated_nak_does_not_use_up_all_retries() {
    let mut qp = connected_qp(TransportOptions::default(), 7, 7, 4);
    let mut h = TestHost::default();
    for id in 0..20 {
        qp.post(SendWr::new(id, SendOp::Send, 8)).unwrap();
    }
    while qp.poll_transmit(t(0), &mut h).is_some() {}
    for turn in 0..8 {
        // The network duplicates one NAK; between two copies one packet is retransmitted.
        qp.handle_packet(t(turn), &ack(0, Syndrome::Nak(Nak::Sequence)), &mut h).unwrap();
        qp.poll_transmit(t(turn), &mut h);
    }
    assert_eq!(qp.state(), State::Rts);
}

#[test]
fn an_atomic_with_payload_is_invalid() {
    let mut qp = connected_qp(TransportOptions::default(), 7, 7, 4);
    let mut h = TestHost::default();
    let eth = Extension::Atomic(AtomicEth { address: 0x1000, rkey: 1, swap_or_add: 1, compare: 0 });
    qp.handle_packet(t(0), &packet(Opcode::FetchAdd, 0, eth, 64), &mut h).unwrap();
    assert_eq!(qp.state(), State::Err);
}

#[test]
fn an_untaken_receive_completion_does_not_stop_writes() {
    let mut qp = connected_qp(TransportOptions::default(), 7, 7, 4);
    let mut h = TestHost::default();
    qp.handle_packet(t(0), &packet(Opcode::SendOnly, 0, Extension::None, 8), &mut h).unwrap();
    let write = qp.handle_packet(t(0), &packet(Opcode::WriteOnly, 1, reth(8), 8), &mut h);
    assert_eq!(write, Ok(()), "a WRITE needs no receive completion");
}

//! Times that the engine keeps although it is held up: a wait counts from the packet that asks for
//! it.

use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use testkit::cases;
use warpwire::Result;
use warpwire::link::{
    Corruption, Counters, FlowId, Flushed, Frame, Hub, Link, LinkPath, Loopback, ReserveError,
};
use warpwire::verbs::{
    HcaOptions, ProgressMode, QpEndpoint, QpOptions, SendRequest, State, Status, WrOp,
};
use warpwire_proto::Psn;
use warpwire_proto::wire::{Aeth, Extension, Headers, Opcode, Syndrome};

use crate::verbs::fixture::{Endpoint, Fixture, test_timeout};

cases!(Fixture; ONCE:
    a_wait_counts_from_the_packet_that_asks_for_it,
    messages_of_too_many_packets,
);

/// How long the engine is held up before it reads a packet.
const HELD_UP: Duration = Duration::from_millis(15);

/// A link whose reader is held up, as by the scheduler, before each packet that it reads.
struct SlowLink(Loopback);

impl Link for SlowLink {
    fn path(&self) -> LinkPath {
        self.0.path()
    }

    fn local(&self) -> SocketAddr {
        self.0.local()
    }

    fn max_packet(&self) -> usize {
        self.0.max_packet()
    }

    fn open(&mut self, peer: SocketAddr, label: u32) -> Result<FlowId> {
        self.0.open(peer, label)
    }

    fn close(&mut self, flow: FlowId) {
        self.0.close(flow);
    }

    fn reserve(
        &mut self,
        flow: FlowId,
        len: usize,
    ) -> std::result::Result<&mut [u8], ReserveError> {
        self.0.reserve(flow, len)
    }

    fn commit_corrupted(&mut self, corruption: Corruption) -> Option<Frame<'_>> {
        self.0.commit_corrupted(corruption)
    }

    fn flush(&mut self) -> Result<Flushed> {
        self.0.flush()
    }

    fn receive(&mut self, take: &mut dyn FnMut(Frame<'_>)) -> Result<usize> {
        self.0.receive(&mut |frame| {
            std::thread::sleep(HELD_UP);
            take(frame);
        })
    }

    fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        self.0.wait_fd()
    }

    fn counters(&self) -> Counters {
        self.0.counters()
    }
}

fn a_wait_counts_from_the_packet_that_asks_for_it(_: &Fixture) {
    const QPN: u32 = 0x77;
    let hub = Hub::new();
    let endpoint = |text: &str| hub.endpoint(text.parse().unwrap()).unwrap();
    let (link, mut peer) = (endpoint("10.0.0.1:4791"), endpoint("10.0.0.2:4791"));
    let options = HcaOptions::default().with_progress_mode(ProgressMode::Manual);
    let end = Endpoint::open(SlowLink(link), options);
    let flow = peer.open(end.context.path().local, 0).unwrap();
    let cq = end.context.create_cq(16).unwrap();
    let options = QpOptions::default().with_timeout(0);
    let qp = end.context.create_qp(&end.pd, &cq, &cq, options).unwrap();
    let address = peer.local();
    let mtu = 1024;
    let there = QpEndpoint {
        address,
        qpn: QPN,
        psn: 5,
        mtu,
        max_rd_atomic: 4,
        source_port: 0,
        lid: 0,
        gid: 0,
        mtu_on_host: 0,
        selective_repeat: false,
    };
    qp.connect(&there).unwrap();
    qp.post_send(&[SendRequest::new(1, WrOp::Send)]).unwrap();
    let next = |peer: &mut Loopback| {
        let (start, mut found) = (Instant::now(), None);
        while found.is_none() {
            end.context.soft().unwrap().poll().unwrap();
            peer.receive(&mut |frame| found = Some(frame.bytes[8..12].to_vec())).unwrap();
            assert!(start.elapsed() < test_timeout(), "nothing was sent");
        }
        found.unwrap()
    };
    let first = next(&mut peer);
    let psn = Psn::new(u32::from_be_bytes([0, first[1], first[2], first[3]]));
    // Code 17: 3.84 ms, which is over when the engine reads the NAK, counted from the step's begin.
    for _ in 0..3 {
        let aeth = Extension::Aeth(Aeth { syndrome: Syndrome::RnrNak(17), msn: 0 });
        let headers = Headers::new(Opcode::Acknowledge, qp.number(), psn, aeth);
        let slot = peer.reserve(flow, headers.wire_len(0)).unwrap();
        headers.emit(slot, 0).unwrap();
        peer.commit();
        peer.flush().unwrap();
        let sent = Instant::now();
        assert_eq!(next(&mut peer)[1..], first[1..], "the message again");
        let waited = sent.elapsed();
        assert!(waited >= HELD_UP + Duration::from_micros(3840), "resent after {waited:?}");
    }
}

/// 2^31 bytes are 2^23 packets at the smallest MTU, one too many: the work fails with a length
/// error.
fn messages_of_too_many_packets(fixture: &Fixture) {
    let testbed = fixture.testbed();
    let options = QpOptions::default().with_mtu(warpwire::verbs::Mtu::new(256));
    let memory = fixture.host(&testbed.a, 4096);
    // The memory is not touched: the length is checked first.
    for op in [WrOp::Write(memory.mr.remote(0)), WrOp::Read(memory.mr.remote(0))] {
        let conn = testbed.join(options.clone());
        let data = [memory.mr.sge(0, 1 << 30); 2];
        conn.a.qp.post_send(&[SendRequest::new(7, op).with(&data)]).unwrap();
        testbed.failed(&conn.a.sends, 7, Status::LocalLength);
        assert_eq!(conn.a.qp.state().unwrap(), State::Err);
    }
}

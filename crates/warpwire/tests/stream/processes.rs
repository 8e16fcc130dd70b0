//! A peer in another process that is killed.

use std::net::TcpListener;

use warpwire::hca::HcaOptions;
use warpwire::link::{Link, Shm, ShmOptions, Udp, UdpOptions};
use warpwire::mr::HostMemory;
use warpwire::stream::StreamQp;
use warpwire::verbs::bootstrap::Bootstrap;
use warpwire::verbs::{
    Access, Context, QpEndpoint, QpOptions, ReceiveRequest, SendRequest, Status, WrOp,
};

use crate::stream::fixture::*;
use testkit::{Process, Role, cases};

cases!(Fixture; ONCE: a_killed_peer_releases_all_streams);

fn link(name: &str) -> Box<dyn Link> {
    let any_port = "127.0.0.1:0".parse().unwrap();
    match name {
        "shm" => Box::new(Shm::bind(any_port, ShmOptions::default()).unwrap()),
        _ => Box::new(Udp::bind(any_port, UdpOptions::default()).unwrap()),
    }
}

/// The peer: receives messages until it is killed. `words` is `<link>:<bootstrap port>`.
pub fn run_role(words: &str) {
    let (name, port) = words.split_once(':').unwrap();
    let mut bootstrap =
        Bootstrap::connect(("127.0.0.1", port.parse().unwrap()), test_timeout()).unwrap();
    let context = Context::open_with(link(name), HcaOptions::default()).unwrap();
    let (pd, cq) = (context.alloc_pd(), context.create_cq(64).unwrap());
    let qp = context.create_qp(&pd, &cq, &cq, QpOptions::default()).unwrap();
    let endpoint: QpEndpoint = bootstrap.swap(&qp.endpoint()).unwrap();
    qp.connect(&endpoint).unwrap();
    let mr = context.register(&pd, HostMemory::new(64).unwrap(), Access::ALL).unwrap();
    for id in 0..16 {
        qp.post_receive(&[ReceiveRequest { id, data: &[mr.sge(0, 8)] }]).unwrap();
    }
    let _: u64 = bootstrap.swap(&1_u64).unwrap();
    std::thread::sleep(test_timeout());
}

fn a_killed_peer_releases_all_streams(fixture: &Fixture) {
    for name in ["udp", "shm"] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let peer = Process::start(&mut Role::new("stream", format!("{name}:{port}")).command());
        let mut bootstrap = Bootstrap::accept(&listener, test_timeout()).unwrap();
        let end = Endpoint::open(link(name), thread());
        // 4.096 µs · 2^16 per transmission, four transmissions: a live peer may wait for a CPU.
        let qp = QpOptions::default().with_timeout(16).with_retry_count(3);
        let options = fixture.options().with_qp(qp);
        let a = StreamQp::create(&end.context, &end.pd, &fixture.gpu, options).unwrap();
        let endpoint: QpEndpoint = bootstrap.swap(&a.endpoint()).unwrap();
        a.connect(&endpoint).unwrap();
        let _: u64 = bootstrap.swap(&1_u64).unwrap();

        let streams = [fixture.stream(), fixture.stream(), fixture.stream()];
        let inbox = fixture.memory(&end, 64);
        post_receives(&a, &inbox, 1, 8);
        a.wait_receive(&streams[2]).unwrap();
        let first = a.queue(&streams[0], &SendRequest::new(1, WrOp::Send).inline(&[1; 8])).unwrap();
        a.wait_send(&streams[0], first).unwrap();
        sync(&streams[0]);
        assert!(next(&a).is_success() && a.failure().is_none());

        drop(peer);
        let last = a.queue(&streams[0], &SendRequest::new(2, WrOp::Send).inline(&[2; 8])).unwrap();
        a.wait_send(&streams[0], last).unwrap();
        a.wait_send(&streams[1], last).unwrap();
        streams.iter().for_each(sync);
        let failure = a.failure().unwrap();
        assert_eq!(failure.status, Some(Status::RetryExceeded), "{name}: {failure}");
        assert_eq!(failure.id, Some(2), "{name}: {failure}");
    }
}

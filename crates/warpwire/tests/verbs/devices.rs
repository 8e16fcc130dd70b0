//! RDMA devices of the machine only: names, ports, GIDs, access paths to GPU memory.

use warpwire::error::Kind as ErrorKind;
use warpwire::link::{Hub, LinkKind};
use warpwire::mr::{AccessPath, HostMemory, MemorySource};
use warpwire::stream::{KernelQp, KernelQpOptions, StreamQp, StreamQpOptions};
use warpwire::verbs::{
    Access, AttachMode, Completion, CompletionKind, Context, CqOptions, DeviceOptions, DmaBufRange,
    Mtu, PostError, QpAttributes, QpEndpoint, QpOptions, ReceiveRequest, SendRequest, State,
    Status, WrOp, devices,
};

use crate::verbs::fixture::{Endpoint, Fixture, TestLink, same};
use testkit::{cases, skip};

cases!(Fixture; CASES:
    unknown_names_ports_and_gids,
    no_host_at_the_address,
    queues_of_different_contexts,
    paths_to_device_memory,
    dma_bufs_of_the_caller,
    batches,
    one_completion_queue_for_both_sides,
    device_and_path_are_described,
    no_queues_for_streams_and_kernels,
);

/// An RDMA device; skips the case in all configurations but one.
fn device(fixture: &Fixture) -> Endpoint {
    if fixture.test_link != TestLink::Device {
        skip("runs in one device configuration only");
    }
    fixture.testbed().a
}

fn name(end: &Endpoint) -> String {
    end.context.device().unwrap().device().name.clone()
}

fn device_and_path_are_described(fixture: &Fixture) {
    let end = device(fixture);
    assert!(devices().unwrap().iter().any(|device| device.name == name(&end)));
    assert!(end.context.soft().is_none());
    let path = end.context.path();
    assert_eq!((path.kind, path.local.port()), (LinkKind::Hardware, 4791));
    assert!(path.why.contains(&name(&end)), "{path}");
    let cq = end.context.create_cq(4).unwrap();
    let qp = end.context.create_qp(&end.pd, &cq, &cq, QpOptions::default()).unwrap();
    assert_eq!(qp.path().unwrap().local, path.local);
    assert_eq!((qp.endpoint().address, qp.endpoint().lid), (path.local, 0));
    // Direct verbs need mlx5, and the error says so.
    let refused = qp.direct_queues().unwrap_err().to_string();
    assert!(refused.contains("its driver is rxe"), "{refused}");
    assert_eq!(qp.stats().unwrap_err().kind(), &ErrorKind::Unsupported);
    // What only the software HCA has is absent, not empty.
    assert!(end.context.stats().is_none() && qp.queues().is_none() && cq.memory().is_none());
    assert_eq!(end.context.registry().unwrap_err().kind(), &ErrorKind::Unsupported);
    assert_eq!(end.pd.soft().unwrap_err().kind(), &ErrorKind::InvalidArgument);
}

/// Streams and kernels write WQEs in the mlx5 format, which rxe does not have.
fn no_queues_for_streams_and_kernels(fixture: &Fixture) {
    let end = device(fixture);
    let (context, pd, gpu) = (&end.context, &end.pd, &fixture.gpu());
    let streams = StreamQp::create(context, pd, gpu, StreamQpOptions::default()).map(drop);
    let kernels = KernelQp::create(context, pd, gpu, KernelQpOptions::default()).map(drop);
    let manual_release = CqOptions::default().with_manual_release(true);
    let queue = context.create_cq_with(manual_release).map(drop);
    for (refused, what) in [
        (streams, "create a stream queue pair"),
        (kernels, "create a kernel queue pair"),
        (queue, "map the queues"),
    ] {
        let refused = refused.unwrap_err();
        assert_eq!(refused.kind(), &ErrorKind::Unsupported, "{refused}");
        let text = refused.to_string();
        for part in [what, "no direct verbs: its driver is rxe, not mlx5", "ConnectX NIC"] {
            assert!(text.contains(part), "no {part}: {text}");
        }
    }
}

fn unknown_names_ports_and_gids(fixture: &Fixture) {
    let end = device(fixture);
    let name = name(&end);
    let refused = Context::open_device("mlx9_9").unwrap_err().to_string();
    assert!(refused.contains("mlx9_9") && refused.contains(&name), "{refused}");
    let open = |options| Context::open_device_with(&name, options).unwrap_err().to_string();
    let refused = open(DeviceOptions::default().with_gid_index(200));
    assert!(refused.contains("no GID at this index") && refused.contains("use one of"));
    let refused = open(DeviceOptions::default().with_port(9));
    assert!(refused.contains("no port 9"), "{refused}");
    let cq = end.context.create_cq(4).unwrap();
    let make = |options| end.context.create_qp(&end.pd, &cq, &cq, options).unwrap_err().to_string();
    let refused = make(QpOptions::default().with_gid_index(200));
    assert!(refused.contains("GID 200") && refused.contains("use one of"), "{refused}");
    let refused = make(QpOptions::default().with_port(7));
    assert!(refused.contains("no port 7"), "{refused}");
}

fn no_host_at_the_address(fixture: &Fixture) {
    let end = device(fixture);
    let cq = end.context.create_cq(4).unwrap();
    let qp = end.context.create_qp(&end.pd, &cq, &cq, QpOptions::default()).unwrap();
    let std::net::IpAddr::V4(own) = qp.endpoint().address.ip() else {
        skip("the device has only IPv6")
    };
    let [a, b, c, _] = own.octets();
    let absent = QpEndpoint { address: ([a, b, c, 99], 4791).into(), ..qp.endpoint() };
    let refused = qp.connect(&absent).unwrap_err();
    assert_eq!(refused.kind(), &ErrorKind::Unavailable, "{refused}");
    assert!(refused.to_string().contains("no reply to ARP"), "{refused}");
    // An invalid MTU from a peer.
    qp.modify(&QpAttributes::new(State::Reset)).unwrap();
    let odd = QpEndpoint { mtu: 1000, mtu_on_host: 0, ..qp.endpoint() };
    assert_eq!(qp.connect(&odd).unwrap_err().kind(), &ErrorKind::Malformed);
    assert!(Mtu::new(1000).is_none());
}

fn queues_of_different_contexts(fixture: &Fixture) {
    let end = device(fixture);
    let hub = Hub::new();
    let soft = Context::open(hub.endpoint("10.0.0.1:4791".parse().unwrap()).unwrap()).unwrap();
    let (own, foreign) = (end.context.create_cq(4).unwrap(), soft.create_cq(4).unwrap());
    let options = QpOptions::default;
    let assert_rejected = |refused: warpwire::Result<warpwire::verbs::Qp>| {
        let refused = refused.unwrap_err();
        assert_eq!(refused.kind(), &ErrorKind::InvalidArgument, "{refused}");
        assert!(refused.to_string().contains("another context"), "{refused}");
    };
    assert_rejected(end.context.create_qp(&end.pd, &own, &foreign, options()));
    assert_rejected(soft.create_qp(&soft.alloc_pd(), &foreign, &own, options()));
    assert_rejected(end.context.create_qp(&soft.alloc_pd(), &own, &own, options()));
    let srq = soft.create_srq(&soft.alloc_pd(), warpwire::verbs::SrqOptions::default()).unwrap();
    assert_rejected(end.context.create_qp(&end.pd, &own, &own, options().with_srq(srq)));
    let memory = HostMemory::new(4096).unwrap();
    assert!(end.context.register(&soft.alloc_pd(), memory, Access::ALL).is_err());
}

/// The best available access path is used, and `why` says why not a better one.
fn paths_to_device_memory(fixture: &Fixture) {
    let end = device(fixture);
    let memory = fixture.gpu().alloc(1 << 20).unwrap();
    let whole = || MemorySource::from(memory.whole().unwrap());
    let mr = end.context.register(&end.pd, whole(), Access::ALL).unwrap();
    assert!(matches!(mr.path(), AccessPath::Window(_)), "{}", mr.path());
    let why = mr.why().join("; ");
    assert!(why.contains("no dma-buf: ") && why.contains("no peer memory: "), "{why}");
    assert_eq!((mr.iova(), mr.len()), (memory.address().raw(), 1 << 20));
    let refused = end.context.register(&end.pd, whole().without_window(), Access::ALL).unwrap_err();
    assert_eq!(refused.kind(), &ErrorKind::Unsupported);
    let text = refused.to_string();
    for part in ["no dma-buf", "no peer memory", "no window", "not staged", "nvidia-peermem"] {
        assert!(text.contains(part), "{text}");
    }
    // Registration by address finds the same path.
    let at = memory.address().raw();
    #[allow(unsafe_code)]
    // SAFETY: the memory outlives the registration, and there are no references to it.
    let mr = unsafe { end.context.register_address(&end.pd, at, 4096, None, Access::ALL) }.unwrap();
    assert!(matches!(mr.path(), AccessPath::Window(_)) && mr.client() == Some("sim"));
    assert_eq!(mr.iova(), at);
}

fn dma_bufs_of_the_caller(fixture: &Fixture) {
    let end = device(fixture);
    let memory = HostMemory::new(4096).unwrap();
    let range = DmaBufRange { fd: std::os::fd::AsFd::as_fd(&memory), offset: 0, len: 4096 };
    let refused = end
        .context
        .register_dmabuf(&end.pd, range, None, Access::ALL, AttachMode::Static)
        .unwrap_err();
    assert_eq!(refused.kind(), &ErrorKind::Unsupported);
    assert!(refused.to_string().contains("rxe never does"), "{refused}");
    // The suggested alternative works.
    let mr = end.context.register(&end.pd, memory, Access::ALL).unwrap();
    assert_eq!((mr.path(), mr.why()), (AccessPath::Host, vec![]));
}

/// A batch is posted as a whole or not at all, whatever is pushed in between.
fn batches(fixture: &Fixture) {
    let testbed = fixture.testbed();
    let conn = testbed.join(QpOptions::default().with_send_depth(8));
    let far = fixture.host(&testbed.b, 4096);
    let write = |id, at| SendRequest::new(id, WrOp::Write(far.mr.remote(at)));
    let mut batch = conn.a.qp.batch().unwrap();
    batch.push(&write(1, 0).inline(b"never")).unwrap();
    drop(batch);
    testbed.expect_no_completion(&conn.a.sends);
    same(&far.read(0, 5), &[0; 5], "a batch that was dropped");
    let mut batch = conn.a.qp.batch().unwrap();
    {
        let text = *b"first";
        batch.push(&write(2, 0).inline(&text)).unwrap();
        let near = fixture.host(&testbed.a, 64);
        near.write(0, b"ranges");
        batch.push(&write(3, 100).with(&[near.mr.sge(0, 3), near.mr.sge(3, 3)])).unwrap();
        let refused = batch.push(&write(4, 0).inline(&[0; 5000])).unwrap_err();
        assert!(matches!(refused, PostError::InlineTooLong { len: 5000, .. }), "{refused}");
        batch.post();
        testbed.done(&conn.a.sends, 2);
        testbed.done(&conn.a.sends, 3);
    }
    same(&far.read(0, 5), b"first", "the first of a batch");
    same(&far.read(100, 6), b"ranges", "the second of a batch");
    // All requests are posted, or none.
    let requests = [write(5, 0).inline(b"x"); 200];
    let refused = conn.a.qp.post_send(&requests).unwrap_err();
    assert_eq!(refused, PostError::Full);
    testbed.expect_no_completion(&conn.a.sends);
    testbed.check_traffic(&conn);
}

/// Failed completions distinguish sends and receives where both use one CQ.
fn one_completion_queue_for_both_sides(fixture: &Fixture) {
    let testbed = fixture.testbed();
    let cq = testbed.a.context.create_cq(16).unwrap();
    let qp = testbed.a.context.create_qp(&testbed.a.pd, &cq, &cq, QpOptions::default()).unwrap();
    let peer = testbed.test_qp(&testbed.b, QpOptions::default());
    crate::verbs::fixture::connect(&qp, &peer.qp);
    qp.post_receive(&[ReceiveRequest { id: 7, data: &[] }]).unwrap();
    qp.modify(&QpAttributes::new(State::Err)).unwrap();
    qp.post_send(&[SendRequest::new(7, WrOp::Send)]).unwrap();
    let mut found: Vec<Completion> = (0..2).map(|_| testbed.next(&cq)).collect();
    found.sort_by_key(Completion::is_receive);
    assert!(found.iter().all(|done| (done.id, done.status) == (7, Status::Flushed)), "{found:?}");
    let kinds = [CompletionKind::SendFailed, CompletionKind::ReceiveFailed];
    assert_eq!(found.iter().map(|done| done.kind).collect::<Vec<_>>(), kinds);
}

//! Shared receives, events, and what outlives what.

use std::time::Duration;

use warpwire::ibv::{AsyncEvent, Op, QpOptions, ReceiveRequest, Request};

use crate::ibv::world::{World, soon};
use testkit::cases;

cases!(CASES:
    shared_receives,
    a_shared_queue_that_runs_low,
    completion_events,
    solicited_events,
    parents_outlive_children,
);

fn shared_receives() {
    let world = World::unconnected(|options| options);
    let srq = world.pd.create_srq(16, 1).unwrap();
    let with_srq =
        QpOptions { srq: Some(srq.clone()), gid_index: world.gid_index, ..QpOptions::default() };
    let plain = QpOptions { gid_index: world.gid_index, ..QpOptions::default() };
    let pair = |options: &QpOptions| {
        world.pd.create_qp(&world.b.cq, &world.b.cq, options.clone()).unwrap()
    };
    let receivers = [pair(&with_srq), pair(&with_srq)];
    let senders =
        [(); 2].map(|()| world.pd.create_qp(&world.a.cq, &world.a.cq, plain.clone()).unwrap());
    for (sender, receiver) in senders.iter().zip(&receivers) {
        sender.connect(&receiver.offer().unwrap()).unwrap();
        receiver.connect(&sender.offer().unwrap()).unwrap();
    }
    let places = [0, 1, 2, 3].map(|n| [world.b.mr.sge(n * 100, 100)]);
    let receives: Vec<_> =
        places.iter().enumerate().map(|(n, data)| ReceiveRequest { id: n as u64, data }).collect();
    srq.post_receive(&receives).unwrap();
    for (n, sender) in [0, 1, 1, 0].into_iter().enumerate() {
        let text = [n as u8 + 1; 10];
        senders[sender].post_send(&[Request::new(50, Op::Send).inline(&text)]).unwrap();
        world.a.done(50);
        let received = world.b.done(n as u64);
        assert_eq!((received.qpn, received.len), (receivers[sender].number(), 10));
        let mut bytes = [0; 10];
        world.b.memory.bytes().read(n as u64 * 100, &mut bytes).unwrap();
        assert_eq!(bytes, text);
    }
    // A queue pair with a shared queue has none of its own.
    let refused = receivers[0].post_receive(&receives).unwrap_err();
    assert!(refused.error.to_string().contains("post it there"), "{refused}");
}

fn a_shared_queue_that_runs_low() {
    let world = World::unconnected(|options| options);
    let srq = world.pd.create_srq(16, 1).unwrap();
    let options =
        QpOptions { srq: Some(srq.clone()), gid_index: world.gid_index, ..QpOptions::default() };
    let receiver = world.pd.create_qp(&world.b.cq, &world.b.cq, options).unwrap();
    world.a.qp.connect(&receiver.offer().unwrap()).unwrap();
    receiver.connect(&world.a.qp.offer().unwrap()).unwrap();
    let place = [world.b.mr.sge(0, 100)];
    let receive = ReceiveRequest { id: 1, data: &place };
    srq.post_receive(&[receive; 4]).unwrap();
    srq.arm(3).unwrap();
    while world.context.next_event().unwrap().is_some() {}
    for _ in 0..3 {
        world.a.post(Request::new(2, Op::Send).inline(b"one less"));
        world.a.done(2);
        world.b.done(1);
    }
    let start = std::time::Instant::now();
    loop {
        match world.context.next_event().unwrap() {
            Some(AsyncEvent::LimitReached { srqn: number }) => {
                break assert_eq!(number, srq.number());
            }
            Some(other) => eprintln!("also: {other:?}"),
            None => std::thread::sleep(Duration::from_millis(5)),
        }
        assert!(start.elapsed() < soon(), "no event");
    }
}

fn completion_events() {
    let world = World::new();
    let short = Duration::from_millis(50);
    assert!(!world.b.cq.wait(short).unwrap(), "nothing was asked for");
    world.b.cq.arm(false).unwrap();
    assert!(!world.b.cq.wait(short).unwrap(), "nothing came");
    world.b.receive(1, 0, 64);
    world.a.post(Request::new(2, Op::Send).inline(b"wake"));
    assert!(world.b.cq.wait(soon()).unwrap());
    world.b.done(1);
    world.a.done(2);
    // One arming, one event.
    world.works();
    while world.b.cq.wait(short).unwrap() {}
    assert!(!world.b.cq.take_event().unwrap());
}

fn solicited_events() {
    let world = World::new();
    let short = Duration::from_millis(50);
    for n in 0..2 {
        world.b.receive(n, 0, 64);
    }
    world.b.cq.arm(true).unwrap();
    world.a.post(Request::new(10, Op::Send).inline(b"do not wake"));
    world.a.done(10);
    assert!(!world.b.cq.wait(short).unwrap());
    world.a.post(Request::new(11, Op::Send).inline(b"wake").solicited());
    assert!(world.b.cq.wait(soon()).unwrap());
    world.a.done(11);
    world.b.done(0);
    world.b.done(1);
}

/// Names go away in the worst order; what is left still works, and ends well.
fn parents_outlive_children() {
    let world = World::new();
    let World { context, pd, a, b, .. } = world;
    drop(context);
    drop(pd);
    b.receive(1, 0, 64);
    a.post(Request::new(2, Op::Send).inline(b"hello"));
    a.done(2);
    b.done(1);
    let crate::ibv::world::Side { qp, cq, memory, mr } = a;
    drop(cq);
    drop(memory);
    // The registration keeps its memory, and the queue pair its completion queue.
    b.receive(3, 0, 64);
    qp.post_send(&[Request::new(4, Op::Send).with(&[mr.sge(0, 8)])]).unwrap();
    assert_eq!(b.done(3).len, 8);
    drop(mr);
    drop(qp);
}

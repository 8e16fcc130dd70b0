//! Datagrams: whom they are for, who sent them, and those that nobody takes.

use warpwire::error::Kind;
use warpwire::ibv::{CompletionKind, Op, QpOptions, Request, Route};
use warpwire_proto::qp::Service;

use crate::ibv::world::World;
use testkit::cases;

cases!(CASES: messages, wrong_keys_are_dropped, only_messages_with_an_address);

const KEY: u32 = 0x1234;
/// What stands before a datagram.
const ROUTE_LEN: u32 = 40;

fn world() -> World {
    let world = World::unconnected(|options| QpOptions { service: Service::Ud, ..options });
    world.a.qp.ready(KEY).unwrap();
    world.b.qp.ready(KEY).unwrap();
    world
}

fn route(world: &World) -> Route {
    let own = world.context.gid(1, world.gid_index.into()).unwrap();
    Route::to(own.address, 1, world.gid_index)
}

fn messages() {
    let world = world();
    let handle = world.pd.create_address_handle(&route(&world)).unwrap();
    assert_eq!(handle.route(), &route(&world));
    for (n, len) in [0_usize, 1, 100, 1024].into_iter().enumerate() {
        let n = n as u64;
        world.a.fill(0, len, n);
        let range = [world.a.mr.sge(0, len as u32)];
        let data = if len == 0 { &range[..0] } else { &range[..] };
        for (op, kind) in [
            (Op::Send, CompletionKind::Receive),
            (Op::SendImm([9, 8, 7, 6]), CompletionKind::ReceiveImm([9, 8, 7, 6])),
        ] {
            world.b.receive(1, 0, 2000);
            world.a.post(Request::new(2, op).with(data).to(&handle, world.b.qp.number(), KEY));
            world.a.done(2);
            let received = world.b.done(1);
            assert_eq!((received.kind, received.len), (kind, ROUTE_LEN + len as u32));
            assert_eq!(received.sender.map(|sender| sender.qpn), Some(world.a.qp.number()));
            world.b.check(ROUTE_LEN.into(), len, n);
        }
    }
}

fn wrong_keys_are_dropped() {
    let world = world();
    let handle = world.pd.create_address_handle(&route(&world)).unwrap();
    world.b.receive(1, 0, 2000);
    world.a.post(Request::new(2, Op::Send).inline(b"lost").to(
        &handle,
        world.b.qp.number(),
        KEY + 1,
    ));
    world.a.done(2);
    world.b.quiet();
    world.a.post(Request::new(3, Op::Send).inline(b"taken").to(&handle, world.b.qp.number(), KEY));
    world.a.done(3);
    assert_eq!(world.b.done(1).len, ROUTE_LEN + 5);
}

fn only_messages_with_an_address() {
    let (world, connected) = (world(), World::new());
    let handle = world.pd.create_address_handle(&route(&world)).unwrap();
    let foreign = connected.pd.create_address_handle(&route(&connected)).unwrap();
    let number = world.b.qp.number();
    for (side, request, says) in [
        (&world.a, Request::new(1, Op::Send), "needs an address"),
        (
            &world.a,
            Request::new(1, Op::Write(world.there(0))).to(&handle, number, KEY),
            "nothing else",
        ),
        (&world.a, Request::new(1, Op::Send).to(&foreign, number, KEY), "another context"),
        (
            &connected.a,
            Request::new(1, Op::Send).to(&foreign, number, KEY),
            "leave the address out",
        ),
    ] {
        let refused = side.qp.post_send(&[request]).unwrap_err();
        assert_eq!((refused.posted, refused.error.kind()), (0, &Kind::InvalidArgument));
        assert!(refused.to_string().contains(says), "{refused}");
    }
}

//! The family `warp` between two kernels, each served by a host of its own.

use std::net::SocketAddr;

use warpwire::sock::SockOptions;

use crate::puppet::{Do, Puppet};
use crate::world::{Stage, WARP_STREAM, World, cases, loopbacks};

cases!(one_byte_each_way, random_pieces_between_kernels);

/// Two hosts with puppets.
struct Two {
    here: Stage,
    there: Stage,
}

impl Two {
    fn new(world: &World, puppets: u64, options: SockOptions) -> Self {
        Self { here: world.stage_with(puppets, options), there: world.stage_with(puppets, options) }
    }

    fn small(world: &World, puppets: u64) -> Self {
        Self::new(world, puppets, SockOptions { sockets: 64, arena: 16 << 20, ..world.options() })
    }

    /// A connection that the puppet of the one side made and that of the other has accepted.
    fn connected(&self, at: SocketAddr) -> (u64, u64) {
        connect(self.here.first(), self.there.first(), at)
    }
}

fn connect(client: &Puppet, server: &Puppet, at: SocketAddr) -> (u64, u64) {
    let listener = server.expect(Do::Socket, &[crate::world::family(at), WARP_STREAM], None) as u64;
    server.expect(Do::Bind, &[listener], Some(at));
    server.expect(Do::Listen, &[listener, 8], None);
    let name = server.call(Do::LocalName, &[listener], None).address.unwrap();
    let socket = client.socket(at, WARP_STREAM);
    client.expect(Do::Connect, &[socket], Some(name));
    let accepted = server.expect(Do::Accept, &[listener], None) as u64;
    server.expect(Do::Close, &[listener], None);
    (socket, accepted)
}

fn one_byte_each_way(world: &World) {
    let two = Two::small(world, 1);
    let (client, server) = (two.here.first(), two.there.first());
    for at in loopbacks() {
        let (socket, accepted) = two.connected(at);
        assert_eq!(client.send(socket, b"a"), 1);
        assert_eq!(server.recv(accepted, 10).unwrap(), b"a");
        assert_eq!(server.send(accepted, b"bc"), 2);
        assert_eq!(client.recv(socket, 10).unwrap(), b"bc");
        client.expect(Do::Close, &[socket], None);
        assert_eq!(server.recv(accepted, 10).unwrap(), b"");
        server.expect(Do::Close, &[accepted], None);
    }
}

fn random_pieces_between_kernels(world: &World) {
    let two = Two::new(world, 2, SockOptions { sockets: 16, ..world.options() });
    for (number, total) in [1, 2, 100, 65_535, 65_537, 1 << 20, 16 << 20].into_iter().enumerate() {
        let (socket, accepted) = two.connected(loopbacks()[number % 2]);
        two.here.puppets[0].start(Do::StreamOut, &[socket, 11, total, 50_000], None);
        two.here.puppets[1].start(Do::StreamIn, &[socket, 12, total, 50_000], None);
        two.there.puppets[0].start(Do::StreamOut, &[accepted, 12, total, 70_000], None);
        two.there.puppets[1].start(Do::StreamIn, &[accepted, 11, total, 30_000], None);
        for puppet in two.here.puppets.iter().chain(&two.there.puppets) {
            assert_eq!(puppet.finish().result, total as i64, "or -84: a byte differs");
        }
        two.here.first().expect(Do::Close, &[socket], None);
        two.there.first().expect(Do::Close, &[accepted], None);
    }
}

//! Many concurrent queue pairs, and forged packets.

use core::time::Duration;

use warpwire_proto::qp::{State, Status, TransportOptions};
use warpwire_proto::wire::ext::{Aeth, AtomicEth, Deth, MaskedAtomicEth, Reth};
use warpwire_proto::wire::icrc::Portable;
use warpwire_proto::wire::{
    Extension, Headers, IpRepr, Opcode, Sack, Syndrome, UDP_PORT, UdpRepr, packet,
};
use warpwire_proto::{Instant, Psn};

use crate::sim::link::Faults;
use crate::sim::net::{ConnParams, Network, SimEvent, address, number};
use crate::sim::plan::{OpMix, add_work};
use crate::sim::random::Random;

fn small() -> ConnParams {
    let options = TransportOptions::default().with_send_depth(4).with_window(16);
    ConnParams { options, mtu: 256, timeout: 12, selective: [true; 2], ..ConnParams::default() }
}

fn populate(net: &mut Network, a: usize, b: usize, params: ConnParams, mix_of_ops: OpMix) {
    let conns = net.connect(a, b, params);
    for (node, conn) in [(a, conns[0]), (b, conns[1])] {
        add_work(net, (node, conn), 6, 1000, mix_of_ops);
        for _ in 0..6 {
            net.conn(node, conn).app.post_receive();
        }
    }
}

#[test]
fn two_thousand_queue_pairs_share_a_bad_link() {
    let mut net = Network::new(1, 2);
    let delay = Duration::from_micros(2);
    net.link(0, 1, Faults { loss: 10, reorder: 10, duplicate: 10, delay, ..Faults::default() });
    for _ in 0..1000 {
        populate(&mut net, 0, 1, small(), OpMix::Everything);
    }
    net.run();
    assert!(all_succeed(&net, |_, _| true));
}

#[test]
fn a_star_of_forty_nodes() {
    let mut net = Network::new(2, 40);
    for leaf in 1..40 {
        net.link(
            0,
            leaf,
            Faults { loss: 20, delay: Duration::from_micros(5), ..Faults::default() },
        );
        populate(&mut net, 0, leaf, small(), OpMix::Everything);
        populate(&mut net, leaf, 0, small(), OpMix::Atomics);
    }
    net.run();
    assert!(all_succeed(&net, |_, _| true));
}

fn all_succeed(net: &Network, which: impl Fn(usize, usize) -> bool) -> bool {
    net.nodes.iter().enumerate().all(|(node, state)| {
        state.conns.iter().enumerate().filter(|(conn, _)| which(node, *conn)).all(|(_, conn)| {
            conn.app.plan.iter().all(|planned| planned.status == Some(Status::Success))
        })
    })
}

/// Well-formed headers of a random kind with random values.
fn any_headers(random: &mut Random, destination: u32) -> Headers {
    let opcodes: Vec<_> = Opcode::all().collect();
    let opcode = random.pick(&opcodes);
    // Near the PSNs in use, so that some are accepted.
    let psn = Psn::new(random.pick(&[0x10, 0x20]) + random.below(64) as u32);
    let reth = Reth {
        address: crate::sim::node::BASE + random.below(4096),
        rkey: 0x1000 + random.below(3) as u32,
        len: random.below(3000) as u32,
    };
    let atomic = AtomicEth {
        address: reth.address,
        rkey: reth.rkey,
        swap_or_add: random.next(),
        compare: random.next(),
    };
    let masked = MaskedAtomicEth {
        address: reth.address,
        rkey: reth.rkey,
        swap: random.next(),
        compare: random.next(),
        swap_mask: random.next(),
        compare_mask: random.next(),
    };
    let syndrome = Syndrome::from_byte(random.next() as u8);
    let aeth = Aeth { syndrome, msn: random.next() as u32 & 0xff_ffff };
    let mut sack = Sack::default();
    sack.0.fill_with(|| random.next() as u8);
    let deth = Deth { qkey: random.next() as u32, source_qp: random.below(1 << 24) as u32 };
    let any = random.next() as u32;
    let extensions = [
        Extension::None,
        Extension::Imm(any),
        Extension::Reth(reth),
        Extension::RethImm(reth, any),
        Extension::Aeth(aeth),
        Extension::AethAtomic(aeth, random.next()),
        Extension::AethSack(aeth, sack),
        Extension::Atomic(atomic),
        Extension::MaskedAtomic(masked),
        Extension::Invalidate(any),
        Extension::Deth(deth),
        Extension::DethImm(deth, any),
        Extension::Cnp,
    ];
    // The extension that the opcode has: emitting any other fails.
    let mut scratch = [0; 128];
    let fits = |extension: &&Extension| {
        Headers::new(opcode, 0, psn, **extension).emit(&mut scratch, 0).is_some()
    };
    let fitting: Vec<_> = extensions.iter().filter(fits).collect();
    let extension = *random.pick(&fitting);
    let ack_request = random.chance(500);
    Headers { ack_request, ..Headers::new(opcode, destination, psn, extension) }
}

#[test]
fn forged_packets_affect_only_their_destination() {
    let mut survivors = 0;
    for seed in 0..60 {
        let mut net = Network::new(seed, 2);
        net.link(0, 1, Faults { delay: Duration::from_micros(3), ..Faults::default() });
        for _ in 0..4 {
            populate(&mut net, 0, 1, small(), OpMix::Everything);
        }
        // The victim's peer has no plan: every packet to the victim is forged.
        let victim = net.connect(0, 1, small());
        net.conn(1, victim[1]).app.post_receive();
        net.conn(1, victim[1]).app.expects_forged_packets = true;
        let mut random = Random::new(seed);
        for _ in 0..300 {
            let headers = any_headers(&mut random, number(victim[1]));
            let payload = vec![0x5a; random.pick(&[0, 1, 200, 256, 257])];
            let ip = IpRepr {
                source: address(0).into(),
                destination: address(1).into(),
                traffic_class: 0,
                hop_limit: 1,
                identification: 0,
                payload_len: 0,
            };
            let udp = UdpRepr { source_port: 1, destination_port: UDP_PORT, payload_len: 0 };
            let mut bytes = vec![0; 28 + headers.wire_len(payload.len())];
            packet::build::<Portable>(&mut bytes, ip, udp, &headers, &payload).unwrap();
            let when = Instant::from_nanos(random.below(200_000));
            net.at(when, SimEvent::PacketArrives { node: 1, bytes, marked: random.chance(10) });
        }
        net.run();
        while net.step() {}
        assert!(all_succeed(&net, |_, conn| conn != victim[0]), "seed {seed}");
        let victim = net.conn(1, victim[1]);
        survivors += u32::from(victim.qp.state() != State::Err);
        let drops: u64 = victim.qp.stats().drops.iter().sum();
        assert!(drops > 0, "forged packets were not counted");
    }
    assert!(survivors < 60, "no forged packet failed the victim");
}

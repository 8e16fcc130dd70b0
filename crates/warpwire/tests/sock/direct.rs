//! `warp` sockets whose kernels store to the peer by themselves.

use std::time::Duration;

use warpwire::hca::HcaOptions;
use warpwire::mem::MemoryKind;
use warpwire::verbs::{Access, ProgressMode};

use crate::sock::scripted::{KernelOp, ScriptedKernel};
use crate::sock::testbed::{Platform, Testbed, loopbacks, until};
use crate::sock::warp::{HostPair, RawPeer, with_bystanders};
use testkit::cases;

cases!(Testbed; CASES:
    kernels_store_into_the_peers_ring,
    counters_that_cannot_be_stored_are_posted,
);

/// Where the rings are device memory, kernels store to the peer, once its memory has been mapped.
fn kernels_store_into_the_peers_ring(testbed: &Testbed) {
    const RING: u64 = 4096;
    let options = testbed.options().with_sockets(16).with_ring(RING).with_arena(16 << 20);
    let hosts = HostPair::new(testbed, 1, options);
    let (client, server) = (hosts.here.first(), hosts.there.first());
    let stored = || hosts.here.host.stats().warp_direct;
    let carry = |from: (&ScriptedKernel, u64), to: (&ScriptedKernel, u64), bytes: &[u8]| {
        assert_eq!(from.0.send(from.1, bytes), bytes.len() as i64);
        let mut found = Vec::new();
        while found.len() < bytes.len() {
            found.extend(to.0.recv(to.1, bytes.len() - found.len()).unwrap());
        }
        assert_eq!(found, bytes);
    };
    let echo = |socket, accepted, bytes: &[u8]| {
        carry((client, socket), (server, accepted), bytes);
        carry((server, accepted), (client, socket), bytes);
    };
    let is_mapped = matches!(testbed.platform, Platform::Sim | Platform::Cuda);
    // Each connection takes over the table of the one before.
    for round in 0..4 {
        let (socket, accepted) = hosts.connected(loopbacks()[round % 2]);
        let before = stored();
        if is_mapped {
            until("kernels store", || {
                echo(socket, accepted, b"to be posted");
                stored() > before
            });
        }
        let (before, mut count) = (stored(), 0);
        // Until the ring has wrapped, at each offset modulo 16.
        for len in (1..RING).step_by(113) {
            let bytes: Vec<_> = (0..len).map(|at| (at * 7 + len) as u8).collect();
            echo(socket, accepted, &bytes);
            count += 1;
        }
        let wanted = if is_mapped { 2 * count } else { 0 };
        assert!(stored() >= before + wanted, "{} of {wanted}", stored() - before);
        client.expect(KernelOp::Close, &[socket], None);
        assert_eq!(server.recv(accepted, 10).unwrap(), b"");
        server.expect(KernelOp::Close, &[accepted], None);
    }
    assert_eq!(is_mapped, stored() > 0);
    let (here, there) = (hosts.here.host.stats(), hosts.there.host.stats());
    assert_eq!((here.warp_sent, here.misused), (there.warp_received, 0));
}

/// A peer may register its memory at an address that is aligned, whereas the memory is not.
fn counters_that_cannot_be_stored_are_posted(testbed: &Testbed) {
    const MAX_SENDS: u64 = RawPeer::RING / 8;
    let is_mapped = matches!(testbed.platform, Platform::Sim | Platform::Cuda);
    // CUDA does not open plain memory a second time in the process that has allocated it.
    let alloc = || testbed.gpu.alloc_kind(3 * RawPeer::RING, MemoryKind::Vmm).unwrap();
    let memories = [0, 4].map(|offset| (offset, alloc()));
    let hosts = HostPair::small(testbed, 1);
    let server = hosts.there.first();
    let (listener, name, _) = with_bystanders(&hosts);
    let stored = || hosts.there.host.stats().warp_direct;
    let mut limit = MAX_SENDS;
    for (offset, memory) in &memories {
        memory.write(0, &vec![0; memory.len() as usize]).unwrap();
        let progress_mode = ProgressMode::Thread { spin: Duration::ZERO, core: None };
        let options = HcaOptions::default().with_progress_mode(progress_mode);
        let _raw_peer = RawPeer::with_memory(name, options, |context, pd| {
            let region = memory.region(*offset, 2 * RawPeer::RING).unwrap();
            let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
            context.register_at(pd, region, Some(1 << 30), access).unwrap()
        });
        let victim = server.expect(KernelOp::Accept, &[listener], None) as u64;
        let (before, mut sent) = (stored(), 0);
        while sent < limit && (*offset > 0 || stored() == before) {
            assert_eq!(server.send(victim, &[7; 8]), 8, "a kernel that stores there would fail");
            sent += 1;
            std::thread::sleep(Duration::from_millis(1));
        }
        let word = |at: u64| {
            let mut word = [0; 8];
            memory.read(offset + at, &mut word).unwrap();
            u64::from_le_bytes(word)
        };
        until("all has arrived", || word(RawPeer::RING) == 8 * sent);
        assert_eq!(word(8 * (sent - 1)), u64::from_le_bytes([7; 8]));
        assert_eq!(stored() > before, is_mapped && *offset == 0, "offset {offset}");
        limit = (2 * sent).min(MAX_SENDS);
    }
}

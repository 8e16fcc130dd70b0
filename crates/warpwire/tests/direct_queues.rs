//! Direct verbs: WQEs written in ConnectX format. They go into the software HCA's queues, which
//! execute them, and into a queue pair as libmlx5 describes it (`struct mlx5dv_qp`), where the
//! bytes are compared with the WQEs that rdma-core writes.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs, unsafe_code)]

use std::sync::Arc;
use std::time::Duration;

use warpwire::ibv::{self, DirectQp};
use warpwire::link::Hub;
use warpwire::mr::HostMemory;
use warpwire::verbs::{
    Access, Atomic, Context, DirectQueues, PostError, Poster, QpOptions, Remote, SendRequest, Sge,
    WrOp,
};

const NUMBER: u32 = 0x123;
const RECORD: u64 = 0;
const SEND: u64 = 4096;
const WQEBBS: u32 = 64;
const RECEIVE: u64 = SEND + WQEBBS as u64 * 64;
const DOORBELL: u64 = RECEIVE + 4096 + 0x800;

/// `struct mlx5dv_qp` with these values at the offsets of `mlx5dv.h`.
fn image(base: u64, send: (u32, u32), size: u32) -> [u8; 96] {
    let mut image = [0; 96];
    let mut put = |at: usize, bytes: &[u8]| image[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, &(base + RECORD).to_ne_bytes());
    put(8, &(base + SEND).to_ne_bytes());
    put(16, &send.0.to_ne_bytes());
    put(20, &send.1.to_ne_bytes());
    put(24, &(base + RECEIVE).to_ne_bytes());
    put(32, &64_u32.to_ne_bytes());
    put(36, &32_u32.to_ne_bytes());
    put(40, &(base + DOORBELL).to_ne_bytes());
    put(48, &size.to_ne_bytes());
    image
}

fn recorded(memory: &HostMemory) -> DirectQp {
    let image = image(memory.address(), (WQEBBS, 64), 256);
    // SAFETY: the pointers in the image are into `memory`, which the queue pair keeps alive.
    unsafe { ibv::recorded_qp(&image, NUMBER, Arc::new(memory.clone())) }.unwrap()
}

fn bytes(memory: &HostMemory, at: u64, len: usize) -> String {
    let mut found = vec![0; len];
    memory.bytes().read(at, &mut found).unwrap();
    let words = found.chunks(4).map(|word| word.iter().map(|b| format!("{b:02x}")).collect());
    words.collect::<Vec<String>>().join(" ")
}

#[test]
fn wqes_have_the_connectx_format() {
    let memory = HostMemory::new(64 << 10).unwrap();
    let queues = DirectQueues::recorded(recorded(&memory));
    assert_eq!((queues.send_wqebbs, queues.receive_entries, queues.receive_stride), (64, 64, 32));
    let mut poster = Poster::new(queues, 5);
    let remote = |address| Remote { address, rkey: 0x1234 };
    let range = |address, len| [Sge { address, len, lkey: 0x5678 }];
    let from = range(0x7fee_0000_2000, 256);
    let write = SendRequest::new(1, WrOp::Write(remote(0x7f00_0000_1000))).with(&from);
    let into = range(0x7fee_0000_3000, 8);
    let add = WrOp::Atomic(remote(0x7f00_0000_2000), Atomic::FetchAdd { add: 7 });
    assert_eq!(poster.push(&write).unwrap(), 5);
    assert_eq!(poster.push(&SendRequest::new(2, add).with(&into)).unwrap(), 6);
    // As rdma-core writes them: a write of 256 bytes in WQEBB 5, a fetch-and-add of 7 in WQEBB 6.
    assert_eq!(
        bytes(&memory, SEND + 5 * 64, 48),
        "00000508 00012303 00000008 00000000 00007f00 00001000 00001234 00000000 \
         00000100 00005678 00007fee 00002000"
    );
    assert_eq!(
        bytes(&memory, SEND + 6 * 64, 64),
        "00000612 00012304 00000008 00000000 00007f00 00002000 00001234 00000000 \
         00000000 00000007 00000000 00000000 00000008 00005678 00007fee 00003000"
    );
    // Nothing is written before the doorbell is rung; then the producer index goes to the second
    // word of the doorbell record, and with the QP number to the doorbell register.
    assert_eq!(bytes(&memory, RECORD, 8), "00000000 00000000");
    poster.ring();
    assert_eq!(bytes(&memory, RECORD, 8), "00000000 00000007");
    assert_eq!(bytes(&memory, DOORBELL, 8), "00000700 00012300");
}

#[test]
fn a_full_queue_is_busy() {
    let memory = HostMemory::new(64 << 10).unwrap();
    let mut poster = Poster::new(DirectQueues::recorded(recorded(&memory)), 0);
    let request = SendRequest::new(1, WrOp::Nop);
    for index in 0..u64::from(WQEBBS) {
        assert_eq!(poster.push(&request).unwrap(), index);
    }
    assert_eq!(poster.push(&request), Err(PostError::Full));
    poster.free_up_to(2);
    assert_eq!(poster.push(&request).unwrap(), u64::from(WQEBBS));
    let long = poster.push(&SendRequest::new(1, WrOp::Send).inline(&[0; 2000]));
    assert!(matches!(long, Err(PostError::InlineTooLong { len: 2000, .. })), "{long:?}");
}

#[test]
fn invalid_objects_are_refused() {
    let memory = HostMemory::new(64 << 10).unwrap();
    for (send, expected) in
        [((63, 64), "63 times 64"), ((64, 32), "64 times 32"), ((0, 64), "0 times 64")]
    {
        let image = image(memory.address(), send, 256);
        // SAFETY: the pointers in the image are into `memory`, which the queue pair keeps alive.
        let refused = unsafe { ibv::recorded_qp(&image, NUMBER, Arc::new(memory.clone())) };
        let text = refused.unwrap_err().to_string();
        assert!(text.contains(expected) && text.contains("libibverbs instead"), "{text}");
    }
    // SAFETY: the image has null pointers only, and is refused.
    let refused = unsafe { ibv::recorded_cq(&[0; 48], Arc::new(())) };
    assert!(refused.unwrap_err().to_string().contains("0 times 0"));
}

/// The same poster on a device that executes the work.
#[test]
fn the_software_hca_executes_the_same_wqes() {
    let hub = Hub::new();
    let [a, b] = ["10.0.0.1:4791", "10.0.0.2:4791"]
        .map(|at| Context::open(hub.endpoint(at.parse().unwrap()).unwrap()).unwrap());
    let (pd, there) = (a.alloc_pd(), b.alloc_pd());
    let (cq, their_cq) = (a.create_cq(16).unwrap(), b.create_cq(16).unwrap());
    let qp = a.create_qp(&pd, &cq, &cq, QpOptions::default()).unwrap();
    let peer = b.create_qp(&there, &their_cq, &their_cq, QpOptions::default()).unwrap();
    qp.connect(&peer.endpoint()).unwrap();
    peer.connect(&qp.endpoint()).unwrap();
    let (from, to) = (HostMemory::new(4096).unwrap(), HostMemory::new(4096).unwrap());
    from.bytes().write(0, b"past the verbs").unwrap();
    let from = a.register(&pd, from, Access::LOCAL_WRITE).unwrap();
    let target = b.register(&there, to.clone(), Access::ALL).unwrap();
    let mut poster = Poster::new(qp.direct_queues().unwrap(), 0);
    let range = [from.sge(0, 14)];
    for turn in 0..3 {
        let write = SendRequest::new(0, WrOp::Write(target.remote(turn * 100))).with(&range);
        poster.push(&write).unwrap();
    }
    poster.ring();
    // Writing the doorbell directly does not wake an idle engine.
    a.soft().unwrap().ring(qp.number());
    for _ in 0..3 {
        assert!(cq.wait_next(Duration::from_secs(10)).unwrap().expect("completion").is_success());
    }
    let mut found = [0; 14];
    to.bytes().read(200, &mut found).unwrap();
    assert_eq!(&found, b"past the verbs");
}

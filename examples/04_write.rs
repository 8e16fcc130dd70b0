//! RDMA without RDMA hardware: one device writes into the memory of another. Here both are in one
//! process; across processes and machines it works the same way.
//!
//! ```console
//! $ cargo run --release -p examples --example 04_write
//! ```
//!
//! RDMA in five terms: *device* (a [`Context`]), *memory region* (an `Mr`: registered memory, with
//! keys), *queue pair* (one end of a connection, to which work is posted), *completion queue*
//! (which reports finished work), *work request* (write these local bytes to that remote address).
//! The peer's program does nothing while its memory is written.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use warpwire::link::{Udp, UdpOptions};
use warpwire::mem;
use warpwire::mr::HostMemory;
use warpwire::verbs::{Access, Context, QpOptions, SendRequest, WrOp};

const MESSAGE: &[u8] = b"written by a peer, into the memory of a GPU";

fn main() -> warpwire::Result<()> {
    // Two devices. Each is a software HCA that speaks RoCEv2 over a UDP socket; port 0 is any free
    // port.
    let any = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let open = || Context::open(Udp::bind(any, UdpOptions::default())?);
    let (alice, bob) = (open()?, open()?);
    println!("alice's link: {}", alice.path());

    // Bob's memory is on a GPU: a simulated one, so that this runs anywhere. "cuda:0" works too.
    let gpu = mem::open("sim:0")?;
    let target = gpu.alloc(4096)?;

    // Memory must be registered before a device accesses it. The protection domain limits which
    // queue pairs may use it; the access flags limit what the peer may do. `path` is how the device
    // accesses the memory; `why` lists why a better path is not available.
    let bob_pd = bob.alloc_pd();
    let bob_mr =
        bob.register(&bob_pd, target.whole()?, Access::LOCAL_WRITE | Access::REMOTE_WRITE)?;
    println!("bob's memory: {}, access path: {}", gpu.label(), bob_mr.path());

    // Alice writes from host memory. Reading local memory needs no access flag.
    let alice_pd = alice.alloc_pd();
    let source = HostMemory::new(4096)?;
    source.bytes().write(0, MESSAGE)?;
    let alice_mr = alice.register(&alice_pd, source, Access::NONE)?;

    // One queue pair each, with a completion queue, connected to each other. Across machines the
    // two endpoints are exchanged by any means, such as `warpwire::verbs::bootstrap`.
    let (alice_cq, bob_cq) = (alice.create_cq(16)?, bob.create_cq(16)?);
    let alice_qp = alice.create_qp(&alice_pd, &alice_cq, &alice_cq, QpOptions::default())?;
    let bob_qp = bob.create_qp(&bob_pd, &bob_cq, &bob_cq, QpOptions::default())?;
    alice_qp.connect(&bob_qp.endpoint())?;
    bob_qp.connect(&alice_qp.endpoint())?;

    // Alice needs the address and the key of Bob's memory. Bob would send these as well.
    let remote = bob_mr.remote(0);

    // The write itself. 1 is an id of our choice, which the completion repeats.
    let from = [alice_mr.sge(0, MESSAGE.len() as u32)];
    alice_qp.post_send(&[SendRequest::new(1, WrOp::Write(remote)).with(&from)])?;

    // Once the completion is there, the bytes are in Bob's memory.
    let Some(done) = alice_cq.wait_next(Duration::from_secs(5))? else {
        println!("no completion: is something dropping UDP on the loopback interface?");
        std::process::exit(1);
    };
    println!("completion {}: {:?}", done.id, done.status);

    let mut arrived = vec![0; MESSAGE.len()];
    target.read(0, &mut arrived)?;
    println!("on {}: {:?}", gpu.label(), String::from_utf8_lossy(&arrived));
    if !done.is_success() || arrived != MESSAGE {
        println!("WRONG");
        std::process::exit(1);
    }

    // A write outside the registered memory is refused: the work request fails, nothing is written.
    let out_of_range = bob_mr.remote(4096);
    alice_qp.post_send(&[SendRequest::new(2, WrOp::Write(out_of_range)).with(&from)])?;
    if let Some(done) = alice_cq.wait_next(Duration::from_secs(5))? {
        println!(
            "completion {}: {:?}, as expected: the write is outside Bob's memory",
            done.id, done.status
        );
    }
    Ok(())
}

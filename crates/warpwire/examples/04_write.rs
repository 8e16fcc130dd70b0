//! RDMA without RDMA hardware: one process's memory is written by another, here by two devices of one process.
//!
//! ```console
//! $ cargo run --release -p warpwire --example 04_write
//! ```
//!
//! RDMA in five words: *device* (a [`Context`]), *registered memory* (an `Mr`, which has keys), *queue pair* (one end of
//! a connection, to which work is posted), *completion queue* (where the end of work is told), *work request* (write
//! these bytes of mine to that address of yours). The peer's program does nothing while its memory is written.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use warpwire::link::{Udp, udp};
use warpwire::mem;
use warpwire::mr::HostMemory;
use warpwire::verbs::{Access, Context, QpOptions, SendRequest, WrOp};

const MESSAGE: &[u8] = b"written by a peer, into the memory of a GPU";

fn main() -> warpwire::Result<()> {
    // Two devices. Each is a software HCA that speaks RoCEv2 through a UDP socket; port 0 stands for any free port.
    let any = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let open = || Context::open(Udp::bind(any, udp::Options::default())?);
    let (alice, bob) = (open()?, open()?);
    println!("alice's link: {}", alice.path());

    // Bob has memory on a GPU: a simulated one, so that this runs anywhere. "cuda:0" works as well.
    let gpu = mem::open("sim:0")?;
    let target = gpu.alloc(4096)?;

    // Memory must be registered before a device touches it. A protection domain says which queue pairs may use it;
    // the access flags say what the peer may do. The registration tells how the device reaches the memory, and why.
    let bob_pd = bob.pd();
    let bob_mr =
        bob.register(&bob_pd, target.whole()?, Access::LOCAL_WRITE | Access::REMOTE_WRITE)?;
    println!("bob's memory: {} by {}", gpu.label(), bob_mr.path());

    // Alice writes from ordinary memory. Reading one's own memory needs no right.
    let alice_pd = alice.pd();
    let source = HostMemory::new(4096)?;
    source.bytes().write(0, MESSAGE)?;
    let alice_mr = alice.register(&alice_pd, source, Access::NONE)?;

    // A queue pair each, with completion queues, connected to each other. Across machines the two offers travel by
    // any means, such as `warpwire::verbs::exchange`.
    let (alice_cq, bob_cq) = (alice.create_cq(16)?, bob.create_cq(16)?);
    let alice_qp = alice.create_qp(&alice_pd, &alice_cq, &alice_cq, QpOptions::default())?;
    let bob_qp = bob.create_qp(&bob_pd, &bob_cq, &bob_cq, QpOptions::default())?;
    alice_qp.connect(&bob_qp.endpoint())?;
    bob_qp.connect(&alice_qp.endpoint())?;

    // What Alice must know of Bob's memory: an address and a key. This, too, Bob would send her.
    let remote = bob_mr.remote(0);

    // The write itself. 1 is a number of our own: the completion bears it.
    let from = [alice_mr.sge(0, MESSAGE.len() as u32)];
    alice_qp.post_send(&[SendRequest::new(1, WrOp::Write(remote)).with(&from)])?;

    // It has ended when its completion is there: then the bytes are in Bob's memory.
    let Some(done) = alice_cq.next(Duration::from_secs(5))? else {
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

    // A peer that reaches too far is refused: its work fails, and nothing is written.
    let out_of_range = bob_mr.remote(4096);
    alice_qp.post_send(&[SendRequest::new(2, WrOp::Write(out_of_range)).with(&from)])?;
    if let Some(done) = alice_cq.next(Duration::from_secs(5))? {
        println!(
            "completion {}: {:?}, as it should be: that is beyond Bob's memory",
            done.id, done.status
        );
    }
    Ok(())
}

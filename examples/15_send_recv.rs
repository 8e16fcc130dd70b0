//! Two processes and a message each way: send and receive by verbs, over a reliable connection.
//!
//! ```console
//! $ cargo run -p examples --example 15_send_recv              # starts itself as the other process
//! ```
//!
//! On two machines, or in two terminals:
//!
//! ```console
//! one$ 15_send_recv listen 0.0.0.0:18515
//! two$ 15_send_recv connect ONE:18515
//! ```
//!
//! The two meet over TCP, where each tells the other its queue pair; the messages then travel by
//! shared memory on one machine, and as RoCEv2 packets over UDP between machines.

use std::error::Error;
use std::net::{SocketAddr, TcpListener};
use std::process::{Command, ExitCode};
use std::time::Duration;

use warpwire::link::{Auto, ShmOptions, UdpOptions};
use warpwire::mr::HostMemory;
use warpwire::verbs::bootstrap::Bootstrap;
use warpwire::verbs::{Access, Context, Cq, Mr, Qp, QpEndpoint, QpOptions};
use warpwire::verbs::{Completion, ReceiveRequest, SendRequest, WrOp};

const TIMEOUT: Duration = Duration::from_secs(30);
/// Memory for one message; each end has two, one to receive into and one to send from.
const MESSAGE: u32 = 2048;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let result = match arguments[..] {
        [] => both(),
        ["listen", address] => TcpListener::bind(address).map_err(Into::into).and_then(listen),
        ["connect", address] => connect(address),
        _ => Err("usage: 15_send_recv [listen ADDRESS:PORT | connect HOST:PORT]".into()),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("error: {why}");
            ExitCode::FAILURE
        }
    }
}

/// Both ends on this machine: this process listens, another one of the same program connects.
fn both() -> Result<(), Box<dyn Error>> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let address = listener.local_addr()?.to_string();
    let mut other = Command::new(std::env::current_exe()?).args(["connect", &address]).spawn()?;
    listen(listener)?;
    match other.wait()? {
        status if status.success() => Ok(()),
        status => Err(format!("the other process failed: {status}").into()),
    }
}

fn listen(listener: TcpListener) -> Result<(), Box<dyn Error>> {
    let mut bootstrap = Bootstrap::accept(&listener, TIMEOUT)?;
    let end = End::open(&mut bootstrap)?;
    let question = end.receive()?;
    println!("listener:  received {question:?}");
    end.send("and hello to you")?;
    goodbye(bootstrap)
}

fn connect(address: &str) -> Result<(), Box<dyn Error>> {
    let mut bootstrap = Bootstrap::connect(address, TIMEOUT)?;
    let end = End::open(&mut bootstrap)?;
    println!("connector: connected by {}", end.qp.path()?.kind);
    end.send("hello")?;
    let answer = end.receive()?;
    println!("connector: received {answer:?}");
    goodbye(bootstrap)
}

/// Neither end closes its queue pair before the other has all that it waits for.
fn goodbye(mut bootstrap: Bootstrap) -> Result<(), Box<dyn Error>> {
    bootstrap.swap(&String::from("done"))?;
    Ok(())
}

/// One end of the connection.
struct End {
    qp: Qp,
    /// Completions of sends and of receives: they come in any order relative to each other.
    sends: Cq,
    receives: Cq,
    mr: Mr,
    memory: HostMemory,
}

impl End {
    fn open(bootstrap: &mut Bootstrap) -> warpwire::Result<Self> {
        // A software HCA at the address by which the peer reaches this machine. (With an RDMA
        // device: `Context::open_device("mlx5_0")`; everything below stays the same.)
        let address = SocketAddr::new(bootstrap.local()?.ip(), 0);
        let context =
            Context::open(Auto::bind(address, UdpOptions::default(), ShmOptions::default())?)?;

        // Memory must be registered before a device accesses it.
        let pd = context.alloc_pd();
        let memory = HostMemory::new(2 * u64::from(MESSAGE))?;
        let mr = context.register(&pd, memory.clone(), Access::LOCAL_WRITE)?;

        // Each end tells the other its queue pair: address, number, first sequence number.
        let (sends, receives) = (context.create_cq(16)?, context.create_cq(16)?);
        let qp = context.create_qp(&pd, &sends, &receives, QpOptions::default())?;
        let peer: QpEndpoint = bootstrap.swap(&qp.endpoint())?;
        qp.connect(&peer)?;

        // A message needs a receive that was posted for it. One that comes earlier waits at its
        // sender (receiver not ready), so it is not lost.
        qp.post_receive(&[ReceiveRequest { id: 1, data: &[mr.sge(0, MESSAGE)] }])?;
        Ok(Self { qp, sends, receives, mr, memory })
    }

    /// Sends a message, and waits until it is in the peer's memory.
    fn send(&self, text: &str) -> Result<(), Box<dyn Error>> {
        self.memory.bytes().write(u64::from(MESSAGE), text.as_bytes())?;
        let data = [self.mr.sge(u64::from(MESSAGE), u32::try_from(text.len())?)];
        self.qp.post_send(&[SendRequest::new(2, WrOp::Send).with(&data)])?;
        completion(&self.sends)?;
        Ok(())
    }

    /// Waits for the message of the receive that was posted.
    fn receive(&self) -> Result<String, Box<dyn Error>> {
        let received = completion(&self.receives)?;
        let mut text = vec![0; received.len as usize];
        self.memory.bytes().read(0, &mut text)?;
        Ok(String::from_utf8(text)?)
    }
}

/// The next completion, which must be a success.
fn completion(cq: &Cq) -> Result<Completion, Box<dyn Error>> {
    match cq.wait_next(TIMEOUT)? {
        Some(done) if done.is_success() => Ok(done),
        Some(done) => Err(format!("work {} ended with {:?}", done.id, done.status).into()),
        None => Err(format!("no completion within {TIMEOUT:?}").into()),
    }
}

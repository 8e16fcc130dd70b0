//! A program that was written for GPUnet, unchanged but for its include: `echo_client.cu`. The host says where its sockets are.
#![allow(unsafe_code)] // launching is unsafe, and so is calling the header's code; each use says why it is right

use std::io::{Read, Write};
use std::net::SocketAddr;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use rustix::io::Errno;
use warpwire::error;
use warpwire::mem::sim::{Block, Fault};
use warpwire::mem::{Allocation, DeviceAddr, Kernel, Launch, Module, Program, Stream};
use warpwire::sock::device::{self, Failure, Kind, Sockets};
use warpwire::sock::{SockHost, SockOptions};

use crate::ptx;
use crate::sock::peer::{Family, Peer};
use crate::sock::puppet::{Do, GPUNET, soon};
use crate::sock::world::{Deserted, STREAM, Way, World, errno, loopbacks, symbol, udp, until};
use testkit::cases;

cases!(World; CASES:
    a_client_written_for_gpunet,
    its_server_resets_and_closes,
    a_program_must_be_one_for_gpunet,
    its_datagrams_are_udps,
);

/// Whose PTX CUDA loads.
pub const PTX: &str = "sock/echo_client";
/// `MESSAGE_SIZE` there.
const MESSAGE: usize = 6000;
/// The kernel's name, as the compiler makes it: nothing in the program says that it is C's.
const KERNEL: &str = "_Z11echo_clientP11sockaddr_inP7Outcomei";

/// All threads of the process share the program's one table.
static ALONE: Mutex<()> = Mutex::new(());

/// The program, loaded.
struct Client {
    host: SockHost,
    way: Option<(Kernel, Stream)>,
    kind: Kind,
    server: Allocation,
    outcome: Allocation,
}

fn kind(world: &World) -> Kind {
    match world.family {
        Family::Inet => Kind::Stream,
        Family::Warp => Kind::WarpStream,
    }
}

fn load(world: &World, table: u64, kind: Kind) -> Module {
    let program = Program::new("echo client")
        .block(KERNEL, move |block| echo_client_block(block, table, kind));
    ptx::load(&world.gpu, PTX, program).unwrap()
}

impl Client {
    fn new(world: &World) -> Self {
        let options = SockOptions { sockets: 8, arena: 1 << 20, ..world.options() };
        let host = SockHost::start(&world.gpu, options).unwrap();
        let kind = kind(world);
        let way = (world.way != Way::Threads).then(|| {
            let module = load(world, host.table(), kind);
            if matches!(world.way, Way::Cuda | Way::CudaPinned) {
                host.use_gpunet(&module, kind).unwrap();
            }
            (module.kernel(KERNEL).unwrap(), world.gpu.stream().unwrap())
        });
        let memory = |len| world.gpu.alloc_pinned(len).unwrap();
        Self { host, way, kind, server: memory(16), outcome: memory(8) }
    }

    /// Runs it while `meanwhile` does, and tells how many messages came back right, and what ended it.
    fn run(&self, to: SocketAddr, messages: u64, meanwhile: impl FnOnce()) -> (i32, i64) {
        self.server.write(0, &sockaddr_in(to)).unwrap();
        self.outcome.write(0, &[0; 8]).unwrap();
        match &self.way {
            None => self.run_on_a_thread(messages, meanwhile),
            Some((kernel, stream)) => {
                let launch = Launch::new(kernel)
                    .threads(96)
                    .region(&self.server.whole().unwrap())
                    .region(&self.outcome.whole().unwrap())
                    .value(messages);
                // SAFETY: the kernel uses what it is given, which the launch keeps, and the sockets' memory, which the
                // client keeps until the kernel has ended.
                unsafe { stream.launch(launch) }.unwrap();
                meanwhile();
                stream.synchronize(soon()).unwrap();
            }
        }
        let mut outcome = [0; 8];
        self.outcome.read(0, &mut outcome).unwrap();
        let word = |at: usize| i32::from_le_bytes(outcome[at..at + 4].try_into().unwrap());
        (word(0), i64::from(word(4)))
    }

    fn run_on_a_thread(&self, messages: u64, meanwhile: impl FnOnce()) {
        // SAFETY: the library was built from echo_client_threads.cpp, where the function has this type.
        let run = unsafe {
            symbol::<unsafe extern "C" fn(u64, u64, u64, u64, u64)>(b"echo_client_thread\0")
        };
        let (table, kind) = (self.host.table(), self.kind as u64);
        let address = |memory: &Allocation| memory.host_bytes().unwrap().address();
        let (server, outcome) = (address(&self.server), address(&self.outcome));
        std::thread::scope(|scope| {
            // SAFETY: the sockets, the address and the place for the outcome live until the thread has ended.
            scope.spawn(move || unsafe { run(table, kind, server, outcome, messages) });
            meanwhile();
        });
    }

    fn all_is_given_back(&self) {
        until("its socket is free again", || self.host.stats().open == 0);
    }
}

/// An address of IPv4 as C has it.
fn sockaddr_in(address: SocketAddr) -> [u8; 16] {
    let SocketAddr::V4(address) = address else { panic!("GPUnet's addresses are of IPv4") };
    let mut bytes = [0; 16];
    bytes[..2].copy_from_slice(&2_u16.to_le_bytes());
    bytes[2..4].copy_from_slice(&address.port().to_be_bytes());
    bytes[4..8].copy_from_slice(&address.ip().octets());
    bytes
}

/// The same client for the simulated GPU.
fn echo_client_block(block: &Block<'_>, table: u64, kind: Kind) -> Result<(), Fault> {
    let sockets = Sockets::open(block, DeviceAddr::new(table))?;
    let (mut address, outcome) = ([0; 16], block.address(1)?);
    block.read(block.address(0)?, &mut address)?;
    let [_, _, high, low, a, b, c, d, ..] = address;
    let to = SocketAddr::from(([a, b, c, d], u16::from_be_bytes([high, low])));
    let sock = loop {
        let sock = sockets.socket(device::Family::V4, kind)?;
        match sockets.connect(sock, to) {
            Ok(()) => break sock,
            Err(Failure::Fault(fault)) => return Err(fault),
            Err(Failure::Errno(_)) => sockets.close(sock)?,
        }
    };
    let mut echoed = 0_u32;
    let mut talk = || {
        for number in 0..block.value(2)? {
            let sent: Vec<u8> = (0..MESSAGE).map(|i| (i * 7 + number as usize) as u8).collect();
            let mut came = vec![0; MESSAGE];
            sockets.send(sock, &sent)?;
            if sockets.recv_all(sock, &mut came)? < MESSAGE {
                // Too little is the end, or what came before an error.
                sockets.recv(sock, &mut came)?;
                break;
            }
            echoed += u32::from(came == sent);
        }
        Ok::<_, Failure>(())
    };
    let error = match talk() {
        Ok(()) => 0,
        Err(Failure::Errno(errno)) => errno.raw_os_error(),
        Err(Failure::Fault(fault)) => return Err(fault),
    };
    block.write(outcome, &echoed.to_le_bytes())?;
    block.write(DeviceAddr::new(outcome.raw() + 4), &(-error).to_le_bytes())?;
    Ok(sockets.close(sock)?)
}

/// Sends everything back until the end.
fn echo(mut peer: Peer) -> usize {
    let (mut bytes, mut total) = (vec![0; 10_000], 0);
    loop {
        let count = peer.read(&mut bytes).unwrap();
        if count == 0 {
            return total;
        }
        peer.write_all(&bytes[..count]).unwrap();
        total += count;
    }
}

/// Sends one message back, and takes half of the next.
fn echo_one_and_a_half(peer: &mut Peer) {
    let mut bytes = vec![0; MESSAGE];
    peer.read_exact(&mut bytes).unwrap();
    peer.write_all(&bytes).unwrap();
    peer.read_exact(&mut bytes[..MESSAGE / 2]).unwrap();
}

fn a_client_written_for_gpunet(world: &World) {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let client = Client::new(world);
    // It tries until somebody listens.
    let deserted = Deserted::at(([127, 0, 0, 1], 0).into());
    let at = deserted.name;
    let outcome = client.run(at, 40, || {
        until("it was refused", || client.host.stats().requests > 6);
        drop(deserted);
        let server = world.family.serve(at);
        assert_eq!(echo(server.accept()), 40 * MESSAGE);
    });
    assert_eq!(outcome, (40, 0));
    assert_eq!(client.host.stats().connected, 1);
    client.all_is_given_back();
}

fn its_server_resets_and_closes(world: &World) {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let client = Client::new(world);
    let server = world.family.serve(SocketAddr::from(([127, 0, 0, 1], 0)));
    let outcome = client.run(server.local_addr(), 40, || {
        let mut peer = server.accept();
        echo_one_and_a_half(&mut peer);
        peer.reset();
    });
    assert_eq!(outcome, (1, errno(Errno::CONNRESET)));
    client.all_is_given_back();
    // An end in good order is no error.
    let outcome = client.run(server.local_addr(), 40, || {
        let mut peer = server.accept();
        echo_one_and_a_half(&mut peer);
        peer.read_exact(&mut [0; MESSAGE / 2]).unwrap();
        std::thread::sleep(Duration::from_millis(5));
        drop(peer);
    });
    assert_eq!(outcome, (1, 0));
    client.all_is_given_back();
}

fn a_program_must_be_one_for_gpunet(world: &World) {
    if world.way == Way::Threads {
        return; // no host sets variables there
    }
    let client = Client::new(world);
    let module = load(world, client.host.table(), client.kind);
    let error = client.host.use_gpunet(&module, Kind::Datagram).unwrap_err();
    assert!(error.to_string().contains("Kind::WarpStream"), "{error}");
    let other = Program::new("other")
        .ptx(".version 8.2\n.target sm_70\n.address_size 64\n.visible .entry k(){ret;}\n")
        .block("k", |_| Ok(()));
    let error = client.host.use_gpunet(&world.gpu.load(&other).unwrap(), client.kind).unwrap_err();
    match world.way {
        Way::Sim | Way::SimPinned => assert_eq!(error.kind(), &error::Kind::Unsupported, "{error}"),
        _ => assert!(error.to_string().contains("gpunet.cuh"), "{error}"),
    }
}

/// Whatever its streams are.
fn its_datagrams_are_udps(world: &World) {
    const SIZE: usize = 6000;
    let _alone = GPUNET.lock().unwrap_or_else(PoisonError::into_inner);
    let stage = world.stage(1);
    let puppet = stage.first();
    let peer = udp(loopbacks()[0]);
    let name = peer.local_addr().unwrap();
    let kind = puppet.kind(STREAM);
    puppet.start(Do::GpunetDatagrams, &[kind, 10, SIZE as u64], Some(name));
    for _ in 0..10 {
        let mut bytes = [0; SIZE + 1];
        let (count, from) = peer.recv_from(&mut bytes).unwrap();
        peer.send_to(&bytes[..count], from).unwrap();
    }
    assert_eq!(puppet.finish().result, 10 * SIZE as i64, "or -84: a byte differs");
    let long = puppet.call(Do::GpunetDatagrams, &[kind, 1, 65_508], Some(name)).result;
    assert_eq!(long, errno(Errno::MSGSIZE));
    until("its sockets are free again", || stage.host.stats().open == 0);
}

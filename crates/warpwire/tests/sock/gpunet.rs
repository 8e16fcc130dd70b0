//! A program written for GPUnet, unchanged except for its include: `echo_client.cu`. The host sets
//! the address of the sockets.
#![allow(unsafe_code)] // launches and calls of the header's code, each with a SAFETY comment

use std::io::{Read, Write};
use std::net::SocketAddr;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use rustix::io::Errno;
use warpwire::error;
use warpwire::mem::sim::{Block, KernelFault};
use warpwire::mem::{Allocation, DeviceAddr, Kernel, Launch, Module, Program, Stream};
use warpwire::sock::SockHost;
use warpwire::sock::device::{self, SockError, SocketKind, Sockets};

use crate::ptx;
use crate::sock::peer::{Family, Peer};
use crate::sock::scripted::{GPUNET, KernelOp, test_timeout};
use crate::sock::testbed::{
    ClosedPort, Platform, STREAM, Testbed, errno, loopbacks, symbol, udp, until,
};
use testkit::cases;

cases!(Testbed; CASES:
    a_client_written_for_gpunet,
    its_server_resets_and_closes,
    a_program_must_be_one_for_gpunet,
    its_datagrams_are_udps,
);

/// The PTX that CUDA loads.
pub const PTX: &str = "sock/echo_client";
/// `MESSAGE_SIZE` of echo_client.cu.
const MESSAGE: usize = 6000;
/// The kernel's mangled name: the program does not declare it `extern "C"`.
const KERNEL: &str = "_Z11echo_clientP11sockaddr_inP7Outcomei";

/// All threads of the process share the program's one table.
static ALONE: Mutex<()> = Mutex::new(());

/// The loaded program.
struct Client {
    host: SockHost,
    platform: Option<(Kernel, Stream)>,
    kind: SocketKind,
    server: Allocation,
    outcome: Allocation,
}

fn kind(testbed: &Testbed) -> SocketKind {
    match testbed.family {
        Family::Inet => SocketKind::Stream,
        Family::Warp => SocketKind::WarpStream,
    }
}

fn load(testbed: &Testbed, table: u64, kind: SocketKind) -> Module {
    let program = Program::new("echo client")
        .block(KERNEL, move |block| echo_client_block(block, table, kind));
    ptx::load(&testbed.gpu, PTX, program).unwrap()
}

impl Client {
    fn new(testbed: &Testbed) -> Self {
        let options = testbed.options().with_sockets(8).with_arena(1 << 20);
        let host = SockHost::start(&testbed.gpu, options).unwrap();
        let kind = kind(testbed);
        let platform = (testbed.platform != Platform::Threads).then(|| {
            let module = load(testbed, host.table(), kind);
            if matches!(testbed.platform, Platform::Cuda | Platform::CudaPinned) {
                host.use_gpunet(&module, kind).unwrap();
            }
            (module.kernel(KERNEL).unwrap(), testbed.gpu.stream().unwrap())
        });
        let memory = |len| testbed.gpu.alloc_pinned(len).unwrap();
        Self { host, platform, kind, server: memory(16), outcome: memory(8) }
    }

    /// Runs it together with `meanwhile`; returns the number of messages echoed correctly, and the
    /// errno that ended it, or 0.
    fn run(&self, to: SocketAddr, messages: u64, meanwhile: impl FnOnce()) -> (i32, i64) {
        self.server.write(0, &sockaddr_in(to)).unwrap();
        self.outcome.write(0, &[0; 8]).unwrap();
        match &self.platform {
            None => self.run_on_a_thread(messages, meanwhile),
            Some((kernel, stream)) => {
                let launch = Launch::new(kernel)
                    .threads(96)
                    .region(&self.server.whole().unwrap())
                    .region(&self.outcome.whole().unwrap())
                    .value(messages);
                // SAFETY: the kernel uses its arguments, which the launch keeps alive, and the
                // sockets' memory, which the client keeps alive until the kernel has ended.
                unsafe { stream.launch(launch) }.unwrap();
                meanwhile();
                stream.synchronize(test_timeout()).unwrap();
            }
        }
        let mut outcome = [0; 8];
        self.outcome.read(0, &mut outcome).unwrap();
        let word = |at: usize| i32::from_le_bytes(outcome[at..at + 4].try_into().unwrap());
        (word(0), i64::from(word(4)))
    }

    fn run_on_a_thread(&self, messages: u64, meanwhile: impl FnOnce()) {
        // SAFETY: the library was built from echo_client_threads.cpp, where the function has this
        // type.
        let run = unsafe {
            symbol::<unsafe extern "C" fn(u64, u64, u64, u64, u64)>(b"echo_client_thread\0")
        };
        let (table, kind) = (self.host.table(), self.kind as u64);
        let address = |memory: &Allocation| memory.host_bytes().unwrap().address();
        let (server, outcome) = (address(&self.server), address(&self.outcome));
        std::thread::scope(|scope| {
            // SAFETY: the sockets, the address and the outcome live until the thread has ended.
            scope.spawn(move || unsafe { run(table, kind, server, outcome, messages) });
            meanwhile();
        });
    }

    fn check_all_released(&self) {
        until("its socket is closed", || self.host.stats().open == 0);
    }
}

/// An IPv4 address as C's `sockaddr_in`.
fn sockaddr_in(address: SocketAddr) -> [u8; 16] {
    let SocketAddr::V4(address) = address else { panic!("GPUnet supports IPv4 only") };
    let mut bytes = [0; 16];
    bytes[..2].copy_from_slice(&2_u16.to_le_bytes());
    bytes[2..4].copy_from_slice(&address.port().to_be_bytes());
    bytes[4..8].copy_from_slice(&address.ip().octets());
    bytes
}

/// The same client as a block function of the simulated GPU.
fn echo_client_block(block: &Block<'_>, table: u64, kind: SocketKind) -> Result<(), KernelFault> {
    let sockets = Sockets::open(block, DeviceAddr::new(table))?;
    let (mut address, outcome) = ([0; 16], block.address(1)?);
    block.read(block.address(0)?, &mut address)?;
    let [_, _, high, low, a, b, c, d, ..] = address;
    let to = SocketAddr::from(([a, b, c, d], u16::from_be_bytes([high, low])));
    let sock = loop {
        let sock = sockets.socket(device::Family::V4, kind)?;
        match sockets.connect(sock, to) {
            Ok(()) => break sock,
            Err(SockError::KernelFault(fault)) => return Err(fault),
            Err(SockError::Errno(_)) => sockets.close(sock)?,
        }
    };
    let mut echoed = 0_u32;
    let mut talk = || {
        for number in 0..block.value(2)? {
            let sent: Vec<u8> = (0..MESSAGE).map(|i| (i * 7 + number as usize) as u8).collect();
            let mut came = vec![0; MESSAGE];
            sockets.send(sock, &sent)?;
            if sockets.recv_all(sock, &mut came)? < MESSAGE {
                // A short count is the end of the stream, or what arrived before an error.
                sockets.recv(sock, &mut came)?;
                break;
            }
            echoed += u32::from(came == sent);
        }
        Ok::<_, SockError>(())
    };
    let error = match talk() {
        Ok(()) => 0,
        Err(SockError::Errno(errno)) => errno.raw_os_error(),
        Err(SockError::KernelFault(fault)) => return Err(fault),
    };
    block.write(outcome, &echoed.to_le_bytes())?;
    block.write(DeviceAddr::new(outcome.raw() + 4), &(-error).to_le_bytes())?;
    Ok(sockets.close(sock)?)
}

/// Echoes until the end of the stream.
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

/// Echoes one message, and reads half of the next.
fn echo_one_and_a_half(peer: &mut Peer) {
    let mut bytes = vec![0; MESSAGE];
    peer.read_exact(&mut bytes).unwrap();
    peer.write_all(&bytes).unwrap();
    peer.read_exact(&mut bytes[..MESSAGE / 2]).unwrap();
}

fn a_client_written_for_gpunet(testbed: &Testbed) {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let client = Client::new(testbed);
    // It retries until the server listens.
    let closed_port = ClosedPort::at(([127, 0, 0, 1], 0).into());
    let at = closed_port.name;
    let outcome = client.run(at, 40, || {
        until("it was refused", || client.host.stats().requests > 6);
        drop(closed_port);
        let server = testbed.family.serve(at);
        assert_eq!(echo(server.accept()), 40 * MESSAGE);
    });
    assert_eq!(outcome, (40, 0));
    assert_eq!(client.host.stats().connected, 1);
    client.check_all_released();
}

fn its_server_resets_and_closes(testbed: &Testbed) {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let client = Client::new(testbed);
    let server = testbed.family.serve(SocketAddr::from(([127, 0, 0, 1], 0)));
    let outcome = client.run(server.local_addr(), 40, || {
        let mut peer = server.accept();
        echo_one_and_a_half(&mut peer);
        peer.reset();
    });
    assert_eq!(outcome, (1, errno(Errno::CONNRESET)));
    client.check_all_released();
    // An orderly end is no error.
    let outcome = client.run(server.local_addr(), 40, || {
        let mut peer = server.accept();
        echo_one_and_a_half(&mut peer);
        peer.read_exact(&mut [0; MESSAGE / 2]).unwrap();
        std::thread::sleep(Duration::from_millis(5));
        drop(peer);
    });
    assert_eq!(outcome, (1, 0));
    client.check_all_released();
}

fn a_program_must_be_one_for_gpunet(testbed: &Testbed) {
    if testbed.platform == Platform::Threads {
        return; // the host cannot set variables there
    }
    let client = Client::new(testbed);
    let module = load(testbed, client.host.table(), client.kind);
    let error = client.host.use_gpunet(&module, SocketKind::Datagram).unwrap_err();
    assert!(error.to_string().contains("SocketKind::WarpStream"), "{error}");
    let other = Program::new("other")
        .ptx(".version 8.2\n.target sm_70\n.address_size 64\n.visible .entry k(){ret;}\n")
        .block("k", |_| Ok(()));
    let error =
        client.host.use_gpunet(&testbed.gpu.load(&other).unwrap(), client.kind).unwrap_err();
    match testbed.platform {
        Platform::Sim | Platform::SimPinned => {
            assert_eq!(error.kind(), &error::Kind::Unsupported, "{error}")
        }
        _ => assert!(error.to_string().contains("gpunet.cuh"), "{error}"),
    }
}

/// Whatever kind its streams have.
fn its_datagrams_are_udps(testbed: &Testbed) {
    const SIZE: usize = 6000;
    let _alone = GPUNET.lock().unwrap_or_else(PoisonError::into_inner);
    let harness = testbed.harness(1);
    let scripted = harness.first();
    let peer = udp(loopbacks()[0]);
    let name = peer.local_addr().unwrap();
    let kind = scripted.kind(STREAM);
    scripted.start(KernelOp::GpunetDatagrams, &[kind, 10, SIZE as u64], Some(name));
    for _ in 0..10 {
        let mut bytes = [0; SIZE + 1];
        let (count, from) = peer.recv_from(&mut bytes).unwrap();
        peer.send_to(&bytes[..count], from).unwrap();
    }
    assert_eq!(scripted.finish().result, 10 * SIZE as i64, "or -84: a byte differs");
    let long = scripted.call(KernelOp::GpunetDatagrams, &[kind, 1, 65_508], Some(name)).result;
    assert_eq!(long, errno(Errno::MSGSIZE));
    until("its sockets are closed", || harness.host.stats().open == 0);
}

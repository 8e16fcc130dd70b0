//! Shared state of CPU programs' sockets: devices by address, and the service thread.

use std::io;
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::connection::{Connection, LocalResources, io_error};
use super::devices::DevicesByAddress;
use super::handshake::{Handshake, Hello, MAX_RING, MIN_RING};
use super::listener::WarpListener;
use super::service::{Command, CommandQueue, Service};
use super::stream::WarpStream;
use crate::error::{Error, Kind, Result};
use crate::link::{Auto, ShmOptions, UdpOptions};
use crate::verbs::{Context, EventFd};

/// Sizes, limits and timeouts of the sockets of a [`Net`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct NetOptions {
    /// Size of a receive ring in bytes: a power of two from 4096 to 1 GiB. Default 256 KiB.
    pub ring: u64,
    /// Size of the send buffer in bytes, whose bytes are in flight: a power of two from 4096 to 1
    /// GiB. Default 256 KiB.
    pub send_buffer: u64,
    /// Time limit of a handshake. Default 10 s.
    pub handshake_timeout: Duration,
    /// Maximum number of established connections that wait for `accept`, per listener. Default
    /// 1024.
    pub backlog: usize,
    /// Maximum number of handshakes in progress; one more evicts the oldest, if that is older than
    /// 100 ms. Default 256.
    pub max_handshakes: usize,
}

setters! {
    NetOptions {
        with_ring => ring: u64,
        with_send_buffer => send_buffer: u64,
        with_handshake_timeout => handshake_timeout: Duration,
        with_backlog => backlog: usize,
        with_max_handshakes => max_handshakes: usize,
    }
}

impl Default for NetOptions {
    fn default() -> Self {
        Self {
            ring: 256 << 10,
            send_buffer: 256 << 10,
            handshake_timeout: Duration::from_secs(10),
            backlog: 1024,
            max_handshakes: 256,
        }
    }
}

impl NetOptions {
    fn check(&self) -> Result<()> {
        let wrong = |why: String, fix: &'static str| {
            Err(Error::new(Kind::InvalidArgument, "use warp sockets").why(why).fix(fix))
        };
        for size in [self.ring, self.send_buffer] {
            if !size.is_power_of_two() || !(MIN_RING..=MAX_RING).contains(&size) {
                let why = format!("a ring of {size} bytes was requested");
                return wrong(why, "choose a power of two from 4096 to 1 GiB");
            }
        }
        if self.backlog == 0 || self.max_handshakes == 0 || self.handshake_timeout.is_zero() {
            let why = format!("{self:?} admits no connection");
            return wrong(why, "use a backlog, max_handshakes and timeout above 0");
        }
        Ok(())
    }
}

/// The context of this process's `warp` sockets: an RDMA device, or one per local address, and a
/// thread that polls for sleeping callers. Clones share it.
///
/// ```
/// use std::io::{Read, Write};
/// use warpwire::link::{Udp, UdpOptions};
/// use warpwire::sock::warp::{Net, NetOptions};
/// use warpwire::verbs::Context;
/// let link = Udp::bind("127.0.0.1:0".parse().unwrap(), UdpOptions::default())?;
/// let context = Context::open(link)?;
/// let net = Net::over(&context, NetOptions::default())?;
/// let listener = net.listen("127.0.0.1:0")?;
/// let mut client = net.connect(listener.local_addr()?)?;
/// client.write_all(b"hello")?;
/// drop(client);
/// let mut text = String::new();
/// listener.accept()?.0.read_to_string(&mut text)?;
/// assert_eq!(text, "hello");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct Net(pub(super) Arc<Inner>);

/// Stops the service thread when the last socket is dropped.
pub(super) struct Inner {
    command_queue: Arc<CommandQueue>,
    devices: Devices,
    pub(super) options: NetOptions,
    next: AtomicU64,
}

enum Devices {
    One(Context),
    ByAddress(Mutex<DevicesByAddress<IpAddr>>),
}

impl Net {
    /// Sockets over this device, which may be hardware. Both ends must reach each other through it.
    pub fn over(context: &Context, options: NetOptions) -> Result<Self> {
        Self::start(Devices::One(context.clone()), options)
    }

    /// Sockets over software HCAs, one per local address, opened on first use: shared memory to
    /// peers on this machine, UDP to others.
    pub fn new(options: NetOptions) -> Result<Self> {
        Self::start(Devices::ByAddress(Mutex::default()), options)
    }

    /// The process-wide instance, with default options.
    pub fn shared() -> Result<Self> {
        static SHARED: OnceLock<Net> = OnceLock::new();
        if let Some(net) = SHARED.get() {
            return Ok(net.clone());
        }
        let net = Self::new(NetOptions::default())?;
        // If another thread was faster, ours is dropped.
        Ok(SHARED.get_or_init(|| net).clone())
    }

    fn start(devices: Devices, options: NetOptions) -> Result<Self> {
        options.check()?;
        let command_queue = Arc::new(CommandQueue::new()?);
        Service::start(command_queue.clone())?;
        // 0 is the epoll data of the wake-up event.
        Ok(Self(Arc::new(Inner { command_queue, devices, options, next: AtomicU64::new(1) })))
    }

    /// Connects to a listener at the first of the addresses that accepts.
    pub fn connect(&self, address: impl std::net::ToSocketAddrs) -> io::Result<WarpStream> {
        let tcp = TcpStream::connect(address)?;
        self.establish(tcp, Instant::now() + self.0.options.handshake_timeout)
    }

    /// Connects to a listener within `timeout`, handshake included.
    pub fn connect_timeout(
        &self,
        address: &SocketAddr,
        timeout: Duration,
    ) -> io::Result<WarpStream> {
        let deadline = Instant::now() + timeout;
        let tcp = TcpStream::connect_timeout(address, timeout)?;
        self.establish(tcp, deadline.min(Instant::now() + self.0.options.handshake_timeout))
    }

    /// Listens; port 0 selects a free one.
    pub fn listen(&self, address: impl std::net::ToSocketAddrs) -> io::Result<WarpListener> {
        WarpListener::new(&self.0, address)
    }

    fn establish(&self, tcp: TcpStream, deadline: Instant) -> io::Result<WarpStream> {
        prepare(&tcp)?;
        let peer = tcp.peer_addr()?;
        let mut conn_setup = self.0.begin(tcp).map_err(io_error)?;
        loop {
            if conn_setup.advance(&self.0)? {
                return Ok(WarpStream::new(self.0.finish_handshake(conn_setup)?));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let error = Error::new(Kind::Timeout, format!("connect to {peer}"))
                    .why("the peer accepted the TCP connection but sent no hello in time")
                    .fix("check that a warp socket listens there");
                return Err(io_error(error));
            }
            // Our messages fit the socket buffer, so only reading can block.
            EventFd::wait_readable(&conn_setup.tcp, left.min(Duration::from_millis(100)))
                .map_err(io_error)?;
        }
    }
}

impl Inner {
    /// A number that no other socket of this `Net` has.
    pub(super) fn number(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    /// Asks the service thread to poll a connection for its waiters.
    pub(super) fn watch(&self, connection: &Connection) {
        if !connection.is_watched.swap(true, Ordering::SeqCst) {
            self.submit(Command::Watch(connection.number()));
        }
    }

    pub(super) fn submit(&self, command: Command) {
        self.command_queue.submit(command);
    }

    /// Whether the device is a NIC, whose address may differ from that of TCP connections.
    fn is_hardware(&self) -> bool {
        matches!(&self.devices, Devices::One(context) if context.soft().is_none())
    }

    /// The device for connections with this local address.
    fn device(&self, local: IpAddr) -> Result<Context> {
        let by_address = match &self.devices {
            Devices::One(context) => return Ok(context.clone()),
            Devices::ByAddress(map) => map,
        };
        let local = local.to_canonical();
        by_address.lock().get(local, || {
            let (udp, shm) = (UdpOptions::from_env()?, ShmOptions::from_env()?);
            Context::open(Auto::bind((local, 0).into(), udp, shm)?)
        })
    }

    /// Starts the handshake of a connecting end.
    fn begin(&self, tcp: TcpStream) -> Result<ConnSetup> {
        let mut conn_setup = ConnSetup::accepted(tcp);
        conn_setup.introduce(self)?;
        Ok(conn_setup)
    }

    /// Creates a connection after its handshake.
    pub(super) fn finish_handshake(
        self: &Arc<Self>,
        conn_setup: ConnSetup,
    ) -> io::Result<Arc<Connection>> {
        let ConnSetup { tcp, resources, handshake } = conn_setup;
        let peer = *handshake.peer().ok_or(io::ErrorKind::NotConnected)?;
        let resources = resources.ok_or(io::ErrorKind::NotConnected)?;
        let connection = Arc::new(Connection::new(resources, peer, tcp, self.clone())?);
        self.submit(Command::Add(Arc::downgrade(&connection)));
        Ok(connection)
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.submit(Command::Stop);
    }
}

impl std::fmt::Debug for Inner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.devices {
            Devices::One(context) => write!(f, "over {}", context.path()),
            Devices::ByAddress(_) => f.write_str("over a device for each address"),
        }
    }
}

/// A connection in the handshake.
pub(super) struct ConnSetup {
    pub(super) tcp: TcpStream,
    /// `None` until an accepted connection has sent a valid hello: strangers cost a descriptor, and
    /// no queue pair and no memory.
    resources: Option<LocalResources>,
    handshake: Handshake,
}

impl ConnSetup {
    /// An accepted connection, whose peer sends its hello first.
    pub(super) fn accepted(tcp: TcpStream) -> Self {
        Self { tcp, resources: None, handshake: Handshake::accepting() }
    }

    /// Creates the queue pair and queues our hello.
    fn introduce(&mut self, net: &Inner) -> Result<()> {
        let local = self.tcp.local_addr();
        let local = local.map_err(|why| Error::os("query the local address", &why))?;
        let resources = LocalResources::new(&net.device(local.ip())?, &net.options)?;
        self.handshake.introduce(&resources.hello())?;
        self.resources = Some(resources);
        Ok(())
    }

    /// Receives and sends what is possible without blocking; returns whether the handshake is
    /// complete.
    pub(super) fn advance(&mut self, net: &Inner) -> io::Result<bool> {
        let mut bytes = [0; 512];
        loop {
            let drained = self.advance_once(net, &mut bytes);
            let sent = self.send();
            if drained? {
                sent?;
                return Ok(self.handshake.is_done());
            }
            sent?;
            if self.handshake.is_done() {
                return Ok(true);
            }
        }
    }

    /// Receives once; returns whether nothing was there.
    fn advance_once(&mut self, net: &Inner, bytes: &mut [u8]) -> io::Result<bool> {
        use std::io::Read;
        match self.tcp.read(bytes) {
            Ok(0) => {
                let error = Error::new(Kind::PeerLost, "complete a handshake")
                    .why("the peer closed the connection");
                return Err(io_error(error.fix("check that the peer is a warp socket")));
            }
            Ok(count) => self.handshake.take(&bytes[..count]).map_err(io_error)?,
            Err(why) if why.kind() == io::ErrorKind::WouldBlock => return Ok(true),
            Err(why) if why.kind() == io::ErrorKind::Interrupted => {}
            Err(why) => return Err(why),
        }
        if let Some(peer) = self.handshake.peer().copied()
            && !self.handshake.is_ready()
        {
            if let Err(error) = self.establish(net, &peer) {
                self.handshake.refuse(&error);
                return Err(io_error(error));
            }
            self.handshake.mark_ready();
        }
        Ok(false)
    }

    /// The peer's hello is known: connects the queue pair.
    fn establish(&mut self, net: &Inner, peer: &Hello) -> Result<()> {
        if !net.is_hardware() {
            let from = self.tcp.peer_addr();
            let from = from.map_err(|why| Error::os("query the peer's address", &why))?;
            peer.check_address(from.ip())?;
        }
        if self.resources.is_none() {
            self.introduce(net)?;
        }
        self.resources.as_ref().map_or(Ok(()), |resources| resources.establish(peer))
    }

    fn send(&mut self) -> io::Result<()> {
        use std::io::Write;
        while !self.handshake.to_send().is_empty() {
            match self.tcp.write(self.handshake.to_send()) {
                Ok(count) => self.handshake.sent(count),
                Err(why) if why.kind() == io::ErrorKind::WouldBlock => break,
                Err(why) if why.kind() == io::ErrorKind::Interrupted => {}
                Err(why) => return Err(why),
            }
        }
        Ok(())
    }
}

/// Options of the TCP connection: no delay for handshake messages, and keepalive to detect a dead
/// machine after 30 s.
pub(super) fn prepare(tcp: &TcpStream) -> io::Result<()> {
    use rustix::net::sockopt;
    tcp.set_nonblocking(true)?;
    tcp.set_nodelay(true)?;
    sockopt::set_socket_keepalive(tcp, true)?;
    sockopt::set_tcp_keepidle(tcp, Duration::from_secs(10))?;
    sockopt::set_tcp_keepintvl(tcp, Duration::from_secs(5))?;
    sockopt::set_tcp_keepcnt(tcp, 4)?;
    Ok(())
}

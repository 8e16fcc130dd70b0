//! What cases share: two devices on a link, and registered memory of every kind.

use std::cell::OnceCell;
use std::time::{Duration, Instant};

pub use testkit::{Rng, assert_same as same};
use warpwire::hca::HcaOptions;
use warpwire::link::fault::FaultPlan;
use warpwire::link::{
    Auto, Capture, FaultInjector, Hub, Link, Shm, ShmOptions, Tap, Udp, UdpOptions,
};
use warpwire::mem::sim::{Sim, SimConfig, SimControl};
use warpwire::mem::{Allocation, Device};
use warpwire::mr::{HostMemory, MemorySource};
use warpwire::verbs::{
    Access, AsyncEvent, Completion, Context, Cq, DeviceOptions, Mr, Pd, ProgressMode, Qp,
    QpOptions, ReceiveRequest, SendRequest, Status,
};
use warpwire_apps::pattern;

/// Upper bound for anything that works.
pub fn test_timeout() -> Duration {
    testkit::deadline(Duration::from_secs(20))
}
/// How long a case waits before it concludes that something does not happen.
pub const SHORT_WAIT: Duration = Duration::from_millis(20);

/// All local and remote access rights.
pub const ALL: Access = Access::ALL;

/// Engines of a device of [`TestLink::Udp4Engines`].
pub const ENGINES: u32 = 4;

/// The links that cases run over. A new one needs a line here and one in [`TestLink::links`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TestLink {
    Loopback,
    Udp4,
    Udp6,
    Shm,
    Auto,
    /// `Shm` and `Auto` with direct access to peer memory off.
    ShmPackets,
    AutoPackets,
    /// `Udp4`, and devices with [`ENGINES`] engines.
    Udp4Engines,
    /// Not a link: an RDMA device of the machine at both ends, or at one of them.
    Device,
    SoftToDevice,
    DeviceToSoft,
}

/// Names an RDMA device to run the suite on, instead of links.
const DEVICE: &str = "WARPWIRE_VERBS_DEVICE";
/// Where the software HCA is, as seen from that device: a network namespace, and an address in it
/// (`soft,10.79.0.2`).
const SOFT_PEER: &str = "WARPWIRE_VERBS_BESIDE";

/// Directory for packet captures of the software HCA in failed cases.
const RECORDS: &str = "WARPWIRE_VERBS_RECORDS";

impl TestLink {
    pub const LINKS: [(Self, &'static str); 8] = [
        (Self::Loopback, "loopback"),
        (Self::Udp4, "udp4"),
        (Self::Udp6, "udp6"),
        (Self::Shm, "shm"),
        (Self::Auto, "auto"),
        (Self::ShmPackets, "shm-packets"),
        (Self::AutoPackets, "auto-packets"),
        (Self::Udp4Engines, "udp4-engines"),
    ];
    pub const DEVICES: [(Self, &'static str); 3] = [
        (Self::Device, "devices"),
        (Self::SoftToDevice, "soft-to-device"),
        (Self::DeviceToSoft, "device-to-soft"),
    ];

    /// The RDMA device configurations if one is named in the environment, otherwise the links.
    pub fn all() -> Vec<(Self, &'static str)> {
        match std::env::var_os(DEVICE) {
            None => Self::LINKS.to_vec(),
            Some(_) => Self::DEVICES.to_vec(),
        }
    }

    /// Whether at least one end is an RDMA device of the machine.
    pub fn has_device(self) -> bool {
        Self::DEVICES.iter().any(|(test_link, _)| *test_link == self)
    }

    /// Whether peers access each other's memory directly, without packets.
    pub fn is_direct(self) -> bool {
        matches!(self, Self::Shm | Self::Auto)
    }

    /// Options for devices on this link.
    pub fn options(self, progress_mode: ProgressMode) -> HcaOptions {
        HcaOptions::default()
            .with_progress_mode(progress_mode)
            .with_direct(!matches!(self, Self::ShmPackets | Self::AutoPackets))
            .with_engines(if self == Self::Udp4Engines { ENGINES } else { 1 })
    }

    /// Two links that reach each other.
    pub fn ends(self) -> warpwire::Result<[Box<dyn Link>; 2]> {
        let mut links = self.links(2)?.into_iter();
        Ok(std::array::from_fn(|_| links.next().unwrap()))
    }

    /// `count` links that reach each other.
    pub fn links(self, count: u8) -> warpwire::Result<Vec<Box<dyn Link>>> {
        if self.has_device() {
            testkit::skip("it needs links, and this is an RDMA device");
        }
        let hub = Hub::new();
        let make = |n| match self {
            Self::Loopback => {
                let address = format!("10.0.0.{}:4791", n + 1).parse().unwrap();
                Ok(Box::new(hub.endpoint(address)?) as Box<dyn Link>)
            }
            Self::Udp4 | Self::Udp4Engines => udp("127.0.0.1:0"),
            Self::Udp6 => udp("[::1]:0"),
            Self::Shm | Self::ShmPackets => shm("127.0.0.1:0"),
            Self::Auto | Self::AutoPackets => auto("127.0.0.1:0"),
            Self::Device | Self::SoftToDevice | Self::DeviceToSoft => unreachable!(),
        };
        (0..count).map(make).collect()
    }

    /// Why this link or device is unavailable, if it is.
    pub fn missing(self) -> Option<String> {
        if !self.has_device() {
            return self.ends().err().map(|why| why.to_string());
        }
        let soft_peer = self == Self::Device || std::env::var_os(SOFT_PEER).is_some();
        match soft_peer {
            true => device().err().map(|why| why.to_string()),
            false => {
                Some(format!("{SOFT_PEER} does not name the software HCA's namespace and address"))
            }
        }
    }
}

/// Opens the device under test with a GID of the software HCA's address family. The GID table fills
/// shortly after the device appears, so this retries.
fn device() -> warpwire::Result<Context> {
    let name = std::env::var(DEVICE).unwrap();
    let is_ipv6 = std::env::var(SOFT_PEER).is_ok_and(|words| words.contains(':'));
    let start = Instant::now();
    loop {
        let context = Context::open_device(&name)?;
        let local = context.path().local;
        if local.port() != 0 && !is_ipv6 && local.is_ipv4() || start.elapsed() > test_timeout() / 4
        {
            return Ok(context);
        }
        let is_global_ipv6 = |gid: &&warpwire::ibv::Gid| match gid.address {
            std::net::IpAddr::V6(address) => is_ipv6 && !address.is_unicast_link_local(),
            std::net::IpAddr::V4(_) => false,
        };
        if let Some(gid) = context.device().unwrap().gids()?.iter().find(is_global_ipv6) {
            let gid_index = Some(u8::try_from(gid.index).unwrap());
            return Context::open_device_with(
                &name,
                DeviceOptions::default().with_port(None).with_gid_index(gid_index),
            );
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// The software HCA opposite the device, in the network namespace that [`enter_netns`] joined.
fn soft_peer(progress_mode: ProgressMode) -> Context {
    let words = std::env::var(SOFT_PEER).unwrap();
    let (_, address) = words.split_once(',').expect("a namespace and an address");
    let address = (address.parse::<std::net::IpAddr>().unwrap(), 4791).into();
    // There is one such port, and the previous context's thread may not have closed it yet.
    let start = Instant::now();
    let link = loop {
        match Udp::bind(address, UdpOptions::default()) {
            Err(_) if start.elapsed() < test_timeout() / 4 => {
                std::thread::sleep(Duration::from_millis(5))
            }
            bound => break bound.unwrap(),
        }
    };
    let options = HcaOptions::default().with_progress_mode(progress_mode);
    match recording() {
        Some(path) => {
            let capture = Capture::create(&path).unwrap();
            Context::open_with(Tap::new(link, &capture), options).unwrap()
        }
        None => Context::open_with(link, options).unwrap(),
    }
}

/// Capture file of the running case, if captures are enabled.
fn recording() -> Option<std::path::PathBuf> {
    Some(std::path::PathBuf::from(std::env::var_os(RECORDS)?).join("running.pcap"))
}

/// Ends a case's capture: renames it to the case's name if the case failed, deletes it otherwise.
pub fn end_recording(name: &str, failed: bool) {
    let Some(path) = recording() else { return };
    let _ = match failed {
        true => std::fs::rename(&path, path.with_file_name(name.replace("::", "-") + ".pcap")),
        false => std::fs::remove_file(&path),
    };
}

/// Moves this thread, and all threads it starts, into the network namespace from which the software
/// HCA reaches the device. The RDMA device itself stays in the namespace it was created in.
pub fn enter_netns() {
    let Ok(words) = std::env::var(SOFT_PEER) else { return };
    let (name, _) = words.split_once(',').expect("a namespace and an address");
    let namespace = std::fs::File::open(format!("/run/netns/{name}")).unwrap();
    let network = Some(rustix::thread::LinkNameSpaceType::Network);
    rustix::thread::move_into_link_name_space(std::os::fd::AsFd::as_fd(&namespace), network)
        .unwrap();
}

fn udp(address: &str) -> warpwire::Result<Box<dyn Link>> {
    Ok(Box::new(Udp::bind(address.parse().unwrap(), UdpOptions::default())?))
}

fn shm(address: &str) -> warpwire::Result<Box<dyn Link>> {
    Ok(Box::new(Shm::bind(address.parse().unwrap(), prompt_control())?))
}

fn auto(address: &str) -> warpwire::Result<Box<dyn Link>> {
    let address = address.parse().unwrap();
    Ok(Box::new(Auto::bind(address, UdpOptions::default(), prompt_control())?))
}

/// Peers learn of each other's exports within a few steps, so that most operations of a case run
/// without packets where that is possible.
fn prompt_control() -> ShmOptions {
    ShmOptions::default().with_control_poll_interval(1)
}

/// Kinds of memory, by access path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Host,
    Window,
    Engine,
    Staged,
}

pub const KINDS: [Kind; 4] = [Kind::Host, Kind::Window, Kind::Engine, Kind::Staged];

/// The link under test, and a simulated GPU that starts on first use.
pub struct Fixture {
    pub test_link: TestLink,
    sim: OnceCell<Sim>,
}

impl Fixture {
    pub fn new(test_link: TestLink) -> Self {
        Self { test_link, sim: OnceCell::new() }
    }

    pub fn sim(&self) -> &Sim {
        let config = SimConfig::default().with_memory(1 << 28);
        self.sim.get_or_init(|| Sim::start(config).unwrap())
    }

    pub fn gpu(&self) -> Device {
        self.sim().device(0).unwrap()
    }

    pub fn control(&self) -> SimControl {
        self.sim().control(0).unwrap()
    }

    /// Two devices that make progress only when the case polls them.
    pub fn testbed(&self) -> Testbed {
        self.with_progress(ProgressMode::Manual)
    }

    pub fn with_progress(&self, progress_mode: ProgressMode) -> Testbed {
        let soft = || Endpoint::of(soft_peer(progress_mode));
        let device = || Endpoint::of(device().unwrap());
        let (a, b) = match self.test_link {
            TestLink::Device => (device(), device()),
            TestLink::SoftToDevice => (soft(), device()),
            TestLink::DeviceToSoft => (device(), soft()),
            test_link => {
                let [a, b] = test_link.ends().unwrap();
                return Testbed::with(a, b, test_link.options(progress_mode));
            }
        };
        Testbed { a, b }
    }

    /// Two devices over fault-injecting links.
    pub fn faulty(&self, plan: &str, seed: u64, progress_mode: ProgressMode) -> Testbed {
        let [a, b] = self.test_link.ends().unwrap();
        let plan: FaultPlan = plan.parse().unwrap();
        let a = FaultInjector::new(a, FaultPlan { seed, ..plan });
        let b = FaultInjector::new(b, FaultPlan { seed: seed ^ 0x5555, ..plan });
        Testbed::with(a, b, self.test_link.options(progress_mode))
    }

    /// Registered, zeroed memory of that kind.
    pub fn memory(&self, end: &Endpoint, kind: Kind, len: u64, access: Access) -> TestBuffer {
        match kind {
            Kind::Host => {
                let memory = HostMemory::new(len).unwrap();
                let mr = end.context.register(&end.pd, memory.clone(), access).unwrap();
                TestBuffer { backing: Backing::Host(memory), mr }
            }
            Kind::Window | Kind::Engine | Kind::Staged => {
                let memory = self.gpu().alloc(len).unwrap();
                memory.write(0, &vec![0; len as usize]).unwrap();
                let mut region = MemorySource::from(memory.region(0, len).unwrap());
                match kind {
                    Kind::Engine => region = region.without_window(),
                    Kind::Staged => region = region.staged(),
                    _ => {}
                }
                match end.context.register(&end.pd, region, access) {
                    Ok(mr) => TestBuffer { backing: Backing::Device(memory), mr },
                    Err(refused) if end.is_device() => {
                        assert!(kind != Kind::Window, "{refused}");
                        self.host_fallback(end, kind, refused, (len, access))
                    }
                    Err(refused) => panic!("{refused}"),
                }
            }
        }
    }

    /// Staged memory cannot be given remote access: checks that the error says so and names pinned
    /// host memory as the alternative, then returns host memory.
    fn host_fallback(
        &self,
        end: &Endpoint,
        kind: Kind,
        refused: warpwire::Error,
        (len, access): (u64, Access),
    ) -> TestBuffer {
        let text = refused.to_string();
        assert!(access.is_remote(), "{text}");
        let wanted_parts: &[&str] = match kind {
            Kind::Staged => &[],
            _ => &["no dma-buf", "no peer memory", "no window"],
        };
        for part in wanted_parts.iter().chain(&["would not be copied", "pinned host memory"]) {
            assert!(text.contains(part), "{text}");
        }
        self.memory(end, Kind::Host, len, access)
    }

    /// Registered host memory with all access rights.
    pub fn host(&self, end: &Endpoint, len: u64) -> TestBuffer {
        self.memory(end, Kind::Host, len, ALL)
    }
}

/// Registered memory, with access to its bytes that bypasses the device under test.
pub struct TestBuffer {
    backing: Backing,
    pub mr: Mr,
}

enum Backing {
    Host(HostMemory),
    Device(Allocation),
}

impl TestBuffer {
    pub fn write(&self, offset: u64, bytes: &[u8]) {
        match &self.backing {
            Backing::Host(memory) => memory.bytes().write(offset, bytes).unwrap(),
            Backing::Device(memory) => memory.write(offset, bytes).unwrap(),
        }
    }

    pub fn read(&self, offset: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        match &self.backing {
            Backing::Host(memory) => memory.bytes().read(offset, &mut bytes).unwrap(),
            Backing::Device(memory) => memory.read(offset, &mut bytes).unwrap(),
        }
        bytes
    }

    pub fn word(&self, offset: u64) -> u64 {
        u64::from_ne_bytes(self.read(offset, 8).try_into().unwrap())
    }

    /// Fills a range with the pattern of `seed`, and returns the bytes.
    pub fn pattern(&self, offset: u64, len: usize, seed: u64) -> Vec<u8> {
        let mut bytes = vec![0; len];
        pattern::fill_bytes(&mut bytes, seed, 0);
        self.write(offset, &bytes);
        bytes
    }

    pub fn allocation(&self) -> &Allocation {
        match &self.backing {
            Backing::Device(memory) => memory,
            Backing::Host(_) => panic!("not device memory"),
        }
    }
}

/// A device with a protection domain.
#[derive(Clone)]
pub struct Endpoint {
    pub context: Context,
    pub pd: Pd,
}

impl Endpoint {
    pub fn open(link: impl Link + 'static, options: HcaOptions) -> Self {
        Self::of(Context::open_with(link, options).unwrap())
    }

    pub fn of(context: Context) -> Self {
        let pd = context.alloc_pd();
        Self { context, pd }
    }

    /// Whether this end is an RDMA device of the machine.
    pub fn is_device(&self) -> bool {
        self.context.device().is_some()
    }

    /// Drains the async event queue.
    pub fn async_events(&self) -> Vec<AsyncEvent> {
        std::iter::from_fn(|| self.context.next_event()).collect()
    }
}

/// Two devices that reach each other.
pub struct Testbed {
    pub a: Endpoint,
    pub b: Endpoint,
}

/// A queue pair with one completion queue for sends and one for receives.
pub struct TestQp {
    pub qp: Qp,
    pub sends: Cq,
    pub receives: Cq,
}

/// Two connected queue pairs.
pub struct QpPair {
    pub a: TestQp,
    pub b: TestQp,
}

impl Testbed {
    pub fn over(
        a: impl Link + 'static,
        b: impl Link + 'static,
        progress_mode: ProgressMode,
    ) -> Self {
        Self::with(a, b, HcaOptions::default().with_progress_mode(progress_mode))
    }

    pub fn with(a: impl Link + 'static, b: impl Link + 'static, options: HcaOptions) -> Self {
        Self { a: Endpoint::open(a, options), b: Endpoint::open(b, options) }
    }

    pub fn step(&self) {
        for end in [&self.a, &self.b] {
            match end.context.soft() {
                Some(hca) => drop(hca.poll().unwrap()),
                // Hardware and rxe make progress on their own, if they get a processor.
                None => std::thread::yield_now(),
            }
        }
    }

    /// Drives both devices until `condition` holds; `what` names it in the failure message.
    pub fn until(&self, what: &str, mut condition: impl FnMut() -> bool) {
        let start = Instant::now();
        while !condition() {
            self.step();
            let stats_now = || [&self.a, &self.b].map(|end| end.context.stats());
            assert!(
                start.elapsed() < test_timeout(),
                "timed out waiting for: {what} {:#?}",
                stats_now()
            );
        }
    }

    /// Drives both devices for `time`.
    pub fn poll_for(&self, time: Duration) {
        let start = Instant::now();
        loop {
            self.step();
            if start.elapsed() >= time {
                return;
            }
        }
    }

    /// Waits for the next completion.
    pub fn next(&self, cq: &Cq) -> Completion {
        let mut one = [Completion::EMPTY];
        self.until("a completion", || cq.poll(&mut one).unwrap() == 1);
        one[0]
    }

    /// The next completion, which must be `id` with success.
    pub fn done(&self, cq: &Cq, id: u64) -> Completion {
        let completion = self.next(cq);
        assert_eq!((completion.id, completion.status), (id, Status::Success), "{completion:?}");
        completion
    }

    /// The next completion, which must be `id` with `status`, or with what rxe reports instead.
    pub fn failed(&self, cq: &Cq, id: u64, status: Status) {
        let completion = self.next(cq);
        assert_eq!(completion.id, id, "{completion:?}");
        let device = self.a.is_device() || self.b.is_device();
        let also = if device { device_specific(status) } else { &[] };
        let expected = completion.status == status || also.contains(&completion.status);
        assert!(expected, "not {status:?}: {completion:?}");
    }

    /// Asserts that no completion arrives within [`SHORT_WAIT`].
    pub fn expect_no_completion(&self, cq: &Cq) {
        self.poll_for(SHORT_WAIT);
        let mut one = [Completion::EMPTY];
        assert_eq!(cq.poll(&mut one).unwrap(), 0, "{:?}", one[0]);
    }

    pub fn test_qp(&self, end: &Endpoint, mut options: QpOptions) -> TestQp {
        if self.a.is_device() || self.b.is_device() {
            // The device may be emulated on a busy machine: about 1 s, or 0.27 s for cases that
            // want short timeouts. With less, rxe retransmits a long message before its first
            // packets are acknowledged, which saturates an emulated processor, and gives up or
            // stalls.
            let short_timeout =
                options.timeout < QpOptions::default().timeout && options.timeout > 0;
            options.timeout = if short_timeout { 16 } else { options.timeout.max(18) };
        }
        let entries = 2 * options.send_depth.max(options.receive_depth).max(1);
        let sends = end.context.create_cq(entries).unwrap();
        let receives = end.context.create_cq(entries).unwrap();
        let qp = end.context.create_qp(&end.pd, &sends, &receives, options).unwrap();
        TestQp { qp, sends, receives }
    }

    /// Two connected queue pairs with the same options.
    pub fn join(&self, options: QpOptions) -> QpPair {
        self.join_with(options.clone(), options)
    }

    pub fn join_with(&self, a: QpOptions, b: QpOptions) -> QpPair {
        let conn = QpPair { a: self.test_qp(&self.a, a), b: self.test_qp(&self.b, b) };
        connect(&conn.a.qp, &conn.b.qp);
        conn
    }

    /// Asserts that a connection works: a message each way.
    pub fn check_traffic(&self, conn: &QpPair) {
        for (from, to) in [(&conn.a, &conn.b), (&conn.b, &conn.a)] {
            to.qp.post_receive(&[ReceiveRequest { id: 77, data: &[] }]).unwrap();
            let request = SendRequest::new(78, warpwire::verbs::WrOp::Send);
            from.qp.post_send(&[request]).unwrap();
            self.done(&from.sends, 78);
            self.done(&to.receives, 77);
        }
    }
}

/// Statuses that rxe reports instead, depending on the kernel: docs/devices.md.
fn device_specific(status: Status) -> &'static [Status] {
    match status {
        Status::LocalProtection => &[Status::LocalQpOperation, Status::Flushed],
        Status::LocalAccess => &[Status::RemoteAccess, Status::RemoteInvalidRequest],
        Status::LocalLength => &[Status::LocalQpOperation],
        Status::RemoteInvalidRequest => &[Status::RemoteOperation],
        _ => &[],
    }
}

/// Whether memory that was deregistered is unused: a peer that waits for a CPU in the middle of an
/// access is reported after half a second.
pub fn is_unused(deregistered: warpwire::Result<()>) -> bool {
    if let Err(why) = &deregistered {
        assert_eq!(why.kind(), &warpwire::error::Kind::Busy, "{why}");
    }
    deregistered.is_ok()
}

pub fn connect(one: &Qp, two: &Qp) {
    let (first, second) = (one.endpoint(), two.endpoint());
    one.connect(&second).unwrap();
    two.connect(&first).unwrap();
}

/// Options with which failures take little time: an eighth of a second.
pub fn short_timeouts() -> QpOptions {
    QpOptions::default().with_timeout(13).with_retry_count(3).with_rnr_retry(2)
}

//! A device with two queue pairs connected to each other.

use std::time::Duration;

use warpwire::ibv::{
    Completion, Context, Cq, GidKind, Mr, Pd, Qp, QpOptions, ReceiveRequest, Remote, SendRequest,
    Sge, WrOp,
};
use warpwire::mlx5::Status;
use warpwire::mr::{Access, HostMemory};

/// Environment variable that names the device.
pub const DEVICE: &str = "WARPWIRE_IBV_DEVICE";

/// Upper bound for anything that works, in a guest emulated on a busy machine.
pub fn test_timeout() -> Duration {
    testkit::deadline(Duration::from_secs(30))
}

pub const MEMORY: u64 = (1 << 20) + 8192;

pub fn device_name() -> String {
    std::env::var(DEVICE).unwrap()
}

/// Index of the first RoCE v2 GID with an IPv4 address, else of the first GID. The GID table fills
/// shortly after the device appears, so this waits.
pub fn gid_index(context: &Context) -> u8 {
    let start = std::time::Instant::now();
    loop {
        let gids = context.gids().unwrap();
        let global = gids.iter().find(|gid| gid.kind == GidKind::RoceV2 && gid.address.is_ipv4());
        if let Some(gid) = global.or(gids.first().filter(|_| start.elapsed() > test_timeout() / 10))
        {
            return u8::try_from(gid.index).unwrap();
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

pub struct TestQp {
    pub qp: Qp,
    pub cq: Cq,
    pub memory: HostMemory,
    pub mr: Mr,
}

/// Two queue pairs; cases post work on `a`.
pub struct Testbed {
    pub context: Context,
    pub pd: Pd,
    pub gid_index: u8,
    pub a: TestQp,
    pub b: TestQp,
}

impl Testbed {
    pub fn new() -> Self {
        Self::with(|options| options)
    }

    /// Two connected queue pairs with these options.
    pub fn with(change: impl Fn(QpOptions) -> QpOptions) -> Self {
        let testbed = Self::unconnected(change);
        testbed.connect();
        testbed
    }

    pub fn unconnected(change: impl Fn(QpOptions) -> QpOptions) -> Self {
        let context = Context::open(&device_name()).unwrap();
        let pd = context.create_pd().unwrap();
        let gid_index = gid_index(&context);
        let [a, b] = [(); 2].map(|()| {
            let options = change(QpOptions { gid_index, ..QpOptions::default() });
            let cq = context.create_cq(256).unwrap();
            let qp = pd.create_qp(&cq, &cq, options).unwrap();
            let memory = HostMemory::new(MEMORY).unwrap();
            let mr = pd.register(&memory, None, Access::ALL).unwrap();
            TestQp { qp, cq, memory, mr }
        });
        Self { context, pd, gid_index, a, b }
    }

    pub fn connect(&self) {
        self.a.qp.connect(&self.b.qp.endpoint().unwrap()).unwrap();
        self.b.qp.connect(&self.a.qp.endpoint().unwrap()).unwrap();
    }

    /// The address at `offset` in `b`'s memory.
    pub fn there(&self, offset: u64) -> Remote {
        self.b.mr.remote(offset)
    }

    /// Asserts that a message arrives.
    pub fn check_traffic(&self) {
        self.b.receive(901, 0, 64);
        self.a.post(SendRequest::new(902, WrOp::Send).inline(b"still here"));
        self.a.done(902);
        assert_eq!(self.b.done(901).len, 10);
    }
}

/// Bytes that depend on the seed and the offset; `tools/rxe/verbs-peer.c` has the same function.
pub fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let byte = |i: u64| seed * 31 + i * 7 + (i >> 8) * 13 + (i >> 16) * 5;
    (0..len as u64).map(|i| byte(i) as u8).collect()
}

impl TestQp {
    pub fn post(&self, request: SendRequest<'_>) {
        self.qp.post_send(&[request]).unwrap();
    }

    pub fn receive(&self, id: u64, offset: u64, len: u32) {
        let range: &[Sge] = &[self.mr.sge(offset, len)];
        let data = if len == 0 { &[] } else { range };
        self.qp.post_receive(&[ReceiveRequest { id, data }]).unwrap();
    }

    pub fn fill(&self, offset: u64, len: usize, seed: u64) {
        self.memory.bytes().write(offset, &pattern(seed, len)).unwrap();
    }

    pub fn check(&self, offset: u64, len: usize, seed: u64) {
        let mut found = vec![0; len];
        self.memory.bytes().read(offset, &mut found).unwrap();
        let wrong = found.iter().zip(&pattern(seed, len)).position(|(a, b)| a != b);
        assert_eq!(wrong, None, "offset of the first wrong byte of {len}");
    }

    pub fn next(&self) -> Completion {
        self.cq.wait_next(test_timeout()).unwrap().expect("a completion")
    }

    pub fn expect_no_completion(&self) {
        assert_eq!(self.cq.wait_next(Duration::from_millis(50)).unwrap(), None);
    }

    /// The next completion, which must be `id` with success.
    pub fn done(&self, id: u64) -> Completion {
        let completion = self.next();
        assert_eq!((completion.id, completion.status), (id, Status::Success), "{completion:?}");
        completion
    }

    /// The next completion, which must be `id` with one of `statuses`.
    pub fn failed(&self, id: u64, statuses: &[Status]) {
        let completion = self.next();
        assert_eq!(completion.id, id, "{completion:?}");
        assert!(statuses.contains(&completion.status), "{completion:?}");
    }
}

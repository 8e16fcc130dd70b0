//! The local device and the guest's, with queue pairs connected to each other.

use std::net::{IpAddr, SocketAddr};
use std::ops::Deref;
use std::time::Instant;

use warpwire::link::fault::{FaultPlan, Partition};
use warpwire::link::{Capture, FaultInjector, Link, Tap, Udp, UdpOptions, udp};
use warpwire::mr::HostMemory;
use warpwire::verbs::{
    Access, Completion, Context, Cq, Mr, Mtu, Pd, Qp, QpEndpoint, QpOptions, ReceiveRequest,
    SendRequest, Sge, Srq, SrqOptions, State, Status,
};
use warpwire_proto::Psn;

use crate::rxe::lab::{Bench, test_timeout};
use crate::rxe::peer::{ALL_ACCESS, Peer, RemoteMemory};

/// Connection parameters of both ends.
#[derive(Clone, Debug)]
pub struct ConnParams {
    pub mtu: u32,
    /// Initial PSNs: local, remote.
    pub psn: [u32; 2],
    pub timeout: u8,
    pub retry: u8,
    pub rnr_retry: u8,
    pub min_rnr: u8,
    pub reads: u8,
    pub qps: usize,
    pub shared: [bool; 2],
    /// Bytes of memory at each end.
    pub memory: u64,
    /// Fault plans of the local link, nested in this order.
    pub faults: &'static [&'static str],
    /// Local address, if not the default one.
    pub from: Option<IpAddr>,
}

impl Default for ConnParams {
    fn default() -> Self {
        Self {
            mtu: 1024,
            psn: [0x12_3456, 0xab_cdef],
            timeout: 16,
            retry: 7,
            rnr_retry: 7,
            min_rnr: 12,
            reads: 16,
            qps: 1,
            shared: [false, false],
            memory: 1 << 18,
            faults: &[],
            from: None,
        }
    }
}

/// Registered local memory.
pub struct LocalMemory {
    pub memory: HostMemory,
    pub mr: Mr,
}

/// Same function as in `tools/rxe/verbs-peer.c`.
fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let byte = |i: u64| seed * 31 + i * 7 + (i >> 8) * 13 + (i >> 16) * 5;
    (0..len as u64).map(|i| byte(i) as u8).collect()
}

impl LocalMemory {
    pub fn fill(&self, offset: u64, len: usize, seed: u64) {
        self.memory.bytes().write(offset, &pattern(seed, len)).unwrap();
    }

    pub fn check(&self, offset: u64, len: usize, seed: u64) {
        let mut found = vec![0; len];
        self.memory.bytes().read(offset, &mut found).unwrap();
        let wrong = found.iter().zip(&pattern(seed, len)).position(|(a, b)| a != b);
        assert_eq!(wrong, None, "offset of the first wrong byte of {len}");
    }

    pub fn put(&self, offset: u64, word: u64) {
        self.memory.bytes().store_u64(offset, word).unwrap();
    }

    pub fn get(&self, offset: u64) -> u64 {
        self.memory.bytes().load_u64(offset).unwrap()
    }
}

/// The local device, with memory.
pub struct LocalSide {
    pub context: Context,
    pub pd: Pd,
    pub cq: Cq,
    pub near: LocalMemory,
    pub address: IpAddr,
    pub partition: Partition,
    capture: Capture,
}

impl Drop for LocalSide {
    fn drop(&mut self) {
        let _ = self.capture.finish();
    }
}

impl LocalSide {
    pub fn open(bench: &Bench, params: &ConnParams) -> Self {
        let address = params.from.unwrap_or(bench.ours());
        let udp = udp_link(SocketAddr::new(address, udp::ADDRESS.port()));
        let capture = Capture::create(&bench.capture()).unwrap();
        let mut link: Box<dyn Link> = Box::new(Tap::new(udp, &capture));
        for faults in params.faults {
            link = Box::new(FaultInjector::new(link, faults.parse().unwrap()));
        }
        let link = FaultInjector::new(link, FaultPlan::default());
        let partition = link.partition();
        let context = Context::open(link).unwrap();
        let pd = context.alloc_pd();
        let cq = context.create_cq(4096).unwrap();
        let memory = HostMemory::new(params.memory).unwrap();
        let mr = context.register(&pd, memory.clone(), Access::ALL).unwrap();
        let near = LocalMemory { memory, mr };
        Self { context, pd, cq, near, address, partition, capture }
    }

    /// Creates an unconnected queue pair with these parameters.
    pub fn create_qp(&self, params: &ConnParams, srq: Option<Srq>) -> Qp {
        let options = QpOptions::default()
            .with_receive_depth(512)
            .with_mtu(Mtu::new(params.mtu))
            .with_timeout(params.timeout)
            .with_retry_count(params.retry)
            .with_rnr_retry(params.rnr_retry)
            .with_min_rnr_timer(params.min_rnr)
            .with_max_rd_atomic(params.reads)
            .with_srq(srq);
        self.context.create_qp(&self.pd, &self.cq, &self.cq, options).unwrap()
    }

    pub fn next(&self) -> Completion {
        self.cq.wait_next(test_timeout()).unwrap().expect("a completion")
    }

    /// The next completion, which must be `id` with success.
    pub fn done(&self, id: u64) -> Completion {
        let completion = self.next();
        assert_eq!((completion.id, completion.status), (id, Status::Success), "{completion:?}");
        completion
    }

    /// The next completion, which must be `id` with `status`.
    pub fn failed(&self, id: u64, status: Status) {
        let completion = self.next();
        assert_eq!((completion.id, completion.status), (id, status), "{completion:?}");
    }
}

/// The local device and the guest's, with queue pairs between them.
pub struct Testbed {
    ours: LocalSide,
    pub srq: Option<Srq>,
    pub qps: Vec<Qp>,
    pub peer: Peer,
    pub far: RemoteMemory,
}

impl Deref for Testbed {
    type Target = LocalSide;

    fn deref(&self) -> &LocalSide {
        &self.ours
    }
}

impl Testbed {
    pub fn open(bench: &Bench, params: ConnParams) -> Self {
        let ours = LocalSide::open(bench, &params);
        let srq = params.shared[0]
            .then(|| ours.context.create_srq(&ours.pd, SrqOptions::default()).unwrap());
        let mut peer = Peer::start(bench);
        let far = peer.memory(params.memory, ALL_ACCESS);
        if params.shared[1] {
            peer.ok("srq");
        }
        let mut testbed = Self { ours, srq, qps: Vec::new(), peer, far };
        for _ in 0..params.qps {
            testbed.connect(bench, &params);
        }
        testbed
    }

    /// Adds a connected queue pair at each end.
    fn connect(&mut self, bench: &Bench, params: &ConnParams) {
        let qp = self.create_qp(params, self.srq.clone());
        let [ours, theirs] = params.psn;
        let endpoint = QpEndpoint {
            address: SocketAddr::new(bench.theirs(), udp::ADDRESS.port()),
            qpn: self.peer.qp(params.shared[1]),
            psn: theirs,
            mtu: params.mtu,
            max_rd_atomic: params.reads,
            source_port: 0,
            lid: 0,
            gid: 0,
            mtu_on_host: 0,
            selective_repeat: false,
        };
        qp.modify(&qp.init_attr()).unwrap();
        qp.modify(&qp.rtr_attr(&endpoint).unwrap()).unwrap();
        let mut rts_attr = qp.rts_attr(&endpoint);
        rts_attr.send_psn = Some(Psn::new(ours));
        qp.modify(&rts_attr).unwrap();
        let to = (qp.number(), self.ours.address);
        self.peer.connect(self.qps.len(), to, params.psn, params);
        self.qps.push(qp);
    }

    pub fn qp(&self) -> &Qp {
        &self.qps[0]
    }

    pub fn post(&self, request: SendRequest<'_>) {
        self.qp().post_send(&[request]).unwrap();
    }

    pub fn receive(&self, id: u64, offset: u64, len: u32) {
        let data: &[Sge] = &[self.near.mr.sge(offset, len)];
        let data = if len == 0 { &[] } else { data };
        self.qp().post_receive(&[ReceiveRequest { id, data }]).unwrap();
    }

    pub fn state_becomes(&self, state: State) {
        let start = Instant::now();
        while self.qp().state().unwrap() != state {
            assert!(
                start.elapsed() < test_timeout(),
                "the state is still {}",
                self.qp().state().unwrap()
            );
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
    }

    /// Asserts that every connection works: a message each way.
    pub fn check_traffic(&mut self) {
        for index in 0..self.qps.len() {
            let far = self.far;
            self.peer.receive(index, 901, &far, 0, 64);
            self.qps[index]
                .post_send(&[SendRequest::new(902, warpwire::verbs::WrOp::Send)])
                .unwrap();
            self.done(902);
            self.peer.done(901);
        }
    }
}

/// Binds the RoCE port, which a process that just exited may still hold.
fn udp_link(address: SocketAddr) -> Udp {
    let start = Instant::now();
    loop {
        match Udp::bind(address, UdpOptions::default()) {
            Ok(link) => return link,
            Err(why) if start.elapsed() > test_timeout() => panic!("{why}"),
            Err(_) => std::thread::sleep(std::time::Duration::from_millis(20)),
        }
    }
}

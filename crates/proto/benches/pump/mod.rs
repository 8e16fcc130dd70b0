//! Two queue pairs in one loop without a network: the cost of the state machine alone. Shared by
//! the benchmark, the instruction count and the allocation test.

use core::net::Ipv4Addr;

use warpwire_proto::qp::{
    Access, Atomic, Host, HostStatus, Mtu, PathAttributes, ProtocolEvent, QpAttributes, RcQp,
    Receive, Remote, RxPacket, SendOp, SendWr, Source, State, Target, Transmit, TransportOptions,
};
use warpwire_proto::{Instant, Psn};

/// A host that accepts everything.
struct AcceptAllHost {
    received: u64,
}

impl Host for AcceptAllHost {
    fn take_receive(&mut self) -> Option<Receive> {
        self.received += 1;
        Some(Receive { id: self.received, capacity: u32::MAX })
    }

    fn may_access(&mut self, _: Access, _: Remote, _: u32) -> HostStatus {
        HostStatus::Ready
    }

    fn place(&mut self, _: Target, _: u32) -> HostStatus {
        HostStatus::Ready
    }

    fn execute(&mut self, _: Remote, _: Atomic) -> Result<u64, HostStatus> {
        Ok(0)
    }

    fn invalidate(&mut self, _: u32) -> HostStatus {
        HostStatus::Ready
    }

    fn store_result(&mut self, _: u64, _: u64) -> HostStatus {
        HostStatus::Ready
    }

    fn fetch(&mut self, _: Source, _: u32, _: usize) -> HostStatus {
        HostStatus::Ready
    }
}

/// Two connected queue pairs.
pub struct Pump {
    endpoints: [RcQp; 2],
    hosts: [AcceptAllHost; 2],
    now: u64,
    next_id: u64,
    packet: Transmit,
}

impl Pump {
    /// A connected pair with that MTU and send queue depth.
    pub fn new(mtu: u32, depth: u32) -> Self {
        let options = TransportOptions::default().with_send_depth(depth);
        let endpoints =
            [(1, 2), (2, 1)].map(|(mine, theirs)| connected(mine, theirs, mtu, options));
        let hosts = [AcceptAllHost { received: 0 }, AcceptAllHost { received: 0 }];
        Self { endpoints, hosts, now: 0, next_id: 0, packet: Transmit::new() }
    }

    /// Transfers until one end has sent at least `packets` packets; returns the packets sent by the
    /// requester and by the responder.
    pub fn run(&mut self, op: SendOp, len: u32, packets: u64) -> (u64, u64) {
        let (mut forward, mut reverse) = (0, 0);
        while forward.max(reverse) < packets {
            while self.endpoints[0].post(SendWr::new(self.next_id, op, len)).is_ok() {
                self.next_id += 1;
            }
            forward += self.carry(0);
            reverse += self.carry(1);
            while let Some(event) = self.endpoints[0].poll_event() {
                assert!(matches!(event, ProtocolEvent::Sent(_)), "{event:?}");
            }
        }
        (forward, reverse)
    }

    /// Delivers all packets of one end to the other; returns their number.
    fn carry(&mut self, from: usize) -> u64 {
        let mut count = 0;
        self.now += 1000;
        let now = Instant::from_nanos(self.now);
        while self.endpoints[from].transmit_into(now, &mut self.hosts[from], &mut self.packet) {
            let payload_len = self.packet.payload.map_or(0, |payload| payload.len);
            let rx = RxPacket { headers: &self.packet.headers, payload_len, marked: false };
            let to = 1 - from;
            let taken = self.endpoints[to].handle_packet(now, &rx, &mut self.hosts[to]);
            assert_eq!(taken, Ok(()));
            if from == 0 {
                while self.endpoints[1].has_events() && self.endpoints[1].poll_event().is_some() {}
            }
            count += 1;
        }
        count
    }
}

fn connected(mine: u32, theirs: u32, mtu: u32, options: TransportOptions) -> RcQp {
    let mut qp = RcQp::new(mine, options);
    let peer = (Ipv4Addr::LOCALHOST, 4791).into();
    let path =
        PathAttributes { peer, traffic_class: 0, hop_limit: 64, flow_label: 0, source_port: None };
    let psn = Some(Psn::new(0));
    let steps = [
        QpAttributes::new(State::Init)
            .with_partition_index(0)
            .with_port(1)
            .with_access(Access::ALL),
        QpAttributes::new(State::Rtr)
            .with_path(path)
            .with_mtu(Mtu::new(mtu))
            .with_destination(theirs)
            .with_receive_psn(psn)
            .with_max_dest_rd_atomic(16)
            .with_min_rnr_timer(1),
        QpAttributes::new(State::Rts)
            .with_send_psn(psn)
            .with_timeout(14)
            .with_retry_count(7)
            .with_rnr_retry(7)
            .with_max_rd_atomic(16),
    ];
    for step in steps {
        assert_eq!(qp.modify(&step), Ok(()));
    }
    qp
}

/// The measured operations: name, operation, length in packets of the MTU.
pub const WORK: [(&str, SendOp, u32); 5] = [
    ("send", SendOp::Send, 1),
    ("write", SendOp::Write(Remote { address: 0x1000, rkey: 7 }), 1),
    ("write of 64 packets", SendOp::Write(Remote { address: 0x1000, rkey: 7 }), 64),
    ("read of 64 packets", SendOp::Read(Remote { address: 0x1000, rkey: 7 }), 64),
    (
        "fetch-add",
        SendOp::Atomic(Remote { address: 0x1000, rkey: 7 }, Atomic::FetchAdd { add: 1 }),
        0,
    ),
];

/// The length of the operation in bytes.
pub fn len_of(op: SendOp, packets: u32, mtu: u32) -> u32 {
    if matches!(op, SendOp::Atomic(..)) { 8 } else { packets * mtu }
}

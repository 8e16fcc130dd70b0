//! Fuzzes a queue pair with a well-behaved peer: arbitrary calls and packets.
//!
//! The input is a script. Invariants: nothing panics, each posted request completes once and in
//! order, and the memory footprint does not change.

use std::collections::{BTreeMap, VecDeque};
use std::net::Ipv4Addr;

use arbitrary::{Arbitrary, Result, Unstructured};
use warpwire_proto::qp::{
    Access, Atomic, Fence, HOLD_SLOTS, Host, HostStatus, Mtu, PathAttributes, ProtocolEvent,
    QpAttributes, RcQp, Receive, Remote, RxPacket, SendOp, SendWr, Source, State, Status, Target,
    Transmit, TransportOptions,
};
use warpwire_proto::wire::{
    Aeth, AtomicEth, Deth, Extension, Headers, Opcode, Reth, Sack, Syndrome,
};
use warpwire_proto::{Instant, Psn};

/// Runs one input.
pub fn run(bytes: &[u8]) {
    // A script may end in the middle of a call.
    let _ = run_script(&mut Unstructured::new(bytes));
}

/// A host whose answers come from the script.
#[derive(Default)]
struct ScriptedHost {
    answers: VecDeque<u8>,
    receives: u64,
    /// The packet being handled, and packets that are kept.
    current: Option<(Headers, u32)>,
    held: BTreeMap<u32, (Headers, u32)>,
}

impl ScriptedHost {
    fn answer(&mut self) -> HostStatus {
        match self.answers.pop_front().unwrap_or(0) {
            0..240 => HostStatus::Ready,
            240..252 => HostStatus::Retry,
            252.. => HostStatus::Denied,
        }
    }
}

impl Host for ScriptedHost {
    fn take_receive(&mut self) -> Option<Receive> {
        self.receives += 1;
        (self.answer() == HostStatus::Ready)
            .then_some(Receive { id: self.receives, capacity: 4096 })
    }

    fn may_access(&mut self, _: Access, _: Remote, _: u32) -> HostStatus {
        self.answer()
    }

    fn place(&mut self, _: Target, len: u32) -> HostStatus {
        assert!(len > 0 && len <= 4096, "an invalid payload length");
        self.answer()
    }

    fn execute(&mut self, _: Remote, _: Atomic) -> core::result::Result<u64, HostStatus> {
        match self.answer() {
            HostStatus::Ready => Ok(7),
            other => Err(other),
        }
    }

    fn invalidate(&mut self, _: u32) -> HostStatus {
        self.answer()
    }

    fn store_result(&mut self, _: u64, _: u64) -> HostStatus {
        self.answer()
    }

    fn hold(&mut self, slot: u32) -> bool {
        assert!(slot < HOLD_SLOTS);
        let ready = self.answer() == HostStatus::Ready;
        if let (true, Some(packet)) = (ready, self.current) {
            self.held.insert(slot, packet);
        }
        ready && self.current.is_some()
    }

    fn fetch(&mut self, _: Source, len: u32, headers_len: usize) -> HostStatus {
        assert!(len > 0 && len <= 4096 && headers_len >= 12);
        self.answer()
    }
}

struct Endpoint {
    qp: RcQp,
    host: ScriptedHost,
    posted: u64,
    completed: u64,
    failed: bool,
    footprint: usize,
}

impl Endpoint {
    fn new(qpns: [u32; 2], options: TransportOptions, mtu: Mtu, selective: bool) -> Self {
        let mut qp = RcQp::new(qpns[0], options);
        for attr in steps(qpns[1], mtu, selective) {
            qp.modify(&attr).expect("a transition towards RTS");
        }
        let footprint = qp.footprint();
        Self {
            qp,
            host: ScriptedHost::default(),
            posted: 0,
            completed: 0,
            failed: false,
            footprint,
        }
    }

    /// Checks the invariants after each call.
    fn check(&mut self) {
        while let Some(event) = self.qp.poll_event() {
            let ProtocolEvent::Sent(completion) = event else { continue };
            assert_eq!(completion.id, self.completed, "completions in order, one each");
            self.completed += 1;
            assert!(!self.failed || completion.status == Status::Flushed);
            self.failed |= completion.status != Status::Success;
        }
        assert!(self.completed <= self.posted);
        assert_eq!(u64::from(self.qp.outstanding()), self.posted - self.completed);
        assert_eq!(self.qp.footprint(), self.footprint);
        if self.qp.state() == State::Err {
            assert_eq!(self.completed, self.posted, "unflushed work after a failure");
        }
    }

    fn deliver(&mut self, now: Instant, rx: &RxPacket<'_>) {
        self.host.current = Some((*rx.headers, rx.payload_len));
        let _ = self.qp.handle_packet(now, rx, &mut self.host);
        self.check();
        self.host.current = None;
        while let Some(slot) = self.qp.take_held() {
            let (headers, payload_len) = self.host.held.remove(&slot).expect("a packet");
            let rx = RxPacket { headers: &headers, payload_len, marked: false };
            let _ = self.qp.handle_held(now, &rx, &mut self.host);
            self.check();
        }
    }

    fn transmit(&mut self, now: Instant) -> Option<Transmit> {
        let packet = self.qp.poll_transmit(now, &mut self.host);
        self.check();
        packet
    }
}

fn steps(destination: u32, mtu: Mtu, selective: bool) -> [QpAttributes; 3] {
    let peer = (Ipv4Addr::LOCALHOST, 4791).into();
    let path =
        PathAttributes { peer, traffic_class: 0, hop_limit: 1, flow_label: 0, source_port: None };
    let psn = Some(Psn::new(0xff_fff0));
    [
        QpAttributes::new(State::Init)
            .with_partition_index(0)
            .with_port(1)
            .with_access(Access::ALL),
        QpAttributes::new(State::Rtr)
            .with_path(path)
            .with_mtu(mtu)
            .with_destination(destination)
            .with_receive_psn(psn)
            .with_max_dest_rd_atomic(3)
            .with_min_rnr_timer(1)
            .with_selective_repeat(selective),
        QpAttributes::new(State::Rts)
            .with_send_psn(psn)
            .with_timeout(1)
            .with_retry_count(2)
            .with_rnr_retry(2)
            .with_max_rd_atomic(3),
    ]
}

fn run_script(script: &mut Unstructured<'_>) -> Result<()> {
    let options = TransportOptions::default()
        .with_send_depth(script.int_in_range(1..=9)?)
        .with_window(script.int_in_range(1..=9)?)
        .with_read_chunk(script.int_in_range(1..=5)?);
    let selective = script.arbitrary()?;
    let mtu = Mtu::ALL[script.int_in_range(0..=2)?];
    let mut endpoints = [[1, 2], [2, 1]].map(|qpns| Endpoint::new(qpns, options, mtu, selective));
    let mut now = Instant::default();
    while !script.is_empty() {
        let at = usize::from(script.arbitrary::<bool>()?);
        match script.int_in_range(0..=9)? {
            0 | 1 => post(script, &mut endpoints[at])?,
            2..=4 => exchange(script, &mut endpoints, at, now)?,
            5 | 6 => {
                let (headers, payload_len) = forged(script)?;
                let rx = RxPacket { headers: &headers, payload_len, marked: false };
                endpoints[at].deliver(now, &rx);
            }
            7 => {
                now =
                    now + core::time::Duration::from_nanos(u64::from(u16::arbitrary(script)?) * 8);
                endpoints[at].qp.handle_timeout(now);
                endpoints[at].check();
            }
            8 => {
                let answers: [u8; 4] = script.arbitrary()?;
                endpoints[at].host.answers.extend(answers);
            }
            _ => modify(script, &mut endpoints[at])?,
        }
        assert!(endpoints[at].qp.poll_timeout(now) <= Instant::NEVER);
    }
    Ok(())
}

fn post(script: &mut Unstructured<'_>, endpoint: &mut Endpoint) -> Result<()> {
    let at = Remote { address: script.arbitrary()?, rkey: script.arbitrary()? };
    let len = u32::from(script.arbitrary::<u16>()? & 0xfff);
    let (op, len) = match script.int_in_range(0..=9)? {
        0 => (SendOp::Send, len),
        1 => (SendOp::SendImm(3), len),
        2 => (SendOp::SendInvalidate(3), len),
        3 => (SendOp::Write(at), len),
        4 => (SendOp::WriteImm(at, 3), len),
        5 => (SendOp::Read(at), len),
        6 => (SendOp::Atomic(at, Atomic::FetchAdd { add: 1 }), 8),
        7 => (SendOp::Local, 0),
        8 => (SendOp::Bad(Status::LocalQpOperation), 0),
        _ => (SendOp::Read(at), script.arbitrary()?),
    };
    let fence = [Fence::None, Fence::Reads, Fence::All][script.int_in_range(0..=2)?];
    let solicited = script.arbitrary()?;
    let work = SendWr { fence, solicited, ..SendWr::new(endpoint.posted, op, len) };
    if endpoint.qp.post(work).is_ok() {
        endpoint.posted += 1;
    }
    endpoint.check();
    Ok(())
}

/// Delivers some packets of one end to the other; some are lost or duplicated.
fn exchange(
    script: &mut Unstructured<'_>,
    endpoints: &mut [Endpoint; 2],
    at: usize,
    now: Instant,
) -> Result<()> {
    for _ in 0..script.int_in_range(1..=8)? {
        let Some(packet) = endpoints[at].transmit(now) else { break };
        let mut buffer = [0; 8192];
        let len = packet.payload.map_or(0, |payload| payload.len);
        assert!(
            packet.headers.emit(&mut buffer, len as usize).is_some(),
            "headers that cannot be encoded"
        );
        let link_fate = script.int_in_range(0..=9)?;
        let rx = RxPacket { headers: &packet.headers, payload_len: len, marked: link_fate == 8 };
        for _ in 0..[0, 2].get(link_fate).copied().unwrap_or(1) {
            endpoints[1 - at].deliver(now, &rx);
        }
    }
    Ok(())
}

fn modify(script: &mut Unstructured<'_>, endpoint: &mut Endpoint) -> Result<()> {
    let to = [State::Err, State::Sqd, State::Rts, State::Init, State::Rtr];
    let attr = QpAttributes::new(to[script.int_in_range(0..=4)?]);
    let before = endpoint.qp.state();
    if endpoint.qp.modify(&attr).is_err() {
        assert_eq!(endpoint.qp.state(), before, "a rejected transition changed the state");
    }
    endpoint.check();
    Ok(())
}

/// A forged packet with a PSN near those in use.
fn forged(script: &mut Unstructured<'_>) -> Result<(Headers, u32)> {
    let reth = Reth {
        address: script.arbitrary()?,
        rkey: script.arbitrary()?,
        len: script.arbitrary::<u32>()? >> script.int_in_range(0..=31)?,
    };
    let syndrome = Syndrome::from_byte(script.arbitrary()?);
    let aeth = Aeth { syndrome, msn: 1 };
    let address = reth.address & !u64::from(script.arbitrary::<bool>()?);
    let atomic = AtomicEth { address, rkey: reth.rkey, swap_or_add: 1, compare: 2 };
    let deth = Deth { qkey: 1, source_qp: 2 };
    let extensions = [
        Extension::None,
        Extension::Imm(1),
        Extension::Reth(reth),
        Extension::RethImm(reth, 1),
        Extension::Aeth(aeth),
        Extension::AethAtomic(aeth, 1),
        Extension::AethSack(aeth, Sack(script.arbitrary()?)),
        Extension::Atomic(atomic),
        Extension::Invalidate(1),
        Extension::Deth(deth),
        Extension::Cnp,
    ];
    // Opcode and extension need not match: callers that bypass the parser must not cause harm
    // either.
    let opcodes: Vec<_> = Opcode::all().collect();
    let opcode = *script.choose(&opcodes)?;
    let psn = Psn::new(0xff_fff0).add(u32::from(script.arbitrary::<u8>()?)).add(0xff_ffe0);
    let headers = Headers {
        ack_request: script.arbitrary()?,
        partition: if script.ratio(1, 20)? { 1 } else { 0xffff },
        ..Headers::new(opcode, 1, psn, *script.choose(&extensions)?)
    };
    let payload_len = u32::from(script.arbitrary::<u16>()? % 1100);
    Ok((headers, payload_len))
}

//! The network: nodes, links and one event queue, in virtual time.

use core::time::Duration;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::net::Ipv4Addr;

use warpwire_proto::Instant;
use warpwire_proto::qp::{
    Access, HOLD_SLOTS, Mtu, PathAttributes, Pending, ProtocolEvent, QpAttributes, QpEvent, RcQp,
    ReceiveCompletion, ReceiveKind, RxPacket, SendCompletion, SendOp, SendQueueError, State,
    Status, TransportOptions,
};
use warpwire_proto::wire::icrc::Portable;
use warpwire_proto::wire::{IpRepr, Packet, UDP_PORT, UdpRepr, packet};
use warpwire_proto::{Psn, wire::ip};

use crate::sim::congested::Congestion;
use crate::sim::link::{Faults, Link};
use crate::sim::node::{
    App, Buffer, Node, PlannedWr, SimConn, SimHost, SimMemory, fetch, takes_receive,
};
use crate::sim::random::{Random, bytes_of};

/// Connection parameters of two queue pairs.
#[derive(Clone, Copy, Debug)]
pub struct ConnParams {
    pub options: TransportOptions,
    pub mtu: u32,
    pub psn: [u32; 2],
    pub timeout: u8,
    pub retry_count: u8,
    pub rnr_retry: u8,
    pub min_rnr_timer: u8,
    pub rd_atomic: u8,
    pub access: Access,
    pub receive_capacity: u32,
    /// Maximum delay until a consumed receive is posted again.
    pub receive_delay: Duration,
    pub page_faults: u32,
    /// Maximum delay of transmissions, so that responses accumulate; packets are handled as they
    /// arrive.
    pub poll_delay: Duration,
    /// Selective repeat at each end; if they differ, the ends were misconfigured.
    pub selective: [bool; 2],
    pub hold_failures: u32,
}

impl Default for ConnParams {
    fn default() -> Self {
        Self {
            options: TransportOptions::default(),
            mtu: 1024,
            psn: [0x10, 0x20],
            timeout: 8,
            retry_count: 7,
            rnr_retry: 7,
            min_rnr_timer: 1,
            rd_atomic: 4,
            access: Access::ALL,
            receive_capacity: 1 << 20,
            receive_delay: Duration::ZERO,
            page_faults: 0,
            poll_delay: Duration::ZERO,
            selective: [false; 2],
            hold_failures: 0,
        }
    }
}

/// A scheduled event.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum SimEvent {
    PacketArrives {
        node: usize,
        bytes: Vec<u8>,
        marked: bool,
    },
    Timer {
        node: usize,
        conn: usize,
    },
    Poll {
        node: usize,
        conn: usize,
    },
    NewReceive {
        node: usize,
        conn: usize,
    },
    NodeFails {
        node: usize,
    },
    Cut {
        from: usize,
        to: usize,
        cut: bool,
    },
    Pause {
        node: usize,
        conn: usize,
    },
    Resume {
        node: usize,
        conn: usize,
    },
    /// A TCP sender hears of a segment.
    Tcp {
        flow: usize,
        sent: Instant,
        lost: bool,
    },
}

pub struct Network {
    pub now: Instant,
    pub random: Random,
    pub nodes: Vec<Node>,
    links: BTreeMap<(usize, usize), Link>,
    params: Vec<Vec<ConnParams>>,
    event_queue: BinaryHeap<Reverse<(Instant, u64, SimEvent)>>,
    counter: u64,
    pub trace: bool,
    /// Number of packets sent.
    pub carried: u64,
    /// Whether all links are free of loss, duplication and reordering.
    pub clean: bool,
    /// Congestion control and queues; `None` without.
    pub congestion: Option<Congestion>,
}

pub fn address(node: usize) -> Ipv4Addr {
    Ipv4Addr::new(10, 0, (node >> 8) as u8, node as u8)
}

impl Network {
    pub fn new(seed: u64, nodes: usize) -> Self {
        let node =
            || Node { memory: SimMemory::default(), conns: Vec::new(), alive: true, malformed: 0 };
        Self {
            now: Instant::default(),
            random: Random::new(seed),
            nodes: (0..nodes).map(|_| node()).collect(),
            links: BTreeMap::new(),
            params: vec![Vec::new(); nodes],
            event_queue: BinaryHeap::new(),
            counter: 0,
            trace: std::env::var_os("WARPWIRE_TRACE").is_some(),
            carried: 0,
            clean: true,
            congestion: None,
        }
    }

    /// Adds a link in each direction.
    pub fn link(&mut self, a: usize, b: usize, faults: Faults) {
        self.clean &= faults.is_clean();
        self.links.insert((a, b), Link::new(faults));
        self.links.insert((b, a), Link::new(faults));
    }

    /// Connects two new queue pairs in RTS; returns their indices at `a` and `b`.
    pub fn connect(&mut self, a: usize, b: usize, params: ConnParams) -> [usize; 2] {
        let conns = [self.nodes[a].conns.len(), self.nodes[b].conns.len() + usize::from(a == b)];
        for (end, (node, peer)) in [(a, b), (b, a)].into_iter().enumerate() {
            let (mine, theirs) = (conns[end], conns[1 - end]);
            let mut qp = RcQp::new(number(mine), params.options);
            bring_to_rts(&mut qp, &params, end, number(theirs), address(peer));
            let app = App {
                key: 0x1000 + mine as u32,
                receive_capacity: params.receive_capacity,
                page_faults: params.page_faults,
                hold_failures: params.hold_failures,
                ..App::default()
            };
            let footprint = qp.footprint();
            self.nodes[node].conns.push(SimConn {
                qp,
                app,
                peer: (peer, theirs),
                timer: Instant::NEVER,
                poll_scheduled: false,
                held: vec![Vec::new(); HOLD_SLOTS as usize],
                footprint,
                path_in_flight: 0,
                waits: false,
                few_retries: params.retry_count < 7,
            });
            self.params[node].push(params);
        }
        conns
    }

    pub fn conn(&mut self, node: usize, conn: usize) -> &mut SimConn {
        &mut self.nodes[node].conns[conn]
    }

    pub fn at(&mut self, when: Instant, event_kind: SimEvent) {
        self.counter += 1;
        self.event_queue.push(Reverse((when, self.counter, event_kind)));
    }

    pub fn schedule_poll(&mut self, node: usize, conn: usize) {
        if !self.nodes[node].conns[conn].poll_scheduled {
            self.nodes[node].conns[conn].poll_scheduled = true;
            let max_delay = self.params[node][conn].poll_delay.as_nanos() as u64;
            let delay = Duration::from_nanos(self.random.below(max_delay + 1));
            self.at(self.now + delay, SimEvent::Poll { node, conn });
        }
    }

    /// Runs until every plan is complete; panics if that takes too long or no event is left before.
    pub fn run(&mut self) {
        self.start();
        let end = Instant::from_nanos(3_600_000_000_000);
        let mut steps = 0u64;
        while !self.is_done() && self.step() {
            steps += 1;
            assert!(
                self.now < end && steps < 20_000_000,
                "plans do not complete: {:?}",
                self.unfinished_conns()
            );
        }
        assert!(self.is_done(), "plans do not complete: {:?}", self.unfinished_conns());
    }

    /// Runs until no event is left: an idle network must come to rest.
    pub fn drain(&mut self) {
        let mut steps = 0u64;
        while self.step() {
            steps += 1;
            assert!(steps < 2_000_000, "an idle network keeps sending");
        }
        for conn in self.nodes.iter().filter(|node| node.alive).flat_map(|node| &node.conns) {
            let deadline = conn.qp.poll_timeout(self.now);
            assert_eq!(deadline, Instant::NEVER, "a timer without outstanding work");
        }
    }

    fn is_done(&self) -> bool {
        let done = |node: &Node| !node.alive || node.conns.iter().all(|conn| conn.app.is_done());
        self.nodes.iter().all(done)
    }

    fn unfinished_conns(&self) -> Vec<(usize, usize, String)> {
        let mut found = Vec::new();
        for (at, node) in self.nodes.iter().enumerate() {
            for (index, conn) in node.conns.iter().enumerate().filter(|(_, s)| !s.app.is_done()) {
                found.push((
                    at,
                    index,
                    format!("{} of {}; {:?}", conn.app.completed, conn.app.plan.len(), conn.qp),
                ));
            }
        }
        found.truncate(2);
        found
    }

    /// Executes the next event; returns false if there is none.
    pub fn step(&mut self) -> bool {
        let Some(Reverse((when, _, event_kind))) = self.event_queue.pop() else { return false };
        self.now = when;
        match event_kind {
            SimEvent::PacketArrives { node, bytes, marked } => self.arrive(node, &bytes, marked),
            SimEvent::Timer { node, conn } => {
                if self.nodes[node].conns[conn].timer <= self.now {
                    self.conn(node, conn).timer = Instant::NEVER;
                    let now = self.now;
                    self.conn(node, conn).qp.handle_timeout(now);
                    self.after(node, conn, true);
                }
            }
            SimEvent::Poll { node, conn } => {
                self.conn(node, conn).poll_scheduled = false;
                self.post_planned(node, conn);
                self.transmit(node, conn);
                self.after(node, conn, false);
            }
            SimEvent::NewReceive { node, conn } => self.conn(node, conn).app.post_receive(),
            SimEvent::Tcp { flow, sent, lost } => self.on_tcp(flow, sent, lost),
            SimEvent::NodeFails { node } => self.nodes[node].alive = false,
            SimEvent::Cut { from, to, cut } => {
                self.links.get_mut(&(from, to)).expect("a link").cut = cut;
            }
            SimEvent::Pause { node, conn } => {
                let attr = QpAttributes::new(State::Sqd).with_notify_drained(true);
                let _ = self.conn(node, conn).qp.modify(&attr);
                self.after(node, conn, true);
            }
            SimEvent::Resume { node, conn } => {
                let qp = &mut self.conn(node, conn).qp;
                if qp.state() == State::Sqd {
                    qp.modify(&QpAttributes::new(State::Rts))
                        .expect("a transition from SQD to RTS");
                }
                self.conn(node, conn).app.drained_at = None;
                self.after(node, conn, true);
            }
        }
        true
    }

    fn post_planned(&mut self, node: usize, conn: usize) {
        let SimConn { qp, app, .. } = self.conn(node, conn);
        while let Some(planned) = app.plan.get(app.posted) {
            match qp.post(planned.work) {
                Ok(()) => app.posted += 1,
                Err(SendQueueError::Full) => break,
                Err(other) => panic!("{other}: {planned:?}"),
            }
        }
    }

    fn arrive(&mut self, at: usize, bytes: &[u8], marked: bool) {
        if !self.nodes[at].alive {
            return;
        }
        let Some(conn) = self.deliver(at, bytes, marked, false) else { return };
        self.after(at, conn, true);
        while let Some(slot) = self.conn(at, conn).qp.take_held() {
            let bytes = std::mem::take(&mut self.conn(at, conn).held[slot as usize]);
            assert!(!bytes.is_empty(), "a slot without a packet");
            self.deliver(at, &bytes, false, true);
            self.after(at, conn, true);
        }
    }

    /// Passes a packet to its queue pair; returns the index of that.
    fn deliver(&mut self, at: usize, bytes: &[u8], marked: bool, was_held: bool) -> Option<usize> {
        let now = self.now;
        let node = &mut self.nodes[at];
        let packet = match Packet::new_checked(bytes) {
            Ok(packet) if packet.has_valid_icrc::<Portable>() => packet,
            _ => {
                node.malformed += 1;
                return None;
            }
        };
        let transport = packet.transport();
        let headers = transport.headers();
        let index = headers.destination_qp.wrapping_sub(number(0)) as usize;
        let SimConn { qp, app, peer, held, .. } = node.conns.get_mut(index)?;
        assert_eq!(packet.ip().source, address(peer.0), "a packet at the wrong node");
        let payload = transport.payload();
        let rx = RxPacket { headers: &headers, payload_len: payload.len() as u32, marked };
        let (memory, random) = (&mut node.memory, &mut self.random);
        let mut host = SimHost { memory, app, payload, random, frame: bytes, held };
        let outcome = match was_held {
            false => qp.handle_packet(now, &rx, &mut host),
            true => qp.handle_held(now, &rx, &mut host),
        };
        if self.trace {
            let arrow = if was_held { "<<" } else { "<-" };
            println!("{:>12} {at} {arrow} {headers} {} {outcome:?}", now.as_nanos(), payload.len());
        }
        Some(index)
    }

    /// After any call: handles events, sets the timer, and schedules a poll if `replan` or there
    /// were events.
    fn after(&mut self, node: usize, conn: usize, replan: bool) {
        if !self.nodes[node].alive {
            return;
        }
        let mut had_events = false;
        while let Some(event) = self.conn(node, conn).qp.poll_event() {
            had_events = true;
            match event {
                ProtocolEvent::Sent(completion) => self.completed(node, conn, completion),
                ProtocolEvent::Received(receive_completion) => {
                    self.received(node, conn, receive_completion)
                }
                ProtocolEvent::Async(QpEvent::Drained) => {
                    let next = self.conn(node, conn).qp.next_psns().1;
                    self.conn(node, conn).app.drained_at = Some(next);
                }
                ProtocolEvent::Async(_) => {}
            }
        }
        let now = self.now;
        let state = self.conn(node, conn);
        assert_eq!(state.qp.footprint(), state.footprint, "invariant 5");
        if let Some(drained_at) = state.app.drained_at {
            assert_eq!(state.qp.next_psns().1, drained_at, "a drained queue sent a new message");
        }
        self.update_path(node, conn);
        let state = self.conn(node, conn);
        let deadline = state.qp.poll_timeout(now);
        if deadline < state.timer {
            state.timer = deadline;
            self.at(deadline, SimEvent::Timer { node, conn });
        }
        let faulted = core::mem::take(&mut self.conn(node, conn).app.faulted);
        if faulted && !self.conn(node, conn).poll_scheduled {
            self.conn(node, conn).poll_scheduled = true;
            self.at(now + Duration::from_micros(3), SimEvent::Poll { node, conn });
        }
        if replan || had_events {
            self.schedule_poll(node, conn);
        }
        self.check_liveness(node, conn);
    }

    /// Something will happen next to every queue pair with work: a timer is armed, it is going to
    /// be polled, or, if it has nothing in flight, it waits for room on its path, and the queue
    /// pairs that take that room are not silent forever.
    fn check_liveness(&self, node: usize, conn: usize) {
        let state = &self.nodes[node].conns[conn];
        let qp = &state.qp;
        let is_waiting = state.waits && qp.in_flight() == 0;
        assert!(
            qp.outstanding() == 0
                || qp.poll_timeout(self.now) != Instant::NEVER
                || state.poll_scheduled
                || is_waiting
                || qp.state() == State::Sqd && qp.is_drained(),
            "work is outstanding, and nothing will happen: {qp:?}"
        );
        self.check_waiting(node, state.peer.0);
    }

    fn transmit(&mut self, from: usize, conn: usize) {
        if !self.nodes[from].alive {
            return;
        }
        self.admit(from, conn);
        loop {
            let now = self.now;
            let Node { memory, conns, .. } = &mut self.nodes[from];
            let SimConn { qp, app, peer, held, .. } = &mut conns[conn];
            let (to, random) = (peer.0, &mut self.random);
            let mut host = SimHost { memory, app, payload: &[], random, frame: &[], held };
            let pending = qp.pending(now);
            let Some(packet) = qp.poll_transmit(now, &mut host) else { break };
            match pending {
                Pending::Nothing => panic!("not pending: {}", packet.headers),
                Pending::Responses => assert!(packet.headers.opcode.is_response()),
                Pending::Requests => {}
            }
            // Memory may be paged out after the check, too.
            if packet.payload.is_some() && host.fault() {
                qp.undo_transmit(&packet);
                break;
            }
            let payload =
                packet.payload.map_or_else(Vec::new, |p| fetch(memory, app, p.from, p.len));
            if self.trace {
                println!("{:>12} {from} -> {} {}", now.as_nanos(), packet.headers, payload.len());
            }
            let bytes = self.build(from, to, &packet.headers, &payload);
            self.carried += 1;
            let Some((leaves, queue_marks)) = self.enqueue(from, to, bytes.len()) else { continue };
            let link = self.links.get_mut(&(from, to)).expect("a link between connected nodes");
            for arrival in link.carry(leaves, &bytes, &mut self.random) {
                let (bytes, marked) = (arrival.bytes, arrival.marked || queue_marks);
                self.at(arrival.at, SimEvent::PacketArrives { node: to, bytes, marked });
            }
        }
    }

    /// Starts all connections, without waiting for anything.
    pub fn start(&mut self) {
        for node in 0..self.nodes.len() {
            for conn in 0..self.nodes[node].conns.len() {
                self.schedule_poll(node, conn);
            }
        }
    }

    fn build(
        &self,
        from: usize,
        to: usize,
        headers: &warpwire_proto::wire::Headers,
        payload: &[u8],
    ) -> Vec<u8> {
        let ip = IpRepr {
            source: address(from).into(),
            destination: address(to).into(),
            traffic_class: ip::ECN_CAPABLE,
            hop_limit: 64,
            identification: 0,
            payload_len: 0,
        };
        let udp = UdpRepr { source_port: 0xc000, destination_port: UDP_PORT, payload_len: 0 };
        let mut bytes = vec![0; 28 + headers.wire_len(payload.len())];
        let len = packet::build::<Portable>(&mut bytes, ip, udp, headers, payload);
        assert_eq!(len, Some(bytes.len()));
        bytes
    }

    fn received(&mut self, node: usize, conn: usize, receive_completion: ReceiveCompletion) {
        let now = self.now;
        let (peer_node, peer_conn) = self.conn(node, conn).peer;
        let delay = self.params[node][conn].receive_delay;
        let app = &mut self.conn(node, conn).app;
        let Buffer { id, bytes } = app.in_use.pop_front().expect("a receive in use");
        assert_eq!(
            receive_completion.id, id,
            "invariant 2: receives complete in the order of their use"
        );
        if receive_completion.status != Status::Success || app.expects_forged_packets {
            return;
        }
        let index = app.delivered;
        app.delivered += 1;
        let random = self.random.below(delay.as_nanos() as u64 + 1);
        self.at(now + Duration::from_nanos(random), SimEvent::NewReceive { node, conn });
        // Invariant 1: this is the next message that the peer posted, complete.
        let plan = &self.nodes[peer_node].conns[peer_conn].app.plan;
        let mut messages = plan.iter().filter(|planned| takes_receive(&planned.work.op));
        let sent = messages.nth(index).expect("invariant 1: a message that was not sent");
        let carried = match sent.work.op {
            SendOp::SendImm(imm) => ReceiveKind::Imm(imm),
            SendOp::SendInvalidate(key) => ReceiveKind::Invalidated(key),
            SendOp::WriteImm(_, imm) => ReceiveKind::WriteImm(imm),
            _ => ReceiveKind::Data,
        };
        assert_eq!(
            (receive_completion.len, receive_completion.kind),
            (sent.work.len, carried),
            "invariant 1"
        );
        assert_eq!(receive_completion.solicited, sent.work.solicited, "invariant 1");
        if !matches!(sent.work.op, SendOp::WriteImm(..)) {
            assert!(bytes.iter().copied().eq(bytes_of(sent.name, 0, sent.work.len)), "invariant 1");
        }
    }

    fn completed(&mut self, node: usize, conn: usize, completion: SendCompletion) {
        let (peer_node, peer_conn) = self.conn(node, conn).peer;
        let app = &mut self.conn(node, conn).app;
        let index = app.completed;
        assert_eq!(completion.id, index as u64, "invariant 2: completions in order, one each");
        app.completed += 1;
        let failed_before = index > 0 && app.plan[index - 1].status != Some(Status::Success);
        let status = completion.status;
        if failed_before {
            assert_eq!(status, Status::Flushed, "invariant 3: all after a failure is flushed");
        }
        app.plan[index].status = Some(status);
        if status != Status::Success {
            return;
        }
        let planned = app.plan[index].clone();
        let is_atomic = |planned: &&PlannedWr| matches!(planned.work.op, SendOp::Atomic(..));
        let atomics = match is_atomic(&&planned) {
            true => app.plan[..index].iter().filter(is_atomic).count(),
            false => 0,
        };
        let peer = &mut self.nodes[peer_node];
        let len = planned.work.len;
        match planned.work.op {
            SendOp::Write(at) | SendOp::WriteImm(at, _) => {
                let there = peer.memory.slice(at, len).expect("the range was checked");
                let correct = there.iter().copied().eq(bytes_of(planned.name, 0, len));
                assert!(len == 0 || correct, "invariant 1: written bytes");
            }
            SendOp::Read(_) => {
                let correct = planned.read.iter().copied().eq(bytes_of(planned.name, 0, len));
                assert!(correct, "invariant 1: read bytes");
            }
            SendOp::Atomic(..) => {
                let before = peer.conns[peer_conn].app.executed.get(atomics).copied();
                assert_eq!(planned.result, before, "invariant 4: executed once, in order");
                assert!(before.is_some(), "invariant 4");
            }
            _ => {}
        }
    }
}

pub fn number(conn: usize) -> u32 {
    0x100 + conn as u32
}

fn bring_to_rts(qp: &mut RcQp, params: &ConnParams, end: usize, destination: u32, peer: Ipv4Addr) {
    let (send_psn, receive_psn) = (Psn::new(params.psn[end]), Psn::new(params.psn[1 - end]));
    let path = PathAttributes {
        peer: (peer, UDP_PORT).into(),
        traffic_class: 0,
        hop_limit: 64,
        flow_label: 0,
        source_port: None,
    };
    let steps = [
        QpAttributes::new(State::Init)
            .with_partition_index(0)
            .with_port(1)
            .with_access(params.access),
        QpAttributes::new(State::Rtr)
            .with_path(path)
            .with_mtu(Mtu::new(params.mtu))
            .with_destination(destination)
            .with_receive_psn(receive_psn)
            .with_max_dest_rd_atomic(params.rd_atomic)
            .with_min_rnr_timer(params.min_rnr_timer)
            .with_selective_repeat(params.selective[end]),
        QpAttributes::new(State::Rts)
            .with_send_psn(send_psn)
            .with_timeout(params.timeout)
            .with_retry_count(params.retry_count)
            .with_rnr_retry(params.rnr_retry)
            .with_max_rd_atomic(params.rd_atomic),
    ];
    for step in steps {
        qp.modify(&step).expect("a transition towards RTS");
    }
}

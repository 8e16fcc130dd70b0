//! The network: nodes, links and one queue of things to come, in virtual time.

use core::time::Duration;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::net::Ipv4Addr;

use warpwire_proto::Instant;
use warpwire_proto::qp::{
    Access, Arrived, Carried, Change, Completion, Event, Mtu, Notice, Op, Options, Path, PostError,
    Qp, Receipt, State, Status,
};
use warpwire_proto::wire::icrc::Portable;
use warpwire_proto::wire::{IpRepr, Packet, UDP_PORT, UdpRepr, packet};
use warpwire_proto::{Psn, wire::ip};

use crate::sim::link::{Faults, Link};
use crate::sim::node::{App, Buffer, Memory, Node, Side, View, fetch, takes_receive};
use crate::sim::random::{Random, bytes_of};

/// How two queue pairs are connected.
#[derive(Clone, Copy, Debug)]
pub struct Terms {
    pub options: Options,
    pub mtu: u32,
    pub psn: [u32; 2],
    pub timeout: u8,
    pub retry_count: u8,
    pub rnr_retry: u8,
    pub min_rnr_timer: u8,
    pub rd_atomic: u8,
    pub access: Access,
    pub receive_capacity: u32,
    /// How long a receive takes to be posted again after use.
    pub receive_delay: Duration,
    pub page_faults: u32,
    /// Packets are handled as they come, but what is to be sent waits up to this long: answers gather.
    pub poll_delay: Duration,
}

impl Default for Terms {
    fn default() -> Self {
        Self {
            options: Options::default(),
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
        }
    }
}

/// Something to come.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Happening {
    Arrives { node: usize, bytes: Vec<u8>, marked: bool },
    Timer { node: usize, side: usize },
    Poll { node: usize, side: usize },
    NewReceive { node: usize, side: usize },
    Dies { node: usize },
    Cut { from: usize, to: usize, cut: bool },
    Pause { node: usize, side: usize },
    Resume { node: usize, side: usize },
}

pub struct Net {
    pub now: Instant,
    pub random: Random,
    pub nodes: Vec<Node>,
    links: BTreeMap<(usize, usize), Link>,
    terms: Vec<Vec<Terms>>,
    coming: BinaryHeap<Reverse<(Instant, u64, Happening)>>,
    counter: u64,
    pub trace: bool,
    /// Packets on the wire, and those with payload.
    pub carried: u64,
    /// Nothing is lost, repeated or out of order.
    pub clean: bool,
}

pub fn address(node: usize) -> Ipv4Addr {
    Ipv4Addr::new(10, 0, (node >> 8) as u8, node as u8)
}

impl Net {
    pub fn new(seed: u64, nodes: usize) -> Self {
        let node =
            || Node { memory: Memory::default(), sides: Vec::new(), alive: true, malformed: 0 };
        Self {
            now: Instant::default(),
            random: Random::new(seed),
            nodes: (0..nodes).map(|_| node()).collect(),
            links: BTreeMap::new(),
            terms: vec![Vec::new(); nodes],
            coming: BinaryHeap::new(),
            counter: 0,
            trace: std::env::var_os("WARPWIRE_TRACE").is_some(),
            carried: 0,
            clean: true,
        }
    }

    /// Two links, there and back.
    pub fn link(&mut self, a: usize, b: usize, faults: Faults) {
        self.clean &= faults.is_clean();
        self.links.insert((a, b), Link::new(faults));
        self.links.insert((b, a), Link::new(faults));
    }

    /// Connects two new queue pairs, ready to send; returns their sides.
    pub fn connect(&mut self, a: usize, b: usize, terms: Terms) -> [usize; 2] {
        let sides = [self.nodes[a].sides.len(), self.nodes[b].sides.len() + usize::from(a == b)];
        for (end, (node, peer)) in [(a, b), (b, a)].into_iter().enumerate() {
            let (mine, theirs) = (sides[end], sides[1 - end]);
            let mut qp = Qp::new(number(mine), terms.options);
            bring_up(&mut qp, &terms, end, number(theirs), address(peer));
            let app = App {
                key: 0x1000 + mine as u32,
                receive_capacity: terms.receive_capacity,
                page_faults: terms.page_faults,
                ..App::default()
            };
            let footprint = qp.footprint();
            self.nodes[node].sides.push(Side {
                qp,
                app,
                peer: (peer, theirs),
                timer: Instant::NEVER,
                poll_planned: false,
                footprint,
                few_tries: terms.retry_count < 7,
            });
            self.terms[node].push(terms);
        }
        sides
    }

    pub fn side(&mut self, node: usize, side: usize) -> &mut Side {
        &mut self.nodes[node].sides[side]
    }

    pub fn at(&mut self, when: Instant, what: Happening) {
        self.counter += 1;
        self.coming.push(Reverse((when, self.counter, what)));
    }

    pub fn poll_soon(&mut self, node: usize, side: usize) {
        if !self.nodes[node].sides[side].poll_planned {
            self.nodes[node].sides[side].poll_planned = true;
            let most = self.terms[node][side].poll_delay.as_nanos() as u64;
            let delay = Duration::from_nanos(self.random.below(most + 1));
            self.at(self.now + delay, Happening::Poll { node, side });
        }
    }

    /// Runs until every plan is at its end, or nothing is to come; panics if that takes too long.
    pub fn run(&mut self) {
        for node in 0..self.nodes.len() {
            for side in 0..self.nodes[node].sides.len() {
                self.poll_soon(node, side);
            }
        }
        let end = Instant::from_nanos(3_600_000_000_000);
        let mut steps = 0u64;
        while !self.is_done() && self.step() {
            steps += 1;
            assert!(
                self.now < end && steps < 20_000_000,
                "every run ends: {:?}",
                self.unfinished()
            );
        }
        assert!(self.is_done(), "every run ends: {:?}", self.unfinished());
    }

    /// Runs on until nothing is to come: a network that has nothing to do comes to rest.
    pub fn settle(&mut self) {
        let mut steps = 0u64;
        while self.step() {
            steps += 1;
            assert!(steps < 2_000_000, "a network at rest stays so");
        }
        for side in self.nodes.iter().filter(|node| node.alive).flat_map(|node| &node.sides) {
            let deadline = side.qp.poll_timeout(self.now);
            assert_eq!(deadline, Instant::NEVER, "nothing is waited for");
        }
    }

    fn is_done(&self) -> bool {
        let done = |node: &Node| !node.alive || node.sides.iter().all(|side| side.app.is_done());
        self.nodes.iter().all(done)
    }

    fn unfinished(&self) -> Vec<(usize, usize, String)> {
        let mut found = Vec::new();
        for (at, node) in self.nodes.iter().enumerate() {
            for (index, side) in node.sides.iter().enumerate().filter(|(_, s)| !s.app.is_done()) {
                found.push((
                    at,
                    index,
                    format!("{} of {}; {:?}", side.app.completed, side.app.plan.len(), side.qp),
                ));
            }
        }
        found.truncate(2);
        found
    }

    /// The next thing happens; false if there is none.
    pub fn step(&mut self) -> bool {
        let Some(Reverse((when, _, what))) = self.coming.pop() else { return false };
        self.now = when;
        match what {
            Happening::Arrives { node, bytes, marked } => self.arrive(node, &bytes, marked),
            Happening::Timer { node, side } => {
                if self.nodes[node].sides[side].timer <= self.now {
                    self.side(node, side).timer = Instant::NEVER;
                    let now = self.now;
                    self.side(node, side).qp.handle_timeout(now);
                    self.after(node, side, true);
                }
            }
            Happening::Poll { node, side } => {
                self.side(node, side).poll_planned = false;
                self.post_plan(node, side);
                self.transmit(node, side);
                self.after(node, side, false);
            }
            Happening::NewReceive { node, side } => self.side(node, side).app.make_receive(),
            Happening::Dies { node } => self.nodes[node].alive = false,
            Happening::Cut { from, to, cut } => {
                self.links.get_mut(&(from, to)).expect("a link").cut = cut;
            }
            Happening::Pause { node, side } => {
                let change = Change { notify_drained: Some(true), ..Change::to(State::Sqd) };
                let _ = self.side(node, side).qp.modify(&change);
                self.after(node, side, true);
            }
            Happening::Resume { node, side } => {
                let qp = &mut self.side(node, side).qp;
                if qp.state() == State::Sqd {
                    qp.modify(&Change::to(State::Rts)).expect("SQD goes back to RTS");
                }
                self.side(node, side).app.drained_at = None;
                self.after(node, side, true);
            }
        }
        true
    }

    fn post_plan(&mut self, node: usize, side: usize) {
        let Side { qp, app, .. } = self.side(node, side);
        while let Some(planned) = app.plan.get(app.posted) {
            match qp.post(planned.work) {
                Ok(()) => app.posted += 1,
                Err(PostError::Full) => break,
                Err(other) => panic!("{other}: {planned:?}"),
            }
        }
    }

    fn arrive(&mut self, at: usize, bytes: &[u8], marked: bool) {
        if !self.nodes[at].alive {
            return;
        }
        let now = self.now;
        let node = &mut self.nodes[at];
        let packet = match Packet::new_checked(bytes) {
            Ok(packet) if packet.has_right_icrc::<Portable>() => packet,
            _ => {
                node.malformed += 1;
                return;
            }
        };
        let transport = packet.transport();
        let headers = transport.headers();
        let index = headers.destination_qp.wrapping_sub(number(0)) as usize;
        let Some(Side { qp, app, peer, .. }) = node.sides.get_mut(index) else { return };
        assert_eq!(packet.ip().source, address(peer.0), "the simulation does not misdirect");
        let payload = transport.payload();
        let arrived = Arrived { headers: &headers, payload_len: payload.len() as u32, marked };
        let mut view = View { memory: &mut node.memory, app, payload, random: &mut self.random };
        let outcome = qp.handle_packet(now, &arrived, &mut view);
        if self.trace {
            println!("{:>12} {at} <- {headers:?} {} {outcome:?}", now.as_nanos(), payload.len());
        }
        self.after(at, index, true);
    }

    /// What follows any call: events, a time to come back, and (after news) a time to send.
    fn after(&mut self, node: usize, side: usize, replan: bool) {
        if !self.nodes[node].alive {
            return;
        }
        let mut told = false;
        while let Some(event) = self.side(node, side).qp.poll_event() {
            told = true;
            match event {
                Event::Sent(completion) => self.completed(node, side, completion),
                Event::Received(receipt) => self.received(node, side, receipt),
                Event::Notice(Notice::Drained) => {
                    let next = self.side(node, side).qp.positions().1;
                    self.side(node, side).app.drained_at = Some(next);
                }
                Event::Notice(_) => {}
            }
        }
        let now = self.now;
        let state = self.side(node, side);
        assert_eq!(state.qp.footprint(), state.footprint, "invariant 5");
        if let Some(drained_at) = state.app.drained_at {
            assert_eq!(state.qp.positions().1, drained_at, "a drained queue begins nothing");
        }
        let deadline = state.qp.poll_timeout(now);
        if deadline < state.timer {
            state.timer = deadline;
            self.at(deadline, Happening::Timer { node, side });
        }
        let faulted = core::mem::take(&mut self.side(node, side).app.faulted);
        if faulted && !self.side(node, side).poll_planned {
            self.side(node, side).poll_planned = true;
            self.at(now + Duration::from_micros(3), Happening::Poll { node, side });
        }
        if replan || told {
            self.poll_soon(node, side);
        }
    }

    fn transmit(&mut self, from: usize, side: usize) {
        if !self.nodes[from].alive {
            return;
        }
        loop {
            let now = self.now;
            let Node { memory, sides, .. } = &mut self.nodes[from];
            let Side { qp, app, peer, .. } = &mut sides[side];
            let to = peer.0;
            let mut view = View { memory, app, payload: &[], random: &mut self.random };
            let Some(packet) = qp.poll_transmit(now, &mut view) else { break };
            let payload =
                packet.payload.map_or_else(Vec::new, |p| fetch(memory, app, p.from, p.len));
            if self.trace {
                println!("{:>12} {from} -> {:?} {}", now.as_nanos(), packet.headers, payload.len());
            }
            let bytes = self.build(from, to, &packet.headers, &payload);
            self.carried += 1;
            let link = self.links.get_mut(&(from, to)).expect("a link between connected nodes");
            for arrival in link.carry(now, &bytes, &mut self.random) {
                let (bytes, marked) = (arrival.bytes, arrival.marked);
                self.at(arrival.at, Happening::Arrives { node: to, bytes, marked });
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

    fn received(&mut self, node: usize, side: usize, receipt: Receipt) {
        let now = self.now;
        let (peer_node, peer_side) = self.side(node, side).peer;
        let delay = self.terms[node][side].receive_delay;
        let app = &mut self.side(node, side).app;
        let Buffer { id, bytes } = app.in_use.pop_front().expect("a receive in use");
        assert_eq!(receipt.id, id, "invariant 2: receives end in the order of their use");
        if receipt.status != Status::Success || app.expects_forgeries {
            return;
        }
        let index = app.delivered;
        app.delivered += 1;
        let random = self.random.below(delay.as_nanos() as u64 + 1);
        self.at(now + Duration::from_nanos(random), Happening::NewReceive { node, side });
        // Invariant 1: it is the next message that the peer posted, whole.
        let plan = &self.nodes[peer_node].sides[peer_side].app.plan;
        let mut messages = plan.iter().filter(|planned| takes_receive(&planned.work.op));
        let sent = messages.nth(index).expect("invariant 1: nobody sent this");
        let carried = match sent.work.op {
            Op::SendImm(imm) => Carried::Imm(imm),
            Op::SendInvalidate(key) => Carried::Invalidated(key),
            Op::WriteImm(_, imm) => Carried::WriteImm(imm),
            _ => Carried::Data,
        };
        assert_eq!((receipt.len, receipt.carried), (sent.work.len, carried), "invariant 1");
        assert_eq!(receipt.solicited, sent.work.solicited, "invariant 1");
        if !matches!(sent.work.op, Op::WriteImm(..)) {
            assert!(bytes.iter().copied().eq(bytes_of(sent.name, 0, sent.work.len)), "invariant 1");
        }
    }

    fn completed(&mut self, node: usize, side: usize, completion: Completion) {
        let (peer_node, peer_side) = self.side(node, side).peer;
        let app = &mut self.side(node, side).app;
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
        let atomics =
            app.plan[..index].iter().filter(|p| matches!(p.work.op, Op::Atomic(..))).count();
        let peer = &mut self.nodes[peer_node];
        let len = planned.work.len;
        match planned.work.op {
            Op::Write(at) | Op::WriteImm(at, _) => {
                let there = peer.memory.slice(at, len).expect("the range was checked");
                let right = there.iter().copied().eq(bytes_of(planned.name, 0, len));
                assert!(len == 0 || right, "invariant 1: written bytes");
            }
            Op::Read(_) => {
                let right = planned.read.iter().copied().eq(bytes_of(planned.name, 0, len));
                assert!(right, "invariant 1: read bytes");
            }
            Op::Atomic(..) => {
                let before = peer.sides[peer_side].app.executed.get(atomics).copied();
                assert_eq!(planned.result, before, "invariant 4: executed once, in order");
                assert!(before.is_some(), "invariant 4");
            }
            _ => {}
        }
    }
}

pub fn number(side: usize) -> u32 {
    0x100 + side as u32
}

fn bring_up(qp: &mut Qp, terms: &Terms, end: usize, destination: u32, peer: Ipv4Addr) {
    let (send_psn, receive_psn) = (Psn::new(terms.psn[end]), Psn::new(terms.psn[1 - end]));
    let path =
        Path { peer: (peer, UDP_PORT).into(), traffic_class: 0, hop_limit: 64, flow_label: 0 };
    let steps = [
        Change {
            partition_index: Some(0),
            port: Some(1),
            access: Some(terms.access),
            ..Change::to(State::Init)
        },
        Change {
            path: Some(path),
            mtu: Mtu::new(terms.mtu),
            destination: Some(destination),
            receive_psn: Some(receive_psn),
            max_dest_rd_atomic: Some(terms.rd_atomic),
            min_rnr_timer: Some(terms.min_rnr_timer),
            ..Change::to(State::Rtr)
        },
        Change {
            send_psn: Some(send_psn),
            timeout: Some(terms.timeout),
            retry_count: Some(terms.retry_count),
            rnr_retry: Some(terms.rnr_retry),
            max_rd_atomic: Some(terms.rd_atomic),
            ..Change::to(State::Rts)
        },
    ];
    for step in steps {
        qp.modify(&step).expect("the steps to RTS");
    }
}

//! The engine's part of UD queue pairs: destinations, transmit and receive.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use warpwire_proto::Instant;
use warpwire_proto::qp::{Datagram, RxPacket, Status};
use warpwire_proto::wire::Transport;
use warpwire_proto::wire::packet::{BTH_LEN, ICRC_LEN};

use super::transmit::{BUDGET, BUDGET_BYTES, TxOutcome, gather};
use super::{Core, Engine};
use crate::error::{Error, Kind, Result};
use crate::hca::host::HostView;
use crate::hca::protocol::{DatagramHostView, Protocol};
use crate::hca::qpc::QpContext;
use crate::hca::stats::DropReason;
use crate::link::{FlowId, Frame, ReserveError};

/// How long a datagram waits for room on its link. Without a bound, one for a peer that stopped
/// draining would block all behind it: there are no ACKs whose absence would fail it.
const TX_TIMEOUT: Duration = Duration::from_millis(10);

/// The peers that datagrams may be sent to: one flow each, reference-counted by address handles.
///
/// WQEs name their destination by address, as ConnectX's do. One that names a peer without a flow
/// fails instead of opening a flow: that is slow, and a poster could request any number of them.
#[derive(Debug, Default)]
pub(super) struct Destinations {
    flows: HashMap<(IpAddr, u16), Destination>,
}

#[derive(Debug)]
struct Destination {
    peer: SocketAddr,
    flow: FlowId,
    refs: usize,
    /// Since when the link has had no room for its packets.
    full_since: Option<Instant>,
}

impl Destination {
    /// Called when the link has no room: whether the datagram waits for some.
    #[cold]
    fn should_wait(&mut self, now: Instant) -> bool {
        now - *self.full_since.get_or_insert(now) < TX_TIMEOUT
    }
}

fn key(peer: SocketAddr) -> (IpAddr, u16) {
    (peer.ip(), peer.port())
}

impl Destinations {
    fn find(&mut self, peer: SocketAddr) -> Option<&mut Destination> {
        self.flows.get_mut(&key(peer))
    }
}

impl Engine {
    /// Opens, or references once more, the flow to a peer.
    pub(in crate::hca) fn open_destination(&mut self, peer: SocketAddr) -> Result<()> {
        let flows = &mut self.core.destinations.flows;
        if let Some(known) = flows.get_mut(&key(peer)) {
            if known.peer != peer {
                return Err(Error::new(Kind::Busy, format!("send datagrams to {peer}"))
                    .why(format!("{} is in use, and a WQE has no IPv6 scope", known.peer))
                    .fix("drop the handles for that address, or open another context"));
            }
            known.refs += 1;
            return Ok(());
        }
        let flow = self.link.open(peer, 0)?;
        flows.insert(key(peer), Destination { peer, flow, refs: 1, full_since: None });
        Ok(())
    }

    pub(in crate::hca) fn close_destination(&mut self, peer: SocketAddr) {
        let flows = &mut self.core.destinations.flows;
        let Some(known) = flows.get_mut(&key(peer)) else { return };
        known.refs -= 1;
        if known.refs == 0 {
            self.link.close(known.flow);
            flows.remove(&key(peer));
        }
    }

    /// Sends datagrams of a queue pair until its budget is spent.
    pub(super) fn transmit_datagrams(&mut self, now: Instant, index: u32) -> (usize, TxOutcome) {
        let Core { qpcs, registry, srqs, totals, destinations, .. } = &mut self.core;
        let Some(Some(qpc)) = qpcs.get_mut(index as usize) else { return (0, TxOutcome::Done) };
        let QpContext { qp: Protocol::Datagram(datagrams), qp_memory, active, .. } = &mut **qpc
        else {
            return (0, TxOutcome::Done);
        };
        let ud = &mut datagrams.ud;
        let (mut count, mut bytes) = (0, 0);
        let outcome = loop {
            if count == BUDGET || bytes >= BUDGET_BYTES {
                break TxOutcome::More;
            }
            let Some(next) = ud.peek_transmit() else { break TxOutcome::Done };
            let Some(to) = qp_memory.address(next.id).and_then(|to| destinations.find(to.peer()))
            else {
                ud.fail_transmit(Status::LocalQpOperation);
                continue;
            };
            let packet_len = wire_len(&next);
            let slot = match self.link.reserve(to.flow, packet_len) {
                Err(ReserveError::Full) if to.should_wait(now) => break TxOutcome::LinkFull,
                Err(ReserveError::Full) => Err(DropReason::NoRoom),
                Err(_) => Err(DropReason::NoFlow),
                Ok(slot) => {
                    to.full_since = None;
                    Ok(slot)
                }
            };
            let view = HostView { qp_memory, registry, srqs, payload: &[], packet: &[] };
            let Some(packet) = ud.poll_transmit(&mut DatagramHostView { view, frame: None }) else {
                break TxOutcome::Done;
            };
            let len = next.len as usize;
            let emit = |slot: &mut [u8]| packet.headers.emit(slot, len).ok_or(DropReason::TooLong);
            let (at, slot) = match slot.and_then(|slot| Ok((emit(slot)?, slot))) {
                Ok(placed) => placed,
                Err(reason) => {
                    totals.count_drop(reason);
                    continue;
                }
            };
            let part = &mut slot[at..at + len];
            if let Some(payload) = packet.payload
                && gather(qp_memory, registry, payload, part).is_err()
            {
                totals.count_drop(DropReason::MemoryGone);
                continue;
            }
            self.link.commit();
            count += 1;
            bytes += packet_len;
        };
        if matches!(outcome, TxOutcome::Done) {
            *active = false;
        }
        self.core.post_process(now, index);
        (count, outcome)
    }
}

/// The length of a datagram's packet, from the BTH through the ICRC.
fn wire_len(datagram: &Datagram) -> usize {
    const DETH_LEN: usize = 8;
    let imm = if datagram.imm.is_some() { 4 } else { 0 };
    BTH_LEN + DETH_LEN + imm + (datagram.len as usize).next_multiple_of(4) + ICRC_LEN
}

impl Core {
    /// Handles a packet for a datagram queue pair, from any sender.
    pub(super) fn on_datagram(
        &mut self,
        now: Instant,
        index: u32,
        transport: &Transport<'_>,
        frame: &Frame<'_>,
    ) {
        let Core { qpcs, registry, srqs, totals, .. } = self;
        let Some(Some(qpc)) = qpcs.get_mut(index as usize) else { return };
        let QpContext { qp: Protocol::Datagram(datagrams), qp_memory, .. } = &mut **qpc else {
            return;
        };
        totals.packets_received += 1;
        let (headers, payload) = (transport.headers(), transport.payload());
        let payload_len = payload.len() as u32;
        let rx = RxPacket { headers: &headers, payload_len, marked: frame.is_marked() };
        datagrams.from = frame.from;
        let view = HostView { qp_memory, registry, srqs, payload, packet: &[] };
        let mut view = DatagramHostView { view, frame: Some(frame) };
        // Discarded packets are counted by the queue pair.
        let _ = datagrams.ud.handle_packet(&rx, &mut view);
        self.post_process(now, index);
    }
}

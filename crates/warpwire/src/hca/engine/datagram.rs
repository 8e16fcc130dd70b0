//! The engine's part for datagrams: whom it can send to, and a turn to send.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use warpwire_proto::Instant;
use warpwire_proto::qp::{Arrived, Datagram, Status};
use warpwire_proto::wire::Transport;
use warpwire_proto::wire::packet::{BTH_LEN, ICRC_LEN};

use super::{BUDGET, BUDGET_BYTES, Core, Engine, Turn, gather};
use crate::error::{Error, Kind, Result};
use crate::hca::host::{Body, View};
use crate::hca::pair::Pair;
use crate::hca::protocol::{DatagramView, Protocol};
use crate::hca::stats::Lost;
use crate::link::{FlowId, Frame, Refused};

/// For so long a datagram waits for room on its link. One for a peer that stands still would wait for ever else, and all
/// behind it: nobody takes it back, as there is no answer to miss.
const PATIENCE: Duration = Duration::from_millis(10);

/// The peers that datagrams may go to: a flow each, however many handles there are for it.
///
/// Entries name their peer by address, as ConnectX's do. One that names a peer without a flow fails, rather than
/// have a flow opened for it: opening is slow, and whoever writes entries could ask for any number.
#[derive(Debug, Default)]
pub(super) struct Destinations {
    flows: HashMap<(IpAddr, u16), Destination>,
}

#[derive(Debug)]
struct Destination {
    peer: SocketAddr,
    flow: FlowId,
    handles: usize,
    /// Since when its packets have found no room.
    full_since: Option<Instant>,
}

impl Destination {
    /// Its link has no room: whether the datagram waits for some.
    #[cold]
    fn waits(&mut self, now: Instant) -> bool {
        now - *self.full_since.get_or_insert(now) < PATIENCE
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
    /// Makes ready to send datagrams to that peer; for each time that this was done, it must be closed.
    pub(in crate::hca) fn open_destination(&mut self, peer: SocketAddr) -> Result<()> {
        let flows = &mut self.core.destinations.flows;
        if let Some(known) = flows.get_mut(&key(peer)) {
            if known.peer != peer {
                return Err(Error::new(Kind::Busy, format!("send datagrams to {peer}"))
                    .why(format!("{} is in use, and entries do not tell scopes apart", known.peer))
                    .fix("drop the handles for the other, or open another context"));
            }
            known.handles += 1;
            return Ok(());
        }
        let flow = self.link.open(peer, 0)?;
        flows.insert(key(peer), Destination { peer, flow, handles: 1, full_since: None });
        Ok(())
    }

    pub(in crate::hca) fn close_destination(&mut self, peer: SocketAddr) {
        let flows = &mut self.core.destinations.flows;
        let Some(known) = flows.get_mut(&key(peer)) else { return };
        known.handles -= 1;
        if known.handles == 0 {
            self.link.close(known.flow);
            flows.remove(&key(peer));
        }
    }

    /// A datagram queue pair's turn to send.
    pub(super) fn transmit_datagrams(&mut self, now: Instant, index: u32) -> (usize, Turn) {
        let Core { pairs, registry, srqs, totals, destinations, .. } = &mut self.core;
        let Some(Some(pair)) = pairs.get_mut(index as usize) else { return (0, Turn::Done) };
        let Pair { qp: Protocol::Datagram(datagrams), side, active, .. } = &mut **pair else {
            return (0, Turn::Done);
        };
        let ud = &mut datagrams.ud;
        let (mut count, mut bytes) = (0, 0);
        let turn = loop {
            if count == BUDGET || bytes >= BUDGET_BYTES {
                break Turn::More;
            }
            let Some(next) = ud.peek_transmit() else { break Turn::Done };
            let Some(to) = side.address(next.id).and_then(|to| destinations.find(to.peer())) else {
                ud.refuse_transmit(Status::LocalOperation);
                continue;
            };
            let room = wire_len(&next);
            let slot = match self.link.reserve(to.flow, room) {
                Err(Refused::Full) if to.waits(now) => break Turn::LinkFull,
                Err(Refused::Full) => Err(Lost::NoRoom),
                Err(_) => Err(Lost::NoFlow),
                Ok(slot) => {
                    to.full_since = None;
                    Ok(slot)
                }
            };
            let view = View { side, registry, srqs, payload: Body::NONE };
            let Some(packet) = ud.poll_transmit(&mut DatagramView { view, frame: None }) else {
                break Turn::Done;
            };
            let len = next.len as usize;
            let emit = |slot: &mut [u8]| packet.headers.emit(slot, len).ok_or(Lost::TooLong);
            let (at, slot) = match slot.and_then(|slot| Ok((emit(slot)?, slot))) {
                Ok(placed) => placed,
                Err(reason) => {
                    totals.lose(reason);
                    continue;
                }
            };
            let part = &mut slot[at..at + len];
            if let Some(payload) = packet.payload
                && gather(side, registry, payload, part).is_err()
            {
                totals.lose(Lost::MemoryGone);
                continue;
            }
            self.link.commit();
            count += 1;
            bytes += room;
        };
        if matches!(turn, Turn::Done) {
            *active = false;
        }
        self.core.after(now, index);
        (count, turn)
    }
}

/// The length of a datagram's packet, from the base header through the ICRC.
fn wire_len(datagram: &Datagram) -> usize {
    const DETH_LEN: usize = 8;
    let imm = if datagram.imm.is_some() { 4 } else { 0 };
    BTH_LEN + DETH_LEN + imm + (datagram.len as usize).next_multiple_of(4) + ICRC_LEN
}

impl Core {
    /// A packet for a datagram queue pair: anyone may send one.
    pub(super) fn arrive_datagram(
        &mut self,
        now: Instant,
        index: u32,
        transport: &Transport<'_>,
        frame: &Frame<'_>,
    ) {
        let Core { pairs, registry, srqs, totals, .. } = self;
        let Some(Some(pair)) = pairs.get_mut(index as usize) else { return };
        let Pair { qp: Protocol::Datagram(datagrams), side, .. } = &mut **pair else { return };
        totals.packets_received += 1;
        let (headers, payload) = (transport.headers(), transport.payload());
        let payload_len = payload.len() as u32;
        let arrived = Arrived { headers: &headers, payload_len, marked: frame.marked };
        datagrams.from = frame.from;
        let view = View { side, registry, srqs, payload: Body::Here(payload) };
        let mut view = DatagramView { view, frame: Some(frame) };
        // Counted by the queue pair itself.
        let _ = datagrams.ud.handle_packet(&arrived, &mut view);
        self.after(now, index);
    }
}

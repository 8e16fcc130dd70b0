//! A datagram queue pair, and the memory that datagrams lie in.
//!
//! What always holds:
//! 1. A place for a receive is posted, waits in `arrived`, or is being read: so no receive is ever lost.
//! 2. A place for a send is free or posted; while it is posted its peer's handle is kept, as the device fails without it.

use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd};

use warpwire_proto::qp::Discard;

use super::words::{Card, HEADER_LEN, Header, LONGEST_DATAGRAM};
use crate::error::{Error, Kind, Result};
use crate::mr::HostMemory;
use crate::verbs::{
    Access, AddressHandle, Change, Completion, Context, Cq, Mr, Mtu, Op, Qp, QpOptions, ROUTE_LEN,
    ReceiveRequest, Request, Route, Service, State,
};

/// How many datagrams may wait to be read, and to be sent.
const RECEIVES: u16 = 256;
const SENDS: u16 = 64;
/// What the completion of a send bears beside its place.
const SENT: u64 = 1 << 32;
/// Completions that are taken at once.
const AT_ONCE: usize = 16;

/// A datagram that has come.
#[derive(Clone, Copy, Debug)]
pub(super) struct Arrival {
    place: u16,
    pub(super) from: SocketAddr,
    pub(super) len: usize,
}

pub(super) struct Dock {
    // The queue pair ends before what it writes to.
    qp: Qp,
    cq: Cq,
    memory: Mr,
    bytes: HostMemory,
    context: Context,
    /// The device's address.
    local: SocketAddr,
    qkey: u32,
    mtu: u32,
    free: Vec<u16>,
    /// The peers of the sends that are posted.
    bearing: Vec<Option<AddressHandle>>,
    arrived: VecDeque<Arrival>,
    /// It takes and sends nothing any more.
    is_broken: bool,
    /// Datagrams without a receive, as far as they were counted.
    missed: u64,
    /// Datagrams that were nobody's.
    pub(super) strange: u64,
}

impl Dock {
    /// On the device for that address of ours.
    pub(super) fn new(context: &Context, local: IpAddr, qkey: u32) -> Result<Self> {
        let pd = context.pd();
        let cq = context.create_cq(u32::from(RECEIVES + SENDS))?;
        let mtu = context.largest_mtu().bytes().min((LONGEST_DATAGRAM + HEADER_LEN) as u32);
        let options = QpOptions {
            service: Service::Ud,
            send_depth: SENDS.into(),
            receive_depth: RECEIVES.into(),
            send_ranges: 1,
            receive_ranges: 1,
            inline: 0,
            mtu: Mtu::new(mtu),
            ..QpOptions::default()
        };
        let qp = context.create_qp(&pd, &cq, &cq, options)?;
        let address = qp.offer().address;
        if address.ip().to_canonical() != local.to_canonical() {
            let why = format!("the socket is at {local}, its device at {}", address.ip());
            let error = Error::new(Kind::InvalidArgument, "use datagrams").why(why);
            return Err(error.fix("bind it to the device's address"));
        }
        let places = u64::from(RECEIVES + SENDS);
        let bytes = HostMemory::new(places * stride(mtu))?;
        let memory = context.register(&pd, bytes.clone(), Access::LOCAL_WRITE)?;
        qp.ready(qkey)?;
        let dock = Self {
            qp,
            cq,
            memory,
            bytes,
            context: context.clone(),
            local: address,
            qkey,
            mtu,
            free: (0..SENDS).collect(),
            bearing: vec![None; SENDS.into()],
            arrived: VecDeque::with_capacity(RECEIVES.into()),
            is_broken: false,
            missed: 0,
            strange: 0,
        };
        for place in 0..RECEIVES {
            dock.post_receive(place)?;
        }
        Ok(dock)
    }

    /// The address that its device has.
    pub(super) fn address(&self) -> IpAddr {
        self.local.ip().to_canonical()
    }

    pub(super) fn is_broken(&self) -> bool {
        self.is_broken
    }

    /// What peers are told.
    pub(super) fn card(&self) -> Card {
        let (port, qpn) = (self.local.port(), self.qp.number());
        Card { port, qpn, qkey: self.qkey, longest: self.longest() as u32 }
    }

    /// The longest datagram that it carries.
    pub(super) fn longest(&self) -> usize {
        self.mtu as usize - HEADER_LEN
    }

    /// Makes ready to send to a device.
    pub(super) fn handle(&self, device: SocketAddr) -> Result<AddressHandle> {
        self.context.address_handle(device)
    }

    /// Whether one more can be sent now.
    pub(super) fn has_room(&self) -> bool {
        !self.free.is_empty()
    }

    /// Whether everything that was sent is gone.
    pub(super) fn is_idle(&self) -> bool {
        self.free.len() == usize::from(SENDS) || self.is_broken
    }

    /// Sends a datagram that fits, from that port of ours; false if there is no room now.
    pub(super) fn send(
        &mut self,
        to: (&AddressHandle, &Card),
        port: u16,
        bytes: &[u8],
    ) -> Result<bool> {
        let Some(place) = self.free.pop() else { return Ok(false) };
        let at = u64::from(RECEIVES + place) * stride(self.mtu);
        let memory = self.bytes.bytes();
        memory.write_cached(at, &Header { port }.bytes())?;
        memory.write_cached(at + HEADER_LEN as u64, bytes)?;
        let range = [self.memory.sge(at, (HEADER_LEN + bytes.len()) as u32)];
        let (handle, card) = to;
        let request = Request::new(SENT | u64::from(place), Op::Send).with(&range);
        if let Err(error) = self.qp.post_send(&[request.to(handle, card.qpn, card.qkey)]) {
            self.free.push(place);
            return if *error.kind() == Kind::Busy { Ok(false) } else { Err(error) };
        }
        self.bearing[usize::from(place)] = Some(handle.clone());
        Ok(true)
    }

    /// Takes what has come and what has gone.
    pub(super) fn drain(&mut self) {
        let mut some = [Completion::EMPTY; AT_ONCE];
        loop {
            let count = match self.cq.poll(&mut some) {
                Ok(count) => count,
                Err(error) => return self.break_down(&error),
            };
            for completion in &some[..count] {
                let place = completion.id as u16;
                if completion.id & SENT != 0 {
                    self.gone(place, completion.is_success());
                } else if completion.is_success() {
                    self.came(place, completion.len);
                } else {
                    let why = format!("a receive ended with {}", completion.status);
                    return self.break_down(&Error::new(Kind::PeerLost, "receive").why(why));
                }
            }
            if count < some.len() {
                return;
            }
        }
    }

    fn gone(&mut self, place: u16, went: bool) {
        if let Some(handle) = self.bearing.get_mut(usize::from(place)) {
            *handle = None;
            self.free.push(place);
        }
        // One that could not be sent stops those behind it, until somebody says that they shall go on.
        if !went
            && matches!(self.qp.state(), Ok(State::Sqe))
            && let Err(error) = self.qp.modify(&Change::to(State::Rts))
        {
            self.break_down(&error);
        }
    }

    /// Notes what came, if it is a datagram of ours; nobody else's bytes keep a place.
    fn came(&mut self, place: u16, len: u32) {
        let at = u64::from(place) * stride(self.mtu);
        let (mut route, mut header) = ([0; ROUTE_LEN as usize], [0; HEADER_LEN]);
        let memory = self.bytes.bytes();
        let route = memory.read_cached(at, &mut route).ok().and_then(|()| Route::parse(&route));
        let header = memory
            .read_cached(at + u64::from(ROUTE_LEN), &mut header)
            .ok()
            .and_then(|()| Header::read(&header).ok());
        let len = (len as usize).checked_sub(ROUTE_LEN as usize + HEADER_LEN);
        let (Some(route), Some(header), Some(len)) = (route, header, len) else {
            self.strange += 1;
            return self.give_back(place);
        };
        let mut from = SocketAddr::new(route.source, header.port);
        // An address that is good on one link only is good on ours.
        if let (SocketAddr::V6(from), SocketAddr::V6(local)) = (&mut from, &self.local)
            && from.ip().is_unicast_link_local()
        {
            from.set_scope_id(local.scope_id());
        }
        self.arrived.push_back(Arrival { place, from, len });
    }

    /// The oldest that has come.
    pub(super) fn first(&self) -> Option<Arrival> {
        self.arrived.front().copied()
    }

    /// Takes the oldest, as far as it fits, and lets the next have its place.
    pub(super) fn take_first(&mut self, into: &mut [u8]) -> Result<()> {
        let Some(first) = self.arrived.pop_front() else { return Ok(()) };
        let at = u64::from(first.place) * stride(self.mtu) + u64::from(ROUTE_LEN);
        let count = into.len().min(first.len);
        let read = self.bytes.bytes().read_cached(at + HEADER_LEN as u64, &mut into[..count]);
        self.give_back(first.place);
        read
    }

    fn give_back(&mut self, place: u16) {
        if let Err(error) = self.post_receive(place) {
            self.break_down(&error);
        }
    }

    fn post_receive(&self, place: u16) -> Result<()> {
        let len = ROUTE_LEN + self.mtu;
        let range = [self.memory.sge(u64::from(place) * stride(self.mtu), len)];
        self.qp.post_receive(&[ReceiveRequest { id: place.into(), data: &range }])
    }

    #[cold]
    fn break_down(&mut self, error: &Error) {
        tracing::warn!(%error, local = %self.local, "a queue pair of datagrams has failed");
        self.is_broken = true;
    }

    /// How many have found no receive since this was last asked. Hardware does not tell.
    pub(super) fn take_missed(&mut self) -> u64 {
        let missed = self
            .qp
            .stats()
            .map_or(0, |stats| stats.dropped(Discard::NoReceive) + stats.dropped(Discard::Length));
        let before = std::mem::replace(&mut self.missed, missed);
        missed.saturating_sub(before)
    }

    /// Asks for an event when something comes or goes; at once if something has.
    pub(super) fn arm(&self) -> Result<()> {
        self.cq.arm(false)
    }

    /// Takes the event back.
    pub(super) fn take_event(&self) {
        self.cq.take_event();
    }
}

impl AsFd for Dock {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.cq.as_fd()
    }
}

/// How far two places lie apart.
fn stride(mtu: u32) -> u64 {
    u64::from(ROUTE_LEN + mtu).next_multiple_of(64)
}

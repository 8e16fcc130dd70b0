//! The transport of a queue pair, RC, UC or UD, behind one interface.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use warpwire_proto::Instant;
use warpwire_proto::qp::{
    self, Datagram, GRH_LEN, Host, HostStatus, Mtu, ProtocolEvent, QpAttributes, RcQp, Receive,
    Remote, SendCompletion, SendOp, SendQueueError, SendWr, Service, Source, State, Target, Uc, Ud,
};
use warpwire_proto::wire::ip::{IpRepr, UDP_LEN, mapped};

use super::host::HostView;
use crate::link::Frame;
use crate::mlx5::{AddressVector, Origin};

/// The transport of a queue pair.
// Most queue pairs are RC, and their contexts are boxed already.
#[allow(clippy::large_enum_variant)]
#[derive(Debug)]
pub(super) enum Protocol {
    Connected(RcQp),
    Unreliable(Box<Unreliable>),
    Datagram(Box<Datagrams>),
}

/// State of a UC queue pair.
#[derive(Debug)]
pub(super) struct Unreliable {
    pub uc: Uc,
    /// Since when the link has had no room for its packets.
    pub full_since: Option<Instant>,
}

impl Unreliable {
    /// Called when the link has no room: whether the packet waits for some.
    #[cold]
    pub(super) fn should_wait(&mut self, now: Instant, limit: std::time::Duration) -> bool {
        now - *self.full_since.get_or_insert(now) < limit
    }
}

/// State of a UD queue pair.
#[derive(Debug)]
pub(super) struct Datagrams {
    pub ud: Ud,
    /// Source address of the packet being handled.
    pub from: SocketAddr,
}

/// Calls the same method on either transport.
macro_rules! either {
    ($protocol:expr, $one:ident => $does:expr) => {
        match $protocol {
            Protocol::Connected($one) => $does,
            Protocol::Unreliable(unreliable) => {
                let $one = &mut unreliable.uc;
                $does
            }
            Protocol::Datagram(datagrams) => {
                let $one = &mut datagrams.ud;
                $does
            }
        }
    };
    (ref $protocol:expr, $one:ident => $does:expr) => {
        match $protocol {
            Protocol::Connected($one) => $does,
            Protocol::Unreliable(unreliable) => {
                let $one = &unreliable.uc;
                $does
            }
            Protocol::Datagram(datagrams) => {
                let $one = &datagrams.ud;
                $does
            }
        }
    };
}

impl Protocol {
    pub(super) fn connected(number: u32, options: qp::TransportOptions) -> Self {
        Self::Connected(RcQp::new(number, options))
    }

    pub(super) fn unreliable(number: u32, depth: u32) -> Self {
        Self::Unreliable(Box::new(Unreliable { uc: Uc::new(number, depth), full_since: None }))
    }

    pub(super) fn datagram(number: u32, mtu: Mtu, depth: u32) -> Self {
        let from = (Ipv4Addr::UNSPECIFIED, 0).into();
        Self::Datagram(Box::new(Datagrams { ud: Ud::new(number, mtu, depth), from }))
    }

    pub(super) fn service(&self) -> Service {
        match self {
            Self::Connected(_) => Service::Rc,
            Self::Unreliable(_) => Service::Uc,
            Self::Datagram(_) => Service::Ud,
        }
    }

    /// The connection of an RC queue pair.
    #[inline]
    pub(super) fn connection(&self) -> Option<&RcQp> {
        match self {
            Self::Connected(qp) => Some(qp),
            Self::Unreliable(_) | Self::Datagram(_) => None,
        }
    }

    pub(super) fn number(&self) -> u32 {
        either!(ref self, one => one.number())
    }

    #[inline]
    pub(super) fn state(&self) -> State {
        either!(ref self, one => one.state())
    }

    pub(super) fn stats(&self) -> &qp::Stats {
        either!(ref self, one => one.stats())
    }

    #[inline]
    pub(super) fn outstanding(&self) -> u32 {
        either!(ref self, one => one.outstanding())
    }

    pub(super) fn modify(&mut self, change: &QpAttributes) -> Result<(), qp::ModifyError> {
        either!(self, one => one.modify(change))
    }

    #[inline]
    pub(super) fn has_events(&self) -> bool {
        either!(ref self, one => one.has_events())
    }

    #[inline]
    pub(super) fn poll_event(&mut self) -> Option<ProtocolEvent> {
        either!(self, one => one.poll_event())
    }

    /// Only RC has timers.
    #[inline]
    pub(super) fn poll_timeout(&mut self, now: Instant) -> Instant {
        match self {
            Self::Connected(qp) => qp.poll_timeout(now),
            Self::Unreliable(_) | Self::Datagram(_) => Instant::NEVER,
        }
    }

    pub(super) fn handle_timeout(&mut self, now: Instant) {
        if let Self::Connected(qp) = self {
            qp.handle_timeout(now);
        }
    }

    /// Posts work; `to` is the destination of a datagram.
    #[inline]
    pub(super) fn post(
        &mut self,
        work: SendWr,
        to: impl FnOnce() -> Option<AddressVector>,
    ) -> Result<(), SendQueueError> {
        match self {
            Self::Connected(qp) => qp.post(work),
            Self::Unreliable(unreliable) => unreliable.uc.post(work),
            Self::Datagram(datagrams) => datagrams.post(work, to()),
        }
    }

    /// The origin of a message, for its CQE. A connection has only one.
    pub(super) fn origin(&self, qpn: u32) -> Origin {
        match self {
            Self::Connected(_) | Self::Unreliable(_) => Origin { qpn, ..Origin::default() },
            Self::Datagram(datagrams) => {
                let gid = mapped(datagrams.from.ip()).octets();
                let port = datagrams.from.port();
                Origin { qpn, service_level: 0, has_grh: true, gid, port }
            }
        }
    }
}

impl Datagrams {
    fn post(&mut self, work: SendWr, to: Option<AddressVector>) -> Result<(), SendQueueError> {
        let SendWr { id, op, len, signaled, solicited, .. } = work;
        let local = |status| SendCompletion { id, status, signaled };
        let (to, imm) = match (op, to) {
            (SendOp::Send, Some(to)) => (to, None),
            (SendOp::SendImm(imm), Some(to)) => (to, Some(imm)),
            (SendOp::Local, _) => return self.ud.post_local(local(qp::Status::Success)),
            (SendOp::Bad(status), _) => return self.ud.post_local(local(status)),
            _ => return self.ud.post_local(local(qp::Status::LocalQpOperation)),
        };
        let AddressVector { qpn: destination, qkey, .. } = to;
        let datagram = Datagram { id, destination, qkey, len, imm, signaled, solicited };
        match self.ud.post(datagram) {
            Err(SendQueueError::Length(_)) => self.ud.post_local(local(qp::Status::LocalLength)),
            other => other,
        }
    }
}

/// The engine as a UD queue pair sees it: memory, receives, and the received frame, from which the
/// GRH is built.
pub(super) struct DatagramHostView<'a> {
    pub view: HostView<'a>,
    pub frame: Option<&'a Frame<'a>>,
}

impl Host for DatagramHostView<'_> {
    fn take_receive(&mut self) -> Option<Receive> {
        self.view.take_receive()
    }

    fn place(&mut self, to: Target, len: u32) -> HostStatus {
        let (Target::Grh { id }, Some(frame)) = (to, self.frame) else {
            return self.view.place(to, len);
        };
        let grh = grh(frame);
        let HostView { qp_memory, registry, .. } = &self.view;
        let outcome = qp_memory.scatter_received(registry, id, 0, &grh);
        self.view.verdict(outcome)
    }

    fn fetch(&mut self, from: Source, len: u32, headers_len: usize) -> HostStatus {
        self.view.fetch(from, len, headers_len)
    }

    // Operations that UD does not have.

    fn may_access(&mut self, _: qp::Access, _: Remote, _: u32) -> HostStatus {
        HostStatus::Denied
    }

    fn execute(&mut self, _: Remote, _: qp::Atomic) -> Result<u64, HostStatus> {
        Err(HostStatus::Denied)
    }

    fn invalidate(&mut self, _: u32) -> HostStatus {
        HostStatus::Denied
    }

    fn store_result(&mut self, _: u64, _: u64) -> HostStatus {
        HostStatus::Denied
    }
}

/// The 40 bytes before a datagram: the IPv6 header that it arrived with, or 20 zero bytes and its
/// IPv4 header.
fn grh(frame: &Frame<'_>) -> [u8; GRH_LEN as usize] {
    let mut grh = [0; GRH_LEN as usize];
    let header = IpRepr {
        source: frame.from.ip(),
        destination: frame.to.ip(),
        traffic_class: frame.traffic_class,
        hop_limit: frame.hop_limit,
        identification: frame.identification,
        payload_len: u16::try_from(UDP_LEN + frame.bytes.len()).unwrap_or(u16::MAX),
    };
    let at = match (header.source, header.destination) {
        (IpAddr::V4(_), IpAddr::V4(_)) => 20,
        _ => 0,
    };
    header.emit(&mut grh[at..]);
    grh
}

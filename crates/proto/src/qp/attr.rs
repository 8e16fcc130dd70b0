//! The states of a queue pair, and what each step between them must and may set: one table.

use core::fmt;
use core::net::SocketAddr;
use core::ops::BitOr;

use super::Access;
use crate::psn::Psn;

/// Where a queue pair stands in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum State {
    /// New, or wiped: nothing is kept, nothing goes in or out.
    Reset,
    /// Receives may be posted.
    Init,
    /// Ready to receive: requests of the peer are answered.
    Rtr,
    /// Ready to send: everything works.
    Rts,
    /// Send queue draining: messages that have begun are finished, none is begun.
    Sqd,
    /// The send queue of a datagram queue pair failed; it still receives.
    Sqe,
    /// Failed: all work comes back flushed.
    Err,
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Reset => "RESET",
            Self::Init => "INIT",
            Self::Rtr => "RTR",
            Self::Rts => "RTS",
            Self::Sqd => "SQD",
            Self::Sqe => "SQE",
            Self::Err => "ERR",
        })
    }
}

/// The transport service of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Service {
    /// Reliable connected.
    Rc,
    /// Unreliable datagram.
    Ud,
}

/// The longest that two of our own ends may agree on.
const MAX_LOCAL_MTU: u32 = 1 << 20;

/// The most payload in a packet; both ends of a connection use the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Mtu(u32);

impl Mtu {
    /// The sizes that RoCE knows, smallest first. Their verbs codes are 1 to 5.
    pub const ALL: [Self; 5] = [Self(256), Self(512), Self(1024), Self(2048), Self(4096)];

    /// That size in bytes: a power of two from 256 to 4096; beyond it, a multiple of 4096 to 2^20, only between our own
    /// ends (within one machine, where no Ethernet frame sets a limit).
    ///
    /// ```
    /// use warpwire_proto::qp::Mtu;
    /// assert_eq!(Mtu::new(1024).unwrap().bytes(), 1024);
    /// assert_eq!(Mtu::new(1500), None);
    /// ```
    pub const fn new(bytes: u32) -> Option<Self> {
        match bytes {
            256..=4096 if bytes.is_power_of_two() => Some(Self(bytes)),
            4097..=MAX_LOCAL_MTU if bytes.is_multiple_of(4096) => Some(Self(bytes)),
            _ => None,
        }
    }

    /// The largest that RoCE knows whose packets, with all headers, fit a link that carries this many bytes.
    pub fn fitting(link: usize) -> Option<Self> {
        const HEADERS: usize = 80;
        Self::ALL.into_iter().rev().find(|mtu| mtu.0 as usize + HEADERS <= link)
    }

    /// In bytes.
    pub const fn bytes(self) -> u32 {
        self.0
    }

    /// How many packets a message of `len` bytes takes: at least one.
    pub(crate) fn packets(self, len: u32) -> u32 {
        // Most messages have one.
        if len <= self.0 { 1 } else { len.div_ceil(self.0) }
    }

    /// The offset of the packet with that index.
    pub(crate) fn offset(self, index: u32) -> u32 {
        index.wrapping_mul(self.0)
    }
}

/// Where the peer is. The protocol does not use it; it belongs to the attributes that a step must set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PathAttributes {
    /// The peer's address and UDP port.
    pub peer: SocketAddr,
    /// Traffic class of our packets, without the ECN bits.
    pub traffic_class: u8,
    /// Hop limit of our packets.
    pub hop_limit: u8,
    /// Spreads queue pairs over the network's paths: 20 bits.
    pub flow_label: u32,
}

/// A set of attributes.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub struct QpAttrMask(u32);

macro_rules! attr_mask {
    ($($bit:literal $name:ident $text:literal;)*) => {
        #[allow(missing_docs)] // the names are those of verbs
        impl QpAttrMask {
            $(pub const $name: Self = Self(1 << $bit);)*
        }
        const NAMES: &[(QpAttrMask, &str)] = &[$((QpAttrMask::$name, $text)),*];
    };
}

attr_mask! {
    0 CURRENT_STATE "the current state";
    1 PARTITION_INDEX "the partition index";
    2 PORT "the port";
    3 ACCESS "the access flags";
    4 QKEY "the queue key";
    5 PATH "the path to the peer";
    6 MTU "the path MTU";
    7 DESTINATION "the peer's queue pair number";
    8 RECEIVE_PSN "the first sequence number to receive";
    9 MAX_DEST_RD_ATOMIC "the peer's reads and atomics at a time";
    10 MIN_RNR_TIMER "the receiver-not-ready timer";
    11 SEND_PSN "the first sequence number to send";
    12 TIMEOUT "the acknowledge timeout";
    13 RETRY_COUNT "the retry count";
    14 RNR_RETRY "the receiver-not-ready retry count";
    15 MAX_RD_ATOMIC "our reads and atomics at a time";
    16 NOTIFY_DRAINED "the wish for a drained event";
}

impl QpAttrMask {
    /// No attribute.
    pub const NONE: Self = Self(0);

    const fn and(self, more: Self) -> Self {
        Self(self.0 | more.0)
    }

    /// Those that `self` has and `other` has not.
    pub const fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// Whether the set is empty.
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Whether all of `other` are in the set.
    pub const fn contains(self, other: Self) -> bool {
        other.0 & !self.0 == 0
    }
}

impl BitOr for QpAttrMask {
    type Output = Self;

    fn bitor(self, more: Self) -> Self {
        self.and(more)
    }
}

impl fmt::Display for QpAttrMask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut before = "";
        for (_, name) in NAMES.iter().filter(|(attribute, _)| self.contains(*attribute)) {
            write!(f, "{before}{name}")?;
            before = ", ";
        }
        Ok(())
    }
}

impl fmt::Debug for QpAttrMask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{{{self}}}")
    }
}

/// A step that a queue pair may take.
#[derive(Clone, Copy, Debug)]
pub struct Transition {
    /// Of which service.
    pub service: Service,
    /// From where.
    pub from: State,
    /// To where.
    pub to: State,
    /// What must be set with it.
    pub required: QpAttrMask,
    /// What may be set with it.
    pub optional: QpAttrMask,
}

const fn transition(
    service: Service,
    from: State,
    to: State,
    required: QpAttrMask,
    optional: QpAttrMask,
) -> Transition {
    Transition { service, from, to, required, optional }
}

type A = QpAttrMask;
const NONE: A = A::NONE;
const RC_RUNNING: A = A::CURRENT_STATE.and(A::ACCESS).and(A::MIN_RNR_TIMER);
const RC_RECEIVE: A = A::PATH
    .and(A::MTU)
    .and(A::DESTINATION)
    .and(A::RECEIVE_PSN)
    .and(A::MAX_DEST_RD_ATOMIC)
    .and(A::MIN_RNR_TIMER);
const RC_SEND: A =
    A::SEND_PSN.and(A::TIMEOUT).and(A::RETRY_COUNT).and(A::RNR_RETRY).and(A::MAX_RD_ATOMIC);
const RC_DRAINED: A = A::PORT
    .and(A::PATH)
    .and(A::TIMEOUT)
    .and(A::RETRY_COUNT)
    .and(A::RNR_RETRY)
    .and(A::MAX_RD_ATOMIC)
    .and(A::MAX_DEST_RD_ATOMIC)
    .and(A::ACCESS)
    .and(A::PARTITION_INDEX)
    .and(A::MIN_RNR_TIMER);
const UD_RUNNING: A = A::CURRENT_STATE.and(A::QKEY);
const UD_IDENTITY: A = A::PARTITION_INDEX.and(A::QKEY);

use Service::{Rc, Ud};
use State::{Err, Init, Reset, Rtr, Rts, Sqd, Sqe};

/// Every step but those to `ERR` (from anywhere but `RESET`) and to `RESET` (from anywhere), which take no
/// attributes. Alternate paths are missing: RoCE has none.
pub const TRANSITIONS: &[Transition] = &[
    transition(Rc, Reset, Init, A::PARTITION_INDEX.and(A::PORT).and(A::ACCESS), NONE),
    transition(Rc, Init, Init, NONE, A::PARTITION_INDEX.and(A::PORT).and(A::ACCESS)),
    transition(Rc, Init, Rtr, RC_RECEIVE, A::ACCESS.and(A::PARTITION_INDEX)),
    transition(Rc, Rtr, Rts, RC_SEND, RC_RUNNING),
    transition(Rc, Rts, Rts, NONE, RC_RUNNING),
    transition(Rc, Rts, Sqd, NONE, A::NOTIFY_DRAINED),
    transition(Rc, Sqd, Sqd, NONE, RC_DRAINED),
    transition(Rc, Sqd, Rts, NONE, RC_RUNNING),
    transition(Ud, Reset, Init, A::PARTITION_INDEX.and(A::PORT).and(A::QKEY), NONE),
    transition(Ud, Init, Init, NONE, A::PARTITION_INDEX.and(A::PORT).and(A::QKEY)),
    transition(Ud, Init, Rtr, NONE, UD_IDENTITY),
    transition(Ud, Rtr, Rts, A::SEND_PSN, UD_RUNNING),
    transition(Ud, Rts, Rts, NONE, UD_RUNNING),
    transition(Ud, Rts, Sqd, NONE, A::NOTIFY_DRAINED),
    transition(Ud, Sqd, Sqd, NONE, UD_IDENTITY),
    transition(Ud, Sqd, Rts, NONE, UD_RUNNING),
    transition(Ud, Sqe, Rts, NONE, UD_RUNNING),
];

/// A step to take, and the attributes that go with it.
///
/// ```
/// use warpwire_proto::qp::{Access, QpAttributes, State};
/// let attr = QpAttributes {
///     partition_index: Some(0),
///     port: Some(1),
///     access: Some(Access::REMOTE_WRITE),
///     ..QpAttributes::new(State::Init)
/// };
/// assert_eq!(attr.to, State::Init);
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QpAttributes {
    /// The state to go to.
    pub to: State,
    /// The state that the caller believes the queue pair to be in.
    pub current_state: Option<State>,
    /// Which partition: 0, the one that everybody is in.
    pub partition_index: Option<u16>,
    /// Which port: 1.
    pub port: Option<u8>,
    /// What the peer may do.
    pub access: Option<Access>,
    /// The key that datagrams to this queue pair must carry.
    pub qkey: Option<u32>,
    /// Where the peer is.
    pub path: Option<PathAttributes>,
    /// The most payload in a packet.
    pub mtu: Option<Mtu>,
    /// The peer's queue pair number, 24 bits.
    pub destination: Option<u32>,
    /// The sequence number of the first request to receive.
    pub receive_psn: Option<Psn>,
    /// How many reads and atomics the peer may have outstanding.
    pub max_dest_rd_atomic: Option<u8>,
    /// The code of the time that a peer waits when no receive is there: 0 to 31.
    pub min_rnr_timer: Option<u8>,
    /// The sequence number of the first request to send.
    pub send_psn: Option<Psn>,
    /// How long to wait for an acknowledgement: 4.096 µs · 2^n; 0 waits for ever.
    pub timeout: Option<u8>,
    /// How often to try again without an answer: 0 to 7.
    pub retry_count: Option<u8>,
    /// How often to try again when the peer is not ready: 0 to 6; 7 is without end.
    pub rnr_retry: Option<u8>,
    /// How many reads and atomics we may have outstanding; not more than the peer's `max_dest_rd_atomic`.
    pub max_rd_atomic: Option<u8>,
    /// Whether to say when the send queue is drained.
    pub notify_drained: Option<bool>,
}

impl QpAttributes {
    /// A step to that state with no attributes.
    pub const fn new(state: State) -> Self {
        Self {
            to: state,
            current_state: None,
            partition_index: None,
            port: None,
            access: None,
            qkey: None,
            path: None,
            mtu: None,
            destination: None,
            receive_psn: None,
            max_dest_rd_atomic: None,
            min_rnr_timer: None,
            send_psn: None,
            timeout: None,
            retry_count: None,
            rnr_retry: None,
            max_rd_atomic: None,
            notify_drained: None,
        }
    }

    /// Which attributes are set.
    pub fn attr_mask(&self) -> QpAttrMask {
        let set = [
            (self.current_state.is_some(), A::CURRENT_STATE),
            (self.partition_index.is_some(), A::PARTITION_INDEX),
            (self.port.is_some(), A::PORT),
            (self.access.is_some(), A::ACCESS),
            (self.qkey.is_some(), A::QKEY),
            (self.path.is_some(), A::PATH),
            (self.mtu.is_some(), A::MTU),
            (self.destination.is_some(), A::DESTINATION),
            (self.receive_psn.is_some(), A::RECEIVE_PSN),
            (self.max_dest_rd_atomic.is_some(), A::MAX_DEST_RD_ATOMIC),
            (self.min_rnr_timer.is_some(), A::MIN_RNR_TIMER),
            (self.send_psn.is_some(), A::SEND_PSN),
            (self.timeout.is_some(), A::TIMEOUT),
            (self.retry_count.is_some(), A::RETRY_COUNT),
            (self.rnr_retry.is_some(), A::RNR_RETRY),
            (self.max_rd_atomic.is_some(), A::MAX_RD_ATOMIC),
            (self.notify_drained.is_some(), A::NOTIFY_DRAINED),
        ];
        set.into_iter().filter(|(is_set, _)| *is_set).fold(NONE, |all, (_, one)| all | one)
    }

    /// Whether a queue pair of that service in state `from` may take this step.
    pub fn check(&self, service: Service, from: State) -> Result<(), ModifyError> {
        let to = self.to;
        if let Some(expected) = self.current_state.filter(|expected| *expected != from) {
            return Result::Err(ModifyError::WrongState { expected, actual: from });
        }
        let set = self.attr_mask();
        let always = to == Reset || to == Err && from != Reset;
        let listed = TRANSITIONS.iter().find(|t| (t.service, t.from, t.to) == (service, from, to));
        let (required, optional) = match listed {
            Some(transition) => (transition.required, transition.optional),
            None if always => (NONE, NONE),
            None => return Result::Err(ModifyError::InvalidTransition { from, to }),
        };
        let missing = required.without(set);
        if !missing.is_empty() {
            return Result::Err(ModifyError::MissingAttr { from, to, missing });
        }
        let extra = set.without(required | optional);
        if !extra.is_empty() {
            return Result::Err(ModifyError::ExtraAttr { from, to, extra });
        }
        self.check_values()
    }

    fn check_values(&self) -> Result<(), ModifyError> {
        let exceeds = |value: Option<u8>, exceeds: u8| value.is_some_and(|value| value > exceeds);
        let reads = |count: Option<u8>| exceeds(count, super::MAX_QP_RD_ATOM);
        let invalid = [
            (self.partition_index.is_some_and(|index| index != 0), A::PARTITION_INDEX, "0"),
            (self.port.is_some_and(|port| port != 1), A::PORT, "1"),
            (self.destination.is_some_and(|qp| qp >> 24 != 0), A::DESTINATION, "below 2^24"),
            (
                self.path.is_some_and(|path| path.flow_label >> 20 != 0),
                A::PATH,
                "a flow label below 2^20",
            ),
            (reads(self.max_dest_rd_atomic), A::MAX_DEST_RD_ATOMIC, "128 at most"),
            (reads(self.max_rd_atomic), A::MAX_RD_ATOMIC, "128 at most"),
            (exceeds(self.min_rnr_timer, 31), A::MIN_RNR_TIMER, "31 at most"),
            (exceeds(self.timeout, 31), A::TIMEOUT, "31 at most"),
            (exceeds(self.retry_count, 7), A::RETRY_COUNT, "7 at most"),
            (exceeds(self.rnr_retry, 7), A::RNR_RETRY, "7 at most"),
        ];
        match invalid.into_iter().find(|(is_wrong, ..)| *is_wrong) {
            Some((_, attribute, must_be)) => {
                Result::Err(ModifyError::InvalidValue { attribute, must_be })
            }
            None => Ok(()),
        }
    }
}

/// Why a step was not taken. Nothing changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ModifyError {
    /// The queue pair is not in the state that the caller believed.
    WrongState {
        /// What the caller said.
        expected: State,
        /// What it is in.
        actual: State,
    },
    /// There is no such step.
    InvalidTransition {
        /// From where.
        from: State,
        /// To where.
        to: State,
    },
    /// Attributes that this step needs are missing.
    MissingAttr {
        /// From where.
        from: State,
        /// To where.
        to: State,
        /// The attributes.
        missing: QpAttrMask,
    },
    /// Attributes were set that this step does not take.
    ExtraAttr {
        /// From where.
        from: State,
        /// To where.
        to: State,
        /// The attributes.
        extra: QpAttrMask,
    },
    /// An attribute has a value that it cannot have.
    InvalidValue {
        /// The attribute.
        attribute: QpAttrMask,
        /// What it must be.
        must_be: &'static str,
    },
}

impl fmt::Display for ModifyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::WrongState { expected, actual } => {
                write!(f, "the queue pair is in {actual}, not in {expected}")
            }
            Self::InvalidTransition { from, to } => {
                write!(f, "there is no step from {from} to {to}")
            }
            Self::MissingAttr { from, to, missing } => {
                write!(f, "the step from {from} to {to} also needs {missing}")
            }
            Self::ExtraAttr { from, to, extra } => {
                write!(f, "the step from {from} to {to} does not take {extra}")
            }
            Self::InvalidValue { attribute, must_be } => write!(f, "{attribute} must be {must_be}"),
        }
    }
}

impl core::error::Error for ModifyError {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_beyond_roce_are_whole_pages() {
        for bytes in [256, 512, 1024, 2048, 4096, 8192, 12_288, 61_440, 65_536, 1 << 20] {
            assert_eq!(Mtu::new(bytes).map(Mtu::bytes), Some(bytes));
        }
        for bytes in [0, 128, 257, 768, 1500, 4095, 5000, 9000, 61_441, (1 << 20) + 4096, u32::MAX]
        {
            assert_eq!(Mtu::new(bytes), None, "{bytes}");
        }
    }

    #[test]
    fn messages_are_cut_into_whole_packets() {
        for mtu in [256, 4096, 61_440, 1 << 20].map(|bytes| Mtu::new(bytes).unwrap()) {
            let bytes = mtu.bytes();
            for (len, packets) in [(0, 1), (1, 1), (bytes, 1), (bytes + 1, 2), (7 * bytes, 7)] {
                assert_eq!(mtu.packets(len), packets, "{len} by {bytes}");
            }
            let longest = 1_u32 << 31;
            let last = mtu.offset(mtu.packets(longest) - 1);
            assert!(last < longest && longest - last <= bytes, "{bytes}");
        }
    }
}

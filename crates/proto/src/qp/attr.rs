//! The states of a queue pair, and the attributes that each transition requires and permits: one
//! table.

use core::fmt;
use core::net::SocketAddr;
use core::ops::BitOr;

use super::Access;
use crate::psn::Psn;

/// The state of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum State {
    /// New, or reset: no work is kept, no packets are sent or accepted.
    Reset,
    /// Receives may be posted.
    Init,
    /// Ready to receive: requests of the peer are answered.
    Rtr,
    /// Ready to send: fully operational.
    Rts,
    /// Send queue drained or draining: messages that have started are completed, none is started.
    Sqd,
    /// Send queue error of an unreliable queue pair; it still receives.
    Sqe,
    /// Error: all work is flushed.
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
    /// Unreliable connected.
    Uc,
    /// Unreliable datagram.
    Ud,
}

/// Maximum MTU between two endpoints of this implementation.
const MAX_LOCAL_MTU: u32 = 1 << 20;

/// The path MTU: the maximum payload of a packet. Both ends of a connection use the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Mtu(u32);

impl Mtu {
    /// The sizes that RoCE defines, smallest first. Their verbs codes are 1 to 5.
    pub const ALL: [Self; 5] = [Self(256), Self(512), Self(1024), Self(2048), Self(4096)];

    /// An MTU in bytes: a power of two from 256 to 4096; beyond that, a multiple of 4096 up to
    /// 2^20, which only this implementation supports (within one machine, where no Ethernet frame
    /// sets a limit). Otherwise `None`.
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

    /// The largest RoCE MTU whose packets, with all headers, fit a link that carries `link` bytes.
    pub fn fitting(link: usize) -> Option<Self> {
        const HEADERS: usize = 80;
        Self::ALL.into_iter().rev().find(|mtu| mtu.0 as usize + HEADERS <= link)
    }

    /// The MTU in bytes.
    pub const fn bytes(self) -> u32 {
        self.0
    }

    /// The number of packets of a message of `len` bytes: at least one.
    pub(crate) fn packets(self, len: u32) -> u32 {
        // Fast path: most messages have one.
        if len <= self.0 { 1 } else { len.div_ceil(self.0) }
    }

    /// The offset of the packet with this index.
    pub(crate) fn offset(self, index: u32) -> u32 {
        index.wrapping_mul(self.0)
    }
}

/// The path to the peer. The protocol does not use it; it is among the attributes that a transition
/// requires.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PathAttributes {
    /// The peer's address and UDP port.
    pub peer: SocketAddr,
    /// Traffic class of our packets, without the ECN bits.
    pub traffic_class: u8,
    /// Hop limit of our packets.
    pub hop_limit: u8,
    /// Spreads queue pairs over the network's paths (ECMP): 20 bits.
    pub flow_label: u32,
    /// The UDP port that the peer sends from. `None` if it is not known: NICs, and Linux's
    /// soft-RoCE (rxe), receive on port 4791 and send from one port per queue pair.
    pub source_port: Option<u16>,
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
    4 QKEY "the Q_Key";
    5 PATH "the path to the peer";
    6 MTU "the path MTU";
    7 DESTINATION "the peer's queue pair number";
    8 RECEIVE_PSN "the first PSN to receive";
    9 MAX_DEST_RD_ATOMIC "the limit of the peer's reads and atomics";
    10 MIN_RNR_TIMER "the RNR timer";
    11 SEND_PSN "the first PSN to send";
    12 TIMEOUT "the ACK timeout";
    13 RETRY_COUNT "the retry count";
    14 RNR_RETRY "the RNR retry count";
    15 MAX_RD_ATOMIC "the limit of our reads and atomics";
    16 NOTIFY_DRAINED "the drained notification";
    17 SELECTIVE_REPEAT "selective repeat";
}

impl QpAttrMask {
    /// The empty set.
    pub const NONE: Self = Self(0);

    const fn and(self, more: Self) -> Self {
        Self(self.0 | more.0)
    }

    /// The attributes of `self` that are not in `other`.
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

/// A permitted state transition.
#[derive(Clone, Copy, Debug)]
pub struct Transition {
    /// The service that it applies to.
    pub service: Service,
    /// The current state.
    pub from: State,
    /// The next state.
    pub to: State,
    /// Attributes that must be set.
    pub required: QpAttrMask,
    /// Attributes that may be set.
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
const RC_RECEIVE_OPTIONAL: A = A::ACCESS.and(A::PARTITION_INDEX).and(A::SELECTIVE_REPEAT);
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
const UC_RECEIVE: A = A::PATH.and(A::MTU).and(A::DESTINATION).and(A::RECEIVE_PSN);
const UC_RUNNING: A = A::CURRENT_STATE.and(A::ACCESS);
const UC_DRAINED: A = A::PATH.and(A::ACCESS).and(A::PARTITION_INDEX);
const UD_RUNNING: A = A::CURRENT_STATE.and(A::QKEY);
const UD_IDENTITY: A = A::PARTITION_INDEX.and(A::QKEY);

use Service::{Rc, Uc, Ud};
use State::{Err, Init, Reset, Rtr, Rts, Sqd, Sqe};

/// All transitions except those to `ERR` (from any state but `RESET`) and to `RESET` (from any
/// state), which take no attributes. Attributes of alternate paths are missing: RoCE has none.
pub const TRANSITIONS: &[Transition] = &[
    transition(Rc, Reset, Init, A::PARTITION_INDEX.and(A::PORT).and(A::ACCESS), NONE),
    transition(Rc, Init, Init, NONE, A::PARTITION_INDEX.and(A::PORT).and(A::ACCESS)),
    transition(Rc, Init, Rtr, RC_RECEIVE, RC_RECEIVE_OPTIONAL),
    transition(Rc, Rtr, Rts, RC_SEND, RC_RUNNING),
    transition(Rc, Rts, Rts, NONE, RC_RUNNING),
    transition(Rc, Rts, Sqd, NONE, A::NOTIFY_DRAINED),
    transition(Rc, Sqd, Sqd, NONE, RC_DRAINED),
    transition(Rc, Sqd, Rts, NONE, RC_RUNNING),
    transition(Uc, Reset, Init, A::PARTITION_INDEX.and(A::PORT).and(A::ACCESS), NONE),
    transition(Uc, Init, Init, NONE, A::PARTITION_INDEX.and(A::PORT).and(A::ACCESS)),
    transition(Uc, Init, Rtr, UC_RECEIVE, A::ACCESS.and(A::PARTITION_INDEX)),
    transition(Uc, Rtr, Rts, A::SEND_PSN, UC_RUNNING),
    transition(Uc, Rts, Rts, NONE, UC_RUNNING),
    transition(Uc, Rts, Sqd, NONE, A::NOTIFY_DRAINED),
    transition(Uc, Sqd, Sqd, NONE, UC_DRAINED),
    transition(Uc, Sqd, Rts, NONE, UC_RUNNING),
    transition(Uc, Sqe, Rts, NONE, UC_RUNNING),
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

/// A transition, with the attributes to set.
///
/// ```
/// use warpwire_proto::qp::{Access, QpAttributes, State};
/// let attr = QpAttributes::new(State::Init)
///     .with_partition_index(0)
///     .with_port(1)
///     .with_access(Access::REMOTE_WRITE);
/// assert_eq!(attr.to, State::Init);
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct QpAttributes {
    /// The next state.
    pub to: State,
    /// The state that the caller expects the queue pair to be in; checked.
    pub current_state: Option<State>,
    /// Index of the partition key: 0, the default partition.
    pub partition_index: Option<u16>,
    /// The port: 1.
    pub port: Option<u8>,
    /// What the peer may do.
    pub access: Option<Access>,
    /// The Q_Key that datagrams to this queue pair must carry.
    pub qkey: Option<u32>,
    /// The path to the peer.
    pub path: Option<PathAttributes>,
    /// The path MTU.
    pub mtu: Option<Mtu>,
    /// The peer's queue pair number, 24 bits.
    pub destination: Option<u32>,
    /// The PSN of the first request to receive.
    pub receive_psn: Option<Psn>,
    /// Maximum of reads and atomics that the peer may have outstanding: 0 to 128.
    pub max_dest_rd_atomic: Option<u8>,
    /// Code of the time that the peer waits after an RNR NAK: 0 to 31, see
    /// [`rnr_time`](crate::wire::ext::rnr_time).
    pub min_rnr_timer: Option<u8>,
    /// The PSN of the first request to send.
    pub send_psn: Option<Psn>,
    /// ACK timeout: 4.096 µs · 2^n, n from 1 to 31; 0 waits forever. The longest wait before a
    /// packet is sent again; measured round trips shorten it.
    pub timeout: Option<u8>,
    /// Retries without a response, 0 to 7: a silence of `retry_count` + 1 timeouts fails the queue
    /// pair, however often packets were sent again in that time.
    pub retry_count: Option<u8>,
    /// Retries after an RNR NAK: 0 to 6; 7 is unlimited.
    pub rnr_retry: Option<u8>,
    /// Maximum of our own outstanding reads and atomics: 0 to 128, and at most the peer's
    /// `max_dest_rd_atomic`.
    pub max_rd_atomic: Option<u8>,
    /// Whether to report [`QpEvent::Drained`](super::QpEvent::Drained) after a transition to `SQD`.
    pub notify_drained: Option<bool>,
    /// Whether both ends have agreed on selective repeat, an extension of this implementation: the
    /// peer then gets NAKs that say which packets arrived behind a gap, and
    /// [`Host::hold`](super::Host::hold) keeps those. Without it packets are sent again from the
    /// gap on (go-back-N).
    pub selective_repeat: Option<bool>,
}

setters! {
    QpAttributes {
    } optional {
        with_current_state => current_state: State,
        with_partition_index => partition_index: u16,
        with_port => port: u8,
        with_access => access: Access,
        with_qkey => qkey: u32,
        with_path => path: PathAttributes,
        with_mtu => mtu: Mtu,
        with_destination => destination: u32,
        with_receive_psn => receive_psn: Psn,
        with_max_dest_rd_atomic => max_dest_rd_atomic: u8,
        with_min_rnr_timer => min_rnr_timer: u8,
        with_send_psn => send_psn: Psn,
        with_timeout => timeout: u8,
        with_retry_count => retry_count: u8,
        with_rnr_retry => rnr_retry: u8,
        with_max_rd_atomic => max_rd_atomic: u8,
        with_notify_drained => notify_drained: bool,
        with_selective_repeat => selective_repeat: bool,
    }
}

impl QpAttributes {
    /// A transition to `state` without attributes.
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
            selective_repeat: None,
        }
    }

    /// The set of attributes that are set.
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
            (self.selective_repeat.is_some(), A::SELECTIVE_REPEAT),
        ];
        set.into_iter().filter(|(is_set, _)| *is_set).fold(NONE, |all, (_, one)| all | one)
    }

    /// Checks that a queue pair of this service in state `from` may make this transition, and that
    /// the values are in range.
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
            (reads(self.max_dest_rd_atomic), A::MAX_DEST_RD_ATOMIC, "at most 128"),
            (reads(self.max_rd_atomic), A::MAX_RD_ATOMIC, "at most 128"),
            (exceeds(self.min_rnr_timer, 31), A::MIN_RNR_TIMER, "at most 31"),
            (exceeds(self.timeout, 31), A::TIMEOUT, "at most 31"),
            (exceeds(self.retry_count, 7), A::RETRY_COUNT, "at most 7"),
            (exceeds(self.rnr_retry, 7), A::RNR_RETRY, "at most 7"),
        ];
        match invalid.into_iter().find(|(is_wrong, ..)| *is_wrong) {
            Some((_, attribute, must_be)) => {
                Result::Err(ModifyError::InvalidValue { attribute, must_be })
            }
            None => Ok(()),
        }
    }
}

/// Why a transition was rejected. The queue pair is unchanged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ModifyError {
    /// The queue pair is not in the expected state.
    WrongState {
        /// The expected state.
        expected: State,
        /// The actual state.
        actual: State,
    },
    /// The table has no such transition.
    InvalidTransition {
        /// The current state.
        from: State,
        /// The requested state.
        to: State,
    },
    /// Required attributes are missing.
    MissingAttr {
        /// The current state.
        from: State,
        /// The requested state.
        to: State,
        /// The missing attributes.
        missing: QpAttrMask,
    },
    /// Attributes are set that the transition does not accept.
    ExtraAttr {
        /// The current state.
        from: State,
        /// The requested state.
        to: State,
        /// The extra attributes.
        extra: QpAttrMask,
    },
    /// The value of an attribute is out of range.
    InvalidValue {
        /// The attribute.
        attribute: QpAttrMask,
        /// The valid values.
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
                write!(f, "there is no transition from {from} to {to}")
            }
            Self::MissingAttr { from, to, missing } => {
                write!(f, "the transition from {from} to {to} also requires {missing}")
            }
            Self::ExtraAttr { from, to, extra } => {
                write!(f, "the transition from {from} to {to} does not accept {extra}")
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
    fn mtu_beyond_roce_is_a_multiple_of_4096() {
        for bytes in [256, 512, 1024, 2048, 4096, 8192, 12_288, 61_440, 65_536, 1 << 20] {
            assert_eq!(Mtu::new(bytes).map(Mtu::bytes), Some(bytes));
        }
        for bytes in [0, 128, 257, 768, 1500, 4095, 5000, 9000, 61_441, (1 << 20) + 4096, u32::MAX]
        {
            assert_eq!(Mtu::new(bytes), None, "{bytes}");
        }
    }

    #[test]
    fn messages_are_split_into_mtu_sized_packets() {
        for mtu in [256, 4096, 61_440, 1 << 20].map(|bytes| Mtu::new(bytes).unwrap()) {
            let bytes = mtu.bytes();
            for (len, packets) in [(0, 1), (1, 1), (bytes, 1), (bytes + 1, 2), (7 * bytes, 7)] {
                assert_eq!(mtu.packets(len), packets, "{len} by {bytes}");
            }
            let max_len = 1_u32 << 31;
            let last = mtu.offset(mtu.packets(max_len) - 1);
            assert!(last < max_len && max_len - last <= bytes, "{bytes}");
        }
    }
}

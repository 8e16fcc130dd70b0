//! Completion queue entries (CQEs), written and parsed.

use std::fmt;

use super::opcode::WqeOpcode;
use super::{CqeSyndrome, Status, array, be16, be32, be64, put};

/// Fill byte of an empty completion queue: an invalid opcode, and the owner bit set, which is all
/// that some pollers check.
pub const EMPTY_CQE_BYTE: u8 = 0xff;

/// Byte offsets of the fields.
mod field {
    pub const SOURCE_GID: usize = 0;
    pub const SOURCE_PORT: usize = 22;
    pub const FLAGS_RQPN: usize = 24;
    pub const USER_INDEX: usize = 32;
    pub const IMM: usize = 36;
    pub const BYTE_COUNT: usize = 44;
    pub const TIMESTAMP: usize = 48;
    pub const VENDOR: usize = 54;
    pub const SYNDROME: usize = 55;
    pub const OPCODE_QPN: usize = 56;
    pub const COUNTER: usize = 60;
    pub const OP_OWN: usize = 63;
}

/// CQE opcodes.
mod code {
    pub const REQUESTER: u8 = 0;
    pub const WRITE_IMM: u8 = 1;
    pub const SEND: u8 = 2;
    pub const SEND_IMM: u8 = 3;
    pub const SEND_INVALIDATE: u8 = 4;
    pub const REQUESTER_ERROR: u8 = 13;
    pub const RESPONDER_ERROR: u8 = 14;
    pub const NO_PACKET: u8 = 6;
    pub const INVALID: u8 = 15;
}

/// Owner bit of completion `number`, counted from 0, of a queue with `entries` entries: it toggles
/// with each lap.
///
/// ```
/// use warpwire::mlx5::owner_bit;
/// assert_eq!([0, 3, 4, 8].map(|number| owner_bit(number, 4)), [false, false, true, false]);
/// ```
#[inline]
pub const fn owner_bit(number: u64, entries: u64) -> bool {
    if entries.is_power_of_two() {
        return number & entries != 0;
    }
    match number.checked_div(entries) {
        Some(lap) => lap & 1 == 1,
        None => false,
    }
}

/// Whether the send WQE at WQEBB `index` is complete, given the counter in a collapsed completion
/// queue: one entry, overwritten by every completion with the index of its WQE. `depth` is the
/// maximum number of WQEBBs in flight; the WQE must have been posted.
///
/// ```
/// use warpwire::mlx5::collapsed_is_done;
/// assert!(!collapsed_is_done(0, 0xffff, 128)); // an empty queue
/// assert!(collapsed_is_done(0, 0, 128) && !collapsed_is_done(1, 0, 128));
/// ```
#[inline]
pub const fn collapsed_is_done(index: u16, counter: u16, depth: u16) -> bool {
    index.wrapping_sub(counter).wrapping_sub(1) >= depth
}

/// Index of the latest completed WQE according to a collapsed completion queue, extended to the
/// 64-bit count of `reserved` WQEBBs; `None` if there is none yet.
///
/// ```
/// use warpwire::mlx5::collapsed_latest;
/// assert_eq!(collapsed_latest(0, 0xffff), None);
/// assert_eq!(collapsed_latest(70_000, (69_990u32 & 0xffff) as u16), Some(69_990));
/// ```
#[inline]
pub const fn collapsed_latest(reserved: u64, counter: u16) -> Option<u64> {
    reserved.checked_sub((reserved as u16).wrapping_sub(counter) as u64)
}

/// What consumed a receive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecvKind {
    /// An RDMA write with this immediate data; its payload went elsewhere.
    WriteImm([u8; 4]),
    /// A message.
    Send,
    /// A message with immediate data.
    SendImm([u8; 4]),
    /// A message that invalidated this rkey.
    SendInvalidate(u32),
}

/// Source of a UD message; the default value on connected queue pairs.
///
/// GID and port are an extension of the software HCA, in bytes that ConnectX reserves (0 to 15) or
/// uses for the LID: the GRH in front of the message does not contain the sender's port.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Origin {
    /// Source queue pair number.
    pub qpn: u32,
    /// Service level (SL).
    pub service_level: u8,
    /// Whether a GRH precedes the message.
    pub has_grh: bool,
    /// Source GID; zero without a GRH.
    pub gid: [u8; 16],
    /// Source UDP port; zero without a GRH.
    pub port: u16,
}

/// A queue of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Queue {
    /// The send queue.
    Send,
    /// The receive queue, or the SRQ.
    Receive,
}

/// Contents of a CQE.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CqeOutcome {
    /// A send work request succeeded.
    Sent {
        /// Operation of the completed work.
        opcode: WqeOpcode,
        /// Bytes fetched by an RDMA read or an atomic; 0 otherwise.
        bytes: u32,
    },
    /// A receive was consumed.
    Received {
        /// What consumed it.
        recv_kind: RecvKind,
        /// Bytes received.
        bytes: u32,
        /// Source, for UD.
        origin: Origin,
    },
    /// Work failed. Of the other fields only `qpn` and `counter` are valid.
    Failed {
        /// The queue of the failed work.
        queue: Queue,
        /// Why it failed.
        status: Status,
        /// Vendor syndrome.
        vendor: u8,
        /// Operation of the failed work; valid for the send queue only.
        opcode: WqeOpcode,
    },
}

/// A CQE.
///
/// ```
/// use warpwire::mlx5::{Cqe, WqeOpcode, CqeOutcome, CqeTail};
/// let done = Cqe {
///     outcome: CqeOutcome::Sent { opcode: WqeOpcode::RdmaWrite, bytes: 0 },
///     qpn: 0x123,
///     user_index: 7,
///     counter: 5,
///     solicited: false,
///     timestamp: 0,
/// };
/// let encoded = done.encode(false);
/// // The body first, then, with a release store, the last four bytes.
/// let mut entry = [0xff; 64];
/// entry[..60].copy_from_slice(&encoded.body);
/// assert!(!CqeTail::parse([0xff; 4]).is_owned(false));
/// entry[60..].copy_from_slice(&encoded.tail);
/// assert!(CqeTail::parse(encoded.tail).is_owned(false));
/// assert_eq!(Cqe::parse(&entry), Ok(done));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cqe {
    /// Kind of completion, with its data.
    pub outcome: CqeOutcome,
    /// Queue pair number, 24 bits.
    pub qpn: u32,
    /// User index of the queue pair or SRQ, 24 bits.
    pub user_index: u32,
    /// Send queue: index of the WQE's first WQEBB. Receive queue: index of the WQE. SRQ: slot.
    pub counter: u16,
    /// Whether the sender set the solicited event bit.
    pub solicited: bool,
    /// Time of completion, in ticks of the device clock; 0 for failures.
    pub timestamp: u64,
}

/// A CQE in the two parts in which it is written: a poller that sees the second must see the first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EncodedCqe {
    /// Bytes 0 to 59.
    pub body: [u8; 60],
    /// Bytes 60 to 63, for one aligned store.
    pub tail: [u8; 4],
}

impl EncodedCqe {
    /// The tail as a word that is stored in native byte order.
    pub const fn tail_word(&self) -> u32 {
        u32::from_ne_bytes(self.tail)
    }

    /// All 64 bytes.
    pub fn bytes(&self) -> [u8; 64] {
        let mut all = [0; 64];
        all[..60].copy_from_slice(&self.body);
        all[60..].copy_from_slice(&self.tail);
        all
    }
}

/// The most common CQE: a send work request succeeded. Small enough to stay in registers.
///
/// ```
/// use warpwire::mlx5::{Cqe, WqeOpcode, CqeOutcome, SendCqe};
/// let opcode = WqeOpcode::RdmaWrite;
/// let sent = SendCqe { opcode, bytes: 0, qpn: 7, user_index: 1, counter: 3 };
/// let cqe = Cqe::parse_words(&sent.encode_words(true)).unwrap();
/// assert_eq!((cqe.qpn, cqe.counter), (7, 3));
/// assert_eq!(SendCqe::parse_words(&cqe.encode_words(true)), Some(sent));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SendCqe {
    /// Operation of the completed work.
    pub opcode: WqeOpcode,
    /// Bytes fetched by an RDMA read or an atomic; 0 otherwise.
    pub bytes: u32,
    /// Queue pair number, 24 bits.
    pub qpn: u32,
    /// User index of the queue pair, 24 bits.
    pub user_index: u32,
    /// Index of the WQE's first WQEBB, modulo 2^16.
    pub counter: u16,
}

impl SendCqe {
    /// Encodes the CQE; see [`Cqe::encode_words`].
    #[inline]
    pub fn encode_words(&self, owner: bool) -> [u64; 8] {
        let opcode_qpn = (u32::from(self.opcode.code()) << 24) | (self.qpn & 0xff_ffff);
        let own = (code::REQUESTER << 4) | u8::from(owner);
        let tail = u32::from(self.counter) << 16 | u32::from(own);
        let user_index = u64::from(self.user_index & 0xff_ffff) << 32;
        let last = u64::from(opcode_qpn) << 32 | u64::from(tail);
        [0, 0, 0, 0, user_index, self.bytes.into(), 0, last].map(u64::to_be)
    }

    /// Parses a CQE; `None` if it is of another kind, or solicited.
    #[inline]
    pub fn parse_words(words: &[u64; 8]) -> Option<Self> {
        let [_, _, _, _, user_index, count, _, last] = *words;
        let last = u64::from_be(last);
        // Not solicited, and format 0.
        if last as u8 >> 1 != code::REQUESTER << 3 {
            return None;
        }
        Some(Self {
            opcode: WqeOpcode::from_code((last >> 56) as u8),
            bytes: u64::from_be(count) as u32,
            qpn: (last >> 32) as u32 & 0xff_ffff,
            user_index: (u64::from_be(user_index) >> 32) as u32 & 0xff_ffff,
            counter: (last >> 16) as u16,
        })
    }
}

impl Cqe {
    /// Encodes the CQE with this owner bit.
    pub fn encode(&self, owner: bool) -> EncodedCqe {
        let mut body = [0; 60];
        put(&mut body, field::USER_INDEX, (self.user_index & 0xff_ffff).to_be_bytes());
        let (code, opcode) = match self.outcome {
            CqeOutcome::Sent { opcode, bytes } => {
                put(&mut body, field::BYTE_COUNT, bytes.to_be_bytes());
                put(&mut body, field::TIMESTAMP, self.timestamp.to_be_bytes());
                (code::REQUESTER, opcode.code())
            }
            CqeOutcome::Received { recv_kind, bytes, origin } => {
                put(&mut body, field::BYTE_COUNT, bytes.to_be_bytes());
                put(&mut body, field::TIMESTAMP, self.timestamp.to_be_bytes());
                put(&mut body, field::FLAGS_RQPN, origin.word().to_be_bytes());
                if origin.has_grh {
                    put(&mut body, field::SOURCE_GID, origin.gid);
                    put(&mut body, field::SOURCE_PORT, origin.port.to_be_bytes());
                }
                (encode_recv_kind(recv_kind, &mut body), 0)
            }
            // A failure has no timestamp: its syndromes occupy the same bytes.
            CqeOutcome::Failed { queue, status, vendor, opcode } => {
                body[field::VENDOR] = vendor;
                body[field::SYNDROME] = CqeSyndrome::from(status).0;
                let code = match queue {
                    Queue::Send => code::REQUESTER_ERROR,
                    Queue::Receive => code::RESPONDER_ERROR,
                };
                (code, opcode.code())
            }
        };
        let opcode_qpn = (u32::from(opcode) << 24) | (self.qpn & 0xff_ffff);
        put(&mut body, field::OPCODE_QPN, opcode_qpn.to_be_bytes());
        let [high, low] = self.counter.to_be_bytes();
        let own = (code << 4) | (u8::from(self.solicited) << 1) | u8::from(owner);
        EncodedCqe { body, tail: [high, low, 0, own] }
    }

    /// Encodes the CQE as eight words, to be stored in native byte order; the last must be stored
    /// last. The same bytes as [`Cqe::encode`], and faster for the common case.
    #[inline]
    pub fn encode_words(&self, owner: bool) -> [u64; 8] {
        let Self { outcome: CqeOutcome::Sent { opcode, bytes }, solicited: false, .. } = *self
        else {
            return self.encode_slow(owner);
        };
        let Self { qpn, user_index, counter, timestamp, .. } = *self;
        let mut words = SendCqe { opcode, bytes, qpn, user_index, counter }.encode_words(owner);
        words[6] = timestamp.to_be();
        words
    }

    #[cold]
    fn encode_slow(&self, owner: bool) -> [u64; 8] {
        let bytes = self.encode(owner).bytes();
        std::array::from_fn(|word| u64::from_ne_bytes(array(&bytes, word * 8)))
    }

    /// As [`Cqe::parse`], from the words of [`Cqe::encode_words`].
    #[inline]
    pub fn parse_words(words: &[u64; 8]) -> Result<Self, CqeError> {
        let Some(SendCqe { opcode, bytes, qpn, user_index, counter }) = SendCqe::parse_words(words)
        else {
            return Self::parse_slow(words);
        };
        let (outcome, timestamp) = (CqeOutcome::Sent { opcode, bytes }, u64::from_be(words[6]));
        Ok(Self { outcome, qpn, user_index, counter, solicited: false, timestamp })
    }

    #[cold]
    fn parse_slow(words: &[u64; 8]) -> Result<Self, CqeError> {
        let mut bytes = [0; 64];
        for (slot, word) in bytes.as_chunks_mut::<8>().0.iter_mut().zip(words) {
            *slot = word.to_ne_bytes();
        }
        Self::parse(&bytes)
    }

    /// Parses a CQE. The caller has checked with [`CqeTail::is_owned`] that it has been written.
    pub fn parse(bytes: &[u8; 64]) -> Result<Self, CqeError> {
        let tail = CqeTail::parse(array(bytes, field::COUNTER));
        if tail.code == code::INVALID {
            return Err(CqeError::NotWritten);
        }
        if tail.format != 0 {
            return Err(CqeError::Format(tail.format));
        }
        let opcode_qpn = be32(bytes, field::OPCODE_QPN);
        let opcode = WqeOpcode::from_code((opcode_qpn >> 24) as u8);
        let count = be32(bytes, field::BYTE_COUNT);
        let received = |recv_kind| CqeOutcome::Received {
            recv_kind,
            bytes: count,
            origin: Origin::parse(bytes),
        };
        let failed = |queue| CqeOutcome::Failed {
            queue,
            status: CqeSyndrome(bytes[field::SYNDROME]).into(),
            vendor: bytes[field::VENDOR],
            opcode,
        };
        let imm = array(bytes, field::IMM);
        let outcome = match tail.code {
            code::REQUESTER => CqeOutcome::Sent { opcode, bytes: count },
            code::WRITE_IMM => received(RecvKind::WriteImm(imm)),
            code::SEND => received(RecvKind::Send),
            code::SEND_IMM => received(RecvKind::SendImm(imm)),
            code::SEND_INVALIDATE => received(RecvKind::SendInvalidate(u32::from_be_bytes(imm))),
            code::REQUESTER_ERROR => failed(Queue::Send),
            code::RESPONDER_ERROR => failed(Queue::Receive),
            other => return Err(CqeError::WqeOpcode(other)),
        };
        let is_failure = matches!(outcome, CqeOutcome::Failed { .. });
        Ok(Self {
            outcome,
            qpn: opcode_qpn & 0xff_ffff,
            user_index: be32(bytes, field::USER_INDEX) & 0xff_ffff,
            counter: tail.counter,
            solicited: tail.solicited,
            timestamp: if is_failure { 0 } else { be64(bytes, field::TIMESTAMP) },
        })
    }
}

impl Origin {
    fn word(self) -> u32 {
        let sl = u32::from(self.service_level & 15) << 24;
        (u32::from(self.has_grh) << 28) | sl | (self.qpn & 0xff_ffff)
    }

    fn parse(bytes: &[u8; 64]) -> Self {
        let word = be32(bytes, field::FLAGS_RQPN);
        let plain = Self {
            qpn: word & 0xff_ffff,
            service_level: (word >> 24) as u8 & 15,
            ..Self::default()
        };
        if (word >> 28) & 3 == 0 {
            return plain;
        }
        let (gid, port) = (array(bytes, field::SOURCE_GID), be16(bytes, field::SOURCE_PORT));
        Self { has_grh: true, gid, port, ..plain }
    }
}

fn encode_recv_kind(recv_kind: RecvKind, body: &mut [u8; 60]) -> u8 {
    let (code, imm) = match recv_kind {
        RecvKind::WriteImm(imm) => (code::WRITE_IMM, imm),
        RecvKind::Send => (code::SEND, [0; 4]),
        RecvKind::SendImm(imm) => (code::SEND_IMM, imm),
        RecvKind::SendInvalidate(rkey) => (code::SEND_INVALIDATE, rkey.to_be_bytes()),
    };
    put(body, field::IMM, imm);
    code
}

/// The last four bytes of a CQE, which pollers read first.
///
/// ```
/// use warpwire::mlx5::CqeTail;
/// let tail = CqeTail::parse([0, 5, 0, 0xd1]);
/// assert_eq!(tail.counter, 5);
/// assert!(tail.is_error() && tail.is_owned(true) && !tail.is_owned(false));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CqeTail {
    /// As [`Cqe::counter`].
    pub counter: u16,
    /// CQE opcode.
    pub code: u8,
    /// Format of the body; only 0 is used here.
    pub format: u8,
    /// As [`Cqe::solicited`].
    pub solicited: bool,
    /// Owner bit.
    pub owner: bool,
}

impl CqeTail {
    /// Parses the four bytes; any value is valid.
    #[inline]
    pub fn parse(bytes: [u8; 4]) -> Self {
        let own = bytes[field::OP_OWN - field::COUNTER];
        Self {
            counter: be16(&bytes, 0),
            code: own >> 4,
            format: (own >> 2) & 3,
            solicited: own & 2 != 0,
            owner: own & 1 != 0,
        }
    }

    /// Whether the CQE has been written in the lap with this [`owner_bit`].
    #[inline]
    pub const fn is_owned(&self, owner: bool) -> bool {
        self.code != code::INVALID && self.owner == owner
    }

    /// The tail of a voided CQE, which every poller skips. Counter and owner bit stay.
    ///
    /// ```
    /// use warpwire::mlx5::CqeTail;
    /// let void = CqeTail::parse(CqeTail::void([0, 7, 0, 0x21]));
    /// assert!(void.is_owned(true) && !void.is_error() && void.counter == 7);
    /// ```
    pub const fn void([high, low, signature, own]: [u8; 4]) -> [u8; 4] {
        [high, low, signature, code::NO_PACKET << 4 | own & 1]
    }

    /// The same tail with this [`owner_bit`], for a CQE that moves to a queue of another length.
    pub const fn with_owner([high, low, signature, own]: [u8; 4], owner: bool) -> [u8; 4] {
        [high, low, signature, own & !1 | owner as u8]
    }

    /// Whether it is an error CQE.
    pub const fn is_error(&self) -> bool {
        matches!(self.code, code::REQUESTER_ERROR | code::RESPONDER_ERROR)
    }
}

/// Why a CQE cannot be parsed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CqeError {
    /// The entry has not been written yet.
    NotWritten,
    /// A format that is not supported (inline or compressed).
    Format(u8),
    /// An unknown opcode.
    WqeOpcode(u8),
}

impl fmt::Display for CqeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotWritten => f.pad("the CQE has not been written"),
            Self::Format(format) => write!(f, "CQE format {format} is not supported"),
            Self::WqeOpcode(code) => write!(f, "CQE opcode {code} is unknown"),
        }
    }
}

impl std::error::Error for CqeError {}

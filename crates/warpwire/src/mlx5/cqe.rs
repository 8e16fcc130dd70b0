//! Completion queue entries.

use std::fmt;

use super::opcode::Opcode;
use super::status::Status;
use super::{array, be16, be32, be64, put};

/// The byte that an empty completion queue is filled with: no opcode, and the owner bit set, which some
/// pollers look at alone.
pub const EMPTY: u8 = 0xff;

/// Where the fields lie.
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

/// The opcodes of completions.
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

/// The owner bit of the `number`-th completion of a queue with so many entries, from zero on.
///
/// ```
/// use warpwire::mlx5::owner_bit;
/// assert_eq!([owner_bit(0, 4), owner_bit(3, 4), owner_bit(4, 4), owner_bit(8, 4)], [false, false, true, false]);
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

/// Whether the entry of a send queue that begins at block `index` is done, given what a collapsed
/// completion queue says: one entry that every completion overwrites, with the block of the latest.
/// `depth` is how many blocks may be on their way; the entry must have been posted.
///
/// ```
/// use warpwire::mlx5::collapsed_is_done;
/// assert!(!collapsed_is_done(0, 0xffff, 128)); // what an empty queue says
/// assert!(collapsed_is_done(0, 0, 128) && !collapsed_is_done(1, 0, 128));
/// ```
#[inline]
pub const fn collapsed_is_done(index: u16, counter: u16, depth: u16) -> bool {
    index.wrapping_sub(counter).wrapping_sub(1) >= depth
}

/// The latest block that a collapsed completion queue says is done, in the full count of which `reserved`
/// blocks were handed out; `None` while there is none.
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

/// What arrived in a receive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecvKind {
    /// The peer wrote elsewhere, and sent these four bytes.
    WriteImm([u8; 4]),
    /// A message.
    Send,
    /// A message with four bytes beside it.
    SendImm([u8; 4]),
    /// A message that invalidated this key.
    SendInvalidate(u32),
}

/// Where a datagram came from; connected queue pairs leave it as it is by default.
///
/// GID and port are this HCA's own addition, in bytes that ConnectX leaves reserved (the first sixteen) or has the LID
/// in: the port of the sender is not in the routing header before the message.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Origin {
    /// The sender's queue pair.
    pub qpn: u32,
    /// The service level.
    pub service_level: u8,
    /// Whether a routing header lies before the message.
    pub has_grh: bool,
    /// The sender's address; zero without a routing header.
    pub gid: [u8; 16],
    /// The UDP port that it was sent from; zero without a routing header.
    pub port: u16,
}

/// The side of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Queue {
    /// The send queue.
    Send,
    /// The receive queue, or the shared one.
    Receive,
}

/// What a completion says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CqeOutcome {
    /// Work of a send queue is done.
    Sent {
        /// What it was.
        opcode: Opcode,
        /// How many bytes were fetched, by a read or an atomic operation.
        bytes: u32,
    },
    /// A receive was used.
    Received {
        /// What for.
        recv_kind: RecvKind,
        /// How many bytes arrived.
        bytes: u32,
        /// Where they came from.
        origin: Origin,
    },
    /// Work failed. Of the rest only the queue pair and the counter mean anything.
    Failed {
        /// Whose it was.
        queue: Queue,
        /// Why.
        status: Status,
        /// The maker's own code.
        vendor: u8,
        /// What it was, in a send queue.
        opcode: Opcode,
    },
}

/// A completion.
///
/// ```
/// use warpwire::mlx5::{Cqe, Opcode, CqeOutcome, CqeTail};
/// let done = Cqe {
///     outcome: CqeOutcome::Sent { opcode: Opcode::RdmaWrite, bytes: 0 },
///     qpn: 0x123,
///     user_index: 7,
///     counter: 5,
///     solicited: false,
///     timestamp: 0,
/// };
/// let encoded = done.encode(false);
/// // The body first, then, behind a release, the last four bytes at once.
/// let mut entry = [0xff; 64];
/// entry[..60].copy_from_slice(&encoded.body);
/// assert!(!CqeTail::parse([0xff; 4]).is_owned(false));
/// entry[60..].copy_from_slice(&encoded.tail);
/// assert!(CqeTail::parse(encoded.tail).is_owned(false));
/// assert_eq!(Cqe::parse(&entry), Ok(done));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cqe {
    /// What it says.
    pub outcome: CqeOutcome,
    /// The queue pair whose work it was.
    pub qpn: u32,
    /// The number that the owner of the queue pair, or of the shared receive queue, gave it: 24 bits.
    pub user_index: u32,
    /// For a send queue the first block of the entry; for a receive queue its number; for a shared one its
    /// slot.
    pub counter: u16,
    /// Whether the sender asked for the owner to be woken.
    pub solicited: bool,
    /// When, in the clock of the HCA.
    pub timestamp: u64,
}

/// The bytes of a completion, in the two parts in which it is written: a poller that sees the second must
/// see the first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EncodedCqe {
    /// Bytes 0 to 59.
    pub body: [u8; 60],
    /// Bytes 60 to 63, for one aligned store.
    pub tail: [u8; 4],
}

impl EncodedCqe {
    /// The tail as a number whose store on this machine gives its bytes.
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

/// What most completions say: posted work has succeeded. Small enough to stay in registers on its way.
///
/// ```
/// use warpwire::mlx5::{Cqe, Opcode, CqeOutcome, Sent};
/// let sent = Sent { opcode: Opcode::RdmaWrite, bytes: 0, qpn: 7, user_index: 1, counter: 3 };
/// let cqe = Cqe::parse_words(&sent.encode_words(true)).unwrap();
/// assert_eq!((cqe.qpn, cqe.counter), (7, 3));
/// assert_eq!(Sent::parse_words(&cqe.encode_words(true)), Some(sent));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sent {
    /// What it was.
    pub opcode: Opcode,
    /// How many bytes it fetched, if that is what it does.
    pub bytes: u32,
    /// The queue pair.
    pub qpn: u32,
    /// What its maker calls it.
    pub user_index: u32,
    /// The block of the send queue that its entry begins with, as its writer counts.
    pub counter: u16,
}

impl Sent {
    /// The words of its completion; see [`Cqe::encode_words`].
    #[inline]
    pub fn encode_words(&self, owner: bool) -> [u64; 8] {
        let opcode_qpn = (u32::from(self.opcode.code()) << 24) | (self.qpn & 0xff_ffff);
        let own = (code::REQUESTER << 4) | u8::from(owner);
        let tail = u32::from(self.counter) << 16 | u32::from(own);
        let user_index = u64::from(self.user_index & 0xff_ffff) << 32;
        let last = u64::from(opcode_qpn) << 32 | u64::from(tail);
        [0, 0, 0, 0, user_index, self.bytes.into(), 0, last].map(u64::to_be)
    }

    /// Reads it from a completion; nothing, if that says something else or more.
    #[inline]
    pub fn parse_words(words: &[u64; 8]) -> Option<Self> {
        let [_, _, _, _, user_index, count, _, last] = *words;
        let last = u64::from_be(last);
        // Neither solicited nor of another format.
        if last as u8 >> 1 != code::REQUESTER << 3 {
            return None;
        }
        Some(Self {
            opcode: Opcode::from_code((last >> 56) as u8),
            bytes: u64::from_be(count) as u32,
            qpn: (last >> 32) as u32 & 0xff_ffff,
            user_index: (u64::from_be(user_index) >> 32) as u32 & 0xff_ffff,
            counter: (last >> 16) as u16,
        })
    }
}

impl Cqe {
    /// The bytes, with the owner bit of the lap that they are written in.
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
            // The timestamp of a failure ends where its codes begin; it is left out.
            CqeOutcome::Failed { queue, status, vendor, opcode } => {
                body[field::VENDOR] = vendor;
                body[field::SYNDROME] = status.syndrome();
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

    /// The bytes as eight words, each of which this machine stores as they lie: the last one tells of the others. As
    /// [`Cqe::encode`] otherwise, and faster for what is most common.
    #[inline]
    pub fn encode_words(&self, owner: bool) -> [u64; 8] {
        let Self { outcome: CqeOutcome::Sent { opcode, bytes }, solicited: false, .. } = *self
        else {
            return self.encode_slow(owner);
        };
        let Self { qpn, user_index, counter, timestamp, .. } = *self;
        let mut words = Sent { opcode, bytes, qpn, user_index, counter }.encode_words(owner);
        words[6] = timestamp.to_be();
        words
    }

    #[cold]
    fn encode_slow(&self, owner: bool) -> [u64; 8] {
        let bytes = self.encode(owner).bytes();
        std::array::from_fn(|word| u64::from_ne_bytes(array(&bytes, word * 8)))
    }

    /// As [`Cqe::parse`], from the words that [`Cqe::encode_words`] gives.
    #[inline]
    pub fn parse_words(words: &[u64; 8]) -> Result<Self, CqeError> {
        let Some(Sent { opcode, bytes, qpn, user_index, counter }) = Sent::parse_words(words)
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

    /// Reads a completion; [`CqeTail`] says beforehand whether it has been written.
    pub fn parse(bytes: &[u8; 64]) -> Result<Self, CqeError> {
        let tail = CqeTail::parse(array(bytes, field::COUNTER));
        if tail.code == code::INVALID {
            return Err(CqeError::NotWritten);
        }
        if tail.format != 0 {
            return Err(CqeError::Format(tail.format));
        }
        let opcode_qpn = be32(bytes, field::OPCODE_QPN);
        let opcode = Opcode::from_code((opcode_qpn >> 24) as u8);
        let count = be32(bytes, field::BYTE_COUNT);
        let received = |recv_kind| CqeOutcome::Received {
            recv_kind,
            bytes: count,
            origin: Origin::parse(bytes),
        };
        let failed = |queue| CqeOutcome::Failed {
            queue,
            status: Status::from_syndrome(bytes[field::SYNDROME]),
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
            other => return Err(CqeError::Opcode(other)),
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

/// The last four bytes of a completion, which pollers watch.
///
/// ```
/// use warpwire::mlx5::CqeTail;
/// let tail = CqeTail::parse([0, 5, 0, 0xd1]);
/// assert_eq!(tail.counter, 5);
/// assert!(tail.is_error() && tail.is_owned(true) && !tail.is_owned(false));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CqeTail {
    /// The counter of [`Cqe::counter`].
    pub counter: u16,
    /// The opcode of the completion.
    pub code: u8,
    /// How the body is laid out; 0 is the only one that is written here.
    pub format: u8,
    /// The flag of [`Cqe::solicited`].
    pub solicited: bool,
    /// The owner bit.
    pub owner: bool,
}

impl CqeTail {
    /// Reads the four bytes.
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

    /// Whether the completion has been written in the lap that has this [`owner_bit`].
    #[inline]
    pub const fn is_owned(&self, owner: bool) -> bool {
        self.code != code::INVALID && self.owner == owner
    }

    /// The bytes with which a completion says nothing any more, to whoever comes to it.
    ///
    /// ```
    /// use warpwire::mlx5::CqeTail;
    /// let void = CqeTail::parse(CqeTail::void([0, 7, 0, 0x21]));
    /// assert!(void.is_owned(true) && !void.is_error() && void.counter == 7);
    /// ```
    pub const fn void([high, low, signature, own]: [u8; 4]) -> [u8; 4] {
        [high, low, signature, code::NO_PACKET << 4 | own & 1]
    }

    /// Whether it tells of a failure.
    pub const fn is_error(&self) -> bool {
        matches!(self.code, code::REQUESTER_ERROR | code::RESPONDER_ERROR)
    }
}

/// Why bytes are not a completion that is known here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CqeError {
    /// Nothing has been written yet.
    NotWritten,
    /// The body is laid out in another way (inline, or compressed).
    Format(u8),
    /// An opcode without a meaning here.
    Opcode(u8),
}

impl fmt::Display for CqeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotWritten => f.pad("no completion has been written there"),
            Self::Format(format) => write!(f, "completion format {format} is not in use here"),
            Self::Opcode(code) => write!(f, "completion opcode {code} is not in use here"),
        }
    }
}

impl std::error::Error for CqeError {}

//! Send queue entries, read from bytes that nobody vouches for.

use std::fmt;

use super::address::{ADDRESS_SEGMENTS, AddressVector};
use super::atomic::{Atomic, AtomicWidth};
use super::opcode::Opcode;
use super::status::Status;
use super::{MAX_MESSAGE_LEN, SEGMENT, array, be16, be32, be64, wqebbs};

/// The bit of a byte count that says that the bytes follow.
pub(super) const INLINE: u32 = 1 << 31;
/// What `opmod` says for masked operations on 4 bytes, and on 8.
pub(super) const MASKED_FOUR: u8 = 0x08;
pub(super) const MASKED_EIGHT: u8 = 0x09;

/// Where the fields of a control segment lie.
pub(super) mod field {
    pub const OPMOD: usize = 0;
    pub const INDEX: usize = 1;
    pub const OPCODE: usize = 3;
    pub const QPN_DS: usize = 4;
    pub const FLAGS: usize = 11;
    pub const IMM: usize = 12;
}

/// When an entry makes a completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CqUpdate {
    /// When it fails.
    OnError,
    /// When it is the first to fail.
    OnFirstError,
    /// Always.
    Always,
    /// Always, and an event too.
    AlwaysWithEvent,
}

impl CqUpdate {
    const fn from_bits(bits: u8) -> Self {
        match bits & 3 {
            0 => Self::OnError,
            1 => Self::OnFirstError,
            2 => Self::Always,
            _ => Self::AlwaysWithEvent,
        }
    }
}

/// What an entry waits for before it begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FenceMode {
    /// Nothing.
    None,
    /// Changes of memory keys that were posted before (nothing, here: there are none).
    Small,
    /// The answers of reads and atomics that were posted before.
    ReadsAndAtomics,
    /// Everything that was posted before.
    Strong,
    /// Both [`Small`](Self::Small) and [`ReadsAndAtomics`](Self::ReadsAndAtomics): what verbs' fence is.
    Both,
}

impl FenceMode {
    /// The three bits. Values without a meaning are taken for the strictest: waiting is never wrong.
    const fn from_bits(bits: u8) -> Self {
        match bits & 7 {
            0 => Self::None,
            1 => Self::Small,
            2 => Self::ReadsAndAtomics,
            4 => Self::Both,
            _ => Self::Strong,
        }
    }

    /// The bits that say it.
    pub(super) const fn bits(self) -> u8 {
        match self {
            Self::None => 0,
            Self::Small => 1,
            Self::ReadsAndAtomics => 2,
            Self::Strong => 3,
            Self::Both => 4,
        }
    }

    /// Whether the answers of earlier reads and atomics must be there first.
    pub const fn waits_for_reads(self) -> bool {
        matches!(self, Self::ReadsAndAtomics | Self::Strong | Self::Both)
    }

    /// Whether everything posted earlier must be done first.
    pub const fn waits_for_all(self) -> bool {
        matches!(self, Self::Strong)
    }
}

/// The first segment of an entry: what it is and how large.
///
/// The engine reads this one first, copies [`segments`](Control::segments) × 16 bytes out of the ring,
/// and parses the copy: the ring may change at any moment, the copy does not.
///
/// ```
/// use warpwire::mlx5::{ControlSegment, Opcode};
/// let bytes = [0, 0, 5, 8, 0, 1, 0x23, 3, 0, 0, 0, 8, 0, 0, 0, 0];
/// let control = ControlSegment::parse(&bytes);
/// assert_eq!(control.opcode, Opcode::RdmaWrite);
/// assert_eq!((control.index, control.qpn, control.segments), (5, 0x123, 3));
/// assert!(control.is_signaled());
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ControlSegment {
    /// What is asked for.
    pub opcode: Opcode,
    /// A modifier, with a meaning for each operation.
    pub opmod: u8,
    /// The number of its first block, as the writer counts.
    pub index: u16,
    /// The queue pair that the writer means.
    pub qpn: u32,
    /// How many segments the entry has, this one included.
    pub segments: u8,
    /// When it makes a completion.
    pub cq_update: CqUpdate,
    /// What it waits for.
    pub fence: FenceMode,
    /// Whether the peer's completion should wake its owner.
    pub solicited: bool,
    /// The last four bytes: an immediate, a key, or garbage.
    pub imm: [u8; 4],
}

impl ControlSegment {
    /// Reads a control segment; every sixteen bytes are one.
    #[inline]
    pub fn parse(bytes: &[u8; SEGMENT]) -> Self {
        let flags = bytes[field::FLAGS];
        let qpn_ds = be32(bytes, field::QPN_DS);
        Self {
            opcode: Opcode::from_code(bytes[field::OPCODE]),
            opmod: bytes[field::OPMOD],
            index: be16(bytes, field::INDEX),
            qpn: qpn_ds >> 8,
            segments: (qpn_ds & 0x3f) as u8,
            cq_update: CqUpdate::from_bits(flags >> 2),
            fence: FenceMode::from_bits(flags >> 5),
            solicited: flags & 2 != 0,
            imm: array(bytes, field::IMM),
        }
    }

    /// Whether success makes a completion too.
    pub const fn is_signaled(&self) -> bool {
        matches!(self.cq_update, CqUpdate::Always | CqUpdate::AlwaysWithEvent)
    }

    /// How many blocks of the ring the entry takes; an entry without segments takes one all the same, so
    /// that a consumer always gets on.
    pub const fn wqebbs(&self) -> u16 {
        let wqebbs = wqebbs(self.segments);
        if wqebbs == 0 { 1 } else { wqebbs }
    }

    /// Whether the writer meant the block of this number.
    ///
    /// A doorbell that arrives in two halves can promise blocks that are not written yet; what lies there
    /// then is an older lap's entry, or nothing, and bears another number. Such an entry is not wrong: it
    /// is not there yet.
    pub const fn is_at(&self, wqe_index: u16) -> bool {
        self.index == wqe_index
    }
}

/// Memory of the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Remote {
    /// Where.
    pub address: u64,
    /// The key that the peer gave for it.
    pub rkey: u32,
}

impl Remote {
    fn parse(bytes: &[u8; SEGMENT]) -> Self {
        Self { address: be64(bytes, 0), rkey: be32(bytes, 8) }
    }
}

/// A range of local memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Data {
    /// How many bytes.
    pub len: u32,
    /// The key for it.
    pub lkey: u32,
    /// Where.
    pub address: u64,
}

impl Data {
    /// Reads a data segment, whose highest bit the caller has looked at.
    pub(super) fn parse(bytes: &[u8; SEGMENT]) -> Self {
        Self { len: be32(bytes, 0) & !INLINE, lkey: be32(bytes, 4), address: be64(bytes, 8) }
    }
}

/// What a [`Work::Wait`] waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wait {
    /// The completion queue.
    pub cqn: u32,
    /// The number of the completion that it must have made.
    pub index: u32,
}

/// Bytes that an entry carries or names: ranges of memory and inline bytes, in order.
///
/// A range of no bytes is nothing: hardware is said to take it for 2 GiB, and every writer avoids it.
#[derive(Clone, Copy, Debug)]
pub struct WqePayload<'a> {
    segments: &'a [[u8; SEGMENT]],
    len: u64,
}

impl<'a> WqePayload<'a> {
    fn parse(segments: &'a [[u8; SEGMENT]], may_be_inline: bool) -> Result<Self, WqeError> {
        let mut data_segments = DataSegments { rest: segments };
        let mut len = 0;
        loop {
            match data_segments.step()? {
                None => break,
                Some(DataSegment::Inline(_)) if !may_be_inline => {
                    return Err(WqeError::InlineTarget);
                }
                Some(segment) => len += segment.len(),
            }
        }
        if len > MAX_MESSAGE_LEN {
            return Err(WqeError::TooLong);
        }
        Ok(Self { segments, len })
    }

    /// How many bytes in all.
    pub const fn len(&self) -> u64 {
        self.len
    }

    /// Whether there is no byte.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The parts, in order, without empty ones.
    pub const fn data_segments(&self) -> DataSegments<'a> {
        DataSegments { rest: self.segments }
    }
}

/// A part of a [`WqePayload`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DataSegment<'a> {
    /// A range of local memory.
    Memory(Data),
    /// Bytes in the entry itself.
    Inline(&'a [u8]),
}

impl DataSegment<'_> {
    /// How many bytes.
    pub const fn len(&self) -> u64 {
        match self {
            Self::Memory(data) => data.len as u64,
            Self::Inline(bytes) => bytes.len() as u64,
        }
    }

    /// Whether there is no byte.
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// The parts of a [`WqePayload`], one after the other.
#[derive(Clone, Debug)]
pub struct DataSegments<'a> {
    rest: &'a [[u8; SEGMENT]],
}

impl<'a> DataSegments<'a> {
    fn step(&mut self) -> Result<Option<DataSegment<'a>>, WqeError> {
        let Some((first, after)) = self.rest.split_first() else { return Ok(None) };
        let count = be32(first, 0);
        if count & INLINE == 0 {
            self.rest = after;
            return Ok(Some(DataSegment::Memory(Data::parse(first))));
        }
        let len = (count & !INLINE) as usize;
        let (mine, after) = self
            .rest
            .split_at_checked((4 + len).div_ceil(SEGMENT))
            .ok_or(WqeError::InlineOverrun)?;
        self.rest = after;
        let bytes = mine.as_flattened().get(4..4 + len).ok_or(WqeError::InlineOverrun)?;
        Ok(Some(DataSegment::Inline(bytes)))
    }
}

impl<'a> Iterator for DataSegments<'a> {
    type Item = DataSegment<'a>;

    fn next(&mut self) -> Option<DataSegment<'a>> {
        loop {
            // The payload was walked once when it was parsed, so that no step fails.
            let segment = self.step().ok().flatten()?;
            if !segment.is_empty() {
                return Some(segment);
            }
        }
    }
}

/// How a message is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SendKind {
    /// By itself.
    Plain,
    /// With four bytes beside it.
    Imm([u8; 4]),
    /// Invalidating this key of the receiver.
    Invalidate(u32),
}

/// What an entry asks for, with everything that it needs.
#[derive(Clone, Copy, Debug)]
pub enum Work<'a> {
    /// Nothing, in order.
    Nop,
    /// A message.
    Send {
        /// What goes with it.
        kind: SendKind,
        /// The message.
        payload: WqePayload<'a>,
    },
    /// Bytes for the peer's memory.
    Write {
        /// Where they go.
        remote: Remote,
        /// Four bytes for a receive of the peer.
        imm: Option<[u8; 4]>,
        /// The bytes.
        payload: WqePayload<'a>,
    },
    /// Bytes from the peer's memory.
    Read {
        /// Where they are.
        remote: Remote,
        /// Where they go; never inline.
        into: WqePayload<'a>,
    },
    /// An atomic operation on a word of the peer.
    Atomic {
        /// The word.
        remote: Remote,
        /// What is done to it.
        op: Atomic,
        /// Where its old value goes; at least as long as the word, never inline.
        into: WqePayload<'a>,
    },
    /// A pause of the queue.
    Wait(Wait),
    /// A read of local memory that goes nowhere; never inline.
    Dump {
        /// What is read.
        from: WqePayload<'a>,
    },
}

/// Why an entry cannot be carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WqeError {
    /// It says that it has no segments.
    Empty,
    /// It is longer than the bytes that were given.
    Truncated,
    /// The operation is none that this HCA carries out.
    Opcode(u8),
    /// The operation needs a connection, and the queue pair is one for datagrams.
    NotConnected(u8),
    /// A segment that the operation needs is missing.
    MissingSegment,
    /// Inline bytes pass the end of the entry.
    InlineOverrun,
    /// Inline bytes where memory is needed: what is fetched cannot go into the entry.
    InlineTarget,
    /// An atomic operation on a word of a width that there is not.
    AtomicWidth(u8),
    /// The old value of an atomic operation does not fit where it should go.
    ShortResult,
    /// More bytes than a message may have.
    TooLong,
}

impl WqeError {
    /// The status that the completion gives.
    pub const fn status(self) -> Status {
        match self {
            Self::TooLong | Self::ShortResult => Status::LocalLength,
            _ => Status::LocalQpOperation,
        }
    }
}

impl fmt::Display for WqeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Empty => f.pad("the entry says that it has no segments"),
            Self::Truncated => f.pad("the entry is longer than its bytes"),
            Self::Opcode(code) => write!(f, "opcode {code:#04x} is not one of this HCA"),
            Self::NotConnected(code) => {
                write!(f, "opcode {code:#04x} needs a connection, and this queue pair has none")
            }
            Self::MissingSegment => f.pad("a segment that the operation needs is missing"),
            Self::InlineOverrun => f.pad("inline bytes pass the end of the entry"),
            Self::InlineTarget => f.pad("inline bytes where local memory is needed"),
            Self::AtomicWidth(opmod) => write!(f, "no atomic width is meant by opmod {opmod:#04x}"),
            Self::ShortResult => f.pad("the buffer for the old value is too short"),
            Self::TooLong => f.pad("the message is longer than 2 GiB"),
        }
    }
}

impl std::error::Error for WqeError {}

/// A send queue entry.
///
/// ```
/// use warpwire::mlx5::{Builder, Opcode, DataSegment, WqeError, Scratch, Work, Wqe};
/// let mut scratch = Scratch::default();
/// let image = Builder::new(&mut scratch, Opcode::RdmaWrite, 5, 0x123)
///     .signaled()
///     .remote(0x1000, 0x1234)
///     .inline(b"hello")
///     .finish()?;
/// let wqe = Wqe::parse(image.bytes()).unwrap();
/// let Work::Write { remote, imm: None, payload } = wqe.work else { panic!("{wqe:?}") };
/// assert_eq!((remote.address, remote.rkey, payload.len()), (0x1000, 0x1234, 5));
/// assert_eq!(payload.data_segments().next(), Some(DataSegment::Inline(b"hello")));
/// assert_eq!(Wqe::parse(&image.bytes()[..16]).unwrap_err(), WqeError::Truncated);
/// # Ok::<(), warpwire::mlx5::WqeTooLong>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Wqe<'a> {
    /// The flags and numbers of its first segment.
    pub control: ControlSegment,
    /// What it asks for.
    pub work: Work<'a>,
}

impl<'a> Wqe<'a> {
    /// Reads an entry from a copy of its bytes, of which there may be more than it says it has.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, WqeError> {
        let (control, rest) = Self::segments(bytes)?;
        let work = Self::work(&control, rest)?;
        Ok(Self { control, work })
    }

    /// Reads an entry of a datagram queue pair, and whom it is for if it is a message. Only what needs no connection
    /// is an entry there.
    pub fn parse_datagram(bytes: &'a [u8]) -> Result<(Self, Option<AddressVector>), WqeError> {
        let (control, rest) = Self::segments(bytes)?;
        match control.opcode {
            Opcode::Send | Opcode::SendImm => {
                let split = rest.split_at_checked(ADDRESS_SEGMENTS);
                let (address, rest) = split.ok_or(WqeError::MissingSegment)?;
                let address = address.as_flattened().try_into();
                let address = address.map_err(|_| WqeError::MissingSegment)?;
                let work = Self::work(&control, rest)?;
                Ok((Self { control, work }, Some(AddressVector::parse(address))))
            }
            Opcode::Nop | Opcode::Wait | Opcode::Dump => {
                let work = Self::work(&control, rest)?;
                Ok((Self { control, work }, None))
            }
            other => Err(WqeError::NotConnected(other.code())),
        }
    }

    fn segments(bytes: &'a [u8]) -> Result<(ControlSegment, &'a [[u8; SEGMENT]]), WqeError> {
        let (all, _) = bytes.as_chunks::<SEGMENT>();
        let control = ControlSegment::parse(all.first().ok_or(WqeError::Truncated)?);
        match usize::from(control.segments) {
            0 => Err(WqeError::Empty),
            count => Ok((control, all.get(1..count).ok_or(WqeError::Truncated)?)),
        }
    }

    fn work(control: &ControlSegment, rest: &'a [[u8; SEGMENT]]) -> Result<Work<'a>, WqeError> {
        let send = |kind| Ok(Work::Send { kind, payload: WqePayload::parse(rest, true)? });
        let imm = control.imm;
        match control.opcode {
            Opcode::Nop => Ok(Work::Nop),
            Opcode::Send => send(SendKind::Plain),
            Opcode::SendImm => send(SendKind::Imm(imm)),
            Opcode::SendInvalidate => send(SendKind::Invalidate(u32::from_be_bytes(imm))),
            Opcode::RdmaWrite => Self::write(rest, None),
            Opcode::RdmaWriteImm => Self::write(rest, Some(imm)),
            Opcode::RdmaRead => {
                let (remote, rest) = first(rest)?;
                let into = WqePayload::parse(rest, false)?;
                Ok(Work::Read { remote: Remote::parse(remote), into })
            }
            Opcode::CompareSwap
            | Opcode::FetchAdd
            | Opcode::MaskedCompareSwap
            | Opcode::MaskedFetchAdd => Self::atomic(control, rest),
            Opcode::Wait => {
                let (wait, _) = first(rest)?;
                Ok(Work::Wait(Wait { index: be32(wait, 8), cqn: be32(wait, 12) & 0xff_ffff }))
            }
            Opcode::Dump => Ok(Work::Dump { from: WqePayload::parse(rest, false)? }),
            Opcode::LocalInvalidate
            | Opcode::SetPsv
            | Opcode::Umr
            | Opcode::Mmo
            | Opcode::Unknown(_) => Err(WqeError::Opcode(control.opcode.code())),
        }
    }

    fn write(rest: &'a [[u8; SEGMENT]], imm: Option<[u8; 4]>) -> Result<Work<'a>, WqeError> {
        let (remote, rest) = first(rest)?;
        let payload = WqePayload::parse(rest, true)?;
        Ok(Work::Write { remote: Remote::parse(remote), imm, payload })
    }

    fn atomic(control: &ControlSegment, rest: &'a [[u8; SEGMENT]]) -> Result<Work<'a>, WqeError> {
        let (remote, rest) = first(rest)?;
        let (operands, rest) = first(rest)?;
        let width = || match control.opmod {
            MASKED_FOUR => Ok(AtomicWidth::Four),
            MASKED_EIGHT => Ok(AtomicWidth::Eight),
            other => Err(WqeError::AtomicWidth(other)),
        };
        let (op, rest) = match control.opcode {
            Opcode::CompareSwap => {
                let (swap, compare) = (be64(operands, 0), be64(operands, 8));
                (Atomic::CompareSwap { compare, swap }, rest)
            }
            Opcode::FetchAdd => (Atomic::FetchAdd { add: be64(operands, 0) }, rest),
            Opcode::MaskedFetchAdd => {
                let width = width()?;
                let [add, boundary] = pair(operands, width, 0);
                (Atomic::MaskedFetchAdd { width, add, boundary }, rest)
            }
            _ => {
                let width = width()?;
                let (masks, at, rest) = match width {
                    AtomicWidth::Four => (operands, 8, rest),
                    AtomicWidth::Eight => first(rest).map(|(masks, rest)| (masks, 0, rest))?,
                };
                let [swap, compare] = pair(operands, width, 0);
                let [swap_mask, compare_mask] = pair(masks, width, at);
                let op =
                    Atomic::MaskedCompareSwap { width, compare, swap, compare_mask, swap_mask };
                (op, rest)
            }
        };
        let into = WqePayload::parse(rest, false)?;
        if into.len() < op.width().bytes() {
            return Err(WqeError::ShortResult);
        }
        Ok(Work::Atomic { remote: Remote::parse(remote), op, into })
    }
}

fn first(segments: &[[u8; SEGMENT]]) -> Result<(&[u8; SEGMENT], &[[u8; SEGMENT]]), WqeError> {
    segments.split_first().ok_or(WqeError::MissingSegment)
}

/// Two operands of that width that follow each other.
fn pair(bytes: &[u8; SEGMENT], width: AtomicWidth, at: usize) -> [u64; 2] {
    match width {
        AtomicWidth::Four => [u64::from(be32(bytes, at)), u64::from(be32(bytes, at + 4))],
        AtomicWidth::Eight => [be64(bytes, at), be64(bytes, at + 8)],
    }
}

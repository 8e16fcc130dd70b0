//! Parsing send WQEs from untrusted bytes.

use std::fmt;

use super::address::{ADDRESS_SEGMENTS, AddressVector};
use super::opcode::WqeOpcode;
use super::{
    Access, Atomic, AtomicWidth, Fence, MAX_MESSAGE_LEN, MwBind, MwType, Remote, SEGMENT_LEN,
    Status, array, be16, be32, be64, wqebbs,
};

/// Flag in a byte count: inline data follows.
pub(super) const INLINE: u32 = 1 << 31;
/// `opmod` of masked atomics on 4 and on 8 bytes.
pub(super) const MASKED_FOUR: u8 = 0x08;
pub(super) const MASKED_EIGHT: u8 = 0x09;

/// Byte offsets in a control segment.
pub(super) mod field {
    pub const OPMOD: usize = 0;
    pub const INDEX: usize = 1;
    pub const OPCODE: usize = 3;
    pub const QPN_DS: usize = 4;
    pub const FLAGS: usize = 11;
    pub const IMM: usize = 12;
}

/// Bits in the segments of a BIND_MW.
pub(super) mod bind_field {
    use super::Access;

    /// In the first word.
    pub const RIGHTS: [(Access, u32); 3] = [
        (Access::REMOTE_ATOMIC, 1 << 31),
        (Access::REMOTE_WRITE, 1 << 30),
        (Access::REMOTE_READ, 1 << 29),
    ];
    /// In the second word.
    pub const TYPE_2: u32 = 1 << 31;
    pub const ZERO_BASED: u32 = 1 << 30;
}

/// When a WQE generates a completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CqUpdate {
    /// If it fails.
    OnError,
    /// If it is the first to fail.
    OnFirstError,
    /// Always.
    Always,
    /// Always, and a completion event.
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

/// What a WQE waits for before it starts: ConnectX's encoding of a [`Fence`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FenceMode {
    /// Nothing.
    None,
    /// Earlier memory key operations, which are executed before any later work starts anyway.
    Small,
    /// The responses of earlier RDMA reads and atomics.
    ReadsAndAtomics,
    /// Completion of all earlier work.
    Strong,
    /// [`Small`](Self::Small) and [`ReadsAndAtomics`](Self::ReadsAndAtomics): `IBV_SEND_FENCE`.
    Both,
}

impl FenceMode {
    /// Decodes the three bits. Undefined values become the strictest fence, which is always safe.
    const fn from_bits(bits: u8) -> Self {
        match bits & 7 {
            0 => Self::None,
            1 => Self::Small,
            2 => Self::ReadsAndAtomics,
            4 => Self::Both,
            _ => Self::Strong,
        }
    }

    /// The encoding in three bits.
    pub(super) const fn bits(self) -> u8 {
        match self {
            Self::None => 0,
            Self::Small => 1,
            Self::ReadsAndAtomics => 2,
            Self::Strong => 3,
            Self::Both => 4,
        }
    }
}

impl From<FenceMode> for Fence {
    fn from(mode: FenceMode) -> Self {
        match mode {
            FenceMode::None | FenceMode::Small => Self::None,
            FenceMode::ReadsAndAtomics | FenceMode::Both => Self::Reads,
            FenceMode::Strong => Self::All,
        }
    }
}

impl From<Fence> for FenceMode {
    fn from(fence: Fence) -> Self {
        match fence {
            Fence::None => Self::None,
            Fence::Reads => Self::ReadsAndAtomics,
            Fence::All => Self::Strong,
        }
    }
}

/// The control segment: operation, size and flags of a WQE.
///
/// The engine reads it first, copies [`segments`](ControlSegment::segments) × 16 bytes out of the
/// ring and parses the copy: the ring may change at any time, the copy does not.
///
/// ```
/// use warpwire::mlx5::{ControlSegment, WqeOpcode};
/// let bytes = [0, 0, 5, 8, 0, 1, 0x23, 3, 0, 0, 0, 8, 0, 0, 0, 0];
/// let control = ControlSegment::parse(&bytes);
/// assert_eq!(control.opcode, WqeOpcode::RdmaWrite);
/// assert_eq!((control.index, control.qpn, control.segments), (5, 0x123, 3));
/// assert!(control.is_signaled());
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ControlSegment {
    /// Operation.
    pub opcode: WqeOpcode,
    /// Operation modifier, specific to each opcode.
    pub opmod: u8,
    /// Index of its first WQEBB, modulo 2^16, as counted by the poster.
    pub index: u16,
    /// Queue pair number given by the poster.
    pub qpn: u32,
    /// Number of segments, this one included.
    pub segments: u8,
    /// When it generates a completion.
    pub cq_update: CqUpdate,
    /// Fence mode.
    pub fence: FenceMode,
    /// Solicited event: the peer's receive completion generates an event.
    pub solicited: bool,
    /// Immediate data or an rkey; garbage for operations that have neither.
    pub imm: [u8; 4],
}

impl ControlSegment {
    /// Parses a control segment; any bytes are valid.
    #[inline]
    pub fn parse(bytes: &[u8; SEGMENT_LEN]) -> Self {
        let flags = bytes[field::FLAGS];
        let qpn_ds = be32(bytes, field::QPN_DS);
        Self {
            opcode: WqeOpcode::from_code(bytes[field::OPCODE]),
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

    /// Whether success generates a completion too.
    pub const fn is_signaled(&self) -> bool {
        matches!(self.cq_update, CqUpdate::Always | CqUpdate::AlwaysWithEvent)
    }

    /// WQEBBs that the WQE takes; 1 if it claims no segments, so that a consumer always advances.
    pub const fn wqebbs(&self) -> u16 {
        let wqebbs = wqebbs(self.segments);
        if wqebbs == 0 { 1 } else { wqebbs }
    }

    /// Whether the WQE was written for this WQEBB index.
    ///
    /// A doorbell that arrives in two halves can announce WQEBBs that are not written yet. They
    /// hold a WQE of an earlier lap, or zeros, with another index: the WQE is then not invalid, but
    /// not there yet.
    pub const fn is_at(&self, wqe_index: u16) -> bool {
        self.index == wqe_index
    }
}

/// Parses a remote address segment.
fn parse_remote(bytes: &[u8; SEGMENT_LEN]) -> Remote {
    Remote { address: be64(bytes, 0), rkey: be32(bytes, 8) }
}

/// A data segment: a range of local memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Data {
    /// Length in bytes, below 2^31.
    pub len: u32,
    /// The region's lkey.
    pub lkey: u32,
    /// Address in the local memory region.
    pub address: u64,
}

impl Data {
    /// Parses a data segment; the caller has checked the inline flag.
    pub(super) fn parse(bytes: &[u8; SEGMENT_LEN]) -> Self {
        Self { len: be32(bytes, 0) & !INLINE, lkey: be32(bytes, 4), address: be64(bytes, 8) }
    }
}

/// Condition of a [`Work::Wait`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wait {
    /// Number of the completion queue.
    pub cqn: u32,
    /// Index of the completion that must have been written.
    pub index: u32,
}

/// Payload of a WQE: data segments and inline data, in order.
///
/// Segments of length 0 are skipped: hardware is said to take them for 2 GiB, and every writer
/// avoids them.
#[derive(Clone, Copy, Debug)]
pub struct WqePayload<'a> {
    segments: &'a [[u8; SEGMENT_LEN]],
    len: u64,
}

impl<'a> WqePayload<'a> {
    fn parse(segments: &'a [[u8; SEGMENT_LEN]], may_be_inline: bool) -> Result<Self, WqeError> {
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

    /// Total length in bytes.
    pub const fn len(&self) -> u64 {
        self.len
    }

    /// Whether the length is 0.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Its segments in order, without empty ones.
    pub const fn data_segments(&self) -> DataSegments<'a> {
        DataSegments { rest: self.segments }
    }
}

/// A segment of a [`WqePayload`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DataSegment<'a> {
    /// A range of local memory.
    Memory(Data),
    /// Inline data.
    Inline(&'a [u8]),
}

impl DataSegment<'_> {
    /// Length in bytes.
    pub const fn len(&self) -> u64 {
        match self {
            Self::Memory(data) => data.len as u64,
            Self::Inline(bytes) => bytes.len() as u64,
        }
    }

    /// Whether the length is 0.
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Iterator over the segments of a [`WqePayload`].
#[derive(Clone, Debug)]
pub struct DataSegments<'a> {
    rest: &'a [[u8; SEGMENT_LEN]],
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
        let (own, after) = self
            .rest
            .split_at_checked((4 + len).div_ceil(SEGMENT_LEN))
            .ok_or(WqeError::InlineOverrun)?;
        self.rest = after;
        let bytes = own.as_flattened().get(4..4 + len).ok_or(WqeError::InlineOverrun)?;
        Ok(Some(DataSegment::Inline(bytes)))
    }
}

impl<'a> Iterator for DataSegments<'a> {
    type Item = DataSegment<'a>;

    fn next(&mut self) -> Option<DataSegment<'a>> {
        loop {
            // `WqePayload::parse` has walked all segments, so no step fails.
            let segment = self.step().ok().flatten()?;
            if !segment.is_empty() {
                return Some(segment);
            }
        }
    }
}

/// Variant of a send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SendKind {
    /// Without immediate data.
    Plain,
    /// With immediate data.
    Imm([u8; 4]),
    /// Invalidates this rkey of the receiver.
    Invalidate(u32),
}

/// A parsed operation with its arguments.
#[derive(Clone, Copy, Debug)]
pub enum Work<'a> {
    /// No operation; completes in order.
    Nop,
    /// A send.
    Send {
        /// Plain, with immediate data, or invalidating.
        kind: SendKind,
        /// The message's payload.
        payload: WqePayload<'a>,
    },
    /// RDMA write.
    Write {
        /// Destination.
        remote: Remote,
        /// Immediate data, which consumes a receive of the peer.
        imm: Option<[u8; 4]>,
        /// Data to write.
        payload: WqePayload<'a>,
    },
    /// RDMA read.
    Read {
        /// Source.
        remote: Remote,
        /// Local destination; never inline.
        into: WqePayload<'a>,
    },
    /// Atomic on a remote word.
    Atomic {
        /// Address of the word.
        remote: Remote,
        /// Operation and operands.
        op: Atomic,
        /// Destination of the old value; at least as long as the word, never inline.
        into: WqePayload<'a>,
    },
    /// Stalls the queue.
    Wait(Wait),
    /// Reads local memory and discards the data; never inline.
    Dump {
        /// Memory to read.
        from: WqePayload<'a>,
    },
    /// Binds a memory window.
    Bind(MwBind),
    /// Invalidates a key of this side.
    LocalInvalidate(u32),
}

/// Why a WQE cannot be executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WqeError {
    /// It claims to have no segments.
    Empty,
    /// It claims more segments than were given.
    Truncated,
    /// The opcode is not supported.
    WqeOpcode(u8),
    /// The opcode needs a connection, and the queue pair is UD.
    NotConnected(u8),
    /// A segment required by the opcode is missing.
    MissingSegment,
    /// Inline data exceeds the WQE.
    InlineOverrun,
    /// Inline data where memory is required: fetched data cannot go into the WQE.
    InlineTarget,
    /// An `opmod` that is no operand width of a masked atomic.
    AtomicWidth(u8),
    /// The buffer for the old value of an atomic is too short.
    ShortResult,
    /// The payload exceeds [`MAX_MESSAGE_LEN`].
    TooLong,
}

impl WqeError {
    /// Status of the error completion.
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
            Self::Empty => f.pad("the WQE has no segments"),
            Self::Truncated => f.pad("the WQE is truncated"),
            Self::WqeOpcode(code) => write!(f, "opcode {code:#04x} is not supported"),
            Self::NotConnected(code) => {
                write!(f, "opcode {code:#04x} needs a connection, and the queue pair is UD")
            }
            Self::MissingSegment => f.pad("a segment required by the opcode is missing"),
            Self::InlineOverrun => f.pad("inline data exceeds the WQE"),
            Self::InlineTarget => f.pad("inline data where local memory is required"),
            Self::AtomicWidth(opmod) => write!(f, "opmod {opmod:#04x} is no atomic width"),
            Self::ShortResult => f.pad("the buffer for the old value of an atomic is too short"),
            Self::TooLong => f.pad("the message is longer than 2 GiB"),
        }
    }
}

impl std::error::Error for WqeError {}

/// A parsed send WQE.
///
/// ```
/// use warpwire::mlx5::{Builder, WqeOpcode, DataSegment, WqeError, Scratch, Work, Wqe};
/// let mut scratch = Scratch::default();
/// let encoded = Builder::new(&mut scratch, WqeOpcode::RdmaWrite, 5, 0x123)
///     .signaled()
///     .remote(0x1000, 0x1234)
///     .inline(b"hello")
///     .finish()?;
/// let wqe = Wqe::parse(encoded.bytes()).unwrap();
/// let Work::Write { remote, imm: None, payload } = wqe.work else { panic!("{wqe:?}") };
/// assert_eq!((remote.address, remote.rkey, payload.len()), (0x1000, 0x1234, 5));
/// assert_eq!(payload.data_segments().next(), Some(DataSegment::Inline(b"hello")));
/// assert_eq!(Wqe::parse(&encoded.bytes()[..16]).unwrap_err(), WqeError::Truncated);
/// # Ok::<(), warpwire::mlx5::WqeTooLong>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Wqe<'a> {
    /// Its control segment.
    pub control: ControlSegment,
    /// Its operation.
    pub work: Work<'a>,
}

impl<'a> Wqe<'a> {
    /// Parses a copy of the WQE; bytes beyond the WQE's own length are ignored.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, WqeError> {
        let (control, rest) = Self::segments(bytes)?;
        let work = Self::work(&control, rest)?;
        Ok(Self { control, work })
    }

    /// Parses a WQE of a UD queue pair; messages have an address vector. Opcodes that need a
    /// connection are an error.
    pub fn parse_datagram(bytes: &'a [u8]) -> Result<(Self, Option<AddressVector>), WqeError> {
        let (control, rest) = Self::segments(bytes)?;
        match control.opcode {
            WqeOpcode::Send | WqeOpcode::SendImm => {
                let split = rest.split_at_checked(ADDRESS_SEGMENTS);
                let (address, rest) = split.ok_or(WqeError::MissingSegment)?;
                let address = address.as_flattened().try_into();
                let address = address.map_err(|_| WqeError::MissingSegment)?;
                let work = Self::work(&control, rest)?;
                Ok((Self { control, work }, Some(AddressVector::parse(address))))
            }
            WqeOpcode::Nop | WqeOpcode::Wait | WqeOpcode::Dump => {
                let work = Self::work(&control, rest)?;
                Ok((Self { control, work }, None))
            }
            other => Err(WqeError::NotConnected(other.code())),
        }
    }

    fn segments(bytes: &'a [u8]) -> Result<(ControlSegment, &'a [[u8; SEGMENT_LEN]]), WqeError> {
        let (all, _) = bytes.as_chunks::<SEGMENT_LEN>();
        let control = ControlSegment::parse(all.first().ok_or(WqeError::Truncated)?);
        match usize::from(control.segments) {
            0 => Err(WqeError::Empty),
            count => Ok((control, all.get(1..count).ok_or(WqeError::Truncated)?)),
        }
    }

    fn work(control: &ControlSegment, rest: &'a [[u8; SEGMENT_LEN]]) -> Result<Work<'a>, WqeError> {
        let send = |kind| Ok(Work::Send { kind, payload: WqePayload::parse(rest, true)? });
        let imm = control.imm;
        match control.opcode {
            WqeOpcode::Nop => Ok(Work::Nop),
            WqeOpcode::Send => send(SendKind::Plain),
            WqeOpcode::SendImm => send(SendKind::Imm(imm)),
            WqeOpcode::SendInvalidate => send(SendKind::Invalidate(u32::from_be_bytes(imm))),
            WqeOpcode::RdmaWrite => Self::write(rest, None),
            WqeOpcode::RdmaWriteImm => Self::write(rest, Some(imm)),
            WqeOpcode::RdmaRead => {
                let (remote, rest) = first(rest)?;
                let into = WqePayload::parse(rest, false)?;
                Ok(Work::Read { remote: parse_remote(remote), into })
            }
            WqeOpcode::CompareSwap
            | WqeOpcode::FetchAdd
            | WqeOpcode::MaskedCompareSwap
            | WqeOpcode::MaskedFetchAdd => Self::atomic(control, rest),
            WqeOpcode::Wait => {
                let (wait, _) = first(rest)?;
                Ok(Work::Wait(Wait { index: be32(wait, 8), cqn: be32(wait, 12) & 0xff_ffff }))
            }
            WqeOpcode::Dump => Ok(Work::Dump { from: WqePayload::parse(rest, false)? }),
            WqeOpcode::BindMw => Self::bind(rest),
            WqeOpcode::LocalInvalidate => Ok(Work::LocalInvalidate(be32(first(rest)?.0, 8))),
            WqeOpcode::SetPsv | WqeOpcode::Umr | WqeOpcode::Mmo | WqeOpcode::Unknown(_) => {
                Err(WqeError::WqeOpcode(control.opcode.code()))
            }
        }
    }

    fn bind(rest: &[[u8; SEGMENT_LEN]]) -> Result<Work<'a>, WqeError> {
        let (what, rest) = first(rest)?;
        let (range, _) = first(rest)?;
        let (rights, options) = (be32(what, 0), be32(what, 4));
        let set = bind_field::RIGHTS.iter().filter(|(_, bit)| rights & bit != 0);
        let mut access = set.fold(Access::NONE, |set, (right, _)| set | *right);
        if options & bind_field::ZERO_BASED != 0 {
            access |= Access::ZERO_BASED;
        }
        Ok(Work::Bind(MwBind {
            kind: if options & bind_field::TYPE_2 == 0 { MwType::Type1 } else { MwType::Type2 },
            rkey: be32(what, 8),
            lkey: be32(what, 12),
            address: be64(range, 0),
            len: be64(range, 8),
            access,
        }))
    }

    fn write(rest: &'a [[u8; SEGMENT_LEN]], imm: Option<[u8; 4]>) -> Result<Work<'a>, WqeError> {
        let (remote, rest) = first(rest)?;
        let payload = WqePayload::parse(rest, true)?;
        Ok(Work::Write { remote: parse_remote(remote), imm, payload })
    }

    fn atomic(
        control: &ControlSegment,
        rest: &'a [[u8; SEGMENT_LEN]],
    ) -> Result<Work<'a>, WqeError> {
        let (remote, rest) = first(rest)?;
        let (operands, rest) = first(rest)?;
        let width = || match control.opmod {
            MASKED_FOUR => Ok(AtomicWidth::Four),
            MASKED_EIGHT => Ok(AtomicWidth::Eight),
            other => Err(WqeError::AtomicWidth(other)),
        };
        let (op, rest) = match control.opcode {
            WqeOpcode::CompareSwap => {
                let (swap, compare) = (be64(operands, 0), be64(operands, 8));
                (Atomic::CompareSwap { compare, swap }, rest)
            }
            WqeOpcode::FetchAdd => (Atomic::FetchAdd { add: be64(operands, 0) }, rest),
            WqeOpcode::MaskedFetchAdd => {
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
        if into.len() < u64::from(op.width().bytes()) {
            return Err(WqeError::ShortResult);
        }
        Ok(Work::Atomic { remote: parse_remote(remote), op, into })
    }
}

fn first(
    segments: &[[u8; SEGMENT_LEN]],
) -> Result<(&[u8; SEGMENT_LEN], &[[u8; SEGMENT_LEN]]), WqeError> {
    segments.split_first().ok_or(WqeError::MissingSegment)
}

/// Two consecutive operands.
fn pair(bytes: &[u8; SEGMENT_LEN], width: AtomicWidth, at: usize) -> [u64; 2] {
    match width {
        AtomicWidth::Four => [u64::from(be32(bytes, at)), u64::from(be32(bytes, at + 4))],
        AtomicWidth::Eight => [be64(bytes, at), be64(bytes, at + 8)],
    }
}

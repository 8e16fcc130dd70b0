//! Work to post, and how it becomes the library's.

use std::mem::MaybeUninit;

use super::address::AddressHandle;
use super::device::Opened;
use super::explain::{Attempt, explain, last_errno};
use super::sys;
use crate::error::{Error, Kind, Result};
use crate::mlx5::Atomic;
use warpwire_proto::qp::Service;

/// A range of registered memory, as the library reads it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Sge {
    /// Where it begins, in the registration's addresses.
    pub address: u64,
    /// How many bytes.
    pub len: u32,
    /// The registration's key.
    pub lkey: u32,
}

/// A place in the peer's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Remote {
    /// The address, in the registration's addresses.
    pub address: u64,
    /// The registration's key.
    pub rkey: u32,
}

/// What to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// Send a message.
    Send,
    /// Send a message with four bytes beside it.
    SendImm([u8; 4]),
    /// Send a message, and invalidate a key of the peer.
    SendInvalidate(u32),
    /// Write to the peer's memory.
    Write(Remote),
    /// Write, then complete a receive of the peer with four bytes.
    WriteImm(Remote, [u8; 4]),
    /// Read from the peer's memory.
    Read(Remote),
    /// Change a word of 8 bytes of the peer's memory; the value before comes into the request's memory. Masked
    /// atomics are not for libibverbs.
    Atomic(Remote, Atomic),
}

/// Whom a datagram is for.
#[derive(Clone, Copy, Debug)]
pub struct Destination<'a> {
    /// The peer.
    pub handle: &'a AddressHandle,
    /// Its queue pair.
    pub qpn: u32,
    /// The key of that queue pair.
    pub qkey: u32,
}

/// Work to post.
///
/// ```
/// use warpwire::ibv::{Op, Request, Sge};
/// let range = Sge { address: 0x1000, len: 64, lkey: 7 };
/// let request = Request::new(1, Op::Send).with(std::slice::from_ref(&range)).solicited();
/// assert!(request.signaled && request.solicited);
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// What the program calls it.
    pub id: u64,
    /// What to do.
    pub op: Op,
    /// The memory that it sends from, or fetches into.
    pub data: &'a [Sge],
    /// Bytes that are copied as it is posted, instead of memory.
    pub inline: Option<&'a [u8]>,
    /// Whether success makes a completion, where the queue pair does not ask for all.
    pub signaled: bool,
    /// Whether the peer's completion should wake its owner.
    pub solicited: bool,
    /// Whether it waits for all earlier reads and atomics.
    pub fenced: bool,
    /// Whom a message of a datagram queue pair is for.
    pub destination: Option<Destination<'a>>,
}

impl<'a> Request<'a> {
    /// Work without memory, which makes a completion.
    pub fn new(id: u64, op: Op) -> Self {
        Self {
            id,
            op,
            data: &[],
            inline: None,
            signaled: true,
            solicited: false,
            fenced: false,
            destination: None,
        }
    }

    /// With that memory.
    #[must_use]
    pub fn with(self, data: &'a [Sge]) -> Self {
        Self { data, ..self }
    }

    /// With these bytes, which are copied as it is posted.
    #[must_use]
    pub fn inline(self, bytes: &'a [u8]) -> Self {
        Self { inline: Some(bytes), ..self }
    }

    /// Without a completion, unless it fails.
    #[must_use]
    pub fn unsignaled(self) -> Self {
        Self { signaled: false, ..self }
    }

    /// The peer's completion wakes its owner.
    #[must_use]
    pub fn solicited(self) -> Self {
        Self { solicited: true, ..self }
    }

    /// It waits for all earlier reads and atomics.
    #[must_use]
    pub fn fenced(self) -> Self {
        Self { fenced: true, ..self }
    }

    /// A datagram for that queue pair of the peer.
    #[must_use]
    pub fn to(self, handle: &'a AddressHandle, qpn: u32, qkey: u32) -> Self {
        Self { destination: Some(Destination { handle, qpn, qkey }), ..self }
    }
}

/// A receive to post.
#[derive(Clone, Copy, Debug)]
pub struct ReceiveRequest<'a> {
    /// What the program calls it.
    pub id: u64,
    /// Where the message goes.
    pub data: &'a [Sge],
}

/// Not all of several requests were posted: the first `posted` were.
#[derive(Clone, Debug)]
pub struct PostError {
    /// How many were posted, and will complete.
    pub posted: usize,
    /// Why the next was not; [`Kind::Busy`] if there was no room.
    pub error: Error,
}

impl std::fmt::Display for PostError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} (the {} before it were posted)", self.error, self.posted)
    }
}

impl std::error::Error for PostError {}

/// What a queue takes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Room {
    pub(super) service: Service,
    pub(super) send_ranges: u32,
    pub(super) receive_ranges: u32,
    pub(super) inline: u32,
}

/// How many requests are handed over in one call of the library's.
const CHUNK: usize = 16;

/// Posts work; the requests' lifetimes end after the call, which copies what it needs.
#[inline]
pub(super) fn send(
    post: sys::PostSend,
    qp: *mut sys::Qp,
    (context, room): (&Opened, &Room),
    requests: &[Request<'_>],
) -> std::result::Result<(), PostError> {
    let mut posted = 0;
    for chunk in requests.chunks(CHUNK) {
        let mut entries = [const { MaybeUninit::uninit() }; CHUNK];
        let mut inline = [const { MaybeUninit::uninit() }; CHUNK];
        let (mut good, mut refused) = (0, None);
        for ((request, entry), place) in chunk.iter().zip(&mut entries).zip(&mut inline) {
            let entry = entry.write(sys::SendWr::EMPTY);
            if let Err(error) = write(request, entry, place, context, room) {
                refused = Some(error);
                break;
            }
            good += 1;
        }
        let first = entries.as_mut_ptr().cast::<sys::SendWr>();
        for index in 1..good {
            // SAFETY: both are entries of the array that were written.
            unsafe { (*first.add(index - 1)).next = first.add(index) };
        }
        if good > 0 {
            let mut bad = std::ptr::null_mut();
            // SAFETY: a queue pair that lives, and a chain of entries that lives. The provider reads ranges and
            // inline bytes, which the requests borrow, before it returns.
            let code = unsafe { post(qp, first, &mut bad) };
            if code != 0 {
                let before = (0..good).find(|index| std::ptr::eq(first.wrapping_add(*index), bad));
                return Err(failed(posted + before.unwrap_or(0), code, Attempt::PostSend));
            }
        }
        posted += good;
        if let Some(error) = refused {
            return Err(PostError { posted, error });
        }
    }
    Ok(())
}

/// Writes a request as the library reads it.
#[inline]
fn write(
    request: &Request<'_>,
    entry: &mut sys::SendWr,
    place: &mut MaybeUninit<Sge>,
    context: &Opened,
    room: &Room,
) -> Result<()> {
    let flags = [
        (request.fenced, sys::SEND_FENCE),
        (request.signaled, sys::SEND_SIGNALED),
        (request.solicited, sys::SEND_SOLICITED),
        (request.inline.is_some(), sys::SEND_INLINE),
    ];
    entry.wr_id = request.id;
    entry.send_flags = flags.iter().filter(|(set, _)| *set).fold(0, |all, (_, flag)| all | flag);
    match request.inline {
        Some(bytes) if bytes.len() > room.inline as usize => {
            return Err(too_long_inline(bytes.len(), room));
        }
        Some(bytes) => {
            let whole = Sge { address: bytes.as_ptr() as u64, len: bytes.len() as u32, lkey: 0 };
            (entry.sg_list, entry.num_sge) = (place.write(whole), i32::from(!bytes.is_empty()));
        }
        None if request.data.len() > room.send_ranges as usize => {
            return Err(too_many_ranges(request.data.len(), room.send_ranges));
        }
        None => {
            (entry.sg_list, entry.num_sge) =
                (request.data.as_ptr().cast_mut(), request.data.len() as i32);
        }
    }
    let rdma =
        |at: Remote| sys::WrTarget { rdma: sys::Rdma { remote_addr: at.address, rkey: at.rkey } };
    match request.op {
        Op::Send => entry.opcode = sys::WR_SEND,
        Op::SendImm(imm) => {
            (entry.opcode, entry.imm_data) = (sys::WR_SEND_WITH_IMM, u32::from_ne_bytes(imm))
        }
        Op::SendInvalidate(key) => (entry.opcode, entry.imm_data) = (sys::WR_SEND_WITH_INV, key),
        Op::Write(at) => (entry.opcode, entry.wr) = (sys::WR_RDMA_WRITE, rdma(at)),
        Op::WriteImm(at, imm) => {
            (entry.opcode, entry.wr) = (sys::WR_RDMA_WRITE_WITH_IMM, rdma(at));
            entry.imm_data = u32::from_ne_bytes(imm);
        }
        Op::Read(at) => (entry.opcode, entry.wr) = (sys::WR_RDMA_READ, rdma(at)),
        Op::Atomic(at, atomic) => {
            let (opcode, compare_add, swap) = match atomic {
                Atomic::CompareSwap { compare, swap } => {
                    (sys::WR_ATOMIC_CMP_AND_SWP, compare, swap)
                }
                Atomic::FetchAdd { add } => (sys::WR_ATOMIC_FETCH_AND_ADD, add, 0),
                _ => return Err(masked()),
            };
            let target =
                sys::AtomicTarget { remote_addr: at.address, compare_add, swap, rkey: at.rkey };
            (entry.opcode, entry.wr) = (opcode, sys::WrTarget { atomic: target });
        }
    }
    address(request, entry, context, room.service)
}

/// Puts the address of a datagram in, and refuses what the service does not have.
fn address(
    request: &Request<'_>,
    entry: &mut sys::SendWr,
    context: &Opened,
    service: Service,
) -> Result<()> {
    let plain = matches!(request.op, Op::Send | Op::SendImm(_));
    match (service, request.destination) {
        (Service::Rc, None) => Ok(()),
        (Service::Ud, Some(to))
            if plain && to.handle.0.pd.context.raw.ptr() == context.raw.ptr() =>
        {
            let ah = to.handle.0.raw.ptr();
            entry.wr = sys::WrTarget {
                ud: sys::Datagram { ah, remote_qpn: to.qpn, remote_qkey: to.qkey },
            };
            Ok(())
        }
        (service, destination) => Err(wrong_service(service, destination.is_some(), plain)),
    }
}

/// Posts receives by that function, which is the queue pair's or the shared queue's.
#[inline]
pub(super) fn receive(
    requests: &[ReceiveRequest<'_>],
    ranges: u32,
    post: impl Fn(*mut sys::RecvWr, *mut *mut sys::RecvWr) -> i32,
) -> std::result::Result<(), PostError> {
    let mut posted = 0;
    for chunk in requests.chunks(CHUNK) {
        let fits = |request: &&ReceiveRequest<'_>| request.data.len() <= ranges as usize;
        let good = chunk.iter().take_while(fits).count();
        let mut entries = [const { MaybeUninit::uninit() }; CHUNK];
        for (request, entry) in chunk[..good].iter().zip(&mut entries) {
            entry.write(sys::RecvWr {
                wr_id: request.id,
                next: std::ptr::null_mut(),
                sg_list: request.data.as_ptr().cast_mut(),
                num_sge: request.data.len() as i32,
            });
        }
        let first = entries.as_mut_ptr().cast::<sys::RecvWr>();
        for index in 1..good {
            // SAFETY: both are entries of the array that were written.
            unsafe { (*first.add(index - 1)).next = first.add(index) };
        }
        if good > 0 {
            let mut bad = std::ptr::null_mut();
            let code = post(first, &mut bad);
            if code != 0 {
                let before = (0..good).find(|index| std::ptr::eq(first.wrapping_add(*index), bad));
                return Err(failed(posted + before.unwrap_or(0), code, Attempt::PostReceive));
            }
        }
        posted += good;
        if let Some(request) = chunk.get(good) {
            return Err(PostError { posted, error: too_many_ranges(request.data.len(), ranges) });
        }
    }
    Ok(())
}

#[cold]
fn failed(posted: usize, code: i32, attempt: Attempt<'_>) -> PostError {
    let errno = if code == -1 { last_errno() } else { code.saturating_abs() };
    PostError { posted, error: explain(errno, attempt).into_error(attempt) }
}

#[cold]
fn too_long_inline(len: usize, room: &Room) -> Error {
    Error::new(Kind::InvalidArgument, "post work")
        .why(format!("{len} bytes inline, and the queue pair takes {}", room.inline))
        .fix("register them, or make the queue pair with more inline bytes")
}

#[cold]
fn too_many_ranges(count: usize, most: u32) -> Error {
    Error::new(Kind::InvalidArgument, "post work")
        .why(format!("it names {count} ranges, and may name {most}"))
        .fix("make the queue with more ranges")
}

#[cold]
fn masked() -> Error {
    Error::new(Kind::Unsupported, "post work")
        .why("libibverbs has no masked atomics, nor any of 4 bytes")
        .fix("use plain ones, or the software device")
}

#[cold]
fn wrong_service(service: Service, addressed: bool, plain: bool) -> Error {
    let (why, fix) = match (service, addressed, plain) {
        (Service::Rc, ..) => {
            ("only messages of datagram queue pairs have an address", "leave the address out")
        }
        (_, false, _) => ("a datagram needs an address", "say whom it is for: Request::to"),
        (_, _, false) => {
            ("a datagram queue pair sends messages, and nothing else", "use a connected one")
        }
        _ => ("the address handle was made by another context", "make one by this context"),
    };
    Error::new(Kind::InvalidArgument, "post work").why(why).fix(fix)
}

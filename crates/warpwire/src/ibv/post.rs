//! Posting: conversion of requests to `ibv_send_wr` and `ibv_recv_wr` chains.

use std::mem::MaybeUninit;
use std::sync::Arc;

use super::address::{AddressHandle, AhInner, AsAddressHandle};
use super::explain::last_errno;
use super::memory::Pd;
use super::staging::StagingTable;
use super::sys;
use super::wr_ids::{CHUNK, WrIdAllocator};
use crate::mlx5::Atomic;
use crate::work::{self, Fence, PostError, PostResult, ReceiveRequest, Remote, Sge, WrOp};
use warpwire_proto::qp::Service;

/// A send work request: [`work::SendRequest`] with this module's [`AddressHandle`].
///
/// ```
/// use warpwire::ibv::{WrOp, SendRequest};
/// let request = SendRequest::new(1, WrOp::Send).inline(b"hello").solicited();
/// assert!(request.signaled && request.solicited);
/// ```
pub type SendRequest<'a> = work::SendRequest<'a, AddressHandle>;

/// Only some of the requests were posted.
#[derive(Clone, Debug)]
pub struct PartialPost {
    /// Number of requests, from the first, that were posted and will complete.
    pub posted: usize,
    /// Why the next one was not posted.
    pub error: PostError,
}

impl std::fmt::Display for PartialPost {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} ({} earlier requests were posted)", self.error, self.posted)
    }
}

impl std::error::Error for PartialPost {}

/// Limits of a queue pair, as the provider granted them.
#[derive(Clone, Copy, Debug)]
pub(super) struct QpCaps {
    pub(super) service: Service,
    pub(super) max_send_sge: u32,
    pub(super) max_recv_sge: u32,
    pub(super) max_inline_data: u32,
}

/// A send queue, borrowed for posting.
pub(super) struct SendQueue<'a> {
    pub(super) post: sys::PostSend,
    pub(super) qp: *mut sys::Qp,
    pub(super) pd: &'a Pd,
    pub(super) caps: &'a QpCaps,
}

impl SendQueue<'_> {
    /// Posts requests in chunks. The provider copies what it needs before the call returns.
    #[inline]
    pub(super) fn send<A: AsAddressHandle>(
        &self,
        allocator: &mut impl WrIdAllocator,
        requests: &[work::SendRequest<'_, A>],
    ) -> std::result::Result<(), PartialPost> {
        let mut done = 0;
        for chunk in requests.chunks(CHUNK) {
            let mut entries = [const { MaybeUninit::uninit() }; CHUNK];
            let mut inline = [const { MaybeUninit::uninit() }; CHUNK];
            let (mut good, mut refused) = (0, None);
            for ((request, entry), inline_sge) in chunk.iter().zip(&mut entries).zip(&mut inline) {
                let entry = entry.write(sys::SendWr::EMPTY);
                if let Err(error) = self.write(request, entry, inline_sge, allocator) {
                    refused = Some(error);
                    break;
                }
                good += 1;
            }
            // SAFETY: `good` entries were written; the requests borrow what they point to.
            let posted = unsafe { self.post_chain(entries.as_mut_ptr().cast(), good) };
            allocator.posted(posted.as_ref().map_or_else(|error| error.posted, |()| good));
            posted.map_err(|error| PartialPost { posted: done + error.posted, ..error })?;
            done += good;
            if let Some(error) = refused {
                return Err(PartialPost { posted: done, error });
            }
        }
        Ok(())
    }

    /// Checks that all requests can be posted, before any of them is.
    pub(super) fn check<A: AsAddressHandle>(
        &self,
        room: usize,
        requests: &[work::SendRequest<'_, A>],
    ) -> PostResult {
        if requests.len() > room {
            return Err(PostError::Full);
        }
        requests.iter().try_for_each(|request| {
            let (mut entry, mut inline_sge) = (sys::SendWr::EMPTY, MaybeUninit::uninit());
            self.translate(request, &mut entry, &mut inline_sge)
        })
    }

    /// Links entries to a chain and gives it to the provider.
    ///
    /// # Safety
    /// `count` entries were written at `first`, and what they point to is alive.
    unsafe fn post_chain(
        &self,
        first: *mut sys::SendWr,
        count: usize,
    ) -> std::result::Result<(), PartialPost> {
        if count == 0 {
            return Ok(());
        }
        for index in 1..count {
            // SAFETY: both entries were written.
            unsafe { (*first.add(index - 1)).next = first.add(index) };
        }
        let staging_table = &self.pd.0.context.staging_table;
        // SAFETY: guaranteed by the caller; no other references to the entries exist.
        let entries = || unsafe { std::slice::from_raw_parts(first, count) };
        if !staging_table.is_empty() {
            // SAFETY: guaranteed by the caller.
            unsafe { stage(staging_table, entries()) }?;
        }
        let mut bad = std::ptr::null_mut();
        // SAFETY: the queue pair and the chain are alive. The provider reads scatter-gather lists
        // and inline data before it returns.
        let code = unsafe { (self.post)(self.qp, first, &mut bad) };
        if code == 0 {
            return Ok(());
        }
        let before = (0..count).find(|index| std::ptr::eq(first.wrapping_add(*index), bad));
        let before = before.unwrap_or(0);
        entries()[before..].iter().for_each(|entry| staging_table.cancel(entry.wr_id));
        Err(failed(before, code))
    }

    #[inline]
    fn write<A: AsAddressHandle>(
        &self,
        request: &work::SendRequest<'_, A>,
        entry: &mut sys::SendWr,
        inline_sge: &mut MaybeUninit<Sge>,
        allocator: &mut impl WrIdAllocator,
    ) -> PostResult {
        if allocator.room() == 0 {
            return Err(PostError::Full);
        }
        self.translate(request, entry, inline_sge)?;
        entry.wr_id = allocator.assign(request.id);
        Ok(())
    }

    /// Converts a request, without its `wr_id`.
    #[inline]
    fn translate<A: AsAddressHandle>(
        &self,
        request: &work::SendRequest<'_, A>,
        entry: &mut sys::SendWr,
        inline_sge: &mut MaybeUninit<Sge>,
    ) -> PostResult {
        let flags = [
            (request.fence == Fence::Reads, sys::SEND_FENCE),
            (request.signaled, sys::SEND_SIGNALED),
            (request.solicited, sys::SEND_SOLICITED),
            (request.inline.is_some(), sys::SEND_INLINE),
        ];
        entry.send_flags =
            flags.iter().filter(|(set, _)| *set).fold(0, |all, (_, flag)| all | flag);
        if request.fence == Fence::All {
            return Err(PostError::Unsupported(
                "libibverbs has no fence for all earlier work; poll for its completion instead",
            ));
        }
        match request.inline {
            Some(bytes) if bytes.len() > self.caps.max_inline_data as usize => {
                let max = self.caps.max_inline_data;
                return Err(PostError::InlineTooLong { len: bytes.len() as u32, max });
            }
            Some(bytes) => {
                let whole =
                    Sge { address: bytes.as_ptr() as u64, len: bytes.len() as u32, lkey: 0 };
                (entry.sg_list, entry.num_sge) =
                    (inline_sge.write(whole), i32::from(!bytes.is_empty()));
            }
            None if request.data.len() > self.caps.max_send_sge as usize => {
                return Err(too_many_sges(request.data.len(), self.caps.max_send_sge));
            }
            None => {
                (entry.sg_list, entry.num_sge) =
                    (request.data.as_ptr().cast_mut(), request.data.len() as i32);
            }
        }
        operation(request.op, entry)?;
        self.address(request, entry)
    }

    /// Sets the destination of a UD message, and rejects what the service does not support.
    fn address<A: AsAddressHandle>(
        &self,
        request: &work::SendRequest<'_, A>,
        entry: &mut sys::SendWr,
    ) -> PostResult {
        let plain = matches!(request.op, WrOp::Send | WrOp::SendImm(_));
        let context = self.pd.0.context.raw.ptr();
        let own = |handle: &&AddressHandle| handle.0.pd.context.raw.ptr() == context;
        let Some(to) = request.destination else {
            return match self.caps.service {
                Service::Rc | Service::Uc => Ok(()),
                service => Err(wrong_service(service, false, plain)),
            };
        };
        match (self.caps.service, to.handle.hardware(self.pd).filter(own)) {
            (Service::Ud, Some(handle)) if plain => {
                let ah = handle.0.raw.ptr();
                let ud = sys::Datagram { ah, remote_qpn: to.qpn, remote_qkey: to.qkey };
                entry.wr = sys::WrTarget { ud };
                Ok(())
            }
            (service, _) => Err(wrong_service(service, true, plain)),
        }
    }
}

/// Copies data to send into its staging buffers, and records what the work will write. On failure
/// none of it is posted.
///
/// # Safety
/// What the entries point to is alive.
#[cold]
unsafe fn stage(
    staging_table: &StagingTable,
    entries: &[sys::SendWr],
) -> std::result::Result<(), PartialPost> {
    for (index, entry) in entries.iter().enumerate() {
        let has_sges = entry.num_sge > 0 && entry.send_flags & sys::SEND_INLINE == 0;
        let sges: &[Sge] = match has_sges {
            // SAFETY: the caller guarantees `num_sge` entries.
            true => unsafe { std::slice::from_raw_parts(entry.sg_list, entry.num_sge as usize) },
            false => &[],
        };
        if let Err(error) = staging_table.prepare(entry.wr_id, entry.opcode, sges) {
            entries[..=index].iter().for_each(|entry| staging_table.cancel(entry.wr_id));
            tracing::warn!(%error, "cannot stage the memory of a work request");
            let text = "its staged memory cannot be copied; the log says why";
            return Err(PartialPost { posted: 0, error: PostError::Invalid(text) });
        }
    }
    Ok(())
}

/// Sets opcode and remote address.
#[inline]
fn operation(op: WrOp, entry: &mut sys::SendWr) -> PostResult {
    let rdma =
        |at: Remote| sys::WrTarget { rdma: sys::Rdma { remote_addr: at.address, rkey: at.rkey } };
    match op {
        WrOp::Send => entry.opcode = sys::WR_SEND,
        WrOp::SendImm(imm) => {
            (entry.opcode, entry.imm_data) = (sys::WR_SEND_WITH_IMM, u32::from_ne_bytes(imm))
        }
        WrOp::SendInvalidate(key) => (entry.opcode, entry.imm_data) = (sys::WR_SEND_WITH_INV, key),
        WrOp::Write(at) => (entry.opcode, entry.wr) = (sys::WR_RDMA_WRITE, rdma(at)),
        WrOp::WriteImm(at, imm) => {
            (entry.opcode, entry.wr) = (sys::WR_RDMA_WRITE_WITH_IMM, rdma(at));
            entry.imm_data = u32::from_ne_bytes(imm);
        }
        WrOp::Read(at) => (entry.opcode, entry.wr) = (sys::WR_RDMA_READ, rdma(at)),
        WrOp::Atomic(at, atomic) => {
            let (opcode, compare_add, swap) = match atomic {
                Atomic::CompareSwap { compare, swap } => {
                    (sys::WR_ATOMIC_CMP_AND_SWP, compare, swap)
                }
                Atomic::FetchAdd { add } => (sys::WR_ATOMIC_FETCH_AND_ADD, add, 0),
                _ => {
                    return Err(PostError::Unsupported(
                        "libibverbs has no masked or 4-byte atomics; use plain 8-byte atomics, or \
                         the software HCA",
                    ));
                }
            };
            let target =
                sys::AtomicTarget { remote_addr: at.address, compare_add, swap, rkey: at.rkey };
            (entry.opcode, entry.wr) = (opcode, sys::WrTarget { atomic: target });
        }
        // A write of 0 bytes: completes in order, and no key is checked.
        WrOp::Nop => {
            (entry.opcode, entry.wr) = (sys::WR_RDMA_WRITE, rdma(Remote { address: 0, rkey: 0 }));
            (entry.sg_list, entry.num_sge) = (std::ptr::null_mut(), 0);
        }
        WrOp::BindMw(_) | WrOp::LocalInvalidate(_) => return Err(PostError::NO_WINDOWS),
        WrOp::Wait { .. } => {
            return Err(PostError::Unsupported(
                "libibverbs has no WAIT operation; poll for the completion instead",
            ));
        }
        WrOp::Dump => {
            return Err(PostError::Unsupported(
                "libibverbs has no DUMP operation; use an RDMA read instead",
            ));
        }
    }
    Ok(())
}

/// A batch that is not posted yet. The library reads requests only when they are posted, so this
/// owns copies of all that they point to.
#[derive(Default)]
pub(super) struct PendingBatch {
    entries: Vec<sys::SendWr>,
    wr_ids: Vec<u64>,
    sges: Vec<Sge>,
    bytes: Vec<u8>,
    /// Keeps address handles alive until the batch is posted.
    handles: Vec<Arc<AhInner>>,
}

// SAFETY: between calls its pointers are offsets, and address handles may be used from any
// thread.
unsafe impl Send for PendingBatch {}

impl std::fmt::Debug for PendingBatch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "PendingBatch({})", self.entries.len())
    }
}

impl PendingBatch {
    pub(super) fn clear(&mut self) {
        self.entries.clear();
        self.wr_ids.clear();
        self.sges.clear();
        self.bytes.clear();
        self.handles.clear();
    }

    /// Adds a request. Until it is posted, `sg_list` is an index into `sges`, and inline addresses
    /// are offsets into `bytes`.
    pub(super) fn push<A: AsAddressHandle>(
        &mut self,
        send_queue: &SendQueue<'_>,
        allocator: &mut impl WrIdAllocator,
        request: &work::SendRequest<'_, A>,
    ) -> PostResult {
        let (mut entry, mut inline_sge) = (sys::SendWr::EMPTY, MaybeUninit::uninit());
        send_queue.write(request, &mut entry, &mut inline_sge, allocator)?;
        let first = self.sges.len();
        match request.inline {
            Some(bytes) => {
                let address = self.bytes.len() as u64;
                self.sges.push(Sge { address, len: bytes.len() as u32, lkey: 0 });
                self.bytes.extend_from_slice(bytes);
            }
            None => self.sges.extend_from_slice(request.data),
        }
        if let Some(handle) = request.destination.and_then(|to| to.handle.hardware(send_queue.pd)) {
            self.handles.push(handle.0.clone());
        }
        entry.sg_list = std::ptr::without_provenance_mut(first);
        self.entries.push(entry);
        self.wr_ids.push(request.id);
        Ok(())
    }

    /// Turns indices into pointers and posts all requests.
    pub(super) fn post(
        &mut self,
        send_queue: &SendQueue<'_>,
        allocator: &mut impl WrIdAllocator,
    ) -> std::result::Result<(), PartialPost> {
        let bytes = self.bytes.as_ptr() as u64;
        let sges = self.sges.as_mut_ptr();
        for entry in &mut self.entries {
            let first = entry.sg_list.addr();
            if entry.send_flags & sys::SEND_INLINE != 0 {
                self.sges[first].address += bytes;
            }
            entry.sg_list = sges.wrapping_add(first);
        }
        let count = self.entries.len();
        // SAFETY: all entries are written, and point into vectors that do not change until the call
        // returns.
        let posted = unsafe { send_queue.post_chain(self.entries.as_mut_ptr(), count) };
        allocator.posted(posted.as_ref().map_or_else(|error| error.posted, |()| count));
        posted
    }

    /// Work request ids from index `first` on.
    pub(super) fn wr_ids_from(&self, first: usize) -> impl Iterator<Item = u64> + '_ {
        self.wr_ids.iter().skip(first).copied()
    }
}

/// Posts receives with `post`, which is the operation of a queue pair or of an SRQ.
#[inline]
pub(super) fn receive(
    requests: &[ReceiveRequest<'_>],
    sges: u32,
    (allocator, staging_table): (&mut impl WrIdAllocator, &StagingTable),
    post: impl Fn(*mut sys::RecvWr, *mut *mut sys::RecvWr) -> i32,
) -> std::result::Result<(), PartialPost> {
    let mut done = 0;
    for chunk in requests.chunks(CHUNK) {
        let mut entries = [const { MaybeUninit::uninit() }; CHUNK];
        let (mut good, mut refused) = (0, None);
        for (request, entry) in chunk.iter().zip(&mut entries) {
            if let Err(error) = fits(request, sges, allocator.room()) {
                refused = Some(error);
                break;
            }
            let wr_id = allocator.assign(request.id);
            if !staging_table.is_empty() {
                staging_table.add_inbound(wr_id, request.data);
            }
            entry.write(sys::RecvWr {
                wr_id,
                next: std::ptr::null_mut(),
                sg_list: request.data.as_ptr().cast_mut(),
                num_sge: request.data.len() as i32,
            });
            good += 1;
        }
        let first = entries.as_mut_ptr().cast::<sys::RecvWr>();
        for index in 1..good {
            // SAFETY: both entries of the array were written.
            unsafe { (*first.add(index - 1)).next = first.add(index) };
        }
        let mut posted = Ok(());
        if good > 0 {
            let mut bad = std::ptr::null_mut();
            let code = post(first, &mut bad);
            if code != 0 {
                let before = (0..good).find(|index| std::ptr::eq(first.wrapping_add(*index), bad));
                let before = before.unwrap_or(0);
                // SAFETY: these entries were written.
                let refused = (before..good).map(|index| unsafe { (*first.add(index)).wr_id });
                refused.for_each(|number| staging_table.cancel(number));
                posted = Err(failed(before, code));
            }
        }
        allocator.posted(posted.as_ref().map_or_else(|error| error.posted, |()| good));
        posted.map_err(|error| PartialPost { posted: done + error.posted, ..error })?;
        done += good;
        if let Some(error) = refused {
            return Err(PartialPost { posted: done, error });
        }
    }
    Ok(())
}

/// Checks that all receives can be posted, before any of them is.
pub(super) fn check_receives(
    requests: &[ReceiveRequest<'_>],
    sges: u32,
    room: usize,
) -> PostResult {
    if requests.len() > room {
        return Err(PostError::Full);
    }
    requests.iter().try_for_each(|request| fits(request, sges, 1))
}

#[inline]
fn fits(request: &ReceiveRequest<'_>, sges: u32, room: usize) -> PostResult {
    match (request.data.len(), room) {
        (_, 0) => Err(PostError::Full),
        (count, _) if count > sges as usize => Err(too_many_sges(count, sges)),
        _ => Ok(()),
    }
}

#[cold]
fn failed(posted: usize, code: i32) -> PartialPost {
    let error = match if code == -1 { last_errno() } else { code.saturating_abs() } {
        libc::ENOMEM | libc::ENOSPC => PostError::Full,
        libc::EINVAL => PostError::Invalid(
            "the device rejects the request: wrong state or opcode, or too many scatter-gather \
             entries or inline bytes; connect the queue pair first, check the options that it was \
             created with",
        ),
        errno => PostError::Device(errno),
    };
    PartialPost { posted, error }
}

#[cold]
fn too_many_sges(count: usize, max: u32) -> PostError {
    PostError::TooManySge { count: count as u32, max }
}

#[cold]
fn wrong_service(service: Service, addressed: bool, plain: bool) -> PostError {
    match (service, addressed, plain) {
        (Service::Rc | Service::Uc, ..) => PostError::SURPLUS_DESTINATION,
        (_, false, _) => PostError::NO_DESTINATION,
        (_, _, false) => {
            PostError::Invalid("a UD queue pair supports sends only; use a connected queue pair")
        }
        _ => PostError::FOREIGN_HANDLE,
    }
}

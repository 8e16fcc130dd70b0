//! Completion queues of libibverbs, and the conversion of `ibv_wc`.

use std::collections::VecDeque;
use std::mem::MaybeUninit;
use std::net::{Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::device::{Context, ContextInner};
use super::event;
use super::explain::{Attempt, explain, last_errno};
use super::library::{Raw, check, create, created, destroy, function};
use super::mlx5dv::mlx5dv_create_cq;
use super::sys;
use super::wr_ids::{CHUNK, Reader, WrQueue};
use crate::error::{Error, Kind, Result};
use crate::mlx5::{Status, WqeOpcode};
use crate::work::{Completion, CompletionKind, DatagramSender};

/// Converts an `ibv_wc`, whose `wr_id` is still the library's.
fn completion_from_wc(wc: &sys::Wc, queue: WrQueue, invalidated_flags: u32) -> Completion {
    let status = status_of(wc.status);
    let imm = wc.imm_data.to_ne_bytes();
    let has = |flags: u32| wc.wc_flags & flags != 0;
    let kind = match (queue, wc.opcode) {
        (WrQueue::Send, _) if status != Status::Success => CompletionKind::SendFailed,
        (_, _) if status != Status::Success => CompletionKind::ReceiveFailed,
        (WrQueue::Send, code) => CompletionKind::Send(opcode_of(code)),
        (_, sys::WC_RECV_RDMA_WITH_IMM) => CompletionKind::WriteImm(imm),
        _ if has(sys::WC_WITH_IMM) => CompletionKind::ReceiveImm(imm),
        _ if has(invalidated_flags) => CompletionKind::ReceiveInvalidate(wc.imm_data),
        _ => CompletionKind::Receive,
    };
    // rxe sets the GRH flag on connections too, but then without a source QP. QPs 0 and 1 are
    // management QPs.
    let is_datagram = has(sys::WC_GRH) && queue != WrQueue::Send && wc.src_qp > 1;
    let address = SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), 0);
    Completion {
        id: wc.wr_id,
        status,
        kind,
        len: if status == Status::Success { wc.byte_len } else { 0 },
        qpn: wc.qp_num,
        solicited: false,
        sender: is_datagram.then_some(DatagramSender { qpn: wc.src_qp, address }),
        vendor_error: wc.vendor_err,
    }
}

/// The opcode for an `ibv_wc_opcode`.
fn opcode_of(number: u32) -> WqeOpcode {
    match number {
        sys::WC_SEND => WqeOpcode::Send,
        sys::WC_RDMA_WRITE => WqeOpcode::RdmaWrite,
        sys::WC_RDMA_READ => WqeOpcode::RdmaRead,
        sys::WC_COMP_SWAP => WqeOpcode::CompareSwap,
        sys::WC_FETCH_ADD => WqeOpcode::FetchAdd,
        other => WqeOpcode::Unknown(u8::try_from(other).unwrap_or(u8::MAX)),
    }
}

/// The status for an `ibv_wc_status`; unknown ones are general errors.
fn status_of(number: u32) -> Status {
    use Status::*;
    const ALL: [Status; 15] = [
        Success,
        LocalLength,
        LocalQpOperation,
        LocalProtection,
        Flushed,
        MwBind,
        BadResponse,
        LocalAccess,
        RemoteInvalidRequest,
        RemoteAccess,
        RemoteOperation,
        RetryExceeded,
        RnrRetryExceeded,
        RemoteAbort,
        General,
    ];
    ALL.into_iter().find(|status| *status as u32 == number).unwrap_or(General)
}

/// A completion queue with its own completion channel. Clones refer to the same queue; it is
/// destroyed when the last clone and the last queue pair that uses it are dropped.
#[derive(Clone, Debug)]
pub struct Cq(pub(super) Arc<CqInner>);

#[derive(Debug)]
pub(super) struct CqInner {
    pub(super) raw: Raw<sys::Cq>,
    poll: sys::PollCq,
    notify: sys::NotifyCq,
    /// Completions polled from the library but not yet returned, oldest first. Locked from polling
    /// completions until they are returned or here, and their ids resolved: threads must not
    /// overtake each other, nor slots be reused in between.
    backlog: Mutex<VecDeque<Completion>>,
    /// Destroyed after the queue: fields drop in order.
    channel: Channel,
}

#[derive(Debug)]
struct Channel {
    raw: Raw<sys::CompChannel>,
    context: Arc<ContextInner>,
}

impl Drop for Channel {
    fn drop(&mut self) {
        destroy!(self.context.library, destroy_comp_channel(self.raw.ptr()));
    }
}

impl Drop for CqInner {
    fn drop(&mut self) {
        destroy!(self.channel.context.library, destroy_cq(self.raw.ptr()));
    }
}

impl CqInner {
    /// Polls the library, with the backlog locked; completions of unknown work request ids are
    /// dropped.
    #[inline]
    fn take(&self, into: &mut [Completion]) -> Result<usize> {
        let context = &*self.channel.context;
        let mut filled = 0;
        while filled < into.len() {
            let wanted = (into.len() - filled).min(CHUNK);
            let mut found = [const { MaybeUninit::<sys::Wc>::uninit() }; CHUNK];
            let first = found.as_mut_ptr().cast::<sys::Wc>();
            // Zeroed, because providers leave some fields of failed work unwritten.
            // SAFETY: `wanted` is at most the array's length; plain numbers may be zero.
            unsafe { first.write_bytes(0, wanted) };
            // SAFETY: the queue is alive, and the array has room for `wanted` entries.
            let count = unsafe { (self.poll)(self.raw.ptr(), wanted as i32, first) };
            let Ok(count) = usize::try_from(count) else { return Err(poll_failed(count)) };
            if count == 0 {
                break;
            }
            let count = count.min(wanted);
            // SAFETY: the first `count` entries were initialised, at least with zeros.
            let found = unsafe { std::slice::from_raw_parts_mut(first, count) };
            if !context.staging_table.has_no_inbound() {
                found.iter_mut().for_each(|wc| context.staging_table.completed(wc));
            }
            filled += translate(
                found,
                &context.wr_ids.reader(),
                context.invalidated_flags,
                &mut into[filled..],
            );
            if count < wanted {
                break;
            }
        }
        Ok(filled)
    }
}

/// Converts completions and resolves their ids; returns how many were known.
#[inline]
fn translate(found: &[sys::Wc], wr_ids: &Reader<'_>, flags: u32, into: &mut [Completion]) -> usize {
    let known = found.iter().filter_map(|wc| wr_ids.completed(wc.wr_id).map(|named| (wc, named)));
    let mut count = 0;
    for ((wc, (queue, id)), place) in known.zip(into) {
        *place = Completion { id, ..completion_from_wc(wc, queue, flags) };
        count += 1;
    }
    count
}

impl Context {
    /// Creates a completion queue with at least `entries` entries (`ibv_create_cq`).
    ///
    /// # Errors
    /// If the device's limits are exceeded, or memory is short.
    pub fn create_cq(&self, entries: u32) -> Result<Cq> {
        self.create_cq_by(|channel| {
            let (library, raw) = (self.0.library, self.0.raw.ptr());
            let size = i32::try_from(entries).unwrap_or(i32::MAX);
            let nothing = std::ptr::null_mut();
            create!(library, Attempt::CreateCq(entries), create_cq(raw, size, nothing, channel, 0))
        })
    }

    /// Creates a completion queue of an mlx5 device that overwrites unread entries when it is full,
    /// for callers that track the producer themselves and read the queue with direct verbs.
    ///
    /// # Errors
    /// As for [`Qp::mlx5dv`](super::Qp::mlx5dv).
    pub fn create_cq_ignoring_overrun(&self, entries: u32) -> Result<Cq> {
        self.create_cq_by(|channel| {
            created(mlx5dv_create_cq(&self.0, entries, channel)?, Attempt::CreateCq(entries))
        })
    }

    fn create_cq_by(
        &self,
        create: impl FnOnce(*mut sys::CompChannel) -> Result<Raw<sys::Cq>>,
    ) -> Result<Cq> {
        let context = self.0.clone();
        let (library, raw) = (context.library, context.raw.ptr());
        let channel = create!(library, Attempt::Events, create_comp_channel(raw))?;
        let channel = Channel { raw: channel, context: context.clone() };
        event::set_nonblocking(channel.as_fd())?;
        let cq = create(channel.raw.ptr())?;
        // SAFETY: the device is open; its operations table does not change after that.
        let ops = unsafe { &(*raw).ops };
        let (Some(poll), Some(notify)) = (ops.poll_cq, ops.req_notify_cq) else {
            if let Some(destroy) = library.functions.destroy_cq {
                // SAFETY: just created, and not used by anything.
                unsafe { destroy(cq.ptr()) };
            }
            return Err(unsupported(&context, "completion queues"));
        };
        Ok(Cq(Arc::new(CqInner { raw: cq, poll, notify, backlog: Mutex::default(), channel })))
    }
}

#[cold]
pub(super) fn unsupported(context: &ContextInner, what: &str) -> Error {
    Error::new(Kind::Unsupported, format!("use {what}"))
        .on(context.device.name.clone())
        .why("its provider does not implement it")
}

impl Cq {
    /// The queue's number, which asynchronous events name.
    pub fn number(&self) -> u32 {
        // SAFETY: the library's object lives as long as this handle.
        unsafe { (*self.0.raw.ptr()).handle }
    }

    /// Polls up to `into.len()` completions (`ibv_poll_cq`); returns how many entries of `into`
    /// were written. Never blocks.
    ///
    /// # Errors
    /// If the device has failed, or the queue has overrun.
    #[inline]
    pub fn poll(&self, into: &mut [Completion]) -> Result<usize> {
        let mut backlog = self.0.backlog.lock();
        let count = into.len().min(backlog.len());
        for (place, completion) in into.iter_mut().zip(backlog.drain(..count)) {
            *place = completion;
        }
        match self.0.take(&mut into[count..]) {
            Ok(rest) => Ok(count + rest),
            // The next call reports it.
            Err(_) if count > 0 => Ok(count),
            Err(error) => Err(error),
        }
    }

    /// Whether a completion is available; polls the library into the backlog.
    pub fn has_completions(&self) -> Result<bool> {
        let mut backlog = self.0.backlog.lock();
        if backlog.is_empty() {
            let mut found = [Completion::EMPTY; CHUNK];
            let count = self.0.take(&mut found)?;
            backlog.extend(&found[..count]);
        }
        Ok(!backlog.is_empty())
    }

    /// Adds completions of work that was never given to the device.
    #[cold]
    pub(super) fn push_backlog(&self, completions: impl IntoIterator<Item = Completion>) {
        self.0.backlog.lock().extend(completions);
    }

    /// Polls the library and drops the completions of a queue pair that is being destroyed or
    /// reset. The library would drop them silently, and with them the SRQ slots that they stand
    /// for.
    #[cold]
    pub(super) fn discard(&self, qpn: u32) {
        let mut found = [Completion::EMPTY; CHUNK];
        let mut backlog = self.0.backlog.lock();
        while let Ok(count @ 1..) = self.0.take(&mut found) {
            backlog.extend(&found[..count]);
        }
        backlog.retain(|completion| completion.qpn != qpn);
    }

    /// Requests a completion event (`ibv_req_notify_cq`) for the next completion or, if
    /// `solicited_only`, for the next one that is solicited or failed. Completions already in the
    /// queue generate none: poll again after arming.
    pub fn arm(&self, solicited_only: bool) -> Result<()> {
        let queue = &*self.0;
        // SAFETY: the queue is alive.
        let code = unsafe { (queue.notify)(queue.raw.ptr(), i32::from(solicited_only)) };
        check(code, Attempt::Events)
    }

    /// Waits for the event and acknowledges it; returns whether it occurred within `timeout`.
    pub fn wait_event(&self, timeout: Duration) -> Result<bool> {
        Ok(event::wait(&self.0.channel, timeout)? && self.take_event()?)
    }

    /// Takes and acknowledges an event without blocking, for callers that wait on the file
    /// descriptor; returns whether there was one.
    pub fn take_event(&self) -> Result<bool> {
        let queue = &*self.0;
        let library = queue.channel.context.library;
        let get = function!(library, get_cq_event)?;
        let acknowledge = function!(library, ack_cq_events)?;
        let (mut cq, mut program) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: the channel is alive, and both results are local variables.
        if unsafe { get(queue.channel.raw.ptr(), &mut cq, &mut program) } != 0 {
            return match last_errno() {
                libc::EAGAIN | libc::EINTR => Ok(false),
                errno => Err(explain(errno, Attempt::Events).into_error(Attempt::Events)),
            };
        }
        // SAFETY: the channel has one queue, this one, which is alive.
        unsafe { acknowledge(cq, 1) };
        Ok(true)
    }

    /// Waits for the next completion; `None` when `timeout` has passed. Sleeps between events.
    pub fn wait_next(&self, timeout: Duration) -> Result<Option<Completion>> {
        let start = Instant::now();
        let mut one = [Completion::EMPTY];
        loop {
            if self.poll(&mut one)? == 1 {
                return Ok(Some(one[0]));
            }
            self.arm(false)?;
            // A completion that arrived before the arming generates no event.
            if self.poll(&mut one)? == 1 {
                return Ok(Some(one[0]));
            }
            let waited = start.elapsed();
            if waited >= timeout {
                return Ok(None);
            }
            self.wait_event(timeout - waited)?;
        }
    }

    pub(super) fn context(&self) -> &ContextInner {
        &self.0.channel.context
    }

    pub(super) fn belongs_to(&self, context: &ContextInner) -> bool {
        self.0.channel.context.raw.ptr() == context.raw.ptr()
    }
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the channel lives as long as this handle, and its descriptor with it.
        unsafe { BorrowedFd::borrow_raw((*self.raw.ptr()).fd) }
    }
}

impl AsFd for Cq {
    /// Readable once the requested event has occurred, until it is taken.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.channel.as_fd()
    }
}

#[cold]
fn poll_failed(code: i32) -> Error {
    explain(code.saturating_abs(), Attempt::Poll).into_error(Attempt::Poll)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wc(status: u32, opcode: u32, wc_flags: u32) -> sys::Wc {
        // SAFETY: plain numbers, which may be zero.
        let empty: sys::Wc = unsafe { std::mem::zeroed() };
        let imm_data = u32::from_ne_bytes([1, 2, 3, 4]);
        sys::Wc { wr_id: 7, status, opcode, wc_flags, imm_data, src_qp: 9, ..empty }
    }

    #[test]
    fn wc_converts_to_completion() {
        let kind =
            |queue, opcode, flags| completion_from_wc(&wc(0, opcode, flags), queue, 1 << 3).kind;
        let sent = |opcode| kind(WrQueue::Send, opcode, 0);
        assert_eq!(sent(0), CompletionKind::Send(WqeOpcode::Send));
        assert_eq!(sent(1), CompletionKind::Send(WqeOpcode::RdmaWrite));
        assert_eq!(sent(4), CompletionKind::Send(WqeOpcode::FetchAdd));
        assert_eq!(sent(99), CompletionKind::Send(WqeOpcode::Unknown(99)));
        let received = |opcode, flags| kind(WrQueue::Receive, opcode, flags);
        assert_eq!(received(128, 0), CompletionKind::Receive);
        assert_eq!(received(128, 2), CompletionKind::ReceiveImm([1, 2, 3, 4]));
        let key = u32::from_ne_bytes([1, 2, 3, 4]);
        assert_eq!(received(128, 8), CompletionKind::ReceiveInvalidate(key));
        // Bit 2 means "IP checksum OK", except on rxe.
        assert_eq!(received(128, 4), CompletionKind::Receive);
        assert_eq!(received(129, 2), CompletionKind::WriteImm([1, 2, 3, 4]));
        let datagram = completion_from_wc(&wc(0, 128, 1), WrQueue::Srq, 1 << 3);
        assert_eq!(datagram.sender.map(|sender| sender.qpn), Some(9));
        let connected =
            completion_from_wc(&sys::Wc { src_qp: 0, ..wc(0, 128, 1) }, WrQueue::Receive, 1 << 3);
        assert_eq!(connected.sender, None);
    }

    #[test]
    fn failed_wc_keeps_status_and_queue() {
        for (number, status) in
            [(10, Status::RemoteAccess), (12, Status::RetryExceeded), (5, Status::Flushed)]
        {
            // The opcode of failed work is undefined; its id identifies the queue.
            let failed = completion_from_wc(&wc(number, 0, 0), WrQueue::Send, 0);
            assert_eq!((failed.status, failed.kind), (status, CompletionKind::SendFailed));
            let failed = completion_from_wc(&wc(number, 0, 0), WrQueue::Receive, 0);
            assert_eq!((failed.status, failed.kind), (status, CompletionKind::ReceiveFailed));
            assert!(!failed.is_success());
        }
        assert_eq!(completion_from_wc(&wc(99, 0, 0), WrQueue::Send, 0).status, Status::General);
    }

    #[test]
    fn unknown_wr_ids_are_dropped() {
        let registry = super::super::wr_ids::WrIdRegistry::default();
        let mut into = [Completion::EMPTY; 4];
        assert_eq!(translate(&[wc(0, 0, 0)], &registry.reader(), 0, &mut into), 0);
    }
}

//! Completion queues.

use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::device::{Context, Opened};
use super::event;
use super::explain::{Attempt, explain, last_errno};
use super::library::{Raw, check, end, function, make};
use super::sys;
use crate::error::{Error, Kind, Result};
use crate::mlx5::Status;

/// What ended. On failure it is not known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum CompletionKind {
    /// A message was sent.
    Send,
    /// A write, with or without four bytes.
    Write,
    /// A read.
    Read,
    /// A compare-and-swap.
    CompareSwap,
    /// A fetch-and-add.
    FetchAdd,
    /// A receive that took a message.
    Receive,
    /// A receive that took a message with four bytes beside it.
    ReceiveImm([u8; 4]),
    /// A receive that took a message which invalidated this key.
    ReceiveInvalidate(u32),
    /// A receive that was used up by a write with four bytes.
    WriteImm([u8; 4]),
    /// Work that failed.
    Failed,
    /// Anything else: `ibv_wc_opcode` has the number.
    Other(u32),
}

/// The end of a work request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// What the program called it.
    pub id: u64,
    /// How it ended; [`explain_status`](super::explain_status) says more.
    pub status: Status,
    /// What it was.
    pub kind: CompletionKind,
    /// How many bytes came in, of a datagram with the 40 bytes before it.
    pub len: u32,
    /// The queue pair.
    pub qpn: u32,
    /// The vendor's number for what went wrong.
    pub vendor_error: u32,
    /// The queue pair that a datagram came from.
    pub source: Option<u32>,
}

impl Completion {
    /// A place for a completion, to be filled by [`Cq::poll`].
    pub const EMPTY: Self = Self {
        id: 0,
        status: Status::Success,
        kind: CompletionKind::Receive,
        len: 0,
        qpn: 0,
        vendor_error: 0,
        source: None,
    };

    /// Whether it ended as it should.
    pub fn is_success(&self) -> bool {
        self.status == Status::Success
    }

    fn of(wc: &sys::Wc, invalidated_flags: u32) -> Self {
        let status = status_of(wc.status);
        let imm = wc.imm_data.to_ne_bytes();
        let has = |flags: u32| wc.wc_flags & flags != 0;
        let kind = match wc.opcode {
            _ if status != Status::Success => CompletionKind::Failed,
            sys::WC_SEND => CompletionKind::Send,
            sys::WC_RDMA_WRITE => CompletionKind::Write,
            sys::WC_RDMA_READ => CompletionKind::Read,
            sys::WC_COMP_SWAP => CompletionKind::CompareSwap,
            sys::WC_FETCH_ADD => CompletionKind::FetchAdd,
            sys::WC_RECV if has(sys::WC_WITH_IMM) => CompletionKind::ReceiveImm(imm),
            sys::WC_RECV if has(invalidated_flags) => {
                CompletionKind::ReceiveInvalidate(wc.imm_data)
            }
            sys::WC_RECV => CompletionKind::Receive,
            sys::WC_RECV_RDMA_WITH_IMM => CompletionKind::WriteImm(imm),
            other => CompletionKind::Other(other),
        };
        // rxe says of connections too that they have a route; of them no queue pair is told. 0 and 1 are the managers'.
        let is_datagram = has(sys::WC_GRH) && wc.opcode & sys::WC_RECV != 0 && wc.src_qp > 1;
        Self {
            id: wc.wr_id,
            status,
            kind,
            len: wc.byte_len,
            qpn: wc.qp_num,
            vendor_error: wc.vendor_err,
            source: is_datagram.then_some(wc.src_qp),
        }
    }
}

/// The status with that number; those that have no name here are general errors.
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

/// A completion queue, with events. Clones are the same one; it ends with the last queue pair that uses it.
#[derive(Clone, Debug)]
pub struct Cq(pub(super) Arc<Queue>);

#[derive(Debug)]
pub(super) struct Queue {
    pub(super) raw: Raw<sys::Cq>,
    poll: sys::PollCq,
    notify: sys::NotifyCq,
    /// It is ended after the queue.
    channel: Channel,
}

#[derive(Debug)]
struct Channel {
    raw: Raw<sys::CompChannel>,
    context: Arc<Opened>,
}

impl Drop for Channel {
    fn drop(&mut self) {
        end!(self.context.library, destroy_comp_channel(self.raw.ptr()));
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        end!(self.channel.context.library, destroy_cq(self.raw.ptr()));
    }
}

impl Context {
    /// Makes a completion queue with room for at least so many completions.
    pub fn create_cq(&self, entries: u32) -> Result<Cq> {
        let context = self.0.clone();
        let (library, raw) = (context.library, context.raw.ptr());
        let size = i32::try_from(entries).unwrap_or(i32::MAX);
        let channel = make!(library, Attempt::Events, create_comp_channel(raw))?;
        let channel = Channel { raw: channel, context: context.clone() };
        event::never_block(channel.as_fd())?;
        let nothing = std::ptr::null_mut();
        let attempt = Attempt::CreateCq(entries);
        let cq = make!(library, attempt, create_cq(raw, size, nothing, channel.raw.ptr(), 0))?;
        // SAFETY: an open device; its operations do not change once it is open.
        let ops = unsafe { &(*raw).ops };
        let (Some(poll), Some(notify)) = (ops.poll_cq, ops.req_notify_cq) else {
            if let Some(destroy) = library.functions.destroy_cq {
                // SAFETY: just made, and used by nobody.
                unsafe { destroy(cq.ptr()) };
            }
            return Err(lacks(&context, "completion queues"));
        };
        Ok(Cq(Arc::new(Queue { raw: cq, poll, notify, channel })))
    }
}

#[cold]
pub(super) fn lacks(context: &Opened, what: &str) -> Error {
    Error::new(Kind::Unsupported, format!("use {what}"))
        .on(context.device.name.clone())
        .why("its driver has none")
}

/// How many completions are taken in one call of the library's.
const CHUNK: usize = 16;

impl Cq {
    /// Its number, as events tell it.
    pub fn number(&self) -> u32 {
        // SAFETY: the library's object, which lives as long as this.
        unsafe { (*self.0.raw.ptr()).handle }
    }

    /// Takes completions; returns how many of `into` were filled. Never blocks.
    ///
    /// # Errors
    /// If the device is beyond repair, or the queue ran over.
    #[inline]
    pub fn poll(&self, into: &mut [Completion]) -> Result<usize> {
        let queue = &*self.0;
        let flags = queue.channel.context.invalidated_flags;
        let mut filled = 0;
        while filled < into.len() {
            let wanted = (into.len() - filled).min(CHUNK);
            let mut found = [const { MaybeUninit::<sys::Wc>::uninit() }; CHUNK];
            let first = found.as_mut_ptr().cast::<sys::Wc>();
            // Providers leave fields of failed work as they were.
            // SAFETY: as many as the array has, at most; numbers, for which zero is a value.
            unsafe { first.write_bytes(0, wanted) };
            // SAFETY: a queue that lives, and room for so many.
            let count = unsafe { (queue.poll)(queue.raw.ptr(), wanted as i32, first) };
            let Ok(count) = usize::try_from(count) else { return Err(poll_failed(count)) };
            let count = count.min(wanted);
            // SAFETY: so many were written, at least with zeros.
            let found = unsafe { std::slice::from_raw_parts(first, count) };
            for (place, wc) in into[filled..].iter_mut().zip(found) {
                *place = Completion::of(wc, flags);
            }
            filled += count;
            if count < wanted {
                break;
            }
        }
        Ok(filled)
    }

    /// Asks for an event at the next completion, or at the next that is solicited or an error. Completions that are
    /// there already make none: look once more after arming.
    pub fn arm(&self, solicited_only: bool) -> Result<()> {
        let queue = &*self.0;
        // SAFETY: a queue that lives.
        let code = unsafe { (queue.notify)(queue.raw.ptr(), i32::from(solicited_only)) };
        check(code, Attempt::Events)
    }

    /// Waits for the event that was asked for, and takes it; tells whether it came in that time.
    pub fn wait(&self, timeout: Duration) -> Result<bool> {
        Ok(event::wait(&self.0.channel, timeout)? && self.take_event()?)
    }

    /// Takes an event, for those who wait on the file descriptor themselves; tells whether there was one.
    pub fn take_event(&self) -> Result<bool> {
        let queue = &*self.0;
        let library = queue.channel.context.library;
        let get = function!(library, get_cq_event)?;
        let acknowledge = function!(library, ack_cq_events)?;
        let (mut cq, mut program) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: a channel that lives, and room for what it tells.
        if unsafe { get(queue.channel.raw.ptr(), &mut cq, &mut program) } != 0 {
            return match last_errno() {
                libc::EAGAIN | libc::EINTR => Ok(false),
                errno => Err(explain(errno, Attempt::Events).into_error(Attempt::Events)),
            };
        }
        // SAFETY: the channel has one queue, this one, which lives.
        unsafe { acknowledge(cq, 1) };
        Ok(true)
    }

    /// The next completion, waiting for it if need be; `None` when the time is over. It sleeps between events.
    pub fn next(&self, timeout: Duration) -> Result<Option<Completion>> {
        let start = Instant::now();
        let mut one = [Completion::EMPTY];
        loop {
            if self.poll(&mut one)? == 1 {
                return Ok(Some(one[0]));
            }
            self.arm(false)?;
            // It may have come before the arming, and then makes no event.
            if self.poll(&mut one)? == 1 {
                return Ok(Some(one[0]));
            }
            let waited = start.elapsed();
            if waited >= timeout {
                return Ok(None);
            }
            self.wait(timeout - waited)?;
        }
    }

    pub(super) fn is_of(&self, context: &Opened) -> bool {
        self.0.channel.context.raw.ptr() == context.raw.ptr()
    }
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the channel lives as long as this, and its descriptor with it.
        unsafe { BorrowedFd::borrow_raw((*self.raw.ptr()).fd) }
    }
}

impl AsFd for Cq {
    /// Readable when the event that was asked for has come.
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
        // SAFETY: numbers, for which zero is a value.
        let empty: sys::Wc = unsafe { std::mem::zeroed() };
        let imm_data = u32::from_ne_bytes([1, 2, 3, 4]);
        sys::Wc { wr_id: 7, status, opcode, wc_flags, imm_data, src_qp: 9, ..empty }
    }

    #[test]
    fn completions_say_what_the_library_said() {
        let kind = |opcode, flags| Completion::of(&wc(0, opcode, flags), 1 << 3).kind;
        assert_eq!(kind(0, 0), CompletionKind::Send);
        assert_eq!(kind(4, 0), CompletionKind::FetchAdd);
        assert_eq!(kind(128, 0), CompletionKind::Receive);
        assert_eq!(kind(128, 2), CompletionKind::ReceiveImm([1, 2, 3, 4]));
        assert_eq!(
            kind(128, 8),
            CompletionKind::ReceiveInvalidate(u32::from_ne_bytes([1, 2, 3, 4]))
        );
        // Bit 2 means "checksum is right", but for rxe.
        assert_eq!(kind(128, 4), CompletionKind::Receive);
        assert_eq!(kind(129, 2), CompletionKind::WriteImm([1, 2, 3, 4]));
        assert_eq!(kind(200, 0), CompletionKind::Other(200));
        let datagram = Completion::of(&wc(0, 128, 1), 1 << 3);
        assert_eq!((datagram.source, datagram.id), (Some(9), 7));
        let connected = Completion::of(&sys::Wc { src_qp: 0, ..wc(0, 128, 1) }, 1 << 3);
        assert_eq!(connected.source, None);
    }

    #[test]
    fn failed_work_has_a_status_and_no_kind() {
        for (number, status) in
            [(10, Status::RemoteAccess), (12, Status::RetryExceeded), (5, Status::Flushed)]
        {
            let failed = Completion::of(&wc(number, 0, 0), 0);
            assert_eq!((failed.status, failed.kind), (status, CompletionKind::Failed));
            assert!(!failed.is_success());
        }
        assert_eq!(Completion::of(&wc(99, 0, 0), 0).status, Status::General);
    }
}

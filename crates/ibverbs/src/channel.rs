//! Completion channels: an epoll descriptor over the event descriptors of their completion queues,
//! so that programs can put it into their own poll sets and make it non-blocking.

use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};

use parking_lot::Mutex;
use rustix::event::epoll;
use rustix::fs::OFlags;
use warpwire::verbs;
use warpwire_cabi::Unacked;
use warpwire_cabi::process::restarts_system_calls;

use crate::abi;
use crate::boundary::{Errno, Result, give, some};
use crate::context::ContextPtr;
use crate::cq::Cq;
use crate::memory::destroy;

/// `struct ibv_comp_channel`.
#[repr(C)]
pub(crate) struct Channel {
    abi: abi::CompChannel,
    pub shared: Arc<Shared>,
}

/// What a channel and its completion queues share.
pub(crate) struct Shared {
    epoll: OwnedFd,
    queues: Mutex<HashMap<u64, Member>>,
}

/// A completion queue of a channel.
#[derive(Clone)]
struct Member {
    /// Of the object that C holds.
    address: usize,
    cq_context: usize,
    verbs: verbs::Cq,
    unacked: Arc<Unacked>,
}

impl Shared {
    pub(crate) fn add(
        &self,
        cq: *const Cq,
        cq_context: *mut c_void,
        verbs: &verbs::Cq,
        unacked: &Arc<Unacked>,
    ) -> Result<()> {
        let number = u64::from(verbs.number());
        let member = Member {
            address: cq.addr(),
            cq_context: cq_context.addr(),
            verbs: verbs.clone(),
            unacked: unacked.clone(),
        };
        let mut queues = self.queues.lock();
        let data = epoll::EventData::new_u64(number);
        epoll::add(&self.epoll, verbs.as_fd(), data, epoll::EventFlags::IN)?;
        queues.insert(number, member);
        Ok(())
    }

    pub(crate) fn remove(&self, verbs: &verbs::Cq) {
        let _ = epoll::delete(&self.epoll, verbs.as_fd());
        self.queues.lock().remove(&u64::from(verbs.number()));
    }
}

pub(crate) fn create(context: ContextPtr) -> Result<*mut Channel> {
    context.get()?;
    let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    let (fd, refcnt) = (epoll.as_raw_fd(), AtomicI32::new(0));
    let shared = Arc::new(Shared { epoll, queues: Mutex::default() });
    Ok(give(Channel { abi: abi::CompChannel { context: context.0, fd, refcnt }, shared }))
}

pub(crate) fn destroy_channel(channel: Option<Box<Channel>>) -> Result<()> {
    destroy(channel, |channel| match channel.shared.queues.lock().is_empty() {
        true => Ok(()),
        false => Err(Errno(libc::EBUSY)),
    })
}

/// The next event; blocks unless the program made the descriptor non-blocking.
pub(crate) fn next_event(
    channel: Option<&Channel>,
    cq: Option<&mut usize>,
    cq_context: Option<&mut usize>,
) -> Result<()> {
    let (channel, cq, cq_context) = (some(channel)?, some(cq)?, some(cq_context)?);
    let shared = &channel.shared;
    loop {
        let number = wait(shared.epoll.as_fd())?;
        let Some(member) = shared.queues.lock().get(&number).cloned() else { continue };
        // Counted before the event is consumed: whoever destroys the queue then waits for it.
        member.unacked.add();
        if member.verbs.take_event() {
            (*cq, *cq_context) = (member.address, member.cq_context);
            return Ok(());
        }
        member.unacked.ack(1); // another thread was faster
    }
}

/// Waits until an epoll descriptor has an event; returns its data.
///
/// # Errors
/// `EAGAIN` if it has none and is non-blocking; `EINTR` as for `read`.
pub(crate) fn wait(fd: BorrowedFd<'_>) -> Result<u64> {
    let mut events = [epoll::Event { flags: epoll::EventFlags::empty(), data: EMPTY }];
    let no_wait = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
    loop {
        let is_blocking = !rustix::fs::fcntl_getfl(fd)?.contains(OFlags::NONBLOCK);
        let timeout = if is_blocking { None } else { Some(&no_wait) };
        match epoll::wait(fd, &mut events, timeout) {
            Ok(1..) => return Ok(events[0].data.u64()),
            Ok(_) if is_blocking => {}
            Ok(_) => return Err(Errno(libc::EAGAIN)),
            Err(rustix::io::Errno::INTR) if restarts_system_calls() => {}
            Err(why) => return Err(why.into()),
        }
    }
}

const EMPTY: epoll::EventData = epoll::EventData::new_u64(0);

impl Channel {
    pub(crate) fn is_of(&self, context: ContextPtr) -> bool {
        std::ptr::eq(self.abi.context, context.0)
    }

    /// Counts a completion queue of the channel, for programs that look.
    pub(crate) fn count(&self, change: c_int) {
        self.abi.refcnt.fetch_add(change, Ordering::Relaxed);
    }
}

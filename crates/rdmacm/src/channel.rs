//! Event channels: a queue, and a descriptor that is readable while the queue has events.

use std::collections::VecDeque;
use std::ffi::c_int;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::fs::OFlags;
use warpwire_cabi::Unacked;
use warpwire_cabi::process::restarts_system_calls;

use crate::abi;
use crate::boundary::{Errno, IdPtr, Result, give, take};
use crate::session::Told;

/// `struct rdma_event_channel`.
#[repr(C)]
pub(crate) struct Channel {
    abi: abi::EventChannel,
    /// `None`: destroyed.
    queue: Mutex<Option<Arc<EventQueue>>>,
}

/// Channels that were destroyed lately. A thread may be about to wait for the next event when
/// another one ends the program and destroys the channel (rping): its memory stays for a while.
static DESTROYED: Mutex<VecDeque<Box<Channel>>> = Mutex::new(VecDeque::new());
const MAX_DESTROYED: usize = 64;
/// How long such a thread waits before it gets an error.
const DESTROYED_PAUSE: Duration = Duration::from_secs(1);

/// An event that the program has not taken yet.
pub(crate) struct Event {
    /// The number of the connection in the service; that of a request has no id so far.
    pub number: u64,
    /// The id that it is for: a request's listener.
    pub id: IdPtr,
    pub unacked: Arc<Unacked>,
    pub told: Told,
}

pub(crate) struct EventQueue {
    fd: OwnedFd,
    events: Mutex<VecDeque<Event>>,
}

impl EventQueue {
    fn new() -> Result<Self> {
        Ok(Self { fd: eventfd(0, EventfdFlags::CLOEXEC)?, events: Mutex::default() })
    }

    pub(crate) fn push(&self, event: Event) {
        let mut events = self.events.lock();
        events.push_back(event);
        if events.len() == 1 {
            // Cannot fail or block: the counter is 0.
            let _ = rustix::io::write(&self.fd, &1_u64.to_ne_bytes());
        }
    }

    fn clear_if_empty(&self, events: &VecDeque<Event>) {
        if events.is_empty() {
            // Cannot block: the counter is 1.
            let _ = rustix::io::read(&self.fd, &mut [0; 8]);
        }
    }

    /// The next event, which counts as not acknowledged from now on.
    fn pop(&self) -> Option<Event> {
        let mut events = self.events.lock();
        let event = events.pop_front()?;
        event.unacked.add();
        self.clear_if_empty(&events);
        Some(event)
    }

    /// Takes out the events that match.
    pub(crate) fn remove(&self, matches: impl Fn(&Event) -> bool) -> Vec<Event> {
        let mut events = self.events.lock();
        if events.is_empty() {
            return Vec::new();
        }
        let (removed, kept) = events.drain(..).partition(matches);
        *events = kept;
        self.clear_if_empty(&events);
        Vec::from(removed)
    }

    pub(crate) fn count(&self, matches: impl Fn(&Event) -> bool) -> usize {
        self.events.lock().iter().filter(|event| matches(event)).count()
    }

    /// Waits for an event, unless the program made the descriptor non-blocking.
    ///
    /// # Errors
    /// `EAGAIN` if there is none and the descriptor is non-blocking; `EINTR` as for `read`.
    pub(crate) fn next(&self) -> Result<Event> {
        loop {
            if let Some(event) = self.pop() {
                return Ok(event);
            }
            if rustix::fs::fcntl_getfl(&self.fd)?.contains(OFlags::NONBLOCK) {
                return Err(Errno(libc::EAGAIN));
            }
            match poll(&mut [PollFd::new(&self.fd, PollFlags::IN)], None) {
                Err(rustix::io::Errno::INTR) if restarts_system_calls() => {}
                result => drop(result?),
            }
        }
    }
}

impl Channel {
    pub(crate) fn create() -> Result<*mut Self> {
        let queue = Arc::new(EventQueue::new()?);
        let fd: c_int = queue.fd.as_fd().as_raw_fd();
        Ok(give(Self { abi: abi::EventChannel { fd }, queue: Mutex::new(Some(queue)) }))
    }

    /// The events; they and the descriptor stay as long as a thread waits for them.
    ///
    /// # Errors
    /// `EBADF` if the channel was destroyed.
    pub(crate) fn queue(&self) -> Result<Arc<EventQueue>> {
        let queue = self.queue.lock().clone();
        queue.ok_or_else(|| {
            std::thread::sleep(DESTROYED_PAUSE);
            Errno(libc::EBADF)
        })
    }

    pub(crate) fn destroy(channel: *mut Self) {
        let Some(channel) = take::<_, Self>(channel) else { return };
        *channel.queue.lock() = None;
        let mut destroyed = DESTROYED.lock();
        destroyed.push_back(channel);
        if destroyed.len() > MAX_DESTROYED {
            destroyed.pop_front();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::Timespec;

    fn event(number: u64, unacked: &Arc<Unacked>) -> Event {
        Event { number, id: IdPtr::NONE, unacked: unacked.clone(), told: Told::Disconnected }
    }

    fn is_readable(queue: &EventQueue) -> bool {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut [PollFd::new(&queue.fd, PollFlags::IN)], Some(&now)).unwrap() == 1
    }

    #[test]
    fn the_descriptor_is_readable_while_there_are_events() {
        let (queue, unacked) = (EventQueue::new().unwrap(), Arc::default());
        assert!(!is_readable(&queue));
        for number in 1..=3 {
            queue.push(event(number, &unacked));
        }
        assert!(is_readable(&queue));
        assert_eq!(queue.next().unwrap().number, 1);
        assert!(is_readable(&queue));
        let removed = queue.remove(|event| event.number == 2);
        assert_eq!((removed.len(), removed[0].number), (1, 2));
        assert!(is_readable(&queue));
        assert_eq!(queue.count(|event| event.number == 3), 1);
        assert_eq!(queue.next().unwrap().number, 3);
        assert!(!is_readable(&queue));
        assert!(queue.remove(|_| true).is_empty());
        rustix::fs::fcntl_setfl(&queue.fd, OFlags::NONBLOCK).unwrap();
        assert_eq!(queue.next().err(), Some(Errno(libc::EAGAIN)));
        queue.push(event(4, &unacked));
        assert_eq!(queue.remove(|_| true).len(), 1);
        assert!(!is_readable(&queue));
    }

    #[test]
    fn a_thread_that_waits_survives_the_end_of_its_channel() {
        let channel = Channel::create().unwrap();
        let known: &Channel = crate::boundary::object(channel).unwrap();
        let queue = known.queue().unwrap();
        Channel::destroy(channel);
        // The descriptor is open as long as something waits for it.
        queue.push(event(1, &Arc::default()));
        assert_eq!(queue.next().unwrap().number, 1);
        // What asks for events after that gets an error, and no freed memory.
        assert_eq!(known.queue().err(), Some(Errno(libc::EBADF)));
    }

    #[test]
    fn what_was_taken_is_waited_for() {
        let (queue, unacked) = (EventQueue::new().unwrap(), Arc::<Unacked>::default());
        unacked.wait();
        queue.push(event(1, &unacked));
        unacked.wait(); // an event that nothing has taken
        let taken = queue.next().unwrap();
        let waiting = std::thread::spawn({
            let unacked = unacked.clone();
            move || unacked.wait()
        });
        std::thread::sleep(std::time::Duration::from_millis(20));
        assert!(!waiting.is_finished());
        taken.unacked.ack(1);
        waiting.join().unwrap();
    }
}

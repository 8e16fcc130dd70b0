//! Asynchronous events of queues, ports and the device.

use std::ffi::c_void;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};

use super::device::ContextInner;
use super::explain::{Attempt, explain, last_errno};
use super::library::function;
use super::sys;
use crate::error::{Error, Result};
use crate::work::AsyncEvent;

/// Makes reads of the descriptor non-blocking.
pub(super) fn set_nonblocking(fd: BorrowedFd<'_>) -> Result<()> {
    let failed = |source: rustix::io::Errno| Error::os("set up an event channel", &source.into());
    let flags = fcntl_getfl(fd).map_err(failed)?;
    fcntl_setfl(fd, flags | OFlags::NONBLOCK).map_err(failed)
}

/// Waits until the descriptor is readable; returns whether it is.
pub(super) fn wait(fd: &impl AsFd, timeout: Duration) -> Result<bool> {
    let time = Timespec {
        tv_sec: i64::try_from(timeout.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: i64::from(timeout.subsec_nanos()),
    };
    let mut fds = [PollFd::new(fd, PollFlags::IN)];
    match poll(&mut fds, Some(&time)) {
        Ok(ready) => Ok(ready > 0),
        Err(rustix::io::Errno::INTR) => Ok(false),
        Err(source) => Err(Error::os("wait for an event", &source.into())),
    }
}

/// Takes and acknowledges the next event, if there is one.
pub(super) fn next(context: &ContextInner) -> Result<Option<AsyncEvent>> {
    let get = function!(context.library, get_async_event)?;
    let acknowledge = function!(context.library, ack_async_event)?;
    let mut event = sys::AsyncEvent { element: std::ptr::null_mut(), event_type: 0 };
    // SAFETY: the device is open, and `event` is a local variable.
    if unsafe { get(context.raw.ptr(), &mut event) } != 0 {
        return match last_errno() {
            libc::EAGAIN | libc::EINTR => Ok(None),
            errno => Err(explain(errno, Attempt::Events).into_error(Attempt::Events)),
        };
    }
    let kind = u32::try_from(event.event_type).unwrap_or(u32::MAX);
    // SAFETY: just filled in by the library. Destroying the object waits for the acknowledgement.
    let decoded = unsafe { decode(kind, event.element) };
    // SAFETY: an event that was taken and not yet acknowledged.
    unsafe { acknowledge(&mut event) };
    Ok(Some(decoded))
}

/// Converts an event.
///
/// # Safety
/// `element` was returned by the library with an event of this kind, and the object that it may
/// point to is alive.
unsafe fn decode(kind: u32, element: *mut c_void) -> AsyncEvent {
    use AsyncEvent::*;
    // A port number occupies the first four bytes of the union.
    let port = (element as usize as u32) as u8;
    // SAFETY: guaranteed by the caller; used only for kinds whose element is a queue pair.
    let qpn = || unsafe { (*element.cast::<sys::Qp>()).qp_num };
    // SAFETY: the same, for shared receive queues.
    let srq = || unsafe { (*element.cast::<sys::Srq>()).handle };
    match kind {
        // SAFETY: the same, for completion queues.
        sys::EVENT_CQ_ERR => CqOverrun { cqn: unsafe { (*element.cast::<sys::Cq>()).handle } },
        sys::EVENT_QP_FATAL => Fatal { qpn: qpn() },
        sys::EVENT_QP_REQ_ERR => RequestError { qpn: qpn() },
        sys::EVENT_QP_ACCESS_ERR => AccessError { qpn: qpn() },
        sys::EVENT_COMM_EST => Established { qpn: qpn() },
        sys::EVENT_SQ_DRAINED => Drained { qpn: qpn() },
        sys::EVENT_QP_LAST_WQE_REACHED => LastReceiveReached { qpn: qpn() },
        sys::EVENT_SRQ_ERR => SrqFailed { srqn: srq() },
        sys::EVENT_SRQ_LIMIT_REACHED => LimitReached { srqn: srq() },
        sys::EVENT_DEVICE_FATAL => DeviceFailed,
        sys::EVENT_PORT_ACTIVE => PortActive(port),
        sys::EVENT_PORT_ERR => PortDown(port),
        sys::EVENT_GID_CHANGE => GidsChanged(port),
        sys::EVENT_PORT_ERR..=sys::EVENT_SM_CHANGE | sys::EVENT_CLIENT_REREGISTER => {
            Port(port, kind)
        }
        other => Other(other),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn port_and_device_events_have_no_pointer() {
        let port = 2 as *mut c_void;
        let decoded = |kind| {
            // SAFETY: the element of these kinds is not a pointer.
            unsafe { decode(kind, port) }
        };
        assert_eq!(decoded(9), AsyncEvent::PortActive(2));
        assert_eq!(decoded(10), AsyncEvent::PortDown(2));
        assert_eq!(decoded(18), AsyncEvent::GidsChanged(2));
        assert_eq!(decoded(11), AsyncEvent::Port(2, 11));
        assert_eq!(decoded(8), AsyncEvent::DeviceFailed);
        assert_eq!(decoded(77), AsyncEvent::Other(77));
    }
}

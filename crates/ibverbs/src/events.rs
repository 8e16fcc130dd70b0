//! Asynchronous events, and events that the program has not acknowledged yet.

use std::collections::HashMap;
use std::os::fd::AsFd;
use std::sync::Arc;

use parking_lot::Mutex;
use warpwire::verbs::AsyncEvent as Event;
use warpwire_cabi::Unacked;

use crate::abi::{self, AsyncEvent};
use crate::boundary::{Result, some};
use crate::channel;
use crate::context::ContextPtr;

/// Kinds of objects that events name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Kind {
    Cq,
    Qp,
    Srq,
}

/// The objects of a context, by kind and number: events name them so.
#[derive(Default)]
pub(crate) struct Registry(Mutex<HashMap<(Kind, u32), Registered>>);

struct Registered {
    /// Of the object that C holds.
    address: usize,
    unacked: Arc<Unacked>,
}

/// Events that were handed out, by the address of their object: an acknowledgement has no more.
static PENDING: Mutex<Option<HashMap<usize, Arc<Unacked>>>> = Mutex::new(None);

impl Registry {
    pub(crate) fn add<T>(&self, kind: Kind, number: u32, object: *const T) {
        let object = Registered { address: object.addr(), unacked: Arc::default() };
        self.0.lock().insert((kind, number), object);
    }

    /// Removes an object, and waits until all its events are acknowledged.
    pub(crate) fn remove(&self, kind: Kind, number: u32) {
        let Some(object) = self.0.lock().remove(&(kind, number)) else { return };
        object.unacked.wait();
        if let Some(pending) = &mut *PENDING.lock() {
            pending.remove(&object.address);
        }
    }

    /// The address of an object, which is now known to have an event.
    fn hand_out(&self, kind: Kind, number: u32) -> Option<usize> {
        let objects = self.0.lock();
        let object = objects.get(&(kind, number))?;
        object.unacked.add();
        let mut pending = PENDING.lock();
        pending.get_or_insert_default().insert(object.address, object.unacked.clone());
        Some(object.address)
    }

    fn translate(&self, event: Event) -> Option<AsyncEvent> {
        let (kind, number, event_type) = match event {
            Event::Established { qpn } => (Kind::Qp, qpn, abi::EVENT_COMM_EST),
            Event::Drained { qpn } => (Kind::Qp, qpn, abi::EVENT_SQ_DRAINED),
            Event::RequestError { qpn } => (Kind::Qp, qpn, abi::EVENT_QP_REQ_ERR),
            Event::AccessError { qpn } => (Kind::Qp, qpn, abi::EVENT_QP_ACCESS_ERR),
            Event::Fatal { qpn } => (Kind::Qp, qpn, abi::EVENT_QP_FATAL),
            Event::LastReceiveReached { qpn } => (Kind::Qp, qpn, abi::EVENT_QP_LAST_WQE_REACHED),
            Event::LimitReached { srqn } => (Kind::Srq, srqn, abi::EVENT_SRQ_LIMIT_REACHED),
            Event::SrqFailed { srqn } => (Kind::Srq, srqn, abi::EVENT_SRQ_ERR),
            Event::CqOverrun { cqn } => (Kind::Cq, cqn, abi::EVENT_CQ_ERR),
            Event::DeviceFailed => {
                return Some(AsyncEvent { element: 0, event_type: abi::EVENT_DEVICE_FATAL });
            }
            _ => return None,
        };
        // An object that was destroyed has no events any more.
        Some(AsyncEvent { element: self.hand_out(kind, number)?, event_type })
    }
}

/// The next asynchronous event; blocks unless the program made the descriptor non-blocking.
pub(crate) fn next(context: ContextPtr, into: Option<&mut AsyncEvent>) -> Result<()> {
    let (context, into) = (context.get()?, some(into)?);
    loop {
        while let Some(event) = context.opened().and_then(|open| open.verbs.next_event()) {
            if let Some(event) = context.registry.translate(event) {
                *into = event;
                return Ok(());
            }
        }
        channel::wait(context.async_fd.as_fd())?;
    }
}

pub(crate) fn ack(event: Option<&AsyncEvent>) {
    let Some(event) = event else { return };
    let pending = PENDING.lock().as_ref().and_then(|all| all.get(&event.element).cloned());
    if let Some(unacked) = pending {
        unacked.ack(1);
    }
}

//! Waiting in tokio's reactor, with the cargo feature `tokio`: the task itself polls the
//! queue, and no thread stands between it and the device's.
//!
//! | type | waits for |
//! |---|---|
//! | [`AsyncCq`] | completions of a completion queue |
//! | [`AsyncComm`] | requests of a communicator |
//! | [`AsyncAgent`] | notifications of an agent |
//!
//! [`Request`] and [`Transfer`](crate::agent::Transfer) are futures without
//! this feature, for any executor. Each type here registers a duplicate of the object's descriptor
//! (`AsFd`); programs with another reactor do the same with it.
//!
//! Every function is cancel safe: a future that is dropped before it is ready has taken nothing.
//! The types must be created inside a runtime that has I/O enabled, or tokio panics.

use std::future::{Future, poll_fn};
use std::os::fd::{AsFd, OwnedFd};
use std::pin::pin;
use std::task::Poll;

use ::tokio::io::Interest;
use ::tokio::io::unix::{AsyncFd, AsyncFdReadyGuard};
use ::tokio::runtime::Handle;

use crate::agent::{Agent, Notification};
use crate::error::{Error, Kind, Result};
use crate::msg::{Comm, Driver, Outcome, Request};
use crate::verbs::{Completion, Cq};

/// Registers a descriptor with the reactor of the current runtime. A duplicate: a reactor accepts
/// each descriptor once.
fn register(what: &impl AsFd) -> Result<AsyncFd<OwnedFd>> {
    let name = "register a descriptor with tokio";
    if Handle::try_current().is_err() {
        let error = Error::new(Kind::InvalidArgument, name).why("there is no runtime here");
        return Err(error.fix("call it inside a runtime: in a task, or after Runtime::enter"));
    }
    let fd = what.as_fd().try_clone_to_owned().map_err(|why| Error::os(name, &why))?;
    // Deprecated, because a type could close its descriptor, or return another one. An `OwnedFd`
    // does neither. What replaces it since 1.53.3 is unsafe.
    #[allow(deprecated)]
    AsyncFd::with_interest(fd, Interest::READABLE).map_err(|why| Error::os(name, &why))
}

/// What the reactor says of a descriptor; fails if the runtime shuts down.
fn readiness(
    readable: std::io::Result<AsyncFdReadyGuard<'_, OwnedFd>>,
) -> Result<AsyncFdReadyGuard<'_, OwnedFd>> {
    readable.map_err(|why| Error::os("wait in tokio's reactor", &why))
}

/// A completion queue whose completions tasks await.
///
/// ```
/// use warpwire::link::Hub;
/// use warpwire::tokio::AsyncCq;
/// use warpwire::verbs::{Context, QpOptions, SendRequest, WrOp};
///
/// let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build().unwrap();
/// runtime.block_on(async {
///     let context = Context::open(Hub::new().endpoint("10.0.0.1:4791".parse().unwrap())?)?;
///     let (pd, cq) = (context.alloc_pd(), context.create_cq(16)?);
///     let qp = context.create_qp(&pd, &cq, &cq, QpOptions::default())?;
///     qp.connect(&qp.endpoint())?;
///     let cq = AsyncCq::new(cq)?;
///     qp.post_send(&[SendRequest::new(1, WrOp::Nop)])?;
///     assert_eq!(cq.next().await?.id, 1);
///     Ok::<(), warpwire::Error>(())
/// })?;
/// # Ok::<(), warpwire::Error>(())
/// ```
#[derive(Debug)]
pub struct AsyncCq {
    cq: Cq,
    fd: AsyncFd<OwnedFd>,
}

impl AsyncCq {
    /// Registers the queue with the current runtime. Other threads and tasks may use it too.
    ///
    /// # Errors
    /// Outside of a runtime. [`Kind::Unsupported`] if nothing would wake a task: the device has
    /// [`ProgressMode::Manual`](crate::verbs::ProgressMode::Manual).
    pub fn new(cq: Cq) -> Result<Self> {
        if !cq.supports_blocking_wait() {
            return Err(Error::new(Kind::Unsupported, "await completions")
                .why("only threads that poll run the engine (ProgressMode::Manual)")
                .fix("open the device with ProgressMode::Auto or ProgressMode::Thread"));
        }
        let fd = register(&cq)?;
        Ok(Self { cq, fd })
    }

    /// The queue.
    pub fn cq(&self) -> &Cq {
        &self.cq
    }

    /// Takes the next completion. Several tasks may wait: each gets one.
    ///
    /// # Errors
    /// As for [`Cq::poll`] and [`Cq::arm`].
    pub async fn next(&self) -> Result<Completion> {
        let mut one = [Completion::EMPTY];
        self.next_batch(&mut one).await?;
        Ok(one[0])
    }

    /// Takes the completions that are there, at least one, and at most `into.len()`; returns how
    /// many entries of `into` were written. An empty `into` is 0 at once.
    ///
    /// # Errors
    /// As for [`Cq::poll`] and [`Cq::arm`].
    pub async fn next_batch(&self, into: &mut [Completion]) -> Result<usize> {
        loop {
            let found = self.cq.poll(into)?;
            if found > 0 || into.is_empty() {
                self.cq.pass_event_on()?;
                return Ok(found);
            }
            let _waiter = self.cq.add_waiter();
            self.cq.arm(false)?;
            // Cleared before the event is taken: one that comes in between is noticed.
            readiness(self.fd.readable().await)?.clear_ready();
            self.cq.take_event();
        }
    }
}

/// A communicator whose requests tasks await, and which they drive: unlike with `request.await`, no
/// thread of the communicator takes part. Each event wakes every task that waits here, so tasks
/// with many requests await these directly.
#[derive(Debug)]
pub struct AsyncComm {
    comm: Comm,
    fd: AsyncFd<OwnedFd>,
}

impl AsyncComm {
    /// Registers the communicator with the current runtime. No other event loop may use its
    /// descriptor.
    ///
    /// # Errors
    /// Outside of a runtime.
    pub fn new(comm: Comm) -> Result<Self> {
        let fd = register(&comm)?;
        Ok(Self { comm, fd })
    }

    /// The communicator.
    pub fn comm(&self) -> &Comm {
        &self.comm
    }

    /// Waits until the request has completed. If the future is dropped the request stays in flight,
    /// and can be waited for again.
    ///
    /// # Errors
    /// The failure of the request; [`Kind::InvalidArgument`] if it belongs to another communicator.
    pub async fn wait(&self, request: &mut Request) -> Result<Outcome> {
        if !request.is_of(&self.comm) {
            let error = Error::new(Kind::InvalidArgument, "await a request");
            return Err(error.why("it belongs to another communicator"));
        }
        loop {
            let mut readable = pin!(self.fd.readable());
            let woken = poll_fn(|task| {
                let polled = request.poll_driven(task.waker(), Driver::EventLoop);
                if let Poll::Ready(outcome) = polled {
                    return Poll::Ready(Err(outcome));
                }
                readable.as_mut().poll(task).map(Ok)
            });
            match woken.await {
                Err(outcome) => return outcome,
                Ok(guard) => {
                    // Cleared first: an event that comes in between is noticed.
                    readiness(guard)?.clear_ready();
                    self.comm.clear_events()?;
                }
            }
        }
    }
}

/// An agent whose notifications tasks await.
#[derive(Debug)]
pub struct AsyncAgent {
    agent: Agent,
    fd: AsyncFd<OwnedFd>,
}

impl AsyncAgent {
    /// Registers the agent with the current runtime. No other event loop may use its descriptor.
    ///
    /// # Errors
    /// Outside of a runtime.
    pub fn new(agent: Agent) -> Result<Self> {
        let fd = register(&agent)?;
        Ok(Self { agent, fd })
    }

    /// The agent.
    pub fn agent(&self) -> &Agent {
        &self.agent
    }

    /// Takes the oldest notification that has arrived, of any peer. Several tasks may wait: each
    /// gets one.
    ///
    /// # Errors
    /// If the runtime shuts down.
    pub async fn next_notification(&self) -> Result<Notification> {
        loop {
            self.agent.clear_events();
            if let Some(notification) = self.agent.next_notification() {
                self.agent.pass_event_on();
                return Ok(notification);
            }
            self.agent.prepare_wait();
            readiness(self.fd.readable().await)?.clear_ready();
        }
    }
}

//! Work requests, completions and asynchronous events: the types that the software HCA and hardware
//! share.
//!
//! | type | what it is |
//! |---|---|
//! | [`SendRequest`], [`WrOp`], [`Fence`] | work to post |
//! | [`ReceiveRequest`] | a receive to post |
//! | [`Sge`], [`Remote`] | local memory, and the peer's |
//! | [`Completion`], [`CompletionKind`], [`DatagramSender`] | the result of a work request |
//! | [`AsyncEvent`] | what happens to queues, ports and devices outside completions |
//!
//! Plain data without behaviour. Programs use the re-exports in [`verbs`](crate::verbs).

mod completion;
mod event;
mod post_error;
mod request;

pub use completion::{Completion, CompletionKind, DatagramSender};
pub use event::AsyncEvent;
pub use post_error::PostError;
pub(crate) use post_error::PostResult;
pub use request::{Destination, ReceiveRequest, SendRequest, Sge, WrOp};
pub use warpwire_proto::qp::{Fence, Remote};

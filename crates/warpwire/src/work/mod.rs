//! Work, its ends and the news of a device, in the words that every device shares: the software HCA and hardware.
//!
//! | type | what it is |
//! |---|---|
//! | [`SendRequest`], [`WrOp`], [`Fence`] | work to post |
//! | [`ReceiveRequest`] | a receive to post |
//! | [`Sge`], [`Remote`] | memory of one's own, and of the peer |
//! | [`Completion`], [`CompletionKind`], [`DatagramSender`] | how work ended |
//! | [`AsyncEvent`] | what befalls queues, ports and devices beside completions |
//!
//! Plain data: nothing here does anything. [`verbs`](crate::verbs) is where programs find them.

mod completion;
mod event;
mod request;

pub use completion::{Completion, CompletionKind, DatagramSender};
pub use event::AsyncEvent;
pub use request::{Destination, Fence, ReceiveRequest, Remote, SendRequest, Sge, WrOp};

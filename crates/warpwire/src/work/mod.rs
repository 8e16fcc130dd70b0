//! Work, its ends and the news of a device, in the words that every device shares: the software HCA and hardware.
//!
//! | type | what it is |
//! |---|---|
//! | [`Request`], [`Op`], [`Fence`] | work to post |
//! | [`ReceiveRequest`] | a receive to post |
//! | [`Sge`], [`Remote`] | memory of one's own, and of the peer |
//! | [`Completion`], [`CompletionKind`], [`Sender`] | how work ended |
//! | [`AsyncEvent`] | what befalls queues, ports and devices beside completions |
//!
//! Plain data: nothing here does anything. [`verbs`](crate::verbs) is where programs find them.

mod completion;
mod event;
mod request;

pub use completion::{Completion, CompletionKind, Sender};
pub use event::AsyncEvent;
pub use request::{Destination, Fence, Op, ReceiveRequest, Remote, Request, Sge};

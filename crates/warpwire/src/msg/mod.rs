//! Ranks and messages.
mod buffer;
mod collective;
mod comm;
mod entries;
mod header;
mod incoming;
mod outgoing;
mod peer;
mod place;
mod rendezvous;
mod request;
mod shared;
mod state;
mod watch;
mod window;
mod words;

pub use buffer::{Buffer, Part};
pub use collective::{Element, Reduce};
pub use comm::{Comm, CommOptions, Wire};
pub use entries::Match;
pub use place::{Launcher, Master, Place};
pub use request::{Outcome, Request, wait_all, wait_any};
pub use window::{Signal, Window};
pub use words::Writer;

//! Ranks and messages: processes that a launcher started find each other, exchange messages, and
//! access each other's memory (one-sided).
//!
//! | type | what it is |
//! |---|---|
//! | [`Comm`], [`CommOptions`] | the communicator; its link or device, limits and timeouts |
//! | [`RankInfo`], [`Launcher`], [`Rendezvous`] | rank, size and meeting point of a process |
//! | [`Buffer`], [`BufferSlice`] | registered memory of the host or a device |
//! | [`Request`], [`Outcome`], [`wait_all`], [`wait_any`] | transfers in flight and their results |
//! | [`Match`] | which messages a receive accepts |
//! | [`RmaWindow`], [`Signal`] | memory for one-sided access, and words that signal its arrival |
//! | [`Writer`], [`Condition`](crate::mem::Condition) | waiting for words |
//! | [`DeviceChannel`], [`ChannelRequest`], [`ChannelBatch`] | messages of streams and kernels |
//! | [`DataType`], [`ReduceOp`] | elements and operations of reductions |
//!
//! Start a program that calls [`Comm::from_env`] with `warpwire run -n 4 -- PROGRAM`, torchrun,
//! mpirun or srun. Here the ranks are threads:
//!
//! ```
//! use std::time::Duration;
//! use warpwire::msg::Comm;
//!
//! const SOON: Duration = Duration::from_secs(20);
//! let ranks = Comm::local(2)?;
//! std::thread::scope(|scope| {
//!     for comm in ranks {
//!         scope.spawn(move || -> warpwire::Result<()> {
//!             let (mine, theirs) = (comm.alloc(4096)?, comm.alloc(4096)?);
//!             mine.write(0, &[comm.rank() as u8; 4096])?;
//!             let other = 1 - comm.rank();
//!             let mut receive = comm.irecv(other, 7, &theirs)?;
//!             comm.send(other, 7, &mine, SOON)?;
//!             assert_eq!(receive.wait(SOON)?.len, 4096);
//!
//!             // One-sided: the peer does not take part.
//!             let window = comm.window(&theirs)?;
//!             window.put(other, 0, mine.slice(0, 64)?)?.wait(SOON)?;
//!             window.close(SOON)?;
//!             comm.finish(SOON)
//!         });
//!     }
//! });
//! # Ok::<(), warpwire::Error>(())
//! ```
//!
//! # Failures
//! Every rank has a TCP connection to every other one, used only to detect that a rank dies, leaves
//! or aborts. All requests that wait for such a rank then fail with an error of the kind
//! [`PeerLost`](crate::error::Kind::PeerLost) that names the rank and the cause. Messages that it
//! had sent before are still delivered, and the other ranks can continue among themselves.
//!
//! # Implementation
//! `rank_info` reads the environment, `rendezvous` connects the ranks, `watch` is the failure
//! detector. `peer` states the rules of the protocol; `state` implements it, with `incoming` and
//! `outgoing`; `shared` implements waiting. All of it runs in the threads that call, under one
//! lock; for tasks that await requests, in the failure detector's thread. [`device_channel`] is
//! separate: it has its own connections for streams and kernels.

mod buffer;
mod collective;
mod comm;
pub mod device_channel;
mod entries;
mod guard;
mod header;
mod incoming;
mod outgoing;
mod peer;
mod rank_info;
mod rendezvous;
mod request;
mod shared;
mod state;
mod watch;
mod window;
mod words;

pub use buffer::{Buffer, BufferSlice};
pub use collective::{DataType, ReduceOp};
pub use comm::{Comm, CommOptions};
pub use device_channel::{
    ChannelBatch, ChannelOptions, ChannelRequest, DeviceChannel, PreparedWork,
};
#[cfg(feature = "tokio")]
pub(crate) use entries::Driver;
pub use entries::Match;
pub use rank_info::{Launcher, RankInfo, Rendezvous};
pub use request::{Outcome, Request, wait_all, wait_any};
pub use window::{RmaWindow, Signal};
pub use words::Writer;

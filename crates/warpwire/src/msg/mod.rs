//! Ranks and messages: processes that a launcher started find each other, send, receive, and write to each other's
//! memory.
//!
//! | type | what it is |
//! |---|---|
//! | [`Comm`], [`CommOptions`], [`CommLink`] | the ranks, and how they are joined |
//! | [`RankInfo`], [`Launcher`], [`Rendezvous`] | who a process is, as its launcher says |
//! | [`Buffer`], [`BufferSlice`] | registered memory of the host or a device |
//! | [`Request`], [`Outcome`], [`wait_all`], [`wait_any`] | transfers under way, and their ends |
//! | [`Match`] | which messages a receive takes |
//! | [`RmaWindow`], [`Signal`] | memory of every rank that the others reach, and words that tell of it |
//! | [`Writer`], [`Condition`](crate::mem::Condition) | waiting for words |
//! | [`DeviceChannel`], [`ChannelRequest`], [`ChannelBatch`] | the same, sent and waited for by streams and kernels |
//! | [`DataType`], [`ReduceOp`] | what all ranks compute together |
//!
//! Start a program that calls [`Comm::from_env`] with `warpwire run -n 4 -- PROGRAM`, torchrun, mpirun or srun. Here
//! the ranks are threads:
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
//!             // The same without the other's help.
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
//! A rank that dies, leaves or gives up is known to all others at once, by connections that are there for nothing else.
//! Everything that waits for it ends, with an error of the kind [`PeerLost`](crate::error::Kind::PeerLost) that names
//! the rank and the cause; what it had sent before is still delivered, and the others go on with each other.
//!
//! # Inside
//! `rank_info` reads the environment, `rendezvous` brings ranks together, `watch` hears when they go. `peer` has the rules of
//! the protocol; `state` runs it, with `incoming` and `outgoing`; `shared` is how threads wait. All of it is driven by
//! the threads that call, under one lock. [`device_channel`] stands beside it: connections of its own for streams and kernels.

mod buffer;
mod collective;
mod comm;
pub mod device_channel;
mod entries;
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
pub use comm::{Comm, CommLink, CommOptions};
pub use device_channel::{
    ChannelBatch, ChannelOptions, ChannelRequest, DeviceChannel, PreparedWork,
};
pub use entries::Match;
pub use rank_info::{Launcher, RankInfo, Rendezvous};
pub use request::{Outcome, Request, wait_all, wait_any};
pub use window::{RmaWindow, Signal};
pub use words::Writer;

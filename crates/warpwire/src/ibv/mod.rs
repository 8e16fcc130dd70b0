//! RDMA devices through libibverbs: hardware, and the kernel's software devices, such as rxe.
//!
//! | type | what it is |
//! |---|---|
//! | [`devices`], [`IbvDevice`] | the RDMA devices of this machine |
//! | [`Context`], [`DeviceAttributes`], [`Port`], [`Gid`] | an open device, its ports and GIDs |
//! | [`Pd`], [`Mr`] | protection domains and memory regions |
//! | [`Cq`], [`Completion`] | completion queues and work completions |
//! | [`Qp`], [`SendRequest`] | queue pairs and work requests |
//! | [`AhAttributes`], [`IbvEndpoint`] | routes to peers, and connection data |
//! | [`Srq`], [`AddressHandle`], [`AsyncEvent`] | shared receive queues, UD peers, async events |
//! | `explain`, [`explain_status`] | what an errno or a status means, and what to do |
//!
//! The library is loaded on first use; without it every call fails with an error that says what to
//! install. Posting, polling and arming call the provider through the context's operations table,
//! as the inline functions of `infiniband/verbs.h` do, and allocate nothing. Requests, completions
//! and events are the types of [`work`](crate::work), shared with the software HCA.
//!
//! Objects keep what they depend on alive: a queue pair its completion queues, a memory region its
//! domain and its memory, and all of them the device. There are three levels: `sys` (structures and
//! symbols, with asserted sizes), `library` (results), and the safe rest.
//!
//! ```no_run
//! use std::time::Duration;
//! use warpwire::ibv::{Context, WrOp, QpOptions, SendRequest};
//! use warpwire::mr::{Access, HostMemory};
//!
//! let context = Context::open("mlx5_0")?;
//! let (pd, cq) = (context.create_pd()?, context.create_cq(16)?);
//! let options = QpOptions { gid_index: 3, ..QpOptions::default() };
//! let [a, b] = [(); 2].map(|()| pd.create_qp(&cq, &cq, options.clone()));
//! let (a, b) = (a?, b?);
//! a.connect(&b.endpoint()?)?;
//! b.connect(&a.endpoint()?)?;
//! let memory = HostMemory::new(8192)?;
//! let mr = pd.register(&memory, None, Access::ALL)?;
//! let request = SendRequest::new(7, WrOp::Write(mr.remote(4096)));
//! a.post_send(&[request.with(&[mr.sge(0, 4096)])]).map_err(|failed| failed.error)?;
//! assert!(cq.wait_next(Duration::from_secs(5))?.expect("it ends").is_success());
//! # Ok::<(), warpwire::Error>(())
//! ```
#![allow(unsafe_code)]

mod address;
mod cq;
mod device;
mod event;
mod explain;
mod library;
mod memory;
mod mlx5dv;
mod post;
mod qp;
mod srq;
mod staging;
mod sys;
mod wr_ids;

pub use address::{AddressHandle, AhAttributes, AsAddressHandle};
pub use cq::Cq;
pub use device::{
    Context, DeviceAttributes, Gid, GidKind, IbvDevice, LinkLayer, Port, PortState, Transport,
    devices,
};
pub use explain::{Attempt, Explanation, explain, explain_status};
pub use memory::{Mr, Pd};
pub use mlx5dv::{DirectCq, DirectQp, MappedRange};
#[doc(hidden)]
pub use mlx5dv::{recorded_cq, recorded_qp};
pub use post::{PartialPost, SendRequest};
pub use qp::{Batch, IbvEndpoint, Qp, QpOptions};
pub use srq::Srq;

pub use crate::work::{
    AsyncEvent, Completion, CompletionKind, DatagramSender, Fence, ReceiveRequest, Remote, Sge,
    WrOp,
};

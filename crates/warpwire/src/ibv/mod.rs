//! RDMA devices of the machine, through libibverbs: hardware, and the kernel's own software devices.
//!
//! | type | what it is |
//! |---|---|
//! | [`devices`], [`IbvDevice`] | which there are |
//! | [`Context`], [`DeviceAttributes`], [`Port`], [`Gid`] | an open device, what it can do, its ports and addresses |
//! | [`Pd`], [`Mr`] | protection domains and registered memory: of the host, or by dma-buf |
//! | [`Cq`], [`Completion`] | where the ends of work are told |
//! | [`Qp`], [`SendRequest`], [`AhAttributes`], [`IbvEndpoint`] | a queue pair, work to post, and where its peer is |
//! | [`Srq`], [`AddressHandle`], [`AsyncEvent`] | shared receives, peers of datagrams, news |
//! | [`explain`], [`explain_status`] | what an errno or a status means, and what to do |
//!
//! The library is loaded when the first device is asked for; without it everything here is an error that says what to
//! install. Posting, polling and arming go straight to the provider, through the context's table of operations, as the
//! inline functions of `infiniband/verbs.h` do: nothing is allocated. Requests, completions and news are those of
//! [`work`](crate::work), which the software HCA has too.
//!
//! Objects hold what they need: a queue pair its completion queues, a registration its domain and its memory, and all
//! of them the device. Three levels, as for CUDA: `sys` (structures and symbols, sizes asserted), `library` (results), the
//! rest (safe).
//!
//! ```no_run
//! use std::time::Duration;
//! use warpwire::ibv::{Context, WrOp, QpOptions, SendRequest};
//! use warpwire::mr::{Access, HostMemory};
//!
//! let context = Context::open("mlx5_0")?;
//! let (pd, cq) = (context.create_pd()?, context.create_cq(16)?);
//! let [a, b] = [(); 2].map(|()| pd.create_qp(&cq, &cq, QpOptions { gid_index: 3, ..QpOptions::default() }));
//! let (a, b) = (a?, b?);
//! a.connect(&b.endpoint()?)?;
//! b.connect(&a.endpoint()?)?;
//! let memory = HostMemory::new(8192)?;
//! let mr = pd.register(&memory, None, Access::ALL)?;
//! a.post_send(&[SendRequest::new(7, WrOp::Write(mr.remote(4096))).with(&[mr.sge(0, 4096)])]).map_err(|refused| refused.error)?;
//! assert!(cq.next(Duration::from_secs(5))?.expect("it ends").is_success());
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
pub use post::{PostError, SendRequest};
pub use qp::{Batch, IbvEndpoint, Qp, QpOptions};
pub use srq::Srq;

pub use crate::work::{
    AsyncEvent, Completion, CompletionKind, DatagramSender, Fence, ReceiveRequest, Remote, Sge,
    WrOp,
};

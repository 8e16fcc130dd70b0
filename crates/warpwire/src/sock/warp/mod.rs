//! The `warp` family: byte streams over RDMA between kernels and CPU programs, in any combination.
//!
//! # Handshake
//! Connections are established over TCP, which provides addresses, names and refusals. Each end
//! sends a [`Hello`] with its queue pair and the memory that the peer may write, and, once its
//! queue pair is connected, that it is ready. [`Handshake`] implements this. No end writes before
//! the other is ready. The TCP connection stays open and carries no data after the handshake.
//!
//! # Data
//! Each end has three objects that the peer writes by RDMA:
//!
//! | object | contents | written |
//! |---|---|---|
//! | ring | `size` bytes, a power of two; byte `n` of the stream at `n mod size` | by the sender |
//! | `received` | total bytes written into the ring; top bit: [`FIN`] | by the sender, after data |
//! | `taken` | total bytes read of the *peer's* ring; top bit: [`READ_CLOSED`] | by the receiver |
//!
//! 1. A sender may have `size` bytes in the peer's ring: `sent - taken <= size`. It posts the data
//!    (two writes if it wraps), then the word `received`, to one queue pair, so they arrive in that
//!    order.
//! 2. A receiver polls its own memory. When it has read a quarter of its ring without reporting it,
//!    it writes the peer's `taken`; a quarter of the peer's [`window`](Hello::window) if that is
//!    less.
//! 3. `shutdown` of the sending direction writes `received` with FIN; the other direction
//!    continues. `shutdown` of the receiving direction writes the peer's `taken` with READ_CLOSED:
//!    the sender gets `EPIPE` instead of waiting for room.
//! 4. `close` writes FIN, waits until it has arrived, then closes the TCP connection. The peer
//!    reads the rest, then the end of the stream; what it sends from then on is lost, and it gets
//!    `EPIPE`.
//! 5. A TCP connection that ends before FIN means that the peer died: the rest is read, then calls
//!    return `ECONNRESET`. The same holds for data on the TCP connection, a queue pair that fails
//!    before FIN, and an impossible counter: `received` beyond the ring or less than before,
//!    `taken` beyond what was sent. [`ReceiveFlow`] and [`SendFlow`] implement these rules.
//!
//! The words are 64-bit, little-endian and aligned, so each is written atomically.
//!
//! # CPU programs
//! [`WarpListener`] and [`WarpStream`] are used like those of [`std::net`]; [`Net`] is for programs
//! that open the RDMA device themselves. A blocking call polls for 50 µs, then sleeps. One thread
//! per [`Net`] polls for all sleeping callers; it sleeps for 1/64 of the idle time, 20 µs to 4 ms.

mod connection;
mod devices;
mod flow;
mod handshake;
mod listener;
mod net;
mod service;
mod stream;

pub(super) use devices::DevicesByAddress;
#[doc(hidden)]
pub use flow::{FIN, READ_CLOSED, ReceiveFlow, SendFlow};
#[doc(hidden)]
pub use handshake::{Handshake, Hello, MAX_LINE, MAX_RING, MIN_RING, RemoteAddr, VERSION};
pub use listener::{Connections, WarpListener};
pub use net::{Net, NetOptions};
pub use stream::WarpStream;

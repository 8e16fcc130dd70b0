//! The family `warp`: streams over RDMA. Ends are kernels and CPU programs, in any mixture.
//!
//! # How two ends meet
//! Over a TCP connection: addresses, names and refusals are TCP's. Each end says [`Hello`]: its queue pair, and where the
//! peer may write; then, when its queue pair is connected, that it is ready. [`Handshake`] is that conversation. Nobody
//! writes before the other is ready. The TCP connection then stays open, and nobody says anything on it any more.
//!
//! # How bytes go
//! Each end has, in memory that the peer may write:
//!
//! | | what | written by |
//! |---|---|---|
//! | ring | a power of two of bytes | the sender: byte `n` of the stream lies at `n mod size` |
//! | `received` | 64 bits: bytes ever written into the ring; the top bit ([`FIN`]): no more will come | the sender, after the bytes |
//! | `taken` | 64 bits: bytes ever read from the *peer's* ring; the top bit ([`READ_CLOSED`]): no more will be read | the receiver at the other end |
//!
//! 1. A sender may have `size` bytes in the peer's ring: `sent - taken <= size`. It writes a span (two writes if it wraps),
//!    then the word `received`, all in one queue pair, whose order is that of the arrivals.
//! 2. A receiver looks at its own memory. When it has read a quarter of the ring that the peer does not know of, it writes
//!    the peer's `taken`; a quarter of the peer's [`window`](Hello::window) if that is less.
//! 3. `shutdown` of the sending direction writes `received` once more, with the top bit. The other direction goes on. `shutdown`
//!    of the receiving direction writes the peer's `taken` with its top bit: a sender there is told `EPIPE`, and none waits for room.
//! 4. `close` ends the sending direction in the same way, waits until that has landed, then closes the TCP connection. The
//!    peer reads what is left, then the end; what it sends from then on is lost, and it is told `EPIPE`.
//! 5. A TCP connection that ends before the top bit was seen is a death: the peer reads what has come, then `ECONNRESET`.
//!    So is a byte on it, a queue pair that failed before the top bit was seen, and a counter that cannot be true:
//!    `received` beyond the ring or less than before, `taken` beyond what was sent. [`ReceiveFlow`] and [`SendFlow`] are
//!    these rules.
//!
//! Words are little-endian, and aligned, so that each lands whole.
//!
//! # In CPU programs
//! [`WarpListener`] and [`WarpStream`] are used as those of [`std::net`] are; [`Net`] is for programs that have a device of their own.
//! A call that waits looks by itself for 50 µs, then sleeps; one thread watches for all who sleep, and naps for a 64th of the
//! time for which nothing happened, at most 4 ms.

mod connection;
mod flow;
mod handshake;
mod listener;
mod net;
mod service;
mod stream;

pub use flow::{FIN, READ_CLOSED, ReceiveFlow, SendFlow};
pub use handshake::{Handshake, Hello, MAX_LINE, MAX_RING, MIN_RING, RemoteAddr, VERSION};
pub use listener::{Connections, WarpListener};
pub use net::{Net, NetOptions};
pub use stream::WarpStream;

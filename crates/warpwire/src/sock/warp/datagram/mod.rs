//! Datagrams of the family: words, names, queue pairs, and what joins them. Kernels' agent and CPU programs use the same.

mod dock;
mod office;
mod post;
mod resolver;
mod socket;
mod words;

pub(crate) use office::{Devices, Office};
pub(super) use post::Post;
pub use resolver::{Due, Found, Resolver};
pub use socket::{Datagram, DatagramStats};
pub use words::{
    Card, DATAGRAM_VERSION, HEADER_LEN, Header, LONGEST_DATAGRAM, Strange, WORDS_LEN, Words,
};

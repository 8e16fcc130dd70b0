//! The queue pair one situation at a time: two of them, a scripted host, packets passed by hand. Each test's
//! name says what must happen; the invariants are numbered in `warpwire_proto::qp`.

mod answers;
mod congestion;
mod datagram;
mod duplicates;
mod failures;
mod host;
mod later;
mod life;
mod order;
mod pair;
mod requests;
mod sending;
mod states;
mod tries;

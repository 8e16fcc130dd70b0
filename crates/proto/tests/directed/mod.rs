//! Directed tests of the queue pair: two of them, a scripted host, packets delivered by hand. Each
//! test's name says what must happen; the invariants are numbered in `warpwire_proto::qp`.

mod bad_answers;
mod congestion;
mod datagram;
mod duplicates;
mod failures;
mod host;
mod host_retry;
mod lifecycle;
mod order;
mod pair;
mod requests;
mod responses;
mod retries;
mod selective;
mod sending;
mod states;
mod timers;
mod unreliable;
mod windows;

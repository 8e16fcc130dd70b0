//! Synchronization between threads, and between processes, whose hot path needs no fence.
//!
//! Where two sides each store a word and then load the other's (Dekker's pattern), both need a full
//! fence between the two, and a fence costs as much as the rest of a short operation. `membarrier`
//! lets one side pay for both ([`asymmetric_fence`]). Two things are built on it: [`revocation`],
//! by which memory is taken back from threads that access it, and [`BiasedMutex`], a lock that
//! costs its usual owner two stores. [`random_u64`] makes numbers that other processes cannot
//! guess.

pub(crate) mod asymmetric_fence;
pub(crate) mod backoff;
mod biased;
#[cfg(test)]
mod biased_tests;
mod primitives;
mod random;
pub(crate) mod revocation;
pub(crate) mod thread;

pub(crate) use backoff::{Backoff, pause};
pub(crate) use biased::{BiasedMutex, Guard};
pub(crate) use primitives::this_thread;
pub(crate) use random::random_u64;

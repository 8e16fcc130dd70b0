//! Agreement between threads, and between processes, of which the usual side pays nothing.
//!
//! Where two sides each store a word and then look at the other's, both need a fence between the two, and a fence costs as much
//! as everything else that a short operation does. Linux lets one side pay for both ([`asymmetric_fence`]). On that stand the
//! [`revocation`], by which memory is taken back from those who reach it, and a [lock](Biased) that costs its usual owner two stores.

pub(crate) mod asymmetric_fence;
pub(crate) mod backoff;
mod biased;
#[cfg(test)]
mod biased_tests;
mod primitives;
pub(crate) mod revocation;

pub(crate) use backoff::{Backoff, pause};
pub(crate) use biased::{BiasedMutex, Guard};

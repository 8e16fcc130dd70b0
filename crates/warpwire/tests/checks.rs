//! Tests of single things: the layering of the sources, models of the lock-free parts that loom
//! runs in every order, queues written past the verbs.

mod direct_queues;
mod layering;
mod loom_registration;
mod loom_sync;

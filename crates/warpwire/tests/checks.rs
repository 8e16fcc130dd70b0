//! Tests of single things: the layering of the sources, what `doctor` says of recorded machines,
//! models of the lock-free parts that loom runs in every order, queues written past the verbs.

mod direct_queues;
mod doctor;
mod doors;
mod house;
mod races;
mod support;

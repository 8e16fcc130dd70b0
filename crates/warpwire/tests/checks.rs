//! Single tests: the layering of the sources, loom models of the lock-free parts, and queues that
//! are written directly (direct verbs); options of the software HCA; tasks of tokio.

mod direct_queues;
mod hca_options;
mod layering;
mod loom_registration;
mod loom_sync;
mod tokio;

//! `libnccl-net-warpwire.so`: NCCL's network plugin over warpwire's software HCA.
//!
//! NCCL loads it where `NCCL_NET_PLUGIN` names it; `docs/nccl.md` describes how, and the protocol.
//! This crate has NCCL's rules and the messages; [`warpwire::verbs`] does the work.
//!
//! | module | contents |
//! |---|---|
//! | `exports` | the tables of functions that NCCL looks up, versions 8 to 12 |
//! | `abi` | their layout, and that of the properties of a device |
//! | `result`, `log`, `process` | result codes, NCCL's log, fork and exit |
//! | `settings`, `devices` | environment variables; devices and their engines |
//! | `handle`, `frames`, `listen`, `connect` | connection set-up over TCP |
//! | `lanes`, `memory`, `ring`, `stripes` | queue pairs, memory, its layout, parts of messages |
//! | `comm`, `send`, `recv`, `control` | the two ends of a connection, and whether the peer lives |
//! | `gdr` | GPU memory in sends and receives |
//! | `gin` | device-initiated networking: one-sided operations of kernels |
//!
//! # Invariants
//! 1. A group of receives has a sequence number. Its descriptors lie in slot `sequence mod SLOTS`
//!    of a ring in the *sender's* memory, which the receiver fills by RDMA write: first the
//!    descriptors, then the marker, which names the sequence number.
//! 2. The receiver reuses a slot only after it has reported the group that was in it, so the sender
//!    has read it. No message leaves before its descriptor has arrived: there is nothing to buffer.
//! 3. Data goes straight into the receiver's buffer. On each queue pair that carries a part of a
//!    message, a word follows the data: RC executes in order, so a receiver that sees the word has
//!    the part.
//! 4. The receiver zeroes the words of a group before it writes the descriptors, so no word of an
//!    earlier group can be taken for a new one.
//! 5. Queues are sized so that requests fill up before send queues do.

mod abi;
mod comm;
mod connect;
mod control;
mod devices;
mod exports;
mod frames;
mod gdr;
mod gin;
mod handle;
mod lanes;
mod listen;
mod log;
mod memory;
mod process;
mod recv;
mod result;
mod ring;
mod send;
mod settings;
mod stripes;

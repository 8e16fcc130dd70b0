//! The machine as files: what `/sys`, `/proc` and `/dev` say of buses, drivers, NICs and limits.

mod pci;

pub use pci::PciAddress;

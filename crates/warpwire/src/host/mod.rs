//! The machine as files: what `/sys`, `/proc` and `/dev` say of buses, drivers, NICs and limits.
//!
//! Everything is read through a [`System`], which is either the machine that the program runs on or a
//! folder with another machine's files in it. Every reader answers with `Option` or an empty list where
//! the files are absent or make no sense: a machine is never too broken to look at.
//!
//! ```
//! use warpwire::host::System;
//! let system = System::live();
//! for device in system.pci_devices() {
//!     println!("{} driven by {:?}", device.address, device.driver);
//! }
//! ```

mod acs;
mod limits;
mod net;
mod numa;
mod nvidia;
mod pci;
mod platform;
mod rdma;
mod system;
mod verbs_library;

pub use acs::Acs;
pub use limits::{HugePages, Limit, Memlock};
pub use net::NetInterface;
pub use numa::NumaNode;
pub use nvidia::{DriverParams, DriverVersion, GpuInformation};
pub use pci::{Bar, PciAddress, PciDevice};
pub use platform::{Container, Iommu, KernelVersion, Virtualization};
pub use rdma::{Gid, RdmaDevice, RdmaPort};
pub use system::{FileAccess, System};
pub use verbs_library::VerbsLibrary;

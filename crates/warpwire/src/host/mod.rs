//! The machine as files: buses, drivers, NICs and limits, read from `/sys`, `/proc` and `/dev`.
//!
//! Everything is read through a [`System`], which is either the running machine or a directory with
//! a recording of another machine's files. Where a file is absent or malformed, readers return
//! `None` or an empty list, so that a broken machine can be examined too.
//!
//! ```
//! use warpwire::host::System;
//! let system = System::live();
//! for device in system.pci_devices() {
//!     println!("{} driven by {:?}", device.address, device.driver);
//! }
//! ```

mod acs;
mod elf_note;
mod libraries;
mod limits;
mod machine;
mod net;
mod numa;
mod nvidia;
mod nvml;
mod pci;
mod platform;
mod rdma;
mod system;
mod users;
mod verbs_library;

pub use acs::Acs;
pub use elf_note::ElfNote;
pub use libraries::{FoundLibrary, LibraryPath};
pub use limits::{HugePages, Limit, Memlock};
pub use machine::{MachineEntry, MachineFiles};
pub use net::NetInterface;
pub use numa::NumaNode;
pub use nvidia::{DriverParams, DriverVersion, GpuInformation};
pub use nvml::{GpuLinks, NvLinkPeer, gpu_links};
pub use pci::{Bar, PciAddress, PciDevice};
pub use platform::{Container, Iommu, KernelVersion, Virtualization};
pub use rdma::{Gid, RdmaDevice, RdmaPort};
pub use system::{FileAccess, System};
pub use users::{is_own_user, is_trusted_user, make_private_folder, runtime_folder};
pub use verbs_library::VerbsLibrary;

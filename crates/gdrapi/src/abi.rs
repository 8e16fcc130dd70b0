//! The types and values of gdrcopy 2.6's C interface.

use std::ffi::{c_uint, c_ulong};
use std::mem::offset_of;

/// The version that both the library and "the driver" answer: clients compare both with what they need
/// (NCCL wants 2.1, the GIN plug-in for EFA 2.5, NVSHMEM the version that it was built with).
pub const VERSION: (i32, i32) = (2, 6);

/// The unit in which pinned ranges are reported.
pub const GPU_PAGE: u64 = 1 << 16;

/// What stands behind `gdr_t`; there is nothing to be seen in it.
#[repr(C)]
pub struct Gdr {
    _opaque: [u8; 0],
}

/// `gdr_t`: a number in the shape of a pointer.
pub type Session = *mut Gdr;

/// `gdr_mh_t`: a pinned range.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Handle {
    /// The number.
    pub h: c_ulong,
}

/// `gdr_pin_flags_t`.
pub mod pin {
    /// However the platform maps device memory.
    pub const DEFAULT: u32 = 0;
    /// Through PCIe although there is a coherent link.
    pub const FORCE_PCIE: u32 = 1;
}

/// `gdr_map_flags_t`: a choice of one, not bits.
pub mod map {
    use std::ffi::c_int;
    /// Whatever the platform offers.
    pub const DEFAULT: c_int = 0;
    /// Write-combining, or nothing.
    pub const WRITE_COMBINING: c_int = 1;
    /// Cached, or nothing.
    pub const CACHED: c_int = 2;
    /// As device registers, or nothing.
    pub const DEVICE: c_int = 3;
}

/// `gdr_mapping_type_t`.
pub mod mapping {
    use std::ffi::c_uint;
    /// Not mapped.
    pub const NONE: c_uint = 0;
    /// Write-combining.
    pub const WRITE_COMBINING: c_uint = 1;
    /// Cached.
    pub const CACHED: c_uint = 2;
    /// As device registers.
    pub const DEVICE: c_uint = 3;
}

/// `gdr_attr_t`.
pub mod attribute {
    use std::ffi::c_uint;
    /// Whether memory stays when it is freed while pinned.
    pub const USE_PERSISTENT_MAPPING: c_uint = 1;
    /// Whether a pin may insist on PCIe.
    pub const SUPPORT_PIN_FLAG_FORCE_PCIE: c_uint = 2;
    /// Whether there is no gdrdrv behind the library.
    pub const USING_DMA_BUF_MMAP: c_uint = 3;
}

/// `gdr_info_v1_t`: what the symbol `gdr_get_info` fills in.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Info {
    /// The device address that the mapping begins with.
    pub va: u64,
    /// How many bytes from there are spoken of.
    pub mapped_size: u64,
    /// The unit of both.
    pub page_size: u32,
    /// No longer measured.
    pub tm_cycles: u64,
    /// No longer measured.
    pub cycles_per_ms: u32,
    /// C's one-bit fields: bit 0 "mapped", bit 1 "write-combining".
    pub bits: c_uint,
}

/// `gdr_info_v2_t`: the same, and the mapping type.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct InfoV2 {
    /// What version 1 has.
    pub first: Info,
    /// One of [`mapping`].
    pub mapping_type: c_uint,
}

/// Bit 0 of [`Info::bits`].
pub const BIT_MAPPED: c_uint = 1;
/// Bit 1 of [`Info::bits`].
pub const BIT_WRITE_COMBINING: c_uint = 2;

const _: () = {
    assert!(size_of::<c_ulong>() == 8, "a handle needs 64 bits");
    assert!(size_of::<Handle>() == 8);
    assert!(size_of::<Info>() == 40);
    assert!(size_of::<InfoV2>() == 48);
    assert!(offset_of!(Info, mapped_size) == 8);
    assert!(offset_of!(Info, page_size) == 16);
    assert!(offset_of!(Info, tm_cycles) == 24);
    assert!(offset_of!(Info, cycles_per_ms) == 32);
    assert!(offset_of!(Info, bits) == 36);
    assert!(offset_of!(InfoV2, mapping_type) == 40);
};

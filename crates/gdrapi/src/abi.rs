//! The types and values of gdrcopy 2.6's C interface.

use std::ffi::{c_uint, c_ulong};
use std::mem::offset_of;

/// The version reported for both the library and the driver: clients compare both with what they
/// need (NCCL wants 2.1, the GIN plug-in for EFA 2.5, NVSHMEM the version that it was built with).
pub const VERSION: (i32, i32) = (2, 6);

/// The page size in bytes that pinned ranges are rounded to.
pub const GPU_PAGE: u64 = 1 << 16;

/// The opaque type behind `gdr_t`.
#[repr(C)]
pub struct Gdr {
    _opaque: [u8; 0],
}

/// `gdr_t`: a session handle in the form of a pointer; never dereferenced.
pub type Session = *mut Gdr;

/// `gdr_mh_t`: a pinned range.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Handle {
    /// The handle value; 0 is never valid.
    pub h: c_ulong,
}

/// `gdr_pin_flags_t`.
pub mod pin {
    /// The platform's default mapping of device memory.
    pub const DEFAULT: u32 = 0;
    /// Through PCIe even if there is a coherent link.
    pub const FORCE_PCIE: u32 = 1;
}

/// `gdr_map_flags_t`: one choice, not a bit mask.
pub mod map {
    use std::ffi::c_int;
    /// The mapping type of the platform.
    pub const DEFAULT: c_int = 0;
    /// Require write-combining.
    pub const WRITE_COMBINING: c_int = 1;
    /// Require cached.
    pub const CACHED: c_int = 2;
    /// Require a device mapping, as for registers.
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
    /// Device mapping, as for registers.
    pub const DEVICE: c_uint = 3;
}

/// `gdr_attr_t`.
pub mod attribute {
    use std::ffi::c_uint;
    /// Whether memory that is freed while pinned stays mapped.
    pub const USE_PERSISTENT_MAPPING: c_uint = 1;
    /// Whether a pin may require PCIe.
    pub const SUPPORT_PIN_FLAG_FORCE_PCIE: c_uint = 2;
    /// Whether the library works without gdrdrv.
    pub const USING_DMA_BUF_MMAP: c_uint = 3;
}

/// `gdr_info_v1_t`: the structure that the symbol `gdr_get_info` fills in.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Info {
    /// The device address at which the mapping begins, page-aligned.
    pub va: u64,
    /// The length of the mapping in bytes, a multiple of the page size.
    pub mapped_size: u64,
    /// The page size in bytes.
    pub page_size: u32,
    /// Unused, 0.
    pub tm_cycles: u64,
    /// Unused, 0.
    pub cycles_per_ms: u32,
    /// C's one-bit fields: bit 0 is `mapped`, bit 1 is `wc_mapping`.
    pub bits: c_uint,
}

/// `gdr_info_v2_t`: version 1 and the mapping type.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct InfoV2 {
    /// The fields of version 1.
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

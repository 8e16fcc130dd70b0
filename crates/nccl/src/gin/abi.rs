//! NCCL's interface for device-initiated networking: the table of functions of GIN version 11
//! (NCCL 2.28.7 to 2.29), and that of RMA version 14 (NCCL 2.30 and later), on which NCCL builds
//! GIN itself.

use std::ffi::{c_char, c_int, c_void};
use std::mem::offset_of;

use super::coll::Handle;
use super::context::RmaContext;
use crate::abi::{Code, HandleBytes, Logger, Opaque, Out, PropertiesV11, PropertiesV12};
use crate::listen::Listener;

/// `NCCL_NET_DEVICE_GIN_PROXY`: a thread of NCCL's calls the plugin for the kernels.
pub(crate) const GIN_PROXY: c_int = 2;
/// `NCCL_NET_SIGNAL_OP_INC` and `NCCL_NET_SIGNAL_OP_ADD`.
pub(crate) const SIGNAL_INC: u32 = 1;
pub(crate) const SIGNAL_ADD: u32 = 2;

pub(crate) type Init = extern "C" fn(Out<'_, c_void>, u64, Option<Logger>) -> Code;
pub(crate) type Listen =
    extern "C" fn(Opaque, c_int, Option<&mut HandleBytes>, Out<'_, Listener>) -> Code;
pub(crate) type Connect = extern "C" fn(
    Opaque,
    *const *const HandleBytes,
    c_int,
    c_int,
    Option<&Listener>,
    Out<'_, Handle>,
) -> Code;
/// A handle that NCCL only passes on: no pointer.
pub(crate) type Id = *const c_void;
pub(crate) type Test = extern "C" fn(Option<&Handle>, Id, Option<&mut c_int>) -> Code;
pub(crate) type DeregMrSym = extern "C" fn(Option<&Handle>, Id) -> Code;
pub(crate) type CloseColl = extern "C" fn(Option<Box<Handle>>) -> Code;
pub(crate) type CloseListen = extern "C" fn(Option<Box<Listener>>) -> Code;
pub(crate) type Finalize = extern "C" fn(Opaque) -> Code;

/// `ncclGin_v11_t`.
#[repr(C)]
pub(crate) struct GinV11 {
    pub name: *const c_char,
    pub init: Init,
    pub devices: crate::abi::Devices,
    pub get_properties: extern "C" fn(c_int, Option<&mut PropertiesV11>) -> Code,
    pub listen: Listen,
    pub connect: Connect,
    /// Absent: only for devices that a kernel drives.
    pub create_context: Opaque,
    pub reg_mr_sym: extern "C" fn(
        Option<&Handle>,
        *mut u8,
        usize,
        c_int,
        u64,
        Option<&mut Id>,
        Option<&mut Id>,
    ) -> Code,
    pub reg_mr_sym_dma_buf: extern "C" fn(
        Option<&Handle>,
        *mut u8,
        usize,
        c_int,
        u64,
        c_int,
        u64,
        Option<&mut Id>,
        Option<&mut Id>,
    ) -> Code,
    pub dereg_mr_sym: DeregMrSym,
    /// Absent, as `create_context` is.
    pub destroy_context: Opaque,
    pub close_coll: CloseColl,
    pub close_listen: CloseListen,
    pub iput: extern "C" fn(Option<&Handle>, u64, Id, usize, u64, Id, u32, Option<&mut Id>) -> Code,
    pub iput_signal: extern "C" fn(
        Option<&Handle>,
        u64,
        Id,
        usize,
        u64,
        Id,
        u32,
        u64,
        Id,
        u64,
        u32,
        Option<&mut Id>,
    ) -> Code,
    pub test: Test,
    pub gin_progress: extern "C" fn(Option<&Handle>) -> Code,
    /// With a communicator where device types have a context.
    pub query_last_error: extern "C" fn(Option<&Handle>, Option<&mut u8>) -> Code,
    pub finalize: Finalize,
}

/// `ncclRmaConfig_v14_t`.
#[repr(C)]
pub(crate) struct RmaConfigV14 {
    pub contexts: c_int,
    pub traffic_class: c_int,
    pub rank_stride: c_int,
}

/// `ncclRma_v14_t`.
#[repr(C)]
pub(crate) struct RmaV14 {
    pub name: *const c_char,
    pub init: Init,
    pub devices: crate::abi::Devices,
    pub get_properties: extern "C" fn(c_int, Option<&mut PropertiesV12>) -> Code,
    pub listen: Listen,
    pub connect: Connect,
    pub create_context:
        extern "C" fn(Option<&Handle>, Option<&RmaConfigV14>, Out<'_, RmaContext>) -> Code,
    pub reg_mr_sym:
        extern "C" fn(Option<&Handle>, *mut u8, usize, c_int, u64, Option<&mut Id>) -> Code,
    pub reg_mr_sym_dma_buf: extern "C" fn(
        Option<&Handle>,
        *mut u8,
        usize,
        c_int,
        u64,
        c_int,
        u64,
        Option<&mut Id>,
    ) -> Code,
    pub dereg_mr_sym: DeregMrSym,
    pub destroy_context: extern "C" fn(Option<Box<RmaContext>>) -> Code,
    pub close_coll: CloseColl,
    pub close_listen: CloseListen,
    pub iput: extern "C" fn(
        Option<&RmaContext>,
        c_int,
        u64,
        Id,
        usize,
        u64,
        Id,
        u32,
        Option<&mut Id>,
    ) -> Code,
    pub iput_signal: extern "C" fn(
        Option<&RmaContext>,
        c_int,
        u64,
        Id,
        usize,
        u64,
        Id,
        u32,
        u64,
        Id,
        u64,
        u32,
        bool,
        Option<&mut Id>,
    ) -> Code,
    pub iget: extern "C" fn(
        Option<&RmaContext>,
        c_int,
        u64,
        Id,
        usize,
        u64,
        Id,
        u32,
        Option<&mut Id>,
    ) -> Code,
    pub iflush: extern "C" fn(Option<&RmaContext>, c_int, Id, u32, Option<&mut Id>) -> Code,
    pub test: Test,
    pub rma_progress: extern "C" fn(Option<&RmaContext>) -> Code,
    pub query_last_error: extern "C" fn(Option<&RmaContext>, Option<&mut u8>) -> Code,
    pub finalize: Finalize,
}

// As the headers of NCCL 2.28.9 and 2.30.7 have them, compiled for x86-64.
const _: () = {
    assert!(size_of::<GinV11>() == 152);
    assert!(offset_of!(GinV11, connect) == 40 && offset_of!(GinV11, reg_mr_sym) == 56);
    assert!(offset_of!(GinV11, iput) == 104 && offset_of!(GinV11, finalize) == 144);
    assert!(size_of::<RmaConfigV14>() == 12);
    assert!(size_of::<RmaV14>() == 168);
    assert!(offset_of!(RmaV14, create_context) == 48 && offset_of!(RmaV14, iput) == 104);
    assert!(offset_of!(RmaV14, test) == 136 && offset_of!(RmaV14, finalize) == 160);
};

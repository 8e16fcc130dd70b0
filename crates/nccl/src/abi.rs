//! NCCL's network interface, versions 8 to 12: the tables of functions and the properties of a
//! device. NCCL looks for the newest table that it knows.

use std::ffi::{c_char, c_int, c_ulong, c_void};
use std::mem::offset_of;

use crate::comm::{Handle, Request};
use crate::handle::HANDLE_LEN;
use crate::listen::Listener;
use crate::memory::MemoryHandle;

/// NCCL's log function: level, subsystems, file, line, format, values.
pub(crate) type Logger =
    unsafe extern "C" fn(c_int, c_ulong, *const c_char, c_int, *const c_char, ...);

/// `ncclResult_t`.
pub(crate) type Code = c_int;
/// Memory of a connection handle.
pub(crate) type HandleBytes = [u8; HANDLE_LEN];
/// A pointer that is passed through.
pub(crate) type Opaque = *mut c_void;
/// Where a call stores a pointer.
pub(crate) type Out<'a, T> = Option<&'a mut *const T>;

/// `NCCL_PTR_HOST` and `NCCL_PTR_CUDA`.
pub(crate) const PTR_HOST: c_int = 1;
pub(crate) const PTR_CUDA: c_int = 2;
/// Receives of a group, at most.
pub(crate) const MAX_RECVS: usize = 8;

/// `ncclNetProperties_v8_t`.
#[repr(C)]
pub(crate) struct PropertiesV8 {
    pub name: *const c_char,
    pub pci_path: *const c_char,
    pub guid: u64,
    pub ptr_support: c_int,
    pub reg_is_global: c_int,
    pub speed: c_int,
    pub port: c_int,
    pub latency: f32,
    pub max_comms: c_int,
    pub max_recvs: c_int,
    pub net_device_type: c_int,
    pub net_device_version: c_int,
}

/// Virtual devices that a device consists of: `N` at most.
#[repr(C)]
pub(crate) struct VirtualDevices<const N: usize> {
    pub count: c_int,
    pub devices: [c_int; N],
}

/// What version 9 and later have in common; `N` is the number of virtual devices.
#[repr(C)]
pub(crate) struct PropertiesV9<const N: usize> {
    pub name: *const c_char,
    pub pci_path: *const c_char,
    pub guid: u64,
    pub ptr_support: c_int,
    pub reg_is_global: c_int,
    pub force_flush: c_int,
    pub speed: c_int,
    pub port: c_int,
    pub latency: f32,
    pub max_comms: c_int,
    pub max_recvs: c_int,
    pub net_device_type: c_int,
    pub net_device_version: c_int,
    pub virtual_devices: VirtualDevices<N>,
    pub max_p2p_bytes: usize,
    pub max_coll_bytes: usize,
}

/// `ncclNetProperties_v11_t`.
#[repr(C)]
pub(crate) struct PropertiesV11 {
    pub v9: PropertiesV9<4>,
    pub max_multi_request_size: c_int,
}

/// `ncclNetProperties_v12_t`.
#[repr(C)]
pub(crate) struct PropertiesV12 {
    pub v9: PropertiesV9<8>,
    pub max_multi_request_size: c_int,
    pub rail: i16,
    pub plane: i16,
}

pub(crate) type Devices = extern "C" fn(Option<&mut c_int>) -> Code;
pub(crate) type Accept = extern "C" fn(Option<&Listener>, Out<'_, Handle>, Opaque) -> Code;
pub(crate) type RegMr =
    extern "C" fn(Option<&Handle>, *mut u8, usize, c_int, Out<'_, MemoryHandle>) -> Code;
pub(crate) type RegMrDmaBuf = extern "C" fn(
    Option<&Handle>,
    *mut u8,
    usize,
    c_int,
    u64,
    c_int,
    Out<'_, MemoryHandle>,
) -> Code;
pub(crate) type DeregMr = extern "C" fn(Opaque, Option<Box<MemoryHandle>>) -> Code;
pub(crate) type IFlush = extern "C" fn(
    Option<&Handle>,
    c_int,
    *const Opaque,
    *const c_int,
    *const Option<&MemoryHandle>,
    Out<'_, Request>,
) -> Code;
pub(crate) type Test = extern "C" fn(Option<&Request>, Option<&mut c_int>, *mut c_int) -> Code;
pub(crate) type CloseComm = extern "C" fn(Option<Box<Handle>>) -> Code;
pub(crate) type CloseListen = extern "C" fn(Option<Box<Listener>>) -> Code;

/// The functions from `accept` to `deregMr`, which all versions have.
#[repr(C)]
pub(crate) struct Memory {
    pub accept: Accept,
    pub reg_mr: RegMr,
    pub reg_mr_dma_buf: RegMrDmaBuf,
    pub dereg_mr: DeregMr,
}

/// The functions from `iflush` to `irecvConsumed`, which all versions have.
#[repr(C)]
pub(crate) struct Completion {
    pub iflush: IFlush,
    pub test: Test,
    pub close_send: CloseComm,
    pub close_recv: CloseComm,
    pub close_listen: CloseListen,
    /// Only for devices that a kernel drives.
    pub get_device_mr: Opaque,
    pub irecv_consumed: Opaque,
}

/// The types of a version's functions, where versions differ.
pub(crate) trait Version {
    type Init;
    type Properties;
    type Listen;
    type Connect;
    type ISend;
    type IRecv;
    /// What follows `irecvConsumed`.
    type Rest;
}

/// `ncclNet_v8_t` to `ncclNet_v12_t`.
#[repr(C)]
pub(crate) struct Net<V: Version> {
    pub name: *const c_char,
    pub init: V::Init,
    pub devices: Devices,
    pub get_properties: extern "C" fn(c_int, Option<&mut V::Properties>) -> Code,
    pub listen: V::Listen,
    pub connect: V::Connect,
    pub memory: Memory,
    pub isend: V::ISend,
    pub irecv: V::IRecv,
    pub completion: Completion,
    pub rest: V::Rest,
}

/// What follows in versions 9 and 10: `makeVDevice`, which is absent.
pub(crate) type MakeVDevice = Opaque;

/// What follows in version 11 and later.
#[repr(C)]
pub(crate) struct Context {
    /// Absent: devices are not merged.
    pub make_v_device: MakeVDevice,
    pub finalize: extern "C" fn(Opaque) -> Code,
    /// Absent: nothing is tuned by it.
    pub set_net_attr: Opaque,
}

type Log = Option<Logger>;
type ListenPlain = extern "C" fn(c_int, Option<&mut HandleBytes>, Out<'_, Listener>) -> Code;
type ConnectPlain = extern "C" fn(c_int, Option<&HandleBytes>, Out<'_, Handle>, Opaque) -> Code;
type ISendV<Size> = extern "C" fn(
    Option<&Handle>,
    *mut u8,
    Size,
    c_int,
    Option<&MemoryHandle>,
    Out<'_, Request>,
) -> Code;
type IRecvV<Size> = extern "C" fn(
    Option<&Handle>,
    c_int,
    *const *mut u8,
    *const Size,
    *const c_int,
    *const Option<&MemoryHandle>,
    Out<'_, Request>,
) -> Code;
type ISendProfiled = extern "C" fn(
    Option<&Handle>,
    *mut u8,
    usize,
    c_int,
    Option<&MemoryHandle>,
    Opaque,
    Out<'_, Request>,
) -> Code;
type IRecvProfiled = extern "C" fn(
    Option<&Handle>,
    c_int,
    *const *mut u8,
    *const usize,
    *const c_int,
    *const Option<&MemoryHandle>,
    Opaque,
    Out<'_, Request>,
) -> Code;
type InitContext = extern "C" fn(Out<'_, c_void>, u64, Opaque, Log, Opaque) -> Code;
type ListenContext =
    extern "C" fn(Opaque, c_int, Option<&mut HandleBytes>, Out<'_, Listener>) -> Code;
type ConnectContext =
    extern "C" fn(Opaque, c_int, Option<&HandleBytes>, Out<'_, Handle>, Opaque) -> Code;

/// Sizes are `int`.
pub(crate) struct V8;
impl Version for V8 {
    type Init = extern "C" fn(Log) -> Code;
    type Properties = PropertiesV8;
    type Listen = ListenPlain;
    type Connect = ConnectPlain;
    type ISend = ISendV<c_int>;
    type IRecv = IRecvV<c_int>;
    type Rest = ();
}

/// Sizes are `size_t`; more properties.
pub(crate) struct V9;
impl Version for V9 {
    type Init = extern "C" fn(Log) -> Code;
    type Properties = PropertiesV9<4>;
    type Listen = ListenPlain;
    type Connect = ConnectPlain;
    type ISend = ISendV<usize>;
    type IRecv = IRecvV<usize>;
    type Rest = MakeVDevice;
}

/// A profiler, and a configuration of `connect`.
pub(crate) struct V10;
impl Version for V10 {
    type Init = extern "C" fn(Log, Opaque) -> Code;
    type Properties = PropertiesV9<4>;
    type Listen = ListenPlain;
    type Connect =
        extern "C" fn(c_int, Opaque, Option<&HandleBytes>, Out<'_, Handle>, Opaque) -> Code;
    type ISend = ISendProfiled;
    type IRecv = IRecvProfiled;
    type Rest = MakeVDevice;
}

/// A context per communicator.
pub(crate) struct V11;
impl Version for V11 {
    type Init = InitContext;
    type Properties = PropertiesV11;
    type Listen = ListenContext;
    type Connect = ConnectContext;
    type ISend = ISendProfiled;
    type IRecv = IRecvProfiled;
    type Rest = Context;
}

/// Eight virtual devices, rails and planes.
pub(crate) struct V12;
impl Version for V12 {
    type Init = InitContext;
    type Properties = PropertiesV12;
    type Listen = ListenContext;
    type Connect = ConnectContext;
    type ISend = ISendProfiled;
    type IRecv = IRecvProfiled;
    type Rest = Context;
}

// As the headers of NCCL 2.19 to 2.32 have them, compiled for x86-64.
const _: () = {
    assert!(size_of::<PropertiesV8>() == 64);
    assert!(size_of::<PropertiesV9<4>>() == 104);
    assert!(size_of::<PropertiesV11>() == 112);
    assert!(size_of::<PropertiesV12>() == 128);
    assert!(offset_of!(PropertiesV8, speed) == 32 && offset_of!(PropertiesV8, latency) == 40);
    assert!(offset_of!(PropertiesV8, net_device_version) == 56);
    assert!(offset_of!(PropertiesV9<4>, force_flush) == 32);
    assert!(offset_of!(PropertiesV9<4>, speed) == 36 && offset_of!(PropertiesV9<4>, port) == 40);
    assert!(offset_of!(PropertiesV9<4>, latency) == 44);
    assert!(offset_of!(PropertiesV9<4>, max_comms) == 48);
    assert!(offset_of!(PropertiesV9<4>, net_device_type) == 56);
    assert!(offset_of!(PropertiesV9<4>, virtual_devices) == 64);
    assert!(offset_of!(PropertiesV9<4>, max_p2p_bytes) == 88);
    assert!(offset_of!(PropertiesV9<4>, max_coll_bytes) == 96);
    assert!(offset_of!(PropertiesV11, max_multi_request_size) == 104);
    assert!(offset_of!(PropertiesV9<8>, max_p2p_bytes) == 104);
    assert!(offset_of!(PropertiesV12, max_multi_request_size) == 120);
    assert!(offset_of!(PropertiesV12, rail) == 124 && offset_of!(PropertiesV12, plane) == 126);
    assert!(size_of::<Net<V8>>() == 152);
    assert!(size_of::<Net<V9>>() == 160 && size_of::<Net<V10>>() == 160);
    assert!(size_of::<Net<V11>>() == 176 && size_of::<Net<V12>>() == 176);
    assert!(offset_of!(Net<V8>, listen) == 32 && offset_of!(Net<V8>, memory) == 48);
    assert!(offset_of!(Net<V8>, isend) == 80 && offset_of!(Net<V8>, completion) == 96);
    assert!(offset_of!(Net<V12>, isend) == 80 && offset_of!(Net<V12>, rest) == 152);
};

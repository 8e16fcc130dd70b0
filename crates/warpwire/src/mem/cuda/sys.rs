//! The part of the CUDA driver API that is used here: types, constants, and the symbols of
//! `libcuda.so.1`, looked up when the library is loaded. A symbol that an older driver lacks is
//! `None`.

use std::ffi::{c_char, c_int, c_uint, c_void};

use libloading::Library;

pub(super) type CuResult = c_int;
pub(super) type Address = u64;

/// An opaque object of the driver. Its owner is documented where it is created.
macro_rules! handles {
    ($($name:ident),*) => {$(
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(transparent)]
        pub(super) struct $name(pub(super) *mut c_void);

        impl $name {
            pub(super) const NULL: Self = Self(std::ptr::null_mut());
        }

        // SAFETY: the driver's objects may be used from any thread.
        unsafe impl Send for $name {}
        // SAFETY: the driver synchronizes internally.
        unsafe impl Sync for $name {}
    )*};
}

handles!(
    Context,
    StreamHandle,
    EventHandle,
    GraphHandle,
    GraphExec,
    ModuleHandle,
    Function,
    PoolHandle
);

pub(super) const SUCCESS: CuResult = 0;
pub(super) const INVALID_VALUE: CuResult = 1;
pub(super) const OUT_OF_MEMORY: CuResult = 2;
pub(super) const NO_DEVICE: CuResult = 100;
pub(super) const INVALID_CONTEXT: CuResult = 201;
pub(super) const NOT_READY: CuResult = 600;
pub(super) const NOT_PERMITTED: CuResult = 800;
pub(super) const NOT_SUPPORTED: CuResult = 801;
/// Sticky errors: after one of these the context fails every call.
pub(super) const STICKY_ERRORS: [CuResult; 12] =
    [214, 220, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719];

pub(super) mod attribute {
    pub(crate) const MULTIPROCESSORS: i32 = 16;
    pub(crate) const PCI_BUS_ID: i32 = 33;
    pub(crate) const PCI_DEVICE_ID: i32 = 34;
    pub(crate) const PCI_DOMAIN_ID: i32 = 50;
    pub(crate) const CAN_FLUSH_REMOTE_WRITES: i32 = 98;
    pub(crate) const VMM_SUPPORTED: i32 = 102;
    pub(crate) const POSIX_FD_SUPPORTED: i32 = 103;
    pub(crate) const GPUDIRECT_RDMA_WITH_VMM: i32 = 110;
    pub(crate) const POOLS_SUPPORTED: i32 = 115;
    pub(crate) const GPUDIRECT_RDMA: i32 = 116;
    pub(crate) const GPUDIRECT_FLUSH_OPTIONS: i32 = 117;
    pub(crate) const GPUDIRECT_WRITES_ORDERING: i32 = 118;
    pub(crate) const POOL_HANDLE_TYPES: i32 = 119;
    pub(crate) const STREAM_MEM_OPS_64: i32 = 122;
    pub(crate) const STREAM_WAIT_NOR: i32 = 123;
    pub(crate) const DMA_BUF_SUPPORTED: i32 = 124;
}

pub(super) mod pointer {
    pub(crate) const MEMORY_TYPE: i32 = 2;
    pub(crate) const BUFFER_ID: i32 = 7;
    pub(crate) const IS_MANAGED: i32 = 8;
    pub(crate) const DEVICE_ORDINAL: i32 = 9;
    pub(crate) const IS_LEGACY_IPC_CAPABLE: i32 = 10;
    pub(crate) const RDMA_CAPABLE: i32 = 15;
    pub(crate) const POOL: i32 = 17;
    pub(crate) const MAPPING_BASE: i32 = 19;
    pub(crate) const MEMORY_TYPE_HOST: u32 = 1;
    pub(crate) const MEMORY_TYPE_DEVICE: u32 = 2;
}

pub(super) const STREAM_NON_BLOCKING: c_uint = 1;
pub(super) const EVENT_EXTERNAL: c_uint = 1;
pub(super) const EVENT_DISABLE_TIMING: c_uint = 2;
pub(super) const CAPTURE_RELAXED: c_int = 2;
pub(super) const HOST_PORTABLE_AND_MAPPED: c_uint = 3;
pub(super) const HOST_IO: c_uint = 4;
pub(super) const HANDLE_POSIX_FD: c_uint = 1;
pub(super) const RANGE_DMA_BUF: c_int = 1;
pub(super) const RANGE_PCIE: u64 = 1;
pub(super) const IPC_LAZY_PEER_ACCESS: c_uint = 1;
pub(super) const FUNCTION_REGISTERS: c_int = 4;
pub(super) const JIT_ERROR_LOG: c_int = 5;
pub(super) const JIT_ERROR_LOG_SIZE: c_int = 6;
const ALLOCATION_PINNED: c_uint = 1;
const LOCATION_DEVICE: c_uint = 1;
const ACCESS_READ_WRITE: c_uint = 3;

#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct Location {
    kind: c_uint,
    id: c_int,
}

impl Location {
    fn device(ordinal: u32) -> Self {
        Self { kind: LOCATION_DEVICE, id: ordinal as c_int }
    }
}

#[repr(C)]
pub(super) struct AllocationProp {
    kind: c_uint,
    handle_types: c_uint,
    location: Location,
    windows_only: *mut c_void,
    compression: u8,
    gpudirect_rdma: u8,
    usage: u16,
    reserved: [u8; 4],
}

impl AllocationProp {
    pub(super) fn new(ordinal: u32, handle_types: c_uint, gpudirect_rdma: bool) -> Self {
        Self {
            kind: ALLOCATION_PINNED,
            handle_types,
            location: Location::device(ordinal),
            windows_only: std::ptr::null_mut(),
            compression: 0,
            gpudirect_rdma: u8::from(gpudirect_rdma),
            usage: 0,
            reserved: [0; 4],
        }
    }
}

#[repr(C)]
pub(super) struct AccessDesc {
    location: Location,
    flags: c_uint,
}

impl AccessDesc {
    pub(super) fn read_write(ordinal: u32) -> Self {
        Self { location: Location::device(ordinal), flags: ACCESS_READ_WRITE }
    }
}

#[repr(C)]
pub(super) struct PoolProps {
    kind: c_uint,
    handle_types: c_uint,
    location: Location,
    windows_only: *mut c_void,
    max_size: usize,
    reserved: [u8; 56],
}

impl PoolProps {
    pub(super) fn new(ordinal: u32, handle_types: c_uint) -> Self {
        Self {
            kind: ALLOCATION_PINNED,
            handle_types,
            location: Location::device(ordinal),
            windows_only: std::ptr::null_mut(),
            max_size: 0,
            reserved: [0; 56],
        }
    }
}

/// 64 opaque bytes: an IPC memory handle, or a pool pointer's export data.
#[derive(Clone, Copy)]
#[repr(C, align(8))]
pub(super) struct Opaque64(pub(super) [u8; 64]);

/// One operation of `cuStreamBatchMemOp`: the wait and write forms, and the barrier in the same
/// layout.
#[derive(Clone, Copy, Default)]
#[repr(C)]
pub(super) struct BatchOp {
    pub(super) operation: c_uint,
    /// The barrier's type; padding in the other forms.
    pub(super) barrier: c_uint,
    pub(super) address: Address,
    pub(super) value: u64,
    pub(super) flags: c_uint,
    pub(super) padding: c_uint,
    pub(super) alias: Address,
    pub(super) reserved: u64,
}

pub(super) mod batch {
    pub(crate) const WAIT_32: u32 = 1;
    pub(crate) const WRITE_32: u32 = 2;
    pub(crate) const FLUSH: u32 = 3;
    pub(crate) const WAIT_64: u32 = 4;
    pub(crate) const WRITE_64: u32 = 5;
    pub(crate) const BARRIER: u32 = 6;
    pub(crate) const GEQ: u32 = 0;
    pub(crate) const EQ: u32 = 1;
    pub(crate) const AND: u32 = 2;
    pub(crate) const NOR: u32 = 3;
}

pub(super) type HostFn = unsafe extern "C" fn(*mut c_void);

/// Declares the function table: field, symbol and parameters of each function.
macro_rules! functions {
    ($($field:ident = $symbol:literal ($($parameter:ty),*);)*) => {
        pub(super) struct Functions {
            $(pub(super) $field: Option<unsafe extern "C" fn($($parameter),*) -> CuResult>,)*
        }

        impl Functions {
            pub(super) fn load(library: &Library) -> Self {
                // SAFETY: each signature is what cuda.h declares for that symbol.
                unsafe {
                    Self { $($field: library.get($symbol.as_bytes()).ok().map(|found| *found),)* }
                }
            }
        }

        /// The symbol names, for messages.
        #[allow(non_upper_case_globals, dead_code)]
        pub(super) mod symbol {
            $(pub(crate) const $field: &str = $symbol;)*
        }
    };
}

functions! {
    init = "cuInit"(c_uint);
    driver_version = "cuDriverGetVersion"(*mut c_int);
    error_name = "cuGetErrorName"(CuResult, *mut *const c_char);
    error_string = "cuGetErrorString"(CuResult, *mut *const c_char);
    device_count = "cuDeviceGetCount"(*mut c_int);
    device_get = "cuDeviceGet"(*mut c_int, c_int);
    device_name = "cuDeviceGetName"(*mut c_char, c_int, c_int);
    device_uuid = "cuDeviceGetUuid_v2"(*mut [u8; 16], c_int);
    device_attribute = "cuDeviceGetAttribute"(*mut c_int, c_int, c_int);
    device_total_memory = "cuDeviceTotalMem_v2"(*mut usize, c_int);
    primary_context_retain = "cuDevicePrimaryCtxRetain"(*mut Context, c_int);
    primary_context_release = "cuDevicePrimaryCtxRelease_v2"(c_int);
    context_current = "cuCtxGetCurrent"(*mut Context);
    context_push = "cuCtxPushCurrent_v2"(Context);
    context_pop = "cuCtxPopCurrent_v2"(*mut Context);
    memory_info = "cuMemGetInfo_v2"(*mut usize, *mut usize);
    memory_alloc = "cuMemAlloc_v2"(*mut Address, usize);
    memory_free = "cuMemFree_v2"(Address);
    host_alloc = "cuMemHostAlloc"(*mut *mut c_void, usize, c_uint);
    host_free = "cuMemFreeHost"(*mut c_void);
    host_register = "cuMemHostRegister_v2"(*mut c_void, usize, c_uint);
    host_unregister = "cuMemHostUnregister"(*mut c_void);
    host_device_address = "cuMemHostGetDevicePointer_v2"(*mut Address, *mut c_void, c_uint);
    copy_to_device = "cuMemcpyHtoD_v2"(Address, *const c_void, usize);
    copy_to_host = "cuMemcpyDtoH_v2"(*mut c_void, Address, usize);
    copy_async = "cuMemcpyAsync"(Address, Address, usize, StreamHandle);
    fill_u8_async = "cuMemsetD8Async"(Address, u8, usize, StreamHandle);
    fill_u16_async = "cuMemsetD16Async"(Address, u16, usize, StreamHandle);
    fill_u32_async = "cuMemsetD32Async"(Address, c_uint, usize, StreamHandle);
    address_range = "cuMemGetAddressRange_v2"(*mut Address, *mut usize, Address);
    pointer_attribute = "cuPointerGetAttribute"(*mut c_void, c_int, Address);
    range_handle = "cuMemGetHandleForAddressRange"(*mut c_int, Address, usize, c_int, u64);
    vmm_granularity = "cuMemGetAllocationGranularity"(*mut usize, *const AllocationProp, c_int);
    vmm_create = "cuMemCreate"(*mut u64, usize, *const AllocationProp, u64);
    vmm_release = "cuMemRelease"(u64);
    vmm_retain = "cuMemRetainAllocationHandle"(*mut u64, Address);
    vmm_reserve = "cuMemAddressReserve"(*mut Address, usize, usize, Address, u64);
    vmm_unreserve = "cuMemAddressFree"(Address, usize);
    vmm_map = "cuMemMap"(Address, usize, usize, u64, u64);
    vmm_unmap = "cuMemUnmap"(Address, usize);
    vmm_set_access = "cuMemSetAccess"(Address, usize, *const AccessDesc, usize);
    vmm_export = "cuMemExportToShareableHandle"(*mut c_int, u64, c_uint, u64);
    vmm_import = "cuMemImportFromShareableHandle"(*mut u64, *mut c_void, c_uint);
    pool_create = "cuMemPoolCreate"(*mut PoolHandle, *const PoolProps);
    pool_destroy = "cuMemPoolDestroy"(PoolHandle);
    pool_alloc = "cuMemAllocFromPoolAsync"(*mut Address, usize, PoolHandle, StreamHandle);
    pool_free = "cuMemFreeAsync"(Address, StreamHandle);
    pool_set_access = "cuMemPoolSetAccess"(PoolHandle, *const AccessDesc, usize);
    pool_export = "cuMemPoolExportToShareableHandle"(*mut c_int, PoolHandle, c_uint, u64);
    pool_import = "cuMemPoolImportFromShareableHandle"(*mut PoolHandle, *mut c_void, c_uint, u64);
    pool_export_address = "cuMemPoolExportPointer"(*mut Opaque64, Address);
    pool_import_address = "cuMemPoolImportPointer"(*mut Address, PoolHandle, *mut Opaque64);
    ipc_export = "cuIpcGetMemHandle"(*mut Opaque64, Address);
    ipc_open = "cuIpcOpenMemHandle_v2"(*mut Address, Opaque64, c_uint);
    ipc_close = "cuIpcCloseMemHandle"(Address);
    stream_create = "cuStreamCreate"(*mut StreamHandle, c_uint);
    stream_destroy = "cuStreamDestroy_v2"(StreamHandle);
    stream_query = "cuStreamQuery"(StreamHandle);
    stream_synchronize = "cuStreamSynchronize"(StreamHandle);
    stream_wait_event = "cuStreamWaitEvent"(StreamHandle, EventHandle, c_uint);
    stream_batch = "cuStreamBatchMemOp_v2"(StreamHandle, c_uint, *mut BatchOp, c_uint);
    stream_call_host = "cuLaunchHostFunc"(StreamHandle, HostFn, *mut c_void);
    exchange_capture_mode = "cuThreadExchangeStreamCaptureMode"(*mut c_int);
    stream_is_capturing = "cuStreamIsCapturing"(StreamHandle, *mut c_int);
    stream_begin_capture = "cuStreamBeginCapture_v2"(StreamHandle, c_int);
    stream_end_capture = "cuStreamEndCapture"(StreamHandle, *mut GraphHandle);
    event_create = "cuEventCreate"(*mut EventHandle, c_uint);
    event_destroy = "cuEventDestroy_v2"(EventHandle);
    event_record = "cuEventRecordWithFlags"(EventHandle, StreamHandle, c_uint);
    event_query = "cuEventQuery"(EventHandle);
    event_elapsed = "cuEventElapsedTime"(*mut f32, EventHandle, EventHandle);
    graph_instantiate = "cuGraphInstantiateWithFlags"(*mut GraphExec, GraphHandle, u64);
    graph_destroy = "cuGraphDestroy"(GraphHandle);
    graph_launch = "cuGraphLaunch"(GraphExec, StreamHandle);
    graph_exec_destroy = "cuGraphExecDestroy"(GraphExec);
    module_load = "cuModuleLoadDataEx"(
        *mut ModuleHandle, *const c_void, c_uint, *mut c_int, *mut *mut c_void
    );
    module_unload = "cuModuleUnload"(ModuleHandle);
    module_function = "cuModuleGetFunction"(*mut Function, ModuleHandle, *const c_char);
    module_global = "cuModuleGetGlobal_v2"(*mut Address, *mut usize, ModuleHandle, *const c_char);
    function_load = "cuFuncLoad"(Function);
    function_attribute = "cuFuncGetAttribute"(*mut c_int, c_int, Function);
    function_parameter = "cuFuncGetParamInfo"(Function, usize, *mut usize, *mut usize);
    launch_kernel = "cuLaunchKernel"(
        Function, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, StreamHandle,
        *mut *mut c_void, *mut *mut c_void
    );
}

// The layouts of these structures in cuda.h on 64-bit Linux.
const _: () = {
    assert!(size_of::<AllocationProp>() == 32);
    assert!(size_of::<AccessDesc>() == 12);
    assert!(size_of::<PoolProps>() == 88);
    assert!(size_of::<Opaque64>() == 64);
    assert!(size_of::<BatchOp>() == 48);
    assert!(std::mem::offset_of!(BatchOp, address) == 8);
    assert!(std::mem::offset_of!(BatchOp, value) == 16);
    assert!(std::mem::offset_of!(BatchOp, flags) == 24);
    assert!(std::mem::offset_of!(AllocationProp, gpudirect_rdma) == 25);
};

//! Only on CUDA: memory allocated by another library, PTX, contexts.
#![allow(unsafe_code)] // to call the driver as another library does

use std::ffi::c_void;

use libloading::Library;
use warpwire::error::Kind;
use warpwire::mem::{Condition, DeviceAddr, IpcHandle, Launch, MemoryKind, Program, Stream, Word};

use crate::conformance::child::Task;
use crate::conformance::fixture::{Fixture, borrow, expect_pattern, put_pattern, test_timeout};
use crate::conformance::kernels;
use testkit::cases;

cases!(Fixture; CASES:
    memory_of_another_library_can_be_borrowed,
    borrowing_pinned_host_memory_is_refused,
    managed_memory_is_copied_but_has_no_window,
    windows_span_several_handles,
    memory_of_several_handles_is_shared,
    memory_of_the_default_pool_is_shared,
    windows_show_whole_pages_around_small_memory,
    bad_ptx_shows_the_compilers_log,
    a_wrong_number_of_arguments_is_refused,
    variables_of_a_program_are_set,
    loading_code_while_a_stream_waits_is_refused,
    loaded_kernels_start_while_a_stream_waits,
    the_context_is_left_as_it_was,
    handles_do_not_open_in_their_own_process,
);

/// Another user of the driver in this process.
struct ForeignContext {
    library: Library,
}

impl ForeignContext {
    fn new() -> Self {
        // SAFETY: the driver is loaded already.
        Self { library: unsafe { Library::new("libcuda.so.1") }.unwrap() }
    }

    fn call<F: Copy, R>(&self, symbol: &str, with: impl FnOnce(F) -> R) -> R {
        // SAFETY: each caller below passes the type that cuda.h declares for the symbol.
        let function = unsafe { self.library.get::<F>(symbol.as_bytes()) }.unwrap();
        with(*function)
    }

    /// Makes the primary context current on this thread, as the CUDA runtime does.
    fn enter(&self) {
        let mut context: *mut c_void = std::ptr::null_mut();
        type Retain = unsafe extern "C" fn(*mut *mut c_void, i32) -> i32;
        type Set = unsafe extern "C" fn(*mut c_void) -> i32;
        // SAFETY: as cuda.h declares them; the context stays retained for the rest of the process.
        unsafe {
            assert_eq!(self.call("cuDevicePrimaryCtxRetain", |f: Retain| f(&mut context, 0)), 0);
            assert_eq!(self.call("cuCtxSetCurrent", |f: Set| f(context)), 0);
        }
    }

    fn current(&self) -> *mut c_void {
        let mut context: *mut c_void = std::ptr::null_mut();
        type Current = unsafe extern "C" fn(*mut *mut c_void) -> i32;
        // SAFETY: as cuda.h declares it.
        assert_eq!(unsafe { self.call("cuCtxGetCurrent", |f: Current| f(&mut context)) }, 0);
        context
    }

    fn alloc(&self, len: usize) -> u64 {
        let mut address = 0;
        type Alloc = unsafe extern "C" fn(*mut u64, usize) -> i32;
        // SAFETY: as cuda.h declares it.
        assert_eq!(unsafe { self.call("cuMemAlloc_v2", |f: Alloc| f(&mut address, len)) }, 0);
        address
    }

    /// From the default pool, as PyTorch's `backend:cudaMallocAsync`.
    fn alloc_async(&self, len: usize) -> u64 {
        let (mut address, stream) = (0, std::ptr::null_mut());
        type Alloc = unsafe extern "C" fn(*mut u64, usize, *mut c_void) -> i32;
        type Synchronize = unsafe extern "C" fn(*mut c_void) -> i32;
        // SAFETY: as cuda.h declares them; the null stream.
        unsafe {
            let alloc = |f: Alloc| f(&mut address, len, stream);
            assert_eq!(self.call("cuMemAllocAsync", alloc), 0);
            assert_eq!(self.call("cuStreamSynchronize", |f: Synchronize| f(stream)), 0);
        }
        address
    }

    fn free_async(&self, address: u64) {
        type Free = unsafe extern "C" fn(u64, *mut c_void) -> i32;
        // SAFETY: as cuda.h declares it; allocated above.
        let code =
            unsafe { self.call("cuMemFreeAsync", |f: Free| f(address, std::ptr::null_mut())) };
        assert_eq!(code, 0);
    }

    fn free(&self, address: u64) {
        type Free = unsafe extern "C" fn(u64) -> i32;
        // SAFETY: as cuda.h declares it; allocated above.
        assert_eq!(unsafe { self.call("cuMemFree_v2", |f: Free| f(address)) }, 0);
    }

    /// Maps `count` handles of `size` bytes contiguously, for the rest of the process.
    fn reserve_and_map(&self, size: usize, count: usize, handle_types: u32) -> u64 {
        #[repr(C)]
        struct Prop {
            kind: u32,
            handle_types: u32,
            location: [u32; 2],
            windows_only: u64,
            flags: [u8; 8],
        }
        type Reserve = unsafe extern "C" fn(*mut u64, usize, usize, u64, u64) -> i32;
        type Create = unsafe extern "C" fn(*mut u64, usize, *const Prop, u64) -> i32;
        type Map = unsafe extern "C" fn(u64, usize, usize, u64, u64) -> i32;
        type Access = unsafe extern "C" fn(u64, usize, *const [u32; 3], usize) -> i32;
        let prop = Prop { kind: 1, handle_types, location: [1, 0], windows_only: 0, flags: [0; 8] };
        let (mut base, all) = (0, size * count);
        // SAFETY: as cuda.h declares them; the mappings fill the reserved range.
        unsafe {
            assert_eq!(
                self.call("cuMemAddressReserve", |f: Reserve| f(&mut base, all, 0, 0, 0)),
                0
            );
            for piece in 0..count {
                let (mut handle, at) = (0, base + (piece * size) as u64);
                assert_eq!(self.call("cuMemCreate", |f: Create| f(&mut handle, size, &prop, 0)), 0);
                assert_eq!(self.call("cuMemMap", |f: Map| f(at, size, 0, handle, 0)), 0);
            }
            let access = [1, 0, 3];
            assert_eq!(self.call("cuMemSetAccess", |f: Access| f(base, all, &access, 1)), 0);
        }
        base
    }

    fn alloc_managed(&self, len: usize) -> u64 {
        let mut address = 0;
        type Alloc = unsafe extern "C" fn(*mut u64, usize, u32) -> i32;
        // SAFETY: as cuda.h declares it.
        let code = unsafe { self.call("cuMemAllocManaged", |f: Alloc| f(&mut address, len, 1)) };
        assert_eq!(code, 0);
        address
    }
}

fn memory_of_another_library_can_be_borrowed(f: &Fixture) {
    let foreign = ForeignContext::new();
    foreign.enter();
    let address = foreign.alloc(1 << 20);
    let part = borrow(&f.gpu, DeviceAddr::new(address + 777), 10_001).unwrap();
    put_pattern(&part, 3);
    let copy = f.gpu.alloc(10_001).unwrap();
    let stream = f.gpu.stream().unwrap();
    stream.copy(&copy.whole().unwrap(), &part.whole().unwrap()).unwrap();
    stream.synchronize(test_timeout()).unwrap();
    expect_pattern(&copy, 3);
    let exported = part.export_dmabuf(0, 10_001).unwrap();
    assert_eq!(exported.offset(), (address + 777) % 4096);
    drop(part);
    foreign.free(address);
    let error = borrow(&f.gpu, DeviceAddr::new(address), 64).unwrap_err();
    assert_eq!(error.kind(), &Kind::NotDeviceMemory, "{error}");
}

fn borrowing_pinned_host_memory_is_refused(f: &Fixture) {
    let foreign = ForeignContext::new();
    foreign.enter();
    let pinned = f.gpu.alloc_pinned(4096).unwrap();
    let error = borrow(&f.gpu, pinned.address(), 64).unwrap_err();
    assert!(error.to_string().contains("pinned host memory"), "{error}");
}

fn managed_memory_is_copied_but_has_no_window(f: &Fixture) {
    let foreign = ForeignContext::new();
    foreign.enter();
    let managed = foreign.alloc_managed(4096);
    let memory = borrow(&f.gpu, DeviceAddr::new(managed), 4096).unwrap();
    put_pattern(&memory, 8);
    expect_pattern(&memory, 8);
    let error = memory.window().unwrap_err();
    assert!(error.to_string().contains("managed memory"), "{error}");
    assert!(memory.export_dmabuf(0, 4096).is_err());
    let error = memory.export_ipc().unwrap_err();
    assert!(error.to_string().contains("managed memory"), "{error}");
    drop(memory);
    foreign.free(managed);
}

/// Two contiguous mappings, with and without handles that other processes can open.
fn windows_span_several_handles(f: &Fixture) {
    let foreign = ForeignContext::new();
    foreign.enter();
    for handle_types in [0, 1] {
        let size = 2 << 20;
        let address = foreign.reserve_and_map(size, 2, handle_types);
        let memory = borrow(&f.gpu, DeviceAddr::new(address), 2 * size as u64).unwrap();
        put_pattern(&memory, 5);
        let window = memory.window().unwrap();
        let (mut found, mut wanted) = (vec![0; 10_000], vec![0; 10_000]);
        let across = size as u64 - 5_000;
        window.read(across, &mut found).unwrap();
        memory.read(across, &mut wanted).unwrap();
        assert!(found == wanted, "handle types {handle_types}");
        window.write(across, &[7; 10_000]).unwrap();
        memory.read(across, &mut found).unwrap();
        assert!(found.iter().all(|byte| *byte == 7));
        let past = borrow(&f.gpu, DeviceAddr::new(address), 2 * size as u64 + 1);
        assert_eq!(past.unwrap_err().kind(), &Kind::NotDeviceMemory);
    }
}

/// As PyTorch's expandable segments: a range that begins and ends inside of allocations.
fn memory_of_several_handles_is_shared(f: &Fixture) {
    let foreign = ForeignContext::new();
    foreign.enter();
    let size = 2 << 20;
    // Handles that were made to be shared, and others: those by their memory objects.
    for (handle_types, handle_type) in [(1, "VMM descriptors"), (0, "memory objects")] {
        let address = foreign.reserve_and_map(size, 3, handle_types) + 4096;
        let memory = borrow(&f.gpu, DeviceAddr::new(address), 3 * size as u64 - 10_000).unwrap();
        put_pattern(&memory, 1);
        let handle = memory.export_ipc().unwrap();
        assert!(handle.handle_type().contains(handle_type), "{}", handle.handle_type());
        assert_eq!(memory.ipc_descriptors().unwrap().len(), 3);
        Task::OpenIpc(f.backend, handle.to_bytes()).spawn().expect_success();
        expect_pattern(&memory, 2);
    }
    Task::CopyListToIpc(f.backend, memory_of(f, &foreign, 1 << 20).to_bytes())
        .spawn()
        .expect_success();
}

/// Short allocations, and long ones across several memory objects.
fn memory_of_the_default_pool_is_shared(f: &Fixture) {
    let foreign = ForeignContext::new();
    foreign.enter();
    let lens = [1000, 300_001, 3 << 20, 100 << 20, 300_001];
    let addresses = lens.map(|len| foreign.alloc_async(len));
    for (address, len) in addresses.into_iter().zip(lens) {
        let memory = borrow(&f.gpu, DeviceAddr::new(address + 8), len as u64 - 16).unwrap();
        put_pattern(&memory, 1);
        let handle = memory.export_ipc().unwrap();
        assert!(handle.handle_type().contains("memory objects"), "{}", handle.handle_type());
        Task::OpenIpc(f.backend, handle.to_bytes()).spawn().expect_success();
        expect_pattern(&memory, 2);
        drop(memory);
        // The descriptors are gone with it.
        Task::FailToOpenIpc(f.backend, handle.to_bytes()).spawn().expect_success();
    }
    addresses.into_iter().for_each(|address| foreign.free_async(address));
}

/// A handle to `len` bytes with pattern 1, across two allocations.
fn memory_of(f: &Fixture, foreign: &ForeignContext, len: u64) -> IpcHandle {
    let size = 2 << 20;
    let address = foreign.reserve_and_map(size, 2, 1) + size as u64 - len / 2;
    let memory = borrow(&f.gpu, DeviceAddr::new(address), len).unwrap();
    put_pattern(&memory, 1);
    let handle = memory.export_ipc().unwrap();
    // Its descriptors stay open for the rest of the process, as its mapping does.
    std::mem::forget(memory);
    handle
}

fn windows_show_whole_pages_around_small_memory(f: &Fixture) {
    let small: Vec<_> = (0..8).map(|_| f.gpu.alloc(100).unwrap()).collect();
    let page = 64 << 10;
    let (first, last) = (&small[2], &small[5]);
    let start = first.address().raw() - first.address().raw() % page;
    let end = (last.address().raw() + 100).next_multiple_of(page);
    if end - start > 2 << 20 {
        eprintln!("skipped: the driver put small allocations far apart");
        return;
    }
    let window = first.window_around(DeviceAddr::new(start), end - start).unwrap();
    for (number, memory) in small[2..=5].iter().enumerate() {
        window.write(memory.address().raw() - start, &[number as u8 + 1; 100]).unwrap();
    }
    for (number, memory) in small[2..=5].iter().enumerate() {
        let mut found = [0; 100];
        memory.read(0, &mut found).unwrap();
        assert!(found.iter().all(|byte| *byte == number as u8 + 1), "{number}: {found:?}");
    }
    let address = first.address();
    for (start, len) in [(address.raw() + 1, 200), (address.raw(), 50), (address.raw(), 1 << 40)] {
        assert!(first.window_around(DeviceAddr::new(start), len).is_err());
    }
    let pool = f.gpu.alloc_kind(100, MemoryKind::Pool).unwrap();
    let error = pool.window_around(pool.address(), 100).unwrap_err();
    assert_eq!(error.kind(), &Kind::Unsupported, "{error}");
}

fn bad_ptx_shows_the_compilers_log(f: &Fixture) {
    let bad = Program::new("bad").ptx(".version 8.2\n.target sm_70\n.address_size 64\nnonsense;\n");
    let error = f.gpu.load(&bad).unwrap_err();
    assert!(error.to_string().contains("line 4"), "{error}");
    assert!(f.gpu.load(&Program::new("cut").ptx("a\0b")).is_err());
}

fn a_wrong_number_of_arguments_is_refused(f: &Fixture) {
    if warpwire::mem::cuda::driver_version().unwrap() < (12, 4) {
        eprintln!("skipped: drivers before CUDA 12.4 do not report a kernel's argument count");
        return;
    }
    let kernel = kernels::load(&f.gpu).unwrap().kernel("answer").unwrap();
    let stream = f.gpu.stream().unwrap();
    for given in [0, 2, 4] {
        let launch = (0..given).fold(Launch::new(&kernel), |launch, _| launch.value(0));
        // SAFETY: the launch is refused.
        let error = unsafe { stream.launch(launch) }.unwrap_err();
        assert!(error.to_string().contains("takes 3"), "{error}");
    }
    let taking = |parameter: &str| {
        let text = format!(
            ".version 8.2\n.target sm_70\n.address_size 64\n.visible .entry k(.param {parameter}){{ret;}}\n"
        );
        f.gpu.load(&Program::new("narrow").ptx(text)).unwrap().kernel("k")
    };
    for parameter in [".u16 x", ".align 8 .b8 x[16]"] {
        let error = taking(parameter).unwrap_err();
        assert!(error.to_string().contains("32 and 64 bits"), "{error}");
    }
    let narrow = taking(".u32 x").unwrap();
    // SAFETY: the kernel does nothing.
    unsafe { stream.launch(Launch::new(&narrow).value(0xffff_ffff)) }.unwrap();
    stream.synchronize(test_timeout()).unwrap();
    // SAFETY: the launch is refused.
    let error = unsafe { stream.launch(Launch::new(&narrow).value(1 << 32)) }.unwrap_err();
    assert!(error.to_string().contains("has 32 bits"), "{error}");
}

fn variables_of_a_program_are_set(f: &Fixture) {
    let text = ".version 8.2\n.target sm_70\n.address_size 64\n.global .u64 word;\n\
        .visible .entry show(.param .u64 to) {\n.reg .u64 %a, %b;\nld.param.u64 %a, [to];\n\
        ld.global.u64 %b, [word];\nst.global.u64 [%a], %b;\nret;\n}\n";
    let module = f.gpu.load(&Program::new("variable").ptx(text)).unwrap();
    let (kernel, stream) = (module.kernel("show").unwrap(), f.gpu.stream().unwrap());
    let shown = f.gpu.alloc_pinned(8).unwrap();
    for value in [7_u64, u64::MAX] {
        module.set("word", &value.to_le_bytes()).unwrap();
        // SAFETY: the kernel writes only the word in its argument.
        unsafe { stream.launch(Launch::new(&kernel).region(&shown.whole().unwrap())) }.unwrap();
        stream.synchronize(test_timeout()).unwrap();
        assert_eq!(shown.word64(0).unwrap().load().unwrap(), value);
    }
    for (name, bytes) in [("word", 4), ("words", 8), ("show", 8), ("wo\0rd", 8)] {
        let error = module.set(name, &vec![0; bytes]).unwrap_err();
        assert_eq!(error.kind(), &Kind::InvalidArgument, "{error}");
    }
}

/// A stream that is blocked until the word is set.
fn gated_stream(f: &Fixture) -> (Stream, Word) {
    let gate = f.gpu.alloc_pinned(8).unwrap().word64(0).unwrap();
    gate.store(0).unwrap();
    let stream = f.gpu.stream().unwrap();
    stream.wait_value(&gate, Condition::AtLeast, 1).unwrap();
    (stream, gate)
}

fn loading_code_while_a_stream_waits_is_refused(f: &Fixture) {
    let (stream, gate) = gated_stream(f);
    let error = kernels::load(&f.gpu).unwrap_err();
    assert_eq!(error.kind(), &Kind::Busy, "{error}");
    gate.store(1).unwrap();
    stream.synchronize(test_timeout()).unwrap();
    kernels::load(&f.gpu).unwrap();
}

fn loaded_kernels_start_while_a_stream_waits(f: &Fixture) {
    let kernel = kernels::load(&f.gpu).unwrap().kernel("meet").unwrap();
    let (waiting, gate) = gated_stream(f);
    let (stream, memory) = (f.gpu.stream().unwrap(), f.gpu.alloc(8).unwrap());
    memory.write(0, &[0; 8]).unwrap();
    // SAFETY: the kernel accesses only the word in its argument.
    unsafe { stream.launch(Launch::new(&kernel).region(&memory.whole().unwrap())) }.unwrap();
    stream.synchronize(test_timeout()).unwrap();
    assert!(!waiting.is_idle().unwrap());
    gate.store(1).unwrap();
    waiting.synchronize(test_timeout()).unwrap();
}

fn the_context_is_left_as_it_was(f: &Fixture) {
    let foreign = ForeignContext::new();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            assert!(foreign.current().is_null(), "a new thread has no context");
            let memory = f.gpu.alloc(4096).unwrap();
            let stream = f.gpu.stream().unwrap();
            stream.fill(&memory.whole().unwrap(), 1).unwrap();
            stream.synchronize(test_timeout()).unwrap();
            drop((memory, stream));
            assert!(foreign.current().is_null(), "the library left its context");
        });
    });
}

fn handles_do_not_open_in_their_own_process(f: &Fixture) {
    let memory = f.gpu.alloc(4096).unwrap();
    let error = f.gpu.open_ipc(&memory.export_ipc().unwrap()).unwrap_err();
    assert!(error.to_string().contains("another process"), "{error}");
}

//! A hook on libcuda's `ioctl` calls, to see how it identifies memory when it exports it.
//!
//! `cuMemGetHandleForAddressRange` issues one ioctl that contains the handles of the memory
//! objects, for every kind of memory that CUDA can export as a dma-buf, and
//! `cuMemExportToShareableHandle` one with what an importer finds in the descriptor. libcuda calls
//! `ioctl` through its dynamic symbol table, so that symbol's GOT entry in libcuda is redirected to
//! a function here. It forwards every call unchanged; on a thread that requested it, it also
//! records the parameters of these two.

use std::cell::RefCell;
use std::ffi::{CStr, c_int, c_ulong, c_void};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};

use super::rm::{CONTROL_EXPORT_OBJECTS, Control, ExportMetadata, ExportObjects};
use crate::error::{Error, Kind, Result};

const MAX_OBJECTS: usize = 128;
/// `_IOWR('F', 217, 2608 bytes)`.
const EXPORT_REQUEST: c_ulong =
    3 << 30 | (size_of::<ExportParams>() as c_ulong) << 16 | 0x46 << 8 | 217;
/// `_IOWR('F', 0x2a, 32 bytes)`: a control call to the resource manager.
const CONTROL_REQUEST: c_ulong =
    3 << 30 | (size_of::<Control>() as c_ulong) << 16 | 0x46 << 8 | 0x2a;

/// The export request, as the open kernel modules declare it.
#[repr(C)]
#[derive(Clone, Copy)]
struct ExportParams {
    fd: c_int,
    client: u32,
    total_objects: u32,
    object_count: u32,
    index: u32,
    total_size: u64,
    mapping_type: u8,
    allow_mmap: u8,
    handles: [u32; MAX_OBJECTS],
    offsets: [u64; MAX_OBJECTS],
    sizes: [u64; MAX_OBJECTS],
    status: u32,
}

const _: () = {
    assert!(size_of::<ExportParams>() == 2608);
    assert!(std::mem::offset_of!(ExportParams, total_size) == 24);
    assert!(std::mem::offset_of!(ExportParams, handles) == 36);
    assert!(std::mem::offset_of!(ExportParams, offsets) == 552);
};

/// A part of an exported range: a range of a memory object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ObjectRange {
    pub(super) client: u32,
    pub(super) object: u32,
    pub(super) offset: u64,
    pub(super) len: u64,
}

/// What CUDA passed to the kernel while a recorded call ran.
#[derive(Default)]
pub(super) struct Recorded {
    /// The parts of a range that it exported as a dma-buf.
    pub(super) object_ranges: Vec<ObjectRange>,
    /// What it attached to a descriptor of a memory object.
    pub(super) metadata: Option<ExportMetadata>,
}

thread_local! {
    static RECORDED: RefCell<Option<Recorded>> = const { RefCell::new(None) };
}

/// Runs `export` and returns what CUDA passed to the kernel on this thread.
pub(super) fn record_exports<R>(export: impl FnOnce() -> Result<R>) -> Result<(R, Recorded)> {
    install()?;
    RECORDED.with(|recorded| *recorded.borrow_mut() = Some(Recorded::default()));
    let exported = export();
    let recorded = RECORDED.with(|recorded| recorded.borrow_mut().take()).unwrap_or_default();
    Ok((exported?, recorded))
}

type Ioctl = unsafe extern "C" fn(c_int, c_ulong, *mut c_void) -> c_int;

/// Address of the original function, in the C library.
static ORIGINAL: AtomicUsize = AtomicUsize::new(0);

/// Replaces `ioctl` in libcuda's GOT.
///
/// # Safety
/// As for `ioctl`.
unsafe extern "C" fn ioctl_hook(fd: c_int, request: c_ulong, argument: *mut c_void) -> c_int {
    let original = ORIGINAL.load(Ordering::Acquire);
    // SAFETY: set before the GOT entry was changed, to the address of a function of this type.
    let original: Ioctl = unsafe { std::mem::transmute::<usize, Ioctl>(original) };
    // SAFETY: the arguments are forwarded unchanged.
    let result = unsafe { original(fd, request, argument) };
    if result == 0 && !argument.is_null() {
        // Some callers sign-extend the request.
        match c_ulong::from(request as u32) {
            // SAFETY: the kernel has just accessed a structure of this size there.
            EXPORT_REQUEST => record(unsafe { &*argument.cast::<ExportParams>() }),
            // SAFETY: likewise.
            CONTROL_REQUEST => record_control(unsafe { &*argument.cast::<Control>() }),
            _ => {}
        }
    }
    result
}

fn record(export: &ExportParams) {
    if export.status == 0 {
        with_recorded(|recorded| {
            let count = (export.object_count as usize).min(MAX_OBJECTS);
            recorded.object_ranges.extend((0..count).map(|at| ObjectRange {
                client: export.client,
                object: export.handles[at],
                offset: export.offsets[at],
                len: export.sizes[at],
            }));
        });
    }
}

fn record_control(control: &Control) {
    let is_export = control.command == CONTROL_EXPORT_OBJECTS
        && control.params_size as usize == size_of::<ExportObjects>();
    if is_export && control.status == 0 {
        with_recorded(|recorded| {
            // SAFETY: the resource manager has just read a structure of this size there, and
            // libcuda is still inside the call that owns it.
            let export = unsafe { &*(control.params as *const ExportObjects) };
            recorded.metadata = Some(export.metadata);
        });
    }
}

fn with_recorded(apply: impl FnOnce(&mut Recorded)) {
    // Thread-local storage is gone on an exiting thread; then nothing is being recorded.
    let _ = RECORDED.try_with(|recorded| {
        if let Ok(mut recorded) = recorded.try_borrow_mut()
            && let Some(recorded) = recorded.as_mut()
        {
            apply(recorded);
        }
    });
}

/// Installs the hook, once per process.
fn install() -> Result<()> {
    static INSTALLED: OnceLock<Result<()>> = OnceLock::new();
    INSTALLED.get_or_init(|| find_entry().and_then(replace)).clone()
}

fn failure(why: &'static str) -> Error {
    Error::new(Kind::Unsupported, "record how CUDA identifies memory").on("libcuda.so.1").why(why)
}

/// Address of libcuda's GOT entry for `ioctl`.
fn find_entry() -> Result<usize> {
    let mut found: Option<usize> = None;
    // SAFETY: the callback has the required type, and its data outlives the call.
    unsafe { libc::dl_iterate_phdr(Some(visit), (&raw mut found).cast()) };
    found.ok_or_else(|| failure("it has no relocation for ioctl"))
}

/// Called for each loaded library; stops at libcuda.
///
/// # Safety
/// As called by `dl_iterate_phdr`; `found` points to an `Option<usize>`.
unsafe extern "C" fn visit(
    info: *mut libc::dl_phdr_info,
    _size: usize,
    found: *mut c_void,
) -> c_int {
    // SAFETY: the loader passes a valid structure.
    let info = unsafe { &*info };
    if info.dlpi_name.is_null() {
        return 0;
    }
    // SAFETY: not null, and the loader's names are NUL-terminated.
    let name = unsafe { CStr::from_ptr(info.dlpi_name) }.to_bytes();
    let file = name.rsplit(|byte| *byte == b'/').next().unwrap_or_default();
    if !file.starts_with(b"libcuda.so") {
        return 0;
    }
    // SAFETY: the structure describes a loaded library.
    let entry = unsafe { entry_in(info) };
    // SAFETY: by this function's contract.
    unsafe { *found.cast::<Option<usize>>() = entry };
    c_int::from(entry.is_some())
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Dynamic {
    tag: i64,
    value: u64,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Relocation {
    offset: u64,
    info: u64,
    addend: i64,
}

mod tag {
    pub(super) const PLT_SIZE: i64 = 2;
    pub(super) const STRINGS: i64 = 5;
    pub(super) const SYMBOLS: i64 = 6;
    pub(super) const RELOCATIONS: i64 = 7;
    pub(super) const RELOCATIONS_SIZE: i64 = 8;
    pub(super) const PLT: i64 = 23;
}

/// Searches a library's relocations for the one that binds `ioctl`.
///
/// # Safety
/// `info` describes a loaded library.
unsafe fn entry_in(info: &libc::dl_phdr_info) -> Option<usize> {
    // SAFETY: the loader gives the number of program headers.
    let headers = unsafe { std::slice::from_raw_parts(info.dlpi_phdr, info.dlpi_phnum.into()) };
    let dynamic = headers.iter().find(|header| header.p_type == libc::PT_DYNAMIC)?;
    let mut at = (info.dlpi_addr + dynamic.p_vaddr) as *const Dynamic;
    let mut table = [0_u64; 24];
    // SAFETY: the dynamic section is an array that ends with a zero tag.
    while let entry = unsafe { *at }
        && entry.tag != 0
    {
        if let Some(slot) = usize::try_from(entry.tag).ok().and_then(|tag| table.get_mut(tag)) {
            *slot = entry.value;
        }
        // SAFETY: the end has not been reached.
        at = unsafe { at.add(1) };
    }
    let value = |tag: i64| table[tag as usize];
    let groups = [(tag::PLT, tag::PLT_SIZE), (tag::RELOCATIONS, tag::RELOCATIONS_SIZE)];
    groups.into_iter().find_map(|(start, size)| {
        let count = value(size) as usize / size_of::<Relocation>();
        if value(start) == 0 || count == 0 {
            return None;
        }
        // SAFETY: the dynamic section gives address and size of the relocations.
        let all = unsafe { std::slice::from_raw_parts(value(start) as *const Relocation, count) };
        let binds_ioctl = |relocation: &&Relocation| {
            let symbol = relocation.info >> 32;
            // SAFETY: the symbol index comes from the library's own relocation.
            symbol != 0
                && unsafe { symbol_name(value(tag::SYMBOLS), value(tag::STRINGS), symbol) }
                    == b"ioctl"
        };
        let found = all.iter().find(binds_ioctl)?;
        usize::try_from(info.dlpi_addr + found.offset).ok()
    })
}

/// The name of a symbol.
///
/// # Safety
/// The tables are those of a loaded library, and `number` is the index of one of its symbols.
unsafe fn symbol_name<'a>(symbols: u64, strings: u64, number: u64) -> &'a [u8] {
    const SYMBOL_SIZE: u64 = 24;
    // SAFETY: by this function's contract; a symbol begins with the offset of its name.
    unsafe {
        let name = *((symbols + number * SYMBOL_SIZE) as *const u32);
        CStr::from_ptr((strings + u64::from(name)) as *const _).to_bytes()
    }
}

/// Stores the hook in the GOT entry, after making its page writable.
fn replace(entry: usize) -> Result<()> {
    use rustix::mm::{MprotectFlags, mprotect};
    let page = rustix::param::page_size();
    let start = (entry - entry % page) as *mut c_void;
    // SAFETY: `find_entry` found this address in the GOT of a library that is never unloaded; it
    // holds a function pointer, and the page stays readable throughout.
    unsafe {
        let slot = AtomicPtr::<c_void>::from_ptr(entry as *mut *mut c_void);
        // With lazy binding the entry may not hold the function yet, so it is looked up; that also
        // finds the wrapper of a preloaded library.
        let original = libc::dlsym(libc::RTLD_DEFAULT, c"ioctl".as_ptr());
        if original.is_null() {
            return Err(failure("the C library has no ioctl"));
        }
        ORIGINAL.store(original as usize, Ordering::Release);
        mprotect(start, page, MprotectFlags::READ | MprotectFlags::WRITE)
            .map_err(|_| failure("its GOT cannot be made writable"))?;
        slot.store(ioctl_hook as *mut c_void, Ordering::Release);
        // If the page was read-only, leaving it writable is harmless; if not, it must stay
        // writable.
    }
    Ok(())
}

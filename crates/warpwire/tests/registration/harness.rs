//! A link, a GPU, and buffers registered in every possible way.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};
use warpwire::mem::sim::SimControl;
use warpwire::mem::{Allocation, Device};
use warpwire::mlx5::Atomic;
use warpwire::mr::{AccessDenied, CustomMemory, HostMemory};
use warpwire::verbs::{Access, AttachMode, DmaBufRange, MemorySource, Mr};
use warpwire::{Error, Result};
use warpwire_apps::pattern;

use crate::verbs::fixture::{Endpoint, Fixture, TestLink, test_timeout};

pub struct Harness {
    pub fixture: Fixture,
    gpu: Option<Device>,
}

impl Harness {
    /// With the given device, or with a simulated one.
    pub fn new(test_link: TestLink, gpu: Option<Device>) -> Self {
        Self { fixture: Fixture::new(test_link), gpu }
    }

    pub fn gpu(&self) -> Device {
        self.gpu.clone().unwrap_or_else(|| self.fixture.gpu())
    }

    pub fn control(&self) -> SimControl {
        assert!(self.gpu.is_none(), "only the simulator has fault injection");
        self.fixture.control()
    }

    /// Fails if the case left objects on a simulated device.
    pub fn check_nothing_left(&self) {
        for ordinal in 0..2 {
            let control = self.fixture.sim().control(ordinal).unwrap();
            if let Err(live_objects) = control.wait_empty(test_timeout()) {
                panic!("sim:{ordinal} still holds {live_objects:?}");
            }
        }
    }
}

/// The kind of memory, and how it is passed to the registration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemKind {
    HostHandle,
    HostAddress,
    HostOnDemand,
    /// Anonymous memory mapped by the case, which can unmap it.
    Anonymous,
    AnonymousOnDemand,
    Memfd,
    Device,
    DeviceEngine,
    DeviceOnDemand,
    DeviceAddress,
    DeviceAddressOnDemand,
    DmaBufStatic,
    DmaBufDynamic,
    Pinned,
}

pub const MEM_KINDS: [MemKind; 14] = [
    MemKind::HostHandle,
    MemKind::HostAddress,
    MemKind::HostOnDemand,
    MemKind::Anonymous,
    MemKind::AnonymousOnDemand,
    MemKind::Memfd,
    MemKind::Device,
    MemKind::DeviceEngine,
    MemKind::DeviceOnDemand,
    MemKind::DeviceAddress,
    MemKind::DeviceAddressOnDemand,
    MemKind::DmaBufStatic,
    MemKind::DmaBufDynamic,
    MemKind::Pinned,
];

impl MemKind {
    pub fn is_device(self) -> bool {
        use MemKind::*;
        matches!(
            self,
            Device
                | DeviceEngine
                | DeviceOnDemand
                | DeviceAddress
                | DeviceAddressOnDemand
                | DmaBufStatic
                | DmaBufDynamic
        )
    }

    /// On-demand host memory is copied by the kernel, which offers no atomics.
    pub fn has_atomics(self) -> bool {
        !matches!(self, Self::HostOnDemand | Self::AnonymousOnDemand)
    }

    /// Whether the memory may move while it is registered.
    pub fn may_move(self) -> bool {
        self.is_device() && self != Self::DmaBufStatic
    }

    fn is_on_demand(self) -> bool {
        use MemKind::*;
        matches!(self, HostOnDemand | AnonymousOnDemand | DeviceOnDemand | DeviceAddressOnDemand)
    }

    /// All access rights that this kind of memory supports.
    pub fn all(self) -> Access {
        let (all_but_atomic, atomic) = (
            Access::LOCAL_WRITE | Access::REMOTE_READ | Access::REMOTE_WRITE,
            Access::REMOTE_ATOMIC,
        );
        if self.has_atomics() { all_but_atomic | atomic } else { all_but_atomic }
    }
}

/// An anonymous mapping of the case.
pub struct Pages {
    base: *mut u8,
    len: usize,
}

// SAFETY: a plain mapping, which the cases access only by copying.
unsafe impl Send for Pages {}
// SAFETY: as above.
unsafe impl Sync for Pages {}

impl Pages {
    pub fn new(len: usize) -> Self {
        Self::with(len, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE)
    }

    pub fn with(len: usize, protection: ProtFlags, flags: MapFlags) -> Self {
        // Far from the addresses that the kernel chooses, so that no other mapping reuses the range
        // after a case unmaps it.
        static NEXT: AtomicUsize = AtomicUsize::new(0x1000_0000_0000);
        let at = NEXT.fetch_add(len.next_multiple_of(1 << 30) + (1 << 30), Ordering::Relaxed);
        let at = std::ptr::without_provenance_mut(at);
        // SAFETY: a new mapping; the address is only a hint, so nothing is replaced.
        let base = unsafe { mmap_anonymous(at, len, protection, flags) };
        Self { base: base.unwrap().cast(), len }
    }

    pub fn address(&self) -> u64 {
        self.base.expose_provenance() as u64
    }

    pub fn at(&self, offset: usize) -> *mut std::ffi::c_void {
        assert!(offset < self.len);
        self.base.wrapping_add(offset).cast()
    }

    pub fn read(&self, offset: u64, into: &mut [u8]) {
        assert!(offset as usize + into.len() <= self.len);
        // SAFETY: inside the mapping; no reference to it exists, and the cases wait until no work
        // is in flight.
        unsafe {
            std::ptr::copy_nonoverlapping(
                self.base.add(offset as usize),
                into.as_mut_ptr(),
                into.len(),
            );
        }
    }

    pub fn write(&self, offset: u64, from: &[u8]) {
        assert!(offset as usize + from.len() <= self.len);
        // SAFETY: as above.
        unsafe {
            std::ptr::copy_nonoverlapping(
                from.as_ptr(),
                self.base.add(offset as usize),
                from.len(),
            );
        }
    }

    /// Unmaps a part; later accesses to it fault.
    pub fn unmap(&self, offset: usize, len: usize) {
        // SAFETY: part of the mapping, and no pointer into it is used afterwards.
        unsafe { munmap(self.at(offset), len) }.unwrap();
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: mapped with this base and length; unmapping an unmapped part is no error.
        let _ = unsafe { munmap(self.base.cast(), self.len) };
    }
}

pub enum Backing {
    Host(HostMemory),
    Pages(Pages),
    Device(Allocation),
}

/// Registered memory with guard bytes around it; the case reads and writes it without the device.
pub struct Buffer {
    pub mem_kind: MemKind,
    pub backing: Backing,
    pub mr: Option<Mr>,
    /// Offset of the registered range in the memory.
    pub start: u64,
    pub len: u64,
}

/// Guard bytes on either side of the registered range.
pub const GUARD: u64 = 8192;
const GUARD_BYTE: u8 = 0x9a;

impl Buffer {
    /// `len` zero bytes, `skew` bytes off a page boundary, registered with all rights.
    pub fn new(harness: &Harness, end: &Endpoint, mem_kind: MemKind, len: u64, skew: u64) -> Self {
        Self::with(harness, end, mem_kind, len, skew, mem_kind.all()).unwrap()
    }

    pub fn with(
        harness: &Harness,
        end: &Endpoint,
        mem_kind: MemKind,
        len: u64,
        skew: u64,
        access: Access,
    ) -> Result<Self> {
        let (start, whole) = (GUARD + skew, len + skew + 2 * GUARD);
        let backing = match mem_kind {
            MemKind::HostHandle | MemKind::HostAddress | MemKind::HostOnDemand | MemKind::Memfd => {
                Backing::Host(HostMemory::new(whole)?)
            }
            MemKind::Anonymous | MemKind::AnonymousOnDemand => {
                Backing::Pages(Pages::new(whole as usize))
            }
            MemKind::Pinned => Backing::Device(harness.gpu().alloc_pinned(whole)?),
            _ => Backing::Device(harness.gpu().alloc(whole)?),
        };
        let mut buffer = Self { mem_kind, backing, mr: None, start, len };
        buffer.put(0, &vec![GUARD_BYTE; start as usize]);
        buffer.put(start, &vec![0; len as usize]);
        buffer.put(start + len, &vec![GUARD_BYTE; (whole - start - len) as usize]);
        buffer.register(end, access)?;
        Ok(buffer)
    }

    /// Registers the buffer, and drops an earlier registration afterwards.
    pub fn register(&mut self, end: &Endpoint, access: Access) -> Result<()> {
        let access = if self.mem_kind.is_on_demand() { access | Access::ON_DEMAND } else { access };
        let (context, pd) = (&end.context, &end.pd);
        let by_address = |address: u64| {
            // SAFETY: the buffer keeps its memory until after the registration, or unmaps a part
            // that only faults on access; its bytes are only copied.
            unsafe { context.register_address(pd, address + self.start, self.len, None, access) }
        };
        let made = match (&self.backing, self.mem_kind) {
            (Backing::Host(memory), MemKind::HostHandle) => {
                let slice = MemorySource::from(memory.clone()).slice(self.start, self.len)?;
                context.register(pd, slice, access)
            }
            (Backing::Host(memory), MemKind::Memfd) => {
                use std::os::fd::AsFd;
                let range = DmaBufRange { fd: memory.as_fd(), offset: self.start, len: self.len };
                context.register_dmabuf(pd, range, None, access, AttachMode::Dynamic)
            }
            (Backing::Host(memory), _) => by_address(memory.address()),
            (Backing::Pages(pages), _) => by_address(pages.address()),
            (Backing::Device(memory), MemKind::DeviceAddress | MemKind::DeviceAddressOnDemand) => {
                by_address(memory.address().raw())
            }
            (Backing::Device(memory), MemKind::DmaBufStatic | MemKind::DmaBufDynamic) => {
                let attach = match self.mem_kind {
                    MemKind::DmaBufStatic => AttachMode::Static,
                    _ => AttachMode::Dynamic,
                };
                let buffer = memory.export_dmabuf(self.start, self.len)?;
                context.register_dmabuf(pd, (&buffer).into(), None, access, attach)
            }
            (Backing::Device(memory), mem_kind) => {
                let mut slice = MemorySource::from(memory.region(self.start, self.len)?);
                if mem_kind == MemKind::DeviceEngine {
                    slice = slice.without_window();
                }
                context.register(pd, slice, access)
            }
        };
        self.mr = Some(made?);
        Ok(())
    }

    pub fn mr(&self) -> &Mr {
        self.mr.as_ref().expect("a registered buffer")
    }

    pub fn allocation(&self) -> &Allocation {
        match &self.backing {
            Backing::Device(memory) => memory,
            _ => panic!("{:?} is host memory", self.mem_kind),
        }
    }

    fn put(&self, offset: u64, bytes: &[u8]) {
        match &self.backing {
            Backing::Host(memory) => memory.bytes().write(offset, bytes).unwrap(),
            Backing::Pages(pages) => pages.write(offset, bytes),
            Backing::Device(memory) => memory.write(offset, bytes).unwrap(),
        }
    }

    fn get(&self, offset: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        match &self.backing {
            Backing::Host(memory) => memory.bytes().read(offset, &mut bytes).unwrap(),
            Backing::Pages(pages) => pages.read(offset, &mut bytes),
            Backing::Device(memory) => memory.read(offset, &mut bytes).unwrap(),
        }
        bytes
    }

    /// Writes bytes of the registered range.
    pub fn write(&self, offset: u64, bytes: &[u8]) {
        self.put(self.start + offset, bytes);
    }

    pub fn read(&self, offset: u64, len: usize) -> Vec<u8> {
        self.get(self.start + offset, len)
    }

    pub fn word(&self, offset: u64) -> u64 {
        u64::from_ne_bytes(self.read(offset, 8).try_into().unwrap())
    }

    pub fn pattern(&self, offset: u64, len: usize, seed: u64) -> Vec<u8> {
        let mut bytes = vec![0; len];
        pattern::fill_bytes(&mut bytes, seed, 0);
        self.write(offset, &bytes);
        bytes
    }

    /// Asserts that no byte outside the registered range was written.
    pub fn check_guards(&self) {
        let (before, behind) = (self.get(0, self.start as usize), self.start + self.len);
        assert!(before.iter().all(|byte| *byte == GUARD_BYTE), "{:?}: guard before", self.mem_kind);
        let after = self.get(behind, GUARD as usize);
        assert!(after.iter().all(|byte| *byte == GUARD_BYTE), "{:?}: guard after", self.mem_kind);
    }
}

/// Asserts that a call was refused with a text that contains all of `words`.
pub fn refused<T>(outcome: Result<T>, words: &[&str]) -> Error {
    let error = outcome.err().expect("a refusal");
    let text = error.to_string();
    for word in words {
        assert!(text.contains(word), "{word:?} is not in: {text}");
    }
    error
}

/// Memory that its client copies, and that can be made temporarily unavailable.
pub struct TestMemory {
    bytes: Mutex<Vec<u8>>,
    pub unavailable_until: Mutex<Option<Instant>>,
    pub denied: Mutex<Option<AccessDenied>>,
    pub slow: bool,
}

impl TestMemory {
    pub fn new(len: usize, slow: bool) -> Arc<Self> {
        let bytes = Mutex::new(vec![0; len]);
        Arc::new(Self {
            bytes,
            unavailable_until: Mutex::new(None),
            denied: Mutex::new(None),
            slow,
        })
    }

    pub fn set_absent_for(&self, time: Duration) {
        *self.unavailable_until.lock() = Some(Instant::now() + time);
    }

    pub fn set(&self, offset: usize, from: &[u8]) {
        self.bytes.lock()[offset..offset + from.len()].copy_from_slice(from);
    }

    pub fn get(&self, offset: usize, len: usize) -> Vec<u8> {
        self.bytes.lock()[offset..offset + len].to_vec()
    }

    fn check_present(&self) -> std::result::Result<(), AccessDenied> {
        if let Some(denied) = *self.denied.lock() {
            return Err(denied);
        }
        let mut until = self.unavailable_until.lock();
        match *until {
            Some(when) if Instant::now() < when => Err(AccessDenied::NotResident),
            _ => {
                *until = None;
                Ok(())
            }
        }
    }
}

impl CustomMemory for TestMemory {
    fn check(&self, offset: u64, len: u64, _: bool) -> std::result::Result<(), AccessDenied> {
        assert!(offset + len <= self.bytes.lock().len() as u64, "a range outside the memory");
        self.check_present()
    }

    fn read(&self, offset: u64, into: &mut [u8]) -> std::result::Result<(), AccessDenied> {
        self.check_present()?;
        into.copy_from_slice(&self.bytes.lock()[offset as usize..][..into.len()]);
        Ok(())
    }

    fn write(&self, offset: u64, from: &[u8]) -> std::result::Result<(), AccessDenied> {
        self.check_present()?;
        self.bytes.lock()[offset as usize..][..from.len()].copy_from_slice(from);
        Ok(())
    }

    fn atomic(&self, offset: u64, op: &Atomic) -> std::result::Result<u64, AccessDenied> {
        self.check_present()?;
        let mut bytes = self.bytes.lock();
        let word = &mut bytes[offset as usize..][..8];
        let old = u64::from_ne_bytes(word.try_into().unwrap());
        word.copy_from_slice(&op.apply(old).to_ne_bytes());
        Ok(old)
    }

    fn is_slow(&self) -> bool {
        self.slow
    }
}

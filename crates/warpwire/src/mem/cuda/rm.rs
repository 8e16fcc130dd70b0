//! Direct ioctls to the driver's resource manager (RM), which can map GPU memory for the CPU.
//!
//! Every NVIDIA driver has it, and any user who may open `/dev/nvidiactl` may use it. The
//! structures are those of the open kernel modules. What relies on undocumented layouts (how CUDA
//! identifies its memory) is in `naming.rs`, and is verified before use.

use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use parking_lot::Mutex;

use crate::error::{Error, Kind, Result};
use crate::host::PciAddress;

const CONTROL_NODE: &str = "/dev/nvidiactl";

mod request {
    pub(super) const FREE: u32 = 0x29;
    pub(super) const CONTROL: u32 = 0x2a;
    pub(super) const ALLOC: u32 = 0x2b;
    pub(super) const DUP: u32 = 0x34;
    pub(super) const MAP: u32 = 0x4e;
    pub(super) const UNMAP: u32 = 0x4f;
    pub(super) const CARD_INFO: u32 = 200;
    pub(super) const REGISTER_FD: u32 = 201;
}

const CLASS_CLIENT: u32 = 0x41;
const CLASS_DEVICE: u32 = 0x80;
const CONTROL_GPU_ID_INFO: u32 = 0x205;
const CONTROL_SURFACE_INFO: u32 = 0x41_0110;
/// Puts memory objects into a descriptor, from which other clients import them.
pub(super) const CONTROL_EXPORT_OBJECTS: u32 = 0x3d0b;
/// An index of [`CONTROL_SURFACE_INFO`]: the size of the physical memory, in units of 4 KiB.
const SURFACE_SIZE: u32 = 7;
const FIRST_HANDLE: u32 = 0xcaf1_0001;
/// Bits 25..23 of the map flags: write-combining.
const MAP_WRITE_COMBINING: u32 = 2 << 23;

#[repr(C)]
#[derive(Default)]
struct Alloc {
    root: u32,
    parent: u32,
    new: u32,
    class: u32,
    params: u64,
    params_size: u32,
    status: u32,
}

#[repr(C)]
#[derive(Default)]
struct DeviceParams {
    instance: u32,
    reserved: [u32; 5],
    va: [u64; 3],
    va_mode: u32,
    padding: u32,
}

#[repr(C)]
#[derive(Default)]
pub(super) struct Control {
    client: u32,
    object: u32,
    pub(super) command: u32,
    flags: u32,
    pub(super) params: u64,
    pub(super) params_size: u32,
    pub(super) status: u32,
}

#[repr(C)]
struct SurfaceInfo {
    count: u32,
    padding: u32,
    values: u64,
}

#[repr(C)]
struct SurfaceValue {
    index: u32,
    value: u32,
}

/// What an exporter attaches to a descriptor for its importer; the resource manager only keeps it.
pub(super) type ExportMetadata = [u8; 64];

const MAX_EXPORTED: usize = 512;

#[repr(C)]
pub(super) struct ExportObjects {
    fd: i32,
    device: u32,
    max_objects: u16,
    pub(super) metadata: ExportMetadata,
    objects: [u32; MAX_EXPORTED],
    count: u16,
    first: u16,
}

#[repr(C)]
#[derive(Default)]
struct GpuIdInfo {
    gpu_id: u32,
    flags: u32,
    device_instance: u32,
    rest: [u32; 5],
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct CardInfo {
    valid: u8,
    domain: u32,
    bus: u8,
    slot: u8,
    function: u8,
    vendor: u16,
    device: u16,
    gpu_id: u32,
    interrupt: u16,
    addresses: [u64; 4],
    minor: u32,
    name: [u8; 10],
}

#[repr(C)]
#[derive(Default)]
struct Dup {
    client: u32,
    parent: u32,
    object: u32,
    source_client: u32,
    source_object: u32,
    flags: u32,
    status: u32,
}

#[repr(C)]
#[derive(Default)]
struct Map {
    client: u32,
    device: u32,
    memory: u32,
    padding: u32,
    offset: u64,
    len: u64,
    linear: u64,
    status: u32,
    flags: u32,
    fd: i32,
    padding_end: u32,
}

#[repr(C)]
#[derive(Default)]
struct Unmap {
    client: u32,
    device: u32,
    memory: u32,
    padding: u32,
    linear: u64,
    status: u32,
    flags: u32,
}

#[repr(C)]
#[derive(Default)]
struct Free {
    client: u32,
    parent: u32,
    object: u32,
    status: u32,
}

const MAX_CARDS: usize = 32;

const _: () = {
    assert!(size_of::<Alloc>() == 32);
    assert!(size_of::<DeviceParams>() == 56);
    assert!(size_of::<Control>() == 32);
    assert!(size_of::<SurfaceInfo>() == 16);
    assert!(size_of::<ExportObjects>() == 2128);
    assert!(std::mem::offset_of!(ExportObjects, objects) == 76);
    assert!(size_of::<GpuIdInfo>() == 32);
    assert!(size_of::<CardInfo>() == 72);
    assert!(std::mem::offset_of!(CardInfo, gpu_id) == 16);
    assert!(std::mem::offset_of!(CardInfo, minor) == 56);
    assert!(size_of::<Dup>() == 28);
    assert!(size_of::<Map>() == 56);
    assert!(size_of::<Unmap>() == 32);
    assert!(size_of::<Free>() == 16);
};

/// This library's own RM client. It owns its objects and mappings; they are released with it.
pub(super) struct Client {
    control: OwnedFd,
    handle: u32,
    next: AtomicU32,
    gpus: Mutex<Vec<(PciAddress, Gpu)>>,
}

/// A GPU as RM identifies it.
#[derive(Clone, Copy)]
pub(super) struct Gpu {
    device: u32,
    minor: u32,
}

impl Client {
    /// This process's client. A forked child gets its own: the parent's belongs to the parent.
    pub(super) fn get() -> Result<Arc<Self>> {
        static CLIENT: Mutex<Option<(u32, Arc<Client>)>> = Mutex::new(None);
        let pid = std::process::id();
        let mut client = CLIENT.lock();
        if let Some((owner, client)) = &*client
            && *owner == pid
        {
            return Ok(client.clone());
        }
        let fresh = Arc::new(Self::open()?);
        if let Some((_, parents)) = client.replace((pid, fresh.clone())) {
            // Dropping it in the child would free the parent's objects.
            std::mem::forget(parents);
        }
        Ok(fresh)
    }

    fn open() -> Result<Self> {
        let control = open_node(CONTROL_NODE)?;
        let mut alloc = Alloc { class: CLASS_CLIENT, ..Alloc::default() };
        call(&control, request::ALLOC, &mut alloc)?;
        check("create a client", alloc.status)?;
        Ok(Self {
            control,
            handle: alloc.new,
            next: AtomicU32::new(FIRST_HANDLE),
            gpus: Mutex::default(),
        })
    }

    fn new_handle(&self) -> u32 {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    /// Looks up the GPU at a PCI address, and opens it at first use.
    pub(super) fn gpu(&self, address: PciAddress) -> Result<Gpu> {
        let mut gpus = self.gpus.lock();
        if let Some((_, gpu)) = gpus.iter().find(|(known, _)| *known == address) {
            return Ok(*gpu);
        }
        let gpu = self.find_gpu(address)?;
        gpus.push((address, gpu));
        Ok(gpu)
    }

    fn find_gpu(&self, address: PciAddress) -> Result<Gpu> {
        let mut cards = [CardInfo::default(); MAX_CARDS];
        call(&self.control, request::CARD_INFO, &mut cards)?;
        let card = cards.iter().find(|card| {
            let location = (card.domain, card.bus, card.slot);
            card.valid != 0 && location == (address.domain, address.bus, address.device)
        });
        let card = card.ok_or_else(|| {
            let why = format!("the resource manager lists no GPU at {address}");
            Error::new(Kind::Unavailable, "map GPU memory").why(why)
        })?;
        let mut info = GpuIdInfo { gpu_id: card.gpu_id, ..GpuIdInfo::default() };
        let done = self.control(self.handle, CONTROL_GPU_ID_INFO, &mut info);
        done.and_then(|status| check("query a GPU's instance number", status))?;
        let mut params = DeviceParams { instance: info.device_instance, ..DeviceParams::default() };
        let device = self.new_handle();
        let mut alloc = Alloc {
            root: self.handle,
            parent: self.handle,
            new: device,
            class: CLASS_DEVICE,
            params: &raw mut params as u64,
            params_size: size_of::<DeviceParams>() as u32,
            ..Alloc::default()
        };
        call(&self.control, request::ALLOC, &mut alloc)?;
        check("open the GPU", alloc.status)?;
        Ok(Gpu { device, minor: card.minor })
    }

    /// Issues a control call on an object of this client; returns the resource manager's status.
    fn control<T>(&self, object: u32, command: u32, params: &mut T) -> Result<u32> {
        let mut control = Control {
            client: self.handle,
            object,
            command,
            params: std::ptr::from_mut(params) as u64,
            params_size: size_of::<T>() as u32,
            ..Control::default()
        };
        call(&self.control, request::CONTROL, &mut control)?;
        Ok(control.status)
    }

    /// Duplicates another client's memory object.
    pub(super) fn dup_object(
        self: &Arc<Self>,
        gpu: Gpu,
        source_client: u32,
        source_object: u32,
    ) -> Result<Object> {
        let handle = self.new_handle();
        let mut dup = Dup {
            client: self.handle,
            parent: gpu.device,
            object: handle,
            source_client,
            source_object,
            ..Dup::default()
        };
        call(&self.control, request::DUP, &mut dup)?;
        check("duplicate a memory object", dup.status)?;
        Ok(Object { client: self.clone(), gpu, handle })
    }
}

/// A duplicated memory object: it keeps the memory alive.
pub(super) struct Object {
    client: Arc<Client>,
    gpu: Gpu,
    handle: u32,
}

impl Object {
    /// Prepares a mapping of `offset..offset + len`, both multiples of the page size. The returned
    /// descriptor must be mapped from offset 0, by this process.
    pub(super) fn map(self, offset: u64, len: u64) -> Result<(Mapping, OwnedFd)> {
        let node = open_node(&format!("/dev/nvidia{}", self.gpu.minor))?;
        let mut control = self.client.control.as_raw_fd();
        call(&node, request::REGISTER_FD, &mut control)?;
        let mut map = Map {
            client: self.client.handle,
            device: self.gpu.device,
            memory: self.handle,
            offset,
            len,
            flags: MAP_WRITE_COMBINING,
            fd: node.as_raw_fd(),
            ..Map::default()
        };
        call(&self.client.control, request::MAP, &mut map)?;
        check("map the memory", map.status)?;
        Ok((Mapping { object: self, linear: map.linear }, node))
    }

    /// Size of the physical memory in bytes.
    pub(super) fn size(&self) -> Result<u64> {
        let mut value = SurfaceValue { index: SURFACE_SIZE, value: 0 };
        let mut info = SurfaceInfo { count: 1, padding: 0, values: &raw mut value as u64 };
        let status = self.client.control(self.handle, CONTROL_SURFACE_INFO, &mut info)?;
        check("query the size of a memory object", status)?;
        Ok(u64::from(value.value) << 12)
    }

    /// A descriptor that holds the object, as `cuMemExportToShareableHandle` makes them; it keeps
    /// the memory alive.
    pub(super) fn export(&self, metadata: &ExportMetadata) -> Result<OwnedFd> {
        let fd = open_node(CONTROL_NODE)?;
        let mut objects = [0; MAX_EXPORTED];
        objects[0] = self.handle;
        let mut export = ExportObjects {
            fd: fd.as_raw_fd(),
            device: self.gpu.device,
            max_objects: 1,
            metadata: *metadata,
            objects,
            count: 1,
            first: 0,
        };
        let client = &self.client;
        let status = client.control(client.handle, CONTROL_EXPORT_OBJECTS, &mut export)?;
        check("export a memory object", status)?;
        Ok(fd)
    }
}

impl Drop for Object {
    fn drop(&mut self) {
        let mut free = Free {
            client: self.client.handle,
            parent: self.gpu.device,
            object: self.handle,
            ..Free::default()
        };
        report(call(&self.client.control, request::FREE, &mut free), free.status, "freed");
    }
}

/// A mapping prepared by RM; released on drop.
pub(super) struct Mapping {
    object: Object,
    linear: u64,
}

impl Drop for Mapping {
    fn drop(&mut self) {
        let client = &self.object.client;
        let mut unmap = Unmap {
            client: client.handle,
            device: self.object.gpu.device,
            memory: self.object.handle,
            linear: self.linear,
            ..Unmap::default()
        };
        report(call(&client.control, request::UNMAP, &mut unmap), unmap.status, "unmapped");
    }
}

fn report(outcome: Result<()>, status: u32, what: &str) {
    if let Err(error) = outcome.and_then(|()| check("release memory", status)) {
        tracing::warn!(%error, "a window's memory was not {what}");
    }
}

fn open_node(path: &str) -> Result<OwnedFd> {
    // The standard library opens files with close-on-exec.
    File::options().read(true).write(true).open(path).map(OwnedFd::from).map_err(|error| {
        Error::os("map GPU memory", &error).on(path.to_owned()).fix(format!(
            "give this user read and write access to {path} (in a container: NVIDIA runtime)"
        ))
    })
}

/// Issues one ioctl.
fn call<T>(fd: &OwnedFd, number: u32, argument: &mut T) -> Result<()> {
    const READ_AND_WRITE: u64 = 3;
    let size = size_of::<T>() as u64;
    let code = READ_AND_WRITE << 30 | size << 16 | u64::from(b'F') << 8 | u64::from(number);
    // SAFETY: the request code contains the argument's size, and each caller passes the structure
    // that belongs to the request number; the kernel checks pointers inside it.
    let done = unsafe { libc::ioctl(fd.as_raw_fd(), code, std::ptr::from_mut(argument)) };
    if done >= 0 {
        return Ok(());
    }
    let error = std::io::Error::last_os_error();
    Err(Error::os(format!("issue ioctl {number:#x}"), &error).on("the resource manager"))
}

/// Checks RM's own status code, which is returned inside the structure.
fn check(what: &'static str, status: u32) -> Result<()> {
    let (kind, meaning) = match status {
        0 => return Ok(()),
        0x1a => (Kind::OutOfMemory, "insufficient resources: the BAR1 window may be full"),
        0x1b => (Kind::PermissionDenied, "insufficient permissions"),
        0x1f => (Kind::InvalidArgument, "invalid argument"),
        0x51 => (Kind::OutOfMemory, "no memory"),
        0x56 => (Kind::Unsupported, "not supported"),
        0x57 => (Kind::Stale, "no such object"),
        _ => (Kind::Unsupported, "see the driver's nvstatuscodes.h"),
    };
    let error = Error::new(kind, what)
        .on("the resource manager")
        .why(format!("status {status:#x} ({meaning})"));
    Err(match status {
        0x1a => error.fix(
            "close windows that are not needed, or configure a larger BAR1 in the firmware \
             (Resizable BAR)",
        ),
        _ => error,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_that_cannot_be_opened_is_named_with_the_fix() {
        let error = open_node("/dev/no-such-node-of-nvidias").unwrap_err();
        assert_eq!(error.kind(), &Kind::Unavailable);
        let text = error.to_string();
        assert!(text.contains("/dev/no-such-node-of-nvidias"), "{text}");
        assert!(text.contains("read and write access to"), "{text}");
        // A directory cannot be opened for writing, not even by root.
        assert!(open_node("/dev").is_err());
    }

    #[test]
    fn status_codes_are_explained() {
        assert!(check("map", 0).is_ok());
        for (status, kind, says) in [
            (0x1a, Kind::OutOfMemory, "BAR1"),
            (0x1b, Kind::PermissionDenied, "permissions"),
            (0x57, Kind::Stale, "no such object"),
            (0xdead, Kind::Unsupported, "0xdead"),
        ] {
            let error = check("map the memory", status).unwrap_err();
            assert_eq!(error.kind(), &kind);
            assert!(error.to_string().contains(says), "{error}");
        }
    }

    #[test]
    fn ioctls_to_another_file_fail_cleanly() {
        let file = OwnedFd::from(File::open("/dev/null").unwrap());
        let mut alloc = Alloc::default();
        assert!(call(&file, request::ALLOC, &mut alloc).is_err());
    }
}

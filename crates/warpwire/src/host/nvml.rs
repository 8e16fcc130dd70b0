//! NVLinks between GPUs, from NVIDIA's management library (NVML), loaded at run time.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

use libloading::Library;

use super::PciAddress;
use crate::error::{Error, Kind, Result};

/// The library that NVIDIA's driver installs.
const LIBRARY: &str = "libnvidia-ml.so.1";
/// Names another file.
const VARIABLE: &str = "WARPWIRE_NVML";

const SUCCESS: c_int = 0;
const SWITCH: c_int = 2;
/// More than any GPU has (18 on Hopper and Blackwell); the library refuses numbers beyond its own.
const MAX_LINKS: c_uint = 64;

/// What an NVLink leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum NvLinkPeer {
    /// The GPU with this address.
    Gpu(PciAddress),
    /// An NVSwitch, which connects all GPUs that have links to it.
    Switch,
}

/// The active NVLinks of a GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuLinks {
    /// The GPU.
    pub address: PciAddress,
    /// The NUMA node that its memory is, where CPUs and GPUs share memory (Grace); else `None`.
    pub numa_node: Option<u32>,
    /// The other end of each active link, in order of their numbers.
    pub links: Vec<NvLinkPeer>,
}

/// The active NVLinks of each GPU. Loads `libnvidia-ml.so.1`, or the file that `WARPWIRE_NVML`
/// names; takes about as long as `nvidia-smi -L`.
///
/// # Errors
/// [`Kind::Unavailable`] if there is no such library, it lacks a symbol, or it finds no driver.
pub fn gpu_links() -> Result<Vec<GpuLinks>> {
    match std::env::var(VARIABLE) {
        Ok(file) if !file.is_empty() => links_by(&file),
        _ => links_by(LIBRARY),
    }
}

fn links_by(file: &str) -> Result<Vec<GpuLinks>> {
    let nvml = Nvml::open(file)?;
    let mut count = 0;
    // SAFETY: the library is initialized, and writes one number.
    nvml.check("nvmlDeviceGetCount_v2", unsafe { (nvml.functions.count)(&mut count) })?;
    (0..count).map(|index| nvml.gpu(index)).collect()
}

type Device = *mut c_void;

/// `nvmlPciInfo_t`.
#[repr(C)]
struct PciInfo {
    legacy_id: [c_char; 16],
    domain: c_uint,
    bus: c_uint,
    device: c_uint,
    device_id: c_uint,
    subsystem_id: c_uint,
    id: [c_char; 32],
}

const _: () = assert!(size_of::<PciInfo>() == 68);

impl PciInfo {
    const EMPTY: Self = Self {
        legacy_id: [0; 16],
        domain: 0,
        bus: 0,
        device: 0,
        device_id: 0,
        subsystem_id: 0,
        id: [0; 32],
    };

    fn address(&self) -> Option<PciAddress> {
        let (bus, device) = (u8::try_from(self.bus).ok()?, u8::try_from(self.device).ok()?);
        (device < 32).then_some(PciAddress { domain: self.domain, bus, device, function: 0 })
    }
}

/// Declares the table of functions. Those behind `|` may be absent.
macro_rules! functions {
    (
        $($field:ident = $symbol:literal ($($parameter:ty),*) -> $result:ty;)* |
        $($optional:ident = $name:literal ($($type:ty),*) -> $out:ty;)*
    ) => {
        struct Functions {
            $($field: unsafe extern "C" fn($($parameter),*) -> $result,)*
            $($optional: Option<unsafe extern "C" fn($($type),*) -> $out>,)*
        }

        impl Functions {
            /// The functions, or the name of the first that is absent.
            fn load(library: &Library) -> std::result::Result<Self, &'static str> {
                // SAFETY: each signature is what nvml.h declares for that symbol.
                unsafe {
                    Ok(Self {
                        $($field: *library.get($symbol.as_bytes()).map_err(|_| $symbol)?,)*
                        $($optional: library.get($name.as_bytes()).ok().map(|found| *found),)*
                    })
                }
            }
        }
    };
}

functions! {
    init = "nvmlInit_v2"() -> c_int;
    shutdown = "nvmlShutdown"() -> c_int;
    error_string = "nvmlErrorString"(c_int) -> *const c_char;
    count = "nvmlDeviceGetCount_v2"(*mut c_uint) -> c_int;
    handle = "nvmlDeviceGetHandleByIndex_v2"(c_uint, *mut Device) -> c_int;
    pci = "nvmlDeviceGetPciInfo_v3"(Device, *mut PciInfo) -> c_int;
    link_state = "nvmlDeviceGetNvLinkState"(Device, c_uint, *mut c_int) -> c_int;
    remote_pci = "nvmlDeviceGetNvLinkRemotePciInfo_v2"(Device, c_uint, *mut PciInfo) -> c_int;
    |
    remote_type = "nvmlDeviceGetNvLinkRemoteDeviceType"(Device, c_uint, *mut c_int) -> c_int;
    numa_node = "nvmlDeviceGetNumaNodeId"(Device, *mut c_uint) -> c_int;
}

/// The loaded and initialized library.
struct Nvml {
    functions: Functions,
    /// Keeps the library loaded: the functions point into it.
    _library: Library,
}

impl Nvml {
    fn open(file: &str) -> Result<Self> {
        let failed = |why: String| {
            Error::new(Kind::Unavailable, "find NVLinks").why(why).fix(
                "install the driver's management library (Debian: libnvidia-ml1); in a \
                      container, NVIDIA_DRIVER_CAPABILITIES=compute,utility",
            )
        };
        // SAFETY: loading the vendor's library runs its initializers, which have no preconditions.
        let library = unsafe { Library::new(file) }.map_err(|error| {
            let detail = std::error::Error::source(&error);
            let detail = detail.map_or(error.to_string(), ToString::to_string);
            match detail.contains("No such file") {
                true => failed(format!("{file} is not installed")),
                false => failed(format!("{file} does not load: {detail}")),
            }
        })?;
        let functions = Functions::load(&library)
            .map_err(|symbol| failed(format!("{file} has no symbol {symbol}")))?;
        // SAFETY: no preconditions; each success is followed by one shutdown, in `drop`.
        let code = unsafe { (functions.init)() };
        if code != SUCCESS {
            return Err(failed(format!("nvmlInit_v2: {}", text(&functions, code))));
        }
        Ok(Self { functions, _library: library })
    }

    fn check(&self, function: &str, code: c_int) -> Result<()> {
        match code {
            SUCCESS => Ok(()),
            code => Err(Error::new(Kind::Unavailable, "find NVLinks")
                .why(format!("{function}: {}", text(&self.functions, code)))),
        }
    }

    fn gpu(&self, index: c_uint) -> Result<GpuLinks> {
        let functions = &self.functions;
        let mut device: Device = std::ptr::null_mut();
        // SAFETY: the library is initialized, and writes a handle.
        let code = unsafe { (functions.handle)(index, &mut device) };
        self.check("nvmlDeviceGetHandleByIndex_v2", code)?;
        let mut pci = PciInfo::EMPTY;
        // SAFETY: the handle is of this library; it fills the structure.
        let code = unsafe { (functions.pci)(device, &mut pci) };
        self.check("nvmlDeviceGetPciInfo_v3", code)?;
        let address = pci.address().ok_or_else(|| {
            Error::new(Kind::Malformed, "find NVLinks").why("a GPU has no valid PCI address")
        })?;
        let mut node = 0;
        // SAFETY: as above; it writes one number.
        let node = functions
            .numa_node
            .and_then(|query| (unsafe { query(device, &mut node) } == SUCCESS).then_some(node));
        let links = (0..MAX_LINKS).filter_map(|link| self.link(device, link)).collect();
        Ok(GpuLinks { address, numa_node: node, links })
    }

    /// The other end of a link; `None` if it does not exist, is not active, or leads elsewhere.
    fn link(&self, device: Device, link: c_uint) -> Option<NvLinkPeer> {
        let functions = &self.functions;
        let mut active = 0;
        // SAFETY: the handle is of this library, which refuses links that do not exist.
        let code = unsafe { (functions.link_state)(device, link, &mut active) };
        if code != SUCCESS || active != 1 {
            return None;
        }
        let mut kind = 0;
        // SAFETY: as above; it writes one number.
        let known = functions
            .remote_type
            .is_some_and(|query| unsafe { query(device, link, &mut kind) } == SUCCESS);
        if known && kind == SWITCH {
            return Some(NvLinkPeer::Switch);
        }
        let mut pci = PciInfo::EMPTY;
        // SAFETY: as above; it fills the structure.
        let code = unsafe { (functions.remote_pci)(device, link, &mut pci) };
        if code != SUCCESS { None } else { pci.address().map(NvLinkPeer::Gpu) }
    }
}

impl Drop for Nvml {
    fn drop(&mut self) {
        // SAFETY: initialized once by `open`, and no handle outlives this value.
        unsafe { (self.functions.shutdown)() };
    }
}

fn text(functions: &Functions, code: c_int) -> String {
    // SAFETY: any number is allowed.
    let text = unsafe { (functions.error_string)(code) };
    if text.is_null() {
        return format!("error {code}");
    }
    // SAFETY: not null, so it points to a static NUL-terminated string.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    /// A library with NVML's symbols: two GPUs with three links to each other, one of which is
    /// down, and one link to a switch.
    const FAKE: &str = r#"
        #include <string.h>
        struct pci { char legacy[16]; unsigned domain, bus, device, a, b; char id[32]; };
        static int ready;
        int nvmlInit_v2(void) { ready = 1; return FAIL; }
        int nvmlShutdown(void) { ready = 0; return 0; }
        const char *nvmlErrorString(int code) { return code == 9 ? "Driver Not Loaded" : 0; }
        int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return ready ? 0 : 1; }
        int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **d) { *d = (void *)(long)(i + 1); return 0; }
        static int fill(long d, struct pci *p) {
            memset(p, 0, sizeof *p); p->domain = 0; p->bus = d == 1 ? 0x17 : 0x65; return 0;
        }
        int nvmlDeviceGetPciInfo_v3(void *d, struct pci *p) { return fill((long)d, p); }
        int nvmlDeviceGetNvLinkState(void *d, unsigned link, int *active) {
            if (link > 3) return 2;
            *active = link != 1;
            return 0;
        }
        int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *d, unsigned link, struct pci *p) {
            return fill(3 - (long)d, p);
        }
        #ifndef OLD
        int nvmlDeviceGetNvLinkRemoteDeviceType(void *d, unsigned link, int *kind) {
            *kind = link == 3 ? 2 : 0;
            return 0;
        }
        int nvmlDeviceGetNumaNodeId(void *d, unsigned *node) { *node = 4; return (long)d == 1 ? 0 : 3; }
        #endif
    "#;

    /// Compiles the library; `None` if there is no C compiler.
    fn fake(folder: &std::path::Path, options: &[&str]) -> Option<String> {
        let [source, library] = ["nvml.c", "libnvml.so"].map(|name| folder.join(name));
        std::fs::write(&source, FAKE).unwrap();
        let mut cc = Command::new("cc");
        cc.args(["-shared", "-fPIC"]).args(options).arg(&source).arg("-o").arg(&library);
        match cc.output() {
            Ok(output) => {
                assert!(output.status.success(), "{output:?}");
                Some(library.to_str().unwrap().to_owned())
            }
            Err(why) => {
                println!("skipped: no C compiler ({why})");
                None
            }
        }
    }

    #[test]
    fn links_are_read_from_the_library() {
        let folder = tempfile::tempdir().unwrap();
        let Some(library) = fake(folder.path(), &["-DFAIL=0"]) else { return };
        let [a, b] = ["0000:17:00.0", "0000:65:00.0"].map(|text| text.parse().unwrap());
        let found = links_by(&library).unwrap();
        let links = |peer| vec![NvLinkPeer::Gpu(peer), NvLinkPeer::Gpu(peer), NvLinkPeer::Switch];
        assert_eq!(found[0], GpuLinks { address: a, numa_node: Some(4), links: links(b) });
        assert_eq!(found[1], GpuLinks { address: b, numa_node: None, links: links(a) });
    }

    #[test]
    fn an_older_library_has_no_kinds_of_peers() {
        let folder = tempfile::tempdir().unwrap();
        let Some(library) = fake(folder.path(), &["-DFAIL=0", "-DOLD"]) else { return };
        let found = links_by(&library).unwrap();
        assert_eq!((found[0].links.len(), found[0].numa_node), (3, None));
    }

    #[test]
    fn failures_have_a_reason_and_a_fix() {
        let missing = links_by("libnvidia-ml-that-is-not-there.so.1").unwrap_err().to_string();
        assert!(missing.contains("is not installed") && missing.contains("utility"), "{missing}");
        let other = links_by("libc.so.6").unwrap_err().to_string();
        assert!(other.contains("no symbol nvmlInit_v2"), "{other}");
        let folder = tempfile::tempdir().unwrap();
        let Some(library) = fake(folder.path(), &["-DFAIL=9"]) else { return };
        let failed = links_by(&library).unwrap_err().to_string();
        assert!(failed.contains("nvmlInit_v2: Driver Not Loaded"), "{failed}");
    }
}

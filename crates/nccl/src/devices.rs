//! Devices: one per usable network interface, or as `WARPWIRE_NCCL_DEVICES` says. Each has several
//! engines, which are software HCAs of their own: a connection has a queue pair on each, so that
//! its messages are moved by several threads.

use std::ffi::CString;
use std::net::{IpAddr, SocketAddr};
use std::sync::OnceLock;

use parking_lot::Mutex;
use warpwire::host::System;
use warpwire::link::{Auto, Shm, ShmOptions, Udp, UdpOptions};
use warpwire::verbs::{Context, HcaOptions};
use warpwire_cabi::interfaces::{self, Choice};

use crate::abi::{MAX_RECVS, PTR_CUDA, PTR_HOST, PropertiesV8, PropertiesV9, VirtualDevices};
use crate::log;
use crate::result::{Failure, INVALID_ARGUMENT, Result, SYSTEM};
use crate::settings::{LinkChoice, Settings};

/// Messages that are announced as the largest; longer ones work up to 2 GiB.
const MAX_BYTES: usize = 1 << 30;
/// Latency of a message in µs, for the choice of algorithms.
const LATENCY: f32 = 10.0;
const MAX_COMMS: i32 = 1 << 16;

pub(crate) struct Device {
    name: CString,
    pci_path: Option<CString>,
    guid: u64,
    speed: u32,
    /// GPU memory is announced.
    gdr: bool,
    pub ip: IpAddr,
    /// Opened with the first connection.
    engines: Engines,
    /// For device-initiated networking, where it cannot share them.
    gin_engines: Engines,
}

/// Engines that are opened when they are needed.
#[derive(Default)]
struct Engines {
    contexts: OnceLock<Vec<Context>>,
    opening: Mutex<()>,
}

struct Devices {
    settings: Settings,
    list: Vec<Device>,
}

static DEVICES: OnceLock<std::result::Result<Devices, String>> = OnceLock::new();

fn devices() -> Result<&'static Devices> {
    let made = DEVICES.get_or_init(|| {
        let settings = Settings::from_env()?;
        let (addresses, route) = (interfaces::addresses(), interfaces::default_route());
        let chosen = interfaces::choose(&settings.devices, &addresses, route)
            .map_err(|why| format!("WARPWIRE_NCCL_DEVICES: {why}"))?;
        if chosen.is_empty() {
            return Err("no network interface is up and has an address".to_owned());
        }
        let list = chosen.iter().map(|choice| Device::new(choice, &settings)).collect();
        Ok(Devices { settings, list })
    });
    made.as_ref().map_err(|why| Failure::new(SYSTEM, why))
}

/// The settings and devices of this process, which stay what they are.
pub(crate) fn all() -> Result<(&'static Settings, &'static [Device])> {
    devices().map(|known| (&known.settings, known.list.as_slice()))
}

/// # Errors
/// If there is no device of this number.
pub(crate) fn get(number: i32) -> Result<&'static Device> {
    let (_, list) = all()?;
    let device = usize::try_from(number).ok().and_then(|number| list.get(number));
    device.ok_or_else(|| {
        Failure::new(INVALID_ARGUMENT, format!("there is no device {number} of {}", list.len()))
    })
}

/// All engines that are open.
pub(crate) fn open_engines() -> impl Iterator<Item = &'static Context> {
    let list = DEVICES.get().and_then(|made| made.as_ref().ok());
    let list = list.into_iter().flat_map(|known| &known.list);
    let sets = list.flat_map(|device| [&device.engines, &device.gin_engines]);
    sets.filter_map(|engines| engines.contexts.get()).flatten()
}

impl Device {
    fn new(choice: &Choice, settings: &Settings) -> Self {
        let Choice { name, at } = choice;
        let read = std::fs::read_to_string(format!("/sys/class/net/{}/speed", at.name));
        let known = read.ok().and_then(|text| text.trim().parse().ok());
        Self {
            name: CString::new(name.as_str()).unwrap_or_default(),
            // Close to a GPU, NCCL would choose the protocol LL128: see `gdr`.
            pci_path: if settings.gdr { None } else { pci_path(&at.name) },
            guid: guid(&at.name, at.ip),
            speed: settings.speed(known),
            gdr: settings.gdr,
            ip: at.ip,
            engines: Engines::default(),
            gin_engines: Engines::default(),
        }
    }

    /// Its engines, opened if they were not.
    pub(crate) fn engines(&self) -> Result<&[Context]> {
        let (settings, _) = all()?;
        // Direct access runs the engine in the thread that posts. Engines with threads of their own
        // would contend with it; and GPU memory: see `gin_engines`.
        self.opened(&self.engines, settings, !settings.is_threaded() && !settings.gdr)
    }

    /// The engines for device-initiated networking. They do not access memory directly: GPU memory
    /// is then copied by kernels, which may wait for the very kernels that wait for the data.
    pub(crate) fn gin_engines(&self) -> Result<&[Context]> {
        let (settings, _) = all()?;
        match settings.is_threaded() || settings.gdr {
            true => self.engines(),
            false => self.opened(&self.gin_engines, settings, false),
        }
    }

    fn opened<'a>(
        &self,
        engines: &'a Engines,
        settings: &Settings,
        is_direct: bool,
    ) -> Result<&'a [Context]> {
        if let Some(contexts) = engines.contexts.get() {
            return Ok(contexts);
        }
        let _only = engines.opening.lock();
        if let Some(contexts) = engines.contexts.get() {
            return Ok(contexts);
        }
        let contexts = (0..settings.engines).map(|_| self.open(settings, is_direct));
        let contexts = contexts.collect::<warpwire::Result<Vec<Context>>>()?;
        let path = contexts.first().map(|context| context.path().to_string()).unwrap_or_default();
        let mode = match settings.is_threaded() {
            true => "a thread each",
            false => "run by NCCL's threads",
        };
        let (name, count) = (self.name.to_string_lossy(), contexts.len());
        log::info(format_args!("{name}: {count} engines, {mode}, on {path}"));
        Ok(engines.contexts.get_or_init(|| contexts))
    }

    fn open(&self, settings: &Settings, is_direct: bool) -> warpwire::Result<Context> {
        let at = SocketAddr::new(self.ip, 0);
        // A receiver sees its data before the step that received it ends, and may close the
        // connection then: its acknowledgement must not wait for the next step.
        let options = HcaOptions::default()
            .with_progress_mode(settings.progress_mode)
            .with_immediate_acks(true)
            .with_direct(is_direct);
        let (udp, shm) = (UdpOptions::from_env()?, ShmOptions::from_env()?);
        match settings.link {
            LinkChoice::Auto => Context::open_with(Auto::bind(at, udp, shm)?, options),
            LinkChoice::Shm => Context::open_with(Shm::bind(at, shm)?, options),
            LinkChoice::Udp => Context::open_with(Udp::bind(at, udp)?, options),
        }
    }

    /// One line for people.
    pub(crate) fn describe(&self) -> String {
        format!("{} ({}, {} Mbit/s)", self.name.to_string_lossy(), self.ip, self.speed)
    }

    fn pci_path(&self) -> *const std::ffi::c_char {
        self.pci_path.as_ref().map_or(std::ptr::null(), |path| path.as_ptr())
    }

    /// Of host memory only: this version cannot ask for flushes, which GPU memory needs.
    pub(crate) fn properties_v8(&self) -> PropertiesV8 {
        PropertiesV8 {
            name: self.name.as_ptr(),
            pci_path: self.pci_path(),
            guid: self.guid,
            ptr_support: PTR_HOST,
            reg_is_global: 0,
            speed: self.speed as i32,
            port: 1,
            latency: LATENCY,
            max_comms: MAX_COMMS,
            max_recvs: MAX_RECVS as i32,
            net_device_type: 0,
            net_device_version: 0,
        }
    }

    /// The properties of versions 9 and later for the device of this number.
    pub(crate) fn properties<const N: usize>(&self, number: i32) -> PropertiesV9<N> {
        let v8 = self.properties_v8();
        let mut devices = [0; N];
        devices[0] = number;
        PropertiesV9 {
            name: v8.name,
            pci_path: v8.pci_path,
            guid: v8.guid,
            ptr_support: if self.gdr { PTR_HOST | PTR_CUDA } else { PTR_HOST },
            reg_is_global: v8.reg_is_global,
            force_flush: i32::from(self.gdr),
            speed: v8.speed,
            port: v8.port,
            latency: v8.latency,
            max_comms: v8.max_comms,
            max_recvs: v8.max_recvs,
            net_device_type: v8.net_device_type,
            net_device_version: v8.net_device_version,
            virtual_devices: VirtualDevices { count: 1, devices },
            max_p2p_bytes: MAX_BYTES,
            max_coll_bytes: MAX_BYTES,
        }
    }
}

/// The PCI function behind an interface, in `/sys/devices`. NCCL attaches a device without one to
/// the CPU, which is where the software HCA runs.
fn pci_path(interface: &str) -> Option<CString> {
    let known =
        System::live().net_interfaces().into_iter().find(|known| known.name == interface)?;
    let path = std::fs::canonicalize(format!("/sys/bus/pci/devices/{}", known.address?)).ok()?;
    CString::new(path.into_os_string().into_encoded_bytes()).ok()
}

/// Tells devices of one machine apart (FNV-1a).
fn guid(interface: &str, ip: IpAddr) -> u64 {
    let text = format!("{interface} {ip}");
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

//! The device, memory and CPU window that the tools work on.

use std::time::{Duration, Instant};

use clap::Args;
use serde::Serialize;
use warpwire::mem::cuda::DriverCopies;
use warpwire::mem::{
    self, Allocation, Backend, Device, MappingType, MemoryKind, Window, WindowOptions,
};
use warpwire::units;

use super::Failure;

#[derive(Args)]
pub(super) struct Target {
    #[command(flatten)]
    device: DeviceChoice,

    /// Kind of device memory: plain (cuMemAlloc), vmm (cuMemCreate) or pool (cuMemAllocAsync)
    #[arg(short = 'a', long, value_name = "KIND", default_value = "plain", value_parser = kind)]
    alloc: MemoryKind,

    /// Required mapping type: wc (write-combining), cache or device; `default` accepts any
    #[arg(short = 'M', long, value_name = "TYPE", default_value = "default",
        value_parser = mapping)]
    mapping: Mapping,
}

#[derive(Args)]
pub(crate) struct DeviceChoice {
    /// Device: cuda:N (or just N) or sim:N [default: the first CUDA device, else sim:0]
    #[arg(short = 'd', long, value_name = "DEVICE")]
    device: Option<String>,
}

/// The required mapping type, if any.
#[derive(Clone, Copy)]
struct Mapping(Option<MappingType>);

fn kind(text: &str) -> Result<MemoryKind, String> {
    match text.to_ascii_lowercase().as_str() {
        "plain" | "cumemalloc" => Ok(MemoryKind::Plain),
        "vmm" | "cumemcreate" => Ok(MemoryKind::Vmm),
        "pool" | "cumemallocasync" => Ok(MemoryKind::Pool),
        _ => Err("there is no such kind of device memory; write plain, vmm or pool".to_owned()),
    }
}

fn mapping(text: &str) -> Result<Mapping, String> {
    match text {
        "default" => Ok(Mapping(None)),
        "wc" => Ok(Mapping(Some(MappingType::WriteCombining))),
        "cache" | "cached" => Ok(Mapping(Some(MappingType::Cached))),
        "device" => Ok(Mapping(Some(MappingType::Device))),
        _ => Err("there is no such mapping type; write default, wc, cache or device".to_owned()),
    }
}

/// Parses a nonzero size, as in 64KiB.
pub(crate) fn size(text: &str) -> Result<u64, String> {
    match units::parse_bytes(text) {
        Ok(0) => Err("the size is zero; write at least 1".to_owned()),
        Ok(size) => Ok(size),
        Err(error) => Err(error.to_string()),
    }
}

/// Parses a nonzero number of iterations.
pub(crate) fn iterations(text: &str) -> Result<u32, String> {
    match text.parse() {
        Ok(0) => Err("the number is zero; write at least 1".to_owned()),
        Ok(number) => Ok(number),
        Err(_) => Err(format!("write a whole number from 1 to {}", u32::MAX)),
    }
}

impl DeviceChoice {
    /// Opens the requested device, or the default one with the reason if that is not a CUDA device.
    pub(crate) fn open(&self) -> Result<(Device, Option<String>), Failure> {
        let usage = |error: warpwire::Error| Failure::Usage(error.to_string());
        let Some(label) = &self.device else {
            return match mem::cuda::devices() {
                Ok(devices) if !devices.is_empty() => Ok((devices[0].clone(), None)),
                Ok(_) => Ok((mem::open("sim:0").map_err(usage)?, Some("no device".to_owned()))),
                Err(error) => {
                    Ok((mem::open("sim:0").map_err(usage)?, Some(error.reason().to_owned())))
                }
            };
        };
        let number = label.bytes().all(|byte| byte.is_ascii_digit()) && !label.is_empty();
        let label = if number { format!("cuda:{label}") } else { label.clone() };
        Ok((mem::open(&label).map_err(usage)?, None))
    }
}

impl Target {
    /// Opens the device, allocates `len` bytes and opens a window onto them.
    pub(super) fn open(&self, len: u64) -> Result<Bench, Failure> {
        let (device, no_cuda) = self.device.open()?;
        let total = device.info().total_memory;
        if len > total {
            let (requested, total) = (units::bytes(len), units::bytes(total));
            let label = device.label();
            return Err(Failure::Usage(format!(
                "cannot use {requested} on {label}: it has {total} in all; give a smaller size"
            )));
        }
        let memory = device.alloc_kind(len, self.alloc)?;
        let options = self.options()?;
        let start = Instant::now();
        let window = memory.window_with(0, len, &options)?;
        let first_window = start.elapsed();
        let info = device.info();
        let driver = match info.backend {
            Backend::Cuda => Some(DriverCopies::new(info.ordinal)?),
            Backend::Sim => None,
        };
        Ok(Bench { device, memory, window, no_cuda, options, first_window, driver })
    }

    fn options(&self) -> Result<WindowOptions, Failure> {
        let from_env =
            WindowOptions::from_env().map_err(|error| Failure::Usage(error.to_string()))?;
        Ok(from_env.with_mapping(self.mapping.0))
    }
}

/// A device, an allocation, and a window onto it.
pub(super) struct Bench {
    pub(super) device: Device,
    pub(super) memory: Allocation,
    pub(super) window: Window,
    pub(super) options: WindowOptions,
    /// Time to open `window`, the first of this process.
    pub(super) first_window: Duration,
    no_cuda: Option<String>,
    /// The driver's copies; `None` for the simulated GPU.
    driver: Option<DriverCopies>,
}

impl Bench {
    /// Waits for driver copies in flight.
    pub(super) fn engine_finish(&self) -> warpwire::Result<()> {
        self.driver.as_ref().map_or(Ok(()), DriverCopies::synchronize)
    }

    /// Copies to the device with the driver (cuMemcpyHtoD).
    pub(super) fn engine_write(&self, offset: u64, from: &[u8]) -> warpwire::Result<()> {
        match &self.driver {
            Some(driver) => driver.write(&self.memory, offset, from),
            None => self.memory.write(offset, from),
        }
    }

    /// Copies from the device with the driver (cuMemcpyDtoH).
    pub(super) fn engine_read(&self, offset: u64, into: &mut [u8]) -> warpwire::Result<()> {
        match &self.driver {
            Some(driver) => driver.read(&self.memory, offset, into),
            None => self.memory.read(offset, into),
        }
    }

    pub(super) fn setting(&self) -> Setting {
        let refused = self.window.rejected_paths().iter();
        Setting {
            device: self.device.label(),
            name: self.device.info().name.clone(),
            memory: self.memory.kind(),
            window: self.window.path().to_string(),
            mapping: self.window.mapping(),
            refused: refused.map(|r| format!("{}: {}", r.path, r.why.reason())).collect(),
            no_cuda: self.no_cuda.clone(),
            simulated: self.device.info().backend == Backend::Sim,
        }
    }
}

/// What was measured: the comment lines above every table.
#[derive(Serialize)]
pub(super) struct Setting {
    device: String,
    name: String,
    memory: MemoryKind,
    window: String,
    mapping: MappingType,
    /// Better window paths, and why they were refused.
    refused: Vec<String>,
    /// Why there is no CUDA device, if none was requested by name.
    no_cuda: Option<String>,
    simulated: bool,
}

impl Setting {
    pub(super) fn heading(&self, tool: &str) -> String {
        let Self { device, name, memory, window, mapping, .. } = self;
        let mut text = format!("# copy {tool} on {device} ({name}), {memory} memory\n");
        text += &format!("# window: {window}, {mapping}\n");
        for refused in &self.refused {
            text += &format!("# refused: {refused}\n");
        }
        if let Some(why) = &self.no_cuda {
            text += &format!("# no CUDA device: {why}\n");
        }
        if self.simulated {
            text += "# simulated: these figures are of host memory\n";
        }
        text
    }
}

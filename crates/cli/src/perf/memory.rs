//! Registered host or device memory, filled and verified with patterns.

use std::os::fd::AsFd;
use std::str::FromStr;

use clap::ValueEnum;
use warpwire::mem::{self, Allocation, Device, Window};
use warpwire::mr::HostMemory;
use warpwire::verbs::{Access, AttachMode, Context, DmaBufRange, MemorySource, Mr, Pd};
use warpwire_apps::pattern::fill_bytes;

/// How memory is registered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum RegisterBy {
    /// By handle
    Handle,
    /// By virtual address
    Address,
    /// By virtual address, with on-demand paging
    OnDemand,
    /// By dma-buf (host memory: by memfd)
    Dmabuf,
    /// By handle, staged through pinned memory by the copy engine: the fallback without a window
    Staged,
    /// By handle, by the copy engine only
    Engine,
}

/// The value of `--mem`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum MemoryChoice {
    Host,
    /// Memory of the device with this label.
    Device(String),
}

impl FromStr for MemoryChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = |rest: &str| rest.parse::<u32>().is_ok();
        match text.split_once(':') {
            None if text == "host" => Ok(Self::Host),
            Some(("sim" | "cuda", rest)) if number(rest) => Ok(Self::Device(text.to_owned())),
            _ => Err("there is no such memory; write host, sim:N or cuda:N".to_owned()),
        }
    }
}

impl std::fmt::Display for MemoryChoice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Host => f.pad("host"),
            Self::Device(label) => f.pad(label),
        }
    }
}

/// Registered memory, and the CPU's access to it.
#[derive(Debug)]
pub(crate) struct Buffer {
    pub(crate) mr: Mr,
    backing: Backing,
}

#[derive(Debug)]
enum Backing {
    Host(HostMemory),
    Device { memory: Allocation, window: Option<Window> },
}

/// Min length of host memory that uses huge pages.
const LARGE: u64 = 1 << 20;
/// Bytes filled or compared at a time.
const CHUNK: usize = 1 << 20;

impl Buffer {
    pub(crate) fn new(
        context: &Context,
        pd: &Pd,
        device: Option<&Device>,
        len: u64,
        by: RegisterBy,
    ) -> warpwire::Result<Self> {
        match device {
            None => {
                let memory = match len >= LARGE {
                    true => HostMemory::in_huge_pages(len)?,
                    false => HostMemory::new(len)?,
                };
                let range = DmaBufRange { fd: memory.as_fd(), offset: 0, len };
                let mr = match by {
                    RegisterBy::Dmabuf => {
                        context.register_dmabuf(pd, range, None, Access::ALL, AttachMode::Static)
                    }
                    RegisterBy::Address | RegisterBy::OnDemand => {
                        by_address(context, pd, memory.address(), len, by)
                    }
                    _ => context.register(pd, memory.clone(), Access::ALL),
                }?;
                Ok(Self { mr, backing: Backing::Host(memory) })
            }
            Some(device) => {
                let memory = device.alloc(len)?;
                let whole = || Ok::<_, warpwire::Error>(MemorySource::from(memory.whole()?));
                let mr = match by {
                    RegisterBy::Handle => context.register(pd, whole()?, Access::ALL),
                    RegisterBy::Staged => context.register(pd, whole()?.staged(), Access::ALL),
                    RegisterBy::Engine => {
                        context.register(pd, whole()?.without_window(), Access::ALL)
                    }
                    RegisterBy::Address | RegisterBy::OnDemand => {
                        by_address(context, pd, memory.address().raw(), len, by)
                    }
                    RegisterBy::Dmabuf => {
                        let buffer = memory.export_dmabuf(0, len)?;
                        let (range, rights) = ((&buffer).into(), Access::ALL);
                        context.register_dmabuf(pd, range, None, rights, AttachMode::Dynamic)
                    }
                }?;
                // Without a window the driver copies: slower, with the same result.
                let window = memory.window().ok();
                Ok(Self { mr, backing: Backing::Device { memory, window } })
            }
        }
    }

    /// True for host memory.
    pub(super) fn is_host(&self) -> bool {
        matches!(self.backing, Backing::Host(_))
    }

    pub(super) fn write(&self, at: u64, from: &[u8]) -> warpwire::Result<()> {
        match &self.backing {
            Backing::Host(memory) => memory.bytes().write(at, from),
            Backing::Device { memory, .. } => memory.write(at, from),
        }
    }

    fn read(&self, at: u64, into: &mut [u8]) -> warpwire::Result<()> {
        match &self.backing {
            Backing::Host(memory) => memory.bytes().read(at, into),
            Backing::Device { memory, .. } => memory.read(at, into),
        }
    }

    /// Reads one byte by the fastest path, for polling.
    #[inline]
    pub(super) fn byte(&self, at: u64) -> warpwire::Result<u8> {
        let mut byte = [0];
        match &self.backing {
            Backing::Host(memory) => return memory.bytes().load_u8(at),
            Backing::Device { window: Some(window), .. } => window.read(at, &mut byte)?,
            Backing::Device { memory, .. } => memory.read(at, &mut byte)?,
        }
        Ok(byte[0])
    }

    #[inline]
    pub(super) fn set_byte(&self, at: u64, value: u8) -> warpwire::Result<()> {
        match &self.backing {
            Backing::Host(memory) => memory.bytes().write(at, &[value]),
            Backing::Device { window: Some(window), .. } => window.write(at, &[value]),
            Backing::Device { memory, .. } => memory.write(at, &[value]),
        }
    }

    /// Reads a 64-bit word in native byte order.
    pub(super) fn word(&self, at: u64) -> warpwire::Result<u64> {
        let mut word = [0; 8];
        self.read(at, &mut word)?;
        Ok(u64::from_ne_bytes(word))
    }

    pub(crate) fn fill(&self, at: u64, len: u64, seed: u64) -> warpwire::Result<()> {
        let mut chunk = vec![0; CHUNK];
        each_chunk(len, |done, step| {
            fill_bytes(&mut chunk[..step], seed, done);
            self.write(at + done, &chunk[..step])
        })
    }

    pub(super) fn zero(&self, at: u64, len: u64) -> warpwire::Result<()> {
        let zeros = vec![0; CHUNK];
        each_chunk(len, |done, step| self.write(at + done, &zeros[..step]))
    }

    /// Offset from `at` of the first byte that differs from the pattern of [`Buffer::fill`].
    pub(crate) fn first_mismatch(
        &self,
        at: u64,
        len: u64,
        seed: u64,
    ) -> warpwire::Result<Option<u64>> {
        self.first_mismatch_or_zero(at, len, seed, false)
    }

    /// As [`Buffer::first_mismatch`]; if `may_be_zero`, a zero matches too: memory that no message
    /// has reached.
    pub(super) fn first_mismatch_or_zero(
        &self,
        at: u64,
        len: u64,
        seed: u64,
        may_be_zero: bool,
    ) -> warpwire::Result<Option<u64>> {
        let (mut found, mut wanted) = (vec![0; CHUNK], vec![0; CHUNK]);
        let mut wrong = None;
        each_chunk(len, |done, step| {
            if wrong.is_some() {
                return Ok(());
            }
            self.read(at + done, &mut found[..step])?;
            fill_bytes(&mut wanted[..step], seed, done);
            let (found, wanted) = (&found[..step], &wanted[..step]);
            if found != wanted {
                let is_wrong =
                    |(&found, &wanted): (&u8, &u8)| found != wanted && !(may_be_zero && found == 0);
                let differs = found.iter().zip(wanted).position(is_wrong);
                wrong = differs.map(|index| done + index as u64);
            }
            Ok(())
        })?;
        Ok(wrong)
    }
}

#[allow(unsafe_code)]
fn by_address(
    context: &Context,
    pd: &Pd,
    address: u64,
    len: u64,
    by: RegisterBy,
) -> warpwire::Result<Mr> {
    let rights = match by {
        // The kernel copies on-demand memory, and its copies have no atomic operations.
        RegisterBy::OnDemand => {
            Access::LOCAL_WRITE | Access::REMOTE_READ | Access::REMOTE_WRITE | Access::ON_DEMAND
        }
        _ => Access::ALL,
    };
    // SAFETY: a `Buffer` keeps the memory allocated for as long as its registration, and accesses
    // it through shared views only.
    unsafe { context.register_address(pd, address, len, None, rights) }
}

fn each_chunk(
    len: u64,
    mut act: impl FnMut(u64, usize) -> warpwire::Result<()>,
) -> warpwire::Result<()> {
    let mut done = 0;
    while done < len {
        let step = (len - done).min(CHUNK as u64);
        act(done, step as usize)?;
        done += step;
    }
    Ok(())
}

/// Opens the device of `choice`; `None` for host memory.
pub(crate) fn device(choice: &MemoryChoice) -> warpwire::Result<Option<Device>> {
    match choice {
        MemoryChoice::Host => Ok(None),
        MemoryChoice::Device(label) => mem::open(label).map(Some),
    }
}

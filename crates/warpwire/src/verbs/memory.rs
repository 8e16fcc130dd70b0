//! Protection domains and registered memory, of either sort of device.
#![allow(unsafe_code)]

use std::sync::{Arc, OnceLock};

use crate::error::{Error, Kind, Result};
use crate::ibv;
use crate::mem::{self, DeviceAddr, DmaBuf, Pin, Region, Window, WindowOptions};
use crate::mr::{self, Access, Attach, DmaBufRange, Faults, Memory, Named, Path, Persistence};
use crate::units;
use crate::work::{Remote, Sge};

/// A protection domain: work of its queue pairs reaches memory of its registrations. Clones are the same one.
///
/// It is an [`mr::Pd`], which tells it from others. Of hardware it is made when it is first needed.
#[derive(Clone, Debug)]
pub struct Pd {
    id: mr::Pd,
    hardware: Option<Arc<Lazy>>,
}

#[derive(Debug)]
struct Lazy {
    context: ibv::Context,
    made: OnceLock<Result<ibv::Pd>>,
}

impl Pd {
    pub(super) fn soft(id: mr::Pd) -> Self {
        Self { id, hardware: None }
    }

    pub(super) fn hard(id: mr::Pd, context: ibv::Context) -> Self {
        Self { id, hardware: Some(Arc::new(Lazy { context, made: OnceLock::new() })) }
    }

    /// The domain, for a device of hardware.
    ///
    /// # Errors
    /// If the device has no room for another one, or it is one of the software HCA.
    pub(super) fn hardware(&self) -> Result<&ibv::Pd> {
        let lazy = self.hardware.as_ref().ok_or_else(foreign)?;
        lazy.made.get_or_init(|| lazy.context.create_pd()).as_ref().map_err(Clone::clone)
    }
}

#[cold]
fn foreign() -> Error {
    Error::new(Kind::InvalidArgument, "use a protection domain")
        .why("it was made by another context")
        .fix("make it by the one that uses it")
}

impl std::ops::Deref for Pd {
    type Target = mr::Pd;

    fn deref(&self) -> &mr::Pd {
        &self.id
    }
}

/// Registered memory. The registration ends when this is dropped.
#[derive(Debug)]
pub struct Mr(Arm);

#[derive(Debug)]
enum Arm {
    Soft(mr::Mr),
    Hard(Box<Hard>),
}

#[derive(Debug)]
struct Hard {
    mr: ibv::Mr,
    pd: Pd,
    path: Path,
    why: Vec<String>,
    named: Named,
    /// What it keeps, to be let go after it.
    _kept: Kept,
}

#[derive(Default)]
struct Kept {
    _memory: Option<Memory>,
    _window: Option<Window>,
    _buffer: Option<DmaBuf>,
    _pin: Option<Pin>,
}

impl std::fmt::Debug for Kept {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Kept")
    }
}

impl From<mr::Mr> for Mr {
    fn from(mr: mr::Mr) -> Self {
        Self(Arm::Soft(mr))
    }
}

/// The same question to either sort.
macro_rules! either {
    ($self:ident, $mr:ident => $answer:expr) => {
        match &$self.0 {
            Arm::Soft($mr) => $answer,
            Arm::Hard(hard) => {
                let $mr = &hard.mr;
                $answer
            }
        }
    };
}

impl Mr {
    /// `len` bytes of it, `offset` bytes from its beginning, for a work request. Nothing is checked here: a range
    /// that is not in it fails the work.
    pub fn sge(&self, offset: u64, len: u32) -> Sge {
        Sge { address: self.iova().wrapping_add(offset), len, lkey: self.lkey() }
    }

    /// The place `offset` bytes from its beginning, for a peer.
    pub fn remote(&self, offset: u64) -> Remote {
        Remote { address: self.iova().wrapping_add(offset), rkey: self.rkey() }
    }

    /// The key for this side's work requests.
    pub fn lkey(&self) -> u32 {
        either!(self, mr => mr.lkey())
    }

    /// The key for peers.
    pub fn rkey(&self) -> u32 {
        either!(self, mr => mr.rkey())
    }

    /// The address of its first byte, in work requests.
    pub fn iova(&self) -> u64 {
        either!(self, mr => mr.iova())
    }

    /// How many bytes.
    #[allow(clippy::len_without_is_empty)] // no registration is empty
    pub fn len(&self) -> u64 {
        either!(self, mr => mr.len())
    }

    /// What may be done with it.
    pub fn access(&self) -> Access {
        either!(self, mr => mr.access())
    }

    /// Its protection domain.
    pub fn pd(&self) -> &mr::Pd {
        match &self.0 {
            Arm::Soft(mr) => mr.pd(),
            Arm::Hard(hard) => &hard.pd,
        }
    }

    /// How the memory was named.
    pub fn named(&self) -> &Named {
        match &self.0 {
            Arm::Soft(mr) => mr.named(),
            Arm::Hard(hard) => &hard.named,
        }
    }

    /// The peer-memory client whose memory it is, if it was registered by its address.
    pub fn client(&self) -> Option<&str> {
        match self.named() {
            Named::Address { client, .. } => Some(client),
            Named::Handle | Named::DmaBuf(_) => None,
        }
    }

    /// How the memory is reached. Memory that is found on demand is found now.
    pub fn path(&self) -> Path {
        match &self.0 {
            Arm::Soft(mr) => mr.path(),
            Arm::Hard(hard) => hard.path,
        }
    }

    /// Why it is not reached in better ways, and what is not as it should be; empty where all is well.
    pub fn why(&self) -> Vec<String> {
        match &self.0 {
            Arm::Soft(mr) => mr.why(),
            Arm::Hard(hard) => hard.why.clone(),
        }
    }

    /// The device's last failure, after a [`Denied::Failed`](mr::Denied::Failed). Hardware tells none.
    pub fn failure(&self) -> Option<Error> {
        match &self.0 {
            Arm::Soft(mr) => mr.failure(),
            Arm::Hard(_) => None,
        }
    }

    /// How often its memory had to be found, if it is found on demand or may move. Hardware does not tell.
    pub fn faults(&self) -> Faults {
        match &self.0 {
            Arm::Soft(mr) => mr.faults(),
            Arm::Hard(_) => Faults::default(),
        }
    }

    /// Finds `len` bytes, `offset` into it, before they are needed, and waits until they are there.
    ///
    /// It does something for memory that the software HCA finds on demand, and nothing for other.
    pub fn prefetch(&self, offset: u64, len: u64) -> Result<()> {
        match &self.0 {
            Arm::Soft(mr) => mr.prefetch(offset, len),
            Arm::Hard(hard) => hard.check_inside(offset, len),
        }
    }

    /// As [`prefetch`](Self::prefetch), without waiting, and without a word when it fails.
    pub fn prefetch_later(&self, offset: u64, len: u64) -> Result<()> {
        match &self.0 {
            Arm::Soft(mr) => mr.prefetch_later(offset, len),
            Arm::Hard(hard) => hard.check_inside(offset, len),
        }
    }

    /// Whether the memory is still there for the key: not after it was freed under its registration.
    pub fn is_live(&self) -> bool {
        match &self.0 {
            Arm::Soft(mr) => mr.is_live(),
            Arm::Hard(_) => true,
        }
    }

    /// Ends the registration. When it returns, nobody uses the memory through it, and the key is dead.
    ///
    /// It waits for copies under way. A thread that holds a [`Span`](mr::Span) of it would wait for itself.
    pub fn deregister(self) {}
}

impl Hard {
    fn check_inside(&self, offset: u64, len: u64) -> Result<()> {
        if len > 0 && offset.checked_add(len).is_some_and(|end| end <= self.mr.len()) {
            return Ok(());
        }
        let what = format!("prefetch {len} bytes at offset {offset}");
        let why = format!("the registration has {} bytes", self.mr.len());
        Err(Error::new(Kind::OutOfRange, what).why(why))
    }
}

/// Registers memory with hardware: the host's own, or a device's by the best way that there is.
pub(super) fn register(
    pd: &Pd,
    memory: Memory,
    iova: Option<u64>,
    access: Access,
    named: Named,
) -> Result<Mr> {
    let what = || format!("register {}", units::bytes(memory.len()));
    check(&memory, iova, access).map_err(|error| error.during(what()))?;
    let domain = pd.hardware()?;
    if memory.is_host() {
        // SAFETY: the registration keeps the memory, which is shared memory of which nobody has references.
        let mr = unsafe { domain.register_address(memory.address(), memory.len(), iova, access) }?;
        let path = if access.contains(Access::ON_DEMAND) { Path::OnDemand } else { Path::Host };
        let kept = Kept { _memory: Some(memory), ..Kept::default() };
        return Ok(hard(pd, mr, (path, Vec::new()), named, kept));
    }
    let Some(region) = memory.device_region() else {
        return Err(Error::new(Kind::Unsupported, what())
            .why("its client copies it by itself, which no RDMA device can ask for")
            .fix("use the software HCA, or copy it through host memory"));
    };
    let (mr, path, why, kept) = device_memory(domain, &memory, region, iova, access)?;
    let kept = Kept { _memory: Some(memory), ..kept };
    Ok(hard(pd, mr, (path, why), named, kept))
}

fn hard(pd: &Pd, mr: ibv::Mr, way: (Path, Vec<String>), named: Named, kept: Kept) -> Mr {
    let (path, why) = way;
    Mr(Arm::Hard(Box::new(Hard { mr, pd: pd.clone(), path, why, named, _kept: kept })))
}

fn check(memory: &Memory, iova: Option<u64>, access: Access) -> Result<()> {
    access.check()?;
    let wrong = |why: String| Err(Error::new(Kind::InvalidArgument, "register memory").why(why));
    if memory.is_empty() {
        return wrong("it is empty".into());
    }
    match iova {
        Some(iova @ 1..) if access.contains(Access::ZERO_BASED) => {
            wrong(format!("it is zero-based, and yet should begin at {iova:#x}"))
                .map_err(|error| error.fix("leave one of the two out"))
        }
        Some(iova) if iova.checked_add(memory.len() - 1).is_none() => {
            wrong(format!("{} bytes from {iova:#x} on pass the last address", memory.len()))
        }
        _ => Ok(()),
    }
}

/// Memory of a GPU: by dma-buf, by its address, by its window, and else through pinned memory.
fn device_memory(
    domain: &ibv::Pd,
    memory: &Memory,
    region: &Region,
    iova: Option<u64>,
    access: Access,
) -> Result<(ibv::Mr, Path, Vec<String>, Kept)> {
    let (address, len) = (region.address().raw(), region.len());
    let begins = Some(iova.unwrap_or(address)).filter(|_| !access.contains(Access::ZERO_BASED));
    let (allocation, offset) = (region.allocation(), region.offset());
    let mut why = Vec::new();
    if memory.is_staged() {
        why.push("staged: it was asked for".into());
        let mr = domain.register_staged(region, begins, access)?;
        return Ok((mr, Path::Staged, why, Kept::default()));
    }
    let pin = allocation.pin()?;
    let by_buffer = allocation
        .export_dmabuf(offset, len)
        .and_then(|buffer| Ok((domain.register_dmabuf((&buffer).into(), begins, access)?, buffer)));
    match by_buffer {
        Ok((mr, buffer)) => {
            let kept = Kept { _buffer: Some(buffer), _pin: Some(pin), ..Kept::default() };
            return Ok((mr, Path::DmaBuf, why, kept));
        }
        Err(error) => why.push(format!("no dma-buf: {}", error.reason())),
    }
    // SAFETY: memory of a device, which nobody has references to; the registration keeps it.
    match unsafe { domain.register_address(address, len, begins, access) } {
        Ok(mr) => {
            return Ok((mr, Path::PeerMemory, why, Kept { _pin: Some(pin), ..Kept::default() }));
        }
        Err(error) => why.push(format!("no peer memory: {}", error.reason())),
    }
    if memory.is_without_window() {
        why.push("no window: it was registered without one".into());
    } else {
        let window = allocation.window_with(offset, len, &WindowOptions::default());
        let by_window = window.and_then(|window| {
            let start = window.as_ptr().as_ptr().expose_provenance() as u64;
            // SAFETY: a window, which is shared memory; the registration keeps it.
            let mr = unsafe { domain.register_address(start, len, begins, access) }?;
            Ok((mr, window))
        });
        match by_window {
            Ok((mr, window)) => {
                let path = Path::Window(window.path());
                let kept = Kept { _window: Some(window), _pin: Some(pin), ..Kept::default() };
                return Ok((mr, path, why, kept));
            }
            Err(error) => why.push(format!("no window: {}", error.reason())),
        }
    }
    match domain.register_staged(region, begins, access) {
        Ok(mr) => {
            why.push("staged: what is left, through pinned memory that is as long".into());
            Ok((mr, Path::Staged, why, Kept::default()))
        }
        Err(error) => {
            why.push(format!("not staged: {}", error.reason()));
            Err(unreachable_memory(len, &why))
        }
    }
}

#[cold]
fn unreachable_memory(len: u64, why: &[String]) -> Error {
    Error::new(Kind::Unsupported, format!("register {} of device memory", units::bytes(len)))
        .why(format!("the RDMA device cannot reach it ({})", why.join("; ")))
        .fix(
            "`modprobe nvidia-peermem`, or a kernel and driver with dma-buf support; else register it for this side \
             alone (local-write or nothing), which is staged, and have peers send, or let peers reach pinned host memory; \
             or use the software HCA, which stages for peers too",
        )
}

/// Registers memory by its address: a GPU's if a GPU of this process knows it, else the host's.
///
/// # Safety
/// As for [`mr::Registry::register_address`].
pub(super) unsafe fn register_address(
    pd: &Pd,
    (address, len): (u64, u64),
    iova: Option<u64>,
    access: Access,
) -> Result<Mr> {
    let named = |client: &str| Named::Address {
        client: client.to_owned(),
        persistence: Persistence::Persistent,
        page_size: rustix::param::page_size() as u64,
    };
    if len == 0 || address.checked_add(len).is_none() {
        let what = format!("register {} at {address:#x}", units::bytes(len));
        let why = "the range is empty, or passes the last address";
        return Err(Error::new(Kind::InvalidArgument, what).why(why));
    }
    if let Ok(device) = mem::owner_of(DeviceAddr::new(address)) {
        // SAFETY: the caller's promise.
        let memory = unsafe { device.borrow(DeviceAddr::new(address), len) }?;
        let client = device.info().backend.to_string();
        return register(
            pd,
            memory.whole()?.into(),
            iova.or(Some(address)),
            access,
            named(&client),
        );
    }
    // SAFETY: the caller's promise.
    let mr = unsafe { pd.hardware()?.register_address(address, len, iova, access) }?;
    let path = if access.contains(Access::ON_DEMAND) { Path::OnDemand } else { Path::Host };
    Ok(hard(pd, mr, (path, Vec::new()), named("host"), Kept::default()))
}

/// Registers a range of a dma-buf.
pub(super) fn register_dmabuf(
    pd: &Pd,
    range: DmaBufRange<'_>,
    iova: Option<u64>,
    access: Access,
    attach: Attach,
) -> Result<Mr> {
    let mr = pd.hardware()?.register_dmabuf(range, iova, access)?;
    // Drivers that can page let the exporter move it, and others pin it: nobody is asked.
    let way = (Path::DmaBuf, Vec::new());
    Ok(hard(pd, mr, way, Named::DmaBuf(attach), Kept::default()))
}

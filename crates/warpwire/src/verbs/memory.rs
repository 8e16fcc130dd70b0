//! Protection domains and memory regions, of the software HCA or of hardware.
#![allow(unsafe_code)]

use std::sync::{Arc, OnceLock};

use crate::error::{Error, Kind, Result};
use crate::ibv;
use crate::mem::{self, DeviceAddr, DmaBuf, PinGuard, Region, Window, WindowOptions};
use crate::mr::{
    self, Access, AccessPath, AttachMode, DmaBufRange, MemorySource, OdpStats, Persistence,
    RegisteredBy,
};
use crate::units;
use crate::work::{Remote, Sge};

/// A protection domain (`ibv_pd`): work of its queue pairs can only access its memory regions.
/// Clones refer to the same domain.
///
/// On hardware the `ibv_pd` is allocated on first use.
#[derive(Clone, Debug)]
pub struct Pd(PdBackend);

#[derive(Clone, Debug)]
enum PdBackend {
    Soft(mr::SoftPd),
    Hard(Arc<LazyPd>),
}

#[derive(Debug)]
struct LazyPd {
    context: ibv::Context,
    pd_cell: OnceLock<Result<ibv::Pd>>,
}

impl Pd {
    pub(super) fn of_soft(pd: mr::SoftPd) -> Self {
        Self(PdBackend::Soft(pd))
    }

    pub(super) fn of_hard(context: ibv::Context) -> Self {
        Self(PdBackend::Hard(Arc::new(LazyPd { context, pd_cell: OnceLock::new() })))
    }

    /// The domain of the software HCA, for use with its [`Registry`](mr::Registry).
    ///
    /// # Errors
    /// [`Kind::InvalidArgument`] if this domain belongs to hardware.
    pub fn soft(&self) -> Result<&mr::SoftPd> {
        match &self.0 {
            PdBackend::Soft(pd) => Ok(pd),
            PdBackend::Hard(_) => Err(wrong_context()),
        }
    }

    /// The hardware domain, allocated by the first call.
    ///
    /// # Errors
    /// If the device has no domain left, or this domain belongs to the software HCA.
    pub(super) fn hardware(&self) -> Result<&ibv::Pd> {
        let PdBackend::Hard(lazy_pd) = &self.0 else { return Err(wrong_context()) };
        lazy_pd.pd_cell.get_or_init(|| lazy_pd.context.create_pd()).as_ref().map_err(Clone::clone)
    }
}

impl PartialEq for Pd {
    /// Whether both are handles of one domain.
    fn eq(&self, other: &Self) -> bool {
        match (&self.0, &other.0) {
            (PdBackend::Soft(own), PdBackend::Soft(other)) => own.id() == other.id(),
            (PdBackend::Hard(own), PdBackend::Hard(other)) => Arc::ptr_eq(own, other),
            _ => false,
        }
    }
}

#[cold]
fn wrong_context() -> Error {
    Error::new(Kind::InvalidArgument, "use a protection domain")
        .why("it belongs to another context")
        .fix("create it from the context that uses it")
}

/// A memory region (`ibv_mr`). Dropping it deregisters the memory: see
/// [`deregister`](Mr::deregister).
#[derive(Debug)]
pub struct Mr(Backend);

#[derive(Debug)]
enum Backend {
    Soft(mr::SoftMr),
    Hard(Box<Hard>),
}

#[derive(Debug)]
struct Hard {
    mr: ibv::Mr,
    pd: Pd,
    path: AccessPath,
    why: Vec<String>,
    registered_by: RegisteredBy,
    /// Dropped after the registration: fields drop in order.
    _keep_alive: KeepAlive,
}

#[derive(Default)]
struct KeepAlive {
    _memory: Option<MemorySource>,
    _window: Option<Window>,
    _buffer: Option<DmaBuf>,
    _pin: Option<PinGuard>,
}

impl std::fmt::Debug for KeepAlive {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("KeepAlive")
    }
}

impl From<mr::SoftMr> for Mr {
    fn from(mr: mr::SoftMr) -> Self {
        Self(Backend::Soft(mr))
    }
}

/// Evaluates the same expression on either backend.
macro_rules! either {
    ($self:ident, $mr:ident => $answer:expr) => {
        match &$self.0 {
            Backend::Soft($mr) => $answer,
            Backend::Hard(hard) => {
                let $mr = &hard.mr;
                $answer
            }
        }
    };
}

impl Mr {
    /// A scatter-gather entry for `len` bytes at `offset`. Not checked here: work that names a
    /// range outside the region fails with
    /// [`LocalProtection`](crate::mlx5::Status::LocalProtection).
    pub fn sge(&self, offset: u64, len: u32) -> Sge {
        Sge { address: self.iova().wrapping_add(offset), len, lkey: self.lkey() }
    }

    /// The remote address of byte `offset` with its rkey, to be sent to a peer. Not checked here.
    pub fn remote(&self, offset: u64) -> Remote {
        Remote { address: self.iova().wrapping_add(offset), rkey: self.rkey() }
    }

    /// Local key, for the scatter-gather entries of this side's work requests.
    pub fn lkey(&self) -> u32 {
        either!(self, mr => mr.lkey())
    }

    /// Remote key, for RDMA operations of peers.
    pub fn rkey(&self) -> u32 {
        either!(self, mr => mr.rkey())
    }

    /// I/O virtual address: the address of the first byte in work requests.
    pub fn iova(&self) -> u64 {
        either!(self, mr => mr.iova())
    }

    /// Length in bytes; never 0.
    #[allow(clippy::len_without_is_empty)] // no registration is empty
    pub fn len(&self) -> u64 {
        either!(self, mr => mr.len())
    }

    /// Access flags given at registration.
    pub fn access(&self) -> Access {
        either!(self, mr => mr.access())
    }

    /// How many memory windows are bound to it; always 0 on hardware. Windows that still are when
    /// it is deregistered become invalid.
    pub fn bound_windows(&self) -> u32 {
        match &self.0 {
            Backend::Soft(mr) => mr.bound_windows(),
            Backend::Hard(_) => 0,
        }
    }

    /// Its protection domain.
    pub fn pd(&self) -> Pd {
        match &self.0 {
            Backend::Soft(mr) => Pd::of_soft(mr.pd().clone()),
            Backend::Hard(hard) => hard.pd.clone(),
        }
    }

    /// How the memory was named at registration: by a handle, an address or a dma-buf.
    pub fn registered_by(&self) -> &RegisteredBy {
        match &self.0 {
            Backend::Soft(mr) => mr.registered_by(),
            Backend::Hard(hard) => &hard.registered_by,
        }
    }

    /// Name of the peer-memory client that owns the memory, if it was registered by address.
    pub fn client(&self) -> Option<&str> {
        match self.registered_by() {
            RegisteredBy::Address { client, .. } => Some(client),
            RegisteredBy::Handle | RegisteredBy::DmaBuf(_) => None,
        }
    }

    /// How the device accesses the memory. For memory on demand this call resolves it.
    pub fn path(&self) -> AccessPath {
        match &self.0 {
            Backend::Soft(mr) => mr.path(),
            Backend::Hard(hard) => hard.path,
        }
    }

    /// Why no better access path is in use, and other findings; empty if there are none.
    pub fn why(&self) -> Vec<String> {
        match &self.0 {
            Backend::Soft(mr) => mr.why(),
            Backend::Hard(hard) => hard.why.clone(),
        }
    }

    /// Waits until everything that the software HCA wrote to the memory has reached its device: a
    /// PCIe round trip where there is a window. Returns at once for host memory and on hardware.
    pub fn flush(&self) {
        if let Backend::Soft(mr) = &self.0 {
            mr.flush();
        }
    }

    /// The device's last failure, after an [`AccessDenied::Failed`](mr::AccessDenied::Failed).
    /// Always `None` on hardware.
    pub fn failure(&self) -> Option<Error> {
        match &self.0 {
            Backend::Soft(mr) => mr.failure(),
            Backend::Hard(_) => None,
        }
    }

    /// Page fault counters of on-demand or dynamically attached memory. All zero on hardware.
    pub fn faults(&self) -> OdpStats {
        match &self.0 {
            Backend::Soft(mr) => mr.faults(),
            Backend::Hard(_) => OdpStats::default(),
        }
    }

    /// Prefetches `len` bytes at `offset` (as `ibv_advise_mr` does) and waits until they are
    /// resident.
    ///
    /// Has an effect only on memory that the software HCA resolves on demand.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`] if the range is not in the region; if the memory cannot be made
    /// resident.
    pub fn prefetch(&self, offset: u64, len: u64) -> Result<()> {
        match &self.0 {
            Backend::Soft(mr) => mr.prefetch(offset, len),
            Backend::Hard(hard) => hard.check_range(offset, len),
        }
    }

    /// As [`prefetch`](Self::prefetch), but does not wait and does not report failures other than a
    /// bad range.
    pub fn prefetch_later(&self, offset: u64, len: u64) -> Result<()> {
        match &self.0 {
            Backend::Soft(mr) => mr.prefetch_later(offset, len),
            Backend::Hard(hard) => hard.check_range(offset, len),
        }
    }

    /// Whether the key still has its memory; false once the memory was freed or invalidated under
    /// the registration. Always true on hardware.
    pub fn is_live(&self) -> bool {
        match &self.0 {
            Backend::Soft(mr) => mr.is_live(),
            Backend::Hard(_) => true,
        }
    }

    /// Deregisters the memory (`ibv_dereg_mr`). On success neither the device nor a peer accesses
    /// the memory through this region any more, and the keys are invalid.
    ///
    /// Waits for copies in flight. Deadlocks if the calling thread holds a [`Span`](mr::Span) of
    /// the region.
    ///
    /// # Errors
    /// [`Kind::Busy`] if a peer process on this machine was stopped while it accessed the memory
    /// directly, and has not gone on within half a second. The keys are invalid all the same, and
    /// the memory stays mapped until that access has ended; do not reuse it before.
    pub fn deregister(self) -> Result<()> {
        match self.0 {
            Backend::Soft(mr) => mr.deregister(),
            Backend::Hard(_) => Ok(()),
        }
    }

    /// Ends another registration of the same context, and gives its keys to this one, whose own
    /// become invalid: memory is registered anew under keys that peers know (`ibv_rereg_mr`). Work
    /// that uses the keys meanwhile may fail.
    ///
    /// # Errors
    /// This registration keeps its own keys, and `of` has ended all the same: [`Kind::Busy`] as for
    /// [`deregister`](Self::deregister), [`Kind::InvalidArgument`] if `of` belongs to another
    /// context, [`Kind::Unsupported`] on hardware.
    pub fn take_key(&mut self, of: Self) -> Result<()> {
        match (&mut self.0, of.0) {
            (Backend::Soft(own), Backend::Soft(of)) => own.take_key(of),
            _ => Err(Error::new(Kind::Unsupported, "take over a key")
                .why("a NIC assigns its keys itself")),
        }
    }
}

/// A memory window (`ibv_mw`) of the software HCA: an rkey for a part of a memory region, with
/// rights of its own. Bound by [`WrOp::BindMw`](super::WrOp::BindMw). Dropping it deallocates it:
/// its rkey is then invalid.
#[derive(Debug)]
pub struct Mw(pub(super) mr::SoftMw);

impl Mw {
    /// Its rkey when it was allocated, which is not bound yet. Those that it is bound under have
    /// the same upper 24 bits; [`next_rkey`](super::next_rkey) makes them.
    pub fn rkey(&self) -> u32 {
        self.0.rkey()
    }

    /// Its type.
    pub fn kind(&self) -> mr::MwType {
        self.0.kind()
    }
}

impl Hard {
    fn check_range(&self, offset: u64, len: u64) -> Result<()> {
        if len > 0 && offset.checked_add(len).is_some_and(|end| end <= self.mr.len()) {
            return Ok(());
        }
        let what = format!("prefetch {len} bytes at offset {offset}");
        let why = format!("the registration has {} bytes", self.mr.len());
        Err(Error::new(Kind::OutOfRange, what).why(why))
    }
}

/// Registers host memory, or device memory by the best path available.
pub(super) fn register(
    pd: &Pd,
    memory: MemorySource,
    iova: Option<u64>,
    access: Access,
    registered_by: RegisteredBy,
) -> Result<Mr> {
    let what = || format!("register {}", units::bytes(memory.len()));
    check(&memory, iova, access).map_err(|error| error.during(what()))?;
    let domain = pd.hardware()?;
    if memory.is_host() {
        // SAFETY: the registration keeps the memory alive, and it is shared memory: no Rust
        // references to it exist.
        let mr = unsafe { domain.register_address(memory.address(), memory.len(), iova, access) }?;
        let path = if access.contains(Access::ON_DEMAND) {
            AccessPath::OnDemand
        } else {
            AccessPath::Host
        };
        let keep_alive = KeepAlive { _memory: Some(memory), ..KeepAlive::default() };
        return Ok(hard(pd, mr, (path, Vec::new()), registered_by, keep_alive));
    }
    let Some(region) = memory.device_region() else {
        return Err(Error::new(Kind::Unsupported, what())
            .why("its peer-memory client copies it on the CPU, which hardware cannot use")
            .fix("use the software HCA, or copy through host memory"));
    };
    let (mr, path, why, keep_alive) = device_memory(domain, &memory, region, iova, access)?;
    let keep_alive = KeepAlive { _memory: Some(memory), ..keep_alive };
    Ok(hard(pd, mr, (path, why), registered_by, keep_alive))
}

fn hard(
    pd: &Pd,
    mr: ibv::Mr,
    path_and_reasons: (AccessPath, Vec<String>),
    registered_by: RegisteredBy,
    keep_alive: KeepAlive,
) -> Mr {
    let (path, why) = path_and_reasons;
    Mr(Backend::Hard(Box::new(Hard {
        mr,
        pd: pd.clone(),
        path,
        why,
        registered_by,
        _keep_alive: keep_alive,
    })))
}

fn check(memory: &MemorySource, iova: Option<u64>, access: Access) -> Result<()> {
    access.check()?;
    let wrong = |why: String| Err(Error::new(Kind::InvalidArgument, "register memory").why(why));
    if memory.is_empty() {
        return wrong("it is empty".into());
    }
    match iova {
        Some(iova @ 1..) if access.contains(Access::ZERO_BASED) => {
            wrong(format!("it is zero-based, but iova is {iova:#x}"))
                .map_err(|error| error.fix("omit one of the two"))
        }
        Some(iova) if iova.checked_add(memory.len() - 1).is_none() => {
            wrong(format!("{} bytes at {iova:#x} overflow the address space", memory.len()))
        }
        _ => Ok(()),
    }
}

/// GPU memory: by dma-buf, by its address (peer memory), by a CPU window, or else staged.
fn device_memory(
    domain: &ibv::Pd,
    memory: &MemorySource,
    region: &Region,
    iova: Option<u64>,
    access: Access,
) -> Result<(ibv::Mr, AccessPath, Vec<String>, KeepAlive)> {
    let (address, len) = (region.address().raw(), region.len());
    let iova_base = Some(iova.unwrap_or(address)).filter(|_| !access.contains(Access::ZERO_BASED));
    let (allocation, offset) = (region.allocation(), region.offset());
    let mut why = Vec::new();
    if memory.is_staged() {
        why.push("staged: requested".into());
        let mr = domain.register_staged(region, iova_base, access)?;
        return Ok((mr, AccessPath::Staged, why, KeepAlive::default()));
    }
    let pin = allocation.pin()?;
    let by_buffer = allocation.export_dmabuf(offset, len).and_then(|buffer| {
        Ok((domain.register_dmabuf((&buffer).into(), iova_base, access)?, buffer))
    });
    match by_buffer {
        Ok((mr, buffer)) => {
            let keep_alive =
                KeepAlive { _buffer: Some(buffer), _pin: Some(pin), ..KeepAlive::default() };
            return Ok((mr, AccessPath::DmaBuf, why, keep_alive));
        }
        Err(error) => why.push(format!("no dma-buf: {}", error.reason())),
    }
    // SAFETY: device memory, to which no references exist; the registration keeps it alive.
    match unsafe { domain.register_address(address, len, iova_base, access) } {
        Ok(mr) => {
            return Ok((
                mr,
                AccessPath::PeerMemory,
                why,
                KeepAlive { _pin: Some(pin), ..KeepAlive::default() },
            ));
        }
        Err(error) => why.push(format!("no peer memory: {}", error.reason())),
    }
    if memory.is_without_window() {
        why.push("no window: disabled for this memory".into());
    } else {
        let window = allocation.window_with(offset, len, &WindowOptions::default());
        let by_window = window.and_then(|window| {
            let start = window.as_ptr().as_ptr().expose_provenance() as u64;
            // SAFETY: a window is shared memory, and the registration keeps it mapped.
            let mr = unsafe { domain.register_address(start, len, iova_base, access) }?;
            Ok((mr, window))
        });
        match by_window {
            Ok((mr, window)) => {
                let path = AccessPath::Window(window.path());
                let keep_alive =
                    KeepAlive { _window: Some(window), _pin: Some(pin), ..KeepAlive::default() };
                return Ok((mr, path, why, keep_alive));
            }
            Err(error) => why.push(format!("no window: {}", error.reason())),
        }
    }
    match domain.register_staged(region, iova_base, access) {
        Ok(mr) => {
            why.push("staged: no other path; copied through pinned memory of the same size".into());
            Ok((mr, AccessPath::Staged, why, KeepAlive::default()))
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
            "`modprobe nvidia-peermem`, or use a kernel and driver with dma-buf support; or \
             register it without remote access, which is staged, and have peers send; or give \
             peers pinned host memory; or use the software HCA, which stages remote access too",
        )
}

/// Registers memory by address: of a GPU of this process if one owns it, else host memory.
///
/// # Safety
/// As for [`mr::Registry::register_address`].
pub(super) unsafe fn register_address(
    pd: &Pd,
    (address, len): (u64, u64),
    iova: Option<u64>,
    access: Access,
) -> Result<Mr> {
    let registered_by = |client: &str| RegisteredBy::Address {
        client: client.to_owned(),
        persistence: Persistence::Persistent,
        page_size: rustix::param::page_size() as u64,
    };
    if len == 0 || address.checked_add(len).is_none() {
        let what = format!("register {} at {address:#x}", units::bytes(len));
        let why = "the range is empty or overflows the address space";
        return Err(Error::new(Kind::InvalidArgument, what).why(why));
    }
    if let Ok(device) = mem::owner_of(DeviceAddr::new(address)) {
        // SAFETY: guaranteed by the caller.
        let memory = unsafe { device.borrow(DeviceAddr::new(address), len) }?;
        let client = device.info().backend.to_string();
        return register(
            pd,
            memory.whole()?.into(),
            iova.or(Some(address)),
            access,
            registered_by(&client),
        );
    }
    // SAFETY: guaranteed by the caller.
    let mr = unsafe { pd.hardware()?.register_address(address, len, iova, access) }?;
    let path =
        if access.contains(Access::ON_DEMAND) { AccessPath::OnDemand } else { AccessPath::Host };
    Ok(hard(pd, mr, (path, Vec::new()), registered_by("host"), KeepAlive::default()))
}

/// Registers a range of a dma-buf.
pub(super) fn register_dmabuf(
    pd: &Pd,
    range: DmaBufRange<'_>,
    iova: Option<u64>,
    access: Access,
    attach: AttachMode,
) -> Result<Mr> {
    let mr = pd.hardware()?.register_dmabuf(range, iova, access)?;
    // The driver decides: with paging support the exporter may move the memory, else it is pinned.
    let path_and_reasons = (AccessPath::DmaBuf, Vec::new());
    Ok(hard(pd, mr, path_and_reasons, RegisteredBy::DmaBuf(attach), KeepAlive::default()))
}

//! Registered memory, and slices of it.

use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::entries::WordUpdate;
use crate::error::{Error, Kind, Result};
use crate::mem::WordWidth;
use crate::mr::{Access, AccessDenied, PdId, Registry, SoftMr, SoftPd, Span};
use crate::units;
use crate::verbs::{Context, MemorySource, Mr, Pd, Sge};

/// How long to retry while memory is moving or not resident.
const RETRY_TIMEOUT: Duration = Duration::from_secs(10);

/// Registered memory for sending and receiving. Clones share it.
///
/// Transfers keep it alive: memory is not freed before they have completed, whatever is dropped.
#[derive(Clone)]
pub struct Buffer(Arc<Inner>);

struct Inner {
    mr: Mr,
    /// For the CPU's own accesses, where [`Domain::cpu`] is.
    cpu_mr: Option<SoftMr>,
    domain: Arc<Domain>,
    /// Keeps memory that is registered by address allocated. Dropped last.
    _owner: Option<Box<dyn Any + Send + Sync>>,
}

/// The device and the protection domain that the buffers of a communicator are registered with.
pub(super) struct Domain {
    pub context: Context,
    pub pd: Pd,
    /// Buffers registered with hardware are registered here too, so that the CPU accesses them as
    /// it does those of a software HCA, in which the two are one.
    cpu: Option<(Registry, SoftPd)>,
}

impl Domain {
    pub fn new(context: Context) -> Arc<Self> {
        let cpu = context.soft().is_none().then(|| {
            let registry = Registry::with_name("cpu");
            let pd = registry.pd();
            (registry, pd)
        });
        Arc::new(Self { pd: context.alloc_pd(), context, cpu })
    }

    /// Registers memory with all rights.
    pub fn register(self: &Arc<Self>, memory: impl Into<MemorySource>) -> Result<Buffer> {
        let memory = memory.into();
        let register_cpu = |(registry, pd): &(Registry, SoftPd)| {
            registry.register(pd, memory.clone(), None, Access::ALL)
        };
        let cpu_mr = self.cpu.as_ref().map(register_cpu).transpose()?;
        let mr = self.context.register(&self.pd, memory, Access::ALL)?;
        Ok(self.buffer(mr, cpu_mr, None))
    }

    /// Registers memory by its address.
    ///
    /// # Safety
    /// As for [`Comm::register_owned`](super::Comm::register_owned).
    #[allow(unsafe_code)]
    pub unsafe fn register_address(
        self: &Arc<Self>,
        address: u64,
        len: u64,
        access: Access,
        owner: Option<Box<dyn Any + Send + Sync>>,
    ) -> Result<Buffer> {
        let register_cpu = |(registry, pd): &(Registry, SoftPd)| {
            // SAFETY: guaranteed by the caller.
            unsafe { registry.register_address(pd, address, len, None, access) }
        };
        let cpu_mr = self.cpu.as_ref().map(register_cpu).transpose()?;
        // SAFETY: guaranteed by the caller.
        let mr = unsafe { self.context.register_address(&self.pd, address, len, None, access) }?;
        Ok(self.buffer(mr, cpu_mr, owner))
    }

    fn buffer(
        self: &Arc<Self>,
        mr: Mr,
        cpu_mr: Option<SoftMr>,
        owner: Option<Box<dyn Any + Send + Sync>>,
    ) -> Buffer {
        Buffer(Arc::new(Inner { mr, cpu_mr, domain: self.clone(), _owner: owner }))
    }

    /// Where the CPU's accesses are resolved.
    fn registry(&self) -> Result<(&Registry, PdId)> {
        match &self.cpu {
            Some((registry, pd)) => Ok((registry, pd.id())),
            None => Ok((self.context.registry()?, self.pd.soft()?.id())),
        }
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buffer({}, {})", units::bytes(self.len()), self.0.mr.path())
    }
}

impl Buffer {
    /// Length in bytes.
    #[allow(clippy::len_without_is_empty)] // memory without bytes cannot be registered
    pub fn len(&self) -> u64 {
        self.0.mr.len()
    }

    /// The registration: keys, path, and why that path.
    pub fn registration(&self) -> &Mr {
        &self.0.mr
    }

    /// The whole buffer as a slice.
    pub fn whole(&self) -> BufferSlice {
        BufferSlice { buffer: self.clone(), offset: 0, len: self.len() }
    }

    /// A slice of the buffer, possibly empty.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`] if it exceeds the buffer.
    pub fn slice(&self, offset: u64, len: u64) -> Result<BufferSlice> {
        if offset.checked_add(len).is_none_or(|end| end > self.len()) {
            let what = format!("use {len} bytes at offset {offset}");
            let why = format!("the buffer has {} bytes", self.len());
            return Err(Error::new(Kind::OutOfRange, what).why(why).fix("use a range inside it"));
        }
        Ok(BufferSlice { buffer: self.clone(), offset, len })
    }

    /// Writes bytes from the CPU.
    pub fn write(&self, offset: u64, from: &[u8]) -> Result<()> {
        self.slice(offset, from.len() as u64)?;
        let span = self.span(Access::LOCAL_WRITE, offset, from.len() as u64)?;
        retry_transient(|| span.scatter(0, from)).map_err(|why| self.denied(why))?;
        span.publish();
        drop(span);
        self.flush()
    }

    /// Reads bytes to the CPU.
    pub fn read(&self, offset: u64, into: &mut [u8]) -> Result<()> {
        self.slice(offset, into.len() as u64)?;
        let span = self.span(Access::NONE, offset, into.len() as u64)?;
        retry_transient(|| span.gather(0, into)).map_err(|why| self.denied(why))
    }

    /// Waits until all writes to memory without a CPU mapping have arrived.
    pub(super) fn flush(&self) -> Result<()> {
        let (registry, _) = self.0.domain.registry()?;
        registry.publish_all();
        let failure = match &self.0.cpu_mr {
            Some(cpu_mr) => cpu_mr.failure(),
            None => self.0.mr.failure(),
        };
        match failure {
            Some(error) => Err(error),
            None => Ok(()),
        }
    }

    /// Loads the word at an offset that must be in range and aligned.
    pub(super) fn load(&self, width: WordWidth, offset: u64) -> Result<u64> {
        let len = width.bytes();
        let span = self.span(Access::NONE, offset, len)?;
        if let Some(bytes) = span.host_bytes() {
            return match width {
                WordWidth::Bits32 => bytes.load_u32(0).map(u64::from),
                WordWidth::Bits64 => bytes.load_u64(0),
            };
        }
        // Aligned words are read in one piece over the bus.
        let mut word = [0; 8];
        let slice = &mut word[..len as usize];
        retry_transient(|| span.gather(0, slice)).map_err(|why| self.denied(why))?;
        Ok(u64::from_le_bytes(word))
    }

    /// Modifies a word that must be in range and aligned, as a peer's operation would.
    pub(super) fn apply_update(&self, offset: u64, word_update: WordUpdate) -> Result<()> {
        match word_update {
            WordUpdate::Write(bytes, len) => {
                let span = self.span(Access::LOCAL_WRITE, offset, len.into())?;
                match (span.host_bytes(), len) {
                    (Some(host), 8) => host.store_u64(0, u64::from_le_bytes(bytes)),
                    (Some(host), 4) => host.store_u32(0, u64::from_le_bytes(bytes) as u32),
                    _ => {
                        let bytes = &bytes[..len.into()];
                        retry_transient(|| span.scatter(0, bytes))
                            .map_err(|why| self.denied(why))?;
                        span.publish();
                        drop(span);
                        self.flush()
                    }
                }
            }
            WordUpdate::Atomic(atomic) => {
                let width = atomic.width().bytes();
                let span = self.span(Access::REMOTE_ATOMIC, offset, width.into())?;
                let changed = retry_transient(|| span.atomic(0, &atomic));
                changed.map(drop).map_err(|why| self.denied(why))
            }
        }
    }

    /// Checks that a word of that width is in range and aligned.
    pub(super) fn check_word(&self, width: WordWidth, offset: u64) -> Result<()> {
        let len = width.bytes();
        self.slice(offset, len)?;
        if !self.0.mr.iova().wrapping_add(offset).is_multiple_of(len) {
            let what = format!("use the word at offset {offset}");
            let error = Error::new(Kind::Misaligned, what);
            return Err(error.why(format!("words of {len} bytes must be aligned to {len}")));
        }
        Ok(())
    }

    /// Resolves a range for access by the CPU.
    pub(super) fn span(&self, need: Access, offset: u64, len: u64) -> Result<Span<'_>> {
        let inner = &*self.0;
        let (lkey, iova) = match &inner.cpu_mr {
            Some(cpu_mr) => (cpu_mr.lkey(), cpu_mr.iova()),
            None => (inner.mr.lkey(), inner.mr.iova()),
        };
        let (address, (registry, pd)) = (iova.wrapping_add(offset), inner.domain.registry()?);
        let found = retry_transient(|| registry.resolve(lkey, pd, need, address, len));
        found.map_err(|why| self.denied(why))
    }

    #[cold]
    pub(super) fn denied(&self, why: AccessDenied) -> Error {
        let kind = match why {
            AccessDenied::Gone | AccessDenied::Stale => Kind::Freed,
            AccessDenied::Moving | AccessDenied::NotResident => Kind::Timeout,
            _ => Kind::OutOfRange,
        };
        Error::new(kind, "use a buffer").why(why.to_string())
    }

    /// Address and rkey of an offset, for a peer.
    pub(super) fn remote(&self, offset: u64) -> (u64, u32) {
        let at = self.0.mr.remote(offset);
        (at.address, at.rkey)
    }

    pub(super) fn sge(&self, offset: u64, len: u32) -> Sge {
        self.0.mr.sge(offset, len)
    }

    /// Whether it was registered with that communicator.
    pub(super) fn is_of(&self, domain: &Domain) -> bool {
        self.0.domain.pd == domain.pd
    }
}

/// Retries while the memory is moving or not resident, up to `RETRY_TIMEOUT`.
pub(super) fn retry_transient<T>(
    mut attempt: impl FnMut() -> std::result::Result<T, AccessDenied>,
) -> std::result::Result<T, AccessDenied> {
    let mut start = None;
    loop {
        match attempt() {
            Err(why) if why.is_transient() => {
                let start: &Instant = start.get_or_insert_with(Instant::now);
                if start.elapsed() > RETRY_TIMEOUT {
                    return Err(why);
                }
                std::thread::sleep(Duration::from_micros(50));
            }
            other => return other,
        }
    }
}

/// A range of a buffer, to send from or receive into.
#[derive(Clone, Debug)]
pub struct BufferSlice {
    pub(super) buffer: Buffer,
    pub(super) offset: u64,
    pub(super) len: u64,
}

impl BufferSlice {
    /// The buffer that it is part of.
    pub fn buffer(&self) -> &Buffer {
        &self.buffer
    }

    /// Offset in the buffer, in bytes.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Length in bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether the length is 0.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The slice as a scatter-gather element, for kernels and work requests.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`] if it is 2 GiB or longer: split it.
    pub fn sge(&self) -> Result<Sge> {
        match u32::try_from(self.len) {
            Ok(len) if len < 1 << 31 => Ok(self.buffer.sge(self.offset, len)),
            _ => Err(Error::new(Kind::OutOfRange, "use memory in a work request")
                .why(format!("{} exceed the limit of one request", units::bytes(self.len)))
                .fix("split it into slices below 2 GiB")),
        }
    }
}

impl From<&Buffer> for BufferSlice {
    fn from(buffer: &Buffer) -> Self {
        buffer.whole()
    }
}

/// Copies bytes into slices, in order, as many as fit.
pub(super) fn scatter(slices: &[BufferSlice], from: &[u8]) -> Result<()> {
    let mut rest = from;
    for slice in slices.iter().filter(|slice| slice.len > 0) {
        let (now, later) = rest.split_at(rest.len().min(slice.len as usize));
        if now.is_empty() {
            break;
        }
        let span = slice.buffer.span(Access::LOCAL_WRITE, slice.offset, now.len() as u64)?;
        retry_transient(|| span.scatter(0, now)).map_err(|why| slice.buffer.denied(why))?;
        span.publish();
        drop(span);
        slice.buffer.flush()?;
        rest = later;
    }
    Ok(())
}

/// Copies `len` bytes from one list of slices to another, through a bounce buffer of up to 1 MiB.
pub(super) fn copy(to: &[BufferSlice], from: &[BufferSlice], len: u64) -> Result<()> {
    const CHUNK: u64 = 1 << 20;
    let mut bytes = vec![0; len.min(CHUNK) as usize];
    let (mut done, mut to, mut from) = (0, Cursor::new(to), Cursor::new(from));
    while done < len {
        let (Some((target, at)), Some((source, begin))) = (to.now(), from.now()) else { break };
        let count = (target.len - at).min(source.len - begin).min(len - done).min(CHUNK);
        let bytes = &mut bytes[..count as usize];
        source.buffer.read(source.offset + begin, bytes)?;
        target.buffer.write(target.offset + at, bytes)?;
        to.advance(count);
        from.advance(count);
        done += count;
    }
    Ok(())
}

/// A position in a list of slices.
#[derive(Clone, Copy)]
struct Cursor<'a> {
    slices: &'a [BufferSlice],
    at: u64,
}

impl<'a> Cursor<'a> {
    fn new(slices: &'a [BufferSlice]) -> Self {
        Self { slices, at: 0 }
    }

    /// The current slice and the offset in it; `None` at the end.
    fn now(&mut self) -> Option<(&'a BufferSlice, u64)> {
        while let Some((first, rest)) = self.slices.split_first() {
            if self.at < first.len {
                return Some((first, self.at));
            }
            (self.slices, self.at) = (rest, 0);
        }
        None
    }

    fn advance(&mut self, count: u64) {
        self.at += count;
    }
}

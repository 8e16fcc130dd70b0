//! Registered memory, and parts of it.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::entries::WordUpdate;
use crate::error::{Error, Kind, Result};
use crate::mem::WordWidth;
use crate::mr::{Access, AccessDenied, Span};
use crate::units;
use crate::verbs::{Context, MemorySource, Mr, Pd, Sge};

/// For so long memory that moves, or is being found, is waited for.
const RETRY_TIMEOUT: Duration = Duration::from_secs(10);

/// Registered memory that messages are sent from and received into. Clones are the same memory.
///
/// Whatever uses it keeps it: memory under a transfer is not freed, whatever is dropped.
#[derive(Clone)]
pub struct Buffer(Arc<Inner>);

struct Inner {
    mr: Mr,
    len: u64,
    pd: Pd,
    context: Context,
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buffer({}, {})", units::bytes(self.len()), self.0.mr.path())
    }
}

impl Buffer {
    pub(super) fn register(
        context: &Context,
        pd: &Pd,
        memory: impl Into<MemorySource>,
    ) -> Result<Self> {
        let mr = context.register(pd, memory, Access::ALL)?;
        let len = mr.len();
        Ok(Self(Arc::new(Inner { mr, len, pd: pd.clone(), context: context.clone() })))
    }

    /// How many bytes.
    #[allow(clippy::len_without_is_empty)] // memory without bytes cannot be registered
    pub fn len(&self) -> u64 {
        self.0.len
    }

    /// Its registration: keys, path, and why that path.
    pub fn registration(&self) -> &Mr {
        &self.0.mr
    }

    /// All of it.
    pub fn whole(&self) -> BufferSlice {
        BufferSlice { buffer: self.clone(), offset: 0, len: self.len() }
    }

    /// A part of it, perhaps of no bytes.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`] if it does not lie inside.
    pub fn slice(&self, offset: u64, len: u64) -> Result<BufferSlice> {
        if offset.checked_add(len).is_none_or(|end| end > self.len()) {
            let what = format!("use {len} bytes at offset {offset}");
            let why = format!("the buffer has {} bytes", self.len());
            return Err(Error::new(Kind::OutOfRange, what).why(why).fix("name a part inside it"));
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

    /// What was placed in memory without a window is there when this returns.
    pub(super) fn flush(&self) -> Result<()> {
        let registry = self.0.context.hca().registry();
        registry.publish_all();
        match self.0.mr.failure() {
            Some(error) => Err(error),
            None => Ok(()),
        }
    }

    /// The word at an offset that is inside and aligned.
    pub(super) fn load(&self, width: WordWidth, offset: u64) -> Result<u64> {
        let len = width.bytes();
        let span = self.span(Access::NONE, offset, len)?;
        if let Some(bytes) = span.host_bytes() {
            return match width {
                WordWidth::Bits32 => bytes.load_u32(0).map(u64::from),
                WordWidth::Bits64 => bytes.load_u64(0),
            };
        }
        // Aligned words come over the bus whole.
        let mut word = [0; 8];
        let slice = &mut word[..len as usize];
        retry_transient(|| span.gather(0, slice)).map_err(|why| self.denied(why))?;
        Ok(u64::from_le_bytes(word))
    }

    /// Changes a word that is inside and aligned, as a peer's work would.
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
                let span = self.span(Access::REMOTE_ATOMIC, offset, width)?;
                let changed = retry_transient(|| span.atomic(0, &atomic));
                changed.map(drop).map_err(|why| self.denied(why))
            }
        }
    }

    /// Whether a word of that width lies inside, where a word may lie.
    pub(super) fn check_word(&self, width: WordWidth, offset: u64) -> Result<()> {
        let len = width.bytes();
        self.slice(offset, len)?;
        if !self.0.mr.iova().wrapping_add(offset).is_multiple_of(len) {
            let what = format!("use the word at offset {offset}");
            let error = Error::new(Kind::Misaligned, what);
            return Err(error.why(format!("words of {len} bytes lie at multiples of {len}")));
        }
        Ok(())
    }

    /// The memory under this range, for the CPU.
    pub(super) fn span(&self, need: Access, offset: u64, len: u64) -> Result<Span<'_>> {
        let inner = &*self.0;
        let address = inner.mr.iova().wrapping_add(offset);
        let registry = inner.context.hca().registry();
        let found = retry_transient(|| {
            registry.resolve(inner.mr.lkey(), inner.pd.id(), need, address, len)
        });
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

    /// A place in it, for a peer.
    pub(super) fn remote(&self, offset: u64) -> (u64, u32) {
        let at = self.0.mr.remote(offset);
        (at.address, at.rkey)
    }

    pub(super) fn sge(&self, offset: u64, len: u32) -> Sge {
        self.0.mr.sge(offset, len)
    }

    /// Whether it was registered there.
    pub(super) fn is_of(&self, pd: &Pd) -> bool {
        self.0.pd.id() == pd.id()
    }
}

/// Tries again while the memory moves or is being found.
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

/// A part of a buffer, to send from or receive into.
#[derive(Clone, Debug)]
pub struct BufferSlice {
    pub(super) buffer: Buffer,
    pub(super) offset: u64,
    pub(super) len: u64,
}

impl BufferSlice {
    /// The buffer.
    pub fn buffer(&self) -> &Buffer {
        &self.buffer
    }

    /// Where it begins.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// How many bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// How kernels and work requests name it.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`] if it has 2 GiB or more: cut it.
    pub fn sge(&self) -> Result<Sge> {
        match u32::try_from(self.len) {
            Ok(len) if len < 1 << 31 => Ok(self.buffer.sge(self.offset, len)),
            _ => Err(Error::new(Kind::OutOfRange, "name memory to a device")
                .why(format!("{} are too many for one request", units::bytes(self.len)))
                .fix("cut it into parts below 2 GiB")),
        }
    }
}

impl From<&Buffer> for BufferSlice {
    fn from(buffer: &Buffer) -> Self {
        buffer.whole()
    }
}

/// Copies bytes that are here into parts, one after the other, as many as fit.
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

/// Copies from one list of parts to another, `len` bytes, through memory of ours.
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

/// A place in a list of parts.
#[derive(Clone, Copy)]
struct Cursor<'a> {
    slices: &'a [BufferSlice],
    at: u64,
}

impl<'a> Cursor<'a> {
    fn new(slices: &'a [BufferSlice]) -> Self {
        Self { slices, at: 0 }
    }

    /// The part that it stands in, and where in it; nothing at the end.
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

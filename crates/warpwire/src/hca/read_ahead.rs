//! Read-ahead of device memory: large copies for the packets of a message instead of one per
//! packet.
//!
//! A copy out of device memory costs microseconds, however short it is. So the first packet of a
//! message that needs one also fetches data for the packets behind it, at most to the end of the
//! message, or of those that have arrived and continue it: in the [background](double_buffer) where
//! the copy engine is the fastest way. Fetched data serves these messages alone: a later one reads
//! memory anew.

mod double_buffer;

use std::time::Duration;

use warpwire_proto::Psn;

use crate::mem::Device;
use crate::mr::{Access, AccessDenied, PdId, Registry, Span};
use double_buffer::DoubleBuffer;

/// Maximum of one fetch: long enough to amortize the cost of a copy, short enough that packets
/// start soon.
const MAX_READ_AHEAD: usize = 256 << 10;

/// How long an engine waits for a copy before it serves other queue pairs. A copy takes some ten
/// microseconds, unless another process has the GPU.
const COPY_WAIT: Duration = Duration::from_millis(1);
/// How long it waits for one whose packet would be lost otherwise.
const MAX_COPY_WAIT: Duration = Duration::from_secs(10);

/// The message that fetched data belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MessageId {
    /// A local work request, by the index of its first WQEBB, which never repeats.
    Work(u64),
    /// A read request of the peer, by its PSN.
    Read(Psn),
}

/// The data that a packet needs, and how much of the message follows.
#[derive(Clone, Copy)]
pub(super) struct FetchRequest {
    pub message: MessageId,
    pub key: u32,
    pub pd: PdId,
    pub need: Access,
    pub address: u64,
    /// Bytes of the message from `address` to its end.
    pub remaining: u32,
    /// Bytes of messages that continue this one and may be read with it, and the last of these.
    pub following: u32,
    pub last: MessageId,
}

impl MessageId {
    /// Whether it is one of these messages, or between them.
    fn is_within(self, first: Self, last: Self) -> bool {
        match (self, first, last) {
            (Self::Read(psn), Self::Read(first), Self::Read(last)) => {
                psn.distance_from(first) >= 0 && psn.distance_from(last) <= 0
            }
            _ => self == first,
        }
    }
}

impl FetchRequest {
    fn resolve<'a>(&self, registry: &'a Registry, len: usize) -> Result<Span<'a>, AccessDenied> {
        registry.resolve(self.key, self.pd, self.need, self.address, len as u64)
    }

    /// Bytes that may be read now.
    fn readable(&self) -> usize {
        self.remaining as usize + self.following as usize
    }

    /// The request from `address` on; `None` behind the last byte that may be read now.
    fn starting_at(&self, address: u64) -> Option<Self> {
        let skipped = u32::try_from(address.checked_sub(self.address)?).ok()?;
        let all = self.remaining.saturating_add(self.following);
        let remaining = all.checked_sub(skipped).filter(|left| *left > 0)?;
        Some(Self { address, remaining, following: 0, ..*self })
    }
}

/// Fetched data: of which messages, and where it begins.
#[derive(Clone, Copy, Debug)]
struct Chunk {
    first: MessageId,
    last: MessageId,
    key: u32,
    start: u64,
    len: usize,
}

impl Chunk {
    fn new(fetch_request: &FetchRequest, len: usize) -> Self {
        let &FetchRequest { message: first, last, key, address: start, .. } = fetch_request;
        Self { first, last, key, start, len }
    }

    /// Where the next `len` bytes of the request are, if they are here.
    fn position(&self, fetch_request: &FetchRequest, len: usize) -> Option<usize> {
        let FetchRequest { message, key, .. } = fetch_request;
        if self.key != *key || !message.is_within(self.first, self.last) {
            return None;
        }
        let at = usize::try_from(fetch_request.address.checked_sub(self.start)?).ok()?;
        (at.checked_add(len)? <= self.len).then_some(at)
    }
}

/// The read-ahead of a queue pair, for messages that follow each other.
#[derive(Debug)]
pub(super) struct ReadAhead {
    /// How long a packet waits for its copy.
    copy_wait: Duration,
    /// The last message of which there may be data.
    last: Option<MessageId>,
    /// Allocated on first use: most queue pairs never touch device memory.
    bytes: Vec<u8>,
    cached: Option<Chunk>,
    /// One for each GPU.
    double_buffers: Vec<DoubleBuffer>,
    /// The double buffer that has data of the message.
    current: Option<usize>,
}

impl ReadAhead {
    /// A packet of a reliable queue pair is built again if its data is not there yet.
    pub(super) fn new(is_reliable: bool) -> Self {
        Self {
            copy_wait: if is_reliable { COPY_WAIT } else { MAX_COPY_WAIT },
            last: None,
            bytes: Vec::new(),
            cached: None,
            double_buffers: Vec::new(),
            current: None,
        }
    }

    /// Copies the requested data to `into`, from a buffer if it is there.
    ///
    /// # Errors
    /// Those of the memory; [`AccessDenied::NotResident`] if its copy takes long.
    #[inline]
    pub(super) fn gather(
        &mut self,
        registry: &Registry,
        fetch_request: &FetchRequest,
        into: &mut [u8],
    ) -> Result<(), AccessDenied> {
        if self.last.is_none() {
            let span = fetch_request.resolve(registry, into.len())?;
            if fetch_request.remaining as usize <= into.len() || !span.is_device() {
                return span.gather(0, into);
            }
        }
        self.gather_device(registry, fetch_request, into)
    }

    #[inline(never)]
    fn gather_device(
        &mut self,
        registry: &Registry,
        fetch_request: &FetchRequest,
        into: &mut [u8],
    ) -> Result<(), AccessDenied> {
        if !self.gather_fetched(registry, fetch_request, into)? {
            self.forget();
            self.fetch(registry, fetch_request, into)?;
        }
        if self.last.is_some() && fetch_request.following > 0 {
            self.last = Some(fetch_request.last);
        }
        // Numbers of messages repeat after a while: nothing is kept when all was sent.
        if fetch_request.remaining as usize <= into.len()
            && self.last == Some(fetch_request.message)
        {
            self.forget();
        }
        Ok(())
    }

    /// Copies what was fetched, or is being fetched; `false` if it is not.
    fn gather_fetched(
        &mut self,
        registry: &Registry,
        fetch_request: &FetchRequest,
        into: &mut [u8],
    ) -> Result<bool, AccessDenied> {
        if let Some(current) = self.current {
            let limit = self.copy_wait;
            return self.double_buffers[current].gather(registry, fetch_request, limit, into);
        }
        let Some(at) = self.cached.and_then(|chunk| chunk.position(fetch_request, into.len()))
        else {
            return Ok(false);
        };
        into.copy_from_slice(&self.bytes[at..at + into.len()]);
        Ok(true)
    }

    /// Fetches data, for this packet and those behind it.
    fn fetch(
        &mut self,
        registry: &Registry,
        fetch_request: &FetchRequest,
        into: &mut [u8],
    ) -> Result<(), AccessDenied> {
        let more = fetch_request.readable().min(MAX_READ_AHEAD);
        let span = fetch_request.resolve(registry, into.len())?;
        if more <= into.len() || !span.is_device() {
            return span.gather(0, into);
        }
        drop(span);
        // All of it, or just what the packet needs: a message that exceeds its registration fails
        // at the packet that does.
        let Ok(span) = fetch_request.resolve(registry, more) else {
            return fetch_request.resolve(registry, into.len())?.gather(0, into);
        };
        if let Some(device) = span.copy_engine()
            && let Some(current) = self.double_buffer(&device)
        {
            drop(span);
            (self.current, self.last) = (Some(current), Some(fetch_request.last));
            let double_buffer = &mut self.double_buffers[current];
            double_buffer.begin(registry, fetch_request, into.len())?;
            if double_buffer.gather(registry, fetch_request, self.copy_wait, into)? {
                return Ok(());
            }
            self.forget();
            return fetch_request.resolve(registry, into.len())?.gather(0, into);
        }
        self.bytes.resize(MAX_READ_AHEAD, 0);
        span.gather(0, &mut self.bytes[..more])?;
        self.cached = Some(Chunk::new(fetch_request, more));
        self.last = Some(fetch_request.last);
        into.copy_from_slice(&self.bytes[..into.len()]);
        Ok(())
    }

    /// The index of the GPU's double buffer; `None` if it cannot have one.
    fn double_buffer(&mut self, device: &Device) -> Option<usize> {
        let known = self.double_buffers.iter().position(|known| known.device() == device);
        let index = known.unwrap_or_else(|| {
            self.double_buffers.push(DoubleBuffer::new(device));
            self.double_buffers.len() - 1
        });
        self.double_buffers[index].is_usable().then_some(index)
    }

    /// Forgets what was fetched. Copies that are under way end.
    pub(super) fn forget(&mut self) {
        (self.last, self.cached) = (None, None);
        if let Some(current) = self.current.take() {
            self.double_buffers[current].forget();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mem::Allocation;
    use crate::mem::sim::{Sim, SimConfig};
    use crate::mr::{MemorySource, SoftMr, SoftPd};
    use std::time::Instant;

    struct Fixture {
        memory: Allocation,
        registry: Registry,
        pd: SoftPd,
        mr: SoftMr,
    }

    impl Fixture {
        fn new(prepare: impl FnOnce(MemorySource) -> MemorySource) -> Self {
            let gpu = Sim::start(SimConfig::default()).unwrap().device(0).unwrap();
            let memory = gpu.alloc(1 << 20).unwrap();
            let registry = Registry::new();
            let pd = registry.pd();
            let whole = prepare(memory.whole().unwrap().into());
            let mr = registry.register(&pd, whole, Some(0), Access::ALL).unwrap();
            Self { memory, registry, pd, mr }
        }

        fn request(&self, message: MessageId, address: u64, remaining: u32) -> FetchRequest {
            let (key, pd, need) = (self.mr.rkey(), self.pd.id(), Access::REMOTE_READ);
            let (last, following) = (message, 0);
            FetchRequest { message, key, pd, need, address, remaining, following, last }
        }

        /// One packet, as often as its copy is under way.
        fn gather(
            &self,
            read_ahead: &mut ReadAhead,
            fetch_request: &FetchRequest,
        ) -> Result<[u8; 4096], AccessDenied> {
            let mut into = [0; 4096];
            let deadline = Instant::now() + Duration::from_secs(20);
            loop {
                match read_ahead.gather(&self.registry, fetch_request, &mut into) {
                    Err(AccessDenied::NotResident) if Instant::now() < deadline => {}
                    found => return found.map(|()| into),
                }
            }
        }
    }

    #[test]
    fn read_ahead_serves_only_its_own_message() {
        // Through a window, and by the copy engine.
        for prepare in [|source| source, MemorySource::without_window] {
            let fixture = Fixture::new(prepare);
            let mut read_ahead = ReadAhead::new(true);
            let mut fetch = |message, address, remaining| {
                let request = fixture.request(message, address, remaining);
                fixture.gather(&mut read_ahead, &request)
            };
            let (first, second) = (MessageId::Read(Psn::new(1)), MessageId::Read(Psn::new(2)));
            assert_eq!(fetch(first, 0, 64 << 10), Ok([0; 4096]));
            fixture.memory.write(0, &[7; 128 << 10]).unwrap();
            // A message is read as memory was when it began; the next one as it is now.
            assert_eq!(fetch(first, 4096, 60 << 10), Ok([0; 4096]));
            assert_eq!(fetch(second, 4096, 60 << 10), Ok([7; 4096]));
            assert_eq!(fetch(first, 64 << 10, 4096), Ok([7; 4096]));
            // Nothing is left of a message that was sent, whose number a later one may have.
            assert_eq!(fetch(second, 4096, 8192), Ok([7; 4096]));
            assert_eq!(fetch(second, 8192, 4096), Ok([7; 4096]));
            fixture.memory.write(0, &[9; 128 << 10]).unwrap();
            assert_eq!(fetch(second, 4096, 8192), Ok([9; 4096]));
            // A message that exceeds the registration fails at the end, not before.
            let last = (1 << 20) - 4096;
            assert_eq!(fetch(MessageId::Work(9), last, 8192), Ok([0; 4096]));
            assert_eq!(fetch(MessageId::Work(9), last + 4096, 4096), Err(AccessDenied::Range));
        }
    }

    #[test]
    fn reads_that_have_arrived_are_read_together() {
        const PACKETS: u32 = 4;
        let fixture = Fixture::new(MemorySource::without_window);
        let mut read_ahead = ReadAhead::new(true);
        // Three requests of four packets; a fourth arrives later.
        let psn = |number: u32| MessageId::Read(Psn::new(0xff_fffa).add(number * PACKETS));
        let mut fetch = |number: u32, packet: u32, behind: u32| {
            let address = u64::from(number * PACKETS + packet) * 4096;
            let mut request = fixture.request(psn(number), address, (PACKETS - packet) * 4096);
            (request.following, request.last) = (behind * PACKETS * 4096, psn(number + behind));
            fixture.gather(&mut read_ahead, &request).unwrap()
        };
        assert_eq!(fetch(0, 0, 2), [0; 4096]);
        fixture.memory.write(0, &[7; 128 << 10]).unwrap();
        for (number, packet) in [(0, 3), (1, 0), (1, 3), (2, 0), (2, 2)] {
            let behind = if packet == 0 { 2 - number } else { 0 };
            assert_eq!(fetch(number, packet, behind), [0; 4096], "{number}, {packet}");
        }
        // It was not there when the others were read.
        assert_eq!(fetch(3, 0, 0), [7; 4096]);
        fixture.memory.write(0, &[8; 128 << 10]).unwrap();
        assert_eq!(fetch(1, 0, 0), [8; 4096]);
    }
}

//! Read-ahead by the copy engine: it fills one of two pinned buffers while packets are made of the
//! other.

use std::time::Duration;

use super::{Chunk, FetchRequest, MAX_READ_AHEAD};
use crate::mem::{Device, PinnedReader};
use crate::mr::{AccessDenied, Registry};

/// The first fetch of a message, which packets wait for.
const FIRST_READ_AHEAD: usize = 64 << 10;

/// Two buffers for the memory of one GPU.
#[derive(Debug)]
pub(super) struct DoubleBuffer {
    device: Device,
    /// `None` after a failure.
    reader: Option<PinnedReader>,
    buffers: [Option<Buffer>; 2],
}

#[derive(Clone, Copy, Debug)]
struct Buffer {
    chunk: Chunk,
    /// The copy that fills it; `None` when it has ended.
    copy: Option<u64>,
}

impl DoubleBuffer {
    pub(super) fn new(device: &Device) -> Self {
        let reader = PinnedReader::new(device, 2, MAX_READ_AHEAD as u64);
        let reader = reader.inspect_err(|why| tracing::warn!(%why, "no pinned memory to read to"));
        Self { device: device.clone(), reader: reader.ok(), buffers: [None; 2] }
    }

    pub(super) fn device(&self) -> &Device {
        &self.device
    }

    pub(super) fn is_usable(&self) -> bool {
        self.reader.is_some()
    }

    /// Starts to fetch a message; a packet needs `len` bytes of it now.
    pub(super) fn begin(
        &mut self,
        registry: &Registry,
        fetch_request: &FetchRequest,
        len: usize,
    ) -> Result<(), AccessDenied> {
        self.start(0, registry, fetch_request, FIRST_READ_AHEAD.max(len))
    }

    /// Copies the requested data to `into`, and starts to fetch what follows; `false` if the data
    /// was not requested, or will never arrive. It waits for `limit` at most.
    pub(super) fn gather(
        &mut self,
        registry: &Registry,
        fetch_request: &FetchRequest,
        limit: Duration,
        into: &mut [u8],
    ) -> Result<bool, AccessDenied> {
        let find =
            |buffer: &Option<Buffer>| buffer.as_ref()?.chunk.position(fetch_request, into.len());
        let [first, second] = [0, 1].map(|index| Some((index, find(&self.buffers[index])?)));
        let Some((index, at)) = first.or(second) else { return Ok(false) };
        let Some(Buffer { chunk, copy }) = self.buffers[index] else { return Ok(false) };
        if let Some(next) = fetch_request.starting_at(chunk.start.wrapping_add(chunk.len as u64))
            && find_start(&self.buffers[1 - index], &next).is_none()
        {
            // A failure is reported to the packet that needs the data.
            let _ = self.start(1 - index, registry, &next, MAX_READ_AHEAD);
        }
        let Some(reader) = &self.reader else { return Ok(false) };
        if let Some(copy) = copy {
            match reader.wait(copy, limit) {
                Ok(true) => self.buffers[index] = Some(Buffer { chunk, copy: None }),
                Ok(false) => return Err(AccessDenied::NotResident),
                Err(error) => {
                    tracing::warn!(%error, "the copy engine failed");
                    self.fail();
                    return Ok(false);
                }
            }
        }
        let bytes = reader.bytes(index, chunk.len as u64);
        Ok(bytes.and_then(|bytes| bytes.read_cached(at as u64, into)).is_ok())
    }

    /// Forgets the message. Copies that are under way end.
    pub(super) fn forget(&mut self) {
        self.buffers = [None; 2];
    }

    /// Starts to fetch at most `len` bytes of the message.
    fn start(
        &mut self,
        index: usize,
        registry: &Registry,
        fetch_request: &FetchRequest,
        len: usize,
    ) -> Result<(), AccessDenied> {
        self.buffers[index] = None;
        let Some(reader) = &mut self.reader else { return Ok(()) };
        let len = len.min(fetch_request.readable());
        let span = fetch_request.resolve(registry, len)?;
        let region = span.begin_read()?;
        match reader.start(index, &region) {
            Ok(copy) => {
                // The end of the registration, and of the memory, waits for the span, then for the
                // copy.
                span.add_copies(&reader.ticket(copy));
                let chunk = Chunk::new(fetch_request, len);
                self.buffers[index] = Some(Buffer { chunk, copy: Some(copy) });
            }
            Err(error) => {
                tracing::warn!(%error, "the copy engine failed");
                self.fail();
            }
        }
        Ok(())
    }

    fn fail(&mut self) {
        self.forget();
        if let Some(reader) = self.reader.take() {
            reader.fail();
        }
    }
}

/// Where the first byte of the request is in the buffer.
fn find_start(buffer: &Option<Buffer>, fetch_request: &FetchRequest) -> Option<usize> {
    buffer.as_ref()?.chunk.position(fetch_request, 1)
}

#[cfg(test)]
mod tests {
    use super::super::MessageId;
    use super::*;
    use crate::mem::Allocation;
    use crate::mem::sim::{FailNth, OpKind, Sim, SimConfig};
    use crate::mr::{Access, MemorySource, SoftMr, SoftPd};

    const LEN: usize = 700 << 10;
    const PACKET: usize = 4096;

    struct Memory {
        gpu: Device,
        allocation: Allocation,
        registry: Registry,
        pd: SoftPd,
        mr: SoftMr,
    }

    impl Memory {
        fn new(config: SimConfig) -> Self {
            let gpu = Sim::start(config).unwrap().device(0).unwrap();
            let allocation = gpu.alloc(LEN as u64).unwrap();
            allocation.write(0, &pattern(1)).unwrap();
            let registry = Registry::new();
            let pd = registry.pd();
            let whole = MemorySource::from(allocation.whole().unwrap()).without_window();
            let mr = registry.register(&pd, whole, Some(0), Access::ALL).unwrap();
            Self { gpu, allocation, registry, pd, mr }
        }

        fn request(&self, message: u64, at: usize) -> FetchRequest {
            FetchRequest {
                message: MessageId::Work(message),
                key: self.mr.lkey(),
                pd: self.pd.id(),
                need: Access::NONE,
                address: at as u64,
                remaining: (LEN - at) as u32,
                following: 0,
                last: MessageId::Work(message),
            }
        }

        /// One packet, as often as the copy is under way.
        fn gather(&self, buffer: &mut DoubleBuffer, message: u64, at: usize) -> Option<Vec<u8>> {
            let mut into = vec![0; PACKET];
            let request = self.request(message, at);
            let deadline = std::time::Instant::now() + Duration::from_secs(20);
            loop {
                match buffer.gather(&self.registry, &request, Duration::from_millis(1), &mut into) {
                    Ok(found) => return found.then_some(into),
                    Err(denied) => assert_eq!(denied, AccessDenied::NotResident),
                }
                assert!(std::time::Instant::now() < deadline, "the copy does not end");
            }
        }
    }

    fn pattern(seed: u64) -> Vec<u8> {
        (0..LEN as u64).map(|i| (i * 31 + (i >> 12) * 7 + seed) as u8).collect()
    }

    #[test]
    fn packets_are_made_while_the_next_buffer_is_filled() {
        let memory = Memory::new(SimConfig::default());
        let mut buffer = DoubleBuffer::new(&memory.gpu);
        let bytes = pattern(1);
        buffer.begin(&memory.registry, &memory.request(1, 0), PACKET).unwrap();
        for at in (0..LEN).step_by(PACKET) {
            let found = memory.gather(&mut buffer, 1, at).unwrap();
            assert!(found == bytes[at..at + PACKET], "at {at}");
        }
        // What was sent before the buffers at hand is not there any more; what is there is right.
        let mut kept = 0;
        for at in (0..LEN).step_by(PACKET).rev() {
            if let Some(found) = memory.gather(&mut buffer, 1, at) {
                assert!(found == bytes[at..at + PACKET], "again at {at}");
                kept += 1;
            }
        }
        assert!((1..LEN / PACKET).contains(&kept), "{kept} packets");
        assert_eq!(memory.gather(&mut buffer, 1, 0), None);
        // Another message reads anew.
        memory.allocation.write(0, &pattern(2)).unwrap();
        assert_eq!(memory.gather(&mut buffer, 2, LEN - PACKET), None);
        buffer.begin(&memory.registry, &memory.request(2, 0), PACKET).unwrap();
        assert!(memory.gather(&mut buffer, 2, 0).unwrap() == pattern(2)[..PACKET]);
    }

    #[test]
    fn deregistration_waits_for_the_copy() {
        let delay = Duration::from_millis(30);
        let memory = Memory::new(SimConfig::default().with_copy_delay(delay));
        let mut buffer = DoubleBuffer::new(&memory.gpu);
        let request = memory.request(1, 0);
        buffer.begin(&memory.registry, &request, PACKET).unwrap();
        let Memory { registry, mr, .. } = memory;
        mr.deregister().unwrap();
        assert!(buffer.reader.as_ref().unwrap().is_done(1));
        assert_eq!(
            buffer.begin(&registry, &request, PACKET),
            Err(AccessDenied::Stale),
            "no further copy is started"
        );
    }

    #[test]
    fn a_copy_that_fails_after_its_message_was_forgotten_keeps_no_memory() {
        let fail = FailNth { kind: OpKind::Copy, number: 1 };
        for is_dropped in [false, true] {
            let memory = Memory::new(SimConfig::default().with_fail(fail));
            let mut buffer = DoubleBuffer::new(&memory.gpu);
            buffer.begin(&memory.registry, &memory.request(1, 0), PACKET).unwrap();
            buffer.forget();
            let buffer = (!is_dropped).then_some(buffer);
            memory.mr.deregister().unwrap();
            assert!(memory.registry.is_empty());
            drop(buffer);
        }
    }

    #[test]
    fn without_a_copy_engine_nothing_is_found() {
        let fail = FailNth { kind: OpKind::Mem, number: 1 };
        let memory = Memory::new(SimConfig::default().with_fail(fail));
        let mut buffer = DoubleBuffer::new(&memory.gpu);
        buffer.begin(&memory.registry, &memory.request(1, 0), PACKET).unwrap();
        assert_eq!(memory.gather(&mut buffer, 1, 0), None);
        assert!(!buffer.is_usable());
        memory.mr.deregister().unwrap();
    }
}

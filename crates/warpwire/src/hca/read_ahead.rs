//! Read-ahead of device memory: one large copy for the packets of a message instead of one per
//! packet.
//!
//! A copy out of device memory costs microseconds, however short it is. So the first packet of a
//! message that needs one also fetches data for the packets behind it, at most to the end of the
//! message. Fetched data serves that message alone: the next one reads memory anew.

use warpwire_proto::Psn;

use crate::mr::{Access, AccessDenied, PdId, Registry};

/// Maximum of one fetch: long enough to amortize the cost of a copy, short enough that packets
/// start soon.
const MAX_READ_AHEAD: usize = 256 << 10;

/// The message that fetched data belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MessageId {
    /// A local work request, by the index of its first WQEBB, which never repeats.
    Work(u64),
    /// A read request of the peer, by its PSN.
    Read(Psn),
}

/// The data that a packet needs, and how much of the message follows.
pub(super) struct FetchRequest {
    pub message: MessageId,
    pub key: u32,
    pub pd: PdId,
    pub need: Access,
    pub address: u64,
    /// Bytes of the message from `address` to its end.
    pub remaining: u32,
}

/// The read-ahead buffer of a queue pair.
#[derive(Debug, Default)]
pub(super) struct ReadAhead {
    /// Allocated on first use: most queue pairs never touch device memory.
    bytes: Vec<u8>,
    cached: Option<(MessageId, u32, u64)>,
    len: usize,
}

impl ReadAhead {
    /// Copies the requested data to `into`, from the buffer if it is there.
    pub(super) fn gather(
        &mut self,
        registry: &Registry,
        fetch_request: &FetchRequest,
        into: &mut [u8],
    ) -> Result<(), AccessDenied> {
        if let Some(found) = self.cached_bytes(fetch_request, into.len()) {
            into.copy_from_slice(found);
            return Ok(());
        }
        let &FetchRequest { message, key, pd, need, address, remaining } = fetch_request;
        let more = (remaining as usize).min(MAX_READ_AHEAD);
        let span = registry.resolve(key, pd, need, address, into.len() as u64)?;
        if more <= into.len() || !span.is_device() {
            return span.gather(0, into);
        }
        drop(span);
        // All of it, or just what the packet needs: a message that exceeds its registration fails
        // at the packet that does.
        let Ok(span) = registry.resolve(key, pd, need, address, more as u64) else {
            return registry.resolve(key, pd, need, address, into.len() as u64)?.gather(0, into);
        };
        self.bytes.resize(MAX_READ_AHEAD, 0);
        self.cached = None;
        span.gather(0, &mut self.bytes[..more])?;
        (self.cached, self.len) = (Some((message, key, address)), more);
        into.copy_from_slice(&self.bytes[..into.len()]);
        Ok(())
    }

    fn cached_bytes(&self, fetch_request: &FetchRequest, len: usize) -> Option<&[u8]> {
        let (message, key, start) = self.cached?;
        if (message, key) != (fetch_request.message, fetch_request.key) {
            return None;
        }
        let at = usize::try_from(fetch_request.address.checked_sub(start)?).ok()?;
        self.bytes.get(..self.len)?.get(at..at.checked_add(len)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mem::sim::{Sim, SimConfig};

    #[test]
    fn read_ahead_serves_only_its_own_message() {
        let gpu = Sim::start(SimConfig::default()).unwrap().device(0).unwrap();
        let memory = gpu.alloc(1 << 20).unwrap();
        let registry = Registry::new();
        let pd = registry.pd();
        let mr = registry.register(&pd, memory.whole().unwrap(), Some(0), Access::ALL).unwrap();
        let mut read_ahead = ReadAhead::default();
        let mut fetch = |message, address, remaining| {
            let (key, need) = (mr.rkey(), Access::REMOTE_READ);
            let mut into = [0; 4096];
            let fetch_request =
                FetchRequest { message, key, pd: pd.id(), need, address, remaining };
            read_ahead.gather(&registry, &fetch_request, &mut into).map(|()| into)
        };
        let (first, second) = (MessageId::Read(Psn::new(1)), MessageId::Read(Psn::new(2)));
        assert_eq!(fetch(first, 0, 64 << 10), Ok([0; 4096]));
        memory.write(0, &[7; 128 << 10]).unwrap();
        // A message is read as memory was when it began; the next one as it is now.
        assert_eq!(fetch(first, 4096, 60 << 10), Ok([0; 4096]));
        assert_eq!(fetch(second, 4096, 60 << 10), Ok([7; 4096]));
        assert_eq!(fetch(first, 64 << 10, 4096), Ok([7; 4096]));
        // A message that exceeds the registration fails at the end, not before.
        let last = (1 << 20) - 4096;
        assert_eq!(fetch(MessageId::Work(9), last, 8192), Ok([0; 4096]));
        assert_eq!(fetch(MessageId::Work(9), last + 4096, 4096), Err(AccessDenied::Range));
    }
}

//! Device memory fetched ahead: one large copy for the packets of a message, rather than one for each.
//!
//! A copy out of device memory costs microseconds, however short it is. So the first packet of a message that needs
//! one fetches for those behind it too, at most as much as the message has. What was fetched belongs to that message
//! alone: the next sees memory as it is then.

use warpwire_proto::Psn;

use crate::mr::{Access, AccessDenied, PdId, Registry};

/// The most that is fetched at a time: long enough that a copy's price does not matter, short enough that packets
/// begin to flow soon.
const MAX_READ_AHEAD: usize = 256 << 10;

/// Which message data belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MessageId {
    /// Work of ours, by its first block; the count never comes again.
    Work(u64),
    /// A read of the peer, by its number.
    Read(Psn),
}

/// What is wanted, and what will be.
pub(super) struct FetchRequest {
    pub message: MessageId,
    pub key: u32,
    pub pd: PdId,
    pub need: Access,
    pub address: u64,
    /// How many bytes the message has from there on.
    pub remaining: u32,
}

/// What was fetched ahead.
#[derive(Debug, Default)]
pub(super) struct ReadAhead {
    /// Made when it is first needed: most queue pairs never touch device memory.
    bytes: Vec<u8>,
    cached: Option<(MessageId, u32, u64)>,
    len: usize,
}

impl ReadAhead {
    /// Copies what is wanted to `into`, out of what was fetched ahead if it is there.
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
        // All of it, or as much as the packet needs: a message that ends outside fails where it does.
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
        // The message was read as it was when it began; the next one is read as it is now.
        assert_eq!(fetch(first, 4096, 60 << 10), Ok([0; 4096]));
        assert_eq!(fetch(second, 4096, 60 << 10), Ok([7; 4096]));
        assert_eq!(fetch(first, 64 << 10, 4096), Ok([7; 4096]));
        // A message that passes the end fails there, not before.
        let last = (1 << 20) - 4096;
        assert_eq!(fetch(MessageId::Work(9), last, 8192), Ok([0; 4096]));
        assert_eq!(fetch(MessageId::Work(9), last + 4096, 4096), Err(AccessDenied::Range));
    }
}

//! Operations that a kernel executes by itself, with loads and stores: the algorithm of
//! `warpwire/detail/direct.cuh`.

use std::sync::atomic::{Ordering, fence};

use super::super::KernelStatus;
use super::super::layout::{self, NO_FAILURE, queue};
use super::{DeviceQp, DeviceTicket, FaultResult, Local};
use crate::hca::kernel_table_layout as table;
use crate::mem::DeviceAddr;
use crate::mem::sim::Block;
use crate::verbs::{Access, Remote};

/// The number in tickets of operations that were complete when they returned.
pub(super) const DONE: u64 = u64::MAX;
/// Longer transfers are posted: the GPU's copies are faster than a few threads.
const MAX_BYTES_PER_THREAD: u64 = 512;

/// Memory of the peer that a block function may access like its own: `map_remote` of `verbs.cuh`.
/// Dropping it ends that.
pub struct Mapping<'b> {
    block: &'b Block<'b>,
    entry: u64,
    rkey: u32,
    address: u64,
}

impl Mapping<'_> {
    /// Where the memory is.
    pub fn address(&self) -> DeviceAddr {
        DeviceAddr::new(self.address)
    }

    /// Whether it is to be dropped: the owner takes the memory back, or the connection has ended.
    pub fn is_revoked(&self) -> FaultResult<bool> {
        let tag = self.block.load_u64(DeviceAddr::new(self.entry + table::TAG))?;
        Ok(tag >> 32 != u64::from(self.rkey))
    }
}

impl Drop for Mapping<'_> {
    fn drop(&mut self) {
        // Without the table there is nobody who waits for it.
        let _ = leave(self.block, self.entry);
    }
}

/// Memory that may be accessed until [`leave`].
#[derive(Clone, Copy)]
struct Entered {
    entry: u64,
    address: u64,
}

/// The memory of one side of an operation, and the access that it needs.
enum Side {
    Remote(Remote, Access, u64),
    Local(Local, Access, u64),
    /// A word of the peer that is stored as a whole.
    Word(Remote),
}

impl<'b> DeviceQp<'b> {
    /// Maps `len` bytes of the peer's memory, if the kernel may access it by itself and everything
    /// that was posted is complete; otherwise it must be accessed by `put` and `get`. The owner
    /// cannot take the memory back until the mapping is dropped: it waits for half a second.
    pub fn map_remote(
        &self,
        at: Remote,
        len: u64,
        access: Access,
    ) -> FaultResult<Option<Mapping<'b>>> {
        let has_option = !access.contains(Access::REMOTE_ATOMIC) || self.has_direct_atomics();
        if self.constants.direct == 0 || !has_option || !self.is_idle()? {
            return Ok(None);
        }
        let Some(Entered { entry, address }) = self.enter(&Side::Remote(at, access, len))? else {
            return Ok(None);
        };
        let mapping = Mapping { block: self.block, entry, rkey: at.rkey, address };
        self.count(1)?;
        Ok(Some(mapping))
    }

    /// Writes, and adds to a word of the peer after that; `None` if that must be posted.
    pub(super) fn try_put(
        &self,
        to: Remote,
        from: Local,
        len: u64,
        signal: Option<(Remote, u64)>,
    ) -> FaultResult<Option<DeviceTicket>> {
        if len > self.max_direct() || signal.is_some() && !self.has_direct_atomics() {
            return Ok(None);
        }
        let data =
            [Side::Remote(to, Access::REMOTE_WRITE, len), Side::Local(from, Access::NONE, len)];
        let Some((word, add)) = signal else {
            return self.try_with(data, 1, |[to, from]| self.copy(to, from, len));
        };
        let [to, from] = data;
        let word = Side::Remote(word, Access::REMOTE_ATOMIC, 8);
        self.try_with([to, from, word], 2, |[to, from, word]| {
            self.copy(to, from, len)?;
            self.block.fetch_add_u64(DeviceAddr::new(word), add).map(drop)
        })
    }

    /// Writes bytes into a ring of the peer of `size` bytes, where counter `at` is, and after that
    /// a word; `false` if that must be posted.
    pub(crate) fn try_put_ring(
        &self,
        (ring, size): (Remote, u64),
        at: u64,
        bytes: &[u8],
        (word, value): (Remote, u64),
    ) -> FaultResult<bool> {
        let sides = [Side::Remote(ring, Access::REMOTE_WRITE, size), Side::Word(word)];
        let done = self.try_with(sides, 2, |[ring, word]| {
            let offset = at & (size - 1);
            let (first, rest) = bytes.split_at(bytes.len().min((size - offset) as usize));
            self.block.write(DeviceAddr::new(ring + offset), first)?;
            self.block.write(DeviceAddr::new(ring), rest)?;
            self.block.store_u64(DeviceAddr::new(word), value)
        });
        Ok(done?.is_some())
    }

    /// Writes a word; `false` if that must be posted.
    pub(crate) fn try_put_word(&self, word: Remote, value: u64) -> FaultResult<bool> {
        let done = self.try_with([Side::Word(word)], 1, |[word]| {
            self.block.store_u64(DeviceAddr::new(word), value)
        });
        Ok(done?.is_some())
    }

    /// Writes bytes of the kernel.
    pub(super) fn try_put_inline(
        &self,
        to: Remote,
        bytes: &[u8],
    ) -> FaultResult<Option<DeviceTicket>> {
        let to = Side::Remote(to, Access::REMOTE_WRITE, bytes.len() as u64);
        self.try_with([to], 1, |[to]| self.block.write(DeviceAddr::new(to), bytes))
    }

    pub(super) fn try_get(
        &self,
        to: Local,
        from: Remote,
        len: u64,
    ) -> FaultResult<Option<DeviceTicket>> {
        if len > self.max_direct() {
            return Ok(None);
        }
        let sides = [
            Side::Local(to, Access::LOCAL_WRITE, len),
            Side::Remote(from, Access::REMOTE_READ, len),
        ];
        self.try_with(sides, 1, |[to, from]| self.copy(to, from, len))
    }

    /// Applies an atomic operation to a word, and stores the previous value to `result`.
    pub(super) fn try_atomic(
        &self,
        word: Remote,
        result: Option<Local>,
        apply: impl FnOnce(DeviceAddr) -> FaultResult<u64>,
    ) -> FaultResult<Option<DeviceTicket>> {
        if !self.has_direct_atomics() {
            return Ok(None);
        }
        let word = Side::Remote(word, Access::REMOTE_ATOMIC, 8);
        let Some(result) = result else {
            return self.try_with([word], 1, |[word]| apply(DeviceAddr::new(word)).map(drop));
        };
        let result = Side::Local(result, Access::LOCAL_WRITE, 8);
        self.try_with([word, result], 1, |[word, result]| {
            let previous = apply(DeviceAddr::new(word))?;
            self.block.write(DeviceAddr::new(result), &previous.to_le_bytes())
        })
    }

    fn max_direct(&self) -> u64 {
        MAX_BYTES_PER_THREAD * u64::from(self.block.threads())
    }

    fn has_direct_atomics(&self) -> bool {
        self.constants.flags & layout::DIRECT_ATOMICS != 0
    }

    /// Executes an operation on memory that the table contains, if nothing that was posted before
    /// is outstanding; `None` if the operation must be posted.
    fn try_with<const N: usize>(
        &self,
        sides: [Side; N],
        work_requests: u64,
        operation: impl FnOnce([u64; N]) -> FaultResult<()>,
    ) -> FaultResult<Option<DeviceTicket>> {
        if self.constants.direct == 0 || !self.is_idle()? {
            return Ok(None);
        }
        let (mut entered, mut count) = ([Entered { entry: 0, address: 0 }; N], 0);
        for side in &sides {
            let Some(found) = self.enter(side)? else { break };
            entered[count] = found;
            count += 1;
        }
        if count == N {
            operation(entered.map(|found| found.address))?;
            self.count(work_requests)?;
        }
        for found in &entered[..count] {
            leave(self.block, found.entry)?;
        }
        Ok((count == N).then_some(DeviceTicket { number: DONE, status: KernelStatus::Ok }))
    }

    /// Counts work requests that were not posted.
    fn count(&self, work_requests: u64) -> FaultResult<()> {
        let counter = DeviceAddr::new(self.constants.direct + table::OPERATIONS);
        self.block.fetch_add_u64(counter, work_requests).map(drop)
    }

    /// Whether everything that was posted has completed, with success.
    fn is_idle(&self) -> FaultResult<bool> {
        let queue = self.sends();
        let reserved = queue.load(queue::RESERVED)?;
        if queue.load(queue::COMPLETED)? < reserved && !queue.advance_completed(reserved - 1)? {
            return Ok(false);
        }
        let closed = self.block.load_u32(queue.at(queue::CLOSED))?;
        Ok(closed == 0 && queue.load(queue::FAILURE)? == NO_FAILURE)
    }

    /// Announces an access, then checks that it is allowed: the CPU closes an entry, then looks for
    /// announcements.
    fn enter(&self, side: &Side) -> FaultResult<Option<Entered>> {
        let (first, key, at, need, len) = match *side {
            Side::Remote(Remote { address, rkey }, need, len) => (0, rkey, address, need, len),
            Side::Local(Local { address, lkey }, need, len) => {
                (table::SLOTS, lkey, address, need, len)
            }
            Side::Word(Remote { address, rkey }) => (0, rkey, address, Access::REMOTE_WRITE, 8),
        };
        let entry = self.constants.direct + (first + table::slot_of(key)) * table::ENTRY_LEN;
        let load = |field| self.block.load_u64(DeviceAddr::new(entry + field));
        let tag = load(table::TAG)?;
        if tag >> 32 != u64::from(key) {
            return Ok(None);
        }
        self.block.fetch_add_u64(DeviceAddr::new(entry + table::USERS), 1)?;
        fence(Ordering::SeqCst);
        let access = Access::from_bits_truncate(tag as u8);
        let (offset, length) = (at.wrapping_sub(load(table::IOVA)?), load(table::LENGTH)?);
        let allowed = load(table::TAG)? == tag
            && access.contains(need)
            && offset <= length
            && len <= length - offset;
        let address = load(table::ADDRESS)?.wrapping_add(offset);
        // A word for atomics is aligned; otherwise the HCA reports it. Other words it can write
        // anywhere.
        let aligned = match side {
            Side::Word(_) => address.is_multiple_of(8),
            _ => need != Access::REMOTE_ATOMIC || at.is_multiple_of(8),
        };
        if !allowed || !aligned {
            leave(self.block, entry)?;
            return Ok(None);
        }
        Ok(Some(Entered { entry, address }))
    }

    fn copy(&self, to: u64, from: u64, len: u64) -> FaultResult<()> {
        let mut bytes = vec![0; len as usize];
        self.block.read(DeviceAddr::new(from), &mut bytes)?;
        self.block.write(DeviceAddr::new(to), &bytes)
    }
}

/// Ends an access that was announced.
fn leave(block: &Block<'_>, entry: u64) -> FaultResult<()> {
    block.fetch_add_u64(DeviceAddr::new(entry + table::USERS), u64::MAX).map(drop)
}

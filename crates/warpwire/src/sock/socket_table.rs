//! The table of sockets: slots that are reused, each use with a new generation.

use std::collections::VecDeque;
use std::ops::{Index, IndexMut};

use rustix::io::Errno;

use super::kinds::{Listener, Slot, SockOpts, Socket};
use super::layout::split_handle;

/// All slots of a service thread.
pub(super) struct SocketTable {
    slots: Vec<Slot>,
    /// Free slots, the least recently used first.
    pub(super) vacant: VecDeque<u16>,
    /// Slots from this index on have never been used.
    pub(super) used_up_to: u16,
}

impl SocketTable {
    pub(super) fn new(count: u16) -> Self {
        Self {
            slots: (0..count).map(Slot::vacant).collect(),
            vacant: (0..count).collect(),
            used_up_to: 0,
        }
    }

    pub(super) fn has_vacant(&self) -> bool {
        !self.vacant.is_empty()
    }

    pub(super) fn has_open(&self) -> bool {
        self.vacant.len() < self.slots.len()
    }

    /// Opens a free slot, with a new generation; `None` if all are used.
    pub(super) fn open(&mut self, options: SockOpts) -> Option<u16> {
        let index = self.vacant.pop_front()?;
        self.used_up_to = self.used_up_to.max(index + 1);
        self[index].common.reopen(options);
        Some(index)
    }

    /// The slot that a handle names; `EBADF` if it is closed or of another generation.
    pub(super) fn find(&self, handle: i32) -> Result<u16, Errno> {
        let (index, generation) = split_handle(handle);
        match self.slots.get(usize::from(index)) {
            Some(Slot { common, .. })
                if common.open && common.closing.is_none() && common.generation == generation =>
            {
                Ok(index)
            }
            _ => Err(Errno::BADF),
        }
    }

    /// The slot whose descriptor was watched with this handle.
    pub(super) fn watched(&mut self, handle: i32) -> Option<&mut Slot> {
        let (index, generation) = split_handle(handle);
        let slot = self.slots.get_mut(usize::from(index))?;
        (slot.common.generation == generation && slot.common.fd.is_some()).then_some(slot)
    }

    /// The open listener that a handle names.
    pub(super) fn listener(&mut self, handle: i32) -> Option<(u16, &mut Listener)> {
        let index = self.find(handle).ok()?;
        match &mut self[index].socket {
            Socket::Listener(listener) => Some((index, listener)),
            _ => None,
        }
    }
}

impl Index<u16> for SocketTable {
    type Output = Slot;

    fn index(&self, index: u16) -> &Slot {
        &self.slots[usize::from(index)]
    }
}

impl IndexMut<u16> for SocketTable {
    fn index_mut(&mut self, index: u16) -> &mut Slot {
        &mut self.slots[usize::from(index)]
    }
}

//! Handles: an index and a generation in 64 bits, so that stale and forged handles are detected.
//!
//! A slot never moves and has its own lock: a lookup takes no other one, so copies through
//! different handles share nothing, and removing an object waits only for the users of that object.

use std::sync::OnceLock;

use parking_lot::{MappedRwLockReadGuard, Mutex, RwLock, RwLockReadGuard};

/// Slots of the first chunk; each further chunk has twice as many as the one before.
const FIRST: u32 = 64;
/// 64 × (2²⁰ − 1) slots: more than a process can have mappings.
const CHUNKS: usize = 20;
const SLOTS: u32 = FIRST * ((1 << CHUNKS) - 1);

struct Slot<T> {
    /// Part of the handle; changes with each object. Never 0, so no handle is 0.
    generation: u32,
    value: Option<T>,
}

type Chunk<T> = Box<[RwLock<Slot<T>>]>;

struct Vacant {
    indices: Vec<u32>,
    /// Indices from here on were never used.
    unused: u32,
}

/// Objects that C programs refer to by handle.
pub(crate) struct Table<T> {
    chunks: [OnceLock<Chunk<T>>; CHUNKS],
    vacant: Mutex<Vacant>,
    /// The first generation of every slot: differs between processes, so that a child's handles are
    /// not mistaken for its parent's.
    salt: u32,
}

impl<T> Table<T> {
    pub(crate) fn new(salt: u32) -> Self {
        Self {
            chunks: [const { OnceLock::new() }; CHUNKS],
            vacant: Mutex::new(Vacant { indices: Vec::new(), unused: 0 }),
            salt: salt.max(1),
        }
    }

    /// Inserts an object and returns its handle; `None` if the table is full.
    pub(crate) fn insert(&self, value: T) -> Option<u64> {
        let index = {
            let mut vacant = self.vacant.lock();
            match vacant.indices.pop() {
                Some(index) => index,
                None if vacant.unused < SLOTS => {
                    vacant.unused += 1;
                    vacant.unused - 1
                }
                None => return None,
            }
        };
        let (chunk, offset) = locate(index)?;
        let chunk = self.chunks[chunk].get_or_init(|| {
            let empty = || RwLock::new(Slot { generation: self.salt, value: None });
            std::iter::repeat_with(empty).take((FIRST as usize) << chunk).collect()
        });
        let mut slot = chunk[offset].write();
        slot.value = Some(value);
        Some(u64::from(slot.generation) << 32 | u64::from(index))
    }

    /// The object of a handle, kept alive by the guard.
    pub(crate) fn get(&self, handle: u64) -> Option<MappedRwLockReadGuard<'_, T>> {
        let slot = self.slot(handle)?.read();
        if u64::from(slot.generation) != handle >> 32 {
            return None;
        }
        RwLockReadGuard::try_map(slot, |slot| slot.value.as_ref()).ok()
    }

    /// Removes an object once it is no longer in use. Its handle becomes invalid.
    pub(crate) fn remove(&self, handle: u64) -> Option<T> {
        let taken = {
            let mut slot = self.slot(handle)?.write();
            if u64::from(slot.generation) != handle >> 32 {
                return None;
            }
            let taken = slot.value.take()?;
            slot.generation = slot.generation.checked_add(1).unwrap_or(1);
            taken
        };
        self.vacant.lock().indices.push(handle as u32);
        Some(taken)
    }

    fn slot(&self, handle: u64) -> Option<&RwLock<Slot<T>>> {
        let (chunk, offset) = locate(handle as u32)?;
        self.chunks[chunk].get()?.get(offset)
    }
}

/// The chunk of a slot, and the offset in it.
fn locate(index: u32) -> Option<(usize, usize)> {
    if index >= SLOTS {
        return None;
    }
    let shifted = index + FIRST;
    let chunk = shifted.ilog2() - FIRST.ilog2();
    Some((chunk as usize, (shifted - (FIRST << chunk)) as usize))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slot_numbers_have_no_gaps() {
        assert_eq!(locate(0), Some((0, 0)));
        assert_eq!(locate(63), Some((0, 63)));
        assert_eq!(locate(64), Some((1, 0)));
        assert_eq!(locate(191), Some((1, 127)));
        assert_eq!(locate(192), Some((2, 0)));
        assert_eq!(locate(SLOTS - 1), Some((CHUNKS - 1, ((FIRST as usize) << (CHUNKS - 1)) - 1)));
        assert_eq!(locate(SLOTS), None);
        assert_eq!(locate(u32::MAX), None);
    }

    #[test]
    fn a_handle_refers_to_one_object_only() {
        let table = Table::new(7);
        let first = table.insert("a").unwrap();
        assert_eq!(table.get(first).as_deref(), Some(&"a"));
        assert_eq!(table.remove(first), Some("a"));
        assert_eq!(table.remove(first), None);
        let second = table.insert("b").unwrap();
        assert_eq!(first as u32, second as u32, "the slot is reused");
        assert!(table.get(first).is_none());
        assert!(table.remove(first).is_none());
        assert_eq!(table.get(second).as_deref(), Some(&"b"));
    }

    #[test]
    fn forged_handles_are_rejected() {
        let table = Table::new(1);
        let known = table.insert(()).unwrap();
        for handle in
            [0, 1, u64::MAX, known + 1, known + (1 << 32), known ^ (1 << 63), SLOTS.into()]
        {
            assert!(table.get(handle).is_none(), "{handle:#x}");
            assert!(table.remove(handle).is_none(), "{handle:#x}");
        }
    }

    #[test]
    fn many_objects_from_many_threads() {
        let table = Table::new(u32::MAX);
        std::thread::scope(|scope| {
            for thread in 0..4_u32 {
                let table = &table;
                scope.spawn(move || {
                    let handles: Vec<_> =
                        (0..500).map(|n| table.insert(thread * 1000 + n).unwrap()).collect();
                    for (n, handle) in (0..).zip(handles) {
                        assert_ne!(handle >> 32, 0);
                        assert_eq!(table.get(handle).as_deref(), Some(&(thread * 1000 + n)));
                        assert_eq!(table.remove(handle), Some(thread * 1000 + n));
                    }
                });
            }
        });
    }
}

//! Slot map of open flows: an id is an index and a generation counter, so ids of closed flows stay
//! invalid.

/// A flow, as returned by [`Link::open`](super::Link::open). Valid on that link only.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FlowId {
    index: u32,
    generation: u32,
}

/// The flows of a link, with its per-flow state.
pub(super) struct Flows<T> {
    slots: Vec<Slot<T>>,
    free: Vec<usize>,
}

struct Slot<T> {
    generation: u32,
    flow: Option<T>,
}

impl<T> Flows<T> {
    pub(super) fn new() -> Self {
        Self { slots: Vec::new(), free: Vec::new() }
    }

    pub(super) fn insert(&mut self, flow: T) -> FlowId {
        let index = self.free.pop().unwrap_or_else(|| {
            self.slots.push(Slot { generation: 0, flow: None });
            self.slots.len() - 1
        });
        let slot = &mut self.slots[index];
        slot.flow = Some(flow);
        FlowId { index: index as u32, generation: slot.generation }
    }

    pub(super) fn remove(&mut self, id: FlowId) -> Option<T> {
        let slot = self.slots.get_mut(id.index as usize)?;
        if slot.generation != id.generation {
            return None;
        }
        let flow = slot.flow.take()?;
        slot.generation = slot.generation.wrapping_add(1);
        self.free.push(id.index as usize);
        Some(flow)
    }

    pub(super) fn get(&self, id: FlowId) -> Option<&T> {
        let slot = self.slots.get(id.index as usize)?;
        slot.flow.as_ref().filter(|_| slot.generation == id.generation)
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.slots.iter_mut().filter_map(|slot| slot.flow.as_mut())
    }

    #[inline]
    pub(super) fn get_mut(&mut self, id: FlowId) -> Option<&mut T> {
        let slot = self.slots.get_mut(id.index as usize)?;
        slot.flow.as_mut().filter(|_| slot.generation == id.generation)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_of_removed_flows_are_invalid() {
        let mut flows = Flows::new();
        let (a, b) = (flows.insert('a'), flows.insert('b'));
        assert_eq!(flows.remove(a), Some('a'));
        assert_eq!(flows.remove(a), None);
        let c = flows.insert('c');
        assert_eq!(flows.get_mut(a), None);
        assert_eq!(flows.get_mut(c), Some(&mut 'c'));
        assert_eq!(flows.get_mut(b), Some(&mut 'b'));
        assert_eq!(flows.get_mut(FlowId { index: 9, generation: 0 }), None);
    }
}

//! Memory windows: keys for parts of a registration, with rights of their own.
//!
//! A window's key is in the table of the registrations. Its slot is open from allocation to
//! deallocation; its label has [`USED`] while the window is bound, so that only then the key
//! resolves. A window names its registration by key: resolving one enters both slots, the window's
//! first, and the guard of the registration's stays in the span. A window is closed by closing its
//! slot, and then waiting for the guards that the registration's slot has at that time. So
//! revocation and deregistration need not know of windows, and invalidation needs no list of spans.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use super::Access;
use super::denied::AccessDenied;
use super::keys::TAG;
use super::registration::{Registration, Target};
use super::registry::{PdId, Registry, SoftPd, USED, WINDOW, locate, reason};
use super::span::Span;
use crate::error::Result;

pub use warpwire_proto::qp::{MwBind, MwType, next_rkey};

/// The windows that are bound to a registration: `None` if it permits none.
#[derive(Clone)]
pub(super) struct BoundWindows(Option<Arc<AtomicU32>>);

impl BoundWindows {
    pub(super) fn of(access: Access) -> Self {
        Self(access.contains(Access::MW_BIND).then(Arc::default))
    }

    pub(super) fn count(&self) -> u32 {
        self.0.as_ref().map_or(0, |count| count.load(Ordering::Acquire))
    }

    fn add(&self) -> Option<WindowUse> {
        let count = self.0.clone()?;
        count.fetch_add(1, Ordering::AcqRel);
        Some(WindowUse(count))
    }
}

/// The use of a registration by a window; ends when it is dropped.
struct WindowUse(Arc<AtomicU32>);

impl Drop for WindowUse {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

/// The target of a window's key.
pub(super) struct Window {
    kind: MwType,
    binding: Option<Binding>,
}

struct Binding {
    /// The key of the registration, and the window's offset in it.
    lkey: u32,
    offset: u64,
    /// The only queue pair that may use it.
    qp: Option<u32>,
    of: WindowUse,
}

/// A memory window of the software HCA. Dropping it deallocates it: its key is then invalid.
///
/// ```
/// use warpwire::mr::{Access, AccessDenied, HostMemory, MwBind, MwType, Registry, next_rkey};
/// let registry = Registry::new();
/// let pd = registry.pd();
/// let rights = Access::LOCAL_WRITE | Access::MW_BIND;
/// let mr = registry.register(&pd, HostMemory::new(4096)?, Some(0x1000), rights)?;
/// let window = registry.alloc_window(&pd, MwType::Type1)?;
/// let rkey = next_rkey(window.rkey());
/// let (kind, access) = (MwType::Type1, Access::REMOTE_WRITE);
/// let bind = MwBind { kind, rkey, lkey: mr.lkey(), address: 0x1100, len: 64, access };
/// registry.bind_window(pd.id(), &bind).unwrap();
/// let find = |need, at| registry.resolve(rkey, pd.id(), need, at, 64).map(drop);
/// assert_eq!(find(Access::REMOTE_WRITE, 0x1100), Ok(()));
/// assert_eq!(find(Access::REMOTE_WRITE, 0x1101), Err(AccessDenied::Range));
/// assert_eq!(find(Access::REMOTE_READ, 0x1100), Err(AccessDenied::Rights));
/// # Ok::<(), warpwire::Error>(())
/// ```
#[derive(Debug)]
pub struct SoftMw {
    registry: Registry,
    kind: MwType,
    key: u32,
}

impl SoftMw {
    /// Its key when it was allocated, which is not bound. Later keys have the same upper 24 bits.
    pub fn rkey(&self) -> u32 {
        self.key
    }

    /// Its type.
    pub fn kind(&self) -> MwType {
        self.kind
    }
}

impl Drop for SoftMw {
    fn drop(&mut self) {
        let registry = &self.registry;
        let Some(slot) = registry.slot(self.key) else { return };
        let transitions = registry.window_transitions().lock();
        let last = self.key & !TAG | slot.0.peek().0 & TAG;
        let ended = slot.0.close(last & TAG | USED);
        registry.drain_binding(ended.as_ref());
        drop((ended, transitions));
        registry.release_key(last);
    }
}

impl Registry {
    /// Allocates a memory window, which is not bound.
    ///
    /// # Errors
    /// [`Kind::OutOfMemory`](crate::error::Kind::OutOfMemory) if every key is in use.
    pub fn alloc_window(&self, pd: &SoftPd, kind: MwType) -> Result<SoftMw> {
        let target = Target::Window(Window { kind, binding: None });
        let key = self.publish(Registration::of_window(pd, target))?;
        Ok(SoftMw { registry: self.clone(), kind, key })
    }

    /// Binds a window: its previous key becomes invalid, and the next one valid. `pd` is the domain
    /// of the queue pair that binds, with its number: see [`PdId::of_qp`].
    ///
    /// # Errors
    /// The window and the registration are as before: `Unknown` if the key is not a window's,
    /// `WrongPd`, `Rights` if the registration permits no windows or not these rights, or if the
    /// type differs; `Range`; `Bound` for a window of type 2 that is not invalid.
    pub fn bind_window(&self, pd: PdId, bind: &MwBind) -> std::result::Result<(), AccessDenied> {
        let slot = self.slot(bind.rkey).ok_or(AccessDenied::Unknown)?;
        let _transitions = self.window_transitions().lock();
        {
            let window = slot.0.enter(|label| label & WINDOW != 0);
            let window = window.map_err(|_| AccessDenied::Unknown)?;
            let Target::Window(known) = &window.target else { return Err(AccessDenied::Unknown) };
            if !window.pd.is_same_domain(pd) {
                return Err(AccessDenied::WrongPd);
            }
            if known.kind != bind.kind {
                return Err(AccessDenied::Rights);
            }
            if known.kind == MwType::Type2 && known.binding.is_some() {
                return Err(AccessDenied::Bound);
            }
        }
        let binding = match (bind.len, bind.kind) {
            (0, MwType::Type1) => None,
            (0, MwType::Type2) => return Err(AccessDenied::Range),
            _ => Some(self.new_binding(pd, bind)?),
        };
        self.rebind(bind.rkey, |window| {
            window.access = bind.access;
            let zero_based = bind.access.contains(Access::ZERO_BASED);
            window.iova = if zero_based { 0 } else { bind.address };
            window.len = bind.len;
            binding
        })
    }

    fn new_binding(&self, pd: PdId, bind: &MwBind) -> std::result::Result<Binding, AccessDenied> {
        let slot = self.slot(bind.lkey).ok_or(AccessDenied::Unknown)?;
        let wanted = bind.lkey & TAG | USED;
        let denied = |(label, open)| reason(label, open, wanted);
        let mr = slot.0.enter(|label| is_registration(label, wanted)).map_err(denied)?;
        if !mr.pd.is_same_domain(pd) {
            return Err(AccessDenied::WrongPd);
        }
        // A window may not write what its owner's work may not.
        let writes = bind.access.intersects(Access::REMOTE_WRITE | Access::REMOTE_ATOMIC);
        if writes && !mr.access.contains(Access::LOCAL_WRITE) {
            return Err(AccessDenied::Rights);
        }
        let range = locate(mr.iova, mr.len, bind.address, bind.len);
        let offset = range.ok_or(AccessDenied::Range)?;
        let of = mr.windows.add().ok_or(AccessDenied::Rights)?;
        let qp = (bind.kind == MwType::Type2).then(|| pd.qp());
        Ok(Binding { lkey: bind.lkey, offset, qp, of })
    }

    /// Gives a window another binding, or none. When it returns, no access by its previous key is
    /// in progress. The caller holds the lock of transitions.
    fn rebind(
        &self,
        rkey: u32,
        change: impl FnOnce(&mut Registration) -> Option<Binding>,
    ) -> std::result::Result<(), AccessDenied> {
        let slot = self.slot(rkey).ok_or(AccessDenied::Unknown)?;
        let mut window = slot.0.close(rkey & TAG | WINDOW).ok_or(AccessDenied::Unknown)?;
        self.drain_binding(Some(&window));
        let binding = change(&mut window);
        let label = rkey & TAG | WINDOW | if binding.is_some() { USED } else { 0 };
        if let Target::Window(known) = &mut window.target {
            known.binding = binding;
        }
        // It was closed above, and the lock is held.
        slot.0.open(label, window).map_err(|_| AccessDenied::Unknown)
    }

    /// Waits for accesses through a window whose slot was closed.
    fn drain_binding(&self, window: Option<&Registration>) {
        let Some(Registration { target: Target::Window(window), .. }) = window else { return };
        let Some(Binding { lkey, .. }) = window.binding else { return };
        let Some(slot) = self.slot(lkey) else { return };
        // A transition of the registration in between waits for all guards too, but perhaps not for
        // those that entered after it had begun.
        loop {
            let (label, open) = slot.0.peek();
            if !open || slot.0.relabel_and_drain(label, label) {
                return;
            }
        }
    }

    /// Resolves `len` bytes at `offset` of a window whose slot the caller has entered.
    #[inline(never)]
    pub(super) fn resolve_window(
        &self,
        window: &Window,
        pd: PdId,
        need: Access,
        offset: u64,
        len: u64,
    ) -> std::result::Result<Span<'_>, AccessDenied> {
        let Some(Binding { lkey, offset: start, qp, of }) = &window.binding else {
            return Err(AccessDenied::Invalidated);
        };
        if qp.is_some_and(|qp| qp != pd.qp()) {
            return Err(AccessDenied::WrongQp);
        }
        let slot = self.slot(*lkey).ok_or(AccessDenied::Unknown)?;
        let wanted = lkey & TAG | USED;
        let guard = slot
            .0
            .enter_shard(self.shard(), |label| is_registration(label, wanted))
            .map_err(|(label, open)| reason(label, open, wanted))?;
        // Not a later registration whose key happens to be the same.
        if !guard.windows.0.as_ref().is_some_and(|count| Arc::ptr_eq(count, &of.0)) {
            return Err(AccessDenied::Stale);
        }
        let offset = start + offset;
        guard.target.check(offset, len, need)?;
        Ok(Span::new(guard, offset, len))
    }

    /// Invalidates a window of type 2, for its queue pair or that one's peer.
    pub(super) fn invalidate_window(
        &self,
        rkey: u32,
        pd: PdId,
    ) -> std::result::Result<(), AccessDenied> {
        let slot = self.slot(rkey).ok_or(AccessDenied::Unknown)?;
        let _transitions = self.window_transitions().lock();
        {
            let wanted = rkey & TAG | USED | WINDOW;
            let denied = |(label, open)| reason(label, open, wanted & !WINDOW);
            let window = slot.0.enter(|label| label == wanted).map_err(denied)?;
            if !window.pd.is_same_domain(pd) {
                return Err(AccessDenied::WrongPd);
            }
            match &window.target {
                Target::Window(Window { kind: MwType::Type2, binding: Some(binding) }) => {
                    if binding.qp != Some(pd.qp()) {
                        return Err(AccessDenied::WrongQp);
                    }
                }
                _ => return Err(AccessDenied::Rights),
            }
        }
        self.rebind(rkey, |_| None)
    }
}

/// Whether a slot with this label has the registration of a key, also if that was invalidated for
/// peers: windows have keys of their own.
fn is_registration(label: u32, wanted: u32) -> bool {
    label & !super::registry::REMOTE_INVALIDATED == wanted
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mr::{HostMemory, SoftMr};

    const BASE: u64 = 0x1000;
    const RIGHTS: Access = Access::ALL;

    struct Setup {
        registry: Registry,
        pd: SoftPd,
        mr: SoftMr,
        memory: HostMemory,
    }

    fn setup(access: Access) -> Setup {
        let registry = Registry::new();
        let (pd, memory) = (registry.pd(), HostMemory::new(4096).unwrap());
        let mr = registry.register(&pd, memory.clone(), Some(BASE), access).unwrap();
        Setup { registry, pd, mr, memory }
    }

    impl Setup {
        fn new() -> Self {
            setup(RIGHTS | Access::MW_BIND)
        }

        fn window(&self, kind: MwType) -> SoftMw {
            self.registry.alloc_window(&self.pd, kind).unwrap()
        }

        /// Bytes 256 to 319, for remote writes, under the window's next key.
        fn request(&self, window: &SoftMw) -> MwBind {
            MwBind {
                kind: window.kind(),
                rkey: next_rkey(window.rkey()),
                lkey: self.mr.lkey(),
                address: BASE + 256,
                len: 64,
                access: Access::REMOTE_WRITE,
            }
        }

        fn bind(&self, qp: u32, bind: &MwBind) -> std::result::Result<(), AccessDenied> {
            self.registry.bind_window(self.pd.id().of_qp(qp), bind)
        }

        /// Writes a byte through a key.
        fn write(&self, qp: u32, rkey: u32, at: u64) -> std::result::Result<(), AccessDenied> {
            let (pd, need) = (self.pd.id().of_qp(qp), Access::REMOTE_WRITE);
            self.registry.resolve(rkey, pd, need, at, 1)?.scatter(0, &[7])
        }

        fn byte(&self, offset: u64) -> u8 {
            let mut byte = [0];
            self.memory.bytes().read(offset, &mut byte).unwrap();
            byte[0]
        }
    }

    #[test]
    fn a_window_covers_its_range_with_its_rights() {
        let setup = Setup::new();
        let window = setup.window(MwType::Type1);
        let bind = setup.request(&window);
        let old = window.rkey();
        assert_eq!(setup.write(1, old, BASE + 256), Err(AccessDenied::Invalidated));
        setup.bind(1, &bind).unwrap();
        assert_eq!(setup.mr.bound_windows(), 1);
        for (at, outcome) in [
            (256, Ok(())),
            (319, Ok(())),
            (255, Err(AccessDenied::Range)),
            (320, Err(AccessDenied::Range)),
        ] {
            assert_eq!(setup.write(2, bind.rkey, BASE + at), outcome, "{at}");
        }
        assert_eq!((setup.byte(256), setup.byte(319), setup.byte(320)), (7, 7, 0));
        assert_eq!(setup.write(1, old, BASE + 256), Err(AccessDenied::Stale));
        let resolve = |pd: PdId, need| {
            setup.registry.resolve(bind.rkey, pd, need, BASE + 256, 8).map(drop).unwrap_err()
        };
        let (own, other) = (setup.pd.id(), setup.registry.pd());
        assert_eq!(resolve(own, Access::REMOTE_READ), AccessDenied::Rights);
        assert_eq!(resolve(own, Access::NONE), AccessDenied::Rights, "it is no local key");
        assert_eq!(resolve(own, Access::LOCAL_WRITE), AccessDenied::Rights);
        assert_eq!(resolve(other.id(), Access::REMOTE_WRITE), AccessDenied::WrongPd);
        // Peers can invalidate the registration's own key; the window's stays.
        setup.registry.invalidate(setup.mr.rkey(), own).unwrap();
        assert_eq!(setup.write(1, setup.mr.rkey(), BASE), Err(AccessDenied::Invalidated));
        assert_eq!(setup.write(1, bind.rkey, BASE + 256), Ok(()));
        // Nor is a window invalidated that is not of type 2.
        let denied = setup.registry.invalidate(bind.rkey, own.of_qp(1));
        assert_eq!(denied, Err(AccessDenied::Rights));
    }

    #[test]
    fn zero_based_windows_begin_at_zero() {
        let setup = Setup::new();
        let window = setup.window(MwType::Type1);
        let access = Access::REMOTE_WRITE | Access::ZERO_BASED;
        let bind = MwBind { access, ..setup.request(&window) };
        setup.bind(1, &bind).unwrap();
        assert_eq!(setup.write(1, bind.rkey, 63), Ok(()));
        assert_eq!(setup.write(1, bind.rkey, 64), Err(AccessDenied::Range));
        assert_eq!(setup.write(1, bind.rkey, BASE + 256), Err(AccessDenied::Range));
        assert_eq!(setup.byte(256 + 63), 7);
    }

    #[test]
    fn a_window_of_type_1_is_bound_again_and_to_nothing() {
        let setup = Setup::new();
        let window = setup.window(MwType::Type1);
        let first = setup.request(&window);
        setup.bind(1, &first).unwrap();
        let second = MwBind { rkey: next_rkey(first.rkey), address: BASE + 512, ..first };
        setup.bind(1, &second).unwrap();
        assert_eq!(setup.mr.bound_windows(), 1);
        assert_eq!(setup.write(1, first.rkey, BASE + 256), Err(AccessDenied::Stale));
        assert_eq!(setup.write(1, second.rkey, BASE + 256), Err(AccessDenied::Range));
        assert_eq!(setup.write(1, second.rkey, BASE + 512), Ok(()));
        let none = MwBind { rkey: next_rkey(second.rkey), len: 0, lkey: 0, ..first };
        setup.bind(1, &none).unwrap();
        assert_eq!(setup.mr.bound_windows(), 0);
        for rkey in [second.rkey, none.rkey] {
            let denied = setup.write(1, rkey, BASE + 512).unwrap_err();
            assert_eq!(denied, AccessDenied::Invalidated);
        }
    }

    #[test]
    fn a_window_of_type_2_belongs_to_its_queue_pair_until_it_is_invalidated() {
        let setup = Setup::new();
        let window = setup.window(MwType::Type2);
        let bind = setup.request(&window);
        setup.bind(5, &bind).unwrap();
        assert_eq!(setup.write(5, bind.rkey, BASE + 256), Ok(()));
        assert_eq!(setup.write(6, bind.rkey, BASE + 256), Err(AccessDenied::WrongQp));
        assert_eq!(setup.bind(5, &bind), Err(AccessDenied::Bound));
        let invalidate = |qp, rkey| setup.registry.invalidate(rkey, setup.pd.id().of_qp(qp));
        assert_eq!(invalidate(6, bind.rkey), Err(AccessDenied::WrongQp));
        assert_eq!(invalidate(5, window.rkey()), Err(AccessDenied::Stale));
        assert_eq!(invalidate(5, bind.rkey), Ok(()));
        assert_eq!(invalidate(5, bind.rkey), Err(AccessDenied::Invalidated));
        assert_eq!(setup.write(5, bind.rkey, BASE + 256), Err(AccessDenied::Invalidated));
        assert_eq!(setup.mr.bound_windows(), 0);
        // Its owner chooses the low eight bits.
        let again = MwBind { rkey: bind.rkey ^ 0x5a, ..bind };
        setup.bind(6, &again).unwrap();
        assert_eq!(setup.write(6, again.rkey, BASE + 256), Ok(()));
        assert_eq!(setup.write(6, bind.rkey, BASE + 256), Err(AccessDenied::Stale));
    }

    #[test]
    fn refused_binds_change_nothing() {
        let setup = Setup::new();
        let (one, two) = (setup.window(MwType::Type1), setup.window(MwType::Type2));
        let good = setup.request(&one);
        let read_only = setup.registry.register(
            &setup.pd,
            HostMemory::new(4096).unwrap(),
            Some(BASE),
            Access::MW_BIND | Access::REMOTE_READ,
        );
        let without = setup.registry.register(&setup.pd, setup.memory.clone(), None, RIGHTS);
        let (read_only, without) = (read_only.unwrap(), without.unwrap());
        let other = setup.registry.pd();
        let foreign = setup.registry.alloc_window(&other, MwType::Type1).unwrap();
        let (range, rights) = (AccessDenied::Range, AccessDenied::Rights);
        for (bind, denied) in [
            (MwBind { len: 4096, ..good }, range),
            (MwBind { address: BASE - 1, ..good }, range),
            (MwBind { len: u64::MAX, ..good }, range),
            (MwBind { kind: MwType::Type2, ..good }, rights),
            (MwBind { len: 0, ..setup.request(&two) }, range),
            (MwBind { lkey: read_only.lkey(), ..good }, rights),
            (MwBind { lkey: without.lkey(), address: without.iova(), ..good }, rights),
            (MwBind { lkey: one.rkey(), ..good }, AccessDenied::Invalidated),
            (MwBind { lkey: good.lkey ^ 1, ..good }, AccessDenied::Stale),
            (MwBind { rkey: setup.mr.rkey(), ..good }, AccessDenied::Unknown),
            (MwBind { rkey: foreign.rkey(), ..good }, AccessDenied::WrongPd),
            (MwBind { rkey: 0xffff_ff00, ..good }, AccessDenied::Unknown),
        ] {
            assert_eq!(setup.bind(1, &bind), Err(denied), "{bind:?}");
        }
        assert_eq!(setup.registry.bind_window(other.id(), &good), Err(AccessDenied::WrongPd));
        assert_eq!(setup.mr.bound_windows(), 0);
        let read = MwBind { lkey: read_only.lkey(), access: Access::REMOTE_READ, ..good };
        assert_eq!(setup.bind(1, &read), Ok(()), "reading needs no right to write");
    }

    #[test]
    fn windows_end_with_their_registration_and_registrations_with_their_windows() {
        let setup = Setup::new();
        let window = setup.window(MwType::Type1);
        let bind = setup.request(&window);
        setup.bind(1, &bind).unwrap();
        let Setup { registry, pd, mr, memory } = setup;
        mr.deregister().unwrap();
        let rights = RIGHTS | Access::MW_BIND;
        let write = |rkey| {
            let need = Access::REMOTE_WRITE;
            registry.resolve(rkey, pd.id().of_qp(1), need, BASE + 256, 1).map(drop)
        };
        assert_eq!(write(bind.rkey), Err(AccessDenied::Stale));
        // All later registrations, also those whose keys have the same index and tag.
        for _ in 0..100_000 {
            let later = registry.register(&pd, memory.clone(), Some(BASE), rights).unwrap();
            assert_eq!(write(bind.rkey), Err(AccessDenied::Stale), "{:#x}", later.lkey());
        }
        let before = registry.len();
        drop(window);
        assert_eq!((write(bind.rkey), registry.len()), (Err(AccessDenied::Stale), before - 1));
        // The key is free for others.
        for _ in 0..600 {
            drop(registry.alloc_window(&pd, MwType::Type2).unwrap());
        }
    }

    /// Promise 1: after an invalidation nothing is written.
    #[test]
    fn nothing_is_written_after_an_invalidation() {
        use std::sync::atomic::AtomicBool;
        let setup = Setup::new();
        let window = setup.window(MwType::Type2);
        let bind = setup.request(&window);
        let (stop, pd) = (AtomicBool::new(false), setup.pd.id().of_qp(1));
        std::thread::scope(|scope| {
            for value in 1..=2u8 {
                let (setup, stop) = (&setup, &stop);
                scope.spawn(move || {
                    while !stop.load(Ordering::Relaxed) {
                        let need = Access::REMOTE_WRITE;
                        let found = setup.registry.resolve(bind.rkey, pd, need, bind.address, 64);
                        if let Ok(span) = found {
                            span.scatter(0, &[value; 64]).unwrap();
                        }
                    }
                });
            }
            for _ in 0..2000 {
                setup.registry.bind_window(pd, &bind).unwrap();
                setup.registry.invalidate(bind.rkey, pd).unwrap();
                setup.memory.bytes().write(256, &[0; 64]).unwrap();
                let mut bytes = [0; 64];
                setup.memory.bytes().read(256, &mut bytes).unwrap();
                assert_eq!(bytes, [0; 64]);
            }
            stop.store(true, Ordering::Relaxed);
        });
    }
}

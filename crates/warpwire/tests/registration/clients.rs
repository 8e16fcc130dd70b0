//! Custom memory clients: each step is called once and in order, also on failures and races.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Barrier};
use std::time::Duration;

use parking_lot::Mutex;
use warpwire::error::Kind;
use warpwire::mlx5::Atomic;
use warpwire::mr::{
    AccessDenied, AccessPath, CustomMemory, HostMemory, InvalidationHandle, PeerClient, PeerPages,
    Persistence, RegisteredBy, Registry, ReleaseReason, SoftMr, SoftPd,
};
use warpwire::verbs::{Access, MemorySource};
use warpwire::{Error, Result};

use crate::registration::harness::{Harness, refused};
use crate::verbs::fixture::{Rng, test_timeout};
use testkit::cases;

cases!(Harness; CASES:
    each_step_once_and_in_order,
    a_failed_step_undoes_the_earlier_ones_bad_flow,
    a_late_refusal_is_undone_bad_flow,
    clients_are_asked_in_turn,
    a_persistent_client,
    invalidated_memory,
    memory_invalidated_during_registration_bad_flow,
    calls_from_inside_a_step,
    races_of_invalidation_and_deregistration,
    many_registrations_of_one_memory,
    a_client_that_outlives_its_registry,
);

/// Addresses that only the client knows.
pub const BASE: u64 = 0xacce_0000_0000_0000;
pub const SIZE: u64 = 1 << 20;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    Acquire,
    GetPages,
    DmaMap,
    DmaUnmap,
    PutPages(ReleaseReason),
    Release,
}

use Step::{Acquire, DmaMap, DmaUnmap, GetPages, PutPages, Release};

type Hook = Arc<dyn Fn(Step, &InvalidationHandle) + Send + Sync>;

/// A client that logs every call.
pub struct CountingClient {
    name: &'static str,
    persistence: Persistence,
    memory: HostMemory,
    next: AtomicU64,
    log: Mutex<Vec<(u64, Step)>>,
    handles: Mutex<HashMap<u64, InvalidationHandle>>,
    fails: Mutex<Option<Step>>,
    hook: Mutex<Option<Hook>>,
    /// Added to the length of the memory that `dma_map` returns.
    length_error: AtomicU64,
    /// Returns memory that the client copies itself.
    custom: AtomicBool,
}

struct Pages {
    client: Arc<CountingClient>,
    id: u64,
    offset: u64,
    len: u64,
    mapped: Arc<AtomicBool>,
}

impl CountingClient {
    pub fn new() -> Arc<Self> {
        Self::named("counting", Persistence::Invalidates)
    }

    fn named(name: &'static str, persistence: Persistence) -> Arc<Self> {
        Arc::new(Self {
            name,
            persistence,
            memory: HostMemory::new(SIZE).unwrap(),
            next: AtomicU64::new(0),
            log: Mutex::default(),
            handles: Mutex::default(),
            fails: Mutex::default(),
            hook: Mutex::default(),
            length_error: AtomicU64::new(0),
            custom: AtomicBool::new(false),
        })
    }

    /// The steps of one acquisition.
    fn steps_of(&self, id: u64) -> Vec<Step> {
        self.log.lock().iter().filter(|(of, _)| *of == id).map(|(_, step)| *step).collect()
    }

    /// The latest acquisition.
    fn last(&self) -> u64 {
        self.next.load(Ordering::SeqCst) - 1
    }

    pub fn invalidate(&self, id: u64) {
        let handle = self.handles.lock().get(&id).cloned();
        if let Some(handle) = handle {
            handle.invalidate();
        }
    }

    fn record_step(&self, id: u64, step: Step) -> Result<()> {
        self.log.lock().push((id, step));
        let handle = self.handles.lock().get(&id).cloned();
        let hook = self.hook.lock().clone();
        if let (Some(hook), Some(handle)) = (hook, handle) {
            hook(step, &handle);
        }
        if *self.fails.lock() == Some(step) {
            return Err(Error::new(Kind::Unsupported, "take a step").why("injected failure"));
        }
        Ok(())
    }
}

impl PeerClient for CountingClient {
    fn name(&self) -> &str {
        self.name
    }

    fn persistence(&self) -> Persistence {
        self.persistence
    }

    fn acquire(self: Arc<Self>, address: u64, len: u64) -> Result<Box<dyn PeerPages>> {
        let not_this_client =
            || Error::new(Kind::NotDeviceMemory, "find it").why("not this client's memory");
        let offset = address.checked_sub(BASE).ok_or_else(not_this_client)?;
        if offset.checked_add(len).is_none_or(|end| end > SIZE) {
            return Err(not_this_client());
        }
        let id = self.next.fetch_add(1, Ordering::SeqCst);
        self.record_step(id, Acquire)?;
        let mapped = Arc::new(AtomicBool::new(false));
        Ok(Box::new(Pages { client: self, id, offset, len, mapped }))
    }
}

impl PeerPages for Pages {
    fn page_size(&self) -> u64 {
        1 << 16
    }

    fn get_pages(&self, _: bool, invalidate: InvalidationHandle) -> Result<()> {
        self.client.handles.lock().insert(self.id, invalidate);
        self.client.record_step(self.id, GetPages)
    }

    fn dma_map(&self, device: &str) -> Result<MemorySource> {
        assert_eq!(device, "soft");
        self.mapped.store(true, Ordering::SeqCst);
        self.client.record_step(self.id, DmaMap)?;
        let len = self.len.wrapping_add(self.client.length_error.load(Ordering::SeqCst));
        if self.client.custom.load(Ordering::SeqCst) {
            let (client, mapped) = (self.client.clone(), self.mapped.clone());
            let memory = Arc::new(CheckedMemory { client, offset: self.offset, mapped });
            return Ok(MemorySource::custom(memory, BASE + self.offset, len));
        }
        MemorySource::from(self.client.memory.clone()).slice(self.offset, len)
    }

    fn dma_unmap(&self, device: &str) {
        assert_eq!(device, "soft");
        self.mapped.store(false, Ordering::SeqCst);
        let _ = self.client.record_step(self.id, DmaUnmap);
    }

    fn put_pages(&self, end: ReleaseReason) {
        let _ = self.client.record_step(self.id, PutPages(end));
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        let _ = self.client.record_step(self.id, Release);
    }
}

/// Memory that panics when it is accessed while not mapped.
struct CheckedMemory {
    client: Arc<CountingClient>,
    offset: u64,
    mapped: Arc<AtomicBool>,
}

impl CheckedMemory {
    fn check_mapped(&self) {
        assert!(self.mapped.load(Ordering::SeqCst), "accessed while not mapped");
    }
}

impl CustomMemory for CheckedMemory {
    fn check(&self, _: u64, _: u64, _: bool) -> std::result::Result<(), AccessDenied> {
        self.check_mapped();
        Ok(())
    }

    fn read(&self, offset: u64, into: &mut [u8]) -> std::result::Result<(), AccessDenied> {
        self.check_mapped();
        self.client.memory.bytes().read(self.offset + offset, into).unwrap();
        self.check_mapped();
        Ok(())
    }

    fn write(&self, offset: u64, from: &[u8]) -> std::result::Result<(), AccessDenied> {
        self.check_mapped();
        self.client.memory.bytes().write(self.offset + offset, from).unwrap();
        self.check_mapped();
        Ok(())
    }

    fn atomic(&self, offset: u64, op: &Atomic) -> std::result::Result<u64, AccessDenied> {
        self.check_mapped();
        let Atomic::FetchAdd { add } = op else { return Err(AccessDenied::Rights) };
        Ok(self.client.memory.bytes().fetch_add_u64(self.offset + offset, *add).unwrap())
    }
}

const DEREGISTERED_STEPS: [Step; 6] =
    [Acquire, GetPages, DmaMap, DmaUnmap, PutPages(ReleaseReason::Deregistered), Release];
const INVALIDATED_STEPS: [Step; 6] =
    [Acquire, GetPages, DmaMap, DmaUnmap, PutPages(ReleaseReason::Invalidated), Release];

pub fn register(
    registry: &Registry,
    pd: &SoftPd,
    offset: u64,
    len: u64,
    access: Access,
) -> Result<SoftMr> {
    // SAFETY: the clients of the cases keep their memory, and it is only copied.
    unsafe { registry.register_address(pd, BASE + offset, len, None, access) }
}

fn resolve(registry: &Registry, mr: &SoftMr) -> std::result::Result<(), AccessDenied> {
    let found = registry.resolve(mr.rkey(), mr.pd().id(), Access::REMOTE_READ, mr.iova(), 64);
    found.and_then(|span| span.gather(0, &mut [0; 64]))
}

/// Runs a case on a thread and panics if it does not end in time, as with a deadlock.
pub fn with_deadline(what: &str, run: impl FnOnce() + Send + 'static) {
    let (done, ended) = channel();
    let thread = std::thread::spawn(move || {
        run();
        let _ = done.send(());
    });
    match ended.recv_timeout(test_timeout()) {
        Err(std::sync::mpsc::RecvTimeoutError::Timeout) => panic!("{what} hangs"),
        _ => thread.join().unwrap_or_else(|why| std::panic::resume_unwind(why)),
    }
}

fn each_step_once_and_in_order(_: &Harness) {
    let (registry, client) = (Registry::new(), CountingClient::new());
    registry.add_client(client.clone());
    let pd = registry.pd();
    for custom in [false, true] {
        client.custom.store(custom, Ordering::SeqCst);
        let mr = register(&registry, &pd, 4095, 5000, Access::ALL).unwrap();
        let id = client.last();
        assert_eq!(client.steps_of(id), DEREGISTERED_STEPS[..3]);
        assert_eq!((mr.iova(), mr.len()), (BASE + 4095, 5000));
        assert_eq!(mr.path(), if custom { AccessPath::PeerMemory } else { AccessPath::Host });
        let named = RegisteredBy::Address {
            client: "counting".into(),
            persistence: Persistence::Invalidates,
            page_size: 1 << 16,
        };
        assert_eq!(mr.registered_by(), &named);
        client.memory.bytes().write(4095, &[7; 64]).unwrap();
        let mut back = [0; 64];
        let span = registry.resolve(mr.lkey(), pd.id(), Access::NONE, mr.iova(), 64).unwrap();
        span.gather(0, &mut back).unwrap();
        drop(span);
        assert_eq!(back, [7; 64]);
        mr.deregister().unwrap();
        assert_eq!(client.steps_of(id), DEREGISTERED_STEPS);
        // Invalidating after the release has no effect.
        client.invalidate(id);
        assert_eq!(client.steps_of(id), DEREGISTERED_STEPS);
    }
    assert!(registry.is_empty() && !pd.is_in_use());
}

fn a_failed_step_undoes_the_earlier_ones_bad_flow(_: &Harness) {
    let (registry, client) = (Registry::new(), CountingClient::new());
    registry.add_client(client.clone());
    let pd = registry.pd();
    for (step, steps_of) in [
        (Acquire, &[Acquire][..]),
        (GetPages, &[Acquire, GetPages, Release]),
        (DmaMap, &[Acquire, GetPages, DmaMap, PutPages(ReleaseReason::Deregistered), Release]),
    ] {
        *client.fails.lock() = Some(step);
        let made = register(&registry, &pd, 0, 4096, Access::ALL);
        refused(made, &["register 4 KiB", "injected failure"]);
        assert_eq!(client.steps_of(client.last()), steps_of, "{step:?} fails");
        client.invalidate(client.last());
        assert_eq!(client.steps_of(client.last()), steps_of, "invalidated after {step:?} failed");
    }
    *client.fails.lock() = None;
    drop(register(&registry, &pd, 0, 4096, Access::ALL).unwrap());
    assert_eq!(client.steps_of(client.last()), DEREGISTERED_STEPS);
    assert!(registry.is_empty() && !pd.is_in_use());
}

fn a_late_refusal_is_undone_bad_flow(_: &Harness) {
    let (registry, client) = (Registry::new(), CountingClient::new());
    registry.add_client(client.clone());
    let pd = registry.pd();
    // A chosen iova whose range wraps around, detected after the memory is mapped.
    let last = Some(u64::MAX - 10);
    // SAFETY: the client keeps its memory.
    let made = unsafe { registry.register_address(&pd, BASE, 4096, last, Access::ALL) };
    refused(made, &["last address"]);
    assert_eq!(client.steps_of(client.last()), DEREGISTERED_STEPS);
    // Custom memory cannot be registered on demand.
    client.custom.store(true, Ordering::SeqCst);
    let on_demand = Access::REMOTE_READ | Access::ON_DEMAND;
    refused(register(&registry, &pd, 0, 4096, on_demand), &["on-demand"]);
    assert_eq!(client.steps_of(client.last()), DEREGISTERED_STEPS);
    // Memory that is longer or shorter than requested.
    for custom in [false, true] {
        client.custom.store(custom, Ordering::SeqCst);
        for length_error in [1, 4096, 1u64.wrapping_neg()] {
            client.length_error.store(length_error, Ordering::SeqCst);
            refused(register(&registry, &pd, 0, 4096, Access::ALL), &["client counting gave"]);
            assert_eq!(client.steps_of(client.last()), DEREGISTERED_STEPS);
        }
        client.length_error.store(0, Ordering::SeqCst);
    }
    // Invalid arguments are refused before any client is called.
    let asked = client.next.load(Ordering::SeqCst);
    refused(register(&registry, &pd, 0, 0, Access::ALL), &["empty"]);
    refused(register(&registry, &pd, 0, 4096, Access::REMOTE_WRITE), &["local-write"]);
    assert_eq!(client.next.load(Ordering::SeqCst), asked);
    assert!(registry.is_empty() && !pd.is_in_use());
}

fn clients_are_asked_in_turn(harness: &Harness) {
    let registry = Registry::new();
    let (first, second) =
        (CountingClient::new(), CountingClient::named("other", Persistence::Invalidates));
    registry.add_client(first.clone());
    registry.add_client(second.clone());
    let names: Vec<_> = registry.clients().iter().map(|c| c.name().to_owned()).collect();
    assert_eq!(names, ["other", "counting", "host", "sim", "cuda"]);
    let pd = registry.pd();
    // The client added last is asked first; if it refuses, the next one is asked.
    assert_eq!(register(&registry, &pd, 0, 64, Access::ALL).unwrap().client(), Some("other"));
    *second.fails.lock() = Some(Acquire);
    assert_eq!(register(&registry, &pd, 0, 64, Access::ALL).unwrap().client(), Some("counting"));
    // A client that acquired the address and then fails is final: no other client is asked.
    *second.fails.lock() = Some(GetPages);
    refused(register(&registry, &pd, 0, 64, Access::ALL), &["injected failure"]);
    // Built-in clients still handle their own memory.
    let memory = harness.gpu().alloc(4096).unwrap();
    // SAFETY: the memory outlives the registration.
    let mr =
        unsafe { registry.register_address(&pd, memory.address().raw(), 4096, None, Access::ALL) };
    assert_eq!(mr.unwrap().client(), Some("sim"));
    // Another registry has clients of its own.
    refused(register(&Registry::new(), &pd, 0, 64, Access::ALL), &["no client owns"]);
}

fn a_persistent_client(_: &Harness) {
    let registry = Registry::new();
    let client = CountingClient::named("persistent", Persistence::Persistent);
    registry.add_client(client.clone());
    let pd = registry.pd();
    let mr = register(&registry, &pd, 0, 64, Access::ALL).unwrap();
    let RegisteredBy::Address { persistence, .. } = mr.registered_by() else {
        panic!("{:?}", mr.registered_by())
    };
    assert_eq!(*persistence, Persistence::Persistent);
    assert_eq!(persistence.to_string(), "does not report when memory is freed");
    assert_eq!(resolve(&registry, &mr), Ok(()));
    drop(mr);
    assert_eq!(client.steps_of(0), DEREGISTERED_STEPS);
}

fn invalidated_memory(_: &Harness) {
    for custom in [false, true] {
        let (registry, client) = (Registry::new(), CountingClient::new());
        client.custom.store(custom, Ordering::SeqCst);
        registry.add_client(client.clone());
        let pd = registry.pd();
        let mr = register(&registry, &pd, 0, 4096, Access::ALL).unwrap();
        let other = register(&registry, &pd, 8192, 4096, Access::ALL).unwrap();
        assert_eq!(resolve(&registry, &mr), Ok(()));
        client.invalidate(0);
        assert_eq!(client.steps_of(0), INVALIDATED_STEPS);
        // Every use of the key fails permanently; its neighbour still works.
        assert_eq!(resolve(&registry, &mr), Err(AccessDenied::Gone));
        let local = registry.resolve(mr.lkey(), pd.id(), Access::NONE, mr.iova(), 1);
        assert_eq!(local.unwrap_err(), AccessDenied::Gone);
        assert_eq!(registry.invalidate(mr.rkey(), pd.id()).unwrap_err(), AccessDenied::Gone);
        assert_eq!(resolve(&registry, &other), Ok(()));
        client.invalidate(0);
        assert_eq!(registry.len(), 2, "the owner still holds the key");
        let (key, iova) = (mr.rkey(), mr.iova());
        assert!(mr.prefetch(0, 64).is_ok() && mr.why().is_empty() && !format!("{mr:?}").is_empty());
        mr.deregister().unwrap();
        assert_eq!(client.steps_of(0), INVALIDATED_STEPS);
        let after = registry.resolve(key, pd.id(), Access::REMOTE_READ, iova, 64);
        assert_eq!(after.unwrap_err(), AccessDenied::Stale);
        // The same for a key that a peer had invalidated before.
        assert_eq!(registry.invalidate(other.rkey(), pd.id()), Ok(()));
        assert_eq!(resolve(&registry, &other), Err(AccessDenied::Invalidated));
        client.invalidate(1);
        assert_eq!(resolve(&registry, &other), Err(AccessDenied::Gone));
        drop(other);
        assert_eq!(client.steps_of(1), INVALIDATED_STEPS);
        assert!(registry.is_empty() && !pd.is_in_use());
    }
}

/// Memory invalidated during its registration gets no key, and each step is undone once.
fn memory_invalidated_during_registration_bad_flow(_: &Harness) {
    for early in [GetPages, DmaMap] {
        let (registry, client) = (Registry::new(), CountingClient::new());
        registry.add_client(client.clone());
        let pd = registry.pd();
        *client.hook.lock() = Some(Arc::new(move |step, invalidate| {
            if step == early {
                invalidate.invalidate();
                invalidate.invalidate();
            }
        }));
        let error = refused(register(&registry, &pd, 0, 4096, Access::ALL), &["took it back"]);
        assert_eq!(error.kind(), &Kind::Freed);
        let steps_of = client.steps_of(0);
        assert_eq!(steps_of.len(), 6, "{steps_of:?}");
        assert_eq!(steps_of[3..], DEREGISTERED_STEPS[3..]);
        client.invalidate(0);
        assert_eq!(client.steps_of(0).len(), 6);
        assert!(registry.is_empty() && !pd.is_in_use());
    }
}

/// A client may call the registry from inside a step, without deadlock.
fn calls_from_inside_a_step(_: &Harness) {
    with_deadline("a client that calls from inside a step", || {
        for (end_by_client, at_step) in
            [(false, DmaUnmap), (true, DmaUnmap), (false, Release), (true, Release)]
                .into_iter()
                .chain([false, true].map(|by| {
                    (
                        by,
                        PutPages(if by {
                            ReleaseReason::Invalidated
                        } else {
                            ReleaseReason::Deregistered
                        }),
                    )
                }))
        {
            let (registry, client) = (Registry::new(), CountingClient::new());
            registry.add_client(client.clone());
            let pd = registry.pd();
            let mr = register(&registry, &pd, 0, 4096, Access::ALL).unwrap();
            let neighbour = register(&registry, &pd, 4096, 4096, Access::ALL).unwrap();
            let held = Mutex::new(Some((registry.clone(), pd.clone(), neighbour)));
            let calls = Arc::new(AtomicU64::new(0));
            let seen = calls.clone();
            *client.hook.lock() = Some(Arc::new(move |step, invalidate| {
                if step != at_step {
                    return;
                }
                seen.fetch_add(1, Ordering::SeqCst);
                // Invalidate again; then use the registry; then drop another registration.
                invalidate.invalidate();
                let Some((registry, pd, neighbour)) = held.lock().take() else { return };
                assert_eq!(registry.len(), 2);
                let memory = HostMemory::new(4096).unwrap();
                let extra = registry.register(&pd, memory, None, Access::ALL).unwrap();
                drop(extra);
                assert_eq!(resolve(&registry, &neighbour), Ok(()));
            }));
            if end_by_client {
                client.invalidate(0);
            }
            drop(mr);
            assert!(calls.load(Ordering::SeqCst) > 0, "{at_step:?}");
            *client.hook.lock() = None;
            assert_eq!(
                client.steps_of(0),
                if end_by_client { INVALIDATED_STEPS } else { DEREGISTERED_STEPS }
            );
        }
    });
}

fn many_registrations_of_one_memory(_: &Harness) {
    let (registry, client) = (Registry::new(), CountingClient::new());
    registry.add_client(client.clone());
    let pd = registry.pd();
    let mrs: Vec<_> =
        (0..200).map(|n| register(&registry, &pd, n, 4096, Access::ALL).unwrap()).collect();
    let halves = Barrier::new(2);
    std::thread::scope(|scope| {
        for half in 0..2 {
            let (client, halves) = (&client, &halves);
            scope.spawn(move || {
                halves.wait();
                // Both threads invalidate all of them: each is released once.
                for n in 0..200 {
                    client.invalidate(if half == 0 { n } else { 199 - n });
                }
            });
        }
    });
    assert!(mrs.iter().all(|mr| resolve(&registry, mr) == Err(AccessDenied::Gone)));
    assert!((0..200).all(|id| client.steps_of(id) == INVALIDATED_STEPS));
    drop(mrs);
    assert!(registry.is_empty() && !pd.is_in_use());
}

fn a_client_that_outlives_its_registry(_: &Harness) {
    let client = CountingClient::new();
    let registry = Registry::new();
    registry.add_client(client.clone());
    let mr = register(&registry, &registry.pd(), 0, 4096, Access::ALL).unwrap();
    // The registration keeps the registry alive.
    drop(registry);
    client.invalidate(0);
    assert_eq!(client.steps_of(0), INVALIDATED_STEPS);
    drop(mr);
    client.invalidate(0);
    assert_eq!(client.steps_of(0), INVALIDATED_STEPS);
}

/// Concurrent access, invalidation, deregistration and registration: 6000 rounds.
fn races_of_invalidation_and_deregistration(_: &Harness) {
    let (registry, client) = (Registry::new(), CountingClient::new());
    client.custom.store(true, Ordering::SeqCst);
    registry.add_client(client.clone());
    let pd = registry.pd();
    let stop = AtomicBool::new(false);
    let current: Mutex<Option<(u32, u64)>> = Mutex::new(None);
    let (used, refusals) = (AtomicU64::new(0), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    let Some((key, iova)) = *current.lock() else { continue };
                    let found = registry.resolve(key, pd.id(), Access::REMOTE_READ, iova, 64);
                    match found.and_then(|span| span.gather(0, &mut [0; 64])) {
                        Ok(()) => used.fetch_add(1, Ordering::Relaxed),
                        Err(AccessDenied::Gone | AccessDenied::Stale) => {
                            refusals.fetch_add(1, Ordering::Relaxed)
                        }
                        Err(other) => panic!("{other}"),
                    };
                }
            });
        }
        let (ask, asked) = channel::<u64>();
        let invalidator = client.clone();
        scope.spawn(move || {
            for id in asked {
                invalidator.invalidate(id);
                invalidator.invalidate(id);
            }
        });
        let mut rng = Rng::new(7);
        for _ in 0..6000 {
            let mr = register(&registry, &pd, 64, 4096, Access::ALL).unwrap();
            *current.lock() = Some((mr.rkey(), mr.iova()));
            let id = client.last();
            ask.send(id).unwrap();
            for _ in 0..rng.below(200) {
                std::hint::spin_loop();
            }
            if rng.below(8) == 0 {
                std::thread::yield_now();
            }
            mr.deregister().unwrap();
        }
        drop(ask);
        std::thread::sleep(Duration::from_millis(5));
        stop.store(true, Ordering::Relaxed);
    });
    for id in 0..=client.last() {
        // Only every 40th: each check scans the whole log.
        if id % 40 == 0 {
            let steps_of = client.steps_of(id);
            assert!(
                steps_of == DEREGISTERED_STEPS || steps_of == INVALIDATED_STEPS,
                "{id}: {steps_of:?}"
            );
        }
    }
    let log = client.log.lock();
    let count = |wanted: Step| log.iter().filter(|(_, step)| *step == wanted).count();
    for step in [Acquire, GetPages, DmaMap, DmaUnmap, Release] {
        assert_eq!(count(step), 6000, "{step:?}");
    }
    let ends =
        [ReleaseReason::Invalidated, ReleaseReason::Deregistered].map(|end| count(PutPages(end)));
    assert_eq!(ends[0] + ends[1], 6000);
    assert!(ends.iter().all(|end| *end > 0), "each must win some races: {ends:?}");
    drop(log);
    assert!(used.load(Ordering::Relaxed) > 0 && refusals.load(Ordering::Relaxed) > 0);
    assert!(registry.is_empty() && !pd.is_in_use());
}

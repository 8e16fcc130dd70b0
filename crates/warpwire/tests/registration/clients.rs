//! Clients from outside: each step once and in order, whatever happens.

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
    a_step_that_fails_undoes_those_before_bad_flow,
    what_is_refused_later_is_undone_bad_flow,
    others_are_asked_in_turn,
    a_persistent_client,
    memory_that_is_taken_back,
    memory_that_is_taken_back_too_early_bad_flow,
    calls_from_inside_a_step,
    races_of_taking_back_and_ending,
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

/// A client that writes down what it is asked for.
pub struct CountingClient {
    name: &'static str,
    persistence: Persistence,
    memory: HostMemory,
    next: AtomicU64,
    log: Mutex<Vec<(u64, Step)>>,
    handles: Mutex<HashMap<u64, InvalidationHandle>>,
    fails: Mutex<Option<Step>>,
    hook: Mutex<Option<Hook>>,
    /// Answers with memory of another length.
    wrong_offset: AtomicU64,
    /// Gives memory that it copies itself.
    reaches: AtomicBool,
}

struct Pages {
    client: Arc<CountingClient>,
    id: u64,
    offset: u64,
    len: u64,
    there: Arc<AtomicBool>,
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
            wrong_offset: AtomicU64::new(0),
            reaches: AtomicBool::new(false),
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
            return Err(Error::new(Kind::Unsupported, "take a step").why("it was told to fail"));
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
            || Error::new(Kind::NotDeviceMemory, "find it").why("not of this client");
        let offset = address.checked_sub(BASE).ok_or_else(not_this_client)?;
        if offset.checked_add(len).is_none_or(|end| end > SIZE) {
            return Err(not_this_client());
        }
        let id = self.next.fetch_add(1, Ordering::SeqCst);
        self.record_step(id, Acquire)?;
        let there = Arc::new(AtomicBool::new(false));
        Ok(Box::new(Pages { client: self, id, offset, len, there }))
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
        self.there.store(true, Ordering::SeqCst);
        self.client.record_step(self.id, DmaMap)?;
        let len = self.len.wrapping_add(self.client.wrong_offset.load(Ordering::SeqCst));
        if self.client.reaches.load(Ordering::SeqCst) {
            let (client, there) = (self.client.clone(), self.there.clone());
            let reach = Arc::new(Own { client, offset: self.offset, there });
            return Ok(MemorySource::custom(reach, BASE + self.offset, len));
        }
        MemorySource::from(self.client.memory.clone()).slice(self.offset, len)
    }

    fn dma_unmap(&self, device: &str) {
        assert_eq!(device, "soft");
        self.there.store(false, Ordering::SeqCst);
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

/// Memory that must not be touched when it is not mapped.
struct Own {
    client: Arc<CountingClient>,
    offset: u64,
    there: Arc<AtomicBool>,
}

impl Own {
    fn look(&self) {
        assert!(self.there.load(Ordering::SeqCst), "it was touched when it was not mapped");
    }
}

impl CustomMemory for Own {
    fn check(&self, _: u64, _: u64, _: bool) -> std::result::Result<(), AccessDenied> {
        self.look();
        Ok(())
    }

    fn read(&self, offset: u64, into: &mut [u8]) -> std::result::Result<(), AccessDenied> {
        self.look();
        self.client.memory.bytes().read(self.offset + offset, into).unwrap();
        self.look();
        Ok(())
    }

    fn write(&self, offset: u64, from: &[u8]) -> std::result::Result<(), AccessDenied> {
        self.look();
        self.client.memory.bytes().write(self.offset + offset, from).unwrap();
        self.look();
        Ok(())
    }

    fn atomic(&self, offset: u64, op: &Atomic) -> std::result::Result<u64, AccessDenied> {
        self.look();
        let Atomic::FetchAdd { add } = op else { return Err(AccessDenied::Rights) };
        Ok(self.client.memory.bytes().fetch_add_u64(self.offset + offset, *add).unwrap())
    }
}

const WHOLE_LIFE: [Step; 6] =
    [Acquire, GetPages, DmaMap, DmaUnmap, PutPages(ReleaseReason::Deregistered), Release];
const INVALIDATED_LIFE: [Step; 6] =
    [Acquire, GetPages, DmaMap, DmaUnmap, PutPages(ReleaseReason::Invalidated), Release];

pub fn register(
    registry: &Registry,
    pd: &SoftPd,
    offset: u64,
    len: u64,
    access: Access,
) -> Result<SoftMr> {
    // SAFETY: memory of the cases' own clients, which keep it, and copy it only.
    unsafe { registry.register_address(pd, BASE + offset, len, None, access) }
}

fn resolve(registry: &Registry, mr: &SoftMr) -> std::result::Result<(), AccessDenied> {
    let found = registry.resolve(mr.rkey(), mr.pd().id(), Access::REMOTE_READ, mr.iova(), 64);
    found.and_then(|span| span.gather(0, &mut [0; 64]))
}

/// Runs a case in time: what waits for itself waits for ever.
pub fn in_time(what: &str, run: impl FnOnce() + Send + 'static) {
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
    for reaches in [false, true] {
        client.reaches.store(reaches, Ordering::SeqCst);
        let mr = register(&registry, &pd, 4095, 5000, Access::ALL).unwrap();
        let id = client.last();
        assert_eq!(client.steps_of(id), WHOLE_LIFE[..3]);
        assert_eq!((mr.iova(), mr.len()), (BASE + 4095, 5000));
        assert_eq!(mr.path(), if reaches { AccessPath::PeerMemory } else { AccessPath::Host });
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
        mr.deregister();
        assert_eq!(client.steps_of(id), WHOLE_LIFE);
        // It was told to whom it belonged; taking it back now means nothing.
        client.invalidate(id);
        assert_eq!(client.steps_of(id), WHOLE_LIFE);
    }
    assert!(registry.is_empty() && !pd.is_in_use());
}

fn a_step_that_fails_undoes_those_before_bad_flow(_: &Harness) {
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
        refused(made, &["register 4 KiB", "it was told to fail"]);
        assert_eq!(client.steps_of(client.last()), steps_of, "{step:?} fails");
        client.invalidate(client.last());
        assert_eq!(client.steps_of(client.last()), steps_of, "taken back after {step:?} failed");
    }
    *client.fails.lock() = None;
    drop(register(&registry, &pd, 0, 4096, Access::ALL).unwrap());
    assert_eq!(client.steps_of(client.last()), WHOLE_LIFE);
    assert!(registry.is_empty() && !pd.is_in_use());
}

fn what_is_refused_later_is_undone_bad_flow(_: &Harness) {
    let (registry, client) = (Registry::new(), CountingClient::new());
    registry.add_client(client.clone());
    let pd = registry.pd();
    // A place of choice that passes the end, found out when everything is mapped.
    let last = Some(u64::MAX - 10);
    // SAFETY: the client keeps its memory.
    let made = unsafe { registry.register_address(&pd, BASE, 4096, last, Access::ALL) };
    refused(made, &["last address"]);
    assert_eq!(client.steps_of(client.last()), WHOLE_LIFE);
    // Its own way to memory, which nobody else finds on demand.
    client.reaches.store(true, Ordering::SeqCst);
    let on_demand = Access::REMOTE_READ | Access::ON_DEMAND;
    refused(register(&registry, &pd, 0, 4096, on_demand), &["on-demand"]);
    assert_eq!(client.steps_of(client.last()), WHOLE_LIFE);
    // Memory that is longer or shorter than what it was asked for.
    for reaches in [false, true] {
        client.reaches.store(reaches, Ordering::SeqCst);
        for wrong_offset in [1, 4096, 1u64.wrapping_neg()] {
            client.wrong_offset.store(wrong_offset, Ordering::SeqCst);
            refused(register(&registry, &pd, 0, 4096, Access::ALL), &["client counting gave"]);
            assert_eq!(client.steps_of(client.last()), WHOLE_LIFE);
        }
        client.wrong_offset.store(0, Ordering::SeqCst);
    }
    // What makes no sense by itself is refused before anybody is asked.
    let asked = client.next.load(Ordering::SeqCst);
    refused(register(&registry, &pd, 0, 0, Access::ALL), &["empty"]);
    refused(register(&registry, &pd, 0, 4096, Access::REMOTE_WRITE), &["local-write"]);
    assert_eq!(client.next.load(Ordering::SeqCst), asked);
    assert!(registry.is_empty() && !pd.is_in_use());
}

fn others_are_asked_in_turn(harness: &Harness) {
    let registry = Registry::new();
    let (first, second) =
        (CountingClient::new(), CountingClient::named("other", Persistence::Invalidates));
    registry.add_client(first.clone());
    registry.add_client(second.clone());
    let names: Vec<_> = registry.clients().iter().map(|c| c.name().to_owned()).collect();
    assert_eq!(names, ["other", "counting", "host", "sim", "cuda"]);
    let pd = registry.pd();
    // The last to come is asked first; where it refuses, the next one is asked.
    assert_eq!(register(&registry, &pd, 0, 64, Access::ALL).unwrap().client(), Some("other"));
    *second.fails.lock() = Some(Acquire);
    assert_eq!(register(&registry, &pd, 0, 64, Access::ALL).unwrap().client(), Some("counting"));
    // A client that took it and then fails has the last word: nobody else has that memory.
    *second.fails.lock() = Some(GetPages);
    refused(register(&registry, &pd, 0, 64, Access::ALL), &["told to fail"]);
    // They are in nobody's way.
    let memory = harness.gpu().alloc(4096).unwrap();
    // SAFETY: the memory outlives the registration.
    let mr =
        unsafe { registry.register_address(&pd, memory.address().raw(), 4096, None, Access::ALL) };
    assert_eq!(mr.unwrap().client(), Some("sim"));
    // Another registry has clients of its own.
    refused(register(&Registry::new(), &pd, 0, 64, Access::ALL), &["nobody knows"]);
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
    assert_eq!(persistence.to_string(), "does not tell when memory goes");
    assert_eq!(resolve(&registry, &mr), Ok(()));
    drop(mr);
    assert_eq!(client.steps_of(0), WHOLE_LIFE);
}

fn memory_that_is_taken_back(_: &Harness) {
    for reaches in [false, true] {
        let (registry, client) = (Registry::new(), CountingClient::new());
        client.reaches.store(reaches, Ordering::SeqCst);
        registry.add_client(client.clone());
        let pd = registry.pd();
        let mr = register(&registry, &pd, 0, 4096, Access::ALL).unwrap();
        let other = register(&registry, &pd, 8192, 4096, Access::ALL).unwrap();
        assert_eq!(resolve(&registry, &mr), Ok(()));
        client.invalidate(0);
        assert_eq!(client.steps_of(0), INVALIDATED_LIFE);
        // Dead for every use and for good, and its neighbour is alive.
        assert_eq!(resolve(&registry, &mr), Err(AccessDenied::Gone));
        let local = registry.resolve(mr.lkey(), pd.id(), Access::NONE, mr.iova(), 1);
        assert_eq!(local.unwrap_err(), AccessDenied::Gone);
        assert_eq!(registry.invalidate(mr.rkey(), pd.id()).unwrap_err(), AccessDenied::Gone);
        assert_eq!(resolve(&registry, &other), Ok(()));
        client.invalidate(0);
        assert_eq!(registry.len(), 2, "its owner still holds the key");
        let (key, iova) = (mr.rkey(), mr.iova());
        assert!(mr.prefetch(0, 64).is_ok() && mr.why().is_empty() && !format!("{mr:?}").is_empty());
        mr.deregister();
        assert_eq!(client.steps_of(0), INVALIDATED_LIFE);
        let after = registry.resolve(key, pd.id(), Access::REMOTE_READ, iova, 64);
        assert_eq!(after.unwrap_err(), AccessDenied::Stale);
        // A key that peers had invalidated before is gone all the same.
        assert_eq!(registry.invalidate(other.rkey(), pd.id()), Ok(()));
        assert_eq!(resolve(&registry, &other), Err(AccessDenied::Invalidated));
        client.invalidate(1);
        assert_eq!(resolve(&registry, &other), Err(AccessDenied::Gone));
        drop(other);
        assert_eq!(client.steps_of(1), INVALIDATED_LIFE);
        assert!(registry.is_empty() && !pd.is_in_use());
    }
}

/// The memory goes away while it is being registered: there is no key, and each step is undone once.
fn memory_that_is_taken_back_too_early_bad_flow(_: &Harness) {
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
        assert_eq!(steps_of[3..], WHOLE_LIFE[3..]);
        client.invalidate(0);
        assert_eq!(client.steps_of(0).len(), 6);
        assert!(registry.is_empty() && !pd.is_in_use());
    }
}

/// A client may do from inside a step whatever it does elsewhere.
fn calls_from_inside_a_step(_: &Harness) {
    in_time("a client that calls from inside a step", || {
        for (end_by_client, place) in
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
                if step != place {
                    return;
                }
                seen.fetch_add(1, Ordering::SeqCst);
                // Again what is under way; then the registry, as anybody may use it; then another's end.
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
            assert!(calls.load(Ordering::SeqCst) > 0, "{place:?}");
            *client.hook.lock() = None;
            assert_eq!(
                client.steps_of(0),
                if end_by_client { INVALIDATED_LIFE } else { WHOLE_LIFE }
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
                // Both take all of them back: each goes once.
                for n in 0..200 {
                    client.invalidate(if half == 0 { n } else { 199 - n });
                }
            });
        }
    });
    assert!(mrs.iter().all(|mr| resolve(&registry, mr) == Err(AccessDenied::Gone)));
    assert!((0..200).all(|id| client.steps_of(id) == INVALIDATED_LIFE));
    drop(mrs);
    assert!(registry.is_empty() && !pd.is_in_use());
}

fn a_client_that_outlives_its_registry(_: &Harness) {
    let client = CountingClient::new();
    let registry = Registry::new();
    registry.add_client(client.clone());
    let mr = register(&registry, &registry.pd(), 0, 4096, Access::ALL).unwrap();
    // The registration holds the registry.
    drop(registry);
    client.invalidate(0);
    assert_eq!(client.steps_of(0), INVALIDATED_LIFE);
    drop(mr);
    client.invalidate(0);
    assert_eq!(client.steps_of(0), INVALIDATED_LIFE);
}

/// Access, taking back, ending and registering anew, all at once: thousands of rounds.
fn races_of_taking_back_and_ending(_: &Harness) {
    let (registry, client) = (Registry::new(), CountingClient::new());
    client.reaches.store(true, Ordering::SeqCst);
    registry.add_client(client.clone());
    let pd = registry.pd();
    let over = AtomicBool::new(false);
    let current: Mutex<Option<(u32, u64)>> = Mutex::new(None);
    let (used, refusals) = (AtomicU64::new(0), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while !over.load(Ordering::Relaxed) {
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
            mr.deregister();
        }
        drop(ask);
        std::thread::sleep(Duration::from_millis(5));
        over.store(true, Ordering::Relaxed);
    });
    for id in 0..=client.last() {
        // Few: a log of six thousand is not searched six thousand times.
        if id % 40 == 0 {
            let steps_of = client.steps_of(id);
            assert!(steps_of == WHOLE_LIFE || steps_of == INVALIDATED_LIFE, "{id}: {steps_of:?}");
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
    assert!(ends.iter().all(|end| *end > 0), "both came first at times: {ends:?}");
    drop(log);
    assert!(used.load(Ordering::Relaxed) > 0 && refusals.load(Ordering::Relaxed) > 0);
    assert!(registry.is_empty() && !pd.is_in_use());
}

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
    Denied, End, HostMemory, Invalidate, Mr, Named, Path, Pd, PeerClient, PeerPages, Persistence,
    Reach, Registry,
};
use warpwire::verbs::{Access, Memory};
use warpwire::{Error, Result};

use crate::registration::stage::{Stage, refused};
use crate::verbs::fixture::{Rng, soon};
use testkit::cases;

cases!(Stage; CASES:
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
    PutPages(End),
    Release,
}

use Step::{Acquire, DmaMap, DmaUnmap, GetPages, PutPages, Release};

type Hook = Arc<dyn Fn(Step, &Invalidate) + Send + Sync>;

/// A client that writes down what it is asked for.
pub struct Counting {
    name: &'static str,
    persistence: Persistence,
    memory: HostMemory,
    next: AtomicU64,
    log: Mutex<Vec<(u64, Step)>>,
    handles: Mutex<HashMap<u64, Invalidate>>,
    fails: Mutex<Option<Step>>,
    hook: Mutex<Option<Hook>>,
    /// Answers with memory of another length.
    off_by: AtomicU64,
    /// Gives memory that it copies itself.
    reaches: AtomicBool,
}

struct Pages {
    client: Arc<Counting>,
    id: u64,
    offset: u64,
    len: u64,
    there: Arc<AtomicBool>,
}

impl Counting {
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
            off_by: AtomicU64::new(0),
            reaches: AtomicBool::new(false),
        })
    }

    /// The steps of one acquisition.
    fn life(&self, id: u64) -> Vec<Step> {
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

    fn note(&self, id: u64, step: Step) -> Result<()> {
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

impl PeerClient for Counting {
    fn name(&self) -> &str {
        self.name
    }

    fn persistence(&self) -> Persistence {
        self.persistence
    }

    fn acquire(self: Arc<Self>, address: u64, len: u64) -> Result<Box<dyn PeerPages>> {
        let not_mine = || Error::new(Kind::NotDeviceMemory, "find it").why("not of this client");
        let offset = address.checked_sub(BASE).ok_or_else(not_mine)?;
        if offset.checked_add(len).is_none_or(|end| end > SIZE) {
            return Err(not_mine());
        }
        let id = self.next.fetch_add(1, Ordering::SeqCst);
        self.note(id, Acquire)?;
        let there = Arc::new(AtomicBool::new(false));
        Ok(Box::new(Pages { client: self, id, offset, len, there }))
    }
}

impl PeerPages for Pages {
    fn page_size(&self) -> u64 {
        1 << 16
    }

    fn get_pages(&self, _: bool, invalidate: Invalidate) -> Result<()> {
        self.client.handles.lock().insert(self.id, invalidate);
        self.client.note(self.id, GetPages)
    }

    fn dma_map(&self, device: &str) -> Result<Memory> {
        assert_eq!(device, "soft");
        self.there.store(true, Ordering::SeqCst);
        self.client.note(self.id, DmaMap)?;
        let len = self.len.wrapping_add(self.client.off_by.load(Ordering::SeqCst));
        if self.client.reaches.load(Ordering::SeqCst) {
            let (client, there) = (self.client.clone(), self.there.clone());
            let reach = Arc::new(Own { client, offset: self.offset, there });
            return Ok(Memory::reached_by(reach, BASE + self.offset, len));
        }
        Memory::from(self.client.memory.clone()).part(self.offset, len)
    }

    fn dma_unmap(&self, device: &str) {
        assert_eq!(device, "soft");
        self.there.store(false, Ordering::SeqCst);
        let _ = self.client.note(self.id, DmaUnmap);
    }

    fn put_pages(&self, end: End) {
        let _ = self.client.note(self.id, PutPages(end));
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        let _ = self.client.note(self.id, Release);
    }
}

/// Memory that must not be touched when it is not mapped.
struct Own {
    client: Arc<Counting>,
    offset: u64,
    there: Arc<AtomicBool>,
}

impl Own {
    fn look(&self) {
        assert!(self.there.load(Ordering::SeqCst), "it was touched when it was not mapped");
    }
}

impl Reach for Own {
    fn check(&self, _: u64, _: u64, _: bool) -> std::result::Result<(), Denied> {
        self.look();
        Ok(())
    }

    fn read(&self, offset: u64, into: &mut [u8]) -> std::result::Result<(), Denied> {
        self.look();
        self.client.memory.bytes().read(self.offset + offset, into).unwrap();
        self.look();
        Ok(())
    }

    fn write(&self, offset: u64, from: &[u8]) -> std::result::Result<(), Denied> {
        self.look();
        self.client.memory.bytes().write(self.offset + offset, from).unwrap();
        self.look();
        Ok(())
    }

    fn atomic(&self, offset: u64, op: &Atomic) -> std::result::Result<u64, Denied> {
        self.look();
        let Atomic::FetchAdd { add } = op else { return Err(Denied::Rights) };
        Ok(self.client.memory.bytes().fetch_add_u64(self.offset + offset, *add).unwrap())
    }
}

const WHOLE_LIFE: [Step; 6] =
    [Acquire, GetPages, DmaMap, DmaUnmap, PutPages(End::Deregistered), Release];
const TAKEN_BACK: [Step; 6] =
    [Acquire, GetPages, DmaMap, DmaUnmap, PutPages(End::Invalidated), Release];

pub fn register(registry: &Registry, pd: &Pd, offset: u64, len: u64, access: Access) -> Result<Mr> {
    // SAFETY: memory of the cases' own clients, which keep it, and copy it only.
    unsafe { registry.register_address(pd, BASE + offset, len, None, access) }
}

fn resolve(registry: &Registry, mr: &Mr) -> std::result::Result<(), Denied> {
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
    match ended.recv_timeout(soon()) {
        Err(std::sync::mpsc::RecvTimeoutError::Timeout) => panic!("{what} hangs"),
        _ => thread.join().unwrap_or_else(|why| std::panic::resume_unwind(why)),
    }
}

fn each_step_once_and_in_order(_: &Stage) {
    let (registry, client) = (Registry::new(), Counting::new());
    registry.add_client(client.clone());
    let pd = registry.pd();
    for reaches in [false, true] {
        client.reaches.store(reaches, Ordering::SeqCst);
        let mr = register(&registry, &pd, 4095, 5000, Access::ALL).unwrap();
        let id = client.last();
        assert_eq!(client.life(id), WHOLE_LIFE[..3]);
        assert_eq!((mr.iova(), mr.len()), (BASE + 4095, 5000));
        assert_eq!(mr.path(), if reaches { Path::PeerMemory } else { Path::Host });
        let named = Named::Address {
            client: "counting".into(),
            persistence: Persistence::Invalidates,
            page_size: 1 << 16,
        };
        assert_eq!(mr.named(), &named);
        client.memory.bytes().write(4095, &[7; 64]).unwrap();
        let mut back = [0; 64];
        let span = registry.resolve(mr.lkey(), pd.id(), Access::NONE, mr.iova(), 64).unwrap();
        span.gather(0, &mut back).unwrap();
        drop(span);
        assert_eq!(back, [7; 64]);
        mr.deregister();
        assert_eq!(client.life(id), WHOLE_LIFE);
        // It was told to whom it belonged; taking it back now means nothing.
        client.invalidate(id);
        assert_eq!(client.life(id), WHOLE_LIFE);
    }
    assert!(registry.is_empty() && !pd.is_in_use());
}

fn a_step_that_fails_undoes_those_before_bad_flow(_: &Stage) {
    let (registry, client) = (Registry::new(), Counting::new());
    registry.add_client(client.clone());
    let pd = registry.pd();
    for (step, life) in [
        (Acquire, &[Acquire][..]),
        (GetPages, &[Acquire, GetPages, Release]),
        (DmaMap, &[Acquire, GetPages, DmaMap, PutPages(End::Deregistered), Release]),
    ] {
        *client.fails.lock() = Some(step);
        let made = register(&registry, &pd, 0, 4096, Access::ALL);
        refused(made, &["register 4 KiB", "it was told to fail"]);
        assert_eq!(client.life(client.last()), life, "{step:?} fails");
        client.invalidate(client.last());
        assert_eq!(client.life(client.last()), life, "taken back after {step:?} failed");
    }
    *client.fails.lock() = None;
    drop(register(&registry, &pd, 0, 4096, Access::ALL).unwrap());
    assert_eq!(client.life(client.last()), WHOLE_LIFE);
    assert!(registry.is_empty() && !pd.is_in_use());
}

fn what_is_refused_later_is_undone_bad_flow(_: &Stage) {
    let (registry, client) = (Registry::new(), Counting::new());
    registry.add_client(client.clone());
    let pd = registry.pd();
    // A place of choice that passes the end, found out when everything is mapped.
    let last = Some(u64::MAX - 10);
    // SAFETY: the client keeps its memory.
    let made = unsafe { registry.register_address(&pd, BASE, 4096, last, Access::ALL) };
    refused(made, &["last address"]);
    assert_eq!(client.life(client.last()), WHOLE_LIFE);
    // Its own way to memory, which nobody else finds on demand.
    client.reaches.store(true, Ordering::SeqCst);
    let on_demand = Access::REMOTE_READ | Access::ON_DEMAND;
    refused(register(&registry, &pd, 0, 4096, on_demand), &["on-demand"]);
    assert_eq!(client.life(client.last()), WHOLE_LIFE);
    // Memory that is longer or shorter than what it was asked for.
    for reaches in [false, true] {
        client.reaches.store(reaches, Ordering::SeqCst);
        for off_by in [1, 4096, 1u64.wrapping_neg()] {
            client.off_by.store(off_by, Ordering::SeqCst);
            refused(register(&registry, &pd, 0, 4096, Access::ALL), &["client counting gave"]);
            assert_eq!(client.life(client.last()), WHOLE_LIFE);
        }
        client.off_by.store(0, Ordering::SeqCst);
    }
    // What makes no sense by itself is refused before anybody is asked.
    let asked = client.next.load(Ordering::SeqCst);
    refused(register(&registry, &pd, 0, 0, Access::ALL), &["empty"]);
    refused(register(&registry, &pd, 0, 4096, Access::REMOTE_WRITE), &["local-write"]);
    assert_eq!(client.next.load(Ordering::SeqCst), asked);
    assert!(registry.is_empty() && !pd.is_in_use());
}

fn others_are_asked_in_turn(stage: &Stage) {
    let registry = Registry::new();
    let (first, second) = (Counting::new(), Counting::named("other", Persistence::Invalidates));
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
    let memory = stage.gpu().alloc(4096).unwrap();
    // SAFETY: the memory outlives the registration.
    let mr =
        unsafe { registry.register_address(&pd, memory.address().raw(), 4096, None, Access::ALL) };
    assert_eq!(mr.unwrap().client(), Some("sim"));
    // Another registry has clients of its own.
    refused(register(&Registry::new(), &pd, 0, 64, Access::ALL), &["nobody knows"]);
}

fn a_persistent_client(_: &Stage) {
    let registry = Registry::new();
    let client = Counting::named("persistent", Persistence::Persistent);
    registry.add_client(client.clone());
    let pd = registry.pd();
    let mr = register(&registry, &pd, 0, 64, Access::ALL).unwrap();
    let Named::Address { persistence, .. } = mr.named() else { panic!("{:?}", mr.named()) };
    assert_eq!(*persistence, Persistence::Persistent);
    assert_eq!(persistence.to_string(), "does not tell when memory goes");
    assert_eq!(resolve(&registry, &mr), Ok(()));
    drop(mr);
    assert_eq!(client.life(0), WHOLE_LIFE);
}

fn memory_that_is_taken_back(_: &Stage) {
    for reaches in [false, true] {
        let (registry, client) = (Registry::new(), Counting::new());
        client.reaches.store(reaches, Ordering::SeqCst);
        registry.add_client(client.clone());
        let pd = registry.pd();
        let mr = register(&registry, &pd, 0, 4096, Access::ALL).unwrap();
        let other = register(&registry, &pd, 8192, 4096, Access::ALL).unwrap();
        assert_eq!(resolve(&registry, &mr), Ok(()));
        client.invalidate(0);
        assert_eq!(client.life(0), TAKEN_BACK);
        // Dead for every use and for good, and its neighbour is alive.
        assert_eq!(resolve(&registry, &mr), Err(Denied::Gone));
        let local = registry.resolve(mr.lkey(), pd.id(), Access::NONE, mr.iova(), 1);
        assert_eq!(local.unwrap_err(), Denied::Gone);
        assert_eq!(registry.invalidate(mr.rkey(), pd.id()).unwrap_err(), Denied::Gone);
        assert_eq!(resolve(&registry, &other), Ok(()));
        client.invalidate(0);
        assert_eq!(registry.len(), 2, "its owner still holds the key");
        let (key, iova) = (mr.rkey(), mr.iova());
        assert!(mr.prefetch(0, 64).is_ok() && mr.why().is_empty() && !format!("{mr:?}").is_empty());
        mr.deregister();
        assert_eq!(client.life(0), TAKEN_BACK);
        let after = registry.resolve(key, pd.id(), Access::REMOTE_READ, iova, 64);
        assert_eq!(after.unwrap_err(), Denied::Stale);
        // A key that peers had invalidated before is gone all the same.
        assert_eq!(registry.invalidate(other.rkey(), pd.id()), Ok(()));
        assert_eq!(resolve(&registry, &other), Err(Denied::Invalidated));
        client.invalidate(1);
        assert_eq!(resolve(&registry, &other), Err(Denied::Gone));
        drop(other);
        assert_eq!(client.life(1), TAKEN_BACK);
        assert!(registry.is_empty() && !pd.is_in_use());
    }
}

/// The memory goes away while it is being registered: there is no key, and each step is undone once.
fn memory_that_is_taken_back_too_early_bad_flow(_: &Stage) {
    for early in [GetPages, DmaMap] {
        let (registry, client) = (Registry::new(), Counting::new());
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
        let life = client.life(0);
        assert_eq!(life.len(), 6, "{life:?}");
        assert_eq!(life[3..], WHOLE_LIFE[3..]);
        client.invalidate(0);
        assert_eq!(client.life(0).len(), 6);
        assert!(registry.is_empty() && !pd.is_in_use());
    }
}

/// A client may do from inside a step whatever it does elsewhere.
fn calls_from_inside_a_step(_: &Stage) {
    in_time("a client that calls from inside a step", || {
        for (end_by_client, place) in
            [(false, DmaUnmap), (true, DmaUnmap), (false, Release), (true, Release)]
                .into_iter()
                .chain([false, true].map(|by| {
                    (by, PutPages(if by { End::Invalidated } else { End::Deregistered }))
                }))
        {
            let (registry, client) = (Registry::new(), Counting::new());
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
            assert_eq!(client.life(0), if end_by_client { TAKEN_BACK } else { WHOLE_LIFE });
        }
    });
}

fn many_registrations_of_one_memory(_: &Stage) {
    let (registry, client) = (Registry::new(), Counting::new());
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
    assert!(mrs.iter().all(|mr| resolve(&registry, mr) == Err(Denied::Gone)));
    assert!((0..200).all(|id| client.life(id) == TAKEN_BACK));
    drop(mrs);
    assert!(registry.is_empty() && !pd.is_in_use());
}

fn a_client_that_outlives_its_registry(_: &Stage) {
    let client = Counting::new();
    let registry = Registry::new();
    registry.add_client(client.clone());
    let mr = register(&registry, &registry.pd(), 0, 4096, Access::ALL).unwrap();
    // The registration holds the registry.
    drop(registry);
    client.invalidate(0);
    assert_eq!(client.life(0), TAKEN_BACK);
    drop(mr);
    client.invalidate(0);
    assert_eq!(client.life(0), TAKEN_BACK);
}

/// Access, taking back, ending and registering anew, all at once: thousands of rounds.
fn races_of_taking_back_and_ending(_: &Stage) {
    let (registry, client) = (Registry::new(), Counting::new());
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
                        Err(Denied::Gone | Denied::Stale) => {
                            refusals.fetch_add(1, Ordering::Relaxed)
                        }
                        Err(other) => panic!("{other}"),
                    };
                }
            });
        }
        let (ask, asked) = channel::<u64>();
        let taker = client.clone();
        scope.spawn(move || {
            for id in asked {
                taker.invalidate(id);
                taker.invalidate(id);
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
            let life = client.life(id);
            assert!(life == WHOLE_LIFE || life == TAKEN_BACK, "{id}: {life:?}");
        }
    }
    let log = client.log.lock();
    let count = |wanted: Step| log.iter().filter(|(_, step)| *step == wanted).count();
    for step in [Acquire, GetPages, DmaMap, DmaUnmap, Release] {
        assert_eq!(count(step), 6000, "{step:?}");
    }
    let ends = [End::Invalidated, End::Deregistered].map(|end| count(PutPages(end)));
    assert_eq!(ends[0] + ends[1], 6000);
    assert!(ends.iter().all(|end| *end > 0), "both came first at times: {ends:?}");
    drop(log);
    assert!(used.load(Ordering::Relaxed) > 0 && refusals.load(Ordering::Relaxed) > 0);
    assert!(registry.is_empty() && !pd.is_in_use());
}

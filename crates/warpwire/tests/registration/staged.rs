//! Memory that is reached through pinned memory: in parts of all sizes, freed by the very stream that carries them, and
//! where the machine is short of descriptors.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use warpwire::mem::copy::Staging;
use warpwire::mem::sim::{Nth, OpKind, Sim, SimConfig};
use warpwire::mem::{Allocation, MemoryEvent, Watch};
use warpwire::mr::{End as Ended, Invalidate, Path, PeerClient, PeerPages, Persistence};
use warpwire::verbs::{Access, Atomic, Memory, Mr, Op, QpOptions, Request, Status};
use warpwire::{Error, Result, error::Kind};

use crate::registration::child;
use crate::registration::stage::{Stage, refused};
use crate::verbs::fixture::{End, Fixture, Which, same};
use testkit::cases;

cases!(Stage; CASES:
    parts_of_every_size,
    parts_that_make_no_sense_bad_flow,
    freed_by_the_stream_that_carries_writes_bad_flow,
    freed_by_the_stream_that_an_atomic_waits_for_bad_flow,
    what_was_placed_is_there_when_memory_is_taken_back,
    a_loss_is_told_to_who_asks_bad_flow,
    a_lack_of_descriptors_is_waited_for,
);

/// Far less than a wait for a device takes when nobody ends it.
const IN_TIME: Duration = Duration::from_secs(5);
const LEN: u64 = 4 << 20;

fn staged(end: &End, memory: &Allocation, staging: Staging) -> Mr {
    let part = Memory::from(memory.whole().unwrap()).staged_by(staging);
    end.context.register(&end.pd, part, Access::ALL).unwrap()
}

fn parts_of_every_size(stage: &Stage) {
    let world = stage.fixture.world();
    let joined = world.join(QpOptions::default());
    let gpu = stage.gpu();
    let parts = [
        "half=4KiB,step=1,small=0,reads=1",
        "half=5000,step=4999,small=5000,reads=1",
        "half=64KiB,step=64KiB,small=100,reads=4KiB",
        "half=8MiB,step=8MiB,small=8MiB,reads=64MiB",
        "",
    ];
    for (seed, parts) in parts.into_iter().enumerate() {
        let staging: Staging = parts.parse().unwrap();
        let [near, far] = [0, 1].map(|_| gpu.alloc(LEN).unwrap());
        let mine = staged(&world.a, &near, staging);
        let theirs = staged(&world.b, &far, staging);
        assert_eq!((mine.path(), theirs.path()), (Path::Staged, Path::Staged));
        for len in [1u64, 8, 4096, 9000, 100_000, 1_500_000] {
            let mut wanted = vec![0; len as usize];
            warpwire_apps::pattern::fill_bytes(&mut wanted, seed as u64 ^ len, 0);
            near.write(3, &wanted).unwrap();
            let (from, back) = ([mine.sge(3, len as u32)], [mine.sge(2_000_001, len as u32)]);
            let requests = [
                Request::new(1, Op::Write(theirs.remote(7))).with(&from),
                Request::new(2, Op::Read(theirs.remote(7))).with(&back),
            ];
            joined.a.qp.post_send(&requests).unwrap();
            for id in 1..=2 {
                world.done(&joined.a.sends, id);
            }
            for (memory, at) in [(&far, 7), (&near, 2_000_001)] {
                let mut found = vec![0; len as usize];
                memory.read(at, &mut found).unwrap();
                same(&found, &wanted, &format!("{len} bytes by {parts:?}"));
            }
        }
    }
}

fn parts_that_make_no_sense_bad_flow(stage: &Stage) {
    let world = stage.fixture.world();
    let memory = stage.gpu().alloc(4096).unwrap();
    let good = Staging::default();
    for (staging, word) in [
        (Staging { half: 0, ..good }, "half"),
        (Staging { half: u64::MAX, ..good }, "half"),
        (Staging { step: 0, ..good }, "step"),
        (Staging { step: good.half + 1, ..good }, "step"),
        (Staging { small: u64::MAX, ..good }, "small"),
    ] {
        let part = Memory::from(memory.whole().unwrap()).staged_by(staging);
        refused(world.a.context.register(&world.a.pd, part, Access::ALL).map(drop), &[word]);
    }
}

/// A client of memory that has no window, and that tells when it is freed.
struct Windowless {
    memory: Allocation,
    invalidate: TakesBack,
}

/// What takes the memory back, once it is registered.
type TakesBack = Arc<Mutex<Option<Invalidate>>>;

struct Pages {
    memory: Allocation,
    watch: Mutex<Option<Watch>>,
    invalidate: TakesBack,
}

impl PeerClient for Windowless {
    fn name(&self) -> &str {
        "windowless"
    }

    fn persistence(&self) -> Persistence {
        Persistence::Invalidates
    }

    fn acquire(self: Arc<Self>, address: u64, len: u64) -> Result<Box<dyn PeerPages>> {
        if (address, len) != (self.memory.address().raw(), self.memory.len()) {
            return Err(Error::new(Kind::NotDeviceMemory, "acquire memory"));
        }
        let (memory, watch) = (self.memory.clone(), Mutex::new(None));
        let invalidate = self.invalidate.clone();
        Ok(Box::new(Pages { memory, watch, invalidate }))
    }
}

impl PeerPages for Pages {
    fn page_size(&self) -> u64 {
        4096
    }

    fn get_pages(&self, _: bool, invalidate: Invalidate) -> Result<()> {
        *self.invalidate.lock() = Some(invalidate.clone());
        let listener = Arc::new(move |event| {
            if event == MemoryEvent::Freed {
                invalidate.invalidate();
            }
        });
        *self.watch.lock() = Some(self.memory.watch(listener)?);
        Ok(())
    }

    fn dma_map(&self, _: &str) -> Result<Memory> {
        // So short that one step of an engine fills both halves.
        let staging = "half=16KiB,step=8KiB,small=4KiB".parse()?;
        Ok(Memory::from(self.memory.whole()?).staged_by(staging))
    }

    fn dma_unmap(&self, _: &str) {}

    fn put_pages(&self, _: Ended) {
        drop(self.watch.lock().take());
    }
}

/// Memory of a device of its own, registered by its address, through pinned memory.
fn by_address(end: &End, sim: &Sim) -> (Allocation, Mr, TakesBack) {
    let memory = sim.device(0).unwrap().alloc(LEN).unwrap();
    let registry = end.context.hca().registry();
    let invalidate = TakesBack::default();
    let client = Windowless { memory: memory.clone(), invalidate: invalidate.clone() };
    registry.add_client(Arc::new(client));
    let (address, access) = (memory.address().raw(), Access::ALL);
    // SAFETY: the memory is copied only, and the client tells when it goes.
    let mr = unsafe { end.context.register_address(&end.pd, address, LEN, None, access) }.unwrap();
    assert_eq!((mr.client(), mr.path()), (Some("windowless"), Path::Staged));
    (memory, mr, invalidate)
}

fn freed_by_the_stream_that_carries_writes_bad_flow(stage: &Stage) {
    let delay = Duration::from_millis(5);
    for free_at in [1, 2, 5] {
        let config =
            SimConfig { free_at: Some(free_at), copy_delay: delay, ..SimConfig::default() };
        let sim = Sim::start(config).unwrap();
        let world = stage.fixture.world();
        let joined = world.join(QpOptions::default());
        let (_memory, far, _) = by_address(&world.b, &sim);
        let near = stage.fixture.host(&world.a, LEN);
        let from = [near.mr.sge(0, LEN as u32)];
        let write = Request::new(1, Op::Write(far.remote(0))).with(&from);
        joined.a.qp.post_send(&[write]).unwrap();
        // The stream frees the memory, and waits until nobody is inside; who is inside waits for the stream.
        let start = Instant::now();
        world.failed(&joined.a.sends, 1, Status::RemoteAccess);
        assert!(start.elapsed() < IN_TIME, "they waited for each other: {:?}", start.elapsed());
        assert_eq!(far.failure().map(|error| error.to_string()), None);
    }
}

fn freed_by_the_stream_that_an_atomic_waits_for_bad_flow(stage: &Stage) {
    let delay = Duration::from_millis(20);
    let config = SimConfig { free_at: Some(1), copy_delay: delay, ..SimConfig::default() };
    let sim = Sim::start(config).unwrap();
    let world = stage.fixture.world();
    let joined = world.join(QpOptions::default());
    let (_memory, far, _) = by_address(&world.b, &sim);
    let near = stage.fixture.host(&world.a, LEN);
    let (from, word) = ([near.mr.sge(0, 64 << 10)], [near.mr.sge(0, 8)]);
    let add = Op::Atomic(far.remote(0), Atomic::FetchAdd { add: 1 });
    let requests =
        [Request::new(1, Op::Write(far.remote(0))).with(&from), Request::new(2, add).with(&word)];
    joined.a.qp.post_send(&requests).unwrap();
    let start = Instant::now();
    let first = world.next(&joined.a.sends);
    if first.is_success() {
        // It came in a step of its own, and was in its place before the memory went.
        world.failed(&joined.a.sends, 2, Status::RemoteAccess);
    } else {
        assert_eq!((first.id, first.status), (1, Status::RemoteAccess));
    }
    assert!(start.elapsed() < IN_TIME, "they waited for each other: {:?}", start.elapsed());
}

/// A client that takes memory back finds all that was placed in it, and nothing comes later.
fn what_was_placed_is_there_when_memory_is_taken_back(stage: &Stage) {
    let world = stage.fixture.world();
    let sim = Sim::start(SimConfig::default()).unwrap();
    let registry = world.b.context.hca().registry();
    for len in [100, 5000, 200_000] {
        let (memory, mr, invalidate) = by_address(&world.b, &sim);
        let wanted = vec![7; len];
        let find = || {
            let need = Access::REMOTE_WRITE;
            registry.resolve(mr.rkey(), world.b.pd.id(), need, mr.iova(), len as u64)
        };
        find().unwrap().scatter(0, &wanted).unwrap();
        invalidate.lock().clone().unwrap().invalidate();
        let mut found = vec![0; len];
        memory.read(0, &mut found).unwrap();
        same(&found, &wanted, "what was placed");
        assert!(find().is_err(), "it has been taken back");
        memory.write(0, &vec![9; len]).unwrap();
        assert!(registry.settle());
        memory.read(0, &mut found).unwrap();
        same(&found, &vec![9; len], "what its owner wrote afterwards");
    }
}

/// Whoever happens to wait for a device that fails: the one who must not acknowledge anything hears of it.
fn a_loss_is_told_to_who_asks_bad_flow(stage: &Stage) {
    let world = stage.fixture.world();
    let sim = Sim::start(SimConfig::default()).unwrap();
    let registry = world.b.context.hca().registry();
    let memory = sim.device(0).unwrap().alloc(LEN).unwrap();
    let mr = staged(&world.b, &memory, Staging::default());
    let other = stage.fixture.host(&world.b, 4096);
    let pd = world.b.pd.id();
    let span = registry.resolve(mr.rkey(), pd, Access::REMOTE_WRITE, mr.iova(), LEN).unwrap();
    sim.control(0).unwrap().fail(Nth { kind: OpKind::Copy, number: 1 });
    span.scatter(0, &[1; 100_000]).unwrap();
    drop(span);
    drop(other);
    registry.publish_all();
    assert!(!registry.settle(), "what was placed is lost");
    assert!(registry.settle(), "it is told once");
    assert!(mr.failure().is_some());
}

fn a_lack_of_descriptors_is_waited_for(_: &Stage) {
    child::run("descriptors");
}

/// In a process of its own, whose limit is everybody's.
pub fn run_short_of_descriptors() {
    let fixture = Fixture::new(Which::Loopback);
    let world = fixture.world();
    let joined = world.join(QpOptions { retry_count: 1, ..QpOptions::default() });
    let sim = Sim::start(SimConfig::default()).unwrap();
    let gpu = sim.device(0).unwrap();
    let before = getrlimit(Resource::Nofile);
    let len = 40_000u32;
    let near = fixture.host(&world.a, u64::from(len));
    let wanted = near.pattern(0, len as usize, 5);
    for way in ["staged", "on demand", "pages on demand"] {
        let memory = gpu.alloc(LEN).unwrap();
        let pages = vec![0u8; LEN as usize];
        let (whole, on_demand) = (memory.whole().unwrap(), Access::ALL | Access::ON_DEMAND);
        let (context, pd) = (&world.b.context, &world.b.pd);
        let far = match way {
            "staged" => context.register(pd, Memory::from(whole).staged(), Access::ALL),
            "on demand" => context.register(pd, whole, on_demand),
            _ => {
                let most = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ;
                let at = pages.as_ptr().expose_provenance() as u64;
                // SAFETY: the vector outlives the registration; the kernel copies into it, and nobody else.
                unsafe { context.register_address(pd, at, LEN, None, most | Access::ON_DEMAND) }
            }
        }
        .unwrap();
        // No file is opened any more, until the limit is as it was.
        setrlimit(Resource::Nofile, Rlimit { current: Some(3), ..before }).unwrap();
        let again = before;
        let relief = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(100));
            setrlimit(Resource::Nofile, again).unwrap();
        });
        let from = [near.mr.sge(0, len)];
        let write = Request::new(1, Op::Write(far.remote(0))).with(&from);
        joined.a.qp.post_send(&[write]).unwrap();
        let done = world.next(&joined.a.sends);
        assert_eq!((done.id, done.status), (1, Status::Success), "{way}: {:?}", far.failure());
        relief.join().unwrap();
        let read = Request::new(2, Op::Read(far.remote(0))).with(&from);
        joined.a.qp.post_send(&[read]).unwrap();
        world.done(&joined.a.sends, 2);
        same(&near.read(0, len as usize), &wanted, way);
    }
}

//! Staged memory, which is accessed through pinned bounce buffers: chunks of all sizes, memory
//! freed by the stream that copies it, and a shortage of descriptors.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use warpwire::mem::copy::StagingOptions;
use warpwire::mem::sim::{FailNth, OpKind, Sim, SimConfig};
use warpwire::mem::{Allocation, MemoryEvent, WatchGuard};
use warpwire::mr::{
    AccessPath, InvalidationHandle, PeerClient, PeerPages, Persistence, ReleaseReason as Ended,
};
use warpwire::verbs::{Access, Atomic, MemorySource, Mr, QpOptions, SendRequest, Status, WrOp};
use warpwire::{Error, Result, error::Kind};

use crate::registration::child;
use crate::registration::harness::{Harness, refused};
use crate::verbs::fixture::{Endpoint, Fixture, TestLink, same};
use testkit::cases;

cases!(Harness; CASES:
    chunks_of_every_size,
    invalid_staging_options_bad_flow,
    freed_by_the_stream_that_copies_bad_flow,
    freed_by_the_stream_that_an_atomic_waits_for_bad_flow,
    invalidation_flushes_staged_writes,
    a_failed_copy_is_reported_by_the_flush_bad_flow,
    a_shortage_of_descriptors_is_retried,
);

/// Far less than the timeout of a wait for a device: a case that takes longer deadlocked.
fn deadlock_limit() -> Duration {
    testkit::deadline(Duration::from_secs(5))
}

const LEN: u64 = 4 << 20;

fn staged(end: &Endpoint, memory: &Allocation, staging: StagingOptions) -> Mr {
    let part = MemorySource::from(memory.whole().unwrap()).with_staging(staging);
    end.context.register(&end.pd, part, Access::ALL).unwrap()
}

fn chunks_of_every_size(harness: &Harness) {
    let testbed = harness.fixture.testbed();
    let conn = testbed.join(QpOptions::default());
    let gpu = harness.gpu();
    let parts = [
        "half=4KiB,step=1,small=0,reads=1",
        "half=5000,step=4999,small=5000,reads=1",
        "half=64KiB,step=64KiB,small=100,reads=4KiB",
        "half=8MiB,step=8MiB,small=8MiB,reads=64MiB",
        "",
    ];
    for (seed, parts) in parts.into_iter().enumerate() {
        let staging: StagingOptions = parts.parse().unwrap();
        let [near, far] = [0, 1].map(|_| gpu.alloc(LEN).unwrap());
        let mine = staged(&testbed.a, &near, staging);
        let theirs = staged(&testbed.b, &far, staging);
        assert_eq!((mine.path(), theirs.path()), (AccessPath::Staged, AccessPath::Staged));
        for len in [1u64, 8, 4096, 9000, 100_000, 1_500_000] {
            let mut wanted = vec![0; len as usize];
            warpwire_apps::pattern::fill_bytes(&mut wanted, seed as u64 ^ len, 0);
            near.write(3, &wanted).unwrap();
            let (from, back) = ([mine.sge(3, len as u32)], [mine.sge(2_000_001, len as u32)]);
            let requests = [
                SendRequest::new(1, WrOp::Write(theirs.remote(7))).with(&from),
                SendRequest::new(2, WrOp::Read(theirs.remote(7))).with(&back),
            ];
            conn.a.qp.post_send(&requests).unwrap();
            for id in 1..=2 {
                testbed.done(&conn.a.sends, id);
            }
            for (memory, at) in [(&far, 7), (&near, 2_000_001)] {
                let mut found = vec![0; len as usize];
                memory.read(at, &mut found).unwrap();
                same(&found, &wanted, &format!("{len} bytes by {parts:?}"));
            }
        }
    }
}

fn invalid_staging_options_bad_flow(harness: &Harness) {
    let testbed = harness.fixture.testbed();
    let memory = harness.gpu().alloc(4096).unwrap();
    let good = StagingOptions::default();
    for (staging, word) in [
        (good.with_half(0), "half"),
        (good.with_half(u64::MAX), "half"),
        (good.with_step(0), "step"),
        (good.with_step(good.half + 1), "step"),
        (good.with_small(u64::MAX), "small"),
    ] {
        let part = MemorySource::from(memory.whole().unwrap()).with_staging(staging);
        refused(testbed.a.context.register(&testbed.a.pd, part, Access::ALL).map(drop), &[word]);
    }
}

/// A client of memory that has no window, and that invalidates it when it is freed.
struct NoWindowClient {
    memory: Allocation,
    invalidate: InvalidateHandle,
}

/// Set once the memory is registered.
type InvalidateHandle = Arc<Mutex<Option<InvalidationHandle>>>;

struct Pages {
    memory: Allocation,
    watch: Mutex<Option<WatchGuard>>,
    invalidate: InvalidateHandle,
}

impl PeerClient for NoWindowClient {
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

    fn get_pages(&self, _: bool, invalidate: InvalidationHandle) -> Result<()> {
        *self.invalidate.lock() = Some(invalidate.clone());
        let listener = Arc::new(move |event| {
            if event == MemoryEvent::Freed {
                invalidate.invalidate();
            }
        });
        *self.watch.lock() = Some(self.memory.watch(listener)?);
        Ok(())
    }

    fn dma_map(&self, _: &str) -> Result<MemorySource> {
        // So small that one step of an engine fills both halves of the bounce buffer.
        let staging = "half=16KiB,step=8KiB,small=4KiB".parse()?;
        Ok(MemorySource::from(self.memory.whole()?).with_staging(staging))
    }

    fn dma_unmap(&self, _: &str) {}

    fn put_pages(&self, _: Ended) {
        drop(self.watch.lock().take());
    }
}

/// Memory of a separate device, registered by its address and accessed through bounce buffers.
fn by_address(end: &Endpoint, sim: &Sim) -> (Allocation, Mr, InvalidateHandle) {
    let memory = sim.device(0).unwrap().alloc(LEN).unwrap();
    let registry = end.context.registry().unwrap();
    let invalidate = InvalidateHandle::default();
    let client = NoWindowClient { memory: memory.clone(), invalidate: invalidate.clone() };
    registry.add_client(Arc::new(client));
    let (address, access) = (memory.address().raw(), Access::ALL);
    // SAFETY: the memory is only copied, and the client invalidates it when it is freed.
    let mr = unsafe { end.context.register_address(&end.pd, address, LEN, None, access) }.unwrap();
    assert_eq!((mr.client(), mr.path()), (Some("windowless"), AccessPath::Staged));
    (memory, mr, invalidate)
}

fn freed_by_the_stream_that_copies_bad_flow(harness: &Harness) {
    let delay = Duration::from_millis(5);
    for free_at in [1, 2, 5] {
        let config = SimConfig::default().with_free_at(free_at).with_copy_delay(delay);
        let sim = Sim::start(config).unwrap();
        let testbed = harness.fixture.testbed();
        let conn = testbed.join(QpOptions::default());
        let (_memory, far, _) = by_address(&testbed.b, &sim);
        let near = harness.fixture.host(&testbed.a, LEN);
        let from = [near.mr.sge(0, LEN as u32)];
        let write = SendRequest::new(1, WrOp::Write(far.remote(0))).with(&from);
        conn.a.qp.post_send(&[write]).unwrap();
        // The stream frees the memory and waits until no access is in progress, while an access in
        // progress waits for the stream.
        let start = Instant::now();
        testbed.failed(&conn.a.sends, 1, Status::RemoteAccess);
        assert!(start.elapsed() < deadlock_limit(), "deadlock: {:?}", start.elapsed());
        assert_eq!(far.failure().map(|error| error.to_string()), None);
    }
}

fn freed_by_the_stream_that_an_atomic_waits_for_bad_flow(harness: &Harness) {
    let delay = Duration::from_millis(20);
    let config = SimConfig::default().with_free_at(1).with_copy_delay(delay);
    let sim = Sim::start(config).unwrap();
    let testbed = harness.fixture.testbed();
    let conn = testbed.join(QpOptions::default());
    let (_memory, far, _) = by_address(&testbed.b, &sim);
    let near = harness.fixture.host(&testbed.a, LEN);
    let (from, word) = ([near.mr.sge(0, 64 << 10)], [near.mr.sge(0, 8)]);
    let add = WrOp::Atomic(far.remote(0), Atomic::FetchAdd { add: 1 });
    let requests = [
        SendRequest::new(1, WrOp::Write(far.remote(0))).with(&from),
        SendRequest::new(2, add).with(&word),
    ];
    conn.a.qp.post_send(&requests).unwrap();
    let start = Instant::now();
    let first = testbed.next(&conn.a.sends);
    if first.is_success() {
        // The write was processed in an earlier step and completed before the memory was freed.
        testbed.failed(&conn.a.sends, 2, Status::RemoteAccess);
    } else {
        assert_eq!((first.id, first.status), (1, Status::RemoteAccess));
    }
    assert!(start.elapsed() < deadlock_limit(), "deadlock: {:?}", start.elapsed());
}

/// After an invalidation the client sees all bytes written before it, and none are written later.
fn invalidation_flushes_staged_writes(harness: &Harness) {
    let testbed = harness.fixture.testbed();
    let sim = Sim::start(SimConfig::default()).unwrap();
    let registry = testbed.b.context.registry().unwrap();
    for len in [100, 5000, 200_000] {
        let (memory, mr, invalidate) = by_address(&testbed.b, &sim);
        let wanted = vec![7; len];
        let find = || {
            let need = Access::REMOTE_WRITE;
            registry.resolve(
                mr.rkey(),
                testbed.b.pd.soft().unwrap().id(),
                need,
                mr.iova(),
                len as u64,
            )
        };
        find().unwrap().scatter(0, &wanted).unwrap();
        invalidate.lock().clone().unwrap().invalidate();
        let mut found = vec![0; len];
        memory.read(0, &mut found).unwrap();
        same(&found, &wanted, "bytes written before the invalidation");
        assert!(find().is_err(), "the memory was invalidated");
        memory.write(0, &vec![9; len]).unwrap();
        assert_eq!(registry.flush_staged(), 0);
        memory.read(0, &mut found).unwrap();
        same(&found, &vec![9; len], "bytes that the owner wrote afterwards");
    }
}

/// A failed copy is reported by `flush_staged`, before which nothing may be acknowledged, no matter
/// which thread waited for the device.
fn a_failed_copy_is_reported_by_the_flush_bad_flow(harness: &Harness) {
    let testbed = harness.fixture.testbed();
    let sim = Sim::start(SimConfig::default()).unwrap();
    let registry = testbed.b.context.registry().unwrap();
    let memory = sim.device(0).unwrap().alloc(LEN).unwrap();
    let mr = staged(&testbed.b, &memory, StagingOptions::default());
    let other = harness.fixture.host(&testbed.b, 4096);
    let pd = testbed.b.pd.soft().unwrap().id();
    let span = registry.resolve(mr.rkey(), pd, Access::REMOTE_WRITE, mr.iova(), LEN).unwrap();
    sim.control(0).unwrap().fail(FailNth { kind: OpKind::Copy, number: 1 });
    span.scatter(0, &[1; 100_000]).unwrap();
    drop(span);
    drop(other);
    registry.publish_all();
    let losses = registry.flush_staged();
    assert!(losses > 0, "the written bytes are lost");
    assert_eq!(registry.flush_staged(), losses, "a loss is counted once");
    assert!(mr.failure().is_some());
}

fn a_shortage_of_descriptors_is_retried(_: &Harness) {
    child::run("descriptors");
}

/// Runs in a child process, because the descriptor limit applies to the whole process.
pub fn run_short_of_descriptors() {
    let fixture = Fixture::new(TestLink::Loopback);
    let testbed = fixture.testbed();
    let conn = testbed.join(QpOptions::default().with_retry_count(1));
    let sim = Sim::start(SimConfig::default()).unwrap();
    let gpu = sim.device(0).unwrap();
    let before = getrlimit(Resource::Nofile);
    let len = 40_000u32;
    let near = fixture.host(&testbed.a, u64::from(len));
    let wanted = near.pattern(0, len as usize, 5);
    for access_kind in ["staged", "on demand", "pages on demand"] {
        let memory = gpu.alloc(LEN).unwrap();
        let pages = vec![0u8; LEN as usize];
        let (whole, on_demand) = (memory.whole().unwrap(), Access::ALL | Access::ON_DEMAND);
        let (context, pd) = (&testbed.b.context, &testbed.b.pd);
        let far = match access_kind {
            "staged" => context.register(pd, MemorySource::from(whole).staged(), Access::ALL),
            "on demand" => context.register(pd, whole, on_demand),
            _ => {
                let rights = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ;
                let at = pages.as_ptr().expose_provenance() as u64;
                // SAFETY: the vector outlives the registration, and only the kernel writes to it.
                unsafe { context.register_address(pd, at, LEN, None, rights | Access::ON_DEMAND) }
            }
        }
        .unwrap();
        // No file can be opened until the limit is restored.
        setrlimit(Resource::Nofile, Rlimit { current: Some(3), ..before }).unwrap();
        let again = before;
        let freed_descriptors = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(100));
            setrlimit(Resource::Nofile, again).unwrap();
        });
        let from = [near.mr.sge(0, len)];
        let write = SendRequest::new(1, WrOp::Write(far.remote(0))).with(&from);
        conn.a.qp.post_send(&[write]).unwrap();
        let done = testbed.next(&conn.a.sends);
        assert_eq!(
            (done.id, done.status),
            (1, Status::Success),
            "{access_kind}: {:?}",
            far.failure()
        );
        freed_descriptors.join().unwrap();
        let read = SendRequest::new(2, WrOp::Read(far.remote(0))).with(&from);
        conn.a.qp.post_send(&[read]).unwrap();
        testbed.done(&conn.a.sends, 2);
        same(&near.read(0, len as usize), &wanted, access_kind);
    }
}

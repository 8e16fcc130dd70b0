//! The header's code on CPU threads, with the software HCA behind its queues: `cpu.cpp`, built by
//! g++ when the suite starts. Without g++ a line `skipped: why` is printed; `WARPWIRE_REQUIRE=g++`
//! makes that a failure.
#![allow(unsafe_code)] // calls of a C library

use std::ffi::{CStr, c_char, c_int};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::time::Instant;

use libloading::{Library, Symbol};
use testkit::{Collector, cases};
use warpwire::mr::HostMemory;
use warpwire::stream::kernel::{KernelStatus, layout};
use warpwire::stream::{KernelQp, KernelQpOptions};
use warpwire::verbs::{Access, Context, Mr, Status};

use crate::kernels::calls::at;
use crate::kernels::fixture::{LEN, TestLink, WORD, bytes, contexts, short_timeouts, test_timeout};

type EntryFn = unsafe extern "C" fn(u64, *mut u64);
/// The library, and the link of the case.
pub struct CpuFixture {
    library: &'static Library,
    test_link: TestLink,
}

cases!(CpuFixture; ONCE: layout_and_names_agree);
cases!(CpuFixture; CASES:
    every_call_transfers_its_data,
    groups_of_threads_make_every_call,
    a_failure_is_reported_with_its_cause,
    a_peer_that_is_gone_is_an_error_soon,
    many_threads_lose_nothing,
    threads_that_post_together_lose_nothing,
);

pub fn collect(suite: &mut Collector) {
    let sources =
        std::env::var_os("CARGO_MANIFEST_DIR").ok_or("the sources are missing".to_owned());
    let Some(library) = suite.backend("g++", sources.and_then(|_| library())) else { return };
    suite.add("cpu", ONCE, |case| {
        (case.run)(&CpuFixture { library, test_link: TestLink::Loopback })
    });
    for (test_link, link) in TestLink::ALL {
        suite.add(&format!("cpu::{link}"), CASES, move |case| {
            (case.run)(&CpuFixture { library, test_link })
        });
    }
}

/// The library, built once.
fn library() -> Result<&'static Library, String> {
    static LIBRARY: OnceLock<Result<Library, String>> = OnceLock::new();
    LIBRARY.get_or_init(|| build().and_then(load)).as_ref().map_err(Clone::clone)
}

fn build() -> Result<PathBuf, String> {
    let crate_root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let out = Path::new(env!("CARGO_TARGET_TMPDIR")).join("libkernel_header.so");
    let mut compiler = Command::new("g++");
    compiler.args(["-std=c++17", "-Wall", "-Wextra", "-Wconversion", "-Werror", "-O1", "-g"]);
    compiler.args(["-pthread", "-shared", "-fPIC"]);
    compiler.arg(format!("-I{}", crate_root.join("../../../include").display()));
    compiler.arg(crate_root.join("kernels/cpu.cpp")).arg("-o").arg(&out);
    let built = compiler.output().map_err(|why| format!("g++ does not run: {why}"))?;
    match built.status.success() {
        true => Ok(out),
        // A compile error is a failure, no reason to skip.
        false => panic!("{}", String::from_utf8_lossy(&built.stderr)),
    }
}

fn load(path: PathBuf) -> Result<Library, String> {
    // SAFETY: the library was just built from cpu.cpp, which has no initializers.
    unsafe { Library::new(path) }.map_err(|why| why.to_string())
}

fn symbol<'l, T>(library: &'l Library, name: &str) -> Symbol<'l, T> {
    // SAFETY: callers pass the type that the function has in cpu.cpp.
    unsafe { library.get(name.as_bytes()) }.unwrap()
}

fn layout_and_names_agree(&CpuFixture { library, .. }: &CpuFixture) {
    let layout = symbol::<unsafe extern "C" fn(*mut u64)>(library, "cpu_layout");
    let mut found = [0; 28];
    // SAFETY: the function writes 28 numbers.
    unsafe { layout(found.as_mut_ptr()) };
    use layout::{field, queue};
    let wanted = [
        layout::LEN,
        queue::LEN,
        field::SEND_QUEUE,
        field::RECEIVE_QUEUE,
        field::DBREC,
        field::DOORBELL,
        field::SEND_CQ,
        field::RECEIVE_CQ,
        field::SINK,
        field::SEND_MASK,
        field::RECEIVE_MASK,
        field::NUMBER,
        field::RECEIVE_STRIDE,
        field::SINK_LKEY,
        field::FLAGS,
        field::VERSION,
        layout::SEND,
        layout::RECEIVE,
        queue::RESERVED,
        queue::PUBLISHED,
        queue::COMPLETED,
        queue::FAILURE,
        queue::CLOSED,
        queue::TAKEN,
        layout::VERSION.into(),
        layout::NO_FAILURE,
        layout::SINGLE_POSTER.into(),
        layout::DBREC_FIRST.into(),
    ];
    assert_eq!(found, wanted);
    let name = symbol::<unsafe extern "C" fn(c_int) -> *const c_char>(library, "cpu_name");
    for code in -0x110..=3 {
        // SAFETY: it returns a static string of the library.
        let found = unsafe { CStr::from_ptr(name(code)) };
        let status = KernelStatus::from_code(code);
        if code != -6 {
            // Kernels have no memory windows.
            assert_eq!(found.to_str().unwrap(), status.to_string(), "{code}");
        }
    }
}

/// One end, with host memory.
struct Endpoint {
    qp: KernelQp,
    memory: HostMemory,
    mr: Mr,
    list: Vec<u64>,
}

impl Endpoint {
    fn new(context: &Context, options: KernelQpOptions) -> Self {
        let pd = context.alloc_pd();
        let qp = KernelQp::create_for_cpu(context, &pd, options).unwrap();
        let memory = HostMemory::new(LEN + 4096).unwrap();
        let mr = context.register(&pd, memory.clone(), Access::ALL).unwrap();
        Self { qp, memory, mr, list: vec![0; 64] }
    }

    fn write_params(&mut self, there: warpwire::verbs::Remote, word: warpwire::verbs::Remote) {
        for (place, value) in [
            (at::HERE, self.mr.iova()),
            (at::HERE_KEY, self.mr.lkey().into()),
            (at::THERE, there.address),
            (at::THERE_KEY, there.rkey.into()),
            (at::WORD, word.address),
            (at::WORD_KEY, word.rkey.into()),
            // Host memory is registered at its own address.
            (at::OWN_WORD, self.mr.iova() + WORD),
            (at::TIMEOUT, test_timeout().as_nanos() as u64),
            (at::BAD_KEY, u64::from(there.rkey ^ 0x100)),
        ] {
            self.list[place as usize] = value;
        }
    }

    fn results(&self) -> &[u64] {
        &self.list[at::RESULTS as usize..]
    }

    fn status(&self, number: usize) -> KernelStatus {
        KernelStatus::from_code(self.results()[number] as i32)
    }

    fn word(&self) -> u64 {
        self.memory.bytes().load_u64(WORD).unwrap()
    }

    fn read(&self, at: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.memory.bytes().read(at, &mut bytes).unwrap();
        bytes
    }
}

fn ends(test_link: TestLink, options: &KernelQpOptions) -> [Endpoint; 2] {
    let contexts = contexts(test_link);
    let [mut a, mut b] = contexts.each_ref().map(|context| Endpoint::new(context, options.clone()));
    a.qp.connect(&b.qp.endpoint()).unwrap();
    b.qp.connect(&a.qp.endpoint()).unwrap();
    a.write_params(b.mr.remote(0), b.mr.remote(WORD));
    b.write_params(a.mr.remote(0), a.mr.remote(WORD));
    [a, b]
}

fn small() -> KernelQpOptions {
    KernelQpOptions::default().with_send_depth(8).with_receive_depth(4)
}

fn call(library: &Library, name: &str, end: &mut Endpoint) {
    let function = symbol::<EntryFn>(library, name);
    // SAFETY: the handle lives as long as the end, and the list has room for all results.
    unsafe { function(end.qp.handle().raw(), end.list.as_mut_ptr()) };
}

fn every_call_with(test_link: TestLink, library: &Library, act: impl Fn(&mut Endpoint) + Sync) {
    let [mut a, mut b] = ends(test_link, &small());
    let (sent, fetched) = (bytes(4096, 1), bytes(4096, 2));
    a.memory.bytes().write(0, &sent).unwrap();
    b.memory.bytes().write(16384, &fetched).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| call(library, "cpu_passive", &mut b));
        act(&mut a);
    });
    let too_long = i64::from(KernelStatus::TooLong.code()) as u64;
    let bad_ticket = i64::from(KernelStatus::BadTicket.code()) as u64;
    let wanted = [0, 0, 0, 0, 0, 5, 0, 12, 0, 0, 0, 0, 0, too_long, bad_ticket];
    assert_eq!(a.results()[..15], wanted);
    let imm = |length: u64, imm: u64| length << 32 | 1 << 31 | imm;
    assert_eq!(b.results()[..7], [0, 0, 100 << 32, 0, imm(50, 77), 0, imm(16, 88)]);
    assert_eq!(b.word(), 99);
    let later = a.read(0, 100);
    assert_eq!((b.read(8192, 64), b.read(16, 4080)), (sent[..64].to_vec(), sent[16..].to_vec()));
    assert_eq!(b.read(4096, 8), 0x1122_3344_5566_7788_u64.to_le_bytes());
    assert_eq!((a.read(16384, 4096), b.read(32768, 100)), (fetched, later));
    a.qp.check().unwrap();
    assert_eq!(a.qp.progress().unwrap().posted, 11);
}

fn every_call_transfers_its_data(&CpuFixture { library, test_link }: &CpuFixture) {
    every_call_with(test_link, library, |end| call(library, "cpu_active", end));
}

fn groups_of_threads_make_every_call(&CpuFixture { library, test_link }: &CpuFixture) {
    let act = symbol::<unsafe extern "C" fn(u64, *mut u64, u32)>(library, "cpu_active_by_group");
    every_call_with(test_link, library, |end| {
        // SAFETY: as in `call`.
        unsafe { act(end.qp.handle().raw(), end.list.as_mut_ptr(), 4) };
    });
}

fn a_failure_is_reported_with_its_cause(&CpuFixture { library, test_link }: &CpuFixture) {
    let [mut a, b] = ends(test_link, &small());
    call(library, "cpu_fail", &mut a);
    let (denied, flushed) =
        (KernelStatus::Failed(Status::RemoteAccess), KernelStatus::Failed(Status::Flushed));
    let found: Vec<_> = (0..5).map(|number| a.status(number)).collect();
    assert_eq!(found, [flushed, denied, KernelStatus::Ok, denied, flushed]);
    assert_eq!(b.memory.bytes().load_u64(0).unwrap(), 1);
    let error = a.qp.check().unwrap_err().to_string();
    assert!(error.contains("remote access"), "{error}");
}

fn a_peer_that_is_gone_is_an_error_soon(&CpuFixture { library, test_link }: &CpuFixture) {
    let options = small().with_connection(short_timeouts());
    let [mut a, b] = ends(test_link, &options);
    drop(b);
    let start = Instant::now();
    call(library, "cpu_one", &mut a);
    assert!(start.elapsed() < test_timeout() / 2, "{:?}", start.elapsed());
    assert_eq!(
        (a.status(0), a.status(1)),
        (KernelStatus::Ok, KernelStatus::Failed(Status::RetryExceeded))
    );
}

fn many_threads_lose_nothing(&CpuFixture { library, test_link }: &CpuFixture) {
    storm_with(library, test_link, false, 9000); // the 16-bit WQE counter wraps
}

fn threads_that_post_together_lose_nothing(&CpuFixture { library, test_link }: &CpuFixture) {
    storm_with(library, test_link, true, 1000);
}

fn storm_with(library: &Library, test_link: TestLink, together: bool, rounds: u64) {
    type Storm = unsafe extern "C" fn(*const u64, *const u64, u64, u32, u64, u64) -> u64;
    const THREADS: u32 = 8;
    let mut pairs: Vec<[Endpoint; 2]> =
        (0..2).map(|_| ends(test_link, &small().with_send_depth(256))).collect();
    let handles: Vec<u64> = pairs.iter().map(|[a, _]| a.qp.handle().raw()).collect();
    let lists: Vec<u64> =
        pairs.iter_mut().map(|[a, _]| a.list.as_mut_ptr().addr() as u64).collect();
    let storm = symbol::<Storm>(library, "cpu_storm");
    let (handle, list, count) = (handles.as_ptr(), lists.as_ptr(), pairs.len() as u64);
    // SAFETY: the function reads `count` handles and lists, which outlive it.
    let wrong = unsafe { storm(handle, list, count, THREADS, rounds, together.into()) };
    assert_eq!(wrong, 0, "{:?}", pairs[0][0].qp.check());
    for (number, [a, b]) in pairs.iter().enumerate() {
        assert_eq!(b.word(), rounds * u64::from(THREADS) / 2);
        assert_eq!(a.qp.progress().unwrap().posted, rounds * u64::from(THREADS));
        for thread in (0..u64::from(THREADS)).filter(|thread| thread / 4 % 2 == number as u64) {
            assert_eq!(b.memory.bytes().load_u64(thread * 8).unwrap(), rounds);
        }
    }
}

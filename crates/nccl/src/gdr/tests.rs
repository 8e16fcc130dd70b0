//! Plays NCCL with memory of a simulated GPU. Each end is a process of its own: this test program,
//! started again with `ROLE`.

use std::ffi::{c_int, c_void};
use std::process::{Command, Stdio};
use std::ptr::{null, null_mut};

use testkit::{Effort, Process, Rng};
use warpwire::mem::sim::{Sim, SimConfig};
use warpwire::mem::{Allocation, Window};

use crate::abi::{HandleBytes, MAX_RECVS, PTR_CUDA, PTR_HOST, PropertiesV11};
use crate::comm::{Handle, Request};
use crate::exports::ncclNetPlugin_v11 as net;
use crate::memory::MemoryHandle;
use crate::result::{INVALID_ARGUMENT, INVALID_USAGE, SUCCESS};

const ROLE: &str = "WARPWIRE_NCCL_TEST_ROLE";
const HANDLE: &str = "WARPWIRE_NCCL_TEST_HANDLE";
const SEED: &str = "WARPWIRE_NCCL_TEST_SEED";

/// Bytes of each buffer of a group.
const ROOM: usize = 300_000;
/// Messages of these sizes go from and to both kinds of memory.
const SIZES: [usize; 12] =
    [0, 1, 7, 8, 64, 4095, 4096, 4097, 65_536, 65_537, (1 << 20) + 3, 8 << 20];
const RANDOM_GROUPS: usize = 40;
/// Of all buffers of a kind, with a guard behind them.
const LEN: usize = (8 << 20) + 4096;

#[derive(Clone, Copy, Debug)]
struct Message {
    size: usize,
    offset: usize,
    from_device: bool,
    to_device: bool,
}

/// The groups of a run, which both ends know.
fn groups(seed: u64) -> Vec<Vec<Message>> {
    let mut rng = Rng::new(seed);
    let kinds = [(false, false), (false, true), (true, false), (true, true)];
    let one =
        |size, (from_device, to_device)| vec![Message { size, offset: 0, from_device, to_device }];
    let mut all: Vec<_> =
        SIZES.iter().flat_map(|size| kinds.map(|kind| one(*size, kind))).collect();
    for _ in 0..RANDOM_GROUPS {
        let count = 1 + rng.below(MAX_RECVS as u64) as usize;
        let message = |at: usize| {
            let limit = [9, 5000, 70_000, ROOM as u64][rng.below(4) as usize];
            let (size, offset) = (rng.below(limit) as usize, at * ROOM);
            let (from_device, to_device) = kinds[rng.below(4) as usize];
            Message { size, offset, from_device, to_device }
        };
        all.push((0..count).map(message).collect());
    }
    all
}

fn pattern(group: usize, entry: usize, len: usize) -> Vec<u8> {
    testkit::random_bytes((group * 1000 + entry) as u64, len)
}

fn done(code: c_int) {
    assert_eq!(code, SUCCESS);
}

/// Memory of this process and of the GPU, registered.
struct Buffers {
    _sim: Sim,
    device: Allocation,
    window: Window,
    host: Vec<u8>,
    /// Of the host, of the GPU.
    handles: [*const MemoryHandle; 2],
}

impl Buffers {
    fn register(comm: &Handle) -> Self {
        let sim = Sim::start(SimConfig::default()).unwrap();
        let device = sim.device(0).unwrap().alloc(LEN as u64).unwrap();
        let mut host = vec![0; LEN];
        let mut handles = [null(); 2];
        let places = [host.as_mut_ptr(), address(&device)];
        for (kind, into) in [PTR_HOST, PTR_CUDA].into_iter().zip(&mut handles) {
            let base = places[kind as usize - 1];
            // Both ways to register GPU memory.
            done(match kind {
                PTR_CUDA if std::process::id().is_multiple_of(2) => {
                    (net.memory.reg_mr_dma_buf)(Some(comm), base, LEN, kind, 0, -1, Some(into))
                }
                _ => (net.memory.reg_mr)(Some(comm), base, LEN, kind, Some(into)),
            });
        }
        let window = device.window().unwrap();
        // From now on every driver call fails, as one may wait for NCCL's kernels.
        sim.control(0).unwrap().kill();
        device.read(0, &mut [0]).unwrap_err();
        Self { _sim: sim, device, window, host, handles }
    }

    fn base(&mut self, is_device: bool) -> *mut u8 {
        if is_device { address(&self.device) } else { self.host.as_mut_ptr() }
    }

    fn handle(&self, is_device: bool) -> *const MemoryHandle {
        self.handles[usize::from(is_device)]
    }

    fn write(&mut self, is_device: bool, at: usize, bytes: &[u8]) {
        match is_device {
            true => self.window.write(at as u64, bytes).unwrap(),
            false => self.host[at..at + bytes.len()].copy_from_slice(bytes),
        }
    }

    fn read(&self, is_device: bool, at: usize, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        match is_device {
            true => self.window.read(at as u64, &mut bytes).unwrap(),
            false => bytes.copy_from_slice(&self.host[at..at + len]),
        }
        bytes
    }

    fn deregister(self) {
        for handle in self.handles {
            // SAFETY: `regMr` made it, and it is not used any more.
            done((net.memory.dereg_mr)(
                null_mut(),
                Some(unsafe { Box::from_raw(handle.cast_mut()) }),
            ));
        }
    }
}

fn address(memory: &Allocation) -> *mut u8 {
    std::ptr::without_provenance_mut(memory.address().raw() as usize)
}

fn finish(request: *const Request) -> [c_int; MAX_RECVS] {
    let (mut is_done, mut sizes) = (0, [-1; MAX_RECVS]);
    testkit::until("a request is complete", || {
        for _ in 0..1000 {
            // SAFETY: it lives as long as its communicator.
            let request = unsafe { request.as_ref() };
            done((net.completion.test)(request, Some(&mut is_done), sizes.as_mut_ptr()));
            if is_done == 1 {
                return true;
            }
            std::thread::yield_now();
        }
        false
    });
    sizes
}

/// Calls until there is a request, as NCCL does.
fn post(mut call: impl FnMut(&mut *const Request) -> c_int) -> *const Request {
    let mut request: *const Request = null();
    testkit::until("a request is posted", || {
        (0..1000).any(|_| {
            std::thread::yield_now();
            done(call(&mut request));
            !request.is_null()
        })
    });
    request
}

fn send_all(comm: &Handle, seed: u64) {
    let (mut buffers, mut rng) = (Buffers::register(comm), Rng::new(!seed));
    for (number, group) in groups(seed).iter().enumerate() {
        let mut order: Vec<usize> = (0..group.len()).collect();
        order.sort_by_cached_key(|_| rng.below(1 << 30));
        for (entry, message) in group.iter().enumerate() {
            let bytes = pattern(number, entry, message.size);
            buffers.write(message.from_device, message.offset, &bytes);
        }
        let mut requests = Vec::new();
        for entry in order {
            let Message { size, offset, from_device, .. } = group[entry];
            let data = buffers.base(from_device).wrapping_add(offset);
            // SAFETY: registered above.
            let memory = unsafe { buffers.handle(from_device).as_ref() };
            requests.push(post(|request| {
                (net.isend)(
                    Some(comm),
                    data,
                    size,
                    entry as c_int,
                    memory,
                    null_mut(),
                    Some(request),
                )
            }));
        }
        for request in requests {
            finish(request);
        }
    }
    buffers.deregister();
}

fn receive_all(comm: &Handle, seed: u64) {
    let mut buffers = Buffers::register(comm);
    for (number, group) in groups(seed).iter().enumerate() {
        let bases = [buffers.base(false), buffers.base(true)];
        let data = group.iter().map(|m| bases[usize::from(m.to_device)].wrapping_add(m.offset));
        let data: Vec<*mut u8> = data.collect();
        // SAFETY: registered above.
        let memory = group.iter().map(|m| unsafe { buffers.handle(m.to_device).as_ref() });
        let memory: Vec<_> = memory.collect();
        let sizes: Vec<usize> = group.iter().map(|message| message.size).collect();
        let tags: Vec<c_int> = (0..group.len() as c_int).collect();
        for message in group {
            buffers.write(message.to_device, message.offset, &vec![0xee; message.size + 64]);
        }
        let count = group.len() as c_int;
        let request = post(|request| {
            (net.irecv)(
                Some(comm),
                count,
                data.as_ptr(),
                sizes.as_ptr(),
                tags.as_ptr(),
                memory.as_ptr(),
                null_mut(),
                Some(request),
            )
        });
        let got = finish(request);
        let mut flush: *const Request = request;
        done((net.completion.iflush)(
            Some(comm),
            count,
            null(),
            null(),
            memory.as_ptr(),
            Some(&mut flush),
        ));
        assert!(flush.is_null(), "done at once");
        for (entry, message) in group.iter().enumerate() {
            assert_eq!(got[entry] as usize, message.size, "{number} {entry} {message:?}");
            let found = buffers.read(message.to_device, message.offset, message.size + 64);
            let (bytes, guard) = found.split_at(message.size);
            assert!(bytes == pattern(number, entry, message.size), "{number} {entry} {message:?}");
            assert!(guard.iter().all(|byte| *byte == 0xee), "{number} {entry} {message:?}");
        }
    }
    buffers.deregister();
}

fn init() -> PropertiesV11 {
    let mut context: *const c_void = null();
    done((net.init)(Some(&mut context), 7, null_mut(), None, null_mut()));
    let mut into = std::mem::MaybeUninit::<PropertiesV11>::zeroed();
    // SAFETY: zeros are valid: integers, floats and pointers.
    let properties = unsafe { into.assume_init_mut() };
    done((net.get_properties)(0, Some(properties)));
    // SAFETY: as above.
    unsafe { into.assume_init() }
}

/// A receiver: it prints its handle and waits for the sender.
fn receiver() {
    let (mut handle, mut listener, mut comm) = ([0; 128], null(), null());
    done((net.listen)(null_mut(), 0, Some(&mut handle), Some(&mut listener)));
    println!("\nhandle {}", handle.map(|byte| format!("{byte:02x}")).concat());
    testkit::until("the sender connects", || {
        // SAFETY: `listen` made it, and it is closed below.
        done((net.memory.accept)(unsafe { listener.as_ref() }, Some(&mut comm), null_mut()));
        !comm.is_null()
    });
    // SAFETY: as above, and not used any more.
    done((net.completion.close_listen)(Some(unsafe { Box::from_raw(listener.cast_mut()) })));
    // SAFETY: `accept` made it.
    let comm: Box<Handle> = unsafe { Box::from_raw(comm.cast_mut()) };
    let seed = std::env::var(SEED).unwrap().parse().unwrap();
    receive_all(&comm, seed);
    done((net.completion.close_recv)(Some(comm)));
}

fn sender() {
    let text = std::env::var(HANDLE).unwrap();
    let byte = |at: usize| u8::from_str_radix(&text[2 * at..2 * at + 2], 16).unwrap();
    let handle: HandleBytes = std::array::from_fn(byte);
    let mut comm = null();
    testkit::until("the receiver accepts", || {
        done((net.connect)(null_mut(), 0, Some(&handle), Some(&mut comm), null_mut()));
        !comm.is_null()
    });
    // SAFETY: `connect` made it.
    let comm: Box<Handle> = unsafe { Box::from_raw(comm.cast_mut()) };
    let seed = std::env::var(SEED).unwrap().parse().unwrap();
    send_all(&comm, seed);
    done((net.completion.close_send)(Some(comm)));
}

/// What cannot be registered: with the option on, off, or where there is no window.
fn refusals(properties: &PropertiesV11) {
    let (mut handle, mut listener) = ([0; 128], null());
    done((net.listen)(null_mut(), 0, Some(&mut handle), Some(&mut listener)));
    let (mut send, mut recv): (*const Handle, *const Handle) = (null(), null());
    testkit::until("both ends are connected", || {
        if send.is_null() {
            done((net.connect)(null_mut(), 0, Some(&handle), Some(&mut send), null_mut()));
        }
        if recv.is_null() {
            // SAFETY: `listen` made it.
            let listener = unsafe { listener.as_ref() };
            done((net.memory.accept)(listener, Some(&mut recv), null_mut()));
        }
        !send.is_null() && !recv.is_null()
    });
    let gpu = warpwire::mem::open("sim:0").unwrap();
    let memory = gpu.alloc(4096).unwrap();
    let mut host = [0_u8; 4096];
    let (host, device) = (host.as_mut_ptr(), address(&memory));
    let register = |base, len, kind| {
        let mut into: *const MemoryHandle = null();
        // SAFETY: `accept` made it.
        let recv: Option<&Handle> = unsafe { recv.as_ref() };
        let code = (net.memory.reg_mr)(recv, base, len, kind, Some(&mut into));
        assert_eq!(into.is_null(), code != SUCCESS);
        code
    };
    assert_eq!(register(host, 4096, PTR_HOST), SUCCESS);
    assert_eq!([0, 3, 4].map(|kind| register(host, 4096, kind)), [INVALID_USAGE; 3]);
    let found = register(device, 4096, PTR_CUDA);
    if properties.v9.ptr_support == PTR_HOST {
        assert_eq!(found, INVALID_USAGE);
        return;
    }
    let has_window = std::env::var_os("WARPWIRE_WINDOW").is_none();
    assert_eq!(found, if has_window { SUCCESS } else { INVALID_ARGUMENT });
    assert_eq!(register(host, 4096, PTR_CUDA), INVALID_ARGUMENT);
    assert_eq!(register(device, 0, PTR_CUDA), INVALID_ARGUMENT);
    assert_eq!(register(device, 1 << 40, PTR_CUDA), INVALID_ARGUMENT);
    assert_eq!(register(null_mut(), 4096, PTR_CUDA), INVALID_ARGUMENT);
    let mut request: *const Request = null();
    let mut flush = |comm: *const Handle, count, memory: *const Option<&MemoryHandle>| {
        // SAFETY: `connect` and `accept` made them.
        let comm = unsafe { comm.as_ref() };
        (net.completion.iflush)(comm, count, null(), null(), memory, Some(&mut request))
    };
    assert_eq!(flush(send, 1, [None].as_ptr()), INVALID_USAGE);
    assert_eq!(flush(recv, 0, [None].as_ptr()), INVALID_ARGUMENT);
    assert_eq!(flush(recv, 9, [None].as_ptr()), INVALID_ARGUMENT);
    assert_eq!(flush(recv, 1, null()), INVALID_ARGUMENT);
    assert_eq!(flush(recv, 1, [None].as_ptr()), SUCCESS);
}

/// The body of a process that plays a role; does nothing without one.
#[test]
fn role() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let properties = init();
    if role == "refusals" {
        return refusals(&properties);
    }
    let is_set = |name: &str, value: &str| std::env::var(name).as_deref() == Ok(value);
    assert_eq!(properties.v9.ptr_support, PTR_HOST | PTR_CUDA);
    assert!(properties.v9.force_flush == 1 && properties.v9.pci_path.is_null());
    assert!(is_set("NCCL_NET_GDR_LEVEL", "SYS") && is_set("NCCL_NET_GDR_READ", "0"));
    if role == "receiver" { receiver() } else { sender() }
}

fn command(role: &str, gdr: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "gdr::tests::role", "--nocapture", "--test-threads=1"]);
    // By default, copies of any size are driver calls.
    command.env("WARPWIRE_COPY", "write=0,read=0");
    command.env(ROLE, role).env("WARPWIRE_NCCL_GDR", gdr).env("WARPWIRE_NCCL_DEVICES", "lo");
    for name in ["NCCL_NET_GDR_LEVEL", "NCCL_NET_GDR_READ", "NCCL_PROTO", "WARPWIRE_WINDOW"] {
        command.env_remove(name);
    }
    command
}

#[test]
fn messages_between_gpu_and_host_memory_without_the_driver() {
    let setups =
        [("shm", "1", "auto"), ("udp", "2", "auto"), ("auto", "3", "50"), ("udp", "4", "20")];
    let count = Effort::choose([2, setups.len(), setups.len()]);
    let seeds = Effort::pick("WARPWIRE_SEEDS", [1, 2, 30]);
    for seed in 0..seeds {
        for (link, engines, progress) in &setups[..count] {
            let with_setup = |role| {
                let mut command = command(role, "1");
                command.env("WARPWIRE_NCCL_LINK", link).env("WARPWIRE_NCCL_ENGINES", engines);
                command.env("WARPWIRE_NCCL_PROGRESS", progress).env(SEED, seed.to_string());
                command
            };
            let mut receiver = Process::start(with_setup("receiver").stdout(Stdio::piped()));
            let mut handle = None;
            testkit::until("the receiver listens", || {
                handle = receiver.line().strip_prefix("handle ").map(str::to_owned);
                handle.is_some()
            });
            let sender = with_setup("sender").env(HANDLE, handle.unwrap()).output().unwrap();
            let text = String::from_utf8_lossy(&sender.stdout).into_owned()
                + &String::from_utf8_lossy(&sender.stderr);
            assert!(sender.status.success(), "{link} {engines} {progress} {seed}: {text}");
            let status = receiver.child.wait().unwrap();
            assert!(status.success(), "{link} {engines} {progress} {seed}: {status}");
        }
    }
}

#[test]
fn other_memory_is_refused() {
    for (gdr, window) in [("0", None), ("1", None), ("1", Some("rm"))] {
        let mut command = command("refusals", gdr);
        command.envs(window.map(|path| ("WARPWIRE_WINDOW", path)));
        let output = command.output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{gdr} {window:?}: {text}");
    }
}

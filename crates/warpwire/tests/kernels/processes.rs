//! Direct access of kernels between processes, one of which is killed.

use std::net::TcpListener;
use std::time::Instant;

use warpwire::mem::{Backend, MemoryKind};
use warpwire::stream::kernel::KernelStatus;
use warpwire::verbs::bootstrap::Bootstrap;
use warpwire::verbs::{Context, QpEndpoint, Remote, Status};

use crate::kernels::direct::{patient, start_traffic, warm_up};
use crate::kernels::fixture::{Endpoint, Fixture, TestLink, WORD, test_timeout, threaded};
use testkit::{Process, Role, cases};

cases!(Fixture; CASES:
    the_owner_of_memory_is_killed,
    the_process_of_a_kernel_is_killed,
);

const ROUNDS: usize = 5;

/// What the two processes exchange: the endpoint, and address and rkey of memory and word.
type ConnectionData = (QpEndpoint, [u64; 4]);

/// An end that is connected to the other process's.
fn open(fixture: &Fixture, bootstrap: &mut Bootstrap) -> Endpoint {
    let [link, _] = fixture.test_link.ends();
    let context = Context::open_with(link, threaded()).unwrap();
    let options = fixture.options().with_connection(patient());
    let end = Endpoint::with_kind(context, &fixture.gpu, MemoryKind::Vmm, options);
    let (there, word) = (end.mr.remote(0), end.mr.remote(WORD));
    let mine = [there.address, there.rkey.into(), word.address, word.rkey.into()];
    let theirs: ConnectionData = bootstrap.swap(&(end.qp.endpoint(), mine)).unwrap();
    let (endpoint, [there, rkey, word, word_rkey]) = theirs;
    end.qp.connect(&endpoint).unwrap();
    let remote = |address, rkey: u64| Remote { address, rkey: rkey as u32 };
    end.write_params(remote(there, rkey), remote(word, word_rkey));
    bootstrap.swap(&"connected".to_owned()).unwrap();
    end
}

/// Starts the other process, in this role.
fn start(fixture: &Fixture, role: &str) -> (Process, Bootstrap) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let role = Role::new("kernels", format!("{role} {} {port}", fixture.backend));
    let process = Process::start(&mut role.command());
    (process, Bootstrap::accept(&listener, test_timeout()).unwrap())
}

/// Entry point of the other process: role, backend and port.
pub fn run_role(words: &str) {
    let [role, backend, port] = words.split(' ').collect::<Vec<_>>().try_into().unwrap();
    let known = [Backend::Sim, Backend::Cuda].into_iter();
    let backend = known.into_iter().find(|known| known.to_string() == backend).unwrap();
    let address = ("127.0.0.1", port.parse::<u16>().unwrap());
    let mut bootstrap = Bootstrap::connect(address, test_timeout()).unwrap();
    let fixture = Fixture::new(backend, TestLink::Shm);
    let end = open(&fixture, &mut bootstrap);
    let stream = (role == "kernel").then(|| {
        warm_up(&fixture, &end);
        start_traffic(&fixture, &end)
    });
    bootstrap.swap(&"ready".to_owned()).unwrap();
    // Until it is killed.
    std::thread::sleep(10 * test_timeout());
    drop(stream);
}

fn the_owner_of_memory_is_killed(fixture: &Fixture) {
    for _ in 0..ROUNDS {
        let (mut process, mut bootstrap) = start(fixture, "owner");
        let end = open(fixture, &mut bootstrap);
        bootstrap.swap(&"ready".to_owned()).unwrap();
        warm_up(fixture, &end);
        let stream = start_traffic(fixture, &end);
        process.kill();
        stream.synchronize(test_timeout()).unwrap();
        let [_, status] = end.results();
        let gone = KernelStatus::Failed(Status::RetryExceeded);
        assert_eq!(KernelStatus::from_code(status as i32), gone);
    }
}

fn the_process_of_a_kernel_is_killed(fixture: &Fixture) {
    if fixture.backend == Backend::Cuda && std::env::var_os("CUDA_MPS_PIPE_DIRECTORY").is_some() {
        testkit::skip("a client of MPS that is killed with a kernel running ends its fellows");
    }
    for _ in 0..ROUNDS {
        let (mut process, mut bootstrap) = start(fixture, "kernel");
        let Endpoint { qp, memory, mr, .. } = open(fixture, &mut bootstrap);
        bootstrap.swap(&"ready".to_owned()).unwrap();
        process.kill();
        let start = Instant::now();
        mr.deregister().unwrap();
        assert!(start.elapsed() < test_timeout() / 4, "{:?}", start.elapsed());
        memory.write(0, &[0x77; 64]).unwrap();
        let mut bytes = [0; 64];
        memory.read(0, &mut bytes).unwrap();
        assert_eq!(bytes, [0x77; 64], "deregistered memory was written");
        drop(qp);
    }
}

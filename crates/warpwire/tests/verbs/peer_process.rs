//! Direct access between processes: registrations end, and peers are killed or stopped, during
//! accesses.
//!
//! The test binary starts itself as the peer, which writes in a loop into memory that the test
//! names.

use std::io::{BufRead, BufReader, Write};
use std::net::SocketAddr;
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use warpwire::error::Kind;
use warpwire::link::shm::exports;
use warpwire::link::{Link, LinkKind, Shm, ShmOptions};
use warpwire::mem::{self, Allocation};
use warpwire::mr::HostMemory;
use warpwire::verbs::{
    Access, Completion, Context, Cq, Mr, Pd, ProgressMode, Qp, QpAttributes, QpEndpoint, QpOptions,
    Remote, SendRequest, State, WrOp,
};

use crate::verbs::fixture::{Fixture, TestLink, is_unused, test_timeout};
use testkit::{Role, cases, deadline};

cases!(Fixture; CASES:
    a_peer_process_writes_until_the_registration_ends,
    a_peer_process_is_killed_during_an_access,
    a_peer_process_is_stopped_during_an_access,
    a_peer_process_copies_until_the_registration_ends,
    a_peer_process_is_killed_during_a_copy,
    the_owner_of_device_memory_is_killed,
);

cases!(Fixture; ONCE:
    revocation_waits_for_a_live_importer,
    processes_of_two_users_connect,
);

/// A user other than root, and not the overflow user.
const OTHER_USER: u32 = 54_321;

const LEN: usize = 1 << 20;

/// A device with a queue pair whose timeouts allow for a peer under load.
struct Endpoint {
    context: Context,
    pd: Pd,
    cq: Cq,
    qp: Qp,
}

impl Endpoint {
    fn open(test_link: TestLink) -> Self {
        // An ACK timeout of 1 s instead of 67 ms.
        Self::open_with(test_link, QpOptions::default().with_timeout(18))
    }

    fn open_with(test_link: TestLink, options_of_qp: QpOptions) -> Self {
        let [link, _] = test_link.ends().unwrap();
        let options = test_link.options(ProgressMode::Auto).with_progress_mode(ProgressMode::Auto);
        let context = Context::open_with(link, options).unwrap();
        let (pd, cq) = (context.alloc_pd(), context.create_cq(64).unwrap());
        let qp = context.create_qp(&pd, &cq, &cq, options_of_qp).unwrap();
        Self { context, pd, cq, qp }
    }

    /// Registered memory of the simulated GPU, filled.
    fn register_device(&self, access: Access) -> (Allocation, Mr) {
        let memory = mem::open("sim:0").unwrap().alloc(LEN as u64).unwrap();
        memory.write(0, &[0x5a; LEN]).unwrap();
        let whole = memory.whole().unwrap();
        (memory, self.context.register(&self.pd, whole, access).unwrap())
    }
}

/// Entry point of the child process: writes to the memory named on its stdin until a write fails.
pub fn run(name: &str) {
    match name.strip_prefix("import ") {
        Some(owner) => begin_access(owner.parse().unwrap()),
        // The parent may close the pipe at any time.
        None => match name.split_once(' ') {
            Some((name, "device")) => drop(write_forever(name, true)),
            Some((name, "owner")) => drop(own_forever(name)),
            _ => drop(write_forever(name, false)),
        },
    }
}

/// Lets the parent write to device memory.
fn own_forever(name: &str) -> Option<()> {
    let (test_link, _) = TestLink::LINKS.into_iter().find(|(_, known)| *known == name)?;
    let mut lines = std::io::stdin().lines().map_while(Result::ok);
    let end = Endpoint::open(test_link);
    print_line(&serde_json::to_string(&end.qp.endpoint()).unwrap());
    let theirs: QpEndpoint = serde_json::from_str(&lines.next()?).unwrap();
    end.qp.connect(&theirs).unwrap();
    let mr = end.register_device(Access::ALL).1;
    print_line(&serde_json::to_string(&mr.remote(0)).unwrap());
    lines.next();
    Some(())
}

fn write_forever(name: &str, on_device: bool) -> Option<()> {
    let (test_link, _) = TestLink::LINKS.into_iter().find(|(_, known)| *known == name)?;
    let mut lines = std::io::stdin().lines().map_while(Result::ok);
    let end = Endpoint::open(test_link);
    print_line(&serde_json::to_string(&end.qp.endpoint()).unwrap());
    let theirs: QpEndpoint = serde_json::from_str(&lines.next()?).unwrap();
    end.qp.connect(&theirs).unwrap();
    let mr = match on_device {
        true => end.register_device(Access::LOCAL_WRITE).1,
        false => {
            let memory = HostMemory::new(LEN as u64).unwrap();
            memory.bytes().fill(0, LEN as u64, &[0x5a]).unwrap();
            end.context.register(&end.pd, memory, Access::LOCAL_WRITE).unwrap()
        }
    };
    let line = lines.next()?;
    let mut words = line.split(' ').map(|word| word.parse::<u64>().unwrap());
    let (rkey, address) = (words.next()? as u32, words.next()?);
    let data = [mr.sge(0, LEN as u32)];
    let write = SendRequest::new(1, WrOp::Write(Remote { address, rkey })).with(&data);
    let mut reported = 0;
    loop {
        end.qp.post_send(&[write]).unwrap();
        let mut one = [Completion::EMPTY];
        while end.cq.poll(&mut one).unwrap() == 0 {}
        if !one[0].is_success() {
            break;
        }
        let direct = end.context.stats().unwrap().direct.operations;
        if reported == 0 || direct > 0 && reported < 2 {
            reported = if direct > 0 { 2 } else { 1 };
            print_line(&format!("wrote {direct}"));
        }
    }
    // A failed queue pair ends this process.
    print_line("failed");
    Some(())
}

fn print_line(line: &str) {
    let mut out = std::io::stdout();
    // The parent may have closed the pipe.
    let _ = writeln!(out, "{line}");
    let _ = out.flush();
}

/// A child process and the lines it prints.
struct ChildPeer {
    child: Child,
    input: ChildStdin,
    lines: mpsc::Receiver<String>,
}

fn start(role: &str, user: Option<u32>) -> ChildPeer {
    let mut command = Role::new("verbs", format!("writer {role}")).command();
    if let Some(user) = user {
        command.uid(user);
    }
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let (out, input) = (child.stdout.take().unwrap(), child.stdin.take().unwrap());
    let (reporter, lines) = mpsc::channel();
    std::thread::spawn(move || {
        for line in BufReader::new(out).lines().map_while(Result::ok) {
            let _ = reporter.send(line);
        }
    });
    ChildPeer { child, input, lines }
}

impl Drop for ChildPeer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl ChildPeer {
    fn next_line(&self) -> String {
        self.lines.recv_timeout(test_timeout()).expect("a line from the peer")
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }
}

/// A child process connected to a queue pair of this one.
struct Peer {
    process: ChildPeer,
    end: Endpoint,
}

impl Peer {
    fn start(test_link: TestLink) -> Self {
        Self::start_as(test_link, "", None)
    }

    /// The same, with the child process in this role, running as another user.
    fn start_as(test_link: TestLink, role: &str, user: Option<u32>) -> Self {
        let end = match role {
            // A second of silence: the peer is dead, and not only waiting for a CPU.
            " owner" => Endpoint::open_with(test_link, QpOptions::default().with_timeout(15)),
            _ => Endpoint::open(test_link),
        };
        let name = TestLink::LINKS.into_iter().find(|(known, _)| *known == test_link).unwrap().1;
        let mut peer = Self { process: start(&format!("{name}{role}"), user), end };
        let theirs: QpEndpoint = serde_json::from_str(&peer.process.next_line()).unwrap();
        peer.end.qp.connect(&theirs).unwrap();
        let mine = serde_json::to_string(&peer.end.qp.endpoint()).unwrap();
        writeln!(peer.process.input, "{mine}").unwrap();
        peer
    }

    /// Starts a peer that writes to the returned memory until its registration ends.
    fn start_writing(test_link: TestLink) -> (Self, HostMemory, Mr) {
        let mut peer = Self::start(test_link);
        let memory = HostMemory::new(LEN as u64).unwrap();
        let mr = peer.end.context.register(&peer.end.pd, memory.clone(), Access::ALL).unwrap();
        peer.write_to(test_link, mr.remote(0));
        (peer, memory, mr)
    }

    /// The same with device memory on both sides.
    fn start_copying(test_link: TestLink) -> (Self, Allocation, Mr) {
        let mut peer = Self::start_as(test_link, " device", None);
        let (memory, mr) = peer.end.register_device(Access::ALL);
        peer.write_to(test_link, mr.remote(0));
        (peer, memory, mr)
    }

    /// Makes the peer write to `at`. Returns once it does so, without packets on direct links.
    fn write_to(&mut self, test_link: TestLink, at: Remote) {
        writeln!(self.process.input, "{} {}", at.rkey, at.address).unwrap();
        let mut line = self.process.next_line();
        while test_link.is_direct() && line == "wrote 0" {
            line = self.process.next_line();
        }
        assert!(line.starts_with("wrote "), "{line}");
    }
}

/// Asserts that the peer does not write to the memory within 5 ms.
fn expect_unwritten(memory: &HostMemory, what: &str) {
    memory.bytes().fill(0, LEN as u64, &[0xee]).unwrap();
    std::thread::sleep(Duration::from_millis(5));
    let mut found = vec![0; LEN];
    memory.bytes().read(0, &mut found).unwrap();
    let wrong = found.iter().position(|byte| *byte != 0xee);
    assert_eq!(wrong, None, "offset of a byte written {what}");
}

/// The same for device memory.
fn expect_uncopied(memory: &Allocation, what: &str) {
    memory.write(0, &[0xee; LEN]).unwrap();
    std::thread::sleep(Duration::from_millis(5));
    let mut found = vec![0; LEN];
    memory.read(0, &mut found).unwrap();
    let wrong = found.iter().position(|byte| *byte != 0xee);
    assert_eq!(wrong, None, "offset of a byte written {what}");
}

fn a_peer_process_copies_until_the_registration_ends(fixture: &Fixture) {
    for _ in 0..4 {
        let (peer, memory, mr) = Peer::start_copying(fixture.test_link);
        std::thread::sleep(Duration::from_millis(3));
        if is_unused(mr.deregister()) {
            expect_uncopied(&memory, "after deregistration");
        }
        let start = Instant::now();
        while peer.process.lines.try_recv().as_deref() != Ok("failed") {
            assert!(start.elapsed() < test_timeout(), "the peer's writes still succeed");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

fn a_peer_process_is_killed_during_a_copy(fixture: &Fixture) {
    for _ in 0..6 {
        let (mut peer, memory, mr) = Peer::start_copying(fixture.test_link);
        peer.process.signal(Signal::KILL);
        let start = Instant::now();
        drop(mr);
        assert!(start.elapsed() < test_timeout(), "deregistration waited for a dead peer");
        peer.process.child.wait().unwrap();
        expect_uncopied(&memory, "by a killed peer");
    }
}

/// Writes to the device memory of a process that is killed end with an error, at any moment.
fn the_owner_of_device_memory_is_killed(fixture: &Fixture) {
    for round in 0..4_u64 {
        let mut peer = Peer::start_as(fixture.test_link, " owner", None);
        let remote: Remote = serde_json::from_str(&peer.process.next_line()).unwrap();
        let (_memory, mr) = peer.end.register_device(Access::LOCAL_WRITE);
        let data = [mr.sge(0, LEN as u32)];
        let write = SendRequest::new(1, WrOp::Write(remote)).with(&data);
        let (start, mut killed) = (Instant::now(), false);
        let status = loop {
            peer.end.qp.post_send(&[write]).unwrap();
            let done = peer.end.cq.wait_next(test_timeout()).unwrap().expect("a completion");
            if !done.is_success() {
                break done.status;
            }
            if !killed && start.elapsed() > Duration::from_millis(6 * round) {
                peer.process.signal(Signal::KILL);
                peer.process.child.wait().unwrap();
                killed = true;
            }
            assert!(start.elapsed() < test_timeout(), "writes to a dead process succeed");
        };
        assert!(killed, "a write failed before its target was killed: {status:?}");
    }
}

fn a_peer_process_writes_until_the_registration_ends(fixture: &Fixture) {
    for _ in 0..4 {
        let (peer, memory, mr) = Peer::start_writing(fixture.test_link);
        std::thread::sleep(Duration::from_millis(3));
        if is_unused(mr.deregister()) {
            expect_unwritten(&memory, "after deregistration");
        }
        // Next, the peer's writes fail by the protocol, whether or not this process polls.
        let start = Instant::now();
        while peer.process.lines.try_recv().as_deref() != Ok("failed") {
            assert!(start.elapsed() < test_timeout(), "the peer's writes still succeed");
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(peer.end.context.next_event().is_some(), "an access error is reported here too");
    }
}

fn a_peer_process_is_killed_during_an_access(fixture: &Fixture) {
    for _ in 0..6 {
        let (mut peer, memory, mr) = Peer::start_writing(fixture.test_link);
        peer.process.signal(Signal::KILL);
        let start = Instant::now();
        drop(mr);
        assert!(start.elapsed() < test_timeout(), "deregistration waited for a dead peer");
        expect_unwritten(&memory, "by a killed peer");
        peer.process.child.wait().unwrap();
    }
}

/// Deregistration of memory that a stopped peer accesses waits for a limited time, and then reports
/// it. Otherwise the peer cannot write afterwards, not even once it goes on. Meanwhile the device
/// serves other peers, and queue pairs close.
fn a_peer_process_is_stopped_during_an_access(fixture: &Fixture) {
    let mut busy = 0;
    for _ in 0..6 {
        let (peer, memory, mr) = Peer::start_writing(fixture.test_link);
        peer.process.signal(Signal::STOP);
        let other = peer.end.connect_to_itself();
        let start = Instant::now();
        let unused = mr.deregister();
        let taken = start.elapsed();
        assert!(taken < deadline(Duration::from_secs(2)), "deregistration took {taken:?}");
        match &unused {
            Ok(()) => expect_unwritten(&memory, "by a stopped peer"),
            Err(why) => assert_eq!(why.kind(), &Kind::Busy, "{why}"),
        }
        busy += u32::from(unused.is_err());
        let start = Instant::now();
        other.write_once(&peer.end);
        peer.end.qp.modify(&QpAttributes::new(State::Err)).unwrap();
        let taken = start.elapsed();
        assert!(taken < deadline(Duration::from_secs(2)), "the device stood still for {taken:?}");
        peer.process.signal(Signal::CONT);
        if unused.is_ok() {
            expect_unwritten(&memory, "by a resumed peer");
        }
    }
    println!("{busy} of 6 peers were stopped during an access");
}

/// `auto` between processes of two users: shared memory is refused, and UDP is used, in both
/// directions.
fn processes_of_two_users_connect(_: &Fixture) {
    if !rustix::process::geteuid().is_root() {
        return println!("skipped: only root can start another user's process");
    }
    for _ in 0..8 {
        let mut peer = Peer::start_as(TestLink::Auto, "", Some(OTHER_USER));
        let memory = HostMemory::new(LEN as u64).unwrap();
        let end = &peer.end;
        let mr = end.context.register(&end.pd, memory, Access::ALL).unwrap();
        let at = mr.remote(0);
        // Packets, so no direct access is waited for.
        peer.write_to(TestLink::AutoPackets, at);
        let path = peer.end.qp.path().unwrap();
        assert_eq!(path.kind, LinkKind::Udp, "{path}");
        assert_eq!(peer.end.context.stats().unwrap().direct.by_peers, 0);
    }
}

impl Endpoint {
    /// A second connection of this device, to itself.
    fn connect_to_itself(&self) -> SelfConnection {
        let make = || {
            let options = QpOptions::default().with_timeout(18);
            self.context.create_qp(&self.pd, &self.cq, &self.cq, options).unwrap()
        };
        let qps = [make(), make()];
        qps[0].connect(&qps[1].endpoint()).unwrap();
        qps[1].connect(&qps[0].endpoint()).unwrap();
        let memory = HostMemory::new(8192).unwrap();
        let mr = self.context.register(&self.pd, memory, Access::ALL).unwrap();
        SelfConnection { qps, mr }
    }
}

/// Two queue pairs of one device, connected to each other.
struct SelfConnection {
    qps: [Qp; 2],
    mr: Mr,
}

impl SelfConnection {
    fn write_once(&self, end: &Endpoint) {
        let data = [self.mr.sge(0, 4096)];
        let write = SendRequest::new(7, WrOp::Write(self.mr.remote(4096))).with(&data);
        self.qps[0].post_send(&[write]).unwrap();
        let done = end.cq.wait_next(test_timeout()).unwrap().expect("a completion");
        assert!(done.is_success() && done.id == 7, "{done:?}");
    }
}

/// In the child process: begins an access to rows 0 and 1 of the owner's export table, prints
/// `inside`, and ends the access at the next line of its stdin.
fn begin_access(owner: SocketAddr) {
    let mut link = Shm::bind("127.0.0.1:0".parse().unwrap(), ShmOptions::default()).unwrap();
    link.install_exports(&exports::ExportTable::new(Box::new(|_| Vec::new())).unwrap()).unwrap();
    let flow = link.open(owner, 0).unwrap();
    let peer = link.direct_peer(flow).unwrap();
    while peer.row(0).is_none() || peer.row(1).is_none() {
        link.receive(&mut |_| ()).unwrap();
    }
    let generations = [0, 1].map(|row| peer.generation(row));
    assert!(
        peer.begin_access([0, 1], [generations[0], generations[1] + 1], 8).is_none(),
        "a stale generation was accepted"
    );
    let access = peer.begin_access([0, 1], generations, 8).expect("access to two open rows");
    print_line("inside");
    let _ = std::io::stdin().read_line(&mut String::new());
    drop(access);
    print_line("outside");
    let _ = std::io::stdin().read_line(&mut String::new());
}

/// After a row was closed, the wait for an importer's access lasts while that process lives,
/// stopped or not, and no longer.
fn revocation_waits_for_a_live_importer(_: &Fixture) {
    for killed in [true, false] {
        let mut link = Shm::bind("127.0.0.1:0".parse().unwrap(), ShmOptions::default()).unwrap();
        let table = exports::ExportTable::new(Box::new(|_| Vec::new())).unwrap();
        link.install_exports(&table).unwrap();
        for row in 0..3 {
            assert!(table.open(row, &[row as u64; 7]));
        }
        let mut child = start(&format!("import {}", link.local()), None);
        while table.importers() == 0 {
            link.receive(&mut |_| ()).unwrap();
        }
        assert_eq!(child.next_line(), "inside");
        table.close(2);
        assert!(table.wait_until_unused(2, test_timeout()), "there is no access to this row");
        child.signal(Signal::STOP);
        std::thread::scope(|scope| {
            let (reporter, reported) = mpsc::channel();
            let owner = &table;
            scope.spawn(move || {
                owner.close(1);
                assert!(owner.wait_until_unused(1, test_timeout()));
                reporter.send(()).unwrap();
            });
            writeln!(child.input, "go").unwrap();
            assert!(
                reported.recv_timeout(Duration::from_millis(100)).is_err(),
                "the access has not ended"
            );
            child.signal(if killed { Signal::KILL } else { Signal::CONT });
            reported.recv_timeout(test_timeout()).expect("the access has ended");
        });
        assert_eq!(table.access_counts(), if killed { [0, 0] } else { [1, 8] });
        drop(child);
        // Its slot is freed once its end is noticed, but its access counts are kept.
        let start = Instant::now();
        while table.importers() > 0 {
            link.receive(&mut |_| ()).unwrap();
            assert!(start.elapsed() < test_timeout());
        }
        assert_eq!(table.access_counts()[0], u64::from(!killed));
    }
}

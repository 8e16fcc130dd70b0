//! Peers in other processes: killed, stopped, idle.
//!
//! The peer process is this same binary in the role of a peer. It exits when the bootstrap
//! connection to its parent closes, so that none is left behind.

use std::net::TcpListener;
use std::process::Stdio;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde::{Deserialize, Serialize};
use warpwire::verbs::bootstrap::Bootstrap;
use warpwire::verbs::{
    Completion, ProgressMode, Qp, QpAttributes, QpEndpoint, QpOptions, Remote, SendRequest, State,
    Status, WrOp,
};

use crate::verbs::fixture::{Endpoint, Fixture, TestBuffer, TestLink, TestQp, same, test_timeout};
use testkit::{Process, Role, cases, cpu_share, deadline};

cases!(Fixture; CASES:
    a_process_that_is_killed,
    a_process_that_is_killed_while_it_writes,
    a_process_that_is_stopped,
    a_process_that_pauses_for_three_seconds,
    idle_processes_sleep,
);

/// Bytes of memory that a peer registers.
const LEN: u64 = 4 << 20;
/// Queue pairs of a peer.
const PAIRS: usize = 2;

/// Sent by the peer: its queue pairs, and the address and rkey of its memory.
#[derive(Serialize, Deserialize)]
struct PeerInfo {
    endpoints: Vec<QpEndpoint>,
    memory: (u64, u32),
}

/// Sent to the peer.
#[derive(Serialize, Deserialize)]
struct Task {
    endpoints: Vec<QpEndpoint>,
    /// Address and rkey of memory to write to in a loop.
    write_to: Option<(u64, u32)>,
    /// Whether a thread waits for a completion during the whole test.
    waits: bool,
}

/// 268 ms per retry: enough for a busy machine.
fn options() -> QpOptions {
    QpOptions::default().with_timeout(16).with_retry_count(7)
}

/// Fails about a second after the peer stops responding.
fn few_retries() -> QpOptions {
    QpOptions::default().with_timeout(16).with_retry_count(3)
}

/// The peer process. Arguments: name of the link, port of the bootstrap connection, and `polled` or
/// `rung` for its doorbells.
pub fn run_role(words: &str) {
    let [name, port, poll_doorbell] = words.split(' ').collect::<Vec<_>>().try_into().unwrap();
    let poll_doorbell = poll_doorbell == "polled";
    let test_link = TestLink::LINKS.into_iter().find(|(_, known)| *known == name).unwrap().0;
    let mut parent =
        Bootstrap::connect(("127.0.0.1", port.parse::<u16>().unwrap()), test_timeout()).unwrap();
    let link = test_link.links(1).unwrap().remove(0);
    let progress_mode = match poll_doorbell {
        false => ProgressMode::Auto,
        true => ProgressMode::Thread { spin: Duration::from_micros(50), core: None },
    };
    let end = Endpoint::open(link, test_link.options(progress_mode));
    let memory = Fixture::new(test_link).host(&end, LEN);
    let test_qps: Vec<_> =
        (0..PAIRS).map(|_| test_qp(&end, options().with_poll_doorbell(poll_doorbell))).collect();
    let endpoints = test_qps.iter().map(|test_qp| test_qp.qp.endpoint()).collect();
    let at = memory.mr.remote(0);
    parent.send(&PeerInfo { endpoints, memory: (at.address, at.rkey) }).unwrap();
    let task: Task = parent.recv().unwrap();
    for (test_qp, endpoint) in test_qps.iter().zip(&task.endpoints) {
        test_qp.qp.connect(endpoint).unwrap();
    }
    parent.send(&true).unwrap();
    if let Some((address, rkey)) = task.write_to {
        let data = [memory.mr.sge(0, LEN as u32)];
        loop {
            let write = SendRequest::new(1, WrOp::Write(Remote { address, rkey })).with(&data);
            test_qps[0].qp.post_send(&[write]).unwrap();
            if !test_qps[0]
                .sends
                .wait_next(test_timeout())
                .unwrap()
                .is_some_and(|done| done.is_success())
            {
                return;
            }
        }
    }
    if task.waits {
        let cq = test_qps[1].receives.clone();
        std::thread::spawn(move || cq.wait_next(Duration::from_secs(600)));
    }
    // Until the parent closes the connection or dies.
    while parent.recv::<bool>().is_ok() {}
}

fn test_qp(end: &Endpoint, options: QpOptions) -> TestQp {
    let entries = 2 * options.send_depth;
    let [sends, receives] = [0; 2].map(|_| end.context.create_cq(entries).unwrap());
    let qp = end.context.create_qp(&end.pd, &sends, &receives, options).unwrap();
    TestQp { qp, sends, receives }
}

/// A peer process and what it reported.
struct Peer {
    process: Process,
    bootstrap: Bootstrap,
    peer_info: PeerInfo,
}

impl Peer {
    fn start(test_link: TestLink) -> Self {
        Self::start_with(test_link, "rung")
    }

    fn start_with(test_link: TestLink, doorbells: &str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let name = TestLink::LINKS.into_iter().find(|(known, _)| *known == test_link).unwrap().1;
        let port = listener.local_addr().unwrap().port();
        let role = Role::new("verbs", format!("peer {name} {port} {doorbells}"));
        let process = Process::start(role.command().stdin(Stdio::null()));
        let mut bootstrap = Bootstrap::accept(&listener, test_timeout()).unwrap();
        let peer_info = bootstrap.recv().unwrap();
        Self { process, bootstrap, peer_info }
    }

    /// Sends the peer its task, and waits until its queue pairs are connected.
    fn task(&mut self, endpoints: Vec<QpEndpoint>, write_to: Option<Remote>, waits: bool) {
        let write_to = write_to.map(|at| (at.address, at.rkey));
        self.bootstrap.send(&Task { endpoints, write_to, waits }).unwrap();
        assert!(self.bootstrap.recv::<bool>().unwrap());
    }

    /// Connects `pairs` to the peer's queue pairs, in order.
    fn join(&mut self, pairs: &[&Qp], write_to: Option<Remote>) {
        self.task(pairs.iter().map(|qp| qp.endpoint()).collect(), write_to, false);
        for (qp, endpoint) in pairs.iter().zip(&self.peer_info.endpoints) {
            qp.connect(endpoint).unwrap();
        }
    }

    fn at(&self, offset: u64) -> Remote {
        let (address, rkey) = self.peer_info.memory;
        Remote { address: address + offset, rkey }
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.process.child), signal).unwrap();
    }
}

fn next(test_qp: &TestQp) -> Completion {
    test_qp.sends.wait_next(test_timeout()).unwrap().expect("a completion")
}

/// Writes to the peer's memory, reads it back and compares.
fn write_and_read_back(test_qp: &TestQp, peer: &Peer, near: &TestBuffer, seed: u64) {
    let len = 100_000;
    let wanted = near.pattern(0, len, seed);
    near.write(1 << 20, &vec![0; len]);
    let (from, back) = ([near.mr.sge(0, len as u32)], [near.mr.sge(1 << 20, len as u32)]);
    let write = SendRequest::new(1, WrOp::Write(peer.at(64))).with(&from);
    let read = SendRequest::new(2, WrOp::Read(peer.at(64))).with(&back);
    test_qp.qp.post_send(&[write, read]).unwrap();
    for id in 1..=2 {
        let done = next(test_qp);
        assert_eq!((done.id, done.status), (id, Status::Success), "{:?}", test_qp.qp.stats());
    }
    same(&near.read(1 << 20, len), &wanted, "data read back");
}

/// The local end; the other ends are processes.
struct LocalSetup {
    end: Endpoint,
    near: TestBuffer,
}

impl LocalSetup {
    fn new(fixture: &Fixture) -> Self {
        let link = fixture.test_link.links(1).unwrap().remove(0);
        let end = Endpoint::open(link, fixture.test_link.options(ProgressMode::Auto));
        let near = fixture.host(&end, LEN);
        Self { end, near }
    }
}

/// Requests to a killed peer fail in time, those to other peers succeed, and a restarted peer
/// works.
fn a_process_that_is_killed(fixture: &Fixture) {
    let LocalSetup { end, near } = LocalSetup::new(fixture);
    let mut survivor = Peer::start(fixture.test_link);
    let other = test_qp(&end, options());
    survivor.join(&[&other.qp], None);
    let pairs = [test_qp(&end, few_retries()), test_qp(&end, few_retries())];
    let big = fixture.host(&end, LEN);
    for round in 0..2 {
        let mut doomed = Peer::start(fixture.test_link);
        doomed.join(&[&pairs[0].qp, &pairs[1].qp], None);
        write_and_read_back(&pairs[0], &doomed, &near, round);
        write_and_read_back(&pairs[1], &doomed, &near, round + 10);
        let data = [big.mr.sge(0, LEN as u32)];
        for (n, test_qp) in pairs.iter().enumerate() {
            let op = [WrOp::Write(doomed.at(0)), WrOp::Read(doomed.at(0))][n];
            let many: Vec<_> = (0..20).map(|id| SendRequest::new(id, op).with(&data)).collect();
            test_qp.qp.post_send(&many).unwrap();
        }
        let first = next(&pairs[0]);
        assert_eq!((first.id, first.status), (0, Status::Success));
        doomed.signal(Signal::KILL);
        write_and_read_back(&other, &survivor, &near, 7);
        for (n, test_qp) in pairs.iter().enumerate() {
            let op = [WrOp::Write(doomed.at(0)), WrOp::Read(doomed.at(0))][n];
            expect_one_failure(test_qp, 1 - n as u64, || {
                test_qp.qp.post_send(&[SendRequest::new(99, op).with(&data)]).unwrap();
            });
            test_qp.qp.modify(&QpAttributes::new(State::Reset)).unwrap();
        }
        write_and_read_back(&other, &survivor, &near, 8);
    }
}

/// Work up to id 19 completes: some with success, one with `RetryExceeded`, the rest flushed. With
/// direct access all of it may have been done before the peer's death is noticed; then `more` is
/// posted until one fails.
fn expect_one_failure(test_qp: &TestQp, from: u64, more: impl Fn()) {
    let mut ends: Vec<_> = (from..20).map(|id| (id, next(test_qp))).collect();
    assert!(ends.iter().all(|(id, done)| done.id == *id), "out of order: {ends:?}");
    let start = Instant::now();
    while ends.iter().all(|(_, done)| done.is_success()) {
        assert!(start.elapsed() < test_timeout(), "no request fails");
        more();
        ends = vec![(99, next(test_qp))];
    }
    let first_ok = ends.iter().take_while(|(_, done)| done.is_success()).count();
    let failed: Vec<_> = ends[first_ok..].iter().map(|(_, done)| done.status).collect();
    assert_eq!(failed.first(), Some(&Status::RetryExceeded), "{ends:?}");
    assert!(failed[1..].iter().all(|status| *status == Status::Flushed), "{ends:?}");
}

/// A responder is not affected by its peer's death, and its queue pair can be connected to another
/// peer.
fn a_process_that_is_killed_while_it_writes(fixture: &Fixture) {
    let LocalSetup { end, near } = LocalSetup::new(fixture);
    let target = fixture.host(&end, LEN);
    let ours = test_qp(&end, options());
    let mut doomed = Peer::start(fixture.test_link);
    doomed.join(&[&ours.qp], Some(target.mr.remote(0)));
    let start = Instant::now();
    // Bytes by packets, and by direct access.
    let bytes_received_so_far = || {
        ours.qp.stats().unwrap().bytes_received + end.context.stats().unwrap().direct.bytes_by_peers
    };
    while bytes_received_so_far() < 2 * LEN {
        assert!(start.elapsed() < test_timeout(), "{:?}", ours.qp.stats());
        std::thread::sleep(Duration::from_millis(1));
    }
    drop(doomed);
    assert_eq!(ours.qp.state().unwrap(), State::Rts);
    let mut peer = Peer::start(fixture.test_link);
    ours.qp.modify(&QpAttributes::new(State::Reset)).unwrap();
    peer.join(&[&ours.qp], None);
    write_and_read_back(&ours, &peer, &near, 3);
}

/// A stop shorter than the retries loses nothing and does not delay other peers.
fn a_process_that_is_stopped(fixture: &Fixture) {
    let LocalSetup { end, near } = LocalSetup::new(fixture);
    let (mut slow, mut other) = (Peer::start(fixture.test_link), Peer::start(fixture.test_link));
    let pairs = [test_qp(&end, options().with_timeout(17)), test_qp(&end, options())];
    slow.join(&[&pairs[0].qp], None);
    other.join(&[&pairs[1].qp], None);
    let big = fixture.host(&end, LEN);
    for round in 0..2u64 {
        let wanted = big.pattern(0, LEN as usize, 50 + round);
        let data = [big.mr.sge(0, LEN as u32)];
        let writes: Vec<_> =
            (0..16).map(|id| SendRequest::new(id, WrOp::Write(slow.at(0))).with(&data)).collect();
        pairs[0].qp.post_send(&writes).unwrap();
        let mut done = vec![next(&pairs[0])];
        slow.signal(Signal::STOP);
        let stopped = Instant::now();
        for n in 0..5 {
            write_and_read_back(&pairs[1], &other, &near, n);
        }
        assert!(
            stopped.elapsed() < deadline(Duration::from_millis(1500)),
            "a stopped peer delayed the others"
        );
        std::thread::sleep(Duration::from_millis(300).saturating_sub(stopped.elapsed()));
        slow.signal(Signal::CONT);
        done.extend((1..16).map(|_| next(&pairs[0])));
        for (id, done) in (0..).zip(&done) {
            assert_eq!((done.id, done.status), (id, Status::Success), "{:?}", pairs[0].qp.stats());
        }
        big.write(0, &vec![0; LEN as usize]);
        pairs[0].qp.post_send(&[SendRequest::new(99, WrOp::Read(slow.at(0))).with(&data)]).unwrap();
        assert!(next(&pairs[0]).is_success());
        same(&big.read(0, LEN as usize), &wanted, "data written across a stop");
    }
}

/// With default options a peer may pause for three seconds, in the middle of a transfer; the engine
/// sleeps meanwhile, though the peer takes no packets.
fn a_process_that_pauses_for_three_seconds(fixture: &Fixture) {
    let LocalSetup { end, .. } = LocalSetup::new(fixture);
    let mut peer = Peer::start(fixture.test_link);
    let ours = test_qp(&end, QpOptions::default());
    peer.join(&[&ours.qp], None);
    let big = fixture.host(&end, LEN);
    let wanted = big.pattern(0, LEN as usize, 77);
    let data = [big.mr.sge(0, LEN as u32)];
    let writes: Vec<_> =
        (0..16).map(|id| SendRequest::new(id, WrOp::Write(peer.at(0))).with(&data)).collect();
    ours.qp.post_send(&writes).unwrap();
    let mut done = vec![next(&ours)];
    let steps = || end.context.soft().unwrap().stats().steps;
    peer.signal(Signal::STOP);
    let before = steps();
    std::thread::sleep(Duration::from_secs(3));
    let steps = steps() - before;
    peer.signal(Signal::CONT);
    // Without a pause it makes some hundred thousand each second.
    assert!(steps < 20_000, "{steps} steps while the peer was stopped");
    done.extend((1..16).map(|_| next(&ours)));
    for (id, done) in (0..).zip(&done) {
        assert_eq!((done.id, done.status), (id, Status::Success), "{:?}", ours.qp.stats());
    }
    big.write(0, &vec![0; LEN as usize]);
    ours.qp.post_send(&[SendRequest::new(99, WrOp::Read(peer.at(0))).with(&data)]).unwrap();
    assert!(next(&ours).is_success());
    same(&big.read(0, LEN as usize), &wanted, "data written across a pause");
}

/// Connected, idle processes use less than 1 % of a core each: with and without a thread that waits
/// for a message, and with polled doorbells, whose writers cannot wake a thread.
fn idle_processes_sleep(fixture: &Fixture) {
    let mut peers = [
        Peer::start(fixture.test_link),
        Peer::start(fixture.test_link),
        Peer::start_with(fixture.test_link, "polled"),
        Peer::start_with(fixture.test_link, "polled"),
    ];
    let endpoints = [1, 0, 3, 2].map(|other: usize| peers[other].peer_info.endpoints.clone());
    for ((peer, endpoints), waits) in
        peers.iter_mut().zip(endpoints).zip([true, false, true, false])
    {
        peer.task(endpoints, None, waits);
    }
    std::thread::sleep(Duration::from_millis(500));
    let naps = std::thread::spawn(|| cpu_share_of_naps(Duration::from_secs(4)));
    let shares =
        cpu_share(peers.each_ref().map(|peer| peer.process.child.id()), Duration::from_secs(4));
    let reference = naps.join().unwrap();
    println!("idle CPU use, as a fraction of a core: {shares:.5?}, of naps {reference:.5}");
    // On a machine whose CPUs are shared with others, every wake-up is charged more.
    let limit = f64::max(0.01, 6.0 * reference);
    assert!(shares.iter().all(|share| *share < limit), "{shares:.5?}, of naps {reference:.5}");
}

/// The fraction of a core that a thread uses that wakes up every 4 ms, as often as an idle engine.
fn cpu_share_of_naps(time: Duration) -> f64 {
    let start = Instant::now();
    while start.elapsed() < time {
        std::thread::sleep(Duration::from_millis(4));
    }
    let on_cpu = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    let on_cpu = on_cpu.split(' ').next().and_then(|nanoseconds| nanoseconds.parse().ok());
    Duration::from_nanos(on_cpu.unwrap_or(0)).as_secs_f64() / start.elapsed().as_secs_f64()
}

//! Requests that tasks await, and the communicator's descriptor in event loops. Every executor
//! counts how often it polls: nothing is polled in a loop.

use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use testkit::cases;
use warpwire::error::Kind;
use warpwire::msg::{Buffer, Comm, CommOptions, Outcome, Request};

use crate::msg::fixture::{
    Fixture, MemoryKind, SHORT_WAIT, buffer, pattern, read, same, test_timeout,
};

cases!(Fixture; CASES:
    several_requests_at_once,
    late_messages_cost_few_polls,
    dropped_awaits_lose_nothing,
    tasks_beside_threads,
    an_event_loop,
    credits_are_returned_to_tasks,
);
cases!(Fixture; ONCE:
    a_loss_ends_an_await,
    a_rank_that_leaves_ends_its_own,
    a_waker_may_drop_requests,
    a_waker_may_drop_the_communicator,
    dropped_awaits_free_their_entries,
    an_event_loop_beside_threads,
    an_event_loop_sees_a_loss,
);

/// Unparks the thread that runs a task.
struct Unpark {
    thread: Thread,
    woken: AtomicBool,
}

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.woken.store(true, Ordering::SeqCst);
        self.thread.unpark();
    }
}

/// Runs a future on this thread; `None` after `timeout`. Also returns how often it was polled.
pub fn run<F: Future + Unpin>(mut future: F, timeout: Duration) -> (Option<F::Output>, u32) {
    let woken = AtomicBool::new(true);
    let unpark = Arc::new(Unpark { thread: std::thread::current(), woken });
    let waker = Waker::from(unpark.clone());
    let (start, mut polls) = (Instant::now(), 0);
    loop {
        if unpark.woken.swap(false, Ordering::SeqCst) {
            polls += 1;
            if let Poll::Ready(output) =
                Pin::new(&mut future).poll(&mut Context::from_waker(&waker))
            {
                return (Some(output), polls);
            }
        }
        let Some(left) = timeout.checked_sub(start.elapsed()) else { return (None, polls) };
        if !unpark.woken.load(Ordering::SeqCst) {
            std::thread::park_timeout(left);
        }
    }
}

/// Waits for all of its requests; polls each that has not ended, as one task does.
struct All(Vec<Option<Request>>, Vec<Outcome>);

impl All {
    fn new(requests: impl IntoIterator<Item = Request>) -> Self {
        Self(requests.into_iter().map(Some).collect(), Vec::new())
    }
}

impl Future for All {
    type Output = warpwire::Result<usize>;

    fn poll(mut self: Pin<&mut Self>, task: &mut Context<'_>) -> Poll<Self::Output> {
        let Self(requests, outcomes) = &mut *self;
        for slot in requests {
            let Some(request) = slot else { continue };
            if let Poll::Ready(outcome) = Pin::new(request).poll(task) {
                *slot = None;
                outcomes.push(outcome?);
            }
        }
        match self.0.iter().all(Option::is_none) {
            true => Poll::Ready(Ok(self.1.len())),
            false => Poll::Pending,
        }
    }
}

/// Eager messages, and such that the receiver reads.
const SIZES: [usize; 6] = [0, 1, 8192, 8193, 100_000, (8 << 20) + 3];

fn several_requests_at_once(fixture: &Fixture) {
    fixture.ranks(2, |comm| {
        let other = 1 - comm.rank();
        for round in 0..4_usize {
            let seed = |rank: usize, tag: usize| (rank * 1000 + round * 10 + tag) as u64;
            let (mut requests, mut targets) = (Vec::new(), Vec::new());
            for (tag, size) in SIZES.into_iter().enumerate() {
                let kind = [MemoryKind::Host, MemoryKind::Device][round % 2];
                let [out, into] =
                    [0, 64].map(|more| buffer(&comm, kind, size.max(1) as u64 + more));
                out.write(0, &pattern(seed(comm.rank(), tag), size)).unwrap();
                requests.push(comm.irecv(other, tag as u32, &into).unwrap());
                let slice = out.slice(0, size as u64).unwrap();
                requests.push(comm.isend(other, tag as u32, slice).unwrap());
                targets.push(into);
            }
            let count = requests.len();
            let (ended, polls) = run(All::new(requests), test_timeout());
            assert_eq!(ended.expect("in time").unwrap(), count);
            // One to start, and at most one for each that ends.
            assert!(polls as usize <= count + 1, "{polls} polls for {count} requests");
            for (tag, (size, into)) in SIZES.into_iter().zip(&targets).enumerate() {
                same(&read(into, 0, size), &pattern(seed(other, tag), size), "an awaited message");
            }
        }
        comm.finish(test_timeout()).unwrap();
    });
}

fn late_messages_cost_few_polls(fixture: &Fixture) {
    fixture.ranks(2, |comm| {
        let memory = comm.alloc(20_000).unwrap();
        for len in [8, 20_000] {
            comm.barrier(test_timeout()).unwrap();
            if comm.rank() == 0 {
                let mut receive = comm.irecv(1, 7, &memory).unwrap();
                // Given up, and awaited again: the request stays.
                let (ended, polls) = run(&mut receive, SHORT_WAIT);
                assert!(ended.is_none() && polls == 1, "{ended:?} after {polls} polls");
                comm.send(1, 8, memory.slice(0, 1).unwrap(), test_timeout()).unwrap();
                let (ended, polls) = run(&mut receive, test_timeout());
                assert_eq!(ended.expect("in time").unwrap().len, len);
                assert!(polls <= 2, "{polls} polls for one message");
                // It stays ended.
                let (again, polls) = run(&mut receive, test_timeout());
                assert_eq!((again.unwrap().unwrap().len, polls), (len, 1));
            } else {
                comm.recv(0, 8, &memory, test_timeout()).unwrap();
                std::thread::sleep(SHORT_WAIT);
                let send = comm.isend(0, 7, memory.slice(0, len).unwrap()).unwrap();
                run(send, test_timeout()).0.expect("in time").unwrap();
            }
        }
        comm.finish(test_timeout()).unwrap();
    });
}

/// A receive that is dropped before a message was matched takes none, and nothing is written to its
/// memory; one that is dropped later has taken its message.
fn dropped_awaits_lose_nothing(fixture: &Fixture) {
    fixture.ranks(2, |comm| {
        for (round, len) in [8_u64, 200_000].into_iter().enumerate() {
            let sent = pattern(round as u64, len as usize);
            let memory = comm.alloc(len).unwrap();
            if comm.rank() == 0 {
                let dropped = comm.alloc(len).unwrap();
                dropped.write(0, &vec![0xee; len as usize]).unwrap();
                let (ended, _) = run(comm.irecv(1, 7, &dropped).unwrap(), SHORT_WAIT);
                assert!(ended.is_none(), "{ended:?} before a message was sent");
                comm.barrier(test_timeout()).unwrap();
                let (ended, _) = run(comm.irecv(1, 7, &memory).unwrap(), test_timeout());
                assert_eq!(ended.expect("in time").unwrap().len, len);
                same(&read(&memory, 0, len as usize), &sent, "after a dropped receive");
                same(&read(&dropped, 0, len as usize), &vec![0xee; len as usize], "dropped");
            } else {
                memory.write(0, &sent).unwrap();
                comm.barrier(test_timeout()).unwrap();
                comm.send(0, 7, &memory, test_timeout()).unwrap();
            }
        }
        // A message that was matched: the receive is dropped as soon as its task was polled once.
        // The sender is served whatever happens, and the next message comes after it.
        for round in 0..10_u64 {
            let memory = comm.alloc(1 << 20).unwrap();
            memory.write(0, &pattern(round, 1 << 20)).unwrap();
            comm.barrier(test_timeout()).unwrap();
            if comm.rank() == 1 {
                let mut send = comm.isend(0, 1, &memory).unwrap();
                comm.send(0, 2, memory.slice(0, 8).unwrap(), test_timeout()).unwrap();
                run(&mut send, test_timeout()).0.expect("in time").unwrap();
            } else {
                // The short message is behind the long one, so that is here.
                comm.recv(1, 2, &memory, test_timeout()).unwrap();
                let target = comm.alloc(1 << 20).unwrap();
                drop(run(comm.irecv(1, 1, &target).unwrap(), Duration::ZERO));
                drop(target);
            }
            comm.barrier(test_timeout()).unwrap();
        }
        comm.finish(test_timeout()).unwrap();
    });
}

/// A thread that waits, and one that tests, take completions of requests that tasks await.
fn tasks_beside_threads(fixture: &Fixture) {
    fixture.ranks(2, |comm| {
        let other = 1 - comm.rank();
        let exchange = |tag: u32, wait: &(dyn Fn(Request) -> Outcome + Sync)| {
            let (out, into) = (comm.alloc(20_000).unwrap(), comm.alloc(20_000).unwrap());
            for round in 0..60_u64 {
                let len = 1 + (round * 997 + u64::from(tag)) % 20_000;
                out.write(0, &pattern(round, len as usize)).unwrap();
                let receive = comm.irecv(other, tag, &into).unwrap();
                wait(comm.isend(other, tag, out.slice(0, len).unwrap()).unwrap());
                assert_eq!(wait(receive).len, len);
                same(&read(&into, 0, len as usize), &pattern(round, len as usize), "of a task");
            }
        };
        let awaits = |request: Request| run(request, test_timeout()).0.expect("in time").unwrap();
        let waits = |mut request: Request| request.wait(test_timeout()).unwrap();
        let tests = |mut request: Request| {
            let start = Instant::now();
            loop {
                if let Some(outcome) = request.test().unwrap() {
                    return outcome;
                }
                assert!(start.elapsed() < test_timeout());
                std::thread::yield_now();
            }
        };
        std::thread::scope(|scope| {
            scope.spawn(|| exchange(0, &awaits));
            scope.spawn(|| exchange(1, &awaits));
            scope.spawn(|| exchange(2, &waits));
            scope.spawn(|| exchange(3, &tests));
        });
        comm.finish(test_timeout()).unwrap();
    });
}

/// Waits until the descriptor is readable; whether it is.
fn wait_readable(comm: &Comm, timeout: Duration) -> bool {
    let timeout =
        Timespec { tv_sec: timeout.as_secs() as i64, tv_nsec: timeout.subsec_nanos().into() };
    poll(&mut [PollFd::new(comm, PollFlags::IN)], Some(&timeout)).unwrap() == 1
}

/// Runs an event loop until all requests have ended; returns how often it went round.
fn event_loop(comm: &Comm, mut requests: Vec<Request>) -> warpwire::Result<u32> {
    for rounds in 1.. {
        comm.clear_events()?;
        let mut left = Vec::new();
        for mut request in requests {
            if request.test()?.is_none() {
                left.push(request);
            }
        }
        if left.is_empty() {
            return Ok(rounds);
        }
        requests = left;
        assert!(wait_readable(comm, test_timeout()), "nothing happens to {requests:?}");
    }
    unreachable!()
}

fn an_event_loop(fixture: &Fixture) {
    fixture.ranks(2, |comm| {
        let other = 1 - comm.rank();
        assert!(wait_readable(&comm, Duration::ZERO), "it is readable at first");
        for round in 0..4_u64 {
            let (mut requests, mut targets) = (Vec::new(), Vec::new());
            for (tag, size) in SIZES.into_iter().enumerate() {
                let (out, into) = (comm.alloc(9 << 20).unwrap(), comm.alloc(9 << 20).unwrap());
                out.write(0, &pattern(round, size)).unwrap();
                requests.push(comm.irecv(other, tag as u32, &into).unwrap());
                let slice = out.slice(0, size as u64).unwrap();
                requests.push(comm.isend(other, tag as u32, slice).unwrap());
                targets.push(into);
            }
            event_loop(&comm, requests).unwrap();
            for (size, into) in SIZES.into_iter().zip(&targets) {
                same(&read(into, 0, size), &pattern(round, size), "in an event loop");
            }
            comm.barrier(test_timeout()).unwrap();
        }
        // Nothing happens, and the loop sleeps: rank 1 sends late.
        let memory = comm.alloc(64).unwrap();
        if comm.rank() == 0 {
            let receive = comm.irecv(1, 100, &memory).unwrap();
            let rounds = event_loop(&comm, vec![receive]).unwrap();
            // Acknowledgements and credits of the barrier may come after it.
            assert!(rounds <= 8, "{rounds} rounds for one message");
        } else {
            std::thread::sleep(SHORT_WAIT * 2);
            comm.send(0, 100, &memory, test_timeout()).unwrap();
        }
        comm.finish(test_timeout()).unwrap();
    });
}

/// The receiver owes fewer credits than are returned in a message of their own, and the sender has
/// none left: they are returned because the receiver's task sleeps.
fn credits_are_returned_to_tasks(fixture: &Fixture) {
    const CREDITS: u32 = 16;
    type Receive = fn(&Comm, Request);
    let awaits: Receive = |_, request| {
        run(request, test_timeout()).0.unwrap().unwrap();
    };
    let loops: Receive = |comm, request| {
        event_loop(comm, vec![request]).unwrap();
    };
    for receive in [awaits, loops] {
        // A hub of their own: the engines of the first two may still hold their addresses.
        let options = fixture.options().with_receive_credits(CREDITS);
        fixture.ranks_with(2, &options, |comm| {
            let memory = comm.alloc(64).unwrap();
            let kept = CREDITS - 3;
            if comm.rank() == 0 {
                let tags = (0..kept).map(|_| 1).chain([2; 10]);
                let sends: Vec<Request> =
                    tags.map(|tag| comm.isend(1, tag, &memory).unwrap()).collect();
                run(All::new(sends), test_timeout()).0.expect("in time").unwrap();
            } else {
                (0..10).for_each(|_| receive(&comm, comm.irecv(0, 2, &memory).unwrap()));
                (0..kept).for_each(|_| receive(&comm, comm.irecv(0, 1, &memory).unwrap()));
            }
            comm.finish(test_timeout()).unwrap();
        });
    }
}

fn a_loss_ends_an_await(fixture: &Fixture) {
    fixture.ranks(3, |comm| {
        let memory = comm.alloc(64).unwrap();
        comm.barrier(test_timeout()).unwrap();
        if comm.rank() == 1 {
            std::thread::sleep(SHORT_WAIT);
            return comm.abort("no more memory");
        }
        let (ended, polls) = run(comm.irecv(1, 0, &memory).unwrap(), test_timeout());
        let error = ended.expect("in time").unwrap_err();
        assert_eq!(error.kind(), &Kind::PeerLost);
        assert!(error.to_string().contains("rank 1 aborted: no more memory"), "{error}");
        assert!(polls <= 3, "{polls} polls for one loss");
        // The others go on.
        let other = 2 - comm.rank();
        let receive = comm.irecv(other, 0, &memory).unwrap();
        let send = comm.isend(other, 0, &memory).unwrap();
        assert_eq!(run(All::new([receive, send]), test_timeout()).0.unwrap().unwrap(), 2);
        let unfinished = comm.finish(test_timeout()).unwrap_err();
        assert!(unfinished.to_string().contains("rank 1"), "{unfinished}");
    });
}

fn a_rank_that_leaves_ends_its_own(fixture: &Fixture) {
    let ranks = Comm::local_with(2, &fixture.options()).unwrap();
    let memory: Vec<Buffer> = ranks.iter().map(|comm| comm.alloc(64).unwrap()).collect();
    let receives: Vec<Request> =
        (0..2).map(|from| ranks[0].irecv(from, 0, &memory[0]).unwrap()).collect();
    let awaits = std::thread::spawn(move || {
        let ended = receives.into_iter().map(|request| run(request, test_timeout()).0);
        ended.map(|ended| ended.expect("in time").unwrap_err()).collect::<Vec<_>>()
    });
    std::thread::sleep(SHORT_WAIT);
    drop(ranks);
    for error in awaits.join().unwrap() {
        let why = error.to_string();
        assert!(why.contains("left"), "{why}");
    }
}

/// Drops a request when it is woken, and one when it is dropped.
struct DropRequests {
    when_woken: Mutex<Option<Request>>,
    _when_dropped: Request,
}

impl Wake for DropRequests {
    fn wake(self: Arc<Self>) {
        drop(self.when_woken.lock().unwrap().take());
    }
}

fn a_waker_may_drop_requests(fixture: &Fixture) {
    fixture.ranks(2, |comm| {
        let memory = comm.alloc(64).unwrap();
        let receive = |tag: u32| comm.irecv(1 - comm.rank(), tag, &memory).unwrap();
        let wakers = |tag: u32| {
            let when_woken = Mutex::new(Some(receive(tag)));
            Arc::new(DropRequests { when_woken, _when_dropped: receive(tag + 1) })
        };
        let poll_once = |request: &mut Request, owner: Arc<DropRequests>| {
            let waker = Waker::from(owner);
            assert!(Pin::new(request).poll(&mut Context::from_waker(&waker)).is_pending());
        };
        let (mut woken, mut replaced, mut dropped) = (receive(0), receive(50), receive(60));
        poll_once(&mut woken, wakers(10));
        poll_once(&mut replaced, wakers(20));
        poll_once(&mut replaced, wakers(30));
        poll_once(&mut dropped, wakers(40));
        drop(dropped);
        comm.barrier(test_timeout()).unwrap();
        comm.send(1 - comm.rank(), 0, &memory, test_timeout()).unwrap();
        assert_eq!(woken.wait(test_timeout()).unwrap().len, 64);
        drop(replaced);
        comm.finish(test_timeout()).unwrap();
    });
}

/// Owns the last handle of a communicator until it is woken.
struct DropComm(Mutex<Option<Comm>>, Thread);

impl Wake for DropComm {
    fn wake(self: Arc<Self>) {
        drop(self.0.lock().unwrap().take());
        self.1.unpark();
    }
}

/// The thread that wakes the task is the communicator's own, which dropping it would join.
fn a_waker_may_drop_the_communicator(fixture: &Fixture) {
    let mut ranks = Comm::local_with(2, &fixture.options()).unwrap();
    let (peer, comm) = (ranks.remove(1), ranks.remove(0));
    let (memory, theirs) = (comm.alloc(64).unwrap(), peer.alloc(64).unwrap());
    let mut request = comm.irecv(1, 0, &memory).unwrap();
    let owner = Arc::new(DropComm(Mutex::new(Some(comm)), std::thread::current()));
    let waker = Waker::from(owner.clone());
    assert!(Pin::new(&mut request).poll(&mut Context::from_waker(&waker)).is_pending());
    peer.send(0, 0, &theirs, test_timeout()).unwrap();
    let start = Instant::now();
    while owner.0.lock().unwrap().is_some() && start.elapsed() < test_timeout() {
        std::thread::park_timeout(SHORT_WAIT);
    }
    assert!(owner.0.lock().unwrap().is_none(), "it was woken");
    assert_eq!(request.wait(Duration::ZERO).unwrap().len, 64);
    let left = peer.recv(0, 0, &theirs, test_timeout()).unwrap_err();
    assert!(left.to_string().contains("has left"), "{left}");
}

fn dropped_awaits_free_their_entries(fixture: &Fixture) {
    let options = CommOptions::with_max_requests(fixture.options(), 8);
    fixture.ranks_with(2, &options, |comm| {
        let memory = comm.alloc(64).unwrap();
        for _ in 0..100 {
            let receives = (0..4).map(|tag| comm.irecv(1 - comm.rank(), tag, &memory).unwrap());
            let (ended, polls) = run(All::new(receives), Duration::ZERO);
            assert!(ended.is_none() && polls == 1);
        }
        // A rank that left earlier would end the other's receives.
        comm.barrier(test_timeout()).unwrap();
        comm.finish(test_timeout()).unwrap();
    });
}

fn an_event_loop_beside_threads(fixture: &Fixture) {
    fixture.ranks(2, |comm| {
        let other = 1 - comm.rank();
        let exchange = |tag: u32, wait: &(dyn Fn(Request) + Sync)| {
            let (out, into) = (comm.alloc(20_000).unwrap(), comm.alloc(20_000).unwrap());
            for round in 0..100_u64 {
                let len = 1 + (round * 997 + u64::from(tag)) % 20_000;
                let receive = comm.irecv(other, tag, &into).unwrap();
                wait(comm.isend(other, tag, out.slice(0, len).unwrap()).unwrap());
                wait(receive);
            }
        };
        std::thread::scope(|scope| {
            scope.spawn(|| {
                exchange(0, &|request| {
                    event_loop(&comm, vec![request]).unwrap();
                });
            });
            scope.spawn(|| {
                exchange(1, &|mut request| {
                    request.wait(test_timeout()).unwrap();
                });
            });
            scope.spawn(|| {
                exchange(2, &|request| {
                    run(request, test_timeout()).0.expect("in time").unwrap();
                });
            });
        });
        comm.finish(test_timeout()).unwrap();
    });
}

fn an_event_loop_sees_a_loss(fixture: &Fixture) {
    fixture.ranks(2, |comm| {
        let memory = comm.alloc(64).unwrap();
        comm.barrier(test_timeout()).unwrap();
        if comm.rank() == 1 {
            std::thread::sleep(SHORT_WAIT);
            return comm.abort("no more memory");
        }
        let error = event_loop(&comm, vec![comm.irecv(1, 0, &memory).unwrap()]).unwrap_err();
        assert_eq!(error.kind(), &Kind::PeerLost, "{error}");
    });
}

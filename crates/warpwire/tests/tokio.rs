//! Tasks of tokio that wait for completions, requests and notifications.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::task::Poll;
use std::time::{Duration, Instant};

use ::tokio::runtime::{Builder, Runtime};
use ::tokio::time::timeout;
use warpwire::agent::{Agent, AgentOptions};
use warpwire::error::Kind;
use warpwire::link::Hub;
use warpwire::msg::Comm;
use warpwire::tokio::{AsyncAgent, AsyncComm, AsyncCq};
use warpwire::verbs::{
    Completion, Context, HcaOptions, PostError, ProgressMode, Qp, QpOptions, SendRequest, WrOp,
};

const LIMIT: Duration = Duration::from_secs(30);
const SHORT_WAIT: Duration = Duration::from_millis(50);

fn runtime() -> Runtime {
    Builder::new_current_thread().enable_all().build().unwrap()
}

/// Runs a future, and counts how often it is polled.
async fn count_polls<F: Future>(future: F) -> (F::Output, u32) {
    let (mut future, mut polls) = (pin!(future), 0);
    let output = poll_fn(|task| {
        polls += 1;
        future.as_mut().poll(task)
    });
    let output = timeout(LIMIT, output).await.expect("in time");
    (output, polls)
}

/// A queue pair that is connected to itself.
fn loopback(options: HcaOptions) -> (Context, Qp, warpwire::verbs::Cq) {
    let link = Hub::new().endpoint("10.0.0.1:4791".parse().unwrap()).unwrap();
    let context = Context::open_with(link, options).unwrap();
    let (pd, cq) = (context.alloc_pd(), context.create_cq(1024).unwrap());
    let qp = context.create_qp(&pd, &cq, &cq, QpOptions::default()).unwrap();
    qp.connect(&qp.endpoint()).unwrap();
    (context, qp, cq)
}

fn post(qp: &Qp, ids: std::ops::Range<u64>) {
    let start = Instant::now();
    for id in ids {
        // Full until completions are polled.
        while let Err(why) = qp.post_send(&[SendRequest::new(id, WrOp::Nop)]) {
            assert!(matches!(why, PostError::Full) && start.elapsed() < LIMIT, "{why:?}");
            std::thread::yield_now();
        }
    }
}

#[test]
fn completions() {
    let (_context, qp, cq) = loopback(HcaOptions::default());
    runtime().block_on(async {
        let cq = AsyncCq::new(cq).unwrap();
        assert_eq!(cq.next_batch(&mut []).await.unwrap(), 0);
        // Given up: nothing is lost.
        assert!(timeout(SHORT_WAIT, cq.next()).await.is_err());
        post(&qp, 0..3);
        for id in 0..3 {
            assert_eq!(timeout(LIMIT, cq.next()).await.unwrap().unwrap().id, id);
        }
        let late = std::thread::spawn(move || {
            std::thread::sleep(SHORT_WAIT);
            post(&qp, 10..11);
            qp
        });
        let (completion, polls) = count_polls(cq.next()).await;
        assert_eq!(completion.unwrap().id, 10);
        assert!(polls <= 4, "{polls} polls for one completion");
        let qp = late.join().unwrap();
        post(&qp, 20..28);
        let mut ids = Vec::new();
        while ids.len() < 8 {
            let mut some = [Completion::EMPTY; 3];
            let count = timeout(LIMIT, cq.next_batch(&mut some)).await.unwrap().unwrap();
            assert!((1..=3).contains(&count));
            ids.extend(some[..count].iter().map(|completion| completion.id));
        }
        assert_eq!(ids, (20..28).collect::<Vec<_>>());
    });
}

/// Tasks with one registration, with another one, and a thread share a queue.
#[test]
fn completions_of_several_waiters() {
    const EACH: u64 = 200;
    let (_context, qp, cq) = loopback(HcaOptions::default());
    let queue = cq.clone();
    let thread = std::thread::spawn(move || {
        (0..EACH).for_each(|_| assert!(queue.wait_next(LIMIT).unwrap().is_some()));
    });
    let poster = std::thread::spawn(move || {
        for id in 0..4 * EACH {
            post(&qp, id..id + 1);
            if id % 16 == 0 {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        qp
    });
    runtime().block_on(async {
        let (shared, own) = (AsyncCq::new(cq.clone()).unwrap(), AsyncCq::new(cq.clone()).unwrap());
        let shared = std::sync::Arc::new(shared);
        let take = |cq: std::sync::Arc<AsyncCq>| async move {
            for _ in 0..EACH {
                cq.next().await.unwrap();
            }
        };
        let tasks = [shared.clone(), shared, own.into()].map(|cq| ::tokio::spawn(take(cq)));
        for task in tasks {
            timeout(LIMIT, task).await.expect("in time").unwrap();
        }
    });
    thread.join().unwrap();
    drop(poster.join().unwrap());
    assert_eq!(cq.poll(&mut [Completion::EMPTY]).unwrap(), 0);
}

#[test]
fn what_cannot_wake_a_task_is_refused() {
    let (_context, _qp, cq) = loopback(HcaOptions::default());
    let error = AsyncCq::new(cq).unwrap_err();
    assert_eq!(error.kind(), &Kind::InvalidArgument);
    assert!(error.to_string().contains("no runtime"), "{error}");
    let comm = Comm::local(1).unwrap().remove(0);
    assert_eq!(AsyncComm::new(comm).unwrap_err().kind(), &Kind::InvalidArgument);
    let manual = HcaOptions::default().with_progress_mode(ProgressMode::Manual);
    let (_context, _qp, cq) = loopback(manual);
    let _inside = runtime();
    let _entered = _inside.enter();
    let error = AsyncCq::new(cq).unwrap_err();
    assert_eq!(error.kind(), &Kind::Unsupported);
    assert!(error.to_string().contains("ProgressMode::Auto"), "{error}");
}

#[test]
fn requests() {
    let mut ranks = Comm::local(2).unwrap();
    let (peer, comm) = (ranks.remove(1), ranks.remove(0));
    let sender = std::thread::spawn(move || {
        let memory = peer.alloc(100_000).unwrap();
        for tag in 0..8_u32 {
            std::thread::sleep(SHORT_WAIT / 4);
            let len = if tag % 2 == 0 { 8 } else { 100_000 };
            memory.write(0, &[tag as u8; 8]).unwrap();
            peer.send(0, tag, memory.slice(0, len).unwrap(), LIMIT).unwrap();
        }
        peer.recv(0, 0, &memory, LIMIT).unwrap();
        // The send of that has ended by then.
        std::thread::sleep(SHORT_WAIT);
        peer.abort("no more memory");
    });
    let other = Comm::local(1).unwrap().remove(0);
    runtime().block_on(async {
        let comm = std::sync::Arc::new(AsyncComm::new(comm).unwrap());
        // One task for each message, in another order than they are sent.
        let receive = |tag: u32| {
            let comm = comm.clone();
            async move {
                let memory = comm.comm().alloc(100_000).unwrap();
                let mut request = comm.comm().irecv(1, tag, &memory).unwrap();
                let outcome = comm.wait(&mut request).await.unwrap();
                let mut bytes = [0; 8];
                memory.read(0, &mut bytes).unwrap();
                (outcome.len, bytes[0])
            }
        };
        let tasks: Vec<_> = (0..8).rev().map(|tag| (tag, ::tokio::spawn(receive(tag)))).collect();
        for (tag, task) in tasks {
            let len = if tag % 2 == 0 { 8 } else { 100_000 };
            let ended = timeout(LIMIT, task).await.expect("in time").unwrap();
            assert_eq!(ended, (len, tag as u8));
        }
        // Given up: the request stays. Its peer dies then.
        let memory = comm.comm().alloc(64).unwrap();
        let mut request = comm.comm().irecv(1, 50, &memory).unwrap();
        assert!(timeout(SHORT_WAIT, comm.wait(&mut request)).await.is_err());
        let send = comm.comm().isend(1, 0, &memory).unwrap();
        timeout(LIMIT, send).await.expect("in time").unwrap();
        let (ended, polls) = count_polls(comm.wait(&mut request)).await;
        let error = ended.unwrap_err();
        assert!(error.to_string().contains("no more memory"), "{error}");
        assert!(polls <= 8, "{polls} polls for one loss");
        let theirs = other.alloc(64).unwrap();
        let mut foreign = other.irecv(0, 0, &theirs).unwrap();
        let error = comm.wait(&mut foreign).await.unwrap_err();
        assert!(error.to_string().contains("another communicator"), "{error}");
    });
    sender.join().unwrap();
}

#[test]
fn notifications() {
    let hub = Hub::new();
    let open = |name: &str, address: &str| {
        let context = Context::open(hub.endpoint(address.parse().unwrap()).unwrap()).unwrap();
        Agent::open(name, AgentOptions::default().with_rails(vec![context])).unwrap()
    };
    let (alice, bob) = (open("alice", "10.0.0.1:4791"), open("bob", "10.0.0.2:4791"));
    let metadata = bob.metadata().unwrap();
    runtime().block_on(async {
        let bob = std::sync::Arc::new(AsyncAgent::new(bob).unwrap());
        assert!(timeout(SHORT_WAIT, bob.next_notification()).await.is_err());
        let sender = std::thread::spawn(move || {
            let peer = alice.add_peer(&metadata).unwrap();
            let sent: Vec<_> =
                (0..40_u8).map(|number| alice.notify(&peer, &[number]).unwrap()).collect();
            sent.into_iter().for_each(|transfer| transfer.wait(LIMIT).unwrap());
            std::thread::sleep(SHORT_WAIT);
            alice.notify(&peer, b"late").unwrap().wait(LIMIT).unwrap();
            alice
        });
        let take = |bob: std::sync::Arc<AsyncAgent>| async move {
            let mut taken = Vec::new();
            for _ in 0..10 {
                taken.push(bob.next_notification().await.unwrap().bytes()[0]);
            }
            taken
        };
        let tasks: Vec<_> = (0..4).map(|_| ::tokio::spawn(take(bob.clone()))).collect();
        let mut all = Vec::new();
        for task in tasks {
            all.extend(timeout(LIMIT, task).await.expect("in time").unwrap());
        }
        all.sort_unstable();
        assert_eq!(all, (0..40).collect::<Vec<_>>());
        let (late, polls) = count_polls(bob.next_notification()).await;
        assert_eq!((late.unwrap().bytes(), polls <= 4), (&b"late"[..], true), "{polls} polls");
        drop(sender.join().unwrap());
    });
}

/// What is pending when a runtime ends stays usable in another one.
#[test]
fn a_second_runtime() {
    let (_context, qp, cq) = loopback(HcaOptions::default());
    for id in 0..2 {
        runtime().block_on(async {
            let cq = AsyncCq::new(cq.clone()).unwrap();
            let mut next = pin!(cq.next());
            let pending = poll_fn(|task| Poll::Ready(next.as_mut().poll(task).is_pending()));
            assert!(pending.await);
            post(&qp, id..id + 1);
            assert_eq!(timeout(LIMIT, next).await.unwrap().unwrap().id, id);
        });
    }
}

//! Non-blocking sockets, and their descriptors in an epoll set.

use std::io::{ErrorKind, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::AsFd;
use std::time::Duration;

use rustix::event::Timespec;
use rustix::event::epoll::{self, EventData, EventFlags};

use crate::warp::testbed::{Testbed, byte, test_timeout};
use testkit::cases;

cases!(Testbed; CASES:
    calls_that_would_block_return_would_block,
    the_descriptor_signals_bytes_and_the_end,
    the_descriptor_signals_room,
    one_direction_does_not_consume_the_others_event,
    an_event_loop_echoes_many,
    a_listener_in_an_event_loop,
);

struct Poll(std::os::fd::OwnedFd);

impl Poll {
    fn new() -> Self {
        Self(epoll::create(epoll::CreateFlags::CLOEXEC).unwrap())
    }

    fn add(&self, what: &impl AsFd, number: u64, edge: bool) {
        let flags = if edge { EventFlags::IN | EventFlags::ET } else { EventFlags::IN };
        epoll::add(&self.0, what.as_fd(), EventData::new_u64(number), flags).unwrap();
    }

    fn wait(&self, time: Duration) -> Vec<u64> {
        let mut buffer = [MaybeUninit::<epoll::Event>::uninit(); 64];
        let timeout =
            Timespec { tv_sec: time.as_secs() as i64, tv_nsec: time.subsec_nanos().into() };
        let (events, _) = epoll::wait(&self.0, &mut buffer[..], Some(&timeout)).unwrap();
        events.iter().map(|event| event.data.u64()).collect()
    }
}

const SHORT_WAIT: Duration = Duration::from_millis(30);

fn calls_that_would_block_return_would_block(testbed: &Testbed) {
    let (mut here, there) = testbed.pair();
    here.set_nonblocking(true).unwrap();
    assert_eq!(here.read(&mut [0]).unwrap_err().kind(), ErrorKind::WouldBlock);
    let mut sent = 0;
    let error = loop {
        match here.write(&[3; 10_000]) {
            Ok(count) => sent += count,
            Err(error) => break error,
        }
    };
    assert_eq!(error.kind(), ErrorKind::WouldBlock);
    assert!(sent > 0 && sent <= 512 << 10);
    let mut bytes = vec![0; sent];
    (&mut &there).read_exact(&mut bytes).unwrap();
    let listener = testbed.listen();
    listener.set_nonblocking(true).unwrap();
    assert_eq!(listener.accept().unwrap_err().kind(), ErrorKind::WouldBlock);
}

fn the_descriptor_signals_bytes_and_the_end(testbed: &Testbed) {
    for edge in [false, true] {
        let (mut here, mut there) = testbed.pair();
        here.set_nonblocking(true).unwrap();
        let poll = Poll::new();
        poll.add(&here, 7, edge);
        assert_eq!(poll.wait(test_timeout()), [7], "it starts readable");
        assert_eq!(here.read(&mut [0]).unwrap_err().kind(), ErrorKind::WouldBlock);
        assert_eq!(poll.wait(SHORT_WAIT), [0; 0], "no data, and writing is not armed");
        there.write_all(b"ab").unwrap();
        assert_eq!(poll.wait(test_timeout()), [7]);
        let mut two = [0; 2];
        here.read_exact(&mut two).unwrap();
        assert_eq!(here.read(&mut two).unwrap_err().kind(), ErrorKind::WouldBlock);
        assert_eq!(poll.wait(SHORT_WAIT), [0; 0]);
        drop(there);
        assert_eq!(poll.wait(test_timeout()), [7]);
        assert_eq!(here.read(&mut two).unwrap(), 0);
    }
}

fn fill(mut stream: impl Write) -> usize {
    let mut sent = 0;
    // The device may still be transferring staged bytes.
    for _ in 0..50 {
        loop {
            match stream.write(&[9; 9000]) {
                Ok(count) => sent += count,
                Err(error) => break assert_eq!(error.kind(), ErrorKind::WouldBlock),
            }
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    sent
}

fn the_descriptor_signals_room(testbed: &Testbed) {
    let (here, mut there) = testbed.pair();
    here.set_nonblocking(true).unwrap();
    let poll = Poll::new();
    poll.add(&here, 1, true);
    let sent = fill(&here);
    poll.wait(Duration::ZERO);
    assert_eq!(poll.wait(SHORT_WAIT), [0; 0], "no room");
    let mut bytes = vec![0; sent];
    there.read_exact(&mut bytes).unwrap();
    assert_eq!(poll.wait(test_timeout()), [1]);
    assert!((&mut &here).write(b"x").is_ok());
}

fn one_direction_does_not_consume_the_others_event(testbed: &Testbed) {
    let (here, mut there) = testbed.pair();
    here.set_nonblocking(true).unwrap();
    let poll = Poll::new();
    poll.add(&here, 1, false);
    assert_eq!((&here).read(&mut [0]).unwrap_err().kind(), ErrorKind::WouldBlock);
    there.write_all(b"data").unwrap();
    assert_eq!(poll.wait(test_timeout()), [1]);
    // The writer clears the event; the reader must get it nevertheless.
    fill(&here);
    assert_eq!(poll.wait(test_timeout()), [1]);
    let mut data = [0; 4];
    (&mut &here).read_exact(&mut data).unwrap();
    assert_eq!(&data, b"data");
}

fn an_event_loop_echoes_many(testbed: &Testbed) {
    const MANY: usize = 20;
    const LEN: usize = 300_000;
    let listener = testbed.listen();
    let address = listener.local_addr().unwrap();
    std::thread::scope(|scope| {
        for number in 0..MANY as u64 {
            let here = &testbed.here;
            scope.spawn(move || {
                let stream = here.connect(address).unwrap();
                stream.set_read_timeout(Some(test_timeout())).unwrap();
                std::thread::scope(|both| {
                    both.spawn(|| crate::warp::testbed::send_all(&stream, number, LEN, 30_000));
                    crate::warp::testbed::check_all(&stream, number, LEN, 30_000);
                });
            });
        }
        echo(&listener, MANY);
    });
    assert_ne!(byte(1, 0), byte(2, 0), "streams differ");
}

/// Echoes `many` connections in one thread, with edge-triggered events.
fn echo(listener: &warpwire::sock::warp::WarpListener, many: usize) {
    struct Client {
        stream: warpwire::sock::warp::WarpStream,
        held: Vec<u8>,
        ended: bool,
    }
    let poll = Poll::new();
    let mut clients: Vec<Client> = Vec::new();
    for _ in 0..many {
        let stream = listener.accept().unwrap().0;
        stream.set_nonblocking(true).unwrap();
        poll.add(&stream, clients.len() as u64, true);
        clients.push(Client { stream, held: Vec::new(), ended: false });
    }
    let mut left = many;
    while left > 0 {
        let events = poll.wait(test_timeout());
        assert!(!events.is_empty(), "{left} connections are left");
        for number in events {
            let client = &mut clients[number as usize];
            let was_over = client.ended && client.held.is_empty();
            // Both directions, until neither makes progress.
            loop {
                let mut buffer = [0; 4096];
                let read = match client.held.len() < 50_000 && !client.ended {
                    true => (&mut &client.stream).read(&mut buffer),
                    false => Err(ErrorKind::WouldBlock.into()),
                };
                match &read {
                    Ok(0) => client.ended = true,
                    Ok(count) => client.held.extend_from_slice(&buffer[..*count]),
                    Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
                }
                let wrote = match client.held.is_empty() {
                    false => (&mut &client.stream).write(&client.held),
                    true => Err(ErrorKind::WouldBlock.into()),
                };
                match &wrote {
                    Ok(count) => drop(client.held.drain(..*count)),
                    Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
                }
                if read.is_err() && wrote.is_err() {
                    break;
                }
            }
            if client.ended && client.held.is_empty() && !was_over {
                client.stream.shutdown(std::net::Shutdown::Write).unwrap();
                left -= 1;
            }
        }
    }
}

fn a_listener_in_an_event_loop(testbed: &Testbed) {
    let listener = testbed.listen();
    listener.set_nonblocking(true).unwrap();
    let poll = Poll::new();
    poll.add(&listener, 5, true);
    assert_eq!(poll.wait(SHORT_WAIT), [0; 0]);
    let address = listener.local_addr().unwrap();
    for _ in 0..3 {
        let _here = testbed.here.connect(address).unwrap();
        assert_eq!(poll.wait(test_timeout()), [5]);
        listener.accept().unwrap();
        assert_eq!(listener.accept().unwrap_err().kind(), ErrorKind::WouldBlock);
        assert_eq!(poll.wait(SHORT_WAIT), [0; 0]);
    }
}

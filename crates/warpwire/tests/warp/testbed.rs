//! The fixture of a case: two nets that reach each other.

use std::io::{Read, Write};
use std::time::Duration;

use warpwire::link::{Link, Shm, ShmOptions, Udp, UdpOptions};
use warpwire::sock::warp::{Net, NetOptions, WarpListener, WarpStream};
use warpwire::verbs::Context;

/// Longer than any successful operation takes.
pub fn test_timeout() -> Duration {
    testkit::deadline(Duration::from_secs(30))
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TestLink {
    Udp,
    Shm,
    /// Software HCAs opened by address, as in [`Net::shared`].
    ByAddress,
}

impl TestLink {
    pub const ALL: [Self; 3] = [Self::Udp, Self::Shm, Self::ByAddress];

    pub fn net(self, options: NetOptions) -> Net {
        let any = "127.0.0.1:0".parse().unwrap();
        let link: Box<dyn Link> = match self {
            Self::Udp => Box::new(Udp::bind(any, UdpOptions::default()).unwrap()),
            Self::Shm => Box::new(Shm::bind(any, ShmOptions::default()).unwrap()),
            Self::ByAddress => return Net::new(options).unwrap(),
        };
        Net::over(&Context::open(link).unwrap(), options).unwrap()
    }
}

pub struct Testbed {
    pub test_link: TestLink,
    pub here: Net,
    pub there: Net,
}

impl Testbed {
    pub fn new(test_link: TestLink) -> Self {
        Self::with(test_link, NetOptions::default())
    }

    pub fn with(test_link: TestLink, options: NetOptions) -> Self {
        Self { test_link, here: test_link.net(options), there: test_link.net(options) }
    }

    pub fn listen(&self) -> WarpListener {
        self.there.listen("127.0.0.1:0").unwrap()
    }

    /// A connection: the local end, and the remote end.
    pub fn pair(&self) -> (WarpStream, WarpStream) {
        let listener = self.listen();
        let here = self.here.connect(listener.local_addr().unwrap()).unwrap();
        let (there, peer) = listener.accept().unwrap();
        assert_eq!(peer, here.local_addr().unwrap());
        for end in [&here, &there] {
            end.set_read_timeout(Some(test_timeout())).unwrap();
            end.set_write_timeout(Some(test_timeout())).unwrap();
        }
        (here, there)
    }
}

/// Small pseudo-random numbers.
pub struct Rng(u64);

impl Rng {
    pub fn new(seed: u64) -> Self {
        Self(seed | 1)
    }

    pub fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % limit as u64) as usize
    }
}

/// Byte `at` of the stream with this seed.
pub fn byte(seed: u64, at: usize) -> u8 {
    let word = (at as u64 / 8 + seed).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    word.to_le_bytes()[at % 8]
}

/// Writes a stream of `len` bytes in random pieces, then ends it.
pub fn send_all(mut to: &WarpStream, seed: u64, len: usize, max_chunk: usize) {
    let bytes: Vec<u8> = (0..len).map(|at| byte(seed, at)).collect();
    let (mut rng, mut done) = (Rng::new(seed), 0);
    while done < len {
        let piece = (1 + rng.below(max_chunk)).min(len - done);
        to.write_all(&bytes[done..done + piece]).unwrap();
        done += piece;
    }
    to.shutdown(std::net::Shutdown::Write).unwrap();
}

/// Reads a stream in random pieces up to its end and checks it.
pub fn check_all(mut from: &WarpStream, seed: u64, len: usize, max_chunk: usize) {
    let (mut rng, mut done) = (Rng::new(!seed), 0);
    let mut buffer = vec![0; max_chunk];
    loop {
        let piece = 1 + rng.below(max_chunk);
        let count = from.read(&mut buffer[..piece]).unwrap();
        for (at, found) in buffer[..count].iter().enumerate() {
            assert_eq!(*found, byte(seed, done + at), "byte {} of {len}", done + at);
        }
        done += count;
        if count == 0 {
            break;
        }
    }
    assert_eq!(done, len);
}

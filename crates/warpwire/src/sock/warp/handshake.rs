//! How two ends of a connection meet: a conversation over TCP, as bytes in and bytes out.

use serde::{Deserialize, Serialize};

use crate::error::{Error, Kind, Result};
use crate::verbs::bootstrap::{decode_line, encode_line};
use crate::verbs::{Mtu, QpEndpoint, Remote};

/// What the hello must say, so that nobody takes another program of ours for a socket.
const MAGIC: &str = "warp socket";
/// The version of the conversation, and of the protocol behind it.
pub const VERSION: u32 = 1;
/// The longest line of the conversation, its end included.
pub const MAX_LINE: usize = 1024;
/// The smallest receive ring.
pub const MIN_RING: u64 = 4096;
/// The largest: a span of it must fit into one work request.
pub const MAX_RING: u64 = 1 << 30;

/// A place in an end's memory where its peer may write.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RemoteAddr {
    /// The address, in the registration's addresses.
    pub address: u64,
    /// The registration's key.
    pub rkey: u32,
}

impl RemoteAddr {
    /// The place so many bytes behind it.
    pub fn at_offset(self, offset: u64) -> Remote {
        Remote { address: self.address.wrapping_add(offset), rkey: self.rkey }
    }
}

/// What an end tells of itself: its queue pair, and where the peer may write.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// What the peer's queue pair must know.
    pub endpoint: QpEndpoint,
    /// The receive ring.
    pub ring: RemoteAddr,
    /// Its size, a power of two.
    pub ring_size: u64,
    /// The landing word that counts what the peer has written into the ring: 64 bits, aligned.
    pub received: RemoteAddr,
    /// The landing word that counts what the peer has taken of ours: 64 bits, aligned.
    pub taken: RemoteAddr,
    /// The most bytes that it has on their way or unread at the peer, a power of two: it may be less than the peer's ring
    /// holds, and the peer tells more often of what it has read. Left out by ends that can fill any ring.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub window: Option<u64>,
}

impl Hello {
    /// Whether it makes sense: what is wrong, else.
    pub fn check(&self) -> Result<()> {
        let wrong = |why: String, fix: &'static str| {
            Err(Error::new(Kind::Malformed, "understand a hello").why(why).fix(fix))
        };
        let size = self.ring_size;
        if !size.is_power_of_two() || !(MIN_RING..=MAX_RING).contains(&size) {
            let why = format!("its ring has {size} bytes");
            return wrong(why, "use a power of two from 4096 bytes to 1 GiB");
        }
        if self.window.is_some_and(|window| !window.is_power_of_two()) {
            let why = format!("it sends {} bytes at a time", self.window.unwrap_or(0));
            return wrong(why, "use a power of two, or leave it out");
        }
        if self.ring.address.checked_add(size).is_none() {
            let why = format!("its ring at {:#x} passes the last address", self.ring.address);
            return wrong(why, "give the address where the ring begins");
        }
        for (name, word) in [("received", self.received), ("taken", self.taken)] {
            if !word.address.is_multiple_of(8) || word.address.checked_add(8).is_none() {
                let why = format!("its word `{name}` lies at {:#x}", word.address);
                return wrong(why, "align it to 8 bytes");
            }
        }
        let QpEndpoint { qpn, psn, mtu, .. } = self.endpoint;
        if qpn >> 24 != 0 || psn >> 24 != 0 || Mtu::new(mtu).is_none() {
            let why = format!("its queue pair {qpn:#x} begins at {psn:#x} with an MTU of {mtu}");
            return wrong(why, "offer 24-bit numbers, and a power of two from 256 on");
        }
        Ok(())
    }
}

/// What is said, a line each.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "lowercase", deny_unknown_fields)]
enum HandshakeMsg {
    Hello {
        magic: String,
        version: u32,
        #[serde(flatten)]
        hello: Hello,
    },
    Ready,
    Refused(String),
}

/// One end's part of the conversation. It does no I/O and knows no clock: whoever has the connection brings bytes, takes
/// bytes, and gives up when it takes too long.
///
/// Both ends do the same:
/// 1. send what [`to_send`](Self::to_send) gives, whenever there is something, and say so by [`sent`](Self::sent);
/// 2. bring what comes to [`take`](Self::take); an error ends the connection, after `to_send` was sent, which may have the
///    reason for the peer;
/// 3. once [`peer`](Self::peer) is known, connect the queue pair to its offer, then call [`mark_ready`](Self::met), or
///    [`refuse`](Self::refuse) if that failed;
/// 4. when [`is_done`](Self::is_done), write: the peer's queue pair receives. The peer may write as soon as it has heard
///    that we have met, which can be before we know of its own.
///
/// ```
/// use warpwire::sock::warp::{Handshake, Hello, RemoteAddr};
/// use warpwire::verbs::QpEndpoint;
/// # fn hello(qpn: u32) -> Hello {
/// #     let endpoint = QpEndpoint { address: "10.0.0.1:4791".parse().unwrap(), qpn, psn: 1, mtu: 1024, max_rd_atomic: 1, lid: 0, gid: 0 };
/// #     let remote_addr = |address| RemoteAddr { address, rkey: 7 };
/// #     Hello { endpoint, ring: remote_addr(0x1000), ring_size: 4096, received: remote_addr(8), taken: remote_addr(16), window: None }
/// # }
/// let (mut a, mut b) = (Handshake::new(&hello(1))?, Handshake::new(&hello(2))?);
/// while !(a.is_done() && b.is_done()) {
///     for _ in 0..2 {
///         let bytes = a.to_send().to_vec();
///         a.sent(bytes.len());
///         b.take(&bytes)?;
///         if b.peer().is_some() && !b.is_ready() {
///             // here the queue pair is connected
///             b.mark_ready();
///         }
///         std::mem::swap(&mut a, &mut b);
///     }
/// }
/// assert_eq!(a.peer().unwrap().endpoint.qpn, 2);
/// # Ok::<(), warpwire::Error>(())
/// ```
#[derive(Debug)]
pub struct Handshake {
    out: Vec<u8>,
    /// How much of it went.
    sent: usize,
    /// A line that is not at its end.
    line: Vec<u8>,
    peer: Option<Hello>,
    is_ready: bool,
    peer_ready: bool,
    has_failed: bool,
}

impl Handshake {
    /// Begins with our hello.
    ///
    /// # Errors
    /// If it makes no sense.
    pub fn new(mine: &Hello) -> Result<Self> {
        mine.check()?;
        let message =
            HandshakeMsg::Hello { magic: MAGIC.to_owned(), version: VERSION, hello: *mine };
        Ok(Self {
            out: encode_line(&message)?.into_bytes(),
            sent: 0,
            line: Vec::new(),
            peer: None,
            is_ready: false,
            peer_ready: false,
            has_failed: false,
        })
    }

    /// What waits to be sent.
    pub fn to_send(&self) -> &[u8] {
        &self.out[self.sent..]
    }

    /// So many bytes of it went.
    pub fn sent(&mut self, count: usize) {
        self.sent = self.out.len().min(self.sent.saturating_add(count));
    }

    /// Takes what came, whatever it is.
    ///
    /// # Errors
    /// If it is not what a peer says: the connection is of no use any more. [`Kind::PeerLost`] if the peer says that it
    /// cannot.
    pub fn take(&mut self, bytes: &[u8]) -> Result<()> {
        if self.has_failed {
            return Err(malformed("it went wrong before").fix("connect anew"));
        }
        let taken = self.take_lines(bytes);
        if let Err(error) = &taken {
            self.has_failed = true;
            if *error.kind() != Kind::PeerLost {
                self.enqueue_refusal(error);
            }
        }
        taken
    }

    fn take_lines(&mut self, bytes: &[u8]) -> Result<()> {
        for piece in bytes.split_inclusive(|byte| *byte == b'\n') {
            if self.peer_ready {
                return Err(malformed("it says more after it was ready").fix("use one version"));
            }
            if self.line.len() + piece.len() > MAX_LINE {
                let why = format!("its line is longer than {MAX_LINE} bytes");
                return Err(malformed(why).fix("check that the other end is a warp socket"));
            }
            self.line.extend_from_slice(piece);
            if self.line.ends_with(b"\n") {
                let line = std::mem::take(&mut self.line);
                self.take_line(&line)?;
            }
        }
        Ok(())
    }

    fn take_line(&mut self, line: &[u8]) -> Result<()> {
        let message: HandshakeMsg =
            decode_line(line).map_err(|error| error.during("meet a peer"))?;
        match (message, &self.peer) {
            (HandshakeMsg::Refused(why), _) => {
                let why: String = why.chars().filter(|c| !c.is_control()).take(300).collect();
                Err(Error::new(Kind::PeerLost, "meet a peer").why(format!("it refuses: {why}")))
            }
            (HandshakeMsg::Hello { magic, version, hello }, None) => {
                if magic != MAGIC {
                    let fix = "check that the other end is a warp socket, and the port";
                    return Err(malformed("it is another program of ours").fix(fix));
                }
                if version != VERSION {
                    let why = format!("it speaks version {version}, we speak {VERSION}");
                    let error = Error::new(Kind::Unsupported, "meet a peer").why(why);
                    return Err(error.fix("use one version on both ends"));
                }
                hello.check().map_err(|error| error.during("meet a peer"))?;
                self.peer = Some(hello);
                Ok(())
            }
            (HandshakeMsg::Hello { .. }, Some(_)) => Err(malformed("it says hello twice")),
            (HandshakeMsg::Ready, None) => Err(malformed("it is ready before its hello")),
            // It cannot have heard us yet.
            (HandshakeMsg::Ready, Some(_)) if !self.is_ready && self.sent < self.out.len() => {
                Err(malformed("it is ready before it has heard our hello"))
            }
            (HandshakeMsg::Ready, Some(_)) => {
                self.peer_ready = true;
                Ok(())
            }
        }
    }

    /// What the peer has told of itself, once it has.
    pub fn peer(&self) -> Option<&Hello> {
        self.peer.as_ref()
    }

    /// Our queue pair is connected and receives: the peer is told.
    pub fn mark_ready(&mut self) {
        if !std::mem::replace(&mut self.is_ready, true) {
            self.enqueue(&HandshakeMsg::Ready);
        }
    }

    /// Whether the peer was told so, or will be.
    pub fn is_ready(&self) -> bool {
        self.is_ready
    }

    /// We cannot: the peer is told why, if it listens.
    pub fn refuse(&mut self, why: &Error) {
        self.has_failed = true;
        self.enqueue_refusal(why);
    }

    fn enqueue_refusal(&mut self, why: &Error) {
        // As JSON a character may become six.
        let why: String = why.to_string().chars().filter(char::is_ascii).take(150).collect();
        self.enqueue(&HandshakeMsg::Refused(why));
    }

    fn enqueue(&mut self, message: &HandshakeMsg) {
        // Words of ours have a form in JSON.
        if let Ok(line) = encode_line(message) {
            self.out.extend_from_slice(line.as_bytes());
        }
    }

    /// Whether both queue pairs receive, and the peer knows it.
    pub fn is_done(&self) -> bool {
        !self.has_failed && self.is_ready && self.peer_ready && self.to_send().is_empty()
    }
}

#[cold]
fn malformed(why: impl Into<std::borrow::Cow<'static, str>>) -> Error {
    Error::new(Kind::Malformed, "meet a peer").why(why)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn hello() -> Hello {
        let endpoint = QpEndpoint {
            address: "[2001:db8::1]:4791".parse().unwrap(),
            qpn: 0x11,
            psn: 0xff_ffff,
            mtu: 4096,
            max_rd_atomic: 16,
            lid: 0,
            gid: 0,
        };
        let remote_addr = |address| RemoteAddr { address, rkey: u32::MAX };
        Hello {
            endpoint,
            ring: remote_addr(u64::MAX - 4096),
            ring_size: 4096,
            received: remote_addr(0x7fff_ffff_fff8),
            taken: remote_addr(16),
            window: Some(8192),
        }
    }

    fn line(change: impl FnOnce(&mut serde_json::Value)) -> Vec<u8> {
        let fresh = Handshake::new(&hello()).unwrap();
        let mut value: serde_json::Value = serde_json::from_slice(fresh.to_send()).unwrap();
        change(&mut value["words"]["hello"]);
        let mut text = value.to_string();
        text.push('\n');
        text.into_bytes()
    }

    /// What an end says of these bytes, with its own hello sent.
    fn feed_bytes(bytes: &[u8]) -> Result<Handshake> {
        let mut end = Handshake::new(&hello()).unwrap();
        end.sent(usize::MAX);
        end.take(bytes).map(|()| end)
    }

    #[test]
    fn a_hello_fits_a_line_and_comes_in_any_pieces() {
        let bytes = line(|_| {});
        assert!(bytes.len() < MAX_LINE / 2, "{}", bytes.len());
        let mut end = Handshake::new(&hello()).unwrap();
        end.sent(usize::MAX);
        for byte in &bytes {
            assert!(end.peer().is_none());
            end.take(&[*byte]).unwrap();
        }
        assert_eq!(end.peer(), Some(&hello()));
        end.mark_ready();
        assert!(!end.is_done());
        end.take(b"{\"warpwire\":1,\"words\":\"ready\"}\n").unwrap();
        assert!(!end.is_done(), "our own word must go first");
        end.sent(usize::MAX);
        assert!(end.is_done());
    }

    #[test]
    fn hellos_that_make_no_sense_are_refused_with_the_reason() {
        type Corrupt = fn(&mut serde_json::Value);
        let cases: &[(&str, Corrupt)] = &[
            ("its ring has 4097 bytes", |h| h["ring_size"] = 4097.into()),
            ("it sends 0 bytes", |h| h["window"] = 0.into()),
            ("it sends 24 bytes", |h| h["window"] = 24.into()),
            ("its ring has 0 bytes", |h| h["ring_size"] = 0.into()),
            ("its ring has 2147483648 bytes", |h| h["ring_size"] = (1_u64 << 31).into()),
            ("passes the last address", |h| h["ring"]["address"] = (u64::MAX - 4).into()),
            ("`received` lies at 0x9", |h| h["received"]["address"] = 9.into()),
            ("`taken` lies at", |h| h["taken"]["address"] = (u64::MAX - 7).into()),
            ("MTU of 1500", |h| h["endpoint"]["mtu"] = 1500.into()),
            ("queue pair 0x1000000", |h| h["endpoint"]["qpn"] = (1 << 24).into()),
            ("version 2", |h| h["version"] = 2.into()),
            ("another program", |h| h["magic"] = "rank".into()),
            ("not what was expected", |h| h["ring"] = 3.into()),
        ];
        for (expected, corrupt) in cases {
            let error = feed_bytes(&line(corrupt)).expect_err(expected);
            assert!(error.to_string().contains(expected), "{error}");
        }
    }

    #[test]
    fn words_out_of_turn_are_refused() {
        let ready: &[u8] = b"{\"warpwire\":1,\"words\":\"ready\"}\n";
        let (hello, twice) = (line(|_| {}), [line(|_| {}), line(|_| {})].concat());
        for (bytes, expected) in [
            (ready.to_vec(), "before its hello"),
            (twice, "hello twice"),
            ([&hello, ready, b"x"].concat(), "more after it was ready"),
            (vec![b' '; MAX_LINE + 1], "longer than"),
            (b"GET / HTTP/1.1\r\n".to_vec(), "not our language"),
            (b"{\"warpwire\":9,\"words\":\"ready\"}\n".to_vec(), "version 9"),
            (b"{\"warpwire\":1,\"words\":{\"refused\":\"no memory\"}}\n".to_vec(), "no memory"),
        ] {
            let error = feed_bytes(&bytes).expect_err(expected);
            assert!(error.to_string().contains(expected), "{error}");
        }
        let mut early = Handshake::new(&super::tests::hello()).unwrap();
        let error = early.take(&[&hello, ready].concat()).unwrap_err();
        assert!(error.to_string().contains("heard our hello"), "{error}");
    }

    #[test]
    fn the_peer_hears_why_it_was_refused() {
        let mut end = Handshake::new(&hello()).unwrap();
        end.sent(usize::MAX);
        end.take(b"SSH-2.0\n").unwrap_err();
        let mut other = Handshake::new(&hello()).unwrap();
        let error = other.take(end.to_send()).unwrap_err();
        assert_eq!(error.kind(), &Kind::PeerLost);
        assert!(error.to_string().contains("not our language"), "{error}");
        assert!(other.take(b"").is_err(), "what failed stays so");
        assert!(!other.is_done());
    }

    proptest! {
        #[test]
        fn nothing_that_comes_makes_it_panic(
            pieces in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..64), 0..40),
            cut in 0_usize..500,
        ) {
            let mut end = Handshake::new(&hello()).unwrap();
            end.sent(usize::MAX);
            let good = line(|_| {});
            let _ = end.take(&good[..cut.min(good.len())]);
            for piece in &pieces {
                let _ = end.take(piece);
                if end.peer().is_some() {
                    end.mark_ready();
                }
                end.sent(piece.len());
            }
            prop_assert!(end.line.len() <= MAX_LINE && end.out.len() <= 4 * MAX_LINE);
        }
    }
}

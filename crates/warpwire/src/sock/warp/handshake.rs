//! The handshake of a connection over TCP, without I/O: bytes in, bytes out.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Kind, Result};
use crate::units::printable;
use crate::verbs::bootstrap::{decode_line, encode_line};
use crate::verbs::{Mtu, QpEndpoint, Remote};

/// Distinguishes a warp socket from other programs with the same line format.
const MAGIC: &str = "warp socket";
/// Version of the handshake and of the data protocol.
pub const VERSION: u32 = 1;
/// Maximum length of a line of the handshake, line feed included.
pub const MAX_LINE: usize = 1024;
/// Minimum size of a receive ring, in bytes.
pub const MIN_RING: u64 = 4096;
/// Maximum size of a receive ring: a span of it must fit into one work request.
pub const MAX_RING: u64 = 1 << 30;

/// A location in an end's memory that its peer may write.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RemoteAddr {
    /// The address within the memory region's address range.
    pub address: u64,
    /// The memory region's rkey.
    pub rkey: u32,
}

impl RemoteAddr {
    /// The remote address `offset` bytes further.
    pub fn at_offset(self, offset: u64) -> Remote {
        Remote { address: self.address.wrapping_add(offset), rkey: self.rkey }
    }
}

/// An end's description of itself: its queue pair and the memory that the peer may write.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// Connection data for the peer's queue pair.
    pub endpoint: QpEndpoint,
    /// The receive ring.
    pub ring: RemoteAddr,
    /// Size of the ring in bytes, a power of two from [`MIN_RING`] to [`MAX_RING`].
    pub ring_size: u64,
    /// The word that counts the bytes that the peer has written into the ring: 64 bits, aligned.
    pub received: RemoteAddr,
    /// The word that counts the bytes that the peer has read from its own ring: 64 bits, aligned.
    pub taken: RemoteAddr,
    /// Maximum number of bytes that this end keeps in flight or unread at the peer, a power of two.
    /// If it is less than the peer's ring, the peer reports consumption more often. Absent if the
    /// end can fill any ring.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub window: Option<u64>,
}

impl Hello {
    /// Checks sizes, alignment and ranges.
    ///
    /// # Errors
    /// [`Kind::Malformed`] with the first field that is invalid.
    pub fn check(&self) -> Result<()> {
        let wrong = |why: String, fix: &'static str| {
            Err(Error::new(Kind::Malformed, "accept a hello").why(why).fix(fix))
        };
        let size = self.ring_size;
        if !size.is_power_of_two() || !(MIN_RING..=MAX_RING).contains(&size) {
            let why = format!("ring_size is {size}");
            return wrong(why, "use a power of two from 4096 bytes to 1 GiB");
        }
        if self.window.is_some_and(|window| !window.is_power_of_two()) {
            let why = format!("window is {}", self.window.unwrap_or(0));
            return wrong(why, "use a power of two, or omit it");
        }
        if self.ring.address.checked_add(size).is_none() {
            let why = format!("the ring at {:#x} exceeds the address space", self.ring.address);
            return wrong(why, "use the start address of the ring");
        }
        for (name, word) in [("received", self.received), ("taken", self.taken)] {
            if !word.address.is_multiple_of(8) || word.address.checked_add(8).is_none() {
                let why = format!("the word `{name}` is at {:#x}", word.address);
                return wrong(why, "align it to 8 bytes");
            }
        }
        let QpEndpoint { qpn, psn, mtu, .. } = self.endpoint;
        if qpn >> 24 != 0 || psn >> 24 != 0 || Mtu::new(mtu).is_none() {
            let why = format!("queue pair {qpn:#x} has PSN {psn:#x} and an MTU of {mtu}");
            return wrong(why, "use 24-bit numbers and a valid MTU, such as 1024");
        }
        Ok(())
    }

    /// Checks that the queue pair is at the address of the TCP connection's peer. Packets would
    /// otherwise go to any third party that the peer names.
    ///
    /// # Errors
    /// [`Kind::Malformed`] with both addresses.
    pub fn check_address(&self, peer: IpAddr) -> Result<()> {
        let (named, peer) = (self.endpoint.address.ip().to_canonical(), peer.to_canonical());
        if named == peer {
            return Ok(());
        }
        let error = Error::new(Kind::Malformed, "accept a hello");
        Err(error
            .why(format!("its queue pair is at {named}, its TCP connection comes from {peer}"))
            .fix("connect from the address that its RDMA device is bound to"))
    }
}

/// A message of the handshake, one per line.
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

/// One end of the handshake. It does no I/O and has no clock: the caller moves the bytes and
/// enforces the timeout.
///
/// Both ends do the same:
/// 1. send the bytes of [`to_send`](Self::to_send) whenever there are any, and call
///    [`sent`](Self::sent);
/// 2. pass received bytes to [`take`](Self::take); an error ends the connection, after the
///    remaining bytes of `to_send`, which may contain the reason, were sent;
/// 3. once [`peer`](Self::peer) is known, connect the queue pair to its endpoint, then call
///    [`mark_ready`](Self::mark_ready), or [`refuse`](Self::refuse) if that failed;
/// 4. when [`is_done`](Self::is_done), start to write: the peer's queue pair is connected. The peer
///    may write as soon as it knows that we are ready, which can be before we know that it is.
///
/// ```
/// use warpwire::sock::warp::{Handshake, Hello, RemoteAddr};
/// use warpwire::verbs::QpEndpoint;
/// # fn hello(qpn: u32) -> Hello {
/// #     let endpoint = QpEndpoint {
/// #         address: "10.0.0.1:4791".parse().unwrap(), qpn, psn: 1, mtu: 1024,
/// #         max_rd_atomic: 1, source_port: 4791, lid: 0, gid: 0, selective_repeat: false,
/// #         mtu_on_host: 0,
/// #     };
/// #     let remote_addr = |address| RemoteAddr { address, rkey: 7 };
/// #     Hello {
/// #         endpoint, ring: remote_addr(0x1000), ring_size: 4096,
/// #         received: remote_addr(8), taken: remote_addr(16), window: None,
/// #     }
/// # }
/// let (mut a, mut b) = (Handshake::new(&hello(1))?, Handshake::new(&hello(2))?);
/// while !(a.is_done() && b.is_done()) {
///     for _ in 0..2 {
///         let bytes = a.to_send().to_vec();
///         a.sent(bytes.len());
///         b.take(&bytes)?;
///         if b.peer().is_some() && !b.is_ready() {
///             // connect the queue pair here
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
    /// Number of bytes of `out` that were sent.
    sent: usize,
    /// An incomplete line.
    line: Vec<u8>,
    peer: Option<Hello>,
    is_introduced: bool,
    is_ready: bool,
    peer_ready: bool,
    has_failed: bool,
}

impl Handshake {
    /// Starts a handshake with our hello.
    ///
    /// # Errors
    /// If the hello is invalid, see [`Hello::check`].
    pub fn new(mine: &Hello) -> Result<Self> {
        let mut handshake = Self::accepting();
        handshake.introduce(mine)?;
        Ok(handshake)
    }

    /// Starts a handshake of the accepting end, which need not create a queue pair before
    /// [`peer`](Self::peer) is known; then it calls [`introduce`](Self::introduce).
    pub fn accepting() -> Self {
        Self {
            out: Vec::new(),
            sent: 0,
            line: Vec::new(),
            peer: None,
            is_introduced: false,
            is_ready: false,
            peer_ready: false,
            has_failed: false,
        }
    }

    /// Queues our hello, once.
    ///
    /// # Errors
    /// If the hello is invalid, see [`Hello::check`].
    pub fn introduce(&mut self, mine: &Hello) -> Result<()> {
        mine.check()?;
        if !std::mem::replace(&mut self.is_introduced, true) {
            let magic = MAGIC.to_owned();
            let message = HandshakeMsg::Hello { magic, version: VERSION, hello: *mine };
            self.out.extend_from_slice(encode_line(&message)?.as_bytes());
        }
        Ok(())
    }

    /// Bytes to be sent.
    pub fn to_send(&self) -> &[u8] {
        &self.out[self.sent..]
    }

    /// The first `count` bytes of [`to_send`](Self::to_send) were sent.
    pub fn sent(&mut self, count: usize) {
        self.sent = self.out.len().min(self.sent.saturating_add(count));
    }

    /// Processes received bytes.
    ///
    /// # Errors
    /// If they are no valid handshake: the connection cannot be used. [`Kind::PeerLost`] if the
    /// peer refused.
    pub fn take(&mut self, bytes: &[u8]) -> Result<()> {
        if self.has_failed {
            return Err(malformed("the handshake has failed before").fix("reconnect"));
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
                return Err(malformed("the peer sent data after `ready`")
                    .fix("use the same version on both ends"));
            }
            if self.line.len() + piece.len() > MAX_LINE {
                let why = format!("a line is longer than {MAX_LINE} bytes");
                return Err(malformed(why).fix("check that the peer is a warp socket"));
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
            decode_line(line).map_err(|error| error.during("complete a handshake"))?;
        match (message, &self.peer) {
            (HandshakeMsg::Refused(why), _) => {
                Err(Error::new(Kind::PeerLost, "complete a handshake")
                    .why(format!("the peer refused: {}", printable(&why))))
            }
            (HandshakeMsg::Hello { magic, version, hello }, None) => {
                if magic != MAGIC {
                    let fix = "check the port, and that the peer is a warp socket";
                    return Err(malformed("the peer is not a warp socket").fix(fix));
                }
                if version != VERSION {
                    let why = format!("the peer has protocol version {version}, not {VERSION}");
                    let error = Error::new(Kind::Unsupported, "complete a handshake").why(why);
                    return Err(error.fix("use the same version on both ends"));
                }
                hello.check().map_err(|error| error.during("complete a handshake"))?;
                self.peer = Some(hello);
                Ok(())
            }
            (HandshakeMsg::Hello { .. }, Some(_)) => Err(malformed("the peer sent a second hello")),
            (HandshakeMsg::Ready, None) => Err(malformed("the peer sent `ready` before its hello")),
            // Our hello is not sent yet, so the peer cannot be ready.
            (HandshakeMsg::Ready, Some(_))
                if !self.is_ready && (!self.is_introduced || self.sent < self.out.len()) =>
            {
                Err(malformed("the peer sent `ready` before our hello was sent"))
            }
            (HandshakeMsg::Ready, Some(_)) => {
                self.peer_ready = true;
                Ok(())
            }
        }
    }

    /// The peer's hello, once it was received.
    pub fn peer(&self) -> Option<&Hello> {
        self.peer.as_ref()
    }

    /// Our queue pair is connected: queues `ready` for the peer.
    pub fn mark_ready(&mut self) {
        if !std::mem::replace(&mut self.is_ready, true) {
            self.enqueue(&HandshakeMsg::Ready);
        }
    }

    /// Whether [`mark_ready`](Self::mark_ready) was called.
    pub fn is_ready(&self) -> bool {
        self.is_ready
    }

    /// Fails the handshake and queues the reason for the peer.
    pub fn refuse(&mut self, why: &Error) {
        self.has_failed = true;
        self.enqueue_refusal(why);
    }

    fn enqueue_refusal(&mut self, why: &Error) {
        // JSON may escape a character as six.
        let why: String = why.to_string().chars().filter(char::is_ascii).take(150).collect();
        self.enqueue(&HandshakeMsg::Refused(why));
    }

    fn enqueue(&mut self, message: &HandshakeMsg) {
        // Our messages always encode.
        if let Ok(line) = encode_line(message) {
            self.out.extend_from_slice(line.as_bytes());
        }
    }

    /// Whether both queue pairs are connected and both ends know it.
    pub fn is_done(&self) -> bool {
        !self.has_failed && self.is_ready && self.peer_ready && self.to_send().is_empty()
    }
}

#[cold]
fn malformed(why: impl Into<std::borrow::Cow<'static, str>>) -> Error {
    Error::new(Kind::Malformed, "complete a handshake").why(why)
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
            source_port: 4791,
            lid: 0,
            gid: 0,
            mtu_on_host: 0,
            selective_repeat: true,
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

    /// Feeds bytes to an end whose own hello was sent.
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
        assert!(!end.is_done(), "our `ready` is not sent yet");
        end.sent(usize::MAX);
        assert!(end.is_done());
    }

    #[test]
    fn hellos_that_make_no_sense_are_refused_with_the_reason() {
        type Corrupt = fn(&mut serde_json::Value);
        let cases: &[(&str, Corrupt)] = &[
            ("ring_size is 4097", |h| h["ring_size"] = 4097.into()),
            ("window is 0", |h| h["window"] = 0.into()),
            ("window is 24", |h| h["window"] = 24.into()),
            ("ring_size is 0", |h| h["ring_size"] = 0.into()),
            ("ring_size is 2147483648", |h| h["ring_size"] = (1_u64 << 31).into()),
            ("exceeds the address space", |h| h["ring"]["address"] = (u64::MAX - 4).into()),
            ("`received` is at 0x9", |h| h["received"]["address"] = 9.into()),
            ("`taken` is at", |h| h["taken"]["address"] = (u64::MAX - 7).into()),
            ("MTU of 1500", |h| h["endpoint"]["mtu"] = 1500.into()),
            ("queue pair 0x1000000", |h| h["endpoint"]["qpn"] = (1 << 24).into()),
            ("version 2", |h| h["version"] = 2.into()),
            ("not a warp socket", |h| h["magic"] = "rank".into()),
            ("unexpected content", |h| h["ring"] = 3.into()),
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
            (twice, "second hello"),
            ([&hello, ready, b"x"].concat(), "data after `ready`"),
            (vec![b' '; MAX_LINE + 1], "longer than"),
            (b"GET / HTTP/1.1\r\n".to_vec(), "not a warpwire message"),
            (b"{\"warpwire\":9,\"words\":\"ready\"}\n".to_vec(), "version 9"),
            (b"{\"warpwire\":1,\"words\":{\"refused\":\"no memory\"}}\n".to_vec(), "no memory"),
        ] {
            let error = feed_bytes(&bytes).expect_err(expected);
            assert!(error.to_string().contains(expected), "{error}");
        }
        for mut early in [Handshake::new(&super::tests::hello()).unwrap(), Handshake::accepting()] {
            let error = early.take(&[&hello, ready].concat()).unwrap_err();
            assert!(error.to_string().contains("before our hello"), "{error}");
        }
    }

    #[test]
    fn an_accepting_end_introduces_itself_second() {
        let mut end = Handshake::accepting();
        end.take(&line(|_| {})).unwrap();
        assert_eq!((end.peer(), end.to_send()), (Some(&hello()), &b""[..]));
        end.introduce(&hello()).unwrap();
        end.introduce(&hello()).unwrap();
        assert_eq!(end.to_send(), Handshake::new(&hello()).unwrap().to_send(), "once");
        let bad = Hello { ring_size: 1, ..hello() };
        assert!(Handshake::accepting().introduce(&bad).is_err());
        // A stranger is refused without a hello.
        let mut end = Handshake::accepting();
        end.take(b"GET / HTTP/1.1\r\n").unwrap_err();
        assert!(std::str::from_utf8(end.to_send()).unwrap().contains("refused"));
    }

    #[test]
    fn a_queue_pair_must_be_where_the_connection_comes_from() {
        let at = |text: &str| {
            let mut hello = hello();
            hello.endpoint.address = text.parse().unwrap();
            hello
        };
        let peer: IpAddr = "10.0.0.1".parse().unwrap();
        at("10.0.0.1:4791").check_address(peer).unwrap();
        at("[::ffff:10.0.0.1]:9").check_address(peer).unwrap();
        at("10.0.0.1:9").check_address("::ffff:10.0.0.1".parse().unwrap()).unwrap();
        for other in ["10.0.0.2:4791", "[::1]:4791", "0.0.0.0:4791", "255.255.255.255:1"] {
            let error = at(other).check_address(peer).unwrap_err();
            assert!(error.to_string().contains("comes from 10.0.0.1"), "{error}");
        }
    }

    #[test]
    fn the_peer_hears_why_it_was_refused() {
        let mut end = Handshake::new(&hello()).unwrap();
        end.sent(usize::MAX);
        end.take(b"SSH-2.0\n").unwrap_err();
        let mut other = Handshake::new(&hello()).unwrap();
        let error = other.take(end.to_send()).unwrap_err();
        assert_eq!(error.kind(), &Kind::PeerLost);
        assert!(error.to_string().contains("not a warpwire message"), "{error}");
        assert!(other.take(b"").is_err(), "a failed handshake stays failed");
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

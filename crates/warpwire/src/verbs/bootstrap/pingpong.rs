//! The TCP handshake of rdma-core's `ibv_rc_pingpong`, which can thus be a peer.
//!
//! The client sends 52 bytes, `LID:QPN:PSN:GID` in hexadecimal with a terminating zero. The server
//! connects its queue pair, sends its own 52 bytes, and waits for the word `done`. Neither side
//! sends its MTU: the user must give both ends the same one (`ibv_rc_pingpong` defaults to 1024).

use std::fmt;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::str::FromStr;
use std::time::Instant;

use warpwire_proto::wire::UDP_PORT;

use super::{Bootstrap, QpEndpoint};
use crate::error::{Error, Kind, Result};

/// Length of a handshake in bytes, with its terminating zero.
pub(super) const HANDSHAKE_LEN: usize = 52;
/// Sent by the client when it has received the server's handshake, with its terminating zero.
const DONE: &[u8; 5] = b"done\0";

/// The connection data that each end of `ibv_rc_pingpong` sends.
///
/// ```
/// use warpwire::verbs::bootstrap::PingpongHandshake;
/// let text = "0000:000011:596a8a:00000000000000000000ffff0a4d0102";
/// let handshake: PingpongHandshake = text.parse()?;
/// assert_eq!((handshake.qpn, handshake.psn), (0x11, 0x596a8a));
/// assert_eq!(handshake.endpoint(1024).address, "10.77.1.2:4791".parse().unwrap());
/// assert_eq!(handshake.to_string(), text);
/// # Ok::<(), warpwire::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PingpongHandshake {
    /// LID of the port on InfiniBand; 0 on Ethernet.
    pub lid: u16,
    /// Queue pair number, 24 bits.
    pub qpn: u32,
    /// Packet sequence number of its first request, 24 bits.
    pub psn: u32,
    /// GID of the port; IPv4 addresses are mapped, as in `::ffff:10.0.0.1`.
    pub gid: Ipv6Addr,
}

impl PingpongHandshake {
    /// Converts an endpoint; its MTU and `max_rd_atomic` are lost.
    pub fn of(endpoint: &QpEndpoint) -> Self {
        let gid = match endpoint.address.ip() {
            IpAddr::V4(address) => address.to_ipv6_mapped(),
            IpAddr::V6(address) => address,
        };
        Self { lid: endpoint.lid, qpn: endpoint.qpn, psn: endpoint.psn, gid }
    }

    /// Converts to an endpoint with this MTU in bytes. `max_rd_atomic` is 1: `ibv_rc_pingpong` only
    /// sends, so RDMA reads are not used.
    pub fn endpoint(&self, mtu: u32) -> QpEndpoint {
        let address = SocketAddr::new(self.gid.to_canonical(), UDP_PORT);
        QpEndpoint {
            // Programs of rdma-core do not say it.
            source_port: 0,
            address,
            qpn: self.qpn,
            psn: self.psn,
            mtu,
            mtu_on_host: 0,
            max_rd_atomic: 1,
            lid: self.lid,
            gid: 0,
            selective_repeat: false,
        }
    }
}

impl fmt::Display for PingpongHandshake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { lid, qpn, psn, gid } = self;
        write!(f, "{lid:04x}:{qpn:06x}:{psn:06x}:{:032x}", gid.to_bits())
    }
}

impl FromStr for PingpongHandshake {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let mut parts = text.split(':');
        let mut number = |digits: usize| {
            let part = parts.next()?;
            let is_hex = part.len() == digits && part.bytes().all(|c| c.is_ascii_hexdigit());
            is_hex.then(|| u128::from_str_radix(part, 16).ok()).flatten()
        };
        let (lid, qpn, psn, gid) = (number(4), number(6), number(6), number(32));
        match (lid, qpn, psn, gid, parts.next()) {
            (Some(lid), Some(qpn), Some(psn), Some(gid), None) => Ok(Self {
                lid: lid as u16,
                qpn: qpn as u32,
                psn: psn as u32,
                gid: Ipv6Addr::from_bits(gid),
            }),
            _ => Err(Error::new(Kind::Malformed, format!("parse {text:?} as a handshake"))
                .why("it is not LID:QPN:PSN:GID in hexadecimal")
                .fix("check the port, and that the peer is ibv_rc_pingpong")),
        }
    }
}

impl Bootstrap {
    /// Sends the client's handshake and receives the server's. Post receives before this call; the
    /// server's queue pair is connected when it returns.
    ///
    /// # Errors
    /// As for [`recv`](Self::recv); also if the server has no GID, or a link-local one.
    pub fn handshake_as_client(&mut self, local: &PingpongHandshake) -> Result<PingpongHandshake> {
        let deadline = self.deadline();
        self.send_bytes(&handshake_bytes(local), deadline)?;
        let remote = self.recv_handshake(deadline)?;
        self.send_bytes(DONE, deadline)?;
        Ok(remote)
    }

    /// Receives the client's handshake, calls `connect` with it, and sends its own. `connect` must
    /// connect the queue pair: the client may send as soon as it has received the server's
    /// handshake.
    ///
    /// # Errors
    /// As for [`handshake_as_client`](Self::handshake_as_client); also the failure of `connect`.
    pub fn handshake_as_server(
        &mut self,
        local: &PingpongHandshake,
        connect: impl FnOnce(&PingpongHandshake) -> Result<()>,
    ) -> Result<PingpongHandshake> {
        let deadline = self.deadline();
        let remote = self.recv_handshake(deadline)?;
        connect(&remote)?;
        self.send_bytes(&handshake_bytes(local), deadline)?;
        if self.recv_bytes::<{ DONE.len() }>(deadline)? != *DONE {
            let error = Error::new(Kind::Malformed, format!("receive from {}", self.peer));
            return Err(error.why("it did not send \"done\"").fix("see the output of the peer"));
        }
        Ok(remote)
    }

    fn recv_handshake(&mut self, deadline: Instant) -> Result<PingpongHandshake> {
        let bytes = self.recv_bytes::<HANDSHAKE_LEN>(deadline)?;
        parse_handshake(&bytes).map_err(|error| error.during(self.what()))
    }

    fn recv_bytes<const LEN: usize>(&mut self, deadline: Instant) -> Result<[u8; LEN]> {
        loop {
            if let Some(bytes) = self.buffered.first_chunk::<LEN>().copied() {
                self.buffered.drain(..LEN);
                self.scanned = 0;
                return Ok(bytes);
            }
            self.fill_until(deadline)?;
        }
    }
}

/// Parses and checks the bytes of a handshake.
pub(super) fn parse_handshake(bytes: &[u8]) -> Result<PingpongHandshake> {
    let text = bytes.split(|byte| *byte == 0).next().unwrap_or_default();
    let handshake: PingpongHandshake = String::from_utf8_lossy(text).parse()?;
    let error = || Error::new(Kind::Unsupported, "use a handshake");
    if handshake.gid.is_unspecified() {
        return Err(error()
            .why("the peer sent no GID, which Ethernet requires")
            .fix("start ibv_rc_pingpong with -g and the index of one of its GIDs"));
    }
    if handshake.gid.is_unicast_link_local() {
        return Err(error()
            .why(format!("its GID {} is link-local", handshake.gid))
            .fix("start it with -g and the index of an IPv4 or global IPv6 GID"));
    }
    Ok(handshake)
}

fn handshake_bytes(handshake: &PingpongHandshake) -> [u8; HANDSHAKE_LEN] {
    let mut bytes = [0; HANDSHAKE_LEN];
    let text = handshake.to_string();
    // Truncated, so that oversized fields (which no device has) cannot overwrite the final zero.
    let len = text.len().min(HANDSHAKE_LEN - 1);
    bytes[..len].copy_from_slice(&text.as_bytes()[..len]);
    bytes
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::{TcpListener, TcpStream};
    use std::time::Duration;

    use super::*;

    const SOON: Duration = Duration::from_secs(10);
    const TEXT: &str = "0000:000011:f6e120:fd770001000000000000000000000002";

    fn handshake() -> PingpongHandshake {
        TEXT.parse().unwrap()
    }

    fn listener() -> (TcpListener, SocketAddr) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        (listener, address)
    }

    /// Runs the server's handshake with a client that sends `bytes`.
    fn serve(bytes: &[u8]) -> Result<PingpongHandshake> {
        let (listener, address) = listener();
        let mut client = TcpStream::connect(address).unwrap();
        client.write_all(bytes).unwrap();
        client.shutdown(std::net::Shutdown::Write).unwrap();
        let mut bootstrap = Bootstrap::accept(&listener, SOON).unwrap();
        bootstrap.handshake_as_server(&handshake(), |_| Ok(()))
    }

    #[test]
    fn endpoints_round_trip() {
        let six = handshake();
        assert_eq!(six.endpoint(2048).address, "[fd77:1::2]:4791".parse().unwrap());
        assert_eq!(PingpongHandshake::of(&six.endpoint(2048)), six);
        assert_eq!(six.endpoint(2048).mtu, 2048);
        let four =
            "0000:ffffff:000000:00000000000000000000ffff7f000001".parse::<PingpongHandshake>();
        let four = four.unwrap();
        assert_eq!(four.endpoint(256).address, "127.0.0.1:4791".parse().unwrap());
        assert_eq!(PingpongHandshake::of(&four.endpoint(256)), four);
    }

    #[test]
    fn malformed_text_is_rejected() {
        for text in [
            "",
            "0000:000011:f6e120",
            "0000:000011:f6e120:fd77",
            "0000:00001x:f6e120:fd770001000000000000000000000002",
            "0000:+00011:f6e120:fd770001000000000000000000000002",
            "000:0000011:f6e120:fd770001000000000000000000000002",
            "0000:000011:f6e120:fd770001000000000000000000000002:1",
        ] {
            assert_eq!(
                text.parse::<PingpongHandshake>().unwrap_err().kind(),
                &Kind::Malformed,
                "{text}"
            );
        }
    }

    #[test]
    fn both_ends_complete_the_handshake() {
        let (listener, address) = listener();
        let client = std::thread::spawn(move || {
            let mut bootstrap = Bootstrap::connect(address, SOON).unwrap();
            bootstrap.handshake_as_client(&handshake()).unwrap()
        });
        let mut bootstrap = Bootstrap::accept(&listener, SOON).unwrap();
        let local = PingpongHandshake { psn: 7, ..handshake() };
        let mut connected = None;
        let received = bootstrap.handshake_as_server(&local, |remote| {
            connected = Some(*remote);
            Ok(())
        });
        assert_eq!((received.unwrap(), connected), (handshake(), Some(handshake())));
        assert_eq!(client.join().unwrap(), local);
    }

    #[test]
    fn malformed_client_handshakes_are_rejected() {
        let fine = [TEXT.as_bytes(), b"\0done\0"].concat();
        assert_eq!(serve(&fine).unwrap(), handshake());
        let kind = |bytes: &[u8]| serve(bytes).unwrap_err().kind().clone();
        assert_eq!(
            kind(b"GET / HTTP/1.1\r\nHost: 127.0.0.1:18515\r\n\r\n and more bytes"),
            Kind::Malformed
        );
        assert_eq!(kind(&[0xff; 60]), Kind::Malformed);
        assert_eq!(kind(&fine[..40]), Kind::Freed);
        assert_eq!(kind(&fine[..54]), Kind::Freed);
        assert_eq!(kind(&[TEXT.as_bytes(), b"\0gone\0"].concat()), Kind::Malformed);
        let none = "0000:000011:f6e120:00000000000000000000000000000000\0done\0";
        let error = serve(none.as_bytes()).unwrap_err();
        assert!(error.advice().is_some_and(|fix| fix.contains("-g")), "{error}");
        let local = "0000:000011:f6e120:fe80000000000000505400fffe770001\0done\0";
        let error = serve(local.as_bytes()).unwrap_err();
        assert!(error.to_string().contains("fe80::5054:ff:fe77:1 is link-local"), "{error}");
    }
}

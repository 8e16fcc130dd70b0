//! Messages of connection set-up over a non-blocking TCP stream: a length and JSON, after a
//! preamble with the secret of the handle. Nothing that arrives is trusted, and no call waits.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use warpwire::units::printable;
use warpwire::verbs::{QpEndpoint, Remote};

use crate::handle::Cookie;
use crate::result::{Failure, REMOTE, Result};

/// Version of the messages and of the protocol behind them.
const PREAMBLE: &[u8; 8] = b"warpncc1";
const PREAMBLE_LEN: usize = 24;
/// Maximum bytes of a message: eight queue pairs take some 2 KiB.
const MAX_LEN: usize = 16 << 10;

/// What the sender offers: its queue pairs, and where descriptors of receives go.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Hello {
    pub endpoints: Vec<QpEndpoint>,
    /// The ring of descriptors, for each queue pair.
    pub ring: Vec<Remote>,
    /// Minimum bytes of a part of a message.
    pub stripe: u64,
}

/// What the receiver answers: as many queue pairs as both ends have, and where its words are.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Reply {
    pub endpoints: Vec<QpEndpoint>,
    pub words: Vec<Remote>,
}

/// The sender's queue pairs are connected.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Ready {
    pub ready: bool,
}

/// Why nothing was read.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum ReadError {
    /// The peer closed the connection.
    Closed,
    /// What it sent is not of this protocol.
    Malformed(String),
}

/// A stream with what was read and what is to be written.
#[derive(Debug)]
pub(crate) struct Frames {
    stream: TcpStream,
    input: Vec<u8>,
    output: Vec<u8>,
}

impl Frames {
    /// # Errors
    /// If the stream cannot be made non-blocking.
    pub(crate) fn new(stream: TcpStream) -> Result<Self> {
        stream.set_nonblocking(true)?;
        // Only latency suffers without.
        let _ = stream.set_nodelay(true);
        Ok(Self { stream, input: Vec::new(), output: Vec::new() })
    }

    pub(crate) fn stream(&self) -> &TcpStream {
        &self.stream
    }

    /// The stream, once set-up is over: no byte behind the last message has been read.
    pub(crate) fn into_stream(self) -> TcpStream {
        self.stream
    }

    /// Whether all that was queued is written.
    pub(crate) fn is_flushed(&self) -> bool {
        self.output.is_empty()
    }

    pub(crate) fn queue_preamble(&mut self, cookie: &Cookie) {
        self.output.extend_from_slice(PREAMBLE);
        self.output.extend_from_slice(cookie);
    }

    /// # Errors
    /// If the value cannot be serialized.
    pub(crate) fn queue<T: Serialize>(&mut self, message: &T) -> Result {
        let text = serde_json::to_vec(message).map_err(std::io::Error::from)?;
        self.output.extend_from_slice(&(text.len() as u32).to_le_bytes());
        self.output.extend_from_slice(&text);
        Ok(())
    }

    /// Writes what is queued, as far as that is possible at once; returns whether all is written.
    ///
    /// # Errors
    /// If the connection has failed.
    pub(crate) fn flush(&mut self) -> Result<bool> {
        while !self.output.is_empty() {
            match self.stream.write(&self.output) {
                Ok(written) => drop(self.output.drain(..written)),
                Err(why) if why.kind() == ErrorKind::WouldBlock => return Ok(false),
                Err(why) if why.kind() == ErrorKind::Interrupted => {}
                Err(why) => return Err(Failure::new(REMOTE, why)),
            }
        }
        Ok(true)
    }

    /// Reads until `len` bytes are there; returns whether they are.
    fn fill(&mut self, len: usize) -> std::result::Result<bool, ReadError> {
        let mut buffer = [0; 4096];
        while self.input.len() < len {
            let room = buffer.len().min(len - self.input.len());
            match self.stream.read(&mut buffer[..room]) {
                Ok(0) => return Err(ReadError::Closed),
                Ok(read) => self.input.extend_from_slice(&buffer[..read]),
                Err(why) if why.kind() == ErrorKind::WouldBlock => return Ok(false),
                Err(why) if why.kind() == ErrorKind::Interrupted => {}
                Err(_) => return Err(ReadError::Closed),
            }
        }
        Ok(true)
    }

    /// Reads the preamble of a connection; returns whether it is there and has this secret.
    pub(crate) fn read_preamble(
        &mut self,
        cookie: &Cookie,
    ) -> std::result::Result<bool, ReadError> {
        if !self.fill(PREAMBLE_LEN)? {
            return Ok(false);
        }
        let wrong = |why: &str| Err(ReadError::Malformed(why.to_owned()));
        if !self.input.starts_with(PREAMBLE) {
            return wrong("not a connection of this plugin, or of another version");
        }
        // No early end: how long a comparison takes says nothing about the secret.
        let difference = self.input[8..PREAMBLE_LEN].iter().zip(cookie).map(|(a, b)| a ^ b);
        if difference.fold(0, |sum, byte| sum | byte) != 0 {
            return wrong("it does not have the handle's secret");
        }
        self.input.clear();
        Ok(true)
    }

    /// The next message, if it has arrived.
    pub(crate) fn read<T: DeserializeOwned>(
        &mut self,
    ) -> std::result::Result<Option<T>, ReadError> {
        if !self.fill(4)? {
            return Ok(None);
        }
        let len = self.input.first_chunk().map_or(0, |len| u32::from_le_bytes(*len) as usize);
        if len > MAX_LEN {
            return Err(ReadError::Malformed(format!("a message of {len} bytes")));
        }
        if !self.fill(4 + len)? {
            return Ok(None);
        }
        let parsed = serde_json::from_slice(&self.input[4..4 + len]);
        self.input.clear();
        parsed.map(Some).map_err(|why| ReadError::Malformed(printable(&why.to_string())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    fn pair() -> (Frames, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let other = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (Frames::new(listener.accept().unwrap().0).unwrap(), other)
    }

    #[test]
    fn messages_arrive_in_pieces() {
        let (mut frames, mut other) = pair();
        let mut bytes = [PREAMBLE.as_slice(), &[9; 16]].concat();
        let text = br#"{"ready":true}"#;
        bytes.extend_from_slice(&(text.len() as u32).to_le_bytes());
        bytes.extend_from_slice(text);
        let (mut has_preamble, mut ready) = (false, None);
        for byte in bytes {
            assert!(ready.is_none());
            other.write_all(&[byte]).unwrap();
            testkit::until("the byte arrives", || {
                let mut peeked = [0; 1];
                frames.stream.peek(&mut peeked).is_ok()
            });
            if has_preamble {
                ready = frames.read::<Ready>().unwrap();
            } else {
                has_preamble = frames.read_preamble(&[9; 16]).unwrap();
            }
        }
        assert!(ready.is_some_and(|message| message.ready));
        drop(other);
        testkit::until("the end is seen", || {
            frames.read::<Ready>().is_err_and(|why| why == ReadError::Closed)
        });
    }

    #[test]
    fn strangers_are_refused() {
        let sent = |bytes: &[u8]| {
            let (frames, mut other) = pair();
            other.write_all(bytes).unwrap();
            (frames, other)
        };
        let refused = |bytes: &[u8]| {
            let (mut frames, _other) = sent(bytes);
            let mut outcome = Ok(false);
            testkit::until("an answer", || {
                outcome = frames.read_preamble(&[9; 16]);
                outcome != Ok(false)
            });
            matches!(outcome, Err(ReadError::Malformed(_)))
        };
        assert!(refused(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"));
        assert!(refused(&[PREAMBLE.as_slice(), &[8; 16]].concat()), "another secret");
        for bytes in [
            [&(MAX_LEN as u32 + 1).to_le_bytes()[..], b""].concat(),
            [&u32::MAX.to_le_bytes()[..], b"x"].concat(),
            [&2_u32.to_le_bytes()[..], b"{]"].concat(),
            [&2_u32.to_le_bytes()[..], b"{}"].concat(),
        ] {
            let (mut frames, _other) = sent(&bytes);
            testkit::until("a refusal", || {
                matches!(frames.read::<Ready>(), Err(ReadError::Malformed(_)))
            });
        }
    }
}

//! What an agent tells others about itself: bytes that a store or a socket carries.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use super::check_name;
use super::options::MAX_RAILS;
use crate::error::{Error, Kind, Result};
use crate::verbs::bootstrap::{decode_line, encode_line};

/// Version of the format; readers refuse others.
const VERSION: u32 = 1;
/// Longer metadata is refused unread.
const MAX_LEN: usize = 256 << 20;

/// An agent, and memory of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Metadata {
    agent_version: u32,
    pub name: String,
    /// A number that no other agent has, also not a later one of the same name.
    pub incarnation: u64,
    /// Where it listens for peers.
    pub address: SocketAddr,
    /// Whoever connects must know it.
    pub token: String,
    /// Number of its devices.
    pub rails: usize,
    /// Whether `memory` is a part of what the agent has registered.
    pub partial: bool,
    pub memory: Vec<MemoryMetadata>,
}

/// Registered memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct MemoryMetadata {
    pub address: u64,
    pub len: u64,
    /// What it is: `host`, `cuda:0`, `sim:1`.
    pub kind: String,
    /// One key per rail.
    pub rkeys: Vec<u32>,
}

impl Metadata {
    pub(super) fn new(
        (name, incarnation, token): (&str, u64, &str),
        address: SocketAddr,
        rails: usize,
        memory: Vec<MemoryMetadata>,
        partial: bool,
    ) -> Self {
        let (name, token) = (name.to_owned(), token.to_owned());
        let agent_version = VERSION;
        Self { agent_version, name, incarnation, address, token, rails, partial, memory }
    }

    pub(super) fn encode(&self) -> Result<Vec<u8>> {
        Ok(encode_line(self)?.into_bytes())
    }

    /// # Errors
    /// If the bytes are not what [`encode`](Self::encode) makes.
    pub(super) fn decode(bytes: &[u8]) -> Result<Self> {
        let what = "read the metadata of an agent";
        let fix = "get the peer's metadata again, from the same version of warpwire";
        let wrong = |why: String| Error::new(Kind::Malformed, what).why(why).fix(fix);
        if bytes.len() > MAX_LEN {
            return Err(wrong(format!("it is longer than {MAX_LEN} bytes")));
        }
        if bytes.is_empty() {
            return Err(wrong("it is empty".into()));
        }
        // The version first: the rest of another version may look different.
        #[derive(Deserialize)]
        struct Version {
            agent_version: u32,
        }
        let refused = |error: Error| error.during(what).fix(fix);
        let Version { agent_version } = decode_line(bytes).map_err(refused)?;
        if agent_version != VERSION {
            let why = format!("it has version {agent_version}, and this program reads {VERSION}");
            return Err(Error::new(Kind::Unsupported, what).why(why).fix(fix));
        }
        let read: Self = decode_line(bytes).map_err(refused)?;
        check_name(&read.name).map_err(|error| wrong(error.reason().to_owned()))?;
        if !(1..=MAX_RAILS).contains(&read.rails) {
            return Err(wrong(format!("it has {} devices", read.rails)));
        }
        for memory in &read.memory {
            let ends = memory.address.checked_add(memory.len).is_some();
            if !ends || memory.len == 0 || memory.rkeys.len() != read.rails {
                return Err(wrong(format!("its memory at {:#x} is malformed", memory.address)));
            }
        }
        Ok(read)
    }
}

/// For the fuzzer: whether bytes are metadata. What is read must be readable again when it is
/// written, and the same.
#[doc(hidden)]
#[allow(clippy::unwrap_used, reason = "a panic is what the fuzzer looks for")]
pub fn is_metadata(bytes: &[u8]) -> bool {
    let Ok(read) = Metadata::decode(bytes) else { return false };
    assert_eq!(Metadata::decode(&read.encode().unwrap()).unwrap(), read);
    assert!(!read.name.is_empty() && !read.name.contains(char::is_control));
    assert!(read.memory.iter().all(|memory| memory.rkeys.len() == read.rails));
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    fn metadata() -> Metadata {
        let memory = |address, len| MemoryMetadata {
            address,
            len,
            kind: "host".into(),
            rkeys: vec![1, u32::MAX],
        };
        let address = "127.0.0.1:7".parse().unwrap();
        let memory = vec![memory(0, 1), memory(u64::MAX - 9, 9)];
        Metadata::new(("alice", u64::MAX, "abc"), address, 2, memory, false)
    }

    #[test]
    fn metadata_is_read_as_it_was_written() {
        let bytes = metadata().encode().unwrap();
        assert_eq!(Metadata::decode(&bytes).unwrap(), metadata());
    }

    #[test]
    fn other_bytes_are_refused_with_the_reason() {
        let good = String::from_utf8(metadata().encode().unwrap()).unwrap();
        let refused = |bytes: &[u8], why: &str| {
            let error = Metadata::decode(bytes).unwrap_err();
            assert!(error.to_string().contains(why), "{error}");
            assert!(error.to_string().contains("get the peer's metadata again"), "{error}");
        };
        refused(b"", "empty");
        refused(&[0xff; 100], "not a warpwire message");
        for len in 1..good.len() - 2 {
            refused(&good.as_bytes()[..len], "not a warpwire message");
        }
        for (from, to, why) in [
            ("\"agent_version\":1", "\"agent_version\":2", "version 2"),
            ("alice", "", "empty"),
            ("alice", "a\\u001b[2J", "control characters"),
            ("\"rails\":2", "\"rails\":3", "malformed"),
            ("\"rails\":2", "\"rails\":0", "0 devices"),
            ("\"len\":9", "\"len\":10", "malformed"),
            ("\"len\":1,", "\"len\":0,", "malformed"),
            ("\"len\":1,", "\"len\":-1,", "unexpected content"),
            ("\"address\":\"127.0.0.1:7\"", "\"address\":\"here\"", "unexpected content"),
        ] {
            assert!(good.contains(from), "{from}");
            refused(good.replace(from, to).as_bytes(), why);
        }
    }
}

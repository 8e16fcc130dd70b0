//! The handle that a listener gives to its peer: NCCL carries these bytes to the sending rank.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use crate::abi::HandleBytes;
use crate::result::{Failure, INVALID_ARGUMENT, Result};

/// `NCCL_NET_HANDLE_MAXSIZE`.
pub(crate) const HANDLE_LEN: usize = 128;
const MAGIC: &[u8; 8] = b"warpwir1";

/// A secret that only NCCL's ranks know: connections without it are strangers.
pub(crate) type Cookie = [u8; 16];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ConnectHandle {
    pub address: SocketAddr,
    pub cookie: Cookie,
}

impl ConnectHandle {
    pub(crate) fn bytes(&self) -> HandleBytes {
        let ip = match self.address.ip() {
            IpAddr::V4(ip) => ip.to_ipv6_mapped(),
            IpAddr::V6(ip) => ip,
        };
        let mut bytes = [0; HANDLE_LEN];
        bytes[..8].copy_from_slice(MAGIC);
        bytes[8..24].copy_from_slice(&ip.octets());
        bytes[24..26].copy_from_slice(&self.address.port().to_be_bytes());
        bytes[32..48].copy_from_slice(&self.cookie);
        bytes
    }

    /// # Errors
    /// If the bytes are not a handle of this library.
    pub(crate) fn parse(bytes: &HandleBytes) -> Result<Self> {
        let wrong = || Failure::new(INVALID_ARGUMENT, "this handle is not from this plugin");
        let field = |at: usize| bytes.get(at..at + 16).and_then(|field| field.try_into().ok());
        let ip: [u8; 16] = field(8).ok_or_else(wrong)?;
        let cookie: Cookie = field(32).ok_or_else(wrong)?;
        let ip = Ipv6Addr::from(ip);
        let ip = ip.to_ipv4_mapped().map_or(IpAddr::V6(ip), IpAddr::V4);
        let port = u16::from_be_bytes([bytes[24], bytes[25]]);
        if &bytes[..8] != MAGIC || port == 0 {
            return Err(wrong());
        }
        Ok(Self { address: SocketAddr::new(ip, port), cookie })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handles_survive_the_trip() {
        for address in ["10.1.2.3:4", "[2001:db8::1]:65535"] {
            let handle = ConnectHandle { address: address.parse().unwrap(), cookie: [7; 16] };
            assert_eq!(ConnectHandle::parse(&handle.bytes()), Ok(handle));
        }
    }

    #[test]
    fn other_bytes_are_refused() {
        let handle = ConnectHandle { address: "10.1.2.3:4".parse().unwrap(), cookie: [7; 16] };
        let mut other = handle.bytes();
        other[7] ^= 1;
        let mut portless = handle.bytes();
        portless[24..26].fill(0);
        for bytes in [[0; HANDLE_LEN], [255; HANDLE_LEN], other, portless] {
            assert_eq!(ConnectHandle::parse(&bytes).unwrap_err().code, INVALID_ARGUMENT);
        }
    }
}

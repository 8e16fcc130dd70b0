//! Parses `--link` and opens the link.

use std::net::{IpAddr, SocketAddr};
use std::path::Path;

use warpwire::link::fault::FaultPlan;
use warpwire::link::{Auto, Capture, FaultInjector, Link, Shm, ShmOptions, Tap, Udp, UdpOptions};

use crate::output::Failure;

/// Checks the syntax of `--link`.
pub(crate) fn check(text: &str) -> Result<(), String> {
    parse(text).map(drop)
}

enum Choice {
    /// UDP, bound to that address; default: our address on the TCP connection.
    Udp(Option<SocketAddr>),
    /// Shared memory, under the name of that address.
    Shm(Option<SocketAddr>),
    /// Shared memory if the peer is on this machine, else UDP.
    Auto(Option<SocketAddr>),
}

fn parse(text: &str) -> Result<Choice, String> {
    let (kind, rest) = match text.split_once(':') {
        Some((kind, rest)) => (kind, Some(rest)),
        None => (text, None),
    };
    let choice = match kind {
        "udp" => Choice::Udp,
        "shm" => Choice::Shm,
        "auto" => Choice::Auto,
        _ => {
            return Err(format!(
                "there is no link {kind:?}; write udp, shm or auto, or udp:ADDRESS:PORT"
            ));
        }
    };
    let Some(address) = rest else { return Ok(choice(None)) };
    address.parse().map(|address| choice(Some(address))).map_err(|_| {
        format!(
            "{address:?} is not an address with a port; \
             write {kind}:127.0.0.1:0 or {kind}:[::1]:4791"
        )
    })
}

/// Whether a device on that link may have several engines.
pub(crate) fn has_engines(text: &str) -> bool {
    const ROCE_PORT: u16 = 4791;
    match parse(text) {
        Ok(Choice::Udp(address)) => address.is_none_or(|address| address.port() != ROCE_PORT),
        _ => false,
    }
}

/// Opens the link, with packet capture (up to a length) and fault injection if given. `local_ip` is
/// the default address, with any port.
pub(crate) fn make(
    text: &str,
    local_ip: IpAddr,
    faults: Option<FaultPlan>,
    pcap: Option<(&Path, u64)>,
) -> Result<(Box<dyn Link>, Option<Capture>), Failure> {
    let or_local = |address: Option<SocketAddr>| address.unwrap_or(SocketAddr::new(local_ip, 0));
    let link: Box<dyn Link> = match parse(text).map_err(Failure::Usage)? {
        Choice::Udp(address) => Box::new(Udp::bind(or_local(address), UdpOptions::from_env()?)?),
        Choice::Shm(address) => Box::new(Shm::bind(or_local(address), ShmOptions::from_env()?)?),
        Choice::Auto(address) => {
            let (udp, shm) = (UdpOptions::from_env()?, ShmOptions::from_env()?);
            Box::new(Auto::bind(or_local(address), udp, shm)?)
        }
    };
    let capture = match pcap {
        Some((path, max_bytes)) => Some(Capture::create(path)?.with_max_bytes(max_bytes)),
        None => None,
    };
    let link = match &capture {
        Some(capture) => Box::new(Tap::new(link, capture)),
        None => link,
    };
    let link = match faults {
        Some(plan) => Box::new(FaultInjector::new(link, plan)),
        None => link,
    };
    Ok((link, capture))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_udp_outside_the_port_of_roce_has_engines() {
        for several in ["udp", "udp:127.0.0.1:0", "udp:[::1]:7000"] {
            assert!(has_engines(several), "{several}");
        }
        for one in ["udp:[::1]:4791", "shm", "auto", "auto:127.0.0.1:7", "tcp"] {
            assert!(!has_engines(one), "{one}");
        }
    }

    #[test]
    fn link_names_are_parsed() {
        for good in ["udp", "udp:127.0.0.1:0", "udp:[::1]:4791", "shm", "auto:127.0.0.1:7"] {
            assert_eq!(check(good), Ok(()), "{good}");
        }
        for bad in ["", "tcp", "udp:", "udp:localhost", "udp:127.0.0.1", "shm:", ":0"] {
            assert!(check(bad).is_err(), "{bad}");
        }
    }
}

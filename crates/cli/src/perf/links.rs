//! Links by name: the one place where a link is made from what a user wrote.

use std::net::{IpAddr, SocketAddr};
use std::path::Path;

use warpwire::link::fault::Plan;
use warpwire::link::{Capture, Fault, Link, Tap, Udp, udp};

use crate::output::Failure;

/// Whether a link of that name can be made at all.
pub(super) fn check(text: &str) -> Result<(), String> {
    parse(text).map(drop)
}

enum Choice {
    /// By UDP, from that address; without one, from that at which the peer sees us.
    Udp(Option<SocketAddr>),
}

fn parse(text: &str) -> Result<Choice, String> {
    let (kind, rest) = match text.split_once(':') {
        Some((kind, rest)) => (kind, Some(rest)),
        None => (text, None),
    };
    match (kind, rest) {
        ("udp", None) => Ok(Choice::Udp(None)),
        ("udp", Some(address)) => match address.parse() {
            Ok(address) => Ok(Choice::Udp(Some(address))),
            Err(_) => Err(format!(
                "{address:?} is not an address with a port; write udp:127.0.0.1:0 or udp:[::1]:4791"
            )),
        },
        _ => Err(format!("there is no link {kind:?}; write udp or udp:ADDRESS:PORT")),
    }
}

/// Makes it. `seen` is the address at which the peer sees this machine.
pub(super) fn make(
    text: &str,
    seen: IpAddr,
    faults: Option<Plan>,
    pcap: Option<&Path>,
) -> Result<(Box<dyn Link>, Option<Capture>), Failure> {
    let link: Box<dyn Link> = match parse(text).map_err(Failure::Usage)? {
        Choice::Udp(address) => {
            let address = address.unwrap_or_else(|| SocketAddr::new(seen, 0));
            Box::new(Udp::bind(address, udp::Options::from_env()?)?)
        }
    };
    let capture = pcap.map(Capture::create).transpose()?;
    let link = match &capture {
        Some(capture) => Box::new(Tap::new(link, capture)),
        None => link,
    };
    let link = match faults {
        Some(plan) => Box::new(Fault::new(link, plan)),
        None => link,
    };
    Ok((link, capture))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read() {
        for good in ["udp", "udp:127.0.0.1:0", "udp:[::1]:4791"] {
            assert_eq!(check(good), Ok(()), "{good}");
        }
        for bad in ["", "tcp", "udp:", "udp:localhost", "udp:127.0.0.1", ":0"] {
            assert!(check(bad).is_err(), "{bad}");
        }
    }
}

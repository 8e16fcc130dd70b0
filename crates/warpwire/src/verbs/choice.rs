//! Which device the ranks of a communicator or an agent use.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::str::FromStr;

use super::{Context, DeviceOptions, HcaOptions};
use crate::error::{Error, Kind, Result};
use crate::link::{Auto, Hub, Shm, ShmOptions, Udp, UdpOptions};

/// The device of a communicator or an agent: a software HCA on a link, or hardware.
///
/// ```
/// use warpwire::verbs::LinkChoice;
/// assert!(matches!("udp".parse(), Ok(LinkChoice::Udp)));
/// // `device:mlx5_0` opens that device; here there is none of this name.
/// assert!("device:none_0".parse::<LinkChoice>().is_err());
/// ```
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub enum LinkChoice {
    /// A software HCA: shared memory to peers on the same machine, UDP to others.
    #[default]
    Auto,
    /// A software HCA on UDP.
    Udp,
    /// A software HCA on shared memory: all peers are on this machine.
    Shm,
    /// A software HCA on a hub in this process's memory: all peers are in this process.
    Hub(Hub),
    /// An open device, such as an [RDMA device of this machine](Context::open_device).
    Device(Context),
}

/// What precedes the name of an RDMA device.
const DEVICE: &str = "device:";

impl FromStr for LinkChoice {
    type Err = Error;

    /// `auto`, `udp`, `shm`, `device:NAME` or `device:NAME:PORT`: the last two open the device.
    fn from_str(text: &str) -> Result<Self> {
        match text {
            "auto" => Ok(Self::Auto),
            "udp" => Ok(Self::Udp),
            "shm" => Ok(Self::Shm),
            _ => match text.strip_prefix(DEVICE) {
                Some(name) => open_device(name).map(Self::Device),
                None => Err(unknown(text, "unknown link")),
            },
        }
    }
}

impl fmt::Display for LinkChoice {
    /// As it is parsed, without a port; `hub`, and `device:soft` for a software HCA.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Udp => f.write_str("udp"),
            Self::Shm => f.write_str("shm"),
            Self::Hub(_) => f.write_str("hub"),
            Self::Device(context) => {
                let name = context.device().map_or("soft", |device| &device.device().name);
                write!(f, "{DEVICE}{name}")
            }
        }
    }
}

/// Opens `NAME` or `NAME:PORT`.
fn open_device(text: &str) -> Result<Context> {
    let Some((name, port)) = text.split_once(':') else { return Context::open_device(text) };
    let wrong = |_| unknown(&format!("{DEVICE}{text}"), "the port is not a number from 1 to 255");
    let port: std::num::NonZeroU8 = port.parse().map_err(wrong)?;
    Context::open_device_with(name, DeviceOptions::default().with_port(port.get()))
}

#[cold]
fn unknown(text: &str, why: &'static str) -> Error {
    Error::new(Kind::Malformed, format!("use link {text:?}"))
        .why(why)
        .fix("use auto, udp, shm, or device:NAME for an RDMA device such as device:mlx5_0")
}

impl LinkChoice {
    /// The device; a software HCA is opened with these options at a free port of this address, by
    /// default that of the default route, or 127.0.0.1 without one.
    pub fn open_context(&self, address: Option<IpAddr>, options: HcaOptions) -> Result<Context> {
        self.open(SocketAddr::new(address.unwrap_or_else(default_address), 0), options)
    }

    /// The device; a software HCA is opened with these options, at this address.
    pub(crate) fn open(&self, at: SocketAddr, options: HcaOptions) -> Result<Context> {
        match self {
            Self::Auto => {
                let link = Auto::bind(at, UdpOptions::from_env()?, ShmOptions::from_env()?)?;
                Context::open_with(link, options)
            }
            Self::Udp => Context::open_with(Udp::bind(at, UdpOptions::from_env()?)?, options),
            Self::Shm => Context::open_with(Shm::bind(at, ShmOptions::from_env()?)?, options),
            Self::Hub(hub) => Context::open_with(hub.endpoint(at)?, options),
            Self::Device(context) => Ok(context.clone()),
        }
    }
}

/// The address that packets to other networks leave from; the loopback address without a route.
fn default_address() -> IpAddr {
    let route = || {
        // Connecting a UDP socket sends nothing. The address is one kept for documentation.
        let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).ok()?;
        socket.connect((Ipv4Addr::new(192, 0, 2, 1), 9)).ok()?;
        socket.local_addr().ok().map(|address| address.ip())
    };
    route().unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST))
}

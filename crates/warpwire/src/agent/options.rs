//! Options of an agent, and the devices that they ask for.

use std::net::IpAddr;
use std::time::Duration;

use crate::error::{Error, Kind, Result};
use crate::verbs::{Context, HcaOptions, LinkChoice, ProgressMode};

/// Options of an [`Agent`](super::Agent).
///
/// ```
/// use std::time::Duration;
/// use warpwire::agent::AgentOptions;
/// use warpwire::verbs::LinkChoice;
/// let options = AgentOptions::default().with_link(LinkChoice::Shm).with_queue_pairs(2);
/// assert_eq!((options.queue_pairs, options.connect_timeout), (2, Duration::from_secs(10)));
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct AgentOptions {
    /// Devices to use, one rail each: a transfer's ranges are spread over all of them. Peers have
    /// equally many, and the first is connected to the first. Empty (the default): one device, by
    /// `link`, `address` and `engines`.
    pub rails: Vec<Context>,
    /// The device: a software HCA and its link, or hardware.
    pub link: LinkChoice,
    /// The software HCA's address. Default: the one that the default route uses, or 127.0.0.1
    /// without one.
    pub address: Option<IpAddr>,
    /// Threads that process packets, 1 to 16. Default: 1, the program's own while it polls. More
    /// are as many software HCAs with a thread each, and transfers are spread over them: peers need
    /// as many. Devices have engines of their own.
    pub engines: u32,
    /// Queue pairs per peer and rail, 1 (the default) to 16. With more than one, a notification
    /// waits until all data is acknowledged.
    pub queue_pairs: usize,
    /// Work requests in flight per queue pair, 16 to 4096. Default: 1024.
    pub send_depth: u32,
    /// How long connecting to a peer may take. Default: 10 s.
    pub connect_timeout: Duration,
    /// Notifications that wait to be taken, in bytes with 64 each: when there are more, peers that
    /// notify wait. Default: 64 MiB.
    pub max_pending_notifications: u64,
}

setters! {
    AgentOptions {
        with_rails => rails: Vec<Context>,
        with_link => link: LinkChoice,
        with_engines => engines: u32,
        with_queue_pairs => queue_pairs: usize,
        with_send_depth => send_depth: u32,
        with_connect_timeout => connect_timeout: Duration,
        with_max_pending_notifications => max_pending_notifications: u64,
    } optional {
        with_address => address: IpAddr,
    }
}

impl Default for AgentOptions {
    fn default() -> Self {
        Self {
            rails: Vec::new(),
            link: LinkChoice::default(),
            address: None,
            engines: 1,
            queue_pairs: 1,
            send_depth: 1024,
            connect_timeout: Duration::from_secs(10),
            max_pending_notifications: 64 << 20,
        }
    }
}

/// How long the thread of an engine spins before it sleeps.
const ENGINE_SPIN: Duration = Duration::from_micros(50);
/// The most rails.
pub(super) const MAX_RAILS: usize = 16;
/// The most queue pairs per peer and rail.
pub(super) const MAX_QUEUE_PAIRS: usize = 16;

impl AgentOptions {
    /// These options, modified by `WARPWIRE_LINK` (see [`LinkChoice`]), `WARPWIRE_ADDRESS` (an IP
    /// address of this machine) and `WARPWIRE_ENGINES` (a number) where they are set.
    ///
    /// # Errors
    /// [`Kind::Malformed`] if a variable cannot be parsed; as for [`Context::open_device`] if it
    /// names a device.
    pub fn with_env(mut self) -> Result<Self> {
        if let Ok(text) = std::env::var("WARPWIRE_LINK") {
            self.link = text.parse()?;
        }
        if let Ok(text) = std::env::var("WARPWIRE_ADDRESS") {
            let address = text.parse().map_err(|_| {
                Error::new(Kind::Malformed, format!("use address {text:?}"))
                    .why("WARPWIRE_ADDRESS is no IP address")
                    .fix("set it to an IP address of this machine, or unset it")
            })?;
            self.address = Some(address);
        }
        if let Ok(text) = std::env::var("WARPWIRE_ENGINES") {
            self.engines = text.parse().map_err(|_| {
                Error::new(Kind::Malformed, format!("use {text:?} engines"))
                    .why("WARPWIRE_ENGINES is no number")
                    .fix("set it to a number from 1 to 16, or unset it")
            })?;
        }
        Ok(self)
    }

    pub(super) fn check(&self) -> Result<()> {
        let wrong =
            |why: &'static str| Err(Error::new(Kind::InvalidArgument, "open an agent").why(why));
        match self {
            _ if self.rails.len() > MAX_RAILS => wrong("there are more than 16 rails"),
            _ if !(1..=MAX_RAILS as u32).contains(&self.engines) => {
                wrong("engines must be 1 to 16")
            }
            _ if !(1..=MAX_QUEUE_PAIRS).contains(&self.queue_pairs) => {
                wrong("queue_pairs must be 1 to 16")
            }
            _ if !(16..=4096).contains(&self.send_depth) => wrong("send_depth must be 16 to 4096"),
            _ => Ok(()),
        }
    }

    /// The devices: those that were given, or a software HCA for each engine. One HCA with several
    /// engines would not do: the queue pairs of an agent share a completion queue, and those are on
    /// one engine.
    pub(super) fn open_contexts(&self) -> Result<Vec<Context>> {
        if !self.rails.is_empty() {
            return Ok(self.rails.clone());
        }
        let hca = match self.engines {
            1 => HcaOptions::default(),
            _ => HcaOptions::default()
                .with_progress_mode(ProgressMode::Thread { spin: ENGINE_SPIN, core: None }),
        };
        let count = if matches!(self.link, LinkChoice::Device(_)) { 1 } else { self.engines };
        (0..count).map(|_| self.link.open_context(self.address, hca)).collect()
    }
}

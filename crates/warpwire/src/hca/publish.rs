//! Counters for other processes: the devices of a process can be queried through a Unix socket.
//!
//! The first device that is opened starts a thread that blocks in `accept` on the abstract socket
//! `warpwire-stat-PID`; nothing is counted or copied for it until a client connects. It replies
//! with one line of JSON, a [`ProcessStats`], and closes the connection. Only the same user and
//! root get a reply. `WARPWIRE_STAT=0` disables it.
//!
//! ```
//! use warpwire::hca::{Hca, HcaOptions, publish};
//! use warpwire::link::Hub;
//! let endpoint = Hub::new().endpoint("10.0.0.1:4791".parse().unwrap())?;
//! let hca = Hca::open(endpoint, HcaOptions::default())?;
//! let report = publish::query(std::process::id())?;
//! assert_eq!(report.devices[0].queue_pairs, 0);
//! # Ok::<(), warpwire::Error>(())
//! ```

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::{Once, Weak};
use std::time::Duration;

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use super::{Hca, HcaInner, QpTotals};
use crate::error::{Error, Kind, Result};

/// Prefix of the socket names.
const PREFIX: &str = "warpwire-stat-";
/// Set to 0 to disable the socket.
const ENV_VAR: &str = "WARPWIRE_STAT";
/// Version of the JSON.
const VERSION: u32 = 1;
/// A running process replies within this time.
const TIMEOUT: Duration = Duration::from_secs(2);
const MAX_REPLY_LEN: u64 = 16 << 20;

/// The reply of a process.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ProcessStats {
    /// Version of this format: 1.
    pub warpwire: u32,
    /// The process id.
    pub pid: u32,
    /// The program's name (`/proc/PID/comm`).
    pub program: String,
    /// The open devices, in the order in which they were opened.
    pub devices: Vec<DeviceStats>,
}

/// Counters of a device since it was opened.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct DeviceStats {
    /// Index of the device in its process; does not change when other devices are closed.
    pub number: u64,
    /// The link, and why it was chosen.
    pub link: String,
    /// Seconds since the device was opened.
    pub seconds: f64,
    /// Number of existing queue pairs.
    pub queue_pairs: usize,
    /// Counters of all queue pairs, including destroyed ones.
    pub pairs: QpTotals,
    /// Operations without packets.
    #[serde(default)]
    pub direct: super::DirectStats,
    /// CQEs written.
    pub completions: u64,
    /// Steps of the engine.
    pub steps: u64,
    /// System calls of the link.
    pub calls: u64,
    /// Packets dropped by the link, by the device or by a queue pair, by reason; only nonzero
    /// counts.
    pub dropped: BTreeMap<String, u64>,
}

/// The devices of this process, each with its number.
struct DeviceRegistry {
    next: u64,
    devices: Vec<(u64, Weak<HcaInner>)>,
}

static DEVICES: Mutex<DeviceRegistry> = Mutex::new(DeviceRegistry { next: 0, devices: Vec::new() });
static START: Once = Once::new();

/// Registers a device; the first one starts the thread.
pub(super) fn add(shared: Weak<HcaInner>) {
    let mut known = DEVICES.lock();
    known.devices.retain(|(_, device)| device.strong_count() > 0);
    let number = known.next;
    known.next += 1;
    known.devices.push((number, shared));
    drop(known);
    START.call_once(|| {
        if std::env::var_os(ENV_VAR).is_some_and(|value| value == "0") {
            return;
        }
        if let Err(why) = start() {
            // The device works without.
            tracing::debug!(%why, "counters are not published");
        }
    });
}

fn address(pid: u32) -> Result<SocketAddr> {
    SocketAddr::from_abstract_name(format!("{PREFIX}{pid}"))
        .map_err(|why| Error::os("name the counter socket", &why))
}

fn start() -> Result<()> {
    let listener = UnixListener::bind_addr(&address(std::process::id())?)
        .map_err(|why| Error::os("listen on the counter socket", &why))?;
    let run = move || {
        for stream in listener.incoming() {
            match stream {
                Ok(stream) => serve_client(stream),
                // Out of descriptors, for example: retry later.
                Err(_) => std::thread::sleep(Duration::from_millis(100)),
            }
        }
    };
    let started = std::thread::Builder::new().name("warpwire-stat".to_owned()).spawn(run);
    started.map(drop).map_err(|why| Error::os("start the counter thread", &why))
}

/// Replies if the client has the same user or is root.
fn serve_client(mut stream: UnixStream) {
    let own = rustix::process::geteuid();
    let Ok(client) = rustix::net::sockopt::socket_peercred(&stream) else { return };
    if client.uid != own && !client.uid.is_root() {
        tracing::debug!(uid = client.uid.as_raw(), "query by another user refused");
        return;
    }
    let _ = stream.set_write_timeout(Some(TIMEOUT));
    if let Ok(mut line) = serde_json::to_vec(&snapshot()) {
        line.push(b'\n');
        // The client may have disconnected.
        let _ = stream.write_all(&line);
    }
}

fn snapshot() -> ProcessStats {
    let known: Vec<_> = DEVICES.lock().devices.clone();
    let alive = known.into_iter().filter_map(|(number, weak)| Some((number, Hca(weak.upgrade()?))));
    let devices = alive.map(|(number, hca)| describe(number, &hca)).collect();
    let program = std::fs::read_to_string("/proc/self/comm").unwrap_or_default();
    let program = program.trim().to_owned();
    ProcessStats { warpwire: VERSION, pid: std::process::id(), program, devices }
}

fn describe(number: u64, hca: &Hca) -> DeviceStats {
    let (stats, counters) = (hca.stats(), hca.link_counters());
    let drops = counters.drops;
    let link_drops = [
        ("icrc", drops.icrc),
        ("short", drops.short),
        ("long", drops.long),
        ("overrun", drops.overrun),
        ("no-peer", drops.no_peer),
        ("refused", drops.refused),
        ("injected", drops.injected),
    ];
    let dropped = link_drops.into_iter().chain(stats.dropped).chain(stats.discarded);
    let dropped = dropped.filter(|(_, count)| *count > 0);
    DeviceStats {
        number,
        link: hca.path().to_string(),
        seconds: hca.0.start.elapsed().as_secs_f64(),
        queue_pairs: stats.queue_pairs,
        pairs: stats.pairs,
        direct: stats.direct,
        completions: stats.completions,
        steps: stats.steps,
        calls: counters.calls,
        dropped: dropped.map(|(reason, count)| (reason.to_owned(), count)).collect(),
    }
}

/// Queries the counters of a process on this machine.
///
/// # Errors
/// If there is no such process, it has no device or does not publish, it belongs to another user,
/// or it does not reply within 2 s.
pub fn query(pid: u32) -> Result<ProcessStats> {
    let what = || format!("query the counters of process {pid}");
    let failed = |why: std::io::Error| match why.kind() {
        std::io::ErrorKind::ConnectionRefused => Error::new(Kind::Unavailable, what())
            .why("it has exited, has no open device, or runs with WARPWIRE_STAT=0")
            .fix("list the processes that publish counters with warpwire stat --all"),
        std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut => {
            Error::new(Kind::Timeout, what())
                .why("it does not reply")
                .fix("check whether it is stopped")
        }
        _ => Error::os(what(), &why),
    };
    let stream = UnixStream::connect_addr(&address(pid)?).map_err(failed)?;
    stream.set_read_timeout(Some(TIMEOUT)).map_err(failed)?;
    let mut line = Vec::new();
    BufReader::new(stream.take(MAX_REPLY_LEN)).read_until(b'\n', &mut line).map_err(failed)?;
    if line.is_empty() {
        let error = Error::new(Kind::PermissionDenied, what()).why("it belongs to another user");
        return Err(error.fix("run as that user, or as root"));
    }
    let report: ProcessStats = serde_json::from_slice(&line).map_err(|why| {
        let error = Error::new(Kind::Malformed, what()).why(format!("unknown reply format: {why}"));
        error.fix("use the same version of warpwire in both processes")
    })?;
    Ok(report)
}

/// The processes in this network namespace that publish counters, of any user.
pub fn processes() -> Result<Vec<u32>> {
    let table = std::fs::read_to_string("/proc/net/unix")
        .map_err(|why| Error::os("read /proc/net/unix", &why))?;
    let mut found: Vec<u32> = table.lines().filter_map(parse_unix_line).collect();
    found.sort_unstable();
    found.dedup();
    Ok(found)
}

fn parse_unix_line(line: &str) -> Option<u32> {
    line.split_whitespace().last()?.strip_prefix('@')?.strip_prefix(PREFIX)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hca::HcaOptions;
    use crate::link::Hub;

    #[test]
    fn open_devices_are_published() {
        let hub = Hub::new();
        let open = |address: &str| {
            Hca::open(hub.endpoint(address.parse().unwrap()).unwrap(), HcaOptions::default())
        };
        let links = || -> Vec<String> {
            query(std::process::id())
                .unwrap()
                .devices
                .into_iter()
                .map(|report| report.link)
                .collect()
        };
        let counts = |address: &str| links().iter().filter(|link| link.contains(address)).count();
        let (one, two) = (open("10.9.9.1:1").unwrap(), open("10.9.9.2:1").unwrap());
        assert_eq!((counts("10.9.9.1:1"), counts("10.9.9.2:1")), (1, 1));
        drop(one);
        // The device's own thread may hold it for the step that it is making.
        testkit::until("the closed device is gone", || counts("10.9.9.1:1") == 0);
        assert_eq!(counts("10.9.9.2:1"), 1);
        drop(two);
        assert!(processes().unwrap().contains(&std::process::id()));
    }

    #[test]
    fn process_without_stats_is_named_in_the_error() {
        let error = query(u32::MAX).unwrap_err();
        assert!(error.to_string().contains("4294967295"), "{error}");
        assert_eq!(*error.kind(), Kind::Unavailable);
    }

    #[test]
    fn unrelated_unix_sockets_are_ignored() {
        assert_eq!(
            parse_unix_line("0000: 00000002 0 00010000 0001 01 123 @warpwire-stat-77"),
            Some(77)
        );
        for other in ["", "Num Path", "0: 2 0 1 1 01 9 /run/x", "0: 2 0 1 1 01 9 @warpwire-stat-x"]
        {
            assert_eq!(parse_unix_line(other), None, "{other}");
        }
    }
}

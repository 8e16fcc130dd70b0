//! Counters for other processes: the devices of a process can be queried through a Unix socket.
//!
//! The first device that is opened starts a thread that blocks in `accept` on the abstract socket
//! `warpwire-stat-PID`; nothing is counted or copied for it until a client connects. It replies
//! with one line of JSON, a [`ProcessStats`], and closes the connection. Only the same user and
//! root get a reply. `WARPWIRE_STAT=0` disables it.
//!
//! Any process can bind any such name, so a client believes no reply: the kernel says which
//! process listens (`SO_PEERCRED`), and text is freed of control characters.
//!
//! ```
//! use warpwire::hca::{Hca, HcaOptions, publish};
//! use warpwire::link::Hub;
//! let endpoint = Hub::new().endpoint("10.0.0.1:4791".parse().unwrap())?;
//! let hca = Hca::open(endpoint, HcaOptions::default())?;
//! let report = publish::query(std::process::id())?;
//! assert!(report.devices.iter().any(|device| device.queue_pairs == 0));
//! # Ok::<(), warpwire::Error>(())
//! ```

use std::collections::BTreeMap;
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::AsFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::{Once, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use serde::{Deserialize, Serialize};

use super::{EngineStats, Hca, HcaInner, QpStats, QpTotals};
use crate::error::{Error, Kind, Result};
use crate::host::is_trusted_user;
use crate::link::shm::peer_credentials;
use crate::units::printable;

/// Prefix of the socket names.
const PREFIX: &str = "warpwire-stat-";
/// Set to 0 to disable the socket.
const ENV_VAR: &str = "WARPWIRE_STAT";
/// Version of the JSON.
const VERSION: u32 = 1;
/// A running process replies within this time, from the connection to the last byte.
const TIMEOUT: Duration = Duration::from_secs(2);
const MAX_REPLY_LEN: usize = 16 << 20;
/// Queue pairs of a device in a reply: some 300 bytes each.
const MAX_QPS: usize = 1024;

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
    /// Steps of the engines.
    pub steps: u64,
    /// System calls of the link.
    pub calls: u64,
    /// Packets dropped by the link, by the device or by a queue pair, by reason; only nonzero
    /// counts.
    pub dropped: BTreeMap<String, u64>,
    /// The part of each engine.
    #[serde(default)]
    pub engines: Vec<EngineStats>,
    /// Of up to 1024 existing queue pairs.
    #[serde(default)]
    pub qps: Vec<QpStats>,
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

fn name(pid: u32) -> String {
    format!("{PREFIX}{pid}")
}

fn start() -> Result<()> {
    let listener = SocketAddr::from_abstract_name(name(std::process::id()))
        .and_then(|address| UnixListener::bind_addr(&address))
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
    let started = crate::sync::thread::spawn("warpwire-stat", run);
    started.map_err(|why| Error::os("start the counter thread", &why))
}

/// Replies if the client has the same user or is root.
fn serve_client(mut stream: UnixStream) {
    let Ok((uid, _)) = peer_credentials(stream.as_fd()) else { return };
    if !is_trusted_user(uid) {
        tracing::debug!(uid, "query by another user refused");
        return;
    }
    if let Ok(mut line) = serde_json::to_vec(&snapshot()) {
        line.push(b'\n');
        // The client may have disconnected, or read slowly; others wait for this thread.
        let _ = write_until(&mut stream, &line, Instant::now() + TIMEOUT);
    }
}

fn write_until(stream: &mut UnixStream, mut bytes: &[u8], deadline: Instant) -> io::Result<()> {
    while !bytes.is_empty() {
        stream.set_write_timeout(Some(left(deadline)?))?;
        match stream.write(bytes) {
            Ok(count) => bytes = &bytes[count..],
            Err(why) if why.kind() == ErrorKind::Interrupted => {}
            Err(why) => return Err(why),
        }
    }
    Ok(())
}

/// The time until the deadline.
fn left(deadline: Instant) -> io::Result<Duration> {
    match deadline.saturating_duration_since(Instant::now()) {
        Duration::ZERO => Err(ErrorKind::TimedOut.into()),
        left => Ok(left),
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
        ("unverified", drops.unverified),
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
        seconds: hca.0.engines[0].now().as_nanos() as f64 / 1e9,
        queue_pairs: stats.queue_pairs,
        pairs: stats.pairs,
        direct: stats.direct,
        completions: stats.completions,
        steps: stats.steps,
        calls: counters.calls,
        dropped: dropped.map(|(reason, count)| (reason.to_owned(), count)).collect(),
        engines: stats.engines,
        qps: hca.all_qp_stats(MAX_QPS),
    }
}

/// Queries the counters of a process on this machine.
///
/// # Errors
/// If there is no such process, it has no device or does not publish, it belongs to another user,
/// it does not reply within 2 s, or another process answers in its name.
pub fn query(pid: u32) -> Result<ProcessStats> {
    let what = || format!("query the counters of process {pid}");
    let line = ask(pid, Instant::now() + TIMEOUT).map_err(|why| match why.kind() {
        ErrorKind::ConnectionRefused => Error::new(Kind::Unavailable, what())
            .why("it has exited, has no open device, or runs with WARPWIRE_STAT=0")
            .fix("list the processes that publish counters with warpwire stat --all"),
        ErrorKind::WouldBlock | ErrorKind::TimedOut => Error::new(Kind::Timeout, what())
            .why("it does not reply")
            .fix("check whether it is stopped"),
        _ => Error::os(what(), &why),
    })?;
    parse_reply(pid, &line)
}

fn parse_reply(pid: u32, line: &[u8]) -> Result<ProcessStats> {
    let what = || format!("query the counters of process {pid}");
    if line.is_empty() {
        let error = Error::new(Kind::PermissionDenied, what()).why("it belongs to another user");
        return Err(error.fix("run as that user, or as root"));
    }
    let malformed = |why: String| Error::new(Kind::Malformed, what()).why(why);
    let mut report: ProcessStats = serde_json::from_slice(line).map_err(|why| {
        malformed(format!("unknown reply format: {}", printable(&why.to_string())))
            .fix("use the same version of warpwire in both processes")
    })?;
    if report.pid != pid {
        return Err(malformed(format!("it says that it is process {}", report.pid)));
    }
    report.program = printable(&report.program);
    for device in &mut report.devices {
        device.link = printable(&device.link);
        for qp in &mut device.qps {
            qp.service = printable(&qp.service);
            qp.state = printable(&qp.state);
        }
        let dropped = std::mem::take(&mut device.dropped);
        device.dropped =
            dropped.into_iter().map(|(name, count)| (printable(&name), count)).collect();
    }
    Ok(report)
}

/// Connects to a process and returns its reply, one line.
fn ask(pid: u32, deadline: Instant) -> io::Result<Vec<u8>> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    // Non-blocking: if the process is stopped and its queue is full, connecting would block.
    rustix::net::connect(&socket, &SocketAddrUnix::new_abstract_name(name(pid).as_bytes())?)?;
    check_identity(pid, peer_credentials(socket.as_fd())?)?;
    read_line(socket.into(), deadline)
}

fn read_line(mut stream: UnixStream, deadline: Instant) -> io::Result<Vec<u8>> {
    stream.set_nonblocking(false)?;
    let (mut line, mut bytes) = (Vec::new(), [0; 4096]);
    while line.last() != Some(&b'\n') && line.len() < MAX_REPLY_LEN {
        stream.set_read_timeout(Some(left(deadline)?))?;
        match stream.read(&mut bytes) {
            Ok(0) => break,
            Ok(count) => line.extend_from_slice(&bytes[..count]),
            Err(why) if why.kind() == ErrorKind::Interrupted => {}
            Err(why) => return Err(why),
        }
    }
    Ok(line)
}

/// Checks that the process which listens, by its user and number, is `pid`, and runs as the user of
/// that process. The number is 0 if it is in another PID namespace.
fn check_identity(pid: u32, (user, listener): (u32, i32)) -> io::Result<()> {
    let refused = |why: String| Err(io::Error::new(ErrorKind::PermissionDenied, why));
    if u32::try_from(listener) != Ok(pid) || listener == 0 {
        return refused(match listener {
            0 => "a process of another PID namespace listens in its name".to_owned(),
            _ => format!("process {listener} listens in its name"),
        });
    }
    // The owner of /proc/PID is root for some processes that are not.
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let uids = status.lines().find_map(|line| line.strip_prefix("Uid:"));
    let owner = uids.and_then(|uids| uids.split_whitespace().nth(1)?.parse::<u32>().ok());
    match owner {
        Some(owner) if owner != user => {
            refused(format!("user {user} listens in the name of user {owner}"))
        }
        _ => Ok(()),
    }
}

/// The processes in this network namespace that publish counters, of any user.
pub fn processes() -> Result<Vec<u32>> {
    let table =
        std::fs::read("/proc/net/unix").map_err(|why| Error::os("read /proc/net/unix", &why))?;
    // Any user may bind names that are not UTF-8.
    let table = String::from_utf8_lossy(&table);
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
            let mut answer = None;
            // On a busy machine the thread that answers may be late.
            testkit::until("an answer", || {
                answer = query(std::process::id()).ok();
                answer.is_some()
            });
            answer.unwrap().devices.into_iter().map(|report| report.link).collect()
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

    /// Listens in the name of a process, and serves connections.
    fn impostor(pid: u32, serve: fn(UnixStream)) {
        let address = SocketAddr::from_abstract_name(name(pid)).unwrap();
        let listener = UnixListener::bind_addr(&address).unwrap();
        std::thread::spawn(move || listener.incoming().flatten().for_each(serve));
    }

    #[test]
    fn another_process_cannot_answer_in_its_name() {
        let pid = u32::MAX / 2 + std::process::id();
        impostor(pid, |mut stream| {
            let _ = stream.write_all(b"{\"warpwire\":1}\n");
        });
        let error = query(pid).unwrap_err();
        let own = std::process::id();
        assert!(error.to_string().contains(&format!("process {own} listens")), "{error}");
        assert_eq!(error.kind(), &Kind::PermissionDenied);
    }

    #[test]
    fn only_the_process_itself_may_answer() {
        let (own, user) = (std::process::id(), rustix::process::geteuid().as_raw());
        check_identity(own, (user, own as i32)).unwrap();
        for (other, why) in [
            ((user, 0), "another PID namespace"),
            ((user, own as i32 + 1), "listens in its name"),
            ((user, -1), "listens in its name"),
            ((user + 1, own as i32), "in the name of user"),
        ] {
            let error = check_identity(own, other).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        }
    }

    #[test]
    fn replies_are_complete_in_time_or_refused() {
        let start = Instant::now();
        let dripping = |mut stream: UnixStream| {
            while stream.write_all(b" ").is_ok() {
                std::thread::sleep(Duration::from_millis(50));
            }
        };
        let (near, far) = UnixStream::pair().unwrap();
        std::thread::spawn(move || dripping(far));
        let error = read_line(near, start + Duration::from_millis(300)).unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::TimedOut | ErrorKind::WouldBlock), "{error}");
        assert!(start.elapsed() < testkit::deadline(Duration::from_secs(10)));
    }

    #[test]
    fn replies_are_freed_of_control_characters_and_false_numbers() {
        let reply = |pid: u32| {
            let text = "a\u{1b}[2J\u{7}";
            let mut stats = snapshot();
            (stats.pid, stats.program) = (pid, text.to_owned());
            serde_json::to_vec(&stats).unwrap()
        };
        let error = parse_reply(7, &reply(8)).unwrap_err();
        assert!(error.to_string().contains("it says that it is process 8"), "{error}");
        let program = parse_reply(7, &reply(7)).unwrap().program;
        assert_eq!(program, "a\u{fffd}[2J\u{fffd}");
        for wrong in [&b"SSH-2.0\n"[..], b"{\"warpwire\":1,\"pid\":\"\x1b[2J\"}\n"] {
            let error = parse_reply(7, wrong).unwrap_err().to_string();
            assert!(!error.contains('\u{1b}'), "{error:?}");
        }
    }

    #[test]
    fn names_of_others_do_not_hide_processes() {
        let pid = u32::MAX / 3 + std::process::id();
        let foreign = [&b"\xff\xfe \n\x80"[..], &std::process::id().to_ne_bytes()].concat();
        let foreign = SocketAddr::from_abstract_name(foreign).unwrap();
        let _foreign = UnixListener::bind_addr(&foreign).unwrap();
        impostor(pid, drop);
        assert!(processes().unwrap().contains(&pid));
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

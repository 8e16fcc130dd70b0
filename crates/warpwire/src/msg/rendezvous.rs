//! Bootstrap of a communicator: all ranks connect to rank 0 over TCP, get the addresses of the
//! others, and connect to them (full mesh).
//!
//! The connections stay open, used only to detect ranks that leave or die.

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::rank_info::{RankInfo, Rendezvous};
use crate::error::{Error, Kind, Result};
use crate::host::{is_trusted_user, make_private_folder, runtime_folder};
use crate::units::printable;
use crate::verbs::QpEndpoint;
use crate::verbs::bootstrap::{Bootstrap, BootstrapListener, connect_any};

/// Version of the bootstrap messages and of message headers.
pub(super) const VERSION: u32 = 1;
/// How long a message, or a connection to an address, may take.
const MESSAGE_TIMEOUT: Duration = Duration::from_secs(2);
/// How often rank 0 checks whether ranks that have joined are still there.
const POLL_INTERVAL: Duration = Duration::from_millis(10);
/// Rank 0 times out first, so that the other ranks receive its reason.
const RANK0_GRACE: Duration = Duration::from_secs(2);

/// Messages between ranks during bootstrap and on leaving.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum BootstrapMsg {
    /// First message to rank 0.
    Join { version: u32, token: String, rank: usize, size: usize, listens: SocketAddr },
    /// From rank 0, once all ranks have joined: their addresses, and a secret that authenticates
    /// them to each other.
    Table { members: Vec<SocketAddr>, secret: String },
    /// First message to another rank.
    Mesh { secret: String, rank: usize },
    /// Connection data for a peer.
    Hello(Hello),
    /// All queue pairs are connected.
    Ready,
    /// The sender could not join.
    Failed { why: String },
    /// The sender leaves; with a reason if it aborts.
    Bye { why: Option<String> },
}

/// Connection data of a rank.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Hello {
    pub endpoint: QpEndpoint,
    /// Number of receives, and length of each including the header.
    pub receives: u32,
    pub slot: u64,
    /// Address and rkey of its table of ready counters.
    pub table: (u64, u32),
}

/// TCP connections to all ranks.
pub(super) struct RankLinks {
    /// By rank; `None` for this rank.
    pub links: Vec<Option<Bootstrap>>,
    /// The local address under which the other ranks see this machine.
    pub local_ip: IpAddr,
}

impl RankLinks {
    /// Notifies all ranks that this one fails to join.
    pub fn abort(&mut self, why: &Error) {
        let message = BootstrapMsg::Failed { why: why.to_string() };
        for link in self.links.iter_mut().flatten() {
            // If this fails, the peer detects that the connection is closed.
            let _ = link.send(&message);
        }
    }

    /// Receives the next message of a rank.
    pub fn recv(&mut self, rank: usize, deadline: Instant) -> Result<BootstrapMsg> {
        let what = || format!("connect to rank {rank}");
        let Some(link) = self.links.get_mut(rank).and_then(Option::as_mut) else {
            return Err(Error::new(Kind::InvalidArgument, what()).why("it is not connected"));
        };
        link.set_timeout(left(deadline));
        match link.recv() {
            Ok(BootstrapMsg::Failed { why }) => {
                Err(Error::new(Kind::PeerLost, what())
                    .why(format!("it failed: {}", printable(&why))))
            }
            Ok(message) => Ok(message),
            Err(error) => Err(Error::new(Kind::PeerLost, what())
                .why(error.reason().to_owned())
                .fix(format!("see the output of rank {rank}"))),
        }
    }

    /// Sends a message to a rank; does nothing for this rank itself.
    pub fn send(&mut self, rank: usize, message: &BootstrapMsg) -> Result<()> {
        let link = self.links.get_mut(rank).and_then(Option::as_mut);
        let sent = link.map_or(Ok(()), |link| link.send(message));
        sent.map_err(|error| error.during(format!("connect to rank {rank}")))
    }
}

fn left(deadline: Instant) -> Duration {
    deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1))
}

/// Connects to the other ranks.
///
/// # Errors
/// On timeout, naming the missing ranks; if ranks disagree on the size; if rank 0 cannot listen.
pub(super) fn connect_ranks(rank_info: &RankInfo, timeout: Duration) -> Result<RankLinks> {
    let deadline = Instant::now() + timeout;
    match rank_info.rank {
        0 => host(rank_info, deadline),
        _ => join(rank_info, deadline + RANK0_GRACE),
    }
}

/// The next connection that has sent its first message, if one comes within [`POLL_INTERVAL`].
fn next_peer(listener: &mut BootstrapListener) -> Result<Option<(Bootstrap, BootstrapMsg)>> {
    let Some(mut bootstrap) = listener.next(POLL_INTERVAL)? else { return Ok(None) };
    bootstrap.set_timeout(MESSAGE_TIMEOUT);
    match bootstrap.recv() {
        Ok(message) => Ok(Some((bootstrap, message))),
        Err(why) => {
            tracing::warn!(peer = %bootstrap.peer(), %why, "rejected a connection");
            Ok(None)
        }
    }
}

/// Rejects a connection, with a reason.
fn refuse(mut bootstrap: Bootstrap, why: &str) {
    tracing::warn!(peer = %bootstrap.peer(), why, "rejected a connection");
    let _ = bootstrap.send(&BootstrapMsg::Failed { why: why.to_owned() });
}

/// Removes the address file when bootstrap is over.
struct AddressFile<'a>(Option<&'a Path>);

impl Drop for AddressFile<'_> {
    fn drop(&mut self) {
        if let Some(path) = self.0 {
            let _ = std::fs::remove_file(path);
        }
    }
}

/// Bootstrap of rank 0.
fn host(rank_info: &RankInfo, deadline: Instant) -> Result<RankLinks> {
    let (listener, local_ip, _address_file) = listen(rank_info)?;
    let own = listener.local_addr().map_err(|why| Error::os("listen for other ranks", &why))?;
    let mut rank_links = RankLinks { links: (0..rank_info.size).map(|_| None).collect(), local_ip };
    let gathered =
        gather(rank_info, BootstrapListener::new(listener)?, &mut rank_links, own, deadline);
    let table = gathered.inspect_err(|why| rank_links.abort(why))?;
    for rank in 1..rank_info.size {
        rank_links.send(rank, &table)?;
    }
    Ok(rank_links)
}

fn gather(
    rank_info: &RankInfo,
    mut listener: BootstrapListener,
    rank_links: &mut RankLinks,
    own: SocketAddr,
    deadline: Instant,
) -> Result<BootstrapMsg> {
    let mut members = vec![own; rank_info.size];
    loop {
        let missing = |rank_links: &RankLinks| -> Vec<usize> {
            (1..rank_info.size).filter(|rank| rank_links.links[*rank].is_none()).collect()
        };
        let open = missing(rank_links);
        if open.is_empty() {
            return Ok(BootstrapMsg::Table { members, secret: secret()? });
        }
        // Ranks that have joined wait silently: if one is readable, it has closed its connection.
        for rank in 1..rank_info.size {
            let gone = rank_links.links[rank].as_ref().map(|link| link.is_readable(Duration::ZERO));
            if gone.is_some_and(|gone| gone.unwrap_or(true)) {
                let error = Error::new(Kind::PeerLost, format!("connect to rank {rank}"));
                return Err(error.why("it left before all ranks had joined").fix("see its output"));
            }
        }
        if Instant::now() >= deadline {
            let error = Error::new(Kind::Timeout, "connect to the other ranks").on(own.to_string());
            let why =
                format!("{} of {} did not join: {}", open.len(), rank_info.size, names(&open));
            return Err(error
                .why(why)
                .fix("see their output; they need this address and this token"));
        }
        match next_peer(&mut listener)? {
            Some((bootstrap, BootstrapMsg::Join { version, token, rank, size, listens })) => {
                if token != rank_info.token {
                    refuse(bootstrap, "the token is not that of this job");
                    continue;
                }
                if let Err(why) = check_joined(rank_info, rank_links, (version, rank, size)) {
                    refuse(bootstrap, &why.to_string());
                    return Err(why);
                }
                // The address is that of the connection: only the port is the rank's to say.
                let ip = bootstrap.peer().ip().to_canonical();
                members[rank] = SocketAddr::new(ip, listens.port());
                rank_links.links[rank] = Some(bootstrap);
            }
            Some((bootstrap, _)) => refuse(bootstrap, "it sent no rank"),
            None => {}
        }
    }
}

fn check_joined(
    rank_info: &RankInfo,
    rank_links: &RankLinks,
    (version, rank, size): (u32, usize, usize),
) -> Result<()> {
    let wrong = |kind, why: String, fix: &'static str| {
        Err(Error::new(kind, format!("connect to rank {rank}")).why(why).fix(fix))
    };
    if version != VERSION {
        let why = format!("it uses protocol version {version}, rank 0 uses {VERSION}");
        return wrong(Kind::Unsupported, why, "use the same version on all ranks");
    }
    if size != rank_info.size {
        let why = format!("its size is {size} ranks, rank 0's is {}", rank_info.size);
        return wrong(Kind::InvalidArgument, why, "start all ranks with the same size");
    }
    if rank == 0 || rank >= size || rank_links.links[rank].is_some() {
        let why = format!("two processes have rank {rank}, or there is no such rank");
        return wrong(Kind::InvalidArgument, why, "give each process its own rank");
    }
    Ok(())
}

/// `rank 1, rank 2, rank 5`; the first 16 only.
fn names(ranks: &[usize]) -> String {
    let named: Vec<String> = ranks.iter().take(16).map(|rank| format!("rank {rank}")).collect();
    let more = if ranks.len() > 16 { ", …" } else { "" };
    format!("{}{more}", named.join(", "))
}

/// A random secret that only the ranks of this communicator know.
pub(super) fn secret() -> Result<String> {
    let mut bytes = [0; 16];
    let read = std::fs::File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut bytes));
    read.map_err(|why| Error::os("read /dev/urandom", &why))?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// Listens at the meeting point; also returns the address of this machine that other ranks use.
fn listen(rank_info: &RankInfo) -> Result<(TcpListener, IpAddr, AddressFile<'_>)> {
    let (text, file) = match &rank_info.rendezvous {
        Rendezvous::Address(text) => (text.as_str(), None),
        Rendezvous::File(path) => ("127.0.0.1:0", Some(path.as_path())),
    };
    let what = || format!("listen for other ranks on {text}");
    let found = text.to_socket_addrs().map_err(|why| {
        Error::os(what(), &why).fix("check the name, or set WARPWIRE_MASTER=ADDRESS:PORT")
    })?;
    let found: Vec<SocketAddr> = found.collect();
    let listener = TcpListener::bind(&found[..]).map_err(|why| {
        Error::os(what(), &why).fix(match why.kind() {
            std::io::ErrorKind::AddrInUse => "set WARPWIRE_MASTER with another port, on every rank",
            _ => "rank 0 must run on that host; or set WARPWIRE_MASTER, on every rank",
        })
    })?;
    let address = listener.local_addr().map_err(|why| Error::os(what(), &why))?;
    if let Some(path) = file {
        write_address_file(path, address)?;
    }
    Ok((listener, address.ip(), AddressFile(file)))
}

/// Writes this rank's address to a file, atomically.
fn write_address_file(path: &Path, address: SocketAddr) -> Result<()> {
    let failed = |why: std::io::Error| {
        Error::os(format!("write this rank's address to {}", path.display()), &why)
            .fix("set WARPWIRE_MASTER=HOST:PORT instead")
    };
    // The default folder, which may not exist yet; folders that the user names must.
    let default = runtime_folder(None);
    if let Some(folder) = path.parent().filter(|at| at.file_name() == default.file_name()) {
        make_private_folder(folder).map_err(failed)?;
    }
    let draft = path.with_extension(format!("draft{}", std::process::id()));
    let mut options = std::fs::OpenOptions::new();
    options.write(true).create_new(true).mode(0o600);
    let written = options
        .open(&draft)
        .and_then(|mut file| writeln!(file, "{address}"))
        .and_then(|()| std::fs::rename(&draft, path));
    written.map_err(|why| {
        let _ = std::fs::remove_file(&draft);
        failed(why)
    })
}

/// Reads an address file, if it is a file that this user or root wrote. In a folder that others can
/// write, the name may be a FIFO, which would block, or a link.
fn read_address_file(path: &Path) -> Option<SocketAddr> {
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_CLOEXEC;
    let mut options = std::fs::OpenOptions::new();
    let file = options.read(true).custom_flags(flags).open(path).ok()?;
    let found = file.metadata().ok()?;
    if !found.is_file() || !is_trusted_user(found.uid()) {
        let owner = found.uid();
        tracing::warn!(path = %path.display(), owner, "ignored: not an address file of this user");
        return None;
    }
    let mut text = String::new();
    file.take(256).read_to_string(&mut text).ok()?;
    text.trim().parse().ok()
}

/// Bootstrap of the other ranks: connects to rank 0, then to lower ranks, and accepts higher ranks.
fn join(rank_info: &RankInfo, deadline: Instant) -> Result<RankLinks> {
    let (mut bootstrap, listener) = reach_host(rank_info, deadline)?;
    bootstrap.set_timeout(left(deadline));
    let local_ip = bootstrap.local()?.ip();
    let no_table = |error: Error| {
        let why = error.reason().to_owned();
        let error = Error::new(error.kind().clone(), "connect to the other ranks").why(why);
        error.fix("see the output of rank 0")
    };
    let (members, secret) = match bootstrap.recv().map_err(no_table)? {
        BootstrapMsg::Table { members, secret } if members.len() == rank_info.size => {
            (members, secret)
        }
        BootstrapMsg::Failed { why } => {
            let why = format!("rank 0 failed: {}", printable(&why));
            return Err(Error::new(Kind::PeerLost, "connect to the other ranks").why(why));
        }
        other => return Err(unexpected(0, &other)),
    };
    let mut rank_links = RankLinks { links: (0..rank_info.size).map(|_| None).collect(), local_ip };
    rank_links.links[0] = Some(bootstrap);
    let meshed = mesh(
        rank_info,
        &mut rank_links,
        BootstrapListener::new(listener)?,
        &members,
        &secret,
        deadline,
    );
    meshed.inspect_err(|why| rank_links.abort(why))?;
    Ok(rank_links)
}

/// Connects to rank 0 and sends its rank; retries until the deadline, since rank 0 may start later.
fn reach_host(rank_info: &RankInfo, deadline: Instant) -> Result<(Bootstrap, TcpListener)> {
    loop {
        let last = match try_host(rank_info, deadline) {
            Ok(reached) => return Ok(reached),
            Err(error) => error.during("connect to rank 0").fix("start rank 0, or see its output"),
        };
        if Instant::now() >= deadline {
            let on = match &rank_info.rendezvous {
                Rendezvous::Address(text) => text.clone(),
                Rendezvous::File(path) => format!("the address in {}", path.display()),
            };
            return Err(last.on(on));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn try_host(rank_info: &RankInfo, deadline: Instant) -> Result<(Bootstrap, TcpListener)> {
    let failed = |why: &std::io::Error| Error::os("connect to rank 0", why);
    let missing = || {
        let error = Error::new(Kind::Timeout, "connect to rank 0");
        error.why("it has not published its address, or the name does not resolve")
    };
    let addresses: Vec<SocketAddr> = match &rank_info.rendezvous {
        Rendezvous::Address(text) => text.to_socket_addrs().map_err(|why| failed(&why))?.collect(),
        Rendezvous::File(path) => read_address_file(path).into_iter().collect(),
    };
    if addresses.is_empty() {
        return Err(missing());
    }
    let stream = connect_any(&addresses, deadline, MESSAGE_TIMEOUT).map_err(|why| failed(&why))?;
    let mut bootstrap = Bootstrap::from_stream(stream, MESSAGE_TIMEOUT)?;
    // Bound to the address that rank 0 sees: loopback if rank 0 was reached over loopback.
    let listener = TcpListener::bind((bootstrap.local()?.ip(), 0)).map_err(|why| failed(&why))?;
    let listens = listener.local_addr().map_err(|why| failed(&why))?;
    let token = rank_info.token.clone();
    let message = BootstrapMsg::Join {
        version: VERSION,
        token,
        rank: rank_info.rank,
        size: rank_info.size,
        listens,
    };
    bootstrap.send(&message)?;
    Ok((bootstrap, listener))
}

fn mesh(
    rank_info: &RankInfo,
    rank_links: &mut RankLinks,
    mut listener: BootstrapListener,
    members: &[SocketAddr],
    secret: &str,
    deadline: Instant,
) -> Result<()> {
    for (rank, address) in members.iter().enumerate().take(rank_info.rank).skip(1) {
        let what = || format!("connect to rank {rank}");
        let stream = TcpStream::connect_timeout(address, left(deadline))
            .map_err(|why| Error::os(what(), &why).on(address.to_string()))?;
        let mut bootstrap = Bootstrap::from_stream(stream, left(deadline))?;
        bootstrap.send(&BootstrapMsg::Mesh { secret: secret.to_owned(), rank: rank_info.rank })?;
        rank_links.links[rank] = Some(bootstrap);
    }
    loop {
        let open = |rank: &usize| rank_links.links[*rank].is_none();
        let missing: Vec<usize> = (rank_info.rank + 1..rank_info.size).filter(open).collect();
        if missing.is_empty() {
            return Ok(());
        }
        if Instant::now() >= deadline {
            let error = Error::new(Kind::Timeout, "connect to the other ranks");
            return Err(error.why(format!("they did not connect: {}", names(&missing))));
        }
        match next_peer(&mut listener)? {
            Some((bootstrap, BootstrapMsg::Mesh { secret: theirs, rank }))
                if theirs == secret && missing.contains(&rank) =>
            {
                rank_links.links[rank] = Some(bootstrap);
            }
            Some((bootstrap, _)) => refuse(bootstrap, "it is not an expected rank"),
            None => {}
        }
    }
}

/// An error for a message that is not expected at this point.
pub(super) fn unexpected(rank: usize, message: &BootstrapMsg) -> Error {
    let error = Error::new(Kind::Malformed, format!("connect to rank {rank}"));
    error.why(format!("it sent {message:?}")).fix("use the same version on all ranks")
}

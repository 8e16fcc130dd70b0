//! How ranks meet: all come to rank 0 over TCP, learn of each other there, and connect to each other.
//!
//! The connections stay open. They tell of ranks that leave or die, and carry nothing else.

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::rank_info::{RankInfo, Rendezvous};
use crate::error::{Error, Kind, Result};
use crate::verbs::QpEndpoint;
use crate::verbs::bootstrap::Bootstrap;

/// The version of what ranks tell each other, here and in message headers.
pub(super) const VERSION: u32 = 1;
/// Who has connected says who it is within this time.
const JOIN_TIMEOUT: Duration = Duration::from_secs(5);
/// How long the rest of a word may take, once it has begun.
const MESSAGE_TIMEOUT: Duration = Duration::from_secs(2);
/// Between two looks.
const POLL_INTERVAL: Duration = Duration::from_millis(1);
/// Rank 0 gives up first, so that the others hear why.
const RANK0_GRACE: Duration = Duration::from_secs(2);

/// What ranks say.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum BootstrapMsg {
    /// To rank 0, first.
    Join { version: u32, token: String, rank: usize, size: usize, listens: SocketAddr },
    /// From rank 0, when all are there: where each listens, and what they know of each other by.
    Table { members: Vec<SocketAddr>, secret: String },
    /// To another rank, first.
    Mesh { secret: String, rank: usize },
    /// What a peer must know.
    Hello(Hello),
    /// Everything is connected.
    Ready,
    /// It will not be.
    Failed { why: String },
    /// Nothing more is sent; the reason if it is not the usual one.
    Bye { why: Option<String> },
}

/// What a rank must know of a peer to talk to it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Hello {
    pub endpoint: QpEndpoint,
    /// How many messages it has room for, and how long each may be, with its header.
    pub receives: u32,
    pub slot: u64,
    /// Where its table of counters begins, and the key.
    pub table: (u64, u32),
}

/// The ranks, met.
pub(super) struct RankLinks {
    /// By rank; nothing at our own place.
    pub links: Vec<Option<Bootstrap>>,
    /// The address under which the others see this rank's machine.
    pub local_ip: IpAddr,
}

impl RankLinks {
    /// Tells all that this rank gives up.
    pub fn abort(&mut self, why: &Error) {
        let message = BootstrapMsg::Failed { why: why.to_string() };
        for link in self.links.iter_mut().flatten() {
            // Who cannot be told notices that the connection ends.
            let _ = link.send(&message);
        }
    }

    /// Hears the next word of a rank.
    pub fn recv(&mut self, rank: usize, deadline: Instant) -> Result<BootstrapMsg> {
        let what = || format!("meet rank {rank}");
        let Some(link) = self.links.get_mut(rank).and_then(Option::as_mut) else {
            return Err(Error::new(Kind::InvalidArgument, what()).why("it is not connected"));
        };
        link.set_timeout(left(deadline))?;
        match link.recv() {
            Ok(BootstrapMsg::Failed { why }) => {
                Err(Error::new(Kind::PeerLost, what()).why(format!("it gives up: {why}")))
            }
            Ok(message) => Ok(message),
            Err(error) => Err(Error::new(Kind::PeerLost, what())
                .why(error.reason().to_owned())
                .fix(format!("look at what rank {rank} printed"))),
        }
    }

    /// Tells a rank something.
    pub fn send(&mut self, rank: usize, message: &BootstrapMsg) -> Result<()> {
        let link = self.links.get_mut(rank).and_then(Option::as_mut);
        let sent = link.map_or(Ok(()), |link| link.send(message));
        sent.map_err(|error| error.during(format!("meet rank {rank}")))
    }
}

fn left(deadline: Instant) -> Duration {
    deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1))
}

/// Meets the other ranks.
///
/// # Errors
/// When the time is over, naming who is missing; if ranks contradict each other; if nobody can listen there.
pub(super) fn connect_ranks(rank_info: &RankInfo, timeout: Duration) -> Result<RankLinks> {
    let deadline = Instant::now() + timeout;
    match rank_info.rank {
        0 => host(rank_info, deadline),
        _ => join(rank_info, deadline + RANK0_GRACE),
    }
}

/// A listener, and those who have come and not said who they are.
struct Acceptor {
    listener: TcpListener,
    waiting: Vec<(Bootstrap, Instant)>,
}

impl Acceptor {
    fn new(listener: TcpListener) -> Result<Self> {
        let set = listener.set_nonblocking(true);
        set.map_err(|why| Error::os("listen for other ranks", &why))?;
        Ok(Self { listener, waiting: Vec::new() })
    }

    /// The next who says something, if there is one now. Who says nothing, or nothing that makes sense, is let go.
    fn next(&mut self) -> Option<(Bootstrap, BootstrapMsg)> {
        while let Ok((stream, _)) = self.listener.accept() {
            if stream.set_nonblocking(false).is_ok()
                && let Ok(bootstrap) = Bootstrap::from_stream(stream, MESSAGE_TIMEOUT)
            {
                self.waiting.push((bootstrap, Instant::now()));
            }
        }
        self.waiting.retain(|(_, since)| since.elapsed() < JOIN_TIMEOUT);
        let is_readable =
            |(bootstrap, _): &(Bootstrap, _)| bootstrap.is_readable(Duration::ZERO).unwrap_or(true);
        let at = self.waiting.iter().position(is_readable)?;
        let (mut bootstrap, _) = self.waiting.swap_remove(at);
        match bootstrap.recv() {
            Ok(message) => Some((bootstrap, message)),
            Err(why) => {
                tracing::warn!(peer = %bootstrap.peer(), %why, "a stranger at the door");
                None
            }
        }
    }
}

/// Sends a stranger away.
fn refuse(mut bootstrap: Bootstrap, why: &str) {
    tracing::warn!(peer = %bootstrap.peer(), why, "a stranger at the door");
    let _ = bootstrap.send(&BootstrapMsg::Failed { why: why.to_owned() });
}

/// Removes the file with our address when the meeting is over.
struct AddressFile<'a>(Option<&'a Path>);

impl Drop for AddressFile<'_> {
    fn drop(&mut self) {
        if let Some(path) = self.0 {
            let _ = std::fs::remove_file(path);
        }
    }
}

/// Rank 0's part.
fn host(rank_info: &RankInfo, deadline: Instant) -> Result<RankLinks> {
    let (listener, local_ip, _address_file) = listen(rank_info)?;
    let own = listener.local_addr().map_err(|why| Error::os("listen for other ranks", &why))?;
    let mut rank_links = RankLinks { links: (0..rank_info.size).map(|_| None).collect(), local_ip };
    let gathered = gather(rank_info, Acceptor::new(listener)?, &mut rank_links, own, deadline);
    let table = gathered.inspect_err(|why| rank_links.abort(why))?;
    for rank in 1..rank_info.size {
        rank_links.send(rank, &table)?;
    }
    Ok(rank_links)
}

fn gather(
    rank_info: &RankInfo,
    mut acceptor: Acceptor,
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
        // Who has joined waits; what it says now can only be that it goes.
        for rank in 1..rank_info.size {
            let gone = rank_links.links[rank].as_ref().map(|link| link.is_readable(Duration::ZERO));
            if gone.is_some_and(|gone| gone.unwrap_or(true)) {
                let error = Error::new(Kind::PeerLost, format!("meet rank {rank}"));
                return Err(error
                    .why("it went before all ranks had come")
                    .fix("look at what it printed"));
            }
        }
        if Instant::now() >= deadline {
            let error = Error::new(Kind::Timeout, "meet the other ranks").on(own.to_string());
            let why =
                format!("{} of {} did not come: {}", open.len(), rank_info.size, names(&open));
            return Err(error
                .why(why)
                .fix("look at what they printed; they need this address and this token"));
        }
        match acceptor.next() {
            Some((bootstrap, BootstrapMsg::Join { version, token, rank, size, listens })) => {
                if token != rank_info.token {
                    refuse(bootstrap, "its token is not this job's");
                    continue;
                }
                if let Err(why) = check_joined(rank_info, rank_links, (version, rank, size)) {
                    refuse(bootstrap, &why.to_string());
                    return Err(why);
                }
                members[rank] = listens;
                rank_links.links[rank] = Some(bootstrap);
            }
            Some((bootstrap, _)) => refuse(bootstrap, "it does not say which rank it is"),
            None => std::thread::sleep(POLL_INTERVAL),
        }
    }
}

fn check_joined(
    rank_info: &RankInfo,
    rank_links: &RankLinks,
    (version, rank, size): (u32, usize, usize),
) -> Result<()> {
    let wrong = |kind, why: String, fix: &'static str| {
        Err(Error::new(kind, format!("meet rank {rank}")).why(why).fix(fix))
    };
    if version != VERSION {
        let why = format!("it speaks version {version} of the messages, rank 0 version {VERSION}");
        return wrong(Kind::Unsupported, why, "build all ranks from one version");
    }
    if size != rank_info.size {
        let why = format!("it counts {size} ranks, rank 0 counts {}", rank_info.size);
        return wrong(Kind::InvalidArgument, why, "start all ranks with one size");
    }
    if rank == 0 || rank >= size || rank_links.links[rank].is_some() {
        let why = format!("two processes say that they are rank {rank}, or there is no such rank");
        return wrong(Kind::InvalidArgument, why, "give each process a rank of its own");
    }
    Ok(())
}

/// `1, 2, 5`; only the first of many.
fn names(ranks: &[usize]) -> String {
    let named: Vec<String> = ranks.iter().take(16).map(|rank| format!("rank {rank}")).collect();
    let more = if ranks.len() > 16 { ", …" } else { "" };
    format!("{}{more}", named.join(", "))
}

/// Something that only the ranks of this meeting know.
fn secret() -> Result<String> {
    let mut bytes = [0; 16];
    let read = std::fs::File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut bytes));
    read.map_err(|why| Error::os("read /dev/urandom", &why))?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// Listens where the place says; also the address of this machine that others use.
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

/// Writes our address to a file, whole or not at all.
fn write_address_file(path: &Path, address: SocketAddr) -> Result<()> {
    let draft = path.with_extension(format!("draft{}", std::process::id()));
    let mut options = std::fs::OpenOptions::new();
    options.write(true).create_new(true).mode(0o600);
    let written = options
        .open(&draft)
        .and_then(|mut file| writeln!(file, "{address}"))
        .and_then(|()| std::fs::rename(&draft, path));
    written.map_err(|why| {
        let _ = std::fs::remove_file(&draft);
        Error::os(format!("write this rank's address to {}", path.display()), &why)
            .fix("set WARPWIRE_MASTER=HOST:PORT instead")
    })
}

/// The address in such a file, if this user or root wrote it.
fn read_address_file(path: &Path) -> Option<SocketAddr> {
    let file = std::fs::File::open(path).ok()?;
    let owner = file.metadata().ok()?.uid();
    if owner != rustix::process::geteuid().as_raw() && owner != 0 {
        tracing::warn!(path = %path.display(), owner, "another user's file is not believed");
        return None;
    }
    let mut text = String::new();
    file.take(256).read_to_string(&mut text).ok()?;
    text.trim().parse().ok()
}

/// Another rank's part: to rank 0, then to those before it, and waiting for those after it.
fn join(rank_info: &RankInfo, deadline: Instant) -> Result<RankLinks> {
    let (mut bootstrap, listener) = reach_host(rank_info, deadline)?;
    bootstrap.set_timeout(left(deadline))?;
    let local_ip = bootstrap.local()?.ip();
    let silent = |error: Error| {
        let why = error.reason().to_owned();
        let error = Error::new(error.kind().clone(), "meet the other ranks").why(why);
        error.fix("look at what rank 0 printed")
    };
    let (members, secret) = match bootstrap.recv().map_err(silent)? {
        BootstrapMsg::Table { members, secret } if members.len() == rank_info.size => {
            (members, secret)
        }
        BootstrapMsg::Failed { why } => {
            let why = format!("rank 0 says: {why}");
            return Err(Error::new(Kind::PeerLost, "meet the other ranks").why(why));
        }
        other => return Err(unexpected(0, &other)),
    };
    let mut rank_links = RankLinks { links: (0..rank_info.size).map(|_| None).collect(), local_ip };
    rank_links.links[0] = Some(bootstrap);
    let meshed =
        mesh(rank_info, &mut rank_links, Acceptor::new(listener)?, &members, &secret, deadline);
    meshed.inspect_err(|why| rank_links.abort(why))?;
    Ok(rank_links)
}

/// Connects to rank 0 and says who this is; tries again until the time is over, as rank 0 may start later.
fn reach_host(rank_info: &RankInfo, deadline: Instant) -> Result<(Bootstrap, TcpListener)> {
    loop {
        let last = match try_host(rank_info) {
            Ok(reached) => return Ok(reached),
            Err(error) => error.during("reach rank 0").fix("start rank 0, or see what it printed"),
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

fn try_host(rank_info: &RankInfo) -> Result<(Bootstrap, TcpListener)> {
    let failed = |why: &std::io::Error| Error::os("reach rank 0", why);
    let missing = || {
        let error = Error::new(Kind::Timeout, "reach rank 0");
        error.why("it has not said where it is, or the name has no address")
    };
    let address = match &rank_info.rendezvous {
        Rendezvous::Address(text) => text.to_socket_addrs().map_err(|why| failed(&why))?.next(),
        Rendezvous::File(path) => read_address_file(path),
    };
    let address = address.ok_or_else(missing)?;
    let stream =
        TcpStream::connect_timeout(&address, MESSAGE_TIMEOUT).map_err(|why| failed(&why))?;
    let mut bootstrap = Bootstrap::from_stream(stream, MESSAGE_TIMEOUT)?;
    // Bound to where rank 0 sees us: to loopback if that is where we met.
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
    mut acceptor: Acceptor,
    members: &[SocketAddr],
    secret: &str,
    deadline: Instant,
) -> Result<()> {
    for (rank, address) in members.iter().enumerate().take(rank_info.rank).skip(1) {
        let what = || format!("meet rank {rank}");
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
            let error = Error::new(Kind::Timeout, "meet the other ranks");
            return Err(error.why(format!("they did not come: {}", names(&missing))));
        }
        match acceptor.next() {
            Some((bootstrap, BootstrapMsg::Mesh { secret: theirs, rank }))
                if theirs == secret && missing.contains(&rank) =>
            {
                rank_links.links[rank] = Some(bootstrap);
            }
            Some((bootstrap, _)) => refuse(bootstrap, "it is none of the ranks that are awaited"),
            None => std::thread::sleep(POLL_INTERVAL),
        }
    }
}

/// A rank says something else than it should.
pub(super) fn unexpected(rank: usize, message: &BootstrapMsg) -> Error {
    let error = Error::new(Kind::Malformed, format!("meet rank {rank}"));
    error.why(format!("it says {message:?}")).fix("build all ranks from one version")
}

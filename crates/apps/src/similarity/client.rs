//! A kernel as a client of a similarity server: it sends one query after the other.

use std::net::SocketAddr;
use std::time::Duration;

use rustix::io::Errno;
use warpwire::error::{Error, Kind, Result};
use warpwire::mem::sim::{Block, KernelFault};
use warpwire::mem::{Allocation, DeviceAddr, Kernel, Launch};
use warpwire::sock::SockHost;
use warpwire::sock::device::{Family, Sock, SockError, SockOption, SockResult, Sockets};
use warpwire::sock::layout::{address_bytes, address_from};

use super::wire::{HEAD, MATCH, SearchHit, query_bytes, take_answer};
use super::{CLIENT_KERNEL, SocketFamily, program};
use crate::serving::{setup, start};

const THREADS: u32 = 128;
/// Offsets at which the kernel stores the number of queries answered, and the errno if it failed.
const DONE: u64 = 0;
const FAILED: u64 = 8;
const RESULT_LEN: u64 = 16;
/// How long the kernel's start and end may take in addition to its waits.
const LAUNCH_TIMEOUT: Duration = Duration::from_secs(20);

setup! {
    /// The kernel's argument block, as in similarity.cu.
    struct Setup {
        table, kind, queries, query_size, answers, answer_size, count, result, timeout,
    }
}
const _: () = assert!(Setup::LEN == 96, "as in similarity.cu");

/// Memory of a client.
struct ClientMemory {
    setup: Allocation,
    result: Allocation,
    answers: Allocation,
    answer_size: u64,
    _queries: Allocation,
}

/// The queries that a kernel sends.
#[derive(Clone, Copy, Debug)]
pub struct Queries<'a> {
    /// Address of the server.
    pub server: SocketAddr,
    /// Family of its sockets.
    pub over: SocketFamily,
    /// Number of matches per query, 1 to 4096.
    pub k: u32,
    /// The components of all queries, query by query.
    pub vectors: &'a [f32],
    /// Number of components of each query.
    pub dimension: u32,
    /// How long to wait for the server in each call.
    pub timeout: Duration,
}

impl ClientMemory {
    fn alloc(host: &SockHost, asked: &Queries<'_>) -> Result<(Self, u64)> {
        if asked.k == 0 || asked.k > 4096 {
            let why = format!("{} matches", asked.k);
            let error = Error::new(Kind::InvalidArgument, "send queries from a kernel").why(why);
            return Err(error.fix("ask for 1 to 4096"));
        }
        let count = super::wire::check_vectors(asked.vectors, asked.dimension)?;
        let each = asked.vectors.chunks_exact(asked.dimension as usize);
        let bytes: Vec<u8> = each.flat_map(|one| query_bytes(asked.k, one)).collect();
        let answer_size = (HEAD + asked.k as usize * MATCH) as u64;
        let queries = host.alloc(bytes.len() as u64)?;
        let (answers, setup) = (host.alloc(count * answer_size)?, host.alloc(Setup::LEN)?);
        let result = host.device().alloc_pinned(RESULT_LEN)?;
        queries.write(0, &bytes)?;
        result.write(0, &[0; RESULT_LEN as usize])?;
        let values = Setup {
            table: host.table(),
            kind: asked.over.kind() as u64,
            queries: host.address_of(&queries)?,
            query_size: bytes.len() as u64 / count,
            answers: host.address_of(&answers)?,
            answer_size,
            count,
            result: host.address_of(&result)?,
            timeout: asked.timeout.as_nanos() as u64,
            address: address_bytes(Some(asked.server)),
        };
        setup.write(0, &values.bytes())?;
        Ok((Self { setup, result, answers, answer_size, _queries: queries }, count))
    }

    /// The matches of all queries, or the failure.
    fn collect(&self, asked: &Queries<'_>, count: u64) -> Result<Vec<Vec<SearchHit>>> {
        let result = self.result.host_bytes()?;
        let (done, errno) = (result.load_u64(DONE)?, result.load_u64(FAILED)? as i32);
        let about = || format!("query {} from a kernel", asked.server);
        let mut found = Vec::new();
        let mut bytes = vec![0; self.answer_size as usize];
        // The reply at which the kernel stopped may contain the server's reason.
        let last = if errno == Errno::PROTO.raw_os_error() { done + 1 } else { done };
        for number in 0..last.min(count) {
            self.answers.read(number * self.answer_size, &mut bytes)?;
            let answer = take_answer(&mut &bytes[..], asked.k);
            found
                .push(answer.map_err(|error| {
                    Error::new(Kind::Malformed, about()).why(error.to_string())
                })?);
        }
        if errno != 0 || found.len() as u64 != count {
            let why = std::io::Error::from_raw_os_error(errno).to_string();
            let error = Error::new(Kind::Os(errno), about()).why(why);
            return Err(
                error.fix("check that a similarity server of that family listens on that address")
            );
        }
        Ok(found)
    }
}

/// A client kernel, loaded onto a device.
///
/// ```no_run
/// # use warpwire::sock::SockHost;
/// # fn example(here: &SockHost, there: &SockHost) -> warpwire::Result<()> {
/// use std::time::Duration;
/// use warpwire_apps::similarity::{
///     KernelClient, Queries, SimilarOptions, SimilarServer, SocketFamily,
/// };
/// let client = KernelClient::load(here)?; // a GPU cannot load code while a server runs on it
/// let options = SimilarOptions::at("127.0.0.1:0".parse().unwrap());
/// let server = SimilarServer::start(there, &[1.0, 2.0], 1, options)?;
/// let (server, timeout) = (server.address(), Duration::from_secs(1));
/// let over = SocketFamily::Inet;
/// client.ask(&Queries { server, over, k: 1, vectors: &[1.0], dimension: 1, timeout })?;
/// # Ok(())
/// # }
/// ```
pub struct KernelClient<'a> {
    host: &'a SockHost,
    kernel: Kernel,
}

impl<'a> KernelClient<'a> {
    /// Loads the kernel onto the host's device.
    ///
    /// # Errors
    /// [`Kind::Busy`] if kernels that run indefinitely occupy the device.
    pub fn load(host: &'a SockHost) -> Result<Self> {
        let kernel = host.device().load(&program())?.kernel(CLIENT_KERNEL)?;
        Ok(Self { host, kernel })
    }

    /// Sends the queries to a server and returns the matches of each.
    ///
    /// # Errors
    /// If the server cannot be reached, rejects a query, or does not reply in time.
    pub fn ask(&self, asked: &Queries<'_>) -> Result<Vec<Vec<SearchHit>>> {
        let (memory, count) = ClientMemory::alloc(self.host, asked)?;
        let stream = self.host.device().stream()?;
        let setup = memory.setup.whole()?;
        start(&stream, Launch::new(&self.kernel).threads(THREADS).region(&setup))?;
        let waits = asked.timeout.saturating_mul(u32::try_from(count + 2).unwrap_or(u32::MAX));
        stream.synchronize(waits.saturating_add(LAUNCH_TIMEOUT))?;
        memory.collect(asked, count)
    }
}

/// Runs the client on a thread of a host for [`Place::Threads`](warpwire::sock::Place::Threads):
/// for tests of similarity.cu as C++.
#[doc(hidden)]
pub fn ask_from_thread(
    host: &SockHost,
    asked: &Queries<'_>,
    run: impl FnOnce(u64, u64),
) -> Result<Vec<Vec<SearchHit>>> {
    let (memory, count) = ClientMemory::alloc(host, asked)?;
    run(host.address_of(&memory.setup)?, 0);
    memory.collect(asked, count)
}

/// The client as a block function, equivalent to similarity.cu.
pub(super) fn client_block(block: &Block<'_>) -> std::result::Result<(), KernelFault> {
    let setup = Setup::read(block)?;
    let sockets = Sockets::open(block, DeviceAddr::new(setup.table))?;
    let mut done = 0;
    let errno = match ask_all(block, &sockets, &setup, &mut done) {
        Ok(()) => 0,
        Err(SockError::Errno(errno)) => errno.raw_os_error() as u64,
        Err(SockError::KernelFault(fault)) => return Err(fault),
    };
    block.store_u64(DeviceAddr::new(setup.result + DONE), done)?;
    block.store_u64(DeviceAddr::new(setup.result + FAILED), errno)
}

fn ask_all(block: &Block<'_>, sockets: &Sockets<'_>, s: &Setup, done: &mut u64) -> SockResult<()> {
    let server = address_from(&s.address).ok_or(Errno::AFNOSUPPORT)?;
    let family = if server.is_ipv6() { Family::V6 } else { Family::V4 };
    let socket = sockets.socket(family, super::kind_of(s.kind))?;
    sockets.set(socket, SockOption::ReceiveTimeout, s.timeout as i64)?;
    sockets.set(socket, SockOption::SendTimeout, s.timeout as i64)?;
    let mut outcome = sockets.connect(socket, server);
    while outcome.is_ok() && *done < s.count {
        outcome = ask_one(block, sockets, s, socket, *done);
        *done += u64::from(outcome.is_ok());
    }
    sockets.close(socket)?;
    outcome
}

fn ask_one(
    b: &Block<'_>,
    sockets: &Sockets<'_>,
    s: &Setup,
    to: Sock,
    number: u64,
) -> SockResult<()> {
    let mut query = vec![0; s.query_size as usize];
    b.read(DeviceAddr::new(s.queries + number * s.query_size), &mut query)?;
    sockets.send(to, &query)?;
    let mut answer = vec![0; s.answer_size as usize];
    let whole = |got: usize, len: usize| if got == len { Ok(()) } else { Err(Errno::CONNRESET) };
    whole(sockets.recv_all(to, &mut answer[..HEAD])?, HEAD)?;
    let reply = DeviceAddr::new(s.answers + number * s.answer_size);
    b.write(reply, &answer[..HEAD])?;
    let max_matches = (answer.len() - HEAD) / MATCH;
    let count = super::wire::matches_of(&answer[..HEAD], max_matches).ok_or(Errno::PROTO)?;
    let rest = &mut answer[HEAD..HEAD + count * MATCH];
    whole(sockets.recv_all(to, rest)?, count * MATCH)?;
    Ok(b.write(reply, &answer)?)
}

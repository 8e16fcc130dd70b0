//! The workers for the simulated GPU: the equivalent of similarity.cu.

use std::time::{Duration, Instant};

use warpwire::mem::DeviceAddr;
use warpwire::mem::sim::{Block, KernelFault};
use warpwire::sock::device::{PollEntry, Sock, SockError, SockOption, SockResult, Sockets};
use warpwire::sock::layout::events;

use super::wire::{Best, HEAD, MATCH, ReplyStatus, SearchHit, check_head, head_bytes};
use super::{Setup, counts};
use crate::serving::{self, STOP};

const POLL_TIMEOUT: Duration = Duration::from_millis(50);
/// Number of vectors scored together.
const TILE: usize = 1024;

struct Connection {
    socket: Sock,
    input: Vec<u8>,
    output: Vec<u8>,
    closing: bool,
    /// When a partial query or an unsent reply was first seen.
    since: Option<Instant>,
}

struct Worker<'a> {
    block: &'a Block<'a>,
    setup: &'a Setup,
    sockets: Sockets<'a>,
    connections: Vec<Connection>,
}

/// One worker as a block function.
pub(super) fn similarity_block(block: &Block<'_>) -> Result<(), KernelFault> {
    let setup = Setup::read(block, block.address(0)?)?;
    let sockets = Sockets::open(block, DeviceAddr::new(setup.table))?;
    let mut worker = Worker { block, setup: &setup, sockets, connections: Vec::new() };
    match worker.serve() {
        // A socket error means that the host has stopped; so does the worker.
        Ok(()) | Err(SockError::Errno(_)) => Ok(()),
        Err(SockError::KernelFault(fault)) => Err(fault),
    }
}

impl Worker<'_> {
    fn count(&self, counter: u64, by: u64) -> SockResult<u64> {
        Ok(self.block.fetch_add_u64(DeviceAddr::new(self.setup.counts + counter), by)?)
    }

    fn serve(&mut self) -> SockResult<()> {
        let Setup { control, address, .. } = self.setup;
        let kind = super::kind_of(self.setup.kind);
        let listener = serving::listener(self.block, &self.sockets, *control, address, kind)?;
        let Some(listener) = listener else { return Ok(()) };
        while self.block.load_u64(DeviceAddr::new(control + STOP))? == 0 {
            let (mine, clients) = (self.connections.len() as u64, self.count(counts::CLIENTS, 0)?);
            // Workers with no more than their share of clients accept the next one; if the server
            // is full, all of them accept, to reject.
            let full = clients >= self.setup.max_clients;
            let accepts =
                full || mine < self.setup.per_worker && mine * self.setup.workers <= clients;
            let wanted = |connection: &Connection| {
                let waits = if connection.output.is_empty() { events::IN } else { events::OUT };
                PollEntry::new(connection.socket, waits)
            };
            let mut list: Vec<_> = self.connections.iter().map(wanted).collect();
            if accepts {
                list.push(PollEntry::new(listener, events::IN));
            }
            self.sockets
                .poll(&mut list, Some(if accepts { POLL_TIMEOUT } else { POLL_TIMEOUT / 10 }))?;
            let arrived = accepts && list.pop().is_some_and(|polled| polled.revents != 0);
            for (index, polled) in list.iter().enumerate().rev() {
                if !self.handle_events(index, polled.revents)? {
                    self.close_connection(index)?;
                }
            }
            if arrived {
                self.accept(listener)?;
            }
        }
        while !self.connections.is_empty() {
            self.close_connection(0)?;
        }
        if self.block.index() == 0 {
            self.sockets.close(listener)?;
        }
        Ok(())
    }

    fn close_connection(&mut self, index: usize) -> SockResult<()> {
        let connection = self.connections.swap_remove(index);
        self.count(counts::CLIENTS, u64::MAX)?;
        self.count(counts::CLOSED, 1)?;
        self.sockets.close(connection.socket)
    }

    /// Accepts a pending connection, unless another worker was faster; rejects it if the server is
    /// full.
    fn accept(&mut self, listener: Sock) -> SockResult<()> {
        let socket = match self.sockets.accept(listener) {
            Ok((socket, _)) => socket,
            Err(SockError::Errno(rustix::io::Errno::AGAIN)) => return Ok(()),
            Err(failure) => return Err(failure),
        };
        self.sockets.set(socket, SockOption::NonBlocking, 1)?;
        let has_slot = (self.connections.len() as u64) < self.setup.per_worker;
        let before = self.count(counts::CLIENTS, 1)?;
        if !has_slot || before >= self.setup.max_clients {
            self.count(counts::CLIENTS, u64::MAX)?;
            // The client may have disconnected already.
            let _ = self.sockets.send(socket, &head_bytes(ReplyStatus::Full, 0));
            return self.sockets.close(socket);
        }
        self.connections.push(Connection {
            socket,
            input: Vec::new(),
            output: Vec::new(),
            closing: false,
            since: None,
        });
        Ok(())
    }

    /// Receives and answers a query; false if the connection is to be closed.
    fn handle_events(&mut self, index: usize, found: u16) -> SockResult<bool> {
        let idle_timeout = Duration::from_nanos(self.setup.idle_timeout);
        let (worker, size) = (&*self, self.setup.in_size as usize);
        let connection = &worker.connections[index];
        if found == 0 {
            return Ok(connection.since.is_none_or(|since| since.elapsed() <= idle_timeout));
        }
        let (socket, have) = (connection.socket, connection.input.len());
        let mut answer = None;
        if found & !events::OUT != 0 && connection.output.is_empty() {
            let mut more = vec![0; size - have];
            let got = match self.sockets.recv(socket, &mut more) {
                Ok(0) => return Ok(false),
                Ok(got) => got,
                Err(SockError::Errno(rustix::io::Errno::AGAIN)) => 0,
                Err(SockError::Errno(_)) => return Ok(false),
                Err(fault) => return Err(fault),
            };
            self.connections[index].input.extend(&more[..got]);
            answer = self.answer(&self.connections[index].input)?;
        }
        let connection = &mut self.connections[index];
        if let Some((bytes, closing)) = answer {
            connection.output.extend(bytes);
            connection.closing = closing;
            connection.input.clear();
        }
        if !connection.output.is_empty() {
            match self.sockets.send(connection.socket, &connection.output) {
                Ok(sent) => drop(connection.output.drain(..sent)),
                Err(SockError::Errno(rustix::io::Errno::AGAIN)) => {}
                Err(SockError::Errno(_)) => return Ok(false),
                Err(fault) => return Err(fault),
            }
        }
        let busy = !connection.input.is_empty() || !connection.output.is_empty();
        connection.since = busy.then(|| connection.since.unwrap_or_else(Instant::now));
        let late = connection.since.is_some_and(|since| since.elapsed() > idle_timeout);
        let replied = connection.output.is_empty() && connection.closing;
        Ok(!late && !replied)
    }

    /// The reply to the received bytes, and whether to close the connection after it; `None` if the
    /// query is incomplete.
    fn answer(&self, input: &[u8]) -> SockResult<Option<(Vec<u8>, bool)>> {
        if input.len() < HEAD {
            return Ok(None);
        }
        let (head, rest) = input.split_at(HEAD);
        let k = match check_head(head, self.setup.dimension, self.setup.max_k) {
            Ok(k) => k,
            Err(status) => return self.refuse(status),
        };
        if input.len() < self.setup.in_size as usize {
            return Ok(None);
        }
        let query = floats(rest);
        if query.iter().any(|part| !part.is_finite()) {
            return self.refuse(ReplyStatus::NotFinite);
        }
        let found = self.search(&query, k)?;
        self.count(counts::QUERIES, 1)?;
        let mut bytes = Vec::with_capacity(HEAD + found.len() * MATCH);
        bytes.extend(head_bytes(ReplyStatus::Found, found.len() as u32));
        for one in found {
            bytes.extend(one.id.to_le_bytes());
            bytes.extend(one.score.to_le_bytes());
        }
        Ok(Some((bytes, false)))
    }

    fn refuse(&self, status: ReplyStatus) -> SockResult<Option<(Vec<u8>, bool)>> {
        self.count(counts::REFUSED, 1)?;
        Ok(Some((head_bytes(status, 0).to_vec(), true)))
    }

    fn search(&self, query: &[f32], k: u32) -> SockResult<Vec<SearchHit>> {
        let (count, mut best) = (self.setup.vector_count, Best::new(k as usize));
        let mut bytes = [0; TILE * 4];
        for first in (0..count).step_by(TILE) {
            let tile = TILE.min((count - first) as usize);
            let mut scores = [0.0_f32; TILE];
            for (component, part) in query.iter().enumerate() {
                // The vectors are stored transposed: one component of all is contiguous.
                let at = self.setup.vectors + (component as u64 * count + first) * 4;
                self.block.read(DeviceAddr::new(at), &mut bytes[..tile * 4])?;
                for (score, word) in scores.iter_mut().zip(bytes[..tile * 4].as_chunks::<4>().0) {
                    *score = part.mul_add(f32::from_le_bytes(*word), *score);
                }
            }
            for (at, score) in scores[..tile].iter().enumerate() {
                best.offer(SearchHit { id: (first + at as u64) as u32, score: *score });
            }
        }
        Ok(best.list)
    }
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks::<4>().0.iter().map(|word| f32::from_le_bytes(*word)).collect()
}

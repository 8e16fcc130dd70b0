//! A worker of a server on the simulated GPU: accepts and serves connections until the host stops
//! the server. `serve` in serving.cuh is the equivalent for CUDA.

use std::time::{Duration, Instant};

use warpwire::mem::DeviceAddr;
use warpwire::mem::sim::{Block, KernelFault};
use warpwire::sock::device::{
    PollEntry, Sock, SockError, SockOption, SockResult, SocketKind, Sockets,
};
use warpwire::sock::layout::{ADDRESS_LEN, events};

use super::STOP;

const POLL_TIMEOUT: Duration = Duration::from_millis(50);

/// What a server does with its connections.
pub(crate) trait Service {
    /// What a client gets that finds the server full.
    fn full_reply(&self) -> Vec<u8>;

    /// Consumes the input of a connection and appends to its output.
    fn process(&self, connection: &mut Connection) -> SockResult<()>;
}

/// A connection, its unprocessed input and its unsent output.
#[derive(Debug)]
pub(crate) struct Connection {
    socket: Sock,
    pub(crate) input: Vec<u8>,
    pub(crate) output: Vec<u8>,
    /// Closed once the output is sent.
    pub(crate) closing: bool,
    /// When partial input or unsent output was first seen.
    since: Option<Instant>,
}

/// The words of a server's setup that its workers need.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WorkerSetup {
    pub(crate) table: u64,
    pub(crate) control: u64,
    pub(crate) address: [u8; ADDRESS_LEN],
    pub(crate) kind: SocketKind,
    /// Maximum length of a connection's unprocessed input, in bytes.
    pub(crate) in_size: u64,
    pub(crate) per_worker: u64,
    pub(crate) workers: u64,
    pub(crate) max_clients: u64,
    /// In nanoseconds.
    pub(crate) idle_timeout: u64,
    /// Addresses of two counters: clients connected, and connections closed.
    pub(crate) clients: u64,
    pub(crate) closed: u64,
}

/// Runs one worker as a block function.
pub(crate) fn serve(
    block: &Block<'_>,
    setup: WorkerSetup,
    service: &impl Service,
) -> Result<(), KernelFault> {
    let sockets = Sockets::open(block, DeviceAddr::new(setup.table))?;
    let mut worker = Worker { block, setup, sockets, service, connections: Vec::new() };
    match worker.serve() {
        // A socket error means that the host has stopped; so does the worker.
        Ok(()) | Err(SockError::Errno(_)) => Ok(()),
        Err(SockError::KernelFault(fault)) => Err(fault),
    }
}

struct Worker<'a, S> {
    block: &'a Block<'a>,
    setup: WorkerSetup,
    sockets: Sockets<'a>,
    service: &'a S,
    connections: Vec<Connection>,
}

impl<S: Service> Worker<'_, S> {
    fn count(&self, counter: u64, by: u64) -> SockResult<u64> {
        Ok(self.block.fetch_add_u64(DeviceAddr::new(counter), by)?)
    }

    fn serve(&mut self) -> SockResult<()> {
        let WorkerSetup { control, address, kind, .. } = self.setup;
        let listener = super::listener(self.block, &self.sockets, control, &address, kind)?;
        let Some(listener) = listener else { return Ok(()) };
        while self.block.load_u64(DeviceAddr::new(control + STOP))? == 0 {
            let clients = self.block.load_u64(DeviceAddr::new(self.setup.clients))?;
            let mine = self.connections.len() as u64;
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
        self.count(self.setup.clients, u64::MAX)?;
        self.count(self.setup.closed, 1)?;
        self.sockets.close(connection.socket)
    }

    /// Accepts a pending connection, unless another worker was faster; rejects it if the server is
    /// full or this worker has no free slot.
    fn accept(&mut self, listener: Sock) -> SockResult<()> {
        let socket = match self.sockets.accept(listener) {
            Ok((socket, _)) => socket,
            Err(SockError::Errno(rustix::io::Errno::AGAIN)) => return Ok(()),
            Err(failure) => return Err(failure),
        };
        self.sockets.set(socket, SockOption::NonBlocking, 1)?;
        let has_slot = (self.connections.len() as u64) < self.setup.per_worker;
        let before = self.count(self.setup.clients, 1)?;
        if !has_slot || before >= self.setup.max_clients {
            self.count(self.setup.clients, u64::MAX)?;
            // The client may have disconnected already.
            let _ = self.sockets.send(socket, &self.service.full_reply());
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

    /// Receives and processes input, and sends output; false if the connection is to be closed.
    fn handle_events(&mut self, index: usize, found: u16) -> SockResult<bool> {
        let connection = &mut self.connections[index];
        let idle_timeout = Duration::from_nanos(self.setup.idle_timeout);
        if found == 0 {
            return Ok(connection.since.is_none_or(|since| since.elapsed() <= idle_timeout));
        }
        let (have, in_size) = (connection.input.len(), self.setup.in_size as usize);
        if found & !events::OUT != 0 && have < in_size && connection.output.is_empty() {
            connection.input.resize(in_size, 0);
            let got = self.sockets.recv(connection.socket, &mut connection.input[have..]);
            connection.input.truncate(have + *got.as_ref().unwrap_or(&0));
            match got {
                Ok(0) => return Ok(false),
                Ok(_) | Err(SockError::Errno(rustix::io::Errno::AGAIN)) => {}
                Err(SockError::Errno(_)) => return Ok(false),
                Err(fault) => return Err(fault),
            }
        }
        self.service.process(connection)?;
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
}

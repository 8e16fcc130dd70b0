//! The workers for the simulated GPU: the equivalent of kv.cu.

use std::time::{Duration, Instant};

use warpwire::mem::DeviceAddr;
use warpwire::mem::sim::{Block, KernelFault};
use warpwire::sock::device::{
    PollEntry, Sock, SockError, SockOption, SockResult, SocketKind, Sockets,
};
use warpwire::sock::layout::events;

use super::resp::{self, MAX_ARGUMENTS, Parsed};
use super::store::Store;
use super::{MAX_KEY, Setup, control, counts};
use crate::serving;

const POLL_TIMEOUT: Duration = Duration::from_millis(50);

struct Connection {
    socket: Sock,
    input: Vec<u8>,
    output: Vec<u8>,
    closing: bool,
    /// When a partial command or unsent output was first seen.
    since: Option<Instant>,
}

struct Worker<'a> {
    block: &'a Block<'a>,
    setup: &'a Setup,
    sockets: Sockets<'a>,
    store: Store<'a>,
    connections: Vec<Connection>,
}

/// One worker as a block function.
pub(super) fn kv_block(block: &Block<'_>) -> Result<(), KernelFault> {
    let setup = Setup::read(block, block.address(0)?)?;
    let mut worker = Worker {
        block,
        setup: &setup,
        sockets: Sockets::open(block, DeviceAddr::new(setup.table))?,
        store: Store { block, setup: &setup },
        connections: Vec::new(),
    };
    match worker.serve() {
        // A socket error means that the host has stopped; so does the worker.
        Ok(()) | Err(SockError::Errno(_)) => Ok(()),
        Err(SockError::KernelFault(fault)) => Err(fault),
    }
}

impl Worker<'_> {
    fn control(&self, word: u64) -> DeviceAddr {
        DeviceAddr::new(self.setup.control + word)
    }

    fn serve(&mut self) -> SockResult<()> {
        let Setup { control, address, .. } = self.setup;
        let listener =
            serving::listener(self.block, &self.sockets, *control, address, SocketKind::Stream)?;
        let Some(listener) = listener else { return Ok(()) };
        while self.block.load_u64(self.control(control::STOP))? == 0 {
            let (mine, clients) =
                (self.connections.len() as u64, self.store.counter(counts::CLIENTS)?);
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
        self.store.count(counts::CLIENTS, u64::MAX)?;
        self.store.count(counts::CLOSED, 1)?;
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
        let before = self.store.count(counts::CLIENTS, 1)?;
        if !has_slot || before >= self.setup.max_clients {
            self.store.count(counts::CLIENTS, u64::MAX)?;
            // The client may have disconnected already.
            let _ = self.sockets.send(socket, b"-ERR max number of clients reached\r\n");
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

    /// Receives and executes commands; false if the connection is to be closed.
    fn handle_events(&mut self, index: usize, found: u16) -> SockResult<bool> {
        let setup = self.setup;
        let connection = &mut self.connections[index];
        let idle_timeout = Duration::from_nanos(setup.idle_timeout);
        if found == 0 {
            return Ok(connection.since.is_none_or(|since| since.elapsed() <= idle_timeout));
        }
        let have = connection.input.len();
        if found & !events::OUT != 0
            && have < setup.in_size as usize
            && connection.output.is_empty()
        {
            connection.input.resize(setup.in_size as usize, 0);
            let got = self.sockets.recv(connection.socket, &mut connection.input[have..]);
            connection.input.truncate(have + *got.as_ref().unwrap_or(&0));
            match got {
                Ok(0) => return Ok(false),
                Ok(_) | Err(SockError::Errno(rustix::io::Errno::AGAIN)) => {}
                Err(SockError::Errno(_)) => return Ok(false),
                Err(fault) => return Err(fault),
            }
        }
        execute_complete(&self.store, connection)?;
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

/// Executes all complete commands.
fn execute_complete(store: &Store<'_>, connection: &mut Connection) -> SockResult<()> {
    let setup = store.setup;
    let (max_word, max_len) = (setup.max_value.max(MAX_KEY) as usize, setup.in_size as usize);
    let (mut done, mut executed) = (0, 0);
    while !connection.closing {
        let has_room = |needs: u64| connection.output.len() as u64 + needs <= setup.out_size;
        match resp::parse(&connection.input[done..], max_word, max_len) {
            Parsed::More => break,
            Parsed::Bad(_) if !has_room(128) => break,
            Parsed::Bad(why) => {
                connection.output.extend(why.as_bytes());
                connection.closing = true;
                store.count(counts::REFUSED, 1)?;
            }
            Parsed::Whole(words, used) => {
                let needs = (setup.max_value + 32) * words.len().max(1) as u64 + 128;
                if !has_room(needs.min(setup.out_size)) && !connection.output.is_empty() {
                    break; // send the pending output first
                }
                if needs > setup.out_size {
                    connection.output.extend(b"-ERR too many keys\r\n");
                } else {
                    let words: Vec<&[u8]> =
                        words.into_iter().map(|word| &connection.input[done..][word]).collect();
                    connection.closing = execute(store, &words, &mut connection.output)?;
                }
                executed += 1;
                done += used;
            }
        }
    }
    if executed > 0 {
        store.count(counts::COMMANDS, executed)?;
    }
    connection.input.drain(..done);
    Ok(())
}

/// Executes a command; true if the connection is to be closed after it.
fn execute(store: &Store<'_>, words: &[&[u8]], out: &mut Vec<u8>) -> SockResult<bool> {
    debug_assert!(words.len() <= MAX_ARGUMENTS);
    let Some((name, rest)) = words.split_first() else { return Ok(false) };
    let name = name.to_ascii_uppercase();
    let keys = match &name[..] {
        b"SET" => &rest[..rest.len().min(1)],
        b"GET" | b"DEL" | b"INCR" | b"DECR" | b"MGET" | b"EXISTS" => rest,
        _ => &[],
    };
    let keyed =
        matches!(&name[..], b"GET" | b"SET" | b"DEL" | b"INCR" | b"DECR" | b"MGET" | b"EXISTS");
    if keyed && rest.len() < if name == b"SET" { 2 } else { 1 } {
        out.extend(b"-ERR wrong number of arguments\r\n");
        return Ok(false);
    }
    if keys.iter().any(|key| key.len() > MAX_KEY as usize) {
        out.extend(b"-ERR the key is too long\r\n");
        return Ok(false);
    }
    match (&name[..], rest) {
        (b"GET", [key, ..]) => resp::put_string(out, store.get(key)?.as_deref()),
        (b"SET", [_, _, _, ..]) => out.extend(b"-ERR syntax error\r\n"),
        (b"SET", [_, value]) if value.len() as u64 > store.setup.max_value => {
            out.extend(b"-ERR the value is too long\r\n");
        }
        (b"SET", [key, value]) => out.extend(match store.set(key, value)? {
            true => &b"+OK\r\n"[..],
            false => b"-OOM the store has no room for this key\r\n",
        }),
        (b"INCR" | b"DECR", [key, ..]) => {
            match store.add(key, if name == b"INCR" { 1 } else { -1 })? {
                Ok(sum) => resp::put_number(out, sum),
                Err(why) => out.extend(why.as_bytes()),
            }
        }
        (b"DEL" | b"EXISTS", keys) => {
            let mut found = 0;
            for key in keys {
                found += i64::from(match name == b"DEL" {
                    true => store.drop_key(key)?,
                    false => store.exists(key)?,
                });
            }
            resp::put_number(out, found);
        }
        (b"MGET", keys) => {
            out.extend(format!("*{}\r\n", keys.len()).as_bytes());
            for key in keys {
                resp::put_string(out, store.get(key)?.as_deref());
            }
        }
        (b"PING", []) => out.extend(b"+PONG\r\n"),
        (b"PING", [text, ..]) | (b"ECHO", [text]) => resp::put_string(out, Some(text)),
        (b"DBSIZE", _) => resp::put_number(out, store.counter(counts::KEYS)? as i64),
        (b"SELECT" | b"CLIENT" | b"QUIT", _) => out.extend(b"+OK\r\n"),
        (b"COMMAND" | b"CONFIG", _) => out.extend(b"*0\r\n"),
        _ => out.extend(b"-ERR unknown command\r\n"),
    }
    Ok(name == b"QUIT")
}

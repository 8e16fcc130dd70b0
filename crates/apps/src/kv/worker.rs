//! The workers of the simulated GPU: the twin of kv.cu.

use std::time::{Duration, Instant};

use warpwire::mem::DeviceAddr;
use warpwire::mem::sim::{Block, KernelFault};
use warpwire::sock::device::{
    PollEntry, Sock, SockError, SockOption, SockResult, SocketKind, Sockets,
};
use warpwire::sock::layout::events;

use super::resp::{self, MOST_ARGUMENTS, Parsed};
use super::store::Store;
use super::{MOST_KEY, Setup, control, counts};
use crate::serving;

const NAP: Duration = Duration::from_millis(50);

struct Connection {
    socket: Sock,
    input: Vec<u8>,
    output: Vec<u8>,
    closing: bool,
    /// When something began that is not finished: half a command, or output that nobody takes.
    since: Option<Instant>,
}

struct Worker<'a> {
    block: &'a Block<'a>,
    setup: &'a Setup,
    sockets: Sockets<'a>,
    store: Store<'a>,
    connections: Vec<Connection>,
}

/// One worker, as a block function.
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
        // The host has ended, and so does this.
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
            // Whoever has no more than his share takes the next; all of them turn away what is too much.
            let full = clients >= self.setup.most_clients;
            let takes =
                full || mine < self.setup.per_worker && mine * self.setup.workers <= clients;
            let wanted = |connection: &Connection| {
                let waits = if connection.output.is_empty() { events::IN } else { events::OUT };
                PollEntry::new(connection.socket, waits)
            };
            let mut list: Vec<_> = self.connections.iter().map(wanted).collect();
            if takes {
                list.push(PollEntry::new(listener, events::IN));
            }
            self.sockets.poll(&mut list, Some(if takes { NAP } else { NAP / 10 }))?;
            let arrived = takes && list.pop().is_some_and(|polled| polled.revents != 0);
            for (index, polled) in list.iter().enumerate().rev() {
                if !self.converse(index, polled.revents)? {
                    self.hang_up(index)?;
                }
            }
            if arrived {
                self.take(listener)?;
            }
        }
        while !self.connections.is_empty() {
            self.hang_up(0)?;
        }
        if self.block.index() == 0 {
            self.sockets.close(listener)?;
        }
        Ok(())
    }

    fn hang_up(&mut self, index: usize) -> SockResult<()> {
        let connection = self.connections.swap_remove(index);
        self.store.count(counts::CLIENTS, u64::MAX)?;
        self.store.count(counts::CLOSED, 1)?;
        self.sockets.close(connection.socket)
    }

    /// Takes a connection that waits, if another worker was not faster; turns it away if there are too many, or no place
    /// for it here.
    fn take(&mut self, listener: Sock) -> SockResult<()> {
        let socket = match self.sockets.accept(listener) {
            Ok((socket, _)) => socket,
            Err(SockError::Errno(rustix::io::Errno::AGAIN)) => return Ok(()),
            Err(failure) => return Err(failure),
        };
        self.sockets.set(socket, SockOption::NonBlocking, 1)?;
        let has_place = (self.connections.len() as u64) < self.setup.per_worker;
        let before = self.store.count(counts::CLIENTS, 1)?;
        if !has_place || before >= self.setup.most_clients {
            self.store.count(counts::CLIENTS, u64::MAX)?;
            // It may be gone already.
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

    /// Takes what came, and answers it; false if the connection is done with.
    fn converse(&mut self, index: usize, found: u16) -> SockResult<bool> {
        let setup = self.setup;
        let connection = &mut self.connections[index];
        let patience = Duration::from_nanos(setup.patience);
        if found == 0 {
            return Ok(connection.since.is_none_or(|since| since.elapsed() <= patience));
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
        digest(&self.store, connection)?;
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
        let late = connection.since.is_some_and(|since| since.elapsed() > patience);
        let said = connection.output.is_empty() && connection.closing;
        Ok(!late && !said)
    }
}

/// Executes what came in whole.
fn digest(store: &Store<'_>, connection: &mut Connection) -> SockResult<()> {
    let setup = store.setup;
    let (most_word, most) = (setup.most_value.max(MOST_KEY) as usize, setup.in_size as usize);
    let (mut done, mut executed) = (0, 0);
    while !connection.closing {
        let has_room = |needs: u64| connection.output.len() as u64 + needs <= setup.out_size;
        match resp::parse(&connection.input[done..], most_word, most) {
            Parsed::More => break,
            Parsed::Bad(_) if !has_room(128) => break,
            Parsed::Bad(why) => {
                connection.output.extend(why.as_bytes());
                connection.closing = true;
                store.count(counts::REFUSED, 1)?;
            }
            Parsed::Whole(words, used) => {
                let needs = (setup.most_value + 32) * words.len().max(1) as u64 + 128;
                if !has_room(needs.min(setup.out_size)) && !connection.output.is_empty() {
                    break; // first what is there must go
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

/// Executes a command; true if the connection ends after it.
fn execute(store: &Store<'_>, words: &[&[u8]], out: &mut Vec<u8>) -> SockResult<bool> {
    debug_assert!(words.len() <= MOST_ARGUMENTS);
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
    if keys.iter().any(|key| key.len() > MOST_KEY as usize) {
        out.extend(b"-ERR the key is too long\r\n");
        return Ok(false);
    }
    match (&name[..], rest) {
        (b"GET", [key, ..]) => resp::put_string(out, store.get(key)?.as_deref()),
        (b"SET", [_, _, _, ..]) => out.extend(b"-ERR syntax error\r\n"),
        (b"SET", [_, value]) if value.len() as u64 > store.setup.most_value => {
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

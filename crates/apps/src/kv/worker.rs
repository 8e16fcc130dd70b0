//! The workers for the simulated GPU: the equivalent of kv.cu.

use warpwire::mem::sim::{Block, KernelFault};
use warpwire::sock::device::{SockResult, SocketKind};

use super::resp::{self, MAX_ARGUMENTS, Parsed};
use super::store::Store;
use super::{MAX_KEY, Setup, counts};
use crate::serving::{Connection, Service, WorkerSetup, serve};

/// One worker as a block function.
pub(super) fn kv_block(block: &Block<'_>) -> Result<(), KernelFault> {
    let setup = Setup::read(block)?;
    let worker = WorkerSetup {
        table: setup.table,
        control: setup.control,
        address: setup.address,
        kind: SocketKind::Stream,
        in_size: setup.in_size,
        per_worker: setup.per_worker,
        workers: setup.workers,
        max_clients: setup.max_clients,
        idle_timeout: setup.idle_timeout,
        clients: setup.counts + counts::CLIENTS,
        closed: setup.counts + counts::CLOSED,
    };
    serve(block, worker, &Store { block, setup: &setup })
}

impl Service for Store<'_> {
    fn full_reply(&self) -> Vec<u8> {
        b"-ERR max number of clients reached\r\n".to_vec()
    }

    fn process(&self, connection: &mut Connection) -> SockResult<()> {
        execute_complete(self, connection)
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

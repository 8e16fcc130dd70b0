//! Calls that ask the host: making, naming, connecting and closing sockets, and their settings.

use std::net::SocketAddr;
use std::time::Duration;

use rustix::io::Errno;

use super::wait::Patience;
use super::{Family, How, Kind, Outcome, Place, Sock, Sockets, at, desk, state};
use crate::sock::layout::{ADDRESS_LEN, Op, Setting, address_bytes, address_from, reply, request};

/// How long the end of a call of another block is waited for when a socket is closed.
const LAST_CALL: Duration = Duration::from_secs(10);

/// What a request carries beside its operation.
#[derive(Default)]
struct Asked {
    handle: i32,
    value: u64,
    option: u32,
    address: Option<SocketAddr>,
    /// Of a close: what was sent and read.
    bytes: Option<(u64, u64)>,
}

impl Sockets<'_> {
    /// A new socket. `EMFILE` if there is no place for one.
    pub fn socket(&self, family: Family, kind: Kind) -> Outcome<Sock> {
        self.socket_of_kind(family, kind as u32)
    }

    /// The same by the number of a kind, which may be any, as in CUDA: `ESOCKTNOSUPPORT` if there is no such [`Kind`].
    pub fn socket_of_kind(&self, family: Family, kind: u32) -> Outcome<Sock> {
        let value = family as u64 | u64::from(kind) << 8;
        let (handle, _) = self.ask(Op::Socket, &Asked { value, ..Asked::default() })?;
        let socket = Sock(handle as i32);
        self.take_desk(self.place(socket)?)?;
        Ok(socket)
    }

    /// Gives it an address of its own; port 0 lets the system choose ([`local_name`](Sockets::local_name) tells which).
    pub fn bind(&self, socket: Sock, address: SocketAddr) -> Outcome<()> {
        self.ask_about(socket, Op::Bind, Asked { address: Some(address), ..Asked::default() })?;
        Ok(())
    }

    /// Makes it a listener, at which up to `backlog` connections wait for [`accept`](Sockets::accept).
    pub fn listen(&self, socket: Sock, backlog: u32) -> Outcome<()> {
        let asked = Asked { value: u64::from(backlog), ..Asked::default() };
        self.ask_about(socket, Op::Listen, asked)?;
        Ok(())
    }

    /// Connects a stream, or names the peer of a datagram socket. A non-blocking stream returns `EINPROGRESS`; then it
    /// is ready to send when the connection stands.
    pub fn connect(&self, socket: Sock, address: SocketAddr) -> Outcome<()> {
        let place = self.place(socket)?;
        self.ask_about(socket, Op::Connect, Asked { address: Some(address), ..Asked::default() })?;
        let connected = self.wait(self.patience(place, desk::SEND_TIMEOUT)?, || {
            let seen = self.look(place)?;
            if let Some(errno) = seen.send_error() {
                return Err(errno.into());
            }
            Ok(seen.has(state::CONNECTED).then_some(()))
        });
        match connected {
            Err(super::Failure::Errno(Errno::AGAIN)) => Err(Errno::INPROGRESS.into()),
            outcome => outcome,
        }
    }

    /// Ends a direction. What was sent before still goes.
    pub fn shutdown(&self, socket: Sock, how: How) -> Outcome<()> {
        let place = self.place(socket)?;
        self.ask_about(socket, Op::Shutdown, Asked { value: how as u64, ..Asked::default() })?;
        if how != How::Receive && self.is_warp(place)? {
            self.end_sending(place)?;
        }
        let flags = match how {
            How::Receive => desk::SHUT_RECEIVE,
            How::Send => desk::SHUT_SEND,
            How::Both => desk::SHUT_RECEIVE | desk::SHUT_SEND,
        };
        self.change_flags(place, |before| before | flags)?;
        if how != How::Send && self.is_warp(place)? {
            self.end_receiving(place)?;
        }
        Ok(())
    }

    /// Lets go of a socket. What was sent still goes, in the background; calls of other blocks on it return `EBADF`.
    /// `EBUSY` while a span of it is out.
    pub fn close(&self, socket: Sock) -> Outcome<()> {
        let place = self.place(socket)?;
        let seen = self.look(place)?;
        let locks = [desk::SEND_LOCK, desk::RECEIVE_LOCK];
        for lock in locks {
            if self.block.load_u32(at(place.desk + lock))? == desk::SPAN {
                return Err(Errno::BUSY.into());
            }
        }
        let generation = at(place.desk + desk::GENERATION);
        let mine = u32::from(place.generation);
        if self.block.compare_exchange_u32(generation, mine, 0)? != mine {
            return Err(Errno::BADF.into());
        }
        // From here on no call begins; those that copy now are waited for.
        for lock in locks {
            let word = at(place.desk + lock);
            self.wait(Patience::For(LAST_CALL), || {
                let before = self.block.compare_exchange_u32(word, desk::FREE, desk::GONE)?;
                Ok((before == desk::FREE).then_some(()))
            })?;
        }
        let mut value = 0;
        if seen.is_warp() && seen.has(state::CONNECTED) {
            if !seen.has(state::RESETS) && seen.send_error().is_none() {
                self.post_end(place)?;
            }
            value = self.posted(place)?;
        }
        let bytes = Some((self.sent(place)?, self.consumed(place)?));
        self.ask(Op::Close, &Asked { handle: socket.raw(), value, bytes, ..Asked::default() })?;
        Ok(())
    }

    /// Tells the peer that no more will come, once those who copy now are done. A span that is out is not waited for.
    fn end_sending(&self, place: Place) -> Outcome<()> {
        let word = at(place.desk + desk::SEND_LOCK);
        let locked = self.wait(Patience::For(LAST_CALL), || {
            let before = self.block.compare_exchange_u32(word, desk::FREE, desk::COPYING)?;
            Ok((before != desk::COPYING).then_some(before == desk::FREE))
        })?;
        let ended = self.post_end(place);
        if locked {
            self.unlock(place, desk::SEND_LOCK)?;
        }
        ended
    }

    /// Tells the peer that no more will be read, once those who copy now are done; the desk says so already. Who has a span
    /// tells it with that.
    fn end_receiving(&self, place: Place) -> Outcome<()> {
        let word = at(place.desk + desk::RECEIVE_LOCK);
        let locked = self.wait(Patience::For(LAST_CALL), || {
            let before = self.block.compare_exchange_u32(word, desk::FREE, desk::COPYING)?;
            Ok((before != desk::COPYING).then_some(before == desk::FREE))
        })?;
        match locked {
            true => {
                self.locked(place, desk::RECEIVE_LOCK, || self.report(place, self.consumed(place)?))
            }
            false => Ok(()),
        }
    }

    /// Gives a connection up.
    pub(super) fn fail(&self, handle: i32, why: Errno) -> Outcome<()> {
        let value = why.raw_os_error() as u64;
        self.ask(Op::Fail, &Asked { handle, value, ..Asked::default() })?;
        Ok(())
    }

    /// Sets an option. `EINVAL` for a value that makes no sense, `EISCONN` for sizes once bytes may flow.
    pub fn set(&self, socket: Sock, setting: Setting, value: i64) -> Outcome<()> {
        let place = self.place(socket)?;
        self.look(place)?;
        let timeout = |at_desk: u64| -> Outcome<()> {
            let nanos = u64::try_from(value).map_err(|_| Errno::INVAL)?;
            Ok(self.block.store_u64(at(place.desk + at_desk), nanos)?)
        };
        match setting {
            Setting::NonBlocking => self.change_flags(place, |before| match value {
                0 => before & !desk::NON_BLOCKING,
                _ => before | desk::NON_BLOCKING,
            }),
            Setting::SendTimeout => timeout(desk::SEND_TIMEOUT),
            Setting::ReceiveTimeout => timeout(desk::RECEIVE_TIMEOUT),
            _ => {
                let (option, value) = (setting as u32, value as u64);
                let asked = Asked { option, value, ..Asked::default() };
                self.ask_about(socket, Op::SetOption, asked).map(|_| ())
            }
        }
    }

    /// What an option is.
    pub fn get(&self, socket: Sock, setting: Setting) -> Outcome<i64> {
        let place = self.place(socket)?;
        let seen = self.look(place)?;
        match setting {
            Setting::NonBlocking => Ok(i64::from(seen.flags & desk::NON_BLOCKING)),
            Setting::SendTimeout => {
                Ok(self.block.load_u64(at(place.desk + desk::SEND_TIMEOUT))? as i64)
            }
            Setting::ReceiveTimeout => {
                Ok(self.block.load_u64(at(place.desk + desk::RECEIVE_TIMEOUT))? as i64)
            }
            _ => {
                let asked = Asked { option: setting as u32, ..Asked::default() };
                Ok(self.ask_about(socket, Op::GetOption, asked)?.0)
            }
        }
    }

    /// Its own address.
    pub fn local_name(&self, socket: Sock) -> Outcome<SocketAddr> {
        let (_, name) = self.ask_about(socket, Op::LocalName, Asked::default())?;
        name.ok_or(Errno::NOTCONN.into())
    }

    /// Its peer's address. `ENOTCONN` if it has none.
    pub fn peer_name(&self, socket: Sock) -> Outcome<SocketAddr> {
        let (_, name) = self.ask_about(socket, Op::PeerName, Asked::default())?;
        name.ok_or(Errno::NOTCONN.into())
    }

    pub(super) fn change_flags(&self, place: Place, change: impl Fn(u32) -> u32) -> Outcome<()> {
        let word = at(place.desk + desk::FLAGS);
        loop {
            let before = self.block.load_u32(word)?;
            if self.block.compare_exchange_u32(word, before, change(before))? == before {
                return Ok(());
            }
        }
    }

    /// Asks about a socket that is open.
    fn ask_about(&self, socket: Sock, op: Op, asked: Asked) -> Outcome<(i64, Option<SocketAddr>)> {
        self.look(self.place(socket)?)?;
        self.ask(op, &Asked { handle: socket.raw(), ..asked })
    }

    /// Writes a request when it is its turn, and waits for the reply.
    fn ask(&self, op: Op, asked: &Asked) -> Outcome<(i64, Option<SocketAddr>)> {
        self.check_open()?;
        let ticket = self.block.fetch_add_u64(at(self.ticket), 1)?;
        let (slot, lap) = (ticket % u64::from(self.slots), ticket / u64::from(self.slots));
        let turn = at(self.turns + slot * 8);
        self.wait(Patience::Ever, || Ok((self.block.load_u64(turn)? == lap).then_some(())))?;
        let mut bytes = [0; request::LEN as usize];
        let mut put = |at: u64, part: &[u8]| {
            bytes[at as usize..at as usize + part.len()].copy_from_slice(part);
        };
        put(request::OP, &(op as u32).to_le_bytes());
        put(request::HANDLE, &asked.handle.to_le_bytes());
        put(request::VALUE, &asked.value.to_le_bytes());
        put(request::OPTION, &asked.option.to_le_bytes());
        put(request::ADDRESS, &address_bytes(asked.address));
        if let Some((sent, consumed)) = asked.bytes {
            put(request::SENT, &sent.to_le_bytes());
            put(request::CONSUMED, &consumed.to_le_bytes());
        }
        let base = self.requests + slot * request::LEN;
        self.block.write(at(base + 8), &bytes[8..])?;
        self.block.store_u64(at(base + request::NUMBER), ticket + 1)?;
        let from = self.replies + slot * reply::LEN;
        self.wait(Patience::Ever, || {
            let number = self.block.load_u64(at(from + reply::NUMBER))?;
            Ok((number == ticket + 1).then_some(()))
        })?;
        let result = self.block.load_u64(at(from + reply::RESULT))? as i64;
        let mut address = [0; ADDRESS_LEN];
        self.block.read(at(from + reply::ADDRESS), &mut address)?;
        self.block.store_u64(turn, lap + 1)?;
        if result < 0 {
            return Err(Errno::from_raw_os_error(-result as i32).into());
        }
        Ok((result, address_from(&address)))
    }
}

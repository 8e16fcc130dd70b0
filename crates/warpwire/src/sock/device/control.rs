//! Calls that send a request to the host: create, bind, connect and close sockets, and their
//! options.

use std::net::SocketAddr;
use std::time::Duration;

use rustix::io::Errno;

use super::wait::WaitLimit;
use super::{
    Family, ShutdownHow, Sock, SockResult, SocketKind, SocketRef, Sockets, at, device_state, state,
};
use crate::sock::layout::{
    ADDRESS_LEN, RequestOp, SockOption, address_bytes, address_from, reply, request,
};

/// How long close waits for calls of other blocks that are copying.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(10);

/// The arguments of a request.
#[derive(Default)]
struct RequestArgs {
    handle: i32,
    value: u64,
    option: u32,
    address: Option<SocketAddr>,
    /// Close only: total bytes sent and read.
    bytes: Option<(u64, u64)>,
}

impl Sockets<'_> {
    /// Creates a socket. `EMFILE` if all slots are used.
    pub fn socket(&self, family: Family, kind: SocketKind) -> SockResult<Sock> {
        self.socket_of_kind(family, kind as u32)
    }

    /// As [`socket`](Self::socket), with the kind as a number, as in CUDA: `ESOCKTNOSUPPORT` if
    /// there is no such [`SocketKind`].
    pub fn socket_of_kind(&self, family: Family, kind: u32) -> SockResult<Sock> {
        let value = family as u64 | u64::from(kind) << 8;
        let (handle, _) =
            self.request_host(RequestOp::Socket, &RequestArgs { value, ..RequestArgs::default() })?;
        let socket = Sock(handle as i32);
        self.init_device_state(self.socket_ref(socket)?)?;
        Ok(socket)
    }

    /// Binds to a local address; with port 0 the system chooses one, which
    /// [`local_name`](Sockets::local_name) returns.
    pub fn bind(&self, socket: Sock, address: SocketAddr) -> SockResult<()> {
        self.request_for(
            socket,
            RequestOp::Bind,
            RequestArgs { address: Some(address), ..RequestArgs::default() },
        )?;
        Ok(())
    }

    /// Makes the socket a listener. Up to `backlog` connections, clamped to 1 to 4096, wait for
    /// [`accept`](Sockets::accept).
    pub fn listen(&self, socket: Sock, backlog: u32) -> SockResult<()> {
        let args = RequestArgs { value: u64::from(backlog), ..RequestArgs::default() };
        self.request_for(socket, RequestOp::Listen, args)?;
        Ok(())
    }

    /// Connects a stream, or sets the peer of a datagram socket. A non-blocking stream returns
    /// `EINPROGRESS`; it becomes ready to send once it is connected.
    pub fn connect(&self, socket: Sock, address: SocketAddr) -> SockResult<()> {
        let socket_ref = self.socket_ref(socket)?;
        self.request_for(
            socket,
            RequestOp::Connect,
            RequestArgs { address: Some(address), ..RequestArgs::default() },
        )?;
        let connected = self.wait(self.wait_limit(socket_ref, device_state::SEND_TIMEOUT)?, || {
            let snapshot = self.load_snapshot(socket_ref)?;
            if let Some(errno) = snapshot.send_error() {
                return Err(errno.into());
            }
            Ok(snapshot.has(state::CONNECTED).then_some(()))
        });
        match connected {
            Err(super::SockError::Errno(Errno::AGAIN)) => Err(Errno::INPROGRESS.into()),
            outcome => outcome,
        }
    }

    /// Shuts down a direction. Bytes that were sent before are still delivered.
    pub fn shutdown(&self, socket: Sock, how: ShutdownHow) -> SockResult<()> {
        let socket_ref = self.socket_ref(socket)?;
        self.request_for(
            socket,
            RequestOp::Shutdown,
            RequestArgs { value: how as u64, ..RequestArgs::default() },
        )?;
        if how != ShutdownHow::Receive && self.is_warp(socket_ref)? {
            self.end_sending(socket_ref)?;
        }
        let flags = match how {
            ShutdownHow::Receive => device_state::SHUT_RECEIVE,
            ShutdownHow::Send => device_state::SHUT_SEND,
            ShutdownHow::Both => device_state::SHUT_RECEIVE | device_state::SHUT_SEND,
        };
        self.change_flags(socket_ref, |before| before | flags)?;
        if how != ShutdownHow::Send && self.is_warp(socket_ref)? {
            self.end_receiving(socket_ref)?;
        }
        Ok(())
    }

    /// Closes a socket. Bytes that were sent are still delivered, in the background; calls of other
    /// blocks on it return `EBADF`. `EBUSY` while a span is reserved or borrowed.
    pub fn close(&self, socket: Sock) -> SockResult<()> {
        let socket_ref = self.socket_ref(socket)?;
        let snapshot = self.load_snapshot(socket_ref)?;
        let locks = [device_state::SEND_LOCK, device_state::RECEIVE_LOCK];
        for lock in locks {
            if self.block.load_u32(at(socket_ref.device_state + lock))? == device_state::SPAN_OUT {
                return Err(Errno::BUSY.into());
            }
        }
        let generation = at(socket_ref.device_state + device_state::GENERATION);
        let mine = u32::from(socket_ref.generation);
        if self.block.compare_exchange_u32(generation, mine, 0)? != mine {
            return Err(Errno::BADF.into());
        }
        // No call can begin from here on; wait for those that are copying.
        for lock in locks {
            let word = at(socket_ref.device_state + lock);
            self.wait(WaitLimit::Within(CLOSE_TIMEOUT), || {
                let before = self.block.compare_exchange_u32(
                    word,
                    device_state::UNLOCKED,
                    device_state::CLOSED,
                )?;
                Ok((before == device_state::UNLOCKED).then_some(()))
            })?;
        }
        let mut value = 0;
        if snapshot.is_warp() && snapshot.has(state::CONNECTED) {
            if !snapshot.has(state::RESET_ON_CLOSE) && snapshot.send_error().is_none() {
                self.post_fin(socket_ref)?;
            }
            value = self.posted(socket_ref)?;
        }
        let bytes = Some((self.sent(socket_ref)?, self.consumed(socket_ref)?));
        self.request_host(
            RequestOp::Close,
            &RequestArgs { handle: socket.raw(), value, bytes, ..RequestArgs::default() },
        )?;
        Ok(())
    }

    /// Posts FIN after calls that are copying have finished. Does not wait for a reserved span.
    fn end_sending(&self, socket_ref: SocketRef) -> SockResult<()> {
        let word = at(socket_ref.device_state + device_state::SEND_LOCK);
        let locked = self.wait(WaitLimit::Within(CLOSE_TIMEOUT), || {
            let before = self.block.compare_exchange_u32(
                word,
                device_state::UNLOCKED,
                device_state::LOCKED,
            )?;
            Ok((before != device_state::LOCKED).then_some(before == device_state::UNLOCKED))
        })?;
        let ended = self.post_fin(socket_ref);
        if locked {
            self.unlock(socket_ref, device_state::SEND_LOCK)?;
        }
        ended
    }

    /// Notifies the peer that no more will be read, after calls that are copying have finished. If
    /// a span is borrowed, [`consume`](Sockets::consume) does it: the flag is set already.
    fn end_receiving(&self, socket_ref: SocketRef) -> SockResult<()> {
        let word = at(socket_ref.device_state + device_state::RECEIVE_LOCK);
        let locked = self.wait(WaitLimit::Within(CLOSE_TIMEOUT), || {
            let before = self.block.compare_exchange_u32(
                word,
                device_state::UNLOCKED,
                device_state::LOCKED,
            )?;
            Ok((before != device_state::LOCKED).then_some(before == device_state::UNLOCKED))
        })?;
        match locked {
            true => self.with_lock(socket_ref, device_state::RECEIVE_LOCK, || {
                self.report(socket_ref, self.consumed(socket_ref)?)
            }),
            false => Ok(()),
        }
    }

    /// Requests the host to abort a connection.
    pub(super) fn fail(&self, handle: i32, why: Errno) -> SockResult<()> {
        let value = why.raw_os_error() as u64;
        self.request_host(
            RequestOp::Fail,
            &RequestArgs { handle, value, ..RequestArgs::default() },
        )?;
        Ok(())
    }

    /// Sets an option. `EINVAL` for an invalid value, `EISCONN` for ring sizes once bytes may flow.
    pub fn set(&self, socket: Sock, setting: SockOption, value: i64) -> SockResult<()> {
        let socket_ref = self.socket_ref(socket)?;
        self.load_snapshot(socket_ref)?;
        let timeout = |field_offset: u64| -> SockResult<()> {
            let nanos = u64::try_from(value).map_err(|_| Errno::INVAL)?;
            Ok(self.block.store_u64(at(socket_ref.device_state + field_offset), nanos)?)
        };
        match setting {
            SockOption::NonBlocking => self.change_flags(socket_ref, |before| match value {
                0 => before & !device_state::NON_BLOCKING,
                _ => before | device_state::NON_BLOCKING,
            }),
            SockOption::SendTimeout => timeout(device_state::SEND_TIMEOUT),
            SockOption::ReceiveTimeout => timeout(device_state::RECEIVE_TIMEOUT),
            _ => {
                let (option, value) = (setting as u32, value as u64);
                let args = RequestArgs { option, value, ..RequestArgs::default() };
                self.request_for(socket, RequestOp::SetOption, args).map(|_| ())
            }
        }
    }

    /// Gets an option.
    pub fn get(&self, socket: Sock, setting: SockOption) -> SockResult<i64> {
        let socket_ref = self.socket_ref(socket)?;
        let snapshot = self.load_snapshot(socket_ref)?;
        match setting {
            SockOption::NonBlocking => Ok(i64::from(snapshot.flags & device_state::NON_BLOCKING)),
            SockOption::SendTimeout => {
                Ok(self.block.load_u64(at(socket_ref.device_state + device_state::SEND_TIMEOUT))?
                    as i64)
            }
            SockOption::ReceiveTimeout => Ok(self
                .block
                .load_u64(at(socket_ref.device_state + device_state::RECEIVE_TIMEOUT))?
                as i64),
            _ => {
                let args = RequestArgs { option: setting as u32, ..RequestArgs::default() };
                Ok(self.request_for(socket, RequestOp::GetOption, args)?.0)
            }
        }
    }

    /// The local address.
    pub fn local_name(&self, socket: Sock) -> SockResult<SocketAddr> {
        let (_, name) = self.request_for(socket, RequestOp::LocalName, RequestArgs::default())?;
        name.ok_or(Errno::NOTCONN.into())
    }

    /// The peer's address. `ENOTCONN` if there is no peer.
    pub fn peer_name(&self, socket: Sock) -> SockResult<SocketAddr> {
        let (_, name) = self.request_for(socket, RequestOp::PeerName, RequestArgs::default())?;
        name.ok_or(Errno::NOTCONN.into())
    }

    pub(super) fn change_flags(
        &self,
        socket_ref: SocketRef,
        change: impl Fn(u32) -> u32,
    ) -> SockResult<()> {
        let word = at(socket_ref.device_state + device_state::FLAGS);
        loop {
            let before = self.block.load_u32(word)?;
            if self.block.compare_exchange_u32(word, before, change(before))? == before {
                return Ok(());
            }
        }
    }

    /// Sends a request about an open socket; `EBADF` if it is not open.
    fn request_for(
        &self,
        socket: Sock,
        op: RequestOp,
        args: RequestArgs,
    ) -> SockResult<(i64, Option<SocketAddr>)> {
        self.load_snapshot(self.socket_ref(socket)?)?;
        self.request_host(op, &RequestArgs { handle: socket.raw(), ..args })
    }

    /// Takes a ticket, waits for its request slot, writes the request and waits for the reply.
    fn request_host(
        &self,
        op: RequestOp,
        args: &RequestArgs,
    ) -> SockResult<(i64, Option<SocketAddr>)> {
        self.check_open()?;
        let ticket = self.block.fetch_add_u64(at(self.ticket), 1)?;
        let (slot, lap) = (ticket % u64::from(self.slots), ticket / u64::from(self.slots));
        let slot_lap = at(self.slot_laps + slot * 8);
        self.wait(WaitLimit::Unlimited, || {
            Ok((self.block.load_u64(slot_lap)? == lap).then_some(()))
        })?;
        let mut bytes = [0; request::LEN as usize];
        let mut put = |at: u64, part: &[u8]| {
            bytes[at as usize..at as usize + part.len()].copy_from_slice(part);
        };
        put(request::OP, &(op as u32).to_le_bytes());
        put(request::HANDLE, &args.handle.to_le_bytes());
        put(request::VALUE, &args.value.to_le_bytes());
        put(request::OPTION, &args.option.to_le_bytes());
        put(request::ADDRESS, &address_bytes(args.address));
        if let Some((sent, consumed)) = args.bytes {
            put(request::SENT, &sent.to_le_bytes());
            put(request::CONSUMED, &consumed.to_le_bytes());
        }
        let base = self.requests + slot * request::LEN;
        self.block.write(at(base + 8), &bytes[8..])?;
        self.block.store_u64(at(base + request::NUMBER), ticket + 1)?;
        let from = self.replies + slot * reply::LEN;
        self.wait(WaitLimit::Unlimited, || {
            let number = self.block.load_u64(at(from + reply::NUMBER))?;
            Ok((number == ticket + 1).then_some(()))
        })?;
        let result = self.block.load_u64(at(from + reply::RESULT))? as i64;
        let mut address = [0; ADDRESS_LEN];
        self.block.read(at(from + reply::ADDRESS), &mut address)?;
        self.block.store_u64(slot_lap, lap + 1)?;
        if result < 0 {
            return Err(Errno::from_raw_os_error(-result as i32).into());
        }
        Ok((result, address_from(&address)))
    }
}

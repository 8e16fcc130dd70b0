//! The host's record of one socket.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::time::Instant;

use rustix::io::Errno;

use super::handshakes::WarpState;
use super::layout::{handle, host_state, state};

/// Decides how the service thread serves a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SocketRole {
    Stream,
    Datagram,
    Listener,
}

/// A ring: its offset in the arena and its size, 0 if none is allocated.
pub(super) type Ring = (u64, u64);

/// Options that are set before there is a descriptor, or inherited by accepted connections.
#[derive(Clone, Copy, Debug)]
pub(super) struct SockOpts {
    pub(super) receive_size: u64,
    pub(super) send_size: u64,
    pub(super) no_delay: bool,
    pub(super) reuse_address: bool,
    /// Close resets the connection (`SO_LINGER` 0).
    pub(super) abort: bool,
}

/// A slot of the socket table.
pub(super) struct Socket {
    pub(super) generation: u16,
    /// A kernel has its handle, or will get it.
    pub(super) open: bool,
    pub(super) role: SocketRole,
    pub(super) v6: bool,
    /// Whether it is of the `warp` family; `warp` is its state there.
    pub(super) is_warp: bool,
    pub(super) warp: WarpState,
    pub(super) fd: Option<OwnedFd>,
    /// The state word without the generation: flags and errnos.
    pub(super) flags: u64,
    pub(super) sockopts: SockOpts,
    pub(super) receive_ring: Ring,
    pub(super) send_ring: Ring,
    /// `warp`: usable bytes of the send ring, the minimum of it and the peer's receive ring.
    pub(super) send_window: u64,
    /// `warp`: maximum number of bytes that the peer keeps in flight or unread.
    pub(super) peer_window: u64,
    pub(super) received: u64,
    pub(super) consumed: u64,
    pub(super) sent: u64,
    pub(super) taken: u64,
    /// The last readiness that epoll reported: a read, or a write, may succeed.
    pub(super) readable: bool,
    pub(super) writable: bool,
    /// epoll has reported a hang-up, an error or urgent data: a short read does not mean that
    /// nothing is left.
    pub(super) read_until_empty: bool,
    /// It is queued for service.
    pub(super) queued: bool,
    /// It is on the retry list: no event announces what it waits for.
    pub(super) in_retry_list: bool,
    /// Its descriptor is in the epoll set.
    pub(super) watched: bool,
    /// Its kernel reads no more: input is discarded.
    pub(super) discard_input: bool,
    /// Shut down the sending direction once the ring is empty.
    pub(super) shut_send: bool,
    /// Closed by its kernel: freed when the ring is empty, or reset at this deadline.
    pub(super) closing: Option<Instant>,
    /// Handles of a listener's connections that no kernel has accepted yet.
    pub(super) waiting: VecDeque<i32>,
}

impl Socket {
    pub(super) fn vacant() -> Self {
        Self {
            generation: 0,
            open: false,
            role: SocketRole::Stream,
            v6: false,
            is_warp: false,
            warp: WarpState::default(),
            send_window: 0,
            peer_window: u64::MAX,
            fd: None,
            flags: 0,
            sockopts: SockOpts {
                receive_size: 0,
                send_size: 0,
                no_delay: true,
                reuse_address: true,
                abort: false,
            },
            receive_ring: (0, 0),
            send_ring: (0, 0),
            received: 0,
            consumed: 0,
            sent: 0,
            taken: 0,
            readable: false,
            writable: false,
            read_until_empty: false,
            queued: false,
            in_retry_list: false,
            watched: false,
            discard_input: false,
            shut_send: false,
            closing: None,
            waiting: VecDeque::new(),
        }
    }

    /// The state word, 0 if the socket is not open.
    pub(super) fn state(&self) -> u64 {
        if !self.open {
            return 0;
        }
        let mut state = self.flags | u64::from(self.generation);
        if self.is_warp {
            state |= state::WARP;
            state |= if self.sockopts.abort { state::RESET_ON_CLOSE } else { 0 };
        }
        state
    }

    pub(super) fn handle(&self, index: u16) -> i32 {
        handle(index, self.generation)
    }

    pub(super) fn has(&self, flag: u64) -> bool {
        self.flags & flag != 0
    }

    /// Records that receiving, sending or both have failed; the first errno of each is kept.
    pub(super) fn fail(&mut self, receiving: Option<Errno>, sending: Option<Errno>) {
        let mut note = |shift: u32, end: u64, errno: Option<Errno>| {
            let Some(errno) = errno else { return };
            if self.flags >> shift & 0xff == 0 {
                self.flags |= (errno.raw_os_error() as u64 & 0xff) << shift;
            }
            self.flags |= end;
        };
        note(state::RECEIVE_ERROR, state::RECEIVE_END, receiving);
        note(state::SEND_ERROR, state::SEND_END, sending);
        self.flags &= !state::CONNECTING;
    }

    /// The errno that ended the socket, that of receiving first; 0 if there is none.
    pub(super) fn errno(&self) -> i64 {
        let of = |shift: u32| (self.flags >> shift & 0xff) as i64;
        match of(state::RECEIVE_ERROR) {
            0 => of(state::SEND_ERROR),
            errno => errno,
        }
    }

    /// Bytes in the send ring that are not sent yet.
    pub(super) fn unsent(&self) -> u64 {
        self.sent - self.taken
    }

    /// Free bytes of the receive ring.
    pub(super) fn room(&self) -> u64 {
        self.receive_ring.1 - (self.received - self.consumed)
    }

    /// Takes over the device counters, the lower 32 bits of each. False if they are impossible:
    /// more was sent than the ring holds, or more consumed than received, or a stream that was
    /// never connected has sent, whose ring may still be replaced by a smaller one.
    pub(super) fn update_counters(&mut self, word: u64) -> bool {
        let sent = advance(self.sent, word as u32);
        let consumed = advance(self.consumed, (word >> 32) as u32);
        let may_send = self.role == SocketRole::Datagram || self.has(state::CONNECTED);
        if sent - self.taken > self.send_ring.1
            || consumed > self.received
            || sent != self.sent && !may_send
        {
            return false;
        }
        (self.sent, self.consumed) = (sent, consumed);
        true
    }

    /// The host state line that kernels read, given the addresses of its rings and of its QP
    /// descriptor.
    pub(super) fn line(
        &self,
        rings: (u64, u64),
        qp_descriptor: u64,
    ) -> [u8; host_state::LEN as usize] {
        let mut line = [0; host_state::LEN as usize];
        let mut put = |at: u64, bytes: &[u8]| {
            line[at as usize..at as usize + bytes.len()].copy_from_slice(bytes);
        };
        put(host_state::STATE, &self.state().to_le_bytes());
        put(host_state::RECEIVED, &self.received.to_le_bytes());
        put(host_state::TAKEN, &self.taken.to_le_bytes());
        put(host_state::RECEIVE_RING, &rings.0.to_le_bytes());
        put(host_state::SEND_RING, &rings.1.to_le_bytes());
        put(host_state::RECEIVE_SIZE, &(self.receive_ring.1 as u32).to_le_bytes());
        let send_size = if self.is_warp { self.send_window } else { self.send_ring.1 };
        put(host_state::SEND_SIZE, &(send_size as u32).to_le_bytes());
        put(host_state::QP_DESCRIPTOR, &qp_descriptor.to_le_bytes());
        let report_at = (self.receive_ring.1.min(self.peer_window) / 4).max(1);
        put(host_state::REPORT_AT, &(report_at as u32).to_le_bytes());
        line
    }
}

/// The 64-bit counter after `before` whose lower half is `low`.
fn advance(before: u64, low: u32) -> u64 {
    before + u64::from(low.wrapping_sub(before as u32))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_pass_32_bits() {
        assert_eq!(advance(0xffff_fff0, 0x10), 0x1_0000_0010);
        assert_eq!(advance(5, 5), 5);
    }

    #[test]
    fn impossible_counters_are_rejected() {
        let mut socket = Socket::vacant();
        (socket.send_ring, socket.receive_ring) = ((0, 4096), (0, 4096));
        assert!(!socket.update_counters(1), "sent before it was connected");
        (socket.flags, socket.received) = (state::CONNECTED, 10);
        assert!(socket.update_counters(10 << 32 | 4096));
        assert_eq!((socket.sent, socket.consumed), (4096, 10));
        assert!(!socket.update_counters(10 << 32 | 4097), "more sent than the ring holds");
        assert!(!socket.update_counters(11 << 32 | 4096), "more consumed than received");
        assert!(
            !socket.update_counters(9 << 32 | 4096),
            "a smaller value means that the counter has wrapped"
        );
        assert_eq!((socket.sent, socket.consumed), (4096, 10));
    }

    #[test]
    fn the_first_error_is_kept() {
        let mut socket = Socket::vacant();
        (socket.open, socket.generation) = (true, 3);
        socket.fail(None, Some(Errno::PIPE));
        assert_eq!(socket.errno(), 32);
        socket.fail(Some(Errno::CONNRESET), Some(Errno::CONNRESET));
        assert_eq!(socket.errno(), 104);
        assert_eq!(socket.state() & 0xffff_ffff, 32 << 24 | 104 << 16 | 3);
        assert!(socket.has(state::RECEIVE_END) && socket.has(state::SEND_END));
    }
}

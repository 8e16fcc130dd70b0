//! One socket, as the host keeps it.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::time::Instant;

use rustix::io::Errno;

use super::handshakes::WarpState;
use super::layout::{handle, host_state, state};

/// What a socket is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SocketRole {
    Stream,
    Datagram,
    Listener,
}

/// A ring: where it begins in its area, and its size; none yet if that is 0.
pub(super) type Ring = (u64, u64);

/// What can be decided before there is a descriptor, or applies to those accepted.
#[derive(Clone, Copy, Debug)]
pub(super) struct SockOpts {
    pub(super) receive_size: u64,
    pub(super) send_size: u64,
    pub(super) no_delay: bool,
    pub(super) reuse_address: bool,
    /// Closing resets.
    pub(super) abort: bool,
}

/// A place in the table.
pub(super) struct Socket {
    pub(super) generation: u16,
    /// Somebody has its handle, or will get it.
    pub(super) open: bool,
    pub(super) role: SocketRole,
    pub(super) v6: bool,
    /// Of the family `warp`, and what it has for that.
    pub(super) is_warp: bool,
    pub(super) warp: WarpState,
    pub(super) fd: Option<OwnedFd>,
    /// The flags and errnos of the state word.
    pub(super) flags: u64,
    pub(super) sockopts: SockOpts,
    pub(super) receive_ring: Ring,
    pub(super) send_ring: Ring,
    /// Family `warp`: how much of the send ring is used, so that it fits into the peer's.
    pub(super) send_window: u64,
    /// Family `warp`: how much the peer has on its way at most.
    pub(super) peer_window: u64,
    pub(super) received: u64,
    pub(super) consumed: u64,
    pub(super) sent: u64,
    pub(super) taken: u64,
    /// What the operating system said last: reading, or writing, may succeed.
    pub(super) readable: bool,
    pub(super) writable: bool,
    /// The peer has ended: what is read next may be the end, even after a short read.
    pub(super) end_seen: bool,
    /// It stands in the list of those to be served.
    pub(super) queued: bool,
    /// It stands in the list of those that wait for something that nobody announces.
    pub(super) in_retry_list: bool,
    /// Its descriptor is among those that are watched.
    pub(super) watched: bool,
    /// Its kernel reads no more: what comes is thrown away.
    pub(super) discard_input: bool,
    /// Sending ends when the ring is empty.
    pub(super) shut_send: bool,
    /// Closed by its kernel; it goes when the ring is empty, or at that time.
    pub(super) closing: Option<Instant>,
    /// A listener's connections that no kernel has taken yet.
    pub(super) waiting: VecDeque<u16>,
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
            end_seen: false,
            queued: false,
            in_retry_list: false,
            watched: false,
            discard_input: false,
            shut_send: false,
            closing: None,
            waiting: VecDeque::new(),
        }
    }

    /// The state word.
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

    /// Notes that receiving, sending or both have failed; the first errno of each stays.
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

    /// The errno that ended it, or 0.
    pub(super) fn errno(&self) -> i64 {
        let of = |shift: u32| (self.flags >> shift & 0xff) as i64;
        match of(state::RECEIVE_ERROR) {
            0 => of(state::SEND_ERROR),
            errno => errno,
        }
    }

    /// Bytes in the send ring.
    pub(super) fn unsent(&self) -> u64 {
        self.sent - self.taken
    }

    /// Free bytes of the receive ring.
    pub(super) fn room(&self) -> u64 {
        self.receive_ring.1 - (self.received - self.consumed)
    }

    /// Takes over what kernels say in the outbox: the lower halves of two counters. False if that cannot be: more was
    /// sent than fits, or more consumed than received.
    pub(super) fn update_counters(&mut self, word: u64) -> bool {
        let sent = advance(self.sent, word as u32);
        let consumed = advance(self.consumed, (word >> 32) as u32);
        if sent - self.taken > self.send_ring.1 || consumed > self.received {
            return false;
        }
        (self.sent, self.consumed) = (sent, consumed);
        true
    }

    /// The line that kernels see, given where its rings are, and its wire line.
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

/// The counter whose lower half is now `low`, given what it was.
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
    fn a_kernel_that_claims_too_much_is_not_believed() {
        let mut socket = Socket::vacant();
        (socket.send_ring, socket.receive_ring) = ((0, 4096), (0, 4096));
        socket.received = 10;
        assert!(socket.update_counters(10 << 32 | 4096));
        assert_eq!((socket.sent, socket.consumed), (4096, 10));
        assert!(!socket.update_counters(10 << 32 | 4097), "more than fits");
        assert!(!socket.update_counters(11 << 32 | 4096), "more than came");
        assert!(
            !socket.update_counters(9 << 32 | 4096),
            "a counter that goes back has gone around"
        );
        assert_eq!((socket.sent, socket.consumed), (4096, 10));
    }

    #[test]
    fn the_first_error_stays() {
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

//! The memory that the host and the kernels share, and where in it everything lies.

use super::arena::{self, Arena};
use super::fabric::Shores;
use super::layout::{desk, inbox, outbox, pulse, reply, request, table};
use super::socket::Ring;
use super::{Place, SockOptions, layout};
use crate::error::{Error, Kind, Result};
use crate::mem::{Allocation, Device, MemoryKind, Window};

/// Rings and lines begin at multiples of this.
const PAGE: u64 = arena::SMALLEST;

/// Memory that the host writes and kernels watch.
enum HostSide {
    /// Device memory, through a window.
    Near(Window),
    /// Pinned memory, which kernels read across the bus.
    Far(Allocation),
}

/// All of it.
pub(super) struct Ground {
    host_side: HostSide,
    /// The device memory behind a window.
    device_memory: Option<Allocation>,
    /// Why there is none.
    pub(super) why_pinned: Option<String>,
    kernel_side: Allocation,
    desks: Allocation,
    /// Where the desks begin there.
    desks_at: u64,
    pub(super) sockets: u32,
    pub(super) slots: u32,
    places: Places,
    /// Where kernels find the two areas.
    host_side_at: u64,
    kernel_side_at: u64,
}

/// Offsets in the host side and in the kernel side.
struct Places {
    pulse: u64,
    replies: u64,
    inbox: u64,
    receive_rings: u64,
    requests: u64,
    outbox: u64,
    send_rings: u64,
}

impl Places {
    fn new(sockets: u64, slots: u64) -> Self {
        let pulse = table::LEN;
        let replies = pulse + pulse::LEN;
        let inbox = replies + slots * reply::LEN;
        let outbox = slots * request::LEN;
        Self {
            pulse,
            replies,
            inbox,
            receive_rings: (inbox + sockets * inbox::LEN).next_multiple_of(PAGE),
            requests: 0,
            outbox,
            send_rings: (outbox + sockets * outbox::LEN).next_multiple_of(PAGE),
        }
    }
}

impl Ground {
    pub(super) fn lay(device: &Device, options: &SockOptions, berths_at: u64) -> Result<Self> {
        let (sockets, slots) = (options.sockets, options.requests);
        let places = Places::new(u64::from(sockets), u64::from(slots));
        let kernel_side = device.alloc_pinned(places.send_rings + options.arena)?;
        let host_len = places.receive_rings + options.arena;
        let (host_side, device_memory, why_pinned) = host_side(device, options.place, host_len)?;
        // A ticket and its neighbours, turns, desks.
        let turns = 128;
        let desks_at = (turns + u64::from(slots) * 8).next_multiple_of(128);
        let desks_len = desks_at + u64::from(sockets) * desk::LEN;
        let desks = match options.place {
            Place::Threads => device.alloc_pinned(desks_len)?,
            Place::Auto | Place::Pinned => device.alloc_kind(desks_len, MemoryKind::Vmm)?,
        };
        desks.write(0, &vec![0; desks_len as usize])?;
        let at = |memory: &Allocation| match options.place {
            // Threads of this process look at host addresses.
            Place::Threads => Ok(memory.host_bytes()?.address()),
            Place::Auto | Place::Pinned => Ok(memory.address().raw()),
        };
        let host_side_at = match (&host_side, &device_memory) {
            (HostSide::Far(memory), _) | (HostSide::Near(_), Some(memory)) => at(memory)?,
            (HostSide::Near(window), None) => window.address().raw(),
        };
        let (kernel_side_at, desks_base) = (at(&kernel_side)?, at(&desks)?);
        let ground = Self {
            host_side,
            device_memory,
            why_pinned,
            kernel_side,
            desks,
            desks_at,
            sockets,
            slots,
            places,
            host_side_at,
            kernel_side_at,
        };
        ground.clear()?;
        let desks = [desks_base, desks_base + turns, desks_base + desks_at];
        ground.write_table(options, desks, berths_at)?;
        Ok(ground)
    }

    /// Everything but the rings begins as zeros.
    fn clear(&self) -> Result<()> {
        self.write_host(0, &vec![0; self.places.receive_rings as usize])?;
        self.kernel_side.host_bytes()?.write(0, &vec![0; self.places.send_rings as usize])
    }

    fn write_table(&self, options: &SockOptions, desks: [u64; 3], berths_at: u64) -> Result<()> {
        let [ticket, turns, desks] = desks;
        let mut bytes = [0; table::LEN as usize];
        let mut word = |at: u64, value: &[u8]| {
            bytes[at as usize..at as usize + value.len()].copy_from_slice(value);
        };
        let silence = u32::try_from(options.silence.as_millis()).unwrap_or(u32::MAX);
        for (at, value) in [
            (table::VERSION, layout::VERSION),
            (table::SOCKETS, self.sockets),
            (table::SLOTS, self.slots),
            (table::SILENCE, silence),
        ] {
            word(at, &value.to_le_bytes());
        }
        for (at, value) in [
            (table::INBOX, self.host_side_at + self.places.inbox),
            (table::OUTBOX, self.kernel_side_at + self.places.outbox),
            (table::DESKS, desks),
            (table::REQUESTS, self.kernel_side_at + self.places.requests),
            (table::REPLIES, self.host_side_at + self.places.replies),
            (table::TURNS, turns),
            (table::TICKET, ticket),
            (table::PULSE, self.host_side_at + self.places.pulse),
            (table::BERTHS, berths_at),
        ] {
            word(at, &value.to_le_bytes());
        }
        self.write_host(0, &bytes)
    }

    /// The address of the table, which kernels get.
    pub(super) fn table(&self) -> u64 {
        self.host_side_at
    }

    /// Areas for the rings of both directions: receiving, sending.
    pub(super) fn arenas(options: &SockOptions) -> (Arena, Arena) {
        (Arena::new(options.arena), Arena::new(options.arena))
    }

    /// Where kernels find a receive ring and a send ring.
    pub(super) fn ring_addresses(&self, receive: u64, send: u64) -> (u64, u64) {
        (
            self.host_side_at + self.places.receive_rings + receive,
            self.kernel_side_at + self.places.send_rings + send,
        )
    }

    /// Writes into the host side. What is written first is seen first.
    fn write_host(&self, at: u64, bytes: &[u8]) -> Result<()> {
        match &self.host_side {
            HostSide::Near(window) => window.write(at, bytes),
            HostSide::Far(memory) => memory.host_bytes()?.write_cached(at, bytes),
        }
    }

    fn store_host(&self, at: u64, value: u64) -> Result<()> {
        match &self.host_side {
            HostSide::Near(window) => window.write(at, &value.to_le_bytes()),
            HostSide::Far(memory) => memory.host_bytes()?.store_u64(at, value),
        }
    }

    /// Writes a word of a socket's line.
    pub(super) fn tell(&self, index: u16, word: u64, value: u64) -> Result<()> {
        self.store_host(self.places.inbox + u64::from(index) * inbox::LEN + word, value)
    }

    /// Writes a socket's line, its state last.
    pub(super) fn tell_all(&self, index: u16, line: &[u8; inbox::LEN as usize]) -> Result<()> {
        let at = self.places.inbox + u64::from(index) * inbox::LEN;
        self.write_host(at + 8, &line[8..])?;
        let mut state = [0; 8];
        state.copy_from_slice(&line[..8]);
        self.store_host(at, u64::from_le_bytes(state))
    }

    /// Puts bytes into a receive ring at counter `at`; they fit.
    pub(super) fn put(&self, ring: (u64, u64), at: u64, bytes: &[u8]) -> Result<()> {
        let (begin, size) = (self.places.receive_rings + ring.0, ring.1);
        let place = at & (size - 1);
        let first = bytes.len().min((size - place) as usize);
        self.write_host(begin + place, &bytes[..first])?;
        match first < bytes.len() {
            true => self.write_host(begin, &bytes[first..]),
            false => Ok(()),
        }
    }

    /// Copies bytes of a send ring from counter `at` on.
    pub(super) fn fetch(&self, ring: (u64, u64), at: u64, into: &mut [u8]) -> Result<()> {
        let (begin, size) = (self.places.send_rings + ring.0, ring.1);
        let place = at & (size - 1);
        let first = into.len().min((size - place) as usize);
        let bytes = self.kernel_side.host_bytes()?;
        bytes.read_cached(begin + place, &mut into[..first])?;
        match first < into.len() {
            true => bytes.read_cached(begin, &mut into[first..]),
            false => Ok(()),
        }
    }

    /// What kernels say of a socket: bytes sent and consumed, the lower halves.
    #[inline]
    pub(super) fn outbox(&self, index: u16) -> Result<u64> {
        let at = self.places.outbox + u64::from(index) * outbox::LEN;
        self.kernel_side.host_bytes()?.load_u64(at)
    }

    /// The first so many desks, as kernels have them.
    pub(super) fn desks(&self, count: usize) -> Result<Vec<u8>> {
        let mut bytes = vec![0; count * desk::LEN as usize];
        self.desks.read(self.desks_at, &mut bytes)?;
        Ok(bytes)
    }

    /// A new socket has sent and consumed nothing.
    pub(super) fn clear_outbox(&self, index: u16) -> Result<()> {
        let at = self.places.outbox + u64::from(index) * outbox::LEN;
        self.kernel_side.host_bytes()?.store_u64(at, 0)
    }

    /// What a kernel that went wrong might write.
    pub(super) fn spoil_outbox(&self, index: u16) -> Result<()> {
        let at = self.places.outbox + u64::from(index) * outbox::LEN;
        self.kernel_side.host_bytes()?.store_u64(at, u64::MAX / 3)
    }

    /// What the peer's device, or the host, has written into a socket's word `RECEIVED`.
    pub(super) fn received(&self, index: u16) -> Result<u64> {
        let at = self.places.inbox + u64::from(index) * inbox::LEN + inbox::RECEIVED;
        match &self.host_side {
            HostSide::Near(window) => {
                let mut word = [0; 8];
                window.read(at, &mut word)?;
                Ok(u64::from_le_bytes(word))
            }
            HostSide::Far(memory) => memory.host_bytes()?.load_u64(at),
        }
    }

    /// What a device may reach of a socket: its rings, and the words `RECEIVED` and `TAKEN`.
    pub(super) fn shores(&self, index: u16, receive: Ring, send: Ring) -> Result<Shores> {
        let host_side = match (&self.host_side, &self.device_memory) {
            (HostSide::Far(memory), _) | (HostSide::Near(_), Some(memory)) => memory,
            (HostSide::Near(_), None) => {
                return Err(Error::new(Kind::Unsupported, "register a socket's rings"));
            }
        };
        let words = self.places.inbox + u64::from(index) * inbox::LEN + inbox::RECEIVED;
        let receive_at = self.places.receive_rings + receive.0;
        let send_at = self.places.send_rings + send.0;
        Ok(Shores {
            send: (self.kernel_side.region(send_at, send.1)?, self.kernel_side_at + send_at),
            receive: (host_side.region(receive_at, receive.1)?, self.host_side_at + receive_at),
            words: (host_side.region(words, 16)?, self.host_side_at + words),
        })
    }

    /// Whether request `number` is there.
    #[inline]
    pub(super) fn request(
        &self,
        number: u64,
        into: &mut [u8; request::LEN as usize],
    ) -> Result<bool> {
        let bytes = self.kernel_side.host_bytes()?;
        let at = self.places.requests + number % u64::from(self.slots) * request::LEN;
        if bytes.load_u64(at)? != number + 1 {
            return Ok(false);
        }
        bytes.read(at, into)?;
        Ok(true)
    }

    /// Answers a request.
    pub(super) fn reply(
        &self,
        number: u64,
        result: i64,
        address: &[u8; layout::ADDRESS_LEN],
    ) -> Result<()> {
        let at = self.places.replies + number % u64::from(self.slots) * reply::LEN;
        let mut bytes = [0; 8 + layout::ADDRESS_LEN];
        bytes[..8].copy_from_slice(&result.to_le_bytes());
        bytes[8..].copy_from_slice(address);
        self.write_host(at + reply::RESULT, &bytes)?;
        self.store_host(at + reply::NUMBER, number + 1)
    }

    /// Says that the host lives.
    pub(super) fn beat(&self, count: u64) -> Result<()> {
        self.store_host(self.places.pulse + pulse::BEAT, count)
    }

    /// Says that the host has ended: every call of a kernel returns.
    pub(super) fn close(&self) -> Result<()> {
        self.store_host(self.places.pulse + pulse::CLOSED, 1)
    }
}

type Chosen = (HostSide, Option<Allocation>, Option<String>);

fn host_side(device: &Device, place: Place, len: u64) -> Result<Chosen> {
    let far = |why: String| -> Result<Chosen> {
        let memory = device.alloc_pinned(len).map_err(|error| {
            Error::new(Kind::OutOfMemory, "make receive rings").why(error.to_string())
        })?;
        Ok((HostSide::Far(memory), None, Some(why)))
    };
    match place {
        Place::Auto => {}
        Place::Pinned => return far("it was asked for".into()),
        Place::Threads => return far("threads of this process use them".into()),
    }
    let memory = device.alloc_kind(len, MemoryKind::Vmm)?;
    match memory.window() {
        Ok(window) => Ok((HostSide::Near(window), Some(memory), None)),
        Err(error) => far(error.to_string()),
    }
}

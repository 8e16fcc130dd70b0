//! The memory that the host and the kernels share, and the offsets in it.

use std::sync::atomic::{Ordering, fence};

use super::arena::{self, Arena};
use super::device_cache::ConnMemory;
use super::kinds::Ring;
use super::layout::{
    ACTIVITY_FLAGS, HostState, SockReply, Table, activity_shift, device_counters, device_state,
    heartbeat, host_state, reply, request, table,
};
use super::sys::RingParts;
use super::{SockMemory, SockOptions, layout};
use crate::error::{Error, Kind, Result};
use crate::mem::{Allocation, Device, MemoryKind, SharedBytes, Window};

/// Alignment of the ring areas.
const PAGE: u64 = arena::MIN_BLOCK;
/// A cache line, in bytes, and the activity flags in it.
const LINE: u64 = 64;
const FLAGS_PER_LINE: u64 = LINE / 4;

/// Memory that the host writes and kernels poll.
enum HostArea {
    /// Device memory, written through a window.
    Windowed(Window),
    /// Pinned memory, which kernels poll across the bus.
    Pinned(Allocation),
}

/// The host area, the kernel area and the device states; see [`layout`].
pub(super) struct SharedArea {
    host_area: HostArea,
    /// The device memory behind the window.
    device_memory: Option<Allocation>,
    /// Why there is no window.
    pub(super) why_pinned: Option<String>,
    kernel_area: Allocation,
    device_states: Allocation,
    /// Offset of the first device state line in `device_states`.
    device_states_at: u64,
    pub(super) sockets: u32,
    pub(super) slots: u32,
    offsets: Offsets,
    /// Addresses of the two areas, as kernels use them.
    host_area_addr: u64,
    kernel_area_addr: u64,
}

/// Offsets in the host area and in the kernel area.
struct Offsets {
    heartbeat: u64,
    replies: u64,
    host_state: u64,
    receive_rings: u64,
    requests: u64,
    device_counters: u64,
    activity: u64,
    send_rings: u64,
}

impl Offsets {
    fn new(sockets: u64, slots: u64) -> Self {
        let heartbeat = table::LEN;
        let replies = heartbeat + heartbeat::LEN;
        let host_state = replies + slots * reply::LEN;
        let device_counters = slots * request::LEN;
        let activity = (device_counters + sockets * device_counters::LEN).next_multiple_of(LINE);
        Self {
            heartbeat,
            replies,
            host_state,
            receive_rings: (host_state + sockets * host_state::LEN).next_multiple_of(PAGE),
            requests: 0,
            device_counters,
            activity,
            send_rings: (activity + ACTIVITY_FLAGS * 4).next_multiple_of(PAGE),
        }
    }
}

impl SharedArea {
    pub(super) fn allocate(
        device: &Device,
        options: &SockOptions,
        qp_slots_addr: u64,
    ) -> Result<Self> {
        let (sockets, slots) = (options.sockets, options.requests);
        let offsets = Offsets::new(u64::from(sockets), u64::from(slots));
        let kernel_area = device.alloc_pinned(offsets.send_rings + options.arena)?;
        let host_len = offsets.receive_rings + options.arena;
        let (host_area, device_memory, why_pinned) = host_area(device, options.memory, host_len)?;
        // Layout: the ticket, alone in its 128 bytes, slot laps, device state lines.
        let slot_laps = 128;
        let device_states_at = (slot_laps + u64::from(slots) * 8).next_multiple_of(128);
        let device_states_len = device_states_at + u64::from(sockets) * device_state::LEN;
        let device_states = match options.memory {
            SockMemory::Threads => device.alloc_pinned(device_states_len)?,
            SockMemory::Auto | SockMemory::Pinned => {
                device.alloc_kind(device_states_len, MemoryKind::Vmm)?
            }
        };
        device_states.write(0, &vec![0; device_states_len as usize])?;
        let at = |memory: &Allocation| match options.memory {
            // Threads of this process use host addresses.
            SockMemory::Threads => memory.host_bytes().map(|bytes| bytes.address()),
            SockMemory::Auto | SockMemory::Pinned => Ok(memory.address().raw()),
        };
        let host_area_addr = match (&host_area, &device_memory) {
            (HostArea::Pinned(memory), _) | (HostArea::Windowed(_), Some(memory)) => at(memory)?,
            (HostArea::Windowed(window), None) => window.address().raw(),
        };
        let (kernel_area_addr, device_states_base) = (at(&kernel_area)?, at(&device_states)?);
        let shared_area = Self {
            host_area,
            device_memory,
            why_pinned,
            kernel_area,
            device_states,
            device_states_at,
            sockets,
            slots,
            offsets,
            host_area_addr,
            kernel_area_addr,
        };
        shared_area.clear()?;
        let device_states = [
            device_states_base,
            device_states_base + slot_laps,
            device_states_base + device_states_at,
        ];
        shared_area.write_table(options, device_states, qp_slots_addr)?;
        Ok(shared_area)
    }

    /// Zeroes everything but the rings.
    fn clear(&self) -> Result<()> {
        self.write_host(0, &vec![0; self.offsets.receive_rings as usize])?;
        self.kernel_area.host_bytes()?.write(0, &vec![0; self.offsets.send_rings as usize])
    }

    fn write_table(
        &self,
        options: &SockOptions,
        device_states: [u64; 3],
        qp_slots_addr: u64,
    ) -> Result<()> {
        let [ticket, slot_laps, device_states] = device_states;
        let heartbeat_timeout =
            u32::try_from(options.heartbeat_timeout.as_millis()).unwrap_or(u32::MAX);
        let table = Table {
            version: layout::VERSION,
            sockets: self.sockets,
            slots: self.slots,
            heartbeat_timeout,
            host_states: self.host_area_addr + self.offsets.host_state,
            device_counters: self.kernel_area_addr + self.offsets.device_counters,
            device_states,
            requests: self.kernel_area_addr + self.offsets.requests,
            replies: self.host_area_addr + self.offsets.replies,
            slot_laps,
            ticket,
            heartbeat: self.host_area_addr + self.offsets.heartbeat,
            qp_slots: qp_slots_addr,
            activity: self.kernel_area_addr + self.offsets.activity,
            activity_shift: activity_shift(self.sockets),
            ..Table::default()
        };
        self.write_host(0, &table.encode())
    }

    /// The address of the table, as kernels use it.
    pub(super) fn table(&self) -> u64 {
        self.host_area_addr
    }

    /// Allocators of the receive rings and of the send rings.
    pub(super) fn arenas(options: &SockOptions) -> (Arena, Arena) {
        (Arena::new(options.arena), Arena::new(options.arena))
    }

    /// Addresses of a receive ring and a send ring, as kernels use them.
    pub(super) fn ring_addresses(&self, receive: u64, send: u64) -> (u64, u64) {
        (
            self.host_area_addr + self.offsets.receive_rings + receive,
            self.kernel_area_addr + self.offsets.send_rings + send,
        )
    }

    /// Writes to the host area. Writes become visible to kernels in program order.
    fn write_host(&self, at: u64, bytes: &[u8]) -> Result<()> {
        match &self.host_area {
            HostArea::Windowed(window) => window.write(at, bytes),
            HostArea::Pinned(memory) => memory.host_bytes()?.write_cached(at, bytes),
        }
    }

    fn store_host(&self, at: u64, value: u64) -> Result<()> {
        match &self.host_area {
            HostArea::Windowed(window) => window.write(at, &value.to_le_bytes()),
            HostArea::Pinned(memory) => memory.host_bytes()?.store_u64(at, value),
        }
    }

    /// Stores a word of a socket's host state.
    pub(super) fn store_word(&self, index: u16, word: u64, value: u64) -> Result<()> {
        self.store_host(self.offsets.host_state + u64::from(index) * host_state::LEN + word, value)
    }

    /// Writes a socket's host state, the state word last.
    pub(super) fn write_host_state(&self, index: u16, line: &HostState) -> Result<()> {
        let at = self.offsets.host_state + u64::from(index) * host_state::LEN;
        let rest = host_state::RECEIVED;
        self.write_host(at + rest, &line.encode()[rest as usize..])?;
        self.store_host(at + host_state::STATE, line.state)
    }

    /// Copies bytes into a receive ring from counter `at` on; the caller has checked that they fit.
    pub(super) fn put(&self, ring: (u64, u64), at: u64, bytes: &[u8]) -> Result<()> {
        let (begin, size) = (self.offsets.receive_rings + ring.0, ring.1);
        let offset = at & (size - 1);
        let first = bytes.len().min((size - offset) as usize);
        self.write_host(begin + offset, &bytes[..first])?;
        match first < bytes.len() {
            true => self.write_host(begin, &bytes[first..]),
            false => Ok(()),
        }
    }

    /// The bytes of a send ring from counter `at` on, to be sent in place: send rings are pinned
    /// host memory always.
    pub(super) fn send_parts(&self, ring: Ring, at: u64, len: u64) -> Result<RingParts<'_>> {
        ring_parts(self.kernel_area.host_bytes()?, self.offsets.send_rings, ring, at, len)
    }

    /// The bytes of a receive ring from counter `at` on, to be received in place; `None` if the
    /// rings are device memory behind a window. Such a mapping is write-combined: the bytes are
    /// received into a buffer and written with the copy routine measured for this device, then
    /// [`put`](Self::put) orders them before the counter that announces them. The operating
    /// system's own copy would do neither.
    pub(super) fn receive_parts(
        &self,
        ring: Ring,
        at: u64,
        len: u64,
    ) -> Result<Option<RingParts<'_>>> {
        match &self.host_area {
            HostArea::Windowed(_) => Ok(None),
            HostArea::Pinned(memory) => {
                let bytes = memory.host_bytes()?;
                ring_parts(bytes, self.offsets.receive_rings, ring, at, len).map(Some)
            }
        }
    }

    /// Copies bytes out of a send ring from counter `at` on.
    pub(super) fn fetch(&self, ring: (u64, u64), at: u64, into: &mut [u8]) -> Result<()> {
        let (begin, size) = (self.offsets.send_rings + ring.0, ring.1);
        let offset = at & (size - 1);
        let first = into.len().min((size - offset) as usize);
        let bytes = self.kernel_area.host_bytes()?;
        bytes.read_cached(begin + offset, &mut into[..first])?;
        match first < into.len() {
            true => bytes.read_cached(begin, &mut into[first..]),
            false => Ok(()),
        }
    }

    /// A socket's device counters: the lower halves of bytes sent and consumed.
    #[inline]
    pub(super) fn device_counters(&self, index: u16) -> Result<u64> {
        let at = self.offsets.device_counters + u64::from(index) * device_counters::LEN;
        self.kernel_area.host_bytes()?.load_u64(at)
    }

    /// Takes the activity flags that kernels have set, of the first `used` sockets: bit n is flag
    /// n. Counters that are read afterwards are at least as new.
    #[inline]
    pub(super) fn take_activity(&self, used: u16) -> Result<u128> {
        let Some(last) = used.checked_sub(1) else { return Ok(0) };
        let lines = (u64::from(last) >> activity_shift(self.sockets)) / FLAGS_PER_LINE + 1;
        let bytes = self.kernel_area.host_bytes()?;
        let mut taken = 0;
        for line in 0..lines {
            let at = self.offsets.activity + line * LINE;
            let words = bytes.load_line(at).ok_or_else(|| {
                Error::new(Kind::Misaligned, "poll the activity flags").on("shared memory")
            })?;
            for (pair, word) in (0..).zip(words) {
                for (half, flag) in [(0, word as u32), (1, (word >> 32) as u32)] {
                    if flag != 0 {
                        let number = pair * 2 + half;
                        bytes.store_u32(at + number * 4, 0)?;
                        taken |= 1_u128 << (line * FLAGS_PER_LINE + number);
                    }
                }
            }
        }
        if taken != 0 {
            // A flag that a kernel sets again before it was cleared is lost, but the counters that
            // it announces are in memory then. They must be read after the flag was cleared.
            fence(Ordering::SeqCst);
        }
        Ok(taken)
    }

    /// The sockets of an activity flag, among the first `used`.
    pub(super) fn sockets_of(&self, flag: u32, used: u16) -> std::ops::Range<u16> {
        let shift = activity_shift(self.sockets);
        let first = |flag: u32| (flag << shift).min(u32::from(used)) as u16;
        first(flag)..first(flag + 1)
    }

    /// Copies the first `count` device state lines from device memory.
    pub(super) fn device_states(&self, count: usize) -> Result<Vec<u8>> {
        let mut bytes = vec![0; count * device_state::LEN as usize];
        self.device_states.read(self.device_states_at, &mut bytes)?;
        Ok(bytes)
    }

    /// Zeroes the device counters of a new socket.
    pub(super) fn clear_device_counters(&self, index: u16) -> Result<()> {
        self.set_device_counters(index, 0)
    }

    fn set_device_counters(&self, index: u16, word: u64) -> Result<()> {
        let at = self.offsets.device_counters + u64::from(index) * device_counters::LEN;
        self.kernel_area.host_bytes()?.store_u64(at, word)
    }

    /// Writes device counters and sets their activity flag, as kernels do. For tests.
    pub(super) fn publish_device_counters(&self, index: u16, word: u64) -> Result<()> {
        self.set_device_counters(index, word)?;
        let flag = u64::from(index) >> activity_shift(self.sockets);
        self.kernel_area.host_bytes()?.store_u32(self.offsets.activity + flag * 4, 1)
    }

    /// A socket's word `RECEIVED`, as the host or the peer's HCA has written it.
    pub(super) fn received(&self, index: u16) -> Result<u64> {
        let at =
            self.offsets.host_state + u64::from(index) * host_state::LEN + host_state::RECEIVED;
        match &self.host_area {
            HostArea::Windowed(window) => {
                let mut word = [0; 8];
                window.read(at, &mut word)?;
                Ok(u64::from_le_bytes(word))
            }
            HostArea::Pinned(memory) => memory.host_bytes()?.load_u64(at),
        }
    }

    /// The memory of a socket that an RDMA device accesses: its rings, and the words `RECEIVED` and
    /// `TAKEN`.
    pub(super) fn conn_memory(&self, index: u16, receive: Ring, send: Ring) -> Result<ConnMemory> {
        let host_area = match (&self.host_area, &self.device_memory) {
            (HostArea::Pinned(memory), _) | (HostArea::Windowed(_), Some(memory)) => memory,
            (HostArea::Windowed(_), None) => {
                return Err(Error::new(Kind::Unsupported, "register a socket's rings"));
            }
        };
        let words =
            self.offsets.host_state + u64::from(index) * host_state::LEN + host_state::RECEIVED;
        let receive_at = self.offsets.receive_rings + receive.0;
        let send_at = self.offsets.send_rings + send.0;
        Ok(ConnMemory {
            send: (self.kernel_area.region(send_at, send.1)?, self.kernel_area_addr + send_at),
            receive: (host_area.region(receive_at, receive.1)?, self.host_area_addr + receive_at),
            words: (host_area.region(words, 16)?, self.host_area_addr + words),
        })
    }

    /// Copies request `number`, if it has been written.
    #[inline]
    pub(super) fn request(
        &self,
        number: u64,
        into: &mut [u8; request::LEN as usize],
    ) -> Result<bool> {
        let bytes = self.kernel_area.host_bytes()?;
        let at = self.offsets.requests + number % u64::from(self.slots) * request::LEN;
        if bytes.load_u64(at)? != number + 1 {
            return Ok(false);
        }
        bytes.read(at, into)?;
        Ok(true)
    }

    /// Writes the reply of request `number`, its number last.
    pub(super) fn reply(
        &self,
        number: u64,
        result: i64,
        address: &[u8; layout::ADDRESS_LEN],
    ) -> Result<()> {
        let at = self.offsets.replies + number % u64::from(self.slots) * reply::LEN;
        let reply =
            SockReply { number: number + 1, result, address: *address, ..SockReply::default() };
        let bytes = reply.encode();
        self.write_host(at + reply::RESULT, &bytes[reply::RESULT as usize..])?;
        self.store_host(at + reply::NUMBER, reply.number)
    }

    /// Publishes the heartbeat counter.
    pub(super) fn heartbeat(&self, count: u64) -> Result<()> {
        self.store_host(self.offsets.heartbeat + heartbeat::COUNT, count)
    }

    /// Publishes that the host has ended, so that every call of a kernel returns.
    pub(super) fn close(&self) -> Result<()> {
        self.store_host(self.offsets.heartbeat + heartbeat::CLOSED, 1)
    }
}

/// The bytes of a ring, of the rings at `rings` in `bytes`, between two counters.
fn ring_parts(
    bytes: SharedBytes<'_>,
    rings: u64,
    ring: Ring,
    at: u64,
    len: u64,
) -> Result<RingParts<'_>> {
    let (begin, size) = (rings + ring.0, ring.1);
    let offset = at & (size - 1);
    let first = len.min(size - offset);
    Ok([bytes.slice(begin + offset, first)?, bytes.slice(begin, len - first)?])
}

type Chosen = (HostArea, Option<Allocation>, Option<String>);

fn host_area(device: &Device, memory: SockMemory, len: u64) -> Result<Chosen> {
    let pinned = |why: String| -> Result<Chosen> {
        let memory = device.alloc_pinned(len).map_err(|error| {
            Error::new(Kind::OutOfMemory, "allocate receive rings").why(error.to_string())
        })?;
        Ok((HostArea::Pinned(memory), None, Some(why)))
    };
    match memory {
        SockMemory::Auto => {}
        SockMemory::Pinned => return pinned("SockMemory::Pinned was requested".into()),
        SockMemory::Threads => return pinned("threads of this process use the sockets".into()),
    }
    let memory = device.alloc_kind(len, MemoryKind::Vmm)?;
    match memory.window() {
        Ok(window) => Ok((HostArea::Windowed(window), Some(memory), None)),
        Err(error) => pinned(error.to_string()),
    }
}

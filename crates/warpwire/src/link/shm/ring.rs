//! One direction between two processes: a single-producer single-consumer ring buffer with packets
//! of any length.
//!
//! A packet is a header word and its bytes. It starts at a multiple of a cache line and never wraps
//! around the end of the ring: where it would, a `WRAP` header sends the reader to the start. A
//! header of 0 follows the last packet.
//!
//! There is no tail index for the reader to poll: it polls the position of the next header, and
//! finds the packet in the same cache line. The writer stores a batch behind that header, complete
//! with a new 0 at its end; then it stores the first header, which publishes the whole batch. While
//! the reader polls that line, each store to it moves the line from the reader to the writer and
//! back; hence a small packet that begins a batch is filled in private memory, and copied to the
//! ring together with its header. The head, which reports the space that is free again, counts
//! bytes and never wraps.
//!
//! Neither side trusts the other. The writer accepts the reader's head only if it is between the
//! last accepted value and what was published. The reader reads each header once and validates it;
//! an invalid one terminates the ring ([`Broken`]). Every step makes progress.

use std::sync::atomic::{Ordering, fence};

use super::sys::{ControlPage, ReadOnlyMapping, SealedMapping};

/// Length of a packet header in bytes.
const HEADER_LEN: usize = 8;
/// Packets start at multiples of this: a small one and its header move between cores as one line.
const CACHE_LINE: usize = 64;

/// Number of lines behind the last packet that are prefetched for write: a small packet, and the 0
/// behind it.
const PREFETCH_LINES: usize = 3;

/// Maximum length of a small packet: two lines with its header.
const MAX_SMALL: usize = 2 * CACHE_LINE - HEADER_LEN;

/// Header kind: a packet without ICRC.
const PLAIN: u64 = 1;
/// Header kind: a packet with an ICRC.
const WITH_ICRC: u64 = 2;
/// Header kind: no packet, continue at the start of the ring.
const WRAP: u64 = 3;

/// Header flag: the batch consists of this packet only, so there may be nothing behind it yet.
const SINGLE: u64 = 1 << 63;

/// Valid ring sizes in bytes.
pub(super) const SIZES: std::ops::RangeInclusive<usize> = 1 << 12..=1 << 26;

/// The space that a packet takes in the ring.
pub(super) const fn stride(len: usize) -> usize {
    (HEADER_LEN + len).next_multiple_of(CACHE_LINE)
}

const fn header(kind: u64, len: usize) -> u64 {
    kind << 32 | len as u64
}

/// The other side wrote invalid contents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Broken;

/// Why there is no space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NoRoom {
    /// The maximum that one flush publishes has been committed.
    Batch,
    /// The peer has not read enough.
    Ring,
    /// The peer's head is invalid.
    Broken,
}

/// The sender's side.
pub(super) struct Writer {
    memory: SealedMapping,
    control: ControlPage,
    size: usize,
    /// End of the committed packets, and of the published ones, in bytes.
    tail: u64,
    published: u64,
    /// The last head read from the reader.
    head: u64,
    /// Offset of the reserved packet's header; whether it follows a wrap to the start of the ring.
    start: usize,
    wraps: bool,
    len: usize,
    /// Offset and value of the header that publishes the batch once it is stored.
    first: Option<(usize, u64)>,
    /// A small packet that begins the batch; whether it is the reserved one; its length once it is
    /// committed.
    stage: [u8; MAX_SMALL],
    in_stage: bool,
    staged: Option<usize>,
    /// Packets and bytes committed but not published.
    pub packets: u64,
    pub bytes: u64,
}

impl Writer {
    /// `size` is a power of two, and the size of the memory.
    pub(super) fn new(memory: SealedMapping, control: ControlPage, size: usize) -> Self {
        Self {
            memory,
            control,
            size,
            tail: 0,
            published: 0,
            head: 0,
            start: 0,
            wraps: false,
            len: 0,
            first: None,
            stage: [0; MAX_SMALL],
            in_stage: false,
            staged: None,
            packets: 0,
            bytes: 0,
        }
    }

    /// Whether there is space for a packet. If so, there is for a shorter one.
    #[inline]
    pub(super) fn has_room(&mut self, len: usize) -> Result<(), NoRoom> {
        let to_end = self.to_end();
        // Plus a line for the 0 behind it.
        let needed = stride(len) + CACHE_LINE + if stride(len) > to_end { to_end } else { 0 };
        // At most half the ring per batch: the reader reads the other half meanwhile.
        if (self.tail - self.published) as usize + needed > self.size / 2 {
            return Err(NoRoom::Batch);
        }
        if (self.tail - self.head) as usize + needed > self.size {
            self.refresh_head()?;
            if (self.tail - self.head) as usize + needed > self.size {
                return Err(NoRoom::Ring);
            }
        }
        Ok(())
    }

    /// Bytes between the committed packets and the end of the ring.
    #[inline]
    fn to_end(&self) -> usize {
        self.size - (self.tail as usize & (self.size - 1))
    }

    /// Reserves space for a packet, which [`Writer::reserved_mut`] returns.
    #[inline]
    pub(super) fn reserve(&mut self, len: usize) -> Result<(), NoRoom> {
        self.has_room(len)?;
        let to_end = self.to_end();
        let wraps = stride(len) > to_end;
        self.in_stage = self.first.is_none() && !wraps && len <= MAX_SMALL;
        self.wraps = wraps;
        self.start = if wraps { 0 } else { self.size - to_end };
        self.len = len;
        Ok(())
    }

    /// Reads the reader's head. Acquire: the reader is done with the bytes before we overwrite
    /// them.
    fn refresh_head(&mut self) -> Result<(), NoRoom> {
        let head = self.control.head().load(Ordering::Acquire);
        if head < self.head || head > self.published {
            return Err(NoRoom::Broken);
        }
        self.head = head;
        Ok(())
    }

    /// The reserved packet.
    #[inline]
    pub(super) fn reserved_mut(&mut self) -> &mut [u8] {
        if self.in_stage {
            return self.stage.get_mut(..self.len).unwrap_or_default();
        }
        self.memory.bytes_mut(self.start + HEADER_LEN, self.len).unwrap_or_default()
    }

    /// Ends the reserved packet after `len` bytes, and returns them. The reader does not see it
    /// yet.
    #[inline]
    pub(super) fn commit(&mut self, len: usize, has_icrc: bool) -> &[u8] {
        let len = len.min(self.len);
        if self.wraps {
            let offset = self.tail as usize & (self.size - 1);
            self.write_header(offset, header(WRAP, 0));
            self.tail += (self.size - offset) as u64;
            self.wraps = false;
        }
        self.write_header(self.start, header(if has_icrc { WITH_ICRC } else { PLAIN }, len));
        self.tail += stride(len) as u64;
        self.packets += 1;
        self.bytes += len as u64;
        self.memory.set(self.tail as usize & (self.size - 1), 0, Ordering::Relaxed);
        if std::mem::take(&mut self.in_stage) {
            self.staged = Some(len);
            return self.stage.get(..len).unwrap_or_default();
        }
        self.memory.bytes(self.start + HEADER_LEN, len).unwrap_or_default()
    }

    /// Writes a header; the first one of a batch is kept for [`Writer::publish`].
    #[inline]
    fn write_header(&mut self, offset: usize, word: u64) {
        match self.first {
            None => self.first = Some((offset, word)),
            Some(_) => self.memory.set(offset, word, Ordering::Relaxed),
        }
    }

    /// Publishes the committed packets, and returns whether the reader must be woken.
    ///
    /// A fence separates the store of the header from the load of `armed`, as one separates the
    /// reader's store of `armed` from its load of the header: either the writer sees `armed`, or
    /// the reader sees the packet (Dekker).
    #[inline]
    pub(super) fn publish(&mut self) -> bool {
        if let Some((offset, word)) = self.first.take() {
            let staged = self.staged.take().and_then(|len| self.stage.get(..len));
            if let Some(bytes) = staged
                && let Some(slot) = self.memory.bytes_mut(offset + HEADER_LEN, bytes.len())
            {
                slot.copy_from_slice(bytes);
            }
            let single = self.packets == 1 && word >> 32 != WRAP;
            self.memory.set(offset, if single { word | SINGLE } else { word }, Ordering::Release);
            fence(Ordering::SeqCst);
        }
        self.published = self.tail;
        (self.packets, self.bytes) = (0, 0);
        // The reader accessed the next lines last. Prefetch them for write now, while the sender
        // does other work: the next packet's header cannot be stored before the 0 behind that
        // packet.
        for line in 1..=PREFETCH_LINES {
            self.memory.prefetch((self.tail as usize + line * CACHE_LINE) & (self.size - 1));
        }
        let armed = self.control.armed();
        armed.load(Ordering::Relaxed) != 0 && armed.swap(0, Ordering::Relaxed) != 0
    }
}

/// An item that a reader finds.
pub(super) enum RingItem<'a> {
    /// A packet, copied out, and whether it has an ICRC.
    Packet(&'a [u8], bool),
    /// A packet longer than the buffer; skipped.
    TooLong,
}

/// The receiver's side.
pub(super) struct Reader {
    memory: ReadOnlyMapping,
    control: ControlPage,
    size: usize,
    /// End of the packets read, and of those reported to the writer, in bytes.
    head: u64,
    released: u64,
    /// The last poll found nothing: the caller is waiting for a packet.
    idle: bool,
}

impl Reader {
    /// `size` is a power of two, and the size that the memory was opened with.
    pub(super) fn new(memory: ReadOnlyMapping, control: ControlPage, size: usize) -> Self {
        Self { memory, control, size, head: 0, released: 0, idle: true }
    }

    /// Delivers up to `max` packets, each copied into `buffer` first: the sender may change its
    /// memory at any time.
    #[inline]
    pub(super) fn take(
        &mut self,
        max: usize,
        buffer: &mut [u8],
        mut each: impl FnMut(RingItem<'_>),
    ) -> Result<(), Broken> {
        let idle = std::mem::take(&mut self.idle);
        // Wraps count as well: no contents can keep the reader in this loop forever.
        for step in 0..max {
            let offset = self.header_offset();
            let word = self.memory.word(offset, Ordering::Acquire);
            if word == 0 {
                self.idle = step == 0;
                break;
            }
            let (kind, len) = ((word & !SINGLE) >> 32, word as u32 as usize);
            let to_end = self.size - offset;
            let step = match kind {
                WRAP if offset > 0 => to_end,
                PLAIN | WITH_ICRC if len <= to_end - HEADER_LEN => stride(len),
                _ => return Err(Broken),
            };
            if kind != WRAP {
                match buffer.get_mut(..len) {
                    None => each(RingItem::TooLong),
                    Some(copy) => {
                        if !self.memory.read(offset + HEADER_LEN, copy) {
                            return Err(Broken);
                        }
                        each(RingItem::Packet(copy, kind == WITH_ICRC));
                    }
                }
            }
            self.head += step as u64;
            // Free space early for a sender that waits for it.
            if (self.head - self.released) as usize >= self.size / 8 {
                self.release();
            }
            // Polling the next header costs as much as the packet did; a caller that was waiting
            // for this packet handles it first.
            if idle && word & SINGLE != 0 {
                break;
            }
        }
        self.release();
        Ok(())
    }

    /// Offset of the next header.
    #[inline]
    fn header_offset(&self) -> usize {
        self.head as usize & (self.size - 1)
    }

    /// Returns the space that was read. Release: our reads are done before the writer overwrites
    /// it.
    #[inline]
    fn release(&mut self) {
        if self.head != self.released {
            self.control.head().store(self.head, Ordering::Release);
            self.released = self.head;
        }
    }

    /// Requests a wake-up with the next packet; returns whether there is one already. See
    /// [`Writer::publish`].
    pub(super) fn arm(&self) -> bool {
        self.control.armed().store(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        self.memory.word(self.header_offset(), Ordering::Acquire) != 0
    }

    /// Cancels the request for a wake-up.
    pub(super) fn disarm(&self) {
        self.control.armed().store(0, Ordering::Relaxed);
    }

    /// Whether everything published has been read; conclusive only once the sender is known to have
    /// exited.
    pub(super) fn is_empty(&self) -> bool {
        self.memory.word(self.header_offset(), Ordering::Acquire) == 0
    }
}

#[cfg(test)]
impl Writer {
    /// Writes `count` words at random positions, many of them plausible headers.
    pub(super) fn corrupt(&mut self, draw: &mut dyn FnMut() -> u64, count: usize) {
        for _ in 0..count {
            let word = draw();
            let word = match draw() % 8 {
                0 => word,
                1 => 0,
                _ => header(1 + word % 3, (word >> 8) as usize % 3000),
            };
            // The reader is near the start.
            let line =
                draw() as usize % if draw().is_multiple_of(2) { 4 } else { self.size / CACHE_LINE };
            self.memory.set(line * CACHE_LINE, word, Ordering::Release);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn pair(size: usize) -> (Writer, Reader) {
        let ((sealed_mapping, ring), (control, page)) =
            (SealedMapping::new(size).unwrap(), ControlPage::new().unwrap());
        let reader = Reader::new(
            ReadOnlyMapping::open(&ring, size).unwrap(),
            ControlPage::open(&page).unwrap(),
            size,
        );
        (Writer::new(sealed_mapping, control, size), reader)
    }

    fn take(reader: &mut Reader) -> Result<Vec<Vec<u8>>, Broken> {
        let mut got = Vec::new();
        reader.take(1000, &mut [0; 2000], |item| match item {
            RingItem::Packet(bytes, _) => got.push(bytes.to_vec()),
            RingItem::TooLong => got.push(Vec::new()),
        })?;
        Ok(got)
    }

    proptest! {
        #[test]
        fn packets_round_trip(
            batches in prop::collection::vec(prop::collection::vec(16_usize..900, 0..12), 1..40),
        ) {
            let (mut writer, mut reader) = pair(1 << 12);
            let (mut sent, mut got) = (Vec::new(), Vec::new());
            for (number, batch) in batches.iter().enumerate() {
                for len in batch {
                    while writer.reserve(*len).is_err() {
                        writer.publish();
                        got.extend(take(&mut reader).unwrap());
                    }
                    writer.reserved_mut().fill(number as u8);
                    writer.commit(*len, false);
                    sent.push(vec![number as u8; *len]);
                }
                writer.publish();
                if number % 3 == 0 {
                    got.extend(take(&mut reader).unwrap());
                }
            }
            // One call may leave packets: a caller that was waiting for one gets that one first.
            while !reader.is_empty() {
                got.extend(take(&mut reader).unwrap());
            }
            prop_assert_eq!(sent, got);
        }

        /// Arbitrary words as headers: packets or an error, never a panic, and never more steps
        /// than requested.
        #[test]
        fn arbitrary_headers_are_handled(
            words in prop::collection::vec((any::<u64>(), 0_usize..64), 1..200),
        ) {
            let (mut writer, mut reader) = pair(1 << 12);
            for (word, line) in words {
                // Many headers are nearly valid, and get further.
                let likely = header(1 + word % 4, (word >> 8) as usize % 500);
                let word = if word % 8 != 0 { likely } else { word };
                writer.memory.set(line * CACHE_LINE, word, Ordering::Relaxed);
                let before = reader.head;
                if take(&mut reader).is_err() {
                    return Ok(());
                }
                prop_assert!(reader.head - before <= 1000 << 12);
            }
        }

        #[test]
        fn arbitrary_heads_are_handled(heads in prop::collection::vec(any::<u64>(), 1..60)) {
            let (mut writer, _reader) = pair(1 << 12);
            for head in heads {
                let head = if head % 2 == 0 { writer.head + (head >> 8) % 300 } else { head };
                writer.control.head().store(head, Ordering::Release);
                match writer.reserve(500) {
                    Ok(()) => {
                        writer.reserved_mut().fill(1);
                        prop_assert_eq!(writer.commit(500, false).len(), 500);
                    }
                    Err(NoRoom::Batch) => { writer.publish(); }
                    Err(NoRoom::Ring | NoRoom::Broken) => {}
                }
                prop_assert!(writer.tail - writer.head <= 1 << 12);
            }
        }
    }

    #[test]
    fn a_waiting_reader_is_woken_once() {
        let (mut writer, mut reader) = pair(1 << 12);
        assert!(!reader.arm());
        writer.reserve(64).unwrap();
        writer.commit(64, false);
        assert!(writer.publish());
        assert!(!writer.publish(), "it was woken already");
        assert!(reader.arm(), "a packet is waiting");
        assert_eq!(take(&mut reader).unwrap().len(), 1);
        reader.disarm();
        assert!(!writer.publish() && reader.is_empty());
    }
}

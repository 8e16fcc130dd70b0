//! One direction between two processes: a ring of bytes with packets of any length in it, one writer, one reader.
//!
//! A packet is a header word and its bytes, at a multiple of a cache line, and never runs over the ring's end: where
//! it would, a header says "go on at the beginning". After the last packet stands a header of 0.
//!
//! There is no tail for the reader to look at: it looks at the place of the next header, and finds the packet in the same
//! line. A batch is written behind that header, all of it, with a new 0 at its end; then the first header is stored, and
//! the whole batch is there. While a reader looks at that line, each store to it takes the line away from the reader and
//! is followed by its coming back; hence a small packet that begins a batch is filled in the writer's own memory, and goes into the ring
//! together with its header. The head, which says what room is free again, counts bytes and never wraps.
//!
//! Neither side believes the other. The writer takes the reader's head for a claim about free room, good only if it
//! lies between the last claim and what was published. The reader takes every header for a claim too, and
//! reads it once; one that makes no sense ends the ring ([`Broken`]). No step is without progress.

use std::sync::atomic::{Ordering, fence};

use super::sys::{ControlPage, ReadOnlyMapping, SealedMapping};

/// What stands before a packet.
const HEADER_LEN: usize = 8;
/// Packets begin at multiples of this: small ones, with their header, are one line that changes hands.
const CACHE_LINE: usize = 64;

/// So many lines behind the last packet are fetched before they are written: a small packet, and the 0 behind it.
const PREFETCH_LINES: usize = 3;

/// Packets up to this length are small: two lines with their header.
const MAX_SMALL: usize = 2 * CACHE_LINE - HEADER_LEN;

/// A packet, as it was committed.
const PLAIN: u64 = 1;
/// A packet with an ICRC.
const WITH_ICRC: u64 = 2;
/// No packet: go on at the ring's beginning.
const WRAP: u64 = 3;

/// With a header: its batch is this packet alone, so that there may be nothing behind it yet.
const SINGLE: u64 = 1 << 63;

/// The sizes of rings that are made and accepted.
pub(super) const SIZES: std::ops::RangeInclusive<usize> = 1 << 12..=1 << 26;

/// What a packet takes in the ring.
pub(super) const fn stride(len: usize) -> usize {
    (HEADER_LEN + len).next_multiple_of(CACHE_LINE)
}

const fn header(kind: u64, len: usize) -> u64 {
    kind << 32 | len as u64
}

/// The other side wrote something into the ring that makes no sense.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Broken;

/// Why there is no room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NoRoom {
    /// As many bytes are committed as one flush publishes.
    Batch,
    /// The peer has not read enough.
    Ring,
    /// The peer's head makes no sense.
    Broken,
}

/// The sender's side.
pub(super) struct Writer {
    memory: SealedMapping,
    control: ControlPage,
    size: usize,
    /// Up to where packets are committed, and published.
    tail: u64,
    published: u64,
    /// The reader's head, as last seen.
    head: u64,
    /// Where the reserved packet's header goes, whether that is at the beginning, after a turn.
    start: usize,
    wraps: bool,
    len: usize,
    /// The header that shows the batch, once it is stored: where, and which.
    first: Option<(usize, u64)>,
    /// A small packet that begins the batch; whether it is the reserved one, and its length once it is committed.
    stage: [u8; MAX_SMALL],
    in_stage: bool,
    staged: Option<usize>,
    /// Packets and bytes that are committed and not published.
    pub packets: u64,
    pub bytes: u64,
}

impl Writer {
    /// `size` is a power of two, and what the memory was made with.
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

    /// Finds room for a packet; [`Writer::reserved_mut`] is it.
    #[inline]
    pub(super) fn reserve(&mut self, len: usize) -> Result<(), NoRoom> {
        let offset = self.tail as usize & (self.size - 1);
        let to_end = self.size - offset;
        let wraps = stride(len) > to_end;
        // With a line for the 0 behind it.
        let needed = stride(len) + CACHE_LINE + if wraps { to_end } else { 0 };
        // Half a ring at a time: the other half is being read meanwhile.
        if (self.tail - self.published) as usize + needed > self.size / 2 {
            return Err(NoRoom::Batch);
        }
        if (self.tail - self.head) as usize + needed > self.size {
            self.refresh_head()?;
            if (self.tail - self.head) as usize + needed > self.size {
                return Err(NoRoom::Ring);
            }
        }
        self.in_stage = self.first.is_none() && !wraps && len <= MAX_SMALL;
        self.wraps = wraps;
        self.start = if wraps { 0 } else { offset };
        self.len = len;
        Ok(())
    }

    /// Asks how far the reader is. Acquire: it has done with those bytes before we write them.
    fn refresh_head(&mut self) -> Result<(), NoRoom> {
        let head = self.control.head().load(Ordering::Acquire);
        if head < self.head || head > self.published {
            return Err(NoRoom::Broken);
        }
        self.head = head;
        Ok(())
    }

    /// The room that was reserved.
    #[inline]
    pub(super) fn reserved_mut(&mut self) -> &mut [u8] {
        if self.in_stage {
            return self.stage.get_mut(..self.len).unwrap_or_default();
        }
        self.memory.bytes_mut(self.start + HEADER_LEN, self.len).unwrap_or_default()
    }

    /// Ends the reserved packet after `len` of its bytes, and returns them. The reader does not see it yet.
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

    /// Writes a header; the batch's first is kept for [`Writer::publish`].
    #[inline]
    fn write_header(&mut self, offset: usize, word: u64) {
        match self.first {
            None => self.first = Some((offset, word)),
            Some(_) => self.memory.set(offset, word, Ordering::Relaxed),
        }
    }

    /// Shows the reader what was committed, and returns whether it must be woken.
    ///
    /// Between the store of the header and the load of the wish stands a fence, as it does between the reader's store of
    /// the wish and its load of the header: either we see the wish, or the reader sees the packet.
    #[inline]
    pub(super) fn publish(&mut self) -> bool {
        if let Some((offset, word)) = self.first.take() {
            let staged = self.staged.take().and_then(|len| self.stage.get(..len));
            if let Some(bytes) = staged
                && let Some(place) = self.memory.bytes_mut(offset + HEADER_LEN, bytes.len())
            {
                place.copy_from_slice(bytes);
            }
            let single = self.packets == 1 && word >> 32 != WRAP;
            self.memory.set(offset, if single { word | SINGLE } else { word }, Ordering::Release);
            fence(Ordering::SeqCst);
        }
        self.published = self.tail;
        (self.packets, self.bytes) = (0, 0);
        // The reader had the next lines last. They are fetched now, while the sender is busy with other things: the
        // next packet's header cannot be stored before the 0 behind that packet.
        for line in 1..=PREFETCH_LINES {
            self.memory.prefetch((self.tail as usize + line * CACHE_LINE) & (self.size - 1));
        }
        let armed = self.control.armed();
        armed.load(Ordering::Relaxed) != 0 && armed.swap(0, Ordering::Relaxed) != 0
    }
}

/// What a reader finds.
pub(super) enum RingItem<'a> {
    /// A packet, copied, and whether it has an ICRC.
    Packet(&'a [u8], bool),
    /// A packet that is longer than the buffer for it; skipped.
    TooLong,
}

/// The receiver's side.
pub(super) struct Reader {
    memory: ReadOnlyMapping,
    control: ControlPage,
    size: usize,
    /// Up to where we have read, and said so.
    head: u64,
    released: u64,
    /// The last look found nothing: whoever looks waits for one packet.
    idle: bool,
}

impl Reader {
    /// `size` is a power of two, and what the memory was opened with.
    pub(super) fn new(memory: ReadOnlyMapping, control: ControlPage, size: usize) -> Self {
        Self { memory, control, size, head: 0, released: 0, idle: true }
    }

    /// Takes up to `max` packets, each copied into `buffer` first: the sender may change its memory while we look.
    #[inline]
    pub(super) fn take(
        &mut self,
        max: usize,
        buffer: &mut [u8],
        mut each: impl FnMut(RingItem<'_>),
    ) -> Result<(), Broken> {
        let idle = std::mem::take(&mut self.idle);
        // Turns count as well: nothing that a sender writes keeps us here for ever.
        for step in 0..max {
            let offset = self.place();
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
            // A sender that waits for room gets some before the batch is at its end.
            if (self.head - self.released) as usize >= self.size / 8 {
                self.release();
            }
            // To look behind it costs as much as the packet did; who has waited for it answers it first.
            if idle && word & SINGLE != 0 {
                break;
            }
        }
        self.release();
        Ok(())
    }

    /// Where the next header is.
    #[inline]
    fn place(&self) -> usize {
        self.head as usize & (self.size - 1)
    }

    /// Gives back what was read. Release: our reading is done before the writer writes there again.
    #[inline]
    fn release(&mut self) {
        if self.head != self.released {
            self.control.head().store(self.head, Ordering::Release);
            self.released = self.head;
        }
    }

    /// Asks the sender to wake us with its next packet; whether there is one already. See [`Writer::publish`].
    pub(super) fn arm(&self) -> bool {
        self.control.armed().store(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        self.memory.word(self.place(), Ordering::Acquire) != 0
    }

    /// We are awake, and look by ourselves.
    pub(super) fn disarm(&self) {
        self.control.armed().store(0, Ordering::Relaxed);
    }

    /// Whether all is read that the sender published; to be asked after it is known to be gone.
    pub(super) fn is_empty(&self) -> bool {
        self.memory.word(self.place(), Ordering::Acquire) == 0
    }
}

#[cfg(test)]
impl Writer {
    /// Writes `count` words anywhere, some of them likely headers.
    pub(super) fn corrupt(&mut self, draw: &mut dyn FnMut() -> u64, count: usize) {
        for _ in 0..count {
            let word = draw();
            let word = match draw() % 8 {
                0 => word,
                1 => 0,
                _ => header(1 + word % 3, (word >> 8) as usize % 3000),
            };
            // The reader is near the beginning.
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
        fn whatever_goes_in_comes_out(
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
            // One look may leave some: who has waited for a packet gets that one first.
            while !reader.is_empty() {
                got.extend(take(&mut reader).unwrap());
            }
            prop_assert_eq!(sent, got);
        }

        /// Any words as headers: packets, or the end, never a panic, and never more steps than were asked for.
        #[test]
        fn any_claims_of_the_sender_are_survived(
            words in prop::collection::vec((any::<u64>(), 0_usize..64), 1..200),
        ) {
            let (mut writer, mut reader) = pair(1 << 12);
            for (word, line) in words {
                // Some claims are nearly right, and go further.
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
        fn any_claims_of_the_reader_are_survived(heads in prop::collection::vec(any::<u64>(), 1..60)) {
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
    fn a_sleeper_is_woken_once() {
        let (mut writer, mut reader) = pair(1 << 12);
        assert!(!reader.arm());
        writer.reserve(64).unwrap();
        writer.commit(64, false);
        assert!(writer.publish());
        assert!(!writer.publish(), "it was told");
        assert!(reader.arm(), "there is something already");
        assert_eq!(take(&mut reader).unwrap().len(), 1);
        reader.disarm();
        assert!(!writer.publish() && reader.is_empty());
    }
}

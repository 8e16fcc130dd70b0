//! The store as used by the simulated GPU's workers: buckets of slots in device memory, with a
//! reader-writer lock per bucket. Increments of existing integers take the read lock: they are
//! atomic, so that several workers can count at one key concurrently.

use warpwire::mem::DeviceAddr;
use warpwire::mem::sim::{Block, KernelFault};

use super::{MAX_KEY, SLOTS_PER_BUCKET, Setup, counts, slot};

type Result<T> = std::result::Result<T, KernelFault>;

/// A lock word: [`READER`] per reader, and one bit for the writer that holds it or waits for it.
const WRITER: u32 = 1;
const READER: u32 = 2;
/// Largest absolute value that can still be incremented or decremented.
const MAX_NUMBER: i64 = 999_999_999_999_999_999;
const NOT_A_NUMBER: &str = "-ERR value is not an integer or out of range\r\n";

/// The store as seen by one block.
pub(super) struct Store<'a> {
    pub(super) block: &'a Block<'a>,
    pub(super) setup: &'a Setup,
}

fn at(address: u64) -> DeviceAddr {
    DeviceAddr::new(address)
}

/// Address of a slot's integer, in place of the text.
fn number_of(place: u64) -> DeviceAddr {
    at(place + slot::KEY + MAX_KEY)
}

/// FNV-1a with a final shift, as in kv.cu.
fn hash_of(key: &[u8]) -> u32 {
    let hash = key
        .iter()
        .fold(2_166_136_261_u32, |hash, byte| (hash ^ u32::from(*byte)).wrapping_mul(16_777_619));
    hash ^ hash >> 15
}

impl Store<'_> {
    fn lock_of(&self, hash: u32) -> DeviceAddr {
        at(self.setup.locks + (u64::from(hash) & self.setup.bucket_mask) * 4)
    }

    /// Runs `work` with the read lock of the key's bucket.
    fn reading<T>(&self, hash: u32, work: impl FnOnce() -> Result<T>) -> Result<T> {
        let (lock, block) = (self.lock_of(hash), self.block);
        block.spin_until(|| {
            if block.fetch_add_u32(lock, READER)? & WRITER == 0 {
                return Ok(true);
            }
            block.fetch_add_u32(lock, READER.wrapping_neg())?;
            block.spin_until(|| Ok(block.load_u32(lock)? & WRITER == 0))?;
            Ok(false)
        })?;
        let outcome = work();
        block.fetch_add_u32(lock, READER.wrapping_neg())?;
        outcome
    }

    /// Runs `work` with the write lock of the key's bucket.
    fn writing<T>(&self, hash: u32, work: impl FnOnce() -> Result<T>) -> Result<T> {
        let (lock, block) = (self.lock_of(hash), self.block);
        block.spin_until(|| {
            let before = block.load_u32(lock)?;
            let next = before | WRITER;
            Ok(before & WRITER == 0 && block.compare_exchange_u32(lock, before, next)? == before)
        })?;
        // The bit keeps new readers out; wait for the current ones.
        block.spin_until(|| Ok(block.load_u32(lock)? == WRITER))?;
        let outcome = work();
        block.fetch_add_u32(lock, WRITER.wrapping_neg())?;
        outcome
    }

    fn word(&self, slot: u64, word: u64) -> Result<u32> {
        self.block.load_u32(at(slot + word))
    }

    /// The key's slot, or a free one if `create`.
    fn find(&self, key: &[u8], hash: u32, create: bool) -> Result<Option<u64>> {
        let bucket = u64::from(hash) & self.setup.bucket_mask;
        let mut vacant = None;
        for number in 0..SLOTS_PER_BUCKET {
            let place =
                self.setup.slots + (bucket * SLOTS_PER_BUCKET + number) * self.setup.slot_size;
            if self.word(place, slot::USED)? == 0 {
                vacant = vacant.or(Some(place));
                continue;
            }
            let same_head = self.word(place, slot::HASH)? == hash
                && self.word(place, slot::KEY_LENGTH)? as usize == key.len();
            let mut found = [0; MAX_KEY as usize];
            if same_head {
                self.block.read(at(place + slot::KEY), &mut found[..key.len()])?;
            }
            if same_head && found[..key.len()] == *key {
                return Ok(Some(place));
            }
        }
        Ok(vacant.filter(|_| create))
    }

    /// Assigns a free slot to the key; does nothing if it is in use.
    fn take(&self, place: u64, key: &[u8], hash: u32) -> Result<()> {
        if self.word(place, slot::USED)? != 0 {
            return Ok(());
        }
        self.block.store_u32(at(place + slot::USED), slot::TEXT)?;
        self.block.store_u32(at(place + slot::HASH), hash)?;
        self.block.store_u32(at(place + slot::KEY_LENGTH), key.len() as u32)?;
        self.block.write(at(place + slot::KEY), key)?;
        self.count(counts::KEYS, 1)?;
        Ok(())
    }

    fn value(&self, place: u64) -> Result<Vec<u8>> {
        if self.word(place, slot::USED)? == slot::NUMBER {
            let number = self.block.load_u64(number_of(place))? as i64;
            return Ok(number.to_string().into_bytes());
        }
        let mut value = vec![0; self.word(place, slot::VALUE_LENGTH)? as usize];
        self.block.read(at(place + slot::KEY + MAX_KEY), &mut value)?;
        Ok(value)
    }

    /// False if the bucket is full.
    pub(super) fn set(&self, key: &[u8], value: &[u8]) -> Result<bool> {
        let hash = hash_of(key);
        self.writing(hash, || {
            let Some(place) = self.find(key, hash, true)? else { return Ok(false) };
            self.take(place, key, hash)?;
            self.block.write(at(place + slot::KEY + MAX_KEY), value)?;
            self.block.store_u32(at(place + slot::VALUE_LENGTH), value.len() as u32)?;
            self.block.store_u32(at(place + slot::USED), slot::TEXT)?;
            Ok(true)
        })
    }

    pub(super) fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>> {
        let hash = hash_of(key);
        self.reading(hash, || {
            self.find(key, hash, false)?.map(|place| self.value(place)).transpose()
        })
    }

    pub(super) fn exists(&self, key: &[u8]) -> Result<bool> {
        let hash = hash_of(key);
        self.reading(hash, || Ok(self.find(key, hash, false)?.is_some()))
    }

    /// Deletes a key; false if there was none.
    pub(super) fn drop_key(&self, key: &[u8]) -> Result<bool> {
        let hash = hash_of(key);
        self.writing(hash, || {
            let found = self.find(key, hash, false)?;
            if let Some(place) = found {
                self.block.store_u32(at(place + slot::USED), slot::VACANT)?;
                self.count(counts::KEYS, u64::MAX)?;
            }
            Ok(found.is_some())
        })
    }

    /// Adds to an integer: returns the sum, or the error reply.
    pub(super) fn add(
        &self,
        key: &[u8],
        by: i64,
    ) -> Result<std::result::Result<i64, &'static str>> {
        let hash = hash_of(key);
        let added = self.reading(hash, || match self.find(key, hash, false)? {
            Some(place) if self.word(place, slot::USED)? == slot::NUMBER => {
                self.add_to_number(place, by).map(Some)
            }
            _ => Ok(None),
        })?;
        if let Some(sum) = added {
            return Ok(sum);
        }
        // Convert the text to an integer, if possible.
        self.writing(hash, || {
            let Some(place) = self.find(key, hash, true)? else {
                return Ok(Err("-OOM the store has no room for this key\r\n"));
            };
            let used = self.word(place, slot::USED)?;
            if used != slot::NUMBER {
                let before =
                    if used == slot::VACANT { Some(0) } else { parse_integer(&self.value(place)?) };
                let Some(before) = before else { return Ok(Err(NOT_A_NUMBER)) };
                self.take(place, key, hash)?;
                self.block.store_u64(number_of(place), before as u64)?;
                self.block.store_u32(at(place + slot::USED), slot::NUMBER)?;
            }
            self.add_to_number(place, by)
        })
    }

    /// As [`add`](Self::add), for a slot that holds an integer already. Needs the read or write
    /// lock.
    fn add_to_number(&self, place: u64, by: i64) -> Result<std::result::Result<i64, &'static str>> {
        let before = self.block.fetch_add_u64(number_of(place), by as u64)? as i64;
        if (-MAX_NUMBER..=MAX_NUMBER).contains(&before) {
            return Ok(Ok(before + by));
        }
        self.block.fetch_add_u64(number_of(place), by.wrapping_neg() as u64)?;
        Ok(Err(NOT_A_NUMBER))
    }

    /// Adds to a counter and returns the previous value.
    pub(super) fn count(&self, counter: u64, by: u64) -> Result<u64> {
        self.block.fetch_add_u64(at(self.setup.counts + counter), by)
    }

    pub(super) fn counter(&self, counter: u64) -> Result<u64> {
        self.block.load_u64(at(self.setup.counts + counter))
    }
}

/// Parses a decimal integer of at most 18 digits.
fn parse_integer(text: &[u8]) -> Option<i64> {
    let digits = text.strip_prefix(b"-").unwrap_or(text);
    if digits.is_empty() || digits.len() > 18 || !digits.iter().all(u8::is_ascii_digit) {
        return None;
    }
    std::str::from_utf8(text).ok()?.parse().ok()
}

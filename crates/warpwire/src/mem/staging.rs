//! Pinned memory for bytes that operations bring along: a caller's bytes are copied here, and the stream copies them on.

use parking_lot::Mutex;

use super::allocation::{Allocation, Region};
use super::device::Device;
use crate::error::{Error, Kind, Result};
use crate::units;

/// How large a piece is, if nobody needs a larger one.
const PIECE: u64 = 64 << 10;
/// How much one stream may have waiting.
const MOST: u64 = 256 << 20;
/// Where each begins: copies like it.
const ALIGNED: u64 = 64;

/// Pieces of pinned memory. Each is filled from its beginning on, and begun anew when nobody uses any of it.
#[derive(Default)]
pub(super) struct Staging(Mutex<Pieces>);

#[derive(Default)]
struct Pieces {
    all: Vec<Piece>,
    bytes: u64,
    /// The piece that was filled last.
    current: usize,
}

struct Piece {
    memory: Allocation,
    used: u64,
}

impl Piece {
    fn take(&mut self, bytes: &[u8]) -> Result<Option<Region>> {
        if !self.memory.is_in_use() {
            self.used = 0;
        }
        let len = bytes.len() as u64;
        if self.memory.len() - self.used < len {
            return Ok(None);
        }
        let region = self.memory.region(self.used, len)?;
        self.memory.host_bytes()?.write(self.used, bytes)?;
        self.used = (self.used + len).next_multiple_of(ALIGNED).min(self.memory.len());
        Ok(Some(region))
    }
}

impl Staging {
    /// A copy of the bytes, which stays for as long as the region or a clone of it does.
    pub(super) fn hold(&self, device: &Device, bytes: &[u8]) -> Result<Region> {
        let mut pieces = self.0.lock();
        let current = pieces.current;
        if let Some(piece) = pieces.all.get_mut(current)
            && let Some(region) = piece.take(bytes)?
        {
            return Ok(region);
        }
        // Operations that have ended hold their memory until somebody asks.
        device.reclaim();
        for at in 0..pieces.all.len() {
            if let Some(region) = pieces.all[at].take(bytes)? {
                pieces.current = at;
                return Ok(region);
            }
        }
        let len = (bytes.len() as u64).max(PIECE).next_multiple_of(ALIGNED);
        if pieces.bytes + len > MOST {
            let what = format!("hold {} for a stream", units::bytes(bytes.len() as u64));
            return Err(Error::new(Kind::Busy, what)
                .on(device.label())
                .why(format!("{} are waiting to be copied", units::bytes(pieces.bytes)))
                .fix("let the stream go on first, or copy from memory of your own"));
        }
        let mut piece = Piece { memory: device.alloc_pinned(len)?, used: 0 };
        let region = piece.take(bytes)?;
        pieces.current = pieces.all.len();
        pieces.bytes += len;
        pieces.all.push(piece);
        region.ok_or_else(|| {
            Error::new(Kind::OutOfMemory, "hold bytes for a stream").on(device.label())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mem::sim::{Sim, SimConfig};

    #[test]
    fn pieces_are_used_again_and_never_too_early() {
        let gpu = Sim::start(SimConfig::default()).unwrap().device(0).unwrap();
        let staging = Staging::default();
        let first = staging.hold(&gpu, &[1; 100]).unwrap();
        let second = staging.hold(&gpu, &[2; 100]).unwrap();
        assert!(!first.overlaps(&second) && second.offset() == 128);
        drop(first);
        // The second one keeps the piece.
        let third = staging.hold(&gpu, &[3; 100]).unwrap();
        assert_eq!(third.offset(), 256);
        drop((second, third));
        let anew = staging.hold(&gpu, &[4; 100]).unwrap();
        assert_eq!(anew.offset(), 0);
        let large = staging.hold(&gpu, &vec![5; 100 << 10]).unwrap();
        let mut read = vec![0; 100 << 10];
        large.allocation().read(large.offset(), &mut read).unwrap();
        assert!(read.iter().all(|byte| *byte == 5));
        assert_eq!(staging.0.lock().all.len(), 2);
        assert_eq!(staging.hold(&gpu, &[]).unwrap().len(), 0);
    }

    #[test]
    fn what_nobody_takes_away_does_not_grow_for_ever() {
        let gpu = Sim::start(SimConfig::default()).unwrap().device(0).unwrap();
        let staging = Staging::default();
        let bytes = vec![0; 64 << 20];
        let held: Vec<_> = (0..4).map(|_| staging.hold(&gpu, &bytes).unwrap()).collect();
        let error = staging.hold(&gpu, &bytes).unwrap_err();
        assert_eq!(error.kind(), &Kind::Busy, "{error}");
        drop(held);
        staging.hold(&gpu, &bytes).unwrap();
    }
}

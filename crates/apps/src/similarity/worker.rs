//! The workers for the simulated GPU: the equivalent of similarity.cu.

use warpwire::mem::DeviceAddr;
use warpwire::mem::sim::{Block, KernelFault};
use warpwire::sock::device::SockResult;

use super::wire::{Best, HEAD, MATCH, ReplyStatus, SearchHit, check_head, head_bytes};
use super::{Setup, counts};
use crate::serving::{Connection, Service, WorkerSetup, serve};

/// Number of vectors scored together.
const TILE: usize = 1024;

/// One worker as a block function.
pub(super) fn similarity_block(block: &Block<'_>) -> Result<(), KernelFault> {
    let setup = Setup::read(block)?;
    let worker = WorkerSetup {
        table: setup.table,
        control: setup.control,
        address: setup.address,
        kind: super::kind_of(setup.kind),
        in_size: setup.in_size,
        per_worker: setup.per_worker,
        workers: setup.workers,
        max_clients: setup.max_clients,
        idle_timeout: setup.idle_timeout,
        clients: setup.counts + counts::CLIENTS,
        closed: setup.counts + counts::CLOSED,
    };
    serve(block, worker, &Search { block, setup: &setup })
}

/// The vectors as seen by one block.
struct Search<'a> {
    block: &'a Block<'a>,
    setup: &'a Setup,
}

impl Service for Search<'_> {
    fn full_reply(&self) -> Vec<u8> {
        head_bytes(ReplyStatus::Full, 0).to_vec()
    }

    fn process(&self, connection: &mut Connection) -> SockResult<()> {
        if let Some((bytes, closing)) = self.answer(&connection.input)? {
            connection.output.extend(bytes);
            connection.closing = closing;
            connection.input.clear();
        }
        Ok(())
    }
}

impl Search<'_> {
    fn count(&self, counter: u64, by: u64) -> SockResult<u64> {
        Ok(self.block.fetch_add_u64(DeviceAddr::new(self.setup.counts + counter), by)?)
    }

    /// The reply to the received bytes, and whether to close the connection after it; `None` if the
    /// query is incomplete.
    fn answer(&self, input: &[u8]) -> SockResult<Option<(Vec<u8>, bool)>> {
        if input.len() < HEAD {
            return Ok(None);
        }
        let (head, rest) = input.split_at(HEAD);
        let k = match check_head(head, self.setup.dimension, self.setup.max_k) {
            Ok(k) => k,
            Err(status) => return self.refuse(status),
        };
        if input.len() < self.setup.in_size as usize {
            return Ok(None);
        }
        let query = floats(rest);
        if query.iter().any(|part| !part.is_finite()) {
            return self.refuse(ReplyStatus::NotFinite);
        }
        let found = self.search(&query, k)?;
        self.count(counts::QUERIES, 1)?;
        let mut bytes = Vec::with_capacity(HEAD + found.len() * MATCH);
        bytes.extend(head_bytes(ReplyStatus::Found, found.len() as u32));
        for one in found {
            bytes.extend(one.id.to_le_bytes());
            bytes.extend(one.score.to_le_bytes());
        }
        Ok(Some((bytes, false)))
    }

    fn refuse(&self, status: ReplyStatus) -> SockResult<Option<(Vec<u8>, bool)>> {
        self.count(counts::REFUSED, 1)?;
        Ok(Some((head_bytes(status, 0).to_vec(), true)))
    }

    fn search(&self, query: &[f32], k: u32) -> SockResult<Vec<SearchHit>> {
        let (count, mut best) = (self.setup.vector_count, Best::new(k as usize));
        let mut bytes = [0; TILE * 4];
        for first in (0..count).step_by(TILE) {
            let tile = TILE.min((count - first) as usize);
            let mut scores = [0.0_f32; TILE];
            for (component, part) in query.iter().enumerate() {
                // The vectors are stored transposed: one component of all is contiguous.
                let at = self.setup.vectors + (component as u64 * count + first) * 4;
                self.block.read(DeviceAddr::new(at), &mut bytes[..tile * 4])?;
                for (score, word) in scores.iter_mut().zip(bytes[..tile * 4].as_chunks::<4>().0) {
                    *score = part.mul_add(f32::from_le_bytes(*word), *score);
                }
            }
            for (at, score) in scores[..tile].iter().enumerate() {
                best.offer(SearchHit { id: (first + at as u64) as u32, score: *score });
            }
        }
        Ok(best.list)
    }
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks::<4>().0.iter().map(|word| f32::from_le_bytes(*word)).collect()
}

//! Rows of the export table: what a peer needs to know of a queue pair or a registration to access
//! memory itself.

use std::net::SocketAddr;
use std::sync::{Arc, Weak};
use std::time::Duration;

use warpwire_proto::qp::State;

use super::super::numbers::qp_row;
use super::super::qpc::QpContext;
use super::super::stats::IndirectReason;
use super::DirectOutcome;
use crate::link::{ExportTable, ShmPeer};
use crate::mr::{Access, ExportObserver, MrExport, Sharing};

/// Rows of queue pairs come first, then those of keys.
pub(super) const FIRST_KEY_ROW: u32 = 1 << 16;
const MAX_KEY_ROWS: u32 = 1 << 16;
/// In the word of a key's access flags: how its memory is accessed.
const SHARING_SHIFT: u32 = 32;
const SHARING: [Sharing; 3] = [Sharing::File, Sharing::Device, Sharing::Process];

/// The row of a key; `None` beyond the first 65 536 registrations.
pub(super) fn row_of(key: u32) -> Option<u32> {
    (key >> 8 < MAX_KEY_ROWS).then_some(FIRST_KEY_ROW + (key >> 8))
}

/// The access flags in the row of a key, and how its memory is accessed; `None` if that is unknown
/// here.
pub(super) fn decode_access(word: u64) -> Option<(Access, Sharing)> {
    let sharing = SHARING.get((word >> SHARING_SHIFT) as usize)?;
    Some((Access::from_bits_truncate(word as u8), *sharing))
}

/// Publishes registrations in the export table. Registrations may outlive the device; the table,
/// and all its rows with it, ends with the device.
pub(in crate::hca) struct ExportPublisher(pub Weak<ExportTable>);

impl ExportObserver for ExportPublisher {
    fn opened(&self, export: &MrExport) {
        let (Some(row), Some(export_table)) = (row_of(export.key), self.0.upgrade()) else {
            return;
        };
        let MrExport { key, pd, access, iova, len, memory, offset, sharing } = *export;
        let sharing = SHARING.iter().position(|known| *known == sharing).unwrap_or(0) as u64;
        let access = u64::from(access.bits()) | sharing << SHARING_SHIFT;
        let content = [key.into(), pd, access, iova, len, memory, offset];
        export_table.open(row as usize, &content);
    }

    fn closing(&self, key: u32) {
        if let (Some(row), Some(export_table)) = (row_of(key), self.0.upgrade()) {
            export_table.close(row as usize);
        }
    }

    fn wait_until_unused(&self, key: u32, limit: Duration) -> bool {
        match (row_of(key), self.0.upgrade()) {
            (Some(row), Some(export_table)) => export_table.wait_until_unused(row as usize, limit),
            _ => true,
        }
    }
}

/// An address as words, for comparison in a row.
pub(super) fn address_words(address: SocketAddr) -> [u64; 3] {
    let (ip, scope) = match address {
        SocketAddr::V4(v4) => (v4.ip().to_ipv6_mapped(), 0),
        SocketAddr::V6(v6) => (*v6.ip(), v6.scope_id()),
    };
    let ip = u128::from(ip);
    [(ip >> 64) as u64, ip as u64, u64::from(scope) << 32 | u64::from(address.port())]
}

/// The access flags of a queue pair, as a row stores them; `reads` is whether it accepts reads and
/// atomics.
fn access_bits(access: Access, reads: bool) -> u64 {
    let rights = [
        (Access::REMOTE_WRITE, true),
        (Access::REMOTE_READ, reads),
        (Access::REMOTE_ATOMIC, reads),
    ];
    let granted = rights.iter().filter(|(right, allowed)| *allowed && access.contains(*right));
    granted.fold(0, |bits, (right, _)| bits | u64::from(right.bits()))
}

impl QpContext {
    /// Updates the row of the queue pair: open while the queue pair accepts requests.
    pub(in crate::hca) fn publish(&mut self, export_table: Option<&Arc<ExportTable>>) {
        let Some(export_table) = export_table else { return };
        let row = qp_row(self.qp.number()) as usize;
        let accepts = matches!(self.qp.state(), State::Rts | State::Sqd);
        let connection = self.qp.connection().filter(|_| accepts);
        let content =
            connection.and_then(|qp| qp.path().map(|path| (qp, path))).map(|(qp, path)| {
                let qpns = u64::from(qp.number()) << 32 | u64::from(qp.destination());
                let remote_access =
                    access_bits(self.direct.access, self.direct.max_dest_rd_atomic > 0);
                let [a, b, c] = address_words(path.peer);
                [qpns, remote_access, self.qp_memory.pd.raw(), a, b, c, 0]
            });
        if content == self.direct.published {
            return;
        }
        if self.direct.published.take().is_some() {
            export_table.close(row);
        }
        if let Some(content) = content {
            export_table.open(row, &content);
            self.direct.published = Some(content);
        }
    }

    /// Closes the row for good.
    pub(in crate::hca) fn unpublish(&mut self, export_table: Option<&Arc<ExportTable>>) {
        if let (Some(export_table), Some(_)) = (export_table, self.direct.published.take()) {
            export_table.close(qp_row(self.qp.number()) as usize);
        }
    }
}

/// Rows of a peer's table that allow an access, and the generations that were checked: its queue
/// pair's, and a key's.
#[derive(Clone, Copy)]
pub(super) struct RemoteRows {
    pub rows: [u32; 2],
    pub generations: [u64; 2],
}

impl RemoteRows {
    pub(super) fn new(qp_row: u32, qp_generation: u64, key: u32, key_generation: u64) -> Self {
        let rows = [qp_row, FIRST_KEY_ROW + (key >> 8)];
        Self { rows, generations: [qp_generation, key_generation] }
    }

    /// What an access that could not be announced must do.
    pub(super) fn refusal(&self, peer: &ShmPeer) -> Result<DirectOutcome, IndirectReason> {
        match self.rows.map(|row| peer.generation(row)) == self.generations {
            true => Ok(DirectOutcome::OutOfBudget), // too many are in progress
            false => Err(IndirectReason::Revoked),
        }
    }
}

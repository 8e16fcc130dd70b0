//! Packets that arrived before an earlier one, kept until their turn comes (selective repeat).

use warpwire_proto::Instant;
use warpwire_proto::qp::{HOLD_SLOTS, RxPacket};
use warpwire_proto::wire::Transport;

use super::engine::{Core, MAX_PACKET_OVERHEAD};
use super::host::HostView;
use super::protocol::Protocol;
use super::qpc::QpContext;

/// Maximum payload of the packets of a queue pair with selective repeat: RoCE's.
pub(crate) const MAX_HELD_PAYLOAD: u32 = 4096;
/// Bytes of a slot.
const SLOT_LEN: usize = MAX_HELD_PAYLOAD as usize + MAX_PACKET_OVERHEAD;

/// The store of a queue pair: 8.5 MB of address space once a packet was kept; pages that no packet
/// was kept in take no memory.
#[derive(Debug, Default)]
pub(super) struct HeldPackets {
    bytes: Vec<u8>,
    lens: Vec<u16>,
}

impl HeldPackets {
    /// Keeps a packet, from the BTH through the ICRC; false if it is too long.
    #[cold]
    pub(super) fn keep(&mut self, slot: u32, packet: &[u8]) -> bool {
        if packet.is_empty() || packet.len() > SLOT_LEN || slot >= HOLD_SLOTS {
            return false;
        }
        if self.bytes.is_empty() {
            self.bytes = vec![0; HOLD_SLOTS as usize * SLOT_LEN];
            self.lens = vec![0; HOLD_SLOTS as usize];
        }
        let start = slot as usize * SLOT_LEN;
        self.bytes[start..start + packet.len()].copy_from_slice(packet);
        self.lens[slot as usize] = packet.len() as u16;
        true
    }

    /// The packet in a slot; empty if there is none.
    fn packet(&self, slot: u32) -> &[u8] {
        let start = slot as usize * SLOT_LEN;
        let len = self.lens.get(slot as usize).map_or(0, |len| usize::from(*len));
        self.bytes.get(start..start + len).unwrap_or(&[])
    }
}

impl Core {
    /// Handles packets that were kept and whose turn has come, as if they arrived now.
    pub(super) fn handle_held(&mut self, now: Instant, index: u32) {
        loop {
            let Core { qpcs, registry, srqs, .. } = self;
            let Some(Some(qpc)) = qpcs.get_mut(index as usize) else { return };
            let QpContext { qp: Protocol::Connected(qp), qp_memory, .. } = &mut **qpc else {
                return;
            };
            let Some(slot) = qp.take_held() else { return };
            // Taken out, because the host view borrows the rest.
            let held = std::mem::take(&mut qp_memory.held);
            if let Ok(transport) = Transport::new_checked(held.packet(slot)) {
                let (headers, payload) = (transport.headers(), transport.payload());
                let payload_len = payload.len() as u32;
                // A mark was reported when it arrived.
                let rx = RxPacket { headers: &headers, payload_len, marked: false };
                let mut view = HostView { qp_memory, registry, srqs, payload, packet: &[] };
                // Discarded packets are counted by the queue pair.
                let _ = qp.handle_held(now, &rx, &mut view);
            }
            qp_memory.held = held;
            self.post_process(now, index);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packets_are_kept_by_slot_and_within_bounds() {
        let mut held = HeldPackets::default();
        assert_eq!(held.packet(0), b"");
        assert!(held.keep(0, b"first") && held.keep(HOLD_SLOTS - 1, &[7; SLOT_LEN]));
        assert!(held.keep(0, b"again"));
        assert_eq!(held.packet(0), b"again");
        assert_eq!(held.packet(HOLD_SLOTS - 1), [7; SLOT_LEN]);
        assert_eq!(held.packet(1), b"");
        // A peer decides the length, and nothing else does harm either.
        assert!(!held.keep(1, &[0; SLOT_LEN + 1]) && !held.keep(1, b""));
        assert!(!held.keep(HOLD_SLOTS, b"x"));
        assert_eq!(held.packet(HOLD_SLOTS), b"");
    }
}

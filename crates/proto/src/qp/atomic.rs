//! Conversion of atomics to and from packet headers.

use super::host::{Atomic, AtomicWidth, Remote};
use crate::wire::{AtomicEth, Extension, MaskedAtomicEth, Opcode};

/// The opcode and extension header of a request for this atomic.
pub(super) fn request(at: Remote, atomic: Atomic) -> (Opcode, Extension) {
    let (address, rkey) = (at.address, at.rkey);
    let plain =
        |swap_or_add, compare| Extension::Atomic(AtomicEth { address, rkey, swap_or_add, compare });
    match atomic {
        Atomic::CompareSwap { compare, swap } => (Opcode::CompareSwap, plain(swap, compare)),
        Atomic::FetchAdd { add } => (Opcode::FetchAdd, plain(add, 0)),
        Atomic::MaskedFetchAdd { width, add, boundary } => {
            let opcode = match width {
                AtomicWidth::Four => Opcode::MaskedFetchAdd4,
                AtomicWidth::Eight => Opcode::MaskedFetchAdd,
            };
            (opcode, plain(add, boundary))
        }
        Atomic::MaskedCompareSwap { width, compare, swap, compare_mask, swap_mask } => {
            let opcode = match width {
                AtomicWidth::Four => Opcode::MaskedCompareSwap4,
                AtomicWidth::Eight => Opcode::MaskedCompareSwap,
            };
            let masked = MaskedAtomicEth { address, rkey, swap, compare, swap_mask, compare_mask };
            (opcode, Extension::MaskedAtomic(masked))
        }
    }
}

/// The atomic that a packet requests, and its target; `None` if it is not an atomic.
pub(super) fn requested(opcode: Opcode, extension: Extension) -> Option<(Remote, Atomic)> {
    let width = match opcode {
        Opcode::MaskedCompareSwap4 | Opcode::MaskedFetchAdd4 => AtomicWidth::Four,
        _ => AtomicWidth::Eight,
    };
    match (opcode, extension) {
        (Opcode::MaskedCompareSwap | Opcode::MaskedCompareSwap4, Extension::MaskedAtomic(eth)) => {
            let MaskedAtomicEth { address, rkey, swap, compare, swap_mask, compare_mask } = eth;
            let atomic =
                Atomic::MaskedCompareSwap { width, compare, swap, compare_mask, swap_mask };
            Some((Remote { address, rkey }, atomic))
        }
        (_, Extension::Atomic(eth)) => {
            let (add, compare) = (eth.swap_or_add, eth.compare);
            let atomic = match opcode {
                Opcode::CompareSwap => Atomic::CompareSwap { compare, swap: add },
                Opcode::FetchAdd => Atomic::FetchAdd { add },
                Opcode::MaskedFetchAdd | Opcode::MaskedFetchAdd4 => {
                    Atomic::MaskedFetchAdd { width, add, boundary: compare }
                }
                _ => return None,
            };
            Some((Remote { address: eth.address, rkey: eth.rkey }, atomic))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_atomic_round_trips() {
        let at = Remote { address: 0x1000, rkey: 7 };
        let (add, boundary, compare, swap) = (1, 2, 3, 4);
        let (compare_mask, swap_mask) = (5, 6);
        for width in [AtomicWidth::Four, AtomicWidth::Eight] {
            for atomic in [
                Atomic::CompareSwap { compare, swap },
                Atomic::FetchAdd { add },
                Atomic::MaskedFetchAdd { width, add, boundary },
                Atomic::MaskedCompareSwap { width, compare, swap, compare_mask, swap_mask },
            ] {
                let (opcode, extension) = request(at, atomic);
                assert_eq!(requested(opcode, extension), Some((at, atomic)));
            }
        }
        assert_eq!(requested(Opcode::SendOnly, Extension::None), None);
    }
}

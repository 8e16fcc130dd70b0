//! Packets as one line of a log (`Display`).

use core::fmt;

use super::ext::Aeth;
use super::packet::{Extension, Headers, Packet};

impl fmt::Display for Headers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.opcode.name())?;
        if self.opcode.ext_kind().is_none() {
            write!(f, "({:#04x})", self.opcode.byte())?;
        }
        write!(f, " qp {:#x} psn {:#x}", self.destination_qp, self.psn.value())?;
        for (set, name) in
            [(self.ack_request, " ackreq"), (self.solicited, " solicited"), (self.becn, " becn")]
        {
            if set {
                f.write_str(name)?;
            }
        }
        match self.extension {
            Extension::None | Extension::Cnp => Ok(()),
            Extension::Imm(imm) => write!(f, " imm {imm:#x}"),
            Extension::Invalidate(key) => write!(f, " invalidate {key:#x}"),
            Extension::Reth(reth) => {
                write!(f, " at {:#x} key {:#x} len {}", reth.address, reth.rkey, reth.len)
            }
            Extension::RethImm(reth, imm) => {
                let (address, rkey, len) = (reth.address, reth.rkey, reth.len);
                write!(f, " at {address:#x} key {rkey:#x} len {len} imm {imm:#x}")
            }
            Extension::Aeth(aeth) => write!(f, " {:?} msn {}", aeth.syndrome, aeth.msn),
            Extension::AethAtomic(aeth, before) => {
                write!(f, " {:?} msn {} before {before:#x}", aeth.syndrome, aeth.msn)
            }
            Extension::AethSack(aeth, sack) => {
                let arrived: u32 = sack.0.iter().map(|byte| byte.count_ones()).sum();
                let Aeth { syndrome, msn } = aeth;
                write!(f, " {syndrome:?} msn {msn}, {arrived} arrived behind it")
            }
            Extension::Atomic(atomic) => {
                let (address, rkey) = (atomic.address, atomic.rkey);
                let (swap, compare) = (atomic.swap_or_add, atomic.compare);
                write!(f, " at {address:#x} key {rkey:#x} swap/add {swap:#x} compare {compare:#x}")
            }
            Extension::MaskedAtomic(atomic) => {
                let (address, rkey) = (atomic.address, atomic.rkey);
                let (swap, compare) = (atomic.swap, atomic.compare);
                write!(f, " at {address:#x} key {rkey:#x} swap {swap:#x} compare {compare:#x}")?;
                write!(f, " masks {:#x} {:#x}", atomic.swap_mask, atomic.compare_mask)
            }
            Extension::Deth(deth) => write!(f, " from qp {:#x}", deth.source_qp),
            Extension::DethImm(deth, imm) => {
                write!(f, " from qp {:#x} imm {imm:#x}", deth.source_qp)
            }
        }
    }
}

impl fmt::Display for Packet<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (ip, headers) = (self.ip(), self.transport().headers());
        let payload = self.transport().payload().len();
        write!(f, "{} > {}: {headers}, {payload} bytes", ip.source, ip.destination)
    }
}

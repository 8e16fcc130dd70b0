//! Extended completion queues: completions are read field by field.

use std::cell::Cell;
use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, Ordering};

use warpwire::verbs::Completion;

use crate::abi::{self, Pointer, Wc};
use crate::boundary::{Errno, INVALID, some, status};
use crate::cq::{Cq, wc};

/// The completion that is being read, between `start_poll` and `end_poll`.
pub(crate) struct Reader {
    current: Cell<Wc>,
    /// A thread reads; others that start wait for its end.
    busy: AtomicBool,
    single_threaded: bool,
}

impl Reader {
    pub(crate) fn new(single_threaded: bool) -> Self {
        Self { current: Cell::new(Wc::default()), busy: AtomicBool::new(false), single_threaded }
    }

    fn lock(&self) {
        while !self.single_threaded && self.busy.swap(true, Ordering::Acquire) {
            std::thread::yield_now();
        }
    }

    fn unlock(&self) {
        self.busy.store(false, Ordering::Release);
    }
}

pub(crate) fn calls() -> abi::CqCalls {
    abi::CqCalls {
        start_poll: start_poll as Pointer,
        next_poll: next_poll as Pointer,
        end_poll: end_poll as Pointer,
        read_opcode: read_opcode as Pointer,
        read_vendor_err: read_vendor_err as Pointer,
        read_byte_len: read_byte_len as Pointer,
        read_imm_data: read_imm_data as Pointer,
        read_qp_num: read_qp_num as Pointer,
        read_src_qp: read_src_qp as Pointer,
        read_wc_flags: read_wc_flags as Pointer,
        read_slid: read_slid as Pointer,
        read_sl: read_sl as Pointer,
        read_dlid_path_bits: read_dlid_path_bits as Pointer,
        // Queues with these fields are refused when they are created.
        read_completion_ts: read_nothing as Pointer,
        read_cvlan: read_nothing as Pointer,
        read_flow_tag: read_nothing as Pointer,
        read_tm_info: read_no_info as Pointer,
        read_completion_wallclock_ns: read_nothing as Pointer,
    }
}

/// Takes the next completion; `ENOENT` if there is none.
fn advance(cq: &Cq) -> crate::boundary::Result<()> {
    let mut one = [Completion::EMPTY];
    if cq.verbs.poll(&mut one)? == 0 {
        return Err(Errno(libc::ENOENT));
    }
    let wc = wc(&one[0]);
    cq.abi.status.set(wc.status);
    cq.abi.wr_id.set(wc.wr_id);
    cq.reader.current.set(wc);
    Ok(())
}

/// `attr` is `struct ibv_poll_cq_attr`, whose mask must be 0.
extern "C" fn start_poll(cq: Option<&Cq>, attr: Option<&u32>) -> c_int {
    status(|| {
        let cq = some(cq)?;
        if *some(attr)? != 0 {
            return Err(INVALID);
        }
        cq.reader.lock();
        advance(cq).inspect_err(|_| cq.reader.unlock())
    })
}

extern "C" fn next_poll(cq: Option<&Cq>) -> c_int {
    status(|| advance(some(cq)?))
}

extern "C" fn end_poll(cq: Option<&Cq>) {
    if let Some(cq) = cq {
        cq.reader.unlock();
    }
}

fn read<T: Default>(cq: Option<&Cq>, field: impl FnOnce(Wc) -> T) -> T {
    cq.map_or_else(T::default, |cq| field(cq.reader.current.get()))
}

extern "C" fn read_opcode(cq: Option<&Cq>) -> u32 {
    read(cq, |wc| wc.opcode)
}

extern "C" fn read_vendor_err(cq: Option<&Cq>) -> u32 {
    read(cq, |wc| wc.vendor_err)
}

extern "C" fn read_byte_len(cq: Option<&Cq>) -> u32 {
    read(cq, |wc| wc.byte_len)
}

extern "C" fn read_imm_data(cq: Option<&Cq>) -> u32 {
    read(cq, |wc| u32::from_ne_bytes(wc.imm_data))
}

extern "C" fn read_qp_num(cq: Option<&Cq>) -> u32 {
    read(cq, |wc| wc.qp_num)
}

extern "C" fn read_src_qp(cq: Option<&Cq>) -> u32 {
    read(cq, |wc| wc.src_qp)
}

extern "C" fn read_wc_flags(cq: Option<&Cq>) -> u32 {
    read(cq, |wc| wc.wc_flags)
}

extern "C" fn read_slid(cq: Option<&Cq>) -> u32 {
    read(cq, |wc| wc.slid.into())
}

extern "C" fn read_sl(cq: Option<&Cq>) -> u8 {
    read(cq, |wc| wc.sl)
}

extern "C" fn read_dlid_path_bits(cq: Option<&Cq>) -> u8 {
    read(cq, |wc| wc.dlid_path_bits)
}

extern "C" fn read_nothing(_: Option<&Cq>) -> u64 {
    0
}

/// `info` is `struct ibv_wc_tm_info`: a tag and private data.
extern "C" fn read_no_info(_: Option<&Cq>, info: Option<&mut [u64; 2]>) {
    if let Some(info) = info {
        *info = [0; 2];
    }
}

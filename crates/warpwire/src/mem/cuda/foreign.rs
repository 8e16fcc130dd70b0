//! Streams of other libraries on an NVIDIA GPU.

use std::ffi::c_void;
use std::sync::Arc;

use super::super::backend::ForeignStreamBackend;
use super::super::op::{HostCall, MemOp};
use super::device::CudaDevice;
use super::driver::call;
use super::stream::issue_batch;
use super::sys::StreamHandle;
use crate::error::Result;

pub(super) struct CudaForeignStream {
    device: Arc<CudaDevice>,
    handle: StreamHandle,
}

impl CudaForeignStream {
    pub(super) fn new(device: Arc<CudaDevice>, handle: u64) -> Self {
        Self { device, handle: StreamHandle(handle as usize as *mut c_void) }
    }
}

impl ForeignStreamBackend for CudaForeignStream {
    fn is_capturing(&self) -> Result<bool> {
        let _current = self.device.make_current()?;
        let mut status = 0;
        call!(self.device.driver, stream_is_capturing(self.handle, &mut status))?;
        Ok(status != 0)
    }

    fn batch(&self, ops: &[MemOp]) -> Result<()> {
        let _current = self.device.make_current()?;
        issue_batch(&self.device, self.handle, ops)
    }

    fn call_host(&self, host: HostCall) -> Result<()> {
        let _current = self.device.make_current()?;
        let argument = Arc::into_raw(Arc::new(host)).cast_mut().cast::<c_void>();
        let queued = call!(self.device.driver, stream_call_host(self.handle, call_once, argument));
        if queued.is_err() {
            // SAFETY: from `into_raw` above, and the driver will not call.
            drop(unsafe { Arc::from_raw(argument.cast::<HostCall>()) });
        }
        queued
    }
}

/// Called by the driver, on its own thread, when the stream gets there.
///
/// # Safety
/// `argument` is a `HostCall` from `Arc::into_raw`, and is not used afterwards.
unsafe extern "C" fn call_once(argument: *mut c_void) {
    // SAFETY: by this function's contract; HostCall lets no panic escape.
    unsafe { Arc::from_raw(argument.cast::<HostCall>()) }.call();
}

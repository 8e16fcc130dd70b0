//! Support for programs written for GPUnet, with `include/warpwire/gpunet.cuh`.

use super::SockHost;
use super::device::SocketKind;
use crate::error::{Error, Kind, Result};
use crate::mem::Module;

impl SockHost {
    /// Sets the socket table in a loaded program that includes `<warpwire/gpunet.cuh>`, so that its
    /// kernels need no argument for it. `streams` is the kind of its streams:
    /// [`Stream`](SocketKind::Stream) or [`WarpStream`](SocketKind::WarpStream). Call it after
    /// loading and before a kernel of the program starts. Block functions of the simulated GPU
    /// capture [`table`](Self::table) instead.
    ///
    /// # Errors
    /// [`Kind::InvalidArgument`] for another kind, or if the program does not include the header.
    pub fn use_gpunet(&self, module: &Module, streams: SocketKind) -> Result<()> {
        let what = "use sockets in a GPUnet program";
        if !matches!(streams, SocketKind::Stream | SocketKind::WarpStream) {
            return Err(Error::new(Kind::InvalidArgument, what)
                .why(format!("{streams:?} is not a stream"))
                .fix("pass SocketKind::Stream or SocketKind::WarpStream"));
        }
        let set = |variable: &str, bytes: &[u8]| {
            module.set(variable, bytes).map_err(|error| match error.kind() {
                Kind::InvalidArgument => error.fix("include <warpwire/gpunet.cuh> in the program"),
                _ => error,
            })
        };
        set("warpwire_gpunet_table", &self.table().to_le_bytes())?;
        set("warpwire_gpunet_kind", &(streams as u32).to_le_bytes())
    }
}

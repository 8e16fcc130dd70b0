//! Programs that were written for GPUnet, by `include/warpwire/gpunet.cuh`.

use super::SockHost;
use super::device::SocketKind;
use crate::error::{Error, Kind, Result};
use crate::mem::Module;

impl SockHost {
    /// Lets the kernels of a program that includes `<warpwire/gpunet.cuh>` use these sockets, so that they need not be told:
    /// `streams` is what their streams are, [`Kind::Stream`](SocketKind::Stream) or [`Kind::WarpStream`](SocketKind::WarpStream).
    /// To be done after loading, before a kernel of it starts. Block functions of the simulated GPU capture
    /// [`table`](Self::table) instead.
    pub fn use_gpunet(&self, module: &Module, streams: SocketKind) -> Result<()> {
        let what = "let a program for GPUnet use sockets";
        if !matches!(streams, SocketKind::Stream | SocketKind::WarpStream) {
            return Err(Error::new(Kind::InvalidArgument, what)
                .why(format!("{streams:?} is no sort of stream"))
                .fix("give Kind::Stream or Kind::WarpStream"));
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

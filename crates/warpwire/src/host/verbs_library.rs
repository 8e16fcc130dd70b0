//! The installed libibverbs, detected by its file name without loading it.

use super::System;

/// Library directories of the usual distributions, for x86-64 and aarch64.
const LIBRARY_FOLDERS: [&str; 9] = [
    "/usr/lib/x86_64-linux-gnu",
    "/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/lib64",
    "/usr/lib",
    "/lib",
    "/usr/local/lib",
];

const SONAME: &str = "libibverbs.so.1";

/// `ibv_reg_dmabuf_mr` has the symbol version IBVERBS_1.12, introduced in rdma-core 34.
const FIRST_MINOR_WITH_DMA_BUF: u32 = 12;

/// An installed libibverbs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VerbsLibrary {
    /// The file that `libibverbs.so.1` links to.
    pub path: String,
    /// The library's interface version: 14 in `libibverbs.so.1.14.44.0`; `None` if the file name
    /// has no version.
    pub minor: Option<u32>,
    /// The rdma-core release: 44 in `libibverbs.so.1.14.44.0`.
    pub rdma_core: Option<u32>,
}

impl VerbsLibrary {
    /// Whether it has `ibv_reg_dmabuf_mr`; `None` if the file name has no version.
    pub fn supports_dma_buf_mr(&self) -> Option<bool> {
        Some(self.minor? >= FIRST_MINOR_WITH_DMA_BUF)
    }
}

impl System {
    /// The libibverbs in the first standard library directory that has one.
    pub fn verbs_library(&self) -> Option<VerbsLibrary> {
        LIBRARY_FOLDERS.iter().find_map(|folder| {
            let path = self.real_path(&format!("{folder}/{SONAME}"))?;
            let (minor, rdma_core) = parse_file_name(path.rsplit('/').next()?);
            Some(VerbsLibrary { path, minor, rdma_core })
        })
    }
}

impl System {
    /// The file that `libmlx5.so.1` links to, in the first standard library directory that has one.
    /// Direct verbs need it: it exposes the queue buffers of mlx5 devices.
    pub fn mlx5_library(&self) -> Option<String> {
        LIBRARY_FOLDERS.iter().find_map(|folder| self.real_path(&format!("{folder}/libmlx5.so.1")))
    }
}

/// Parses rdma-core's file name, `libibverbs.so.1.<interface>.<release>.<patch>`.
fn parse_file_name(name: &str) -> (Option<u32>, Option<u32>) {
    let mut numbers = name
        .strip_prefix(SONAME)
        .unwrap_or_default()
        .split('.')
        .skip(1)
        .map(|part| part.parse().ok());
    (numbers.next().flatten(), numbers.next().flatten())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_is_parsed_from_the_file_name() {
        assert_eq!(parse_file_name("libibverbs.so.1.14.44.0"), (Some(14), Some(44)));
        assert_eq!(parse_file_name("libibverbs.so.1.11.32.0"), (Some(11), Some(32)));
        for odd in ["libibverbs.so.1", "libibverbs.so", "", "libibverbs.so.1.x.y"] {
            assert_eq!(parse_file_name(odd), (None, None), "{odd}");
        }
    }

    #[test]
    fn dma_buf_registration_needs_interface_1_12() {
        let library = |minor| VerbsLibrary { path: String::new(), minor, rdma_core: None };
        assert_eq!(library(Some(11)).supports_dma_buf_mr(), Some(false));
        assert_eq!(library(Some(12)).supports_dma_buf_mr(), Some(true));
        assert_eq!(library(None).supports_dma_buf_mr(), None);
    }
}

//! The view of a kernel on the simulated GPU: block index, arguments, and device memory by address.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};

use super::super::address::DeviceAddr;
use super::super::bytes::SharedBytes;
use super::device::SimDevice;
use super::memory::address_space;
use crate::error::{Error, Result};
use crate::sync::Backoff;

/// Why a kernel failed. The stream that it ran on fails with it.
#[derive(Clone, Debug)]
pub struct KernelFault(String);

impl KernelFault {
    /// A fault raised by the kernel itself.
    pub fn new(why: impl Into<String>) -> Self {
        Self(why.into())
    }
}

impl fmt::Display for KernelFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl From<Error> for KernelFault {
    fn from(error: Error) -> Self {
        Self(error.to_string())
    }
}

/// One block of a grid on the simulated GPU. All blocks of a grid run concurrently, so they may
/// wait for each other, for the CPU, or for the network.
///
/// Addresses are device addresses; a wrong one is a [`KernelFault`], as on hardware.
pub struct Block<'a> {
    device: &'a SimDevice,
    /// Set when a block of the grid has faulted: the others must not wait for it.
    faulted: &'a AtomicBool,
    index: u32,
    grid: u32,
    threads: u32,
    args: &'a [u64],
}

macro_rules! word_access {
    ($load:ident, $store:ident, $add:ident, $cas:ident, $word:ty) => {
        /// Loads a word with acquire ordering.
        pub fn $load(&self, at: DeviceAddr) -> std::result::Result<$word, KernelFault> {
            self.with_bytes(at, size_of::<$word>() as u64, |bytes| bytes.$load(0))
        }

        /// Stores a word with release ordering.
        pub fn $store(&self, at: DeviceAddr, value: $word) -> std::result::Result<(), KernelFault> {
            self.with_bytes(at, size_of::<$word>() as u64, |bytes| bytes.$store(0, value))
        }

        /// Adds to a word, wrapping, and returns the previous value.
        pub fn $add(
            &self,
            at: DeviceAddr,
            value: $word,
        ) -> std::result::Result<$word, KernelFault> {
            self.with_bytes(at, size_of::<$word>() as u64, |bytes| bytes.$add(0, value))
        }

        /// Stores `new` if the word equals `expected`; returns the previous value.
        pub fn $cas(
            &self,
            at: DeviceAddr,
            expected: $word,
            new: $word,
        ) -> std::result::Result<$word, KernelFault> {
            self.with_bytes(at, size_of::<$word>() as u64, |bytes| bytes.$cas(0, expected, new))
        }
    };
}

impl<'a> Block<'a> {
    pub(super) fn new(
        device: &'a SimDevice,
        faulted: &'a AtomicBool,
        index: u32,
        grid: u32,
        threads: u32,
        args: &'a [u64],
    ) -> Self {
        Self { device, faulted, index, grid, threads, args }
    }

    /// Index of this block in the grid.
    pub fn index(&self) -> u32 {
        self.index
    }

    /// Number of blocks in the grid.
    pub fn grid(&self) -> u32 {
        self.grid
    }

    /// Threads per block as launched; the simulator runs one, which does the work of all.
    pub fn threads(&self) -> u32 {
        self.threads
    }

    /// The kernel argument at that index. Faults if the launch has fewer.
    pub fn value(&self, argument: usize) -> std::result::Result<u64, KernelFault> {
        let missing =
            || KernelFault(format!("the kernel was launched without argument {argument}"));
        self.args.get(argument).copied().ok_or_else(missing)
    }

    /// The kernel argument at that index, as an address.
    pub fn address(&self, argument: usize) -> std::result::Result<DeviceAddr, KernelFault> {
        self.value(argument).map(DeviceAddr::new)
    }

    word_access!(load_u32, store_u32, fetch_add_u32, compare_exchange_u32, u32);
    word_access!(load_u64, store_u64, fetch_add_u64, compare_exchange_u64, u64);

    /// Copies from device memory into a private buffer.
    pub fn read(&self, at: DeviceAddr, into: &mut [u8]) -> std::result::Result<(), KernelFault> {
        self.with_bytes(at, into.len() as u64, |bytes| bytes.read(0, into))
    }

    /// Copies from a private buffer into device memory.
    pub fn write(&self, at: DeviceAddr, from: &[u8]) -> std::result::Result<(), KernelFault> {
        self.with_bytes(at, from.len() as u64, |bytes| bytes.write(0, from))
    }

    /// Polls until `is_ready` returns true. A spinning kernel calls this instead of its own loop,
    /// so that it does not starve the threads that it waits for, and ends when the device dies.
    pub fn spin_until(
        &self,
        mut is_ready: impl FnMut() -> std::result::Result<bool, KernelFault>,
    ) -> std::result::Result<(), KernelFault> {
        let mut backoff = Backoff::default();
        while !is_ready()? {
            if self.device.is_dead() {
                return Err(KernelFault::new("the device was killed while the kernel ran"));
            }
            if self.faulted.load(Ordering::Acquire) {
                return Err(KernelFault::new("another block of the grid faulted"));
            }
            backoff.snooze();
        }
        Ok(())
    }

    fn with_bytes<R>(
        &self,
        at: DeviceAddr,
        len: u64,
        access: impl FnOnce(SharedBytes<'_>) -> Result<R>,
    ) -> std::result::Result<R, KernelFault> {
        self.device.inject_jitter();
        let Some((memory, offset)) = address_space().find(at, len) else {
            let index = self.index;
            return Err(KernelFault(format!(
                "block {index} accessed {len} bytes at illegal address {at}"
            )));
        };
        Ok(memory.with_bytes(|bytes| access(bytes.slice(offset, len)?))?)
    }
}

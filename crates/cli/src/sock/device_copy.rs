//! The comparison case without sockets in kernels: the driver copies device memory, the CPU sends
//! and receives.

use std::io;

use warpwire::mem::cuda::DriverCopies;
use warpwire::mem::{Allocation, Backend, Device};

use crate::output::Failure;

/// Device memory, and the driver's copies to and from it.
pub(super) struct DeviceCopy {
    memory: Allocation,
    driver: Option<DriverCopies>,
}

impl DeviceCopy {
    pub(super) fn new(device: &Device, len: u64) -> Result<Self, Failure> {
        let info = device.info();
        let driver = match info.backend {
            Backend::Cuda => Some(DriverCopies::new(info.ordinal)?),
            Backend::Sim => None,
        };
        Ok(Self { memory: device.alloc(len)?, driver })
    }

    pub(super) fn read(&self, into: &mut [u8]) -> Result<(), Failure> {
        match &self.driver {
            Some(driver) => driver.read(&self.memory, 0, into)?,
            None => self.memory.read(0, into)?,
        }
        Ok(())
    }

    pub(super) fn write(&self, from: &[u8]) -> Result<(), Failure> {
        match &self.driver {
            Some(driver) => driver.write(&self.memory, 0, from)?,
            None => self.memory.write(0, from)?,
        }
        Ok(())
    }

    pub(super) fn finish(&self) -> Result<(), Failure> {
        self.driver.as_ref().map_or(Ok(()), DriverCopies::synchronize)?;
        Ok(())
    }

    /// Copies received bytes to device memory, and waits for the copy.
    pub(super) fn upload(&self, bytes: &[u8]) -> io::Result<()> {
        self.write(bytes).and_then(|()| self.finish()).map_err(other)
    }

    /// Copies bytes to be sent from device memory.
    pub(super) fn download(&self, bytes: &mut [u8]) -> io::Result<()> {
        self.read(bytes).map_err(other)
    }
}

pub(super) fn other(failure: Failure) -> io::Error {
    io::Error::other(match failure {
        Failure::Usage(why) | Failure::Runtime(why) => why,
    })
}

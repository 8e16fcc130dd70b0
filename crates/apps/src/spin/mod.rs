//! A kernel that busy-waits for a given time, as a stand-in for one that computes.

use std::time::{Duration, Instant};

use warpwire::error::{Error, Kind, Result};
use warpwire::mem::sim::{Block, KernelFault};
use warpwire::mem::{Device, Kernel, Launch, Program, Stream};

const SPIN: &str = "spin";
/// Limit, since the stream is blocked meanwhile.
const MAX_TIME: Duration = Duration::from_secs(10);

/// The kernel, loaded onto a device.
///
/// ```
/// use std::time::{Duration, Instant};
/// use warpwire::mem::sim::{Sim, SimConfig};
/// use warpwire_apps::spin::Spin;
/// let gpu = Sim::start(SimConfig::default()).unwrap().device(0).unwrap();
/// let (spin, stream) = (Spin::load(&gpu).unwrap(), gpu.stream().unwrap());
/// let start = Instant::now();
/// spin.start(&stream, Duration::from_millis(2)).unwrap();
/// stream.synchronize(Duration::from_secs(5)).unwrap();
/// assert!(start.elapsed() >= Duration::from_millis(2));
/// assert!(spin.start(&stream, Duration::from_secs(3600)).is_err());
/// ```
#[derive(Clone, Debug)]
pub struct Spin(Kernel);

impl Spin {
    /// Loads the kernel.
    pub fn load(device: &Device) -> Result<Self> {
        let program = Program::new("spin").ptx(include_str!("spin.ptx")).block(SPIN, spin_block);
        Ok(Self(device.load(&program)?.kernel(SPIN)?))
    }

    /// Keeps the stream busy for `time`, at most ten seconds.
    pub fn start(&self, stream: &Stream, time: Duration) -> Result<()> {
        if time > MAX_TIME {
            return Err(Error::new(Kind::InvalidArgument, format!("compute for {time:?}"))
                .on(stream.label())
                .why(format!("the maximum is {MAX_TIME:?}")));
        }
        start(stream, Launch::new(&self.0).value(time.as_nanos() as u64))
    }
}

#[allow(unsafe_code)]
fn start(stream: &Stream, launch: Launch) -> Result<()> {
    // SAFETY: the kernel touches no memory.
    unsafe { stream.launch(launch) }
}

fn spin_block(block: &Block<'_>) -> std::result::Result<(), KernelFault> {
    let (start, time) = (Instant::now(), Duration::from_nanos(block.value(0)?));
    block.spin_until(|| Ok(start.elapsed() >= time))
}

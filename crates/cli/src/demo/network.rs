//! The stage that moves memory from one process to another.

use warpwire::mem::Device;

use super::Stage;
use crate::perf;

/// How often it is written.
const WRITES: u32 = 8;

/// RDMA writes from the first device's memory to the second's, which belongs to another process, by UDP on the
/// loopback interface.
pub(super) fn stage(ends: &[Device; 2], size: u64) -> Stage {
    let [from, to] = ends.each_ref().map(Device::label);
    let there = format!("{to}, a process away");
    match perf::pair(&from, &to, size, WRITES) {
        Ok(brief) => {
            let what = format!("RDMA write by {}, {}", brief.link, brief.path);
            let stage = Stage::new(&what, from, there, size);
            stage.took(brief.each * WRITES, WRITES).checked(brief.verified)
        }
        Err(why) => Stage::new("RDMA write by udp", from, there, size).failed(why),
    }
}

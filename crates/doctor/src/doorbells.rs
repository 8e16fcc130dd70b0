//! Checks whether CUDA streams can ring a ConnectX's doorbells: the GPU must be able to map its
//! doorbell page.

use super::fold::fold_names;
use super::{Check, Evidence, Group, rdma};

const GROUP: Group = Group::RdmaDevices;
/// The check that decides the verdict on GPUDirect Async.
pub(super) const NAME: &str = "GPUDirect Async";
const DRIVER: &str = "mlx5";

pub(super) fn checks(evidence: &Evidence) -> Vec<Check> {
    let is_connectx =
        |driver: &Option<String>| driver.as_deref().is_some_and(|name| name.starts_with(DRIVER));
    let usable = rdma::usable_hardware(evidence);
    let names: Vec<_> = usable
        .iter()
        .filter(|device| is_connectx(&device.driver))
        .map(|device| device.name.clone())
        .collect();
    if !evidence.rdma.iter().any(|device| is_connectx(&device.driver)) {
        return vec![GROUP.skip(
            NAME,
            "there is no ConnectX; streams and kernels post to the software HCA, whose doorbells are \
             in pinned memory",
        )];
    }
    if names.is_empty() {
        return vec![GROUP.skip(NAME, "no ConnectX is active and accessible to this user")];
    }
    let mut working = evidence.probes.cuda.working_devices().peekable();
    if working.peek().is_none() {
        return vec![GROUP.skip(NAME, "no CUDA device works")];
    }
    vec![evaluate(evidence, &fold_names(&names))]
}

fn evaluate(evidence: &Evidence, names: &str) -> Check {
    let devices: Vec<_> = evidence.probes.cuda.working_devices().collect();
    let all = |has: &dyn Fn(&super::CudaAttributes) -> bool| {
        devices.iter().all(|device| has(&device.attributes))
    };
    if !all(&|known| known.stream_mem_ops_64_bit == Some(true)) {
        return GROUP.fail(
            NAME,
            "a doorbell is one store of 64 bits, which not every GPU's streams support",
            "use a newer GPU or driver, or let the CPU ring the doorbell (software HCA, or verbs)",
        );
    }
    // libcuda maps another device's registers only if this module parameter is set.
    if evidence.system.nvidia_params().peer_mapping_override != Some(true) {
        return GROUP.warn(
            NAME,
            format!("the GPU may not map the doorbells of {names}: PeerMappingOverride is not set"),
            "`echo 'options nvidia NVreg_RegistryDwords=\"PeerMappingOverride=1;\"' | sudo tee -a \
             /etc/modprobe.d/warpwire.conf`, reload the module",
        );
    }
    let nor = match all(&|known| known.stream_wait_value_nor == Some(true)) {
        true => "waits with NOR",
        false => "waits without NOR, on cleared entries",
    };
    // Bit 0: flush by a host call; bit 1: by a stream operation. Ordered writes need neither.
    let flush = match devices.iter().map(|device| device.attributes.writes_ordering).min() {
        Some(Some(100..)) => "writes are ordered for the GPU",
        _ if all(&|known| known.flush_writes_options.is_some_and(|bits| bits & 2 != 0)) => {
            "streams flush writes"
        }
        _ => "the host must flush writes",
    };
    GROUP.pass(
        NAME,
        format!(
            "expected for {names}, not tried: 64-bit stores, PeerMappingOverride, {nor}, {flush}"
        ),
    )
}

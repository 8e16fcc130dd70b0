//! An RDMA device for suites that also run on hardware: one that the environment names, such as
//! rxe in a guest, or one of this workspace's own libibverbs, a software HCA that is reached as
//! hardware is.
#![allow(unsafe_code)] // to set environment variables

use testkit::Collector;

/// Names an RDMA device of the machine to run the cases on, instead of links.
const DEVICE: &str = "WARPWIRE_TEST_DEVICE";
/// The only device of the workspace's libibverbs.
const OWN_DEVICE: &str = "warp0";

/// Whether the environment names a device: then cases run on nothing else.
pub fn is_named() -> bool {
    std::env::var_os(DEVICE).is_some()
}

/// Its value of `WARPWIRE_LINK`.
pub fn link() -> String {
    let name = std::env::var(DEVICE);
    format!("device:{}", name.as_deref().unwrap_or(OWN_DEVICE))
}

/// The links of a suite, and a device if there is one.
pub fn with_links<L: Copy>(
    suite: &mut Collector,
    links: &[(L, &'static str)],
    device: L,
) -> Vec<(L, &'static str)> {
    let mut all = if is_named() { Vec::new() } else { links.to_vec() };
    if is_named() || suite.backend("ibverbs", load_own_libibverbs()).is_some() {
        all.push((device, "device"));
    }
    all
}

/// Makes this process and its children load the libibverbs of this workspace, with one device.
fn load_own_libibverbs() -> Result<(), &'static str> {
    let library = std::env::current_exe().unwrap().with_file_name("libibverbs.so");
    if !library.exists() {
        return Err("libibverbs.so is not built; test the whole workspace");
    }
    // SAFETY: suites collect their cases before they start threads.
    unsafe {
        std::env::set_var("WARPWIRE_IBVERBS", library);
        std::env::set_var("WARPWIRE_IB_DEVICES", "lo");
    }
    Ok(())
}

//! What UCX and programs written for libibverbs would use in this environment.

use super::fold::fold_names;
use super::nccl::describe;
use super::probe_libraries::PRELOAD;
use super::verdict::{Answer, KnownBy, Verdict, usable_devices, verdict};
use super::{Evidence, LibraryProbe, windows};
use warpwire::host::FileAccess;

pub(super) const UCX: &str = "ucx";
pub(super) const VERBS: &str = "verbs";

const USE_OURS: &str = "start the program with `warpwire verbs -- PROGRAM`: it then has the \
                        software HCA";

fn library<'a>(evidence: &'a Evidence, name: &str) -> Option<&'a LibraryProbe> {
    evidence.probes.libraries.as_ref()?.get(name)
}

fn not_recorded(word: &'static str, capability: &str) -> Verdict {
    let text = "not known: the recording does not say which libraries are installed";
    verdict(word, capability, Answer::Partly, text).known_by(KnownBy::Read)
}

/// What programs that load libibverbs would see.
pub(super) fn verbs(evidence: &Evidence) -> Verdict {
    let capability = "RDMA programs (libibverbs) would see";
    if evidence.probes.libraries.is_none() {
        return not_recorded(VERBS, capability);
    }
    let of = |answer, text: String| verdict(VERBS, capability, answer, text);
    let Some(found) = library(evidence, "libibverbs.so.1") else {
        let text = "nothing: the dynamic linker finds no libibverbs.so.1".to_owned();
        return of(Answer::No, text).fixed_by(Some(USE_OURS.to_owned())).known_by(KnownBy::Read);
    };
    if found.warpwire.is_some() {
        let devices = match evidence.probes.environment.get("WARPWIRE_IB_DEVICES") {
            Some(list) => format!("WARPWIRE_IB_DEVICES={list}"),
            None => "one device per network interface".to_owned(),
        };
        let cm = match library(evidence, "librdmacm.so.1") {
            Some(manager) if folder(&manager.path) == folder(&found.path) => "",
            _ => "; programs of rdma_cm do not: its librdmacm.so.1 is not the one that is loaded",
        };
        let text = format!("the software HCA ({devices}), through {}{cm}", describe(found));
        return of(Answer::Yes, text);
    }
    match usable_devices(evidence) {
        Ok(names) => of(Answer::Yes, format!("{}, through {}", fold_names(&names), found.path)),
        Err(why) => of(Answer::No, format!("no usable device through {}: {why}", found.path))
            .fixed_by(Some(USE_OURS.to_owned())),
    }
}

fn folder(path: &str) -> &str {
    path.rsplit_once('/').map_or("", |(folder, _)| folder)
}

/// Which transports UCX could choose.
pub(super) fn ucx(evidence: &Evidence) -> Verdict {
    let capability = "UCX would use";
    if evidence.probes.libraries.is_none() {
        return not_recorded(UCX, capability);
    }
    let Some(found) = library(evidence, "libucp.so.0") else {
        let text = "nothing known: the dynamic linker finds no libucp.so.0; Python packages and \
                    MPIs bring their own";
        return verdict(UCX, capability, Answer::No, text)
            .fixed_by(Some("install UCX (Debian, Ubuntu: `sudo apt install libucx0`)".to_owned()))
            .known_by(KnownBy::Read);
    };
    let (network, missing) = network(evidence);
    let (gpu, gpu_missing) = gpu_transports(evidence);
    let mut names: Vec<&str> = network.clone();
    names.extend(gpu);
    names.extend(["tcp", "posix", "sysv", "self"]);
    let mut text = format!("what it prefers of {}, through {}", names.join(", "), found.path);
    for why in missing.iter().chain(&gpu_missing) {
        text.push_str("; ");
        text.push_str(why);
    }
    if let Some(list) = evidence.probes.environment.get("UCX_TLS") {
        text.push_str(&format!("; UCX_TLS={list} chooses among them"));
    }
    match network.is_empty() {
        false => verdict(UCX, capability, Answer::Yes, text),
        true => verdict(UCX, capability, Answer::Partly, text).fixed_by(Some(USE_OURS.to_owned())),
    }
    .known_by(KnownBy::Expected)
}

fn has_module(evidence: &Evidence, name: &str) -> bool {
    evidence.probes.ucx_modules.iter().any(|module| module == name)
}

/// RDMA transports, and why there are no more.
fn network(evidence: &Evidence) -> (Vec<&'static str>, Vec<String>) {
    let none = |why: &str| (Vec::new(), vec![format!("no RDMA transport: {why}")]);
    if !has_module(evidence, "ib") {
        return none("UCX has no module libuct_ib");
    }
    let verbs = library(evidence, "libibverbs.so.1");
    if verbs.is_some_and(|library| library.warpwire.is_some()) {
        let preload = evidence.probes.environment.get("LD_PRELOAD");
        // UCX looks for a device's files in /sys and /dev.
        return match preload.is_some_and(|list| list.contains(PRELOAD)) {
            true => (vec!["rc_verbs", "ud_verbs"], Vec::new()),
            false => none(&format!("the software HCA needs {PRELOAD} in LD_PRELOAD")),
        };
    }
    match usable_devices(evidence) {
        Ok(names) => {
            let is_mlx5 = |name: &String| {
                let mut devices = evidence.rdma.iter();
                devices.any(|d| d.name == *name && d.driver.as_deref() == Some("mlx5"))
            };
            let mlx5 = names.iter().any(is_mlx5) && evidence.system.mlx5_library().is_some();
            let accelerated = if mlx5 { vec!["rc_mlx5", "dc_mlx5", "ud_mlx5"] } else { vec![] };
            ([accelerated, vec!["rc_verbs", "ud_verbs"]].concat(), Vec::new())
        }
        Err(why) => none(&why),
    }
}

/// Transports of GPU memory, and why there are no more.
fn gpu_transports(evidence: &Evidence) -> (Vec<&'static str>, Vec<String>) {
    let mut names = Vec::new();
    let mut missing = Vec::new();
    if evidence.probes.cuda.working_devices().next().is_none() {
        return (names, missing);
    }
    match has_module(evidence, "cuda") {
        true => names.extend(["cuda_copy", "cuda_ipc"]),
        false => {
            missing.push("no cuda_copy and cuda_ipc: UCX has no module libuct_cuda".to_owned())
        }
    }
    let gdrapi = library(evidence, "libgdrapi.so.2");
    let gdrdrv = evidence.system.access("/dev/gdrdrv") == FileAccess::ReadWrite;
    match (has_module(evidence, "cuda_gdrcopy"), gdrapi) {
        (false, _) => missing.push("no gdr_copy: UCX has no module libuct_cuda_gdrcopy".to_owned()),
        (true, None) => missing.push("no gdr_copy: no libgdrapi.so.2 is found".to_owned()),
        (true, Some(library)) if gdrdrv || library.warpwire.is_some() => names.push("gdr_copy"),
        (true, Some(_)) => missing.push(
            "no gdr_copy: gdrcopy's libgdrapi.so.2 needs /dev/gdrdrv; Warpwire's does not"
                .to_owned(),
        ),
    }
    (names, missing)
}

/// Which gdrcopy library programs load, as the end of a sentence.
pub(super) fn gdrcopy(evidence: &Evidence) -> String {
    match (&evidence.probes.libraries, library(evidence, "libgdrapi.so.2")) {
        (None, _) => String::new(),
        (_, None) => "; programs for gdrcopy find no libgdrapi.so.2 (tools/install-gdrapi DIR \
                      installs one)"
            .to_owned(),
        (_, Some(library)) if library.warpwire.is_some() => {
            format!("; programs for gdrcopy load {}", describe(library))
        }
        (_, Some(library)) => {
            let needs = match evidence.system.access("/dev/gdrdrv") {
                FileAccess::ReadWrite => "",
                found => {
                    &format!(", which needs /dev/gdrdrv; that is {}", windows::describe(found))
                }
            };
            format!("; programs for gdrcopy load {}{needs}", describe(library))
        }
    }
}

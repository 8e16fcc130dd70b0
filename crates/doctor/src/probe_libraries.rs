//! Looks for the libraries that NCCL, UCX and RDMA programs would load, without loading them.

use std::collections::BTreeMap;

use super::LibraryProbe;
use super::nccl;
use warpwire::host::{LibraryPath, System};

/// The variables that decide which libraries programs load and what these use. Others are neither
/// looked at nor recorded.
const VARIABLES: [&str; 9] = [
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
    "NCCL_NET",
    "NCCL_NET_PLUGIN",
    "NCCL_NET_PLUGIN_REF_COUNT",
    "NCCL_IB_DISABLE",
    "NCCL_IBVERBS_LIB",
    "UCX_TLS",
    "WARPWIRE_IB_DEVICES",
];

const NAMES: [&str; 7] = [
    "libnccl.so.2",
    "libibverbs.so",
    "libibverbs.so.1",
    "librdmacm.so.1",
    "libgdrapi.so.2",
    "libucp.so.0",
    PRELOAD,
];

/// Where this file stands beside a libibverbs, that is this project's.
pub(super) const PRELOAD: &str = "libwarpwire_ibpaths.so";
/// The plugin as it is installed, and as cargo builds it.
const PLUGIN: [&str; 2] = ["libnccl-net-warpwire.so", "libnccl_net_warpwire.so"];

pub(super) fn environment() -> BTreeMap<String, String> {
    let value = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
    let text =
        |name: &&str| Some(((*name).to_owned(), value(name)?.to_string_lossy().into_owned()));
    VARIABLES.iter().filter_map(text).collect()
}

/// The libraries that a program with this environment would load, by the name it asks for.
pub(super) fn libraries(
    system: &System,
    environment: &BTreeMap<String, String>,
) -> BTreeMap<String, LibraryProbe> {
    let variable = |name: &str| environment.get(name).cloned().unwrap_or_default();
    let path =
        LibraryPath { preload: variable("LD_PRELOAD"), folders: variable("LD_LIBRARY_PATH") };
    let mut names: Vec<String> = NAMES.map(str::to_owned).to_vec();
    names.extend(nccl::plugin_names(environment).into_iter().flat_map(|(_, names)| names));
    names.extend(environment.get("NCCL_IBVERBS_LIB").cloned());
    let found = names.into_iter().filter_map(|name| {
        let found = system.find_library(&name, &path)?;
        let file = system.real_path(&found.path).unwrap_or_else(|| found.path.clone());
        let warpwire = warpwire_version(system, &found.path, &file);
        Some((name, LibraryProbe { path: found.path, file, by: found.by.to_owned(), warpwire }))
    });
    found.collect()
}

/// The version, if the library is this project's; libraries of before 0.3 have no note.
fn warpwire_version(system: &System, path: &str, file: &str) -> Option<String> {
    let unknown = || Some("of unknown version".to_owned());
    let (folder, _) = path.rsplit_once('/')?;
    let name = file.rsplit('/').next()?;
    match system.warpwire_version(path) {
        Some(version) => Some(version),
        None if PLUGIN.contains(&name) => unknown(),
        None if name.starts_with("libibverbs.so")
            && system.exists(&format!("{folder}/{PRELOAD}")) =>
        {
            unknown()
        }
        None => None,
    }
}

/// UCX's transport modules (`ib`, `cuda`), which it loads from `ucx` beside its libraries.
pub(super) fn ucx_modules(
    system: &System,
    libraries: &BTreeMap<String, LibraryProbe>,
) -> Vec<String> {
    let Some(library) = libraries.get("libucp.so.0") else { return Vec::new() };
    let folder = library.file.rsplit_once('/').map_or("", |(folder, _)| folder);
    let mut modules: Vec<String> = system
        .list(&format!("{folder}/ucx"))
        .iter()
        .filter_map(|name| Some(name.strip_prefix("libuct_")?.split('.').next()?.to_owned()))
        .collect();
    modules.dedup();
    modules
}

#[cfg(test)]
mod tests {
    use super::*;
    use warpwire::host::MachineFiles;

    #[test]
    fn libraries_and_modules_are_found() {
        let system = System::of(
            MachineFiles::parse(
                "/w/libibverbs.so.1 =\n/w/libwarpwire_ibpaths.so =\n/w/libnccl-net-warpwire.so =\n\
                 /n/libnccl-net-other.so =\n/u/libucp.so.0 -> libucp.so.0.0.0\n/u/libucp.so.0.0.0 =\n\
                 /u/ucx/libuct_ib.so.0 =\n/u/ucx/libuct_ib.so =\n/u/ucx/libuct_cuda.so =\n/u/ucx/x =",
            )
            .unwrap(),
        );
        let environment = [
            ("LD_LIBRARY_PATH", "/u:/n:/w"),
            ("NCCL_NET_PLUGIN", "other,/w/libnccl-net-warpwire.so"),
        ];
        let environment = environment.map(|(name, value)| (name.to_owned(), value.to_owned()));
        let found = libraries(&system, &environment.into());
        let names: Vec<_> = found.keys().map(String::as_str).collect();
        assert_eq!(
            names,
            [
                "/w/libnccl-net-warpwire.so",
                "libibverbs.so.1",
                "libnccl-net-other.so",
                "libucp.so.0",
                "libwarpwire_ibpaths.so"
            ]
        );
        assert!(found["libibverbs.so.1"].warpwire.is_some());
        assert!(found["/w/libnccl-net-warpwire.so"].warpwire.is_some());
        assert_eq!(found["libnccl-net-other.so"].warpwire, None);
        assert_eq!(found["libucp.so.0"].file, "/u/libucp.so.0.0.0");
        assert_eq!(ucx_modules(&system, &found), ["cuda", "ib"]);
        assert_eq!(ucx_modules(&system, &BTreeMap::new()), Vec::<String>::new());
    }
}

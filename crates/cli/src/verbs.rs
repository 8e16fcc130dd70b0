//! `warpwire verbs`: starts a program with this project's libibverbs and librdmacm.

use std::ffi::{OsStr, OsString};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use clap::Args;
use serde::Serialize;

use crate::output::{self, Failure};

/// Run a program written for RDMA devices on this machine's network, without an RDMA device
///
/// The program finds a device per network interface (warp0, warp1, …), which is a software HCA in
/// its own process: shared memory between processes of one machine, RoCEv2 over UDP between
/// machines. No privilege and no kernel module is needed. tools/install-ibverbs builds the
/// libraries.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Arguments {
    /// Folder with libibverbs.so.1 and librdmacm.so.1 [default: where packages and tools/install
    /// put them: ../lib/warpwire or ../lib/ARCH-linux-gnu/warpwire, seen from this command; or its
    /// own folder]
    #[arg(long, value_name = "DIR")]
    libraries: Option<PathBuf>,

    /// Devices to offer: interfaces or addresses, as in eth0 or mlx5_0=10.0.0.1,lo
    #[arg(long, value_name = "LIST")]
    devices: Option<OsString>,

    /// Print the variables that a shell must export, and start nothing
    #[arg(long, conflicts_with = "program")]
    env: bool,

    /// Program to start, and its arguments
    #[arg(required_unless_present = "env", last = true, value_name = "PROGRAM")]
    program: Vec<OsString>,
}

const EXAMPLES: &str = "\
Examples:
  warpwire verbs -- ibv_devinfo
  warpwire verbs -- ib_write_bw -x 0
  warpwire verbs -- rping -s
  warpwire verbs --devices lo -- ucx_info -d
  eval \"$(warpwire verbs --env)\"

Environment of the program:
  WARPWIRE_IB_DEVICES   devices, as --devices
  WARPWIRE_IB_PROGRESS  auto, thread, or microseconds to spin [default: thread from 4 cores on]
  WARPWIRE_IB_LINK      udp: no shared memory between processes of one machine
  WARPWIRE_IB_PORT      4791: the port of NICs and soft-RoCE, for one process per address
  WARPWIRE_IB_LOG       1: why calls are refused, on standard error
  WARPWIRE_PCAP         file for a capture of packets; %p in it stands for the process id";

/// The preload that stands beside the library: where it is, the library is this project's.
const PRELOAD: &str = "libwarpwire_ibpaths.so";

/// The connection manager, if it is installed: with its soname, or as cargo builds it.
const MANAGER: [&str; 2] = ["librdmacm.so.1", "librdmacm.so"];

pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode, String> {
    output::exit_result(start(arguments))
}

fn start(arguments: &Arguments) -> Result<ExitCode, Failure> {
    let library = find(arguments.libraries.as_deref())?;
    let variables = variables(&library, arguments.devices.as_deref(), |name| {
        std::env::var_os(name).filter(|value| !value.is_empty())
    });
    launch(variables, arguments.env, &arguments.program)
}

/// Prints the variables for a shell, or starts a program with them.
pub(crate) fn launch(
    variables: Vec<(&'static str, OsString)>,
    only_print: bool,
    program: &[OsString],
) -> Result<ExitCode, Failure> {
    if only_print {
        let lines =
            variables.iter().map(|(name, value)| format!("export {name}={}\n", quoted(value)));
        output::print(&lines.collect::<String>()).map_err(Failure::Runtime)?;
        return Ok(ExitCode::SUCCESS);
    }
    let [program, rest @ ..] = program else {
        return Err(Failure::Usage("no program is given".to_owned()));
    };
    let why = Command::new(program).args(rest).envs(variables).exec();
    Err(Failure::Runtime(format!("cannot start {}: {why}", program.to_string_lossy())))
}

/// Where libraries may be: this folder, or those where they are usually installed.
pub(crate) fn library_folders(folder: Option<&Path>) -> Vec<PathBuf> {
    match folder {
        Some(folder) => vec![folder.to_owned()],
        None => {
            let own = std::env::current_exe().ok();
            own.as_deref().and_then(Path::parent).map(folders_near).unwrap_or_default()
        }
    }
}

/// Where libraries are installed, seen from the folder of the command: `tools/install`, Debian
/// packages, wheels (`tools/wheel`), cargo's builds.
fn folders_near(own: &Path) -> Vec<PathBuf> {
    let multiarch = format!("../lib/{}-linux-gnu/warpwire", std::env::consts::ARCH);
    let folders = ["../lib/warpwire", &multiarch, "../lib", "../ibverbs", "."];
    folders.iter().map(|folder| own.join(folder)).collect()
}

/// Folders, for people.
pub(crate) fn list(folders: &[PathBuf]) -> String {
    // As they would be typed: without `..`, where they exist.
    let shown = |folder: &PathBuf| {
        folder.canonicalize().unwrap_or_else(|_| folder.clone()).display().to_string()
    };
    folders.iter().map(shown).collect::<Vec<_>>().join(", ")
}

/// The library in this folder, or in those where it is usually installed.
fn find(folder: Option<&Path>) -> Result<PathBuf, Failure> {
    let folders = library_folders(folder);
    let library_in = |folder: &PathBuf| {
        let names = ["libibverbs.so.1", "libibverbs.so"];
        let is_ours = folder.join(PRELOAD).is_file();
        let found = names.iter().map(|name| folder.join(name)).find(|path| path.is_file());
        found.filter(|_| is_ours).and_then(|path| path.canonicalize().ok())
    };
    folders.iter().find_map(library_in).ok_or_else(|| {
        Failure::Usage(format!(
            "no libibverbs.so.1 with {PRELOAD} in {}; install the package warpwire, or run \
             tools/install-ibverbs DIR and pass --libraries DIR",
            list(&folders)
        ))
    })
}

/// Whether RDMA programs see the software HCA; serialized for `devices --json`.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Programs {
    /// The libibverbs.so.1 that they load, if it is this project's.
    library: Option<PathBuf>,
    /// Why they do not see it, or which ones do not.
    why: Vec<String>,
}

impl Programs {
    /// Programs that are started in this environment.
    pub(crate) fn here() -> Self {
        Self::of(|name| std::env::var_os(name).unwrap_or_default())
    }

    pub(crate) fn of(variable: impl Fn(&str) -> OsString) -> Self {
        let preload = variable("LD_PRELOAD");
        // Entries are separated by colons or spaces.
        let preload = preload.to_string_lossy().replace(' ', ":");
        let preloaded: Vec<PathBuf> = std::env::split_paths(&preload).collect();
        let is_library = |path: &&PathBuf| {
            let name = path.file_name().and_then(OsStr::to_str).unwrap_or_default();
            name.starts_with("libibverbs.so") && path.is_file()
        };
        let in_folder = |folder: PathBuf| Some(folder.join("libibverbs.so.1"));
        let path = variable("LD_LIBRARY_PATH");
        let mut searched = std::env::split_paths(&path).filter_map(in_folder);
        let first = preloaded.iter().find(is_library).cloned();
        let Some(library) = first.or_else(|| searched.find(|path| path.is_file())) else {
            let why = "neither LD_PRELOAD nor LD_LIBRARY_PATH has this project's libibverbs.so.1";
            return Self { library: None, why: vec![why.to_owned()] };
        };
        let folder = library.parent().unwrap_or(Path::new("."));
        if !folder.join(PRELOAD).is_file() {
            let why = format!("they load {}, another project's", library.display());
            return Self { library: None, why: vec![why] };
        }
        let mut why = Vec::new();
        if !preloaded.iter().any(|path| path.ends_with(PRELOAD)) {
            why.push(format!("UCX does not: {PRELOAD} is not in LD_PRELOAD"));
        }
        if !MANAGER.iter().any(|name| folder.join(name).is_file()) {
            let folder = folder.display();
            why.push(format!("rdma_cm programs do not: no librdmacm.so.1 in {folder}"));
        }
        Self { library: Some(library), why }
    }

    /// A few lines, each indented.
    pub(crate) fn text(&self) -> String {
        let mut text = match &self.library {
            Some(library) => format!("  RDMA programs see it through {}\n", library.display()),
            None => "  RDMA programs do not see it\n".to_owned(),
        };
        for why in &self.why {
            text += &format!("    {why}\n");
        }
        if !self.why.is_empty() {
            text += "    fix: start them with `warpwire verbs -- PROGRAM`\n";
        }
        text
    }
}

/// What the program's environment must have; `current` is the environment as it is.
fn variables(
    library: &Path,
    devices: Option<&OsStr>,
    current: impl Fn(&str) -> Option<OsString>,
) -> Vec<(&'static str, OsString)> {
    let folder = library.parent().unwrap_or(Path::new("."));
    let before = |name: &str, mut first: OsString| {
        if let Some(rest) = current(name) {
            first.push(":");
            first.push(rest);
        }
        first
    };
    // Preloaded, the library also replaces those that wheels bring along under other names.
    let mut preload = library.as_os_str().to_owned();
    // The connection manager is installed under its soname, which is looked up in the folder; in
    // cargo's folder it has another name, so it is preloaded as well.
    let manager = MANAGER.iter().map(|name| folder.join(name)).find(|path| path.is_file());
    for path in manager.into_iter().chain([folder.join(PRELOAD)]) {
        preload.push(":");
        preload.push(path);
    }
    let mut variables = vec![
        ("LD_LIBRARY_PATH", before("LD_LIBRARY_PATH", folder.into())),
        ("LD_PRELOAD", before("LD_PRELOAD", preload)),
        ("NCCL_IBVERBS_LIB", library.into()),
    ];
    if current("NCCL_GIN_TYPE").is_none() {
        // NCCL's probe of device-initiated networking ends the process on devices that are no mlx5.
        variables.push(("NCCL_GIN_TYPE", "2".into()));
    }
    variables.extend(devices.map(|devices| ("WARPWIRE_IB_DEVICES", devices.to_owned())));
    variables
}

/// The text as one word of a shell.
fn quoted(text: &OsStr) -> String {
    format!("'{}'", text.to_string_lossy().replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(names: &[&str]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for name in names {
            std::fs::write(folder.path().join(name), "").unwrap();
        }
        folder
    }

    #[test]
    fn libraries_of_every_kind_of_installation_are_found() {
        let multiarch = format!("lib/{}-linux-gnu/warpwire", std::env::consts::ARCH);
        for place in ["lib/warpwire", &multiarch, "lib", "ibverbs", "bin"] {
            let prefix = tempfile::tempdir().unwrap();
            let (bin, folder) = (prefix.path().join("bin"), prefix.path().join(place));
            for folder in [&bin, &folder] {
                std::fs::create_dir_all(folder).unwrap();
            }
            let holds = |folder: &&PathBuf| folder.join(PRELOAD).is_file();
            assert_eq!(folders_near(&bin).iter().find(holds), None);
            std::fs::write(folder.join(PRELOAD), "").unwrap();
            let found = folders_near(&bin).iter().find(holds).cloned().unwrap();
            assert_eq!(found.canonicalize().unwrap(), folder.canonicalize().unwrap());
        }
    }

    #[test]
    fn programs_see_the_library_that_they_load_first() {
        let ours = folder(&["libibverbs.so.1", "librdmacm.so.1", PRELOAD]);
        let bare = folder(&["libibverbs.so.1", PRELOAD]);
        let other = folder(&["libibverbs.so.1"]);
        let [ours, bare, other] = [&ours, &bare, &other].map(|folder| folder.path().to_owned());
        let of = |preload: &[PathBuf], path: &[&Path]| {
            let preload = std::env::join_paths(preload).unwrap();
            let path = std::env::join_paths(path).unwrap();
            Programs::of(|name| if name == "LD_PRELOAD" { preload.clone() } else { path.clone() })
        };
        let library = |folder: &Path| Some(folder.join("libibverbs.so.1"));
        let all = [ours.join("libibverbs.so.1"), ours.join(PRELOAD)];
        assert_eq!(of(&all, &[&other]), Programs { library: library(&ours), why: vec![] });
        let seen = of(&[], &[Path::new("/nowhere"), &ours, &other]);
        assert_eq!(seen.library, library(&ours));
        assert!(seen.why.len() == 1 && seen.why[0].contains("UCX"), "{seen:?}");
        let seen = of(&[bare.join(PRELOAD)], &[&bare]);
        assert_eq!(seen.library, library(&bare));
        assert!(seen.why.len() == 1 && seen.why[0].contains("librdmacm.so.1"), "{seen:?}");
        let hidden = of(&[], &[&other, &ours]);
        assert!(hidden.library.is_none() && hidden.why[0].contains("another project's"));
        let none = of(&[], &[Path::new("/nowhere")]);
        assert!(none.library.is_none() && none.text().contains("warpwire verbs -- PROGRAM"));
        // A preload that does not exist is ignored by the dynamic linker as well.
        let gone = of(&[PathBuf::from("/nowhere/libibverbs.so.1")], &[]);
        assert_eq!(gone.library, None);
    }
}

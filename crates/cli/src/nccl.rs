//! `warpwire nccl`: starts a program whose NCCL uses this project's network plugin.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Args, ValueEnum};

use crate::output::{self, Failure};
use crate::verbs::{launch, library_folders, list};

/// Run a program whose NCCL uses this machine's network through Warpwire, without an RDMA device
///
/// NCCL moves its buffers by shared memory between processes of one machine, and by RoCEv2 over UDP
/// between machines, with several threads per process. tools/install-nccl builds the library.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Arguments {
    /// Folder with libnccl-net-warpwire.so [default: where packages and tools/install put it:
    /// ../lib/warpwire, ../lib/ARCH-linux-gnu/warpwire or ../lib, seen from this command; or its
    /// own folder]
    #[arg(long, value_name = "DIR")]
    libraries: Option<PathBuf>,

    /// Devices to offer: interfaces or addresses, as in eth0 or 10.0.0.1,eth1
    #[arg(long, value_name = "LIST")]
    devices: Option<OsString>,

    /// Links to use [default: auto]
    #[arg(long)]
    link: Option<Link>,

    /// Print the variables that a shell must export, and start nothing
    #[arg(long, conflicts_with = "program")]
    env: bool,

    /// Program to start, and its arguments
    #[arg(required_unless_present = "env", last = true, value_name = "PROGRAM")]
    program: Vec<OsString>,
}

/// Which links connections may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Link {
    /// Shared memory between processes of one machine, UDP to others
    Auto,
    /// Shared memory only
    Shm,
    /// UDP only
    Udp,
}

const EXAMPLES: &str = "\
Examples:
  warpwire nccl -- torchrun train.py
  warpwire nccl --link udp --devices eth0 -- torchrun --nnodes 2 train.py
  eval \"$(warpwire nccl --env)\"

NCCL's log shows that it is used: NCCL_DEBUG=INFO prints \"NET/Warpwire\" and
\"via NET/Warpwire/0\".

Environment of the program:
  WARPWIRE_NCCL_DEVICES   devices, as --devices
  WARPWIRE_NCCL_LINK      links, as --link
  WARPWIRE_NCCL_ENGINES   threads per device, 1 to 8 [default: a quarter of the cores, at most 4]
  WARPWIRE_NCCL_PROGRESS  auto, thread, or microseconds to spin [default: thread from 4 cores on]
  WARPWIRE_NCCL_STRIPE    bytes from which a message is split [default: 65536]
  WARPWIRE_NCCL_SPEED     Mbit/s to announce [default: the interface's, or 100000]";

/// The library as it is installed, and as cargo builds it.
const NAMES: [&str; 2] = ["libnccl-net-warpwire.so", "libnccl_net_warpwire.so"];

pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode, String> {
    output::exit_result(start(arguments))
}

fn start(arguments: &Arguments) -> Result<ExitCode, Failure> {
    let library = find(arguments.libraries.as_deref())?;
    let mut variables = vec![
        ("NCCL_NET_PLUGIN", library.into_os_string()),
        // Without the plugin NCCL ends with an error, instead of using TCP.
        ("NCCL_NET", "Warpwire".into()),
        // NCCL 2.28 forgets the plugin's name when its last communicator ends.
        ("NCCL_NET_PLUGIN_REF_COUNT", "1".into()),
    ];
    let devices = arguments.devices.clone();
    variables.extend(devices.map(|devices| ("WARPWIRE_NCCL_DEVICES", devices)));
    let link = arguments.link.and_then(|link| link.to_possible_value());
    variables.extend(link.map(|link| ("WARPWIRE_NCCL_LINK", link.get_name().into())));
    launch(variables, arguments.env, &arguments.program)
}

/// The library in this folder, or in those where it is usually installed.
fn find(folder: Option<&Path>) -> Result<PathBuf, Failure> {
    let folders = library_folders(folder);
    let paths = folders.iter().flat_map(|folder| NAMES.map(|name| folder.join(name)));
    let found = paths.filter(|path| path.is_file()).find_map(|path| path.canonicalize().ok());
    found.ok_or_else(|| {
        Failure::Usage(format!(
            "no {} in {}; install the package warpwire, or run tools/install-nccl DIR and pass \
             --libraries DIR",
            NAMES[0],
            list(&folders)
        ))
    })
}

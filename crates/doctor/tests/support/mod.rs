//! Recorded machines: `tests/machines/NAME.machine`, one small text file each, unpacked into a
//! temporary directory. The format is described at `warpwire::host::MachineFiles`.

// Helpers may panic as tests do; clippy exempts only functions marked as tests.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::fs;
use std::path::Path;

use warpwire::host::{MachineFiles, System};
use warpwire_doctor::{Evidence, Report, Topology};

/// The names of all recorded machines.
#[allow(dead_code)] // not every test binary uses it
pub(crate) const MACHINES: [&str; 9] = [
    "no-gpu",
    "h200-no-nic",
    "eight-gpu-server",
    "peermem-missing",
    "proprietary-driver",
    "nvlink-bridge",
    "soft-roce",
    "container-without-infiniband",
    "broken",
];

/// An unpacked machine; dropping it removes its directory.
pub(crate) struct Machine {
    folder: tempfile::TempDir,
}

#[allow(dead_code)] // not every test binary uses every part
impl Machine {
    /// Unpacks `tests/machines/NAME.machine`.
    pub(crate) fn recorded(name: &str) -> Self {
        let file = Self::file(name);
        let text = fs::read_to_string(&file).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
        Self::unpack(&text)
    }

    /// The machine file.
    pub(crate) fn file(name: &str) -> std::path::PathBuf {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../doctor/tests/machines");
        folder.join(format!("{name}.machine"))
    }

    /// Unpacks a machine from text.
    pub(crate) fn unpack(text: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let files = MachineFiles::parse(text).unwrap_or_else(|error| panic!("{error}"));
        files.unpack(folder.path()).unwrap();
        Self { folder }
    }

    pub(crate) fn root(&self) -> &Path {
        self.folder.path()
    }

    pub(crate) fn system(&self) -> System {
        System::at(self.root()).unwrap()
    }

    pub(crate) fn report(&self) -> Report {
        Report::of(&Evidence::gather(self.system()).unwrap())
    }

    pub(crate) fn topology(&self) -> Topology {
        Topology::read(&self.system()).unwrap()
    }

    /// Replaces a file's text, for a variant of the machine.
    pub(crate) fn write(&self, path: &str, text: &str) {
        fs::write(self.root().join(path.trim_start_matches('/')), text).unwrap();
    }

    /// Removes a file or a directory.
    pub(crate) fn remove(&self, path: &str) {
        let path = self.root().join(path.trim_start_matches('/'));
        if path.is_dir() {
            fs::remove_dir_all(path).unwrap();
        } else {
            fs::remove_file(path).unwrap();
        }
    }
}

//! Recorded machines: `tests/machines/NAME.machine`, one small text file each, unpacked into a
//! temporary directory.
//!
//! The format, by lines; `${NAME}` is replaced by a variable's value everywhere:
//!
//! ```text
//! # a comment
//! /proc/version = text                a file with this line; \n begins another
//! /dev/nvidia0 [0666] = text          the same, with permissions (0644 otherwise)
//! /proc/modules <<END                 a file with all lines until END
//! END
//! /sys/a/config @0x100 0d00 0100      a binary file with these bytes at that offset; further
//!                                     lines add to the same file, and gaps are zeros
//! /sys/a/driver -> ../b               a symlink
//! /sys/class/iommu/                   an empty directory
//! set NAME = text                     a variable
//! repeat A=0..7 B=x,y,…               all lines until the matching `end`, for each value; several
//! end                                 variables step together. May be nested.
//! probes <<END                        the results of the probes: probes.json at the root
//! END
//! ```

// Helpers may panic as tests do; clippy exempts only functions marked as tests.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use warpwire::host::System;
use warpwire_doctor::{Evidence, Report, Topology};

/// The names of all recorded machines.
#[allow(dead_code)] // not every test binary uses it
pub(crate) const MACHINES: [&str; 7] = [
    "no-gpu",
    "h200-no-nic",
    "eight-gpu-server",
    "peermem-missing",
    "proprietary-driver",
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
        let file = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../doctor/tests/machines")
            .join(format!("{name}.machine"));
        let text = fs::read_to_string(&file).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
        Self::unpack(&text)
    }

    /// Unpacks a machine from text.
    pub(crate) fn unpack(text: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let lines: Vec<(usize, &str)> = text.lines().enumerate().collect();
        let mut unpacker = Unpacker { root: folder.path().to_owned(), variables: Vec::new() };
        unpacker.run(&lines);
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
        Topology::read(&self.system())
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

struct Unpacker {
    root: PathBuf,
    variables: Vec<(String, String)>,
}

impl Unpacker {
    fn run(&mut self, lines: &[(usize, &str)]) {
        let mut rest = lines;
        while let Some(((number, line), after)) = rest.split_first() {
            let line = self.expand(line.trim(), *number);
            rest = after;
            if let Some(variables) = line.strip_prefix("repeat ") {
                let end = matching_end(rest, *number);
                self.repeat(variables, &rest[..end], *number);
                rest = &rest[end + 1..];
            } else if let Some((head, mark)) = line.split_once(" <<") {
                let end = rest.iter().position(|(_, line)| line.trim() == mark);
                let end = end.unwrap_or_else(|| panic!("line {}: no {mark}", number + 1));
                let body: Vec<String> =
                    rest[..end].iter().map(|(n, l)| self.expand(l, *n)).collect();
                let head = if head == "probes" { "/probes.json" } else { head };
                self.file(head, &body.join("\n"));
                rest = &rest[end + 1..];
            } else if !line.is_empty() && !line.starts_with('#') {
                self.single(&line, *number);
            }
        }
    }

    fn single(&mut self, line: &str, number: usize) {
        if let Some(variable) = line.strip_prefix("set ") {
            let (name, value) = variable.split_once(" = ").unwrap();
            self.variables.insert(0, (name.to_owned(), value.to_owned()));
        } else if let Some((path, target)) = line.split_once(" -> ") {
            symlink(target, self.target_path(path))
                .unwrap_or_else(|e| panic!("line {}: {e}", number + 1));
        } else if let Some((path, content)) = line.split_once(" = ") {
            self.file(path, &content.replace("\\n", "\n"));
        } else if let Some(path) = line.strip_suffix(" =") {
            self.file(path, "");
        } else if let Some((path, bytes)) = line.split_once(" @") {
            self.binary(path, bytes);
        } else if line.starts_with('/') && line.ends_with('/') {
            fs::create_dir_all(self.target_path(line)).unwrap();
        } else {
            panic!("line {}: {line:?} has no known form", number + 1);
        }
    }

    fn repeat(&mut self, variables: &str, body: &[(usize, &str)], number: usize) {
        let lists: Vec<(String, Vec<String>)> = variables
            .split_whitespace()
            .map(|variable| {
                let (name, values) = variable.split_once('=').unwrap();
                (name.to_owned(), list(values))
            })
            .collect();
        let count = lists[0].1.len();
        let even = lists.iter().all(|(_, values)| values.len() == count);
        assert!(even, "line {}: lists of different lengths", number + 1);
        let outer = self.variables.len();
        for step in 0..count {
            for (name, values) in &lists {
                self.variables.insert(0, (name.clone(), values[step].clone()));
            }
            self.run(body);
            // Inner variables were inserted in front.
            self.variables.drain(..self.variables.len() - outer);
        }
    }

    fn expand(&self, line: &str, number: usize) -> String {
        let mut text = line.to_owned();
        for (name, value) in &self.variables {
            text = text.replace(&format!("${{{name}}}"), value);
        }
        let unknown = text.starts_with('/') && text.contains("${");
        assert!(!unknown, "line {}: unknown variable in {text}", number + 1);
        text
    }

    /// Writes a file; `head` is a path, optionally followed by permissions in brackets.
    fn file(&self, head: &str, content: &str) {
        let (path, mode) = match head.split_once(" [") {
            Some((path, mode)) => {
                (path, u32::from_str_radix(mode.trim_end_matches(']'), 8).unwrap())
            }
            None => (head, 0o644),
        };
        let target_path = self.target_path(path);
        fs::write(&target_path, format!("{content}\n")).unwrap();
        fs::set_permissions(&target_path, fs::Permissions::from_mode(mode)).unwrap();
    }

    fn binary(&self, path: &str, bytes: &str) {
        let (offset, digits) = bytes.split_once(' ').unwrap();
        let offset = usize::from_str_radix(offset.trim_start_matches("0x"), 16).unwrap();
        let digits: Vec<char> = digits.chars().filter(|c| !c.is_whitespace()).collect();
        let new: Vec<u8> = digits
            .chunks(2)
            .map(|pair| u8::from_str_radix(&pair.iter().collect::<String>(), 16).unwrap())
            .collect();
        let target_path = self.target_path(path);
        let mut content = fs::read(&target_path).unwrap_or_default();
        content.resize(content.len().max(offset + new.len()), 0);
        content[offset..offset + new.len()].copy_from_slice(&new);
        fs::write(target_path, content).unwrap();
    }

    /// The location of a path below the root; creates its parent directories.
    fn target_path(&self, path: &str) -> PathBuf {
        let target_path = self.root.join(path.trim_matches('/'));
        fs::create_dir_all(target_path.parent().unwrap()).unwrap();
        target_path
    }
}

fn list(values: &str) -> Vec<String> {
    match values.split_once("..") {
        Some((first, last)) => {
            let (first, last): (u32, u32) = (first.parse().unwrap(), last.parse().unwrap());
            (first..=last).map(|number| number.to_string()).collect()
        }
        None => values.split(',').map(str::to_owned).collect(),
    }
}

fn matching_end(lines: &[(usize, &str)], number: usize) -> usize {
    let mut depth = 1;
    for (index, (_, line)) in lines.iter().enumerate() {
        match line.trim() {
            "end" => depth -= 1,
            line if line.starts_with("repeat ") => depth += 1,
            _ => {}
        }
        if depth == 0 {
            return index;
        }
    }
    panic!("line {}: repeat without end", number + 1)
}

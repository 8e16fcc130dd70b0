//! Machine files: the files of a recorded machine as one text.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;

use super::system::MAX_FILE;
use crate::error::{Error, Kind, Result};

/// Permissions of a file that gives none.
const DEFAULT_MODE: u32 = 0o644;
/// Entries of a machine at most: bounds what nested repetitions can produce.
const MAX_ENTRIES: usize = 200_000;
/// Where the results of probes are.
const PROBES: &str = "/probes.json";

/// One file of a recorded machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MachineEntry {
    /// A file with its bytes and permission bits.
    File {
        /// Its contents.
        bytes: Vec<u8>,
        /// Its permission bits.
        mode: u32,
    },
    /// A symlink with its target.
    Link(String),
    /// A directory.
    Folder,
}

/// The files of a recorded machine: what `warpwire doctor --record` writes and `--root` reads.
///
/// The format, by lines; `${NAME}` is replaced by a variable's value everywhere:
///
/// ```text
/// # a comment
/// /proc/version = text                a file with this line; \n begins another
/// /dev/nvidia0 [0666] = text          the same, with permissions (0644 otherwise)
/// /proc/modules <<END                 a file with all lines until END
/// END
/// /sys/a/config @0x100 0d00 0100      a binary file with these bytes at that offset; further
///                                     lines add to the same file, and gaps are zeros
/// /sys/a/driver -> ../b               a symlink
/// /sys/class/iommu/                   an empty directory
/// set NAME = text                     a variable
/// repeat A=0..7 B=x,y,…               all lines until the matching `end`, for each value; several
/// end                                 variables step together. May be nested.
/// probes <<END                        the results of the probes: probes.json at the root
/// END
/// ```
///
/// ```
/// use warpwire::host::{MachineFiles, System};
/// let files = MachineFiles::parse("/proc/sys/kernel/osrelease = 6.1.0-18-amd64\n")?;
/// assert_eq!(MachineFiles::parse(&files.to_text())?, files);
/// assert!(System::of(files).kernel().unwrap().at_least(6, 1));
/// # Ok::<(), warpwire::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MachineFiles {
    /// By absolute path, without a slash at the end.
    entries: BTreeMap<String, MachineEntry>,
}

impl MachineFiles {
    /// Reads a machine file.
    ///
    /// # Errors
    /// [`Kind::Malformed`], with the line's number, if a line has none of the forms.
    pub fn parse(text: &str) -> Result<Self> {
        let mut parser = Parser { files: Self::default(), variables: Vec::new() };
        let lines: Vec<(usize, &str)> = text.lines().enumerate().collect();
        parser.run(&lines).map_err(|(line, why)| {
            Error::new(Kind::Malformed, "read a machine file")
                .why(format!("line {}: {why}", line + 1))
                .fix("correct that line; `warpwire doctor --record FILE` writes such files")
        })?;
        Ok(parser.files)
    }

    /// The machine file with these files.
    pub fn to_text(&self) -> String {
        let mut text = String::new();
        for (path, entry) in &self.entries {
            // Writing to a string cannot fail.
            let _ = match entry {
                MachineEntry::Link(target) => writeln!(text, "{path} -> {target}"),
                MachineEntry::Folder if self.names(path).is_empty() => writeln!(text, "{path}/"),
                MachineEntry::Folder => Ok(()),
                MachineEntry::File { bytes, mode } => write_file(&mut text, path, bytes, *mode),
            };
        }
        text
    }

    /// Writes all files below a directory.
    ///
    /// # Errors
    /// As the system reports.
    pub fn unpack(&self, folder: &Path) -> std::io::Result<()> {
        for (path, entry) in &self.entries {
            let target_path = folder.join(path.trim_start_matches('/'));
            match entry {
                MachineEntry::Folder => fs::create_dir_all(&target_path)?,
                MachineEntry::Link(target) => symlink(target, &target_path)?,
                MachineEntry::File { bytes, mode } => {
                    fs::write(&target_path, bytes)?;
                    fs::set_permissions(&target_path, fs::Permissions::from_mode(*mode))?;
                }
            }
        }
        Ok(())
    }

    /// All files, by absolute path.
    pub fn entries(&self) -> &BTreeMap<String, MachineEntry> {
        &self.entries
    }

    /// Adds or replaces a file with this text, and a line break at its end.
    pub fn set_text(&mut self, path: &str, text: &str) {
        self.set_bytes(path, format!("{}\n", text.trim_end()).as_bytes());
    }

    /// Adds or replaces a file; its permissions stay.
    pub fn set_bytes(&mut self, path: &str, bytes: &[u8]) {
        let mode = match self.entries.get(path) {
            Some(MachineEntry::File { mode, .. }) => *mode,
            _ => DEFAULT_MODE,
        };
        self.insert(path, MachineEntry::File { bytes: bytes.to_vec(), mode });
    }

    /// Removes a path, and everything below it.
    pub fn remove(&mut self, path: &str) {
        let below = format!("{path}/");
        self.entries.retain(|known, _| known != path && !known.starts_with(&below));
    }

    pub(super) fn entry(&self, path: &str) -> Option<&MachineEntry> {
        const ROOT: &MachineEntry = &MachineEntry::Folder;
        if path == "/" { Some(ROOT) } else { self.entries.get(path) }
    }

    pub(super) fn file(&self, path: &str) -> Option<&[u8]> {
        match self.entries.get(path)? {
            MachineEntry::File { bytes, .. } => Some(bytes),
            MachineEntry::Link(_) | MachineEntry::Folder => None,
        }
    }

    pub(super) fn mode(&self, path: &str) -> u32 {
        match self.entry(path) {
            Some(MachineEntry::File { mode, .. }) => *mode,
            Some(MachineEntry::Folder) => 0o755,
            Some(MachineEntry::Link(_)) | None => 0,
        }
    }

    /// The names in a directory.
    pub(super) fn names(&self, folder: &str) -> Vec<String> {
        let prefix = if folder == "/" { "/".to_owned() } else { format!("{folder}/") };
        let below = self.entries.range(prefix.clone()..);
        let below = below.map_while(|(path, _)| path.strip_prefix(&prefix));
        below.filter(|name| !name.contains('/')).map(str::to_owned).collect()
    }

    pub(super) fn set_mode(&mut self, path: &str, new: u32) {
        if let Some(MachineEntry::File { mode, .. }) = self.entries.get_mut(path) {
            *mode = new;
        }
    }

    pub(super) fn add_folder(&mut self, path: &str) {
        self.insert(path, MachineEntry::Folder);
    }

    pub(super) fn add_link(&mut self, path: &str, target: &str) {
        self.insert(path, MachineEntry::Link(target.to_owned()));
    }

    /// A file whose contents nobody read, so far.
    pub(super) fn add_stub(&mut self, path: &str) {
        if !self.entries.contains_key(path) {
            self.insert(path, MachineEntry::File { bytes: Vec::new(), mode: DEFAULT_MODE });
        }
    }

    fn insert(&mut self, path: &str, entry: MachineEntry) {
        let mut end = 0;
        while let Some(next) = path.get(end + 1..).and_then(|rest| rest.find('/')) {
            end += 1 + next;
            let parent = path.get(..end).unwrap_or_default();
            self.entries.entry(parent.to_owned()).or_insert(MachineEntry::Folder);
        }
        self.entries.insert(path.to_owned(), entry);
    }
}

/// Writes a file in the shortest form that reads back to the same bytes.
fn write_file(text: &mut String, path: &str, bytes: &[u8], mode: u32) -> std::fmt::Result {
    let head = match mode {
        DEFAULT_MODE => path.to_owned(),
        mode => format!("{path} [{mode:04o}]"),
    };
    let content = std::str::from_utf8(bytes).ok().and_then(|text| text.strip_suffix('\n'));
    let printable = |content: &&str| {
        !content.contains("${")
            && !content.contains(|c: char| c.is_control() && c != '\n' && c != '\t')
    };
    let marks = [" <<", " -> ", " = ", " @", "\\n", "\t"];
    match content.filter(printable) {
        Some("") => writeln!(text, "{head} ="),
        Some(line)
            if !line.contains('\n')
                && line.trim() == line
                && !marks.iter().any(|mark| line.contains(mark)) =>
        {
            writeln!(text, "{head} = {line}")
        }
        Some(content) => {
            let mut mark = "END".to_owned();
            while content.lines().any(|line| line.trim() == mark) {
                mark.push('_');
            }
            writeln!(text, "{head} <<{mark}\n{content}\n{mark}")
        }
        None => write_binary(text, &head, bytes),
    }
}

/// Writes the parts of a file that are not zero, and its last byte.
fn write_binary(text: &mut String, head: &str, bytes: &[u8]) -> std::fmt::Result {
    const ROW: usize = 16;
    let last = bytes.len().saturating_sub(1) / ROW;
    let mut any = false;
    for (row, chunk) in bytes.chunks(ROW).enumerate() {
        if row == last || chunk.iter().any(|byte| *byte != 0) {
            let digits: String = chunk.iter().map(|byte| format!("{byte:02x}")).collect();
            writeln!(text, "{head} @{:#x} {digits}", row * ROW)?;
            any = true;
        }
    }
    if any { Ok(()) } else { writeln!(text, "{head} @0") }
}

/// A line's number and what is wrong with it.
type Wrong = (usize, String);

struct Parser {
    files: MachineFiles,
    variables: Vec<(String, String)>,
}

impl Parser {
    fn run(&mut self, lines: &[(usize, &str)]) -> std::result::Result<(), Wrong> {
        let mut rest = lines;
        while let Some(((number, line), after)) = rest.split_first() {
            let number = *number;
            let line = self.expand(line.trim(), number)?;
            rest = after;
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            if let Some(variables) = line.strip_prefix("repeat ") {
                let end = matching_end(rest).ok_or((number, "repeat without end".to_owned()))?;
                let (body, after) = rest.split_at(end);
                self.repeat(variables, body, number)?;
                rest = after.get(1..).unwrap_or_default();
            } else if let Some((head, mark)) = line.split_once(" <<") {
                let end = rest.iter().position(|(_, line)| line.trim() == mark);
                let end = end.ok_or_else(|| (number, format!("no line {mark:?} follows")))?;
                let (body, after) = rest.split_at(end);
                let body: std::result::Result<Vec<String>, Wrong> =
                    body.iter().map(|(n, l)| self.expand(l, *n)).collect();
                let head = if head == "probes" { PROBES } else { head };
                self.file(head, &body?.join("\n"), number)?;
                rest = after.get(1..).unwrap_or_default();
            } else {
                self.single(&line, number)?;
            }
        }
        Ok(())
    }

    fn single(&mut self, line: &str, number: usize) -> std::result::Result<(), Wrong> {
        if let Some(variable) = line.strip_prefix("set ") {
            let (name, value) = variable
                .split_once(" = ")
                .ok_or_else(|| (number, format!("{line:?} is not \"set NAME = text\"")))?;
            self.variables.insert(0, (name.to_owned(), value.to_owned()));
            Ok(())
        } else if let Some((path, target)) = line.split_once(" -> ") {
            self.add(path, number, MachineEntry::Link(target.to_owned()))
        } else if let Some((path, content)) = line.split_once(" = ") {
            self.file(path, &content.replace("\\n", "\n"), number)
        } else if let Some(path) = line.strip_suffix(" =") {
            self.file(path, "", number)
        } else if let Some((path, bytes)) = line.split_once(" @") {
            self.binary(path, bytes, number)
        } else if line.starts_with('/') && line.ends_with('/') {
            self.add(line, number, MachineEntry::Folder)
        } else {
            Err((number, format!("{line:?} has no known form")))
        }
    }

    fn repeat(
        &mut self,
        variables: &str,
        body: &[(usize, &str)],
        number: usize,
    ) -> std::result::Result<(), Wrong> {
        let mut lists: Vec<(String, Vec<String>)> = Vec::new();
        for variable in variables.split_whitespace() {
            let list = variable.split_once('=').and_then(|(name, values)| {
                Some((name.to_owned(), list(values).filter(|list| list.len() <= MAX_ENTRIES)?))
            });
            lists.push(list.ok_or_else(|| (number, format!("{variable:?} is not NAME=list")))?);
        }
        let count = lists.first().map_or(0, |(_, values)| values.len());
        if lists.iter().any(|(_, values)| values.len() != count) {
            return Err((number, "lists of different lengths".to_owned()));
        }
        let outer = self.variables.len();
        for step in 0..count {
            for (name, values) in &lists {
                let value = values.get(step).cloned().unwrap_or_default();
                self.variables.insert(0, (name.clone(), value));
            }
            self.run(body)?;
            // Inner variables were inserted in front.
            self.variables.drain(..self.variables.len() - outer);
        }
        Ok(())
    }

    fn expand(&self, line: &str, number: usize) -> std::result::Result<String, Wrong> {
        let mut text = line.to_owned();
        for (name, value) in self.variables.iter().filter(|_| line.contains("${")) {
            text = text.replace(&format!("${{{name}}}"), value);
        }
        if text.starts_with('/') && text.contains("${") {
            return Err((number, format!("unknown variable in {text}")));
        }
        Ok(text)
    }

    /// Adds a file; `head` is a path, optionally followed by permissions in brackets.
    fn file(&mut self, head: &str, content: &str, number: usize) -> std::result::Result<(), Wrong> {
        let (path, mode) = permissions(head, number)?;
        let bytes = format!("{content}\n").into_bytes();
        self.add(path, number, MachineEntry::File { bytes, mode })
    }

    fn binary(&mut self, head: &str, data: &str, number: usize) -> std::result::Result<(), Wrong> {
        let wrong = || (number, format!("{data:?} is not an offset and bytes in hexadecimal"));
        let (path, mode) = permissions(head, number)?;
        let (offset, digits) = data.split_once(' ').unwrap_or((data, ""));
        let offset =
            usize::from_str_radix(offset.trim_start_matches("0x"), 16).map_err(|_| wrong())?;
        let digits: Vec<char> = digits.chars().filter(|c| !c.is_whitespace()).collect();
        let pair = |pair: &[char]| u8::from_str_radix(&pair.iter().collect::<String>(), 16).ok();
        let new: Option<Vec<u8>> = digits.chunks(2).map(pair).collect();
        let new = new.ok_or_else(wrong)?;
        let mut content = self.files.file(path).unwrap_or_default().to_vec();
        let end = offset.checked_add(new.len()).filter(|end| *end as u64 <= MAX_FILE);
        let end = end.ok_or_else(wrong)?;
        content.resize(content.len().max(end), 0);
        content.get_mut(offset..end).ok_or_else(wrong)?.copy_from_slice(&new);
        self.add(path, number, MachineEntry::File { bytes: content, mode })
    }

    fn add(
        &mut self,
        path: &str,
        number: usize,
        entry: MachineEntry,
    ) -> std::result::Result<(), Wrong> {
        let path = path.trim_end_matches('/');
        let strange = path.split('/').skip(1).any(|name| matches!(name, "" | "." | ".."));
        if !path.starts_with('/') || strange {
            return Err((number, format!("{path:?} is not an absolute path")));
        }
        if self.files.entries.len() >= MAX_ENTRIES {
            return Err((number, format!("more than {MAX_ENTRIES} files")));
        }
        self.files.insert(path, entry);
        Ok(())
    }
}

/// A path and its permissions: `/dev/nvidia0 [0666]`.
fn permissions(head: &str, number: usize) -> std::result::Result<(&str, u32), Wrong> {
    let Some((path, mode)) = head.split_once(" [") else { return Ok((head, DEFAULT_MODE)) };
    let mode = u32::from_str_radix(mode.trim_end_matches(']'), 8);
    mode.map(|mode| (path, mode & 0o7777))
        .map_err(|_| (number, format!("{head:?} has no permissions like [0666]")))
}

fn list(values: &str) -> Option<Vec<String>> {
    match values.split_once("..") {
        Some((first, last)) => {
            let (first, last): (u32, u32) = (first.parse().ok()?, last.parse().ok()?);
            let few = last.checked_sub(first)? as usize <= MAX_ENTRIES;
            few.then(|| (first..=last).map(|number| number.to_string()).collect())
        }
        None => Some(values.split(',').map(str::to_owned).collect()),
    }
}

fn matching_end(lines: &[(usize, &str)]) -> Option<usize> {
    let mut depth = 1;
    for (index, (_, line)) in lines.iter().enumerate() {
        match line.trim() {
            "end" => depth -= 1,
            line if line.starts_with("repeat ") => depth += 1,
            _ => {}
        }
        if depth == 0 {
            return Some(index);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::{FileAccess, System};

    #[test]
    fn lines_repeat_and_substitute() {
        let files = MachineFiles::parse(
            "repeat A=x,y B=1..2\nset P = /d/${A}\nrepeat C=7,8\n\
             ${P}/${C} [0600] = ${B}\\nend\nend\nend\n/e @0x2 0aff\n/l -> d/y",
        )
        .unwrap();
        let system = System::of(files);
        assert_eq!(system.list("/l"), ["7", "8"]);
        assert_eq!(system.read("/d/y/8").as_deref(), Some("2\nend"));
        assert_eq!(system.access("/l/8"), FileAccess::Denied);
        assert_eq!(system.read_bytes("/e"), Some(vec![0, 0, 10, 255]));
        assert_eq!(system.real_path("/l/..").as_deref(), Some("/d"));
        assert!(!system.is_live() && !system.exists("/nothing"));
    }

    #[test]
    fn every_content_survives() {
        let mut files = MachineFiles::default();
        let contents: [&[u8]; 14] = [
            b"",
            b"\n",
            b"one\n",
            b"without a line break",
            b"two\nlines\n",
            b" space \n",
            b"a -> b\n",
            b"a = b\n",
            b"a <<END\nEND\n END_ \n",
            b"\ttab\n\n",
            b"${HOME}\n",
            b"\\n\n",
            &[0, 255, 1],
            &[0; 40],
        ];
        for (index, bytes) in contents.iter().enumerate() {
            files.set_bytes(&format!("/f/{index}"), bytes);
            files.set_mode(&format!("/f/{index}"), if index % 2 == 0 { 0o666 } else { 0o600 });
        }
        files.add_link("/l", "f/1");
        files.add_folder("/empty/one");
        let text = files.to_text();
        assert_eq!(MachineFiles::parse(&text).unwrap(), files, "{text}");
        let folder = tempfile::tempdir().unwrap();
        files.unpack(folder.path()).unwrap();
        let system = System::at(folder.path()).unwrap();
        assert_eq!(system.read_bytes("/f/12"), Some(vec![0, 255, 1]));
        assert_eq!(system.access("/f/12"), FileAccess::ReadWrite);
        files.remove("/f");
        assert_eq!(files.entries().len(), 3);
    }

    #[test]
    fn errors_have_the_line() {
        for (text, line, why) in [
            ("/a = 1\nnonsense\n", "line 2", "\"nonsense\" has no known form"),
            ("repeat A=1\n/a =", "line 1", "repeat without end"),
            ("repeat A=1,2 B=1\nend", "line 1", "different lengths"),
            ("repeat A\nend", "line 1", "is not NAME=list"),
            ("\n/a <<END\nx", "line 2", "no line \"END\" follows"),
            ("/a @zz 00", "line 1", "hexadecimal"),
            ("/a @fffffff 00", "line 1", "hexadecimal"),
            ("/a [9] = 1", "line 1", "permissions"),
            ("/${X} = 1", "line 1", "unknown variable"),
            ("set X", "line 1", "set NAME"),
            ("set X 1", "line 1", "set NAME"),
            ("/../etc = 1", "line 1", "not an absolute path"),
            ("a = 1", "line 1", "not an absolute path"),
            ("repeat A=0..4000000000\n/${A} =\nend", "line 1", "NAME=list"),
        ] {
            let error = MachineFiles::parse(text).unwrap_err().to_string();
            assert!(error.contains(line) && error.contains(why), "{text:?}: {error}");
        }
        let bomb = "repeat A=0..999\nrepeat B=0..999\n/${A}/${B} =\nend\nend";
        assert!(MachineFiles::parse(bomb).unwrap_err().to_string().contains("more than"));
    }

    #[test]
    fn what_is_read_can_be_recorded() {
        let folder = tempfile::tempdir().unwrap();
        let all = MachineFiles::parse(
            "/a/file = 1\n/a/unread = 2\n/link -> a\n/dev/x [0660] =\n/other = 3\n/b/empty/",
        );
        all.unwrap().unpack(folder.path()).unwrap();
        let system = System::at(folder.path()).unwrap().tracing();
        let questions = |system: &System| {
            (
                system.read("/link/file"),
                system.list("/a"),
                system.access("/dev/x"),
                system.exists("/missing"),
                system.list("/b"),
                system.link_name("/link"),
            )
        };
        let answers = questions(&system);
        let recorded = MachineFiles::parse(&system.traced().to_text()).unwrap();
        assert!(!recorded.entries().contains_key("/other"));
        let again = System::of(recorded);
        assert_eq!(questions(&again), answers);
        assert_eq!(again.read("/a/unread").as_deref(), Some(""), "not read, so not recorded");
        assert!(System::live().traced().entries().is_empty());
    }
}

//! Records a machine: the files that a report depends on and the results of the probes, without
//! what identifies a person, a host or a network.

use std::net::Ipv6Addr;

use super::probes::RECORDED;
use super::{Evidence, Report};
use warpwire::error::{Error, Kind, Result};
use warpwire::host::{Acs, MachineEntry, MachineFiles, PciAddress, System};

/// Stands for the home folder in a recording.
const HOME: &str = "/home/user";

/// The machine file of a machine, which [`System::at`] reads: the files from which its report and
/// topology are derived, and the results of its probes. A report of the recording says the same.
///
/// Left out, or replaced: host names (which nothing reads), addresses in GIDs, GPU UUIDs, the
/// configuration space of PCIe ports but for access control, the kernel command line but for the
/// IOMMU's options, addresses in the kernel, mounts but for the root's, and the home folder in
/// paths. What remains are names of devices and interfaces, versions, limits, and the variables
/// that decide which libraries programs load.
///
/// # Errors
/// As for [`Evidence::gather`].
///
/// ```
/// use warpwire::host::{MachineFiles, System};
/// let text = warpwire_doctor::record(&System::live())?;
/// assert!(MachineFiles::parse(&text).is_ok());
/// # Ok::<(), warpwire::Error>(())
/// ```
pub fn record(system: &System) -> Result<String> {
    let traced = system.tracing();
    let evidence = Evidence::gather(traced)?;
    // What is read decides what is recorded, so everything that reads is called.
    let _ = Report::of(&evidence);
    let probes = serde_json::to_string_pretty(&evidence.probes).map_err(|why| {
        Error::new(Kind::Malformed, "write the results of the probes").why(why.to_string())
    })?;
    let mut files = evidence.system.traced();
    files.remove(RECORDED);
    strip_process(&mut files);
    let entries = files.entries().clone();
    for (path, entry) in &entries {
        if let MachineEntry::File { bytes, .. } = entry {
            strip(&mut files, system, path, &String::from_utf8_lossy(bytes));
        }
    }
    let version = env!("CARGO_PKG_VERSION");
    let head = format!(
        "# A machine, recorded by `warpwire doctor --record` (version {version}).\n\
         # `warpwire doctor --root` and `warpwire topo --root` read it.\n"
    );
    let text = format!("{head}{}probes <<END\n{probes}\nEND\n", files.to_text());
    Ok(without_home(&text, std::env::var("HOME").ok().as_deref()))
}

/// `/proc/self` leads to a folder with the number of this process.
fn strip_process(files: &mut MachineFiles) {
    let Some(MachineEntry::Link(process)) = files.entries().get("/proc/self").cloned() else {
        return;
    };
    let folder = format!("/proc/{process}");
    let own: Vec<(String, Vec<u8>)> = files
        .entries()
        .range(format!("{folder}/")..)
        .map_while(|(path, entry)| match entry {
            MachineEntry::File { bytes, .. } => {
                Some((path.strip_prefix(&folder)?.to_owned(), bytes.clone()))
            }
            _ => None,
        })
        .collect();
    files.remove(&folder);
    files.remove("/proc/self");
    for (name, bytes) in own {
        files.set_bytes(&format!("/proc/self{name}"), &bytes);
    }
}

/// Removes from a file what the report does not need.
fn strip(files: &mut MachineFiles, system: &System, path: &str, text: &str) {
    let keep = |wanted: &dyn Fn(&str) -> bool| {
        text.lines().filter(|line| wanted(line)).collect::<Vec<_>>().join("\n")
    };
    let name = path.rsplit('/').next().unwrap_or_default();
    match path {
        "/proc/cmdline" => {
            let words = text.split_whitespace().filter(|word| word.contains("iommu"));
            files.set_text(path, &words.collect::<Vec<_>>().join(" "));
        }
        "/proc/cpuinfo" => {
            let flags = text.lines().find(|line| line.starts_with("flags")).unwrap_or_default();
            files.set_text(path, flags);
        }
        "/proc/self/limits" => files.set_text(path, &keep(&|line| line.starts_with("Max locked"))),
        "/proc/self/status" => files.set_text(path, &keep(&|line| line.starts_with("CapEff:"))),
        "/proc/self/mountinfo" => {
            let root = |line: &str| line.split(' ').nth(4) == Some("/");
            files.set_text(path, &keep(&root));
        }
        "/proc/meminfo" => files.set_text(path, &keep(&|line| line.starts_with("Huge"))),
        "/proc/modules" => {
            // The other words are sizes, users, and addresses in the kernel.
            let names = text.lines().filter_map(|line| line.split_whitespace().next());
            files.set_text(path, &names.collect::<Vec<_>>().join("\n"));
        }
        "/proc/1/cgroup" => files.set_text(path, &without_identifiers(text)),
        _ if name == "information" => {
            files.set_text(path, &keep(&|line| !line.trim_start().starts_with("GPU UUID")));
        }
        // The first six lines are the BARs.
        _ if name == "resource" => {
            files.set_text(path, &text.lines().take(6).collect::<Vec<_>>().join("\n"));
        }
        _ if name == "config" => strip_config(files, system, path),
        _ if path.contains("/gids/") => {
            // Tables of a thousand free entries are usual.
            if text.trim().parse().is_ok_and(|gid: Ipv6Addr| gid.is_unspecified()) {
                files.remove(path);
            } else if let Some(gid) = neutral_gid(text.trim(), name) {
                files.set_text(path, &gid);
            }
        }
        _ => {}
    }
}

/// Long hexadecimal words, such as the names of containers.
fn without_identifiers(text: &str) -> String {
    let is_part = |c: char| c.is_ascii_hexdigit() || c == '-';
    let mut result = String::new();
    let mut rest = text;
    while let Some(start) = rest.find(is_part) {
        let (before, found) = rest.split_at(start);
        let end = found.find(|c: char| !is_part(c)).unwrap_or(found.len());
        let (word, after) = found.split_at(end);
        result.push_str(before);
        result.push_str(if word.len() >= 16 { "…" } else { word });
        rest = after;
    }
    result + rest
}

/// A configuration space with nothing but the access control of a port, or of the same length as
/// an unprivileged user sees.
fn strip_config(files: &mut MachineFiles, system: &System, path: &str) {
    let folder = path.rsplit('/').nth(1).unwrap_or_default();
    let Ok(address) = folder.parse::<PciAddress>() else { return };
    let mut config = vec![0; 0x1000];
    match system.acs(&address) {
        Acs::Control(bits) => {
            config[0x100..0x104].copy_from_slice(&[0x0d, 0, 1, 0]);
            config[0x106..0x108].copy_from_slice(&bits.to_le_bytes());
        }
        Acs::Absent => {}
        Acs::UnknownNeedsRoot => config.truncate(64),
    }
    files.set_bytes(path, &config);
}

/// An address of the same kind that is reserved for documentation; `None` for a free entry.
fn neutral_gid(gid: &str, index: &str) -> Option<String> {
    let address: Ipv6Addr = gid.parse().ok()?;
    let index: u16 = index.parse().ok()?;
    let words = match (address.to_ipv4_mapped(), address.segments()) {
        (_, [0, 0, 0, 0, 0, 0, 0, 0]) => return None,
        (Some(_), _) => [0, 0, 0, 0, 0, 0xffff, 0xc000, 0x0200 | (index & 0xff)],
        (None, [0xfe80, ..]) => [0xfe80, 0, 0, 0, 0, 0, 0, index.wrapping_add(1)],
        (None, _) => [0x2001, 0x0db8, 0, 0, 0, 0, 0, index.wrapping_add(1)],
    };
    Some(words.map(|word| format!("{word:04x}")).join(":"))
}

/// Home folders of system accounts say nothing about a person.
fn without_home(text: &str, home: Option<&str>) -> String {
    match home.map(|home| home.trim_end_matches('/')) {
        Some(home) if home.starts_with('/') && home.len() > 1 && home != "/root" => {
            text.replace(home, HOME)
        }
        _ => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_become_those_of_documentation() {
        for (gid, neutral) in [
            ("fe80:0000:0000:0000:0e42:a1ff:fe00:0001", "fe80:0000:0000:0000:0000:0000:0000:0004"),
            ("0000:0000:0000:0000:0000:ffff:0a00:0001", "0000:0000:0000:0000:0000:ffff:c000:0203"),
            ("fd00:0000:0000:0000:0000:0000:0000:0007", "2001:0db8:0000:0000:0000:0000:0000:0004"),
        ] {
            assert_eq!(neutral_gid(gid, "3").as_deref(), Some(neutral));
        }
        for free in ["0000:0000:0000:0000:0000:0000:0000:0000", "garbage"] {
            assert_eq!(neutral_gid(free, "3"), None);
        }
    }

    #[test]
    fn identifiers_and_homes_are_replaced() {
        let group = "0::/docker/0123456789abcdef0123456789abcdef/kubepods-x\n";
        assert_eq!(without_identifiers(group), "0::/docker/…/kubepods-x\n");
        let text = "LD_LIBRARY_PATH=/home/ann/lib:/opt";
        assert_eq!(without_home(text, Some("/home/ann/")), "LD_LIBRARY_PATH=/home/user/lib:/opt");
        for none in [None, Some("/"), Some(""), Some("/root")] {
            assert_eq!(without_home(text, none), text);
        }
    }
}

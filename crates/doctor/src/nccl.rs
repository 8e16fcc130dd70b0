//! Which network NCCL would use, by the rules of its plugin loader.

use std::collections::BTreeMap;
use std::fmt::Write;

use serde::Serialize;

use super::fold::{fold_names, wrap};
use super::verdict::{Answer, usable_devices};
use super::{Evidence, LibraryProbe, TextStyle, printable};

/// The names in NCCL_NET_PLUGIN that NCCL tries at most.
const MAX_PLUGINS: usize = 14;
const DEFAULT_PLUGIN: &str = "libnccl-net.so";
/// The NCCL releases whose interface our plugin has: 2.19 to 2.32.
const OLDEST_NCCL: (u32, u32) = (2, 19);
const OURS: &str = "Warpwire";
pub(super) const UNKNOWN: &str = "unknown";
const USE_OURS: &str = "start the program with `warpwire nccl -- PROGRAM`, or set what \
                        `warpwire nccl --env` prints";

/// Which network NCCL would use in a program with this environment, and why.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct NcclReport {
    /// `Warpwire`, `IB`, `Socket`, `plugin` for another plugin, `none` if NCCL would end with an
    /// error, `unknown` if the recording does not tell.
    pub network: &'static str,
    /// Whether that is an RDMA network or a plugin (`yes`), TCP (`partly`), or none (`no`).
    pub answer: Answer,
    /// The network in words, and why it is that one.
    pub text: String,
    /// The plugins that NCCL would look for, in its order, up to the one it loads.
    pub plugins: Vec<NcclPlugin>,
    /// Why this project's plugin is not used; `None` if it is.
    pub not_ours: Option<String>,
    /// What to do.
    pub fix: Option<String>,
    /// The `libnccl.so.2` that the dynamic linker finds; Python packages bring their own.
    pub nccl: Option<LibraryProbe>,
    /// Further findings.
    pub notes: Vec<String>,
}

/// A plugin that NCCL would look for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct NcclPlugin {
    /// As NCCL_NET_PLUGIN has it, or the default.
    pub asked: String,
    /// The names under which NCCL looks for it.
    pub names: Vec<String>,
    /// The library, if there is one.
    pub library: Option<LibraryProbe>,
}

/// The plugins of this environment: as named there, and the libraries that NCCL tries for each.
pub(super) fn plugin_names(environment: &BTreeMap<String, String>) -> Vec<(String, Vec<String>)> {
    let Some(setting) = environment.get("NCCL_NET_PLUGIN") else {
        return vec![(DEFAULT_PLUGIN.to_owned(), vec![DEFAULT_PLUGIN.to_owned()])];
    };
    let asked = setting.split(',').map(str::trim).filter(|name| !name.is_empty());
    let asked = asked.take_while(|name| !name.eq_ignore_ascii_case("none")).take(MAX_PLUGINS);
    let names = |name: &str| {
        let whole = name.contains('/') || (name.starts_with("lib") && name.ends_with(".so"));
        let mut names = vec![name.to_owned()];
        names.extend((!whole).then(|| format!("libnccl-net-{name}.so")));
        (name.to_owned(), names)
    };
    asked.map(names).collect()
}

struct Search<'a> {
    evidence: &'a Evidence,
    libraries: &'a BTreeMap<String, LibraryProbe>,
    plugins: Vec<NcclPlugin>,
}

impl NcclReport {
    pub(super) fn of(evidence: &Evidence) -> Self {
        let Some(libraries) = &evidence.probes.libraries else {
            return Self {
                network: UNKNOWN,
                answer: Answer::Partly,
                text: "not known: the recording does not say which libraries are installed"
                    .to_owned(),
                plugins: Vec::new(),
                not_ours: Some("the recording does not say".to_owned()),
                fix: None,
                nccl: None,
                notes: Vec::new(),
            };
        };
        let mut plugins = Vec::new();
        for (asked, names) in plugin_names(&evidence.probes.environment) {
            let library = names.iter().find_map(|name| libraries.get(name)).cloned();
            let found = library.is_some();
            plugins.push(NcclPlugin { asked, names, library });
            if found {
                break;
            }
        }
        Search { evidence, libraries, plugins }.report()
    }

    /// The report as text, for `doctor --nccl`.
    pub fn to_text(&self, style: TextStyle) -> String {
        let mut text = String::new();
        let mut paragraph = |line: &str, indent: usize| {
            for (number, line) in wrap(&printable(line), style.width.saturating_sub(indent + 4))
                .into_iter()
                .enumerate()
            {
                let indent = if number == 0 { indent } else { indent + 4 };
                // Writing to a string cannot fail.
                let _ = writeln!(text, "{:indent$}{line}", "");
            }
        };
        paragraph(&format!("NCCL would use: {}", self.text), 0);
        if self.network == UNKNOWN {
            return text;
        }
        paragraph("expected, not tried; NCCL_DEBUG=INFO prints what NCCL does", 4);
        if let Some(why) = &self.not_ours {
            paragraph(&format!("why not Warpwire's plugin: {why}"), 4);
        }
        if let Some(fix) = &self.fix {
            paragraph(&format!("fix: {fix}"), 4);
        }
        paragraph("plugins, in NCCL's order:", 0);
        if self.plugins.is_empty() {
            paragraph("none (NCCL_NET_PLUGIN)", 4);
        }
        for plugin in &self.plugins {
            let found = match &plugin.library {
                Some(library) => describe(library),
                None if plugin.names.len() > 1 => {
                    format!("not found, neither as {}", plugin.names.join(" nor as "))
                }
                None => "not found".to_owned(),
            };
            paragraph(&format!("{}: {found}", plugin.asked), 4);
        }
        match &self.nccl {
            Some(library) => paragraph(&format!("NCCL: {} ({})", library.file, library.by), 0),
            None => paragraph(
                "NCCL: the dynamic linker finds no libnccl.so.2; Python packages bring their own",
                0,
            ),
        }
        for note in &self.notes {
            paragraph(&format!("note: {note}"), 0);
        }
        text
    }
}

/// A library's file, where it was found, and whose it is.
pub(super) fn describe(library: &LibraryProbe) -> String {
    let whose = match &library.warpwire {
        Some(version) => format!("Warpwire's, {}", with_word(version)),
        None => "another project's".to_owned(),
    };
    format!("{} ({}, {whose})", library.path, library.by)
}

/// `version 0.2.0`, or `of unknown version`.
pub(super) fn with_word(version: &str) -> String {
    let number = version.starts_with(|c: char| c.is_ascii_digit());
    if number { format!("version {version}") } else { version.to_owned() }
}

impl Search<'_> {
    fn variable(&self, name: &str) -> Option<&str> {
        self.evidence.probes.environment.get(name).map(String::as_str)
    }

    /// The plugin that NCCL loads.
    fn loaded(&self) -> Option<&LibraryProbe> {
        self.plugins.iter().find_map(|plugin| plugin.library.as_ref())
    }

    fn report(self) -> NcclReport {
        let (network, answer, text) = self.choose();
        let not_ours = (network != OURS).then(|| self.why_not_ours());
        let fix = match (network, self.variable("NCCL_NET")) {
            ("Socket" | "none", Some(demanded)) if !demanded.eq_ignore_ascii_case(OURS) => {
                Some(format!("unset NCCL_NET (it is {demanded}), or {USE_OURS}"))
            }
            ("Socket" | "none", _) => Some(USE_OURS.to_owned()),
            _ => None,
        };
        let notes = self.notes(network);
        let nccl = self.libraries.get("libnccl.so.2").cloned();
        NcclReport { network, answer, text, plugins: self.plugins, not_ours, fix, nccl, notes }
    }

    fn choose(&self) -> (&'static str, Answer, String) {
        let demanded = self.variable("NCCL_NET");
        let demands = |name: &str| demanded.is_some_and(|text| text.eq_ignore_ascii_case(name));
        let none = |why: String| {
            ("none", Answer::No, format!("nothing: it ends with an error, because {why}"))
        };
        if demands("Socket") {
            return ("Socket", Answer::Partly, "Socket (TCP): NCCL_NET=Socket demands it".into());
        }
        if demands("IB") {
            return match self.infiniband() {
                Ok(devices) => {
                    ("IB", Answer::Yes, format!("IB (its own verbs transport): {devices}"))
                }
                Err(why) => none(format!("NCCL_NET=IB demands RDMA devices, and {why}")),
            };
        }
        match (self.loaded(), demanded) {
            (Some(library), Some(name)) if library.warpwire.is_some() && !demands(OURS) => {
                none(format!("NCCL_NET={name}, but the plugin is {}", describe(library)))
            }
            (Some(library), _) if library.warpwire.is_some() => {
                (OURS, Answer::Yes, format!("Warpwire: the plugin {}", describe(library)))
            }
            (Some(library), Some(name)) if demands(OURS) => {
                none(format!("NCCL_NET={name}, but the plugin is {}", describe(library)))
            }
            (Some(library), _) => (
                "plugin",
                Answer::Yes,
                format!(
                    "the plugin {}, if it finds a device; otherwise IB or Socket",
                    describe(library)
                ),
            ),
            (None, Some(name)) => {
                none(format!("NCCL_NET={name} demands a plugin, and none is found"))
            }
            (None, None) => match self.infiniband() {
                Ok(devices) => {
                    ("IB", Answer::Yes, format!("IB (its own verbs transport): {devices}"))
                }
                Err(why) => (
                    "Socket",
                    Answer::Partly,
                    format!("Socket (TCP): no plugin is found, and {why}"),
                ),
            },
        }
    }

    /// The devices of NCCL's own RDMA transport, or why it has none.
    fn infiniband(&self) -> Result<String, String> {
        if self.variable("NCCL_IB_DISABLE") == Some("1") {
            return Err("NCCL_IB_DISABLE=1".to_owned());
        }
        let named = self.variable("NCCL_IBVERBS_LIB");
        let names = named.map_or(vec!["libibverbs.so", "libibverbs.so.1"], |name| vec![name]);
        let library = names.iter().find_map(|name| self.libraries.get(*name));
        let Some(library) = library else {
            return Err(format!("{} is not found", names.join(" or ")));
        };
        match &library.warpwire {
            Some(_) => Ok(format!("the software HCA, through {}", describe(library))),
            None => usable_devices(self.evidence).map(|names| fold_names(&names)),
        }
    }

    fn why_not_ours(&self) -> String {
        let setting = self.variable("NCCL_NET_PLUGIN");
        match (self.loaded(), setting) {
            (Some(library), _) if library.warpwire.is_some() => {
                let demanded = self.variable("NCCL_NET").unwrap_or_default();
                format!("NCCL_NET={demanded} demands another network")
            }
            (Some(library), None) => format!("{DEFAULT_PLUGIN} is {}", describe(library)),
            (Some(library), Some(setting)) => {
                format!("NCCL_NET_PLUGIN={setting} is {}", describe(library))
            }
            (None, None) => {
                format!("NCCL_NET_PLUGIN is not set, and there is no {DEFAULT_PLUGIN}")
            }
            (None, Some(setting)) if self.plugins.is_empty() => {
                format!("NCCL_NET_PLUGIN={setting} turns plugins off")
            }
            (None, Some(setting)) => {
                format!("NCCL_NET_PLUGIN={setting}, but there is no such library")
            }
        }
    }

    fn notes(&self, network: &str) -> Vec<String> {
        let mut notes = Vec::new();
        if network == OURS && self.variable("NCCL_NET_PLUGIN_REF_COUNT") != Some("1") {
            notes.push(
                "NCCL 2.28 forgets the plugin when its last communicator ends, and then uses \
                 Socket: set NCCL_NET_PLUGIN_REF_COUNT=1"
                    .to_owned(),
            );
        }
        if network == OURS && self.variable("NCCL_NET").is_none() {
            notes.push(
                "if the plugin finds no device, NCCL uses IB or Socket; NCCL_NET=Warpwire makes \
                 that an error"
                    .to_owned(),
            );
        }
        let version = self.libraries.get("libnccl.so.2").and_then(|nccl| nccl_version(&nccl.file));
        if let Some((major, minor)) = version.filter(|version| *version < OLDEST_NCCL) {
            notes.push(format!(
                "NCCL {major}.{minor} is older than {}.{}, the oldest that Warpwire's plugin is for",
                OLDEST_NCCL.0, OLDEST_NCCL.1
            ));
        }
        notes
    }
}

/// 2.28 of `libnccl.so.2.28.9`.
fn nccl_version(file: &str) -> Option<(u32, u32)> {
    let mut numbers = file.rsplit('/').next()?.strip_prefix("libnccl.so.")?.split('.');
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plugins_are_named_as_nccl_names_them() {
        let of = |setting: Option<&str>| {
            let setting = setting.map(|text| ("NCCL_NET_PLUGIN".to_owned(), text.to_owned()));
            plugin_names(&setting.into_iter().collect())
                .into_iter()
                .flat_map(|(_, names)| names)
                .collect::<Vec<_>>()
        };
        assert_eq!(of(None), ["libnccl-net.so"]);
        assert_eq!(of(Some("aws-ofi")), ["aws-ofi", "libnccl-net-aws-ofi.so"]);
        assert_eq!(of(Some("libx.so, /a/b")), ["libx.so", "/a/b"]);
        assert_eq!(of(Some("a,none,b")), ["a", "libnccl-net-a.so"]);
        assert!(of(Some("none")).is_empty() && of(Some("NONE")).is_empty());
        assert_eq!(of(Some(&"x,".repeat(20))).len(), 2 * MAX_PLUGINS);
    }

    #[test]
    fn ncclls_version_is_in_its_file_name() {
        assert_eq!(nccl_version("/usr/lib/libnccl.so.2.28.9"), Some((2, 28)));
        for odd in ["/usr/lib/libnccl.so.2", "", "libnccl.so.x.y"] {
            assert_eq!(nccl_version(odd), None, "{odd}");
        }
    }
}

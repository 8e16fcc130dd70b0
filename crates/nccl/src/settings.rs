//! Environment variables.

use std::time::Duration;

use warpwire::verbs::ProgressMode;

use crate::gdr::demands_ll128;
use crate::lanes::MAX_LANES;

/// How long an engine's thread spins after its last work. A collective's steps follow each other
/// within a millisecond, and waking a thread costs more than most of them.
const SPIN: Duration = Duration::from_millis(1);
/// Messages are split into parts of at least this many bytes by default.
const STRIPE: u64 = 64 << 10;
/// Port speed where the kernel knows none, in Mbit/s.
const SPEED: u32 = 100_000;

/// Which links a device has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LinkChoice {
    /// Shared memory between processes of one machine, UDP to others.
    Auto,
    Shm,
    Udp,
}

#[derive(Clone, Debug)]
pub(crate) struct Settings {
    /// Interfaces or addresses; empty: all usable interfaces.
    pub devices: String,
    pub link: LinkChoice,
    /// Engines of a device, and queue pairs of a connection.
    pub engines: usize,
    pub progress_mode: ProgressMode,
    /// Minimum bytes of a part of a message.
    pub stripe: u64,
    /// GPU memory in sends and receives.
    pub gdr: bool,
    /// Port speed in Mbit/s; `None`: the kernel's, or [`SPEED`].
    pub speed: Option<u32>,
}

impl Settings {
    /// # Errors
    /// A value that is none: the text has its variable and the values that there are.
    pub(crate) fn read(variable: impl Fn(&str) -> Option<String>) -> Result<Self, String> {
        let value = |name: &str| variable(name).unwrap_or_default().trim().to_owned();
        let wrong = |name: &str, value: &str, known: &str| {
            format!("{name} is {value:?}; unset it, or set {known}")
        };
        let link = match value("WARPWIRE_NCCL_LINK").as_str() {
            "" | "auto" => LinkChoice::Auto,
            "shm" => LinkChoice::Shm,
            "udp" => LinkChoice::Udp,
            other => return Err(wrong("WARPWIRE_NCCL_LINK", other, "auto, shm or udp")),
        };
        let gdr = match value("WARPWIRE_NCCL_GDR").as_str() {
            "" | "0" => false,
            "1" => true,
            other => return Err(wrong("WARPWIRE_NCCL_GDR", other, "0 or 1")),
        };
        let protocols = value("NCCL_PROTO");
        if gdr && demands_ll128(&protocols) {
            return Err(format!(
                "WARPWIRE_NCCL_GDR is 1 and NCCL_PROTO is {protocols:?}: CPUs do not write the 128 \
                 bytes of LL128 in order; set NCCL_PROTO=LL,Simple, or unset one of the two"
            ));
        }
        let text = value("WARPWIRE_NCCL_PROGRESS");
        let Some(progress_mode) = ProgressMode::from_setting(&text, SPIN) else {
            let known = "auto, thread or microseconds to spin";
            return Err(wrong("WARPWIRE_NCCL_PROGRESS", &text, known));
        };
        let number = |name: &str, range: std::ops::RangeInclusive<u64>| {
            let text = value(name);
            match text.parse::<u64>() {
                _ if text.is_empty() => Ok(None),
                Ok(number) if range.contains(&number) => Ok(Some(number)),
                _ => Err(wrong(name, &text, &format!("{} to {}", range.start(), range.end()))),
            }
        };
        // Two ends and NCCL's own threads are to have cores as well.
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let engines = number("WARPWIRE_NCCL_ENGINES", 1..=MAX_LANES as u64)?;
        let speed = number("WARPWIRE_NCCL_SPEED", 1..=10_000_000)?;
        Ok(Self {
            devices: value("WARPWIRE_NCCL_DEVICES"),
            link,
            engines: engines.map_or((cores / 4).clamp(1, 4), |engines| engines as usize),
            progress_mode,
            gdr,
            stripe: number("WARPWIRE_NCCL_STRIPE", 4096..=1 << 30)?.unwrap_or(STRIPE),
            speed: speed.map(|speed| speed as u32),
        })
    }

    /// The settings of this process.
    pub(crate) fn from_env() -> Result<Self, String> {
        Self::read(|name| std::env::var_os(name).map(|value| value.to_string_lossy().into_owned()))
    }

    /// Whether engines have threads of their own, so that calls of NCCL's need not run them.
    pub(crate) fn is_threaded(&self) -> bool {
        matches!(self.progress_mode, ProgressMode::Thread { .. })
    }

    /// The speed to announce for an interface that the kernel says has `known` Mbit/s.
    pub(crate) fn speed(&self, known: Option<u32>) -> u32 {
        self.speed.or(known.filter(|speed| *speed > 0)).unwrap_or(SPEED)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(pairs: &[(&str, &str)]) -> Result<Settings, String> {
        let find = |name: &str| pairs.iter().find(|(known, _)| *known == name);
        Settings::read(|name| find(name).map(|(_, value)| (*value).to_owned()))
    }

    #[test]
    fn defaults_and_values() {
        let plain = read(&[]).unwrap();
        assert_eq!((plain.link, plain.stripe), (LinkChoice::Auto, STRIPE));
        assert!((1..=4).contains(&plain.engines) && !plain.gdr);
        assert_eq!((plain.speed(None), plain.speed(Some(25_000))), (SPEED, 25_000));
        let set = read(&[
            ("WARPWIRE_NCCL_LINK", "udp"),
            ("WARPWIRE_NCCL_ENGINES", "8"),
            ("WARPWIRE_NCCL_PROGRESS", "50"),
            ("WARPWIRE_NCCL_STRIPE", "4096"),
            ("WARPWIRE_NCCL_SPEED", "400000"),
            ("WARPWIRE_NCCL_DEVICES", " lo "),
            ("WARPWIRE_NCCL_GDR", "1"),
        ]);
        let set = set.unwrap();
        assert!(set.gdr);
        assert_eq!((set.link, set.engines, set.stripe), (LinkChoice::Udp, 8, 4096));
        assert_eq!((set.devices.as_str(), set.speed(Some(1))), ("lo", 400_000));
        let spin = Duration::from_micros(50);
        assert_eq!(set.progress_mode, ProgressMode::Thread { spin, core: None });
    }

    #[test]
    fn gpu_memory_excludes_ll128() {
        let gdr = ("WARPWIRE_NCCL_GDR", "1");
        for fine in ["", "Simple", "LL,Simple", "^LL128", "^LL,LL128", "allreduce:LL;^ll128"] {
            assert!(read(&[gdr, ("NCCL_PROTO", fine)]).is_ok(), "{fine}");
        }
        for wrong in ["LL128", "Simple, ll128", "^LL", "^LL,Simple", "LL;allgather:LL128"] {
            let why = read(&[gdr, ("NCCL_PROTO", wrong)]).unwrap_err();
            assert!(why.contains("WARPWIRE_NCCL_GDR") && why.contains(wrong), "{why}");
            assert!(read(&[("NCCL_PROTO", wrong)]).is_ok(), "only with GPU memory");
        }
    }

    #[test]
    fn wrong_values_name_their_variable() {
        for (name, value) in [
            ("WARPWIRE_NCCL_LINK", "tcp"),
            ("WARPWIRE_NCCL_ENGINES", "0"),
            ("WARPWIRE_NCCL_ENGINES", "9"),
            ("WARPWIRE_NCCL_PROGRESS", "never"),
            ("WARPWIRE_NCCL_STRIPE", "1"),
            ("WARPWIRE_NCCL_SPEED", "fast"),
            ("WARPWIRE_NCCL_GDR", "yes"),
        ] {
            let why = read(&[(name, value)]).unwrap_err();
            assert!(why.contains(name) && why.contains(value) && why.contains("set "), "{why}");
        }
    }
}

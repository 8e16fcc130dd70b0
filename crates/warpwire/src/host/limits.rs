//! Kernel limits: locked memory, socket buffers, huge pages.

use std::fmt;

use super::System;
use crate::units;

/// Bit of `CAP_IPC_LOCK` in a capability set: allows a process to lock memory beyond the limit.
const CAP_IPC_LOCK: u32 = 14;

/// A resource limit in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limit {
    /// No limit.
    Unlimited,
    /// A limit of this many bytes.
    Bytes(u64),
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unlimited => f.write_str("unlimited"),
            Self::Bytes(count) => f.write_str(&units::bytes(*count)),
        }
    }
}

/// The limit on locked memory (`RLIMIT_MEMLOCK`), which memory registered with a NIC counts
/// against.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Memlock {
    /// The effective limit.
    pub soft: Limit,
    /// The maximum to which the process may raise it.
    pub hard: Limit,
    /// Whether the process may lock memory beyond the limit (`CAP_IPC_LOCK`).
    pub exempt: bool,
}

/// Huge pages of the default size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HugePages {
    /// Number of reserved pages.
    pub total: u64,
    /// Number of reserved pages that are not in use.
    pub free: u64,
    /// Page size in bytes.
    pub page_bytes: u64,
}

impl System {
    /// The limit on locked memory; `None` if it cannot be read.
    pub fn memlock(&self) -> Option<Memlock> {
        let (soft, hard) = parse_memlock(&self.read("/proc/self/limits")?)?;
        let status = self.read("/proc/self/status").unwrap_or_default();
        Some(Memlock { soft, hard, exempt: has_capability(&status, CAP_IPC_LOCK) })
    }

    /// The reserved huge pages; `None` if `/proc/meminfo` does not list them.
    pub fn huge_pages(&self) -> Option<HugePages> {
        parse_huge_pages(&self.read("/proc/meminfo")?)
    }

    /// Memory that processes can still get, in bytes: `MemAvailable`, and not more than the limit
    /// of this container. `None` if `/proc/meminfo` does not have it.
    pub fn available_memory(&self) -> Option<u64> {
        let text = self.read("/proc/meminfo")?;
        let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
        let kilobytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
        let limit =
            self.read("/sys/fs/cgroup/memory.max").and_then(|text| text.trim().parse().ok());
        Some(kilobytes.saturating_mul(1024).min(limit.unwrap_or(u64::MAX)))
    }

    /// `rmem_max` and `wmem_max`: maximum socket buffers of an unprivileged process, in bytes.
    pub fn socket_buffer_limits(&self) -> (Option<u64>, Option<u64>) {
        let limit = |name| self.read(name)?.parse().ok();
        (limit("/proc/sys/net/core/rmem_max"), limit("/proc/sys/net/core/wmem_max"))
    }
}

fn parse_memlock(text: &str) -> Option<(Limit, Limit)> {
    let line = text.lines().find_map(|line| line.strip_prefix("Max locked memory"))?;
    let mut columns = line.split_whitespace().map(|column| match column {
        "unlimited" => Some(Limit::Unlimited),
        number => number.parse().ok().map(Limit::Bytes),
    });
    Some((columns.next()??, columns.next()??))
}

fn has_capability(status: &str, bit: u32) -> bool {
    status
        .lines()
        .find_map(|line| line.strip_prefix("CapEff:"))
        .and_then(|set| u64::from_str_radix(set.trim(), 16).ok())
        .is_some_and(|set| set >> bit & 1 == 1)
}

fn parse_huge_pages(text: &str) -> Option<HugePages> {
    let number = |key: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(key))?;
        line.split_whitespace().next()?.parse::<u64>().ok()
    };
    Some(HugePages {
        total: number("HugePages_Total:")?,
        free: number("HugePages_Free:")?,
        page_bytes: number("Hugepagesize:")?.checked_mul(1024)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_memlock_limit_is_parsed() {
        let text = "Limit                     Soft Limit           Hard Limit           Units\n\
                    Max open files            20000                20000                files\n\
                    Max locked memory         8388608              unlimited            bytes";
        assert_eq!(parse_memlock(text), Some((Limit::Bytes(8 << 20), Limit::Unlimited)));
        assert_eq!(Limit::Bytes(8 << 20).to_string(), "8 MiB");
        for bad in ["", "Max locked memory", "Max locked memory a b", "Max locked memory -1 -1"] {
            assert_eq!(parse_memlock(bad), None, "{bad}");
        }
    }

    #[test]
    fn capability_bits_are_parsed() {
        assert!(has_capability("Name:\tx\nCapEff:\t0000000000004000", CAP_IPC_LOCK));
        for none in ["", "CapEff:\t0000000000003fff", "CapEff: zz", "CapPrm: ffff"] {
            assert!(!has_capability(none, CAP_IPC_LOCK), "{none}");
        }
    }

    #[test]
    fn huge_pages_are_parsed() {
        let text = "MemTotal: 1 kB\nHugePages_Total:       4\nHugePages_Free:        3\n\
                    Hugepagesize:       2048 kB";
        let pages = parse_huge_pages(text).unwrap();
        assert_eq!((pages.total, pages.free, pages.page_bytes), (4, 3, 2 << 20));
        for bad in
            ["", "HugePages_Total: x\nHugePages_Free: 1\nHugepagesize: 1", "HugePages_Total:"]
        {
            assert_eq!(parse_huge_pages(bad), None, "{bad}");
        }
    }
}

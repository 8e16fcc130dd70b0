//! Limits that the kernel sets: locked memory, socket buffers, huge pages.

use std::fmt;

use super::System;
use crate::units;

/// CAP_IPC_LOCK's bit in a capability set: the right to lock memory past the limit.
const CAP_IPC_LOCK: u32 = 14;

/// A limit in bytes, or none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limit {
    /// No limit.
    Unlimited,
    /// This many bytes.
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

/// How much memory this process may lock, which registration with a NIC counts against.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Memlock {
    /// The limit in force.
    pub soft: Limit,
    /// How far the process may raise it.
    pub hard: Limit,
    /// Whether the process may lock memory past the limit (CAP_IPC_LOCK).
    pub exempt: bool,
}

/// Huge pages of the default size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HugePages {
    /// Reserved.
    pub total: u64,
    /// Reserved and not in use.
    pub free: u64,
    /// Size of one, in bytes.
    pub page_bytes: u64,
}

impl System {
    /// The limit on locked memory; `None` if it cannot be read.
    pub fn memlock(&self) -> Option<Memlock> {
        let (soft, hard) = parse_memlock(&self.read("/proc/self/limits")?)?;
        let status = self.read("/proc/self/status").unwrap_or_default();
        Some(Memlock { soft, hard, exempt: has_capability(&status, CAP_IPC_LOCK) })
    }

    /// The huge pages set aside; `None` if the kernel does not say.
    pub fn huge_pages(&self) -> Option<HugePages> {
        parse_huge_pages(&self.read("/proc/meminfo")?)
    }

    /// The largest receive and send buffers that an ordinary user's socket may ask for, in bytes.
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
    fn locked_memory_is_read() {
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
    fn capabilities_are_bits() {
        assert!(has_capability("Name:\tx\nCapEff:\t0000000000004000", CAP_IPC_LOCK));
        for none in ["", "CapEff:\t0000000000003fff", "CapEff: zz", "CapPrm: ffff"] {
            assert!(!has_capability(none, CAP_IPC_LOCK), "{none}");
        }
    }

    #[test]
    fn huge_pages_are_read() {
        let text = "MemTotal: 1 kB\nHugePages_Total:       4\nHugePages_Free:        3\nHugepagesize:       2048 kB";
        let pages = parse_huge_pages(text).unwrap();
        assert_eq!((pages.total, pages.free, pages.page_bytes), (4, 3, 2 << 20));
        for bad in
            ["", "HugePages_Total: x\nHugePages_Free: 1\nHugepagesize: 1", "HugePages_Total:"]
        {
            assert_eq!(parse_huge_pages(bad), None, "{bad}");
        }
    }
}

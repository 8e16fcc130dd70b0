//! NUMA nodes and their processors.

use super::System;

/// A NUMA node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NumaNode {
    /// Its number.
    pub id: u32,
    /// Its processors, as the kernel writes them: `0-15,32-47`. Empty for a node of memory only.
    pub cpu_list: String,
    /// How many processors that is; `None` if the list makes no sense.
    pub cpu_count: Option<u32>,
}

impl System {
    /// Every NUMA node; empty if the kernel shows none.
    pub fn numa_nodes(&self) -> Vec<NumaNode> {
        let folder = "/sys/devices/system/node";
        let names = self.list(folder);
        names
            .iter()
            .filter_map(|name| {
                let id = name.strip_prefix("node")?.parse().ok()?;
                let cpu_list = self.read(&format!("{folder}/{name}/cpulist"))?;
                Some(NumaNode {
                    id,
                    cpu_count: count_cpus(&cpu_list),
                    cpu_list,
                })
            })
            .collect()
    }
}

/// How many processors `0-3,8` names.
fn count_cpus(list: &str) -> Option<u32> {
    if list.is_empty() {
        return Some(0);
    }
    list.split(',').try_fold(0_u32, |count, range| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last): (u32, u32) = (first.parse().ok()?, last.parse().ok()?);
        count.checked_add(last.checked_sub(first)?.checked_add(1)?)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processor_lists_are_counted() {
        for (list, count) in [("", 0), ("0", 1), ("0-15", 16), ("0-3,8,10-11", 7)] {
            assert_eq!(count_cpus(list), Some(count), "{list}");
        }
    }

    #[test]
    fn nonsense_is_not_counted() {
        for list in [
            "a",
            "3-0",
            "0-",
            ",",
            "0-4294967295",
            "0-3,0-4294967294",
            "-1",
        ] {
            assert_eq!(count_cpus(list), None, "{list}");
        }
    }
}

//! NUMA nodes and their processors.

use super::System;

/// A NUMA node, from `/sys/devices/system/node`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NumaNode {
    /// Node number.
    pub id: u32,
    /// Its CPUs, in the kernel's list format: `0-15,32-47`. Empty for a memory-only node, and if
    /// the list is malformed.
    pub cpu_list: String,
    /// Number of CPUs in the list; `None` if it is malformed.
    pub cpu_count: Option<u32>,
}

impl System {
    /// All NUMA nodes; empty if sysfs lists none.
    pub fn numa_nodes(&self) -> Vec<NumaNode> {
        let folder = "/sys/devices/system/node";
        let names = self.list(folder);
        names
            .iter()
            .filter_map(|name| {
                let id = name.strip_prefix("node")?.parse().ok()?;
                let cpu_list = self.read(&format!("{folder}/{name}/cpulist"))?;
                let cpu_count = count_cpus(&cpu_list);
                Some(NumaNode {
                    id,
                    cpu_list: cpu_count.map(|_| cpu_list).unwrap_or_default(),
                    cpu_count,
                })
            })
            .collect()
    }
}

/// Number of CPUs in a list such as `0-3,8`; `None` if it is malformed.
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
    fn cpu_lists_are_counted() {
        for (list, count) in [("", 0), ("0", 1), ("0-15", 16), ("0-3,8,10-11", 7)] {
            assert_eq!(count_cpus(list), Some(count), "{list}");
        }
    }

    #[test]
    fn malformed_cpu_lists_are_rejected() {
        for list in ["a", "3-0", "0-", ",", "0-4294967295", "0-3,0-4294967294", "-1"] {
            assert_eq!(count_cpus(list), None, "{list}");
        }
    }

    #[test]
    fn a_pci_function_without_a_node_belongs_to_the_only_one() {
        let folder = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let file = folder.path().join(path);
            std::fs::create_dir_all(file.parent().unwrap()).unwrap();
            std::fs::write(file, text).unwrap();
        };
        write("sys/bus/pci/devices/0000:00:06.0/numa_node", "-1\n");
        write("sys/devices/system/node/node3/cpulist", "0-15\n");
        let system = System::at(folder.path()).unwrap();
        let gpu = "0000:00:06.0".parse().unwrap();
        assert_eq!(system.numa_node_of(&gpu), Some(3));
        write("sys/devices/system/node/node4/cpulist", "16-31\n");
        assert_eq!(system.numa_node_of(&gpu), None, "ambiguous");
        write("sys/bus/pci/devices/0000:00:06.0/numa_node", "4\n");
        assert_eq!(system.numa_node_of(&gpu), Some(4));
    }
}

//! The topology as text: a matrix, a table of GPUs and one of NICs.

use std::fmt::{self, Write};

use super::topo::{BestNic, Topology};
use super::{Distance, TextStyle, printable};

const LEGEND: &str = "
Legend:
  X    = Self
  SYS  = Across the link between NUMA nodes (or the nodes are not known)
  NODE = Across PCIe host bridges within a NUMA node
  PHB  = Across a PCIe host bridge (the CPU's root complex)
  PXB  = Across several PCIe switches, without a host bridge
  PIX  = Across at most a single PCIe switch
  NV#  = By # NVLinks, directly or through NVSwitches
";

impl fmt::Display for Topology {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.to_text(TextStyle::default().width))
    }
}

impl Topology {
    /// The topology as text. A matrix that is wider than `width` is split: further columns follow
    /// below.
    pub fn to_text(&self, width: usize) -> String {
        let mut text = String::new();
        if self.gpus.is_empty() && self.nics.is_empty() {
            text.push_str("No NVIDIA GPU and no NIC on the PCI buses.\n");
        }
        self.write_matrix(&mut text, width);
        self.write_gpus(&mut text);
        self.write_nics(&mut text);
        text.push_str(LEGEND);
        if let Some(why) = &self.nvlinks_unknown {
            // Writing to a string cannot fail.
            let _ = writeln!(text, "  NVLinks are not known: {}", printable(why));
        }
        text
    }

    fn write_matrix(&self, text: &mut String, width: usize) {
        let gpus = self.gpus.iter().map(|gpu| gpu.label.as_str());
        let labels: Vec<&str> =
            gpus.chain(self.nics.iter().map(|nic| nic.label.as_str())).collect();
        // A gap, and the longest of labels and distances (`NODE`, `NV18`).
        let cell = 1 + labels.iter().map(|label| label.len()).max().unwrap_or(0).max(4);
        let first = cell + 1;
        let columns = (width.saturating_sub(first) / cell).max(1);
        for start in (0..labels.len()).step_by(columns) {
            let shown = start..labels.len().min(start + columns);
            let gap = if start == 0 { "" } else { "\n" };
            let heads = labels.get(shown.clone()).unwrap_or_default();
            let heads: String = heads.iter().map(|label| format!("{label:<cell$}")).collect();
            let _ = writeln!(text, "{gap}{:first$}{}", "", heads.trim_end());
            for (row, label) in labels.iter().enumerate() {
                let cells: String = shown
                    .clone()
                    .map(|column| format!("{:<cell$}", self.cell(row, column)))
                    .collect();
                let _ = writeln!(text, "{label:<first$}{}", cells.trim_end());
            }
        }
    }

    /// The NVLinks or the distance of a row and a column.
    fn cell(&self, row: usize, column: usize) -> String {
        let links = self.nvlinks.get(row).and_then(|row| row.get(column));
        match links {
            Some(count) if *count > 0 => format!("NV{count}"),
            _ => {
                let distance = self.distances.get(row).and_then(|row| row.get(column));
                distance.unwrap_or(&Distance::Sys).to_string()
            }
        }
    }

    fn write_gpus(&self, text: &mut String) {
        if self.gpus.is_empty() {
            return;
        }
        let mut rows = vec![vec![
            "GPU".to_owned(),
            "PCI address".to_owned(),
            "NUMA".to_owned(),
            "GPU NUMA ID".to_owned(),
            "Best NIC".to_owned(),
            "Model".to_owned(),
            "CPU affinity".to_owned(),
        ]];
        for gpu in &self.gpus {
            let best = self.best.iter().find(|best| best.gpu == gpu.label);
            let best = match best {
                Some(BestNic { nic, name, distance, .. }) => {
                    format!("{nic} {} ({distance})", printable(name))
                }
                None => "none".to_owned(),
            };
            rows.push(vec![
                gpu.label.clone(),
                gpu.address.to_string(),
                or_unknown(gpu.numa_node.as_ref()),
                or_unknown(gpu.memory_numa_node.as_ref()),
                best,
                printable(gpu.model.as_deref().unwrap_or("not known")),
                printable(&or_unknown(gpu.cpu_affinity.as_ref())),
            ]);
        }
        write_table(text, &rows);
    }

    fn write_nics(&self, text: &mut String) {
        if self.nics.is_empty() {
            return;
        }
        let heads = ["NIC", "PCI address", "NUMA", "Device", "Kind", "CPU affinity"];
        let mut rows = vec![heads.map(str::to_owned).to_vec()];
        for nic in &self.nics {
            let kind = if nic.rdma { "RDMA" } else { "Ethernet only" };
            let state = if nic.active { "" } else { ", not active" };
            rows.push(vec![
                nic.label.clone(),
                nic.address.to_string(),
                or_unknown(nic.numa_node.as_ref()),
                printable(&nic.name),
                format!("{kind}{state}"),
                printable(&or_unknown(nic.cpu_affinity.as_ref())),
            ]);
        }
        write_table(text, &rows);
    }
}

fn or_unknown(value: Option<&impl ToString>) -> String {
    value.map_or_else(|| "N/A".to_owned(), ToString::to_string)
}

/// Writes an empty line and a table, with columns as wide as needed.
fn write_table(text: &mut String, rows: &[Vec<String>]) {
    let columns = rows.first().map_or(0, Vec::len);
    let widths: Vec<usize> = (0..columns)
        .map(|column| {
            let cells = rows.iter().filter_map(|row| row.get(column));
            cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
        })
        .collect();
    text.push('\n');
    for row in rows {
        let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}  "));
        let _ = writeln!(text, "{}", cells.collect::<String>().trim_end());
    }
}

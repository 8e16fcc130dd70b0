//! `warpwire devices`: lists RDMA devices, their ports and GIDs.

use std::fmt::Write;
use std::process::ExitCode;

use clap::Args;
use serde::Serialize;
use warpwire::ibv::{
    self, Context, DeviceAttributes, Gid, GidKind, IbvDevice, LinkLayer, Port, Transport,
};

use crate::output::{self, Failure};
use crate::verbs::Programs;

/// List RDMA devices, their ports and addresses: hardware, and the software device
///
/// Hardware is found through libibverbs, as `ibv_devinfo` does. If that is not installed, or there
/// is no such device, the reason and the fix are printed. The software device is always available.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Arguments {
    /// Show only this device; `soft` is the software device
    #[arg(value_name = "NAME")]
    name: Option<String>,

    /// Also show device attributes, and RoCE v1 GIDs
    #[arg(short, long)]
    verbose: bool,

    /// Print JSON: {"devices": [{"name": …, "ports": […], …}], "unavailable": …, "software": {…}}
    #[arg(long)]
    json: bool,
}

const EXAMPLES: &str = "\
Examples:
  warpwire devices                  all devices, with ports and addresses
  warpwire devices -v mlx5_0        one device, with its attributes
  warpwire devices --json | jq -r '.devices[].ports[].gids[].address'

Environment:
  WARPWIRE_IBVERBS  library to load instead of libibverbs.so.1";

/// Name of the software device on the command line.
const SOFTWARE: &str = "soft";

/// The devices of this machine; serialized for `--json`.
#[derive(Serialize)]
struct Report {
    devices: Vec<Listed>,
    /// Why hardware devices cannot be listed.
    unavailable: Option<Reason>,
    software: Option<Software>,
    #[serde(skip)]
    asked_for_software: bool,
}

#[derive(Serialize)]
struct Listed {
    #[serde(flatten)]
    device: IbvDevice,
    /// Why the device cannot be opened.
    failed: Option<Reason>,
    attributes: Option<DeviceAttributes>,
    ports: Vec<ListedPort>,
}

#[derive(Serialize)]
struct ListedPort {
    #[serde(flatten)]
    port: Port,
    gids: Vec<Gid>,
}

#[derive(Serialize)]
struct Reason {
    why: String,
    fix: Option<String>,
}

#[derive(Serialize)]
struct Software {
    name: &'static str,
    links: Vec<Link>,
    /// Whether programs written for RDMA devices see it.
    programs: Programs,
}

#[derive(Serialize)]
struct Link {
    name: &'static str,
    reaches: &'static str,
}

impl Reason {
    fn of(error: &warpwire::Error) -> Self {
        Self { why: error.reason().to_owned(), fix: error.advice().map(str::to_owned) }
    }
}

pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode, String> {
    output::exit_result(list(arguments))
}

fn list(arguments: &Arguments) -> Result<ExitCode, Failure> {
    let report = Report::read(arguments.name.as_deref())?;
    let printed = match arguments.json {
        true => output::print_json(&report),
        false => output::print(&report.text(arguments.verbose)),
    };
    printed.map_err(Failure::Runtime)?;
    Ok(ExitCode::SUCCESS)
}

impl Report {
    /// Lists all devices, or the one with that name.
    fn read(name: Option<&str>) -> Result<Self, Failure> {
        let wanted = |one: &str| name.is_none_or(|name| name == one);
        let software = wanted(SOFTWARE).then(Software::here);
        let asked_for_software = name == Some(SOFTWARE);
        if asked_for_software {
            return Ok(Self {
                devices: Vec::new(),
                unavailable: None,
                software,
                asked_for_software,
            });
        }
        let found = match ibv::devices() {
            Ok(found) => found,
            Err(error) if name.is_some() => return Err(error.into()),
            Err(error) => {
                let unavailable = Some(Reason::of(&error));
                return Ok(Self { devices: Vec::new(), unavailable, software, asked_for_software });
            }
        };
        let names: Vec<_> = found.iter().map(|device| device.name.clone()).collect();
        let devices: Vec<_> =
            found.into_iter().filter(|device| wanted(&device.name)).map(Listed::read).collect();
        match name {
            Some(name) if devices.is_empty() => Err(Failure::Usage(format!(
                "there is no device {name:?}; there are: {}",
                names.iter().map(String::as_str).chain([SOFTWARE]).collect::<Vec<_>>().join(", ")
            ))),
            _ => Ok(Self { devices, unavailable: None, software, asked_for_software }),
        }
    }

    fn text(&self, verbose: bool) -> String {
        let mut text = String::new();
        // Writing to a string does not fail.
        for device in &self.devices {
            let _ = device.write(&mut text, verbose);
        }
        match &self.unavailable {
            Some(Reason { why, fix }) => {
                let _ = writeln!(text, "no RDMA hardware: {why}");
                let _ = fix.as_ref().map(|fix| writeln!(text, "  fix: {fix}"));
            }
            None if self.devices.is_empty() && !self.asked_for_software => {
                text += "no RDMA hardware: the kernel has no RDMA device\n\
                         \x20 fix: run `warpwire doctor` to see what is missing\n";
            }
            None => {}
        }
        if let Some(software) = &self.software {
            let _ = writeln!(
                text,
                "{}: the software HCA, RoCE v2 without RDMA hardware",
                software.name
            );
            for Link { name, reaches } in &software.links {
                let _ = writeln!(text, "  link {name}: {reaches}");
            }
            text += &software.programs.text();
        }
        text
    }
}

impl Software {
    fn here() -> Self {
        let link = |name, reaches| Link { name, reaches };
        let links = vec![
            link(
                "udp",
                "any RoCE v2 peer, hardware or software, by an address of this machine, port 4791",
            ),
            link("shm", "other processes of this machine, through shared memory"),
            link("auto", "both: shm where the peer is on this machine, udp elsewhere"),
            link("loopback", "contexts of one process"),
        ];
        Self { name: SOFTWARE, links, programs: Programs::here() }
    }
}

impl Listed {
    fn read(device: IbvDevice) -> Self {
        match Self::open(&device) {
            Ok((attributes, ports)) => {
                Self { device, failed: None, attributes: Some(attributes), ports }
            }
            Err(error) => {
                let failed = Some(Reason::of(&error));
                Self { device, failed, attributes: None, ports: Vec::new() }
            }
        }
    }

    fn open(device: &IbvDevice) -> warpwire::Result<(DeviceAttributes, Vec<ListedPort>)> {
        let context = Context::open(&device.name)?;
        let attributes = context.attributes()?;
        let gids = context.gids()?;
        let port = |number: u8| {
            let gids = gids.iter().filter(|gid| gid.port == number).cloned().collect();
            Ok(ListedPort { port: context.port(number)?, gids })
        };
        let ports = (1..=attributes.ports).map(port).collect::<warpwire::Result<_>>()?;
        Ok((attributes, ports))
    }

    fn write(&self, text: &mut String, verbose: bool) -> std::fmt::Result {
        let IbvDevice { name, guid, transport, driver, node } = &self.device;
        let driver = driver.as_deref().unwrap_or("unknown");
        let transport = match transport {
            Transport::InfiniBand => "InfiniBand",
            Transport::Iwarp => "iWARP",
            _ => "vendor",
        };
        writeln!(text, "{name}: driver {driver}, {transport} transport, guid {guid}, {node}")?;
        if let Some(Reason { why, fix }) = &self.failed {
            writeln!(text, "  cannot be opened: {why}")?;
            fix.as_ref().map_or(Ok(()), |fix| writeln!(text, "  fix: {fix}"))?;
        }
        for ListedPort { port, gids } in &self.ports {
            write_port(text, port)?;
            for gid in gids.iter().filter(|gid| verbose || gid.kind != GidKind::RoceV1) {
                let Gid { index, address, kind, interface, .. } = gid;
                let interface = interface.as_deref().unwrap_or("-");
                writeln!(text, "    gid {index:<3} {kind:<8} {interface:<10} {address}")?;
            }
        }
        match &self.attributes {
            Some(attributes) if verbose => write_attributes(text, attributes),
            _ => Ok(()),
        }
    }
}

fn write_port(text: &mut String, port: &Port) -> std::fmt::Result {
    let layer = match port.link_layer {
        LinkLayer::InfiniBand => "InfiniBand",
        LinkLayer::Ethernet => "Ethernet",
        _ => "unspecified",
    };
    let speed = match port.gbps {
        Some(gbps) => format!("{gbps} Gb/s in {}x", port.lanes),
        None => "speed unknown".to_owned(),
    };
    let lid = if port.lid == 0 { String::new() } else { format!(", lid {}", port.lid) };
    let Port { number, state, active_mtu, max_mtu, .. } = port;
    writeln!(text, "  port {number}: {state}, {layer}, {speed}, MTU {active_mtu} of {max_mtu}{lid}")
}

/// Writes each attribute under its JSON name.
fn write_attributes(text: &mut String, attributes: &DeviceAttributes) -> std::fmt::Result {
    let value = serde_json::to_value(attributes).unwrap_or_default();
    for (name, value) in value.as_object().into_iter().flatten() {
        match value.as_str() {
            Some(word) => writeln!(text, "  {name}: {word}")?,
            None => writeln!(text, "  {name}: {value}")?,
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use warpwire::ibv::PortState;

    fn machine() -> Report {
        let device = |name: &str, driver: &str| IbvDevice {
            name: name.to_owned(),
            guid: "0c42:a103:00c3:5d8a".to_owned(),
            transport: Transport::InfiniBand,
            driver: Some(driver.to_owned()),
            node: "/dev/infiniband/uverbs0".to_owned(),
        };
        let port = Port {
            number: 1,
            state: PortState::Active,
            link_layer: LinkLayer::Ethernet,
            active_mtu: 4096,
            max_mtu: 4096,
            max_message: 1 << 30,
            lanes: 4,
            gbps: Some(400.0),
            lid: 0,
            sm_lid: 0,
            gid_table_len: 255,
            partition_table_len: 1,
        };
        let gid = |index, kind, address: &str| Gid {
            port: 1,
            index,
            bytes: [0; 16],
            address: address.parse().unwrap(),
            kind,
            interface: Some("eth2".to_owned()),
        };
        let gids = vec![
            gid(2, GidKind::RoceV1, "10.0.0.7"),
            gid(3, GidKind::RoceV2, "10.0.0.7"),
            gid(5, GidKind::RoceV2, "fd00::7"),
        ];
        let down = Port { number: 2, state: PortState::Down, gbps: None, lanes: 0, ..port.clone() };
        let ports = vec![ListedPort { port, gids }, ListedPort { port: down, gids: vec![] }];
        let fine =
            Listed { device: device("mlx5_0", "mlx5"), failed: None, attributes: None, ports };
        let reason = Reason { why: "this user may not open it".into(), fix: Some("chmod".into()) };
        let closed = Listed {
            device: device("mlx5_1", "mlx5"),
            failed: Some(reason),
            attributes: None,
            ports: vec![],
        };
        let programs = Programs::of(|_| std::ffi::OsString::new());
        let software = Some(Software { programs, ..Software::here() });
        Report {
            devices: vec![fine, closed],
            unavailable: None,
            software,
            asked_for_software: false,
        }
    }

    #[test]
    fn devices_ports_and_addresses_are_a_line_each() {
        insta::assert_snapshot!(machine().text(false));
    }

    #[test]
    fn verbose_lists_roce_v1_gids() {
        let (short, long) = (machine().text(false), machine().text(true));
        assert!(!short.contains("RoCE v1") && long.contains("RoCE v1"), "{long}");
    }

    #[test]
    fn json_has_the_same_content() {
        let value = serde_json::to_value(machine()).unwrap();
        assert_eq!(value["devices"][0]["ports"][0]["gids"][1]["kind"], "roce-v2");
        assert_eq!(value["devices"][0]["ports"][1]["state"], "down");
        assert_eq!(value["devices"][1]["failed"]["fix"], "chmod");
        assert_eq!(value["software"]["links"][0]["name"], "udp");
    }
}

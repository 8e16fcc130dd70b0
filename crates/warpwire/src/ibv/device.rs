//! Device enumeration, attributes, ports and GIDs.

use std::ffi::c_char;
use std::fmt;
use std::net::{IpAddr, Ipv6Addr};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use serde::Serialize;
use warpwire_proto::qp::Mtu;

use super::event;
use super::explain::{Attempt, explain};
use super::library::{Library, Raw, call, check, create, destroy, function};
use super::staging::StagingTable;
use super::sys;
use super::wr_ids::WrIdRegistry;
use crate::error::{Error, Kind, Result};
use crate::host::{FileAccess, System};
use crate::mlx5::gid_address;
use crate::work::AsyncEvent;

/// An RDMA device of this machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct IbvDevice {
    /// Name in sysfs, such as `mlx5_0`.
    pub name: String,
    /// Node GUID in the usual notation: `0c42:a103:00c3:5d8a`.
    pub guid: String,
    /// Transport type.
    pub transport: Transport,
    /// Kernel driver: `mlx5`, `rxe`, …; `None` if unknown.
    pub driver: Option<String>,
    /// Device node: `/dev/infiniband/uverbs0`.
    pub node: String,
}

/// Transport type of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Transport {
    /// InfiniBand transport, on InfiniBand or Ethernet (RoCE).
    InfiniBand,
    /// iWARP, over TCP.
    Iwarp,
    /// A vendor-specific transport.
    Other,
}

/// Lists the RDMA devices of this machine, in libibverbs' order.
///
/// # Errors
/// If libibverbs is not installed, or the kernel has no RDMA support. A machine without devices is
/// no error: the list is empty.
pub fn devices() -> Result<Vec<IbvDevice>> {
    let library = Library::get()?;
    let list = List::new(library)?;
    list.entries().iter().map(|raw| describe(library, &list, *raw)).collect()
}

/// Describes an entry of the list.
fn describe(library: &Library, _alive: &List, raw: *mut sys::IbvDevice) -> Result<IbvDevice> {
    let get_guid = function!(library, get_device_guid)?;
    // SAFETY: an entry of a live list.
    let (device, guid) = unsafe { (&*raw, get_guid(raw)) };
    let name = text(&device.name);
    let driver = System::live().rdma_driver(&name);
    let transport = match u32::try_from(device.transport_type) {
        Ok(sys::TRANSPORT_IB) => Transport::InfiniBand,
        Ok(sys::TRANSPORT_IWARP) => Transport::Iwarp,
        _ => Transport::Other,
    };
    let node = format!("/dev/infiniband/{}", text(&device.dev_name));
    Ok(IbvDevice { name, guid: guid_text(u64::from_be(guid)), transport, driver, node })
}

/// The library's device list; freed on drop.
struct List {
    library: &'static Library,
    first: Raw<*mut sys::IbvDevice>,
    count: usize,
}

impl List {
    fn new(library: &'static Library) -> Result<Self> {
        let mut count = 0;
        let first = create!(library, Attempt::List, get_device_list(&mut count))?;
        Ok(Self { library, first, count: usize::try_from(count).unwrap_or(0) })
    }

    fn entries(&self) -> &[*mut sys::IbvDevice] {
        // SAFETY: the library returned `count` pointers, which live as long as this.
        unsafe { std::slice::from_raw_parts(self.first.ptr(), self.count) }
    }
}

impl Drop for List {
    fn drop(&mut self) {
        if let Some(free) = self.library.functions.free_device_list {
            // SAFETY: allocated by the library, and no pointers into it remain.
            unsafe { free(self.first.ptr()) };
        }
    }
}

/// A C string in a fixed field, which it may fill without a terminator.
fn text(field: &[c_char]) -> String {
    let bytes: Vec<u8> = field.iter().take_while(|c| **c != 0).map(|c| *c as u8).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

fn guid_text(guid: u64) -> String {
    let part = |shift: u32| (guid >> shift) as u16;
    format!("{:04x}:{:04x}:{:04x}:{:04x}", part(48), part(32), part(16), part(0))
}

/// Attributes of a device (`ibv_device_attr`). Numbers are maxima unless noted otherwise.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DeviceAttributes {
    /// Firmware version.
    pub firmware: String,
    /// Vendor id.
    pub vendor_id: u32,
    /// Vendor's part id of this device type.
    pub vendor_part_id: u32,
    /// Hardware version.
    pub hardware_version: u32,
    /// Number of physical ports.
    pub ports: u8,
    /// Bytes of a memory region.
    pub max_mr_bytes: u64,
    /// Memory regions.
    pub max_mrs: u32,
    /// Queue pairs.
    pub max_qps: u32,
    /// Outstanding work requests of a queue.
    pub max_qp_depth: u32,
    /// Scatter-gather entries of a work request (`max_sge`).
    pub max_ranges: u32,
    /// Completion queues.
    pub max_cqs: u32,
    /// Entries of a completion queue.
    pub max_cq_entries: u32,
    /// Protection domains.
    pub max_pds: u32,
    /// Address handles.
    pub max_address_handles: u32,
    /// Shared receive queues; 0 if not supported.
    pub max_srqs: u32,
    /// Outstanding receives of a shared receive queue.
    pub max_srq_depth: u32,
    /// Scatter-gather entries of a receive in a shared receive queue.
    pub max_srq_ranges: u32,
    /// RDMA reads and atomics of a peer that a queue pair executes at a time.
    pub max_dest_rd_atomic: u32,
    /// RDMA reads and atomics that a queue pair has in flight as initiator.
    pub max_rd_atomic: u32,
    /// Whether atomics are supported.
    pub atomics: bool,
    /// `device_cap_flags` of the library.
    pub capability_flags: u32,
}

/// Logical state of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum PortState {
    /// No link.
    Down,
    /// Link up, not configured by a subnet manager.
    Init,
    /// Configured, not yet active.
    Armed,
    /// Carries traffic.
    Active,
    /// Any other state.
    Unknown,
}

/// Link layer of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum LinkLayer {
    /// InfiniBand.
    InfiniBand,
    /// Ethernet: RoCE, or iWARP.
    Ethernet,
    /// Neither, or not reported.
    Unspecified,
}

/// Attributes of a port (`ibv_port_attr`).
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Port {
    /// Port number, counted from 1.
    pub number: u8,
    /// Logical state.
    pub state: PortState,
    /// Link layer.
    pub link_layer: LinkLayer,
    /// Active MTU in bytes.
    pub active_mtu: u32,
    /// Maximum MTU in bytes.
    pub max_mtu: u32,
    /// Maximum message size in bytes.
    pub max_message: u32,
    /// Number of lanes; 0 if unknown.
    pub lanes: u8,
    /// Rate in Gb/s of all lanes together; `None` if unknown.
    pub gbps: Option<f64>,
    /// LID; 0 on Ethernet.
    pub lid: u16,
    /// LID of the subnet manager.
    pub sm_lid: u16,
    /// Length of the GID table.
    pub gid_table_len: u32,
    /// Length of the partition key table.
    pub partition_table_len: u16,
}

/// Type of a GID.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum GidKind {
    /// InfiniBand.
    InfiniBand,
    /// RoCE v1: Ethernet frames, not routable.
    RoceV1,
    /// RoCE v2: UDP packets.
    RoceV2,
}

impl fmt::Display for GidKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::InfiniBand => "IB",
            Self::RoceV1 => "RoCE v1",
            Self::RoceV2 => "RoCE v2",
        })
    }
}

/// An entry of a port's GID table.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Gid {
    /// Port number, counted from 1.
    pub port: u8,
    /// Index in the port's table.
    pub index: u32,
    /// The GID in network byte order.
    #[serde(skip)]
    pub bytes: [u8; 16],
    /// The GID as an IP address; IPv4-mapped ones become IPv4.
    pub address: IpAddr,
    /// Type of the GID.
    pub kind: GidKind,
    /// Network interface of the GID, if it has one.
    pub interface: Option<String>,
}

/// An open device (`ibv_context`). Clones refer to the same device; it is closed when the last
/// object created from it is dropped.
#[derive(Clone, Debug)]
pub struct Context(pub(super) Arc<ContextInner>);

#[derive(Debug)]
pub(super) struct ContextInner {
    pub(super) library: &'static Library,
    pub(super) raw: Raw<sys::Context>,
    pub(super) device: IbvDevice,
    /// Completion flags that mean that an rkey was invalidated.
    pub(super) invalidated_flags: u32,
    /// Work request ids of all queues.
    pub(super) wr_ids: WrIdRegistry,
    /// Staged memory regions.
    pub(super) staging_table: StagingTable,
}

impl Drop for ContextInner {
    fn drop(&mut self) {
        destroy!(self.library, close_device(self.raw.ptr()));
    }
}

impl fmt::Debug for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Library")
    }
}

/// rxe passes the kernel's "invalidated" flag on, which differs from the library's.
const KERNEL_WC_WITH_INVALIDATE: u32 = 1 << 2;

impl Context {
    /// Opens the device of this name.
    ///
    /// # Errors
    /// If there is none (the text lists those that exist), or this user may not open it.
    pub fn open(name: &str) -> Result<Self> {
        let library = Library::get()?;
        let list = List::new(library)?;
        // SAFETY: entries of a live list.
        let name_of = |raw: &*mut sys::IbvDevice| text(unsafe { &(**raw).name });
        let Some(entry) = list.entries().iter().find(|raw| name_of(raw) == name) else {
            return Err(no_such_device(name, list.entries().iter().map(name_of).collect()));
        };
        let device = describe(library, &list, *entry)?;
        let raw = create!(library, Attempt::Open(name), open_device(*entry))
            .map_err(|error| explain_open_error(error, &device))?;
        let invalidated_flags = match device.driver.as_deref() {
            Some("rxe") => sys::WC_WITH_INV | KERNEL_WC_WITH_INVALIDATE,
            _ => sys::WC_WITH_INV,
        };
        let context = Self(Arc::new(ContextInner {
            library,
            raw,
            device,
            invalidated_flags,
            wr_ids: WrIdRegistry::default(),
            staging_table: StagingTable::default(),
        }));
        event::set_nonblocking(context.async_fd())?;
        Ok(context)
    }

    /// The device's description.
    pub fn device(&self) -> &IbvDevice {
        &self.0.device
    }

    /// Queries the device's attributes (`ibv_query_device`): a system call.
    pub fn attributes(&self) -> Result<DeviceAttributes> {
        // SAFETY: plain numbers and bytes, which may be zero.
        let mut attr: sys::DeviceAttr = unsafe { std::mem::zeroed() };
        let ContextInner { library, raw, device, .. } = &*self.0;
        call!(library, Attempt::Query(&device.name), query_device(raw.ptr(), &mut attr))?;
        let clamp_to_u32 = |number: i32| u32::try_from(number).unwrap_or(0);
        Ok(DeviceAttributes {
            firmware: text(&attr.fw_ver),
            vendor_id: attr.vendor_id,
            vendor_part_id: attr.vendor_part_id,
            hardware_version: attr.hw_ver,
            ports: attr.phys_port_cnt,
            max_mr_bytes: attr.max_mr_size,
            max_mrs: clamp_to_u32(attr.max_mr),
            max_qps: clamp_to_u32(attr.max_qp),
            max_qp_depth: clamp_to_u32(attr.max_qp_wr),
            max_ranges: clamp_to_u32(attr.max_sge),
            max_cqs: clamp_to_u32(attr.max_cq),
            max_cq_entries: clamp_to_u32(attr.max_cqe),
            max_pds: clamp_to_u32(attr.max_pd),
            max_address_handles: clamp_to_u32(attr.max_ah),
            max_srqs: clamp_to_u32(attr.max_srq),
            max_srq_depth: clamp_to_u32(attr.max_srq_wr),
            max_srq_ranges: clamp_to_u32(attr.max_srq_sge),
            max_dest_rd_atomic: clamp_to_u32(attr.max_qp_rd_atom),
            max_rd_atomic: clamp_to_u32(attr.max_qp_init_rd_atom),
            atomics: clamp_to_u32(attr.atomic_cap) != sys::ATOMIC_NONE,
            capability_flags: attr.device_cap_flags,
        })
    }

    /// Queries a port (`ibv_query_port`); the first is 1.
    ///
    /// # Errors
    /// [`Kind::InvalidArgument`] if there is no such port.
    pub fn port(&self, number: u8) -> Result<Port> {
        // SAFETY: plain numbers, which may be zero. The library writes the fields that it knows.
        let mut attr: sys::PortAttr = unsafe { std::mem::zeroed() };
        let ContextInner { library, raw, device, .. } = &*self.0;
        let attempt = Attempt::QueryPort(&device.name, number);
        call!(library, attempt, query_port(raw.ptr(), number, &mut attr))?;
        Ok(Port::of(number, &attr))
    }

    /// All GIDs that are set, of all ports.
    pub fn gids(&self) -> Result<Vec<Gid>> {
        let ContextInner { library, raw, device, .. } = &*self.0;
        let attempt = Attempt::QueryGids(&device.name);
        let Some(query) = library.functions.query_gid_table else {
            return Ok(gids_from_sysfs(&System::live(), &device.name));
        };
        let ports = self.attributes()?.ports;
        let room: u32 =
            (1..=ports).map(|port| self.port(port).map_or(0, |p| p.gid_table_len)).sum();
        // SAFETY: plain numbers, which may be zero.
        let empty: sys::GidEntry = unsafe { std::mem::zeroed() };
        let mut entries = vec![empty; room as usize];
        let (first, size) = (entries.as_mut_ptr(), size_of::<sys::GidEntry>());
        // SAFETY: `first` points to `entries.len()` entries of `size` bytes; the device is open.
        let found = unsafe { query(raw.ptr(), first, entries.len(), 0, size) };
        let Ok(found) = usize::try_from(found) else {
            check(i32::try_from(found).unwrap_or(-1), attempt)?;
            return Ok(Vec::new());
        };
        Ok(entries.iter().take(found).map(Gid::of).collect())
    }

    /// The GID at this index of an active port.
    ///
    /// # Errors
    /// [`Kind::Unavailable`] if the port is not active; [`Kind::InvalidArgument`] if there is no
    /// GID at this index: the text lists those that exist.
    pub fn gid(&self, port: u8, index: u32) -> Result<Gid> {
        let name = &self.0.device.name;
        let what = format!("use GID {index} of port {port}");
        let state = self.port(port)?.state;
        if state != PortState::Active {
            return Err(Error::new(Kind::Unavailable, what)
                .on(name.clone())
                .why(format!("the port is {state}"))
                .fix(
                    "check its cable, and `ip link` or the subnet manager; `warpwire devices` \
                     lists all ports",
                ));
        }
        let gids = self.gids()?;
        let found = gids.iter().find(|gid| gid.port == port && gid.index == index);
        found.cloned().ok_or_else(|| {
            let of_port = gids.iter().filter(|gid| gid.port == port);
            let list: Vec<_> = of_port
                .map(|gid| format!("{} {} ({})", gid.index, gid.address, gid.kind))
                .collect();
            let fix = match list.as_slice() {
                [] => "assign an IP address to its network interface".to_owned(),
                list => format!("use one of: {}", list.join(", ")),
            };
            let why = "there is no GID at this index";
            Error::new(Kind::InvalidArgument, what).on(name.clone()).why(why).fix(fix)
        })
    }

    /// Takes the oldest pending asynchronous event and acknowledges it. Never blocks.
    pub fn next_event(&self) -> Result<Option<AsyncEvent>> {
        event::next(&self.0)
    }

    fn async_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the context is open for as long as this handle, and so is its descriptor.
        unsafe { BorrowedFd::borrow_raw((*self.0.raw.ptr()).async_fd) }
    }
}

impl AsFd for Context {
    /// Readable while events for [`next_event`](Self::next_event) are pending.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.async_fd()
    }
}

impl fmt::Display for PortState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Down => "down",
            Self::Init => "initializing",
            Self::Armed => "armed",
            Self::Active => "active",
            Self::Unknown => "in an unknown state",
        })
    }
}

impl Port {
    fn of(number: u8, attr: &sys::PortAttr) -> Self {
        let state = match u32::try_from(attr.state) {
            Ok(sys::PORT_DOWN) => PortState::Down,
            Ok(2) => PortState::Init,
            Ok(3) => PortState::Armed,
            Ok(sys::PORT_ACTIVE) => PortState::Active,
            _ => PortState::Unknown,
        };
        let link_layer = match u32::from(attr.link_layer) {
            sys::LINK_INFINIBAND => LinkLayer::InfiniBand,
            sys::LINK_ETHERNET => LinkLayer::Ethernet,
            _ => LinkLayer::Unspecified,
        };
        let lanes = lanes(attr.active_width);
        let gbps =
            lane_gbps(attr.active_speed).filter(|_| lanes > 0).map(|lane| lane * f64::from(lanes));
        Self {
            number,
            state,
            link_layer,
            active_mtu: mtu_of(attr.active_mtu).map_or(0, Mtu::bytes),
            max_mtu: mtu_of(attr.max_mtu).map_or(0, Mtu::bytes),
            max_message: attr.max_msg_sz,
            lanes,
            gbps,
            lid: attr.lid,
            sm_lid: attr.sm_lid,
            gid_table_len: u32::try_from(attr.gid_tbl_len).unwrap_or(0),
            partition_table_len: attr.pkey_tbl_len,
        }
    }
}

/// The MTU for an `ibv_mtu` code.
pub(super) fn mtu_of(code: i32) -> Option<Mtu> {
    Mtu::ALL.get(usize::try_from(code).ok()?.checked_sub(1)?).copied()
}

/// Number of lanes of an active width code.
fn lanes(width: u8) -> u8 {
    match width {
        1 => 1,
        2 => 4,
        4 => 8,
        8 => 12,
        16 => 2,
        _ => 0,
    }
}

/// Gb/s per lane of an active speed code: SDR, DDR, QDR, FDR10, FDR, EDR, HDR, NDR.
fn lane_gbps(speed: u8) -> Option<f64> {
    const SPEEDS: [f64; 8] = [2.5, 5.0, 10.0, 10.0, 14.0, 25.0, 50.0, 100.0];
    speed.is_power_of_two().then(|| SPEEDS[speed.trailing_zeros() as usize])
}

impl Gid {
    fn of(entry: &sys::GidEntry) -> Self {
        let bytes = gid_bytes(entry.gid);
        let kind = match entry.gid_type {
            sys::GID_ROCE_V1 => GidKind::RoceV1,
            sys::GID_ROCE_V2 => GidKind::RoceV2,
            _ => GidKind::InfiniBand,
        };
        let port = u8::try_from(entry.port_num).unwrap_or(0);
        let (index, interface) = (entry.gid_index, interface(entry.ndev_ifindex));
        Self { port, index, bytes, address: gid_address(bytes), kind, interface }
    }
}

/// GIDs from sysfs, for libraries older than rdma-core 32.
fn gids_from_sysfs(system: &System, name: &str) -> Vec<Gid> {
    let devices = system.rdma_devices();
    let mut all = Vec::new();
    for port in devices.iter().filter(|device| device.name == name).flat_map(|device| &device.ports)
    {
        let on_ethernet = port.link_layer.as_deref() == Some("Ethernet");
        for gid in &port.gids {
            let Ok(address) = gid.gid.parse::<Ipv6Addr>() else { continue };
            let kind = match (gid.kind.as_deref(), on_ethernet) {
                (Some("RoCE v2"), _) => GidKind::RoceV2,
                (_, true) => GidKind::RoceV1,
                (_, false) => GidKind::InfiniBand,
            };
            let folder = format!("/sys/class/infiniband/{name}/ports/{}", port.number);
            let interface = system.read(&format!("{folder}/gid_attrs/ndevs/{}", gid.index));
            all.push(Gid {
                port: u8::try_from(port.number).unwrap_or(0),
                index: gid.index,
                bytes: address.octets(),
                address: gid_address(address.octets()),
                kind,
                interface,
            });
        }
    }
    all
}

/// Converts a GID of the library to bytes.
fn gid_bytes(words: [u64; 2]) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&words[0].to_ne_bytes());
    bytes[8..].copy_from_slice(&words[1].to_ne_bytes());
    bytes
}

/// The name of the network interface with this index.
fn interface(index: u32) -> Option<String> {
    if index == 0 {
        return None;
    }
    let mut name = [0; libc::IF_NAMESIZE];
    // SAFETY: the buffer has IF_NAMESIZE bytes; the function writes a terminated name.
    let found = unsafe { libc::if_indextoname(index, name.as_mut_ptr()) };
    (!found.is_null()).then(|| text(&name))
}

/// Without permission for the node, the library falls back to another path and then reports that
/// there is no node.
#[cold]
fn explain_open_error(error: Error, device: &IbvDevice) -> Error {
    let attempt = Attempt::Open(&device.name);
    match System::live().access(&device.node) {
        FileAccess::Denied | FileAccess::ReadOnly => {
            explain(libc::EACCES, attempt).into_error(attempt)
        }
        _ => error,
    }
}

#[cold]
fn no_such_device(name: &str, names: Vec<String>) -> Error {
    let (why, fix) = match names.as_slice() {
        [] => (
            "this machine has no RDMA device".to_owned(),
            "`warpwire doctor` shows why; the software HCA needs none".to_owned(),
        ),
        names => {
            ("there is no such device".to_owned(), format!("use one of: {}", names.join(", ")))
        }
    };
    Error::new(Kind::Unavailable, format!("open RDMA device {name:?}")).why(why).fix(fix)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_ends_at_its_terminator_or_its_field() {
        let field =
            |bytes: &[u8]| text(&bytes.iter().map(|byte| *byte as c_char).collect::<Vec<_>>());
        assert_eq!(field(b"mlx5_0\0junk"), "mlx5_0");
        assert_eq!(field(b"full"), "full");
        assert_eq!(guid_text(0x0c42_a103_00c3_5d8a), "0c42:a103:00c3:5d8a");
    }

    #[test]
    fn port_codes_are_decoded() {
        // SAFETY: plain numbers, which may be zero.
        let mut attr: sys::PortAttr = unsafe { std::mem::zeroed() };
        let unknown = Port::of(1, &attr);
        assert_eq!(
            (unknown.state, unknown.gbps, unknown.active_mtu),
            (PortState::Unknown, None, 0)
        );
        (attr.state, attr.link_layer, attr.active_mtu, attr.max_mtu) = (4, 2, 3, 5);
        (attr.active_width, attr.active_speed) = (2, 128);
        let port = Port::of(1, &attr);
        assert_eq!((port.state, port.link_layer), (PortState::Active, LinkLayer::Ethernet));
        assert_eq!((port.active_mtu, port.max_mtu), (1024, 4096));
        assert_eq!((port.lanes, port.gbps), (4, Some(400.0)));
        attr.active_speed = 3;
        assert_eq!(Port::of(1, &attr).gbps, None);
    }

    #[test]
    fn gids_are_read_from_sysfs() {
        let folder = tempfile::tempdir().unwrap();
        let port = folder.path().join("sys/class/infiniband/mlx5_0/ports/1");
        let put = |file: &str, text: &str| {
            let path = port.join(file);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        put("link_layer", "Ethernet\n");
        for (index, gid, kind) in [
            (0, "fe80:0000:0000:0000:0000:0000:0000:0001", "IB/RoCE v1"),
            (1, "0000:0000:0000:0000:0000:ffff:0a00:0007", "RoCE v2"),
            (2, "0000:0000:0000:0000:0000:0000:0000:0000", "RoCE v2"),
        ] {
            put(&format!("gids/{index}"), gid);
            put(&format!("gid_attrs/types/{index}"), kind);
            put(&format!("gid_attrs/ndevs/{index}"), "eth2\n");
        }
        let system = System::at(folder.path()).unwrap();
        let found = gids_from_sysfs(&system, "mlx5_0");
        let listed: Vec<_> =
            found.iter().map(|gid| (gid.index, gid.address.to_string(), gid.kind)).collect();
        assert_eq!(
            listed,
            [(0, "fe80::1".into(), GidKind::RoceV1), (1, "10.0.0.7".into(), GidKind::RoceV2)]
        );
        assert_eq!(found[1].interface.as_deref(), Some("eth2"));
        assert_eq!(gids_from_sysfs(&system, "mlx5_1"), []);
    }

    #[test]
    fn missing_device_error_lists_available_devices() {
        let text = no_such_device("x", vec!["mlx5_0".into(), "rxe0".into()]).to_string();
        assert!(text.contains("use one of: mlx5_0, rxe0"), "{text}");
        assert!(no_such_device("x", vec![]).to_string().contains("warpwire doctor"));
    }
}

//! Devices, ports, GIDs, registrations, and users without permission.

use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::process::Command;

use warpwire::error::Kind;
use warpwire::ibv::{
    Context, GidKind, LinkLayer, PortState, SendRequest, Transport, WrOp, devices,
};
use warpwire::mr::{Access, DmaBufRange, HostMemory};

use crate::ibv::testbed::{Testbed, device_name};
use testkit::{Role, cases};

cases!(CASES:
    the_device_is_listed,
    the_device_reports_its_attributes,
    its_port_is_active,
    its_addresses,
    unknown_devices_ports_and_gids,
    a_port_that_is_down,
    memory_at_an_address_of_its_own,
    relaxed_ordering,
    registrations_that_are_refused,
    dma_bufs_are_rejected_with_an_alternative,
    unprivileged_users,
);

fn the_device_is_listed() {
    let all = devices().unwrap();
    let device =
        all.iter().find(|device| device.name == device_name()).expect("the device in the list");
    assert_eq!(device.transport, Transport::InfiniBand);
    assert_eq!(device.guid.len(), 19, "{}", device.guid);
    assert_ne!(device.guid, "0000:0000:0000:0000");
    assert!(std::path::Path::new(&device.node).exists(), "{}", device.node);
    if device.name.starts_with("rxe") {
        assert_eq!(device.driver.as_deref(), Some("rxe"));
    }
}

fn the_device_reports_its_attributes() {
    let context = Context::open(&device_name()).unwrap();
    let attributes = context.attributes().unwrap();
    assert!(attributes.ports >= 1 && attributes.max_qps > 10, "{attributes:?}");
    assert!(attributes.max_qp_depth >= 64 && attributes.max_ranges >= 3, "{attributes:?}");
    assert!(attributes.atomics && attributes.max_srqs > 0, "{attributes:?}");
}

fn its_port_is_active() {
    let context = Context::open(&device_name()).unwrap();
    let port = context.port(1).unwrap();
    assert_eq!((port.state, port.link_layer), (PortState::Active, LinkLayer::Ethernet));
    assert!(
        [1024, 2048, 4096].contains(&port.active_mtu) && port.max_mtu >= port.active_mtu,
        "{port:?}"
    );
    assert!(port.gid_table_len > 0 && port.max_message >= 1 << 20, "{port:?}");
}

fn its_addresses() {
    let testbed = Testbed::unconnected(|options| options);
    let gids = testbed.context.gids().unwrap();
    let gid = gids.iter().find(|gid| gid.index == u32::from(testbed.gid_index)).unwrap();
    assert_eq!((gid.port, gid.kind), (1, GidKind::RoceV2));
    assert!(gid.interface.as_deref().is_some_and(|name| name.starts_with("eth")), "{gid:?}");
    assert_eq!(&testbed.context.gid(1, gid.index).unwrap(), gid);
}

fn unknown_devices_ports_and_gids() {
    let error = Context::open("mlx9_9").unwrap_err();
    assert_eq!(error.kind(), &Kind::Unavailable);
    assert!(error.to_string().contains(&device_name()), "{error}");
    let context = Context::open(&device_name()).unwrap();
    let error = context.port(9).unwrap_err();
    assert!(error.to_string().contains("no port 9"), "{error}");
    let error = context.gid(1, 200).unwrap_err();
    assert!(error.to_string().contains("use one of: "), "{error}");
}

/// Runs a shell command in the guest; returns whether it succeeded.
fn shell(command: &str) -> bool {
    Command::new("sh").args(["-c", command]).status().is_ok_and(|status| status.success())
}

fn a_port_that_is_down() {
    // Uses the loopback interface, which no other case needs.
    if !shell("ip link set lo down && rdma link add rxedown type rxe netdev lo") {
        eprintln!("skipped: cannot create a second device on the loopback interface");
        shell("ip link set lo up");
        return;
    }
    let context = Context::open("rxedown").unwrap();
    let state = context.port(1).unwrap().state;
    let error = context.gid(1, 0).unwrap_err();
    drop(context);
    assert!(shell("rdma link delete rxedown; ip link set lo up"));
    assert_ne!(state, PortState::Active);
    assert_eq!(error.kind(), &Kind::Unavailable);
    assert!(
        error.to_string().contains("the port is down") && error.to_string().contains("ip link"),
        "{error}"
    );
}

fn memory_at_an_address_of_its_own() {
    let testbed = Testbed::new();
    let memory = HostMemory::new(8192).unwrap();
    let mr = testbed.pd.register(&memory, Some(0x7000_0000_0000), Access::ALL).unwrap();
    assert_eq!((mr.iova(), mr.len(), mr.is_empty()), (0x7000_0000_0000, 8192, false));
    testbed.a.fill(0, 5000, 4);
    let range = [testbed.a.mr.sge(0, 5000)];
    testbed.a.post(SendRequest::new(1, WrOp::Write(mr.remote(100))).with(&range));
    testbed.a.done(1);
    let mut found = vec![0; 5000];
    memory.bytes().read(100, &mut found).unwrap();
    assert_eq!(found, crate::ibv::testbed::pattern(4, 5000));
}

fn relaxed_ordering() {
    let testbed = Testbed::new();
    let memory = HostMemory::new(8192).unwrap();
    let mr = testbed.pd.register(&memory, None, Access::ALL | Access::RELAXED_ORDERING).unwrap();
    assert_eq!(mr.iova(), memory.address());
    testbed.a.post(SendRequest::new(1, WrOp::Write(mr.remote(8))).inline(b"relaxed"));
    testbed.a.done(1);
    let mut found = [0; 7];
    memory.bytes().read(8, &mut found).unwrap();
    assert_eq!(&found, b"relaxed");
}

fn registrations_that_are_refused() {
    let context = Context::open(&device_name()).unwrap();
    let pd = context.create_pd().unwrap();
    let memory = HostMemory::new(4096).unwrap();
    let error = pd.register(&memory, None, Access::REMOTE_WRITE).unwrap_err();
    assert!(error.to_string().contains("add local-write"), "{error}");
    // rxe of the guest's kernel has no on-demand paging; newer kernels accept this.
    match pd.register(&memory, None, Access::LOCAL_WRITE | Access::ON_DEMAND) {
        Ok(_) => eprintln!("this device supports on-demand paging"),
        Err(error) => {
            assert_eq!(error.kind(), &Kind::Unsupported, "{error}");
            assert!(error.to_string().contains("without on-demand"), "{error}");
        }
    }
}

fn dma_bufs_are_rejected_with_an_alternative() {
    let context = Context::open(&device_name()).unwrap();
    let driver = context.device().driver.clone();
    if driver.as_deref() != Some("rxe") {
        eprintln!("skipped: {driver:?} may support dma-bufs, and this case needs a rejection");
        return;
    }
    let pd = context.create_pd().unwrap();
    let memory = HostMemory::new(4096).unwrap();
    let range = DmaBufRange { fd: memory.as_fd(), offset: 0, len: 4096 };
    let error = pd.register_dmabuf(range, None, Access::ALL).unwrap_err();
    assert_eq!(error.kind(), &Kind::Unsupported, "{error}");
    let text = error.to_string();
    for part in [&device_name(), "rxe never does", "staged path"] {
        assert!(text.contains(part), "{text}");
    }
    // The alternative: plain memory, into which data is staged.
    assert!(pd.register(&memory, None, Access::ALL).is_ok());
}

/// Errors for an ordinary user: first without permission for the device node, then with a limit on
/// locked memory.
fn unprivileged_users() {
    let device =
        devices().unwrap().into_iter().find(|device| device.name == device_name()).unwrap();
    let run = || {
        let role = Role::new("ibv", format!("try {}", device.name));
        let mut command = role.command_after("ulimit -l 64");
        let output = command.uid(65_534).gid(65_534).output().unwrap();
        String::from_utf8(output.stdout).unwrap()
    };
    assert!(shell(&format!("chmod 600 {}", device.node)));
    let closed = run();
    assert!(shell(&format!("chmod 666 {}", device.node)));
    let limited = run();
    assert!(
        closed.starts_with("PermissionDenied: ") && closed.contains("rdma-core's udev rule"),
        "{closed}"
    );
    assert!(limited.starts_with("OutOfMemory: "), "{limited}");
    assert!(
        limited.contains("may lock 64 KiB in total") && limited.contains("ulimit -l"),
        "{limited}"
    );
}

/// Run as another user by the case above: opens the device, registers memory, prints the outcome.
pub fn try_as_this_user(names: &[&str]) {
    let outcome = names.iter().try_for_each(|name| {
        let context = Context::open(name)?;
        let memory = HostMemory::new(1 << 20)?;
        context.create_pd()?.register(&memory, None, Access::ALL).map(drop)
    });
    match outcome {
        Ok(()) => println!("it works"),
        Err(error) => println!("{error:?}"),
    }
}

//! What an errno or a completion status means, and what to do about it.
//!
//! Pure functions of the attempted operation and its result.

use std::borrow::Cow;

use warpwire_proto::qp::State;

use crate::error::{Error, Kind};
use crate::host::{Limit, Memlock};
use crate::mlx5::Status;
use crate::units;

/// The attempted operation.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Attempt<'a> {
    /// List devices.
    List,
    /// Open the device of this name.
    Open(&'a str),
    /// Close a device.
    Close,
    /// Query the attributes of this device.
    Query(&'a str),
    /// Query a port of this device.
    QueryPort(&'a str, u8),
    /// List the GIDs of this device.
    QueryGids(&'a str),
    /// Allocate a protection domain.
    CreatePd,
    /// Register memory.
    Register {
        /// Length in bytes.
        len: u64,
        /// Whether on-demand paging was requested.
        on_demand: bool,
        /// Locked-memory limit of this process, if known.
        memlock: Option<Memlock>,
    },
    /// Register a dma-buf with this device.
    RegisterDmaBuf(&'a str),
    /// Create a completion queue of this many entries.
    CreateCq(u32),
    /// Create a shared receive queue.
    CreateSrq,
    /// Arm a shared receive queue.
    ArmSrq,
    /// Create a queue pair.
    CreateQp,
    /// Query a queue pair.
    QueryQp,
    /// Move a queue pair to this state.
    Modify(State),
    /// Create an address handle.
    CreateAddress,
    /// Poll completions.
    Poll,
    /// Create an event channel, arm a queue, or take an event.
    Events,
}

impl Attempt<'_> {
    /// The operation as a verb phrase.
    fn phrase(&self) -> Cow<'static, str> {
        match self {
            Self::List => "list RDMA devices".into(),
            Self::Open(name) => format!("open {name}").into(),
            Self::Close => "close an RDMA device".into(),
            Self::Query(name) => format!("query {name}").into(),
            Self::QueryPort(name, port) => format!("query port {port} of {name}").into(),
            Self::QueryGids(name) => format!("list the GIDs of {name}").into(),
            Self::CreatePd => "allocate a protection domain".into(),
            Self::Register { len, .. } => format!("register {}", units::bytes(*len)).into(),
            Self::RegisterDmaBuf(name) => format!("register a dma-buf with {name}").into(),
            Self::CreateCq(entries) => {
                format!("create a completion queue of {entries} entries").into()
            }
            Self::CreateSrq => "create a shared receive queue".into(),
            Self::ArmSrq => "arm a shared receive queue".into(),
            Self::CreateQp => "create a queue pair".into(),
            Self::QueryQp => "query a queue pair".into(),
            Self::Modify(to) => format!("move a queue pair to {to}").into(),
            Self::CreateAddress => "create an address handle".into(),
            Self::Poll => "poll completions".into(),
            Self::Events => "use events".into(),
        }
    }
}

/// Why an operation failed, and what to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Explanation {
    /// The kind of failure, for programs.
    pub kind: Kind,
    /// The reason, as a clause.
    pub why: String,
    /// What to do, if known.
    pub fix: Option<String>,
}

impl Explanation {
    fn new(kind: Kind, why: impl Into<String>, fix: impl Into<String>) -> Self {
        Self { kind, why: why.into(), fix: Some(fix.into()) }
    }

    #[cold]
    pub(super) fn into_error(self, attempt: Attempt<'_>) -> Error {
        let error = Error::new(self.kind, attempt.phrase()).why(self.why);
        match self.fix {
            Some(fix) => error.fix(fix),
            None => error,
        }
    }
}

pub(super) fn last_errno() -> i32 {
    std::io::Error::last_os_error().raw_os_error().unwrap_or(0)
}

const MEMLOCK_FIX: &str = "`ulimit -l unlimited`, with `* - memlock unlimited` in \
     /etc/security/limits.conf; Docker: `--ulimit memlock=-1`; or register less";

/// Explains an errno of the attempted operation.
///
/// ```
/// use warpwire::ibv::{Attempt, explain};
/// let refused = explain(95, Attempt::RegisterDmaBuf("rxe0")); // EOPNOTSUPP
/// assert!(refused.fix.unwrap().contains("staged"));
/// ```
#[cold]
pub fn explain(errno: i32, attempt: Attempt<'_>) -> Explanation {
    let found = match attempt {
        Attempt::List => listing(errno),
        Attempt::Open(name) => opening(errno, name),
        Attempt::Register { len, on_demand, memlock } => {
            registering(errno, len, on_demand, memlock)
        }
        Attempt::RegisterDmaBuf(name) => registering_dma_buf(errno, name),
        Attempt::Modify(to) => modifying(errno, to),
        Attempt::CreateAddress => unreachable_peer(errno),
        Attempt::QueryPort(name, port) if errno == libc::EINVAL => Some(Explanation::new(
            Kind::InvalidArgument,
            format!("{name} has no port {port}"),
            "ports count from 1; `warpwire devices` lists them",
        )),
        Attempt::CreateCq(_) | Attempt::CreateSrq | Attempt::CreateQp => creating(errno),
        _ => None,
    };
    found.unwrap_or_else(|| plain(errno))
}

fn listing(errno: i32) -> Option<Explanation> {
    (errno == libc::ENOSYS || errno == libc::ENOENT).then(|| {
        Explanation::new(
            Kind::Unavailable,
            "the kernel has no RDMA support (ib_uverbs is not loaded)",
            "`sudo modprobe ib_uverbs` and the NIC's RDMA driver, such as mlx5_ib; `warpwire \
             doctor` shows what is present",
        )
    })
}

fn opening(errno: i32, name: &str) -> Option<Explanation> {
    match errno {
        libc::EACCES | libc::EPERM => Some(Explanation::new(
            Kind::PermissionDenied,
            format!("this user may not open /dev/infiniband/uverbs* of {name}"),
            "set the node's mode to 0666, as rdma-core's udev rule does, or join its group; \
             Docker: `--device=/dev/infiniband`; or run as root",
        )),
        libc::ENOENT | libc::ENXIO | libc::ENODEV => Some(Explanation::new(
            Kind::Unavailable,
            format!("there is no node in /dev/infiniband for {name}"),
            "Docker: `--device=/dev/infiniband`; else `sudo modprobe ib_uverbs`, and check that \
             udev creates it",
        )),
        _ => None,
    }
}

fn registering(
    errno: i32,
    len: u64,
    on_demand: bool,
    memlock: Option<Memlock>,
) -> Option<Explanation> {
    let limit = memlock.filter(|memlock| !memlock.exempt).map(|memlock| memlock.soft);
    match (errno, limit) {
        (libc::ENOMEM, Some(Limit::Bytes(limit))) => Some(Explanation::new(
            Kind::OutOfMemory,
            format!(
                "this process may lock {} in total, and registered memory is locked",
                units::bytes(limit)
            ),
            MEMLOCK_FIX,
        )),
        (libc::ENOMEM, Some(Limit::Unlimited)) => Some(Explanation::new(
            Kind::OutOfMemory,
            "the host or the NIC's translation table is out of memory (the locked-memory limit \
             is not the reason)",
            "register less, or fewer regions; huge pages need fewer table entries",
        )),
        (libc::ENOMEM, None) => Some(Explanation::new(
            Kind::OutOfMemory,
            "the kernel could not lock that much memory, or the NIC's translation table is full",
            MEMLOCK_FIX,
        )),
        (libc::EOPNOTSUPP | libc::EINVAL, _) if on_demand => Some(Explanation::new(
            Kind::Unsupported,
            "the device or its driver does not support on-demand paging",
            "register without on-demand; the memory is then pinned",
        )),
        (libc::EFAULT, _) => Some(Explanation::new(
            Kind::OutOfRange,
            format!(
                "part of the {} is not mapped in this process with the required rights",
                units::bytes(len)
            ),
            "map all of it first, writable if peers write to it; GPU memory needs a dma-buf",
        )),
        (libc::EINVAL, _) => Some(Explanation::new(
            Kind::InvalidArgument,
            "the range is empty or wraps, or the device does not support these access rights",
            "remote-write and remote-atomic need local-write; atomics and relaxed ordering \
             depend on the device",
        )),
        _ => None,
    }
}

fn registering_dma_buf(errno: i32, name: &str) -> Option<Explanation> {
    const STAGED: &str = "the staged path is used: copies through pinned host memory, slower";
    match errno {
        libc::EOPNOTSUPP => Some(Explanation::new(
            Kind::Unsupported,
            format!(
                "the driver of {name} does not support dma-bufs (rxe never does; mlx5, efa, irdma \
                 and bnxt_re do)"
            ),
            format!("use one of those NICs, with Linux 5.12 or newer; until then {STAGED}"),
        )),
        libc::EINVAL => Some(Explanation::new(
            Kind::InvalidArgument,
            "offset and iova differ within a page, the range is not in the dma-buf, or the NIC \
             cannot reach its memory",
            format!(
                "make iova and offset equal modulo 4096; put GPU and NIC under one PCIe root; else \
                 {STAGED}"
            ),
        )),
        libc::EBADF => Some(Explanation::new(
            Kind::InvalidArgument,
            "the descriptor is not a dma-buf",
            "export one: `Allocation::export_dmabuf`",
        )),
        _ => None,
    }
}

fn modifying(errno: i32, to: State) -> Option<Explanation> {
    match (errno, to) {
        (libc::EINVAL, _) => Some(Explanation::new(
            Kind::InvalidArgument,
            format!("the device rejects the transition to {to} with these attributes"),
            "go through RESET, INIT, RTR and RTS in order; keep MTU, timeouts and max_rd_atomic \
             within the device's limits",
        )),
        (_, State::Rtr) => unreachable_peer(errno),
        _ => None,
    }
}

/// Failures to resolve the address of a peer.
fn unreachable_peer(errno: i32) -> Option<Explanation> {
    match errno {
        libc::ETIMEDOUT | libc::EHOSTUNREACH => Some(Explanation::new(
            Kind::Unavailable,
            "the peer's address does not resolve (no reply to ARP or neighbour discovery)",
            "`ping` it from the interface of this device; check cable, VLAN and address",
        )),
        libc::ENETUNREACH => Some(Explanation::new(
            Kind::Unavailable,
            "there is no route from this device to the peer's address",
            "use a GID in the network of the peer, or add a route",
        )),
        libc::EINVAL | libc::ENOENT | libc::ENODATA => Some(Explanation::new(
            Kind::InvalidArgument,
            "the device rejects this address: the GID index is not in this port's table, or is of \
             another address family",
            "`warpwire devices -v` lists the GIDs; use one of the peer's family",
        )),
        _ => None,
    }
}

fn creating(errno: i32) -> Option<Explanation> {
    match errno {
        libc::EINVAL => Some(Explanation::new(
            Kind::InvalidArgument,
            "the request exceeds the limits of the device",
            "`warpwire devices -v` shows its limits on queue depth and scatter-gather entries",
        )),
        libc::ENOMEM => Some(Explanation::new(
            Kind::OutOfMemory,
            "no memory for its queues, or a limit of the device or on locked memory is reached",
            MEMLOCK_FIX,
        )),
        _ => None,
    }
}

/// An errno without a specific explanation.
fn plain(errno: i32) -> Explanation {
    let kind = match errno {
        libc::EACCES | libc::EPERM => Kind::PermissionDenied,
        libc::ENOMEM => Kind::OutOfMemory,
        libc::EBUSY => Kind::Busy,
        libc::EOPNOTSUPP | libc::ENOSYS => Kind::Unsupported,
        libc::EIO | libc::ENODEV => Kind::DeviceLost,
        other => Kind::Os(other),
    };
    let fix = (kind == Kind::DeviceLost).then(|| {
        "see `dmesg`: the device failed or was removed; reopen it when it is back".to_owned()
    });
    Explanation { kind, why: std::io::Error::from_raw_os_error(errno).to_string(), fix }
}

/// Explains a completion status; `None` for success.
///
/// ```
/// use warpwire::ibv::explain_status;
/// use warpwire::mlx5::Status;
/// assert!(explain_status(Status::RetryExceeded).unwrap().why.contains("does not answer"));
/// assert_eq!(explain_status(Status::Success), None);
/// ```
#[cold]
pub fn explain_status(status: Status) -> Option<Explanation> {
    let (kind, why, fix) = match status {
        Status::Success => return None,
        Status::RetryExceeded => (
            Kind::Unavailable,
            "the peer does not answer: all retries were used up",
            "check that its process is alive, that its queue pair is in RTR with the QPN and PSN \
             of this side, that both use the same MTU, and that UDP port 4791 is not blocked",
        ),
        Status::RnrRetryExceeded => (
            Kind::Unavailable,
            "the peer had no receive posted: all RNR retries were used up",
            "post receives earlier there, or set rnr_retry to 7 (no limit)",
        ),
        Status::LocalProtection => (
            Kind::InvalidArgument,
            "a scatter-gather entry is not in a memory region of the queue pair's domain, or may \
             not be written",
            "compare address, length and lkey with the registration; receives and reads need \
             local-write",
        ),
        Status::LocalLength => (
            Kind::InvalidArgument,
            "a message was longer than the receive that it consumed, or than the port's maximum",
            "post longer receives",
        ),
        Status::RemoteAccess => (
            Kind::PermissionDenied,
            "the peer rejects the access: rkey, range or access right is wrong",
            "compare address and rkey with the peer's memory region, its access rights, and \
             those of its queue pair",
        ),
        Status::RemoteInvalidRequest => (
            Kind::InvalidArgument,
            "the peer rejects the request: too long for its receive, or an operation that it \
             does not support",
            "post longer receives there; allow reads and atomics on its queue pair",
        ),
        Status::RemoteOperation => (
            Kind::Unavailable,
            "the peer failed to execute it; its own completion has the reason",
            "check the peer's completions (rxe reports this when a receive is too short)",
        ),
        Status::Flushed => (
            Kind::Busy,
            "the queue pair had failed, or was moved to ERR, before this was executed",
            "the first failed completion has the reason; move the queue pair to RESET and \
             reconnect",
        ),
        Status::LocalQpOperation => (
            Kind::InvalidArgument,
            "the device rejects the request as invalid",
            "check opcode, scatter-gather entries and inline bytes",
        ),
        _ => (
            Kind::Unavailable,
            "the device aborted the work",
            "see vendor_error in the completion, and `dmesg`",
        ),
    };
    Some(Explanation::new(kind, why, fix))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(errno: i32, attempt: Attempt<'_>) -> String {
        explain(errno, attempt).into_error(attempt).to_string()
    }

    fn register(memlock: Option<Memlock>, on_demand: bool) -> Attempt<'static> {
        Attempt::Register { len: 1 << 30, on_demand, memlock }
    }

    #[test]
    fn common_failures_name_their_fix() {
        let small =
            Memlock { soft: Limit::Bytes(8 << 20), hard: Limit::Bytes(8 << 20), exempt: false };
        let none = Memlock { soft: Limit::Unlimited, ..small };
        for (errno, attempt, expected) in [
            (libc::ENOSYS, Attempt::List, ["no RDMA", "modprobe ib_uverbs"]),
            (libc::EACCES, Attempt::Open("mlx5_0"), ["may not open /dev/infiniband", "0666"]),
            (libc::EPERM, Attempt::Open("mlx5_0"), ["open mlx5_0", "--device=/dev/infiniband"]),
            (libc::ENOENT, Attempt::Open("mlx5_0"), ["no node", "--device=/dev/infiniband"]),
            (libc::ENOMEM, register(Some(small), false), ["may lock 8 MiB", "ulimit -l unlimited"]),
            (libc::ENOMEM, register(None, false), ["register 1 GiB", "ulimit -l"]),
            (libc::ENOMEM, register(Some(none), false), ["is not the reason", "register less"]),
            (libc::EINVAL, register(None, true), ["on-demand paging", "without on-demand"]),
            (libc::EINVAL, register(None, false), ["empty or wraps", "local-write"]),
            (libc::EFAULT, register(None, false), ["part of the 1 GiB", "dma-buf"]),
            (libc::EOPNOTSUPP, Attempt::RegisterDmaBuf("rxe0"), ["rxe never does", "staged path"]),
            (libc::EINVAL, Attempt::RegisterDmaBuf("mlx5_0"), ["within a page", "modulo 4096"]),
            (libc::EBADF, Attempt::RegisterDmaBuf("mlx5_0"), ["not a dma-buf", "export_dmabuf"]),
            (libc::ETIMEDOUT, Attempt::Modify(State::Rtr), ["no reply to ARP", "ping"]),
            (libc::ENETUNREACH, Attempt::CreateAddress, ["no route", "GID"]),
            (libc::EINVAL, Attempt::CreateAddress, ["GID index", "warpwire devices -v"]),
            (libc::EINVAL, Attempt::Modify(State::Rts), ["transition to RTS", "in order"]),
            (libc::EINVAL, Attempt::CreateQp, ["exceeds the limits", "devices -v"]),
            (libc::EINVAL, Attempt::QueryPort("mlx5_0", 3), ["no port 3", "count from 1"]),
            (libc::EIO, Attempt::QueryQp, ["Input/output error", "dmesg"]),
        ] {
            let text = text(errno, attempt);
            assert!(expected.iter().all(|part| text.contains(part)), "{attempt:?}: {text}");
        }
    }

    #[test]
    fn exempt_process_gets_no_memlock_advice() {
        let exempt = Memlock { soft: Limit::Bytes(1), hard: Limit::Bytes(1), exempt: true };
        assert!(!text(libc::ENOMEM, register(Some(exempt), false)).contains("may lock"));
    }

    #[test]
    fn unexpected_errno_keeps_its_os_message() {
        let odd = explain(libc::EXDEV, Attempt::CreatePd);
        assert_eq!((odd.kind, odd.fix), (Kind::Os(libc::EXDEV), None));
        assert!(odd.why.contains("cross-device"), "{}", odd.why);
        assert_eq!(explain(libc::EBUSY, Attempt::Close).kind, Kind::Busy);
    }

    #[test]
    fn every_status_but_success_has_a_reason_and_a_fix() {
        use Status::*;
        assert_eq!(explain_status(Success), None);
        for status in [
            LocalLength,
            LocalQpOperation,
            LocalProtection,
            Flushed,
            MwBind,
            BadResponse,
            LocalAccess,
            RemoteInvalidRequest,
            RemoteAccess,
            RemoteOperation,
            RetryExceeded,
            RnrRetryExceeded,
            RemoteAbort,
            General,
        ] {
            let explained = explain_status(status).unwrap();
            assert!(!explained.why.is_empty() && explained.fix.is_some(), "{status}");
        }
    }
}

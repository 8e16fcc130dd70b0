//! What an errno of the kernel's, or a status of a completion, means, and what to do about it.
//!
//! Pure functions of what was tried: a test holds each.

use std::borrow::Cow;

use warpwire_proto::qp::State;

use crate::error::{Error, Kind};
use crate::host::{Limit, Memlock};
use crate::mlx5::Status;
use crate::units;

/// What was tried.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Attempt<'a> {
    /// List devices.
    List,
    /// Open that device.
    Open(&'a str),
    /// Close a device.
    Close,
    /// Read what that device can do.
    Query(&'a str),
    /// Read the state of a port.
    QueryPort(&'a str, u8),
    /// Read the addresses of a port.
    QueryGids(&'a str),
    /// Make a protection domain.
    CreatePd,
    /// Register memory.
    Register {
        /// How many bytes.
        len: u64,
        /// Whether its pages were to be found when they are needed.
        on_demand: bool,
        /// How much memory this process may lock, where that is known.
        memlock: Option<Memlock>,
    },
    /// Register a dma-buf with that device.
    RegisterDmaBuf(&'a str),
    /// Make a completion queue of so many entries.
    CreateCq(u32),
    /// Make a shared receive queue.
    CreateSrq,
    /// Arm a shared receive queue.
    ArmSrq,
    /// Make a queue pair.
    CreateQp,
    /// Read the state of a queue pair.
    QueryQp,
    /// Take a queue pair to a state.
    Modify(State),
    /// Make ready to send datagrams to a peer.
    CreateAddress,
    /// Post work.
    PostSend,
    /// Post a receive.
    PostReceive,
    /// Take completions.
    Poll,
    /// Ask for an event, or take one.
    Events,
}

impl Attempt<'_> {
    /// It, as a verb phrase.
    fn phrase(&self) -> Cow<'static, str> {
        match self {
            Self::List => "list RDMA devices".into(),
            Self::Open(name) => format!("open {name}").into(),
            Self::Close => "close an RDMA device".into(),
            Self::Query(name) => format!("ask {name} what it can do").into(),
            Self::QueryPort(name, port) => {
                format!("ask port {port} of {name} for its state").into()
            }
            Self::QueryGids(name) => format!("list the addresses (GIDs) of {name}").into(),
            Self::CreatePd => "make a protection domain".into(),
            Self::Register { len, .. } => format!("register {}", units::bytes(*len)).into(),
            Self::RegisterDmaBuf(name) => format!("register a dma-buf with {name}").into(),
            Self::CreateCq(entries) => format!("make a completion queue of {entries}").into(),
            Self::CreateSrq => "make a shared receive queue".into(),
            Self::ArmSrq => "arm a shared receive queue".into(),
            Self::CreateQp => "make a queue pair".into(),
            Self::QueryQp => "read a queue pair's state".into(),
            Self::Modify(to) => format!("take a queue pair to {to}").into(),
            Self::CreateAddress => "make an address handle".into(),
            Self::PostSend => "post work".into(),
            Self::PostReceive => "post a receive".into(),
            Self::Poll => "take completions".into(),
            Self::Events => "ask for events".into(),
        }
    }
}

/// Why something failed, and what to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Explanation {
    /// The sort of failure.
    pub kind: Kind,
    /// Why it failed.
    pub why: String,
    /// What to do, where that is known.
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

const MEMLOCK_FIX: &str = "`ulimit -l unlimited`, with `* - memlock unlimited` in /etc/security/limits.conf; Docker: \
     `--ulimit memlock=-1`; or register less";

/// What that errno means for what was tried.
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
        Attempt::PostSend | Attempt::PostReceive => posting(errno),
        Attempt::CreateCq(_) | Attempt::CreateSrq | Attempt::CreateQp => creating(errno),
        _ => None,
    };
    found.unwrap_or_else(|| plain(errno))
}

fn listing(errno: i32) -> Option<Explanation> {
    (errno == libc::ENOSYS || errno == libc::ENOENT).then(|| {
        Explanation::new(
            Kind::Unavailable,
            "the kernel has no RDMA (ib_uverbs is not loaded)",
            "`sudo modprobe ib_uverbs`, and the NIC's RDMA driver, as mlx5_ib; `warpwire doctor` says what is there",
        )
    })
}

fn opening(errno: i32, name: &str) -> Option<Explanation> {
    match errno {
        libc::EACCES | libc::EPERM => Some(Explanation::new(
            Kind::PermissionDenied,
            format!("this user may not open /dev/infiniband/uverbs* of {name}"),
            "let the node be 0666, which rdma-core's udev rule does, or join its group; Docker: \
             `--device=/dev/infiniband`; or run as root",
        )),
        libc::ENOENT | libc::ENXIO | libc::ENODEV => Some(Explanation::new(
            Kind::Unavailable,
            format!("there is no node in /dev/infiniband for {name}"),
            "Docker: `--device=/dev/infiniband`; else `sudo modprobe ib_uverbs` and see whether udev makes it",
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
                "this process may lock {} in all, and registered memory is locked",
                units::bytes(limit)
            ),
            MEMLOCK_FIX,
        )),
        (libc::ENOMEM, Some(Limit::Unlimited)) => Some(Explanation::new(
            Kind::OutOfMemory,
            "the machine, or the NIC's tables, have no room for it (the limit on locked memory is not the reason)",
            "register less, or fewer pieces; huge pages need fewer entries",
        )),
        (libc::ENOMEM, None) => Some(Explanation::new(
            Kind::OutOfMemory,
            "the kernel could not lock that much memory, or the NIC's tables are full",
            MEMLOCK_FIX,
        )),
        (libc::EOPNOTSUPP | libc::EINVAL, _) if on_demand => Some(Explanation::new(
            Kind::Unsupported,
            "this device, or its driver, does not page on demand",
            "register without on-demand; the memory is then locked",
        )),
        (libc::EFAULT, _) => Some(Explanation::new(
            Kind::OutOfRange,
            format!(
                "not all of the {} are memory of this process that may be used so",
                units::bytes(len)
            ),
            "map them first; memory that peers write must be writable; GPU memory needs a dma-buf",
        )),
        (libc::EINVAL, _) => Some(Explanation::new(
            Kind::InvalidArgument,
            "the range is empty or wraps, or the device does not take these rights",
            "remote-write and remote-atomic need local-write; atomics and relaxed ordering depend on the device",
        )),
        _ => None,
    }
}

fn registering_dma_buf(errno: i32, name: &str) -> Option<Explanation> {
    const STAGED: &str = "data goes the staged path, through pinned host memory: slower, and right";
    match errno {
        libc::EOPNOTSUPP => Some(Explanation::new(
            Kind::Unsupported,
            format!(
                "the driver of {name} does not register dma-bufs (rxe does on no kernel; mlx5, efa, irdma and bnxt_re do)"
            ),
            format!("use such a NIC, with Linux 5.12 or newer; until then {STAGED}"),
        )),
        libc::EINVAL => Some(Explanation::new(
            Kind::InvalidArgument,
            "offset and iova differ within a page, the range is not in the dma-buf, or the NIC cannot reach its memory",
            format!(
                "let iova and offset be equal modulo 4096; GPU and NIC must be under one PCIe root; else {STAGED}"
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
            format!("the device does not take this step to {to} with these attributes"),
            "take RESET, INIT, RTR, RTS in turn; let MTU, timeouts and numbers of reads be within the device's",
        )),
        (_, State::Rtr) => unreachable_peer(errno),
        _ => None,
    }
}

/// A peer that is to be found by its address.
fn unreachable_peer(errno: i32) -> Option<Explanation> {
    match errno {
        libc::ETIMEDOUT | libc::EHOSTUNREACH => Some(Explanation::new(
            Kind::Unavailable,
            "nobody answers at the peer's address (no reply to ARP or neighbour discovery)",
            "`ping` it from the interface of this device; look at cable, VLAN and address",
        )),
        libc::ENETUNREACH => Some(Explanation::new(
            Kind::Unavailable,
            "no route leads from this device to the peer's address",
            "choose the GID whose network the peer is in, or add a route",
        )),
        libc::EINVAL | libc::ENOENT | libc::ENODATA => Some(Explanation::new(
            Kind::InvalidArgument,
            "the device does not take this address: the GID index is not one of this port's, or of another family",
            "`warpwire devices -v` lists the GIDs; take one of the peer's family",
        )),
        _ => None,
    }
}

fn posting(errno: i32) -> Option<Explanation> {
    match errno {
        libc::ENOMEM | libc::ENOSPC => Some(Explanation::new(
            Kind::Busy,
            "the queue is full",
            "take completions first, or make it deeper",
        )),
        libc::EINVAL => Some(Explanation::new(
            Kind::InvalidArgument,
            "the device does not take this work: its state, its operation, or more ranges or inline bytes than it has",
            "connect the queue pair first; see what it was made with",
        )),
        _ => None,
    }
}

fn creating(errno: i32) -> Option<Explanation> {
    match errno {
        libc::EINVAL => Some(Explanation::new(
            Kind::InvalidArgument,
            "more was asked for than the device has",
            "`warpwire devices -v` says how deep its queues may be, and how many ranges they take",
        )),
        libc::ENOMEM => Some(Explanation::new(
            Kind::OutOfMemory,
            "no memory for its queues, or more than the device has, or the limit on locked memory is reached",
            MEMLOCK_FIX,
        )),
        _ => None,
    }
}

/// An errno with no meaning of its own here.
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
        "see `dmesg`: the device failed or went away; open it anew when it is back".to_owned()
    });
    Explanation { kind, why: std::io::Error::from_raw_os_error(errno).to_string(), fix }
}

/// Why work ended with that status, and what to do; `None` for success.
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
            "the peer does not answer, however often it was asked",
            "see that its process lives, that its queue pair is in RTR with our number and sequence, that both use one \
             MTU, and that UDP port 4791 passes",
        ),
        Status::RnrRetryExceeded => (
            Kind::Unavailable,
            "the peer had no receive posted, however often it was tried",
            "let it post receives earlier, or let rnr_retry be 7 (without end)",
        ),
        Status::LocalProtection => (
            Kind::InvalidArgument,
            "a range of the work is not in registered memory of this queue pair's domain, or may not be written",
            "compare address, length and lkey with the registration; receives and reads need local-write",
        ),
        Status::LocalLength => (
            Kind::InvalidArgument,
            "a message was longer than the receive that took it, or than the port's longest",
            "post longer receives",
        ),
        Status::RemoteAccess => (
            Kind::PermissionDenied,
            "the peer does not let us reach that memory: rkey, range or right are wrong",
            "compare address and rkey with the peer's registration, its rights, and the rights of its queue pair",
        ),
        Status::RemoteInvalidRequest => (
            Kind::InvalidArgument,
            "the peer could not make sense of the request: too long for its receive, or an operation that it lacks",
            "post longer receives there; let it allow reads and atomics",
        ),
        Status::RemoteOperation => (
            Kind::Unavailable,
            "the peer could not carry it out; its own completion says why",
            "look at the peer's completions (rxe answers so when a receive is too short)",
        ),
        Status::Flushed => (
            Kind::Busy,
            "the queue pair had failed, or was taken to ERR, before this was begun",
            "the first completion that failed has the reason; take it through RESET and connect anew",
        ),
        Status::LocalQpOperation => (
            Kind::InvalidArgument,
            "the device found the request itself wrong",
            "see operation, ranges and inline bytes",
        ),
        _ => (
            Kind::Unavailable,
            "the device gave the work up",
            "see the vendor's number in the completion, and `dmesg`",
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
    fn every_usual_failure_names_its_fix() {
        let small =
            Memlock { soft: Limit::Bytes(8 << 20), hard: Limit::Bytes(8 << 20), exempt: false };
        let none = Memlock { soft: Limit::Unlimited, ..small };
        for (errno, attempt, says) in [
            (libc::ENOSYS, Attempt::List, ["no RDMA", "modprobe ib_uverbs"]),
            (libc::EACCES, Attempt::Open("mlx5_0"), ["may not open /dev/infiniband", "0666"]),
            (libc::EPERM, Attempt::Open("mlx5_0"), ["open mlx5_0", "--device=/dev/infiniband"]),
            (libc::ENOENT, Attempt::Open("mlx5_0"), ["no node", "--device=/dev/infiniband"]),
            (libc::ENOMEM, register(Some(small), false), ["may lock 8 MiB", "ulimit -l unlimited"]),
            (libc::ENOMEM, register(None, false), ["register 1 GiB", "ulimit -l"]),
            (libc::ENOMEM, register(Some(none), false), ["is not the reason", "register less"]),
            (libc::EINVAL, register(None, true), ["page on demand", "without on-demand"]),
            (libc::EINVAL, register(None, false), ["empty or wraps", "local-write"]),
            (libc::EFAULT, register(None, false), ["not all of the 1 GiB", "dma-buf"]),
            (
                libc::EOPNOTSUPP,
                Attempt::RegisterDmaBuf("rxe0"),
                ["rxe does on no kernel", "staged path"],
            ),
            (libc::EINVAL, Attempt::RegisterDmaBuf("mlx5_0"), ["within a page", "modulo 4096"]),
            (libc::EBADF, Attempt::RegisterDmaBuf("mlx5_0"), ["not a dma-buf", "export_dmabuf"]),
            (libc::ETIMEDOUT, Attempt::Modify(State::Rtr), ["nobody answers", "ping"]),
            (libc::ENETUNREACH, Attempt::CreateAddress, ["no route", "GID"]),
            (libc::EINVAL, Attempt::CreateAddress, ["GID index", "warpwire devices -v"]),
            (libc::EINVAL, Attempt::Modify(State::Rts), ["step to RTS", "in turn"]),
            (libc::ENOMEM, Attempt::PostSend, ["queue is full", "take completions"]),
            (libc::EINVAL, Attempt::PostReceive, ["does not take", "connect"]),
            (libc::EINVAL, Attempt::CreateQp, ["more was asked", "devices -v"]),
            (libc::EINVAL, Attempt::QueryPort("mlx5_0", 3), ["no port 3", "count from 1"]),
            (libc::EIO, Attempt::QueryQp, ["Input/output error", "dmesg"]),
        ] {
            let text = text(errno, attempt);
            assert!(says.iter().all(|part| text.contains(part)), "{attempt:?}: {text}");
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

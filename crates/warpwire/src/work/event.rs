//! News of queues, ports and devices.

/// Something that befell a queue, a port or a device, beside completions. Queues are told by their numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum AsyncEvent {
    /// The peer spoke before the queue pair was told to send.
    Established {
        /// Which.
        qpn: u32,
    },
    /// The send queue is drained.
    Drained {
        /// Which.
        qpn: u32,
    },
    /// The peer's request was senseless or not allowed; the queue pair failed.
    RequestError {
        /// Which.
        qpn: u32,
    },
    /// The peer reached for memory that it may not access; the queue pair failed.
    AccessError {
        /// Which.
        qpn: u32,
    },
    /// The queue pair failed for a reason of its own.
    Fatal {
        /// Which.
        qpn: u32,
    },
    /// A queue pair that failed takes no more from its shared receive queue.
    LastReceiveReached {
        /// Which.
        qpn: u32,
    },
    /// A shared receive queue holds fewer than its limit.
    LimitReached {
        /// Which.
        srqn: u32,
    },
    /// A shared receive queue failed.
    SrqFailed {
        /// Which.
        srqn: u32,
    },
    /// A completion queue was full: a completion is lost.
    CqOverrun {
        /// Which.
        cqn: u32,
    },
    /// A port carries traffic from now on.
    PortActive(u8),
    /// A port carries none any more.
    PortDown(u8),
    /// The addresses of a port changed.
    GidsChanged(u8),
    /// Something else of a port: `ibv_event_type` has the number.
    Port(u8, u32),
    /// The device is beyond repair.
    DeviceFailed,
    /// Anything else: `ibv_event_type` has the number.
    Other(u32),
}

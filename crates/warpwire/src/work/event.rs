//! Asynchronous events of queues, ports and devices.

/// Something that happened to a queue, a port or a device outside completions; queues are
/// identified by number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum AsyncEvent {
    /// A packet of the peer arrived while the queue pair was in RTR.
    Established {
        /// The queue pair.
        qpn: u32,
    },
    /// The send queue has drained after a transition to SQD.
    Drained {
        /// The queue pair.
        qpn: u32,
    },
    /// The peer's request was malformed or not permitted; the queue pair is in the error state.
    RequestError {
        /// The queue pair.
        qpn: u32,
    },
    /// The peer accessed memory without the right to; the queue pair is in the error state.
    AccessError {
        /// The queue pair.
        qpn: u32,
    },
    /// The queue pair failed for a local reason and is in the error state.
    Fatal {
        /// The queue pair.
        qpn: u32,
    },
    /// A queue pair in the error state takes no more receives from its shared receive queue.
    LastReceiveReached {
        /// The queue pair.
        qpn: u32,
    },
    /// A shared receive queue has fewer receives left than its limit. The limit is then disarmed.
    LimitReached {
        /// The shared receive queue.
        srqn: u32,
    },
    /// A shared receive queue failed.
    SrqFailed {
        /// The shared receive queue.
        srqn: u32,
    },
    /// A completion queue overran: a completion is lost, and its queue pairs fail.
    CqOverrun {
        /// The completion queue.
        cqn: u32,
    },
    /// A port (its number) became active.
    PortActive(u8),
    /// A port (its number) went down.
    PortDown(u8),
    /// The GID table of a port (its number) changed.
    GidsChanged(u8),
    /// Another event of a port: the port's number, and the value of `ibv_event_type`.
    Port(u8, u32),
    /// The device failed and cannot recover.
    DeviceFailed,
    /// Any other event: the value of `ibv_event_type`.
    Other(u32),
}

//! The state of a connection, and what messages and the end of its TCP connection do to it: a table
//! without I/O.
//!
//! ```text
//! active:   Connecting -> Requesting -> Replied -> Connected -> Ended
//! passive:  AwaitingRequest -> Requested -> Accepted -> Connected -> Ended
//! ```
//!
//! 1. Messages that the state does not expect end the connection.
//! 2. A connection that was not accepted has no events: programs do not know it yet.
//! 3. Once there was a reply or an acceptance, the end is told exactly once.

use crate::message::{Message, PrivateData, Reply, Request};

/// A program refused, or went away (InfiniBand: consumer defined).
pub(crate) const REASON_CONSUMER: u16 = 28;
/// Nothing listens at this port (InfiniBand: invalid service id).
pub(crate) const REASON_NO_LISTENER: u16 = 8;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// No TCP connection.
    Idle,
    Listening,
    /// The TCP connection is being made.
    Connecting,
    /// The request is sent.
    Requesting,
    /// A reply has come, which the program has to complete.
    Replied,
    /// A TCP connection to a listener, without request so far.
    AwaitingRequest,
    /// A request has come, which the program has to accept or to reject.
    Requested,
    /// The reply is sent.
    Accepted,
    Connected,
    /// The peer is gone, or has refused.
    Ended,
}

/// What a connection's program is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Told {
    AddressResolved,
    RouteResolved,
    Request(Request),
    Reply(Reply),
    Established,
    Rejected {
        reason: u16,
        data: PrivateData,
    },
    /// No answer; the number is an errno value.
    Unreachable(i32),
    Disconnected,
}

/// The next phase, and the event.
pub(crate) type Step = (Phase, Option<Told>);

const GONE: Told = Told::Rejected { reason: REASON_CONSUMER, data: PrivateData::EMPTY };

/// A message has come.
pub(crate) fn received(phase: Phase, message: Message) -> Step {
    match (phase, message) {
        (Phase::AwaitingRequest, Message::Request(request)) => {
            (Phase::Requested, Some(Told::Request(request)))
        }
        (Phase::Requesting, Message::Reply(reply)) => (Phase::Replied, Some(Told::Reply(reply))),
        (Phase::Requesting | Phase::Accepted, Message::Reject { reason, data }) => {
            (Phase::Ended, Some(Told::Rejected { reason, data }))
        }
        (Phase::Accepted, Message::Ready) => (Phase::Connected, Some(Told::Established)),
        (phase, _) => closed(phase),
    }
}

/// The TCP connection has ended, or is of no use any more.
pub(crate) fn closed(phase: Phase) -> Step {
    match phase {
        Phase::Requesting | Phase::Accepted => (Phase::Ended, Some(GONE)),
        Phase::Replied | Phase::Connected => (Phase::Ended, Some(Told::Disconnected)),
        Phase::Connecting => (Phase::Ended, Some(Told::Unreachable(libc::ECONNRESET))),
        Phase::Idle
        | Phase::Listening
        | Phase::AwaitingRequest
        | Phase::Requested
        | Phase::Ended => (Phase::Ended, None),
    }
}

/// The peer has not answered in time.
pub(crate) fn expired(phase: Phase) -> Step {
    match phase {
        Phase::Connecting | Phase::Requesting | Phase::Accepted => {
            (Phase::Ended, Some(Told::Unreachable(libc::ETIMEDOUT)))
        }
        phase => closed(phase),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::{EndPoint, Parameters, Space};

    const PHASES: [Phase; 10] = [
        Phase::Idle,
        Phase::Listening,
        Phase::Connecting,
        Phase::Requesting,
        Phase::Replied,
        Phase::AwaitingRequest,
        Phase::Requested,
        Phase::Accepted,
        Phase::Connected,
        Phase::Ended,
    ];

    fn messages() -> [Message; 5] {
        let end_point = EndPoint { qp_num: 1, psn: 2, gid: [3; 16], mtu: 4, qkey: 0 };
        let (parameters, data) = (Parameters::default(), PrivateData::EMPTY);
        let space = Space::Tcp;
        let request = Request { space, to_port: 1, from_port: 2, end_point, parameters, data };
        [
            Message::Request(request),
            Message::Reply(Reply { end_point, parameters, data }),
            Message::Reject { reason: 28, data },
            Message::Ready,
            Message::Disconnect,
        ]
    }

    #[test]
    fn both_sides_of_a_connection() {
        let [request, reply, reject, ready, disconnect] = messages();
        let (phase, told) = received(Phase::AwaitingRequest, request);
        assert!(phase == Phase::Requested && matches!(told, Some(Told::Request(_))));
        let (phase, told) = received(Phase::Requesting, reply);
        assert!(phase == Phase::Replied && matches!(told, Some(Told::Reply(_))));
        assert_eq!(received(Phase::Accepted, ready), (Phase::Connected, Some(Told::Established)));
        let ended = (Phase::Ended, Some(Told::Disconnected));
        assert_eq!(received(Phase::Connected, disconnect), ended);
        assert_eq!(closed(Phase::Connected), ended);
        let (phase, told) = received(Phase::Requesting, reject);
        assert!(phase == Phase::Ended && matches!(told, Some(Told::Rejected { reason: 28, .. })));
    }

    /// Promise 1, for every message in every phase that does not expect it.
    #[test]
    fn unexpected_messages_end_the_connection() {
        let expected = [
            (Phase::AwaitingRequest, 0),
            (Phase::Requesting, 1),
            (Phase::Requesting, 2),
            (Phase::Accepted, 2),
            (Phase::Accepted, 3),
        ];
        for phase in PHASES {
            for (kind, message) in messages().into_iter().enumerate() {
                let (next, _) = received(phase, message);
                let is_expected = expected.contains(&(phase, kind));
                assert!(is_expected || next == Phase::Ended, "{phase:?} {message:?}");
            }
        }
    }

    /// Promises 2 and 3.
    #[test]
    fn the_end_is_told_once_and_only_to_programs_that_know_the_connection() {
        for phase in PHASES {
            for (next, told) in [closed(phase), expired(phase)] {
                assert_eq!(next, Phase::Ended);
                let is_known = matches!(
                    phase,
                    Phase::Connecting
                        | Phase::Requesting
                        | Phase::Replied
                        | Phase::Accepted
                        | Phase::Connected
                );
                assert_eq!(told.is_some(), is_known, "{phase:?}");
                assert_eq!(closed(next), (Phase::Ended, None));
            }
        }
        let late = Some(Told::Unreachable(libc::ETIMEDOUT));
        assert_eq!(expired(Phase::Requesting).1, late);
        assert_eq!(expired(Phase::Connected).1, Some(Told::Disconnected));
    }
}

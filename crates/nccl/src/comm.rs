//! Communicators and requests, as NCCL holds them.

use std::net::TcpStream;
use std::sync::{Arc, Weak};

use crate::abi::MAX_RECVS;
use crate::lanes::Lanes;
use crate::recv::RecvComm;
use crate::result::{Failure, INTERNAL, INVALID_USAGE, Result};
use crate::ring::SLOTS;
use crate::send::{MAX_SEND_REQUESTS, SendComm};

/// One end of a connection.
pub(crate) enum End {
    Send(SendComm),
    Recv(RecvComm),
}

pub(crate) struct Comm {
    end: End,
    /// Allocated with the communicator; NCCL holds pointers to them.
    requests: Box<[Request]>,
}

/// What NCCL holds of a communicator.
pub(crate) struct Handle(Arc<Comm>);

/// What NCCL holds of an isend or irecv: an index into the communicator's own table.
pub(crate) struct Request {
    comm: Weak<Comm>,
    index: usize,
}

/// A request that is complete: the sizes of its messages.
pub(crate) struct Done {
    pub count: usize,
    pub sizes: [u64; MAX_RECVS],
}

impl Handle {
    pub(crate) fn new(end: End) -> Self {
        let count = match &end {
            End::Send(_) => MAX_SEND_REQUESTS,
            End::Recv(_) => SLOTS,
        };
        Self(Arc::new_cyclic(|comm| Comm {
            end,
            requests: (0..count).map(|index| Request { comm: comm.clone(), index }).collect(),
        }))
    }

    pub(crate) fn lanes(&self) -> &Lanes {
        match &self.0.end {
            End::Send(send) => &send.lanes,
            End::Recv(recv) => &recv.lanes,
        }
    }

    pub(crate) fn is_recv(&self) -> bool {
        matches!(self.0.end, End::Recv(_))
    }

    #[inline]
    pub(crate) fn send(&self) -> Result<&SendComm> {
        match &self.0.end {
            End::Send(send) => Ok(send),
            End::Recv(_) => Err(Failure::new(INVALID_USAGE, "isend on a receive communicator")),
        }
    }

    #[inline]
    pub(crate) fn recv(&self) -> Result<&RecvComm> {
        match &self.0.end {
            End::Recv(recv) => Ok(recv),
            End::Send(_) => Err(Failure::new(INVALID_USAGE, "irecv on a send communicator")),
        }
    }

    /// What NCCL gets for an isend or irecv; null if it must try again.
    #[inline]
    pub(crate) fn request(&self, index: Option<usize>) -> *const Request {
        let request = index.and_then(|index| self.0.requests.get(index));
        request.map_or(std::ptr::null(), std::ptr::from_ref)
    }
}

impl Request {
    /// Whether it is complete; then the request is free for another.
    #[inline]
    pub(crate) fn test(&self) -> Result<Option<Done>> {
        let closed = || Failure::new(INTERNAL, "test after the communicator was closed");
        let comm = self.comm.upgrade().ok_or_else(closed)?;
        match &comm.end {
            End::Send(send) => send.test(self.index),
            End::Recv(recv) => recv.test(self.index),
        }
    }
}

/// The failure of a request that is not outstanding.
#[cold]
pub(crate) fn not_outstanding() -> Failure {
    Failure::new(INTERNAL, "test of a request that is complete already")
}

/// The address of a connection's peer, for people.
pub(crate) fn peer_of(stream: &TcpStream) -> String {
    stream.peer_addr().map_or_else(|_| "a peer".to_owned(), |peer| peer.ip().to_string())
}

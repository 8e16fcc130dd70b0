//! Notifications: how they are split into messages, and those that have arrived.

use std::collections::VecDeque;
use std::sync::Arc;

use super::MAX_NOTIFICATION_LEN;
use crate::error::{Error, Kind, Result};

/// The longest message: it is sent inline, so that no memory has to be registered.
pub(super) const FRAGMENT_LEN: usize = 256;
/// In front of each: the length of the whole notification, and the offset of this part; both 32
/// bits, little-endian.
const HEADER_LEN: usize = 8;
/// What a notification costs beside its bytes.
const OVERHEAD: u64 = 64;

/// What a peer sent: with a transfer, after its data; or on its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Notification {
    from: Arc<str>,
    bytes: Vec<u8>,
}

impl Notification {
    /// The name of the agent that sent it.
    pub fn from(&self) -> &str {
        &self.from
    }

    /// What it sent.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// What it sent.
    pub fn into_bytes(self) -> Vec<u8> {
        self.bytes
    }
}

/// The part of a notification at `offset`, as a message. Returns its length, and the offset of the
/// next part; that is the notification's length after the last one.
pub(super) fn fragment(
    notification: &[u8],
    offset: usize,
    into: &mut [u8; FRAGMENT_LEN],
) -> (usize, usize) {
    let part = (notification.len() - offset).min(FRAGMENT_LEN - HEADER_LEN);
    into[..4].copy_from_slice(&(notification.len() as u32).to_le_bytes());
    into[4..8].copy_from_slice(&(offset as u32).to_le_bytes());
    into[8..8 + part].copy_from_slice(&notification[offset..offset + part]);
    (HEADER_LEN + part, offset + part)
}

/// Messages that a notification takes.
pub(super) fn fragments(len: usize) -> usize {
    len.div_ceil(FRAGMENT_LEN - HEADER_LEN).max(1)
}

/// The notifications of one peer, put together from messages, which arrive in order.
#[derive(Default)]
pub(super) struct Reassembly(Vec<u8>);

impl Reassembly {
    /// Adds a message; returns the notification if it is complete.
    ///
    /// # Errors
    /// If the peer sent anything else than the next part.
    pub(super) fn add(&mut self, message: &[u8]) -> Result<Option<Vec<u8>>> {
        let wrong =
            |why: &'static str| Err(Error::new(Kind::Malformed, "receive a notification").why(why));
        let Some((header, part)) = message.split_at_checked(HEADER_LEN) else {
            return wrong("a message is shorter than its header");
        };
        let word = |at: usize| {
            u32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]])
                as usize
        };
        let (len, offset) = (word(0), word(4));
        if len > MAX_NOTIFICATION_LEN {
            return wrong("it is longer than notifications may be");
        }
        if offset != self.0.len() || part.len() > len - offset || part.is_empty() && len > 0 {
            return wrong("a part of it is missing, or out of place");
        }
        self.0.extend_from_slice(part);
        Ok((self.0.len() == len).then(|| std::mem::take(&mut self.0)))
    }
}

/// Notifications that wait to be taken.
#[derive(Default)]
pub(super) struct Inbox {
    queue: VecDeque<Notification>,
    bytes: u64,
}

impl Inbox {
    pub(super) fn push(&mut self, from: Arc<str>, bytes: Vec<u8>) {
        self.bytes += bytes.len() as u64 + OVERHEAD;
        self.queue.push_back(Notification { from, bytes });
    }

    pub(super) fn pop(&mut self) -> Option<Notification> {
        let next = self.queue.pop_front()?;
        self.bytes -= next.bytes.len() as u64 + OVERHEAD;
        Some(next)
    }

    #[cfg(feature = "tokio")]
    pub(super) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn messages(notification: &[u8]) -> Vec<Vec<u8>> {
        let (mut offset, mut all) = (0, Vec::new());
        loop {
            let mut message = [0; FRAGMENT_LEN];
            let (len, next) = fragment(notification, offset, &mut message);
            all.push(message[..len].to_vec());
            offset = next;
            if offset == notification.len() {
                return all;
            }
        }
    }

    #[test]
    fn notifications_of_every_length_arrive() {
        let mut reassembly = Reassembly::default();
        for len in [0, 1, 247, 248, 249, 496, 497, 10_000, MAX_NOTIFICATION_LEN] {
            let sent: Vec<u8> = (0..len).map(|at| at as u8).collect();
            let messages = messages(&sent);
            assert_eq!(messages.len(), fragments(len), "{len}");
            let (last, others) = messages.split_last().unwrap();
            for message in others {
                assert_eq!(reassembly.add(message).unwrap(), None);
            }
            assert_eq!(reassembly.add(last).unwrap().unwrap(), sent);
        }
    }

    #[test]
    fn messages_that_are_no_part_are_refused() {
        let good = messages(&[7; 600]);
        let mut too_long = vec![0; HEADER_LEN];
        too_long[..4].copy_from_slice(&(MAX_NOTIFICATION_LEN as u32 + 1).to_le_bytes());
        let mut beyond = good[0].clone();
        beyond[..4].copy_from_slice(&10_u32.to_le_bytes());
        let empty = &good[0][..HEADER_LEN];
        for bad in [&[][..], &good[0][..7], &too_long, &beyond, &good[1], empty] {
            let error = Reassembly::default().add(bad).unwrap_err();
            assert_eq!(error.kind(), &Kind::Malformed, "{error}");
        }
        let mut reassembly = Reassembly::default();
        reassembly.add(&good[0]).unwrap();
        assert!(reassembly.add(&good[0]).is_err(), "the first part twice");
        assert!(reassembly.add(&good[2]).is_err(), "one is missing");
        assert_eq!(reassembly.add(&good[1]).unwrap(), None);
    }
}

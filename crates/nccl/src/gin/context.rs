//! Contexts of NCCL's RMA interface: several of its threads or queues use one communicator.

use std::sync::Arc;

use super::coll::{Coll, Handle};
use crate::result::{Failure, INVALID_ARGUMENT, Result};

/// Contexts that one call may ask for.
const MAX_CONTEXTS: i32 = 256;

/// What NCCL holds of a number of contexts. All share the communicator's queue pairs, so their
/// operations to one rank are executed in order.
pub(crate) struct RmaContext {
    coll: Arc<Coll>,
    contexts: i32,
}

impl RmaContext {
    /// # Errors
    /// If the number is not one that NCCL asks for.
    pub(super) fn new(handle: &Handle, contexts: i32) -> Result<Self> {
        if !(1..=MAX_CONTEXTS).contains(&contexts) {
            let text = format!("{contexts} contexts; 1 to {MAX_CONTEXTS} are possible");
            return Err(Failure::new(INVALID_ARGUMENT, text));
        }
        let coll = handle.0.clone();
        let mut state = coll.state.lock();
        (0..contexts).for_each(|_| state.requests.add_context());
        drop(state);
        Ok(Self { coll, contexts })
    }

    #[inline]
    pub(super) fn coll(&self) -> &Coll {
        &self.coll
    }

    /// The communicator, for an operation of a context.
    #[inline]
    pub(super) fn checked(&self, context: i32) -> Result<&Coll> {
        if (0..self.contexts).contains(&context) {
            return Ok(&self.coll);
        }
        let text = format!("context {context} of {}", self.contexts);
        Err(Failure::new(INVALID_ARGUMENT, text))
    }
}

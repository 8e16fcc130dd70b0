//! Registered memory that running kernels access by themselves.

/// An entry of the table with which a kernel queue pair's kernels access memory.
pub(crate) trait KernelUse: Send + Sync {
    /// Lets no kernel begin an access; returns whether none is in progress.
    fn revoke(&self) -> bool;
}

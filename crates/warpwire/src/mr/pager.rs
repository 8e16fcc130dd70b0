//! The pager: one thread per process that resolves page faults of on-demand registrations and opens
//! peers' device memory, so that engine threads never block on that. A page may have to be read
//! from disk.

use std::sync::OnceLock;
use std::sync::mpsc::{Sender, channel};

type Job = Box<dyn FnOnce() + Send>;

/// Runs `job` on the pager thread, or on the calling thread if the pager cannot be started.
pub(crate) fn submit(job: impl FnOnce() + Send + 'static) {
    static JOBS: OnceLock<Option<Sender<Job>>> = OnceLock::new();
    let jobs = JOBS.get_or_init(|| {
        let (jobs, queue) = channel::<Job>();
        let work = move || queue.into_iter().for_each(|job| job());
        let thread = crate::sync::thread::spawn("warpwire-pager", work);
        thread
            .inspect_err(
                |error| tracing::warn!(%error, "no pager thread: page faults are resolved inline"),
            )
            .ok()?;
        Some(jobs)
    });
    match jobs {
        Some(jobs) => {
            // The thread runs for the life of the process. Should it have died, run the job inline:
            // queue pairs wait for its result.
            if let Err(unsent) = jobs.send(Box::new(job)) {
                (unsent.0)();
            }
        }
        None => job(),
    }
}

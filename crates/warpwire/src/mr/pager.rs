//! One thread that finds memory for those who must not wait: a page may have to come from a disk.

use std::sync::OnceLock;
use std::sync::mpsc::{Sender, channel};

type Job = Box<dyn FnOnce() + Send>;

/// Runs `job` on the thread that finds memory; here and now if there can be no such thread.
pub(super) fn submit(job: impl FnOnce() + Send + 'static) {
    static JOBS: OnceLock<Option<Sender<Job>>> = OnceLock::new();
    let jobs = JOBS.get_or_init(|| {
        let (jobs, queue) = channel::<Job>();
        let work = move || queue.into_iter().for_each(|job| job());
        let thread = std::thread::Builder::new().name("warpwire-pager".into()).spawn(work);
        thread.inspect_err(|error| tracing::warn!(%error, "pages are found in the engine")).ok()?;
        Some(jobs)
    });
    match jobs {
        Some(jobs) => {
            // The thread takes jobs for as long as the process lives. If it does not, nobody may wait for ever.
            if let Err(unsent) = jobs.send(Box::new(job)) {
                (unsent.0)();
            }
        }
        None => job(),
    }
}

//! One thread for all stream queue pairs of the process: it detects waits that exceed their
//! timeout, and failed queue pairs whose completions are not being polled.

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::queue::Shared;
use crate::error::{Error, Result};

/// Checks per shortest timeout; the interval between checks is clamped to the two bounds below.
const CHECKS_PER_TIMEOUT: u32 = 8;
const MIN_INTERVAL: Duration = Duration::from_millis(1);
const MAX_INTERVAL: Duration = Duration::from_millis(100);

struct WatchList {
    pairs: Vec<Weak<Shared>>,
    is_running: bool,
}

static WATCH_LIST: Mutex<WatchList> =
    Mutex::new(WatchList { pairs: Vec::new(), is_running: false });

/// Monitors a queue pair until it is dropped.
pub(super) fn monitor(pair: &Arc<Shared>) -> Result<()> {
    let mut watch_list = WATCH_LIST.lock();
    watch_list.pairs.push(Arc::downgrade(pair));
    if watch_list.is_running {
        return Ok(());
    }
    let started = std::thread::Builder::new().name("warpwire-watch".to_owned()).spawn(watch);
    started.map_err(|why| Error::os("start the watchdog's thread", &why))?;
    watch_list.is_running = true;
    Ok(())
}

/// The watchdog thread; it ends when no queue pair is left.
fn watch() {
    loop {
        let pairs: Vec<Arc<Shared>> = {
            let mut watch_list = WATCH_LIST.lock();
            watch_list.pairs.retain(|pair| pair.strong_count() > 0);
            if watch_list.pairs.is_empty() {
                watch_list.is_running = false;
                return;
            }
            watch_list.pairs.iter().filter_map(Weak::upgrade).collect()
        };
        let mut pause = MAX_INTERVAL;
        for pair in &pairs {
            pair.monitor(Instant::now());
            if let Some(wait_timeout) = pair.wait_timeout {
                pause = pause.min(wait_timeout / CHECKS_PER_TIMEOUT);
            }
        }
        // This may drop the last reference to a queue pair; do so before sleeping.
        drop(pairs);
        std::thread::sleep(pause.max(MIN_INTERVAL));
    }
}

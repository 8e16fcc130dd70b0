//! One thread for all queue pairs of the process: it looks whether streams wait for too long, and whether queue pairs
//! have failed that nobody asks about.

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::queue::Shared;
use crate::error::{Error, Result};

/// It looks so many times in the shortest patience, and within these bounds.
const CHECKS_PER_TIMEOUT: u32 = 8;
const MIN_INTERVAL: Duration = Duration::from_millis(1);
const MAX_INTERVAL: Duration = Duration::from_millis(100);

struct WatchList {
    pairs: Vec<Weak<Shared>>,
    is_running: bool,
}

static WATCH_LIST: Mutex<WatchList> =
    Mutex::new(WatchList { pairs: Vec::new(), is_running: false });

/// Looks after a queue pair for as long as it lives.
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

/// The thread: until there is nobody to look after.
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
        // It may be the last to hold one: what that lets go is let go here.
        drop(pairs);
        std::thread::sleep(pause.max(MIN_INTERVAL));
    }
}

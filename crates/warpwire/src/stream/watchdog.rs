//! One thread for all queue pairs of the process: it looks whether streams wait for too long, and whether queue pairs
//! have failed that nobody asks about.

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::queue::Shared;
use crate::error::{Error, Result};

/// It looks so many times in the shortest patience, and within these bounds.
const LOOKS: u32 = 8;
const SHORTEST: Duration = Duration::from_millis(1);
const LONGEST: Duration = Duration::from_millis(100);

struct Watched {
    pairs: Vec<Weak<Shared>>,
    is_running: bool,
}

static WATCHED: Mutex<Watched> = Mutex::new(Watched { pairs: Vec::new(), is_running: false });

/// Looks after a queue pair for as long as it lives.
pub(super) fn look_after(pair: &Arc<Shared>) -> Result<()> {
    let mut watched = WATCHED.lock();
    watched.pairs.push(Arc::downgrade(pair));
    if watched.is_running {
        return Ok(());
    }
    let started = std::thread::Builder::new().name("warpwire-watch".to_owned()).spawn(watch);
    started.map_err(|why| Error::os("start the watchdog's thread", &why))?;
    watched.is_running = true;
    Ok(())
}

/// The thread: until there is nobody to look after.
fn watch() {
    loop {
        let pairs: Vec<Arc<Shared>> = {
            let mut watched = WATCHED.lock();
            watched.pairs.retain(|pair| pair.strong_count() > 0);
            if watched.pairs.is_empty() {
                watched.is_running = false;
                return;
            }
            watched.pairs.iter().filter_map(Weak::upgrade).collect()
        };
        let mut pause = LONGEST;
        for pair in &pairs {
            pair.look_after(Instant::now());
            if let Some(patience) = pair.patience {
                pause = pause.min(patience / LOOKS);
            }
        }
        // It may be the last to hold one: what that lets go is let go here.
        drop(pairs);
        std::thread::sleep(pause.max(SHORTEST));
    }
}

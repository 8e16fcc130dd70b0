//! Transfers in the order of a device's stream: posted when a stream gets there, and waited for by
//! a stream.
//!
//! 1. A transfer that a stream posts is *parked* until the stream calls the host, which only takes
//!    note of it: such a call may not use the device, and posting may. The agent's thread posts.
//! 2. A stream waits for a word of pinned memory: `ARMED` until the transfer has ended, then
//!    `ENDED`; the stream itself makes it `FREE` behind its wait, so a word is used again only when
//!    no stream looks at it any more.
//! 3. A stream that waits for a transfer keeps its device from becoming idle, and calls of the
//!    driver that load code or map memory may wait for that. So the kernels that copy are loaded
//!    when memory of a device is registered, and no stream waits before they are, and before the
//!    peer's memory is mapped or is known not to be.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::progress::Shared;
use super::transfer::{self, Active};
use crate::error::{Error, Kind, Result};
use crate::mem::{self, Allocation, Condition, Device, MemOp, Module, StreamRef, Word};
use crate::mr::run_on_pager;

/// Values of a word.
const FREE: u64 = 0;
const ARMED: u64 = 1;
const ENDED: u64 = 2;
/// How long a stream may wait for a transfer without a deadline of its own.
const WAIT_LIMIT: Duration = Duration::from_secs(30);
/// How long a call waits for kernels to be loaded, and for memory to be mapped.
const LOAD_LIMIT: Duration = Duration::from_secs(10);
/// Words that are allocated at a time.
const WORDS: u64 = 64;

/// Transfers that streams have not reached, and words that streams wait for.
#[derive(Default)]
pub(super) struct StreamOrder {
    /// By number.
    parked: Mutex<BTreeMap<u64, Arc<Active>>>,
    /// Numbers of those that streams have reached.
    reached: Mutex<Vec<u64>>,
    words: Mutex<Vec<(Device, Allocation)>>,
    modules: Mutex<BTreeMap<String, LoadState>>,
    loaded: Condvar,
}

/// The kernels that copy, on one device.
enum LoadState {
    Loading,
    Loaded { _module: Option<Module> },
}

impl Drop for StreamOrder {
    /// Words that a stream of another library may still look at stay allocated for ever: unlike
    /// this library's streams, those keep nothing alive.
    fn drop(&mut self) {
        for (_, block) in self.words.get_mut().drain(..) {
            let is_free = |index| block.word32(index * 4).and_then(|word| word.load());
            if !(0..WORDS).all(|index| matches!(is_free(index), Ok(FREE))) {
                std::mem::forget(block);
            }
        }
    }
}

impl StreamOrder {
    /// Takes a transfer that no stream has reached; `None` if it is not parked.
    pub(super) fn take(&self, number: u64) -> Option<Arc<Active>> {
        self.parked.lock().remove(&number)
    }

    /// Takes all of them.
    pub(super) fn take_all(&self) -> Vec<Arc<Active>> {
        std::mem::take(&mut *self.parked.lock()).into_values().collect()
    }

    /// Waits until the kernels of all devices are loaded.
    fn await_modules(&self) -> Result<()> {
        let deadline = Instant::now() + LOAD_LIMIT;
        let mut modules = self.modules.lock();
        while modules.values().any(|module| matches!(module, LoadState::Loading)) {
            if self.loaded.wait_until(&mut modules, deadline).timed_out() {
                return Err(Error::new(Kind::Busy, "use a stream for transfers")
                    .why("the kernels that copy are not loaded: the device has not been idle")
                    .fix("register memory before work that does not end"));
            }
        }
        Ok(())
    }

    /// A word that nothing uses, armed.
    fn arm_word(&self, device: &Device) -> Result<Word> {
        let mut blocks = self.words.lock();
        for (_, block) in blocks.iter().filter(|(owner, _)| owner == device) {
            for index in 0..WORDS {
                let word = block.word32(index * 4)?;
                if word.load()? == FREE {
                    word.store(ARMED)?;
                    return Ok(word);
                }
            }
        }
        let block = device.alloc_pinned(WORDS * 4)?;
        block.host_bytes()?.fill(0, block.len(), &[FREE as u8])?;
        let word = block.word32(0)?;
        word.store(ARMED)?;
        blocks.push((device.clone(), block));
        Ok(word)
    }
}

/// Loads the kernels that copy memory of this kind, once, on another thread: the device may be
/// busy.
pub(super) fn load_kernels(agent: &Arc<Shared>, kind: &str) {
    let mut modules = agent.stream_order.modules.lock();
    if !kind.starts_with("cuda:") || modules.contains_key(kind) {
        return;
    }
    modules.insert(kind.to_owned(), LoadState::Loading);
    let (agent, kind) = (Arc::downgrade(agent), kind.to_owned());
    run_on_pager(move || {
        let module = mem::open(&kind).and_then(|device| mem::load_program(&device));
        if let Err(error) = &module {
            tracing::warn!(%error, "copies between GPU memory of processes may be slow");
        }
        if let Some(agent) = agent.upgrade() {
            let loaded = LoadState::Loaded { _module: module.ok() };
            agent.stream_order.modules.lock().insert(kind, loaded);
            agent.stream_order.loaded.notify_all();
        }
    });
}

/// Waits until all that the driver has to do for a transfer before it copies is done.
fn await_mapping(agent: &Arc<Shared>, transfer: &Active) -> Result<()> {
    agent.stream_order.await_modules()?;
    let deadline = Instant::now() + LOAD_LIMIT;
    let is_preparing = || {
        let connection = transfer.lists.peer.connection(agent);
        connection.is_ok_and(|connection| connection.is_preparing(transfer))
    };
    // A transfer whose memory cannot be mapped in time is sent by packets.
    while is_preparing() && Instant::now() < deadline {
        agent.poll();
        std::thread::sleep(Duration::from_micros(100));
    }
    Ok(())
}

/// Lets a stream post a transfer when it gets to this point.
pub(super) fn post(
    agent: &Arc<Shared>,
    stream: StreamRef<'_>,
    transfer: Arc<Active>,
) -> Result<()> {
    check_capture(stream, "post a transfer on a stream")?;
    transfer.lists.peer.connection(agent)?;
    await_mapping(agent, &transfer)?;
    let number = transfer.number;
    agent.stream_order.parked.lock().insert(number, transfer);
    let reached = Arc::downgrade(agent);
    let called = stream.call_host(move || {
        if let Some(agent) = reached.upgrade() {
            agent.stream_order.reached.lock().push(number);
            agent.wake.raise();
            // Not here: the last owner frees memory of the device, which such a call may not.
            run_on_pager(move || drop(agent));
        }
    });
    called.inspect_err(|_| drop(agent.stream_order.take(number)))
}

/// Posts what streams have reached, in the agent's thread.
pub(super) fn post_reached(agent: &Arc<Shared>) {
    let reached = std::mem::take(&mut *agent.stream_order.reached.lock());
    for number in reached {
        // Locked until a connection has it: a call that cancels it looks here, then there.
        let mut parked = agent.stream_order.parked.lock();
        let Some(transfer) = parked.remove(&number) else { continue };
        let started = transfer::start(agent, transfer.clone());
        drop(parked);
        if let Err(error) = started {
            agent.end(vec![(transfer, Err(error))]);
        }
    }
}

/// Makes a stream wait for a word; returns the word, to be [released](release) at the end.
pub(super) fn wait(
    agent: &Arc<Shared>,
    stream: StreamRef<'_>,
    transfer: Option<Arc<Active>>,
) -> Result<Word> {
    check_capture(stream, "wait for a transfer on a stream")?;
    if let Some(transfer) = transfer {
        await_mapping(agent, &transfer)?;
        agent.limit_wait(&transfer, Instant::now() + WAIT_LIMIT);
    }
    let word = agent.stream_order.arm_word(stream.device())?;
    let ops = [
        MemOp::Wait { word: word.clone(), condition: Condition::AtLeast, value: ENDED },
        MemOp::Write { word: word.clone(), value: FREE },
    ];
    stream.batch(&ops).inspect_err(|_| drop(word.store(FREE)))?;
    Ok(word)
}

/// Lets the stream that waits for this word go on.
pub(super) fn release(word: &Word) {
    if let Err(error) = word.store(ENDED) {
        tracing::warn!(%error, "a stream keeps waiting for a transfer that has ended");
    }
}

fn check_capture(stream: StreamRef<'_>, what: &'static str) -> Result<()> {
    match stream.is_capturing()? {
        false => Ok(()),
        true => Err(Error::new(Kind::Unsupported, what)
            .on(stream.label())
            .why("it is captured into a graph, which would be replayed")
            .fix("end the capture first, or use a device channel of warpwire::msg")),
    }
}

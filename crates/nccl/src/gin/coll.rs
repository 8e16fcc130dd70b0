//! A communicator: the queue pairs to all ranks, symmetric memory and outstanding operations.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use warpwire::mem::{self, DeviceAddr};
use warpwire::mr::HostMemory;
use warpwire::verbs::{Access, Completion, Mr, Remote};

use super::abi::Id;
use super::mesh::{self, Mesh};
use super::peers::{Message, Peers, RankState};
use super::regions::{RankRegion, Region, Regions};
use super::requests::{RequestId, Requests, Slot};
use crate::abi::{PTR_CUDA, PTR_HOST};
use crate::devices;
use crate::handle::ConnectHandle;
use crate::lanes::{POLL_BATCH, failed};
use crate::listen::Listener;
use crate::log;
use crate::result::{Failure, INTERNAL, INVALID_ARGUMENT, REMOTE, Result};

/// Calls without progress between two looks at the clock.
const CALLS_PER_CHECK: u32 = 64;
/// Time between two looks at the other ranks' connections.
const CHECK_INTERVAL: Duration = Duration::from_millis(1);
/// How long a rank that closes answers packets of the others, whose last acknowledgements may have
/// been lost. It ends when all have closed.
const LINGER: Duration = Duration::from_millis(100);

/// What NCCL holds of a communicator.
pub(crate) struct Handle(pub(super) Arc<Coll>);

pub(crate) struct Coll {
    pub(super) mesh: Mesh,
    /// Where the previous values of signals go; no one reads them.
    pub(super) scratch: Mr,
    pub(super) state: Mutex<State>,
    /// Not taken on the data path where a registration holds it.
    peers: Mutex<Peers>,
    pub(super) ranks: Box<[RankState]>,
    has_failed: AtomicBool,
    /// Engines have threads of their own: calls of NCCL's need not run them.
    is_threaded: bool,
}

pub(super) struct State {
    pub regions: Regions,
    pub requests: Requests,
    idle_calls: u32,
    checked: Instant,
}

impl Handle {
    /// Connects all ranks; blocks until that is done. `handles` are those of all ranks.
    ///
    /// # Errors
    /// [`REMOTE`] if a rank ends meanwhile, or does not come.
    pub(super) fn connect(
        listener: &Listener,
        handles: &[ConnectHandle],
        rank: u32,
    ) -> Result<Self> {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let context = mesh::next_engine(listener.device)?;
        let (mesh, streams) = mesh::connect(listener, handles, rank, context)?;
        let scratch = HostMemory::new(size_of::<u64>() as u64)?;
        let scratch = mesh.context.register(&mesh.pd, scratch, Access::LOCAL_WRITE)?;
        let ranks: Box<[RankState]> = handles.iter().map(|_| RankState::new()).collect();
        let (settings, _) = devices::all()?;
        log::info(format_args!("GIN: rank {rank} of {} is connected", handles.len()));
        Ok(Self(Arc::new(Coll {
            mesh,
            scratch,
            state: Mutex::new(State {
                regions: Regions::new(NUMBER.fetch_add(1, Ordering::Relaxed)),
                requests: Requests::new(handles.len()),
                idle_calls: 0,
                checked: Instant::now(),
            }),
            peers: Mutex::new(Peers::new(streams)),
            ranks,
            has_failed: AtomicBool::new(false),
            is_threaded: settings.is_threaded(),
        })))
    }
}

/// Memory of a registration, as NCCL names it.
pub(super) struct Buffer {
    pub base: *mut u8,
    pub len: usize,
    pub kind: i32,
}

impl Coll {
    /// Registers memory of all ranks; blocks until all have done so. Their lengths may differ.
    ///
    /// # Errors
    /// In all ranks, if one of them cannot register its memory or ends.
    ///
    /// # Safety
    /// The memory stays allocated until it is deregistered or the communicator is closed. NCCL and
    /// its kernels order their own accesses by signals and the completion of operations.
    #[allow(unsafe_code)]
    pub(super) unsafe fn register(&self, buffer: &Buffer) -> Result<Id> {
        let mut peers = self.peers.lock();
        let sequence = peers.sequence;
        peers.sequence += 1;
        // SAFETY: guaranteed by the caller.
        let made = unsafe { self.register_own(buffer) };
        let message = match &made {
            Ok(mr) => {
                let Remote { address, rkey } = mr.remote(0);
                Message::Region { sequence, address, len: mr.len(), rkey }
            }
            Err(why) => Message::Refused { sequence, why: why.text.clone() },
        };
        let received = peers.exchange(&message, &self.ranks);
        drop(peers);
        let (mr, received) = (made?, received?);
        let own = RankRegion { remote: mr.remote(0), len: mr.len() };
        let ranks = received.into_iter().enumerate().map(|(rank, message)| match message {
            None => Ok(own),
            Some(message) => accept(message, sequence, rank),
        });
        let ranks = ranks.collect::<Result<_>>()?;
        Ok(self.state.lock().regions.insert(Region { mr, ranks }))
    }

    /// # Safety
    /// As for `register`.
    #[allow(unsafe_code)]
    unsafe fn register_own(&self, &Buffer { base, len, kind }: &Buffer) -> Result<Mr> {
        let address = base.addr() as u64;
        let is_device = mem::owner_of(DeviceAddr::new(address)).is_ok();
        let invalid = |why: &str| {
            let text = format!("{len} bytes at {address:#x} of type {kind}: {why}");
            Failure::new(INVALID_ARGUMENT, text)
        };
        match kind {
            PTR_HOST => {}
            PTR_CUDA if is_device => {}
            PTR_CUDA => return Err(invalid("not device memory of this process")),
            _ => return Err(invalid("host (1) and CUDA memory (2) are announced")),
        }
        let access = Access::LOCAL_WRITE
            | Access::REMOTE_WRITE
            | Access::REMOTE_READ
            | Access::REMOTE_ATOMIC;
        let Mesh { context, pd, .. } = &self.mesh;
        // SAFETY: guaranteed by the caller.
        let made = unsafe { context.register_address(pd, address, len as u64, None, access) };
        let mr = made.map_err(|why| invalid(&why.to_string()))?;
        if is_device {
            let (path, why) = (mr.path(), mr.why().join("; "));
            log::info(format_args!("GIN: {len} bytes of device memory by {path:?} ({why})"));
        }
        Ok(mr)
    }

    /// Ends this rank's part of a registration.
    ///
    /// # Errors
    /// If a peer is still accessing the memory.
    pub(super) fn deregister(&self, id: Id) -> Result {
        let region = self.state.lock().regions.remove(id)?;
        Ok(region.mr.deregister()?)
    }

    /// Whether an operation is complete; its number is free then.
    ///
    /// # Errors
    /// [`REMOTE`] if its rank has ended.
    #[inline]
    pub(super) fn test(&self, id: Id) -> Result<bool> {
        let mut state = self.state.lock();
        let request = RequestId::of_nccl(id);
        let slot = request.and_then(|request| state.requests.slot(request));
        let (Some(request), Some(Slot::Posted | Slot::Done)) = (request, slot) else {
            return Err(Failure::new(INTERNAL, "test of an operation that is not outstanding"));
        };
        if slot == Some(Slot::Posted) {
            self.progress(&mut state);
        }
        if state.requests.slot(request) == Some(Slot::Done) {
            state.requests.release(request);
            return Ok(true);
        }
        self.check_rank(request.rank).map(|()| false)
    }

    /// Runs the engine, where it has no thread, and looks whether the other ranks live.
    ///
    /// # Errors
    /// [`REMOTE`] if a rank has ended without closing its communicator.
    #[inline]
    pub(super) fn progress_all(&self) -> Result {
        self.progress(&mut self.state.lock());
        if !self.has_failed() {
            return Ok(());
        }
        let failed = self.ranks.iter().enumerate().find(|(_, state)| state.has_failed());
        failed.map_or(Ok(()), |(rank, state)| Err(state.failure(rank)))
    }

    pub(super) fn has_failed(&self) -> bool {
        self.has_failed.load(Ordering::Relaxed)
    }

    /// # Errors
    /// If the rank does not live any more. The reason is logged once.
    #[inline]
    pub(super) fn check_rank(&self, rank: u32) -> Result {
        match self.ranks.get(rank as usize) {
            Some(state) if state.is_alive() => Ok(()),
            Some(state) => Err(state.failure(rank as usize)),
            None => Err(Failure::new(INVALID_ARGUMENT, format!("there is no rank {rank}"))),
        }
    }

    /// Takes completions; failures are kept.
    #[inline]
    pub(super) fn progress(&self, state: &mut State) {
        let mut found = [Completion::EMPTY; POLL_BATCH];
        let polled = match self.is_threaded {
            true if state.requests.posted() == 0 => Ok(0),
            true => self.mesh.cq.poll_ready(&mut found),
            false => self.mesh.cq.poll(&mut found),
        };
        match polled {
            Ok(0) => self.on_idle(state),
            Ok(count) => found[..count].iter().for_each(|one| self.on_completion(state, one)),
            Err(why) => self.fail_all(&why),
        }
    }

    #[inline]
    fn on_completion(&self, state: &mut State, completion: &Completion) {
        let request = RequestId::of_wr(completion.id);
        if completion.is_success() {
            state.requests.complete(request);
        } else {
            self.fail_rank(request.rank as usize, &failed(completion));
        }
    }

    #[cold]
    fn fail_rank(&self, rank: usize, why: &Failure) {
        // Its process may have ended: that explains the failure.
        if let Some(mut peers) = self.peers.try_lock() {
            peers.are_some_alive(&self.ranks);
        }
        let Some(state) = self.ranks.get(rank) else { return };
        if state.is_alive() {
            log::warn(format_args!("GIN: rank {rank}: {}", why.text));
            state.fail();
        }
        self.note_failures();
    }

    #[cold]
    fn fail_all(&self, why: &warpwire::Error) {
        if !self.has_failed.swap(true, Ordering::AcqRel) {
            log::warn(format_args!("GIN: the device has failed: {why}"));
        }
        self.ranks.iter().for_each(RankState::fail);
    }

    #[inline]
    fn on_idle(&self, state: &mut State) {
        state.idle_calls = state.idle_calls.wrapping_add(1);
        if state.idle_calls.is_multiple_of(CALLS_PER_CHECK) {
            self.look(state);
        }
    }

    #[cold]
    fn look(&self, state: &mut State) {
        let now = Instant::now();
        if now - state.checked >= CHECK_INTERVAL
            && let Some(mut peers) = self.peers.try_lock()
        {
            state.checked = now;
            peers.look(&self.ranks);
            self.note_failures();
        }
    }

    fn note_failures(&self) {
        if self.ranks.iter().any(RankState::has_failed) {
            self.has_failed.store(true, Ordering::Relaxed);
        }
    }
}

/// A rank's answer in a collective registration.
fn accept(message: Message, expected: u64, rank: usize) -> Result<RankRegion> {
    let wrong = |why: &str| Failure::new(REMOTE, format!("rank {rank}: {why}"));
    match message {
        Message::Region { sequence, address, len, rkey } if sequence == expected => {
            Ok(RankRegion { remote: Remote { address, rkey }, len })
        }
        Message::Refused { sequence, why } if sequence == expected => {
            Err(wrong(&format!("it could not register its memory: {}", printable(&why))))
        }
        _ => Err(wrong("it registers memory in another order")),
    }
}

fn printable(text: &str) -> String {
    warpwire::units::printable(text)
}

impl Drop for Coll {
    fn drop(&mut self) {
        let (peers, states) = (self.peers.get_mut(), &self.ranks);
        peers.say_goodbye(states);
        let deadline = Instant::now() + LINGER;
        while peers.are_some_alive(states) && Instant::now() < deadline {
            if !self.is_threaded {
                let _ = self.mesh.cq.poll(&mut [Completion::EMPTY; POLL_BATCH]);
            }
            std::thread::sleep(Duration::from_micros(50));
        }
        for region in self.state.get_mut().regions.clear() {
            // A peer that was stopped may still access it; nothing more can be done here.
            let _ = region.mr.deregister();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gin::abi::{SIGNAL_ADD, SIGNAL_INC};
    use crate::gin::put::{Direction, Range, Signal, Transfer};
    use warpwire::mem::Allocation;

    const LEN: u64 = 256 << 10;
    const ROUNDS: u64 = 60;

    fn register(coll: &Coll, memory: &Allocation) -> Result<Id> {
        let base = std::ptr::without_provenance_mut(memory.address().raw() as usize);
        let buffer = Buffer { base, len: memory.len() as usize, kind: PTR_CUDA };
        #[allow(unsafe_code)]
        // SAFETY: it outlives the communicator, and peers' writes are awaited by signals.
        unsafe {
            coll.register(&buffer)
        }
    }

    fn wait(coll: &Coll, word: &Allocation, value: u64) {
        testkit::until("the signal arrives", || {
            coll.progress_all().unwrap();
            let mut bytes = [0; 8];
            word.read(8, &mut bytes).unwrap();
            u64::from_ne_bytes(bytes) >= value
        });
    }

    fn run_rank(listener: &Listener, handles: &[ConnectHandle], rank: u32) {
        let coll = Handle::connect(listener, handles, rank).unwrap().0;
        let gpu = mem::open("sim:0").unwrap();
        let memory: [Allocation; 3] = [LEN, LEN, 4096].map(|len| gpu.alloc(len).unwrap());
        memory[2].write(0, &[0; 4096]).unwrap();
        let [source, target, signals] = [0, 1, 2].map(|at| register(&coll, &memory[at]).unwrap());
        let peer = 1 - rank;
        for round in 1..=ROUNDS {
            let len = (round * 997) % LEN;
            let bytes: Vec<u8> = (0..len).map(|i| (i * round) as u8 ^ rank as u8).collect();
            memory[0].write(0, &bytes).unwrap();
            let signal = Signal {
                at: Range { memory: signals, offset: 8 },
                value: 1,
                op: if round % 2 == 0 { SIGNAL_INC } else { SIGNAL_ADD },
            };
            let transfer = Transfer {
                direction: Direction::Put,
                rank: peer,
                own: Range { memory: source, offset: 0 },
                theirs: Range { memory: target, offset: LEN - len },
                len,
                signal: Some(signal),
            };
            // Both put, then both answer: a signal for the data, one for having compared it.
            let answer = Transfer { len: 0, ..transfer };
            for (step, transfer) in [(1, transfer), (2, answer)] {
                let request = coll.post(&transfer).unwrap();
                testkit::until("the put completes", || coll.test(request).unwrap());
                wait(&coll, &memory[2], 2 * (round - 1) + step);
                if step == 1 {
                    let mut got = vec![0; len as usize];
                    memory[1].read(LEN - len, &mut got).unwrap();
                    let is_right =
                        |(i, byte): (usize, &u8)| *byte == (i as u64 * round) as u8 ^ peer as u8;
                    assert!(got.iter().enumerate().all(is_right), "round {round}");
                }
            }
        }
        for id in [source, target, signals] {
            coll.deregister(id).unwrap();
        }
        drop(coll);
    }

    #[test]
    fn puts_and_signals_in_device_memory() {
        let device = devices::get(0).unwrap();
        let (listeners, handles): (Vec<Listener>, Vec<ConnectHandle>) =
            (0..2).map(|_| Listener::new(device).unwrap()).unzip();
        std::thread::scope(|scope| {
            for (rank, listener) in listeners.iter().enumerate() {
                let handles = &handles;
                scope.spawn(move || run_rank(listener, handles, rank as u32));
            }
        });
    }
}

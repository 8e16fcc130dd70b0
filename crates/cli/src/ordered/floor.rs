//! What a round trip between two streams takes without any HCA: a thread passes words on.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use warpwire::mem::{Condition, Device, MemOp, Window, Word};

use super::Failure;
use super::end::PATIENCE;

const ROUNDS: u64 = 100;

/// The words of one side: the stream rings `bell`, and waits for `answer`.
struct Side {
    bell: Word,
    answer: Word,
    /// The CPU's way to it; none if it lies in pinned memory.
    window: Option<Window>,
}

impl Side {
    fn new(device: &Device, pinned: bool) -> Result<Self, Failure> {
        let bell = device.alloc_pinned(64)?.word64(0)?;
        let memory = device.alloc(4096)?;
        let (answer, window) = match memory.window() {
            Ok(window) if !pinned => (memory.word64(0)?, Some(window)),
            _ => (device.alloc_pinned(64)?.word64(0)?, None),
        };
        bell.store(0)?;
        answer.store(0)?;
        Ok(Self { bell, answer, window })
    }

    fn pass(&self, value: u64) -> Result<(), Failure> {
        match &self.window {
            Some(window) => Ok(window.write(0, &value.to_le_bytes())?),
            None => Ok(self.answer.store(value)?),
        }
    }
}

/// The round trip of the streams of a device, with a thread between them: the best of several tries, with words in pinned
/// memory and in the device's own. Which of them streams see sooner differs from machine to machine.
pub(super) fn measure(device: &Device) -> Result<Duration, Failure> {
    let mut best = Duration::MAX;
    for at in 0..10 {
        best = best.min(once(device, at % 2 == 0)?);
    }
    Ok(best)
}

fn once(device: &Device, pinned: bool) -> Result<Duration, Failure> {
    let sides = [Side::new(device, pinned)?, Side::new(device, pinned)?];
    let gate = device.alloc_pinned(64)?.word64(0)?;
    gate.store(0)?;
    let streams = [device.stream()?, device.stream()?];
    let ring = |side: &Side, value| MemOp::Write { word: side.bell.clone(), value };
    let wait = |word: &Word, value| {
        let (word, condition) = (word.clone(), Condition::AtLeast);
        MemOp::Wait { word, condition, value }
    };
    let (mut ping, mut pong) = (vec![wait(&gate, 1)], Vec::new());
    for round in 1..=ROUNDS {
        ping.extend([ring(&sides[0], round), wait(&sides[0].answer, round)]);
        pong.extend([wait(&sides[1].answer, round), ring(&sides[1], round)]);
    }
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let relay = scope.spawn(|| relay(&sides, &done));
        let run = || -> Result<Duration, Failure> {
            streams[1].batch(&pong)?;
            streams[0].batch(&ping)?;
            std::thread::sleep(Duration::from_millis(2));
            let start = Instant::now();
            gate.store(1)?;
            streams[0].synchronize(PATIENCE)?;
            let took = start.elapsed();
            streams[1].synchronize(PATIENCE)?;
            Ok(took / ROUNDS as u32)
        };
        let took = run();
        done.store(true, Ordering::Relaxed);
        let relayed = relay.join().unwrap_or_else(|_| {
            Err(Failure::Broken("cannot measure the floor: the relay panicked".to_owned()))
        });
        relayed.and(took)
    })
}

/// Passes each side's bell on to the other side, until told to stop.
fn relay(sides: &[Side; 2], done: &AtomicBool) -> Result<(), Failure> {
    let mut last = [0; 2];
    while !done.load(Ordering::Relaxed) {
        for at in 0..2 {
            let rung = sides[at].bell.load()?;
            if rung != last[at] {
                last[at] = rung;
                sides[at ^ 1].pass(rung)?;
            }
        }
        std::hint::spin_loop();
    }
    Ok(())
}

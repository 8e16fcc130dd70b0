//! The ways to play ping-pong. A new one is an entry in [`MODES`].

use std::time::{Duration, Instant};

use warpwire::mem::Condition;
use warpwire::stream::Descriptors;

use super::Failure;
use super::end::{End, Job, PATIENCE, Role, stamp};

/// One way: plays the rounds of a job, and tells how long they took. `meet` waits for the other side to be as far.
pub(super) struct Mode {
    pub(super) name: &'static str,
    /// It sends messages into receives, which are posted; others put, and add to a word.
    pub(super) receives: bool,
    pub(super) play: fn(&End, &Job, Meet<'_>) -> Result<Duration, Failure>,
}

pub(super) type Meet<'a> = &'a mut dyn FnMut() -> Result<(), Failure>;

pub(super) const MODES: [Mode; 4] = [
    Mode { name: "cpu", receives: true, play: by_cpu },
    Mode { name: "stream", receives: true, play: by_stream },
    Mode { name: "graph", receives: false, play: by_graph },
    Mode { name: "kernel", receives: false, play: by_kernel },
];

/// So many replays are put on a stream that waits at a gate: a stream that is full holds up whoever fills it.
const REPLAYS_AHEAD: u64 = 256;

/// The CPU waits for the kernel, sends, and waits for the answer.
fn by_cpu(end: &End, job: &Job, meet: Meet<'_>) -> Result<Duration, Failure> {
    let [sent, received] = end.heard();
    meet()?;
    let start = Instant::now();
    for round in 0..job.rounds {
        match end.role {
            Role::Ping => {
                send_now(end, job, round)?;
                receive_now(end, job, round, received)?;
            }
            Role::Pong => {
                receive_now(end, job, round, received)?;
                send_now(end, job, round)?;
            }
        }
    }
    let took = start.elapsed();
    end.hear_to([sent + job.rounds, received + job.rounds])?;
    Ok(took)
}

fn send_now(end: &End, job: &Job, round: u64) -> Result<(), Failure> {
    if !job.compute.is_zero() {
        end.spin.start(&end.stream, job.compute)?;
        end.stream.synchronize(PATIENCE)?;
    }
    if job.stamped {
        end.stamp_now(round)?;
    }
    end.with_request(job, round, |request| end.qp.post_now(request)).map(drop)
}

fn receive_now(end: &End, job: &Job, round: u64, before: u64) -> Result<(), Failure> {
    end.hear_to([0, before + round + 1])?;
    if job.stamped { end.note_now(round) } else { Ok(()) }
}

/// Everything is put on the stream beforehand; the CPU only opens the gate.
fn by_stream(end: &End, job: &Job, meet: Meet<'_>) -> Result<Duration, Failure> {
    let before = end.heard();
    end.gate.store(0)?;
    let mut list = Descriptors::on(&end.stream);
    if end.role == Role::Ping {
        list.wait_value(&end.gate, Condition::AtLeast, 1)?;
    }
    for round in 0..job.rounds {
        match end.role {
            Role::Ping => {
                queue_send(end, job, round, &mut list)?;
                queue_receive(end, job, round, &mut list)?;
            }
            Role::Pong => {
                queue_receive(end, job, round, &mut list)?;
                queue_send(end, job, round, &mut list)?;
            }
        }
    }
    list.post()?;
    meet()?;
    let start = Instant::now();
    end.gate.store(1)?;
    end.finish_stream()?;
    let took = start.elapsed();
    // What was sent and received is heard of by the CPU as well: places are free again then.
    end.hear_to(before.map(|count| count + job.rounds))?;
    Ok(took)
}

fn queue_send(end: &End, job: &Job, round: u64, list: &mut Descriptors) -> Result<(), Failure> {
    if !job.compute.is_zero() {
        list.post()?; // a kernel stands between the lists
        end.spin.start(&end.stream, job.compute)?;
    }
    if job.stamped && !job.inline {
        list.write_value(&end.outgoing.word32(0)?, stamp(round).into())?;
    }
    end.with_request(job, round, |request| list.send(&end.qp, request)).map(drop)
}

fn queue_receive(end: &End, job: &Job, round: u64, list: &mut Descriptors) -> Result<(), Failure> {
    list.wait_for(&end.qp, end.receive(round)?)?;
    if job.stamped {
        list.post()?;
        end.note(round)?;
    }
    Ok(())
}

/// A graph of one round, replayed for each.
fn by_graph(end: &End, job: &Job, meet: Meet<'_>) -> Result<Duration, Failure> {
    let before = end.posted.before()?;
    let graph = end.posted.graph(&end.stream, (end.role, job), end.data(job), &before)?;
    let replay = |count: u64| (0..count).try_for_each(|_| Ok(end.stream.replay(&graph)?));
    by_device(
        end,
        job,
        meet,
        &|rounds| {
            let ahead = rounds.min(REPLAYS_AHEAD);
            replay(ahead)?;
            if job.stamped {
                end.posted.quiet_on(&end.stream)?;
            }
            Ok(rounds - ahead)
        },
        &replay,
    )
}

/// One kernel that plays all rounds.
fn by_kernel(end: &End, job: &Job, meet: Meet<'_>) -> Result<Duration, Failure> {
    let play = |rounds| {
        let before = end.posted.before()?;
        let time = (rounds, job.compute);
        end.posted.play(&end.stream, end.role, end.data(job), &before, time)?;
        Ok(0)
    };
    by_device(end, job, meet, &play, &|_| Ok(()))
}

/// All rounds at once; or one by one, each with its number, which the CPU writes and reads. `begin` puts rounds on the stream before
/// both sides have met, so that nobody has added to a word yet, and tells how many are left for `go_on`.
fn by_device(
    end: &End,
    job: &Job,
    meet: Meet<'_>,
    begin: &dyn Fn(u64) -> Result<u64, Failure>,
    go_on: &dyn Fn(u64) -> Result<(), Failure>,
) -> Result<Duration, Failure> {
    let mut play = |rounds| {
        end.gate.store(0)?;
        if end.role == Role::Ping {
            end.stream.wait_value(&end.gate, Condition::AtLeast, 1)?;
        }
        let left = begin(rounds)?;
        meet()?;
        let start = Instant::now();
        end.gate.store(1)?;
        go_on(left)?;
        end.finish_stream()?;
        end.posted.check()?;
        Ok(start.elapsed())
    };
    if !job.stamped {
        return play(job.rounds);
    }
    for round in 0..job.rounds {
        end.stamp_now(round)?;
        play(1)?;
        end.note_now(round)?;
    }
    Ok(Duration::ZERO)
}

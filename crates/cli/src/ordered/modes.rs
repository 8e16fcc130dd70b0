//! The ways to play ping-pong. A new one is an entry in [`MODES`].

use std::time::{Duration, Instant};

use warpwire::mem::Condition;
use warpwire::stream::Descriptors;

use super::Failure;
use super::endpoint::{Endpoint, Job, Role, TIMEOUT, stamp};

/// One way: plays the rounds of a job, and tells how long they took. `barrier` waits for the other side to be as far.
pub(super) struct Mode {
    pub(super) name: &'static str,
    /// It sends messages into receives, which are posted; others put, and add to a word.
    pub(super) receives: bool,
    pub(super) run_rounds: fn(&Endpoint, &Job, Barrier<'_>) -> Result<Duration, Failure>,
}

pub(super) type Barrier<'a> = &'a mut dyn FnMut() -> Result<(), Failure>;

pub(super) const MODES: [Mode; 4] = [
    Mode { name: "cpu", receives: true, run_rounds: by_cpu },
    Mode { name: "stream", receives: true, run_rounds: by_stream },
    Mode { name: "graph", receives: false, run_rounds: by_graph },
    Mode { name: "kernel", receives: false, run_rounds: by_kernel },
];

/// So many replays are put on a stream that waits at a gate: a stream that is full holds up whoever fills it.
const REPLAYS_IN_FLIGHT: u64 = 256;

/// The CPU waits for the kernel, sends, and waits for the answer.
fn by_cpu(endpoint: &Endpoint, job: &Job, barrier: Barrier<'_>) -> Result<Duration, Failure> {
    let [sent, received] = endpoint.polled();
    barrier()?;
    let start = Instant::now();
    for round in 0..job.rounds {
        match endpoint.role {
            Role::Ping => {
                send_now(endpoint, job, round)?;
                receive_now(endpoint, job, round, received)?;
            }
            Role::Pong => {
                receive_now(endpoint, job, round, received)?;
                send_now(endpoint, job, round)?;
            }
        }
    }
    let took = start.elapsed();
    endpoint.poll_until([sent + job.rounds, received + job.rounds])?;
    Ok(took)
}

fn send_now(endpoint: &Endpoint, job: &Job, round: u64) -> Result<(), Failure> {
    if !job.compute.is_zero() {
        endpoint.spin.start(&endpoint.stream, job.compute)?;
        endpoint.stream.synchronize(TIMEOUT)?;
    }
    if job.stamped {
        endpoint.stamp_now(round)?;
    }
    endpoint.with_request(job, round, |request| endpoint.qp.post_now(request)).map(drop)
}

fn receive_now(endpoint: &Endpoint, job: &Job, round: u64, before: u64) -> Result<(), Failure> {
    endpoint.poll_until([0, before + round + 1])?;
    if job.stamped { endpoint.log_now(round) } else { Ok(()) }
}

/// Everything is put on the stream beforehand; the CPU only opens the gate.
fn by_stream(endpoint: &Endpoint, job: &Job, barrier: Barrier<'_>) -> Result<Duration, Failure> {
    let before = endpoint.polled();
    endpoint.gate.store(0)?;
    let mut list = Descriptors::on(&endpoint.stream);
    if endpoint.role == Role::Ping {
        list.wait_value(&endpoint.gate, Condition::AtLeast, 1)?;
    }
    for round in 0..job.rounds {
        match endpoint.role {
            Role::Ping => {
                queue_send(endpoint, job, round, &mut list)?;
                queue_receive(endpoint, job, round, &mut list)?;
            }
            Role::Pong => {
                queue_receive(endpoint, job, round, &mut list)?;
                queue_send(endpoint, job, round, &mut list)?;
            }
        }
    }
    list.post()?;
    barrier()?;
    let start = Instant::now();
    endpoint.gate.store(1)?;
    endpoint.finish_stream()?;
    let took = start.elapsed();
    // What was sent and received is heard of by the CPU as well: places are free again then.
    endpoint.poll_until(before.map(|count| count + job.rounds))?;
    Ok(took)
}

fn queue_send(
    endpoint: &Endpoint,
    job: &Job,
    round: u64,
    list: &mut Descriptors,
) -> Result<(), Failure> {
    if !job.compute.is_zero() {
        list.post()?; // a kernel stands between the lists
        endpoint.spin.start(&endpoint.stream, job.compute)?;
    }
    if job.stamped && !job.inline {
        list.write_value(&endpoint.outgoing.word32(0)?, stamp(round).into())?;
    }
    endpoint.with_request(job, round, |request| list.send(&endpoint.qp, request)).map(drop)
}

fn queue_receive(
    endpoint: &Endpoint,
    job: &Job,
    round: u64,
    list: &mut Descriptors,
) -> Result<(), Failure> {
    list.wait_for(&endpoint.qp, endpoint.receive(round)?)?;
    if job.stamped {
        list.post()?;
        endpoint.log_on_stream(round)?;
    }
    Ok(())
}

/// A graph of one round, replayed for each.
fn by_graph(endpoint: &Endpoint, job: &Job, barrier: Barrier<'_>) -> Result<Duration, Failure> {
    let before = endpoint.kernel_qp.before()?;
    let graph = endpoint.kernel_qp.graph(
        &endpoint.stream,
        (endpoint.role, job),
        endpoint.data(job),
        &before,
    )?;
    let replay = |count: u64| (0..count).try_for_each(|_| Ok(endpoint.stream.replay(&graph)?));
    by_device(
        endpoint,
        job,
        barrier,
        &|rounds| {
            let queued = rounds.min(REPLAYS_IN_FLIGHT);
            replay(queued)?;
            if job.stamped {
                endpoint.kernel_qp.quiet_on(&endpoint.stream)?;
            }
            Ok(rounds - queued)
        },
        &replay,
    )
}

/// One kernel that plays all rounds.
fn by_kernel(endpoint: &Endpoint, job: &Job, barrier: Barrier<'_>) -> Result<Duration, Failure> {
    let run_rounds = |rounds| {
        let before = endpoint.kernel_qp.before()?;
        let time = (rounds, job.compute);
        endpoint.kernel_qp.run_rounds(
            &endpoint.stream,
            endpoint.role,
            endpoint.data(job),
            &before,
            time,
        )?;
        Ok(0)
    };
    by_device(endpoint, job, barrier, &run_rounds, &|_| Ok(()))
}

/// All rounds at once; or one by one, each with its number, which the CPU writes and reads. `begin` puts rounds on the stream before
/// both sides have met, so that nobody has added to a word yet, and tells how many are left for `finish`.
fn by_device(
    endpoint: &Endpoint,
    job: &Job,
    barrier: Barrier<'_>,
    begin: &dyn Fn(u64) -> Result<u64, Failure>,
    finish: &dyn Fn(u64) -> Result<(), Failure>,
) -> Result<Duration, Failure> {
    let mut run_rounds = |rounds| {
        endpoint.gate.store(0)?;
        if endpoint.role == Role::Ping {
            endpoint.stream.wait_value(&endpoint.gate, Condition::AtLeast, 1)?;
        }
        let remaining = begin(rounds)?;
        barrier()?;
        let start = Instant::now();
        endpoint.gate.store(1)?;
        finish(remaining)?;
        endpoint.finish_stream()?;
        endpoint.kernel_qp.check()?;
        Ok(start.elapsed())
    };
    if !job.stamped {
        return run_rounds(job.rounds);
    }
    for round in 0..job.rounds {
        endpoint.stamp_now(round)?;
        run_rounds(1)?;
        endpoint.log_now(round)?;
    }
    Ok(Duration::ZERO)
}

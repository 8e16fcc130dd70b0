//! The ping-pong modes. A new one is an entry in [`MODES`].

use std::time::{Duration, Instant};

use warpwire::mem::Condition;
use warpwire::stream::Descriptors;

use super::Failure;
use super::endpoint::{Endpoint, Job, Role, TIMEOUT, stamp};

/// One mode.
pub(super) struct Mode {
    pub(super) name: &'static str,
    /// The mode sends messages into posted receives; the others put data and add to a signal word.
    pub(super) receives: bool,
    /// Runs all rounds of a job and returns how long they took. The barrier waits for the peer.
    pub(super) run_rounds: fn(&Endpoint, &Job, Barrier<'_>) -> Result<Duration, Failure>,
}

pub(super) type Barrier<'a> = &'a mut dyn FnMut() -> Result<(), Failure>;

pub(super) const MODES: [Mode; 4] = [
    Mode { name: "cpu", receives: true, run_rounds: by_cpu },
    Mode { name: "stream", receives: true, run_rounds: by_stream },
    Mode { name: "graph", receives: false, run_rounds: by_graph },
    Mode { name: "kernel", receives: false, run_rounds: by_kernel },
];

/// Max replays enqueued on a stream that waits at a gate: enqueueing on a full stream blocks, and
/// the gate would never be opened.
const REPLAYS_IN_FLIGHT: u64 = 256;

/// The CPU waits for the compute kernel, posts, and polls for the reply.
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

/// All rounds are enqueued on the stream beforehand; the CPU only opens the gate.
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
    // The CPU must poll these completions too, to free the queues' entries.
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
        list.post()?; // the kernel is enqueued between two lists
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

/// A graph of one round, replayed for each round.
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

/// One kernel runs all rounds.
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

/// Runs all rounds together; or, if stamped, one by one, with the CPU writing and reading each
/// number. `begin` enqueues rounds before the barrier, while the peer cannot have added to the
/// signal word yet, and returns how many remain for `finish`.
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

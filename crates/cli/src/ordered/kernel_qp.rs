//! What kernels and graphs use: their own queue pair, and a signal word that the peer adds to.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use warpwire::mem::{Allocation, Device, Graph, Stream, Word};
use warpwire::stream::kernel::SignalWait;
use warpwire::stream::{KernelQp, KernelQpOptions};
use warpwire::verbs::bootstrap::Bootstrap;
use warpwire::verbs::{Access, Context, Mr, Pd, QpEndpoint, QpOptions, Remote, Sge};
use warpwire_apps::pingpong_kernels::{PingPongEnd, PingPongKernels};

use super::Failure;
use super::endpoint::{Job, Role, TIMEOUT};

/// Connection data sent to the peer: the queue pair, and `(address, rkey)` of message memory and
/// signal word.
#[derive(Serialize, Deserialize)]
struct KernelEndpointInfo {
    qp: QpEndpoint,
    memory: (u64, u32),
    word: (u64, u32),
}

/// A queue pair that kernels post to, with the peer's addresses.
pub(super) struct KernelEndpoint {
    qp: KernelQp,
    kernels: PingPongKernels,
    /// The peer's message memory.
    to: Remote,
    /// The peer's signal word.
    signal: Remote,
    /// Our own signal word.
    words: Allocation,
    // Keeps the word registered while the peer may write to it.
    _word: Mr,
}

/// Our signal word, and its value before the peer added to it.
pub(super) struct SignalStart(Word, u64);

impl KernelEndpoint {
    pub(super) fn open(
        device: &Device,
        (context, pd): (&Context, &Pd),
        into: &Mr,
        bootstrap: &mut Bootstrap,
    ) -> Result<Self, Failure> {
        // Only one stream, or its kernel, posts at a time.
        let connection = QpOptions::default().with_timeout(18);
        let options = KernelQpOptions::default()
            .with_single_poster(true)
            .with_wait_timeout(TIMEOUT)
            .with_connection(connection);
        let qp = KernelQp::create(context, pd, device, options)?;
        let words = device.alloc(64)?;
        words.write(0, &[0; 64])?;
        let word = context.register(pd, words.whole()?, Access::ALL)?;
        let pair = |remote: Remote| (remote.address, remote.rkey);
        let mine = KernelEndpointInfo {
            qp: qp.endpoint(),
            memory: pair(into.remote(0)),
            word: pair(word.remote(0)),
        };
        let theirs: KernelEndpointInfo = bootstrap.swap(&mine)?;
        qp.connect(&theirs.qp)?;
        let remote = |(address, rkey)| Remote { address, rkey };
        let (to, signal) = (remote(theirs.memory), remote(theirs.word));
        let kernels = PingPongKernels::load(device)?;
        Ok(Self { qp, kernels, to, signal, words, _word: word })
    }

    /// Reads our signal word; call before the peer may add to it.
    pub(super) fn before(&self) -> Result<SignalStart, Failure> {
        let word = self.words.word64(0)?;
        let value = word.load()?;
        Ok(SignalStart(word, value))
    }

    /// Captures one round: a put with signal and the wait for the peer's signal, in the order of
    /// the role.
    pub(super) fn graph(
        &self,
        stream: &Stream,
        (role, job): (Role, &Job),
        from: Sge,
        SignalStart(word, start): &SignalStart,
    ) -> Result<Graph, Failure> {
        let wait = SignalWait::new(word, *start, 1)?;
        let graph = stream.capture(|stream| {
            if role == Role::Pong {
                self.qp.wait_signal_on_stream(stream, &wait)?;
            }
            if !job.compute.is_zero() {
                self.kernels.compute(stream, job.compute)?;
            }
            self.qp.put_signal_on_stream(stream, self.to, from, self.signal, 1)?;
            if role == Role::Ping {
                self.qp.wait_signal_on_stream(stream, &wait)?;
            }
            Ok(())
        })?;
        Ok(graph)
    }

    /// Enqueues a wait until all posted work has completed, after which its source memory may be
    /// overwritten.
    pub(super) fn quiet_on(&self, stream: &Stream) -> Result<(), Failure> {
        Ok(self.qp.wait_on_stream(stream)?)
    }

    /// Launches a kernel that runs `rounds` rounds.
    pub(super) fn run_rounds(
        &self,
        stream: &Stream,
        role: Role,
        from: Sge,
        SignalStart(own, start): &SignalStart,
        (rounds, compute): (u64, Duration),
    ) -> Result<(), Failure> {
        let (to, signal, sends_first) = (self.to, self.signal, role == Role::Ping);
        let side = PingPongEnd { qp: &self.qp, to, from, signal, own, start: *start, sends_first };
        Ok(self.kernels.ping_pong(stream, &side, rounds, compute, TIMEOUT)?)
    }

    /// Returns the failure of a kernel or of the queue pair; call after the stream is done.
    pub(super) fn check(&self) -> Result<(), Failure> {
        self.kernels.check()?;
        Ok(self.qp.check()?)
    }
}

//! What kernels and graphs use of an end: a queue pair of their own, and a word that the peer adds to.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use warpwire::mem::{Allocation, Device, Graph, Stream, Word};
use warpwire::stream::kernel::SignalWait;
use warpwire::stream::{KernelQp, KernelQpOptions};
use warpwire::verbs::bootstrap::Bootstrap;
use warpwire::verbs::{Access, Context, Mr, Pd, QpEndpoint, QpOptions, Remote, Sge};
use warpwire_apps::pingpong_kernels::{PingPongKernels, Side};

use super::Failure;
use super::endpoint::{Job, Role, TIMEOUT};

/// What one end tells the other: its queue pair, and where messages and signals go.
#[derive(Serialize, Deserialize)]
struct KernelEndpointInfo {
    qp: QpEndpoint,
    memory: (u64, u32),
    word: (u64, u32),
}

/// A queue pair that kernels post to.
pub(super) struct KernelEndpoint {
    qp: KernelQp,
    kernels: PingPongKernels,
    /// The peer's memory, and its word.
    to: Remote,
    signal: Remote,
    /// Our own word.
    words: Allocation,
    // Kept while the peer writes there.
    _word: Mr,
}

/// A word of our own, and what it was before the peer added to it.
pub(super) struct SignalStart(Word, u64);

impl KernelEndpoint {
    pub(super) fn open(
        device: &Device,
        (context, pd): (&Context, &Pd),
        into: &Mr,
        bootstrap: &mut Bootstrap,
    ) -> Result<Self, Failure> {
        // One posts at a time: a stream, or its kernel.
        let connection = QpOptions { timeout: 18, ..QpOptions::default() };
        let options = KernelQpOptions {
            single_poster: true,
            wait_timeout: TIMEOUT,
            connection,
            ..KernelQpOptions::default()
        };
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

    /// What our word is now: to be asked before the peer adds to it.
    pub(super) fn before(&self) -> Result<SignalStart, Failure> {
        let word = self.words.word64(0)?;
        let value = word.load()?;
        Ok(SignalStart(word, value))
    }

    /// One round as a graph: a put with a signal, and the wait for the other's, in the order of the role.
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

    /// Has the stream wait until what was posted has left its memory, which may then be written to.
    pub(super) fn quiet_on(&self, stream: &Stream) -> Result<(), Failure> {
        Ok(self.qp.wait_on_stream(stream)?)
    }

    /// A kernel that plays so many rounds.
    pub(super) fn run_rounds(
        &self,
        stream: &Stream,
        role: Role,
        from: Sge,
        SignalStart(own, start): &SignalStart,
        (rounds, compute): (u64, Duration),
    ) -> Result<(), Failure> {
        let (to, signal, serves) = (self.to, self.signal, role == Role::Ping);
        let side = Side { qp: &self.qp, to, from, signal, own, start: *start, serves };
        Ok(self.kernels.play(stream, &side, rounds, compute, TIMEOUT)?)
    }

    /// Sees that nothing failed, when the stream is done.
    pub(super) fn check(&self) -> Result<(), Failure> {
        self.kernels.check()?;
        Ok(self.qp.check()?)
    }
}

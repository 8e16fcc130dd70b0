//! Queue pairs of hardware.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use warpwire_proto::qp::{Change, Mtu, State};

use super::exchange::Offer;
use super::hardware::{Endpoint, Hardware};
use super::in_place::{InPlace, Writing};
use super::post::{Request, too_early};
use super::queues::Queues;
use super::{Context, Cq, Pd, QpOptions, Srq};
use crate::error::{Error, Kind, Result};
use crate::hca::QueueMemory;
use crate::work::ReceiveRequest;
use crate::{ibv, link};

/// A queue pair of hardware.
#[derive(Debug)]
pub(super) struct Hard {
    pub(super) qp: ibv::Qp,
    pub(super) end: Endpoint,
    /// It has come to `RTS`, or has failed: work may be posted.
    takes_work: AtomicBool,
    pub(super) nothing: QueueMemory,
    /// Where it is posted to, if that is past the provider.
    pub(super) in_place: Option<Arc<InPlace>>,
    name: String,
}

/// How often a peer's address is asked for: the first question may be lost, or the kernel's patience too short.
const QUESTIONS: u32 = 4;

impl Hard {
    pub(super) fn create(
        hardware: &Hardware,
        pd: &Pd,
        cqs: &[Cq; 2],
        options: &mut QpOptions,
    ) -> Result<Self> {
        let name = hardware.context.device().name.clone();
        if options.memory.is_some() {
            return Err(Error::new(Kind::Unsupported, "make a queue pair")
                .on(name)
                .why("its driver chooses the memory of its queues")
                .fix("leave the memory out, or use the software HCA"));
        }
        let end = hardware.endpoint(options.port, options.gid_index)?;
        let (Some(sends), Some(receives)) = (cqs[0].hardware(), cqs[1].hardware()) else {
            return Err(foreign());
        };
        let attributes = hardware.context.attributes()?;
        let most = attributes.max_rd_atomic.min(attributes.max_dest_rd_atomic);
        // Peers are told, so that they ask for no more than it has.
        options.max_rd_atomic = options.max_rd_atomic.min(u8::try_from(most).unwrap_or(u8::MAX));
        let qp = pd.hardware()?.create_qp(
            sends,
            receives,
            ibv::QpOptions {
                service: options.service,
                send_depth: options.send_depth.max(1),
                receive_depth: options.receive_depth.max(1),
                send_ranges: options.send_ranges,
                receive_ranges: options.receive_ranges,
                inline: options.inline,
                signal_all: options.signal_all,
                srq: options.srq.as_ref().and_then(Srq::hardware).cloned(),
                port: end.port,
                gid_index: end.gid_index,
                mtu: options.mtu,
                access: options.access,
                timeout: options.timeout,
                retry_count: options.retry_count,
                rnr_retry: options.rnr_retry,
                min_rnr_timer: options.min_rnr_timer,
                max_rd_atomic: options.max_rd_atomic,
                past_provider: options.watched || cqs.iter().any(|cq| cq.in_place().is_some()),
            },
        )?;
        let in_place = in_place(&qp, cqs, options.watched)?;
        let (takes_work, nothing) = (AtomicBool::new(false), QueueMemory::nothing());
        Ok(Self { qp, end, takes_work, nothing, in_place, name })
    }

    pub(super) fn path(&self) -> link::Path {
        let Endpoint { port, gid_index, address, .. } = self.end;
        let why = format!("{}, port {port}, GID {gid_index}", self.name);
        link::Path { kind: link::Kind::Hardware, local: address, why }
    }

    pub(super) fn offer(&self, options: &QpOptions) -> Offer {
        let Endpoint { address, gid, lid, mtu, .. } = self.end;
        Offer {
            address,
            qpn: self.qp.number(),
            psn: self.qp.psn(),
            mtu: options.mtu.map_or(mtu, Mtu::bytes),
            max_rd_atomic: options.max_rd_atomic,
            lid,
            // On Ethernet it is the IP address.
            gid: if lid == 0 { 0 } else { u128::from_be_bytes(gid) },
        }
    }

    /// Takes the step to `RTR`, towards that peer.
    pub(super) fn meet(&self, to_rtr: &Change, peer: &Offer) -> Result<()> {
        let mut route = ibv::Route {
            lid: peer.lid,
            ..ibv::Route::to(peer.address.ip(), self.end.port, self.end.gid_index)
        };
        if peer.lid != 0 {
            route.gid = peer.gid.to_be_bytes();
        }
        if let Some(path) = &to_rtr.path {
            (route.traffic_class, route.hop_limit) = (path.traffic_class, path.hop_limit);
            route.flow_label = path.flow_label;
        }
        let unanswered = |done: &Result<()>| {
            done.as_ref().is_err_and(|error| error.reason().contains("nobody answers"))
        };
        let mut done = self.modify(to_rtr, Some(&route));
        for _ in 1..QUESTIONS {
            if unanswered(&done) {
                done = self.modify(to_rtr, Some(&route));
            }
        }
        done
    }

    pub(super) fn modify(&self, change: &Change, route: Option<&ibv::Route>) -> Result<()> {
        if change.to == State::Reset {
            self.takes_work.store(false, Ordering::Relaxed);
        }
        self.qp.modify(change, route)?;
        if let Some(pair) = self.in_place.as_ref().filter(|_| change.to == State::Reset) {
            pair.reset();
        }
        let takes_work = !matches!(change.to, State::Reset | State::Init | State::Rtr);
        self.takes_work.store(takes_work, Ordering::Relaxed);
        Ok(())
    }

    /// Whether work may be posted: providers take it in any state, and do nothing with it.
    #[inline]
    pub(super) fn check_state(&self) -> Result<()> {
        if self.takes_work.load(Ordering::Relaxed) {
            return Ok(());
        }
        match self.qp.state()? {
            state @ (State::Reset | State::Init | State::Rtr) => {
                Err(too_early(self.qp.number(), state))
            }
            _ => {
                self.takes_work.store(true, Ordering::Relaxed);
                Ok(())
            }
        }
    }

    /// Posts work, all of it or none.
    #[inline]
    pub(super) fn post(&self, requests: &[Request<'_>]) -> Result<()> {
        if requests.is_empty() {
            return Ok(());
        }
        self.check_state()?;
        let Some(pair) = &self.in_place else { return self.qp.post_all(requests) };
        let mut writing = pair.begin();
        requests.iter().try_for_each(|request| writing.push(request))?;
        writing.post();
        Ok(())
    }

    /// Posts receives, all of them or none.
    #[inline]
    pub(super) fn post_receive(&self, requests: &[ReceiveRequest<'_>]) -> Result<()> {
        match &self.in_place {
            Some(pair) => pair.post_receive(requests),
            None => self.qp.post_all_receives(requests),
        }
    }

    pub(super) fn batch(&self) -> HardBatch<'_> {
        let batch = match &self.in_place {
            Some(pair) => Gathering::InPlace(pair.begin()),
            None => Gathering::Provider(self.qp.batch()),
        };
        HardBatch { hard: self, batch }
    }
}

/// The queues of a queue pair that streams or kernels will ring for.
fn in_place(qp: &ibv::Qp, cqs: &[Cq; 2], watched: bool) -> Result<Option<Arc<InPlace>>> {
    let held = cqs.each_ref().map(Cq::in_place);
    if !watched && held.iter().all(Option::is_none) {
        return Ok(None);
    }
    let [Some(sends), Some(receives)] = held else {
        return Err(Error::new(Kind::InvalidArgument, "make a queue pair that is watched")
            .why("its completion queues are the provider's")
            .fix("make them with CqOptions::held, and the queue pair with QpOptions::watched"));
    };
    let pair = Arc::new(InPlace::new(Queues::of_hardware(qp.direct()?)));
    sends.attach(&pair);
    if !std::ptr::eq(sends, receives) {
        receives.attach(&pair);
    }
    Ok(Some(pair))
}

/// Work for hardware that is being put together.
#[derive(Debug)]
pub(super) struct HardBatch<'q> {
    hard: &'q Hard,
    batch: Gathering<'q>,
}

#[derive(Debug)]
enum Gathering<'q> {
    Provider(ibv::Batch<'q>),
    InPlace(Writing<'q>),
}

impl HardBatch<'_> {
    pub(super) fn push(&mut self, request: &Request<'_>) -> Result<()> {
        self.hard.check_state()?;
        match &mut self.batch {
            Gathering::Provider(batch) => batch.push(request),
            Gathering::InPlace(writing) => writing.push(request),
        }
    }

    pub(super) fn post(self) {
        match self.batch {
            Gathering::Provider(batch) => batch.post_or_end(),
            Gathering::InPlace(writing) => writing.post(),
        }
    }
}

/// Whether all of a queue pair's queues are of one sort.
pub(super) fn same_device(context: &Context, cqs: [&Cq; 2], srq: Option<&Srq>) -> Result<()> {
    let hardware = context.0.hardware.is_some();
    let same = cqs.iter().all(|cq| cq.hardware().is_some() == hardware)
        && srq.is_none_or(|srq| srq.hardware().is_some() == hardware);
    if same { Ok(()) } else { Err(foreign()) }
}

#[cold]
fn foreign() -> Error {
    Error::new(Kind::InvalidArgument, "make a queue pair")
        .why("one of its queues was made by another context")
        .fix("make all of them by one")
}

//! Opens a device: its engines, their links and threads.

use std::sync::Arc;

use parking_lot::Mutex;

use super::doorbell_bitmap::DoorbellBitmap;
use super::engine::{Clock, Engine, EngineOptions};
use super::event::AsyncEventQueue;
use super::numbers::Numbering;
use super::placement::Placement;
use super::progress_mode::{self, ProgressMode, Waker};
use super::shared::EngineShared;
use super::{HcaInner, HcaOptions, MAX_ENGINES, mapped};
use crate::error::{Error, Kind, Result};
use crate::link::{self, Link};
use crate::mr::Registry;
use crate::sync::BiasedMutex;

type Exports = std::result::Result<Arc<link::ExportTable>, &'static str>;

pub(super) fn open(mut link: impl Link + 'static, options: HcaOptions) -> Result<HcaInner> {
    check(&options)?;
    let registry = Registry::for_engines(options.engines as usize);
    let export_table = match options.direct {
        true => export_table(&mut link, &registry),
        false => Err("disabled by option"),
    };
    let (mut path, max_packet) = (link.path(), link.max_packet());
    let max_packet_on_host = link.max_packet_on_host();
    path.why += &match &export_table {
        Ok(_) => "; direct access: on where memory can be mapped".to_owned(),
        Err(why) => format!("; direct access: off ({why})"),
    };
    let others = (1..options.engines).map(|_| link.sibling()).collect::<Result<Vec<_>>>();
    let others = others
        .map_err(|error| error.during(format!("open a device with {} engines", options.engines)))?;
    if !others.is_empty() {
        let ports: Vec<_> = others.iter().map(|other| other.local().port().to_string()).collect();
        path.why += &format!("; {} engines, also on ports {}", options.engines, ports.join(", "));
    }
    let device = Device {
        registry,
        async_events: Arc::new(AsyncEventQueue::new()?),
        numbering: Numbering::random(options.qpn_slot, options.engines),
        clock: Clock::start(),
        options,
    };
    let mut engines = vec![device.engine(Box::new(link), export_table, 0)?];
    for (at, link) in others.into_iter().enumerate() {
        engines.push(device.engine(link, Err("the device has several engines"), at + 1)?);
    }
    let Device { registry, async_events, numbering, .. } = device;
    Ok(HcaInner {
        placement: Mutex::new(Placement::new(engines.len())),
        engines: engines.into(),
        registry,
        async_events,
        path,
        max_packet,
        max_packet_on_host,
        numbering,
        progress_mode: options.progress_mode,
    })
}

fn check(options: &HcaOptions) -> Result<()> {
    if options.max_mappings == 0 {
        return Err(Error::new(
            Kind::InvalidArgument,
            "open a device that maps no memory of peers",
        )
        .why("max_mappings is 0")
        .fix("turn direct access off with direct = false"));
    }
    let engines = options.engines;
    let wrong = |why: String| {
        Error::new(Kind::InvalidArgument, format!("open a device with {engines} engines")).why(why)
    };
    if !(1..=MAX_ENGINES).contains(&engines) {
        return Err(wrong("the number is out of range".to_owned())
            .fix(format!("ask for 1 to {MAX_ENGINES}, at most one per core")));
    }
    if engines > 1 && options.qpn_slot.is_some() {
        return Err(wrong(
            "a QPN slot stands for one port, and each engine has its own".to_owned(),
        )
        .fix("ask for one engine, or omit the slot"));
    }
    Ok(())
}

/// What the engines of a device share.
struct Device {
    registry: Registry,
    async_events: Arc<AsyncEventQueue>,
    numbering: Numbering,
    clock: Clock,
    options: HcaOptions,
}

impl Device {
    /// Engine `number`, and its thread.
    fn engine(
        &self,
        link: Box<dyn Link>,
        export_table: Exports,
        number: usize,
    ) -> Result<Arc<EngineShared>> {
        let progress_mode = self.options.progress_mode;
        let doorbell_bitmap = Arc::new(DoorbellBitmap::new());
        let numbering = self.numbering.of_engine(number as u32);
        let local = link.local();
        let manual_progress = progress_mode == ProgressMode::Manual;
        let engine_options = EngineOptions {
            acks_immediately: self.options.immediate_acks || manual_progress,
            max_mappings: self.options.max_mappings,
            numbering,
        };
        let engine = Engine::new(
            link,
            self.registry.of_engine(number),
            self.async_events.clone(),
            doorbell_bitmap.clone(),
            engine_options,
            self.clock,
            export_table,
        );
        let has_direct_peers = engine.core.mapped.has_peers.clone();
        let export_table = engine.core.mapped.export_table.as_ref().ok().cloned();
        let shared = Arc::new(EngineShared {
            engine: match progress_mode {
                ProgressMode::Thread { .. } => BiasedMutex::unbiased(engine),
                ProgressMode::Auto | ProgressMode::Manual => BiasedMutex::new(engine),
            },
            doorbell_bitmap,
            waker: Arc::new(Waker::new()?),
            clock: self.clock,
            polled_doorbells: 0.into(),
            has_direct_peers,
            export_table,
            numbering,
            local,
        });
        progress_mode::start(&shared, progress_mode, number)?;
        Ok(shared)
    }
}

/// Exports registered memory to peers, if the link can; or the reason why it cannot.
fn export_table(
    link: &mut impl Link,
    registry: &Registry,
) -> std::result::Result<Arc<link::ExportTable>, &'static str> {
    let files = registry.clone();
    let export_table = link::ExportTable::new(Box::new(move |key| files.files_for_key(key)))
        .map_err(|why| {
            tracing::debug!(%why, "direct access is off");
            "the export table could not be allocated"
        })?;
    link.install_exports(&export_table)?;
    registry.observer(Arc::new(mapped::ExportPublisher(Arc::downgrade(&export_table))));
    Ok(export_table)
}

//! Device memory of a peer, opened on a GPU of this process.

use std::fs::File;
use std::io::{Read, Seek};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;

use super::device_window::PeerWindow;
use crate::error::{Error, Kind, Result};
use crate::mem::{Allocation, CopyQueue, Device, IpcHandle};
use crate::mr;

/// Longer handles are not made.
const MAX_HANDLE_LEN: u64 = 1 << 16;
/// States of the queue of copies.
const NO_QUEUE: u8 = 0;
const CREATING_QUEUE: u8 = 1;
const QUEUE_CREATED: u8 = 2;
const QUEUE_FAILED: u8 = 3;

/// A peer's device memory. It is opened at its first use, on the GPU that the local memory is on,
/// by the pager thread: the driver may take its time. For another GPU of this process the peer is
/// asked for its handle again, since keeping it would keep its descriptors open.
pub(super) struct ImportedMemory {
    /// For people.
    handle_type: &'static str,
    /// The GPU that it is opened on, once somebody has asked for that.
    device: OnceLock<Device>,
    /// The same memory for another GPU.
    next: OnceLock<Arc<Self>>,
    /// A GPU needs it that has no `next` yet.
    wants_next: AtomicBool,
    /// What the peer sent; taken when it is opened.
    shared: Mutex<Option<SharedHandle>>,
    opened: OnceLock<std::result::Result<Allocation, Error>>,
    /// For short operations; set before `opened`.
    window: OnceLock<PeerWindow>,
    /// A queue of copies that was created for an engine that has none on this GPU.
    queue: Mutex<Option<CopyQueue>>,
    /// A queue of copies is being created, or that failed.
    queue_state: AtomicU8,
    queue_failure: OnceLock<Error>,
}

struct SharedHandle {
    handle: IpcHandle,
    descriptors: Vec<OwnedFd>,
}

/// Whether the memory can be used.
pub(super) enum ImportState<'a> {
    Opened(&'a Allocation),
    Opening,
    Failed,
}

impl ImportedMemory {
    /// Reads the handle from the first of a peer's files; the others are the handle's descriptors.
    ///
    /// # Errors
    /// If there is no handle in it.
    pub(super) fn new(files: Vec<OwnedFd>) -> Result<Self> {
        let mut files = files.into_iter();
        let what = "import a peer's device memory";
        let first = files.next().ok_or_else(|| {
            Error::new(Kind::Unsupported, what)
                .why("the owner cannot share it with other processes")
        })?;
        let (mut file, mut bytes) = (File::from(first), Vec::new());
        // The owner wrote it, and shares the position with us.
        file.rewind()
            .and_then(|()| file.take(MAX_HANDLE_LEN + 1).read_to_end(&mut bytes))
            .map_err(|error| Error::os(what, &error))?;
        let handle = IpcHandle::from_bytes(&bytes)?;
        let handle_type = handle.handle_type();
        let shared = SharedHandle { handle, descriptors: files.collect() };
        Ok(Self {
            handle_type,
            device: OnceLock::new(),
            next: OnceLock::new(),
            wants_next: AtomicBool::new(false),
            shared: Mutex::new(Some(shared)),
            opened: OnceLock::new(),
            window: OnceLock::new(),
            queue: Mutex::default(),
            queue_state: AtomicU8::new(NO_QUEUE),
            queue_failure: OnceLock::new(),
        })
    }

    /// The memory for this GPU; `None` if the peer must be asked for another handle, which
    /// [`wants_next`](Self::wants_next) says from then on.
    pub(super) fn on<'m>(self: &'m Arc<Self>, device: &Device) -> Option<&'m Arc<Self>> {
        let mut found = self;
        while found.device.get().is_some_and(|other| other != device) {
            let Some(next) = found.next.get() else {
                self.wants_next.store(true, Ordering::Relaxed);
                return None;
            };
            found = next;
        }
        Some(found)
    }

    /// Whether the peer must be asked for another handle.
    pub(super) fn wants_next(&self) -> bool {
        self.wants_next.load(Ordering::Relaxed)
    }

    /// Adds the same memory for another GPU.
    pub(super) fn add_next(&self, memory: Self) {
        let mut last = self;
        while let Some(next) = last.next.get() {
            last = next;
        }
        // One that nobody has opened yet is the answer to a request that was repeated.
        if !last.is_new() {
            let _ = last.next.set(Arc::new(memory));
        }
        self.wants_next.store(false, Ordering::Relaxed);
    }

    /// The memory, if it has been opened; else it is being opened on this device. With
    /// `needs_queue` there is a queue of copies to [take](Self::take_queue) then.
    pub(super) fn open_on(self: &Arc<Self>, device: &Device, needs_queue: bool) -> ImportState<'_> {
        match self.opened.get() {
            Some(Ok(memory)) if !needs_queue => return ImportState::Opened(memory),
            Some(Ok(memory)) => match self.queue_state.load(Ordering::Acquire) {
                NO_QUEUE => self.create_queue(device),
                QUEUE_CREATED => return ImportState::Opened(memory),
                QUEUE_FAILED => return ImportState::Failed,
                _ => {}
            },
            Some(Err(_)) => return ImportState::Failed,
            None => {}
        }
        if self.device.set(device.clone()).is_ok()
            && let Some(SharedHandle { handle, descriptors }) = self.shared.lock().take()
        {
            let (this, device) = (self.clone(), device.clone());
            mr::run_on_pager(move || {
                let opened = device.open_ipc_with(&handle, descriptors);
                match opened.as_ref().map(PeerWindow::open) {
                    Ok(Ok(Some(window))) => drop(this.window.set(window)),
                    Ok(Ok(None)) => {}
                    Ok(Err(why)) => tracing::debug!(%why, "short operations use packets"),
                    Err(why) => {
                        tracing::debug!(%why, "cannot map a peer's device memory; packets are used");
                    }
                }
                let _ = this.opened.set(opened);
            });
        }
        ImportState::Opening
    }

    /// Creates a queue of copies. That loads a kernel, which fails while other kernels run for
    /// long; the memory itself is opened nevertheless.
    #[cold]
    fn create_queue(self: &Arc<Self>, device: &Device) {
        self.queue_state.store(CREATING_QUEUE, Ordering::Relaxed);
        let (this, device) = (self.clone(), device.clone());
        mr::run_on_pager(move || {
            let state = match CopyQueue::new(&device) {
                Ok(queue) => {
                    *this.queue.lock() = Some(queue);
                    QUEUE_CREATED
                }
                Err(why) => {
                    tracing::debug!(%why, "a peer's device memory is accessed by packets");
                    let _ = this.queue_failure.set(why);
                    QUEUE_FAILED
                }
            };
            this.queue_state.store(state, Ordering::Release);
        });
    }

    /// The window for short operations, if there is one.
    #[inline]
    pub(super) fn window(&self) -> Option<&PeerWindow> {
        self.window.get()
    }

    /// Whether nobody has asked to open it.
    #[inline]
    pub(super) fn is_new(&self) -> bool {
        self.device.get().is_none()
    }

    /// Takes the queue of copies that was created; the next who needs one gets another.
    pub(super) fn take_queue(&self) -> Option<CopyQueue> {
        let taken = self.queue.lock().take();
        self.queue_state.store(NO_QUEUE, Ordering::Release);
        taken
    }

    /// What it is opened by, for people: `CUDA VMM descriptors`.
    pub(super) fn handle_type(&self) -> &'static str {
        self.handle_type
    }

    /// Why it could not be opened, or not be copied, if that failed.
    pub(super) fn failure(&self) -> Option<&Error> {
        self.opened.get()?.as_ref().err().or_else(|| self.queue_failure.get())
    }
}

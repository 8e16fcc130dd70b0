//! Direct access to the memory of a peer on this machine: the owner's side ([`ExportTable`]) and
//! the importer's ([`ShmPeer`]).
//!
//! The owner has a table of rows, one per export. Peers map the table read-only; the layers above
//! define the content of a row. A row is open or closed, and each opening has a generation number,
//! so what a peer has derived from a row is valid as long as that generation is current. The files
//! that rows refer to are sent over the connection's socket when a peer first requests them; a
//! table with thousands of rows costs nothing until then.
//!
//! An access uses two rows (one for the queue pair, one for the memory). [`ShmPeer::begin_access`]
//! announces it and then checks that both rows are still open; [`ExportTable::close`] closes a row
//! and never waits: see `sync/revocation.rs`. An owner that is about to reuse what a row stood for
//! then calls [`ExportTable::wait_until_unused`], which is bounded: a peer that was killed during
//! an access is no longer waited for (its socket and its pidfd report the exit), one that is
//! stopped is waited for up to a limit. Nothing waits for a peer under a lock.
//!
//! A process that was forked inherits the table, but does not own it: it can neither open nor close
//! rows.
//!
//! # Trust
//! Peers are processes of the same user. A peer holds the file of each memory that it requested and
//! can access all of it at any time, whatever the rows say; the rows keep a well-behaved peer
//! correct. Files of memory that a peer may only read are opened read-only. Memory without a file
//! is copied by the kernel (`process_vm_writev`), where that lets processes of one user do so.

mod device_access;

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, compiler_fence, fence};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use super::access_tag;
use super::handshake::{self, ControlMsg};
use super::sys::{ControlPage, ReadOnlyMapping, WordTable, copy_process_memory};
use crate::error::{Error, Result};
use crate::mem::SharedBytes;
use crate::mem::copy::CopyDirection;
use crate::sync::{Backoff, asymmetric_fence, revocation};
pub use device_access::DeviceAccess;

/// Number of rows of a table.
pub const ROWS: usize = 1 << access_tag::ROW_BITS;
/// The content of a row, besides its generation.
pub type RowContent = [u64; 7];

const ROW_WORDS: usize = 8;
const TABLE_LEN: usize = ROWS * ROW_WORDS * 8;
const NO_WAIT: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };

/// Number of polls for the end of an access before the owner checks whether the importer is alive.
const LIVENESS_CHECK_AFTER: u32 = 96;

/// Kinds of control messages: a request for the file of a key; the table; the reply to a request,
/// with the file if there is one; the receiver reads the ring from now on.
const MSG_FILE_REQUEST: u8 = 2;
const MSG_TABLE: u8 = 3;
const MSG_FILE_REPLY: u8 = 4;
const MSG_ACCEPTED: u8 = 5;

/// Sent with the table: before the owner checks for accesses in progress, it issues a heavy fence
/// in all processes, so importers need no fence. Owners without this feature do not send it.
const OWNER_HAS_HEAVY_FENCE: u32 = 1;

/// Returns the files of a key; none if the key has no memory to share. More than fit into a message
/// are as good as none.
pub type FileLookup = dyn Fn(u32) -> Vec<OwnedFd> + Send + Sync;

/// The memory that this process exports to its peers.
pub struct ExportTable {
    table: WordTable,
    file: OwnedFd,
    owner: Creator,
    /// The generation of the next opening.
    generations: AtomicU64,
    files_for_key: Box<FileLookup>,
    importers: Mutex<Vec<Arc<Importer>>>,
    /// Operations and bytes of importers that have disconnected.
    departed_totals: [AtomicU64; 2],
}

/// A peer that has mapped the table.
struct Importer {
    control: ControlPage,
    socket: Arc<OwnedFd>,
    /// Reports the exit even if a child of the process has inherited the socket.
    pidfd: Option<OwnedFd>,
}

impl Importer {
    /// Whether the importer can no longer access memory: the process has exited, or has closed the
    /// connection.
    fn is_gone(&self) -> bool {
        let mut fds = vec![PollFd::new(&self.socket, PollFlags::RDHUP)];
        fds.extend(self.pidfd.as_ref().map(|pidfd| PollFd::new(pidfd, PollFlags::IN)));
        let Ok(_) = poll(&mut fds, Some(&NO_WAIT)) else { return false };
        fds.iter().any(|fd| !fd.revents().is_empty())
    }

    /// Waits until the importer's access that uses this row, if there is one, has ended; `false` if
    /// it has not by the deadline.
    fn wait_for_exit(&self, row: u32, deadline: Instant) -> bool {
        let (mut polls, mut backoff) = (0_u32, Backoff::default());
        let mut in_time = true;
        let needs_row = |tag| access_tag::uses_row(tag, row);
        let by_device = self.control.device_access_words();
        for word in std::iter::once(self.control.access_word()).chain(by_device) {
            revocation::wait_for_exit(word, needs_row, || {
                polls = polls.saturating_add(1);
                if polls >= LIVENESS_CHECK_AFTER {
                    if self.is_gone() {
                        return false;
                    }
                    in_time = Instant::now() < deadline;
                }
                if in_time {
                    backoff.snooze();
                }
                in_time
            });
        }
        in_time
    }
}

/// The process that created an object. One that was forked holds a copy of it, and must not act
/// on the connections and the shared memory behind it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Creator(rustix::process::Pid);

impl Creator {
    pub(super) fn this_process() -> Self {
        Self(rustix::process::getpid())
    }

    pub(super) fn is_this_process(self) -> bool {
        self.0 == rustix::process::getpid()
    }
}

/// Tells the sender of a ring that its packets are read from now on; `false` if they must not be:
/// it does not know. One that has exited need not know: it sends them in no other way.
pub(super) fn accept(socket: &OwnedFd) -> bool {
    let told = ControlMsg { kind: MSG_ACCEPTED, key: 0, word: 0 }.try_send(socket, &[]);
    matches!(told, Ok(()) | Err(Errno::PIPE | Errno::CONNRESET))
}

impl std::fmt::Debug for ExportTable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ExportTable({} importers)", self.importers.lock().len())
    }
}

impl ExportTable {
    /// An empty table. `files_for_key` looks up files; it is called by the thread that polls the
    /// link.
    ///
    /// # Errors
    /// If memory is exhausted, or the kernel cannot seal memory.
    pub fn new(files_for_key: Box<FileLookup>) -> Result<Arc<Self>> {
        let made = WordTable::new(TABLE_LEN);
        let (table, file) = made.map_err(|why| Error::os("create an export table", &why))?;
        let (generations, departed_totals) =
            (AtomicU64::new(1), [AtomicU64::new(0), AtomicU64::new(0)]);
        Ok(Arc::new(Self {
            table,
            file,
            owner: Creator::this_process(),
            generations,
            files_for_key,
            importers: Mutex::default(),
            departed_totals,
        }))
    }

    /// Opens a closed row with this content; `false` if there is no such row. The caller serializes
    /// `open` and `close` of one row.
    pub fn open(&self, row: usize, content: &RowContent) -> bool {
        if !self.owner.is_this_process() {
            return false;
        }
        let Some(state) = self.table.word(row * ROW_WORDS) else { return false };
        for (at, value) in content.iter().enumerate() {
            if let Some(word) = self.table.word(row * ROW_WORDS + 1 + at) {
                word.store(*value, Ordering::Relaxed);
            }
        }
        let number = self.generations.fetch_add(1, Ordering::Relaxed);
        state.store(number, Ordering::Release);
        true
    }

    /// Closes a row: no access that uses it can begin. Does not wait for those in progress.
    pub fn close(&self, row: usize) {
        let Some(state) = self.table.word(row * ROW_WORDS) else { return };
        if state.load(Ordering::Relaxed) == 0 || !self.owner.is_this_process() {
            return;
        }
        revocation::revoke(state, || fence(Ordering::SeqCst));
        // An importer that is not in the list yet receives the table later, and finds the row
        // closed.
        if !self.importers.lock().is_empty() {
            asymmetric_fence::heavy_global();
        }
    }

    /// Waits until no access that uses this closed row is in progress; `false` if one still is
    /// after `limit`, because its process is stopped or does not get to run.
    #[must_use = "memory that a peer may still access must not be reused"]
    pub fn wait_until_unused(&self, row: usize, limit: Duration) -> bool {
        if !self.owner.is_this_process() {
            return true;
        }
        let importers = self.importers.lock().clone();
        let deadline = Instant::now() + limit;
        importers.iter().all(|importer| importer.wait_for_exit(row as u32, deadline))
    }

    /// Operations and bytes that peers have executed directly in our memory.
    pub fn access_counts(&self) -> [u64; 2] {
        let importers = self.importers.lock();
        [0, 1].map(|which| {
            let now = importers
                .iter()
                .map(|importer| importer.control.access_counts()[which].load(Ordering::Relaxed));
            now.fold(self.departed_totals[which].load(Ordering::Relaxed), u64::wrapping_add)
        })
    }

    /// Number of peers that have the table.
    pub fn importers(&self) -> usize {
        self.importers.lock().len()
    }

    /// Gives a peer the table. `page` is the control page that the peer writes.
    pub(super) fn add_importer(
        self: &Arc<Self>,
        page: &OwnedFd,
        socket: &Arc<OwnedFd>,
    ) -> io::Result<ImporterSlot> {
        let importer = Arc::new(Importer {
            control: ControlPage::open(page)?,
            socket: socket.clone(),
            pidfd: handshake::peer_process(socket).map(|(_, pidfd)| pidfd),
        });
        // Before the peer may access anything.
        self.importers.lock().push(importer.clone());
        let key = if asymmetric_fence::is_ready_global() { OWNER_HAS_HEAVY_FENCE } else { 0 };
        let msg = ControlMsg { kind: MSG_TABLE, key, word: TABLE_LEN as u64 };
        if msg.send(socket, &[self.file.as_fd()]) {
            return Ok(ImporterSlot { export_table: self.clone(), importer });
        }
        // It goes on with packets: its connection stays.
        self.importers.lock().retain(|other| !Arc::ptr_eq(other, &importer));
        Err(io::ErrorKind::WouldBlock.into())
    }

    /// Removes importers that have disconnected.
    fn remove_gone(&self) {
        self.importers.lock().retain(|importer| {
            let gone = importer.is_gone();
            if gone {
                for (departed_totals, now) in
                    self.departed_totals.iter().zip(importer.control.access_counts())
                {
                    departed_totals.fetch_add(now.load(Ordering::Relaxed), Ordering::Relaxed);
                }
            }
            !gone
        });
    }
}

/// The registration of an importer, dropped with its connection.
pub(super) struct ImporterSlot {
    export_table: Arc<ExportTable>,
    importer: Arc<Importer>,
}

impl ImporterSlot {
    /// Handles the importer's messages and sends the files that it requests; `false` if it has
    /// disconnected.
    pub(super) fn poll_control(&self, socket: &OwnedFd) -> bool {
        handshake::read(socket, |msg, _| {
            if msg.kind == MSG_FILE_REQUEST {
                let files = (self.export_table.files_for_key)(msg.key);
                let fits = files.len() <= handshake::MAX_FILES;
                let files: Vec<_> = files.iter().filter(|_| fits).map(AsFd::as_fd).collect();
                // A reply that cannot be sent now is requested again.
                ControlMsg { kind: MSG_FILE_REPLY, ..msg }.send(socket, &files);
            }
        })
    }
}

impl Drop for ImporterSlot {
    /// An importer that is still connected stays in the list, because it may be accessing memory:
    /// shutting down the socket notifies it, and it is removed once it has disconnected.
    fn drop(&mut self) {
        if self.export_table.owner.is_this_process() {
            let _ = rustix::net::shutdown(&self.importer.socket, rustix::net::Shutdown::Write);
        }
        self.export_table.remove_gone();
    }
}

/// The reply to a file request.
#[derive(Debug)]
pub struct FileReply {
    /// The key of the request.
    pub key: u32,
    /// The `word` of the request.
    pub word: u64,
    /// The files; none if the owner has no memory to share.
    pub files: Vec<OwnedFd>,
}

/// A peer, for direct access to the memory that it exports.
pub struct ShmPeer {
    from: SocketAddr,
    pub(super) socket: OwnedFd,
    creator: Creator,
    control: ControlPage,
    /// The peer reads our ring.
    accepted: AtomicBool,
    table: OnceLock<ReadOnlyMapping>,
    /// The owner issues heavy fences before it checks for accesses, and they reach this process.
    fence_free: AtomicBool,
    gone: AtomicBool,
    /// Requests without a reply: nothing else is accepted as one, because replies are kept, with a
    /// descriptor each, until they are taken.
    unanswered: AtomicU32,
    /// `answers` is not empty.
    replies_ready: AtomicBool,
    answers: Mutex<Vec<FileReply>>,
    accesses: AtomicU64,
    bytes: AtomicU64,
    process: Option<PeerProcess>,
}

/// The process behind a peer.
struct PeerProcess {
    id: i32,
    /// Readable once it has exited.
    pidfd: OwnedFd,
    /// The kernel has refused access to its memory.
    refused: AtomicBool,
}

/// An access in progress; it ends when this is dropped.
#[must_use = "the access ends when the guard is dropped"]
pub struct AccessGuard<'a>(&'a ShmPeer, u64);

impl Drop for AccessGuard<'_> {
    #[inline]
    fn drop(&mut self) {
        let Self(peer, bytes) = self;
        // This thread is the only writer.
        let done = peer.bytes.load(Ordering::Relaxed).wrapping_add(*bytes);
        peer.bytes.store(done, Ordering::Relaxed);
        let [shared_accesses, shared_bytes] = peer.control.access_counts();
        shared_accesses.store(peer.accesses.load(Ordering::Relaxed), Ordering::Relaxed);
        shared_bytes.store(done, Ordering::Relaxed);
        revocation::leave(peer.control.access_word());
    }
}

impl std::fmt::Debug for ShmPeer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ShmPeer(has_table: {}, gone: {})", self.has_table(), self.is_gone())
    }
}

impl ShmPeer {
    /// The peer at the other end of `socket`, which sees this process as `from`. `page` is the
    /// control page that this process writes.
    pub(super) fn new(from: SocketAddr, socket: OwnedFd, page: &OwnedFd) -> io::Result<Arc<Self>> {
        let process = handshake::peer_process(&socket).map(|(id, pidfd)| PeerProcess {
            id,
            pidfd,
            refused: AtomicBool::new(false),
        });
        Ok(Arc::new(Self {
            from,
            process,
            socket,
            creator: Creator::this_process(),
            control: ControlPage::open(page)?,
            accepted: AtomicBool::new(false),
            table: OnceLock::new(),
            fence_free: AtomicBool::new(false),
            gone: AtomicBool::new(false),
            unanswered: AtomicU32::new(0),
            replies_ready: AtomicBool::new(false),
            answers: Mutex::default(),
            accesses: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
        }))
    }

    /// The address under which the peer sees this process.
    pub fn from(&self) -> SocketAddr {
        self.from
    }

    /// Whether the peer's table has been received.
    #[inline]
    pub fn has_table(&self) -> bool {
        self.table.get().is_some()
    }

    /// Whether the connection has ended. Mapped memory stays mapped, but must not be used any more.
    #[inline]
    pub fn is_gone(&self) -> bool {
        self.gone.load(Ordering::Relaxed)
    }

    /// Whether the peer has accepted the connection: it reads the packets that we send.
    pub(super) fn is_accepted(&self) -> bool {
        self.accepted.load(Ordering::Relaxed)
    }

    /// Closes the connection. In a forked child this does not end the parent's.
    pub(super) fn disconnect(&self) {
        self.gone.store(true, Ordering::Relaxed);
        if self.creator.is_this_process() {
            let _ = rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Both);
        }
    }

    /// Handles the peer's messages; `false` if it has disconnected.
    pub(super) fn poll_control(&self) -> bool {
        handshake::read(&self.socket, |msg, files| match (msg.kind, &files[..]) {
            (MSG_TABLE, [file]) if msg.word == TABLE_LEN as u64 => {
                if let Ok(table) = ReadOnlyMapping::open(file, TABLE_LEN) {
                    let light =
                        msg.key == OWNER_HAS_HEAVY_FENCE && asymmetric_fence::is_ready_global();
                    self.fence_free.store(light, Ordering::Relaxed);
                    let _ = self.table.set(table);
                }
            }
            (MSG_ACCEPTED, []) => self.accepted.store(true, Ordering::Relaxed),
            (MSG_FILE_REPLY, _) if self.take_unanswered() => {
                self.answers.lock().push(FileReply { key: msg.key, word: msg.word, files });
                self.replies_ready.store(true, Ordering::Release);
            }
            _ => {}
        })
    }

    /// Requests the file of a key; `false` if the request cannot be sent now. The reply carries
    /// `word`.
    pub fn request_file(&self, key: u32, word: u64) -> bool {
        self.unanswered.fetch_add(1, Ordering::Relaxed);
        let sent = ControlMsg { kind: MSG_FILE_REQUEST, key, word }.send(&self.socket, &[]);
        if !sent {
            self.take_unanswered();
        }
        sent
    }

    /// Whether a reply is expected; counts it.
    fn take_unanswered(&self) -> bool {
        let fewer = |count: u32| count.checked_sub(1);
        self.unanswered.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fewer).is_ok()
    }

    /// Whether replies are waiting.
    #[inline]
    pub fn has_replies(&self) -> bool {
        self.replies_ready.load(Ordering::Acquire)
    }

    /// Takes the replies received since the last call.
    pub fn take_replies(&self) -> Vec<FileReply> {
        self.replies_ready.store(false, Ordering::Relaxed);
        std::mem::take(&mut *self.answers.lock())
    }

    /// Whether the kernel lets this process copy from and to the peer's memory, as far as is known.
    pub fn is_process_accessible(&self) -> bool {
        self.process.as_ref().is_some_and(|process| !process.refused.load(Ordering::Relaxed))
    }

    /// Copies between `local` and the peer's memory at its address `remote`, during an access.
    ///
    /// # Errors
    /// Those of the kernel; some of the bytes may have been copied.
    pub fn copy_process_memory(
        &self,
        local: &SharedBytes<'_>,
        remote: u64,
        direction: CopyDirection,
    ) -> io::Result<()> {
        let Some(process) = &self.process else { return Err(Errno::SRCH.into()) };
        // Its number may be another process's soon after its end.
        let exited = poll(&mut [PollFd::new(&process.pidfd, PollFlags::IN)], Some(&NO_WAIT))?;
        if exited != 0 {
            return Err(Errno::SRCH.into());
        }
        let mut done = 0;
        while done < local.len() {
            let part = local.slice(done, local.len() - done).map_err(io::Error::other)?;
            let copied =
                copy_process_memory(process.id, &part, remote.wrapping_add(done), direction)
                    .inspect_err(|why| {
                        if why.raw_os_error() == Some(Errno::PERM.raw_os_error()) {
                            process.refused.store(true, Ordering::Relaxed);
                        }
                    })?;
            if copied == 0 {
                return Err(Errno::FAULT.into());
            }
            done += copied as u64;
        }
        Ok(())
    }

    /// The generation of a row; 0 if it is closed.
    #[inline]
    pub fn generation(&self, row: u32) -> u64 {
        match self.table.get() {
            Some(table) => table.word(row as usize * ROW_WORDS * 8, Ordering::Acquire),
            None => 0,
        }
    }

    /// The content of a row with its generation; `None` if it is closed.
    pub fn row(&self, row: u32) -> Option<(u64, RowContent)> {
        let table = self.table.get()?;
        let generation = self.generation(row);
        if generation == 0 {
            return None;
        }
        let at = row as usize * ROW_WORDS + 1;
        let content: RowContent =
            std::array::from_fn(|word| table.word((at + word) * 8, Ordering::Relaxed));
        fence(Ordering::Acquire);
        (self.generation(row) == generation).then_some((generation, content))
    }

    /// Begins an access of `bytes` bytes, if both rows still have these generations. One thread at
    /// a time.
    #[inline]
    pub fn begin_access(
        &self,
        rows: [u32; 2],
        generations: [u64; 2],
        bytes: u64,
    ) -> Option<AccessGuard<'_>> {
        let number = self.enter(self.control.access_word(), rows, generations)?;
        self.accesses.store(number, Ordering::Relaxed);
        Some(AccessGuard(self, bytes))
    }

    /// Begins accesses by a GPU, which end when the guard is dropped. `None` if a row has another
    /// generation, or too many are in progress. One thread at a time.
    pub fn begin_device_access(
        self: &Arc<Self>,
        rows: [u32; 2],
        generations: [u64; 2],
    ) -> Option<DeviceAccess> {
        let words = self.control.device_access_words();
        let at = words.iter().position(|word| word.load(Ordering::Relaxed) == 0)?;
        self.enter(words[at], rows, generations)?;
        Some(DeviceAccess::new(self.clone(), at, rows, generations))
    }

    /// Announces an access in this word; `None` if a row has another generation. Returns the number
    /// of the access.
    #[inline]
    fn enter(&self, word: &AtomicU64, rows: [u32; 2], generations: [u64; 2]) -> Option<u64> {
        let number = self.accesses.load(Ordering::Relaxed).wrapping_add(1);
        let table = self.table.get()?;
        let is_open = || {
            let words = rows.map(|row| table.word(row as usize * ROW_WORDS * 8, Ordering::SeqCst));
            words == generations && !generations.contains(&0)
        };
        let tag = access_tag::encode_tag(number, rows);
        let announce = |access_word: &AtomicU64| match self.fence_free.load(Ordering::Relaxed) {
            true => {
                access_word.store(tag, Ordering::Release);
                compiler_fence(Ordering::SeqCst);
            }
            // Together with the SeqCst loads that follow, a SeqCst store suffices against the
            // owner's fence, and costs half as much as a fence.
            false => access_word.store(tag, Ordering::SeqCst),
        };
        revocation::enter(word, announce, is_open).then_some(number)
    }
}

#[cfg(test)]
mod tests {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    use super::*;

    /// An importer whose owner sends these flags with the table; also returns the owner's end of
    /// the socket, to keep it open.
    fn peer(export_table: &Arc<ExportTable>, owner_flags: u32) -> (Arc<ShmPeer>, Arc<OwnedFd>) {
        let kind = SocketType::SEQPACKET;
        let (theirs, ours) =
            socketpair(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None).unwrap();
        let (_, page) = ControlPage::new().unwrap();
        let peer = ShmPeer::new(([127, 0, 0, 1], 1).into(), ours, &page).unwrap();
        let (control, socket) = (ControlPage::open(&page).unwrap(), Arc::new(theirs));
        let importer = Importer { control, socket: socket.clone(), pidfd: None };
        export_table.importers.lock().push(Arc::new(importer));
        let msg = ControlMsg { kind: MSG_TABLE, key: owner_flags, word: TABLE_LEN as u64 };
        assert!(msg.send(&socket, &[export_table.file.as_fd()]));
        assert!(peer.poll_control() && peer.has_table());
        (peer, socket)
    }

    /// Importers omit the fence exactly if the owner has announced heavy fences; whatever it sent,
    /// no access is in progress after a row was closed, and none begins.
    #[test]
    fn closing_a_row_ends_all_accesses() {
        for (owner_flags, announced) in
            [(0, false), (OWNER_HAS_HEAVY_FENCE, true), (7, false), (u32::MAX, false)]
        {
            // Another test may make it ready meanwhile.
            let was_ready = asymmetric_fence::is_ready_global();
            let export_table = ExportTable::new(Box::new(|_| Vec::new())).unwrap();
            let (peer, _socket) = peer(&export_table, owner_flags);
            let ready = [was_ready, asymmetric_fence::is_ready_global()];
            let light = peer.fence_free.load(Ordering::Relaxed);
            assert!(ready.map(|ready| announced && ready).contains(&light), "flags {owner_flags}");
            assert!(export_table.open(3, &[0; 7]) && export_table.open(9, &[0; 7]));
            let generations = [peer.generation(3), peer.generation(9)];
            let closed = AtomicBool::new(false);
            let accesses = std::thread::scope(|scope| {
                let accessor = scope.spawn(|| {
                    let mut accesses = 0_u64;
                    while let Some(_guard) = peer.begin_access([3, 9], generations, 8) {
                        assert!(
                            !closed.load(Ordering::SeqCst),
                            "an access after the row was closed"
                        );
                        accesses += 1;
                    }
                    accesses
                });
                while export_table.access_counts()[0] < 1000 {
                    std::thread::yield_now();
                }
                export_table.close(9);
                assert!(export_table.wait_until_unused(9, Duration::from_secs(20)));
                closed.store(true, Ordering::SeqCst);
                accessor.join().unwrap()
            });
            assert!(accesses >= 1000);
            assert!(peer.begin_access([3, 9], generations, 8).is_none(), "the row is closed");
        }
    }

    /// A peer that is stopped during an access delays neither closing nor, beyond the limit, a
    /// wait; other rows are not affected.
    #[test]
    fn a_wait_for_an_access_is_bounded() {
        let export_table = ExportTable::new(Box::new(|_| Vec::new())).unwrap();
        let (peer, _socket) = peer(&export_table, 0);
        for row in [3, 9, 10] {
            assert!(export_table.open(row, &[0; 7]));
        }
        let generations = [peer.generation(3), peer.generation(9)];
        let access = peer.begin_access([3, 9], generations, 8).unwrap();
        [3, 9, 10].iter().for_each(|row| export_table.close(*row));
        let limit = Duration::from_millis(20);
        let start = Instant::now();
        assert!(export_table.wait_until_unused(10, Duration::from_secs(20)));
        assert!(!export_table.wait_until_unused(9, limit));
        assert!(start.elapsed() >= limit);
        drop(access);
        assert!(export_table.wait_until_unused(9, Duration::ZERO));
        // A peer that leaves during an access is no longer waited for.
        assert!(export_table.open(9, &[0; 7]) && export_table.open(3, &[0; 7]));
        let generations = [peer.generation(3), peer.generation(9)];
        std::mem::forget(peer.begin_access([3, 9], generations, 8).unwrap());
        export_table.close(9);
        assert!(!export_table.wait_until_unused(9, Duration::ZERO));
        peer.disconnect();
        assert!(export_table.wait_until_unused(9, Duration::from_secs(20)));
    }

    /// Accesses of a GPU are waited for like others, each one of them; they are independent of the
    /// access of the thread.
    #[test]
    fn accesses_of_a_gpu_are_waited_for() {
        let export_table = ExportTable::new(Box::new(|_| Vec::new())).unwrap();
        let (peer, _socket) = peer(&export_table, 0);
        let rows = [3_u32, 9, 10];
        rows.iter().for_each(|row| assert!(export_table.open(*row as usize, &[0; 7])));
        let generations = |rows: [u32; 2]| rows.map(|row| peer.generation(row));
        let begin = |rows| peer.begin_device_access(rows, generations(rows));
        let (first, second) = (begin([3, 9]).unwrap(), begin([3, 10]).unwrap());
        let own = peer.begin_access([3, 10], generations([3, 10]), 8).unwrap();
        assert!(first.covers(&peer, [3, 9], generations([3, 9])));
        assert!(!first.covers(&peer, [3, 10], generations([3, 10])));
        first.count(100);
        assert_eq!(export_table.access_counts(), [2, 100]);
        let before = generations([3, 9]);
        export_table.close(9);
        assert!(!first.covers(&peer, [3, 9], before), "the row is closed");
        assert!(peer.begin_device_access([3, 9], before).is_none());
        assert!(!export_table.wait_until_unused(9, Duration::ZERO));
        drop(first);
        assert!(export_table.wait_until_unused(9, Duration::ZERO));
        export_table.close(10);
        drop(own);
        assert!(!export_table.wait_until_unused(10, Duration::ZERO));
        drop(second);
        assert!(export_table.wait_until_unused(10, Duration::ZERO));
        assert!(export_table.open(9, &[0; 7]));
        let all: Vec<_> = std::iter::from_fn(|| begin([3, 9])).collect();
        assert_eq!(all.len(), super::super::sys::DEVICE_ACCESSES);
    }

    /// Each reply holds a descriptor until it is taken: those that were not requested are dropped.
    #[test]
    fn files_that_were_not_requested_are_dropped() {
        let export_table = ExportTable::new(Box::new(|_| Vec::new())).unwrap();
        let (peer, socket) = peer(&export_table, 0);
        let reply = ControlMsg { kind: MSG_FILE_REPLY, key: 7, word: 1 };
        let receive = |count: usize| {
            for _ in 0..count {
                assert!(reply.send(&socket, &[export_table.file.as_fd()]));
                assert!(peer.poll_control());
            }
            assert_eq!(peer.has_replies(), !peer.answers.lock().is_empty());
            peer.take_replies().len()
        };
        assert_eq!(receive(100), 0);
        assert!(peer.request_file(7, 1) && peer.request_file(8, 1));
        assert_eq!(receive(100), 2);
        assert_eq!(receive(1), 0);
    }

    /// What a forked child drops changes neither the rows nor the connections of its parent.
    #[test]
    fn a_forked_child_does_not_act_for_its_parent() {
        let parent = Creator(rustix::process::Pid::INIT);
        let mut export_table = ExportTable::new(Box::new(|_| Vec::new())).unwrap();
        assert!(export_table.open(3, &[7; 7]));
        Arc::get_mut(&mut export_table).unwrap().owner = parent;
        let (mut peer, socket) = peer(&export_table, 0);
        export_table.close(3);
        assert!(!export_table.open(4, &[7; 7]));
        assert_eq!([3, 4].map(|row| peer.row(row).is_some()), [true, false]);
        assert!(export_table.wait_until_unused(3, Duration::ZERO));
        Arc::get_mut(&mut peer).unwrap().creator = parent;
        peer.disconnect();
        let importer = export_table.importers.lock()[0].clone();
        assert!(!importer.is_gone(), "the parent's connection has ended");
        drop(ImporterSlot { export_table: export_table.clone(), importer });
        assert!(ControlMsg { kind: MSG_ACCEPTED, key: 0, word: 0 }.send(&socket, &[]));
        assert!(peer.poll_control() && peer.is_accepted());
    }
}

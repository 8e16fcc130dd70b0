//! Memory that a peer of this machine reaches by itself: the owner's side ([`ExportTable`]) and the visitor's ([`ShmPeer`]).
//!
//! The owner has a table of rows, one per thing that it grants. Peers map the table and can only read it; what a row
//! says is for those above to agree upon. A row is open or shut, and each opening has a number of its own, so that what
//! a peer has once understood of a row holds as long as that number stands there. The files that rows
//! speak of travel over the connection's socket when a peer first asks for one; a table with thousands of rows costs nothing before that.
//!
//! A visit needs two rows (who comes, and what is touched). [`ShmPeer::begin_access`] says where it goes, and then looks whether both
//! are still open; [`ExportTable::close`] shuts a row, and then waits for those inside: see `sync/revocation.rs`. A peer that is
//! killed inside is not waited for: its socket and its process tell. One that is stopped inside is.
//!
//! # What a peer is trusted with
//! Peers are processes of the same user, or root's: the same that may attach a debugger. A peer has the file of each
//! memory that it asked for, and can touch all of that memory whenever it likes, whatever rows say; the rows are what
//! keeps a peer right that means well. Files of memory that it may only read are open for reading only.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, compiler_fence, fence};
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::access_tag;
use super::handshake::{self, ControlMsg};
use super::sys::{ControlPage, ReadOnlyMapping, WordTable};
use crate::error::{Error, Result};
use crate::sync::{Backoff, asymmetric_fence, revocation};

/// How many rows a table has.
pub const ROWS: usize = 1 << access_tag::ROW_BITS;
/// What a row says, beside whether it is open.
pub type RowContent = [u64; 7];

const ROW_WORDS: usize = 8;
const TABLE_LEN: usize = ROWS * ROW_WORDS * 8;
const NO_WAIT: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };

/// How often an owner looks for the end of a visit before it asks whether the visitor lives.
const LIVENESS_CHECK_AFTER: u32 = 96;

/// What letters are about: the file of a key is wanted; here is the table; here is the file, or there is none.
const MSG_FILE_REQUEST: u8 = 2;
const MSG_TABLE: u8 = 3;
const MSG_FILE_REPLY: u8 = 4;

/// Said with the table: before its owner looks who is inside, it raises a barrier in all processes, so that visitors need no
/// fence. One of a build that does not know this says nothing.
const OWNER_HAS_BARRIERS: u32 = 1;

/// Finds the file of a key; none if there is none to be given.
pub type FileLookup = dyn Fn(u32) -> Option<OwnedFd> + Send + Sync;

/// What this process offers its peers.
pub struct ExportTable {
    table: WordTable,
    file: OwnedFd,
    generations: AtomicU64,
    file_for_key: Box<FileLookup>,
    importers: Mutex<Vec<Arc<Importer>>>,
    /// What guests did that are gone: operations, and bytes.
    departed_totals: [AtomicU64; 2],
}

/// A peer that has the table.
struct Importer {
    control: ControlPage,
    socket: Arc<OwnedFd>,
    /// Tells of its end even if a child of its has the socket too.
    pidfd: Option<OwnedFd>,
}

impl Importer {
    /// Whether it can touch nothing any more: the process has ended, or has let go of the connection.
    fn is_gone(&self) -> bool {
        let mut fds = vec![PollFd::new(&self.socket, PollFlags::RDHUP)];
        fds.extend(self.pidfd.as_ref().map(|pidfd| PollFd::new(pidfd, PollFlags::IN)));
        let Ok(_) = poll(&mut fds, Some(&NO_WAIT)) else { return false };
        fds.iter().any(|fd| !fd.revents().is_empty())
    }

    fn wait_for_exit(&self, row: u32) {
        let (mut polls, mut backoff) = (0_u32, Backoff::default());
        let needs_row = |encode_tag| access_tag::uses_row(encode_tag, row);
        revocation::wait_for_exit(self.control.access_word(), needs_row, || {
            polls = polls.saturating_add(1);
            backoff.snooze();
            polls < LIVENESS_CHECK_AFTER || !self.is_gone()
        });
    }
}

impl std::fmt::Debug for ExportTable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Offer({} guests)", self.importers.lock().len())
    }
}

impl ExportTable {
    /// An empty table; files are found by `file_for_key`, which is called by whoever drives the link.
    ///
    /// # Errors
    /// If there is no memory for it, or the kernel cannot seal it.
    pub fn new(file_for_key: Box<FileLookup>) -> Result<Arc<Self>> {
        let made = WordTable::new(TABLE_LEN);
        let (table, file) =
            made.map_err(|why| Error::os("make a table of memory for peers", &why))?;
        let (generations, departed_totals) =
            (AtomicU64::new(1), [AtomicU64::new(0), AtomicU64::new(0)]);
        Ok(Arc::new(Self {
            table,
            file,
            generations,
            file_for_key,
            importers: Mutex::default(),
            departed_totals,
        }))
    }

    /// Opens a row that is shut, with that content; false if there is no such row. One row is opened and closed by one
    /// at a time.
    pub fn open(&self, row: usize, content: &RowContent) -> bool {
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

    /// Shuts a row. When this returns, nobody is inside any more that came by it, and nobody comes.
    pub fn close(&self, row: usize) {
        let Some(state) = self.table.word(row * ROW_WORDS) else { return };
        if state.load(Ordering::Relaxed) == 0 {
            return;
        }
        revocation::revoke(state, || fence(Ordering::SeqCst));
        // Who is not in the list yet gets the table later, and finds the row shut.
        let importers = self.importers.lock().clone();
        if !importers.is_empty() {
            asymmetric_fence::heavy_global();
        }
        for importer in importers {
            importer.wait_for_exit(row as u32);
        }
    }

    /// What peers did by themselves in our memory: operations, and bytes.
    pub fn access_counts(&self) -> [u64; 2] {
        let importers = self.importers.lock();
        [0, 1].map(|which| {
            let now = importers
                .iter()
                .map(|importer| importer.control.access_counts()[which].load(Ordering::Relaxed));
            now.fold(self.departed_totals[which].load(Ordering::Relaxed), u64::wrapping_add)
        })
    }

    /// How many peers have the table.
    pub fn importers(&self) -> usize {
        self.importers.lock().len()
    }

    /// Lets a peer have the table. `page` is the one that it writes.
    pub(super) fn add_importer(
        self: &Arc<Self>,
        page: &OwnedFd,
        socket: &Arc<OwnedFd>,
    ) -> io::Result<ImporterSlot> {
        let importer = Arc::new(Importer {
            control: ControlPage::open(page)?,
            socket: socket.clone(),
            pidfd: handshake::peer_pidfd(socket),
        });
        self.importers.lock().push(importer.clone());
        let importer_slot = ImporterSlot { export_table: self.clone(), importer };
        let key = if asymmetric_fence::is_ready_global() { OWNER_HAS_BARRIERS } else { 0 };
        let msg = ControlMsg { kind: MSG_TABLE, key, word: TABLE_LEN as u64 };
        if msg.send(socket, Some(self.file.as_fd())) {
            return Ok(importer_slot);
        }
        Err(io::ErrorKind::WouldBlock.into())
    }

    /// Forgets guests that are gone.
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

/// A guest's place: given up with the connection.
pub(super) struct ImporterSlot {
    export_table: Arc<ExportTable>,
    importer: Arc<Importer>,
}

impl ImporterSlot {
    /// Reads what the guest says, and gives it the files that it asks for; false if it is gone.
    pub(super) fn poll_control(&self, socket: &OwnedFd) -> bool {
        handshake::read(socket, |msg, _| {
            if msg.kind == MSG_FILE_REQUEST {
                let file = (self.export_table.file_for_key)(msg.key);
                // What does not go now is asked for again.
                ControlMsg { kind: MSG_FILE_REPLY, ..msg }
                    .send(socket, file.as_ref().map(AsFd::as_fd));
            }
        })
    }
}

impl Drop for ImporterSlot {
    /// A guest that still lives stays in the list, as it may be inside: it is told that we have done with it, and
    /// forgotten once it has let go.
    fn drop(&mut self) {
        let _ = rustix::net::shutdown(&self.importer.socket, rustix::net::Shutdown::Write);
        self.export_table.remove_gone();
    }
}

/// The file of a key that was asked for.
#[derive(Debug)]
pub struct FileReply {
    /// The key.
    pub key: u32,
    /// What was said with the question.
    pub word: u64,
    /// None if the owner has none to give.
    pub file: Option<OwnedFd>,
}

/// A peer, as far as it lets us reach its memory.
pub struct ShmPeer {
    from: SocketAddr,
    pub(super) socket: OwnedFd,
    control: ControlPage,
    table: OnceLock<ReadOnlyMapping>,
    /// The owner raises barriers before it looks who is inside, and they reach us.
    fence_free: AtomicBool,
    gone: AtomicBool,
    /// There are answers.
    replies_ready: AtomicBool,
    answers: Mutex<Vec<FileReply>>,
    access_counts: AtomicU64,
    bytes: AtomicU64,
}

/// A visit; it ends when this is dropped.
#[must_use = "the visit ends at once"]
pub struct AccessGuard<'a>(&'a ShmPeer, u64);

impl Drop for AccessGuard<'_> {
    #[inline]
    fn drop(&mut self) {
        let Self(peer, bytes) = self;
        revocation::leave(peer.control.access_word());
        // Nobody else writes these.
        let done = peer.bytes.load(Ordering::Relaxed).wrapping_add(*bytes);
        peer.bytes.store(done, Ordering::Relaxed);
        let [access_counts, told] = peer.control.access_counts();
        access_counts.store(peer.access_counts.load(Ordering::Relaxed), Ordering::Relaxed);
        told.store(done, Ordering::Relaxed);
    }
}

impl std::fmt::Debug for ShmPeer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Peer(offers: {}, gone: {})", self.has_table(), self.is_gone())
    }
}

impl ShmPeer {
    /// The other end of `socket`, which sees us as `from`. `page` is the one that we write.
    pub(super) fn new(from: SocketAddr, socket: OwnedFd, page: &OwnedFd) -> io::Result<Arc<Self>> {
        Ok(Arc::new(Self {
            from,
            socket,
            control: ControlPage::open(page)?,
            table: OnceLock::new(),
            fence_free: AtomicBool::new(false),
            gone: AtomicBool::new(false),
            replies_ready: AtomicBool::new(false),
            answers: Mutex::default(),
            access_counts: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
        }))
    }

    /// The address that it sees us under.
    pub fn from(&self) -> SocketAddr {
        self.from
    }

    /// Whether it offers anything, as far as we know.
    #[inline]
    pub fn has_table(&self) -> bool {
        self.table.get().is_some()
    }

    /// Whether the connection has ended. What was mapped stays mapped, and must not be used any more.
    #[inline]
    pub fn is_gone(&self) -> bool {
        self.gone.load(Ordering::Relaxed)
    }

    /// Ends the connection.
    pub(super) fn disconnect(&self) {
        self.gone.store(true, Ordering::Relaxed);
        let _ = rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Both);
    }

    /// Reads what it says; false if it is gone.
    pub(super) fn poll_control(&self) -> bool {
        handshake::read(&self.socket, |msg, file| match (msg.kind, file) {
            (MSG_TABLE, Some(file)) if msg.word == TABLE_LEN as u64 => {
                if let Ok(table) = ReadOnlyMapping::open(&file, TABLE_LEN) {
                    let light =
                        msg.key == OWNER_HAS_BARRIERS && asymmetric_fence::is_ready_global();
                    self.fence_free.store(light, Ordering::Relaxed);
                    let _ = self.table.set(table);
                }
            }
            (MSG_FILE_REPLY, file) => {
                self.answers.lock().push(FileReply { key: msg.key, word: msg.word, file });
                self.replies_ready.store(true, Ordering::Release);
            }
            _ => {}
        })
    }

    /// Asks for the file of a key; false if that cannot be said now. The answer comes back with `word`.
    pub fn ask(&self, key: u32, word: u64) -> bool {
        ControlMsg { kind: MSG_FILE_REQUEST, key, word }.send(&self.socket, None)
    }

    /// Whether there are answers.
    #[inline]
    pub fn has_replies(&self) -> bool {
        self.replies_ready.load(Ordering::Acquire)
    }

    /// The answers that came since this was last asked.
    pub fn answers(&self) -> Vec<FileReply> {
        self.replies_ready.store(false, Ordering::Relaxed);
        std::mem::take(&mut *self.answers.lock())
    }

    /// The number of the opening that a row has now; 0 if it is shut.
    #[inline]
    pub fn generation(&self, row: u32) -> u64 {
        match self.table.get() {
            Some(table) => table.word(row as usize * ROW_WORDS * 8, Ordering::Acquire),
            None => 0,
        }
    }

    /// What a row says, with the number of its opening, if it is open.
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

    /// Goes in to touch `bytes` bytes, if both rows have these openings still. By one thread at a time.
    #[inline]
    pub fn begin_access(
        &self,
        rows: [u32; 2],
        generations: [u64; 2],
        bytes: u64,
    ) -> Option<AccessGuard<'_>> {
        let number = self.access_counts.load(Ordering::Relaxed).wrapping_add(1);
        let table = self.table.get()?;
        let is_open = || {
            let words = rows.map(|row| table.word(row as usize * ROW_WORDS * 8, Ordering::SeqCst));
            words == generations && !generations.contains(&0)
        };
        let encode_tag = access_tag::encode_tag(number, rows);
        let announce = |access_word: &AtomicU64| match self.fence_free.load(Ordering::Relaxed) {
            true => {
                access_word.store(encode_tag, Ordering::Release);
                compiler_fence(Ordering::SeqCst);
            }
            // Between the owner's fence and loads of this ordering that follow, such a store is as good as a fence, and
            // costs half as much.
            false => access_word.store(encode_tag, Ordering::SeqCst),
        };
        if !revocation::enter(self.control.access_word(), announce, is_open) {
            return None;
        }
        self.access_counts.store(number, Ordering::Relaxed);
        Some(AccessGuard(self, bytes))
    }
}

#[cfg(test)]
mod tests {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    use super::*;

    /// A peer of an offer that says this with its table; the owner's end of the socket stays open with it.
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
        assert!(msg.send(&socket, Some(export_table.file.as_fd())));
        assert!(peer.poll_control() && peer.has_table());
        (peer, socket)
    }

    /// Visitors do without a fence exactly where the owner has promised barriers; whatever it said, a row that is taken back is
    /// empty and stays so.
    #[test]
    fn owners_of_every_build_get_their_memory_back() {
        let ready = asymmetric_fence::is_ready_global();
        for (owner_flags, light) in
            [(0, false), (OWNER_HAS_BARRIERS, ready), (7, false), (u32::MAX, false)]
        {
            let export_table = ExportTable::new(Box::new(|_| None)).unwrap();
            let (peer, _socket) = peer(&export_table, owner_flags);
            assert_eq!(peer.fence_free.load(Ordering::Relaxed), light, "said {owner_flags}");
            assert!(export_table.open(3, &[0; 7]) && export_table.open(9, &[0; 7]));
            let generations = [peer.generation(3), peer.generation(9)];
            let taken_back = AtomicBool::new(false);
            let access_counts = std::thread::scope(|scope| {
                let access_word = scope.spawn(|| {
                    let mut access_counts = 0_u64;
                    while let Some(_inside) = peer.begin_access([3, 9], generations, 8) {
                        assert!(!taken_back.load(Ordering::SeqCst), "inside what was taken back");
                        access_counts += 1;
                    }
                    access_counts
                });
                while export_table.access_counts()[0] < 1000 {
                    std::thread::yield_now();
                }
                export_table.close(9);
                taken_back.store(true, Ordering::SeqCst);
                access_word.join().unwrap()
            });
            assert!(access_counts >= 1000);
            assert!(peer.begin_access([3, 9], generations, 8).is_none(), "it is shut");
        }
    }
}

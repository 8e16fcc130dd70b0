//! Memory that a peer of this machine reaches by itself: the owner's side ([`Offer`]) and the visitor's ([`Peer`]).
//!
//! The owner has a table of rows, one per thing that it grants. Peers map the table and can only read it; what a row
//! says is for those above to agree upon. A row is open or shut, and each opening has a number of its own, so that what
//! a peer has once understood of a row holds as long as that number stands there. The files that rows
//! speak of travel over the connection's socket when a peer first asks for one; a table with thousands of rows costs nothing before that.
//!
//! A visit needs two rows (who comes, and what is touched). [`Peer::visit`] says where it goes, and then looks whether both
//! are still open; [`Offer::close`] shuts a row, and then waits for those inside: see `sync/door.rs`. A peer that is
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

use super::meet::{self, Letter};
use super::sys::{Control, Table, Theirs};
use super::visit;
use crate::error::{Error, Result};
use crate::sync::{Backoff, barrier, door};

/// How many rows a table has.
pub const ROWS: usize = 1 << visit::ROW_BITS;
/// What a row says, beside whether it is open.
pub type Content = [u64; 7];

const WORDS: usize = 8;
const TABLE: usize = ROWS * WORDS * 8;
const NOT_AT_ALL: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };

/// How often an owner looks for the end of a visit before it asks whether the visitor lives.
const LOOKS: u32 = 96;

/// What letters are about: the file of a key is wanted; here is the table; here is the file, or there is none.
const WANTED: u8 = 2;
const TABLE_IS: u8 = 3;
const FILE_IS: u8 = 4;

/// Said with the table: before its owner looks who is inside, it raises a barrier in all processes, so that visitors need no
/// fence. One of a build that does not know this says nothing.
const RAISES_BARRIERS: u32 = 1;

/// Finds the file of a key; none if there is none to be given.
pub type FileOf = dyn Fn(u32) -> Option<OwnedFd> + Send + Sync;

/// What this process offers its peers.
pub struct Offer {
    table: Table,
    file: OwnedFd,
    openings: AtomicU64,
    file_of: Box<FileOf>,
    guests: Mutex<Vec<Arc<Guest>>>,
    /// What guests did that are gone: operations, and bytes.
    past: [AtomicU64; 2],
}

/// A peer that has the table.
struct Guest {
    control: Control,
    socket: Arc<OwnedFd>,
    /// Tells of its end even if a child of its has the socket too.
    process: Option<OwnedFd>,
}

impl Guest {
    /// Whether it can touch nothing any more: the process has ended, or has let go of the connection.
    fn is_gone(&self) -> bool {
        let mut fds = vec![PollFd::new(&self.socket, PollFlags::RDHUP)];
        fds.extend(self.process.as_ref().map(|process| PollFd::new(process, PollFlags::IN)));
        let Ok(_) = poll(&mut fds, Some(&NOT_AT_ALL)) else { return false };
        fds.iter().any(|fd| !fd.revents().is_empty())
    }

    fn wait_out(&self, row: u32) {
        let (mut looks, mut backoff) = (0_u32, Backoff::default());
        let needs_row = |name| visit::needs(name, row);
        door::wait_out(self.control.visitor(), needs_row, || {
            looks = looks.saturating_add(1);
            backoff.snooze();
            looks < LOOKS || !self.is_gone()
        });
    }
}

impl std::fmt::Debug for Offer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Offer({} guests)", self.guests.lock().len())
    }
}

impl Offer {
    /// An empty table; files are found by `file_of`, which is called by whoever drives the link.
    ///
    /// # Errors
    /// If there is no memory for it, or the kernel cannot seal it.
    pub fn new(file_of: Box<FileOf>) -> Result<Arc<Self>> {
        let made = Table::new(TABLE);
        let (table, file) =
            made.map_err(|why| Error::os("make a table of memory for peers", &why))?;
        let (openings, past) = (AtomicU64::new(1), [AtomicU64::new(0), AtomicU64::new(0)]);
        Ok(Arc::new(Self { table, file, openings, file_of, guests: Mutex::default(), past }))
    }

    /// Opens a row that is shut, with that content; false if there is no such row. One row is opened and closed by one
    /// at a time.
    pub fn open(&self, row: usize, content: &Content) -> bool {
        let Some(state) = self.table.word(row * WORDS) else { return false };
        for (at, value) in content.iter().enumerate() {
            if let Some(word) = self.table.word(row * WORDS + 1 + at) {
                word.store(*value, Ordering::Relaxed);
            }
        }
        let number = self.openings.fetch_add(1, Ordering::Relaxed);
        state.store(number, Ordering::Release);
        true
    }

    /// Shuts a row. When this returns, nobody is inside any more that came by it, and nobody comes.
    pub fn close(&self, row: usize) {
        let Some(state) = self.table.word(row * WORDS) else { return };
        if state.load(Ordering::Relaxed) == 0 {
            return;
        }
        door::shut(state, || fence(Ordering::SeqCst));
        // Who is not in the list yet gets the table later, and finds the row shut.
        let guests = self.guests.lock().clone();
        if !guests.is_empty() {
            barrier::heavy_everywhere();
        }
        for guest in guests {
            guest.wait_out(row as u32);
        }
    }

    /// What peers did by themselves in our memory: operations, and bytes.
    pub fn visits(&self) -> [u64; 2] {
        let guests = self.guests.lock();
        [0, 1].map(|which| {
            let now =
                guests.iter().map(|guest| guest.control.visits()[which].load(Ordering::Relaxed));
            now.fold(self.past[which].load(Ordering::Relaxed), u64::wrapping_add)
        })
    }

    /// How many peers have the table.
    pub fn guests(&self) -> usize {
        self.guests.lock().len()
    }

    /// Lets a peer have the table. `page` is the one that it writes.
    pub(super) fn admit(
        self: &Arc<Self>,
        page: &OwnedFd,
        socket: &Arc<OwnedFd>,
    ) -> io::Result<Seat> {
        let guest = Arc::new(Guest {
            control: Control::open(page)?,
            socket: socket.clone(),
            process: meet::process_of(socket),
        });
        self.guests.lock().push(guest.clone());
        let seat = Seat { offer: self.clone(), guest };
        let key = if barrier::is_ready_everywhere() { RAISES_BARRIERS } else { 0 };
        let letter = Letter { about: TABLE_IS, key, word: TABLE as u64 };
        if letter.post(socket, Some(self.file.as_fd())) {
            return Ok(seat);
        }
        Err(io::ErrorKind::WouldBlock.into())
    }

    /// Forgets guests that are gone.
    fn sweep(&self) {
        self.guests.lock().retain(|guest| {
            let gone = guest.is_gone();
            if gone {
                for (past, now) in self.past.iter().zip(guest.control.visits()) {
                    past.fetch_add(now.load(Ordering::Relaxed), Ordering::Relaxed);
                }
            }
            !gone
        });
    }
}

/// A guest's place: given up with the connection.
pub(super) struct Seat {
    offer: Arc<Offer>,
    guest: Arc<Guest>,
}

impl Seat {
    /// Reads what the guest says, and gives it the files that it asks for; false if it is gone.
    pub(super) fn attend(&self, socket: &OwnedFd) -> bool {
        meet::read(socket, |letter, _| {
            if letter.about == WANTED {
                let file = (self.offer.file_of)(letter.key);
                // What does not go now is asked for again.
                Letter { about: FILE_IS, ..letter }.post(socket, file.as_ref().map(AsFd::as_fd));
            }
        })
    }
}

impl Drop for Seat {
    /// A guest that still lives stays in the list, as it may be inside: it is told that we have done with it, and
    /// forgotten once it has let go.
    fn drop(&mut self) {
        let _ = rustix::net::shutdown(&self.guest.socket, rustix::net::Shutdown::Write);
        self.offer.sweep();
    }
}

/// The file of a key that was asked for.
#[derive(Debug)]
pub struct Answer {
    /// The key.
    pub key: u32,
    /// What was said with the question.
    pub word: u64,
    /// None if the owner has none to give.
    pub file: Option<OwnedFd>,
}

/// A peer, as far as it lets us reach its memory.
pub struct Peer {
    from: SocketAddr,
    pub(super) socket: OwnedFd,
    control: Control,
    table: OnceLock<Theirs>,
    /// The owner raises barriers before it looks who is inside, and they reach us.
    needs_no_fence: AtomicBool,
    gone: AtomicBool,
    /// There are answers.
    news: AtomicBool,
    answers: Mutex<Vec<Answer>>,
    visits: AtomicU64,
    bytes: AtomicU64,
}

/// A visit; it ends when this is dropped.
#[must_use = "the visit ends at once"]
pub struct Visit<'a>(&'a Peer, u64);

impl Drop for Visit<'_> {
    #[inline]
    fn drop(&mut self) {
        let Self(peer, bytes) = self;
        door::leave(peer.control.visitor());
        // Nobody else writes these.
        let done = peer.bytes.load(Ordering::Relaxed).wrapping_add(*bytes);
        peer.bytes.store(done, Ordering::Relaxed);
        let [visits, told] = peer.control.visits();
        visits.store(peer.visits.load(Ordering::Relaxed), Ordering::Relaxed);
        told.store(done, Ordering::Relaxed);
    }
}

impl std::fmt::Debug for Peer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Peer(offers: {}, gone: {})", self.offers(), self.is_gone())
    }
}

impl Peer {
    /// The other end of `socket`, which sees us as `from`. `page` is the one that we write.
    pub(super) fn new(from: SocketAddr, socket: OwnedFd, page: &OwnedFd) -> io::Result<Arc<Self>> {
        Ok(Arc::new(Self {
            from,
            socket,
            control: Control::open(page)?,
            table: OnceLock::new(),
            needs_no_fence: AtomicBool::new(false),
            gone: AtomicBool::new(false),
            news: AtomicBool::new(false),
            answers: Mutex::default(),
            visits: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
        }))
    }

    /// The address that it sees us under.
    pub fn from(&self) -> SocketAddr {
        self.from
    }

    /// Whether it offers anything, as far as we know.
    #[inline]
    pub fn offers(&self) -> bool {
        self.table.get().is_some()
    }

    /// Whether the connection has ended. What was mapped stays mapped, and must not be used any more.
    #[inline]
    pub fn is_gone(&self) -> bool {
        self.gone.load(Ordering::Relaxed)
    }

    /// Ends the connection.
    pub(super) fn part(&self) {
        self.gone.store(true, Ordering::Relaxed);
        let _ = rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Both);
    }

    /// Reads what it says; false if it is gone.
    pub(super) fn attend(&self) -> bool {
        meet::read(&self.socket, |letter, file| match (letter.about, file) {
            (TABLE_IS, Some(file)) if letter.word == TABLE as u64 => {
                if let Ok(table) = Theirs::open(&file, TABLE) {
                    let light = letter.key == RAISES_BARRIERS && barrier::is_ready_everywhere();
                    self.needs_no_fence.store(light, Ordering::Relaxed);
                    let _ = self.table.set(table);
                }
            }
            (FILE_IS, file) => {
                self.answers.lock().push(Answer { key: letter.key, word: letter.word, file });
                self.news.store(true, Ordering::Release);
            }
            _ => {}
        })
    }

    /// Asks for the file of a key; false if that cannot be said now. The answer comes back with `word`.
    pub fn ask(&self, key: u32, word: u64) -> bool {
        Letter { about: WANTED, key, word }.post(&self.socket, None)
    }

    /// Whether there are answers.
    #[inline]
    pub fn has_news(&self) -> bool {
        self.news.load(Ordering::Acquire)
    }

    /// The answers that came since this was last asked.
    pub fn answers(&self) -> Vec<Answer> {
        self.news.store(false, Ordering::Relaxed);
        std::mem::take(&mut *self.answers.lock())
    }

    /// The number of the opening that a row has now; 0 if it is shut.
    #[inline]
    pub fn opening(&self, row: u32) -> u64 {
        match self.table.get() {
            Some(table) => table.word(row as usize * WORDS * 8, Ordering::Acquire),
            None => 0,
        }
    }

    /// What a row says, with the number of its opening, if it is open.
    pub fn row(&self, row: u32) -> Option<(u64, Content)> {
        let table = self.table.get()?;
        let opening = self.opening(row);
        if opening == 0 {
            return None;
        }
        let at = row as usize * WORDS + 1;
        let content: Content =
            std::array::from_fn(|word| table.word((at + word) * 8, Ordering::Relaxed));
        fence(Ordering::Acquire);
        (self.opening(row) == opening).then_some((opening, content))
    }

    /// Goes in to touch `bytes` bytes, if both rows have these openings still. By one thread at a time.
    #[inline]
    pub fn visit(&self, rows: [u32; 2], openings: [u64; 2], bytes: u64) -> Option<Visit<'_>> {
        let number = self.visits.load(Ordering::Relaxed).wrapping_add(1);
        let table = self.table.get()?;
        let is_open = || {
            let words = rows.map(|row| table.word(row as usize * WORDS * 8, Ordering::SeqCst));
            words == openings && !openings.contains(&0)
        };
        let name = visit::name(number, rows);
        let announce = |visitor: &AtomicU64| match self.needs_no_fence.load(Ordering::Relaxed) {
            true => {
                visitor.store(name, Ordering::Release);
                compiler_fence(Ordering::SeqCst);
            }
            // Between the owner's fence and loads of this ordering that follow, such a store is as good as a fence, and
            // costs half as much.
            false => visitor.store(name, Ordering::SeqCst),
        };
        if !door::enter(self.control.visitor(), announce, is_open) {
            return None;
        }
        self.visits.store(number, Ordering::Relaxed);
        Some(Visit(self, bytes))
    }
}

#[cfg(test)]
mod tests {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    use super::*;

    /// A peer of an offer that says this with its table; the owner's end of the socket stays open with it.
    fn peer(offer: &Arc<Offer>, said: u32) -> (Arc<Peer>, Arc<OwnedFd>) {
        let kind = SocketType::SEQPACKET;
        let (theirs, ours) =
            socketpair(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None).unwrap();
        let (_, page) = Control::new().unwrap();
        let peer = Peer::new(([127, 0, 0, 1], 1).into(), ours, &page).unwrap();
        let (control, socket) = (Control::open(&page).unwrap(), Arc::new(theirs));
        let guest = Guest { control, socket: socket.clone(), process: None };
        offer.guests.lock().push(Arc::new(guest));
        let letter = Letter { about: TABLE_IS, key: said, word: TABLE as u64 };
        assert!(letter.post(&socket, Some(offer.file.as_fd())));
        assert!(peer.attend() && peer.offers());
        (peer, socket)
    }

    /// Visitors do without a fence exactly where the owner has promised barriers; whatever it said, a row that is taken back is
    /// empty and stays so.
    #[test]
    fn owners_of_every_build_get_their_memory_back() {
        let ready = barrier::is_ready_everywhere();
        for (said, light) in [(0, false), (RAISES_BARRIERS, ready), (7, false), (u32::MAX, false)] {
            let offer = Offer::new(Box::new(|_| None)).unwrap();
            let (peer, _socket) = peer(&offer, said);
            assert_eq!(peer.needs_no_fence.load(Ordering::Relaxed), light, "said {said}");
            assert!(offer.open(3, &[0; 7]) && offer.open(9, &[0; 7]));
            let openings = [peer.opening(3), peer.opening(9)];
            let taken_back = AtomicBool::new(false);
            let visits = std::thread::scope(|scope| {
                let visitor = scope.spawn(|| {
                    let mut visits = 0_u64;
                    while let Some(_inside) = peer.visit([3, 9], openings, 8) {
                        assert!(!taken_back.load(Ordering::SeqCst), "inside what was taken back");
                        visits += 1;
                    }
                    visits
                });
                while offer.visits()[0] < 1000 {
                    std::thread::yield_now();
                }
                offer.close(9);
                taken_back.store(true, Ordering::SeqCst);
                visitor.join().unwrap()
            });
            assert!(visits >= 1000);
            assert!(peer.visit([3, 9], openings, 8).is_none(), "it is shut");
        }
    }
}

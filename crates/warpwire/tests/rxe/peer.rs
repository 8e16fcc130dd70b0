//! The program in the guest that executes verbs, one per line: `tools/rxe/verbs-peer.c`, or
//! `tests/ibv/peer.rs`, which does the same through `warpwire::ibv`.

use warpwire::verbs::{Remote, Status};

use crate::rxe::lab::{Bench, Shell, gid, test_timeout};
use crate::rxe::testbed::ConnParams;

/// Access flags of `ibv_reg_mr`.
pub const ALL_ACCESS: u32 = 15;
pub const LOCAL_AND_REMOTE_READ: u32 = 5;
pub const WINDOWS: u32 = 16;

/// Flags of `ibv_post_send`.
pub const FENCE: u32 = 1;
pub const SOLICITED: u32 = 4;
pub const INLINE: u32 = 8;

/// `IBV_QPS_ERR`.
pub const ERROR_STATE: u64 = 6;

pub struct Peer {
    shell: Shell,
}

/// Registered memory in the guest.
#[derive(Clone, Copy, Debug)]
pub struct RemoteMemory {
    pub number: u64,
    pub address: u64,
    pub rkey: u32,
}

impl RemoteMemory {
    pub fn remote(&self, offset: u64) -> Remote {
        Remote { address: self.address + offset, rkey: self.rkey }
    }
}

/// A completion polled in the guest.
#[derive(Clone, Copy, Debug)]
pub struct PeerCompletion {
    pub id: u64,
    pub status: u64,
    pub len: u64,
    /// The immediate as a number, or the invalidated key.
    pub imm: u64,
}

/// A work request for the guest to post.
#[derive(Clone, Copy, Debug)]
pub struct PeerPost<'a> {
    pub qp: usize,
    pub id: u64,
    pub op: &'a str,
    pub offset: u64,
    pub len: u32,
    pub remote: Remote,
    /// The immediate, the key to invalidate, the addend, or the value to compare with.
    pub first: u64,
    /// The value to swap in.
    pub second: u64,
    pub flags: u32,
}

impl<'a> PeerPost<'a> {
    pub fn new(id: u64, op: &'a str) -> Self {
        let remote = Remote { address: 0, rkey: 0 };
        Self { qp: 0, id, op, offset: 0, len: 0, remote, first: 0, second: 0, flags: 0 }
    }

    pub fn from(self, offset: u64, len: u32) -> Self {
        Self { offset, len, ..self }
    }

    pub fn at(self, remote: Remote) -> Self {
        Self { remote, ..self }
    }
}

impl Peer {
    pub fn start(bench: &Bench) -> Self {
        let mut shell = bench.shell();
        shell.write_line(&format!("exec {} 2>&1", bench.peer));
        let mut peer = Self { shell };
        assert_eq!(peer.read_line(), "ok ready");
        peer.ok(&format!("gid {}", gid(bench.theirs())));
        peer
    }

    fn read_line(&mut self) -> String {
        self.shell.read_line().expect("the peer closed the connection")
    }

    pub fn request(&mut self, line: &str) -> String {
        self.shell.write_line(line);
        self.read_line()
    }

    /// Sends a command that must succeed; returns the numbers of the reply.
    pub fn ok(&mut self, line: &str) -> Vec<u64> {
        let reply = self.request(line);
        let Some(rest) = reply.strip_prefix("ok") else { panic!("{line}: {reply}") };
        rest.split_whitespace().map(|word| word.parse().unwrap()).collect()
    }

    pub fn memory(&mut self, len: u64, access: u32) -> RemoteMemory {
        let words = self.ok(&format!("memory {len} {access}"));
        RemoteMemory { number: words[0], address: words[1], rkey: words[3] as u32 }
    }

    /// Creates a queue pair; returns its QPN.
    pub fn qp(&mut self, shared: bool) -> u32 {
        self.ok(if shared { "qp srq" } else { "qp own" })[1] as u32
    }

    pub fn connect(
        &mut self,
        qp: usize,
        to: (u32, std::net::IpAddr),
        psn: [u32; 2],
        params: &ConnParams,
    ) {
        let ConnParams { mtu, timeout, retry, rnr_retry, min_rnr, reads, .. } = params;
        let ((qpn, address), [ours, theirs]) = (to, psn);
        let address = gid(address);
        self.ok(&format!(
            "connect {qp} {qpn} {address} {mtu} {theirs} {ours} {timeout} {retry} {rnr_retry} \
             {min_rnr} {reads}"
        ));
    }

    pub fn fill(&mut self, far: &RemoteMemory, offset: u64, len: usize, seed: u64) {
        self.ok(&format!("fill {} {offset} {len} {seed}", far.number));
    }

    pub fn check(&mut self, far: &RemoteMemory, offset: u64, len: usize, seed: u64) {
        self.ok(&format!("check {} {offset} {len} {seed}", far.number));
    }

    pub fn put(&mut self, far: &RemoteMemory, offset: u64, word: u64) {
        self.ok(&format!("put {} {offset} {word}", far.number));
    }

    pub fn get(&mut self, far: &RemoteMemory, offset: u64) -> u64 {
        self.ok(&format!("get {} {offset}", far.number))[0]
    }

    pub fn receive(&mut self, qp: usize, id: u64, far: &RemoteMemory, offset: u64, len: u32) {
        self.ok(&format!("receive {qp} {id} {} {offset} {len}", far.number));
    }

    pub fn receive_shared(&mut self, id: u64, far: &RemoteMemory, offset: u64, len: u32) {
        self.ok(&format!("receive srq {id} {} {offset} {len}", far.number));
    }

    pub fn post(&mut self, far: &RemoteMemory, post: PeerPost<'_>) {
        let PeerPost { qp, id, op, offset, len, remote, first, second, flags } = post;
        let Remote { address, rkey } = remote;
        let memory = far.number;
        self.ok(&format!(
            "post {qp} {id} {op} {memory} {offset} {len} {address} {rkey} {first} {second} {flags}"
        ));
    }

    /// Waits for the next completion.
    pub fn next(&mut self) -> PeerCompletion {
        let words = self.ok(&format!("poll {}", test_timeout().as_millis()));
        PeerCompletion { id: words[0], status: words[1], len: words[3], imm: words[4] }
    }

    /// The next completion, which must be `id` with success.
    pub fn done(&mut self, id: u64) -> PeerCompletion {
        let completion = self.next();
        assert_eq!((completion.id, completion.status), (id, 0), "{completion:?}");
        completion
    }

    /// The next completion, which must be `id` with `status`.
    pub fn failed(&mut self, id: u64, status: Status) {
        let completion = self.next();
        assert_eq!((completion.id, completion.status), (id, status as u64), "{completion:?}");
    }

    pub fn expect_no_completion(&mut self) {
        assert_eq!(self.request("poll 50"), "none");
    }

    pub fn state(&mut self, qp: usize) -> u64 {
        self.ok(&format!("state {qp}"))[0]
    }
}

//! perftest's programs in the guest, against our device: we say over TCP what they say to each other.
//!
//! At each point one end writes first (the client) and the other answers. They tell each other a version, two sizes,
//! the MTU, then a line of 108 bytes for each queue pair, once to connect and again to be in step; at the end the
//! bandwidth tests compare their figures.

use std::io::{Read, Write};
use std::net::{IpAddr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::time::Instant;

use warpwire::link::udp;
use warpwire::verbs::{Atomic, Mtu, Qp, QpEndpoint, ReceiveRequest, Remote, SendRequest, WrOp};

use crate::rxe::lab::{Bench, Family, Running, gid, test_timeout};
use crate::rxe::testbed::{ConnParams, LocalSide};
use testkit::cases;

cases!(Bench; CASES:
    we_write_to_ib_write_bw,
    ib_write_bw_writes_to_us,
    we_read_from_ib_read_bw,
    ib_read_bw_reads_from_us,
    we_send_to_ib_send_bw,
    ib_send_bw_sends_to_us,
    our_ping_to_ib_send_lat,
    ib_send_lat_pings_us,
    we_add_to_ib_atomic_bw,
    ib_atomic_bw_adds_to_us,
    ib_atomic_bw_swaps_at_ours,
);

const PORT: u16 = 18515;
const VERSION: &[u8; 16] = b"6.06\0\0\0\0\0\0\0\0\0\0\0\0";
const LINE: usize = 108;
/// What both ends do, on each queue pair.
const COUNT: u64 = 200;
const SIZE: u32 = 5000;
/// Messages that are under way.
const DEPTH: u64 = 64;
/// Each queue pair has so much memory.
const STRIDE: u64 = 1 << 16;

/// A conversation with a program of perftest.
struct PerftestSocket {
    stream: TcpStream,
    is_client: bool,
}

/// What a line says of a queue pair.
struct ConnLine {
    reads: u8,
    qpn: u32,
    psn: u32,
    remote: Remote,
    address: IpAddr,
}

impl PerftestSocket {
    fn connect(bench: &Bench) -> Self {
        // Over IPv4 always, whatever the queue pairs use.
        let four = bench.lab.bench(Family::V4, String::new()).theirs();
        let start = Instant::now();
        let stream = loop {
            match TcpStream::connect((four, PORT)) {
                Ok(stream) => break stream,
                Err(why) if start.elapsed() > test_timeout() => panic!("{why}"),
                Err(_) => std::thread::sleep(std::time::Duration::from_millis(20)),
            }
        };
        Self::over(stream, true)
    }

    fn over(stream: TcpStream, is_client: bool) -> Self {
        stream.set_read_timeout(Some(test_timeout())).unwrap();
        stream.set_nodelay(true).unwrap();
        Self { stream, is_client }
    }

    /// Tells and hears as many bytes, the client first.
    fn swap(&mut self, mine: &[u8]) -> Vec<u8> {
        let mut theirs = vec![0; mine.len()];
        if self.is_client {
            self.stream.write_all(mine).unwrap();
        }
        self.stream.read_exact(&mut theirs).expect("perftest says the next thing");
        if !self.is_client {
            self.stream.write_all(mine).unwrap();
        }
        theirs
    }

    /// Everything before the queue pairs; returns the peer's MTU.
    fn begin(&mut self, mtu: u32) -> u32 {
        let version = self.swap(VERSION);
        assert!(version.starts_with(b"6.") || version.starts_with(b"5."), "{version:?}");
        // The memory over which messages wander, and the length of a cache line.
        self.swap(&4096_u32.to_be_bytes());
        self.swap(&64_u32.to_be_bytes());
        let code = (mtu / 256).trailing_zeros() as u8 + 1;
        let theirs = self.swap(&[b'0' + code, 0])[0] - b'0';
        128 << theirs
    }

    fn line(&mut self, mine: &ConnLine) -> ConnLine {
        let Remote { address, rkey } = mine.remote;
        let bytes = gid(mine.address);
        let bytes: Vec<&str> = (0..16).map(|at| &bytes[2 * at..2 * at + 2]).collect();
        let text = format!(
            "0000:{:04x}:{:06x}:{:06x}:{rkey:08x}:{address:016x}:{}:00000000:\0",
            mine.reads,
            mine.qpn,
            mine.psn,
            bytes.join(":")
        );
        assert_eq!(text.len(), LINE);
        ConnLine::read(&String::from_utf8_lossy(&self.swap(text.as_bytes())))
    }

    /// In step: both ends are here.
    fn sync(&mut self, mine: &[ConnLine]) {
        self.line(&mine[0]);
    }

    /// The figures of a bandwidth test: size, iterations, and three that are of no interest here.
    fn exchange_results(&mut self, count: u64) -> u64 {
        self.swap(&u64::from(SIZE).to_be_bytes());
        let theirs = self.swap(&count.to_be_bytes());
        for _ in 0..3 {
            self.swap(&1.0_f64.to_be_bytes());
        }
        u64::from_be_bytes(theirs.try_into().unwrap())
    }

    fn end(mut self, mine: &[ConnLine]) {
        self.sync(mine);
        self.stream.write_all(b"done\0").unwrap();
    }
}

impl ConnLine {
    fn read(text: &str) -> Self {
        let parts: Vec<&str> = text.split(':').collect();
        let number = |at: usize| u64::from_str_radix(parts[at], 16).unwrap();
        let octets: Vec<u8> = (6..22).map(|at| number(at) as u8).collect();
        let octets: [u8; 16] = octets.try_into().unwrap();
        Self {
            reads: number(1).min(16) as u8,
            qpn: number(2) as u32,
            psn: number(3) as u32,
            remote: Remote { address: number(5), rkey: number(4) as u32 },
            address: Ipv6Addr::from(octets).to_canonical(),
        }
    }
}

/// Our end of a test.
struct PerftestPeer {
    ours: LocalSide,
    qps: Vec<Qp>,
    socket: PerftestSocket,
    mine: Vec<ConnLine>,
    theirs: Vec<ConnLine>,
    guest: Running,
}

impl PerftestPeer {
    /// Starts the program in the guest, as client or server, and connects to it.
    fn new(bench: &Bench, program: &str, we_are_client: bool, qps: usize) -> Self {
        // A guest that is emulated on a busy machine was seen to stand still for half a second, four times in a row.
        let memory = 2 * STRIDE * qps as u64;
        let params = ConnParams { mtu: 4096, memory, timeout: 17, ..ConnParams::default() };
        let ours = LocalSide::open(bench, &params);
        let index = bench.gid_index();
        let common = format!("-d rxe0 -x {index} -n {COUNT} -F -m 2048");
        let common = if qps > 1 { format!("{common} -q {qps}") } else { common };
        let (mut socket, guest) = if we_are_client {
            let guest = bench.start(&format!("timeout 60 {program} {common}"));
            (PerftestSocket::connect(bench), guest)
        } else {
            let four = bench.lab.bench(Family::V4, String::new()).ours();
            let listener = TcpListener::bind((four, PORT)).unwrap();
            let guest = bench.start(&format!("timeout 60 {program} {common} {four}"));
            (PerftestSocket::over(listener.accept().unwrap().0, false), guest)
        };
        let mtu = socket.begin(4096).min(4096);
        let qps: Vec<Qp> = (0..qps).map(|_| ours.create_qp(&params, None)).collect();
        let line = |(n, qp): (usize, &Qp)| {
            let QpEndpoint { qpn, psn, .. } = qp.endpoint();
            let remote = ours.near.mr.remote((2 * n as u64 + 1) * STRIDE);
            ConnLine { reads: 16, qpn, psn, remote, address: ours.address }
        };
        let mine: Vec<ConnLine> = qps.iter().enumerate().map(line).collect();
        let theirs: Vec<ConnLine> = mine.iter().map(|line| socket.line(line)).collect();
        for (qp, line) in qps.iter().zip(&theirs) {
            let ConnLine { reads, qpn, psn, address, .. } = *line;
            let address = SocketAddr::new(address, udp::ADDRESS.port());
            qp.connect(&QpEndpoint {
                address,
                qpn,
                psn,
                mtu,
                max_rd_atomic: reads,
                lid: 0,
                gid: 0,
            })
            .unwrap();
        }
        assert_eq!(Mtu::new(mtu), Mtu::new(2048), "what we asked the guest for");
        Self { ours, qps, socket, mine, theirs, guest }
    }

    /// All lines again, and one more: before for messages, after for the rest.
    fn synced(&mut self, is_send: bool) {
        if is_send {
            self.socket.sync(&self.mine);
        }
        for line in &self.mine {
            self.socket.line(line);
        }
        if !is_send {
            self.socket.sync(&self.mine);
        }
    }

    /// Posts all work on all queue pairs, some at a time, and waits for its end.
    fn pump(&self, op: impl Fn(&ConnLine) -> WrOp, len: u32) {
        let total = COUNT * self.qps.len() as u64;
        let (mut posted, mut ended) = (0, 0);
        while ended < total {
            while posted < total && posted - ended < DEPTH {
                let index = posted as usize % self.qps.len();
                let range = [self.ours.near.mr.sge(2 * index as u64 * STRIDE, len)];
                let request = SendRequest::new(posted, op(&self.theirs[index])).with(&range);
                self.qps[index].post_send(&[request]).unwrap();
                posted += 1;
            }
            let completion = self.ours.next();
            assert!(completion.is_success(), "{completion:?}");
            ended += 1;
        }
    }

    fn receive(&self, count: u64) {
        for (index, qp) in self.qps.iter().enumerate() {
            let range = [self.ours.near.mr.sge((2 * index as u64 + 1) * STRIDE, STRIDE as u32)];
            for id in 0..count {
                qp.post_receive(&[ReceiveRequest { id, data: &range }]).unwrap();
            }
        }
    }

    /// The end of a test of writes, reads or atomics.
    fn compare(mut self, count: u64) {
        self.socket.sync(&self.mine);
        let theirs = self.socket.exchange_results(count);
        // A client tells how many it made; a server leaves it open.
        assert!(self.socket.is_client || theirs == COUNT * self.qps.len() as u64, "{theirs}");
        self.end();
    }

    fn end(self) {
        let Self { socket, mine, guest, qps, ours, .. } = self;
        socket.end(&mine);
        let text = guest.end();
        assert!(text.contains("#bytes"), "{text}");
        drop((qps, ours));
    }
}

/// What we do at a place of theirs, and with how many bytes.
struct Work(fn(Remote) -> WrOp, u32);

/// Writes, reads and atomics: the client works, the server looks on. Without work, the guest is the client.
fn one_sided(bench: &Bench, program: &str, qps: usize, work: Option<Work>) {
    let mut end = PerftestPeer::new(bench, program, work.is_some(), qps);
    end.synced(false);
    if let Some(Work(op, len)) = work {
        end.pump(|line| op(line.remote), len);
    }
    end.compare(COUNT * qps as u64);
}

fn we_write_to_ib_write_bw(bench: &Bench) {
    let program = format!("ib_write_bw -s {SIZE}");
    one_sided(bench, &program, 1, Some(Work(WrOp::Write, SIZE)));
    one_sided(bench, &program, 3, Some(Work(WrOp::Write, SIZE)));
}

fn ib_write_bw_writes_to_us(bench: &Bench) {
    one_sided(bench, &format!("ib_write_bw -s {SIZE}"), 1, None);
    one_sided(bench, &format!("ib_write_bw -s {SIZE}"), 3, None);
}

fn we_read_from_ib_read_bw(bench: &Bench) {
    one_sided(bench, &format!("ib_read_bw -s {SIZE}"), 1, Some(Work(WrOp::Read, SIZE)));
}

fn ib_read_bw_reads_from_us(bench: &Bench) {
    one_sided(bench, &format!("ib_read_bw -s {SIZE}"), 1, None);
    one_sided(bench, "ib_read_bw -e -s 65536", 2, None);
}

fn we_add_to_ib_atomic_bw(bench: &Bench) {
    let add = |at| WrOp::Atomic(at, Atomic::FetchAdd { add: 1 });
    one_sided(bench, "ib_atomic_bw -A FETCH_AND_ADD", 1, Some(Work(add, 8)));
}

fn ib_atomic_bw_adds_to_us(bench: &Bench) {
    one_sided(bench, "ib_atomic_bw -A FETCH_AND_ADD", 1, None);
}

fn ib_atomic_bw_swaps_at_ours(bench: &Bench) {
    one_sided(bench, "ib_atomic_bw -A CMP_AND_SWAP", 2, None);
}

fn we_send_to_ib_send_bw(bench: &Bench) {
    for qps in [1, 2] {
        let mut end = PerftestPeer::new(bench, &format!("ib_send_bw -s {SIZE}"), true, qps);
        end.synced(true);
        end.socket.sync(&end.mine);
        end.pump(|_| WrOp::Send, SIZE);
        end.end();
    }
}

fn ib_send_bw_sends_to_us(bench: &Bench) {
    for qps in [1, 2] {
        let mut end = PerftestPeer::new(bench, &format!("ib_send_bw -s {SIZE}"), false, qps);
        end.synced(true);
        end.receive(COUNT);
        end.socket.sync(&end.mine);
        for _ in 0..COUNT * qps as u64 {
            let completion = end.ours.next();
            assert!(completion.is_success() && completion.len == SIZE, "{completion:?}");
        }
        end.end();
    }
}

/// Messages to and fro; the client begins.
fn latency(bench: &Bench, we_are_client: bool) {
    // Without -e: its two completion queues share their events, and it was seen to wait for one that it had taken.
    let mut end = PerftestPeer::new(bench, "ib_send_lat -s 1000", we_are_client, 1);
    end.synced(true);
    end.receive(COUNT);
    end.socket.sync(&end.mine);
    let send = |end: &PerftestPeer| {
        let range = [end.ours.near.mr.sge(0, 1000)];
        end.qps[0].post_send(&[SendRequest::new(COUNT, WrOp::Send).with(&range)]).unwrap();
    };
    for _ in 0..COUNT {
        if we_are_client {
            send(&end);
        }
        // A message from the guest, and perhaps the end of the one before.
        loop {
            let completion = end.ours.next();
            assert!(completion.is_success(), "{completion:?}");
            if completion.is_receive() {
                assert_eq!(completion.len, 1000);
                break;
            }
        }
        if !we_are_client {
            send(&end);
        }
    }
    end.end();
}

fn our_ping_to_ib_send_lat(bench: &Bench) {
    latency(bench, true);
}

fn ib_send_lat_pings_us(bench: &Bench) {
    latency(bench, false);
}

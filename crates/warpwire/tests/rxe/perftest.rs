//! perftest's programs in the guest against the local device, which implements their TCP handshake.
//!
//! In each exchange the client writes first and the server answers. They exchange a version, two
//! sizes, the MTU, then a line of 108 bytes per queue pair, once to connect and again as a barrier;
//! at the end the bandwidth tests compare their results.

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
/// Iterations per queue pair.
const COUNT: u64 = 200;
const SIZE: u32 = 5000;
/// Messages in flight.
const DEPTH: u64 = 64;
/// Bytes of each of the two buffers of a queue pair.
const STRIDE: u64 = 1 << 16;

/// TCP connection to a perftest program.
struct PerftestSocket {
    stream: TcpStream,
    is_client: bool,
}

/// Connection data of a queue pair, one line of the handshake.
struct ConnLine {
    reads: u8,
    qpn: u32,
    psn: u32,
    remote: Remote,
    address: IpAddr,
}

impl PerftestSocket {
    fn connect(bench: &Bench) -> Self {
        // Always over IPv4, whatever address family the queue pairs use.
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

    /// Exchanges equally long messages; the client sends first.
    fn swap(&mut self, mine: &[u8]) -> Vec<u8> {
        let mut theirs = vec![0; mine.len()];
        if self.is_client {
            self.stream.write_all(mine).unwrap();
        }
        self.stream.read_exact(&mut theirs).expect("the next message from perftest");
        if !self.is_client {
            self.stream.write_all(mine).unwrap();
        }
        theirs
    }

    /// The handshake before the lines of the queue pairs; returns the peer's MTU.
    fn begin(&mut self, mtu: u32) -> u32 {
        let version = self.swap(VERSION);
        assert!(version.starts_with(b"6.") || version.starts_with(b"5."), "{version:?}");
        // Buffer size over which messages cycle, and cache line size.
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

    /// Barrier: exchanges one line.
    fn sync(&mut self, mine: &[ConnLine]) {
        self.line(&mine[0]);
    }

    /// Results of a bandwidth test: size, iterations, and three values that are not used here.
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

/// The local end of a test.
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
        // ACK timeout of 0.5 s: an emulated guest on a busy machine was seen to stall for half a
        // second, four times in a row.
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
                source_port: 0,
                lid: 0,
                gid: 0,
                mtu_on_host: 0,
                selective_repeat: false,
            })
            .unwrap();
        }
        assert_eq!(Mtu::new(mtu), Mtu::new(2048), "the MTU that the guest was started with");
        Self { ours, qps, socket, mine, theirs, guest }
    }

    /// Exchanges all lines again, and one more: before them for sends, after them otherwise.
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

    /// Posts all work on all queue pairs, with up to `DEPTH` in flight, and waits for its
    /// completions.
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

    /// Ends a test of writes, reads or atomics.
    fn compare(mut self, count: u64) {
        self.socket.sync(&self.mine);
        let theirs = self.socket.exchange_results(count);
        // Only a client reports its iterations.
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

/// The operation on the guest's memory, and its length in bytes.
struct Work(fn(Remote) -> WrOp, u32);

/// Writes, reads and atomics: the client posts, the server is passive. Without `work`, the guest is
/// the client.
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

/// Ping-pong; the client sends first.
fn latency(bench: &Bench, we_are_client: bool) {
    // Without `-e`: its two completion queues share an event channel, and it was seen to wait for
    // an event that it had already consumed.
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
        // A message from the guest, and maybe the completion of the previous send.
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

//! Executes one verb per line of stdin through `warpwire::ibv`, and answers each with a line.
//!
//! The protocol is that of `tools/rxe/verbs-peer.c`, which documents it, so that the cases of
//! `tests/rxe` can run against either. Memory windows are not supported.

use std::io::BufRead;
use std::time::{Duration, Instant};

use warpwire::ibv::{
    AhAttributes, CompletionKind, Context, Cq, Fence, Mr, Pd, Qp, QpOptions, ReceiveRequest,
    Remote, SendRequest, Srq, WrOp,
};
use warpwire::mlx5::Atomic;
use warpwire::mr::{Access, HostMemory};
use warpwire_proto::Psn;
use warpwire_proto::qp::{Mtu, QpAttributes, State};

use crate::ibv::testbed::pattern;

type Reply = Result<String, String>;

/// How long no completion comes before the device is woken.
const WAKE: Duration = Duration::from_secs(3);

struct Peer {
    context: Context,
    pd: Pd,
    cq: Cq,
    srq: Option<Srq>,
    qps: Vec<Option<Qp>>,
    memories: Vec<(HostMemory, Option<Mr>)>,
    gid_index: u8,
}

pub fn serve(device: &str) {
    let opened = Context::open(device).and_then(|context| {
        let (pd, cq) = (context.create_pd()?, context.create_cq(1024)?);
        Ok(Peer { context, pd, cq, srq: None, qps: vec![], memories: vec![], gid_index: 0 })
    });
    let mut peer = match opened {
        Ok(peer) => peer,
        Err(error) => {
            println!("error {error}");
            std::process::exit(1);
        }
    };
    println!("ok ready");
    for line in std::io::stdin().lock().lines().map_while(Result::ok) {
        let words: Vec<&str> = line.split_whitespace().collect();
        match peer.execute(&words) {
            Ok(reply) if reply == "none" => println!("none"),
            Ok(reply) if reply.is_empty() => println!("ok"),
            Ok(reply) => println!("ok {reply}"),
            Err(why) => println!("error {why}"),
        }
    }
}

fn number(words: &[&str], at: usize) -> u64 {
    let word = words.get(at).copied().unwrap_or("0");
    match word.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16).unwrap_or(0),
        None => word.parse().unwrap_or(0),
    }
}

fn gid(text: Option<&&str>) -> Result<[u8; 16], String> {
    let digits = text.filter(|text| text.len() == 32).ok_or("not a GID")?;
    u128::from_str_radix(digits, 16).map(u128::to_be_bytes).map_err(|why| why.to_string())
}

/// The access rights for these flags of `ibv_reg_mr`.
fn access(flags: u64) -> Access {
    let rights =
        [Access::LOCAL_WRITE, Access::REMOTE_WRITE, Access::REMOTE_READ, Access::REMOTE_ATOMIC];
    let mut all = Access::NONE;
    for (_, right) in rights.into_iter().enumerate().filter(|(bit, _)| flags >> bit & 1 == 1) {
        all |= right;
    }
    all
}

impl Peer {
    fn execute(&mut self, words: &[&str]) -> Reply {
        let wrong = |error: warpwire::Error| error.to_string();
        match words.first().copied().unwrap_or_default() {
            "gid" => self.find_gid(gid(words.get(1))?),
            "memory" => self.make_memory(number(words, 1), access(number(words, 2))).map_err(wrong),
            "srq" => self
                .pd
                .create_srq(256, 1)
                .map(|srq| self.srq = Some(srq))
                .map(|()| String::new())
                .map_err(wrong),
            "qp" => self.make_qp(words.get(1) == Some(&"srq")).map_err(wrong),
            "connect" => self.connect(words),
            "fill" | "check" | "put" | "get" => self.touch(words),
            "receive" => self.receive(words),
            "post" => self.post(words),
            "poll" => self.poll(Duration::from_millis(number(words, 1))).map_err(wrong),
            "arm" => self.cq.arm(number(words, 1) != 0).map(|()| String::new()).map_err(wrong),
            "event" => {
                let came =
                    self.cq.wait_event(Duration::from_millis(number(words, 1))).map_err(wrong)?;
                Ok(if came { String::new() } else { "none".to_owned() })
            }
            "state" => {
                self.qp(words, 1)?.state().map(|state| (state as u32).to_string()).map_err(wrong)
            }
            "destroy" => {
                let slot =
                    self.qps.get_mut(number(words, 1) as usize).ok_or("no such queue pair")?;
                *slot = None;
                Ok(String::new())
            }
            "dereg" => {
                let slot =
                    self.memories.get_mut(number(words, 1) as usize).ok_or("no such memory")?;
                slot.1 = None;
                Ok(String::new())
            }
            other => Err(format!("no such verb: {other}")),
        }
    }

    fn qp(&self, words: &[&str], at: usize) -> Result<&Qp, String> {
        let found = self.qps.get(number(words, at) as usize).and_then(Option::as_ref);
        found.ok_or_else(|| "no such queue pair".to_owned())
    }

    fn memory(&self, words: &[&str], at: usize) -> Result<(&HostMemory, &Mr), String> {
        let found = self.memories.get(number(words, at) as usize);
        let (memory, mr) = found.ok_or("no such memory")?;
        Ok((memory, mr.as_ref().ok_or("the memory is no longer registered")?))
    }

    /// Waits up to 5 s, as the GID table fills late.
    fn find_gid(&mut self, wanted: [u8; 16]) -> Reply {
        for _ in 0..250 {
            let gids = self.context.gids().map_err(|error| error.to_string())?;
            if let Some(found) = gids.iter().find(|gid| gid.bytes == wanted) {
                self.gid_index = u8::try_from(found.index).map_err(|why| why.to_string())?;
                return Ok(found.index.to_string());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Err("no such GID".to_owned())
    }

    fn make_memory(&mut self, len: u64, access: Access) -> warpwire::Result<String> {
        let memory = HostMemory::new(len.max(1))?;
        let mr = self.pd.register(&memory, None, access)?;
        let reply = format!("{} {} {} {}", self.memories.len(), mr.iova(), mr.lkey(), mr.rkey());
        self.memories.push((memory, Some(mr)));
        Ok(reply)
    }

    fn make_qp(&mut self, shared: bool) -> warpwire::Result<String> {
        let options = QpOptions {
            send_depth: 256,
            receive_depth: 256,
            gid_index: self.gid_index,
            srq: self.srq.clone().filter(|_| shared),
            signal_all: false,
            ..QpOptions::default()
        };
        let qp = self.pd.create_qp(&self.cq, &self.cq, options)?;
        qp.modify(&qp.init_attr(), None)?;
        let reply = format!("{} {}", self.qps.len(), qp.number());
        self.qps.push(Some(qp));
        Ok(reply)
    }

    fn connect(&self, words: &[&str]) -> Reply {
        let qp = self.qp(words, 1)?;
        let small = |at: usize| Some(number(words, at) as u8);
        let psn = |at: usize| Some(Psn::new(number(words, at) as u32));
        let route = AhAttributes {
            gid: gid(words.get(3))?,
            ..AhAttributes::to([0, 0, 0, 0].into(), 1, self.gid_index)
        };
        let rtr_attr = QpAttributes::new(State::Rtr)
            .with_mtu(Mtu::new(number(words, 4) as u32))
            .with_destination(number(words, 2) as u32)
            .with_receive_psn(psn(6))
            .with_max_dest_rd_atomic(small(11))
            .with_min_rnr_timer(small(10));
        let rts_attr = QpAttributes::new(State::Rts)
            .with_send_psn(psn(5))
            .with_timeout(small(7))
            .with_retry_count(small(8))
            .with_rnr_retry(small(9))
            .with_max_rd_atomic(small(11));
        let mut done = qp.modify(&rtr_attr, Some(&route));
        // The kernel resolves the peer's address (ARP or neighbor discovery) and gives up early.
        for _ in 0..4 {
            if done.as_ref().is_err_and(|error| error.to_string().contains("no reply to ARP")) {
                done = qp.modify(&rtr_attr, Some(&route));
            }
        }
        done.and_then(|()| qp.modify(&rts_attr, None))
            .map(|()| String::new())
            .map_err(|error| error.to_string())
    }

    fn touch(&self, words: &[&str]) -> Reply {
        let found = self.memories.get(number(words, 1) as usize).ok_or("no such memory")?;
        let (bytes, offset, value) = (found.0.bytes(), number(words, 2), number(words, 3));
        let wrong = |error: warpwire::Error| error.to_string();
        let (len, seed) = (value as usize, number(words, 4));
        match words[0] {
            "fill" => bytes.write(offset, &pattern(seed, len)).map_err(wrong)?,
            "put" => bytes.write(offset, &value.to_ne_bytes()).map_err(wrong)?,
            "get" => {
                let mut word = [0; 8];
                bytes.read(offset, &mut word).map_err(wrong)?;
                return Ok(u64::from_ne_bytes(word).to_string());
            }
            _ => {
                let mut there = vec![0; len];
                bytes.read(offset, &mut there).map_err(wrong)?;
                let differs = there.iter().zip(&pattern(seed, len)).position(|(a, b)| a != b);
                if let Some(at) = differs {
                    return Err(format!("byte {at} is {:#x}", there[at]));
                }
            }
        }
        Ok(String::new())
    }

    fn receive(&self, words: &[&str]) -> Reply {
        let (_, mr) = self.memory(words, 3)?;
        let len = number(words, 5) as u32;
        let range = [mr.sge(number(words, 4), len)];
        let data = if len == 0 { &range[..0] } else { &range[..] };
        let request = ReceiveRequest { id: number(words, 2), data };
        let done = match (words.get(1), &self.srq) {
            (Some(&"srq"), Some(srq)) => srq.post_receive(&[request]),
            _ => self.qp(words, 1)?.post_receive(&[request]),
        };
        done.map(|()| String::new()).map_err(|refused| refused.to_string())
    }

    fn post(&self, words: &[&str]) -> Reply {
        let (qp, (memory, mr)) = (self.qp(words, 1)?, self.memory(words, 4)?);
        let (offset, len, flags) = (number(words, 5), number(words, 6) as u32, number(words, 11));
        let at = Remote { address: number(words, 7), rkey: number(words, 8) as u32 };
        let first = number(words, 9);
        let imm = (first as u32).to_be_bytes();
        let op = match words.get(3).copied().unwrap_or_default() {
            "send" => WrOp::Send,
            "send_imm" => WrOp::SendImm(imm),
            "send_inv" => WrOp::SendInvalidate(first as u32),
            "write" => WrOp::Write(at),
            "write_imm" => WrOp::WriteImm(at, imm),
            "read" => WrOp::Read(at),
            "cas" => {
                WrOp::Atomic(at, Atomic::CompareSwap { compare: first, swap: number(words, 10) })
            }
            "fadd" => WrOp::Atomic(at, Atomic::FetchAdd { add: first }),
            other => return Err(format!("no such operation: {other}")),
        };
        let range = [mr.sge(offset, len)];
        let mut bytes = vec![0; if flags & 8 != 0 { len as usize } else { 0 }];
        memory.bytes().read(offset, &mut bytes).map_err(|error| error.to_string())?;
        let mut request = SendRequest::new(number(words, 2), op).with(if len == 0 {
            &range[..0]
        } else {
            &range[..]
        });
        request.solicited = flags & 4 != 0;
        if flags & 1 != 0 {
            request = request.fenced(Fence::Reads);
        }
        if flags & 8 != 0 {
            request = request.inline(&bytes);
        }
        qp.post_send(&[request]).map(|()| String::new()).map_err(|refused| refused.to_string())
    }

    /// Posts an empty write on all queue pairs: see `wake_requesters` in `verbs-peer.c`.
    fn wake_requesters(&self) {
        for qp in self.qps.iter().flatten().filter(|qp| matches!(qp.state(), Ok(State::Rts))) {
            let write = WrOp::Write(Remote { address: 0, rkey: 0 });
            let _ = qp.post_send(&[SendRequest::new(0, write).unsignaled()]);
        }
    }

    /// Reply: id, status, kind, length, immediate or key, queue pair, 0.
    fn poll(&self, time: Duration) -> warpwire::Result<String> {
        let end = Instant::now() + time;
        let done = loop {
            let left = end.saturating_duration_since(Instant::now());
            if let Some(done) = self.cq.wait_next(left.min(WAKE))? {
                break done;
            }
            if left <= WAKE {
                return Ok("none".to_owned());
            }
            self.wake_requesters();
        };
        let (kind, imm_or_key) = match done.kind {
            CompletionKind::ReceiveImm(imm) => (128, u32::from_be_bytes(imm)),
            CompletionKind::WriteImm(imm) => (129, u32::from_be_bytes(imm)),
            CompletionKind::ReceiveInvalidate(key) => (128, key),
            _ => (0, 0),
        };
        Ok(format!(
            "{} {} {kind} {} {imm_or_key} {} 0",
            done.id, done.status as u32, done.len, done.qpn
        ))
    }
}

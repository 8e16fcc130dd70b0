//! Any calls, and any packets, on a queue pair that has a well-behaved peer.
//!
//! The input is a script. What must hold whatever it says: nothing panics, each posted work ends once and in the
//! order of posting, and memory stays as it was.
#![no_main]

use std::collections::VecDeque;
use std::net::Ipv4Addr;

use libfuzzer_sys::arbitrary::{Arbitrary, Result, Unstructured};
use libfuzzer_sys::fuzz_target;
use warpwire_proto::qp::{
    Access, Arrived, Atomic, Change, Event, Fence, Host, Mtu, Op, Options, Path, Qp, Receive,
    Remote, Source, State, Status, Target, Transmit, Verdict, Work,
};
use warpwire_proto::wire::{Aeth, AtomicEth, Deth, Extension, Headers, Opcode, Reth, Syndrome};
use warpwire_proto::{Instant, Psn};

fuzz_target!(|bytes: &[u8]| {
    // A script that ends in the middle of a call is still a script.
    let _ = play(&mut Unstructured::new(bytes));
});

/// A host that answers as the script says.
#[derive(Default)]
struct Scripted {
    answers: VecDeque<u8>,
    receives: u64,
}

impl Scripted {
    fn answer(&mut self) -> Verdict {
        match self.answers.pop_front().unwrap_or(0) {
            0..240 => Verdict::Yes,
            240..252 => Verdict::NotNow,
            252.. => Verdict::Refused,
        }
    }
}

impl Host for Scripted {
    fn take_receive(&mut self) -> Option<Receive> {
        self.receives += 1;
        (self.answer() == Verdict::Yes).then_some(Receive { id: self.receives, capacity: 4096 })
    }

    fn may_access(&mut self, _: Access, _: Remote, _: u32) -> Verdict {
        self.answer()
    }

    fn place(&mut self, _: Target, len: u32) -> Verdict {
        assert!(len > 0 && len <= 4096, "a packet's payload");
        self.answer()
    }

    fn execute(&mut self, _: Remote, _: Atomic) -> core::result::Result<u64, Verdict> {
        match self.answer() {
            Verdict::Yes => Ok(7),
            other => Err(other),
        }
    }

    fn invalidate(&mut self, _: u32) -> Verdict {
        self.answer()
    }

    fn store_result(&mut self, _: u64, _: u64) -> Verdict {
        self.answer()
    }

    fn fetch(&mut self, _: Source, len: u32, headers_len: usize) -> Verdict {
        assert!(len > 0 && len <= 4096 && headers_len >= 12);
        self.answer()
    }
}

struct End {
    qp: Qp,
    host: Scripted,
    posted: u64,
    ended: u64,
    failed: bool,
    footprint: usize,
}

impl End {
    fn new(mine: u32, theirs: u32, options: Options, mtu: Mtu) -> Self {
        let mut qp = Qp::new(mine, options);
        for change in steps(theirs, mtu) {
            qp.modify(&change).expect("the way to RTS");
        }
        let footprint = qp.footprint();
        Self { qp, host: Scripted::default(), posted: 0, ended: 0, failed: false, footprint }
    }

    /// What must hold after each call.
    fn check(&mut self) {
        while let Some(event) = self.qp.poll_event() {
            let Event::Sent(completion) = event else { continue };
            assert_eq!(completion.id, self.ended, "in the order of posting, once");
            self.ended += 1;
            assert!(!self.failed || completion.status == Status::Flushed);
            self.failed |= completion.status != Status::Success;
        }
        assert!(self.ended <= self.posted);
        assert_eq!(u64::from(self.qp.outstanding()), self.posted - self.ended);
        assert_eq!(self.qp.footprint(), self.footprint);
        if self.qp.state() == State::Err {
            assert_eq!(self.ended, self.posted, "all is flushed");
        }
    }

    fn take(&mut self, now: Instant, arrived: &Arrived<'_>) {
        let _ = self.qp.handle_packet(now, arrived, &mut self.host);
        self.check();
    }

    fn give(&mut self, now: Instant) -> Option<Transmit> {
        let packet = self.qp.poll_transmit(now, &mut self.host);
        self.check();
        packet
    }
}

fn steps(destination: u32, mtu: Mtu) -> [Change; 3] {
    let peer = (Ipv4Addr::LOCALHOST, 4791).into();
    let path = Path { peer, traffic_class: 0, hop_limit: 1, flow_label: 0 };
    let psn = Some(Psn::new(0xff_fff0));
    [
        Change {
            partition_index: Some(0),
            port: Some(1),
            access: Some(Access::ALL),
            ..Change::to(State::Init)
        },
        Change {
            path: Some(path),
            mtu: Some(mtu),
            destination: Some(destination),
            receive_psn: psn,
            max_dest_rd_atomic: Some(3),
            min_rnr_timer: Some(1),
            ..Change::to(State::Rtr)
        },
        Change {
            send_psn: psn,
            timeout: Some(1),
            retry_count: Some(2),
            rnr_retry: Some(2),
            max_rd_atomic: Some(3),
            ..Change::to(State::Rts)
        },
    ]
}

fn play(script: &mut Unstructured<'_>) -> Result<()> {
    let options = Options {
        send_depth: script.int_in_range(1..=9)?,
        window: script.int_in_range(1..=9)?,
        read_chunk: script.int_in_range(1..=5)?,
        line_rate: script.arbitrary::<bool>()?.then_some(1_000_000),
    };
    let mtu = Mtu::ALL[script.int_in_range(0..=2)?];
    let mut ends = [End::new(1, 2, options, mtu), End::new(2, 1, options, mtu)];
    let mut now = Instant::default();
    while !script.is_empty() {
        let at = usize::from(script.arbitrary::<bool>()?);
        match script.int_in_range(0..=9)? {
            0 | 1 => post(script, &mut ends[at])?,
            2..=4 => exchange(script, &mut ends, at, now)?,
            5 | 6 => {
                let (headers, payload_len) = forged(script)?;
                let arrived = Arrived { headers: &headers, payload_len, marked: false };
                ends[at].take(now, &arrived);
            }
            7 => {
                now =
                    now + core::time::Duration::from_nanos(u64::from(u16::arbitrary(script)?) * 8);
                ends[at].qp.handle_timeout(now);
                ends[at].check();
            }
            8 => {
                let answers: [u8; 4] = script.arbitrary()?;
                ends[at].host.answers.extend(answers);
            }
            _ => modify(script, &mut ends[at])?,
        }
        assert!(ends[at].qp.poll_timeout(now) <= Instant::NEVER);
    }
    Ok(())
}

fn post(script: &mut Unstructured<'_>, end: &mut End) -> Result<()> {
    let at = Remote { address: script.arbitrary()?, key: script.arbitrary()? };
    let len = u32::from(script.arbitrary::<u16>()? & 0xfff);
    let (op, len) = match script.int_in_range(0..=9)? {
        0 => (Op::Send, len),
        1 => (Op::SendImm(3), len),
        2 => (Op::SendInvalidate(3), len),
        3 => (Op::Write(at), len),
        4 => (Op::WriteImm(at, 3), len),
        5 => (Op::Read(at), len),
        6 => (Op::Atomic(at, Atomic::FetchAdd { add: 1 }), 8),
        7 => (Op::Local, 0),
        8 => (Op::Bad(Status::LocalOperation), 0),
        _ => (Op::Read(at), script.arbitrary()?),
    };
    let fence = [Fence::None, Fence::Reads, Fence::All][script.int_in_range(0..=2)?];
    let solicited = script.arbitrary()?;
    let work = Work { fence, solicited, ..Work::new(end.posted, op, len) };
    if end.qp.post(work).is_ok() {
        end.posted += 1;
    }
    end.check();
    Ok(())
}

/// Brings some packets of one end to the other, perhaps losing or repeating them.
fn exchange(
    script: &mut Unstructured<'_>,
    ends: &mut [End; 2],
    at: usize,
    now: Instant,
) -> Result<()> {
    for _ in 0..script.int_in_range(1..=8)? {
        let Some(packet) = ends[at].give(now) else { break };
        let mut buffer = [0; 8192];
        let len = packet.payload.map_or(0, |payload| payload.len);
        assert!(
            packet.headers.emit(&mut buffer, len as usize).is_some(),
            "what is sent can be written"
        );
        let fate = script.int_in_range(0..=9)?;
        let arrived = Arrived { headers: &packet.headers, payload_len: len, marked: fate == 8 };
        for _ in 0..[0, 2].get(fate).copied().unwrap_or(1) {
            ends[1 - at].take(now, &arrived);
        }
    }
    Ok(())
}

fn modify(script: &mut Unstructured<'_>, end: &mut End) -> Result<()> {
    let to = [State::Err, State::Sqd, State::Rts, State::Init, State::Rtr];
    let change = Change::to(to[script.int_in_range(0..=4)?]);
    let before = end.qp.state();
    if end.qp.modify(&change).is_err() {
        assert_eq!(end.qp.state(), before, "a step that is refused changes nothing");
    }
    end.check();
    Ok(())
}

/// A packet that nobody sent, with numbers near those in use.
fn forged(script: &mut Unstructured<'_>) -> Result<(Headers, u32)> {
    let reth = Reth {
        address: script.arbitrary()?,
        rkey: script.arbitrary()?,
        len: script.arbitrary::<u32>()? >> script.int_in_range(0..=31)?,
    };
    let syndrome = Syndrome::from_byte(script.arbitrary()?);
    let aeth = Aeth { syndrome, msn: 1 };
    let address = reth.address & !u64::from(script.arbitrary::<bool>()?);
    let atomic = AtomicEth { address, rkey: reth.rkey, swap_or_add: 1, compare: 2 };
    let deth = Deth { qkey: 1, source_qp: 2 };
    let extensions = [
        Extension::None,
        Extension::Imm(1),
        Extension::Reth(reth),
        Extension::RethImm(reth, 1),
        Extension::Aeth(aeth),
        Extension::AethAtomic(aeth, 1),
        Extension::Atomic(atomic),
        Extension::Invalidate(1),
        Extension::Deth(deth),
        Extension::Cnp,
    ];
    // Opcode and extension need not fit: whoever calls without the parser is not to be harmed either.
    let opcodes: Vec<_> = Opcode::all().collect();
    let opcode = *script.choose(&opcodes)?;
    let psn = Psn::new(0xff_fff0).add(u32::from(script.arbitrary::<u8>()?)).add(0xff_ffe0);
    let headers = Headers {
        ack_request: script.arbitrary()?,
        partition: if script.ratio(1, 20)? { 1 } else { 0xffff },
        ..Headers::new(opcode, 1, psn, *script.choose(&extensions)?)
    };
    let payload_len = u32::from(script.arbitrary::<u16>()? % 1100);
    Ok((headers, payload_len))
}

//! Fuzzes queues, doorbells and doorbell records of the software HCA: connections, datagrams, SRQs.
//!
//! The input is a script of stores and steps. Invariants: nothing panics or hangs, memory that no
//! key gives access to does not change, and the bystander connection works. Timers use the real
//! clock, so a replay may differ in timing, and in nothing else.

use std::cell::RefCell;
use std::time::{Duration, Instant};

use arbitrary::{Result, Unstructured};
use warpwire::hca::{HcaOptions, QueueMemory};
use warpwire::link::Hub;
use warpwire::mlx5::{AddressVector, DoorbellRecord};
use warpwire::mr::HostMemory;
use warpwire::verbs::{
    Access, AddressHandle, Completion, Context, Cq, Mr, Pd, ProgressMode, Qp, QpAttributes,
    QpOptions, ReceiveRequest, SendRequest, Service, Srq, SrqOptions, State, WrOp,
};

const QKEY: u32 = 7;
const LEN: u64 = 4096;

thread_local! {
    static HARNESS: RefCell<Option<Harness>> = const { RefCell::new(None) };
}

/// Runs one input.
pub fn run(bytes: &[u8]) {
    HARNESS.with_borrow_mut(|harness| {
        let harness = harness.get_or_insert_with(Harness::new);
        harness.begin();
        // A script may end in the middle of a store.
        let _ = harness.run_script(&mut Unstructured::new(bytes));
        harness.end();
    });
}

struct Endpoint {
    context: Context,
    pd: Pd,
    mr: Mr,
    /// Registered in another protection domain: no key of the victims gives access to it.
    secret: (HostMemory, Mr),
}

impl Endpoint {
    fn new(hub: &Hub, address: &str) -> Self {
        let link = hub.endpoint(address.parse().expect("an address")).expect("an endpoint");
        let options = HcaOptions::default().with_progress_mode(ProgressMode::Manual);
        let context = Context::open_with(link, options).expect("a device");
        let (pd, other) = (context.alloc_pd(), context.alloc_pd());
        let register = |pd| {
            let memory = HostMemory::new(LEN).expect("memory");
            let mr = context.register(pd, memory.clone(), Access::ALL).expect("a registration");
            (memory, mr)
        };
        let ((_, mr), secret) = (register(&pd), register(&other));
        Self { context, pd, mr, secret }
    }

    fn pair(&self, options: QpOptions) -> (Qp, Cq) {
        let cq = self.context.create_cq(64).expect("a completion queue");
        let qp = self.context.create_qp(&self.pd, &cq, &cq, options).expect("a queue pair");
        (qp, cq)
    }
}

struct Harness {
    endpoints: [Endpoint; 2],
    /// Two connected queue pairs, the second with an SRQ, and two UD queue pairs.
    victims: Vec<(Qp, Cq)>,
    bystanders: [(Qp, Cq); 2],
    srq: Srq,
    handles: [AddressHandle; 2],
}

fn connect(pair: [&Qp; 2]) {
    let [one, two] = pair;
    let endpoints = [one.endpoint(), two.endpoint()];
    one.connect(&endpoints[1]).expect("a connection");
    two.connect(&endpoints[0]).expect("a connection");
}

impl Harness {
    fn new() -> Self {
        let hub = Hub::new();
        let endpoints =
            ["10.0.0.1:4791", "10.0.0.2:4791"].map(|address| Endpoint::new(&hub, address));
        let small = QpOptions::default()
            .with_send_depth(8)
            .with_receive_depth(8)
            .with_timeout(6)
            .with_retry_count(1)
            .with_rnr_retry(1);
        let srq = SrqOptions::default().with_depth(7).with_max_sge(1);
        let srq = endpoints[1].context.create_srq(&endpoints[1].pd, srq).expect("a shared queue");
        let shared = small.clone().with_srq(srq.clone());
        let datagrams = small.clone().with_service(Service::Ud);
        let victims = vec![
            endpoints[0].pair(small),
            endpoints[1].pair(shared),
            endpoints[0].pair(datagrams.clone()),
            endpoints[1].pair(datagrams),
        ];
        let bystanders = [0, 1].map(|n| endpoints[n].pair(QpOptions::default()));
        connect([&bystanders[0].0, &bystanders[1].0]);
        let handles = [0, 1].map(|n: usize| {
            let peer = endpoints[1 - n].context.path().local;
            endpoints[n].context.create_address_handle(peer).expect("a handle")
        });
        Self { endpoints, victims, bystanders, srq, handles }
    }

    /// Resets and reconnects the victims, with zeroed queues.
    fn begin(&self) {
        for (qp, _) in &self.victims {
            qp.modify(&QpAttributes::new(State::Reset)).expect("RESET");
            let (memory, layout) = qp.queues().unwrap();
            memory.bytes().fill(0, layout.dbrec, &[0]).expect("the queues");
        }
        connect([&self.victims[0].0, &self.victims[1].0]);
        for (qp, _) in &self.victims[2..] {
            qp.activate_ud(QKEY).expect("RTS");
        }
    }

    fn step(&self, count: u32) {
        let mut done = [Completion::EMPTY; 16];
        for _ in 0..count {
            for end in &self.endpoints {
                end.context.soft().unwrap().poll().expect("a working device");
            }
            for (_, cq) in &self.victims {
                cq.poll(&mut done).expect("a working queue");
            }
        }
    }

    fn run_script(&self, script: &mut Unstructured<'_>) -> Result<()> {
        let mut stores = 0;
        while !script.is_empty() && stores < 64 {
            stores += 1;
            let which = script.int_in_range(0..=3)?;
            let qp = &self.victims[which].0;
            let (memory, layout) = qp.queues().unwrap();
            let bytes = memory.bytes();
            match script.int_in_range(0..=9)? {
                0..=3 => self.entry(script, which)?,
                4 => {
                    let at = layout.dbrec + 4 * script.int_in_range(0..=1)?;
                    let _ = bytes.store_u32(at, script.arbitrary()?);
                }
                5 => {
                    let at = layout.doorbell + 256 * script.int_in_range(0..=1)?;
                    let _ = bytes.store_u64(at, script.arbitrary()?);
                }
                6 => receive(script, memory, layout.receive, layout.send)?,
                7 => self.post(script, which)?,
                8 => {
                    let cq = self.victims[which].1.memory().unwrap().bytes();
                    let at = cq.len() - 64 + 4 * script.int_in_range(0..=1)?;
                    let _ = cq.store_u32(at, script.arbitrary()?);
                }
                _ => self.step(script.int_in_range(1..=6)?),
            }
            self.endpoints[which % 2].context.soft().unwrap().ring(qp.number());
        }
        self.step(4);
        Ok(())
    }

    /// A WQE of arbitrary bytes, some fields of which may be made valid: otherwise the code behind
    /// their checks would not be reached.
    fn entry(&self, script: &mut Unstructured<'_>, which: usize) -> Result<()> {
        let mut entry = [0; 256];
        let len = 16 * script.int_in_range(1..=16usize)?;
        script.fill_buffer(&mut entry[..len])?;
        let block: u16 = script.int_in_range(0..=20)?;
        let (valid_bits, seed_byte): (u8, u8) = (script.arbitrary()?, script.arbitrary()?);
        if valid_bits & 1 != 0 {
            let codes = [0, 8, 9, 0xa, 0xb, 0xf, 0x10, 0x11, 0x12, 0x14, 0x15, 0x23, 1];
            entry[1..3].copy_from_slice(&block.to_be_bytes());
            entry[3] = codes[usize::from(seed_byte) % codes.len()];
            entry[7] = (len / 16) as u8;
        }
        let (mine, theirs) = (&self.endpoints[which % 2].mr, &self.endpoints[1 - which % 2].mr);
        let offset = u64::from(seed_byte & 31) * 8;
        if valid_bits & 2 != 0 {
            let remote = theirs.remote(offset);
            entry[16..24].copy_from_slice(&remote.address.to_be_bytes());
            entry[24..28].copy_from_slice(&remote.rkey.to_be_bytes());
        }
        for at in (16..len).step_by(16).filter(|at| valid_bits >> (2 + at / 16 % 4) & 1 != 0) {
            let data = mine.sge(offset, u32::from(seed_byte) * 4);
            entry[at..at + 4].copy_from_slice(&data.len.to_be_bytes());
            entry[at + 4..at + 8].copy_from_slice(&data.lkey.to_be_bytes());
            entry[at + 8..at + 16].copy_from_slice(&data.address.to_be_bytes());
        }
        if valid_bits & 0x80 != 0 && which >= 2 {
            let to = &self.handles[which % 2];
            let to = AddressVector::new(to.peer(), self.victims[5 - which].0.number(), QKEY);
            entry[16..64].copy_from_slice(&to.encode());
        }
        let (memory, layout) = self.victims[which].0.queues().unwrap();
        let blocks = (layout.dbrec - layout.send) / 64;
        for (n, part) in (0..).zip(entry[..len].chunks(64)) {
            let at = (u64::from(block) + n) % blocks * 64;
            let _ = memory.bytes().write(layout.send + at, part);
        }
        let end = block + len.div_ceil(64) as u16;
        let word = u32::from_ne_bytes(DoorbellRecord::word(end));
        let _ = memory.bytes().store_u32(layout.dbrec + DoorbellRecord::SEND as u64, word);
        Ok(())
    }

    /// Posts a valid receive and a valid send.
    fn post(&self, script: &mut Unstructured<'_>, which: usize) -> Result<()> {
        let (qp, mr) = (&self.victims[which].0, &self.endpoints[which % 2].mr);
        let data = [mr.sge(0, script.int_in_range(0..=512)?)];
        let receive = [ReceiveRequest { id: 1, data: &data }];
        // Errors are expected: queues may be full, and queue pairs failed.
        let _ = match which {
            1 => self.srq.post_receive(&receive),
            _ => qp.post_receive(&receive),
        };
        let message = SendRequest::new(1, WrOp::Send).with(&data);
        let _ = match which {
            0 | 1 => qp.post_send(&[message]),
            _ => {
                let peer = self.victims[5 - which].0.number();
                qp.post_send(&[message.to(&self.handles[which % 2], peer, QKEY)])
            }
        };
        Ok(())
    }

    /// Checks the invariants at the end.
    fn end(&self) {
        for end in &self.endpoints {
            let mut bytes = [0; LEN as usize];
            end.secret.0.bytes().read(0, &mut bytes).expect("memory");
            assert!(bytes.iter().all(|byte| *byte == 0), "memory of another domain changed");
        }
        let [(one, sends), (two, receives)] = &self.bystanders;
        two.post_receive(&[ReceiveRequest { id: 4, data: &[] }]).expect("a receive");
        one.post_send(&[SendRequest::new(5, WrOp::Send)]).expect("a message");
        for (cq, id) in [(sends, 5), (receives, 4)] {
            let (mut done, start) = ([Completion::EMPTY], Instant::now());
            while cq.poll(&mut done).expect("a working queue") == 0 {
                self.step(1);
                assert!(start.elapsed() < Duration::from_secs(5), "the bystander hangs");
            }
            assert!(done[0].is_success() && done[0].id == id, "{:?}", done[0]);
        }
        while self.endpoints.iter().any(|end| end.context.next_event().is_some()) {}
    }
}

/// Writes bytes into a receive queue, and its producer index.
fn receive(script: &mut Unstructured<'_>, memory: &QueueMemory, from: u64, end: u64) -> Result<()> {
    if end > from {
        let mut entry = [0; 32];
        script.fill_buffer(&mut entry)?;
        let slot = script.int_in_range(0..=7)?;
        let _ = memory.bytes().write(from + slot * 32 % (end - from), &entry);
    }
    Ok(())
}

//! Each fault occurs at about its configured rate, and no other effect occurs.

use super::*;
use crate::link::UdpOptions;
use crate::link::tests::fill;
use crate::link::{Hub, Loopback, Udp};

const COUNT: u32 = 20_000;
const LEN: usize = 100;

struct Run {
    /// Numbers of the packets that arrived, in order of arrival.
    arrived: Vec<u32>,
    sender: Counters,
    receiver: Counters,
}

impl Run {
    fn duplicated(&self) -> usize {
        let mut numbers = self.arrived.clone();
        numbers.sort_unstable();
        let all = numbers.len();
        numbers.dedup();
        all - numbers.len()
    }

    fn overtaken(&self) -> usize {
        self.arrived.windows(2).filter(|pair| pair[1] < pair[0]).count()
    }
}

fn pair() -> (Loopback, Loopback) {
    let hub = Hub::new();
    let end = |host| hub.endpoint(SocketAddr::from(([10, 0, 0, host], 1))).unwrap();
    (end(1), end(2))
}

/// Sends numbered packets from one link to the other; the clock advances by a microsecond per
/// packet.
fn run(from: &mut dyn Link, to: &mut dyn Link, clock: &Clock) -> Run {
    let flow = from.open(to.local(), 0).unwrap();
    let mut arrived = Vec::new();
    let mut take = |frame: Frame<'_>| {
        let mut want = vec![0; LEN];
        let number = u32::from_be_bytes(*frame.bytes.first_chunk().unwrap());
        fill(&mut want, number);
        assert_eq!(frame.bytes[..LEN - 4], want[..LEN - 4], "a packet changed in transit");
        arrived.push(number);
    };
    for number in 0..COUNT {
        loop {
            match from.reserve(flow, LEN) {
                Ok(packet) => break fill(packet, number),
                Err(ReserveError::Full) => drop(from.flush().unwrap()),
                Err(other) => panic!("{other}"),
            }
        }
        from.commit();
        clock.advance(Duration::from_micros(1));
        if number % 7 == 0 {
            from.flush().unwrap();
            to.receive(&mut take).unwrap();
        }
    }
    for _ in 0..100 {
        clock.advance(Duration::from_millis(10));
        from.flush().unwrap();
        to.receive(&mut take).unwrap();
    }
    assert_eq!(from.poll_delay(), None, "packets are still held back");
    // Linux may deliver a packet after `flush` returned, and a UDP socket holds a corrupt packet
    // whose ICRC may be right with another identification, by its own clock.
    testkit::until("every packet has arrived, and none is held", || {
        to.receive(&mut take).unwrap();
        let Counters { received, drops, .. } = to.counters();
        received + drops.total() >= from.counters().sent && to.poll_delay().is_none()
    });
    Run { arrived, sender: from.counters(), receiver: to.counters() }
}

fn run_out(plan: &str) -> Run {
    let (one, mut two) = pair();
    let clock = Clock::manual();
    let mut one = FaultInjector::with_clock(one, plan.parse().unwrap(), clock.clone());
    run(&mut one, &mut two, &clock)
}

fn run_in(plan: &str) -> Run {
    let (mut one, two) = pair();
    let clock = Clock::manual();
    let mut two = FaultInjector::with_clock(two, plan.parse().unwrap(), clock.clone());
    run(&mut one, &mut two, &clock)
}

fn both_ways(plan: &str) -> [Run; 2] {
    [run_out(&format!("dir=out,{plan}")), run_in(&format!("dir=in,{plan}"))]
}

/// Whether a count matches a probability, within five standard deviations.
fn about(count: usize, chance: f64) -> bool {
    let (expected, spread) =
        (f64::from(COUNT) * chance, (f64::from(COUNT) * chance * (1.0 - chance)).sqrt());
    (count as f64 - expected).abs() < 5.0 * spread
}

#[test]
fn without_faults_all_packets_arrive() {
    for run in both_ways("seed=3") {
        assert_eq!(run.arrived, (0..COUNT).collect::<Vec<_>>());
        assert_eq!(run.sender.drops.total() + run.receiver.drops.total(), 0);
    }
}

#[test]
fn the_other_direction_has_no_faults() {
    for run in [run_out("dir=in,loss=50%"), run_in("dir=out,loss=50%")] {
        assert_eq!(run.arrived, (0..COUNT).collect::<Vec<_>>());
    }
}

#[test]
fn packets_are_lost() {
    for run in both_ways("loss=5%") {
        let lost = COUNT as usize - run.arrived.len();
        assert!(about(lost, 0.05), "{lost}");
        let counted = run.sender.drops.injected + run.receiver.drops.injected;
        assert_eq!(counted, lost as u64);
        assert_eq!((run.duplicated(), run.overtaken()), (0, 0));
    }
}

#[test]
fn packets_are_duplicated() {
    for run in both_ways("dup=3%") {
        assert!(about(run.duplicated(), 0.03), "{}", run.duplicated());
        assert_eq!(run.arrived.len(), COUNT as usize + run.duplicated());
    }
}

#[test]
fn packets_are_overtaken() {
    for run in both_ways("reorder=2%") {
        let overtaken = run.overtaken();
        // Adjacent ones count once.
        assert!((200..440).contains(&overtaken), "{overtaken}");
        let mut sorted = run.arrived.clone();
        sorted.sort_unstable();
        assert_eq!(sorted, (0..COUNT).collect::<Vec<_>>(), "no other faults occur");
    }
}

#[test]
fn corruption_is_detected_by_the_receiver() {
    for run in both_ways("corrupt=4%") {
        let found = run.receiver.drops.icrc as usize;
        assert!(about(found, 0.04), "{found}");
        assert_eq!(run.arrived.len(), COUNT as usize - found);
    }
    let run = run_out("cut=4%");
    let found = (run.receiver.drops.icrc + run.receiver.drops.short) as usize;
    assert!(about(found, 0.04) && run.receiver.drops.short > 0, "{:?}", run.receiver.drops);
    assert_eq!(run.arrived.len(), COUNT as usize - found);
}

#[test]
fn corruption_is_detected_on_a_socket_too() {
    for options in ["", "gso=off", "gro=off", "gso=off,gro=off"] {
        let options: UdpOptions = options.parse().unwrap();
        let bind = || Udp::bind("127.0.0.1:0".parse().unwrap(), options).unwrap();
        let clock = Clock::manual();
        let plan = "dir=out,corrupt=2%,cut=2%,loss=1%,seed=5".parse().unwrap();
        let (mut one, mut two) = (FaultInjector::with_clock(bind(), plan, clock.clone()), bind());
        let run = run(&mut one, &mut two, &clock);
        let drops = run.receiver.drops;
        // One truncated packet in 32 768 has an ICRC that fits some identification.
        let found = (drops.icrc + drops.unverified + drops.short) as usize;
        assert!(about(found, 0.04 - 0.0012), "{drops:?}");
        assert_eq!(drops.overrun, 0, "the socket's buffer is large enough for this");
        assert_eq!(run.arrived.len() + found + run.sender.drops.injected as usize, COUNT as usize);
        assert_eq!(run.overtaken(), 0);
    }
}

#[test]
fn the_same_seed_gives_the_same_faults() {
    let plan = "loss=5%,dup=5%,reorder=5%,corrupt=5%,cut=1%,delay=3us,jitter=9us,seed=";
    for runs in [run_out, run_in] {
        let [one, same, other] = ["7", "7", "8"].map(|seed| runs(&format!("{plan}{seed}")).arrived);
        assert_eq!(one, same);
        assert_ne!(one, other);
    }
}

#[test]
fn one_fault_does_not_shift_another() {
    let lost = |run: &Run| {
        let arrived: std::collections::HashSet<u32> = run.arrived.iter().copied().collect();
        (0..COUNT).filter(|number| !arrived.contains(number)).collect::<Vec<_>>()
    };
    let (alone, together) =
        (run_out("loss=5%,seed=1"), run_out("loss=5%,dup=10%,reorder=9%,seed=1"));
    assert_eq!(lost(&alone), lost(&together));
}

#[test]
fn packets_are_delayed() {
    let (one, mut two) = pair();
    let clock = Clock::manual();
    let mut one = FaultInjector::with_clock(one, "delay=10us".parse().unwrap(), clock.clone());
    let flow = one.open(two.local(), 0).unwrap();
    one.reserve(flow, LEN).unwrap().fill(1);
    one.commit();
    one.flush().unwrap();
    assert_eq!(two.receive(&mut |_| ()).unwrap(), 0);
    assert_eq!(one.poll_delay(), Some(Duration::from_micros(10)));
    clock.advance(Duration::from_nanos(9_999));
    one.flush().unwrap();
    assert_eq!(two.receive(&mut |_| ()).unwrap(), 0);
    clock.advance(Duration::from_nanos(1));
    one.flush().unwrap();
    assert_eq!(two.receive(&mut |_| ()).unwrap(), 1);
    assert_eq!(one.poll_delay(), None);
}

#[test]
fn a_delay_alone_keeps_the_order() {
    for run in both_ways("delay=50us") {
        assert_eq!(run.arrived, (0..COUNT).collect::<Vec<_>>());
    }
}

#[test]
fn a_rate_delays_packets_and_drops_the_excess() {
    // A packet of 100 bytes takes 1 µs at 100 MB/s, and one is sent per microsecond.
    let run = run_out("rate=100000000");
    assert_eq!(run.arrived, (0..COUNT).collect::<Vec<_>>());
    let run = run_out("rate=50000000");
    let kept = run.arrived.len();
    let half = COUNT as usize / 2;
    assert!((half..half + delay_queue::MAX_HELD + 10).contains(&kept), "{kept}");
    assert_eq!(run.sender.drops.overrun as usize, COUNT as usize - kept);
    assert_eq!(run.overtaken(), 0);
}

#[test]
fn partitions_come_and_go() {
    for run in both_ways("partition=5ms+2ms") {
        let lost = COUNT as usize - run.arrived.len();
        assert!((1900..2100).contains(&lost), "{lost}");
        assert!(!run.arrived.contains(&6000));
    }
    let (one, mut two) = pair();
    let mut one = FaultInjector::new(one, FaultPlan::default());
    let flow = one.open(two.local(), 0).unwrap();
    let partition = one.partition();
    for (cut, got) in [(false, 1), (true, 0), (false, 1)] {
        if cut {
            partition.cut()
        } else {
            partition.heal()
        }
        one.reserve(flow, LEN).unwrap().fill(1);
        one.commit();
        one.flush().unwrap();
        assert_eq!(two.receive(&mut |_| ()).unwrap(), got);
    }
    assert_eq!(one.counters().drops.injected, 1);
}

#[test]
fn delayed_packets_of_a_closed_flow_are_counted() {
    let (one, two) = pair();
    let clock = Clock::manual();
    let mut one = FaultInjector::with_clock(one, "delay=10us".parse().unwrap(), clock.clone());
    let flow = one.open(two.local(), 0).unwrap();
    one.reserve(flow, LEN).unwrap().fill(1);
    one.commit();
    one.close(flow);
    clock.advance(Duration::from_micros(20));
    one.flush().unwrap();
    assert_eq!(one.counters().drops.no_peer, 1);
}

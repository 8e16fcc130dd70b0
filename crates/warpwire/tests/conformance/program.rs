//! Programs and kernel launches.
#![allow(unsafe_code)] // to launch kernels

use warpwire::error::Kind;
use warpwire::mem::{Condition, CopyAgent, Launch, Program};
use warpwire_apps::pattern::Pattern;

use crate::conformance::fixture::{Fixture, expect_pattern, put_pattern, test_timeout};
use crate::conformance::{child, kernels};
use testkit::cases;

cases!(Fixture; CASES:
    kernels_fill_and_check_memory,
    kernels_notice_a_wrong_byte,
    all_blocks_are_resident,
    kernels_talk_with_the_host_while_they_run,
    kernels_are_captured_into_graphs,
    unknown_kernels_and_empty_grids_are_refused,
    programs_without_the_right_form_are_refused,
    a_kernel_of_another_device_is_refused,
    a_trespassing_kernel_fails_loudly,
);

fn kernels_fill_and_check_memory(f: &Fixture) {
    let (pattern, stream) = (Pattern::load(&f.gpu).unwrap(), f.gpu.stream().unwrap());
    let wrong = f.gpu.alloc_pinned(8).unwrap().word64(0).unwrap();
    wrong.store(0).unwrap();
    for len in [1, 7, 8, 9, 4095, 65_536, 1_000_003] {
        let memory = f.gpu.alloc(len).unwrap();
        pattern.fill(&stream, &memory.whole().unwrap(), len).unwrap();
        pattern.check(&stream, &memory.whole().unwrap(), len, &wrong).unwrap();
        stream.synchronize(test_timeout()).unwrap();
        assert_eq!(wrong.load().unwrap(), 0, "{len} bytes");
        // The kernel's pattern equals the CPU's.
        expect_pattern(&memory, len);
    }
}

fn kernels_notice_a_wrong_byte(f: &Fixture) {
    let (pattern, stream) = (Pattern::load(&f.gpu).unwrap(), f.gpu.stream().unwrap());
    let wrong = f.gpu.alloc_pinned(8).unwrap().word64(0).unwrap();
    let memory = f.gpu.alloc(100_003).unwrap();
    for at in [0, 7, 50_000, 99_999, 100_002] {
        put_pattern(&memory, 2);
        let mut byte = [0];
        memory.read(at, &mut byte).unwrap();
        memory.write(at, &[byte[0] ^ 1]).unwrap();
        wrong.store(0).unwrap();
        pattern.check(&stream, &memory.whole().unwrap(), 2, &wrong).unwrap();
        stream.synchronize(test_timeout()).unwrap();
        assert_eq!(wrong.load().unwrap(), 1, "byte {at}");
    }
    let error = pattern.fill(&stream, &memory.region(3, 8).unwrap(), 2).unwrap_err();
    assert_eq!(error.kind(), &Kind::Misaligned);
    let narrow = memory.word32(0).unwrap();
    let error = pattern.check(&stream, &memory.whole().unwrap(), 2, &narrow).unwrap_err();
    assert_eq!(error.kind(), &Kind::InvalidArgument);
}

fn all_blocks_are_resident(f: &Fixture) {
    let module = kernels::load(&f.gpu).unwrap();
    let kernel = module.kernel("meet").unwrap();
    assert_eq!(kernel.name(), "meet");
    let memory = f.gpu.alloc(8).unwrap();
    let arrived = memory.word64(0).unwrap();
    arrived.store(0).unwrap();
    let stream = f.gpu.stream().unwrap();
    let launch = Launch::new(&kernel).grid(64).threads(32).region(&memory.whole().unwrap());
    // SAFETY: the kernel accesses only the word in its argument.
    unsafe { stream.launch(launch) }.unwrap();
    stream.synchronize(test_timeout()).unwrap();
    assert_eq!(arrived.load().unwrap(), 64);
}

fn kernels_talk_with_the_host_while_they_run(f: &Fixture) {
    let kernel = kernels::load(&f.gpu).unwrap().kernel("answer").unwrap();
    let pinned = f.gpu.alloc_pinned(128).unwrap();
    let (ask, answer) = (pinned.word64(0).unwrap(), pinned.word64(64).unwrap());
    ask.store(0).unwrap();
    answer.store(0).unwrap();
    let stream = f.gpu.stream().unwrap();
    let rounds = 100;
    let launch = Launch::new(&kernel).region(ask.region()).region(answer.region()).value(rounds);
    // SAFETY: the kernel accesses only the two words in its arguments.
    unsafe { stream.launch(launch) }.unwrap();
    for round in 1..=rounds {
        assert!(!stream.is_idle().unwrap());
        ask.store(round).unwrap();
        let start = std::time::Instant::now();
        while answer.load().unwrap() < round {
            assert!(start.elapsed() < test_timeout(), "no answer to {round}");
            std::thread::yield_now();
        }
    }
    stream.synchronize(test_timeout()).unwrap();
}

fn kernels_are_captured_into_graphs(f: &Fixture) {
    let (pattern, stream) = (Pattern::load(&f.gpu).unwrap(), f.gpu.stream().unwrap());
    let memory = f.gpu.alloc(40_000).unwrap();
    let wrong = f.gpu.alloc_pinned(8).unwrap().word64(0).unwrap();
    wrong.store(0).unwrap();
    let graph = stream
        .capture(|stream| {
            stream.fill(&memory.whole()?, 0)?;
            pattern.fill(stream, &memory.whole()?, 77)?;
            pattern.check(stream, &memory.whole()?, 77, &wrong)?;
            stream.wait_value(&wrong, Condition::Equal, 0)
        })
        .unwrap();
    drop(pattern);
    for _ in 0..20 {
        stream.replay(&graph).unwrap();
    }
    stream.synchronize(test_timeout()).unwrap();
    expect_pattern(&memory, 77);
}

fn unknown_kernels_and_empty_grids_are_refused(f: &Fixture) {
    let module = kernels::load(&f.gpu).unwrap();
    for name in ["dance", "", "me\0et"] {
        let error = module.kernel(name).unwrap_err();
        assert_eq!(error.kind(), &Kind::InvalidArgument, "{error}");
    }
    let kernel = module.kernel("meet").unwrap();
    let stream = f.gpu.stream().unwrap();
    for launch in [Launch::new(&kernel).grid(0), Launch::new(&kernel).threads(0)] {
        // SAFETY: the launch is refused.
        let error = unsafe { stream.launch(launch) }.unwrap_err();
        assert_eq!(error.kind(), &Kind::InvalidArgument);
    }
    let memory = f.gpu.alloc(8).unwrap();
    let huge = Launch::new(&kernel).threads(1 << 20).grid(1 << 30).region(&memory.whole().unwrap());
    // SAFETY: the launch is refused: it exceeds every device's limits of threads per block and of
    // blocks.
    assert!(unsafe { stream.launch(huge) }.is_err());
    stream.synchronize(test_timeout()).unwrap();
}

fn programs_without_the_right_form_are_refused(f: &Fixture) {
    let empty = Program::new("nothing");
    let error = f.gpu.load(&empty).unwrap_err();
    assert_eq!(error.kind(), &Kind::Unsupported, "{error}");
}

fn a_kernel_of_another_device_is_refused(f: &Fixture) {
    let Some(other) = f.other() else { return };
    let kernel = kernels::load(&f.gpu).unwrap().kernel("meet").unwrap();
    let stream = other.stream().unwrap();
    // SAFETY: the launch is refused.
    let error = unsafe { stream.launch(Launch::new(&kernel)) }.unwrap_err();
    assert!(error.to_string().contains("another device"), "{error}");
}

/// Runs in a child process, because on CUDA the fault destroys the context.
fn a_trespassing_kernel_fails_loudly(f: &Fixture) {
    child::Task::Trespass(f.backend).spawn().expect_success();
}

pub fn trespass(f: &Fixture) {
    let agent = CopyAgent::start(&f.gpu).unwrap();
    let (device, host) = (f.gpu.alloc(64).unwrap(), f.gpu.alloc_pinned(64).unwrap());
    agent.copy(&host.whole().unwrap(), &device.whole().unwrap()).unwrap();
    // Loading code is refused while the agent's kernel runs; it exits after a second without work.
    std::thread::sleep(std::time::Duration::from_millis(1500));
    let kernel = kernels::load(&f.gpu).unwrap().kernel("trespass").unwrap();
    let stream = f.gpu.stream().unwrap();
    // SAFETY: deliberately unsound: the address is not mapped, which the device must detect. It
    // affects this child process only.
    unsafe { stream.launch(Launch::new(&kernel).value(0x10_0000_0000)) }.unwrap();
    let error = stream.synchronize(test_timeout()).unwrap_err();
    assert!(matches!(error.kind(), Kind::StreamFailed | Kind::DeviceLost), "{error:?}");
    let memory = f.gpu.alloc(8);
    let again = memory.and_then(|memory| stream.fill(&memory.whole()?, 0)).unwrap_err();
    assert!(matches!(again.kind(), Kind::StreamFailed | Kind::DeviceLost), "{again:?}");
    // Where the whole context is lost, the agent is too: it must fail, not hang.
    if matches!(again.kind(), Kind::DeviceLost) {
        let copied = agent.copy(&host.whole().unwrap(), &device.whole().unwrap());
        assert_eq!(copied.unwrap_err().kind(), &Kind::DeviceLost);
    }
}

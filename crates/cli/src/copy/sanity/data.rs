//! Checks of windows and of data copied through them.

use std::time::{Duration, Instant};

use warpwire::error::Kind;
use warpwire::mem::copy::{Copier, CopyDirection, Routine};
use warpwire::mem::{Allocation, MappingType, WindowOptions};
use warpwire_apps::{
    pattern::{self, Pattern},
    pingpong::PingPong,
};

use super::{CheckError, CheckResult, CheckTarget, ensure};

const TIMEOUT: Duration = Duration::from_secs(20);

/// `len` bytes of the pattern with `seed`.
pub(super) fn bytes(len: usize, seed: u64) -> Vec<u8> {
    let mut bytes = vec![0; len];
    pattern::fill_bytes(&mut bytes, seed, 0);
    bytes
}

/// Device memory, read with the device's copy.
fn found(memory: &Allocation, offset: u64, len: usize) -> Result<Vec<u8>, CheckError> {
    let mut found = vec![0; len];
    memory.read(offset, &mut found)?;
    Ok(found)
}

pub(super) fn opens_and_closes(target: &CheckTarget) -> CheckResult {
    let memory = target.alloc(256 << 10)?;
    for _ in 0..3 {
        let window = memory.window()?;
        let same = (window.len(), window.address()) == (memory.len(), memory.address());
        ensure(same, || format!("{window:?} is not of {memory:?}"))?;
    }
    Ok(())
}

pub(super) fn unaligned_ranges(target: &CheckTarget) -> CheckResult {
    let (before, memory, after) =
        (target.alloc(1 << 20)?, target.alloc(1 << 20)?, target.alloc(1 << 20)?);
    let all = bytes(1 << 20, 1);
    memory.write(0, &all)?;
    let options = WindowOptions::from_env()?;
    let mut windows = Vec::new();
    for (offset, len) in [(1, 1), (4095, 2), (65_535, 70_001), (100, 8), ((1 << 20) - 3, 3)] {
        windows.push((offset, memory.window_with(offset, len, &options)?));
    }
    drop((before, after));
    for (offset, window) in windows {
        let mut seen = vec![0; window.len() as usize];
        window.read(0, &mut seen)?;
        let wanted = &all[offset as usize..][..seen.len()];
        ensure(seen == wanted, || format!("wrong data at offset {offset}"))?;
    }
    Ok(())
}

pub(super) fn small_neighbours(target: &CheckTarget) -> CheckResult {
    let small = (0..8).map(|_| target.alloc(8)).collect::<Result<Vec<_>, _>>()?;
    for (number, memory) in (1_u64..).zip(&small) {
        memory.window()?.write(0, &number.to_le_bytes())?;
    }
    for (number, memory) in (1_u64..).zip(&small) {
        let seen = found(memory, 0, 8)?;
        ensure(seen == number.to_le_bytes(), || format!("buffer {number} holds {seen:?}"))?;
    }
    Ok(())
}

pub(super) fn device_sees_cpu(target: &CheckTarget) -> CheckResult {
    const LEN: usize = 4096;
    let memory = target.alloc(LEN as u64)?;
    let window = memory.window()?;
    for round in 0..1000 {
        let sent = bytes(LEN, round);
        window.write(0, &sent)?;
        ensure(found(&memory, 0, LEN)? == sent, || format!("wrong data in round {round}"))?;
    }
    Ok(())
}

pub(super) fn cpu_sees_device(target: &CheckTarget) -> CheckResult {
    let memory = target.alloc(1 << 20)?;
    let (pattern, stream) = (Pattern::load(&target.device)?, target.device.stream()?);
    let window = memory.window()?;
    let mut seen = vec![0; 1 << 20];
    for seed in 1..=10 {
        pattern.fill(&stream, &memory.whole()?, seed)?;
        stream.synchronize(TIMEOUT)?;
        window.read(0, &mut seen)?;
        ensure(seen == bytes(1 << 20, seed), || format!("wrong data in round {seed}"))?;
    }
    Ok(())
}

pub(super) fn odd_offsets(target: &CheckTarget) -> CheckResult {
    const LEN: usize = 20_000;
    let memory = target.alloc(LEN as u64)?;
    let window = memory.window()?;
    let data = bytes(LEN, 5);
    for unit in [4, 1] {
        for step in 1..=10 {
            let shift = unit * step;
            for (on_window, on_host) in [(shift, 0), (0, shift), (shift, shift)] {
                let position = || format!("window + {on_window}, host + {on_host}");
                let len = 10_001 - shift;
                let part = &data[on_host..][..len];
                memory.write(0, &[0xee; LEN])?;
                window.write(on_window as u64, part)?;
                let all = found(&memory, 0, LEN)?;
                ensure(&all[on_window..on_window + len] == part, || {
                    format!("{}: wrong data", position())
                })?;
                let around = all[..on_window].iter().chain(&all[on_window + len..]);
                ensure(around.copied().all(|byte| byte == 0xee), || {
                    format!("{}: adjacent bytes changed", position())
                })?;
                let mut back = vec![0; LEN];
                window.read(on_window as u64, &mut back[on_host..][..len])?;
                ensure(&back[on_host..][..len] == part, || {
                    format!("{}: wrong data read", position())
                })?;
            }
        }
    }
    Ok(())
}

pub(super) fn mapping_types_agree(target: &CheckTarget) -> CheckResult {
    let memory = target.alloc(64 << 10)?;
    let types = [MappingType::WriteCombining, MappingType::Cached, MappingType::Device];
    let mut windows = Vec::new();
    for mapping in types {
        let options = WindowOptions::from_env()?.with_mapping(mapping);
        if let Ok(window) = memory.window_with(0, memory.len(), &options) {
            windows.push(window);
        }
    }
    if windows.len() < 2 {
        let only = memory.window()?.mapping();
        return Err(CheckError::Waived(format!("this platform maps device memory as {only} only")));
    }
    for (seed, writer) in (1..).zip(&windows) {
        let sent = bytes(64 << 10, seed);
        writer.write(0, &sent)?;
        writer.flush();
        for reader in &windows {
            let mut seen = vec![0; 64 << 10];
            reader.read(0, &mut seen)?;
            let (from, to) = (writer.mapping(), reader.mapping());
            ensure(seen == sent, || format!("{to} does not show what {from} wrote"))?;
        }
    }
    Ok(())
}

pub(super) fn reports_path(target: &CheckTarget) -> CheckResult {
    let window = target.alloc(4096)?.window()?;
    ensure(!window.path().to_string().is_empty(), || "the path has no name".to_owned())?;
    for refusal in window.rejected_paths() {
        let why = refusal.why.reason();
        ensure(!why.is_empty(), || format!("{} was refused without a reason", refusal.path))?;
        ensure(refusal.path != window.path(), || {
            format!("{} was refused and taken", refusal.path)
        })?;
    }
    Ok(())
}

pub(super) fn every_routine(target: &CheckTarget) -> CheckResult {
    const LEN: usize = 20_000;
    let memory = target.alloc(LEN as u64)?;
    let (window, data) = (memory.window()?, bytes(9000, 7));
    for routine in Routine::available() {
        for (at, len) in [(0, 9000), (1, 64), (63, 4097), (5, 7), (8, 8), (4, 4), (2, 1), (100, 0)]
        {
            let position = || format!("{routine}, {len} bytes at {at}");
            memory.write(0, &[0xee; LEN])?;
            window.write_with(routine, at as u64, &data[..len])?;
            let all = found(&memory, 0, LEN)?;
            ensure(all[at..at + len] == data[..len], || format!("{}: wrong data", position()))?;
            let around = all[..at].iter().chain(&all[at + len..]);
            ensure(around.copied().all(|byte| byte == 0xee), || {
                format!("{}: adjacent bytes changed", position())
            })?;
            let mut back = vec![0; len];
            window.read_with(routine, at as u64, &mut back)?;
            ensure(back == data[..len], || format!("{}: wrong data read", position()))?;
        }
    }
    Ok(())
}

pub(super) fn best_method(target: &CheckTarget) -> CheckResult {
    let memory = target.alloc((4 << 20) + 64)?;
    let copier = Copier::new(&memory)?;
    for (round, size) in (0..=22).map(|step| 1_usize << step).enumerate() {
        for at in [0, 13] {
            let sent = bytes(size, round as u64 + at);
            let method = copier.method(CopyDirection::Write, size as u64);
            copier.write(at, &sent)?;
            ensure(found(&memory, at, size)? == sent, || {
                format!("{size} bytes by {method}: wrong data")
            })?;
            let (mut back, method) =
                (vec![0; size], copier.method(CopyDirection::Read, size as u64));
            copier.read(at, &mut back)?;
            ensure(back == sent, || format!("{size} bytes by {method}: wrong data read"))?;
        }
    }
    Ok(())
}

pub(super) fn single_words(target: &CheckTarget) -> CheckResult {
    let memory = target.alloc(64)?;
    let window = memory.window()?;
    window.bytes().store_u32(4, 0x1122_3344)?;
    window.bytes().store_u64(8, u64::MAX - 1)?;
    window.flush();
    let narrow = memory.word32(4)?.load()?;
    ensure(narrow == 0x1122_3344, || format!("the device sees {narrow:#x}"))?;
    let wide = memory.word64(8)?.load()?;
    ensure(wide == u64::MAX - 1, || format!("the device sees {wide:#x}"))?;
    memory.word64(16)?.store(77)?;
    let seen = window.bytes().load_u64(16)?;
    ensure(seen == 77, || format!("the window shows {seen}"))?;
    let refused = window.bytes().load_u64(3).is_err_and(|e| *e.kind() == Kind::Misaligned);
    ensure(refused, || "a misaligned word was not refused".to_owned())
}

pub(super) fn running_kernel(target: &CheckTarget) -> CheckResult {
    const ROUNDS: u64 = 200;
    let memory = target.alloc(8)?;
    let kernel = PingPong::load(&target.device)?;
    let (ask, window) = (memory.word64(0)?, memory.window()?);
    let answer = target.device.alloc_pinned(8)?.word64(0)?;
    ask.store(0)?;
    answer.store(0)?;
    let stream = target.device.stream()?;
    kernel.start(&stream, &ask, &answer, ROUNDS)?;
    for round in 1..=ROUNDS {
        window.write(0, &round.to_le_bytes())?;
        let start = Instant::now();
        while answer.load()? < round {
            ensure(start.elapsed() < TIMEOUT, || format!("no reply to round {round}"))?;
            std::hint::spin_loop();
        }
    }
    Ok(stream.synchronize(TIMEOUT)?)
}

pub(super) fn wrong_ranges(target: &CheckTarget) -> CheckResult {
    let memory = target.alloc(4096)?;
    let options = WindowOptions::from_env()?;
    let refused = |offset, len, kind: Kind| {
        let error = memory.window_with(offset, len, &options).err();
        let right = error.as_ref().is_some_and(|error| *error.kind() == kind);
        ensure(right, || format!("{len} bytes at {offset}: {error:?}, not {kind:?}"))
    };
    refused(0, 0, Kind::InvalidArgument)?;
    refused(0, 4097, Kind::OutOfRange)?;
    refused(u64::MAX, 2, Kind::OutOfRange)?;
    let window = memory.window_with(100, 50, &options)?;
    let past = window.write(49, &[1, 2]).is_err() && window.read(u64::MAX, &mut [0]).is_err();
    ensure(past, || "a copy past the end was not refused".to_owned())?;
    let pinned = target.device.alloc_pinned(64)?;
    ensure(pinned.window().is_err(), || "host memory was given a window".to_owned())?;
    drop(window);
    memory.free()?;
    refused(0, 64, Kind::Freed)?;
    ensure(memory.free().is_err(), || "memory was freed twice".to_owned())
}

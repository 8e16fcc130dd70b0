//! Test vectors from hardware header files, the habits of every known writer, and arbitrary bytes.

use proptest::prelude::*;

use super::*;

fn hex(text: &str) -> Vec<u8> {
    let digits: Vec<u8> =
        text.chars().filter_map(|c| c.to_digit(16)).map(|digit| digit as u8).collect();
    digits.chunks(2).map(|pair| pair[0] << 4 | pair[1]).collect()
}

const WRITE: &str = "00000508 00012303 00000008 00000000 | 00007f00 00001000 00001234 00000000 | \
                     00000100 00005678 00007fee 00002000";
const ADD: &str = "00000612 00012304 00000008 00000000 | 00007f00 00002000 00001234 00000000 | \
                   00000000 00000007 00000000 00000000 | 00000008 00005678 00007fee 00003000";

#[test]
fn write_wqe_matches_the_hardware_format() {
    let mut scratch = Scratch([0xaa; MAX_WQE_LEN]);
    let image = Builder::new(&mut scratch, WqeOpcode::RdmaWrite, 5, 0x123)
        .signaled()
        .remote(0x7f00_0000_1000, 0x1234)
        .data(256, 0x5678, 0x7fee_0000_2000)
        .finish()
        .unwrap();
    assert_eq!(image.bytes(), hex(WRITE));
    let wqe = Wqe::parse(image.bytes()).unwrap();
    assert_eq!((wqe.control.index, wqe.control.qpn), (5, 0x123));
    assert!(wqe.control.is_signaled() && wqe.control.is_at(5) && !wqe.control.is_at(6));
    let Work::Write { remote, imm: None, payload } = wqe.work else { panic!("{wqe:?}") };
    assert_eq!(remote, Remote { address: 0x7f00_0000_1000, rkey: 0x1234 });
    let data = Data { len: 256, lkey: 0x5678, address: 0x7fee_0000_2000 };
    assert_eq!(payload.data_segments().collect::<Vec<_>>(), [DataSegment::Memory(data)]);
}

#[test]
fn fetch_add_wqe_matches_the_hardware_format() {
    let mut scratch = Scratch([0xaa; MAX_WQE_LEN]);
    let add = Atomic::FetchAdd { add: 7 };
    let image = Builder::new(&mut scratch, WqeOpcode::FetchAdd, 6, 0x123)
        .signaled()
        .remote(0x7f00_0000_2000, 0x1234)
        .atomic(&add)
        .data(8, 0x5678, 0x7fee_0000_3000)
        .finish()
        .unwrap();
    assert_eq!(image.bytes(), hex(ADD));
    let Work::Atomic { op, into, .. } = Wqe::parse(image.bytes()).unwrap().work else { panic!() };
    assert_eq!((op, into.len()), (add, 8));
    // Both doorbell styles, and the doorbell record.
    assert_eq!(image.doorbell().to_vec(), hex("00000612 00012304"));
    assert_eq!(Doorbell::next(0x123, 7).to_vec(), hex("00000700 00012300"));
    assert_eq!(Doorbell::of(&image.segments()[0]), image.doorbell());
    for bytes in [image.doorbell(), Doorbell::next(0x123, 7)] {
        let doorbell = Doorbell::parse(bytes);
        assert_eq!((doorbell.producer(), doorbell.qpn), (7, 0x123));
    }
    assert_eq!(DoorbellRecord::word(7).to_vec(), hex("00000007"));
}

#[test]
fn sizes_are_what_hardware_has() {
    assert_eq!((SEGMENT_LEN, WQEBB_LEN, size_of::<EncodedCqe>()), (16, 64, 64));
    const { assert!(MAX_SEGMENTS * SEGMENT_LEN <= MAX_WQE_LEN) };
    assert_eq!(size_of::<Scratch>(), MAX_WQE_LEN);
    // Per-WQE state of the engine stays small.
    assert_eq!(size_of::<Doorbell>(), 8);
    assert!(size_of::<ControlSegment>() <= 20, "{}", size_of::<ControlSegment>());
    assert!(size_of::<Wqe<'_>>() <= 112, "{}", size_of::<Wqe<'_>>());
    assert!(size_of::<Cqe>() <= 64, "{}", size_of::<Cqe>());
}

#[test]
fn ud_wqe_matches_the_hardware_format() {
    let mut scratch = Scratch([0xaa; MAX_WQE_LEN]);
    let to = AddressVector {
        traffic_class: 3,
        flow_label: 0x12345,
        ..AddressVector::new("10.0.0.2:5000".parse().unwrap(), 0x1234_5678, 0x8000_0011)
    };
    let entry = Builder::new(&mut scratch, WqeOpcode::SendImm, 5, 0x123).imm([9; 4]).address(&to);
    let image = entry.data(256, 0x5678, 0x7fee_0000_2000).finish().unwrap();
    let wanted = "0000050b 00012305 00000000 09090909 | 80000011 00000000 80345678 00001388 | \
                  00000000 00000000 00000340 40012345 | 00000000 00000000 0000ffff 0a000002 | \
                  00000100 00005678 00007fee 00002000";
    assert_eq!(image.bytes(), hex(wanted));
    let (wqe, address) = Wqe::parse_datagram(image.bytes()).unwrap();
    assert_eq!(address, Some(AddressVector { qpn: 0x34_5678, ..to }));
    assert_eq!(to.peer(), "10.0.0.2:5000".parse().unwrap());
    let Work::Send { kind: SendKind::Imm([9, 9, 9, 9]), payload } = wqe.work else {
        panic!("{wqe:?}")
    };
    assert_eq!(payload.len(), 256);
    // 0 in the LID field means the default port.
    let six = AddressVector::new("[2001:db8::1]:4791".parse().unwrap(), 1, 2);
    assert_eq!(six.encode()[14..16], [0, 0]);
    assert_eq!(AddressVector::parse(&six.encode()), six);
    assert_eq!(six.peer(), "[2001:db8::1]:4791".parse().unwrap());
}

#[test]
fn wqes_that_need_a_connection_are_rejected_on_ud() {
    for (opcode, bytes) in every_operation() {
        let parsed = Wqe::parse_datagram(&bytes);
        match opcode {
            WqeOpcode::Nop | WqeOpcode::Wait | WqeOpcode::Dump => {
                assert_eq!(parsed.unwrap().1, None)
            }
            // The bytes of the address vector are data, or missing.
            WqeOpcode::Send | WqeOpcode::SendImm => {
                assert_eq!(parsed.unwrap_err(), WqeError::MissingSegment);
            }
            other => {
                let refused = WqeError::NotConnected(other.code());
                assert_eq!(parsed.unwrap_err(), refused);
                assert_eq!(refused.status(), Status::LocalQpOperation);
                assert!(refused.to_string().contains("needs a connection"));
            }
        }
    }
    assert_eq!(Wqe::parse_datagram(&[0; 64]).unwrap_err(), WqeError::Empty);
    assert_eq!(Wqe::parse_datagram(&[]).unwrap_err(), WqeError::Truncated);
}

#[test]
fn opcodes_round_trip() {
    for code in 0..=u8::MAX {
        assert_eq!(WqeOpcode::from_code(code).code(), code);
    }
    assert_eq!(WqeOpcode::Umr.to_string(), "UMR");
    assert_eq!(WqeOpcode::from_code(0xee).to_string(), "opcode 0xee");
}

/// A complete WQE of each opcode.
fn every_operation() -> Vec<(WqeOpcode, Vec<u8>)> {
    let mut scratch = Scratch::default();
    let eight = AtomicWidth::Eight;
    let masked = |width| Atomic::MaskedCompareSwap {
        width,
        compare: 0x11,
        swap: 0x22,
        compare_mask: 0x33,
        swap_mask: 0x44,
    };
    let atomics = [
        (WqeOpcode::CompareSwap, Atomic::CompareSwap { compare: 1, swap: 2 }),
        (WqeOpcode::FetchAdd, Atomic::FetchAdd { add: 3 }),
        (WqeOpcode::MaskedCompareSwap, masked(AtomicWidth::Four)),
        (WqeOpcode::MaskedCompareSwap, masked(eight)),
        (WqeOpcode::MaskedFetchAdd, Atomic::MaskedFetchAdd { width: eight, add: 4, boundary: 5 }),
    ];
    let mut all = Vec::new();
    for (opcode, op) in atomics {
        let built = Builder::new(&mut scratch, opcode, 1, 2).remote(8, 9).atomic(&op).data(8, 3, 4);
        let bytes = built.finish().unwrap().bytes().to_vec();
        let Work::Atomic { op: read, .. } = Wqe::parse(&bytes).unwrap().work else { panic!() };
        assert_eq!(read, op);
        all.push((opcode, bytes));
    }
    for opcode in [WqeOpcode::Nop, WqeOpcode::Send, WqeOpcode::SendImm, WqeOpcode::SendInvalidate] {
        let built = Builder::new(&mut scratch, opcode, 1, 2).imm([1, 2, 3, 4]).data(8, 3, 4);
        all.push((opcode, built.finish().unwrap().bytes().to_vec()));
    }
    for opcode in [WqeOpcode::RdmaWrite, WqeOpcode::RdmaWriteImm, WqeOpcode::RdmaRead] {
        let built = Builder::new(&mut scratch, opcode, 1, 2).remote(8, 9).data(8, 3, 4);
        all.push((opcode, built.finish().unwrap().bytes().to_vec()));
    }
    let wait = Builder::new(&mut scratch, WqeOpcode::Wait, 1, 2).wait(0x77, 0x1_0005);
    all.push((WqeOpcode::Wait, wait.finish().unwrap().bytes().to_vec()));
    for bind in binds() {
        let built = Builder::new(&mut scratch, WqeOpcode::BindMw, 1, 2).bind(&bind);
        let bytes = built.finish().unwrap().bytes().to_vec();
        let Work::Bind(read) = Wqe::parse(&bytes).unwrap().work else { panic!() };
        assert_eq!((read, bytes.len()), (bind, 48));
        all.push((WqeOpcode::BindMw, bytes));
    }
    let built =
        Builder::new(&mut scratch, WqeOpcode::LocalInvalidate, 1, 2).local_invalidate(0x1234_5678);
    let bytes = built.finish().unwrap().bytes().to_vec();
    assert!(matches!(Wqe::parse(&bytes).unwrap().work, Work::LocalInvalidate(0x1234_5678)));
    all.push((WqeOpcode::LocalInvalidate, bytes));
    let dump = Builder::new(&mut scratch, WqeOpcode::Dump, 1, 2).data(8, 3, 4);
    all.push((WqeOpcode::Dump, dump.finish().unwrap().bytes().to_vec()));
    all
}

/// Binds of both types, with every right.
fn binds() -> impl Iterator<Item = MwBind> {
    let (lkey, address, len) = (0x99, 0x7f00_0000_1001, 1 << 40);
    [MwType::Type1, MwType::Type2].into_iter().flat_map(move |kind| {
        let rights = [
            Access::NONE,
            Access::REMOTE_READ,
            Access::REMOTE_WRITE,
            Access::REMOTE_ATOMIC | Access::ZERO_BASED,
        ];
        rights.into_iter().map(move |access| MwBind {
            kind,
            rkey: 0x1234_5678,
            lkey,
            address,
            len,
            access,
        })
    })
}

#[test]
fn truncated_wqes_are_rejected_or_have_less_payload() {
    for (opcode, bytes) in every_operation() {
        let whole = Wqe::parse(&bytes).unwrap();
        assert_eq!(whole.control.opcode, opcode);
        for segments in 0..bytes.len() / SEGMENT_LEN {
            let cut = Wqe::parse(&bytes[..segments * SEGMENT_LEN]).unwrap_err();
            assert_eq!(cut, WqeError::Truncated, "{opcode}");
            let mut shorter = bytes.clone();
            shorter[7] = segments as u8;
            match (Wqe::parse(&shorter), segments) {
                (Err(refused), 0) => assert_eq!(refused, WqeError::Empty),
                (Err(refused), _) => assert!(
                    matches!(refused, WqeError::MissingSegment | WqeError::ShortResult),
                    "{opcode} {segments} {refused}"
                ),
                (Ok(wqe), _) => assert!(matches!(
                    wqe.work,
                    Work::Nop
                        | Work::Send { .. }
                        | Work::Write { .. }
                        | Work::Read { .. }
                        | Work::Dump { .. }
                        | Work::LocalInvalidate(_)
                )),
            }
        }
    }
}

#[test]
fn immediates_and_keys_keep_their_bytes() {
    let sent = |opcode| {
        let mut scratch = Scratch::default();
        let image = Builder::new(&mut scratch, opcode, 0, 0).invalidate(0x0102_0304);
        let bytes = image.finish().unwrap().bytes().to_vec();
        match Wqe::parse(&bytes).unwrap().work {
            Work::Send { kind, .. } => kind,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(sent(WqeOpcode::SendImm), SendKind::Imm([1, 2, 3, 4]));
    assert_eq!(sent(WqeOpcode::SendInvalidate), SendKind::Invalidate(0x0102_0304));
    assert_eq!(sent(WqeOpcode::Send), SendKind::Plain);
}

#[test]
fn flags_are_read_as_they_are_written() {
    let read = |bits: u8| {
        let mut bytes = [0; SEGMENT_LEN];
        bytes[11] = bits;
        ControlSegment::parse(&bytes)
    };
    let cq_update = [0, 4, 8, 12].map(|bits| read(bits).cq_update);
    assert_eq!(cq_update[1], CqUpdate::OnFirstError);
    assert_eq!([0, 4, 8, 12].map(|bits| read(bits).is_signaled()), [false, false, true, true]);
    assert!(read(2).solicited && !read(1).solicited);
    // The fence of verbs, that of device code, and undefined values.
    for (bits, fence) in [
        (0x00, Fence::None),
        (0x20, Fence::None),
        (0x40, Fence::Reads),
        (0x60, Fence::All),
        (0x80, Fence::Reads),
        (0xa0, Fence::All),
        (0xe0, Fence::All),
    ] {
        assert_eq!(Fence::from(read(bits).fence), fence, "{bits:#x}");
        assert_eq!(Fence::from(FenceMode::from(fence)), fence);
    }
    let mut scratch = Scratch::default();
    let image = Builder::new(&mut scratch, WqeOpcode::Nop, 0, 0).fence(FenceMode::Both).solicited();
    assert_eq!(image.finish().unwrap().bytes()[11], 0x82);
}

#[test]
fn nop_ignores_extra_segments() {
    let mut bytes = [0xee; 32];
    bytes[..16].copy_from_slice(&hex("00000900 00012302 00000008 00000000"));
    assert!(matches!(Wqe::parse(&bytes).unwrap().work, Work::Nop));
}

#[test]
fn unsupported_opcodes_are_rejected_with_their_code() {
    for code in [0x19, 0x20, 0x25, 0x2f, 0x02, 0xff] {
        let mut bytes = [0; 256];
        bytes[3] = code;
        bytes[7] = 7;
        let refused = Wqe::parse(&bytes).unwrap_err();
        assert_eq!(refused, WqeError::WqeOpcode(code));
        assert_eq!(refused.status(), Status::LocalQpOperation);
    }
}

#[test]
fn inline_data_is_bounded_and_never_a_destination() {
    let mut scratch = Scratch::default();
    let image = Builder::new(&mut scratch, WqeOpcode::Send, 0, 0).inline(&[7; 29]);
    let mut bytes = image.finish().unwrap().bytes().to_vec();
    assert_eq!(bytes.len(), 64);
    assert_eq!(Wqe::parse(&bytes).unwrap().control.segments, 4);
    bytes[16..20].copy_from_slice(&(INLINE_BIT | 44).to_be_bytes());
    assert!(Wqe::parse(&bytes).is_ok());
    bytes[16..20].copy_from_slice(&(INLINE_BIT | 45).to_be_bytes());
    assert_eq!(Wqe::parse(&bytes).unwrap_err(), WqeError::InlineOverrun);
    bytes[16..20].copy_from_slice(&u32::MAX.to_be_bytes());
    assert_eq!(Wqe::parse(&bytes).unwrap_err(), WqeError::InlineOverrun);
    let image = Builder::new(&mut scratch, WqeOpcode::RdmaRead, 0, 0).remote(0, 0).inline(&[7; 8]);
    let bytes = image.finish().unwrap().bytes();
    assert_eq!(Wqe::parse(bytes).unwrap_err(), WqeError::InlineTarget);
}

const INLINE_BIT: u32 = 1 << 31;

#[test]
fn message_length_is_bounded() {
    let mut scratch = Scratch::default();
    let most = i32::MAX as u32;
    let longest = Builder::new(&mut scratch, WqeOpcode::Send, 0, 0).data(most, 1, 0).data(1, 1, 0);
    assert!(Wqe::parse(longest.finish().unwrap().bytes()).is_ok());
    let longer = Builder::new(&mut scratch, WqeOpcode::Send, 0, 0).data(most, 1, 0).data(2, 1, 0);
    let refused = Wqe::parse(longer.finish().unwrap().bytes()).unwrap_err();
    assert_eq!((refused, refused.status()), (WqeError::TooLong, Status::LocalLength));
}

#[test]
fn wqe_length_is_bounded() {
    let build = |segments: usize, inline: usize| {
        let mut scratch = Scratch::default();
        let start = Builder::new(&mut scratch, WqeOpcode::Send, 0, 0);
        let full = (0..segments).fold(start, |builder, _| builder.data(1, 1, 1));
        let full = if inline == 0 { full } else { full.inline_with(inline, |slot| slot.fill(1)) };
        full.finish().map(|image| image.wqebbs())
    };
    assert_eq!(build(62, 0), Ok(16));
    assert_eq!(build(63, 0), Err(WqeTooLong));
    assert_eq!(build(0, 62 * 16 - 4), Ok(16));
    assert_eq!(build(0, 62 * 16 - 3), Err(WqeTooLong));
    assert_eq!(build(0, usize::MAX), Err(WqeTooLong));
    assert_eq!(build(61, 12), Ok(16));
    let mut scratch = Scratch::default();
    let too_long = Builder::new(&mut scratch, WqeOpcode::Send, 0, 0).data(1 << 31, 1, 1);
    assert_eq!(too_long.finish().err(), Some(WqeTooLong));
}

#[test]
fn masked_atomics_need_their_width_and_room_for_the_old_value() {
    let mut all = every_operation();
    let (_, masked) = all.iter_mut().find(|(op, _)| *op == WqeOpcode::MaskedFetchAdd).unwrap();
    for opmod in (0..=u8::MAX).filter(|opmod| !matches!(opmod, 8 | 9)) {
        masked[0] = opmod;
        assert_eq!(Wqe::parse(masked).unwrap_err(), WqeError::AtomicWidth(opmod));
    }
    masked[0] = 9;
    masked[51] = 7;
    assert_eq!(Wqe::parse(masked).unwrap_err(), WqeError::ShortResult);
    masked[0] = 8;
    assert!(Wqe::parse(masked).is_ok());
}

#[test]
fn four_byte_masked_atomics_have_their_own_layout() {
    let text = "08000114 00000204 00000000 00000000 | 00000000 00000008 00000009 00000000 | \
                00000022 00000011 00000044 00000033 | 00000004 00000003 00000000 00000004";
    let bytes = hex(text);
    let Work::Atomic { op, .. } = Wqe::parse(&bytes).unwrap().work else { panic!() };
    let expected = Atomic::MaskedCompareSwap {
        width: AtomicWidth::Four,
        compare: 0x11,
        swap: 0x22,
        compare_mask: 0x33,
        swap_mask: 0x44,
    };
    assert_eq!(op, expected);
    let mut scratch = Scratch::default();
    let again = Builder::new(&mut scratch, WqeOpcode::MaskedCompareSwap, 1, 2)
        .remote(8, 9)
        .atomic(&expected)
        .data(4, 3, 4);
    assert_eq!(again.finish().unwrap().bytes(), bytes);
}

#[test]
fn the_producer_is_found_for_every_doorbell_style() {
    let ring = 64;
    // rdma-core: record, then the start of the last WQE (at 5, two WQEBBs long).
    assert_eq!(producer(5, ring, None, 7), 7);
    assert_eq!(producer(5, ring, Some(Doorbell::parse([0, 0, 5, 8, 0, 0, 1, 5]).producer()), 7), 7);
    // DOCA: doorbell, record, doorbell again; new work is seen once, at the first step.
    assert_eq!(producer(5, ring, Some(6), 5), 6);
    assert_eq!(producer(6, ring, Some(6), 6), 6);
    // Streams that store a doorbell in two halves: the record comes first.
    let torn = Doorbell::parse([0, 0, 9, 8, 0, 0, 1, 0]); // new index, old size
    assert_eq!(producer(9, ring, Some(torn.producer()), 10), 10);
    // Out-of-bounds values are ignored.
    assert_eq!(producer(5, ring, Some(5 + 65), 5), 5);
    assert_eq!(producer(5, ring, Some(4), 3), 5);
    assert_eq!(producer(5, ring, Some(5 + 64), 5), 5 + 64);
    assert_eq!(producer(0xfff0, 32_768, Some(0x10), 0xfff0), 0x10);
}

#[test]
fn untouched_doorbell_record_is_never_new_work() {
    // NVSHMEM's proxy rings the doorbell and leaves the send word at zero.
    for wqebbs in [64u32, 32_768] {
        let mut known = ProducerTracker::starting_at(0);
        let mut consumer = 0u16;
        for _ in 0..100_000 {
            let next = consumer.wrapping_add(3);
            assert_eq!(known.refresh(consumer, wqebbs, Some(next), 0), next);
            assert_eq!(known.refresh(next, wqebbs, Some(next), 0), next);
            consumer = next;
        }
        // The stateless function is wrong once per lap in this case.
        assert_eq!(producer(0xfff0, wqebbs, Some(0xfff0), 0), 0);
    }
}

#[test]
fn the_producer_never_decreases() {
    let mut known = ProducerTracker::starting_at(0);
    assert_eq!(known.refresh(0, 64, Some(8), 0), 8);
    assert_eq!(known.refresh(0, 64, Some(5), 0), 8);
    assert_eq!(known.refresh(4, 64, Some(5), 9), 9);
    assert_eq!(known.refresh(9, 64, None, 9), 9);
    // Doorbell and record in alternation, over many laps.
    let mut consumer = 9u16;
    for step in 0..70_000u32 {
        let next = consumer.wrapping_add(1 + (step % 5) as u16);
        let (doorbell, dbrec) = if step % 2 == 0 { (Some(next), consumer) } else { (None, next) };
        assert_eq!(known.refresh(consumer, 64, doorbell, dbrec), next);
        consumer = next;
    }
}

fn cqe(outcome: CqeOutcome) -> Cqe {
    Cqe { outcome, qpn: 0x12_3456, user_index: 9, counter: 0xabcd, solicited: true, timestamp: 0 }
}

/// The words in memory order.
fn as_bytes(words: [u64; 8]) -> [u8; 64] {
    std::array::from_fn(|at| words[at / 8].to_ne_bytes()[at % 8])
}

#[test]
fn cqe_fields_have_their_offsets() {
    let sent = cqe(CqeOutcome::Sent { opcode: WqeOpcode::RdmaRead, bytes: 0x0102_0304 });
    let bytes = sent.encode(true).bytes();
    assert_eq!(bytes[32..36], [0, 0, 0, 9]);
    assert_eq!(bytes[44..48], [1, 2, 3, 4]);
    assert_eq!(bytes[56..60], [0x10, 0x12, 0x34, 0x56]);
    assert_eq!(bytes[60..64], [0xab, 0xcd, 0, 0x03]);
    assert_eq!(sent.encode(true).tail_word().to_ne_bytes(), bytes[60..64]);
    assert_eq!(Cqe::parse(&bytes), Ok(sent));
    assert_eq!(as_bytes(sent.encode_words(true)), bytes);

    let origin = Origin { qpn: 0x77, service_level: 3, has_grh: true, gid: [9; 16], port: 5000 };
    for (recv_kind, code) in [
        (RecvKind::WriteImm([9, 8, 7, 6]), 1),
        (RecvKind::Send, 2),
        (RecvKind::SendImm([9, 8, 7, 6]), 3),
        (RecvKind::SendInvalidate(0x0908_0706), 4),
    ] {
        let received = Cqe {
            timestamp: 0x1122_3344_5566_7788,
            solicited: false,
            ..cqe(CqeOutcome::Received { recv_kind, bytes: 5, origin })
        };
        let bytes = received.encode(false).bytes();
        assert_eq!(bytes[63], code << 4);
        assert_eq!(bytes[24..28], [0x13, 0, 0, 0x77]);
        assert_eq!(bytes[36..40], if code == 2 { [0; 4] } else { [9, 8, 7, 6] });
        assert_eq!(Cqe::parse(&bytes), Ok(received));
        assert_eq!(as_bytes(received.encode_words(false)), bytes);
    }

    for (queue, code) in [(Queue::Send, 13), (Queue::Receive, 14)] {
        let status = Status::RetryExceeded;
        let failed =
            cqe(CqeOutcome::Failed { queue, status, vendor: 0x81, opcode: WqeOpcode::Send });
        let bytes = failed.encode(false).bytes();
        assert_eq!((bytes[54], bytes[55], bytes[56], bytes[63]), (0x81, 0x15, 0x0a, code << 4 | 2));
        assert!(CqeTail::parse([0, 0, 0, bytes[63]]).is_error());
        assert_eq!(Cqe::parse(&bytes), Ok(failed));
        assert_eq!(as_bytes(failed.encode_words(false)), bytes);
    }
}

#[test]
fn empty_cq_yields_no_completion() {
    let empty = [EMPTY_CQE_BYTE; 64];
    assert_eq!(Cqe::parse(&empty), Err(CqeError::NotWritten));
    let tail = CqeTail::parse([EMPTY_CQE_BYTE; 4]);
    assert!(!tail.is_owned(false) && !tail.is_owned(true));
    assert!(tail.owner, "pollers that look at the owner bit alone must wait");
    assert_eq!(tail.counter, 0xffff, "pollers of collapsed queues read it as -1");
    assert!(!collapsed_is_done(0, tail.counter, 32_768));
    assert_eq!(collapsed_latest(0, tail.counter), None);
    assert_eq!(collapsed_latest(5, tail.counter), None);
}

#[test]
fn owner_bits_toggle_with_each_lap() {
    for number in 0..64 {
        let owner = owner_bit(number, 8);
        assert_eq!(owner, (number / 8) % 2 == 1);
        let tail = cqe(CqeOutcome::Sent { opcode: WqeOpcode::Nop, bytes: 0 }).encode(owner).tail;
        assert!(CqeTail::parse(tail).is_owned(owner));
        assert!(!CqeTail::parse(tail).is_owned(owner_bit(number + 8, 8)));
    }
    assert!(!owner_bit(5, 0));
}

#[test]
fn collapsed_counters_wrap() {
    for latest in [0u64, 1, 127, 65_535, 65_536, 200_000] {
        let counter = latest as u16;
        for ahead in 1..=128 {
            assert!(!collapsed_is_done((latest + ahead) as u16, counter, 128), "{latest} {ahead}");
            assert_eq!(collapsed_latest(latest + ahead, counter), Some(latest));
        }
        for behind in 0..=latest.min(1000) {
            assert!(collapsed_is_done((latest - behind) as u16, counter, 128));
        }
    }
}

#[test]
fn receives_end_at_their_terminator() {
    let mut entry = [0xff; 64];
    ReceiveWqe::write(&mut entry, &[(64, 5, 0x1000), (0, 5, 0), (16, 5, 0x2000)]).unwrap();
    assert_eq!(entry[32..48], hex("00000000 00000100 00000000 00000000"));
    let receive = ReceiveWqe::parse(&entry).unwrap();
    assert_eq!((receive.len(), receive.segments().count()), (80, 2));
    // A full WQE needs no terminator.
    ReceiveWqe::write(&mut entry, &[(1, 5, 0); 4]).unwrap();
    assert_eq!(ReceiveWqe::parse(&entry).unwrap().len(), 4);
    assert!(ReceiveWqe::write(&mut entry, &[(1, 5, 0); 5]).is_none());
    assert!(ReceiveWqe::write(&mut entry, &[(1 << 31, 5, 0)]).is_none());
    ReceiveWqe::write(&mut entry, &[]).unwrap();
    assert!(ReceiveWqe::parse(&entry).unwrap().is_empty());
    entry[0] = 0x80;
    assert_eq!(ReceiveWqe::parse(&entry).unwrap_err(), WqeError::InlineTarget);
    assert_eq!(SrqEntry::parse(&[0; 15]).unwrap_err(), WqeError::Truncated);
    assert!(SrqEntry::write(&mut [0; 15], 0, &[]).is_none());
}

/// Iterates over the whole payload; returns its length.
fn walk(wqe: &Wqe<'_>) -> u64 {
    match wqe.work {
        Work::Send { payload, .. } | Work::Write { payload, .. } => payload,
        Work::Read { into, .. } | Work::Atomic { into, .. } => into,
        Work::Dump { from } => from,
        Work::Nop | Work::Wait(_) | Work::Bind(_) | Work::LocalInvalidate(_) => return 0,
    }
    .data_segments()
    .map(|segment| segment.len())
    .sum()
}

#[test]
fn every_opcode_and_length_is_parsed_or_rejected() {
    let fills = [0x00, 0x01, 0x7f, 0x80, 0xff];
    for code in 0..=u8::MAX {
        for segments in 0..=MAX_SEGMENTS as u8 + 1 {
            for fill in fills {
                let mut bytes = [fill; MAX_WQE_LEN];
                bytes[3] = code;
                bytes[7] = segments;
                for len in [0, 15, 16, 48, MAX_WQE_LEN] {
                    if let Ok(wqe) = Wqe::parse(&bytes[..len]) {
                        walk(&wqe);
                    }
                }
            }
        }
    }
}

proptest! {
    #[test]
    fn any_bytes_are_parsed_or_rejected(
        mut bytes in proptest::collection::vec(any::<u8>(), 0..1100),
        known in prop::sample::select(
            vec![0u8, 1, 8, 9, 10, 11, 15, 16, 17, 18, 20, 21, 0x18, 0x1b, 0x23]
        ),
        opmod in 7u8..11,
    ) {
        if let Ok(wqe) = Wqe::parse(&bytes) {
            walk(&wqe);
        }
        if let Ok((wqe, _)) = Wqe::parse_datagram(&bytes) {
            walk(&wqe);
        }
        // Again with a supported opcode, so that segments are parsed.
        if bytes.len() > 8 {
            bytes[0] = opmod;
            bytes[3] = known;
            // Some segments without the inline flag, so that lists of them are parsed too.
            for (at, segment) in bytes.chunks_mut(16).enumerate() {
                if at % 3 != 2 { segment[0] &= 0x7f; }
            }
        }
        if let Ok(wqe) = Wqe::parse(&bytes) {
            let len = walk(&wqe);
            prop_assert!(len <= MAX_MESSAGE_LEN);
            prop_assert!(usize::from(wqe.control.segments) * SEGMENT_LEN <= bytes.len());
        }
        if let Ok(receive) = ReceiveWqe::parse(&bytes) {
            let sum: u64 = receive.segments().map(|data| u64::from(data.len)).sum();
            prop_assert_eq!(sum, receive.len());
        }
        let _ = SrqEntry::parse(&bytes);
    }

    #[test]
    fn any_cqe_is_parsed_or_rejected(bytes in any::<[u8; 32]>(), more in any::<[u8; 32]>()) {
        let mut all = [0; 64];
        all[..32].copy_from_slice(&bytes);
        all[32..].copy_from_slice(&more);
        let words = std::array::from_fn(|at| u64::from_ne_bytes(super::array(&all, at * 8)));
        prop_assert_eq!(Cqe::parse_words(&words), Cqe::parse(&all));
        if let Ok(cqe) = Cqe::parse(&all) {
            prop_assert_eq!(as_bytes(cqe.encode_words(true)), cqe.encode(true).bytes());
            // A parsed CQE survives another round trip.
            prop_assert_eq!(Cqe::parse(&cqe.encode(false).bytes()), Ok(cqe));
        }
    }

    #[test]
    fn the_producer_is_at_most_one_ring_ahead(
        consumer: u16, shift in 0u32..16, doorbell: Option<u16>, dbrec: u16,
    ) {
        let wqebbs = 1 << shift;
        let found = producer(consumer, wqebbs, doorbell, dbrec);
        let ahead = u32::from(found.wrapping_sub(consumer));
        prop_assert!(ahead <= wqebbs);
        for value in doorbell.into_iter().chain([dbrec]) {
            let distance = u32::from(value.wrapping_sub(consumer));
            prop_assert!(distance > wqebbs || distance <= ahead);
        }
    }

    #[test]
    fn masked_add_matches_bitwise_addition(old: u64, add: u64, boundary: u64) {
        let mut expected = 0;
        let mut carry = 0;
        for bit in 0..64 {
            let sum = ((old >> bit) & 1) + ((add >> bit) & 1) + carry;
            expected |= (sum & 1) << bit;
            carry = if (boundary >> bit) & 1 == 1 { 0 } else { sum >> 1 };
        }
        let op = Atomic::MaskedFetchAdd { width: AtomicWidth::Eight, add, boundary };
        prop_assert_eq!(op.apply(old), expected);
        let narrow = Atomic::MaskedFetchAdd { width: AtomicWidth::Four, add, boundary };
        prop_assert_eq!(narrow.apply(old), expected & 0xffff_ffff);
        let xor = Atomic::MaskedFetchAdd { width: AtomicWidth::Eight, add, boundary: u64::MAX };
        prop_assert_eq!(xor.apply(old), old ^ add);
    }

    #[test]
    fn masked_compare_swap_honours_its_masks(
        old: u64, compare: u64, swap: u64, compare_mask: u64, swap_mask: u64,
    ) {
        let width = AtomicWidth::Eight;
        let compare = (old & compare_mask) | (compare & !compare_mask);
        let same = Atomic::MaskedCompareSwap { width, swap, compare_mask, swap_mask, compare };
        prop_assert_eq!(same.apply(old), (old & !swap_mask) | (swap & swap_mask));
        let other = Atomic::MaskedCompareSwap {
            width, swap, compare_mask: compare_mask | 1, swap_mask, compare: old ^ 1,
        };
        prop_assert_eq!(other.apply(old), old);
    }
}

//! Host calls that answer `Retry`, at every place where they can: the operation is executed once,
//! later.

use warpwire_proto::Instant;
use warpwire_proto::qp::HostStatus::{Denied, Ready, Retry};
use warpwire_proto::qp::{Atomic, DiscardReason, SendOp, State, Status};
use warpwire_proto::wire::{Nak, Syndrome};

use crate::directed::host::HostCall;
use crate::directed::pair::{
    A, B, ConnParams, MTU, Pair, REMOTE_ADDR, one_of_each_op, psn, psns, syndrome,
};

use HostCall::{
    Bind, Execute, FetchRemote, FetchWork, Invalidate, MayAccess, PlaceReceive, PlaceRemote,
    PlaceResponse, StoreResult, TakeReceive,
};

/// Whatever is lost stays lost.
fn without_timer() -> ConnParams {
    ConnParams { timeout: 0, retry_count: 0, rnr_retry: 7, ..ConnParams::default() }
}

/// The host calls of an operation, with the end that makes each.
fn calls_of(op: SendOp) -> &'static [(usize, HostCall)] {
    match op {
        SendOp::Send | SendOp::SendImm(_) => &[(A, FetchWork), (B, TakeReceive), (B, PlaceReceive)],
        SendOp::SendInvalidate(_) => &[(A, FetchWork), (B, TakeReceive), (B, Invalidate)],
        SendOp::Write(_) => &[(A, FetchWork), (B, MayAccess), (B, PlaceRemote)],
        SendOp::WriteImm(..) => {
            &[(A, FetchWork), (B, TakeReceive), (B, MayAccess), (B, PlaceRemote)]
        }
        SendOp::Read(_) => &[(B, MayAccess), (B, FetchRemote), (A, PlaceResponse)],
        SendOp::Atomic(..) => &[(B, MayAccess), (B, Execute), (A, StoreResult)],
        SendOp::Bind(_) => &[(A, Bind)],
        SendOp::LocalInvalidate(_) => &[(A, Invalidate)],
        SendOp::Local | SendOp::Bad(_) => &[],
    }
}

/// Runs three requests of one kind; `call` is answered `Ready` `yes` times, then `Retry` `times`
/// times.
fn run_with(op: SendOp, len: u32, (end, call): (usize, HostCall), yes: usize, times: usize) {
    let params = ConnParams { rnr_retry: 7, ..ConnParams::default() };
    let mut pair = Pair::with_receives(params, 3);
    pair.endpoints[end].host.answer(call, vec![Ready; yes]);
    pair.endpoints[end].host.answer(call, vec![Retry; times]);
    (0..3).for_each(|id| pair.post(A, id, op, len));
    pair.assert_all_succeed(3);
    let takes_receive = matches!(
        op,
        SendOp::Send | SendOp::SendImm(_) | SendOp::SendInvalidate(_) | SendOp::WriteImm(..)
    );
    let receive_statuses = if takes_receive { vec![0, 1, 2] } else { vec![] };
    let wanted: Vec<_> = receive_statuses.into_iter().map(|id| (id, Status::Success)).collect();
    assert_eq!(pair.endpoints[B].receive_statuses(), wanted, "{op:?} {call:?}");
    let done: Vec<_> = pair.endpoints.iter().flat_map(|end| &end.host.done).collect();
    let packets = (len / MTU).max(1) as usize;
    let once = match op {
        SendOp::SendInvalidate(_) => return check_invalidated(&pair, packets),
        SendOp::Atomic(..) => 2 * 3, // executed at B, stored at A
        _ => 3 * packets,
    };
    assert_eq!(done.len(), once, "{op:?} {call:?}: each effect once: {done:?}");
}

/// Bytes may be placed again while the invalidation is delayed; the key is invalidated once.
fn check_invalidated(pair: &Pair, packets: usize) {
    let is_key = |done: &&crate::directed::host::HostEffect| {
        matches!(done, crate::directed::host::HostEffect::Invalidated(_))
    };
    assert_eq!(pair.endpoints[B].host.done.iter().filter(is_key).count(), 3);
    assert!(pair.endpoints[B].host.done.len() >= 3 * (packets + 1));
}

#[test]
fn an_operation_delayed_at_any_host_call_is_executed_once() {
    for packets in [1, 3] {
        for (op, len) in one_of_each_op(packets) {
            for &host_call in calls_of(op) {
                for yes in 0..4 {
                    for times in [1, 3] {
                        run_with(op, len, host_call, yes, times);
                    }
                }
            }
        }
    }
}

#[test]
fn a_receive_is_taken_once_for_a_message_that_must_wait() {
    for op in [SendOp::Send, SendOp::WriteImm(REMOTE_ADDR, 1)] {
        let mut pair = Pair::with_receives(ConnParams { rnr_retry: 7, ..ConnParams::default() }, 2);
        let call = if op == SendOp::Send { PlaceReceive } else { PlaceRemote };
        pair.endpoints[B].host.answer(call, [Retry; 5]);
        pair.post(A, 0, op, 10);
        pair.assert_all_succeed(1);
        assert_eq!(pair.endpoints[B].host.call_count(TakeReceive), 1);
        assert_eq!(pair.endpoints[B].host.receives_left(), 1);
    }
}

#[test]
fn sending_pauses_until_the_next_poll_and_the_peer_notices_nothing() {
    let mut pair = Pair::with_receives(ConnParams::default(), 1);
    pair.endpoints[A].host.answer(FetchWork, [Ready, Retry]);
    pair.post(A, 0, SendOp::Send, 3 * MTU);
    assert_eq!(pair.transfer(A).len(), 1);
    assert_eq!(pair.transfer(A).len(), 2, "the next poll resumes sending");
    pair.assert_all_succeed(1);
    assert_eq!(pair.endpoints[A].qp.stats().resent, 0);
}

#[test]
fn read_data_without_local_memory_is_requested_again_after_a_pause() {
    let mut pair = Pair::new();
    pair.endpoints[A].host.answer(PlaceResponse, [Ready, Retry]);
    pair.post(A, 0, SendOp::Read(REMOTE_ADDR), 3 * MTU);
    pair.transfer(A);
    let answers = pair.send_all(B);
    let outcomes = pair.deliver_all(A, &answers);
    assert_eq!(outcomes[..2], [Ok(()), Err(warpwire_proto::qp::DiscardReason::Busy)]);
    assert!(pair.next_deadline() > pair.now);
    pair.assert_all_succeed(1);
}

/// Memory absent for longer than all retries last: the peer keeps responding, so no retry is used.
#[test]
fn long_absent_memory_at_any_host_call_does_not_fail_the_connection() {
    for (op, len) in one_of_each_op(3) {
        for &(end, call) in calls_of(op) {
            if call == TakeReceive {
                continue; // it uses the RNR retry count
            }
            let params = ConnParams { retry_count: 1, rnr_retry: 7, ..ConnParams::default() };
            let mut pair = Pair::with_receives(params, 1);
            pair.endpoints[end].host.answer(call, vec![Retry; 60]);
            pair.post(A, 0, op, len);
            // Every fifth turn all packets are lost, which alone uses a retry.
            for turn in 0..400 {
                for from in [A, B] {
                    for packet in pair.send_all(from) {
                        if turn % 5 != 4 {
                            let _ = pair.deliver(1 - from, &packet);
                        }
                    }
                }
                let deadline = pair.next_deadline();
                if deadline != Instant::NEVER {
                    pair.advance_to(deadline);
                }
            }
            assert!(pair.endpoints[end].host.call_count(call) > 60, "{op:?} {call:?}");
            assert_eq!(pair.endpoints[A].sent, [(0, Status::Success)], "{op:?} {call:?}");
        }
    }
}

#[test]
fn a_read_of_absent_memory_gets_rnr_naks_when_the_peer_retries() {
    let mut pair = Pair::with(ConnParams { retry_count: 1, rnr_retry: 7, ..ConnParams::default() });
    // A second time with each NAK: after it, to send the data if it is resident by now.
    pair.endpoints[B].host.answer(FetchRemote, [&[Ready][..], &[Retry; 5]].concat());
    pair.post(A, 0, SendOp::Read(REMOTE_ADDR), 3 * MTU);
    let requests = pair.transfer(A);
    let data = pair.send_all(B);
    assert_eq!(data.len(), 1, "no response until the second packet has data");
    pair.deliver_all(A, &data);
    // The requester's timer expires: it gets an RNR NAK for the missing part, and again after the
    // next retry.
    for _ in 0..2 {
        pair.advance_to(pair.next_deadline());
        let again = pair.send_all(A);
        assert_eq!(psns(&again), [psn(&requests[0]) + 1]);
        pair.deliver_all(B, &again);
        let responses = pair.send_all(B);
        assert!(matches!(syndrome(&responses[0]), Syndrome::RnrNak(_)), "{responses:?}");
        assert_eq!(psns(&responses), psns(&again));
        pair.deliver_all(A, &responses);
    }
    pair.assert_all_succeed(1);
    assert_eq!(pair.endpoints[A].qp.stats().timeouts, 1);
}

#[test]
fn rnr_timers_grow_while_memory_is_absent() {
    // They begin at 10 µs: `min_rnr_timer` is for peers without a receive.
    for code in [0, 1, 12, 20] {
        let params = ConnParams { min_rnr_timer: code, rnr_retry: 7, ..ConnParams::default() };
        let mut pair = Pair::with(params);
        pair.endpoints[B].host.answer(MayAccess, [Retry; 4]);
        pair.post(A, 0, SendOp::Write(REMOTE_ADDR), 10);
        let mut codes = Vec::new();
        for _ in 0..4 {
            let requests = pair.send_all(A);
            pair.deliver_all(B, &requests);
            for packet in pair.transfer(B) {
                let Syndrome::RnrNak(code) = syndrome(&packet) else { panic!("{packet:?}") };
                codes.push(code);
            }
            pair.advance_to(pair.next_deadline());
        }
        assert_eq!(codes, [1, 2, 3, 4]);
        pair.assert_all_succeed(1);
    }
}

/// A packet whose data became unavailable after `poll_transmit` is undone and built again at the
/// next poll, without a timer or a retry.
#[test]
fn transmits_can_be_undone() {
    for op in [SendOp::Send, SendOp::Write(REMOTE_ADDR), SendOp::Read(REMOTE_ADDR)] {
        let end = if matches!(op, SendOp::Read(_)) { B } else { A };
        for nth in 0..3 {
            let mut pair = Pair::with_receives(without_timer(), 2);
            (0..2).for_each(|id| pair.post(A, id, op, 3 * MTU));
            if end == B {
                pair.transfer(A);
            }
            for _ in 0..nth {
                let packet = pair.send(end).unwrap();
                pair.deliver(1 - end, &packet).unwrap();
            }
            let lost = pair.send(end).unwrap();
            pair.endpoints[end].qp.undo_transmit(&lost);
            pair.assert_all_succeed(2);
        }
    }
}

/// The requester waits for its own memory when the peer refuses a later request: both waits end,
/// without a timer, with selective repeat and without.
#[test]
fn an_rnr_nak_during_a_wait_for_own_memory_is_heeded() {
    for selective in [false, true] {
        let mut pair = Pair::with(ConnParams { selective, ..without_timer() });
        pair.endpoints[A].host.answer(PlaceResponse, [Retry]);
        // Ready for the read, and not for the write behind it.
        pair.endpoints[B].host.answer(MayAccess, [Ready, Retry]);
        pair.post(A, 0, SendOp::Read(REMOTE_ADDR), MTU);
        pair.post(A, 1, SendOp::Write(REMOTE_ADDR), 10);
        let requests = pair.send_all(A);
        pair.deliver_all(B, &requests);
        let responses = pair.send_all(B);
        let [data, refusal] = &responses[..] else { panic!("{responses:?}") };
        assert!(matches!(syndrome(refusal), Syndrome::RnrNak(_)), "{refusal:?}");
        assert_eq!(pair.deliver(A, data), Err(DiscardReason::Busy));
        // A copy of the data, as after a read that was requested twice.
        pair.deliver(A, data).unwrap();
        let _ = pair.deliver(A, refusal);
        pair.assert_all_succeed(2);
    }
}

/// A read is requested three times, and its data is paged out after it was sent in part. The RNR
/// NAK is about data that the peer has when it arrives: the rest comes nevertheless.
#[test]
fn an_outdated_rnr_nak_stops_no_response() {
    for selective in [false, true] {
        let mut pair = Pair::with(ConnParams { selective, ..without_timer() });
        pair.endpoints[B].host.answer(FetchRemote, [Ready, Ready, Retry, Retry, Retry]);
        pair.post(A, 0, SendOp::Read(REMOTE_ADDR), 3 * MTU);
        let requests = pair.transfer(A);
        let mut responses = pair.send_all(B);
        for _ in 0..2 {
            let _ = pair.deliver(B, &requests[0]);
            responses.extend(pair.send(B));
        }
        let [_, _, refusal] = &responses[..] else { panic!("{responses:?}") };
        assert!(matches!(syndrome(refusal), Syndrome::RnrNak(_)), "{refusal:?}");
        let outcomes = pair.deliver_all(A, &responses);
        assert_eq!(outcomes, [Ok(()), Ok(()), Err(DiscardReason::StaleResponse)]);
        pair.assert_all_succeed(1);
    }
}

/// A duplicate read request restarts the response, but the memory is gone: the requester learns of
/// the failure with its next request, although it already has the data of the PSN that failed.
#[test]
fn the_nak_of_a_failure_reaches_a_peer_that_is_ahead() {
    let mut pair = Pair::with(ConnParams { retry_count: 1, ..ConnParams::default() });
    pair.post(A, 0, SendOp::Read(REMOTE_ADDR), 3 * MTU);
    let requests = pair.transfer(A);
    let first = pair.send(B).unwrap();
    pair.deliver(A, &first).unwrap();
    pair.endpoints[B].host.answer(FetchRemote, [Denied; 20]);
    let _ = pair.deliver(B, &requests[0]);
    for packet in pair.send_all(B) {
        let _ = pair.deliver(A, &packet);
    }
    assert_eq!(pair.endpoints[A].sent, [], "the requester already has this PSN");
    assert_eq!(pair.endpoints[B].qp.state(), State::Err);
    // Two writes, the first of which is lost: neither may appear to have been executed.
    pair.post(A, 1, SendOp::Write(REMOTE_ADDR), 10);
    pair.post(A, 2, SendOp::Write(REMOTE_ADDR), 10);
    let writes = pair.send_all(A);
    let _ = pair.deliver(B, &writes[1]);
    pair.run();
    let wanted = [(0, Status::RemoteAccess), (1, Status::Flushed), (2, Status::Flushed)];
    assert_eq!(pair.endpoints[A].sent, wanted);
}

/// A duplicate read request arrives after the read completed and its memory was deregistered: it
/// has no effect.
#[test]
fn a_duplicate_read_of_deregistered_memory_does_no_harm() {
    let mut pair = Pair::new();
    pair.post(A, 0, SendOp::Read(REMOTE_ADDR), 3 * MTU);
    let requests = pair.transfer(A);
    pair.transfer(B);
    assert_eq!(pair.endpoints[A].sent, [(0, Status::Success)]);
    for _ in 0..3 {
        pair.endpoints[B].host.answer(FetchRemote, [Denied]);
        assert_eq!(pair.deliver(B, &requests[0]), Err(DiscardReason::Duplicate));
        let answers = pair.send_all(B);
        assert_eq!((answers.len(), psn(&answers[0])), (1, psn(&requests[0])));
        assert_eq!(syndrome(&answers[0]), Syndrome::Nak(Nak::RemoteAccess));
        assert_eq!(pair.deliver(A, &answers[0]), Err(DiscardReason::StaleResponse));
    }
    pair.post(A, 1, SendOp::Read(REMOTE_ADDR), MTU);
    pair.post(A, 2, SendOp::Write(REMOTE_ADDR), 10);
    pair.assert_all_succeed(3);
}

/// The counterpart: the data was lost and the memory deregistered before the repeated request. The
/// requester gets the reason, even if it has to retry twice.
#[test]
fn lost_data_of_deregistered_memory_is_an_access_error() {
    for lost in 1..3 {
        let mut pair = Pair::new();
        pair.post(A, 0, SendOp::Read(REMOTE_ADDR), 3 * MTU);
        let requests = pair.transfer(A);
        assert_eq!(pair.send_all(B).len(), 3, "responses, which are lost");
        for _ in 0..lost {
            pair.endpoints[B].host.answer(FetchRemote, [Denied]);
            assert_eq!(pair.deliver(B, &requests[0]), Err(DiscardReason::Duplicate));
            let nak = pair.send_all(B);
            assert_eq!(syndrome(&nak[0]), Syndrome::Nak(Nak::RemoteAccess));
            if lost == 1 {
                pair.deliver(A, &nak[0]).unwrap();
            }
        }
        if lost > 1 {
            pair.endpoints[B].host.answer(FetchRemote, [Denied]);
            pair.run();
        }
        assert_eq!(pair.endpoints[A].sent, [(0, Status::RemoteAccess)]);
    }
}

/// Memory goes while a read is answered, and responses before the failure are lost: they are sent
/// again, or the requester gets the reason why not.
#[test]
fn responses_before_a_denied_one_are_lost() {
    // The first packets of the read itself.
    let mut pair = Pair::new();
    pair.post(A, 0, SendOp::Read(REMOTE_ADDR), 3 * MTU);
    pair.transfer(A);
    pair.endpoints[B].host.answer(FetchRemote, [Ready]);
    pair.endpoints[B].host.answer(FetchRemote, [Denied; 20]);
    let answers = pair.send_all(B);
    assert_eq!(pair.endpoints[B].qp.state(), State::Err);
    for nak in &answers[1..] {
        assert_eq!(syndrome(nak), Syndrome::Nak(Nak::RemoteAccess));
        let _ = pair.deliver(A, nak);
    }
    pair.run();
    assert_eq!(pair.endpoints[A].sent, [(0, Status::RemoteAccess)]);
    // An atomic before it, which is not executed again, and a read behind it.
    let mut pair = Pair::new();
    let add = SendOp::Atomic(REMOTE_ADDR, Atomic::FetchAdd { add: 1 });
    for (id, op) in [(0, add), (1, SendOp::Read(REMOTE_ADDR)), (2, SendOp::Read(REMOTE_ADDR))] {
        pair.post(A, id, op, 8);
    }
    pair.transfer(A);
    pair.endpoints[B].host.answer(FetchRemote, [Denied]);
    assert_eq!(pair.send_all(B).len(), 2, "the atomic's response and the NAK, which are lost");
    pair.run();
    let wanted = [(0, Status::Success), (1, Status::RemoteAccess), (2, Status::Flushed)];
    assert_eq!(pair.endpoints[A].sent, wanted);
}

/// An undone response does not count as sent: if the memory is then gone, the queue pair fails, as
/// it does before the first response.
#[test]
fn an_undone_response_does_not_count_as_sent() {
    let mut pair = Pair::new();
    pair.post(A, 0, SendOp::Read(REMOTE_ADDR), MTU);
    pair.transfer(A);
    let data = pair.send(B).unwrap();
    pair.endpoints[B].qp.undo_transmit(&data);
    pair.endpoints[B].host.answer(FetchRemote, [Denied]);
    pair.run();
    assert_eq!(pair.endpoints[A].sent, [(0, Status::RemoteAccess)]);
    assert_eq!(pair.endpoints[B].qp.state(), State::Err);
}

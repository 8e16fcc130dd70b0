//! Invalid use is refused with a reason and advice.

use warpwire::Error;
use warpwire::error::Kind;
use warpwire::hca::HcaOptions;
use warpwire::stream::{StreamQp, StreamQpOptions, Ticket};
use warpwire::verbs::{ProgressMode, ReceiveRequest, SendRequest, Service, SrqOptions, WrOp};

use crate::stream::fixture::*;
use testkit::cases;

cases!(Fixture; ONCE:
    invalid_options_are_refused,
    a_context_without_a_thread_is_refused,
    waits_that_would_never_end_are_refused,
    work_out_of_order_is_refused,
    streams_of_other_devices_and_captures_are_refused,
);

fn expect_refusal(kind: Kind, word: &str, error: &Error) {
    assert_eq!(error.kind(), &kind, "{error}");
    assert!(error.to_string().contains(word), "{word:?} in {error}");
    assert!(error.advice().is_some(), "advice in {error}");
}

fn invalid_options_are_refused(fixture: &Fixture) {
    let testbed = fixture.testbed();
    let create = |change: &dyn Fn(&mut StreamQpOptions)| {
        let mut options = fixture.options();
        change(&mut options);
        let made = StreamQp::create(&testbed.a.context, &testbed.a.pd, &fixture.gpu, options);
        made.expect_err("invalid options")
    };
    let wrong = Kind::InvalidArgument;
    expect_refusal(wrong.clone(), "RC", &create(&|o| o.qp.service = Service::Ud));
    let srq = testbed.a.context.create_srq(&testbed.a.pd, SrqOptions::default()).unwrap();
    expect_refusal(wrong.clone(), "SRQ", &create(&|o| o.qp.srq = Some(srq.clone())));
    expect_refusal(wrong.clone(), "waits", &create(&|o| o.max_waits = 0));
    expect_refusal(wrong.clone(), "waits", &create(&|o| o.max_waits = u32::MAX));
    expect_refusal(wrong.clone(), "depth", &create(&|o| o.qp.send_depth = 1 << 15));
    expect_refusal(wrong.clone(), "depth", &create(&|o| o.qp.receive_depth = u32::MAX));
    expect_refusal(
        wrong.clone(),
        "WQEBBs",
        &create(&|o| (o.qp.send_depth, o.qp.max_inline_data) = (1 << 14, 500)),
    );
    let memory = warpwire::hca::QueueMemory::host(1 << 20).unwrap();
    expect_refusal(wrong, "memory", &create(&|o| o.qp.memory = Some(memory.clone())));
}

fn a_context_without_a_thread_is_refused(fixture: &Fixture) {
    for progress_mode in [ProgressMode::Auto, ProgressMode::Manual] {
        let [link, _other] = fixture.links();
        let end = Endpoint::open(link, HcaOptions::default().with_progress_mode(progress_mode));
        let made = StreamQp::create(&end.context, &end.pd, &fixture.gpu, fixture.options());
        expect_refusal(Kind::InvalidArgument, "ProgressMode::Thread", &made.unwrap_err());
    }
}

fn waits_that_would_never_end_are_refused(fixture: &Fixture) {
    let testbed = fixture.testbed();
    let [a, b] = fixture.pair(&testbed);
    let far = fixture.memory(&testbed.b, 64);
    let stream = fixture.stream();
    // A receive that was never posted. The next receive that is posted gets the same number.
    for _ in 0..3 {
        expect_refusal(Kind::InvalidArgument, "posted", &b.wait_receive(&stream).unwrap_err());
    }
    post_receives(&b, &far, 1, 8);
    assert_eq!(b.wait_receive(&stream).unwrap().number(), 0);
    expect_refusal(Kind::InvalidArgument, "posted", &b.wait_receive(&stream).unwrap_err());
    a.post_now(&SendRequest::new(1, WrOp::Send).inline(&[1; 8])).unwrap();
    sync(&stream);
    // A ticket of a receive is not one of a send.
    let receive = b.prepare_wait(next_receive(&b, &far)).unwrap().ticket();
    expect_refusal(
        Kind::InvalidArgument,
        "not a request",
        &b.wait_send(&stream, receive).unwrap_err(),
    );
    // A request that is prepared but not posted.
    let work = a.prepare(&nop(2)).unwrap();
    expect_refusal(
        Kind::InvalidArgument,
        "posted",
        &a.wait_send(&stream, work.ticket()).unwrap_err(),
    );
    let after = work.ticket().after(1);
    expect_refusal(Kind::InvalidArgument, "posted", &a.wait_send(&stream, after).unwrap_err());
    // A ticket of another queue pair.
    let ticket = a.post_now(&nop(3)).unwrap_err();
    assert_eq!(ticket.kind(), &Kind::InvalidArgument);
    let ticket = work.post_now().unwrap();
    let error = b.wait_send(&stream, ticket).unwrap_err();
    assert_eq!(error.kind(), &Kind::InvalidArgument, "{error}");
    assert!(error.to_string().contains(&format!("{:#x}", a.number())), "{error}");
    sync(&stream);
}

fn next_receive(qp: &StreamQp, to: &TestBuffer) -> Ticket {
    qp.post_receive(&[ReceiveRequest { id: 9, data: &[to.sge(0, 8)] }]).unwrap()
}

fn work_out_of_order_is_refused(fixture: &Fixture) {
    let testbed = fixture.testbed();
    let [a, _b] = fixture.pair(&testbed);
    let stream = fixture.stream();
    let first = a.prepare(&nop(1)).unwrap();
    let second = a.prepare(&nop(2)).unwrap();
    let error = second.post(&stream).unwrap_err();
    expect_refusal(Kind::InvalidArgument, "prepared before", &error);
    // The second request is dropped; the first is unaffected.
    first.post(&stream).unwrap();
    assert_eq!(done(&a), 1);
    // A queue pair that is not connected accepts no work.
    let options = fixture.options();
    let alone = StreamQp::create(&testbed.a.context, &testbed.a.pd, &fixture.gpu, options).unwrap();
    expect_refusal(Kind::InvalidArgument, "RTS", &alone.prepare(&nop(1)).unwrap_err());
    // Requests that verbs refuse are refused here too, and do not block later ones.
    let long = vec![0; 2000];
    a.prepare(&SendRequest::new(3, WrOp::Send).inline(&long)).unwrap_err();
    a.queue(&stream, &nop(4)).unwrap();
    assert_eq!(done(&a), 4);
}

fn streams_of_other_devices_and_captures_are_refused(fixture: &Fixture) {
    let testbed = fixture.testbed();
    let [a, b] = fixture.pair(&testbed);
    let far = fixture.memory(&testbed.b, 64);
    post_receives(&b, &far, 1, 8);
    if let Some(other) = fixture.other_gpu() {
        let stream = other.stream().unwrap();
        expect_refusal(Kind::InvalidArgument, "sim:0", &a.queue(&stream, &nop(1)).unwrap_err());
        expect_refusal(Kind::InvalidArgument, "sim:0", &b.wait_receive(&stream).unwrap_err());
    }
    let stream = fixture.stream();
    let graph = stream.capture(|stream| {
        expect_refusal(Kind::Unsupported, "replay", &a.queue(stream, &nop(1)).unwrap_err());
        expect_refusal(Kind::Unsupported, "replay", &b.wait_receive(stream).unwrap_err());
        Ok(())
    });
    assert!(graph.unwrap().is_empty());
    a.queue(&stream, &nop(2)).unwrap();
    assert_eq!(done(&a), 2);
    assert_eq!(b.wait_receive(&stream).unwrap().number(), 0);
    a.post_now(&SendRequest::new(1, WrOp::Send).inline(&[1; 8])).unwrap();
    sync(&stream);
}

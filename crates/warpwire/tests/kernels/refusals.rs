//! What cannot be created or queued, and the errors for it.

use warpwire::error::Kind;
use warpwire::hca::HcaOptions;
use warpwire::stream::kernel::{Kernels, SignalWait};
use warpwire::stream::{KernelQp, KernelQpOptions};
use warpwire::verbs::{Context, ProgressMode, QpOptions, Service, SrqOptions};

use crate::kernels::fixture::{Fixture, WORD, contexts, test_timeout};
use testkit::cases;

cases!(Fixture; CASES:
    a_context_without_a_thread_is_refused,
    invalid_depths_are_refused,
    datagrams_and_shared_receives_are_refused,
    kernels_and_streams_of_another_device_are_refused,
    results_without_room_are_refused,
    queue_pairs_for_cpu_threads_have_no_streams,
);

fn a_context_without_a_thread_is_refused(fixture: &Fixture) {
    for progress_mode in [ProgressMode::Auto, ProgressMode::Manual] {
        let [link, _] = fixture.test_link.ends();
        let context =
            Context::open_with(link, HcaOptions::default().with_progress_mode(progress_mode));
        let context = context.unwrap();
        let made = KernelQp::create(&context, &context.alloc_pd(), &fixture.gpu, fixture.options());
        let error = made.unwrap_err();
        assert_eq!(error.kind(), &Kind::InvalidArgument);
        assert!(error.to_string().contains("ProgressMode::Thread"), "{error}");
    }
}

fn refused(fixture: &Fixture, options: KernelQpOptions, word: &str) {
    let [context, _] = contexts(fixture.test_link);
    let made = KernelQp::create(&context, &context.alloc_pd(), &fixture.gpu, options);
    let error = made.unwrap_err();
    assert_eq!(error.kind(), &Kind::InvalidArgument, "{error}");
    assert!(error.to_string().contains(word), "{error}");
}

fn invalid_depths_are_refused(fixture: &Fixture) {
    for send_depth in [0, 1, 3, 100, 65536, u32::MAX] {
        refused(fixture, fixture.options().with_send_depth(send_depth), "send_depth");
    }
    for receive_depth in [0, 3, 65536] {
        refused(fixture, fixture.options().with_receive_depth(receive_depth), "receive_depth");
    }
    // The maximum and the minimum are accepted.
    let [context, _] = contexts(fixture.test_link);
    for (send_depth, receive_depth) in [(32768, 32768), (2, 1)] {
        let options =
            fixture.options().with_send_depth(send_depth).with_receive_depth(receive_depth);
        KernelQp::create(&context, &context.alloc_pd(), &fixture.gpu, options).unwrap();
    }
}

fn datagrams_and_shared_receives_are_refused(fixture: &Fixture) {
    let connection = QpOptions::default().with_service(Service::Ud);
    refused(fixture, fixture.options().with_connection(connection), "UD");
    let [context, _] = contexts(fixture.test_link);
    let srq = context.create_srq(&context.alloc_pd(), SrqOptions::default()).unwrap();
    let connection = QpOptions::default().with_srq(srq);
    refused(fixture, fixture.options().with_connection(connection), "SRQ");
}

fn kernels_and_streams_of_another_device_are_refused(fixture: &Fixture) {
    let Some(other) = &fixture.second else {
        eprintln!("skipped: {} has one device only", fixture.backend);
        return;
    };
    let kernels = Some(Kernels::load(other).unwrap());
    refused(fixture, fixture.options().with_kernels(kernels), &other.label());
    let [a, b] = fixture.ends();
    let error = a.qp.put_on_stream(&other.stream().unwrap(), b.mr.remote(0), a.mr.sge(0, 8));
    assert!(error.unwrap_err().to_string().contains("another device"));
}

fn results_without_room_are_refused(fixture: &Fixture) {
    let [a, b] = fixture.ends();
    let stream = fixture.gpu.stream().unwrap();
    let word = b.mr.remote(WORD);
    let error = a.qp.fetch_add_on_stream(&stream, word, 1, Some(a.mr.sge(0, 4))).unwrap_err();
    assert!(error.to_string().contains("8 bytes"), "{error}");
    for (offset, len) in [(0, 15), (2, 16)] {
        let region = a.memory.region(offset, len).unwrap();
        let error = a.qp.receive_on_stream(&stream, Some(&region)).unwrap_err();
        assert!(error.to_string().contains("16 bytes"), "{error}");
    }
    stream.synchronize(test_timeout()).unwrap();
    assert_eq!(a.qp.progress().unwrap().posted, 0);
}

fn queue_pairs_for_cpu_threads_have_no_streams(fixture: &Fixture) {
    let [context, _] = contexts(fixture.test_link);
    let options = KernelQpOptions::default().with_send_depth(16);
    let qp = KernelQp::create_for_cpu(&context, &context.alloc_pd(), options).unwrap();
    let stream = fixture.gpu.stream().unwrap();
    let error = qp.wait_on_stream(&stream).unwrap_err();
    assert_eq!(error.kind(), &Kind::Unsupported);
    assert!(error.to_string().contains("KernelQp::create"), "{error}");
    let word = fixture.gpu.alloc(8).unwrap().word64(0).unwrap();
    let signal = SignalWait::new(&word, 0, 1).unwrap();
    assert!(qp.wait_signal_on_stream(&stream, &signal).is_err());
    let kernel = fixture.kernel("calls_one");
    assert!(qp.pass(warpwire::mem::Launch::new(&kernel)).is_err());
}

//! The similarity server: results in both families, and bad clients.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use warpwire::sock::{SockHost, warp};
use warpwire_apps::similarity::{
    HEAD, Queries, SimilarOptions, SimilarServer, SocketFamily, ask, query_bytes, random_vectors,
    search,
};

use crate::sock::scripted::test_timeout;
use crate::sock::testbed::{ClosedPort, Testbed, until};
use testkit::cases;

cases!(Testbed; CASES:
    answers_are_those_of_a_cpu,
    many_concurrent_clients,
    answers_over_rdma,
    kernels_ask_a_kernel,
    kernel_queries_that_fail,
    ties_and_a_large_k,
    wrong_queries_close_their_connection_only,
    incomplete_queries_time_out,
    too_many_similarity_clients,
    bad_vectors_and_options,
);

const ANYWHERE: SocketAddr =
    SocketAddr::V4(std::net::SocketAddrV4::new(std::net::Ipv4Addr::LOCALHOST, 0));

fn host(testbed: &Testbed) -> SockHost {
    let options = testbed.options().with_sockets(128).with_ring(16 << 10).with_fitting_arena();
    SockHost::start(&testbed.gpu, options).unwrap()
}

fn small() -> SimilarOptions {
    SimilarOptions { workers: 2, clients: 32, ..SimilarOptions::at(ANYWHERE) }
}

fn client(server: &SimilarServer<'_>) -> TcpStream {
    let stream = TcpStream::connect(server.address()).unwrap();
    stream.set_read_timeout(Some(test_timeout())).unwrap();
    stream.set_nodelay(true).unwrap();
    stream
}

fn answers_are_those_of_a_cpu(testbed: &Testbed) {
    let host = host(testbed);
    for (count, dimension, k) in [(1, 1, 1), (7, 3, 7), (3000, 64, 10), (5001, 17, 100)] {
        let vectors = random_vectors(count, count, dimension);
        let server = testbed.similar(&host, &vectors, dimension, small());
        let stream = client(&server);
        for seed in 0..5 {
            let query = random_vectors(1000 + seed, 1, dimension);
            let found = ask(&stream, k, &query).unwrap();
            assert_eq!(found, search(&vectors, &query, k), "{count} of {dimension}");
        }
        // A vector of the server, scaled, finds itself first.
        let own = (count - 1) as usize * dimension as usize;
        let query: Vec<f32> = vectors[own..].iter().map(|part| part * 100.0).collect();
        assert_eq!(ask(&stream, k, &query).unwrap(), search(&vectors, &query, k));
        assert_eq!(server.stats().unwrap().queries, 6);
    }
}

fn many_concurrent_clients(testbed: &Testbed) {
    let host = host(testbed);
    let vectors = random_vectors(5, 700, 32);
    let server = testbed.similar(&host, &vectors, 32, SimilarOptions { workers: 4, ..small() });
    std::thread::scope(|scope| {
        for number in 0..8 {
            let (stream, vectors) = (client(&server), &vectors);
            scope.spawn(move || {
                for round in 0..20 {
                    let query = random_vectors(number * 100 + round, 1, 32);
                    let found = ask(&stream, 8, &query).unwrap();
                    assert_eq!(found, search(vectors, &query, 8));
                }
            });
        }
    });
    until("all clients are gone", || server.stats().unwrap().closed == 8);
    assert_eq!(server.stats().unwrap().queries, 160);
}

fn answers_over_rdma(testbed: &Testbed) {
    let host = host(testbed);
    let vectors = random_vectors(6, 500, 48);
    let options = SimilarOptions { over: SocketFamily::Warp, ..small() };
    let server = testbed.similar(&host, &vectors, 48, options);
    let net = warp::Net::new(warp::NetOptions::default()).unwrap();
    let streams: Vec<_> = (0..3).map(|_| net.connect(server.address()).unwrap()).collect();
    for (number, stream) in streams.iter().enumerate() {
        stream.set_read_timeout(Some(test_timeout())).unwrap();
        for round in 0..10 {
            let query = random_vectors(number as u64 * 50 + round, 1, 48);
            assert_eq!(ask(stream, 9, &query).unwrap(), search(&vectors, &query, 9));
        }
    }
    // A query of another dimension is refused, and the connection stays usable.
    let refused = ask(&streams[0], 9, &[1.0; 47]).unwrap_err();
    assert!(refused.to_string().contains("another dimension"), "{refused}");
    let query = random_vectors(999, 1, 48);
    assert_eq!(ask(&streams[1], 2, &query).unwrap(), search(&vectors, &query, 2));
    drop(streams);
    until("all clients are gone", || server.stats().unwrap().closed == 3);
}

/// Queries of a kernel, with a long timeout.
fn questions(server: SocketAddr, over: SocketFamily, vectors: &[f32]) -> Queries<'_> {
    Queries { server, over, k: 6, vectors, dimension: 20, timeout: test_timeout() }
}

fn kernels_ask_a_kernel(testbed: &Testbed) {
    // Each kernel has its own host, as on two GPUs.
    let (here, there) = (host(testbed), host(testbed));
    let vectors = random_vectors(8, 900, 20);
    let queries = random_vectors(9, 15, 20);
    let asker = testbed.asker(&here);
    for over in [SocketFamily::Inet, SocketFamily::Warp] {
        let server = testbed.similar(&there, &vectors, 20, SimilarOptions { over, ..small() });
        let asked = questions(server.address(), over, &queries);
        let found = asker.ask(&asked).unwrap();
        assert_eq!(found.len(), 15);
        for (query, found) in queries.chunks_exact(20).zip(found) {
            assert_eq!(found, search(&vectors, query, 6), "{over:?}");
        }
    }
}

fn kernel_queries_that_fail(testbed: &Testbed) {
    let (here, there) = (host(testbed), host(testbed));
    let vectors = random_vectors(8, 90, 20);
    let asker = testbed.asker(&here);
    let server = testbed.similar(&there, &vectors, 20, SimilarOptions { max_k: 5, ..small() });
    let queries = random_vectors(9, 3, 20);
    let asked = questions(server.address(), SocketFamily::Inet, &queries);
    let refused = asker.ask(&asked).unwrap_err();
    assert!(refused.to_string().contains("or too large"), "{refused}");
    let none = Queries { k: 0, ..asked };
    assert!(asker.ask(&none).is_err());
    let closed_port = ClosedPort::at(ANYWHERE);
    for over in [SocketFamily::Inet, SocketFamily::Warp] {
        let asked = questions(closed_port.name, over, &queries);
        let error = asker.ask(&asked).unwrap_err();
        assert!(error.to_string().contains("refused"), "{error}");
    }
    // A server that accepts the query and does not answer.
    let mute = std::net::TcpListener::bind(ANYWHERE).unwrap();
    let at = mute.local_addr().unwrap();
    let brief = Queries {
        timeout: Duration::from_millis(100),
        ..questions(at, SocketFamily::Inet, &queries)
    };
    let error = asker.ask(&brief).unwrap_err();
    assert!(error.to_string().contains("timed out"), "{error}");
}

fn ties_and_a_large_k(testbed: &Testbed) {
    let host = host(testbed);
    let vectors = [1.0, 2.0, 1.0, 0.0, 2.0, -1.0];
    let server = testbed.similar(&host, &vectors, 1, small());
    let stream = client(&server);
    let ids = |found: Vec<warpwire_apps::similarity::SearchHit>| -> Vec<u32> {
        found.into_iter().map(|one| one.id).collect()
    };
    assert_eq!(ids(ask(&stream, 100, &[1.0]).unwrap()), [1, 4, 0, 2, 3, 5]);
    assert_eq!(ids(ask(&stream, 3, &[-1.0]).unwrap()), [5, 3, 0]);
    assert_eq!(ids(ask(&stream, 2, &[0.0]).unwrap()), [0, 1]);
    drop((stream, server)); // a GPU cannot load another server while one runs
    // NaN scores (infinity minus infinity) are never returned.
    let large = [f32::MAX, f32::MAX, 1.0, 1.0];
    let server = testbed.similar(&host, &large, 2, small());
    assert_eq!(ids(ask(client(&server), 5, &[-2.0, 1.0]).unwrap()), [1, 0]);
}

fn wrong_queries_close_their_connection_only(testbed: &Testbed) {
    let host = host(testbed);
    let vectors = random_vectors(3, 50, 4);
    let server = testbed.similar(&host, &vectors, 4, small());
    let bystander = client(&server);
    let good = query_bytes(3, &[0.5; 4]);
    let corrupted = |at: usize, byte: u8| {
        let mut bytes = good.clone();
        bytes[at] = byte;
        bytes
    };
    let cases: [(Vec<u8>, u32); 8] = [
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n".to_vec(), 1),
        (corrupted(12, 1), 1),
        (corrupted(8, 5), 2),
        (corrupted(11, 255), 2),
        (query_bytes(0, &[0.5; 4]), 3),
        (query_bytes(129, &[0.5; 4]), 3),
        (query_bytes(u32::MAX, &[0.5; 4]), 3),
        (query_bytes(3, &[0.5, f32::NAN, 0.5, 0.5]), 4),
    ];
    for (bytes, status) in &cases {
        let mut stream = client(&server);
        stream.write_all(bytes).unwrap();
        let mut reply = Vec::new();
        // A reset may discard the answer.
        if stream.read_to_end(&mut reply).is_ok() {
            assert_eq!((reply.len(), reply[4]), (HEAD, *status as u8), "{bytes:?}");
        }
        let query = [0.25; 4];
        assert_eq!(ask(&bystander, 5, &query).unwrap(), search(&vectors, &query, 5));
    }
    until("all are counted", || server.stats().unwrap().refused == cases.len() as u64);
    // A query that is cut off affects only its own connection.
    let mut cut = client(&server);
    cut.write_all(&good[..HEAD + 3]).unwrap();
    drop(cut);
    until("it is closed", || server.stats().unwrap().closed == cases.len() as u64 + 1);
    // Queries that arrive byte by byte, or several at a time, are answered.
    let mut slow = client(&server);
    for byte in &good {
        slow.write_all(&[*byte]).unwrap();
    }
    slow.write_all(&good).unwrap();
    let mut answers = vec![0; 2 * (HEAD + 3 * 8)];
    slow.read_exact(&mut answers).unwrap();
    assert_eq!(answers[..HEAD + 24], answers[HEAD + 24..]);
}

fn incomplete_queries_time_out(testbed: &Testbed) {
    let host = host(testbed);
    let vectors = random_vectors(3, 50, 4);
    let idle_timeout = Duration::from_millis(200);
    let server = testbed.similar(&host, &vectors, 4, SimilarOptions { idle_timeout, ..small() });
    let bystander = client(&server);
    let good = query_bytes(3, &[0.5; 4]);
    for len in [1, HEAD, good.len() - 1] {
        let begun = Instant::now();
        let mut stream = client(&server);
        stream.write_all(&good[..len]).unwrap();
        let mut reply = Vec::new();
        let _ = stream.read_to_end(&mut reply);
        assert!(reply.is_empty() && begun.elapsed() >= idle_timeout / 2);
        assert!(begun.elapsed() < test_timeout());
        ask(&bystander, 1, &[1.0; 4]).unwrap();
    }
}

fn too_many_similarity_clients(testbed: &Testbed) {
    let host = host(testbed);
    let vectors = random_vectors(3, 50, 4);
    let options = SimilarOptions { clients: 3, workers: 1, ..small() };
    let server = testbed.similar(&host, &vectors, 4, options);
    let first: Vec<_> = (0..3).map(|_| client(&server)).collect();
    for stream in &first {
        ask(stream, 1, &[1.0; 4]).unwrap();
    }
    let mut reply = Vec::new();
    client(&server).read_to_end(&mut reply).unwrap();
    assert_eq!((reply.len(), reply[4]), (HEAD, 5));
    drop(first);
    until("a slot is free again", || ask(client(&server), 1, &[1.0; 4]).is_ok());
}

fn bad_vectors_and_options(testbed: &Testbed) {
    let host = host(testbed);
    let refused = |vectors: &[f32], dimension, options| {
        let server = SimilarServer::start_on_threads(&host, vectors, dimension, options, |_, _| {});
        server.map(drop).unwrap_err().to_string()
    };
    assert!(
        refused(&[1.0; 5], 2, small()).contains("5 components do not form vectors of dimension 2")
    );
    assert!(refused(&[], 2, small()).contains("0 components"));
    assert!(refused(&[1.0], 0, small()).contains("dimension is 0"));
    assert!(refused(&[1.0, f32::INFINITY], 1, small()).contains("vector 1"));
    let none = SimilarOptions { workers: 0, ..small() };
    assert!(refused(&[1.0], 1, none).contains("0 workers"));
    let huge = SimilarOptions { max_k: 5000, ..small() };
    assert!(refused(&[1.0], 1, huge).contains("5000 matches"));
    let other = std::net::TcpListener::bind(ANYWHERE).unwrap();
    let taken = SimilarOptions { address: other.local_addr().unwrap(), ..small() };
    if testbed.platform != crate::sock::testbed::Platform::Threads {
        let error = SimilarServer::start(&host, &[1.0], 1, taken).unwrap_err();
        assert!(error.to_string().contains("in use"), "{error}");
    }
}

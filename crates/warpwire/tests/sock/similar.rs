//! The similarity server: what it finds, in both families, and what it makes of bad clients.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use warpwire::sock::{SockHost, SockOptions, warp};
use warpwire_apps::similarity::{
    HEAD, Over, Questions, SimilarOptions, SimilarServer, ask, query_bytes, random_vectors, search,
};

use crate::sock::scripted::test_timeout;
use crate::sock::testbed::{ClosedPort, Testbed, until};
use testkit::cases;

cases!(Testbed; CASES:
    answers_are_those_of_a_cpu,
    many_clients_at_once,
    answers_over_rdma,
    kernels_ask_a_kernel,
    kernels_that_ask_in_vain,
    ties_and_more_than_there_are,
    wrong_queries_close_their_connection_only,
    half_a_query_is_not_waited_for_for_ever,
    too_many_similarity_clients,
    bad_vectors_and_options,
);

const ANYWHERE: SocketAddr =
    SocketAddr::V4(std::net::SocketAddrV4::new(std::net::Ipv4Addr::LOCALHOST, 0));

fn host(testbed: &Testbed) -> SockHost {
    let options = SockOptions { sockets: 128, ring: 16 << 10, ..testbed.options() }.fitted();
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
        // A vector of the server's own, made long, finds itself first.
        let own = (count - 1) as usize * dimension as usize;
        let query: Vec<f32> = vectors[own..].iter().map(|part| part * 100.0).collect();
        assert_eq!(ask(&stream, k, &query).unwrap(), search(&vectors, &query, k));
        assert_eq!(server.stats().unwrap().queries, 6);
    }
}

fn many_clients_at_once(testbed: &Testbed) {
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
    until("all have gone", || server.stats().unwrap().closed == 8);
    assert_eq!(server.stats().unwrap().queries, 160);
}

fn answers_over_rdma(testbed: &Testbed) {
    let host = host(testbed);
    let vectors = random_vectors(6, 500, 48);
    let options = SimilarOptions { over: Over::Warp, ..small() };
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
    // A wrong one is refused, and the others go on.
    let refused = ask(&streams[0], 9, &[1.0; 47]).unwrap_err();
    assert!(refused.to_string().contains("another dimension"), "{refused}");
    let query = random_vectors(999, 1, 48);
    assert_eq!(ask(&streams[1], 2, &query).unwrap(), search(&vectors, &query, 2));
    drop(streams);
    until("all have gone", || server.stats().unwrap().closed == 3);
}

/// Questions of a kernel, with patience.
fn questions(server: SocketAddr, over: Over, vectors: &[f32]) -> Questions<'_> {
    Questions { server, over, k: 6, vectors, dimension: 20, timeout: test_timeout() }
}

fn kernels_ask_a_kernel(testbed: &Testbed) {
    // Each has a host of its own, as on two GPUs.
    let (here, there) = (host(testbed), host(testbed));
    let vectors = random_vectors(8, 900, 20);
    let queries = random_vectors(9, 15, 20);
    let asker = testbed.asker(&here);
    for over in [Over::Inet, Over::Warp] {
        let server = testbed.similar(&there, &vectors, 20, SimilarOptions { over, ..small() });
        let asked = questions(server.address(), over, &queries);
        let found = asker.ask(&asked).unwrap();
        assert_eq!(found.len(), 15);
        for (query, found) in queries.chunks_exact(20).zip(found) {
            assert_eq!(found, search(&vectors, query, 6), "{over:?}");
        }
    }
}

fn kernels_that_ask_in_vain(testbed: &Testbed) {
    let (here, there) = (host(testbed), host(testbed));
    let vectors = random_vectors(8, 90, 20);
    let asker = testbed.asker(&here);
    let server = testbed.similar(&there, &vectors, 20, SimilarOptions { most_k: 5, ..small() });
    let queries = random_vectors(9, 3, 20);
    let asked = questions(server.address(), Over::Inet, &queries);
    let refused = asker.ask(&asked).unwrap_err();
    assert!(refused.to_string().contains("or too many"), "{refused}");
    let none = Questions { k: 0, ..asked };
    assert!(asker.ask(&none).is_err());
    let closed_port = ClosedPort::at(ANYWHERE);
    for over in [Over::Inet, Over::Warp] {
        let asked = questions(closed_port.name, over, &queries);
        let error = asker.ask(&asked).unwrap_err();
        assert!(error.to_string().contains("refused"), "{error}");
    }
    // One that takes the query and says nothing.
    let mute = std::net::TcpListener::bind(ANYWHERE).unwrap();
    let at = mute.local_addr().unwrap();
    let brief =
        Questions { timeout: Duration::from_millis(100), ..questions(at, Over::Inet, &queries) };
    let error = asker.ask(&brief).unwrap_err();
    assert!(error.to_string().contains("timed out"), "{error}");
}

fn ties_and_more_than_there_are(testbed: &Testbed) {
    let host = host(testbed);
    let vectors = [1.0, 2.0, 1.0, 0.0, 2.0, -1.0];
    let server = testbed.similar(&host, &vectors, 1, small());
    let stream = client(&server);
    let ids = |found: Vec<warpwire_apps::similarity::Match>| -> Vec<u32> {
        found.into_iter().map(|one| one.id).collect()
    };
    assert_eq!(ids(ask(&stream, 100, &[1.0]).unwrap()), [1, 4, 0, 2, 3, 5]);
    assert_eq!(ids(ask(&stream, 3, &[-1.0]).unwrap()), [5, 3, 0]);
    assert_eq!(ids(ask(&stream, 2, &[0.0]).unwrap()), [0, 1]);
    drop((stream, server)); // a GPU on which a server runs loads no other
    // Scores that are no numbers are never found: infinite less infinite.
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
    let spoilt = |at: usize, byte: u8| {
        let mut bytes = good.clone();
        bytes[at] = byte;
        bytes
    };
    let cases: [(Vec<u8>, u32); 8] = [
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n".to_vec(), 1),
        (spoilt(12, 1), 1),
        (spoilt(8, 5), 2),
        (spoilt(11, 255), 2),
        (query_bytes(0, &[0.5; 4]), 3),
        (query_bytes(129, &[0.5; 4]), 3),
        (query_bytes(u32::MAX, &[0.5; 4]), 3),
        (query_bytes(3, &[0.5, f32::NAN, 0.5, 0.5]), 4),
    ];
    for (bytes, status) in &cases {
        let mut stream = client(&server);
        stream.write_all(bytes).unwrap();
        let mut said = Vec::new();
        // A reset may take the last words away.
        if stream.read_to_end(&mut said).is_ok() {
            assert_eq!((said.len(), said[4]), (HEAD, *status as u8), "{bytes:?}");
        }
        let query = [0.25; 4];
        assert_eq!(ask(&bystander, 5, &query).unwrap(), search(&vectors, &query, 5));
    }
    until("all are counted", || server.stats().unwrap().refused == cases.len() as u64);
    // One that is cut off in the middle is nobody's fault but its own.
    let mut cut = client(&server);
    cut.write_all(&good[..HEAD + 3]).unwrap();
    drop(cut);
    until("it has gone", || server.stats().unwrap().closed == cases.len() as u64 + 1);
    // Queries that come byte by byte, or together, are answered.
    let mut slow = client(&server);
    for byte in &good {
        slow.write_all(&[*byte]).unwrap();
    }
    slow.write_all(&good).unwrap();
    let mut answers = vec![0; 2 * (HEAD + 3 * 8)];
    slow.read_exact(&mut answers).unwrap();
    assert_eq!(answers[..HEAD + 24], answers[HEAD + 24..]);
}

fn half_a_query_is_not_waited_for_for_ever(testbed: &Testbed) {
    let host = host(testbed);
    let vectors = random_vectors(3, 50, 4);
    let patience = Duration::from_millis(200);
    let server = testbed.similar(&host, &vectors, 4, SimilarOptions { patience, ..small() });
    let bystander = client(&server);
    let good = query_bytes(3, &[0.5; 4]);
    for len in [1, HEAD, good.len() - 1] {
        let begun = Instant::now();
        let mut stream = client(&server);
        stream.write_all(&good[..len]).unwrap();
        let mut said = Vec::new();
        let _ = stream.read_to_end(&mut said);
        assert!(said.is_empty() && begun.elapsed() >= patience / 2);
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
    let mut said = Vec::new();
    client(&server).read_to_end(&mut said).unwrap();
    assert_eq!((said.len(), said[4]), (HEAD, 5));
    drop(first);
    until("there is room again", || ask(client(&server), 1, &[1.0; 4]).is_ok());
}

fn bad_vectors_and_options(testbed: &Testbed) {
    let host = host(testbed);
    let refused = |vectors: &[f32], dimension, options| {
        let server = SimilarServer::start_on_threads(&host, vectors, dimension, options, |_, _| {});
        server.map(drop).unwrap_err().to_string()
    };
    assert!(refused(&[1.0; 5], 2, small()).contains("5 numbers are no vectors of 2"));
    assert!(refused(&[], 2, small()).contains("0 numbers"));
    assert!(refused(&[1.0], 0, small()).contains("0 components"));
    assert!(refused(&[1.0, f32::INFINITY], 1, small()).contains("vector 1"));
    let none = SimilarOptions { workers: 0, ..small() };
    assert!(refused(&[1.0], 1, none).contains("0 workers"));
    let huge = SimilarOptions { most_k: 5000, ..small() };
    assert!(refused(&[1.0], 1, huge).contains("5000 matches"));
    let other = std::net::TcpListener::bind(ANYWHERE).unwrap();
    let taken = SimilarOptions { address: other.local_addr().unwrap(), ..small() };
    if testbed.platform != crate::sock::testbed::Platform::Threads {
        let error = SimilarServer::start(&host, &[1.0], 1, taken).unwrap_err();
        assert!(error.to_string().contains("in use"), "{error}");
    }
}

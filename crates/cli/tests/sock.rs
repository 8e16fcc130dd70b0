//! The built command: `warpwire sock`, on the simulated GPU.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use serde_json::Value;

fn warpwire(arguments: &[&str]) -> Command {
    let mut command = crate::warpwire();
    command.arg("sock").args(arguments);
    command
}

fn run(arguments: &[&str]) -> Output {
    warpwire(arguments).output().unwrap()
}

fn json(arguments: &[&str]) -> Value {
    let output = run(arguments);
    assert!(output.status.success(), "{arguments:?}: {}", text(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// A started server; killed on drop.
struct Server {
    child: Child,
    address: String,
}

impl Server {
    fn start(arguments: &[&str]) -> Self {
        Self::start_by(&[arguments, &["-d", "sim:0"]].concat())
    }

    fn start_by(arguments: &[&str]) -> Self {
        let arguments = [arguments, &["--bind", "127.0.0.1:0"]].concat();
        let mut child = warpwire(&arguments).stdout(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut listen_lines =
            lines.map_while(Result::ok).filter(|line| line.contains("listens at"));
        let address = listen_lines.next().unwrap().rsplit(' ').next().unwrap().to_owned();
        Self { child, address }
    }

    fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(&self.address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        stream
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn an_echo_kernel_returns_every_byte() {
    let report = json(&["echo", "-d", "sim:0", "-s", "256KiB", "--json"]);
    assert_eq!(report["wrong"], 0);
    assert_eq!(report["messages"], 57);
}

/// 300 silent connections to a listener of RDMA sockets, with the usual limit of descriptors.
#[test]
fn silent_strangers_cost_a_descriptor_each() {
    let mut command = Command::new("sh");
    let program = env!("CARGO_BIN_EXE_warpwire");
    let line =
        format!("ulimit -n 1024; exec {program} sock serve --family warp --cpu --bind 127.0.0.1:0");
    let mut child = command.args(["-c", &line]).stdout(Stdio::piped()).spawn().unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut lines = lines.map_while(Result::ok).filter(|line| line.contains("listens at"));
    let address = lines.next().unwrap().rsplit(' ').next().unwrap().to_owned();
    let server = Server { child, address };
    let silent: Vec<_> = (0..300).map(|_| server.connect()).collect();
    let count = || {
        let folder = format!("/proc/{}/fd", server.child.id());
        std::fs::read_dir(folder).unwrap().count()
    };
    testkit::until("the connections are accepted", || count() >= 200);
    for _ in 0..3 {
        let command = ["connect", &server.address, "--family", "warp", "--cpu", "--send", "hello"];
        let output = run(&[&command[..], &["--timeout", "5", "--max-bytes", "5"]].concat());
        assert!(output.status.success(), "{}", text(&output.stderr));
        assert_eq!(text(&output.stdout), "hello");
    }
    assert!(count() < 400, "{} descriptors for 300 silent connections", count());
    drop(silent);
}

#[test]
fn kernel_and_cpu_sockets_are_measured() {
    let lat = json(&["lat", "-d", "sim:0", "-n", "50", "--json"]);
    assert_eq!(lat["size"], 64);
    assert!(lat["kernel_us"].as_f64().unwrap() > 0.0 && lat["cpu_us"].as_f64().unwrap() > 0.0);
    let bw = json(&["bw", "-d", "sim:0", "-t", "4MiB", "--json"]);
    assert_eq!(bw["rows"].as_array().unwrap().len(), 2);
    assert!(bw["rows"][1]["kernel_mb_s"].as_f64().unwrap() > 0.0);
}

#[test]
fn a_kernel_serves_key_value_clients() {
    let server = Server::start(&["kv"]);
    let mut client = server.connect();
    client.write_all(b"SET a 1\r\nINCR a\r\nQUIT\r\n").unwrap();
    let mut answers = String::new();
    client.read_to_string(&mut answers).unwrap();
    assert_eq!(answers, "+OK\r\n:2\r\n+OK\r\n");
}

#[test]
fn load_verifies_every_reply() {
    let server = Server::start(&["kv"]);
    let small = ["-c", "4", "-n", "200", "-P", "5", "--json"];
    let report = json(&[&["load", server.address.as_str()][..], &small].concat());
    for row in report["rows"].as_array().unwrap() {
        assert_eq!(row["wrong"], 0, "{row}");
    }
    // A server with other replies is detected.
    let other = Server::start(&["serve"]);
    let wrong = run(&[&["load", other.address.as_str()][..], &small].concat());
    assert_eq!(wrong.status.code(), Some(1), "{}", text(&wrong.stdout));
}

#[test]
fn similar_vectors_are_found_in_both_families() {
    let vectors = ["--vectors", "400", "--dimension", "24", "-k", "5"];
    for family in ["inet", "warp"] {
        let server = Server::start(&[&["similar", "--family", family][..], &vectors].concat());
        let ask = |more: &[&str]| {
            let client = ["similar", "--connect", server.address.as_str(), "--family", family];
            run(&[&client[..], &vectors, &["-n", "60", "-c", "3", "--json"], more].concat())
        };
        let good = ask(&[]);
        assert!(good.status.success(), "{}", text(&good.stderr));
        let report: Value = serde_json::from_slice(&good.stdout).unwrap();
        assert_eq!((&report["wrong"], &report["queries"]), (&0.into(), &60.into()), "{report}");
        let kernel = ask(&["--from-kernel", "-d", "sim:0"]);
        assert!(kernel.status.success(), "{}", text(&kernel.stderr));
        // A client with other vectors detects the mismatch; one that wants too many matches is
        // refused.
        let other = ask(&["--seed", "2"]);
        assert_eq!(other.status.code(), Some(1), "{}", text(&other.stdout));
        let many = run(&[
            "similar",
            "--connect",
            &server.address,
            "--family",
            family,
            "--vectors",
            "400",
            "--dimension",
            "24",
            "-k",
            "6",
        ]);
        assert_eq!(many.status.code(), Some(1));
        assert!(text(&many.stderr).contains("too large"), "{}", text(&many.stderr));
    }
}

#[test]
fn a_kernel_answers_http() {
    let server = Server::start(&["serve", "--service", "http"]);
    let ask = |question: &[u8]| {
        let mut client = server.connect();
        client.write_all(question).unwrap();
        let mut answer = String::new();
        client.read_to_string(&mut answer).unwrap();
        answer
    };
    let good = ask(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n");
    assert!(good.starts_with("HTTP/1.1 200 OK\r\n") && good.ends_with("hello from a kernel\n"));
    // Headers that never end.
    let bad = ask(&[b'x'; 32 << 10]);
    assert!(bad.starts_with("HTTP/1.1 431 "), "{bad}");
    assert!(ask(b"GET / HTTP/1.0\r\n\r\n").contains("200 OK"), "the server continues");
}

#[test]
fn a_kernel_is_a_client() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let serving = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut question = [0; 10];
        stream.read_exact(&mut question).unwrap();
        stream.write_all(b"an answer").unwrap();
        question
    });
    let output = run(&["connect", &address, "-d", "sim:0", "--send", "question\\r\\n"]);
    assert_eq!(text(&output.stdout), "an answer");
    assert_eq!(&serving.join().unwrap(), b"question\r\n");
}

#[test]
fn invalid_arguments_and_addresses_are_refused() {
    // No program listens there, nor gets it as a free port.
    let closed_port = "127.0.0.1:1";
    let refused = run(&["connect", closed_port, "-d", "sim:0"]);
    assert_eq!(refused.status.code(), Some(1));
    assert!(text(&refused.stderr).contains("Connection refused"), "{}", text(&refused.stderr));
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let in_use = run(&["kv", "-d", "sim:0", "--bind", &address, "--seconds", "1"]);
    assert_eq!(in_use.status.code(), Some(1));
    assert!(text(&in_use.stderr).contains("in use"), "{}", text(&in_use.stderr));
    for wrong in [
        &["connect", "nowhere", "-d", "sim:0"][..],
        &["connect", "127.0.0.1:1", "-d", "sim:0", "--send", "\\q"],
        &["serve", "-d", "sim:9"],
        &["lat", "-s", "0"],
        &["similar", "--dimension", "0"],
        &["kv", "-d", "sim:0", "--family", "warp"],
        &["similar", "--from-kernel"],
        &["similar", "--vectors", "4000000000", "--dimension", "1000"],
    ] {
        assert_eq!(run(wrong).status.code(), Some(2), "{wrong:?}");
    }
}

#[test]
fn warp_sockets_echo_and_are_measured() {
    let warp = ["-d", "sim:0", "--family", "warp", "--json"];
    let with = |arguments: &[&str]| json(&[arguments, &warp].concat());
    let report = with(&["echo", "-s", "64KiB"]);
    assert_eq!((&report["wrong"], &report["messages"]), (&0.into(), &51.into()));
    for peer in ["cpu", "kernel"] {
        let lat = with(&["lat", "-n", "20", "--peer", peer]);
        assert_eq!((lat["family"].as_str(), lat["peer"].as_str()), (Some("warp"), Some(peer)));
        assert!(lat["kernel_us"].as_f64().unwrap() > 0.0);
        let bw = with(&["bw", "-t", "4MiB", "--peer", peer]);
        assert!(bw["rows"][0]["kernel_mb_s"].as_f64().unwrap() > 0.0);
    }
}

#[test]
fn cpu_programs_use_both_families() {
    for family in ["inet", "warp"] {
        let with = |arguments: &[&str]| {
            json(&[arguments, &["--cpu", "--family", family, "--json"]].concat())
        };
        let report = with(&["echo", "-s", "64KiB"]);
        assert_eq!((&report["wrong"], &report["device"]), (&0.into(), &"cpu".into()));
        for measured in [with(&["lat", "-n", "200"]), with(&["bw", "-t", "4MiB"])] {
            assert_eq!(measured["family"].as_str(), Some(family));
            assert!(measured["rows"][0]["value"].as_f64().unwrap() > 0.0);
        }
        let server = Server::start_by(&["serve", "--cpu", "--family", family]);
        let ask =
            ["connect", &server.address, "--cpu", "--family", family, "--send", "hello there"];
        assert_eq!(text(&run(&ask).stdout), "hello there");
        // A kernel can be the client of a CPU server.
        let ask = ["connect", &server.address, "-d", "sim:0", "--family", family, "--timeout", "1"];
        assert!(
            run(&[&ask[..], &["--send", "x"]].concat()).status.code().is_some_and(|code| code < 2)
        );
        let again = run(&["serve", "--cpu", "--family", family, "--bind", &server.address]);
        assert!(text(&again.stderr).contains("cannot listen at"), "the address is taken");
    }
    let refused = run(&["connect", "127.0.0.1:1", "--cpu", "--family", "warp"]);
    assert!(text(&refused.stderr).contains("cannot connect to"), "{}", text(&refused.stderr));
    for wrong in [
        &["lat", "--cpu", "-d", "sim:0"][..],
        &["lat", "--cpu", "--peer", "kernel"],
        &["serve", "--cpu", "--service", "http"],
    ] {
        assert_eq!(run(wrong).status.code(), Some(2), "{wrong:?}");
    }
}

#[test]
fn a_kernel_talks_to_a_kernel_of_another_process() {
    let server = Server::start(&["serve", "--family", "warp"]);
    let ask = |family: &str| {
        let options =
            ["--family", family, "-d", "sim:0", "--timeout", "2", "--send", "hello there\\n"];
        run(&[&["connect", &server.address][..], &options].concat())
    };
    // The echo continues until its client closes: the reply is what arrived by then, or a timeout.
    let stranger = ask("inet");
    assert!(!text(&stranger.stdout).contains("hello there"), "a TCP client must not get an echo");
    assert!(server.connect().write_all(b"nonsense\n").is_ok());
    let friend = ask("warp");
    let output_text = text(&friend.stdout) + &text(&friend.stderr);
    assert!(
        output_text.contains("hello there") || output_text.contains("timed out"),
        "{output_text}"
    );
}

#[test]
fn addresses_without_a_port_get_advice() {
    for words in [
        &["sock", "serve", "--bind", "127.0.0.1"][..],
        &["sock", "kv", "--bind", "localhost"],
        &["sock", "similar", "--connect", "7001"],
        &["sock", "load", "127.0.0.1"],
    ] {
        let output = crate::warpwire().args(words).output().unwrap();
        assert_eq!(output.status.code(), Some(2));
        let text = crate::stderr(&output);
        assert!(text.contains("write an address with a port, as in 127.0.0.1:7000"), "{text}");
    }
}

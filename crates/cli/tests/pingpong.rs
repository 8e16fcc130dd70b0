//! The built command: `warpwire pingpong`, both sides on the loopback interface.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, ChildStdout, Command, Output, Stdio};

use serde_json::Value;

fn warpwire(arguments: &[&str]) -> Command {
    let mut command = crate::warpwire();
    command.arg("pingpong").args(arguments);
    command
}

fn run(arguments: &[&str]) -> Output {
    warpwire(arguments).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Two loopback addresses that no other test uses: RoCE has one fixed port per address.
fn addresses(test: u8) -> [String; 2] {
    let [_, a, b, c] = std::process::id().to_be_bytes();
    [1, 2].map(|end| format!("127.{}.{}.{}", 100 + (a ^ b) % 100, c, test * 8 + end))
}

/// Starts a server; returns it, its TCP port and the rest of its output.
fn server(arguments: &[&str]) -> (Child, String, BufReader<ChildStdout>) {
    let arguments = [arguments, &["-p", "0"]].concat();
    let mut command = warpwire(&arguments);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut out = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    out.read_line(&mut line).unwrap();
    let port = line.trim().rsplit(':').next().unwrap().to_owned();
    (child, port, out)
}

/// Runs both sides with these arguments; returns the client's report and the server's output.
fn pair(test: u8, words: &[&str]) -> (Value, String) {
    let [near, far] = addresses(test);
    let (mut child, port, mut out) = server(&[words, &["--from", &far]].concat());
    let client = ["127.0.0.1", "-p", &port, "--from", &near, "--json"];
    let client = run(&[words, &client].concat());
    assert!(client.status.success(), "{words:?}: {}", text(&client.stderr));
    let mut printed = String::new();
    out.read_to_string(&mut printed).unwrap();
    assert!(child.wait().unwrap().success());
    (serde_json::from_slice(&client.stdout).unwrap(), printed)
}

#[test]
fn help_matches_the_snapshot() {
    let help = text(&run(&["--help"]).stdout);
    assert!(help.lines().all(|line| line.chars().count() <= 120), "{help}");
    insta::assert_snapshot!("help_pingpong", help);
}

#[test]
fn round_trips_are_measured_and_verified() {
    for words in [&["-n", "30"][..], &["-n", "30", "-s", "10001", "-m", "512", "-e", "-r", "2"]] {
        let (report, printed) = pair(1, words);
        assert_eq!((&report["role"], &report["verified"]), (&"client".into(), &true.into()));
        assert_eq!(report["iterations"], 30);
        assert!(report["usec_per_iteration"].as_f64() > Some(0.0), "{report}");
        let gid = report["remote"]["gid"].as_str().unwrap();
        assert!(gid.starts_with("::ffff:127."), "{gid}");
        assert!(
            printed.contains("30 iters in ") && printed.contains("remote address:"),
            "{printed}"
        );
    }
}

#[test]
fn gpu_memory_over_a_faulty_link() {
    let words = ["-n", "40", "-s", "5000", "--mem", "sim:0", "--fault", "loss=3%,seed=2"];
    let (report, _) = pair(2, &words);
    assert_eq!(report["verified"], true);
    assert!(report["counters"]["resent"].as_u64() > Some(0), "{report}");
}

#[test]
fn different_sizes_fail_on_both_sides() {
    let [near, far] = addresses(3);
    let (child, port, _out) = server(&["-n", "5", "-s", "1000", "--from", &far]);
    let words = ["127.0.0.1", "-p", &port, "--from", &near, "-n", "5", "-s", "2000"];
    let client = run(&words);
    let server = child.wait_with_output().unwrap();
    for output in [client, server] {
        assert_eq!(output.status.code(), Some(1));
        assert!(text(&output.stderr).contains("-s"), "{}", text(&output.stderr));
    }
}

#[test]
fn a_peer_with_another_protocol_is_reported() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port().to_string();
    let other = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let hello = b"SSH-2.0-OpenSSH_9.2p1 Debian-2+deb12u3 and then some more bytes\r\n";
        std::io::Write::write_all(&mut stream, hello).unwrap();
        let _ = stream.read(&mut [0; 64]);
    });
    let [near, _] = addresses(4);
    let output = run(&["127.0.0.1", "-p", &port, "--from", &near, "--timeout", "5"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("ibv_rc_pingpong"), "{}", text(&output.stderr));
    other.join().unwrap();
}

#[test]
fn strangers_do_not_end_a_server() {
    use std::io::Write;
    let [near, far] = addresses(6);
    let (mut child, port, _out) = server(&["-n", "5", "--from", &far]);
    let connect = || std::net::TcpStream::connect(("127.0.0.1", port.parse().unwrap())).unwrap();
    drop(connect());
    let mut slow = connect();
    slow.write_all(b"0000:00").unwrap();
    connect().write_all(&[b'x'; 100]).unwrap();
    let client = run(&["127.0.0.1", "-p", &port, "--from", &near, "-n", "5"]);
    assert!(client.status.success(), "{}", text(&client.stderr));
    assert!(child.wait().unwrap().success());
}

#[test]
fn invalid_arguments_are_refused() {
    let cases: [(&[&str], &str); 6] = [
        (&["-s", "0"], "1 byte"),
        (&["-n", "0"], "0"),
        (&["-m", "1500"], "4096"),
        (&["-r", "0"], "0"),
        (&["--from", "nowhere"], "nowhere"),
        (&["10.0.0.1", "--bind", "10.0.0.2"], "--bind"),
    ];
    for (words, wanted) in cases {
        let output = run(words);
        assert_eq!(output.status.code(), Some(2), "{words:?}");
        assert!(text(&output.stderr).contains(wanted), "{words:?}: {}", text(&output.stderr));
    }
    let alone = run(&["-p", "0", "--timeout", "0.2"]);
    assert_eq!(alone.status.code(), Some(1));
    assert!(text(&alone.stderr).contains("no peer connected"), "{}", text(&alone.stderr));
    let [_, far] = addresses(5);
    let (mut child, port, _out) = server(&["--timeout", "5", "--from", &far]);
    // An address that this machine does not have.
    let output = run(&["127.0.0.1", "-p", &port, "--from", "192.0.2.1"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("192.0.2.1"), "{}", text(&output.stderr));
    assert_eq!(child.wait().unwrap().code(), Some(1), "the client disconnected");
}

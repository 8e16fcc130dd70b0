//! The built command: `warpwire perf` and `warpwire stat`, on the loopback interface.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use serde_json::Value;
use testkit::Effort;

use crate::{stderr, stdout};

fn warpwire(arguments: &[&str]) -> Command {
    let mut command = crate::warpwire();
    command.args(arguments);
    command
}

fn run(arguments: &[&str]) -> Output {
    warpwire(arguments).output().unwrap()
}

/// Standard output of a `perf` that must succeed.
fn perf(arguments: &[&str]) -> String {
    let output = run(&[&["perf"], arguments].concat());
    assert_eq!(output.status.code(), Some(0), "{arguments:?}: {}", stderr(&output));
    stdout(&output)
}

fn json(arguments: &[&str]) -> Value {
    serde_json::from_str(&perf(&[arguments, &["--local", "--json"]].concat())).unwrap()
}

/// Starts a server; returns it and its TCP port.
fn server(arguments: &[&str]) -> (Child, String) {
    let arguments = [&["perf"], arguments, &["--announce"]].concat();
    let mut command = warpwire(&arguments);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    let mut out = BufReader::new(child.stdout.take().unwrap());
    out.read_line(&mut line).unwrap();
    std::thread::spawn(move || std::io::copy(&mut out, &mut std::io::sink()));
    (child, line.trim().to_owned())
}

fn assert_positive(value: &Value) {
    assert!(value.as_f64().is_some_and(|number| number > 0.0), "{value}");
}

#[test]
fn help_matches_the_snapshots() {
    for tool in ["perf", "stat"] {
        let text = stdout(&run(&[tool, "--help"]));
        insta::assert_snapshot!(format!("help_{tool}"), text);
    }
}

#[test]
fn write_bw_prints_json() {
    let report = json(&["write", "bw", "-s", "64K", "-n", "200"]);
    let row = &report["rows"][0];
    assert_eq!((&row["bytes"], &row["iterations"]), (&65536.into(), &200.into()));
    assert_eq!(row["verified"], true);
    for figure in ["peak_mb_s", "average_mb_s", "average_gbits", "mpps"] {
        assert_positive(&row[figure]);
    }
    assert!(row["peak_mb_s"].as_f64() >= row["average_mb_s"].as_f64(), "{row}");
    for side in ["local", "remote"] {
        assert!(report[side]["link"].as_str().unwrap().starts_with("udp 127.0.0.1:"), "{report}");
        assert_eq!(report[side]["path"], "host memory");
    }
    assert_eq!(report["test"]["verb"], "write");
    assert!(report["counters"]["bytes_sent"].as_u64() >= Some(200 * 65536), "{report}");
}

#[test]
fn every_verb_has_bandwidth_and_latency() {
    for verb in ["write", "read", "send", "atomic"] {
        let size: &[&str] = if verb == "atomic" { &[] } else { &["-s", "5001"] };
        let report = json(&[&[verb, "bw", "-n", "100", "-q", "3", "-t", "8"], size].concat());
        let row = &report["rows"][0];
        assert_eq!((&row["iterations"], &row["verified"]), (&300.into(), &true.into()), "{verb}");
        let report = json(&[&[verb, "lat", "-n", "50"], size].concat());
        let row = &report["rows"][0];
        assert_eq!((&row["iterations"], &row["verified"]), (&50.into(), &true.into()), "{verb}");
        let figure = |name: &str| row[name].as_f64().unwrap();
        let order = ["min_us", "p50_us", "p90_us", "p99_us", "p999_us", "max_us"].map(figure);
        assert!(order[0] > 0.0 && order.is_sorted(), "{verb}: {row}");
    }
}

#[test]
fn engines_share_the_queue_pairs() {
    for verb in ["write", "read", "send", "atomic"] {
        let size: &[&str] = if verb == "atomic" { &[] } else { &["-a", "--max", "4K"] };
        let test = [verb, "bw", "-n", "40", "-q", "5", "-t", "8", "--engines", "3"];
        let report = json(&[&test[..], size].concat());
        for row in report["rows"].as_array().unwrap() {
            let wanted = (&200.into(), &true.into());
            assert_eq!((&row["iterations"], &row["verified"]), wanted, "{verb}: {row}");
            assert!(row["peak_mb_s"].as_f64() >= row["average_mb_s"].as_f64(), "{row}");
        }
        for side in ["local", "remote"] {
            assert!(report[side]["link"].as_str().unwrap().contains("; 3 engines,"), "{report}");
        }
    }
}

#[test]
fn engines_that_are_not_possible() {
    // A port of its own, which was free a moment ago: well-known ones may be in use. Both ends are
    // in one process: whichever fails first says why, and what to do is the same.
    let free = std::net::UdpSocket::bind("127.0.7.9:0").unwrap().local_addr().unwrap();
    let link = format!("udp:{free}");
    for (arguments, code, why) in [
        (&["--engines", "0"][..], 2, "1..=16"),
        (&["--engines", "17"], 2, "1..=16"),
        (&["--engines", "2", "--device", "mlx5_0"], 2, "cannot be used with"),
        (&["--engines", "2", "--link", "shm"], 1, "use a UDP link"),
        (&["--engines", "2", "--link", "auto"], 1, "use a UDP link"),
        (&["--engines", "2", "--link", &link], 1, "any free one)"),
    ] {
        let output = run(&[&["perf", "write", "bw", "--local", "-n", "9"], arguments].concat());
        let text = stderr(&output);
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {text}");
        assert!(text.contains(why), "{arguments:?}: {text}");
    }
}

#[test]
fn tables_have_perftests_columns() {
    let text = perf(&["write", "bw", "--local", "-a", "--max", "64", "-n", "20", "--report-gbits"]);
    let heading = text.lines().find(|line| line.contains("#bytes")).unwrap();
    let words: Vec<&str> = heading.split_whitespace().collect();
    let wanted = "#bytes #iterations BW peak[Gb/s] BW average[Gb/s] MsgRate[Mpps]";
    assert_eq!(words.join(" "), wanted);
    let sizes: Vec<&str> = text
        .lines()
        .filter_map(|line| line.split_whitespace().next())
        .filter(|word| word.parse::<u64>().is_ok())
        .collect();
    assert_eq!(sizes, ["2", "4", "8", "16", "32", "64"]);
    let head: Vec<&str> = text.lines().filter(|line| line.starts_with('#')).collect();
    assert_eq!(head.len(), 3, "{text}");
    assert!(head[0].starts_with("# perf write bw: RC, 1 queue pair,"), "{text}");
    assert!(head[2].starts_with("# remote: host memory; udp 127.0.0.1:"), "{text}");
    assert!(text.lines().all(|line| line.chars().count() <= 100), "{text}");
}

#[test]
fn operations_in_mapped_memory_are_counted() {
    let write = ["write", "bw", "--link", "shm", "-s", "64K", "-n", "50"];
    // On a busy machine all 50 may be sent before the peer has exported its memory.
    testkit::until("operations are executed in mapped memory", || {
        json(&write)["direct"]["operations"].as_u64() >= Some(50)
    });
    let text = perf(&[&write[..], &["--local"]].concat());
    assert!(text.contains("\n# in mapped memory: "), "{text}");
    // Where none was tried, nothing is said.
    for packets in [&["--no-direct"][..], &["--link", "udp"]] {
        let text = perf(&[&["write", "bw", "--local", "-n", "50"], packets].concat());
        assert!(!text.contains("mapped memory"), "{text}");
    }
}

#[test]
fn all_that_is_known_fits_a_terminal() {
    for link in ["udp", "auto"] {
        let lat = ["write", "lat", "--local", "-v", "--cpu_util", "-n", "50", "--link", link];
        let text = perf(&lat);
        assert!(text.lines().all(|line| line.chars().count() <= 100), "{text}");
        for wanted in ["# local address: QPN ", "# remote link: ", "CPU l/r[%]", "registered by"] {
            assert!(text.contains(wanted), "{wanted}: {text}");
        }
    }
}

#[test]
fn both_directions_at_once() {
    for verb in ["write", "read", "send", "atomic"] {
        let size: &[&str] = if verb == "atomic" { &[] } else { &["-a", "--max", "4K"] };
        let test = [verb, "bw", "-b", "-n", "300", "-q", "3", "-t", "8", "--engines", "2"];
        let report = json(&[&test[..], size].concat());
        assert_eq!(report["test"]["bidirectional"], true);
        for row in report["rows"].as_array().unwrap() {
            assert_eq!(
                (&row["iterations"], &row["verified"]),
                (&900.into(), &true.into()),
                "{row}"
            );
            assert_positive(&row["average_mb_s"]);
        }
        // Both sides sent, so both received.
        let counters = &report["counters"];
        assert!(counters["packets_received"].as_u64() >= Some(900), "{verb}: {report}");
    }
    // A side that is done earlier waits for the other.
    let report = json(&["send", "bw", "-b", "-D", "0.2", "-s", "1K"]);
    assert_eq!(report["rows"][0]["verified"], true);
}

#[test]
fn unreliable_services() {
    // Few messages at a time: none is lost on the way.
    for (verb, service) in [("send", "UD"), ("send", "UC"), ("write", "UC")] {
        for (metric, more) in [("bw", &["-t", "4"][..]), ("lat", &[])] {
            let test = [verb, metric, "-c", service, "-n", "60", "-s", "1000"];
            let report = json(&[&test[..], more].concat());
            let row = &report["rows"][0];
            assert_eq!((&row["iterations"], &row["verified"]), (&60.into(), &true.into()), "{row}");
            assert_eq!(report["test"]["connection"], service);
            let is_counted = verb == "send" && metric == "bw";
            assert_eq!(row["lost"].is_u64(), is_counted, "{verb} {metric} {service}: {row}");
        }
    }
    let output =
        run(&["perf", "send", "bw", "--local", "-c", "ud", "-s", "1M", "-n", "9", "-t", "4"]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert!(stderr(&output).contains("at most the MTU"), "{}", stderr(&output));
    // A client loses all that it sends.
    let lost = ["perf", "send", "lat", "--local", "-c", "UC", "--fault", "loss=100%,seed=1"];
    let output = run(&lost);
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("does not retransmit"), "{}", stderr(&output));
    let lost = ["perf", "send", "bw", "--local", "-c", "UD", "--fault", "loss=100%,seed=1"];
    let output = run(&[&lost[..], &["-n", "20", "-s", "64"]].concat());
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("no message arrived"), "{}", stderr(&output));
}

#[test]
fn events_instead_of_polling() {
    for (verb, metric) in [("send", "bw"), ("send", "lat"), ("write", "bw"), ("read", "lat")] {
        let report = json(&[verb, metric, "-e", "-n", "60", "-s", "4K"]);
        assert_eq!(report["rows"][0]["verified"], true, "{verb} {metric}");
    }
    let manual = run(&["perf", "send", "lat", "--local", "-e", "--progress", "manual"]);
    assert_eq!(manual.status.code(), Some(2), "{}", stderr(&manual));
    assert!(stderr(&manual).contains("omit one of them"), "{}", stderr(&manual));
}

#[test]
fn inline_data_and_signals() {
    for (verb, metric) in [("write", "bw"), ("send", "bw"), ("send", "lat")] {
        let report = json(&[verb, metric, "-I", "512", "-s", "300", "-n", "40", "-Q", "3"]);
        assert_eq!(report["rows"][0]["verified"], true, "{verb} {metric}");
        assert_eq!(
            (&report["test"]["inline"], &report["test"]["cq_mod"]),
            (&512.into(), &3.into())
        );
    }
}

#[test]
fn single_latencies_and_their_histogram() {
    let report = json(&["read", "lat", "-n", "70", "-H", "-U"]);
    let row = &report["rows"][0];
    let times: Vec<f64> =
        row["times_us"].as_array().unwrap().iter().map(|time| time.as_f64().unwrap()).collect();
    assert_eq!(times.len(), 70);
    let min = times.iter().copied().fold(f64::MAX, f64::min);
    assert_eq!(Some(min), row["min_us"].as_f64());
    let bins = row["histogram"].as_array().unwrap();
    let counted: u64 = bins.iter().map(|bin| bin["count"].as_u64().unwrap()).sum();
    assert_eq!(counted, 70, "{row}");
    let text = perf(&["send", "lat", "--local", "-n", "30", "-H", "-U"]);
    assert!(text.contains("from[us]") && text.contains("\n30, "), "{text}");
    let csv = perf(&["send", "lat", "--local", "-n", "30", "-H", "--csv"]);
    let lines: Vec<&str> = csv.lines().collect();
    assert_eq!(lines.len(), 2, "{csv}");
    assert!(lines[0].starts_with("bytes,iterations,min_us,") && lines[1].starts_with("2,30,"));
}

#[test]
fn reports_say_when_and_where() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("report.json");
    let name = format!("--out_json_file={}", file.display());
    let text = perf(&["write", "bw", "--local", "-n", "40", &name, "--report_gbits"]);
    assert!(text.contains("BW average[Gb/s]"), "{text}");
    let report: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    let machine = &report["machine"];
    assert!(machine["date"].as_str().unwrap().ends_with('Z'), "{machine}");
    assert_eq!(machine["host"], report["remote"]["host"]);
    assert_eq!(machine["version"], report["remote"]["version"]);
    assert!(machine["cpus"].as_u64() >= Some(1), "{machine}");
    for side in ["local_cpu_percent", "remote_cpu_percent"] {
        assert_positive(&report["rows"][0][side]);
    }
    let output = run(&["perf", "write", "bw", "--local", "-n", "40", "--out_json_file=/no/such/x"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("/no/such/x"), "{}", stderr(&output));
}

#[test]
fn options_of_perftest() {
    let output = run(&["perf", "write", "bw", "--local", "-F", "-N", "-n", "40", "--tx_depth=4"]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert!(stderr(&output).contains("# -F has no effect"), "{}", stderr(&output));
    assert!(stdout(&output).contains(", 4 in flight,"), "{}", stdout(&output));
    for (option, answer) in [
        ("-R", "warpwire verbs"),
        ("--rdma_cm", "warpwire verbs"),
        ("--odp", "--reg on-demand"),
        ("--use_cuda_dmabuf", "--reg dmabuf"),
        ("--output=bandwidth", "--csv"),
    ] {
        let output = run(&["perf", "write", "bw", option]);
        assert_eq!(output.status.code(), Some(2));
        assert!(stderr(&output).contains(answer), "{}", stderr(&output));
    }
    let cuda = run(&["perf", "write", "bw", "--local", "--use_cuda=77", "--peer-mem", "host"]);
    assert_ne!(cuda.status.code(), Some(0));
    assert!(stderr(&cuda).contains("cuda:77"), "{}", stderr(&cuda));
}

/// A row per second until the client is interrupted; both ends then exit in order.
#[test]
fn a_test_without_end() {
    let command = ["perf", "write", "bw", "--local", "--run_infinitely", "-D", "0.2", "-s", "4K"];
    let mut client = warpwire(&command).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(client.stdout.take().unwrap()).lines();
    let is_row = |line: &String| line.starts_with(" 4096 ");
    assert!(lines.by_ref().map_while(Result::ok).filter(is_row).nth(1).is_some());
    let pid = rustix::process::Pid::from_child(&client);
    rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
    lines.map_while(Result::ok).for_each(drop);
    assert_eq!(client.wait().unwrap().code(), Some(0));
    let both = run(&["perf", "write", "bw", "--local", "--run-infinitely", "-n", "9"]);
    assert_eq!(both.status.code(), Some(2), "{}", stderr(&both));
}

#[test]
fn gpu_memory_on_either_side() {
    for (verb, metric) in [("write", "bw"), ("read", "bw"), ("write", "lat"), ("send", "lat")] {
        let arguments =
            [verb, metric, "-s", "9999", "-n", "30", "--mem", "sim:0", "--peer-mem", "sim:1"];
        let report = json(&arguments);
        assert_eq!(report["rows"][0]["verified"], true, "{verb} {metric}");
        assert_eq!(report["remote"]["memory"], "sim:1");
        assert_eq!(report["remote"]["path"], "window (memfd)", "{report}");
    }
}

#[test]
fn lost_packets_are_retransmitted_and_captured() {
    let folder = tempfile::tempdir().unwrap();
    let capture = folder.path().join("write.pcap");
    let arguments = ["write", "bw", "-s", "64K", "-n", "50", "--fault", "loss=1%,seed=7"];
    let report = json(&[&arguments[..], &["--pcap", capture.to_str().unwrap()]].concat());
    assert_eq!(report["rows"][0]["verified"], true);
    assert_positive(&report["counters"]["resent"]);
    assert!(capture.metadata().unwrap().len() > 50 * 65536);
    let short = folder.path().join("short.pcap");
    let words = ["perf", "write", "bw", "--local", "-n", "50", "--pcap", short.to_str().unwrap()];
    let output = run(&[&words[..], &["--pcap-max", "100KiB"]].concat());
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert!(stderr(&output).contains("short.pcap is full at 100 KiB"), "{}", stderr(&output));
    let len = short.metadata().unwrap().len();
    assert!((90 << 10..=100 << 10).contains(&len), "{len}");
    let alone = run(&["perf", "write", "bw", "--local", "--pcap-max", "100KiB"]);
    assert_eq!(alone.status.code(), Some(2), "{}", stderr(&alone));
}

#[test]
fn a_duration_replaces_the_number_of_messages() {
    for metric in ["bw", "lat"] {
        let start = Instant::now();
        let report = json(&["send", metric, "-D", "0.3", "-s", "1K"]);
        assert!(start.elapsed() > Duration::from_millis(300));
        assert_positive(&report["rows"][0]["iterations"]);
        assert_eq!(report["rows"][0]["verified"], true);
    }
}

#[test]
fn invalid_arguments_are_refused() {
    let cases: [(&[&str], &str); 21] = [
        (&["write"], "<METRIC>"),
        (&["fly", "bw"], "fly"),
        (&["write", "bw", "--local", "-s", "0"], "1 byte"),
        (&["write", "bw", "--local", "-n", "0"], "0"),
        (&["write", "bw", "--local", "--mtu", "1500"], "4096"),
        (&["write", "bw", "--local", "--mem", "disk"], "sim:N"),
        (&["write", "bw", "--local", "--link", "tcp"], "no link"),
        (&["write", "bw", "--local", "--fault", "gremlins"], "gremlins"),
        (&["atomic", "bw", "--local", "-s", "16"], "8 bytes"),
        (&["write", "lat", "--local", "-q", "2"], "one queue pair"),
        (&["write", "bw", "host", "--local"], "--local"),
        (&["write", "bw", "--peer-mem", "sim:0"], "--local"),
        (&["write", "lat", "--local", "-b"], "omit -b"),
        (&["write", "lat", "--local", "-e"], "omit -e"),
        (&["write", "bw", "--local", "-c", "XRC"], "RC, UC, UD"),
        (&["read", "bw", "--local", "-c", "UC"], "UC has no reads"),
        (&["write", "bw", "--local", "-c", "UD"], "sends only"),
        (&["write", "bw", "--local", "-I", "513"], "512"),
        (&["write", "bw", "--local", "-H"], "-H and -U"),
        (&["write", "bw", "--local", "--csv", "--json"], "--csv"),
        (&["write", "bw", "--local", "--use_cuda=0", "--mem", "sim:0"], "--mem"),
    ];
    for (arguments, wanted) in cases {
        let output = run(&[&["perf"], arguments].concat());
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        assert!(stderr(&output).contains(wanted), "{arguments:?}: {}", stderr(&output));
    }
    let output = run(&["perf", "write", "bw", "--local", "--mem", "sim:99"]);
    assert!(!output.status.success());
    assert!(stderr(&output).contains("sim:99"), "{}", stderr(&output));
}

#[test]
fn a_server_without_a_client_times_out() {
    let output = run(&["perf", "write", "bw", "-p", "0", "--timeout", "0.2"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("no peer connected within 0.2 s"), "{}", stderr(&output));
}

#[test]
fn a_client_without_a_server_times_out() {
    // No program listens there, nor gets it as a free port.
    let port = "1";
    let output = run(&["perf", "write", "bw", "127.0.0.1", "-p", port, "--timeout", "0.2"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("127.0.0.1"), "{}", stderr(&output));
    let output = run(&["perf", "write", "bw", "127.0.0.1", "-p", port, "--timeout", "1.5"]);
    let waits = format!("waiting for 127.0.0.1:{port} …\n");
    assert!(stderr(&output).starts_with(&waits), "{}", stderr(&output));
    let output = run(&["perf", "write", "bw", "nosuchhost.invalid", "--timeout", "0.2"]);
    let text = stderr(&output);
    assert!(text.contains("cannot connect to nosuchhost.invalid:18515:"), "{text}");
}

#[test]
fn different_tests_are_refused_by_both_sides() {
    let (child, port) = server(&["read", "bw"]);
    let client = run(&["perf", "write", "bw", "127.0.0.1", "-p", &port]);
    let server = child.wait_with_output().unwrap();
    for output in [client, server] {
        assert_eq!(output.status.code(), Some(1));
        let text = stderr(&output);
        assert!(text.contains("perf read bw") && text.contains("perf write bw"), "{text}");
    }
}

#[test]
fn a_server_takes_sizes_from_its_client() {
    let (child, port) = server(&["write", "bw", "-s", "1M", "--json"]);
    let client = run(&["perf", "write", "bw", "127.0.0.1", "-p", &port, "-s", "4K", "-n", "50"]);
    assert!(stdout(&client).contains("\n 4096       50 "), "{}", stderr(&client));
    assert!(child.wait_with_output().unwrap().status.success());
}

#[test]
fn every_size_of_every_verb() {
    let verbs =
        [("write", "bw"), ("read", "lat"), ("send", "bw"), ("send", "lat"), ("write", "lat")];
    for (verb, metric) in verbs.into_iter().take(Effort::choose([3, 5, 5])) {
        let report = json(&[verb, metric, "-a", "--max", "64K", "-n", "40"]);
        let rows = report["rows"].as_array().unwrap();
        assert_eq!(rows.len(), 16, "{verb} {metric}");
        assert!(rows.iter().all(|row| row["verified"] == true), "{verb} {metric}: {report}");
    }
}

fn connect(port: &str) -> TcpStream {
    let stream = TcpStream::connect(("127.0.0.1", port.parse().unwrap())).unwrap();
    stream.set_read_timeout(Some(testkit::deadline(Duration::from_secs(10)))).unwrap();
    stream
}

/// Sends bytes and returns the answer.
fn answer_to(port: &str, bytes: &[u8]) -> String {
    let mut stream = connect(port);
    stream.write_all(bytes).unwrap();
    let mut answer = String::new();
    let _ = stream.read_to_string(&mut answer);
    answer
}

/// Sends a blank every 20 ms until the server disconnects.
fn drip(port: &str) -> std::thread::JoinHandle<()> {
    let mut stream = connect(port);
    std::thread::spawn(move || {
        while stream.write_all(b" ").is_ok() {
            std::thread::sleep(Duration::from_millis(20));
        }
    })
}

#[test]
fn strangers_do_not_end_a_server() {
    let (child, port) = server(&["write", "bw"]);
    drop(connect(&port)); // a port scan
    let dripping = drip(&port);
    assert!(answer_to(&port, b"GET / HTTP/1.1\r\n\r\n").contains("not a warpwire message"));
    let answer = answer_to(&port, b"{\"warpwire\":9,\"words\":1}\n");
    assert!(answer.contains("protocol version 9"), "{answer}");
    assert!(answer_to(&port, b"{\"warpwire\":1,\"words\":\"Go\"}\n").contains("a test"));
    // Valid numbers whose product is 4 TiB, and queues of gigabytes.
    for (size, depth) in [(1 << 30, 16), (8, 8192)] {
        let test = format!(
            "{{\"warpwire\":1,\"words\":{{\"Test\":{{\"verb\":\"write\",\"metric\":\"bw\",\
             \"sizes\":[{size}],\"iterations\":1,\"seconds\":null,\"qps\":4096,\
             \"depth\":{depth},\"verify\":false}}}}}}\n"
        );
        let answer = answer_to(&port, test.as_bytes());
        assert!(answer.contains("--max-memory"), "{answer}");
    }
    let client = run(&["perf", "write", "bw", "127.0.0.1", "-p", &port, "-s", "4K", "-n", "50"]);
    assert!(client.status.success(), "{}", stderr(&client));
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(stderr(&output).contains("rejected a connection"), "{}", stderr(&output));
    dripping.join().unwrap();
}

#[test]
fn a_server_limits_its_memory() {
    let (child, port) = server(&["write", "bw", "--max-memory", "1MiB"]);
    let client = run(&["perf", "write", "bw", "127.0.0.1", "-p", &port, "-s", "1MiB"]);
    assert_eq!(client.status.code(), Some(1));
    let text = stderr(&client);
    assert!(text.contains("the server allows 1 MiB") && text.contains("--max-memory"), "{text}");
    let client = run(&["perf", "write", "bw", "127.0.0.1", "-p", &port, "-s", "4K", "-n", "50"]);
    assert!(client.status.success(), "{}", stderr(&client));
    assert!(child.wait_with_output().unwrap().status.success());
}

#[test]
fn a_dripping_client_does_not_outlast_the_timeout() {
    let start = Instant::now();
    let (child, port) = server(&["write", "bw", "--timeout", "3"]);
    let dripping = drip(&port);
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("no peer connected within 3 s"), "{}", stderr(&output));
    assert!(start.elapsed() < testkit::deadline(Duration::from_secs(7)), "{:?}", start.elapsed());
    dripping.join().unwrap();
}

/// A server of which nothing is true: it drips, or sends text with escape sequences.
#[test]
fn a_client_believes_no_server() {
    let serve = |reply: &'static [u8], drips: bool| {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port().to_string();
        let serving = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            stream.write_all(reply).unwrap();
            while drips && stream.write_all(b" ").is_ok() {
                std::thread::sleep(Duration::from_millis(20));
            }
            let _ = stream.read_to_end(&mut Vec::new());
        });
        let start = Instant::now();
        let output = run(&["perf", "write", "bw", "127.0.0.1", "-p", &port, "--timeout", "3"]);
        assert_eq!(output.status.code(), Some(1));
        let limit = testkit::deadline(Duration::from_secs(7));
        assert!(start.elapsed() < limit, "{:?}", start.elapsed());
        serving.join().unwrap();
        stderr(&output)
    };
    assert!(serve(b"", true).contains("no complete message"));
    let failed = b"{\"warpwire\":1,\"words\":{\"Failed\":\"a\\u001b[2J\\u0007b\"}}\n";
    let text = serve(failed, false);
    assert!(text.contains("failed: a\u{fffd}[2J\u{fffd}b"), "{text:?}");
    let unknown = b"{\"warpwire\":1,\"words\":{\"\\u001b]0;title\\u0007\":1}}\n";
    let text = serve(unknown, false);
    assert!(text.contains("unexpected content") && !text.contains('\u{1b}'), "{text:?}");
}

/// This process answers in the name of its own number: slowly, and with escape sequences.
#[test]
fn stat_believes_no_process() {
    use std::os::linux::net::SocketAddrExt;
    use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
    let pid = std::process::id();
    let name = SocketAddr::from_abstract_name(format!("warpwire-stat-{pid}")).unwrap();
    let listener = UnixListener::bind_addr(&name).unwrap();
    let report = format!(
        "{{\"warpwire\":1,\"pid\":{pid},\"program\":\"\\u001b[2J\\u0007x\",\"devices\":[]}}\n"
    );
    let replies = ["", &report.replace(&pid.to_string(), "1"), &report].map(str::to_owned);
    // Other tests may ask too, with `stat --all`.
    let round = Arc::new(AtomicUsize::new(0));
    let current = Arc::clone(&round);
    let serving = std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let Some(reply) = replies.get(current.load(Ordering::Relaxed)).cloned() else { return };
            std::thread::spawn(move || {
                while reply.is_empty() && stream.write_all(b" ").is_ok() {
                    std::thread::sleep(Duration::from_millis(20));
                }
                let _ = stream.write_all(reply.as_bytes());
            });
        }
    });
    let pid = pid.to_string();
    let stat = || {
        let start = Instant::now();
        let output = run(&["stat", &pid, "--once", "--json"]);
        let limit = testkit::deadline(Duration::from_secs(6));
        assert!(start.elapsed() < limit, "{:?}", start.elapsed());
        round.fetch_add(1, Ordering::Relaxed);
        output
    };
    let slow = stat();
    assert!(stderr(&slow).contains("it does not reply"), "{}", stderr(&slow));
    let false_number = stat();
    assert!(stderr(&false_number).contains("it says that it is process 1"));
    let escapes = stat();
    assert!(escapes.status.success(), "{}", stderr(&escapes));
    assert!(!stdout(&escapes).contains('\u{1b}'), "{:?}", stdout(&escapes));
    drop(UnixStream::connect_addr(&name)); // ends the thread
    serving.join().unwrap();
    // A name that is not this process's.
    let other = std::process::Command::new("true").spawn().unwrap();
    let name = format!("warpwire-stat-{}", other.id());
    let listener = UnixListener::bind_addr(&SocketAddr::from_abstract_name(name).unwrap()).unwrap();
    let output = run(&["stat", &other.id().to_string(), "--once"]);
    assert!(stderr(&output).contains("listens in its name"), "{}", stderr(&output));
    drop((listener, other.wait_with_output()));
}

#[test]
fn a_peer_that_vanishes_is_named() {
    let (mut child, port) = server(&["write", "lat"]);
    let command = ["perf", "write", "lat", "127.0.0.1", "-p", &port, "-D", "60"];
    let client = warpwire(&command).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let pid = client.id().to_string();
    testkit::until("the client measures", || {
        stdout(&run(&["stat", &pid, "--qps", "--once"])).contains(" RTS ")
    });
    std::thread::sleep(Duration::from_millis(300));
    child.kill().unwrap();
    child.wait().unwrap();
    let start = Instant::now();
    let output = client.wait_with_output().unwrap();
    let limit = testkit::deadline(Duration::from_secs(20));
    assert!(start.elapsed() < limit, "{:?}", start.elapsed());
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains(&format!("127.0.0.1:{port}")), "{}", stderr(&output));
}

#[test]
fn stat_shows_a_running_process() {
    let command = ["perf", "write", "bw", "--local", "--run-infinitely", "-D", "1", "-s", "64K"];
    let command = [&command[..], &["-q", "4", "--engines", "2"]].concat();
    let mut client = warpwire(&command).stdout(Stdio::null()).spawn().unwrap();
    let pid = client.id().to_string();
    let sent = |of: &Value| of["packets_sent"].as_u64().unwrap();
    let mut line = Value::Null;
    testkit::until("every engine has sent", || {
        let output = run(&["stat", &pid, "--json", "-i", "0.2", "-c", "1"]);
        let first = stdout(&output).lines().next().map(serde_json::from_str);
        line = first.transpose().unwrap_or_default().unwrap_or_default();
        let engines = line["engines"].as_array().map_or(&[][..], Vec::as_slice);
        line["per_second"].is_object()
            && engines.len() == 2
            && engines.iter().all(|engine| sent(&engine["pairs"]) > 0)
    });
    assert_eq!((line["pid"].to_string(), &line["device"]), (pid.clone(), &0.into()));
    assert!(line["per_second"]["bytes_sent"].is_number(), "{line}");
    let engines = line["engines"].as_array().unwrap();
    assert!(engines.iter().all(|engine| engine["queue_pairs"] == 2), "{line}");
    let sum: u64 = engines.iter().map(|engine| sent(&engine["pairs"])).sum();
    assert_eq!(sum, sent(&line["totals"]), "{line}");
    let once = stdout(&run(&["stat", &pid, "--once"]));
    assert!(once.contains("resent") && once.contains("hca0 "), "{once}");
    assert!(once.contains("hca0.0") && once.contains("hca0.1"), "{once}");
    assert!(once.lines().all(|line| line.chars().count() <= 100), "{once}");
    let wide = stdout(&run(&["stat", &pid, "-v", "-i", "0.1", "-c", "1"]));
    assert!(wide.contains("pkts out") && wide.contains("#   rnr "), "{wide}");
    assert!(wide.lines().all(|line| line.chars().count() <= 100), "{wide}");
    let qps = stdout(&run(&["stat", &pid, "--qps", "--once"]));
    let is_qp = |line: &&str| line.starts_with(&format!("{pid:>7} ")) && line.contains(" RTS ");
    assert_eq!(qps.lines().filter(is_qp).count(), 4, "{qps}");
    let json = stdout(&run(&["stat", &pid, "--qps", "--json", "-i", "0.1", "-c", "1"]));
    let line: Value = serde_json::from_str(json.lines().next().unwrap()).unwrap();
    assert_eq!(line["qps"].as_array().map(Vec::len), Some(4), "{line}");
    assert!(line["qps"][0]["per_second"]["bytes_sent"].is_number(), "{line}");
    let metrics = stdout(&run(&["stat", "--prometheus", &pid, "--qps"]));
    for wanted in [
        format!("\nwarpwire_tx_bytes_total{{pid=\"{pid}\",program=\"warpwire\",device=\"hca0\"}} "),
        "\n# TYPE warpwire_tx_bytes_total counter\n".to_owned(),
        "\nwarpwire_processes 1\n".to_owned(),
        "\nwarpwire_qp_rx_packets_total{".to_owned(),
    ] {
        assert!(metrics.contains(&wanted), "{wanted}: {metrics}");
    }
    let both = run(&["stat", "--prometheus", "--json"]);
    assert_eq!(both.status.code(), Some(2), "{}", stderr(&both));
    let child = rustix::process::Pid::from_child(&client);
    rustix::process::kill_process(child, rustix::process::Signal::INT).unwrap();
    assert!(client.wait().unwrap().success());
    for more in [&[][..], &["--prometheus"]] {
        let gone = run(&[&["stat", &pid][..], more].concat());
        assert_eq!(gone.status.code(), Some(1));
        assert!(stderr(&gone).contains(&pid), "{}", stderr(&gone));
    }
}

#[test]
fn shared_memory_uses_direct_access_unless_disabled() {
    let test = ["write", "bw", "--link", "shm", "-s", "4K", "-n", "2000"];
    let link = |more: &[&str]| {
        let report = json(&[&test[..], more].concat());
        assert_eq!(report["rows"][0]["verified"], true);
        report["local"]["link"].as_str().unwrap().to_owned()
    };
    assert!(link(&[]).contains("; direct access: on"));
    assert!(link(&["--no-direct"]).contains("; direct access: off (disabled by option)"));
    let faulty = link(&["--fault", "loss=1%,seed=3"]);
    assert!(faulty.contains("; direct access: off (faults must see every packet)"), "{faulty}");
}

/// No library, a library without the symbols, conflicting options.
#[test]
fn unavailable_devices_are_refused_with_a_reason() {
    let perf = ["perf", "write", "bw", "--local", "--device", "mlx9_9"];
    let stderr_with = |library: &str| {
        let output = warpwire(&perf).env("WARPWIRE_IBVERBS", library).output().unwrap();
        assert_ne!(output.status.code(), Some(0));
        stderr(&output)
    };
    let missing = stderr_with("libibverbs-that-is-not-there.so.1");
    assert!(missing.contains("is not installed") && missing.contains("rdma-core"), "{missing}");
    let old = stderr_with("libc.so.6");
    assert!(old.contains("libc.so.6 has no symbol ibv_get_device_list"), "{old}");
    let together = run(&["perf", "write", "bw", "--local", "--device", "x", "--link", "udp"]);
    assert_eq!(together.status.code(), Some(2), "{}", stderr(&together));
    let alone = run(&["perf", "write", "bw", "--local", "--gid-index", "1"]);
    assert_eq!(alone.status.code(), Some(2), "{}", stderr(&alone));
}

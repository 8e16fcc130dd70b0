//! Programs of other projects that are installed, and perftest over Warpwire's own libibverbs.
//!
//! `bench/peers` compares with more care: in rounds, with medians.

use std::fmt::Write as _;
use std::process::Command;
use std::time::Duration;

use super::Effort;
use super::data::{Figure, Kind, Point};
use super::machine::is_installed;
use super::spawn::{self, Cores, free_port, pair};

/// For one program with all its sizes; a busy machine with two cores may need it.
const LIMIT: Duration = Duration::from_secs(20);
const LATENCY_SIZES: [u64; 4] = [8, 512, 4 << 10, 64 << 10];
const BANDWIDTH_SIZES: [u64; 5] = [512, 4 << 10, 64 << 10, 1 << 20, 4 << 20];

/// Figures of all peers; those that are not installed have none and are left out.
pub(crate) fn all(effort: Effort, progress: fn(&str)) -> Vec<Figure> {
    let mut figures = Vec::new();
    if is_installed("ucx_perftest") {
        for (name, transports) in [("UCX posix,cma", "posix,cma,self"), ("UCX tcp", "tcp,self")] {
            progress(name);
            figures.extend(ucx(effort, name, transports));
        }
    }
    if is_installed("fi_pingpong") {
        for (name, provider, endpoint) in
            [("libfabric shm", "shm", "rdm"), ("libfabric tcp", "tcp", "msg")]
        {
            progress(name);
            figures.push(libfabric(effort, name, provider, endpoint));
        }
    }
    if is_installed("ib_write_bw") {
        progress("perftest over Warpwire's libibverbs");
        figures.push(perftest(effort));
    }
    figures
}

fn figure(kind: Kind, name: &str, command: String, points: Result<Vec<Point>, String>) -> Figure {
    let (points, skipped) = match points {
        Ok(points) if points.is_empty() => (points, Some("it printed no figures".to_owned())),
        Ok(points) => (points, None),
        Err(why) => (Vec::new(), Some(why)),
    };
    Figure { kind, name: name.to_owned(), peer: true, command, points, skipped }
}

/// Messages of this size, so that a size takes some hundred milliseconds.
fn iterations(effort: Effort, bytes: u64) -> u64 {
    (u64::from(effort.repeats) * (256 << 10) / bytes.max(4 << 10)).max(20)
}

/// UCX's puts: a file with all tests, so that a transport takes one pair of processes.
fn ucx(effort: Effort, name: &str, transports: &str) -> Vec<Figure> {
    let tests = [
        (Kind::Latency, "ucp_put_lat", &LATENCY_SIZES[..]),
        (Kind::Bandwidth, "ucp_put_bw", &BANDWIDTH_SIZES[..]),
    ];
    let mut figures = Vec::new();
    for (kind, test, sizes) in tests {
        let sizes: Vec<_> = sizes.iter().copied().filter(|size| *size <= effort.max).collect();
        let count = match kind {
            Kind::Latency => u64::from(effort.repeats),
            _ => iterations(effort, 64 << 10),
        };
        let command =
            format!("UCX_TLS={transports} ucx_perftest HOST -t {test} -s SIZE -n {count}");
        let points = ucx_run(effort, kind, transports, test, &sizes);
        figures.push(figure(kind, name, command, points));
    }
    figures
}

fn ucx_run(
    effort: Effort,
    kind: Kind,
    transports: &str,
    test: &str,
    sizes: &[u64],
) -> Result<Vec<Point>, String> {
    let mut batch = String::new();
    for size in sizes {
        let count = match kind {
            Kind::Latency => u64::from(effort.repeats),
            _ => iterations(effort, *size),
        };
        let _ = writeln!(batch, "s{size} -t {test} -s {size} -n {count} -w 20");
    }
    let port = free_port()?.to_string();
    let file = std::env::temp_dir().join(format!("warpwire-ucx-{}-{port}", std::process::id()));
    std::fs::write(&file, batch)
        .map_err(|why| format!("cannot write {}: {why}", file.display()))?;
    // Both sides read the tests.
    let command = || {
        let mut command = Command::new("ucx_perftest");
        command.args(["-p", &port, "-b"]).arg(&file);
        command.env("UCX_TLS", transports).env("UCX_LOG_LEVEL", "error");
        command
    };
    let client = || {
        let mut client = command();
        client.args(["127.0.0.1", "-v", "-f"]);
        client
    };
    let printed = pair(&mut command(), client, Cores::choose(), LIMIT);
    // Its removal is a courtesy.
    let _ = std::fs::remove_file(&file);
    Ok(ucx_points(&printed?, kind))
}

/// Lines of `name,iterations,median,average,overall,bandwidth,overall,rate,overall`; UCX's MB are
/// 2^20 bytes.
fn ucx_points(text: &str, kind: Kind) -> Vec<Point> {
    let point = |line: &str| {
        let words: Vec<&str> = line.split(',').map(str::trim).collect();
        let bytes = words.first()?.strip_prefix('s')?.parse().ok()?;
        let field = |at: usize| words.get(at)?.parse::<f64>().ok();
        let value = match kind {
            Kind::Latency => field(2)?,
            _ => field(6)? * (1 << 20) as f64 / 1e9,
        };
        Some(Point { bytes, value, range: None })
    };
    text.lines().filter_map(point).collect()
}

/// fi_pingpong has one message in flight, so that only its latency can be compared.
fn libfabric(effort: Effort, name: &str, provider: &str, endpoint: &str) -> Figure {
    let shown = format!("fi_pingpong -p {provider} -e {endpoint} -I {} -S SIZE", effort.repeats);
    let mut points = Vec::new();
    for size in LATENCY_SIZES.into_iter().filter(|size| *size <= effort.max) {
        match fi_pingpong(effort, provider, endpoint, size) {
            Ok(point) => points.push(point),
            // The sizes before are kept.
            Err(_) if !points.is_empty() => break,
            Err(why) => return figure(Kind::Latency, name, shown, Err(why)),
        }
    }
    figure(Kind::Latency, name, shown, Ok(points))
}

fn fi_pingpong(effort: Effort, provider: &str, endpoint: &str, size: u64) -> Result<Point, String> {
    let (port, count) = (free_port()?.to_string(), effort.repeats.to_string());
    let command = || {
        let mut command = Command::new("fi_pingpong");
        command.args(["-p", provider, "-e", endpoint, "-I", &count, "-S", &size.to_string()]);
        command
    };
    let mut server = command();
    server.args(["-B", &port]);
    let client = || {
        let mut client = command();
        client.args(["-P", &port, "127.0.0.1"]);
        client
    };
    let printed = pair(&mut server, client, Cores::choose(), LIMIT)?;
    let value = fi_latency(&printed).ok_or("it printed no figures")?;
    Ok(Point { bytes: size, value, range: None })
}

/// The line `bytes #sent #ack total time MB/sec usec/xfer Mxfers/sec`.
fn fi_latency(text: &str) -> Option<f64> {
    let mut rows = text.lines().filter(|line| line.starts_with(|c: char| c.is_ascii_digit()));
    rows.next_back()?.split_whitespace().nth(6)?.parse().ok()
}

/// perftest through `warpwire verbs`, on the loopback interface.
fn perftest(effort: Effort) -> Figure {
    let count = effort.repeats.max(200).to_string();
    let (name, shown) = (
        "ib_write_bw over warpwire verbs",
        format!("warpwire verbs --devices lo -- ib_write_bw -a -x 0 -F -n {count} [HOST]"),
    );
    let measured = || {
        let port = free_port()?.to_string();
        // Without the libraries, the reason is that of `warpwire verbs`.
        spawn::own(&["verbs", "--env"]).map_err(|failure| match failure {
            crate::output::Failure::Usage(why) | crate::output::Failure::Runtime(why) => why,
        })?;
        let command = || -> Result<Command, String> {
            let mut command =
                spawn::own_command().map_err(|_| "this command's file is not known".to_owned())?;
            command.args(["verbs", "--devices", "lo", "--", "ib_write_bw", "-a", "-x", "0", "-F"]);
            command.args(["-n", &count, "-p", &port]);
            Ok(command)
        };
        let mut server = command()?;
        command()?;
        let client = || {
            let mut client = command().unwrap_or_else(|_| Command::new("false"));
            client.arg("127.0.0.1");
            client
        };
        // Not pinned: threads of the library need cores of their own.
        pair(&mut server, client, None, LIMIT).map(|text| perftest_points(&text, effort.max))
    };
    let mut figure = figure(Kind::Bandwidth, name, shown, measured());
    // Another project's program, over this project's library.
    figure.peer = false;
    figure
}

/// Rows of `#bytes #iterations BW peak[MB/sec] BW average[MB/sec] MsgRate[Mpps]`.
fn perftest_points(text: &str, max: u64) -> Vec<Point> {
    let point = |line: &str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let [bytes, _, _, average, _] = words[..] else { return None };
        let value = average.parse::<f64>().ok()? * (1 << 20) as f64 / 1e9;
        Some(Point { bytes: bytes.parse().ok()?, value, range: None })
    };
    text.lines().filter_map(point).filter(|point| point.bytes <= max).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_of_ucx() {
        let text = "batch,iterations,50.0_percentile_lat,avg_lat\n\
                    s4096,2000,0.1,0.2,0.3,1000.00,2000.00,5,6\nbad\ns1,2\n";
        let points = ucx_points(text, Kind::Bandwidth);
        assert_eq!(points.len(), 1);
        assert_eq!((points[0].bytes, points[0].value), (4096, 2000.0 * 1_048_576.0 / 1e9));
        assert_eq!(ucx_points(text, Kind::Latency)[0].value, 0.1);
        assert!(ucx_points("UCX  ERROR no transport\n", Kind::Latency).is_empty());
    }

    #[test]
    fn output_of_fi_pingpong() {
        let text = "bytes   #sent   #ack     total       time     MB/sec    usec/xfer   Mxfers/sec\n\
                    4k      200     =200     1.5m        0.13s     12.72     321.91       0.00\n";
        assert_eq!(fi_latency(text), Some(321.91));
        assert_eq!(fi_latency("fi_getinfo: -61\n"), None);
    }

    #[test]
    fn output_of_perftest() {
        let text = " #bytes     #iterations    BW peak[MB/sec]    BW average[MB/sec]   MsgRate[Mpps]\n \
                    2          1000             3.40               3.00               1.5\n \
                    65536      1000             900.00             1000.00            0.01\n---\n";
        let points = perftest_points(text, 4096);
        assert_eq!((points.len(), points[0].bytes), (1, 2));
        assert_eq!(perftest_points(text, 1 << 20)[1].value, 1000.0 * 1_048_576.0 / 1e9);
    }
}

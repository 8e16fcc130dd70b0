//! The examples of every `--help` page run. Each has an entry in the table below: how it is made
//! short, which server it needs, or why it cannot run here.
//!
//! Under `cargo test` the first example of each page runs, under `./ci.sh` all of them.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use testkit::Effort;

use crate::cli::support::Machine;
use crate::{stdout, warpwire};

/// Replacements in the command line: text of the example, and what stands there in the test.
pub type Edits = &'static [(&'static str, &'static str)];

pub enum How {
    /// Runs to its end, with these arguments added.
    Run(Edits, &'static str),
    /// A server: it must say that it listens.
    Serve(Edits, &'static str),
    /// A client of the server with this command line; `{address}` and `{port}` are the server's.
    Client(&'static str, Edits, &'static str),
    /// Watches a process with the number `{pid}`.
    Watch(Edits, &'static str),
    /// Cannot run here.
    Skip(&'static str),
}
use How::{Client, Run, Serve, Skip, Watch};

pub const GPU: How = Skip("needs a GPU");
const NIC: How = Skip("needs an RDMA device");
const SECOND_MACHINE: How = Skip("needs a second machine with a RoCE device");
const CLIENTS: How = Skip("needs RDMA programs; tools/ibverbs-clients runs them");
const NCCL: How = Skip("needs a GPU and NCCL");
const ALONE: How = Skip("needs a machine on which only one process publishes counters");

const ECHO: &str = "warpwire sock serve -d sim:0 --bind 127.0.0.1:0";
const HTTP: &str = "warpwire sock serve -d sim:0 --service http --bind 127.0.0.1:0";
const KV: &str = "warpwire sock kv -d sim:0 --bind 127.0.0.1:0";
const SIMILAR: &str = "warpwire sock similar -d sim:0 --vectors 1000 --bind 127.0.0.1:0";
const WARP_SIMILAR: &str =
    "warpwire sock similar -d sim:0 --vectors 1000 --family warp --bind 127.0.0.1:0";
const ANY_PORT: &str = "--bind 127.0.0.1:0";
pub const BRIEF_PERF: &str = "-n 20";
const BRIEF_COPY: &str = "-s 1KiB -w 100 -r 100";
const BRIEF_ASYNC: &str = "-n 10 -b 5";
const RECORDED: Edits = &[("./recorded", "{recorded}")];

/// The command of each example, and how it is tested.
pub const TABLE: &[(&str, How)] = &[
    ("warpwire demo", Run(&[], "--size 64KiB")),
    ("warpwire demo --device cuda:0 --device sim:0", GPU),
    ("WARPWIRE_SIM=copy_delay=1ms warpwire demo", Run(&[], "--size 64KiB")),
    ("warpwire demo --json | jq .stages", Run(&[], "--size 64KiB")),
    ("warpwire doctor", Run(&[], "")),
    ("WARPWIRE_LOG=debug warpwire doctor", Run(&[], "")),
    ("warpwire doctor | grep -E 'WARN|FAIL'", Run(&[], "")),
    ("warpwire doctor --json | jq '.verdicts'", Run(&[], "")),
    ("warpwire doctor --root ./recorded", Run(RECORDED, "")),
    ("warpwire doctor --brief", Run(&[], "")),
    ("warpwire doctor --brief --require udp,sim", Run(&[], "")),
    ("warpwire doctor --try soft sim:0", Run(&[], "")),
    ("warpwire doctor --try mlx5_0 cuda:0", NIC),
    ("warpwire doctor --nccl", Run(&[], "")),
    ("warpwire doctor --record machine.txt", Run(&[("machine.txt", "/dev/null")], "")),
    ("warpwire doctor --probe-registration", Run(&[], "")),
    ("warpwire topo", Run(&[], "")),
    (r#"warpwire topo --json | jq -r '.best[] | "\(.gpu) \(.name)"'"#, Run(&[], "")),
    ("warpwire topo --root ./recorded", Run(RECORDED, "")),
    ("warpwire report", Skip("measures for a minute; the next one does it in ten seconds")),
    ("warpwire report --quick --no-peers --out report.html", Skip("tests/report.rs runs it")),
    ("warpwire report --long --device cuda:0", GPU),
    (
        "warpwire report --json | jq '.figures[] | [.name, .kind, .points[-1].value]'",
        Skip("tests/report.rs runs it"),
    ),
    ("warpwire report --from elsewhere.json --out elsewhere.html", Skip("tests/report.rs runs it")),
    ("warpwire verbs -- ibv_devinfo", CLIENTS),
    ("warpwire verbs -- rping -s", CLIENTS),
    ("warpwire verbs -- ib_write_bw -x 0", CLIENTS),
    ("warpwire verbs --devices lo -- ucx_info -d", CLIENTS),
    ("eval \"$(warpwire verbs --env)\"", CLIENTS),
    ("warpwire nccl -- torchrun train.py", NCCL),
    ("warpwire nccl --link udp --devices eth0 -- torchrun --nnodes 2 train.py", NCCL),
    ("eval \"$(warpwire nccl --env)\"", NCCL),
    ("warpwire devices", Run(&[], "")),
    ("warpwire devices -v mlx5_0", NIC),
    ("warpwire devices --json | jq -r '.devices[].ports[].gids[].address'", Run(&[], "")),
    ("warpwire copy lat", Run(&[], BRIEF_COPY)),
    ("warpwire copy lat -s 64MiB --odd", Run(&[("-s 64MiB", "")], BRIEF_COPY)),
    ("warpwire copy lat -s 64MiB --odd --agent", Run(&[("-s 64MiB", "")], BRIEF_COPY)),
    ("warpwire copy lat -s 4KiB --routines", Run(&[("-s 4KiB", "")], BRIEF_COPY)),
    ("warpwire copy lat --json | jq '[.rows[].ratio] | max'", Run(&[], BRIEF_COPY)),
    ("warpwire copy lat -d sim:0 --json | jq '.rows[0]'", Run(&[], BRIEF_COPY)),
    ("warpwire copy sanity", Run(&[], "")),
    ("warpwire copy sanity -l", Run(&[], "")),
    ("warpwire copy sanity -v -t freed_memory_stays_readable", Run(&[], "")),
    (
        r#"warpwire copy sanity --json | jq '.checks[] | select(.outcome == "failed")'"#,
        Run(&[], ""),
    ),
    ("warpwire copy bw", Run(&[], "-s 1MiB -w 5 -r 5")),
    ("warpwire copy bw -s 1MiB", Run(&[], "-w 5 -r 5")),
    ("warpwire copy bw -s 16MiB -a vmm", Run(&[], "-w 5 -r 5")),
    ("warpwire copy bw -s 1MiB -c 4KiB -o 13", Run(&[], "-w 5 -r 5")),
    ("warpwire copy bw --json | jq .write.window_gb_s", Run(&[], "-s 1MiB -w 5 -r 5")),
    ("warpwire copy api", Run(&[], "")),
    ("warpwire copy api -s 1GiB -n 1000", Run(&[("1000", "10")], "")),
    ("warpwire copy api --json | jq '.rows[] | [.size, .open.median_us]'", Run(&[], "")),
    ("warpwire copy pingpong", Run(&[], "-t 100")),
    ("warpwire copy pingpong -s 8 -t 100000", Run(&[("100000", "100")], "")),
    ("warpwire copy pingpong --json | jq .ratio", Run(&[], "-t 100")),
    ("warpwire copy plan", Run(&[], "")),
    ("warpwire copy plan --recalibrate", Run(&[], "")),
    ("WARPWIRE_COPY=write=64KiB,read=512 warpwire copy plan", Run(&[], "")),
    (
        "warpwire completions bash > ~/.local/share/bash-completion/completions/warpwire",
        Run(&[("> ~/.local/share/bash-completion/completions/warpwire", "")], ""),
    ),
    ("warpwire completions zsh > ~/.zfunc/_warpwire", Run(&[("> ~/.zfunc/_warpwire", "")], "")),
    (
        "warpwire completions fish > ~/.config/fish/completions/warpwire.fish",
        Run(&[("> ~/.config/fish/completions/warpwire.fish", "")], ""),
    ),
    ("warpwire man | man -l -", Run(&[("man -l -", "cat")], "")),
    ("warpwire man ~/.local/share/man/man1", Run(&[("~/.local/share/man/man1", "pages")], "")),
    ("warpwire perf write bw --local", Run(&[], BRIEF_PERF)),
    ("warpwire perf write bw --local -q 8 --engines 4", Run(&[], BRIEF_PERF)),
    ("warpwire perf write bw --bind 0.0.0.0", Serve(&[("0.0.0.0", "127.0.0.1")], "-p 0")),
    (
        "warpwire perf write bw 10.0.0.1",
        Client("warpwire perf write bw -p 0", &[("10.0.0.1", "127.0.0.1")], "-p {port} -n 20"),
    ),
    ("warpwire perf send lat --local -a", Run(&[], "--max 1KiB -n 20")),
    ("warpwire perf write bw --local --mem sim:0", Run(&[], BRIEF_PERF)),
    ("warpwire perf read lat --local -H", Run(&[], BRIEF_PERF)),
    ("warpwire perf send bw --local -b -c UC", Run(&[], "-n 20 -t 4")),
    ("warpwire perf write bw -d mlx5_0 --use_cuda=0 10.0.0.1", NIC),
    ("warpwire perf read bw --local --fault loss=5%,seed=7 --pcap read.pcap", Run(&[], BRIEF_PERF)),
    (
        "warpwire perf write bw --local -s 1MiB --json | jq '.rows[0].average_mb_s'",
        Run(&[], "-n 20"),
    ),
    ("warpwire async sanity", Run(&[], "")),
    ("warpwire async sanity -d sim:0 --json | jq '.checks[] | select(.why_not)'", Run(&[], "")),
    ("warpwire async latency", Run(&[], BRIEF_ASYNC)),
    ("warpwire async latency -s 8,4KiB -m stream,kernel", Run(&[], BRIEF_ASYNC)),
    ("warpwire async latency --processes", Run(&[], BRIEF_ASYNC)),
    ("warpwire async latency --processes --cq device", Run(&[], BRIEF_ASYNC)),
    ("warpwire async latency --compute 20us", Run(&[], BRIEF_ASYNC)),
    ("warpwire async latency --json | jq .ratios", Run(&[], BRIEF_ASYNC)),
    ("warpwire async poll", Run(&[], "-n 20")),
    ("warpwire async poll -n 10000 -w 50", Run(&[("10000", "20")], "")),
    ("warpwire pingpong 10.0.0.2", SECOND_MACHINE),
    ("warpwire pingpong 10.0.0.2 -e -s 1MiB -m 4096 --mem cuda:0", SECOND_MACHINE),
    ("ibv_rc_pingpong -g 1", NIC),
    ("warpwire pingpong --bind 0.0.0.0", Serve(&[("0.0.0.0", "127.0.0.1")], "-p 0")),
    (
        "warpwire pingpong 127.0.0.1 --from 127.0.0.2",
        Client(
            "warpwire pingpong -p 0 -n 10 --from {far}",
            &[("127.0.0.2", "{near}")],
            "-p {port} -n 10",
        ),
    ),
    ("warpwire run -n 4 ./program", Run(&[("./program", "true")], "")),
    ("warpwire run -n 4 ./solver --size 1024", Run(&[("./solver", "echo")], "")),
    ("warpwire run -n 2 --link udp warpwire mp pingpong", Run(&[], "-n 5 -s 8")),
    ("warpwire run -n 2 --link udp warpwire mp putget", Run(&[], "-n 5 -s 8")),
    ("warpwire mp sendrecv -s 64KiB,1MiB --json", Run(&[], "-n 5")),
    ("warpwire mp all_reduce -n 4 -b 8 -e 1M -f 2", Run(&[("1M", "1K")], "--iters 5")),
    (
        "warpwire mp all_reduce -n 3 -d double -o max --mem sim:0 --json",
        Run(&[], "-e 64 --iters 5"),
    ),
    ("warpwire mp all_gather -n 4 -b 64 -e 1M -f 4", Run(&[("1M", "1K")], "--iters 5")),
    (
        "warpwire mp reduce_scatter -n 4 -b 64 -e 1M -f 4 -d int64",
        Run(&[("1M", "1K")], "--iters 5"),
    ),
    ("warpwire mp all_to_all -n 4 -b 64 -e 1M -f 4 --mem sim:0", Run(&[("1M", "1K")], "--iters 5")),
    ("warpwire mp broadcast -n 4 -r 1 --link udp", Run(&[], "-e 64 --iters 5")),
    ("warpwire mp pingpong", Run(&[], "-n 5 -s 8")),
    ("warpwire mp sendrecv --mem cuda:0 -s 1MiB", GPU),
    ("warpwire mp pingpong --mem sim:0 --kernel 20us -m cpu,stream", Run(&[], "-n 3 -s 8")),
    ("warpwire mp pingpong --mem cuda:0 --threads", GPU),
    ("torchrun --nproc-per-node 2 --no-python warpwire mp pingpong", Skip("needs PyTorch")),
    ("warpwire sock serve", Serve(&[], ANY_PORT)),
    ("warpwire sock serve --service http", Serve(&[], ANY_PORT)),
    ("warpwire sock serve --family warp", Serve(&[], ANY_PORT)),
    (
        "warpwire sock serve --bind 0.0.0.0:7000 -w 32 --seconds 60 --json",
        Run(&[("0.0.0.0:7000", "127.0.0.1:0"), ("60", "1")], ""),
    ),
    ("warpwire sock kv", Serve(&[], ANY_PORT)),
    (
        "warpwire sock kv --bind 127.0.0.1:7379 --keys 1000000 --value 4KiB",
        Serve(&[("127.0.0.1:7379", "127.0.0.1:0"), ("1000000", "1000")], ""),
    ),
    ("warpwire sock kv --idle-timeout 60 -c 512", Serve(&[], ANY_PORT)),
    ("warpwire sock similar", Serve(&[], "--vectors 1000 --bind 127.0.0.1:0")),
    ("warpwire sock similar --vectors 100000", Serve(&[("100000", "1000")], ANY_PORT)),
    (
        "warpwire sock similar --connect 127.0.0.1:7001",
        Client(SIMILAR, &[("127.0.0.1:7001", "{address}")], "--vectors 1000 -n 50"),
    ),
    (
        "warpwire sock similar --vectors 100000 --connect 127.0.0.1:7001 -n 10000 -c 4",
        Client(
            SIMILAR,
            &[("127.0.0.1:7001", "{address}"), ("100000", "1000"), ("-n 10000", "-n 50")],
            "",
        ),
    ),
    (
        "warpwire sock similar --family warp --connect 127.0.0.1:7001 --from-kernel",
        Client(WARP_SIMILAR, &[("127.0.0.1:7001", "{address}")], "--vectors 1000 -n 20"),
    ),
    (
        r"warpwire sock connect 127.0.0.1:7000 --send 'GET / HTTP/1.0\r\n\r\n'",
        Client(HTTP, &[("127.0.0.1:7000", "{address}")], ""),
    ),
    (
        r"warpwire sock connect 127.0.0.1:8080 --send 'GET / HTTP/1.0\r\n\r\n'",
        Client(HTTP, &[("127.0.0.1:8080", "{address}")], ""),
    ),
    (
        "warpwire sock connect localhost:7000 --send hello --timeout 2",
        // It reads until the timeout: the server does not close.
        Client(ECHO, &[("7000", "{port}"), ("2", "5")], ""),
    ),
    (
        r"warpwire sock connect 10.0.0.2:80 --send 'GET / HTTP/1.0\r\n\r\n' --max-bytes 4KiB",
        Client(HTTP, &[("10.0.0.2:80", "{address}")], ""),
    ),
    (
        "warpwire sock load 127.0.0.1:6379",
        Client(KV, &[("127.0.0.1:6379", "{address}")], "-c 4 -n 100"),
    ),
    (
        "warpwire sock load 127.0.0.1:6379 -P 16",
        Client(KV, &[("127.0.0.1:6379", "{address}")], "-c 4 -n 100"),
    ),
    (
        "warpwire sock load 127.0.0.1:6379 -c 16 -P 16 -s 64",
        Client(KV, &[("127.0.0.1:6379", "{address}")], "-n 100"),
    ),
    ("warpwire sock echo", Run(&[], "-s 4KiB")),
    ("warpwire sock echo -s 64KiB --family warp", Run(&[], "")),
    ("warpwire sock echo --cpu --json", Run(&[], "-s 4KiB")),
    ("warpwire sock lat -s 64", Run(&[], "-n 20")),
    ("warpwire sock lat --family warp --peer kernel", Run(&[], "-n 20")),
    ("warpwire sock lat --family warp --cpu", Run(&[], "-n 20")),
    ("warpwire sock bw", Run(&[], "-t 1MiB")),
    ("warpwire sock bw -s 64KiB --json", Run(&[], "-t 1MiB")),
    ("warpwire sock bw -s 1MiB -t 1GiB --json", Run(&[("1GiB", "8MiB")], "")),
    ("warpwire sock bw --family warp --peer kernel", Run(&[], "-t 1MiB")),
    ("warpwire stat", ALONE),
    ("warpwire stat 4711 -i 5", Watch(&[("4711", "{pid}"), ("-i 5", "-i 0.1")], "-c 1")),
    ("warpwire stat 4711 --qps", Watch(&[("4711", "{pid}")], "-i 0.1 -c 1")),
    ("warpwire stat --all --once", Watch(&[], "")),
    ("warpwire stat --prometheus", Watch(&[], "")),
    ("warpwire stat --json | jq -c '[.per_second.bytes_sent, .totals.resent]'", ALONE),
];

/// The help pages: of the command, and of every subcommand, found in the pages themselves.
fn pages() -> Vec<String> {
    let help = |words: &[&str]| stdout(&warpwire().args(words).arg("--help").output().unwrap());
    let subcommands = |page: &str| -> Vec<String> {
        let lines = page.lines().skip_while(|line| *line != "Commands:").skip(1);
        let names = lines.take_while(|line| line.starts_with("  "));
        let first = |line: &str| line.split_whitespace().next().unwrap().to_owned();
        // A line that goes on with a description is indented further.
        let names = names.filter(|line| !line.starts_with("   ")).map(first);
        names.filter(|name| name != "help").collect()
    };
    let mut pages = vec![help(&[])];
    for command in subcommands(&pages[0]) {
        let page = help(&[&command]);
        for below in subcommands(&page) {
            pages.push(help(&[&command, &below]));
        }
        pages.push(page);
    }
    pages
}

/// The commands of a page's examples; two blanks separate them from their descriptions.
fn examples(page: &str) -> Vec<String> {
    let lines = page.lines().skip_while(|line| *line != "Examples:").skip(1);
    let lines = lines.take_while(|line| line.starts_with("  "));
    // A line that goes on with a description is indented further.
    let lines = lines.filter(|line| !line.starts_with("   ") && !line.starts_with("  # "));
    lines.map(|line| line.trim().split("  ").next().unwrap().to_owned()).collect()
}

/// A process of an example; killed on drop, with its children.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = rustix::process::kill_process_group(
            rustix::process::Pid::from_child(&self.0),
            rustix::process::Signal::KILL,
        );
        let _ = self.0.wait();
    }
}

pub struct Bench {
    /// Those of one process use addresses of their own.
    number: u8,
    folder: tempfile::TempDir,
    recorded: Machine,
}

impl Bench {
    pub fn new(number: u8) -> Self {
        let recorded = Machine::recorded("eight-gpu-server");
        Self { number, folder: tempfile::tempdir().unwrap(), recorded }
    }

    fn shell(&self, line: &str) -> Command {
        use std::os::unix::process::CommandExt;
        // The environment of the command, in a shell that finds it.
        let clean = warpwire();
        let folder = Path::new(env!("CARGO_BIN_EXE_warpwire")).parent().unwrap();
        let path = std::env::var("PATH").unwrap_or_default();
        let mut shell = Command::new("bash");
        shell.args(["-o", "pipefail", "-c", line]).current_dir(self.folder.path());
        for (name, value) in clean.get_envs() {
            match value {
                Some(value) => shell.env(name, value),
                None => shell.env_remove(name),
            };
        }
        shell.env("PATH", format!("{}:{path}", folder.display())).stdin(Stdio::null());
        shell.process_group(0);
        shell
    }

    /// The command line of a test: the example with its edits, and arguments before a pipe.
    pub fn line(&self, command: &str, edits: Edits, more: &str, known: &[(&str, &str)]) -> String {
        let mut line = command.to_owned();
        for (from, to) in edits {
            assert!(line.contains(from), "{command} has no {from}");
            line = line.replacen(from, to, 1);
        }
        line = match line.split_once(" | ") {
            Some((first, rest)) => format!("{first} {more} | {rest}"),
            None => format!("{line} {more}"),
        };
        let recorded = self.recorded.root().display().to_string();
        for (name, value) in known.iter().chain(&[("recorded", recorded.as_str())]) {
            line = line.replace(&format!("{{{name}}}"), value);
        }
        line
    }

    /// Runs a command line to its end; returns what it printed.
    pub fn finish(&self, line: &str) -> String {
        let (out, err) = (self.folder.path().join("out"), self.folder.path().join("err"));
        let mut shell = self.shell(line);
        shell.stdout(std::fs::File::create(&out).unwrap());
        shell.stderr(std::fs::File::create(&err).unwrap());
        let mut running = Running(shell.spawn().unwrap());
        let deadline = Instant::now() + testkit::deadline(Duration::from_secs(60));
        let status = loop {
            if let Some(status) = running.0.try_wait().unwrap() {
                break status;
            }
            assert!(Instant::now() < deadline, "{line}: it does not end");
            std::thread::sleep(Duration::from_millis(5));
        };
        // grep finds nothing on a machine without problems.
        let is_fine = status.success() || line.contains("| grep") && status.code() == Some(1);
        let err = std::fs::read_to_string(err).unwrap();
        assert!(is_fine, "{line}: {status}: {err}");
        let out = std::fs::read_to_string(out).unwrap();
        assert!(!out.is_empty() || line.contains(" | ") || line.ends_with("true "), "{line}");
        out
    }

    /// Starts a server; returns it and the address that it prints.
    fn serve(&self, line: &str) -> (Running, String) {
        let mut shell = self.shell(&format!("exec {line}"));
        shell.stdout(Stdio::piped());
        let mut running = Running(shell.spawn().unwrap());
        let mut lines = BufReader::new(running.0.stdout.take().unwrap()).lines();
        let listens = |line: &String| line.contains("listens at") || line.contains("a client on");
        let found = lines.by_ref().map_while(Result::ok).find(listens);
        assert!(found.is_some(), "{line}: it does not say that it listens");
        let found = found.unwrap_or_default();
        // Read on, or a full pipe would block it.
        std::thread::spawn(move || lines.map_while(Result::ok).for_each(drop));
        (running, found.rsplit(' ').next().unwrap().to_owned())
    }

    pub fn test(&self, command: &str, how: &How) {
        let started = Instant::now();
        match how {
            Run(edits, more) => drop(self.finish(&self.line(command, edits, more, &[]))),
            Serve(edits, more) => drop(self.serve(&self.line(command, edits, more, &[]))),
            Client(server, edits, more) => {
                let [_, a, b, c] = std::process::id().to_be_bytes();
                let ends = [1, 2].map(|end| {
                    format!("127.{}.{c}.{}", 100 + (a ^ b) % 100, 240 + 2 * self.number + end)
                });
                let known = [("near", ends[0].as_str()), ("far", ends[1].as_str())];
                let (_server, address) = self.serve(&self.line(server, &[], "", &known));
                let port = address.rsplit(':').next().unwrap();
                let known = [&known[..], &[("address", address.as_str()), ("port", port)]].concat();
                self.finish(&self.line(command, edits, more, &known));
            }
            Watch(edits, more) => {
                let mut shell = self.shell("exec warpwire perf write bw --local -D 60");
                let watched = Running(shell.stdout(Stdio::null()).spawn().unwrap());
                let pid = watched.0.id().to_string();
                let publishes = || {
                    let mut stat = warpwire();
                    stat.args(["stat", &pid, "--once"]).output().unwrap().status.success()
                };
                testkit::until("it publishes counters", publishes);
                self.finish(&self.line(command, edits, more, &[("pid", &pid)]));
            }
            Skip(why) => println!("skipped: {command} ({why})"),
        }
        if std::env::var_os("WARPWIRE_TIMES").is_some() {
            println!("{:6.2} s {command}", started.elapsed().as_secs_f64());
        }
    }
}

/// Text of a terminal: descriptions stand beside commands, or above those that are too long.
#[test]
fn help_pages_fit_a_terminal() {
    for page in pages() {
        for line in page.lines() {
            assert!(line.chars().count() <= 100, "{} columns: {line}", line.chars().count());
        }
        let lines = page.lines().skip_while(|line| *line != "Examples:").skip(1);
        let columns: BTreeSet<usize> = lines
            .take_while(|line| line.starts_with("  "))
            .inspect(|line| assert!(!line.starts_with("   "), "a wrapped example: {line}"))
            .filter_map(|line| {
                let text = line.find(|c| c != ' ')?;
                let gap = line[text..].find("  ")?;
                let rest = &line[text + gap..];
                Some(text + gap + rest.len() - rest.trim_start().len())
            })
            .collect();
        assert!(columns.len() <= 1, "descriptions begin in columns {columns:?}: {page}");
    }
}

/// Every example that is a command line of ours is understood, also where it cannot run.
#[test]
fn examples_of_every_help_page_parse() {
    let pages = pages();
    let all: BTreeSet<String> = pages.iter().flat_map(|page| examples(page)).collect();
    let ours = all.iter().filter(|line| line.starts_with("warpwire ")).filter(|line| {
        // These exec what follows them, or are told apart by what runs.
        !["run", "verbs", "nccl"].iter().any(|name| line.starts_with(&format!("warpwire {name} ")))
    });
    for line in ours {
        let line = line.split(['|', '>']).next().unwrap();
        // No example has blanks inside quotes but in a request of HTTP.
        let line = line.replace("GET / HTTP/1.0", "GET/");
        let words = line.split_whitespace().skip(1).map(|word| word.trim_matches('\''));
        // A request for help is granted once all that stands before it is understood.
        let output = warpwire().args(words).arg("--help").output().unwrap();
        assert!(output.status.success(), "{line}: {}", crate::stderr(&output));
    }
}

#[test]
fn examples_of_every_help_page_run() {
    let pages = pages();
    assert!(pages.len() >= 25, "{} pages", pages.len());
    let (mut all, mut first) = (BTreeSet::new(), BTreeSet::new());
    for page in &pages {
        let examples = examples(page);
        assert!(!examples.is_empty(), "no examples: {page}");
        first.extend(examples.first().cloned());
        all.extend(examples);
    }
    let known: BTreeSet<String> = TABLE.iter().map(|(command, _)| (*command).to_owned()).collect();
    assert_eq!(known.len(), TABLE.len(), "an example stands twice in the table");
    let untested: Vec<_> = all.difference(&known).collect();
    assert!(untested.is_empty(), "not in the table of this test: {untested:#?}");
    let stale: Vec<_> = known.difference(&all).collect();
    assert!(stale.is_empty(), "no page has them any more: {stale:#?}");
    let has_jq = Command::new("jq").arg("--version").output().is_ok();
    let wanted = |command: &str| Effort::current() > Effort::Quick || first.contains(command);
    let chosen: Vec<_> = TABLE.iter().filter(|(command, _)| wanted(command)).collect();
    let next = AtomicUsize::new(0);
    // Most of them take a fixed time, whatever else runs.
    std::thread::scope(|scope| {
        for number in 0..3 {
            let (chosen, next) = (&chosen, &next);
            scope.spawn(move || {
                let bench = Bench::new(number);
                while let Some((command, how)) = chosen.get(next.fetch_add(1, Ordering::Relaxed)) {
                    match command.contains("| jq") && !has_jq {
                        true => println!("skipped: {command} (jq is not installed)"),
                        false => bench.test(command, how),
                    }
                }
            });
        }
    });
}

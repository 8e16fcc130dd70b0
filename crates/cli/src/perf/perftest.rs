//! Options of perftest (`ib_write_bw` and its kin) that are spelled otherwise here, or missing.

use std::ffi::OsString;

use clap::error::{ContextKind, ContextValue, ErrorKind};

/// An option of perftest: its letter, its name with dashes, and the answer.
type Other = (Option<char>, &'static str, &'static str);

/// perftest's options that this command does not take.
const OTHERS: &[Other] = &[
    (
        Some('R'),
        "rdma-cm",
        "the sides exchange addresses over TCP (-p), and need no rdma_cm; librdmacm itself runs \
         with: warpwire verbs -- ib_write_bw -R",
    ),
    (Some('z'), "comm-rdma-cm", "the sides exchange addresses over TCP (-p)"),
    (Some('A'), "atomic-type", "atomics are fetch-and-add: warpwire perf atomic bw"),
    (Some('C'), "report-cycles", "times are microseconds, and the clock is not the TSC's"),
    (Some('f'), "margin", "leave it out: every size has a warm-up that is not timed"),
    (Some('g'), "mcg", "there is no multicast"),
    (Some('M'), "MGID", "there is no multicast"),
    (Some('h'), "help", "write --help"),
    (Some('l'), "post-list", "leave it out: requests are posted in batches of up to 32"),
    (None, "recv-post-list", "leave it out: receives are posted in batches of up to 32"),
    (Some('L'), "hop-limit", "there is no such option"),
    (Some('o'), "outs", "a queue pair has up to 16 reads and atomics in flight; limit with -t"),
    (Some('O'), "dualport", "run one test per port"),
    (Some('r'), "rx-depth", "leave it out: receives are at least twice -t"),
    (Some('S'), "sl", "there is no such option"),
    (Some('T'), "tos", "there is no such option"),
    (None, "tclass", "there is no such option"),
    (Some('u'), "qp-timeout", "there is no such option; --timeout is for a silent peer"),
    (Some('V'), "version", "write: warpwire --version"),
    (Some('w'), "limit-bw", "compare rows[].average_mb_s of --json"),
    (Some('y'), "limit-msgrate", "compare rows[].mpps of --json"),
    (Some('W'), "report-counters", "--json has counters; warpwire stat shows them live"),
    (Some('X'), "vector", "there is no such option; -e sleeps until completion events"),
    (Some('Z'), "com-rdma-cm", "the sides exchange addresses over TCP (-p)"),
    (None, "out-json", "write --json (standard output) or --out_json_file=FILE"),
    (None, "output", "take the figure from --json or --csv"),
    (None, "report-both", "-b reports the sum of both directions"),
    (None, "report-per-port", "run one test per port"),
    (None, "reversed", "exchange the roles: the side with HOST is the one that sends"),
    (None, "data-validation", "leave it out: received data is always verified"),
    (None, "odp", "write --reg on-demand"),
    (None, "use-cuda-dmabuf", "write --use_cuda=N --reg dmabuf"),
    (None, "use-cuda-bus-id", "write --use_cuda=N, with the number of the GPU"),
    (None, "use-rocm", "memory is the host's or a CUDA device's: --mem host, sim:N or cuda:N"),
    (None, "use-hl", "memory is the host's or a CUDA device's: --mem host, sim:N or cuda:N"),
    (None, "use-hugepages", "leave it out: buffers of 1 MiB and more are in huge pages"),
    (None, "mmap", "there is no such option; memory is chosen with --mem"),
    (None, "mr-per-qp", "there is no such option: a side has one registration per direction"),
    (None, "use-srq", "there is no such option: each queue pair has its receive queue"),
    (None, "inline-recv", "there is no such option; -I is for sends"),
    (None, "write-with-imm", "there is no such option; perf send raises completions at the peer"),
    (None, "rate-limit", "there is no such option"),
    (None, "rate-units", "there is no such option"),
    (None, "rate-limit-type", "there is no such option"),
    (None, "burst-size", "there is no such option"),
    (None, "typical-pkt-size", "there is no such option"),
    (None, "latency-gap", "there is no such option"),
    (None, "flows", "there is no such option; -q is the number of queue pairs"),
    (None, "flows-burst", "there is no such option; -q is the number of queue pairs"),
    (None, "ipv6", "leave it out: HOST and --bind decide"),
    (None, "ipv6-addr", "leave it out: HOST and --bind decide"),
    (None, "source-ip", "--link udp:ADDRESS:0 chooses the address of this side"),
    (None, "bind-source-ip", "--link udp:ADDRESS:0 chooses the address of this side"),
    (None, "dlid", "there is no such option"),
    (None, "pkey-index", "there is no such option"),
    (None, "force-link", "leave it out: the port says whether it is Ethernet or InfiniBand"),
    (None, "retry-count", "there is no such option"),
    (None, "dont-xchg-versions", "leave it out: both sides must be of one version"),
    (None, "wait-destroy", "there is no such option"),
    (None, "use-exp", "leave it out: there is one interface"),
    (None, "use-old-post-send", "leave it out: there is one interface"),
    (None, "use-null-mr", "there is no such option; memory is chosen with --mem"),
    (None, "use-ooo", "there is no such option"),
    (None, "aes-xts", "there is no such option"),
    (None, "payload-file-path", "the payload is a pattern that the receiver verifies"),
];

/// The arguments of the process; of `perf`, with dashes in the names of options that perftest
/// writes with underscores.
pub(crate) fn normalize(words: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let mut words: Vec<OsString> = words.collect();
    if words.get(1).is_none_or(|command| command != "perf") {
        return words;
    }
    for word in words.iter_mut().skip(2).take_while(|word| *word != "--") {
        let Some(text) = word.to_str().filter(|text| text.starts_with("--")) else { continue };
        let (name, value) = text.split_once('=').map_or((text, None), |(a, b)| (a, Some(b)));
        let name = name.replace('_', "-");
        *word = value.map_or_else(|| name.clone(), |value| format!("{name}={value}")).into();
    }
    words
}

/// What to write instead of an option of perftest; `None` if the error is another.
pub(crate) fn explain(words: &[OsString], error: &clap::Error) -> Option<String> {
    let is_perf = words.get(1).is_some_and(|command| command == "perf");
    if !is_perf || error.kind() != ErrorKind::UnknownArgument {
        return None;
    }
    let Some(ContextValue::String(wrong)) = error.get(ContextKind::InvalidArg) else { return None };
    let wrong = wrong.split('=').next()?;
    let (letter, name, answer) = OTHERS.iter().find(|(letter, name, _)| {
        wrong.strip_prefix("--").is_some_and(|wrong| wrong == *name)
            || letter.is_some_and(|letter| wrong == format!("-{letter}"))
    })?;
    let letter = letter.map_or_else(String::new, |letter| format!("-{letter}, "));
    Some(format!("perftest's {letter}--{name} is not an option of warpwire perf: {answer}"))
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;
    use crate::Arguments;

    fn answer(words: &str) -> Option<String> {
        use clap::Parser;
        let words = words.split(' ').map(OsString::from);
        let words = normalize(std::iter::once("warpwire".into()).chain(words));
        let error = Arguments::try_parse_from(&words).err()?;
        explain(&words, &error)
    }

    #[test]
    fn other_options_of_perftest_are_answered() {
        for (_, name, text) in OTHERS {
            let underscores = name.replace('-', "_");
            if *name == "help" {
                continue;
            }
            let found = answer(&format!("perf write bw --{underscores}=3"));
            assert!(found.is_some_and(|found| found.ends_with(text)), "{name}");
        }
        for (letter, _, text) in OTHERS.iter().filter(|(letter, ..)| *letter != Some('h')) {
            let Some(letter) = letter else { continue };
            let found = answer(&format!("perf write bw -{letter} 3"));
            assert!(found.is_some_and(|found| found.ends_with(text)), "{letter}");
        }
    }

    #[test]
    fn only_perf_is_answered() {
        assert_eq!(answer("perf write bw --nonsense"), None);
        assert_eq!(answer("perf write bw -p x"), None);
        assert_eq!(answer("mp pingpong -R"), None);
    }

    #[test]
    fn no_option_is_both_taken_and_answered() {
        let command = Arguments::command();
        let perf = command.find_subcommand("perf").unwrap();
        for argument in perf.get_arguments() {
            for (letter, name, _) in OTHERS.iter().filter(|(_, name, _)| *name != "help") {
                let taken = argument.get_long_and_visible_aliases().unwrap_or_default();
                let also = argument.get_all_aliases().unwrap_or_default();
                assert!(!taken.contains(name) && !also.contains(name), "--{name}");
                assert!(letter.is_none() || argument.get_short() != *letter, "-{letter:?}");
            }
        }
    }

    #[test]
    fn underscores_become_dashes_in_names_only() {
        let words = |text: &str| text.split(' ').map(OsString::from).collect::<Vec<_>>();
        let line =
            words("w perf write bw --out_json_file=a_b.json --report_gbits my_host -d mlx5_0");
        let wanted =
            words("w perf write bw --out-json-file=a_b.json --report-gbits my_host -d mlx5_0");
        assert_eq!(normalize(line.into_iter()), wanted);
        let line = words("w run -- prog --its_own");
        assert_eq!(normalize(line.clone().into_iter()), line);
    }
}

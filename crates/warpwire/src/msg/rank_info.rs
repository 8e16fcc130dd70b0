//! Rank, size and meeting point of a process, from its launcher's environment variables.

use std::path::PathBuf;

use crate::error::{Error, Kind, Result};
use crate::host::runtime_folder;

/// The launcher that started the ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Launcher {
    /// `warpwire run`, or any launcher that sets `WARPWIRE_RANK` and `WARPWIRE_SIZE`.
    Run,
    /// `torchrun`, or any launcher that sets `RANK` and `WORLD_SIZE`.
    Torch,
    /// Open MPI's `mpirun`.
    OpenMpi,
    /// MPICH, Intel MPI and others that use PMI.
    Pmi,
    /// Slurm's `srun`.
    Slurm,
    /// No launcher: a single rank.
    Standalone,
}

/// Where the ranks connect to rank 0.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Rendezvous {
    /// Rank 0 listens on this `host:port`.
    Address(String),
    /// Rank 0 listens on any port of this machine and writes its address to this file.
    File(PathBuf),
}

/// Rank, size and meeting point of a process.
///
/// ```
/// use warpwire::msg::{Launcher, RankInfo};
/// let rank_info = RankInfo::from_vars(|name| match name {
///     "RANK" => Some("1".into()),
///     "WORLD_SIZE" => Some("2".into()),
///     "MASTER_ADDR" => Some("127.0.0.1".into()),
///     "MASTER_PORT" => Some("29500".into()),
///     _ => None,
/// })?;
/// assert_eq!((rank_info.rank, rank_info.size, rank_info.launcher), (1, 2, Launcher::Torch));
/// # Ok::<(), warpwire::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankInfo {
    /// The rank of this process, from 0 to `size` − 1.
    pub rank: usize,
    /// The number of ranks.
    pub size: usize,
    /// The rank among those on this machine, for choosing a GPU.
    pub local_rank: usize,
    /// Where the ranks connect to rank 0.
    pub rendezvous: Rendezvous,
    /// A token shared by all ranks of the job; rank 0 rejects connections with another one.
    pub token: String,
    /// The launcher that started the ranks.
    pub launcher: Launcher,
}

pub(super) const MAX_RANKS: usize = 1024;

/// The environment variables of a launcher: rank, size, local rank, and those that identify the
/// job.
struct LauncherVars {
    launcher: Launcher,
    rank: &'static str,
    size: &'static str,
    local_rank: &'static str,
    /// The number of ranks on this machine.
    local_size: &'static str,
    job: &'static [&'static str],
}

const LAUNCHERS: [LauncherVars; 5] = [
    LauncherVars {
        launcher: Launcher::Run,
        rank: "WARPWIRE_RANK",
        size: "WARPWIRE_SIZE",
        local_rank: "WARPWIRE_LOCAL_RANK",
        local_size: "WARPWIRE_LOCAL_SIZE",
        job: &[],
    },
    LauncherVars {
        launcher: Launcher::Torch,
        rank: "RANK",
        size: "WORLD_SIZE",
        local_rank: "LOCAL_RANK",
        local_size: "LOCAL_WORLD_SIZE",
        job: &["TORCHELASTIC_RUN_ID"],
    },
    LauncherVars {
        launcher: Launcher::OpenMpi,
        rank: "OMPI_COMM_WORLD_RANK",
        size: "OMPI_COMM_WORLD_SIZE",
        local_rank: "OMPI_COMM_WORLD_LOCAL_RANK",
        local_size: "OMPI_COMM_WORLD_LOCAL_SIZE",
        job: &["PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"],
    },
    LauncherVars {
        launcher: Launcher::Pmi,
        rank: "PMI_RANK",
        size: "PMI_SIZE",
        local_rank: "MPI_LOCALRANKID",
        local_size: "MPI_LOCALNRANKS",
        job: &["PMI_JOBID", "HYDRA_JOBID", "PMI_ID_MAP"],
    },
    LauncherVars {
        launcher: Launcher::Slurm,
        rank: "SLURM_PROCID",
        size: "SLURM_NTASKS",
        local_rank: "SLURM_LOCALID",
        local_size: "SLURM_NTASKS_PER_NODE",
        job: &["SLURM_JOB_ID", "SLURM_STEP_ID"],
    },
];

impl RankInfo {
    /// Reads the launcher's environment. Without a launcher, the process is a single rank.
    ///
    /// # Errors
    /// If the variables are invalid, or do not define the meeting point; the text names the
    /// variable to set.
    pub fn from_env() -> Result<Self> {
        Self::from_vars(|name| std::env::var(name).ok())
    }

    /// As [`from_env`](Self::from_env), with variables from `lookup`.
    pub fn from_vars(lookup: impl Fn(&str) -> Option<String>) -> Result<Self> {
        let lookup = |name: &str| lookup(name).filter(|value| !value.trim().is_empty());
        let is_there = |names: &&LauncherVars| {
            let step = names.launcher != Launcher::Slurm || lookup("SLURM_STEP_ID").is_some();
            // The shell of a batch job has Slurm's variables too but is not a rank: only steps have
            // a step id.
            step && lookup(names.rank).is_some() && lookup(names.size).is_some()
        };
        let Some(names) = LAUNCHERS.iter().find(is_there) else { return Ok(Self::standalone()) };
        let number = |name: &str| -> Result<Option<usize>> {
            let Some(text) = lookup(name) else { return Ok(None) };
            text.trim().parse().map(Some).map_err(|_| wrong(name, &text, "a number"))
        };
        let (rank, size) = (number(names.rank)?.unwrap_or(0), number(names.size)?.unwrap_or(1));
        if size == 0 || size > MAX_RANKS {
            let expected = format!("between 1 and {MAX_RANKS}");
            return Err(wrong(names.size, &size.to_string(), &expected));
        }
        if rank >= size {
            return Err(wrong(names.rank, &rank.to_string(), &format!("below {size}, the size")));
        }
        let local_rank = number(names.local_rank)?.unwrap_or(rank);
        let job: Vec<String> = names.job.iter().filter_map(|name| lookup(name)).collect();
        let token = lookup("WARPWIRE_TOKEN").unwrap_or_else(|| job.join("."));
        let all_here = size == 1 || number(names.local_size).ok().flatten() == Some(size);
        let rendezvous = rendezvous(names.launcher, &lookup, &job, all_here)?;
        Ok(Self { rank, size, local_rank, rendezvous, token, launcher: names.launcher })
    }

    fn standalone() -> Self {
        Self {
            rank: 0,
            size: 1,
            local_rank: 0,
            rendezvous: Rendezvous::Address("127.0.0.1:0".to_owned()),
            token: String::new(),
            launcher: Launcher::Standalone,
        }
    }
}

/// The meeting point: set explicitly, or derived from the launcher's variables.
fn rendezvous(
    launcher: Launcher,
    lookup: &impl Fn(&str) -> Option<String>,
    job: &[String],
    all_here: bool,
) -> Result<Rendezvous> {
    if let Some(text) = lookup("WARPWIRE_MASTER") {
        return parse_rendezvous(&text);
    }
    if let (Some(host), Some(port)) = (lookup("MASTER_ADDR"), lookup("MASTER_PORT")) {
        let port: u16 = port.trim().parse().map_err(|_| wrong("MASTER_PORT", &port, "a port"))?;
        // torchrun's own store listens on that port.
        let taken = lookup("TORCHELASTIC_USE_AGENT_STORE").is_some_and(|word| word == "True");
        let port = if taken { port.checked_add(1).unwrap_or(1024) } else { port };
        return Ok(Rendezvous::Address(join(&host, port)));
    }
    match launcher {
        Launcher::Slurm => {
            let lists = ["SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"];
            let list = lists.iter().find_map(|name| lookup(name));
            let host = list.as_deref().and_then(first_host);
            let number = job.first().and_then(|id| id.parse::<u32>().ok()).unwrap_or(0);
            // One port per job, so that two jobs on one machine do not collide.
            let port = 29_600 + (number % 3000) as u16;
            host.map(|host| Rendezvous::Address(join(&host, port))).ok_or_else(no_rendezvous)
        }
        _ if all_here && !job.is_empty() => {
            let is_plain = |c: &char| c.is_ascii_alphanumeric() || *c == '-';
            let name: String = job.join("-").chars().filter(is_plain).take(80).collect();
            let folder = runtime_folder(lookup("XDG_RUNTIME_DIR").map(Into::into));
            Ok(Rendezvous::File(folder.join(format!("{name}.address"))))
        }
        _ if all_here && launcher == Launcher::Run => Ok(Rendezvous::Address("127.0.0.1:0".into())),
        _ => Err(no_rendezvous()),
    }
}

fn parse_rendezvous(text: &str) -> Result<Rendezvous> {
    let text = text.trim();
    if let Some(path) = text.strip_prefix("file:") {
        return Ok(Rendezvous::File(path.into()));
    }
    let port = text.rsplit_once(':').and_then(|(_, port)| port.parse::<u16>().ok());
    match port {
        Some(_) => Ok(Rendezvous::Address(text.to_owned())),
        None => Err(wrong("WARPWIRE_MASTER", text, "HOST:PORT or file:PATH")),
    }
}

fn join(host: &str, port: u16) -> String {
    match host.contains(':') && !host.starts_with('[') {
        true => format!("[{host}]:{port}"),
        false => format!("{host}:{port}"),
    }
}

/// The first host of a Slurm host list: `gpu[003-005,9],login` gives `gpu003`.
fn first_host(list: &str) -> Option<String> {
    let list = list.trim();
    let end = list.find(['[', ',']).unwrap_or(list.len());
    let (name, rest) = list.split_at(end);
    let host = match rest.strip_prefix('[') {
        None => name.to_owned(),
        Some(range) => {
            let number: String = range.chars().take_while(char::is_ascii_digit).collect();
            let after = range.split_once(']').map(|(_, after)| after)?;
            let suffix = after.split(',').next().unwrap_or_default();
            if number.is_empty() {
                return None;
            }
            format!("{name}{number}{suffix}")
        }
    };
    (!host.is_empty()).then_some(host)
}

fn wrong(name: &str, text: &str, expected: &str) -> Error {
    Error::new(Kind::Malformed, "determine the rank of this process")
        .why(format!("{name} is {text:?}, and must be {expected}"))
        .fix("start the ranks with warpwire run, torchrun, mpirun or srun")
}

fn no_rendezvous() -> Error {
    Error::new(Kind::Malformed, "determine the address of rank 0")
        .why("the launcher does not set it")
        .fix("set WARPWIRE_MASTER=HOST:PORT on every rank, where HOST is rank 0's")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rank_info(vars: &[(&str, &str)]) -> Result<RankInfo> {
        let vars: Vec<(String, String)> =
            vars.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        RankInfo::from_vars(move |name| {
            vars.iter().find(|(known, _)| known == name).map(|(_, value)| value.clone())
        })
    }

    fn address(rank_info: &RankInfo) -> &str {
        match &rank_info.rendezvous {
            Rendezvous::Address(text) => text,
            Rendezvous::File(path) => panic!("{path:?}"),
        }
    }

    #[test]
    fn launchers_are_recognized() {
        let run = [
            ("WARPWIRE_RANK", "3"),
            ("WARPWIRE_SIZE", "8"),
            ("WARPWIRE_LOCAL_RANK", "1"),
            ("WARPWIRE_MASTER", "file:/tmp/x"),
            ("WARPWIRE_TOKEN", "secret"),
            ("RANK", "0"),
            ("WORLD_SIZE", "1"),
        ];
        let found = rank_info(&run).unwrap();
        assert_eq!((found.rank, found.size, found.local_rank), (3, 8, 1));
        assert_eq!(found.rendezvous, Rendezvous::File("/tmp/x".into()));
        assert_eq!((found.token.as_str(), found.launcher), ("secret", Launcher::Run));
        let torch = [("RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0")];
        let meet = [("MASTER_ADDR", "node1"), ("MASTER_PORT", "29500")];
        let agent = [("TORCHELASTIC_USE_AGENT_STORE", "True"), ("TORCHELASTIC_RUN_ID", "job")];
        let found = rank_info(&[&torch[..], &meet, &agent].concat()).unwrap();
        assert_eq!((address(&found), found.token.as_str()), ("node1:29501", "job"));
        assert_eq!((found.local_rank, found.launcher), (0, Launcher::Torch));
        let found = rank_info(&[&torch[..], &meet].concat()).unwrap();
        assert_eq!(address(&found), "node1:29500");
        let mpi = [
            ("OMPI_COMM_WORLD_RANK", "1"),
            ("OMPI_COMM_WORLD_SIZE", "4"),
            ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
            ("PMIX_NAMESPACE", "prterun-7@1"),
        ];
        let local = [("OMPI_COMM_WORLD_LOCAL_SIZE", "4")];
        let found = rank_info(&[&mpi[..], &local].concat()).unwrap();
        assert!(matches!(&found.rendezvous, Rendezvous::File(path)
            if path.ends_with("prterun-71.address")
                && path.parent().unwrap().file_name() == runtime_folder(None).file_name()));
        let pmi = [("PMI_RANK", "0"), ("PMI_SIZE", "2"), ("WARPWIRE_MASTER", "[::1]:99")];
        let found = rank_info(&pmi).unwrap();
        assert_eq!((found.launcher, address(&found)), (Launcher::Pmi, "[::1]:99"));
        assert_eq!(rank_info(&[]).unwrap().launcher, Launcher::Standalone);
    }

    #[test]
    fn slurm_rendezvous_is_the_first_host() {
        let step = [
            ("SLURM_PROCID", "5"),
            ("SLURM_NTASKS", "16"),
            ("SLURM_LOCALID", "1"),
            ("SLURM_JOB_ID", "4711"),
            ("SLURM_STEP_ID", "0"),
            ("SLURM_STEP_NODELIST", "gpu[003-005,9],login"),
        ];
        let found = rank_info(&step).unwrap();
        assert_eq!((found.rank, found.local_rank, found.launcher), (5, 1, Launcher::Slurm));
        assert_eq!((address(&found), found.token.as_str()), ("gpu003:31311", "4711.0"));
        // The shell of a batch job is not a rank.
        assert_eq!(rank_info(&step[..4]).unwrap().launcher, Launcher::Standalone);
        let hosts = [
            ("a", Some("a")),
            ("a,b", Some("a")),
            ("n[07-09].x,b", Some("n07.x")),
            ("n[", None),
            ("n[]", None),
            ("", None),
        ];
        for (list, host) in hosts {
            assert_eq!(first_host(list).as_deref(), host, "{list}");
        }
    }

    #[test]
    fn errors_name_the_invalid_variable() {
        let bad: [(&[(&str, &str)], &str); 7] = [
            (&[("RANK", "x"), ("WORLD_SIZE", "2")], "RANK is \"x\""),
            (&[("RANK", "2"), ("WORLD_SIZE", "2")], "below 2"),
            (&[("RANK", "0"), ("WORLD_SIZE", "0")], "WORLD_SIZE"),
            (&[("RANK", "0"), ("WORLD_SIZE", "99999")], "between 1 and 1024"),
            (&[("RANK", "0"), ("WORLD_SIZE", "2")], "WARPWIRE_MASTER=HOST:PORT"),
            (&[("PMI_RANK", "0"), ("PMI_SIZE", "2"), ("WARPWIRE_MASTER", "here")], "file:PATH"),
            (
                &[("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "a"), ("MASTER_PORT", "7x")],
                "MASTER_PORT",
            ),
        ];
        for (vars, text) in bad {
            let error = rank_info(vars).unwrap_err();
            assert_eq!(error.kind(), &Kind::Malformed, "{error}");
            assert!(error.to_string().contains(text), "{error}");
        }
    }
}

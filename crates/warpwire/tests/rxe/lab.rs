//! Where cases run: the guest, and the addresses at both ends.

use std::io::{BufRead, BufReader, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream};
use std::path::PathBuf;
use std::time::Duration;

/// Upper bound for anything that works, in a guest emulated on a busy machine.
pub fn test_timeout() -> Duration {
    testkit::deadline(Duration::from_secs(30))
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    V4,
    V6,
}

/// Environment set up by `tools/rxe-lab`.
pub struct Lab {
    /// Address of the guest's shell.
    shell: SocketAddr,
    logs: PathBuf,
    /// Path of the `warpwire` binary.
    pub command: PathBuf,
}

impl Lab {
    pub fn from_env() -> Option<Self> {
        let shell = std::env::var("WARPWIRE_LAB_GUEST").ok()?.parse().unwrap();
        let logs = PathBuf::from(std::env::var_os("WARPWIRE_LAB_LOGS")?).join("cases");
        std::fs::create_dir_all(&logs).unwrap();
        Some(Self { shell, logs, command: std::env::var_os("WARPWIRE_LAB_CLI")?.into() })
    }

    /// The context of one case.
    pub fn bench(&'static self, family: Family, case: String) -> Bench {
        Bench { lab: self, family, case, peer: "/job/verbs-peer rxe0" }
    }
}

/// The context of a case.
pub struct Bench {
    pub lab: &'static Lab,
    pub family: Family,
    pub case: String,
    /// Command that starts the verbs peer in the guest.
    pub peer: &'static str,
}

impl Bench {
    /// Address of this machine or the guest on their shared network, by its last byte.
    fn address(&self, last: u8) -> IpAddr {
        let IpAddr::V4(guest) = self.lab.shell.ip() else {
            panic!("the guest has no IPv4 address")
        };
        let net = guest.octets()[2];
        match self.family {
            Family::V4 => Ipv4Addr::new(10, 77, net, last).into(),
            Family::V6 => Ipv6Addr::new(0xfd77, net.into(), 0, 0, 0, 0, 0, u16::from(last)).into(),
        }
    }

    pub fn ours(&self) -> IpAddr {
        self.address(1)
    }

    pub fn theirs(&self) -> IpAddr {
        self.address(2)
    }

    /// The address for intentionally corrupted packets, which the capture checks skip.
    pub fn damaged(&self) -> IpAddr {
        self.address(66)
    }

    /// Next unused capture file of this case; a case with several testbeds has several.
    pub fn capture(&self) -> PathBuf {
        let name = self.case.replace("::", "-");
        let free = (0..).map(|n| self.lab.logs.join(format!("{name}-{n}.pcap")));
        free.into_iter().find(|path| !path.exists()).unwrap()
    }

    /// A file next to the guest's console log.
    pub fn log(&self, name: &str) -> PathBuf {
        self.lab.logs.with_file_name(name)
    }

    /// Opens a shell in the guest.
    pub fn shell(&self) -> Shell {
        let stream = TcpStream::connect_timeout(&self.lab.shell, test_timeout()).unwrap();
        stream.set_nodelay(true).unwrap();
        stream.set_read_timeout(Some(test_timeout() * 2)).unwrap();
        Shell { reader: BufReader::new(stream) }
    }

    /// Starts a command in the guest.
    pub fn start(&self, command: &str) -> Running {
        let mut shell = self.shell();
        shell.write_line(&format!("({command}) 2>&1 </dev/null; echo status=$?; exit"));
        Running { shell, command: command.to_owned() }
    }

    /// Index of the guest's GID of this address family.
    pub fn gid_index(&self) -> usize {
        let folder = "/sys/class/infiniband/rxe0/ports/1/gids";
        let text = self.start(&format!("cd {folder}; grep . *")).end();
        let wanted = gid(self.theirs());
        let found = text.lines().find_map(|line| {
            let (index, gid) = line.split_once(':')?;
            (gid.replace(':', "") == wanted).then(|| index.parse().ok())?
        });
        found.unwrap_or_else(|| panic!("no GID {wanted} in {text}"))
    }
}

/// The GID of an address, as 32 hexadecimal digits.
pub fn gid(address: IpAddr) -> String {
    let six = match address {
        IpAddr::V4(four) => four.to_ipv6_mapped(),
        IpAddr::V6(six) => six,
    };
    format!("{:032x}", six.to_bits())
}

/// A line-based connection to a program in the guest, which exits when the connection closes.
pub struct Shell {
    reader: BufReader<TcpStream>,
}

impl Shell {
    pub fn write_line(&mut self, line: &str) {
        self.reader.get_mut().write_all(format!("{line}\n").as_bytes()).unwrap();
    }

    /// The next line without its newline; `None` if the program closed the connection.
    pub fn read_line(&mut self) -> Option<String> {
        let mut line = String::new();
        let count = self.reader.read_line(&mut line).expect("a line from the guest");
        (count > 0).then(|| line.trim_end().to_owned())
    }
}

/// A running command in the guest.
pub struct Running {
    shell: Shell,
    command: String,
}

impl Running {
    /// Waits until the command succeeds, and returns its output.
    pub fn end(self) -> String {
        let command = self.command.clone();
        let (status, text) = self.outcome();
        assert_eq!(status, 0, "{command}: {text}");
        text
    }

    /// Waits until the command exits; returns its status and output.
    pub fn outcome(mut self) -> (i32, String) {
        let mut text = String::new();
        loop {
            let line = self.shell.read_line().unwrap_or_else(|| panic!("{}: {text}", self.command));
            if let Some(status) = line.strip_prefix("status=") {
                return (status.parse().unwrap(), text);
            }
            text += &line;
            text.push('\n');
        }
    }
}

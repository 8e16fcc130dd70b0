//! A trial of one NIC with one GPU: RDMA writes into GPU memory and reads from it, on a queue pair
//! that is connected to another one of the same NIC.

use std::fmt::Write;
use std::time::{Duration, Instant};

use serde::Serialize;

use super::TextStyle;
use super::fold::wrap;
use warpwire::error::{Error, Kind, Result};
use warpwire::ibv;
use warpwire::link::Hub;
use warpwire::mem::{self, Allocation};
use warpwire::mr::{AccessPath, HostMemory};
use warpwire::verbs::{Access, Context, Cq, Mr, Pd, Qp, QpOptions, SendRequest, WrOp};

/// Name of the software HCA.
const SOFTWARE: &str = "soft";
/// Bytes that are moved in each direction.
const LEN: u64 = 1 << 20;
/// Part of the first and last bytes that are left out, so that they are not aligned.
const MARGIN: u64 = 67;
const TIMEOUT: Duration = Duration::from_secs(10);

/// The result of moving data through a NIC into a GPU and back.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct PairTrial {
    /// The RDMA device, or `soft`.
    pub nic: String,
    /// The GPU: `cuda:0`, `sim:0`.
    pub gpu: String,
    /// Its name.
    pub gpu_name: String,
    /// How the NIC accesses the GPU's memory: `mapped dma-buf`, `peer memory`, `staged`, …
    pub path: String,
    /// Whether the NIC itself accesses the GPU's memory, by dma-buf or peer memory: `false` if data
    /// is staged, and for the software HCA and soft-RoCE, for which the CPU does that.
    pub direct: bool,
    /// Whether data is staged through host memory.
    pub staged: bool,
    /// Why no better path is used.
    pub why: Vec<String>,
    /// Bytes that were written, and read back; all were compared.
    pub bytes: u64,
    /// Microseconds to register the GPU's memory.
    pub register_us: f64,
    /// Microseconds of the RDMA write.
    pub write_us: f64,
    /// Microseconds of the RDMA read.
    pub read_us: f64,
}

impl PairTrial {
    /// The result as text.
    pub fn to_text(&self, style: TextStyle) -> String {
        let Self { nic, gpu, gpu_name, bytes, .. } = self;
        let size = warpwire::units::bytes(*bytes);
        let answer = match (self.staged, self.direct) {
            (true, _) => "GPUDirect RDMA: NO, the data was staged through host memory",
            (_, true) => "GPUDirect RDMA: YES, tried: the NIC accessed the GPU's memory",
            (_, false) => "RDMA in software: the CPU accessed the GPU's memory",
        };
        let mut text = format!("{answer}\n");
        let mut line = |name: &str, value: &str| {
            let lines = wrap(value, style.width.saturating_sub(14));
            for (number, value) in lines.iter().enumerate() {
                let name = if number == 0 { name } else { "" };
                // Writing to a string cannot fail.
                let _ = writeln!(text, "    {name:<8}  {value}");
            }
        };
        line("NIC", nic);
        line("GPU", &format!("{gpu}, {gpu_name}"));
        line("path", &self.path);
        for why in &self.why {
            line("", &super::printable(why));
        }
        line("register", &format!("{:.1} µs", self.register_us));
        line("write", &format!("{size} into the GPU: right, in {:.1} µs", self.write_us));
        line("read", &format!("{size} out of the GPU: right, in {:.1} µs", self.read_us));
        text
    }
}

/// Writes through a NIC into a GPU's memory and reads it back, and compares every byte.
///
/// `nic` is an RDMA device (`mlx5_0`) or `soft`, the software HCA; `gpu` is `cuda:0` or `sim:0`.
/// Takes some milliseconds, and longer where CUDA has to be initialized; 2 MiB of host memory and
/// 1 MiB of the GPU's are used.
///
/// # Errors
/// If there is no such device, if it has no active port, if memory cannot be registered, or if the
/// data is wrong.
///
/// ```
/// let trial = warpwire_doctor::try_pair("soft", "sim:0")?;
/// assert!(!trial.direct && trial.bytes > 1_000_000);
/// # Ok::<(), warpwire::Error>(())
/// ```
pub fn try_pair(nic: &str, gpu: &str) -> Result<PairTrial> {
    let device = mem::open(gpu)?;
    let memory = device.alloc(LEN)?;
    let bench = Bench::open(nic)?;
    let rights = Access::LOCAL_WRITE | Access::REMOTE_READ | Access::REMOTE_WRITE;
    // Excludes one-time costs of the process, such as measuring the fastest copies.
    drop(bench.context.register(&bench.pd, memory.whole()?, rights)?);
    let start = Instant::now();
    let mr = bench.context.register(&bench.pd, memory.whole()?, rights)?;
    let register_us = micros(start);
    let (write_us, read_us) = bench.exercise(&memory, &mr)?;
    let path = mr.path();
    Ok(PairTrial {
        nic: nic.to_owned(),
        gpu: device.label().to_string(),
        gpu_name: device.info().name.clone(),
        direct: nic != SOFTWARE && matches!(path, AccessPath::DmaBuf | AccessPath::PeerMemory),
        staged: path == AccessPath::Staged,
        path: path.to_string(),
        why: mr.why(),
        bytes: LEN - 2 * MARGIN,
        register_us,
        write_us,
        read_us,
    })
}

fn micros(start: Instant) -> f64 {
    start.elapsed().as_secs_f64() * 1e6
}

/// Two connected queue pairs of one device.
struct Bench {
    context: Context,
    pd: Pd,
    cq: Cq,
    qp: Qp,
    _peer: Qp,
}

impl Bench {
    fn open(nic: &str) -> Result<Self> {
        let context = match nic {
            SOFTWARE => Context::open(Hub::new().endpoint(([127, 0, 0, 1], 4791).into())?)?,
            name => open_device(name)?,
        };
        let pd = context.alloc_pd();
        let cq = context.create_cq(16)?;
        let create = || context.create_qp(&pd, &cq, &cq, QpOptions::default());
        let (qp, peer) = (create()?, create()?);
        qp.connect(&peer.endpoint())?;
        peer.connect(&qp.endpoint())?;
        Ok(Self { pd, cq, qp, _peer: peer, context })
    }

    /// Writes a pattern to the memory, and reads it back to another place; returns both times.
    fn exercise(&self, memory: &Allocation, mr: &Mr) -> Result<(f64, f64)> {
        let len = LEN - 2 * MARGIN;
        let sent: Vec<u8> = (0..len).map(|i| (i * 7 + i / 251) as u8).collect();
        let host = HostMemory::new(2 * LEN)?;
        host.bytes().write(0, &sent)?;
        memory.write(0, &vec![0xa5; LEN as usize])?;
        let local = self.context.register(&self.pd, host.clone(), Access::LOCAL_WRITE)?;
        let remote = mr.remote(MARGIN);
        let from = [local.sge(0, len as u32)];
        let write_us = self.finish(SendRequest::new(1, WrOp::Write(remote)).with(&from))?;
        let mut seen = vec![0; LEN as usize];
        memory.read(0, &mut seen)?;
        let (margin, end) = (MARGIN as usize, (LEN - MARGIN) as usize);
        let outside = seen.iter().take(margin).chain(seen.iter().skip(end));
        if seen.get(margin..end) != Some(&sent) || outside.into_iter().any(|byte| *byte != 0xa5) {
            return Err(wrong("write into the GPU's memory"));
        }
        let into = [local.sge(LEN, len as u32)];
        let read_us = self.finish(SendRequest::new(2, WrOp::Read(remote)).with(&into))?;
        let mut back = vec![0; len as usize];
        host.bytes().read(LEN, &mut back)?;
        if back != sent {
            return Err(wrong("read from the GPU's memory"));
        }
        Ok((write_us, read_us))
    }

    fn finish(&self, request: SendRequest<'_>) -> Result<f64> {
        let start = Instant::now();
        self.qp.post_send(&[request])?;
        let failed = |why: String| Error::new(Kind::DeviceLost, "access the GPU's memory").why(why);
        match self.cq.wait_next(TIMEOUT)? {
            Some(done) if done.is_success() => Ok(micros(start)),
            Some(done) => {
                let status = format!("the request completed with {:?}", done.status);
                Err(failed(status).fix("look for messages of the NIC's driver: `sudo dmesg`"))
            }
            None => Err(failed("the request did not complete within 10 s".to_owned())),
        }
    }
}

/// Opens an RDMA device; an error lists those that there are.
fn open_device(name: &str) -> Result<Context> {
    let known = ibv::devices()?;
    if !known.iter().any(|device| device.name == name) {
        let names: Vec<String> = known.into_iter().map(|device| device.name).collect();
        let names = [names, vec![SOFTWARE.to_owned()]].concat().join(", ");
        return Err(Error::new(Kind::InvalidArgument, format!("open the RDMA device {name:?}"))
            .why("there is no such device")
            .fix(format!("use one of: {names}")));
    }
    Context::open_device(name)
}

fn wrong(what: &'static str) -> Error {
    Error::new(Kind::DeviceLost, what)
        .why("the data differs from what was sent")
        .fix("look for errors of PCIe and of the drivers: `sudo dmesg`")
}

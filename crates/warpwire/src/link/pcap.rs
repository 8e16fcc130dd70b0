//! A capture of what goes through a link, with the IP and UDP headers that a network would show: for Wireshark.
//!
//! Packets appear as they are on the wire, with the identification that their ICRC covers. Packets that stay in memory
//! carry no ICRC; in the capture they get the one that belongs to them.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::path::Path as FilePath;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use parking_lot::Mutex;
use warpwire_proto::Instant;
use warpwire_proto::wire::icrc::Cover;
use warpwire_proto::wire::ip::{ECN_CAPABLE, ECN_MARKED, IpRepr, UDP_LEN, UdpRepr};
use warpwire_proto::wire::packet::ICRC_LEN;
use warpwire_proto::wire::pcap;

use super::flows::FlowId;
use super::{Counters, Flushed, Frame, Link, Path, Refused, Simd, Spoil};
use crate::error::{Error, Result};

/// What is gathered before the file is written.
const BUFFER: usize = 1 << 20;
/// Linux's usual.
const HOP_LIMIT: u8 = 64;

/// A capture file; clones write into the same.
///
/// ```
/// use warpwire::link::{Capture, Hub, Link, Tap};
/// # let folder = tempfile::tempdir().unwrap();
/// # let path = folder.path().join("a.pcap");
/// let capture = Capture::create(&path)?;
/// let hub = Hub::new();
/// let mut one = Tap::new(hub.endpoint("10.0.0.1:4791".parse().unwrap())?, &capture);
/// let flow = one.open("10.0.0.2:4791".parse().unwrap(), 0)?;
/// one.reserve(flow, 16).unwrap().fill(0);
/// one.commit();
/// capture.finish()?;
/// // A file's header, a record's, IP, UDP, and the packet.
/// assert_eq!(std::fs::metadata(&path).unwrap().len(), 24 + 16 + 20 + 8 + 16);
/// # Ok::<(), warpwire::Error>(())
/// ```
#[derive(Clone)]
pub struct Capture {
    shared: Arc<Mutex<Writer>>,
}

struct Writer {
    file: BufWriter<Box<dyn Write + Send>>,
    name: String,
    /// The first error: nothing is written after it.
    failed: Option<std::io::Error>,
}

impl Capture {
    /// A new capture file; one that is there is replaced.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn create(path: &FilePath) -> Result<Self> {
        let name = path.display().to_string();
        let file = File::create(path)
            .map_err(|source| Error::os("create a capture", &source).on(name.clone()))?;
        Ok(Self::to(Box::new(file), name))
    }

    /// A capture into anything that takes bytes, with a name for messages.
    pub fn to(file: Box<dyn Write + Send>, name: impl Into<String>) -> Self {
        let file = BufWriter::with_capacity(BUFFER, file);
        let mut writer = Writer { file, name: name.into(), failed: None };
        writer.put(&[&pcap::file_header()]);
        Self { shared: Arc::new(Mutex::new(writer)) }
    }

    /// Writes out what is gathered. The last clone does so too when it goes, and tells nobody of errors.
    ///
    /// # Errors
    /// If any write failed, now or earlier: the capture ends there.
    pub fn finish(&self) -> Result<()> {
        let mut writer = self.shared.lock();
        if writer.failed.is_none() {
            writer.failed = writer.file.flush().err();
        }
        match &writer.failed {
            None => Ok(()),
            Some(source) => Err(Error::os("write a capture", source)
                .on(writer.name.clone())
                .fix("see whether the disk is full")),
        }
    }

    fn write(&self, frame: &Frame<'_>) {
        let mut headers = [0; 48];
        let Some(len) = headers_of(frame, &mut headers) else { return };
        let icrc = match frame.sealed {
            true => None,
            false => {
                Cover::new(frame.from, frame.to).icrc::<Simd>(frame.identification, frame.bytes)
            }
        };
        let cut = frame.bytes.len().saturating_sub(ICRC_LEN);
        let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let at = Instant::from_nanos(u64::try_from(since.as_nanos()).unwrap_or(u64::MAX));
        let record = pcap::record_header(at, len + frame.bytes.len());
        let mut writer = self.shared.lock();
        match icrc {
            None => writer.put(&[&record, &headers[..len], frame.bytes]),
            Some(icrc) => {
                let packet = &frame.bytes[..cut];
                writer.put(&[&record, &headers[..len], packet, &icrc.to_le_bytes()]);
            }
        }
    }
}

impl Writer {
    fn put(&mut self, parts: &[&[u8]]) {
        if self.failed.is_none() {
            let mut written = parts.iter().map(|part| self.file.write_all(part));
            self.failed = written.find_map(std::result::Result::err);
        }
    }
}

/// The IP and UDP headers that the packet has, or would have; `None` if no header can say its length.
fn headers_of(frame: &Frame<'_>, headers: &mut [u8; 48]) -> Option<usize> {
    let udp = UdpRepr {
        source_port: frame.from.port(),
        destination_port: frame.to.port(),
        payload_len: u16::try_from(frame.bytes.len()).ok()?,
    };
    let ip = IpRepr {
        source: frame.from.ip(),
        destination: frame.to.ip(),
        traffic_class: if frame.marked { ECN_MARKED } else { ECN_CAPABLE },
        hop_limit: HOP_LIMIT,
        identification: frame.identification,
        payload_len: udp.payload_len.checked_add(UDP_LEN as u16)?,
    };
    let ip_len = ip.emit(headers);
    udp.emit(&mut headers[ip_len..]);
    Some(ip_len + UDP_LEN)
}

/// Any link, with a capture of its packets in both directions.
pub struct Tap<L: Link> {
    inner: L,
    capture: Capture,
}

impl<L: Link> Tap<L> {
    /// Captures what goes through `inner`.
    pub fn new(inner: L, capture: &Capture) -> Self {
        Self { inner, capture: capture.clone() }
    }

    /// The link inside.
    pub fn into_inner(self) -> L {
        self.inner
    }
}

impl<L: Link> Link for Tap<L> {
    fn path(&self) -> Path {
        let mut path = self.inner.path();
        path.why = format!("{}; captured in {}", path.why, self.capture.shared.lock().name);
        path
    }

    fn local(&self) -> SocketAddr {
        self.inner.local()
    }

    fn largest(&self) -> usize {
        self.inner.largest()
    }

    fn open(&mut self, peer: SocketAddr, label: u32) -> Result<FlowId> {
        self.inner.open(peer, label)
    }

    fn close(&mut self, flow: FlowId) {
        self.inner.close(flow);
    }

    fn reserve(&mut self, flow: FlowId, len: usize) -> std::result::Result<&mut [u8], Refused> {
        self.inner.reserve(flow, len)
    }

    fn commit_spoiled(&mut self, spoil: Spoil) -> Option<Frame<'_>> {
        let frame = self.inner.commit_spoiled(spoil)?;
        self.capture.write(&frame);
        Some(frame)
    }

    fn flush(&mut self) -> Result<Flushed> {
        self.inner.flush()
    }

    fn receive(&mut self, take: &mut dyn FnMut(Frame<'_>)) -> Result<usize> {
        let capture = &self.capture;
        self.inner.receive(&mut |frame| {
            capture.write(&frame);
            take(frame);
        })
    }

    fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        self.inner.wait_fd()
    }

    fn wakes_in(&self) -> Option<Duration> {
        self.inner.wakes_in()
    }

    fn always_seal(&mut self) {
        self.inner.always_seal();
    }

    fn counters(&self) -> Counters {
        self.inner.counters()
    }
}

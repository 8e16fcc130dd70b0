//! A packet capture of a link, with IP and UDP headers as on a network: for Wireshark.
//!
//! Packets are captured as on the wire, with the identification that their ICRC covers. Packets
//! that stay in memory carry no ICRC; the capture computes it for them. Packets longer than IP
//! allows (shared memory carries such) are omitted.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::path::Path as FilePath;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use parking_lot::Mutex;
use warpwire_proto::Instant;
use warpwire_proto::wire::icrc::IcrcPrefix;
use warpwire_proto::wire::ip::{IpRepr, UDP_LEN, UdpRepr};
use warpwire_proto::wire::packet::ICRC_LEN;
use warpwire_proto::wire::pcap;

use super::flows::FlowId;
use super::{
    Corruption, Counters, ExportTable, Flushed, Frame, Link, LinkPath, ReserveError, ShmPeer,
    SimdCrc32,
};
use crate::error::{Error, Result};

/// Write buffer in bytes.
const BUFFER: usize = 1 << 20;

/// A capture file. Clones write to the same file.
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
/// // File header, record header, IP, UDP, packet.
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
    written: u64,
    max_bytes: u64,
    /// Packets that did not fit.
    omitted: u64,
    /// The first error; nothing is written after it.
    failed: Option<std::io::Error>,
}

impl Capture {
    /// Creates a capture file; an existing file is overwritten.
    ///
    /// # Errors
    /// If the file cannot be created.
    pub fn create(path: &FilePath) -> Result<Self> {
        let name = path.display().to_string();
        let file = File::create(path)
            .map_err(|source| Error::os("create a capture", &source).on(name.clone()))?;
        Ok(Self::to(Box::new(file), name))
    }

    /// A capture to any writer, with a name for messages.
    pub fn to(file: Box<dyn Write + Send>, name: impl Into<String>) -> Self {
        let file = BufWriter::with_capacity(BUFFER, file);
        let name = name.into();
        let mut writer =
            Writer { file, name, written: 0, max_bytes: u64::MAX, omitted: 0, failed: None };
        writer.put(&[&pcap::file_header()]);
        Self { shared: Arc::new(Mutex::new(writer)) }
    }

    /// Limits the length of the file: packets that would exceed it are counted, and not written.
    ///
    /// ```
    /// use warpwire::link::{Capture, Hub, Link, Tap};
    /// let capture = Capture::to(Box::new(std::io::sink()), "sink").with_max_bytes(100);
    /// let hub = Hub::new();
    /// let mut one = Tap::new(hub.endpoint("10.0.0.1:4791".parse().unwrap())?, &capture);
    /// let flow = one.open("10.0.0.2:4791".parse().unwrap(), 0)?;
    /// for _ in 0..3 {
    ///     one.reserve(flow, 16).unwrap().fill(0);
    ///     one.commit();
    /// }
    /// // 24 bytes of file header and 60 of the first packet.
    /// assert_eq!(capture.omitted(), 2);
    /// # Ok::<(), warpwire::Error>(())
    /// ```
    #[must_use]
    pub fn with_max_bytes(self, max_bytes: u64) -> Self {
        self.shared.lock().max_bytes = max_bytes;
        self
    }

    /// Packets that were not written because of [`with_max_bytes`](Self::with_max_bytes).
    pub fn omitted(&self) -> u64 {
        self.shared.lock().omitted
    }

    /// Flushes the write buffer. Dropping the last clone does so too, but ignores errors.
    ///
    /// # Errors
    /// If any write failed, now or earlier: the capture ends at that point.
    pub fn finish(&self) -> Result<()> {
        let mut writer = self.shared.lock();
        if writer.failed.is_none() {
            writer.failed = writer.file.flush().err();
        }
        match &writer.failed {
            None => Ok(()),
            Some(source) => Err(Error::os("write a capture", source)
                .on(writer.name.clone())
                .fix("check whether the disk is full")),
        }
    }

    fn write(&self, frame: &Frame<'_>) {
        let mut headers = [0; 48];
        let Some(len) = headers_of(frame, &mut headers) else { return };
        let icrc = match frame.has_icrc {
            true => None,
            false => IcrcPrefix::new(frame.from, frame.to)
                .icrc::<SimdCrc32>(frame.identification, frame.bytes),
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
        let len: u64 = parts.iter().map(|part| part.len() as u64).sum();
        // Once full, it stays full: a shorter packet would leave a gap before it.
        if self.omitted > 0 || self.written.saturating_add(len) > self.max_bytes {
            self.omitted += 1;
            return;
        }
        if self.failed.is_none() {
            self.written += len;
            let mut written = parts.iter().map(|part| self.file.write_all(part));
            self.failed = written.find_map(std::result::Result::err);
        }
    }
}

/// Writes the IP and UDP headers that the packet has or would have; `None` if its length does not
/// fit into them.
fn headers_of(frame: &Frame<'_>, headers: &mut [u8; 48]) -> Option<usize> {
    let udp = UdpRepr {
        source_port: frame.from.port(),
        destination_port: frame.to.port(),
        payload_len: u16::try_from(frame.bytes.len()).ok()?,
    };
    let ip = IpRepr {
        source: frame.from.ip(),
        destination: frame.to.ip(),
        traffic_class: frame.traffic_class,
        hop_limit: frame.hop_limit,
        identification: frame.identification,
        payload_len: udp.payload_len.checked_add(UDP_LEN as u16)?,
    };
    let ip_len = ip.emit(headers);
    udp.emit(&mut headers[ip_len..]);
    Some(ip_len + UDP_LEN)
}

/// Wraps any link and captures its packets in both directions.
pub struct Tap<L: Link> {
    inner: L,
    capture: Capture,
}

impl<L: Link> Tap<L> {
    /// Captures the packets of `inner`.
    pub fn new(inner: L, capture: &Capture) -> Self {
        Self { inner, capture: capture.clone() }
    }

    /// Unwraps the link.
    pub fn into_inner(self) -> L {
        self.inner
    }
}

impl<L: Link> Link for Tap<L> {
    fn path(&self) -> LinkPath {
        let mut path = self.inner.path();
        path.why = format!("{}; captured in {}", path.why, self.capture.shared.lock().name);
        path
    }

    fn flow_path(&self, flow: FlowId) -> LinkPath {
        let mut path = self.inner.flow_path(flow);
        path.why = format!("{}; captured in {}", path.why, self.capture.shared.lock().name);
        path
    }

    fn local(&self) -> SocketAddr {
        self.inner.local()
    }

    fn max_packet(&self) -> usize {
        self.inner.max_packet()
    }

    fn max_packet_to(&self, flow: FlowId) -> usize {
        self.inner.max_packet_to(flow)
    }

    fn max_packet_on_host(&self) -> usize {
        self.inner.max_packet_on_host()
    }

    fn open(&mut self, peer: SocketAddr, label: u32) -> Result<FlowId> {
        self.inner.open(peer, label)
    }

    fn close(&mut self, flow: FlowId) {
        self.inner.close(flow);
    }

    fn reserve(
        &mut self,
        flow: FlowId,
        len: usize,
    ) -> std::result::Result<&mut [u8], ReserveError> {
        self.inner.reserve(flow, len)
    }

    fn commit_corrupted(&mut self, corruption: Corruption) -> Option<Frame<'_>> {
        let frame = self.inner.commit_corrupted(corruption)?;
        self.capture.write(&frame);
        Some(frame)
    }

    fn can_congest(&self, flow: FlowId) -> bool {
        self.inner.can_congest(flow)
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

    fn poll_delay(&self) -> Option<Duration> {
        self.inner.poll_delay()
    }

    fn force_icrc(&mut self) {
        self.inner.force_icrc();
    }

    /// Its packets go to the same capture.
    fn sibling(&self) -> Result<Box<dyn Link>> {
        Ok(Box::new(Tap::new(self.inner.sibling()?, &self.capture)))
    }

    /// Direct access would bypass the capture.
    fn install_exports(&mut self, _: &Arc<ExportTable>) -> std::result::Result<(), &'static str> {
        Err("a capture must see every packet")
    }

    fn direct_peer(&self, _: FlowId) -> std::result::Result<Arc<ShmPeer>, &'static str> {
        Err("a capture must see every packet")
    }

    fn counters(&self) -> Counters {
        self.inner.counters()
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use warpwire_proto::Psn;
    use warpwire_proto::wire::{Extension, Headers, Opcode, Packet};

    use super::*;
    use crate::link::{FaultInjector, Hub, Udp};

    fn put(link: &mut dyn Link, flow: FlowId, number: u32) {
        let headers = Headers::new(Opcode::SendOnly, 7, Psn::new(number), Extension::None);
        let packet = link.reserve(flow, headers.wire_len(50)).unwrap();
        let at = headers.emit(packet, 50).unwrap();
        packet[at..at + 50].fill(number as u8);
        link.commit();
    }

    /// The packets of a capture, from the IP header on.
    fn packets(capture: &[u8]) -> Vec<&[u8]> {
        let (header, mut rest) = capture.split_at(24);
        assert_eq!(header, pcap::file_header());
        let mut packets = Vec::new();
        while !rest.is_empty() {
            let len = u32::from_le_bytes(*rest[8..].first_chunk().unwrap()) as usize;
            packets.push(&rest[16..16 + len]);
            rest = &rest[16 + len..];
        }
        packets
    }

    /// Sends ten packets over a pair of links, with both ends captured.
    fn record(path: &FilePath, links: [Box<dyn Link>; 2]) {
        let capture = Capture::create(path).unwrap();
        let [mut one, mut two] = links.map(|link| Tap::new(link, &capture));
        let flow = one.open(two.local(), 0).unwrap();
        (0..10).for_each(|number| put(&mut one, flow, number));
        one.flush().unwrap();
        let mut left = 10;
        while left > 0 {
            left -= two.receive(&mut |_| ()).unwrap();
        }
        capture.finish().unwrap();
    }

    fn all_kinds() -> Vec<(&'static str, [Box<dyn Link>; 2])> {
        let hub = Hub::new();
        let end =
            |text: &str| Box::new(hub.endpoint(text.parse().unwrap()).unwrap()) as Box<dyn Link>;
        let mut kinds = vec![
            ("memory", [end("10.0.0.1:4791"), end("10.0.0.2:4791")]),
            ("memory6", [end("[fd00::1]:4791"), end("[fd00::2]:4791")]),
        ];
        for (name, address) in [("udp", "127.0.0.1:0"), ("udp6", "[::1]:0")] {
            let bind =
                || Udp::bind(address.parse().unwrap(), super::super::udp::UdpOptions::default());
            match (bind(), bind()) {
                (Ok(one), Ok(two)) => kinds.push((name, [Box::new(one), Box::new(two)])),
                _ => println!("skipped: {address} does not belong to this machine"),
            }
        }
        kinds
    }

    #[test]
    fn captured_packets_are_right_in_every_header() {
        let folder = tempfile::tempdir().unwrap();
        for (name, links) in all_kinds() {
            let path = folder.path().join(name);
            let ports = [links[0].local(), links[1].local()];
            record(&path, links);
            let bytes = std::fs::read(&path).unwrap();
            let packets = packets(&bytes);
            assert_eq!(packets.len(), 20, "{name}");
            for (at, packet) in packets.iter().enumerate() {
                let packet = Packet::new_checked(packet).unwrap();
                assert!(packet.has_valid_icrc::<SimdCrc32>(), "{name} {at}");
                assert_eq!(packet.transport().psn().value() as usize, at % 10, "{name}");
                assert_eq!(packet.ip().source, ports[0].ip(), "{name}");
                assert_eq!(packet.udp().destination_port, ports[1].port(), "{name}");
            }
        }
    }

    #[test]
    fn wireshark_dissects_captures() {
        let folder = tempfile::tempdir().unwrap();
        for (name, mut links) in all_kinds() {
            let path = folder.path().join(name);
            // Wireshark looks the lower port up first, and knows the protocols of many.
            links.sort_by_key(|link| std::cmp::Reverse(link.local().port()));
            let port = links[1].local().port();
            record(&path, links);
            let ran = Command::new("tshark")
                .args([
                    "-r",
                    &path.display().to_string(),
                    "-o",
                    &format!("infiniband.rroce.port:{port}"),
                ])
                .args(["-T", "fields", "-e", "infiniband.bth.psn", "-e", "_ws.malformed"])
                .output();
            let output = match ran {
                Ok(output) if output.status.success() => output,
                Ok(output) => panic!("tshark: {}", String::from_utf8_lossy(&output.stderr)),
                Err(why)
                    if std::env::var("WARPWIRE_REQUIRE")
                        .is_ok_and(|list| list.contains("tshark")) =>
                {
                    panic!("tshark is required: {why}")
                }
                Err(why) => return println!("skipped: tshark: {why}"),
            };
            let text = String::from_utf8_lossy(&output.stdout);
            let numbers: Vec<&str> = text.lines().map(str::trim).collect();
            let want: Vec<String> = (0..20).map(|at| (at % 10).to_string()).collect();
            assert_eq!(numbers, want, "{name}");
        }
    }

    #[test]
    fn corruption_shows_in_an_inner_capture() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("corrupted");
        let capture = Capture::create(&path).unwrap();
        let hub = Hub::new();
        let link = Tap::new(hub.endpoint("10.0.0.1:1".parse().unwrap()).unwrap(), &capture);
        let mut link = FaultInjector::new(link, "corrupt=100%".parse().unwrap());
        let flow = link.open("10.0.0.2:1".parse().unwrap(), 0).unwrap();
        // Corruption of the opcode may yield another kind of packet, or none; the ICRC is wrong in
        // any case.
        put(&mut link, flow, 1);
        capture.finish().unwrap();
        let bytes = std::fs::read(&path).unwrap();
        let packets = packets(&bytes);
        assert_eq!(packets.len(), 1);
        assert!(
            !Packet::new_checked(packets[0])
                .is_ok_and(|packet| packet.has_valid_icrc::<SimdCrc32>())
        );
    }

    #[test]
    fn a_write_error_is_reported() {
        let missing = Capture::create(FilePath::new("/nowhere/at/all.pcap")).err().unwrap();
        assert!(missing.to_string().contains("/nowhere/at/all.pcap"), "{missing}");
        let full = Capture::create(FilePath::new("/dev/full")).unwrap();
        let error = full.finish().unwrap_err();
        assert!(error.to_string().contains("/dev/full"), "{error}");
        assert!(full.finish().is_err(), "the error is sticky");
    }
}

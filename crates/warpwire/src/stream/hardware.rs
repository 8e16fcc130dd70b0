//! The queues of a ConnectX: their addresses according to rdma-core, their registration with a GPU,
//! and the stream operations on them.
//!
//! The operations are those on the software HCA's queues: the same words with the same values. Two
//! things differ. The doorbell is a register, in a page of the NIC that CUDA must be allowed to map
//! ([`Device::register_host`](crate::mem::Device::register_host)); and it must be rung, after the
//! doorbell record.

#![allow(unsafe_code)]

use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

use parking_lot::Mutex;

use super::doorbells::{CqeTails, CqeWait, DoorbellValues};
use super::{StreamQpParts, check_blocks};
use crate::error::{Error, Kind, Result};
use crate::hca::QueueMemory;
use crate::mem::{Allocation, Device, MemOp, WeakAllocation};
use crate::mlx5::{DoorbellRecord, WQEBB_LEN};
use crate::verbs::{Context, Cq, CqOptions, Pd, QpOptions};

/// Creates a queue pair of an mlx5 NIC whose queues streams of `device` can access.
pub(super) fn create_hardware_qp(
    context: &Context,
    pd: &Pd,
    device: &Device,
    wanted: QpOptions,
    entries: [u32; 2],
) -> Result<StreamQpParts> {
    let failed = |error: Error| error.during("create a stream queue pair");
    let make = |entries: u32| {
        // mlx5 allocates one entry more than requested and rounds up to a power of two.
        let options =
            CqOptions { entries: entries - 1, manual_release: true, ..CqOptions::default() };
        context.create_cq_with(options).map_err(failed)
    };
    let cqs = [make(entries[0])?, make(entries[1])?];
    let qp = context.create_qp(pd, &cqs[0], &cqs[1], wanted).map_err(failed)?;
    let queues = qp.direct_queues()?;
    check_blocks(queues.send_wqebbs.into(), device)?;
    let has_nor = device.capabilities().stream_wait_nor.is_yes();
    let tails = |cq: &Cq| {
        let (memory, begin) = map_pages(device, cq.mapped_memory()?, false)?;
        CqeTails::new((&memory, begin), cq.entries(), has_nor)
    };
    let tails = [tails(&cqs[0])?, tails(&cqs[1])?];
    let (dbrec, at) = map_pages(device, &queues.dbrec, false)?;
    let dbrec = dbrec.word32(at + DoorbellRecord::SEND as u64)?;
    let (page, at) = map_pages(device, &queues.doorbell, true)?;
    let doorbell = Some(page.word64(at)?);
    Ok(StreamQpParts { qp, cqs, tails, dbrec, doorbell })
}

/// Host pages registered with a device. The driver accepts each page once, so queue pairs share
/// them.
static MAPPED_PAGES: Mutex<Vec<MappedPages>> = Mutex::new(Vec::new());

struct MappedPages {
    device: Device,
    pages: Range<u64>,
    io: bool,
    memory: WeakAllocation,
}

/// Registers queues that a provider has mapped with a device, rounded to whole pages. Returns the
/// allocation and the offset of the queues in it. The queues live as long as any of these pages is
/// in use.
pub(super) fn map_pages(
    device: &Device,
    memory: &QueueMemory,
    io: bool,
) -> Result<(Allocation, u64)> {
    let (bytes, page) = (memory.bytes(), rustix::param::page_size() as u64);
    let (start, len) = (bytes.address(), bytes.len());
    let first = start - start % page;
    let pages = first..(start + len).next_multiple_of(page);
    let mut known = MAPPED_PAGES.lock();
    known.retain(|mapped| mapped.memory.upgrade().is_some());
    let holds = |mapped: &&MappedPages| {
        let inside = mapped.pages.start <= pages.start && pages.end <= mapped.pages.end;
        inside && mapped.io == io && mapped.device == *device
    };
    let shared = known.iter().find(holds);
    if let Some((memory, mapped)) = shared.and_then(|found| Some((found.memory.upgrade()?, found)))
    {
        return Ok((memory, start - mapped.pages.start));
    }
    let base = NonNull::new(std::ptr::with_exposed_provenance_mut(first as usize));
    let base = base.ok_or_else(|| Error::new(Kind::Malformed, "register a queue with a device"))?;
    let register = |io: bool| {
        let owner = Arc::new(memory.clone());
        // SAFETY: these are whole pages around queues that their provider has mapped and that the
        // owner keeps alive. They are shared with a device, so there are no references to them.
        // Only doorbell values are written to registers.
        unsafe { device.register_host(base, pages.end - pages.start, io, owner) }
    };
    // A software NIC has its doorbell in ordinary memory, which drivers reject as I/O memory.
    let memory = match register(io) {
        Err(why) if io => register(false).map_err(|_| why),
        registered => registered,
    }?;
    let (weak, device) = (memory.downgrade(), device.clone());
    known.push(MappedPages { device, pages, io, memory: weak });
    Ok((memory, start - first))
}

/// A queue pair as described by `mlx5dv_init_obj`: addresses in this process.
///
/// ```
/// use warpwire::stream::Mlx5Qp;
/// let mut image = [0; Mlx5Qp::IMAGE];
/// image[..8].copy_from_slice(&0x7f00_0000_1000_u64.to_le_bytes()); // the doorbell record
/// image[8..16].copy_from_slice(&0x7f00_0010_0000_u64.to_le_bytes()); // the send queue
/// image[16..20].copy_from_slice(&128_u32.to_le_bytes());
/// image[20..24].copy_from_slice(&64_u32.to_le_bytes());
/// image[40..48].copy_from_slice(&0x7f00_0020_0800_u64.to_le_bytes()); // the doorbell register
/// let qp = Mlx5Qp::parse(0x123, &image)?;
/// assert_eq!((qp.dbrec, qp.blocks), (0x7f00_0000_1000, 128));
/// assert_eq!(qp.doorbell_page(4096), (0x7f00_0020_0000, 0x800));
/// # Ok::<(), warpwire::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mlx5Qp {
    /// The queue pair number.
    pub qpn: u32,
    /// Address of the doorbell record.
    pub dbrec: u64,
    /// Address of the send queue.
    pub send: u64,
    /// Number of WQEBBs of the send queue.
    pub blocks: u32,
    /// Address of the doorbell register.
    pub doorbell: u64,
}

impl Mlx5Qp {
    /// Size of `struct mlx5dv_qp` in bytes.
    pub const IMAGE: usize = 96;

    /// Parses the structure; its words are little-endian.
    ///
    /// # Errors
    /// [`Kind::Malformed`] if it does not describe a send queue that a stream can drive.
    pub fn parse(qpn: u32, image: &[u8; Self::IMAGE]) -> Result<Self> {
        let wrong = |why: String| {
            Err(Error::new(Kind::Malformed, format!("use the queues of queue pair {qpn:#x}"))
                .why(why)
                .fix("fill the structure with mlx5dv_init_obj"))
        };
        let (blocks, stride) = (word32(image, 16), word32(image, 20));
        if !blocks.is_power_of_two() || stride as usize != WQEBB_LEN {
            return wrong(format!("its send queue has {blocks} blocks of {stride} bytes"));
        }
        let qp = Self {
            qpn,
            dbrec: word64(image, 0),
            send: word64(image, 8),
            blocks,
            doorbell: word64(image, 40),
        };
        if [qp.dbrec, qp.send, qp.doorbell].contains(&0) {
            return wrong("an address is null".to_owned());
        }
        if !qp.dbrec.is_multiple_of(8) || !qp.doorbell.is_multiple_of(8) {
            return wrong("the record or the doorbell is not aligned to 8 bytes".to_owned());
        }
        Ok(qp)
    }

    /// The address of the page with the doorbell register, which CUDA maps as I/O memory, and the
    /// register's offset in that page.
    pub fn doorbell_page(&self, page: u64) -> (u64, u64) {
        (self.doorbell - self.doorbell % page, self.doorbell % page)
    }

    /// The stream operations that ring the doorbell up to WQEBB index `producer`: the record first,
    /// then the register. `dbrec` is the memory that holds the record, and its offset there; `page`
    /// is the registered page, and the register's offset there.
    ///
    /// # Errors
    /// If the words are outside of that memory.
    pub fn ring(
        &self,
        (dbrec, record_offset): (&Allocation, u64),
        (page, register_offset): (&Allocation, u64),
        producer: u16,
    ) -> Result<[MemOp; 2]> {
        let values = DoorbellValues::next(self.qpn, producer);
        let word = dbrec.word32(record_offset + DoorbellRecord::SEND as u64)?;
        let register = page.word64(register_offset)?;
        Ok([
            MemOp::Write { word, value: values.dbrec.into() },
            MemOp::Write { word: register, value: values.doorbell },
        ])
    }
}

/// A completion queue as described by `mlx5dv_init_obj`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mlx5Cq {
    /// The completion queue number.
    pub cqn: u32,
    /// Address of the entries.
    pub buffer: u64,
    /// Number of entries, a power of two.
    pub entries: u32,
    /// Address of the doorbell record.
    pub dbrec: u64,
}

impl Mlx5Cq {
    /// Size of `struct mlx5dv_cq` in bytes.
    pub const IMAGE: usize = 48;

    /// Parses the structure; its words are little-endian.
    ///
    /// # Errors
    /// [`Kind::Malformed`] if the entries are not 64 bytes each, or an address is null.
    pub fn parse(image: &[u8; Self::IMAGE]) -> Result<Self> {
        let cq = Self {
            buffer: word64(image, 0),
            dbrec: word64(image, 8),
            entries: word32(image, 16),
            cqn: word32(image, 32),
        };
        let size = word32(image, 20);
        if !cq.entries.is_power_of_two() || size != 64 || cq.buffer == 0 || cq.dbrec == 0 {
            let why = format!("it has {} entries of {size} bytes", cq.entries);
            return Err(Error::new(
                Kind::Malformed,
                format!("wait for completion queue {}", cq.cqn),
            )
            .why(why)
            .fix(
                "create it with entries of 64 bytes and fill the structure with mlx5dv_init_obj",
            ));
        }
        Ok(cq)
    }

    /// The stream operation that waits for completion `number`; `memory` holds the queue's entries.
    pub fn wait(&self, memory: &Allocation, number: u64, has_nor: bool) -> Result<MemOp> {
        let CqeWait { offset, condition, value } =
            CqeWait::for_cqe(number, self.entries.into(), has_nor);
        Ok(MemOp::Wait { word: memory.word32(offset)?, condition, value: value.into() })
    }
}

fn word32(image: &[u8], at: usize) -> u32 {
    let bytes = image.get(at..).and_then(|rest| rest.first_chunk());
    bytes.map_or(0, |bytes| u32::from_le_bytes(*bytes))
}

fn word64(image: &[u8], at: usize) -> u64 {
    let bytes = image.get(at..).and_then(|rest| rest.first_chunk());
    bytes.map_or(0, |bytes| u64::from_le_bytes(*bytes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mem::Condition;
    use crate::mem::sim::{Sim, SimConfig};

    fn qp_image() -> [u8; Mlx5Qp::IMAGE] {
        let mut image = [0; Mlx5Qp::IMAGE];
        let mut put = |at: usize, bytes: &[u8]| image[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, &0x7f00_0000_1040_u64.to_le_bytes());
        put(8, &0x7f00_0010_0000_u64.to_le_bytes());
        put(16, &256_u32.to_le_bytes());
        put(20, &64_u32.to_le_bytes());
        put(40, &0x7f00_0020_0a00_u64.to_le_bytes());
        put(48, &256_u32.to_le_bytes());
        image
    }

    /// Recorded: a fetch-and-add at WQEBB 6 of queue pair 0x123. The doorbell record holds 7, the
    /// doorbell register 00000700 00012300.
    #[test]
    fn doorbell_ops_match_recorded_values() {
        let gpu = Sim::start(SimConfig::default()).unwrap().device(0).unwrap();
        let qp = Mlx5Qp::parse(0x123, &qp_image()).unwrap();
        assert_eq!((qp.blocks, qp.send), (256, 0x7f00_0010_0000));
        assert_eq!(qp.doorbell_page(4096), (0x7f00_0020_0000, 0xa00));
        let (host, page) = (gpu.alloc_pinned(4096).unwrap(), gpu.alloc_pinned(4096).unwrap());
        for memory in [&host, &page] {
            memory.write(0, &[0; 4096]).unwrap();
        }
        let ops = qp.ring((&host, 0x40), (&page, 0xa00), 7).unwrap();
        let stream = gpu.stream().unwrap();
        stream.batch(&ops).unwrap();
        stream.synchronize(std::time::Duration::from_secs(5)).unwrap();
        let (mut dbrec, mut register) = ([0; 8], [0; 8]);
        host.read(0x40, &mut dbrec).unwrap();
        page.read(0xa00, &mut register).unwrap();
        assert_eq!(dbrec, [0, 0, 0, 0, 0, 0, 0, 7]);
        assert_eq!(register, [0, 0, 7, 0, 0, 1, 0x23, 0]);
        assert!(
            matches!(&ops[0], MemOp::Write { word, .. } if word.address() == host.word32(0x44).unwrap().address())
        );
        assert!(qp.ring((&host, 4096), (&page, 0), 7).is_err());
    }

    #[test]
    fn cqe_wait_matches_recorded_values() {
        let gpu = Sim::start(SimConfig::default()).unwrap().device(0).unwrap();
        let memory = gpu.alloc_pinned(256 * 64).unwrap();
        let mut image = [0; Mlx5Cq::IMAGE];
        image[..8].copy_from_slice(&0x7f00_0030_0000_u64.to_le_bytes());
        image[8..16].copy_from_slice(&0x7f00_0000_1080_u64.to_le_bytes());
        image[16..20].copy_from_slice(&256_u32.to_le_bytes());
        image[20..24].copy_from_slice(&64_u32.to_le_bytes());
        image[32..36].copy_from_slice(&9_u32.to_le_bytes());
        let cq = Mlx5Cq::parse(&image).unwrap();
        assert_eq!((cq.cqn, cq.entries), (9, 256));
        for (number, wanted) in [(3, Condition::Nor), (259, Condition::And), (515, Condition::Nor)]
        {
            let MemOp::Wait { word, condition, value } = cq.wait(&memory, number, true).unwrap()
            else {
                panic!("not a wait")
            };
            assert_eq!(word.region().offset(), 3 * 64 + 60);
            assert_eq!(condition, wanted);
            assert_eq!(value, if wanted == Condition::And { 0x0100_0000 } else { 0xfeff_ffff });
        }
        image[20] = 128;
        assert!(Mlx5Cq::parse(&image).unwrap_err().to_string().contains("128 bytes"));
    }

    #[test]
    fn invalid_qp_images_are_rejected() {
        for (at, bytes, named) in [
            (16, [3, 0, 0, 0, 64, 0, 0, 0], "3 blocks"),
            (16, [0, 1, 0, 0, 32, 0, 0, 0], "32 bytes"),
            (0, [0; 8], "null"),
            (40, [0; 8], "null"),
            (40, [4, 0, 0, 0, 1, 0, 0, 0], "aligned"),
        ] {
            let mut image = qp_image();
            image[at..at + 8].copy_from_slice(&bytes);
            let error = Mlx5Qp::parse(1, &image).unwrap_err();
            assert!(error.to_string().contains(named), "{error}");
        }
    }
}

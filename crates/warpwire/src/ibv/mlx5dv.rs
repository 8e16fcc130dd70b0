//! Direct verbs of mlx5 devices: the memory of their queues, by libmlx5's `mlx5dv_init_obj`.
//!
//! The library returns plain structures with pointers: to rings in this process's memory, to a
//! doorbell record, and to a UAR page of the device. They are checked here and become a
//! [`DirectQp`] or a [`DirectCq`], in the ConnectX formats of [`mlx5`](crate::mlx5), which the
//! software HCA shares.

use std::any::Any;
use std::ffi::c_int;
use std::ptr::NonNull;
use std::sync::{Arc, OnceLock};

use super::cq::Cq;
use super::device::ContextInner;
use super::memory::PdInner;
use super::qp::Qp;
use super::sys;
use crate::error::{Error, Kind, Result};
use crate::mlx5::{MAX_SEND_WQEBBS, WQEBB_LEN};

const LIBRARY: &str = "libmlx5.so.1";
/// Environment variable with another file to load.
const ENV_VAR: &str = "WARPWIRE_MLX5";
const SYMBOL: &str = "mlx5dv_init_obj";
const INSTALL_HINT: &str = "install the mlx5 provider of rdma-core (Debian, Ubuntu: \
     `sudo apt install ibverbs-providers`; Fedora, RHEL: `sudo dnf install libibverbs`)";

/// `struct mlx5dv_qp`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct DvQp {
    dbrec: *mut u8,
    sq: DvRing,
    rq: DvRing,
    bf_reg: *mut u8,
    bf_size: u32,
    comp_mask: u64,
    uar_mmap_offset: i64,
    tirn: u32,
    tisn: u32,
    rqn: u32,
    sqn: u32,
    tir_icm_addr: u64,
}

#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct DvRing {
    buf: *mut u8,
    wqe_cnt: u32,
    stride: u32,
}

/// `struct mlx5dv_cq`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct DvCq {
    buf: *mut u8,
    dbrec: *mut u8,
    cqe_cnt: u32,
    cqe_size: u32,
    cq_uar: *mut u8,
    cqn: u32,
    comp_mask: u64,
}

/// `struct mlx5dv_obj`: for each object type, the input object and the output structure.
#[repr(C)]
struct DvObject {
    qp: (*mut sys::Qp, *mut DvQp),
    cq: (*mut sys::Cq, *mut DvCq),
    /// SRQs, work queues, device memory, address handles, PDs.
    others: [*mut u8; 10],
}

const _: () = {
    assert!(size_of::<DvQp>() == 96 && size_of::<DvCq>() == 48 && size_of::<DvObject>() == 112);
    assert!(std::mem::offset_of!(DvQp, sq) == 8 && std::mem::offset_of!(DvQp, rq) == 24);
    assert!(
        std::mem::offset_of!(DvQp, bf_reg) == 40 && std::mem::offset_of!(DvQp, comp_mask) == 56
    );
    assert!(std::mem::offset_of!(DvQp, sqn) == 84);
    assert!(std::mem::offset_of!(DvCq, cqe_cnt) == 16 && std::mem::offset_of!(DvCq, cqn) == 32);
    assert!(std::mem::offset_of!(DvObject, cq) == 16);
};

const OBJECT_QP: u64 = 1;
const OBJECT_CQ: u64 = 2;

type InitObject = unsafe extern "C" fn(*mut DvObject, u64) -> c_int;

/// A range of this process's address space that a device accesses too.
#[derive(Clone)]
pub struct MappedRange {
    base: NonNull<u8>,
    len: usize,
    /// Keeps the range mapped.
    _owner: Arc<dyn Any + Send + Sync>,
}

// SAFETY: shared memory; all accesses to it are atomic or volatile.
unsafe impl Send for MappedRange {}
// SAFETY: as above.
unsafe impl Sync for MappedRange {}

impl std::fmt::Debug for MappedRange {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "MappedRange({} bytes at {:p})", self.len, self.base)
    }
}

impl MappedRange {
    fn new(
        base: *mut u8,
        len: u64,
        what: &str,
        owner: &Arc<dyn Any + Send + Sync>,
    ) -> Result<Self> {
        let base =
            NonNull::new(base).ok_or_else(|| unexpected_layout(format!("{what} is null")))?;
        if base.addr().get() % 8 != 0 {
            return Err(unexpected_layout(format!("{what} at {base:p} is not aligned")));
        }
        Ok(Self { base, len: len as usize, _owner: owner.clone() })
    }

    /// Address of the first byte; aligned to 8 bytes.
    pub fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// Length in bytes; never 0.
    #[allow(clippy::len_without_is_empty)] // never empty
    pub fn len(&self) -> u64 {
        self.len as u64
    }
}

/// Mapped queues of a queue pair.
#[derive(Clone, Debug)]
pub struct DirectQp {
    /// Queue pair number, 24 bits.
    pub number: u32,
    /// The send queue's memory.
    pub send: MappedRange,
    /// Length of the send queue in WQEBBs of 64 bytes, a power of two.
    pub send_wqebbs: u32,
    /// The receive queue's memory; `None` with an SRQ.
    pub receive: Option<MappedRange>,
    /// Length of the receive queue in entries, a power of two; 0 if there is none.
    pub receive_entries: u32,
    /// Size of a receive queue entry in bytes, a power of two.
    pub receive_stride: u32,
    /// The doorbell record: two words, of the receive and of the send queue.
    pub dbrec: MappedRange,
    /// The doorbell register, in a UAR page of the device.
    pub doorbell: MappedRange,
}

/// Mapped completion queue.
#[derive(Clone, Debug)]
pub struct DirectCq {
    /// The queue's number in hardware (CQN), not the handle that [`Cq::number`] returns.
    pub number: u32,
    /// The entries' memory, 64 bytes each.
    pub entries: MappedRange,
    /// Number of entries, a power of two.
    pub count: u32,
    /// The doorbell record: two words, consumer index and arming.
    pub dbrec: MappedRange,
}

#[cold]
fn unexpected_layout(why: String) -> Error {
    Error::new(Kind::Unsupported, "map the queues of an mlx5 device")
        .why(format!("unexpected data from libmlx5: {why}"))
        .fix("post through libibverbs instead, and report the rdma-core release")
}

impl DirectQp {
    fn of(dv: &DvQp, number: u32, owner: &Arc<dyn Any + Send + Sync>) -> Result<Self> {
        let wqebbs = dv.sq.wqe_cnt;
        if dv.sq.stride as usize != WQEBB_LEN
            || !wqebbs.is_power_of_two()
            || wqebbs > MAX_SEND_WQEBBS
        {
            let why = format!("a send queue of {wqebbs} times {} bytes", dv.sq.stride);
            return Err(unexpected_layout(why));
        }
        let (entries, stride) = (dv.rq.wqe_cnt, dv.rq.stride);
        let receive = match entries {
            0 => None,
            _ if !entries.is_power_of_two() || !stride.is_power_of_two() || stride < 16 => {
                return Err(unexpected_layout(format!(
                    "a receive queue of {entries} times {stride} bytes"
                )));
            }
            _ => {
                let len = u64::from(entries) * u64::from(stride);
                Some(MappedRange::new(dv.rq.buf, len, "the receive queue", owner)?)
            }
        };
        // Size 0: no BlueFlame, only plain 8-byte doorbells at one address.
        let doorbell = if dv.bf_size == 0 { 8 } else { u64::from(dv.bf_size) + 8 };
        Ok(Self {
            number,
            send: MappedRange::new(
                dv.sq.buf,
                u64::from(wqebbs) * WQEBB_LEN as u64,
                "the send queue",
                owner,
            )?,
            send_wqebbs: wqebbs,
            receive,
            receive_entries: entries,
            receive_stride: stride,
            dbrec: MappedRange::new(dv.dbrec, 8, "the doorbell record", owner)?,
            doorbell: MappedRange::new(dv.bf_reg, doorbell, "the doorbell", owner)?,
        })
    }
}

impl DirectCq {
    fn of(dv: &DvCq, owner: &Arc<dyn Any + Send + Sync>) -> Result<Self> {
        let (count, size) = (dv.cqe_cnt, dv.cqe_size);
        if size != 64 || !count.is_power_of_two() {
            return Err(unexpected_layout(format!(
                "a completion queue of {count} times {size} bytes"
            )));
        }
        Ok(Self {
            number: dv.cqn,
            entries: MappedRange::new(
                dv.buf,
                u64::from(count) * 64,
                "the completion queue",
                owner,
            )?,
            count,
            dbrec: MappedRange::new(dv.dbrec, 8, "the completion queue's doorbell record", owner)?,
        })
    }
}

impl Qp {
    /// Maps the queues, for a caller that posts directly. Nothing may be posted in any other way
    /// from then on.
    ///
    /// # Errors
    /// [`Kind::Unsupported`] if the device is not mlx5; [`Kind::Unavailable`] if libmlx5 is not
    /// installed.
    pub fn mlx5dv(&self) -> Result<DirectQp> {
        let context = self.pd().context();
        check_device(&context.0)?;
        // SAFETY: plain numbers and pointers, which may be zero.
        let (mut object, mut dv): (DvObject, DvQp) = unsafe { std::mem::zeroed() };
        object.qp = (self.raw(), &mut dv);
        // SAFETY: a live object of the library, and a local structure for the result.
        check(unsafe { (library()?.init)(&mut object, OBJECT_QP) })?;
        DirectQp::of(&dv, self.number(), &(Arc::new(self.clone()) as _))
    }
}

impl Cq {
    /// Maps the queue, for a caller that reads it directly. [`Cq::poll`] must not be called from
    /// then on.
    ///
    /// # Errors
    /// As for [`Qp::mlx5dv`].
    pub fn mlx5dv(&self) -> Result<DirectCq> {
        check_device(self.context())?;
        // SAFETY: plain numbers and pointers, which may be zero.
        let (mut object, mut dv): (DvObject, DvCq) = unsafe { std::mem::zeroed() };
        object.cq = (self.0.raw.ptr(), &mut dv);
        // SAFETY: a live object of the library, and a local structure for the result.
        check(unsafe { (library()?.init)(&mut object, OBJECT_CQ) })?;
        DirectCq::of(&dv, &(Arc::new(self.clone()) as _))
    }
}

fn check(code: c_int) -> Result<()> {
    match code {
        0 => Ok(()),
        code => Err(unexpected_layout(format!("error {code}"))),
    }
}

/// libmlx5 must not be given objects of other drivers. If the kernel does not report the driver,
/// the library is asked.
fn check_device(context: &ContextInner) -> Result<()> {
    let device = &context.device;
    if device.driver.is_none() {
        let is_supported = library()?.is_supported;
        // SAFETY: an open device, whose list entry lives as long as it.
        if unsafe { is_supported((*context.raw.ptr()).device) } {
            return Ok(());
        }
    }
    check_driver(device.driver.as_deref(), &device.name)
}

fn check_driver(driver: Option<&str>, name: &str) -> Result<()> {
    match driver {
        Some("mlx5" | "mlx5_core") => Ok(()),
        driver => Err(Error::new(Kind::Unsupported, "map the queues of an RDMA device")
            .on(name.to_owned())
            .why(format!(
                "no direct verbs: its driver is {}, not mlx5",
                driver.unwrap_or("unknown")
            ))
            .fix(
                "use a ConnectX NIC, or the software HCA, which has the same queues; or post from \
                 the CPU through libibverbs",
            )),
    }
}

/// `struct ibv_cq_init_attr_ex`.
#[repr(C)]
struct CqInit {
    cqe: u32,
    cq_context: *mut u8,
    channel: *mut sys::CompChannel,
    comp_vector: u32,
    wc_flags: u64,
    comp_mask: u32,
    flags: u32,
    parent_domain: *mut sys::Pd,
}

/// `struct mlx5dv_cq_init_attr`.
#[derive(Default)]
#[repr(C)]
struct DvCqInit {
    comp_mask: u64,
    compression: u8,
    flags: u32,
    cqe_size: u16,
}

const _: () = assert!(size_of::<CqInit>() == 56 && size_of::<DvCqInit>() == 24);

const HAS_FLAGS: u32 = 1;
const IGNORE_OVERRUN: u32 = 1 << 1;

/// Creates a completion queue that overwrites unread entries when it is full; null, with `errno`
/// set, on failure.
pub(super) fn mlx5dv_create_cq(
    context: &ContextInner,
    entries: u32,
    channel: *mut sys::CompChannel,
) -> Result<*mut sys::Cq> {
    check_device(context)?;
    let create = library()?.create_cq;
    let mut init = CqInit {
        cqe: entries,
        cq_context: std::ptr::null_mut(),
        channel,
        comp_vector: 0,
        wc_flags: 0,
        comp_mask: HAS_FLAGS,
        flags: IGNORE_OVERRUN,
        parent_domain: std::ptr::null_mut(),
    };
    // SAFETY: an open device, and structures that live until the call returns. The extended CQ
    // that it returns starts with an ordinary one.
    Ok(unsafe { create(context.raw.ptr(), &mut init, &mut DvCqInit::default()) })
}

/// `struct ibv_qp_init_attr_ex`.
#[repr(C)]
struct QpInit {
    qp_context: *mut u8,
    send_cq: *mut sys::Cq,
    recv_cq: *mut sys::Cq,
    srq: *mut sys::Srq,
    cap: sys::QpCap,
    qp_type: c_int,
    sq_sig_all: c_int,
    comp_mask: u32,
    pd: *mut sys::Pd,
    /// Fields that are not used.
    others: [u64; 8],
}

/// `struct mlx5dv_qp_init_attr`, with room for fields of later releases.
#[repr(C)]
struct DvQpInit {
    comp_mask: u64,
    create_flags: u32,
    others: [u64; 14],
}

const _: () = {
    assert!(size_of::<QpInit>() == 136 && std::mem::offset_of!(QpInit, comp_mask) == 60);
    assert!(std::mem::offset_of!(DvQpInit, create_flags) == 8);
};

const HAS_PD: u32 = 1;
const HAS_CREATE_FLAGS: u64 = 1;
const DISABLE_SCATTER_TO_CQE: u32 = 1 << 3;

/// Creates a queue pair for direct verbs, without scatter-to-CQE: a direct poller would not look
/// for small messages inside CQEs. Null, with `errno` set, on failure.
pub(super) fn mlx5dv_create_qp(pd: &PdInner, init: &mut sys::QpInitAttr) -> Result<*mut sys::Qp> {
    check_device(&pd.context)?;
    let create = library()?.create_qp;
    let mut whole = QpInit {
        qp_context: std::ptr::null_mut(),
        send_cq: init.send_cq,
        recv_cq: init.recv_cq,
        srq: init.srq,
        cap: init.cap,
        qp_type: init.qp_type,
        sq_sig_all: init.sq_sig_all,
        comp_mask: HAS_PD,
        pd: pd.raw.ptr(),
        others: [0; 8],
    };
    let mut dv = DvQpInit {
        comp_mask: HAS_CREATE_FLAGS,
        create_flags: DISABLE_SCATTER_TO_CQE,
        others: [0; 14],
    };
    // SAFETY: an open device with live objects, and structures that live until the call returns.
    let made = unsafe { create(pd.context.raw.ptr(), &mut whole, &mut dv) };
    init.cap = whole.cap;
    Ok(made)
}

type CreateQp = unsafe extern "C" fn(*mut sys::Context, *mut QpInit, *mut DvQpInit) -> *mut sys::Qp;
type IsSupported = unsafe extern "C" fn(*mut sys::IbvDevice) -> bool;
type CreateCq = unsafe extern "C" fn(*mut sys::Context, *mut CqInit, *mut DvCqInit) -> *mut sys::Cq;

/// The symbols of libmlx5 that are used.
struct Mlx5 {
    init: InitObject,
    is_supported: IsSupported,
    create_cq: CreateCq,
    create_qp: CreateQp,
    _library: libloading::Library,
}

fn library() -> Result<&'static Mlx5> {
    static LOADED: OnceLock<Result<Mlx5>> = OnceLock::new();
    let load = || match std::env::var(ENV_VAR) {
        Ok(name) if !name.is_empty() => load(&name),
        _ => load(LIBRARY),
    };
    LOADED.get_or_init(load).as_ref().map_err(Clone::clone)
}

fn load(name: &str) -> Result<Mlx5> {
    let failed = |why: String| {
        Error::new(Kind::Unavailable, "map the queues of an mlx5 device").why(why).fix(INSTALL_HINT)
    };
    // SAFETY: loading the library runs its initialisers, which have no preconditions.
    let library = unsafe { libloading::Library::new(name) };
    let library = library.map_err(|_| failed(format!("{name} is not installed")))?;
    let missing = |symbol: &str| failed(format!("{name} has no symbol {symbol}"));
    // SAFETY: the signatures are those of infiniband/mlx5dv.h.
    unsafe {
        let init = *library.get::<InitObject>(SYMBOL.as_bytes()).map_err(|_| missing(SYMBOL))?;
        let symbol = "mlx5dv_is_supported";
        let is_supported = *library.get(symbol.as_bytes()).map_err(|_| missing(symbol))?;
        let symbol = "mlx5dv_create_cq";
        let create_cq = *library.get(symbol.as_bytes()).map_err(|_| missing(symbol))?;
        let symbol = "mlx5dv_create_qp";
        let create_qp = *library.get(symbol.as_bytes()).map_err(|_| missing(symbol))?;
        Ok(Mlx5 { init, is_supported, create_cq, create_qp, _library: library })
    }
}

/// A queue pair from a recorded `mlx5dv_qp`, in memory of the caller: for tests without hardware.
///
/// # Safety
/// `image` is a `struct mlx5dv_qp` whose pointers lead to memory that `owner` keeps alive.
#[doc(hidden)]
pub unsafe fn recorded_qp(
    image: &[u8; 96],
    number: u32,
    owner: Arc<dyn Any + Send + Sync>,
) -> Result<DirectQp> {
    // SAFETY: the image has the structure's size, and any bytes are valid; the caller guarantees
    // the pointers.
    let dv = unsafe { image.as_ptr().cast::<DvQp>().read_unaligned() };
    DirectQp::of(&dv, number, &owner)
}

/// A completion queue from a recorded `mlx5dv_cq`.
///
/// # Safety
/// As for [`recorded_qp`], with a `struct mlx5dv_cq`.
#[doc(hidden)]
pub unsafe fn recorded_cq(image: &[u8; 48], owner: Arc<dyn Any + Send + Sync>) -> Result<DirectCq> {
    // SAFETY: as above.
    let dv = unsafe { image.as_ptr().cast::<DvCq>().read_unaligned() };
    DirectCq::of(&dv, &owner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_drivers_and_missing_libraries_are_reported() {
        assert!(check_driver(Some("mlx5"), "mlx5_0").is_ok());
        let text = check_driver(Some("rxe"), "rxe0").unwrap_err().to_string();
        assert!(text.contains("its driver is rxe") && text.contains("software HCA"), "{text}");
        assert!(check_driver(None, "x").unwrap_err().to_string().contains("unknown"));
        let text = load("libmlx5-that-is-not-there.so.1").err().unwrap().to_string();
        assert!(text.contains("not installed") && text.contains("ibverbs-providers"), "{text}");
        let text = load("libc.so.6").err().unwrap().to_string();
        assert!(text.contains("no symbol mlx5dv_init_obj"), "{text}");
    }

    #[test]
    fn the_installed_library_has_the_symbols() {
        match load(LIBRARY) {
            Ok(_) => {}
            Err(error) if error.reason().contains("not installed") => {
                eprintln!("skipped: {error}");
            }
            Err(error) => panic!("{error}"),
        }
    }

    #[test]
    fn structures_match_the_header() {
        const HEADER: &str = "/usr/include/infiniband/mlx5dv.h";
        if !std::path::Path::new(HEADER).exists() {
            eprintln!("skipped: no {HEADER} (Debian: libibverbs-dev)");
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let [source, binary] = ["layout.c", "layout"].map(|name| folder.path().join(name));
        let text = "#include <stddef.h>\n#include <stdio.h>\n#include <infiniband/mlx5dv.h>\nint main(void) {\n\
            printf(\"%zu %zu %zu \", sizeof(struct mlx5dv_qp), sizeof(struct mlx5dv_cq), sizeof(struct mlx5dv_obj));\n\
            printf(\"%zu %zu %zu %zu \", offsetof(struct mlx5dv_qp, sq), offsetof(struct mlx5dv_qp, rq),\n\
            offsetof(struct mlx5dv_qp, bf), offsetof(struct mlx5dv_qp, sqn));\n\
            printf(\"%zu %zu %zu \", offsetof(struct mlx5dv_cq, dbrec), offsetof(struct mlx5dv_cq, cqe_size), offsetof(struct mlx5dv_cq, cqn));\n\
            printf(\"%zu %d %d \", offsetof(struct mlx5dv_obj, cq), MLX5DV_OBJ_QP, MLX5DV_OBJ_CQ);\n\
            printf(\"%zu %zu \", sizeof(struct ibv_cq_init_attr_ex), sizeof(struct mlx5dv_cq_init_attr));\n\
            printf(\"%zu %d %d\", offsetof(struct ibv_cq_init_attr_ex, flags), IBV_CQ_INIT_ATTR_MASK_FLAGS, IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN);\n\
            printf(\" %zu %zu %d\", sizeof(struct ibv_qp_init_attr_ex), offsetof(struct ibv_qp_init_attr_ex, comp_mask), IBV_QP_INIT_ATTR_PD);\n\
            printf(\" %zu %d %d\", offsetof(struct mlx5dv_qp_init_attr, create_flags), MLX5DV_QP_INIT_ATTR_MASK_QP_CREATE_FLAGS, MLX5DV_QP_CREATE_DISABLE_SCATTER_TO_CQE);\n\
            return 0; }\n";
        std::fs::write(&source, text).unwrap();
        let Ok(compiled) =
            std::process::Command::new("cc").arg(&source).arg("-o").arg(&binary).output()
        else {
            eprintln!("skipped: no C compiler");
            return;
        };
        assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
        let output = std::process::Command::new(&binary).output().unwrap();
        let output = String::from_utf8(output.stdout).unwrap();
        assert_eq!(output, "96 48 112 8 24 40 84 8 20 32 16 1 2 56 24 44 1 2 136 60 1 8 1 8");
    }

    #[test]
    fn inconsistent_mlx5dv_data_is_rejected() {
        let owner: Arc<dyn Any + Send + Sync> = Arc::new(());
        let address = std::ptr::without_provenance_mut::<u8>(4096);
        let ring = |wqe_cnt, stride| DvRing { buf: address, wqe_cnt, stride };
        // SAFETY: plain numbers and pointers, which may be zero.
        let empty: DvQp = unsafe { std::mem::zeroed() };
        let good =
            DvQp { dbrec: address, sq: ring(64, 64), rq: ring(16, 32), bf_reg: address, ..empty };
        let refused = |dv: DvQp| DirectQp::of(&dv, 7, &owner).unwrap_err().to_string();
        assert_eq!(DirectQp::of(&good, 7, &owner).unwrap().doorbell.len(), 8);
        assert!(refused(DvQp { sq: ring(64, 128), ..good }).contains("64 times 128"));
        assert!(refused(DvQp { sq: ring(63, 64), ..good }).contains("63 times 64"));
        assert!(refused(DvQp { sq: ring(1 << 16, 64), ..good }).contains("65536"));
        assert!(refused(DvQp { rq: ring(3, 32), ..good }).contains("receive queue of 3"));
        assert!(refused(DvQp { dbrec: std::ptr::null_mut(), ..good }).contains("record is null"));
        assert!(refused(DvQp { bf_reg: address.wrapping_add(4), ..good }).contains("not aligned"));
        // With an SRQ there is no receive queue.
        let shared = DirectQp::of(&DvQp { rq: ring(0, 0), ..good }, 7, &owner).unwrap();
        assert!(shared.receive.is_none());
        // SAFETY: as above.
        let empty: DvCq = unsafe { std::mem::zeroed() };
        let good =
            DvCq { buf: address, dbrec: address, cqe_cnt: 64, cqe_size: 64, cqn: 9, ..empty };
        assert_eq!(DirectCq::of(&good, &owner).unwrap().number, 9);
        assert!(DirectCq::of(&DvCq { cqe_size: 128, ..good }, &owner).is_err());
    }
}

//! The mappings of this process: whether an address range is mapped, and whether it is still backed
//! by the same file.
#![allow(unsafe_code)]

use std::fs::File;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{BufRead, BufReader};
use std::ops::ControlFlow;
use std::os::fd::AsRawFd;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Mapping {
    pub(super) start: u64,
    pub(super) end: u64,
    pub(super) readable: bool,
    pub(super) writable: bool,
    /// Offset in the mapped file; with `device` and `inode`, zero for anonymous memory.
    offset: u64,
    device: u64,
    inode: u64,
}

/// Why a range cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RangeError {
    /// Nothing is mapped at this address.
    Unmapped(u64),
    /// The address is mapped without read permission, for example reserved for a device.
    Unreadable(u64),
    /// `/proc/self/maps` cannot be read.
    Unknown,
    /// `/proc/self/maps` cannot be opened now: too many open files, or out of memory.
    Transient,
}

impl std::fmt::Display for RangeError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Unmapped(at) => write!(f, "nothing is mapped at {at:#x}"),
            Self::Unreadable(at) => write!(f, "{at:#x} is reserved, and not readable by the CPU"),
            Self::Unknown => f.write_str("/proc/self/maps cannot be read"),
            Self::Transient => f.write_str("/proc/self/maps cannot be opened at the moment"),
        }
    }
}

/// A range that is mapped and readable throughout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Range {
    pub(super) writable: bool,
    /// Hash of the mapped files and offsets: changes when another file, or another part of one, is
    /// mapped there.
    pub(super) identity: u64,
}

/// Looks up a range. `len` is not zero, and `address + len` does not overflow.
pub(super) fn query_range(address: u64, len: u64) -> Result<Range, RangeError> {
    let end = address + len;
    let mut at = address;
    let mut writable = true;
    let mut identity = DefaultHasher::new();
    let mut range_error = RangeError::Unmapped(address);
    for_each_from(address, |mapping| {
        if mapping.start > at {
            range_error = RangeError::Unmapped(at);
            return ControlFlow::Break(());
        }
        if !mapping.readable {
            range_error = RangeError::Unreadable(at);
            return ControlFlow::Break(());
        }
        writable &= mapping.writable;
        // The kernel merges and splits adjacent anonymous mappings without a change of contents, so
        // only file mappings are part of the identity.
        if mapping.inode != 0 {
            let file_position = mapping.offset.wrapping_sub(mapping.start);
            (mapping.device, mapping.inode, file_position).hash(&mut identity);
        }
        at = mapping.end;
        range_error = RangeError::Unmapped(at);
        if at >= end { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    })?;
    if at < end {
        return Err(range_error);
    }
    Ok(Range { writable, identity: identity.finish() })
}

/// Calls `visit` for the mappings that end above `address`, in ascending order.
fn for_each_from(
    address: u64,
    mut visit: impl FnMut(Mapping) -> ControlFlow<()>,
) -> Result<(), RangeError> {
    let file = File::open("/proc/self/maps").map_err(|error| match error.raw_os_error() {
        Some(libc::EMFILE | libc::ENFILE | libc::ENOMEM) => RangeError::Transient,
        _ => RangeError::Unknown,
    })?;
    let mut at = address;
    match query(&file, at) {
        QueryResult::Unsupported => for_each_line(file, address, visit).ok_or(RangeError::Unknown),
        mut result => loop {
            match result {
                QueryResult::Found(mapping) => {
                    if visit(mapping).is_break() {
                        return Ok(());
                    }
                    at = mapping.end;
                }
                QueryResult::NotFound | QueryResult::Unsupported => return Ok(()),
            }
            result = query(&file, at);
        },
    }
}

enum QueryResult {
    Found(Mapping),
    NotFound,
    Unsupported,
}

/// The kernel's `struct procmap_query` (Linux 6.11).
#[repr(C)]
#[derive(Default)]
struct Query {
    size: u64,
    flags: u64,
    address: u64,
    start: u64,
    end: u64,
    permissions: u64,
    page_size: u64,
    offset: u64,
    inode: u64,
    major: u32,
    minor: u32,
    name_size: u32,
    build_id_size: u32,
    name: u64,
    build_id: u64,
}

const _: () = assert!(size_of::<Query>() == 104);

/// `_IOWR('f', 17, struct procmap_query)`.
const PROCMAP_QUERY: libc::c_ulong = 3 << 30 | 104 << 16 | (b'f' as libc::c_ulong) << 8 | 17;
const COVERING_OR_NEXT: u64 = 0x10;
const READABLE: u64 = 1;
const WRITABLE: u64 = 2;

/// The mapping that contains `address`, or the next one above it.
fn query(file: &File, address: u64) -> QueryResult {
    let mut request = Query { size: 104, flags: COVERING_OR_NEXT, address, ..Query::default() };
    // SAFETY: the kernel reads and writes this structure, whose size is asserted, and no other
    // memory, since no name or build id is requested.
    let done = unsafe { libc::ioctl(file.as_raw_fd(), PROCMAP_QUERY, &mut request) };
    if done == 0 {
        return QueryResult::Found(Mapping {
            start: request.start,
            end: request.end,
            readable: request.permissions & READABLE != 0,
            writable: request.permissions & WRITABLE != 0,
            offset: request.offset,
            device: u64::from(request.major) << 32 | u64::from(request.minor),
            inode: request.inode,
        });
    }
    match std::io::Error::last_os_error().raw_os_error() {
        Some(libc::ENOENT) => QueryResult::NotFound,
        _ => QueryResult::Unsupported,
    }
}

/// The same for kernels without `PROCMAP_QUERY`: parses every line of the file.
fn for_each_line(
    file: File,
    address: u64,
    mut visit: impl FnMut(Mapping) -> ControlFlow<()>,
) -> Option<()> {
    for line in BufReader::new(file).lines() {
        let Some(mapping) = parse(&line.ok()?) else { continue };
        if mapping.end > address && visit(mapping).is_break() {
            return Some(());
        }
    }
    Some(())
}

/// Parses `start-end perms offset major:minor inode name`. Numbers are hexadecimal, the inode
/// decimal.
fn parse(line: &str) -> Option<Mapping> {
    let mut words = line.split_ascii_whitespace();
    let hex = |text: &str| u64::from_str_radix(text, 16).ok();
    let (start, end) = words.next()?.split_once('-')?;
    let permissions = words.next()?.as_bytes();
    let offset = hex(words.next()?)?;
    let (major, minor) = words.next()?.split_once(':')?;
    let inode = words.next()?.parse().ok()?;
    Some(Mapping {
        start: hex(start)?,
        end: hex(end)?,
        readable: permissions.first() == Some(&b'r'),
        writable: permissions.get(1) == Some(&b'w'),
        offset,
        device: hex(major)? << 32 | hex(minor)?,
        inode,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mr::HostMemory;

    fn both(address: u64, len: u64) -> Result<Range, RangeError> {
        let found = query_range(address, len);
        // The ioctl and the text must agree.
        let mut lines = Vec::new();
        for_each_line(File::open("/proc/self/maps").unwrap(), address, |mapping| {
            lines.push(mapping);
            if mapping.end >= address + len {
                ControlFlow::Break(())
            } else {
                ControlFlow::Continue(())
            }
        });
        let mut queried = Vec::new();
        for_each_from(address, |mapping| {
            queried.push(mapping);
            if mapping.end >= address + len {
                ControlFlow::Break(())
            } else {
                ControlFlow::Continue(())
            }
        })
        .unwrap();
        assert_eq!(queried, lines);
        found
    }

    #[test]
    fn ranges_are_found_and_distinguished() {
        let memory = HostMemory::new(1 << 20).unwrap();
        let found = both(memory.address(), 1 << 20).unwrap();
        assert!(found.writable);
        assert_eq!(both(memory.address(), 4096).unwrap().identity, found.identity);
        let other = HostMemory::new(1 << 20).unwrap();
        assert_ne!(both(other.address(), 4096).unwrap().identity, found.identity);
        assert_eq!(query_range(4096, 64), Err(RangeError::Unmapped(4096)));
        let text = both as *const () as usize as u64;
        assert!(!both(text, 4).unwrap().writable, "code is not writable");
    }

    #[test]
    fn holes_and_reserved_addresses_are_reported() {
        use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};
        let page = rustix::param::page_size();
        // SAFETY: new mappings at addresses chosen by the kernel, never accessed, and unmapped
        // here.
        unsafe {
            let none = ProtFlags::empty();
            let base =
                mmap_anonymous(std::ptr::null_mut(), 3 * page, none, MapFlags::PRIVATE).unwrap();
            let at = base.addr() as u64;
            assert_eq!(query_range(at, 1), Err(RangeError::Unreadable(at)));
            munmap(base, 3 * page).unwrap();
        }
        // No mapping of a process is there, nor will one be.
        let hole = 0xffff_8000_0000_0000;
        assert_eq!(query_range(hole, 1), Err(RangeError::Unmapped(hole)));
    }

    #[test]
    fn malformed_lines_are_skipped() {
        let line = "7f0000000000-7f0000001000 rw-s 00002000 00:1f 4711 /memfd:x (deleted)";
        let found = parse(line).unwrap();
        assert_eq!(
            (found.start, found.end, found.inode),
            (0x7f00_0000_0000, 0x7f00_0000_1000, 4711)
        );
        for cut in 0..line.find("4711").unwrap() {
            assert_eq!(parse(&line[..cut]), None, "{cut}");
        }
    }
}

//! The ELF note by which this project's libraries are recognized without loading them.

use super::System;

const OWNER: &[u8; 12] = b"Warpwire\0\0\0\0";
/// Length of the owner with its NUL.
const OWNER_LEN: u32 = 9;
const VERSION_NOTE: u32 = 1;
const VERSION_LEN: usize = 16;

const ELF_HEADER: usize = 64;
const PROGRAM_HEADER: usize = 56;
const MAX_PROGRAM_HEADERS: usize = 64;
const PT_NOTE: u32 = 4;
/// Notes are short; a longer segment is malformed.
const MAX_NOTES: u64 = 64 << 10;

/// An ELF note with the version of one of this project's libraries; `readelf -n` prints it. A
/// library has it as a `#[used]` static in the section `.note.warpwire`.
///
/// ```
/// use warpwire::host::ElfNote;
/// static NOTE: ElfNote = ElfNote::new(env!("CARGO_PKG_VERSION"));
/// # let _ = &NOTE;
/// ```
#[derive(Clone, Copy, Debug)]
#[repr(C, align(4))]
pub struct ElfNote {
    owner_len: u32,
    version_len: u32,
    kind: u32,
    owner: [u8; 12],
    version: [u8; VERSION_LEN],
}

impl ElfNote {
    /// A note with this version, of which at most 15 bytes are kept.
    pub const fn new(version: &str) -> Self {
        let (from, mut text) = (version.as_bytes(), [0; VERSION_LEN]);
        let mut index = 0;
        while index < from.len() && index < VERSION_LEN - 1 {
            text[index] = from[index];
            index += 1;
        }
        Self {
            owner_len: OWNER_LEN,
            version_len: VERSION_LEN as u32,
            kind: VERSION_NOTE,
            owner: *OWNER,
            version: text,
        }
    }
}

impl System {
    /// The version in the [`ElfNote`] of a library; `None` if the file is not a 64-bit ELF file, or
    /// has no such note. Reads a few KiB, and loads nothing.
    pub fn warpwire_version(&self, library: &str) -> Option<String> {
        let header = self.read_range(library, 0, ELF_HEADER)?;
        // 64 bits, little-endian.
        if header.get(..6)? != b"\x7fELF\x02\x01" {
            return None;
        }
        let table = u64_at(&header, 32)?;
        let size = usize::from(u16_at(&header, 54)?);
        let count = usize::from(u16_at(&header, 56)?);
        if size != PROGRAM_HEADER || count > MAX_PROGRAM_HEADERS {
            return None;
        }
        let table = self.read_range(library, table, size * count)?;
        table.chunks_exact(size).find_map(|segment| {
            let (offset, len) = (u64_at(segment, 8)?, u64_at(segment, 32)?);
            if u32_at(segment, 0)? != PT_NOTE || len > MAX_NOTES {
                return None;
            }
            let align = if u64_at(segment, 48)? == 8 { 8 } else { 4 };
            version_in(&self.read_range(library, offset, usize::try_from(len).ok()?)?, align)
        })
    }
}

/// The version in a segment of notes.
fn version_in(mut notes: &[u8], align: usize) -> Option<String> {
    while notes.len() >= 12 {
        let owner_len = u32_at(notes, 0)? as usize;
        let text_len = u32_at(notes, 4)? as usize;
        let text_at = 12_usize.checked_add(owner_len)?.checked_next_multiple_of(align)?;
        let end = text_at.checked_add(text_len)?;
        let owner = notes.get(12..12_usize.checked_add(owner_len)?)?;
        if owner == &OWNER[..OWNER_LEN as usize] && u32_at(notes, 8)? == VERSION_NOTE {
            let text = String::from_utf8_lossy(notes.get(text_at..end)?).into_owned();
            return Some(text.trim_end_matches('\0').to_owned());
        }
        notes = notes.get(end.checked_next_multiple_of(align)?..)?;
    }
    None
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_le_bytes(bytes.get(at..at.checked_add(2)?)?.try_into().ok()?))
}

pub(super) fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(bytes.get(at..at.checked_add(4)?)?.try_into().ok()?))
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(bytes.get(at..at.checked_add(8)?)?.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::MachineFiles;

    fn note(owner: &[u8], kind: u32, text: &[u8]) -> Vec<u8> {
        let mut bytes = Vec::new();
        for word in [owner.len() as u32, text.len() as u32, kind] {
            bytes.extend(word.to_le_bytes());
        }
        for part in [owner, text] {
            bytes.extend(part);
            bytes.resize(bytes.len().next_multiple_of(4), 0);
        }
        bytes
    }

    fn library(notes: &[u8]) -> Vec<u8> {
        let mut bytes = vec![0; ELF_HEADER + PROGRAM_HEADER];
        bytes[..6].copy_from_slice(b"\x7fELF\x02\x01");
        bytes[32] = ELF_HEADER as u8;
        bytes[54] = PROGRAM_HEADER as u8;
        bytes[56] = 1;
        let segment = &mut bytes[ELF_HEADER..];
        segment[0] = PT_NOTE as u8;
        segment[8] = (ELF_HEADER + PROGRAM_HEADER) as u8;
        segment[32..40].copy_from_slice(&(notes.len() as u64).to_le_bytes());
        segment[48] = 4;
        bytes.extend(notes);
        bytes
    }

    fn version(bytes: &[u8]) -> Option<String> {
        let mut files = MachineFiles::default();
        files.set_bytes("/l", bytes);
        System::of(files).warpwire_version("/l")
    }

    #[test]
    fn the_version_is_found_behind_other_notes() {
        let other = note(b"GNU\0", 3, &[7; 20]);
        let ours = note(b"Warpwire\0", 1, b"0.2.0\0\0\0");
        assert_eq!(version(&library(&[other.clone(), ours].concat())).as_deref(), Some("0.2.0"));
        assert_eq!(version(&library(&other)), None);
    }

    #[test]
    fn what_is_written_is_what_is_read() {
        let note = ElfNote::new("1.2.3-and-much-more-text");
        assert_eq!((note.owner_len, note.version_len, note.kind), (9, 16, 1));
        assert_eq!(&note.version, b"1.2.3-and-much-\0");
        assert_eq!((size_of::<ElfNote>(), std::mem::offset_of!(ElfNote, owner)), (40, 12));
    }

    #[test]
    fn malformed_files_have_no_version() {
        let good = library(&note(b"Warpwire\0", 1, b"0.2.0\0\0\0"));
        for len in 0..good.len() {
            let _ = version(&good[..len]);
        }
        for at in 0..good.len() {
            let mut bytes = good.clone();
            bytes[at] = 0xff;
            let _ = version(&bytes);
        }
        assert_eq!(version(b"not a library"), None);
        assert_eq!(version(&library(&[0xff; 40])), None);
        assert_eq!(System::live().warpwire_version("/no such file"), None);
    }
}

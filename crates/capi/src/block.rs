//! Blocks that a program frees with `ww_free`: structures, then the texts that they point to.
#![allow(unsafe_code)]

use std::ffi::{c_char, c_void};
use std::ptr::NonNull;

use warpwire::Error;
use warpwire::error::{Kind, Result};

/// `malloc` aligns for every type of C.
const MALLOC_ALIGN: usize = 16;

/// A block with `count` structures, and copies of `texts`, each with a NUL. `make` gets pointers to
/// the copies and returns the structures. It belongs to the program.
pub(crate) fn pack<T>(
    count: usize,
    texts: &[&[u8]],
    make: impl FnOnce(&[*const c_char]) -> Vec<T>,
) -> Result<*mut T> {
    const { assert!(align_of::<T>() <= MALLOC_ALIGN) };
    let head = count * size_of::<T>();
    let len = texts.iter().fold(head, |len, text| len + text.len() + 1);
    // SAFETY: a call without conditions.
    let block = NonNull::new(unsafe { libc::malloc(len.max(1)) }.cast::<u8>());
    let Some(block) = block else {
        let what = format!("allocate {len} bytes for the program");
        return Err(Error::new(Kind::OutOfMemory, what).why("malloc failed"));
    };
    let mut at = head;
    let mut copies = Vec::with_capacity(texts.len());
    for text in texts {
        // SAFETY: the texts and a NUL each fit into the block behind `head`, by its length; the
        // block is new, so nothing overlaps.
        unsafe {
            let copy = block.add(at);
            copy.copy_from_nonoverlapping(NonNull::from(*text).cast(), text.len());
            copy.add(text.len()).write(0);
            copies.push(copy.as_ptr().cast_const().cast::<c_char>());
        }
        at += text.len() + 1;
    }
    let made = make(&copies);
    debug_assert_eq!(made.len(), count);
    let structures = block.cast::<T>();
    for (index, structure) in made.into_iter().take(count).enumerate() {
        // SAFETY: `count` structures fit into the block; it is aligned for them.
        unsafe { structures.add(index).write(structure) };
    }
    Ok(structures.as_ptr())
}

/// A block with bytes and a NUL.
pub(crate) fn bytes(bytes: &[u8]) -> Result<*mut c_void> {
    pack::<u8>(0, &[bytes], |_| Vec::new()).map(<*mut u8>::cast)
}

/// Frees a block.
///
/// # Safety
/// It is null, or was returned by this module and not freed before.
pub(crate) unsafe fn free(block: *mut c_void) {
    // SAFETY: guaranteed by the caller.
    unsafe { libc::free(block) };
}

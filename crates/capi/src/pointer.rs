//! What a program passes by pointer. Null is an error with the parameter's name.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_char};
use std::ptr::NonNull;

use warpwire::Error;
use warpwire::error::{Kind, Result};

/// No options are longer, in any version of the library.
const MAX_OPTIONS_LEN: usize = 4096;

#[cold]
fn null(name: &str) -> Error {
    Error::new(Kind::InvalidArgument, format!("use parameter {name}")).why("it is NULL")
}

/// An output parameter.
pub(crate) fn out<T>(pointer: *mut T, name: &str) -> Result<Out<T>> {
    NonNull::new(pointer).map(Out).ok_or_else(|| null(name))
}

/// An output parameter that is not null.
pub(crate) struct Out<T>(NonNull<T>);

impl<T> Out<T> {
    /// Writes it.
    ///
    /// # Safety
    /// It is valid for a write.
    pub(crate) unsafe fn set(self, value: T) {
        // SAFETY: guaranteed by the caller.
        unsafe { self.0.write(value) };
    }
}

/// A text.
///
/// # Safety
/// The pointer is null, or to a text that ends with NUL and lives as long as the result.
pub(crate) unsafe fn text<'a>(pointer: *const c_char, name: &str) -> Result<&'a str> {
    // SAFETY: guaranteed by the caller.
    let found = unsafe { optional_text(pointer, name) }?;
    found.ok_or_else(|| null(name))
}

/// A text, or null.
///
/// # Safety
/// As for [`text`].
pub(crate) unsafe fn optional_text<'a>(
    pointer: *const c_char,
    name: &str,
) -> Result<Option<&'a str>> {
    if pointer.is_null() {
        return Ok(None);
    }
    // SAFETY: guaranteed by the caller; not null.
    let text = unsafe { CStr::from_ptr(pointer) }.to_str();
    text.map(Some).map_err(|_| {
        Error::new(Kind::Malformed, format!("use parameter {name}")).why("it is not UTF-8")
    })
}

/// An array; null is one without elements.
///
/// # Safety
/// The pointer is null, or to `len` initialized elements that live as long as the result and are
/// not written meanwhile.
pub(crate) unsafe fn array<'a, T>(pointer: *const T, len: usize, name: &str) -> Result<&'a [T]> {
    check_array(pointer, len, name)?;
    if len == 0 {
        return Ok(&[]);
    }
    // SAFETY: guaranteed by the caller; checked: not null, aligned, not longer than memory can be.
    Ok(unsafe { std::slice::from_raw_parts(pointer, len) })
}

/// An array to be written.
///
/// # Safety
/// As for [`array`], and nothing else accesses it meanwhile.
pub(crate) unsafe fn array_mut<'a>(
    pointer: *mut u8,
    len: usize,
    name: &str,
) -> Result<&'a mut [u8]> {
    check_array(pointer, len, name)?;
    if len == 0 {
        return Ok(&mut []);
    }
    // SAFETY: as in `array`.
    Ok(unsafe { std::slice::from_raw_parts_mut(pointer, len) })
}

fn check_array<T>(pointer: *const T, len: usize, name: &str) -> Result<()> {
    let wrong =
        |why: &'static str| Err(Error::new(Kind::InvalidArgument, format!("use {name}")).why(why));
    match len {
        0 => Ok(()),
        _ if pointer.is_null() => Err(null(name)),
        _ if !pointer.is_aligned() => wrong("it is not aligned"),
        _ if len.checked_mul(size_of::<T>()).is_none_or(|bytes| bytes > isize::MAX as usize) => {
            wrong("it is longer than memory can be")
        }
        _ => Ok(()),
    }
}

/// Options that begin with their size: `None` if null. Those of an older program are shorter, and
/// the rest is zero, the default. Those of a newer program are longer, and the rest must be zero.
///
/// # Safety
/// The pointer is null, or to as many readable bytes as its first word says. All bits zero are a
/// value of `T`.
pub(crate) unsafe fn options<T: Copy>(pointer: *const T, name: &str) -> Result<Option<T>> {
    if pointer.is_null() {
        return Ok(None);
    }
    let wrong = |kind, why: String| Error::new(kind, format!("use {name}")).why(why);
    // SAFETY: guaranteed by the caller: a size is readable.
    let size = unsafe { pointer.cast::<usize>().read_unaligned() };
    if !(size_of::<usize>()..=MAX_OPTIONS_LEN).contains(&size) {
        let why = format!("its member size is {size}");
        let fix = "begin with the initializer of the header: WW_..._OPTIONS_INIT";
        return Err(wrong(Kind::InvalidArgument, why).fix(fix));
    }
    let known = size.min(size_of::<T>());
    // SAFETY: guaranteed by the caller: `size` bytes are readable.
    let beyond = unsafe { std::slice::from_raw_parts(pointer.cast::<u8>(), size) };
    if beyond[known..].iter().any(|byte| *byte != 0) {
        let why = "it sets a member that this version of the library does not have";
        let fix = "install a libwarpwire.so as new as the header";
        return Err(wrong(Kind::Unsupported, why.to_owned()).fix(fix));
    }
    let mut value = std::mem::MaybeUninit::<T>::zeroed();
    // SAFETY: `known` bytes are readable, by the caller, and writable; zero is a value.
    unsafe {
        std::ptr::copy_nonoverlapping(pointer.cast::<u8>(), value.as_mut_ptr().cast(), known);
        Ok(Some(value.assume_init()))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::abi::TransferOptions;

    fn read(words: &[usize]) -> Result<Option<TransferOptions>> {
        // SAFETY: the first word is at most the array's length in these tests, or refused.
        unsafe { options(words.as_ptr().cast(), "options") }
    }

    #[test]
    fn options_of_other_versions_are_read() {
        assert_eq!(read(&[32, 1, 2, 3]).unwrap().unwrap().timeout_ms, 3);
        let older = read(&[24, 1, 2, 3]).unwrap().unwrap();
        assert_eq!((older.notification_len, older.timeout_ms), (2, 0));
        assert_eq!(read(&[48, 1, 2, 3, 0, 0]).unwrap().unwrap().timeout_ms, 3);
        assert!(read(&[8]).unwrap().is_some());
    }

    #[test]
    fn options_that_cannot_be_read_are_errors() {
        for (words, kind) in [
            (&[0_usize, 1, 2, 3][..], Kind::InvalidArgument),
            (&[7], Kind::InvalidArgument),
            (&[4097], Kind::InvalidArgument),
            (&[usize::MAX], Kind::InvalidArgument),
            (&[48, 1, 2, 3, 0, 1], Kind::Unsupported),
        ] {
            assert_eq!(read(words).unwrap_err().kind(), &kind, "{words:?}");
        }
    }

    #[test]
    fn arrays_are_checked() {
        let words = [1_u64, 2];
        // SAFETY: the first is an array; the others are refused.
        unsafe {
            assert_eq!(array(words.as_ptr(), 2, "a").unwrap(), &words);
            assert!(array(std::ptr::null::<u64>(), 0, "a").unwrap().is_empty());
            assert!(array(std::ptr::null::<u64>(), 1, "a").is_err());
            assert!(array(words.as_ptr().wrapping_byte_add(1), 1, "a").is_err());
            assert!(array(words.as_ptr(), usize::MAX / 8, "a").is_err());
        }
    }
}

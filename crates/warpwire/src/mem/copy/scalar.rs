//! Word accesses: the widths that every processor has, also used for the edges of wider routines.

use std::marker::PhantomData;

use super::AccessWidth;

/// The widest word that the processor moves in one access.
#[cfg(target_pointer_width = "64")]
pub(super) type Widest = u64;
#[cfg(not(target_pointer_width = "64"))]
pub(super) type Widest = u32;

/// Stores of one word.
pub(super) struct Store<W>(PhantomData<W>);

/// Loads of one word.
pub(super) struct Load<W>(PhantomData<W>);

// Volatile keeps each access whole, and keeps the loop from being compiled to a `memcpy` call.
macro_rules! word {
    ($word:ty, $narrower:ty) => {
        impl AccessWidth for Store<$word> {
            const BYTES: usize = size_of::<$word>();
            type Narrower = Store<$narrower>;

            #[inline]
            unsafe fn copy(to: *mut u8, from: *const u8, count: usize) {
                let (to, from) = (to.cast::<$word>(), from.cast::<$word>());
                for at in 0..count {
                    // SAFETY: valid for `count` words and `to` aligned, by the caller's contract.
                    unsafe { to.add(at).write_volatile(from.add(at).read_unaligned()) };
                }
            }
        }

        impl AccessWidth for Load<$word> {
            const BYTES: usize = size_of::<$word>();
            type Narrower = Load<$narrower>;

            #[inline]
            unsafe fn copy(to: *mut u8, from: *const u8, count: usize) {
                let (to, from) = (to.cast::<$word>(), from.cast::<$word>());
                for at in 0..count {
                    // SAFETY: valid for `count` words and `from` aligned, by the caller's contract.
                    unsafe { to.add(at).write_unaligned(from.add(at).read_volatile()) };
                }
            }
        }
    };
}

word!(u8, u8);
word!(u16, u8);
word!(u32, u16);
word!(u64, u32);

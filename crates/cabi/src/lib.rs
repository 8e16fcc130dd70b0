//! What the drop-in C libraries share: declarations of `infiniband/verbs.h`, events that wait to be
//! acknowledged, and the rules of a library inside of a foreign program (fork, signals, panics).
//!
//! Each library that links this crate has its own copy of its few variables.

mod events;
pub mod log;
pub mod process;
pub mod verbs;

pub use events::Unacked;
pub use process::{guard, set_errno};

/// A structure's name in C, its size, and the offsets of its fields.
pub type Layout = (&'static str, usize, &'static [(&'static str, usize)]);

/// Asserts sizes and offsets, and records them as `LAYOUTS` for a test against the header.
#[macro_export]
macro_rules! layouts {
    ($visibility:vis, $($c:literal $name:ty, $size:expr, { $($field:ident $offset:literal),* })*) => {
        const _: () = {
            $(
                assert!(size_of::<$name>() >= $size);
                $(assert!(std::mem::offset_of!($name, $field) == $offset);)*
            )*
        };

        /// Structures, for comparison with the header.
        #[allow(dead_code)] // used by tests
        $visibility const LAYOUTS: &[$crate::Layout] =
            &[$(($c, $size, &[$((stringify!($field), $offset)),*])),*];
    };
}

/// Declares numbers of a header, and records them as `NUMBERS` for a test against it.
#[macro_export]
macro_rules! numbers {
    ($visibility:vis, $($name:ident $c:ident $value:expr;)*) => {
        $(#[allow(missing_docs)] // the header's
        $visibility const $name: u32 = $value;)*

        /// Numbers, for comparison with the header.
        #[allow(dead_code)] // used by tests
        $visibility const NUMBERS: &[(&str, u32)] = &[$((stringify!($c), $value)),*];
    };
}

/// The instruction that jumps to a symbol.
#[cfg(target_arch = "x86_64")]
#[macro_export]
macro_rules! jump {
    () => {
        "jmp"
    };
}
/// The instruction that jumps to a symbol.
#[cfg(target_arch = "aarch64")]
#[macro_export]
macro_rules! jump {
    () => {
        "b"
    };
}

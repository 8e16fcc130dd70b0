//! `libibverbs.so.1`, loaded at run time, with results as `Result`s.

use std::sync::OnceLock;

use super::explain::{Attempt, explain, last_errno};
use super::sys::Functions;
use crate::error::{Error, Kind, Result};

/// Installed by rdma-core. (`libibverbs.so` comes with the development package only.)
const LIBRARY: &str = "libibverbs.so.1";

/// Environment variable with another file to load.
const ENV_VAR: &str = "WARPWIRE_IBVERBS";

pub(super) const INSTALL_HINT: &str = "install rdma-core (Debian, Ubuntu: \
     `sudo apt install libibverbs1 ibverbs-providers`; Fedora, RHEL: \
     `sudo dnf install libibverbs`); the software HCA does not need it";

pub(super) struct Library {
    pub(super) functions: Functions,
    /// File name or path that it was loaded by.
    name: String,
    /// Keeps the functions valid.
    _library: libloading::Library,
}

/// The function of this name; an error if the library lacks it.
///
/// Calling it is unsafe because the library trusts pointers. It is sound under this rule: an object
/// is passed only by its owner, and other pointers are to live local variables.
macro_rules! function {
    ($library:expr, $function:ident) => {{
        let library: &$crate::ibv::library::Library = $library;
        library
            .functions
            .$function
            .ok_or_else(|| library.missing($crate::ibv::sys::symbol::$function))
    }};
}

/// Calls a function that returns an object, or null and `errno`.
macro_rules! create {
    ($library:expr, $attempt:expr, $function:ident($($argument:expr),* $(,)?)) => {
        $crate::ibv::library::function!($library, $function).and_then(|function| {
            // SAFETY: the caller owns the objects that it passes and the variables that it points
            // to; they live until the call returns.
            let created = unsafe { function($($argument),*) };
            $crate::ibv::library::created(created, $attempt)
        })
    };
}

/// Calls a function that returns 0 or an error code.
macro_rules! call {
    ($library:expr, $attempt:expr, $function:ident($($argument:expr),* $(,)?)) => {
        $crate::ibv::library::function!($library, $function).and_then(|function| {
            // SAFETY: as in `create`.
            let code = unsafe { function($($argument),*) };
            $crate::ibv::library::check(code, $attempt)
        })
    };
}

/// Destroys an object whose owner is being dropped; a failure can only be logged.
macro_rules! destroy {
    ($library:expr, $function:ident($object:expr)) => {
        if let Some(function) = $library.functions.$function {
            // SAFETY: the caller owns the object, which is no longer used, now or afterwards.
            let code = unsafe { function($object) };
            if code != 0 {
                tracing::warn!(code, "{} failed", $crate::ibv::sys::symbol::$function.0);
            }
        }
    };
}

pub(super) use {call, create, destroy, function};

/// An object of the library, owned by the holder of this.
pub(super) struct Raw<T>(pub(super) std::ptr::NonNull<T>);

// SAFETY: libibverbs is thread safe: objects may be used from any thread, and providers lock.
unsafe impl<T> Send for Raw<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Raw<T> {}

impl<T> std::fmt::Debug for Raw<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Debug::fmt(&self.0, f)
    }
}

impl<T> Raw<T> {
    pub(super) fn ptr(&self) -> *mut T {
        self.0.as_ptr()
    }
}

/// Wraps the result of a constructor; null means failure, with the reason in `errno`.
pub(super) fn created<T>(created: *mut T, attempt: Attempt<'_>) -> Result<Raw<T>> {
    match std::ptr::NonNull::new(created) {
        Some(object) => Ok(Raw(object)),
        None => Err(explain(last_errno(), attempt).into_error(attempt)),
    }
}

/// Converts a return code: an errno, a negated errno, or -1 with `errno` set.
pub(super) fn check(code: i32, attempt: Attempt<'_>) -> Result<()> {
    match code {
        0 => Ok(()),
        -1 => Err(explain(last_errno(), attempt).into_error(attempt)),
        code => Err(explain(code.saturating_abs(), attempt).into_error(attempt)),
    }
}

impl Library {
    /// The library, loaded once per process.
    pub(super) fn get() -> Result<&'static Self> {
        static LOADED: OnceLock<Result<Library>> = OnceLock::new();
        let load = || match std::env::var(ENV_VAR) {
            Ok(name) if !name.is_empty() => Self::load(&name),
            _ => Self::load(LIBRARY),
        };
        LOADED.get_or_init(load).as_ref().map_err(Clone::clone)
    }

    fn load(name: &str) -> Result<Self> {
        // SAFETY: loading the library runs its initialisers, which have no preconditions.
        let library = unsafe { libloading::Library::new(name) }.map_err(|error| {
            let detail =
                std::error::Error::source(&error).map_or(error.to_string(), ToString::to_string);
            let missing = detail.contains(name) && detail.contains("No such file");
            let why = match missing {
                true => format!("{name} is not installed"),
                false => format!("{name} does not load: {detail}"),
            };
            Error::new(Kind::Unavailable, "use RDMA hardware").why(why).fix(INSTALL_HINT)
        })?;
        let functions = Functions::load(&library);
        Ok(Self { functions, name: name.to_owned(), _library: library })
    }

    #[cold]
    pub(super) fn missing(&self, (symbol, since): (&'static str, u32)) -> Error {
        let fix = match since {
            0 => "it is not libibverbs: unset WARPWIRE_IBVERBS, or set it to the right file"
                .to_owned(),
            since => format!("install rdma-core {since} or newer, which has it"),
        };
        Error::new(Kind::Unavailable, "use RDMA hardware")
            .why(format!("{} has no symbol {symbol}", self.name))
            .fix(fix)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ibv::sys;

    #[test]
    fn missing_library_error_names_the_package() {
        let error = Library::load("libibverbs-that-is-not-there.so.1").err().unwrap();
        assert_eq!(error.kind(), &Kind::Unavailable);
        let text = error.to_string();
        assert!(text.contains("libibverbs-that-is-not-there.so.1 is not installed"), "{text}");
        assert!(text.contains("apt install libibverbs1"), "{text}");
    }

    #[test]
    fn invalid_library_differs_from_a_missing_one() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("libibverbs.so.1");
        std::fs::write(&path, "not a library at all, and long enough to have a header of its own")
            .unwrap();
        let text = Library::load(path.to_str().unwrap()).err().unwrap().to_string();
        assert!(text.contains("does not load") && text.contains("invalid ELF header"), "{text}");
    }

    #[test]
    fn missing_symbol_error_names_symbol_and_release() {
        // libc has none of the symbols; an old libibverbs lacks some of them.
        let old = Library::load("libc.so.6").unwrap();
        let nothing = std::ptr::null_mut();
        for (error, symbol, release) in [
            (function!(&old, reg_dmabuf_mr).err(), "ibv_reg_dmabuf_mr", "rdma-core 34"),
            (function!(&old, reg_mr_iova2).err(), "ibv_reg_mr_iova2", "rdma-core 28"),
            (function!(&old, query_gid_table).err(), "_ibv_query_gid_table", "rdma-core 32"),
            (
                call!(&old, Attempt::Close, close_device(nothing)).err(),
                "ibv_close_device",
                "not libibverbs",
            ),
        ] {
            let text = error.unwrap().to_string();
            assert!(text.contains(symbol) && text.contains(release), "{text}");
        }
        assert_eq!(sys::symbol::reg_mr.1, 0);
    }

    #[test]
    fn all_error_conventions_are_accepted() {
        assert!(check(0, Attempt::Close).is_ok());
        for code in [libc::EINVAL, -libc::EINVAL] {
            assert_eq!(check(code, Attempt::Close).unwrap_err().kind(), &Kind::Os(libc::EINVAL));
        }
        set_errno(libc::EBUSY);
        assert_eq!(check(-1, Attempt::Close).unwrap_err().kind(), &Kind::Busy);
        set_errno(libc::EACCES);
        let error = created::<u8>(std::ptr::null_mut(), Attempt::Open("mlx5_0")).unwrap_err();
        assert_eq!(error.kind(), &Kind::PermissionDenied);
    }

    fn set_errno(code: i32) {
        // SAFETY: the errno of this thread.
        unsafe { *libc::__errno_location() = code };
    }
}

//! `libcuda.so.1`, loaded at run time, with status codes mapped to `Result`.

use std::ffi::{CStr, c_char};
use std::sync::OnceLock;

use libloading::Library;

use super::sys::{self, CuResult, Functions, symbol};
use crate::error::{Error, Kind, Result};

/// The library that every NVIDIA driver installs. (`libcuda.so` is part of toolkits only.)
const LIBRARY: &str = "libcuda.so.1";

pub(super) struct Driver {
    pub(super) functions: Functions,
    /// CUDA version that the driver supports: 12020 for 12.2.
    pub(super) version: i32,
    /// Keeps the library loaded: the functions point into it.
    _library: Library,
}

/// Calls a driver function and checks its result; a symbol that this driver lacks is an error.
///
/// The call is unsafe because the driver trusts handles and pointers. It is sound because a handle
/// is only passed by the object that owns it, and pointers refer to live local variables.
macro_rules! call {
    ($driver:expr, $function:ident($($argument:expr),* $(,)?)) => {{
        let driver: &$crate::mem::cuda::driver::Driver = $driver;
        let name = $crate::mem::cuda::sys::symbol::$function;
        match driver.functions.$function {
            // SAFETY: the caller owns the handles that it passes and the variables that it points
            // to; they live until the call returns.
            Some(function) => driver.check(name, unsafe { function($($argument),*) }),
            None => Err(driver.missing(name)),
        }
    }};
}

/// Calls a driver function whose first parameter is an out-pointer to the result.
macro_rules! get {
    ($driver:expr, $initial:expr, $function:ident($($argument:expr),* $(,)?)) => {{
        let mut result = $initial;
        $crate::mem::cuda::driver::call!($driver, $function(&mut result $(, $argument)*))
            .map(|()| result)
    }};
}

pub(super) use {call, get};

impl Driver {
    /// The driver, loaded and initialized once per process.
    pub(super) fn get() -> Result<&'static Self> {
        static DRIVER: OnceLock<Result<Driver>> = OnceLock::new();
        DRIVER.get_or_init(Self::load).as_ref().map_err(Clone::clone)
    }

    /// Whether the library is loaded in this process.
    pub(super) fn is_loaded() -> bool {
        use libloading::os::unix;
        // SAFETY: nothing is loaded, so no initializer runs.
        unsafe { unix::Library::open(Some(LIBRARY), unix::RTLD_NOW | libc::RTLD_NOLOAD) }.is_ok()
    }

    fn load() -> Result<Self> {
        // SAFETY: loading the vendor's library runs its initializers, which have no preconditions.
        let library = unsafe { Library::new(LIBRARY) }.map_err(|error| {
            let source = std::error::Error::source(&error);
            let detail = source.map_or(error.to_string(), ToString::to_string);
            let why = if detail.contains("No such file") {
                format!("no CUDA driver ({LIBRARY} not found)")
            } else {
                format!("{LIBRARY} does not load: {detail}")
            };
            Error::new(Kind::Unavailable, "use CUDA").why(why).fix(
                "install the NVIDIA driver, or run the container with the NVIDIA runtime; \
                     the simulated GPU needs no driver",
            )
        })?;
        let mut driver =
            Self { functions: Functions::load(&library), version: 0, _library: library };
        driver.version = get!(&driver, 0, driver_version())?;
        call!(&driver, init(0)).map_err(|error| {
            let advice = match error.kind() {
                Kind::Cuda(sys::NO_DEVICE) => {
                    "run where there is an NVIDIA GPU; check CUDA_VISIBLE_DEVICES"
                }
                _ => "run `nvidia-smi` and `warpwire doctor` to see what is wrong with the driver",
            };
            error.fix(advice)
        })?;
        Ok(driver)
    }

    pub(super) fn check(&self, function: &str, code: CuResult) -> Result<()> {
        if code == sys::SUCCESS { Ok(()) } else { Err(self.failure(function, code)) }
    }

    #[cold]
    fn failure(&self, function: &str, code: CuResult) -> Error {
        let kind = match code {
            sys::OUT_OF_MEMORY => Kind::OutOfMemory,
            sys::NOT_SUPPORTED => Kind::Unsupported,
            sys::NOT_PERMITTED => Kind::PermissionDenied,
            code if sys::STICKY_ERRORS.contains(&code) => Kind::DeviceLost,
            code => Kind::Cuda(code),
        };
        let name = self.text(self.functions.error_name, code);
        let meaning = self.text(self.functions.error_string, code);
        let why = format!("{function} returned {name} ({code}: {meaning})");
        Error::new(kind, "use CUDA").why(why)
    }

    #[cold]
    pub(super) fn missing(&self, symbol: &str) -> Error {
        let version = version_text(self.version);
        Error::new(Kind::Unavailable, "use CUDA")
            .why(format!("{LIBRARY} has no symbol {symbol}; the driver is for CUDA {version}"))
            .fix("install driver R535 or newer")
    }

    fn text(
        &self,
        describe: Option<unsafe extern "C" fn(CuResult, *mut *const c_char) -> CuResult>,
        code: CuResult,
    ) -> String {
        let mut text: *const c_char = std::ptr::null();
        // SAFETY: the driver writes one pointer, to a static string, or leaves null.
        let known =
            describe.is_some_and(|describe| unsafe { describe(code, &mut text) } == sys::SUCCESS);
        if !known || text.is_null() {
            return "an unknown error".into();
        }
        // SAFETY: not null, so it points to a static NUL-terminated string.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    }

    /// Whether a query has completed; `NOT_READY` is false.
    pub(super) fn ready(&self, function: &str, code: CuResult) -> Result<bool> {
        match code {
            sys::NOT_READY => Ok(false),
            code => self.check(function, code).map(|()| true),
        }
    }

    /// Whether all work on the stream has completed.
    pub(super) fn stream_is_idle(&self, stream: sys::StreamHandle) -> Result<bool> {
        let query =
            self.functions.stream_query.ok_or_else(|| self.missing(symbol::stream_query))?;
        // SAFETY: the caller owns the stream.
        self.ready(symbol::stream_query, unsafe { query(stream) })
    }

    /// Whether the event has been reached.
    pub(super) fn event_is_complete(&self, event: sys::EventHandle) -> Result<bool> {
        let query = self.functions.event_query.ok_or_else(|| self.missing(symbol::event_query))?;
        // SAFETY: the caller owns the event.
        self.ready(symbol::event_query, unsafe { query(event) })
    }
}

/// A driver version number as text: 12020 is `12.2`.
pub(super) fn version_text(version: i32) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn version_numbers_become_text() {
        assert_eq!(version_text(12020), "12.2");
        assert_eq!(version_text(13000), "13.0");
    }
}

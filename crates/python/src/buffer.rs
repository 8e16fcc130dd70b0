//! `warpwire.Buffer`: memory that this package allocates. `warpwire.Window`: device memory as the
//! CPU sees it.
#![allow(unsafe_code)]

use std::ffi::c_int;
use std::sync::{Arc, Mutex};

use pyo3::exceptions::{PyAttributeError, PyBufferError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyMemoryView};
use warpwire::Error;
use warpwire::error::{Kind, Result};
use warpwire::mem::{self, Allocation, Backend, DeviceAddr, Region};
use warpwire::mr::{HostMemory, MemorySource};

use crate::dlpack;
use crate::error::raise;
use crate::object::{Object, memory_of};

/// Memory of the host or of a device, zeroed on the host. It is freed when nothing refers to it.
#[pyclass(frozen, module = "warpwire")]
pub(crate) struct Buffer(Backing);

enum Backing {
    Host(HostMemory),
    Device(Allocation),
}

/// Allocates memory: on the "host", on a GPU ("cuda:0"), or on a simulated one ("sim:0").
#[pyfunction]
#[pyo3(signature = (nbytes, device = "host"))]
pub(crate) fn alloc(py: Python<'_>, nbytes: u64, device: &str) -> PyResult<Buffer> {
    let allocate = || match device {
        "host" => HostMemory::new(nbytes).map(Backing::Host),
        label => Ok(Backing::Device(mem::open(label)?.alloc(nbytes)?)),
    };
    py.detach(allocate).map(Buffer).map_err(|why| raise(py, &why))
}

impl Buffer {
    /// The memory, to be registered.
    pub(crate) fn source(&self) -> Result<MemorySource> {
        match &self.0 {
            Backing::Host(memory) => Ok(memory.clone().into()),
            Backing::Device(memory) => Ok(memory.whole()?.into()),
        }
    }

    /// The memory of a device, for work of a stream.
    pub(crate) fn region(&self) -> Result<Region> {
        match &self.0 {
            Backing::Host(_) => Err(Error::new(Kind::Unsupported, "use a buffer on a stream")
                .on(self.__repr__())
                .why("it is memory of the host, which streams do not access")
                .fix("use memory of a device: warpwire.alloc(nbytes, \"cuda:0\")")),
            Backing::Device(memory) => memory.whole(),
        }
    }

    /// Its device, in DLPack's numbers.
    fn dlpack_device(&self) -> PyResult<(i32, i32)> {
        match &self.0 {
            Backing::Host(_) => Ok((dlpack::CPU, 0)),
            Backing::Device(memory) => {
                let info = memory.device().info();
                match info.backend {
                    Backend::Cuda => Ok((dlpack::CUDA, info.ordinal as i32)),
                    Backend::Sim => Err(PyBufferError::new_err(
                        "DLPack has no number for simulated GPUs; use window()",
                    )),
                }
            }
        }
    }
}

#[pymethods]
impl Buffer {
    /// The address of its first byte, on its device.
    #[getter]
    fn address(&self) -> u64 {
        match &self.0 {
            Backing::Host(memory) => memory.address(),
            Backing::Device(memory) => memory.address().raw(),
        }
    }

    /// Its length in bytes.
    #[getter]
    fn nbytes(&self) -> u64 {
        match &self.0 {
            Backing::Host(memory) => memory.len(),
            Backing::Device(memory) => memory.len(),
        }
    }

    fn __len__(&self) -> usize {
        self.nbytes() as usize
    }

    /// "host", or the device, such as "cuda:0".
    #[getter]
    fn device(&self) -> String {
        match &self.0 {
            Backing::Host(_) => "host".to_owned(),
            Backing::Device(memory) => memory.device().label(),
        }
    }

    /// Copies bytes into it; complete on return.
    #[pyo3(signature = (data, offset = 0))]
    fn write(&self, py: Python<'_>, data: &[u8], offset: u64) -> PyResult<()> {
        match &self.0 {
            Backing::Host(memory) => memory.bytes().write(offset, data),
            Backing::Device(memory) => memory.write(offset, data),
        }
        .map_err(|why| raise(py, &why))
    }

    /// Copies bytes out of it.
    #[pyo3(signature = (nbytes = None, offset = 0))]
    fn read<'py>(
        &self,
        py: Python<'py>,
        nbytes: Option<u64>,
        offset: u64,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let len = nbytes.unwrap_or_else(|| self.nbytes().saturating_sub(offset));
        if offset.checked_add(len).is_none_or(|end| end > self.nbytes()) {
            let what = format!("read {len} bytes at offset {offset}");
            let error = Error::new(Kind::OutOfRange, what).on(self.__repr__());
            return Err(raise(py, &error.why(format!("it has {} bytes", self.nbytes()))));
        }
        PyBytes::new_with(py, len as usize, |into| {
            match &self.0 {
                Backing::Host(memory) => memory.bytes().read(offset, into),
                Backing::Device(memory) => memory.read(offset, into),
            }
            .map_err(|why| raise(py, &why))
        })
    }

    /// A CPU window onto it, if it is memory of a device.
    fn window(slf: &Bound<'_, Self>) -> PyResult<Window> {
        window_of(slf.as_any())
    }

    #[getter]
    fn __cuda_array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        if !matches!(self.dlpack_device(), Ok((dlpack::CUDA, _))) {
            let why = format!("memory of {} is not CUDA's", self.device());
            return Err(PyAttributeError::new_err(why));
        }
        let interface = PyDict::new(py);
        interface.set_item("shape", (self.nbytes(),))?;
        interface.set_item("typestr", "|u1")?;
        interface.set_item("data", (self.address(), false))?;
        interface.set_item("strides", py.None())?;
        interface.set_item("stream", py.None())?;
        interface.set_item("version", 3)?;
        Ok(interface)
    }

    fn __dlpack_device__(&self) -> PyResult<(i32, i32)> {
        self.dlpack_device()
    }

    #[pyo3(signature = (*, stream = None, max_version = None, dl_device = None, copy = None))]
    fn __dlpack__<'py>(
        slf: &Bound<'py, Self>,
        stream: Option<&Bound<'py, PyAny>>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        // Nothing of this package works on the memory in stream order, so nothing is to be awaited.
        let _ = stream;
        let buffer = slf.get();
        let device = buffer.dlpack_device()?;
        if dl_device.is_some_and(|wanted| wanted != device) {
            return Err(PyBufferError::new_err("it is exported on its own device only"));
        }
        if copy == Some(true) {
            return Err(PyBufferError::new_err("it is exported without a copy only"));
        }
        let range = (buffer.address(), buffer.nbytes());
        Ok(dlpack::export(slf.clone().into_any(), range, device, max_version)?.into_any())
    }

    /// # Safety
    /// Called by Python.
    unsafe fn __getbuffer__(
        slf: Bound<'_, Self>,
        view: *mut ffi::Py_buffer,
        flags: c_int,
    ) -> PyResult<()> {
        let buffer = slf.get();
        let Backing::Host(memory) = &buffer.0 else {
            let why = format!("memory of {} is not the CPU's; use window()", buffer.device());
            return Err(PyBufferError::new_err(why));
        };
        let (address, len) = (memory.address(), memory.len());
        // SAFETY: `view` is Python's. The memory is mapped while `slf` lives, which the view holds.
        unsafe { fill(slf.as_any(), view, flags, address, len) }
    }

    fn __repr__(&self) -> String {
        format!("<warpwire.Buffer: {} bytes of {}>", self.nbytes(), self.device())
    }
}

/// Fills a view of writable bytes.
///
/// # Safety
/// `view` is one that Python wants filled; the bytes are mapped while `owner` lives.
unsafe fn fill(
    owner: &Bound<'_, PyAny>,
    view: *mut ffi::Py_buffer,
    flags: c_int,
    address: u64,
    len: u64,
) -> PyResult<()> {
    let base = std::ptr::with_exposed_provenance_mut(address as usize);
    // SAFETY: as the caller guarantees; the view takes a reference to its owner.
    let filled = unsafe {
        ffi::PyBuffer_FillInfo(view, owner.as_ptr(), base, len as ffi::Py_ssize_t, 0, flags)
    };
    if filled == 0 { Ok(()) } else { Err(PyErr::fetch(owner.py())) }
}

/// Memory of a device as the CPU sees it: `memoryview(window)` and `numpy.frombuffer(window)` are
/// writable.
///
/// The CPU's stores reach the device by themselves; `flush()` waits for them. Loads over PCIe are
/// slow: copy out what is to be read more than once.
#[pyclass(frozen, module = "warpwire")]
pub(crate) struct Window {
    open: Mutex<Opened>,
    /// Keeps the memory allocated.
    _owner: Option<Py<PyAny>>,
}

#[derive(Default)]
struct Opened {
    window: Option<Arc<mem::Window>>,
    /// Views that exist.
    views: usize,
}

/// A CPU window onto an object in a GPU's memory: anything that `Agent.register` takes.
#[pyfunction]
pub(crate) fn window(object: &Bound<'_, PyAny>) -> PyResult<Window> {
    window_of(object)
}

pub(crate) fn window_of(object: &Bound<'_, PyAny>) -> PyResult<Window> {
    let py = object.py();
    let host = || {
        let error = Error::new(Kind::InvalidArgument, "open a CPU window");
        raise(py, &error.why("it is host memory, which the CPU accesses without one"))
    };
    let (opened, owner) = match memory_of(object)? {
        Object::Own(buffer) => {
            let Backing::Device(memory) = &buffer.get().0 else { return Err(host()) };
            (py.detach(|| memory.window()), Some(buffer.into_any()))
        }
        Object::Foreign(memory) => {
            let address = DeviceAddr::new(memory.address);
            let Ok(device) = mem::owner_of(address) else { return Err(host()) };
            let open = || {
                // SAFETY: the owner keeps the memory allocated, and the window keeps the owner;
                // without one, the program has promised it.
                let borrowed = unsafe { device.borrow(address, memory.len) }?;
                borrowed.window()
            };
            (py.detach(open), memory.owner)
        }
    };
    let window = Some(Arc::new(opened.map_err(|why| raise(py, &why))?));
    Ok(Window { open: Mutex::new(Opened { window, views: 0 }), _owner: owner })
}

impl Window {
    fn get(&self, py: Python<'_>) -> PyResult<Arc<mem::Window>> {
        let window = self.open.lock().ok().and_then(|open| open.window.clone());
        window.ok_or_else(|| {
            raise(py, &Error::new(Kind::Freed, "use a CPU window").why("it was closed"))
        })
    }
}

#[pymethods]
impl Window {
    /// Device address of the first byte.
    #[getter]
    fn address(&self, py: Python<'_>) -> PyResult<u64> {
        Ok(self.get(py)?.address().raw())
    }

    /// Length in bytes.
    #[getter]
    fn nbytes(&self, py: Python<'_>) -> PyResult<u64> {
        Ok(self.get(py)?.len())
    }

    fn __len__(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(self.nbytes(py)? as usize)
    }

    /// How it is mapped.
    #[getter]
    fn path(&self, py: Python<'_>) -> PyResult<String> {
        Ok(self.get(py)?.path().to_string())
    }

    /// The better ways that were tried, and why each failed.
    #[getter]
    fn why(&self, py: Python<'_>) -> PyResult<Vec<String>> {
        let window = self.get(py)?;
        Ok(window.rejected_paths().iter().map(|one| format!("{}: {}", one.path, one.why)).collect())
    }

    /// A writable memoryview of it.
    #[getter]
    fn view<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyMemoryView>> {
        slf.get().get(slf.py())?;
        PyMemoryView::from(slf.as_any())
    }

    /// Copies bytes to the device, with the widest stores of this CPU, and drains its
    /// write-combining buffers: faster than a memoryview.
    #[pyo3(signature = (data, offset = 0))]
    fn write(&self, py: Python<'_>, data: &[u8], offset: u64) -> PyResult<()> {
        let window = self.get(py)?;
        window.write(offset, data).map_err(|why| raise(py, &why))
    }

    /// Copies bytes from the device, with the widest loads of this CPU.
    #[pyo3(signature = (nbytes = None, offset = 0))]
    fn read<'py>(
        &self,
        py: Python<'py>,
        nbytes: Option<u64>,
        offset: u64,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let window = self.get(py)?;
        let len = nbytes.unwrap_or_else(|| window.len().saturating_sub(offset));
        // Checked before memory for the result is allocated.
        if offset.checked_add(len).is_none_or(|end| end > window.len()) {
            let what = format!("read {len} bytes at offset {offset} of a CPU window");
            let error = Error::new(Kind::OutOfRange, what);
            return Err(raise(py, &error.why(format!("it has {} bytes", window.len()))));
        }
        PyBytes::new_with(py, len as usize, |into| {
            window.read(offset, into).map_err(|why| raise(py, &why))
        })
    }

    /// Waits until everything written through it has reached the device.
    fn flush(&self, py: Python<'_>) -> PyResult<()> {
        let window = self.get(py)?;
        py.detach(|| window.flush());
        Ok(())
    }

    /// Unmaps it. Raises BufferError while memoryviews or arrays of it exist.
    fn close(&self) -> PyResult<()> {
        let Ok(mut open) = self.open.lock() else { return Ok(()) };
        if open.views > 0 {
            return Err(PyBufferError::new_err("views of the window exist; release them first"));
        }
        open.window = None;
        Ok(())
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __exit__(
        &self,
        _class: &Bound<'_, PyAny>,
        _value: &Bound<'_, PyAny>,
        _traceback: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        self.close()
    }

    /// # Safety
    /// Called by Python.
    unsafe fn __getbuffer__(
        slf: Bound<'_, Self>,
        view: *mut ffi::Py_buffer,
        flags: c_int,
    ) -> PyResult<()> {
        let closed = || PyBufferError::new_err("the window is closed");
        let Ok(mut open) = slf.get().open.lock() else { return Err(closed()) };
        let Some(window) = &open.window else { return Err(closed()) };
        let (address, len) = (window.as_ptr().as_ptr().expose_provenance() as u64, window.len());
        // SAFETY: `view` is Python's. The window stays open while there are views.
        unsafe { fill(slf.as_any(), view, flags, address, len) }?;
        open.views += 1;
        Ok(())
    }

    /// # Safety
    /// Called by Python.
    unsafe fn __releasebuffer__(&self, _view: *mut ffi::Py_buffer) {
        if let Ok(mut open) = self.open.lock() {
            open.views -= 1;
        }
    }

    fn __repr__(&self) -> String {
        match self.open.lock().ok().and_then(|open| open.window.clone()) {
            Some(window) => format!("<warpwire.{window:?}>"),
            None => "<warpwire.Window, closed>".to_owned(),
        }
    }
}

//! Ranges of memory, and lists of them in the forms that Python programs have.

use pyo3::buffer::PyBuffer;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyList, PySlice, PyTuple};
use warpwire::Error;
use warpwire::agent::Descriptor;
use warpwire::error::Kind;

use crate::error::raise;
use crate::memory::{Memory, RemoteMemory};

/// A range of memory, of this process or of a peer's: what `memory[start:end]` is.
#[pyclass(frozen, eq, hash, module = "warpwire")]
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Range(pub Descriptor);

#[pymethods]
impl Range {
    #[new]
    fn new(address: u64, length: u64) -> Self {
        Self(Descriptor::new(address, length))
    }

    /// Address of the first byte.
    #[getter]
    fn address(&self) -> u64 {
        self.0.address
    }

    /// Length in bytes.
    #[getter]
    fn length(&self) -> u64 {
        self.0.len
    }

    fn __len__(&self) -> usize {
        self.0.len as usize
    }

    fn __repr__(&self) -> String {
        format!("Range({:#x}, {})", self.0.address, self.0.len)
    }
}

/// `memory[start:end]`, in bytes. Unlike slices of sequences, ends beyond the memory are errors.
pub(crate) fn slice(address: u64, len: u64, at: &Bound<'_, PySlice>) -> PyResult<Range> {
    let py = at.py();
    let end = |name: &str, default: u64| -> PyResult<u64> {
        let given = at.getattr(name)?;
        if given.is_none() { Ok(default) } else { given.extract() }
    };
    let wrong = |why: String| {
        raise(py, &Error::new(Kind::OutOfRange, "use a range of registered memory").why(why))
    };
    if !at.getattr("step")?.is_none() {
        return Err(wrong("it has a step".into()));
    }
    let (start, stop) = (end("start", 0)?, end("stop", len)?);
    if start > stop || stop > len {
        return Err(wrong(format!("{start}:{stop} is not within its {len} bytes")));
    }
    Ok(Range(Descriptor::new(address + start, stop - start)))
}

/// A list of ranges: one range, a list or tuple of ranges, or an array of shape (n, 2) of unsigned
/// 64-bit integers (address, length).
pub(crate) fn list(given: &Bound<'_, PyAny>) -> PyResult<Vec<Descriptor>> {
    if let Ok(items) = given.cast::<PyList>() {
        return items.iter().map(|item| one(&item)?.ok_or_else(|| unknown(&item))).collect();
    }
    if let Some(range) = one(given)? {
        return Ok(vec![range]);
    }
    if let Ok(items) = given.cast::<PyTuple>() {
        return items.iter().map(|item| one(&item)?.ok_or_else(|| unknown(&item))).collect();
    }
    array(given)?.ok_or_else(|| unknown(given))
}

/// A range: registered memory as a whole, a part of it, or (address, length).
fn one(given: &Bound<'_, PyAny>) -> PyResult<Option<Descriptor>> {
    if let Ok(pair) = given.cast::<PyTuple>() {
        return Ok(pair.extract().ok().map(|(address, len)| Descriptor::new(address, len)));
    }
    if let Ok(range) = given.cast::<Range>() {
        return Ok(Some(range.get().0));
    }
    if let Ok(memory) = given.cast::<Memory>() {
        return Ok(Some(memory.get().whole(given.py())?));
    }
    if let Ok(memory) = given.cast::<RemoteMemory>() {
        return Ok(Some(memory.get().whole()));
    }
    Ok(None)
}

/// An array of shape (n, 2), such as numpy's of type `uint64`.
fn array(given: &Bound<'_, PyAny>) -> PyResult<Option<Vec<Descriptor>>> {
    let Ok(buffer) = PyBuffer::<u64>::get(given) else { return Ok(None) };
    let &[_, 2] = buffer.shape() else { return Ok(None) };
    let numbers = buffer.to_vec(given.py())?;
    Ok(Some(numbers.as_chunks().0.iter().map(|&[at, len]| Descriptor::new(at, len)).collect()))
}

fn unknown(given: &Bound<'_, PyAny>) -> PyErr {
    let class = given.get_type();
    let name = class.name().map(|name| name.to_string()).unwrap_or_default();
    PyTypeError::new_err(format!(
        "an object of type {name} is no range of memory; use registered memory, memory[start:end], \
         (address, length), a list of these, or an array of shape (n, 2) and type uint64"
    ))
}

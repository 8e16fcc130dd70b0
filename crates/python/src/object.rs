//! Python objects as memory.
//!
//! Asked in this order: our own `Buffer`; `__cuda_array_interface__`; `__dlpack__`; the buffer
//! protocol; (address, length) or (address, length, device).

use pyo3::buffer::PyUntypedBuffer;
use pyo3::exceptions::{PyAttributeError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyDict, PyMemoryView, PyTuple};
use warpwire::Error;
use warpwire::error::Kind;
use warpwire::mem::{self, Backend, DeviceAddr};

use crate::buffer::Buffer;
use crate::dlpack;
use crate::error::raise;

/// Memory that an object has.
pub(crate) enum Object {
    /// Memory that this package has allocated.
    Own(Py<Buffer>),
    /// Other memory.
    Foreign(Foreign),
}

/// Memory by address.
pub(crate) struct Foreign {
    pub address: u64,
    pub len: u64,
    pub read_only: bool,
    /// Keeps the memory allocated; `None` if the program guarantees that.
    pub owner: Option<Py<PyAny>>,
}

/// What the object says its memory is.
enum Claim {
    Nothing,
    Host,
    Cuda(Option<u32>),
    Label(String),
}

/// Refuses an object, with a sentence.
#[cold]
fn refuse(given: &Bound<'_, PyAny>, why: String, fix: &'static str) -> PyErr {
    let what = format!("use an object of type {} as memory", type_name(given));
    let error = Error::new(Kind::InvalidArgument, what).why(why);
    raise(given.py(), &if fix.is_empty() { error } else { error.fix(fix) })
}

fn type_name(given: &Bound<'_, PyAny>) -> String {
    let class = given.get_type();
    class.name().map(|name| name.to_string()).unwrap_or_default()
}

/// The memory of an object.
///
/// # Errors
/// `InvalidArgument` if the memory is not contiguous, is empty, or is not what the object says;
/// `TypeError` if the object has none.
pub(crate) fn memory_of(given: &Bound<'_, PyAny>) -> PyResult<Object> {
    if let Ok(buffer) = given.cast::<Buffer>() {
        return Ok(Object::Own(buffer.clone().unbind()));
    }
    let (memory, claim) = if let Ok(tuple) = given.cast::<PyTuple>() {
        by_address(tuple)?
    } else if let Some(interface) = attribute(given, "__cuda_array_interface__")? {
        cuda_array(given, &interface)?
    } else if let Some(found) = tensor(given)? {
        found
    } else {
        (buffer(given)?, Claim::Host)
    };
    if memory.len == 0 {
        return Err(refuse(given, "it is empty".into(), ""));
    }
    check(given, &memory, &claim)?;
    Ok(Object::Foreign(memory))
}

/// An attribute, if the object has it.
fn attribute<'py>(given: &Bound<'py, PyAny>, name: &str) -> PyResult<Option<Bound<'py, PyAny>>> {
    match given.getattr(name) {
        Ok(value) => Ok(Some(value)),
        Err(error) if error.is_instance_of::<PyAttributeError>(given.py()) => Ok(None),
        // For instance torch, for tensors that require gradients.
        Err(error) => Err(refuse(given, format!("its {name} says: {error}"), "")),
    }
}

fn by_address(tuple: &Bound<'_, PyTuple>) -> PyResult<(Foreign, Claim)> {
    let parts: (u64, u64, Option<String>) = match tuple.len() {
        2 => tuple.extract().map(|(address, len): (u64, u64)| (address, len, None)),
        _ => tuple.extract(),
    }
    .map_err(|_| {
        PyTypeError::new_err(
            "a tuple is memory as (address, length) or (address, length, device), with a device \
             such as \"host\" or \"cuda:0\"; give several objects as a list",
        )
    })?;
    let (address, len, device) = parts;
    let claim = match device.as_deref() {
        None => Claim::Nothing,
        Some("host") => Claim::Host,
        Some(label) => Claim::Label(label.to_owned()),
    };
    Ok((Foreign { address, len, read_only: false, owner: None }, claim))
}

/// `__cuda_array_interface__`, version 3.
fn cuda_array(
    given: &Bound<'_, PyAny>,
    interface: &Bound<'_, PyAny>,
) -> PyResult<(Foreign, Claim)> {
    let malformed =
        |what: &str| refuse(given, format!("its __cuda_array_interface__ has no valid {what}"), "");
    let fields = interface.cast::<PyDict>().map_err(|_| malformed("dictionary"))?;
    let field = |name: &str| -> PyResult<Option<Bound<'_, PyAny>>> {
        Ok(fields.get_item(name)?.filter(|value| !value.is_none()))
    };
    let (address, read_only): (u64, bool) =
        field("data")?.and_then(|data| data.extract().ok()).ok_or_else(|| malformed("data"))?;
    let shape: Vec<i64> =
        field("shape")?.and_then(|shape| shape.extract().ok()).ok_or_else(|| malformed("shape"))?;
    let kind: String = field("typestr")?
        .and_then(|kind| kind.extract().ok())
        .ok_or_else(|| malformed("typestr"))?;
    let digits = kind.trim_start_matches(|c: char| !c.is_ascii_digit());
    let itemsize = digits.parse().map_err(|_| malformed("typestr"))?;
    let strides: Option<Vec<i64>> = field("strides")?
        .map(|strides| strides.extract().map_err(|_| malformed("strides")))
        .transpose()?;
    if field("mask")?.is_some() {
        return Err(refuse(given, "it has a mask".into(), "use the array without its mask"));
    }
    let len = dense(given, &shape, strides.as_deref(), itemsize)?;
    let owner = Some(given.clone().unbind());
    Ok((Foreign { address, len, read_only, owner }, Claim::Cuda(None)))
}

/// `__dlpack__`; `None` if the object has none, or has a buffer instead.
fn tensor(given: &Bound<'_, PyAny>) -> PyResult<Option<(Foreign, Claim)>> {
    let Some(device) = attribute(given, "__dlpack_device__")? else { return Ok(None) };
    let Some(export) = attribute(given, "__dlpack__")? else { return Ok(None) };
    let (kind, id): (i32, i32) = device.call0()?.extract()?;
    let claim = match kind {
        dlpack::CPU => Claim::Host,
        dlpack::CUDA => Claim::Cuda(u32::try_from(id).ok()),
        dlpack::CUDA_HOST | dlpack::CUDA_MANAGED => Claim::Nothing,
        _ => {
            let why = format!("it is on a device of DLPack's type {kind}");
            return Err(refuse(given, why, "use memory of the host or of CUDA"));
        }
    };
    let options = PyDict::new(given.py());
    if matches!(kind, dlpack::CUDA | dlpack::CUDA_MANAGED) {
        // Registering accesses nothing, so nothing is to be ordered.
        options.set_item("stream", -1)?;
    }
    options.set_item("max_version", (1, 0))?;
    let exported = export.call((), Some(&options)).or_else(|error| {
        // Producers before DLPack 1.0 know no versions.
        if !error.is_instance_of::<PyTypeError>(given.py()) {
            return Err(error);
        }
        options.del_item("max_version")?;
        export.call((), Some(&options))
    });
    let capsule = match exported {
        Ok(capsule) => capsule,
        // For instance numpy, for types that DLPack does not know.
        Err(_) if PyMemoryView::from(given).is_ok() => return Ok(None),
        Err(error) => return Err(refuse(given, format!("its __dlpack__ says: {error}"), "")),
    };
    let wrong = |why: String| refuse(given, why, "");
    let capsule = capsule.cast::<PyCapsule>();
    let capsule = capsule.map_err(|_| wrong("its __dlpack__ returns no capsule".into()))?;
    let found = dlpack::describe(capsule).map_err(wrong)?;
    let len = dense(given, &found.shape, found.strides.as_deref(), found.itemsize)?;
    // The capsule keeps the tensor, and frees it at its end.
    let owner = Some(capsule.clone().into_any().unbind());
    let memory = Foreign { address: found.address, len, read_only: found.read_only, owner };
    Ok(Some((memory, claim)))
}

/// The buffer protocol.
fn buffer(given: &Bound<'_, PyAny>) -> PyResult<Foreign> {
    let py = given.py();
    // A memoryview of it keeps the memory in place: a bytearray, for instance, cannot be resized.
    let view = PyMemoryView::from(given).map_err(|error| {
        if error.is_instance_of::<PyTypeError>(py) {
            let name = type_name(given);
            return PyTypeError::new_err(format!(
                "an object of type {name} is no memory; use an object with __cuda_array_interface__, __dlpack__ \
                 or the buffer protocol, or (address, length, device)"
            ));
        }
        // For instance a memoryview that was released, or a file mapping that was closed.
        refuse(given, format!("its buffer cannot be used: {error}"), "")
    })?;
    let buffer = PyUntypedBuffer::get(&view)
        .map_err(|error| refuse(given, format!("its buffer cannot be used: {error}"), ""))?;
    if !buffer.is_c_contiguous() && !buffer.is_fortran_contiguous() {
        return Err(scattered(given));
    }
    let memory = Foreign {
        address: buffer.buf_ptr().addr() as u64,
        len: buffer.len_bytes() as u64,
        read_only: buffer.readonly(),
        owner: Some(view.into_any().unbind()),
    };
    buffer.release(py);
    Ok(memory)
}

fn scattered(given: &Bound<'_, PyAny>) -> PyErr {
    let fix = "make a contiguous copy, or register the whole and transfer ranges of it";
    refuse(given, "it is not contiguous".into(), fix)
}

/// The length in bytes of an array whose elements lie side by side, in row-major or column-major
/// order.
fn dense(
    given: &Bound<'_, PyAny>,
    shape: &[i64],
    strides: Option<&[i64]>,
    itemsize: u64,
) -> PyResult<u64> {
    let wrong = |why: &str| refuse(given, why.to_owned(), "");
    let mut len = itemsize;
    for extent in shape {
        let extent = u64::try_from(*extent).map_err(|_| wrong("its shape is negative"))?;
        len = len.checked_mul(extent).ok_or_else(|| wrong("it exceeds the address space"))?;
    }
    let Some(strides) = strides else { return Ok(len) };
    if strides.len() != shape.len() {
        return Err(wrong("it has not as many strides as dimensions"));
    }
    let dimensions = || shape.iter().copied().zip(strides.iter().copied());
    let row_major = is_dense(dimensions().rev(), itemsize);
    if len == 0 || row_major || is_dense(dimensions(), itemsize) {
        return Ok(len);
    }
    Err(scattered(given))
}

/// Whether each stride is the size of all dimensions before it.
fn is_dense(dimensions: impl Iterator<Item = (i64, i64)>, itemsize: u64) -> bool {
    let mut expected = itemsize as i64;
    for (extent, stride) in dimensions {
        // The stride of a single element has no meaning.
        if extent != 1 && stride != expected {
            return false;
        }
        expected = expected.saturating_mul(extent);
    }
    true
}

/// Compares what the object says with whose memory it is.
fn check(given: &Bound<'_, PyAny>, memory: &Foreign, claim: &Claim) -> PyResult<()> {
    if matches!(claim, Claim::Nothing) {
        return Ok(());
    }
    let owner = mem::owner_of(DeviceAddr::new(memory.address)).ok();
    let is_so = match (claim, &owner) {
        (Claim::Nothing, _) | (Claim::Host, None) => true,
        // CUDA owns pinned and managed memory, which are the host's as well.
        (Claim::Host, Some(device)) => device.info().backend == Backend::Cuda,
        (Claim::Cuda(ordinal), Some(device)) => {
            let info = device.info();
            info.backend == Backend::Cuda && ordinal.is_none_or(|wanted| wanted == info.ordinal)
        }
        (Claim::Label(label), Some(device)) => device.label() == *label,
        (Claim::Cuda(_) | Claim::Label(_), None) => false,
    };
    if is_so {
        return Ok(());
    }
    let said = match claim {
        Claim::Nothing => String::new(),
        Claim::Host => "the host".into(),
        Claim::Cuda(None) => "a CUDA device".into(),
        Claim::Cuda(Some(ordinal)) => format!("cuda:{ordinal}"),
        Claim::Label(label) => label.clone(),
    };
    let is = owner.map_or_else(
        || "is no memory of a device that this process uses".to_owned(),
        |device| format!("is memory of {}", device.label()),
    );
    let why = format!("it says that it is memory of {said}, but {:#x} {is}", memory.address);
    Err(refuse(given, why, "check that it has not been freed, and its device"))
}

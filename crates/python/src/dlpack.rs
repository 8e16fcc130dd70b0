//! DLPack: tensors of other libraries as memory, and ours for them.
//!
//! The layout is that of `dlpack.h` 1.0, and of the older one without a version.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_void};
use std::ptr::{NonNull, null_mut};

use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyCapsuleMethods};

/// Names of capsules that nobody has taken.
const PLAIN: &CStr = c"dltensor";
const VERSIONED: &CStr = c"dltensor_versioned";
/// In `flags`.
const READ_ONLY: u64 = 1;
/// The layout of later versions with the same first number is a superset.
const MAJOR: u32 = 1;
/// Type code of unsigned integers.
const UINT: u8 = 1;

pub(crate) const CPU: i32 = 1;
pub(crate) const CUDA: i32 = 2;
pub(crate) const CUDA_HOST: i32 = 3;
pub(crate) const CUDA_MANAGED: i32 = 13;

#[repr(C)]
#[derive(Clone, Copy)]
struct Device {
    kind: i32,
    id: i32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct DataType {
    code: u8,
    bits: u8,
    lanes: u16,
}

#[repr(C)]
struct Tensor {
    data: *mut c_void,
    device: Device,
    ndim: i32,
    dtype: DataType,
    shape: *mut i64,
    /// In elements; null if the tensor is dense, in row-major order.
    strides: *mut i64,
    byte_offset: u64,
}

#[repr(C)]
struct Plain {
    tensor: Tensor,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Plain)>,
}

#[repr(C)]
struct Versioned {
    version: [u32; 2],
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Versioned)>,
    flags: u64,
    tensor: Tensor,
}

const _: () = assert!(size_of::<Tensor>() == 48 && size_of::<Plain>() == 64);
const _: () = assert!(size_of::<Versioned>() == 80);

/// What a capsule says of its tensor. The memory is valid while the capsule lives: its destructor
/// frees the tensor unless somebody takes it.
pub(crate) struct Described {
    pub address: u64,
    pub itemsize: u64,
    pub shape: Vec<i64>,
    /// In bytes.
    pub strides: Option<Vec<i64>>,
    pub read_only: bool,
}

/// Reads a capsule.
///
/// # Errors
/// A sentence: it is no tensor, of another version, or its elements are no whole bytes.
pub(crate) fn describe(capsule: &Bound<'_, PyCapsule>) -> Result<Described, String> {
    let (tensor, read_only) = if let Ok(at) = capsule.pointer_checked(Some(VERSIONED)) {
        // SAFETY: by its name the capsule points to a versioned tensor, of which the version comes
        // first in all versions.
        let [major, minor] = unsafe { *at.cast::<[u32; 2]>().as_ref() };
        if major != MAJOR {
            return Err(format!("its tensor is of DLPack {major}.{minor}, not {MAJOR}"));
        }
        // SAFETY: of this version, so it has this layout.
        let versioned = unsafe { at.cast::<Versioned>().as_ref() };
        (&versioned.tensor, versioned.flags & READ_ONLY != 0)
    } else {
        let at = capsule.pointer_checked(Some(PLAIN)).map_err(|_| "its capsule is no tensor")?;
        // SAFETY: by its name the capsule points to such a tensor.
        (unsafe { &at.cast::<Plain>().as_ref().tensor }, false)
    };
    let bits = u64::from(tensor.dtype.bits) * u64::from(tensor.dtype.lanes);
    if !bits.is_multiple_of(8) {
        return Err(format!("its elements have {bits} bits, which are no whole bytes"));
    }
    let ndim = usize::try_from(tensor.ndim).map_err(|_| "it has less than no dimensions")?;
    let numbers = |at: *mut i64| {
        let at = NonNull::new(at)?;
        // SAFETY: arrays of a tensor have as many elements as it has dimensions.
        Some(unsafe { std::slice::from_raw_parts(at.as_ptr(), ndim) }.to_vec())
    };
    let itemsize = bits / 8;
    let in_bytes = |strides: Vec<i64>| {
        strides.into_iter().map(|stride| stride.saturating_mul(itemsize as i64)).collect()
    };
    Ok(Described {
        address: (tensor.data.addr() as u64).wrapping_add(tensor.byte_offset),
        itemsize,
        shape: numbers(tensor.shape).unwrap_or_default(),
        strides: numbers(tensor.strides).map(in_bytes),
        read_only,
    })
}

/// What a tensor of ours points to.
struct Owned {
    _owner: Py<PyAny>,
    shape: [i64; 1],
    strides: [i64; 1],
}

/// A capsule with `len` bytes at `address`, which `owner` keeps allocated; versioned if the
/// consumer knows that.
pub(crate) fn export<'py>(
    owner: Bound<'py, PyAny>,
    (address, len): (u64, u64),
    (kind, id): (i32, i32),
    max_version: Option<(u32, u32)>,
) -> PyResult<Bound<'py, PyCapsule>> {
    let py = owner.py();
    let shape = [i64::try_from(len).map_err(|_| PyBufferError::new_err("it is too long"))?];
    let owned = Box::new(Owned { _owner: owner.unbind(), shape, strides: [1] });
    let owned = Box::into_raw(owned);
    // SAFETY: just made, and not shared yet.
    let (shape, strides) = unsafe { (&raw mut (*owned).shape, &raw mut (*owned).strides) };
    let tensor = Tensor {
        data: std::ptr::with_exposed_provenance_mut(address as usize),
        device: Device { kind, id },
        ndim: 1,
        dtype: DataType { code: UINT, bits: 8, lanes: 1 },
        shape: shape.cast(),
        strides: strides.cast(),
        byte_offset: 0,
    };
    let context = owned.cast();
    let (pointer, name, destructor): (*mut c_void, _, ffi::PyCapsule_Destructor) =
        if max_version.is_some_and(|(major, _)| major >= MAJOR) {
            let deleter = Some(delete_versioned as unsafe extern "C" fn(_));
            let (version, flags) = ([MAJOR, 0], 0);
            let managed = Box::new(Versioned { version, context, deleter, flags, tensor });
            (Box::into_raw(managed).cast(), VERSIONED, drop_versioned)
        } else {
            let deleter = Some(delete_plain as unsafe extern "C" fn(_));
            let managed = Box::new(Plain { tensor, context, deleter });
            (Box::into_raw(managed).cast(), PLAIN, drop_plain)
        };
    // SAFETY: the name is static; the destructor fits the pointer.
    let capsule = unsafe { ffi::PyCapsule_New(pointer, name.as_ptr(), Some(destructor)) };
    // SAFETY: a new reference, or null with an exception set. In that case the tensor is leaked,
    // for want of memory.
    let capsule = unsafe { Bound::from_owned_ptr_or_err(py, capsule) }?;
    Ok(capsule.cast_into()?)
}

/// # Safety
/// Called once, by whoever has the tensor.
unsafe extern "C" fn delete_plain(managed: *mut Plain) {
    // SAFETY: made by `export`, of a box.
    let managed = unsafe { Box::from_raw(managed) };
    delete(managed.context.cast());
}

/// # Safety
/// As for `delete_plain`.
unsafe extern "C" fn delete_versioned(managed: *mut Versioned) {
    // SAFETY: as in `delete_plain`.
    let managed = unsafe { Box::from_raw(managed) };
    delete(managed.context.cast());
}

/// Drops the reference to the owner: here, and not at some later call of this package, because
/// memory of a GPU is scarce.
fn delete(owned: *mut Owned) {
    // Without an interpreter the process ends, and the memory with it.
    let _ = Python::try_attach(|_| {
        // SAFETY: made by `export`, of a box, and dropped once.
        drop(unsafe { Box::from_raw(owned) });
    });
}

/// The pointer of a capsule that nobody has taken: consumers rename what they take.
///
/// # Safety
/// `capsule` is a capsule, and the GIL is held.
unsafe fn untaken(capsule: *mut ffi::PyObject, name: &CStr) -> *mut c_void {
    // SAFETY: as the caller guarantees.
    unsafe {
        match ffi::PyCapsule_IsValid(capsule, name.as_ptr()) {
            1 => ffi::PyCapsule_GetPointer(capsule, name.as_ptr()),
            _ => null_mut(),
        }
    }
}

/// # Safety
/// Called by Python, when it frees a capsule.
unsafe extern "C" fn drop_plain(capsule: *mut ffi::PyObject) {
    // SAFETY: a capsule of `export`; the tensor is still ours.
    unsafe {
        let managed = untaken(capsule, PLAIN);
        if !managed.is_null() {
            delete_plain(managed.cast());
        }
    }
}

/// # Safety
/// As for `drop_plain`.
unsafe extern "C" fn drop_versioned(capsule: *mut ffi::PyObject) {
    // SAFETY: as in `drop_plain`.
    unsafe {
        let managed = untaken(capsule, VERSIONED);
        if !managed.is_null() {
            delete_versioned(managed.cast());
        }
    }
}

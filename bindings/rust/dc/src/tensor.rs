//! Element types, and how slices become tensors of the library.

use crate::error::{counted, Error, Result, Status};
use crate::sys;
use std::mem::size_of;
use std::os::raw::c_void;

/// An element type, as `enum dc_dtype`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[allow(missing_docs)]
#[repr(i32)]
pub enum DType {
    Float32 = sys::DC_FLOAT32,
    Float64 = sys::DC_FLOAT64,
    Float16 = sys::DC_FLOAT16,
    Bfloat16 = sys::DC_BFLOAT16,
    Int8 = sys::DC_INT8,
    Int32 = sys::DC_INT32,
    Int64 = sys::DC_INT64,
    Uint8 = sys::DC_UINT8,
    Int16 = sys::DC_INT16,
}

impl From<DType> for i32 {
    fn from(dtype: DType) -> i32 {
        dtype as i32
    }
}

impl DType {
    const ALL: [DType; 9] = [
        DType::Float32,
        DType::Float64,
        DType::Float16,
        DType::Bfloat16,
        DType::Int8,
        DType::Int32,
        DType::Int64,
        DType::Uint8,
        DType::Int16,
    ];

    pub(crate) fn from_raw(code: i32) -> Option<DType> {
        DType::ALL.into_iter().find(|dtype| *dtype as i32 == code)
    }

    /// Bytes of one element.
    pub fn size(self) -> usize {
        unsafe { sys::dc_dtype_size(self as i32) }
    }

    /// The name, as in "bfloat16".
    pub fn name(self) -> &'static str {
        unsafe { crate::error::text(sys::dc_dtype_name(self as i32)) }
    }
}

/// The bits of an IEEE 754 binary16.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(transparent)]
pub struct F16(pub u16);

/// The bits of a bfloat16: the upper half of an IEEE 754 binary32.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(transparent)]
pub struct Bf16(pub u16);

mod sealed {
    pub trait Sealed {}
}

/// Rust types that are element types of the library: plain numbers, for which every bit pattern is valid.
pub trait Element: sealed::Sealed + Copy + Default + Send + Sync + 'static {
    /// The library's name for the type.
    const DTYPE: DType;
}

macro_rules! elements {
    ($($rust:ty: $dtype:ident),* $(,)?) => {
        $(impl sealed::Sealed for $rust {}
        impl Element for $rust {
            const DTYPE: DType = DType::$dtype;
        })*
    };
}

elements! {
    f32: Float32, f64: Float64, F16: Float16, Bf16: Bfloat16, i8: Int8, i32: Int32, i64: Int64, u8: Uint8, i16: Int16,
}

/// A slice with a shape: a matrix or a batch of matrices for the operators of [`crate::Linalg`], a layer's inputs, a
/// piece of a state. Its elements are in row-major order.
///
/// ```
/// let a = dc::Tensor::new(&[1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0], &[2, 3])?;
/// assert_eq!(a.transposed().shape(), [3, 2]); // the same elements, seen otherwise
/// assert!(dc::Tensor::new(&[1.0f32; 5], &[2, 3]).is_err());
/// # Ok::<(), dc::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Tensor<'data, T> {
    data: &'data [T],
    shape: Vec<i64>,
    /// The strides of a transposed tensor; empty: row-major.
    strides: Vec<i64>,
}

impl<'data, T: Element> Tensor<'data, T> {
    /// Elements in row-major order, as many as the shape has.
    pub fn new(data: &'data [T], shape: &[i64]) -> Result<Tensor<'data, T>> {
        check_shape(shape, data.len())?;
        Ok(Tensor { data, shape: shape.to_vec(), strides: Vec::new() })
    }

    /// The tensor with its last two dimensions exchanged; the elements are not moved.
    pub fn transposed(&self) -> Tensor<'data, T> {
        let mut other = self.clone();
        if let [.., rows, columns] = other.shape[..] {
            if other.strides.is_empty() {
                other.strides = vec![1; other.shape.len()];
                for at in (0..other.shape.len() - 1).rev() {
                    let next = other.shape[at + 1].max(1); // operators refuse an empty one with too many
                    other.strides[at] = other.strides[at + 1].saturating_mul(next);
                }
            }
            let last = other.shape.len() - 1;
            other.strides.swap(last - 1, last);
            other.shape[last - 1] = columns;
            other.shape[last] = rows;
        }
        other
    }

    /// The lengths of its dimensions.
    pub fn shape(&self) -> &[i64] {
        &self.shape
    }

    /// The elements in memory order; for a transposed tensor, that of the original.
    pub fn data(&self) -> &'data [T] {
        self.data
    }

    /// A view for C, valid while this tensor is borrowed.
    pub(crate) fn view(&self) -> sys::dc_tensor {
        let strides = if self.strides.is_empty() { std::ptr::null() } else { self.strides.as_ptr() };
        sys::dc_tensor { strides, ..view(self.data.as_ptr().cast(), &self.shape, T::DTYPE) }
    }
}

/// The view of a slice for one call, during which slice and shape are borrowed.
pub(crate) fn view(data: *const c_void, shape: &[i64], dtype: DType) -> sys::dc_tensor {
    sys::dc_tensor {
        struct_size: size_of::<sys::dc_tensor>(),
        data: data as *mut c_void,
        shape: shape.as_ptr(),
        strides: std::ptr::null(),
        ndim: shape.len() as i32,
        dtype: dtype as i32,
        buffer: std::ptr::null_mut(),
    }
}

pub(crate) fn view_of<T: Element>(slice: &[T], length: &[i64; 1]) -> sys::dc_tensor {
    view(slice.as_ptr().cast(), length, T::DTYPE)
}

/// A tensor for the library to write to.
pub(crate) fn view_of_mut<T: Element>(slice: &mut [T], length: &[i64; 1]) -> sys::dc_tensor {
    let mut view = view_of(slice, length);
    view.data = slice.as_mut_ptr().cast();
    view
}

/// An empty tensor for the library to fill in.
pub(crate) fn output() -> sys::dc_tensor {
    sys::dc_tensor { struct_size: size_of::<sys::dc_tensor>(), ..Default::default() }
}

/// The number of elements of a shape, if it equals `length`.
pub(crate) fn check_shape(shape: &[i64], length: usize) -> Result<()> {
    let numel = shape.iter().try_fold(1i64, |product, n| product.checked_mul(*n));
    if numel == Some(length as i64) && shape.iter().all(|n| *n >= 0) {
        return Ok(());
    }
    Err(Error::new(
        Status::SHAPE,
        format!("shape = {shape:?}, must have the slice's {}", counted(length, "element", "elements")),
    ))
}

//! Operators on matrices and batches of them.

use crate::error::{check, Error, Result, Status};
use crate::linalg::Linalg;
use crate::options::{options, unchanged, Negative, Polynomial, Symmetry};
use crate::sys;
use crate::tensor::{view, DType, Element, Tensor};
use std::ptr;

options! {
    /// How symmetric matrices are read, computed and regularised; see `dc_spectral_options`.
    SpectralOptions = dc_spectral_options by dc_spectral_options_init {
        /// Added to each eigenvalue, as a minimum.
        eps_abs: f64 as unchanged,
        /// The same, relative to the largest eigenvalue.
        eps_rel: f64 as unchanged,
        /// Eigenvalues up to this part of the largest become 0, also under a negative power; -1: the type's rounding
        /// error.
        rank_rtol: f64 as unchanged,
        /// How the symmetric matrix is read.
        symmetry: Symmetry as i32::from,
        /// How negative eigenvalues are treated.
        negative: Negative as i32::from,
        /// The type of the decomposition: float32 or float64.
        precision: DType as i32::from,
        /// For [`Linalg::eigh`]: eigenvalues are in descending order.
        descending: bool as i32::from,
    }
}

/// The length of a dimension, counted from the last one; 0 if there is no such dimension, which the library refuses.
fn length<T: Element>(tensor: &Tensor<'_, T>, from_end: usize) -> i64 {
    tensor.shape().iter().rev().nth(from_end).copied().unwrap_or(0)
}

/// The shape of a result: the batch's length, if there is one, and then `lengths`.
fn batch_of<T: Element>(tensor: &Tensor<'_, T>, rest: &[i64]) -> Vec<i64> {
    let batch = tensor.shape().len().saturating_sub(2);
    [&tensor.shape()[..batch], rest].concat()
}

/// The number of elements of a result.
fn zeros<T: Element>(shape: &[i64]) -> Result<Vec<T>> {
    let numel = shape.iter().try_fold(1usize, |product, n| product.checked_mul(usize::try_from(*n).ok()?));
    let mut out = Vec::new();
    match numel {
        Some(numel) if out.try_reserve_exact(numel).is_ok() => out.resize(numel, T::default()),
        _ => {
            let text = format!("the result's shape is {shape:?}, for which there is no memory");
            return Err(Error::new(Status::NO_MEMORY, text));
        }
    }
    Ok(out)
}

/// Allocates a result, which `call` fills.
fn alloc_output<T: Element>(shape: &[i64], call: impl FnOnce(&mut sys::dc_tensor) -> i32) -> Result<Vec<T>> {
    let mut out: Vec<T> = zeros(shape)?;
    check(call(&mut view(out.as_mut_ptr().cast(), shape, T::DTYPE)))?;
    Ok(out)
}

/// Matrices are `[m, n]`, batches of them `[b, m, n]`, of float32 or float64 where nothing else is said; results are in
/// row-major order. See `dc_api.h`, chapter 13, for each operator's mathematics and errors.
///
/// ```
/// let linalg = dc::Linalg::new(&dc::Device::open("cpu")?, &dc::LinalgOptions::default())?;
/// let a = [5.0f64, 4.0, 4.0, 5.0];
/// let root = linalg.inverse_root(&dc::Tensor::new(&a, &[2, 2])?, 2, &dc::SpectralOptions::default())?;
/// assert!((root[0] - 2.0 / 3.0).abs() < 1e-12 && (root[1] + 1.0 / 3.0).abs() < 1e-12);
/// # Ok::<(), dc::Error>(())
/// ```
impl Linalg {
    /// Eigenvalues `[n]` of symmetric matrices, in ascending order unless the options say otherwise, and eigenvectors
    /// `[n, n]`, one per column in the same order.
    pub fn eigh<T: Element>(&self, a: &Tensor<'_, T>, options: &SpectralOptions) -> Result<(Vec<T>, Vec<T>)> {
        let lengths = batch_of(a, &[length(a, 0)]);
        let mut values: Vec<T> = zeros(&lengths)?;
        let vectors = alloc_output(a.shape(), |vectors| unsafe {
            let mut values = view(values.as_mut_ptr().cast(), &lengths, T::DTYPE);
            sys::dc_eigh(self.as_ptr(), &a.view(), &options.0, &mut values, vectors, ptr::null_mut(), 0)
        })?;
        Ok((values, vectors))
    }

    /// Powers (A + epsilon I)^power of symmetric matrices.
    pub fn matrix_power<T: Element>(&self, a: &Tensor<'_, T>, power: f64, options: &SpectralOptions) -> Result<Vec<T>> {
        alloc_output(a.shape(), |out| unsafe {
            sys::dc_matrix_power(self.as_ptr(), &a.view(), power, &options.0, out, ptr::null_mut(), 0)
        })
    }

    /// Inverse roots (A + epsilon I)^(-1 / root) of symmetric matrices, root from 1 to 64.
    pub fn inverse_root<T: Element>(&self, a: &Tensor<'_, T>, root: i32, options: &SpectralOptions) -> Result<Vec<T>> {
        let (basis, info) = (ptr::null_mut(), ptr::null_mut());
        alloc_output(a.shape(), |out| unsafe {
            sys::dc_matrix_inverse_root(self.as_ptr(), &a.view(), root, &options.0, basis, out, info, 0)
        })
    }

    /// The nearest matrices with orthonormal rows or columns. `steps`: number of steps of the polynomial; 0: its
    /// default.
    pub fn orthogonalize<T: Element>(&self, a: &Tensor<'_, T>, polynomial: Polynomial, steps: i32) -> Result<Vec<T>> {
        alloc_output(a.shape(), |out| unsafe {
            sys::dc_orthogonalize(self.as_ptr(), &a.view(), polynomial.into(), steps, out)
        })
    }

    /// The Kronecker product `[m * p, n * q]` of `[m, n]` and `[p, q]`.
    pub fn kron<T: Element>(&self, a: &Tensor<'_, T>, b: &Tensor<'_, T>) -> Result<Vec<T>> {
        let side = |from_end| length(a, from_end).saturating_mul(length(b, from_end));
        alloc_output(&[side(1), side(0)], |out| unsafe { sys::dc_kron(self.as_ptr(), &a.view(), &b.view(), out) })
    }

    /// A X B^T, which is kron(A, B) applied to X in row-major order, without forming that product. The result is `[m,
    /// p]` for `[m, n]`, `[p, q]` and `[n, q]`, of which the last may be a batch.
    pub fn kron_apply<T: Element>(&self, a: &Tensor<'_, T>, b: &Tensor<'_, T>, x: &Tensor<'_, T>) -> Result<Vec<T>> {
        alloc_output(&batch_of(x, &[length(a, 1), length(b, 1)]), |out| unsafe {
            sys::dc_kron_apply(self.as_ptr(), &a.view(), &b.view(), &x.view(), out)
        })
    }

    /// Products `[b, m, n]` of `[b, m, k]` and `[b, k, n]`; an operand without a batch is used for all. Also for
    /// float16 and bfloat16, with sums in float32.
    pub fn batch_matmul<T: Element>(&self, a: &Tensor<'_, T>, b: &Tensor<'_, T>) -> Result<Vec<T>> {
        let longer = if a.shape().len() < b.shape().len() { b } else { a };
        alloc_output(&batch_of(longer, &[length(a, 1), length(b, 0)]), |out| unsafe {
            sys::dc_batch_matmul(self.as_ptr(), &a.view(), &b.view(), 1.0, 0.0, out)
        })
    }
}

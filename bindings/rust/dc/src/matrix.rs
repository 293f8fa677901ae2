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
        /// Each eigenvalue is raised by this at least.
        eps_abs: f64 as unchanged,
        /// And by this part of the largest.
        eps_rel: f64 as unchanged,
        /// Eigenvalues up to this part of the largest become 0, also under a negative power; -1: the type's rounding.
        rank_rtol: f64 as unchanged,
        /// How the matrix is read.
        symmetry: Symmetry as i32::from,
        /// The treatment of negative eigenvalues.
        negative: Negative as i32::from,
        /// The type of the decomposition: float32 or float64.
        precision: DType as i32::from,
        /// Of [`Linalg::eigh`]: the largest eigenvalue first.
        descending: bool as i32::from,
    }
}

/// A length, counted from the last dimension on; 0 where there are not as many, which the library refuses.
fn length<T: Element>(tensor: &Tensor<'_, T>, from_end: usize) -> i64 {
    tensor.shape().iter().rev().nth(from_end).copied().unwrap_or(0)
}

/// The shape of a result: that of the batch, if there is one, before these.
fn batch_of<T: Element>(tensor: &Tensor<'_, T>, rest: &[i64]) -> Vec<i64> {
    let batch = tensor.shape().len().saturating_sub(2);
    [&tensor.shape()[..batch], rest].concat()
}

/// The elements of a result.
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

/// A result, which `call` fills in.
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
    /// Eigenvalues `[n]`, ascending unless the options say otherwise, and eigenvectors `[n, n]` of symmetric matrices,
    /// each in the column of its value's place.
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

    /// The nearest matrices with orthonormal rows or columns. `steps`: of the polynomial; 0: its own number.
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

    /// A X B^T, that is kron(A, B) applied to X taken row by row, without writing that out. The result is `[m, p]` of
    /// `[m, n]`, `[p, q]` and `[n, q]`, the last of which may be a batch.
    pub fn kron_apply<T: Element>(&self, a: &Tensor<'_, T>, b: &Tensor<'_, T>, x: &Tensor<'_, T>) -> Result<Vec<T>> {
        alloc_output(&batch_of(x, &[length(a, 1), length(b, 1)]), |out| unsafe {
            sys::dc_kron_apply(self.as_ptr(), &a.view(), &b.view(), &x.view(), out)
        })
    }

    /// Products `[b, m, n]` of `[b, m, k]` and `[b, k, n]`; one without the batch serves all. float16 and bfloat16 too,
    /// whose sums are float32.
    pub fn batch_matmul<T: Element>(&self, a: &Tensor<'_, T>, b: &Tensor<'_, T>) -> Result<Vec<T>> {
        let longer = if a.shape().len() < b.shape().len() { b } else { a };
        alloc_output(&batch_of(longer, &[length(a, 1), length(b, 0)]), |out| unsafe {
            sys::dc_batch_matmul(self.as_ptr(), &a.view(), &b.view(), 1.0, 0.0, out)
        })
    }
}

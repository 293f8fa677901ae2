//! The handle of second-order operators: its threads and its solver.

use crate::device::Device;
use crate::error::{check, text, Result};
use crate::options::{options, unchanged};
use crate::sys;
use std::ptr::{self, NonNull};

options! {
    /// The options of a [`Linalg`].
    LinalgOptions = dc_linalg_options by dc_linalg_options_init {
        /// Number of threads, with the caller's; 0, the default: as many as the process may use. Results do not depend
        /// on it.
        threads: i32 as unchanged,
        /// Uses the library's own eigensolver even if a LAPACK is found.
        plain: bool as i32::from,
    }
}

/// The threads, scratch memory and LAPACK of matrix operators and of optimizers. The operators are its methods.
/// Optimizers are made with it, and keep what they need of it.
#[derive(Debug)]
pub struct Linalg(NonNull<sys::dc_linalg>);

// Its functions are of the thread class [handle]: one thread at a time.
unsafe impl Send for Linalg {}

impl Linalg {
    /// Makes a handle on the device "cpu", as slices are in host memory.
    pub fn new(device: &Device, options: &LinalgOptions) -> Result<Linalg> {
        device.require_cpu()?;
        let mut linalg = ptr::null_mut();
        check(unsafe { sys::dc_linalg_create(device.as_ptr(), &options.0, &mut linalg) })?;
        Ok(Linalg(NonNull::new(linalg).expect("a handle")))
    }

    /// The handle, for calls that only [`crate::sys`] offers.
    pub fn as_ptr(&self) -> *mut sys::dc_linalg {
        self.0.as_ptr()
    }

    /// The solver of eigendecompositions: the LAPACK library's file name, or "libdc".
    pub fn solver(&self) -> &str {
        unsafe { text(sys::dc_linalg_solver(self.as_ptr())) }
    }
}

impl Drop for Linalg {
    fn drop(&mut self) {
        unsafe { sys::dc_linalg_destroy(self.as_ptr()) }
    }
}

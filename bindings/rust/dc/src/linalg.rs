//! The handle of second-order work: its threads and its solver.

use crate::device::Device;
use crate::error::{check, text, Result};
use crate::options::{options, unchanged};
use crate::sys;
use std::ptr::{self, NonNull};

options! {
    /// How a [`Linalg`] works.
    LinalgOptions = dc_linalg_options by dc_linalg_options_init {
        /// The caller's included; 0, the default: as many as the process may run on. Results do not depend on it.
        threads: i32 as unchanged,
        /// The library's own eigensolver even where a LAPACK is found.
        plain: bool as i32::from,
    }
}

/// The threads, the scratch memory and the LAPACK of matrix operators, which are its methods, and of optimizers, which
/// are made with one and keep what they need of it.
#[derive(Debug)]
pub struct Linalg(NonNull<sys::dc_linalg>);

// Its functions are of the class [handle]: one thread at a time.
unsafe impl Send for Linalg {}

impl Linalg {
    /// Makes a handle on the device "cpu", where slices are.
    pub fn new(device: &Device, options: &LinalgOptions) -> Result<Linalg> {
        device.require_cpu()?;
        let mut linalg = ptr::null_mut();
        check(unsafe { sys::dc_linalg_create(device.as_ptr(), &options.0, &mut linalg) })?;
        Ok(Linalg(NonNull::new(linalg).expect("a handle")))
    }

    /// The handle, for calls that only [`crate::sys`] has.
    pub fn as_ptr(&self) -> *mut sys::dc_linalg {
        self.0.as_ptr()
    }

    /// Where eigendecompositions come from: the file name of the LAPACK library, or "libdc".
    pub fn solver(&self) -> &str {
        unsafe { text(sys::dc_linalg_solver(self.as_ptr())) }
    }
}

impl Drop for Linalg {
    fn drop(&mut self) {
        unsafe { sys::dc_linalg_destroy(self.as_ptr()) }
    }
}

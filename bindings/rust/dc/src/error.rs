//! Statuses, and errors that carry the library's own text.

use crate::sys;
use std::ffi::{CStr, CString};
use std::fmt;
use std::os::raw::c_char;
use std::panic::{catch_unwind, AssertUnwindSafe};

/// Why a call failed; the numbers are those of `dc_status_code`.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Status(pub i32);

macro_rules! statuses {
    ($($name:ident = $value:ident),* $(,)?) => {
        #[allow(missing_docs)]
        impl Status {
            $(pub const $name: Status = Status(sys::$value);)*
        }
    };
}

statuses! {
    INVALID = DC_E_INVALID, NOT_FOUND = DC_E_NOT_FOUND, EXISTS = DC_E_EXISTS, STATE = DC_E_STATE, STAGE = DC_E_STAGE,
    DTYPE = DC_E_DTYPE, SHAPE = DC_E_SHAPE, BUSY = DC_E_BUSY, NO_MEMORY = DC_E_NO_MEMORY, NO_DEVICE = DC_E_NO_DEVICE,
    UNSUPPORTED = DC_E_UNSUPPORTED, BUFFER_TOO_SMALL = DC_E_BUFFER_TOO_SMALL,
    NOT_FINITE = DC_E_NOT_FINITE, NOT_SYMMETRIC = DC_E_NOT_SYMMETRIC, NOT_POSITIVE = DC_E_NOT_POSITIVE,
    NOT_CONVERGED = DC_E_NOT_CONVERGED, MISMATCH = DC_E_MISMATCH,
    TIMEOUT = DC_E_TIMEOUT, PEER_DEAD = DC_E_PEER_DEAD, ABORTED = DC_E_ABORTED, CALLBACK = DC_E_CALLBACK,
    SYSTEM = DC_E_SYSTEM, CORRUPT = DC_E_CORRUPT, DEVICE = DC_E_DEVICE, INTERNAL = DC_E_INTERNAL,
}

impl Status {
    /// The identifier, as in "DC_E_INVALID".
    pub fn name(self) -> &'static str {
        unsafe { text(sys::dc_status_name(self.0)) }
    }

    /// The meaning, as a sentence.
    pub fn meaning(self) -> &'static str {
        unsafe { text(sys::dc_status_string(self.0)) }
    }
}

impl fmt::Debug for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A failed call: its status, and a sentence that names the argument, its value and what is allowed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    status: Status,
    text: String,
}

/// The result of a call.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    pub(crate) fn new(status: Status, text: impl Into<String>) -> Error {
        Error { status, text: text.into() }
    }

    /// The status.
    pub fn status(&self) -> Status {
        self.status
    }

    /// The library's text.
    pub fn text(&self) -> &str {
        &self.text
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.text, self.status.name())
    }
}

impl std::error::Error for Error {}

/// Text of the library as &str. The caller chooses its lifetime.
pub(crate) unsafe fn text<'a>(pointer: *const c_char) -> &'a str {
    CStr::from_ptr(pointer).to_str().unwrap_or("(a text that is not UTF-8)")
}

/// The result of a call that this thread has just made.
pub(crate) fn check(status: i32) -> Result<()> {
    if status == sys::DC_OK {
        return Ok(());
    }
    let sentence = unsafe { CStr::from_ptr(sys::dc_last_error()) }.to_string_lossy().into_owned();
    Err(Error::new(Status(status), sentence))
}

/// Formats "1 rank", "2 ranks".
pub(crate) fn counted(count: usize, one: &str, many: &str) -> String {
    format!("{count} {}", if count == 1 { one } else { many })
}

/// A name for the library. A NUL in it is refused here, since C would cut the name off there.
pub(crate) fn c_name(what: &str, name: &str) -> Result<CString> {
    CString::new(name).map_err(|_| Error::new(Status::INVALID, format!("{what} = {name:?}, must not contain NUL")))
}

/// A callback's result; None if it panicked, which must not unwind into C. The panic hook has printed what it says.
pub(crate) fn caught<R>(call: impl FnOnce() -> R) -> Option<R> {
    let payload = match catch_unwind(AssertUnwindSafe(call)) {
        Ok(result) => return Some(result),
        Err(payload) => payload,
    };
    if let Err(again) = catch_unwind(AssertUnwindSafe(|| drop(payload))) {
        std::mem::forget(again); // its drop may panic, too
    }
    None
}

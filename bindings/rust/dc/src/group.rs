//! Groups: several collectives of a communicator with one handshake.

use crate::comm::{Comm, ReduceOp};
use crate::error::{check, Error, Result, Status};
use crate::sys;
use crate::tensor::Element;
use std::panic::{catch_unwind, resume_unwind, AssertUnwindSafe};
use std::ptr;

impl Comm {
    /// In a group the library keeps slices until the group ends, longer than a call of the communicator borrows them.
    pub(crate) fn ensure_ungrouped(&self, call: &str) -> Result<()> {
        if self.grouped.get() {
            let text = format!("{call}: a group is open, which has {call} of its own");
            return Err(Error::new(Status::STATE, text));
        }
        Ok(())
    }

    /// Several gathers, or several reduce-scatters, with one handshake: `fill` names them, and they are done when this
    /// returns. If `fill` fails or panics, the communicator is aborted, since the other ranks count on its part.
    pub fn group<'slices, F>(&'slices self, fill: F) -> Result<()>
    where
        F: FnOnce(&mut Group<'slices>) -> Result<()>,
    {
        check(unsafe { sys::dc_comm_group_begin(self.as_ptr()) })?;
        let mut group = Group { comm: self };
        self.grouped.set(true);
        let filled = catch_unwind(AssertUnwindSafe(|| fill(&mut group)));
        self.grouped.set(false);
        if !matches!(filled, Ok(Ok(()))) {
            self.abort_handle().abort("a rank left a group of collectives half filled");
        }
        // The library forgets the slices here, whatever comes of it.
        let ended = check(unsafe { sys::dc_comm_group_end(self.as_ptr(), ptr::null_mut()) });
        match filled {
            Ok(filled) => filled.and(ended),
            Err(panic) => resume_unwind(panic),
        }
    }
}

/// The collectives of a [`Comm::group`]; the slices are borrowed until it returns.
#[derive(Debug)]
pub struct Group<'slices> {
    comm: &'slices Comm,
}

impl<'slices> Group<'slices> {
    /// As [`Comm::all_gather`].
    pub fn all_gather<T: Element>(&mut self, send: &'slices [T], recv: &'slices mut [T]) -> Result<()> {
        unsafe { self.comm.queue_all_gather(send, recv, None) }
    }

    /// As [`Comm::reduce_scatter`].
    pub fn reduce_scatter<T: Element>(
        &mut self,
        send: &'slices [T],
        recv: &'slices mut [T],
        op: ReduceOp,
    ) -> Result<()> {
        unsafe { self.comm.queue_reduce_scatter(send, recv, None, op) }
    }
}

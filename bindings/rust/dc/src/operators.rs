//! The operators: gather, reduce, offload, reload.

use crate::buffer::{Buffer, GatheredParam};
use crate::context::{unknown, Context};
use crate::error::{check, Error, Result, Status};
use crate::report::lengths;
use crate::sys;
use crate::tensor::{check_shape, output, view, view_of, DType, Element};
use std::ptr;

impl Context {
    /// Starts to gather parameters that [`Context::gather`] will need.
    pub fn prefetch(&self, graph: i64, ids: &[i64]) -> Result<()> {
        let count = ids.len() as i64;
        check(unsafe { sys::dc_prefetch_params_fused(self.as_ptr(), graph, ids.as_ptr(), ptr::null(), count) })?;
        self.gathering.borrow_mut().extend(ids);
        Ok(())
    }

    /// Gathers a parameter's full weights, cast to T, and waits for them. The caller owns the result; dropping it frees
    /// its memory. Weights can be changed only while no result is alive.
    pub fn gather<T: Element>(&self, graph: i64, id: i64) -> Result<GatheredParam<'_, T>> {
        let (dtype, mut out) = (T::DTYPE as i32, output());
        check(unsafe { sys::dc_allgather_param(self.as_ptr(), ptr::null(), graph, id, dtype, &mut out) })?;
        self.gathering.borrow_mut().insert(id);
        let shape = self.params.get(&id).ok_or_else(|| unknown(id))?.shape.clone();
        let mut buffer = ptr::null_mut();
        check(unsafe { sys::dc_take_param(self.as_ptr(), graph, id, dtype, &mut buffer) })?;
        self.gathering.borrow_mut().remove(&id);
        Ok(unsafe { GatheredParam::new(Buffer::from_raw(buffer), shape) })
    }

    /// Queues a parameter's whole gradient for averaging over ranks; the caller may reuse it when this returns. After
    /// [`Context::end_backward`] the average is in the registered memory.
    pub fn reduce_grad<T: Element>(&self, graph: i64, id: i64, grad: &[T]) -> Result<()> {
        let length = [grad.len() as i64];
        let status = unsafe { sys::dc_reduce_grad(self.as_ptr(), &view_of(grad, &length), graph, id) };
        // Pieces of a large gradient may still be in flight when the group fails, for instance for lack of memory.
        let failed = status == sys::DC_E_NO_MEMORY || status <= sys::DC_E_MISMATCH;
        self.reducing.set(self.reducing.get() || status == sys::DC_OK || failed);
        check(status)
    }

    /// Waits until all gradients have been reduced. `release_buckets` also frees the buckets' memory.
    pub fn end_backward(&self, graph: i64, release_buckets: bool) -> Result<()> {
        check(unsafe { sys::dc_end_backward(self.as_ptr(), graph, i32::from(release_buckets)) })?;
        self.reducing.set(false);
        Ok(())
    }

    /// Copies a tensor to host memory, which the context keeps under the caller's id.
    pub fn offload<T: Element>(&self, graph: i64, id: i64, tensor: &[T], shape: &[i64]) -> Result<()> {
        check_shape(shape, tensor.len())?;
        let (a, mut out) = (view(tensor.as_ptr().cast(), shape, T::DTYPE), output());
        check(unsafe { sys::dc_offload_tensor(self.as_ptr(), &a, graph, id, &mut out) })?;
        check(unsafe { sys::dc_wait_offload(self.as_ptr(), &a, graph, id, &mut out) })
    }

    /// Copies an offloaded tensor back to the device.
    pub fn reload<T: Element>(&self, graph: i64, id: i64) -> Result<GatheredParam<'_, T>> {
        let mut out = output();
        check(unsafe { sys::dc_reload_tensor(self.as_ptr(), ptr::null(), graph, id, &mut out) })?;
        check(unsafe { sys::dc_wait_reload(self.as_ptr(), ptr::null(), graph, id, &mut out) })?;
        if out.dtype != T::DTYPE as i32 {
            let is = DType::from_raw(out.dtype).map_or("unknown", DType::name);
            return Err(Error::new(Status::DTYPE, format!("id = {id} is of {is}, not {}", T::DTYPE.name())));
        }
        let buffer = unsafe { Buffer::from_raw(sys::dc_buffer_retain(out.buffer)) };
        Ok(unsafe { GatheredParam::new(buffer, lengths(out.shape, out.ndim)) })
    }

    /// Drops the device copy of a shard that is in host memory.
    pub fn offload_parameter(&self, graph: i64, id: i64) -> Result<()> {
        check(unsafe { sys::dc_offload_parameter(self.as_ptr(), ptr::null(), graph, id) })
    }

    /// Copies a shard that is in host memory to the device, where gathers read it.
    pub fn reload_parameter(&self, graph: i64, id: i64) -> Result<()> {
        check(unsafe { sys::dc_reload_parameter(self.as_ptr(), ptr::null(), graph, id) })?;
        self.gathering.borrow_mut().insert(id); // the copy reads the shard until the next gather has waited for it
        Ok(())
    }
}

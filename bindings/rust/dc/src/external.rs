//! Communicators over the caller's own collectives.

use crate::comm::{Comm, CommOptions};
use crate::error::{caught, check, Result};
use crate::sys;
use crate::tensor::DType;
use std::mem::size_of;
use std::os::raw::c_void;
use std::ptr;

/// The error of a failed collective: the caller's own number, which appears in the error's text on this rank; 0 counts
/// as [`Status::INTERNAL`](crate::Status::INTERNAL).
pub type External<T> = std::result::Result<T, i32>;

/// A transport that libdc does not have. Each function blocks until it is done; it runs on one of libdc's threads or on
/// the caller's, and must not call libdc. A panic counts as an error. Slices are the bytes of elements of `dtype`.
/// C's table also has `split`, without which [`Comm::split`] is [`Status::UNSUPPORTED`](crate::Status::UNSUPPORTED),
/// and `all_to_all`; for these see [`crate::sys`].
pub trait Collectives: Send + Sync + Sized + 'static {
    /// Whether [`Collectives::dup`] makes independent groups. Otherwise gathers and reductions share one stream.
    const CAN_DUP: bool = false;

    /// Fills `recv` with every rank's `send` in rank order.
    fn all_gather(&self, send: &[u8], recv: &mut [u8], dtype: DType) -> External<()>;
    /// Fills `recv` with the sum over ranks of this rank's block of `send`.
    fn reduce_scatter(&self, send: &[u8], recv: &mut [u8], dtype: DType) -> External<()>;
    /// Copies `data` of rank `root` to every rank.
    fn broadcast(&self, data: &mut [u8], root: i32) -> External<()>;
    /// Returns after every rank has called.
    fn barrier(&self) -> External<()>;
    /// Makes an independent group of the same ranks.
    fn dup(&self) -> External<Self> {
        Err(sys::DC_E_UNSUPPORTED)
    }
    /// Makes blocked calls return an error, and also a call that has begun but blocks only later. It is called at the
    /// deadline, by `Comm::abort`, and when only this rank cannot go on.
    fn abort(&self) {}
}

struct User<C> {
    collectives: C,
    world_size: usize,
}

impl Comm {
    /// Makes a communicator over the caller's collectives, which are dropped when the library no longer needs them.
    pub fn external<C: Collectives>(collectives: C, rank: i32, size: i32, options: &CommOptions) -> Result<Comm> {
        crate::check_version()?;
        let user = Box::into_raw(Box::new(User { collectives, world_size: usize::try_from(size).unwrap_or(0) }));
        let table = sys::dc_comm_callbacks {
            struct_size: size_of::<sys::dc_comm_callbacks>(),
            all_gather: Some(all_gather::<C>),
            reduce_scatter: Some(reduce_scatter::<C>),
            broadcast: Some(broadcast::<C>),
            barrier: Some(barrier::<C>),
            dup: if C::CAN_DUP { Some(dup::<C>) } else { None },
            abort: Some(abort::<C>),
            destroy_user: Some(destroy_user::<C>),
            user: user.cast(),
            split: None,
            all_to_all: None,
        };
        let mut comm = ptr::null_mut();
        let status = unsafe { sys::dc_comm_create_external(&table, rank, size, &options.table(), &mut comm) };
        check(status).map_err(|error| {
            drop(unsafe { Box::from_raw(user) }); // no communicator owns it
            error
        })?;
        Ok(unsafe { Comm::from_raw(comm) })
    }
}

/// The number of an error without one of its own: a panic, whose message the panic hook has printed, or 0, which means
/// success in C.
const FAILED: i32 = sys::DC_E_INTERNAL;

fn guarded(call: impl FnOnce() -> External<()>) -> i32 {
    match caught(call) {
        Some(Ok(())) => 0,
        Some(Err(0)) | None => FAILED,
        Some(Err(code)) => code,
    }
}

/// The number of bytes of `ranks` blocks of `count` elements.
fn bytes(count: i64, dtype: i32, ranks: usize) -> External<(usize, DType)> {
    let dtype = DType::from_raw(dtype).ok_or(sys::DC_E_DTYPE)?;
    Ok((usize::try_from(count).map_err(|_| sys::DC_E_INVALID)? * dtype.size() * ranks, dtype))
}

unsafe fn read<'a>(data: *const c_void, length: usize) -> &'a [u8] {
    if length == 0 {
        return &[];
    }
    std::slice::from_raw_parts(data.cast(), length)
}

unsafe fn write<'a>(data: *mut c_void, length: usize) -> &'a mut [u8] {
    if length == 0 {
        return &mut [];
    }
    std::slice::from_raw_parts_mut(data.cast(), length)
}

unsafe extern "C" fn all_gather<C: Collectives>(
    send: *const c_void,
    recv: *mut c_void,
    count: i64,
    dtype: i32,
    user: *mut c_void,
) -> i32 {
    let user = &*(user as *const User<C>);
    guarded(|| {
        let (sent, dtype) = bytes(count, dtype, 1)?;
        user.collectives.all_gather(read(send, sent), write(recv, sent * user.world_size), dtype)
    })
}

unsafe extern "C" fn reduce_scatter<C: Collectives>(
    send: *const c_void,
    recv: *mut c_void,
    count: i64,
    dtype: i32,
    user: *mut c_void,
) -> i32 {
    let user = &*(user as *const User<C>);
    guarded(|| {
        let (received, dtype) = bytes(count, dtype, 1)?;
        user.collectives.reduce_scatter(read(send, received * user.world_size), write(recv, received), dtype)
    })
}

unsafe extern "C" fn broadcast<C: Collectives>(data: *mut c_void, bytes: i64, root: i32, user: *mut c_void) -> i32 {
    let user = &*(user as *const User<C>);
    guarded(|| user.collectives.broadcast(write(data, bytes as usize), root))
}

unsafe extern "C" fn barrier<C: Collectives>(user: *mut c_void) -> i32 {
    let user = &*(user as *const User<C>);
    guarded(|| user.collectives.barrier())
}

unsafe extern "C" fn dup<C: Collectives>(user: *mut c_void, new_user: *mut *mut c_void) -> i32 {
    let user = &*(user as *const User<C>);
    guarded(|| {
        let copy = User { collectives: user.collectives.dup()?, world_size: user.world_size };
        *new_user = Box::into_raw(Box::new(copy)).cast();
        Ok(())
    })
}

unsafe extern "C" fn abort<C: Collectives>(user: *mut c_void) {
    let user = &*(user as *const User<C>);
    guarded(|| {
        user.collectives.abort();
        Ok(())
    });
}

unsafe extern "C" fn destroy_user<C: Collectives>(user: *mut c_void) {
    guarded(|| {
        drop(Box::from_raw(user as *mut User<C>));
        Ok(())
    });
}

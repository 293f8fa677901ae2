//! Memory of the library, and the memory of registered parameters.

use crate::sys;
use crate::tensor::{DType, Element};
use std::any::Any;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::os::raw::c_void;
use std::ptr::NonNull;

/// Kinds of memory for [`crate::Context::memory`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
#[repr(i32)]
pub enum MemoryKind {
    /// The device's own memory.
    Device = sys::DC_MEMORY_DEVICE,
    /// Memory that peers on this machine can read in place.
    Shared = sys::DC_MEMORY_SHARED,
    /// Host memory that the device copies fast.
    Host = sys::DC_MEMORY_HOST,
}

/// A reference to memory of the library, which is freed with its last reference.
#[derive(Debug)]
pub struct Buffer(NonNull<sys::dc_buffer>);

// All functions of a buffer are of the thread class [any].
unsafe impl Send for Buffer {}
unsafe impl Sync for Buffer {}

impl Buffer {
    /// Takes over one reference.
    pub(crate) unsafe fn from_raw(buffer: *mut sys::dc_buffer) -> Buffer {
        Buffer(NonNull::new(buffer).expect("a buffer"))
    }

    /// The first byte; null once the library has taken the memory back.
    pub fn data(&self) -> *mut c_void {
        unsafe { sys::dc_buffer_data(self.0.as_ptr()) }
    }

    /// Number of usable bytes.
    pub fn bytes(&self) -> usize {
        unsafe { sys::dc_buffer_bytes(self.0.as_ptr()) as usize }
    }

    /// The elements. The buffer must hold `length` elements, and must not be written while they are borrowed.
    unsafe fn slice<T: Element>(&self, length: usize) -> &[T] {
        match NonNull::new(self.data() as *mut T) {
            Some(data) if length > 0 => std::slice::from_raw_parts(data.as_ptr(), length),
            _ => &[],
        }
    }
}

impl Clone for Buffer {
    fn clone(&self) -> Buffer {
        unsafe { Buffer::from_raw(sys::dc_buffer_retain(self.0.as_ptr())) }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        unsafe { sys::dc_buffer_release(self.0.as_ptr()) }
    }
}

/// A tensor that the library made, complete and ready to read: a gathered parameter, or a reloaded tensor. Dropping it
/// frees its memory. The lifetime ensures that weights change only while none is alive.
#[derive(Debug)]
pub struct GatheredParam<'context, T> {
    buffer: Buffer,
    shape: Vec<i64>,
    length: usize,
    context: PhantomData<&'context T>,
}

impl<T: Element> GatheredParam<'_, T> {
    /// `buffer` must hold a ready tensor of T with this shape.
    pub(crate) unsafe fn new(buffer: Buffer, shape: Vec<i64>) -> Self {
        let length = shape.iter().product::<i64>() as usize;
        assert!(length * std::mem::size_of::<T>() <= buffer.bytes(), "a buffer shorter than its tensor");
        GatheredParam { buffer, shape, length, context: PhantomData }
    }

    /// The lengths of its dimensions; the elements are in row-major order.
    pub fn shape(&self) -> &[i64] {
        &self.shape
    }
}

impl<T: Element> Deref for GatheredParam<'_, T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        unsafe { self.buffer.slice(self.length) }
    }
}

/// Memory that a context can own for a parameter: a `Vec`, or memory of the library for peers to read.
#[derive(Debug)]
pub struct Memory<T: Element>(Storage<T>);

#[derive(Debug)]
enum Storage<T> {
    Rust(Vec<T>),
    Library(Buffer, usize),
}

impl<T: Element> Memory<T> {
    /// The buffer must hold `length` elements, be initialised, and have no other owner.
    pub(crate) unsafe fn from_buffer(buffer: Buffer, length: usize) -> Memory<T> {
        Memory(Storage::Library(buffer, length))
    }
}

impl<T: Element> From<Vec<T>> for Memory<T> {
    fn from(elements: Vec<T>) -> Memory<T> {
        Memory(Storage::Rust(elements))
    }
}

impl<T: Element> Deref for Memory<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        match &self.0 {
            Storage::Rust(elements) => elements,
            Storage::Library(buffer, length) => unsafe { buffer.slice(*length) },
        }
    }
}

impl<T: Element> DerefMut for Memory<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        match &mut self.0 {
            Storage::Rust(elements) => elements,
            Storage::Library(buffer, length) => match NonNull::new(buffer.data() as *mut T) {
                Some(data) if *length > 0 => unsafe { std::slice::from_raw_parts_mut(data.as_ptr(), *length) },
                _ => &mut [],
            },
        }
    }
}

/// Memory whose element type is known only at run time.
pub(crate) trait AnyMemory: Any + Send {
    fn dtype(&self) -> DType;
    fn as_any(&mut self) -> &mut dyn Any;
    fn as_mut_ptr(&mut self) -> *mut c_void;
    fn length(&self) -> usize;
}

impl<T: Element> AnyMemory for Memory<T> {
    fn dtype(&self) -> DType {
        T::DTYPE
    }

    fn as_any(&mut self) -> &mut dyn Any {
        self
    }

    fn as_mut_ptr(&mut self) -> *mut c_void {
        self.deref_mut().as_mut_ptr().cast()
    }

    fn length(&self) -> usize {
        self.len()
    }
}

//! Devices, streams and events.

use crate::error::{c_name, caught, check, Error, Result, Status};
use crate::sys;
use std::alloc::{GlobalAlloc, Layout};
use std::mem::size_of;
use std::os::raw::c_void;
use std::ptr::{self, NonNull};
use std::time::Duration;

/// A limit in nanoseconds; `None` is the library's default.
pub(crate) fn nanoseconds(limit: Option<Duration>) -> i64 {
    limit.map_or(0, |limit| i64::try_from(limit.as_nanos()).unwrap_or(i64::MAX).max(1))
}

macro_rules! handle {
    ($(#[$doc:meta])* $name:ident, $raw:ident, $destroy:ident) => {
        $(#[$doc])*
        #[derive(Debug)]
        pub struct $name(NonNull<sys::$raw>);

        // All functions of the handle are of the thread class [any].
        unsafe impl Send for $name {}
        unsafe impl Sync for $name {}

        impl $name {
            /// The handle, for calls that only [`crate::sys`] offers.
            pub fn as_ptr(&self) -> *mut sys::$raw {
                self.0.as_ptr()
            }
        }

        impl Drop for $name {
            fn drop(&mut self) {
                unsafe { sys::$destroy(self.0.as_ptr()) }
            }
        }
    };
}

handle!(
    /// A compute device. The CPU is always available.
    Device,
    dc_device,
    dc_device_destroy
);
handle!(
    /// A queue of work that runs in order: on the CPU, a thread. Dropping it waits for queued work.
    Stream,
    dc_stream,
    dc_stream_destroy
);
handle!(
    /// A point in a stream that others can wait for.
    Event,
    dc_event,
    dc_event_destroy
);

impl Device {
    /// Opens a device by name: "cpu". A card's device ("cuda:0") offers streams and events here. Functions that compute
    /// on it are in [`crate::sys`], since slices of safe Rust are in host memory.
    pub fn open(name: &str) -> Result<Device> {
        Device::open_with(name, ptr::null())
    }

    /// Opens a device whose memory comes from an allocator. The allocator is dropped with the last object that keeps
    /// the device alive: its handle, its streams, contexts and buffers.
    pub fn with_allocator<A: GlobalAlloc + Send + Sync + 'static>(name: &str, allocator: A) -> Result<Device> {
        let user = Box::into_raw(Box::new(allocator));
        let table = sys::dc_allocator {
            struct_size: size_of::<sys::dc_allocator>(),
            alloc: Some(alloc::<A>),
            free: Some(free::<A>),
            destroy_user: Some(destroy::<A>),
            user: user.cast(),
        };
        let options = sys::dc_device_options {
            struct_size: size_of::<sys::dc_device_options>(),
            allocator: &table,
            max_pinned_bytes: 0,
        };
        let device = Device::open_with(name, &options);
        if device.is_err() {
            drop(unsafe { Box::from_raw(user) }); // it has no owner
        }
        device
    }

    fn open_with(name: &str, options: *const sys::dc_device_options) -> Result<Device> {
        crate::check_version()?;
        let name = c_name("name", name)?;
        let mut device = ptr::null_mut();
        check(unsafe { sys::dc_device_open(name.as_ptr(), options, &mut device) })?;
        Ok(Device(NonNull::new(device).expect("a device")))
    }

    /// Fails unless the device is the CPU, since this crate's slices are in host memory.
    pub(crate) fn require_cpu(&self) -> Result<()> {
        if self.name() != "cpu" {
            let text = format!("device = {:?}, must be \"cpu\": slices are in the host's memory", self.name());
            return Err(Error::new(Status::UNSUPPORTED, text));
        }
        Ok(())
    }

    /// The name with which it was opened.
    pub fn name(&self) -> &str {
        unsafe { crate::error::text(sys::dc_device_name(self.as_ptr())) }
    }
}

unsafe extern "C" fn alloc<A: GlobalAlloc>(bytes: i64, align: i64, user: *mut c_void) -> *mut c_void {
    let allocator = &*(user as *const A);
    let layout = Layout::from_size_align(bytes.max(1) as usize, align as usize);
    let block = caught(|| layout.map(|layout| allocator.alloc(layout)));
    block.map_or(ptr::null_mut(), |block| block.map_or(ptr::null_mut(), |block| block.cast()))
}

unsafe extern "C" fn free<A: GlobalAlloc>(block: *mut c_void, bytes: i64, align: i64, user: *mut c_void) {
    let allocator = &*(user as *const A);
    let layout = Layout::from_size_align_unchecked(bytes.max(1) as usize, align as usize);
    let _ = caught(|| allocator.dealloc(block.cast(), layout));
}

unsafe extern "C" fn destroy<A>(user: *mut c_void) {
    let _ = caught(|| drop(Box::from_raw(user as *mut A)));
}

impl Stream {
    /// Makes a stream on this device.
    pub fn new(device: &Device) -> Result<Stream> {
        let mut stream = ptr::null_mut();
        check(unsafe { sys::dc_stream_create(device.as_ptr(), &mut stream) })?;
        Ok(Stream(NonNull::new(stream).expect("a stream")))
    }

    /// Waits until all queued work is done, at most for `limit`.
    pub fn synchronize(&self, limit: Option<Duration>) -> Result<()> {
        check(unsafe { sys::dc_stream_synchronize(self.as_ptr(), nanoseconds(limit)) })
    }

    /// Queues a function. If it panics, the panic hook prints the message, and the stream continues.
    pub fn call<F: FnOnce() + Send + 'static>(&self, work: F) -> Result<()> {
        let user = Box::into_raw(Box::new(work));
        let status = unsafe { sys::dc_stream_call(self.as_ptr(), Some(run::<F>), user.cast()) };
        check(status).map_err(|error| {
            drop(unsafe { Box::from_raw(user) });
            error
        })
    }
}

unsafe extern "C" fn run<F: FnOnce()>(user: *mut c_void) {
    let work = Box::from_raw(user as *mut F);
    let _ = caught(work);
}

impl Event {
    /// Makes an event, which counts as passed until it is first recorded.
    pub fn new(device: &Device) -> Result<Event> {
        let mut event = ptr::null_mut();
        check(unsafe { sys::dc_event_create(device.as_ptr(), &mut event) })?;
        Ok(Event(NonNull::new(event).expect("an event")))
    }

    /// Records the event at the end of a stream's queue.
    pub fn record(&self, stream: &Stream) -> Result<()> {
        check(unsafe { sys::dc_event_record(self.as_ptr(), stream.as_ptr()) })
    }

    /// Makes all later work of a stream wait for the event.
    pub fn wait_on(&self, stream: &Stream) -> Result<()> {
        check(unsafe { sys::dc_event_wait(self.as_ptr(), stream.as_ptr(), 0) })
    }

    /// Blocks this thread until the event has passed, at most for `limit`.
    pub fn wait(&self, limit: Option<Duration>) -> Result<()> {
        check(unsafe { sys::dc_event_wait(self.as_ptr(), ptr::null_mut(), nanoseconds(limit)) })
    }

    /// Whether the event has passed.
    pub fn passed(&self) -> Result<bool> {
        let mut passed = 0;
        check(unsafe { sys::dc_event_query(self.as_ptr(), &mut passed) })?;
        Ok(passed == 1)
    }
}

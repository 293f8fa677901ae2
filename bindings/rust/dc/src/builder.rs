//! The options with which a context is made.

use crate::comm::Comm;
use crate::context::Context;
use crate::device::Device;
use crate::error::{caught, check, Result};
use crate::sys;
use std::ffi::CStr;
use std::mem::size_of;
use std::os::raw::{c_char, c_void};
use std::ptr::{self, NonNull};

/// Severity of a log line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
#[allow(missing_docs)]
pub enum LogLevel {
    Error,
    Warning,
    Info,
}

/// DeepSpeed's `compile` options; [`Config::default`] is the library's default.
#[derive(Clone, Copy, Debug)]
pub struct Config(sys::dc_config);

impl Default for Config {
    fn default() -> Config {
        Config(sys::dc_config { struct_size: size_of::<sys::dc_config>(), ..Default::default() })
    }
}

impl Config {
    /// While one gradient bucket is reduced, a second one fills.
    pub fn double_buffer(mut self, on: bool) -> Config {
        self.0.double_buffer = if on { 1 } else { -1 };
        self
    }

    /// Drains all streams before and after each reduction and gather, for debugging.
    pub fn synchronous(mut self, on: bool) -> Config {
        let on = i32::from(on);
        self.0.sync_before_reduce = on;
        self.0.sync_after_reduce = on;
        self.0.sync_before_allgather = on;
        self.0.sync_after_allgather = on;
        self
    }

    /// Reductions scan gradients for infinities and NaN, for [`Context::first_not_finite`].
    pub fn check_finite(mut self, on: bool) -> Config {
        self.0.check_finite = i32::from(on);
        self
    }

    /// Hybrid sharding: the ranks form `groups` groups of consecutive ranks, each of which holds all parameters.
    pub fn replicas(mut self, groups: i32) -> Config {
        self.0.replicas = groups;
        self
    }

    /// Peers read shards in place.
    ///
    /// # Safety
    /// No rank may change a shard ([`Context::update`]) before every rank has gathered it: put a collective between.
    pub unsafe fn symmetric_memory(mut self) -> Config {
        self.0.symmetric_memory = 1;
        self
    }
}

pub(crate) type Log = Box<dyn Fn(LogLevel, &str) + Send + Sync>;

/// Makes a [`Context`].
#[derive(Default)]
pub struct Builder {
    log: Option<Log>,
    config: Config,
    bucket: Option<i64>,
}

impl Builder {
    /// Sets the function for the library's log lines. It is called on the thread that did the work, and must not call
    /// the library.
    pub fn log(mut self, log: impl Fn(LogLevel, &str) + Send + Sync + 'static) -> Builder {
        self.log = Some(Box::new(log));
        self
    }

    /// Sets the `compile` options.
    pub fn config(mut self, config: Config) -> Builder {
        self.config = config;
        self
    }

    /// Sets the number of elements of a gradient bucket; the default is 2^24.
    pub fn bucket(mut self, elements: i64) -> Builder {
        self.bucket = Some(elements);
        self
    }

    /// Makes the context on the device "cpu", and joins the communicator's ranks (`None`: a world of one). All ranks
    /// must call it.
    pub fn build(self, device: &Device, comm: Option<&Comm>) -> Result<Context> {
        device.require_cpu()?;
        let log = self.log.map(Box::new);
        let options = sys::dc_context_options {
            struct_size: size_of::<sys::dc_context_options>(),
            log: if log.is_some() { Some(write_log) } else { None },
            log_user: log.as_deref().map_or(ptr::null_mut(), |log| log as *const Log as *mut c_void),
        };
        let mut raw = ptr::null_mut();
        check(unsafe { sys::dc_context_create(device.as_ptr(), &options, &mut raw) })?;
        let context = Context::from_raw(NonNull::new(raw).expect("a context"), log, comm, self.config.0.replicas);
        let comm = comm.map_or(ptr::null_mut(), Comm::as_ptr);
        check(unsafe { sys::dc_init(raw, comm, &self.config.0, self.bucket.unwrap_or(1 << 24)) })?;
        Ok(context)
    }
}

unsafe extern "C" fn write_log(level: i32, message: *const c_char, user: *mut c_void) {
    let log = &*(user as *const Log);
    let level = match level {
        sys::DC_LOG_ERROR => LogLevel::Error,
        sys::DC_LOG_WARNING => LogLevel::Warning,
        _ => LogLevel::Info,
    };
    let _ = caught(|| log(level, &CStr::from_ptr(message).to_string_lossy()));
}

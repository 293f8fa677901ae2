//! libdc for Rust: training state sharded over ranks (ZeRO 0 to 3), with safe types over the C ABI of `dc_api.h`.
//!
//! A [`Comm`] joins ranks, which are threads or processes; a [`Context`] is one rank's training state. A step of
//! ZeRO-3 gathers weights ([`Context::gather`]), takes gradients ([`Context::reduce_grad`]), ends the backward, and
//! updates this rank's shard ([`Context::update`]):
//!
//! ```
//! let device = dc::Device::open("cpu")?;
//! let mut context = dc::Context::builder().build(&device, None)?; // a world of one rank
//! context.register_z3_param(7, &[3], vec![1.0f32, 2.0, 3.0], vec![0.0f32; 3], dc::Z3Options::default())?;
//! context.register_graph(1, dc::Stage::Z3, &[7])?;
//! context.start_backward(true)?;
//! let grad: Vec<f32> = context.gather::<f32>(1, 7)?.iter().map(|weight| 2.0 * weight).collect();
//! context.reduce_grad(1, 7, &grad)?;
//! context.end_backward(1, false)?;
//! context.update(7, |weights: &mut [f32], grad: &mut [f32]| weights[0] -= 0.5 * grad[0])?;
//! context.params_updated(&[7])?;
//! assert_eq!(&context.gather::<f32>(1, 7)?[..], [0.0, 2.0, 3.0]);
//! # Ok::<(), dc::Error>(())
//! ```
//!
//! Optimizers are types as well: [`AdamW`], [`Sgd`], [`Muon`], [`Shampoo`], [`Soap`] and [`Kfac`] are an [`Optimizer`]
//! with their own options. They borrow weights and gradients for each step, whole or this rank's parts, and own their
//! state. They are made with a [`Linalg`], whose methods are operators on matrices: eigendecompositions, roots,
//! Kronecker products.
//!
//! Registered weights and gradients belong to the context, which lends them out between steps. Gathered weights belong
//! to their holder. Everything is freed by drop, in any order, also while a panic unwinds. A context, or an optimizer
//! of many ranks, that is dropped by a panic aborts its communicator, so that the other ranks do not wait for it.
//!
//! `Send` and `Sync` follow the header's thread classes: [`Device`], [`Stream`], [`Event`], [`Buffer`] and [`Abort`]
//! are both, [`Comm`], [`Context`], [`Linalg`] and [`Optimizer`] are `Send` only:
//!
//! ```compile_fail
//! fn shared<T: Sync>() {}
//! shared::<dc::Context>();
//! ```
//!
//! Weights cannot change while gathered ones are borrowed:
//!
//! ```compile_fail
//! fn step(mut context: dc::Context) {
//!     let full = context.gather::<f32>(1, 7).unwrap();
//!     context.params_updated(&[7]).unwrap();
//!     println!("{}", full[0]);
//! }
//! ```
#![warn(missing_docs)]

mod buffer;
mod builder;
mod comm;
mod context;
mod device;
mod error;
mod external;
mod group;
mod kfac;
mod kinds;
mod linalg;
mod matrix;
mod operators;
mod optim;
mod options;
mod parts;
mod report;
mod stats;
mod tensor;

pub use buffer::{Buffer, GatheredParam, Memory, MemoryKind};
pub use builder::{Builder, Config, LogLevel};
pub use comm::{Abort, Comm, CommOptions, ReduceOp};
pub use context::{Context, Stage, Z3Options};
pub use device::{Device, Event, Stream};
pub use error::{Error, Result, Status};
pub use external::{Collectives, External};
pub use group::Group;
pub use kfac::KfacLayer;
pub use kinds::{AdamW, AdamWOptions, Kfac, KfacOptions, Kind, Muon, MuonOptions, Sgd, SgdOptions};
pub use kinds::{Distributed, Shampoo, ShampooOptions, Soap, SoapOptions};
pub use linalg::{Linalg, LinalgOptions};
pub use matrix::SpectralOptions;
pub use optim::Optimizer;
pub use options::{Graft, KfacApproximation, KfacInverse, MuonAdjust, Negative, Polynomial, Symmetry, WeightDecay};
pub use parts::{Param, Part};
pub use report::{Launch, Op, OpInfo};
pub use stats::{MemoryStats, OptimizerStats, TraceEvent};
pub use tensor::{Bf16, DType, Element, Tensor, F16};

pub use dc_sys as sys;

/// The version of the library that is loaded, as in "0.1.0".
pub fn version() -> &'static str {
    // Static text of the library.
    unsafe { error::text(sys::dc_version_string()) }
}

/// Fails if the library that was loaded is not one that these bindings describe: before 1.0, the same minor version and
/// not an older patch. Everything else begins with a device or a communicator, whose constructors ask this.
pub fn check_version() -> Result<()> {
    let (loaded, described) = (unsafe { sys::dc_api_version() }, sys::DC_API_VERSION);
    if is_compatible(loaded, described) {
        return Ok(());
    }
    let text = format!("libdc {} ({loaded}) is loaded, must be {described} or a later patch of it", version());
    Err(Error::new(Status::UNSUPPORTED, text))
}

fn is_compatible(loaded: u32, described: u32) -> bool {
    let same = if described < 1_000_000 { 1_000 } else { 1_000_000 };
    loaded / same == described / same && loaded >= described
}

/// The CRC-32C of bytes that follow those whose checksum is `crc`; 0: of these alone.
pub fn crc32c(crc: u32, data: &[u8]) -> u32 {
    unsafe { sys::dc_crc32c(crc, data.as_ptr().cast(), data.len() as i64) }
}

/// Whether the library has a feature: "cpu", "comm.threads", "avx2", …; unknown names give `false`.
pub fn has_feature(name: &str) -> bool {
    std::ffi::CString::new(name).map_or(false, |name| unsafe { sys::dc_has_feature(name.as_ptr()) == 1 })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn crc32c_goes_on() {
        assert_eq!(crc32c(0, b"123456789"), 0xe306_9283);
        assert_eq!(crc32c(crc32c(0, b"1234"), b"56789"), 0xe306_9283);
    }

    #[test]
    fn versions_that_do_not_fit_are_refused() {
        assert!(check_version().is_ok());
        for (loaded, described, good) in [
            (1_000, 1_000, true),
            (1_007, 1_000, true),
            (999, 1_000, false),
            (2_000, 1_000, false),
            (1_002_000, 1_001_000, true),
            (1_000_000, 1_001_000, false),
            (2_000_000, 1_001_000, false),
        ] {
            assert_eq!(is_compatible(loaded, described), good, "{loaded} {described}");
        }
    }
}

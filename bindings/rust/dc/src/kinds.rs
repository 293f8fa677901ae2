//! The kinds of optimizers: their options, and the functions that make an optimizer and set a group's options.

use crate::optim::Optimizer;
use crate::options::{on_unless_false, options, unchanged, zero_as_minus_one};
use crate::options::{Graft, KfacInverse, MuonAdjust, Polynomial, WeightDecay};
use crate::sys;
use crate::tensor::DType;

pub(crate) mod sealed {
    use crate::sys;

    /// A kind's C functions. The handles must be valid, as for the C functions.
    pub trait Functions {
        unsafe fn create(
            &self,
            linalg: *mut sys::dc_linalg,
            comm: *mut sys::dc_comm,
            optimizer: *mut *mut sys::dc_optimizer,
        ) -> i32;
        unsafe fn set_group(&self, optimizer: *mut sys::dc_optimizer, group: i32) -> i32;
    }
}

/// Options of a kind of optimizer, which begin as the library's defaults. `dc_api.h` says what each means, and gives
/// the equations. Where zero has a meaning there, it has the same here (`beta1(0.0)`: no mean of gradients); elsewhere
/// zero is the default.
pub trait Kind: sealed::Functions + Default {}

/// Options of a kind whose ranks can share the work, see [`Optimizer::with_comm`].
pub trait Distributed: Kind {}

macro_rules! kind {
    ($(#[$doc:meta])* $alias:ident, $name:ident: |$linalg:ident, $comm:ident| $create:ident($($arg:ident),+),
     $set_group:ident) => {
        $(#[$doc])*
        pub type $alias = Optimizer<$name>;

        impl Kind for $name {}

        impl sealed::Functions for $name {
            unsafe fn create(
                &self,
                $linalg: *mut sys::dc_linalg,
                $comm: *mut sys::dc_comm,
                optimizer: *mut *mut sys::dc_optimizer,
            ) -> i32 {
                sys::$create($($arg,)+ &self.0, optimizer)
            }

            unsafe fn set_group(&self, optimizer: *mut sys::dc_optimizer, group: i32) -> i32 {
                sys::$set_group(optimizer, group, &self.0)
            }
        }
    };
}

options! {
    /// The options of [`AdamW`]; see `dc_adamw_options`.
    AdamWOptions = dc_adamw_options by dc_adamw_options_init {
        /// Decay of the mean of gradients; 0: no mean.
        beta1: f64 as zero_as_minus_one,
        /// Decay of the mean of squares; 0: no mean.
        beta2: f64 as zero_as_minus_one,
        /// Added to the divisor; 0: nothing is added.
        eps: f64 as zero_as_minus_one,
        /// Weight decay: the part of a weight that decays in a step of learning rate 1.
        weight_decay: f64 as unchanged,
        /// Uses the largest mean of squares so far.
        amsgrad: bool as i32::from,
        /// Maximizes: steps follow the gradient upwards.
        maximize: bool as i32::from,
        /// Checks all gradients before a step, which changes nothing if one is not finite.
        check_finite: bool as i32::from,
    }
}

kind! {
    /// AdamW, for parameters of any kind.
    ///
    /// ```
    /// let linalg = dc::Linalg::new(&dc::Device::open("cpu")?, &dc::LinalgOptions::default())?;
    /// let mut adamw = dc::AdamW::new(&linalg, &dc::AdamWOptions::default())?;
    /// adamw.add_param(&dc::Param::new(&[2, 2]))?;
    /// adamw.set_lr(0, 0.5)?;
    /// let mut weights = [1.0f32; 4];
    /// adamw.step(&mut [dc::Part::new(&mut weights, &[2.0f32, 2.0, -2.0, -2.0])], 1.0)?;
    /// assert_eq!(weights, [0.5, 0.5, 1.5, 1.5]);
    /// # Ok::<(), dc::Error>(())
    /// ```
    AdamW, AdamWOptions: |linalg, _comm| dc_adamw_create(linalg), dc_adamw_set_group
}

options! {
    /// The options of [`Sgd`]; see `dc_sgd_options`.
    SgdOptions = dc_sgd_options by dc_sgd_options_init {
        /// The momentum factor.
        momentum: f64 as unchanged,
        /// Dampening of the gradient in the momentum.
        dampening: f64 as unchanged,
        /// Weight decay: this multiple of the weight is added to the gradient.
        weight_decay: f64 as unchanged,
        /// Nesterov's momentum.
        nesterov: bool as i32::from,
        /// Maximizes: steps follow the gradient upwards.
        maximize: bool as i32::from,
        /// Checks all gradients before a step, which changes nothing if one is not finite.
        check_finite: bool as i32::from,
    }
}

kind! {
    /// SGD, for parameters of any kind.
    Sgd, SgdOptions: |linalg, _comm| dc_sgd_create(linalg), dc_sgd_set_group
}

options! {
    /// The options of [`Muon`]; see `dc_muon_options`.
    MuonOptions = dc_muon_options by dc_muon_options_init {
        /// The momentum factor; 0: no momentum.
        momentum: f64 as zero_as_minus_one,
        /// The smallest norm by which a direction is divided.
        eps: f64 as unchanged,
        /// Weight decay: the part of a weight that decays in a step of learning rate 1.
        weight_decay: f64 as unchanged,
        /// Number of matrices that a parameter has, stacked along its first dimension.
        num_splits: i64 as unchanged,
        /// The polynomial that makes directions orthogonal.
        polynomial: Polynomial as i32::from,
        /// Number of steps of the polynomial.
        steps: i32 as unchanged,
        /// Type of the polynomial's products: bfloat16, the default, or float32.
        precision: DType as i32::from,
        /// How the length of a step depends on the matrix's shape.
        adjust: MuonAdjust as i32::from,
        /// Nesterov's momentum; on by default.
        nesterov: bool as on_unless_false,
    }
}

kind! {
    /// Muon, for the matrices of a network's hidden layers: momentum, made orthogonal.
    ///
    /// ```
    /// let linalg = dc::Linalg::new(&dc::Device::open("cpu")?, &dc::LinalgOptions::default())?;
    /// let exact = dc::MuonOptions::default().steps(8).precision(dc::DType::Float32); // not bfloat16
    /// let mut muon = dc::Muon::new(&linalg, &exact)?;
    /// muon.add_param(&dc::Param::new(&[2, 2]))?;
    /// muon.set_lr(0, 1.0)?;
    /// let mut weights = [0.0f32; 4];
    /// muon.step(&mut [dc::Part::new(&mut weights, &[3.0f32, 0.0, 0.0, 0.5])], 1.0)?;
    /// assert!((weights[0] + 1.0).abs() < 1e-3 && (weights[3] + 1.0).abs() < 1e-3);
    /// # Ok::<(), dc::Error>(())
    /// ```
    Muon, MuonOptions: |linalg, comm| dc_muon_create(linalg, comm), dc_muon_set_group
}
impl Distributed for MuonOptions {}

options! {
    /// The options of [`Shampoo`]; see `dc_shampoo_options`.
    ShampooOptions = dc_shampoo_options by dc_shampoo_options_init {
        /// Decay of the mean of gradients; 0: no mean.
        beta1: f64 as zero_as_minus_one,
        /// Decay of the factors; 1, the default: their sum.
        beta2: f64 as unchanged,
        /// Added to a factor's eigenvalues, as a minimum; 0: nothing.
        eps_abs: f64 as zero_as_minus_one,
        /// The same, relative to the largest eigenvalue; 0: nothing.
        eps_rel: f64 as zero_as_minus_one,
        /// Above 0, roots are computed from the last ones' basis where that is accurate enough.
        tolerance: f64 as unchanged,
        /// Decay of the graft's mean of squares.
        graft_beta2: f64 as unchanged,
        /// Added to the graft's divisor.
        graft_eps: f64 as unchanged,
        /// Weight decay: the part of a weight that decays in a step of learning rate 1, or is added to the gradient;
        /// see `decay`.
        weight_decay: f64 as unchanged,
        /// The momentum factor.
        momentum: f64 as unchanged,
        /// The longest side of a block.
        max_block: i64 as unchanged,
        /// Neighbouring dimensions are merged up to this product; 0: none are merged.
        merge_below: i64 as zero_as_minus_one,
        /// Number of steps between refreshes of the roots.
        precondition_frequency: i64 as unchanged,
        /// The first step that uses the roots.
        start_preconditioning_step: i64 as unchanged,
        /// The root, instead of twice the number of a block's dimensions.
        root: i32 as unchanged,
        /// Which method gives steps their length.
        graft: Graft as i32::from,
        /// Where weight decay is applied.
        decay: WeightDecay as i32::from,
        /// Nesterov's momentum.
        nesterov: bool as i32::from,
        /// How many refreshes of one root may fail in a row; 0: none.
        tolerated_failures: i32 as zero_as_minus_one,
    }
}

kind! {
    /// Shampoo: multiplies gradients by roots of their second moments, block by block.
    Shampoo, ShampooOptions: |linalg, comm| dc_shampoo_create(linalg, comm), dc_shampoo_set_group
}
impl Distributed for ShampooOptions {}

options! {
    /// The options of [`Soap`]; see `dc_soap_options`.
    SoapOptions = dc_soap_options by dc_soap_options_init {
        /// Decay of the mean of gradients; 0: no mean.
        beta1: f64 as zero_as_minus_one,
        /// Decay of the mean of squares; 0: no mean.
        beta2: f64 as zero_as_minus_one,
        /// Decay of the factors, by default beta2; 0: only the newest gradient counts.
        shampoo_beta: f64 as zero_as_minus_one,
        /// Added to the divisor; 0: nothing is added.
        eps: f64 as zero_as_minus_one,
        /// Weight decay: the part of a weight that decays in a step of learning rate 1.
        weight_decay: f64 as unchanged,
        /// The longest side of a block; 0, the default: a parameter is one block.
        max_block: i64 as unchanged,
        /// Neighbouring dimensions are merged up to this product; 0, the default: none are merged.
        merge_below: i64 as unchanged,
        /// The longest side that has a factor; 0: no side has one.
        max_precond_dim: i64 as zero_as_minus_one,
        /// Number of steps between refreshes of the bases.
        precondition_frequency: i64 as unchanged,
        /// How many refreshes of one basis may fail in a row; 0: none.
        tolerated_failures: i32 as zero_as_minus_one,
    }
}

kind! {
    /// SOAP: Adam in the eigenbasis of Shampoo's factors. Its first step changes no weight.
    Soap, SoapOptions: |linalg, comm| dc_soap_create(linalg, comm), dc_soap_set_group
}
impl Distributed for SoapOptions {}

options! {
    /// The options of [`Kfac`]; see `dc_kfac_options`.
    KfacOptions = dc_kfac_options by dc_kfac_options_init {
        /// Decay of the factors; 0: only the newest batch counts.
        decay: f64 as zero_as_minus_one,
        /// Damping, which is added to the curvature.
        damping: f64 as unchanged,
        /// Bound on the model's change in a step, as a KL divergence; 0: no bound.
        kl_clip: f64 as zero_as_minus_one,
        /// The momentum factor; 0: no momentum.
        momentum: f64 as zero_as_minus_one,
        /// Weight decay: this multiple of the weight is added to the direction.
        weight_decay: f64 as unchanged,
        /// Number of steps between updates of the factors.
        factor_frequency: i64 as unchanged,
        /// Number of steps between decompositions.
        refresh_frequency: i64 as unchanged,
        /// How the curvature is inverted.
        inverse: KfacInverse as i32::from,
        /// Nesterov's momentum.
        nesterov: bool as i32::from,
        /// How many decompositions of one factor may fail in a row; 0: none.
        tolerated_failures: i32 as zero_as_minus_one,
    }
}

kind! {
    /// K-FAC: divides the gradients of layers by the curvature of the batches that [`Kfac::accumulate`] got. Parameters
    /// without a layer take plain SGD's steps.
    Kfac, KfacOptions: |linalg, comm| dc_kfac_create(linalg, comm), dc_kfac_set_group
}
impl Distributed for KfacOptions {}

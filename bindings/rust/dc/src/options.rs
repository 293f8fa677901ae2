//! Turns the library's option structs into Rust structs, and its enums into Rust enums.

use crate::sys;

/// Defines an options struct around one of C's, which begins as the library's `init` function fills it. Each field has
/// a setter, with its type in Rust and the conversion to C's number.
macro_rules! options {
    ($(#[$doc:meta])* $name:ident = $raw:ident by $init:ident {
        $($(#[$about:meta])* $field:ident: $type:ty as $number:expr,)*
    }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug)]
        pub struct $name(pub(crate) crate::sys::$raw);

        impl Default for $name {
            fn default() -> $name {
                let mut raw = crate::sys::$raw::default();
                unsafe { crate::sys::$init(&mut raw, std::mem::size_of::<crate::sys::$raw>()) };
                $name(raw)
            }
        }

        impl $name {
            $($(#[$about])*
            pub fn $field(mut self, $field: $type) -> $name {
                self.0.$field = $number($field);
                self
            })*
        }
    };
}
pub(crate) use options;

/// A number whose zero means the same in C: zero itself, or the default where zero would mean nothing.
pub(crate) fn unchanged<T>(value: T) -> T {
    value
}

/// A number whose zero C expresses as -1. A -1 in Rust is not zero: it becomes -2, which C refuses, as it does all
/// other negative numbers.
pub(crate) fn zero_as_minus_one<T: Default + PartialEq + From<i8>>(value: T) -> T {
    if value == T::default() {
        T::from(-1)
    } else if value == T::from(-1) {
        T::from(-2)
    } else {
        value
    }
}

/// A switch that is on by default.
pub(crate) fn on_unless_false(on: bool) -> i32 {
    if on {
        1
    } else {
        -1
    }
}

/// Defines an enum after one of the library's.
macro_rules! choices {
    ($(#[$doc:meta])* $name:ident { $($(#[$about:meta])* $variant:ident = $value:ident,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[non_exhaustive]
        #[repr(i32)]
        pub enum $name {
            $($(#[$about])* $variant = sys::$value,)*
        }

        impl From<$name> for i32 {
            fn from(value: $name) -> i32 {
                value as i32
            }
        }
    };
}

choices! {
    /// Which method gives a step of Shampoo its length.
    Graft {
        /// From Adam's step; the default.
        Adam = DC_GRAFT_ADAM,
        /// Shampoo's own.
        None = DC_GRAFT_NONE,
        /// The gradient's.
        Sgd = DC_GRAFT_SGD,
        /// From Adagrad's step.
        Adagrad = DC_GRAFT_ADAGRAD,
        /// From Adam's step without bias correction.
        RmsProp = DC_GRAFT_RMSPROP,
    }
}

choices! {
    /// Where Shampoo applies weight decay.
    WeightDecay {
        /// Beside the step, which is decoupled decay; the default.
        Decoupled = DC_DECAY_DECOUPLED,
        /// Added to the gradient, before everything else.
        L2 = DC_DECAY_L2,
    }
}

choices! {
    /// The polynomial that makes a matrix orthogonal.
    Polynomial {
        /// Polar Express; the default.
        Express = DC_ORTHOGONAL_EXPRESS,
        /// The one published with Muon.
        Muon = DC_ORTHOGONAL_MUON,
    }
}

choices! {
    /// The scale of a step of Muon, for a matrix of r rows and c columns.
    MuonAdjust {
        /// sqrt(max(1, r / c)); the default.
        Original = DC_MUON_ORIGINAL,
        /// 0.2 sqrt(max(r, c)): steps as long as AdamW's.
        MatchRms = DC_MUON_MATCH_RMS,
        /// 1: no scaling.
        Plain = DC_MUON_PLAIN,
    }
}

choices! {
    /// How K-FAC inverts a layer's damped curvature.
    KfacInverse {
        /// Exactly, from eigendecompositions; the default.
        Eigen = DC_KFAC_EIGEN,
        /// Each factor separately, with its own damping.
        Factored = DC_KFAC_FACTORED,
    }
}

choices! {
    /// How K-FAC treats a layer that is used at many positions of a sample.
    KfacApproximation {
        /// Sums each position's outer products; the default.
        Expand = DC_KFAC_EXPAND,
        /// First averages inputs and sums gradients over a sample's positions.
        Reduce = DC_KFAC_REDUCE,
    }
}

choices! {
    /// How a symmetric matrix is read.
    Symmetry {
        /// Takes the mean of both triangles, which must agree within rounding; the default.
        Check = DC_SYMMETRY_CHECK,
        /// (A + A^T) / 2, whatever A is.
        Mean = DC_SYMMETRY_MEAN,
        /// Only the lower triangle is read.
        Lower = DC_SYMMETRY_LOWER,
        /// Only the upper triangle is read.
        Upper = DC_SYMMETRY_UPPER,
    }
}

choices! {
    /// How negative eigenvalues are treated in a power; those within rounding count as zero.
    Negative {
        /// Refuses the matrix; the default.
        Refuse = DC_NEGATIVE_REFUSE,
        /// Sets them to zero, before epsilon is added.
        Clamp = DC_NEGATIVE_CLAMP,
        /// Raises them to at least `eps_abs`, after epsilon is added.
        Floor = DC_NEGATIVE_FLOOR,
    }
}

//! How options of the library become structs of Rust, and the choices among them.

use crate::sys;

/// A struct of options over one of C's, which begins as the library's `init` function leaves it. It has a method for
/// each field: its type in Rust, and the conversion to C's number.
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

/// A number for which C's zero is what is meant, or the default where zero means nothing.
pub(crate) fn unchanged<T>(value: T) -> T {
    value
}

/// A number whose zero means something else than C's, which has -1 for it. A -1 of Rust's is no zero: it becomes a
/// number that C refuses, as it does all others below 0.
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

/// An enum of the library's.
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
    /// How a step of Shampoo gets its length.
    Graft {
        /// From Adam's step; the default.
        Adam = DC_GRAFT_ADAM,
        /// Shampoo's own.
        None = DC_GRAFT_NONE,
        /// The gradient's.
        Sgd = DC_GRAFT_SGD,
        /// From Adagrad's step.
        Adagrad = DC_GRAFT_ADAGRAD,
        /// Adam's without its correction of the first steps.
        RmsProp = DC_GRAFT_RMSPROP,
    }
}

choices! {
    /// Where Shampoo applies weight decay.
    WeightDecay {
        /// Beside the step; the default.
        Decoupled = DC_DECAY_DECOUPLED,
        /// In the gradient, before everything else.
        L2 = DC_DECAY_L2,
    }
}

choices! {
    /// The polynomial that makes a matrix orthogonal.
    Polynomial {
        /// Polar Express; the default.
        Express = DC_ORTHOGONAL_EXPRESS,
        /// The one that Muon came with.
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
        /// 1.
        Plain = DC_MUON_PLAIN,
    }
}

choices! {
    /// How K-FAC inverts a layer's damped curvature.
    KfacInverse {
        /// Exactly, from eigendecompositions; the default.
        Eigen = DC_KFAC_EIGEN,
        /// Each factor for itself, damped.
        Factored = DC_KFAC_FACTORED,
    }
}

choices! {
    /// How K-FAC treats a layer that is used at many positions of a sample.
    KfacApproximation {
        /// Each position's outer products count; the default.
        Expand = DC_KFAC_EXPAND,
        /// Inputs are averaged and gradients summed over a sample's positions first.
        Reduce = DC_KFAC_REDUCE,
    }
}

choices! {
    /// How a symmetric matrix is read.
    Symmetry {
        /// Both triangles must agree but for rounding; then their mean. The default.
        Check = DC_SYMMETRY_CHECK,
        /// (A + A^T) / 2, whatever A is.
        Mean = DC_SYMMETRY_MEAN,
        /// The lower triangle.
        Lower = DC_SYMMETRY_LOWER,
        /// The upper triangle.
        Upper = DC_SYMMETRY_UPPER,
    }
}

choices! {
    /// The treatment of negative eigenvalues in a power; those that are rounding count as zero.
    Negative {
        /// The matrix is refused; the default.
        Refuse = DC_NEGATIVE_REFUSE,
        /// Zero, before epsilon is added.
        Clamp = DC_NEGATIVE_CLAMP,
        /// At least `eps_abs`, after it was added.
        Floor = DC_NEGATIVE_FLOOR,
    }
}

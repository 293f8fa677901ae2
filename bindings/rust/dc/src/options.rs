//! How options of the library become structs of Rust, and the choices among them.

use crate::sys;

/// A struct of options over one of C's, which begins as the library's `init` function leaves it, and a method for each
/// field: its type in Rust, and what makes C's number of it.
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
pub(crate) fn number<T>(value: T) -> T {
    value
}

/// An enum of the library's.
macro_rules! choices {
    ($(#[$doc:meta])* $name:ident { $($(#[$about:meta])* $variant:ident = $value:ident,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
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
    /// The polynomial that makes a matrix orthogonal.
    Polynomial {
        /// Polar Express; the default.
        Express = DC_ORTHOGONAL_EXPRESS,
        /// The one that Muon came with.
        Muon = DC_ORTHOGONAL_MUON,
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
    /// What becomes of negative eigenvalues in a power; those that are rounding count as zero.
    Negative {
        /// The matrix is refused; the default.
        Refuse = DC_NEGATIVE_REFUSE,
        /// Zero, before epsilon is added.
        Clamp = DC_NEGATIVE_CLAMP,
        /// At least `eps_abs`, after it was added.
        Floor = DC_NEGATIVE_FLOOR,
    }
}

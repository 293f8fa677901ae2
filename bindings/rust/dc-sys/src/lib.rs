//! The C ABI of libdc as bindgen reads it from `dc_api.h`, which is the manual. Safe types are in the crate `dc`.
//!
//! `cargo test` compares every struct's size and offsets with the C compiler's.
#![allow(non_camel_case_types, non_upper_case_globals, clippy::all)]

include!("bindings.rs");

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::CStr;

    #[test]
    fn the_loaded_library_is_the_described_one() {
        let (version, text) = unsafe { (dc_api_version(), CStr::from_ptr(dc_version_string())) };
        assert_eq!(version / 1000, DC_API_VERSION / 1000);
        assert!(version >= DC_API_VERSION);
        assert_eq!(text.to_str().unwrap(), env!("CARGO_PKG_VERSION"));
    }

    #[test]
    fn derived_defaults_are_accepted_with_their_size() {
        let mut made = dc_config { struct_size: usize::MAX, double_buffer: 7, ..Default::default() };
        unsafe { dc_config_init(&mut made, std::mem::size_of::<dc_config>()) };
        assert_eq!(made.struct_size, std::mem::size_of::<dc_config>());
        assert_eq!(made.double_buffer, 0);
    }
}

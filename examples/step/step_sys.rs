//! Three steps of AdamW on four weights, by the crate dc-sys, the C functions as they are: prints the bits that step.c
//! prints.
//!
//!     cargo run --example step_sys
//!
//! SPDX-License-Identifier: Apache-2.0
use dc_sys::*;
use std::ffi::CStr;
use std::mem::size_of;
use std::os::raw::c_void;
use std::ptr::{null, null_mut};

fn check(status: dc_status) {
    if status != DC_OK {
        let (name, text) = unsafe { (CStr::from_ptr(dc_status_name(status)), CStr::from_ptr(dc_last_error())) };
        panic!("{}: {}", name.to_string_lossy(), text.to_string_lossy());
    }
}

fn tensor(values: &mut [f32; 4], shape: &[i64; 1]) -> dc_tensor {
    dc_tensor {
        struct_size: size_of::<dc_tensor>(),
        data: values.as_mut_ptr() as *mut c_void,
        shape: shape.as_ptr(),
        strides: null(),
        ndim: 1,
        dtype: DC_FLOAT32,
        buffer: null_mut(),
    }
}

fn main() {
    let (mut weights, mut grads, shape) = ([1.0f32, -2.0, 3.0, 0.5], [0.5f32, 0.25, -1.0, 0.0], [4i64]);
    let (mut device, mut linalg, mut adamw, mut index) = (null_mut(), null_mut(), null_mut(), 0);
    let mut options = dc_adamw_options::default();
    unsafe {
        dc_adamw_options_init(&mut options, size_of::<dc_adamw_options>());
        options.weight_decay = 0.1;
        check(dc_device_open(b"cpu\0".as_ptr().cast(), null(), &mut device));
        check(dc_linalg_create(device, null(), &mut linalg));
        check(dc_adamw_create(linalg, &options, &mut adamw));
        check(dc_optimizer_set_lr(adamw, 0, 0.01));
        check(dc_optimizer_add_param(adamw, 0, shape.as_ptr(), 1, 0, 4, DC_FLOAT32, &mut index));
        let (mut w, g) = (tensor(&mut weights, &shape), tensor(&mut grads, &shape));
        for _ in 0..3 {
            check(dc_optimizer_step(adamw, &mut w, &g, size_of::<dc_tensor>(), 1, 1.0));
        }
        dc_optimizer_destroy(adamw);
        dc_linalg_destroy(linalg);
        dc_device_destroy(device);
    }
    for weight in weights {
        println!("{:08x} {weight:.6}", weight.to_bits());
    }
}

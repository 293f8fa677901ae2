//! Three steps of AdamW on four weights, by the crate dc: prints the bits that step.c prints.
//!
//!     cargo run --example step
//!
//! SPDX-License-Identifier: Apache-2.0
use dc::{AdamW, AdamWOptions, Device, Linalg, LinalgOptions, Param, Part};

fn main() -> Result<(), dc::Error> {
    let linalg = Linalg::new(&Device::open("cpu")?, &LinalgOptions::default())?;
    let mut adamw = AdamW::new(&linalg, &AdamWOptions::default().weight_decay(0.1))?;
    adamw.set_lr(0, 0.01)?;
    adamw.add_param(&Param::new(&[4]))?;
    let (mut weights, grads) = ([1.0f32, -2.0, 3.0, 0.5], [0.5f32, 0.25, -1.0, 0.0]);
    for _ in 0..3 {
        adamw.step(&mut [Part::new(&mut weights, &grads)], 1.0)?;
    }
    for weight in weights {
        println!("{:08x} {weight:.6}", weight.to_bits());
    }
    Ok(())
}

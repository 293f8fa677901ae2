//! AdamW: cut parameters give the same bits, states go from one to another, and what does not fit is an error.

use dc::{AdamW, AdamWOptions, Device, Status, Stream};
use std::ptr::NonNull;

fn make(part: std::ops::Range<i64>) -> AdamW {
    let device = Device::open("cpu").unwrap();
    let mut adamw = AdamW::new(&device, 1, &AdamWOptions { weight_decay: 0.1, ..AdamWOptions::default() }).unwrap();
    assert_eq!(adamw.add_param(&[5, 7], part).unwrap(), 0);
    adamw
}

#[test]
fn parts_have_the_bits_of_the_whole_and_states_go_on() {
    let grads: Vec<f32> = (0..35).map(|i| i as f32 - 17.5).collect();
    let (mut whole, mut part) = (vec![1.0f32; 35], vec![1.0f32; 11]);
    let (mut all, mut some) = (make(0..35), make(13..24));
    for _ in 0..3 {
        all.step(&mut [(&mut whole, &grads)], 0.5).unwrap();
        some.step(&mut [(&mut part, &grads[13..24])], 0.5).unwrap();
        let state = some.save().unwrap();
        some = make(13..24);
        some.load(&state).unwrap();
    }
    assert_eq!(part, whole[13..24]);
    assert_eq!(some.steps(), 3);
}

#[test]
fn steps_on_a_stream_have_the_bits_of_those_without_one() {
    let stream = Stream::new(&Device::open("cpu").unwrap()).unwrap();
    let grads: Vec<f32> = (0..35).map(|i| i as f32 - 17.5).collect();
    let (mut plain, mut queued) = (vec![1.0f32; 35], vec![1.0f32; 35]);
    let (mut one, mut other) = (make(0..35), make(0..35));
    unsafe { other.set_stream(Some(&stream)) }.unwrap();
    for _ in 0..3 {
        one.step(&mut [(&mut plain, &grads)], 0.5).unwrap();
        other.step(&mut [(&mut queued, &grads)], 0.5).unwrap();
    }
    assert_eq!(other.steps(), 3); // which waits
    assert_eq!(plain, queued);
}

#[test]
fn a_scaled_loss_steps_as_the_loss_and_an_overflow_does_not() {
    let grads: Vec<f32> = (0..35).map(|i| i as f32 - 17.5).collect();
    let scaled: Vec<f32> = grads.iter().map(|g| g * 8.0).collect();
    let (mut plain, mut other) = (vec![1.0f32; 35], vec![1.0f32; 35]);
    let (mut one, mut two) = (make(0..35), make(0..35));
    let (mut scale, mut found) = (8.0f32, 1.0f32);
    unsafe { two.set_loss_scale(NonNull::new(&mut scale), NonNull::new(&mut found)) }.unwrap();
    two.step(&mut [(&mut other, &scaled)], 1.0).unwrap();
    assert_eq!((two.steps(), other[0]), (0, 1.0));
    unsafe { two.set_loss_scale(NonNull::new(&mut scale), None) }.unwrap();
    one.step(&mut [(&mut plain, &grads)], 1.0).unwrap();
    two.step(&mut [(&mut other, &scaled)], 1.0).unwrap();
    assert_eq!(plain, other);
}

#[test]
fn errors_name_the_fault() {
    let device = Device::open("cpu").unwrap();
    let bad = AdamW::new(&device, 1, &AdamWOptions { beta1: 1.0, ..AdamWOptions::default() }).unwrap_err();
    assert!(bad.to_string().contains("options.beta1 = 1"), "{bad}");
    let mut adamw = make(0..35);
    let error = adamw.step(&mut [(&mut [0.0; 3], &[0.0; 3])], 1.0).unwrap_err();
    assert_eq!(error.status(), Status::SHAPE);
    assert_eq!(adamw.step(&mut [(&mut [0.0; 3], &[0.0; 2])], 1.0).unwrap_err().status(), Status::SHAPE);
    assert!(adamw.load(b"nothing").is_err());
}

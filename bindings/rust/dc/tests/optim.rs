//! AdamW and SGD: split parameters give the same bits, states can be moved, and arguments that do not fit are errors.

mod common;

use common::linalg;
use dc::{
    AdamW, AdamWOptions, Bf16, DType, Device, Linalg, LinalgOptions, Param, Part, Sgd, SgdOptions, Status, Stream,
};
use std::ptr::NonNull;

fn make(part: std::ops::Range<i64>) -> AdamW {
    let mut adamw = AdamW::new(&linalg(), &AdamWOptions::default().weight_decay(0.1)).unwrap();
    assert_eq!(adamw.add_param(&Param::new(&[5, 7]).part(part)).unwrap(), 0);
    adamw
}

#[test]
fn parts_have_the_bits_of_the_whole_and_states_go_on() {
    let grads: Vec<f32> = (0..35).map(|i| i as f32 - 17.5).collect();
    let (mut whole, mut part) = (vec![1.0f32; 35], vec![1.0f32; 11]);
    let (mut all, mut some) = (make(0..35), make(13..24));
    for _ in 0..3 {
        all.step(&mut [Part::new(&mut whole, &grads)], 0.5).unwrap();
        some.step(&mut [Part::new(&mut part, &grads[13..24])], 0.5).unwrap();
        let state = some.save().unwrap();
        some = make(13..24);
        some.load(&state).unwrap();
    }
    assert_eq!(part, whole[13..24]);
    assert_eq!(some.steps().unwrap(), 3);
}

#[test]
fn steps_on_a_stream_have_the_bits_of_those_without_one() {
    let stream = Stream::new(&Device::open("cpu").unwrap()).unwrap();
    let grads: Vec<f32> = (0..35).map(|i| i as f32 - 17.5).collect();
    let (mut plain, mut queued) = (vec![1.0f32; 35], vec![1.0f32; 35]);
    let (mut one, mut other) = (make(0..35), make(0..35));
    unsafe { other.set_stream(Some(&stream)) }.unwrap();
    for _ in 0..3 {
        one.step(&mut [Part::new(&mut plain, &grads)], 0.5).unwrap();
        other.step(&mut [Part::new(&mut queued, &grads)], 0.5).unwrap();
    }
    assert_eq!(other.steps().unwrap(), 3); // waits for the stream
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
    two.step(&mut [Part::new(&mut other, &scaled)], 1.0).unwrap();
    assert_eq!((two.steps().unwrap(), other[0]), (0, 1.0));
    unsafe { two.set_loss_scale(NonNull::new(&mut scale), None) }.unwrap();
    one.step(&mut [Part::new(&mut plain, &grads)], 1.0).unwrap();
    two.step(&mut [Part::new(&mut other, &scaled)], 1.0).unwrap();
    assert_eq!(plain, other);
}

#[test]
fn an_option_that_is_zero_is_zero() {
    let options = AdamWOptions::default().beta1(0.0).beta2(0.0).eps(0.0);
    let mut adamw = AdamW::new(&linalg(), &options).unwrap();
    adamw.add_param(&Param::new(&[3])).unwrap();
    adamw.set_lr(0, 0.25).unwrap();
    let mut weights = [0.0f32; 3];
    for grad in [[3.0f32, -2.0, 1.0], [5.0, 4.0, -9.0]] {
        adamw.step(&mut [Part::new(&mut weights, &grad)], 1.0).unwrap(); // the gradient's sign alone decides
    }
    assert_eq!(weights, [-0.5, 0.0, 0.0]);
}

#[test]
fn groups_types_and_parameters_without_a_gradient() {
    let mut sgd = Sgd::new(&linalg(), &SgdOptions::default()).unwrap();
    sgd.set_group(1, &SgdOptions::default().momentum(0.5).maximize(true)).unwrap();
    sgd.add_param(&Param::new(&[2])).unwrap();
    assert_eq!(sgd.add_param(&Param::new(&[1]).group(1).dtype(DType::Bfloat16)).unwrap(), 1);
    sgd.set_lr(0, 1.0).unwrap();
    sgd.set_lr(1, 2.0).unwrap();
    let (mut whole, mut short) = ([1.0f32, 2.0], [Bf16(0x3f80)]); // 1
    let grad = [Bf16(0x4000)]; // 2
    sgd.step(&mut [Part::new(&mut whole, &[3.0f32, 4.0]), Part::new(&mut short, &grad)], 0.5).unwrap();
    sgd.step(&mut [Part::without_grad(&mut whole), Part::new(&mut short, &grad)], 0.5).unwrap();
    assert_eq!((whole, short), ([-0.5, 0.0], [Bf16(0x40c0)])); // 1 + 2 * 1 + 2 * 1.5 = 6
    assert_eq!(sgd.state_names(0).unwrap(), ["step"]);
    assert_eq!(sgd.state_names(1).unwrap(), ["step", "master", "momentum_buffer"]);
    assert_eq!(sgd.state::<f32>(1, "momentum_buffer").unwrap().data(), [-1.5]); // up the gradient
    let step = sgd.state::<i64>(1, "step").unwrap();
    assert_eq!((step.shape(), step.data()), (&[][..], &[2][..]));
    let stats = sgd.stats().unwrap();
    assert_eq!((stats.steps, stats.params, sgd.steps().unwrap()), (2, 2, 2));
}

#[test]
fn a_step_borrows_its_slices_from_any_thread() {
    let (mut adamw, mut weights, grad) = (make(0..35), vec![1.0f32; 35], vec![1.0f32; 35]);
    let mut parts = [Part::new(&mut weights, &grad)];
    std::thread::scope(|scope| scope.spawn(|| adamw.step(&mut parts, 1.0)).join().unwrap()).unwrap();
    assert_ne!(weights[0], 1.0);
}

#[test]
fn errors_name_the_fault() {
    let bad = AdamW::new(&linalg(), &AdamWOptions::default().beta1(1.0)).unwrap_err();
    assert!(bad.to_string().contains("options.beta1 = 1"), "{bad}");
    for options in [AdamWOptions::default().beta1(-1.0), AdamWOptions::default().eps(-1.0)] {
        let bad = AdamW::new(&linalg(), &options).unwrap_err(); // C expresses zero as -1
        assert!(bad.to_string().contains("must be > 0"), "{bad}");
    }
    let bad = Linalg::new(&Device::open("cpu").unwrap(), &LinalgOptions::default().threads(-1)).unwrap_err();
    assert!(bad.to_string().contains("threads = -1, must be 0 to 1024"), "{bad}");
    let mut adamw = make(0..35);
    let error = adamw.step(&mut [Part::new(&mut [0.0f32; 3], &[0.0f32; 3])], 1.0).unwrap_err();
    assert_eq!(error.status(), Status::SHAPE);
    let mut weights = [0.0f32; 35];
    let error = adamw.step(&mut [Part::new(&mut weights, &[0.0f32; 2])], 1.0).unwrap_err();
    assert!(error.status() == Status::SHAPE && error.text().contains("grads[0] has 2 elements"), "{error}");
    let error = adamw.step(&mut [Part::new(&mut weights, &[0i32; 35])], 1.0).unwrap_err();
    assert!(error.status() == Status::DTYPE && error.text().contains("grads[0] is int32"), "{error}");
    let error = adamw.step(&mut [Part::new(&mut [0.0f64; 35], &[0.0f32; 35])], 1.0).unwrap_err();
    assert!(error.status() == Status::DTYPE && error.text().contains("weights[0] is float64"), "{error}");
    assert_eq!(adamw.step(&mut [], 1.0).unwrap_err().status(), Status::INVALID);
    assert!(adamw.load(b"nothing").is_err());
    let error = adamw.add_param(&Param::new(&[1 << 40, 1 << 40])).unwrap_err();
    assert!(error.text().contains("shape"), "{error}");
    let error = adamw.add_param(&Param::new(&[4]).part(3..6)).unwrap_err();
    assert!(error.text().contains("offset = 3") && error.text().contains("count = 3"), "{error}");
    assert_eq!(adamw.add_param(&Param::new(&[4]).group(1)).unwrap_err().status(), Status::INVALID);
    let error = adamw.state::<f64>(0, "exp_avg").unwrap_err();
    assert!(error.status() == Status::DTYPE && error.text().contains("\"exp_avg\""), "{error}");
    assert_eq!(adamw.state::<f32>(0, "factor").unwrap_err().status(), Status::NOT_FOUND);
    assert_eq!(adamw.state::<f32>(0, "a\0b").unwrap_err().status(), Status::INVALID);
    assert_eq!(adamw.state_names(7).unwrap_err().status(), Status::NOT_FOUND);
}

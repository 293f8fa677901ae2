//! K-FAC: directions follow its equations, computed by hand; ranks share batches; layers that do not fit are errors.

mod common;

use common::{close, floats, linalg, noise, product, ranks, transpose};
use dc::{Bf16, Comm, Kfac, KfacApproximation, KfacInverse, KfacLayer, KfacOptions, Param, Part, Status, Tensor};

/// For two samples: the inputs of a layer with two inputs and two outputs, and the gradients of its outputs.
const INPUTS: [f32; 4] = [2.0, 0.0, 0.0, 1.0];
const DELTAS: [f32; 4] = [1.0, 0.0, 0.0, 3.0];

/// Steps that are only (G x A + damping I)^-1: no mean of factors, no momentum, no clipping.
fn plain() -> KfacOptions {
    KfacOptions::default().decay(0.0).momentum(0.0).kl_clip(0.0).damping(0.5)
}

fn made(options: &KfacOptions, comm: Option<&Comm>) -> Kfac {
    let mut kfac = match comm {
        Some(comm) => Kfac::with_comm(&linalg(), comm, options).unwrap(),
        None => Kfac::new(&linalg(), options).unwrap(),
    };
    kfac.add_param(&Param::new(&[2, 2])).unwrap();
    kfac.set_lr(0, 1.0).unwrap();
    kfac
}

fn doubles(numbers: &[f32]) -> Vec<f64> {
    numbers.iter().map(|number| f64::from(*number)).collect()
}

fn samples(numbers: &[f32]) -> Tensor<'_, f32> {
    Tensor::new(numbers, &[2, 2]).unwrap()
}

#[test]
fn a_linear_layers_direction_is_the_one_by_hand() {
    let mut kfac = made(&plain(), None);
    assert_eq!(kfac.add_layer(&KfacLayer::linear(), 0, None).unwrap(), 0);
    kfac.accumulate(0, &samples(&INPUTS), &samples(&DELTAS), 2.0).unwrap();
    let mut weights = [0.0f32; 4];
    kfac.step(&mut [Part::new(&mut weights, &[1.0f32, 2.0, 3.0, 4.0])], 1.0).unwrap();
    // A = sum a a^T / 2 = diag(2, 1/2), G = 2^2 sum d d^T / 2 = diag(2, 18)
    let expected = [-1.0 / (2.0 * 2.0 + 0.5), -2.0 / (2.0 * 0.5 + 0.5), -3.0 / (18.0 * 2.0 + 0.5), -4.0 / 9.5];
    close(&doubles(&weights), &expected, 1e-6);
    close(&doubles(kfac.state::<f32>(0, "factor_a").unwrap().data()), &[2.0, 0.0, 0.0, 0.5], 1e-6);
    close(&doubles(kfac.state::<f32>(0, "factor_g").unwrap().data()), &[2.0, 0.0, 0.0, 18.0], 1e-5);
    assert_eq!(kfac.stats().unwrap().blocks, 1);
}

#[test]
fn a_bias_is_one_more_input_and_factors_may_be_inverted_alone() {
    let mut kfac = made(&plain().inverse(KfacInverse::Factored), None);
    let bias = kfac.add_param(&Param::new(&[2])).unwrap();
    kfac.add_layer(&KfacLayer::linear(), 0, Some(bias)).unwrap();
    let ones = [Bf16(0x3f80); 4]; // the inputs have 16 bits, the deltas do not
    kfac.accumulate(0, &Tensor::new(&ones, &[2, 2]).unwrap(), &samples(&DELTAS), 1.0).unwrap();
    let (mut weights, mut biases) = ([0.0f32; 4], [0.0f32; 2]);
    let parts = &mut [Part::new(&mut weights, &[1.0f32, 1.0, 0.0, 0.0]), Part::new(&mut biases, &[1.0f32, 0.0])];
    kfac.step(parts, 1.0).unwrap();
    // A is 1 everywhere, with the eigenvalue 3 for (1, 1, 1); G = diag(1/2, 9/2); their mean eigenvalues are 1 and 5/2
    let (ratio, damping) = ((1.0f64 / 2.5).sqrt(), 0.5f64.sqrt());
    let expected = -1.0 / ((3.0 + ratio * damping) * (0.5 + damping / ratio));
    close(&doubles(&weights), &[expected, expected, 0.0, 0.0], 1e-6);
    close(&doubles(&biases), &[expected, 0.0], 1e-6);
    close(&doubles(kfac.state::<f32>(0, "factor_a").unwrap().data()), &[1.0; 9], 1e-6);
}

#[test]
fn a_convolution_of_one_element_is_a_linear_layer_at_each_place() {
    let (inputs, deltas) = (floats(&noise(1, 3 * 4 * 2)), floats(&noise(2, 3 * 4 * 2)));
    let places = |numbers: &[f32]| -> Vec<f32> {
        numbers.chunks(8).flat_map(|sample| floats(&transpose(&doubles(sample), 4))).collect()
    };
    let step = |layer: KfacLayer, inputs: &[f32], deltas: &[f32], shape: &[i64], weight: &[i64]| {
        let mut kfac = Kfac::new(&linalg(), &plain()).unwrap();
        kfac.add_param(&Param::new(weight)).unwrap();
        kfac.add_layer(&layer, 0, None).unwrap();
        let (x, d) = (Tensor::new(inputs, shape).unwrap(), Tensor::new(deltas, shape).unwrap());
        kfac.accumulate(0, &x, &d, 1.0).unwrap();
        let mut weights = [0.0f32; 4];
        kfac.step(&mut [Part::new(&mut weights, &[1.0f32, 2.0, 3.0, 4.0])], 1000.0).unwrap();
        weights
    };
    for approximation in [KfacApproximation::Expand, KfacApproximation::Reduce] {
        let conv = KfacLayer::conv(&[1]).stride(&[1]).padding(&[0]).dilation(&[1]).groups(1);
        let by_conv = step(conv.approximation(approximation), &inputs, &deltas, &[3, 2, 4], &[2, 2, 1]);
        let linear = KfacLayer::linear().approximation(approximation);
        let by_linear = step(linear, &places(&inputs), &places(&deltas), &[3, 4, 2], &[2, 2]);
        close(&doubles(&by_conv), &doubles(&by_linear), 1e-3);
    }
}

#[test]
fn ranks_with_a_sample_each_are_one_with_both() {
    let whole = |comm: Option<&Comm>, parts: &[usize]| {
        let mut kfac = made(&plain(), comm);
        kfac.add_layer(&KfacLayer::linear(), 0, None).unwrap();
        for at in parts {
            let (x, d) = (&INPUTS[2 * at..2 * at + 2], &DELTAS[2 * at..2 * at + 2]);
            kfac.accumulate(0, &Tensor::new(x, &[1, 2]).unwrap(), &Tensor::new(d, &[1, 2]).unwrap(), 2.0).unwrap();
        }
        let mut weights = [0.0f32; 4];
        kfac.step(&mut [Part::new(&mut weights, &[1.0f32, 2.0, 3.0, 4.0])], 1.0).unwrap();
        weights
    };
    let alone = whole(None, &[0, 1]);
    for rank in ranks(2, |comm| whole(Some(&comm), &[comm.rank() as usize])) {
        close(&doubles(&rank.unwrap()), &doubles(&alone), 1e-6);
    }
}

#[test]
fn a_quadratic_loss_is_gone_in_few_steps() {
    // |W X - Y|^2 / 2 over 12 samples has the curvature I x X X^T: orthonormal deltas make G = I.
    let (x, solution) = (noise(3, 12 * 2), noise(4, 4));
    let mut kfac = made(&plain().damping(1e-6).refresh_frequency(1), None);
    kfac.add_layer(&KfacLayer::linear(), 0, None).unwrap();
    let (inputs, mut weights) = (floats(&x), [0.0f32; 4]);
    let deltas: Vec<f32> = (0..24).map(|at| if at % 2 == at / 2 % 2 { 2f32.sqrt() } else { 0.0 }).collect();
    for _ in 0..3 {
        let off: Vec<f64> = weights.iter().zip(&solution).map(|(w, s)| f64::from(*w) - s).collect();
        let grad = floats(&product(&off, &product(&transpose(&x, 2), &x, 12), 2));
        let (x, d) = (Tensor::new(&inputs, &[12, 2]).unwrap(), Tensor::new(&deltas, &[12, 2]).unwrap());
        kfac.accumulate(0, &x, &d, 1.0).unwrap();
        kfac.step(&mut [Part::new(&mut weights, &grad)], 1.0 / 12.0).unwrap();
    }
    close(&doubles(&weights), &solution, 1e-4);
}

#[test]
fn errors_name_the_fault() {
    let mut kfac = made(&plain(), None);
    let error = kfac.add_layer(&KfacLayer::conv(&[1, 2, 3, 4]), 0, None).unwrap_err();
    assert!(error.status() == Status::INVALID && error.text().contains("kernel = [1, 2, 3, 4], must have 1 to 3"));
    assert_eq!(kfac.add_layer(&KfacLayer::linear(), 5, None).unwrap_err().status(), Status::NOT_FOUND);
    assert_eq!(kfac.add_layer(&KfacLayer::conv(&[3, 3]), 0, None).unwrap_err().status(), Status::SHAPE);
    kfac.add_layer(&KfacLayer::linear(), 0, None).unwrap();
    assert_eq!(kfac.add_layer(&KfacLayer::linear(), 0, None).unwrap_err().status(), Status::EXISTS);
    let (x, d) = (samples(&INPUTS), samples(&DELTAS));
    assert_eq!(kfac.accumulate(1, &x, &d, 1.0).unwrap_err().status(), Status::NOT_FOUND);
    let error = kfac.accumulate(0, &x, &d, 0.0).unwrap_err();
    assert!(error.status() == Status::INVALID && error.text().contains("loss_scale = 0"), "{error}");
    let error = kfac.accumulate(0, &Tensor::new(&INPUTS, &[4]).unwrap(), &d, 1.0).unwrap_err();
    assert_eq!(error.status(), Status::SHAPE);
    let error = kfac.accumulate(0, &x, &Tensor::new(&[1i64; 4], &[2, 2]).unwrap(), 1.0).unwrap_err();
    assert!(error.status() == Status::DTYPE && error.text().contains("delta"), "{error}");
    let bad = [f32::INFINITY; 4];
    assert_eq!(kfac.accumulate(0, &samples(&bad), &d, 1.0).unwrap_err().status(), Status::NOT_FINITE);
    assert_eq!(kfac.accumulate(0, &x.transposed(), &d, 1.0).unwrap_err().status(), Status::SHAPE);
    kfac.step(&mut [Part::new(&mut [0.0f32; 4], &[1.0f32; 4])], 1.0).unwrap();
    assert_eq!(kfac.add_layer(&KfacLayer::linear(), 0, None).unwrap_err().status(), Status::STATE);
}

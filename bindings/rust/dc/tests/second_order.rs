//! Muon, Shampoo and SOAP: directions match their definitions, two ranks give the bits of one, saved states continue.

mod common;

use common::{close, floats, identity, linalg, noise, product, ranks, transpose};
use dc::{Comm, DType, Graft, Kfac, KfacOptions, Muon, MuonAdjust, MuonOptions, Optimizer, Param, Part, Polynomial};
use dc::{Distributed, Shampoo, ShampooOptions, Soap, SoapOptions, Status, Tensor};

const SHAPE: [i64; 2] = [4, 6];

fn doubles(numbers: &[f32]) -> Vec<f64> {
    numbers.iter().map(|number| f64::from(*number)).collect()
}

/// One parameter of this shape, with learning rate `lr`.
fn new_optimizer<K: Distributed>(options: &K, comm: Option<&Comm>, param: &Param, lr: f64) -> Optimizer<K> {
    let mut optimizer = match comm {
        Some(comm) => Optimizer::with_comm(&linalg(), comm, options).unwrap(),
        None => Optimizer::new(&linalg(), options).unwrap(),
    };
    optimizer.add_param(param).unwrap();
    optimizer.set_lr(0, lr).unwrap();
    optimizer
}

/// Q of Q R or of U V^T: its rows are orthonormal.
#[track_caller]
fn orthonormal_rows(matrix: &[f64], columns: usize, tolerance: f64) {
    let gram = product(matrix, &transpose(matrix, columns), columns);
    close(&gram, &identity(matrix.len() / columns), tolerance);
}

#[test]
fn muon_makes_the_direction_orthogonal() {
    let options = MuonOptions::default().momentum(0.0).steps(8).precision(DType::Float32).adjust(MuonAdjust::Plain);
    let mut muon: Muon = new_optimizer(&options, None, &Param::new(&SHAPE), 1.0);
    let mut weights = [0.0f32; 24];
    muon.step(&mut [Part::new(&mut weights, &floats(&noise(1, 24)))], 1.0).unwrap();
    orthonormal_rows(&doubles(&weights), 6, 1e-4);
}

#[test]
fn muon_steps_along_its_momentum() {
    follows_its_momentum(MuonOptions::default(), true);
    follows_its_momentum(MuonOptions::default().nesterov(false), false);
}

fn follows_its_momentum(options: MuonOptions, nesterov: bool) {
    let options = options.momentum(0.5).weight_decay(0.1).polynomial(Polynomial::Muon).precision(DType::Float32);
    let mut muon: Muon = new_optimizer(&options, None, &Param::new(&SHAPE), 0.25);
    let grads = [noise(1, 24), noise(2, 24)];
    let (mut weights, mut momentum, mut expected) = ([1.0f32; 24], vec![0.0; 24], vec![1.0; 24]);
    for grad in &grads {
        muon.step(&mut [Part::new(&mut weights, &floats(grad))], 1.0).unwrap();
        momentum = momentum.iter().zip(grad).map(|(b, g)| 0.5 * b + g).collect();
        let ahead = |(b, g): (&f64, &f64)| if nesterov { g + 0.5 * b } else { *b };
        let ahead: Vec<f64> = momentum.iter().zip(grad).map(ahead).collect();
        let direction = linalg().orthogonalize(&Tensor::new(&ahead, &SHAPE).unwrap(), Polynomial::Muon, 0).unwrap();
        expected = expected.iter().zip(&direction).map(|(w, d)| (1.0 - 0.25 * 0.1) * w - 0.25 * d).collect();
    }
    close(&doubles(&weights), &expected, 1e-5); // for a wide matrix the adjustment is 1
    close(&doubles(muon.state::<f32>(0, "momentum.0").unwrap().data()), &momentum, 1e-6);
}

#[test]
fn shampoos_first_direction_is_the_orthogonal_factor() {
    // (G G^T)^(-1/4) G (G^T G)^(-1/4) = U V^T of G = U S V^T
    let options = ShampooOptions::default().beta1(0.0).graft(Graft::None).eps_rel(0.0);
    let mut shampoo: Shampoo = new_optimizer(&options, None, &Param::new(&[5, 5]), 1.0);
    let grad: Vec<f64> = noise(3, 25).iter().zip(identity(5)).map(|(x, one)| x + 2.0 * one).collect();
    let mut weights = [0.0f32; 25];
    shampoo.step(&mut [Part::new(&mut weights, &floats(&grad))], 1.0).unwrap();
    orthonormal_rows(&doubles(&weights), 5, 1e-4);
    let factor = doubles(shampoo.state::<f32>(0, "factor.0.0").unwrap().data());
    close(&factor, &product(&grad, &transpose(&grad, 5), 5), 1e-4);
    let root = doubles(shampoo.state::<f32>(0, "root.0.0").unwrap().data());
    let square = product(&root, &root, 5);
    close(&product(&product(&square, &square, 5), &factor, 5), &identity(5), 1e-3); // root^4 times the matrix
    assert_eq!(shampoo.stats().unwrap().refreshes, 2);
}

#[test]
fn soap_is_adam_in_the_eigenbasis() {
    // Adam's first direction has elements of 1 and -1, and a rotation keeps its length.
    let mut soap: Soap = new_optimizer(&SoapOptions::default().eps(0.0), None, &Param::new(&SHAPE), 0.5);
    let mut weights = [1.0f32; 24];
    soap.step(&mut [Part::new(&mut weights, &floats(&noise(4, 24)))], 1.0).unwrap();
    assert_eq!(weights, [1.0; 24]); // the first step only makes the bases
    let vectors = doubles(soap.state::<f32>(0, "vectors.0.0").unwrap().data());
    orthonormal_rows(&vectors, 4, 1e-5);
    let factor = doubles(soap.state::<f32>(0, "factor.0.0").unwrap().data());
    let turned = product(&product(&transpose(&vectors, 4), &factor, 4), &vectors, 4);
    let diagonal: Vec<f64> = turned.iter().zip(identity(4)).map(|(x, one)| x * one).collect();
    close(&turned, &diagonal, 1e-5);
    soap.step(&mut [Part::new(&mut weights, &floats(&noise(5, 24)))], 1.0).unwrap();
    let squares: f64 = weights.iter().map(|w| f64::from(w - 1.0).powi(2)).sum();
    close(&[squares.sqrt()], &[0.5 * 24f64.sqrt()], 1e-4);
}

/// Steps from weights of 0, of which this rank has `part`. Returns the weights after each step. `again`: each step is
/// made by a new optimizer that loads the state.
fn train<K: Distributed>(options: &K, comm: Option<&Comm>, part: std::ops::Range<usize>, again: bool) -> Vec<Vec<f32>> {
    let param = Param::new(&SHAPE).part(part.start as i64..part.end as i64);
    let (mut optimizer, mut weights) = (new_optimizer(options, comm, &param, 0.05), vec![0.0f32; part.len()]);
    let mut seen = Vec::new();
    for step in 0..6 {
        let grad = floats(&noise(step, 24));
        optimizer.step(&mut [Part::new(&mut weights, &grad[part.clone()])], 0.5).unwrap();
        if again {
            let state = optimizer.save().unwrap();
            optimizer = new_optimizer(options, comm, &param, 0.05);
            optimizer.load(&state).unwrap();
        }
        seen.push(weights.clone());
    }
    assert_eq!(optimizer.steps().unwrap(), 6);
    seen
}

fn ranks_and_states<K: Distributed + Sync>(options: &K) {
    let whole = train(options, None, 0..24, false);
    assert_eq!(whole, train(options, None, 0..24, true));
    let both = ranks(2, |comm| {
        let part = if comm.rank() == 0 { 0..9 } else { 9..24 };
        train(options, Some(&comm), part, comm.size() == 2)
    });
    let both: Vec<_> = both.into_iter().map(Result::unwrap).collect();
    for (step, weights) in whole.iter().enumerate() {
        assert_eq!(*weights, [&both[0][step][..], &both[1][step][..]].concat(), "step {step}");
    }
}

#[test]
fn two_ranks_have_the_bits_of_one_and_states_go_on() {
    ranks_and_states(&MuonOptions::default().num_splits(2));
    ranks_and_states(&ShampooOptions::default().max_block(3).precondition_frequency(2).momentum(0.5));
    ranks_and_states(&SoapOptions::default().precondition_frequency(2));
    ranks_and_states(&KfacOptions::default());
}

/// |W A - B|^2 after steps along its gradient, relative to its value before.
fn fitted<K: Distributed>(options: &K) -> f64 {
    let (a, solution) = (noise(7, 6 * 12), noise(8, 24));
    let mut optimizer = new_optimizer(options, None, &Param::new(&SHAPE), 0.02);
    let mut weights = vec![0.0f32; 24];
    let off = |weights: &[f32]| -> Vec<f64> {
        let error: Vec<f64> = weights.iter().zip(&solution).map(|(w, s)| f64::from(*w) - s).collect();
        product(&error, &a, 6)
    };
    let loss = |weights: &[f32]| off(weights).iter().map(|x| x * x).sum::<f64>();
    let before = loss(&weights);
    for _ in 0..60 {
        let grad = floats(&product(&off(&weights), &transpose(&a, 12), 12));
        optimizer.step(&mut [Part::new(&mut weights, &grad)], 2.0).unwrap();
    }
    loss(&weights) / before
}

#[test]
fn losses_fall() {
    let ratios = [fitted(&MuonOptions::default()), fitted(&ShampooOptions::default()), fitted(&SoapOptions::default())];
    assert!(ratios.iter().all(|ratio| *ratio < 0.25), "{ratios:?}");
}

#[test]
fn a_panic_frees_the_other_ranks() {
    let results = ranks(2, |comm| {
        let muon = Muon::with_comm(&linalg(), &comm, &MuonOptions::default());
        assert!(comm.rank() == 0, "on purpose");
        // The abort may come while this rank still makes its optimizer.
        let step = |mut muon: Muon| {
            muon.add_param(&Param::new(&SHAPE).part(0..24))?;
            muon.step(&mut [Part::new(&mut [0.0f32; 24], &[1.0f32; 24])], 1.0)
        };
        muon.and_then(step).unwrap_err()
    });
    let error = results[0].as_ref().unwrap();
    assert!(error.status() == Status::ABORTED && error.text().contains("panicked"), "{error}");
    assert!(results[1].is_err());
}

#[test]
fn errors_name_the_fault() {
    for (error, sentence) in [
        (Muon::new(&linalg(), &MuonOptions::default().momentum(1.5)).err(), "options.momentum = 1.5"),
        (Muon::new(&linalg(), &MuonOptions::default().precision(dc::DType::Float16)).err(), "options.precision"),
        (Shampoo::new(&linalg(), &ShampooOptions::default().max_block(-3)).err(), "options.max_block = -3"),
        (Shampoo::new(&linalg(), &ShampooOptions::default().nesterov(true)).err(), "options.nesterov = 1"),
        (Soap::new(&linalg(), &SoapOptions::default().shampoo_beta(2.0)).err(), "options.shampoo_beta = 2"),
        (Kfac::new(&linalg(), &KfacOptions::default().damping(-1.0)).err(), "options.damping = -1"),
    ] {
        let error = error.unwrap();
        assert!(error.status() == Status::INVALID && error.text().contains(sentence), "{error}");
    }
    let mut muon: Muon = new_optimizer(&MuonOptions::default(), None, &Param::new(&SHAPE), 0.1);
    assert_eq!(muon.add_param(&Param::new(&[5])).unwrap_err().status(), Status::SHAPE);
    let mut weights = [0.0f32; 24];
    let error = muon.step(&mut [Part::new(&mut weights, &[f32::NAN; 24])], 1.0).unwrap_err();
    assert_eq!((error.status(), weights), (Status::NOT_FINITE, [0.0; 24]));
    let mut soap: Soap = new_optimizer(&SoapOptions::default(), None, &Param::new(&SHAPE), 0.1);
    assert_eq!(soap.load(&muon.save().unwrap()).unwrap_err().status(), Status::STATE);
}

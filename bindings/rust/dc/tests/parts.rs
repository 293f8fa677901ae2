//! Optimizers on the parameters of a context: every stage and number of ranks gives the bits of one rank.

mod common;

use common::{floats, linalg, noise, ranks};
use dc::{
    AdamW, AdamWOptions, Comm, Config, Context, Device, Muon, MuonOptions, Part, Sgd, SgdOptions, Stage, Status,
    Z3Options,
};

const GRAPH: i64 = 1;
/// Of the second parameter, two ranks have parts of 8 and 7 elements; stage 3 pads.
const SHAPES: [(i64, [i64; 2]); 2] = [(10, [4, 6]), (20, [3, 5])];

fn new_context(comm: Option<&Comm>) -> Context {
    Context::builder().bucket(64).build(&Device::open("cpu").unwrap(), comm).unwrap()
}

/// Steps of Muon from weights of 1. Returns the whole weights after them.
fn train(comm: Option<&Comm>, stage: Stage) -> Vec<Vec<f32>> {
    let (rank, size) = comm.map_or((0, 1), |comm| (comm.rank() as usize, comm.size() as usize));
    let (mut context, ids) = (new_context(comm), SHAPES.map(|(id, _)| id));
    let mut muon = match comm {
        Some(comm) => Muon::with_comm(&linalg(), comm, &MuonOptions::default()).unwrap(),
        None => Muon::new(&linalg(), &MuonOptions::default()).unwrap(),
    };
    muon.set_lr(0, 0.1).unwrap();
    for (id, shape) in SHAPES {
        let numel = (shape[0] * shape[1]) as usize;
        let length = (numel + size - 1) / size;
        if stage == Stage::Z3 {
            let (shard, grad) = (vec![1f32; length], vec![0f32; length]);
            context.register_z3_param(id, &shape, shard, grad, Z3Options::default()).unwrap();
        } else {
            let part = rank * length..((rank + 1) * length).min(numel);
            let grad = vec![0f32; part.len()];
            context.register_param(id, &shape, vec![1f32; numel], grad, part.start as i64).unwrap();
        }
        muon.add_param(&context.param(id).unwrap()).unwrap();
    }
    context.register_graph(GRAPH, stage, &ids).unwrap();
    for step in 0..3 {
        context.start_backward(true).unwrap();
        for (id, shape) in SHAPES {
            let grad = floats(&noise(step * 100 + id as u64, (shape[0] * shape[1]) as usize));
            context.reduce_grad(GRAPH, id, &grad).unwrap();
        }
        assert_eq!(context.parts(&ids).unwrap_err().status(), Status::BUSY);
        context.end_backward(GRAPH, false).unwrap();
        muon.step(&mut context.parts(&ids).unwrap(), 1.0).unwrap();
        context.params_updated(&ids).unwrap();
    }
    let whole = |(id, _)| -> Vec<f32> {
        if stage == Stage::Z3 {
            return context.gather::<f32>(GRAPH, id).unwrap().to_vec();
        }
        context.update(id, |weights: &mut [f32], _: &mut [f32]| weights.to_vec()).unwrap()
    };
    SHAPES.map(whole).to_vec()
}

#[test]
fn muon_steps_on_the_parameters_of_every_stage() {
    let alone = train(None, Stage::Z0);
    assert_ne!(alone[0], vec![1.0; 24]);
    assert_eq!(train(None, Stage::Z3), alone);
    for whole in ranks(2, |comm| train(Some(&comm), Stage::Z3)) {
        assert_eq!(whole.unwrap(), alone);
    }
    let halves: Vec<_> = ranks(2, |comm| train(Some(&comm), Stage::Z2)).into_iter().map(Result::unwrap).collect();
    for (param, whole) in alone.iter().enumerate() {
        let middle = (whole.len() + 1) / 2; // the rank must not have changed the rest
        assert_eq!(halves[0][param], [&whole[..middle], &vec![1.0; whole.len() - middle]].concat());
        assert_eq!(halves[1][param], [&vec![1.0; middle], &whole[middle..]].concat());
    }
}

/// Two groups of two ranks: a shard is half of the 7 elements, rounded up, and the optimizer has all of it.
#[test]
fn replicas_have_the_parts_of_their_group() {
    let results = ranks(4, |comm| {
        let builder = Context::builder().bucket(64).config(Config::default().replicas(2));
        let mut context = builder.build(&Device::open("cpu").unwrap(), Some(&comm)).unwrap();
        context.register_z3_param(1, &[7], vec![1f32; 4], vec![0f32; 4], Z3Options::default()).unwrap();
        context.register_graph(GRAPH, Stage::Z3, &[1]).unwrap();
        let mut sgd = Sgd::new(&linalg(), &SgdOptions::default()).unwrap();
        sgd.set_lr(0, 1.0).unwrap();
        sgd.add_param(&context.param(1).unwrap()).unwrap();
        context.start_backward(true).unwrap();
        context.reduce_grad(GRAPH, 1, &[0.5f32; 7]).unwrap();
        context.end_backward(GRAPH, false).unwrap();
        sgd.step(&mut context.parts(&[1]).unwrap(), 1.0).unwrap();
        context.params_updated(&[1]).unwrap();
        let whole = context.gather::<f32>(GRAPH, 1).unwrap().to_vec();
        whole
    });
    for whole in results {
        assert_eq!(whole.unwrap(), [0.5; 7]);
    }
}

#[test]
fn a_frozen_parameter_is_left_alone_and_may_thaw() {
    let mut context = new_context(None);
    context.register_param(1, &[3], vec![1f32; 3], vec![0f32; 3], 0).unwrap();
    context.register_z3_param(2, &[2], vec![1f32; 2], Vec::<f32>::new(), Z3Options::default()).unwrap();
    let mut sgd = Sgd::new(&linalg(), &SgdOptions::default()).unwrap();
    sgd.set_lr(0, 1.0).unwrap();
    for id in [1, 2] {
        sgd.add_param(&context.param(id).unwrap()).unwrap();
    }
    context.update(1, |_: &mut [f32], grad: &mut [f32]| grad.fill(0.5)).unwrap();
    sgd.step(&mut context.parts(&[1, 2]).unwrap(), 1.0).unwrap();
    context.update_param_grad_buffer(2, vec![0f32; 2], 0).unwrap();
    context.update(2, |_: &mut [f32], grad: &mut [f32]| grad.fill(0.25)).unwrap();
    sgd.step(&mut context.parts(&[1, 2]).unwrap(), 1.0).unwrap();
    let weights = [1, 2].map(|id| context.update(id, |w: &mut [f32], _: &mut [f32]| w.to_vec()).unwrap());
    assert_eq!(weights, [vec![0.0; 3], vec![0.75; 2]]);
}

/// The last rank's shards are only padding; the presence of a gradient still tells whether a parameter is frozen.
#[test]
fn a_rank_of_padding_leaves_a_frozen_parameter_alone_too() {
    let results = ranks(3, |comm| {
        let (mut context, options) = (new_context(Some(&comm)), Z3Options::default());
        context.register_z3_param(1, &[1, 2], vec![1f32], Vec::<f32>::new(), options).unwrap();
        context.register_z3_param(2, &[2, 2], vec![1f32; 2], vec![0f32; 2], options).unwrap();
        let mut muon = Muon::with_comm(&linalg(), &comm, &MuonOptions::default()).unwrap();
        for id in [1, 2] {
            muon.add_param(&context.param(id).unwrap()).unwrap();
        }
        context.update(2, |_: &mut [f32], grad: &mut [f32]| grad.fill(0.5)).unwrap();
        muon.step(&mut context.parts(&[1, 2]).unwrap(), 1.0).unwrap();
        [1, 2].map(|id| context.update(id, |weights: &mut [f32], _: &mut [f32]| weights[0]).unwrap())
    });
    for (rank, weights) in results.into_iter().map(Result::unwrap).enumerate() {
        assert_eq!((weights[0], weights[1] == 1.0), (1.0, rank == 2));
    }
}

#[test]
fn errors_name_the_fault() {
    let mut context = new_context(None);
    context.register_param(1, &[3], vec![1f32; 3], vec![0f32; 3], 0).unwrap();
    context.register_param(2, &[2], vec![1f64; 2], vec![0f64; 2], 0).unwrap();
    let error = context.parts(&[1, 1]).unwrap_err();
    assert!(error.status() == Status::INVALID && error.text().contains("id = 1 is named twice"), "{error}");
    assert_eq!(context.parts(&[3]).unwrap_err().status(), Status::NOT_FOUND);
    assert_eq!(context.param(3).unwrap_err().status(), Status::NOT_FOUND);
    let mut adamw = AdamW::new(&linalg(), &AdamWOptions::default()).unwrap();
    let error = adamw.add_param(&context.param(2).unwrap()).unwrap_err();
    assert!(error.status() == Status::DTYPE && error.text().contains("float64"), "{error}");
    adamw.add_param(&context.param(1).unwrap()).unwrap();
    let error = adamw.step(&mut context.parts(&[2]).unwrap(), 1.0).unwrap_err();
    assert!(error.text().contains("weights[0] has 2 elements, must have 3"), "{error}");
    let mut parts: Vec<Part> = context.parts(&[1]).unwrap();
    adamw.step(&mut parts, 1.0).unwrap();
    adamw.step(&mut parts, 1.0).unwrap(); // with the same gradient
    assert_eq!(adamw.steps().unwrap(), 2);
}

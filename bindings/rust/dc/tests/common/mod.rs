//! Ranks that are threads, for tests.
#![allow(dead_code)]

use dc::{Comm, CommOptions, Context, Device, Linalg, LinalgOptions, Stage, Z3Options};
use std::time::Duration;

pub const GRAPH: i64 = 1;

pub fn limits() -> CommOptions {
    CommOptions { timeout: Some(Duration::from_secs(20)), ..Default::default() }
}

/// Runs each rank on a thread of its own. Returns the results in rank order, a panic as an error.
pub fn ranks<R: Send>(size: i32, body: impl Fn(Comm) -> R + Sync) -> Vec<std::thread::Result<R>> {
    let (comms, body) = (Comm::threads(size, &limits()).unwrap(), &body);
    std::thread::scope(|scope| {
        let threads: Vec<_> = comms.into_iter().map(|comm| scope.spawn(move || body(comm))).collect();
        threads.into_iter().map(|thread| thread.join()).collect()
    })
}

pub fn context(comm: &Comm) -> Context {
    Context::builder().bucket(64).build(&Device::open("cpu").unwrap(), Some(comm)).unwrap()
}

pub fn linalg() -> Linalg {
    Linalg::new(&Device::open("cpu").unwrap(), &LinalgOptions::default().threads(1)).unwrap()
}

/// Numbers between -1 and 1 without a pattern, the same in every run.
pub fn noise(seed: u64, count: usize) -> Vec<f64> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) + 1;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 11) as f64 / (1u64 << 52) as f64 - 1.0
    };
    (0..count).map(|_| next()).collect()
}

pub fn floats(numbers: &[f64]) -> Vec<f32> {
    numbers.iter().map(|number| *number as f32).collect()
}

/// A B of an [m, k] and a [k, n] matrix, by definition.
pub fn product(a: &[f64], b: &[f64], k: usize) -> Vec<f64> {
    let n = b.len() / k;
    let element = |i: usize, j: usize| (0..k).map(|at| a[i * k + at] * b[at * n + j]).sum();
    (0..a.len() / k * n).map(|at| element(at / n, at % n)).collect()
}

pub fn transpose(a: &[f64], columns: usize) -> Vec<f64> {
    let rows = a.len() / columns;
    (0..a.len()).map(|at| a[at % rows * columns + at / rows]).collect()
}

pub fn identity(n: usize) -> Vec<f64> {
    (0..n * n).map(|at| f64::from(u8::from(at % (n + 1) == 0))).collect()
}

#[track_caller]
pub fn close(found: &[f64], expected: &[f64], tolerance: f64) {
    assert_eq!(found.len(), expected.len());
    let far =
        found.iter().zip(expected).position(|(x, y)| (x - y).abs().partial_cmp(&tolerance).map_or(true, |o| o.is_gt()));
    if let Some(at) = far {
        panic!("element {at} is {}, not {} within {tolerance}", found[at], expected[at]);
    }
}

/// The weight at a place of a parameter: exact in every float type.
pub fn weight(id: i64, at: usize) -> f32 {
    ((id as usize * 31 + at * 7) % 61) as f32 / 4.0 - 7.0
}

/// Registers a parameter of `numel` weights, and a graph with the same id that has only this parameter.
pub fn register(context: &mut Context, comm: &Comm, id: i64, numel: usize) {
    let chunk = (numel + comm.size() as usize - 1) / comm.size() as usize;
    let begin = comm.rank() as usize * chunk;
    let shard: Vec<f32> = (begin..begin + chunk).map(|at| if at < numel { weight(id, at) } else { f32::NAN }).collect();
    let grad = vec![9.0f32; chunk];
    context.register_z3_param(id, &[numel as i64], shard, grad, Z3Options::default()).unwrap();
    context.register_graph(id, Stage::Z3, &[id]).unwrap();
}

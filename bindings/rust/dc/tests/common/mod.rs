//! Ranks as threads, for tests.
#![allow(dead_code)]

use dc::{Comm, CommOptions, Context, Device, Stage, Z3Options};
use std::time::Duration;

pub const GRAPH: i64 = 1;

pub fn limits() -> CommOptions {
    CommOptions { timeout: Some(Duration::from_secs(20)), ..Default::default() }
}

/// Runs a rank on a thread of its own for each rank; the results in rank order, a panic as an error.
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

/// The weight at a place of a parameter: exact in every float type.
pub fn weight(id: i64, at: usize) -> f32 {
    ((id as usize * 31 + at * 7) % 61) as f32 / 4.0 - 7.0
}

/// Registers a parameter of `numel` weights, and a graph of it alone under its id.
pub fn register(context: &mut Context, comm: &Comm, id: i64, numel: usize) {
    let chunk = (numel + comm.size() as usize - 1) / comm.size() as usize;
    let begin = comm.rank() as usize * chunk;
    let shard: Vec<f32> = (begin..begin + chunk).map(|at| if at < numel { weight(id, at) } else { f32::NAN }).collect();
    let grad = vec![9.0f32; chunk];
    context.register_z3_param(id, &[numel as i64], shard, grad, Z3Options::default()).unwrap();
    context.register_graph(id, Stage::Z3, &[id]).unwrap();
}

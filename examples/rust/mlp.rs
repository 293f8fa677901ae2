//! ZeRO-3 from Rust: two ranks, as threads, teach a small network to read digits. Each holds half of the weights and of
//! their gradients; whole weights exist only between gather and drop. Prints the loss and its bits, which are those
//! that examples/c/mlp.c and examples/python/mlp.py print.
//!
//! SPDX-License-Identifier: Apache-2.0
use dc::{Comm, CommOptions, Context, Device, ReduceOp, Stage, Z3Options};
use std::thread;

const RANKS: usize = 2;
const BATCH: usize = 40;
const STEPS: usize = 60;
const RATE: f64 = 0.0625;
const PIXELS: usize = 64;
const HIDDEN: usize = 16;
const DIGITS: usize = 10;
const ROW1: usize = PIXELS + 1; // weights, then the bias
const ROW2: usize = HIDDEN + 1;
const GRAPH: i64 = 1;
const W1: i64 = 10;
const W2: i64 = 20;

const FONT: [u64; DIGITS] = [
    0x3c666e7666663c00,
    0x1818381818187e00,
    0x3c66060c30607e00,
    0x3c66061c06663c00,
    0x060e1e667f060600,
    0x7e607c0606663c00,
    0x3c66607c66663c00,
    0x7e660c1818181800,
    0x3c66663c66663c00,
    0x3c66663e06663c00,
];

/// A generator that is the same in every language: Knuth's MMIX, upper half.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 32) as u32
    }

    /// Exact numbers in -1 / scale .. 1 / scale.
    fn weights(&mut self, count: usize, scale: f64) -> Vec<f64> {
        (0..count).map(|_| ((self.next() >> 16) as f64 - 32768.0) / (32768.0 * scale)).collect()
    }
}

/// A digit drawn in 64 pixels with noise; the same number gives the same picture.
fn picture(number: usize) -> (usize, [f64; PIXELS]) {
    let (digit, mut random, mut pixels) = (number % DIGITS, Random(number as u64 + 1), [0.0; PIXELS]);
    for (at, pixel) in pixels.iter_mut().enumerate() {
        let ink = if FONT[digit] >> (63 - at) & 1 == 1 { 12 } else { 0 };
        *pixel = f64::from(ink + (random.next() >> 30)) / 16.0;
    }
    (digit, pixels)
}

/// One picture's loss; adds its gradient.
fn learn(number: usize, w1: &[f64], w2: &[f64], g1: &mut [f64], g2: &mut [f64]) -> f64 {
    let (digit, x) = picture(number);
    let (mut h, mut dh, mut loss) = ([0.0; HIDDEN], [0.0; HIDDEN], 0.0);
    for j in 0..HIDDEN {
        let sum = (0..PIXELS).fold(w1[j * ROW1 + PIXELS], |sum, k| sum + w1[j * ROW1 + k] * x[k]);
        h[j] = if sum > 0.0 { sum } else { 0.0 };
    }
    for c in 0..DIGITS {
        let sum = (0..HIDDEN).fold(w2[c * ROW2 + HIDDEN], |sum, j| sum + w2[c * ROW2 + j] * h[j]);
        let error = sum - if c == digit { 1.0 } else { 0.0 };
        loss += error * error;
        let d = 2.0 * error / (BATCH / RANKS) as f64;
        for j in 0..HIDDEN {
            g2[c * ROW2 + j] += d * h[j];
            dh[j] += d * w2[c * ROW2 + j];
        }
        g2[c * ROW2 + HIDDEN] += d;
    }
    for j in (0..HIDDEN).filter(|j| h[*j] > 0.0) {
        (0..PIXELS).for_each(|k| g1[j * ROW1 + k] += dh[j] * x[k]);
        g1[j * ROW1 + PIXELS] += dh[j];
    }
    loss
}

fn train(comm: Comm) -> dc::Result<Vec<f64>> {
    let rank = comm.rank() as usize;
    let mut context = Context::builder().bucket(4096).build(&Device::open("cpu")?, Some(&comm))?;
    let mut random = Random(0);
    for (id, rows, columns, scale) in [(W1, HIDDEN, ROW1, 8.0), (W2, DIGITS, ROW2, 4.0)] {
        let half = rows * columns / RANKS;
        let shard = random.weights(rows * columns, scale)[rank * half..(rank + 1) * half].to_vec();
        let shape = [rows as i64, columns as i64];
        context.register_z3_param(id, &shape, shard, vec![0.0f64; half], Z3Options::default())?;
    }
    context.register_graph(GRAPH, Stage::Z3, &[W1, W2])?;

    let mut losses = Vec::new();
    for step in 0..STEPS {
        let (mut g1, mut g2, mut loss) = (vec![0.0; HIDDEN * ROW1], vec![0.0; DIGITS * ROW2], [0.0]);
        context.start_backward(true)?;
        context.prefetch(GRAPH, &[W1, W2])?;
        let (w1, w2) = (context.gather(GRAPH, W1)?, context.gather(GRAPH, W2)?);
        for number in (step * BATCH + rank..(step + 1) * BATCH).step_by(RANKS) {
            loss[0] += learn(number, &w1, &w2, &mut g1, &mut g2);
        }
        drop((w1, w2)); // the whole weights are gone
        context.reduce_grad(GRAPH, W1, &g1)?;
        context.reduce_grad(GRAPH, W2, &g2)?;
        context.end_backward(GRAPH, false)?;
        for id in [W1, W2] {
            context.update(id, |weights: &mut [f64], grad: &mut [f64]| {
                weights.iter_mut().zip(grad).for_each(|(weight, grad)| *weight -= RATE * *grad)
            })?;
        }
        context.params_updated(&[W1, W2])?;
        loss[0] /= (BATCH / RANKS) as f64;
        comm.all_reduce(&mut loss, ReduceOp::Mean)?;
        losses.push(loss[0]);
    }
    Ok(losses)
}

fn main() -> dc::Result<()> {
    let comms = Comm::threads(RANKS as i32, &CommOptions::default())?;
    let ranks: Vec<_> = comms.into_iter().map(|comm| thread::spawn(move || train(comm))).collect();
    let results: Vec<_> = ranks.into_iter().map(|rank| rank.join().expect("a rank that does not panic")).collect();
    for (step, loss) in results.into_iter().next().expect("a rank")?.into_iter().enumerate() {
        println!("step {step:2} loss {loss:.6} {:016x}", loss.to_bits());
    }
    Ok(())
}

//! The scenario of scenario.c, with the Rust crates: scenario RANK NAME.
use dc::{sys, Comm, CommOptions, Context, Device, LogLevel, Stage, Z3Options};
use std::ptr::null;

const RANKS: i32 = 2;
const WEIGHTS: usize = 5;
const SHARD: usize = 3;
const GRAPH: i64 = 1;
const ID: i64 = 7;

fn print(name: &str, values: &[f32]) {
    let bits: Vec<String> = values.iter().map(|value| format!("{:08x}", value.to_bits())).collect();
    println!("{name} {}", bits.join(" "));
}

/// Has no safe counterpart: several users that release one parameter, each for itself.
fn forward(context: &Context, rank: i32) -> dc::Result<Vec<f32>> {
    context.start_forward()?;
    let own = {
        let full = unsafe {
            let mut out = sys::dc_tensor { struct_size: std::mem::size_of::<sys::dc_tensor>(), ..Default::default() };
            assert_eq!(sys::dc_allgather_param(context.as_ptr(), null(), GRAPH, ID, 0, &mut out), 0);
            assert_eq!(sys::dc_wait_allgather(context.as_ptr(), null(), GRAPH, ID), 0);
            std::slice::from_raw_parts(out.data as *const f32, WEIGHTS)
        };
        print("full", full);
        full.iter().map(|value| value * (rank + 1) as f32).collect()
    };
    unsafe { assert_eq!(sys::dc_release_param(context.as_ptr(), null(), GRAPH, ID, 2), 0) };
    context.end_forward()?; // logs that one of two users still has it
    unsafe { assert_eq!(sys::dc_release_param(context.as_ptr(), null(), GRAPH, ID, 2), 0) };
    Ok(own)
}

fn main() -> dc::Result<()> {
    let arguments: Vec<String> = std::env::args().collect();
    let (rank, name) = (arguments[1].parse::<i32>().expect("a rank"), &arguments[2]);
    println!("libdc {} {}", dc::version(), unsafe { sys::dc_api_version() });
    let comm = Comm::processes(name, rank, RANKS, &CommOptions::default())?;
    let log = |level: LogLevel, message: &str| println!("log mine {} {message}", level as i32 + 1);
    let mut context = Context::builder().log(log).bucket(64).build(&Device::open("cpu")?, Some(&comm))?;
    let shard: Vec<f32> = (0..SHARD).map(|i| (rank as usize * SHARD + i) as f32 * 0.5 - 1.0).collect();
    context.register_z3_param(ID, &[WEIGHTS as i64], shard, vec![0f32; SHARD], Z3Options::default())?;
    context.register_graph(GRAPH, Stage::Z3, &[ID])?;

    let own = forward(&context, rank)?;
    context.start_backward(true)?;
    context.reduce_grad(GRAPH, ID, &own)?;
    context.end_backward(GRAPH, false)?;
    context.update(ID, |weights: &mut [f32], gradient: &mut [f32]| {
        print("grad", gradient);
        weights.iter_mut().zip(gradient).for_each(|(weight, gradient)| *weight -= 0.5 * *gradient)
    })?;
    context.params_updated(&[ID])?;
    print("full", &context.gather::<f32>(GRAPH, ID)?);

    let error = context.gather::<f32>(GRAPH, 99).expect_err("no such parameter");
    println!("error {} {} {}", error.status().0, error.status().name(), error.text());
    let stats = context.memory_stats()?;
    println!("stats {} {} {}", stats.gathers, stats.reductions, stats.registered_params);
    drop((context, comm));
    println!("done");
    Ok(())
}

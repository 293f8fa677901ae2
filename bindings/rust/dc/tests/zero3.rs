//! Steps of ZeRO-3 and of the other stages on ranks that are threads, and collectives.

mod common;

use common::{context, limits, ranks, register, weight};
use dc::{Bf16, Comm, Config, Context, DType, Device, MemoryKind, Op, ReduceOp, Stage, Z3Options};
use std::thread;

#[test]
fn a_zero3_step_gathers_reduces_and_updates() {
    for size in [1, 2, 3] {
        let results = ranks(size, |comm| {
            let mut context = context(&comm);
            for (id, numel) in [(5, 1), (6, 7), (7, 64)] {
                register(&mut context, &comm, id, numel);
                context.start_backward(true).unwrap();
                let full = context.gather::<f32>(id, id).unwrap();
                assert_eq!(full.shape(), [numel as i64]);
                assert!((0..numel).all(|at| full[at] == weight(id, at)));
                let grad: Vec<f32> = full.iter().map(|w| w * (comm.rank() + 1) as f32).collect();
                context.reduce_grad(id, id, &grad).unwrap();
                drop(full);
                context.end_backward(id, true).unwrap();
                context
                    .update(id, |weights: &mut [f32], grad: &mut [f32]| {
                        weights.iter_mut().zip(grad.iter()).for_each(|(w, g)| *w -= g)
                    })
                    .unwrap();
                context.params_updated(&[id]).unwrap();
                let full = context.gather::<f32>(id, id).unwrap();
                let mean = (size + 1) as f32 / 2.0;
                assert!((0..numel).all(|at| full[at] == weight(id, at) - weight(id, at) * mean), "{:?}", &full[..]);
            }
            assert_eq!(context.memory_stats().unwrap().registered_params, 3);
        });
        assert!(results.iter().all(Result::is_ok));
    }
}

#[test]
fn gathers_cast_and_prefetch() {
    let results = ranks(2, |comm| {
        let mut context = context(&comm);
        register(&mut context, &comm, 3, 5);
        let info = context.dry_run(Op::AllgatherParam, 3, 3, Some(DType::Bfloat16)).unwrap();
        assert_eq!((info.shape, info.dtype), (Some(vec![5]), Some(DType::Bfloat16)));
        let half = context.gather::<Bf16>(3, 3).unwrap();
        let exact: Vec<u16> = (0..5).map(|at| (weight(3, at).to_bits() >> 16) as u16).collect();
        assert_eq!(half.iter().map(|bits| bits.0).collect::<Vec<_>>(), exact);
        drop(half);
        context.trace_start(16).unwrap();
        context.prefetch(3, &[3]).unwrap();
        let busy = context.update(3, |_: &mut [f32], _: &mut [f32]| ()).unwrap_err();
        assert_eq!(busy.status(), dc::Status::BUSY);
        assert_eq!(context.gather::<f32>(3, 3).unwrap()[4], weight(3, 4));
        context.update(3, |_: &mut [f32], _: &mut [f32]| ()).unwrap();
        let events = context.trace_read(16).unwrap();
        assert!(events.iter().any(|event| Op::name_of(event.op) == "prefetch_params_fused" || event.id == 3));
        let folder = std::env::temp_dir().join(format!("dc-dump-{}", std::process::id()));
        context.trace_dump_on_error(Some(&folder)).unwrap();
        context.trace_dump_on_error(None).unwrap();
        context.trace_dump(&folder).unwrap();
        let file = folder.join(format!("rank-{}.json", comm.rank()));
        assert!(std::fs::read_to_string(&file).unwrap().contains("prefetch_params_fused"));
        std::fs::remove_file(&file).unwrap();
        let _ = std::fs::remove_dir(&folder); // only the last rank's call works
    });
    assert!(results.iter().all(Result::is_ok));
}

/// A gather that finds a copy waits for a reload too, which reads the shard that can be changed then.
#[test]
fn a_reload_is_done_when_weights_can_change() {
    let comm = Comm::threads(1, &common::limits()).unwrap().remove(0);
    let mut context = context(&comm);
    register(&mut context, &comm, 3, 1 << 22);
    context.set_persistent(3).unwrap();
    drop(context.gather::<f32>(3, 3).unwrap());
    context.trace_start(16).unwrap();
    context.reload_parameter(3, 3).unwrap();
    assert_eq!(context.update(3, |_: &mut [f32], _: &mut [f32]| ()).unwrap_err().status(), dc::Status::BUSY);
    drop(context.gather::<f32>(3, 3).unwrap());
    let events = context.trace_read(usize::MAX).unwrap(); // those that have ended
    assert_eq!(events.first().map(|event| event.op), Some(Op::ReloadParameter as i32));
    context.update(3, |weights: &mut [f32], _: &mut [f32]| weights.fill(1.0)).unwrap();
}

#[test]
fn persistent_parameters_follow_updates() {
    let results = ranks(2, |comm| {
        let mut context = context(&comm);
        register(&mut context, &comm, 3, 4);
        context.set_persistent(3).unwrap();
        assert_eq!(context.gather::<f32>(3, 3).unwrap()[0], weight(3, 0));
        context.update(3, |weights: &mut [f32], _: &mut [f32]| weights.fill(2.5)).unwrap();
        context.params_updated(&[3]).unwrap();
        assert_eq!(context.gather::<f32>(3, 3).unwrap()[..], [2.5; 4]);
        context.clear_persistent(3).unwrap();
        context.invalidate_gathered(3).unwrap();
        context.clear_all_gathered().unwrap();
    });
    assert!(results.iter().all(Result::is_ok));
}

#[test]
fn stages_zero_to_two_average_gradients() {
    for stage in [Stage::Z0, Stage::Z1, Stage::Z2] {
        let results = ranks(2, |comm| {
            let mut context = context(&comm);
            let (offset, part) = if stage == Stage::Z0 { (0, 6) } else { (comm.rank() as i64 * 3, 3) };
            context.register_param(1, &[2, 3], vec![1.0f32; 6], vec![0.0f32; part], offset).unwrap();
            context.register_graph(1, stage, &[1]).unwrap();
            context.start_backward(true).unwrap();
            let grad: Vec<f32> = (0..6).map(|at| (at * (comm.rank() + 1)) as f32).collect();
            context.reduce_grad(1, 1, &grad).unwrap();
            context.end_backward(1, false).unwrap();
            let got = context.update(1, |_: &mut [f32], grad: &mut [f32]| grad.to_vec()).unwrap();
            let mean: Vec<f32> = (offset as usize..offset as usize + part).map(|at| at as f32 * 1.5).collect();
            assert_eq!(got, mean);
        });
        assert!(results.iter().all(Result::is_ok));
    }
}

#[test]
fn one_rank_s_infinity_is_seen_by_all() {
    let results = ranks(2, |comm| {
        let config = Config::default().check_finite(true);
        let mut context = Context::builder().config(config).build(&Device::open("cpu").unwrap(), Some(&comm)).unwrap();
        register(&mut context, &comm, 4, 7);
        assert_eq!(context.first_not_finite().unwrap_err().status(), dc::Status::STATE);
        for odd in [0.0, f32::INFINITY, 1.0] {
            context.start_backward(true).unwrap();
            let last = if comm.rank() == 1 { odd } else { 0.0 };
            context.reduce_grad(4, 4, &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, last]).unwrap();
            context.end_backward(4, false).unwrap();
            let expected = if odd.is_finite() { None } else { Some(4) };
            assert_eq!(context.first_not_finite().unwrap(), expected);
        }
    });
    assert!(results.iter().all(Result::is_ok));
}

#[test]
fn tensors_are_offloaded_and_come_back() {
    let mut context = Context::builder().build(&Device::open("cpu").unwrap(), None).unwrap();
    context.register_z3_param(1, &[1], vec![1.0f32], vec![0.0f32], Z3Options::default()).unwrap();
    context.register_graph(1, Stage::Z3, &[1]).unwrap();
    context.offload(1, 50, &[1i32, 2, 3, 4], &[2, 2]).unwrap();
    let back = context.reload::<i32>(1, 50).unwrap();
    assert_eq!((&back[..], back.shape()), (&[1, 2, 3, 4][..], &[2i64, 2][..]));
    context.end_backward(1, false).unwrap();
    assert_eq!(back[3], 4); // the caller's own memory, after the library has dropped it
    assert_eq!(context.reload::<f32>(1, 50).unwrap_err().status(), dc::Status::DTYPE);
    assert!(context.offload(1, 51, &[1i32], &[2]).is_err());
}

#[test]
fn memory_of_the_library_holds_shards() {
    let results = ranks(2, |comm| {
        let mut context = context(&comm);
        let mut shard = context.memory::<f64>(2, MemoryKind::Shared).unwrap();
        shard.fill(comm.rank() as f64 + 1.0);
        context.register_z3_param(1, &[2, 2], shard, vec![0.0f64; 2], Z3Options::default()).unwrap();
        context.register_graph(1, Stage::Z3, &[1]).unwrap();
        assert_eq!(context.gather::<f64>(1, 1).unwrap()[..], [1.0, 1.0, 2.0, 2.0]);
    });
    assert!(results.iter().all(Result::is_ok));
}

#[test]
fn collectives_on_slices() {
    let results = ranks(3, |comm| {
        let (rank, mut all) = (comm.rank(), [0i64; 6]);
        comm.all_gather(&[rank as i64, 10 + rank as i64], &mut all, None).unwrap();
        assert_eq!(all, [0, 10, 1, 11, 2, 12]);
        let mut some = [0i8; 3];
        comm.all_gather(&vec![rank as i8; rank as usize], &mut some, Some(&[0, 1, 2])).unwrap();
        assert_eq!(some, [1, 2, 2]);
        let mut sum = [0.0f32];
        comm.reduce_scatter(&[1.0, 2.0, 3.0], &mut sum, None, ReduceOp::Mean).unwrap();
        assert_eq!(sum[0], (rank + 1) as f32);
        let (mut column, mut ragged) = ([0i32; 3], vec![0i8; 3]);
        comm.all_to_all(&[10 * rank, 10 * rank + 1, 10 * rank + 2], None, &mut column, None).unwrap();
        assert_eq!(column, [rank, 10 + rank, 20 + rank]);
        let (to, from) = (vec![rank as i64; 3], [0i64, 1, 2]); // rank r sends r elements to each
        comm.all_to_all(&vec![rank as i8; 3 * rank as usize], Some(&to), &mut ragged, Some(&from)).unwrap();
        assert_eq!(ragged, [1, 2, 2]);
        let (mut whole, mut own) = (vec![0i32; 3], [0i32]);
        comm.gather(&[rank], (rank == 1).then(|| &mut whole[..]), None, 1).unwrap();
        assert_eq!(whole, if rank == 1 { [0, 1, 2] } else { [0, 0, 0] });
        comm.scatter((rank == 1).then(|| &whole[..]), None, &mut own, 1).unwrap();
        assert_eq!(own, [rank]);
        let mut data = [rank];
        comm.all_reduce(&mut data, ReduceOp::Sum).unwrap();
        assert_eq!(data, [3]);
        comm.broadcast(&mut data, 1).unwrap();
        comm.set_checksums(true).unwrap();
        comm.dup().unwrap().barrier().unwrap();
        let pair = comm.split((rank < 2).then_some(7), -rank).unwrap();
        assert_eq!(pair.map(|pair| (pair.rank(), pair.size())), [Some((1, 2)), Some((0, 2)), None][rank as usize]);
        let (a, b, mut x, mut y) = ([rank as f32], [rank as f64], [0.0f32; 3], [0.0f64; 3]);
        comm.group(|group| {
            group.all_gather(&a, &mut x)?;
            group.all_gather(&b, &mut y)
        })
        .unwrap();
        assert_eq!((x, y), ([0.0, 1.0, 2.0], [0.0, 1.0, 2.0]));
    });
    assert!(results.iter().all(Result::is_ok));
}

#[test]
fn ranks_as_processes() {
    let name = format!("rust-{}", std::process::id());
    let comm = Comm::processes(&name, 0, 1, &limits()).unwrap();
    let mut data = [5i32];
    comm.all_reduce(&mut data, ReduceOp::Sum).unwrap();
    assert_eq!((data, comm.rank(), comm.size()), ([5], 0, 1));
}

#[test]
fn contexts_move_between_threads() {
    let mut context = Context::builder().build(&Device::open("cpu").unwrap(), None).unwrap();
    context.register_z3_param(1, &[2], vec![1.0f32, 2.0], vec![0.0f32; 2], Z3Options::default()).unwrap();
    context.register_graph(1, Stage::Z3, &[1]).unwrap();
    let there = thread::spawn(move || context.gather::<f32>(1, 1).map(|full| full.to_vec()));
    assert_eq!(there.join().unwrap().unwrap(), [1.0, 2.0]);
}

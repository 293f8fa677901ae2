//! Failures are errors with the library's text; after panics nothing leaks, and no rank waits.

mod common;

use common::{context, limits, ranks, register};
use dc::{Buffer, Comm, Config, Context, Device, Event, ReduceOp, Stage, Status, Stream, Z3Options};
use std::panic::{catch_unwind, AssertUnwindSafe};

#[test]
fn errors_have_a_status_and_the_librarys_text() {
    let error = Device::open("abacus").unwrap_err();
    assert_eq!(error.status(), Status::NO_DEVICE);
    assert!(error.text().contains("abacus"), "{}", error.text());
    assert!(error.to_string().ends_with("(DC_E_NO_DEVICE)"));
    assert!(!error.status().meaning().is_empty());
    assert_eq!(Device::open("c\0pu").unwrap_err().status(), Status::INVALID);
    assert_eq!(Comm::threads(-1, &limits()).unwrap_err().status(), Status::INVALID);
    assert_eq!(Comm::threads(65, &limits()).unwrap_err().status(), Status::INVALID);
    let many = Comm::threads(i32::MAX, &limits()).unwrap_err(); // it takes no memory for as many
    assert!(many.text().contains("world_size = 2147483647, must be at most 1024"), "{many}");
    let device = Device::open("cpu").unwrap();
    let error = Context::builder().bucket(0).build(&device, None).err().unwrap();
    assert!(error.text().contains("initial_reduce_bucket_size = 0"), "{}", error.text());
}

#[test]
fn wrong_parameters_are_refused() {
    let mut context = Context::builder().config(Config::default().synchronous(true).double_buffer(false));
    let lines = std::sync::Arc::new(std::sync::Mutex::new(Vec::new()));
    let copy = lines.clone();
    context = context.log(move |level, line| copy.lock().unwrap().push((level, line.to_owned())));
    let mut context = context.build(&Device::open("cpu").unwrap(), None).unwrap();
    let options = Z3Options::default();
    let register = |context: &mut Context, numel| {
        context.register_z3_param(1, &[3], vec![0f32; numel], vec![0f32; numel], options)
    };
    assert_eq!(register(&mut context, 2).unwrap_err().status(), Status::SHAPE);
    register(&mut context, 3).unwrap();
    assert_eq!(register(&mut context, 3).unwrap_err().status(), Status::EXISTS);
    assert_eq!(context.register_graph(1, Stage::Z2, &[1]).unwrap_err().status(), Status::STAGE);
    assert_eq!(context.register_graph(1, Stage::Z3, &[2]).unwrap_err().status(), Status::NOT_FOUND);
    context.register_graph(1, Stage::Z3, &[1]).unwrap();
    assert_eq!(context.unregister_param(1).unwrap_err().status(), Status::BUSY);
    context.set_param_name(1, "weight").unwrap();
    assert!(context.unregister_param(1).unwrap_err().to_string().contains("parameter 1 (weight) is in 1 graph"));
    assert_eq!(context.reduce_grad(1, 1, &[1f32]).unwrap_err().status(), Status::SHAPE);
    assert_eq!(context.update(1, |_: &mut [f64], _: &mut [f32]| ()).unwrap_err().status(), Status::DTYPE);
    assert_eq!(context.update(2, |_: &mut [f32], _: &mut [f32]| ()).unwrap_err().status(), Status::NOT_FOUND);
    context.reduce_grad(1, 1, &[1f32; 3]).unwrap();
    assert_eq!(context.update(1, |_: &mut [f32], _: &mut [f32]| ()).unwrap_err().status(), Status::BUSY);
    context.step_abort().unwrap();
    context.update_param_grad_buffer(1, vec![0f32; 3], 0).unwrap();
    context.start_forward().unwrap();
    assert_eq!(context.start_forward().unwrap_err().status(), Status::STATE);
    context.end_forward().unwrap();
    context.unregister_graph(1).unwrap();
    context.unregister_param(1).unwrap();
    context.cleanup().unwrap();
    assert_eq!(context.start_forward().unwrap_err().status(), Status::STATE);
}

#[test]
fn a_panic_on_one_rank_frees_the_others() {
    let results = ranks(2, |comm| {
        let mut context = context(&comm);
        register(&mut context, &comm, 3, 9);
        if comm.rank() == 1 {
            let _full = context.gather::<f32>(3, 3).unwrap();
            panic!("on purpose");
        }
        // The abort may come while this rank still waits for its gather.
        context.gather::<f32>(3, 3).and_then(|_| comm.barrier()).unwrap_err()
    });
    assert_eq!(results[0].as_ref().unwrap().status(), Status::ABORTED);
    assert!(results[0].as_ref().unwrap().text().contains("panicked"));
    assert!(results[1].is_err());
}

#[test]
fn a_panic_in_a_group_aborts_it() {
    let results = ranks(2, |comm| {
        let (send, mut recv) = ([1f32], [0f32; 2]);
        let filled = catch_unwind(AssertUnwindSafe(|| {
            comm.group(|group| {
                group.all_gather(&send, &mut recv)?;
                assert!(comm.rank() == 0, "on purpose");
                Ok(())
            })
        }));
        (comm.rank(), filled.map(|result| result.unwrap_err().status()).ok())
    });
    let results: Vec<_> = results.into_iter().map(Result::unwrap).collect();
    assert_eq!(results, [(0, Some(Status::ABORTED)), (1, None)]);
}

/// In a group the library would keep slices until the group ends, but they are lent for one call only.
#[test]
fn an_open_group_refuses_calls_of_the_communicator() {
    let results = ranks(2, |comm| {
        let mut errors = Vec::new();
        let ended = comm.group(|_| {
            let (send, mut recv) = (vec![1f32; 1000], vec![0f32; 2000]);
            errors.extend(comm.all_gather(&send, &mut recv, None).err());
            errors.extend(comm.reduce_scatter(&recv, &mut vec![0f32; 1000], None, ReduceOp::Sum).err());
            Ok(()) // if the calls were accepted, the group would use memory that is freed here
        });
        let statuses: Vec<_> = errors.iter().map(|error| error.status()).collect();
        assert_eq!((statuses, ended), (vec![Status::STATE; 2], Ok(())));
        let mut recv = [0f32; 2];
        comm.all_gather(&[1f32 + comm.rank() as f32], &mut recv, None).unwrap();
        recv
    });
    assert!(results.into_iter().all(|recv| recv.unwrap() == [1.0, 2.0]));
}

#[test]
fn any_order_of_drops_is_fine() {
    for order in 0..24 {
        let comm = Comm::threads(1, &limits()).unwrap().remove(0);
        let device = Device::open("cpu").unwrap();
        let mut context = Context::builder().build(&device, Some(&comm)).unwrap();
        register(&mut context, &comm, 1, 8);
        let stream = Stream::new(&device).unwrap();
        let mut kept: Vec<Option<Box<dyn std::any::Any>>> =
            vec![Some(Box::new(comm)), Some(Box::new(device)), Some(Box::new(context)), Some(Box::new(stream))];
        let mut code = order;
        for left in (1..=4).rev() {
            let place = kept.iter().enumerate().filter(|(_, one)| one.is_some()).nth(code % left).unwrap().0;
            kept[place] = None;
            code /= left;
        }
    }
}

#[test]
fn a_context_that_is_forgotten_keeps_what_the_library_uses() {
    let mut context = Context::builder().build(&Device::open("cpu").unwrap(), None).unwrap();
    context.register_z3_param(1, &[2], vec![1f32, 2.0], vec![0f32; 2], Z3Options::default()).unwrap();
    std::mem::forget(context);
}

#[test]
fn send_and_sync_are_those_of_the_header() {
    fn send<T: Send>() {}
    send::<Context>();
    send::<Comm>();
    fn both<T: Send + Sync>() {}
    both::<Device>();
    both::<Stream>();
    both::<Event>();
    both::<Buffer>();
    both::<dc::Abort>();
    // Two things are shown by compile_fail examples in the crate's documentation: Comm and Context are not Sync, and
    // weights cannot change while gathered ones are read.
}

#[test]
fn debug_shows_the_fields() {
    let error = Device::open("tpu").unwrap_err();
    let debug = format!("{error:?}");
    assert!(debug.starts_with("Error { status: DC_E_") && debug.contains("text: "), "{debug}");
    assert_ne!(debug, error.to_string());
}

#[test]
fn params_updated_names_parameters() {
    let mut context = Context::builder().build(&Device::open("cpu").unwrap(), None).unwrap();
    let refused = context.params_updated(&[]).unwrap_err();
    assert_eq!(refused.status(), Status::INVALID);
    assert!(refused.text().contains("all_params_updated"), "{refused}");
    context.register_z3_param(7, &[2], vec![1.0f32, 2.0], vec![0.0f32; 2], Z3Options::default()).unwrap();
    context.register_graph(1, Stage::Z3, &[7]).unwrap();
    context.update(7, |weights: &mut [f32], _: &mut [f32]| weights[0] = 5.0).unwrap();
    context.all_params_updated().unwrap();
    assert_eq!(context.gather::<f32>(1, 7).unwrap()[..], [5.0, 2.0]);
}

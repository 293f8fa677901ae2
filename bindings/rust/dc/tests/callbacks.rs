//! Rust functions that the library calls: the caller's collectives, stream work and allocators, each also with a panic.

mod common;

use common::{context, limits, register, weight};
use dc::{Collectives, Comm, DType, Device, Event, External, ReduceOp, Status, Stream};
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicI64, AtomicUsize, Ordering};
use std::sync::{mpsc, Arc, Barrier, Mutex};
use std::thread;

/// Collectives of ranks that are threads, over a board that all read. Sums are in float32.
struct Board {
    rank: usize,
    posts: Arc<Vec<Mutex<Vec<u8>>>>,
    meet: Arc<Barrier>,
    alive: Arc<AtomicUsize>,
    panics: bool,
}

impl Board {
    fn ranks(size: usize, alive: &Arc<AtomicUsize>, panics: bool) -> Vec<Board> {
        let (posts, meet) = (Arc::new((0..size).map(|_| Mutex::default()).collect()), Arc::new(Barrier::new(size)));
        alive.fetch_add(size, Ordering::SeqCst);
        let board = |rank| Board { rank, posts: Arc::clone(&posts), meet: meet.clone(), alive: alive.clone(), panics };
        (0..size).map(board).collect()
    }

    /// Every rank's bytes, in rank order.
    fn exchange(&self, send: &[u8]) -> Vec<Vec<u8>> {
        *self.posts[self.rank].lock().unwrap() = send.to_vec();
        self.meet.wait();
        let all = self.posts.iter().map(|post| post.lock().unwrap().clone()).collect();
        self.meet.wait();
        all
    }
}

impl Drop for Board {
    fn drop(&mut self) {
        self.alive.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Collectives for Board {
    fn all_gather(&self, send: &[u8], recv: &mut [u8], _: DType) -> External<()> {
        assert!(!self.panics, "on purpose");
        recv.copy_from_slice(&self.exchange(send).concat());
        Ok(())
    }

    fn reduce_scatter(&self, send: &[u8], recv: &mut [u8], dtype: DType) -> External<()> {
        if dtype != DType::Float32 {
            return Err(if dtype == DType::Float64 { 7 } else { 0 });
        }
        let begin = self.rank * recv.len();
        let blocks: Vec<Vec<u8>> = self.exchange(send);
        for (at, four) in recv.chunks_exact_mut(4).enumerate() {
            let place = begin + 4 * at;
            let values = blocks.iter().map(|block| f32::from_ne_bytes(block[place..place + 4].try_into().unwrap()));
            four.copy_from_slice(&values.sum::<f32>().to_ne_bytes());
        }
        Ok(())
    }

    fn broadcast(&self, data: &mut [u8], root: i32) -> External<()> {
        let all = self.exchange(data);
        data.copy_from_slice(&all[root as usize]);
        Ok(())
    }

    fn barrier(&self) -> External<()> {
        self.meet.wait();
        Ok(())
    }
}

#[test]
fn a_step_over_the_callers_collectives() {
    let alive = Arc::new(AtomicUsize::new(0));
    let boards = Board::ranks(2, &alive, false);
    thread::scope(|scope| {
        for board in boards {
            scope.spawn(move || {
                let rank = board.rank as i32;
                let comm = Comm::external(board, rank, 2, &limits()).unwrap();
                let mut context = context(&comm);
                register(&mut context, &comm, 3, 6);
                assert_eq!(context.gather::<f32>(3, 3).unwrap()[5], weight(3, 5));
                context.start_backward(true).unwrap();
                context.reduce_grad(3, 3, &[comm.rank() as f32; 6]).unwrap();
                context.end_backward(3, false).unwrap();
                context.update(3, |_: &mut [f32], grad: &mut [f32]| assert_eq!(grad, [0.5; 3])).unwrap();
                drop(comm); // the context keeps what it needs
                assert_eq!(context.gather::<f32>(3, 3).unwrap()[0], weight(3, 0));
            });
        }
    });
    assert_eq!(alive.load(Ordering::SeqCst), 0);
}

#[test]
fn errors_and_panics_of_collectives_are_errors() {
    let alive = Arc::new(AtomicUsize::new(0));
    for panics in [false, true] {
        let board = Board::ranks(1, &alive, panics).remove(0);
        let comm = Comm::external(board, 0, 1, &limits()).unwrap();
        let failed = if panics {
            comm.all_gather(&[1f32], &mut [0f32], None).unwrap_err()
        } else {
            comm.reduce_scatter(&[1f64], &mut [0f64], None, ReduceOp::Sum).unwrap_err()
        };
        assert_eq!(failed.status(), Status::CALLBACK, "{failed}");
        assert!(failed.text().contains(if panics { "-900" } else { "7" }), "{failed}");
    }
    let comm = Comm::external(Board::ranks(1, &alive, false).remove(0), 0, 1, &limits()).unwrap();
    let failed = comm.reduce_scatter(&[1i32], &mut [0i32], None, ReduceOp::Sum).unwrap_err();
    assert!(failed.status() == Status::CALLBACK && failed.text().contains("-900"), "{failed}");
    drop(comm);
    let board = Board::ranks(1, &alive, false).remove(0);
    assert_eq!(Comm::external(board, 5, 1, &limits()).unwrap_err().status(), Status::INVALID);
    assert_eq!(alive.load(Ordering::SeqCst), 0);
}

#[test]
fn streams_run_closures_and_survive_their_panics() {
    let device = Device::open("cpu").unwrap();
    assert_eq!(device.name(), "cpu");
    let (stream, event, other) = (Stream::new(&device).unwrap(), Event::new(&device).unwrap(), Stream::new(&device));
    let (sender, receiver) = mpsc::channel();
    let again = sender.clone();
    stream.call(move || sender.send(1).unwrap()).unwrap();
    stream.call(|| panic!("on purpose")).unwrap();
    event.record(&stream).unwrap();
    let other = other.unwrap();
    event.wait_on(&other).unwrap();
    other.call(move || again.send(2).unwrap()).unwrap();
    other.synchronize(None).unwrap();
    event.wait(None).unwrap();
    assert!(event.passed().unwrap());
    assert_eq!(receiver.iter().collect::<Vec<_>>(), [1, 2]);
}

#[derive(Clone, Default)]
struct Counting(Arc<AtomicI64>);

unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        self.0.fetch_add(layout.size() as i64, Ordering::SeqCst);
        System.alloc(layout)
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        self.0.fetch_sub(layout.size() as i64, Ordering::SeqCst);
        System.dealloc(block, layout)
    }
}

#[test]
fn device_memory_from_an_allocator_of_the_callers() {
    let memory = Counting::default();
    assert!(Device::with_allocator("none", memory.clone()).is_err());
    let device = Device::with_allocator("cpu", memory.clone()).unwrap();
    let comm = Comm::threads(1, &limits()).unwrap().remove(0);
    let mut context = dc::Context::builder().build(&device, Some(&comm)).unwrap();
    register(&mut context, &comm, 3, 1000);
    let full = context.gather::<f32>(3, 3).unwrap();
    assert!(memory.0.load(Ordering::SeqCst) >= 4000);
    drop(device);
    assert_eq!(Arc::strong_count(&memory.0), 2); // the context keeps the device alive, and the device the allocator
    drop(full);
    drop(context);
    assert_eq!(memory.0.load(Ordering::SeqCst), 0);
    assert_eq!(Arc::strong_count(&memory.0), 1);
}

/// The payload of a panic, whose drop panics again.
struct Payload;

impl Drop for Payload {
    fn drop(&mut self) {
        panic!("on purpose, again");
    }
}

#[test]
fn payloads_of_panics_may_panic() {
    let stream = Stream::new(&Device::open("cpu").unwrap()).unwrap();
    stream.call(|| std::panic::panic_any(Payload)).unwrap();
    stream.synchronize(None).unwrap();
}

//! The emulator's rules, each on a kernel that follows it and on a kernel that breaks it.

use cuda_std::emulator::{Cause, Fault, Kind, Machine, Mode, access, mbarrier, meet, products};
use cuda_std::launch::{Arguments, Contract, Entry, Grid, Pointer, PointerMut, Slice, Violation, Words};
use cuda_std::{prelude::*, shared, warp};
use std::sync::atomic::{AtomicU32, Ordering};

macro_rules! contract {
    ($($kernel:ident: $block:literal, $shared:literal;)*) => {$(
        // SAFETY: the tests below size every buffer for the grid that they launch.
        unsafe impl Contract for $kernel<'_> {
            fn entry(&self) -> Result<&'static Entry, Violation> {
                static ENTRY: Entry = Entry::of::<$kernel<'_>>(env!("CARGO_PKG_NAME"), $block, $shared, 4);
                Ok(&ENTRY)
            }
            fn grid(&self) -> Result<Grid, Violation> {
                Grid::new(1, 1, 1)
            }
        }
    )*};
}

contract! {
    scale: 64, 0;
    reverse: 64, 256;
    reverse_without_barrier_for_some: 64, 256;
    barrier_results: 96, 0;
    shuffles: 32, 0;
    one_warp_stays_away: 64, 0;
    two_barriers: 64, 0;
    half_warp_shuffle: 32, 0;
    panics: 64, 0;
    overruns_shared: 32, 64;
    counts: 64, 0;
    places: 32, 0;
    hands_over: 64, 16;
    waits_in_vain: 64, 8;
    one_lane_frees: 64, 144;
}

/// Computes y = factor * x, `[n]`.
#[kernel]
unsafe fn scale(x: &[f32], factor: f32, y: *mut f32) {
    let index = thread::index_1d() as usize;
    if index < x.len() {
        // SAFETY: the test's buffers cover every access of the grid.
        unsafe { *y.add(index) = factor * x[index] };
    }
}

/// Reverses 64 values through shared memory.
#[kernel]
unsafe fn reverse(x: *const u32, y: *mut u32) {
    let (tile, index) = (shared::dynamic_shared_mem::<u32>(), thread::thread_idx_x() as usize);
    // SAFETY: the test's buffers cover every access of the grid.
    unsafe {
        *tile.add(index) = *x.add(index);
        thread::sync_threads();
        *y.add(index) = *tile.add(63 - index);
    }
}

#[kernel]
unsafe fn reverse_without_barrier_for_some(y: *mut u32) {
    if thread::thread_idx_x() < 40 {
        thread::sync_threads();
    }
    // SAFETY: the test's buffers cover every access of the grid.
    unsafe { *y = 1 };
}

/// Writes y: `[3]`, thread 5's results of count, and, or.
#[kernel]
unsafe fn barrier_results(y: *mut u32) {
    let odd = thread::thread_idx_x() % 2;
    let results = [thread::sync_threads_count(odd), thread::sync_threads_and(odd), thread::sync_threads_or(odd)];
    if thread::thread_idx_x() == 5 {
        for (at, result) in results.into_iter().enumerate() {
            // SAFETY: the test's buffers cover every access of the grid.
            unsafe { *y.add(at) = result };
        }
    }
}

/// Writes y: `[6, 32]`, the results of shuffles and votes by lane.
#[kernel]
unsafe fn shuffles(y: *mut u32) {
    let lane = warp::lane_id();
    // SAFETY: the test's buffers cover every access of the grid.
    unsafe {
        let xor = warp::warp_shuffle_xor(u32::MAX, lane * 10, 5, 32);
        let down = warp::warp_shuffle_down(u32::MAX, lane * 10, 3, 16);
        let index = warp::warp_shuffle_idx(u32::MAX, u64::from(lane) << 33, 9, 8);
        let all = warp::warp_vote_all(u32::MAX, lane < 32);
        let any = warp::warp_vote_any(u32::MAX, lane > 31);
        let ballot = warp::warp_vote_ballot(u32::MAX, lane.is_multiple_of(3));
        let results =
            [xor.0, down.0, u32::from(down.1), (index.0 >> 33) as u32, u32::from(all) + 2 * u32::from(any), ballot];
        for (row, result) in results.into_iter().enumerate() {
            *y.add(row * 32 + lane as usize) = result;
        }
    }
}

#[kernel]
unsafe fn one_warp_stays_away(y: *mut u32) {
    if thread::thread_idx_x() >= 32 {
        return;
    }
    thread::sync_threads();
    // SAFETY: the test's buffers cover every access of the grid.
    unsafe { *y = 1 };
}

#[kernel]
#[allow(clippy::if_same_then_else, reason = "the lines differ, which is what the test is about")]
unsafe fn two_barriers(y: *mut u32) {
    if thread::thread_idx_x() < 32 {
        thread::sync_threads();
    } else {
        thread::sync_threads();
    }
    // SAFETY: the test's buffers cover every access of the grid.
    unsafe { *y = 1 };
}

#[kernel]
unsafe fn half_warp_shuffle(y: *mut u32) {
    if warp::lane_id() < 16 {
        // SAFETY: the test's buffers cover every access of the grid.
        unsafe { *y = warp::warp_shuffle_xor(u32::MAX, 1u32, 1, 32).0 };
    }
}

#[kernel]
unsafe fn panics(x: &[u32], y: *mut u32) {
    let index = thread::index_1d() as usize;
    // SAFETY: the test's buffers cover every access of the grid.
    unsafe { *y = x[index] };
}

#[kernel]
unsafe fn overruns_shared(y: *mut u32) {
    let lane = warp::lane_id() as usize;
    // SAFETY: the test's buffers cover every access of the grid.
    unsafe {
        *shared::dynamic_shared_mem::<u32>().add(lane % 17) = 7;
        *y = 1;
    }
}

/// Counts threads with an atomic. It waits in between, so that suspended and plain threads meet.
#[kernel]
unsafe fn counts(counter: *mut u32) {
    // SAFETY: the counter outlives the launch, and every thread uses it atomically.
    let counter = unsafe { AtomicU32::from_ptr(counter) };
    counter.fetch_add(1, Ordering::Relaxed);
    thread::sync_threads();
    counter.fetch_add(1, Ordering::Relaxed);
}

/// Computes y[block] = block coordinates packed, for a grid of 3 x 2 x 2.
#[kernel]
unsafe fn places(y: *mut u32) {
    let (x, z) = (thread::block_idx_x(), thread::block_idx_z());
    let linear = x + thread::grid_dim_x() * (thread::block_idx_y() + thread::grid_dim_y() * z);
    if thread::thread_idx_x() == thread::block_dim_x() - 1 {
        // SAFETY: the test's buffers cover every access of the grid.
        unsafe { *y.add(linear as usize) = x * 100 + thread::block_idx_y() * 10 + z };
    }
}

/// Hands three values over from each lane of warp 0 to the same lane of warp 1, which writes them
/// to y: `[32, 3]`. If `waits` is 0, warp 1 does not wait for them.
#[kernel]
unsafe fn hands_over(waits: u32, slot: *mut u32, y: *mut u32) {
    const FULL: u32 = 0;
    const FREE: u32 = 8;
    let lane = thread::thread_idx_x() % 32;
    if thread::thread_idx_x() == 0 {
        mbarrier::init(FULL, 32);
        mbarrier::init(FREE, 32);
    }
    thread::sync_threads();
    for turn in 0..3 {
        // SAFETY: the test's buffers cover every access of the grid.
        unsafe {
            if thread::thread_idx_x() < 32 {
                mbarrier::wait(FREE, (turn + 1) % 2);
                *slot.add(lane as usize) = 100 * turn + lane;
                mbarrier::arrive(FULL);
            } else {
                if waits != 0 {
                    mbarrier::wait(FULL, turn % 2);
                }
                *y.add((3 * lane + turn) as usize) = *slot.add(lane as usize);
                mbarrier::arrive(FREE);
            }
        }
    }
}

/// Warp 0 fills a slot three times. Warp 1 reads it by its lanes, or by its products if
/// `by_products` is 1, and its first lane frees the slot. `order` is an index in [`ORDERS`].
#[kernel]
unsafe fn one_lane_frees(by_products: u32, order: u32, y: *mut u32) {
    const FULL: u32 = 128;
    const FREE: u32 = 136;
    let (slot, lane) = (shared::dynamic_shared_mem::<u32>(), thread::thread_idx_x() % 32);
    if thread::thread_idx_x() == 0 {
        mbarrier::init(FULL, 32);
        mbarrier::init(FREE, 1);
    }
    thread::sync_threads();
    for turn in 0..3 {
        // SAFETY: the test's buffers cover every access of the grid. All lanes of warp 1 meet.
        unsafe {
            if thread::thread_idx_x() < 32 {
                mbarrier::wait(FREE, (turn + 1) % 2);
                access::shared(Kind::Write, slot, 32, lane, 1);
                *slot.add(lane as usize) = 100 * turn + lane;
                mbarrier::arrive(FULL);
            } else {
                mbarrier::wait(FULL, turn % 2);
                if by_products != 0 {
                    products::begin();
                }
                access::shared(Kind::Read, slot, 32, lane, 1);
                *y.add((3 * lane + turn) as usize) = *slot.add(lane as usize);
                if by_products != 0 {
                    products::end();
                }
                ORDERS[order as usize]();
                if lane == 0 {
                    mbarrier::arrive(FREE);
                }
            }
        }
    }
}

/// Nothing, an exchange between lanes, a wait for products, and a barrier of the warp.
const ORDERS: [fn(); 4] = [
    || {},
    meet,
    products::wait,
    // SAFETY: all lanes of the warp call it.
    || unsafe { warp::sync_warp(u32::MAX) },
];

/// Waits for 32 arrivals, of which one is missing.
#[kernel]
unsafe fn waits_in_vain(y: *mut u32) {
    if thread::thread_idx_x() == 0 {
        mbarrier::init(0, 32);
    }
    thread::sync_threads();
    match thread::thread_idx_x() {
        0..31 => mbarrier::arrive(0),
        40 => mbarrier::wait(0, 0),
        _ => {}
    }
    // SAFETY: the test's buffers cover every access of the grid.
    unsafe { *y = 1 };
}

fn run<K: Contract>(kernel: K, grid: Grid) -> Result<(), Fault> {
    // SAFETY: each test passes buffers that cover every access of its kernel.
    unsafe { Machine::default().launch(kernel.entry().unwrap(), grid, &Words::of(&kernel), &|_| None) }
}

const ONE: Grid = Grid { x: 1, y: 1, z: 1 };

fn output<T>(values: &mut [T]) -> PointerMut<'_, T> {
    // SAFETY: host memory is the emulator's device memory, borrowed for the launch.
    unsafe { PointerMut::new(0, values.as_mut_ptr() as u64, values.len()) }
}

fn input<T>(values: &[T]) -> Slice<'_, T> {
    // SAFETY: host memory is the emulator's device memory, borrowed for the launch.
    unsafe { Slice::new(0, values.as_ptr() as u64, values.len()) }
}

#[test]
fn barrier_free_threads_span_blocks() {
    let x: Vec<f32> = (0..1000).map(|i| i as f32).collect();
    let mut y = vec![f32::NAN; 1000];
    run(scale { x: input(&x), factor: 3.0, y: output(&mut y) }, Grid { x: 16, y: 1, z: 1 }).unwrap();
    assert!(x.iter().zip(&y).all(|(x, y)| 3.0 * x == *y));
}

#[test]
fn a_barrier_orders_shared_memory() {
    let x: Vec<u32> = (0..64).collect();
    let mut y = vec![0; 64];
    // SAFETY: `x` outlives the launch.
    let source = unsafe { Pointer::new(0, x.as_ptr() as u64, 64) };
    run(reverse { x: source, y: output(&mut y) }, ONE).unwrap();
    assert!(y.iter().copied().eq((0..64).rev()));
}

#[test]
fn barriers_count_and_or() {
    let mut y = [9; 3];
    run(barrier_results { y: output(&mut y) }, ONE).unwrap();
    assert_eq!(y, [48, 0, 1]);
}

#[test]
fn an_mbarrier_hands_values_over() {
    let (mut slot, mut y) = ([0; 32], [9; 96]);
    for mode in [Mode::default(), Mode::RACES, Mode { races: true, shuffle: Some(3) }] {
        let kernel = hands_over { waits: 1, slot: output(&mut slot), y: output(&mut y) };
        mode.scope(|| run(kernel, ONE)).unwrap();
        assert!(y.iter().enumerate().all(|(at, &y)| y as usize == at / 3 + 100 * (at % 3)), "{mode:?}");
    }
    let kernel = hands_over { waits: 0, slot: output(&mut slot), y: output(&mut y) };
    let fault = Mode::RACES.scope(|| run(kernel, ONE)).unwrap_err();
    assert!(matches!(fault.cause, Cause::Race { .. }), "{fault}");
}

#[test]
fn an_arrival_releases_its_own_lane() {
    let mut y = vec![0u32; 3 * 32];
    let mut race = |by_products, order| {
        let kernel = one_lane_frees { by_products, order, y: output(&mut y) };
        match Mode::RACES.scope(|| run(kernel, ONE)) {
            Ok(()) => false,
            Err(fault) => matches!(fault.cause, Cause::Race { .. }) || panic!("{fault}"),
        }
    };
    assert_eq!([0, 1, 2, 3].map(|order| race(0, order)), [true, true, true, false], "reads by lanes");
    assert_eq!([0, 1, 2, 3].map(|order| race(1, order)), [true, true, false, true], "reads by products");
}

#[test]
fn missing_arrivals_are_an_error() {
    let mut y = [0];
    let fault = run(waits_in_vain { y: output(&mut y) }, ONE).unwrap_err();
    let (thread, _, found) = divergence(fault);
    assert_eq!(thread, 40);
    assert!(found.contains("byte 0"), "{found}");
}

#[test]
fn shuffles_and_votes_follow_ptx() {
    let mut y = [0u32; 6 * 32];
    run(shuffles { y: output(&mut y) }, ONE).unwrap();
    for lane in 0..32u32 {
        let row = |row: usize| y[row * 32 + lane as usize];
        assert_eq!(row(0), (lane ^ 5) * 10);
        let inside = lane % 16 + 3 < 16;
        assert_eq!((row(1), row(2)), (if inside { lane + 3 } else { lane } * 10, u32::from(inside)));
        assert_eq!(row(3), lane / 8 * 8 + 1);
        assert_eq!(row(4), 1);
        assert_eq!(row(5), (0..32).filter(|lane| lane % 3 == 0).fold(0, |mask, lane| mask | 1 << lane));
    }
}

#[test]
fn blocks_cover_three_dimensional_grids() {
    let mut y = [0; 12];
    run(places { y: output(&mut y) }, Grid { x: 3, y: 2, z: 2 }).unwrap();
    assert_eq!(y, [0, 100, 200, 10, 110, 210, 1, 101, 201, 11, 111, 211]);
}

#[test]
fn atomics_count_all_threads() {
    let mut counter = [0];
    run(counts { counter: output(&mut counter) }, Grid { x: 50, y: 1, z: 1 }).unwrap();
    assert_eq!(counter, [50 * 64 * 2]);
}

#[track_caller]
fn divergence(fault: Fault) -> (u32, u32, String) {
    match fault.cause {
        Cause::Divergence { missing, found, .. } => (fault.thread, missing, found),
        cause => panic!("expected a divergence, got {cause:?}"),
    }
}

#[test]
fn barriers_skipped_by_threads_fail() {
    let mut y = [0];
    let fault = run(reverse_without_barrier_for_some { y: output(&mut y) }, ONE).unwrap_err();
    assert_eq!(fault.kernel, "reverse_without_barrier_for_some");
    assert_eq!(divergence(fault), (0, 40, "has ended".into()));
}

#[test]
fn barriers_skipped_by_warps_fail() {
    let mut y = [0];
    let fault = run(one_warp_stays_away { y: output(&mut y) }, ONE).unwrap_err();
    assert_eq!(divergence(fault), (0, 32, "has ended".into()));
}

#[test]
fn barriers_at_different_lines_never_meet() {
    let mut y = [0];
    let fault = run(two_barriers { y: output(&mut y) }, ONE).unwrap_err();
    let (thread, missing, found) = divergence(fault);
    assert_eq!((thread, missing), (0, 32));
    assert!(found.contains("emulator.rs"), "{found}");
}

#[test]
fn shuffles_skipped_by_lanes_fail() {
    let mut y = [0];
    let fault = run(half_warp_shuffle { y: output(&mut y) }, ONE).unwrap_err();
    assert_eq!(divergence(fault), (0, 16, "has ended".into()));
}

#[test]
fn panics_name_kernel_and_thread() {
    let (x, mut y) = ([1u32; 70], [0]);
    let fault = run(panics { x: input(&x), y: output(&mut y) }, Grid { x: 3, y: 1, z: 1 }).unwrap_err();
    assert_eq!((fault.kernel, fault.block, fault.thread), ("panics", [1, 0, 0], 6));
    assert!(fault.to_string().contains("index out of bounds: the len is 70 but the index is 70"), "{fault}");
}

#[test]
fn shared_memory_overruns_fail() {
    let mut y = [0];
    let fault = run(overruns_shared { y: output(&mut y) }, ONE).unwrap_err();
    assert_eq!(fault.cause, Cause::SharedOverrun { offset: 64, size: 64 });
}

#[test]
fn emulator_recovers_from_faults() {
    for _ in 0..3 {
        shuffles_skipped_by_lanes_fail();
        a_barrier_orders_shared_memory();
        panics_name_kernel_and_thread();
        atomics_count_all_threads();
    }
}

#[test]
fn words_follow_the_parameters() {
    let (x, mut y) = ([0f32; 5], [0f32; 5]);
    let kernel = scale { x: input(&x), factor: -2.5, y: output(&mut y) };
    let words = Words::of(&kernel);
    assert_eq!(words.as_slice(), [x.as_ptr() as u64, 5, u64::from((-2.5f32).to_bits()), y.as_ptr() as u64]);
    assert_eq!(<scale<'_> as Arguments>::NAME, "scale");
}

//! Errors inside a kernel that the rules of `emulator.rs` do not cover. Each is one error that
//! names the kernel. It has no other effect: nothing is printed to standard error, and the launches
//! that follow are unaffected.

use cuda_std::emulator::{Cause, Fault, Machine};
use cuda_std::launch::{Contract, Entry, Grid, PointerMut, Violation, Words};
use cuda_std::{prelude::*, warp};
use rayon::prelude::*;
use std::hint::black_box;
use std::process::{Command, Output};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

macro_rules! contract {
    ($($kernel:ident: $block:literal;)*) => {$(
        // SAFETY: the tests below size every buffer for the grid that they launch.
        unsafe impl Contract for $kernel<'_> {
            fn entry(&self) -> Result<&'static Entry, Violation> {
                static ENTRY: Entry = Entry::of::<$kernel<'_>>(env!("CARGO_PKG_NAME"), $block, 0, 4);
                Ok(&ENTRY)
            }
            fn grid(&self) -> Result<Grid, Violation> {
                Grid::new(4, 1, 1)
            }
        }
    )*};
}

contract! {
    counts: 64;
    has_a_large_frame: 64;
    recurses: 64;
    panics_badly: 64;
    panics: 64;
    launches: 64;
    shuffles_from_outside: 32;
    waits_when_dropped: 64;
    goes_on: 1;
}

/// Computes y[block] = threads.
#[kernel]
unsafe fn counts(y: *mut u32) {
    let all = thread::sync_threads_count(1);
    if thread::thread_idx_x() == 0 {
        // SAFETY: the test's buffer holds an element a block.
        unsafe { *y.add(thread::block_idx_x() as usize) = all };
    }
}

/// Overflows the stack in the first thread of the second block, with other threads waiting. If
/// `alone`, it is on the stack of the first thread of its block.
#[kernel]
unsafe fn has_a_large_frame(alone: u32, y: *mut u32) {
    #[inline(never)]
    fn large() -> u32 {
        black_box([1u32; 1 << 20]).iter().sum()
    }
    if alone == 0 {
        thread::sync_threads();
    }
    if thread::index_1d() == 64 {
        // SAFETY: the test's buffer holds an element per block.
        unsafe { *y = large() };
    }
    thread::sync_threads();
}

#[kernel]
unsafe fn recurses(y: *mut u32) {
    #[inline(never)]
    fn deeper(depth: u32) -> u32 {
        let frame = black_box([depth; 16]);
        if depth == 0 { 0 } else { deeper(depth - 1) + frame[3] }
    }
    // SAFETY: the test's buffer holds an element per block.
    unsafe { *y = deeper(black_box(u32::MAX)) };
}

/// Panics, with a payload that panics when it is dropped.
#[kernel]
unsafe fn panics_badly(_y: *mut u32) {
    struct Bad;
    impl Drop for Bad {
        fn drop(&mut self) {
            panic!("dropped");
        }
    }
    thread::sync_threads();
    std::panic::panic_any(Bad);
}

#[kernel]
unsafe fn panics(_y: *mut u32) {
    panic!("a kernel's own words");
}

#[kernel]
unsafe fn launches(y: *mut u32) {
    // SAFETY: the test's buffer holds an element per block.
    let inner = counts { y: unsafe { PointerMut::new(0, y as u64, 4) } };
    run(inner).unwrap();
}

#[kernel]
unsafe fn shuffles_from_outside(y: *mut u32) {
    if warp::lane_id() < 16 {
        // SAFETY: not upheld: lane 20 is not in the mask, which is the bug under test.
        unsafe { *y = warp::warp_shuffle_idx(0xffff, 1u32, 20, 32).0 };
    }
}

/// The number of values that [`waits_when_dropped`] has dropped.
static DROPPED: AtomicU32 = AtomicU32::new(0);

/// Fails in thread 0 when all threads hold a value.
#[kernel]
unsafe fn waits_when_dropped(_y: *mut u32) {
    struct Held;
    impl Drop for Held {
        fn drop(&mut self) {
            DROPPED.fetch_add(1, Ordering::Relaxed);
        }
    }
    let _held = Held;
    thread::sync_threads();
    assert!(thread::thread_idx_x() != 0, "the first");
}

static STARTED: AtomicBool = AtomicBool::new(false);
static MAY_END: AtomicBool = AtomicBool::new(false);

#[kernel]
unsafe fn goes_on(_y: *mut u32) {
    STARTED.store(true, Ordering::Relaxed);
    while !MAY_END.load(Ordering::Relaxed) {
        std::hint::spin_loop();
    }
}

fn run<K: Contract>(kernel: K) -> Result<(), Fault> {
    // SAFETY: each test passes buffers that cover every access of its kernel.
    unsafe {
        Machine::default().launch(kernel.entry().unwrap(), kernel.grid().unwrap(), &Words::of(&kernel), &|_| None)
    }
}

fn output(values: &mut [u32]) -> PointerMut<'_, u32> {
    // SAFETY: host memory is the emulator's device memory, borrowed for the launch.
    unsafe { PointerMut::new(0, values.as_mut_ptr() as u64, values.len()) }
}

/// Checks that the emulator's threads still work.
#[track_caller]
fn all_is_well() {
    let mut y = [0; 4];
    run(counts { y: output(&mut y) }).unwrap();
    assert_eq!(y, [64; 4]);
}

#[track_caller]
fn fault_of(kernel: impl Contract) -> Fault {
    let fault = run(kernel).unwrap_err();
    all_is_well();
    fault
}

#[test]
#[cfg(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))]
fn stack_overflows_name_the_kernel() {
    let mut y = [0; 4];
    for alone in [0, 1, 0, 1] {
        let fault = fault_of(has_a_large_frame { alone, y: output(&mut y) });
        assert_eq!((fault.kernel, fault.block, fault.thread), ("has_a_large_frame", [1, 0, 0], 0), "{fault}");
        assert_eq!(fault.cause, Cause::StackOverflow { bytes: 256 * 1024 });
        assert!(fault.to_string().contains("stack overflow"), "{fault}");
    }
    let fault = fault_of(recurses { y: output(&mut y) });
    assert!(matches!(fault.cause, Cause::StackOverflow { .. }), "{fault}");
}

#[test]
#[cfg(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))]
fn stacks_overflow_on_many_threads() {
    std::thread::scope(|scope| {
        for alone in [0, 1, 0, 1] {
            scope.spawn(move || {
                for _ in 0..20 {
                    let fault = fault_of(has_a_large_frame { alone, y: output(&mut [0; 4]) });
                    assert!(matches!(fault.cause, Cause::StackOverflow { .. }), "{fault}");
                }
            });
        }
    });
}

#[test]
fn panicking_payloads_are_faults() {
    let fault = fault_of(panics_badly { _y: output(&mut [0; 4]) });
    assert_eq!(fault.cause, Cause::Panic { message: "a panic without a message".into() });
}

#[test]
fn a_kernel_cannot_launch() {
    let fault = fault_of(launches { y: output(&mut [0; 4]) });
    assert!(fault.to_string().contains("a kernel cannot launch a kernel"), "{fault}");
}

#[test]
fn shuffles_outside_their_mask_fail() {
    let fault = fault_of(shuffles_from_outside { y: output(&mut [0; 4]) });
    assert!(fault.to_string().contains("lane 20, which is shuffled from, is not in the mask 0x0000ffff"), "{fault}");
}

#[test]
fn threads_that_wait_are_unwound() {
    let fault = fault_of(waits_when_dropped { _y: output(&mut [0; 4]) });
    assert!(fault.to_string().contains("the first"), "{fault}");
    let dropped = DROPPED.load(Ordering::Relaxed);
    assert!(dropped > 0 && dropped.is_multiple_of(64), "{dropped}");
}

/// A launch that never ends does not delay a launch of another thread.
#[test]
fn long_launches_delay_no_other() {
    let stuck = std::thread::spawn(|| run(goes_on { _y: output(&mut [0; 4]) }));
    while !STARTED.load(Ordering::Relaxed) {
        std::thread::yield_now();
    }
    // Other machines, and rayon's own threads.
    all_is_well();
    assert_eq!(rayon::join(|| 1, || 2), (1, 2));
    assert_eq!((0..100u32).into_par_iter().sum::<u32>(), 4950);
    MAY_END.store(true, Ordering::Relaxed);
    stuck.join().unwrap().unwrap();
}

/// Runs this program again for one of `parts`. Returns its output and exit status.
fn play(part: &str) -> Output {
    let program = std::env::current_exe().unwrap();
    let mut command = Command::new(program);
    command.args(["--exact", "parts", "--nocapture", "--ignored"]).env("STEPSCOPE_TEST_PART", part);
    command.env("RUST_BACKTRACE", "1").output().unwrap()
}

/// The parts that [`play`] runs.
#[test]
#[ignore = "part of another test"]
fn parts() {
    match std::env::var("STEPSCOPE_TEST_PART").unwrap_or_default().as_str() {
        "kernel panics" => {
            let fault = run(panics { _y: output(&mut [0; 4]) }).unwrap_err();
            assert!(fault.to_string().contains("a kernel's own words"), "{fault}");
        }
        "host panics" => {
            std::panic::set_hook(Box::new(|info| eprintln!("my hook: {info}")));
            run(panics { _y: output(&mut [0; 4]) }).unwrap_err();
            std::thread::spawn(|| panic!("the host's own words")).join().unwrap_err();
        }
        "host segfaults" => {
            all_is_well();
            // SAFETY: not upheld: this is the bug under test.
            unsafe { black_box(8 as *mut u32).write_volatile(1) };
        }
        "host overflows" => {
            #[allow(unconditional_recursion)]
            fn deeper(depth: u64) -> u64 {
                black_box(deeper(black_box(depth + 1))) + 1
            }
            all_is_well();
            deeper(0);
        }
        other => panic!("no part `{other}`"),
    }
}

#[test]
fn a_kernels_panic_prints_nothing() {
    let Output { status, stderr, .. } = play("kernel panics");
    assert!(status.success(), "{status}");
    assert_eq!(String::from_utf8_lossy(&stderr), "");
}

#[test]
fn panic_hooks_see_only_host_panics() {
    let Output { status, stderr, .. } = play("host panics");
    let stderr = String::from_utf8_lossy(&stderr);
    assert!(status.success(), "{status}: {stderr}");
    assert!(stderr.contains("my hook: ") && stderr.contains("the host's own words"), "{stderr}");
    assert!(!stderr.contains("a kernel's own words"), "{stderr}");
}

#[test]
#[cfg(target_os = "linux")]
fn host_faults_still_end_the_process() {
    use std::os::unix::process::ExitStatusExt;
    assert_eq!(play("host segfaults").status.signal(), Some(libc::SIGSEGV));
    let Output { status, stderr, .. } = play("host overflows");
    assert_eq!(status.signal(), Some(libc::SIGABRT), "{status}");
    assert!(String::from_utf8_lossy(&stderr).contains("has overflowed its stack"));
}

//! The ranges that a profiler receives. The test links a profiler of its own into the program,
//! which NVTX supports.
//!
//! Invariant: ranges are pushed and popped in pairs, nested like the work, with the fields that are
//! known when it begins.

#![cfg(feature = "nvtx")]

use std::cell::RefCell;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use stepscope::check::NvtxLayer;
use stepscope::{Arena, Capacity, Device, DeviceKind, ops};
use tracing_subscriber::prelude::*;

/// A function whose type follows only from its place in a table.
type Erased = *const c_void;

/// NVTX's `NvtxExportTableCallbacks`.
#[repr(C)]
struct Callbacks {
    struct_size: usize,
    module_functions: unsafe extern "C" fn(c_uint, *mut *mut *mut Erased, *mut c_uint) -> c_int,
}

/// NVTX's names for its tables, in `nvtxTypes.h`.
const CALLBACKS: c_uint = 1;
const CORE: c_uint = 1;
const RANGE_PUSH: usize = 9;
const RANGE_POP: usize = 11;

thread_local! {
    static SEEN: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
    static DEPTH: RefCell<usize> = const { RefCell::new(0) };
}

// SAFETY: NVTX declares a weak symbol of this name and type for a tool to define; no other symbol
// has the name.
#[unsafe(no_mangle)]
#[allow(non_upper_case_globals, reason = "NVTX's name")]
static InitializeInjectionNvtx2_fnptr: unsafe extern "C" fn(unsafe extern "C" fn(c_uint) -> *const c_void) -> c_int =
    attach;

/// Registers the callbacks when NVTX makes its first range.
unsafe extern "C" fn attach(tables: unsafe extern "C" fn(c_uint) -> *const c_void) -> c_int {
    let (mut functions, mut count) = (std::ptr::null_mut(), 0);
    // SAFETY: NVTX passes a function that returns the callbacks' table. `module_functions` fills in
    // a table of pointers to function slots, and its length. These two functions have the types of
    // their slots.
    unsafe {
        let callbacks = &*tables(CALLBACKS).cast::<Callbacks>();
        assert!(callbacks.struct_size >= size_of::<Callbacks>());
        assert_eq!((callbacks.module_functions)(CORE, &mut functions, &mut count), 1);
        assert!(count as usize > RANGE_POP);
        **functions.add(RANGE_PUSH) = pushed as Erased;
        **functions.add(RANGE_POP) = popped as Erased;
    }
    1
}

extern "C" fn pushed(text: *const c_char) -> c_int {
    // SAFETY: NVTX passes on the text of the range, which ends with a zero.
    let text = unsafe { CStr::from_ptr(text) }.to_string_lossy();
    let depth = DEPTH.with_borrow_mut(|depth| std::mem::replace(depth, *depth + 1));
    SEEN.with_borrow_mut(|seen| seen.push(format!("{}{text}", "  ".repeat(depth))));
    depth as c_int
}

extern "C" fn popped() -> c_int {
    DEPTH.with_borrow_mut(|depth| *depth -= 1);
    DEPTH.with_borrow(|depth| *depth as c_int)
}

#[test]
fn profiler_receives_all_ranges() {
    tracing_subscriber::registry().with(NvtxLayer).init();
    let device = Device::open(DeviceKind::Emulated).unwrap();
    let mut arena = Arena::builder(&device).capacity(Capacity::mib(1)).build().unwrap();
    let step = arena.step(|step| ops::tanh(step, &step.upload(&[1.0, 2.0], [2])?).map(drop));
    step.unwrap();
    tracing::info_span!("other", text = "a\0b").in_scope(|| ());
    let seen = SEEN.take();
    let [step, upload, launch, other] = &seen[..] else { panic!("{seen:?}") };
    assert_eq!((step.as_str(), upload.as_str()), ("step number=0", "  upload bytes=8"));
    assert!(launch.starts_with("  launch kernel=tanh_forward_f32 grid="), "{launch}");
    assert_eq!(other, "other text=ab");
    assert_eq!(DEPTH.take(), 0, "every range must end");
}

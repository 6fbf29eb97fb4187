//! Reports an arena's tensors to NVIDIA's compute-sanitizer, through the memory extension of NVTX.
//!
//! An arena is a single allocation to the driver. A sanitizer without further information detects
//! neither a write from one tensor into the next nor a read of what an earlier step left. Each
//! tensor's bytes are therefore registered when it is made and unregistered when they are freed. In
//! a program that a sanitizer started, every arena built with a builder is observed from the start:
//!
//! ```text
//! arena     |<------------------- heap ------------------->|
//! tensors   |<-- region -->|  free  |<- region ->|  free  ..     256 bytes or more are free after each
//! ```
//!
//! Invariant: regions are disjoint. A region is unregistered only after all work that was queued
//! while it existed is done. A sanitizer checks each access when it happens.

use std::collections::BTreeMap;
use std::env;
use std::ffi::{c_int, c_void};
use std::mem::transmute;
use std::ops::Range;
use std::ptr;
use std::sync::OnceLock;

use cuda_std::launch::inventory;
use libloading::Library;
use stepscope_core::internals::{ArenaObserver, ArenaTool, in_context};
use stepscope_core::{Device, DeviceKind, Event, Kind, Origin};

/// The tool's library, as NVTX finds it. The tool sets this variable for the programs that it
/// starts.
const TOOL_VARIABLE: &str = "NVTX_INJECTION64_PATH";
/// `NVTX_EXT_MODULEID_MEM`, `NVTX_EXT_COMPATID_MEM`, and the NVTX version that has them.
const MODULE: u16 = 1;
const COMPATIBLE: u16 = 0x0102;
const VERSION: u16 = 3;
/// `NVTX_MEM_HEAP_USAGE_TYPE_SUB_ALLOCATOR`, `NVTX_MEM_TYPE_VIRTUAL_ADDRESS`,
/// `NVTX_MEM_REGION_REF_TYPE_POINTER`.
const SUB_ALLOCATOR: u32 = 1;
const VIRTUAL_ADDRESS: u32 = 1;
const BY_POINTER: u32 = 1;
/// The indices of functions in the extension's table, from 0 on: `NvtxExtMemCallbackId`.
const PLACES: usize = 63;
const HEAP_REGISTER: usize = 0;
const HEAP_UNREGISTER: usize = 1;
const REGIONS_REGISTER: usize = 3;
const REGIONS_UNREGISTER: usize = 5;

/// NVTX's `nvtxExtModuleSegment_t`.
#[repr(C)]
struct Segment {
    id: usize,
    places: usize,
    functions: *mut *const c_void,
}

/// NVTX's `nvtxExtModuleInfo_t`.
#[repr(C)]
struct Module {
    version: u16,
    struct_size: u16,
    module: u16,
    compatible: u16,
    segment_count: usize,
    segments: *mut Segment,
    export_function: *const c_void,
    info: *const c_void,
}

/// NVTX's `nvtxMemVirtualRangeDesc_t`.
#[repr(C)]
struct Bytes {
    size: usize,
    address: u64,
}

/// NVTX's `nvtxMemHeapDesc_t`.
#[repr(C)]
struct HeapDescription {
    compatible: u16,
    struct_size: u16,
    reserved: u32,
    usage: u32,
    memory_type: u32,
    range_size: usize,
    range: *const Bytes,
    category: u32,
    message_type: u32,
    message: *const c_void,
}

/// NVTX's `nvtxMemRegionsRegisterBatch_t`.
#[repr(C)]
struct Registration {
    compatible: u16,
    struct_size: u16,
    memory_type: u32,
    heap: *mut c_void,
    count: usize,
    range_size: usize,
    ranges: *const Bytes,
    handles: *mut c_void,
}

/// NVTX's `nvtxMemRegionsUnregisterBatch_t`.
#[repr(C)]
struct Unregistration {
    compatible: u16,
    struct_size: u16,
    reference_type: u32,
    count: usize,
    reference_size: usize,
    references: *const u64,
}

/// A tool's `InitializeInjectionNvtxExtension`, which fills in the tool's functions. It returns
/// zero if the tool has no such functions.
type Initialize = unsafe extern "C" fn(*mut Module) -> c_int;
/// The first argument of each function is a domain, which is always the default one here.
type RegisterHeap = unsafe extern "C" fn(*const c_void, *const HeapDescription) -> *mut c_void;
type UnregisterHeap = unsafe extern "C" fn(*const c_void, *mut c_void);
type Register = unsafe extern "C" fn(*const c_void, *const Registration);
type Unregister = unsafe extern "C" fn(*const c_void, *const Unregistration);

/// The functions of a tool that supports the extension.
#[derive(Clone, Copy, Debug)]
struct Tool {
    register_heap: RegisterHeap,
    unregister_heap: UnregisterHeap,
    register: Register,
    unregister: Unregister,
}

impl Tool {
    /// Returns the tool that started this process, if there is one that supports the extension.
    fn attached() -> Option<Self> {
        static ATTACHED: OnceLock<Option<Tool>> = OnceLock::new();
        *ATTACHED.get_or_init(|| {
            let path = env::var_os(TOOL_VARIABLE)?;
            // A tool expects NVTX itself to be loaded first. This call makes NVTX load the tool.
            ::nvtx::mark!("stepscope: an arena");
            // SAFETY: whoever started this process named the library for it to run, and NVTX has
            // just loaded it.
            let library = unsafe { Library::new(path) }.inspect_err(|error| tracing::warn!(%error, "no tool")).ok()?;
            // SAFETY: a tool's function of this name has this type, according to NVTX's headers.
            let initialize = *unsafe { library.get::<Initialize>(b"InitializeInjectionNvtxExtension\0") }.ok()?;
            // SAFETY: it is such a function, and its library is never closed.
            let tool = unsafe { Self::new(initialize) };
            std::mem::forget(library);
            tool
        })
    }

    /// Requests the functions of a tool.
    ///
    /// # Safety
    /// `initialize` fills in functions of NVTX's types at NVTX's indices, and they stay callable.
    unsafe fn new(initialize: Initialize) -> Option<Self> {
        let mut functions = [ptr::null(); PLACES];
        let mut segment = Segment { id: 1, places: PLACES, functions: functions.as_mut_ptr() };
        let mut module = Module {
            version: VERSION,
            struct_size: size_of::<Module>() as u16,
            module: MODULE,
            compatible: COMPATIBLE,
            segment_count: 1,
            segments: &mut segment,
            export_function: ptr::null(),
            info: ptr::null(),
        };
        // SAFETY: the module is what NVTX would pass, and outlives the call. Entries are written
        // only within the table.
        let listens = unsafe { initialize(&mut module) } != 0;
        let place = |at: usize| Some(functions[at]).filter(|function| listens && !function.is_null());
        let (heap, no_heap) = (place(HEAP_REGISTER)?, place(HEAP_UNREGISTER)?);
        let (region, no_region) = (place(REGIONS_REGISTER)?, place(REGIONS_UNREGISTER)?);
        // SAFETY: the functions that a tool writes at these indices have these types.
        Some(unsafe {
            Self {
                register_heap: transmute::<*const c_void, RegisterHeap>(heap),
                unregister_heap: transmute::<*const c_void, UnregisterHeap>(no_heap),
                register: transmute::<*const c_void, Register>(region),
                unregister: transmute::<*const c_void, Unregister>(no_region),
            }
        })
    }
}

/// A tool's handle for an arena.
#[derive(Clone, Copy, Debug)]
struct Heap(*mut c_void);

// SAFETY: nothing here dereferences the handle. It is only passed back to the tool's functions,
// which NVTX allows on any thread.
unsafe impl Send for Heap {}

impl Heap {
    /// Returns the handle as the tool's functions take it. A closure that calls this captures the
    /// whole struct, which is `Send`.
    fn handle(self) -> *mut c_void {
        self.0
    }
}

inventory::submit! {
    ArenaTool { observer: Sanitizer::attached }
}

/// The registrations of an arena with a tool. The tool is called on the driver's thread, because it
/// needs that thread's context.
#[derive(Debug)]
struct Sanitizer {
    tool: Tool,
    device: Device,
    /// The registered arena.
    heap: Option<Heap>,
    /// The address and bytes of each region.
    regions: BTreeMap<u64, usize>,
}

impl ArenaObserver for Sanitizer {
    /// Returns false, which detaches this observer, if the tool does not accept the arena.
    fn event(&mut self, event: &Event) -> bool {
        match (event.kind, event.origin) {
            (Kind::Reserve, Origin::Arena) => self.register_heap(event.address, event.bytes),
            (Kind::Release, Origin::Arena) => self.unregister_heap(),
            (Kind::Allocate | Kind::Capture, Origin::Arena) => self.register(event.address, event.accessed_bytes),
            (Kind::Rewind | Kind::Reset | Kind::EndCapture, Origin::Arena) => {
                self.unregister(event.address..event.address + event.bytes as u64);
            }
            _ => {}
        }
        self.heap.is_some() || event.kind == Kind::Release
    }

    fn needs_guards(&self) -> bool {
        true
    }
}

impl Sanitizer {
    /// Returns the observer of an arena in a GPU's memory, if a tool started this process.
    fn attached(device: &Device) -> Option<Box<dyn ArenaObserver>> {
        let tool = (device.description().kind == DeviceKind::Cuda).then(Tool::attached).flatten()?;
        Some(Box::new(Self::new(tool, device)))
    }

    fn new(tool: Tool, device: &Device) -> Self {
        Self { tool, device: device.clone(), heap: None, regions: BTreeMap::new() }
    }

    /// Registers the arena's memory.
    fn register_heap(&mut self, address: u64, bytes: usize) {
        let tool = self.tool;
        let heap = self.call(move || {
            let range = Bytes { size: bytes, address };
            let description = HeapDescription {
                compatible: COMPATIBLE,
                struct_size: size_of::<HeapDescription>() as u16,
                reserved: 0,
                usage: SUB_ALLOCATOR,
                memory_type: VIRTUAL_ADDRESS,
                range_size: size_of::<Bytes>(),
                range: &range,
                category: 0,
                message_type: 0,
                message: ptr::null(),
            };
            // SAFETY: the description has NVTX's type, and outlives the call.
            Heap(unsafe { (tool.register_heap)(ptr::null(), &description) })
        });
        self.heap = heap.filter(|heap| !heap.handle().is_null());
    }

    /// Registers these bytes as a tensor.
    fn register(&mut self, address: u64, bytes: usize) {
        let (tool, Some(heap), true) = (self.tool, self.heap, bytes > 0) else { return };
        self.call(move || {
            let range = Bytes { size: bytes, address };
            let registration = Registration {
                compatible: COMPATIBLE,
                struct_size: size_of::<Registration>() as u16,
                memory_type: VIRTUAL_ADDRESS,
                heap: heap.handle(),
                count: 1,
                range_size: size_of::<Bytes>(),
                ranges: &range,
                handles: ptr::null_mut(),
            };
            // SAFETY: the registration has NVTX's type, and outlives the call. The heap is
            // registered.
            unsafe { (tool.register)(ptr::null(), &registration) }
        });
        self.regions.insert(address, bytes);
    }

    /// Unregisters the regions that start among these bytes. Waits for all queued work.
    fn unregister(&mut self, range: Range<u64>) {
        let ended: Vec<u64> = self.regions.extract_if(range, |_, _| true).map(|(address, _)| address).collect();
        if ended.is_empty() {
            return;
        }
        // A failed device stays failed, and its next caller receives the error.
        let _ = self.device.synchronize(self.device.deadline());
        let tool = self.tool;
        self.call(move || {
            let unregistration = Unregistration {
                compatible: COMPATIBLE,
                struct_size: size_of::<Unregistration>() as u16,
                reference_type: BY_POINTER,
                count: ended.len(),
                reference_size: size_of::<u64>(),
                references: ended.as_ptr(),
            };
            // SAFETY: the list has NVTX's type, and outlives the call. Each address is that of a
            // region.
            unsafe { (tool.unregister)(ptr::null(), &unregistration) }
        });
    }

    /// Unregisters the arena when it frees its memory, with all remaining regions.
    fn unregister_heap(&mut self) {
        self.regions.clear();
        let (tool, Some(heap)) = (self.tool, self.heap.take()) else { return };
        self.call(move || {
            // SAFETY: the heap is registered.
            unsafe { (tool.unregister_heap)(ptr::null(), heap.handle()) }
        });
    }

    /// Calls the tool on the driver's thread, with its context. Does nothing after the device is
    /// lost.
    fn call<R: Send + 'static>(&self, call: impl FnOnce() -> R + Send + 'static) -> Option<R> {
        // SAFETY: the functions of the tool only describe memory to it.
        let called = unsafe { in_context(&self.device, "sanitizer", call) };
        called.inspect_err(|error| tracing::debug!(%error, "a call to the sanitizer failed")).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Mutex, PoisonError};
    use stepscope_core::internals::observe;
    use stepscope_core::{Arena, Capacity, HostInputs, Output, Record, ops};

    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    enum Call {
        Heap { address: u64, bytes: usize },
        Region { address: u64, bytes: usize },
        Unregister { address: u64 },
        UnregisterHeap,
    }

    const BYTES: usize = 1 << 20;
    /// The calls that the tool received on the driver's thread.
    static CALLS: Mutex<Vec<Call>> = Mutex::new(Vec::new());
    /// Serializes the tests.
    static TURN: Mutex<()> = Mutex::new(());

    fn record(call: Call) {
        CALLS.lock().unwrap().push(call);
    }

    fn recorded() -> Vec<Call> {
        std::mem::take(&mut CALLS.lock().unwrap())
    }

    unsafe extern "C" fn register_heap(_: *const c_void, heap: *const HeapDescription) -> *mut c_void {
        // SAFETY: the library passes a description with one range.
        let (heap, range) = unsafe { (&*heap, &*(*heap).range) };
        assert_eq!((heap.compatible, heap.struct_size, heap.usage, heap.memory_type), (0x0102, 48, 1, 1));
        record(Call::Heap { address: range.address, bytes: range.size });
        ptr::without_provenance_mut(1)
    }

    unsafe extern "C" fn unregister_heap(_: *const c_void, heap: *mut c_void) {
        assert_eq!(heap.addr(), 1);
        record(Call::UnregisterHeap);
    }

    unsafe extern "C" fn register(_: *const c_void, registration: *const Registration) {
        // SAFETY: the library passes a registration of one range.
        let (registration, range) = unsafe { (&*registration, &*(*registration).ranges) };
        assert_eq!(
            (
                registration.compatible,
                registration.struct_size,
                registration.heap.addr(),
                registration.count,
                registration.range_size
            ),
            (0x0102, 48, 1, 1, 16)
        );
        record(Call::Region { address: range.address, bytes: range.size });
    }

    unsafe extern "C" fn unregister(_: *const c_void, registration: *const Unregistration) {
        // SAFETY: the library passes a list of `count` addresses.
        let (registration, ended) =
            unsafe { (&*registration, std::slice::from_raw_parts((*registration).references, (*registration).count)) };
        assert_eq!(
            (
                registration.compatible,
                registration.struct_size,
                registration.reference_type,
                registration.reference_size
            ),
            (0x0102, 32, 1, 8)
        );
        ended.iter().for_each(|&address| record(Call::Unregister { address }));
    }

    /// A tool that supports the extension.
    unsafe extern "C" fn initialize(module: *mut Module) -> c_int {
        // SAFETY: the library passes a module with one segment, whose `places` field has its
        // length.
        let (module, functions) = unsafe {
            let segment = &*(*module).segments;
            (&*module, std::slice::from_raw_parts_mut(segment.functions, segment.places))
        };
        assert_eq!((module.version, module.struct_size, module.module, module.compatible), (3, 40, 1, 0x0102));
        functions[HEAP_REGISTER] = register_heap as *const c_void;
        functions[HEAP_UNREGISTER] = unregister_heap as *const c_void;
        functions[REGIONS_REGISTER] = register as *const c_void;
        functions[REGIONS_UNREGISTER] = unregister as *const c_void;
        1
    }

    /// A tool that does not support the extension.
    unsafe extern "C" fn refuse(_: *mut Module) -> c_int {
        0
    }

    /// A tool that fills in no functions.
    unsafe extern "C" fn forget(_: *mut Module) -> c_int {
        1
    }

    /// Returns an arena that is registered with the tool, and its first address.
    fn told_arena() -> (Arena, u64) {
        recorded();
        let device = Device::open(DeviceKind::Emulated).unwrap();
        let mut arena = Arena::builder(&device).capacity(Capacity::Bytes(BYTES)).build().unwrap();
        // SAFETY: the functions have NVTX's types.
        let tool = unsafe { Tool::new(initialize) }.unwrap();
        observe(&mut arena, Box::new(Sanitizer::new(tool, &device)));
        let [Call::Heap { address, bytes }] = recorded()[..] else { panic!("one arena") };
        assert_eq!(bytes, BYTES);
        (arena, address)
    }

    #[test]
    fn tools_learn_of_every_tensor() {
        let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let (mut arena, start) = told_arena();
        for _ in 0..2 {
            let step = arena.step(|step| {
                let x = step.upload(&[1.0; 100], [100])?;
                step.scratch(|inner| ops::tanh(inner, &inner.lend(&x)).map(drop))?;
                step.empty::<f32>([64])?;
                step.empty::<f32>([0]).map(drop)
            });
            step.unwrap();
            // 400 bytes take 512 and 256 bytes take 256, and the 256 bytes after each belong to no
            // region.
            let second = start + 768;
            let first = Call::Region { address: start, bytes: 400 };
            let seconds = [400, 256].map(|bytes| Call::Region { address: second, bytes });
            let ended = [second, start].map(|address| Call::Unregister { address });
            assert_eq!(recorded(), [first, seconds[0], ended[0], seconds[1], ended[1], ended[0]]);
        }
        drop(arena);
        assert_eq!(recorded(), [Call::UnregisterHeap]);
    }

    #[test]
    fn captured_step_is_one_region() {
        let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let (mut arena, first) = told_arena();
        let end = first + BYTES as u64;
        let x = [1.0; 64];
        let inputs = HostInputs::new().with(&x, [64]).unwrap();
        let record: Record<(), Output> = |step, (), slots| {
            let doubled = ops::scale(step, &slots.input(0)?, 2.0)?;
            Ok(slots.output(&ops::tanh(step, &doubled)?))
        };
        let mut captured = arena.capture((), &inputs, record).unwrap();
        let bytes = captured.report().bytes_owned;
        let section = end - bytes as u64;
        assert_eq!(recorded(), [Call::Region { address: section, bytes }]);
        captured.replay(&inputs).unwrap();
        arena.step(|step| step.empty::<f32>([1]).map(drop)).unwrap();
        assert_eq!(recorded(), [Call::Region { address: first, bytes: 4 }, Call::Unregister { address: first }]);
        drop(captured);
        arena.step(|_| Ok(())).unwrap();
        assert_eq!(recorded(), [Call::Unregister { address: section }]);
    }

    #[test]
    fn inactive_tools_are_skipped() {
        for deaf in [refuse as Initialize, forget] {
            // SAFETY: the function fills in nothing.
            assert!(unsafe { Tool::new(deaf) }.is_none());
        }
    }
}

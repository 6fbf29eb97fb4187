//! What NVIDIA's compute-sanitizer is told of an arena: which bytes are a tensor's, by the memory extension of NVTX.
//!
//! An arena is one allocation of the driver. A sanitizer that knows no more sees no write from one tensor into the next, and no
//! read of what an earlier step left. So each tensor's bytes are registered when it is made and unregistered when they go back:
//!
//! ```text
//! arena     |<------------------- heap ------------------->|
//! tensors   |<-- region -->|  free  |<- region ->|  free  ..     256 bytes or more are free behind each
//! ```
//! Invariant: regions are disjoint, and one goes only when all work that was queued while it stood is done: a sanitizer looks at each
//! access when it happens.

use std::collections::BTreeMap;
use std::env;
use std::ffi::{c_int, c_void};
use std::mem::transmute;
use std::ops::Range;
use std::ptr;
use std::sync::OnceLock;

use libloading::Library;

use crate::driver::{Device, DeviceKind};

/// The tool's library, as NVTX finds it: the tool sets it for the programs that it starts.
const TOOL_VARIABLE: &str = "NVTX_INJECTION64_PATH";
/// `NVTX_EXT_MODULEID_MEM`, `NVTX_EXT_COMPATID_MEM`, and the version of NVTX that has them.
const MODULE: u16 = 1;
const COMPATIBLE: u16 = 0x0102;
const VERSION: u16 = 3;
/// `NVTX_MEM_HEAP_USAGE_TYPE_SUB_ALLOCATOR`, `NVTX_MEM_TYPE_VIRTUAL_ADDRESS`, `NVTX_MEM_REGION_REF_TYPE_POINTER`.
const SUB_ALLOCATOR: u32 = 1;
const VIRTUAL_ADDRESS: u32 = 1;
const BY_POINTER: u32 = 1;
/// Places of functions in the extension's table, from 0 on: `NvtxExtMemCallbackId`.
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

/// A tool's `InitializeInjectionNvtxExtension`: fills in its functions; zero where it has none.
type Initialize = unsafe extern "C" fn(*mut Module) -> c_int;
/// The first argument of each function is a domain, here always the default one.
type RegisterHeap = unsafe extern "C" fn(*const c_void, *const HeapDescription) -> *mut c_void;
type UnregisterHeap = unsafe extern "C" fn(*const c_void, *mut c_void);
type Register = unsafe extern "C" fn(*const c_void, *const Registration);
type Unregister = unsafe extern "C" fn(*const c_void, *const Unregistration);

/// A tool that listens.
#[derive(Clone, Copy, Debug)]
struct Tool {
    register_heap: RegisterHeap,
    unregister_heap: UnregisterHeap,
    register: Register,
    unregister: Unregister,
}

impl Tool {
    /// The tool that started this process, if one did and listens to this.
    fn attached() -> Option<Self> {
        static ATTACHED: OnceLock<Option<Tool>> = OnceLock::new();
        *ATTACHED.get_or_init(|| {
            let path = env::var_os(TOOL_VARIABLE)?;
            // A tool expects NVTX itself first, and this makes NVTX look for it.
            ::nvtx::mark!("stepscope: an arena");
            // SAFETY: whoever started this process named the library for it to run, and NVTX has just loaded it.
            let library = unsafe { Library::new(path) }.inspect_err(|error| tracing::warn!(%error, "no tool")).ok()?;
            // SAFETY: a tool's function of this name has this type, by NVTX's headers.
            let initialize = *unsafe { library.get::<Initialize>(b"InitializeInjectionNvtxExtension\0") }.ok()?;
            // SAFETY: it is such a function, and its library stays: it is not closed.
            let tool = unsafe { Self::new(initialize) };
            std::mem::forget(library);
            tool
        })
    }

    /// Asks a tool for its functions.
    ///
    /// # Safety
    /// `initialize` fills in functions of NVTX's types at NVTX's places, and they stay callable.
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
        // SAFETY: the module is what NVTX would pass, and outlives the call. Places are written only within the table.
        let listens = unsafe { initialize(&mut module) } != 0;
        let place = |at: usize| Some(functions[at]).filter(|function| listens && !function.is_null());
        let (heap, no_heap) = (place(HEAP_REGISTER)?, place(HEAP_UNREGISTER)?);
        let (region, no_region) = (place(REGIONS_REGISTER)?, place(REGIONS_UNREGISTER)?);
        // SAFETY: what a tool writes at these places are functions of these types.
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

/// A tool's name for an arena.
#[derive(Clone, Copy, Debug)]
struct Heap(*mut c_void);

// SAFETY: nothing here follows it; it goes back to the tool's functions, which NVTX lets any thread call.
unsafe impl Send for Heap {}

impl Heap {
    /// As the tool's functions take it. A closure that calls this holds the whole, which may go to another thread.
    fn handle(self) -> *mut c_void {
        self.0
    }
}

/// An arena, as a tool knows it. The tool is called where the driver is: it looks for the thread's context.
#[derive(Debug)]
pub(super) struct Sanitizer {
    tool: Tool,
    heap: Heap,
    /// Address and bytes of each region.
    regions: BTreeMap<u64, usize>,
}

impl Sanitizer {
    /// Tells the tool that started this process of an arena in a GPU's memory, if one did.
    pub(super) fn attach(device: &Device, address: u64, bytes: usize) -> Option<Self> {
        let tool = (device.description().kind == DeviceKind::Cuda).then(Tool::attached).flatten()?;
        Self::new(tool, device, address, bytes)
    }

    fn new(tool: Tool, device: &Device, address: u64, bytes: usize) -> Option<Self> {
        let heap = said(device, move || {
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
            // SAFETY: the description is NVTX's, and outlives the call.
            Heap(unsafe { (tool.register_heap)(ptr::null(), &description) })
        });
        heap.filter(|heap| !heap.handle().is_null()).map(|heap| Self { tool, heap, regions: BTreeMap::new() })
    }

    /// These bytes are a tensor's from now on.
    pub(super) fn register(&mut self, device: &Device, address: u64, bytes: usize) {
        if bytes == 0 {
            return;
        }
        let Self { tool, heap, .. } = *self;
        said(device, move || {
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
            // SAFETY: the registration is NVTX's, and outlives the call; the heap is registered.
            unsafe { (tool.register)(ptr::null(), &registration) }
        });
        self.regions.insert(address, bytes);
    }

    /// What starts among these bytes is nobody's from now on. Waits for all that was queued.
    pub(super) fn unregister(&mut self, device: &Device, range: Range<u64>) {
        let gone: Vec<u64> = self.regions.extract_if(range, |_, _| true).map(|(address, _)| address).collect();
        if gone.is_empty() {
            return;
        }
        // A device that failed stays so, and whoever calls it next is told.
        let _ = device.synchronize(device.deadline());
        let tool = self.tool;
        said(device, move || {
            let unregistration = Unregistration {
                compatible: COMPATIBLE,
                struct_size: size_of::<Unregistration>() as u16,
                reference_type: BY_POINTER,
                count: gone.len(),
                reference_size: size_of::<u64>(),
                references: gone.as_ptr(),
            };
            // SAFETY: the list is NVTX's, and outlives the call; each address is a region's.
            unsafe { (tool.unregister)(ptr::null(), &unregistration) }
        });
    }

    /// The arena gives its memory back, and what is left of the regions goes with it.
    pub(super) fn end(self, device: &Device) {
        let Self { tool, heap, .. } = self;
        said(device, move || {
            // SAFETY: the heap is registered.
            unsafe { (tool.unregister_heap)(ptr::null(), heap.handle()) }
        });
    }
}

/// Says something to a tool where the driver's context is; nothing once the device is lost.
fn said<R: Send + 'static>(device: &Device, say: impl FnOnce() -> R + Send + 'static) -> Option<R> {
    device.in_context("sanitizer", say).inspect_err(|error| tracing::debug!(%error, "a sanitizer was not told")).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Arena, Capacity, Inputs, Output, Record, ops};
    use std::sync::{Mutex, PoisonError};

    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    enum Told {
        Heap { address: u64, bytes: usize },
        Region { address: u64, bytes: usize },
        Gone { address: u64 },
        HeapGone,
    }

    /// What the tool has heard, from the driver's thread.
    static HEARD: Mutex<Vec<Told>> = Mutex::new(Vec::new());
    /// One test at a time.
    static TURN: Mutex<()> = Mutex::new(());

    fn hear(told: Told) {
        HEARD.lock().unwrap().push(told);
    }

    fn heard() -> Vec<Told> {
        std::mem::take(&mut HEARD.lock().unwrap())
    }

    unsafe extern "C" fn register_heap(_: *const c_void, heap: *const HeapDescription) -> *mut c_void {
        // SAFETY: the library passes a description with one range.
        let (heap, range) = unsafe { (&*heap, &*(*heap).range) };
        assert_eq!((heap.compatible, heap.struct_size, heap.usage, heap.memory_type), (0x0102, 48, 1, 1));
        hear(Told::Heap { address: range.address, bytes: range.size });
        ptr::without_provenance_mut(1)
    }

    unsafe extern "C" fn unregister_heap(_: *const c_void, heap: *mut c_void) {
        assert_eq!(heap.addr(), 1);
        hear(Told::HeapGone);
    }

    unsafe extern "C" fn register(_: *const c_void, told: *const Registration) {
        // SAFETY: the library passes a registration of one range.
        let (told, range) = unsafe { (&*told, &*(*told).ranges) };
        assert_eq!(
            (told.compatible, told.struct_size, told.heap.addr(), told.count, told.range_size),
            (0x0102, 48, 1, 1, 16)
        );
        hear(Told::Region { address: range.address, bytes: range.size });
    }

    unsafe extern "C" fn unregister(_: *const c_void, told: *const Unregistration) {
        // SAFETY: the library passes a list of `count` addresses.
        let (told, gone) = unsafe { (&*told, std::slice::from_raw_parts((*told).references, (*told).count)) };
        assert_eq!((told.compatible, told.struct_size, told.reference_type, told.reference_size), (0x0102, 32, 1, 8));
        gone.iter().for_each(|&address| hear(Told::Gone { address }));
    }

    /// A tool that listens.
    unsafe extern "C" fn initialize(module: *mut Module) -> c_int {
        // SAFETY: the library passes a module with one segment, of as many places as it says.
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

    /// One that listens to other things.
    unsafe extern "C" fn refuse(_: *mut Module) -> c_int {
        0
    }

    /// One that has none of the functions.
    unsafe extern "C" fn forget(_: *mut Module) -> c_int {
        1
    }

    /// An arena that the tool hears of.
    fn told_arena() -> Arena {
        heard();
        let device = Device::open(DeviceKind::Emulated).unwrap();
        let mut arena = Arena::builder(&device).capacity(Capacity::mib(1)).build().unwrap();
        // SAFETY: the functions are of NVTX's types.
        let tool = unsafe { Tool::new(initialize) }.unwrap();
        let (address, bytes) = (arena.region.address, arena.region.owned_bytes);
        arena.region.told_by(Sanitizer::new(tool, &device, address, bytes));
        assert_eq!(heard(), [Told::Heap { address, bytes }]);
        arena
    }

    #[test]
    fn a_tool_hears_of_each_tensor_and_when_it_is_gone() {
        let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let mut arena = told_arena();
        let start = arena.region.address;
        for _ in 0..2 {
            let step = arena.step(|step| {
                let x = step.upload(&[1.0; 100], [100])?;
                step.scratch(|inner| ops::tanh(inner, &inner.lend(&x)).map(drop))?;
                step.empty::<f32>([64])?;
                step.empty::<f32>([0]).map(drop)
            });
            step.unwrap();
            // 400 bytes take 512, 256 take 256, and 256 behind each are nobody's.
            let second = start + 768;
            let first = Told::Region { address: start, bytes: 400 };
            let seconds = [400, 256].map(|bytes| Told::Region { address: second, bytes });
            let gone = [second, start].map(|address| Told::Gone { address });
            assert_eq!(heard(), [first, seconds[0], gone[0], seconds[1], gone[1], gone[0]]);
        }
        drop(arena);
        assert_eq!(heard(), [Told::HeapGone]);
    }

    #[test]
    fn a_captured_step_is_one_region_until_it_is_gone() {
        let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let mut arena = told_arena();
        let end = arena.region.address + arena.region.owned_bytes as u64;
        let x = [1.0; 64];
        let inputs = Inputs::new().with(&x, [64]).unwrap();
        let record: Record<(), Output> = |step, (), slots| {
            let doubled = ops::scale(step, &slots.input(0)?, 2.0)?;
            Ok(slots.output(&ops::tanh(step, &doubled)?))
        };
        let mut captured = arena.capture((), &inputs, record).unwrap();
        let bytes = captured.report().bytes_owned;
        let section = end - bytes as u64;
        assert_eq!(heard(), [Told::Region { address: section, bytes }]);
        captured.replay(&inputs).unwrap();
        arena.step(|step| step.empty::<f32>([1]).map(drop)).unwrap();
        let first = arena.region.address;
        assert_eq!(heard(), [Told::Region { address: first, bytes: 4 }, Told::Gone { address: first }]);
        drop(captured);
        arena.step(|_| Ok(())).unwrap();
        assert_eq!(heard(), [Told::Gone { address: section }]);
    }

    #[test]
    fn a_tool_that_does_not_listen_is_not_told() {
        for deaf in [refuse as Initialize, forget] {
            // SAFETY: it fills in nothing.
            assert!(unsafe { Tool::new(deaf) }.is_none());
        }
    }
}

//! CUDA through cust: one context, a main stream, a side stream for exchanges, and kernel PTX that
//! the driver compiles for this GPU.
//!
//! Invariant: a failure that makes the context unusable is marked fatal. Only the calls that
//! [`Driver`] names as blocking can block.

use super::driver::{Description, DeviceKind, Driver, Fence, Graph, Link, Nodes, Piece, Pool, Wire};
use super::kernels::{Kernels, OWN};
use crate::device::MatrixInstruction;
use crate::error::{Error, Result, short};
use crate::ptx::PtxBuild;
use cuda_std::launch::{Entry, Grid, Words};
use cust::CudaApiVersion;
use cust::context::Context;
use cust::device::{Device, DeviceAttribute};
use cust::error::CudaError;
use cust::stream::{Stream, StreamFlags};
use cust::sys::{self, CUresult};
use kernels::Modules;
use nccl::Nccl;
use std::collections::HashMap;
use std::ffi::c_void;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::ThreadId;
use std::time::Duration;
use streams::{SideStream, StagingCopy, check, create_event, describe, is_idle};

mod architectures;
mod kernels;
mod nccl;
mod streams;

pub(super) struct Cuda {
    description: Description,
    // The order of fields is the order of destruction. All must be destroyed before the context.
    modules: Modules,
    stream: Stream,
    bounce: StagingCopy,
    /// The stream for the exchanges of all links, because a communicator's work stays on one
    /// stream.
    exchanges: SideStream,
    /// The stream for captured work, which keeps other threads' work out of the capture.
    capture_stream: Stream,
    capturing: AtomicBool,
    capture: Mutex<Captures>,
    nccl: Nccl,
    context: Context,
    device: sys::CUdevice,
}

/// The thread that captures, if any, and the executable form of each graph.
#[derive(Default)]
struct Captures {
    thread: Option<ThreadId>,
    executables: HashMap<Graph, Executable>,
}

/// An instantiated graph.
#[derive(Clone, Copy)]
struct Executable(sys::CUgraphExec);

// SAFETY: this is a plain handle within its context, and the mutex around it serializes calls on
// it.
unsafe impl Send for Executable {}

impl fmt::Debug for Cuda {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cuda").field("description", &self.description).finish_non_exhaustive()
    }
}

impl Cuda {
    /// Opens the GPU with this ordinal and loads the library's kernels and `others`, for the
    /// instruction that was asked for, if any.
    pub(super) fn open(ordinal: u32, others: &[Kernels], asked: Option<MatrixInstruction>) -> Result<Self> {
        let absent = |reason: String| Error::NoDevice { wanted: "cuda", reason };
        let failed = |call: &'static str| move |error: CudaError| absent(format!("`{call}` failed: {error:?}"));
        cust::init(cust::CudaFlags::empty()).map_err(|error| {
            absent(format!(
                "`cuInit` failed: {error:?}; is the NVIDIA driver installed, and its libcuda.so.1 found first?"
            ))
        })?;
        let device = Device::get_device(ordinal).map_err(|error| {
            let found = Device::num_devices().map_or_else(|error| format!("{error:?}"), |count| count.to_string());
            absent(format!(
                "no GPU number {ordinal}, counted from 0 ({error:?}); GPUs that the program can see: {found}"
            ))
        })?;
        let attribute = |attribute| device.get_attribute(attribute).map_err(failed("cuDeviceGetAttribute"));
        let capability = 10 * attribute(DeviceAttribute::ComputeCapabilityMajor)? as u32
            + attribute(DeviceAttribute::ComputeCapabilityMinor)? as u32;
        let integrated = attribute(DeviceAttribute::Integrated)? != 0;
        let processors = attribute(DeviceAttribute::MultiprocessorCount)? as u32;
        let name = device.name().map_err(failed("cuDeviceGetName"))?;
        let memory_bytes = Some(device.total_memory().map_err(failed("cuDeviceTotalMem"))? as u64);
        let wgmma = architectures::choose_wgmma(OWN.ptx, capability, &name, asked)?;
        let context = Context::new(device).map_err(failed("cuDevicePrimaryCtxRetain"))?;
        let stream = || Stream::new(StreamFlags::NON_BLOCKING, None).map_err(failed("cuStreamCreate"));
        let (stream, capture_stream, stream_of_copies) = (stream()?, stream()?, stream()?);
        let bounce = StagingCopy::new(stream_of_copies)?;
        // Its blocks are scheduled before those of concurrent kernels. CUDA clamps the value to the
        // highest priority.
        let first = Stream::new(StreamFlags::NON_BLOCKING, Some(i32::MIN)).map_err(failed("cuStreamCreate"))?;
        let exchanges = SideStream::new(first)?;
        let modules = Modules::load(capability, &name, others, wgmma.is_some())?;
        let description = Description {
            kind: DeviceKind::Cuda,
            ordinal: device.as_raw(),
            name,
            memory_bytes,
            integrated,
            processors,
            capability: Some(capability),
            has_wgmma: wgmma.is_some(),
            driver: Some(driver_version()?),
            ptx: architectures::choose(OWN.ptx, capability).map(PtxBuild::of),
            wgmma_ptx: wgmma.map(PtxBuild::of),
        };
        Ok(Self {
            description,
            modules,
            stream,
            bounce,
            exchanges,
            capture_stream,
            capturing: AtomicBool::new(false),
            capture: Mutex::default(),
            nccl: Nccl::default(),
            context,
            device: device.as_raw(),
        })
    }

    fn captures(&self) -> std::sync::MutexGuard<'_, Captures> {
        self.capture.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the stream for this thread's work.
    fn stream(&self) -> sys::CUstream {
        let capturing =
            self.capturing.load(Ordering::Acquire) && self.captures().thread == Some(std::thread::current().id());
        if capturing { self.capture_stream.as_inner() } else { self.stream.as_inner() }
    }

    /// Makes the context current on this thread.
    fn enter(&self) -> Result<()> {
        // SAFETY: the context lives as long as `self`.
        check("cuCtxSetCurrent", unsafe { sys::cuCtxSetCurrent(self.context.as_raw()) })
    }

    fn out_of_memory(&self, requested_bytes: usize, result: CUresult) -> Error {
        Error::DeviceMemory {
            device: self.description.name.clone(),
            requested_bytes,
            free_bytes: self.free_bytes().unwrap_or(0),
            reason: describe(result),
        }
    }
}

/// Returns the driver's CUDA version and, if the system reports it, the driver's own version. Two
/// drivers with the same CUDA version may compile differently.
#[expect(clippy::disallowed_methods, reason = "reads the kernel's own file, which ends")]
fn driver_version() -> Result<String> {
    let version = CudaApiVersion::get().map_err(|error| Error::NoDevice {
        wanted: "cuda",
        reason: format!("`cuDriverGetVersion` failed: {error:?}"),
    })?;
    let driver = std::fs::read_to_string("/sys/module/nvidia/version").unwrap_or_default();
    let driver = if driver.is_empty() { String::new() } else { format!(", driver {}", short(driver.trim())) };
    Ok(format!("CUDA {}.{}{driver}", version.major(), version.minor()))
}

// SAFETY: memory comes from cuMemAlloc and from pools (256-byte aligned) and lives until it is
// freed. All work is queued on one stream except exchanges, which wait for it and for which it
// waits.
unsafe impl Driver for Cuda {
    fn description(&self) -> &Description {
        &self.description
    }

    fn free_bytes(&self) -> Result<u64> {
        self.enter()?;
        let (mut free, mut total) = (0usize, 0usize);
        // SAFETY: both are valid for a write.
        check("cuMemGetInfo", unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) })?;
        Ok(free as u64)
    }

    fn allocate(&self, bytes: usize) -> Result<u64> {
        self.enter()?;
        let mut address = 0;
        // SAFETY: `address` is valid for a write.
        match unsafe { sys::cuMemAlloc_v2(&mut address, bytes) } {
            CUresult::CUDA_ERROR_OUT_OF_MEMORY => Err(self.out_of_memory(bytes, CUresult::CUDA_ERROR_OUT_OF_MEMORY)),
            result => check("cuMemAlloc", result).map(|()| address),
        }
    }

    unsafe fn free(&self, address: u64, _: usize) -> Result<()> {
        self.enter()?;
        // SAFETY: `address` came from cuMemAlloc and is not used afterwards (`Driver::free`). The
        // driver waits for queued work.
        check("cuMemFree", unsafe { sys::cuMemFree_v2(address) })
    }

    fn create_pool(&self) -> Result<Pool> {
        self.enter()?;
        // SAFETY: all zero is a valid value of this plain C struct.
        let mut properties: sys::CUmemPoolProps = unsafe { std::mem::zeroed() };
        properties.allocType = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
        properties.location.type_ = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
        properties.location.id = self.device;
        let mut pool = std::ptr::null_mut();
        // SAFETY: both are valid for the call.
        check("cuMemPoolCreate", unsafe { sys::cuMemPoolCreate(&mut pool, &properties) })?;
        // Without this, the pool returns all its memory at every wait, and faults it in again.
        let mut threshold = u64::MAX;
        let attribute = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
        // SAFETY: the attribute's value is a 64-bit number.
        let result = unsafe { sys::cuMemPoolSetAttribute(pool, attribute, (&raw mut threshold).cast()) };
        check("cuMemPoolSetAttribute", result)?;
        Ok(Pool(pool as u64))
    }

    fn pool_allocate(&self, pool: Pool, bytes: usize) -> Result<u64> {
        self.enter()?;
        let mut address = 0;
        // SAFETY: `address` is valid for a write, and the pool is alive until `destroy_pool`.
        match unsafe { sys::cuMemAllocFromPoolAsync(&mut address, bytes, raw(pool), self.stream()) } {
            CUresult::CUDA_ERROR_OUT_OF_MEMORY => Err(self.out_of_memory(bytes, CUresult::CUDA_ERROR_OUT_OF_MEMORY)),
            result => check("cuMemAllocFromPoolAsync", result).map(|()| address),
        }
    }

    unsafe fn pool_free(&self, _: Pool, address: u64, _: usize) -> Result<()> {
        self.enter()?;
        // SAFETY: `address` came from a pool, and no later work uses it (`Driver::pool_free`). The
        // stream lives as long as `self`.
        check("cuMemFreeAsync", unsafe { sys::cuMemFreeAsync(address, self.stream.as_inner()) })
    }

    fn trim_pool(&self, pool: Pool, keep_bytes: usize) -> Result<()> {
        self.enter()?;
        // SAFETY: the pool is alive until `destroy_pool`.
        check("cuMemPoolTrimTo", unsafe { sys::cuMemPoolTrimTo(raw(pool), keep_bytes) })
    }

    unsafe fn destroy_pool(&self, pool: Pool) -> Result<()> {
        self.enter()?;
        // SAFETY: `create_pool` made it, and none of its memory is used afterwards
        // (`Driver::destroy_pool`).
        check("cuMemPoolDestroy", unsafe { sys::cuMemPoolDestroy(raw(pool)) })
    }

    fn allocate_pinned(&self, bytes: usize) -> Result<u64> {
        self.enter()?;
        let mut address = std::ptr::null_mut();
        // SAFETY: `address` is valid for a write.
        match unsafe { sys::cuMemAllocHost_v2(&mut address, bytes) } {
            CUresult::CUDA_ERROR_OUT_OF_MEMORY => Err(self.out_of_memory(bytes, CUresult::CUDA_ERROR_OUT_OF_MEMORY)),
            result => check("cuMemAllocHost", result).map(|()| address as u64),
        }
    }

    unsafe fn free_pinned(&self, address: u64, _: usize) -> Result<()> {
        self.enter()?;
        // SAFETY: `address` came from cuMemAllocHost, no copy of it is queued, and it is not used
        // afterwards (`Driver::free_pinned`).
        check("cuMemFreeHost", unsafe { sys::cuMemFreeHost(address as *mut c_void) })
    }

    unsafe fn queue_upload(&self, to: u64, from: &[u8], bounce: Option<u64>) -> Result<()> {
        if from.is_empty() {
            return Ok(());
        }
        self.enter()?;
        let stream = self.stream();
        if let Some(bounce) = bounce {
            // SAFETY: all three arguments meet the requirements of `Driver::queue_upload`, which
            // are those of `copy`. The stream lives as long as `self`.
            return unsafe { self.bounce.copy(to, from, bounce, stream) };
        }
        // SAFETY: `to` has room for `from`, which is pinned and does not change until a later fence
        // (`Driver::queue_upload`), so the call only queues.
        let result = unsafe { sys::cuMemcpyHtoDAsync_v2(to, from.as_ptr().cast(), from.len(), stream) };
        check("cuMemcpyHtoDAsync", result)
    }

    fn create_fence(&self) -> Result<Fence> {
        self.enter()?;
        create_event().map(|event| Fence(event as u64))
    }

    fn record_fence(&self, fence: Fence) -> Result<()> {
        self.enter()?;
        // SAFETY: the fence is alive until `destroy_fence`, and the stream as long as `self`.
        check("cuEventRecord", unsafe { sys::cuEventRecord(event(fence), self.stream.as_inner()) })
    }

    fn poll_fence(&self, fence: Fence) -> Result<bool> {
        self.enter()?;
        // SAFETY: the fence is alive until `destroy_fence`.
        match unsafe { sys::cuEventQuery(event(fence)) } {
            CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            result => check("cuEventQuery", result).map(|()| true),
        }
    }

    unsafe fn destroy_fence(&self, fence: Fence) -> Result<()> {
        self.enter()?;
        // SAFETY: `create_fence` made it, and it is not used afterwards (`Driver::destroy_fence`).
        check("cuEventDestroy", unsafe { sys::cuEventDestroy_v2(event(fence)) })
    }

    unsafe fn download(&self, from: u64, to: &mut [u8]) -> Result<()> {
        if to.is_empty() {
            return Ok(());
        }
        self.enter()?;
        let stream = self.stream();
        // The driver's default stream must not be used while a stream of any device captures, so
        // this uses the main stream. SAFETY: `from` has as many bytes as `to` (`Driver::download`).
        // `to` may be written until the wait below has succeeded, and after an error
        // `Device::download` leaks it.
        let queued = unsafe { sys::cuMemcpyDtoHAsync_v2(to.as_mut_ptr().cast(), from, to.len(), stream) };
        check("cuMemcpyDtoHAsync", queued)?;
        // SAFETY: the stream lives as long as `self`.
        check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(stream) })
    }

    unsafe fn queue_download(&self, from: u64, to: u64, bytes: usize) -> Result<()> {
        self.enter()?;
        // SAFETY: both have `bytes` bytes. The destination is pinned and not accessed until a later
        // fence (`Driver::queue_download`), so the call only queues.
        let result = unsafe { sys::cuMemcpyDtoHAsync_v2(to as *mut c_void, from, bytes, self.stream()) };
        check("cuMemcpyDtoHAsync", result)
    }

    fn load(&self, entry: &Entry) -> Result<()> {
        self.enter()?;
        let function = self.modules.function(entry)?.name;
        let mut registers = 0;
        let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_NUM_REGS;
        // SAFETY: `registers` is valid for a write. This query makes the driver load the function's
        // code.
        check("cuFuncGetAttribute", unsafe { sys::cuFuncGetAttribute(&mut registers, attribute, function) })
    }

    fn launch_only_queues(&self) -> bool {
        true
    }

    unsafe fn launch(&self, entry: &Entry, grid: Grid, words: &Words) -> Result<()> {
        self.enter()?;
        let function = self.modules.function(entry)?;
        // SAFETY: the contract accepted the words for this grid, and their memory is alive
        // (`Driver::launch`). The function belongs to the entry, and the stream lives as long as
        // `self`.
        unsafe { kernels::launch(function, entry, grid, words, self.stream()) }
    }

    fn begin_capture(&self) -> Result<()> {
        self.enter()?;
        // This mode is strict for this thread only. The global mode would also make every other
        // thread's allocation fail, even on another device.
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream lives as long as `self`.
        let begun = unsafe { sys::cuStreamBeginCapture_v2(self.capture_stream.as_inner(), mode) };
        check("cuStreamBeginCapture", begun)?;
        self.captures().thread = Some(std::thread::current().id());
        self.capturing.store(true, Ordering::Release);
        Ok(())
    }

    fn end_capture(&self) -> Result<Graph> {
        self.enter()?;
        self.capturing.store(false, Ordering::Release);
        self.captures().thread = None;
        let mut graph = std::ptr::null_mut();
        // SAFETY: `graph` is valid for a write, and the stream lives as long as `self`.
        let ended = unsafe { sys::cuStreamEndCapture(self.capture_stream.as_inner(), &mut graph) };
        check("cuStreamEndCapture", ended)?;
        Ok(Graph(graph as u64))
    }

    fn graph_nodes(&self, graph: Graph) -> Result<Nodes> {
        self.enter()?;
        let mut count = 0;
        // SAFETY: the graph is alive. Without room for nodes, the driver returns only their number.
        let counted = unsafe { sys::cuGraphGetNodes(raw_graph(graph), std::ptr::null_mut(), &mut count) };
        check("cuGraphGetNodes", counted)?;
        if count == 0 {
            return Ok(Nodes::default());
        }
        let mut nodes = vec![std::ptr::null_mut(); count];
        // SAFETY: there is room for `count` nodes.
        let listed = unsafe { sys::cuGraphGetNodes(raw_graph(graph), nodes.as_mut_ptr(), &mut count) };
        check("cuGraphGetNodes", listed)?;
        let mut found = Nodes::default();
        for node in nodes.into_iter().take(count) {
            // A newer driver may return kinds that the bindings do not define, so this reads it as
            // a number.
            let mut kind = -1i32;
            // SAFETY: `kind` is as large as the enumeration and valid for a write.
            let status = unsafe { sys::cuGraphNodeGetType(node, (&raw mut kind).cast()) };
            check("cuGraphNodeGetType", status)?;
            match kind {
                kind if kind == sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_KERNEL as i32 => found.kernels += 1,
                kind if kind == sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_MEM_ALLOC as i32
                    || kind == sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_MEM_FREE as i32 =>
                {
                    found.memory += 1;
                }
                _ => found.other += 1,
            }
        }
        Ok(found)
    }

    fn instantiate(&self, graph: Graph) -> Result<()> {
        self.enter()?;
        let mut executable = std::ptr::null_mut();
        // SAFETY: the graph is alive, and `executable` is valid for a write.
        let made = unsafe { sys::cuGraphInstantiateWithFlags(&mut executable, raw_graph(graph), 0) };
        check("cuGraphInstantiate", made)?;
        self.captures().executables.insert(graph, Executable(executable));
        // SAFETY: both live as long as `self`. This does the work of a first launch in advance.
        check("cuGraphUpload", unsafe { sys::cuGraphUpload(executable, self.stream.as_inner()) })
    }

    unsafe fn replay(&self, graph: Graph) -> Result<()> {
        self.enter()?;
        let captures = self.captures();
        let Some(Executable(executable)) = captures.executables.get(&graph).copied() else {
            return check("cuGraphLaunch", CUresult::CUDA_ERROR_INVALID_VALUE);
        };
        // SAFETY: the executable is alive until `destroy_graph`, and so is all memory that its
        // launches name (`Driver::replay`).
        check("cuGraphLaunch", unsafe { sys::cuGraphLaunch(executable, self.stream.as_inner()) })
    }

    unsafe fn destroy_graph(&self, graph: Graph) -> Result<()> {
        self.enter()?;
        let executable = self.captures().executables.remove(&graph);
        let freed = executable.map_or(Ok(()), |Executable(executable)| {
            // SAFETY: it was just taken out of the table, and no replay of the graph follows
            // (`Driver::destroy_graph`). The driver lets a running replay finish.
            check("cuGraphExecDestroy", unsafe { sys::cuGraphExecDestroy(executable) })
        });
        // SAFETY: `end_capture` made it, and it is not used afterwards (`Driver::destroy_graph`).
        check("cuGraphDestroy", unsafe { sys::cuGraphDestroy(raw_graph(graph)) })?;
        freed
    }

    fn poll(&self) -> Result<bool> {
        self.enter()?;
        // SAFETY: the stream lives as long as `self`, and its context is current.
        Ok(unsafe { is_idle(self.stream()) }? && self.exchanges.is_idle()?)
    }

    fn name_link(&self) -> Result<Vec<u8>> {
        self.enter()?;
        self.nccl.name()
    }

    fn join_link(&self, name: &[u8], rank: usize, ranks: usize, _: Arc<dyn Wire>, deadline: Duration) -> Result<Link> {
        self.enter()?;
        self.nccl.join(name, rank, ranks, deadline)
    }

    unsafe fn exchange(&self, link: Link, sends: &[Piece], receives: &[Piece]) -> Result<()> {
        self.enter()?;
        let stream = self.exchanges.fork(self.stream.as_inner())?;
        // SAFETY: the pieces meet the requirements of `Driver::exchange`. The fork waits for the
        // work queued with them before, and later work leaves them untouched until the join. The
        // stream lives as long as `self`.
        unsafe { self.nccl.exchange(link, sends, receives, stream) }
    }

    fn follow_exchanges(&self) -> Result<()> {
        self.enter()?;
        self.exchanges.join(self.stream.as_inner())
    }

    unsafe fn leave_link(&self, link: Link) -> Result<()> {
        self.enter()?;
        self.nccl.abort(link);
        Ok(())
    }
}

fn raw(pool: Pool) -> sys::CUmemoryPool {
    pool.0 as sys::CUmemoryPool
}

fn raw_graph(graph: Graph) -> sys::CUgraph {
    graph.0 as sys::CUgraph
}

fn event(fence: Fence) -> sys::CUevent {
    fence.0 as sys::CUevent
}

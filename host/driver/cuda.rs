//! CUDA through cust: one context, one stream, and the kernels' PTX compiled by the driver for the GPU at hand.
//!
//! Invariant: a failure that leaves the context unusable is marked fatal; calls that can block are those that
//! [`Driver`] names, and no others.

use super::{Description, DeviceKind, Driver, Pool};
use crate::error::{Error, Result};
use cuda_std::launch::{Entry, Grid, Words};
use cust::context::Context;
use cust::device::{Device, DeviceAttribute};
use cust::error::CudaError;
use cust::module::Module;
use cust::stream::{Stream, StreamFlags};
use cust::sys::{self, CUfunction, CUresult};
use std::collections::HashMap;
use std::ffi::{CStr, c_void};
use std::fmt;
use std::sync::Mutex;

include!(concat!(env!("OUT_DIR"), "/ptx.rs"));

/// Dynamic shared memory beyond this needs the function's leave.
const DEFAULT_SHARED_BYTES: u32 = 48 * 1024;

pub(super) struct Cuda {
    description: Description,
    // The order of fields is the order of destruction: functions before their module, all before the context.
    functions: Mutex<HashMap<&'static str, Function>>,
    module: Module,
    stream: Stream,
    context: Context,
    device: sys::CUdevice,
}

/// A kernel of the loaded module.
#[derive(Clone, Copy)]
struct Function(CUfunction);

// SAFETY: a function handle is a plain name within its context; the driver's calls on it are thread-safe.
unsafe impl Send for Function {}

impl fmt::Debug for Cuda {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cuda").field("description", &self.description).finish_non_exhaustive()
    }
}

impl Cuda {
    /// Opens the first GPU and loads the kernels.
    pub(super) fn open() -> Result<Self> {
        let absent = |reason: String| Error::NoDevice { wanted: "cuda", reason };
        let failed = |call: &'static str| move |error: CudaError| absent(format!("`{call}` failed: {error:?}"));
        cust::init(cust::CudaFlags::empty()).map_err(|error| {
            absent(format!(
                "`cuInit` failed: {error:?}; is the NVIDIA driver installed, and its libcuda.so.1 found first?"
            ))
        })?;
        let device = Device::get_device(0).map_err(failed("cuDeviceGet"))?;
        let attribute = |attribute| device.get_attribute(attribute).map_err(failed("cuDeviceGetAttribute"));
        let capability = 10 * attribute(DeviceAttribute::ComputeCapabilityMajor)? as u32
            + attribute(DeviceAttribute::ComputeCapabilityMinor)? as u32;
        let integrated = attribute(DeviceAttribute::Integrated)? != 0;
        let processors = attribute(DeviceAttribute::MultiprocessorCount)? as u32;
        let name = device.name().map_err(failed("cuDeviceGetName"))?;
        let memory_bytes = Some(device.total_memory().map_err(failed("cuDeviceTotalMem"))? as u64);
        let ptx = choose(capability).ok_or_else(|| {
            let built: Vec<String> = PTX.iter().map(|(arch, _)| format!("sm_{arch}")).collect();
            absent(format!(
                "{name} is sm_{capability}, and this build holds kernels for {}; build with STEPSCOPE_ARCHS=sm_{capability}",
                built.join(", ")
            ))
        })?;
        let context = Context::new(device).map_err(failed("cuDevicePrimaryCtxRetain"))?;
        let stream = Stream::new(StreamFlags::NON_BLOCKING, None).map_err(failed("cuStreamCreate"))?;
        let module = Module::from_ptx(ptx, &[]).map_err(failed("cuModuleLoadDataEx"))?;
        let description = Description {
            kind: DeviceKind::Cuda,
            name,
            memory_bytes,
            integrated,
            processors,
            capability: Some(capability),
        };
        Ok(Self { description, functions: Mutex::default(), module, stream, context, device: device.as_raw() })
    }

    /// Makes this thread's calls go to the context.
    fn enter(&self) -> Result<()> {
        // SAFETY: the context lives as long as `self`.
        self.check("cuCtxSetCurrent", unsafe { sys::cuCtxSetCurrent(self.context.as_raw()) })
    }

    /// Ok on success, else the driver's code and words.
    fn check(&self, call: &'static str, result: CUresult) -> Result<()> {
        if result == CUresult::CUDA_SUCCESS {
            return Ok(());
        }
        let reason = describe(result);
        // All but these leave the context in a state that CUDA does not define.
        let fatal = !matches!(
            result,
            CUresult::CUDA_ERROR_OUT_OF_MEMORY
                | CUresult::CUDA_ERROR_INVALID_VALUE
                | CUresult::CUDA_ERROR_NOT_FOUND
                | CUresult::CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES
        );
        Err(Error::Driver { call, reason, fatal })
    }

    fn out_of_memory(&self, requested_bytes: usize, result: CUresult) -> Error {
        Error::DeviceMemory {
            device: self.description.name.clone(),
            requested_bytes,
            free_bytes: self.free_bytes().unwrap_or(0),
            reason: describe(result),
        }
    }

    fn function(&self, entry: &Entry) -> Result<CUfunction> {
        let mut functions = self.functions.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if let Some(Function(function)) = functions.get(entry.name) {
            return Ok(*function);
        }
        let function = self.module.get_function(entry.name).map_err(|error| Error::Driver {
            call: "cuModuleGetFunction",
            reason: format!("{error:?}: the PTX has no kernel `{}`; was it built from other sources?", entry.name),
            fatal: false,
        })?;
        let function = function.to_raw();
        if entry.shared_bytes > DEFAULT_SHARED_BYTES {
            let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: the function belongs to the loaded module.
            let result = unsafe { sys::cuFuncSetAttribute(function, attribute, entry.shared_bytes as i32) };
            self.check("cuFuncSetAttribute", result)?;
        }
        functions.insert(entry.name, Function(function));
        Ok(function)
    }
}

/// The PTX made for this GPU, or else for the newest architecture before it of the same generation or older.
fn choose(capability: u32) -> Option<&'static str> {
    let fits = |arch: u32| arch <= capability;
    PTX.iter().filter(|(arch, _)| fits(*arch)).max_by_key(|(arch, _)| *arch).map(|(_, ptx)| *ptx)
}

fn describe(result: CUresult) -> String {
    let text = |get: unsafe extern "C" fn(CUresult, *mut *const std::ffi::c_char) -> CUresult| {
        let mut text = std::ptr::null();
        // SAFETY: `text` is valid for a write; the driver's strings are static.
        match unsafe { get(result, &mut text) } {
            // SAFETY: on success the driver gives a terminated string.
            CUresult::CUDA_SUCCESS if !text.is_null() => unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned(),
            _ => "?".into(),
        }
    };
    format!("{} ({}): {}", text(sys::cuGetErrorName), result as i32, text(sys::cuGetErrorString))
}

// SAFETY: memory comes from cuMemAlloc and from pools (256-byte aligned) and lives until it is freed; all work is queued on
// one stream.
unsafe impl Driver for Cuda {
    fn description(&self) -> &Description {
        &self.description
    }

    fn free_bytes(&self) -> Result<u64> {
        self.enter()?;
        let (mut free, mut total) = (0usize, 0usize);
        // SAFETY: both are valid for a write.
        self.check("cuMemGetInfo", unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) })?;
        Ok(free as u64)
    }

    fn allocate(&self, bytes: usize) -> Result<u64> {
        self.enter()?;
        let mut address = 0;
        // SAFETY: `address` is valid for a write.
        match unsafe { sys::cuMemAlloc_v2(&mut address, bytes) } {
            CUresult::CUDA_ERROR_OUT_OF_MEMORY => Err(self.out_of_memory(bytes, CUresult::CUDA_ERROR_OUT_OF_MEMORY)),
            result => self.check("cuMemAlloc", result).map(|()| address),
        }
    }

    unsafe fn free(&self, address: u64, _: usize) -> Result<()> {
        self.enter()?;
        // SAFETY: the caller's promise; the driver waits for work that uses the memory.
        self.check("cuMemFree", unsafe { sys::cuMemFree_v2(address) })
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
        self.check("cuMemPoolCreate", unsafe { sys::cuMemPoolCreate(&mut pool, &properties) })?;
        // Without this the pool gives everything back at every wait, and faults it in again.
        let mut threshold = u64::MAX;
        let attribute = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
        // SAFETY: the attribute's value is a 64-bit number.
        let result = unsafe { sys::cuMemPoolSetAttribute(pool, attribute, (&raw mut threshold).cast()) };
        self.check("cuMemPoolSetAttribute", result)?;
        Ok(Pool(pool as u64))
    }

    fn pool_allocate(&self, pool: Pool, bytes: usize) -> Result<u64> {
        self.enter()?;
        let mut address = 0;
        // SAFETY: `address` is valid for a write; the pool is alive until `destroy_pool`.
        match unsafe { sys::cuMemAllocFromPoolAsync(&mut address, bytes, raw(pool), self.stream.as_inner()) } {
            CUresult::CUDA_ERROR_OUT_OF_MEMORY => Err(self.out_of_memory(bytes, CUresult::CUDA_ERROR_OUT_OF_MEMORY)),
            result => self.check("cuMemAllocFromPoolAsync", result).map(|()| address),
        }
    }

    unsafe fn pool_free(&self, _: Pool, address: u64, _: usize) -> Result<()> {
        self.enter()?;
        // SAFETY: the caller's promise.
        self.check("cuMemFreeAsync", unsafe { sys::cuMemFreeAsync(address, self.stream.as_inner()) })
    }

    fn trim_pool(&self, pool: Pool, keep_bytes: usize) -> Result<()> {
        self.enter()?;
        // SAFETY: the pool is alive until `destroy_pool`.
        self.check("cuMemPoolTrimTo", unsafe { sys::cuMemPoolTrimTo(raw(pool), keep_bytes) })
    }

    unsafe fn destroy_pool(&self, pool: Pool) -> Result<()> {
        self.enter()?;
        // SAFETY: the caller's promise.
        self.check("cuMemPoolDestroy", unsafe { sys::cuMemPoolDestroy(raw(pool)) })
    }

    unsafe fn upload(&self, to: u64, from: &[u8]) -> Result<()> {
        if from.is_empty() {
            return Ok(());
        }
        self.enter()?;
        let stream = self.stream.as_inner();
        // SAFETY: the caller's promise; from pageable memory the call returns once the source has been staged.
        let result = unsafe { sys::cuMemcpyHtoDAsync_v2(to, from.as_ptr().cast(), from.len(), stream) };
        self.check("cuMemcpyHtoDAsync", result)
    }

    unsafe fn download(&self, from: u64, to: &mut [u8]) -> Result<()> {
        if to.is_empty() {
            return Ok(());
        }
        self.enter()?;
        // SAFETY: the stream lives as long as `self`. The copy below is not ordered by it: wait for the stream first.
        self.check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(self.stream.as_inner()) })?;
        // SAFETY: the caller's promise.
        let result = unsafe { sys::cuMemcpyDtoH_v2(to.as_mut_ptr().cast(), from, to.len()) };
        self.check("cuMemcpyDtoH", result)
    }

    unsafe fn launch(&self, entry: &Entry, grid: Grid, words: &Words) -> Result<()> {
        self.enter()?;
        let function = self.function(entry)?;
        // A parameter is read from the start of its word: the host is little-endian.
        const { assert!(cfg!(target_endian = "little")) };
        let mut parameters: Vec<*mut c_void> =
            words.as_slice().iter().map(|word| std::ptr::from_ref(word).cast_mut().cast()).collect();
        // SAFETY: the caller's promise: the words are this entry's parameters, read before the call returns.
        let result = unsafe {
            sys::cuLaunchKernel(
                function,
                grid.x,
                grid.y,
                grid.z,
                entry.block,
                1,
                1,
                entry.shared_bytes,
                self.stream.as_inner(),
                parameters.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        };
        self.check("cuLaunchKernel", result)
    }

    fn poll(&self) -> Result<bool> {
        self.enter()?;
        // SAFETY: the stream lives as long as `self`.
        match unsafe { sys::cuStreamQuery(self.stream.as_inner()) } {
            CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            result => self.check("cuStreamQuery", result).map(|()| true),
        }
    }
}

fn raw(pool: Pool) -> sys::CUmemoryPool {
    pool.0 as sys::CUmemoryPool
}

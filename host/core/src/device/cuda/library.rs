//! PTX that the driver has compiled for the GPU, by calls that the bindings are too old for.
//!
//! `cuModuleLoadData` compiles one text at a time, whatever thread calls it. `cuLibraryLoadData`,
//! available since CUDA 12.0, compiles as many at a time as there are threads. Invariant: a library
//! lives as long as the functions taken from it. The signatures are those of cuda.h since 12.0.

use super::status::{check, describe};
use crate::error::{Error, Result, short};
use cust::sys::{CUfunction, CUresult};
use std::ffi::{CStr, CString, c_char, c_void};
use std::ptr::null_mut;

unsafe extern "C" {
    fn cuLibraryLoadData(
        library: *mut *mut c_void,
        code: *const c_void,
        compiler_options: *mut u32,
        compiler_values: *mut *mut c_void,
        compiler_options_len: u32,
        options: *mut u32,
        values: *mut *mut c_void,
        options_len: u32,
    ) -> CUresult;
    fn cuLibraryGetKernel(kernel: *mut *mut c_void, library: *mut c_void, name: *const c_char) -> CUresult;
    fn cuKernelGetFunction(function: *mut CUfunction, kernel: *mut c_void) -> CUresult;
    fn cuLibraryUnload(library: *mut c_void) -> CUresult;
}

/// `CU_JIT_ERROR_LOG_BUFFER` and `CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES`.
const ERROR_LOG: [u32; 2] = [5, 6];

/// A compiled text.
#[derive(Debug)]
pub(super) struct Library(*mut c_void);

// SAFETY: this is a library's handle, which belongs to no thread or context, and the driver's calls
// on it are thread-safe.
unsafe impl Send for Library {}
// SAFETY: as above.
unsafe impl Sync for Library {}

impl Library {
    /// Compiles PTX, or finds it in the driver's cache. The error is the compiler's message.
    pub(super) fn compile(ptx: &str) -> std::result::Result<Self, String> {
        let code = CString::new(ptx).map_err(|_| "the PTX has a zero byte".to_owned())?;
        let mut log = [0u8; 2048];
        // The driver does not receive the last byte, so its text stays terminated.
        let mut values = [log.as_mut_ptr().cast(), std::ptr::without_provenance_mut(log.len() - 1)];
        let (mut options, mut library) = (ERROR_LOG, null_mut());
        // SAFETY: the code is terminated. The two options have two values, a buffer and its size.
        // All are read and written before the call returns, and `library` is valid for a write.
        let result = unsafe {
            let code = code.as_ptr().cast();
            cuLibraryLoadData(
                &mut library,
                code,
                options.as_mut_ptr(),
                values.as_mut_ptr(),
                2,
                null_mut(),
                null_mut(),
                0,
            )
        };
        if result == CUresult::CUDA_SUCCESS {
            return Ok(Self(library));
        }
        let said = CStr::from_bytes_until_nul(&log).unwrap_or_default().to_string_lossy();
        Err(format!("{} {}", describe(result), short(said.trim())).trim_end().to_owned())
    }

    /// Returns the kernel of this name, which must be in its PTX, for the current context.
    pub(super) fn function(&self, name: &str) -> Result<CUfunction> {
        const CALL: &str = "cuLibraryGetKernel";
        let words = CString::new(name).map_err(|error| Error::Driver {
            call: CALL,
            reason: error.to_string(),
            fatal: false,
        })?;
        let mut kernel = null_mut();
        // SAFETY: the library is loaded, the name terminated, and `kernel` valid for a write.
        check(CALL, unsafe { cuLibraryGetKernel(&mut kernel, self.0, words.as_ptr()) })?;
        let mut function = null_mut();
        // SAFETY: the kernel belongs to a loaded library, and `function` is valid for a write.
        check("cuKernelGetFunction", unsafe { cuKernelGetFunction(&mut function, kernel) })?;
        Ok(function)
    }
}

impl Drop for Library {
    fn drop(&mut self) {
        // SAFETY: it was loaded, and its only handle is dropped here.
        if let Err(error) = check("cuLibraryUnload", unsafe { cuLibraryUnload(self.0) }) {
            tracing::warn!(%error, "kernels stay loaded");
        }
    }
}

//! The status codes of driver calls.
//!
//! Invariant: a failure that makes the context unusable is marked fatal.

use crate::error::{Error, Result};
use cust::sys::{self, CUresult, CUstream};
use std::ffi::CStr;

/// Returns `Ok` on success, else an error with the driver's code and text.
pub(super) fn check(call: &'static str, result: CUresult) -> Result<()> {
    if result == CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    let reason = describe(result);
    // All codes except these leave the context in a state that CUDA does not define.
    let fatal = !matches!(
        result,
        CUresult::CUDA_ERROR_OUT_OF_MEMORY
            | CUresult::CUDA_ERROR_INVALID_VALUE
            | CUresult::CUDA_ERROR_NOT_FOUND
            | CUresult::CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES
            | CUresult::CUDA_ERROR_ILLEGAL_STATE
            | CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
            | CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
            | CUresult::CUDA_ERROR_STREAM_CAPTURE_MERGE
            | CUresult::CUDA_ERROR_STREAM_CAPTURE_UNMATCHED
            | CUresult::CUDA_ERROR_STREAM_CAPTURE_UNJOINED
            | CUresult::CUDA_ERROR_STREAM_CAPTURE_ISOLATION
            | CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT
            | CUresult::CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD
    );
    Err(Error::Driver { call, reason, fatal })
}

/// Returns true if all work queued on a stream is done, without waiting.
///
/// # Safety
/// The stream is alive, and its context current.
pub(super) unsafe fn is_idle(stream: CUstream) -> Result<bool> {
    // SAFETY: by this function's contract, the stream is alive and its context current.
    match unsafe { sys::cuStreamQuery(stream) } {
        CUresult::CUDA_ERROR_NOT_READY => Ok(false),
        result => check("cuStreamQuery", result).map(|()| true),
    }
}

/// Formats a status code with its name and its text.
pub(super) fn describe(result: CUresult) -> String {
    let text = |get: unsafe extern "C" fn(CUresult, *mut *const std::ffi::c_char) -> CUresult| {
        let mut text = std::ptr::null();
        // SAFETY: `text` is valid for a write, and the driver's strings are static.
        match unsafe { get(result, &mut text) } {
            // SAFETY: on success the driver returns a terminated string.
            CUresult::CUDA_SUCCESS if !text.is_null() => unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned(),
            _ => "?".into(),
        }
    };
    format!("{} ({}): {}", text(sys::cuGetErrorName), result as i32, text(sys::cuGetErrorString))
}

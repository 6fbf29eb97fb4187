//! What the driver says of a call.
//!
//! Invariant: a failure that leaves the context unusable is marked fatal.

use crate::error::{Error, Result};
use cust::sys::{self, CUresult, CUstream};
use std::ffi::CStr;

/// Ok on success, else the driver's code and words.
pub(super) fn check(call: &'static str, result: CUresult) -> Result<()> {
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

/// Whether all that was queued on a stream is done. Returns at once.
///
/// # Safety
/// The stream is alive, and its context current.
pub(super) unsafe fn is_idle(stream: CUstream) -> Result<bool> {
    // SAFETY: as this function asks.
    match unsafe { sys::cuStreamQuery(stream) } {
        CUresult::CUDA_ERROR_NOT_READY => Ok(false),
        result => check("cuStreamQuery", result).map(|()| true),
    }
}

/// A code, its name and its words.
pub(super) fn describe(result: CUresult) -> String {
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

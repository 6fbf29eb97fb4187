//! NCCL, which carries bytes between GPUs. It is opened when a group first needs it.
//!
//! The build needs neither its header nor its library, because the signatures used here have been
//! stable since version 2.18. Communicators do not block: pending operations are polled until the
//! deadline.
//!
//! Invariant: each call on a communicator is made under its lock, so no thread frees it during a
//! call. It is freed once.

use super::super::driver::{Link, Piece};
use crate::error::{Error, Result};
use cust::sys;
use libloading::Library;
use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, Once, PoisonError, mpsc};
use std::time::{Duration, Instant};

/// The environment variable with NCCL's path, for a library that the loader does not find.
const VARIABLE: &str = "STEPSCOPE_NCCL";
/// The oldest version that has all functions used here, and the version of this [`Config`].
const OLDEST: c_int = 21_800;
/// The bytes of a communicator's name.
const NAME: usize = 128;
/// The time that a communicator may take to end before its thread is abandoned.
const NCCL_INIT_TIMEOUT: Duration = Duration::from_secs(1);

/// The time that the end of the process waits for communicators that are being freed.
const AT_EXIT: Duration = Duration::from_secs(5);

/// `ncclResult_t`.
type Status = c_int;
const SUCCESS: Status = 0;
const IN_PROGRESS: Status = 7;
/// `ncclUint8`.
const BYTES: c_int = 1;

/// `ncclUniqueId`.
#[repr(C)]
#[derive(Clone, Copy)]
struct UniqueId([u8; NAME]);

/// `ncclConfig_t` of version 2.18. A newer library reads as much of it as `size` states.
#[repr(C)]
struct Config {
    size: usize,
    magic: u32,
    version: u32,
    blocking: c_int,
    cga_cluster_size: c_int,
    min_ctas: c_int,
    max_ctas: c_int,
    net_name: *const c_char,
    split_share: c_int,
}

/// `ncclComm_t`.
type Communicator = *mut c_void;

/// The functions used here.
#[derive(Clone, Copy)]
struct Functions {
    get_version: unsafe extern "C" fn(*mut c_int) -> Status,
    get_unique_id: unsafe extern "C" fn(*mut UniqueId) -> Status,
    init: unsafe extern "C" fn(*mut Communicator, c_int, UniqueId, c_int, *mut Config) -> Status,
    async_error: unsafe extern "C" fn(Communicator, *mut Status) -> Status,
    group_start: unsafe extern "C" fn() -> Status,
    group_end: unsafe extern "C" fn() -> Status,
    send: unsafe extern "C" fn(*const c_void, usize, c_int, c_int, Communicator, sys::CUstream) -> Status,
    receive: unsafe extern "C" fn(*mut c_void, usize, c_int, c_int, Communicator, sys::CUstream) -> Status,
    abort: unsafe extern "C" fn(Communicator) -> Status,
    error_string: unsafe extern "C" fn(Status) -> *const c_char,
    last_error: unsafe extern "C" fn(Communicator) -> *const c_char,
}

/// An initialized communicator.
struct Joined {
    /// The handle, or none after it is freed. None of its calls blocks, so the lock is held only
    /// briefly.
    communicator: Mutex<Option<Handle>>,
    deadline: Duration,
}

struct Handle(Communicator);

// SAFETY: NCCL accepts calls on a communicator from any thread, one at a time, which the lock
// ensures.
unsafe impl Send for Handle {}

impl Joined {
    fn lock(&self) -> MutexGuard<'_, Option<Handle>> {
        self.communicator.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Calls `call` with the communicator, which stays alive meanwhile. Returns an error if it has
    /// been freed.
    fn with<T>(&self, call: impl FnOnce(Communicator) -> Result<T>) -> Result<T> {
        match &*self.lock() {
            Some(Handle(communicator)) => call(*communicator),
            None => Err(ended()),
        }
    }
}

fn ended() -> Error {
    Error::Driver { call: "exchange", reason: "the link was closed".into(), fatal: true }
}

/// The NCCL library, if open, and this device's communicators.
#[derive(Default)]
pub(super) struct Nccl {
    library: Mutex<Option<Loaded>>,
    links: Mutex<(u64, BTreeMap<u64, Arc<Joined>>)>,
}

/// The open library. It stays open, because its own threads may run its code.
#[derive(Clone, Copy)]
struct Loaded(Functions);

impl Nccl {
    fn links(&self) -> MutexGuard<'_, (u64, BTreeMap<u64, Arc<Joined>>)> {
        self.links.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the functions, and opens the library first if needed.
    fn functions(&self) -> Result<Functions> {
        let mut library = self.library.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(Loaded(functions)) = *library {
            return Ok(functions);
        }
        let functions = load()?;
        *library = Some(Loaded(functions));
        Ok(functions)
    }

    /// Creates a name for a new communicator.
    pub(super) fn name(&self) -> Result<Vec<u8>> {
        let functions = self.functions()?;
        let mut id = UniqueId([0; NAME]);
        // SAFETY: `id` is valid for a write.
        functions.check("ncclGetUniqueId", None, unsafe { (functions.get_unique_id)(&mut id) })?;
        Ok(id.0.to_vec())
    }

    /// Joins a communicator.
    pub(super) fn join(&self, name: &[u8], rank: usize, ranks: usize, deadline: Duration) -> Result<Link> {
        let functions = self.functions()?;
        let id = UniqueId(name.try_into().map_err(|_| {
            let reason = format!("the name of the link has {} bytes instead of {NAME}", name.len());
            Error::Driver { call: "ncclCommInitRankConfig", reason, fatal: false }
        })?);
        let mut config = Config {
            size: size_of::<Config>(),
            magic: 0xcafe_beef,
            version: OLDEST as u32,
            blocking: 0,
            cga_cluster_size: c_int::MIN,
            min_ctas: c_int::MIN,
            max_ctas: c_int::MIN,
            net_name: std::ptr::null(),
            split_share: c_int::MIN,
        };
        let mut communicator = std::ptr::null_mut();
        let start = Instant::now();
        // SAFETY: `communicator` and `config` are valid for the call, which reads `config` and
        // writes `communicator`.
        let begun = unsafe { (functions.init)(&mut communicator, ranks as c_int, id, rank as c_int, &mut config) };
        let handle = (!communicator.is_null()).then_some(Handle(communicator));
        let joined = Arc::new(Joined { communicator: Mutex::new(handle), deadline });
        // Without a communicator, its status is the only information.
        let done = match begun {
            IN_PROGRESS | SUCCESS => functions.begun("ncclCommInitRankConfig", &joined, begun, start),
            refused => functions.check("ncclCommInitRankConfig", None, refused),
        };
        if let Err(error) = done {
            functions.abort(joined);
            return Err(error);
        }
        let (last, links) = &mut *self.links();
        *last += 1;
        links.insert(*last, joined);
        Ok(Link(*last))
    }

    /// Queues copies on the stream.
    ///
    /// # Safety
    /// The requirements of [`Driver::exchange`](super::Driver::exchange).
    pub(super) unsafe fn exchange(
        &self,
        link: Link,
        sends: &[Piece],
        receives: &[Piece],
        stream: sys::CUstream,
    ) -> Result<()> {
        let functions = self.functions()?;
        let joined = self.links().1.get(&link.0).map(Arc::clone).ok_or_else(ended)?;
        let start = Instant::now();
        let status = joined.with(|communicator| {
            let check = |call, status| functions.begun_in_group(call, communicator, status);
            // SAFETY: the start and end calls enclose the calls of one thread.
            check("ncclGroupStart", unsafe { (functions.group_start)() })?;
            let mut queued = Ok(());
            for &Piece { rank, address, bytes } in sends {
                // SAFETY: the piece is live memory of this device (`Driver::exchange`), and the
                // stream belongs to the device.
                let status = unsafe {
                    (functions.send)(address as *const c_void, bytes, BYTES, rank as c_int, communicator, stream)
                };
                queued = queued.and(check("ncclSend", status));
            }
            for &Piece { rank, address, bytes } in receives {
                // SAFETY: as for sent pieces, and no other piece overlaps it.
                let status = unsafe {
                    (functions.receive)(address as *mut c_void, bytes, BYTES, rank as c_int, communicator, stream)
                };
                queued = queued.and(check("ncclRecv", status));
            }
            // SAFETY: the group was started above.
            let ended = unsafe { (functions.group_end)() };
            queued.map(|()| ended)
        })?;
        functions.begun("ncclGroupEnd", &joined, status, start)
    }

    /// Frees a communicator in any state, on a thread that is abandoned if it does not end.
    pub(super) fn abort(&self, link: Link) {
        let joined = self.links().1.remove(&link.0);
        if let (Some(joined), Ok(functions)) = (joined, self.functions()) {
            functions.abort(joined);
        }
    }
}

impl Functions {
    /// Returns an error with NCCL's text unless the call has succeeded. The work may be partly
    /// queued, so the device is lost.
    fn check(&self, call: &'static str, communicator: Option<Communicator>, status: Status) -> Result<()> {
        if status == SUCCESS {
            return Ok(());
        }
        // SAFETY: NCCL's strings are terminated, and those of a status are static.
        let words = unsafe { text((self.error_string)(status)) };
        // SAFETY: the communicator is alive or null, and the string is copied before another call.
        let last = unsafe { text((self.last_error)(communicator.unwrap_or(std::ptr::null_mut()))) };
        let reason = format!("{words} ({status}): {}; set NCCL_DEBUG=WARN for details", last.trim());
        Err(Error::Driver { call, reason, fatal: true })
    }

    /// Checks a call within a group, which may be in progress until the group ends.
    fn begun_in_group(&self, call: &'static str, communicator: Communicator, status: Status) -> Result<()> {
        if status == IN_PROGRESS { Ok(()) } else { self.check(call, Some(communicator), status) }
    }

    /// Waits until the operation that a call began has ended, at most until the communicator's
    /// deadline.
    fn begun(&self, call: &'static str, joined: &Joined, mut status: Status, start: Instant) -> Result<()> {
        while status == IN_PROGRESS {
            let waited = start.elapsed();
            if waited >= joined.deadline {
                return Err(Error::Timeout { call, waited, report: None });
            }
            std::thread::yield_now();
            joined.with(|communicator| {
                // SAFETY: the communicator is alive, and `status` is valid for a write.
                let asked = unsafe { (self.async_error)(communicator, &mut status) };
                self.check("ncclCommGetAsyncError", Some(communicator), asked)
            })?;
        }
        joined.with(|communicator| self.check(call, Some(communicator), status))
    }

    /// Frees a communicator.
    fn abort(self, joined: Arc<Joined>) {
        let (done, ended) = mpsc::channel();
        let ending = Ending::begin();
        let abort = move || {
            let _ending = ending;
            let handle = joined.lock().take();
            // SAFETY: it was taken under the lock that every call holds, so no other call uses it
            // and nothing else frees it.
            let _ = done.send(handle.map(|Handle(communicator)| unsafe { (self.abort)(communicator) }));
        };
        let started = std::thread::Builder::new().name("stepscope-nccl-abort".into()).spawn(abort);
        if started.is_err() || ended.recv_timeout(NCCL_INIT_TIMEOUT).is_err() {
            tracing::warn!("an NCCL communicator did not end; it stays until the process ends");
        }
    }
}

/// A communicator that is being freed, possibly by an abandoned thread. The end of the process
/// waits for it, up to [`AT_EXIT`]. Otherwise CUDA and NCCL would be torn down while the thread
/// uses them, and the process would crash.
struct Ending;

static ENDINGS: (Mutex<usize>, Condvar) = (Mutex::new(0), Condvar::new());

impl Ending {
    fn begin() -> Self {
        static REGISTERED: Once = Once::new();
        // Handlers run in the reverse order of their registration. This one must run before those
        // of CUDA and NCCL, which were registered when a communicator was made.
        REGISTERED.call_once(|| {
            // SAFETY: the function takes no arguments and does not unwind, because it also takes a
            // poisoned lock.
            let _ = unsafe { atexit(wait_for_endings) };
        });
        *lock_endings() += 1;
        Self
    }
}

impl Drop for Ending {
    fn drop(&mut self) {
        *lock_endings() -= 1;
        ENDINGS.1.notify_all();
    }
}

fn lock_endings() -> MutexGuard<'static, usize> {
    ENDINGS.0.lock().unwrap_or_else(PoisonError::into_inner)
}

unsafe extern "C" {
    /// C's `atexit`, which registers a function to be called when the process ends normally.
    fn atexit(function: extern "C" fn()) -> c_int;
}

extern "C" fn wait_for_endings() {
    let waited = ENDINGS.1.wait_timeout_while(lock_endings(), AT_EXIT, |number| *number > 0);
    drop(waited.unwrap_or_else(PoisonError::into_inner));
}

/// # Safety
/// `words` is null or a terminated string.
unsafe fn text(words: *const c_char) -> String {
    // SAFETY: by this function's contract, the string is terminated.
    if words.is_null() { String::new() } else { unsafe { CStr::from_ptr(words) }.to_string_lossy().into_owned() }
}

/// Opens the library.
fn load() -> Result<Functions> {
    let path = std::env::var_os(VARIABLE).unwrap_or_else(|| "libnccl.so.2".into());
    let absent = |reason: String| Error::Driver {
        call: "dlopen",
        reason: format!("{reason}; several GPUs need NCCL 2.18 or later: install it, or set {VARIABLE} to its path"),
        fatal: false,
    };
    // SAFETY: NCCL's own start-up code runs, which has no requirements on the program that loads
    // it.
    let library = unsafe { Library::new(&path) }.map_err(|reason| absent(reason.to_string()))?;
    macro_rules! function {
        ($name:literal) => {
            // SAFETY: the field's type is the function's, which has not changed since version 2.18.
            *unsafe { library.get($name) }.map_err(|reason| absent(reason.to_string()))?
        };
    }
    let functions = Functions {
        get_version: function!(b"ncclGetVersion"),
        get_unique_id: function!(b"ncclGetUniqueId"),
        init: function!(b"ncclCommInitRankConfig"),
        async_error: function!(b"ncclCommGetAsyncError"),
        group_start: function!(b"ncclGroupStart"),
        group_end: function!(b"ncclGroupEnd"),
        send: function!(b"ncclSend"),
        receive: function!(b"ncclRecv"),
        abort: function!(b"ncclCommAbort"),
        error_string: function!(b"ncclGetErrorString"),
        last_error: function!(b"ncclGetLastError"),
    };
    let mut version = 0;
    // SAFETY: `version` is valid for a write.
    functions.check("ncclGetVersion", None, unsafe { (functions.get_version)(&mut version) })?;
    if version < OLDEST {
        return Err(absent(format!("{} is version {version}", path.to_string_lossy())));
    }
    tracing::info!(version, "NCCL opened");
    // Its functions are used until the process ends.
    std::mem::forget(library);
    Ok(functions)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks the layout against `nccl.h` of 2.18 on a 64-bit machine.
    #[test]
    fn the_configuration_is_ncclconfig_t() {
        let places = [
            std::mem::offset_of!(Config, magic),
            std::mem::offset_of!(Config, version),
            std::mem::offset_of!(Config, blocking),
            std::mem::offset_of!(Config, net_name),
            std::mem::offset_of!(Config, split_share),
        ];
        assert_eq!((places, size_of::<Config>()), ([8, 12, 16, 32, 40], 48));
    }
}

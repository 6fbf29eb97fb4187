//! The loaded PTX of all launches: the library's own, and that of other packages.
//!
//! Invariant: each kernel is found only in its own package's PTX, so two packages may use the same
//! kernel name.

use super::library::Library;
use super::parts::{Part, parts};
use super::status::check;
use crate::device::kernels::{Kernels, OWN};
use crate::error::{Error, Result};
use cuda_std::launch::Entry;
use cust::sys::{self, CUfunction};
use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// A function must opt in to more dynamic shared memory than this.
const DEFAULT_SHARED_BYTES: u32 = 48 * 1024;

/// A kernel of a compiled library.
#[derive(Clone, Copy, Debug)]
pub(super) struct Function {
    pub(super) name: CUfunction,
    /// True if it begins by waiting for the kernels before it, so that its blocks may start while
    /// they still run.
    pub(super) overlaps: bool,
}

// SAFETY: a function handle is a plain handle within its context, and the driver's calls on it are
// thread-safe.
unsafe impl Send for Function {}

/// The compiled kernels by package, and the functions requested so far.
#[derive(Debug)]
pub(super) struct Modules {
    // The order of fields is the order of destruction: functions before their libraries.
    functions: Mutex<HashMap<(&'static str, &'static str), Function>>,
    packages: HashMap<&'static str, HashMap<&'static str, Arc<Compiled>>>,
}

/// A library, and whether all its kernels wait for their predecessors.
#[derive(Debug)]
struct Compiled {
    library: Library,
    overlaps: bool,
}

impl Modules {
    /// Compiles the library's kernels and `others` for the GPU called `name`, on all processors.
    pub(super) fn load(capability: u32, name: &str, others: &[Kernels]) -> Result<Self> {
        let absent = |reason: String| Error::NoDevice { wanted: "cuda", reason };
        let mut packages: HashMap<_, HashMap<_, _>> = HashMap::new();
        let mut work = Vec::new();
        // Each name appears once, which `DeviceBuilder::open` has checked.
        for Kernels { package, ptx } in [&[OWN], others].concat() {
            let (_, chosen) = choose(ptx, capability).ok_or_else(|| {
                let built: Vec<String> = ptx.iter().map(|(arch, _)| format!("sm_{arch}")).collect();
                absent(format!(
                    "{name} is sm_{capability}, and this build holds kernels of {package} for {}; build with \
                     STEPSCOPE_ARCHS=sm_{capability}",
                    built.join(", ")
                ))
            })?;
            packages.insert(package, HashMap::new());
            work.extend(parts(chosen).into_iter().map(|part| (package, part)));
        }
        for (package, kernel, compiled) in compile(&work).map_err(absent)? {
            packages.entry(package).or_default().insert(kernel, compiled);
        }
        Ok(Self { functions: Mutex::default(), packages })
    }

    /// Returns a kernel that is ready to launch.
    pub(super) fn function(&self, entry: &Entry) -> Result<Function> {
        let mut functions = self.functions.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (entry.package, entry.name);
        if let Some(function) = functions.get(&key) {
            return Ok(*function);
        }
        let missing = |what| {
            let reason = format!("kernel `{}` is of package {}, {what}", entry.name, entry.package);
            Error::Driver { call: "launch", reason, fatal: false }
        };
        let package = self
            .packages
            .get(entry.package)
            .ok_or_else(|| missing("whose PTX is not loaded on this device; pass it to `DeviceBuilder::kernels`"))?;
        let Compiled { library, overlaps } = package
            .get(entry.name)
            .map(|compiled| &**compiled)
            .ok_or_else(|| missing("whose PTX has no such kernel; was it built from other sources?"))?;
        let function = Function { name: library.function(entry.name)?, overlaps: *overlaps };
        allow_shared_bytes(function.name, entry)?;
        functions.insert(key, function);
        Ok(function)
    }
}

/// A package, the name of a kernel, and the library that contains it.
type Named<'a> = (&'a str, &'a str, Arc<Compiled>);

/// Compiles each package's parts, on as many threads as there are processors. The error is that of
/// the part that failed first.
fn compile<'a>(work: &[(&'a str, Part<'a>)]) -> std::result::Result<Vec<Named<'a>>, String> {
    let (next, done) = (AtomicUsize::new(0), Mutex::new(Ok(Vec::new())));
    let take = || {
        while let Some((package, Part { kernels, ptx })) = work.get(next.fetch_add(1, Ordering::Relaxed)) {
            let library = Library::compile(ptx);
            let mut done = done.lock().unwrap_or_else(PoisonError::into_inner);
            let Ok(compiled) = &mut *done else { return };
            match library {
                Ok(library) => {
                    let library = Arc::new(Compiled { library, overlaps: waits(ptx) });
                    compiled.extend(kernels.iter().map(|kernel| (*package, *kernel, Arc::clone(&library))));
                }
                Err(reason) => {
                    let kernel = kernels.first().unwrap_or(&"");
                    *done = Err(format!("`cuLibraryLoadData` of {package}, kernel `{kernel}`, failed: {reason}"));
                }
            }
        }
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(work.len());
    std::thread::scope(|scope| {
        for _ in 1..threads {
            // If the system has no more threads, the existing ones share the work.
            if std::thread::Builder::new().spawn_scoped(scope, take).is_err() {
                break;
            }
        }
        take();
    });
    done.into_inner().unwrap_or_else(PoisonError::into_inner)
}

/// Requests the shared memory of a block if it exceeds the driver's default. Memory that the
/// compiler has reserved also counts: rust-cuda's block of dynamic memory has 16 static bytes.
fn allow_shared_bytes(function: CUfunction, entry: &Entry) -> Result<()> {
    use sys::CUfunction_attribute::{
        CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES,
    };
    let mut set_aside = 0;
    // SAFETY: the function belongs to a loaded module, and the number is written before the call
    // returns.
    let result = unsafe { sys::cuFuncGetAttribute(&mut set_aside, CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, function) };
    check("cuFuncGetAttribute", result)?;
    if entry.shared_bytes.saturating_add(set_aside as u32) > DEFAULT_SHARED_BYTES {
        let attribute = CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: the function belongs to a loaded module.
        let result = unsafe { sys::cuFuncSetAttribute(function, attribute, entry.shared_bytes as i32) };
        check("cuFuncSetAttribute", result)?;
    }
    Ok(())
}

/// Returns the PTX with the highest architecture that does not exceed this GPU's.
pub(super) fn choose(ptx: &'static [(u32, &'static str)], capability: u32) -> Option<(u32, &'static str)> {
    let fits = |arch: u32| arch <= capability;
    ptx.iter().filter(|(arch, _)| fits(*arch)).max_by_key(|(arch, _)| *arch).copied()
}

/// Returns true if each kernel contains the wait of `cuda_std::grid`. Kernels of rust-cuda's
/// `#[kernel]` and for targets before sm_90 do not.
fn waits(ptx: &str) -> bool {
    ptx.matches("griddepcontrol.wait").count() >= ptx.matches(".entry ").count()
}

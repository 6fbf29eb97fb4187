//! The PTX that launches come from: the library's own, and what other packages bring.
//!
//! Invariant: a kernel is looked up in its own package's PTX alone, so two packages may use one name for a kernel.

use super::status::check;
use crate::driver::kernels::{Kernels, OWN};
use crate::error::{Error, Result};
use cuda_std::launch::Entry;
use cust::module::Module;
use cust::sys::{self, CUfunction};
use std::collections::HashMap;
use std::fmt;
use std::sync::{Mutex, PoisonError};

/// Dynamic shared memory beyond this needs the function's leave.
const DEFAULT_SHARED_BYTES: u32 = 48 * 1024;

/// A kernel of a loaded module.
#[derive(Clone, Copy)]
pub(super) struct Function {
    pub(super) name: CUfunction,
    /// It begins by waiting for the kernels before it, so its blocks may come while they still run.
    pub(super) overlaps: bool,
}

// SAFETY: a function handle is a plain name within its context; the driver's calls on it are thread-safe.
unsafe impl Send for Function {}

/// Loaded modules by package, and the functions that were asked for.
pub(super) struct Modules {
    // The order of fields is the order of destruction: functions before their modules.
    functions: Mutex<HashMap<(&'static str, &'static str), Function>>,
    modules: HashMap<&'static str, Loaded>,
}

/// A module, and whether all its kernels wait for those before them.
struct Loaded {
    module: Module,
    overlaps: bool,
}

impl fmt::Debug for Modules {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.modules.keys()).finish()
    }
}

impl Modules {
    /// Compiles the library's kernels and `others` for the GPU called `name`.
    pub(super) fn load(capability: u32, name: &str, others: &[Kernels]) -> Result<Self> {
        let absent = |reason: String| Error::NoDevice { wanted: "cuda", reason };
        let mut modules = HashMap::new();
        // Each name once: `DeviceBuilder::open` has looked.
        for Kernels { package, ptx } in [&[OWN], others].concat() {
            let (_, chosen) = choose(ptx, capability).ok_or_else(|| {
                let built: Vec<String> = ptx.iter().map(|(arch, _)| format!("sm_{arch}")).collect();
                absent(format!(
                    "{name} is sm_{capability}, and this build holds kernels of {package} for {}; build with \
                     STEPSCOPE_ARCHS=sm_{capability}",
                    built.join(", ")
                ))
            })?;
            let module = Module::from_ptx(chosen, &[])
                .map_err(|error| absent(format!("`cuModuleLoadDataEx` of {package} failed: {error:?}")))?;
            modules.insert(package, Loaded { module, overlaps: waits(chosen) });
        }
        Ok(Self { functions: Mutex::default(), modules })
    }

    /// A kernel, ready to be launched.
    pub(super) fn function(&self, entry: &Entry) -> Result<Function> {
        let mut functions = self.functions.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (entry.package, entry.name);
        if let Some(function) = functions.get(&key) {
            return Ok(*function);
        }
        let missing = |reason| Error::Driver { call: "cuModuleGetFunction", reason, fatal: false };
        let Loaded { module, overlaps } = self.modules.get(entry.package).ok_or_else(|| {
            let reason = format!(
                "kernel `{}` is of package {}, whose PTX this device has not; give it to `DeviceBuilder::kernels`",
                entry.name, entry.package
            );
            missing(reason)
        })?;
        let function = module.get_function(entry.name).map_err(|error| {
            let reason = format!("{error:?}: the PTX has no kernel `{}`; was it built from other sources?", entry.name);
            missing(reason)
        })?;
        let function = Function { name: function.to_raw(), overlaps: *overlaps };
        allow_shared_bytes(function.name, entry)?;
        functions.insert(key, function);
        Ok(function)
    }
}

/// Asks for the shared memory of a block, where it is more than the driver gives unasked. What the compiler has set aside counts
/// too: rust-cuda's block of dynamic memory has 16 static bytes.
fn allow_shared_bytes(function: CUfunction, entry: &Entry) -> Result<()> {
    use sys::CUfunction_attribute::{
        CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES,
    };
    let mut set_aside = 0;
    // SAFETY: the function belongs to a loaded module, and the number is written before the call returns.
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

/// The PTX made for this GPU, or else for the newest architecture before it of the same generation or older.
pub(super) fn choose(ptx: &'static [(u32, &'static str)], capability: u32) -> Option<(u32, &'static str)> {
    let fits = |arch: u32| arch <= capability;
    ptx.iter().filter(|(arch, _)| fits(*arch)).max_by_key(|(arch, _)| *arch).copied()
}

/// Whether each kernel has the wait of `cuda_std::grid`; rust-cuda's `#[kernel]` and targets before sm_90 have none.
fn waits(ptx: &str) -> bool {
    ptx.matches("griddepcontrol.wait").count() >= ptx.matches(".entry ").count()
}

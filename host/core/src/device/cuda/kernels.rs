//! The kernels that the driver has compiled for this GPU, and their launches: the library's own
//! kernels, and those of other packages.
//!
//! PTX is split into parts of one kernel each, which the driver compiles in parallel.
//! `cuModuleLoadData` compiles one text at a time, whatever thread calls it. `cuLibraryLoadData`,
//! available since CUDA 12.0, compiles as many at a time as there are threads. The bindings are too
//! old for it, and for launches with attributes. The signatures here are those of cuda.h since
//! 12.0, and the types of a launch have its layout since 11.8.
//!
//! Invariants:
//!
//! - Each kernel is found only in its own package's PTX, so two packages may use the same kernel
//!   name.
//! - A part contains everything that its kernel names. PTX stays whole if kernels may share more
//!   than functions, or if it does not have the form that compilers write.
//! - `sm_90a` adds kernels to those of `sm_90`, and replaces none.
//! - A library lives as long as the functions taken from it.

use super::architectures::{archs, choose, wgmma};
use super::streams::{check, describe};
use crate::device::kernels::{Kernels, OWN};
use crate::error::{Error, Result, short};
use cuda_std::launch::{Entry, Grid, PackedMap, Words};
use cuda_std::tensor_map::BOX_BYTES;
use cust::sys::{self, CUfunction, CUresult};
use smallvec::SmallVec;
use std::collections::{HashMap, HashSet};
use std::ffi::{CStr, CString, c_char, c_void};
use std::ptr::null_mut;
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
    overlaps: bool,
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
    /// Compiles the library's kernels and `others` for the GPU called `name`, on all processors,
    /// with the kernels of warpgroups if `has_wgmma`.
    pub(super) fn load(capability: u32, name: &str, others: &[Kernels], has_wgmma: bool) -> Result<Self> {
        let absent = |reason: String| Error::NoDevice { wanted: "cuda", reason };
        let mut packages: HashMap<_, HashMap<_, _>> = HashMap::new();
        let mut work = Vec::new();
        // Each name appears once, which `DeviceBuilder::open` has checked.
        for Kernels { package, ptx } in [&[OWN], others].concat() {
            let (_, chosen) = choose(ptx, capability).ok_or_else(|| {
                absent(format!(
                    "{name} is sm_{capability}, and this build holds kernels of {package} for {}; build with \
                     STEPSCOPE_ARCHS=sm_{capability}",
                    archs(ptx)
                ))
            })?;
            packages.insert(package, HashMap::new());
            let mut compiled = parts(chosen);
            if let Some((_, more)) = wgmma(ptx).filter(|_| has_wgmma) {
                let known: HashSet<&str> = compiled.iter().flat_map(|part| part.kernels.iter().copied()).collect();
                compiled.extend(parts(more).into_iter().filter_map(|part| part.without(&known)));
            }
            work.extend(compiled.into_iter().map(|part| (package, part)));
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
        let Compiled { library, overlaps } = package.get(entry.name).map(|compiled| &**compiled).ok_or_else(|| {
            missing(if entry.is_warpgroup {
                "and needs wgmma, which this device was opened without"
            } else {
                "whose PTX has no such kernel; was it built from other sources?"
            })
        })?;
        let function = Function { name: library.function(entry.name)?, overlaps: *overlaps };
        allow_shared_bytes(function.name, entry)?;
        functions.insert(key, function);
        Ok(function)
    }
}

/// A package, the name of a kernel, and the library that contains it.
type Named<'a> = (&'a str, &'a str, Arc<Compiled>);

/// Compiles each package's parts, on as many threads as there are processors. Returns the
/// error of the part that failed first.
fn compile<'a>(work: &[(&'a str, PtxModule<'a>)]) -> std::result::Result<Vec<Named<'a>>, String> {
    let (next, done) = (AtomicUsize::new(0), Mutex::new(Ok(Vec::new())));
    let take = || {
        while let Some((package, PtxModule { kernels, ptx })) = work.get(next.fetch_add(1, Ordering::Relaxed)) {
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

/// Returns true if each kernel contains the wait of `cuda_std::grid`. Kernels of rust-cuda's
/// `#[kernel]` and for targets before sm_90 do not.
fn waits(ptx: &str) -> bool {
    ptx.matches("griddepcontrol.wait").count() >= ptx.matches(".entry ").count()
}

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
struct Library(*mut c_void);

// SAFETY: this is a library's handle, which belongs to no thread or context, and the driver's calls
// on it are thread-safe.
unsafe impl Send for Library {}
// SAFETY: as above.
unsafe impl Sync for Library {}

impl Library {
    /// Compiles PTX, or finds it in the driver's cache. The error is the compiler's message.
    fn compile(ptx: &str) -> std::result::Result<Self, String> {
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
        let log = CStr::from_bytes_until_nul(&log).unwrap_or_default().to_string_lossy();
        Err(format!("{} {}", describe(result), short(log.trim())).trim_end().to_owned())
    }

    /// Returns the kernel of this name, which must be in its PTX, for the current context.
    fn function(&self, name: &str) -> Result<CUfunction> {
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

unsafe extern "C" {
    fn cuTensorMapEncodeTiled(
        map: *mut EncodedMap,
        data_type: u32,
        rank: u32,
        address: *mut c_void,
        extents: *const u64,
        strides: *const u64,
        box_extents: *const u32,
        element_strides: *const u32,
        interleave: u32,
        swizzle: u32,
        promotion: u32,
        fill: u32,
    ) -> CUresult;
    fn cuLaunchKernelEx(
        config: *const LaunchConfig,
        function: CUfunction,
        parameters: *mut *mut c_void,
        extra: *mut *mut c_void,
    ) -> CUresult;
}

/// `CUlaunchConfig`.
#[repr(C)]
struct LaunchConfig {
    grid: [u32; 3],
    block: [u32; 3],
    shared_bytes: u32,
    stream: sys::CUstream,
    attributes: *mut LaunchAttribute,
    attributes_len: u32,
}

/// `CUlaunchAttribute`: an identifying number, and 64 bytes for any value.
#[repr(C, align(8))]
struct LaunchAttribute {
    id: u32,
    padding: u32,
    value: [u32; 16],
}

impl LaunchAttribute {
    /// `CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION`, enabled.
    const OVERLAP: Self = {
        let mut value = [0; 16];
        value[0] = 1;
        Self { id: 6, padding: 0, value }
    };
}

static_assertions::const_assert_eq!(size_of::<LaunchConfig>(), 56);
static_assertions::const_assert_eq!(size_of::<LaunchAttribute>(), 72);

/// `CUtensorMap`: what the copy engine reads.
#[repr(C, align(64))]
struct EncodedMap([u64; 16]);

static_assertions::const_assert_eq!(size_of::<EncodedMap>(), 128);

impl EncodedMap {
    /// Encodes a map of BF16, or of f32 that is rounded to TF32. Its boxes have rows of 128 bytes,
    /// in chunks of 16 bytes that are swizzled by the row.
    fn new(map: &PackedMap) -> Result<Self> {
        // `CU_TENSOR_MAP_DATA_TYPE_UINT16` and `_TFLOAT32`, `_SWIZZLE_128B` and
        // `_L2_PROMOTION_L2_256B`.
        const UINT16: u32 = 1;
        const TFLOAT32: u32 = 11;
        const SWIZZLE: u32 = 3;
        const PROMOTION: u32 = 3;
        let (data_type, columns) = match map.element_bytes {
            2 => (UINT16, BOX_BYTES / 2),
            4 => (TFLOAT32, BOX_BYTES / 4),
            bytes => unreachable!("a tensor map of elements of {bytes} bytes"),
        };
        let [elements, rows, matrices] = map.extents;
        let bytes = |stride: usize| (stride * map.element_bytes) as u64;
        // The driver demands extents and strides, also those that are not used.
        let row = if rows > 1 { bytes(map.strides[0]) } else { 16 };
        let strides = [row, if matrices > 1 { bytes(map.strides[1]) } else { row }];
        let mut encoded = Self([0; 16]);
        // SAFETY: the driver reads the arrays, of the rank's lengths, and writes the map before the
        // call returns.
        let result = unsafe {
            cuTensorMapEncodeTiled(
                &mut encoded,
                data_type,
                3,
                map.address as *mut c_void,
                [elements, rows, matrices].map(|extent| u64::from(extent.max(1))).as_ptr(),
                strides.as_ptr(),
                [columns, map.box_rows, 1].as_ptr(),
                [1; 3].as_ptr(),
                0,
                SWIZZLE,
                PROMOTION,
                0,
            )
        };
        check("cuTensorMapEncodeTiled", result)?;
        Ok(encoded)
    }
}

/// Queues a kernel.
///
/// # Safety
/// The requirements of `Driver::launch`. The function belongs to the entry, and the stream is
/// alive.
pub(super) unsafe fn launch(
    function: Function,
    entry: &Entry,
    grid: Grid,
    words: &Words,
    stream: sys::CUstream,
) -> Result<()> {
    // A parameter is read from the start of its word, because the host is little-endian.
    const { assert!(cfg!(target_endian = "little")) };
    let maps = words.maps().iter().map(EncodedMap::new).collect::<Result<SmallVec<[_; 4]>>>()?;
    // A parameter is read from the address of its first word, and a tensor map from its encoding.
    // The pointer is to all words, so that it may be read past the first.
    let first = words.as_slice().as_ptr();
    let parameter = |at: usize| -> *mut c_void {
        match words.maps().iter().position(|map| map.word == at) {
            Some(map) => std::ptr::from_ref(&maps[map]).cast_mut().cast(),
            None => first.wrapping_add(at).cast_mut().cast(),
        }
    };
    let mut parameters: SmallVec<[*mut c_void; 16]> =
        (0..words.as_slice().len()).filter(|&at| !words.continues(at)).map(parameter).collect();
    let mut attributes = [LaunchAttribute::OVERLAP];
    let config = LaunchConfig {
        grid: [grid.x, grid.y, grid.z],
        block: [entry.block, 1, 1],
        shared_bytes: entry.shared_bytes,
        stream,
        attributes: attributes.as_mut_ptr(),
        // Only kernels that wait for their predecessor may start early.
        attributes_len: u32::from(function.overlaps),
    };
    // SAFETY: the words are this entry's parameters, in order, as `Kernel::pack` wrote them, with
    // encoded maps. The driver reads them, the configuration and its attributes before the call
    // returns.
    let result = unsafe { cuLaunchKernelEx(&config, function.name, parameters.as_mut_ptr(), std::ptr::null_mut()) };
    check("cuLaunchKernelEx", result)
}

/// The start of a kernel as compilers write it, at the start of a line.
const ENTRY: &str = ".visible .entry ";
/// Items that kernels would share: variables, and debug sections, which name the addresses of all
/// kernels. The last entry detects a kernel that begins differently.
const SHARED: [&str; 4] = [".global ", ".const ", ".section", ".entry "];

/// The beginning of the names that rustc gives to constant tables. No kernel can write them, so
/// each part has its own copy.
const TABLE: &str = " anon_$_";

/// PTX, and the names of the kernels in it: one, or all.
#[derive(Debug)]
struct PtxModule<'a> {
    kernels: Vec<&'a str>,
    ptx: String,
}

impl PtxModule<'_> {
    /// Returns the part without the kernels in `known`, or none if it has no other.
    fn without(mut self, known: &HashSet<&str>) -> Option<Self> {
        self.kernels.retain(|kernel| !known.contains(kernel));
        (!self.kernels.is_empty()).then_some(self)
    }
}

/// Splits a text into parts, the longest first.
fn parts(ptx: &str) -> Vec<PtxModule<'_>> {
    let (mut common, mut kernels) = (String::new(), Vec::new());
    let mut rest = ptx;
    while let Some(start) = line_that_begins(rest, ENTRY) {
        let Some(end) = end_of_body(&rest[start..]) else { break };
        let (before, kernel) = (&rest[..start], &rest[start..=start + end]);
        common.push_str(before);
        // Later text may use what is declared so far, and later declarations may use it.
        kernels.push((common.len(), kernel));
        rest = &rest[start + end + 1..];
    }
    common.push_str(rest);
    let mut code = common.lines().filter(|line| !line.starts_with("//") && !line.contains(TABLE));
    if code.any(|line| SHARED.iter().any(|kind| line.contains(kind))) {
        return vec![PtxModule { kernels: names(ptx), ptx: ptx.to_owned() }];
    }
    let part = |(at, kernel): (usize, _)| PtxModule {
        kernels: names(kernel),
        ptx: [&common[..at], kernel, &common[at..]].concat(),
    };
    let mut parts: Vec<PtxModule<'_>> = kernels.into_iter().map(part).collect();
    parts.sort_by_key(|part| std::cmp::Reverse(part.ptx.len()));
    parts
}

/// Returns the position of the brace that closes the first body.
fn end_of_body(ptx: &str) -> Option<usize> {
    let mut depth = 0;
    ptx.find(|letter| {
        depth += i32::from(letter == '{') - i32::from(letter == '}');
        letter == '}' && depth == 0
    })
}

/// Returns the names of the kernels in a text.
fn names(ptx: &str) -> Vec<&str> {
    let ends = |letter: char| letter == '(' || letter.is_whitespace();
    ptx.split(".entry ").skip(1).filter_map(|text| text.split(ends).next()).collect()
}

/// Returns the offset of the first line that begins with `with`.
fn line_that_begins(text: &str, with: &str) -> Option<usize> {
    if text.starts_with(with) {
        return Some(0);
    }
    text.find(&format!("\n{with}")).map(|at| at + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TWO: &str = ".version 7.8\n.func f\n;\n.visible .entry a(\n\t.param .u64 p\n)\n{\n\t{\n}\n\tret;\n}\n\n.visible .entry longer()\n{\n\tcall f;\n\tret;\n}\n\
                       .func f()\n{\n\tret;\n}\n";

    #[test]
    fn each_part_includes_shared_code() {
        let parts = parts(TWO);
        let text = |name: &str| &parts.iter().find(|part| part.kernels == [name]).expect("a part").ptx;
        assert_eq!(parts.len(), 2);
        assert_eq!(
            *text("a"),
            ".version 7.8\n.func f\n;\n.visible .entry a(\n\t.param .u64 p\n)\n{\n\t{\n}\n\tret;\n}\n\n\n.func f()\n{\n\tret;\n}\n"
        );
        assert!(text("longer").contains("call f;") && !text("longer").contains(".entry a("));
        assert!(parts[0].ptx.len() >= parts[1].ptx.len());
    }

    #[test]
    fn shared_variables_stay_whole() {
        for variable in [".global .align 4 .u32 counter;\n", ".visible .const .b8 table[4] = {1, 2, 3, 4};\n"] {
            stays_whole(&TWO.replace(".func f\n;\n", variable));
        }
    }

    #[test]
    fn each_part_includes_constant_tables() {
        let table = ".global .align 4 .b8 anon_$_1_$_2[4] = {1, 2, 3, 4};\n";
        let text = TWO.replace(".func f\n;\n", table);
        let parts = parts(&text);
        assert_eq!(parts.iter().map(|part| part.ptx.matches(table).count()).collect::<Vec<_>>(), [1, 1]);
    }

    #[test]
    fn unknown_formats_stay_whole() {
        stays_whole(&TWO.replace(".visible .entry longer", ".weak .entry longer"));
        stays_whole(&TWO.replace(".visible .entry longer", "\t.visible .entry longer"));
        stays_whole(&TWO.replace(".visible .entry", ".entry"));
        stays_whole(&format!("{TWO}\t.section .debug_info\n\t{{\n.b64 a\n\t}}\n"));
    }

    #[test]
    fn second_ptx_only_adds_kernels() {
        let known = HashSet::from(["a"]);
        let added: Vec<_> = parts(TWO).into_iter().filter_map(|part| part.without(&known)).collect();
        assert_eq!(added.iter().map(|part| &part.kernels[..]).collect::<Vec<_>>(), [["longer"]]);
    }

    fn stays_whole(ptx: &str) {
        let parts = parts(ptx);
        assert_eq!((parts.len(), &*parts[0].ptx, &parts[0].kernels[..]), (1, ptx, &["a", "longer"][..]));
    }

    #[cfg(feature = "cuda")]
    #[test]
    fn library_has_one_part_per_kernel() {
        for (_, ptx) in crate::device::kernels::OWN.ptx {
            let parts = parts(ptx);
            assert_eq!(parts.len(), ptx.matches(".entry ").count());
            for PtxModule { kernels, ptx } in &parts {
                assert_eq!((kernels.len(), ptx.matches(".entry ").count()), (1, 1), "{kernels:?}");
                assert_eq!(ptx.matches('{').count(), ptx.matches('}').count(), "{kernels:?}");
                assert!(ptx.contains(&format!(".entry {}(", kernels[0])) && ptx.contains(".version "), "{kernels:?}");
            }
        }
    }
}

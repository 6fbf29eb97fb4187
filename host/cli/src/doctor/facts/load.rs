//! The first GPU under three seconds of load: one second each of copies, BF16 matrix products, and
//! training steps. The emulator is never loaded.

use super::training::{Training, predicted_ms};
use nvml_wrapper::Nvml;
use nvml_wrapper::bitmasks::device::ThrottleReasons;
use nvml_wrapper::enum_wrappers::device::Clock;
use serde::{Deserialize, Serialize};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};
use stepscope::check::same_bits::{self, CaseSize};
use stepscope::device::SelfTest;
use stepscope::{Arena, Buffer, Capacity, Device, DeviceKind, EagerStep, Result, bf16, ops};

#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Load {
    /// True if this program was built with feature `cuda`.
    pub built_for_gpu: Option<bool>,
    /// The architectures of its PTX.
    pub ptx: Vec<String>,
    /// The reason why the device did not open, or failed under load.
    pub error: Option<String>,
    pub opened: bool,
    pub capability: Option<u32>,
    /// The instruction by which matrices are multiplied.
    pub matrix_instruction: Option<String>,
    pub driver: Option<String>,
    pub integrated: Option<bool>,
    pub driver_free_bytes: Option<u64>,
    pub driver_total_bytes: Option<u64>,
    /// The kernels that were run, with true if their bits are the committed ones.
    pub same_bits: Vec<(String, bool)>,
    /// The rate of page-locking, from the difference between the first upload, which locks two
    /// slots of 64 MiB, and the second.
    pub page_locking_gb_per_s: Option<f64>,
    pub upload_gb_per_s: Option<f64>,
    /// Bytes read plus bytes written.
    pub copy_gb_per_s: Option<f64>,
    pub bf16_tflop_per_s: Option<f64>,
    /// The measured time of a CrossAsset training step, and the prediction of `predict`; none for a
    /// GPU that it does not model.
    pub step_ms: Option<f64>,
    pub predicted_step_ms: Option<f64>,
    /// The highest clock under load, and the GPU's maximum.
    pub sm_clock_mhz: Option<u32>,
    pub sm_clock_max_mhz: Option<u32>,
    /// The lowest power state seen; 0 is full power.
    pub power_state: Option<u32>,
    pub power_watts: Option<f64>,
    /// The reasons for reduced clocks, in NVML's names.
    pub throttled_by: Vec<String>,
}

/// Opening compiles the kernels unless the driver has cached them.
const OPENING: Duration = Duration::from_secs(30);
const DEADLINE: Duration = Duration::from_secs(8);
const SECOND: Duration = Duration::from_secs(1);
const MIB: usize = 1 << 20;
/// The size of each copy buffer, larger than any cache.
const COPIED_BYTES: usize = 256 * MIB;
const UPLOADED_BYTES: usize = 128 * MIB;
/// Rows and columns of the matrices.
const N: usize = 4096;
/// The number of `same_bits` cases that run here. `stepscope check` runs all.
const KERNELS: usize = 3;

impl Load {
    pub(crate) fn gather() -> std::result::Result<Self, String> {
        let ptx = stepscope::device::ptx_builds().iter().map(|build| build.arch.into()).collect();
        let mut found = Self { built_for_gpu: Some(cfg!(feature = "cuda")), ptx, ..Self::default() };
        if cfg!(feature = "cuda")
            && let Err(error) = found.measure()
        {
            found.error = Some(error.to_string());
        }
        Ok(found)
    }

    fn measure(&mut self) -> Result<()> {
        let device = Device::builder(DeviceKind::Cuda).self_test(SelfTest::Never).deadline(OPENING).open()?;
        let description = device.description();
        self.opened = true;
        self.capability = description.capability;
        self.matrix_instruction = Some(description.matrix_instruction().to_string());
        self.driver.clone_from(&description.driver);
        self.integrated = Some(description.integrated);
        let mut arena = Arena::builder(&device).capacity(Capacity::mib(640)).step_deadline(DEADLINE).build()?;
        let memory = arena.report().memory;
        self.driver_free_bytes = memory.device_free_bytes;
        self.driver_total_bytes = memory.device_total_bytes;
        self.upload(&device)?;
        for (name, case) in same_bits::cases().into_iter().take(KERNELS) {
            let line = same_bits::line(name, &same_bits::run(&device, &case, CaseSize::Smallest)?);
            // This line has only one kernel, so its verdict is the first; the others report
            // missing.
            let golden = CaseSize::Smallest.golden();
            let equal = same_bits::compare(&line, golden).first().is_some_and(same_bits::Verdict::equal);
            self.same_bits.push((name.into(), equal));
        }
        let over = AtomicBool::new(false);
        thread::scope(|scope| {
            let watch = scope.spawn(|| watch(&over));
            let loaded = self
                .copy(&device, &mut arena)
                .and_then(|()| self.multiply(&device, &mut arena))
                .and_then(|()| self.train(&device, &mut arena));
            over.store(true, Ordering::Relaxed);
            if let Ok(Some(seen)) = watch.join() {
                self.sm_clock_mhz = seen.sm_clock_mhz;
                self.sm_clock_max_mhz = seen.sm_clock_max_mhz;
                self.power_state = seen.power_state;
                self.power_watts = seen.power_watts;
                self.throttled_by = seen.throttled_by;
            }
            loaded
        })
    }

    fn upload(&mut self, device: &Device) -> Result<()> {
        let values = vec![1.0_f32; UPLOADED_BYTES / 4];
        let mut buffer = Buffer::<f32>::zeros(device, values.len())?;
        device.synchronize(DEADLINE)?;
        let mut time = || -> Result<f64> {
            let start = Instant::now();
            buffer.write(0, &values)?;
            device.synchronize(DEADLINE)?;
            Ok(start.elapsed().as_secs_f64())
        };
        let (first, second) = (time()?, time()?);
        self.upload_gb_per_s = Some(UPLOADED_BYTES as f64 / second / 1e9);
        // A difference below one millisecond is noise.
        self.page_locking_gb_per_s = (first - second > 1e-3).then(|| UPLOADED_BYTES as f64 / (first - second) / 1e9);
        Ok(())
    }

    fn copy(&mut self, device: &Device, arena: &mut Arena) -> Result<()> {
        let length = COPIED_BYTES / 4;
        let (from, mut to) = (Buffer::<f32>::zeros(device, length)?, Buffer::<f32>::zeros(device, length)?);
        let per_second = repeat(device, arena, 4, |step| {
            ops::copy_into(step, &step.lend(&from, [length])?, &mut step.lend_mut(&mut to, [length])?)
        })?;
        self.copy_gb_per_s = Some(2.0 * COPIED_BYTES as f64 * per_second / 1e9);
        Ok(())
    }

    fn multiply(&mut self, device: &Device, arena: &mut Arena) -> Result<()> {
        let (mut a, mut b) = (Buffer::<bf16>::zeros(device, N * N)?, Buffer::<bf16>::zeros(device, N * N)?);
        arena.step(|step| {
            ops::fill_into(step, &mut step.lend_mut(&mut a, [N, N])?, 0.37)?;
            ops::fill_into(step, &mut step.lend_mut(&mut b, [N, N])?, -1.6)
        })?;
        let per_second = repeat(device, arena, 8, |step| {
            ops::matmul(step, &step.lend(&a, [N, N])?, &step.lend(&b, [N, N])?).map(drop)
        })?;
        self.bf16_tflop_per_s = Some(2.0 * (N as f64).powi(3) * per_second / 1e12);
        Ok(())
    }

    fn train(&mut self, device: &Device, arena: &mut Arena) -> Result<()> {
        let mut training = Training::new(device)?;
        self.step_ms = Some(1e3 / repeat(device, arena, 10, |step| training.step(step))?);
        self.predicted_step_ms = predicted_ms(&device.description().name)?;
        Ok(())
    }
}

/// Returns how often per second `run` is done: steps run for a second, `count` between
/// synchronizations, after a warm-up.
fn repeat(
    device: &Device,
    arena: &mut Arena,
    count: usize,
    mut run: impl for<'s> FnMut(&mut EagerStep<'s>) -> Result<()>,
) -> Result<f64> {
    let mut step = || -> Result<()> {
        (0..count).try_for_each(|_| arena.step(&mut run))?;
        device.synchronize(DEADLINE)
    };
    step()?;
    let (start, mut done) = (Instant::now(), 0);
    while start.elapsed() < SECOND {
        step()?;
        done += count;
    }
    Ok(done as f64 / start.elapsed().as_secs_f64())
}

/// Samples NVML until `over`; none without NVML.
fn watch(over: &AtomicBool) -> Option<Load> {
    let nvml = Nvml::builder().lib_path("libnvidia-ml.so.1".as_ref()).init().ok()?;
    let device = nvml.device_by_index(0).ok()?;
    let mut seen = Load { sm_clock_max_mhz: device.max_clock_info(Clock::SM).ok(), ..Load::default() };
    let mut reasons = ThrottleReasons::empty();
    // Clocks rise within the first tenths of a second.
    thread::sleep(Duration::from_millis(300));
    while !over.load(Ordering::Relaxed) {
        seen.sm_clock_mhz = seen.sm_clock_mhz.max(device.clock_info(Clock::SM).ok());
        seen.power_watts = device
            .power_usage()
            .ok()
            .map(|mw| f64::from(mw) / 1e3)
            .into_iter()
            .chain(seen.power_watts)
            .reduce(f64::max);
        let state = device.performance_state().ok().map(|state| state.as_c()).filter(|&state| state < 16);
        seen.power_state = state.into_iter().chain(seen.power_state).min();
        reasons |= device.current_throttle_reasons().unwrap_or(ThrottleReasons::empty());
        thread::sleep(Duration::from_millis(50));
    }
    seen.throttled_by = reasons.iter_names().map(|(name, _)| name.into()).collect();
    Some(seen)
}

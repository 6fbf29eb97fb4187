//! Checks of the GPU, its driver and its rates.

use super::{Finding, is_gb10, stops, unknown, warning, well};
use crate::doctor::facts::Facts;
use stepscope_predict::Gpu;

/// The share of a GB10's known rate below which something is wrong.
const SHARE: f64 = 0.85;
/// The share for the predicted step time, which may itself be wrong: docs/predict.md.
const SHARE_OF_STEP: f64 = 0.8;
/// The first CUDA version that supports `sm_121`.
const CUDA_OF_GB10: i32 = 12_090;
const POWER: &str = "a GB10 can be stuck in a low power state, three times slower, and shows nothing";
const PULL_THE_PLUG: &str = "end other programs and run the doctor again; if it stays, pull the power plug for a minute: a reboot is not enough";

/// Explains why there are no facts about the GPU under load.
fn not_loaded(facts: &Facts) -> Finding {
    let load = &facts.load;
    match (&load.error, load.built_for_gpu) {
        (Some(error), _) => unknown(error),
        (None, Some(false)) => unknown("this program was built without feature `cuda`"),
        (None, Some(true)) => unknown("the driver or NVML did not report it"),
        (None, None) => unknown(facts.why_unknown("load")),
    }
}

pub(super) fn driver(facts: &Facts) -> Finding {
    let gpu = &facts.gpu;
    match (&gpu.name, &gpu.driver, &gpu.nvml_error) {
        (Some(name), Some(driver), _) => well(format!("{name}, driver {driver}")),
        (_, _, Some(error)) if gpu.in_system == Some(true) => stops(
            format!("the system has an NVIDIA driver, but NVML reports: {error}"),
            "no program can use the GPU",
            "reboot if the driver was just updated; in a container, start it with `--gpus all`",
        ),
        (_, _, Some(error)) => unknown(format!("there is no NVIDIA GPU here ({error})")),
        _ => unknown(facts.why_unknown("gpu")),
    }
}

pub(super) fn build(facts: &Facts) -> Finding {
    match (facts.load.built_for_gpu, &facts.gpu.name) {
        (Some(false), Some(name)) => warning(
            format!("this program was built without feature `cuda`, but there is a GPU: {name}"),
            "such a build trains on the CPU",
            "build with `--features cuda`",
        ),
        (Some(true), _) => well("built with feature `cuda`"),
        _ => not_loaded(facts),
    }
}

pub(super) fn cuda_version(facts: &Facts) -> Finding {
    let Some(cuda) = facts.gpu.cuda else { return unknown("NVML did not report it") };
    let what = format!("the driver has CUDA {}.{}", cuda / 1000, cuda % 1000 / 10);
    if is_gb10(facts) && cuda < CUDA_OF_GB10 {
        return stops(what, "CUDA before 12.9 does not support sm_121", "update the driver");
    }
    well(what)
}

pub(super) fn ptx(facts: &Facts) -> Finding {
    let (Some(capability), false) = (facts.gpu.capability.or(facts.load.capability), facts.load.ptx.is_empty()) else {
        return not_loaded(facts);
    };
    let ptx = &facts.load.ptx;
    let multiplies = facts.load.matrix_instruction.as_ref();
    let multiplies = multiplies.map_or_else(String::new, |instruction| format!(", multiplies by {instruction}"));
    let what = format!("PTX for {}; the GPU is sm_{capability}{multiplies}", ptx.join(", "));
    let own = format!("sm_{capability}");
    let todo = format!("build with STEPSCOPE_ARCHS={own}");
    // Without a suffix: PTX for sm_90a has only some of the kernels.
    let number = |arch: &String| arch.strip_prefix("sm_")?.parse::<u32>().ok();
    if ptx.iter().filter_map(number).all(|arch| arch > capability) {
        return stops(what, "PTX runs on its own architecture and on later ones", &todo);
    }
    if is_gb10(facts) && !ptx.contains(&own) {
        return warning(what, "kernels for an older GPU run, but not those tuned for this one", &todo);
    }
    if capability == 90 && !ptx.iter().any(|arch| arch == "sm_90a") {
        let why = "matrix multiplies and attention run without wgmma, this GPU's fastest instruction";
        return warning(what, why, "build with STEPSCOPE_ARCHS=sm_90,sm_90a");
    }
    well(what)
}

pub(super) fn ptx_cache(facts: &Facts) -> Finding {
    let folder = facts.gpu.cache_folder.as_deref().unwrap_or("no folder");
    let why = "the driver compiles every kernel again at each start, which takes seconds";
    match facts.gpu.cache_writable {
        _ if facts.gpu.cache_disabled => warning("CUDA_CACHE_DISABLE is set", why, "unset it"),
        Some(false) => warning(format!("{folder} is not writable"), why, "set CUDA_CACHE_PATH to a folder of your own"),
        Some(true) => well(format!("{folder} is writable")),
        None => unknown("neither HOME nor CUDA_CACHE_PATH is set"),
    }
}

/// Returns the error if CUDA finds no device although NVML answers.
fn no_device(facts: &Facts) -> Option<&str> {
    let error = facts.load.error.as_deref().filter(|_| facts.gpu.name.is_some() && !facts.load.opened)?;
    // The driver's name of error 100, and this library's.
    let is_absent = ["CUDA_ERROR_NO_DEVICE", "NoDevice", "error 100"].iter().any(|name| error.contains(name));
    (error.contains("cuInit") && is_absent).then_some(error)
}

pub(super) fn found(facts: &Facts) -> Finding {
    let name = facts.gpu.name.as_deref().unwrap_or("a GPU");
    match (no_device(facts), facts.gpu.visible_devices.as_deref()) {
        (Some(_), Some(visible)) => stops(
            format!("NVML reports {name}, but cuInit finds no device, and CUDA_VISIBLE_DEVICES is `{visible}`"),
            "CUDA hides each GPU that the variable does not list",
            "unset CUDA_VISIBLE_DEVICES, or set it to 0; if cuInit still finds no device, reboot",
        ),
        (Some(_), None) => stops(
            format!("NVML reports {name}, but cuInit finds no device (error 100)"),
            "the GPU's compute engine is dead, while its driver still answers: no program can compute until it is reset",
            "reboot; if it stays, pull the power plug for a minute; in a container, first run the doctor outside it",
        ),
        (None, _) if facts.load.opened => well(format!("CUDA finds {name}, as NVML does")),
        (None, _) => not_loaded(facts),
    }
}

pub(super) fn opens(facts: &Facts) -> Finding {
    if no_device(facts).is_some() {
        return unknown("cuInit finds no device: see gpu_found");
    }
    match &facts.load.error {
        Some(error) if facts.gpu.name.is_some() || facts.gpu.in_system == Some(true) => {
            let at = if facts.load.opened { "the device failed under load" } else { "the device did not open" };
            stops(
                format!("{at}: {error}"),
                "training would end the same way",
                "follow the error's advice; see docs/memory.md",
            )
        }
        // The whole load got no answer, so the driver hangs.
        None if facts.unread.contains_key("load") && facts.gpu.name.is_some() => stops(
            format!("the load: {}", facts.why_unknown("load")),
            "the driver hangs, or it still compiles the kernels, as on the first run",
            "run the doctor again; if that does not help, check the kernel log (`dmesg`), and reboot",
        ),
        None if facts.load.opened => {
            well(format!("opened, {}", facts.load.driver.as_deref().unwrap_or("driver unknown")))
        }
        _ => not_loaded(facts),
    }
}

pub(super) fn integrated(facts: &Facts) -> Finding {
    match facts.load.integrated {
        None => not_loaded(facts),
        Some(false) if is_gb10(facts) => warning(
            "the driver reports that this GB10 has separate memory",
            "page cache would not count as available, so admission would refuse too much",
            "update the driver, and report the problem",
        ),
        Some(true) => well("CPU and GPU share one memory"),
        Some(false) => well("the GPU has its own memory"),
    }
}

pub(super) fn same_bits(facts: &Facts) -> Finding {
    let kernels = &facts.load.same_bits;
    let wrong: Vec<_> = kernels.iter().filter(|(_, same)| !same).map(|(name, _)| name.as_str()).collect();
    match kernels.len() {
        0 => not_loaded(facts),
        _ if !wrong.is_empty() => stops(
            format!("bits differ from the committed ones: {}", wrong.join(", ")),
            "a compiler or a GPU computes wrongly; rounding cannot cause this",
            "run `stepscope check`, and send its whole output",
        ),
        count => well(format!("{count} kernels give the committed bits")),
    }
}

pub(super) fn page_locking(facts: &Facts) -> Finding {
    let Some(rate) = facts.load.page_locking_gb_per_s else {
        return match facts.load.upload_gb_per_s {
            Some(upload) => well(format!("too fast to measure; uploads {upload:.1} GB/s")),
            None => not_loaded(facts),
        };
    };
    let what = format!("page-locking {rate:.1} GB/s, uploads {:.1} GB/s", facts.load.upload_gb_per_s.unwrap_or(0.0));
    if rate < 0.25 {
        return warning(
            what,
            "the kernel must free memory to lock pages: memory is short or fragmented",
            "end other programs; check Dirty and swap",
        );
    }
    well(what)
}

fn known_rate(facts: &Facts, rate: Option<f64>, good: f64, unit: &str) -> Finding {
    let Some(rate) = rate else { return not_loaded(facts) };
    if is_gb10(facts) && (rate.is_nan() || rate < SHARE * good) {
        return warning(format!("{rate:.1} {unit}; a GB10 reaches {good:.0}"), POWER, PULL_THE_PLUG);
    }
    well(format!("{rate:.1} {unit}"))
}

pub(super) fn copy_rate(facts: &Facts) -> Finding {
    known_rate(facts, facts.load.copy_gb_per_s, Gpu::GB10.copy, "GB/s copied")
}

pub(super) fn bf16_rate(facts: &Facts) -> Finding {
    const GB10: Gpu = Gpu::GB10;
    let good = GB10.bf16_per_cycle * GB10.clock * f64::from(GB10.processors) / 1e3;
    known_rate(facts, facts.load.bf16_tflop_per_s, good, "TFLOP/s in BF16")
}

pub(super) fn step_time(facts: &Facts) -> Finding {
    let Some(step) = facts.load.step_ms else { return not_loaded(facts) };
    let what = format!("a training step of CrossAsset takes {step:.2} ms");
    let Some(predicted) = facts.load.predicted_step_ms else {
        return well(format!("{what}; `predict` does not model this GPU"));
    };
    let what = format!("{what}, {predicted:.2} predicted");
    if step.is_nan() || step * SHARE_OF_STEP > predicted {
        return warning(
            what,
            "the machine is slower than it should be, or docs/predict.md is wrong about this GPU",
            "follow the advice of copy_rate, bf16_rate and clock; if they are well, send a report: docs/platforms.md",
        );
    }
    well(what)
}

pub(super) fn clock(facts: &Facts) -> Finding {
    let (Some(clock), Some(most)) = (facts.load.sm_clock_mhz, facts.load.sm_clock_max_mhz) else {
        return not_loaded(facts);
    };
    let what = format!("{clock} of {most} MHz under load");
    if clock < most / 2 { warning(what, POWER, PULL_THE_PLUG) } else { well(what) }
}

pub(super) fn power_state(facts: &Facts) -> Finding {
    let Some(state) = facts.load.power_state else { return not_loaded(facts) };
    let watts = facts.load.power_watts.map_or_else(String::new, |watts| format!(", {watts:.0} W"));
    let what = format!("P{state} under load{watts}");
    if state > 2 { warning(what, POWER, PULL_THE_PLUG) } else { well(what) }
}

pub(super) fn throttling(facts: &Facts) -> Finding {
    if facts.load.sm_clock_mhz.is_none() {
        return not_loaded(facts);
    }
    let slowed = |name: &&String| name.contains("SLOWDOWN");
    match facts.load.throttled_by.iter().find(slowed) {
        Some(reason) => warning(
            format!("clocks were reduced: {reason}"),
            "the GPU is too hot, or its power supply is at its limit",
            "improve the cooling, and use the power supply that came with it",
        ),
        None if facts.load.throttled_by.is_empty() => well("nothing reduced the clocks"),
        None => well(format!("no slowdown; clocks limited by {}", facts.load.throttled_by.join(", "))),
    }
}

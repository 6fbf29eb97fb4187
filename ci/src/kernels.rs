//! The kernels' PTX: the rules of [`crate::ptx_rules`], the same bytes everywhere, and the path
//! through rust-cuda.

use std::fs;
use std::path::Path;

use crate::ptx_rules::{judge, listed, print_table, real_plants};
use crate::tools::{EVERY_FEATURE, Outcome, Tools, at, is_quick, output, read, refused, run, say, scratch, write};

/// Compiles the kernels (for sm_121, sm_90 and sm_90a, or the given architectures), assembles them
/// with ptxas, and prints registers, shared memory, stack and spills of each. Fails if code could
/// give different bits on another device, spills, or lacks a kernel of the source.
///
/// Also compiles the first architecture from a copy of the sources in another folder, with a
/// compiler that reports another host. The bytes must be the same. `crossasset --version` must
/// print the digests.
pub(crate) fn ptx(arguments: &[String]) -> Outcome {
    let mut archs: Vec<&str> = arguments.iter().map(String::as_str).collect();
    if archs.is_empty() {
        archs = vec!["sm_121", "sm_90", "sm_90a"]; // the same as build.rs
    }
    let tools =
        Tools::install(&["device_compiler", "nvidia_packages", "cuda_stub", "cuda_stub_at_run_time", "kernel_list"])?;
    let folder = tools.target().join("ptx");
    // Fails if it is not there.
    let _ = fs::remove_dir_all(&folder);
    let emit = "cargo run --quiet -p stepscope-cuda-builder --example emit_ptx -- device";
    let paths = [&folder, &tools.target().join("cuda-builder")];
    let emitted = output(tools.command(emit).args(paths).args(&archs))?;
    check_rules(&tools, &folder, &archs)?;

    say("the same bytes from another folder and another host");
    let first = format!("{}.ptx", archs[0]);
    let again = tools.target().join("ptx again/in another folder");
    let same = |path: &Path| {
        let is_same = at(path, fs::read(path))? == at(&first, fs::read(folder.join(&first)))?;
        if is_same { Ok(()) } else { Err(format!("{} differs: it depends on the folder or host", path.display())) }
    };
    write(again.join("planted.ptx"), read(folder.join(&first))? + " ")?;
    refused("a difference of one byte", "differs", same(&again.join("planted.ptx")))?;
    let compiler = emitted.lines().find_map(|line| Some(line.split_once("\tby ")?.1));
    let compiler = compiler.ok_or_else(|| format!("{emitted}emit_ptx names no compiler"))?;
    let host =
        if std::env::consts::ARCH == "aarch64" { "x86_64-unknown-linux-gnu" } else { "aarch64-unknown-linux-gnu" };
    let wrapper = format!(
        "#!/bin/sh\ncase \"$*\" in\n*-vV*) \"{compiler}\" \"$@\" | sed 's/^host: .*/host: {host}/' ;;\n*) exec \"{compiler}\" \"$@\" ;;\nesac\n"
    );
    write(again.join("rustc"), wrapper)?;
    run(tools.command("chmod +x").arg(again.join("rustc")))?;
    tools.copy_sources(&again.join("sources"))?;
    let other = tools.within(again.join("sources")).with("STEPSCOPE_DEVICE_RUSTC", again.join("rustc"));
    let mut command = other.command(tools.target().join("debug/examples/emit_ptx").display().to_string());
    run(command.arg("device").args([again.join("ptx"), again.join("target")]).arg(archs[0]))?;
    same(&again.join("ptx").join(&first))?;

    say("digests");
    let files: Vec<String> = archs.iter().map(|arch| format!("{arch}.ptx")).collect();
    let digests = output(tools.within(&folder).command("sha256sum").args(files))?;
    print!("{digests}");
    let tools = if arguments.is_empty() { tools } else { tools.with("STEPSCOPE_ARCHS", archs.join(",")) };
    // The same examples that `oracle` builds.
    tools.run(format!("cargo build --quiet --features {EVERY_FEATURE} --example crossasset --example trace_ops"))?;
    let version = tools.output(format!("{} --version", tools.target().join("debug/examples/crossasset").display()))?;
    for (arch, line) in archs.iter().zip(digests.lines()) {
        let wanted = format!("PTX {arch} {} by rustc", line.split(' ').next().unwrap_or_default());
        if !version.lines().any(|line| line == wanted) {
            return Err(format!("{version}crossasset --version does not print: {wanted}"));
        }
    }
    Ok(())
}

/// Checks the PTX of a folder against the rules and the library's list of kernels, after PTX that
/// ptxas reports.
fn check_rules(tools: &Tools, folder: &Path, archs: &[&str]) -> Outcome {
    let work = scratch()?;
    let assembled = |arch: &str, path: &Path| {
        let mut ptxas = tools.command(format!("{}/bin/ptxas --gpu-name {arch} -v", tools.get("nvidia")?));
        output(ptxas.arg(path).arg("-o").arg(work.path().join("out.cubin")))
    };
    let planted = listed("k 1024 0\n")?;
    for (rule, ptx) in real_plants() {
        let path = work.path().join("planted.ptx");
        write(&path, &ptx)?;
        let faults = judge(&ptx, &assembled("sm_121", &path)?, "sm_121", &planted);
        let found = faults.iter().any(|fault| fault.0 == rule);
        refused(rule, "", if found { Err(String::new()) } else { Ok(()) })?;
    }
    let library = listed(&read(tools.get("kernels")?)?)?;
    let mut faults = Vec::new();
    for arch in archs {
        let path = folder.join(format!("{arch}.ptx"));
        let log = assembled(arch, &path)?;
        print_table(arch, &log);
        let found = judge(&read(&path)?, &log, arch, &library);
        faults.extend(found.into_iter().map(|(rule, message)| format!("{arch}: [{rule}] {message}")));
    }
    if !faults.is_empty() {
        return Err(format!("{}\n{} faults", faults.join("\n"), faults.len()));
    }
    println!("{} kernels, {}: every rule kept", library.len(), archs.join(", "));
    Ok(())
}

/// Checks `ARCH.ptx` of a folder: `ptx-rules PTXAS-FOLDER LIST FOLDER ARCH...`. For nix, which has
/// its own ptxas.
pub(crate) fn rules(arguments: &[String]) -> Outcome {
    let [nvidia, list, folder, archs @ ..] = arguments else {
        return Err("usage: cargo xtask ptx-rules NVIDIA LIST FOLDER ARCH...".to_owned());
    };
    let tools = Tools::bare()?.with("nvidia", nvidia).with("kernels", list);
    check_rules(&tools, Path::new(folder), &archs.iter().map(String::as_str).collect::<Vec<_>>())
}

/// Checks that the kernels use only what rust-cuda's cuda_std has, and that the path through
/// `device/rust-cuda` works. `--quick` compiles nothing to PTX.
///
/// If rust-cuda cannot be fetched, `device/rust-cuda/api` replaces it: the recorded paths and
/// signatures, over stepscope's own crates. `device/rust-cuda` is built against them unchanged,
/// with `cfg(rust_cuda)`. Its PTX must keep the rules of [`crate::ptx_rules`], and the host must
/// accept it through STEPSCOPE_PTX_DIR.
///
/// With rust-cuda, STEPSCOPE_RUST_CUDA names the program that compiles with it.
/// `PROGRAM PROJECT DIR` compiles PROJECT/device through PROJECT/device/rust-cuda and writes
/// DIR/sm_121.ptx (`nix develop .#rust-cuda` sets it). Then that PTX must keep the rules too, and
/// PTX compiled with contraction must be refused. Without it, nothing is tested with rust-cuda
/// itself.
pub(crate) fn rust_cuda(arguments: &[String]) -> Outcome {
    let tools = Tools::install(&["device_compiler"])?;
    let work = tools.target().join("rust-cuda");
    let copy = work.join("sources");
    copy_for_replacement(&tools, &copy)?;
    let inside = tools.within(&copy);
    let manifest = copy.join("device/rust-cuda/Cargo.toml");
    run(tools.command("cargo fmt --all --check --manifest-path").arg(&manifest))?;
    say("the kernels keep the record");
    let compiler = inside.with("RUSTC_BOOTSTRAP", "1").with("RUSTC", tools.get("device_rustc")?);
    let compiler = compiler.with("CARGO_TARGET_DIR", work.join("check"));
    let check = "cargo check --quiet --manifest-path device/rust-cuda/kernels/Cargo.toml --target nvptx64-nvidia-cuda -Zbuild-std=core";
    compiler.output(check)?;
    say("kernels that break the record are refused");
    refuse_kernels(&copy, || compiler.output(check))?;
    if is_quick(arguments) {
        return Ok(());
    }

    let tools = Tools::install(&["device_compiler", "nvidia_packages", "cuda_stub", "kernel_list"])?;
    say("PTX through device/rust-cuda");
    let mut emit = inside
        .with("CARGO_TARGET_DIR", work.join("target"))
        .command("cargo run --quiet --manifest-path device/rust-cuda/Cargo.toml --");
    run(emit.arg(work.join("ptx")))?;
    let accepted = |folder: &str| -> Outcome {
        check_rules(&tools, &work.join(folder), &["sm_121"])?;
        host_takes(&tools, &work.join(folder))
    };
    accepted("ptx")?;
    let Some(program) = std::env::var_os("STEPSCOPE_RUST_CUDA") else {
        println!("device/rust-cuda/api replaced rust-cuda; nothing was built with rust-cuda itself");
        return Ok(());
    };
    say("PTX compiled by rust-cuda itself");
    let compile =
        |project: &Path, folder: &str| run(std::process::Command::new(&program).arg(project).arg(work.join(folder)));
    compile(&at(".", std::env::current_dir())?, "real")?;
    if !read(work.join("real/sm_121.ptx"))?.contains("Generated by NVIDIA NVVM Compiler") {
        return Err("libNVVM did not write this PTX".to_owned());
    }
    accepted("real")?;
    tools.copy_sources(&copy)?;
    let script = copy.join("device/rust-cuda/build.rs");
    let text = read(&script)?;
    if !text.contains("fma_contraction(false)") {
        return Err(format!("{}: nothing was planted", script.display()));
    }
    write(&script, text.replace("fma_contraction(false)", "fma_contraction(true)"))?;
    compile(&copy, "contracted")?;
    refused("contraction, by the rules", "[rounding]", check_rules(&tools, &work.join("contracted"), &["sm_121"]))?;
    refused("contraction, by the host", "compiled with contraction", host_takes(&tools, &work.join("contracted")))
}

/// Copies the sources, with `device/rust-cuda/api` in place of the two dependencies on rust-cuda.
fn copy_for_replacement(tools: &Tools, copy: &Path) -> Outcome {
    tools.copy_sources(copy)?;
    // The replacement needs no compiler of rust-cuda.
    let toolchain = copy.join("device/rust-cuda/rust-toolchain.toml");
    at(&toolchain, fs::remove_file(&toolchain))?;
    let manifest = copy.join("device/rust-cuda/Cargo.toml");
    let text = read(&manifest)?;
    let replaced = text.lines().map(|line| match line.split_once(" = { git = ") {
        Some((name, _)) if name.starts_with("cuda_") => format!("{name} = {{ path = \"api/{name}\" }}\n"),
        _ => format!("{line}\n"),
    });
    let replaced: String = replaced.collect();
    if replaced.matches("path = \"api/").count() != 2 {
        return Err(format!("{}: the two dependencies on rust-cuda were not found", manifest.display()));
    }
    write(&manifest, replaced)
}

/// Plants kernels with what rust-cuda does not have. Names are resolved before types, so that each
/// of two compilations reports its errors.
fn refuse_kernels(copy: &Path, check: impl Fn() -> Outcome<String>) -> Outcome {
    let file = copy.join("device/src/kernels/fill.rs");
    let source = read(&file)?;
    let names = [
        ("a function that rust-cuda has not", "block_fence", "cuda_std::thread::block_fence(); let _ = x;"),
        (
            "a shuffle of rust-cuda's",
            "warp_shuffle_xor",
            "unsafe { *x = cuda_std::warp::warp_shuffle_xor(u32::MAX, *x, 1, 32).0 }",
        ),
        ("a name that rust-cuda's prelude has not", "`warp`", "unsafe { *x = warp::lane_id() }"),
    ];
    let types = [
        ("a function of libdevice", "E0782", "unsafe { *x = cuda_std::GpuFloat::exp(1.0f32) as u32 }"),
        ("another signature", "E0308", "unsafe { *x = cuda_std::thread::sync_threads_count(true) }"),
    ];
    for plants in [&names[..], &types] {
        let planted = plants.iter().zip(0..).map(|((_, _, body), number)| {
            format!("\n#[kernel]\npub unsafe fn planted_{number}(x: *mut u32) {{\n    {body}\n}}\n")
        });
        write(&file, source.clone() + &planted.collect::<String>())?;
        let Err(log) = check() else { return Err(format!("passed planted kernels: {plants:?}")) };
        for (what, reason, _) in plants {
            refused(what, reason, Err::<(), _>(log.clone()))?;
        }
    }
    write(&file, source)
}

/// Checks that the host's build accepts a folder's PTX.
fn host_takes(tools: &Tools, folder: &Path) -> Outcome {
    let tools = tools.with("STEPSCOPE_ARCHS", "sm_121").with("STEPSCOPE_PTX_DIR", folder);
    tools.output("cargo check --quiet --package stepscope --features cuda").map(|_| ())
}

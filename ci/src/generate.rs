//! Committed data that is generated.

use crate::tools::{Outcome, Tools, run, say, selected, stdout, write};

type Part = (&'static str, fn(&Tools) -> Outcome);

const PARTS: [Part; 5] = [
    // The digests of every kernel's results: host/check/src/same_bits/golden.txt.
    ("golden", |tools| stepscope(tools, "check --device emulated --update").map(drop)),
    // The instructions of every assembled kernel: host/predict/code.json. They also depend on the
    // versions of rustc and ptxas.
    ("code", code),
    // The tables of docs/predict.md: predictions compared with benches/runs, and a GB10's.
    ("predict", |tools| {
        tools.run(
            "python3 host/cli/src/predict/tables.py docs/predict.md cargo run --quiet --release -p stepscope-cli --",
        )
    }),
    // The tables of docs/performance.md, from benches/runs.
    ("figures", |tools| tools.run("python3 benches/tables.py docs/performance.md")),
    // The messages from which `fuzz` starts: fuzz/corpus/group.
    ("corpus", |tools| {
        let test = "cargo test --quiet -p stepscope-group --lib -- --exact wire::tests::fuzz_corpus_is_current";
        tools.with("STEPSCOPE_WRITE_CORPUS", "1").run(test)
    }),
];

/// Rewrites the named parts of the generated data, or all, in four minutes on two cores.
///
/// Run it after a change to a kernel, a case or a recorded run, and commit what it changed.
pub(crate) fn generate(arguments: &[String]) -> Outcome {
    let parts = selected(&PARTS, arguments)?;
    let tools = Tools::install(&[])?;
    for (name, part) in parts {
        say(name);
        part(&tools)?;
    }
    say("changed files");
    let files = "host/check/src/same_bits/golden.txt host/predict/code.json docs/predict.md docs/performance.md fuzz/corpus/group";
    tools.run(format!("git status --short -- {files}"))
}

/// Runs the program, which needs no CUDA here, and returns its output.
fn stepscope(tools: &Tools, arguments: &str) -> Outcome<String> {
    stdout(&mut tools.command(format!("cargo run --quiet --release -p stepscope-cli -- {arguments}")))
}

fn code(_: &Tools) -> Outcome {
    let tools = Tools::install(&["device_compiler", "nvidia_packages", "disassembler"])?;
    let ptx = tools.target().join("generate-ptx");
    let mut emit = tools.command("cargo run --quiet -p stepscope-cuda-builder --example emit_ptx -- device");
    run(emit.args([&ptx, &tools.target().join("cuda-builder")]).args(["sm_90", "sm_121"]))?;
    let (nvidia, disassembler) = (tools.get("nvidia")?, tools.get("disassembler")?);
    let counted =
        stdout(tools.command(format!("python3 host/predict/code.py {nvidia}/bin/ptxas {disassembler}")).arg(&ptx))?;
    write("host/predict/code.json", counted)
}

//! The program `stepscope`.

#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    stepscope_cli::main()
}

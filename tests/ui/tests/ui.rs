//! Programs that violate the brands must not compile, for the stated reason, and a legal program
//! must.
//!
//! Each program in `programs` states its guarantee in its first line, and its `.stderr` holds the
//! compiler's messages. After a change, `TRYBUILD=overwrite cargo test --package stepscope-ui`
//! rewrites them: review the difference.

#![forbid(unsafe_code)]

use std::fs;
use std::path::PathBuf;

use stepscope::tensor::{Lent, LentMut, Saved, ScratchStep};
use stepscope::{Arena, Device, EagerStep, Step, Tape, Tensor, Var};

/// The program that must compile. As a module it needs no build of its own, and is run too.
#[path = "../programs/legal.rs"]
mod legal;

// Objects of a step and arguments of its launches stay on its thread. An arena may move between
// steps, and two threads cannot share it. They are stated here because the compiler's message
// differs where the standard library's source is installed.
static_assertions::assert_not_impl_any!(Step<'static>: Send, Sync);
static_assertions::assert_not_impl_any!(EagerStep<'static>: Send, Sync);
static_assertions::assert_not_impl_any!(ScratchStep<'static, 'static>: Send, Sync);
static_assertions::assert_not_impl_any!(Tensor<'static>: Send, Sync);
static_assertions::assert_not_impl_any!(Saved<'static>: Send, Sync);
static_assertions::assert_not_impl_any!(Lent<'static, 'static>: Send, Sync);
static_assertions::assert_not_impl_any!(LentMut<'static, 'static>: Send, Sync);
static_assertions::assert_not_impl_any!(Tape<'static, 'static>: Send, Sync);
static_assertions::assert_not_impl_any!(Var<'static>: Send, Sync);
static_assertions::assert_not_impl_any!(kernels::fill::fill<'static, f32>: Send, Sync);
static_assertions::assert_not_impl_any!(Arena: Sync);
static_assertions::assert_impl_all!(Arena: Send);
static_assertions::assert_impl_all!(Device: Send, Sync);

/// Returns the programs that must not compile.
fn forbidden() -> Vec<PathBuf> {
    let mut programs: Vec<PathBuf> = fs::read_dir("programs")
        .expect("programs")
        .map(|entry| entry.expect("an entry of programs").path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "rs") && !path.ends_with("legal.rs"))
        .collect();
    programs.sort();
    programs
}

#[test]
fn forbidden_programs_do_not_compile() {
    let cases = trybuild::TestCases::new();
    for program in forbidden() {
        cases.compile_fail(program);
    }
}

#[test]
fn forbidden_programs_state_their_guarantee() {
    let programs = forbidden();
    assert!(programs.len() >= 7, "{programs:?}");
    for program in programs {
        let name = program.display();
        let text = fs::read_to_string(&program).unwrap();
        assert!(text.starts_with("//! "), "{name}: the first line states the guarantee");
        let errors = fs::read_to_string(program.with_extension("stderr")).unwrap();
        // The compiler may report one mistake twice (each brand does not outlive the other), but
        // never two mistakes.
        let mut kinds: Vec<&str> =
            errors.lines().filter(|line| line.starts_with("error")).filter_map(|line| line.split(':').next()).collect();
        kinds.dedup();
        assert_eq!(kinds.len(), 1, "{name}: expected errors of one kind\n{errors}");
        assert!(!errors.contains("warning"), "{name}: no warning\n{errors}");
    }
}

#[test]
fn the_legal_program_runs() {
    legal::main();
}

/// Each message in docs/compiler.md must be, line by line, the compiler's output for the program
/// named above it.
#[test]
fn compiler_page_quotes_real_messages() {
    let page = fs::read_to_string("../../docs/compiler.md").unwrap();
    let sections: Vec<&str> = page.split("\n`tests/ui/programs/").skip(1).collect();
    assert!(sections.len() >= 8, "{} messages", sections.len());
    // The compiler puts numbers and bars before a line, and indents it like the program.
    let plain =
        |line: &str| line.trim_start_matches(|c: char| c.is_ascii_digit() || " |".contains(c)).trim_end().to_owned();
    for section in sections {
        let (name, text) = section.split_once(".rs`").expect("a program's name");
        let quoted = text.split("```text\n").nth(1).and_then(|text| text.split("```").next()).expect("a message");
        let errors = fs::read_to_string(format!("programs/{name}.stderr")).unwrap();
        let printed: Vec<String> = errors.lines().map(plain).collect();
        for line in quoted.lines().map(plain) {
            assert!(printed.contains(&line), "{name}: the compiler does not print `{line}`");
        }
    }
}

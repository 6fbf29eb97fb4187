//! What the brands forbid does not compile, for the stated reason; what they allow does.
//!
//! Each program in `programs` states its guarantee in its first line, and its `.stderr` holds what the compiler says.
//! After a change, `TRYBUILD=overwrite cargo test --package stepscope-ui` writes them anew: read the difference.

#![forbid(unsafe_code)]

use std::fs;
use std::path::PathBuf;

use stepscope::{Arena, Device, Eager, Lent, LentMut, Saved, Scratch, Step, Tape, Tensor, Var};

/// The program that must compile. As a module it needs no build of its own, and is run too.
#[path = "../programs/legal.rs"]
mod legal;

// What belongs to a step stays on its thread; an arena may move between steps, and no two threads share one.
static_assertions::assert_not_impl_any!(Step<'static>: Send, Sync);
static_assertions::assert_not_impl_any!(Eager<'static>: Send, Sync);
static_assertions::assert_not_impl_any!(Scratch<'static, 'static>: Send, Sync);
static_assertions::assert_not_impl_any!(Tensor<'static>: Send, Sync);
static_assertions::assert_not_impl_any!(Saved<'static>: Send, Sync);
static_assertions::assert_not_impl_any!(Lent<'static, 'static>: Send, Sync);
static_assertions::assert_not_impl_any!(LentMut<'static, 'static>: Send, Sync);
static_assertions::assert_not_impl_any!(Tape<'static, 'static>: Send, Sync);
static_assertions::assert_not_impl_any!(Var<'static>: Send, Sync);
static_assertions::assert_not_impl_any!(Arena: Sync);
static_assertions::assert_impl_all!(Arena: Send);
static_assertions::assert_impl_all!(Device: Send, Sync);

/// The programs that must not compile.
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
fn each_forbidden_program_states_its_guarantee_and_has_errors_of_one_kind() {
    let programs = forbidden();
    assert!(programs.len() >= 7, "{programs:?}");
    for program in programs {
        let name = program.display();
        let text = fs::read_to_string(&program).unwrap();
        assert!(text.starts_with("//! "), "{name}: the first line states the guarantee");
        let errors = fs::read_to_string(program.with_extension("stderr")).unwrap();
        // The compiler may tell one mistake twice (each brand does not outlive the other), but never two mistakes.
        let mut kinds: Vec<&str> =
            errors.lines().filter(|line| line.starts_with("error")).filter_map(|line| line.split(':').next()).collect();
        kinds.dedup();
        assert_eq!(kinds.len(), 1, "{name}: errors of one kind\n{errors}");
        assert!(!errors.contains("warning"), "{name}: no warning\n{errors}");
    }
}

#[test]
fn the_legal_program_runs() {
    legal::main();
}

/// What docs/compiler.md quotes, line by line, is what the compiler prints of the program that is named above it.
#[test]
fn the_page_on_the_compilers_messages_quotes_them_as_they_are() {
    let page = fs::read_to_string("../../docs/compiler.md").unwrap();
    let sections: Vec<&str> = page.split("\n`tests/ui/programs/").skip(1).collect();
    assert!(sections.len() >= 8, "{} messages", sections.len());
    // The compiler puts numbers and bars before a line, and indents it as the program does.
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

//! Checks that each module of this crate uses only the modules before it in docs/architecture.md.

use std::fs;
use std::path::{Path, PathBuf};

/// The text before the list of modules.
const BEFORE_LIST: &str = "uses only modules before it in this list:\n\n```text\n";

/// The Rust files of a module, which is a file or a folder.
fn files(path: &Path) -> Vec<PathBuf> {
    match fs::read_dir(path) {
        Ok(entries) => entries.flat_map(|entry| files(&entry.expect("an entry").path())).collect(),
        Err(_) => vec![path.to_path_buf()],
    }
}

/// The modules that code outside comments and tests names as `crate::module`.
fn used(code: &str) -> Vec<String> {
    let code = code.split("#[cfg(test)]\nmod ").next().unwrap_or_default();
    let lines = code.lines().map(|line| line.split("//").next().unwrap_or_default());
    let paths = lines.flat_map(|line| line.split("crate::").skip(1));
    paths.map(|path| path.chars().take_while(|&c| c == '_' || c.is_alphanumeric()).collect()).collect()
}

#[test]
fn modules_use_only_modules_before() {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let page = fs::read_to_string(here.join("../../docs/architecture.md")).expect("the page");
    let (_, list) = page.split_once(BEFORE_LIST).expect("the list of modules");
    let order: Vec<&str> = list.split("```").next().unwrap_or_default().split_whitespace().collect();
    let place = |module: &str| order.iter().position(|&other| other == module);
    for entry in fs::read_dir(here.join("src")).expect("the sources") {
        let path = entry.expect("an entry").path();
        let module = path.file_stem().and_then(|name| name.to_str()).expect("a name in UTF-8");
        if ["lib", "internals", "module_order"].contains(&module) {
            continue;
        }
        assert!(place(module).is_some(), "`{module}` is missing in the list of modules in docs/architecture.md");
        for file in files(&path) {
            for used in used(&fs::read_to_string(&file).expect("a source")) {
                // The macro `kernels!`, and the clock of tests/loom.
                if ["kernels", "of_core", "Kernels", "model"].contains(&used.as_str()) {
                    continue;
                }
                assert!(
                    place(&used) <= place(module) && place(&used).is_some(),
                    "{} uses `crate::{used}`",
                    file.display()
                );
            }
        }
    }
}

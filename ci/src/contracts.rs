//! The rule that a `// SAFETY:` comment precedes each contract of a kernel, and states why the
//! contract's checks suffice. clippy cannot check this: a macro makes the contract's `unsafe impl`.

use std::path::Path;

use crate::tools::{Outcome, at, read};

/// Checks every Rust file below a folder; no contract is a failure.
pub(crate) fn check(folder: &Path) -> Outcome {
    let (mut count, mut faults) = (0, Vec::new());
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in at(&folder, folder.read_dir())? {
            let path = at(&folder, entry)?.path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|end| end == "rs") {
                let (every, bad) = contracts(&read(&path)?);
                count += every;
                faults.extend(bad.iter().map(|line| {
                    format!("{}:{line}: a contract without a `// SAFETY:` comment before it", path.display())
                }));
            }
        }
    }
    if count == 0 {
        faults.push(format!("{} has no contract", folder.display()));
    }
    println!("{count} contracts");
    if faults.is_empty() { Ok(()) } else { Err(faults.join("\n")) }
}

/// Returns the number of contracts, and the lines of those without a reason.
///
/// The reason ends directly before the contract's attributes.
fn contracts(source: &str) -> (usize, Vec<usize>) {
    let lines: Vec<&str> = source.lines().map(str::trim_start).collect();
    let starts = (0..lines.len())
        .filter(|&at| ["contract!", "contract unsafe"].iter().any(|start| lines[at].starts_with(start)));
    let starts: Vec<usize> = starts.collect();
    let is_explained = |&start: &usize| {
        let before = lines[..start].iter().rev().skip_while(|line| line.starts_with("#["));
        before.take_while(|line| line.starts_with("//")).any(|line| line.starts_with("// SAFETY:"))
    };
    (starts.len(), starts.iter().filter(|start| !is_explained(start)).map(|start| start + 1).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "// SAFETY: a thread writes the element of its index,
// and only where there is one.
#[cfg(x)]
contract!(unsafe copy {});
family! {
    // SAFETY: as above.
    contract unsafe {
    }
}
";

    #[test]
    fn contracts_need_a_reason() {
        assert_eq!(contracts(GOOD), (2, vec![]));
        let reason = "    // SAFETY: as above.\n";
        for (old, new) in [
            ("// SAFETY: a thread", "// A thread"),
            (reason, ""),
            (reason, &format!("{reason}    fn other() {{}}\n    // No reason.\n")),
            (reason, &format!("{reason}\n")),
        ] {
            assert_eq!(contracts(&GOOD.replace(old, new)).1.len(), 1, "passed: {new}");
        }
        assert!(check(tempfile::tempdir().unwrap().path()).is_err(), "passed a folder without a contract");
    }
}

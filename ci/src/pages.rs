//! The rules for Markdown: paths, links, fences and the programs in commands exist.
//!
//! `docs` runs ```` ```sh ```` fences. ```` ```sh gpu ```` needs a GPU; ```` ```sh slow ```` takes
//! minutes or runs in another check. Text in other fences is not run, so it must not look like a
//! command. Lines of a transcript start with `$ `.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use crate::STEPS;
use crate::tools::{Outcome, read};

/// Folders of this repository. Paths that start with them must exist.
const ROOTS: [&str; 9] = [".ci", "benches", "ci", "device", "docs", "examples", "fuzz", "host", "tests"];
const SHELLS: [&str; 3] = ["sh", "sh gpu", "sh slow"];
/// The page whose example is checked, and a pattern's words of that example in code.
const ADDING: &str = "CONTRIBUTING.md";
const EXAMPLE: [&str; 2] = ["layer_norm", "LayerNorm"];
/// Files that need not be listed there: pages, models and tests that use the example, layers like
/// it, a file that names a key of config.json, and files that repeat recorded lines of the benches.
const UNLISTED: [&str; 22] = [
    "docs/",
    "benches/",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "README.md",
    "ci/",
    "examples/diffusion.rs",
    "examples/distillation.rs",
    "examples/mixture.rs",
    "host/train/src/nn/block.rs",
    "host/train/src/nn/group_norm.rs",
    "host/train/src/nn/sequential.rs",
    "host/models/",
    "tests/kernels/torch.rs",
    "tests/models/",
    "host/cli/src/train/",
    "examples/vit.rs",
    "tests/oracle/gpt_training.py",
    "tests/programs/runs.rs",
    "host/cli/src/predict/tests.rs",
    "host/cli/src/predict/tests/bench.rs",
    "host/cli/src/predict/tests/recorded.rs",
];

/// A line of a page.
enum Line<'a> {
    /// The info string of a fence that opens.
    Opens(&'a str),
    /// A line in a fence, and its info string.
    Fenced(&'a str, &'a str),
    Text(&'a str),
    Unclosed,
}

fn lines(page: &str) -> Vec<(usize, Line<'_>)> {
    let (mut found, mut fence) = (Vec::new(), None);
    for (line, number) in page.lines().zip(1..) {
        let line = match (line.trim_start().strip_prefix("```"), fence) {
            (Some(info), None) => {
                fence = Some(info.trim());
                Line::Opens(info.trim())
            }
            (Some(_), Some(_)) => {
                fence = None;
                continue;
            }
            (None, Some(info)) => Line::Fenced(info, line),
            (None, None) => Line::Text(line),
        };
        found.push((number, line));
    }
    found.extend(fence.map(|_| (page.lines().count(), Line::Unclosed)));
    found
}

/// Returns the number and text of each command in ```` ```sh ```` fences, without comments and
/// blank lines, with continued lines joined.
pub(crate) fn commands(page: &str) -> Vec<(usize, String)> {
    let (mut found, mut pending) = (Vec::new(), String::new());
    for (number, line) in lines(page) {
        let Line::Fenced("sh", line) = line else { continue };
        if line.trim().is_empty() || line.trim_start().starts_with('#') {
            continue;
        }
        pending += line.trim_end();
        if pending.ends_with('\\') {
            pending.pop();
        } else {
            found.push((number, std::mem::take(&mut pending)));
        }
    }
    found
}

/// Checks pages, whose paths are relative to `root`.
pub(crate) fn check(root: &Path, pages: &[String]) -> Outcome {
    let mut faults = Vec::new();
    for page in pages {
        let folder = root.join(page).parent().unwrap_or(root).to_owned();
        let text = read(root.join(page))?;
        for (number, line) in lines(&text) {
            let found = line_faults(root, &folder, &line);
            faults.extend(found.into_iter().map(|fault| format!("{page}:{number}: {fault}")));
        }
    }
    if faults.is_empty() { Ok(()) } else { Err(faults.join("\n")) }
}

fn line_faults(root: &Path, folder: &Path, line: &Line<'_>) -> Vec<String> {
    let mut faults = Vec::new();
    match *line {
        Line::Unclosed => faults.push("a fence without an end".to_owned()),
        Line::Opens(info) => {
            let shell = info.split(' ').next().is_some_and(|word| ["bash", "console", "shell", "sh"].contains(&word));
            if shell && !SHELLS.contains(&info) {
                faults.push(format!("```{info}: use ```sh, ```sh gpu or ```sh slow"));
            }
        }
        Line::Fenced(info, line) if SHELLS.contains(&info) => faults.extend(missing_programs(root, line)),
        Line::Fenced(info, line) => {
            if !info.starts_with("rust") && !info.starts_with("python") && is_command(line) {
                faults.push(format!("a command outside ```sh: {}", line.trim()));
            }
        }
        Line::Text(line) => {
            let parts: Vec<&str> = line.split('`').collect();
            for code in parts.iter().skip(1).step_by(2).take(parts.len() / 2) {
                let path = code.split('#').next().unwrap_or_default();
                if is_path(path) {
                    faults.extend(missing(root, path).iter().map(|path| format!("no {path}")));
                }
                faults.extend(missing_programs(root, code));
            }
            let text: String = parts.iter().step_by(2).copied().collect();
            for link in text.split("](").skip(1) {
                let target = link.split([')', ' ']).next().unwrap_or_default();
                let path = target.split('#').next().unwrap_or_default();
                if !target.contains("://") && !path.is_empty() && !folder.join(path).exists() {
                    faults.push(format!("a link to {target}, which is not there"));
                }
            }
        }
    }
    faults
}

/// Returns true for a line that runs cargo or a script of ci/, after variables that it sets.
fn is_command(line: &str) -> bool {
    let is_variable = |word: &&str| {
        word.split_once('=').is_some_and(|(name, _)| name.chars().all(|c| c.is_ascii_uppercase() || c == '_'))
    };
    let word = line.split_whitespace().find(|word| !is_variable(word)).unwrap_or_default();
    word == "cargo" || word.starts_with("ci/") || word.starts_with(".ci/")
}

/// Returns true for the path of a file in a folder of this repository, which may have wildcards.
fn is_path(code: &str) -> bool {
    let root = code.trim_start_matches("./").split('/').next().unwrap_or_default();
    code.contains('/')
        && ROOTS.contains(&root)
        && code.chars().all(|letter| letter.is_alphanumeric() || "_./{},*-".contains(letter))
}

/// Returns the paths that do not exist, of those that braces stand for. Capitals are wildcards, as
/// in DATE.
fn missing(root: &Path, path: &str) -> Vec<String> {
    let exists = |path: &String| root.join(path).exists() || is_found(root, path.trim_end_matches('/'));
    alternatives(path).into_iter().filter(|path| !exists(path)).collect()
}

fn alternatives(path: &str) -> Vec<String> {
    // The innermost braces end first.
    let braces = path.find('}').and_then(|end| Some((path[..end].rfind('{')?, end)));
    let Some((start, end)) = braces else { return vec![path.to_owned()] };
    let parts = path[start + 1..end].split(',');
    parts.flat_map(|part| alternatives(&format!("{}{part}{}", &path[..start], &path[end + 1..]))).collect()
}

/// Returns true if a file below the folder matches the pattern.
fn is_found(folder: &Path, pattern: &str) -> bool {
    let (name, rest) = pattern.split_once('/').map_or((pattern, None), |(name, rest)| (name, Some(rest)));
    let entries = folder.read_dir().into_iter().flatten().filter_map(Result::ok);
    let mut matching = entries.filter(|entry| matches(name, &entry.file_name().to_string_lossy()));
    matching.any(|entry| rest.is_none_or(|rest| is_found(&entry.path(), rest)))
}

/// Returns true if a name matches a pattern of `*` and capitals.
fn matches(pattern: &str, name: &str) -> bool {
    let capitals = pattern.chars().take_while(char::is_ascii_uppercase).count();
    let skipped = if pattern.starts_with('*') { 1 } else { capitals };
    if skipped > 1 || pattern.starts_with('*') {
        let ends = name.char_indices().map(|(end, _)| end).chain([name.len()]);
        return ends.into_iter().any(|end| matches(&pattern[skipped..], &name[end..]));
    }
    match (pattern.chars().next(), name.chars().next()) {
        (None, None) => true,
        (Some(wanted), Some(letter)) if wanted == letter => {
            matches(&pattern[wanted.len_utf8()..], &name[letter.len_utf8()..])
        }
        _ => false,
    }
}

/// Returns an error for each program of a command that does not exist.
fn missing_programs(root: &Path, command: &str) -> Vec<String> {
    let mut faults = Vec::new();
    let words: Vec<&str> = command.split([' ', '=', '\t']).filter(|word| !word.is_empty()).collect();
    for (word, next) in words.iter().zip(words.iter().skip(1).chain([&""])) {
        let kind = ["example", "bench", "test"].into_iter().find(|kind| word.strip_prefix("--") == Some(kind));
        let name: String = next.chars().take_while(|letter| letter.is_alphanumeric() || *letter == '_').collect();
        if let Some(kind) = kind.filter(|_| !name.is_empty()) {
            let folder = root.join(if kind == "bench" { "benches".to_owned() } else { format!("{kind}s") });
            if !folder.join(format!("{name}.rs")).exists() && !folder.join(&name).join("main.rs").exists() {
                faults.push(format!("no {kind} `{name}`"));
            }
        }
        if *word == "xtask" && !name.is_empty() && !STEPS.iter().any(|step| step.0 == *next) {
            faults.push(format!("no command `cargo xtask {next}`"));
        }
        if ["ci/", ".ci/"].iter().any(|folder| word.starts_with(folder)) && !root.join(word).exists() {
            faults.push(format!("no {word}"));
        }
    }
    faults
}

/// Checks that the page lists the files of its example, and that its code is in the files that it
/// names. `files` has the text of each path.
///
/// Its sections contain the example before the table.
pub(crate) fn check_adding(files: &BTreeMap<String, String>) -> Outcome {
    let page = files.get(ADDING).ok_or_else(|| format!("{ADDING} is missing"))?;
    let mut listed = BTreeSet::new();
    for section in page.split("\n## ").skip(1) {
        let Some((before, table)) = section.split_once("\n|---|") else { continue };
        if before.contains("`layer_norm`") {
            let rows = table.split("\n\n").next().unwrap_or_default().lines().filter_map(|row| row.strip_prefix("| "));
            listed.extend(rows.flat_map(|row| row.split('|').next().unwrap_or_default().split('`').skip(1).step_by(2)));
        }
    }
    let starts_word =
        |text: &str, at: usize| !text[..at].ends_with(|letter: char| letter.is_alphanumeric() || letter == '_');
    let names =
        |text: &String| EXAMPLE.iter().any(|word| text.match_indices(word).any(|(at, _)| starts_word(text, at)));
    let naming =
        files.iter().filter(|(path, text)| !UNLISTED.iter().any(|start| path.starts_with(start)) && names(text));
    let naming: BTreeSet<&str> = naming.map(|(path, _)| path.as_str()).collect();
    let mut faults: Vec<String> =
        naming.difference(&listed).map(|path| format!("{ADDING} does not list {path}")).collect();
    faults.extend(
        listed.difference(&naming).map(|path| format!("{ADDING} lists {path}, which does not name the example")),
    );
    faults.extend(misquoted(page, files));
    if faults.is_empty() { Ok(()) } else { Err(faults.join("\n")) }
}

/// Returns an error for each ```` ```rust ```` fence whose lines, without indentation, are not in
/// the file that the text before it names last.
fn misquoted(page: &str, files: &BTreeMap<String, String>) -> Vec<String> {
    let unindented = |text: &str| text.lines().map(|line| format!("{}\n", line.trim())).collect::<String>();
    let (mut faults, mut file) = (Vec::new(), "");
    for (part, is_code) in page.split("\n```").zip([false, true].into_iter().cycle()) {
        if !is_code {
            let codes = part.split('`').skip(1).step_by(2);
            file = codes.filter(|code| files.contains_key(*code)).last().unwrap_or(file);
        } else if let Some(code) = part.strip_prefix("rust\n")
            && !unindented(files.get(file).map_or("", String::as_str)).contains(&unindented(code))
        {
            let first = code.lines().next().unwrap_or_default();
            faults.push(format!("{ADDING} quotes code that is not in {file}: {first}"));
        }
    }
    faults
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tools::write;

    #[test]
    fn planted_pages_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        for path in [
            "host/norm.rs",
            "examples/shown/main.rs",
            "benches/runs/2026-h200-arena.json",
            "ci/test",
            "README.md",
            "tests/a",
        ] {
            write(root.join(path), "").unwrap();
        }
        let faults = |page: &str| {
            write(root.join("docs/page.md"), page).unwrap();
            check(root, &["docs/page.md".to_owned()]).err()
        };
        for page in [
            "`host/norm.rs`, `host/{norm}.rs`, `host/*.rs`, `ci/`, `a/b` and `benches/runs/DATE-GPU-arena.json`\n",
            "[home](../README.md#top), [there](https://example.org), [`code`](#here)\n",
            "```sh\ncargo run --example shown # ci/test\nci/test\ncargo xtask prose\n```\n",
            "```sh gpu\ncargo run --example shown\n```\n```text\n$ cargo run\nout\n```\n```rust\nlet x = 1;\n```\n",
        ] {
            assert_eq!(faults(page), None);
        }
        for page in [
            "`host/gone.rs`\n",
            "`host/{norm,gone}.rs`\n",
            "`tests/*.rs`\n",
            "[there](gone.md)\n",
            "```sh\ncargo run --example hidden\n```\n",
            "```sh gpu\ncargo bench --bench hidden\n```\n",
            "run `cargo test --test hidden`\n",
            "```sh slow\nci/gone\n```\n",
            "```sh\ncargo xtask gone\n```\n",
            "```text\nSEED=1 cargo run\n```\n",
            "```bash\nls\n```\n",
            "```sh later\nls\n```\n",
            "```sh\nls\n",
        ] {
            assert!(faults(page).is_some(), "passed: {page}");
        }
        let page = "```sh\n# why\nls \\\n  -l\n\nls # so\n```\n```sh gpu\nno\n```\n```sh slow\nno\n```\n";
        assert_eq!(commands(page), [(4, "ls   -l".to_owned()), (6, "ls # so".to_owned())]);
    }

    #[test]
    fn planted_lists_of_files_are_refused() {
        let page = "# A\n\n## B\n\n`layer_norm`:\n\n| f | w |\n|---|---|\n| `a.rs`, `b.rs` | w |\n\nSee `c.rs`.\n\n```rust\nfn norm() {\n    x\n}\n```\n";
        let quoted = "mod c {\n    fn norm() {\n        x\n    }\n}\n";
        let files =
            [(ADDING, page), ("a.rs", "fn layer_norm_forward()"), ("b.rs", "struct LayerNorm"), ("c.rs", quoted)];
        let files: BTreeMap<_, _> = files.map(|(path, text)| (path.to_owned(), text.to_owned())).into();
        assert_eq!(check_adding(&files), Ok(()));
        for (path, text) in
            [("c.rs", format!("layer_norm() {quoted}")), ("b.rs", String::new()), ("c.rs", "fn norm() {}".to_owned())]
        {
            let mut planted = files.clone();
            planted.insert(path.to_owned(), text.clone());
            assert!(check_adding(&planted).is_err(), "passed: {text}");
        }
    }
}

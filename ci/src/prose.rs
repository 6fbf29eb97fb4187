//! The rules of prose that a program can check, for pages and for the comments of Rust files.
//!
//! Quoted code, tables, links, the contents of fences and generated lines, which begin with a date,
//! are exempt.

use std::path::Path;

use crate::names;
use crate::tools::{Outcome, Tools, read};

const COLUMNS: usize = 100;
/// Words that no sentence begins with, unless a word of [`AFTER_OPENING`] follows.
const OPENINGS: [&str; 5] = ["Of", "Behind", "Beside", "By", "As for"];
const AFTER_OPENING: [&str; 2] = ["default", "hand"];
/// Words that no text contains.
pub(crate) const WORDS: [&str; 10] = [
    "beside",
    "Beside",
    "behind it",
    "behind them",
    "behind which",
    "behind this",
    "behind that",
    "behind a launch",
    "behind an update",
    "behind a step",
];
/// Words that no doc comment begins with.
const DOC_STARTS: [&str; 9] = ["What", "Whether", "Who", "How", "Where", "Which", "The same", "As for", "Of"];

/// Checks all pages and Rust files.
pub(crate) fn check_all() -> Outcome {
    let files = Tools::install(&[])?.output("git ls-files *.md *.rs")?;
    let files: Vec<String> = files.lines().map(str::to_owned).collect();
    check(&files)?;
    println!("{} files", files.len());
    Ok(())
}

/// Checks files; no files are a failure.
pub(crate) fn check(paths: &[String]) -> Outcome {
    let mut faults = Vec::new();
    for path in paths {
        let text = read(path)?;
        let is_page = Path::new(path).extension().is_some_and(|end| end == "md");
        let found = if is_page { page(&text) } else { [source(&text), names::faults(&text)].concat() };
        faults.extend(found.into_iter().map(|(line, fault)| format!("{path}:{line}: {fault}")));
    }
    if paths.is_empty() {
        faults.push("no files to check".to_owned());
    }
    if faults.is_empty() { Ok(()) } else { Err(faults.join("\n")) }
}

/// Returns the number and the fault of each wrong line of a page.
fn page(text: &str) -> Vec<(usize, String)> {
    let (mut faults, mut is_fence) = (Vec::new(), false);
    for (line, number) in text.lines().zip(1..) {
        if line.trim_start().starts_with("```") {
            is_fence = !is_fence;
        } else if !is_fence && !["|", "<!--", "#"].iter().any(|start| line.starts_with(start)) && !is_dated(line) {
            // A long word may exceed the limit.
            let has_space = line.trim().chars().take(COLUMNS).any(|letter| letter == ' ');
            faults.extend(too_wide(line, has_space && !line.contains("](")).map(|fault| (number, fault)));
            let text = line.trim_start_matches(|start| "-*> 0123456789.".contains(start));
            faults.extend(wrong(text).into_iter().map(|fault| (number, fault)));
        }
    }
    faults
}

/// Returns the number and the fault of each wrong comment of a Rust file.
fn source(text: &str) -> Vec<(usize, String)> {
    let (mut faults, mut is_fence, mut before) = (Vec::new(), false, "");
    for (line, number) in text.lines().zip(1..) {
        let code = line.trim_start();
        let kind = ["///", "//!", "//"].into_iter().find(|kind| code.starts_with(kind)).unwrap_or("");
        // A longer row of slashes is no comment of prose.
        let Some(text) =
            code.strip_prefix(kind).filter(|text| !kind.is_empty() && (text.is_empty() || text.starts_with(' ')))
        else {
            (is_fence, before) = (false, "");
            continue;
        };
        let (text, is_doc) = (text.trim_start(), kind != "//");
        if is_doc && text.starts_with("```") {
            is_fence = !is_fence;
        } else if !is_fence && !text.starts_with('|') {
            faults.extend(too_wide(line, !line.contains("](") && !line.contains("http")).map(|fault| (number, fault)));
            faults.extend(wrong(text).into_iter().map(|fault| (number, fault)));
            let start = DOC_STARTS.iter().find(|start| is_doc && before != kind && begins(text, start));
            faults.extend(start.map(|start| {
                (number, format!("a doc comment begins with {start}: write a noun phrase or a third-person verb"))
            }));
        }
        before = kind;
    }
    faults
}

fn too_wide(line: &str, is_checked: bool) -> Option<String> {
    let columns = line.chars().count();
    (is_checked && columns > COLUMNS).then(|| format!("{columns} columns"))
}

/// Returns true for a generated line: `20..-`.
fn is_dated(line: &str) -> bool {
    let start = line.as_bytes();
    start.len() > 4
        && line.starts_with("20")
        && start[2].is_ascii_digit()
        && start[3].is_ascii_digit()
        && start[4] == b'-'
}

/// Returns the faults of a line of prose.
fn wrong(text: &str) -> Vec<String> {
    let plain = without_code(text);
    let mut faults = Vec::new();
    let ends = plain.match_indices([' ']).filter(|(end, _)| plain[..*end].ends_with(['.', '!', '?', ':']));
    for start in [0].into_iter().chain(ends.map(|(end, _)| end + 1)) {
        let sentence = &plain[start..];
        let opening = OPENINGS.into_iter().find(|opening| {
            let rest = sentence.strip_prefix(opening).and_then(|rest| rest.strip_prefix(' '));
            rest.is_some_and(|rest| !AFTER_OPENING.iter().any(|word| begins(rest, word)))
        });
        faults.extend(opening.map(|opening| format!("a sentence opens with {opening}")));
    }
    let word = WORDS.into_iter().find(|word| has(&plain, word));
    let word = word.or_else(|| ends_in_alone(&plain).then_some("alone"));
    faults.extend(word.map(|word| format!("`{word}`: write after, next to, compared with, or only")));
    faults
}

/// Replaces quoted code and the targets of links.
fn without_code(text: &str) -> String {
    let mut plain = String::new();
    let mut rest = text;
    while let Some(start) = rest.find(['`', ']']) {
        let (close, open) = if rest[start..].starts_with('`') { ('`', 1) } else { (')', 2) };
        let is_span = close == '`' || rest[start..].starts_with("](");
        match rest[start..].get(open..).and_then(|inner| inner.find(close)).filter(|_| is_span) {
            Some(end) => {
                plain += &rest[..start];
                plain += "`x`";
                rest = &rest[start + open + end + 1..];
            }
            None => {
                plain += &rest[..=start];
                rest = &rest[start + 1..];
            }
        }
    }
    plain + rest
}

/// Returns true if the text begins with these words.
pub(crate) fn begins(text: &str, words: &str) -> bool {
    text.strip_prefix(words).is_some_and(|rest| !rest.starts_with(is_in_word))
}

/// Returns true if the text contains these words.
pub(crate) fn has(text: &str, words: &str) -> bool {
    let mut places = text.match_indices(words);
    places.any(|(start, _)| !text[..start].ends_with(is_in_word) && begins(&text[start..], words))
}

/// Returns true if `alone` ends a clause.
pub(crate) fn ends_in_alone(text: &str) -> bool {
    text.match_indices("alone").any(|(start, word)| {
        let rest = &text[start + word.len()..];
        !text[..start].ends_with(is_in_word) && (rest.is_empty() || rest.starts_with(['.', ',', ';', ':', ')']))
    })
}

fn is_in_word(letter: char) -> bool {
    letter.is_alphanumeric() || letter == '_'
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn planted_sentences_are_refused() {
        let long = "x ".repeat(60);
        for text in [
            "Of GPT-2 the opposite holds.",
            "It ends. By turns it runs.",
            "It runs beside the copy.",
            "Weights alone.",
            &long,
        ] {
            assert!(!page(text).is_empty(), "passed: {text}");
        }
        let long = format!("// {}", "word ".repeat(24));
        for text in [
            "/// What a step holds.",
            "/// As for [`Step::lend`].",
            "//! Whether it ends.",
            "// It waits behind it.",
            "    /// Of memory it has enough.",
            &long,
        ] {
            assert!(!source(text).is_empty(), "passed: {text}");
        }
    }

    #[test]
    fn correct_sentences_pass() {
        let fence = format!("```\n{}\n```\n", "Of beside ".repeat(20));
        let good = format!(
            "By default it waits. The copy runs concurrently, `beside`.\n{fence}| Of a | beside |\n2026-11-21 beside"
        );
        assert_eq!(page(&good), []);
        let good =
            "/// Returns what a step holds.\n/// How is no start here.\nlet of = 1; // code\n/// ```\n/// Of\n/// ```";
        assert_eq!(source(good), []);
        assert!(check(&[]).is_err());
    }
}

//! The rules for identifiers, and for the messages of errors, panics and assertions, in Rust files.

use crate::prose::{self, begins, ends_in_alone, has};

/// Names that no code uses, because they do not say what they hold.
const NAMES: [&str; 11] =
    ["Deed", "Heard", "Told", "beside", "deed", "heard", "hears", "learner", "plays", "stands", "told"];
/// Words and macros whose texts are messages.
const CALLS: [&str; 12] = [
    "assert",
    "assert_eq",
    "assert_ne",
    "debug_assert",
    "error",
    "expect",
    "expect_err",
    "misuse",
    "panic",
    "prop_assert",
    "refuse",
    "unreachable",
];
/// Words that no message begins with.
const OPENINGS: [&str; 6] = ["of", "by", "behind", "beside", "who", "none of"];
/// Words that no message contains, besides those of [`prose::WORDS`].
const WORDS: [&str; 9] = [
    "a later one",
    "a second one",
    "behind the",
    "goes on",
    "is no update",
    "nobody",
    "one of another",
    "that of another",
    "those of another",
];

enum Token<'t> {
    Word(&'t str),
    Text(&'t str),
    Mark(char),
}

/// Returns the number and the fault of each line with a wrong name or message.
pub(crate) fn faults(text: &str) -> Vec<(usize, String)> {
    let (mut faults, mut is_message, mut before) = (Vec::new(), false, ' ');
    for (line, token) in tokens(text) {
        let mut mark = ' ';
        match token {
            Token::Word(word) => {
                is_message |= CALLS.contains(&word);
                let name = NAMES.contains(&word).then(|| format!("the name `{word}`: write what it holds"));
                faults.extend(name.map(|fault| (line, fault)));
            }
            Token::Text(text) if is_message && text.contains(' ') => {
                let text = text.to_lowercase();
                let opening = OPENINGS.into_iter().find(|words| "(,".contains(before) && begins(&text, words));
                let word = WORDS.into_iter().chain(prose::WORDS).find(|words| has(&text, words)).or(opening);
                let other = is_another_than(&text).then_some("another .. than");
                let alone = ends_in_alone(&text).then_some("alone");
                let fault =
                    word.or(other).or(alone).map(|words| format!("a message with `{words}`: name the subject first"));
                faults.extend(fault.map(|fault| (line, fault)));
            }
            Token::Text(_) => {}
            Token::Mark(found) => {
                is_message &= !";{}".contains(found);
                mark = found;
            }
        }
        before = mark;
    }
    faults
}

/// Returns true for `another`, at most two words and `than`.
fn is_another_than(text: &str) -> bool {
    let words: Vec<_> = text.split(' ').collect();
    words.windows(4).any(|words| words[0] == "another" && words[1..].contains(&"than"))
}

/// Splits Rust code into words, texts and marks, without spaces and comments.
fn tokens(text: &str) -> Vec<(usize, Token<'_>)> {
    let (mut tokens, mut rest, mut line) = (Vec::new(), text, 1);
    while let Some(first) = rest.chars().next() {
        let raw = rest.strip_prefix('r').map(|raw| raw.len() - raw.trim_start_matches('#').len());
        let raw = raw.filter(|hashes| rest[1 + hashes..].starts_with('"'));
        let end = |from: usize, mark: &str| rest[from..].find(mark).map_or(rest.len(), |end| from + end + mark.len());
        let taken = if rest.starts_with("//") {
            end(0, "\n")
        } else if let Some(hashes) = raw {
            end(2 + hashes, &format!("\"{}", "#".repeat(hashes)))
        } else if first == '"' {
            let mut escaped = false;
            let closes = |letter| {
                let is_plain = !escaped;
                escaped = is_plain && letter == '\\';
                is_plain && letter == '"'
            };
            let taken = rest[1..].find(closes).map_or(rest.len(), |end| end + 2);
            tokens.push((line, Token::Text(rest.get(1..taken - 1).unwrap_or(""))));
            taken
        } else if rest.starts_with("'\\") {
            end(3, "'")
        } else if first == '\'' && rest.chars().nth(2) == Some('\'') {
            rest.chars().take(3).map(char::len_utf8).sum()
        } else if first.is_alphanumeric() || first == '_' {
            let taken = rest.find(|letter: char| !letter.is_alphanumeric() && letter != '_').unwrap_or(rest.len());
            tokens.push((line, Token::Word(&rest[..taken])));
            taken
        } else {
            tokens.extend((!first.is_whitespace()).then_some((line, Token::Mark(first))));
            first.len_utf8()
        };
        line += rest[..taken].matches('\n').count();
        rest = &rest[taken..];
    }
    tokens
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn planted_names_and_messages_are_refused() {
        for code in [
            "let told = 1;",
            "x.expect(\"a body that nobody wants\")",
            "assert!(a,\n    \"of a small block\");",
            "panic!(\"another secret than that\")",
            "Error::misuse(\"lend\", \"a buffer\", \"one of another device\")",
            "assert_eq!(a, b, \"inputs alone\");",
        ] {
            assert_eq!(faults(code).len(), 1, "{code}");
        }
        assert_eq!(faults("let a = 'b';\n\n\"\\\"\"; let told = r#\"\"#;")[0].0, 3);
    }

    #[test]
    fn correct_names_and_messages_pass() {
        let code = "// told, beside\nlet told_by = \"of told\"; x.expect(\"the copy ends\"); f('\"', \"nobody\", r#\"\"told\"#)";
        assert_eq!(faults(code), []);
    }
}

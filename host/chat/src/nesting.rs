//! A bound on the nesting of a template's source.
//!
//! minijinja parses some forms by recursion without a limit: signs, `not`, `if .. else` and `elif`.
//! It frees long chains of operators by recursion, too. [`check`] therefore counts such tokens
//! before the template is parsed.
//!
//! Invariant: a source that passes takes less stack than the smallest thread has.

use minijinja::machinery::{Token, WhitespaceConfig, tokenize};

/// The deepest nesting of brackets in a tag, and of `if` with all its `elif`.
const MAX_DEPTH: usize = 150;
/// The most signs, `not` and `else` in a tag.
const MAX_PREFIXES: usize = 200;
/// The most operators, brackets and dots in a tag.
const MAX_OPERATORS: usize = 4000;

/// Checks that parsing a source takes little stack.
///
/// # Errors
/// Names the line, and what is nested too deep.
pub(crate) fn check(source: &str, spaces: WhitespaceConfig) -> Result<(), String> {
    let (mut prefixes, mut operators, mut brackets) = (0usize, 0usize, 0usize);
    let mut branches: Vec<usize> = Vec::new();
    let mut is_first = false;
    for token in tokenize(source, false, Default::default(), spaces) {
        // The parser reports such an error.
        let Ok((token, span)) = token else { return Ok(()) };
        match &token {
            Token::BlockStart | Token::VariableStart => {
                (prefixes, operators, brackets) = (0, 0, 0);
                is_first = matches!(token, Token::BlockStart);
                continue;
            }
            Token::Ident("if") if is_first => branches.push(1),
            Token::Ident("elif") if is_first => branches.last_mut().into_iter().for_each(|count| *count += 1),
            Token::Ident("endif") if is_first => drop(branches.pop()),
            Token::Ident("not" | "else") | Token::Minus => prefixes += 1,
            Token::BracketOpen | Token::ParenOpen | Token::BraceOpen => {
                brackets += 1;
                operators += 1;
            }
            Token::BracketClose | Token::ParenClose | Token::BraceClose => brackets = brackets.saturating_sub(1),
            Token::Ident("if" | "and" | "or" | "is" | "in") | Token::Dot | Token::Pipe | Token::Tilde => operators += 1,
            Token::Plus | Token::Mul | Token::Div | Token::FloorDiv | Token::Pow | Token::Mod => operators += 1,
            Token::Eq | Token::Ne | Token::Gt | Token::Gte | Token::Lt | Token::Lte => operators += 1,
            _ => {}
        }
        is_first = false;
        for (count, most, what) in [
            (branches.iter().sum(), MAX_DEPTH, "`if` and `elif` are nested"),
            (brackets, MAX_DEPTH, "brackets are nested"),
            (prefixes, MAX_PREFIXES, "signs, `not` and `else` are nested"),
            (operators + prefixes, MAX_OPERATORS, "operators are nested"),
        ] {
            if count > most {
                return Err(format!("line {}: {what} more than {most} deep", span.start_line));
            }
        }
    }
    Ok(())
}

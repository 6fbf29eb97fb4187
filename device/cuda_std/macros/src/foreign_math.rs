//! Rejects the `f32` functions of `std` that a kernel must not use: `x.exp()`, `f32::exp(x)` and
//! the like.
//!
//! On a CPU they compile to the C library's functions, whose bits differ between machines. `core`,
//! all that a GPU has, lacks them, so without this check the mistake would only surface in a GPU
//! build. The check reads tokens, including those in another macro's call.
//!
//! Invariant: only names decide, because a macro sees no types.

use proc_macro2::{Delimiter, Ident, TokenStream as Tokens, TokenTree};
use syn::Error;

/// The functions that `std` has for `f32` and `f64` but `core` does not, except those that IEEE 754
/// rounds correctly.
const FOREIGN: [&str; 26] = [
    "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "cos", "cosh", "exp", "exp2", "exp_m1",
    "hypot", "ln", "ln_1p", "log", "log10", "log2", "powf", "powi", "sin", "sin_cos", "sinh", "tan", "tanh",
];

/// Rejects a kernel's body that uses such a function.
///
/// # Errors
/// Fails at a method call with such a name, and at such a function of `f32` or `f64`.
pub(crate) fn refuse(body: Tokens) -> syn::Result<()> {
    let tokens: Vec<TokenTree> = body.into_iter().collect();
    for (at, token) in tokens.iter().enumerate() {
        match token {
            TokenTree::Group(group) => refuse(group.stream())?,
            TokenTree::Ident(name) if is_foreign(name) && (is_called(&tokens, at) || is_of_float(&tokens, at)) => {
                return Err(Error::new(name.span(), message(&name.to_string())));
            }
            _ => {}
        }
    }
    Ok(())
}

fn is_foreign(name: &Ident) -> bool {
    FOREIGN.iter().any(|foreign| name == foreign)
}

/// True if the name at `at` is the name of a method in a call. `0..exp(x)` is not a method.
fn is_called(tokens: &[TokenTree], at: usize) -> bool {
    let called =
        matches!(tokens.get(at + 1), Some(TokenTree::Group(group)) if group.delimiter() == Delimiter::Parenthesis);
    match &tokens[..at] {
        [.., before, dot] => called && is(dot, '.') && !is(before, '.'),
        _ => false,
    }
}

/// True if the name at `at` follows `f32::` or `f64::`.
fn is_of_float(tokens: &[TokenTree], at: usize) -> bool {
    let [.., TokenTree::Ident(float), first, second] = &tokens[..at] else { return false };
    (float == "f32" || float == "f64") && is(first, ':') && is(second, ':')
}

fn is(token: &TokenTree, punctuation: char) -> bool {
    matches!(token, TokenTree::Punct(punct) if punct.as_char() == punctuation)
}

fn message(name: &str) -> String {
    let instead = match name {
        "exp" | "tanh" => format!("call `kernels::math::{name}`"),
        "ln" | "log" => "call `kernels::math::log`".to_owned(),
        _ => "compute it with the functions of `kernels::math`".to_owned(),
    };
    format!(
        "`{name}` of the standard library has other bits on each machine, and no GPU has it: {instead} \
         (a method `{name}` of your own is called by its path)"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(body: &str) -> Option<String> {
        refuse(body.parse().unwrap()).err().map(|error| error.to_string())
    }

    #[test]
    fn foreign_math_is_refused_everywhere() {
        for (body, name, instead) in [
            ("{ let y = x.exp(); }", "exp", "kernels::math::exp"),
            ("{ let y = load(x, 0).ln(); }", "ln", "kernels::math::log"),
            ("{ if a { while b { x.powf(2.0); } } }", "powf", "kernels::math"),
            ("{ unroll! { for i in 0..4 { sum += x[i].tanh(); } } }", "tanh", "kernels::math::tanh"),
            ("{ x.map(f32::sin) }", "sin", "kernels::math"),
            ("{ core::primitive::f64::cos(x) }", "cos", "kernels::math"),
            ("{ 1.0.exp2() }", "exp2", "kernels::math"),
        ] {
            let message = refused(body).unwrap_or_else(|| panic!("passed {body}"));
            assert!(
                message.starts_with(&format!("`{name}` of the standard")) && message.contains(instead),
                "{message}"
            );
        }
    }

    #[test]
    fn what_a_kernel_may_call_passes() {
        for body in [
            "{ let y = exp(x) + math::log(x); }",
            "{ kernels::math::tanh(x).sqrt().mul_add(a, b).abs() }",
            "{ for i in 0..exp(x) {} let log = 1; self.log; }",
            "{ Table::exp(x) }",
        ] {
            assert_eq!(refused(body), None, "{body}");
        }
    }
}

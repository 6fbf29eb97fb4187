//! Instruments a kernel's accesses through its own pointers: the emulator checks each access before
//! it happens.
//!
//! A kernel may write `*out.add(i) = value` instead of `store(out, i, value)`. On the CPU the place
//! becomes `*access::element(Kind::Write, out, i)`, which checks it first. Instrumented are
//! accesses to elements of pointer parameters: `*p.add(i)` and `p.add(i).write(..)`, with `offset`
//! and the `wrapping_` forms. Accesses in another macro's call are not instrumented.
//!
//! Invariant: the results are unchanged.

use proc_macro2::{Span, TokenStream as Tokens};
use quote::quote_spanned;
use syn::visit_mut::{VisitMut, visit_expr_mut};
use syn::{BinOp, Block, Expr, ExprMethodCall, Ident, UnOp, parse_quote};

/// Returns the kernel's body with instrumented accesses to elements of `pointers`.
pub(crate) fn instrumented(body: &Block, pointers: &[&Ident]) -> Block {
    let mut body = body.clone();
    Instrument { pointers }.visit_block_mut(&mut body);
    body
}

struct Instrument<'p> {
    pointers: &'p [&'p Ident],
}

impl VisitMut for Instrument<'_> {
    fn visit_expr_mut(&mut self, expr: &mut Expr) {
        match expr {
            Expr::Assign(assign) => self.instrument_place(&mut assign.left, "Write"),
            Expr::Binary(binary) if is_assignment(&binary.op) => self.instrument_place(&mut binary.left, "Write"),
            Expr::Unary(_) => self.instrument_place(expr, "Read"),
            Expr::MethodCall(call) => match call.method.to_string() {
                method if method.starts_with("write") => self.instrument(&mut call.receiver, "Write"),
                method if method.starts_with("read") => self.instrument(&mut call.receiver, "Read"),
                _ => {}
            },
            _ => {}
        }
        visit_expr_mut(self, expr);
    }
}

impl Instrument<'_> {
    /// Instruments `expr` if it is `*pointer.add(index)`.
    fn instrument_place(&self, expr: &mut Expr, kind: &str) {
        if let Expr::Unary(unary) = expr
            && matches!(unary.op, UnOp::Deref(_))
        {
            self.instrument(&mut unary.expr, kind);
        }
    }

    /// Instruments `expr` if it is `pointer.add(index)`.
    fn instrument(&self, expr: &mut Expr, kind: &str) {
        let Expr::MethodCall(ExprMethodCall { receiver, method, args, .. }) = expr else { return };
        let (Expr::Path(path), 1) = (&**receiver, args.len()) else { return };
        let Some(pointer) = path.path.get_ident().filter(|name| self.pointers.contains(name)) else { return };
        let index = &args[0];
        let span = method.span();
        let index: Tokens = match method.to_string().as_str() {
            "add" | "wrapping_add" => quote_spanned!(span=> #index),
            "offset" | "wrapping_offset" => quote_spanned!(span=> { let index: isize = #index; index as usize }),
            _ => return,
        };
        let kind = Ident::new(kind, Span::call_site());
        let instrumented = quote_spanned! {span=>
            ::cuda_std::emulator::access::element(::cuda_std::emulator::Kind::#kind, #pointer, #index)
        };
        *expr = parse_quote!(#instrumented);
    }
}

fn is_assignment(op: &BinOp) -> bool {
    use BinOp::*;
    matches!(
        op,
        AddAssign(_)
            | SubAssign(_)
            | MulAssign(_)
            | DivAssign(_)
            | RemAssign(_)
            | BitXorAssign(_)
            | BitAndAssign(_)
            | BitOrAssign(_)
            | ShlAssign(_)
            | ShrAssign(_)
    )
}

//! A template whose expressions measure their values.
//!
//! minijinja counts the instructions of a rendering, but one instruction can double a text, or walk
//! a list that contains itself a thousand times. [`measured`] wraps the expressions that make or
//! read values in calls of functions ([`VALUE`], [`READ`], [`ITEMS`], [`TEXT`],
//! [`EMIT`]). [`crate::limits`]
//! defines them. No template can call or replace these functions, because their names are no
//! identifiers.
//!
//! Invariant: an operator, a filter, a test or a call only gets values that were measured, and its
//! result is measured before it is used.

use minijinja::Value;
use minijinja::machinery::Span;
use minijinja::machinery::ast::{
    AutoEscape, BinOp, BinOpKind, Call, CallArg, CallBlock, Compare, CompareOp, Const, Do, EmitExpr, Expr, Filter,
    FilterBlock, ForLoop, GetAttr, GetItem, IfCond, IfExpr, List, Macro, Map, Set, SetBlock, Slice, Spanned, Stmt,
    Template, Test, UnaryOp, UnaryOpKind, Var, WithBlock,
};

/// The function that measures a new value.
pub(crate) const VALUE: &str = "=value";
/// The function that measures a value that is read.
pub(crate) const READ: &str = "=read";
/// The function that refuses to loop over null, which minijinja takes for an empty list.
pub(crate) const ITEMS: &str = "=items";
/// The function that measures an operand of `~`, and returns its text.
pub(crate) const TEXT: &str = "=text";
/// The function that measures a value that is written, and returns its text.
pub(crate) const EMIT: &str = "=emit";

/// The deepest nesting of statements and expressions, such as `a + b + c`.
const MAX_DEPTH: usize = 200;
/// Names that do not stand for plain values.
const SPECIAL: [&str; 4] = ["loop", "self", "super", "caller"];

type Folded<T> = std::result::Result<T, String>;

/// Copies a template, and wraps its expressions.
pub(crate) fn measured<'a>(template: &Stmt<'a>) -> Folded<Stmt<'a>> {
    statement(template, MAX_DEPTH)
}

fn at<T>(span: Span, node: T) -> Spanned<T> {
    Spanned::new(node, span)
}

fn below(depth: usize, span: Span) -> Folded<usize> {
    depth.checked_sub(1).ok_or_else(|| {
        format!("line {}: expressions or statements are nested more than {MAX_DEPTH} deep", span.start_line)
    })
}

fn statements<'a>(list: &[Stmt<'a>], depth: usize) -> Folded<Vec<Stmt<'a>>> {
    list.iter().map(|one| statement(one, depth)).collect()
}

fn statement<'a>(statement: &Stmt<'a>, depth: usize) -> Folded<Stmt<'a>> {
    let body = |list: &[Stmt<'a>], span: Span| statements(list, below(depth, span)?);
    Ok(match statement {
        Stmt::Template(s) => Stmt::Template(at(s.span(), Template { children: body(&s.children, s.span())? })),
        Stmt::EmitExpr(s) => {
            let expr = call(EMIT, bare(&s.expr, depth)?);
            Stmt::EmitExpr(at(s.span(), EmitExpr { expr }))
        }
        Stmt::EmitRaw(s) => {
            let raw = Const { value: Value::from_safe_string(s.raw.to_owned()) };
            Stmt::EmitExpr(at(s.span(), EmitExpr { expr: call(EMIT, Expr::Const(at(s.span(), raw))) }))
        }
        Stmt::ForLoop(s) => {
            let node = ForLoop {
                target: target(&s.target, depth)?,
                iter: call(ITEMS, operand(&s.iter, depth)?),
                filter_expr: s.filter_expr.as_ref().map(|expr| checked(expr, depth)).transpose()?,
                recursive: s.recursive,
                body: body(&s.body, s.span())?,
                else_body: body(&s.else_body, s.span())?,
            };
            Stmt::ForLoop(at(s.span(), node))
        }
        Stmt::IfCond(s) => {
            let node = IfCond {
                expr: checked(&s.expr, depth)?,
                true_body: body(&s.true_body, s.span())?,
                false_body: body(&s.false_body, s.span())?,
            };
            Stmt::IfCond(at(s.span(), node))
        }
        Stmt::WithBlock(s) => {
            let pair = |(name, expr): &(Expr<'a>, Expr<'a>)| Ok((target(name, depth)?, checked(expr, depth)?));
            let assignments = s.assignments.iter().map(pair).collect::<Folded<_>>()?;
            Stmt::WithBlock(at(s.span(), WithBlock { assignments, body: body(&s.body, s.span())? }))
        }
        Stmt::Set(s) => {
            Stmt::Set(at(s.span(), Set { target: target(&s.target, depth)?, expr: checked(&s.expr, depth)? }))
        }
        Stmt::SetBlock(s) => {
            let filter = s.filter.as_ref().map(|filter| checked(filter, depth)).transpose()?;
            let node = SetBlock { target: target(&s.target, depth)?, filter, body: body(&s.body, s.span())? };
            Stmt::SetBlock(at(s.span(), node))
        }
        Stmt::AutoEscape(s) => {
            let node = AutoEscape { enabled: checked(&s.enabled, depth)?, body: body(&s.body, s.span())? };
            Stmt::AutoEscape(at(s.span(), node))
        }
        Stmt::FilterBlock(s) => {
            let node = FilterBlock { filter: checked(&s.filter, depth)?, body: body(&s.body, s.span())? };
            Stmt::FilterBlock(at(s.span(), node))
        }
        Stmt::Macro(s) => Stmt::Macro(macro_of(s, depth)?),
        Stmt::CallBlock(s) => {
            let call = at(s.call.span(), called(&s.call, depth)?);
            Stmt::CallBlock(at(s.span(), CallBlock { call, macro_decl: macro_of(&s.macro_decl, depth)? }))
        }
        Stmt::Do(s) => Stmt::Do(at(s.span(), Do { call: at(s.call.span(), called(&s.call, depth)?) })),
        Stmt::Continue(s) => Stmt::Continue(at(s.span(), minijinja::machinery::ast::Continue)),
        Stmt::Break(s) => Stmt::Break(at(s.span(), minijinja::machinery::ast::Break)),
        // A block that renders itself would overflow the stack.
        Stmt::Block(s) => return Err(other_file(s.span())),
        Stmt::Import(s) => return Err(other_file(s.span())),
        Stmt::FromImport(s) => return Err(other_file(s.span())),
        Stmt::Extends(s) => return Err(other_file(s.span())),
        Stmt::Include(s) => return Err(other_file(s.span())),
    })
}

fn other_file(span: Span) -> String {
    format!(
        "line {}: has a `block`, or names another template: write a chat template in one file without blocks",
        span.start_line
    )
}

fn macro_of<'a>(s: &Spanned<Macro<'a>>, depth: usize) -> Folded<Spanned<Macro<'a>>> {
    let below = below(depth, s.span())?;
    let node = Macro {
        name: s.name,
        args: s.args.iter().map(|name| target(name, below)).collect::<Folded<_>>()?,
        defaults: s.defaults.iter().map(|expr| checked(expr, below)).collect::<Folded<_>>()?,
        body: statements(&s.body, below)?,
    };
    Ok(at(s.span(), node))
}

/// Wraps an expression.
fn call<'a>(function: &'static str, expr: Expr<'a>) -> Expr<'a> {
    let span = expr.span();
    let function = Expr::Var(at(span, Var { id: function }));
    Expr::Call(at(span, Call { expr: function, args: vec![CallArg::Pos(expr)] }))
}

/// Copies the name that is assigned to.
fn target<'a>(expr: &Expr<'a>, depth: usize) -> Folded<Expr<'a>> {
    match expr {
        Expr::List(e) => {
            let below = below(depth, e.span())?;
            let items = e.items.iter().map(|item| target(item, below)).collect::<Folded<_>>()?;
            Ok(Expr::List(at(e.span(), List { items })))
        }
        other => bare(other, depth),
    }
}

/// Copies an expression, and measures its value if it is new.
fn checked<'a>(expr: &Expr<'a>, depth: usize) -> Folded<Expr<'a>> {
    let copy = bare(expr, depth)?;
    Ok(if is_new(expr) { call(VALUE, copy) } else { copy })
}

/// Returns true if an expression can make a large value.
fn is_new(expr: &Expr<'_>) -> bool {
    match expr {
        Expr::BinOp(e) => matches!(e.op, BinOpKind::Add | BinOpKind::Mul | BinOpKind::Concat),
        Expr::Slice(_) | Expr::Filter(_) | Expr::Call(_) | Expr::List(_) | Expr::Map(_) => true,
        _ => false,
    }
}

/// Copies an expression, and measures its value, which an operation is about to read.
fn operand<'a>(expr: &Expr<'a>, depth: usize) -> Folded<Expr<'a>> {
    let copy = bare(expr, depth)?;
    let plain = match expr {
        Expr::Var(e) => SPECIAL.contains(&e.id),
        Expr::Const(_) | Expr::UnaryOp(_) | Expr::Compare(_) | Expr::Test(_) => true,
        _ => false,
    };
    Ok(match plain {
        true => copy,
        false => call(if is_new(expr) { VALUE } else { READ }, copy),
    })
}

/// Copies an expression, and measures the values that it reads.
fn bare<'a>(expr: &Expr<'a>, depth: usize) -> Folded<Expr<'a>> {
    let span = expr.span();
    let depth = below(depth, span)?;
    let maybe = |expr: &Option<Expr<'a>>| expr.as_ref().map(|expr| operand(expr, depth)).transpose();
    let list = |list: &[Expr<'a>]| list.iter().map(|expr| checked(expr, depth)).collect::<Folded<Vec<_>>>();
    Ok(match expr {
        Expr::Var(e) => Expr::Var(at(span, Var { id: e.id })),
        Expr::Const(e) => Expr::Const(at(span, Const { value: e.value.clone() })),
        Expr::Slice(e) => {
            let expr = operand(&e.expr, depth)?;
            let [start, stop, step] = [maybe(&e.start)?, maybe(&e.stop)?, maybe(&e.step)?];
            Expr::Slice(at(span, Slice { expr, start, stop, step }))
        }
        Expr::UnaryOp(e) => {
            let op = if matches!(e.op, UnaryOpKind::Not) { UnaryOpKind::Not } else { UnaryOpKind::Neg };
            Expr::UnaryOp(at(span, UnaryOp { op, expr: checked(&e.expr, depth)? }))
        }
        Expr::BinOp(e) => {
            let side = |side: &Expr<'a>| match e.op {
                BinOpKind::ScAnd | BinOpKind::ScOr => checked(side, depth),
                BinOpKind::Concat => Ok(call(TEXT, bare(side, depth)?)),
                // The compiler computes an operation on constants, unless they are wrapped.
                BinOpKind::Add | BinOpKind::Mul => {
                    Ok(call(if is_new(side) { VALUE } else { READ }, bare(side, depth)?))
                }
                _ => operand(side, depth),
            };
            let (left, right) = (side(&e.left)?, side(&e.right)?);
            Expr::BinOp(at(span, BinOp { op: e.op, left, right }))
        }
        Expr::Compare(e) => {
            let next = |one: &CompareOp<'a>| Ok(CompareOp { op: one.op, expr: operand(&one.expr, depth)? });
            let ops = e.ops.iter().map(next).collect::<Folded<_>>()?;
            Expr::Compare(at(span, Compare { expr: operand(&e.expr, depth)?, ops }))
        }
        Expr::IfExpr(e) => {
            let [test_expr, true_expr] = [checked(&e.test_expr, depth)?, checked(&e.true_expr, depth)?];
            let false_expr = e.false_expr.as_ref().map(|expr| checked(expr, depth)).transpose()?;
            Expr::IfExpr(at(span, IfExpr { test_expr, true_expr, false_expr }))
        }
        Expr::Filter(e) => {
            let expr = maybe(&e.expr)?;
            Expr::Filter(at(span, Filter { name: e.name, expr, args: arguments(&e.args, depth)? }))
        }
        Expr::Test(e) => {
            let expr = operand(&e.expr, depth)?;
            Expr::Test(at(span, Test { name: e.name, expr, args: arguments(&e.args, depth)? }))
        }
        Expr::GetAttr(e) => Expr::GetAttr(at(span, GetAttr { expr: checked(&e.expr, depth)?, name: e.name })),
        Expr::GetItem(e) => {
            let subscript_expr = operand(&e.subscript_expr, depth)?;
            Expr::GetItem(at(span, GetItem { expr: checked(&e.expr, depth)?, subscript_expr }))
        }
        Expr::Call(e) => Expr::Call(at(span, called(e, depth)?)),
        Expr::List(e) => Expr::List(at(span, List { items: list(&e.items)? })),
        Expr::Map(e) => {
            let keys = e.keys.iter().map(|key| operand(key, depth)).collect::<Folded<_>>()?;
            Expr::Map(at(span, Map { keys, values: list(&e.values)? }))
        }
    })
}

/// Copies a call, and measures its arguments, and the value whose method it calls.
fn called<'a>(call: &Spanned<Call<'a>>, depth: usize) -> Folded<Call<'a>> {
    let expr = match &call.expr {
        Expr::Var(_) => bare(&call.expr, depth)?,
        Expr::GetAttr(e) => {
            let below = below(depth, e.span())?;
            Expr::GetAttr(at(e.span(), GetAttr { expr: operand(&e.expr, below)?, name: e.name }))
        }
        other => operand(other, depth)?,
    };
    Ok(Call { expr, args: arguments(&call.args, depth)? })
}

fn arguments<'a>(arguments: &[CallArg<'a>], depth: usize) -> Folded<Vec<CallArg<'a>>> {
    let copy = |argument: &CallArg<'a>| {
        Ok(match argument {
            CallArg::Pos(expr) => CallArg::Pos(operand(expr, depth)?),
            CallArg::Kwarg(name, expr) => CallArg::Kwarg(name, operand(expr, depth)?),
            CallArg::PosSplat(expr) => CallArg::PosSplat(operand(expr, depth)?),
            CallArg::KwargSplat(expr) => CallArg::KwargSplat(operand(expr, depth)?),
        })
    };
    arguments.iter().map(copy).collect()
}

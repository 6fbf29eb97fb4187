//! Attention, and the ops on its queries and keys.

use crate::case::{Case, Heads, Run, Traced, both, one};
use kernels::attention::HEAD;
use std::num::NonZeroU32;
use stepscope::{Buffer, Result, Tensor, ops};

pub(crate) const CASES: &[&[(&str, Run)]] = &[
    &one!("attention", |c| {
        let [batch, tokens, heads] = c.extents([9, 16, 4]);
        c.longest((batch * tokens * heads).max(HEAD));
        let qkv = c.operand::<f32>("qkv", [3, batch, tokens, heads * HEAD])?;
        let (gains, dy) = (c.operand("gains", [2, HEAD])?, c.operand("dy", [batch, tokens, heads * HEAD])?);
        let (epsilon, scale) = (c.scalar("epsilon"), c.scalar("scale"));
        let (norm, form) = (ops::QkNorm::new(&gains, epsilon), ops::AttentionConfig::new(heads).scale(scale));
        let made = ops::attention(c.step, &qkv, Some(norm), &form)?;
        c.result("y", &made.out)?;
        let mut dgains = c.step.empty([2, HEAD])?;
        let backward = Some((norm, &mut dgains, false));
        c.result("dqkv", &ops::launch::attention_backward(c.step, &qkv, backward, &form, &made, &dy)?)?;
        c.result("dgains", &dgains)
    }),
    &both!("flash_attention", <S>, |c| {
        let heads = c.heads([3, 130, 3, 2, 12]);
        if S::IS_ROUNDED {
            // Measured by norm: each operand of a second product is rounded to BF16, and so is
            // delta's output.
            c.within(4.0 * 2f64.powi(-9));
        } else {
            c.longest((heads.tokens * heads.form.heads).max(heads.width));
        }
        attends::<S>(c, heads)
    }),
    &one!("flash_attention_tf32", |c| {
        let heads = c.heads([3, 130, 3, 2, 12]);
        // Measured by norm: both operands of four products are rounded.
        c.within(8.0 * 2f64.powi(-12));
        c.step.set_precision(ops::Precision::Tf32);
        let done = attends::<f32>(c, heads);
        c.step.set_precision(ops::Precision::F32);
        done
    }),
    &one!("attention_cached", |c| {
        let heads = c.heads([1, 1, 3, 2, 12]);
        let [tokens] = c.extents([40]);
        let row = heads.form.kv_heads * heads.width;
        c.longest(tokens.max(heads.width));
        let qkv = c.operand::<f32>("qkv", heads.shape)?;
        let mut cache = [Buffer::zeros(c.step.device(), tokens * row)?, Buffer::zeros(c.step.device(), tokens * row)?];
        let [keys, values] = &mut cache;
        let (mut keys, mut values) = (c.step.lend_mut(keys, [tokens, row])?, c.step.lend_mut(values, [tokens, row])?);
        // The last row belongs to the new token.
        ops::copy_into(c.step, &c.operand::<f32>("keys", [tokens, row])?, &mut keys)?;
        ops::copy_into(c.step, &c.operand::<f32>("values", [tokens, row])?, &mut values)?;
        let form = heads.form.causal();
        c.result("y", &ops::attention_cached(c.step, &qkv, [&mut keys, &mut values], tokens - 1, &form)?)
    }),
    &both!("qk_norm", <S>, |c| {
        let heads = c.heads([3, 60, 3, 2, 32]);
        let rows = heads.batch * heads.tokens * heads.form.heads;
        c.longest(rows.max(heads.width));
        let (qkv, dy) = (c.operand::<S>("qkv", heads.shape)?, c.operand("dy", heads.shape)?);
        let (gains, epsilon) = (c.operand("gains", [2, heads.width])?, c.scalar("epsilon"));
        let norm = ops::QkNorm::new(&gains, epsilon);
        let (y, inverse_rms) = ops::qk_norm(c.step, &qkv, norm, &heads.form)?;
        c.result("y", &y)?;
        let mut dgains = c.step.empty([2, heads.width])?;
        let dqkv = ops::launch::qk_norm_backward(c.step, &qkv, norm, &heads.form, &inverse_rms, dy, &mut dgains, false)?;
        c.result("dqkv", &dqkv)?;
        c.result("dgains", &dgains)
    }),
    &both!("rotary", <S>, |c| {
        let heads = c.heads([3, 60, 3, 2, 32]);
        c.longest(1);
        let (qkv, dy) = (c.operand::<S>("qkv", heads.shape)?, c.operand::<S>("dy", heads.shape)?);
        let rotary = ops::Rotary { offset: 100 * c.seed as u32, ..ops::Rotary::new(1000.0) };
        c.given("rotary", [2], &[1000, rotary.offset])?;
        c.result("y", &ops::rotary(c.step, &qkv, rotary, &heads.form)?)?;
        c.result("dqkv", &ops::launch::rotary_backward(c.step, dy, rotary, &heads.form)?)
    }),
];

/// Runs attention with every mask over these heads.
fn attends<'s, S: Traced>(c: &Case<'_, 's>, heads: Heads<'s>) -> Result<()> {
    let tokens = heads.batch * heads.tokens;
    let documents = c.random.borrow_mut().belows(tokens, 2);
    let lengths = c.random.borrow_mut().belows(heads.batch, 200);
    let documents = c.given("documents", [heads.batch, heads.tokens], &documents)?;
    let lengths = c.given("lengths", [heads.batch], &lengths)?;
    let form = heads.form.documents(documents).lengths(lengths);
    // All tokens, all earlier ones, or a window of earlier ones.
    let (sees, window) = match c.seed {
        0 => (ops::AttentionMask::Causal, u32::MAX),
        2 => (ops::AttentionMask::SlidingWindow(NonZeroU32::MIN.saturating_add(19)), 20),
        _ => (ops::AttentionMask::Full, 0),
    };
    c.given("window", [1], &[window])?;
    let (qkv, dy) = (c.operand::<S>("qkv", heads.shape)?, c.operand::<S>("dy", heads.output())?);
    let made = ops::attention(c.step, &qkv, None, &form.sees(sees))?;
    c.result("y", &made.out)?;
    let none = None::<(ops::QkNorm<'_, '_>, &mut Tensor<'_>, bool)>;
    c.result("dqkv", &ops::launch::attention_backward(c.step, &qkv, none, &form.sees(sees), &made, &dy)?)
}

//! The cases, one for each kernel, and the order in which they run.
//!
//! Invariants: results depend only on the case and its size, not on the device, the run or the
//! other cases. A case of the smallest size launches other kernels than its own only if their cases
//! precede it in [`in_order`]. `tests/kernels/same_bits.rs` tests both, and that every kernel has a
//! case.

#![forbid(unsafe_code)]

use super::case::Listed::{self, Both, Each, One};
use super::case::{Case, both, each};
use super::declared::{declared, declared_pointwise};
use super::inputs::Inputs;
use super::products::Bf16Kernel;
use super::{aligned, attention, attention_mma, grouped, products, products_tf32};
use cuda_std::launch::{PointerMut, Slice};
use half::bf16;
use kernels::checksum::{CHUNK, checksum};
use kernels::companded::{Code, RUN_WORDS};
use kernels::dropout::{draw, dropout};
use kernels::embedding::{merge_ids, rows_finish, sort_ids};
use kernels::flash_attention::{flash_bwd_dkv, flash_bwd_dq, flash_forward};
use kernels::flash_attention_mma::{
    flash_bwd_dkv_ds_mma, flash_bwd_dkv_mma, flash_bwd_dq_mma, flash_bwd_from_scores_mma, flash_bwd_scores_mma,
    flash_forward_mma,
};
use kernels::flash_attention_wgmma::{
    flash_bwd_dkv_ds_wgmma, flash_bwd_dkv_wgmma, flash_bwd_dq_wgmma, flash_bwd_from_scores_wgmma,
    flash_bwd_scores_wgmma, flash_forward_wgmma,
};
use kernels::guard::{PATTERN, guard_check, guard_write};
use kernels::loss::cross_entropy_of_rows;
use kernels::matmul::matmul;
use kernels::matmul_bf16::matmul_bf16;
use kernels::matmul_grouped::{matmul_grouped, matmul_grouped_of_bf16};
use kernels::matmul_mma::matmul_mma;
use kernels::matmul_wgmma::matmul_wgmma;
use kernels::matmul_wgmma_tf32::matmul_wgmma_tf32;
use kernels::split::split;
use kernels::update::{MasterType, RUN, StateType};
use kernels::{along, fold, lstm, reduce, scalars, strided};
use stepscope_core::{Device, DeviceKind, Element, OnDevice, Result, Source, Stored, Target, Tensor, ops};

/// Returns every GPU kernel and its case, in the order of the kernels' files.
pub fn cases() -> Vec<(&'static str, Case)> {
    LISTED.iter().flat_map(Listed::cases).collect()
}

/// Returns true if a device runs this kernel. A GPU opened without `wgmma` does not run the kernels
/// of warpgroups. The emulator runs every kernel.
pub fn runs_on(device: &Device, kernel: &str) -> bool {
    let description = device.description();
    description.kind != DeviceKind::Cuda
        || description.has_wgmma
        || !kernels::entries().any(|entry| entry.name == kernel && entry.is_warpgroup)
}

/// The kernels that other cases and uploads use. The cases of these kernels run first, so that a
/// fault of one is reported under its own name.
const FIRST: [&str; 12] = [
    "guard_write",
    "guard_check",
    "checksum",
    "fill_f32",
    "copy_f32",
    "fill_bf16",
    "copy_bf16",
    "sum_all_f32",
    "sum_rows_f32",
    "squared_norm_f32",
    "round_to_tf32",
    "align_along_k",
];

/// Returns [`cases`] in an order in which the kernels that other cases use come first.
pub fn in_order() -> Vec<(&'static str, Case)> {
    let mut cases = cases();
    // The sort is stable, so the others keep their order.
    cases.sort_by_key(|(name, _)| FIRST.iter().position(|first| first == name).unwrap_or(FIRST.len()));
    cases
}

/// All entries, in the order of the kernels' files.
const LISTED: &[Listed] = &[
    Each(|| declared("activation")),
    both!("gelu_bias_backward", <S>, |i| {
        i.rows::<S>(|i, x| {
            let (dy, mut db) = (i.normals(x.shape())?, i.gain(x)?);
            i.keep(&ops::launch::gelu_bias_backward(i.step, x, &dy, &mut db, true)?)?;
            i.keep(&db)
        })
    }),
    both!("cumulative_sum", <S>, |i| columns::<S>(i, |i, x, [n, inner]| {
        [0, 1].into_iter().try_for_each(|reverse| {
            let mut out = i.step.empty::<S>(x.shape())?;
            i.step.launch(along::cumulative_sum { x: x.slice(), n, inner, reverse, out: out.out() })?;
            i.keep(&out)
        })
    })),
    both!("lstm_forward", <S>, |i| cells::<S>(i, |i, gates, c, width| {
        let shape = [gates.len() / 4];
        let (mut c_out, mut h) = (i.step.empty::<S>(shape)?, i.step.empty::<S>(shape)?);
        i.step.launch(lstm::lstm_forward { gates, c, width, c_out: c_out.out(), h: h.out() })?;
        i.keep(&c_out)?;
        i.keep(&h)
    })),
    both!("lstm_backward", <S>, |i| cells::<S>(i, |i, gates, c, width| {
        let shape = [gates.len() / 4];
        let [c_out, dh, dc_out] = [i.normals::<S>(shape)?, i.normals::<S>(shape)?, i.normals::<S>(shape)?];
        let (mut dgates, mut dc) = (i.step.empty::<S>([gates.len()])?, i.step.empty::<S>([c.len()])?);
        let (dh, dc_out) = (dh.slice(), if c.is_empty() { Slice::empty() } else { dc_out.slice() });
        let c_out = c_out.slice();
        i.step.launch(lstm::lstm_backward { gates, c, c_out, dh, dc_out, width, dgates: dgates.out(), dc: dc.out() })?;
        i.keep(&dgates)?;
        i.keep(&dc)
    })),
    both!("take_along", <S>, |i| columns::<S>(i, |i, x, [n, inner]| {
        let (count, outer) = (n + 2, x.shape().elements() / (n * inner));
        let ids = i.random.borrow_mut().belows(outer * count * inner, n as u32 + 1);
        let ids = i.step.upload(&ids, [ids.len()])?;
        for strides in [[count * inner, inner, 1], [0, 1, 0]] {
            let mut out = i.step.empty::<S>([outer, count, inner])?;
            let (x, ids, out_of) = (x.slice(), ids.slice(), out.out());
            i.step.launch(along::take_along { x, ids, n, count, inner, strides, out: out_of })?;
            i.keep(&out)?;
        }
        Ok(())
    })),
    both!("add_along", <S>, |i| columns::<S>(i, |i, x, [count, inner]| {
        let (n, outer) = (count.div_ceil(3), x.shape().elements() / (count * inner));
        let ids = i.random.borrow_mut().belows(outer * count * inner, n as u32 + 1);
        let ids = i.step.upload(&ids, [ids.len()])?;
        for strides in [[count * inner, inner, 1], [0, 1, 0]] {
            let mut out = i.step.empty::<f32>([outer, n, inner])?;
            let (x, ids, out_of) = (x.slice(), ids.slice(), out.out());
            i.step.launch(along::add_along { x, ids, n, count, inner, strides, out: out_of })?;
            i.keep(&out)?;
        }
        Ok(())
    })),
    both!("one_hot", <S>, |i| {
        let ids = i.step.upload_indices(&i.random.borrow_mut().belows(37, 5), [37])?;
        i.keep(&ops::one_hot::<S>(i.step, &ids, 5)?)
    }),
    both!("top_k", <S>, |i| i.rows::<S>(|i, x| {
        let (rows, cols) = (x.shape().as_rows()[0], x.shape().as_rows()[1]);
        let count = cols.min(3);
        let mut out = i.step.empty::<u32>([rows, count])?;
        i.step.launch(along::top_k { x: x.slice(), cols, count, out: out.out() })?;
        i.keep(&out)
    })),
    One("adamw", |i| i.by_size(&[1, 1023, 70_003][..], &[1, 1023]).iter().try_for_each(|&length| adamw(i, length))),
    each!(kernels::adamw::adamw_small::VARIANTS, |i, formats| {
        let mut small = SmallUpdate::new(i, formats, &[Code::Signed, Code::Squares])?;
        let settings = [1e-2, 0.9, 0.999, 1e-8, 0.01, 0.19, 0.002, 1.0];
        let (hyper, squared_norm) = (i.step.upload(&settings, [8])?, ops::squared_norm(i.step, &small.gradients)?);
        let SmallUpdate { weights, halves, corrections, gradients, state } = &mut small;
        let [m, v] = state.as_mut_slice() else { unreachable!("two moments") };
        i.step.launch(kernels::adamw::adamw_small {
            formats,
            weights: weights.out(),
            has_bf16: 1,
            halves: halves.out(),
            corrections: corrections.out(),
            gradients: gradients.slice(),
            m: m.out(),
            v: v.out(),
            hyper: hyper.slice(),
            groups: Slice::empty(),
            squared_norm: squared_norm.slice(),
        })?;
        small.keep(i)
    }),
    both!("attention_forward", <S>, |i| {
        i.heads::<S>(|i, qkv, gains, _| {
            let (made, ..) = i.short_attention(qkv, gains)?;
            let ops::launch::AttentionKept::Short { probabilities, inverse_rms } = made.kept else {
                unreachable!("up to 16 tokens, normalized")
            };
            i.keep(&made.out)?;
            [probabilities, inverse_rms].iter().try_for_each(|result| i.keep(result))
        })
    }),
    both!("attention_backward", <S>, |i| {
        i.heads::<S>(|i, qkv, gains, dout| {
            let mut dgains = i.normals([2, 64])?;
            let (made, norm, config) = i.short_attention(qkv, gains)?;
            let dqkv = ops::launch::attention_backward(i.step, qkv, Some((norm, &mut dgains, true)), &config, &made, dout)?;
            i.keep(&dqkv)?;
            i.keep(&dgains)
        })
    }),
    One("cast_to_bf16", |i| i.flat(|i, [x, _]| i.keep(&ops::to_bf16(i.step, x)?))),
    One("cast_to_f32", |i| i.flat(|i, [x, _]| i.keep(&ops::to_f32(i.step, x)?))),
    One("checksum", |i| {
        let chunks = i.by_size(3, 1);
        let words =
            i.random.borrow_mut().normals(chunks * CHUNK + 5).into_iter().map(f32::to_bits).collect::<Vec<u32>>();
        let (x, mut sums) =
            (i.step.upload(&words, [words.len()])?, i.step.upload(&vec![0u32; 2 * chunks + 2], [2 * chunks + 2])?);
        i.step.launch(checksum { x: x.slice(), first: u32::MAX << 16, last: 0xffff, out: sums.out() })?;
        i.keep(&sums)
    }),
    One("clip_factor", |i| {
        // The whole size also has norms that are NaN.
        if i.by_size(true, false) { i.flat(|i, [x, _]| clip_factors(i, x)) } else { i.long(|i, x| clip_factors(i, x)) }
    }),
    One("draw", |i| {
        let mut generator = i.step.upload(&[1, 2, u32::MAX, 7], [4])?;
        let mut drawn = i.step.empty::<u32>([4])?;
        let (state, next) = generator.in_place();
        i.step.launch(draw { generator: state, next, draw: drawn.out() })?;
        i.keep(&generator)?;
        i.keep(&drawn)
    }),
    both!("dropout", <S>, |i| {
        let drawn = i.step.upload(&[3, 4, 5, 6], [4])?;
        i.flat::<S>(|i, [x, _]| {
            let (mut y, threshold) = (i.step.empty::<S>(x.shape())?, 1 << 30);
            let (x, draw) = (x.slice(), drawn.slice());
            i.step.launch(dropout { x, draw, call: 7, threshold, scale: 1.25, y: y.out() })?;
            i.keep(&y)
        })
    }),
    Each(declared_pointwise),
    both!("add_assign", <S>, |i| {
        i.flat::<S>(|i, [a, b]| {
            let mut out = ops::copy(i.step, a)?;
            ops::add_assign(i.step, &mut out, b)?;
            i.keep(&out)
        })
    }),
    both!("scale", <S>, |i| i.flat::<S>(|i, [x, _]| i.keep(&ops::scale(i.step, x, 0.1)?))),
    both!("scale_by", <S>, |i| {
        i.flat::<S>(|i, [x, y]| {
            let (factor, mut out) = (i.normals([1])?, ops::copy(i.step, y)?);
            i.keep(&ops::scale_by(i.step, x, &factor)?)?;
            ops::launch::scale_by_into(i.step, x, &factor, &mut out, true)?;
            i.keep(&out)
        })
    }),
    both!("add_bias", <S>, |i| {
        i.rows::<S>(|i, x| {
            let bias = i.normals([x.shape().as_rows()[1]])?;
            i.keep(&ops::add_bias(i.step, x, &bias)?)
        })
    }),
    both!("embedding_forward", <S>, |i| {
        i.rows::<f32>(|i, table| i.with_ids(table, |i, ids| i.keep(&ops::embedding::<S>(i.step, table, ids)?)))
    }),
    both!("gather", <S>, |i| {
        i.rows::<S>(|i, x| i.with_ids(x, |i, ids| i.keep(&ops::gather(i.step, x, ids)?)))
    }),
    One("sort_ids", |i| {
        i.sorted(|i, ids| {
            let (mut sorted, mut order) = (i.step.empty(ids.shape())?, i.step.empty(ids.shape())?);
            i.step.launch(sort_ids { ids: ids.slice(), sorted: sorted.out(), order: order.out() })?;
            i.keep(&sorted)?;
            i.keep(&order)
        })
    }),
    One("merge_ids", |i| {
        i.sorted(|i, ids| {
            // Up to five runs, sorted on the host. The kernel merges them in pairs.
            let (mut merged, mut order) = (i.step.empty(ids.shape())?, i.step.empty(ids.shape())?);
            let run = ids.shape().elements().div_ceil(5);
            let (sorted, places) = i.runs(ids, run)?;
            let (ids, places) = (sorted.slice(), places.slice());
            i.step.launch(merge_ids { ids, order: places, run, merged: merged.out(), merged_order: order.out() })?;
            i.keep(&merged)?;
            i.keep(&order)
        })
    }),
    One("group_places", |i| {
        for (tokens, each, groups) in i.by_size([(2000, 2, 9), (5, 8, 40)], [(15, 2, 4); 2]) {
            let ids = i.random.borrow_mut().belows(tokens * each, groups as u32);
            let all = ops::group_by(i.step, &i.step.upload_indices(&ids, [tokens, each])?, groups)?;
            i.keep(all.tokens().values())?;
            i.keep(all.places().values())?;
            i.keep(all.offsets())?;
        }
        Ok(())
    }),
    One("rows_finish", |i| {
        for (counts, cols) in
            i.by_size([([3, 65, 0, 700, 64], 64), ([0, 1, 300, 2, 129], 131)], [([3, 65, 0, 70, 2], 20); 2])
        {
            let each = counts.iter().enumerate();
            let sorted: Vec<u32> = each.flat_map(|(id, &count)| std::iter::repeat_n(id as u32, count)).collect();
            let windows = sorted.len().div_ceil(kernels::embedding::CHUNK);
            let (sorted, partials) = (i.step.upload(&sorted, [sorted.len()])?, i.normals::<f32>([windows, cols])?);
            // The last id has no row.
            let (mut out, length) = (i.normals::<f32>([4, cols])?, 4 * cols);
            let (sorted, partials) = (sorted.slice(), partials.slice());
            i.step.launch(rows_finish { sorted, partials, cols, length, out: out.out() })?;
            i.keep(&out)?;
        }
        Ok(())
    }),
    both!("rows_sum", <S>, |i| i.embedded::<S>(5)),
    both!("fill", <S>, |i| {
        let lengths = i.by_size(&[1, 1025, 4099][..], &[1027]);
        lengths.iter().try_for_each(|&length: &usize| {
            let mut out = i.step.empty::<S>([length])?;
            ops::fill_into(i.step, &mut out, 0.1)?;
            i.keep(&out)
        })
    }),
    both!("copy", <S>, |i| i.flat::<S>(|i, [x, _]| i.keep(&ops::copy(i.step, x)?))),
    each!(flash_forward::VARIANTS, |i, shape| attention::forward(i, shape)),
    each!(flash_bwd_dq::VARIANTS, |i, shape| attention::queries(i, shape)),
    each!(flash_bwd_dkv::VARIANTS, |i, shape| attention::keys(i, shape)),
    both!("flash_delta", <S>, |i| attention::delta::<S>(i)),
    each!(flash_forward_mma::<'_, f32>::VARIANTS, |i, shape, stored| if stored == <bf16 as Element>::NAME {
        attention_mma::forward::<bf16>(i, shape)
    } else {
        attention_mma::forward::<f32>(i, shape)
    }),
    each!(flash_bwd_dq_mma::<'_, f32>::VARIANTS, |i, shape, stored| if stored == <bf16 as Element>::NAME {
        attention_mma::queries::<bf16>(i, shape)
    } else {
        attention_mma::queries::<f32>(i, shape)
    }),
    each!(flash_bwd_dkv_mma::<'_, f32>::VARIANTS, |i, shape, stored| if stored == <bf16 as Element>::NAME {
        attention_mma::keys::<bf16>(i, shape)
    } else {
        attention_mma::keys::<f32>(i, shape)
    }),
    each!(flash_bwd_dkv_ds_mma::<'_, f32>::VARIANTS, |i, shape, _stored| attention_mma::keys_and_ds(i, shape)),
    each!(flash_bwd_scores_mma::<'_, f32>::VARIANTS, |i, _shape, _stored| attention_mma::scores(i)),
    each!(flash_bwd_from_scores_mma::<'_, f32>::VARIANTS, |i, variant, _stored| attention_mma::from_scores(i, variant)),
    each!(flash_forward_wgmma::VARIANTS, |i, shape| attention_mma::forward_of_warpgroup(i, shape)),
    each!(flash_bwd_dq_wgmma::VARIANTS, |i, shape| attention_mma::queries_of_warpgroup(i, shape)),
    each!(flash_bwd_dkv_wgmma::VARIANTS, |i, shape| attention_mma::keys_of_warpgroup(i, shape)),
    each!(flash_bwd_dkv_ds_wgmma::VARIANTS, |i, shape| attention_mma::keys_and_ds_of_warpgroup(i, shape)),
    each!(flash_bwd_scores_wgmma::VARIANTS, |i, shape| attention_mma::scores_of_warpgroup(i, shape)),
    each!(flash_bwd_from_scores_wgmma::VARIANTS, |i, variant| attention_mma::from_scores_of_warpgroup(i, variant)),
    both!("fold_sum", <S>, |i| folded::<S>(i, |i, x, [reduced, inner], out| {
        i.step.launch(fold::fold_sum { x: x.slice(), reduced, inner, scale: 0.3, out: out.out() })
    })),
    both!("fold_max", <S>, |i| folded::<S>(i, |i, x, [reduced, inner], out| {
        i.step.launch(fold::fold_max { x: x.slice(), reduced, inner, scale: 1.0, out: out.out() })
    })),
    both!("fold_min", <S>, |i| folded::<S>(i, |i, x, [reduced, inner], out| {
        i.step.launch(fold::fold_min { x: x.slice(), reduced, inner, scale: 1.0, out: out.out() })
    })),
    both!("find_max", <S>, |i| columns::<S>(i, |i, x, [reduced, inner]| {
        let mut out = i.step.empty::<u32>([x.shape().elements() / reduced])?;
        i.step.launch(fold::find_max { x: x.slice(), reduced, inner, out: out.out() })?;
        i.keep(&out)
    })),
    both!("find_min", <S>, |i| columns::<S>(i, |i, x, [reduced, inner]| {
        let mut out = i.step.empty::<u32>([x.shape().elements() / reduced])?;
        i.step.launch(fold::find_min { x: x.slice(), reduced, inner, out: out.out() })?;
        i.keep(&out)
    })),
    Each(|| declared("gate")),
    both!("swiglu_forward", <S>, |i| {
        i.flat::<S>(|i, [gate, up]| i.keep(&ops::swiglu(i.step, gate, up)?))?;
        i.tokens(|i, [a, b, c]| i.keep(&ops::swiglu_packed(i.step, &i.normals::<S>([a, b, 2 * c])?)?))
    }),
    both!("swiglu_backward", <S>, |i| {
        i.flat::<S>(|i, [gate, up]| {
            let dy = i.normals(up.shape())?;
            ops::launch::swiglu_backward(i.step, gate, up, &dy)?.iter().try_for_each(|result| i.keep(result))
        })?;
        i.tokens(|i, [a, b, c]| {
            let (x, dy) = (i.normals::<S>([a, b, 2 * c])?, i.normals([a, b, c])?);
            i.keep(&ops::launch::swiglu_packed_backward(i.step, &x, &dy)?)
        })
    }),
    One("guard_write", |i| {
        let mut block = i.step.upload(&[bf16::ONE; 200], [200])?;
        i.step.launch(guard_write { guard: block.out().part(101..199), length: 98 })?;
        i.keep(&block)
    }),
    One("guard_check", |i| {
        let halves: Vec<bf16> = (0..200).map(|at| if at == 150 { bf16::ONE } else { PATTERN }).collect();
        let (block, mut found) = (i.step.upload(&halves, [200])?, i.step.upload(&[0; 3], [3])?);
        for (place, start) in [101, 151, 200].into_iter().enumerate() {
            let guard = block.slice().part(start..200);
            i.step.launch(guard_check { guard, place, found: found.out() })?;
        }
        i.keep(&found)
    }),
    both!("layer_norm_forward", <S>, |i| {
        i.rows::<S>(|i, x| {
            let (gain, bias, residual) = (i.gain(x)?, i.gain(x)?, i.normals(x.shape())?);
            let (h, out) = ops::layer_norm_residual(i.step, x, &residual, &gain, &bias, 1e-5)?;
            [&h, &out.y].into_iter().try_for_each(|result| i.keep(result))?;
            [&out.mean, &out.inverse_std].into_iter().try_for_each(|result| i.keep(result))?;
            i.keep(&ops::layer_norm(i.step, x, &gain, &bias, 1e-5)?.y)
        })
    }),
    both!("layer_norm_backward", <S>, |i| {
        i.rows::<S>(|i, x| {
            let (gain, bias, mut sums) = (i.gain(x)?, i.gain(x)?, [i.gain(x)?, i.gain(x)?]);
            let (dy, so_far) = (i.normals(x.shape())?, i.normals(x.shape())?);
            let out = ops::layer_norm(i.step, x, &gain, &bias, 1e-5)?;
            let kept = [&out.mean, &out.inverse_std];
            let dx =
                ops::launch::layer_norm_backward(i.step, x, &gain, kept, &dy, Some(so_far), sums.each_mut(), [true, false])?;
            i.keep(&dx)?;
            sums.iter().try_for_each(|sum| i.keep(sum))
        })
    }),
    both!("cross_entropy", <S>, |i| {
        fn of<'s, S: Stored>(i: &Inputs<'_, 's>, logits: &Tensor<'s, S>) -> Result<()> {
            let labels = i.labels(logits)?;
            let labels = i.step.lend(&labels, [labels.len()])?;
            let rules = ops::LabelRules::default().weighted(0.1);
            let (loss, dlogits) = ops::cross_entropy_by(i.step, logits, &OnDevice(&labels), rules)?;
            i.keep(&loss)?;
            i.keep(&dlogits)?;
            let rules = ops::LabelRules { smoothing: 0.1, ignore: true, weight: Some(0.1) };
            let (loss, dlogits) = ops::cross_entropy_by(i.step, logits, &OnDevice(&labels), rules)?;
            i.keep(&loss)?;
            i.keep(&dlogits)
        }
        i.rows::<S>(of)?;
        // A row of whole vectors that a block shares.
        of::<S>(i, &i.normals([2, 4100])?)
    }),
    both!("cross_entropy_of_rows", <S>, |i| {
        fn of<'s, S: Stored>(i: &Inputs<'_, 's>, logits: &Tensor<'s, S>) -> Result<()> {
            let ([rows, classes], labels) = (logits.shape().as_rows(), i.labels(logits)?);
            let (labels, dlosses) = (i.step.lend(&labels, [rows])?, i.normals([rows])?);
            let (mut losses, mut dlogits) = (i.step.empty([rows])?, i.step.empty(logits.shape())?);
            i.step.launch(cross_entropy_of_rows {
                logits: logits.slice(),
                labels: labels.slice(),
                classes,
                gradients: 0,
                dlosses: Slice::empty(),
                losses: losses.out(),
                dlogits: PointerMut::empty(),
            })?;
            i.step.launch(cross_entropy_of_rows {
                logits: logits.slice(),
                labels: labels.slice(),
                classes,
                gradients: 1,
                dlosses: dlosses.slice(),
                losses: PointerMut::empty(),
                dlogits: dlogits.out(),
            })?;
            i.keep(&losses)?;
            i.keep(&dlogits)
        }
        i.rows::<S>(of)?;
        of::<S>(i, &i.normals([2, 4100])?)
    }),
    both!("element_loss", <S>, |i| {
        i.long::<S>(|i, x| {
            let target = i.normals(x.shape())?;
            let squared = ops::squared_error(i.step, x, &target, Some(0.1))?;
            let binary = ops::binary_cross_entropy(i.step, x, &target, Some(0.1))?;
            [squared, binary].iter().try_for_each(|(loss, dx)| i.keep(loss).and_then(|()| i.keep(dx)))
        })
    }),
    each!(matmul::VARIANTS, |i, tile| products::product(i, tile), if |(_, tile)| !tile.is_on_cpu()),
    both!("sum_splits", <S>, |i| products::splits::<S>(i)),
    each!(matmul_mma::VARIANTS, |i, tile| products::mma_product(i, tile)),
    each!(matmul_bf16::<'_, f32>::VARIANTS, |i, variant, stored| if stored == <bf16 as Element>::NAME {
        products::bf16_product::<bf16>(i, Bf16Kernel::Mma(variant))
    } else {
        products::bf16_product::<f32>(i, Bf16Kernel::Mma(variant))
    }),
    each!(matmul_grouped::VARIANTS, |i, tile| grouped::products(i, tile), if |(_, tile)| !tile.is_on_cpu()),
    each!(matmul_grouped_of_bf16::<'_, f32>::VARIANTS, |i, variant, _stored| grouped::bf16_products(i, variant)),
    One("align_rows", aligned::copies),
    each!(matmul_wgmma::<'_, f32>::VARIANTS, |i, variant, stored| if stored == <bf16 as Element>::NAME {
        products::bf16_product::<bf16>(i, Bf16Kernel::Wgmma(variant))
    } else {
        products::bf16_product::<f32>(i, Bf16Kernel::Wgmma(variant))
    }),
    each!(matmul_wgmma_tf32::VARIANTS, |i, variant| products_tf32::product(i, variant)),
    One("align_along_k", products_tf32::copies),
    both!("combine_forward", <S>, |i| grouped::combined::<S>(i, |i, x, gates, groups| {
        i.keep(&ops::combine(i.step, x, Some(gates), groups)?)?;
        i.keep(&ops::combine(i.step, x, None::<&Tensor<'_>>, groups)?)
    })),
    both!("combine_backward", <S>, |i| grouped::combined::<S>(i, |i, x, gates, groups| {
        let dy = i.normals::<S>([gates.shape().as_rows()[0], x.shape().as_rows()[1]])?;
        let (dx, dgates) = ops::launch::combine_backward(i.step, x, gates, &dy, groups)?;
        i.keep(&dx)?;
        i.keep(&dgates)
    })),
    both!("nf4_decode", <S>, |i| i.decoded::<S>()),
    both!("rms_norm_forward", <S>, |i| {
        i.rows::<S>(|i, x| {
            let (y, scale) = ops::rms_norm(i.step, x, &i.gain(x)?, 1e-6)?;
            i.keep(&y)?;
            i.keep(&scale)?;
            let (h, y, scale) = ops::rms_norm_residual(i.step, x, &i.normals(x.shape())?, &i.gain(x)?, 1e-6)?;
            i.keep(&h)?;
            i.keep(&y)?;
            i.keep(&scale)
        })
    }),
    both!("rms_norm_backward", <S>, |i| {
        i.rows::<S>(|i, x| {
            let (mut gain, dy, so_far) = (i.gain(x)?, i.normals(x.shape())?, i.normals(x.shape())?);
            let (_, scale) = ops::rms_norm(i.step, x, &gain, 1e-6)?;
            let weights = ops::copy(i.step, &gain)?;
            let dx = ops::launch::rms_norm_backward(i.step, x, &weights, &scale, &dy, Some(so_far), &mut gain, true)?;
            i.keep(&dx)?;
            i.keep(&gain)
        })
    }),
    One("round_to_tf32", products::rounding),
    both!("qk_norm_forward", <S>, |i| attention::qk_norm::<S>(i)),
    both!("qk_norm_backward", <S>, |i| attention::qk_norm_backward::<S>(i)),
    both!("sum_columns", <S>, |i| {
        i.rows::<S>(|i, x| {
            let [rows, cols] = x.shape().as_rows();
            i.sums(
                rows,
                || ops::sum_columns(i.step, x),
                |scale, accumulate, out| {
                    i.step.launch(reduce::sum_columns { x: x.slice(), cols, scale, accumulate, out })
                },
            )
        })
    }),
    both!("sum_rows", <S>, |i| {
        i.rows::<S>(|i, x| {
            let ([rows, cols], chunk) = (x.shape().as_rows(), 128);
            i.sums(
                rows.div_ceil(chunk) * cols,
                || ops::sum_rows(i.step, x),
                |scale, accumulate, out| {
                    i.step.launch(reduce::sum_rows { x: x.slice(), cols, chunk, scale, accumulate, out })
                },
            )
        })
    }),
    both!("sum_all", <S>, |i| {
        i.long::<S>(|i, x| {
            let blocks = x.shape().elements().div_ceil(kernels::block::CHUNK);
            i.sums(
                blocks,
                || ops::sum(i.step, x),
                |scale, accumulate, out| i.step.launch(reduce::sum_all { x: x.slice(), scale, accumulate, out }),
            )
        })
    }),
    both!("squared_norm", <S>, |i| i.long::<S>(|i, x| i.keep(&ops::squared_norm(i.step, x)?))),
    both!("max_all", <S>, |i| i.long::<S>(|i, x| i.keep(&ops::max(i.step, x)?))),
    both!("max_columns", <S>, |i| i.rows::<S>(|i, x| i.keep(&ops::max_columns(i.step, x)?))),
    both!("argmax_columns", <S>, |i| i.rows::<S>(|i, x| i.keep(&ops::argmax_columns(i.step, x)?))),
    both!("rotary", <S>, |i| attention::rotary::<S>(i)),
    both!("rotary_pairs", <S>, |i| attention::rotary_pairs::<S>(i)),
    One("scalars", |i| {
        (scalars::EXP..=scalars::GELU_EXACT).try_for_each(|function| {
            // In the smallest size from 0.01 to 10, with alternating signs.
            let (length, first, stride) =
                i.by_size(((1 << 17) + 3, 0x8000_0001, 32_749), (4099, 0x3c23_d70b, 0x8000_4fd9));
            let mut y = i.step.empty([length])?;
            i.step.launch(scalars::scalars { y: y.out(), length, function, first, stride })?;
            i.keep(&y)
        })
    }),
    One("sgd", |i| i.by_size(&[1, 1023, 70_003][..], &[1, 1023]).iter().try_for_each(|&length| sgd(i, length))),
    each!(kernels::sgd::sgd_small::VARIANTS, |i, formats| {
        let mut small = SmallUpdate::new(i, formats, &[Code::Signed])?;
        let (hyper, squared_norm) =
            (i.step.upload(&[1e-2, 0.9, 0.01, 1.0, 1.0], [5])?, ops::squared_norm(i.step, &small.gradients)?);
        let SmallUpdate { weights, halves, corrections, gradients, state } = &mut small;
        i.step.launch(kernels::sgd::sgd_small {
            formats,
            weights: weights.out(),
            has_bf16: 1,
            halves: halves.out(),
            corrections: corrections.out(),
            gradients: gradients.slice(),
            velocity: state[0].out(),
            hyper: hyper.slice(),
            groups: Slice::empty(),
            squared_norm: squared_norm.slice(),
        })?;
        small.keep(i)
    }),
    Each(|| declared("softmax")),
    One("join_masters", |i| {
        i.by_size(&[1, 1023, 70_003][..], &[1, 1023]).iter().try_for_each(|&length: &usize| {
            let words = i.random.borrow_mut().belows(length.div_ceil(4), u32::MAX);
            let halves: Vec<bf16> = i
                .random
                .borrow_mut()
                .belows(length, 1 << 16)
                .into_iter()
                .map(|half| bf16::from_bits(half as u16))
                .collect();
            let (halves, corrections) = (i.step.upload(&halves, [length])?, i.step.upload(&words, [words.len()])?);
            let mut out = i.step.empty::<f32>([length])?;
            let (halves, corrections) = (halves.slice(), corrections.slice());
            i.step.launch(kernels::split_masters::join_masters { halves, corrections, out: out.out() })?;
            i.keep(&out)
        })
    }),
    both!("copy_strided", <S>, |i| {
        // A transpose, a flip that repeats, and rows of vectors between others.
        let layouts: [([usize; 20], usize); 3] = [
            ([1, 1, 1, 3, 5, 7, 0, 0, 0, 35, 1, 5, 0, 0, 0, 0, 35, 7, 1, 0], 105),
            ([1, 1, 1, 3, 5, 7, 0, 0, 0, 0, 7, usize::MAX, 6, 0, 0, 0, 35, 7, 1, 0], 105),
            ([1, 1, 1, 3, 5, 8, 0, 0, 0, 40, 8, 1, 0, 0, 0, 0, 72, 12, 1, 4], 120),
        ];
        for (layout, length) in layouts {
            let (x, mut out) = (i.normals::<S>([120])?, i.normals::<S>([220])?);
            i.step.launch(strided::copy_strided { x: x.slice(), layout, length, out: out.out() })?;
            i.keep(&out)?;
        }
        Ok(())
    }),
    One("sum_parts", |i| {
        for (count, pitch) in i.by_size(&[(1, 8), (2, 4100), (8, 1028), (64, 12)][..], &[(8, 1028)]) {
            let mut out = i.step.empty([pitch - 3])?;
            ops::launch::sum_parts_into(i.step, &i.normals([*count, *pitch])?, &mut out)?;
            i.keep(&out)?;
        }
        Ok(())
    }),
    both!("mean_tokens_forward", <S>, |i| i.tokens(|i, shape| i.keep(&ops::mean_tokens(i.step, &i.normals::<S>(shape)?)?))),
    both!("mean_tokens_backward", <S>, |i| {
        i.tokens(|i, [samples, tokens, cols]| {
            i.keep(&ops::launch::mean_tokens_backward(i.step, &i.normals::<S>([samples, cols])?, [samples, tokens, cols])?)
        })
    }),
    both!("transpose", <S>, |i| {
        i.rows::<S>(|i, x| i.keep(&ops::transpose(i.step, x)?))?;
        i.tokens(|i, shape| i.keep(&ops::transpose(i.step, &i.normals::<S>(shape)?)?))
    }),
];

/// Runs the op on arrays `[outer, n, inner]`.
fn columns<S: Stored>(
    i: &Inputs<'_, '_>,
    op: impl for<'s> Fn(&Inputs<'_, 's>, &Tensor<'s, S>, [usize; 2]) -> Result<()>,
) -> Result<()> {
    let smallest: [[usize; 3]; 2] = [[2, 37, 5], [3, 40, 1]];
    for &[outer, n, inner] in i.by_size(&[[3, 5, 7], [2, 70, 33], [1, 300, 1], [9, 40, 1]][..], &smallest) {
        op(i, &i.normals([outer, n, inner])?, [n, inner])?;
    }
    Ok(())
}

/// Runs the op on gates of cells, with and without a state before.
fn cells<S: Stored>(
    i: &Inputs<'_, '_>,
    op: impl for<'s> Fn(&Inputs<'_, 's>, Slice<'_, S>, Slice<'_, S>, usize) -> Result<()>,
) -> Result<()> {
    for &[rows, width] in i.by_size(&[[3, 7], [40, 36], [5, 640]][..], &[[3, 7], [5, 36]]) {
        let (gates, c) = (i.normals::<S>([rows, 4 * width])?, i.normals::<S>([rows, width])?);
        op(i, gates.slice(), c.slice(), width)?;
        op(i, gates.slice(), Slice::empty(), width)?;
    }
    Ok(())
}

/// Keeps reductions of arrays `[outer, reduced, inner]`, also in several chunks.
fn folded<S: Stored>(
    i: &Inputs<'_, '_>,
    op: impl for<'s> Fn(&Inputs<'_, 's>, &Tensor<'s, S>, [usize; 2], &mut Tensor<'s>) -> Result<()>,
) -> Result<()> {
    let smallest: [[usize; 3]; 2] = [[2, 37, 40], [9, 150, 1]];
    for &[outer, n, inner] in i.by_size(&[[3, 5, 7], [2, 1030, 70], [1, 3000, 1], [20, 200, 1]][..], &smallest) {
        let mut out = i.step.empty([outer, n.div_ceil(fold::CHUNK), inner])?;
        op(i, &i.normals::<S>([outer, n, inner])?, [n, inner], &mut out)?;
        i.keep(&out)?;
    }
    Ok(())
}

/// Calls `update` with the settings of each parameter group as the only one, then with all of them.
/// Among all, one run in three has a group that does not exist.
fn in_groups<'s, const LEN: usize>(
    i: &Inputs<'_, 's>,
    length: usize,
    settings: [[f32; LEN]; 2],
    update: impl Fn(&Tensor<'s>, Option<&Tensor<'s, u32>>) -> Result<()>,
) -> Result<()> {
    settings.iter().try_for_each(|only| update(&i.step.upload(only, [1, LEN])?, None))?;
    let runs = length.div_ceil(RUN);
    let groups: Vec<u32> = (1..=runs as u32).map(|run| run % 3).collect();
    update(&i.step.upload(settings.as_flattened(), [2, LEN])?, Some(&i.step.upload(&groups, [runs])?))
}

/// Tests parameter groups with and without clipping and decay.
fn adamw(i: &Inputs<'_, '_>, length: usize) -> Result<()> {
    let settings = [[1e-2, 0.9, 0.999, 1e-8, 0.01, 0.19, 0.002, 1.0], [1e-3, 0.8, 0.99, 1e-6, 0.0, 0.2, 0.01, 0.0]];
    in_groups(i, length, settings, |hyper, groups| {
        let (mut weights, gradients, mut first) = (i.normals([length])?, i.normals([length])?, i.normals([length])?);
        let mut second = i.step.upload(&i.random.borrow_mut().uniforms(length, 0.0, 2.0), [length])?;
        let (mut copy, norm) = (i.step.empty([length])?, ops::squared_norm(i.step, &gradients)?);
        ops::adamw(i.step, &mut weights, Some(&mut copy), &gradients, &mut first, &mut second, hyper, groups, &norm)?;
        [&weights, &first, &second].into_iter().try_for_each(|tensor| i.keep(tensor))?;
        i.keep(&copy)
    })
}

/// The tensors of an update of weights or state that are not stored in f32.
struct SmallUpdate<'s> {
    weights: Tensor<'s>,
    halves: Tensor<'s, bf16>,
    corrections: Tensor<'s, u32>,
    gradients: Tensor<'s>,
    state: Vec<Tensor<'s, u32>>,
}

impl<'s> SmallUpdate<'s> {
    /// Makes the tensors of these types, with a part of the state for each code.
    fn new(i: &Inputs<'_, 's>, (masters, state): (MasterType, StateType), codes: &[Code]) -> Result<Self> {
        let runs = i.by_size(1100, 3);
        let length = runs * RUN;
        let weights = i.random.borrow_mut().normals(length);
        let gradients = i.normals([length])?;
        let is_split = masters == MasterType::Split;
        let halves: Vec<bf16> = weights.iter().map(|&weight| bf16::from_bits(split(weight).0 as u16)).collect();
        let corrections = i.random.borrow_mut().belows(if is_split { length / 4 } else { 0 }, u32::MAX);
        let weights = if is_split { &[] } else { &weights[..] };
        let words = |code: &Code| {
            let mut random = i.random.borrow_mut();
            let words = match state {
                StateType::F32 if *code == Code::Squares => bits(&random.uniforms(length, 0.0, 2.0)),
                StateType::F32 => bits(&random.normals(length)),
                StateType::Bits8 => {
                    let scales = random.uniforms(runs, 0.0, 2.0);
                    let run = |scale: f32| [random.belows(RUN_WORDS - 1, u32::MAX), vec![scale.to_bits()]].concat();
                    scales.into_iter().flat_map(run).collect()
                }
            };
            i.step.upload(&words, [words.len()])
        };
        Ok(Self {
            weights: i.step.upload(weights, [weights.len()])?,
            halves: i.step.upload(&halves, [length])?,
            corrections: i.step.upload(&corrections, [corrections.len()])?,
            gradients,
            state: codes.iter().map(words).collect::<Result<_>>()?,
        })
    }

    fn keep(&self, i: &Inputs<'_, 's>) -> Result<()> {
        i.keep(&self.weights)?;
        i.keep(&self.halves)?;
        i.keep(&self.corrections)?;
        self.state.iter().try_for_each(|state| i.keep(state))
    }
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

fn clip_factors<'s>(i: &Inputs<'_, 's>, x: &Tensor<'s>) -> Result<()> {
    let norm = ops::squared_norm(i.step, x)?;
    [0.0, 0.1, 1e3].into_iter().try_for_each(|most| i.keep(&ops::clip_factor(i.step, &norm, most)?))
}

/// Tests both kinds of momentum, with and without clipping.
fn sgd(i: &Inputs<'_, '_>, length: usize) -> Result<()> {
    let settings = [[1e-2, 0.9, 0.01, 1.0, 0.0], [1e-2, 0.5, 0.1, 0.0, 1.0]];
    in_groups(i, length, settings, |hyper, groups| {
        let (mut weights, gradients, mut velocity) = (i.normals([length])?, i.normals([length])?, i.normals([length])?);
        let (mut copy, norm) = (i.step.empty([length])?, ops::squared_norm(i.step, &gradients)?);
        ops::sgd(i.step, &mut weights, Some(&mut copy), &gradients, &mut velocity, hyper, groups, &norm)?;
        [&weights, &velocity].into_iter().try_for_each(|tensor| i.keep(tensor))?;
        i.keep(&copy)
    })
}

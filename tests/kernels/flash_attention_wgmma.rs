//! Tests of the attention kernels of warpgroups: the tests of [`crate::flash_attention_mma`] and
//! [`crate::flash_masks`] in BF16, on an emulator that has the instruction. A GPU that has it runs
//! those tests with these kernels anyway.

use crate::flash_attention_mma::{assert_near, reads_no_padding, sees_nothing_else, takes_extreme_scores};
use crate::flash_masks;
use crate::flash_reference::{Inputs, PLAIN, SETUPS, Setup};
use crate::hostile::attack;
use crate::support::bits;
use kernels::flash_attention::CAUSAL;
use kernels::flash_attention_wgmma::{
    FORWARD, KEYS, QUERIES, dout_map, flash_bwd_dkv_wgmma, flash_bwd_dq_wgmma, flash_forward_wgmma, qkv_map,
};
use kernels::qkv_layout::QkvLayout;
use std::time::Duration;
use stepscope::device::MatrixInstruction;
use stepscope::ops::AttentionMask;
use stepscope::tensor::{Source as _, Target as _};
use stepscope::{Arena, Capacity, Device, DeviceKind, Result, bf16};

/// Opens an emulator that runs kernels of warpgroups.
fn emulator() -> Device {
    let builder = Device::builder(DeviceKind::Emulated).matrix_instruction(MatrixInstruction::Wgmma);
    let device = builder.deadline(Duration::from_secs(600)).open().unwrap_or_else(|reason| panic!("{reason}"));
    assert!(device.description().has_wgmma);
    device
}

#[test]
fn against_float64() {
    let device = emulator();
    for setup in SETUPS.into_iter().filter(|setup| setup.width.is_multiple_of(8)) {
        assert_near::<bf16>(&device, setup);
    }
}

/// Several tiles of keys, of which each warpgroup sees a part.
#[test]
fn against_float64_over_many_tiles() {
    let device = emulator();
    let long = Setup { tokens: 450, sees: AttentionMask::Causal, ..PLAIN };
    for width in [64, 104, 256] {
        assert_near::<bf16>(&device, Setup { width, ..long });
    }
}

#[test]
fn few_tokens_under_every_mask() {
    flash_masks::check_bf16(&emulator(), [17, 64]);
}

#[test]
fn masked_tokens_change_nothing() {
    sees_nothing_else::<bf16>(&emulator());
}

#[test]
fn padding_is_never_read() {
    reads_no_padding::<bf16>(&emulator());
}

#[test]
fn extreme_scores() {
    takes_extreme_scores::<bf16>(&emulator());
}

/// A block computes the same bits wherever in its list a tile of queries is. A head has three
/// tiles, of which the first has fewer rows. With one block or four, sections end with empty
/// slots. Nor do pairs of tiles of keys change a bit.
#[test]
fn grid_changes_no_bit() {
    let setup = Setup { batch: 2, tokens: 450, heads: [5, 1], sees: AttentionMask::Causal, ..PLAIN };
    let values: Vec<bf16> = Inputs::new(setup).qkv.iter().map(|&x| bf16::from_f32(x)).collect();
    let mut arena = Arena::builder(&emulator()).capacity(Capacity::mib(16)).build().unwrap();
    let results = arena
        .step(|step| {
            let qkv = step.upload(&values, setup.shape())?;
            let none = step.upload(&[0_u32; 0], [0])?;
            let dout = step.upload(&values[..2 * 450 * 5 * 64], [2, 450, 5 * 64])?;
            let delta = step.upload(&[0.5; 2 * 5 * 450], [2, 5, 450])?;
            macro_rules! launch {
                (backward $kernel:ident { $($arguments:tt)* }) => {{
                    let dout_map = dout_map(dout.slice(), 5, 64);
                    launch!($kernel { delta: delta.slice(), dout: dout.slice(), dout_map, $($arguments)* });
                }};
                ($kernel:ident { $($arguments:tt)* }) => {
                    step.launch($kernel {
                        qkv: qkv.slice(),
                        qkv_map: qkv_map(qkv.slice(), [5, 1, 64], false),
                        documents: none.slice(),
                        lengths: none.slice(),
                        samples: 2,
                        layout: QkvLayout { tokens: 450, heads: 5, kv_heads: 1, width: 64, stacked: 0 },
                        window: CAUSAL,
                        scale: 0.125,
                        $($arguments)*
                    })?
                };
            }
            [1, 4, 5, 1000]
                .into_iter()
                .map(|blocks| {
                    let (mut out, mut lse) = (step.empty::<bf16>([2, 450, 5 * 64])?, step.empty([2, 5, 450])?);
                    launch!(flash_forward_wgmma { shape: FORWARD[0], blocks, out: out.out(), lse: lse.out() });
                    let mut dqkv = step.upload(&values, setup.shape())?;
                    launch!(backward flash_bwd_dq_wgmma { shape: QUERIES[0], blocks, lse: lse.slice(), dqkv: dqkv.out() });
                    let pairs = blocks % 2;
                    launch!(backward flash_bwd_dkv_wgmma { shape: KEYS[0], pairs, lse: lse.slice(), dqkv: dqkv.out() });
                    Ok((step.read(&out)?, bits(&step.read(&lse)?), step.read(&dqkv)?))
                })
                .collect::<Result<Vec<_>>>()
        })
        .unwrap();
    assert!(results.windows(2).all(|pair| pair[0] == pair[1]));
}

attack! {
    flash_attention_wgmma::flash_forward_wgmma by shape {
        qkv: halves 256, qkv_map: map (256, [8, 8, 4], [32, 8], 64_u32), documents: u32s 8, lengths: u32s 0,
        samples: number 2, layout: qkv [4, 2, 1, 8, 0],
        window: number 3, scale: float 0.5, blocks: number 3, out: out_halves 128, lse: out 16,
    }
    flash_attention_wgmma::flash_bwd_dq_wgmma by shape {
        qkv: halves 256, qkv_map: map (256, [8, 8, 4], [32, 8], 64_u32), documents: u32s 8, lengths: u32s 0,
        lse: f32s 16, delta: f32s 16, dout: halves 128, dout_map: map (128, [8, 8, 2], [16, 8], 64_u32),
        samples: number 2, layout: qkv [4, 2, 1, 8, 0],
        window: number 3, scale: float 0.5, blocks: number 3, dqkv: out_halves 256,
    }
    flash_attention_wgmma::flash_bwd_dkv_wgmma by shape {
        qkv: halves 256, qkv_map: map (256, [8, 8, 4], [32, 8], 64_u32), documents: u32s 8, lengths: u32s 0,
        lse: f32s 16, delta: f32s 16, dout: halves 128, dout_map: map (128, [8, 8, 2], [16, 8], 64_u32),
        samples: number 2, layout: qkv [4, 2, 1, 8, 0],
        window: number 3, scale: float 0.5, pairs: number 0, dqkv: out_halves 256,
    }
    flash_attention_wgmma::flash_bwd_dkv_ds_wgmma by shape {
        qkv: halves 256, qkv_map: map (256, [8, 8, 4], [32, 8], 64_u32), documents: u32s 8, lengths: u32s 0,
        lse: f32s 16, delta: f32s 16, dout: halves 128, dout_map: map (128, [8, 8, 2], [16, 8], 64_u32),
        samples: number 2, layout: qkv [4, 2, 1, 8, 0],
        window: number 3, scale: float 0.5, before: number 1, count: number 1, dqkv: out_halves 256,
        ds: out_halves 8192,
    }
    flash_attention_wgmma::flash_bwd_scores_wgmma by shape {
        qkv: halves 256, qkv_map: map (256, [8, 8, 4], [32, 8], 64_u32), documents: u32s 8, lengths: u32s 0,
        lse: f32s 16, delta: f32s 16, dout: halves 128, dout_map: map (128, [8, 8, 2], [16, 8], 64_u32),
        samples: number 2, layout: qkv [4, 2, 1, 8, 0],
        window: number 3, scale: float 0.5, before: number 1, count: number 1, p: out_halves 8192, ds: out_halves 8192,
    }
    flash_attention_wgmma::flash_bwd_from_scores_wgmma by variant {
        qkv: halves 256, qkv_map: map (256, [8, 8, 4], [32, 8], 64_u32), documents: u32s 8, lengths: u32s 0,
        scores: halves 8192, dout: halves 128, dout_map: map (128, [8, 8, 2], [16, 8], 64_u32), samples: number 2,
        layout: qkv [4, 2, 1, 8, 0], window: number 3,
        scale: float 0.5, before: number 1, count: number 1, dqkv: out_halves 256,
    }
}

//! Runs of mixtures of experts: the bits do not depend on how a run is made, and the loss of the
//! routers depends on no padding.

use super::{Contexts, Plan, arguments, chats, example, gradients, modes_give_same_bits};
use crate::support::{on_each_device, relative_l2};
use serde_json::json;
use std::fs;
use std::path::PathBuf;
use stepscope::models::{ModelConfig, Transformer, Weights};
use stepscope::{Device, DeviceKind, Parameters};
use tempfile::TempDir;

/// Returns the chats, with a small mixture next to them whose routers have a loss.
fn chats_of_mixture() -> (TempDir, PathBuf) {
    let (folder, data) = chats();
    let (tiny, own) = (example().join("tiny"), folder.path().join("tiny"));
    let config = json!({
        "model_type": "qwen3_moe", "vocab_size": 384, "max_position_embeddings": 2048, "hidden_size": 32,
        "intermediate_size": 64, "moe_intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 2,
        "norm_topk_prob": true, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
        "head_dim": 16, "rms_norm_eps": 1e-5, "rope_theta": 10_000.0, "output_router_logits": true,
        "router_aux_loss_coef": 0.1,
    });
    let config = ModelConfig::from_json(config.to_string().as_bytes()).unwrap();
    let device = Device::open(DeviceKind::Emulated).unwrap();
    let (_, spec) = Transformer::new(config.clone()).unwrap();
    Weights::write(&own, &config, &Parameters::new(&device, &spec, 5).unwrap(), None).unwrap();
    for name in ["chat_template.jinja", "generation_config.json", "tokenizer.json", "tokenizer_config.json"] {
        fs::copy(tiny.join(name), own.join(name)).unwrap();
    }
    (folder, data)
}

on_each_device! {
    /// The bits of a run are the same in all modes, for all weights and for adapters of experts.
    fn mixture_modes_give_same_bits(device: &Device) {
        modes_give_same_bits(device, chats_of_mixture, "--accumulate 2 --eval-share 0.2 --epochs 3");
        let lora = "--accumulate 2 --epochs 3 --lora 8 --lora-dropout 0.2 --lora-targets v_proj,gate_proj,up_proj,down_proj";
        modes_give_same_bits(device, chats_of_mixture, lora);
        modes_give_same_bits(device, chats_of_mixture, &format!("{lora} --quantize nf4 --precision bf16"));
    }

    /// Contexts without tokens do not change the loss of the routers.
    fn padding_keeps_the_loss_of_routers(device: &Device) {
        let (_folder, data) = chats_of_mixture();
        let args = arguments(&data, "");
        let plan = Plan::load(&args, 1).unwrap();
        let packed = &plan.data.training[..3];
        let counted: usize = packed.iter().map(|packed| packed.counted).sum();
        let of = |contexts: usize| {
            let share = contexts as f64 / counted as f64;
            gradients(device, &plan, &[Contexts::new(packed, contexts, 64, share, true)])
        };
        let ((want, loss), (padded, padded_loss)) = (of(3), of(5));
        let want: Vec<f64> = want.into_iter().map(f64::from).collect();
        let differs = relative_l2(&padded, &want);
        assert!(differs < 2e-6 && (padded_loss - loss).abs() < 2e-6 * loss, "{differs}, {padded_loss} and {loss}");
    }
}

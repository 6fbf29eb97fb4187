//! Preferences: losses, rewards and norms of gradients compared with TRL's, and the bits of
//! references and runs.

use super::*;
use crate::program::results::REFERENCES;
use crate::train::model::preferences::Rewards;
use serde_json::Value;

/// Returns a folder with the pairs of the example.
fn pairs() -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("pairs.jsonl");
    fs::copy(example().join("pairs.jsonl"), &path).unwrap();
    (folder, path)
}

/// Returns what `tests/models/make_dpo.py` has written.
fn of_trl() -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/models/dpo.json");
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

/// Returns the lines of a run's log.
fn log(folder: &Path) -> Vec<Value> {
    let text = fs::read_to_string(folder.join("log.jsonl")).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

on_each_device! {
    /// Twelve updates have TRL's losses, gradient norms and rewards, which it computed with a model
    /// in float64. The first loss is log 2 in f32, and the first rewards are exactly 0.
    fn updates_are_those_of_trl(device: &Device) {
        let (folder, data) = pairs();
        let expected = of_trl();
        let [beta, rate] = ["beta", "rate"].map(|name| expected[name].as_f64().unwrap());
        let constant = "--decay constant --warmup 0 --weight-decay 0 --batch 4 --accumulate 4 --epochs 12";
        let more = format!("--preferences dpo --beta {beta} --learning-rate {rate} {constant}");
        trained(device, &arguments(&data, &more), false).unwrap();
        let (lines, rows) = (log(folder.path()), expected["float64"].as_array().unwrap());
        assert_eq!(lines.len(), rows.len());
        let names = ["loss", "gradient_norm", "rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins"];
        for (line, row) in lines.iter().zip(rows) {
            for (name, want) in names.iter().zip(row.as_array().unwrap()) {
                let (got, want) = (line[name].as_f64().unwrap(), want.as_f64().unwrap());
                assert!((got - want).abs() <= 1e-5 * want.abs().max(1.0), "{name}: {got} and {want} in {line}");
            }
        }
        let first = &lines[0];
        assert!((first["loss"].as_f64().unwrap() - f64::from(std::f32::consts::LN_2)).abs() < 1e-7, "{first}");
        assert!(names[2..].iter().all(|name| first[name] == 0.0), "{first}");
    }

    /// References and losses have the same bits however the run is made, also if it is stopped
    /// after each update.
    fn preference_modes_give_same_bits(device: &Device) {
        let base = "--preferences dpo --batch 2 --accumulate 2 --eval-share 0.2 --epochs 3";
        let lora = "--lora 4 --lora-targets q_proj,v_proj,down_proj --lora-dropout 0.2";
        for more in ["", lora, &format!("{lora} --precision bf16"), "--lora 4 --quantize nf4"] {
            modes_give_same_bits(device, pairs, &format!("{base} {more}"));
        }
    }

    /// A run that resumes reads its references instead of computing them.
    fn references_are_read_again(device: &Device) {
        let (folder, data) = pairs();
        let base = "--preferences dpo --batch 2 --accumulate 2 --epochs 2";
        assert_eq!(trained(device, &arguments(&data, base), true), None);
        let path = folder.path().join(REFERENCES);
        let mut bytes = fs::read(&path).unwrap();
        let kept = bytes.clone();
        let resume = format!("{base} --resume {}", folder.path().join("model.safetensors").display());
        let whole = trained(device, &arguments(&data, &resume), false).unwrap();
        assert_eq!(fs::read(&path).unwrap(), kept);
        // Other references give other losses.
        assert_eq!(trained(device, &arguments(&data, &format!("{base} --overwrite")), true), None);
        // The first value after the header and its length.
        let first = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        bytes[first..first + 4].copy_from_slice(&(-1.0f32).to_le_bytes());
        fs::write(&path, &bytes).unwrap();
        assert_ne!(trained(device, &arguments(&data, &resume), false).unwrap().1, whole.1);
        // Those of other data are computed again.
        fs::write(&path, b"damaged").unwrap();
        assert_eq!(trained(device, &arguments(&data, &format!("{base} --overwrite")), true), None);
        assert_eq!(fs::read(&path).unwrap(), kept);
    }

    /// An evaluation has the loss and the rewards of its pairs, as the first update has before it.
    fn evaluations_have_rewards(device: &Device) {
        let (_folder, data) = pairs();
        let eval = format!("--eval {}", data.display());
        let args = arguments(&data, &format!("--preferences dpo --batch 4 --accumulate 4 --epochs 3 --learning-rate 1e-3 {eval}"));
        let plan = Plan::load(&args, 1).unwrap();
        let mut state = plan.state::<f32>(device).unwrap();
        let mut arena = memory::arena(device, None, plan.memory::<f32>(device).unwrap()).unwrap();
        let references = plan.start(&mut arena, &mut state, true).unwrap();
        assert!(references.training.iter().all(|&value| value <= 0.0) && references.training.iter().any(|&value| value < -1.0));
        let mut trainer = plan.trainer(&mut arena, state).unwrap();
        let position = plan.train(&mut trainer, references, true).unwrap().unwrap().position;
        assert_eq!((position.losses.len(), position.rewards.len(), position.evaluations.len()), (3, 3, 3));
        // The evaluation after an update is of the weights with which the next begins.
        for (evaluation, (loss, rewards)) in position.evaluations.iter().zip(position.losses.iter().zip(&position.rewards).skip(1)) {
            let Rewards { accuracy, margin, .. } = evaluation.rewards.unwrap();
            assert!((evaluation.loss - loss).abs() < 1e-6 && (margin - rewards.margin).abs() < 1e-5, "{evaluation:?} {rewards:?}");
            assert!((accuracy - rewards.accuracy).abs() < 1e-6 && evaluation.perplexity.is_none(), "{evaluation:?}");
        }
        assert!(position.evaluations.is_sorted_by(|one, next| one.loss > next.loss), "{position:?}");
    }
}

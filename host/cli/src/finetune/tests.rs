//! The loss of packed chats is that of the same chats one by one, and a run's bits do not depend on
//! how it runs. `tests/finetune.rs` runs the program.

mod fits;
mod mixtures;
mod preferences;

use super::cli::Args;
use super::data::Contexts;
use super::plan::Plan;
use super::references::References;
use crate::run::memory::{self, RunMemory};
use crate::run::updates::TokenBatch;
use crate::support::{on_each_device, relative_l2};
use crate::train::cli::Precision;
use crate::train::model::{Gpt, Mode};
use crate::train::sample;
use crate::train::tokenizer::Tokenizer;
use clap::Parser;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use stepscope::data::{TokenSampler, TokenSamplerConfig};
use stepscope::models::WeightFiles;
use stepscope::ops::Activation;
use stepscope::{Arena, Capacity, Checkpoint, Device, HostBatch, Parameters, Tape, bf16, ops};
use stepscope_chat::{Encoder, Packed, pack, read_rows};
use tempfile::TempDir;

/// Returns the folder of the example, which has a tiny model and chats.
fn example() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/finetune")
}

/// Returns a folder with the first chats of the example, which are enough for five updates.
fn chats() -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let all = fs::read_to_string(example().join("chats.jsonl")).unwrap();
    let path = folder.path().join("chats.jsonl");
    fs::write(&path, all.lines().step_by(4).map(|line| format!("{line}\n")).collect::<String>()).unwrap();
    (folder, path)
}

/// Returns the arguments of a run of the model next to the data, or else of the example's.
fn arguments(data: &Path, more: &str) -> Args {
    let out = data.parent().unwrap();
    let weights =
        [out, &example()].map(|folder| folder.join("tiny")).into_iter().find(|folder| folder.exists()).unwrap();
    let own = format!(
        "finetune --weights {} --data {} --out {} --context 64 --batch 1 --epochs 1 --learning-rate 1e-3",
        weights.display(),
        data.display(),
        out.display()
    );
    Args::parse_from(own.split(' ').chain(more.split_whitespace()))
}

/// Returns the gradients of a batch, and its loss.
fn gradients(device: &Device, plan: &Plan<'_>, batch: &[Contexts]) -> (Vec<f32>, f64) {
    let mut state = plan.state::<f32>(device).unwrap();
    let largest = batch.iter().max_by_key(|part| part.ids.len()).unwrap();
    let model = || plan.model::<f32>();
    let needs = RunMemory::of(device, model, state.precision, [largest, largest]).unwrap();
    let mut arena = memory::arena(device, None, needs).unwrap();
    plan.start(&mut arena, &mut state, true).unwrap();
    let mut trainer = stepscope::Trainer::eager(&mut arena, state);
    let loss = trainer.accumulate(batch).unwrap().loss;
    (trainer.state().gradients.read_flat().unwrap(), loss)
}

/// Returns the loaded model of a case of `tests/models`.
fn case(device: &Device, name: &str) -> (Gpt<f32>, Parameters) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/models/cases").join(name);
    let mut weights = WeightFiles::open(folder).unwrap();
    let (model, spec) = Gpt::<f32>::new(weights.config().clone(), Mode::default()).unwrap();
    let mut parameters = Parameters::new(device, &spec, 0).unwrap();
    weights.load(&mut parameters).unwrap();
    (model, parameters)
}

/// The digest of the weights, and the bits of all losses and rewards.
type Bits = (String, Vec<u64>);

/// Runs to the end, or to the stop.
fn trained(device: &Device, args: &Args, stopped: bool) -> Option<Bits> {
    match args.run.precision {
        Precision::Bf16 => trained_in::<bf16>(device, args, stopped),
        _ => trained_in::<f32>(device, args, stopped),
    }
}

fn trained_in<S: Activation>(device: &Device, args: &Args, stopped: bool) -> Option<Bits> {
    let plan = Plan::load(args, 1).unwrap();
    let mut state = plan.state::<S>(device).unwrap();
    let mut arena = memory::arena(device, args.run.arena_mib, plan.memory::<S>(device).unwrap()).unwrap();
    let references = plan.start(&mut arena, &mut state, true).unwrap();
    let stop = AtomicBool::new(stopped);
    let trainer = plan.trainer(&mut arena, state).unwrap();
    let mut trainer = trainer.checkpoint(args.out.join("model.safetensors"), None).stop_when(&stop);
    let position = plan.train(&mut trainer, references, true).unwrap()?.position;
    let losses = position.losses.iter().chain(position.evaluations.iter().map(|evaluation| &evaluation.loss));
    let rewards = position.rewards.iter().flat_map(|rewards| [rewards.chosen, rewards.rejected, rewards.accuracy]);
    let losses = losses.copied().chain(rewards).map(f64::to_bits).collect();
    Some((trainer.state().parameters.sha256().unwrap(), losses))
}

on_each_device! {
    /// A text that outgrows LongRoPE's short factors has the tokens of whole passes, which use the
    /// long factors for more than eight tokens. So have texts that need only one of the lists.
    fn text_outgrows_short_factors(device: &Device) {
        let (model, parameters) = case(device, "phi3_long");
        assert_eq!(model.layers.short_context(), Some(8));
        let greedy = TokenSamplerConfig { temperature: 0.0, ..TokenSamplerConfig::default() };
        let sampler = TokenSampler::new(greedy, 0).unwrap();
        let mut arena = Arena::builder(device).capacity(Capacity::mib(16)).build().unwrap();
        let beginning = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5];
        for (first, count) in [(3, 12), (3, 5), (8, 4), (11, 4)] {
            let (mut tokens, mut next) = (beginning[..first].to_vec(), sampler.clone());
            while tokens.len() < first + count {
                let logits = arena.step(|step| {
                    let tape = Tape::new(step, &parameters).evaluating();
                    let ids = step.upload_indices(&tokens, [1, tokens.len()])?;
                    let hidden = model.hidden(&tape, ids, None)?;
                    let last = ops::slice(step, hidden.value(), 1, tokens.len() - 1..tokens.len())?;
                    step.read(&model.layers.logits(step, &parameters, &last)?)
                });
                tokens.push(next.next(&logits.unwrap()).unwrap());
            }
            let written = sample::write(device, &model, &parameters, &beginning[..first], count, &[], &sampler);
            println!("{:?} {:?}", &beginning[..first], written);
            assert_eq!(written.unwrap(), tokens[first..], "{count} tokens after {first}");
        }
    }

    /// The gradient of packed chats is that of the same chats one by one, whatever share of its
    /// tokens counts in each.
    fn packing_keeps_the_gradient(device: &Device) {
        let (_folder, data) = chats();
        let args = arguments(&data, "");
        let plan = Plan::load(&args, 1).unwrap();
        let Tokenizer::File(tokenizer, _) = &plan.folder.tokenizer else { panic!("a tokenizer.json") };
        let encoder = Encoder { tokenizer, template: plan.folder.template.as_ref(), end: plan.folder.end(), context: 64 };
        let rows = read_rows(&data, 1 << 20).unwrap();
        let samples: Vec<_> = rows[..6].iter().flat_map(|(_, row)| encoder.encode(row).unwrap().samples).collect();
        let packed = pack(&samples, 64);
        assert!(packed.len() < samples.len(), "chats share contexts");
        let counted: usize = packed.iter().map(|packed| packed.counted).sum();
        let alone: Vec<Packed> = samples.iter().flat_map(|sample| pack(std::slice::from_ref(sample), sample.ids.len())).collect();
        assert_eq!(alone.iter().map(|packed| packed.counted).sum::<usize>(), counted);

        let share = |contexts: usize| contexts as f64 / counted as f64;
        let together = [Contexts::new(&packed, packed.len(), 64, share(packed.len()), false)];
        let split: Vec<_> = packed.iter().map(|one| Contexts::new([one], 1, 64, share(packed.len()), false)).collect();
        let padded = [Contexts::new(&packed, packed.len() + 2, 64, share(packed.len() + 2), false)];
        let alone: Vec<_> = alone.iter().map(|one| Contexts::new([one], 1, one.ids.len(), share(alone.len()), false)).collect();
        let (want, loss) = gradients(device, &plan, &together);
        let want: Vec<f64> = want.into_iter().map(f64::from).collect();
        assert!(loss > 1.0 && want.iter().any(|&value| value != 0.0), "{loss}");
        for (name, batch) in [("in parts", &split[..]), ("padded", &padded), ("one by one", &alone)] {
            let (got, its_loss) = gradients(device, &plan, batch);
            let differs = relative_l2(&got, &want);
            assert!(differs < 2e-6 && (its_loss - loss).abs() < 2e-6 * loss, "{name}: {differs}, {its_loss} and {loss}");
        }
    }

    /// The bits are the same captured and eager, with and without recomputing, and with and without
    /// a stop after each update; also if the last batch of a pass is not full.
    fn run_modes_give_same_bits(device: &Device) {
        modes_give_same_bits(device, chats, "--accumulate 2 --eval-share 0.2 --epochs 3");
        let lora = "--accumulate 2 --eval-share 0.2 --epochs 3 --lora 4 --lora-targets q_proj,v_proj,down_proj";
        modes_give_same_bits(device, chats, lora);
        modes_give_same_bits(device, chats, &format!("{lora} --lora-dropout 0.2"));
        modes_give_same_bits(device, chats, &format!("{lora} --lora-dropout 0.2 --precision bf16"));
        modes_give_same_bits(device, chats, "--accumulate 2 --epochs 3 --lora 4 --quantize nf4");
    }

    /// A finished run goes on with more epochs, from where it was.
    fn run_is_prolonged(device: &Device) {
        let (folder, data) = chats();
        let (_, short) = trained(device, &arguments(&data, "--decay constant --warmup 0"), false).unwrap();
        let (_, whole) = trained(device, &arguments(&data, "--decay constant --warmup 0 --epochs 2"), false).unwrap();
        assert_eq!((whole.len(), &whole[..short.len()]), (2 * short.len(), &short[..]));
        trained(device, &arguments(&data, "--decay constant --warmup 0"), false).unwrap();
        let checkpoint = folder.path().join("model.safetensors");
        let more = format!("--decay constant --warmup 0 --epochs 2 --resume {}", checkpoint.display());
        assert_eq!(trained(device, &arguments(&data, &more), false).unwrap().1, whole);
        let args = arguments(&data, &more.replace("--epochs 2", "--epochs 2 --weight-decay 0.5"));
        let plan = Plan::load(&args, 1).unwrap();
        let state = plan.state::<f32>(device).unwrap();
        let mut arena = memory::arena(device, args.run.arena_mib, plan.memory::<f32>(device).unwrap()).unwrap();
        let error = plan.train(&mut plan.trainer(&mut arena, state).unwrap(), References::default(), true).err().unwrap().to_string();
        assert!(error.contains("weight-decay: 0.01 in the checkpoint, 0.5 here"), "{error}");
    }

    /// `--recompute` may be added or left out when a run goes on, also with frozen weights whose
    /// type it decides.
    fn resumed_run_may_recompute(device: &Device) {
        let (folder, data) = chats();
        let resume = format!("--epochs 2 --resume {}", folder.path().join("model.safetensors").display());
        for base in ["--lora 4 --decay constant --warmup 0", "--decay constant --warmup 0"] {
            let run = |more: &str| trained(device, &arguments(&data, &format!("{base} {more}")), false).unwrap();
            let whole = run("--epochs 2");
            for (before, after) in [("", "--recompute"), ("--recompute", "")] {
                run(before);
                assert_eq!(run(&format!("{resume} {after}")), whole, "{base}: `{before}`, then `{after}`");
            }
        }
    }

    /// Evaluations that do not improve end a run, and the weights of the best one stay.
    fn patience_ends_a_run(device: &Device) {
        let (folder, data) = chats();
        let args = arguments(&data, "--eval-share 0.3 --patience 2 --evaluate-every 1 --epochs 40 --learning-rate 0.3 --decay constant");
        let plan = Plan::load(&args, 1).unwrap();
        let state = plan.state::<f32>(device).unwrap();
        let mut arena = memory::arena(device, args.run.arena_mib, plan.memory::<f32>(device).unwrap()).unwrap();
        let trained = plan.train(&mut plan.trainer(&mut arena, state).unwrap(), References::default(), true).unwrap().unwrap();
        let evaluations = &trained.position.evaluations;
        assert!(trained.ended_early && (evaluations.len() as u64) < plan.total(), "{evaluations:?}");
        let best = trained.position.best().unwrap();
        assert_eq!(best + 2, evaluations.len() - 1, "{evaluations:?}");
        assert!(Checkpoint::load(folder.path().join("best.safetensors")).is_ok());
    }
}

fn modes_give_same_bits(device: &Device, rows: fn() -> (TempDir, PathBuf), base: &str) {
    let (folder, data) = rows();
    let run = |more: &str| trained(device, &arguments(&data, &format!("{base} {more}")), false).unwrap();
    let captured = run("");
    assert!(captured.1.len() > 4, "{base}: {captured:?}");
    assert_eq!(run("--eager"), captured, "{base}: eager");
    assert_eq!(run("--recompute"), captured, "{base}: recomputed");
    assert_ne!(run("--seed 8"), captured, "{base}: another seed");

    let resume = format!("{base} --resume {}", folder.path().join("model.safetensors").display());
    assert_eq!(trained(device, &arguments(&data, base), true), None);
    let resumed = loop {
        if let Some(bits) = trained(device, &arguments(&data, &resume), true) {
            break bits;
        }
    };
    assert_eq!(resumed, captured, "{base}: resuming after each update must change nothing");
}

/// A pass over the data has each context once, in an order of its own.
#[test]
fn passes_have_each_context_once() {
    let (_folder, data) = chats();
    let args = arguments(&data, "--batch 2");
    let plan = Plan::load(&args, 1).unwrap();
    let per_epoch = plan.data.updates_per_epoch(4) as usize;
    let take = |behind: u64, count: usize| -> Vec<Vec<Contexts>> {
        plan.data.batches(64, [2, 2], 7, behind, Vec::new()).unwrap().take(count).map(Result::unwrap).collect()
    };
    let batches = take(0, 2 * per_epoch);
    let counted = |batches: &[Vec<Contexts>]| -> usize { batches.iter().flatten().map(TokenBatch::weight).sum() };
    let [first, second] = [&batches[..per_epoch], &batches[per_epoch..]];
    assert_eq!([counted(first), counted(second)], [plan.data.size.counted; 2]);
    let ids = |batches: &[Vec<Contexts>]| -> Vec<Vec<u32>> {
        batches.iter().flatten().map(|part| part.ids.clone()).collect()
    };
    assert_ne!(ids(first), ids(second));
    assert_eq!(ids(&take(4, 2)), ids(&batches[1..3]), "a resumed run must begin after the last batch");
    assert!(batches.iter().flatten().all(|part| part.len() == 2));
}

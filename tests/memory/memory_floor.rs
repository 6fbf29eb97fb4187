//! A floor for the host's available memory. Below it no step begins, and a trainer ends with a
//! checkpoint, from which the run resumes to the same weights. A trainer also predicts its peak
//! memory. `cargo xtask pressure` tests this with real memory pressure.

#![cfg(target_os = "linux")]
#![forbid(unsafe_code)]

use crate::support::{Random, on_each_device};
use std::path::Path;
use stepscope::group::{Group, GroupConfig};
use stepscope::memory::{MemInfo, ProcessMemory};
use stepscope::nn::Linear;
use stepscope::ops;
use stepscope::parameters::Initializer;
use stepscope::prelude::*;
use stepscope::train::Ended;

/// More than any machine has.
const NEVER: u64 = u64::MAX;
const INPUTS: usize = 8;

struct Classifier(Linear);

impl Model for Classifier {
    fn forward<'s>(&self, tape: &Tape<'_, 's>, batch: &DeviceBatch<'s>) -> Result<Var<'s>> {
        self.0.forward(tape, &tape.input(batch.input::<f32>(0)?))
    }
}

type Points = crate::support::points::Points<INPUTS>;

/// Returns six batches of four parts.
fn batches() -> Vec<Vec<Points>> {
    let mut random = Random::new(5);
    let mut part = || Points { x: random.normals(4 * INPUTS), labels: random.belows(4, 2) };
    (0..6).map(|_| (0..4).map(|_| part()).collect()).collect()
}

fn state(device: &Device) -> Result<TrainState<Classifier>> {
    let mut spec = ParameterSpec::builder();
    let model = Classifier(Linear::new(spec.at("head"), INPUTS, 2));
    TrainState::new(device, model, &spec.build()?, 7, AdamW { learning_rate: 0.01, ..AdamW::default() })
}

fn arena(device: &Device, floor: u64) -> Arena {
    Arena::builder(device).capacity(Capacity::mib(1)).memory_floor(floor).build().unwrap()
}

fn trainer(arena: &mut Arena, state: TrainState<Classifier>, captured: bool) -> Result<Trainer<'_, Classifier>> {
    if captured { Trainer::captured(arena, state, &batches()[0][0]) } else { Ok(Trainer::eager(arena, state)) }
}

/// Trains, resuming from the checkpoint if there is one. After this many updates of the run, memory
/// is short for the ranks `short`.
fn train(
    device: &Device,
    group: Option<Group>,
    path: &Path,
    captured: bool,
    short_behind: Option<usize>,
) -> Result<String> {
    let (mut rank, mut state) = (0, state(device)?);
    if let Some(group) = &group {
        (rank, state) = (group.rank(), state.in_group(group, 4)?);
    }
    let mut arena = arena(device, 1);
    let mut trainer = trainer(&mut arena, state, captured)?.checkpoint(path, None);
    let mut progress = EpochProgress::default();
    if path.exists() {
        progress = trainer.restore(&Checkpoint::load(path)?)?;
    }
    let mut left = batches().into_iter().skip(progress.updates as usize).map(Ok);
    if let Some(updates) = short_behind {
        trainer.fit_with(left.by_ref().take(updates), &mut progress, &mut ())?;
        if rank + 1 == group.as_ref().map_or(1, Group::ranks) {
            trainer.arena().set_memory_floor(NEVER);
        }
    }
    trainer.fit_with(left, &mut progress, &mut ())?;
    trainer.state().parameters.sha256()
}

on_each_device! {
    fn no_step_begins_below_floor(device: &Device) {
        let mut arena = arena(device, NEVER);
        let error = arena.step(|_| -> Result<()> { panic!("a step began below the floor") }).unwrap_err();
        let Error::MemoryShortage(shortage) = &error else { panic!("{error}") };
        assert!(shortage.floor_bytes > shortage.available_bytes && shortage.memory.host.is_some(), "{shortage:?}");
        assert!(error.to_string().contains("memory_floor"), "{error}");
        assert_eq!(arena.report().resets, 0);
        // It is not a fault of the device, and is temporary.
        assert_eq!(device.lost(), None);
        arena.set_memory_floor(1);
        assert_eq!(arena.step(|step| step.read(&ops::fill(step, [3], 2.0)?)), Ok(vec![2.0; 3]));
    }

    fn no_replay_begins_below_floor(device: &Device) {
        let mut arena = arena(device, 1);
        let inputs = [1.0f32, 2.0];
        let inputs = HostInputs::new().with(&inputs, [2]).unwrap();
        let mut doubled = arena.capture((), &inputs, |step, (), slots| {
            let x = slots.input::<f32>(0)?;
            Ok(slots.output(&ops::add(step, &x, &x)?))
        }).unwrap();
        let replay = doubled.replay(&inputs).unwrap();
        assert_eq!(replay.read::<f32>(*replay.outputs()).unwrap(), [2.0, 4.0]);
        arena.set_memory_floor(NEVER);
        let refused = doubled.replay(&inputs).map(drop).unwrap_err();
        assert!(matches!(refused, Error::MemoryShortage(_)), "{refused}");
        arena.set_memory_floor(0);
        let replay = doubled.replay(&inputs).unwrap();
        assert_eq!(replay.read::<f32>(*replay.outputs()).unwrap(), [2.0, 4.0]);
    }

    fn trainer_resumes_after_memory_shortage(device: &Device) {
        let folder = tempfile::tempdir().unwrap();
        for captured in [false, true] {
            let whole = train(device, None, &folder.path().join("whole"), captured, None).unwrap();
            let path = folder.path().join(format!("{captured}"));
            for (run, updates) in [2, 0, 3].into_iter().enumerate() {
                let error = train(device, None, &path, captured, Some(updates)).unwrap_err();
                assert!(matches!(&error, Error::MemoryShortage(shortage) if shortage.rank.is_none()), "{error}");
                let made = EpochProgress::of(&Checkpoint::load(&path).unwrap()).unwrap().updates;
                assert_eq!(made, [2, 2, 5][run]);
            }
            assert_eq!(train(device, None, &path, captured, None).unwrap(), whole);
        }
    }
}

struct Deep(Vec<Linear>);

impl Model for Deep {
    fn forward<'s>(&self, tape: &Tape<'_, 's>, batch: &DeviceBatch<'s>) -> Result<Var<'s>> {
        let x = tape.input(batch.input::<f32>(0)?);
        self.0.iter().try_fold(x, |x, layer| layer.forward(tape, &x))
    }
}

/// Returns a trainer of six million weights, in many tensors.
fn deep<'a>(arena: &'a mut Arena, checkpoint: &Path) -> Result<Trainer<'a, Deep>> {
    const WIDTHS: [usize; 26] = [512; 26];
    let mut spec = ParameterSpec::builder();
    let widths = [&[INPUTS], &WIDTHS[..], &[2]].concat();
    let pairs = widths.windows(2).zip(0..);
    let layers = pairs.map(|(pair, at)| Linear::new(spec.at(format!("layer{at}")), pair[0], pair[1]));
    let model = Deep(layers.collect());
    let state = TrainState::new(arena.device(), model, &spec.build()?, 7, AdamW::default())?;
    Ok(Trainer::captured(arena, state, &batches()[0][0])?.checkpoint(checkpoint, Some(2)))
}

#[test]
fn first_update_predicts_peak_memory() -> Result<()> {
    let folder = tempfile::tempdir().unwrap();
    let device = Device::open(DeviceKind::Emulated)?;
    // The need of captured steps and of an evaluation of many samples: a tenth of the run, which no
    // update touches.
    const ARENA: usize = 15_200_000;
    let mut arena = Arena::builder(&device).capacity(Capacity::Bytes(ARENA)).build()?;
    let mut trainer = deep(&mut arena, &folder.path().join("model"))?;
    let mut progress = EpochProgress::default();
    let mut left = batches().into_iter().map(Ok);
    trainer.fit_with(left.by_ref().take(1), &mut progress, &mut ())?;
    assert_eq!(trainer.memory_forecast(), None, "there is no forecast before the second update");
    trainer.fit_with(left.by_ref().take(1), &mut progress, &mut ())?;
    let forecast = trainer.memory_forecast().unwrap();
    // The checkpoint is written after everything else has been needed.
    let many = Points { x: vec![1.0; 256 * INPUTS], labels: vec![0; 256] };
    trainer.evaluate(&many)?;
    trainer.fit_with(left, &mut progress, &mut ())?;
    let peak = ProcessMemory::read().unwrap().peak_bytes as f64;
    let report = trainer.arena().report();
    let used = report.captured_bytes + report.high_water_bytes;
    assert!(used > ARENA * 97 / 100, "{used}");
    let error = forecast.peak_bytes() as f64 / peak - 1.0;
    assert!(error.abs() < 0.02, "{error}: {forecast:?}, {peak}");
    Ok(())
}

/// A checkpoint is restored in pieces. The host does not hold its tensors.
#[test]
fn restoring_takes_little_memory() -> Result<()> {
    const WIDTH: usize = 4096;
    const TENSOR: u64 = (WIDTH * WIDTH * size_of::<f32>()) as u64;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model");
    let device = Device::open(DeviceKind::Emulated)?;
    let mut spec = ParameterSpec::builder();
    spec.add("w", [WIDTH, WIDTH], Initializer::ONE);
    let mut parameters = Parameters::new(&device, &spec.build()?, 7)?;
    let mut optimizer = Optimizer::new(&parameters, AdamW::default())?;
    Checkpoint::save(&path, &parameters, Some(&optimizer), &[])?;
    let peak = || ProcessMemory::read().unwrap().peak_bytes;
    let before = peak();
    Checkpoint::load(&path)?.restore(&mut parameters, Some(&mut optimizer))?;
    let more = peak() - before;
    assert!(more < TENSOR / 2, "{more} bytes for a file of three tensors of {TENSOR}");
    Ok(())
}

#[test]
fn oversized_run_ends_after_first_update() -> Result<()> {
    const ARENA: u64 = 2 << 30;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model");
    // Other processes take and free memory meanwhile. If they cause the shortage, the attempt does
    // not count.
    for _ in 0..20 {
        let device = Device::open(DeviceKind::Emulated)?;
        let available = MemInfo::read().unwrap().available_bytes;
        let floor = available.saturating_sub(ARENA / 2);
        let arena = Arena::builder(&device).capacity(Capacity::Bytes(ARENA as usize)).reserve_bytes(0);
        let mut arena = arena.memory_floor(floor).build()?;
        let mut progress = EpochProgress::default();
        let ended = deep(&mut arena, &path)?.fit_with(batches().into_iter().map(Ok), &mut progress, &mut ());
        let Err(Error::MemoryShortage(shortage)) = &ended else { panic!("{ended:?}") };
        if shortage.still_wanted_bytes == 0 {
            continue;
        }
        assert!(shortage.available_bytes >= floor && shortage.still_wanted_bytes > ARENA * 9 / 10, "{shortage:?}");
        assert!(shortage.to_string().contains("that this run will still take"), "{shortage}");
        assert_eq!((progress.updates, EpochProgress::of(&Checkpoint::load(&path)?)?.updates), (1, 1));
        // If there is enough memory, it resumes.
        arena.set_memory_floor(0);
        let mut trainer = deep(&mut arena, &path)?;
        let mut progress = trainer.restore(&Checkpoint::load(&path)?)?;
        assert_eq!(
            trainer.fit_with(batches().into_iter().skip(1).map(Ok), &mut progress, &mut ()),
            Ok(Ended::Finished)
        );
        return Ok(());
    }
    panic!("the host's free memory never settled")
}

/// Runs the ranks of a group, each on a thread, and returns their results.
fn on_ranks(path: &Path, ranks: usize, captured: bool, short_behind: Option<usize>) -> Vec<Result<String>> {
    let configs = GroupConfig::on_this_host(ranks).unwrap();
    std::thread::scope(|scope| {
        let start = |config: GroupConfig| {
            scope.spawn(move || {
                let device = Device::open(DeviceKind::Emulated)?;
                let group = Group::join(&device, &config)?;
                train(&device, Some(group), path, captured, short_behind)
            })
        };
        let running: Vec<_> = configs.into_iter().map(start).collect();
        running.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

#[test]
fn all_ranks_save_on_shortage() {
    let folder = tempfile::tempdir().unwrap();
    let whole = on_ranks(&folder.path().join("whole"), 1, false, None).swap_remove(0).unwrap();
    for captured in [false, true] {
        let path = folder.path().join(format!("{captured}"));
        for outcome in on_ranks(&path, 4, captured, Some(2)) {
            let error = outcome.unwrap_err();
            assert!(matches!(&error, Error::MemoryShortage(shortage) if shortage.rank == Some(3)), "{error}");
            assert!(error.to_string().starts_with("rank 3: the host has"), "{error}");
        }
        assert_eq!(EpochProgress::of(&Checkpoint::load(&path).unwrap()).unwrap().updates, 2);
        for outcome in on_ranks(&path, 2, captured, None) {
            assert_eq!(outcome.unwrap(), whole);
        }
    }
}

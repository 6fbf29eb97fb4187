//! Captured training with a driver in which one call never returns, for each call in turn.
//!
//! Invariant: a training run, from its first buffer to the drop of its device, takes at most one
//! deadline plus [`SLACK`] longer than with a working driver. Only the machine's own pauses
//! ([`witness`]) extend this limit. The run ends with a typed error if there is a caller to receive
//! it. Afterwards this process ends, with one stuck thread per call.

#![forbid(unsafe_code)]

use crate::support::witness::{AT_ONCE, SLACK, Watch};
use crate::support::{Random, on_each_device};
use std::time::Duration;
use stepscope::check::faults::{Call, Fault, FaultPlan};
use stepscope::memory::Overflow;
use stepscope::nn::Linear;
use stepscope::{
    AdamW, Arena, Capacity, Device, DeviceBatch, DeviceKind, Error, HostBatch, HostInputs, Model, ParameterSpec,
    Result, Tape, TrainState, Trainer, Var, ops,
};

const DEADLINE: Duration = Duration::from_millis(100);
const LONG: Duration = Duration::from_secs(20);
const SLOT_BYTES: usize = 4096;
const SAMPLES: usize = 64;
const INPUTS: usize = 8;
/// The driver calls of a group, which `tests/group/group.rs` makes.
const GROUP: [Call; 4] = [Call::JoinLink, Call::Exchange, Call::FollowExchanges, Call::LeaveLink];

struct Classifier(Linear);

impl Model for Classifier {
    fn forward<'s>(&self, tape: &Tape<'_, 's>, batch: &DeviceBatch<'s>) -> Result<Var<'s>> {
        self.0.forward(tape, &tape.input(batch.input::<f32>(0)?))
    }
}

struct Points {
    x: Vec<f32>,
    labels: Vec<u32>,
}

impl Points {
    fn new() -> Self {
        let mut random = Random::new(3);
        Self { x: random.normals(SAMPLES * INPUTS), labels: random.belows(SAMPLES, 2) }
    }
}

impl HostBatch for Points {
    fn len(&self) -> usize {
        SAMPLES
    }

    fn inputs(&self) -> Result<HostInputs<'_>> {
        HostInputs::new().with(&self.x, [SAMPLES, INPUTS])?.with(&self.labels, [SAMPLES])
    }
}

/// Trains by replays, then overflows once and trims. This makes every driver call, most of them
/// more than once.
fn run(device: Device) -> Result<()> {
    let mut spec = ParameterSpec::builder();
    let model = Classifier(Linear::new(spec.at("head"), INPUTS, 2));
    let state = TrainState::new(&device, model, &spec.build()?, 7, AdamW::default())?;
    let pool = Overflow::Pool { cap_bytes: 1 << 20, prime_bytes: 1 << 16, deadline: device.deadline() };
    let mut arena =
        Arena::builder(&device).capacity(Capacity::Bytes(1 << 18)).overflow(pool).reserve_bytes(0).build()?;
    let mut trainer = Trainer::captured(&mut arena, state, &Points::new())?;
    let batches = (0..6).map(|_| Ok(vec![Points::new()]));
    trainer.fit(batches)?;
    trainer.evaluate(&Points::new())?;
    drop(trainer);
    arena.step(|step| step.read(&ops::fill(step, [1 << 17], 1.0)?))?;
    arena.trim()
}

fn open(kind: DeviceKind, deadline: Duration, plan: &FaultPlan) -> Device {
    Device::builder(kind).deadline(deadline).staging(2, SLOT_BYTES).layer(plan.clone()).open().unwrap()
}

on_each_device! {
    fn each_hung_call_costs_one_deadline(device: &Device) {
        let kind = device.description().kind;
        let counted = FaultPlan::new();
        let sound = open(kind, LONG, &counted);
        let watch = Watch::start();
        run(sound).unwrap();
        let usual = watch.elapsed();
        for call in Call::ALL.into_iter().filter(|call| !GROUP.contains(call)) {
            let count = counted.count(call);
            assert!(count > 0, "the program never makes {call:?}");
            // The number of polls depends on time.
            let looks = matches!(call, Call::Poll | Call::PollFence);
            let mut numbers = if looks { vec![1] } else { vec![1, count.div_ceil(2), count] };
            numbers.dedup();
            for number in numbers {
                let meets = || {
                    let plan = FaultPlan::new().on(call, number, Fault::Never);
                    let device = open(kind, DEADLINE, &plan);
                    let watch = Watch::start();
                    let outcome = run(device);
                    let late = watch.exceeds(usual + DEADLINE + SLACK);
                    // The last call waits for the deadline less the time of the work before it,
                    // which is negligible.
                    let waits = !matches!(&outcome, Err(Error::Timeout { waited, .. }) if *waited + AT_ONCE < DEADLINE);
                    (outcome, watch.elapsed(), !late && waits, plan)
                };
                // The emulator's own threads may be delayed too, and the witness does not see that.
                // A busy machine gets another try.
                let (outcome, took, in_time, plan) = (0..4).map(|_| meets()).find(|(_, _, in_time, _)| *in_time).unwrap_or_else(meets);
                assert!(in_time, "{call:?} {number} of {count}: {outcome:?} after {took:?}, usually {usual:?}");
                assert!(plan.count(call) >= number, "{call:?} {number} was never made");
                assert!(took >= DEADLINE, "{call:?} {number}: {outcome:?} after {took:?}");
                match outcome {
                    Err(Error::Timeout { .. }) => {}
                    Err(Error::DeviceLost { cause }) => assert!(cause.contains("had not ended"), "{cause}"),
                    // Frees at the end have no caller to report to.
                    Ok(()) => {}
                    Err(error) => panic!("{call:?} {number}: {error}"),
                }
            }
        }
    }
}

//! Our side of the bench: each case as a graph of many calls.
//!
//! Invariant: a graph contains exactly the calls that the plan counts.

use stepscope::capture::CaptureInputs;
use stepscope::{Arena, Capacity, Device, HostInputs, Result, Step};

use crate::cases::{Call, Case, Normals, Set};
use crate::harness::{self, Samples};
use crate::{Line, Plan};

const CONTENDER: &str = "stepscope";

/// The contents of a graph: rounds of one call on each set.
struct Work<'a> {
    call: Call,
    rounds: usize,
    sets: &'a mut [Set],
}

/// Queues all calls. The outputs of a round coexist in memory; the next round reuses their memory.
fn record<'s>(step: &mut Step<'s>, work: &mut Work<'_>, _: &CaptureInputs<'s>) -> Result<()> {
    let Work { call, rounds, sets } = work;
    (0..*rounds).try_for_each(|_| step.scratch(|step| sets.iter_mut().try_for_each(|set| call(step, set))))
}

/// Measures all the plan's cases.
///
/// # Errors
/// When a call fails.
pub(crate) fn measure(device: &Device, plan: &Plan) -> harness::Result<Vec<Line>> {
    let normals = Normals::new();
    let sets = (0..plan.sets).map(|number| Set::new(device, &normals, number, plan.elements));
    let mut sets = sets.collect::<Result<Vec<Set>>>()?;
    plan.cases()
        .map(|case| {
            let nanoseconds = samples(device, plan, case, &mut sets)?;
            let (elements, kernel) = (plan.elements, case.name.to_owned());
            Ok(Line::Measured { elements, kernel, contender: CONTENDER.into(), nanoseconds })
        })
        .collect()
}

/// Returns the nanoseconds of one call.
fn samples(device: &Device, plan: &Plan, case: &Case, sets: &mut [Set]) -> Result<Samples> {
    let arena = Arena::builder(device).capacity(Capacity::mib(1)).build()?;
    let need = arena.measure(|step| {
        // AdamW allocates nothing, and an arena cannot have zero bytes.
        step.empty::<f32>([1])?;
        sets.iter_mut().try_for_each(|set| (case.call)(step, set))
    })?;
    let mut arena = Arena::builder(device).capacity(Capacity::Measured(need)).build()?;
    let work = Work { call: case.call, rounds: plan.rounds, sets };
    let mut captured = arena.capture(work, &HostInputs::new(), record)?;
    let graphs = Samples::collect(
        plan.samples,
        plan.replays,
        || captured.repeat().map(drop),
        || device.synchronize(device.deadline()),
    )?;
    Ok(graphs.0.into_iter().map(|graph| graph / plan.calls() as f64).collect())
}

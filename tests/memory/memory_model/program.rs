//! Random programs: an arena's settings, the operations of its steps, and the fault of one driver
//! call.
//!
//! Invariant: the numbers drawn from [`Random`] and a [`Kind`] determine one program, the same on
//! every machine. The fuzzer (`fuzz/targets/arena.rs`) draws them from its bytes.

use crate::support::Random;
use std::time::Duration;
use stepscope::check::faults::{Call, Fault};

/// The lengths of tensors, so few that there is a buffer of each length to read back a scratch's
/// values. Padded they take 256, 256, 256, 512, 1024, 1792 and 10240 bytes.
pub(crate) const LENGTHS: [usize; 7] = [1, 16, 64, 65, 200, 400, 2500];
/// Requests that no arena can serve: the first two are refused with their size; the last has no
/// size.
pub(crate) const HUGE: [usize; 3] = [1 << 40, usize::MAX / 4, usize::MAX];
/// The index in [`LENGTHS`] of the persistent buffer's length.
pub(crate) const KEPT: usize = 2;
/// The deadline of every call in a program in which one stalls.
pub(crate) const STALL_DEADLINE: Duration = Duration::from_millis(60);
/// The driver calls of a step's life: memory, copies, launches. Captures and staged uploads have
/// separate tests.
pub(crate) const CALLS: [Call; 12] = [
    Call::FreeBytes,
    Call::Allocate,
    Call::Free,
    Call::CreatePool,
    Call::PoolAllocate,
    Call::PoolFree,
    Call::TrimPool,
    Call::DestroyPool,
    Call::Upload,
    Call::Download,
    Call::Launch,
    Call::Poll,
];
/// The longest delay of a call that is only slow.
const SLOW: Duration = Duration::from_millis(1);

/// The kind of fault that a program may meet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// No fault.
    Sound,
    /// One call fails, spoils the device or is slow.
    Faulty,
    /// One call never returns, or returns after its deadline. Each costs a wait.
    Stalling,
}

#[derive(Clone, Debug)]
pub(crate) struct Program {
    pub(crate) kind: Kind,
    pub(crate) capacity_bytes: usize,
    /// The cap and the primed bytes.
    pub(crate) pool: Option<(usize, usize)>,
    /// The largest capacity.
    pub(crate) growth: Option<usize>,
    pub(crate) checked: bool,
    /// True if steps have a deadline, and so wait for the device.
    pub(crate) step_deadline: bool,
    /// True if a scope ends with its first error; otherwise it continues.
    pub(crate) stops_at_errors: bool,
    pub(crate) fault: Option<Planned>,
    pub(crate) actions: Vec<Action>,
}

/// The fault of the `number`th call of a kind, counted from the building of the arena.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Planned {
    pub(crate) call: Call,
    pub(crate) number: u64,
    pub(crate) fault: Fault,
}

#[derive(Clone, Debug)]
pub(crate) enum Action {
    Step(Vec<Op>, Ending),
    Trim,
    /// Overwrites the persistent buffer.
    Write,
}

/// The end of a scope, unless an error ends it before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    Returns,
    Fails,
    Panics,
}

/// The next operation of a scope. A number selects one of the live tensors.
#[derive(Clone, Debug)]
pub(crate) enum Op {
    /// Uploads a tensor of one of [`LENGTHS`]; in a scratch, which cannot upload, acts like `Fill`.
    Upload(usize),
    /// Makes a tensor of one value.
    Fill(usize),
    Copy(usize),
    Overwrite(usize),
    Save(usize),
    /// Frees a tensor before its scope ends.
    GiveBack(usize),
    /// Checks one tensor.
    Look(usize),
    /// Makes a request of [`HUGE`].
    Huge(usize),
    /// Copies from the persistent buffer, or to it.
    FromKept,
    ToKept(usize),
    /// Copies, in a scratch, from an outer tensor, or to one.
    FromOuter(usize),
    ToOuter(usize),
    Scratch(Vec<Op>, Ending),
}

impl Program {
    pub(crate) fn draw(random: &mut Random, kind: Kind) -> Self {
        let capacity_bytes = 256 * random.extent(1, 24);
        let pool = chance(random, 70).then(|| {
            let cap = 256 * random.extent(1, 96);
            (cap, if chance(random, 50) { random.extent(0, cap) } else { 0 })
        });
        let growth = chance(random, 40).then(|| capacity_bytes + 256 * random.extent(0, 64));
        Self {
            kind,
            capacity_bytes,
            pool,
            growth,
            checked: chance(random, 12),
            step_deadline: chance(random, 25),
            stops_at_errors: chance(random, 50),
            fault: Planned::new(random, kind),
            actions: (0..random.extent(1, 6)).map(|_| Action::new(random)).collect(),
        }
    }
}

impl Planned {
    fn new(random: &mut Random, kind: Kind) -> Option<Self> {
        let fault = match kind {
            Kind::Sound => return None,
            Kind::Faulty => match random.below(10) {
                0..6 => Fault::Fail,
                6..8 => Fault::Spoil,
                _ => Fault::Delay(SLOW),
            },
            Kind::Stalling if chance(random, 75) => Fault::Never,
            Kind::Stalling => Fault::Delay(2 * STALL_DEADLINE),
        };
        let call = CALLS[random.below(CALLS.len() as u32) as usize];
        let most = match call {
            Call::CreatePool | Call::DestroyPool => 1,
            Call::Allocate | Call::Free | Call::TrimPool => 2,
            Call::FreeBytes | Call::PoolAllocate | Call::PoolFree => 6,
            _ => 24,
        };
        Some(Self { call, number: random.extent(1, most) as u64, fault })
    }
}

impl Action {
    fn new(random: &mut Random) -> Self {
        match random.below(8) {
            0 => Self::Trim,
            1 => Self::Write,
            _ => {
                let (ops, ending) = scope(random, 3, 24);
                Self::Step(ops, ending)
            }
        }
    }
}

fn chance(random: &mut Random, percent: u32) -> bool {
    random.below(100) < percent
}

fn scope(random: &mut Random, depth: u32, longest: usize) -> (Vec<Op>, Ending) {
    let ops = (0..random.extent(0, longest)).map(|_| op(random, depth, longest)).collect();
    let ending = match random.below(12) {
        0..10 => Ending::Returns,
        10 => Ending::Fails,
        _ => Ending::Panics,
    };
    (ops, ending)
}

fn op(random: &mut Random, depth: u32, longest: usize) -> Op {
    // The large lengths are rare: few arenas hold one.
    let length = random.below(4 * LENGTHS.len() as u32 - 3) as usize / 4;
    let pick = random.next_u64() as usize >> 1;
    match random.below(36) {
        0..5 => Op::Upload(length),
        5..10 => Op::Fill(length),
        10..14 => Op::Copy(pick),
        14..17 => Op::Overwrite(pick),
        17..20 => Op::Save(pick),
        20 => Op::Look(pick),
        21 => Op::Huge(pick % HUGE.len()),
        22 => Op::FromKept,
        23 => Op::ToKept(pick),
        24..26 => Op::FromOuter(pick),
        26..28 => Op::ToOuter(pick),
        28..32 => Op::GiveBack(pick),
        _ if depth == 0 => Op::Fill(length),
        _ => {
            let (ops, ending) = scope(random, depth - 1, longest / 2);
            Op::Scratch(ops, ending)
        }
    }
}

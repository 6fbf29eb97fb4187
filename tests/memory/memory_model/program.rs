//! Random programs: an arena's settings, what its steps do, and the fault that one call of the driver meets.
//!
//! Invariant: the numbers drawn from [`Random`] and a [`Kind`] name one program, the same on every machine. The fuzzer
//! (`fuzz/targets/arena.rs`) draws them from its bytes.

use crate::support::Random;
use std::time::Duration;
use stepscope::faults::{Call, Fault};

/// Elements of the tensors that are made, so few that a buffer of each length can read back what a scratch holds. Padded
/// they take 256, 256, 256, 512, 1024, 1792 and 10240 bytes.
pub(crate) const LENGTHS: [usize; 7] = [1, 16, 64, 65, 200, 400, 2500];
/// Requests that no arena can serve: the first two are refused with their size, the last has no size.
pub(crate) const HUGE: [usize; 3] = [1 << 40, usize::MAX / 4, usize::MAX];
/// Which of [`LENGTHS`] the persistent buffer has.
pub(crate) const KEPT: usize = 2;
/// The deadline of every call in a program in which one stalls.
pub(crate) const STALL_DEADLINE: Duration = Duration::from_millis(60);
/// The calls of a step's life: memory, copies, launches. Captures and staged uploads have tests of their own.
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

/// What a program may meet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// No fault.
    Sound,
    /// One call fails, spoils the device or is slow.
    Faulty,
    /// One call never returns, or later than its deadline. Each costs a wait.
    Stalling,
}

#[derive(Clone, Debug)]
pub(crate) struct Program {
    pub(crate) kind: Kind,
    pub(crate) capacity_bytes: usize,
    /// Cap and prime.
    pub(crate) pool: Option<(usize, usize)>,
    /// The largest capacity.
    pub(crate) growth: Option<usize>,
    pub(crate) checked: bool,
    /// Whether steps have a deadline, and so wait for the device.
    pub(crate) step_deadline: bool,
    /// Whether a scope ends with the first error in it, or goes on.
    pub(crate) stops_at_errors: bool,
    pub(crate) fault: Option<Planned>,
    pub(crate) actions: Vec<Action>,
}

/// The `number`th call of a kind, counted from the arena's building, meets a fault.
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

/// How a scope ends, unless an error ends it before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    Returns,
    Fails,
    Panics,
}

/// What a scope does next. A number chooses among the tensors that are alive.
#[derive(Clone, Debug)]
pub(crate) enum Op {
    /// A tensor of [`LENGTHS`] from the host; in a scratch, which cannot upload, as `Fill`.
    Upload(usize),
    /// A tensor of one value.
    Fill(usize),
    Copy(usize),
    Overwrite(usize),
    Save(usize),
    /// Ends a tensor before its scope does.
    GiveBack(usize),
    /// Looks at one tensor.
    Look(usize),
    /// A request of [`HUGE`].
    Huge(usize),
    /// From the persistent buffer, and to it.
    FromKept,
    ToKept(usize),
    /// In a scratch: from an outer tensor, and to one.
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
    // The large ones are rare: few arenas hold one.
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

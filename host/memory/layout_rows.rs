//! What the functions of `layout.rs`, `sections.rs` and `reuse.rs` give for multiples of the alignment, the words beside them, and as many at
//! the end of the address space. `ci/layout` proves what a model of them gives for all words.
//!
//! Invariant: model and functions give the same rows, those whose digests `layout_rows.txt` has. A function that is changed on purpose is
//! changed in `ci/layout_model.py` too; `STEPSCOPE_LAYOUT_ROWS=DIR` writes the rows here, as `ci/layout rows DIR` does there.

#![forbid(unsafe_code)]

use super::checked::GUARD_BYTES;
use super::layout::{ALIGN_BYTES, Bump, End, grown, guarded, padded};
use super::reuse::Reuse;
use super::sections::Sections;
use sha2::{Digest, Sha256};
use std::fmt::{Display, Write as _};
use std::path::Path;

/// Multiples of the alignment, the words before and behind them, and the same from the last word down.
fn words() -> Vec<usize> {
    let small = small();
    small.iter().copied().chain(small.iter().map(|number| usize::MAX - number)).collect()
}

fn small() -> Vec<usize> {
    let around =
        |unit: usize| [(unit * ALIGN_BYTES).checked_sub(1), Some(unit * ALIGN_BYTES), Some(unit * ALIGN_BYTES + 1)];
    (0..5).flat_map(around).flatten().collect()
}

const CAPACITIES: [usize; 6] = [0, 256, 512, 768, 1024, usize::MAX - 255];

/// Bytes that are taken from the front and from the back.
type State = [usize; 2];

/// Every state of some multiples that fit.
fn states(capacity: usize) -> Vec<State> {
    let last = capacity / ALIGN_BYTES;
    let units: Vec<usize> =
        (0..=last.min(4)).chain([last - last.min(1), last].into_iter().filter(|_| last > 4)).collect();
    let pairs = units.iter().flat_map(|&front| units.iter().map(move |&back| [front, back]));
    pairs.filter(|[front, back]| front + back <= last).map(|state| state.map(|units| units * ALIGN_BYTES)).collect()
}

/// The states from one to another.
fn between(capacity: usize, low: State, high: State) -> impl Iterator<Item = State> {
    states(capacity)
        .into_iter()
        .filter(move |state| (0..2).all(|end| low[end] <= state[end] && state[end] <= high[end]))
}

fn bump(capacity: usize, [front, back]: State) -> Bump {
    let (_, bump) = Bump::new(capacity).take(End::Front, front).expect("it fits");
    bump.take(End::Back, back).expect("it fits").1
}

/// Where the next takes from either end would be.
fn edges(bump: Bump) -> String {
    let [front, back] = [End::Front, End::Back].map(|end| bump.take(end, 0).expect("no bytes fit").0);
    format!("{front} {back}")
}

fn text(result: Option<impl Display>) -> String {
    result.map_or("none".into(), |result| result.to_string())
}

/// The functions' names, and the rows of each.
fn rows() -> Vec<(&'static str, String)> {
    let names = ["padded", "new", "take", "since", "without", "reserve", "give", "again", "guarded", "grown"];
    let mut rows: Vec<(&str, String)> = names.map(|name| (name, String::new())).into();
    let mut row = |name: &str, arguments: &[usize], result: String| {
        let (_, rows) = rows.iter_mut().find(|(other, _)| *other == name).expect("every name is listed");
        let arguments: Vec<String> = arguments.iter().map(usize::to_string).collect();
        writeln!(rows, "{}: {result}", arguments.join(" ")).expect("a string grows");
    };

    for bytes in words() {
        row("padded", &[bytes], text(padded(bytes)));
        row("new", &[bytes], edges(Bump::new(bytes)));
        row("guarded", &[bytes], guarded(bytes, GUARD_BYTES).to_string());
        for limit in words() {
            row("grown", &[bytes, limit], grown(bytes, limit).to_string());
            let section = Sections::default().reserve(limit, bytes);
            assert!(section.as_ref().is_none_or(|section| section.bytes() == bytes));
            row("reserve", &[limit, bytes], text(section.map(|section| section.start())));
        }
        for length in [256, 512, 768, 1024] {
            let reuse = Reuse::default();
            reuse.begin(Bump::new(1024), End::Front);
            assert!(reuse.give(bump(1024, [1024, 0]), 0..length));
            row("again", &[length, bytes], again(&reuse, bytes));
        }
    }
    for capacity in CAPACITIES {
        for state in states(capacity) {
            let ([front, back], now) = (state, bump(capacity, state));
            for end in [End::Front, End::Back] {
                for bytes in words() {
                    let taken = now.take(end, bytes).map(|(offset, after)| format!("{offset} {}", edges(after)));
                    row("take", &[capacity, front, back, end as usize, bytes], text(taken));
                }
            }
            for low in between(capacity, [0; 2], state) {
                let mark = bump(capacity, low);
                let [[low_offset, low_bytes], [high_offset, high_bytes]] = now.since(mark).map(<[usize; 2]>::from);
                let since = format!("{low_offset} {low_bytes} {high_offset} {high_bytes}");
                row("since", &[capacity, front, back, low[0], low[1]], since);
                for high in between(capacity, low, state) {
                    if (0..2).all(|end| low[end] == high[end] || high[end] == state[end]) {
                        let left = now.without(mark, bump(capacity, high));
                        row("without", &[capacity, front, back, low[0], low[1], high[0], high[1]], edges(left));
                    }
                }
            }
        }
    }
    let capacity = 768;
    let blocks: Vec<usize> = small().into_iter().chain([usize::MAX - 255, usize::MAX]).collect();
    for state in states(capacity) {
        for low in between(capacity, [0; 2], state) {
            for end in [End::Front, End::Back] {
                for (first, behind) in
                    blocks.iter().flat_map(|&first| blocks.iter().map(move |&behind| (first, behind)))
                {
                    let reuse = Reuse::default();
                    reuse.begin(bump(capacity, low), end);
                    let own = reuse.give(bump(capacity, state), first..behind);
                    let arguments = [state[0], state[1], low[0], low[1], end as usize, first, behind];
                    row("give", &arguments, own.to_string());
                }
            }
        }
    }
    rows
}

/// Whether the only block, at the front, is handed out.
fn again(reuse: &Reuse, bytes: usize) -> String {
    match (padded(bytes), reuse.take(bytes)) {
        (None, None) => "none".into(),
        (_, taken) => (taken == Some(0)).to_string(),
    }
}

#[test]
fn the_model_that_is_proved_gives_the_same_rows() {
    let rows = rows();
    if let Some(folder) = std::env::var_os("STEPSCOPE_LAYOUT_ROWS") {
        for (name, rows) in &rows {
            std::fs::write(Path::new(&folder).join(name), rows).expect("the rows can be written");
        }
    }
    let digests = rows.iter().map(|(name, rows)| {
        let digest = Sha256::digest(rows).iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        format!("{name} {} {digest}\n", rows.lines().count())
    });
    assert_eq!(digests.collect::<String>(), include_str!("layout_rows.txt"), "change ci/layout_model.py too");
}

#[test]
fn sections_that_are_alive_bound_the_next() {
    // In any order of drops: the model's `limit` is the start of the first that is alive.
    let sections = Sections::default();
    let mut alive: Vec<_> = [300, 256, 1, 700].into_iter().map(|bytes| sections.reserve(5000, bytes)).collect();
    for gone in [1, 2, 1, 0] {
        alive.remove(gone);
        let limit = alive.iter().flatten().map(|section| section.start()).min().unwrap_or(5000);
        assert_eq!(sections.limit(5000), limit);
        assert_eq!(sections.reserve(5000, 10).map(|section| section.start()), padded(limit - 10 - 255));
    }
}

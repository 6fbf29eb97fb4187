//! A recording in the format of PyTorch's memory snapshot.
//!
//! The fields are those of `torch.cuda.memory._snapshot()` (`torch/csrc/cuda/memory_snapshot.cpp`),
//! which `torch/cuda/_memory_viz.py` and `torch/utils/viz/MemoryViz.js` read.
//!
//! Invariants that these readers need:
//!
//! - The blocks of a segment follow one another without a gap.
//! - Every allocation in the trace lies in a segment.
//! - `free_completed` follows its `free_requested` directly.
//! - Integers are signed and at most eight bytes long. The viewer's reader cannot add the type that
//!   it uses for longer ones.

use super::occupied_bytes;
use super::recording::{Held, Recording};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use stepscope_core::{Event, Kind, Origin};

#[derive(Serialize)]
pub(super) struct Snapshot<'r> {
    segments: Vec<Segment>,
    /// The traces, one per device.
    device_traces: Vec<Vec<TraceEntry>>,
    allocator_settings: Settings<'r>,
}

/// The allocator settings that the viewer shows. The last two fields have PyTorch's names.
#[derive(Serialize)]
struct Settings<'r> {
    allocator: &'static str,
    device: &'r str,
    forgotten_events: i64,
    trace_alloc_max_entries: i64,
    trace_alloc_overflowed: bool,
}

#[derive(Serialize)]
struct Segment {
    device: i64,
    address: i64,
    total_size: i64,
    allocated_size: i64,
    active_size: i64,
    requested_size: i64,
    stream: i64,
    segment_type: &'static str,
    /// (0, 0) is PyTorch's common pool. The viewer also draws the reserve of all other pools.
    segment_pool_id: (i64, i64),
    is_expandable: bool,
    frames: Vec<Frame>,
    blocks: Vec<Block>,
}

#[derive(Serialize)]
struct Block {
    address: i64,
    size: i64,
    requested_size: i64,
    state: &'static str,
    frames: Vec<Frame>,
}

#[derive(Serialize)]
struct TraceEntry {
    action: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    addr: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    device_free: Option<i64>,
    size: i64,
    stream: i64,
    time_us: i64,
    #[serde(skip_serializing_if = "Option::is_none")]
    category: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    frames: Option<Vec<Frame>>,
}

#[derive(Serialize)]
struct Frame {
    filename: &'static str,
    line: i64,
    name: String,
}

/// The viewer needs this category in addition to the others, and fails where it tries to add it
/// itself.
const NO_PHASE: &str = "unknown";

impl Recording {
    /// Exports the recording as a pickle of PyTorch's `torch.cuda.memory._snapshot()`.
    /// `torch/cuda/_memory_viz.py` reads it, and so does the viewer at
    /// <https://pytorch.org/memory_viz>, which shows the phases as categories. The device and the
    /// stream are 0. The arena's reservation is one segment, and every other tensor is a segment of
    /// its own. An event takes about 400 bytes.
    pub fn pickle(&self) -> Vec<u8> {
        let mut end = self.start.clone();
        let trace = trace(self, &mut end);
        let snapshot = snapshot(self, &end, trace);
        serde_pickle::to_vec(&snapshot, serde_pickle::SerOptions::new()).expect("plain data can always be pickled")
    }
}

fn snapshot<'r>(recording: &'r Recording, end: &Held, trace: Vec<TraceEntry>) -> Snapshot<'r> {
    let settings = Settings {
        allocator: "stepscope",
        device: &recording.device,
        forgotten_events: int(recording.forgotten_events),
        trace_alloc_max_entries: int(recording.limit as u64),
        trace_alloc_overflowed: recording.forgotten_events > 0,
    };
    Snapshot { segments: segments(end), device_traces: vec![trace], allocator_settings: settings }
}

/// Returns the trace. `held` changes from the state before it to the state after it.
fn trace(recording: &Recording, held: &mut Held) -> Vec<TraceEntry> {
    let mut trace = Vec::with_capacity(3 * recording.events.len() + 1);
    let mut before: BTreeSet<u64> = held.live.keys().copied().collect();
    for event in &recording.events {
        let entry = |action, address, bytes| TraceEntry {
            action,
            addr: Some(int(address)),
            device_free: None,
            size: int(bytes),
            stream: 0,
            time_us: int(event.time_us),
            category: None,
            frames: None,
        };
        for ended in held.apply(event) {
            let (address, bytes) = (ended.address, ended.bytes as u64);
            // Readers identify an allocation by its `alloc`. If that is not in the trace, they read
            // it here.
            let unknown = before.remove(&address);
            for action in ["free_requested", "free_completed"] {
                let entry = entry(action, address, bytes);
                trace.push(if unknown { described(entry, &ended) } else { entry });
            }
            if ended.origin != Origin::Arena {
                trace.push(entry("segment_free", address, occupied_bytes(&ended)));
            }
        }
        let bytes = event.bytes as u64;
        match event.kind {
            Kind::Reserve => trace.push(described(entry("segment_alloc", event.address, bytes), event)),
            Kind::Release => trace.push(entry("segment_free", event.address, bytes)),
            Kind::Allocate if bytes == 0 => {}
            Kind::Allocate => {
                if event.origin != Origin::Arena {
                    trace.push(described(entry("segment_alloc", event.address, occupied_bytes(event)), event));
                }
                trace.push(described(entry("alloc", event.address, bytes), event));
            }
            Kind::Refuse { free_bytes } => {
                let oom = TraceEntry { addr: None, device_free: Some(int(free_bytes)), ..entry("oom", 0, bytes) };
                trace.push(described(oom, event));
            }
            _ => {}
        }
    }
    trace.push(TraceEntry {
        action: "snapshot",
        addr: Some(0),
        device_free: None,
        size: 0,
        stream: 0,
        time_us: recording.events.back().map_or(0, |last| int(last.time_us)),
        category: Some(NO_PHASE),
        frames: None,
    });
    trace
}

/// Adds the purpose of the memory to the entry.
fn described(entry: TraceEntry, event: &Event) -> TraceEntry {
    let category = if event.phase.is_empty() { NO_PHASE } else { event.phase };
    TraceEntry { category: Some(category), frames: Some(vec![frame(event)]), ..entry }
}

fn frame(event: &Event) -> Frame {
    let name = match (event.phase, event.origin) {
        ("", _) => event.label.to_string(),
        (phase, Origin::Overflow) => format!("{} ({phase}, overflow)", event.label),
        (phase, _) => format!("{} ({phase})", event.label),
    };
    Frame { filename: event.file, line: i64::from(event.line), name }
}

/// Returns the arena's reservation and each tensor outside it, in address order.
fn segments(held: &Held) -> Vec<Segment> {
    let elsewhere = held.live.values().filter(|live| live.origin != Origin::Arena);
    let all: BTreeMap<u64, &Event> =
        held.reserved.values().chain(elsewhere).map(|event| (event.address, event)).collect();
    all.into_values().map(|event| segment(held, event)).collect()
}

fn segment(held: &Held, event: &Event) -> Segment {
    let total_size = if event.kind == Kind::Reserve { event.bytes as u64 } else { occupied_bytes(event) };
    let blocks = blocks(held, event.address, event.address.saturating_add(total_size));
    let active = || blocks.iter().filter(|block| block.state == ACTIVE);
    let allocated_size = active().map(|block| block.size).sum();
    Segment {
        device: 0,
        address: int(event.address),
        total_size: int(total_size),
        allocated_size,
        active_size: allocated_size,
        requested_size: active().map(|block| block.requested_size).sum(),
        stream: 0,
        segment_type: "large",
        segment_pool_id: match event.origin {
            Origin::Persistent => (0, 0),
            Origin::Arena => (0, 1),
            Origin::Overflow => (0, 2),
        },
        is_expandable: false,
        frames: vec![frame(event)],
        blocks,
    }
}

const ACTIVE: &str = "active_allocated";

/// Returns the live tensors of `start..end` and the gaps between them, which together cover exactly
/// that range.
fn blocks(held: &Held, start: u64, end: u64) -> Vec<Block> {
    let gap = |from: u64, to: u64| {
        let (address, size) = (int(from), int(to - from));
        (size > 0).then(|| Block { address, size, requested_size: 0, state: "inactive", frames: Vec::new() })
    };
    let mut blocks = Vec::new();
    let mut at = start;
    let mut live = held.live.range(start..end).map(|(_, live)| live).peekable();
    while let Some(tensor) = live.next() {
        blocks.extend(gap(at, tensor.address));
        let limit = live.peek().map_or(end, |next| next.address) - tensor.address;
        let size = occupied_bytes(tensor).min(limit);
        blocks.push(Block {
            address: int(tensor.address),
            size: int(size),
            requested_size: int((tensor.bytes as u64).min(size)),
            state: ACTIVE,
            frames: vec![frame(tensor)],
        });
        at = tensor.address + size;
    }
    blocks.extend(gap(at, end));
    blocks
}

/// Addresses and sizes stay far below 2^63.
fn int(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::super::tests::{ARENA, OVERFLOW, WEIGHTS, event, step};
    use super::*;
    use proptest::prelude::*;
    use serde_json::{Value, json};
    use std::process::Command;

    /// A script that reads the pickle with Python's own module and prints it as JSON, with the
    /// facts that a narrower reader needs.
    const READ: &str = r#"
import json, pickle, pickletools, sys
def marked(value):  # JSON has no tuples
    if isinstance(value, dict):
        return {key: marked(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return {"tuple": [marked(item) for item in value]}
    return [marked(item) for item in value] if isinstance(value, list) else value

data = open(sys.argv[1], "rb").read()
opcodes = [(op.name, at) for op, _, at in pickletools.genops(data)]
print(json.dumps({
    "snapshot": marked(pickle.loads(data)),
    "opcodes": sorted({name for name, _ in opcodes}),
    "longest_long": max([data[at + 1] for name, at in opcodes if name == "LONG1"], default=0),
}))
"#;

    fn read_by_python(recording: &Recording) -> Value {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), recording.pickle()).unwrap();
        let run = Command::new("python3").arg("-c").arg(READ).arg(file.path()).output();
        let run = run.unwrap_or_else(|error| panic!("this test needs python3 in the PATH: {error}"));
        assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
        serde_json::from_slice(&run.stdout).unwrap()
    }

    fn sample() -> Recording {
        let mut recording = Recording::new("emulated", 100);
        let weights = Event {
            phase: "",
            label: "W\u{f6}rter \"1\"".into(),
            ..event(1_700_000_000_000_000, Kind::Allocate, WEIGHTS, 1000)
        };
        recording.push(event(1_700_000_000_000_000, Kind::Reserve, ARENA, 4096));
        recording.push(weights);
        recording.push(event(1_700_000_000_000_005, Kind::Allocate, ARENA, 100));
        recording.push(event(1_700_000_000_000_006, Kind::Allocate, ARENA + 256, 0));
        recording.push(Event { phase: "backward", ..event(1_700_000_000_000_007, Kind::Allocate, ARENA + 256, 512) });
        recording.push(event(1_700_000_000_000_008, Kind::Allocate, OVERFLOW, 5000));
        recording.push(event(1_700_000_000_000_009, Kind::Refuse { free_bytes: 7 }, 0, 1 << 40));
        recording.push(event(1_700_000_000_000_010, Kind::Free, OVERFLOW, 5000));
        recording.push(event(1_700_000_000_000_011, Kind::Rewind, ARENA + 256, 512));
        recording.push(event(1_700_000_000_000_012, Kind::Allocate, ARENA + 1024, 77));
        recording
    }

    #[test]
    fn python_reads_the_events() {
        let read = read_by_python(&sample());
        let snapshot = &read["snapshot"];
        let frame = |name: &str| json!([{"filename": "host/core/src/ops/activation.rs", "line": 21, "name": name}]);
        let gap = |address: u64, size: u64| {
            json!({"address": address, "size": size, "requested_size": 0,
            "state": "inactive", "frames": []})
        };
        let tensor = |address: u64, size: u64, requested: u64, name: &str| {
            json!({"address": address, "size": size, "requested_size": requested, "state": "active_allocated",
                "frames": frame(name)})
        };
        assert_eq!(
            snapshot["segments"],
            json!([
                {"device": 0, "address": ARENA, "total_size": 4096, "allocated_size": 512, "active_size": 512,
                    "requested_size": 177, "stream": 0, "segment_type": "large", "segment_pool_id": {"tuple": [0, 1]},
                    "is_expandable": false, "frames": frame("gelu (forward)"), "blocks": [
                        tensor(ARENA, 256, 100, "gelu (forward)"),
                        gap(ARENA + 256, 768),
                        tensor(ARENA + 1024, 256, 77, "gelu (forward)"),
                        gap(ARENA + 1280, 2816),
                    ]},
                {"device": 0, "address": WEIGHTS, "total_size": 1024, "allocated_size": 1024, "active_size": 1024,
                    "requested_size": 1000, "stream": 0, "segment_type": "large", "segment_pool_id": {"tuple": [0, 0]},
                    "is_expandable": false, "frames": frame("W\u{f6}rter \"1\""), "blocks": [
                        tensor(WEIGHTS, 1024, 1000, "W\u{f6}rter \"1\""),
                    ]},
            ])
        );

        let traces = snapshot["device_traces"].as_array().unwrap();
        assert_eq!(traces.len(), 1);
        let trace = traces[0].as_array().unwrap();
        let seen: Vec<Value> = trace
            .iter()
            .map(|entry| {
                let microseconds = entry["time_us"].as_u64().unwrap() - 1_700_000_000_000_000;
                json!([microseconds, entry["action"], entry["addr"], entry["size"], entry["category"]])
            })
            .collect();
        assert_eq!(
            json!(seen),
            json!([
                [0, "segment_alloc", ARENA, 4096, "forward"],
                [0, "segment_alloc", WEIGHTS, 1024, "unknown"],
                [0, "alloc", WEIGHTS, 1000, "unknown"],
                [5, "alloc", ARENA, 100, "forward"],
                [7, "alloc", ARENA + 256, 512, "backward"],
                [8, "segment_alloc", OVERFLOW, 5120, "forward"],
                [8, "alloc", OVERFLOW, 5000, "forward"],
                [9, "oom", null, 1u64 << 40, "forward"],
                [10, "free_requested", OVERFLOW, 5000, null],
                [10, "free_completed", OVERFLOW, 5000, null],
                [10, "segment_free", OVERFLOW, 5120, null],
                [11, "free_requested", ARENA + 256, 512, null],
                [11, "free_completed", ARENA + 256, 512, null],
                [12, "alloc", ARENA + 1024, 77, "forward"],
                [12, "snapshot", 0, 0, "unknown"],
            ])
        );
        assert_eq!(trace[7]["device_free"], 7);
        assert!(trace.iter().all(|entry| entry["stream"] == 0));
        assert_eq!(trace[4]["frames"], frame("gelu (backward)"));
        assert_eq!(trace[6]["frames"], frame("gelu (forward, overflow)"));
        assert_eq!(
            snapshot["allocator_settings"],
            json!({"allocator": "stepscope", "device": "emulated", "forgotten_events": 0,
                "trace_alloc_max_entries": 100, "trace_alloc_overflowed": false})
        );
    }

    /// Checks that the viewer's own pickle reader can read the file. That reader supports only
    /// these opcodes of protocols 2 to 4. It reads integers of more than eight bytes as another
    /// type, and passes a list's batch as arguments of one call.
    #[test]
    fn the_viewer_knows_every_opcode() {
        let known = [
            "APPENDS",
            "BININT",
            "BINUNICODE",
            "EMPTY_DICT",
            "EMPTY_LIST",
            "LONG1",
            "MARK",
            "NEWFALSE",
            "NEWTRUE",
            "PROTO",
            "SETITEMS",
            "STOP",
            "TUPLE",
        ];
        let mut long = sample();
        (0..5000).for_each(|at| long.push(event(1_700_000_000_000_020 + at, Kind::Allocate, OVERFLOW, 1)));
        for recording in [sample(), Recording::new("emulated", 10), long] {
            let read = read_by_python(&recording);
            let unknown: Vec<_> = read["opcodes"]
                .as_array()
                .unwrap()
                .iter()
                .filter(|name| !known.contains(&name.as_str().unwrap()))
                .collect();
            assert!(unknown.is_empty(), "{unknown:?}");
            assert!(read["longest_long"].as_u64().unwrap() <= 8, "{}", read["longest_long"]);
        }
    }

    #[test]
    fn segments_include_forgotten_events() {
        let mut recording = Recording::new("emulated", 2);
        sample().events().for_each(|event| recording.push(event.clone()));
        let (short, full) = (read_by_python(&recording), read_by_python(&sample()));
        assert_eq!(short["snapshot"]["segments"], full["snapshot"]["segments"]);
        assert_eq!(
            short["snapshot"]["device_traces"][0].as_array().unwrap().len(),
            2 + 1 + 1,
            "a rewind is two entries"
        );
        assert_eq!(short["snapshot"]["allocator_settings"]["trace_alloc_overflowed"], true);
        assert_eq!(short["snapshot"]["allocator_settings"]["forgotten_events"], 8);
    }

    proptest! {
        /// Checks the assertions of `_memory_viz.py`, on which the viewer also relies, for every
        /// segment and for the trace.
        #[test]
        fn blocks_fill_segments(
            steps in prop::collection::vec(prop::collection::vec(0usize..3000, 0..12), 0..4),
            unfinished in prop::collection::vec(1usize..700, 0..8),
            limit in 0usize..60,
        ) {
            let mut recording = Recording::new("emulated", limit);
            recording.push(event(0, Kind::Reserve, ARENA, 8192));
            for (at, tensors) in steps.iter().enumerate() {
                let tensors: Vec<_> = tensors.iter().map(|&bytes| (bytes, "forward")).collect();
                step(&mut recording, 1000 * at as u64, &tensors, 8192);
            }
            let mut offset = 0;
            for bytes in &unfinished {
                recording.push(event(9999, Kind::Allocate, ARENA + offset, *bytes));
                offset += 256 * bytes.div_ceil(256) as u64;
            }
            recording.push(event(9999, Kind::Allocate, OVERFLOW, 300));

            let mut end = recording.start.clone();
            // The live addresses before the trace, which the trace then changes.
            let mut live: BTreeSet<i64> =
                segments(&end).iter().flat_map(|segment| active(segment).map(|block| block.address)).collect();
            let trace = trace(&recording, &mut end);
            for entry in &trace {
                match (entry.action, entry.addr) {
                    ("alloc", Some(address)) => prop_assert!(live.insert(address), "allocated twice"),
                    ("free_completed", Some(address)) => prop_assert!(live.remove(&address), "freed twice"),
                    _ => {}
                }
            }
            let snapshot = snapshot(&recording, &end, trace);
            let mut at_end = BTreeSet::new();
            for segment in &snapshot.segments {
                let mut at = segment.address;
                for block in &segment.blocks {
                    prop_assert_eq!(block.address, at, "blocks must be adjacent");
                    prop_assert!(block.size > 0 && block.requested_size <= block.size);
                    at += block.size;
                }
                prop_assert_eq!(at, segment.address + segment.total_size);
                at_end.extend(active(segment).map(|block| block.address));
                prop_assert_eq!(segment.allocated_size, active(segment).map(|block| block.size).sum::<i64>());
            }
            prop_assert_eq!(at_end.len(), unfinished.len() + 1);
            prop_assert_eq!(live, at_end);
        }
    }

    fn active(segment: &Segment) -> impl Iterator<Item = &Block> {
        segment.blocks.iter().filter(|block| block.state == ACTIVE)
    }
}

//! The rules for every kernel's PTX.
//!
//! Invariant: unreadable input is a failure, and so are a kernel without a report, a report without
//! a kernel, and an attribute without a function.

use std::collections::{BTreeMap, BTreeSet};

use crate::tools::Outcome;

/// PTX for this architecture contains the kernels of warpgroups, and no other PTX contains them.
const WARPGROUP_ARCH: &str = "sm_90a";
/// The registers of a multiprocessor, of which the threads of a block get a multiple of 8 each.
const REGISTERS: u64 = 64 * 1024;
const FLOATS: [&str; 7] = ["f16", "f16x2", "bf16", "bf16x2", "f32", "f32x2", "f64"];

/// A rule for instructions: its name, its meaning, and a function that is true if one breaks it.
type Rule = (&'static str, &'static str, fn(&str) -> bool);

const INSTRUCTION_RULES: [Rule; 7] = [
    ("approximate", "an approximate instruction", |op| op.contains(".approx")),
    ("flush", "flushes subnormals to zero", |op| op.contains(".ftz")),
    ("full-division", "division that is not correctly rounded", |op| op.starts_with("div.full")),
    ("rounding", "arithmetic without .rn: ptxas may fuse it", |op| {
        is_float(op, &["add", "sub", "mul", "fma", "mad", "div", "rcp", "sqrt"])
            && ![".rn", ".approx", "div.full"].iter().any(|part| op.contains(part))
    }),
    ("float-atomic", "a float atomic: the order of the sum is not fixed", |op| {
        ["atom", "red", "redux"].contains(&first(op)) && op.split('.').any(|part| FLOATS.contains(&part))
    }),
    ("float-min-max", "float min or max that may lose a NaN: decide by comparison, or use .NaN", |op| {
        is_float(op, &["min", "max"]) && !op.contains(".NaN.")
    }),
    (
        "bit-count",
        "counts the bits of 64, which rust-cuda gets wrong: count in u32 (device/rust-cuda/README.md)",
        |op| ["clz.b64", "popc.b64"].contains(&op),
    ),
];

fn first(op: &str) -> &str {
    op.split('.').next().unwrap_or_default()
}

/// Returns true for one of these instructions whose type is a float.
fn is_float(op: &str, names: &[&str]) -> bool {
    names.contains(&first(op)) && FLOATS.contains(&op.rsplit('.').next().unwrap_or_default())
}

/// Returns true for an instruction that the rules allow in a kernel; docs/numbers.md has the bound.
/// On compute capability 9.0 it has one set of bits, which the emulator computes. The kernel
/// `scalars` compares them.
fn is_excepted(kernel: &str, op: &str) -> bool {
    let of_attention = ["forward", "bwd_dq", "bwd_dkv", "bwd_dkv_ds", "bwd_scores"];
    let name = kernel.trim_end_matches(|letter: char| letter.is_ascii_digit()).strip_suffix('_');
    let name = name.and_then(|name| name.strip_prefix("flash_")).unwrap_or_default();
    let part = ["_of_bf16", "_of_tf32", "_wgmma"].iter().find_map(|end| name.strip_suffix(end));
    op == "ex2.approx.ftz.f32" && (kernel == "scalars" || part.is_some_and(|part| of_attention.contains(&part)))
}

/// A kernel of the library: the threads and dynamic shared bytes of a block, and whether it is a
/// kernel of warpgroups.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Kernel {
    threads: u64,
    shared: u64,
    is_warpgroup: bool,
}

/// Reads the output of `stepscope check --list`: name, threads, dynamic shared bytes, and `sm_90a`
/// for a kernel of warpgroups.
pub(crate) fn listed(text: &str) -> Outcome<BTreeMap<String, Kernel>> {
    let mut kernels = BTreeMap::new();
    for line in text.lines().filter(|line| !line.is_empty()) {
        let words: Vec<&str> = line.split(' ').collect();
        let kernel = match words[..] {
            [_, threads, shared] => Some((threads, shared, false)),
            [_, threads, shared, WARPGROUP_ARCH] => Some((threads, shared, true)),
            _ => None,
        };
        let kernel = kernel.and_then(|(threads, shared, is_warpgroup)| {
            Some(Kernel { threads: threads.parse().ok()?, shared: shared.parse().ok()?, is_warpgroup })
        });
        let kernel = kernel.ok_or_else(|| format!("not a kernel in the list of kernels: `{line}`"))?;
        if kernels.insert(words[0].to_owned(), kernel).is_some() {
            return Err(format!("listed twice: {}", words[0]));
        }
    }
    if kernels.is_empty() { Err("a list without kernels".to_owned()) } else { Ok(kernels) }
}

/// An instruction without operands.
struct Instruction<'a> {
    is_labelled: bool,
    is_conditional: bool,
    /// Empty after a label at the end of a block.
    op: &'a str,
}

struct Function<'a> {
    name: &'a str,
    is_entry: bool,
    /// The text between name and body.
    attributes: &'a str,
    body: Vec<Instruction<'a>>,
}

fn without_comments(ptx: &str) -> String {
    let mut parts = ptx.split("/*");
    let mut text = parts.next().unwrap_or_default().to_owned();
    text.extend(parts.filter_map(|part| part.split_once("*/")).map(|(_, rest)| rest));
    text.lines().map(|line| line.split("//").next().unwrap_or_default().to_owned() + "\n").collect()
}

/// Returns the functions of a PTX text without comments.
fn functions(ptx: &str) -> Vec<Function<'_>> {
    let (mut found, mut rest) = (Vec::new(), ptx);
    while let Some(open) = rest.find('{') {
        // The last statement before the brace: `.visible .entry name(` or
        // `.func (.param ..) name(`.
        let head = rest[..open].rsplit(';').next().unwrap_or_default();
        let mut depth = 0;
        let end = rest[open..].find(|letter| {
            depth += i32::from(letter == '{') - i32::from(letter == '}');
            depth == 0
        });
        let close = open + end.unwrap_or(rest.len() - open - 1);
        let keyword = [".entry", ".func"].into_iter().find_map(|word| Some((word, head.find(word)? + word.len())));
        if let Some((keyword, start)) = keyword {
            let head = head[start..].trim_start();
            let head = if head.starts_with('(') {
                head.split_once(')').map_or("", |(_, rest)| rest.trim_start())
            } else {
                head
            };
            let length = head.find(|letter: char| !is_in_name(letter)).unwrap_or(head.len());
            let statements = rest[open + 1..close].split([';', '\n']).filter_map(instruction);
            let (name, attributes) = head.split_at(length);
            found.push(Function { name, is_entry: keyword == ".entry", attributes, body: statements.collect() });
        }
        rest = &rest[close + 1..];
    }
    found
}

fn is_in_name(letter: char) -> bool {
    letter.is_alphanumeric() || "_$%".contains(letter)
}

fn instruction(statement: &str) -> Option<Instruction<'_>> {
    let outside =
        |text: &str| text.trim_start_matches(|letter: char| letter.is_whitespace() || "{}".contains(letter)).len();
    let mut text = &statement[statement.len() - outside(statement)..];
    let label = text.find(':').filter(|&end| text[..end].chars().all(is_in_name) && end > 0);
    if let Some(end) = label {
        text = &text[end + 1..];
        text = &text[text.len() - outside(text)..];
    }
    let is_conditional = text.starts_with('@');
    if is_conditional {
        text = text.split_once(char::is_whitespace).map_or("", |(_, rest)| rest.trim_start());
    }
    let op = text.split_whitespace().next().unwrap_or_default();
    let is_code = !op.is_empty() && !op.starts_with('.');
    (is_code || label.is_some()).then_some(Instruction { is_labelled: label.is_some(), is_conditional, op })
}

/// ptxas's report about a kernel.
#[derive(Clone, Copy, Default)]
struct Report {
    /// None for a function that is called rather than inlined, which has its own frame.
    registers: Option<u64>,
    shared: u64,
    /// The bytes of the stack frame, and those stored and loaded by spills.
    frame: Option<(u64, u64)>,
}

/// Parses the output of `ptxas -v`.
fn reports(log: &str) -> BTreeMap<&str, Report> {
    let mut found: BTreeMap<&str, Report> = BTreeMap::new();
    let (mut entry, mut current) = (None, "");
    let number = |line: &str, after: &str| {
        let end = line.find(after)?;
        let start = line[..end].rfind(|letter: char| !letter.is_ascii_digit()).map_or(0, |at| at + 1);
        line[start..end].parse::<u64>().ok()
    };
    for line in log.lines() {
        if let Some((_, name)) = line.split_once("Compiling entry function '") {
            entry = name.split('\'').next();
        } else if let Some((_, name)) = line.split_once("Function properties for ") {
            current = name.trim();
        } else if let (Some(stack), Some(stores), Some(loads)) = (
            number(line, " bytes stack frame"),
            number(line, " bytes spill stores"),
            number(line, " bytes spill loads"),
        ) {
            found.entry(current).or_default().frame = Some((stack, stores + loads));
        } else if let (Some(registers), Some(name), true) = (number(line, " registers"), entry, line.contains("Used "))
        {
            let report = found.entry(name).or_default();
            report.registers = Some(registers);
            // Possibly with a second number after a plus sign.
            let shared = line.split(", ").find_map(|part| part.strip_suffix(" bytes smem"));
            report.shared = shared.and_then(|bytes| bytes.split('+').next()?.parse().ok()).unwrap_or(0);
            entry = None;
        }
    }
    found
}

/// Returns true if a warp may be divergent at a matrix instruction.
///
/// Otherwise a warp exchange or a barrier precedes the instruction, with no branch or label
/// between. Compilers never duplicate these into branches.
fn is_parted(body: &[Instruction<'_>]) -> bool {
    let mut is_together = false;
    body.iter().any(|instruction| {
        let (op, is_conditional) = (instruction.op, instruction.is_conditional);
        let is = |starts: &[&str]| starts.iter().any(|start| op.starts_with(start));
        is_together &= !instruction.is_labelled && !is(&["bra"]);
        is_together |= !is_conditional && is(&["shfl.sync", "vote.sync", "bar.", "barrier."]);
        // ptxas itself reports lanes that part before the last two.
        is(&["mma."]) && (is_conditional || !is_together) || is(&["wgmma.", "setmaxnreg."]) && is_conditional
    })
}

/// Returns true if the kernel waits for earlier kernels before it touches memory other than
/// parameters.
fn waits_first(body: &[Instruction<'_>]) -> bool {
    let touches = |op: &str| {
        ["ld", "st", "atom", "red", "cp", "prefetch"].contains(&first(op))
            && op.contains('.')
            && op.split('.').nth(1) != Some("param")
    };
    let mut ops = body.iter().map(|instruction| instruction.op);
    // `ld.param::entry` is a parameter too.
    ops.find(|op| *op == WAIT || touches(op) && !op.contains(".param")) == Some(WAIT)
}

const WAIT: &str = "griddepcontrol.wait";

/// Returns rule and message of each fault in the PTX and ptxas's log of one architecture.
pub(crate) fn judge(
    ptx: &str,
    log: &str,
    arch: &str,
    library: &BTreeMap<String, Kernel>,
) -> Vec<(&'static str, String)> {
    let is_warpgroup = arch == WARPGROUP_ARCH;
    let ptx = without_comments(ptx);
    let (code, reports) = (functions(&ptx), reports(log));
    let kernels = library.iter().filter(|(_, kernel)| kernel.is_warpgroup == is_warpgroup);
    let kernels: BTreeMap<&str, &Kernel> = kernels.map(|(name, kernel)| (name.as_str(), kernel)).collect();
    let entries: BTreeSet<&str> =
        code.iter().filter(|function| function.is_entry).map(|function| function.name).collect();
    // If any kernel waits, the host lets all begin early. rust-cuda's kernels never wait, so none
    // of them begins early.
    let is_waiting = code.iter().flat_map(|function| &function.body).any(|instruction| instruction.op == WAIT);
    let mut faults = Vec::new();
    let mut fault = |rule, text: String| faults.push((rule, text));
    for name in kernels.keys().filter(|name| !entries.contains(*name)) {
        fault("entries", format!("{name}: in the library, not in the PTX"));
    }
    for name in entries.iter().filter(|name| !kernels.contains_key(*name)) {
        fault("entries", format!("{name}: in the PTX, not in the library: does it have a contract?"));
    }
    for Function { name, is_entry, attributes, body } in &code {
        for (rule, meaning, breaks) in INSTRUCTION_RULES {
            let ops = body.iter().map(|instruction| instruction.op);
            let broken: BTreeSet<&str> = ops.filter(|op| breaks(op) && !is_excepted(name, op)).collect();
            if !broken.is_empty() {
                fault(rule, format!("{name}: {meaning}: {broken:?}"));
            }
        }
        if is_parted(body) {
            fault("parted", format!("{name}: a matrix instruction that a divergent warp may reach"));
        }
        let has = |start: &str| body.iter().any(|instruction| instruction.op.starts_with(start));
        // A kernel of warpgroups multiplies, or aligns an operand for one that does.
        let multiplies = if is_warpgroup {
            kernels.contains_key(name) && !name.starts_with("align_") && !has("wgmma.mma_async")
        } else {
            ["matmul_tf32_", "matmul_of_bf16_", "matmul_grouped_of_bf16_"].iter().any(|start| name.starts_with(start))
                && !has("mma.sync")
        };
        if multiplies {
            fault("matrix", format!("{name}: has no matrix instruction"));
        }
        if has("setmaxnreg") && ![".maxntid", ".minnctapersm"].iter().all(|word| attributes.contains(word)) {
            fault(
                "threads",
                format!("{name}: `setmaxnreg` without `.maxntid` and `.minnctapersm`: ptxas may ignore it"),
            );
        }
        if is_waiting && *is_entry && !waits_first(body) {
            fault("order", format!("{name}: touches memory before {WAIT}, or never waits for the kernels before it"));
        }
    }
    for line in log.lines().filter(|line| line.contains("(C75")) {
        fault("note", line.trim().to_owned());
    }
    for name in &entries {
        if reports.get(name).is_none_or(|report| report.registers.is_none() || report.frame.is_none()) {
            fault("report", format!("{name}: ptxas gave no readable report"));
        }
    }
    for (name, report) in &reports {
        let (stack, spill) = report.frame.unwrap_or_default();
        if spill > 0 {
            fault("spill", format!("{name}: registers spill: {spill} bytes"));
        }
        if stack > 0 {
            fault("stack", format!("{name}: has a stack frame of {stack} bytes"));
        }
        let Some(kernel) = kernels.get(name) else { continue };
        // The static and dynamic bytes of one block. PTX for sm_90 also runs on sm_121.
        let (bytes, limit) = (report.shared + kernel.shared, if is_warpgroup { 227 } else { 99 } * 1024);
        if bytes > limit {
            fault("shared", format!("{name}: {bytes} bytes of shared memory in a block, of {limit}"));
        }
        let registers = kernel.threads * report.registers.unwrap_or(0).next_multiple_of(8);
        if registers > REGISTERS {
            fault(
                "registers",
                format!("{name}: {registers} registers in a block of {}, of {REGISTERS}", kernel.threads),
            );
        }
    }
    faults
}

/// Prints the registers, static shared bytes, stack bytes and spilled bytes of each kernel of a
/// log.
pub(crate) fn print_table(arch: &str, log: &str) {
    println!("{arch:<56} regs  shared   stack   spills");
    for (name, report) in reports(log) {
        let registers = report.registers.map_or("?".to_owned(), |count| count.to_string());
        let (stack, spill) = report.frame.unwrap_or_default();
        println!("{name:<56} {registers:>4}  {:>6}  {stack:>6}  {spill:>7}", report.shared);
    }
}

/// Returns PTX that makes ptxas report spills, and PTX that makes it report a stack frame.
pub(crate) fn real_plants() -> [(&'static str, String); 2] {
    let lines = |line: &dyn Fn(usize) -> String| (0..64).map(line).collect::<String>();
    let loads = lines(&|i| format!("ld.volatile.global.u32 %r{i}, [%rd1+{}];\n", 4 * i));
    let stores = lines(&|i| format!("st.volatile.global.u32 [%rd1+{}], %r{};\n", 4 * i, 63 - i));
    let head = ".version 8.8\n.target sm_121\n.address_size 64\n.visible .entry k(.param .u64 p)";
    let registers = ".reg .b32 %r<64>; .reg .b64 %rd<2>; ld.param.u64 %rd1, [p];";
    let frame = ".local .align 4 .b8 frame[64]; ld.global.u32 %r1, [%rd1]; mov.u32 %r2, frame; add.u32 %r2, %r2, %r1; \
        st.local.u32 [%r2], %r1; ld.local.u32 %r3, [frame+8]; st.global.u32 [%rd1], %r3; ret;";
    [
        ("spill", format!("{head} .maxnreg 24 {{ {registers}\n{loads}\n{stores}\nret; }}")),
        ("stack", format!("{head} {{ {registers} {frame} }}")),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = ".version 8.8
.target sm_121
.address_size 64
.global .align 4 .b8 words[4] = {1, 2, 3, 4};
.visible .entry good(
	.param .u64 .ptr .align 4 good_param_0
)
{
	.reg .pred 	%p<2>;
	.reg .b32 	%r<9>;
	.reg .b64 	%rd<3>;
	ld.param.b64 	%rd1, [good_param_0];
	cvta.to.global.u64 	%rd2, %rd1;
	griddepcontrol.wait;
	ld.global.b32 	%r1, [%rd2];
	mul.rn.f32 	%r2, %r1, %r1;
	fma.rn.f32 	%r3, %r1, %r2, %r2;	// not add.f32
	div.rn.f32 	%r4, %r3, %r2;
	sqrt.rn.f32 	%r5, %r4;
	add.s32 	%r6, %r5, 1;
	min.s32 	%r7, %r6, %r5;
	setp.gt.f32 	%p1, %r5, %r4;
	@%p1 bra 	$L_end;
	atom.global.add.u32 	%r8, [%rd2], %r7;
	{ PLANT }
$L_end:
	ret;
}
";
    const GOOD_LOG: &str = "ptxas info    : Compiling entry function 'good' for 'sm_121'
ptxas info    : Function properties for good
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 12 registers, used 1 barriers, 1024 bytes smem
";

    fn library(names: &[&str], is_warpgroup: bool) -> BTreeMap<String, Kernel> {
        // A block of these kernels has 4096 dynamic bytes, and 1024 threads of up to 64 registers.
        let kernel = Kernel { threads: 1024, shared: 4096, is_warpgroup };
        names.iter().map(|name| ((*name).to_owned(), kernel)).collect()
    }

    fn plant(code: &str) -> String {
        GOOD.replace("{ PLANT }", code)
    }

    /// Returns the broken rules of code in a kernel with this name.
    fn broken(ptx: &str, log: &str, name: &str) -> Vec<&'static str> {
        let rules = judge(&ptx.replace("good", name), &log.replace("good", name), "sm_121", &library(&[name], false));
        let rules: BTreeSet<_> = rules.into_iter().map(|(rule, _)| rule).collect();
        rules.into_iter().collect()
    }

    #[test]
    fn each_rule_finds_its_plants() {
        assert_eq!(broken(&plant(""), GOOD_LOG, "good"), [""; 0]);
        for (rule, plants) in [
            ("approximate", &["ex2.approx.f32 %r2, %r1;", "@%p1 rcp.approx.f32 %r2, %r1;"][..]),
            ("flush", &["add.rn.ftz.f32 %r2, %r1, %r1;"]),
            ("full-division", &["div.full.f32 %r2, %r1, %r1;"]),
            ("rounding", &["add.f32 %r2, %r1, %r1;", "@%p1 mul.f32 %r2, %r1, %r1;", "@!%p1 sub.f32 %r2, %r1, %r1;"]),
            ("rounding", &["fma.f32 %r2, %r1, %r1, %r1;", "add.rz.f32 %r2, %r1, %r1;", "$L_x: add.f32 %r2, %r1, %r1;"]),
            ("float-atomic", &["atom.global.add.f32 %r2, [%rd2], %r1;", "red.global.add.f32 [%rd2], %r1;"]),
            ("float-min-max", &["max.f32 %r2, %r1, %r1;", "min.f32 %r2, %r1, %r1;"]),
            ("bit-count", &["clz.b64 %r2, %rd2;", "@%p1 popc.b64 %r2, %rd2;"]),
        ] {
            for code in plants {
                assert_eq!(broken(&plant(code), GOOD_LOG, "good"), [rule], "{code}");
                assert_eq!(broken(&plant(&format!("{{ {code} }}")), GOOD_LOG, "good"), [rule], "{code}");
            }
        }
        let helper = ".func  (.param .b32 r) helper(\n\t.param .b32 a\n)\n{\n\tadd.f32 %r1, %r1, %r1;\n\tret;\n}\n";
        assert_eq!(broken(&(plant("") + helper), GOOD_LOG, "good"), ["rounding"], "a called function");
    }

    #[test]
    fn each_rule_for_reports_finds_its_plants() {
        for (rule, old, new) in [
            ("spill", "0 bytes spill loads", "4 bytes spill loads"),
            ("spill", "0 bytes spill stores", "8 bytes spill stores"),
            ("stack", "0 bytes stack", "16 bytes stack"),
            ("note", "ptxas info    : Used", "ptxas info    : (C7508) 'setmaxnreg' ignored\nptxas info    : Used"),
            ("shared", "1024 bytes smem", "97281 bytes smem"),
            ("registers", "Used 12", "Used 65"),
            ("report", "Used 12", "Took 12"),
            ("report", "bytes stack frame", "bytes of frame"),
            ("report", "'good'", "'other'"),
        ] {
            assert_eq!(broken(&plant(""), &GOOD_LOG.replace(old, new), "good"), [rule], "{new}");
        }
        for (old, new) in [("1024 bytes smem", "97280 bytes smem"), ("Used 12", "Used 64")] {
            assert_eq!(broken(&plant(""), &GOOD_LOG.replace(old, new), "good"), [""; 0], "{new}");
        }
    }

    #[test]
    fn exceptions_hold_for_one_instruction_of_attention() {
        let (fast, other) = (plant("ex2.approx.ftz.f32 %r2, %r1;"), plant("ex2.approx.f32 %r2, %r1;"));
        assert_eq!(broken(&fast, GOOD_LOG, "flash_forward_of_bf16_64"), [""; 0]);
        assert_eq!(broken(&other, GOOD_LOG, "flash_forward_of_bf16_64"), ["approximate"]);
        assert_eq!(broken(&fast, GOOD_LOG, "scalars"), [""; 0]);
        assert_eq!(broken(&fast, GOOD_LOG, "flash_forward_64"), ["approximate", "flush"]);
        assert_eq!(broken(&fast, GOOD_LOG, "flash_other_of_bf16_64"), ["approximate", "flush"]);
    }

    #[test]
    fn kernels_of_ptx_and_library_agree() {
        for names in [&["good", "lost"][..], &["other"]] {
            let faults = judge(&plant(""), GOOD_LOG, "sm_121", &library(names, false));
            assert!(faults.iter().all(|fault| fault.0 == "entries") && !faults.is_empty(), "{faults:?}");
        }
        assert_eq!(broken(&plant(""), GOOD_LOG, "matmul_tf32_1x1"), ["matrix"]);
    }

    #[test]
    fn warps_stay_together_and_kernels_wait() {
        let (mma, bar) = ("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%r1, ..};", "bar.warp.sync -1;");
        for code in [
            mma.to_owned(),
            format!("@%p1 {bar} {mma}"),
            format!("{bar} @%p1 {mma}"),
            format!("{bar} @%p1 bra $L_end; {mma}"),
            format!("{bar}\n$L_on: {mma}"),
        ] {
            assert_eq!(broken(&plant(&code), GOOD_LOG, "good"), ["parted"], "{code}");
        }
        assert_eq!(broken(&plant(&format!("{bar} add.s32 %r1, %r1, %r1; {mma} {mma}")), GOOD_LOG, "good"), [""; 0]);
        let wait = format!("{WAIT};");
        for early in
            ["ld.global.b32 %r1, [%rd2];", "st.shared.b32 [%r1], %r1;", "cp.async.ca.shared.global [%r1], [%rd2], 4;"]
        {
            assert_eq!(
                broken(&plant("").replace(&wait, &format!("{early} {wait}")), GOOD_LOG, "good"),
                ["order"],
                "{early}"
            );
        }
        assert_eq!(broken(&plant("").replace(&wait, ""), GOOD_LOG, "good"), [""; 0], "no kernel waits");
        let clean = plant("");
        let other = clean[clean.find(".visible").unwrap()..].replace("good", "other").replace(&wait, "");
        let log = GOOD_LOG.to_owned() + &GOOD_LOG.replace("good", "other");
        let faults = judge(&(clean + &other), &log, "sm_121", &library(&["good", "other"], false));
        assert!(faults.len() == 1 && faults[0].0 == "order", "{faults:?}");
    }

    #[test]
    fn kernels_of_warpgroups_have_their_rules() {
        let wgmma = plant("wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%r1, ..};");
        let sets = wgmma.replace("wgmma.mma", "setmaxnreg.dec.sync.aligned.u32 40; wgmma.mma");
        let threads = sets.replace("\n)\n{", "\n)\n.maxntid 384, 1, 1\n{");
        let blocks = threads.replace("\n{", "\n.minnctapersm 1\n{");
        let warpgroup = library(&["good"], true);
        for (ptx, arch, library, rules) in [
            (&wgmma, WARPGROUP_ARCH, &warpgroup, &[][..]),
            (&plant(""), WARPGROUP_ARCH, &warpgroup, &["matrix"]),
            (&plant(""), "sm_90", &warpgroup, &["entries"]),
            (&wgmma, WARPGROUP_ARCH, &library(&["good"], false), &["entries"]),
            (&wgmma.replace("wgmma.mma", "@%p1 wgmma.mma"), WARPGROUP_ARCH, &warpgroup, &["parted"]),
            (&sets, WARPGROUP_ARCH, &warpgroup, &["threads"]),
            (&threads, WARPGROUP_ARCH, &warpgroup, &["threads"]),
            (&blocks, WARPGROUP_ARCH, &warpgroup, &[]),
        ] {
            let found: Vec<_> = judge(ptx, GOOD_LOG, arch, library).into_iter().map(|fault| fault.0).collect();
            assert_eq!(found, rules, "{ptx}");
        }
        let large = GOOD_LOG.replace("1024 bytes smem", &format!("{} bytes smem", 223 * 1024));
        assert_eq!(judge(&wgmma, &large, WARPGROUP_ARCH, &warpgroup), []);
    }

    #[test]
    fn unreadable_lists_are_refused() {
        let kernels = listed("one 128 0\ntwo 256 4096 sm_90a\n").unwrap();
        assert_eq!(kernels["two"], Kernel { threads: 256, shared: 4096, is_warpgroup: true });
        for bad in ["", "one 1 0\none 1 0\n", "one\n", "one 1 0 sm_90\n", "error: no kernels\n"] {
            assert!(listed(bad).is_err(), "passed: {bad}");
        }
    }
}

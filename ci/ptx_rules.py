"""The rules for every kernel's PTX (section "numbers" of docs/architecture.md), for ci/ptx.

    ptx_rules.py self-test PTXAS
        checks that every rule fires on code that breaks it
    ptx_rules.py check PTXAS LIST PTX_DIR ARCH...
        checks PTX_DIR/ARCH.ptx against the rules and LIST, the output of `stepscope check --list`.
        PTX for sm_90a must contain the kernels of warpgroups and no others.

Invariant: unreadable input is a failure. A kernel without a report, a report without a kernel, or an
attribute without a function exits with status 1.
"""

import collections
import pathlib
import re
import subprocess
import sys
import tempfile

# PTX for this architecture contains the kernels of warpgroups, and no other PTX contains them.
WARPGROUP_ARCH = "sm_90a"
# The static and dynamic bytes of one block. PTX for sm_90 also runs on sm_121.
SHARED_LIMIT_BYTES = collections.defaultdict(lambda: 99 * 1024, {WARPGROUP_ARCH: 227 * 1024})
# The registers of a multiprocessor, of which the threads of a block get a multiple of 8 each.
REGISTERS = 64 * 1024
# A kernel of the library: the threads and dynamic shared bytes of a block, and whether it is a kernel
# of warpgroups.
Kernel = collections.namedtuple("Kernel", "threads shared is_warpgroup")
FLOAT = r"(?:f16|f16x2|bf16|bf16x2|f32|f32x2|f64)"

# name -> (its meaning, a function that is true if an instruction breaks it)
INSTRUCTION_RULES = {
    "approximate": ("an approximate instruction", lambda op: ".approx" in op),
    "flush": ("flushes subnormals to zero", lambda op: ".ftz" in op),
    "full-division": ("division that is not correctly rounded", lambda op: op.startswith("div.full")),
    "rounding": (
        "arithmetic without .rn: ptxas may fuse it",
        lambda op: re.fullmatch(rf"(?:add|sub|mul|fma|mad|div|rcp|sqrt)(?:\.\w+)*\.{FLOAT}", op)
        and ".rn" not in op
        and ".approx" not in op
        and not op.startswith("div.full"),
    ),
    "float-atomic": (
        "a float atomic: the order of the sum is not fixed",
        lambda op: re.match(r"(?:atom|red|redux)\.", op) and re.search(rf"\.{FLOAT}\b", op),
    ),
    "float-min-max": (
        "float min or max that may lose a NaN: decide by comparison, or use .NaN",
        lambda op: re.fullmatch(rf"(?:min|max)(?:\.\w+)*\.{FLOAT}", op) and ".NaN." not in op,
    ),
    "bit-count": (
        "counts the bits of 64, which rust-cuda gets wrong: count in u32 (device/rust-cuda/README.md)",
        lambda op: op in ("clz.b64", "popc.b64"),
    ),
}

# Instructions that the rules allow in some kernels (name pattern, instruction); docs/numbers.md has
# the bound. Bits of tensor core attention already differ between devices.
EXCEPTIONS = [(r"flash_(forward|bwd_dq|bwd_dkv|bwd_dkv_ds|bwd_scores)_(of_(bf16|tf32)|wgmma)_\d+", "ex2.approx.ftz.f32")]

# name -> (its meaning, a function that is true if a ptxas report breaks it)
REPORT_RULES = {
    "spill": ("registers spill", lambda report: report["spill"] > 0),
    "stack": ("has a stack frame", lambda report: report["stack"] > 0),
}


def functions(ptx):
    """Returns [(name, is an entry, [instruction])] of a PTX text.

    Instructions have no predicate, operands or comments.
    """
    ptx = re.sub(r"//[^\n]*", "", re.sub(r"/\*.*?\*/", "", ptx, flags=re.S))
    found, name, depth, entry, body = [], None, 0, False, []
    pending = ""
    for line in ptx.splitlines():
        if depth == 0:
            # `.visible .entry name(` or `.func (.param .b32 result) name(`, up to the brace of the
            # body.
            pending += " " + line.strip()
            if line.strip().endswith(";"):
                pending = ""
                continue
            if "{" not in line:
                continue
            head = re.search(r"\.(entry|func)\s+(?:\([^)]*\)\s*)?([A-Za-z_$%][\w$]*)", pending)
            pending, depth = "", line.count("{") - line.count("}")
            if not head:
                depth = 0
                continue
            entry, name, body = head.group(1) == "entry", head.group(2), []
            line = line.split("{", 1)[1]
        else:
            depth += line.count("{") - line.count("}")
        for statement in line.split(";"):
            statement = re.sub(r"^[{}\s]*(?:[$\w]+:)?[{}\s]*(?:@!?%?\w+\s+)?", "", statement).strip()
            if statement and not statement.startswith((".", "{", "}")):
                body.append(statement.split()[0])
        if depth <= 0 and name is not None:
            found.append((name, entry, body))
            name = None
    return found


def reports(log):
    """Parses the output of `ptxas -v`: kernel -> registers, shared, stack and spill bytes."""
    found, properties, entry = {}, {}, None
    for line in log.splitlines():
        if match := re.search(r"Compiling entry function '([^']+)'", line):
            entry = match.group(1)
        elif match := re.search(r"Function properties for (\S+)", line):
            current = match.group(1)
            properties[current] = {}
        elif match := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line):
            stack, stores, loads = map(int, match.groups())
            properties[current] = {"stack": stack, "spill": stores + loads}
        elif (match := re.search(r"Used (\d+) registers", line)) and entry:
            shared = re.search(r"(\d+)(?:\+\d+)? bytes smem", line)
            found[entry] = {
                "registers": int(match.group(1)),
                "shared": int(shared.group(1)) if shared else 0,
                **properties.get(entry, {}),
            }
            entry = None
    # Functions that are called rather than inlined have their own frame.
    for name, values in properties.items():
        if name not in found and values:
            found[name] = {"registers": None, "shared": 0, **values}
    return found


def listed(path):
    """Reads the library's list of kernels: name, threads, dynamic shared bytes, and `sm_90a` if it is a
    kernel of warpgroups. Returns name -> Kernel."""
    kernels = {}
    for line in filter(None, pathlib.Path(path).read_text().split("\n")):
        match = re.fullmatch(rf"(\w+) (\d+) (\d+)( {WARPGROUP_ARCH})?", line)
        if not match or match[1] in kernels:
            raise SystemExit(f"{path}: not a list of kernels, each once: {line!r}")
        kernels[match[1]] = Kernel(int(match[2]), int(match[3]), match[4] is not None)
    if not kernels:
        raise SystemExit(f"{path}: a list without kernels")
    return kernels


def without_threads(ptx):
    """Returns the kernels that use `setmaxnreg` without `.maxntid` and `.minnctapersm`: ptxas may ignore it."""
    ptx = re.sub(r"//[^\n]*", "", ptx)
    bodies = re.split(r"\.entry\s+(\w+)", ptx)[1:]
    heads = ((name, *text.split("{", 1)) for name, text in zip(bodies[::2], bodies[1::2]) if "{" in text)
    return {name for name, head, body in heads if "setmaxnreg" in body and not (".maxntid" in head and ".minnctapersm" in head)}


def waits_first(body):
    """Returns true if the kernel waits for earlier kernels before it touches memory other than
    parameters."""
    touches = (op for op in body if re.match(r"(?:ld|st|atom|red|cp|prefetch)\.(?!param)", op) or op == "griddepcontrol.wait")
    return next(touches, None) == "griddepcontrol.wait"


def parted(ptx):
    """Returns the kernels in which a warp may be divergent at a matrix instruction.

    Otherwise a warp exchange or a barrier precedes the instruction, with no branch or label between.
    Compilers never duplicate these into branches.
    """
    found, name, together = set(), None, False
    for line in re.sub(r"//[^\n]*", "", ptx).splitlines():
        if head := re.search(r"\.(?:entry|func)\s+(?:\([^)]*\)\s*)?([A-Za-z_$%][\w$]*)", line):
            name, together = head.group(1), False
        for statement in line.split(";"):
            label, condition, op = re.match(r"[{}\s]*([$\w]+:)?[{}\s]*(@!?%?\w+\s+)?([\w.]*)", statement).groups()
            if label or op.startswith("bra"):
                together = False
            if op.startswith(("shfl.sync", "vote.sync", "bar.", "barrier.")) and not condition:
                together = True
            if op.startswith("mma.") and (condition or not together):
                found.add(name)
            # ptxas itself reports lanes that part before these.
            if op.startswith(("wgmma.", "setmaxnreg.")) and condition:
                found.add(name)
    return found


def judge(ptx, log, arch, library):
    """Returns [(rule, message)] for the PTX of one architecture. `library` is name -> Kernel."""
    faults = []
    kernels = {name: kernel for name, kernel in library.items() if kernel.is_warpgroup == (arch == WARPGROUP_ARCH)}
    code, report = functions(ptx), reports(log)
    entries = {name for name, entry, _ in code if entry}
    for name in sorted(set(kernels) - entries):
        faults.append(("entries", f"{name}: in the library, not in the PTX"))
    for name in sorted(entries - set(kernels)):
        faults.append(("entries", f"{name}: in the PTX, not in the library: does it have a contract?"))
    for name, _, body in code:
        allowed = {op for pattern, op in EXCEPTIONS if re.fullmatch(pattern, name)}
        for rule, (meaning, breaks) in INSTRUCTION_RULES.items():
            broken = sorted({op for op in body if breaks(op) and op not in allowed})
            if broken:
                faults.append((rule, f"{name}: {meaning}: {', '.join(broken)}"))
    faults += [("parted", f"{name}: a matrix instruction that a divergent warp may reach") for name in sorted(parted(ptx))]
    for name, _, body in code:
        instruction = "wgmma.mma_async" if arch == WARPGROUP_ARCH else "mma.sync"
        # A kernel of warpgroups multiplies, or aligns an operand for one that does.
        multiplies = name in kernels and not name.startswith("align_") if arch == WARPGROUP_ARCH else re.match(r"matmul_(tf32|of_bf16)_", name)
        if multiplies and not any(op.startswith(instruction) for op in body):
            faults.append(("matrix", f"{name}: has no matrix instruction"))
    faults += [("threads", f"{name}: `setmaxnreg` without `.maxntid` and `.minnctapersm`: ptxas may ignore it") for name in sorted(without_threads(ptx))]
    faults += [("note", line.strip()) for line in log.splitlines() if re.search(r"\bC75\d\d\b", line)]
    # If any kernel waits, the host lets all begin early. rust-cuda's kernels never wait, so none of
    # them begins early.
    if any("griddepcontrol.wait" in body for _, _, body in code):
        for name in sorted(name for name, entry, body in code if entry and not waits_first(body)):
            faults.append(("order", f"{name}: touches memory before griddepcontrol.wait, or never waits for the kernels before it"))
    for name in sorted(entries):
        values = report.get(name, {})
        if values.get("registers") is None or not {"shared", "stack", "spill"} <= values.keys():
            faults.append(("report", f"{name}: ptxas gave no readable report"))
    for name, values in sorted(report.items()):
        for rule, (meaning, breaks) in REPORT_RULES.items():
            if {"stack", "spill", "shared"} <= values.keys() and breaks(values):
                faults.append((rule, f"{name}: {meaning}: {', '.join(f'{k} {v}' for k, v in values.items())}"))
    for name in sorted(kernels.keys() & report.keys()):
        kernel, values = kernels[name], report[name]
        bytes, limit = values["shared"] + kernel.shared, SHARED_LIMIT_BYTES[arch]
        if bytes > limit:
            faults.append(("shared", f"{name}: {bytes} bytes of shared memory in a block, of {limit}"))
        registers = kernel.threads * -(-(values["registers"] or 0) // 8) * 8
        if registers > REGISTERS:
            faults.append(("registers", f"{name}: {registers} registers in a block of {kernel.threads}, of {REGISTERS}"))
    return faults


def assemble(ptxas, arch, path):
    """Returns ptxas's log; a failure to assemble ends the run."""
    with tempfile.TemporaryDirectory() as folder:
        command = [ptxas, "--gpu-name", arch, "-v", str(path), "-o", f"{folder}/out.cubin"]
        try:
            done = subprocess.run(command, capture_output=True, text=True)
        except OSError as error:
            raise SystemExit(f"cannot run ptxas: {error}") from error
    log = done.stdout + done.stderr
    if done.returncode != 0:
        raise SystemExit(f"ptxas does not assemble {path} for {arch}:\n{log}")
    return log


def table(names, archs, by_arch):
    width = max(map(len, names), default=6)
    print(f"{'':{width}}  " + "  ".join(f"{arch:^29}" for arch in archs))
    print(f"{'kernel':{width}}  " + "  ".join("regs  shared   stack   spills" for _ in archs))
    for name in names:
        cells = []
        for arch in archs:
            r = by_arch[arch].get(name, {})
            cells.append("{:>4}  {:>6}  {:>6}  {:>7}".format(*(str(r.get(k, "?")) for k in ("registers", "shared", "stack", "spill"))))
        print(f"{name:{width}}  " + "  ".join(cells))


def check(ptxas, kernels, ptx_dir, archs):
    """Prints a table of all kernels, and the violations."""
    kernels, faults = listed(kernels), []
    by_arch = {}
    for arch in archs:
        path = pathlib.Path(ptx_dir) / f"{arch}.ptx"
        ptx = path.read_text()
        log = assemble(ptxas, arch, path)
        by_arch[arch] = reports(log)
        faults += [f"{arch}: [{rule}] {message}" for rule, message in judge(ptx, log, arch, kernels)]
    table(sorted(set().union(*by_arch.values())), archs, by_arch)
    print("shared: static bytes; spills: bytes stored and loaded. Dynamic shared memory is in each kernel's contract.")
    if faults:
        print(f"\n{len(faults)} faults", *faults, sep="\n  ")
        return 1
    print(f"{len(kernels)} kernels, {', '.join(archs)}: every rule kept")
    return 0


# ---- self-test: every rule, on code that breaks only that rule ----

GOOD = """.version 8.8
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
"""

PLANTS = {
    "approximate": ["ex2.approx.f32 %r2, %r1;", "@%p1 rcp.approx.f32 %r2, %r1;"],
    "flush": ["add.rn.ftz.f32 %r2, %r1, %r1;"],
    "full-division": ["div.full.f32 %r2, %r1, %r1;"],
    "rounding": [f"{op}.f32 %r2, %r1, %r1;" for op in ("add", "mul", "sub", "@%p1 mul", "@!%p1 add")]
    + ["fma.f32 %r2, %r1, %r1, %r1;", "add.rz.f32 %r2, %r1, %r1;", "$L_x: add.f32 %r2, %r1, %r1;"],
    "float-atomic": ["atom.global.add.f32 %r2, [%rd2], %r1;", "red.global.add.f32 [%rd2], %r1;"],
    "float-min-max": ["max.f32 %r2, %r1, %r1;", "min.f32 %r2, %r1, %r1;"],
    "bit-count": ["clz.b64 %r2, %rd2;", "@%p1 popc.b64 %r2, %rd2;"],
}

GOOD_LOG = """ptxas info    : Compiling entry function 'good' for 'sm_121'
ptxas info    : Function properties for good
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 12 registers, used 1 barriers, 1024 bytes smem
"""

LOG_PLANTS = {
    "spill": [("0 bytes spill loads", "4 bytes spill loads"), ("0 bytes spill stores", "8 bytes spill stores")],
    "stack": [("0 bytes stack", "16 bytes stack")],
    "note": [("ptxas info    : Used", "ptxas info    : (C7508) Potential Performance Loss: 'setmaxnreg' ignored\nptxas info    : Used")],
    "shared": [("1024 bytes smem", "97281 bytes smem")],
    "registers": [("Used 12", "Used 65")],
    "report": [("Used 12", "Took 12"), ("bytes stack frame", "bytes of frame"), ("'good'", "'other'")],
}


def real_plants():
    """Returns PTX that makes ptxas report spills, and PTX that makes it report a stack frame."""
    count = 64
    loads = "\n".join(f"ld.volatile.global.u32 %r{i}, [%rd1+{4 * i}];" for i in range(count))
    stores = "\n".join(f"st.volatile.global.u32 [%rd1+{4 * i}], %r{count - 1 - i};" for i in range(count))
    head = ".version 8.8\n.target sm_121\n.address_size 64\n.visible .entry k(.param .u64 p) "
    registers = f".reg .b32 %r<{count}>; .reg .b64 %rd<2>; ld.param.u64 %rd1, [p];"
    yield "spill", f"{head} .maxnreg 24 {{ {registers}\n{loads}\n{stores}\nret; }}"
    frame = (
        ".local .align 4 .b8 frame[64]; ld.global.u32 %r1, [%rd1]; mov.u32 %r2, frame; add.u32 %r2, %r2, %r1;"
        "st.local.u32 [%r2], %r1; ld.local.u32 %r3, [frame+8]; st.global.u32 [%rd1], %r3; ret;"
    )
    yield "stack", f"{head} {{ {registers} {frame} }}"


def self_test(ptxas):
    # A block of these kernels has 4096 dynamic bytes, and 1024 threads of up to 64 registers.
    plain, warpgroup = Kernel(1024, 4096, False), Kernel(1024, 4096, True)

    def rules_broken(ptx, log, kernels=("good",), arch="sm_121", library=None):
        return {rule for rule, _ in judge(ptx, log, arch, library or dict.fromkeys(kernels, plain) or {"": warpgroup})}

    def expect(what, rules, wanted):
        if rules != wanted:
            raise SystemExit(f"self-test: {what}: rules {sorted(rules)} fired, {sorted(wanted)} should have")

    planted = 0
    clean = GOOD.replace("{ PLANT }", "")
    expect("clean code", rules_broken(clean, GOOD_LOG), set())
    expect("shared memory that fits", rules_broken(clean, GOOD_LOG.replace("1024 bytes smem", "97280 bytes smem")), set())
    expect("registers that fit", rules_broken(clean, GOOD_LOG.replace("Used 12", "Used 64")), set())
    if missing := INSTRUCTION_RULES.keys() - PLANTS.keys() | REPORT_RULES.keys() - LOG_PLANTS.keys():
        raise SystemExit(f"self-test: no planted violation for {sorted(missing)}")
    for rule, plants in PLANTS.items():
        for plant in plants:
            for form in (plant, f"{{ {plant} }}"):
                expect(plant, rules_broken(GOOD.replace("{ PLANT }", form), GOOD_LOG), {rule})
                planted += 1
    # An exception holds for its kernels and its instruction only.
    fast, other = "ex2.approx.ftz.f32 %r2, %r1;", "ex2.approx.f32 %r2, %r1;"
    for name in ("flash_forward_of_bf16_64", "flash_forward_64"):
        rules = set() if "_of_" in name else {"approximate", "flush"}
        expect(f"{fast} in {name}", rules_broken(GOOD.replace("{ PLANT }", fast).replace("good", name), GOOD_LOG.replace("good", name), (name,)), rules)
        expect(f"{other} in {name}", rules_broken(GOOD.replace("{ PLANT }", other).replace("good", name), GOOD_LOG.replace("good", name), (name,)), {"approximate"})
        planted += 2
    # Also in a function that a kernel calls.
    helper = clean + ".func  (.param .b32 r) helper(\n\t.param .b32 a\n)\n{\n\tadd.f32 %r1, %r1, %r1;\n\tret;\n}\n"
    expect("a called function", rules_broken(helper, GOOD_LOG), {"rounding"})
    for rule, plants in LOG_PLANTS.items():
        for old, new in plants:
            expect(f"log: {new}", rules_broken(clean, GOOD_LOG.replace(old, new)), {rule})
            planted += 1
    expect("a kernel that is not in the PTX", rules_broken(clean, GOOD_LOG, ("good", "lost")), {"entries"})
    expect("an entry that is not in the library", rules_broken(clean, GOOD_LOG, ()), {"entries"})
    mma, bar = "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%r1, ..};", "bar.warp.sync -1;"
    for parts in (mma, f"@%p1 {bar} {mma}", f"{bar} @%p1 {mma}", f"{bar} @%p1 bra $L_end; {mma}", f"{bar}\n$L_on: {mma}"):
        expect(f"a warp in parts: {parts}", rules_broken(GOOD.replace("{ PLANT }", parts), GOOD_LOG), {"parted"})
        planted += 1
    expect("a warp that stays together", rules_broken(GOOD.replace("{ PLANT }", f"{bar} add.s32 %r1, %r1, %r1; {mma} {mma}"), GOOD_LOG), set())
    expect(
        "no matrix instruction",
        rules_broken(clean.replace("good", "matmul_tf32_1x1"), GOOD_LOG.replace("good", "matmul_tf32_1x1"), ("matmul_tf32_1x1",)),
        {"matrix"},
    )
    planted += 1
    wait = "griddepcontrol.wait;"
    for early in ("ld.global.b32 %r1, [%rd2];", "st.shared.b32 [%r1], %r1;", "cp.async.ca.shared.global [%r1], [%rd2], 4;"):
        expect(f"before the wait: {early}", rules_broken(clean.replace(wait, f"{early} {wait}"), GOOD_LOG), {"order"})
    other = clean[clean.index(".visible") :].replace("good", "other").replace(wait, "")
    both = GOOD_LOG + GOOD_LOG.replace("good", "other")
    expect("one kernel of two waits", rules_broken(clean + other, both, ("good", "other")), {"order"})
    expect("no kernel waits", rules_broken(clean.replace(wait, ""), GOOD_LOG), set())
    planted += 7

    # Kernels of warpgroups.
    a = WARPGROUP_ARCH
    wgmma = GOOD.replace("{ PLANT }", "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%r1, ..};")
    for what, ptx, arch, library, wanted in (
        ("a kernel of warpgroups", wgmma, a, {"good": warpgroup, "other": plain}, set()),
        ("one without its instruction", clean, a, {"good": warpgroup}, {"matrix"}),
        ("one in other PTX", clean, "sm_90", {"good": warpgroup}, {"entries"}),
        ("another kernel in their PTX", wgmma, a, {"good": plain}, {"entries"}),
        ("a warpgroup in parts", wgmma.replace("wgmma.mma", "@%p1 wgmma.mma"), a, {"good": warpgroup}, {"parted"}),
        ("setmaxnreg without threads", wgmma.replace("wgmma.mma", "setmaxnreg.dec.sync.aligned.u32 40; wgmma.mma"), a, {"good": warpgroup}, {"threads"}),
        ("setmaxnreg with threads", wgmma.replace("wgmma.mma", "setmaxnreg.dec.sync.aligned.u32 40; wgmma.mma").replace("\n)\n{", "\n)\n.maxntid 384, 1, 1\n.minnctapersm 1\n{"), a, {"good": warpgroup}, set()),
        ("setmaxnreg without blocks", wgmma.replace("wgmma.mma", "setmaxnreg.dec.sync.aligned.u32 40; wgmma.mma").replace("\n)\n{", "\n)\n.maxntid 384, 1, 1\n{"), a, {"good": warpgroup}, {"threads"}),
    ):
        expect(what, rules_broken(ptx, GOOD_LOG, arch=arch, library=library), wanted)
        planted += bool(wanted)
    more = GOOD_LOG.replace("1024 bytes smem", f"{223 * 1024} bytes smem")
    expect("227 KB for a warpgroup", rules_broken(wgmma, more, arch=a, library={"good": warpgroup}), set())

    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        names = folder / "names"
        names.write_text("one 128 0\ntwo 256 4096 sm_90a\n")
        if listed(names) != {"one": Kernel(128, 0, False), "two": Kernel(256, 4096, True)}:
            raise SystemExit("self-test: a list was misread")
        for bad in ("", "one 1 0\none 1 0\n", "one\n", "one 1 0 sm_90\n", "error: no kernels\n"):
            names.write_text(bad)
            try:
                listed(names)
            except SystemExit:
                planted += 1
            else:
                raise SystemExit(f"self-test: passed as a list of kernels: {bad!r}")
        for rule, ptx in real_plants():
            path = folder / f"{rule}.ptx"
            path.write_text(ptx)
            fired = rules_broken(ptx, assemble(ptxas, "sm_121", path), ("k",))
            if rule not in fired:
                raise SystemExit(f"self-test: ptxas assembled code with a {rule}, and the rule did not fire")
            planted += 1
    print(f"{planted} planted violations, each found")


def main():
    match sys.argv[1:]:
        case ["self-test", ptxas]:
            return self_test(ptxas)
        case ["check", ptxas, kernels, ptx_dir, *archs] if archs:
            return check(ptxas, kernels, ptx_dir, archs)
    raise SystemExit(__doc__)


if __name__ == "__main__":
    sys.exit(main())

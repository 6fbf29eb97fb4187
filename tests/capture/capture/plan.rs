//! The memory plan of captured steps: tensors share memory that no launch uses at the same time,
//! and no bit changes.

use super::*;

const ELEMENTS: usize = 1000;
/// The bytes of a tensor in the arena.
const BYTES: usize = 4096;

/// A random program of ops on tensors of one size.
struct Program {
    /// For each op the numbers of its two operands, of the tensors before it. 0 is the input.
    ops: Vec<[usize; 2]>,
    /// The numbers of the tensors that are outputs.
    outputs: Vec<usize>,
}

impl Program {
    fn new(random: &mut Random) -> Self {
        let length = 1 + random.below(40);
        // Most operands are recent, as in a model, and some are old, as in its backward pass.
        let mut operand = |made: u32| {
            let back = if random.below(4) == 0 { random.below(made) } else { random.below(made.min(3)) };
            (made - 1 - back) as usize
        };
        let ops: Vec<_> = (0..length).map(|op| [operand(op + 1), operand(op + 1)]).collect();
        let outputs = (0..1 + random.below(3)).map(|_| random.below(length + 1) as usize).collect();
        Self { ops, outputs }
    }

    fn run<'s>(&self, step: &Step<'s>, x: Saved<'s>) -> Result<Vec<Saved<'s>>> {
        let mut tensors = vec![x];
        for [a, b] in &self.ops {
            let sum = ops::add(step, &tensors[*a], &tensors[*b])?;
            tensors.push(ops::scale(step, &sum, 0.5)?.save());
        }
        Ok(self.outputs.iter().map(|output| tensors[*output]).collect())
    }
}

on_each_device! {
    also late;

    fn random_programs_keep_their_bits(device: &Device) {
        let mut random = Random::new(5);
        let (mut owned, mut saved) = (0, 0);
        for _ in 0..60 {
            let program = Program::new(&mut random);
            let x = random.normals(ELEMENTS);
            let inputs = HostInputs::new().with(&x, [ELEMENTS]).unwrap();
            let mut memory = arena(device);
            let eager = memory.step(|step| {
                let x = step.upload(&x, [ELEMENTS])?.save();
                program.run(step, x)?.iter().map(|output| step.read(output)).collect::<Result<Vec<_>>>()
            }).unwrap();
            let mut captured = memory.capture(program, &inputs, |step, program, slots| {
                let outputs = program.run(step, slots.input(0)?)?;
                Ok(outputs.iter().map(|output| slots.output(output)).collect::<Vec<_>>())
            }).unwrap();
            let report = captured.report();
            (owned, saved) = (owned + report.bytes_owned, saved + report.bytes_saved);
            // The second replay finds what the first has left.
            for _ in 0..2 {
                let replay = captured.replay(&inputs).unwrap();
                for (output, want) in replay.outputs().iter().zip(&eager) {
                    assert_eq!(bits(&replay.read(*output).unwrap()), bits(want));
                }
            }
            // The slots still hold the inputs.
            let again = captured.repeat().unwrap();
            for (output, want) in again.outputs().iter().zip(&eager) {
                assert_eq!(bits(&again.read(*output).unwrap()), bits(want));
            }
        }
        assert!(saved > owned, "{saved} bytes saved, {owned} owned");
    }

    fn chains_take_two_tensors(device: &Device) {
        let x = [1.0f32; ELEMENTS];
        let inputs = HostInputs::new().with(&x, [ELEMENTS]).unwrap();
        let mut captured = arena(device).capture((), &inputs, |step, (), slots| {
            let mut y: Saved<'_> = slots.input(0)?;
            for _ in 0..20 {
                y = ops::scale(step, &y, 2.0)?.save();
            }
            Ok(slots.output(&y))
        }).unwrap();
        let report = captured.report();
        assert_eq!((report.bytes_owned, report.bytes_saved), (3 * BYTES, 18 * BYTES));
        let replay = captured.replay(&inputs).unwrap();
        assert_eq!(replay.read(*replay.outputs()).unwrap(), [1048576.0; ELEMENTS]);
    }

    /// A function must not use other tensors in its second run.
    fn other_tensors_are_refused(device: &Device) {
        let mut memory = arena(device);
        let mut runs = 0;
        let error = memory.capture(&mut runs, &HostInputs::new(), |step, runs, slots| {
            **runs += 1;
            let first = ops::fill(step, [ELEMENTS], 1.0)?;
            let second = ops::scale(step, &first, 2.0)?;
            let third = ops::scale(step, &second, 2.0)?;
            let read = if **runs == 1 { &third } else { &second };
            Ok(slots.output(&ops::scale(step, read, 2.0)?))
        }).unwrap_err();
        let got = "launch 3 with other tensors";
        assert!(matches!(&error, Error::Misuse { op: "capture", got: found, .. } if found == got), "{error}");
        works(&mut memory, 100);
        captures(&mut memory);
    }

    /// A tensor whose memory another one has when it is read stands for that one, so the graph
    /// computes what the first run does.
    fn graphs_compute_the_first_run(device: &Device) {
        let mut memory = arena(device);
        let mut captured = memory.capture(0, &HostInputs::new(), |step, runs, slots| {
            *runs += 1;
            let first = ops::fill(step, [ELEMENTS], 1.0)?;
            let second = ops::scale(step, &first, 2.0)?;
            let third = ops::scale(step, &second, 2.0)?;
            let read = if *runs == 1 { &third } else { &first };
            Ok(slots.output(&ops::scale(step, read, 2.0)?))
        }).unwrap();
        let replay = captured.repeat().unwrap();
        assert_eq!(replay.read(*replay.outputs()).unwrap(), [8.0; ELEMENTS]);
    }
}

//! Tests of `ops::{embedding, gather, add_positions}` and their backward passes: rows are copied
//! exactly, and sums are plain chains.

use crate::gradients::{Case, Roundings, SEEDS, extents, leaf, leaf_as, normal, stored_as_each};
use crate::hostile::attack;
use crate::linear;
use crate::support::{Random, on_each_device};
use crate::tolerance::{Closeness, Exact};
use crate::trial::{assert_refused, assert_same, trial};
use stepscope::tensor::OnDevice;
use stepscope::{Arena, Buffer, Capacity, Device, Error, HostInputs, bf16, ops};

/// Ids, rows of the table, columns. They lie around a vector, a chunk of 64, a block's 512 and
/// several merges. Some rows have no id, and in some cases all ids are one.
const SHAPES: [[usize; 3]; 14] = [
    [0, 3, 4],
    [1, 1, 1],
    [3, 2, 5],
    [64, 1, 12],
    [65, 1, 12],
    [63, 70, 64],
    [200, 3, 131],
    [512, 9, 4],
    [513, 700, 7],
    [700, 2, 300],
    [1024, 40, 33],
    [1500, 5, 16],
    [5000, 1, 3],
    [5003, 3000, 130],
];

/// Returns ids, half of them from the whole table and half from its first rows.
fn ids(random: &mut Random, count: usize, rows: usize) -> Vec<u32> {
    let (all, few) = (random.belows(count, rows as u32), random.belows(count, rows.min(3) as u32));
    all.into_iter().zip(few).enumerate().map(|(at, (all, few))| if at % 2 == 0 { all } else { few }).collect()
}

fn rows_of<T: Copy>(table: &[T], ids: &[u32], cols: usize) -> Vec<T> {
    ids.iter().flat_map(|&id| &table[id as usize * cols..][..cols]).copied().collect()
}

/// Returns the places of each row's id. Ids without a row have no place.
fn places(ids: &[u32], rows: usize) -> Vec<Vec<usize>> {
    let mut places: Vec<Vec<usize>> = vec![vec![]; rows];
    for (place, &id) in ids.iter().enumerate() {
        if let Some(places) = places.get_mut(id as usize) {
            places.push(place);
        }
    }
    places
}

/// Returns the sums in the documented order, starting from `old`.
fn sums(dy: &[f32], ids: &[u32], cols: usize, old: &[f32]) -> Vec<f32> {
    let (mut out, places) = (old.to_vec(), places(ids, old.len() / cols));
    for (at, out) in out.iter_mut().enumerate() {
        for chunk in places[at / cols].chunks(64) {
            *out += chunk.iter().fold(0.0, |sum, place| sum + dy[place * cols + at % cols]);
        }
    }
    out
}

fn backward(device: &Device, dy: &[f32], ids: &[u32], [rows, cols]: [usize; 2], old: Option<&[f32]>) -> Vec<f32> {
    trial(device, |trial| {
        let (dy, ids) = (trial.upload(dy, [ids.len(), cols])?, trial.upload_indices(ids, [ids.len()])?);
        let stale = vec![f32::NAN; rows * cols];
        let mut dtable = trial.upload(old.unwrap_or(&stale), [rows, cols])?;
        trial.with_scratch(|| ops::launch::embedding_backward(trial, &dy, &ids, &mut dtable, old.is_some()))?;
        trial.output(&dtable)
    })
}

on_each_device! {
    fn rows_are_copied_exactly(device: &Device) {
        for [count, rows, cols] in SHAPES {
            let mut random = Random::new(cols as u64);
            let (table, ids) = (random.normals(rows * cols), ids(&mut random, count, rows));
            let want = rows_of(&table, &ids, cols);
            let rounded: Vec<bf16> = want.iter().map(|&x| bf16::from_f32(x)).collect();
            trial(device, |trial| {
                let halves: Vec<bf16> = table.iter().map(|&x| bf16::from_f32(x)).collect();
                let (x, table) = (trial.upload(&halves, [rows, cols])?, trial.upload(&table, [rows, cols])?);
                let ids = trial.upload_indices(&ids, [count])?;
                let y = ops::embedding::<f32>(trial, &table, &ids)?;
                assert_eq!(y.shape().extents(), [count, cols]);
                assert_same(format_args!("{count} of {rows} x {cols}"), &trial.output(&y)?, &want);
                let gathered = ops::gather(trial, &table, &ids)?;
                assert_same("gather", &trial.output(&gathered)?, &want);
                let y = ops::embedding::<bf16>(trial, &table, &ids)?;
                assert_eq!(trial.output(&y)?, rounded);
                let gathered = ops::gather(trial, &x, &ids)?;
                assert_eq!(trial.output(&gathered)?, rounded);
                Ok(())
            });
        }
    }

    fn gradient_is_a_plain_chain(device: &Device) {
        let mut closeness = Closeness::new("embedding backward");
        for [count, rows, cols] in SHAPES {
            let mut random = Random::new((count + cols) as u64);
            let (dy, ids) = (random.normals(count * cols), ids(&mut random, count, rows));
            let old = random.normals(rows * cols);
            let shape = format!("{count} of {rows} x {cols}");
            let zeros = vec![0.0; rows * cols];
            let got = backward(device, &dy, &ids, [rows, cols], None);
            assert_same(&shape, &got, &sums(&dy, &ids, cols, &zeros));
            assert_same(&shape, &backward(device, &dy, &ids, [rows, cols], Some(&old)), &sums(&dy, &ids, cols, &old));
            let places = places(&ids, rows);
            let exact = |at: usize| {
                let terms = places[at / cols].iter().map(|place| Exact::given(dy[place * cols + at % cols]));
                Exact::sum(terms.len().min(64 + terms.len() / 64), terms)
            };
            // The sum of one element has depth 0: it is exact.
            closeness.check(&shape, &got, &(0..got.len()).map(exact).collect::<Vec<_>>());
        }
        closeness.finish();
    }

    /// The sums are f32 whatever type stores the gradient. Those of gather are rounded once.
    fn bf16_sums_are_f32(device: &Device) {
        for [count, rows, cols] in SHAPES {
            let mut random = Random::new(count as u64);
            let dy: Vec<bf16> = random.normals(count * cols).into_iter().map(bf16::from_f32).collect();
            let ids = ids(&mut random, count, rows);
            let wide: Vec<f32> = dy.iter().map(|x| x.to_f32()).collect();
            let want = sums(&wide, &ids, cols, &vec![0.0; rows * cols]);
            trial(device, |trial| {
                let (dy, ids) = (trial.upload(&dy, [count, cols])?, trial.upload_indices(&ids, [count])?);
                let mut dtable = trial.upload(&vec![f32::NAN; rows * cols], [rows, cols])?;
                trial.with_scratch(|| ops::launch::embedding_backward(trial, &dy, &ids, &mut dtable, false))?;
                assert_same(format_args!("{count} of {rows} x {cols}"), &trial.output(&dtable)?, &want);
                let dx = trial.with_scratch(|| ops::launch::gather_backward(trial, &dy, &ids, rows))?;
                assert_eq!(trial.output(&dx)?, want.iter().map(|&x| bf16::from_f32(x)).collect::<Vec<_>>());
                Ok(())
            });
        }
    }

    /// The host does not know these ids. Their rows are NaN, their gradients are dropped, and
    /// nothing out of bounds is touched.
    fn ids_without_a_row(device: &Device) {
        for [count, rows, cols] in [[1, 3, 4], [300, 7, 5], [1100, 2, 64]] {
            let mut random = Random::new(3);
            let (table, dy) = (random.normals(rows * cols), random.normals(count * cols));
            let mut ids = random.belows(count, rows as u32);
            let right = ids.clone();
            let mut want = rows_of(&table, &ids, cols);
            for (place, wrong) in (0..count).step_by(9).zip([rows as u32, u32::MAX].into_iter().cycle()) {
                ids[place] = wrong;
                want[place * cols..][..cols].fill(f32::NAN);
            }
            let sums = sums(&dy, &ids, cols, &vec![0.0; rows * cols]);
            trial(device, |trial| {
                let unseen = Buffer::from_slice(trial.device(), &ids)?;
                let (table, ids) = (trial.upload(&table, [rows, cols])?, trial.lend(&unseen, [count])?);
                let y = ops::embedding::<f32>(trial, &table, &OnDevice(&ids))?;
                assert_same("rows", &trial.output(&y)?, &want);
                let y = ops::gather(trial, &table, &OnDevice(&ids))?;
                assert_same("gathered", &trial.output(&y)?, &want);
                let (dy, mut dtable) = (trial.upload(&dy, [count, cols])?, trial.upload(&vec![1.0; rows * cols], [rows, cols])?);
                trial.with_scratch(|| ops::launch::embedding_backward(trial, &dy, &OnDevice(&ids), &mut dtable, false))?;
                assert_same("sums", &trial.output(&dtable)?, &sums);
                Ok(())
            });
            // Ids that the host knows are checked there.
            let mut arena = Arena::builder(device).capacity(Capacity::mib(1)).build().unwrap();
            let error = Error::Label { sample: 0, label: rows as u32, classes: rows };
            let uploaded = arena.step(|step| {
                let (table, ids) = (step.upload(&table, [rows, cols])?, step.upload_indices(&ids, [count])?);
                ops::embedding::<f32>(step, &table, &ids).map(drop)
            });
            assert_eq!(uploaded, Err(error.clone()));
            let inputs = |ids| HostInputs::new().with(&table, [rows, cols]).unwrap().with(ids, [count]).unwrap();
            let mut captured = arena
                .capture((), &inputs(&right), |step, (), slots| {
                    let y = ops::embedding::<f32>(step, &slots.input::<f32>(0)?, &slots.indices(1)?)?;
                    Ok(slots.output(&y))
                })
                .unwrap();
            assert_eq!(captured.replay(&inputs(&ids)).err(), Some(error));
            assert!(captured.replay(&inputs(&right)).is_ok());
        }
    }

    fn positions(device: &Device) {
        for [batch, tokens, context, cols] in [[0, 2, 3, 4], [1, 1, 1, 1], [3, 5, 5, 7], [2, 3, 9, 4], [1030, 2, 3, 12], [1, 0, 2, 4]] {
            let mut random = Random::new(cols as u64);
            let row = tokens * cols;
            let (x, table, old) = (random.normals(batch * row), random.normals(context * cols), random.normals(context * cols));
            trial(device, |trial| {
                let shape = [batch, tokens, cols];
                let table_there = trial.upload(&table, [context, cols])?;
                let given = trial.upload(&x, shape)?;
                let y = ops::add_positions(trial, &given, &table_there)?;
                assert_eq!(y.shape().extents(), shape);
                let want: Vec<f32> = x.iter().enumerate().map(|(at, x)| x + table[at % row]).collect();
                assert_same(format_args!("{shape:?}"), &trial.output(&y)?, &want);
                for accumulate in [false, true] {
                    let mut dtable = trial.upload(&old, [context, cols])?;
                    trial.with_scratch(|| ops::launch::add_positions_backward(trial, &given, &mut dtable, accumulate))?;
                    let sums = crate::trees::rows(batch, row, &|sum, index| sum + x[index]);
                    let start = |at: usize| if accumulate { old[at] } else { 0.0 };
                    let want: Vec<f32> = (0..context * cols).map(|at| start(at) + sums.get(at).unwrap_or(&0.0)).collect();
                    assert_same(format_args!("{shape:?}, sums"), &trial.output(&dtable)?, &want);
                }
                Ok(())
            });
        }
    }

    fn shapes_must_agree(device: &Device) {
        trial(device, |trial| {
            let (table, ids) = (trial.upload(&[1.0; 6], [2, 3])?, trial.upload_indices(&[0; 4], [4])?);
            let flat = trial.upload(&[1.0; 6], [6])?;
            assert_refused(ops::embedding::<f32>(trial, &flat, &ids), &["embedding", "a table [rows, cols]", "[6]"]);
            assert_refused(ops::gather(trial, &flat, &ids), &["gather", "a table [rows, cols]", "[6]"]);
            let deep = trial.upload_indices(&[0; 4], [1, 1, 1, 4])?;
            assert_refused(ops::embedding::<f32>(trial, &table, &deep), &["embedding", "one to three extents", "[1, 1, 1, 4]"]);
            let mut dtable = trial.upload(&[1.0; 6], [2, 3])?;
            let refused = ops::launch::embedding_backward(trial, &table, &ids, &mut dtable, true);
            assert_refused(refused, &["embedding_backward", "[4, 3]", "[2, 3]"]);
            assert_refused(ops::launch::gather_backward(trial, &table, &ids, 2), &["gather_backward", "[4, 3]", "[2, 3]"]);
            let x = trial.upload(&[1.0; 9], [1, 3, 3])?;
            assert_refused(ops::add_positions(trial, &x, &table), &["add_positions", "at least tokens", "[1, 3, 3] and [2, 3]"]);
            let refused = ops::launch::add_positions_backward(trial, &x, &mut dtable, false);
            assert_refused(refused, &["add_positions_backward", "at least tokens"]);
            trial.empty::<f32>([0]).map(drop)
        });
    }

    /// The table is an embedding and the factor of a product: its gradients add up.
    fn gradient(device: &Device) {
        for seed in SEEDS {
            let mut random = Random::new(seed);
            let [count, rows, cols] = extents(&mut random, seed, [150, 5, 13]);
            let ids = random.belows(count, rows as u32);
            let operands = vec![normal(&mut random, &[rows, cols]), normal(&mut random, &[count, rows])];
            let table = |p: &[f64]| rows_of(p, &ids, cols);
            Case::new("embedding", seed, count, operands.clone()).check(device, |step, tape, p| {
                let ids = step.upload_indices(&ids, [count])?;
                tape.embedding(p[0], ids)?.add(tape.linear(&leaf(tape, p[1])?, p[0], None)?)
            }, |p| {
                let product = linear::in_float64(&p[1], &p[0], &[], rows, cols);
                table(&p[0]).iter().zip(product).map(|(row, product)| row + product).collect()
            });
        }
    }

    fn gradient_of_positions(device: &Device) {
        for seed in SEEDS {
            let mut random = Random::new(seed);
            let [batch, tokens, cols] = extents(&mut random, seed, [7, 5, 13]);
            let operands = vec![normal(&mut random, &[batch, tokens, cols]), normal(&mut random, &[tokens + 2, cols])];
            Case::new("add_positions", seed, batch, operands).check(device, |_, tape, p| {
                tape.add_positions(&leaf(tape, p[0])?, p[1])
            }, |p| p[0].iter().enumerate().map(|(at, x)| x + p[1][at % (tokens * cols)]).collect());
        }
    }
}

stored_as_each! {
    fn gradient_of_gather<S>(device: &Device) {
        for seed in SEEDS {
            let mut random = Random::new(seed);
            let [count, rows, cols] = extents(&mut random, seed, [150, 5, 13]);
            let ids = random.belows(count, rows as u32);
            let operands = vec![normal(&mut random, &[rows, cols])];
            // Sums over rows are f32, and written once.
            let roundings = Roundings { forward: 0.0, ..Roundings::ONCE };
            Case::new("gather", seed, count, operands).stored_as::<S>(roundings).check(device, |step, tape, p| {
                leaf_as::<S>(tape, p[0])?.gather(0, &step.upload_indices(&ids, [count])?)
            }, |p| rows_of(&p[0], &ids, cols));
        }
    }
}

attack! {
    embedding::embedding_forward<S> { table: f32s 24, ids: u32s 3, cols: number 8, y: out_stored 24 }
    embedding::gather<S> { x: stored 24, ids: u32s 3, cols: number 8, y: out_stored 24 }
    embedding::sort_ids { ids: u32s 9, sorted: out_u32 9, order: out_u32 9 }
    embedding::merge_ids { ids: u32s 9, order: u32s 9, run: number 4, merged: out_u32 9, merged_order: out_u32 9 }
    embedding::rows_sum<S> {
        dy: stored 48, sorted: u32s 6, order: u32s 6, cols: number 8, length: number 24, accumulate: number 1, out: out 24,
        partials: out 8,
    }
    embedding::rows_finish { sorted: u32s 70, partials: f32s 16, cols: number 8, length: number 24, out: out 24 }
}

//! A misaligned vector access is an error of the launch that names kernel, block, thread and place,
//! in every build. On a GPU it would end the process's context. An argument that is misaligned at
//! the launch is refused before anything runs.

use crate::support::open;
use cuda_std::emulator::{Cause, Kind, MemoryLocation};
use cuda_std::prelude::*;
use half::bf16;
use kernels::contract;
use kernels::tile::SharedTile;
use kernels::vector::{F4, VectorPart, load_pair, load_word, load_word_raw, store_words};
use stepscope::tensor::{Source, Target};
use stepscope::{Arena, Capacity, DeviceKind, Error, Result, ops};

const LENGTH: usize = 64;

/// Defines kernels in which thread 5 of the second block moves a vector at `at`.
macro_rules! movers {
    ($($name:ident<$T:ty>: $bytes:literal $kind:ident, |$x:ident, $y:ident, $at:ident| $access:expr;)*) => {$(
        #[kernel]
        unsafe fn $name($x: &[$T], $at: usize, $y: *mut $T) {
            if thread::index_1d() == 37 {
                // SAFETY: inside `x` and `y`, but aligned only for some `at`: this is the planted
                // bug.
                unsafe { $access };
            }
            let _ = ($x, $y);
        }

        // SAFETY: the kernel stays inside its arguments for places up to 8. It requires no
        // alignment of the place: this is the planted bug.
        contract! { unsafe $name { block: 32, shared: 256 } |k| {
            Violation::unless_length("x", LENGTH, k.x.len())?;
            Violation::unless_length("y", LENGTH, k.y.len())?;
            Violation::unless(k.at <= 8, "at", "at most 8", k.at)?;
            Grid::new(2, 1, 1)
        }}
    )*

    #[test]
    fn misaligned_vector_names_its_thread() {
        $(for at in 1..=8 {
            let boundary = $bytes / size_of::<$T>();
            let outcome = moved(|step| {
                let x = step.upload(&[<$T>::default(); LENGTH], [LENGTH])?;
                let mut y = step.upload(&[<$T>::default(); LENGTH], [LENGTH])?;
                step.launch($name { x: x.slice(), at, y: y.out() })
            });
            if at.is_multiple_of(boundary) {
                assert_eq!(outcome, Ok(()), "{} at {at}", stringify!($name));
                continue;
            }
            let Err(Error::Kernel(fault)) = outcome else { panic!("{} at {at}: {outcome:?}", stringify!($name)) };
            let text = fault.to_string();
            assert_eq!((fault.kernel, fault.block, fault.thread), (stringify!($name), [1, 0, 0], 5), "{text}");
            let Cause::Misaligned { place, align, access } = fault.cause else { panic!("{text}") };
            assert_eq!((align, access.kind, access.location.file()), ($bytes, Kind::$kind, file!()), "{text}");
            assert!(text.contains(&format!("no multiple of {} bytes", $bytes)), "{text}");
            match place {
                MemoryLocation::Argument { element, .. } => assert_eq!(element, at as i64, "{text}"),
                MemoryLocation::Shared { byte } => assert_eq!(byte, 4 * at as i64, "{text}"),
                MemoryLocation::Address(_) => panic!("{text}"),
            }
        })*
    }};
}

movers! {
    loads<f32>: 16 Read, |x, y, at| F4::load(x, at);
    loads_part<f32>: 16 Read, |x, y, at| F4::load_part(x, at, VectorPart::Whole, 0.0);
    loads_raw<f32>: 16 Read, |x, y, at| F4::load_raw(y.cast_const(), at);
    loads_part_raw<f32>: 16 Read, |x, y, at| F4::load_part_raw(y.cast_const(), at, VectorPart::Whole, 0.0);
    stores<f32>: 16 Write, |x, y, at| F4::splat(1.0).store(y, at);
    stores_part<f32>: 16 Write, |x, y, at| F4::splat(1.0).store_part(y, at, VectorPart::Whole);
    loads_pair<f32>: 8 Read, |x, y, at| load_pair(x, at);
    loads_halves<bf16>: 8 Read, |x, y, at| F4::load(x, at);
    stores_halves<bf16>: 8 Write, |x, y, at| F4::splat(1.0).store(y, at);
    loads_a_word<bf16>: 4 Read, |x, y, at| load_word(x, at);
    loads_a_word_raw<bf16>: 4 Read, |x, y, at| load_word_raw(y.cast_const(), at);
    stores_words_of_halves<bf16>: 8 Write, |x, y, at| store_words(y, at, [0, 0]);
    copies_four<f32>: 16 Read, |x, y, at| SharedTile::<f32>::new(0, 64).copy4(0, x, at);
    copies_a_chunk_of_halves<bf16>: 16 Read, |x, y, at| SharedTile::<u32>::new(0, 64).copy_chunk(0, x, at);
    sets_a_chunk<f32>: 16 Write, |x, y, at| SharedTile::<f32>::new(0, 64).set4(at as u32, F4::splat(1.0));
    copies_to_shared<f32>: 16 Write, |x, y, at| SharedTile::<f32>::new(0, 64).copy4(at as u32, x, 0);
}

fn moved(launch: impl for<'s> FnOnce(&mut stepscope::EagerStep<'s>) -> Result<()>) -> Result<()> {
    let device = open(DeviceKind::Emulated);
    Arena::builder(&device).capacity(Capacity::mib(1)).build()?.step(launch)
}

/// A part of a tensor may begin at any element, which may be misaligned for a vector.
#[test]
fn misaligned_base_is_refused() {
    for late in 1..=4 {
        for which in ["x", "y"] {
            let outcome = moved(|step| {
                let x = step.upload(&[0.0; LENGTH + 4], [LENGTH + 4])?;
                let mut y = step.upload(&[0.0; LENGTH + 4], [LENGTH + 4])?;
                let start = |name| if which == name { late } else { 0 };
                let (x, y) =
                    (x.slice().part(start("x")..start("x") + LENGTH), y.out().part(start("y")..start("y") + LENGTH));
                step.launch(loads { x, at: 0, y })
            });
            if late == 4 {
                assert_eq!(outcome, Ok(()));
                continue;
            }
            let Err(Error::Contract { kernel: "loads", violation }) = outcome else { panic!("{outcome:?}") };
            assert_eq!(
                (violation.argument, &*violation.expected),
                (which, "an address that is a multiple of 16 bytes")
            );
        }
    }
}

/// The original bug: the gains of k begin at a distance from those of q that is misaligned for
/// vectors.
#[test]
fn misaligned_gains_are_refused() {
    for distance in 4..=9 {
        let outcome = moved(|step| {
            let x = step.upload(&[1.0; 64], [1, 4, 16])?;
            let gains = step.upload(&vec![1.0; distance + 4], [distance + 4])?;
            let norm = ops::QkNorm { distance: Some(distance), ..ops::QkNorm::new(&gains, 1e-5) };
            let form = ops::AttentionConfig::new(2).kv_heads(1);
            ops::qk_norm(step, &x, norm, &form).map(drop)
        });
        match outcome {
            Ok(()) => assert!(distance.is_multiple_of(4), "{distance}"),
            Err(Error::Contract { kernel: "qk_norm_forward_f32", violation }) => {
                assert_eq!((violation.argument, &*violation.expected), ("distance", "a multiple of 4"));
            }
            other => panic!("{distance}: {other:?}"),
        }
    }
}

/// A part cannot exceed the bounds of the whole.
#[test]
fn parts_stay_inside_the_whole() {
    let _ = moved(|step| {
        let x = step.upload(&[0.0; 8], [8])?;
        for outside in [0..9, 8..9, 9..9] {
            assert!(std::panic::catch_unwind(|| x.slice().part(outside)).is_err());
        }
        assert_eq!((x.slice().part(3..8).len(), x.slice().part(8..8).len()), (5, 0));
        Ok(())
    });
}

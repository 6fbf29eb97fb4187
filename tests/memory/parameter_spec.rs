//! Parameter specs: `build` refuses colliding names and impossible sizes in few words, whatever
//! came before.

#![forbid(unsafe_code)]

use stepscope::parameters::{FrozenType, Initializer, ParameterSpecBuilder};
use stepscope::{Device, DeviceKind, Error, ParameterSpec, Parameters};

/// Returns the actual value in the error of `build`.
#[track_caller]
fn refused(add: impl FnOnce(&mut ParameterSpecBuilder)) -> String {
    let mut spec = ParameterSpec::builder();
    add(&mut spec);
    let error = spec.build().unwrap_err();
    assert!(error.to_string().len() < 1000, "{error}");
    let Error::Misuse { op: "parameter spec", got, .. } = error else { panic!("{error}") };
    got
}

/// An initialization rule changes only the parameters that it names, and leaves all places as they
/// are.
#[test]
fn initialize_changes_only_named_parameters() {
    let values = |recipe: bool| {
        let mut spec = ParameterSpec::builder();
        let [a, b] = ["a.weight", "a.bias"].map(|name| spec.add(name, [70], Initializer::Constant(0.25)));
        if recipe {
            spec.initialize(|entry| entry.name().ends_with("bias").then_some(Initializer::Constant(0.5)));
        }
        let after = spec.add("after.bias", [70], Initializer::Constant(0.75));
        let device = Device::open(DeviceKind::Emulated).unwrap();
        let weights = Parameters::new(&device, &spec.build().unwrap(), 7).unwrap();
        [a, b, after].map(|parameter| {
            let values = weights.read(parameter).unwrap();
            assert!(values.len() == 70 && values.iter().all(|value| *value == values[0]));
            values[0]
        })
    };
    assert_eq!((values(false), values(true)), ([0.25, 0.25, 0.75], [0.25, 0.5, 0.75]));
}

/// Parameters that are loaded start at zero, in every type. All others draw the same values.
#[test]
fn loaded_parameters_are_not_drawn() {
    for frozen in [None, Some(FrozenType::F32), Some(FrozenType::Bf16), Some(FrozenType::Nf4)] {
        let values = |is_loaded: bool| {
            let mut spec = ParameterSpec::builder();
            let all = ["a", "b", "c"].map(|name| spec.add(name, [64, 64], Initializer::fan_in(64)));
            if let Some(frozen) = frozen {
                spec.freeze(|entry| (entry.name() != "c").then_some(frozen));
            }
            let spec = spec.build().unwrap().with_loaded(|entry| is_loaded && entry.name() == "a");
            let weights = Parameters::new(&Device::open(DeviceKind::Emulated).unwrap(), &spec, 7).unwrap();
            all.map(|parameter| weights.read(parameter).unwrap())
        };
        let ([drawn, ..], [loaded, ..]) = (values(false), values(true));
        assert!(drawn.iter().any(|&value| value != 0.0) && loaded.iter().all(|&value| value == 0.0), "{frozen:?}");
        assert!(values(false)[1..] == values(true)[1..], "{frozen:?}");
    }
}

#[test]
fn impossible_sizes_are_refused_by_name() {
    let huge = usize::MAX;
    let most = isize::MAX as usize / 4;
    for shape in
        [[huge, 1, 1], [huge, huge, 1], [1 << 32, 1 << 32, 1], [huge / 2 + 1, 2, 1], [most, 1, 1], [huge, 2, 0]]
    {
        let got = refused(|spec| {
            spec.add("small", [3], Initializer::ZERO);
            spec.add("huge", shape, Initializer::ZERO);
            spec.add("behind", [3], Initializer::ZERO);
        });
        assert_eq!(got, format!("`huge` {shape:?} after 64 elements"));
    }
    // Either size would be accepted by itself.
    let got = refused(|spec| {
        spec.add("first", [most / 2], Initializer::ZERO);
        spec.add("second", [most / 2], Initializer::ZERO);
    });
    assert!(got.starts_with("`second` "), "{got}");
    let got = refused(|spec| {
        spec.add_stack(3, |number| number.to_string(), [most / 2], Initializer::ZERO);
    });
    assert!(got.starts_with("`1` "), "{got}");
    // The largest possible size, of which nothing is allocated.
    let mut spec = ParameterSpec::builder();
    let handle = spec.add("most", [most / 64 * 64], Initializer::ZERO);
    let spec = spec.build().unwrap();
    assert_eq!((spec.elements(), spec.entry(handle).unwrap().range()), (most / 64 * 64, 0..most / 64 * 64));
}

#[test]
fn colliding_names_are_refused() {
    let one = |spec: &mut ParameterSpecBuilder, name: &str| {
        spec.add(name, [1], Initializer::ZERO);
    };
    let got = refused(|spec| ["a", "b", "a"].iter().for_each(|name| one(spec, name)));
    assert_eq!(got, "two named `a`");
    // The names collide when joined.
    let got = refused(|spec| {
        spec.at("a").at("b").add("c", [1], Initializer::ZERO);
        spec.at("a").add("b.c", [2], Initializer::ZERO);
    });
    assert_eq!(got, "two named `a.b.c`");
    let got = refused(|spec| one(spec, "__metadata__"));
    assert_eq!(got, "`__metadata__`, which holds a file's notes");
    let long = "x".repeat(1_000_000);
    let got = refused(|spec| [&long, &long].iter().for_each(|name| one(spec, name)));
    assert!(got.starts_with("two named `xxxx") && got.ends_with(".. and 999880 more bytes`"), "{got}");
    let got = refused(|spec| {
        spec.add(&long, [0], Initializer::ZERO);
    });
    assert!(got.ends_with("more bytes` [0]"), "{got}");
    // Terminal control characters are not passed on.
    let got = refused(|spec| (0..2).for_each(|_| one(spec, "\x1b[2J\n")));
    assert_eq!(got, "two named `\u{fffd}[2J\u{fffd}`");
}

//! Rules of other packages: their behaviour must match their declarations.
//!
//! Invariant: a rule whose behaviour differs from its declaration is refused when the optimizer is
//! made, or at its first update.

#![forbid(unsafe_code)]

use crate::support::on_each_device;
use std::cell::Cell;
use stepscope::ops;
use stepscope::optim::{ParameterGroup, ParameterGroups, Sgd, UpdateArguments, UpdateRule, UpdateTicket};
use stepscope::parameters::Initializer;
use stepscope::prelude::*;

const LEN: usize = 200;

/// The wrapped rule, its declaration, and the changes to its behaviour.
#[derive(Clone, Default)]
struct Wrapper<R> {
    inner: R,
    state: &'static [&'static str],
    has_groups: bool,
    writes_copy: bool,
    /// Settings after those of the inner rule.
    more: Vec<f32>,
    /// Flags that hide the copy and the groups from the inner rule.
    hides: [bool; 2],
}

impl<R: UpdateRule + Clone> UpdateRule for Wrapper<R> {
    fn name(&self) -> &'static str {
        "wrapper"
    }

    fn state(&self) -> &'static [&'static str] {
        self.state
    }

    fn has_groups(&self) -> bool {
        self.has_groups
    }

    fn writes_copy(&self) -> bool {
        self.writes_copy
    }

    fn settings(&self, number: u64, group: &ParameterGroup) -> Vec<f32> {
        [self.inner.settings(number, group), self.more.clone()].concat()
    }

    fn queue<'s>(&self, step: &Step<'s>, mut arguments: UpdateArguments<'_, 's>) -> Result<()> {
        arguments.copy = arguments.copy.filter(|_| !self.hides[0]);
        arguments.groups = arguments.groups.filter(|_| !self.hides[1]);
        self.inner.queue(step, arguments)
    }
}

/// Returns a wrapper with AdamW's declaration.
fn adamw() -> Wrapper<AdamW> {
    Wrapper { state: &["first", "second"], has_groups: true, writes_copy: true, ..Wrapper::default() }
}

/// Returns a group for each of `count` parameters.
fn groups(count: usize) -> ParameterGroups {
    (0..count).fold(ParameterGroups::new(), |groups, number| {
        let group = ParameterGroup { rate: 0.5 + number as f32, weight_decay: None };
        groups.with(group, move |entry| entry.name() == format!("p{number}"))
    })
}

struct Fixture {
    arena: Arena,
    weights: Parameters,
    gradients: Gradients,
}

impl Fixture {
    fn new(device: &Device) -> Self {
        let mut spec = ParameterSpec::builder();
        let parameters: Vec<_> =
            (0..8).map(|number| spec.add(format!("p{number}"), [LEN], Initializer::fan_in(4))).collect();
        let weights = Parameters::new(device, &spec.build().unwrap(), 7).unwrap().with_bf16_copy().unwrap();
        let mut gradients = Gradients::zeros(&weights).unwrap();
        let mut arena = Arena::builder(device).capacity(Capacity::mib(1)).build().unwrap();
        let fill = |step: &mut EagerStep<'_>| {
            parameters.iter().try_for_each(|&w| ops::fill_into(step, &mut gradients.lend_mut(step, w)?, 0.25))
        };
        arena.step(fill).unwrap();
        Self { arena, weights, gradients }
    }

    /// Makes two updates by a rule, with this many groups in addition to the first, and returns the
    /// weights' digest.
    fn train<R: UpdateRule>(mut self, rule: R, groups: usize) -> Result<String> {
        let mut optimizer = Optimizer::new(&self.weights, rule)?;
        if groups > 0 {
            optimizer = optimizer.with_parameter_groups(&self::groups(groups))?;
        }
        for _ in 0..2 {
            let ticket = optimizer.advance()?;
            self.arena.step(|step| optimizer.apply(ticket, step, &mut self.weights, &self.gradients))?;
        }
        self.weights.sha256()
    }
}

#[track_caller]
fn refused(trained: Result<String>, words: &[&str]) {
    let error = trained.unwrap_err();
    assert!(matches!(error, Error::Misuse { .. } | Error::Contract { .. }), "{error}");
    let error = error.to_string();
    assert!(words.iter().all(|words| error.contains(words)), "{error}");
}

on_each_device! {
    fn honest_wrapper_is_accepted(device: &Device) {
        for groups in [0, 3, 7] {
            let expected = Fixture::new(device).train(AdamW::default(), groups).unwrap();
            assert_eq!(Fixture::new(device).train(adamw(), groups).unwrap(), expected, "{groups} groups");
            // Without writing the copy, which the optimizer then writes.
            let plain = Wrapper { writes_copy: false, ..adamw() };
            assert_eq!(Fixture::new(device).train(plain, groups).unwrap(), expected, "{groups} groups");
        }
        let sgd = Wrapper { inner: Sgd::default(), state: &["velocity"], has_groups: true, writes_copy: true, ..Wrapper::default() };
        let expected = Fixture::new(device).train(Sgd::default(), 2).unwrap();
        assert_eq!(Fixture::new(device).train(sgd, 2).unwrap(), expected);
    }

    fn wrapper_with_another_state(device: &Device) {
        let with = |state| Fixture::new(device).train(Wrapper { state, ..adamw() }, 0);
        refused(with(&[]), &["adamw", "[\"first\", \"second\"]", "0 parts"]);
        refused(with(&["first"]), &["adamw", "1 parts"]);
        refused(with(&["first", "second", "average"]), &["adamw", "3 parts"]);
        let sgd = Wrapper { inner: Sgd::default(), state: &["velocity", "other"], ..Wrapper::default() };
        refused(Fixture::new(device).train(sgd, 0), &["sgd", "[\"velocity\"]", "2 parts"]);
        // In a checkpoint, two parts would have one name.
        refused(with(&["first", "first"]), &["optimizer", "[\"first\", \"first\"]"]);
        refused(with(&["first", ""]), &["optimizer", "[\"first\", \"\"]"]);
    }

    /// The 9 settings of each of eight groups are as many as 9 groups of 8 settings.
    fn a_wrapper_with_more_settings(device: &Device) {
        let more = |count: usize| Wrapper { more: vec![0.5; count], ..adamw() };
        refused(Fixture::new(device).train(more(1), 0), &["hyper", "8"]);
        for groups in [1, 3, 7] {
            refused(Fixture::new(device).train(more(1), groups), &["adamw", "[groups, 8]", &format!("[{}, 9]", groups + 1)]);
            refused(Fixture::new(device).train(more(8), groups), &["adamw", "[groups, 8]"]);
        }
        let sgd = Wrapper { inner: Sgd::default(), state: &["velocity"], has_groups: true, more: vec![1.0], ..Wrapper::default() };
        refused(Fixture::new(device).train(sgd, 4), &["sgd", "[groups, 5]", "[5, 6]"]);
        refused(Fixture::new(device).train(Wrapper { more: vec![f32::NAN], ..adamw() }, 0), &["wrapper", "NaN as setting 8 of group 0"]);
    }

    fn wrapper_must_keep_its_declaration(device: &Device) {
        let copy = Wrapper { hides: [true, false], ..adamw() };
        refused(Fixture::new(device).train(copy.clone(), 0), &["wrapper", "`writes_copy` returned true", "0 of them"]);
        refused(Fixture::new(device).train(copy, 3), &["wrapper", "`writes_copy` returned true"]);
        // AdamW without groups takes the settings of one.
        let groups = Wrapper { hides: [false, true], ..adamw() };
        refused(Fixture::new(device).train(groups, 3), &["hyper"]);
        refused(Fixture::new(device).train(Heedless, 3), &["heedless", "`has_groups` returned true"]);
        refused(Fixture::new(device).train(Wrapper { has_groups: false, ..adamw() }, 3), &["wrapper", "`has_groups` returns false"]);
    }

    /// A captured update is checked when it is recorded.
    fn a_captured_rule(device: &Device) {
        let Fixture { mut arena, weights, gradients } = Fixture::new(device);
        let optimizer = Optimizer::new(&weights, Wrapper { hides: [true, false], ..adamw() }).unwrap();
        let captured = arena.capture((weights, gradients, optimizer), &HostInputs::new(), |step, (weights, gradients, optimizer), slots| {
            optimizer.apply(UpdateTicket::each_replay(slots), step, weights, gradients)
        });
        refused(captured.map(|_| String::new()), &["wrapper", "`writes_copy` returned true"]);
    }
}

/// A rule that declares groups, and ignores them.
struct Heedless;

impl UpdateRule for Heedless {
    fn name(&self) -> &'static str {
        "heedless"
    }

    fn has_groups(&self) -> bool {
        true
    }

    fn settings(&self, _: u64, _: &ParameterGroup) -> Vec<f32> {
        vec![-0.1]
    }

    fn queue<'s>(&self, step: &Step<'s>, mut arguments: UpdateArguments<'_, 's>) -> Result<()> {
        let change = ops::scale(step, &arguments.gradients, -0.1)?;
        ops::add_assign(step, &mut arguments.weights, &change)
    }
}

/// A rule that declares something else at each call.
struct Fickle(Cell<usize>);

impl Fickle {
    fn next(&self, of: usize) -> usize {
        self.0.set(self.0.get() + 1);
        self.0.get() % of
    }
}

impl UpdateRule for Fickle {
    fn name(&self) -> &'static str {
        ["fickle", "adamw", "sgd"][self.next(3)]
    }

    fn state(&self) -> &'static [&'static str] {
        [&[][..], &["a"], &["a", "b", "c"]][self.next(3)]
    }

    fn has_groups(&self) -> bool {
        self.next(2) == 0
    }

    fn writes_copy(&self) -> bool {
        self.next(2) == 0
    }

    fn settings(&self, _: u64, _: &ParameterGroup) -> Vec<f32> {
        vec![0.5]
    }

    fn queue<'s>(&self, step: &Step<'s>, mut arguments: UpdateArguments<'_, 's>) -> Result<()> {
        ops::fill_into(step, &mut arguments.weights, 1.0)?;
        arguments.state.iter_mut().try_for_each(|state| ops::fill_into(step, state, 2.0))
    }
}

/// The first declaration holds: a checkpoint has the rule's state.
#[test]
fn rules_are_queried_once() {
    let device = crate::support::open(DeviceKind::Emulated);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("fickle.safetensors");
    let mut outcomes = [0, 0];
    for start in 0..36 {
        let Fixture { mut arena, mut weights, gradients } = Fixture::new(&device);
        let mut optimizer = Optimizer::new(&weights, Fickle(Cell::new(start))).unwrap();
        let ticket = optimizer.advance().unwrap();
        match arena.step(|step| optimizer.apply(ticket, step, &mut weights, &gradients)) {
            Ok(()) => outcomes[0] += 1,
            // It declares that it writes the copy, and does not.
            Err(error) => {
                assert!(error.to_string().contains("`writes_copy` returned true"), "{error}");
                outcomes[1] += 1;
            }
        }
        Checkpoint::save(&path, &weights, Some(&optimizer), &[]).unwrap();
        Checkpoint::load(&path).unwrap().restore(&mut weights, Some(&mut optimizer)).unwrap();
        assert!(optimizer.state().iter().all(|&state| crate::support::words(state)[0] == 2f32.to_bits()));
    }
    assert!(outcomes.iter().all(|&count| count > 0), "{outcomes:?}");
}

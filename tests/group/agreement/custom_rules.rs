//! Update rules of a program: ranks compare the settings that a rule reports, and refuse a rule
//! that reports none.

use super::*;

/// A custom rule with a setting that only `queue` uses.
#[derive(Clone)]
struct Signs {
    rate: f32,
    hidden: f32,
    gives: bool,
    /// Another rate from the second update on, which `configuration` does not report.
    secret: f32,
}

impl UpdateRule for Signs {
    fn name(&self) -> &'static str {
        "signs"
    }

    fn configuration(&self) -> Option<Vec<(&'static str, String)>> {
        self.gives.then(|| vec![("rate", format!("{:?}", self.rate)), ("hidden", format!("{:?}", self.hidden))])
    }

    fn settings(&self, number: u64, _: &ParameterGroup) -> Vec<f32> {
        vec![-self.rate + if number > 1 { self.secret } else { 0.0 }]
    }

    fn queue<'s>(&self, step: &Step<'s>, mut arguments: UpdateArguments<'_, 's>) -> Result<()> {
        let change = ops::scale_by(step, &arguments.gradients, &arguments.settings)?;
        ops::add_assign(step, &mut arguments.weights, &change)
    }
}

/// Another rule of the same name that does not report its settings.
#[derive(Clone)]
struct Silent(f32);

impl UpdateRule for Silent {
    fn name(&self) -> &'static str {
        "silent"
    }

    fn settings(&self, _: u64, _: &ParameterGroup) -> Vec<f32> {
        vec![-self.0]
    }

    fn queue<'s>(&self, step: &Step<'s>, mut arguments: UpdateArguments<'_, 's>) -> Result<()> {
        let change = ops::scale_by(step, &arguments.gradients, &arguments.settings)?;
        ops::add_assign(step, &mut arguments.weights, &change)
    }
}

/// A rule without settings.
#[derive(Clone)]
struct Fixed;

impl UpdateRule for Fixed {
    fn name(&self) -> &'static str {
        "fixed"
    }

    fn settings(&self, number: u64, group: &ParameterGroup) -> Vec<f32> {
        Silent(0.1).settings(number, group)
    }

    fn queue<'s>(&self, step: &Step<'s>, arguments: UpdateArguments<'_, 's>) -> Result<()> {
        Silent(0.1).queue(step, arguments)
    }
}

#[test]
fn custom_rules_are_compared() {
    let base = Signs { rate: 0.1, hidden: 1.0, gives: true, secret: 0.0 };
    let setup = |rule: &Signs| Setup::by(rule.clone());
    refuses(&setup(&base), &setup(&Signs { hidden: 2.0, ..base.clone() }), 1, &["optimizer.hidden"]);
    // The first update is made; the second is not.
    let secret = Signs { secret: 0.5, ..base.clone() };
    refuses(&setup(&base), &setup(&secret), 3, &["optimizer's settings for the update"]);
    let outcomes = with_odd(&setup(&base), &setup(&base), 0);
    assert!(outcomes[0].is_ok() && outcomes.iter().all(|other| *other == outcomes[0]), "{outcomes:?}");
    let outcomes = with_odd(&Setup::by(Fixed), &Setup::by(Fixed), 0);
    assert!(outcomes[0].is_ok() && outcomes.iter().all(|other| *other == outcomes[0]), "{outcomes:?}");
    // A rule that reports no settings cannot agree, even with itself.
    for outcome in with_odd(&Setup::by(Silent(0.1)), &Setup::by(Silent(0.1)), 0) {
        let text = outcome.unwrap_err().to_string();
        assert!(text.contains("silent: ") && text.contains("implement `UpdateRule::configuration`"), "{text}");
    }
    let text = with_odd(&setup(&base), &setup(&Signs { gives: false, ..base.clone() }), 2)[0].clone().unwrap_err();
    assert!(text.to_string().contains("rank 2 of 4 has failed"), "{text}");
}

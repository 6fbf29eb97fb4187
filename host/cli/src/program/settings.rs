//! The settings that decide the weights of a run. A checkpoint stores them as a note, and a run
//! that resumes from it must have the same.

use std::collections::BTreeSet;

use stepscope::Checkpoint;

/// Names and values, in the order in which errors list them.
pub type Settings = Vec<(&'static str, String)>;

/// The most characters of a value that a message shows.
const SHOWN: usize = 100;
/// The most settings that a message lists.
const LISTED: usize = 20;

/// Formats the settings as a checkpoint's note.
pub fn to_note(settings: &Settings) -> String {
    serde_json::to_string(settings).expect("pairs of texts have a JSON form")
}

/// Returns the note of this name, such as `gpt.settings`, which the program that wrote the
/// checkpoint has set.
///
/// # Errors
/// Names the program that wrote the checkpoint.
pub fn note<'c>(checkpoint: &'c Checkpoint, name: &str) -> Result<&'c str, String> {
    if let Ok(note) = checkpoint.note(name) {
        return Ok(note);
    }
    let program = |name: &str| shown(name.split('.').next().unwrap_or_default());
    let other = checkpoint.notes().map(|(name, _)| name).find(|name| name.ends_with(".settings"));
    let whose = other.map_or("another program".to_owned(), |other| format!("`{}`", program(other)));
    Err(format!("is a checkpoint of {whose}; expected a checkpoint of `{}`", program(name)))
}

/// Returns true if a run can resume from the checkpoint. That needs the optimizer's state, not only
/// weights.
pub fn has_optimizer(checkpoint: &Checkpoint) -> bool {
    checkpoint.note("stepscope.updates").is_ok()
}

/// Compares the settings in a checkpoint's note with those of this run.
///
/// # Errors
/// A line for each setting that differs, with both values.
pub fn compare(note: &str, ours: &Settings) -> Result<(), String> {
    let theirs: Vec<(String, String)> = serde_json::from_str(note)
        .map_err(|_| format!("its settings cannot be read, so this version did not write it: `{}`", shown(note)))?;
    let value = |settings: &[(String, String)], name: &str| {
        settings.iter().find(|(theirs, _)| theirs == name).map(|(_, value)| value.clone())
    };
    let ours: Vec<_> = ours.iter().map(|(name, value)| ((*name).to_owned(), value.clone())).collect();
    let (mut seen, mut lines) = (BTreeSet::new(), Vec::new());
    for (name, _) in ours.iter().chain(&theirs) {
        let [before, now] = [&theirs, &ours].map(|settings| value(settings, name));
        if seen.insert(name) && before != now {
            let [before, now] = difference([before, now]);
            lines.push(format!("  {}: {before} in the checkpoint, {now} here", shown(name)));
        }
    }
    if lines.is_empty() {
        return Ok(());
    }
    let more = lines.len().saturating_sub(LISTED);
    lines.truncate(LISTED);
    if more > 0 {
        lines.push(format!("  and {more} more"));
    }
    Err(format!("was made with other settings:\n{}", lines.join("\n")))
}

/// Returns two different values as a message shows them. Long values with the same start are cut to
/// the part around the first difference.
fn difference(values: [Option<String>; 2]) -> [String; 2] {
    let [before, now] = values.each_ref().map(|value| value.as_deref().unwrap_or_default().chars());
    let same = before.zip(now).take_while(|(before, now)| before == now).count();
    let skipped = if same < SHOWN / 2 { 0 } else { same - SHOWN / 4 };
    let rest = |value: &String| shown(&value.chars().skip(skipped).collect::<String>());
    values.map(|value| match value {
        Some(value) if skipped > 0 => format!("..{}", rest(&value)),
        Some(value) => rest(&value),
        None => "not set".to_owned(),
    })
}

/// Returns the start of a text from a file, with control characters escaped.
fn shown(text: &str) -> String {
    let start: String = text.chars().take(SHOWN).flat_map(char::escape_debug).collect();
    if text.chars().nth(SHOWN).is_some() { start + ".." } else { start }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(values: &[(&'static str, &str)]) -> Settings {
        values.iter().map(|&(name, value)| (name, value.to_owned())).collect()
    }

    #[test]
    fn each_difference_has_both_values() {
        let note = to_note(&settings(&[("seed", "7"), ("batch", "8"), ("old", "x")]));
        let ours = settings(&[("seed", "7"), ("batch", "9"), ("new", "y")]);
        let error = compare(&note, &ours).unwrap_err();
        let expected = "was made with other settings:\n  batch: 8 in the checkpoint, 9 here\n  \
                        new: not set in the checkpoint, y here\n  old: x in the checkpoint, not set here";
        assert_eq!(error, expected);
        assert_eq!(compare(&note, &settings(&[("old", "x"), ("batch", "8"), ("seed", "7")])), Ok(()));
    }

    /// A setting is compared to its end, and the message shows where it differs.
    #[test]
    fn long_values_are_compared_whole() {
        for length in [10, 49, 50, 100, 101, 5_000] {
            let start = "q_proj,".repeat(length)[..length].to_owned();
            for (before, now) in [("k_proj", "v_proj"), ("", "v"), ("\u{e4}", "\u{f6}")] {
                let [theirs, ours] = [before, now].map(|end| format!("{start}{end}"));
                let note = to_note(&settings(&[("targets", &theirs)]));
                assert_eq!(compare(&note, &settings(&[("targets", &theirs)])), Ok(()));
                let error = compare(&note, &settings(&[("targets", &ours)])).unwrap_err();
                let shown = |end: &str, place: &str| error.contains(&format!("{end} {place}"));
                assert!(shown(before, "in the checkpoint, ") && shown(now, "here"), "{length}: {error}");
                assert!(error.len() < 400, "{error}");
            }
        }
    }

    #[test]
    fn settings_errors_are_short_and_printable() {
        let long = "\u{1b}[2J".repeat(100_000);
        let many: Vec<_> = (0..10_000).map(|number| (format!("{number}{long}"), "x")).take(50).collect();
        for note in [long.clone(), serde_json::to_string(&many).unwrap(), "{}".into(), String::new()] {
            let error = compare(&note, &settings(&[("seed", "7")])).unwrap_err();
            assert!(error.len() < 20_000 && !error.contains('\u{1b}'), "{error}");
        }
    }
}

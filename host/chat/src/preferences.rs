//! Rows with two answers, of which one is preferred.
//!
//! A row becomes two rows that differ only in the answer, and each is read as any other row. The
//! forms are those of TRL: `prompt`, `chosen` and `rejected`, or only the last two, which share
//! their beginning. Questions and lists of messages next to the answers are read, too.
//!
//! Invariant: both rows have the same prompt, and differ after it.

use crate::forms::{LISTS, QUESTIONS};
use crate::messages::{has, messages};
use crate::rows::{Row, kind, lines};
use serde_json::{Map, Value};
use std::path::Path;
use stepscope_core::Result;

/// The keys of the answers.
const ANSWERS: [&str; 2] = ["chosen", "rejected"];
/// The kinds of rows, for errors.
const KINDS: &str = "`prompt`, `chosen` and `rejected`, or `chosen` and `rejected` that share their beginning";

/// A prompt with two answers.
#[derive(Clone, Debug, PartialEq)]
pub struct Preference {
    /// The prompt with the preferred answer.
    pub chosen: Row,
    /// The prompt with the other answer.
    pub rejected: Row,
}

impl Preference {
    /// Reads a row from a JSON object.
    ///
    /// # Errors
    /// Returns the reason why the object is not a row with two answers.
    pub fn from_json(json: &Value) -> std::result::Result<Self, String> {
        let Value::Object(object) = json else { return Err(format!("expected an object with {KINDS}")) };
        if let Some(missing) = ANSWERS.iter().find(|key| !has(object, key)) {
            let advice = match object.contains_key("label") {
                true => ": rows with a `label` have one answer; write both answers to a prompt into one row",
                false => "",
            };
            return Err(format!("expected {KINDS}; `{missing}` is missing or empty{advice}"));
        }
        if object["chosen"] == object["rejected"] {
            return Err("`chosen` and `rejected` are the same: remove the line".into());
        }
        let [chosen, rejected] = split(object)?;
        let read = |key: &str, row: Map<String, Value>| {
            Row::from_json(&row.into()).map_err(|reason| format!("the row with its `{key}` answer: {reason}"))
        };
        Ok(Self { chosen: read("chosen", chosen)?, rejected: read("rejected", rejected)? })
    }
}

/// Returns the object of a row for each answer.
fn split(object: &Map<String, Value>) -> std::result::Result<[Map<String, Value>; 2], String> {
    let mut rest = object.clone();
    let answers = ANSWERS.map(|key| rest.remove(key).expect("it was found"));
    let with = |rest: &Map<String, Value>, key: &str, answers: [Value; 2]| {
        answers.map(|answer| {
            let mut row = rest.clone();
            row.insert(key.into(), answer);
            row
        })
    };
    let prompt = rest.get("prompt").filter(|prompt| !prompt.is_null()).cloned();
    let list = LISTS.into_iter().find(|key| has(&rest, key));
    if let [Value::String(_), Value::String(_)] = &answers {
        let has_question = QUESTIONS.iter().any(|key| *key != "prompt" && has(&rest, key));
        return match (prompt, list) {
            (Some(_), _) => Ok(with(&rest, "completion", answers)),
            (None, Some(list)) => {
                rest.remove(list).and_then(|messages| rest.insert("prompt".into(), messages));
                let message = |answer| Value::from(vec![serde_json::json!({"role": "assistant", "content": answer})]);
                Ok(with(&rest, "completion", answers.map(message)))
            }
            (None, None) if has_question => Ok(with(&rest, "output", answers)),
            (None, None) => {
                let [chosen, rejected] =
                    answers.each_ref().map(|answer| answer.as_str().unwrap_or_default().chars().collect::<Vec<_>>());
                let shared = shared(&chosen, &rejected);
                let shared = shared - usize::from(shared > 0 && chosen[shared - 1] == ' ');
                let text = |letters: &[char]| letters.iter().collect::<String>().into();
                rest.insert("prompt".into(), text(&chosen[..shared]));
                Ok(with(&rest, "completion", [text(&chosen[shared..]), text(&rejected[shared..])]))
            }
        };
    }
    let answer = |key: &str, answer: Value| match answer {
        Value::Array(_) => messages(&answer, key),
        // LLaMA-Factory writes a message.
        Value::Object(_) => messages(&Value::from(vec![answer]), key),
        other => Err(format!(
            "`chosen` and `rejected`: expected two texts or two lists of messages, got {} as `{key}`",
            kind(&other)
        )),
    };
    let [chosen, rejected] = answers;
    let (chosen, rejected) = (answer("chosen", chosen)?, answer("rejected", rejected)?);
    let before = match (list, prompt) {
        // UltraFeedback repeats the chosen messages.
        (Some(list), prompt) if messages(&rest[list], list).is_ok_and(|messages| messages == chosen) => {
            rest.remove(list);
            prompt
        }
        (Some(list), None) => rest.remove(list),
        (_, prompt) => prompt,
    };
    match before {
        Some(prompt @ Value::Array(_)) => {
            rest.insert("prompt".into(), prompt);
            Ok(with(&rest, "completion", [chosen.into(), rejected.into()]))
        }
        prompt => {
            let shared = shared(&chosen, &rejected);
            if let Some(Value::String(prompt)) = prompt {
                let first = chosen[..shared].iter().find(|message| message["role"] == "user");
                if first.is_none_or(|first| first["content"].as_str().map(str::trim) != Some(prompt.trim())) {
                    return Err(
                        "`prompt` is not the first message of the user in `chosen` and `rejected`: remove it, \
                                or write it as a message"
                            .into(),
                    );
                }
            }
            rest.insert("prompt".into(), chosen[..shared].to_vec().into());
            Ok(with(&rest, "completion", [chosen[shared..].to_vec().into(), rejected[shared..].to_vec().into()]))
        }
    }
}

/// Returns the length of the prompt that two answers contain, as TRL's `extract_prompt` does: what
/// they share, but at least the last item of the shorter one is an answer.
fn shared<T: PartialEq>(chosen: &[T], rejected: &[T]) -> usize {
    let same = chosen.iter().zip(rejected).take_while(|(one, other)| one == other).count();
    same.min(chosen.len().min(rejected.len()) - 1)
}

/// Reads the rows of a JSON-lines file of at most `max_bytes` bytes like
/// [`read_rows`](crate::read_rows).
///
/// # Errors
/// The errors of [`read_rows`](crate::read_rows).
pub fn read_preferences(path: impl AsRef<Path>, max_bytes: u64) -> Result<Vec<(usize, Preference)>> {
    lines(path.as_ref(), max_bytes, KINDS, Preference::from_json)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn user(text: &str) -> Value {
        json!({"role": "user", "content": text})
    }

    fn answer(text: &str) -> Value {
        json!({"role": "assistant", "content": text})
    }

    /// The forms of published data sets, which are named by the lines.
    #[test]
    fn published_forms_are_read() {
        let texts = |prompt: &str, texts: [&str; 2]| {
            let [chosen, rejected] =
                texts.map(|text| Row::Completion { prompt: prompt.into(), completion: text.into() });
            Preference { chosen, rejected }
        };
        let chats = |prompt: &[Value], answers: [&str; 2]| {
            let [chosen, rejected] = answers.map(|text| {
                let messages = prompt.iter().cloned().chain([answer(text)]).collect();
                Row::Chat { messages, tools: None }
            });
            Preference { chosen, rejected }
        };
        let history = json!({"role": "assistant", "content": "Hi.", "train": false});
        let (sky, colors) = (user("What color is the sky?"), ["It is blue.", "It is green."]);
        let turns = |color: &str| json!([{"role": "user", "content": "What color is the sky?"}, answer(color)]);
        for (row, want) in [
            // trl-internal-testing/zen, standard_preference.
            (
                json!({"prompt": "The sky is", "chosen": " blue.", "rejected": " green."}),
                texts("The sky is", [" blue.", " green."]),
            ),
            // TRL's standard format with an implicit prompt; the space belongs to the answers.
            (
                json!({"chosen": "The sky is blue.", "rejected": "The sky is green."}),
                texts("The sky is", [" blue.", " green."]),
            ),
            // Anthropic/hh-rlhf.
            (
                json!({"chosen": "\n\nHuman: Hi\n\nAssistant: Yes", "rejected": "\n\nHuman: Hi\n\nAssistant: No"}),
                texts("\n\nHuman: Hi\n\nAssistant:", [" Yes", " No"]),
            ),
            (json!({"chosen": "ab", "rejected": "abc"}), texts("a", ["b", "bc"])),
            // trl-lib/ultrafeedback_binarized.
            (
                json!({"chosen": turns(colors[0]), "rejected": turns(colors[1]), "score_chosen": 8.0}),
                chats(std::slice::from_ref(&sky), colors),
            ),
            (
                json!({"prompt": [sky], "chosen": [answer(colors[0])], "rejected": [answer(colors[1])]}),
                chats(std::slice::from_ref(&sky), colors),
            ),
            // HuggingFaceH4/ultrafeedback_binarized.
            (
                json!({"prompt": "What color is the sky?", "prompt_id": "1", "messages": turns(colors[0]),
                       "chosen": turns(colors[0]), "rejected": turns(colors[1]), "score_rejected": 3.0}),
                chats(std::slice::from_ref(&sky), colors),
            ),
            // Answers before the last belong to the prompt.
            (
                json!({"chosen": [user("Hi"), answer("Hi."), sky, answer(colors[0])],
                       "rejected": [user("Hi"), answer("Hi."), sky, answer(colors[1])]}),
                chats(&[user("Hi"), history, sky.clone()], colors),
            ),
            // LLaMA-Factory's dpo_en_demo.
            (
                json!({"conversations": [{"from": "human", "value": "What color is the sky?"}],
                       "chosen": {"from": "gpt", "value": colors[0]}, "rejected": {"from": "gpt", "value": colors[1]}}),
                chats(std::slice::from_ref(&sky), colors),
            ),
            (
                json!({"messages": [sky], "chosen": colors[0], "rejected": colors[1]}),
                chats(std::slice::from_ref(&sky), colors),
            ),
        ] {
            assert_eq!(Preference::from_json(&row), Ok(want), "{row}");
        }
        // Intel/orca_dpo_pairs.
        let orca = json!({"system": "Be brief.", "question": "Add.", "chosen": "4", "rejected": "5"});
        let Preference { chosen, rejected } = Preference::from_json(&orca).unwrap();
        let plain = |text: &str| json!({"system": "Be brief.", "question": "Add.", "answer": text});
        assert_eq!([chosen, rejected], ["4", "5"].map(|text| Row::from_json(&plain(text)).unwrap()));
    }

    #[test]
    fn faulty_preferences_are_refused() {
        let chat = json!([user("a"), answer("b")]);
        for (row, words) in [
            (json!("text"), "expected an object with `prompt`, `chosen` and `rejected`"),
            (json!({"prompt": "a", "chosen": "b"}), "`rejected` is missing or empty"),
            (json!({"prompt": "a", "chosen": "", "rejected": "b"}), "`chosen` is missing or empty"),
            (json!({"prompt": "a", "completion": "b", "label": true}), "rows with a `label` have one answer"),
            (json!({"messages": chat}), "`chosen` is missing or empty"),
            (json!({"prompt": "a", "chosen": "b", "rejected": "b"}), "are the same: remove the line"),
            (
                json!({"prompt": "a", "chosen": "b", "rejected": chat}),
                "two texts or two lists of messages, got a text as `chosen`",
            ),
            (json!({"prompt": "a", "chosen": 1, "rejected": 2}), "got a number as `chosen`"),
            (
                json!({"prompt": 3, "chosen": "b", "rejected": "c"}),
                "the row with its `chosen` answer: `prompt` and `completion`",
            ),
            (
                json!({"prompt": "c", "chosen": chat, "rejected": [user("a"), answer("c")]}),
                "`prompt` is not the first message of the user",
            ),
            (
                json!({"chosen": [user("a")], "rejected": [user("b")]}),
                "the row with its `chosen` answer: `completion`: expected at least one message of the role \"assistant\"",
            ),
            (
                json!({"prompt": [user("a")], "chosen": [answer("b")], "rejected": [{"role": "assistant"}]}),
                "`rejected`, message 1: `content`",
            ),
            (json!({"prompt": "a", "chosen": "b", "rejected": "c", "weight": 2}), "`weight`: is 2"),
        ] {
            let error = Preference::from_json(&row).unwrap_err();
            assert!(error.contains(words), "{row}: {error}");
        }
    }
}

//! Forms of rows that other programs have, as messages: ShareGPT's, Alpaca's, and questions with
//! answers.
//!
//! Invariant: no text of a row is left out, and none is added except Alpaca's prompt.

use crate::messages::has;
use crate::rows::{Row, kind};
use serde_json::{Map, Value, json};

/// Keys of lists of messages.
pub(crate) const LISTS: [&str; 3] = ["messages", "conversations", "conversation"];
/// Keys of a question, and of the text that it is about.
pub(crate) const QUESTIONS: [&str; 5] = ["instruction", "question", "query", "problem", "prompt"];
const INPUTS: [&str; 2] = ["input", "context"];
const ANSWERS: [&str; 4] = ["output", "response", "answer", "solution"];
/// Keys of a text that becomes the first message.
const SYSTEMS: [&str; 2] = ["system", "system_prompt"];
/// Roles as ShareGPT names them, and as chat templates do.
const ROLES: [(&str, &str); 9] = [
    ("human", "user"),
    ("gpt", "assistant"),
    ("chatgpt", "assistant"),
    ("bing", "assistant"),
    ("bard", "assistant"),
    ("model", "assistant"),
    ("function_call", "assistant"),
    ("observation", "tool"),
    ("function_response", "tool"),
];
/// The beginning of Alpaca's prompts (tatsu-lab/stanford_alpaca).
const ALPACA: &str = "Below is an instruction that describes a task";

fn is_found(object: &Map<String, Value>, key: &str) -> bool {
    object.get(key).is_some_and(|value| !value.is_null())
}

/// Returns the text of a key, or an empty one if the key is absent.
fn text<'r>(object: &'r Map<String, Value>, key: &str) -> Result<&'r str, String> {
    match object.get(key) {
        None | Some(Value::Null) => Ok(""),
        Some(Value::String(text)) => Ok(text),
        Some(other) => Err(format!("`{key}`: expected a text, got {}", kind(other))),
    }
}

/// Returns the text that becomes the first message, with its key.
pub(crate) fn system(object: &Map<String, Value>) -> Result<Option<(&'static str, &str)>, String> {
    let Some(key) = SYSTEMS.into_iter().find(|key| has(object, key)) else { return Ok(None) };
    Ok(Some((key, text(object, key)?)))
}

/// Puts a row's system text before its messages.
pub(crate) fn with_system(object: &Map<String, Value>, mut messages: Vec<Value>) -> Result<Vec<Value>, String> {
    let Some((key, text)) = system(object)? else { return Ok(messages) };
    match messages.first() {
        Some(first) if first["role"] == "system" && first["content"] == text => {}
        Some(first) if first["role"] == "system" => {
            return Err(format!("`{key}`: the messages begin with another system message: remove one"));
        }
        _ => messages.insert(0, json!({"role": "system", "content": text})),
    }
    Ok(messages)
}

/// Returns the messages of an item of a list: a message, ShareGPT's `from` and `value`, or a turn
/// of `input` and `output`.
pub(crate) fn messages_of(item: &Value) -> Result<Vec<Value>, String> {
    let Value::Object(object) = item else { return Ok(vec![item.clone()]) };
    let holds = |keys: [&str; 2]| !is_found(object, "role") && keys.iter().all(|key| object.contains_key(*key));
    if holds(["input", "output"]) {
        let turn = |role: &str, key: &str| json!({"role": role, "content": object[key]});
        return Ok(vec![turn("user", "input"), turn("assistant", "output")]);
    }
    if !holds(["from", "value"]) {
        return Ok(vec![item.clone()]);
    }
    let mut message = Map::new();
    for (key, value) in object {
        match (key.as_str(), value.as_str()) {
            ("from", Some(from)) => {
                let role = ROLES.iter().find(|(name, _)| *name == from).map_or(from, |(_, role)| role);
                message.insert("role".into(), role.into());
            }
            ("from", None) => drop(message.insert("role".into(), value.clone())),
            ("value", _) if object["from"] == "function_call" => {
                message.insert("content".into(), "".into());
                message.insert("tool_calls".into(), calls(value)?);
            }
            ("value", _) => drop(message.insert("content".into(), value.clone())),
            _ => drop(message.insert(key.clone(), value.clone())),
        }
    }
    Ok(vec![message.into()])
}

/// Returns the calls that ShareGPT writes as JSON in a text.
fn calls(value: &Value) -> Result<Value, String> {
    let parsed = value.as_str().and_then(|text| serde_json::from_str(text).ok());
    let calls = match parsed.unwrap_or_else(|| value.clone()) {
        Value::Array(calls) => calls,
        call => vec![call],
    };
    let function = |call: Value| match call["name"].is_string() {
        true => Ok(json!({"type": "function", "function": call})),
        false => Err(format!(
            r#"`function_call`: expected JSON such as {{"name": "..", "arguments": {{..}}}}, got {}"#,
            kind(value)
        )),
    };
    calls.into_iter().map(function).collect::<Result<Vec<_>, _>>().map(Value::Array)
}

/// A question, the text that it is about, and the answer.
pub(crate) struct Pair<'r> {
    row: &'r Map<String, Value>,
    question: &'r str,
    input: &'r str,
    answer: &'r str,
}

impl<'r> Pair<'r> {
    /// Finds the question and the answer of a row.
    pub(crate) fn find(row: &'r Map<String, Value>) -> Result<Option<Self>, String> {
        let [mut questions, inputs, answers] = [&QUESTIONS[..], &INPUTS, &ANSWERS]
            .map(|keys| keys.iter().copied().filter(|key| is_found(row, key)).collect::<Vec<_>>());
        let mut inputs = inputs.into_iter().filter(|key| has(row, key));
        if questions.is_empty() {
            questions.extend(inputs.next());
        }
        let ([question], [answer]) = (&questions[..], &answers[..]) else {
            let all: Vec<String> = questions.iter().chain(&answers).map(|key| format!("`{key}`")).collect();
            return match questions.is_empty() || answers.is_empty() {
                true => Ok(None),
                false => {
                    Err(format!("expected one question and one answer, got {}: remove the others", all.join(", ")))
                }
            };
        };
        let input = match (inputs.next(), inputs.next()) {
            (Some(first), Some(second)) => return Err(format!("expected only one of `{first}` and `{second}`")),
            (first, _) => first.map_or(Ok(""), |key| text(row, key))?,
        };
        let pair = Self { row, question: text(row, question)?, input, answer: text(row, answer)? };
        for (key, text) in [(question, pair.question), (answer, pair.answer)] {
            if text.is_empty() {
                return Err(format!("`{key}` is empty: write a text, or remove the line"));
            }
        }
        Ok(Some(pair))
    }

    /// Returns true if a text is this question and this answer in Alpaca's prompt.
    pub(crate) fn is_written_in(&self, text: &Value) -> bool {
        let text = text.as_str().unwrap_or_default();
        text.starts_with(ALPACA) && text.contains(self.question) && text.ends_with(self.answer)
    }

    /// Returns the row. Turns before the question, in `history`, and tools need a chat template.
    pub(crate) fn row(&self, tools: Option<Value>) -> Result<Row, String> {
        let mut messages = Vec::new();
        let history = match self.row.get("history") {
            None | Some(Value::Null) => &[][..],
            Some(Value::Array(history)) => history,
            Some(other) => return Err(format!("`history`: expected a list, got {}", kind(other))),
        };
        for (turn, number) in history.iter().zip(1..) {
            let texts = turn.as_array().map(|texts| texts.iter().map(Value::as_str).collect::<Vec<_>>());
            let Some([Some(question), Some(answer)]) = texts.as_deref() else {
                return Err(format!("`history`, turn {number}: expected a list of two texts, got {}", kind(turn)));
            };
            messages.push(json!({"role": "user", "content": question}));
            messages.push(json!({"role": "assistant", "content": answer}));
        }
        let is_chat = tools.is_some() || !messages.is_empty();
        let Self { question, input, answer, .. } = *self;
        let asked = if input.is_empty() { question.to_owned() } else { format!("{question}\n{input}") };
        messages.push(json!({"role": "user", "content": asked}));
        messages.push(json!({"role": "assistant", "content": answer}));
        let messages = with_system(self.row, messages)?;
        match is_chat {
            true => Ok(Row::Chat { messages, tools }),
            false => Ok(Row::Pair { messages, prompt: self.prompt()?, completion: answer.to_owned() }),
        }
    }

    /// Returns Alpaca's prompt.
    fn prompt(&self) -> Result<String, String> {
        let Self { question, input, .. } = *self;
        let with = ", paired with an input that provides further context";
        let [with, input] = match input {
            "" => ["", ""].map(String::from),
            input => [with.into(), format!("### Input:\n{input}\n\n")],
        };
        let task = match system(self.row)? {
            Some((_, text)) => text.to_owned(),
            None => format!("{ALPACA}{with}. Write a response that appropriately completes the request."),
        };
        Ok(format!("{task}\n\n### Instruction:\n{question}\n\n{input}### Response:"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(row: Value) -> Row {
        Row::from_json(&row).unwrap_or_else(|error| panic!("{row}: {error}"))
    }

    #[test]
    fn lists_of_other_programs_are_messages() {
        let [user, four] = [json!({"role": "user", "content": "2+2?"}), json!({"role": "assistant", "content": "4"})];
        let system = json!({"role": "system", "content": "Be brief."});
        let call = json!({"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}]});
        let result = json!({"role": "tool", "content": "4"});
        let turns = json!([{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]);
        let plain = json!([user, four]);
        let calls = json!([
            {"from": "human", "value": "2+2?"}, {"from": "function_call", "value": "{\"name\": \"add\", \"arguments\": {\"a\": 2}}"},
            {"from": "observation", "value": "4"}, {"from": "gpt", "value": "4"}
        ]);
        let tools = json!([{"name": "add"}]);
        for (row, want, with) in [
            (json!({"conversations": turns}), json!([user, four]), None),
            (json!({"conversations": turns, "system": "Be brief.", "tools": ""}), json!([system, user, four]), None),
            (json!({"messages": turns, "tools": "[{\"name\": \"add\"}]"}), json!([user, four]), Some(&tools)),
            (json!({"conversations": plain}), json!([user, four]), None),
            (json!({"conversations": calls, "tools": tools}), json!([user, call, result, four]), Some(&tools)),
            (
                json!({"conversations": [{"from": "system", "value": "Be brief."}, {"from": "gpt", "value": "4", "weight": 0}]}),
                json!([system, {"role": "assistant", "content": "4", "weight": 0}]),
                None,
            ),
            (
                json!({"conversation": [{"input": "2+2?", "output": "4"}, {"input": "2+2?", "output": "4"}], "source": "x"}),
                json!([user, four, user, four]),
                None,
            ),
            (
                json!({"messages": plain, "prompt": "2+2?", "prompt_id": "1", "category": "QA"}),
                json!([user, four]),
                None,
            ),
            (json!({"messages": plain, "prompt": [user]}), json!([user, four]), None),
            (json!({"messages": [system, user, four], "system": "Be brief."}), json!([system, user, four]), None),
            (json!({"system": "Be brief.", "prompt": [user], "completion": [four]}), json!([system, user, four]), None),
            (
                json!({"prompt": [user, four, user], "completion": [four]}),
                json!([user, {"role": "assistant", "content": "4", "train": false}, user, four]),
                None,
            ),
            (
                json!({"instruction": "2+2?", "output": "4", "history": [["2+2?", "4"]]}),
                json!([user, four, user, four]),
                None,
            ),
            (json!({"query": "2+2?", "response": "4", "tools": tools}), json!([user, four]), Some(&tools)),
        ] {
            let want = Row::Chat { messages: want.as_array().unwrap().clone(), tools: with.cloned() };
            assert_eq!(read(row.clone()), want, "{row}");
        }
    }

    #[test]
    fn questions_have_answers() {
        let task =
            "Below is an instruction that describes a task. Write a response that appropriately completes the request.";
        let about = "Below is an instruction that describes a task, paired with an input that provides further context. Write a response that appropriately completes the request.";
        let alone = format!("{task}\n\n### Instruction:\nAdd.\n\n### Response:");
        let with = format!("{about}\n\n### Instruction:\nAdd.\n\n### Input:\n2+2\n\n### Response:");
        for (row, asked, prompt) in [
            (json!({"instruction": "Add.", "input": "", "output": "4"}), "Add.", &alone),
            (json!({"instruction": "Add.", "input": "2+2", "output": "4"}), "Add.\n2+2", &with),
            (json!({"instruction": "Add.", "context": "2+2", "response": "4", "category": "qa"}), "Add.\n2+2", &with),
            (
                json!({"instruction": "Add.", "input": "2+2", "output": "4", "text": format!("{with}\n4")}),
                "Add.\n2+2",
                &with,
            ),
            (json!({"question": "Add.", "answer": "4", "id": 3}), "Add.", &alone),
            (json!({"query": "Add.", "response": "4", "type": "math"}), "Add.", &alone),
            (json!({"prompt": "Add.", "response": "4", "label": true}), "Add.", &alone),
            (json!({"problem": "Add.", "solution": "4"}), "Add.", &alone),
            (json!({"input": "Add.", "output": "4"}), "Add.", &alone),
        ] {
            let messages =
                vec![json!({"role": "user", "content": asked}), json!({"role": "assistant", "content": "4"})];
            let want = Row::Pair { messages, prompt: prompt.clone(), completion: "4".into() };
            assert_eq!(read(row.clone()), want, "{row}");
        }
        let orca = read(json!({"system_prompt": "Be brief.", "question": "Add.", "response": "4"}));
        let Row::Pair { messages, prompt, .. } = orca else { panic!("{orca:?}") };
        assert_eq!(messages[0], json!({"role": "system", "content": "Be brief."}));
        assert_eq!(prompt, "Be brief.\n\n### Instruction:\nAdd.\n\n### Response:");
    }
}

//! Chats with the templates of published models: texts as transformers renders them, and the tokens
//! that TRL counts (`make_templates.py`).

use serde_json::{Map, Value};
use std::path::{Path, PathBuf};
use stepscope_chat::{ChatTemplate, Row};

/// The templates that must be here at least.
const TEMPLATES: usize = 60;

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests")
}

fn json(name: &str) -> Value {
    serde_json::from_slice(&std::fs::read(folder().join(name)).unwrap()).unwrap()
}

/// Returns the template and its special tokens.
fn template(name: &str, source: &Value) -> ChatTemplate {
    let text = std::fs::read_to_string(folder().join("templates").join(format!("{name}.jinja"))).unwrap();
    let tokens: Map<String, Value> = source
        .as_object()
        .unwrap()
        .iter()
        .filter(|(key, _)| key.ends_with("_token"))
        .map(|(k, v)| (k.clone(), v.clone()))
        .collect();
    let template = ChatTemplate::new(&text, tokens).unwrap_or_else(|error| panic!("{name}: {error}"));
    template.at("2026-03-05".parse().unwrap())
}

/// FNV-1a with 64 bits.
fn hash(bytes: impl IntoIterator<Item = u8>) -> String {
    let step = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
    format!("{:016x}", bytes.into_iter().fold(0xcbf2_9ce4_8422_2325, step))
}

/// Calls a function with each template, each chat and what `make_templates.py` has recorded.
fn each_case(mut check: impl FnMut(&str, &ChatTemplate, &Value, &Value)) {
    let (published, sources) = (json("published.json"), json("templates/sources.json"));
    let cases = published["cases"].as_object().unwrap();
    assert!(cases.len() >= TEMPLATES, "{} templates", cases.len());
    for (name, chats) in cases {
        let template = template(name, &sources[name]);
        for (chat, case) in chats.as_object().unwrap() {
            check(&format!("{name}, {chat}"), &template, &published["chats"][chat], case);
        }
    }
}

#[test]
fn texts_are_those_of_transformers() {
    let mut faults = Vec::new();
    let mut rendered = 0;
    each_case(|name, template, chat, case| {
        let Row::Chat { messages, tools } = Row::from_json(chat).unwrap() else { panic!("{name}: a chat") };
        for (prompt, want) in [(false, &case["text"]), (true, &case["prompt"])] {
            match (want, template.render(&messages, tools.as_ref(), prompt)) {
                (Value::String(want), Ok(text)) if *want == hash(text.bytes()) => rendered += 1,
                (Value::Object(_), Err(_)) => {}
                (want, found) => faults.push(format!("{name}, {prompt}: expected {want}, got {found:?}")),
            }
        }
    });
    assert!(faults.is_empty(), "{} differ:\n{}", faults.len(), faults.join("\n"));
    assert!(rendered > 1400, "{rendered} rendered");
}

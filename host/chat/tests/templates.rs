//! Chat templates: texts as transformers renders them (`make.py`), and the tokens that count.

use serde_json::{Map, Value, json};
use stepscope_chat::{ChatTemplate, Encoder, Row, Sample};
use tokenizers::Tokenizer;

fn cases() -> Value {
    serde_json::from_str(include_str!("cases.json")).unwrap()
}

fn template(cases: &Value, name: &str) -> ChatTemplate {
    let tokens: Map<String, Value> = cases["tokens"].as_object().unwrap().clone();
    ChatTemplate::new(cases["templates"][name].as_str().unwrap(), tokens).unwrap()
}

#[test]
fn texts_are_those_of_transformers() {
    let cases = cases();
    let (mut rendered, mut refused) = (0, 0);
    for case in cases["cases"].as_array().unwrap() {
        let messages = case["messages"].as_array().unwrap();
        let tools = Some(&case["tools"]).filter(|tools| !tools.is_null());
        let prompt = case["add_generation_prompt"].as_bool().unwrap();
        let found = template(&cases, case["template"].as_str().unwrap()).render(messages, tools, prompt);
        match (&case["text"], found) {
            (Value::String(text), Ok(found)) => {
                assert_eq!(&found, text, "{case}");
                rendered += 1;
            }
            (other, Err(error)) => {
                let expected = other["error"].as_str().unwrap_or_else(|| panic!("{case}: {error}"));
                assert!(error.contains(expected), "{error} instead of {expected}");
                refused += 1;
            }
            (other, Ok(found)) => panic!("expected {other}, got {found:?}"),
        }
    }
    assert!(rendered >= 60 && refused >= 8, "{rendered} rendered, {refused} refused");
}

/// A tokenizer in which each byte is a token, and so are these texts.
fn tokenizer(special: &[&str]) -> Tokenizer {
    let visible = |byte: u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    let character = |byte: u8| match visible(byte) {
        true => char::from(byte),
        false => char::from_u32(256 + (0..byte).filter(|&other| !visible(other)).count() as u32).unwrap(),
    };
    let vocabulary: Map<String, Value> = (0..=255u8).map(|byte| (character(byte).to_string(), byte.into())).collect();
    let added: Vec<Value> = special
        .iter()
        .zip(256..)
        .map(|(content, id)| {
            json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true})
        })
        .collect();
    let level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": true});
    let json = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added, "normalizer": null,
        "pre_tokenizer": level, "post_processor": null, "decoder": level,
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": "", "end_of_word_suffix": "",
            "fuse_unk": false, "vocab": vocabulary, "merges": []},
    });
    Tokenizer::from_bytes(json.to_string()).unwrap()
}

/// Returns the text of the tokens that count.
fn counted(tokenizer: &Tokenizer, sample: &Sample) -> String {
    let ids: Vec<u32> =
        sample.ids.iter().zip(&sample.counted).filter(|(_, counted)| **counted).map(|(&id, _)| id).collect();
    tokenizer.decode(&ids, false).unwrap()
}

fn chat(messages: &Value) -> Row {
    Row::from_json(&json!({"messages": messages})).unwrap()
}

#[test]
fn only_the_assistant_counts() {
    let cases = cases();
    let messages = json!([
        {"role": "user", "content": "What is 2+2?"}, {"role": "assistant", "content": "Vier. Grüße!"},
        {"role": "user", "content": "And 3?"}, {"role": "assistant", "content": "More."}
    ]);
    for (name, end, want) in [
        ("chatml", "<|im_end|>", "Vier. Grüße!<|im_end|>\nMore.<|im_end|>\n"),
        ("headers", "<|eot_id|>", "Vier. Grüße!<|eot_id|>More.<|eot_id|>"),
        ("inst", "</s>", " Vier. Grüße!</s> More.</s>"),
        ("turns", "<end_of_turn>", "Vier. Grüße!<end_of_turn>\nMore.<end_of_turn>\n"),
    ] {
        let (template, tokenizer) = (template(&cases, name), tokenizer(&[end]));
        let encoder = Encoder { tokenizer: &tokenizer, template: Some(&template), end: None };
        let sample = encoder.encode(&chat(&messages)).unwrap();
        assert_eq!(counted(&tokenizer, &sample), want, "{name}");
        let whole = template.render(messages.as_array().unwrap(), None, false).unwrap();
        assert_eq!(tokenizer.decode(&sample.ids, false).unwrap(), whole);
    }
}

#[test]
fn rewritten_messages_are_refused() {
    let (template, tokenizer) = (
        ChatTemplate::new(
            "{% for m in messages %}[{{ m.role }}]{{ m.content if loop.last else '..' }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}",
            Map::new(),
        ),
        tokenizer(&[]),
    );
    let template = template.unwrap();
    let encoder = Encoder { tokenizer: &tokenizer, template: Some(&template), end: None };
    let one = json!([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]);
    assert!(encoder.encode(&chat(&one)).unwrap_err().contains("message 2: "));
    let without = Encoder { template: None, ..encoder };
    assert!(without.encode(&chat(&one)).unwrap_err().contains("chat template"));
}

#[test]
fn completions_and_texts_end() {
    let tokenizer = tokenizer(&["</s>"]);
    let encoder = Encoder { tokenizer: &tokenizer, template: None, end: Some(256) };
    let row = |json: Value| encoder.encode(&Row::from_json(&json).unwrap()).unwrap();
    assert_eq!(counted(&tokenizer, &row(json!({"prompt": "2+2=", "completion": "4"}))), "4</s>");
    assert_eq!(counted(&tokenizer, &row(json!({"text": "abc"}))), "abc</s>");
    assert_eq!(row(json!({"text": "a</s>"})).ids, [97, 256], "no second end");
}

#[test]
fn faulty_templates_are_refused() {
    let error = ChatTemplate::new("a\n{% for m in %}", Map::new()).unwrap_err();
    assert!(error.contains("line 2"), "{error}");
    let template = ChatTemplate::new("{{ raise_exception('roles must alternate') }}", Map::new()).unwrap();
    assert!(template.render(&[], None, false).unwrap_err().contains("roles must alternate"));
    let template =
        ChatTemplate::new("{{ strftime_now('%Y') if strftime_now is defined else '2024' }}", Map::new()).unwrap();
    assert_eq!(template.render(&[], None, false).unwrap(), "2024");
}

/// Neither a loop without an end nor an endless text stops the program.
#[test]
fn endless_templates_are_refused() {
    let error = |source: &str| ChatTemplate::new(source, Map::new()).unwrap().render(&[], None, false).unwrap_err();
    let long = "{% for a in range(100000) %}{% for b in range(100000) %}";
    let ends = "{% endfor %}{% endfor %}";
    let endless = error(&format!("{long}{{% set c = a %}}{ends}"));
    assert!(endless.contains("did not end after 2000000 instructions"), "{endless}");
    let endless = error("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}");
    assert!(endless.contains("recursion"), "{endless}");
    let large = error(&format!("{long}{}{ends}", "a".repeat(1000)));
    assert!(large.contains("more than 16777216 bytes"), "{large}");
}

#[test]
fn templates_are_read_from_folders() {
    let folder = tempfile::tempdir().unwrap();
    assert!(ChatTemplate::read(folder.path()).unwrap().is_none());
    let config =
        json!({"chat_template": "{{ bos_token }}config", "bos_token": {"content": "<s>"}, "eos_token": "</s>"});
    std::fs::write(folder.path().join("tokenizer_config.json"), config.to_string()).unwrap();
    let read = || ChatTemplate::read(folder.path()).unwrap().unwrap().render(&[], None, false).unwrap();
    assert_eq!(read(), "<s>config");
    std::fs::write(folder.path().join("chat_template.jinja"), "{{ eos_token }}file").unwrap();
    assert_eq!(read(), "</s>file");
}

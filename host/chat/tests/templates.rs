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
        let encoder = Encoder { tokenizer: &tokenizer, template: Some(&template), end: None, context: 4096 };
        let [sample] = &encoder.encode(&chat(&messages)).unwrap().samples[..] else { panic!("{name}: one sample") };
        assert_eq!(counted(&tokenizer, sample), want, "{name}");
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
    let encoder = Encoder { tokenizer: &tokenizer, template: Some(&template), end: None, context: 4096 };
    let one = json!([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]);
    let error = encoder.encode(&chat(&one)).unwrap_err();
    assert!(error.starts_with("message 1: ") && error.contains("leaves out"), "{error}");
    let without = Encoder { template: None, ..encoder };
    assert!(without.encode(&chat(&one)).unwrap_err().contains("chat template"));
}

/// A message that a template skips is an error, and not a shorter text.
#[test]
fn nothing_is_left_out() {
    let cases = cases();
    let tokenizer = tokenizer(&[]);
    let encode = |name: &str, row: &Value| {
        let template = match cases["templates"][name].is_string() {
            true => template(&cases, name),
            false => ChatTemplate::new(name, Map::new()).unwrap(),
        };
        let encoder = Encoder { tokenizer: &tokenizer, template: Some(&template), end: None, context: 4096 };
        encoder.encode(&Row::from_json(row).unwrap()).map(|row| tokenizer.decode(&row.samples[0].ids, false).unwrap())
    };
    let user = json!({"role": "user", "content": "What is 2+2?"});
    let four = json!({"role": "assistant", "content": "It is 4."});
    let part = |text: &str| json!({"type": "text", "text": text});
    let call = json!({"function": {"name": "add", "arguments": {"a": 2}}});
    let plain = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}";
    let first = "{% for m in messages %}<{{ m.role }}>{{ m.content if m.content is string else m.content[0].text }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}";

    let parts = json!({"messages": [{"role": "user", "content": [part("What is "), part("2+2?")]}, four]});
    assert_eq!(encode("parts", &parts).unwrap(), "<user>What is 2+2?</s><assistant>It is 4.</s>");
    let called = json!({"messages": [user, {"role": "assistant", "content": null, "tool_calls": [call]}]});
    assert_eq!(encode("parts", &called).unwrap(), "<user>What is 2+2?</s><assistant>add({\"a\": 2})</s>");

    assert_eq!(
        encode(plain, &called).unwrap(),
        "<user>What is 2+2?<assistant>[{\"function\": {\"name\": \"add\", \"arguments\": {\"a\": 2}}}]"
    );

    for (name, row, words) in [
        (
            "chatml",
            json!({"messages": [{"role": "human", "content": "What is 2+2?"}, four]}),
            "message 1: the chat template does not know the role \"human\"",
        ),
        (
            "generation",
            json!({"messages": [{"role": "system", "content": "Be brief, please, whatever is asked."}, user, four]}),
            "message 1: the chat template leaves out the message",
        ),
        (
            "turns",
            json!({"messages": [user, {"role": "assistant", "content": "", "tool_calls": [call]}]}),
            "message 2: the chat template leaves out `tool_calls`",
        ),
        (
            "chatml",
            json!({"messages": [user, {"role": "assistant", "content": "4", "reasoning_content": "2+2"}]}),
            "message 2: the chat template leaves out `reasoning_content`",
        ),
        (
            "turns",
            json!({"messages": [user, four], "tools": [{"name": "add"}]}),
            "`tools`: the chat template leaves them out",
        ),
        (first, parts.clone(), "message 1: the chat template leaves out part 2 of `content`"),
        (plain, parts, "message 1: line 1 of the chat template: writes a list where it expects a text"),
        ("inst", json!({"messages": [user, user, four]}), "conversation roles must alternate"),
        ("inst", json!({"messages": [four, user]}), "conversation roles must alternate"),
        ("inst", json!({"messages": [user, {"role": "tool", "content": "4"}, four]}), "roles"),
        (plain, json!({"text": "a"}), "none of its 1 tokens counts in the loss"),
        (plain, json!({"messages": [user, {"role": "assistant", "content": ""}]}), "tokens counts in the loss"),
    ] {
        let error = encode(name, &row).unwrap_err();
        assert!(error.contains(words), "{row}: {error}");
    }
}

#[test]
fn completions_and_texts_end() {
    let tokenizer = tokenizer(&["</s>"]);
    let encoder = Encoder { tokenizer: &tokenizer, template: None, end: Some(256), context: 4096 };
    let row = |json: Value| encoder.encode(&Row::from_json(&json).unwrap()).unwrap().samples.remove(0);
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
    let dated = "{{ strftime_now('%d %b %Y') if strftime_now is defined else '2024' }}";
    let template = ChatTemplate::new(dated, Map::new()).unwrap().at("2025-01-31".parse().unwrap());
    assert_eq!(template.render(&[], None, false).unwrap(), "31 Jan 2025");
    assert_eq!(template.date().map(|date| date.to_string()).as_deref(), Some("2025-01-31"));
    assert_eq!(ChatTemplate::new("a", Map::new()).unwrap().date(), None);
}

/// Returns the error of a template, which must end soon.
fn refused(source: &str) -> String {
    let messages = [json!({"role": "user", "content": "a"})];
    let began = std::time::Instant::now();
    let template = ChatTemplate::new(source, Map::new());
    let result = template.and_then(|template| template.render(&messages, None, false));
    assert!(began.elapsed().as_secs() < 30, "{source} took {:?}", began.elapsed());
    result.expect_err(source)
}

/// Neither a loop without an end nor an endless text stops the program.
#[test]
fn endless_templates_are_refused() {
    let long = "{% for a in range(100000) %}{% for b in range(100000) %}";
    let ends = "{% endfor %}{% endfor %}";
    let macros = "{% macro a() %}{{ b() }}{% endmacro %}{% macro b() %}{{ a() }}{% endmacro %}{{ a() }}";
    for (source, words) in [
        (format!("{long}{{% set c = a %}}{ends}"), "did not end after 4000000 instructions"),
        (format!("{long}{}{ends}", "a".repeat(1000)), "writes more than 16777216 bytes"),
        (format!("{{% set c %}}{long}{}{ends}{{% endset %}}", "a".repeat(1000)), "writes more than 16777216 bytes"),
        ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}".into(), "recursion"),
        (macros.into(), ""),
        ("{% for a in [1] recursive %}{{ loop([a]) }}{% endfor %}".into(), "recursion"),
        ("{{ 'abc'.count('') }}{{ raise_exception('counted') }}".into(), "counted"),
    ] {
        let error = refused(&source);
        assert!(error.contains(words), "{error}");
    }
}

/// No template takes much memory: not by doubling, nor by asking for it.
#[test]
fn large_values_are_refused() {
    let double = |start: &str, step: &str| {
        format!(
            "{{% set ns = namespace(s={start}) %}}{{% for i in range(60) %}}{{% set ns.s = {step} %}}{{% endfor %}}"
        )
    };
    let straight = |step: &str| format!("{{% set s = 'aaaaaaaaaaaaaaaa' %}}{}", step.repeat(60));
    let large = "makes a value of more than 16777216 bytes";
    let nested = "nested more than 200 deep";
    let loops = |body: &str| format!("{{% for i in range(1000) %}}{body}{{% endfor %}}");
    for (source, words) in [
        (double("'a'", "ns.s ~ ns.s"), large),
        (double("'a'", "ns.s + ns.s"), large),
        (double("'a'", "ns.s * 2"), large),
        (double("'a'", "[ns.s, ns.s] | join"), large),
        (double("'a'", "ns.s | replace('a', 'aa')"), large),
        (double("'a'", "ns.s.replace('a', 'aa')"), large),
        (double("'a'", "'%s%s' | format(ns.s, ns.s)"), large),
        (double("'a'", "'{0}{0}'.format(ns.s)"), large),
        (double("[1]", "ns.s + ns.s"), large),
        (double("[1]", "ns.s * 2"), large),
        (double("[1]", "[ns.s, ns.s]"), large),
        (double("[1]", "{'a': ns.s, 'b': ns.s}"), large),
        (double("[1]", "dict(a=ns.s, b=ns.s)"), large),
        (double("[1]", "namespace(a=ns.s, b=ns.s)"), large),
        (double("[1]", "ns.s | chain(ns.s)"), "chain is unknown"),
        (straight("{% set s = s ~ s %}"), large),
        (straight("{% set s %}{{ s }}{{ s }}{% endset %}"), "writes more than 16777216 bytes"),
        (straight("{% set s %}{% filter replace('a', 'aa') %}{{ s }}{% endfilter %}{% endset %}"), ""),
        ("{% macro m(s) %}{{ m(s ~ s) }}{% endmacro %}{{ m('a') }}".into(), large),
        ("{% macro m(s) %}{{ caller() }}{% endmacro %}{% call m('a' * 10**8) %}a{% endcall %}".into(), large),
        ("{% for s in ['a'] recursive %}{{ loop([s ~ s]) }}{% endfor %}".into(), large),
        ("{{ 'x' * 10**9 }}".into(), "too large"),
        ("{{ 'x' * 99999999 }}".into(), large),
        ("{{ ('x' * 99999999) | length }}".into(), large),
        (format!("{{{{ {} 'x' }}}}", "'x' * 99999999 ~ ".repeat(50)), large),
        ("{{ [0] * 10**18 }}".into(), large),
        ("{{ 1 in [0] * 10**18 }}".into(), large),
        ("{{ ([0] * 10**9) | join }}".into(), large),
        ("{{ ([0] * 10**9 * 10**9 * 10**9) | length }}".into(), large),
        ("{{ range(10**9) }}".into(), "too many"),
        ("{{ range(100000) | join('x' * 10000) }}".into(), large),
        ("{{ ('x' * 10000).join(range(100000)) }}".into(), large),
        ("{{ ('a' * 10000) | replace('', 'x' * 10000) }}".into(), large),
        ("{{ ('a' * 10000).replace('', 'x' * 10000) }}".into(), large),
        ("{{ 'a\nb' | indent(10**9) }}".into(), large),
        ("{{ 'a\nb' | indent(width=10**9) }}".into(), large),
        ("{{ ['a'] | map('indent', 10**9, true) | list }}".into(), large),
        ("{{ 'a' | center(10**9) }}".into(), "center is unknown"),
        ("{{ 'a'.center(10**9) }}".into(), "center"),
        ("{{ [1] | batch(10**9, 'a') }}".into(), "asks for 1000000000 items"),
        ("{{ [1] | slice(10**9) }}".into(), "asks for 1000000000 items"),
        ("{{ '%1000000000d' | format(1) }}".into(), large),
        ("{{ '%*d' | format(1000000000, 1) }}".into(), large),
        ("{{ '{:1000000000}'.format(1) }}".into(), large),
        ("{{ messages | tojson(indent=10**9) }}".into(), large),
        ("{{ (range(100000) | list) | tojson(indent=100000) }}".into(), large),
        (
            format!(
                "{{% set ns = namespace(s=['a' * 9999]) %}}{}",
                loops("{% set ns.s = ns.s + ns.s[:1] %}{% set ns.s = ns.s + ns.s %}")
            ),
            large,
        ),
        (
            format!("{{% set t = 'a' * 9999999 %}}{}", loops("{% set u = t ~ i %}")),
            "makes values of more than 1073741824 bytes",
        ),
        (format!("{{% set t = 'a' * 9999999 %}}{}", loops("{% if t == t ~ '' %}{% endif %}")), "makes values of more"),
        (
            format!("{{% set t = range(100000) | list %}}{}", loops("{% if t in [t] %}{% endif %}")),
            "makes values of more",
        ),
        ("{{ (range(100000) | map('string') | list) | sum }}".into(), "makes values of more"),
        ("{% set ns = namespace() %}{% set ns.me = ns %}{{ ns | tojson }}".into(), nested),
        ("{% set ns = namespace() %}{% set ns.me = ns %}{{ ns }}".into(), nested),
        (format!("{{% set ns = namespace(l=[]) %}}{}", loops("{% set ns.l = [ns.l] %}")), nested),
        (format!("{{% set ns = namespace(l=[]) %}}{}", loops("{% set ns.l = {'a': ns.l} %}")), nested),
        (format!("{{% set ns = namespace(l=[]) %}}{}", loops("{% set ns.l = namespace(a=ns.l) %}")), nested),
        (
            format!(
                "{{% set h = namespace(t=namespace()) %}}{{% set root = h.t %}}{}{{{{ raise_exception('made') }}}}",
                loops("{% set n = h.t %}{% set n.x = namespace() %}{% set h.t = n.x %}")
            ),
            "more than 1000 namespaces",
        ),
        (format!("{{{{ 1{} }}}}", " + 1".repeat(100_000)), "nested more than 4000 deep"),
        (format!("{{{{ messages{} }}}}", ".a".repeat(100_000)), "nested more than 4000 deep"),
        (format!("{{{{ messages{} }}}}", "|list".repeat(100_000)), "nested more than 4000 deep"),
        (
            format!("{}a{}", "{% if true %}".repeat(10_000), "{% endif %}".repeat(10_000)),
            "`if` and `elif` are nested more than 150 deep",
        ),
        (format!("{{{{ {} }}}}", "(".repeat(100_000)), "brackets are nested more than 150 deep"),
        (format!("{{{{ 1{} }}}}", " + 1".repeat(3000)), "nested more than 200 deep"),
        (format!("{{{{ {}1 }}}}", "-".repeat(30_000)), "signs, `not` and `else` are nested"),
        (format!("{{{{ {}1 }}}}", "not ".repeat(50_000)), "signs, `not` and `else` are nested"),
        (format!("{{{{ {}1 }}}}", "not -".repeat(50_000)), "signs, `not` and `else` are nested"),
        (format!("{{{{ 1{} }}}}", " if 1 else 2".repeat(30_000)), "signs, `not` and `else` are nested"),
        (format!("{{{{ 1{} }}}}", " if 1".repeat(30_000)), "operators are nested"),
        (format!("{{{{ 1{} ) }}}}", " ** 2".repeat(30_000)), "operators are nested"),
        (format!("{{{{ 1{} }}}}", " is not defined".repeat(30_000)), "nested"),
        (format!("{{{{ a{} }}}}", "[0]".repeat(30_000)), "operators are nested"),
        (format!("{{{{ {}1{} }}}}", "[-".repeat(30_000), "]".repeat(30_000)), "nested"),
        (format!("{{% set {}a = 1 %}}", "(".repeat(30_000)), "brackets are nested"),
        (format!("{{% if 0 %}}{}{{% endif %}}", "{% elif 0 %}".repeat(30_000)), "`if` and `elif` are nested"),
        ("a".repeat(2 << 20), "the chat template has 2097152 bytes"),
        (
            format!("{{% set t = 'a' * 9999999 %}}{}", loops("{% if t == 'a' %}{% endif %}")),
            "reads values of more than 8589934592",
        ),
        ("{{ ('a' * 9999999) | list }}".into(), large),
        ("{{ ('a' * 9999999).split('') }}".into(), large),
        ("{{ ('a ' * 4999999) | split }}".into(), large),
        ("{{ ('\n' * 9999999).splitlines() }}".into(), large),
        ("{% include 'chat' %}".into(), "write a chat template in one file"),
        ("{% block a %}{{ self.a() }}{% endblock %}".into(), "write a chat template in one file"),
        ("{{ debug() }}".into(), "debug is unknown"),
    ] {
        let error = refused(&source);
        let shown: String = source.chars().take(200).collect();
        assert!(error.contains(words), "{shown}: {error}");
    }
}

/// Values are written as Python writes them, or not at all.
#[test]
fn only_texts_are_written() {
    let render = |source: &str| ChatTemplate::new(source, Map::new()).unwrap().render(&[], None, false);
    let written = "{{ (3 | string) + 'x' }} {{ none }} {{ none | trim }} {{ none is iterable }} {{ true }} {{ false ~ 1 }} {{ 1.5 }} {{ none | default('a', true) }} {{ x }}{{ [1, 2] | tojson }}";
    assert_eq!(render(written).unwrap(), "3x None None False True False1 1.5 a [1, 2]");
    for source in ["a{{ [1] }}", "{{ 'a' ~ range(3) }}", "{{ {} | string }}"] {
        assert!(render(source).unwrap_err().contains("where it expects a text"), "{source}");
    }
    assert_eq!(render("{% autoescape true %}<a>{{ '<' }}{% endautoescape %}").unwrap(), "<a>&lt;");
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
    std::fs::write(folder.path().join("chat_template.jinja"), "\n{{ raise_exception('no') }}").unwrap();
    let error = ChatTemplate::read(folder.path()).unwrap().unwrap().render(&[], None, false).unwrap_err();
    assert!(error.starts_with("line 2 of ") && error.ends_with("chat_template.jinja: no"), "{error}");
}

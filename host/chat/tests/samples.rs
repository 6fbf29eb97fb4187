//! The samples of rows: which tokens count with tokenizers of several kinds (`make_samples.py`) and
//! with the templates of published models (`make_templates.py`), how chats are split, and what a
//! template may not leave out.

use serde_json::{Map, Value, json};
use std::path::Path;
use std::time::Instant;
use stepscope_chat::{ChatTemplate, Encoded, Encoder, Notes, Row, Sample};
use tokenizers::Tokenizer;

fn file(name: &str) -> String {
    std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(name)).unwrap()
}

fn samples() -> Value {
    serde_json::from_str(include_str!("samples.json")).unwrap()
}

fn tokenizer(samples: &Value, name: &str) -> Tokenizer {
    Tokenizer::from_bytes(samples["tokenizers"][name].to_string()).unwrap()
}

/// Encodes a row with a template, which may call `strftime_now`.
fn encode(tokenizer: &Tokenizer, template: &str, row: &Value, context: usize) -> Result<Encoded, String> {
    let tokens = json!({"bos_token": "<s>", "eos_token": "</s>"}).as_object().unwrap().clone();
    let template = ChatTemplate::new(template, tokens)?.at("2025-01-31".parse()?);
    let encoder = Encoder { tokenizer, template: Some(&template), end: tokenizer.token_to_id("</s>"), context };
    encoder.encode(&Row::from_json(row)?)
}

/// Returns the text of the tokens that count, and of all tokens.
fn texts(tokenizer: &Tokenizer, sample: &Sample) -> (String, String) {
    let counted = sample.ids.iter().zip(&sample.counted).filter(|(_, counted)| **counted).map(|(&id, _)| id);
    let decode = |ids: &[u32]| tokenizer.decode(ids, false).unwrap();
    (decode(&counted.collect::<Vec<_>>()), decode(&sample.ids))
}

/// A completion counts from where the tokens of the prompt and of both differ, whatever the offsets
/// of the tokenizer are.
#[test]
fn completions_count_from_the_divergence() {
    let samples = samples();
    let mut compared = 0;
    for name in samples["tokenizers"].as_object().unwrap().keys() {
        let tokenizer = tokenizer(&samples, name);
        for case in samples["cases"].as_array().unwrap() {
            let row = json!({"prompt": case["prompt"], "completion": case["completion"]});
            let found = encode(&tokenizer, "", &row, 4096).unwrap();
            let (ids, first): (Vec<u32>, usize) = serde_json::from_value(case["samples"][name].clone()).unwrap();
            // A completion that is only the end token counts. TRL has it in the prompt, too.
            let first = first.min(ids.len() - 1);
            let counted = (0..ids.len()).map(|at| at >= first).collect();
            assert_eq!(found.samples, [Sample { ids, counted }], "{name}: {row}");
            compared += 1;

            // A text counts as a whole, apart from what the tokenizer puts before it.
            let text = format!("{}{}", case["prompt"].as_str().unwrap(), case["completion"].as_str().unwrap());
            let found = encode(&tokenizer, "", &json!({"text": text}), 4096).unwrap();
            let skipped = found.samples[0].counted.iter().filter(|counted| !**counted).count();
            let added = tokenizer.encode("a", true).unwrap().len() - tokenizer.encode("a", false).unwrap().len();
            assert!(skipped <= added.min(1), "{name}: {text:?}: {found:?}");
        }
    }
    assert!(compared > 250, "{compared}");
    let shared = |prompt: &str, completion: &str| {
        let row = json!({"prompt": prompt, "completion": completion});
        encode(&tokenizer(&samples, "bytes"), "", &row, 4096).unwrap().notes
    };
    assert_eq!(shared("Is it? ", "yes"), Notes { shared: 1, ..Notes::default() });
    assert_eq!(shared("Is it?", " yes"), Notes::default());
}

#[test]
fn special_tokens_are_not_doubled() {
    let samples = samples();
    let tokenizer = tokenizer(&samples, "trimmed, both ends");
    let ids = |row: Value| encode(&tokenizer, "", &row, 4096).unwrap().samples.remove(0).ids;
    let plain = ids(json!({"text": "It is."}));
    for text in ["<s>It is.", "It is.</s>", "<s>It is.</s>"] {
        assert_eq!(ids(json!({"text": text})), plain, "{text}");
    }
    let row = ids(json!({"prompt": "It", "completion": " is."}));
    for (prompt, completion) in [("<s>It", " is."), ("It", " is.</s>")] {
        assert_eq!(ids(json!({"prompt": prompt, "completion": completion})), row, "{prompt}{completion}");
    }
    assert_eq!(ids(json!({"text": "<s><s>It is."})).len(), plain.len() + 1, "only one of both tokens is left out");
}

/// Long texts become samples in which each token is predicted once. Others are cut.
#[test]
fn long_rows_are_windows_or_cut() {
    let samples = samples();
    let tokenizer = tokenizer(&samples, "bytes");
    let text = "It is 5. ".repeat(300);
    let whole = encode(&tokenizer, "", &json!({"text": text}), 1 << 20).unwrap().samples.remove(0).ids;
    for context in [2, 7, 64, whole.len() - 1, whole.len(), whole.len() + 1] {
        let found = encode(&tokenizer, "", &json!({"text": text}), context).unwrap();
        let mut joined = vec![whole[0]];
        for sample in &found.samples {
            assert!(sample.ids.len() <= context && sample.counted.iter().all(|&counted| counted), "{context}");
            assert_eq!(sample.ids[0], *joined.last().unwrap());
            joined.extend(&sample.ids[1..]);
        }
        assert_eq!((joined, found.notes), (whole.clone(), Notes::default()), "{context}");
    }
    let row = json!({"prompt": "It is", "completion": " 5. It is 5. It is 5."});
    let all = encode(&tokenizer, "", &row, 4096).unwrap().samples.remove(0);
    for context in 1..all.ids.len() {
        let found = encode(&tokenizer, "", &row, context).unwrap();
        let counted: usize =
            found.samples.iter().flat_map(|sample| &sample.counted).filter(|counted| **counted).count();
        let total = all.counted.iter().filter(|counted| **counted).count();
        assert_eq!(counted + found.notes.lost, total, "{context}");
        assert_eq!(found.samples.len(), usize::from(counted > 0), "{context}");
    }
}

const PLAIN: &str = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}";
const LAST_END: &str = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}|{% endfor %}{% if add_generation_prompt %}<|assistant|>{% else %}{{ eos_token }}{% endif %}";
const LAST_THOUGHT: &str = "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' and loop.last %}[thought][/thought]{% endif %}{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}";
const OPENS: &str = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}";
const FIRST: &str = "{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] }}{% endif %}{% for m in messages %}{% if m.role != 'system' %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}";
const SPACE: &str = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}";
const TAGGED: &str = "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}{%- generation -%}{{ m.content }}<|end|>{% endgeneration %}{% else %}{{ m.content }}<|end|>{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% else %}{{ eos_token }}{% endif %}";
const TAGGED_DROPS: &str = "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}{%generation%}{{ m.content if loop.last else m.content.split('</think>')[-1] }}<|end|>{%endgeneration%}{% else %}{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}";
const DROPS_BEFORE: &str = "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}";
const DATED: &str = "{{ strftime_now('%d %B %Y') }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}";

fn user(text: &str) -> Value {
    json!({"role": "user", "content": text})
}

fn answer(text: &str) -> Value {
    json!({"role": "assistant", "content": text})
}

/// Each sample of a chat, as the text that counts, and the notes.
#[test]
fn chats_become_samples() {
    let samples = samples();
    let tokenizer = tokenizer(&samples, "bytes");
    let with = |key: &str, value: Value| {
        let mut message = answer("No.");
        message[key] = value;
        message
    };
    let none = Notes::default();
    let opened = |opened| Notes { opened, ..none };
    let two = [user("Hi"), answer("Hello."), user("Tree?"), answer("Oak.")];
    let thoughts = [user("Hi"), answer("<think>a</think>Hello."), user("Tree?"), answer("<think>b</think>Oak.")];
    let (plain, last) = ("Hello.<|end|>Oak.<|end|>", "[thought][/thought]");
    for (template, messages, want, notes) in [
        (PLAIN, &two[..], &[plain][..], none),
        (LAST_END, &two, &["Hello.|</s>", "Oak.|</s>"], none),
        (LAST_END, &two[..2], &["Hello.|</s>"], none),
        (LAST_THOUGHT, &two, &[&format!("{last}Hello.<|end|>"), &format!("{last}Oak.<|end|>")], none),
        (OPENS, &two, &[plain], opened(2)),
        (OPENS, &two[..2], &["Hello.<|end|>"], opened(1)),
        (OPENS, &[user("?"), answer("!?")], &["!?<|end|>"], opened(1)),
        (FIRST, &two, &[plain], none),
        (FIRST, &[answer("Welcome."), user("Hi"), answer("Hello.")], &["Welcome.<|end|>Hello.<|end|>"], none),
        (FIRST, &[json!({"role": "system", "content": "Be brief."}), answer("Welcome.")], &["Welcome.<|end|>"], none),
        (SPACE, &two, &["Hello.\nOak.\n"], none),
        (SPACE, &[user("Hi"), answer("no"), user("x"), answer("yes")], &[" no\n yes\n"], Notes { shared: 2, ..none }),
        (TAGGED, &two, &[plain], none),
        (TAGGED_DROPS, &two, &[plain], none),
        (TAGGED_DROPS, &thoughts, &["<think>a</think>Hello.<|end|>", "<think>b</think>Oak.<|end|>"], none),
        (DROPS_BEFORE, &thoughts, &["<think>a</think>Hello.<|end|>", "<think>b</think>Oak.<|end|>"], none),
        (DROPS_BEFORE, &two, &[plain], none),
        (DATED, &two, &[plain], none),
        (PLAIN, &two[..3], &["Hello.<|end|>"], Notes { trailing: 1, ..none }),
        (PLAIN, &[&two[..], &[user("a"), user("b")]].concat(), &[plain], Notes { trailing: 2, ..none }),
        (PLAIN, &[user("Hi"), with("train", false.into()), user("Hi"), answer("Yes.")], &["Yes.<|end|>"], none),
        (
            PLAIN,
            &[user("Hi"), answer("Yes."), user("Hi"), with("train", false.into())],
            &["Yes.<|end|>"],
            Notes { trailing: 2, ..none },
        ),
        (PLAIN, &[user("Hi"), with("train", true.into())], &["No.<|end|>"], none),
        (PLAIN, &[user("Hi"), with("train", Value::Null)], &["No.<|end|>"], none),
        (TAGGED, &[user("Hi"), with("train", false.into()), user("Hi"), answer("Yes.")], &["Yes.<|end|>"], none),
        (LAST_END, &[user("Hi"), with("train", false.into()), user("Hi"), answer("Yes.")], &["Yes.|</s>"], none),
        (PLAIN, &[user("Hi"), with("weight", 1.into())], &["No.<|end|>"], none),
    ] {
        let row = json!({"messages": messages});
        let found =
            encode(&tokenizer, template, &row, 4096).unwrap_or_else(|error| panic!("{template}\n{row}: {error}"));
        let counted: Vec<String> = found.samples.iter().map(|sample| texts(&tokenizer, sample).0).collect();
        assert_eq!(
            (&counted[..], found.notes),
            (&want.iter().map(ToString::to_string).collect::<Vec<_>>()[..], notes),
            "{template}\n{row}"
        );
    }
    let error =
        encode(&tokenizer, PLAIN, &json!({"messages": [user("Hi"), with("train", false.into())]}), 64).unwrap_err();
    assert!(error.contains("no message counts in the loss"), "{error}");
    let dated = encode(&tokenizer, DATED, &json!({"messages": two}), 4096).unwrap();
    assert!(texts(&tokenizer, &dated.samples[0]).1.starts_with("31 January 2025<|user|>"));
}

/// Answers beyond a context are left out, and their tokens are counted.
#[test]
fn answers_beyond_a_context_are_lost() {
    let samples = samples();
    let tokenizer = tokenizer(&samples, "bytes");
    let turn = [user("Is it? Is it? Is it?"), answer("It is. yes")];
    let row = json!({"messages": turn.iter().cycle().take(20).collect::<Vec<_>>()});
    for template in [PLAIN, LAST_END] {
        let all = encode(&tokenizer, template, &row, 1 << 20).unwrap();
        let found = encode(&tokenizer, template, &row, 64).unwrap();
        let counted = |found: &Encoded| {
            found.samples.iter().flat_map(|sample| &sample.counted).filter(|counted| **counted).count()
        };
        assert!(counted(&found) > 0 && found.samples.len() < 10 && found.notes.lost > 20, "{found:?}");
        // The texts of an answer have no tokens that end it.
        assert!(counted(&found) + found.notes.lost + 20 >= counted(&all), "{found:?}");
        assert!(found.samples.iter().all(|sample| sample.ids.len() <= 64));
    }
}

/// A template that leaves out a part of a message is refused, unless it is an earlier answer's.
#[test]
fn parts_are_not_left_out() {
    let samples = samples();
    let tokenizer = tokenizer(&samples, "bytes");
    let of = |content: &str| PLAIN.replace("m.content", content);
    let thought = "<think>Two and two are four.</think>It is four.";
    let lines = "The first line.\nThe second line.";
    for (content, text, lost) in [
        ("m.content.split('</think>')[-1]", thought, Some("Two and two are four.")),
        ("m.content.split('</think>')[0]", thought, Some("It is four.")),
        (
            "(m.content.split('</think>')[-1] if '</think>' in m.content else m.content)",
            thought,
            Some("Two and two are four."),
        ),
        ("m.content.split('\n')[0]", lines, Some("The second line.")),
        ("m.content.split('\n')[-1]", lines, Some("The first line.")),
        ("(m.content.splitlines() | first)", lines, Some("The second line.")),
        ("m.content[:20]", lines, Some("second line")),
        ("m.content[5:]", lines, Some("The")),
        ("m.content[:-1]", "It is four", Some("r")),
        ("(m.content | truncate(12))", lines, None),
        ("m.content.split('###')[0]", "Yes.### No.", Some("### No.")),
        ("m.content.split()[0]", "Yes, it is.", Some("it is.")),
        ("m.content.replace('is', '')", "It is four, is it?", Some("is")),
        ("m.content.replace('!', '')", "It is four!", Some("!")),
        ("(m.content | striptags)", "It <b>is</b> four.", None),
        ("m.content.strip('.')", "It is four...", Some("...")),
        ("m.content", thought, None),
        ("(m.content | trim)", "  It is four.\n ", None),
        ("(m.content | tojson)", "It is \"four\",\n\\ or\t<b>5</b>.", None),
        ("(m.content | upper)", "It is four.", None),
        ("(m.content | indent(4))", lines, None),
        ("m.content.replace('\n', ' ')", lines, None),
        ("('> ' ~ m.content.split('\n') | join('\n> '))", lines, None),
        ("('\n'.join(m.content.split('\n')))", lines, None),
        ("(m.content.split('</think>')[0] ~ '</think>\n\n' ~ m.content.split('</think>')[-1])", thought, None),
        ("m.content", "?!", None),
        ("m.content", "\u{1f600}", None),
        ("(m.content ~ m.content)", "It is four.", None),
    ] {
        let template = of(content);
        for row in [json!({"messages": [user("Hi"), answer(text)]}), json!({"messages": [user(text), answer("Hi")]})] {
            let found = encode(&tokenizer, &template, &row, 4096);
            match (lost, &found) {
                (Some(words), Err(error)) => {
                    // A slice may lose the other message, too, which stands first.
                    let names = error.contains(words) || error.contains("\"Hi\" of `content`");
                    assert!(error.contains("leaves out") && names, "{content}, {row}: {error}");
                }
                (None, Ok(_)) => {}
                // Such a filter is unknown, or the template leaves out a part.
                (None, Err(error)) if error.contains("unknown") || content.contains("striptags") => {}
                (lost, found) => panic!("{content}, {row}: expected {lost:?}, got {found:?}"),
            }
        }
    }
    let call = |name: &str| json!({"type": "function", "function": {"name": name, "arguments": {"place": "K\u{f6}ln", "day": "Monday"}}});
    let mut calls = answer("");
    calls["tool_calls"] = json!([call("weather"), call("sun")]);
    let row = json!({"messages": [user("Hi"), calls]});
    let with = |calls: &str| {
        PLAIN.replace("{{ m.content }}", &format!("{{{{ m.content }}}}{{% if m.tool_calls %}}{calls}{{% endif %}}"))
    };
    for (calls, lost) in [
        ("{{ m.tool_calls | tojson }}", None),
        ("{% for c in m.tool_calls %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}", None),
        ("{{ m.tool_calls[0] | tojson }}", Some("call 2 of `tool_calls`")),
        ("{% for c in m.tool_calls %}{{ c.function.name }}{% endfor %}", Some("of `tool_calls`")),
        (
            "{% for c in m.tool_calls %}{{ c.function.name }}{{ c.function.arguments.place }}{% endfor %}",
            Some("\"Monday\""),
        ),
        ("", Some("`tool_calls`")),
    ] {
        let found = encode(&tokenizer, &with(calls), &row, 4096);
        match lost {
            None => drop(found.unwrap_or_else(|error| panic!("{calls}: {error}"))),
            Some(words) => assert!(found.unwrap_err().contains(words), "{calls}"),
        }
    }
}

/// The time of a chat grows with its length, not with the square of it.
#[test]
fn long_chats_take_little_time() {
    let samples = samples();
    let tokenizer = tokenizer(&samples, "bytes");
    let messages: Vec<Value> = (0..400)
        .flat_map(|number| [user(&format!("What is {number}+1?")), answer(&format!("It is {}.", number + 1))])
        .collect();
    let row = json!({"messages": messages});
    for template in [PLAIN, OPENS, SPACE, TAGGED, LAST_END, LAST_THOUGHT] {
        let began = Instant::now();
        let found = encode(&tokenizer, template, &row, 4096).unwrap();
        println!("{:?}: {} samples, {:?}", began.elapsed(), found.samples.len(), found.notes);
        assert!(
            began.elapsed().as_secs() < if found.samples.len() > 1 { 20 } else { 5 },
            "{template} took {:?}",
            began.elapsed()
        );
    }
}

fn hash(bytes: impl IntoIterator<Item = u8>) -> String {
    let step = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
    format!("{:016x}", bytes.into_iter().fold(0xcbf2_9ce4_8422_2325, step))
}

/// Returns the ranges of tokens that count.
fn runs(counted: &[bool]) -> Vec<(usize, usize)> {
    let mut runs: Vec<(usize, usize)> = Vec::new();
    for at in (0..counted.len()).filter(|&at| counted[at]) {
        match runs.last_mut() {
            Some((_, end)) if *end == at => *end += 1,
            _ => runs.push((at, at + 1)),
        }
    }
    runs
}

/// The reasons for which chats are refused that TRL accepts: the template leaves out something, or
/// moves the system prompt when the answer follows, so that TRL would count a question.
const REFUSALS: [&str; 4] = [
    "the chat template leaves out ",
    "the chat template leaves them out",
    "writes the messages before an answer differently than in its prompt for one",
    "No user query found in messages",
];
/// Chats of a template that marks answers, but leaves out earlier thoughts. Each answer is a sample
/// here, with its thought; in TRL, both are in one, and the first has none.
const SPLIT: [(&str, &str); 2] = [("lfm2.5", "reasoning"), ("lfm2.5", "thoughts")];

/// Templates that close the messages before an answer otherwise than those before its prompt.
const CLOSED: [&str; 3] = ["hermes-3", "bielik-3", "gpt-oss"];

/// The masks are TRL's: of one rendering if the template has the tag `generation`, or else of each
/// answer as a completion.
#[test]
fn masks_are_those_of_trl() {
    let published: Value = serde_json::from_str(&file("published.json")).unwrap();
    let sources: Value = serde_json::from_str(&file("templates/sources.json")).unwrap();
    let (mut compared, mut refused, mut faults) = (0, 0, Vec::new());
    for kind in ["bytes", "pieces"] {
        let tokenizer = Tokenizer::from_bytes(file(&format!("tokenizer-{kind}.json"))).unwrap();
        for (name, chats) in published["cases"].as_object().unwrap() {
            let source = file(&format!("templates/{name}.jinja"));
            let tokens: Map<String, Value> = sources[name].as_object().unwrap().clone();
            let tokens = tokens.into_iter().filter(|(key, _)| key.ends_with("_token")).collect();
            let template = ChatTemplate::new(&source, tokens).unwrap().at("2026-03-05".parse().unwrap());
            let encoder = Encoder { tokenizer: &tokenizer, template: Some(&template), end: None, context: 1 << 16 };
            for (chat, case) in chats.as_object().unwrap() {
                let row = Row::from_json(&published["chats"][chat]).unwrap();
                let Some(want) = case[kind].as_array() else { continue };
                let found = match encoder.encode(&row) {
                    Ok(found) => found.samples,
                    Err(error) => {
                        assert!(REFUSALS.iter().any(|words| error.contains(words)), "{name}, {chat}: {error}");
                        refused += 1;
                        continue;
                    }
                };
                let mut counted = vec![Vec::new(); found.len()];
                for one in want {
                    let (text, length, runs): (String, usize, Vec<(usize, usize)>) =
                        serde_json::from_value(one.clone()).unwrap();
                    let same = |sample: &Sample| {
                        let ids = sample.ids.get(..length);
                        ids.is_some_and(|ids| hash(ids.iter().flat_map(|id| id.to_le_bytes())) == text)
                    };
                    match found.iter().position(same) {
                        Some(sample) => counted[sample].extend(runs),
                        None => faults.push(format!("{kind}, {name}, {chat}: no such sample: {one}")),
                    }
                }
                if SPLIT.contains(&(name, chat)) {
                    // The second answer, which is TRL's second run.
                    counted.iter_mut().for_each(|runs| runs.drain(..runs.len().min(1)).for_each(drop));
                    assert_eq!(found.len(), 2);
                }
                for (sample, want) in found.iter().zip(&mut counted) {
                    let mut own = runs(&sample.counted);
                    // TRL has no completion without a prompt.
                    if chat == "assistant first" || SPLIT.contains(&(name, chat)) && want.is_empty() {
                        own.drain(..own.len().saturating_sub(want.len()));
                    }
                    if CLOSED.contains(&name.as_str()) {
                        // TRL also counts the end of the messages before the answer.
                        let later =
                            own.iter().zip(want.iter_mut()).filter(|(own, want)| own.1 == want.1 && own.0 > want.0);
                        later.for_each(|(own, want)| want.0 = own.0);
                    }
                    if own != *want {
                        faults.push(format!("{kind}, {name}, {chat}: {own:?} instead of {want:?}"));
                    }
                }
                compared += want.len();
            }
        }
    }
    println!("{compared} compared, {refused} refused, {} differ", faults.len());
    assert!(faults.is_empty(), "{}", faults.join("\n"));
    assert!(compared > 2000 && refused < 500, "{compared} compared, {refused} refused");
}

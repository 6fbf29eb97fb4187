//! Documents of text files, JSON lines and Parquet files, and their shares of the samples.

use crate::program::workers::Workers;
use crate::train::documents::{self, Contents, DataFile};
use crate::train::samples::{self, Order};
use crate::train::text::{Source, Text};
use crate::train::tokenizer::Tokenizer;
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// Ten rows with the columns `id`, `text`, `tags` and `score` in groups of four, which pyarrow 26
/// wrote with `pq.write_table(table, path, compression="zstd", row_group_size=4)`. The text of
/// row 3 is missing, and that of row 8 is empty.
const PARQUET: &[u8] = include_bytes!("documents.parquet");

/// Returns the documents at these paths.
fn read(paths: &[PathBuf]) -> Result<Vec<String>, String> {
    let files = documents::read(paths, &Workers::new()).map_err(|error| error.to_string())?;
    let texts = |file: DataFile| match file.contents {
        Contents::Documents(texts) => texts,
        Contents::Tokens => vec![b"tokens".into()],
    };
    Ok(files.into_iter().flat_map(texts).map(|text| String::from_utf8(text).unwrap()).collect())
}

fn written(folder: &Path, name: &str, contents: impl AsRef<[u8]>) -> PathBuf {
    let path = folder.join(name);
    fs::write(&path, contents).unwrap();
    path
}

#[test]
fn rows_are_documents() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let more = "words and more words. ";
    let of_parquet: Vec<String> = [0, 1, 2, 4, 5, 6, 7, 8, 9]
        .map(|row| match row {
            7 => "Z\u{fc}rich \u{1f600}".into(),
            8 => String::new(),
            _ => format!("Document {row}: {}", more.repeat(row % 4)),
        })
        .into();
    let parquet = written(folder, "b.parquet", PARQUET);
    assert_eq!(read(&[parquet]).unwrap(), of_parquet);
    let rows = "{\"id\": 1, \"text\": \"one\\n\\u00fc\"}\r\n\n{\"text\": \"two\", \"meta\": {\"text\": 3}}\n";
    let lines = written(folder, "a.jsonl", rows);
    assert_eq!(read(&[lines]).unwrap(), ["one\n\u{fc}", "two"]);
    // Other JSON is text, as is a file whose first line is no object.
    for text in ["{\"content\": \"x\"}\n", "[{\"text\": \"x\"}]", "{\n\"text\": \"x\"}", "{\"text\": 5}\n"] {
        assert_eq!(read(&[written(folder, "c.json", text)]).unwrap(), [text]);
    }
    // A folder stands for its files, in the order of their names.
    written(folder, ".hidden", "no");
    written(folder, "d.bin", [0; 4]);
    fs::create_dir(folder.join("e")).unwrap();
    let all = [vec!["one\n\u{fc}".into(), "two".into()], of_parquet, vec!["{\"text\": 5}\n".into(), "tokens".into()]];
    assert_eq!(read(&[folder.to_owned()]).unwrap(), all.concat());
}

#[test]
fn unreadable_rows_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let no_text = replaced(PARQUET, b"text", b"body");
    fs::create_dir(folder.join("empty")).unwrap();
    for (path, words) in [
        (written(folder, "a.jsonl", "{\"text\": \"x\"}\n{\"txt\": \"y\"}\n"), "a.jsonl: line 2: expected an object"),
        (written(folder, "b.jsonl", "{\"text\": \"x\"}\n\n{\"text\": \"y\"\n"), "b.jsonl: line 3: expected an object"),
        (written(folder, "c.jsonl", "{\"messages\": []}\n"), "stepscope finetune"),
        (written(folder, "d.parquet", &PARQUET[..PARQUET.len() - 9]), "d.parquet: "),
        (written(folder, "e.parquet", no_text), "has the columns id, body, tags.list.element, score; expected one of"),
        (folder.join("empty"), "empty: has no files"),
    ] {
        let error = read(std::slice::from_ref(&path)).unwrap_err();
        assert!(error.contains(words), "expected `{words}` in: {error}");
    }
}

/// Replaces each occurrence of some bytes by as many others.
fn replaced(bytes: &[u8], before: &[u8], after: &[u8]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    for at in 0..bytes.len() - before.len() {
        if bytes[at..].starts_with(before) {
            bytes[at..at + after.len()].copy_from_slice(after);
        }
    }
    bytes
}

/// Every round has the samples that the shares ask for, each pass over a source has each of its
/// windows once, and the held-out part of a source is not trained on.
#[test]
fn mixtures_keep_shares() {
    let folder = tempfile::tempdir().unwrap();
    let paths = [("a", 3000), ("b", 1000)].map(|(name, bytes)| written(folder.path(), name, name.repeat(bytes)));
    let (workers, bytes, context) = (Workers::new(), Tokenizer::Bytes, 10);
    let text = |apart| {
        let files = documents::read(&paths, &workers).unwrap();
        Text::load(&files, &bytes, context, apart, &workers).unwrap()
    };
    let (together, apart) = (text(false), text(true));
    assert_eq!((together.sources().len(), apart.sources().len()), (1, 2));
    assert_eq!(together.sha256, apart.sha256);

    let shares = [1, 4];
    let order = Order::new(&apart, context, 7, &shares).unwrap();
    let source = |window: &Range<usize>| {
        let is_of = |source: &Source| source.training.start <= window.start && window.end <= source.training.end;
        apart.sources().iter().position(is_of).unwrap()
    };
    // A pass over b has 94 windows, so the first 94 samples of b are all its windows.
    let windows: Vec<_> = (0..500).map(|number| order.window(number)).collect();
    let sources: Vec<usize> = windows.iter().map(source).collect();
    for round in sources.chunks(5) {
        assert_eq!(round, [1, 1, 0, 1, 1]);
    }
    let mut of_b: Vec<usize> = windows.iter().filter(|window| source(window) == 1).map(|window| window.start).collect();
    of_b.truncate(94);
    of_b.sort_unstable();
    of_b.dedup();
    assert_eq!(of_b.len(), 94);

    // The held-out parts have 14 and 4 windows.
    let evaluated = samples::evaluated(&apart, context, 10, &shares);
    let held_out = apart.sources().iter().map(|source| {
        evaluated
            .iter()
            .filter(|window| source.held_out.start <= window.start && window.end <= source.held_out.end)
            .count()
    });
    assert_eq!(held_out.collect::<Vec<_>>(), [2, 4]);
}

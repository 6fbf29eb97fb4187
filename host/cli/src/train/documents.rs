//! The files of a training text: tokens, or documents as plain text, JSON lines or Parquet.
//!
//! Invariant: the same paths and contents give the same documents in the same order.

use std::borrow::Cow;
use std::fs;
use std::path::{Path, PathBuf};

use bytes::Bytes;
use parquet::basic::Type;
use parquet::column::reader::ColumnReader;
use parquet::data_type::ByteArray;
use parquet::errors::ParquetError;
use parquet::file::reader::{FileReader, SerializedFileReader};
use serde::Deserialize;
use serde_json::Value;
use stepscope::files::{FileKind, PlainFile};
use stepscope::memory::HostMemory;

use crate::program::workers::Workers;
use crate::train::bad_input::{Outcome, bad};

/// The key or column of a document's text.
const TEXT: &str = "text";
/// The most bytes of text on which a tokenizer is trained.
const LEARNED_FROM: usize = 64 << 20;
/// One part in this many is held out.
pub(crate) const HELD_OUT: usize = 20;
/// The most bytes of memory that one byte of text needs during tokenization: the byte and its
/// token.
const BYTES_OF_BYTE: u64 = 5;

/// A file of a training text.
pub(crate) struct DataFile {
    pub(crate) path: PathBuf,
    /// The number of the path, of those given, that leads to the file.
    pub(crate) source: usize,
    pub(crate) contents: Contents,
}

/// The contents of a file.
pub(crate) enum Contents {
    /// Tokens, which are read later.
    Tokens,
    /// Texts of documents.
    Documents(Vec<Vec<u8>>),
}

impl DataFile {
    /// Returns the documents, of which a token file has none.
    fn documents(&self) -> &[Vec<u8>] {
        match &self.contents {
            Contents::Tokens => &[],
            Contents::Documents(documents) => documents,
        }
    }
}

/// Reads the files at these paths, of which a folder has several, in the order of their names.
pub(crate) fn read(paths: &[PathBuf], workers: &Workers) -> Outcome<Vec<DataFile>> {
    let mut files = Vec::new();
    for (source, path) in paths.iter().enumerate() {
        let of_path = if path.is_dir() { files_of(path)? } else { vec![path.clone()] };
        files.extend(of_path.into_iter().map(|path| (path, source)));
    }
    let is_tokens = |path: &Path| path.extension().is_some_and(|extension| extension == "bin");
    let mut bytes = 0u64;
    for (path, _) in files.iter().filter(|(path, _)| !is_tokens(path)) {
        bytes = bytes.saturating_add(PlainFile::open(path).map_err(|reason| bad(path.display(), reason))?.len());
    }
    check_memory("--data", bytes)?;
    workers.map(&files, |(path, source)| {
        let contents = if is_tokens(path) { Contents::Tokens } else { Contents::Documents(documents(path, workers)?) };
        Ok(DataFile { path: path.clone(), source: *source, contents })
    })
}

/// Returns the number of bytes in all documents.
pub(crate) fn bytes(files: &[DataFile]) -> usize {
    files.iter().flat_map(DataFile::documents).map(Vec::len).sum()
}

/// Returns the documents that a tokenizer is trained on: the beginning of the text, without the
/// part that is held out, and at most 64 MiB.
pub(crate) fn beginning(files: &[DataFile]) -> Vec<Cow<'_, str>> {
    let all = bytes(files);
    let mut left = (all - all / HELD_OUT).min(LEARNED_FROM);
    let mut beginning = Vec::new();
    for document in files.iter().flat_map(DataFile::documents) {
        let start = &document[..document.len().min(left)];
        left -= start.len();
        beginning.push(String::from_utf8_lossy(start));
    }
    beginning
}

/// Returns the files of a folder, in the order of their names. Hidden files are left out.
fn files_of(folder: &Path) -> Outcome<Vec<PathBuf>> {
    let failed = |reason| bad(folder.display(), reason);
    let mut files = Vec::new();
    for entry in fs::read_dir(folder).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        if !entry.path().is_dir() && !entry.file_name().as_encoded_bytes().starts_with(b".") {
            files.push(entry.path());
        }
    }
    files.sort_unstable();
    if files.is_empty() {
        return Err(bad(folder.display(), "has no files: give files, or a folder with the files themselves"));
    }
    Ok(files)
}

/// Reads the documents of a file that has no tokens.
fn documents(path: &Path, workers: &Workers) -> Outcome<Vec<Vec<u8>>> {
    let failed = |reason| bad(path.display(), reason);
    let mut file = PlainFile::open(path).map_err(failed)?;
    if file.is_empty() {
        return Err(bad(path.display(), "is empty: give a file with text"));
    }
    let kind = file.kind().map_err(failed)?;
    // The byte tokenizer accepts any bytes, but a binary file here is a mistake.
    if let Some(kind) = kind.filter(|&kind| kind.is_no_text() && kind != FileKind::Parquet) {
        let expected = "text, JSON lines, a Parquet file, or tokens in a file that ends in .bin";
        return Err(bad(path.display(), kind.refusal(expected)));
    }
    let bytes = file.all_bytes(HostMemory::available_bytes() / BYTES_OF_BYTE).map_err(failed)?;
    if kind == Some(FileKind::Parquet) {
        return parquet(path, bytes.into());
    }
    if !has_rows(path, &bytes)? {
        return Ok(vec![bytes]);
    }
    let lines: Vec<(usize, &[u8])> = bytes.split(|&byte| byte == b'\n').zip(1..).map(|(line, at)| (at, line)).collect();
    let rows = workers.map(&lines, |&(at, line)| {
        if line.trim_ascii().is_empty() {
            return Ok(None);
        }
        let row: Row<'_> = serde_json::from_slice(line).map_err(|reason| {
            let expected = format!("line {at}: expected an object with the text of a document in `{TEXT}`: {reason}");
            bad(path.display(), expected)
        })?;
        Ok(Some(row.text.into_owned().into_bytes()))
    });
    Ok(rows?.into_iter().flatten().collect())
}

/// A row of a file of JSON lines, whose other keys are not read.
#[derive(Deserialize)]
struct Row<'a> {
    #[serde(borrow)]
    text: Cow<'a, str>,
}

/// Returns true for rows with a text, one JSON object a line.
///
/// # Errors
/// Returns an error for chats, whose template and roles would be lost.
fn has_rows(path: &Path, text: &[u8]) -> Outcome<bool> {
    let mut lines = text.split(|&byte| byte == b'\n');
    let first = lines.find(|line| !line.trim_ascii().is_empty()).unwrap_or_default();
    let Ok(Value::Object(row)) = serde_json::from_slice(first) else { return Ok(false) };
    match ["messages", "conversations", "completion"].into_iter().find(|key| row.contains_key(*key)) {
        None => Ok(row.get(TEXT).is_some_and(Value::is_string)),
        Some(key) => {
            let reason = format!(
                "has rows with `{key}`, which are not read as raw text: train on them with `stepscope finetune \
                 --weights DIR --data {}`",
                path.display()
            );
            Err(bad(path.display(), reason))
        }
    }
}

/// Returns the texts of a Parquet file, without missing ones.
fn parquet(path: &Path, bytes: Bytes) -> Outcome<Vec<Vec<u8>>> {
    let failed = |reason: ParquetError| bad(path.display(), reason);
    let reader = SerializedFileReader::new(bytes).map_err(failed)?;
    let groups = reader.metadata().row_groups();
    let columns = reader.metadata().file_metadata().schema_descr().columns();
    let is_text = |column: &parquet::schema::types::ColumnDescPtr| {
        column.path().parts() == [TEXT] && column.physical_type() == Type::BYTE_ARRAY && column.max_rep_level() == 0
    };
    let Some(at) = columns.iter().position(is_text) else {
        let names: Vec<String> = columns.iter().map(|column| column.path().string()).collect();
        let reason = format!(
            "has the columns {}; expected one of strings with the name `{TEXT}`: rename the column with the documents",
            names.join(", ")
        );
        return Err(bad(path.display(), reason));
    };
    let sizes = groups.iter().map(|group| group.column(at).uncompressed_size().max(0) as u64);
    check_memory(path.display(), sizes.sum())?;
    let mut documents = Vec::new();
    for (number, of_group) in groups.iter().enumerate() {
        let group = reader.get_row_group(number).map_err(failed)?;
        let ColumnReader::ByteArrayColumnReader(mut column) = group.get_column_reader(at).map_err(failed)? else {
            continue;
        };
        let rows = of_group.num_rows().max(0) as usize;
        let (mut texts, mut levels, mut read) = (Vec::<ByteArray>::new(), Vec::new(), 0);
        while read < rows {
            let (records, _, _) =
                column.read_records(rows - read, Some(&mut levels), None, &mut texts).map_err(failed)?;
            if records == 0 {
                let reason = format!("has {read} of the {rows} rows of group {number}: copy the file again");
                return Err(bad(path.display(), reason));
            }
            read += records;
        }
        documents.extend(texts.iter().map(|text| text.data().to_vec()));
    }
    Ok(documents)
}

/// Returns an error if this many bytes of text are too many for memory.
fn check_memory(place: impl std::fmt::Display, bytes: u64) -> Outcome<()> {
    let (needed, available) = (bytes.saturating_mul(BYTES_OF_BYTE), HostMemory::available_bytes());
    if needed <= available {
        return Ok(());
    }
    let reason = format!(
        "tokenizing {bytes} bytes of text takes up to {needed} bytes of memory; the host, or this process's cgroup, has \
         {available} available: give less text, or a .bin token file, which is read one window at a time"
    );
    Err(bad(place, reason))
}

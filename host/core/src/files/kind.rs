//! The kinds of files that are passed by mistake, recognized by their first bytes.
//!
//! A reader that refuses a file calls [`FileKind::of`] and adds [`FileKind::refusal`] to its error.
//! The error then names the kind of file and contains advice. Invariant: a kind is only as certain
//! as its first bytes. It therefore explains an error, and never causes one if a sound file could
//! begin in the same way.

#![forbid(unsafe_code)]

use std::fmt;

/// The kind of a file, according to its first bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum FileKind {
    /// A gzip archive.
    Gzip,
    /// A bzip2 archive.
    Bzip2,
    /// An xz archive.
    Xz,
    /// A zstd archive.
    Zstd,
    /// An lz4 archive.
    Lz4,
    /// A zip archive.
    Zip,
    /// A zip archive written by `torch.save`.
    TorchZip,
    /// A zip archive of NumPy arrays.
    Npz,
    /// A zip archive of an Excel workbook.
    Xlsx,
    /// A Python pickle, as older versions of `torch.save` write it.
    Pickle,
    /// A NumPy array.
    Npy,
    /// An HDF5 file, as Keras writes it.
    Hdf5,
    /// An Apache Parquet file.
    Parquet,
    /// An Apache Arrow or Feather file.
    Arrow,
    /// A GGUF file, as llama.cpp reads it.
    Gguf,
    /// An SQLite database.
    Sqlite,
    /// A PDF document.
    Pdf,
    /// A program or a shared library.
    Elf,
    /// A tar archive.
    Tar,
    /// A safetensors file.
    Safetensors,
    /// A git-lfs pointer, left where the file itself was not fetched.
    LfsPointer,
    /// A web page.
    Html,
    /// Text in UTF-16 or UTF-32.
    WideText,
    /// Text in an encoding of one byte a character, such as Latin-1.
    ByteText,
    /// JSON, in UTF-8.
    Json,
    /// Text in UTF-8.
    Text,
    /// A file with only zero bytes so far.
    Zeros,
}

use FileKind::*;

/// The kinds by the bytes at their start.
const MAGICS: [(&[u8], FileKind); 18] = [
    (b"\x1f\x8b\x08", Gzip),
    (b"BZh", Bzip2),
    (b"\xfd7zXZ\0", Xz),
    (b"\x28\xb5\x2f\xfd", Zstd),
    (b"\x04\x22\x4d\x18", Lz4),
    (b"\x93NUMPY", Npy),
    (b"\x89HDF\r\n\x1a\n", Hdf5),
    (b"PAR1", Parquet),
    (b"ARROW1", Arrow),
    (b"FEA1", Arrow),
    (b"GGUF", Gguf),
    (b"SQLite format 3\0", Sqlite),
    (b"%PDF-", Pdf),
    (b"\x7fELF", Elf),
    (b"version https://git-lfs.github.com/", LfsPointer),
    (b"\xff\xfe", WideText),
    (b"\xfe\xff", WideText),
    (b"\0\0\xfe\xff", WideText),
];
/// The offset of a tar archive's mark.
const TAR_MARK: usize = 257;
/// The longest header that the safetensors format allows.
pub const MAX_HEADER_BYTES: u64 = 100_000_000;

impl FileKind {
    /// The number of leading bytes that suffice.
    pub const BYTES: usize = 4096;

    /// Returns the kind of a file that begins with these bytes, if it is recognized.
    pub fn of(start: &[u8]) -> Option<Self> {
        if start.is_empty() {
            return None;
        }
        let magic = MAGICS.iter().find(|(magic, _)| start.starts_with(magic)).map(|&(_, kind)| kind);
        let tar = || start.get(TAR_MARK..TAR_MARK + 5).filter(|mark| mark == b"ustar").map(|_| Tar);
        let zeros = || start.iter().all(|&byte| byte == 0).then_some(Zeros);
        magic
            .or_else(|| zip(start))
            .or_else(|| pickle(start))
            .or_else(|| safetensors(start))
            .or_else(tar)
            .or_else(zeros)
            .or_else(|| text(start))
    }

    /// Returns true for text in UTF-8.
    pub fn is_utf8(self) -> bool {
        matches!(self, Json | Text | Html | LfsPointer)
    }

    /// Returns true if files of other kinds practically never begin like this. The marks of these
    /// kinds have at least six bytes.
    pub fn is_certain(self) -> bool {
        matches!(self, LfsPointer | TorchZip | Npz | Xlsx | Npy | Hdf5 | Sqlite | Xz)
    }

    /// Returns true if text in any byte encoding would never begin like this.
    pub fn is_no_text(self) -> bool {
        !matches!(self, Json | Text | Html | ByteText | Zeros)
    }

    /// Formats the end of an error message, for a reader that expected something else, such as
    /// `is a gzip archive; expected CSV: unpack it, as by gunzip`.
    pub fn refusal(self, expected: &str) -> String {
        format!("is {self}; expected {expected}: {}", self.advice())
    }

    fn advice(self) -> &'static str {
        match self {
            Gzip => "unpack it, for example with `gunzip`",
            Bzip2 => "unpack it, for example with `bunzip2`",
            Xz => "unpack it, for example with `unxz`",
            Zstd => "unpack it, for example with `unzstd`",
            Lz4 => "unpack it, for example with `unlz4`",
            Zip | Tar => "unpack it, and give the file within",
            TorchZip | Pickle => {
                "`safetensors.torch.save_file(model.state_dict(), path)` writes one in Python, which `load_state_dict` reads"
            }
            LfsPointer => "fetch the file itself with `git lfs pull`",
            WideText => "write it as UTF-8, for example with `iconv -f UTF-16 -t UTF-8`",
            ByteText => "write it as UTF-8, for example with `iconv -f ISO-8859-1 -t UTF-8`",
            Html => "download the file itself, not the page that shows it",
            Zeros => "its writer may have died before it wrote; make it again",
            _ => "give another file, or convert it",
        }
    }
}

impl fmt::Display for FileKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Gzip => "compressed by gzip",
            Bzip2 => "compressed by bzip2",
            Xz => "compressed by xz",
            Zstd => "compressed by zstd",
            Lz4 => "compressed by lz4",
            Zip => "a zip archive",
            TorchZip => "a zip archive, as `torch.save` writes it",
            Npz => "a zip archive of NumPy arrays",
            Xlsx => "an Excel workbook",
            Pickle => "a pickle, as `torch.save` writes it",
            Npy => "a NumPy array",
            Hdf5 => "an HDF5 file",
            Parquet => "a Parquet file",
            Arrow => "an Arrow file",
            Gguf => "a GGUF file, as llama.cpp reads it",
            Sqlite => "an SQLite database",
            Pdf => "a PDF document",
            Elf => "a program or a shared library",
            Tar => "a tar archive",
            Safetensors => "a safetensors file",
            LfsPointer => "a pointer of git-lfs",
            Html => "a web page",
            WideText => "text in UTF-16 or UTF-32",
            ByteText => "text that is not UTF-8, perhaps Latin-1",
            Json => "JSON",
            Text => "text",
            Zeros => "nothing but zero bytes",
        })
    }
}

/// Recognizes a kind of zip archive by the name of its first file.
fn zip(start: &[u8]) -> Option<FileKind> {
    if !start.starts_with(b"PK\x03\x04") {
        return start.starts_with(b"PK\x05\x06").then_some(Zip);
    }
    let length = start.get(26..28).map_or(0, |bytes| usize::from(u16::from_le_bytes([bytes[0], bytes[1]])));
    let name = start.get(30..).map_or(&[][..], |rest| &rest[..rest.len().min(length)]);
    Some(match name {
        _ if name.ends_with(b"/data.pkl") || name.ends_with(b"/byteorder") || name.ends_with(b"/.format_version") => {
            TorchZip
        }
        _ if name.ends_with(b".npy") => Npz,
        b"[Content_Types].xml" => Xlsx,
        _ => Zip,
    })
}

/// Recognizes a pickle by its protocol and a typical first opcode.
fn pickle(start: &[u8]) -> Option<FileKind> {
    let [0x80, 2..=5, code, ..] = start else { return None };
    // The opcodes of a frame, a number, a dictionary, a class, a list, a tuple and a text.
    b"\x95\x8a\x8b}c](X\x8cJKM".contains(code).then_some(Pickle)
}

/// Recognizes a safetensors file by the length and the start of its header.
fn safetensors(start: &[u8]) -> Option<FileKind> {
    let (length, header) = start.split_first_chunk()?;
    ((2..=MAX_HEADER_BYTES).contains(&u64::from_le_bytes(*length)) && header.first() == Some(&b'{'))
        .then_some(Safetensors)
}

fn text(start: &[u8]) -> Option<FileKind> {
    let (even, odd): (Vec<u8>, Vec<u8>) = start.as_chunks::<2>().0.iter().map(|&[one, other]| (one, other)).unzip();
    let zeros = |bytes: &[u8]| 4 * bytes.iter().filter(|&&byte| byte == 0).count() > 3 * bytes.len();
    if !even.is_empty() && (zeros(&odd) && is_shown(&even) || zeros(&even) && is_shown(&odd)) {
        return Some(WideText);
    }
    if !is_shown(start) {
        return None;
    }
    let body = start.strip_prefix(b"\xef\xbb\xbf").unwrap_or(start).trim_ascii_start();
    let lower: Vec<u8> = body.iter().take(16).map(u8::to_ascii_lowercase).collect();
    // The start may end within a character.
    let is_utf8 = str::from_utf8(start).map_or_else(|error| error.error_len().is_none(), |_| true);
    let is_mostly_ascii = || 4 * start.iter().filter(|byte| byte.is_ascii()).count() > 3 * start.len();
    Some(match body.first() {
        _ if !is_utf8 && is_mostly_ascii() => ByteText,
        _ if !is_utf8 => return None,
        _ if lower.starts_with(b"<!doctype html") || lower.starts_with(b"<html") => Html,
        Some(b'{') => Json,
        _ => Text,
    })
}

/// Returns true if all bytes belong to visible characters or white space.
fn is_shown(bytes: &[u8]) -> bool {
    bytes.iter().all(|&byte| byte >= b' ' && byte != 0x7f || b"\t\n\r\x0c\x1b".contains(&byte))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_known_by_their_start() {
        let wide = |text: &str| text.encode_utf16().flat_map(u16::to_le_bytes).collect::<Vec<_>>();
        let zip = |name: &str| {
            [&b"PK\x03\x04"[..], &[0; 22], &(name.len() as u16).to_le_bytes(), &[0; 2], name.as_bytes()].concat()
        };
        let mut tar = vec![b'a'; 600];
        tar[TAR_MARK..TAR_MARK + 5].copy_from_slice(b"ustar");
        for (start, kind) in [
            (b"\x1f\x8b\x08\0rest".to_vec(), Some(Gzip)),
            (zip("archive/data.pkl"), Some(TorchZip)),
            (zip("gpt2/data.pkl"), Some(TorchZip)),
            (zip("a.npy"), Some(Npz)),
            (zip("[Content_Types].xml"), Some(Xlsx)),
            (zip("book.txt"), Some(Zip)),
            (b"\x80\x02\x8a\x0al\xfc\x9cF".to_vec(), Some(Pickle)),
            (b"\x80\x02\x00\x01".to_vec(), None),
            (b"\x10\0\0\0\0\0\0\0{\"a\":".to_vec(), Some(Safetensors)),
            (b"version https://git-lfs.github.com/spec/v1\noid".to_vec(), Some(LfsPointer)),
            (tar, Some(Tar)),
            (wide("timestamp,open\n"), Some(WideText)),
            ([&b"\xff\xfe"[..], &wide("x")].concat(), Some(WideText)),
            (b"timest\xe4mp,open".to_vec(), Some(ByteText)),
            ("let ä = 1;".into(), Some(Text)),
            ("ä".as_bytes()[..1].to_vec(), Some(Text)),
            (b"  {\"a\": 1}".to_vec(), Some(Json)),
            (b"<!DOCTYPE HTML>\n<html>".to_vec(), Some(Html)),
            (vec![0; 100], Some(Zeros)),
            (vec![1, 2, 3, 250], None),
            (Vec::new(), None),
        ] {
            assert_eq!(FileKind::of(&start), kind, "{:?}", start.escape_ascii().to_string());
        }
    }

    /// Checks that no start causes a panic, and that every recognized kind has a refusal.
    #[test]
    fn any_start_is_classified() {
        let recognises =
            |start: &[u8]| FileKind::of(start).is_none_or(|kind| kind.refusal("text").contains("; expected text: "));
        for (magic, kind) in MAGICS {
            assert!((0..=magic.len()).all(|length| recognises(&magic[..length])), "{kind}");
        }
        for first in 0..=u8::MAX {
            for length in 1..40 {
                let bytes = vec![first; length];
                assert!(
                    recognises(&bytes) && recognises(&[b"PK\x03\x04", &bytes[..]].concat()),
                    "{length} times {first}"
                );
            }
        }
    }
}

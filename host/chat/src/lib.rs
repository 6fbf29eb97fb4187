//! Chats as training samples.
//!
//! ```text
//! chats.jsonl ─► Row ─► ChatTemplate::render ─► Encoder::encode ─► Sample ─► pack ─► Packed
//!                       the model's template    its tokenizer      ids, and which count
//! ```
//! Invariant: a `messages` row is never trained on as raw text, and a token counts in the loss only
//! if the assistant, or a completion, has written it. Nothing that a row contains is left out of
//! its text, except for keys that carry no text.

#![forbid(unsafe_code)]
// Paths are opened through `PlainFile`. Tests may open their own files.
#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

mod answers;
mod complete;
mod date;
mod encode;
mod forms;
mod json;
mod limits;
mod messages;
mod metering;
mod nesting;
mod pack;
mod preferences;
mod python_json;
mod rows;
mod template;
mod tokenizer;
mod tokens;

pub use date::Date;
pub use encode::{Encoded, Encoder, Notes, Sample};
pub use pack::{IGNORED, Packed, pack, pack_pairs};
pub use preferences::{Preference, read_preferences};
pub use rows::{Row, read_rows, usable};
pub use template::ChatTemplate;
pub use tokenizer::{decode, read_tokenizer, token_ids};

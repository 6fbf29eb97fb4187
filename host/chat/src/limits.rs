//! The limits of a rendering: what its values take, and what it writes.
//!
//! [`crate::metering`] makes a template measure its values. [`limit`] defines the functions that
//! measure, and replaces the filters, methods and functions whose results can be much larger than
//! their arguments.
//!
//! Invariant: a rendering makes values of at most [`MAX_MADE`] bytes, and none is larger than
//! [`MAX_BYTES`], which bounds its memory. It reads at most [`MAX_READ`] bytes, which bounds its
//! time together with the instructions.

use crate::metering::{EMIT, ITEMS, READ, TEXT, VALUE};
use crate::python_json;
use minijinja::functions::namespace;
use minijinja::value::{Kwargs, Rest, Value, ValueKind};
use minijinja::{Environment, Error, ErrorKind, State, filters};
use minijinja_contrib::pycompat::unknown_method_callback;
use std::cell::Cell;

/// The largest value, and the most bytes that are written.
pub(crate) const MAX_BYTES: u64 = 16 << 20;
/// The most bytes of values that are made.
const MAX_MADE: u64 = 1 << 30;
/// The most bytes of values that are read.
const MAX_READ: u64 = 1 << 33;
/// The bytes of a value without its text or its items.
const VALUE_BYTES: u64 = 32;
/// The deepest nesting of lists and objects.
const MAX_DEPTH: usize = 200;
/// The most namespaces. Each can contain the next, which no single value shows.
const MAX_NAMESPACES: u64 = 1000;
/// The largest number of items, or of spaces, that a filter is asked for.
const MAX_COUNT: u64 = 100_000;

type Limited<T> = std::result::Result<T, Error>;

/// The use of the rendering on this thread.
#[derive(Clone, Copy, Default)]
struct Used {
    made: u64,
    read: u64,
    written: u64,
    namespaces: u64,
}

thread_local! {
    static USED: Cell<Used> = const { Cell::new(Used { made: 0, read: 0, written: 0, namespaces: 0 }) };
}

/// Begins a rendering on this thread.
pub(crate) fn begin() {
    USED.set(Used::default());
}

/// Adds the functions that measure, and replaces what can make large values.
pub(crate) fn limit(environment: &mut Environment<'static>) {
    environment.add_function(VALUE, |value: Value| {
        make(size(&value, 0)?)?;
        listed(value)
    });
    environment.add_function(READ, |value: Value| {
        count(|used| &mut used.read, size(&value, 0)?, MAX_READ, ["reads values of", "bytes"])?;
        listed(value)
    });
    environment.add_function(ITEMS, |value: Value| match value.is_none() {
        true => Err(fault("expects a list, but gets null, for example because the row has no `tools`".into())),
        false => Ok(value),
    });
    environment.add_function(TEXT, text);
    environment.add_function(EMIT, |value: Value| {
        let value = text(value)?;
        let bytes = value.as_str().map_or(0, str::len) as u64;
        count(|used| &mut used.written, bytes, MAX_BYTES, ["writes", "bytes"])?;
        Ok(value)
    });
    environment.add_function("namespace", |defaults: Option<Value>| {
        count(|used| &mut used.namespaces, 1, MAX_NAMESPACES, ["makes", "namespaces"])?;
        namespace(defaults)
    });
    environment.remove_global("debug");
    // The results of `chain` are computed each time they are read. Jinja has neither filter.
    environment.remove_filter("chain");
    environment.remove_filter("lines");
    // minijinja iterates over null, and Python does not.
    environment.add_test("iterable", |value: &Value| !value.is_none() && value.try_iter().is_ok());
    // The length of an undefined value is zero.
    for name in ["length", "count"] {
        environment.add_filter(name, |value: &Value| match value.is_undefined() {
            true => Ok(0),
            false => filters::length(value),
        });
    }
    environment.add_filter("tojson", to_json);
    environment.add_filter("string", text);
    environment.add_filter("trim", |state: &State, args: Rest<Value>| {
        let first = args.first().map(|value| text(value.clone())).transpose()?;
        let args: Vec<Value> = first.into_iter().chain(args.iter().skip(1).cloned()).collect();
        Value::from_function(filters::trim).call(state, &args)
    });
    let mut replace = |name: &'static str, original: Value, check: fn(&[Value]) -> Limited<()>| {
        environment.add_filter(name, move |state: &State, args: Rest<Value>| {
            check(&args)?;
            original.call(state, &args)
        });
    };
    replace("indent", Value::from_function(filters::indent), |args| {
        let lines = args.first().and_then(Value::as_str).map_or(1, |text| text.split('\n').count());
        fits(lines as u64, largest(args))
    });
    replace("batch", Value::from_function(filters::batch), counts);
    replace("slice", Value::from_function(filters::slice), counts);
    replace("replace", Value::from_function(filters::replace), replaced);
    replace("join", Value::from_function(filters::join), |args| match args {
        [list, separator, ..] => joined(list, separator),
        _ => Ok(()),
    });
    replace("format", Value::from_function(filters::format), formatted);
    replace("split", Value::from_function(filters::split), split);
    replace("list", Value::from_function(filters::list), |args| match args.first().and_then(Value::as_str) {
        Some(text) => fits(text.len() as u64, VALUE_BYTES),
        None => Ok(()),
    });
    // Adding texts copies the sum each time.
    replace("sum", Value::from_function(filters::sum), |args| match args {
        [list, ..] => make(list.len().unwrap_or(0) as u64 * size(list, 0)?),
        [] => Ok(()),
    });
    environment.set_unknown_method_callback(|state, value, method, args| {
        let all = || [std::slice::from_ref(value), args].concat();
        match (method, args) {
            ("replace", _) => replaced(&all())?,
            ("format", _) => formatted(&all())?,
            ("split", _) => split(&all())?,
            ("splitlines", _) => split(&[value.clone(), Value::from("\n")])?,
            ("join", [list, ..]) => joined(list, value)?,
            // The original does not end.
            ("count", [part]) if part.as_str() == Some("") => {
                return Ok(value.as_str().map_or(0, |text| text.chars().count() + 1).into());
            }
            _ => {}
        }
        unknown_method_callback(state, value, method, args)
    });
}

fn fault(reason: String) -> Error {
    Error::new(ErrorKind::InvalidOperation, reason)
}

/// An error that a limit causes.
fn limit_fault(reason: String) -> Error {
    Error::new(ErrorKind::OutOfFuel, reason)
}

/// Returns a value, as a list if it is computed each time it is read, such as a slice.
fn listed(value: Value) -> Limited<Value> {
    let is_list = value.downcast_object_ref::<Vec<Value>>().is_some();
    match value.kind() {
        ValueKind::Seq | ValueKind::Iterable if !is_list => Ok(Value::from(value.try_iter()?.collect::<Vec<_>>())),
        _ => Ok(value),
    }
}

/// Measures a value, and returns its text as Python has it.
fn text(value: Value) -> Limited<Value> {
    make(size(&value, 0)?)?;
    let name = match value.kind() {
        ValueKind::String => return Ok(value),
        ValueKind::Bool => return Ok(Value::from(if value.is_true() { "True" } else { "False" })),
        ValueKind::None => return Ok(Value::from("None")),
        ValueKind::Seq | ValueKind::Iterable => "a list",
        ValueKind::Map => "an object",
        _ => return Ok(Value::from(value.to_string())),
    };
    Err(fault(format!("writes {name} where it expects a text: lists and objects are written only by `tojson`")))
}

/// Returns the bytes of a value, or an error if these are too many.
fn size(value: &Value, depth: usize) -> Limited<u64> {
    if depth > MAX_DEPTH {
        return Err(limit_fault(format!("makes a value that is nested more than {MAX_DEPTH} deep")));
    }
    let mut bytes = VALUE_BYTES + value.as_bytes().map_or(0, <[u8]>::len) as u64;
    let too_large = |bytes: u64| match bytes > MAX_BYTES {
        true => Err(limit_fault(format!("makes a value of more than {MAX_BYTES} bytes"))),
        false => Ok(()),
    };
    too_large(bytes)?;
    match value.kind() {
        ValueKind::Seq | ValueKind::Iterable => {
            for item in value.try_iter()? {
                bytes += size(&item, depth + 1)?;
                too_large(bytes)?;
            }
        }
        ValueKind::Map => {
            for (key, item) in value.as_object().and_then(|object| object.try_iter_pairs()).into_iter().flatten() {
                bytes += size(&key, depth + 1)? + size(&item, depth + 1)?;
                too_large(bytes)?;
            }
        }
        _ => {}
    }
    Ok(bytes)
}

/// Adds to a counter of this rendering, and checks its limit.
fn count(counter: fn(&mut Used) -> &mut u64, more: u64, limit: u64, [does, unit]: [&str; 2]) -> Limited<()> {
    let mut used = USED.get();
    let total = counter(&mut used);
    *total = total.saturating_add(more);
    let is_within = *total <= limit;
    USED.set(used);
    match is_within {
        true => Ok(()),
        false => Err(limit_fault(format!("{does} more than {limit} {unit}"))),
    }
}

fn make(bytes: u64) -> Limited<()> {
    count(|used| &mut used.made, bytes, MAX_MADE, ["makes values of", "bytes"])
}

/// Checks that a result of so many parts of so many bytes is not too large.
fn fits(parts: u64, bytes: u64) -> Limited<()> {
    match parts.saturating_mul(bytes) > MAX_BYTES {
        true => Err(limit_fault(format!("makes a value of more than {MAX_BYTES} bytes"))),
        false => Ok(()),
    }
}

/// Returns the largest number of a filter's arguments.
fn largest(args: &[Value]) -> u64 {
    let named = args.iter().skip(1).filter(|value| value.kind() == ValueKind::Map);
    let named = named.filter_map(Value::as_object).filter_map(|named| named.try_iter_pairs()).flatten();
    let all = args.iter().skip(1).cloned().chain(named.map(|(_, value)| value));
    let numbers = all.filter_map(|value| i128::try_from(value).ok());
    numbers.map(|number| u64::try_from(number.max(0)).unwrap_or(u64::MAX)).max().unwrap_or(0)
}

fn counts(args: &[Value]) -> Limited<()> {
    let count = largest(args);
    match count > MAX_COUNT {
        true => Err(limit_fault(format!("asks for {count} items, but may ask for at most {MAX_COUNT}"))),
        false => Ok(()),
    }
}

fn replaced(args: &[Value]) -> Limited<()> {
    let [text, from, to, ..] = args else { return Ok(()) };
    let [text, from, to] = [text, from, to].map(ToString::to_string);
    fits(text.matches(&from).count() as u64, to.len() as u64)
}

/// Checks the number of parts of a text.
fn split(args: &[Value]) -> Limited<()> {
    let Some(text) = args.first().and_then(Value::as_str) else { return Ok(()) };
    let parts = match args.get(1).and_then(Value::as_str) {
        Some(separator) => text.matches(separator).count(),
        None => text.split_whitespace().count(),
    };
    fits(parts as u64, VALUE_BYTES)
}

fn joined(list: &Value, separator: &Value) -> Limited<()> {
    fits(list.len().unwrap_or(0) as u64, separator.to_string().len() as u64)
}

/// Checks a format and its arguments: each place may have the largest argument.
fn formatted(args: &[Value]) -> Limited<()> {
    let [format, args @ ..] = args else { return Ok(()) };
    let format = format.to_string();
    let places = format.matches(['{', '%']).count() as u64;
    let mut bytes = 0;
    for argument in args {
        bytes += size(argument, 0)?;
    }
    let numbers = format.split(|letter: char| !letter.is_ascii_digit()).filter(|digits| !digits.is_empty());
    let widths = numbers.map(|digits| digits.parse::<u64>().unwrap_or(u64::MAX)).fold(0, u64::saturating_add);
    // A `*` takes its width from an argument.
    let starred = if format.contains('*') { largest(&[&[Value::UNDEFINED], args].concat()) } else { 0 };
    fits(places, bytes.saturating_add(starred))?;
    fits(1, widths)
}

/// The filter `tojson`. Other options of Python's `json.dumps` have no effect on plain values.
fn to_json(value: &Value, options: Kwargs) -> Limited<String> {
    let indent = options.get::<Option<usize>>("indent")?;
    for known in ["separators", "sort_keys"] {
        if options.has(known) {
            return Err(fault(format!("tojson: `{known}` is not supported")));
        }
    }
    let _ = options.get::<Option<bool>>("ensure_ascii")?;
    options.assert_all_used()?;
    if value.is_undefined() {
        return Err(fault("tojson: the value is undefined".into()));
    }
    size(value, 0)?;
    let value = serde_json::to_value(value).map_err(|reason| fault(format!("tojson: {reason}")))?;
    python_json::dumps(&value, indent, MAX_BYTES as usize)
        .ok_or_else(|| limit_fault(format!("tojson: makes a value of more than {MAX_BYTES} bytes")))
}

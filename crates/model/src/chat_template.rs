//! A conversation becomes the text of a prompt, by the Jinja template in the model file.
//!
//! Renders as Hugging Face transformers do (`apply_chat_template`): blocks take their line ends along,
//! `raise_exception` and `strftime_now` exist, `tojson` escapes nothing for HTML. A template is foreign
//! code: it has no access to anything but its input, and its work and memory are bounded.

use std::sync::mpsc::RecvTimeoutError;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Serde, Value, ValueKind};
use minijinja::{
    AutoEscape, Environment, Error, ErrorKind, Output, State, context, escape_formatter,
};
use minijinja_contrib::pycompat::unknown_method_callback;
use regex::Regex;
use serde::Serialize;

use crate::gguf::{Gguf, GgufError, Optional, escape};
use crate::tokenizer::Tokenizer;

/// Steps, or 64-byte pieces of data, that rendering may take: some thousands of messages, and well under a
/// second.
const FUEL: u64 = 250_000;

/// Stack of the thread that renders; only what is used becomes memory. A value may nest once per step, and
/// showing or dropping it takes up to 500 bytes of stack per level: twice that for every step.
const STACK_BYTES: usize = 1000 * FUEL as usize;

/// Time that rendering may take.
const TIME_MAX: Duration = Duration::from_secs(10);

/// Nested calls of macros and blocks; templates of the wild need fewer than 10.
const RECURSION_MAX: usize = 64;

/// Why a conversation cannot be rendered.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs)] // the message of each variant says what its fields are
pub enum ChatTemplateError {
    #[error(transparent)]
    Gguf(#[from] GgufError),
    #[error(
        "this model has no chat template (no tokenizer.chat_template); give one with --chat-template FILE"
    )]
    Missing,
    #[error("the chat template cannot be read: {reason}; give another with --chat-template FILE")]
    Syntax { reason: String },
    #[error("the chat template refuses this conversation: {reason}")]
    Refused { reason: String },
    #[error(
        "the chat template takes too much work or memory; give another with --chat-template FILE"
    )]
    Endless,
    #[error("the chat template fails: {reason}; give another with --chat-template FILE")]
    Failed { reason: String },
}

/// One message of a conversation. Any other type that serializes to a map will do as well.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Message {
    /// `system`, `user`, `assistant` or `tool`.
    pub role: String,
    /// What was said.
    pub content: String,
}

/// What a template renders besides the messages.
#[derive(Clone, Debug)]
pub struct Render {
    /// End with the words that make the model answer.
    pub add_generation_prompt: bool,
    /// Tools that the model may call: a JSON array of OpenAI's `tools`.
    pub tools: Option<serde_json::Value>,
    /// More variables for the template, such as `enable_thinking`.
    pub variables: serde_json::Map<String, serde_json::Value>,
    /// The time that `strftime_now` tells, in UTC.
    pub now: SystemTime,
}

impl Default for Render {
    /// A question: the generation prompt, no tools, the time of now.
    fn default() -> Render {
        Render {
            add_generation_prompt: true,
            tools: None,
            variables: serde_json::Map::new(),
            now: SystemTime::now(),
        }
    }
}

/// A compiled chat template.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    source: String,
    bos: String,
    eos: String,
}

impl ChatTemplate {
    /// The template in `file`, whose tokenizer is `tokenizer`. Fails with `ChatTemplateError::Missing` if
    /// there is none.
    pub fn from_gguf(file: &Gguf, tokenizer: &Tokenizer) -> Result<Self, ChatTemplateError> {
        let source = file.str("tokenizer.chat_template").optional()?;
        ChatTemplate::new(source.ok_or(ChatTemplateError::Missing)?, tokenizer)
    }

    /// Compiles `source`; `tokenizer` gives `bos_token` and `eos_token`.
    pub fn new(source: &str, tokenizer: &Tokenizer) -> Result<Self, ChatTemplateError> {
        let vocabulary = tokenizer.vocabulary();
        let text = |id: Option<u32>| id.and_then(|id| vocabulary.text(id)).unwrap_or_default();
        let special = vocabulary.special();
        ChatTemplate::with_tokens(source, text(special.bos), text(special.eos))
    }

    /// Compiles `source` for a model whose `bos_token` and `eos_token` are these texts.
    pub fn with_tokens(source: &str, bos: &str, eos: &str) -> Result<Self, ChatTemplateError> {
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        environment.set_syntax(syntax.map_err(failure)?);
        environment.set_auto_escape_callback(|_| AutoEscape::None);
        environment.set_unknown_method_callback(unknown_method_callback);
        environment.set_formatter(write_value);
        environment.set_recursion_limit(RECURSION_MAX);
        environment.add_function("raise_exception", raise_exception);
        environment.add_filter("tojson", to_json);
        let runnable = without_generation_tags(source);
        environment.add_template_owned("chat", runnable).map_err(|error| {
            let reason = one_line(&error);
            ChatTemplateError::Syntax { reason }
        })?;
        let source = source.to_owned();
        Ok(ChatTemplate { environment, source, bos: bos.to_owned(), eos: eos.to_owned() })
    }

    /// The template as it was given: what it mentions tells what it can show.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// The prompt for `messages`. Most templates begin it with the BOS token: tokenize it with the
    /// special tokens parsed, and without adding another.
    pub fn render(
        &self,
        messages: &[impl Serialize],
        options: &Render,
    ) -> Result<String, ChatTemplateError> {
        let mut environment = self.environment.clone();
        let now = options.now;
        environment.add_function("strftime_now", move |format: &str| strftime(format, now));
        environment.set_fuel(Some(FUEL));
        let own = context! {
            messages => Value::from(Serde(messages)),
            tools => options.tools.as_ref().map(|tools| Value::from(Serde(tools))),
            documents => Value::from(()),
            add_generation_prompt => options.add_generation_prompt,
            bos_token => self.bos.as_str(),
            eos_token => self.eos.as_str(),
        };
        let variables = context! { ..own, ..Value::from(Serde(&options.variables)) };
        within_bounds(move || {
            let rendered = environment.get_template("chat").and_then(|chat| chat.render(variables));
            rendered.map_err(failure)
        })
    }
}

/// Runs `render` with its own deep stack and waits for it at most [`TIME_MAX`]: fuel does not count what
/// some operators (`==`, `~`) do with a list that holds another many times over.
fn within_bounds(
    render: impl FnOnce() -> Result<String, ChatTemplateError> + Send + 'static,
) -> Result<String, ChatTemplateError> {
    let (sender, receiver) = std::sync::mpsc::sync_channel(1);
    // A receiver that has gone away waits for nothing.
    let run = move || drop(sender.send(render()));
    let failed = |reason: String| ChatTemplateError::Failed { reason };
    std::thread::Builder::new()
        .stack_size(STACK_BYTES)
        .spawn(run)
        .map_err(|error| failed(format!("no thread for it: {error}")))?;
    match receiver.recv_timeout(TIME_MAX) {
        Ok(outcome) => outcome,
        Err(RecvTimeoutError::Timeout) => Err(ChatTemplateError::Endless),
        Err(RecvTimeoutError::Disconnected) => Err(failed("its interpreter panicked".to_owned())),
    }
}

/// Writes a value that stands in `{{ }}`; a list or map only after fuel has paid for all it holds, since
/// a small one may hold itself many times over.
fn write_value(
    out: &mut Output<'_>,
    state: &mut State<'_, '_>,
    value: &Value,
) -> Result<(), Error> {
    pay(state, value)?;
    escape_formatter(out, state, value)
}

fn pay(state: &State<'_, '_>, value: &Value) -> Result<(), Error> {
    match value.kind() {
        ValueKind::Map => {
            for key in value.try_iter()? {
                state.consume_fuel(1)?;
                pay(state, &value.get_item(&key)?)?;
            }
        }
        ValueKind::Seq => {
            for item in value.try_iter()? {
                state.consume_fuel(1)?;
                pay(state, &item)?;
            }
        }
        _ => {}
    }
    Ok(())
}

/// `source` with the tags that only mark what a model is trained on turned into ones that do nothing.
fn without_generation_tags(source: &str) -> String {
    let tag = Regex::new(r"(\{%[-+]?\s*)(end)?generation(\s*[-+]?%\})").expect("a constant");
    let replaced = tag.replace_all(source, |found: &regex::Captures<'_>| {
        let word = if found.get(2).is_some() { "endif" } else { "if true" };
        format!("{}{word}{}", &found[1], &found[3])
    });
    replaced.into_owned()
}

/// The error that `raise_exception` leaves as a source, to tell a refusal from a failure.
#[derive(Debug, thiserror::Error)]
#[error("raised by the template")]
struct Raised;

fn raise_exception(message: &str) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, message.to_owned()).with_source(Raised))
}

fn failure(error: Error) -> ChatTemplateError {
    let mut source = std::error::Error::source(&error);
    while let Some(cause) = source {
        if cause.is::<Raised>() {
            let reason = escape(error.detail().unwrap_or("no reason given"));
            return ChatTemplateError::Refused { reason };
        }
        source = cause.source();
    }
    match error.kind() {
        ErrorKind::OutOfFuel => ChatTemplateError::Endless,
        _ => ChatTemplateError::Failed { reason: one_line(&error) },
    }
}

fn one_line(error: &Error) -> String {
    escape(&format!("{error}"))
}

/// Levels of lists and maps that `tojson` writes, as many as serde_json reads.
const JSON_DEPTH_MAX: usize = 128;

/// `tojson` as transformers have it: Python's `json.dumps` with `ensure_ascii=False`.
fn to_json(
    state: &State<'_, '_>,
    value: &Value,
    indent: Option<usize>,
    options: Kwargs,
) -> Result<String, Error> {
    let indent = options.get::<Option<usize>>("indent")?.or(indent);
    let separators = options.get::<Option<Vec<String>>>("separators")?;
    let sorts_keys = options.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    let ensures_ascii = options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false);
    options.assert_all_used()?;
    let (comma, colon) = match separators.as_deref() {
        None => (if indent.is_some() { "," } else { ", " }, ": "),
        Some([comma, colon]) => (comma.as_str(), colon.as_str()),
        Some(_) => return Err(Error::new(ErrorKind::InvalidOperation, "separators must be two")),
    };
    let mut json =
        Json { state, out: String::new(), indent, comma, colon, sorts_keys, ensures_ascii };
    json.write(value, 0)?;
    Ok(json.out)
}

/// A JSON text being written.
struct Json<'a> {
    state: &'a State<'a, 'a>,
    out: String,
    indent: Option<usize>,
    comma: &'a str,
    colon: &'a str,
    sorts_keys: bool,
    ensures_ascii: bool,
}

impl Json<'_> {
    fn write(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > JSON_DEPTH_MAX {
            return Err(Error::new(ErrorKind::InvalidOperation, "too deeply nested for tojson"));
        }
        // A small value may hold itself many times over, so pay for each visit.
        self.state.consume_fuel(1)?;
        match value.kind() {
            ValueKind::Undefined | ValueKind::None => self.out.push_str("null"),
            ValueKind::Bool => self.out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => self.out.push_str(&value.to_string()),
            ValueKind::Map => {
                let mut keys = value.try_iter()?.collect::<Vec<_>>();
                if self.sorts_keys {
                    keys.sort();
                }
                self.write_items(['{', '}'], &keys, depth, |json, key| {
                    json.write_str(&key.to_string());
                    json.out.push_str(json.colon);
                    json.write(&value.get_item(key)?, depth + 1)
                })?;
            }
            ValueKind::Seq | ValueKind::Iterable => {
                let items = value.try_iter()?.collect::<Vec<_>>();
                self.write_items(['[', ']'], &items, depth, |json, item| {
                    json.write(item, depth + 1)
                })?;
            }
            _ => self.write_str(&value.to_string()),
        }
        Ok(())
    }

    fn write_items(
        &mut self,
        [open, close]: [char; 2],
        items: &[Value],
        depth: usize,
        mut write: impl FnMut(&mut Self, &Value) -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.out.push(open);
        for (index, item) in items.iter().enumerate() {
            if index > 0 {
                self.out.push_str(self.comma);
            }
            self.start_line(depth + 1);
            write(self, item)?;
        }
        if !items.is_empty() {
            self.start_line(depth);
        }
        self.out.push(close);
        Ok(())
    }

    fn start_line(&mut self, depth: usize) {
        if let Some(indent) = self.indent {
            self.out.push('\n');
            self.out.extend(std::iter::repeat_n(' ', indent.saturating_mul(depth).min(4096)));
        }
    }

    fn write_str(&mut self, text: &str) {
        self.out.push('"');
        for char in text.chars() {
            match char {
                '"' => self.out.push_str("\\\""),
                '\\' => self.out.push_str("\\\\"),
                '\n' => self.out.push_str("\\n"),
                '\r' => self.out.push_str("\\r"),
                '\t' => self.out.push_str("\\t"),
                '\u{8}' => self.out.push_str("\\b"),
                '\u{c}' => self.out.push_str("\\f"),
                char if char < ' ' || (self.ensures_ascii && !char.is_ascii()) => {
                    for unit in char.encode_utf16(&mut [0; 2]) {
                        self.out.push_str(&format!("\\u{unit:04x}"));
                    }
                }
                char => self.out.push(char),
            }
        }
        self.out.push('"');
    }
}

const WEEKDAYS: [&str; 7] =
    ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];
const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];

/// `strftime` of `now` in UTC, for the codes that name dates and times; others stay as they are.
fn strftime(format: &str, now: SystemTime) -> String {
    let seconds = now.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let days = seconds / 86_400;
    let (year, month, day) = date(days);
    let (hour, minute, second) = (seconds / 3600 % 24, seconds / 60 % 60, seconds % 60);
    let (weekday, month_name) = (WEEKDAYS[(days + 4) as usize % 7], MONTHS[month as usize - 1]);
    let hour12 = (hour + 11) % 12 + 1;
    let mut text = String::new();
    let mut chars = format.chars();
    while let Some(char) = chars.next() {
        if char != '%' {
            text.push(char);
            continue;
        }
        let code = chars.next().unwrap_or('%');
        // glibc's `%-d`: without padding.
        let (plain, code) =
            if code == '-' { (true, chars.next().unwrap_or('-')) } else { (false, code) };
        let two = |number: u64| if plain { number.to_string() } else { format!("{number:02}") };
        text += &match code {
            'Y' => year.to_string(),
            'y' => two(year % 100),
            'm' => two(month),
            'd' => two(day),
            'e' => format!("{day:2}"),
            'H' => two(hour),
            'I' => two(hour12),
            'M' => two(minute),
            'S' => two(second),
            'p' => if hour < 12 { "AM" } else { "PM" }.to_owned(),
            'B' => month_name.to_owned(),
            'b' | 'h' => month_name[..3].to_owned(),
            'A' => weekday.to_owned(),
            'a' => weekday[..3].to_owned(),
            'F' => format!("{year}-{month:02}-{day:02}"),
            'T' => format!("{hour:02}:{minute:02}:{second:02}"),
            'Z' => "UTC".to_owned(),
            'z' => "+0000".to_owned(),
            '%' => "%".to_owned(),
            other => format!("%{other}"),
        };
    }
    text
}

/// Year, month (1 to 12) and day (1 to 31) of the day `days` after 1970-01-01, in the Gregorian calendar
/// (Howard Hinnant, "chrono-compatible low-level date algorithms", `civil_from_days`).
fn date(days: u64) -> (u64, u64, u64) {
    let days = days + 719_468; // since 0000-03-01: years that begin in March end with the leap day
    let (era, of_era) = (days / 146_097, days % 146_097);
    let year = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year + year / 4 - year / 100);
    let month = (5 * of_year + 2) / 153;
    let day = of_year - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    (era * 400 + year + u64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_right() {
        let at = |seconds| {
            strftime(
                "%d %b %Y %H:%M:%S %A %-d|%I %p|%q%%",
                UNIX_EPOCH + Duration::from_secs(seconds),
            )
        };
        assert_eq!(at(0), "01 Jan 1970 00:00:00 Thursday 1|12 AM|%q%");
        assert_eq!(at(951_782_400), "29 Feb 2000 00:00:00 Tuesday 29|12 AM|%q%");
        assert_eq!(at(1_732_889_133), "29 Nov 2024 14:05:33 Friday 29|02 PM|%q%");
    }

    #[test]
    fn generation_tags_become_tags_that_do_nothing() {
        let source = "{%- generation %}a{% endgeneration -%} b {% generation_x %}";
        assert_eq!(
            without_generation_tags(source),
            "{%- if true %}a{% endif -%} b {% generation_x %}"
        );
    }
}

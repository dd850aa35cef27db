//! How models write calls: the syntax that their chat template teaches them.

use super::reader::overlap;

/// A syntax of calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, several after each other: Hermes, Qwen,
    /// SmolLM3.
    Hermes,
    /// The whole answer is `{"name": ..., "parameters": {...}}`, after an optional `<|python_tag|>`;
    /// several are parted by `;`: Llama 3.
    Llama3,
    /// `[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`: Mistral before 2025.
    Mistral,
    /// `[TOOL_CALLS]name[ARGS]{...}`: Mistral since.
    MistralNamed,
}

/// What stands between a tag and the object of a call.
pub(super) enum Before {
    /// More text is needed.
    Unclear,
    /// It is no call.
    NoCall,
    /// The object begins.
    Object {
        /// Bytes before it.
        at: usize,
        /// The name, where the object is only the arguments.
        name: Option<String>,
    },
}

/// Longest name that may stand before `[ARGS]`.
const NAME_BYTES_MAX: usize = 256;

/// Stands between name and arguments.
const ARGUMENTS: &str = "[ARGS]";

impl Family {
    /// The syntax that the chat template with this source teaches; `None`: it shows no tools, or in a syntax
    /// that is not known.
    pub fn of_template(source: &str) -> Option<Family> {
        let has = |text: &str| source.contains(text);
        // `<function=` within the same tag is Qwen3-Coder's, which is no JSON.
        if !has("tools") || has("<function=") {
            return None;
        }
        if has("[TOOL_CALLS]") {
            return Some(if has(ARGUMENTS) { Family::MistralNamed } else { Family::Mistral });
        }
        if has("<tool_call>") {
            return Some(Family::Hermes);
        }
        let is_llama = has("<|python_tag|>") || has("<|start_header_id|>");
        (is_llama && has("parameters")).then_some(Family::Llama3)
    }

    /// The tag that begins a call.
    pub(super) fn open(self) -> &'static str {
        match self {
            Family::Hermes => "<tool_call>",
            Family::Llama3 => "<|python_tag|>",
            Family::Mistral | Family::MistralNamed => "[TOOL_CALLS]",
        }
    }

    /// Whether every call has a tag; else only the names of functions tell calls from JSON.
    pub(super) fn is_marked(self) -> bool {
        self != Family::Llama3
    }

    /// Reads what follows a tag, or the sign between two calls.
    pub(super) fn before(self, text: &str) -> Before {
        let is_mistral = matches!(self, Family::Mistral | Family::MistralNamed);
        let mut rest = text.trim_start();
        if is_mistral && let Some(list) = rest.strip_prefix('[') {
            rest = list.trim_start();
        }
        let at = text.len() - rest.len();
        match rest.chars().next() {
            None => Before::Unclear,
            Some('{') => Before::Object { at, name: None },
            Some(_) if is_mistral => named(text),
            Some(_) => Before::NoCall,
        }
    }

    /// Reads what follows a call: bytes to skip, and whether another call follows at once. `None`: more text
    /// is needed.
    pub(super) fn after(self, text: &str) -> Option<(usize, bool)> {
        let rest = text.trim_start();
        let at = text.len() - rest.len();
        let first = rest.chars().next()?;
        match (self, first) {
            (Family::Hermes, _) => {
                const CLOSE: &str = "</tool_call>";
                if rest.starts_with(CLOSE) {
                    return Some((at + CLOSE.len(), false));
                }
                (overlap(rest, CLOSE) < rest.len()).then_some((at, false))
            }
            (Family::Llama3, ';') | (Family::Mistral, ',') => Some((at + 1, true)),
            (Family::Mistral, ']') => Some((at + 1, false)),
            _ => Some((0, false)),
        }
    }
}

/// `name[ARGS]{`, or `name[CALL_ID]id[ARGS]{`.
fn named(text: &str) -> Before {
    let Some(end) = text.find(ARGUMENTS) else {
        let may_be_name = text.len() < NAME_BYTES_MAX && !text.contains('\n');
        return if may_be_name { Before::Unclear } else { Before::NoCall };
    };
    let name = text[..end].split('[').next().unwrap_or_default().trim();
    let rest = text[end + ARGUMENTS.len()..].trim_start();
    match rest.chars().next() {
        None => Before::Unclear,
        Some('{') if !name.is_empty() => {
            Before::Object { at: text.len() - rest.len(), name: Some(name.to_owned()) }
        }
        Some(_) => Before::NoCall,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn templates_are_told_by_what_they_teach() {
        let of = Family::of_template;
        assert_eq!(of("{% for message in messages %}{{ message.content }}{% endfor %}"), None);
        assert_eq!(of("{%- if tools %}... <tool_call>\\n{\"name\": ..."), Some(Family::Hermes));
        assert_eq!(of("{% if tools %}<tool_call>\\n<function=x>"), None);
        assert_eq!(of("{% if tools %}[AVAILABLE_TOOLS] [TOOL_CALLS]"), Some(Family::Mistral));
        assert_eq!(of("{% if tools %}[TOOL_CALLS]f[ARGS]{}"), Some(Family::MistralNamed));
        let llama = "<|start_header_id|> {% if tools %}{\"name\": n, \"parameters\": d}";
        assert_eq!(of(llama), Some(Family::Llama3));
        assert_eq!(of("{% if tools %}{{ tools | tojson }}{% endif %}"), None);
    }
}

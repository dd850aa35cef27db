//! Calls of tools, out of the text that a model writes, as it comes.

use serde_json::Value;

use super::family::{Before, Family};
use super::scanner::CallScanner;

/// What is known now that more text has come.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Read {
    /// Text that belongs to no call.
    pub content: String,
    /// Calls that begin, and arguments of calls that go on.
    pub calls: Vec<CallDelta>,
}

/// The beginning of a call, or more of its arguments.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CallDelta {
    /// Which call of the answer.
    pub index: u32,
    /// Where it begins: the function's name.
    pub name: Option<String>,
    /// More of its arguments, which are JSON when all are there.
    pub arguments: String,
}

impl Read {
    /// Adds what came after it.
    pub fn add(&mut self, later: Read) {
        self.content += &later.content;
        for call in later.calls {
            match self.calls.last_mut().filter(|last| last.index == call.index) {
                Some(last) => last.arguments += &call.arguments,
                None => self.calls.push(call),
            }
        }
    }

    /// Adds to the `count`-th call, unless that is more than `most`.
    fn push(&mut self, count: usize, most: usize, name: Option<String>, arguments: String) {
        if count > most || (name.is_none() && arguments.is_empty()) {
            return;
        }
        let index = count as u32 - 1;
        match self.calls.last_mut().filter(|call| call.index == index) {
            Some(call) => call.arguments += &arguments,
            None => self.calls.push(CallDelta { index, name, arguments }),
        }
    }
}

/// Takes calls out of a text. Text that may be the beginning of a call is held back until it is clear, so
/// that no part of a tag is ever taken for content.
#[derive(Clone, Debug)]
pub struct CallReader {
    family: Family,
    /// Functions that may be called.
    names: Vec<String>,
    /// Calls given out at most.
    most: usize,
    state: State,
    /// Text that was not looked at, or not decided on.
    pending: String,
    /// What was read since the tag that began the call, as it stood: content if it is none.
    raw: String,
    /// Spaces that are content only if content follows.
    spaces: String,
    /// Calls begun.
    count: usize,
    has_content: bool,
}

#[derive(Clone, Debug)]
enum State {
    /// In text.
    Content,
    /// Behind the tag, before the call.
    Before,
    /// In the object of a call; whether its beginning was given out.
    Call(Box<CallScanner>, bool),
    /// Behind a call.
    After,
}

impl CallReader {
    /// A reader at the start of an answer.
    pub(super) fn new(family: Family, names: Vec<String>, most: usize) -> CallReader {
        CallReader {
            family,
            names,
            most,
            state: State::Content,
            pending: String::new(),
            raw: String::new(),
            spaces: String::new(),
            count: 0,
            has_content: false,
        }
    }

    /// Whether any call was given out.
    pub fn has_calls(&self) -> bool {
        self.count > 0
    }

    /// Takes more text.
    pub fn push(&mut self, text: &str) -> Read {
        self.pending.push_str(text);
        let mut read = Read::default();
        while self.step(&mut read) {}
        read
    }

    /// The end of the text: what was held back for a call that did not come is content.
    pub fn finish(&mut self) -> Read {
        let mut read = Read::default();
        let held = std::mem::take(&mut self.pending);
        match std::mem::replace(&mut self.state, State::Content) {
            State::Content => self.tell(&held, &mut read),
            // Cut off in its arguments: as much of them as there is was told.
            State::Call(_, true) => {}
            State::Call(scanner, false) => {
                let raw = std::mem::take(&mut self.raw) + scanner.text() + &held;
                self.tell(&raw, &mut read);
            }
            State::Before => {
                let raw = std::mem::take(&mut self.raw) + &held;
                self.tell(&raw, &mut read);
            }
            // Part of the closing tag, or spaces before it.
            State::After => {}
        }
        if self.count == 0 {
            read.content += &std::mem::take(&mut self.spaces);
        }
        read
    }

    /// One step; `false`: more text is needed.
    fn step(&mut self, read: &mut Read) -> bool {
        match self.state {
            State::Content => self.step_content(read),
            State::Before => self.step_before(read),
            State::Call(..) => self.step_call(read),
            State::After => self.step_after(),
        }
    }

    fn step_content(&mut self, read: &mut Read) -> bool {
        if !self.family.is_marked() && !self.has_content && self.count == 0 {
            let spaces = self.pending.len() - self.pending.trim_start().len();
            match self.pending[spaces..].chars().next() {
                None => return false,
                Some('{') => {
                    self.raw = self.pending.drain(..spaces).collect();
                    self.state = State::Before;
                    return true;
                }
                Some(_) => {}
            }
        }
        let tag = self.family.open();
        let found = self.pending.find(tag);
        let end = found.unwrap_or_else(|| self.pending.len() - overlap(&self.pending, tag));
        let text: String = self.pending.drain(..end).collect();
        self.tell(&text, read);
        if found.is_some() {
            self.raw = self.pending.drain(..tag.len()).collect();
            self.state = State::Before;
        }
        found.is_some()
    }

    /// Between the tag and the object.
    fn step_before(&mut self, read: &mut Read) -> bool {
        match self.family.before(&self.pending) {
            Before::Unclear => return false,
            Before::NoCall => {
                self.state = State::Content;
                let raw = std::mem::take(&mut self.raw);
                self.tell(&raw, read);
            }
            Before::Object { at, name } => {
                self.raw.extend(self.pending.drain(..at));
                let scanner = name.map(CallScanner::named).unwrap_or_default();
                self.state = State::Call(Box::new(scanner), false);
            }
        }
        true
    }

    fn step_call(&mut self, read: &mut Read) -> bool {
        let State::Call(scanner, begun) = &mut self.state else { return false };
        let mut chars = self.pending.char_indices();
        let ended = chars.find_map(|(at, c)| scanner.push(c).then_some(at + c.len_utf8()));
        self.pending.drain(..ended.unwrap_or(self.pending.len()));
        if !*begun
            && let Some(name) = scanner.name()
            && (self.family.is_marked() || self.names.iter().any(|known| known == name))
        {
            *begun = true;
            self.count += 1;
            let name = Some(name.to_owned());
            read.push(self.count, self.most, name, String::new());
        }
        if *begun {
            read.push(self.count, self.most, None, scanner.take_arguments());
        }
        if ended.is_some() {
            self.end_call(read);
        }
        ended.is_some()
    }

    fn end_call(&mut self, read: &mut Read) {
        let State::Call(scanner, false) = std::mem::replace(&mut self.state, State::After) else {
            return;
        };
        let is_known = |name: &String| self.family.is_marked() || self.names.contains(name);
        match whole_call(scanner.text()).filter(|(name, _)| is_known(name)) {
            Some((name, arguments)) => {
                self.count += 1;
                read.push(self.count, self.most, Some(name), arguments);
            }
            None => {
                let raw = std::mem::take(&mut self.raw) + scanner.text();
                self.state = State::Content;
                self.tell(&raw, read);
            }
        }
    }

    fn step_after(&mut self) -> bool {
        let Some((used, state)) = self.family.after(&self.pending) else { return false };
        self.raw = self.pending.drain(..used).collect();
        self.state = if state { State::Before } else { State::Content };
        true
    }

    /// Tells content, less the spaces around calls.
    fn tell(&mut self, text: &str, read: &mut Read) {
        self.spaces.push_str(text);
        let end = self.spaces.trim_end().len();
        if end == 0 {
            if self.count > 0 {
                self.spaces.clear();
            }
            return;
        }
        self.has_content = true;
        let rest = self.spaces.split_off(end);
        read.content += &std::mem::replace(&mut self.spaces, rest);
    }
}

/// Name and arguments of a call that is all there; a call without arguments has `{}`.
fn whole_call(text: &str) -> Option<(String, String)> {
    let call: Value = serde_json::from_str(text).ok()?;
    let name = call.get("name")?.as_str()?.to_owned();
    let arguments = match call.get("arguments").or_else(|| call.get("parameters")) {
        None | Some(Value::Null) => "{}".to_owned(),
        // Some models write the arguments as a text of JSON.
        Some(Value::String(text)) => text.clone(),
        Some(arguments) => arguments.to_string(),
    };
    Some((name, arguments))
}

/// Bytes of the longest proper prefix of `tag` that `text` ends with.
pub(super) fn overlap(text: &str, tag: &str) -> usize {
    let longest = text.len().min(tag.len() - 1);
    (1..=longest)
        .rev()
        .find(|n| tag.is_char_boundary(*n) && text.ends_with(&tag[..*n]))
        .unwrap_or(0)
}

//! The JSON object of a call while it is being written.

/// What is known of a call so far. Only brackets and strings are followed; whether it is JSON shows at its
/// end.
#[derive(Clone, Debug, Default)]
pub(super) struct CallScanner {
    text: String,
    depth: usize,
    in_string: bool,
    is_escaped: bool,
    /// Where the string or the value being read begins.
    string_start: usize,
    value_start: Option<usize>,
    /// The key whose value is being read, at the outermost level.
    key: String,
    is_after_colon: bool,
    name: Option<String>,
    /// Where the arguments begin, and end once they have.
    arguments: Option<(usize, Option<usize>)>,
    /// Bytes of the arguments that were taken.
    taken: usize,
    /// The object that is read is only the arguments: see [`CallScanner::named`].
    is_named: bool,
}

impl CallScanner {
    /// For a call whose name stood before the object, which is its arguments.
    pub(super) fn named(name: String) -> CallScanner {
        let mut scanner = CallScanner::default();
        let head = format!("{{\"name\":{},\"arguments\":", serde_json::Value::from(name));
        for c in head.chars() {
            scanner.push(c);
        }
        CallScanner { is_named: true, ..scanner }
    }

    /// Takes the next character, the first of which is `{`. `true`: it closes the object.
    pub(super) fn push(&mut self, c: char) -> bool {
        let at = self.text.len();
        self.text.push(c);
        if self.in_string {
            self.push_in_string(c, at);
            return false;
        }
        if self.depth == 1 && self.is_after_colon && self.value_start.is_none() {
            self.begin_value(c, at);
        }
        match c {
            '"' => (self.in_string, self.string_start) = (true, at),
            '{' | '[' => self.depth += 1,
            '}' | ']' => {
                self.depth = self.depth.saturating_sub(1);
                if self.depth == 1 {
                    self.end_arguments(at + 1);
                }
            }
            ':' if self.depth == 1 => (self.is_after_colon, self.value_start) = (true, None),
            ',' if self.depth == 1 => self.is_after_colon = false,
            _ => {}
        }
        self.depth == usize::from(self.is_named)
    }

    fn push_in_string(&mut self, c: char, at: usize) {
        match c {
            _ if self.is_escaped => self.is_escaped = false,
            '\\' => self.is_escaped = true,
            '"' => {
                self.in_string = false;
                if self.depth == 1 {
                    self.end_string(at + 1);
                }
            }
            _ => {}
        }
    }

    /// A string at the outermost level is over: a key, or a value.
    fn end_string(&mut self, end: usize) {
        let text = serde_json::from_str(&self.text[self.string_start..end]).unwrap_or_default();
        match self.is_after_colon {
            false => self.key = text,
            true if self.key == "name" => self.name = Some(text),
            true => {}
        }
    }

    fn begin_value(&mut self, c: char, at: usize) {
        if c.is_whitespace() {
            return;
        }
        self.value_start = Some(at);
        if c == '{' && matches!(self.key.as_str(), "arguments" | "parameters") {
            self.arguments.get_or_insert((at, None));
        }
    }

    fn end_arguments(&mut self, end: usize) {
        if let Some((start, None)) = self.arguments
            && self.value_start == Some(start)
        {
            self.arguments = Some((start, Some(end)));
        }
    }

    /// The name of the function, as soon as arguments follow that can be given out as they come.
    pub(super) fn name(&self) -> Option<&str> {
        self.name.as_deref().filter(|_| self.arguments.is_some())
    }

    /// Arguments that were not taken yet.
    pub(super) fn take_arguments(&mut self) -> String {
        let Some((start, end)) = self.arguments else { return String::new() };
        let all = &self.text[start..end.unwrap_or(self.text.len())];
        let fresh = all[self.taken..].to_owned();
        self.taken = all.len();
        fresh
    }

    /// All of it as it was written.
    pub(super) fn text(&self) -> &str {
        &self.text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scan(text: &str) -> (CallScanner, String, bool) {
        let mut scanner = CallScanner::default();
        let mut arguments = String::new();
        let mut ended = false;
        for c in text.chars() {
            assert!(!ended, "nothing after the end");
            ended = scanner.push(c);
            if scanner.name().is_some() {
                arguments += &scanner.take_arguments();
            }
        }
        (scanner, arguments, ended)
    }

    #[test]
    fn name_and_arguments_are_found_in_any_order_and_depth() {
        let (scanner, arguments, ended) = scan(
            r#"{"name": "a\"b", "arguments": {"x": [1, {"name": "no }"}], "y": "{"} , "z": 1}"#,
        );
        assert_eq!((scanner.name(), ended), (Some("a\"b"), true));
        assert_eq!(arguments, r#"{"x": [1, {"name": "no }"}], "y": "{"}"#);
        let (scanner, arguments, ended) = scan(r#"{"parameters":{"name":"é"},"name":"f"}"#);
        assert_eq!((scanner.name(), ended), (Some("f"), true));
        assert_eq!(arguments, r#"{"name":"é"}"#);
    }

    #[test]
    fn arguments_come_before_the_end() {
        let (scanner, arguments, ended) = scan(r#"{"name": "f", "arguments": {"x": "half"#);
        assert_eq!((scanner.name(), ended), (Some("f"), false));
        assert_eq!(arguments, r#"{"x": "half"#);
    }

    #[test]
    fn other_objects_are_no_calls() {
        for text in
            [r#"{"name": "f"}"#, r#"{"name": 3, "arguments": {}}"#, r#"{"x": {"name": "f"}}"#]
        {
            let (scanner, _, ended) = scan(text);
            assert_eq!((scanner.name(), ended), (None, true), "{text}");
        }
    }
}

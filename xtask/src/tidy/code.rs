//! Rust source without its words: comments and literals become blanks, lines stay where they are, so
//! that simple searches and brace counts are right.

/// The source with comments and the inside of string and character literals blanked.
pub fn blank(source: &str) -> String {
    let text: Vec<char> = source.chars().collect();
    let mut blanked = String::with_capacity(source.len());
    let mut at = 0;
    while at < text.len() {
        let end = at + literal_length(&text[at..], at.checked_sub(1).map(|before| text[before]));
        if end == at {
            blanked.push(text[at]);
            at += 1;
            continue;
        }
        blanked.extend(text[at..end].iter().map(|&c| if c == '\n' { '\n' } else { ' ' }));
        at = end;
    }
    blanked
}

/// Length of the comment or literal that starts here; 0 if none does.
fn literal_length(text: &[char], before: Option<char>) -> usize {
    let next = text.get(1).copied();
    match (text[0], next) {
        ('/', Some('/')) => text.iter().position(|&c| c == '\n').unwrap_or(text.len()),
        ('/', Some('*')) => block_comment_length(text),
        ('"', _) => quoted_length(text),
        ('r', Some('"' | '#'))
            if !before.is_some_and(|c| c.is_alphanumeric() && c != 'b' || c == '_') =>
        {
            raw_string_length(text)
        }
        // A lifetime has no closing quote after one character.
        ('\'', Some('\\')) => quoted_length(text),
        ('\'', Some(_)) if text.get(2) == Some(&'\'') => 3,
        _ => 0,
    }
}

fn block_comment_length(text: &[char]) -> usize {
    let mut depth = 0;
    let mut at = 0;
    while at < text.len() {
        match (text[at], text.get(at + 1)) {
            ('/', Some('*')) => depth += 1,
            ('*', Some('/')) => depth -= 1,
            _ => {
                at += 1;
                continue;
            }
        }
        at += 2;
        if depth == 0 {
            break;
        }
    }
    at
}

/// Length up to the next quote of the first character's kind that no backslash escapes.
fn quoted_length(text: &[char]) -> usize {
    let mut at = 1;
    while at < text.len() && text[at] != text[0] {
        at += if text[at] == '\\' { 2 } else { 1 };
    }
    (at + 1).min(text.len())
}

fn raw_string_length(text: &[char]) -> usize {
    let hashes = text[1..].iter().take_while(|&&c| c == '#').count();
    if text.get(1 + hashes) != Some(&'"') {
        return 0; // a raw identifier
    }
    let closes = |at: usize| {
        text[at] == '"'
            && text[at + 1..].iter().take(hashes).filter(|&&c| c == '#').count() == hashes
    };
    let start = 2 + hashes;
    (start..text.len()).find(|&at| closes(at)).map_or(text.len(), |at| at + 1 + hashes)
}

/// A function with a body: its name, the line of its `fn` (from 1) and its lines to the closing brace.
#[derive(Debug, PartialEq)]
pub struct Function {
    /// Its name, without the path.
    pub name: String,
    /// Where `fn` stands.
    pub line: usize,
    /// From `fn` to the closing brace.
    pub lines: usize,
}

/// All functions with a body in blanked source, nested ones too.
pub fn functions(blanked: &str) -> Vec<Function> {
    let mut found = Vec::new();
    for (start, _) in blanked.match_indices("fn ") {
        let before = blanked[..start].chars().next_back();
        if before.is_some_and(|c| c.is_alphanumeric() || c == '_') {
            continue; // the end of a longer word
        }
        let rest = &blanked[start + 3..];
        let name: String = rest.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
        if let (false, Some(length)) = (name.is_empty(), body_end(rest)) {
            let line = blanked[..start].matches('\n').count() + 1;
            let lines = rest[..length].matches('\n').count() + 1;
            found.push(Function { name, line, lines });
        }
    }
    found
}

/// Bytes up to the brace that closes the body; `None` for a function without one.
fn body_end(rest: &str) -> Option<usize> {
    let mut brackets = 0_i32;
    let mut braces = 0_i32;
    for (at, c) in rest.char_indices() {
        match c {
            '(' | '[' => brackets += 1,
            ')' | ']' => brackets -= 1,
            ';' if brackets == 0 && braces == 0 => return None,
            '{' => braces += 1,
            '}' => {
                braces -= 1;
                if braces == 0 && brackets == 0 {
                    return Some(at);
                }
            }
            _ => {}
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_blanked_and_lines_stay() {
        let source = "a // {\nb /* { /* } */\n*/ c \"{\\\"\" r#\"\"{\"# 'x' '\\'' <'a> '{'";
        let blanked = blank(source);
        assert_eq!(blanked.lines().count(), source.lines().count());
        let words: Vec<&str> = blanked.split_whitespace().collect();
        assert_eq!(words, ["a", "b", "c", "<'a>"]);
    }

    #[test]
    fn functions_are_measured() {
        let source = "trait T { fn none(&self) -> [u8; 4]; }\npub fn two(a: [u8; 2]) -> u8 {\n { 1 } }\nfn one() {}\n";
        let found = functions(&blank(source));
        let want = |name: &str, line, lines| Function { name: name.into(), line, lines };
        assert_eq!(found, [want("two", 2, 2), want("one", 4, 1)]);
    }
}

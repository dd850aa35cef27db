//! Grammars in GBNF, llama.cpp's notation (its `grammars/README.md`) and XGrammar's EBNF, as Lark.
//!
//! `root ::= "a" [b-c]+ other{1,3}`: names may have dashes, literals and classes stand in rules, lines go
//! on within parentheses and until the next `name ::=`.

use std::collections::{HashMap, HashSet};
use std::fmt::Write;

/// Whether `grammar` is GBNF and not Lark, which has no `::=`.
pub(super) fn is_gbnf(grammar: &str) -> bool {
    grammar.lines().any(|line| {
        line.split_once("::=").is_some_and(|(name, _)| {
            let name = name.trim();
            !name.is_empty() && name.chars().all(is_name)
        })
    })
}

fn is_name(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '-' || c == '_'
}

#[derive(Clone, Debug, PartialEq)]
enum Piece {
    Name(String),
    Defines,
    /// A literal with its quotes, or a class as an expression.
    Text(String),
    /// `| ( ) * + ?`, or a repetition `{m,n}` as written.
    Sign(String),
}

/// `grammar` as Lark, its `root` as `start`.
pub(super) fn to_lark(grammar: &str) -> Result<String, String> {
    let pieces = cut(grammar)?;
    let mut names = HashMap::from([("root".to_owned(), "start".to_owned())]);
    let mut lark = String::new();
    let mut rest = pieces.as_slice();
    let mut defined = HashSet::new();
    while let [Piece::Name(name), Piece::Defines, ..] = rest {
        defined.insert(name.as_str());
        rest = &rest[2..];
        let is_next =
            |at: &usize| matches!(rest.get(*at..*at + 2), Some([Piece::Name(_), Piece::Defines]));
        let end = (0..rest.len()).find(is_next).unwrap_or(rest.len());
        let name = lark_name(&mut names, name);
        let body = body(&mut names, &rest[..end]);
        writeln!(lark, "{name}: {body}").expect("a String takes all");
        rest = &rest[end..];
    }
    match rest {
        [] if defined.contains("root") => {
            let named = names.keys().filter(|name| !defined.contains(name.as_str())).min();
            named.map_or(Ok(lark), |name| {
                Err(format!("no rule defines `{name}`; give one, as in {name} ::= \"yes\""))
            })
        }
        [] => Err("the grammar has no rule `root`; give one, as in root ::= \"yes\"".to_owned()),
        _ => Err("a rule does not begin with `name ::=`; write it so".to_owned()),
    }
}

/// Lark's rules are lower-case letters, digits and `_`; each name gets one of its own.
fn lark_name(names: &mut HashMap<String, String>, name: &str) -> String {
    let next = names.len();
    names.entry(name.to_owned()).or_insert_with(|| format!("rule_{next}")).clone()
}

fn body(names: &mut HashMap<String, String>, pieces: &[Piece]) -> String {
    let mut out = String::new();
    let mut may_be_empty = true;
    for piece in pieces {
        let is_end = matches!(piece, Piece::Sign(sign) if sign == "|" || sign == ")");
        if is_end && may_be_empty {
            // An alternative of nothing.
            out.push_str("\"\" ");
        }
        may_be_empty = matches!(piece, Piece::Sign(sign) if sign == "|" || sign == "(");
        match piece {
            Piece::Name(name) => out.push_str(&lark_name(names, name)),
            Piece::Text(text) => out.push_str(text),
            Piece::Sign(sign) => {
                if !matches!(sign.as_str(), "|" | "(" | ")") {
                    out.truncate(out.trim_end().len());
                }
                out.push_str(sign);
            }
            Piece::Defines => out.push_str("::="),
        }
        out.push(' ');
    }
    if may_be_empty {
        out.push_str("\"\"");
    }
    out.trim_end().to_owned()
}

fn cut(grammar: &str) -> Result<Vec<Piece>, String> {
    let mut pieces = Vec::new();
    let mut rest = grammar;
    while let Some(first) = rest.chars().next() {
        let used = match first {
            '#' => rest.find('\n').unwrap_or(rest.len()),
            '"' => {
                let end = closing(rest, '"').ok_or("a literal has no closing \"; add it")?;
                pieces.push(Piece::Text(literal(&rest[1..end])));
                end + 1
            }
            '[' => {
                let end = closing(rest, ']').ok_or("a class has no closing ]; add it")?;
                pieces.push(Piece::Text(class(&rest[..=end])));
                end + 1
            }
            '{' => {
                let end = rest.find('}').ok_or("a repetition has no closing }; add it")?;
                let count: String = rest[..=end].split_whitespace().collect();
                pieces.push(Piece::Sign(count));
                end + 1
            }
            '.' => {
                pieces.push(Piece::Text("/(?s:.)/".to_owned()));
                1
            }
            '|' | '(' | ')' | '*' | '+' | '?' => {
                pieces.push(Piece::Sign(first.to_string()));
                1
            }
            _ if rest.starts_with("::=") => {
                pieces.push(Piece::Defines);
                3
            }
            _ if is_name(first) => {
                let end = rest.find(|c| !is_name(c)).unwrap_or(rest.len());
                pieces.push(Piece::Name(rest[..end].to_owned()));
                end
            }
            _ if first.is_whitespace() => first.len_utf8(),
            _ => return Err(format!("`{}` means nothing in GBNF", first.escape_default())),
        };
        rest = &rest[used..];
    }
    Ok(pieces)
}

/// Where the bracket that `text` begins with is closed, past `\` and what it escapes.
fn closing(text: &str, close: char) -> Option<usize> {
    let mut is_escaped = false;
    text.char_indices().skip(1).find_map(|(at, c)| {
        let found = !is_escaped && c == close;
        is_escaped = !is_escaped && c == '\\';
        found.then_some(at)
    })
}

/// The inside of a literal as a quoted text of Lark, which has JSON's escapes.
fn literal(inside: &str) -> String {
    let mut text = String::new();
    let mut chars = inside.chars();
    while let Some(c) = chars.next() {
        text.push(if c == '\\' { escaped(&mut chars) } else { c });
    }
    serde_json::Value::String(text).to_string()
}

/// A class as an expression: GBNF's escapes are those of expressions but for `\[`, which is one too.
fn class(with_brackets: &str) -> String {
    let inside = &with_brackets[1..with_brackets.len() - 1];
    let (negation, inside) = match inside.strip_prefix('^') {
        Some(inside) => ("^", inside),
        None => ("", inside),
    };
    let mut text = format!("/[{negation}");
    let mut chars = inside.chars();
    while let Some(c) = chars.next() {
        match c {
            '\\' => match chars.clone().next() {
                // Classes of expressions, which XGrammar's notation has too.
                Some('d' | 'w' | 's' | 'D' | 'W' | 'S' | '-') => {
                    text.push('\\');
                    text.extend(chars.next());
                }
                _ => push_class_letter(&mut text, escaped(&mut chars)),
            },
            '-' => text.push('-'),
            c => push_class_letter(&mut text, c),
        }
    }
    text.push_str("]/");
    text
}

fn push_class_letter(text: &mut String, letter: char) {
    if letter.is_alphanumeric() {
        text.push(letter);
    } else {
        write!(text, "\\x{{{:x}}}", u32::from(letter)).expect("a String takes all");
    }
}

/// The character that an escape stands for, its `\` taken already.
fn escaped(chars: &mut std::str::Chars<'_>) -> char {
    let Some(c) = chars.next() else { return '\\' };
    let digits = match c {
        'n' => return '\n',
        'r' => return '\r',
        't' => return '\t',
        'x' => 2,
        'u' => 4,
        'U' => 8,
        _ => return c,
    };
    let hex: String = chars.clone().take(digits).collect();
    let code = u32::from_str_radix(&hex, 16).ok().filter(|_| hex.len() == digits);
    match code.and_then(char::from_u32) {
        Some(found) => {
            chars.nth(digits - 1);
            found
        }
        None => c,
    }
}

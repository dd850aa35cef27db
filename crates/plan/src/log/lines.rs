//! Lines of a log, whatever it holds: any bytes, any length, terminal colors, carriage returns.

use std::io::{self, BufRead};

/// Most bytes of a line that are looked at; the rest is skipped. The longest line that matters, vLLM's
/// engine configuration, has about 5 KB.
const LIMIT_LINE_BYTES: usize = 64 << 10;

/// Calls `visit` with the number (from 1) and the cleaned text of each line of `input`. A carriage return
/// ends a text too, without a new number: progress bars are written over one another.
///
/// Memory is bounded by the longest line that is looked at, 64 KiB.
///
/// # Errors
/// Those of `input`.
pub fn each(input: &mut dyn BufRead, mut visit: impl FnMut(u64, &str)) -> io::Result<()> {
    let mut line = Vec::new();
    let mut number = 1;
    loop {
        let chunk = input.fill_buf()?;
        if chunk.is_empty() {
            break;
        }
        let end = chunk.iter().position(|byte| matches!(byte, b'\n' | b'\r'));
        let part = &chunk[..end.unwrap_or(chunk.len())];
        let room = LIMIT_LINE_BYTES - line.len();
        line.extend_from_slice(&part[..part.len().min(room)]);
        let ended = end.map(|end| chunk[end]);
        let used = end.map_or(chunk.len(), |end| end + 1);
        input.consume(used);
        if let Some(ended) = ended {
            visit(number, &clean(&line));
            line.clear();
            number += u64::from(ended == b'\n');
        }
    }
    if !line.is_empty() {
        visit(number, &clean(&line));
    }
    Ok(())
}

/// Text without terminal control sequences (ECMA-48 CSI: ESC `[` … final byte of 0x40 to 0x7E) and other
/// control characters; bytes that are no UTF-8 become U+FFFD.
fn clean(line: &[u8]) -> String {
    let mut kept = Vec::with_capacity(line.len());
    let mut bytes = line.iter().copied();
    while let Some(byte) = bytes.next() {
        match byte {
            0x1b => {
                if bytes.next() == Some(b'[') {
                    bytes.by_ref().find(|byte| (0x40..=0x7e).contains(byte));
                }
            }
            b'\t' => kept.push(b' '),
            0..=0x1f | 0x7f => {}
            _ => kept.push(byte),
        }
    }
    String::from_utf8_lossy(&kept).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(text: &[u8]) -> Vec<(u64, String)> {
        let mut found = Vec::new();
        let mut input = io::BufReader::with_capacity(7, text);
        each(&mut input, |number, line| found.push((number, line.to_string()))).unwrap();
        found
    }

    #[test]
    fn colors_and_line_ends_of_all_kinds_are_taken_away() {
        let found = lines(b"\x1b[1;36mone\x1b[0m\r\n 10%\r 20%\rtwo\n\n\xff\x00three");
        let wanted = [(1, "one"), (1, ""), (2, " 10%"), (2, " 20%"), (2, "two"), (3, "")];
        let last = (4, "\u{fffd}three".to_string());
        let mut all: Vec<_> = wanted.iter().map(|(n, text)| (*n, (*text).to_string())).collect();
        all.push(last);
        assert_eq!(found, all);
    }

    #[test]
    fn long_lines_are_cut_and_the_next_is_found() {
        let mut text = vec![b'x'; 3 * LIMIT_LINE_BYTES];
        text.extend_from_slice(b"\nshort\n");
        let found = lines(&text);
        assert_eq!(found[0].1.len(), LIMIT_LINE_BYTES);
        assert_eq!(found[1], (2, "short".to_string()));
    }
}

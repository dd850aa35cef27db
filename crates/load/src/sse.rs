//! Server-sent events, read as the pickiest clients read them.

use crate::fault::Fault;

/// Bytes of an event at most.
const EVENT_BYTES: usize = 8 << 20;

/// How much is forgiven.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Strictness {
    /// What real clients need together: LF alone, `data: ` with its space, one line an event, no comments,
    /// and whole events in each write (the SSE reader of vLLM's benchmarks strips each read of the socket).
    Strict,
    /// Whatever the standard allows of `data` lines: for peers.
    Standard,
}

/// Cuts a body into the payloads of its events.
pub struct Events {
    strictness: Strictness,
    rest: Vec<u8>,
}

impl Events {
    /// A reader at the start of a body.
    pub fn new(strictness: Strictness) -> Events {
        Events { strictness, rest: Vec::new() }
    }

    /// Takes one write of the server; appends what is complete to `payloads`.
    ///
    /// # Errors
    /// What some client would misread.
    pub fn feed(&mut self, piece: &[u8], payloads: &mut Vec<String>) -> Result<(), Fault> {
        self.rest.extend_from_slice(piece);
        let text = std::str::from_utf8(&self.rest);
        // A character may be cut at the end; strictly, an event may not.
        let valid = text.map_or_else(|error| error.valid_up_to(), str::len);
        let mut start = 0;
        while let Some((end, next)) = boundary(&self.rest[start..valid]) {
            let event = String::from_utf8_lossy(&self.rest[start..start + end]).into_owned();
            start += next;
            if self.strictness == Strictness::Strict && next - end != 2 {
                return Err(Fault::Malformed(format!("CRLF behind {}", shown(&event))));
            }
            payloads.extend(self.payload(&event)?);
        }
        self.rest.drain(..start);
        match self.strictness {
            Strictness::Strict if !self.rest.is_empty() => {
                let rest = String::from_utf8_lossy(&self.rest).into_owned();
                Err(Fault::Malformed(format!("a write ends within an event: {}", shown(&rest))))
            }
            _ if self.rest.len() > EVENT_BYTES => {
                Err(Fault::Malformed(format!("an event of more than {EVENT_BYTES} bytes")))
            }
            _ => Ok(()),
        }
    }

    /// The payload of one event, which has no end of event within; `None` for a comment alone.
    fn payload(&self, event: &str) -> Result<Option<String>, Fault> {
        if self.strictness == Strictness::Strict {
            let payload =
                event.strip_prefix("data: ").filter(|payload| !payload.contains(['\n', '\r']));
            let wrong = || Fault::Malformed(format!("not one `data: ` line: {}", shown(event)));
            return payload.map(|payload| Some(payload.to_string())).ok_or_else(wrong);
        }
        let data = event.lines().filter_map(|line| line.strip_prefix("data:"));
        let lines: Vec<&str> = data.map(|line| line.strip_prefix(' ').unwrap_or(line)).collect();
        Ok(Some(lines.join("\n")).filter(|_| !lines.is_empty()))
    }
}

/// The start of a text, for messages.
fn shown(text: &str) -> String {
    format!("{:?}", text.chars().take(80).collect::<String>())
}

/// Where the first event ends, and where the next one starts.
fn boundary(bytes: &[u8]) -> Option<(usize, usize)> {
    let plain = bytes.windows(2).position(|pair| pair == b"\n\n").map(|at| (at, at + 2));
    let carriage = bytes.windows(4).position(|four| four == b"\r\n\r\n").map(|at| (at, at + 4));
    [plain, carriage].into_iter().flatten().min()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(strictness: Strictness, pieces: &[&str]) -> Result<Vec<String>, Fault> {
        let (mut events, mut payloads) = (Events::new(strictness), Vec::new());
        for piece in pieces {
            events.feed(piece.as_bytes(), &mut payloads)?;
        }
        Ok(payloads)
    }

    #[test]
    fn whole_events_are_read() {
        let pieces = ["data: {\"a\": \"ä\"}\n\ndata: b \n\n", "data: [DONE]\n\n"];
        assert_eq!(read(Strictness::Strict, &pieces).unwrap(), ["{\"a\": \"ä\"}", "b ", "[DONE]"]);
    }

    #[test]
    fn what_loses_data_somewhere_is_refused() {
        let wrong: [&[&str]; 7] = [
            &["data: a\r\n\r\n"],
            &["data:a\n\n"],
            &["event: x\ndata: a\n\n"],
            &["data: a\ndata: b\n\n"],
            &[": comment\n\n"],
            &["data: a", "\n\n"],
            &["data: a\n\ndata: b"],
        ];
        for pieces in wrong {
            assert!(read(Strictness::Strict, pieces).is_err(), "{pieces:?}");
        }
    }

    #[test]
    fn peers_may_use_the_standard() {
        let pieces = ["event: x\r\nda", "ta:a\r\ndata: b\r\n\r\n", ": ping\n\n", "data: c\n\n"];
        assert_eq!(read(Strictness::Standard, &pieces).unwrap(), ["a\nb", "c"]);
    }
}

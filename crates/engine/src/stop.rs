//! Stop strings over a stream of text pieces.

/// Watches a stream for stop strings and holds back text that may be the start of one.
#[derive(Debug, Default)]
pub struct StopMatcher {
    stops: Vec<String>,
    held: String,
}

/// What a piece of text led to.
#[derive(Debug, PartialEq, Eq)]
pub enum Matched {
    /// Text that can be shown now.
    Text(String),
    /// The stream ends.
    Stop {
        /// Text before the stop string.
        text: String,
        /// The stop string.
        stop: String,
    },
}

impl StopMatcher {
    /// A matcher of `stops`; empty strings are ignored.
    pub fn new(stops: &[String]) -> StopMatcher {
        let stops = stops.iter().filter(|stop| !stop.is_empty()).cloned().collect();
        StopMatcher { stops, held: String::new() }
    }

    /// Takes the next piece.
    pub fn push(&mut self, piece: &str) -> Matched {
        self.held.push_str(piece);
        let found = |stop: &'_ String| Some((self.held.find(stop.as_str())?, stop.clone()));
        let first = self.stops.iter().filter_map(found).min_by_key(|(at, _)| *at);
        if let Some((at, stop)) = first {
            self.held.truncate(at);
            return Matched::Stop { text: std::mem::take(&mut self.held), stop };
        }
        let keep = self.stops.iter().map(|stop| overlap(&self.held, stop)).max().unwrap_or(0);
        let rest = self.held.split_off(self.held.len() - keep);
        Matched::Text(std::mem::replace(&mut self.held, rest))
    }

    /// What was held back, once the stream has ended.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

/// Bytes of the longest proper prefix of `stop` that `text` ends with.
fn overlap(text: &str, stop: &str) -> usize {
    let longest = text.len().min(stop.len() - 1);
    let lengths = (1..=longest).rev().filter(|n| stop.is_char_boundary(*n));
    lengths.into_iter().find(|n| text.ends_with(&stop[..*n])).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn feed(stops: &[&str], pieces: &[&str]) -> (String, bool) {
        let stops: Vec<String> = stops.iter().map(|s| s.to_string()).collect();
        let mut matcher = StopMatcher::new(&stops);
        let mut text = String::new();
        for piece in pieces {
            match matcher.push(piece) {
                Matched::Text(piece) => text += &piece,
                Matched::Stop { text: piece, .. } => return (text + &piece, true),
            }
        }
        (text + &matcher.finish(), false)
    }

    #[test]
    fn finds_a_stop_across_pieces_and_cuts_it_off() {
        assert_eq!(feed(&["END"], &["abc E", "N", "D x"]), ("abc ".into(), true));
        assert_eq!(feed(&["é!"], &["caf", "é", "! x"]), ("caf".into(), true));
    }

    #[test]
    fn gives_back_what_only_looked_like_a_stop() {
        assert_eq!(feed(&["END"], &["abc E", "N", "X"]), ("abc ENX".into(), false));
        assert_eq!(feed(&["END"], &["abc EN"]), ("abc EN".into(), false));
    }

    #[test]
    fn the_earliest_of_several_wins() {
        assert_eq!(feed(&["yy", "x"], &["a x b yy"]), ("a ".into(), true));
    }
}

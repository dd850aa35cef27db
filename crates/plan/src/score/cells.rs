//! Numbers in the cells of a table that people filled in: `~50`, `8192 (inferred)`, `3.81`.

/// A number and half of its last printed place: the true value is within.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Printed {
    /// As printed.
    pub value: f64,
    /// Half a unit of the last place; for `~55000` of the last digit that is not 0.
    pub half_unit: f64,
}

impl Printed {
    /// The first number of a cell, `None` where it has none.
    pub fn parse(cell: &str) -> Option<Printed> {
        let cell = cell.trim();
        let approximate = cell.starts_with('~');
        let start = cell.find(|c: char| c.is_ascii_digit())?;
        let negative = cell[..start].ends_with('-');
        let digits = digits(&cell[start..]);
        let value: f64 = digits.parse().ok()?;
        let decimals = digits.split_once('.').map_or(0, |(_, decimals)| decimals.len());
        let zeros = match decimals {
            0 if approximate => digits.len() - digits.trim_end_matches('0').len(),
            _ => 0,
        };
        let unit = 10.0_f64.powi(zeros as i32 - decimals as i32);
        Some(Printed { value: if negative { -value } else { value }, half_unit: unit / 2.0 })
    }

    /// Smallest true value.
    pub fn low(self) -> f64 {
        self.value - self.half_unit
    }

    /// Largest true value.
    pub fn high(self) -> f64 {
        self.value + self.half_unit
    }

    /// Whether `value`, printed the same way, reads the same.
    pub fn reads(self, value: f64) -> bool {
        // A hair more than half a unit: engines round halves either way.
        (value - self.value).abs() <= self.half_unit * 1.000_001 + 1e-12
    }

    /// The same in other units.
    pub fn scaled(self, factor: f64) -> Printed {
        Printed { value: self.value * factor, half_unit: self.half_unit * factor }
    }
}

/// The digits at the start of a text, with at most one decimal point between digits and no thousands
/// separators but commas followed by three digits.
fn digits(text: &str) -> String {
    let mut digits = String::new();
    let characters: Vec<char> = text.chars().collect();
    for (index, c) in characters.iter().enumerate() {
        let next_digits = characters[index + 1..].iter().take_while(|c| c.is_ascii_digit()).count();
        match c {
            '0'..='9' => digits.push(*c),
            '.' if !digits.contains('.') && next_digits > 0 => digits.push('.'),
            ',' if next_digits == 3 && !digits.contains('.') => {}
            _ => break,
        }
    }
    digits
}

/// A whole number at the start of a cell.
pub fn whole(cell: &str) -> Option<u64> {
    let value = Printed::parse(cell)?.value;
    (value >= 0.0 && value.fract() == 0.0 && value < 9e15).then_some(value as u64)
}

/// The number that follows `mark` in a text (after blanks, `=` or `:`).
pub fn after(text: &str, mark: &str) -> Option<Printed> {
    let rest = &text[text.find(mark)? + mark.len()..];
    let rest = rest.trim_start_matches([' ', '=', ':']);
    if rest.starts_with(|c: char| c.is_ascii_digit()) { Printed::parse(rest) } else { None }
}

/// The numbers that follow each `mark` in a text.
pub fn after_each(text: &str, mark: &str) -> Vec<Printed> {
    text.match_indices(mark).filter_map(|(at, _)| after(&text[at..], mark)).collect()
}

/// The numbers that stand right before `mark` in a text.
pub fn before(text: &str, mark: &str) -> Vec<Printed> {
    let ends = text.match_indices(mark).map(|(at, _)| at);
    let number = |end: usize| {
        let head = text[..end].trim_end();
        let length = head.chars().rev().take_while(|c| c.is_ascii_digit() || *c == '.').count();
        Printed::parse(&head[head.len() - length..])
    };
    ends.filter_map(number).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn printed_numbers_carry_their_rounding() {
        let parse = |cell| Printed::parse(cell).map(|p| (p.value, p.half_unit));
        assert_eq!(parse("3.81"), Some((3.81, 0.005)));
        assert_eq!(parse("-7.83"), Some((-7.83, 0.005)));
        assert_eq!(parse("~55000 (0.20.0) / ~525000"), Some((55000.0, 500.0)));
        assert_eq!(parse("15.03 (weights+non-torch)"), Some((15.03, 0.005)));
        assert_eq!(parse("1,082,600"), Some((1_082_600.0, 0.5)));
        assert_eq!(parse("8192 (inferred)"), Some((8192.0, 0.5)));
        assert_eq!(parse(""), None);
        assert_eq!(parse("unspecified"), None);
        assert_eq!(whole("16.5"), None);
        assert!(Printed::parse("44.53").unwrap().reads(44.5349));
        assert!(!Printed::parse("44.53").unwrap().reads(44.5362));
    }

    #[test]
    fn numbers_are_found_beside_words() {
        let text = "wasted 0.11 GiB; cpu_blocks=1638, K 5.22 V 5.22 GB; 768 cells";
        assert_eq!(after(text, "cpu_blocks").unwrap().value, 1638.0);
        assert_eq!(after(text, "K").unwrap().value, 5.22);
        assert_eq!(before(text, " cells")[0].value, 768.0);
        assert_eq!(after(text, "none"), None);
        assert!(before("x MiB", " MiB").is_empty());
        assert_eq!(after_each("K 1.5 V 2; K size: 3 K x", "K ").len(), 1);
    }
}

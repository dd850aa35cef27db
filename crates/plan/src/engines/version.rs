//! Engine versions as logs and people write them.

use serde::Serialize;

/// A version: `0.20.2`, `V1 (2025-10)`, `nvcr 25.09 (0.10.x)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Version {
    /// First number.
    pub major: u32,
    /// Second number.
    pub minor: u32,
    /// Third number; 0 where it is left open.
    pub patch: u32,
}

/// A version that none comes after: what is assumed where nothing is said.
pub const LATEST: Version = Version::new(u32::MAX, 0);

impl Version {
    /// `major.minor.0`.
    pub const fn new(major: u32, minor: u32) -> Version {
        Version { major, minor, patch: 0 }
    }

    /// For messages.
    pub fn shown(self) -> String {
        if self == LATEST {
            return "latest".into();
        }
        format!("{}.{}.{}", self.major, self.minor, self.patch)
    }

    /// The first version number in a text: digits, a dot, digits, and maybe more. Numbers above
    /// `below_major` (calendar names of containers) are passed over.
    pub fn parse(text: &str, below_major: u32) -> Option<Version> {
        let word = |c: char| !(c.is_ascii_digit() || c == '.');
        text.split(word).filter_map(numbers).find(|version| version.major < below_major)
    }

    /// The version of that month, from a calendar of `(year * 100 + month, version)` in order: the last
    /// one out by then.
    pub fn of_month(text: &str, calendar: &[(u32, Version)]) -> Option<Version> {
        let month = text.split(|c: char| !(c.is_ascii_digit() || c == '-')).find_map(|word| {
            let (year, month) = word.split_once('-')?;
            let (year, month): (u32, u32) = (year.parse().ok()?, month.parse().ok()?);
            ((2020..2100).contains(&year) && (1..=12).contains(&month))
                .then_some(year * 100 + month)
        })?;
        let released = calendar.iter().rev().find(|(released, _)| *released <= month);
        released.or(calendar.first()).map(|(_, version)| *version)
    }
}

fn numbers(word: &str) -> Option<Version> {
    let mut parts = word.split('.').filter(|part| !part.is_empty());
    let major = parts.next()?.parse().ok()?;
    let minor = parts.next()?.parse().ok()?;
    let patch = parts.next().and_then(|part| part.parse().ok()).unwrap_or(0);
    Some(Version { major, minor, patch })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_found_in_what_people_write() {
        let parse = |text| Version::parse(text, 10).map(Version::shown);
        assert_eq!(parse("0.20.2 (V1)").as_deref(), Some("0.20.2"));
        assert_eq!(parse("v0.6.x (V0)").as_deref(), Some("0.6.0"));
        assert_eq!(parse("nvcr 25.09 (0.10.x)").as_deref(), Some("0.10.0"));
        assert_eq!(parse("0.13-0.15 (V1, 2026-02)").as_deref(), Some("0.13.0"));
        assert_eq!(parse("V1 (2025-10)"), None);
        assert!(Version::new(0, 9) < Version::new(0, 10) && Version::new(1, 0) < LATEST);
    }

    #[test]
    fn months_are_looked_up() {
        let calendar = [(202_501, Version::new(0, 7)), (202_506, Version::new(0, 9))];
        let month = |text| Version::of_month(text, &calendar);
        assert_eq!(month("V1 (2025-07)"), Some(Version::new(0, 9)));
        assert_eq!(month("2025-05"), Some(Version::new(0, 7)));
        assert_eq!(month("2024-01"), Some(Version::new(0, 7)));
        assert_eq!(month("V1"), None);
    }
}

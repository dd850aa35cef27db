//! Numbers with units, as people write and read them.

use crate::figure::Unit;

const BYTES: [(&str, f64); 10] = [
    ("PB", 1e15),
    ("TiB", 1024.0 * 1024.0 * 1024.0 * 1024.0),
    ("TB", 1e12),
    ("GiB", 1024.0 * 1024.0 * 1024.0),
    ("GB", 1e9),
    ("MiB", 1024.0 * 1024.0),
    ("MB", 1e6),
    ("KiB", 1024.0),
    ("kB", 1e3),
    ("B", 1.0),
];
const TIMES: [(&str, f64); 7] = [
    ("us", 1e-6),
    ("ms", 1e-3),
    ("min", 60.0),
    ("h", 3600.0),
    ("d", 86_400.0),
    ("y", 365.0 * 86_400.0),
    ("s", 1.0),
];
const FLOPS: [(&str, f64); 5] =
    [("PFLOP/s", 1e15), ("TFLOP/s", 1e12), ("GFLOP/s", 1e9), ("MFLOP/s", 1e6), ("FLOP/s", 1.0)];

/// The suffixes that a unit is written with, each with what it multiplies.
fn suffixes(unit: Unit) -> Vec<(String, f64)> {
    let plain = |list: &[(&str, f64)], end: &str| {
        list.iter().map(|(name, factor)| (format!("{name}{end}"), *factor)).collect()
    };
    match unit {
        Unit::Bytes => plain(&BYTES, ""),
        Unit::BytesPerToken => [plain(&BYTES, "/token"), plain(&BYTES, "")].concat(),
        Unit::BytesPerSecond => {
            let bits = [("Tbit/s", 1e12 / 8.0), ("Gbit/s", 1e9 / 8.0), ("Mbit/s", 1e6 / 8.0)];
            [plain(&bits, ""), plain(&BYTES, "/s")].concat()
        }
        Unit::Seconds => plain(&TIMES, ""),
        Unit::Milliseconds => vec![("ms".into(), 1.0), ("s".into(), 1e3)],
        Unit::FlopPerSecond => plain(&FLOPS, ""),
        Unit::FlopPerByte => vec![("FLOP/B".into(), 1.0)],
        Unit::TokensPerSecond => vec![("tok/s".into(), 1.0)],
        Unit::RequestsPerSecond => vec![("req/s".into(), 1.0), ("/s".into(), 1.0)],
        Unit::Ratio => vec![("%".into(), 0.01)],
        Unit::Tokens => vec![("tokens".into(), 1.0)],
        Unit::Blocks | Unit::Sequences | Unit::Count => Vec::new(),
    }
}

/// What stands for a quantity of a unit in usage lines.
pub fn unit_name(unit: Unit) -> &'static str {
    match unit {
        Unit::Bytes | Unit::BytesPerToken => "SIZE",
        Unit::BytesPerSecond => "GB/s",
        Unit::Seconds | Unit::Milliseconds => "TIME",
        Unit::FlopPerSecond => "TFLOP/s",
        Unit::FlopPerByte => "FLOP/B",
        Unit::TokensPerSecond => "tok/s",
        Unit::RequestsPerSecond => "req/s",
        Unit::Ratio => "SHARE",
        Unit::Tokens => "TOKENS",
        Unit::Blocks | Unit::Sequences | Unit::Count => "N",
    }
}

/// The number that `text` means in the base unit (bytes, seconds, operations per second, a ratio of 1).
/// A plain number is in that base unit; underscores group digits. The error is the mend.
pub fn parse(text: &str, unit: Unit) -> Result<f64, String> {
    let trimmed = text.trim().replace('_', "");
    let suffixes = suffixes(unit);
    let longest = suffixes
        .iter()
        .filter(|(suffix, _)| trimmed.ends_with(suffix.as_str()))
        .max_by_key(|(suffix, _)| suffix.len());
    let (number, factor) = match longest {
        Some((suffix, factor)) => (&trimmed[..trimmed.len() - suffix.len()], *factor),
        None => (trimmed.as_str(), 1.0),
    };
    match number.trim_end().parse::<f64>() {
        Ok(value) if value.is_finite() => Ok(value * factor),
        _ if suffixes.is_empty() => Err("write a number".into()),
        _ => {
            let names: Vec<&str> = suffixes.iter().map(|(name, _)| name.as_str()).collect();
            Err(format!("write a number, or a number with one of {}", names.join(" ")))
        }
    }
}

/// A number with its unit, short enough to stand in a formula.
pub fn display(value: f64, unit: Unit) -> String {
    match unit {
        Unit::Bytes => bytes(value, ""),
        Unit::BytesPerToken if value == value.round() && value < 1e7 => {
            format!("{} B/token", plain(value))
        }
        Unit::BytesPerToken => bytes(value, "/token"),
        Unit::BytesPerSecond => scaled(
            value,
            &[("TB/s", 1e12), ("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3), ("B/s", 1.0)],
        ),
        Unit::FlopPerSecond => scaled(value, &FLOPS),
        Unit::FlopPerByte => format!("{} FLOP/B", plain(value)),
        Unit::Seconds => seconds(value),
        Unit::Milliseconds => seconds(value / 1e3),
        Unit::Ratio if value.abs() <= 1.0 => format!("{}%", plain(value * 100.0)),
        Unit::TokensPerSecond => format!("{} tok/s", plain(value)),
        Unit::RequestsPerSecond => format!("{} req/s", plain(value)),
        Unit::Ratio | Unit::Tokens | Unit::Blocks | Unit::Sequences | Unit::Count => plain(value),
    }
}

/// Bytes: exact below 1 MiB, else in binary units, as engines print them.
fn bytes(value: f64, end: &str) -> String {
    if value == value.round() && value.abs() < 1024.0 * 1024.0 {
        return format!("{} B{end}", plain(value));
    }
    let binary: Vec<(&str, f64)> =
        BYTES.iter().filter(|(name, _)| name.len() != 2).map(|(n, f)| (*n, *f)).collect();
    format!("{}{end}", scaled(value, &binary))
}

fn seconds(value: f64) -> String {
    let units: &[(&str, f64)] = match value.abs() {
        size if size >= 730.0 * 86_400.0 => &[("years", 365.0 * 86_400.0)],
        size if size >= 172_800.0 => &[("days", 86_400.0)],
        size if size >= 7_200.0 => &[("h", 3600.0)],
        _ => &[("s", 1.0), ("ms", 1e-3), ("us", 1e-6)],
    };
    scaled(value, units)
}

/// The number in the largest unit that it reaches (else the last), units from large to small.
fn scaled(value: f64, units: &[(&str, f64)]) -> String {
    let fits = units.iter().find(|(_, factor)| value.abs() >= *factor);
    match fits.or(units.last()) {
        Some((name, factor)) => format!("{} {name}", plain(value / factor)),
        None => plain(value),
    }
}

/// A number with thousands separated: whole if it is (below 2^53), else with at least three significant
/// digits.
pub fn plain(value: f64) -> String {
    let size = value.abs();
    if !value.is_finite() {
        return "∞".into();
    }
    if size >= 1e15 || (size > 0.0 && size < 1e-3) {
        return format!("{value:.3e}");
    }
    let decimals = match size {
        _ if value == value.round() => 0,
        size if size >= 1000.0 => 0,
        size if size >= 100.0 => 1,
        size if size >= 1.0 => 2,
        size if size >= 0.1 => 3,
        _ => 4,
    };
    let text = format!("{size:.decimals$}");
    let (whole, fraction) = text.split_once('.').unwrap_or((&text, ""));
    let fraction = fraction.trim_end_matches('0');
    let digits: Vec<String> = whole
        .as_bytes()
        .rchunks(3)
        .rev()
        .map(|chunk| String::from_utf8_lossy(chunk).into_owned())
        .collect();
    let sign = if value < 0.0 { "-" } else { "" };
    let point = if fraction.is_empty() { "" } else { "." };
    format!("{sign}{}{point}{fraction}", digits.join(","))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantities_are_read_in_every_unit() {
        for (text, unit, value) in [
            ("24GiB", Unit::Bytes, 25_769_803_776.0),
            ("16.06 GB", Unit::Bytes, 16.06e9),
            ("128KiB", Unit::BytesPerToken, 131_072.0),
            ("131_072", Unit::BytesPerToken, 131_072.0),
            ("25GB/s", Unit::BytesPerSecond, 25e9),
            ("100Gbit/s", Unit::BytesPerSecond, 12.5e9),
            ("15.6ms", Unit::Seconds, 0.0156),
            ("5y", Unit::Seconds, 157_680_000.0),
            ("312TFLOP/s", Unit::FlopPerSecond, 312e12),
            ("50%", Unit::Ratio, 0.5),
            ("0.5", Unit::Ratio, 0.5),
            ("2e3", Unit::Tokens, 2000.0),
        ] {
            let read = parse(text, unit).unwrap();
            assert!((read - value).abs() <= value * 1e-12, "{text}: {read}");
        }
    }

    #[test]
    fn what_is_no_quantity_is_refused_with_the_mend() {
        for (text, unit) in [
            ("", Unit::Tokens),
            ("ten", Unit::Tokens),
            ("1 2", Unit::Count),
            ("5parsec", Unit::Bytes),
            ("NaN", Unit::Ratio),
            ("inf", Unit::Seconds),
            ("GB/s", Unit::BytesPerSecond),
        ] {
            assert!(parse(text, unit).is_err_and(|mend| mend.contains("number")), "{text}");
        }
    }

    #[test]
    fn quantities_are_shown_short() {
        for (value, unit, text) in [
            (131_072.0, Unit::BytesPerToken, "131,072 B/token"),
            (2_684_354_560.0, Unit::Bytes, "2.5 GiB"),
            (4096.0, Unit::Bytes, "4,096 B"),
            (5.858e9, Unit::BytesPerSecond, "5.86 GB/s"),
            (0.0649, Unit::Seconds, "64.9 ms"),
            (14_000_000.0, Unit::Seconds, "162 days"),
            (0.00744, Unit::Ratio, "0.744%"),
            (8.0, Unit::Ratio, "8"),
            (989e12, Unit::FlopPerSecond, "989 TFLOP/s"),
            (-1234.5, Unit::Count, "-1,234"),
            (9714.196, Unit::TokensPerSecond, "9,714 tok/s"),
        ] {
            assert_eq!(display(value, unit), text);
        }
    }
}

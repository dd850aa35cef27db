//! Sizes in bytes as people write them, on the command line and in files: `24MiB`.

const UNITS: [(&str, u64); 3] = [("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];

/// Parses a size in bytes: a number with `KiB`, `MiB` or `GiB` (decimals allowed, rounded down), or a
/// whole number of bytes. For use as a clap `value_parser`.
pub fn parse(text: &str) -> Result<u64, String> {
    let wrong = || format!("`{text}` is not a size; write for example 24MiB, 1.5GiB or 65536");
    let text = text.trim();
    let unit = UNITS.iter().find(|(name, _)| text.ends_with(name));
    let Some(&(name, bytes)) = unit else {
        return text.parse().map_err(|_| wrong());
    };
    let number = text[..text.len() - name.len()].trim_end();
    let (whole, fraction) = number.split_once('.').unwrap_or((number, "0"));
    if !is_digits(whole) || !is_digits(fraction) {
        return Err(wrong());
    }
    let whole = whole.parse::<u64>().ok().and_then(|whole| whole.checked_mul(bytes));
    let part: f64 = format!("0.{fraction}").parse().map_err(|_| wrong())?;
    let part = (part * bytes as f64) as u64; // below one unit, so at most 2^30: exact enough
    whole.and_then(|whole| whole.checked_add(part)).ok_or(format!("`{text}` is over 2^64 bytes"))
}

fn is_digits(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}

/// A size in bytes as people read it: the largest fitting unit, one decimal.
pub fn display(bytes: u64) -> String {
    match UNITS.iter().find(|&&(_, unit)| bytes >= unit) {
        Some((name, unit)) => format!("{:.1} {name}", bytes as f64 / *unit as f64),
        None => format!("{bytes} B"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_exactly() {
        assert_eq!(parse("24MiB"), Ok(25_165_824));
        assert_eq!(parse("24 MiB"), Ok(25_165_824));
        assert_eq!(parse("1.5GiB"), Ok(3 << 29));
        assert_eq!(parse("0.5KiB"), Ok(512));
        assert_eq!(parse("65536"), Ok(65_536));
        assert_eq!(parse("0"), Ok(0));
    }

    #[test]
    fn other_spellings_are_refused_with_the_mend() {
        for wrong in
            ["", "MiB", "24MB", "24mib", "-1MiB", "1e3MiB", ".5MiB", "1.5", "1.MiB", "+2KiB"]
        {
            assert!(parse(wrong).is_err_and(|text| text.contains("24MiB")), "{wrong}");
        }
        assert!(parse("99999999999GiB").is_err_and(|text| text.contains("2^64")));
    }

    #[test]
    fn sizes_are_shown_in_the_largest_unit() {
        assert_eq!(display(25_165_824), "24.0 MiB");
        assert_eq!(display(1 << 30), "1.0 GiB");
        assert_eq!(display(1023), "1023 B");
    }
}

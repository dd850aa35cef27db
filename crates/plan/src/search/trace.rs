//! Trace files: Mooncake JSON lines and Azure CSV, read line by line in bounded memory.

use std::fs::File;
use std::io::{BufRead, BufReader, Read as _};
use std::path::Path;

use serde::Deserialize;

use crate::search::traffic::{LENGTH_MAX, Traffic, TrafficError};

/// Most bytes of a line: a Mooncake request of a million tokens has 2,000 block ids of 8 bytes.
const LINE_MAX: u64 = 1 << 20;

/// The fields of a Mooncake line that a plan needs; times in milliseconds.
#[derive(Deserialize)]
struct MooncakeLine {
    timestamp: Option<f64>,
    input_length: u64,
    output_length: u64,
}

/// One request of a trace; time in seconds.
struct Arrival {
    time_s: Option<f64>,
    input: u64,
    output: u64,
}

/// Reads a trace. Its rate is requests over the time from the first to the last.
pub fn read(path: &Path) -> Result<Traffic, TrafficError> {
    let name = path.display().to_string();
    let file_error = |error: std::io::Error| TrafficError::File {
        path: name.clone(),
        reason: error.to_string(),
    };
    let mut reader = BufReader::new(File::open(path).map_err(file_error)?);
    let mut traffic = Traffic::default();
    let (mut first, mut last) = (f64::INFINITY, f64::NEG_INFINITY);
    let mut buffer = Vec::new();
    for line in 1.. {
        buffer.clear();
        let length = reader.by_ref().take(LINE_MAX).read_until(b'\n', &mut buffer);
        if length.map_err(file_error)? == 0 {
            break;
        }
        let wrong = |reason: String| TrafficError::Line { path: name.clone(), line, reason };
        if buffer.len() as u64 == LINE_MAX {
            return Err(wrong(format!("it is longer than {LINE_MAX} bytes")));
        }
        let text = std::str::from_utf8(&buffer).map_err(|_| wrong("it is no UTF-8".into()))?.trim();
        if text.is_empty() || line == 1 && text.starts_with("TIMESTAMP") {
            continue;
        }
        let arrival = parse(text).map_err(wrong)?;
        if arrival.input > LENGTH_MAX || arrival.output > LENGTH_MAX {
            return Err(wrong(format!("a length is over {LENGTH_MAX} tokens")));
        }
        traffic.add(arrival.input, arrival.output, 1.0);
        if let Some(time_s) = arrival.time_s {
            first = first.min(time_s);
            last = last.max(time_s);
        }
    }
    if traffic.is_empty() {
        return Err(TrafficError::Empty(format!("--trace {name}")));
    }
    if last > first {
        traffic.rate = Some(traffic.summary().requests / (last - first));
    }
    Ok(traffic)
}

fn parse(text: &str) -> Result<Arrival, String> {
    if text.starts_with('{') {
        let line: MooncakeLine = serde_json::from_str(text).map_err(|error| error.to_string())?;
        let time_s = line.timestamp.map(|milliseconds| milliseconds / 1e3);
        return Ok(Arrival { time_s, input: line.input_length, output: line.output_length });
    }
    let fields: Vec<&str> = text.split(',').map(str::trim).collect();
    let [time, input, output] = fields[..] else {
        return Err(format!("it has {} fields", fields.len()));
    };
    let tokens =
        |field: &str| field.parse::<u64>().map_err(|_| format!("`{field}` is no token count"));
    Ok(Arrival { time_s: seconds_of(time), input: tokens(input)?, output: tokens(output)? })
}

/// Seconds of `2023-11-16 18:15:46.6805900` since some day long ago.
fn seconds_of(time: &str) -> Option<f64> {
    let (date, clock) = time.split_once([' ', 'T'])?;
    let mut date = date.split('-').map(|part| part.parse::<i64>().ok());
    let (year, month, day) = (date.next()??, date.next()??, date.next()??);
    let mut clock = clock.trim_end_matches('Z').split(':').map(|part| part.parse::<f64>().ok());
    let (hour, minute, second) = (clock.next()??, clock.next()??, clock.next()??);
    Some(day_number(year, month, day)? as f64 * 86_400.0 + hour * 3600.0 + minute * 60.0 + second)
}

/// Days since the first of March of year 0 in the Gregorian calendar.
fn day_number(year: i64, month: i64, day: i64) -> Option<i64> {
    if !(0..=9999).contains(&year) || !(1..=12).contains(&month) || !(1..=31).contains(&day) {
        return None;
    }
    // Years begin in March, so that the leap day is the last.
    let (year, month) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    Some(
        365 * year + year.div_euclid(4) - year.div_euclid(100)
            + year.div_euclid(400)
            + (153 * month + 2) / 5
            + day,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_cross_days_and_leap_years() {
        let seconds = |text| seconds_of(text).unwrap();
        assert_eq!(seconds("2023-11-17 00:00:01.5") - seconds("2023-11-16 23:59:59"), 2.5);
        assert_eq!(seconds("2024-03-01 00:00:00") - seconds("2024-02-28 00:00:00"), 2.0 * 86_400.0);
        assert_eq!(
            seconds("2024-01-01 00:00:00") - seconds("2023-01-01 00:00:00"),
            365.0 * 86_400.0
        );
        assert_eq!(seconds_of("yesterday"), None);
        assert_eq!(seconds_of("2023-13-01 00:00:00"), None);
    }

    #[test]
    fn lines_of_both_kinds_are_read() {
        let mooncake = r#"{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47]}"#;
        let arrival = parse(mooncake).unwrap();
        assert_eq!((arrival.time_s, arrival.input, arrival.output), (Some(27.482), 6955, 52));
        let arrival = parse("2023-11-16 18:15:46.6805900,374,44").unwrap();
        assert_eq!((arrival.input, arrival.output), (374, 44));
        for wrong in ["{}", "a,b,c", "1,2", "{\"input_length\": -1, \"output_length\": 2}"] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }
}

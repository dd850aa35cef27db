//! Token ids from a JSON file.

use std::path::Path;

use anyhow::{Context as _, bail};
use serde_json::Value;

/// Reads a JSON array of token ids, or an object with such an array under `ids`.
pub fn read_ids(path: &Path) -> anyhow::Result<Vec<u32>> {
    let text = std::fs::read_to_string(path)
        .with_context(|| format!("cannot read --ids {}", path.display()))?;
    parse_ids(&text).with_context(|| format!("--ids {}", path.display()))
}

fn parse_ids(text: &str) -> anyhow::Result<Vec<u32>> {
    let document: Value = serde_json::from_str(text).context("not JSON")?;
    let list = document.get("ids").unwrap_or(&document);
    let Value::Array(list) = list else {
        bail!("want a JSON array of token ids, or an object with `ids`");
    };
    let id = |(index, value): (usize, &Value)| {
        let id = value.as_u64().and_then(|id| u32::try_from(id).ok());
        id.with_context(|| format!("element {index} is {value}: want a token id"))
    };
    list.iter().enumerate().map(id).collect()
}

#[cfg(test)]
mod tests {
    use super::parse_ids;

    #[test]
    fn arrays_and_objects_are_read() {
        assert_eq!(parse_ids("[1, 2]").unwrap(), [1, 2]);
        assert_eq!(parse_ids(r#"{"ids": [3], "nll": [0.5]}"#).unwrap(), [3]);
    }

    #[test]
    fn errors_name_the_element() {
        for wrong in ["[1, -2]", "[1, \"x\"]", "[1, 4294967296]"] {
            let error = format!("{:#}", parse_ids(wrong).unwrap_err());
            assert!(error.starts_with("element 1 is"), "{error}");
        }
        assert!(parse_ids("{}").is_err() && parse_ids("[").is_err());
    }
}

//! The fields of a model's config: read with their aliases, checked for size, missing ones remembered.

use std::cell::RefCell;

use serde_json::{Map, Value};

use crate::model::MissingFields;

/// Why a model cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// Fields that the answer needs are missing.
    #[error(transparent)]
    Missing(#[from] MissingFields),
    /// A field has a value that it cannot have.
    #[error(
        "the config of {model} has {field} = {value}: want {want}; overrule it with --set {field}=VALUE"
    )]
    Wrong {
        /// The model's name.
        model: String,
        /// The field.
        field: String,
        /// Its value, shortened.
        value: String,
        /// What it should be.
        want: String,
    },
    /// A file that cannot be read.
    #[error("cannot read {path}: {reason}")]
    File {
        /// The file.
        path: String,
        /// What the system or the parser said.
        reason: String,
    },
    /// Neither a file nor the name of a bundled config.
    #[error("{name} is neither a file, a directory nor a bundled config; bundled are {known}")]
    Unknown {
        /// What was asked for.
        name: String,
        /// The names that would have worked.
        known: String,
    },
    /// An argument of `--set` that is not `FIELD=VALUE`.
    #[error("--set {text}: want FIELD=VALUE, for example --set num_key_value_heads=8")]
    Setting {
        /// The argument.
        text: String,
    },
}

/// Nested configs of the language model inside a multimodal one, in the order they are looked for.
const TEXT_CONFIGS: [&str; 5] =
    ["text_config", "llm_config", "language_config", "thinker_config", "language_model"];

/// Fields of the outer config that outrank the nested ones.
const OUTER_FIELDS: [&str; 3] = ["architectures", "quantization_config", "vision_config"];

/// The fields of a config, flat.
#[derive(Debug)]
pub struct Fields {
    model: String,
    nested: bool,
    values: Map<String, Value>,
    missing: RefCell<Vec<String>>,
}

impl Fields {
    /// Takes a config object; the text model's nested config is lifted to the top, `settings`
    /// (`FIELD=VALUE`) overrule all.
    pub fn new(
        name: &str,
        mut values: Map<String, Value>,
        settings: &[String],
    ) -> Result<Fields, ConfigError> {
        let mut is_nested = false;
        while let Some(nested) = TEXT_CONFIGS.iter().find_map(|key| match values.remove(*key) {
            Some(Value::Object(nested)) => Some(nested),
            _ => None,
        }) {
            is_nested = true;
            for (key, value) in nested {
                let outranked = OUTER_FIELDS.contains(&key.as_str()) && values.contains_key(&key);
                if !outranked {
                    values.insert(key, value);
                }
            }
        }
        for text in settings {
            let wrong = || ConfigError::Setting { text: text.clone() };
            let (field, value) = text.split_once('=').ok_or_else(wrong)?;
            let value = serde_json::from_str(value).unwrap_or_else(|_| Value::from(value));
            values.insert(field.trim().to_string(), value);
        }
        let (model, nested, missing) = (name.to_string(), is_nested, RefCell::default());
        let fields = Fields { model, nested, values, missing };
        let model = fields.text("_model").unwrap_or(name).to_string();
        Ok(Fields { model, ..fields })
    }

    /// The model's name.
    pub fn model(&self) -> &str {
        &self.model
    }

    /// The value of a field; `null` counts as absent.
    pub fn get(&self, field: &str) -> Option<&Value> {
        self.values.get(field).filter(|value| !value.is_null())
    }

    /// Whether any of the fields is there.
    pub fn has(&self, field: &str) -> bool {
        self.get(field).is_some()
    }

    /// Adds a field unless the config has it.
    pub fn set_default(&mut self, field: &str, value: Value) {
        if !self.has(field) {
            self.values.insert(field.to_string(), value);
        }
    }

    /// Sets a field that the config leaves to its family's default, and notes that it was.
    pub fn assume(&mut self, field: &str, value: Value) {
        self.values.insert(field.to_string(), value);
        let listed = self.values.entry("_assumed").or_insert_with(|| Value::Array(Vec::new()));
        if let Value::Array(names) = listed {
            names.push(Value::from(field));
        }
    }

    /// Whether the language model's config was nested in another's.
    pub fn is_nested(&self) -> bool {
        self.nested
    }

    /// A text.
    pub fn text(&self, field: &str) -> Option<&str> {
        self.get(field)?.as_str()
    }

    /// A flag.
    pub fn flag(&self, field: &str) -> Option<bool> {
        self.get(field)?.as_bool()
    }

    /// An error about a field's value.
    pub fn wrong(&self, field: &str, want: &str) -> ConfigError {
        let shown = self.get(field).map_or("null".into(), Value::to_string);
        let value = match shown.char_indices().nth(60) {
            Some((end, _)) => format!("{}…", &shown[..end]),
            None => shown,
        };
        let (model, field) = (self.model.clone(), field.to_string());
        ConfigError::Wrong { model, field, value, want: want.to_string() }
    }

    /// A whole number of at most `limit` under the first of `names` that is there.
    pub fn number(&self, names: &[&str], limit: u64) -> Result<Option<u64>, ConfigError> {
        let Some(name) = names.iter().find(|name| self.has(name)) else {
            return Ok(None);
        };
        let value = self.get(name).and_then(whole);
        match value.filter(|value| *value <= limit) {
            Some(value) => Ok(Some(value)),
            None => Err(self.wrong(name, &format!("a whole number up to {limit}"))),
        }
    }

    /// The same; of a list per layer (Gemma 3n, Hunyuan) the largest.
    pub fn largest(&self, names: &[&str], limit: u64) -> Result<Option<u64>, ConfigError> {
        match names.iter().find_map(|name| self.list(name)) {
            Some(list) => Ok(list.iter().filter_map(whole).max().filter(|value| *value <= limit)),
            None => self.number(names, limit),
        }
    }

    /// The same as [`number`](Self::number); a missing one is remembered under its first name and read as 1, so that all missing
    /// fields can be named at once by [`complete`](Self::complete).
    pub fn required(&self, names: &[&str], limit: u64) -> Result<u64, ConfigError> {
        if let Some(value) = self.number(names, limit)? {
            return Ok(value);
        }
        let mut missing = self.missing.borrow_mut();
        if let Some(name) = names.first().filter(|name| !missing.iter().any(|m| m == *name)) {
            missing.push((*name).to_string());
        }
        Ok(1)
    }

    /// A list, or `None` where the field is absent or no list.
    pub fn list(&self, field: &str) -> Option<&Vec<Value>> {
        self.get(field)?.as_array()
    }

    /// Fails with the names of the required fields that were missing since the last call.
    pub fn complete(&self) -> Result<(), MissingFields> {
        let fields = self.missing.take();
        if fields.is_empty() {
            return Ok(());
        }
        Err(MissingFields { model: self.model.clone(), fields })
    }

    /// Sentences about fields that the config itself marks as uncertain.
    pub fn notes(&self) -> Vec<String> {
        let marks =
            [("_from_memory", "from memory"), ("_derived", "derived"), ("_assumed", "assumed")];
        let listed = |(field, word): (&str, &str)| {
            let names: Vec<&str> = self.list(field)?.iter().filter_map(Value::as_str).collect();
            (!names.is_empty()).then(|| format!("config fields {word}: {}", names.join(", ")))
        };
        let mut notes: Vec<String> = marks.into_iter().filter_map(listed).collect();
        let source = self.text("_source").filter(|source| source.contains("memory"));
        notes.extend(source.map(|source| format!("config source: {source}")));
        notes
    }
}

/// A whole number, also one written as a float (`8.0`).
pub fn whole(value: &Value) -> Option<u64> {
    value.as_u64().or_else(|| {
        let float = value.as_f64()?;
        (float >= 0.0 && float.fract() == 0.0 && float < 9e15).then_some(float as u64)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn fields(value: Value, settings: &[&str]) -> Fields {
        let settings: Vec<String> = settings.iter().map(|s| (*s).to_string()).collect();
        Fields::new("m", value.as_object().unwrap().clone(), &settings).unwrap()
    }

    #[test]
    fn nested_text_configs_are_lifted_and_settings_overrule() {
        let value = json!({"architectures": ["A"], "text_config": {"hidden_size": 8, "x": 1}});
        let fields = fields(value, &["x=2", "name=abc"]);
        assert_eq!(fields.number(&["hidden_size"], 100).unwrap(), Some(8));
        assert_eq!(fields.number(&["x"], 100).unwrap(), Some(2));
        assert_eq!(fields.text("name"), Some("abc"));
    }

    #[test]
    fn all_missing_fields_are_named_with_the_mend() {
        let fields = fields(json!({"c": 5}), &[]);
        assert_eq!(fields.required(&["a", "aa"], 9).unwrap(), 1);
        assert_eq!(fields.required(&["b"], 9).unwrap(), 1);
        assert_eq!(fields.required(&["c"], 9).unwrap(), 5);
        let text = fields.complete().unwrap_err().to_string();
        assert!(
            text.contains("no a, no b") && text.contains("--set a=VALUE --set b=VALUE"),
            "{text}"
        );
        assert!(fields.complete().is_ok());
        assert!(fields.required(&["c"], 4).unwrap_err().to_string().contains("c = 5"));
    }

    #[test]
    fn settings_need_an_equals_sign() {
        let error = Fields::new("m", Map::new(), &["heads".into()]).unwrap_err();
        assert!(error.to_string().contains("FIELD=VALUE"));
    }
}

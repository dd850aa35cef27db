//! `reef inspect`: what is in a GGUF file, and what a token of KV memory costs with it.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::PathBuf;

use reef_kv::page::{PageFormat, PageShape};
use reef_model::gguf::{Gguf, GgufError, Optional as _, escape};
use reef_model::runner::LoadError;
use reef_model::spec::ModelSpec;
use serde::Serialize;

use crate::{Common, output, sizes};

/// Tokens of a block for which KV bytes are shown: the default of `--block-size`.
const BLOCK_SIZE: usize = 32;

/// Show what is in a GGUF file: header, tensors, tokenizer, bytes per KV token
#[derive(clap::Args)]
pub struct Args {
    /// A GGUF file, also one of a model that Reef cannot run
    #[arg(value_name = "FILE")]
    file: PathBuf,
    #[command(flatten)]
    common: Common,
}

/// Runs `reef inspect`.
pub fn run(args: Args) -> anyhow::Result<()> {
    let gguf = Gguf::open(&args.file)?;
    let report = Report::new(&args.file.to_string_lossy(), &gguf)?;
    if args.common.json {
        return output::print_json(&report);
    }
    output::print_line(report.text().trim_end())
}

/// All that is shown; the JSON document as it is.
#[derive(Serialize)]
struct Report {
    file: String,
    bytes: usize,
    version: u32,
    alignment_bytes: usize,
    keys: usize,
    architecture: Option<String>,
    name: Option<String>,
    license: Option<String>,
    parameters: u64,
    tokenizer: Option<Tokenizer>,
    kv: Kv,
    types: BTreeMap<&'static str, TypeSum>,
    tensors: Vec<Tensor>,
}

#[derive(Serialize)]
struct Tensor {
    name: String,
    #[serde(rename = "type")]
    tensor_type: &'static str,
    /// Sizes as in the file, row length first.
    shape: Vec<usize>,
    offset: usize,
    bytes: usize,
}

#[derive(Default, Serialize)]
struct TypeSum {
    tensors: usize,
    parameters: u64,
    bytes: usize,
    readable: bool,
}

#[derive(Serialize)]
struct Tokenizer {
    model: String,
    pre: Option<String>,
    vocabulary: usize,
    special: Vec<Special>,
    chat_template: bool,
}

/// A token with a role: `bos` is the key `tokenizer.ggml.bos_token_id`.
#[derive(Serialize)]
struct Special {
    role: String,
    id: u32,
    /// `None` if the id is outside the vocabulary.
    text: Option<String>,
}

/// What a token costs, or why that cannot be told.
#[derive(Serialize)]
#[serde(untagged)]
enum Kv {
    Known(Geometry),
    Unknown { error: String },
}

/// The shape of KV memory.
#[derive(Serialize)]
struct Geometry {
    layers: usize,
    kv_heads: usize,
    head_dim: usize,
    groups: Vec<Group>,
    block_size: usize,
    bytes_per_token: BTreeMap<&'static str, f64>,
}

/// Layers that cache alike: with a window they stop growing at `window` tokens.
#[derive(Serialize)]
struct Group {
    layers: usize,
    window: Option<usize>,
    bytes_per_token: BTreeMap<&'static str, f64>,
}

impl Report {
    fn new(file: &str, gguf: &Gguf) -> Result<Report, GgufError> {
        let text = |key: &str| gguf.str(key).optional().map(|found| found.map(str::to_owned));
        let mut types: BTreeMap<&'static str, TypeSum> = BTreeMap::new();
        let mut parameters = 0;
        let mut tensors = Vec::new();
        for tensor in gguf.tensors() {
            let sum = types.entry(tensor.tensor_type.name()).or_default();
            sum.tensors += 1;
            sum.parameters += tensor.elements() as u64;
            sum.bytes += tensor.data.len();
            sum.readable = tensor.tensor_type.is_readable();
            parameters += tensor.elements() as u64;
            tensors.push(Tensor {
                name: tensor.name.to_owned(),
                tensor_type: tensor.tensor_type.name(),
                shape: tensor.dims.to_vec(),
                offset: tensor.offset,
                bytes: tensor.data.len(),
            });
        }
        Ok(Report {
            file: file.to_owned(),
            bytes: gguf.file_size(),
            version: gguf.version(),
            alignment_bytes: gguf.alignment(),
            keys: gguf.metadata().len(),
            architecture: text("general.architecture")?,
            name: text("general.name")?,
            license: text("general.license")?,
            parameters,
            tokenizer: Tokenizer::new(gguf)?,
            kv: match Geometry::new(gguf) {
                Ok(geometry) => Kv::Known(geometry),
                Err(error) => Kv::Unknown { error: error.to_string() },
            },
            types,
            tensors,
        })
    }

    /// The report for people. Text from the file is escaped: it must not steer a terminal.
    fn text(&self) -> String {
        let mut out = String::new();
        let mut line = |name: &str, value: String| {
            let _ = writeln!(out, "{name:<14}{value}"); // writing to a String cannot fail
        };
        let shown = |text: &Option<String>| text.as_deref().map_or("not given".into(), escape);
        let size = sizes::display(self.bytes as u64);
        line("File", format!("{} ({size}, {} bytes)", escape(&self.file), grouped(self.bytes)));
        let (version, keys, alignment) = (self.version, self.keys, self.alignment_bytes);
        line("Format", format!("GGUF version {version}, {keys} keys, {alignment}-byte alignment"));
        line("Architecture", shown(&self.architecture));
        line("Name", shown(&self.name));
        line("License", shown(&self.license));
        line("Parameters", grouped(self.parameters as usize));
        out.push('\n');
        match &self.tokenizer {
            Some(tokenizer) => tokenizer.write(&mut out),
            None => out.push_str("Tokenizer     none\n"),
        }
        out.push('\n');
        match &self.kv {
            Kv::Known(geometry) => geometry.write(&mut out),
            Kv::Unknown { error } => {
                let _ = writeln!(out, "KV memory     not known: {}", escape(error));
            }
        }
        self.write_tensors(&mut out);
        out
    }

    fn write_tensors(&self, out: &mut String) {
        if self.tensors.is_empty() {
            out.push_str("\nTensors       none\n");
            return;
        }
        let _ =
            writeln!(out, "\n{:<14}{:>8}{:>17}{:>17}", "Type", "tensors", "parameters", "bytes");
        for (name, sum) in &self.types {
            let (parameters, bytes) = (grouped(sum.parameters as usize), grouped(sum.bytes));
            let mark = if sum.readable { "" } else { "  Reef does not compute with this type" };
            let _ = writeln!(out, "{name:<14}{:>8}{parameters:>17}{bytes:>17}{mark}", sum.tensors);
        }
        let names: Vec<String> = self.tensors.iter().map(|tensor| escape(&tensor.name)).collect();
        let widest = names.iter().map(|name| name.chars().count()).max().unwrap_or(0);
        let width = widest.clamp("Tensor".len(), 48) + 2;
        let _ = writeln!(out, "\n{:<width$}{:<9}{:<20}{:>13}", "Tensor", "type", "shape", "bytes");
        for (tensor, name) in self.tensors.iter().zip(&names) {
            let shape: Vec<String> = tensor.shape.iter().map(usize::to_string).collect();
            let (shape, bytes) = (shape.join(" x "), grouped(tensor.bytes));
            let _ = writeln!(out, "{name:<width$}{:<9}{shape:<20}{bytes:>13}", tensor.tensor_type);
        }
    }
}

impl Tokenizer {
    fn new(gguf: &Gguf) -> Result<Option<Tokenizer>, GgufError> {
        let Some(model) = gguf.str("tokenizer.ggml.model").optional()? else { return Ok(None) };
        let tokens = gguf.str_array("tokenizer.ggml.tokens").optional()?;
        let mut special = Vec::new();
        for (key, _) in gguf.metadata() {
            let role =
                key.strip_prefix("tokenizer.ggml.").and_then(|k| k.strip_suffix("_token_id"));
            if let Some(role) = role {
                let id = gguf.u32(key)?;
                let text = tokens.clone().and_then(|mut tokens| tokens.nth(id as usize));
                special.push(Special { role: role.to_owned(), id, text: text.map(str::to_owned) });
            }
        }
        Ok(Some(Tokenizer {
            model: model.to_owned(),
            pre: gguf.str("tokenizer.ggml.pre").optional()?.map(str::to_owned),
            vocabulary: tokens.map_or(0, |tokens| tokens.len()),
            special,
            chat_template: gguf.get("tokenizer.chat_template").is_some(),
        }))
    }

    fn write(&self, out: &mut String) {
        let pre = self.pre.as_deref().unwrap_or("not given");
        let (model, pre, size) = (escape(&self.model), escape(pre), grouped(self.vocabulary));
        let _ = writeln!(out, "Tokenizer     {model}, pre-tokenizer {pre}, {size} tokens");
        for Special { role, id, text } in &self.special {
            let text = text.as_deref().map_or("outside the vocabulary".into(), escape);
            let _ = writeln!(out, "  {:<12}{id} {text}", escape(role));
        }
        let template = if self.chat_template { "yes" } else { "no" };
        let _ = writeln!(out, "  template    {template}");
    }
}

impl Geometry {
    fn new(gguf: &Gguf) -> Result<Geometry, LoadError> {
        let spec = ModelSpec::from_gguf(gguf)?;
        let groups: Vec<(usize, Option<usize>)> =
            spec.groups.iter().map(|group| (group.layers.len(), group.window)).collect();
        Ok(Geometry::of(spec.page_shape(BLOCK_SIZE), &groups))
    }

    /// Sums up KV groups given as their number of layers and their window.
    fn of(shape: PageShape, groups: &[(usize, Option<usize>)]) -> Geometry {
        let cost = |layers: usize| {
            let bytes = |format| (layers * shape.page_bytes(format)) as f64 / BLOCK_SIZE as f64;
            PageFormat::ALL.iter().map(|&format| (format.name(), bytes(format))).collect()
        };
        let group = |&(layers, window)| Group { layers, window, bytes_per_token: cost(layers) };
        let layers = groups.iter().map(|(layers, _)| layers).sum();
        Geometry {
            layers,
            kv_heads: shape.kv_heads,
            head_dim: shape.head_dim,
            groups: groups.iter().map(group).collect(),
            block_size: shape.block_size,
            bytes_per_token: cost(layers),
        }
    }

    fn write(&self, out: &mut String) {
        let Geometry { layers, kv_heads, head_dim, block_size, .. } = self;
        let _ = writeln!(
            out,
            "KV memory     {layers} layers, KV heads {kv_heads}, head dimension {head_dim}"
        );
        let all = amounts(&self.bytes_per_token);
        let _ = writeln!(out, "  a token     {all}, in blocks of {block_size} tokens");
        for Group { layers, window, bytes_per_token } in &self.groups {
            let kind = window.map_or("full attention".into(), |w| format!("window of {w} tokens"));
            let _ = writeln!(out, "  {layers:>3} layers  {kind}: {}", amounts(bytes_per_token));
        }
    }
}

fn amounts(bytes_per_token: &BTreeMap<&'static str, f64>) -> String {
    let amount = |(format, bytes): (&&str, &f64)| match bytes.fract() == 0.0 {
        true => format!("{format} {} bytes", grouped(*bytes as usize)),
        false => format!("{format} {bytes:.1} bytes"),
    };
    bytes_per_token.iter().map(amount).collect::<Vec<_>>().join(", ")
}

/// A number with its thousands set apart: `23,040`.
fn grouped(number: usize) -> String {
    let digits = number.to_string();
    let mut out = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A little file whose name and token try to steer the terminal.
    fn file() -> Gguf {
        let string = |text: &str| [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat();
        let (number, words, list) = (4u32.to_le_bytes(), 8u32.to_le_bytes(), 9u32.to_le_bytes());
        let entry =
            |key: &str, kind: [u8; 4], value: &[u8]| [&string(key), &kind[..], value].concat();
        let tokens = [&words[..], &1u64.to_le_bytes(), &string("<s>\u{1b}]0;x\u{7}")].concat();
        let keys = [
            entry("general.architecture", words, &string("llama")),
            entry("general.name", words, &string("a\u{1b}[2J\nFile forged")),
            entry("tokenizer.ggml.model", words, &string("gpt2")),
            entry("tokenizer.ggml.tokens", list, &tokens),
            entry("tokenizer.ggml.bos_token_id", number, &0u32.to_le_bytes()),
            entry("tokenizer.ggml.eos_token_id", number, &9u32.to_le_bytes()),
        ];
        let mut bytes = [&b"GGUF"[..], &3u32.to_le_bytes(), &1u64.to_le_bytes()].concat();
        bytes.extend((keys.len() as u64).to_le_bytes());
        bytes.extend(keys.concat());
        bytes.extend(string("w"));
        bytes.extend([2u32, 32, 0, 2, 0, 20, 0, 0].iter().flat_map(|word| word.to_le_bytes()));
        bytes.resize(bytes.len().next_multiple_of(32) + 36, 0);
        Gguf::from_bytes(bytes).unwrap()
    }

    #[test]
    fn the_text_has_no_control_characters_of_the_file() {
        let text = Report::new("a.gguf", &file()).unwrap().text();
        assert!(!text.contains(|c: char| c.is_control() && c != '\n'), "{text:?}");
        assert!(text.contains("Name          a\\u{1b}[2J\\nFile forged\n"), "{text}");
        assert!(text.contains("  bos         0 <s>\\u{1b}]0;x\\u{7}\n"), "{text}");
        assert!(text.contains("  eos         9 outside the vocabulary\n"), "{text}");
    }

    #[test]
    fn types_are_summed_and_marked() {
        let report = Report::new("a.gguf", &file()).unwrap();
        let sum = &report.types["IQ4_NL"];
        assert_eq!((sum.tensors, sum.parameters, sum.bytes, sum.readable), (1, 64, 36, false));
        assert!(report.text().contains("Reef does not compute with this type"));
        let json = serde_json::to_value(&report).unwrap();
        assert_eq!(json["tensors"][0]["shape"], serde_json::json!([32, 2]));
        assert!(json["kv"]["error"].is_string());
    }

    #[test]
    fn a_token_of_smollm2_costs_what_the_documents_say() {
        let shape = PageShape { kv_heads: 3, head_dim: 64, block_size: BLOCK_SIZE };
        let kv = Geometry::of(shape, &[(30, None)]);
        assert_eq!(kv.bytes_per_token["f16"], 23_040.0);
        assert_eq!(kv.bytes_per_token["int8"], 12_960.0);
        assert_eq!(
            amounts(&kv.bytes_per_token),
            "f16 23,040 bytes, fp8-e4m3 11,700 bytes, fp8-e5m2 11,700 bytes, int4 7,200 bytes, \
             int8 12,960 bytes, k8v4 10,080 bytes"
        );
    }

    #[test]
    fn numbers_are_set_apart() {
        assert_eq!([0, 999, 1000, 12_345_678].map(grouped), ["0", "999", "1,000", "12,345,678"]);
    }
}

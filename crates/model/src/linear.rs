//! A linear layer that hides the format of its weights.

use crate::gguf::{Gguf, TensorInfo};
use crate::runner::{Compute, LoadError};
use reef_kernels::matmul::{self, Job, PackedMatrix, QuantizedRows, Rows, WeightFormat};

/// `y = (W x) * scale + b` (see [`ScaleRule`]), where W may be several tensors stacked by rows (Q, K and V, or gate and
/// up), each in its own format, computed under one barrier.
pub struct Linear {
    parts: Vec<Part>,
    rows: usize,
    columns: usize,
    precise: bool,
}

struct Part {
    weights: PackedMatrix,
    /// Per-tensor multiplier, 1 where the file has none.
    scale: f32,
    bias: Option<Vec<f32>>,
    first_row: usize,
}

/// What a per-tensor multiplier (`NAME.scale`) applies to; architectures differ, as llama.cpp has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScaleRule {
    /// `(W x) * scale + b`.
    Product,
    /// `(W x + b) * scale`.
    Sum,
    /// The file's scale is not used.
    Ignored,
}

impl Linear {
    /// Loads and stacks `NAME.weight` (with optional `NAME.bias` and `NAME.scale`) for each of `names`.
    /// Each matrix must have `columns` columns; `rows[i]` are the rows expected of `names[i]`.
    pub fn load(
        gguf: &Gguf,
        names: &[String],
        rows: &[usize],
        columns: usize,
        rule: ScaleRule,
    ) -> Result<Linear, LoadError> {
        let mut parts = Vec::with_capacity(names.len());
        let mut first_row = 0;
        for (name, &rows) in names.iter().zip(rows) {
            let weights = load_matrix(gguf, &format!("{name}.weight"), rows, columns)?;
            let mut bias = load_optional(gguf, &format!("{name}.bias"), rows)?;
            let scale = match rule {
                ScaleRule::Ignored => None,
                _ => load_optional(gguf, &format!("{name}.scale"), 1)?,
            };
            let scale = scale.map_or(1.0, |scale| scale[0]);
            if rule == ScaleRule::Sum {
                bias.iter_mut().flatten().for_each(|bias| *bias *= scale);
            }
            parts.push(Part { weights, scale, bias, first_row });
            first_row += rows;
        }
        Ok(Linear { parts, rows: first_row, columns, precise: false })
    }

    /// Rows of the stacked matrix: floats of an output row.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Columns: floats of an input row.
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// Bytes of the packed weights.
    pub fn bytes(&self) -> usize {
        self.parts.iter().map(|part| part.weights.bytes()).sum()
    }

    /// Row `row` of W as f32 (an embedding look-up), `columns` floats.
    pub fn row(&self, row: usize, out: &mut [f32]) {
        let index = self.parts.partition_point(|part| part.first_row <= row) - 1;
        let part = &self.parts[index];
        part.weights.dequantize_row(row - part.first_row, out);
    }

    /// The same layer with its 8-bit activations taken to about 15 bits, for inputs whose rounding
    /// shows in the result most (decision 0003).
    pub fn precise(self) -> Linear {
        Linear { precise: true, ..self }
    }

    /// `out[i] = W input[i]` with scale and bias; `input` = `[rows][self.columns()]`, `out` grows to
    /// `[rows][self.rows()]`. Quantises the input into `codes` where activations are 8-bit.
    pub fn multiply(
        &self,
        compute: &Compute,
        input: &[f32],
        codes: &mut QuantizedRows,
        out: &mut Vec<f32>,
    ) {
        let rows = input.len() / self.columns;
        let quantized = |part: &Part| part.weights.format().is_quantized();
        let with_rest = self.precise && compute.quantize && self.parts.iter().all(quantized);
        let product_rows = if with_rest { 2 * rows } else { rows };
        if out.len() < product_rows * self.rows {
            out.resize(product_rows * self.rows, 0.0);
        }
        let out = &mut out[..product_rows * self.rows];
        if with_rest {
            codes.quantize_with_rest(compute.tier, &compute.pool, input, self.columns);
        } else if compute.quantize && self.parts.iter().any(quantized) {
            codes.quantize(compute.tier, &compute.pool, input, self.columns);
        }
        let (coded, floats): (Vec<&Part>, Vec<&Part>) =
            self.parts.iter().partition(|part| compute.quantize && quantized(part));
        self.product(compute, &coded, Rows::Int8(codes), out);
        self.product(compute, &floats, Rows::F32 { values: input, rows }, out);
        if with_rest {
            add_rests(out, self.rows);
        }
        for part in &self.parts {
            part.finish(&mut out[..rows * self.rows], self.rows);
        }
    }

    fn product(&self, compute: &Compute, parts: &[&Part], rows: Rows<'_>, out: &mut [f32]) {
        let jobs: Vec<Job<'_>> = parts
            .iter()
            .map(|part| Job { weights: &part.weights, out_column: part.first_row })
            .collect();
        if !jobs.is_empty() {
            matmul::matmul(compute.tier, &compute.pool, &jobs, rows, out, self.rows);
        }
    }
}

/// Row `i` becomes row `2 i` + row `2 i + 1`, in order, so that no source is overwritten too early.
fn add_rests(out: &mut [f32], stride: usize) {
    for row in 0..out.len() / stride / 2 {
        if row > 0 {
            out.copy_within(2 * row * stride..(2 * row + 1) * stride, row * stride);
        }
        let (sums, rests) = out.split_at_mut((2 * row + 1) * stride);
        for (sum, rest) in sums[row * stride..].iter_mut().zip(&rests[..stride]) {
            *sum += *rest;
        }
    }
}

impl Part {
    fn finish(&self, out: &mut [f32], stride: usize) {
        if self.scale == 1.0 && self.bias.is_none() {
            return;
        }
        for row in out.chunks_exact_mut(stride) {
            let row = &mut row[self.first_row..][..self.weights.rows()];
            for (i, y) in row.iter_mut().enumerate() {
                *y = *y * self.scale + self.bias.as_ref().map_or(0.0, |bias| bias[i]);
            }
        }
    }
}

/// Loads a matrix and gives its pages of the file back to the system: it now lives in packed form, and
/// a process never holds both.
fn load_matrix(
    gguf: &Gguf,
    name: &str,
    rows: usize,
    columns: usize,
) -> Result<PackedMatrix, LoadError> {
    let tensor = gguf.tensor(name)?;
    expect_shape(&tensor, &[columns, rows])?;
    tensor.require_readable()?;
    let format = WeightFormat::from_ggml_type(tensor.tensor_type.id()).ok_or_else(|| {
        LoadError::Unsupported {
            field: format!("tensor {name}"),
            value: tensor.tensor_type.name().into(),
            mend: "convert it to a format that Reef reads (see README)".into(),
        }
    })?;
    let mut release = |part| gguf.advise_part_not_needed(&tensor, part);
    PackedMatrix::pack_and_release(format, rows, columns, tensor.data, &mut release)
        .map_err(|source| LoadError::Pack { tensor: name.into(), source })
}

/// Loads a vector of `len` floats (F32, F16 or BF16), or `None` where the file has no such tensor.
pub fn load_optional(gguf: &Gguf, name: &str, len: usize) -> Result<Option<Vec<f32>>, LoadError> {
    let Ok(tensor) = gguf.tensor(name) else {
        return Ok(None);
    };
    expect_shape(&tensor, &[len])?;
    let halves = || tensor.data.chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]]));
    match tensor.tensor_type.name() {
        "F32" => {
            let words = tensor.data.chunks_exact(4);
            Ok(Some(words.map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()))
        }
        "F16" => Ok(Some(halves().map(|h| half::f16::from_bits(h).to_f32()).collect())),
        "BF16" => Ok(Some(halves().map(|h| half::bf16::from_bits(h).to_f32()).collect())),
        other => Err(LoadError::Unsupported {
            field: format!("tensor {name}"),
            value: other.into(),
            mend: "a vector must be F32, F16 or BF16".into(),
        }),
    }
}

fn expect_shape(tensor: &TensorInfo<'_>, expected: &[usize]) -> Result<(), LoadError> {
    let mut found: Vec<usize> = tensor.dims.to_vec();
    while found.len() > expected.len() && found.last() == Some(&1) {
        found.pop();
    }
    if found == expected {
        return Ok(());
    }
    Err(LoadError::Shape { tensor: tensor.name.into(), found, expected: expected.to_vec() })
}

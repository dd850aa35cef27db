//! The specification of the matmul kernels, in plain loops; also the path for CPUs without SIMD tiers.

use super::format::{WeightFormat, float_value};
use super::packed::{PANEL_ROWS, PackedMatrix, PanelLayout, STEP_CODES};
use super::quantized::{GROUP, QuantizedRows, TILE_ROWS};
use half::f16;
use std::ops::Range;

/// The unsigned code of row `row` of a panel at `k` of `group`, from its bit planes.
pub(super) fn code(layout: &PanelLayout, panel: &[u8], group: usize, row: usize, k: usize) -> i32 {
    let planes = &panel[layout.codes_offset(group)..];
    let (step, byte) = (k / 4, 4 * row + k % 4);
    if layout.bits == 8 {
        return i32::from(planes[STEP_CODES * step + byte]);
    }
    let low = planes[STEP_CODES * (step / 2) + byte] >> (4 * (step % 2)) & 15;
    let high = match layout.bits {
        5 => planes[layout.low_bytes + byte] >> step & 1,
        6 => planes[layout.low_bytes + byte] >> (2 * step) & 3,
        _ => 0,
    };
    i32::from(low | high << 4)
}

/// Scale and minimum of row `row` in `group`: a weight is `scale * (code - zero) + minimum`. Both are
/// exact products of the stored parts.
pub(super) fn scale_and_minimum(
    format: WeightFormat,
    panel: &[u8],
    group: usize,
    row: usize,
) -> (f32, f32) {
    let layout = PanelLayout::of(format);
    let half = |at: usize| f16::from_le_bytes([panel[at], panel[at + 1]]).to_f32();
    if layout.head_bytes == 0 {
        let tail = layout.codes_offset(group) + layout.low_bytes + layout.high_bytes + 2 * row;
        let minimum = if layout.tail_bytes == 64 { half(tail + 32) } else { 0.0 };
        return (half(tail), minimum);
    }
    let head = layout.head_offset(group) + 2 * row;
    let side = layout.group_offset(group) + row;
    if layout.side_bytes == 16 {
        return (half(head) * (f32::from(panel[side]) - 128.0), 0.0);
    }
    let minimum = -(half(head + 32) * f32::from(panel[side + PANEL_ROWS]));
    (half(head) * f32::from(panel[side]), minimum)
}

/// Sums of up to twelve rows of activations times the sixteen rows of a panel.
pub(super) type TileSums = [[f32; PANEL_ROWS]; TILE_ROWS];

/// Rows `rows` (at most twelve) of int8 activations times a panel.
///
/// Per group of k, in order: the integer dot product is exact, then one rounding for scale and one for
/// the minimum. Every tier, tile and batch size does exactly this for each output.
pub(super) fn int8_tile(
    weights: &PackedMatrix,
    panel: usize,
    x: &QuantizedRows,
    rows: Range<usize>,
) -> TileSums {
    let layout = PanelLayout::of(weights.format());
    let panel = weights.panel(panel);
    let mut sums = [[0.0_f32; PANEL_ROWS]; TILE_ROWS];
    for group in 0..weights.cols() / layout.group {
        let first = group * layout.group;
        for lane in 0..PANEL_ROWS {
            let (scale, minimum) = scale_and_minimum(weights.format(), panel, group, lane);
            let mut codes = [0_i16; GROUP];
            for (k, to) in codes[..layout.group].iter_mut().enumerate() {
                *to = (code(&layout, panel, group, lane, k) - layout.zero) as i16;
            }
            for (row, sums) in rows.clone().zip(&mut sums) {
                let x_codes = x.group_codes(row, first);
                let products =
                    codes.iter().zip(&x_codes).map(|(w, x)| i32::from(*w) * i32::from(*x));
                let dot: i32 = products.sum();
                let x_scale = x.scale(row, first / GROUP);
                sums[lane] = (scale * x_scale).mul_add(dot as f32, sums[lane]);
                if layout.zero == 0 {
                    sums[lane] = minimum.mul_add(x.scaled_sum(row, first / GROUP), sums[lane]);
                }
            }
        }
    }
    sums
}

/// Rows `rows` (at most twelve) of f32 activations times a panel: one fused multiply-add per k, in order.
pub(super) fn f32_tile(
    weights: &PackedMatrix,
    panel: usize,
    x: &[f32],
    rows: Range<usize>,
) -> TileSums {
    let mut sums = [[0.0_f32; PANEL_ROWS]; TILE_ROWS];
    for k in 0..weights.cols() {
        for lane in 0..PANEL_ROWS {
            let weight = weight(weights, panel, k, lane);
            for (row, sums) in rows.clone().zip(&mut sums) {
                sums[lane] = weight.mul_add(x[row * weights.cols() + k], sums[lane]);
            }
        }
    }
    sums
}

/// The f32 value of a weight.
fn weight(weights: &PackedMatrix, panel: usize, k: usize, lane: usize) -> f32 {
    let format = weights.format();
    let panel = weights.panel(panel);
    if !format.is_quantized() {
        let width = format.block_bytes();
        return float_value(format, &panel[(k * PANEL_ROWS + lane) * width..][..width]);
    }
    let layout = PanelLayout::of(format);
    let (group, in_group) = (k / layout.group, k % layout.group);
    let (scale, minimum) = scale_and_minimum(format, panel, group, lane);
    let code = code(&layout, panel, group, lane, in_group);
    scale.mul_add((code - layout.zero) as f32, minimum)
}

/// Quantises 32 values: codes in -127..=127 and the scale. See [`QuantizedRows`].
pub(super) fn quantize_group(x: &[f32], codes: &mut [i8; GROUP]) -> f32 {
    let pick_larger = |largest: f32, x: f32| if x > largest { x } else { largest };
    let largest = x.iter().map(|x| x.max(-x)).fold(0.0, pick_larger);
    let (scale, inverse) = super::quantized::group_scales(largest);
    for (code, x) in codes.iter_mut().zip(x) {
        let y = (x * inverse).round_ties_even();
        // `clamp` would keep a NaN; the order here sends it to 127, as the vector tiers do.
        let y = if y < 127.0 { y } else { 127.0 };
        *code = (if y > -127.0 { y } else { -127.0 }) as i8;
    }
    scale
}

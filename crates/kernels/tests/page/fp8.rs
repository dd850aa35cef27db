//! 8-bit floats against their definition.

use super::pages::{Noise, decoded, encoded};
use half::f16;
use reef_kernels::dispatch::Tier;
use reef_kernels::page::fp8::Fp8;
use reef_kv::page::{PageFormat, PageShape};

const FORMATS: [Fp8; 2] = [Fp8::E4M3, Fp8::E5M2];

/// The definition in f64: None for NaN.
fn defined(format: Fp8, code: u8) -> Option<f64> {
    let (exponent_bits, mantissa_bits) = if format == Fp8::E4M3 { (4, 3) } else { (5, 2) };
    let bias = (1 << (exponent_bits - 1)) - 1;
    let field = i32::from(code >> mantissa_bits) & ((1 << exponent_bits) - 1);
    let mantissa = f64::from(code & ((1 << mantissa_bits) - 1)) / f64::from(1 << mantissa_bits);
    let sign = if code >> 7 == 1 { -1.0 } else { 1.0 };
    let top = field == (1 << exponent_bits) - 1;
    match format {
        Fp8::E4M3 if top && mantissa == 0.875 => return None,
        Fp8::E5M2 if top && mantissa > 0.0 => return None,
        Fp8::E5M2 if top => return Some(sign * f64::INFINITY),
        _ => {}
    }
    let size = if field == 0 {
        mantissa * 2f64.powi(1 - bias)
    } else {
        (1.0 + mantissa) * 2f64.powi(field - bias)
    };
    Some(sign * size)
}

/// The finite code nearest to `x`, ties to the even one, by looking at all of them.
fn nearest(format: Fp8, x: f32) -> u8 {
    let signs = if x.is_sign_negative() { 128..=255u8 } else { 0..=127 };
    let finite = signs.filter_map(|code| Some((code, defined(format, code)?)));
    let finite = finite.filter(|(_, value)| value.is_finite());
    let distance = |value: f64| (value - f64::from(x).clamp(-1e6, 1e6)).abs();
    let least = finite.clone().map(|(_, value)| distance(value)).fold(f64::INFINITY, f64::min);
    let mut best = finite.filter(|(_, value)| distance(*value) == least).map(|(code, _)| code);
    let (first, second) = (best.next().unwrap(), best.next());
    second.filter(|code| code % 2 == 0).unwrap_or(first)
}

#[test]
fn all_codes_decode_as_defined() {
    for format in FORMATS {
        for code in 0..=255u8 {
            let got = format.decode(code);
            match defined(format, code) {
                None => assert!(got.is_nan(), "{format:?} {code:#x}"),
                Some(value) => {
                    assert_eq!(f64::from(got), value, "{format:?} {code:#x}");
                    assert_eq!(got.is_sign_negative(), code >= 128);
                }
            }
        }
    }
    // E5M2 is the upper byte of an f16.
    for code in 0..=255u8 {
        let half = f16::from_bits(u16::from(code) << 8).to_f32();
        assert!(half.to_bits() == Fp8::E5M2.decode(code).to_bits() || half.is_nan());
    }
}

#[test]
fn the_largest_number_is_the_largest_finite_code() {
    for (format, largest) in [(Fp8::E4M3, 448.0), (Fp8::E5M2, 57_344.0)] {
        let finite = (0..128).filter_map(|code| defined(format, code)).filter(|x| x.is_finite());
        assert_eq!(finite.fold(0.0, f64::max), largest);
        assert_eq!(f64::from(format.largest()), largest);
        for beyond in [1.03 * largest as f32, 1e30, f32::MAX, f32::INFINITY] {
            assert_eq!(f64::from(format.decode(format.encode(beyond))), largest);
            assert_eq!(f64::from(format.decode(format.encode(-beyond))), -largest);
        }
        assert!(format.decode(format.encode(f32::NAN)).is_nan());
        assert!(format.decode(format.encode(-f32::NAN)).is_nan());
    }
}

#[test]
fn encoding_finds_the_nearest_code() {
    let mut noise = Noise::new(3);
    for format in FORMATS {
        let mut check = |x: f32| {
            let got = format.encode(x);
            assert_eq!(got, nearest(format, x), "{format:?} {x:e}: {got:#x}");
        };
        for code in 0..=255u8 {
            let Some(value) = defined(format, code).filter(|x| x.is_finite()) else { continue };
            // The number, the tie with the next one, and their neighbours.
            let next = defined(format, code + 1).filter(|x| x.is_finite()).unwrap_or(value);
            for x in [value as f32, ((value + next) / 2.0) as f32] {
                let (below, above) = (x.next_down(), x.next_up());
                [x, below, above].into_iter().for_each(&mut check);
            }
        }
        for _ in 0..20_000 {
            let any = f32::from_bits(noise.bits());
            if any.is_finite() {
                check(any);
            }
            // Around the numbers that the format has.
            check(noise.unit() * 2f32.powi((noise.bits() % 40) as i32 - 20));
        }
    }
}

/// Every half up to the largest 8-bit float, in a page whose scale is therefore exactly 1.
#[test]
fn pages_encode_every_half_as_the_definition_does() {
    let shape = PageShape { kv_heads: 1, head_dim: 256, block_size: 128 };
    for (format, page_format) in
        [(Fp8::E4M3, PageFormat::Fp8E4M3), (Fp8::E5M2, PageFormat::Fp8E5M2)]
    {
        let largest = f16::from_f32(format.largest());
        // K holds them positive and V negative; what is left over repeats the largest.
        let halves =
            |sign: u16| (0..128 * 256u16).map(move |bits| bits.min(largest.to_bits()) | sign);
        let page: Vec<u8> = halves(0).chain(halves(0x8000)).flat_map(u16::to_le_bytes).collect();
        for tier in Tier::available() {
            let coded = encoded(tier, &shape, (PageFormat::F16, page_format), &page).unwrap();
            let at = shape.head(page_format, 0);
            for scale in [at.k_scale, at.v_scale] {
                assert_eq!(coded[scale..scale + 4], 1f32.to_le_bytes());
            }
            for (part, sign) in [(at.k, 0), (at.v, 0x8000)] {
                for (code, bits) in coded[part..].iter().zip(halves(sign)) {
                    let value = f16::from_bits(bits).to_f32();
                    assert_eq!(*code, format.encode(value), "{} {value}", tier.name());
                }
            }
        }
    }
}

#[test]
fn scales_put_the_largest_magnitude_at_the_top() {
    // One value of 600 among small ones: with a scale of 1 it would saturate at 448.
    let shape = PageShape { kv_heads: 1, head_dim: 64, block_size: 32 };
    let mut halves = vec![f16::from_f32(0.5); 2 * 64 * 32];
    halves[70] = f16::from_f32(600.0);
    halves[64 * 32 + 9] = f16::from_f32(-600.0);
    let page: Vec<u8> = halves.iter().flat_map(|x| x.to_le_bytes()).collect();
    for tier in Tier::available() {
        for format in [PageFormat::Fp8E4M3, PageFormat::Fp8E5M2] {
            let coded = encoded(tier, &shape, (PageFormat::F16, format), &page).unwrap();
            let [keys, values] = decoded(&shape, format, &coded);
            let largest = keys.iter().copied().fold(0.0, f32::max);
            let least = values.iter().copied().fold(0.0, f32::min);
            assert!((largest - 600.0).abs() < 1e-3 && (least + 600.0).abs() < 1e-3);
        }
    }
}

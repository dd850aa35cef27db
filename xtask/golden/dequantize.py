"""Writes crates/kernels/tests/data/dequantize/<FORMAT>.bin: what the `gguf` package dequantises.

Each file is a tensor of ROWS x COLS in one GGUF format, random bits with finite scales, followed by its
values as little-endian f32. Run from the repository's root: python3 xtask/golden/dequantize.py
Needs: pip install gguf numpy
"""

from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf import dequantize, quant_shape_to_byte_shape

ROWS, COLS = 2, 512
# Offsets of the f16 numbers in a block; all other bits may be random.
HALVES = {
    Type.F32: [],
    Type.F16: [0],
    Type.BF16: [],
    Type.Q4_0: [0],
    Type.Q4_1: [0, 2],
    Type.Q5_0: [0],
    Type.Q5_1: [0, 2],
    Type.Q8_0: [0],
    Type.Q4_K: [0, 2],
    Type.Q5_K: [0, 2],
    Type.Q6_K: [208],
}
BLOCK_BYTES = {
    Type.F32: 4,
    Type.F16: 2,
    Type.BF16: 2,
    Type.Q4_0: 18,
    Type.Q4_1: 20,
    Type.Q5_0: 22,
    Type.Q5_1: 24,
    Type.Q8_0: 34,
    Type.Q4_K: 144,
    Type.Q5_K: 176,
    Type.Q6_K: 210,
}


def random_tensor(kind, random):
    """Row-major bytes [ROWS, row bytes]."""
    row_bytes = quant_shape_to_byte_shape((ROWS, COLS), kind)[-1]
    if kind in (Type.F32, Type.BF16):
        values = random.standard_normal((ROWS, COLS)).astype("<f4")
        if kind == Type.F32:
            return values.view(np.uint8)
        return (values.view("<u4") >> 16).astype("<u2").view(np.uint8)
    blocks = random.integers(0, 256, (ROWS * row_bytes // BLOCK_BYTES[kind], BLOCK_BYTES[kind]))
    blocks = blocks.astype(np.uint8)
    for offset in HALVES[kind]:
        # Mixed magnitudes and signs, some subnormal halves among them.
        exponents = random.integers(-22, 4, len(blocks))
        scales = random.uniform(-2, 2, len(blocks)) * 2.0**exponents
        blocks[:, offset : offset + 2] = scales.astype("<f2").view(np.uint8).reshape(-1, 2)
    return blocks.reshape(ROWS, row_bytes)


def main():
    folder = Path(__file__).parents[2] / "crates/kernels/tests/data/dequantize"
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(20261129)
    for kind in HALVES:
        raw = random_tensor(kind, random)
        values = dequantize(raw if kind not in (Type.F32, Type.F16) else raw.view({Type.F32: "<f4", Type.F16: "<f2"}[kind]), kind)
        assert values.shape == (ROWS, COLS) and np.isfinite(values).all(), kind
        (folder / f"{kind.name}.bin").write_bytes(raw.tobytes() + values.astype("<f4").tobytes())


if __name__ == "__main__":
    main()

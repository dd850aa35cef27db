//! Random numbers of a world, and the mixing that its fake model is made of.

/// Stafford's variant 13 of the 64-bit finaliser of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014): every
/// bit of the input reaches every bit of the output.
pub fn mix(value: u64) -> u64 {
    let mut z = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// A stream of random numbers (SplitMix64).
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// The stream of `seed`, independent of the streams that other `purpose`s get from it: what one part
    /// of a world draws does not shift what another draws.
    pub fn new(seed: u64, purpose: &str) -> Random {
        let name = purpose.bytes().fold(0, |hash, byte| mix(hash ^ u64::from(byte)));
        Random(mix(seed) ^ name)
    }

    /// The next 64 bits.
    pub fn draw(&mut self) -> u64 {
        let value = mix(self.0);
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        value
    }

    /// Uniform in `low..=high`.
    pub fn between(&mut self, low: u64, high: u64) -> u64 {
        low + self.draw() % (high - low + 1)
    }

    /// The same for sizes.
    pub fn size(&mut self, low: usize, high: usize) -> usize {
        self.between(low as u64, high as u64) as usize
    }

    /// True in `percent` of a hundred cases.
    pub fn percent(&mut self, percent: u64) -> bool {
        self.draw() % 100 < percent
    }

    /// One of `items`, which are not empty.
    pub fn pick<T: Clone>(&mut self, items: &[T]) -> T {
        items[self.draw() as usize % items.len()].clone()
    }
}

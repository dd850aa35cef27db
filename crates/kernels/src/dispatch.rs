//! The CPU tier, chosen once at start.

/// Which instructions the kernels use. Higher tiers are faster, never different: every tier gives the
/// same bits as the scalar specification.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Tier {
    /// Plain Rust: the specification, and the path for other CPUs.
    Scalar,
    /// AVX2, FMA and F16C (Haswell, Zen and later).
    Avx2,
    /// AVX-512 F, BW, VL, DQ and VNNI (Ice Lake, Zen 4 and later).
    Avx512,
}

impl Tier {
    /// The best tier of this CPU.
    pub fn detect() -> Tier {
        *Tier::available().last().unwrap_or(&Tier::Scalar)
    }

    /// Every tier this CPU can run, slowest first.
    pub fn available() -> Vec<Tier> {
        let mut tiers = vec![Tier::Scalar];
        #[cfg(target_arch = "x86_64")]
        {
            let avx2 = is_x86_feature_detected!("avx2")
                && is_x86_feature_detected!("fma")
                && is_x86_feature_detected!("f16c");
            if avx2 {
                tiers.push(Tier::Avx2);
            }
            let avx512 = avx2
                && is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512vl")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vnni");
            if avx512 {
                tiers.push(Tier::Avx512);
            }
        }
        tiers
    }

    /// The name shown at start-up and taken by `REEF_CPU_TIER`.
    pub fn name(self) -> &'static str {
        match self {
            Tier::Scalar => "scalar",
            Tier::Avx2 => "avx2",
            Tier::Avx512 => "avx512",
        }
    }
}

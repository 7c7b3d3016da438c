//! Which instructions the kernels use: the best that the processor has, or what the environment asks for.

use crate::error::{Error, Result};

/// The environment variable that forces an instruction set by its name.
pub const ISA_VARIABLE: &str = "PAGEDKV_CPU_ISA";

/// An instruction set that the kernels are compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Isa {
    /// Plain Rust.
    Scalar,
    /// AVX2, FMA and F16C.
    Avx2,
    /// AVX-512 F, BW, VL and DQ.
    Avx512,
    /// The same with products of bfloat16 pairs, which FP8 becomes where there is VBMI too.
    Avx512Bf16,
    /// The same with tiles of AMX. Where those are, products of pairs take twice the time of float32 ones, so few rows are
    /// multiplied in float32.
    Amx,
}

impl Isa {
    /// Every instruction set, from the plainest on.
    pub const ALL: [Self; 5] = [Self::Scalar, Self::Avx2, Self::Avx512, Self::Avx512Bf16, Self::Amx];

    /// What it is called in [`ISA_VARIABLE`].
    pub const fn name(self) -> &'static str {
        match self {
            Self::Scalar => "scalar",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
            Self::Avx512Bf16 => "avx512_bf16",
            Self::Amx => "amx",
        }
    }

    /// Whether this processor has it.
    #[cfg(target_arch = "x86_64")]
    pub fn is_available(self) -> bool {
        let avx512 = || {
            Self::Avx2.is_available()
                && is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512vl")
                && is_x86_feature_detected!("avx512dq")
        };
        match self {
            Self::Scalar => true,
            Self::Avx2 => {
                is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c")
            }
            Self::Avx512 => avx512(),
            Self::Avx512Bf16 => avx512() && is_x86_feature_detected!("avx512bf16"),
            Self::Amx => Self::Avx512Bf16.is_available() && crate::kernels::is_amx_available(),
        }
    }

    /// Whether this processor has it.
    #[cfg(not(target_arch = "x86_64"))]
    pub fn is_available(self) -> bool {
        self == Self::Scalar
    }

    /// What a caller asks for, else as [`Isa::choose`].
    ///
    /// # Errors
    ///
    /// If this processor lacks it.
    pub(crate) fn asked_or_chosen(asked: Option<Self>) -> Result<Self> {
        match asked {
            None => Self::choose(),
            Some(isa) if isa.is_available() => Ok(isa),
            Some(isa) => Err(Error::Value {
                argument: "isa",
                expected: "an instruction set of this processor".to_owned(),
                found: isa.name().to_owned(),
            }),
        }
    }

    /// What [`ISA_VARIABLE`] asks for, else the best that this processor has.
    ///
    /// # Errors
    ///
    /// If the variable holds something else than the name of an instruction set that this processor has.
    pub fn choose() -> Result<Self> {
        let available = || Self::ALL.into_iter().filter(|isa| isa.is_available());
        let Some(asked) = std::env::var_os(ISA_VARIABLE) else {
            return Ok(available().next_back().unwrap_or(Self::Scalar));
        };
        available().find(|isa| asked == isa.name()).ok_or_else(|| Error::Value {
            argument: ISA_VARIABLE,
            expected: format!("one of {}", available().map(Self::name).collect::<Vec<_>>().join(", ")),
            found: asked.display().to_string(),
        })
    }
}

//! The table of kernels: one function per instruction set and element type, each enabling its instructions.

#[cfg(target_arch = "x86_64")]
use super::amx;
use super::panels::{self, KeyCells, PackFn, Panel, ValueCells};
use super::product::{self, Cells, Product, ProductFn};
use super::score::{self, KeyForm};
use super::score_packed::{self, PackedForm};
use super::soften::{self, RowScores, Scores, State, WeightForm};
use super::weigh::{self, ValueForm};
use super::{ScoreFn, SoftenFn, SoftenRowsFn, Strip, WeighFn};
use crate::isa::Isa;
use crate::simd::{BF16, Element, F8E4M3, F8E5M2, F16, F32, Portable, Vector, position};
#[cfg(target_arch = "x86_64")]
use crate::simd::{ByteElement, avx2::Avx2, avx512::Avx512};
use crate::view::DType;

/// What scores queries against keys of one type.
#[derive(Clone, Copy, Debug)]
pub(crate) struct KeyKernels {
    pub(crate) score: ScoreFn,
    pub(crate) pack: PackFn,
    pub(crate) product: ProductFn,
    /// Whether queries and keys are multiplied as pairs of bfloat16; else both are float32 in the order of the type.
    pub(crate) is_paired: bool,
    /// What products must be multiplied by.
    pub(crate) scale: f32,
    /// Cells of a query that lie together, before those of the next row: a vector, or one where keys are packed.
    pub(crate) query_cells: usize,
    is_packed: bool,
    dtype: DType,
}

/// What weighs values of one type.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ValueKernels {
    pub(crate) soften: SoftenFn,
    pub(crate) soften_rows: SoftenRowsFn,
    pub(crate) weigh: WeighFn,
    pub(crate) pack: PackFn,
    pub(crate) product: ProductFn,
    /// Whether weights are bfloat16 and two tokens are taken at a time; else weights are float32.
    pub(crate) is_paired: bool,
    /// What weighted sums must be multiplied by.
    pub(crate) scale: f32,
    dtype: DType,
}

/// Whether keys and values are read where they lie, or laid out first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rows {
    /// The kernels `score` and `weigh`.
    Few,
    /// The kernels `pack` and `product`.
    Many,
}

/// The kernels for one combination of element types.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Kernels {
    /// Lanes of a vector.
    pub(crate) lanes: usize,
    /// Rows that a product is made of, and tokens that it takes whole.
    pub(crate) block_rows: usize,
    pub(crate) block_tokens: usize,
    /// Rows that pass by a tile at a time: whole blocks, whose scores the first cache holds.
    pub(crate) pass_rows: usize,
    /// To call before the first product of a thread and after the last one.
    pub(crate) begin: unsafe fn(),
    pub(crate) end: unsafe fn(),
    pub(crate) keys: KeyKernels,
    pub(crate) values: ValueKernels,
}

impl Kernels {
    /// Chooses by instruction set, number of rows and element types, and by whether keys are packed.
    ///
    /// # Panics
    ///
    /// If this processor lacks the instructions, or the cache is of no floating type.
    pub(crate) fn new(isa: Isa, rows: Rows, [q, k, v]: [DType; 3], is_packed: bool) -> Self {
        assert!(isa.is_available(), "broken law: kernels for {} on a processor without it", isa.name());
        let of = |lanes: usize, keys: KeyKernels, values: ValueKernels| Self {
            lanes,
            block_rows: product::BLOCK_ROWS,
            block_tokens: lanes,
            pass_rows: 8 * product::BLOCK_ROWS,
            begin: || {},
            end: || {},
            keys,
            values,
        };
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Amx if rows == Rows::Many && [q, k, v] == [DType::BF16; 3] => Self {
                block_rows: amx::BLOCK_ROWS,
                block_tokens: amx::TOKENS,
                pass_rows: amx::BLOCK_ROWS,
                begin: amx::begin,
                end: amx::end,
                keys: KeyKernels { product: amx::multiply, ..paired::keys(is_packed) },
                values: ValueKernels { product: amx::multiply, ..paired::values() },
                lanes: Avx512::LANES,
            },
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Bf16 => of(
                Avx512::LANES,
                paired::keys_for(q, k, is_packed).unwrap_or_else(|| avx512::keys(k, is_packed)),
                paired::values_for(q, v).unwrap_or_else(|| avx512::values(v)),
            ),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 | Isa::Amx => of(Avx512::LANES, avx512::keys(k, is_packed), avx512::values(v)),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => of(Avx2::LANES, avx2::keys(k, is_packed), avx2::values(v)),
            _ => of(Portable::LANES, portable::keys(k, is_packed), portable::values(v)),
        }
    }
}

impl KeyKernels {
    /// Elements of a unit of keys.
    pub(crate) fn unit(&self, lanes: usize) -> usize {
        unit(self.dtype, lanes)
    }

    /// The element of a unit of keys that belongs to a cell of a packed query.
    pub(crate) fn element(&self, lanes: usize, cell: usize) -> usize {
        let order = if self.is_paired || self.is_packed { DType::F32 } else { self.dtype };
        position(order, lanes, cell / lanes, cell % lanes)
    }
}

impl ValueKernels {
    /// Elements of a unit of values.
    pub(crate) fn unit(&self, lanes: usize) -> usize {
        unit(self.dtype, lanes)
    }

    /// The element of a unit of values that belongs to a cell of an accumulator.
    pub(crate) fn element(&self, lanes: usize, cell: usize) -> usize {
        position(self.dtype, lanes, cell / lanes, cell % lanes)
    }
}

fn unit(stored: DType, lanes: usize) -> usize {
    lanes * 4 / stored.size_bytes()
}

macro_rules! kernels {
    ($(#[$attribute:meta])* $module:ident, $vector:ty $(, $tables:ident)?) => {
        mod $module {
            use super::*;

            $($tables!();)?

            $(#[$attribute])*
            unsafe fn score<K: KeyForm<$vector>>(q: *const u8, num_rows: usize, strip: &Strip, scores: *mut f32) {
                // SAFETY: the caller's promise.
                unsafe { score::score::<$vector, K>(q, num_rows, strip, scores) }
            }

            $(#[$attribute])*
            unsafe fn score_packed<F: PackedForm<$vector>>(q: *const u8, rows: usize, strip: &Strip, scores: *mut f32) {
                // SAFETY: the caller's promise.
                unsafe { score_packed::score::<$vector, F>(q, rows, strip, scores) }
            }

            $(#[$attribute])*
            unsafe fn pack_packed<F: PackedForm<$vector>>(panel: &Panel) {
                // SAFETY: the caller's promise.
                unsafe { score_packed::pack_keys::<$vector, F>(panel) }
            }

            $(#[$attribute])*
            unsafe fn soften<W: WeightForm<$vector>>(group: &Scores<'_>, state: &State) {
                // SAFETY: the caller's promise.
                unsafe { soften::soften::<$vector, W>(group, state) }
            }

            $(#[$attribute])*
            unsafe fn soften_rows<W: WeightForm<$vector>>(rows: &RowScores<'_>) {
                // SAFETY: the caller's promise.
                unsafe { soften::soften_rows::<$vector, W>(rows) }
            }

            $(#[$attribute])*
            unsafe fn weigh<F: ValueForm<$vector>>(
                acc: *mut f32, stride: usize, num_rows: usize, weights: *const u8, shrink: *const f32, strip: &Strip,
            ) {
                // SAFETY: the caller's promise.
                unsafe { weigh::weigh::<$vector, F>(acc, stride, num_rows, weights, shrink, strip) }
            }

            $(#[$attribute])*
            unsafe fn pack_keys<K: KeyCells<$vector>>(panel: &Panel) {
                // SAFETY: the caller's promise.
                unsafe { panels::pack_keys::<$vector, K>(panel) }
            }

            $(#[$attribute])*
            unsafe fn pack_values<F: ValueCells<$vector>>(panel: &Panel) {
                // SAFETY: the caller's promise.
                unsafe { panels::pack_values::<$vector, F>(panel) }
            }

            $(#[$attribute])*
            unsafe fn multiply<C: Cells<$vector>>(product: &Product) {
                // SAFETY: the caller's promise.
                unsafe { product::multiply::<$vector, C>(product) }
            }

            pub(super) fn keys_of<K, C>(dtype: DType, is_paired: bool, scale: f32, is_packed: bool) -> KeyKernels
            where
                K: KeyForm<$vector> + KeyCells<$vector> + PackedForm<$vector>,
                C: Cells<$vector>,
            {
                let (score, pack, query_cells) = if is_packed {
                    (score_packed::<K> as ScoreFn, pack_packed::<K> as PackFn, 1)
                } else {
                    (score::<K> as ScoreFn, pack_keys::<K> as PackFn, <$vector>::LANES)
                };
                let product = multiply::<C>;
                KeyKernels { score, pack, product, is_paired, scale, query_cells, is_packed, dtype }
            }

            pub(super) fn values_of<F, W, C>(dtype: DType, is_paired: bool, scale: f32) -> ValueKernels
            where
                F: ValueForm<$vector> + ValueCells<$vector>,
                W: WeightForm<$vector>,
                C: Cells<$vector>,
            {
                ValueKernels {
                    soften: soften::<W>,
                    soften_rows: soften_rows::<W>,
                    weigh: weigh::<F>,
                    pack: pack_values::<F>,
                    product: multiply::<C>,
                    is_paired,
                    scale,
                    dtype,
                }
            }
        }
    };
}

/// The functions that choose by element type.
macro_rules! by_dtype {
    () => {
        fn widened_keys<E: Element>(is_packed: bool) -> KeyKernels {
            keys_of::<score::Widened<E>, product::Floats>(E::DTYPE, false, E::SCALE, is_packed)
        }

        fn widened_values<E: Element>() -> ValueKernels {
            values_of::<weigh::Widened<E>, soften::Float, product::Floats>(E::DTYPE, false, E::SCALE)
        }

        pub(super) fn keys(dtype: DType, is_packed: bool) -> KeyKernels {
            match dtype {
                DType::F32 => widened_keys::<F32>(is_packed),
                DType::F16 => widened_keys::<F16>(is_packed),
                DType::BF16 => widened_keys::<BF16>(is_packed),
                DType::F8E4M3 => widened_keys::<F8E4M3>(is_packed),
                DType::F8E5M2 => widened_keys::<F8E5M2>(is_packed),
                other => panic!("broken law: keys of {}", other.name()),
            }
        }

        pub(super) fn values(dtype: DType) -> ValueKernels {
            match dtype {
                DType::F32 => widened_values::<F32>(),
                DType::F16 => widened_values::<F16>(),
                DType::BF16 => widened_values::<BF16>(),
                DType::F8E4M3 => widened_values::<F8E4M3>(),
                DType::F8E5M2 => widened_values::<F8E5M2>(),
                other => panic!("broken law: values of {}", other.name()),
            }
        }
    };
}

kernels!(portable, Portable, by_dtype);

#[cfg(target_arch = "x86_64")]
kernels!(
    #[target_feature(enable = "avx2,fma,f16c")]
    avx2,
    Avx2,
    by_dtype
);

#[cfg(target_arch = "x86_64")]
kernels!(
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
    avx512,
    Avx512,
    by_dtype
);

#[cfg(target_arch = "x86_64")]
kernels!(
    #[target_feature(enable = "avx512bf16,avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
    avx512_bf16,
    Avx512
);

#[cfg(target_arch = "x86_64")]
kernels!(
    #[target_feature(enable = "avx512vbmi,avx512bf16,avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
    avx512_bytes,
    Avx512
);

/// Products of bfloat16 pairs.
#[cfg(target_arch = "x86_64")]
mod paired {
    use super::{ByteElement, DType, F8E4M3, F8E5M2, KeyKernels, ValueKernels, avx512_bf16, avx512_bytes};
    use super::{product, score, soften, weigh};

    pub(super) fn keys(is_packed: bool) -> KeyKernels {
        avx512_bf16::keys_of::<score::Pairs, product::Pairs>(DType::BF16, true, 1.0, is_packed)
    }

    pub(super) fn values() -> ValueKernels {
        avx512_bf16::values_of::<weigh::Pairs, soften::Rounded, product::Pairs>(DType::BF16, true, 1.0)
    }

    /// Whether FP8 becomes bfloat16 on this processor.
    fn has_lookup() -> bool {
        is_x86_feature_detected!("avx512vbmi")
    }

    /// What scores queries of one type against keys of another in pairs.
    pub(super) fn keys_for(q: DType, k: DType, is_packed: bool) -> Option<KeyKernels> {
        match (q, k) {
            (DType::BF16, DType::BF16) => Some(keys(is_packed)),
            (DType::BF16, DType::F8E4M3) if has_lookup() => Some(byte_keys::<F8E4M3>(is_packed)),
            (DType::BF16, DType::F8E5M2) if has_lookup() => Some(byte_keys::<F8E5M2>(is_packed)),
            _ => None,
        }
    }

    /// What weighs values in pairs, where the query's type allows weights that are rounded to it.
    pub(super) fn values_for(q: DType, v: DType) -> Option<ValueKernels> {
        match (q, v) {
            (DType::BF16, DType::BF16) => Some(values()),
            (DType::BF16, DType::F8E4M3) if has_lookup() => Some(byte_values::<F8E4M3>()),
            (DType::BF16, DType::F8E5M2) if has_lookup() => Some(byte_values::<F8E5M2>()),
            _ => None,
        }
    }

    fn byte_keys<E: ByteElement>(is_packed: bool) -> KeyKernels {
        avx512_bytes::keys_of::<score::BytePairs<E>, product::Pairs>(E::DTYPE, true, 1.0, is_packed)
    }

    fn byte_values<E: ByteElement>() -> ValueKernels {
        avx512_bytes::values_of::<weigh::BytePairs<E>, soften::Rounded, product::Pairs>(E::DTYPE, true, 1.0)
    }
}

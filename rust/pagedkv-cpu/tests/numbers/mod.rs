//! Repeatable numbers in any element type.

use pagedkv_cpu::DType;

/// Bits of numbers between 1/2 and 2 in size, of either sign.
pub(crate) fn numbers(dtype: DType, count: usize, seed: u32) -> Vec<u8> {
    let mut state = seed;
    let mut next = move || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        state >> 8
    };
    let number = |bits: u32| -> Vec<u8> {
        let sign = bits >> 23 & 1;
        match dtype {
            DType::F32 => (sign << 31 | 0x3f00_0000 | bits & 0xff_fff0).to_le_bytes().to_vec(),
            DType::F16 => ((sign << 15 | 0x3800 | bits & 0x7ff) as u16).to_le_bytes().to_vec(),
            DType::BF16 => ((sign << 15 | 0x3f00 | bits & 0xff) as u16).to_le_bytes().to_vec(),
            DType::F8E4M3 => vec![(sign << 7 | 0x30 | bits & 0xf) as u8],
            _ => vec![(sign << 7 | 0x38 | bits & 0x7) as u8],
        }
    };
    (0..count).flat_map(|_| number(next())).collect()
}

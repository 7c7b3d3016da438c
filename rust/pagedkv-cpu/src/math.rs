//! Inner loops over contiguous float32 rows, written so that the compiler can vectorise them.
//!
//! Every sum has a fixed shape (eight lanes, then a fixed tree), so a result depends neither on the instruction set nor
//! on how many rows are handled together.

/// Partial sums kept side by side; `head_dim` is a multiple of it.
pub(crate) const LANES: usize = 8;

/// Rows handled in one pass over a query row.
const UNROLL: usize = 4;

type Lanes = [f32; LANES];

/// `scores[j] = q . rows[j]` for rows of `q.len()` elements that lie one after another.
pub(crate) fn dot_rows(q: &[f32], rows: &[f32], scores: &mut [f32]) {
    let dim = q.len();
    let mut groups = rows.chunks_exact(dim * UNROLL);
    let mut out = scores.chunks_exact_mut(UNROLL);
    for (group, four) in groups.by_ref().zip(out.by_ref()) {
        four.copy_from_slice(&dot_four(q, group));
    }
    for (row, score) in groups.remainder().chunks_exact(dim).zip(out.into_remainder()) {
        *score = dot(q, row);
    }
}

fn dot_four(q: &[f32], rows: &[f32]) -> [f32; UNROLL] {
    let dim = q.len();
    let (k0, rest) = rows.split_at(dim);
    let (k1, rest) = rest.split_at(dim);
    let (k2, k3) = rest.split_at(dim);
    let mut sums = [[0_f32; LANES]; UNROLL];
    for ((((q, k0), k1), k2), k3) in q
        .chunks_exact(LANES)
        .zip(k0.chunks_exact(LANES))
        .zip(k1.chunks_exact(LANES))
        .zip(k2.chunks_exact(LANES))
        .zip(k3.chunks_exact(LANES))
    {
        for lane in 0..LANES {
            sums[0][lane] += q[lane] * k0[lane];
            sums[1][lane] += q[lane] * k1[lane];
            sums[2][lane] += q[lane] * k2[lane];
            sums[3][lane] += q[lane] * k3[lane];
        }
    }
    sums.map(add_lanes)
}

fn dot(q: &[f32], row: &[f32]) -> f32 {
    let mut sums = [0_f32; LANES];
    for (q, row) in q.chunks_exact(LANES).zip(row.chunks_exact(LANES)) {
        for lane in 0..LANES {
            sums[lane] += q[lane] * row[lane];
        }
    }
    add_lanes(sums)
}

fn add_lanes(s: Lanes) -> f32 {
    ((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7]))
}

/// `acc += sum of weights[j] * rows[j]`, in the order of `j`.
pub(crate) fn add_weighted_rows(acc: &mut [f32], weights: &[f32], rows: &[f32]) {
    let dim = acc.len();
    let mut groups = rows.chunks_exact(dim * 2);
    let mut pairs = weights.chunks_exact(2);
    for (group, w) in groups.by_ref().zip(pairs.by_ref()) {
        let (a, b) = group.split_at(dim);
        for ((acc, a), b) in acc.iter_mut().zip(a).zip(b) {
            *acc = (*acc + w[0] * a) + w[1] * b;
        }
    }
    for (row, w) in groups.remainder().chunks_exact(dim).zip(pairs.remainder()) {
        for (acc, v) in acc.iter_mut().zip(row) {
            *acc += w * v;
        }
    }
}

/// `values *= factor`.
pub(crate) fn scale(values: &mut [f32], factor: f32) {
    for v in values {
        *v *= factor;
    }
}

/// The largest value; NaN never wins.
pub(crate) fn max(values: &[f32]) -> f32 {
    values.iter().copied().fold(f32::NEG_INFINITY, f32::max)
}

/// Replaces each score by `exp(score - shift)` and returns the sum.
pub(crate) fn exp_and_sum(scores: &mut [f32], shift: f32) -> f32 {
    for s in scores.iter_mut() {
        *s = exp(*s - shift);
    }
    let mut sums = [0_f32; LANES];
    let chunks = scores.chunks_exact(LANES);
    for (lane, s) in chunks.remainder().iter().enumerate() {
        sums[lane] += s;
    }
    for chunk in chunks {
        for lane in 0..LANES {
            sums[lane] += chunk[lane];
        }
    }
    add_lanes(sums)
}

/// `exp(x)` for `x <= 0` within 2 ulp; below the normal numbers it is 0, and NaN stays NaN.
///
/// The polynomial and the split of ln 2 are those of `expf` in Cephes (Moshier). `f32::exp` is a call per element.
#[inline]
pub(crate) fn exp(x: f32) -> f32 {
    const LOWEST: f32 = -87.336;
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    // 1.5 * 2^23: adding it leaves the nearest integer in the low bits.
    const ROUND: f32 = 12_582_912.0;
    const ONE_BITS: u32 = 0x3f80_0000;

    let clamped = if x < LOWEST { LOWEST } else { x };
    let shifted = clamped * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = (clamped - n * LN2_HIGH) - n * LN2_LOW;
    let mut p = 1.987_569_2e-4_f32;
    for c in [1.398_2e-3_f32, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5] {
        p = p * r + c;
    }
    let power = (p * (r * r) + r) + 1.0;
    let exponent = shifted.to_bits().wrapping_sub(ROUND.to_bits()) << 23;
    let result = power * f32::from_bits(exponent.wrapping_add(ONE_BITS));
    if x < LOWEST { 0.0 } else { result }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_within_two_ulp_when_the_result_is_normal() {
        let mut x = 0.0_f32;
        while x > -87.3 {
            let want = f64::from(x).exp();
            let error = (f64::from(exp(x)) - want).abs() / want;
            assert!(error < 2.0 * f64::from(f32::EPSILON), "exp({x}) is off by {error}");
            x -= 0.001_37;
        }
    }

    #[test]
    fn exp_keeps_its_limits_when_the_argument_is_special() {
        assert_eq!(exp(0.0).to_bits(), 1.0_f32.to_bits());
        assert_eq!(exp(f32::NEG_INFINITY).to_bits(), 0);
        assert!(exp(f32::NAN).is_nan());
    }

    #[test]
    fn dots_agree_bit_by_bit_when_rows_come_in_fours_or_alone() {
        let q: Vec<f32> = (0..24_u8).map(|i| f32::from(i).sin()).collect();
        let rows: Vec<f32> = (0..7 * 24_u8).map(|i| f32::from(i).cos()).collect();
        let mut together = [0.0; 7];
        dot_rows(&q, &rows, &mut together);
        for (row, score) in rows.chunks_exact(24).zip(together) {
            assert_eq!(dot(&q, row).to_bits(), score.to_bits());
        }
    }
}

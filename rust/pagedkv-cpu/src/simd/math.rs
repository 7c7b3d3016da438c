//! Elementary functions of vectors.

use super::Vector;

/// `2^x` within 2 ulp for `x` up to 127; 0 below the normal numbers, exactly 1 at 0, and NaN stays NaN.
///
/// The polynomial is that of `exp2f` in Cephes (Moshier), for the interval from -1/2 to 1/2.
///
/// # Safety
///
/// As for [`Vector`].
#[inline(always)]
pub(crate) unsafe fn exp2<V: Vector>(x: V) -> V {
    const COEFFICIENTS: [f32; 6] =
        [1.535_336_2e-4, 1.339_887_5e-3, 9.618_437e-3, 5.550_332_4e-2, 2.402_264_8e-1, 6.931_472e-1];
    // SAFETY: the caller's promise.
    unsafe { exp2_by(x, COEFFICIENTS) }
}

/// As [`exp2`], within 3 millionths: for what is rounded to 8 bits.
///
/// The polynomial has the least relative error of its degree on the interval from -1/2 to 1/2, and is exactly 1 at 0.
///
/// # Safety
///
/// As for [`Vector`].
#[inline(always)]
pub(crate) unsafe fn exp2_roughly<V: Vector>(x: V) -> V {
    const COEFFICIENTS: [f32; 4] = [9.582_853e-3, 5.590_642_6e-2, 2.402_41e-1, 6.931_242e-1];
    // SAFETY: the caller's promise.
    unsafe { exp2_by(x, COEFFICIENTS) }
}

/// By a polynomial whose last coefficient is 1 and is left out.
#[inline(always)]
unsafe fn exp2_by<V: Vector, const N: usize>(x: V, coefficients: [f32; N]) -> V {
    // SAFETY: the caller's promise.
    unsafe {
        // The constant first: NaN in `x` must win.
        let x = V::splat(-127.0).max(x);
        let whole = x.round();
        let rest = x.sub(whole);
        let mut power = V::splat(coefficients[0]);
        for coefficient in &coefficients[1..] {
            power = power.mul_add(rest, V::splat(*coefficient));
        }
        power.mul_add(rest, V::splat(1.0)).scale_by_power(whole)
    }
}

/// `tanh(x)` within 2 ulp; the split at 0.625 and the polynomial are those of `tanhf` in Cephes (Moshier).
///
/// # Safety
///
/// As for [`Vector`].
#[inline(always)]
pub(crate) unsafe fn tanh<V: Vector>(x: V) -> V {
    const COEFFICIENTS: [f32; 4] = [2.063_908_8e-2, -5.373_971_6e-2, 1.333_144_2e-1, -3.333_328e-1];
    const TWO_LOG2_E: f32 = 2.0 * std::f32::consts::LOG2_E;
    // SAFETY: the caller's promise.
    unsafe {
        let size = V::splat(20.0).min(x.abs());
        let one = V::splat(1.0);
        let exponential = exp2(size.mul(V::splat(TWO_LOG2_E)));
        let large = one.sub(V::splat(2.0).div(exponential.add(one))).copy_sign(x);
        let square = x.mul(x);
        let mut series = V::splat(-5.704_988_7e-3);
        for coefficient in COEFFICIENTS {
            series = series.mul_add(square, V::splat(coefficient));
        }
        let small = series.mul(square).mul_add(x, x);
        small.select(size.less(V::splat(0.625)), large)
    }
}

#[cfg(test)]
mod tests {
    use super::super::Portable;
    use super::*;

    fn each(x: f32, of: impl Fn(Portable) -> Portable) -> f32 {
        let mut lanes = [0.0; 8];
        // SAFETY: the portable lanes need no instructions, and the array has room for them.
        unsafe { of(Portable::splat(x)).store(lanes.as_mut_ptr()) };
        lanes[3]
    }

    fn exp2_of(x: f32) -> f32 {
        // SAFETY: the portable lanes need no instructions.
        each(x, |x| unsafe { exp2(x) })
    }

    fn tanh_of(x: f32) -> f32 {
        // SAFETY: the portable lanes need no instructions.
        each(x, |x| unsafe { tanh(x) })
    }

    #[test]
    fn exp2_is_within_two_ulp_when_the_result_is_normal() {
        let mut x = 20.0_f32;
        while x > -126.0 {
            let want = f64::from(x).exp2();
            let error = (f64::from(exp2_of(x)) - want).abs() / want;
            assert!(error < 2.0 * f64::from(f32::EPSILON), "exp2({x}) is off by {error}");
            x -= 0.001_37;
        }
    }

    #[test]
    fn exp2_roughly_is_within_three_millionths() {
        let mut x = 20.0_f32;
        while x > -126.0 {
            let want = f64::from(x).exp2();
            // SAFETY: the portable lanes need no instructions.
            let error = (f64::from(each(x, |x| unsafe { exp2_roughly(x) })) - want).abs() / want;
            assert!(error < 3e-6, "exp2({x}) is off by {error}");
            x -= 0.001_37;
        }
    }

    #[test]
    fn exp2_keeps_its_limits_when_the_argument_is_special() {
        assert_eq!(exp2_of(0.0).to_bits(), 1.0_f32.to_bits());
        assert_eq!(exp2_of(f32::NEG_INFINITY).to_bits(), 0);
        assert_eq!(exp2_of(-500.0).to_bits(), 0);
        assert!(exp2_of(f32::NAN).is_nan());
    }

    #[test]
    fn tanh_is_within_four_ulp_on_both_sides_of_the_split() {
        let mut x = -12.0_f32;
        while x < 12.0 {
            let want = f64::from(x).tanh();
            let error = (f64::from(tanh_of(x)) - want).abs();
            assert!(error <= 4.0 * f64::from(f32::EPSILON) * want.abs(), "tanh({x}) is off by {error}");
            x += 0.000_93;
        }
        assert!(tanh_of(f32::NAN).is_nan());
        assert_eq!(tanh_of(f32::INFINITY).to_bits(), 1.0_f32.to_bits());
    }
}

//! What is done to single rows beside products and attention: norms, rotary positions, draws of tokens.
//!
//! Each is written once, generic over the vector register and the element type, and compiled per instruction set.
#![expect(
    clippy::inline_always,
    reason = "a function that is not inlined into one that enables the instructions cannot use them"
)]

mod draw;
mod rms_norm;
mod rotary;

use std::ops::Range;

use half::f16;
use half::slice::HalfFloatSliceExt;

pub use draw::draw_tokens;
pub use rms_norm::rms_norm;
pub use rotary::rotary_embedding;

use crate::convert::{narrowed_bf16, widened_bf16};
use crate::error::Result;
use crate::isa::Isa;
use crate::simd::{Portable, Vector};
#[cfg(target_arch = "x86_64")]
use crate::simd::{avx2::Avx2, avx512::Avx512};
use crate::threads;
use crate::view::DType;

/// Elements that a job has at least, where there are as many.
const ELEMENTS_PER_JOB: usize = 1 << 15;

/// An element as it is stored.
trait Stored: Copy {
    fn widen(self) -> f32;
    fn narrow(value: f32) -> Self;

    /// Widens elements in their order.
    #[inline(always)]
    fn widen_all(from: &[Self], to: &mut [f32]) {
        for i in 0..from.len() {
            to[i] = from[i].widen();
        }
    }
}

impl Stored for f32 {
    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }

    #[inline(always)]
    fn narrow(value: f32) -> Self {
        value
    }
}

impl Stored for f16 {
    #[inline(always)]
    fn widen(self) -> f32 {
        self.to_f32()
    }

    #[inline(always)]
    fn narrow(value: f32) -> Self {
        Self::from_f32(value)
    }

    #[inline(always)]
    fn widen_all(from: &[Self], to: &mut [f32]) {
        from.convert_to_f32_slice(to);
    }
}

/// The bits of a bfloat16.
#[derive(Clone, Copy)]
#[repr(transparent)]
struct Bf16(u16);

impl Stored for Bf16 {
    #[inline(always)]
    fn widen(self) -> f32 {
        widened_bf16(self.0)
    }

    #[inline(always)]
    fn narrow(value: f32) -> Self {
        Self(narrowed_bf16(value))
    }
}

/// What is done to each of many rows.
trait RowWork: Sync {
    /// Does it to some.
    ///
    /// # Safety
    ///
    /// The processor has the instructions of `V`, elements are of type `E`, and nobody else writes results of these
    /// rows.
    unsafe fn run<V: Vector, E: Stored>(&self, rows: Range<usize>);
}

/// Does work to rows of so many elements, of a type that is computed with, by the best instructions if none are named.
fn for_rows<W: RowWork>(
    work: &W,
    dtype: DType,
    num_rows: usize,
    row_elements: usize,
    isa: Option<Isa>,
    threads: usize,
) -> Result<()> {
    let isa = Isa::asked_or_chosen(isa)?;
    let run = match dtype {
        DType::F32 => compiled::<W, f32>(isa),
        DType::F16 => compiled::<W, f16>(isa),
        DType::BF16 => compiled::<W, Bf16>(isa),
        other => panic!("broken law: rows of {}", other.name()),
    };
    let rows_per_job = ELEMENTS_PER_JOB.div_ceil(row_elements.max(1));
    threads::for_each(threads, num_rows * row_elements, num_rows.div_ceil(rows_per_job), |job| {
        let first = job * rows_per_job;
        // SAFETY: the instructions are there, the type was matched, and each row belongs to one job.
        unsafe { run(work, first..num_rows.min(first + rows_per_job)) }
    });
    Ok(())
}

type Run<W> = unsafe fn(&W, Range<usize>);

/// The work, compiled for instructions that this processor has.
fn compiled<W: RowWork, E: Stored>(isa: Isa) -> Run<W> {
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 | Isa::Avx512Bf16 | Isa::Amx => avx512::<W, E>,
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => avx2::<W, E>,
        _ => portable::<W, E>,
    }
}

macro_rules! compile {
    ($(#[$attribute:meta])* $name:ident, $vector:ty) => {
        $(#[$attribute])*
        unsafe fn $name<W: RowWork, E: Stored>(work: &W, rows: Range<usize>) {
            // SAFETY: the caller's promise.
            unsafe { work.run::<$vector, E>(rows) }
        }
    };
}

compile!(portable, Portable);

#[cfg(target_arch = "x86_64")]
compile!(
    #[target_feature(enable = "avx2,fma,f16c")]
    avx2,
    Avx2
);

#[cfg(target_arch = "x86_64")]
compile!(
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
    avx512,
    Avx512
);

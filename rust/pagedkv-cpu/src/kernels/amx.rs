//! The matrix product of many rows with a panel on AMX: 32 rows times two columns at a time, in tiles.
//!
//! A column of a panel is laid out as `TDPBF16PS` wants its second operand: a tile is 16 steps of 16 lanes, pairs of
//! bfloat16. The instructions are stable as assembly only, so one block of assembly holds a whole product of tiles.

use std::arch::asm;
use std::arch::x86_64::{
    __cpuid_count, _CMP_NEQ_UQ, _mm512_cmp_ps_mask, _mm512_loadu_ps, _mm512_mul_ps, _mm512_set1_ps, _mm512_storeu_ps,
};
use std::sync::OnceLock;

use super::product::Product;

/// Rows of a block: two tiles.
pub(crate) const BLOCK_ROWS: usize = 32;

/// Tokens that rows and columns are padded to: a tile of steps is 16 pairs.
pub(crate) const TOKENS: usize = 32;

const LANES: usize = 16;
const TILE_STEPS: usize = 16;
const TILE_BYTES: usize = 1024;

/// Whether this processor has AMX for bfloat16 and the system lets this process use it.
pub(crate) fn is_available() -> bool {
    static AVAILABLE: OnceLock<bool> = OnceLock::new();
    *AVAILABLE.get_or_init(|| has_instructions() && is_permitted())
}

fn has_instructions() -> bool {
    const AMX_BF16: u32 = 1 << 22;
    const AMX_TILE: u32 = 1 << 24;
    if __cpuid_count(0, 0).eax < 7 {
        return false;
    }
    let features = __cpuid_count(7, 0).edx;
    features & AMX_BF16 != 0 && features & AMX_TILE != 0
}

/// Asks the kernel for the state of tiles, which it saves for processes that asked alone.
#[cfg(target_os = "linux")]
fn is_permitted() -> bool {
    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
    const XFEATURE_XTILEDATA: libc::c_long = 18;
    // SAFETY: the call takes two numbers and touches no memory of ours; older kernels answer with an error.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0 }
}

#[cfg(not(target_os = "linux"))]
fn is_permitted() -> bool {
    false
}

/// What `LDTILECFG` reads: all eight tiles have 16 rows of 64 bytes.
#[repr(C, align(64))]
struct TileConfig {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

static CONFIG: TileConfig = {
    let mut config = TileConfig { palette: 1, start_row: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] };
    let mut tile = 0;
    while tile < 8 {
        config.row_bytes[tile] = 64;
        config.rows[tile] = 16;
        tile += 1;
    }
    config
};

/// Configures the tiles of this thread.
///
/// # Safety
///
/// The processor has AMX.
pub(super) unsafe fn begin() {
    // SAFETY: `is_available` was asked before this kernel was chosen; the configuration is valid and aligned.
    unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const CONFIG, options(nostack)) };
}

/// Gives the tiles back, so that nobody saves them when threads change.
///
/// # Safety
///
/// As for [`begin`].
pub(super) unsafe fn end() {
    // SAFETY: as there.
    unsafe { asm!("tilerelease", options(nomem, nostack)) };
}

/// See [`super::product::ProductFn`]; rows come in blocks of [`BLOCK_ROWS`], and steps in whole tiles: behind the last
/// token, weights and values are 0.
///
/// # Safety
///
/// As there, between [`begin`] and [`end`].
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn multiply(product: &Product) {
    let mut column = 0;
    while column < product.num_columns {
        let pair = product.num_columns - column > 1;
        for block in 0..product.num_rows / BLOCK_ROWS {
            // SAFETY: the caller's promise.
            unsafe { multiply_block(product, block, column, pair) };
        }
        column += 1 + usize::from(pair);
    }
}

#[target_feature(enable = "avx512f")]
unsafe fn multiply_block(product: &Product, block: usize, column: usize, pair: bool) {
    let row = block * BLOCK_ROWS;
    // SAFETY: the caller's promise.
    unsafe {
        let limit = product.limits.add(block).read();
        let c = product.c.add(row * product.c_stride + column * LANES);
        let steps = if product.shrink.is_null() {
            if column >= limit {
                return;
            }
            product.b_steps
        } else {
            if limit == 0 {
                return;
            }
            shrink_rows(product, row, c, pair);
            limit
        };
        let tiles = Tiles {
            a: product.a.add(row * product.a_stride),
            a_stride: product.a_stride,
            b: product.b.add(column * product.b_steps * LANES).cast(),
            b_next: product.b_steps * LANES * 4,
            c: c.cast(),
            c_stride: product.c_stride * 4,
            count: steps.div_ceil(TILE_STEPS),
            adds: !product.shrink.is_null(),
        };
        if pair { two_columns(&tiles) } else { one_column(&tiles) }
    }
}

/// Multiplies the rows of `c` by what earlier weights must be multiplied by; that is seldom anything.
#[target_feature(enable = "avx512f")]
unsafe fn shrink_rows(product: &Product, row: usize, c: *mut f32, pair: bool) {
    for first in [0, LANES] {
        // SAFETY: the caller's promise: a block has as many rows as two vectors have lanes.
        unsafe {
            let from = product.shrink.add(row + first);
            let mut changed = _mm512_cmp_ps_mask::<_CMP_NEQ_UQ>(_mm512_loadu_ps(from), _mm512_set1_ps(1.0));
            while changed != 0 {
                let i = changed.trailing_zeros() as usize;
                changed &= changed - 1;
                let shrink = _mm512_set1_ps(from.add(i).read());
                for x in 0..=usize::from(pair) {
                    let at = c.add((first + i) * product.c_stride + x * LANES);
                    _mm512_storeu_ps(at, _mm512_mul_ps(_mm512_loadu_ps(at), shrink));
                }
            }
        }
    }
}

/// Two tiles of rows against one or two columns of `count` tiles; strides in bytes.
struct Tiles {
    a: *const u8,
    a_stride: usize,
    b: *const u8,
    /// From one column to the next.
    b_next: usize,
    c: *mut u8,
    c_stride: usize,
    count: usize,
    /// Whether the product is added to `c`, or takes its place.
    adds: bool,
}

unsafe fn two_columns(tiles: &Tiles) {
    let (a, b, c) = (tiles.a, tiles.b, tiles.c);
    // SAFETY: the caller's promise: tiles are configured, and rows, columns and results lie where `Product` says.
    unsafe {
        asm!(
            "test {adds}, {adds}",
            "jz 3f",
            "tileloadd tmm0, [{c0} + {cs}*1]",
            "tileloadd tmm1, [{c0} + {cs}*1 + 64]",
            "tileloadd tmm2, [{c1} + {cs}*1]",
            "tileloadd tmm3, [{c1} + {cs}*1 + 64]",
            "jmp 2f",
            "3:",
            "tilezero tmm0",
            "tilezero tmm1",
            "tilezero tmm2",
            "tilezero tmm3",
            "2:",
            "tileloadd tmm4, [{a0} + {as}*1]",
            "tileloadd tmm6, [{b0} + {bs}*1]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tileloadd tmm7, [{b1} + {bs}*1]",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tileloadd tmm5, [{a1} + {as}*1]",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
            "add {a0}, 64",
            "add {a1}, 64",
            "add {b0}, {tile}",
            "add {b1}, {tile}",
            "dec {n}",
            "jnz 2b",
            "tilestored [{c0} + {cs}*1], tmm0",
            "tilestored [{c0} + {cs}*1 + 64], tmm1",
            "tilestored [{c1} + {cs}*1], tmm2",
            "tilestored [{c1} + {cs}*1 + 64], tmm3",
            a0 = inout(reg) a => _,
            a1 = inout(reg) a.add(16 * tiles.a_stride) => _,
            as = in(reg) tiles.a_stride,
            b0 = inout(reg) b => _,
            b1 = inout(reg) b.add(tiles.b_next) => _,
            bs = in(reg) 64_usize,
            c0 = in(reg) c,
            c1 = in(reg) c.add(16 * tiles.c_stride),
            cs = in(reg) tiles.c_stride,
            n = inout(reg) tiles.count => _,
            adds = in(reg_byte) u8::from(tiles.adds),
            tile = const TILE_BYTES,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        );
    }
}

unsafe fn one_column(tiles: &Tiles) {
    let (a, b, c) = (tiles.a, tiles.b, tiles.c);
    // SAFETY: as for two columns.
    unsafe {
        asm!(
            "test {adds}, {adds}",
            "jz 3f",
            "tileloadd tmm0, [{c0} + {cs}*1]",
            "tileloadd tmm2, [{c1} + {cs}*1]",
            "jmp 2f",
            "3:",
            "tilezero tmm0",
            "tilezero tmm2",
            "2:",
            "tileloadd tmm4, [{a0} + {as}*1]",
            "tileloadd tmm6, [{b0} + {bs}*1]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tileloadd tmm5, [{a1} + {as}*1]",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "add {a0}, 64",
            "add {a1}, 64",
            "add {b0}, {tile}",
            "dec {n}",
            "jnz 2b",
            "tilestored [{c0} + {cs}*1], tmm0",
            "tilestored [{c1} + {cs}*1], tmm2",
            a0 = inout(reg) a => _,
            a1 = inout(reg) a.add(16 * tiles.a_stride) => _,
            as = in(reg) tiles.a_stride,
            b0 = inout(reg) b => _,
            bs = in(reg) 64_usize,
            c0 = in(reg) c,
            c1 = in(reg) c.add(16 * tiles.c_stride),
            cs = in(reg) tiles.c_stride,
            n = inout(reg) tiles.count => _,
            adds = in(reg_byte) u8::from(tiles.adds),
            tile = const TILE_BYTES,
            out("tmm0") _, out("tmm2") _, out("tmm4") _, out("tmm5") _, out("tmm6") _,
            options(nostack),
        );
    }
}

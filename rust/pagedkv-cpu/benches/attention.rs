//! How fast attention reads keys and values, against a plain read in the same minute.
//!
//! `cargo bench -p pagedkv-cpu --bench attention -- [CASE...]`, on two threads unless `THREADS` says otherwise; the
//! instruction set is that of `PAGEDKV_CPU_ISA`. Blocks are shuffled and lie in a pool of several layers which are
//! gone through one after another, so that nothing is found in a cache. Provisional figures: `make bench-attention` is
//! what counts.
#![expect(clippy::print_stdout, reason = "it prints what it measured")]

use std::ffi::c_void;
use std::hint::black_box;
use std::time::Instant;

use pagedkv_cpu::{
    AttentionOptions, Batch, DType, Isa, Operands, Scales, View, append_kv, copy_blocks, paged_attention,
};

const POOL_BYTES: usize = 1 << 30;

struct Case {
    name: &'static str,
    num_seqs: usize,
    len: usize,
    num_queries: usize,
    heads: [usize; 2],
    head_dim: usize,
    dtype: DType,
}

const fn case(
    name: &'static str,
    num_seqs: usize,
    len: usize,
    heads: [usize; 2],
    head_dim: usize,
    dtype: DType,
) -> Case {
    Case { name, num_seqs, len, num_queries: 1, heads, head_dim, dtype }
}

const CASES: [Case; 16] = [
    case("decode_bf16_16x4096", 16, 4096, [32, 8], 128, DType::BF16),
    case("decode_bf16_1x32768", 2, 32_768, [32, 8], 128, DType::BF16),
    case("decode_fp16_16x4096", 16, 4096, [32, 8], 128, DType::F16),
    case("decode_bf16_d64", 32, 4096, [32, 8], 64, DType::BF16),
    case("decode_bf16_mha", 16, 1024, [32, 32], 128, DType::BF16),
    case("decode_smollm2", 64, 4096, [9, 3], 64, DType::BF16),
    case("decode_e4m3_16x4096", 32, 4096, [32, 8], 128, DType::F8E4M3),
    case("decode_e5m2_16x4096", 32, 4096, [32, 8], 128, DType::F8E5M2),
    case("decode_bf16_gqa12", 64, 4096, [24, 2], 128, DType::BF16),
    // In the second-level cache: what arithmetic alone takes.
    case("resident_bf16", 1, 384, [32, 8], 128, DType::BF16),
    case("resident_e4m3", 1, 768, [32, 8], 128, DType::F8E4M3),
    case("decode_f32_16x2048", 16, 2048, [32, 8], 128, DType::F32),
    case("decode_bf16_d80", 32, 4096, [32, 8], 80, DType::BF16),
    Case {
        name: "drafts_bf16",
        num_seqs: 16,
        len: 4096,
        num_queries: 5,
        heads: [32, 8],
        head_dim: 128,
        dtype: DType::BF16,
    },
    Case {
        name: "prefill_bf16_1x2048",
        num_seqs: 1,
        len: 2048,
        num_queries: 2048,
        heads: [32, 8],
        head_dim: 128,
        dtype: DType::BF16,
    },
    Case {
        name: "prefill_f32_1x2048",
        num_seqs: 1,
        len: 2048,
        num_queries: 2048,
        heads: [32, 8],
        head_dim: 128,
        dtype: DType::F32,
    },
];

const BLOCK_SIZE: usize = 16;

fn strides<const N: usize>(shape: [usize; N]) -> [i64; N] {
    let mut strides = [1; N];
    for i in (1..N).rev() {
        strides[i - 1] = strides[i] * shape[i] as i64;
    }
    strides
}

fn view<T, const N: usize>(data: &mut [T], dtype: DType, shape: [usize; N]) -> View<N> {
    assert!(std::mem::size_of_val(data) >= shape.iter().product::<usize>() * dtype.size_bytes());
    // SAFETY: the slice covers the shape and outlives every use here.
    unsafe { View::new(data.as_mut_ptr().cast::<c_void>(), dtype, shape, strides(shape)) }
}

/// The median, or with `BEST=1` the least, on a machine that others use as well.
fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[if std::env::var_os("BEST").is_some() { 0 } else { times.len() / 2 }]
}

/// Seconds that this process has run, per thread: of use on a machine that others use as well, with `CPU_TIME=1`.
fn now(threads: usize) -> f64 {
    static START: std::sync::OnceLock<Instant> = std::sync::OnceLock::new();
    if std::env::var_os("CPU_TIME").is_none() {
        return START.get_or_init(Instant::now).elapsed().as_secs_f64();
    }
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the clock exists, and it writes to a time of ours.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &raw mut time) };
    (time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9) / threads as f64
}

/// Seconds of one run; `between` comes after each.
fn seconds(count: usize, threads: usize, mut run: impl FnMut(usize), mut between: impl FnMut(usize)) -> f64 {
    run(0);
    let time = |i| {
        let start = now(threads);
        run(i);
        let time = now(threads) - start;
        between(i);
        time
    };
    median((1..=count).map(time).collect())
}

/// Seconds that `threads` threads take to read a buffer.
fn read_seconds(data: &[u64], threads: usize) -> f64 {
    let start = now(threads);
    std::thread::scope(|scope| {
        for part in data.chunks_exact(data.len() / threads) {
            scope.spawn(move || {
                let mut sums = [0_u64; 32];
                for line in part.chunks_exact(32) {
                    for (sum, x) in sums.iter_mut().zip(line) {
                        *sum = sum.wrapping_add(*x);
                    }
                }
                black_box(sums)
            });
        }
    });
    now(threads) - start
}

fn shuffled(n: usize) -> Vec<i32> {
    let mut ids: Vec<i32> = (0..n as i32).collect();
    let mut state = 88_172_645_463_325_252_u64;
    for i in (1..n).rev() {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        ids.swap(i, (state % (i as u64 + 1)) as usize);
    }
    ids
}

/// One layer of a pool `(num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim)`, keys or values.
fn layer(pool: &mut [u64], case: &Case, num_blocks: usize, num_layers: usize, index: usize, side: usize) -> View<4> {
    let inner = [num_layers, 2, case.heads[1], BLOCK_SIZE, case.head_dim];
    let all = strides([num_blocks, inner[0], inner[1], inner[2], inner[3], inner[4]]);
    let first = index as i64 * all[1] + side as i64 * all[2];
    let data = pool.as_mut_ptr().cast::<u8>().wrapping_add(first as usize * case.dtype.size_bytes());
    let shape = [num_blocks, case.heads[1], BLOCK_SIZE, case.head_dim];
    // SAFETY: the pool has room for so many blocks and layers.
    unsafe { View::new(data.cast(), case.dtype, shape, [all[0], all[3], all[4], all[5]]) }
}

fn run_case(case: &Case, pool: &mut [u64], threads: usize, repeats: usize) {
    let [num_q_heads, num_kv_heads] = case.heads;
    let per_seq = case.len.div_ceil(BLOCK_SIZE);
    let num_blocks = case.num_seqs * per_seq;
    let kv_bytes = num_blocks * BLOCK_SIZE * 2 * num_kv_heads * case.head_dim * case.dtype.size_bytes();
    let is_resident = case.name.starts_with("resident");
    let num_layers = if is_resident { 1 } else { (POOL_BYTES / kv_bytes).clamp(1, 32) };
    let mut table = shuffled(num_blocks);
    let num_tokens = case.num_seqs * case.num_queries;
    let q_dtype = if case.dtype.size_bytes() == 1 { DType::BF16 } else { case.dtype };
    let mut q = vec![0x3c3d_3d3c_u32; num_tokens * num_q_heads * case.head_dim];
    let mut out = vec![0_u32; q.len()];
    let lens = vec![case.len as i32; case.num_seqs];
    let starts: Vec<i32> = (0..=case.num_seqs).map(|i| (i * case.num_queries) as i32).collect();
    let shape = [num_tokens, num_q_heads, case.head_dim];
    let (q_view, out_view) = (view(&mut q, q_dtype, shape), view(&mut out, q_dtype, shape));
    let batch = Batch {
        block_table: view(&mut table, DType::I32, [case.num_seqs, per_seq]),
        rows: None,
        seq_lens: &lens,
        query_start_loc: &starts,
        tree_mask: None,
    };
    let layers: Vec<[View<4>; 2]> =
        (0..num_layers).map(|i| [0, 1].map(|side| layer(pool, case, num_blocks, num_layers, i, side))).collect();
    // Taking turns: the machine may change its mind between.
    let mut reads = Vec::new();
    let time = seconds(
        if is_resident { 50 * repeats } else { repeats },
        threads,
        |i| {
            let [k, v] = layers[i % num_layers];
            paged_attention(&Operands::new(q_view, k, v, out_view), &batch, &AttentionOptions::default(), threads)
                .unwrap();
        },
        |i| {
            if !is_resident || i == 1 {
                reads.push(read_seconds(&pool[(i % 8) << 23..][..1 << 23], threads));
            }
        },
    );
    let read = (8_usize << 23) as f64 / median(reads);
    let scores = if case.num_queries == case.len { case.len * (case.len + 1) / 2 } else { case.num_queries * case.len };
    let flops = (4 * case.num_seqs * num_q_heads * case.head_dim * scores) as f64;
    let rate = kv_bytes as f64 / time;
    println!(
        "{:22} {num_layers:2} layers {:8.2} ms {:6.1} GB/s of {:5.1} ({:3.0} %) {:7.1} GFLOP/s",
        case.name,
        time * 1e3,
        rate / 1e9,
        read / 1e9,
        100.0 * rate / read,
        flops / time / 1e9
    );
}

fn run_cache_ops(pool: &mut [u64], threads: usize) {
    let bytes = 1 << 28;
    let (from, to) = pool.split_at_mut(bytes / 8);
    let copy = bytes as f64 / seconds(5, 1, |_| to[..bytes / 8].copy_from_slice(from), |_| ());
    let shape = [4096, 8, BLOCK_SIZE, 128];
    let (k_cache, v_cache) = (view(&mut to[..], DType::BF16, shape), view(&mut to[bytes / 8..], DType::BF16, shape));
    for (name, num_tokens) in [("append_kv", 8192), ("append_kv_decode", 256)] {
        let k = view(from, DType::BF16, [num_tokens, 8, 128]);
        let v = view(&mut from[bytes / 16..], DType::BF16, [num_tokens, 8, 128]);
        let blocks = shuffled(4096);
        let slots: Vec<i64> = (0..num_tokens)
            .map(|i| {
                if num_tokens == 256 {
                    i64::from(blocks[i]) * 16
                } else {
                    i64::from(blocks[i / 16]) * 16 + i as i64 % 16
                }
            })
            .collect();
        let time = seconds(
            20,
            threads,
            |_| append_kv(&k, &v, &k_cache, &v_cache, &slots, &Scales::default(), threads).unwrap(),
            |_| (),
        );
        let rate = (num_tokens * 8 * 128 * 2 * 2) as f64 / time;
        println!(
            "{name:22} {:8.3} ms {:6.1} GB/s of memcpy {:5.1} ({:3.0} %)",
            time * 1e3,
            rate / 1e9,
            copy / 1e9,
            100.0 * rate / copy
        );
    }
    let blocks = view(pool, DType::BF16, [512, 1 << 20]);
    let ids = shuffled(512);
    let pairs: Vec<[i32; 2]> = (0..64).map(|i| [ids[i], ids[i + 64]]).collect();
    let time = seconds(10, threads, |_| copy_blocks(&blocks, &pairs, threads).unwrap(), |_| ());
    let rate = (64_usize << 21) as f64 / time;
    println!(
        "{:22} {:8.3} ms {:6.1} GB/s of memcpy {:5.1} ({:3.0} %)",
        "copy_blocks",
        time * 1e3,
        rate / 1e9,
        copy / 1e9,
        100.0 * rate / copy
    );
}

fn main() {
    let asked: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with("--")).collect();
    let number = |name: &str, default: usize| std::env::var(name).map_or(default, |n| n.parse().unwrap());
    let (threads, repeats) = (number("THREADS", 2), number("REPEATS", 9));
    let pages =
        if std::env::var_os("HUGE_PAGES").is_some() { "huge pages" } else { "4 KB pages unless the system decides" };
    println!("{} on {threads} threads, {pages}", Isa::choose().unwrap().name());
    let mut pool = vec![0_u64; POOL_BYTES / 8];
    if std::env::var_os("HUGE_PAGES").is_some() {
        let first = (pool.as_ptr() as usize).next_multiple_of(1 << 21);
        // SAFETY: all but the first and the last page of a vector of ours; its contents do not change.
        unsafe { libc::madvise(first as *mut c_void, POOL_BYTES - (1 << 22), libc::MADV_HUGEPAGE) };
    }
    // Ordinary small numbers in every element type.
    pool.fill(0x3d3c_bc3d_3cbd_3dbc);
    for case in CASES.iter().filter(|c| asked.is_empty() || asked.iter().any(|a| c.name.contains(a.as_str()))) {
        run_case(case, &mut pool, threads, repeats);
    }
    if asked.is_empty() || asked.iter().any(|a| a == "ops") {
        run_cache_ops(&mut pool, threads);
    }
}

//! What this machine allows: how fast memory is read and copied, and how fast its floating-point units are.
//!
//! `cargo bench -p pagedkv-cpu --bench machine -- [--bytes=N] [--huge-pages]` describes itself in one JSON line, then
//! answers each line of standard input, `WHAT THREADS SAMPLES`, by another one: `{"samples": [...]}`, per second.
//!
//! - `read`: bytes of a plain read of a large buffer, without prefetch instructions;
//! - `copy`: bytes copied by `memcpy` from one half of the buffer to the other;
//! - `fma`: floating-point operations of fused multiply-adds in registers (`PAGEDKV_CPU_ISA=scalar`: of plain Rust);
//! - `dot`: the same of products of bfloat16 pairs, where the instruction set has them.
//!
//! The instruction set is that of the kernels, so that a limit is that of the path which is measured beside it; the plain
//! read has no use for more than AVX2.
#![expect(clippy::print_stdout, reason = "it prints what it measured")]

mod buffer;
mod peak;
mod read;

use std::io::BufRead;
use std::sync::Barrier;
use std::time::Instant;

use pagedkv_cpu::Isa;

use buffer::Buffer;

const DEFAULT_BYTES: usize = 1 << 30;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let asked = arguments.iter().find_map(|word| word.strip_prefix("--bytes="));
    let bytes = asked.map_or(DEFAULT_BYTES, |bytes| bytes.parse().expect("--bytes=N is a number"));
    let isa = Isa::choose().expect("an instruction set of this processor");
    let mut buffer = Buffer::new(bytes, arguments.iter().any(|word| word == "--huge-pages"));
    let streams = best_streams(isa, buffer.words());
    println!(
        r#"{{"isa": "{}", "read_streams": {streams}, "has_dot": {}, "bytes": {}, "pid": {}, "address": {}}}"#,
        isa.name(),
        peak::has_dot(isa),
        buffer.bytes(),
        std::process::id(),
        buffer.address()
    );
    for line in std::io::stdin().lock().lines() {
        let line = line.expect("standard input is text");
        println!(r#"{{"samples": {:?}}}"#, answer(isa, streams, &mut buffer, &line));
    }
}

/// Does what a line asks for.
fn answer(isa: Isa, streams: usize, buffer: &mut Buffer, line: &str) -> Vec<f64> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let [what, threads, samples] = words[..] else { panic!("expected WHAT THREADS SAMPLES, found {line:?}") };
    let number = |word: &str| word.parse::<usize>().ok().filter(|n| *n > 0).expect("a number above 0");
    let (threads, samples) = (number(threads), number(samples));
    match what {
        "read" => {
            let part = buffer.words().len() / threads;
            let parts = buffer.words().chunks_exact(part).take(threads);
            let jobs = parts.map(|part| move || read::read(isa, streams, part)).collect();
            rates(part * threads * size_of::<u64>(), jobs, samples)
        }
        "copy" => {
            let (from, to) = buffer.halves();
            let part = from.len() / threads;
            let pairs = from.chunks_exact(part).zip(to.chunks_exact_mut(part)).take(threads);
            let jobs = pairs.map(|(from, to)| move || to.copy_from_slice(from)).collect();
            rates(part * threads * size_of::<u64>(), jobs, samples)
        }
        "fma" => rates(peak::FMA_ROUNDS * peak::fma_flops(isa) * threads, vec![|| peak::fma(isa); threads], samples),
        "dot" => rates(peak::DOT_ROUNDS * peak::dot_flops() * threads, vec![peak::dot; threads], samples),
        _ => panic!("expected read, copy, fma or dot, found {what:?}"),
    }
}

/// From how many places at a time a thread reads fastest; the best of three turns each.
fn best_streams(isa: Isa, words: &[u64]) -> usize {
    let rate = |streams: usize| {
        let job = || read::read(isa, streams, words);
        rates(size_of_val(words), vec![job], 3).into_iter().fold(0.0, f64::max)
    };
    let rated = read::STREAMS.map(|streams| (rate(streams), streams));
    rated.into_iter().max_by(|a, b| a.0.total_cmp(&b.0)).expect("several").1
}

/// How much per second all jobs together do, each on a thread of its own; once before it counts.
fn rates<J: FnMut() + Send>(amount: usize, jobs: Vec<J>, samples: usize) -> Vec<f64> {
    let barrier = Barrier::new(jobs.len());
    let barrier = &barrier;
    let spans: Vec<Vec<[Instant; 2]>> = std::thread::scope(|scope| {
        let run = |mut job: J| {
            move || {
                let timed = |_| {
                    barrier.wait();
                    let start = Instant::now();
                    job();
                    [start, Instant::now()]
                };
                (0..=samples).map(timed).collect()
            }
        };
        let threads: Vec<_> = jobs.into_iter().map(|job| scope.spawn(run(job))).collect();
        threads.into_iter().map(|thread| thread.join().expect("a job does not panic")).collect()
    });
    let sample = |i: usize| {
        let start = spans.iter().map(|spans| spans[i][0]).min().expect("at least one thread");
        let end = spans.iter().map(|spans| spans[i][1]).max().expect("at least one thread");
        amount as f64 / (end - start).as_secs_f64()
    };
    (1..=samples).map(sample).collect()
}

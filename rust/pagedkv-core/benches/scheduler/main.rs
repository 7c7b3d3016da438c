//! Times of the block bookkeeping and of the scheduler's inbox, one JSON object per line on standard output.
//!
//! `cargo bench --bench scheduler -- blocks pool_scale` measures the lines named, `--seconds=60` says how long the
//! open loop runs. `benchmarks/bench_scheduler.py` runs it beside a peer; `docs/benchmarks.md` says what each line is.

mod blocks;
mod hits;
mod open_loop;
mod samples;
mod scale;

use std::io::{Write, stdout};

use samples::Line;

fn main() -> std::io::Result<()> {
    let mut seconds = 60;
    let mut names = Vec::new();
    for argument in std::env::args().skip(1) {
        match argument.strip_prefix("--seconds=") {
            Some(number) => seconds = number.parse().expect("--seconds takes a whole number"),
            // Cargo adds a flag of its own.
            None if argument.starts_with("--") => {}
            None => names.push(argument),
        }
    }
    for name in names {
        for line in measure(&name, seconds) {
            writeln!(stdout(), "{}", line.json())?;
        }
    }
    Ok(())
}

fn measure(name: &str, seconds: u32) -> Vec<Line> {
    match name {
        "blocks" => blocks::allocate_and_free().into(),
        "decode_slot" => vec![blocks::decode_slot()],
        "block_hit_4k" => vec![hits::block_hit("block_hit_4k", 4096)],
        "block_hit_100k" => vec![hits::block_hit("block_hit_100k", 100_000)],
        "pool_scale" => vec![scale::pool_scale()],
        "pool_scale_cold" => vec![scale::pool_scale_cold()],
        "open_loop" => open_loop::open_loop(seconds).into(),
        _ => panic!("no measurement is called {name}"),
    }
}

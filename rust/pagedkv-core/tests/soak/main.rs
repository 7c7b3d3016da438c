//! Random commands for as long as one likes, every law after each of them, against the naive models that the property
//! tests use: `make soak`. Worlds come and go, and each must end as empty as it began.
//!
//! `SOAK_COMMANDS` and `SOAK_SECONDS` say when to stop, whichever comes first; `SOAK_THREADS` how many worlds live at a
//! time, and `SOAK_SEED` which they are. `cargo test` runs a few commands only, so that this cannot rot.
#![allow(clippy::print_stdout, reason = "a program that says what it did")]

#[path = "../model/mod.rs"]
mod model;

mod manager;
#[path = "../block_pool_props/world.rs"]
mod pool;
#[path = "../scheduler_props/world/mod.rs"]
mod scheduler;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use model::driven::Driven;
use model::events::Events;
use model::random::Random;

const COMMANDS_PER_WORLD: u64 = 1000;
const BETWEEN_REPORTS: Duration = Duration::from_secs(30);
/// What `cargo test` runs.
const DEFAULT_COMMANDS: u64 = 20_000;

struct Limits {
    commands: u64,
    seconds: u64,
    threads: usize,
    seed: u64,
}

impl Limits {
    fn from_environment() -> Self {
        let number = |name: &str, default: u64| {
            let text = std::env::var(name).unwrap_or_default();
            if text.is_empty() { default } else { text.parse().unwrap_or_else(|_| panic!("{name}={text:?}: a number")) }
        };
        let cores = thread::available_parallelism().map_or(1, usize::from);
        Self {
            commands: number("SOAK_COMMANDS", DEFAULT_COMMANDS),
            seconds: number("SOAK_SECONDS", 3600),
            threads: number("SOAK_THREADS", cores as u64).max(1) as usize,
            seed: number("SOAK_SEED", 0x50a4),
        }
    }
}

/// What all threads have done so far.
struct Done {
    start: Instant,
    worlds: AtomicU64,
    commands: AtomicU64,
    events: Mutex<Events>,
    is_broken: AtomicBool,
}

impl Done {
    fn report(&self) {
        let (commands, seconds) = (self.commands.load(Ordering::Relaxed), self.start.elapsed().as_secs_f64());
        let worlds = self.worlds.load(Ordering::Relaxed);
        println!("{commands} commands in {worlds} worlds, {seconds:.0} s, {:.0} per second", commands as f64 / seconds);
    }
}

/// Lives through one world; of ten, six are a scheduler's, three a manager's and one a pool's.
fn live(number: u64, seed: u64, events: &mut Events) {
    let mut random = Random::new(seed.wrapping_add(number));
    match number % 10 {
        0 => {
            let mut world = pool::World::numbered(random.next());
            (0..COMMANDS_PER_WORLD).for_each(|_| world.run(random.bytes()));
        }
        1..4 => {
            let world = manager::world::World::numbered(random.below(manager::world::NUM_WORLDS));
            drive(world, &mut random, events);
        }
        _ => drive(scheduler::World::numbered(random.next()), &mut random, events),
    }
}

fn drive(world: impl Driven, random: &mut Random, events: &mut Events) {
    let way_to_end = random.below(2);
    let world = world.live((0..COMMANDS_PER_WORLD).map(|_| random.bytes().into()), way_to_end);
    events.add(world.met());
}

fn work(limits: &Limits, done: &Done) {
    let mut events = Events::default();
    let goes_on = || {
        let in_time = done.start.elapsed().as_secs() < limits.seconds;
        in_time && done.commands.load(Ordering::Relaxed) < limits.commands && !done.is_broken.load(Ordering::Relaxed)
    };
    while goes_on() {
        let number = done.worlds.fetch_add(1, Ordering::Relaxed);
        let outcome = catch_unwind(AssertUnwindSafe(|| live(number, limits.seed, &mut events)));
        done.is_broken.fetch_or(outcome.is_err(), Ordering::Relaxed);
        assert!(outcome.is_ok(), "world {number} of SOAK_SEED={} broke", limits.seed);
        done.commands.fetch_add(COMMANDS_PER_WORLD, Ordering::Relaxed);
    }
    done.events.lock().expect("no thread panics here").add(&events);
}

fn main() {
    let limits = Limits::from_environment();
    let done = Done {
        start: Instant::now(),
        worlds: AtomicU64::new(0),
        commands: AtomicU64::new(0),
        events: Mutex::default(),
        is_broken: AtomicBool::new(false),
    };
    thread::scope(|scope| {
        let workers: Vec<_> = (0..limits.threads).map(|_| scope.spawn(|| work(&limits, &done))).collect();
        let mut reported = Instant::now();
        while workers.iter().any(|worker| !worker.is_finished()) {
            thread::sleep(Duration::from_millis(20));
            if reported.elapsed() > BETWEEN_REPORTS {
                done.report();
                reported = Instant::now();
            }
        }
    });
    done.report();
    println!("no law was broken, and every world ended empty: {:?}", done.events.lock().expect("no thread panicked"));
}

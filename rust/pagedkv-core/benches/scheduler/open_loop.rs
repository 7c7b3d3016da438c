//! Threads add and abort requests at a fixed rate, whatever the scheduler does, while another thread steps it.

use std::collections::{HashSet, VecDeque};
use std::thread;
use std::time::{Duration, Instant};

use pagedkv_core::{CacheConfig, Handle, Inbox, NewRequest, Scheduler, SchedulerConfig};

use crate::samples::{Line, Random, float, quantile};

const SEATS: u32 = 1024;
const NUM_THREADS: u32 = 4;
/// Requests per second of all threads together.
const RATE: u32 = 10_000;
/// Requests that a thread leaves alone; when it has added more, it aborts its oldest. Twice the seats are live in all.
const NUM_LIVE: usize = 512;
const PROMPT_LEN: usize = 256;
const SHARED_LEN: usize = 192;
const MAX_OUTPUT: usize = 16_384;
const NUM_BLOCKS: u32 = 1 << 19;

/// What one thread added, and how long it waited for that.
#[derive(Default)]
struct Added {
    micros: Vec<f64>,
    handles: Vec<Handle>,
    aborted: Vec<Handle>,
}

/// What the stepping thread saw; steps count from the first that fills all seats.
#[derive(Default)]
struct Stepped {
    micros: Vec<f64>,
    has_been_full: bool,
    num_sequences: usize,
    finished: Vec<Handle>,
}

/// `open_loop_step_p99`, `open_loop_add_p99`, `open_loop_lost`: factor of the median step, microseconds, and requests that
/// neither finished nor were aborted.
pub(crate) fn open_loop(seconds: u32) -> [Line; 3] {
    let limits =
        SchedulerConfig { max_num_seqs: SEATS, max_model_len: 2 * MAX_OUTPUT as u32, ..SchedulerConfig::default() };
    let mut scheduler = Scheduler::new(&CacheConfig::new(NUM_BLOCKS), &limits).expect("a valid config");
    let (mut added, mut stepped) = run(&mut scheduler, seconds);
    let num_steps = float(stepped.micros.len());
    let median = quantile(&mut stepped.micros, 0.5);
    let step = Line::new("open_loop_step_p99", vec![quantile(&mut stepped.micros, 0.99) / median])
        .size("step_us", median)
        .size("steps", num_steps)
        .size("mean_sequences", float(stepped.num_sequences) / num_steps)
        .size("seconds", f64::from(seconds));
    let add = Line::new("open_loop_add_p99", vec![quantile(&mut added.micros, 0.99)])
        .size("add_us", quantile(&mut added.micros, 0.5));
    let num_finished = float(stepped.finished.len());
    let lost = Line::new("open_loop_lost", vec![float(num_lost(&mut scheduler, &added, &mut stepped))])
        .size("added", float(added.handles.len()))
        .size("aborted", float(added.aborted.len()))
        .size("finished", num_finished);
    [step, add, lost]
}

/// Steps the scheduler as long as threads add requests.
fn run(scheduler: &mut Scheduler, seconds: u32) -> (Added, Stepped) {
    let inbox = scheduler.inbox();
    let (mut added, mut stepped) = (Added::default(), Stepped::default());
    thread::scope(|scope| {
        let add = |number| {
            let inbox = inbox.clone();
            scope.spawn(move || add_and_abort(&inbox, number, seconds))
        };
        let threads: Vec<_> = (0..NUM_THREADS).map(add).collect();
        while threads.iter().any(|thread| !thread.is_finished()) {
            step(scheduler, &mut stepped);
        }
        for thread in threads {
            let Added { micros, handles, aborted } = thread.join().expect("the thread does not panic");
            added.micros.extend(micros);
            added.handles.extend(handles);
            added.aborted.extend(aborted);
        }
    });
    (added, stepped)
}

/// Requests of one thread. Those that are late because the machine was busy follow at once.
fn add_and_abort(inbox: &Inbox, number: u32, seconds: u32) -> Added {
    let mut random = Random(u64::from(number) + 1);
    let head = Random(0).tokens(SHARED_LEN);
    let mut added = Added::default();
    let mut live = VecDeque::new();
    let start = Instant::now();
    for i in 0..RATE / NUM_THREADS * seconds {
        let prompt = [head.clone(), random.tokens(PROMPT_LEN - SHARED_LEN)].concat();
        let request = NewRequest::new(format!("{number}-{i}"), prompt, random.below(MAX_OUTPUT) as u32 + 1);
        let due = start + Duration::from_secs(1) * NUM_THREADS * i / RATE;
        thread::sleep(due.saturating_duration_since(Instant::now()));
        let called = Instant::now();
        let handle = inbox.add_request(request).expect("the request fits");
        added.micros.push(called.elapsed().as_secs_f64() * 1e6);
        added.handles.push(handle);
        live.push_back(handle);
        if live.len() > NUM_LIVE {
            let oldest = live.pop_front().expect("there are many");
            inbox.abort(oldest, None).expect("the handle was given out");
            added.aborted.push(oldest);
        }
    }
    added
}

/// One step; only `schedule` and `commit` count.
fn step(scheduler: &mut Scheduler, stepped: &mut Stepped) {
    let start = Instant::now();
    let plan = scheduler.schedule().expect("no plan is in flight");
    let planning = start.elapsed();
    let tokens = vec![7; plan.sizes().num_samples as usize];
    let start = Instant::now();
    let result = scheduler.commit(plan.id(), &tokens).expect("the plan is in flight");
    let micros = (planning + start.elapsed()).as_secs_f64() * 1e6;
    stepped.has_been_full |= plan.sizes().num_sequences == SEATS;
    if stepped.has_been_full {
        stepped.micros.push(micros);
        stepped.num_sequences += plan.sizes().num_sequences as usize;
    }
    stepped.finished.extend(result.finished.iter().map(|finished| finished.handle));
}

/// Counts the requests of which nobody heard the end and which the scheduler does not hold either, and those that it still
/// holds when these are aborted.
fn num_lost(scheduler: &mut Scheduler, added: &Added, stepped: &mut Stepped) -> usize {
    step(scheduler, stepped); // takes the last aborts
    let mut silent: HashSet<_> = added.handles.iter().collect();
    stepped.finished.iter().chain(&added.aborted).for_each(|handle| {
        silent.remove(handle);
    });
    let num_unheard = silent.len().abs_diff(scheduler.num_unfinished_requests());
    silent.into_iter().for_each(|&handle| scheduler.abort(handle, None).expect("the handle was given out"));
    step(scheduler, stepped);
    scheduler.check_integrity().expect("no law is broken");
    num_unheard + scheduler.num_unfinished_requests()
}

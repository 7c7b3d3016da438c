//! Persistent worker threads: torch's where it is loaded and uses as many, else one pool per thread count.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use rayon::{ThreadPool, ThreadPoolBuilder};

use crate::openmp;

/// Elements touched below which waking a worker costs more than it saves (some 20 us of one core).
const MIN_PARALLEL_WORK: usize = 1 << 18;

struct Pool {
    threads: usize,
    process: u32,
    workers: Arc<ThreadPool>,
}

static POOLS: Mutex<Vec<Pool>> = Mutex::new(Vec::new());

/// Runs `job(0)` to `job(count - 1)`, each once, on up to `threads` threads, each of which takes the lowest one left.
///
/// `work` estimates the elements touched by all jobs together; little work stays on the calling thread.
pub(crate) fn for_each(threads: usize, work: usize, count: usize, job: impl Fn(usize) + Sync) {
    if threads > 1 && count > 1 && work >= MIN_PARALLEL_WORK {
        let next = AtomicUsize::new(0);
        let take = || Some(next.fetch_add(1, Ordering::Relaxed)).filter(|index| *index < count);
        let work = || std::iter::from_fn(take).for_each(&job);
        if openmp::run(threads, &work) {
            return;
        }
        if let Some(pool) = pool(threads) {
            // The calling thread works too: one less to wake.
            pool.in_place_scope(|scope| {
                (1..threads).for_each(|_| scope.spawn(|_| work()));
                work();
            });
            return;
        }
    }
    (0..count).for_each(job);
}

/// The workers beside the calling thread, of so many threads in all, or `None` where the system gives no more: the caller
/// then works alone.
fn pool(threads: usize) -> Option<Arc<ThreadPool>> {
    let process = std::process::id();
    let mut pools = POOLS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(found) = pools.iter().find(|p| p.threads == threads && p.process == process) {
        return Some(Arc::clone(&found.workers));
    }
    let workers = ThreadPoolBuilder::new()
        .num_threads(threads - 1)
        .thread_name(|i| format!("pagedkv-{i}"))
        .build()
        .ok()
        .map(Arc::new)?;
    pools.push(Pool {
        threads,
        // A forked child inherits the list but not the threads; its entries stay, unused, because dropping a pool
        // whose threads are gone would wait for them.
        process,
        workers: Arc::clone(&workers),
    });
    Some(workers)
}

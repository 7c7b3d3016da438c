//! The threads of a library that is loaded beside us, so that two pools do not fight for the same cores.
//!
//! torch computes in OpenMP's threads, which spin for a while after each product: workers of our own, woken in that
//! while, share a core with one that spins.

use std::any::Any;
use std::ffi::{CStr, c_int, c_uint, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

type Parallel = unsafe extern "C" fn(extern "C" fn(*mut c_void), *mut c_void, c_uint, c_uint);
type MaxThreads = unsafe extern "C" fn() -> c_int;

/// Two functions of GNU's OpenMP, which Intel's and LLVM's export as well.
#[derive(Clone, Copy)]
struct OpenMp {
    parallel: Parallel,
    max_threads: MaxThreads,
}

/// The process whose threads may be used; 0 before that is known.
static PROCESS: AtomicU32 = AtomicU32::new(0);

/// Notes that this process is no child of one that used OpenMP's threads: to be said when the library is loaded, since
/// others may use them, and fork, before we do.
pub fn note_process() {
    let _ = is_noted_process();
}

fn is_noted_process() -> bool {
    let process = std::process::id();
    match PROCESS.compare_exchange(0, process, Ordering::Relaxed, Ordering::Relaxed) {
        Ok(_) => true,
        Err(noted) => noted == process,
    }
}

struct Region<'a> {
    work: &'a (dyn Fn() + Sync),
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

/// Runs `work` once on each of `threads` threads of OpenMP, the calling one among them, and returns true; or returns false
/// where no OpenMP is loaded, or its next region would have another number of threads: it would end some and start them
/// again each time. A child that was forked from a process that used them has none of them, and would wait for ever: false
/// in every child of the process that was noted.
pub(crate) fn run(threads: usize, work: &(dyn Fn() + Sync)) -> bool {
    let Some(openmp) = find() else { return false };
    // SAFETY: the function takes nothing and may be called from any thread.
    if usize::try_from(unsafe { (openmp.max_threads)() }) != Ok(threads) {
        return false;
    }
    if !is_noted_process() {
        return false;
    }
    let region = Region { work, panic: Mutex::new(None) };
    // SAFETY: `enter` gets the region, which lives until all threads have left it: that is when `parallel` returns.
    unsafe { (openmp.parallel)(enter, (&raw const region).cast_mut().cast(), threads as c_uint, 0) };
    if let Some(panic) = region.panic.into_inner().unwrap_or_else(PoisonError::into_inner) {
        resume_unwind(panic);
    }
    true
}

extern "C" fn enter(region: *mut c_void) {
    // SAFETY: `run` passes a region, shared by all threads, that it keeps until they return.
    let region = unsafe { &*region.cast::<Region<'_>>() };
    // A panic must not leave a function that C calls.
    if let Err(panic) = catch_unwind(AssertUnwindSafe(region.work)) {
        *region.panic.lock().unwrap_or_else(PoisonError::into_inner) = Some(panic);
    }
}

/// The OpenMP that is loaded for everybody in this process, as torch loads it; it may come later.
fn find() -> Option<OpenMp> {
    static FOUND: OnceLock<OpenMp> = OnceLock::new();
    if let Some(found) = FOUND.get() {
        return Some(*found);
    }
    let (parallel, max_threads) = (symbol(c"GOMP_parallel")?, symbol(c"omp_get_max_threads")?);
    // SAFETY: functions of these names have these signatures in every OpenMP that has them.
    let found = unsafe {
        OpenMp {
            parallel: std::mem::transmute::<*mut c_void, Parallel>(parallel),
            max_threads: std::mem::transmute::<*mut c_void, MaxThreads>(max_threads),
        }
    };
    Some(*FOUND.get_or_init(|| found))
}

fn symbol(name: &CStr) -> Option<*mut c_void> {
    // SAFETY: the name ends with a zero.
    Some(unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) }).filter(|address| !address.is_null())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_runs_where_no_openmp_is_loaded() {
        assert!(symbol(c"GOMP_parallel").is_none(), "these tests link none");
        assert!(!run(2, &|| panic!("nobody runs this")));
    }

    #[test]
    fn a_panic_is_kept_for_the_caller() {
        let region = Region { work: &|| panic!("broken"), panic: Mutex::new(None) };
        enter((&raw const region).cast_mut().cast());
        let panic = region.panic.into_inner().unwrap().expect("one panic");
        assert_eq!(panic.downcast_ref(), Some(&"broken"));
    }
}

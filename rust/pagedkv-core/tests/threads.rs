//! Threads that add and abort while another steps: nothing is lost, nothing comes twice, everything ends. `make tsan`
//! runs these under the thread sanitizer.

mod model;

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, mpsc};
use std::thread;

use model::random::Random;
use pagedkv_core::step_plan::Field;
use pagedkv_core::{
    CacheConfig, Error, Handle, Inbox, KVCacheManager, NewRequest, Scheduler, SchedulerConfig, StepPlan, StepResult,
};

const NUM_THREADS: usize = 4;
const REQUESTS_PER_THREAD: usize = 300;
const MAX_TOKENS: u32 = 6;

fn scheduler(max_plans_in_flight: u32) -> Scheduler {
    let cache = CacheConfig { block_size: 4, ..CacheConfig::new(48) };
    let limits = SchedulerConfig {
        max_num_seqs: 8,
        max_num_batched_tokens: 64,
        max_plans_in_flight,
        ..SchedulerConfig::default()
    };
    Scheduler::new(&cache, &limits).expect("a valid configuration")
}

fn request(thread: usize, number: usize, random: &mut Random) -> NewRequest {
    let prompt = (0..=random.below(12)).map(|position| (position % 3) as i32).collect();
    let max_tokens = 1 + random.below(MAX_TOKENS as usize) as u32;
    NewRequest { n: 1 + random.below(2) as u32, ..NewRequest::new(format!("{thread}-{number}"), prompt, max_tokens) }
}

fn commit(scheduler: &mut Scheduler, plan: &StepPlan) -> StepResult {
    let tokens = vec![7; plan.sizes().num_samples as usize];
    scheduler.commit(plan.id(), &tokens).expect("the oldest plan")
}

fn step(scheduler: &mut Scheduler) -> StepResult {
    let plan = scheduler.schedule().expect("no plan is in flight");
    commit(scheduler, &plan)
}

/// What one thread did to the inbox.
#[derive(Default)]
struct Left {
    added: Vec<Handle>,
    aborted: BTreeSet<Handle>,
}

/// Adds requests and aborts some of all that it knows, some of them long over.
fn add_and_abort(inbox: &Inbox, thread: usize) -> Left {
    let mut random = Random::new(thread as u64);
    let mut left = Left::default();
    for number in 0..REQUESTS_PER_THREAD {
        left.added.push(inbox.add_request(request(thread, number, &mut random)).expect("a request that fits"));
        if random.below(3) == 0 {
            let handle = left.added[random.below(left.added.len())];
            inbox.abort(handle, None).expect("a handle that was given out");
            left.aborted.insert(handle);
        }
        if random.below(16) == 0 {
            thread::yield_now();
        }
    }
    left
}

/// Steps while threads add and abort, then until nothing is left; answers what they left and who finished.
fn run(scheduler: &mut Scheduler, mut step: impl FnMut(&mut Scheduler) -> StepResult) -> (Vec<Left>, Vec<Handle>) {
    let inbox = scheduler.inbox();
    let mut finished = Vec::new();
    let mut note = |result: StepResult| finished.extend(result.finished.into_iter().map(|finished| finished.handle));
    let left = thread::scope(|scope| {
        let spawn = |thread| {
            let inbox = inbox.clone();
            scope.spawn(move || add_and_abort(&inbox, thread))
        };
        let threads: Vec<_> = (0..NUM_THREADS).map(spawn).collect();
        while threads.iter().any(|thread| !thread.is_finished()) {
            note(step(scheduler));
        }
        threads.into_iter().map(|thread| thread.join().expect("the thread does not panic")).collect()
    });
    // Aborts may be all that is left to take up.
    note(step(scheduler));
    while scheduler.num_unfinished_requests() > 0 {
        note(step(scheduler));
    }
    (left, finished)
}

fn check_nothing_is_lost(scheduler: &Scheduler, left: &[Left], finished: &[Handle]) {
    let added: BTreeSet<Handle> = left.iter().flat_map(|left| left.added.iter().copied()).collect();
    assert_eq!(added.len(), NUM_THREADS * REQUESTS_PER_THREAD, "every request has a handle of its own");
    let ended: BTreeSet<Handle> = finished.iter().copied().collect();
    assert_eq!(ended.len(), finished.len(), "nobody finishes twice");
    let aborted: BTreeSet<Handle> = left.iter().flat_map(|left| left.aborted.iter().copied()).collect();
    assert!(ended.is_subset(&added));
    assert!(added.iter().all(|handle| ended.contains(handle) || aborted.contains(handle)), "a request is lost");
    assert_eq!((scheduler.num_unfinished_requests(), scheduler.manager().num_sequences()), (0, 0));
    assert_eq!(scheduler.check_integrity(), Ok(()));
    let pool = scheduler.manager().pool();
    assert_eq!((pool.num_held(), pool.num_fenced()), (0, 0));
}

#[test]
fn requests_of_many_threads_end_once_each_while_another_thread_steps() {
    let mut scheduler = scheduler(1);
    let (left, finished) = run(&mut scheduler, step);
    check_nothing_is_lost(&scheduler, &left, &finished);
}

#[test]
fn requests_of_many_threads_end_once_each_while_plans_are_in_flight_and_some_are_undone() {
    let mut scheduler = scheduler(3);
    let mut random = Random::new(7);
    let (mut in_flight, mut rolled_back) = (Vec::new(), 0);
    let (left, finished) = run(&mut scheduler, |scheduler| {
        in_flight.push(scheduler.schedule().expect("fewer plans in flight than allowed"));
        match random.below(4) {
            0 => {
                let undone = in_flight.split_off(random.below(in_flight.len()));
                rolled_back += undone.len();
                scheduler.rollback(undone[0].id()).expect("a plan in flight");
                StepResult::default()
            }
            1 if in_flight.len() < 3 => StepResult::default(),
            _ => commit(scheduler, &in_flight.remove(0)),
        }
    });
    assert!(rolled_back > 0);
    for plan in in_flight {
        scheduler.rollback(plan.id()).ok();
    }
    check_nothing_is_lost(&scheduler, &left, &finished);
}

#[test]
fn an_id_that_threads_race_for_goes_to_one_of_them() {
    let mut scheduler = scheduler(1);
    let inbox = scheduler.inbox();
    for round in 0..50 {
        let taken = AtomicUsize::new(0);
        thread::scope(|scope| {
            for _ in 0..NUM_THREADS {
                scope.spawn(|| match inbox.add_request(NewRequest::new("the same", vec![round], 1)) {
                    Ok(_) => drop(taken.fetch_add(1, Ordering::Relaxed)),
                    Err(refused) => assert_eq!(refused, Error::DuplicateRequest("the same".into())),
                });
            }
        });
        assert_eq!(taken.into_inner(), 1);
        assert_eq!(step(&mut scheduler).finished.len(), 1);
    }
}

#[test]
fn requests_of_one_thread_are_admitted_in_the_order_in_which_it_added_them() {
    const EACH: usize = 100;
    let mut scheduler = scheduler(1);
    let inbox = scheduler.inbox();
    let mut steps: Vec<StepPlan> = Vec::new();
    thread::scope(|scope| {
        for thread in 0..NUM_THREADS {
            let inbox = inbox.clone();
            let id = move |number| format!("{thread}-{number:03}");
            scope.spawn(move || {
                (0..EACH).for_each(|number| drop(inbox.add_request(NewRequest::new(id(number), vec![1], 1))));
            });
        }
        let mut num_finished = 0;
        while num_finished < NUM_THREADS * EACH {
            let plan = scheduler.schedule().expect("no plan is in flight");
            num_finished += commit(&mut scheduler, &plan).finished.len();
            steps.push(plan);
        }
    });
    for thread in 0..NUM_THREADS {
        let is_of_thread = |id: &String| id.starts_with(&format!("{thread}-"));
        let of_step = |plan: &StepPlan| {
            let mut ids: Vec<_> = plan.changes().new.into_iter().map(|change| change.request_id).collect();
            ids.retain(is_of_thread);
            ids.sort();
            ids
        };
        let admitted: Vec<String> = steps.iter().flat_map(of_step).collect();
        assert!(admitted.len() == EACH && admitted.is_sorted(), "{admitted:?}");
    }
}

#[test]
fn plans_are_read_and_dropped_on_other_threads_while_their_buffers_are_used_again() {
    let mut scheduler = scheduler(1);
    let inbox = scheduler.inbox();
    let (send, receive) = mpsc::channel::<StepPlan>();
    let receive = Mutex::new(receive);
    let num_read = AtomicUsize::new(0);
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                loop {
                    let received = receive.lock().expect("no reader panics").recv();
                    let Ok(plan) = received else { return };
                    let sum: i64 = plan.i64s(Field::SlotMapping).iter().sum();
                    assert!(sum >= 0 && plan.changes().new.len() <= 8);
                    num_read.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        let mut random = Random::new(3);
        for number in 0..200 {
            inbox.add_request(request(0, number, &mut random)).expect("it fits");
            let plan = scheduler.schedule().expect("no plan is in flight");
            commit(&mut scheduler, &plan);
            send.send(plan).expect("the readers wait");
        }
        drop(send);
    });
    assert_eq!(num_read.into_inner(), 200);
}

#[test]
fn a_scheduler_behind_a_lock_is_stepped_by_whichever_thread_comes() {
    let scheduler = Mutex::new(scheduler(1));
    let inbox = scheduler.lock().expect("nobody panicked").inbox();
    let num_finished = AtomicUsize::new(0);
    let mut random = Random::new(5);
    for number in 0..100 {
        inbox.add_request(request(0, number, &mut random)).expect("it fits");
    }
    thread::scope(|scope| {
        for _ in 0..NUM_THREADS {
            scope.spawn(|| {
                while inbox.num_unfinished_requests() > 0 {
                    let result = step(&mut scheduler.lock().expect("nobody panicked"));
                    num_finished.fetch_add(result.finished.len(), Ordering::Relaxed);
                }
            });
        }
    });
    assert_eq!(num_finished.into_inner(), 100);
    assert_eq!(scheduler.into_inner().expect("nobody panicked").check_integrity(), Ok(()));
}

#[test]
fn what_threads_may_send_and_share_is_said_by_types() {
    fn sends<T: Send>() {}
    fn shares<T: Sync>() {}
    sends::<Scheduler>();
    sends::<KVCacheManager>();
    sends::<StepPlan>();
    shares::<StepPlan>();
    sends::<Inbox>();
    shares::<Inbox>();
}

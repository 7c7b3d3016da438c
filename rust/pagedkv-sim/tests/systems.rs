//! What holds for every system: no request is lost, no token made twice, memory is never overfull, runs repeat.

use std::sync::Arc;

use pagedkv_core::{CacheConfig, PreemptionMode, SchedulerConfig};
use pagedkv_sim::Result;
use pagedkv_sim::cost::{Fitted, SwapLink, Work};
use pagedkv_sim::simulation::{Options, Outcome, run};
use pagedkv_sim::survival::Survival;
use pagedkv_sim::systems::{
    Ended, Estimate, Holdings, Limits, Orca, Paged, Paper, PaperPreemption, Preemptions, StaticBatch, System,
};
use pagedkv_sim::trace::Lengths;
use pagedkv_sim::workload::{Sampling, Workload};
use proptest::prelude::*;

const LIMITS: Limits =
    Limits { num_blocks: 24, block_size: 4, max_num_seqs: 8, max_num_batched_tokens: 64, max_model_len: 32 };
const SURVIVAL: Survival = Survival { turnover: 0.4, seed: 3 };
const LINK: SwapLink = SwapLink { bandwidth: 25e9, per_copy: 7e-6, copies_per_block: 1, block_bytes: 13e6 };
const NAMES: [&str; 9] = [
    "pagedkv",
    "pagedkv swap",
    "vllm",
    "vllm recompute",
    "vllm unshared",
    "orca max",
    "orca pow2",
    "orca oracle",
    "static",
];

fn system(name: &str, workload: &Arc<Workload>) -> Result<Box<dyn System>> {
    let workload = workload.clone();
    let paged = |preemption_mode| {
        let cache = CacheConfig {
            block_size: LIMITS.block_size,
            enable_prefix_caching: false,
            num_host_blocks: 64,
            ..CacheConfig::new(LIMITS.num_blocks + 1)
        };
        let limits = SchedulerConfig {
            max_num_seqs: LIMITS.max_num_seqs,
            max_num_batched_tokens: LIMITS.max_num_batched_tokens,
            max_model_len: LIMITS.max_model_len,
            preemption_mode,
            ..SchedulerConfig::default()
        };
        Paged::new(workload.clone(), &cache, &limits, SURVIVAL).map(|paged| Box::new(paged) as Box<dyn System>)
    };
    let paper = |preemption, sharing| {
        let made = Paper::new(workload.clone(), LIMITS, preemption, 64, sharing, SURVIVAL);
        made.map(|paper| Box::new(paper) as Box<dyn System>)
    };
    let orca = |estimate| {
        Orca::new(workload.clone(), LIMITS, estimate, SURVIVAL).map(|orca| Box::new(orca) as Box<dyn System>)
    };
    match name {
        "pagedkv" => paged(PreemptionMode::Recompute),
        "pagedkv swap" => paged(PreemptionMode::Swap),
        "vllm" => paper(PaperPreemption::BySamples, true),
        "vllm recompute" => paper(PaperPreemption::Recompute, true),
        "vllm unshared" => paper(PaperPreemption::BySamples, false),
        "orca max" => orca(Estimate::Max),
        "orca pow2" => orca(Estimate::PowerOfTwo),
        "orca oracle" => orca(Estimate::Oracle),
        _ => StaticBatch::new(workload, LIMITS, 3).map(|batches| Box::new(batches) as _),
    }
}

/// A system, and what is checked of it in each step.
struct Watched {
    system: Box<dyn System>,
    drawn: u64,
    ended: Vec<u32>,
    most_tokens: u64,
}

impl System for Watched {
    fn add(&mut self, index: u32) -> Result<()> {
        let before = self.system.num_unfinished();
        self.system.add(index)?;
        assert_eq!(self.system.num_unfinished(), before + 1);
        Ok(())
    }

    fn num_unfinished(&self) -> usize {
        self.system.num_unfinished()
    }

    fn begin_step(&mut self, now: f64) -> Result<Work> {
        let work = self.system.begin_step(now)?;
        self.drawn += u64::from(work.num_seqs);
        let holdings = self.system.holdings();
        assert!(holdings.physical_blocks <= u64::from(LIMITS.num_blocks));
        assert!(holdings.num_seqs <= LIMITS.max_num_seqs);
        if holdings.logical_blocks == 0 {
            assert!(holdings.tokens + holdings.reserved + holdings.internal <= holdings.total, "{holdings:?}");
        } else {
            assert!(holdings.tokens <= holdings.logical_blocks * u64::from(LIMITS.block_size), "{holdings:?}");
            assert!(holdings.physical_blocks <= holdings.logical_blocks, "{holdings:?}");
        }
        self.most_tokens = self.most_tokens.max(holdings.tokens);
        Ok(work)
    }

    fn end_step(&mut self, now: f64, ended: &mut Vec<Ended>) -> Result<()> {
        let (before, known) = (self.system.num_unfinished(), ended.len());
        self.system.end_step(now, ended)?;
        self.ended.extend(ended[known..].iter().map(|ended| ended.index));
        assert_eq!(self.system.num_unfinished() + ended.len() - known, before);
        Ok(())
    }

    fn holdings(&self) -> Holdings {
        self.system.holdings()
    }

    fn preemptions(&self) -> Preemptions {
        self.system.preemptions()
    }
}

fn simulate(name: &str, workload: &Arc<Workload>) -> (Outcome, Watched) {
    let system = system(name, workload).unwrap();
    let mut watched = Watched { system, drawn: 0, ended: Vec::new(), most_tokens: 0 };
    let outcome = run(workload, &mut watched, &Fitted::OPT_13B_A100, &LINK, &Options::default()).unwrap();
    (outcome, watched)
}

fn workload() -> impl Strategy<Value = Workload> {
    let request = (1_u32..12, 1_u32..16, 0.0..0.5_f64);
    let sampling = prop_oneof![Just(Sampling::Parallel(1)), Just(Sampling::Parallel(2)), Just(Sampling::Beam(2)),];
    (prop::collection::vec(request, 1..24), sampling).prop_map(|(requests, sampling)| {
        let lengths: Vec<_> = requests
            .iter()
            .map(|&(prompt_tokens, output_tokens, _)| Lengths { prompt_tokens, output_tokens })
            .collect();
        let mut now = 0.0;
        let arrivals: Vec<_> = requests
            .iter()
            .map(|&(_, _, gap)| {
                now += gap;
                now
            })
            .collect();
        Workload::new(&lengths, &arrivals).unwrap().with_sampling(sampling)
    })
}

fn names_for(workload: &Workload) -> impl Iterator<Item = &'static str> {
    let plain = workload.sampling == Sampling::Parallel(1);
    NAMES.into_iter().filter(move |&name| plain || name != "static")
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn every_request_ends_once_and_in_time(workload in workload()) {
        let workload = Arc::new(workload);
        for name in names_for(&workload) {
            let (outcome, mut watched) = simulate(name, &workload);
            watched.ended.sort_unstable();
            prop_assert_eq!(&watched.ended, &(0..workload.requests.len() as u32).collect::<Vec<_>>(), "{}", name);
            for (request, became) in workload.requests.iter().zip(&outcome.requests) {
                prop_assert!(request.arrival < became.first_token, "{}", name);
                prop_assert!(became.first_token <= became.finish, "{}", name);
                prop_assert!(became.finish <= outcome.seconds, "{}", name);
                let alone = f64::from(request.output_tokens) * Fitted::OPT_13B_A100.base;
                prop_assert!(became.finish - request.arrival >= alone, "{}", name);
            }
        }
    }

    #[test]
    fn systems_that_do_not_cut_prompts_draw_each_token_once(workload in workload()) {
        let workload = Arc::new(workload);
        let width = u64::from(workload.sampling.width());
        let tokens: u64 = workload.requests.iter().map(|request| width * u64::from(request.output_tokens)).sum();
        for name in names_for(&workload).filter(|name| name.starts_with("vllm") || name.starts_with("orca")) {
            let (_, watched) = simulate(name, &workload);
            prop_assert_eq!(watched.drawn, tokens, "{}", name);
        }
    }

    #[test]
    fn the_same_workload_gives_the_same_outcome(workload in workload()) {
        let workload = Arc::new(workload);
        for name in names_for(&workload) {
            let (one, other) = (simulate(name, &workload).0, simulate(name, &workload).0);
            prop_assert_eq!(&one.requests, &other.requests, "{}", name);
            prop_assert_eq!(one.means, other.means, "{}", name);
        }
    }
}

/// Requests that together need more than the pool.
fn crowd(sampling: Sampling) -> Arc<Workload> {
    let lengths = [Lengths { prompt_tokens: 7, output_tokens: 20 }; 12];
    Arc::new(Workload::new(&lengths, &[0.0; 12]).unwrap().with_sampling(sampling))
}

#[test]
fn a_full_pool_of_the_paper_preempts_by_the_number_of_samples() {
    let single = simulate("vllm", &crowd(Sampling::Parallel(1))).0.preemptions;
    assert!(single.recomputed > 0 && single.swapped == 0, "{single:?}");
    let pairs = simulate("vllm", &crowd(Sampling::Parallel(2))).0.preemptions;
    assert!(pairs.swapped > 0 && pairs.recomputed == 0, "{pairs:?}");
}

#[test]
fn a_full_pool_of_ours_swaps_when_it_is_told_to() {
    let swapping = simulate("pagedkv swap", &crowd(Sampling::Parallel(1))).0;
    assert!(swapping.preemptions.swapped > 0 && swapping.swap_seconds > 0.0);
    let computing = simulate("pagedkv", &crowd(Sampling::Parallel(1))).0;
    assert!(computing.preemptions.recomputed > 0 && computing.swap_seconds < f64::EPSILON);
}

#[test]
fn orca_holds_its_chunks_and_preempts_nobody() {
    let (outcome, watched) = simulate("orca max", &crowd(Sampling::Parallel(1)));
    assert_eq!(outcome.preemptions, Preemptions::default());
    // 24 blocks hold three chunks of 32 tokens.
    assert!((outcome.means.num_requests - 3.0).abs() < 1e-9, "{:?}", outcome.means);
    assert_eq!(watched.most_tokens, 3 * 26);
}

#[test]
fn sharing_saves_blocks_and_unshared_samples_do_not() {
    let workload = crowd(Sampling::Parallel(2));
    assert!(simulate("vllm", &workload).0.means.sharing_ratio > 1.05);
    assert!((simulate("vllm unshared", &workload).0.means.sharing_ratio - 1.0).abs() < 1e-9);
}

#[test]
fn beams_share_more_than_samples() {
    for name in ["vllm", "pagedkv"] {
        let samples = simulate(name, &crowd(Sampling::Parallel(2))).0.means.sharing_ratio;
        let beams = simulate(name, &crowd(Sampling::Beam(2))).0.means.sharing_ratio;
        assert!(beams > samples, "{name}: {beams} {samples}");
    }
}

#[test]
fn a_batch_of_whole_requests_ends_together() {
    let lengths: Vec<_> = (1..=3).map(|tokens| Lengths { prompt_tokens: 4, output_tokens: 2 * tokens }).collect();
    let workload = Arc::new(Workload::new(&lengths, &[0.0; 3]).unwrap());
    let outcome = simulate("static", &workload).0;
    assert!(outcome.requests.windows(2).all(|pair| (pair[0].finish - pair[1].finish).abs() < 1e-12));
    assert_eq!(outcome.num_steps, 6);
}

#[test]
fn a_shared_prefix_is_computed_once_by_the_prefix_cache() {
    let lengths = [Lengths { prompt_tokens: 3, output_tokens: 4 }; 6];
    let arrivals: Vec<_> = (0..6).map(f64::from).collect();
    let workload = Arc::new(Workload::new(&lengths, &arrivals).unwrap().with_shared_prefix(16).unwrap());
    let cache = CacheConfig { block_size: 4, ..CacheConfig::new(25) };
    let limits = SchedulerConfig { max_model_len: 32, ..SchedulerConfig::default() };
    let mut paged = Paged::new(workload.clone(), &cache, &limits, SURVIVAL).unwrap();
    let outcome = run(&workload, &mut paged, &Fitted::OPT_13B_A100, &LINK, &Options::default()).unwrap();
    assert_eq!(
        outcome.requests.iter().map(|request| request.cached_tokens).collect::<Vec<_>>(),
        [0, 16, 16, 16, 16, 16]
    );
}

#[test]
fn a_request_longer_than_the_pool_is_refused_by_its_place() {
    let lengths = [Lengths { prompt_tokens: 4, output_tokens: 4 }, Lengths { prompt_tokens: 20, output_tokens: 12 }];
    let workload = Workload::new(&lengths, &[0.0, 0.0]).unwrap().with_sampling(Sampling::Parallel(8));
    let workload = Arc::new(workload);
    for name in ["vllm", "vllm unshared", "orca max", "orca oracle"] {
        let error = system(name, &workload).err().map(|error| error.to_string()).unwrap_or_default();
        assert!(error.starts_with("request ") && error.contains("prompt_tokens + output_tokens"), "{name}: {error:?}");
    }
    let mut paged = system("pagedkv", &workload).unwrap();
    let error = run(&workload, paged.as_mut(), &Fitted::OPT_13B_A100, &LINK, &Options::default()).unwrap_err();
    assert!(error.to_string().starts_with("request 1: prompt_tokens + output_tokens"), "{error}");
}

#[test]
fn a_static_batch_refuses_a_request_longer_than_the_pool() {
    let lengths =
        [(4, 4), (15, 5), (15, 6)].map(|(prompt_tokens, output_tokens)| Lengths { prompt_tokens, output_tokens });
    let workload = Arc::new(Workload::new(&lengths, &[0.0; 3]).unwrap());
    let limits = |num_blocks| Limits { num_blocks, ..LIMITS };
    let error = StaticBatch::new(workload.clone(), limits(5), 3).unwrap_err().to_string();
    assert_eq!(error, "request 2: prompt_tokens + output_tokens: expected at most 20 (slots of the pool), found 21");
    assert!(StaticBatch::new(workload, limits(6), 3).is_ok());
}

#[test]
fn nothing_is_planned_after_the_end() {
    let workload = crowd(Sampling::Parallel(1));
    let mut paper = system("vllm", &workload).unwrap();
    let options = Options { until: 0.1, ..Options::default() };
    let outcome = run(&workload, paper.as_mut(), &Fitted::OPT_13B_A100, &LINK, &options).unwrap();
    assert!(outcome.seconds < 0.2 && outcome.requests.iter().any(|request| request.finish.is_nan()));
}

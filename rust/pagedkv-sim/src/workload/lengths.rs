//! Lengths like those of the traces that the paper used.

use super::quantiles::Quantiles;
use crate::random::{Random, normal_share};
use crate::trace::Lengths;

/// Tokens of prompt and answer together from which on the paper drops a request.
const TOO_LONG: u32 = 2048;

/// Prompts of `ShareGPT` under OPT's tokenizer. These quantiles, and those of the answers, were measured on the length
/// file of the paper's artifact, pairs with prompt + answer < 2,048; the trace itself has no licence.
const SHAREGPT_PROMPTS: Quantiles<20> = Quantiles([
    (0.0, 1.0),
    (0.025, 4.0),
    (0.05, 7.0),
    (0.1, 9.0),
    (0.2, 13.0),
    (0.25, 15.0),
    (0.3, 18.0),
    (0.4, 24.0),
    (0.5, 35.0),
    (0.6, 55.0),
    (0.7, 94.0),
    (0.75, 133.0),
    (0.8, 203.0),
    (0.85, 324.0),
    (0.9, 506.0),
    (0.95, 863.0),
    (0.975, 1146.0),
    (0.99, 1460.0),
    (0.995, 1636.0),
    (1.0, 2028.0),
]);

const SHAREGPT_ANSWERS: Quantiles<20> = Quantiles([
    (0.0, 1.0),
    (0.025, 10.0),
    (0.05, 22.0),
    (0.1, 45.0),
    (0.2, 101.0),
    (0.25, 128.0),
    (0.3, 157.0),
    (0.4, 216.0),
    (0.5, 271.0),
    (0.6, 330.0),
    (0.7, 405.0),
    (0.75, 458.0),
    (0.8, 525.0),
    (0.85, 619.0),
    (0.9, 754.0),
    (0.95, 899.0),
    (0.975, 1092.0),
    (0.99, 1280.0),
    (0.995, 1443.0),
    (1.0, 2009.0),
]);

/// Correlation of the logarithms of both, measured on the same pairs.
const SHAREGPT_CORRELATION: f64 = 0.18;

/// Lengths like `ShareGPT`'s: its quantiles, tied by a Gaussian copula. Of pairs that are too long the answer is drawn
/// again, so that the prompts keep their distribution; in the trace, too, long prompts have shorter answers.
pub fn sharegpt(count: usize, seed: u64) -> Vec<Lengths> {
    let mut random = Random::of(seed, LENGTHS);
    let rest = libm::sqrt(1.0 - SHAREGPT_CORRELATION * SHAREGPT_CORRELATION);
    let draw = |_| {
        let (mut prompt, mut other) = random.normals();
        loop {
            let prompt_tokens = SHAREGPT_PROMPTS.at(normal_share(prompt));
            let answer = SHAREGPT_CORRELATION * prompt + rest * other;
            let output_tokens = SHAREGPT_ANSWERS.at(normal_share(answer));
            if prompt_tokens + output_tokens < TOO_LONG {
                return Lengths { prompt_tokens, output_tokens };
            }
            // The longest prompts leave room for a handful of answers only; give up on those that find none.
            let (next, again) = random.normals();
            other = next;
            if prompt_tokens > MOST_PROMPT {
                prompt = again;
            }
        }
    };
    (0..count).map(draw).collect()
}

/// A prompt above this is drawn again with its answer.
const MOST_PROMPT: u32 = 1900;

/// Lengths like Alpaca's: log-normal with the paper's means (its Figure 11).
///
/// The trace is not to be had. No single spread of the answers gives all that the paper reports: with `sigma` 0.85 the
/// batches of its Orca baselines and the savings of its Figure 15 come out, and vLLM's batch does not.
pub fn alpaca(count: usize, sigma: f64, seed: u64) -> Vec<Lengths> {
    let mut random = Random::of(seed, LENGTHS);
    let draw = |_| {
        let (prompt, answer) = random.normals();
        Lengths { prompt_tokens: log_normal(19.31, 0.5, prompt), output_tokens: log_normal(58.45, sigma, answer) }
    };
    (0..count).map(draw).collect()
}

/// Lengths like those of a translation task, English to German, in `LLaMA`'s tokens: a sentence and its translation.
///
/// The paper used the test set of WMT16, whose lengths are not at hand. Assumed: sentences of 28 tokens on average,
/// translations of 40, both log-normal with a spread of 0.5 and a correlation of 0.9.
pub fn translation(count: usize, seed: u64) -> Vec<Lengths> {
    const CORRELATION: f64 = 0.9;
    let mut random = Random::of(seed, LENGTHS);
    let rest = libm::sqrt(1.0 - CORRELATION * CORRELATION);
    let draw = |_| {
        let (sentence, other) = random.normals();
        let translation = CORRELATION * sentence + rest * other;
        Lengths { prompt_tokens: log_normal(28.0, 0.5, sentence), output_tokens: log_normal(40.0, 0.5, translation) }
    };
    (0..count).map(draw).collect()
}

/// Longest length that is drawn from a log-normal distribution.
const LONGEST: f64 = 1000.0;

fn log_normal(mean: f64, sigma: f64, normal: f64) -> u32 {
    let length = libm::exp(libm::log(mean) - sigma * sigma / 2.0 + sigma * normal);
    libm::round(length).clamp(1.0, LONGEST) as u32
}

/// Keeps lengths apart from arrivals of the same seed.
const LENGTHS: u64 = u64::from_le_bytes(*b"lengths ");

#[cfg(test)]
mod tests {
    use super::*;

    fn means(lengths: &[Lengths]) -> (f64, f64) {
        let sum = |value: fn(&Lengths) -> u32| lengths.iter().map(|row| f64::from(value(row))).sum::<f64>();
        let count = lengths.len() as f64;
        (sum(|row| row.prompt_tokens) / count, sum(|row| row.output_tokens) / count)
    }

    #[test]
    fn sharegpt_lengths_have_the_means_of_the_paper_within_five_percent() {
        let lengths = sharegpt(100_000, 0);
        let (prompt, answer) = means(&lengths);
        assert!((prompt / 161.31 - 1.0).abs() < 0.05, "{prompt}");
        assert!((answer / 337.99 - 1.0).abs() < 0.05, "{answer}");
        assert!(lengths.iter().all(|row| row.prompt_tokens + row.output_tokens < TOO_LONG));
    }

    #[test]
    fn alpaca_lengths_have_the_means_of_the_paper_within_three_percent() {
        let (prompt, answer) = means(&alpaca(100_000, 0.85, 0));
        assert!((prompt / 19.31 - 1.0).abs() < 0.03, "{prompt}");
        assert!((answer / 58.45 - 1.0).abs() < 0.03, "{answer}");
    }

    #[test]
    fn a_seed_gives_the_same_lengths_and_another_seed_others() {
        assert_eq!(sharegpt(50, 3), sharegpt(50, 3));
        assert_ne!(sharegpt(50, 3), sharegpt(50, 4));
    }
}

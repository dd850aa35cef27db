//! Key-value recall by induction: pairs of random words lie in a text, later a key is asked, and the
//! likeliest next token must be its value. What a cache has forgotten shows here; perplexity is blind to
//! it (Quest, arXiv 2406.10774). The question comes after the context was compressed.

use std::ops::Range;

use reef_model::runner::ModelRunner;

use super::lanes::Lanes;
use crate::sampler::{SplitMix64, greedy};
use crate::session::{EngineError, Session};

/// Tokens of which contexts are made.
#[derive(Clone, Debug)]
pub struct Language {
    /// What a text begins with (BOS).
    pub start: Vec<u32>,
    /// Words of one token each, of which keys and values are drawn without repetition.
    pub words: Vec<u32>,
    /// Goes before a key.
    pub before_key: Vec<u32>,
    /// Goes between key and value.
    pub between: Vec<u32>,
    /// Goes after a value.
    pub after_value: Vec<u32>,
    /// Text between pairs, cut where need be.
    pub filler: Vec<u32>,
}

/// How hard it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Difficulty {
    /// Pairs in a context.
    pub pairs: usize,
    /// Words of a key: a longer match is easier to find.
    pub key_words: usize,
    /// Times each pair is told.
    pub repeats: usize,
}

/// From hard to easy, for calibration.
pub const DIFFICULTIES: [Difficulty; 8] = [
    Difficulty { pairs: 32, key_words: 2, repeats: 1 },
    Difficulty { pairs: 16, key_words: 2, repeats: 1 },
    Difficulty { pairs: 16, key_words: 3, repeats: 1 },
    Difficulty { pairs: 8, key_words: 3, repeats: 1 },
    Difficulty { pairs: 8, key_words: 4, repeats: 1 },
    Difficulty { pairs: 8, key_words: 4, repeats: 2 },
    Difficulty { pairs: 4, key_words: 4, repeats: 2 },
    Difficulty { pairs: 4, key_words: 4, repeats: 4 },
];

/// What to ask.
#[derive(Clone, Debug)]
pub struct Task {
    /// Tokens of a context.
    pub context_tokens: usize,
    /// How hard it is.
    pub difficulty: Difficulty,
    /// Numbers of the contexts to compute; every pair of each is asked once.
    pub contexts: Range<usize>,
    /// Seed of the words.
    pub seed: u64,
}

/// One answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answer {
    /// Number of the context.
    pub context: usize,
    /// Tokens of the context after the value was told last.
    pub distance: usize,
    /// Whether the likeliest token was the value.
    pub right: bool,
}

/// A context and what can be asked of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Context {
    /// Its tokens.
    pub ids: Vec<u32>,
    /// Question, value and the tokens after the value was told last, per pair in the order of telling.
    pub questions: Vec<Question>,
}

/// What is asked of a context.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Question {
    /// Tokens that end with the key and what goes between it and its value.
    pub ids: Vec<u32>,
    /// The right answer.
    pub value: u32,
    /// Tokens of the context after the value was told last.
    pub distance: usize,
}

/// A task that cannot be set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TaskError {
    /// The pairs do not fit the context.
    #[error("{pairs} pairs need {needed} tokens, the context has {context}: ask for more --tokens")]
    Context {
        /// Pairs told, repeats included.
        pairs: usize,
        /// Tokens they take.
        needed: usize,
        /// Tokens there are.
        context: usize,
    },
    /// The vocabulary is too small.
    #[error(
        "the vocabulary has {words} words of one token, {needed} are needed: choose another model"
    )]
    Words {
        /// Words there are.
        words: usize,
        /// Words needed.
        needed: usize,
    },
}

impl Language {
    /// Context number `index` of `task`: pairs evenly spread, filler between them.
    ///
    /// # Errors
    /// Pairs that do not fit, or too few words.
    pub fn context(&self, task: &Task, index: usize) -> Result<Context, TaskError> {
        let Difficulty { pairs, key_words, repeats } = task.difficulty;
        let needed = pairs * (key_words + 1);
        if self.words.len() < needed {
            return Err(TaskError::Words { words: self.words.len(), needed });
        }
        let mut random = SplitMix64(task.seed.wrapping_add(index as u64 * 0x5851_f42d));
        let words = draw(&self.words, needed, &mut random);
        let told = pairs * repeats;
        let item_tokens =
            self.before_key.len() + key_words + self.between.len() + 1 + self.after_value.len();
        let fixed = self.start.len() + told * item_tokens;
        if fixed > task.context_tokens {
            return Err(TaskError::Context {
                pairs: told,
                needed: fixed,
                context: task.context_tokens,
            });
        }
        let spare = task.context_tokens - fixed;
        let mut filler = self.filler_from(&mut random);
        let mut ids = self.start.clone();
        let mut ends = vec![0; pairs];
        for item in 0..told {
            let (key, value) = self.pair(&words, item % pairs, key_words);
            ids.extend(self.question(key).iter().chain([&value]).chain(&self.after_value));
            ends[item % pairs] = ids.len() - self.after_value.len();
            let gap = spare * (item + 1) / told - spare * item / told;
            ids.extend(filler.by_ref().take(gap));
        }
        let questions = (0..pairs).map(|pair| {
            let (key, value) = self.pair(&words, pair, key_words);
            Question { ids: self.question(key), value, distance: ids.len() - ends[pair] }
        });
        Ok(Context { questions: questions.collect(), ids })
    }

    fn pair<'w>(&self, words: &'w [u32], pair: usize, key_words: usize) -> (&'w [u32], u32) {
        let (key, value) = words[pair * (key_words + 1)..][..key_words + 1].split_at(key_words);
        (key, value[0])
    }

    fn question(&self, key: &[u32]) -> Vec<u32> {
        [&self.before_key, key, &self.between].concat()
    }

    /// The filler from a random place on, for ever. Without filler, words.
    fn filler_from(&self, random: &mut SplitMix64) -> impl Iterator<Item = u32> + '_ {
        let source = if self.filler.is_empty() { &self.words } else { &self.filler };
        let from = (random.unit() * source.len() as f64) as usize;
        source.iter().cycle().skip(from).copied()
    }
}

/// `count` different elements of `from`.
fn draw(from: &[u32], count: usize, random: &mut SplitMix64) -> Vec<u32> {
    let mut pool = from.to_vec();
    for index in 0..count {
        let left = pool.len() - index;
        pool.swap(index, index + ((random.unit() * left as f64) as usize).min(left - 1));
    }
    pool.truncate(count);
    pool
}

/// Asks every question of every context of `task` under every treatment and hands each answer, with the
/// number of its treatment, to `sink`.
///
/// A context is computed a block at a time and compressed as the rules say; then each question is put to
/// that same state and forgotten again, so questions do not see one another.
///
/// # Errors
/// A task that cannot be set ([`EngineError::Task`]), a pinned layer that the model does not have.
pub fn ask(
    runner: &mut ModelRunner,
    language: &Language,
    task: &Task,
    lanes: &Lanes<'_>,
    sink: &mut dyn FnMut(usize, Answer),
) -> Result<(), EngineError> {
    for index in task.contexts.clone() {
        let context = language.context(task, index)?;
        runner.check_tokens(&context.ids)?;
        let longest = context.questions.iter().map(|q| q.ids.len()).max().unwrap_or(0);
        let most = context.ids.len() + longest;
        let pool = lanes.pool(runner, most, 0)?;
        let mut sessions = lanes.sessions(runner, &pool, most);
        for chunk in context.ids.chunks(lanes.block_size) {
            let repeated = chunk.repeat(sessions.len());
            Session::advance_all(runner, &mut sessions, &repeated)?;
        }
        let width = runner.spec().vocabulary;
        for question in &context.questions {
            let rows = question.ids.len();
            let repeated = question.ids.repeat(sessions.len());
            Session::probe_all(runner, &mut sessions, &repeated)?;
            let last: Vec<usize> = (1..=sessions.len()).map(|lane| lane * rows - 1).collect();
            for (treatment, logits) in runner.logits(&last).chunks_exact(width).enumerate() {
                let right = greedy(logits) == question.value;
                sink(treatment, Answer { context: index, distance: question.distance, right });
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn language() -> Language {
        Language {
            start: vec![1],
            words: (100..400).collect(),
            before_key: vec![10],
            between: vec![11],
            after_value: vec![12],
            filler: (1000..2000).collect(),
        }
    }

    fn task(difficulty: Difficulty) -> Task {
        Task { context_tokens: 512, difficulty, contexts: 0..1, seed: 3 }
    }

    #[test]
    fn contexts_hold_every_pair_and_are_full() {
        for difficulty in DIFFICULTIES {
            let context = language().context(&task(difficulty), 0).unwrap();
            assert_eq!(context.ids.len(), 512);
            assert_eq!(context.questions.len(), difficulty.pairs);
            for question in &context.questions {
                let mut told = question.ids.clone();
                told.push(question.value);
                let places: Vec<usize> = (0..512 - told.len())
                    .filter(|&at| context.ids[at..].starts_with(&told))
                    .collect();
                assert_eq!(places.len(), difficulty.repeats, "{difficulty:?}");
                let last = places.last().unwrap() + told.len();
                assert_eq!(question.distance, 512 - last);
                // A value stands nowhere else: it cannot be right by another way.
                let values = context.ids.iter().filter(|id| **id == question.value).count();
                assert_eq!(values, difficulty.repeats);
            }
        }
    }

    #[test]
    fn contexts_differ_and_repeat_exactly() {
        let task = task(DIFFICULTIES[0]);
        let language = language();
        let [a, b] = [0, 1].map(|index| language.context(&task, index).unwrap());
        assert_ne!(a, b);
        assert_eq!(a, language.context(&task, 0).unwrap());
    }

    #[test]
    fn what_does_not_fit_is_refused_with_numbers() {
        let difficulty = Difficulty { pairs: 90, key_words: 2, repeats: 1 };
        let refused = language().context(&task(difficulty), 0);
        assert_eq!(refused, Err(TaskError::Context { pairs: 90, needed: 541, context: 512 }));
        let refused = Difficulty { pairs: 101, key_words: 2, repeats: 1 };
        let refused = language().context(&task(refused), 0);
        assert_eq!(refused, Err(TaskError::Words { words: 300, needed: 303 }));
    }
}

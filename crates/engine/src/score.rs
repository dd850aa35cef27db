//! Teacher-forced scoring: the likelihood of a given text, through the pages that generation uses.

use reef_kernels::rows::{for_each_row, for_each_row_pair};
use reef_kv::{BlockPool, Fidelity, SequenceConfig};
use reef_model::runner::ModelRunner;

use crate::eval::divergence::{ReferenceRow, RowScore, nll};
use crate::session::{EngineError, Rules, Session};
use crate::step::{roomy_config, with_pinned};

/// What to score and under which treatment of KV memory.
pub struct ScoreOptions {
    /// Tokens of a window; windows do not overlap and the first token of each is not scored. With a
    /// token budget one window may be longer than the trained context.
    pub context: usize,
    /// Tokens of a block; as the runner was loaded with.
    pub block_size: usize,
    /// How KV memory gives way.
    pub rules: Rules,
    /// Score the same tokens with untouched f16 KV beside, and compare.
    pub compare: bool,
}

/// Several treatments of KV memory that score the same tokens.
pub struct Scoring<'a> {
    /// Tokens of a window, as in [`ScoreOptions::context`].
    pub context: usize,
    /// Tokens of a block; as the runner was loaded with.
    pub block_size: usize,
    /// The treatments.
    pub treatments: &'a [Rules],
    /// Layers (index in the model) whose pages stay f16 under every treatment.
    pub pinned_layers: &'a [usize],
    /// Score the same tokens with untouched f16 KV too, once, and compare each treatment with it.
    pub compare: bool,
}

/// One scored token.
#[derive(Clone, Copy, Debug)]
pub struct TokenScore {
    /// Index in the text.
    pub index: usize,
    /// Negative log-likelihood in nats.
    pub nll: f64,
    /// Negative log-likelihood with untouched f16 KV, where compared.
    pub reference_nll: Option<f64>,
    /// Kullback-Leibler divergence from f16 KV to this treatment in nats, where compared.
    pub kld: Option<f64>,
    /// Whether the most likely token is that of f16 KV, where compared.
    pub same_top: Option<bool>,
}

/// What scoring left behind.
#[derive(Clone, Copy, Debug, Default)]
pub struct ScoreSummary {
    /// Tokens dropped, over all windows (token-layers / layers).
    pub dropped_tokens: f64,
    /// Bytes of pages held at the end of the first window (the longest) / its tokens: what a token of
    /// context costs, with what stays f16 and without what was dropped.
    pub held_bytes_per_token: f64,
}

/// Hears each score; the number is the treatment's.
pub type ScoreSink<'a> = dyn FnMut(usize, TokenScore) + 'a;

/// Scores `ids` window by window under one treatment and hands every score to `sink`. See
/// [`score_together`].
///
/// # Errors
/// A token outside the vocabulary. The pool is sized so that memory never runs short.
pub fn score(
    runner: &mut ModelRunner,
    ids: &[u32],
    options: &ScoreOptions,
    sink: &mut dyn FnMut(TokenScore),
) -> Result<ScoreSummary, EngineError> {
    let scoring = Scoring {
        context: options.context,
        block_size: options.block_size,
        treatments: std::slice::from_ref(&options.rules),
        pinned_layers: &[],
        compare: options.compare,
    };
    let summaries = score_together(runner, ids, &scoring, &mut |_, scored| sink(scored))?;
    Ok(summaries.into_iter().next().unwrap_or_default())
}

/// Scores `ids` window by window under every treatment, all of them in one batch, so that weights are
/// read once and f16 KV is computed once. Each treatment's scores come in the order of the text.
///
/// Tokens are computed a block at a time, so that a row attends sealed blocks in their final format and
/// its own block in f16, exactly as in decode; what is dropped is decided before each block. A row's
/// bits do not depend on the batch, so a treatment's scores do not depend on its neighbours.
///
/// # Errors
/// A token outside the vocabulary, a pinned layer that the model does not have, logits that are not
/// finite. The pool is sized so that memory never runs short.
pub fn score_together(
    runner: &mut ModelRunner,
    ids: &[u32],
    scoring: &Scoring<'_>,
    sink: &mut ScoreSink<'_>,
) -> Result<Vec<ScoreSummary>, EngineError> {
    runner.check_tokens(ids)?; // a target is looked up a block before it is computed
    let mut summaries = vec![ScoreSummary::default(); scoring.treatments.len()];
    for (window, tokens) in ids.chunks(scoring.context).enumerate() {
        let pool = scoring.pool(runner, tokens.len())?;
        let plain = Rules::default();
        let mut lanes = scoring.lanes(runner, &pool, &plain, tokens.len());
        let mut batch = Batch { scoring, start: window * scoring.context, rows: Rows::default() };
        for (block, chunk) in tokens.chunks(scoring.block_size).enumerate() {
            let repeated = chunk.repeat(lanes.len());
            Session::advance_all(runner, &mut lanes, &repeated)?;
            let first = block * scoring.block_size;
            let targets = &tokens[first + 1..tokens.len().min(first + chunk.len() + 1)];
            batch.score(runner, first, chunk.len(), targets, sink)?;
        }
        let treated = &lanes[usize::from(scoring.compare)..];
        for (summary, lane) in summaries.iter_mut().zip(treated) {
            let usage = lane.sequence().usage();
            summary.dropped_tokens += usage.dropped_tokens;
            if window == 0 {
                summary.held_bytes_per_token = usage.held_bytes as f64 / tokens.len() as f64;
            }
        }
    }
    Ok(summaries)
}

impl Scoring<'_> {
    /// A pool for all sequences of a window of `tokens` tokens.
    fn pool(&self, runner: &ModelRunner, tokens: usize) -> Result<BlockPool, EngineError> {
        let kept = |rules: &Rules| {
            let kept = rules.token_budget.map_or(tokens, |most| most.min(tokens));
            kept.next_multiple_of(self.block_size) + 2 * self.block_size
        };
        let mut held: usize = self.treatments.iter().map(kept).sum();
        if self.compare {
            held += tokens.next_multiple_of(self.block_size);
        }
        let config = roomy_config(runner.spec(), self.block_size, held);
        Ok(BlockPool::new(with_pinned(config, runner.spec(), self.pinned_layers)?)?)
    }

    /// Sequences of at most `tokens` tokens: untouched f16 KV first where compared, then each treatment.
    fn lanes<'b>(
        &'b self,
        runner: &ModelRunner,
        pool: &'b BlockPool,
        plain: &'b Rules,
        tokens: usize,
    ) -> Vec<Session<'b>> {
        let config = |request: usize, contract| SequenceConfig {
            request: request as u64,
            contract,
            priority: 0,
            trained_context: runner.spec().trained_context,
            max_tokens: Some(tokens),
        };
        let count = self.treatments.len();
        let reference =
            self.compare.then(|| Session::new(pool, plain, config(count, Fidelity::Exact)));
        let treated = self.treatments.iter().enumerate().map(|(index, rules)| {
            // Only drops need the loosest contract; what is kept must not give way to anything else.
            Session::new(pool, rules, config(index, Fidelity::Evict))
        });
        reference.into_iter().chain(treated).collect()
    }
}

/// The rows of one block, of every sequence of a window.
struct Batch<'a> {
    scoring: &'a Scoring<'a>,
    /// Index in the text of the window's first token.
    start: usize,
    rows: Rows,
}

/// Buffers of a block's rows.
#[derive(Default)]
struct Rows {
    reference: Vec<f32>,
    probabilities: Vec<f32>,
    logits: Vec<f32>,
}

impl Batch<'_> {
    /// Scores the last pass: `rows` tokens per sequence from token `first` of the window on, whose next
    /// tokens are `targets` (one fewer at the window's end).
    fn score(
        &mut self,
        runner: &mut ModelRunner,
        first: usize,
        rows: usize,
        targets: &[u32],
        sink: &mut ScoreSink<'_>,
    ) -> Result<(), EngineError> {
        let Rows { reference, probabilities, logits } = &mut self.rows;
        let compare = usize::from(self.scoring.compare);
        let of_lane = |lane: usize| -> Vec<usize> {
            (lane * rows..lane * rows + targets.len()).collect()
        };
        let width = runner.spec().vocabulary;
        let mut expected: Vec<Option<ReferenceRow>> = targets.iter().map(|_| None).collect();
        if compare == 1 {
            copy_into(reference, runner.logits(&of_lane(0)));
            probabilities.resize(reference.len(), 0.0);
            read_reference(runner, (reference, width), targets, &mut expected, probabilities);
        }
        for treatment in 0..self.scoring.treatments.len() {
            copy_into(logits, runner.logits(&of_lane(compare + treatment)));
            let mut scores = vec![RowScore::default(); targets.len()];
            let pool = &runner.compute().pool;
            for_each_row(pool, targets.len(), (&mut scores, 1), &|row, score| {
                let at = row * width..(row + 1) * width;
                let (logits, target) = (&logits[at.clone()], targets[row]);
                score[0] = match &expected[row] {
                    Some(expected) => {
                        let of_reference = (&reference[at.clone()], &probabilities[at]);
                        expected.compare(of_reference.0, of_reference.1, logits, target)
                    }
                    None => RowScore { nll: nll(logits, target), ..RowScore::default() },
                };
            });
            for (row, (score, expected)) in scores.iter().zip(&expected).enumerate() {
                let index = self.start + first + row + 1;
                if !score.nll.is_finite() {
                    return Err(EngineError::NotFinite { tokens: index });
                }
                sink(treatment, token_score(index, score, expected.as_ref()));
            }
        }
        Ok(())
    }
}

fn copy_into(buffer: &mut Vec<f32>, values: &[f32]) {
    buffer.clear();
    buffer.extend_from_slice(values);
}

/// Reads the rows of f16 KV on all threads.
fn read_reference(
    runner: &ModelRunner,
    (logits, width): (&[f32], usize),
    targets: &[u32],
    rows: &mut [Option<ReferenceRow>],
    probabilities: &mut [f32],
) {
    let pool = &runner.compute().pool;
    let out = (rows, 1);
    for_each_row_pair(pool, targets.len(), out, (probabilities, width), &|row, out, p| {
        out[0] = Some(ReferenceRow::new(&logits[row * width..][..width], targets[row], p));
    });
}

fn token_score(index: usize, score: &RowScore, expected: Option<&ReferenceRow>) -> TokenScore {
    TokenScore {
        index,
        nll: score.nll,
        reference_nll: expected.map(|row| row.nll),
        kld: expected.map(|_| score.kld),
        same_top: expected.map(|_| score.same_top),
    }
}

//! Teacher-forced scoring: the likelihood of a given text, through the pages that generation uses.

use reef_kernels::rows::{for_each_row, for_each_row_pair};
use reef_kv::{BlockPool, Fidelity, SequenceConfig};
use reef_model::runner::ModelRunner;

use crate::eval::divergence::{ReferenceRow, RowScore, nll};
use crate::eval::lanes::{Lanes, endless};
use crate::session::{EngineError, Rules, Session};

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
    /// The treatments.
    pub lanes: Lanes<'a>,
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
        lanes: Lanes {
            block_size: options.block_size,
            treatments: std::slice::from_ref(&options.rules),
            pinned_layers: &[],
        },
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
/// bits do not depend on the batch, so a treatment's scores do not depend on its neighbors.
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
    let mut summaries = vec![ScoreSummary::default(); scoring.lanes.treatments.len()];
    let mut scorer = RowScorer::new(summaries.len(), scoring.compare);
    for (window, tokens) in ids.chunks(scoring.context).enumerate() {
        let pool = scoring.lanes.pool(runner, tokens.len(), usize::from(scoring.compare))?;
        let plain = Rules::default();
        let mut sessions = scoring.sessions(runner, &pool, &plain, tokens.len());
        for (block, chunk) in tokens.chunks(scoring.lanes.block_size).enumerate() {
            let repeated = chunk.repeat(sessions.len());
            Session::advance_all(runner, &mut sessions, &repeated)?;
            let first = block * scoring.lanes.block_size;
            let targets = &tokens[first + 1..tokens.len().min(first + chunk.len() + 1)];
            let first_target = window * scoring.context + first + 1;
            scorer.score(runner, chunk.len(), targets, first_target, sink)?;
        }
        let treated = &sessions[usize::from(scoring.compare)..];
        for (summary, session) in summaries.iter_mut().zip(treated) {
            let usage = session.sequence().usage();
            summary.dropped_tokens += usage.dropped_tokens;
            if window == 0 {
                summary.held_bytes_per_token = usage.held_bytes as f64 / tokens.len() as f64;
            }
        }
    }
    Ok(summaries)
}

impl Scoring<'_> {
    /// Sequences of at most `tokens` tokens: untouched f16 KV first where compared, then each treatment.
    fn sessions<'b>(
        &'b self,
        runner: &ModelRunner,
        pool: &'b BlockPool,
        plain: &'b Rules,
        tokens: usize,
    ) -> Vec<Session<'b>> {
        let config = endless(runner, self.lanes.treatments.len(), tokens);
        let exact = SequenceConfig { contract: Fidelity::Exact, ..config };
        let reference = self.compare.then(|| Session::new(pool, plain, exact));
        reference.into_iter().chain(self.lanes.sessions(runner, pool, tokens)).collect()
    }
}

/// Scores the rows of a block for several sequences of a batch, and keeps the buffers for it.
#[derive(Default)]
pub(crate) struct RowScorer {
    /// Treatments; their sequences follow that of f16 KV in the batch.
    pub treatments: usize,
    /// Whether the batch begins with a sequence of f16 KV, to be compared with.
    pub compare: bool,
    reference: Vec<f32>,
    probabilities: Vec<f32>,
    logits: Vec<f32>,
}

impl RowScorer {
    pub fn new(treatments: usize, compare: bool) -> RowScorer {
        RowScorer { treatments, compare, ..RowScorer::default() }
    }

    /// Scores the last pass: `rows` tokens per sequence, whose next tokens are `targets` (one fewer at
    /// a window's end), the first of them token `first_target` of the text.
    pub fn score(
        &mut self,
        runner: &mut ModelRunner,
        rows: usize,
        targets: &[u32],
        first_target: usize,
        sink: &mut ScoreSink<'_>,
    ) -> Result<(), EngineError> {
        let RowScorer { treatments, compare, reference, probabilities, logits } = self;
        let compare = usize::from(*compare);
        let of_lane =
            |lane: usize| -> Vec<usize> { (lane * rows..lane * rows + targets.len()).collect() };
        let width = runner.spec().vocabulary;
        let mut expected: Vec<Option<ReferenceRow>> = targets.iter().map(|_| None).collect();
        if targets.is_empty() {
            return Ok(());
        }
        if compare == 1 {
            copy_into(reference, runner.logits(&of_lane(0)));
            probabilities.resize(reference.len(), 0.0);
            read_reference(runner, (reference, width), targets, &mut expected, probabilities);
        }
        for treatment in 0..*treatments {
            copy_into(logits, runner.logits(&of_lane(compare + treatment)));
            let mut scores = vec![RowScore::default(); targets.len()];
            let pool = &runner.compute().pool;
            for_each_row(pool, targets.len(), (&mut scores, 1), &|row, score| {
                let at = row * width..(row + 1) * width;
                let (logits, target) = (&logits[at.clone()], targets[row]);
                score[0] = match &expected[row] {
                    Some(row) => {
                        row.compare(&reference[at.clone()], &probabilities[at], logits, target)
                    }
                    None => RowScore { nll: nll(logits, target), ..RowScore::default() },
                };
            });
            for (row, (score, expected)) in scores.iter().zip(&expected).enumerate() {
                let index = first_target + row;
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

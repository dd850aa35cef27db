//! `reef eval recall`: whether a value told earlier is still found after compression.

use std::ops::Range;
use std::path::PathBuf;

use anyhow::bail;
use reef_engine::eval::recall::{Answer, DIFFICULTIES, Difficulty, Language, Task, ask};
use reef_engine::eval::statistics::{Interval, wilson};
use reef_engine::eval::{Lanes, Treatment};
use reef_engine::profile;
use reef_engine::session::Rules;
use reef_kv::page::PageFormat;
use reef_model::gguf::Gguf;
use reef_model::runner::ModelRunner;
use reef_model::tokenizer::{Decode, Encode, Tokenizer};
use serde_json::{Value, json};

use crate::Common;
use crate::eval::table::markdown;
use crate::eval::text::encode_files;
use crate::eval::treatment::{TreatmentArgs, check_budget};
use crate::load::{ModelArgs, open, parse_kv_format};
use crate::output::{WrongArguments, print_json, print_line};
use crate::progress::Progress;

/// Whether values told earlier are still found after compression (key-value induction)
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    common: Common,
    #[command(flatten)]
    model: ModelArgs,
    /// Text that lies between the pairs [default: a built-in one]
    #[arg(long, value_name = "FILE")]
    text: Vec<PathBuf>,
    /// Tokens of a context
    #[arg(long, value_name = "N", default_value_t = 1024)]
    tokens: usize,
    /// Contexts to ask; every pair of each is one question
    #[arg(long, value_name = "N", default_value_t = 24)]
    contexts: usize,
    /// Formats of every sealed block [default: all; f16 with --policy]
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = parse_kv_format)]
    kv_format: Vec<PageFormat>,
    #[command(flatten)]
    treatment: TreatmentArgs,
    /// Share that the full cache must find, by which the difficulty is chosen
    #[arg(long, value_name = "SHARE", default_value_t = 0.9)]
    full_share: f64,
}

/// More would take days, and tell nothing more.
const MOST_CONTEXTS: usize = 65_536;

/// Runs `reef eval recall`.
pub fn run(args: Args) -> anyhow::Result<()> {
    let gguf = open(&args.model.path()?)?;
    let language = language(&gguf, &args.text)?;
    let mut runner = args.model.measuring_runner(&gguf, args.common.threads())?;
    let block_size = args.model.block_size;
    args.treatment.check(block_size, &runner)?;
    if !(0.0..=1.0).contains(&args.full_share) {
        bail!(WrongArguments(format!("--full-share is {}: want 0 to 1", args.full_share)));
    }
    if !(1..=MOST_CONTEXTS).contains(&args.contexts) {
        let contexts = args.contexts;
        bail!(WrongArguments(format!("--contexts is {contexts}: want 1 to {MOST_CONTEXTS}")));
    }
    let trained = runner.spec().trained_context;
    if args.tokens > trained {
        bail!(WrongArguments(format!("--tokens is {}: this model takes {trained}", args.tokens)));
    }
    if let Some(budget) = args.treatment.budget {
        check_budget(budget, block_size)?;
    }
    let setting = Setting {
        language: &language,
        block_size,
        pinned_layers: &args.treatment.pin_layers,
        tokens: args.tokens,
        seed: args.treatment.seed,
    };
    let calibrated = calibrate(&mut runner, &setting, args.full_share, args.contexts)?;
    let treatments = treatments(&args);
    let task = setting.task(calibrated.difficulty, 0..args.contexts);
    let mut progress = Progress::new(task.contexts.len() * task.difficulty.pairs, "questions");
    let results =
        measure(&mut runner, &setting, &task, &treatments, &mut |done| progress.set(done))?;
    progress.end();
    if args.common.json {
        return print_json(&document(&args, &calibrated, &results));
    }
    for (Difficulty { pairs, key_words, repeats }, found) in &calibrated.tried {
        print_line(&format!(
            "calibration: {pairs} pairs told {repeats} times, keys of {key_words} words: the full cache \
             finds {:.1} % ({:.1} to {:.1})",
            found.mean * 100.0,
            found.low * 100.0,
            found.high * 100.0
        ))?;
    }
    print_line("")?;
    print_line(&text(&results))
}

/// What all treatments share.
pub struct Setting<'a> {
    /// Words and what goes around them.
    pub language: &'a Language,
    /// Tokens of a block.
    pub block_size: usize,
    /// Layers that stay f16.
    pub pinned_layers: &'a [usize],
    /// Tokens of a context.
    pub tokens: usize,
    /// Seed of the words.
    pub seed: u64,
}

/// Calibration has other contexts than the measurement: a difficulty is not judged by the luck by which
/// it was chosen.
const CALIBRATION_SEED: u64 = 1 << 32;

impl Setting<'_> {
    /// Contexts of these numbers to be measured.
    pub fn task(&self, difficulty: Difficulty, contexts: Range<usize>) -> Task {
        Task { context_tokens: self.tokens, difficulty, contexts, seed: self.seed }
    }
}

/// What calibration settled on.
#[derive(Clone, Debug)]
pub struct Calibrated {
    /// The hardest difficulty at which the full cache finds enough.
    pub difficulty: Difficulty,
    /// What the full cache found at each difficulty tried, the chosen one last.
    pub tried: Vec<(Difficulty, Interval)>,
}

/// Contexts computed at once while a difficulty is tried.
const CALIBRATION_STEP: usize = 4;

/// Goes from hard to easy until the full cache finds `share` of the values in `contexts` contexts; a
/// difficulty is given up as soon as its interval lies below.
pub fn calibrate(
    runner: &mut ModelRunner,
    setting: &Setting<'_>,
    share: f64,
    contexts: usize,
) -> anyhow::Result<Calibrated> {
    let mut tried = Vec::new();
    for difficulty in DIFFICULTIES {
        let (mut answers, mut found) = (Vec::new(), wilson(0, 0));
        for first in (0..contexts).step_by(CALIBRATION_STEP) {
            let numbers = first..contexts.min(first + CALIBRATION_STEP);
            let mut task = setting.task(difficulty, numbers);
            task.seed ^= CALIBRATION_SEED;
            let mut asked = measure(runner, setting, &task, &[Treatment::default()], &mut |_| {})?;
            answers.append(&mut asked[0].answers);
            found = share_right(answers.iter());
            if found.high < share {
                break;
            }
        }
        tried.push((difficulty, found));
        if found.mean >= share {
            return Ok(Calibrated { difficulty, tried });
        }
    }
    let best = tried.iter().map(|(_, found)| found.mean).fold(0.0, f64::max);
    bail!(
        "the model finds at most {:.1} % of the values even in the easiest contexts: it is too small for \
         this task at {} tokens; lower --tokens or --full-share",
        best * 100.0,
        setting.tokens
    )
}

/// One treatment's answers.
pub struct Asked {
    /// The treatment.
    pub treatment: Treatment,
    /// Its answers, the same questions in the same order for all.
    pub answers: Vec<Answer>,
}

/// Asks every question under every treatment; `progress` hears how many were asked.
pub fn measure(
    runner: &mut ModelRunner,
    setting: &Setting<'_>,
    task: &Task,
    treatments: &[Treatment],
    progress: &mut dyn FnMut(usize),
) -> anyhow::Result<Vec<Asked>> {
    let rules: Vec<Rules> = treatments.iter().map(Treatment::rules).collect::<Result<_, _>>()?;
    let lanes = Lanes {
        block_size: setting.block_size,
        treatments: &rules,
        pinned_layers: setting.pinned_layers,
    };
    let total = task.contexts.len() * task.difficulty.pairs;
    let mut answers = vec![Vec::with_capacity(total); treatments.len()];
    ask(runner, setting.language, task, &lanes, &mut |treatment, answer| {
        answers[treatment].push(answer);
        progress(answers[treatment].len());
    })?;
    let results = treatments.iter().cloned().zip(answers);
    Ok(results.map(|(treatment, answers)| Asked { treatment, answers }).collect())
}

/// Words and punctuation of the model's tokenizer; filler from `texts`, or the profile's without one.
pub fn language(gguf: &Gguf, texts: &[PathBuf]) -> anyhow::Result<Language> {
    let tokenizer = Tokenizer::from_gguf(gguf)?;
    let encode = |text: &str, add_special: bool| {
        tokenizer.encode(text, Encode { add_special, parse_special: false })
    };
    Ok(Language {
        start: encode("", true)?,
        words: words(&tokenizer)?,
        before_key: encode("\nThe", false)?,
        between: encode(" is", false)?,
        after_value: encode(".", false)?,
        filler: match texts {
            [] => encode(profile::TEXT, false)?,
            texts => encode_files(&tokenizer, texts)?,
        },
    })
}

/// Letters of a word: long enough to be one, short enough to be common.
const WORD_LETTERS: std::ops::RangeInclusive<usize> = 4..=8;
/// Words taken: those of the smallest ids, which tokenizers learn first because they are common.
const WORDS: usize = 3000;

/// Tokens that are a space and a lower-case word.
fn words(tokenizer: &Tokenizer) -> anyhow::Result<Vec<u32>> {
    let mut words = Vec::new();
    for id in 0..tokenizer.vocabulary().len() as u32 {
        let text = tokenizer.decode(&[id], Decode { continues: true, ..Decode::default() });
        let Some(word) = text.strip_prefix(' ') else { continue };
        let is_word = word.bytes().all(|byte| byte.is_ascii_lowercase());
        if is_word && WORD_LETTERS.contains(&word.len()) {
            words.push(id);
            if words.len() == WORDS {
                break;
            }
        }
    }
    Ok(words)
}

fn treatments(args: &Args) -> Vec<Treatment> {
    let dropping = args.treatment.policy.is_some();
    let mut formats = match args.kv_format.is_empty() {
        false => args.kv_format.clone(),
        true if dropping => vec![PageFormat::F16],
        true => PageFormat::ALL.to_vec(),
    };
    formats.dedup();
    let full = Treatment::default();
    let asked = formats.into_iter().map(|format| args.treatment.treatment(format));
    [full.clone()].into_iter().chain(asked.filter(|treatment| *treatment != full)).collect()
}

/// The share of right answers.
pub fn share_right<'a>(answers: impl Iterator<Item = &'a Answer>) -> Interval {
    let (mut right, mut all) = (0, 0);
    for answer in answers {
        right += usize::from(answer.right);
        all += 1;
    }
    wilson(right, all)
}

fn share_json(share: Interval, questions: usize) -> Value {
    json!({"share": share.mean, "low": share.low, "high": share.high, "questions": questions})
}

/// Recall by how far back the value lies: within the budget (or the nearer half), and beyond it.
fn by_distance(asked: &Asked, tokens: usize) -> (usize, [Vec<&Answer>; 2]) {
    let border = asked.treatment.eviction.as_ref().map_or(tokens / 2, |e| e.budget_tokens);
    let (near, far) = asked.answers.iter().partition(|answer| answer.distance < border);
    (border, [near, far])
}

fn document(args: &Args, calibrated: &Calibrated, results: &[Asked]) -> Value {
    let tried = |(Difficulty { pairs, key_words, repeats }, found): &(Difficulty, Interval)| {
        json!({
            "pairs": pairs,
            "key_words": key_words,
            "repeats": repeats,
            "full_share": {"share": found.mean, "low": found.low, "high": found.high},
        })
    };
    let row = |asked: &Asked| {
        let eviction = asked.treatment.eviction.as_ref();
        let (border, parts) = by_distance(asked, args.tokens);
        let [near, far] =
            parts.map(|part| share_json(share_right(part.iter().copied()), part.len()));
        json!({
            "kv_format": asked.treatment.format.name(),
            "policy": eviction.map(|eviction| &eviction.policy),
            "budget": eviction.map(|eviction| eviction.budget_tokens),
            "recall": share_json(share_right(asked.answers.iter()), asked.answers.len()),
            "border_tokens": border,
            "nearer": near,
            "farther": far,
        })
    };
    json!({
        "tokens": args.tokens,
        "full_share_wanted": args.full_share,
        "calibration": calibrated.tried.iter().map(tried).collect::<Vec<_>>(),
        "rows": results.iter().map(row).collect::<Vec<_>>(),
    })
}

fn text(results: &[Asked]) -> String {
    let percent = |share: Interval| match share {
        Interval { low: 0.0, high: 1.0, .. } => "none asked".to_string(),
        Interval { mean, low, high } => {
            format!("{:.1} % ({:.1} to {:.1})", mean * 100.0, low * 100.0, high * 100.0)
        }
    };
    let tokens = |asked: &Asked| asked.answers.iter().map(|a| a.distance).max().unwrap_or(0);
    let row = |asked: &Asked| {
        let (border, [near, far]) = by_distance(asked, tokens(asked));
        vec![
            asked.treatment.label(),
            percent(share_right(asked.answers.iter())),
            border.to_string(),
            percent(share_right(near.into_iter())),
            percent(share_right(far.into_iter())),
        ]
    };
    let header = ["KV", "recall", "border", "told within it", "told before it"];
    markdown(&header, &results.iter().map(row).collect::<Vec<_>>())
}

//! `reef eval ladder`: blocks that become smaller in the middle of a text, against f16 and against
//! having been small from the start.

use anyhow::{bail, ensure};
use reef_engine::eval::comparison::{Comparison, Difference};
use reef_engine::eval::descent::{Descent, Identity, Path};
use reef_kv::page::PageFormat;
use serde_json::{Value, json};

use crate::Common;
use crate::eval::table::{interval_json, interval_text, markdown};
use crate::eval::text::TextArgs;
use crate::eval::treatment::{check_layers, context};
use crate::load::{ModelArgs, open, parse_kv_format};
use crate::output::{WrongArguments, print_json, print_line};
use crate::progress::Progress;

/// Blocks that become smaller in the middle of a text, against f16 and against small from the start
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    common: Common,
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    text: TextArgs,
    /// Tokens of a window; windows do not overlap
    #[arg(long, value_name = "N", default_value_t = 2048)]
    context: usize,
    /// Tokens of a window computed with f16 KV before blocks become smaller [default: half]
    #[arg(long, value_name = "N")]
    switch: Option<usize>,
    /// Formats on the way down
    #[arg(
        long,
        value_name = "LIST",
        value_delimiter = ',',
        value_parser = parse_kv_format,
        default_value = "int8,k8v4,int4"
    )]
    rungs: Vec<PageFormat>,
    /// Layers that stay f16, such as 0,1,29
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pin_layers: Vec<usize>,
}

/// Runs `reef eval ladder`.
pub fn run(args: Args) -> anyhow::Result<()> {
    check(&args)?;
    let gguf = open(&args.model.path()?)?;
    let ids = args.text.ids(&gguf)?;
    let mut runner = args.model.measuring_runner(&gguf, args.common.threads())?;
    check_layers(&args.pin_layers, runner.spec().layers)?;
    let descent = Descent {
        context: context(Some(args.context), runner.spec().trained_context, false)?,
        switch: args.switch.unwrap_or(args.context / 2),
        rungs: &args.rungs,
        block_size: args.model.block_size,
        pinned_layers: &args.pin_layers,
    };
    ensure!(
        descent.stage(0) + args.model.block_size < args.context,
        "--switch is {}: leave at least two blocks of --context {} after it",
        descent.switch,
        args.context
    );
    let paths = descent.paths();
    let mut scores: Vec<Scores> = paths.iter().map(|path| Scores::new(*path, &descent)).collect();
    let mut progress = Progress::new(ids.len(), "tokens");
    let identity = descent.score(&mut runner, &ids, &mut |path, scored| {
        scores[path].add(&scored, args.context);
        progress.set(scored.index + 1);
    })?;
    progress.end();
    let document = document(&descent, &scores, identity);
    match args.common.json {
        true => print_json(&document)?,
        false => print_line(&text(&descent, &scores, identity))?,
    }
    ensure!(
        identity.different == 0,
        "{} of {} pages differ between the ladder and the direct way: re-encoding is not exact",
        identity.different,
        identity.pages
    );
    Ok(())
}

fn check(args: &Args) -> anyhow::Result<()> {
    let switch = args.switch.unwrap_or(0);
    if switch >= args.context {
        bail!(WrongArguments(format!(
            "--switch is {switch}: want less than --context {}",
            args.context
        )));
    }
    let from_f16 = [PageFormat::F16].into_iter().chain(args.rungs.iter().copied());
    for (from, to) in from_f16.zip(&args.rungs) {
        if !from.can_become(*to) {
            bail!(WrongArguments(format!(
                "--rungs: {} cannot become {}; name them from large to small",
                from.name(),
                to.name()
            )));
        }
    }
    Ok(())
}

/// Scores of one way down, after the switch and in its last stage.
struct Scores {
    path: Path,
    /// Tokens of a window where each stage begins, and where the window ends.
    stages: Vec<usize>,
    /// All scored tokens at or after the switch.
    after: Comparison,
    /// The same by stage.
    by_stage: Vec<Comparison>,
    /// Tokens before the switch.
    before: Comparison,
}

impl Scores {
    fn new(path: Path, descent: &Descent<'_>) -> Scores {
        let stages: Vec<usize> =
            (0..descent.rungs.len()).map(|index| descent.stage(index)).collect();
        Scores {
            path,
            by_stage: vec![Comparison::default(); stages.len()],
            stages,
            after: Comparison::default(),
            before: Comparison::default(),
        }
    }

    fn add(&mut self, scored: &reef_engine::score::TokenScore, context: usize) {
        // A token is predicted from what is held when the one before it is computed.
        let seen = scored.index % context;
        match self.stages.iter().rposition(|begin| seen > *begin) {
            None => self.before.add(scored),
            Some(stage) => {
                self.after.add(scored);
                self.by_stage[stage].add(scored);
            }
        }
    }

    fn name(&self) -> String {
        match self.path {
            Path::Start(format) => format!("{} from the start", format.name()),
            Path::Switch(format) => format!("f16, then {}", format.name()),
            Path::Walk => "f16, then down all rungs at once".into(),
            Path::Staged => "f16, then one rung after another".into(),
        }
    }
}

/// How much worse each late way is than having begun in its last format, on the tokens after the switch.
fn against_start(scores: &[Scores], late: &Scores) -> Option<Difference> {
    let format = match late.path {
        Path::Start(_) => return None,
        Path::Switch(format) => format,
        Path::Walk | Path::Staged => scores.iter().rev().find_map(|s| match s.path {
            Path::Switch(format) => Some(format),
            _ => None,
        })?,
    };
    let start = scores.iter().find(|s| s.path == Path::Start(format))?;
    Difference::of(&late.after.nll, &start.after.nll)
}

fn document(descent: &Descent<'_>, scores: &[Scores], identity: Identity) -> Value {
    let row = |of: &Scores| {
        let stage = |(index, comparison): (usize, &Comparison)| {
            json!({
                "from_token": of.stages[index],
                "nll": comparison.mean_nll(),
                "nll_minus_f16": interval_json(comparison.nll_difference()),
            })
        };
        json!({
            "path": of.name(),
            "nll_before": of.before.mean_nll(),
            "nll_after": of.after.mean_nll(),
            "nll_after_minus_f16": interval_json(of.after.nll_difference()),
            "nll_after_minus_from_start": interval_json(against_start(scores, of)),
            "kld_after": interval_json(of.after.mean_kld()),
            "stages": of.by_stage.iter().enumerate().map(stage).collect::<Vec<_>>(),
        })
    };
    json!({
        "context": descent.context,
        "switch": descent.stage(0),
        "rungs": descent.rungs.iter().map(|format| format.name()).collect::<Vec<_>>(),
        "tokens_after": scores.first().map_or(0, |of| of.after.tokens()),
        "rows": scores.iter().map(row).collect::<Vec<_>>(),
        "identical": {"pages": identity.pages, "different": identity.different},
    })
}

fn text(descent: &Descent<'_>, scores: &[Scores], identity: Identity) -> String {
    let header =
        ["KV", "NLL after", "less that of f16", "less that of small from the start", "KLD"];
    let row = |of: &Scores| {
        vec![
            of.name(),
            format!("{:.5}", of.after.mean_nll()),
            interval_text(of.after.nll_difference(), 5),
            interval_text(against_start(scores, of), 5),
            format!("{:.1e}", of.after.mean_kld().map_or(0.0, |kld| kld.mean)),
        ]
    };
    let rows: Vec<_> = scores.iter().map(row).collect();
    format!(
        "windows of {}, f16 up to token {}; {} tokens after it\n\n{}\n\n{} of {} pages that went down all \
         rungs have the bytes of those that went down at once",
        descent.context,
        descent.stage(0),
        scores.first().map_or(0, |of| of.after.tokens()),
        markdown(&header, &rows),
        identity.pages - identity.different,
        identity.pages,
    )
}

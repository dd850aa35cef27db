//! Why a line of the log is not as planned: one changed assumption that closes the gap, else what is known to
//! move that line.

use super::Reading;
use super::compare::{Agreement, Line, meets};
use super::facts::{Quantity, Word};
use crate::dtype::KvDtype;
use crate::engines::setup::{Draft, DraftKind, Setup};
use crate::engines::version::{LATEST, Version};
use crate::engines::weights::WeightFormat;
use crate::engines::{Engine, GIB, Plan};
use crate::figure::Figure;
use crate::model::{Cache, Model};

/// Most assumptions named for one line.
const NAMED: usize = 3;
/// How near weights of another format must come to be named.
const WEIGHTS_NEAR: f64 = 0.03;

/// All that a reason may draw on.
pub struct Case<'a> {
    /// The engine.
    pub engine: &'a dyn Engine,
    /// The model.
    pub model: &'a Model,
    /// What the log says.
    pub reading: &'a Reading,
    /// The start by its flags.
    pub setup: &'a Setup,
    /// The same with what the log measured.
    pub filled: &'a Setup,
    /// The plan of `setup`.
    pub before: &'a Plan,
}

/// The likely reason of a difference; `lines` are all lines of the comparison.
pub fn reason(case: &Case, line: &Line, lines: &[Line]) -> Option<String> {
    let text = match line.name {
        "weights" => weights(case, line),
        "activation peak" => activation(case, line),
        "outside the tensor library" => other(case, line),
        "CUDA graphs" => graphs(case),
        "left for KV" => pool(case, line, lines),
        "engine may use" => {
            "the log's device has another memory, or another share was given".into()
        }
        _ => arithmetic(case, line),
    };
    (!text.is_empty()).then_some(text)
}

fn weights(case: &Case, line: &Line) -> String {
    if line.plan.is_none() {
        return "the config lacks what is needed to count parameters".into();
    }
    if line.agreement != Agreement::Differs {
        return "checkpoints of one format differ in what they leave unquantized".into();
    }
    if case.engine.name() == "llamacpp" && line.difference.is_some_and(|more| more < 0.0) {
        return "copies repacked for the CPU (CPU_REPACK), or held on several devices, are counted beside \
                the file"
            .into();
    }
    let other = |name| {
        let weights = WeightFormat::parse(name).filter(|format| *format != case.setup.weights)?;
        let plan = case.engine.plan(case.model, &Setup { weights, ..case.setup.clone() }).ok()?;
        let bytes = plan.ledger.weights?.value;
        let away = (bytes / line.log.value - 1.0).abs();
        (away < WEIGHTS_NEAR).then_some((away, weights.name()))
    };
    let mut near: Vec<(f64, &str)> = WeightFormat::known().filter_map(other).collect();
    near.sort_by(|a, b| a.0.total_cmp(&b.0));
    near.dedup_by(|a, b| a.1 == b.1);
    if let Some((_, name)) = near.first() {
        return format!("as planned if the weights are {name}: give --weights {name}");
    }
    let text =
        "another weight format than planned, an encoder or a draft model beside the language model";
    let ranks = " (or other ranks than --tp says)";
    format!("{text}{}", if case.setup.tp == 1 { ranks } else { "" })
}

fn activation(case: &Case, line: &Line) -> String {
    let planned = line.plan.as_ref().map_or(0.0, |figure| figure.value);
    let mut parts = Vec::new();
    if case.model.has_encoder {
        parts.push("the profile of the largest image or video can dominate (Pixtral: 8.27 GiB)");
    }
    if case.setup.first_engine {
        parts.push(
            "V0 profiles a whole sequence of max_model_len without chunked prefill, which it turns on above \
             32,768 tokens (vllm#10517)",
        );
    } else if case.engine.name() == "llamacpp" {
        parts.push("compute buffers grow with n_ubatch and, without flash attention, with n_ctx");
    } else if case.setup.max_num_batched_tokens.is_none() {
        parts.push("max_num_batched_tokens sets it and is not in the log: the default was taken");
    }
    if parts.is_empty() {
        let more = line.log.value > planned;
        parts.push(if more {
            "kernels and workspaces of this version keep more alive"
        } else {
            "fused kernels keep less alive than planned"
        });
    }
    parts.join("; ")
}

fn other(case: &Case, line: &Line) -> String {
    let planned = line.plan.as_ref().map_or(0.0, |figure| figure.value);
    if line.log.value > planned && case.setup.tp * case.setup.pp > 1 {
        return "communication buffers of several ranks (Llama-3-8B on H100: 1.79 GiB alone, 3.58 at tp 2, \
                vllm#10511)"
            .into();
    }
    if line.log.value > planned {
        return "on unified memory, or beside other processes, their memory is counted here".into();
    }
    String::new()
}

fn graphs(case: &Case) -> String {
    let listed = "the batch sizes that are captured decide it (--max-num-seqs, the capture sizes)";
    let subtracted = "; from 0.21 the estimate is taken off the pool, before it came on top";
    match case.engine.name() {
        "vllm" => format!("{listed}{subtracted}"),
        _ => listed.into(),
    }
}

/// The pool is what the other lines leave: their differences, with their signs.
fn pool(case: &Case, line: &Line, lines: &[Line]) -> String {
    if case.engine.name() == "llamacpp" {
        return arithmetic_blind(case, line);
    }
    if line.plan.is_none() {
        return "no memory of the device in the log: give --gpu to plan the pool".into();
    }
    let mut parts = Vec::new();
    let mut explained = 0.0;
    for part in
        lines.iter().filter(|part| part.name != "left for KV" && !part.name.contains("graphs"))
    {
        let sign = if part.name == "engine may use" { 1.0 } else { -1.0 };
        let in_ledger =
            ["engine may use", "weights", "activation peak", "outside the tensor library"];
        if let Some(difference) = part.difference.filter(|_| in_ledger.contains(&part.name)) {
            if difference.abs() >= 0.01 * GIB {
                parts.push(format!("{} {:+.2}", part.name, sign * difference / GIB));
            }
            explained += sign * difference;
        }
    }
    let rest = line.difference.unwrap_or(0.0) - explained;
    if rest.abs() >= 0.01 * GIB {
        let unseen =
            if case.setup.first_engine { "rest" } else { "lines that the log does not print" };
        parts.push(format!("{unseen} {:+.2}", rest / GIB));
    }
    if let Some((low, high)) = case.reading.facts.spread(Quantity::Kv).filter(|(l, h)| l < h) {
        parts.push(format!(
            "ranks differ by {:.2}: the smallest decides for all",
            (high - low) / GIB
        ));
    }
    format!("GiB planned beyond the log: {}", parts.join(", "))
}

/// What follows from the pool that the log prints: the single changes of assumptions that give the log's number.
fn arithmetic(case: &Case, line: &Line) -> String {
    if line.plan.is_none() && case.filled.measured.kv.is_none() {
        return "the log prints no bytes of the pool to count from".into();
    }
    if line.plan.is_none() {
        return "no pool is planned for this model".into();
    }
    let mut closing: Vec<String> = Vec::new();
    for (change, setup) in changes(case) {
        let plan = case.engine.plan(case.model, &setup).ok();
        if plan.is_some_and(|plan| meets(&line.log, of(&plan, line.name).as_ref())) {
            closing.push(change);
        }
    }
    closing.truncate(NAMED);
    if !closing.is_empty() {
        return format!("as in the log if {}", closing.join(", or if "));
    }
    let mut parts = Vec::new();
    if let Some((low, high)) = case.reading.facts.spread(Quantity::Kv).filter(|(l, h)| l < h) {
        parts.push(format!(
            "memory and tokens may be printed by different ranks (pools of {:.2} to {:.2} GiB)",
            low / GIB,
            high / GIB
        ));
    } else if case.setup.tp * case.setup.pp > 1 {
        parts.push(
            "memory and tokens may be printed by different ranks, and the pool is the smallest"
                .into(),
        );
    }
    if case.model.layers.iter().any(|layer| !matches!(layer, Cache::Full { .. } | Cache::Latent(_)))
    {
        parts.push(
            "with window or recurrent layers the number depends on max_model_len, max_num_batched_tokens and \
             draft layers"
                .into(),
        );
    }
    if parts.is_empty() {
        parts.push(
            "no single change of KV format, ranks, version or drafting gives the log's number"
                .into(),
        );
    }
    parts.join("; ")
}

/// The same for a pool that flags alone decide.
fn arithmetic_blind(case: &Case, line: &Line) -> String {
    let closes = |setup: &Setup| {
        let plan = case.engine.plan(case.model, setup).ok();
        plan.is_some_and(|plan| meets(&line.log, plan.ledger.kv.as_ref()))
    };
    let closing: Vec<String> = changes(case)
        .into_iter()
        .filter(|(_, setup)| closes(setup))
        .map(|(change, _)| change)
        .take(NAMED)
        .collect();
    match closing.is_empty() {
        true => {
            "another model, context or KV format than planned, or layers that keep no cache".into()
        }
        false => format!("as in the log if {}", closing.join(", or if ")),
    }
}

/// The planned figure of a line's name.
fn of(plan: &Plan, name: &str) -> Option<Figure> {
    let pool = plan.pool.as_ref();
    match name {
        "KV per token" => plan.kv_bytes_per_token.clone(),
        "KV of one full request" => plan.kv_needed.clone(),
        "tokens of a block" => pool.map(|pool| {
            Figure::derived(pool.block_size as f64, crate::figure::Unit::Tokens, "smallest block")
        }),
        "blocks" => pool.map(|pool| pool.blocks.clone()),
        "tokens as printed" => plan.printed_tokens.clone(),
        "full requests at once" => plan.concurrency.clone(),
        "longest request" => plan.max_len.clone(),
        _ => None,
    }
}

/// Single changes of what was assumed, in words and as a setup.
fn changes(case: &Case) -> Vec<(String, Setup)> {
    let base = case.filled;
    let facts = &case.reading.facts;
    let mut changes: Vec<(String, Setup)> = Vec::new();
    let mut add = |text: &str, setup: Setup| changes.push((text.to_string(), setup));
    if base.version < Version::new(0, 21) {
        add(
            "the version prints int(concurrency * length) (0.21 and later)",
            Setup { version: LATEST, ..base.clone() },
        );
    } else if case.engine.name() == "vllm" {
        let version = Version::new(0, 20);
        add(
            "the version prints the tokens of one group (0.20 and before)",
            Setup { version, ..base.clone() },
        );
    }
    let kv = [
        KvDtype::Bf16,
        KvDtype::Fp8,
        KvDtype::Nvfp4,
        KvDtype::Q8_0,
        KvDtype::Q4_0,
        KvDtype::Fp8DsMla,
    ];
    for dtype in kv.into_iter().filter(|dtype| *dtype != base.kv_keys) {
        let setup = Setup { kv_keys: dtype, kv_values: dtype, ..base.clone() };
        add(&format!("the KV format is {}", dtype.name()), setup);
    }
    for tp in [1, 2, 4, 8, 16].into_iter().filter(|tp| *tp != base.tp) {
        add(&format!("{tp} ranks split each layer"), Setup { tp, ..base.clone() });
    }
    add(
        "window layers are charged as full attention",
        Setup { hybrid_manager: !base.hybrid_manager, ..base.clone() },
    );
    for on in [true, false] {
        let word = if on { "on" } else { "off" };
        let setup = Setup { prefix_caching: Some(on), ..base.clone() };
        add(&format!("prefix caching is {word}"), setup);
    }
    if base.draft.is_none() {
        for (kind, word) in [(DraftKind::NextToken, "MTP"), (DraftKind::Head, "an EAGLE head")] {
            let draft = Some(Draft { kind, layers: None, tokens: 1 });
            add(&format!("{word} drafts"), Setup { draft, ..base.clone() });
        }
    }
    if !facts.has(Quantity::BatchedTokens) {
        for tokens in [2048, 4096, 8192, 16384] {
            let setup = Setup { max_num_batched_tokens: Some(tokens), ..base.clone() };
            add(&format!("max_num_batched_tokens is {tokens}"), setup);
        }
    }
    if let (Some((_, high)), Some(kv)) = (facts.spread(Quantity::Kv), &base.measured.kv) {
        let mut setup = base.clone();
        setup.measured.kv = Some(kv.clone().within(kv.low, high));
        add("it is of a rank with a larger pool", setup);
    }
    if facts.word(Word::KvDtype).is_none() && base.expanded_mla {
        add("the cache is a latent", Setup { expanded_mla: false, ..base.clone() });
    } else {
        add(
            "keys and values of MLA are kept per head",
            Setup { expanded_mla: true, ..base.clone() },
        );
    }
    changes
}

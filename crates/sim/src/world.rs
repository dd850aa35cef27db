//! A world: a model's KV groups, a pool, an engine's settings, who comes when and what goes wrong. All of
//! it follows from a seed.

use reef_engine::event::FinishReason;
use reef_engine::request::{Branches, Request};
use reef_engine::sampler::Sampling;
use reef_kv::page::{PageFormat, PageShape};
use reef_kv::prefix::IndexKind;
use reef_kv::{Fidelity, GroupConfig, HarmTable, Ladder, PoolConfig, Rung, minimum_budget_bytes};

use crate::content::VOCABULARY;
use crate::fault::FaultRates;
use crate::grammar::Turning;
use crate::random::Random;

/// Parts of a world that can be left out to see whether a failure needs them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Part {
    /// Delays, losses, duplicates and late completions.
    Faults,
    /// The spill store.
    Spill,
    /// Faults of the spill store.
    SpillFaults,
    /// The prefix cache.
    Prefix,
    /// Drafts.
    Drafts,
    /// More than one continuation.
    Branches,
    /// Priorities.
    Priorities,
    /// Tenants and their quotas.
    Tenants,
    /// Cancels.
    Cancels,
    /// Deadlines.
    Deadlines,
    /// Lossy contracts.
    Lossy,
    /// Windows.
    Windows,
    /// Sampling: all is greedy.
    Sampling,
}

impl Part {
    /// Every part, with its name on the command line.
    pub const ALL: [(Part, &'static str); 13] = [
        (Part::Faults, "faults"),
        (Part::Spill, "spill"),
        (Part::SpillFaults, "spill-faults"),
        (Part::Prefix, "prefix"),
        (Part::Drafts, "drafts"),
        (Part::Branches, "branches"),
        (Part::Priorities, "priorities"),
        (Part::Tenants, "tenants"),
        (Part::Cancels, "cancels"),
        (Part::Deadlines, "deadlines"),
        (Part::Lossy, "lossy"),
        (Part::Windows, "windows"),
        (Part::Sampling, "sampling"),
    ];

    /// The name on the command line.
    pub fn name(self) -> &'static str {
        Part::ALL.iter().find(|(part, _)| *part == self).map_or("", |(_, name)| name)
    }
}

/// Which world: a seed, and what of it is left out.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Recipe {
    /// Seed of everything.
    pub seed: u64,
    /// Arrivals left, by number; `None`: all.
    pub keep: Option<Vec<usize>>,
    /// Parts left out.
    pub without: Vec<Part>,
}

impl Recipe {
    /// The whole world of a seed.
    pub fn of_seed(seed: u64) -> Recipe {
        Recipe { seed, ..Recipe::default() }
    }

    fn has(&self, part: Part) -> bool {
        !self.without.contains(&part)
    }
}

impl std::fmt::Display for Recipe {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "--seed {}", self.seed)?;
        if let Some(keep) = &self.keep {
            let numbers: Vec<String> = keep.iter().map(usize::to_string).collect();
            write!(formatter, " --keep {}", numbers.join(","))?;
        }
        if !self.without.is_empty() {
            let names: Vec<&str> = self.without.iter().map(|part| part.name()).collect();
            write!(formatter, " --without {}", names.join(","))?;
        }
        Ok(())
    }
}

/// Somebody who shares a pool with others.
#[derive(Clone, Debug, PartialEq)]
pub struct TenantPlan {
    /// Share of compute.
    pub weight: f64,
    /// Most bytes of KV, in percent of the budget.
    pub quota_percent: Option<usize>,
    /// Salt of its prefixes.
    pub salt: Vec<u8>,
}

/// The spill store of a world.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpillPlan {
    /// Its size in percent of the pool's.
    pub capacity_percent: usize,
    /// Percent of its operations that fail.
    pub fail: u64,
}

/// The engine's settings.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    /// Most sequences running.
    pub max_running: usize,
    /// Most requests waiting.
    pub max_waiting: usize,
    /// Admits by what is used now rather than by what may be needed.
    pub utilize: bool,
    /// Most prompt tokens of one sequence in a step.
    pub chunk_tokens: usize,
    /// What a mixed step may take.
    pub step_limit_us: u64,
    /// Share of the pool for requests of negative priority.
    pub batch_share: f64,
    /// Target for the time of a step.
    pub latency_target_us: Option<u64>,
    /// Policy of drops, by name.
    pub policy: &'static str,
    /// Tail that the policy protects, in tokens.
    pub tail_tokens: usize,
    /// What the spill store is taken to move at first.
    pub spill_bytes_per_second: f64,
}

/// A request that comes.
#[derive(Clone, Debug)]
pub struct Arrival {
    /// When.
    pub at_us: u64,
    /// Its key; an earlier arrival may have had it.
    pub key: u64,
    /// What is asked.
    pub request: Request,
    /// When and how its caller ends it.
    pub end: Option<(u64, FinishReason)>,
}

/// All of a world.
#[derive(Clone, Debug)]
pub struct World {
    /// Its seed.
    pub seed: u64,
    /// The pool.
    pub pool: PoolConfig,
    /// Context the model was trained on.
    pub trained_context: usize,
    /// The engine's settings.
    pub settings: Settings,
    /// At least one.
    pub tenants: Vec<TenantPlan>,
    /// The index of prefixes, if any.
    pub prefix: Option<IndexKind>,
    /// Drafts from the prompt.
    pub drafts: bool,
    /// A slower tier, if any.
    pub spill: Option<SpillPlan>,
    /// What goes wrong in the executor.
    pub faults: FaultRates,
    /// In order of time.
    pub arrivals: Vec<Arrival>,
}

impl World {
    /// The world of a recipe. What is left out changes nothing else, as far as that can be.
    pub fn new(recipe: &Recipe) -> World {
        let seed = recipe.seed;
        let mut random = Random::new(seed, "world");
        let groups = groups(&mut random, recipe.has(Part::Windows));
        let trained_context = if random.percent(35) { random.size(150, 280) } else { 4000 };
        let long = random.percent(45);
        let settings = settings(&mut random, recipe.has(Part::Lossy), long);
        let tenants = tenants(&mut random, recipe.has(Part::Tenants), long);
        let prefix = random.pick(&[None, Some(IndexKind::Chain), Some(IndexKind::Radix)]);
        let prefix = prefix.or(random.percent(50).then_some(IndexKind::Radix));
        let drafts = random.percent(60) && recipe.has(Part::Drafts);
        let fail = if random.percent(60) { random.between(5, 30) } else { 0 };
        let fail = if recipe.has(Part::SpillFaults) { fail } else { 0 };
        let capacity_percent = random.pick(&[30, 100, 400]);
        let spill = (random.percent(85) && recipe.has(Part::Spill))
            .then_some(SpillPlan { capacity_percent, fail });
        let faults = faults(&mut random, recipe.has(Part::Faults));
        let pool = pool(&mut random, groups, long);
        let mut arrivals =
            Crowd::new(recipe, &pool, trained_context, tenants.len(), long).arrivals();
        if let Some(keep) = &recipe.keep {
            let mut number = 0..;
            arrivals.retain(|_| number.next().is_some_and(|number| keep.contains(&number)));
        }
        World {
            seed,
            pool,
            trained_context,
            settings,
            tenants,
            prefix: prefix.filter(|_| recipe.has(Part::Prefix)),
            drafts,
            spill,
            faults,
            arrivals,
        }
    }
}

/// Kinds of models: full attention, two shapes, windows beside full attention, windows alone.
fn groups(random: &mut Random, windows: bool) -> Vec<GroupConfig> {
    let block_size = random.pick(&[16, 16, 16, 32]);
    let window = Some(random.size(10, 120)).filter(|_| windows);
    let mut group = |layers: usize, window: Option<usize>| {
        let (kv_heads, head_dim) = random.pick(&[(1, 32), (1, 32), (2, 16), (1, 48), (2, 32)]);
        let pinned = if random.percent(10) { vec![0] } else { vec![] };
        let shape = PageShape { kv_heads, head_dim, block_size };
        GroupConfig { layers, shape, window, pinned }
    };
    let groups = [group(1, None), group(2, None), group(2, window), group(1, window)];
    match (random.between(0, 9), groups) {
        (0..=2, [_, two, ..]) => vec![two],
        (3..=4, [one, two, ..]) => vec![one, two],
        (5..=8, [one, _, windows, _]) => vec![one, windows],
        (_, [.., windows, other]) => vec![windows, other],
    }
}

fn settings(random: &mut Random, lossy: bool, long: bool) -> Settings {
    let policy = random.pick(&["sinks", "sinks", "window", "h2o", "tova", "keydiff", "random"]);
    let latency_target_us = random.percent(20).then(|| random.between(1200, 3000));
    Settings {
        max_running: random.size(2, 12),
        max_waiting: random.pick(&[3, 8, 64]),
        utilize: random.percent(65) || long,
        chunk_tokens: random.pick(&[8, 32, 100, 256]),
        step_limit_us: random.pick(&[2_000, 10_000, 100_000]),
        batch_share: random.pick(&[1.0, 1.0, 0.5, 0.25]),
        latency_target_us,
        policy: if lossy { policy } else { "sinks" },
        tail_tokens: random.pick(&[16, 64, 128]),
        spill_bytes_per_second: random.pick(&[1e7, 1e9, 1e10]),
    }
}

fn tenants(random: &mut Random, several: bool, long: bool) -> Vec<TenantPlan> {
    let count = random.size(1, 3);
    let mut tenants = Vec::new();
    for number in 0..count as u8 {
        let (low, high) = if long { (55, 90) } else { (15, 60) };
        let quota_percent = random.percent(50).then(|| random.size(low, high));
        let weight = random.pick(&[1.0, 1.0, 4.0]);
        tenants.push(TenantPlan { weight, quota_percent, salt: vec![number; number as usize] });
    }
    if !several {
        tenants.truncate(1);
        tenants[0].quota_percent = None;
    }
    tenants
}

fn faults(random: &mut Random, some: bool) -> FaultRates {
    let often = random.pick(&[0, 0, 1, 1, 4]);
    let mut rate = |most: u64| often * random.between(0, most);
    let rates = FaultRates {
        delay: rate(10),
        reorder: rate(25),
        lose_step: rate(2),
        lose: rate(4),
        duplicate: rate(8),
        late: rate(4),
        refuse_page: rate(3),
    };
    if some { rates } else { FaultRates::default() }
}

/// Small enough that most worlds are short of memory, large enough that each contract can run.
fn pool(random: &mut Random, groups: Vec<GroupConfig>, long: bool) -> PoolConfig {
    let mut rungs = Rung::ALL.to_vec();
    if random.percent(25) {
        rungs.remove(random.size(0, 3));
    }
    let four_bit_keys = random.percent(80);
    let harm = HarmTable::default();
    let ladder = Ladder { rungs, four_bit_keys, harm };
    let mut config = PoolConfig { groups, budget_bytes: 0, prefault: false, ladder };
    let sizes = if long { [360, 400, 450, 500, 600] } else { [200, 300, 450, 700, 1500] };
    let tokens = random.pick(&sizes) + random.size(0, 100);
    config.budget_bytes = tokens * config.bytes_per_token(PageFormat::F16) * 6 / 5;
    let minimum = |contract| minimum_budget_bytes(&config, contract);
    let minimum_bytes = Fidelity::ALL.map(minimum).into_iter().max().unwrap_or(0);
    config.budget_bytes = config.budget_bytes.max(minimum_bytes);
    config
}

/// Draws who comes, and when.
struct Crowd<'a> {
    recipe: &'a Recipe,
    random: Random,
    /// Texts that prompts begin with.
    documents: Vec<Vec<u32>>,
    capacity_tokens: usize,
    trained_context: usize,
    tenants: usize,
    lossy_percent: u64,
    /// Nobody displaces anybody.
    equal: bool,
    /// Most tokens that most ask for.
    length: usize,
}

impl<'a> Crowd<'a> {
    fn new(
        recipe: &'a Recipe,
        pool: &PoolConfig,
        trained_context: usize,
        tenants: usize,
        long: bool,
    ) -> Crowd<'a> {
        let mut random = Random::new(recipe.seed, "crowd");
        let documents = (0..random.size(1, 3)).map(|_| text(&mut random, 130)).collect();
        let capacity_tokens = pool.budget_bytes / pool.bytes_per_token(PageFormat::F16).max(1);
        let lossy_percent =
            random.pick(if long { &[0, 0, 20, 60, 95] } else { &[0, 10, 50, 50, 95] });
        let equal = random.percent(40);
        let length = if long { 330 } else { random.pick(&[20, 60]) };
        Crowd {
            recipe,
            random,
            documents,
            capacity_tokens,
            trained_context,
            tenants,
            lossy_percent,
            equal,
            length,
        }
    }

    fn arrivals(mut self) -> Vec<Arrival> {
        let count =
            if self.length > 100 { self.random.size(6, 11) } else { self.random.size(5, 20) };
        let pace_us = self.random.pick(&[200, 3_000, 10_000]) * self.length as u64 / 60;
        let (mut at_us, mut arrivals): (u64, Vec<Arrival>) = (0, Vec::with_capacity(count));
        for number in 0..count as u64 {
            at_us += self.random.between(0, pace_us);
            // Now and then a key that was used before, and may still be.
            let again = number > 0 && self.random.percent(15);
            let key = if again { self.random.pick(&arrivals).key } else { number + 100 };
            let request = self.request(at_us, number);
            let reason = self.random.pick(&[FinishReason::Cancelled, FinishReason::Stop]);
            let end_us = at_us + self.random.between(0, 2_000 * self.length as u64);
            let ends = self.random.percent(if self.length > 100 { 45 } else { 20 })
                && self.recipe.has(Part::Cancels);
            arrivals.push(Arrival { at_us, key, request, end: ends.then_some((end_us, reason)) });
        }
        arrivals
    }

    fn request(&mut self, at_us: u64, number: u64) -> Request {
        let prompt = self.prompt();
        let fidelity = self.fidelity();
        let most = if self.random.percent(10) { 120 } else { self.length };
        let max_tokens = self.random.size(if most > 200 { 150 } else { most / 4 }, most);
        let may_be_long = self.random.percent(5);
        let room = self.capacity_tokens.min(self.trained_context);
        let max_tokens = match fidelity {
            Fidelity::Evict => max_tokens,
            // Most are to fit alone.
            _ if !may_be_long => max_tokens.min(room.saturating_sub(prompt.len()).max(1)),
            _ => max_tokens,
        };
        let mut request = Request::new(prompt, fidelity);
        request.max_tokens = Some(max_tokens);
        request.sampling = self.sampling(number);
        request.branches = self.branches();
        let priority = self.random.pick(&[0, 0, 0, 1, 3, -1]);
        let priority = if self.equal { priority.min(0) } else { priority };
        request.priority = if self.recipe.has(Part::Priorities) { priority } else { 0 };
        request.tenant = self.random.size(0, self.tenants - 1);
        let deadline_us = at_us + self.random.between(1_000, 1_500 * self.length as u64);
        let hurries = self.random.percent(12) && self.recipe.has(Part::Deadlines);
        request.deadline_us = hurries.then_some(deadline_us);
        if self.random.percent(if self.length > 100 { 8 } else { 30 }) {
            request.end_ids = vec![self.random.size(0, VOCABULARY - 1) as u32];
        }
        if self.random.percent(50) {
            request.logprobs = Some(self.random.size(0, 3));
        }
        if self.random.percent(8) {
            request.prompt_logprobs = Some(self.random.size(0, 2));
        }
        if self.random.percent(15) {
            let end = self.random.size(1, request.prompt.len());
            request.keep.push(0..end);
        }
        if self.random.percent(12) && request.branches == Branches::One {
            request.constraint = Some(Box::new(Turning::default()));
        }
        request.speculate = self.random.percent(80);
        request.use_prefix_cache = self.random.percent(85);
        request
    }

    /// The beginning of a document and something of its own, or all its own.
    fn prompt(&mut self) -> Vec<u32> {
        let own = if self.random.percent(10) { 150 } else { 30 };
        let own = text(&mut self.random, own);
        let own = own[..self.random.size(1, own.len())].to_vec();
        if self.random.percent(35) {
            return own;
        }
        let document = self.random.pick(&self.documents);
        let shared = match self.random.between(0, 3) {
            0 => document.len(),
            1 => document.len() / 2,
            _ => self.random.size(1, document.len()),
        };
        let mut prompt = document[..shared].to_vec();
        if self.random.percent(80) {
            prompt.extend(own);
        }
        prompt
    }

    fn fidelity(&mut self) -> Fidelity {
        use Fidelity::{Evict, Exact, Int4, Int8};
        let fidelity = match self.random.percent(self.lossy_percent) {
            true => self.random.pick(&[Int8, Int4, Int4, Evict, Evict]),
            false => Exact,
        };
        if self.recipe.has(Part::Lossy) { fidelity } else { Exact }
    }

    fn sampling(&mut self, number: u64) -> Sampling {
        let greedy = self.random.percent(50);
        let seed = self.random.draw() ^ number;
        let temperature = self.random.pick(&[0.5, 1.0, 1.5]);
        let top_k = self.random.pick(&[0, 0, 5, 20]);
        let top_p = self.random.pick(&[1.0, 1.0, 0.9]);
        let mut sampling = Sampling { seed, ..Sampling::default() };
        if self.random.percent(25) {
            sampling.repetition_penalty = 1.2;
            sampling.frequency_penalty = 0.3;
            sampling.presence_penalty = 0.1;
            sampling.logit_bias = vec![(self.random.size(0, VOCABULARY - 1) as u32, 1.5)];
            sampling.min_tokens = self.random.size(0, 5);
        }
        if !greedy {
            sampling = Sampling { temperature, top_k, top_p, ..sampling };
        }
        if self.recipe.has(Part::Sampling) { sampling } else { Sampling::default() }
    }

    fn branches(&mut self) -> Branches {
        let kind = self.random.between(0, 99);
        let width = self.random.size(2, 4);
        let n = self.random.size(1, width);
        let early_stopping = self.random.percent(50);
        let length_penalty = self.random.pick(&[1.0, 0.0, 2.0]);
        if !self.recipe.has(Part::Branches) {
            return Branches::One;
        }
        match kind {
            0..=11 => Branches::Sample { n, best_of: width },
            12..=23 => Branches::Beams { width, n, length_penalty, early_stopping },
            _ => Branches::One,
        }
    }
}

/// So many random tokens; now and then one repeats a stretch before it.
fn text(random: &mut Random, tokens: usize) -> Vec<u32> {
    let mut text: Vec<u32> = Vec::with_capacity(tokens);
    while text.len() < tokens {
        if text.len() > 8 && random.percent(20) {
            let start = random.size(0, text.len() - 8);
            text.extend_from_within(start..start + 8);
        } else {
            text.push(random.size(0, VOCABULARY - 1) as u32);
        }
    }
    text
}

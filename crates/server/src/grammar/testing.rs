//! What tests of grammars share: a real vocabulary, and texts drawn from the masks.

use std::sync::Arc;

use reef_engine::constraint::{Constraint, TokenMask};
use reef_model::gguf::Gguf;
use reef_model::tokenizer::{Decode, TokenType, Tokenizer};

use super::Grammars;

/// SmolLM2's tokenizer: byte-level BPE.
pub(crate) fn tokenizer() -> Option<Arc<Tokenizer>> {
    tokenizer_of("smollm2")
}

/// The tokenizer of a model in the cache that `reef pull` fills.
pub(crate) fn tokenizer_of(alias: &str) -> Option<Arc<Tokenizer>> {
    let folder =
        |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(std::path::PathBuf::from);
    let home = folder("REEF_HOME")
        .or_else(|| folder("XDG_CACHE_HOME").map(|path| path.join("reef")))
        .or_else(|| folder("HOME").map(|path| path.join(".cache/reef")));
    let path = home.unwrap_or_default().join(format!("{alias}.gguf"));
    if !path.is_file() {
        eprintln!("skipped: {alias}.gguf is not in the cache (`reef pull {alias}` fetches it)");
        return None;
    }
    let file = Gguf::open(&path).expect("a fetched model opens");
    Some(Arc::new(Tokenizer::from_gguf(&file).expect("a tokenizer")))
}

pub(crate) fn grammars(tokenizer: &Arc<Tokenizer>) -> Grammars {
    Grammars::new(tokenizer.clone(), tokenizer.vocabulary().end_of_generation())
}

/// Numbers that are the same on every run.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn below(&mut self, n: usize) -> usize {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) as usize) % n
    }
}

pub(crate) fn mask_of(constraint: &mut dyn Constraint, tokens: usize) -> TokenMask {
    let mut mask = TokenMask::default();
    mask.reset(tokens);
    constraint.allow(&mut mask);
    mask
}

pub(crate) fn members(mask: &TokenMask) -> Vec<u32> {
    (0..mask.tokens() as u32).filter(|token| mask.contains(*token)).collect()
}

/// A text out of tokens drawn from the masks; `None` where it did not end in `steps`.
pub(crate) fn walk(
    tokenizer: &Tokenizer,
    mut constraint: Box<dyn Constraint>,
    random: &mut Random,
    steps: usize,
) -> Option<String> {
    let vocabulary = tokenizer.vocabulary();
    let ends = vocabulary.end_of_generation();
    let mut ids = Vec::new();
    for _ in 0..steps {
        if constraint.is_complete() {
            return Some(tokenizer.decode(&ids, Decode::default()));
        }
        let allowed = members(&mask_of(&mut *constraint, vocabulary.len()));
        assert!(!allowed.is_empty(), "nothing may follow {:?}", ids);
        let can_end = allowed.iter().any(|id| ends.contains(id));
        // Tokens that close something come as often as all others, or texts never end.
        let closing: Vec<u32> = allowed
            .iter()
            .copied()
            .filter(|id| {
                let bytes = tokenizer.token_bytes(*id).unwrap_or_default();
                bytes.len() == 1 && b"\"}],0".contains(&bytes[0])
            })
            .collect();
        let pool = if !closing.is_empty() && random.below(2) == 0 { &closing } else { &allowed };
        let id = if can_end && random.below(3) == 0 {
            *allowed.iter().find(|id| ends.contains(id)).unwrap()
        } else {
            pool[random.below(pool.len())]
        };
        constraint.accept(id);
        if ends.contains(&id) {
            return Some(tokenizer.decode(&ids, Decode::default()));
        }
        assert_ne!(vocabulary.token_type(id), Some(TokenType::Control), "{id}");
        ids.push(id);
    }
    None
}

//! Tokens known by their names: what ends a turn, a text or a file in the models of the wild.

use super::vocabulary::{TokenType, Vocabulary};

/// Names of the end of a turn, the likeliest first.
const END_OF_TURN: &[&str] = &[
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "<\u{ff5c}end\u{2581}of\u{2581}sentence\u{ff5c}>",
    "<end_of_utterance>",
];

/// Names of the end of a message that goes on after a tool has answered.
const END_OF_MESSAGE: &[&str] = &["<|eom_id|>"];

/// Marks between the files of a repository in code models: padding, repository, separator.
const END_OF_FILE: [&[&str]; 3] = [
    &["<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"],
    &["<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"],
    &["<|file_sep|>"],
];

/// Other names of an end.
const END: &[&str] = &[
    "<|return|>",
    "<|call|>",
    "<|flush|>",
    "<|calls|>",
    "</s>",
    "<eos>",
    "[EOS]",
    "<turn|>",
    "<|tool_response>",
    "[e~[",
];

/// Gives `vocabulary` the roles that its file leaves open and the set of tokens that end a generation.
pub(super) fn assign(vocabulary: &mut Vocabulary) {
    let mut special = *vocabulary.special();
    let mut control = Vec::new();
    let mut first = |vocabulary: &Vocabulary, names: &[&str]| {
        let found = names.iter().find_map(|name| vocabulary.find(name));
        control.extend(found);
        found
    };
    special.eot = special.eot.or_else(|| first(vocabulary, END_OF_TURN));
    special.eom = special.eom.or_else(|| first(vocabulary, END_OF_MESSAGE));
    let mut ends: Vec<u32> =
        [special.eos, special.eot, special.eom].into_iter().flatten().collect();
    ends.extend(END_OF_FILE.iter().filter_map(|names| first(vocabulary, names)));
    let names = END_OF_TURN.iter().chain(END_OF_MESSAGE).chain(END);
    let named = names.filter_map(|name| vocabulary.find(name)).collect::<Vec<_>>();
    control.extend(&named);
    ends.extend(named);
    // gpt-oss: `<|end|>` only ends one of several messages of a turn.
    if vocabulary.find("<|return|>").is_some() && vocabulary.find("<|call|>").is_some() {
        ends.retain(|id| vocabulary.text(*id) != Some("<|end|>"));
    }
    ends.sort_unstable();
    ends.dedup();
    vocabulary.set_roles(special, ends, &control);
}

/// Whether a token is cut out of the text before it is tokenized: always the ones that a user defined,
/// control and unknown tokens only if `parse_special`.
pub(super) fn is_cut_out(token_type: TokenType, parse_special: bool) -> bool {
    match token_type {
        TokenType::UserDefined => true,
        TokenType::Control | TokenType::Unknown => parse_special,
        TokenType::Normal | TokenType::Unused | TokenType::Byte => false,
    }
}

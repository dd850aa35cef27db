//! What holds for every text and every sequence of ids, on two small vocabularies made here.

use proptest::prelude::*;
use reef_model::tokenizer::{
    Decode, Detokenizer, Encode, Source, SpecialIds, TokenType, Tokenizer, TokenizerError,
};

const NORMAL: i32 = 1;
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;
const UNUSED: i32 = 5;
const BYTE: i32 = 6;

fn source<'a>(model: &'a str, tokens: &'a [(String, i32)], merges: &'a [&'a str]) -> Source<'a> {
    Source {
        model,
        pre: Some("smollm"),
        tokens: Box::new(tokens.iter().map(|(text, _)| text.as_str())),
        types: tokens.iter().map(|(_, number)| *number).collect(),
        scores: Vec::new(),
        merges: Box::new(merges.iter().copied()),
        special: SpecialIds::default(),
        add_bos: None,
        add_eos: None,
        add_space_prefix: None,
        special_takes_spaces: false,
    }
}

/// Llama's kind: three special tokens, all bytes, a few pieces; a later piece has a higher score.
fn spm() -> Tokenizer {
    let special = ["<unk>", "<s>", "</s>"].map(|text| (text.to_owned(), CONTROL));
    let bytes = (0..=255).map(|byte| (format!("<0x{byte:02X}>"), BYTE));
    let pieces = ["\u{2581}", "a", "b", "\u{e9}", "\u{1f980}", "ab", "\u{2581}a", "\u{2581}ab"];
    let pieces = pieces.map(|text| (text.to_owned(), NORMAL));
    let extra = [("<u>".to_owned(), USER_DEFINED), ("never".to_owned(), UNUSED)];
    let tokens: Vec<_> = special.into_iter().chain(bytes).chain(pieces).chain(extra).collect();
    let scores = (0..tokens.len()).map(|id| id as f32).collect();
    Tokenizer::new(Source { scores, ..source("llama", &tokens, &[]) }).unwrap()
}

/// GPT-2's kind: all 256 letters, two merges, two special tokens.
fn bpe() -> Tokenizer {
    let own = |byte: u8| matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    let mut next = 0x100;
    let mut letter = |byte: u8| {
        next += u32::from(!own(byte));
        if own(byte) { char::from(byte) } else { char::from_u32(next - 1).unwrap() }
    };
    let letters = (0..=255).map(|byte| (letter(byte).to_string(), NORMAL));
    let joined = ["ab", "\u{120}ab"].map(|text| (text.to_owned(), NORMAL));
    let special = [("<|im_end|>".to_owned(), CONTROL), ("<u>".to_owned(), USER_DEFINED)];
    let tokens: Vec<_> = letters.chain(joined).chain(special).collect();
    Tokenizer::new(source("gpt2", &tokens, &["a b", "\u{120} ab"])).unwrap()
}

fn pushed_and_finished(mut detokenizer: Detokenizer<&Tokenizer>, ids: &[u32]) -> Vec<String> {
    let mut texts: Vec<String> = ids.iter().map(|id| detokenizer.push(*id)).collect();
    texts.push(detokenizer.finish());
    texts
}

proptest! {
    #[test]
    fn texts_come_back(text in "(<u>|<s>|<\\|im_end\\|>|a|b| |\\PC|\\s){0,40}", parse in any::<bool>()) {
        let encode = Encode { add_special: false, parse_special: parse };
        let decode = Decode { show_special: true, continues: false };
        let ids = bpe().encode(&text, encode).unwrap();
        prop_assert_eq!(bpe().decode(&ids, decode), text.as_str());
        // Llama's kind puts spaces where text begins after special tokens, so leave those in the text
        // out; and it cannot tell U+2581 from a space.
        let plain = text.replace("<u>", "").replace('\u{2581}', "");
        let ids = spm().encode(&plain, Encode { add_special: false, parse_special: false }).unwrap();
        prop_assert_eq!(spm().decode(&ids, decode), plain.as_str());
    }

    #[test]
    fn pushes_are_the_whole_in_whole_characters(
        ids in prop::collection::vec(prop_oneof![0u32..280, any::<u32>()], 0..40),
        show_special in any::<bool>(),
        continues in any::<bool>(),
    ) {
        for tokenizer in [spm(), bpe()] {
            let options = Decode { show_special, continues };
            let pushed = pushed_and_finished(tokenizer.detokenizer(options), &ids).concat();
            prop_assert_eq!(&pushed, &tokenizer.decode(&ids, options));
            // Bytes of one token may finish a character of another: compare with all bytes at once.
            let shown = |id: &&u32| {
                let kind = tokenizer.vocabulary().token_type(**id);
                show_special || !matches!(kind, Some(TokenType::Control | TokenType::Unknown))
            };
            let bytes: Vec<u8> =
                ids.iter().filter(shown).flat_map(|id| tokenizer.token_bytes(*id).unwrap_or_default()).collect();
            let all = String::from_utf8_lossy(&bytes).into_owned();
            prop_assert!(pushed == all || Some(pushed.as_str()) == all.strip_prefix(' '), "{pushed:?} {all:?}");
        }
    }
}

#[test]
fn a_character_waits_for_its_last_byte() {
    let tokenizer = spm();
    let bytes: Vec<u32> = "\u{1f980}".bytes().map(|byte| 3 + u32::from(byte)).collect();
    let options = Decode::default();
    let texts = pushed_and_finished(tokenizer.detokenizer(options), &bytes);
    assert_eq!(texts, ["", "", "", "\u{1f980}", ""]);
    let texts = pushed_and_finished(tokenizer.detokenizer(options), &bytes[..2]);
    assert_eq!(texts, ["", "", "\u{fffd}"]);
    // The letter "a" ends what the two bytes had begun.
    let a = tokenizer.vocabulary().find("a").unwrap();
    let texts = pushed_and_finished(tokenizer.detokenizer(options), &[bytes[0], bytes[1], a]);
    assert_eq!(texts, ["", "", "\u{fffd}a", ""]);
}

#[test]
fn the_space_that_was_put_before_a_text_is_taken_away() {
    let tokenizer = spm();
    let ids = tokenizer.encode("ab a", Encode::default()).unwrap();
    let piece = |text| tokenizer.vocabulary().find(text).unwrap();
    assert_eq!(ids, [1, piece("\u{2581}ab"), piece("\u{2581}a")]);
    assert_eq!(tokenizer.decode(&ids, Decode::default()), "ab a");
    let continues = Decode { continues: true, ..Decode::default() };
    assert_eq!(tokenizer.decode(&ids[1..], continues), " ab a");
    let shown = Decode { show_special: true, ..Decode::default() };
    assert_eq!(tokenizer.decode(&ids, shown), "<s> ab a");
}

#[test]
fn special_tokens_are_parsed_or_literal() {
    let tokenizer = bpe();
    let end = tokenizer.vocabulary().find("<|im_end|>").unwrap();
    let user = tokenizer.vocabulary().find("<u>").unwrap();
    let encode = |parse_special| {
        tokenizer.encode("<u><|im_end|>", Encode { add_special: true, parse_special }).unwrap()
    };
    assert_eq!(encode(true), [user, end]);
    assert_eq!(encode(false)[0], user);
    assert_eq!(encode(false).len(), 1 + "<|im_end|>".len());
    assert_eq!(tokenizer.decode(&[user, end], Decode::default()), "<u>");
    assert_eq!(tokenizer.vocabulary().end_of_generation(), [end]);
    assert!(tokenizer.is_end_of_generation(end) && !tokenizer.is_end_of_generation(user));
    assert!(!tokenizer.is_end_of_generation(u32::MAX));
}

#[test]
fn bos_and_eos_are_added_as_the_file_says() {
    let tokens: Vec<(String, i32)> =
        ["<unk>", "<s>", "</s>", "a"].map(|text| (text.to_owned(), NORMAL)).into();
    let encode = |add_bos, add_eos, add_special| {
        let source = Source {
            add_bos,
            add_eos,
            add_space_prefix: Some(false),
            ..source("llama", &tokens, &[])
        };
        let options = Encode { add_special, parse_special: true };
        Tokenizer::new(source).unwrap().encode("a", options).unwrap()
    };
    assert_eq!(encode(None, None, true), [1, 3]);
    assert_eq!(encode(Some(false), Some(true), true), [3, 2]);
    assert_eq!(encode(Some(true), Some(true), false), [3]);
}

#[test]
fn what_cannot_work_is_refused_by_name() {
    let tokens = [("a".to_owned(), NORMAL)];
    let refusal = |source| Tokenizer::new(source).unwrap_err();
    for model in ["bert", "test", "no_vocab", "a\nb"] {
        let error = refusal(source(model, &tokens, &[]));
        assert!(matches!(error, TokenizerError::UnknownModel { .. }));
        let message = error.to_string();
        assert!(message.contains("gpt2") && !message.contains('\n'), "{message}");
    }
    let unknown = refusal(Source { pre: Some("tea-leaves"), ..source("gpt2", &tokens, &[]) });
    assert!(unknown.to_string().contains("`tea-leaves`"), "{unknown}");
    let merge = refusal(source("gpt2", &tokens, &["a"]));
    assert!(merge.to_string().contains("element 0: `a`"), "{merge}");
    let short = refusal(Source { scores: vec![0.0; 2], ..source("llama", &tokens, &[]) });
    assert!(short.to_string().contains("tokenizer.ggml.scores has 2"), "{short}");
    let short = refusal(Source { types: vec![1, 1], ..source("gpt2", &tokens, &[]) });
    assert!(short.to_string().contains("tokenizer.ggml.token_type has 2"), "{short}");
    let special = SpecialIds { eos: Some(7), ..SpecialIds::default() };
    let beyond = refusal(Source { special, ..source("gpt2", &tokens, &[]) });
    assert!(beyond.to_string().contains("tokenizer.ggml.eos_token_id is 7"), "{beyond}");
    let no_bos = refusal(Source { add_bos: Some(true), ..source("gpt2", &tokens, &[]) });
    assert!(no_bos.to_string().contains("bos_token_id"), "{no_bos}");
}

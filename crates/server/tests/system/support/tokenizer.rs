//! A tokenizer of bytes: token `n` is byte `n`, and one more ends a text.

use reef_model::tokenizer::{Source, Tokenizer};

/// The end token.
pub const END: u32 = 256;

const NORMAL: i32 = 1;
const CONTROL: i32 = 3;

/// GPT-2's kind, with nothing but its letters for bytes.
pub fn byte_tokenizer() -> Tokenizer {
    let own = |byte: u8| matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    let mut next = 0xFF;
    let mut letter = |byte: u8| {
        next += u32::from(!own(byte));
        if own(byte) { char::from(byte) } else { char::from_u32(next).unwrap() }
    };
    let mut texts: Vec<String> = (0..=255).map(|byte| letter(byte).to_string()).collect();
    texts.push("<|im_end|>".into());
    let mut types = vec![NORMAL; 256];
    types.push(CONTROL);
    Tokenizer::new(Source {
        model: "gpt2",
        pre: Some("gpt-2"),
        tokens: Box::new(texts.iter().map(String::as_str)),
        types,
        scores: Vec::new(),
        merges: Box::new(std::iter::empty()),
        special: Default::default(),
        add_bos: None,
        add_eos: None,
        add_space_prefix: None,
        special_takes_spaces: false,
    })
    .unwrap()
}

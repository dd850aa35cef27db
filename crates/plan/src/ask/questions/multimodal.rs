//! E34: what do images cost in tokens, embeddings and peaks?

use super::prelude::*;

pub struct Multimodal;

impl Question for Multimodal {
    fn about(&self) -> About {
        About {
            name: "multimodal",
            aliases: &["images"],
            covers: &["E34"],
            asks: "What do a request's images cost in tokens, KV, kept embeddings and peak memory?",
            explanation: "An image becomes (width / step) × (height / step) tokens, a step being patch × merge \
                pixels, plus two marks; each takes KV like a word. Its embeddings stay in the encoder cache \
                from encoding until the last of its tokens is prefilled. Encoder and prefill run one after the \
                other, so the peak is the larger of the two, not their sum; the start-up profile uses the \
                largest image allowed, which can cost more than the language model's activations. A prefill \
                budget below an image's tokens makes the engine refuse or split it.",
            source: "Qwen2-VL (arXiv 2409.12191) section 2.1; vLLM logs of Pixtral: 8.27 GiB of activations before, 1.08 after its vision path was mended",
        }
    }

    fn inputs(&self) -> Vec<Input> {
        let hidden = |facts: &Facts| Ok(facts.model()?.hidden.unwrap_or(0) as f64);
        let (count, gib) = (Unit::Count, 1_073_741_824.0);
        vec![
            standard::model("Qwen3-VL-4B-Instruct"),
            standard::kv_cache_dtype(),
            standard::kv_bytes(),
            Input::number("images", count, 1.0, "images of a request").whole(),
            Input::number("image_width", count, 1024.0, "pixels").whole().within(1.0, 65_536.0),
            Input::number("image_height", count, 1024.0, "pixels").whole().within(1.0, 65_536.0),
            Input::number("patch", count, 16.0, "pixels of a patch's side").whole().fixed(),
            Input::number("merge", count, 2.0, "patches merged to a token, a side").whole().fixed(),
            Input::number("marks", count, 2.0, "tokens around an image")
                .whole()
                .within(0.0, 64.0)
                .fixed(),
            Input::worked("hidden", count, "the model's", hidden, "channels of an embedding"),
            Input::number("encoder_width", count, 1024.0, "channels of the vision encoder").fixed(),
            Input::number("live", count, 16.0, "encoder-wide activations alive at once, per patch"),
            Input::number(
                "prefill_peak",
                Unit::Bytes,
                1.0 * gib,
                "activation peak of a prefill chunk",
            ),
            Input::number("max_num_batched_tokens", Unit::Tokens, 8192.0, "prefill budget").whole(),
        ]
    }

    fn work(&self, sheet: &mut Worksheet) -> Result<Verdict, AskError> {
        inputs!(sheet; kv_bytes, images, image_width, image_height, patch, merge, marks, hidden);
        inputs!(sheet; encoder_width, live, prefill_peak, max_num_batched_tokens);
        step!(sheet, columns: Count = max(1.0, round(image_width / (patch * merge))), "tokens a row");
        step!(sheet, rows: Count = max(1.0, round(image_height / (patch * merge))), "rows of tokens");
        step!(sheet, image_tokens: Tokens = rows * columns + marks, "tokens of an image");
        step!(sheet, expanded: Tokens = images * image_tokens, "tokens of all images");
        step!(sheet, kv_total: Bytes = expanded * kv_bytes, "their KV");
        step!(sheet, embeddings: Bytes = images * rows * columns * hidden * 2.0, "kept in the encoder cache");
        step!(
            sheet,
            encoder_peak: Bytes = rows * columns * merge * merge * encoder_width * live * 2.0,
            "activations of the encoder, one image"
        );
        step!(sheet, phase_peak: Bytes = max(encoder_peak, prefill_peak), "the larger phase");
        let splits = image_tokens > max_num_batched_tokens;
        let advice = match splits {
            true => {
                "raise --max-num-batched-tokens above an image's tokens, or limit the pixels \
                     (--mm-processor-kwargs max_pixels)"
            }
            false => {
                "limit pixels (--mm-processor-kwargs max_pixels) and images \
                      (--limit-mm-per-prompt): tokens, KV and peaks grow with them"
            }
        };
        let decision =
            Some(if splits { "exceeds the prefill budget" } else { "in budget" }.to_string());
        Ok(Verdict { answer: "expanded", decision, advice: advice.into() })
    }

    fn example(&self) -> Example {
        Example {
            given: &[
                ("image-width", "224"),
                ("image-height", "224"),
                ("patch", "14"),
                ("merge", "2"),
            ],
            answer: 66.0,
            cited: Cited {
                step: "image_tokens",
                value: 66.0,
                tolerance: 0.0,
                from: "Qwen2-VL section 2.1: 224 x 224 pixels with patches of 14 become 66 tokens",
            },
            moves: [
                Move { input: "image_width", to: "448", answer: 130.0 },
                Move { input: "images", to: "4", answer: 264.0 },
            ],
        }
    }
}

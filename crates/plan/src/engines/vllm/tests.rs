use super::*;
use crate::dtype::KvDtype;
use crate::engines::setup::{Draft, DraftKind};
use crate::source;

fn setup(version: &str) -> Setup {
    let (version, first_engine) = behavior::parse_version(version);
    Setup { version, first_engine, ..Setup::default() }
}

fn kv(gib: f64) -> Option<Figure> {
    Some(Figure::measured(gib * GIB, Unit::Bytes, "the log"))
}

fn layout(name: &str, setup: &Setup) -> Layout {
    let model = source::read(name, &[]).unwrap();
    Layout::new(&model, setup, behavior::batched_tokens(&model, setup, None)).unwrap()
}

#[test]
fn hybrid_blocks_are_those_of_logs() {
    let fp8 = |mut setup: Setup| {
        (setup.kv_keys, setup.kv_values) = (KvDtype::Fp8, KvDtype::Fp8);
        setup
    };
    let draft = Some(Draft { kind: DraftKind::NextToken, layers: None, tokens: 2 });
    let new = || setup("0.24.0");
    // README of the cases, "Logged values reproduced".
    for (name, setup, block) in [
        ("granite-4.0-h-1b", new(), 400),
        ("Qwen3.5-0.8B", new(), 544),
        ("Qwen3.6-27B", new(), 784),
        ("Qwen3.6-27B", fp8(new()), 1568),
        ("Qwen3.6-27B", Setup { draft, ..fp8(new()) }, 1600),
        ("Qwen3-Next-80B-A3B", Setup { tp: 2, ..fp8(new()) }, 1072),
        ("Qwen3.6-35B-A3B", fp8(new()), 2096),
        ("Nemotron-3.5-Lightning-30B-A3B", new(), 1072),
    ] {
        assert_eq!(layout(name, &setup).block_size(), block, "{name}");
    }
}

#[test]
fn a_head_of_another_shape_makes_every_layer_a_group() {
    let new = setup("0.20.0");
    let plain = layout("gemma-4-26B-A4B", &new);
    assert_eq!((plain.group_size, plain.group_count()), (5, 6));
    let draft = Some(Draft { kind: DraftKind::Head, layers: None, tokens: 3 });
    let drafted = layout("gemma-4-26B-A4B", &Setup { draft, ..new });
    assert_eq!((drafted.group_size, drafted.group_count()), (1, 31));
    // gpt-oss with EAGLE: 12 window layers and 13 full ones make groups of 13, not of 12.
    let gpt_oss = layout("gpt-oss-20b", &Setup { draft, ..setup("0.20.0") });
    assert_eq!((gpt_oss.group_size, gpt_oss.group_count(), gpt_oss.padding), (13, 2, 1));
}

#[test]
fn draft_layers_pad_the_groups() {
    let draft = Some(Draft { kind: DraftKind::NextToken, layers: None, tokens: 2 });
    let layout = layout("Qwen3.6-27B", &Setup { draft, ..setup("0.24.0") });
    assert_eq!((layout.group_size, layout.padding), (17, 3));
}

#[test]
fn the_refusal_names_the_longest_length() {
    let model = source::read("Llama-3.1-8B", &[]).unwrap();
    let mut setup = setup("0.11.0");
    setup.measured.kv = kv(4.6);
    let plan = Vllm.plan(&model, &setup).unwrap();
    assert_eq!(plan.verdict, Verdict::Refuses);
    let text = plan.refusal.unwrap();
    // 4.6 GiB / (16 * 131,072 B) = 2,355 blocks.
    assert!(text.contains("(16.00 GiB KV cache is needed"), "{text}");
    assert!(text.contains("estimated maximum model length is 37680"), "{text}");
}

#[test]
fn ranks_beyond_the_heads_keep_copies() {
    let tp8 = layout("Qwen3-30B-A3B", &Setup { tp: 8, ..setup("0.20.0") });
    let tp4 = layout("Qwen3-30B-A3B", &Setup { tp: 4, ..setup("0.20.0") });
    assert_eq!(tp8.token_bytes, tp4.token_bytes);
    // A latent is not split at all.
    let one = layout("DeepSeek-R1", &setup("0.20.0")).token_bytes;
    assert_eq!(layout("DeepSeek-R1", &Setup { tp: 16, ..setup("0.20.0") }).token_bytes, one);
    assert_eq!(one, 61 * 576 * 2);
}

#[test]
fn more_memory_never_gives_fewer_tokens() {
    for name in source::bundled() {
        let Ok(model) = source::read(name, &[]) else { continue };
        let setup = setup("0.28.0");
        let Ok(layout) = Layout::new(&model, &setup, 8192) else { continue };
        let mut last = 0;
        for gib in 1..40 {
            let blocks = layout.blocks(f64::from(gib) * GIB);
            let longest = layout.longest(blocks as f64 * layout.block_bytes as f64, 1 << 20);
            assert!(longest >= last, "{name}");
            assert!(longest == 0 || layout.request_blocks(longest) <= blocks, "{name}");
            last = longest;
        }
    }
}

/// vllm#28228: two ranks, `Setting attention block size to 960`, `Padding mamba page size by 1.89%`, and
/// prefix caching turned off although it was asked for.
#[test]
fn latent_attention_beside_recurrence_has_blocks_of_64() {
    let model = source::read("Kimi-Linear-48B-A3B", &[]).unwrap();
    let setup = Setup { tp: 2, prefix_caching: Some(true), ..setup("0.11.1") };
    let layout = Layout::new(&model, &setup, 64_000).unwrap();
    assert_eq!((layout.block_size(), layout.group_size, layout.group_count()), (960, 7, 4));
    let state = model.state_bytes(2) / 20;
    let padding = (960 * 1152) as f64 / state as f64 - 1.0;
    assert_eq!(format!("{:.2}", padding * 100.0), "1.89");
    assert_eq!(layout.request_blocks(960), 1 + 3);
}

/// eugr/spark-vllm-docker#396: two ranks, 22.5 GiB: needs 23.25 GiB for 196,608 tokens, 190,272 would do.
#[test]
fn a_refusal_of_another_log() {
    let model = source::read("MiniMax-M2.7", &[]).unwrap();
    let mut setup = Setup { tp: 2, max_model_len: Some(196_608), ..setup("0.29.1") };
    setup.measured.kv = kv(22.502);
    let text = Vllm.plan(&model, &setup).unwrap().refusal.unwrap();
    assert!(
        text.contains("(23.25 GiB KV cache is needed") && text.contains("is 190272."),
        "{text}"
    );
}

/// vllm#34076: 0.15.2rc1 under pp 2 asks 24.0 GiB of the rank with 3.18 GiB and estimates 34,736 tokens, all
/// 48 layers counted; a rank of a later version counts its own.
#[test]
fn the_check_of_some_versions_counts_all_pipeline_ranks() {
    let model = source::read("Qwen3-30B-A3B", &[]).unwrap();
    let layout = |version| Layout::new(&model, &Setup { pp: 2, ..setup(version) }, 2048).unwrap();
    let gib = |layout: &Layout| layout.needed_bytes(262_144) as f64 / GIB;
    assert!((gib(&layout("0.15.2rc1.dev93+g11a4c9d30")) - 24.0).abs() < 0.01);
    assert_eq!(layout("0.15.2rc1").longest(3.1803 * GIB, 262_144), 34_736);
    assert!((gib(&layout("0.16.0")) - 12.0).abs() < 0.01);
    assert!((gib(&layout("0.11.0")) - 12.0).abs() < 0.01);
}

/// Gemma 3 27B: 52 window layers fill six groups of ten with eight of padding, which the check charges since
/// 0.14 only.
#[test]
fn padding_is_charged_since_groups_are_checked() {
    let model = source::read("gemma-3-27b-it", &[]).unwrap();
    let needed = |version| {
        let layout = Layout::new(&model, &setup(version), 2048).unwrap();
        assert_eq!((layout.group_size, layout.group_count(), layout.padding), (10, 7, 8));
        layout.needed_bytes(32_768)
    };
    // A block of a layer: 16 tokens * 16 heads * 256 channels * 2 B; a window keeps
    // ceil((1023 + 2048) / 16) + 1 blocks.
    let (page, full, window) = (131_072, 32_768 / 16, 193);
    assert_eq!(needed("0.11.0"), page * (10 * full + 52 * window));
    assert_eq!(needed("0.20.0"), page * 10 * (full + 6 * window));
}

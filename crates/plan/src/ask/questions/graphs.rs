//! E30: what do captured CUDA graphs cost, by capture policy?

use super::prelude::*;

pub struct Graphs;

/// Batch sizes that a policy captures up to `most`.
fn capture_sizes(policy: &str, most: f64) -> Vec<f64> {
    let most = most as u64;
    let eights = (1..).map(|n| 8 * n);
    let sizes: Vec<u64> = match policy {
        "powers" => (0..).map(|n| 1 << n).take_while(|size| *size <= most).collect(),
        "every" => (1..=most).collect(),
        "eights" => [1, 2, 4].into_iter().chain(eights.take_while(|size| *size <= most)).collect(),
        _ => {
            let sixteens = (17..).map(|n| 16 * n).take_while(|size| *size <= most);
            let eights = eights.take_while(|size| *size <= most.min(256));
            [1, 2, 4].into_iter().chain(eights).chain(sixteens).collect()
        }
    };
    sizes.into_iter().filter(|size| *size <= most).map(|size| size as f64).collect()
}

/// Mean rows that a batch is padded by, batches being equally likely from 1 to the largest size.
fn mean_padding(sizes: &[f64]) -> f64 {
    let mut padded = 0.0;
    let mut before = 0.0;
    for size in sizes {
        let gap = size - before;
        padded += gap * (gap - 1.0) / 2.0;
        before = *size;
    }
    padded / before.max(1.0)
}

impl Question for Graphs {
    fn about(&self) -> About {
        About {
            name: "graphs",
            aliases: &["cuda-graphs"],
            covers: &["E30"],
            asks: "How much memory do captured CUDA graphs take under this policy?",
            explanation: "Every captured batch size keeps a graph; a batch is padded up to the next size. More \
                sizes pad less and take more memory and start-up time. Full and piecewise graphs are captured \
                side by side, which doubles it. Sizes above --max-num-seqs are never used. Profilers have \
                been wrong by gigabytes here: measure.",
            source: "vLLM PR 22897 (24-28 MiB a graph, 67 sizes about 1.7 GiB)",
        }
    }

    fn inputs(&self) -> Vec<Input> {
        let policies = &["eights", "vllm", "powers", "every"];
        let meaning =
            "eights: 1 2 4 8 16 24 ...; vllm: by 16 above 256; powers: 1 2 4 8 ...; every";
        let per_graph = 26.0 * 1_048_576.0;
        vec![
            Input::choice("policy", "eights", policies, meaning),
            Input::number("largest", Unit::Sequences, 512.0, "largest captured batch")
                .whole()
                .within(1.0, 65_536.0),
            Input::number(
                "per_graph",
                Unit::Bytes,
                per_graph,
                "memory of a graph (24-28 MiB measured)",
            ),
            Input::number("modes", Unit::Count, 1.0, "1 = full or piecewise, 2 = both")
                .whole()
                .fixed(),
        ]
    }

    fn work(&self, sheet: &mut Worksheet) -> Result<Verdict, AskError> {
        inputs!(sheet; largest, per_graph, modes);
        let policy = sheet.word("policy")?;
        let list = capture_sizes(&policy, largest);
        let count = list.len() as f64;
        fact!(sheet, sizes: Count = count, "counted", "captured batch sizes of the policy");
        let rows = mean_padding(&list);
        fact!(sheet, padding: Sequences = rows, "counted", "rows a batch is padded by on average");
        step!(sheet, graph_bytes: Bytes = sizes * modes * per_graph, "memory of the graphs");
        let cell = |name: &str| {
            let list = capture_sizes(name, largest);
            let bytes = list.len() as f64 * modes * per_graph;
            vec![
                name.to_string(),
                list.len().to_string(),
                crate::ask::report::cell(mean_padding(&list)),
                crate::ask::quantity::display(bytes, Unit::Bytes),
            ]
        };
        let rows = ["powers", "vllm", "eights", "every"].map(cell).to_vec();
        sheet.compare("Policies", &["policy", "sizes", "mean padding", "memory"], rows);
        let advice = "set --cuda-graph-sizes (or --max-num-seqs) to the batches you run; --enforce-eager \
                      gives all of it back for slower small batches";
        Ok(Verdict { answer: "graph_bytes", decision: None, advice: advice.into() })
    }

    fn example(&self) -> Example {
        Example {
            given: &[("policy", "eights"), ("largest", "512")],
            answer: 1_826_619_392.0,
            cited: Cited {
                step: "graph_bytes",
                value: 1.7 * 1_073_741_824.0,
                tolerance: 0.01,
                from: "vLLM PR 22897: 67 sizes, about 1.7 GiB",
            },
            moves: [
                Move { input: "policy", to: "vllm", answer: 1_390_411_776.0 },
                Move { input: "largest", to: "64", answer: 299_892_736.0 },
            ],
        }
    }
}

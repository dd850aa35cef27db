//! Every row of `data/cases.csv` (start-up logs from public sources, reported numbers untouched) against
//! its prediction, and the bounds that the planner promises.
//!
//! A row that does not close stands in `data/open_rows.txt` with the reason; one that closes must not.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use reef_plan::score::{RowScore, Score, score};

fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name)
}

/// `CASE KIND` to reason; kinds: value (the prediction is off), nothing (the row gives nothing to
/// compare), start (nothing decides whether it starts).
fn open_rows() -> HashMap<(String, String), String> {
    let text = std::fs::read_to_string(data("open_rows.txt")).unwrap();
    let lines = text.lines().filter(|line| !line.starts_with('#') && !line.trim().is_empty());
    lines
        .map(|line| {
            let mut words = line.splitn(3, ' ');
            let mut word = || words.next().expect("CASE KIND REASON").to_string();
            ((word(), word()), word())
        })
        .collect()
}

/// Kinds of openness that a row shows.
fn kinds(row: &RowScore) -> Vec<&'static str> {
    let mut kinds = Vec::new();
    match row.within_1pct {
        Some(true) => {}
        Some(false) => kinds.push("value"),
        None => kinds.push("nothing"),
    }
    if row.starts.as_ref().is_some_and(|start| start.right.is_none()) {
        kinds.push("start");
    }
    kinds
}

fn scored() -> Score {
    score(&data("cases.csv"), None).unwrap()
}

#[test]
fn every_row_closes_or_has_its_reason() {
    let score = scored();
    let mut listed = open_rows();
    let mut wrong = Vec::new();
    for row in &score.rows {
        let open = kinds(row);
        let first = row.checks.first();
        let shown = first.map_or_else(
            || row.error.clone().unwrap_or_else(|| "nothing to compare".into()),
            |check| {
                let (predicted, reported) = (check.predicted, check.reported);
                let word = if check.exact { "exact" } else { "" };
                format!("{:20} {predicted:>13.2} {reported:>13.2} {word}", check.metric)
            },
        );
        let reason = |kind: &&str| listed.get(&(row.case_id.clone(), (*kind).to_string()));
        let reasons: Vec<&String> = open.iter().filter_map(reason).collect();
        println!("{} {shown} {reasons:?}", row.case_id);
        for kind in open {
            if listed.remove(&(row.case_id.clone(), kind.to_string())).is_none() {
                wrong.push(format!("{} {kind}: {shown}", row.case_id));
            }
        }
    }
    assert!(wrong.is_empty(), "not closed and not listed: {wrong:#?}");
    assert!(listed.is_empty(), "listed but closed: {listed:#?}");
}

#[test]
fn the_promised_bounds_hold() {
    let summary = scored().summary;
    let independent = summary.independent;
    assert!(independent.n >= 43, "{independent:?}");
    let share = |part: usize, whole: usize| part as f64 / whole as f64;
    assert!(share(independent.within_1pct, independent.n) >= 0.97, "{independent:?}");
    assert!(share(independent.exact, independent.n) >= 0.90, "{independent:?}");
    assert!(summary.starts.n >= 65 && summary.starts.right == summary.starts.n);
    let end = summary.end_to_end;
    assert!(end.n >= 20, "{end:?}");
    assert!(end.median_error <= 0.05 && end.p90_error <= 0.15, "{end:?}");
    assert!(share(end.covered, end.n) >= 0.90, "{end:?}");
}

/// The secondary numbers of a row (concurrency, needs, block sizes) must close too, wherever the first does.
#[test]
fn nearly_all_secondary_numbers_close() {
    let score = scored();
    let closed = score.rows.iter().filter(|row| row.within_1pct == Some(true));
    let others: Vec<_> =
        closed.flat_map(|row| row.checks.iter().skip(1).map(move |check| (row, check))).collect();
    let off: Vec<String> = others
        .iter()
        .filter(|(_, check)| !check.within_1pct)
        .map(|(row, check)| format!("{} {} {}", row.case_id, check.metric, check.predicted))
        .collect();
    println!("{} secondary numbers, off: {off:?}", others.len());
    assert!(others.len() >= 40, "{}", others.len());
    assert!(off.len() <= 2, "{off:?}");
}

#[test]
fn damaged_tables_give_errors_by_row_and_no_crash() {
    let folder = std::env::temp_dir().join(format!("reef-plan-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let write = |name: &str, text: &str| {
        let path = folder.join(name);
        std::fs::write(&path, text).unwrap();
        path
    };
    let table = write(
        "rows.csv",
        "# comment\ncase_id,engine,config_file,tp,kv_available_gib,kv_tokens,started\n\
         A,vLLM,no-such-model,1,10,100,yes\nB,vLLM,Llama-3.1-8B\nC,,,,,,\n\
         D,vLLM,Llama-3.1-8B,99999999999999999999,1e9,x,maybe\nE,SGLang,Llama-3.1-8B,0,-5,0,no\n\
         F,vLLM,broken,1,10,5,yes\nG,TensorRT-LLM,Qwen3-8B,1,10,72800,yes\n",
    );
    write("broken.json", r#"{"num_hidden_layers": "many"}"#);
    let score = score(&table, Some(&folder)).unwrap();
    let error = |index: usize| score.rows[index].error.clone().unwrap_or_default();
    assert_eq!(score.rows.len(), 7);
    assert!(error(0).contains("no-such-model"), "{}", error(0));
    assert_eq!(error(1), "");
    assert!(error(2).contains("engine"), "{}", error(2));
    assert!(error(5).contains("num_hidden_layers = \"many\""), "{}", error(5));
    // 10 GiB / (147,456 B * 32) = 2,275 blocks.
    assert_eq!(score.rows[6].exact, Some(true), "{:?}", score.rows[6]);
    let no_columns = write("empty.csv", "a,b\n1,2\n");
    assert!(reef_plan::score::score(&no_columns, None).is_err());
    assert!(reef_plan::score::score(&folder.join("absent.csv"), None).is_err());
    std::fs::remove_dir_all(&folder).unwrap();
}

/// Cells cut, doubled and swapped at random places: whatever comes out, it comes out.
#[test]
fn no_table_panics() {
    let text = std::fs::read_to_string(data("cases.csv")).unwrap();
    let folder = std::env::temp_dir().join(format!("reef-plan-noise-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let path = folder.join("noise.csv");
    let mut state = 0x9E37_79B9_7F4A_7C15_u64;
    let mut random = |below: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state % below as u64) as usize
    };
    let noise =
        ["-1", "0", "1e308", "99999999999999999999", "NaN", "~", "K ", "yes", ",", "\"", "k=99"];
    for _ in 0..150 {
        let header_end = text.find("\nC001").unwrap();
        let mut cells: Vec<String> = text[header_end..].split(',').map(str::to_string).collect();
        for _ in 0..60 {
            let at = random(cells.len());
            cells[at] = match random(3) {
                0 => noise[random(noise.len())].to_string(),
                1 => String::new(),
                _ => cells[random(cells.len())].clone(),
            };
        }
        let noisy = format!("{}{}", &text[..header_end], cells.join(","));
        std::fs::write(&path, noisy).unwrap();
        let _ = score(&path, None);
    }
    std::fs::remove_dir_all(&folder).unwrap();
}

//! Rows of `data/more_cases.csv`: start-ups of models, engines and versions that `cases.csv` does not have,
//! each with the address of its source. Every one closes.

use std::path::{Path, PathBuf};

use reef_plan::score::{Score, score};

fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name)
}

fn scored(table: &Path) -> Score {
    score(table, Some(&data("more_configs"))).unwrap()
}

#[test]
fn every_row_closes() {
    let score = scored(&data("more_cases.csv"));
    assert!(score.rows.len() >= 16);
    for row in &score.rows {
        assert_eq!(row.error, None, "{}", row.case_id);
        assert!(!row.checks.is_empty(), "{}", row.case_id);
        for check in &row.checks {
            let (predicted, reported) = (check.predicted, check.reported);
            println!("{} {} {predicted:.2} {reported:.2}", row.case_id, check.metric);
            assert!(check.exact, "{} {} {predicted} {reported}", row.case_id, check.metric);
        }
        let start = row.starts.as_ref().expect("every row says whether it started");
        assert_eq!(start.right, Some(true), "{}", row.case_id);
    }
}

/// What people write in cells: each row is read, or says what it cannot read.
#[test]
fn odd_cells_are_read_or_named() {
    let table = std::env::temp_dir().join(format!("reef-odd-{}.csv", std::process::id()));
    let columns = "case_id,engine,engine_version,gpu,gpu_total_gib,tp,kv_cache_dtype,max_model_len,\
                   kv_available_gib,kv_tokens,config_file,started";
    let rows = [
        // 10 GiB / (131,072 B * 16) = 5,120 blocks.
        "A,vllm,v0.11.1rc2.dev3+gabc,nvidia a100-SXM4-80gb,,,float16,8192,10,\"81,920\",Llama-3.1-8B,yes",
        "B,VLLM,v0.6.3.post1,Tesla T4,14.56,1,auto,8192,10.00,81920,configs/llama-3.1-8b.json,YES",
        "C,vLLM,,RTX 4070 Laptop 8GB,,1,fp8_e4m3,8192,10,163840,Llama-3.1-8B,yes",
        "D,vLLM,0.11,,,1,turboquant_k8v4,8192,10,163840,Llama-3.1-8B,yes",
        "E,vLLM,0.11,,,1,auto,8192,10,163840,no-such-model,yes",
        "F,vLLM",
    ];
    std::fs::write(&table, format!("{columns}\n{}\n", rows.join("\n"))).unwrap();
    let score = scored(&table);
    std::fs::remove_file(&table).unwrap();
    for row in &score.rows[..3] {
        assert_eq!((&row.error, row.exact), (&None, Some(true)), "{}", row.case_id);
    }
    assert!(score.rows[2].end_to_end.is_none(), "a laptop's part is not the desktop's");
    let error = |index: usize| score.rows[index].error.clone().unwrap_or_default();
    assert!(error(3).contains("kv_cache_dtype = `turboquant_k8v4`"), "{}", error(3));
    assert!(error(4).contains("no-such-model"), "{}", error(4));
    assert!(error(5).contains("config_file"), "{}", error(5));
}

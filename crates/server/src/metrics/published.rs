//! What is written about metrics elsewhere names metrics that exist.

use std::collections::BTreeSet;

use serde_json::Value;

use super::Exposition;
use super::tests::{metrics, sample};

const PREFIXES: [&str; 3] = ["vllm:", "reef:", "process_"];

/// Names of metrics in `text`, as far as they have one of our prefixes.
fn names(text: &str) -> BTreeSet<String> {
    let part_of_name = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == ':';
    let words = text.split(|c: char| !part_of_name(c));
    let ours = words.filter(|word| PREFIXES.iter().any(|prefix| word.starts_with(prefix)));
    ours.filter(|word| !word.ends_with(':')).map(str::to_owned).collect()
}

/// Every series' name, every family's, and every label's.
fn exported() -> (BTreeSet<String>, BTreeSet<String>, BTreeSet<String>) {
    let metrics = metrics();
    let seconds = std::time::Duration::from_secs(1);
    let ok = axum::http::StatusCode::OK;
    metrics.0.answered(&axum::http::Method::GET, Some("/health"), ok, seconds);
    let text = metrics.render(Some(sample()), Exposition::Text);
    let lines = || text.lines().filter(|line| !line.starts_with('#'));
    let series = lines().filter_map(|line| line.split(['{', ' ']).next()).map(str::to_owned);
    let families = text.lines().filter_map(|line| line.strip_prefix("# TYPE "));
    let families = families.filter_map(|line| line.split(' ').next()).map(str::to_owned);
    let labels = lines().flat_map(|line| {
        let parts = line.split(['{', ',']).skip(1);
        parts.filter_map(|part| Some(part.split_once("=\"")?.0.to_owned()))
    });
    (series.collect(), families.collect(), labels.collect())
}

#[test]
fn the_table_lists_every_family_once() {
    let table = include_str!("../../../../docs/metrics.md");
    let (_, families, _) = exported();
    let rows = table.lines().filter_map(|line| line.strip_prefix("| `"));
    let listed: Vec<&str> = rows.filter_map(|row| row.split('`').next()).collect();
    let distinct: BTreeSet<String> = listed.iter().map(|name| (*name).to_owned()).collect();
    assert_eq!(listed.len(), distinct.len(), "a family is listed twice");
    let (missing, unknown): (Vec<_>, Vec<_>) =
        (families.difference(&distinct).collect(), distinct.difference(&families).collect());
    assert!(missing.is_empty() && unknown.is_empty(), "missing {missing:?}, unknown {unknown:?}");
}

#[test]
fn alerts_are_about_what_there_is() {
    let alerts = include_str!("../../../../deploy/prometheus/alerts.yml");
    let (series, ..) = exported();
    let asked = names(alerts);
    assert!(asked.len() > 6);
    let unknown: Vec<&String> = asked.difference(&series).collect();
    assert!(unknown.is_empty(), "{unknown:?}");
}

#[test]
fn the_dashboard_imports_and_asks_for_what_there_is() {
    let text = include_str!("../../../../deploy/grafana/reef.json");
    let dashboard: Value = serde_json::from_str(text).unwrap();
    assert!(dashboard["id"].is_null(), "it gets its id on import");
    assert!(dashboard["schemaVersion"].as_u64().unwrap() >= 39);
    let variables = dashboard["templating"]["list"].as_array().unwrap();
    let source = variables.iter().find(|of| of["type"] == "datasource").unwrap();
    assert_eq!((&source["name"], &source["query"]), (&"datasource".into(), &"prometheus".into()));
    let mut known: BTreeSet<&str> =
        variables.iter().map(|of| of["name"].as_str().unwrap()).collect();
    known.extend(["__rate_interval", "__range"]);
    let (series, _, labels) = exported();
    let mut ids = BTreeSet::new();
    let mut asked = BTreeSet::new();
    for panel in dashboard["panels"].as_array().unwrap() {
        assert!(ids.insert(panel["id"].as_u64().unwrap()), "ids are unique: {panel}");
        let place = &panel["gridPos"];
        assert!(place["x"].as_u64().unwrap() + place["w"].as_u64().unwrap() <= 24, "{place}");
        if panel["type"] == "row" {
            continue;
        }
        assert_eq!(panel["datasource"]["uid"], "${datasource}");
        let targets = panel["targets"].as_array().unwrap();
        assert!(!targets.is_empty());
        for target in targets {
            let expression = target["expr"].as_str().unwrap();
            asked.extend(names(expression));
            for (_, rest) in expression.match_indices('$').map(|(at, _)| expression.split_at(at)) {
                let word = |c: char| !c.is_ascii_alphanumeric() && c != '_';
                let name = rest[1..].split(word).next().unwrap();
                assert!(known.contains(name), "{expression}");
            }
            let legend = target["legendFormat"].as_str().unwrap();
            for label in legend.split("{{").skip(1).map(|rest| rest.split("}}").next().unwrap()) {
                assert!(label == "instance" || labels.contains(label), "{legend}");
            }
            let depth =
                |open, close| expression.matches(open).count() == expression.matches(close).count();
            assert!(depth('(', ')') && depth('{', '}') && depth('[', ']'), "{expression}");
        }
    }
    assert!(asked.len() > 30);
    let unknown: Vec<&String> = asked.difference(&series).collect();
    assert!(unknown.is_empty(), "{unknown:?}");
}

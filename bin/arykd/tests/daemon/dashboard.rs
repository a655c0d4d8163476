//! Checks that the metrics in the queries of `contrib/grafana/aryk.json` exist.

use crate::harness::Daemon;
use crate::metrics::scrape;
use crate::open_metrics::Exposition;
use serde_json::{Value, json};
use std::collections::BTreeSet;

/// The PromQL functions that the dashboard uses.
const FUNCTIONS: &[&str] = &["sum", "rate", "topk", "histogram_quantile", "label_values", "by"];

/// Collects the queries of all panels and variables.
fn queries(value: &Value, into: &mut Vec<String>) {
    match value {
        Value::Object(members) => {
            for (name, value) in members {
                match value {
                    Value::String(text) if name == "expr" || name == "query" => into.push(text.clone()),
                    value => queries(value, into),
                }
            }
        }
        Value::Array(elements) => elements.iter().for_each(|element| queries(element, into)),
        _ => {}
    }
}

/// A metric in a query, with its label matchers.
#[derive(Debug, PartialEq, Eq)]
struct Selector {
    metric: String,
    /// Names, and values of exact matchers.
    labels: Vec<(String, Option<String>)>,
}

/// Parses a query into its selectors, and the labels that it groups by.
fn read(query: &str) -> (Vec<Selector>, BTreeSet<String>) {
    let (mut selectors, mut groups) = (Vec::<Selector>::new(), BTreeSet::new());
    let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '$';
    let mut rest = query;
    let mut last = String::new();
    while let Some(c) = rest.chars().next() {
        if is_word(c) {
            let end = rest.find(|c| !is_word(c)).unwrap_or(rest.len());
            last = rest[..end].to_owned();
            if last.starts_with("aryk_") {
                selectors.push(Selector { metric: last.clone(), labels: Vec::new() });
            } else {
                let is_known = FUNCTIONS.contains(&&*last) || last.starts_with(|c: char| c.is_ascii_digit());
                assert!(is_known || last.starts_with('$') || query.contains(", disk)"), "{last} in {query}");
            }
            rest = &rest[end..];
            continue;
        }
        let skip = match c {
            '{' => {
                let end = rest.find('}').expect("braces match");
                let of = selectors.last_mut().expect("labels follow a metric");
                of.labels.extend(rest[1..end].split(',').map(matcher));
                end + 1
            }
            '(' if last == "by" => {
                let end = rest.find(')').expect("parentheses match");
                groups.extend(rest[1..end].split(',').map(|label| label.trim().to_owned()));
                end + 1
            }
            '[' => rest.find(']').expect("brackets match") + 1,
            c => c.len_utf8(),
        };
        if !c.is_whitespace() {
            last.clear();
        }
        rest = &rest[skip..];
    }
    (selectors, groups)
}

fn matcher(text: &str) -> (String, Option<String>) {
    let (name, value) = text.split_once('=').expect("a matcher");
    (name.to_owned(), value.strip_prefix('"').map(|value| value.trim_end_matches('"').to_owned()))
}

fn has(live: &Exposition, Selector { metric, labels }: &Selector) -> bool {
    live.samples.iter().any(|(name, of, _)| {
        let fits = |(label, value): &(String, Option<String>)| {
            of.get(label).is_some_and(|is| value.as_ref().is_none_or(|value| value == is))
        };
        name == metric && labels.iter().all(fits)
    })
}

#[test]
fn all_metrics_of_the_dashboard_exist() {
    let daemon = Daemon::start(&["--metrics", "0"]);
    let disk = json!({"name": "d", "block_size": 512, "num_blocks": 2048});
    daemon.call("bdev_malloc_create", disk).unwrap();
    daemon.call("vhost_create_blk_controller", json!({"ctrlr": "c", "dev_name": "d"})).unwrap();
    daemon.call("bdev_qos_group_create", json!({"name": "g"})).unwrap();
    daemon.call("bdev_qos_group_set_limit", json!({"name": "g", "rw_ios_per_sec": 100})).unwrap();
    daemon.call("vhost_create_scsi_controller", json!({"ctrlr": "s"})).unwrap();
    let live = scrape(daemon.port());
    let dashboard = include_str!("../../../../contrib/grafana/aryk.json");
    let mut all = Vec::new();
    queries(&serde_json::from_str(dashboard).unwrap(), &mut all);
    all.retain(|query| query != "prometheus");
    assert!(all.len() > 15, "{all:?}");
    let mut named = BTreeSet::new();
    for query in &all {
        let (selectors, groups) = read(query);
        assert!(!selectors.is_empty(), "{query}");
        for selector in &selectors {
            assert!(has(&live, selector), "{selector:?} in {query}");
            for group in &groups {
                let grouped =
                    Selector { metric: selector.metric.clone(), labels: vec![(group.clone(), None)] };
                assert!(has(&live, &grouped), "{grouped:?} in {query}");
            }
            named.insert(selector.metric.clone());
        }
    }
    assert!(named.len() > 10, "{named:?}");
}

#[test]
fn a_missing_metric_is_detected() {
    let live = Exposition::read("# TYPE aryk_a gauge\naryk_a{x=\"1\"} 2\n# EOF\n").unwrap();
    let found = |query: &str| read(query).0.iter().all(|selector| has(&live, selector));
    assert!(found("sum by (x) (rate(aryk_a{x=~\"$disk\"}[5m]))") && found("aryk_a{x=\"1\"}"));
    assert!(!found("sum(aryk_b)") && !found("aryk_a{y=~\".\"}") && !found("aryk_a{x=\"2\"}"));
    assert_eq!(read("sum by (x, y) (aryk_a)").1, BTreeSet::from(["x".to_owned(), "y".to_owned()]));
}

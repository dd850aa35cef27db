//! The rules. Each is a small function from a file, or from all files, to findings.

use super::code;
use super::{Finding, Source};

const FILE_LINES_MAX: usize = 600;
/// Kernels keep the variants of one loop together.
const KERNEL_FILE_LINES_MAX: usize = 900;
const FUNCTION_LINES_MAX: usize = 70;
const ARCHITECTURE_LINES_MAX: usize = 200;
const FILE_BYTES_MAX: u64 = 1 << 20;
/// Names that say nothing about what is inside.
const EMPTY_NAMES: [&str; 6] = ["utils", "util", "common", "helpers", "helper", "manager"];
/// Left over from work in progress. Spelled in halves, so that this file is clean.
const LEFTOVERS: [&str; 3] = ["dbg!(", "todo!(", "unimplemented!("];
/// Libraries report through return values; `reef` prints through output.rs, which survives a closed
/// pipe.
const PRINTS: [&str; 4] = ["println!(", "print!(", "eprintln!(", "eprint!("];
/// Where `unsafe` may stand: arithmetic, the mapped model, the arena.
const UNSAFE_HOMES: [&str; 3] =
    ["crates/kernels/", "crates/model/src/gguf/map.rs", "crates/kv/src/arena.rs"];
/// First folders of paths that exist on one machine only.
const MACHINE_FOLDERS: [&str; 5] = ["work", "tmp", "home", "root", "Users"];
/// Hosts of registries: mirrors exist, and clients know theirs.
const REGISTRY_HOSTS: [(&str, &str); 4] =
    [("pypi", ".org"), ("crates", ".io"), ("pythonhosted", ".org"), ("npmjs", ".org")];

/// Rules about one file.
pub fn check_file(source: &Source, findings: &mut Vec<Finding>) {
    let mut report = |rule, line, message: String| {
        findings.push(Finding { rule, subject: source.path.clone(), line, message });
    };
    if source.bytes > FILE_BYTES_MAX {
        report("file-size", 0, format!("{} bytes, more than {FILE_BYTES_MAX}", source.bytes));
    }
    for part in source.path.split('/') {
        let name = part.split('.').next().unwrap_or(part);
        if name.split(['_', '-']).any(|word| EMPTY_NAMES.contains(&word)) {
            report("empty-name", 0, format!("`{part}` does not say what is inside; name the noun"));
        }
    }
    if !source.path.ends_with("Cargo.lock") {
        for (line, message) in foreign_words(&source.text) {
            report("machine-words", line, message);
        }
    }
    let is_kernel = source.path.starts_with("crates/kernels/");
    let lines_max = if is_kernel { KERNEL_FILE_LINES_MAX } else { FILE_LINES_MAX };
    let lines = source.text.lines().count();
    if (source.path.ends_with(".rs") || source.path.ends_with(".py")) && lines > lines_max {
        report("file-length", 0, format!("{lines} lines, more than {lines_max}; split it by noun"));
    }
    if source.path.ends_with(".rs") {
        check_rust(source, findings);
    }
}

/// Absolute paths of a machine and hosts of registries, each with its line.
fn foreign_words(text: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    for (index, line) in text.lines().enumerate() {
        for folder in MACHINE_FOLDERS {
            let path = format!("/{folder}/");
            let starts = line.match_indices(&path).any(|(at, _)| {
                // As the middle of a relative path it is no machine's.
                !line[..at].ends_with(|c: char| c.is_alphanumeric() || "._-}*/".contains(c))
            });
            if starts {
                found.push((index + 1, format!("`{path}` is a path of one machine")));
            }
        }
        for (name, end) in REGISTRY_HOSTS {
            if line.contains(&format!("{name}{end}")) {
                found.push((
                    index + 1,
                    format!("host of a registry ({name}); name the package only"),
                ));
            }
        }
    }
    found
}

fn check_rust(source: &Source, findings: &mut Vec<Finding>) {
    let blanked = code::blank(&source.text);
    for function in code::functions(&blanked) {
        if function.lines > FUNCTION_LINES_MAX {
            findings.push(Finding {
                rule: "function-length",
                subject: format!("{}:{}", source.path, function.name),
                line: function.line,
                message: format!("{} lines, more than {FUNCTION_LINES_MAX}", function.lines),
            });
        }
    }
    let is_library = ["kv", "kernels", "model", "engine", "cli"]
        .iter()
        .any(|name| source.path.starts_with(&format!("crates/{name}/src/")));
    let is_test = source.path.ends_with("tests.rs") || source.path.contains("/tests/");
    let may_be_unsafe = UNSAFE_HOMES.iter().any(|home| source.path.starts_with(home));
    let mut in_tests = is_test;
    for (index, line) in blanked.lines().enumerate() {
        in_tests |= line.trim_start().starts_with("#[cfg(test)]");
        let mut report = |rule, message: String| {
            let subject = source.path.clone();
            findings.push(Finding { rule, subject, line: index + 1, message });
        };
        if let Some(word) = LEFTOVERS.iter().find(|word| has_word(line, word)) {
            report("leftover", format!("{word}…) is left over from work"));
        }
        let prints = PRINTS.iter().find(|word| has_word(line, word));
        if let (true, false, Some(word)) = (is_library, in_tests, prints) {
            report("print", format!("{word}…): libraries return, reef prints through output.rs"));
        }
        if !may_be_unsafe && has_word(line, "unsafe ") {
            report("unsafe", "unsafe code has three homes, and this is none of them".into());
        }
    }
}

/// Whether `word` occurs in the line, not as the end of a longer word.
fn has_word(line: &str, word: &str) -> bool {
    line.match_indices(word)
        .any(|(at, _)| !line[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_'))
}

/// Rules about the repository as a whole.
pub fn check_repository(sources: &[Source], findings: &mut Vec<Finding>) {
    if let Some(source) = sources.iter().find(|source| source.path == "Cargo.toml") {
        check_dependency_reasons(source, findings);
    }
    if let Some(source) = sources.iter().find(|source| source.path == "ARCHITECTURE.md") {
        check_architecture(source, sources, findings);
    }
}

/// Every dependency of the workspace says why it is there.
fn check_dependency_reasons(source: &Source, findings: &mut Vec<Finding>) {
    let mut in_table = false;
    for (index, line) in source.text.lines().enumerate() {
        if line.starts_with('[') {
            in_table = line.trim() == "[workspace.dependencies]";
        }
        let is_foreign = line.contains('=') && !line.contains("path =");
        if in_table && is_foreign && !line.starts_with('#') && !line.contains(" # ") {
            findings.push(Finding {
                rule: "dependency-reason",
                subject: source.path.clone(),
                line: index + 1,
                message: "a dependency without a reason; write it behind ` # `".into(),
            });
        }
    }
}

/// The map is short and shows the land: each crate and each folder at the root is named in it, and
/// what it names in backticks with a `/` exists.
fn check_architecture(source: &Source, sources: &[Source], findings: &mut Vec<Finding>) {
    let mut report = |line, message| {
        let subject = source.path.clone();
        findings.push(Finding { rule: "architecture", subject, line, message });
    };
    let lines = source.text.lines().count();
    if lines > ARCHITECTURE_LINES_MAX {
        report(0, format!("{lines} lines, more than {ARCHITECTURE_LINES_MAX}"));
    }
    let mut folders: Vec<&str> = sources.iter().filter_map(|source| folder(&source.path)).collect();
    folders.dedup();
    for folder in &folders {
        if !source.text.contains(folder) {
            report(0, format!("the code map does not name {folder}/"));
        }
    }
    for (index, line) in source.text.lines().enumerate() {
        for name in line.split('`').skip(1).step_by(2) {
            let is_path = folders.iter().any(|folder| {
                name.strip_prefix(folder.split('/').next().unwrap_or(folder))
                    .is_some_and(|rest| rest.starts_with('/'))
            });
            // The start of a name is enough: decisions go by their number.
            let exists = sources.iter().any(|source| source.path.starts_with(name));
            let is_plain = !name.contains([' ', '*', '{', '<']);
            if is_path && is_plain && !exists {
                report(index + 1, format!("the code map names `{name}`, which is not there"));
            }
        }
    }
}

/// The folder that the map must name for a file: its crate, or its first folder (hidden ones aside).
fn folder(path: &str) -> Option<&str> {
    let (first, rest) = path.split_once('/')?;
    match rest.split_once('/') {
        _ if first.starts_with('.') => None,
        Some((name, _)) if first == "crates" => Some(&path[..first.len() + 1 + name.len()]),
        _ => Some(first),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn breaches(path: &str, text: &str) -> Vec<&'static str> {
        let source = Source { path: path.into(), text: text.into(), bytes: text.len() as u64 };
        let mut findings = Vec::new();
        check_file(&source, &mut findings);
        findings.iter().map(|finding| finding.rule).collect()
    }

    #[test]
    fn each_rule_about_a_file_finds_its_breach() {
        assert_eq!(breaches("crates/kv/src/utils.rs", ""), ["empty-name"]);
        assert_eq!(breaches("crates/kv/src/a.rs", &"\n".repeat(601)), ["file-length"]);
        assert!(breaches("crates/kernels/src/a.rs", &"\n".repeat(601)).is_empty());
        let long = format!("fn long() {{{}}}", "\n".repeat(70));
        assert_eq!(breaches("crates/kv/src/a.rs", &long), ["function-length"]);
        assert_eq!(breaches("crates/kv/src/a.rs", &["d", "bg!(1);"].concat()), ["leftover"]);
        assert_eq!(breaches("crates/kv/src/a.rs", &["print", "ln!();"].concat()), ["print"]);
        assert_eq!(breaches("crates/kv/src/a.rs", &["unsafe", " { x() }"].concat()), ["unsafe"]);
        assert_eq!(breaches("a.md", &["see /t", "mp/x"].concat()), ["machine-words"]);
        assert_eq!(breaches("a.md", &["https://py", "pi.org"].concat()), ["machine-words"]);
    }

    #[test]
    fn words_in_comments_tests_and_relative_paths_are_no_breach() {
        let text =
            ["// d", "bg!(1) unsafe \n#[cfg(test)]\nmod t { fn f() { print", "ln!(); } }"].concat();
        assert!(breaches("crates/kv/src/a.rs", &text).is_empty());
        assert!(breaches("a.md", &["target/t", "mp/x"].concat()).is_empty());
    }

    #[test]
    fn dependencies_need_reasons() {
        let text = "[workspace.dependencies]\nours = { path = \"x\" }\na = \"1\" # why\nb = \"1\"\n[lints]\nc = 1\n";
        let source = Source { path: "Cargo.toml".into(), text: text.into(), bytes: 0 };
        let mut findings = Vec::new();
        check_repository(&[source], &mut findings);
        assert_eq!(findings.iter().map(|finding| finding.line).collect::<Vec<_>>(), [4]);
    }

    #[test]
    fn the_map_names_what_is_there_and_nothing_else() {
        let source =
            |path: &str, text: &str| Source { path: path.into(), text: text.into(), bytes: 0 };
        let sources = [
            source("ARCHITECTURE.md", "`crates/kv` and `crates/gone/src`, see `xtask/`"),
            source("crates/kv/src/lib.rs", ""),
            source("crates/model/src/lib.rs", ""),
            source("xtask/src/main.rs", ""),
        ];
        let mut findings = Vec::new();
        check_repository(&sources, &mut findings);
        let messages: Vec<&str> = findings.iter().map(|finding| finding.message.as_str()).collect();
        assert_eq!(messages.len(), 2, "{messages:?}");
        assert!(messages[0].contains("crates/model") && messages[1].contains("crates/gone/src"));
    }
}

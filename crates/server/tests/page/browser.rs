//! A headless Chromium, driven by its DevTools protocol over a pipe: JSON messages that end with a zero byte.

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

/// How long the browser may take for anything.
const PATIENCE: Duration = Duration::from_secs(40);

/// A browser with one page.
pub struct Browser {
    process: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    next: u64,
    session: Option<String>,
    /// What the page complained about: errors on the console, exceptions, violations of its policy.
    pub complaints: Vec<String>,
    /// Every address that it asked for.
    pub asked: Vec<String>,
    profile: PathBuf,
}

/// Where Chromium is; `None`: there is none.
pub fn find() -> Option<PathBuf> {
    let named = std::env::var_os("REEF_CHROMIUM").map(PathBuf::from);
    let names = ["chromium", "chromium-browser", "google-chrome", "google-chrome-stable"];
    let path = std::env::var_os("PATH").unwrap_or_default();
    let places = std::env::split_paths(&path);
    let known = places.flat_map(|place| names.map(|name| place.join(name)));
    named.into_iter().chain(known).find(|path| path.is_file())
}

impl Browser {
    /// Starts it with an empty page.
    pub fn start(chromium: &PathBuf, profile: PathBuf) -> Browser {
        std::fs::create_dir_all(&profile).unwrap();
        // The protocol's ends are descriptors 3 and 4.
        let script = "exec \"$0\" \"$@\" 3<&0 4>&1 </dev/null >/dev/null 2>/dev/null";
        let mut process = Command::new("sh")
            .args(["-c", script])
            .arg(chromium)
            .args(["--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu"])
            .args(["--no-first-run", "--disable-background-networking", "--disable-sync"])
            .args([
                "--disable-component-update",
                "--no-default-browser-check",
                "--disable-dev-shm-usage",
            ])
            .arg(format!("--user-data-dir={}", profile.display()))
            .arg("about:blank")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (input, output) = (process.stdin.take().unwrap(), process.stdout.take().unwrap());
        let output = BufReader::new(output);
        let (complaints, asked) = (Vec::new(), Vec::new());
        let mut browser =
            Browser { process, input, output, next: 0, session: None, complaints, asked, profile };
        let created = browser.call("Target.createTarget", json!({"url": "about:blank"}));
        let attach = json!({"targetId": created["targetId"], "flatten": true});
        let attached = browser.call("Target.attachToTarget", attach);
        browser.session = attached["sessionId"].as_str().map(str::to_string);
        for domain in ["Page", "Runtime", "Network", "Log"] {
            browser.call(&format!("{domain}.enable"), json!({}));
        }
        browser
    }

    /// Calls a method and waits for its result.
    pub fn call(&mut self, method: &str, parameters: Value) -> Value {
        self.next += 1;
        let mut message = json!({"id": self.next, "method": method, "params": parameters});
        if let Some(session) = &self.session {
            message["sessionId"] = json!(session);
        }
        self.input.write_all(message.to_string().as_bytes()).unwrap();
        self.input.write_all(&[0]).unwrap();
        loop {
            let message = self.read();
            if message["id"] == self.next {
                assert!(message.get("error").is_none(), "{method}: {message}");
                return message["result"].clone();
            }
        }
    }

    fn read(&mut self) -> Value {
        let mut bytes = Vec::new();
        self.output.read_until(0, &mut bytes).unwrap();
        assert_eq!(bytes.pop(), Some(0), "the browser has gone");
        let message: Value = serde_json::from_slice(&bytes).unwrap();
        self.hear(&message);
        message
    }

    fn hear(&mut self, message: &Value) {
        let what = &message["params"];
        match message["method"].as_str() {
            Some("Runtime.consoleAPICalled") if what["type"] == "error" => {
                self.complaints.push(what["args"].to_string());
            }
            Some("Runtime.exceptionThrown") => {
                self.complaints.push(what["exceptionDetails"].to_string());
            }
            Some("Log.entryAdded") if what["entry"]["level"] == "error" => {
                self.complaints.push(what["entry"].to_string());
            }
            Some("Network.requestWillBeSent") => {
                self.asked.push(what["request"]["url"].as_str().unwrap_or("").to_string());
            }
            _ => {}
        }
    }

    /// Opens `url`.
    pub fn open(&mut self, url: &str) {
        self.call("Page.navigate", json!({"url": url}));
    }

    /// The value of an expression; promises are awaited.
    pub fn value(&mut self, expression: &str) -> Value {
        let parameters =
            json!({"expression": expression, "returnByValue": true, "awaitPromise": true});
        let result = self.call("Runtime.evaluate", parameters);
        assert!(result.get("exceptionDetails").is_none(), "{expression}: {result}");
        result["result"]["value"].clone()
    }

    /// The text of an element.
    pub fn text(&mut self, id: &str) -> String {
        let text = self.value(&format!("document.getElementById({}).textContent", json!(id)));
        text.as_str().unwrap_or("").to_string()
    }

    /// Waits until an expression is true.
    pub fn until(&mut self, expression: &str) {
        let start = Instant::now();
        // A page that is just being opened has nothing in it yet.
        let tried = format!(
            "(() => {{ try {{ return Boolean({expression}) }} catch {{ return false }} }})()"
        );
        while self.value(&tried) != true {
            if start.elapsed() > PATIENCE {
                let page = self.value("document.body.innerText");
                panic!("not in time: {expression}\n{:?}\n{page}", self.complaints);
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// A window of so many pixels, light or dark.
    pub fn window(&mut self, width: u32, height: u32, scheme: &str, motion: &str) {
        let size = json!({"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600});
        self.call("Emulation.setDeviceMetricsOverride", size);
        let features = json!([
            {"name": "prefers-color-scheme", "value": scheme},
            {"name": "prefers-reduced-motion", "value": motion},
        ]);
        self.call("Emulation.setEmulatedMedia", json!({"features": features}));
    }

    /// Presses a key on what has the focus.
    pub fn press(&mut self, key: &str) {
        for kind in ["keyDown", "keyUp"] {
            self.call("Input.dispatchKeyEvent", json!({"type": kind, "key": key, "code": key}));
        }
    }

    /// The whole page as a PNG file in the folder named by `REEF_SCREENSHOTS`, where it is set.
    pub fn picture(&mut self, name: &str, whole: bool) {
        let Some(folder) = std::env::var_os("REEF_SCREENSHOTS") else { return };
        let parameters = json!({"format": "png", "captureBeyondViewport": whole});
        let shot = self.call("Page.captureScreenshot", parameters);
        let bytes = decoded(shot["data"].as_str().unwrap());
        std::fs::write(PathBuf::from(folder).join(format!("{name}.png")), bytes).unwrap();
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        // It may have gone by itself.
        let _ = self.process.kill();
        let _ = self.process.wait();
        let _ = std::fs::remove_dir_all(&self.profile);
    }
}

/// Base64 with padding.
fn decoded(text: &str) -> Vec<u8> {
    const LETTERS: &[u8] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let values = text.bytes().filter_map(|byte| LETTERS.iter().position(|letter| *letter == byte));
    let (mut bytes, mut bits, mut count) = (Vec::new(), 0_usize, 0);
    for value in values {
        bits = (bits << 6 | value) & 0xFFFF;
        count += 6;
        if count >= 8 {
            count -= 8;
            bytes.push((bits >> count) as u8);
        }
    }
    bytes
}

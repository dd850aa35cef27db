//! Asks a server over plain HTTP. A GET and its answer are all that is needed, so nothing but a socket is: TLS is
//! a proxy's (`reef serve` speaks none), and HTTP/1.0 leaves out chunks and kept connections.

use std::io::{Read as _, Write as _};
use std::net::{TcpStream, ToSocketAddrs as _};
use std::time::Duration;

use anyhow::{Context as _, bail};
use serde_json::Value;

/// Answers are shorter: a pool of thousands of cells and hundreds of requests takes some 200 KiB.
const ANSWER_BYTES_MAX: u64 = 16 << 20;
const PATIENCE: Duration = Duration::from_secs(5);

/// A server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Client {
    /// `host:port`.
    authority: String,
    /// What stands before every path: empty, or `/prefix`.
    prefix: String,
    key: Option<String>,
}

impl Client {
    /// For `http://host[:port][/prefix]`; the scheme may be left out.
    ///
    /// # Errors
    /// Another scheme, no host, or a key that no header can hold.
    pub fn new(url: &str, key: Option<String>) -> anyhow::Result<Client> {
        let rest = match url.split_once("://") {
            Some(("http", rest)) => rest,
            Some((scheme, _)) => {
                bail!(
                    "`{url}`: {scheme} is not spoken; give http://HOST:PORT (TLS: through a tunnel)"
                )
            }
            None => url,
        };
        let (host, path) = rest.split_once('/').map_or((rest, ""), |(host, path)| (host, path));
        let printable = |text: &str| text.bytes().all(|byte| byte.is_ascii_graphic());
        if host.is_empty() || !printable(rest) || host.contains(['@', '?', '#']) {
            bail!("`{url}` is no address of a server: give http://HOST:PORT");
        }
        if key.as_deref().is_some_and(|key| key.is_empty() || !printable(key)) {
            bail!("--key: a key is printable ASCII without spaces");
        }
        let has_port = host.rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok());
        let authority = if has_port { host.to_string() } else { format!("{host}:80") };
        let path = path.trim_end_matches('/');
        let prefix = if path.is_empty() { String::new() } else { format!("/{path}") };
        Ok(Client { authority, prefix, key })
    }

    /// The body of the answer to `GET path`.
    ///
    /// # Errors
    /// It cannot be reached, or answers with a failure: what its body says.
    pub fn get(&self, path: &str) -> anyhow::Result<String> {
        let cannot = || format!("cannot reach http://{}{}", self.authority, self.prefix);
        let answer = self.exchange(path).with_context(cannot)?;
        let text = String::from_utf8(answer).context("the answer is no text")?;
        let (head, body) = text.split_once("\r\n\r\n").context("the answer is no HTTP")?;
        let status = head.split(' ').nth(1).and_then(|status| status.parse::<u16>().ok());
        match status.context("the answer is no HTTP")? {
            200 => Ok(body.to_string()),
            401 | 403 => bail!("the server asks for its admin key (--key): {}", reason(body)),
            status => bail!("the server answered {status}: {}", reason(body)),
        }
    }

    fn exchange(&self, path: &str) -> std::io::Result<Vec<u8>> {
        let mut last = std::io::Error::other("the name stands for no address");
        for address in self.authority.to_socket_addrs()? {
            match TcpStream::connect_timeout(&address, PATIENCE) {
                Ok(stream) => return self.ask(stream, path),
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    fn ask(&self, mut stream: TcpStream, path: &str) -> std::io::Result<Vec<u8>> {
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        let key = self.key.as_ref().map(|key| format!("Authorization: Bearer {key}\r\n"));
        let head = format!(
            "GET {}{path} HTTP/1.0\r\nHost: {}\r\n{}\r\n",
            self.prefix,
            self.authority,
            key.unwrap_or_default()
        );
        stream.write_all(head.as_bytes())?;
        let mut answer = Vec::new();
        stream.take(ANSWER_BYTES_MAX).read_to_end(&mut answer)?;
        Ok(answer)
    }
}

/// What an error's body says, in one line that a terminal can show.
fn reason(body: &str) -> String {
    let document: Option<Value> = serde_json::from_str(body).ok();
    let message = document.as_ref().and_then(|body| body["error"]["message"].as_str());
    let line = message.unwrap_or(body).chars().filter(|letter| !letter.is_control());
    line.take(200).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_and_others_refused() {
        let client = |url: &str| Client::new(url, None).map(|of| (of.authority, of.prefix));
        let good = |url: &str| client(url).unwrap();
        assert_eq!(good("http://127.0.0.1:8080"), ("127.0.0.1:8080".into(), String::new()));
        assert_eq!(good("localhost:1/a/b/"), ("localhost:1".into(), "/a/b".into()));
        assert_eq!(good("[::1]"), ("[::1]:80".into(), String::new()));
        for url in ["https://host", "", "http:///x", "http://a b", "http://user@host"] {
            assert!(client(url).is_err(), "{url}");
        }
        assert!(Client::new("host", Some("two words".into())).is_err());
    }

    #[test]
    fn an_answer_is_read_and_a_failure_told() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let server = std::thread::spawn(move || {
            let answers = [
                "200 OK\r\n\r\n{\"a\": 1}",
                "401 Unauthorized\r\n\r\n{\"error\": {\"message\": \"no\\u001b[31m key\"}}",
            ];
            for answer in answers {
                let (mut stream, _) = listener.accept().unwrap();
                let mut head = [0; 1024];
                let count = stream.read(&mut head).unwrap();
                let head = String::from_utf8_lossy(&head[..count]).into_owned();
                assert!(head.contains("Authorization: Bearer k\r\n"), "{head}");
                stream.write_all(format!("HTTP/1.0 {answer}").as_bytes()).unwrap();
            }
        });
        let client = Client::new(&url, Some("k".into())).unwrap();
        assert_eq!(client.get("/v1/pool").unwrap(), "{\"a\": 1}");
        let error = client.get("/v1/pool").unwrap_err().to_string();
        assert!(error.contains("--key") && error.ends_with("no[31m key"), "{error}");
        server.join().unwrap();
        assert!(client.get("/v1/pool").unwrap_err().to_string().starts_with("cannot reach"));
    }
}

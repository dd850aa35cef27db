//! `tcp://HOST:PORT`, as ZMQ writes addresses to bind.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::str::FromStr;

/// An address to listen at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Endpoint(pub SocketAddr);

impl Endpoint {
    /// Whether only this machine can connect.
    pub fn is_loopback(&self) -> bool {
        self.0.ip().is_loopback()
    }
}

impl FromStr for Endpoint {
    type Err = String;

    /// # Errors
    /// Another transport than TCP, a host that is neither an IP address nor `localhost` or `*`, no port.
    fn from_str(text: &str) -> Result<Endpoint, String> {
        let wanted =
            || format!("'{text}': write tcp://HOST:PORT, for example tcp://127.0.0.1:5557");
        let address = text.strip_prefix("tcp://").ok_or_else(wanted)?;
        let (host, port) = address.rsplit_once(':').ok_or_else(wanted)?;
        let port: u16 = port.parse().map_err(|_| wanted())?;
        let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
        let ip = match bare {
            "localhost" => IpAddr::V4(Ipv4Addr::LOCALHOST),
            "*" => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
            host => host.parse().map_err(|_| {
                format!("'{text}': '{host}' is no IP address; write one, localhost or *")
            })?,
        };
        Ok(Endpoint(SocketAddr::new(ip, port)))
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "tcp://{}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_and_written() {
        for (text, written, loopback) in [
            ("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5557", true),
            ("tcp://localhost:0", "tcp://127.0.0.1:0", true),
            ("tcp://*:5557", "tcp://0.0.0.0:5557", false),
            ("tcp://[::1]:1", "tcp://[::1]:1", true),
            ("tcp://10.1.2.3:80", "tcp://10.1.2.3:80", false),
        ] {
            let endpoint: Endpoint = text.parse().unwrap();
            assert_eq!(
                (endpoint.to_string().as_str(), endpoint.is_loopback()),
                (written, loopback)
            );
        }
    }

    #[test]
    fn others_are_refused_with_the_mend() {
        for text in ["", "ipc:///x", "tcp://127.0.0.1", "tcp://127.0.0.1:x", "tcp://host:70000"] {
            let error = text.parse::<Endpoint>().unwrap_err();
            assert!(error.contains("tcp://HOST:PORT") && error.contains(text), "{error}");
        }
        let error = "tcp://node-1:5557".parse::<Endpoint>().unwrap_err();
        assert!(error.contains("'node-1' is no IP address"), "{error}");
    }
}

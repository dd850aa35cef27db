//! One request on one connection: sent, read and checked, or left.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use tokio::time::timeout;

use crate::fault::Fault;
use crate::sse::{Events, Strictness};
use crate::traffic::{Ask, Leave};
use crate::transcript::Transcript;
use crate::wire::{Connection, Head};

/// A whole answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Answer {
    /// Of each choice.
    pub texts: Vec<String>,
    /// As the server told, where it did.
    pub prompt_tokens: Option<usize>,
    /// Of all choices.
    pub completion_tokens: usize,
    /// When it was asked.
    pub asked_at: Instant,
    /// When each chunk that brought generated tokens came.
    pub tokens_at: Vec<Instant>,
}

impl Answer {
    /// From asking to the first generated token, in milliseconds; 0 where none came.
    pub fn ttft_ms(&self) -> f64 {
        let first = self.tokens_at.first();
        first.map_or(0.0, |first| first.duration_since(self.asked_at).as_secs_f64() * 1e3)
    }
}

/// How an exchange ended.
#[derive(Clone, Debug, PartialEq)]
pub enum Ending {
    /// In order.
    Answered(Answer),
    /// The client went, as planned.
    Left,
    /// Not in order.
    Failed(Fault),
}

/// A client: at most one connection, used again where the server keeps it.
pub struct Client {
    address: SocketAddr,
    strictness: Strictness,
    patience: Duration,
    connection: Option<Connection>,
    /// Times that a kept connection turned out to be closed.
    pub reconnected: usize,
}

impl Client {
    /// A client that waits `patience` for each read.
    pub fn new(address: SocketAddr, strictness: Strictness, patience: Duration) -> Client {
        Client { address, strictness, patience, connection: None, reconnected: 0 }
    }

    /// A plain request; status and body.
    ///
    /// # Errors
    /// The connection broke, or nothing came.
    pub async fn fetch(
        &mut self,
        method: &str,
        path: &str,
        body: &str,
    ) -> Result<(u16, Vec<u8>), Fault> {
        let (mut connection, head) = self.begin(method, path, body).await?;
        let rest = patiently(self.patience, connection.rest()).await?;
        self.connection = Some(connection).filter(|_| head.keep_alive);
        Ok((head.status, rest))
    }

    /// Asks, and reads to the end or to where it leaves.
    pub async fn exchange(&mut self, ask: &Ask) -> Ending {
        let work = self.ask(ask);
        let ended = match ask.leave {
            // Dropping the work drops its connection.
            Some((Leave::After(time), _)) => match timeout(time, work).await {
                Ok(ended) => ended,
                Err(_) => return Ending::Left,
            },
            _ => work.await,
        };
        match ended {
            Ok(Some(answer)) => Ending::Answered(answer),
            Ok(None) => Ending::Left,
            Err(fault) => Ending::Failed(fault),
        }
    }

    /// `None`: left.
    async fn ask(&mut self, ask: &Ask) -> Result<Option<Answer>, Fault> {
        let asked_at = Instant::now();
        let (mut connection, head) = self.begin("POST", ask.path, &ask.body.to_string()).await?;
        if head.status != 200 {
            let body = patiently(self.patience, connection.rest()).await?;
            return Err(Fault::Status(head.status, String::from_utf8_lossy(&body).into_owned()));
        }
        if head.content_type != "text/event-stream" {
            return Err(Fault::Malformed(format!("content-type `{}`", head.content_type)));
        }
        let mut transcript = Transcript::new(ask.wanted.clone(), self.strictness);
        let mut events = Events::new(self.strictness);
        let (mut payloads, mut read, mut tokens_at) = (Vec::new(), 0, Vec::new());
        while let Some(piece) = patiently(self.patience, connection.piece()).await? {
            events.feed(&piece, &mut payloads)?;
            for payload in payloads.drain(..) {
                if transcript.take(&payload)? {
                    tokens_at.push(Instant::now());
                }
            }
            read += 1;
            match ask.leave {
                Some((Leave::Events(most), by_reset)) if read >= most => {
                    connection.leave(by_reset);
                    return Ok(None);
                }
                _ => {}
            }
            if let Some(nap) = ask.nap.filter(|_| read == 1) {
                tokio::time::sleep(nap).await;
            }
        }
        transcript.check()?;
        self.connection = Some(connection).filter(|_| head.keep_alive);
        Ok(Some(Answer {
            completion_tokens: transcript.completion_tokens(),
            prompt_tokens: transcript.counts.map(|counts| counts.prompt_tokens),
            texts: transcript.choices.into_iter().map(|choice| choice.text).collect(),
            asked_at,
            tokens_at,
        }))
    }

    /// Sends and reads the head, on a new connection where the old one was closed meanwhile (a server may,
    /// between two requests).
    async fn begin(
        &mut self,
        method: &str,
        path: &str,
        body: &str,
    ) -> Result<(Connection, Head), Fault> {
        if let Some(mut connection) = self.connection.take() {
            match self.try_on(&mut connection, method, path, body).await {
                Err(Fault::Broken(_)) => self.reconnected += 1,
                tried => return tried.map(|head| (connection, head)),
            }
        }
        let mut connection = Connection::open(self.address).await?;
        let head = self.try_on(&mut connection, method, path, body).await?;
        Ok((connection, head))
    }

    async fn try_on(
        &self,
        connection: &mut Connection,
        method: &str,
        path: &str,
        body: &str,
    ) -> Result<Head, Fault> {
        connection.send(method, path, body).await?;
        patiently(self.patience, connection.head()).await
    }
}

async fn patiently<T>(
    patience: Duration,
    work: impl Future<Output = Result<T, Fault>>,
) -> Result<T, Fault> {
    timeout(patience, work).await.unwrap_or(Err(Fault::Silent(patience.as_secs())))
}

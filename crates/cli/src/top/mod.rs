//! `reef top`: a running server's memory and requests in a terminal.

mod client;
mod draw;
mod pool;
mod watch;

use std::time::{Duration, Instant};

use anyhow::Context as _;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};
use serde_json::Value;

use crate::output::{WrongArguments, print_json};
use client::Client;
use watch::Watch;

const EVERY: Duration = Duration::from_secs(1);

/// Watch the memory and the requests of a running server
#[derive(clap::Args)]
pub struct Args {
    /// Where it listens
    #[arg(value_name = "URL", default_value = "http://127.0.0.1:8080")]
    url: String,
    /// The server's admin key
    #[arg(long, value_name = "KEY", env = "REEF_ADMIN_KEY", hide_env_values = true)]
    key: Option<String>,
    /// Print what GET /v1/pool says now, as one JSON document, and end
    #[arg(long)]
    json: bool,
}

/// Runs `reef top`.
pub fn run(args: Args) -> anyhow::Result<()> {
    let client =
        Client::new(&args.url, args.key).map_err(|error| WrongArguments(error.to_string()))?;
    if args.json {
        let text = client.get("/v1/pool")?;
        let document: Value =
            serde_json::from_str(&text).context("the answer is not that of GET /v1/pool")?;
        return print_json(&document);
    }
    let mut watch = Watch::default();
    watch.look(&client);
    if let (None, Some(trouble)) = (&watch.pool, &watch.trouble) {
        anyhow::bail!("{trouble}");
    }
    let mut terminal =
        ratatui::try_init().context("cannot draw on this terminal; --json prints once")?;
    let ended = watch_until_quit(&mut terminal, &mut watch, &client, &args.url);
    ratatui::restore();
    ended
}

fn watch_until_quit(
    terminal: &mut ratatui::DefaultTerminal,
    watch: &mut Watch,
    client: &Client,
    url: &str,
) -> anyhow::Result<()> {
    let mut looked = Instant::now();
    loop {
        terminal.draw(|frame| draw::draw(frame, watch, url))?;
        while event::poll(EVERY.saturating_sub(looked.elapsed()))? {
            match event::read()? {
                Event::Key(key) if key.kind == KeyEventKind::Press => {
                    let control = key.modifiers.contains(KeyModifiers::CONTROL);
                    match key.code {
                        KeyCode::Char('q') | KeyCode::Esc => return Ok(()),
                        KeyCode::Char('c') if control => return Ok(()),
                        _ => {}
                    }
                }
                Event::Resize(..) => {
                    terminal.draw(|frame| draw::draw(frame, watch, url))?;
                }
                _ => {}
            }
        }
        watch.look(client);
        looked = Instant::now();
    }
}

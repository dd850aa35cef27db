//! An engine under load, with the time of everything that is told.

use std::time::{Duration, Instant};

use reef_engine::wakeup::Wakeup;
use reef_engine::{Engine, Event, Outcome, Progress, Request};

/// Against a wake-up that never comes.
const LONGEST_WAIT: Duration = Duration::from_millis(5);

/// What became of a request. Times are seconds since the start of the drive.
#[derive(Default)]
pub struct Stream {
    pub submitted: f64,
    /// Of each token.
    pub tokens: Vec<f64>,
    pub outcome: Option<Outcome>,
}

impl Stream {
    /// Seconds from submission to the first token.
    pub fn ttft(&self) -> f64 {
        self.tokens.first().map_or(f64::NAN, |first| first - self.submitted)
    }

    /// Seconds between neighboring tokens that came from `from` to `to`.
    pub fn gaps(&self, from: f64, to: f64) -> impl Iterator<Item = f64> + '_ {
        let pairs = self.tokens.windows(2).filter(move |pair| pair[0] >= from && pair[1] <= to);
        pairs.map(|pair| pair[1] - pair[0])
    }
}

/// An engine and its streams, by key.
pub struct Drive {
    pub engine: Engine,
    pub streams: Vec<Stream>,
    start: Instant,
    wakeup: Wakeup,
    /// Most sequences running at once.
    pub most_running: usize,
    /// Milliseconds of each step.
    pub steps_ms: Vec<f64>,
    last_step: Option<u64>,
}

impl Drive {
    pub fn new(mut engine: Engine) -> Drive {
        let wakeup = Wakeup::of_this_thread();
        engine.set_waker(wakeup.waker());
        Drive {
            engine,
            streams: Vec::new(),
            start: Instant::now(),
            wakeup,
            most_running: 0,
            steps_ms: Vec::new(),
            last_step: None,
        }
    }

    /// Seconds since the start.
    pub fn now(&self) -> f64 {
        self.start.elapsed().as_secs_f64()
    }

    /// Hands a request over; returns the index of its stream.
    pub fn submit(&mut self, request: Request) -> anyhow::Result<usize> {
        let key = self.streams.len();
        self.engine.submit(key as u64, request)?;
        self.streams.push(Stream { submitted: self.now(), ..Stream::default() });
        Ok(key)
    }

    /// One turn.
    pub fn turn(&mut self) -> anyhow::Result<()> {
        let progress = self.engine.turn(self.start.elapsed().as_micros() as u64)?;
        let now = self.now();
        for told in self.engine.take_events() {
            let stream = &mut self.streams[told.request as usize];
            match told.event {
                Event::Token(_) => stream.tokens.push(now),
                Event::Step { step, elapsed_us, .. } if self.last_step != Some(step) => {
                    self.last_step = Some(step);
                    self.steps_ms.extend(elapsed_us.map(|us| us as f64 / 1e3));
                }
                Event::Finished(outcome) => stream.outcome = Some(*outcome),
                Event::Failed(error) => anyhow::bail!("a request has failed: {error}"),
                _ => {}
            }
        }
        self.most_running = self.most_running.max(self.engine.running());
        if progress != Progress::Worked {
            self.wakeup.wait(LONGEST_WAIT);
        }
        Ok(())
    }

    /// Turns until all of `streams` have ended.
    pub fn finish(&mut self, streams: &[usize]) -> anyhow::Result<()> {
        while streams.iter().any(|&index| self.streams[index].outcome.is_none()) {
            self.turn()?;
        }
        Ok(())
    }
}

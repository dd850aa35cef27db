//! What the worlds have been through, counted: a simulation proves nothing about what it never meets.

use std::fmt::Write as _;

use crate::fault::Fate;

macro_rules! rows {
    ($($name:ident = $text:literal,)*) => {
        /// Something that must happen often.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Row {
            $(#[doc = $text] $name,)*
        }

        impl Row {
            /// Every row, in the order of the table.
            pub const ALL: &[Row] = &[$(Row::$name,)*];

            /// Its name in the table and in JSON.
            pub fn name(self) -> &'static str {
                match self {
                    $(Row::$name => $text,)*
                }
            }
        }
    };
}

rows! {
    RungDropPrefix = "rung drop_prefix",
    RungInt8 = "rung int8",
    RungK8V4 = "rung k8v4",
    RungInt4 = "rung int4",
    RungEvict = "rung evict",
    PauseWait = "pause wait",
    PauseSwap = "pause swap",
    PauseRecompute = "pause recompute",
    ReasonDemand = "pause for demand",
    ReasonPriority = "pause for priority",
    ReasonQuota = "pause for quota",
    ReasonSpillFailure = "pause for a spill failure",
    Resumed = "resumed",
    FaultDelayed = "fault: step delayed",
    FaultReordered = "fault: completions reordered",
    FaultLost = "fault: completion lost",
    FaultDuplicated = "fault: completion twice",
    FaultLate = "fault: completion late",
    FaultRefusedPage = "fault: page refused",
    FaultSpill = "fault: spill store",
    StaleCompletion = "stale completion ignored",
    LostCompletion = "lost completion computed again",
    PrefixHit = "prefix hit",
    PrefixPartial = "prefix hit within a block",
    PrefixChain = "prefix hit, hash chain",
    PrefixRadix = "prefix hit, radix tree",
    WindowHit = "prefix hit with windows",
    Branches = "n or best_of finished",
    Beams = "beam search finished",
    DraftAccepted = "draft accepted",
    DraftRejected = "draft rejected",
    CancelWaiting = "cancelled while waiting",
    CancelRunning = "cancelled while running",
    CancelPaused = "cancelled while paused",
    Deadline = "deadline passed",
    QueueFull = "refused: queue full",
    NeverFits = "refused: never fits",
    KeyReused = "request id used again",
    RelativePositions = "past the trained context",
    WindowGroups = "finished with windows",
    StopToken = "ended by a token",
    LengthLimit = "ended by the limit",
    ExactCompared = "exact, equal to alone",
    PrefixOfSolo = "cut short, as alone up to there",
    LossyFinished = "lossy finished",
    LossyUntouched = "lossy, but untouched: as alone",
    UnplannedShortage = "page missing that a plan counted on",
    ShortageAlone = "does not fit alone after all",
}

/// Hits per row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Coverage([u64; Row::ALL.len()]);

impl Default for Coverage {
    fn default() -> Coverage {
        Coverage([0; Row::ALL.len()])
    }
}

impl Coverage {
    /// One more.
    pub fn hit(&mut self, row: Row) {
        self.add(row, 1);
    }

    /// `count` more.
    pub fn add(&mut self, row: Row, count: u64) {
        self.0[row as usize] += count;
    }

    /// What became of a piece of work.
    pub fn hit_fate(&mut self, fate: Fate) {
        match fate {
            Fate::InTime => {}
            Fate::Lost { .. } => self.hit(Row::FaultLost),
            Fate::Twice => self.hit(Row::FaultDuplicated),
            Fate::Late => self.hit(Row::FaultLate),
        }
    }

    /// Hits of a row.
    pub fn of(&self, row: Row) -> u64 {
        self.0[row as usize]
    }

    /// Adds those of `other`.
    pub fn merge(&mut self, other: &Coverage) {
        self.0.iter_mut().zip(&other.0).for_each(|(sum, count)| *sum += count);
    }

    /// Rows hit less than `least` times, of those that are to be hit: where a plan did not hold, the fewer
    /// the better.
    pub fn below(&self, least: u64) -> Vec<Row> {
        let wanted = |row: &Row| !matches!(row, Row::UnplannedShortage | Row::ShortageAlone);
        let rows = Row::ALL.iter().copied().filter(wanted);
        rows.filter(|&row| self.of(row) < least).collect()
    }

    /// A line per row.
    pub fn table(&self) -> String {
        let mut text = String::new();
        for &row in Row::ALL {
            let _ = writeln!(text, "{:10}  {}", self.of(row), row.name());
        }
        text
    }
}

//! The stages of a ladder (decision 0007): which rung, for which part of the context, in what order.

use super::Zone;
use crate::ladder::{Ladder, Rung};
use crate::page::PageFormat;

/// One stage of the ladder, for the victims of one priority.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// Blocks of the zone are brought to the format.
    Encode(Zone, PageFormat),
    /// Blocks are dropped.
    Drop,
}

/// The stages of a ladder, first to last (decision 0007).
pub(super) fn stages(ladder: &Ladder) -> Vec<Stage> {
    use PageFormat::Int8;
    let place = |wanted| ladder.rungs.iter().position(|&rung| rung == wanted);
    let has_int8 = place(Rung::Int8).is_some();
    let tail_before_drops = has_int8 && place(Rung::Int8) < place(Rung::Evict);
    let mut stages = Vec::new();
    for rung in &ladder.rungs {
        match rung.format() {
            Some(format) => stages.push(Stage::Encode(Zone::Middle, format)),
            None => {
                stages.extend(tail_before_drops.then_some(Stage::Encode(Zone::Tail, Int8)));
                stages.push(Stage::Drop);
            }
        }
    }
    for zone in [Zone::Tail, Zone::Sinks] {
        let lower = ladder.rungs.iter().filter_map(|rung| rung.format()).filter(|f| *f != Int8);
        let int8_first = has_int8.then_some(Int8);
        let formats = int8_first.into_iter().chain(lower);
        let not_yet = formats.filter(|&f| f != Int8 || zone == Zone::Sinks || !tail_before_drops);
        stages.extend(not_yet.map(|format| Stage::Encode(zone, format)));
    }
    stages
}

#[cfg(test)]
mod tests {
    use super::*;
    use PageFormat::{Int4, Int8, K8V4};
    use Stage::{Drop, Encode};
    use Zone::{Middle, Sinks, Tail};

    #[test]
    fn the_tail_gives_way_before_a_block_is_dropped_and_the_sinks_last() {
        let default = [
            Encode(Middle, Int8),
            Encode(Middle, K8V4),
            Encode(Middle, Int4),
            Encode(Tail, Int8),
            Drop,
            Encode(Tail, K8V4),
            Encode(Tail, Int4),
            Encode(Sinks, Int8),
            Encode(Sinks, K8V4),
            Encode(Sinks, Int4),
        ];
        assert_eq!(stages(&Ladder::default()), default);
    }

    #[test]
    fn a_ladder_may_be_reordered_and_shortened() {
        let stages = |list| stages(&Ladder::parse(list).unwrap());
        assert_eq!(
            stages("evict,int8"),
            [Drop, Encode(Middle, Int8), Encode(Tail, Int8), Encode(Sinks, Int8)]
        );
        assert_eq!(
            stages("int4,evict"),
            [Encode(Middle, Int4), Drop, Encode(Tail, Int4), Encode(Sinks, Int4)]
        );
        assert_eq!(stages("evict"), [Drop]);
        assert_eq!(stages("none"), []);
    }
}

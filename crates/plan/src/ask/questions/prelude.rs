//! What every question uses.

pub(super) use crate::ask::input::{Facts, Input};
pub(super) use crate::ask::worksheet::{Worksheet, ceil, floor, log2, max, min, pow, round, sqrt};
pub(super) use crate::ask::{
    About, AskError, Cited, Example, Move, Question, Verdict, fact, inputs, step,
};
pub(super) use crate::ask::{standard, start};
pub(super) use crate::figure::Unit;

//! What a re-encode makes of pages.

use crate::account::ByFormat;
use crate::config::GroupConfig;
use crate::page::PageFormat;
use crate::pool::BlockPool;

/// What pages of one KV group become, looked up many times in a plan.
#[derive(Clone, Debug)]
pub(super) struct GroupConversions {
    /// Bytes of a page.
    pub bytes: ByFormat<usize>,
    /// By target, then by the format that a page has.
    becomes: ByFormat<ByFormat<PageFormat>>,
}

impl GroupConversions {
    fn new(group: &GroupConfig) -> GroupConversions {
        let becomes = ByFormat::from_fn(|to| {
            ByFormat::from_fn(|from| if changes(group, from, to) { to } else { from })
        });
        GroupConversions { bytes: ByFormat::from_fn(|f| group.shape.page_bytes(f)), becomes }
    }

    /// The format that a page in `format` has after a re-encode of its block to `target`.
    pub(super) fn becomes(&self, format: PageFormat, target: Option<PageFormat>) -> PageFormat {
        target.map_or(format, |target| self.becomes[target][format])
    }
}

/// Those of all KV groups.
#[derive(Clone, Debug, Default)]
pub(super) struct Conversions(Vec<GroupConversions>);

impl Conversions {
    pub(super) fn new(pool: &BlockPool) -> Conversions {
        Conversions(pool.config().groups.iter().map(GroupConversions::new).collect())
    }

    pub(super) fn of_group(&self, group: usize) -> &GroupConversions {
        &self.0[group]
    }
}

/// Whether a re-encode of its block to `target` changes a page of `group` that is in `format`.
pub(super) fn changes(group: &GroupConfig, format: PageFormat, target: PageFormat) -> bool {
    let bytes = |format| group.shape.page_bytes(format);
    // With few channels fp8 is smaller than K8V4.
    format.can_become(target) && bytes(target) < bytes(format)
}

//! The messages that subscribers decode: vLLM's `KVEventBatch` in msgpack.
//!
//! A batch is an array `[seconds since 1970, events, data-parallel rank]` in every version. Its events are
//! maps tagged by `type` since vLLM 0.26 (vLLM pull request 42892), arrays tagged by their first element
//! before.

use bytes::Bytes;
use serde::Serialize;

/// Where the advertised blocks are: RAM is what a GPU's memory is to vLLM, the tier that costs nothing to
/// read from.
const MEDIUM: &str = "GPU";
/// One engine has one rank.
const RANK: u32 = 0;

/// How events are encoded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EventFormat {
    /// Maps; replayed batches carry the topic. What vLLM 0.26 and later send.
    #[default]
    Map,
    /// Arrays; replayed batches carry no topic. What vLLM before 0.26 sent.
    Array,
}

/// A block's name to subscribers: the first 8 bytes of its identity. They compare names only; what a block
/// is they tell by its tokens.
pub type WireHash = u64;

/// One change of what can be reused.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "type")]
pub enum WireEvent {
    /// Blocks that can be reused, each the next one's parent.
    BlockStored {
        /// Their names.
        block_hashes: Vec<WireHash>,
        /// The block before the first; `None` at the beginning of a text.
        parent_block_hash: Option<WireHash>,
        /// Their tokens, `block_size` each.
        token_ids: Vec<u32>,
        /// Tokens of a block.
        block_size: usize,
        /// Always null: no adapters.
        lora_id: (),
        /// Where they are.
        medium: &'static str,
        /// Always null: no adapters.
        lora_name: (),
        /// By block, what besides tokens its identity covers: a tenant's name at the beginning of its texts.
        /// Absent where nothing does.
        #[serde(skip_serializing_if = "Option::is_none")]
        extra_keys: Option<Vec<Option<(String,)>>>,
    },
    /// Blocks that can no longer be reused.
    BlockRemoved {
        /// Their names.
        block_hashes: Vec<WireHash>,
        /// Where they were.
        medium: &'static str,
    },
    /// Nothing can be reused.
    AllBlocksCleared {},
}

impl WireEvent {
    /// One block that can be reused; `tenant` at the beginning of a private text.
    pub fn stored(
        hash: WireHash,
        parent: Option<WireHash>,
        tokens: &[u32],
        tenant: Option<&str>,
    ) -> WireEvent {
        WireEvent::BlockStored {
            block_hashes: vec![hash],
            parent_block_hash: parent,
            token_ids: tokens.to_vec(),
            block_size: tokens.len(),
            lora_id: (),
            medium: MEDIUM,
            lora_name: (),
            extra_keys: tenant.map(|tenant| vec![Some((tenant.to_owned(),))]),
        }
    }

    /// One block that can no longer be reused.
    pub fn removed(hash: WireHash) -> WireEvent {
        WireEvent::BlockRemoved { block_hashes: vec![hash], medium: MEDIUM }
    }

    /// Appends `next` to `events`, as a part of the last one where it continues that.
    pub fn append(events: &mut Vec<WireEvent>, next: WireEvent) {
        let joined = match (events.last_mut(), &next) {
            (Some(last), next) => last.join(next),
            (None, _) => false,
        };
        if !joined {
            events.push(next);
        }
    }

    fn join(&mut self, next: &WireEvent) -> bool {
        use WireEvent::{BlockRemoved, BlockStored};
        match (self, next) {
            (
                BlockStored { block_hashes, token_ids, block_size, extra_keys, .. },
                BlockStored {
                    block_hashes: new,
                    parent_block_hash: parent,
                    token_ids: new_tokens,
                    block_size: new_size,
                    extra_keys: None,
                    ..
                },
            ) if block_hashes.last() == parent.as_ref() && block_size == new_size => {
                if let Some(keys) = extra_keys {
                    keys.extend(new.iter().map(|_| None));
                }
                block_hashes.extend(new);
                token_ids.extend(new_tokens);
                true
            }
            (BlockRemoved { block_hashes, .. }, BlockRemoved { block_hashes: new, .. }) => {
                block_hashes.extend(new);
                true
            }
            _ => false,
        }
    }

    /// Tokens that it tells.
    pub fn tokens(&self) -> usize {
        match self {
            WireEvent::BlockStored { token_ids, .. } => token_ids.len(),
            WireEvent::BlockRemoved { .. } | WireEvent::AllBlocksCleared {} => 0,
        }
    }

    /// The event as vLLM before 0.26 sent it.
    fn positional(&self) -> Positional<'_> {
        match self {
            WireEvent::BlockStored {
                block_hashes,
                parent_block_hash,
                token_ids,
                block_size,
                medium,
                extra_keys,
                ..
            } => {
                let (tag, parent, keys, none) =
                    ("BlockStored", *parent_block_hash, extra_keys.as_ref(), ());
                let (hashes, tokens, size) = (block_hashes, token_ids, *block_size);
                Positional::Stored(
                    tag, hashes, parent, tokens, size, none, medium, none, keys, none, none, none,
                )
            }
            WireEvent::BlockRemoved { block_hashes, medium } => {
                Positional::Removed("BlockRemoved", block_hashes, medium, ())
            }
            WireEvent::AllBlocksCleared {} => Positional::Cleared(("AllBlocksCleared",)),
        }
    }
}

type Hashes = Vec<WireHash>;
type Keys = Vec<Option<(String,)>>;

/// The fields in their order, each event an array. The last ones of vLLM 0.25 (group of layers, its kind
/// and window) are null, as they are absent from maps: a block is one of all layers here.
#[derive(Serialize)]
#[serde(untagged)]
enum Positional<'a> {
    Stored(
        &'a str,
        &'a Hashes,
        Option<WireHash>,
        &'a [u32],
        usize,
        (),
        &'a str,
        (),
        Option<&'a Keys>,
        (),
        (),
        (),
    ),
    Removed(&'a str, &'a Hashes, &'a str, ()),
    Cleared((&'a str,)),
}

/// The payload of a message.
pub fn encode(
    events: &[WireEvent],
    time_s: f64,
    format: EventFormat,
) -> Result<Bytes, rmp_serde::encode::Error> {
    let payload = match format {
        EventFormat::Map => rmp_serde::to_vec_named(&(time_s, events, RANK))?,
        EventFormat::Array => {
            let events: Vec<Positional<'_>> = events.iter().map(WireEvent::positional).collect();
            rmp_serde::to_vec(&(time_s, events, RANK))?
        }
    };
    Ok(payload.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the encoder of vLLM's own structs (msgspec 0.23) writes for [`batch`]: as in vLLM 0.26.
    const MAPS: &str = "93cb3ff80000000000009581a474797065b0416c6c426c6f636b73436c656172656488a474797065ab426c6f\
        636b53746f726564ac626c6f636b5f68617368657392cfffffffffffffffff07b1706172656e745f626c6f63\
        6b5f68617368c0a9746f6b656e5f696473940102cd012cce00011170aa626c6f636b5f73697a6502a76c6f72\
        615f6964c0a66d656469756da3475055a96c6f72615f6e616d65c088a474797065ab426c6f636b53746f7265\
        64ac626c6f636b5f6861736865739109b1706172656e745f626c6f636b5f68617368cfffffffffffffffffa9\
        746f6b656e5f696473920506aa626c6f636b5f73697a6502a76c6f72615f6964c0a66d656469756da3475055\
        a96c6f72615f6e616d65c089a474797065ab426c6f636b53746f726564ac626c6f636b5f686173686573920a\
        0bb1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f6964739401020304aa626c6f636b5f7369\
        7a6502a76c6f72615f6964c0a66d656469756da3475055a96c6f72615f6e616d65c0aa65787472615f6b6579\
        739291a4616e6e61c083a474797065ac426c6f636b52656d6f766564ac626c6f636b5f686173686573920907\
        a66d656469756da347505500";
    /// And as in vLLM 0.25.
    const ARRAYS: &str = "93cb3ff80000000000009591b0416c6c426c6f636b73436c65617265649cab426c6f636b53746f72656492cf\
        ffffffffffffffff07c0940102cd012cce0001117002c0a3475055c0c0c0c0c09cab426c6f636b53746f7265\
        649109cfffffffffffffffff92050602c0a3475055c0c0c0c0c09cab426c6f636b53746f726564920a0bc094\
        0102030402c0a3475055c09291a4616e6e61c0c0c0c094ac426c6f636b52656d6f766564920907a3475055c0\
        00";

    fn batch() -> Vec<WireEvent> {
        let mut events = vec![WireEvent::AllBlocksCleared {}];
        for (hash, parent, tokens, tenant) in [
            (u64::MAX, None, [1, 2], None),
            (7, Some(u64::MAX), [300, 70_000], None),
            // Not behind the last one.
            (9, Some(u64::MAX), [5, 6], None),
            (10, None, [1, 2], Some("anna")),
            (11, Some(10), [3, 4], None),
        ] {
            WireEvent::append(&mut events, WireEvent::stored(hash, parent, &tokens, tenant));
        }
        WireEvent::append(&mut events, WireEvent::removed(9));
        WireEvent::append(&mut events, WireEvent::removed(7));
        events
    }

    #[test]
    fn batches_are_vllms_byte_for_byte() {
        for (format, wanted) in [(EventFormat::Map, MAPS), (EventFormat::Array, ARRAYS)] {
            let payload = encode(&batch(), 1.5, format).unwrap();
            let hex: String = payload.iter().map(|byte| format!("{byte:02x}")).collect();
            assert_eq!(hex, wanted, "{format:?}");
        }
    }

    #[test]
    fn only_what_continues_is_joined() {
        let events = batch();
        let WireEvent::BlockStored { block_hashes, token_ids, extra_keys, .. } = &events[1] else {
            panic!("{events:?}")
        };
        assert_eq!((&block_hashes[..], extra_keys), (&[u64::MAX, 7][..], &None));
        assert_eq!(token_ids[..], [1, 2, 300, 70_000]);
        let WireEvent::BlockStored { extra_keys: Some(keys), .. } = &events[3] else {
            panic!("{events:?}")
        };
        assert_eq!(keys[..], [Some(("anna".to_owned(),)), None]);
        assert_eq!(events.len(), 5);
        // A private beginning is never a part of something else's chain.
        let mut events = vec![WireEvent::stored(1, None, &[1], None)];
        WireEvent::append(&mut events, WireEvent::stored(2, Some(1), &[1], Some("anna")));
        assert_eq!(events.len(), 2);
    }
}

//! Whose prefix a run of tokens is: what a block's hash covers, and what it never covers.

use std::fmt;

/// What [`PrefixIdentity`]'s key is derived for; a new format of identities gets a new name.
const CONTEXT: &str = "reef 2026 kv prefix identity v1";

/// Identity of one block and of everything before it: the model, the tenant, and all tokens up to the
/// block's end. Never the page format: a re-encode would strand every descendant.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockHash(pub [u8; 32]);

impl fmt::Debug for BlockHash {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0[..8].iter().try_for_each(|byte| write!(formatter, "{byte:02x}"))
    }
}

/// The hash before the first block: model and tenant salt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PrefixRoot(pub [u8; 32]);

/// Hash of a block from the hash before it (the root's for the first block) and its tokens.
pub type BlockHasher = fn(&BlockHash, &[u32]) -> BlockHash;

/// What KV must have in common to be interchangeable at all, whatever the tokens.
#[derive(Clone, Debug)]
pub struct PrefixIdentity {
    key: [u8; 32],
    hasher: BlockHasher,
}

impl PrefixIdentity {
    /// `model_fingerprint`: what tells two models' KV apart (a digest of the weights, or of header and
    /// tensor table); `rotation`: name of the rotation that keys are stored under, empty without one;
    /// `block_size`: tokens of a block.
    pub fn new(model_fingerprint: &[u8], rotation: &str, block_size: usize) -> PrefixIdentity {
        let mut hasher = blake3::Hasher::new_derive_key(CONTEXT);
        for field in [model_fingerprint, rotation.as_bytes(), &block_size.to_le_bytes()] {
            // Lengths first: no two lists of fields give the same bytes.
            hasher.update(&(field.len() as u64).to_le_bytes()).update(field);
        }
        PrefixIdentity { key: *hasher.finalize().as_bytes(), hasher: chained }
    }

    /// The same with another hash of blocks: tests force collisions with it.
    pub fn with_hasher(self, hasher: BlockHasher) -> PrefixIdentity {
        PrefixIdentity { hasher, ..self }
    }

    /// Where the chains of one tenant begin. Chains of different salts share nothing.
    pub fn salted(&self, tenant_salt: &[u8]) -> PrefixRoot {
        #[cfg(feature = "mutants")]
        let tenant_salt = match crate::mutant::is_active(crate::mutant::Mutant::ForgetSalt) {
            true => &[],
            false => tenant_salt,
        };
        PrefixRoot(*blake3::keyed_hash(&self.key, tenant_salt).as_bytes())
    }

    /// The hash of blocks.
    pub fn hasher(&self) -> BlockHasher {
        self.hasher
    }
}

/// BLAKE3 of the tokens (little-endian), keyed by the hash before: a block of 32 tokens is then two
/// compressions, where hashing both as data would take three.
fn chained(parent: &BlockHash, tokens: &[u32]) -> BlockHash {
    const PIECE: usize = 128;
    if tokens.len() <= PIECE {
        let mut bytes = [0; PIECE * 4];
        for (four, token) in bytes.chunks_exact_mut(4).zip(tokens) {
            four.copy_from_slice(&token.to_le_bytes());
        }
        return BlockHash(*blake3::keyed_hash(&parent.0, &bytes[..tokens.len() * 4]).as_bytes());
    }
    let mut hasher = blake3::Hasher::new_keyed(&parent.0);
    for token in tokens {
        hasher.update(&token.to_le_bytes());
    }
    BlockHash(*hasher.finalize().as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everything_that_makes_kv_different_makes_the_root_different() {
        let identity = |model: &[u8], rotation, block_size, salt: &[u8]| {
            PrefixIdentity::new(model, rotation, block_size).salted(salt)
        };
        let roots = [
            identity(b"model", "", 32, b""),
            identity(b"other", "", 32, b""),
            identity(b"model", "hadamard", 32, b""),
            identity(b"modelhadamard", "", 32, b""),
            identity(b"model", "", 16, b""),
            identity(b"model", "", 32, b"tenant"),
        ];
        for (index, root) in roots.iter().enumerate() {
            assert!(roots[..index].iter().all(|earlier| earlier != root), "{index}");
        }
        assert_eq!(identity(b"model", "", 32, b"tenant"), roots[5]);
    }

    #[test]
    fn a_block_hash_covers_what_came_before() {
        let hash = PrefixIdentity::new(b"model", "", 32).hasher();
        let tokens: Vec<u32> = (0..300).collect();
        let (one, two) = (BlockHash([1; 32]), BlockHash([2; 32]));
        assert_ne!(hash(&one, &tokens[..32]), hash(&two, &tokens[..32]));
        assert_ne!(hash(&one, &tokens[..32]), hash(&one, &tokens[1..33]));
        // Both ways of feeding the tokens are one function.
        let bytes: Vec<u8> = tokens.iter().flat_map(|token| token.to_le_bytes()).collect();
        for count in [1, 32, 128, 129, 300] {
            let whole = blake3::keyed_hash(&one.0, &bytes[..count * 4]);
            assert_eq!(hash(&one, &tokens[..count]).0, *whole.as_bytes(), "{count}");
        }
    }
}

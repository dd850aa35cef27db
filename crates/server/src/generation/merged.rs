//! Several generations as one stream, for requests with several prompts.

use std::task::{Context, Poll};

use super::{Generation, Update};

/// Several generations; updates come with the index of theirs.
pub struct Merged {
    generations: Vec<Option<Generation>>,
    /// Who is asked first: nobody is starved by a neighbor that always has something.
    first: usize,
}

impl Merged {
    /// All of `generations`.
    pub fn new(generations: Vec<Generation>) -> Merged {
        Merged { generations: generations.into_iter().map(Some).collect(), first: 0 }
    }

    /// The next update of any of them; `None` after the end of all.
    pub fn poll_update(&mut self, context: &mut Context<'_>) -> Poll<Option<(usize, Update)>> {
        let count = self.generations.len();
        let mut open = false;
        for offset in 0..count {
            let index = (self.first + offset) % count;
            let Some(generation) = &mut self.generations[index] else { continue };
            match generation.poll_update(context) {
                Poll::Ready(Some(update)) => {
                    // A last token, its end and what it took stay together.
                    self.first = if generation.has_more() { index } else { (index + 1) % count };
                    return Poll::Ready(Some((index, update)));
                }
                Poll::Ready(None) => self.generations[index] = None,
                Poll::Pending => open = true,
            }
        }
        if open { Poll::Pending } else { Poll::Ready(None) }
    }
}

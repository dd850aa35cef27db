//! From a world that fails to the smallest part of it that still does.

use crate::world::{Part, Recipe};

/// Leaves out parts and arrivals of `recipe` as long as `fails` holds. At most `tries` worlds are tried.
pub fn shrink(
    recipe: &Recipe,
    arrivals: usize,
    tries: usize,
    fails: &mut dyn FnMut(&Recipe) -> bool,
) -> Recipe {
    let mut search = Search { best: recipe.clone(), tries, fails };
    search.leave_out_parts();
    search.leave_out_arrivals(arrivals);
    // Fewer arrivals may need fewer parts.
    search.leave_out_parts();
    search.best
}

struct Search<'a> {
    best: Recipe,
    tries: usize,
    fails: &'a mut dyn FnMut(&Recipe) -> bool,
}

impl Search<'_> {
    /// Takes `candidate` where it fails too.
    fn accept(&mut self, candidate: Recipe) -> bool {
        if self.tries == 0 {
            return false;
        }
        self.tries -= 1;
        let fails = (self.fails)(&candidate);
        if fails {
            self.best = candidate;
        }
        fails
    }

    fn leave_out_parts(&mut self) {
        for (part, _) in Part::ALL {
            if !self.best.without.contains(&part) {
                let mut candidate = self.best.clone();
                candidate.without.push(part);
                self.accept(candidate);
            }
        }
    }

    /// Halves, quarters, ... and single arrivals (Zeller, Hildebrandt: "Simplifying and isolating
    /// failure-inducing input", 2002).
    fn leave_out_arrivals(&mut self, arrivals: usize) {
        let mut keep = self.best.keep.clone().unwrap_or_else(|| (0..arrivals).collect());
        let mut piece = keep.len() / 2;
        while piece > 0 {
            let mut start = 0;
            while start < keep.len() {
                let mut fewer = keep.clone();
                fewer.drain(start..(start + piece).min(keep.len()));
                let candidate = Recipe { keep: Some(fewer.clone()), ..self.best.clone() };
                if !fewer.is_empty() && self.accept(candidate) {
                    keep = fewer;
                } else {
                    start += piece;
                }
            }
            piece /= 2;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_failure_needs_is_left() {
        let needs = [3, 11];
        let mut fails = |recipe: &Recipe| {
            let keep = recipe.keep.clone().unwrap_or_else(|| (0..16).collect());
            needs.iter().all(|need| keep.contains(need)) && !recipe.without.contains(&Part::Spill)
        };
        let small = shrink(&Recipe::of_seed(7), 16, 200, &mut fails);
        assert_eq!(small.keep.as_deref(), Some(&needs[..]));
        assert_eq!(small.without.len(), Part::ALL.len() - 1);
        assert!(!small.without.contains(&Part::Spill));
    }
}

//! Whose requests they are: shares of compute, quotas of memory, salts of the prefix cache.

/// Somebody whose requests are kept apart from others'.
#[derive(Clone, Debug, PartialEq)]
pub struct Tenant {
    /// For reports.
    pub name: String,
    /// Share of computed tokens against the other tenants' where all have work; above 0.
    pub weight: f64,
    /// Most bytes of pages that its requests hold; beyond it they degrade, then wait for each other.
    pub quota_bytes: Option<usize>,
    /// Tenants with different salts never find each other's prefixes.
    pub salt: Vec<u8>,
}

impl Default for Tenant {
    fn default() -> Tenant {
        Tenant { name: "default".into(), weight: 1.0, quota_bytes: None, salt: Vec::new() }
    }
}

/// Weighted fair sharing of computed tokens: the tenant with the least virtual time goes first (start-time
/// fair queueing; Sheng et al., "Fairness in serving large language models", arXiv 2401.00588).
#[derive(Clone, Debug)]
pub(crate) struct FairShare {
    weights: Vec<f64>,
    virtual_time: Vec<f64>,
}

impl FairShare {
    pub(crate) fn new(tenants: &[Tenant]) -> FairShare {
        let weights = tenants.iter().map(|tenant| tenant.weight).collect();
        FairShare { weights, virtual_time: vec![0.0; tenants.len()] }
    }

    /// Charges `tenant` for computed tokens.
    pub(crate) fn charge(&mut self, tenant: usize, tokens: usize) {
        self.virtual_time[tenant] += tokens as f64 / self.weights[tenant];
    }

    /// `tenant` has work again, after it had none: it does not get credit for the time it was away.
    pub(crate) fn arrive(&mut self, tenant: usize, active: impl Iterator<Item = usize>) {
        let least = active.map(|other| self.virtual_time[other]).fold(f64::INFINITY, f64::min);
        if least.is_finite() {
            self.virtual_time[tenant] = self.virtual_time[tenant].max(least);
        }
    }

    /// Less goes first.
    pub(crate) fn time(&self, tenant: usize) -> f64 {
        self.virtual_time[tenant]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_follow_weights_and_absence_earns_nothing() {
        let tenant = |weight| Tenant { weight, ..Tenant::default() };
        let mut share = FairShare::new(&[tenant(3.0), tenant(1.0), tenant(1.0)]);
        let mut tokens = [0; 3];
        let mut serve = |share: &mut FairShare, among: &[usize]| {
            let by_time = |a: &&usize, b: &&usize| share.time(**a).total_cmp(&share.time(**b));
            let next = *among.iter().min_by(by_time).unwrap();
            share.charge(next, 10);
            tokens[next] += 10;
        };
        (0..400).for_each(|_| serve(&mut share, &[0, 1]));
        share.arrive(2, [0, 1].into_iter());
        (0..500).for_each(|_| serve(&mut share, &[0, 1, 2]));
        assert_eq!(tokens[0] / 100, tokens[1] * 3 / 100);
        assert!((990..=1010).contains(&tokens[2]), "{tokens:?}");
    }
}

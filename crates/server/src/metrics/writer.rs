//! Families that are read at the scrape, written one by one.

use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use reef_engine::tally::Tally;

type Labels<'a, const N: usize> = [(&'a str, &'a str); N];

/// Writes whole families.
pub(super) struct Writer<'a>(pub DescriptorEncoder<'a>);

impl Writer<'_> {
    pub fn gauge(&mut self, name: &str, help: &str, value: f64) -> std::fmt::Result {
        let metric = self.0.encode_descriptor(name, help, None, MetricType::Gauge)?;
        ConstGauge::new(value).encode(metric)
    }

    pub fn gauges<'l, const N: usize>(
        &mut self,
        name: &str,
        help: &str,
        cells: impl IntoIterator<Item = (Labels<'l, N>, f64)>,
    ) -> std::fmt::Result {
        let mut family = self.0.encode_descriptor(name, help, None, MetricType::Gauge)?;
        for (labels, value) in cells {
            ConstGauge::new(value).encode(family.encode_family(&labels)?)?;
        }
        Ok(())
    }

    pub fn counter<V>(&mut self, name: &str, help: &str, value: V) -> std::fmt::Result
    where
        ConstCounter<V>: EncodeMetric,
    {
        let metric = self.0.encode_descriptor(name, help, None, MetricType::Counter)?;
        ConstCounter::new(value).encode(metric)
    }

    pub fn counters<'l, V, const N: usize>(
        &mut self,
        name: &str,
        help: &str,
        cells: impl IntoIterator<Item = (Labels<'l, N>, V)>,
    ) -> std::fmt::Result
    where
        ConstCounter<V>: EncodeMetric,
    {
        let mut family = self.0.encode_descriptor(name, help, None, MetricType::Counter)?;
        for (labels, value) in cells {
            ConstCounter::new(value).encode(family.encode_family(&labels)?)?;
        }
        Ok(())
    }

    pub fn tally<const N: usize>(
        &mut self,
        name: &str,
        help: &str,
        tally: &Tally<N>,
    ) -> std::fmt::Result {
        let mut metric = self.0.encode_descriptor(name, help, None, MetricType::Histogram)?;
        let bounds = tally.bounds.iter().copied().chain([f64::INFINITY]);
        let counts = tally.counts.iter().copied().chain([tally.above]);
        let buckets: Vec<(f64, u64)> = bounds.zip(counts).collect();
        metric.encode_histogram::<NoLabelSet>(tally.sum, tally.count(), &buckets, None)
    }
}

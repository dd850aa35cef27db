//! What came and went at the socket.

use std::sync::Arc;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;

use super::writer::Writer;
use crate::lifecycle::Lifecycle;

/// Reads what the accept loop has counted.
pub(super) struct TrafficCollector(pub Arc<Lifecycle>);

impl std::fmt::Debug for TrafficCollector {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("TrafficCollector").finish_non_exhaustive()
    }
}

impl Collector for TrafficCollector {
    fn encode(&self, encoder: DescriptorEncoder) -> std::fmt::Result {
        let counts = self.0.traffic.counts();
        let mut write = Writer(encoder);
        write.gauge("reef:connections_open", "Connections that are open.", counts.open as f64)?;
        let ways = [
            ("accepted", counts.accepted),
            ("turned_away", counts.turned_away),
            ("evicted", counts.evicted),
            ("timed_out", counts.timed_out),
        ];
        let ways = ways.map(|(fate, count)| ([("fate", fate)], count));
        write.counters("reef:connections", "Connections by what became of them.", ways)?;
        write.gauge(
            "reef:body_bytes",
            "Bytes of bodies whose requests are not answered yet.",
            counts.body_bytes as f64,
        )?;
        write.counter("reef:panics", "Handlers and streams that panicked.", counts.panics)
    }
}

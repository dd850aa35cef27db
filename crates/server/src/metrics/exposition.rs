//! Which of the two text formats a scraper reads best.

/// A format of a scrape.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exposition {
    /// Prometheus text, version 0.0.4: what everybody reads.
    Text,
    /// OpenMetrics text, version 1.0.0.
    OpenMetrics,
}

impl Exposition {
    /// The format that `accept`, the header of the request, ranks higher; [`Exposition::Text`] where it says
    /// nothing of OpenMetrics.
    pub fn negotiate(accept: Option<&str>) -> Exposition {
        let (mut text, mut open_metrics) = (0.0f32, 0.0f32);
        for entry in accept.unwrap_or("*/*").split(',') {
            let mut parts = entry.split(';').map(str::trim);
            let kind = parts.next().unwrap_or_default();
            let quality = parts.find_map(|part| part.strip_prefix("q=")?.parse().ok());
            let quality = quality.unwrap_or(1.0);
            match kind.to_ascii_lowercase().as_str() {
                "application/openmetrics-text" => open_metrics = open_metrics.max(quality),
                "text/plain" | "text/*" | "*/*" => text = text.max(quality),
                _ => {}
            }
        }
        if open_metrics > 0.0 && open_metrics >= text {
            return Exposition::OpenMetrics;
        }
        Exposition::Text
    }

    /// The response's `content-type`.
    pub fn content_type(self) -> &'static str {
        match self {
            Exposition::Text => prometheus_client::encoding::prometheus_text::CONTENT_TYPE,
            Exposition::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Exposition::{OpenMetrics, Text};
    use super::*;

    #[test]
    fn the_scraper_chooses() {
        let prometheus = "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,\
            application/openmetrics-text;version=0.0.1;q=0.5,text/plain;version=0.0.4;q=0.3,*/*;q=0.2";
        let text_first = "text/plain;version=0.0.4;q=0.9, application/openmetrics-text;q=0.5";
        let cases = [
            (None, Text),
            (Some(""), Text),
            (Some("*/*"), Text),
            (Some("text/html"), Text),
            (Some(prometheus), OpenMetrics),
            (Some("application/openmetrics-text; version=1.0.0"), OpenMetrics),
            (Some("Application/OpenMetrics-Text, */*"), OpenMetrics),
            (Some("application/openmetrics-text;q=0, text/plain"), Text),
            (Some("application/openmetrics-text;q=0"), Text),
            (Some(text_first), Text),
            (Some("application/openmetrics-text;q=nonsense"), OpenMetrics),
        ];
        for (accept, want) in cases {
            assert_eq!(Exposition::negotiate(accept), want, "{accept:?}");
        }
    }
}

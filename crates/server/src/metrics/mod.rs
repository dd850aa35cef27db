//! What a scrape of `/metrics` reads.

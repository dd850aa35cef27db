//! What requests add up to: vLLM's counters and histograms, and what was done to their KV.

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Metric, Registry};

use super::buckets;
use super::observer::Ending;

/// Tokens and requests of one tenant.
#[derive(Clone, Debug)]
pub(super) struct TenantCounters {
    pub requests: Counter,
    pub prompt_tokens: Counter,
    pub generation_tokens: Counter,
}

/// Every family that [`RequestObserver`](super::RequestObserver)s feed. The handles are kept, so that counting a
/// token looks nothing up.
#[derive(Debug)]
pub(super) struct RequestFamilies {
    pub first_token_seconds: Histogram,
    pub inter_token_seconds: Histogram,
    pub time_per_output_token_seconds: Histogram,
    pub e2e_seconds: Histogram,
    pub queue_seconds: Histogram,
    pub prefill_seconds: Histogram,
    pub decode_seconds: Histogram,
    pub inference_seconds: Histogram,
    pub prompt_tokens_of_request: Histogram,
    pub generation_tokens_of_request: Histogram,
    pub most_generation_tokens: Histogram,
    pub prefill_computed_tokens: Histogram,
    pub choices: Histogram,
    pub max_tokens: Histogram,
    pub preemptions: Histogram,
    pub prompt_tokens: Counter,
    pub prompt_tokens_cached: Counter,
    pub prompt_tokens_computed: Counter,
    pub prompt_tokens_hit: Counter,
    pub generation_tokens: Counter,
    pub prefix_queries: Counter,
    pub prefix_hits: Counter,
    pub pause_seconds: Histogram,
    pub degraded: Counter,
    /// By [`Ending`].
    success: [Option<Counter>; Ending::ALL.len()],
    endings: [Counter; Ending::ALL.len()],
    tenants: Vec<TenantCounters>,
}

impl RequestFamilies {
    /// Registers them. `max_model_len`: most tokens of a sequence; `tenants`: the names, in the engine's order.
    pub(super) fn new(
        registry: &mut Registry,
        max_model_len: usize,
        tenants: &[String],
    ) -> RequestFamilies {
        let mut register = Registrar { registry, token_bounds: buckets::tokens(max_model_len) };
        let (prompt_tokens_computed, prompt_tokens_hit) = register.prompt_tokens_by_source();
        let (success, endings) = register.endings();
        RequestFamilies {
            first_token_seconds: register.seconds(
                "vllm:time_to_first_token_seconds",
                "Seconds from the arrival of a request to its first token",
                &buckets::FIRST_TOKEN_SECONDS,
            ),
            inter_token_seconds: register.seconds(
                "vllm:inter_token_latency_seconds",
                "Seconds between two outputs of a choice; drafts accepted in one step are one output",
                &buckets::INTER_TOKEN_SECONDS,
            ),
            time_per_output_token_seconds: register.seconds(
                "vllm:request_time_per_output_token_seconds",
                "Seconds from first to last token of a request by tokens after the first",
                &buckets::INTER_TOKEN_SECONDS,
            ),
            e2e_seconds: register.phase("vllm:e2e_request_latency_seconds", "arrival to end"),
            queue_seconds: register.phase("vllm:request_queue_time_seconds", "arrival to admission"),
            prefill_seconds: register
                .phase("vllm:request_prefill_time_seconds", "admission to first token"),
            decode_seconds: register
                .phase("vllm:request_decode_time_seconds", "first to last token"),
            inference_seconds: register
                .phase("vllm:request_inference_time_seconds", "admission to last token"),
            prompt_tokens_of_request: register
                .tokens("vllm:request_prompt_tokens", "Prompt tokens of a request"),
            generation_tokens_of_request: register
                .tokens("vllm:request_generation_tokens", "Generated tokens of a request"),
            most_generation_tokens: register.tokens(
                "vllm:request_max_num_generation_tokens",
                "Generated tokens of a request's longest choice",
            ),
            prefill_computed_tokens: register.tokens(
                "vllm:request_prefill_kv_computed_tokens",
                "Prompt tokens of a request that were not found in the prefix cache",
            ),
            choices: register.seconds(
                "vllm:request_params_n",
                "The parameter n of a request",
                &buckets::CHOICES,
            ),
            max_tokens: register
                .tokens("vllm:request_params_max_tokens", "The parameter max_tokens, where given"),
            preemptions: register.seconds(
                "vllm:request_num_preemptions",
                "Times that a request left the pool",
                &buckets::PREEMPTIONS,
            ),
            prompt_tokens: register
                .counter("vllm:prompt_tokens", "Prompt tokens of requests whose prefill has ended"),
            prompt_tokens_cached: register.counter(
                "vllm:prompt_tokens_cached",
                "Of these, tokens found in the prefix cache",
            ),
            prompt_tokens_computed,
            prompt_tokens_hit,
            generation_tokens: register.counter("vllm:generation_tokens", "Generated tokens"),
            prefix_queries: register.counter(
                "vllm:prefix_cache_queries",
                "Prompt tokens looked up in the prefix cache at first admission",
            ),
            prefix_hits: register
                .counter("vllm:prefix_cache_hits", "Of these, tokens that were found"),
            pause_seconds: register.seconds(
                "reef:pause_seconds",
                "Seconds that a choice stood still, once it went on",
                &buckets::FIRST_TOKEN_SECONDS,
            ),
            degraded: register.counter(
                "reef:requests_degraded",
                "Requests that ended with KV below f16, or with tokens dropped",
            ),
            success,
            endings,
            tenants: register.tenants(tenants),
        }
    }

    /// Counts the end of a request.
    pub(super) fn ended(&self, ending: Ending) {
        if let Some(success) = &self.success[ending as usize] {
            success.inc();
        }
        self.endings[ending as usize].inc();
    }

    /// Counters of the engine's tenant of that index.
    pub(super) fn tenant(&self, index: usize) -> Option<&TenantCounters> {
        self.tenants.get(index)
    }
}

struct Registrar<'a> {
    registry: &'a mut Registry,
    token_bounds: Vec<f64>,
}

impl Registrar<'_> {
    fn add<M: Metric + Clone>(&mut self, name: &str, help: &str, metric: M) -> M {
        self.registry.register(name, help, metric.clone());
        metric
    }

    fn counter(&mut self, name: &str, help: &str) -> Counter {
        self.add(name, help, Counter::default())
    }

    fn seconds(&mut self, name: &str, help: &str, bounds: &[f64]) -> Histogram {
        self.add(name, help, Histogram::new(bounds.iter().copied()))
    }

    fn phase(&mut self, name: &str, what: &str) -> Histogram {
        self.seconds(name, &format!("Seconds of a request: {what}"), &buckets::REQUEST_SECONDS)
    }

    fn tokens(&mut self, name: &str, help: &str) -> Histogram {
        let bounds = self.token_bounds.clone();
        self.seconds(name, help, &bounds)
    }

    /// Those computed, and those found in the prefix cache.
    fn prompt_tokens_by_source(&mut self) -> (Counter, Counter) {
        let family = Family::<[(&str, &str); 1], Counter>::default();
        let family = self.add(
            "vllm:prompt_tokens_by_source",
            "Prompt tokens of requests whose prefill has ended, by where their KV came from",
            family,
        );
        let of = |source| family.get_or_create_owned(&[("source", source)]);
        (of("local_compute"), of("local_cache_hit"))
    }

    /// Ends in vLLM's words and in Reef's, each reason from the start.
    fn endings(&mut self) -> ([Option<Counter>; Ending::ALL.len()], [Counter; Ending::ALL.len()]) {
        let success = self.add(
            "vllm:request_success",
            "Requests that have ended, by reason",
            Family::<[(&str, &str); 1], Counter>::default(),
        );
        let endings = self.add(
            "reef:requests_ended",
            "Requests that have ended, by reason",
            Family::<[(&str, &str); 1], Counter>::default(),
        );
        let of_vllm = |ending: Ending| {
            let name = ending.vllm_name()?;
            Some(success.get_or_create_owned(&[("finished_reason", name)]))
        };
        let of_reef = |ending: Ending| endings.get_or_create_owned(&[("reason", ending.name())]);
        (Ending::ALL.map(of_vllm), Ending::ALL.map(of_reef))
    }

    fn tenants(&mut self, names: &[String]) -> Vec<TenantCounters> {
        type ByTenant = Family<[(&'static str, String); 1], Counter>;
        let family =
            |of: &mut Self, name: &str, help: &str| of.add(name, help, ByTenant::default());
        let requests = family(self, "reef:tenant_requests", "Requests that have ended, by tenant");
        let prompts = family(
            self,
            "reef:tenant_prompt_tokens",
            "Prompt tokens that were prefilled, by tenant",
        );
        let generated =
            family(self, "reef:tenant_generation_tokens", "Generated tokens, by tenant");
        let of_tenant = |name: &String| {
            let labels = [("tenant", name.clone())];
            TenantCounters {
                requests: requests.get_or_create_owned(&labels),
                prompt_tokens: prompts.get_or_create_owned(&labels),
                generation_tokens: generated.get_or_create_owned(&labels),
            }
        };
        names.iter().map(of_tenant).collect()
    }
}

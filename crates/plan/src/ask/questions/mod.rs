//! The questions, one file each, in the order of the scope document.

mod prelude;

macro_rules! questions {
    ($($file:ident: $question:ident),+ $(,)?) => {
        $(mod $file;)+

        /// Every question.
        pub const ALL: &[&dyn super::Question] = &[$(&$file::$question),+];
    };
}

questions! {
    crossover: Crossover,
    ridge: Ridge,
    concurrency: Concurrency,
    block_size: BlockSize,
    ledger: MemoryLedger,
    fp8: Fp8,
    tp_heads: TpHeads,
    hybrid: Hybrid,
    recompute_or_fetch: RecomputeOrFetch,
    eviction_order: EvictionOrder,
    mla: Mla,
    copy_on_write: CopyOnWrite,
    preempt: Preempt,
    disaggregate: Disaggregate,
    mla_tp: MlaTp,
    k_or_v: KOrV,
    tiers: Tiers,
    recurrent: Recurrent,
    little: Little,
    swap_or_recompute: SwapOrRecompute,
    batch_share: BatchShare,
    ceilings: Ceilings,
    spec: Spec,
    million_tokens: MillionTokens,
    l2: L2,
    fp8_range: Fp8Range,
    formats: Formats,
    startup: Startup,
    trtllm_admission: TrtllmAdmission,
    long_replies: LongReplies,
    graphs: Graphs,
    spill: Spill,
    quota: Quota,
    weights_fit: WeightsFit,
    multimodal: Multimodal,
    beams: Beams,
    paging: Paging,
    packed_gqa: PackedGqa,
}

//! Statistics of the library, as structs of this crate. A newer libdc may report more.

use crate::sys;

macro_rules! report {
    ($(#[$doc:meta])* $name:ident = $raw:ident { $($field:ident: $type:ty,)* }) => {
        $(#[$doc])*
        #[allow(missing_docs)] // dc_api.h documents the fields
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[non_exhaustive]
        pub struct $name {
            $(pub $field: $type,)*
        }

        impl From<sys::$raw> for $name {
            fn from(raw: sys::$raw) -> $name {
                $name { $($field: raw.$field,)* }
            }
        }
    };
}

report! {
    /// Statistics of a context's memory and traffic; see `dc_memory_stats`.
    MemoryStats = dc_memory_stats {
        gathered_bytes: i64,
        gathered_peak_bytes: i64,
        bucket_bytes: i64,
        offload_bytes: i64,
        reload_bytes: i64,
        arena_bytes: i64,
        allocations: i64,
        gathers: i64,
        gather_hits: i64,
        gather_wire_bytes: i64,
        reductions: i64,
        reduce_wire_bytes: i64,
        flushes: i64,
        copied_d2h_bytes: i64,
        copied_h2d_bytes: i64,
        registered_params: i64,
        registered_graphs: i64,
    }
}

report! {
    /// Statistics of an optimizer's memory and work on this rank; see `dc_optimizer_stats`.
    OptimizerStats = dc_optimizer_stats {
        steps: i64,
        params: i64,
        blocks: i64,
        owned_blocks: i64,
        refreshes: i64,
        warm_refreshes: i64,
        failed_refreshes: i64,
        state_bytes: i64,
        scratch_bytes: i64,
        wire_bytes: i64,
        refresh_ns: i64,
        skipped_steps: i64,
    }
}

report! {
    /// A piece of a context's work; see `dc_trace_event`.
    TraceEvent = dc_trace_event {
        begin_ns: i64,
        end_ns: i64,
        graph_id: i64,
        id: i64,
        bytes: i64,
        op: i32,
        lane: i32,
    }
}

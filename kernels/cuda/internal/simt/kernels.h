// All kernels, for one activation type, and their table. src_*.h are links to the
// sources: the go command rebuilds for what lies in this folder only.
#include "arguments.h"
#include "emulated.h"

namespace {
#include "src_common.h"
#include "src_elementwise.h"
#include "src_route_sort.h"
#include "src_route.h"
#include "src_sample.h"
#include "src_gemm.h"
#include "src_attention.h"
#include "src_few.h"
#include "src_copy.h"
namespace sm_90a {  // whose names are others' too
#include "hopper.h"
#include "src_ring.h"
#include "src_expert.h"
#include "src_dense.h"
#include "src_prompt.h"

// Here the names of all structs of arguments are seen.
#define STRUCT(s) {#s, nullptr, 0, sizeof(s)},
#define FIELD(s, f) {#s, #f, offsetof(s, f), sizeof(s::f)},
const simt_field fields[] = {ARGUMENTS(STRUCT, FIELD){nullptr, nullptr, 0, 0}};
}  // namespace sm_90a
}  // namespace

#define ENTRY(name, args) {#name, simt::call<args, name>, sizeof(args)}
#define TILES(name) \
  ENTRY(name##_16, gemm_args), ENTRY(name##_64, gemm_args), ENTRY(name##_128, gemm_args), ENTRY(name##_any, gemm_args)
#define HOPPER(name, args) {#name, simt::call<sm_90a::args, sm_90a::name>, sizeof(sm_90a::args)}
#define EXPERTS(name) HOPPER(name##_256, expert_args), HOPPER(name##_64, expert_args), HOPPER(name##_alone, expert_args), HOPPER(name##_256_few, expert_args), HOPPER(name##_64_few, expert_args), HOPPER(name##_alone_few, expert_args), HOPPER(name##_64_routed, routed_expert_args), HOPPER(name##_alone_routed, routed_expert_args), HOPPER(name##_64_routed_few, routed_expert_args), HOPPER(name##_alone_routed_few, routed_expert_args)
#define HEADS(d) ENTRY(attention_##d##_1, attention_args), ENTRY(attention_##d##_4, attention_args)

extern const simt_field *const FIELDS = sm_90a::fields;
extern const simt_kernel TABLE[] = {
    ENTRY(embed, embed_args),           ENTRY(norm_warp, norm_args),       ENTRY(norm_256, norm_args),
    ENTRY(norm_head, norm_args),        ENTRY(norm_256_2, norm_args),         ENTRY(norm_512_3, norm_args),      ENTRY(norm_512, norm_args), ENTRY(norm_few_256, norm_args), ENTRY(norm_few_512, norm_args),
    ENTRY(clamp, clamp_args),           ENTRY(silu_mul, silu_mul_args),    ENTRY(gather, gather_args),
    ENTRY(combine, combine_args),       ENTRY(add_bias, add_bias_args),    ENTRY(rope, rope_args),
    ENTRY(rope_append_kv, rope_append_kv_args), ENTRY(norm_rope_append_kv, rope_append_kv_args), ENTRY(rope_append_kv_few, rope_append_kv_args), ENTRY(norm_rope_append_kv_few, rope_append_kv_args),
    ENTRY(append_kv, append_kv_args),   ENTRY(route, route_args), ENTRY(route_sort, route_sort_args), ENTRY(group, sort_args),
    ENTRY(sample, sample_args),         ENTRY(sample_merge, sample_args),  ENTRY(attention_join, attention_args),
    ENTRY(sample_cut, sample_args),     ENTRY(log_probs, log_probs_args),  ENTRY(adjust, adjust_args),
    ENTRY(restore, adjust_args),        ENTRY(few_columns_8, few_args),    ENTRY(few_columns_16, few_args),
    ENTRY(few_columns_64, few_args),   ENTRY(few_rows_2, few_args),        ENTRY(few_rows_3, few_args), ENTRY(few_rows_4, few_args), ENTRY(few_rows_5, few_args), ENTRY(few_rows_gated_2, few_args), ENTRY(few_rows_gated_5, few_args), ENTRY(few_rows_gated_once_5, few_args), ENTRY(sixteen_rows_4, few_args), ENTRY(sixteen_rows_gated_5, few_args), ENTRY(router_gate_up, router_gate_up_args), ENTRY(route_down, route_down_args), ENTRY(sixteen_router_gate_up, router_gate_up_args), ENTRY(sixteen_route_down, route_down_args),
    ENTRY(copy_blocks, copy_blocks_args), ENTRY(copy_small, copy_args), ENTRY(add_rows, add_rows_args), ENTRY(mask_logits, mask_args), ENTRY(group_few, sort_args), ENTRY(runs, runs_args),        ENTRY(combine_norm_256, combine_norm_args), ENTRY(combine_norm_512_few, combine_norm_args),
    ENTRY(combine_norm_512, combine_norm_args), ENTRY(combine_norm_512_3, combine_norm_args), ENTRY(combine_norm_few_256, combine_norm_args), ENTRY(combine_norm_few_512, combine_norm_args),
    ENTRY(attention_128_wide, attention_args), ENTRY(rope_attention_128_wide, rope_attention_args), ENTRY(norm_rope_attention_128_wide, rope_attention_args), HEADS(32), HEADS(64), HEADS(96), HEADS(128), TILES(matmul), TILES(up), TILES(down),
    EXPERTS(expert_up), EXPERTS(expert_down), HOPPER(dense_64, dense_args), HOPPER(dense_128, dense_args), HOPPER(dense_256, dense_args), HOPPER(prompt_128, prompt_args), HOPPER(prompt_join, prompt_args), {nullptr, nullptr, 0},
};

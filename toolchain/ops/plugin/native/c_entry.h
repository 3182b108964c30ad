/* The attention kernels without TensorRT: a plain C interface on raw device pointers.
 *
 * Every function may be called from any thread. Those that can fail return a code (0: done, 1: bad
 * argument, 2: no kernels for this device or node, 3: the CUDA driver is missing or refused, 4: a
 * fault inside) and leave a text for dtool_attention_last_error on that thread.
 */
#ifndef DTOOL_C_ENTRY_H
#define DTOOL_C_ENTRY_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* One call: T new tokens for each of B rows. All pointers are device memory of the current CUDA
 * context, aligned to 16 bytes, dense and row-major. H, K, D and the cache's format are the spec's. */
typedef struct DtoolAttentionCall {
    uint32_t struct_bytes;      /* sizeof(DtoolAttentionCall): guards against another version of this header */
    int32_t spec;               /* index into "specs" of dtool_attention_describe */
    int32_t compute_dtype;      /* 0 float16, 1 bfloat16 */
    int32_t batch;              /* B */
    int32_t new_tokens;         /* T; 1 takes the decode kernels */
    int32_t capacity;           /* C, slots of the caches; past + T must fit, which only the caller can know */
    const void* qkv;            /* [B, T, (H + 2 K) D] compute type */
    const void* cos;            /* [P, rotary_dim / 2] float32, P >= C */
    const void* sin;            /* as cos */
    const void* past_lengths;   /* [B] int64 */
    void* key_cache;            /* [B, K, C, D] compute type or codes; written in place */
    void* value_cache;          /* as key_cache */
    void* key_scale;            /* float32; null without a quantized cache. Static: [K], only read. With a scale
                                   per token: [B, K, C], written in place as the caches are */
    void* value_scale;          /* as key_scale */
    const void* q_norm;         /* [D] compute type; null without QK-norm */
    const void* k_norm;         /* as q_norm */
    void* out;                  /* [B, T, H D] compute type */
    void* workspace;            /* dtool_attention_workspace_bytes; null when that is 0 */
    uint64_t workspace_bytes;
} DtoolAttentionCall;

/* Launch on a CUstream (null: the default stream). Asynchronous; may be captured into a CUDA graph. */
int dtool_attention(const DtoolAttentionCall* call, void* stream);

/* Bytes of workspace enough for one call of these sizes on any device; -1 for a bad argument. */
int64_t dtool_attention_workspace_bytes(int32_t spec, int32_t batch, int32_t new_tokens);

/* Load the kernels on the current device now instead of in the first call. */
int dtool_attention_prepare(int32_t spec, int32_t compute_dtype);

/* JSON: abi, specs, compute_dtypes, sms, sets with the kernels' figures, versions. Never freed. */
const char* dtool_attention_describe(void);

/* What went wrong in this thread's last failing call. Overwritten by the next failure. */
const char* dtool_attention_last_error(void);

#ifdef __cplusplus
}
#endif

#endif

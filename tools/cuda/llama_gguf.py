"""Part of llama.sh: a GGUF file of a Mixtral preset's shape with random weights in bfloat16, for llama.cpp.

    llama_gguf.py GGUF-PY PRESET.json LAYERS FILE

GGUF-PY is the folder gguf-py of llama.cpp's source, which writes the file. It has no tokenizer: llama-bench
draws token ids itself. Weights repeat one block of random numbers.
"""

import json
import pathlib
import sys

import numpy

BLOCK = 1 << 24  # elements


def tensors(c, layers):
    """Names and shapes, outermost dimension first, and whether they are float32."""
    hidden, wide, experts = c["hidden_size"], c["intermediate_size"], c["num_local_experts"]
    kv = hidden // c["num_attention_heads"] * c["num_key_value_heads"]
    yield "token_embd.weight", (c["vocab_size"], hidden), False
    for i in range(layers):
        for name, shape, single in (
            ("attn_norm", (hidden,), True),
            ("attn_q", (hidden, hidden), False),
            ("attn_k", (kv, hidden), False),
            ("attn_v", (kv, hidden), False),
            ("attn_output", (hidden, hidden), False),
            ("ffn_norm", (hidden,), True),
            ("ffn_gate_inp", (experts, hidden), True),
            ("ffn_gate_exps", (experts, wide, hidden), False),
            ("ffn_up_exps", (experts, wide, hidden), False),
            ("ffn_down_exps", (experts, hidden, wide), False),
        ):
            yield f"blk.{i}.{name}.weight", shape, single
    yield "output_norm.weight", (hidden,), True
    yield "output.weight", (c["vocab_size"], hidden), False


def main(source, preset, layers, file):
    sys.path.insert(0, source)
    import gguf

    c = json.loads(pathlib.Path(preset).read_text())
    if c["model_type"] != "mixtral":
        sys.exit(f"{preset} is of type {c['model_type']}: only mixtral is supported")
    w = gguf.GGUFWriter(file, "llama")
    w.add_name("random")
    w.add_block_count(layers)
    w.add_context_length(c["max_position_embeddings"])
    w.add_embedding_length(c["hidden_size"])
    w.add_feed_forward_length(c["intermediate_size"])
    w.add_head_count(c["num_attention_heads"])
    w.add_head_count_kv(c["num_key_value_heads"])
    w.add_rope_dimension_count(c["hidden_size"] // c["num_attention_heads"])
    w.add_rope_freq_base(c["rope_theta"])
    w.add_layer_norm_rms_eps(c["rms_norm_eps"])
    w.add_expert_count(c["num_local_experts"])
    w.add_expert_used_count(c["num_experts_per_tok"])
    w.add_vocab_size(c["vocab_size"])
    w.add_tokenizer_model("none")
    w.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    sizes = []
    for name, shape, single in tensors(c, layers):
        n = int(numpy.prod(shape))
        if single:
            w.add_tensor_info(name, shape, numpy.dtype(numpy.float32), 4 * n)
        else:
            w.add_tensor_info(name, shape, numpy.dtype(numpy.uint16), 2 * n, raw_dtype=gguf.GGMLQuantizationType.BF16)
        sizes.append((shape, single))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_ti_data_to_file()
    random = numpy.random.default_rng(1)
    # The upper halves of float32 are bfloat16.
    block = (random.standard_normal(BLOCK, dtype=numpy.float32) * 0.02).view(numpy.uint32) >> 16
    block = block.astype(numpy.uint16)
    for shape, single in sizes:
        n = int(numpy.prod(shape))
        if single:
            w.write_tensor_data(numpy.ones(shape, numpy.float32) if len(shape) == 1 else random.standard_normal(shape, dtype=numpy.float32))
        else:
            w.write_tensor_data(numpy.resize(block, n).reshape(shape))
    w.close()


if __name__ == "__main__":
    if len(sys.argv) != 5:
        sys.exit(__doc__)
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])

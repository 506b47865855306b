"""The two latent forms as rows of the families' table: the plain form of each source, and stock DeepSeek-V3.

More symbols than in `families`, of multi-head latent attention: r = kv_lora_rank, p = qk_rope_head_dim,
S = H * (qk_nope_head_dim + p) (queries), T = H * (qk_nope_head_dim + v_head_dim) (expanded keys and values),
U = H * v_head_dim (what the output projection reads), q = q_lora_rank.
"""

from __future__ import annotations

from dataclasses import replace

from .families import FAMILIES, Family

PREFIX = "mla_"  # of the plain form's model types

_PLAIN = """
    ~self_attn.q_proj.weight                S D
    ~self_attn.q_proj.bias                  S       if mla_bias
    ~self_attn.kv_a_proj_with_mqa.weight    r+p D
    ~self_attn.kv_a_proj_with_mqa.bias      r+p     if mla_bias
    ~self_attn.kv_b_proj.weight             T r
    ~self_attn.o_proj.weight                D U
    ~self_attn.o_proj.bias                  D       if mla_bias
"""
_DEEPSEEK = """
    model.embed_tokens.weight               N D
    lm_head.weight                          N D     untied
    model.norm.weight                       D
    ~self_attn.q_proj.weight                S D     if no_q_lora
    ~self_attn.q_a_proj.weight              q D     if q_lora_rank
    ~self_attn.q_a_proj.bias                q       if q_lora_bias
    ~self_attn.q_a_layernorm.weight         q       if q_lora_rank
    ~self_attn.q_b_proj.weight              S q     if q_lora_rank
    ~self_attn.kv_a_proj_with_mqa.weight    r+p D
    ~self_attn.kv_a_proj_with_mqa.bias      r+p     if attention_bias
    ~self_attn.kv_a_layernorm.weight        r
    ~self_attn.kv_b_proj.weight             T r
    ~self_attn.o_proj.weight                D U
    ~self_attn.o_proj.bias                  D       if attention_bias
    ~self_attn.rotary_emb.inv_freq          drop
    ~mlp.gate_proj.weight                   I D
    ~mlp.up_proj.weight                     I D
    ~mlp.down_proj.weight                   D I
    ~input_layernorm.weight                 D
    ~post_attention_layernorm.weight        D
"""


def _plain(row: Family) -> Family:
    """The plain form of a family: its own table with another attention."""
    attention = f"{row.layers}{{layer}}.self_attn."
    others = [line for line in row.weights if not line.template.startswith(attention)]
    return replace(row, name=PREFIX + row.name, tensors=_PLAIN, becomes="", before=tuple(others), spelling=row.spelling)


PLAIN: dict[str, Family] = {row.name: row for row in (_plain(row) for row in FAMILIES.values() if row.latent)}
DEEPSEEK = Family("deepseek_v3", _DEEPSEEK, rope="interleaved")
KNOWN: dict[str, Family] = {**FAMILIES, **PLAIN, DEEPSEEK.name: DEEPSEEK}

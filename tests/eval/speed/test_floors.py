"""What a decoding step reads and computes at least: against torch's own count of operations, and against storages."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from kvfold.common.loading import load_model
from kvfold.convert.mla.convert import convert_mla
from kvfold.eval.speed import floors
from kvfold.eval.speed.floors import ABSORBED, EXPANDED, HEADS, Gauge, step_work
from kvfold.eval.speed.footprint import measure_footprint, weight_bytes
from kvfold.eval.speed.runs import Decoder, decoding, decoding_of

from ..conftest import VOCABULARY, make_model
from ..test_cache import MLA

SDPA = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
BATCH, CONTEXT = 3, 40

# Family, settings, whether latents are expanded, and what it is called.
STEPS = {
    "llama-mha": ("llama", {"num_key_value_heads": 4}, False, HEADS),
    "llama-gqa": ("llama", {}, False, HEADS),
    "llama-tied": ("llama", {"tie_word_embeddings": True}, False, HEADS),
    "gpt2": ("gpt2", {}, False, HEADS),
    "mistral-window": ("mistral", {"sliding_window": 16}, False, HEADS),
    "deepseek_v3": ("deepseek_v3", MLA, False, ABSORBED),
    "deepseek_v3-expanded": ("deepseek_v3", MLA, True, EXPANDED),
    "deepseek_v2-q_lora": ("deepseek_v2", {**MLA, "q_lora_rank": 12}, False, ABSORBED),
}


def counted_flops(model, *, expand: bool = False) -> int:
    """What torch counts in one step of a batch whose static cache holds, and attends to, `CONTEXT` tokens in all."""

    def count(query, key, value, *_, **__):
        return sdpa_flop_count(query, key, value)

    with decoding(model, expand=expand):
        decoder = Decoder(model, batch_size=BATCH, context=CONTEXT - 1, steps=1)
        with FlopCounterMode(display=False, custom_mapping={SDPA: count}) as counter:
            decoder.logits()
    return counter.get_total_flops()


@pytest.mark.parametrize(("family", "settings", "expand", "called"), STEPS.values(), ids=STEPS)
def test_operations_are_those_that_torch_counts(family, settings, expand, called):
    model = make_model(family, **settings)
    assert decoding_of(model, expand=expand) == called
    work = step_work(model, called, context=CONTEXT, batch_size=BATCH, cache_bytes=0)
    window = settings.get("sliding_window")
    missing = BATCH * 2 * 4 * 4 * 8 if window else 0  # a static window holds one token more than the next step keeps
    # Of expanded latents, torch counts that of the step's own token among those that are cached.
    own = BATCH * 2 * 2 * 24 * 4 * (8 + 8) if called == EXPANDED else 0
    assert counted_flops(model, expand=expand) == work.flops + missing - own


@pytest.mark.parametrize("expand", [False, True])
def test_operations_of_the_plain_form(expand, llama, save, tmp_path):
    convert_mla(
        save(llama, tokenizer=False),
        tmp_path / "out",
        form="plain",
        kv_rank=10,
        rope_dim=4,
        rope_select="high",
        calib=["none"],
    )
    model = load_model(tmp_path / "out")
    called = decoding_of(model, expand=expand)
    assert called == (EXPANDED if expand else ABSORBED)
    work = step_work(model, called, context=CONTEXT, batch_size=BATCH, cache_bytes=0)
    sizes = model.config
    own = sizes.kv_lora_rank * 4 * (sizes.qk_nope_head_dim + sizes.v_head_dim) if expand else 0
    assert counted_flops(model, expand=expand) == work.flops - BATCH * 2 * 2 * own
    assert model.config._attn_implementation == "sdpa", "as it was before"


@pytest.mark.parametrize("tied", [False, True])
def test_bytes_are_those_of_storages(tied):
    model = make_model("llama", tie_word_embeddings=tied)
    footprint = measure_footprint(model, name="m")
    parameters = 2 * (32 * 32 + 2 * 16 * 32 + 32 * 32 + 3 * 32 * 64 + 2 * 32) + 32 + (2 - tied) * VOCABULARY * 32
    assert footprint.weight_bytes == weight_bytes(model)
    assert footprint.weight_bytes == 4 * parameters + sum(buffer.nbytes for buffer in model.buffers())
    decoder = Decoder(model, batch_size=BATCH, context=CONTEXT, steps=2)
    held = sum(each.nbytes for layer in decoder.cache.layers for each in (layer.keys, layer.values))
    assert BATCH * footprint.cache_bytes(CONTEXT + 2) == held
    work = step_work(model, HEADS, context=CONTEXT, batch_size=BATCH, cache_bytes=footprint.cache_bytes(CONTEXT))
    rows = 0 if tied else VOCABULARY - BATCH  # of the embedding, which nobody reads
    assert work.weight_bytes == 4 * (parameters - 32 * rows)
    assert work.cache_bytes == held * CONTEXT // (CONTEXT + 2)


def test_of_experts_those_of_one_token_count():
    sizes = {"num_local_experts": 8, "moe_intermediate_size": 64}
    few, many = (make_model("mixtral", num_experts_per_tok=n, **sizes) for n in (1, 3))
    less, more = (step_work(m, HEADS, context=1, batch_size=BATCH, cache_bytes=0) for m in (few, many))
    one = 3 * 32 * 64 * 2  # weights of an expert, in both layers
    assert more.weight_bytes - less.weight_bytes == 2 * 4 * one
    assert more.flops - less.flops == 2 * BATCH * 2 * one


def test_rates_are_the_best_of_all(monkeypatch):
    gauge = Gauge(torch.device("cpu"), torch.float32, copied_bytes=2**20, matrix=64)
    gauge.take()
    assert gauge._target.equal(gauge._source)
    torch.testing.assert_close(gauge._product, gauge._left @ gauge._right, rtol=1e-5, atol=1e-5)
    assert 0 < gauge.copy_bytes_per_second < 1e13
    assert 0 < gauge.matrix_flops_per_second < 1e15
    seconds = iter([2e-9, 5e-9, 4e-9, 9e-9])
    monkeypatch.setattr(floors, "timed", lambda device, work: next(seconds))
    gauge.take()
    gauge.take()
    assert gauge.copy_bytes_per_second == pytest.approx(2 * 2**20 / 2e-9)
    assert gauge.matrix_flops_per_second == pytest.approx(2 * 64**3 / 5e-9)

"""The table of what engines demand: a right checkpoint passes, and every row sees what it is there for."""

import json
import re
import subprocess
import sys
from copy import deepcopy
from itertools import chain

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM

from kvfold.common.errors import UserError
from kvfold.convert import demands
from kvfold.convert.check import check
from kvfold.convert.demands import ENGINES, violations
from kvfold.convert.headers import TensorInfo
from kvfold.convert.latent_form import ENGINE_SHAPES
from kvfold.recipes.engines.synthetic import DENSE
from kvfold.recipes.tiny import MODEL_DIR

ATTENTION = "model.layers.1.self_attn."
NEUTRAL = {
    "format_version": 1, "form": "deepseek_v3", "readers": ["transformers", "vllm"], "latent_scale": 2.0**-20,
    "residual_scale": 0.1**0.5, "rms_norm_eps": 1e-5,
    "plain": {"kv_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16},
    "source": {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4,
               "head_dim": 96, "num_hidden_layers": 2},
}  # fmt: skip


def make(dtype="F32", **sizes):
    """A config and its tensors as transformers names and shapes them, no weight in memory."""
    small = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    shape = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
    said = {**DENSE, **small, **shape, "vocab_size": 97, "q_lora_rank": None, "hidden_act": "silu", **sizes}
    said = {
        "num_key_value_heads": said["num_attention_heads"],
        "first_k_dense_replace": said["num_hidden_layers"],
    } | said
    with torch.device("meta"):
        model = DeepseekV3ForCausalLM(DeepseekV3Config(**said))
    config = {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], **said}
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0}
    tensors = {name: (dtype, tuple(weight.shape)) for name, weight in model.state_dict().items()}
    return config, infos(tensors)


def infos(tensors):
    return {name: TensorInfo(name, dtype, shape, "model.safetensors") for name, (dtype, shape) in tensors.items()}


RIGHT = {
    "no-q-rank": make(),
    "q-rank": make(q_lora_rank=48),
    "biases": make(q_lora_rank=48, attention_bias=True),
}


def said_of(engine, case="q-rank", change=None, tensors=None, drop=()):
    """Violations of a right checkpoint after a change: config keys (None removes), and tensors in and out."""
    config, stored = deepcopy(RIGHT[case])
    for key, value in (change or {}).items():
        config[key] = value
    for key in drop:
        del (config if key in config else stored)[key]
    return violations(config, {**stored, **infos(tensors or {})}, engine)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_right_checkpoint_passes(engine):
    assert said_of(engine) == []
    assert said_of(engine, "no-q-rank") == [] or engine == "llama.cpp"


@pytest.mark.parametrize("engine", ["transformers", "vllm-transformers"])
def test_biases_have_their_place_in_transformers(engine):
    assert said_of(engine, "biases") == []


def says(**keys):
    return {"change": keys}


def lacks(name):
    return {"drop": [name]}


def holds(name, *shape):
    return {"tensors": {name: ("F32", shape)}}


LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4}
NATIVE = ["vllm", "sglang", "llama.cpp"]
BY_TRANSFORMERS = ["transformers", "vllm-transformers"]
# Engines, a right checkpoint, what is changed in it; then the topic, and what the message must name.
WRONG = [
    (ENGINES, "q-rank", says(num_key_value_heads=2), "KV heads", "is 2 with 4 query heads"),
    (ENGINES, "q-rank", lacks("num_key_value_heads"), "KV heads", "is not said with 4 query heads"),
    (ENGINES, "q-rank", lacks("n_routed_experts"), "experts", "n_routed_experts is not said"),
    (ENGINES, "q-rank", says(n_routed_experts=None), "experts", "n_routed_experts is null"),
    (ENGINES, "q-rank", lacks("moe_intermediate_size"), "experts", "moe_intermediate_size is not said"),
    (ENGINES, "q-rank", lacks("norm_topk_prob"), "experts", "norm_topk_prob is not said"),
    (ENGINES, "q-rank", says(num_experts_per_tok=3), "experts", "num_experts_per_tok is 3 of 2"),
    (ENGINES, "q-rank", says(first_k_dense_replace=1), "experts", "first_k_dense_replace is 1 of 2 layers"),
    (ENGINES, "q-rank", lacks("first_k_dense_replace"), "experts", "first_k_dense_replace is not said of 2"),
    (["sglang"], "q-rank", lacks("moe_layer_freq"), "experts", "moe_layer_freq is not said"),
    (["llama.cpp"], "q-rank", says(n_group=2), "experts", "n_group is 2"),
    (ENGINES, "q-rank", lacks("num_nextn_predict_layers"), "next-token layers", "is not said (1 where not said)"),
    (ENGINES, "q-rank", lacks("kv_lora_rank"), "sizes", "kv_lora_rank is not said"),
    (ENGINES, "q-rank", lacks("q_lora_rank"), "sizes", "q_lora_rank is not said"),
    (ENGINES, "q-rank", says(q_lora_rank=0), "sizes", "q_lora_rank is 0"),
    (ENGINES, "q-rank", lacks("max_position_embeddings"), "sizes", "max_position_embeddings is not said"),
    (BY_TRANSFORMERS, "q-rank", says(head_dim=16), "sizes", "head_dim is 16"),
    (ENGINES, "q-rank", lacks("rms_norm_eps"), "norm", "rms_norm_eps is not said"),
    (BY_TRANSFORMERS, "q-rank", says(rms_norm_eps=1e-5), "latent norm", "rms_norm_eps is 1e-05"),
    (ENGINES, "q-rank", says(kvfold=NEUTRAL, rms_norm_eps=1e-5), "norm", "scaled by 0.316228 for 1e-06"),
    (["vllm", "llama.cpp"], "q-rank", says(rope_interleave=False), "RoPE layout", "rope_interleave is false"),
    (ENGINES, "q-rank", says(rope_parameters={"rope_type": "default"}), "RoPE", "no rope_theta"),
    (ENGINES, "q-rank", says(rope_parameters={"rope_theta": 1e40}), "RoPE", "rope_theta is 1e+40"),
    (NATIVE, "q-rank", says(rope_parameters=LLAMA3), "RoPE scaling", "llama3"),
    (NATIVE, "q-rank", says(rope_scaling={"type": "linear"}, rope_parameters=None), "RoPE scaling", "linear"),
    (["llama.cpp"], "no-q-rank", {}, "query rank", "q_lora_rank is null; llama.cpp demands one"),
    (["llama.cpp"], "q-rank", says(num_hidden_layers=27), "query rank", "q_lora_rank is 48; a model of 27"),
    (["llama.cpp"], "no-q-rank", says(num_hidden_layers=48), "query rank", "at 48 layers llama.cpp demands one"),
    (["llama.cpp"], "q-rank", says(num_hidden_layers=48, vocab_size=128256), "query rank", "a Lite model"),
    (NATIVE, "q-rank", says(hidden_act="gelu"), "activation", "hidden_act is gelu"),
    (ENGINES, "q-rank", says(tie_word_embeddings=True), "head", "tie_word_embeddings is true"),
    (ENGINES, "q-rank", lacks("lm_head.weight"), "tensors", "needs lm_head.weight"),
    (NATIVE, "biases", {}, "biases", "model.layers.0.self_attn."),
    (BY_TRANSFORMERS, "q-rank", holds(f"{ATTENTION}q_a_proj.bias", 48), "biases", f"{ATTENTION}q_a_proj.bias"),
    (BY_TRANSFORMERS, "biases", holds(f"{ATTENTION}q_b_proj.bias", 768), "biases", f"{ATTENTION}q_b_proj.bias"),
    (ENGINES, "q-rank", holds(f"{ATTENTION}k_norm.weight", 128), "QK-norm", f"{ATTENTION}k_norm.weight"),
    (ENGINES, "q-rank", holds("model.layers.0.mlp.up_proj.bias", 96), "tensors", "model.layers.0.mlp.up_proj.bias"),
    (ENGINES, "q-rank", holds("model.layers.2.input_layernorm.weight", 64), "tensors", "no place for model.layers.2"),
    (ENGINES, "q-rank", lacks(f"{ATTENTION}kv_a_layernorm.weight"), "tensors", "needs model.layers.1.self_attn.kv_a"),
    (ENGINES, "q-rank", says(v_head_dim=64), "tensors", "has shape [1024, 512], the config says [768, 512]"),
    (ENGINES, "q-rank", says(architectures=["LlamaForCausalLM"]), "architecture", "names LlamaForCausalLM"),
    (ENGINES, "q-rank", says(auto_map={"AutoModel": "x.Y"}), "architecture", "auto_map"),
    (ENGINES, "q-rank", says(model_type="mla_llama", architectures=["MlaLlama"]), "form", "kvfold's plain form"),
    (
        ENGINES,
        "q-rank",
        says(model_type="bert", architectures=["Bert"]),
        "architecture",
        "architecture Bert is not in the list",
    ),
]
CASES = [(engine, *row) for engines, *row in WRONG for engine in engines]


@pytest.mark.parametrize(("engine", "case", "change", "topic", "message"), CASES)
def test_what_an_engine_would_not_read_is_named(engine, case, change, topic, message):
    found = said_of(engine, case, **change)
    (match,) = [one for one in found if one.topic == topic and message in one.wrong]
    assert match.mend
    assert "{" not in match.wrong + match.mend
    assert match.read_from == demands.read_from(engine)
    expected = "warn" if topic == "latent norm" else "refuse"
    assert match.severity == expected


def test_what_only_others_cannot_hold_passes():
    assert not said_of("transformers", change={"rope_interleave": False})
    assert not said_of("sglang", change={"rope_interleave": False})
    assert not said_of("transformers", change={"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}})
    assert not said_of("transformers", change={"hidden_act": "gelu"})


SHAPES = [  # engine, rank, rope, nope, v, severities
    ("transformers", 24, 8, 16, 16, []),
    ("llama.cpp", 24, 8, 16, 16, []),
    ("vllm", 24, 8, 16, 16, ["refuse", "warn"]),
    ("vllm-transformers", 24, 8, 16, 16, ["refuse", "warn"]),
    ("vllm", 256, 64, 128, 128, ["warn"]),
    ("vllm", 512, 64, 64, 64, ["warn"]),
    ("vllm", 512, 64, 64, 128, []),
    ("sglang", 24, 8, 16, 16, ["warn"]),
    ("sglang", 256, 32, 16, 16, []),
    ("sglang", 640, 64, 16, 16, ["warn", "warn"]),
    ("vllm", 640, 64, 16, 16, ["refuse", "warn"]),
    ("vllm", 448, 64, 256, 16, ["warn", "warn"]),
]


@pytest.mark.parametrize(("engine", "rank", "rope", "nope", "value", "severities"), SHAPES)
def test_shapes_by_engine(engine, rank, rope, nope, value, severities):
    sizes = {"kv_lora_rank": rank, "qk_rope_head_dim": rope, "qk_nope_head_dim": nope, "v_head_dim": value}
    found = violations(*make(q_lora_rank=48, **sizes), engine)
    assert [one.severity for one in found] == severities
    assert {one.topic for one in found} <= {"shape"}


@pytest.mark.parametrize(("engine", "rank", "rope", "nope", "value", "severities"), SHAPES)
def test_padding_is_a_way_out_where_it_ends_at_a_shape(engine, rank, rope, nope, value, severities):
    sizes = {"kv_lora_rank": rank, "qk_rope_head_dim": rope, "qk_nope_head_dim": nope, "v_head_dim": value}
    fits = rank <= 512 and nope <= 192
    found = [one for one in violations(*make(q_lora_rank=48, **sizes), engine) if "fa3" not in one.wrong]
    for one in found:
        assert (re.search("with .*--pad-to-engine$|--pad-to-engine trades", one.mend) is not None) is fits
        assert fits or "ends at 512 + 64" in one.mend or one.mend == "it runs all the same"


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("shape", ENGINE_SHAPES, ids=str)
def test_what_is_padded_is_not_told_to_pad(shape, engine):
    assert violations(*make(q_lora_rank=48, **shape.as_config()), engine) == []


@pytest.mark.parametrize("layers, rank", [(26, None), (27, None), (25, 48), (48, 48)])
def test_llama_cpp_takes_some_depths_without_a_query_rank(layers, rank):
    assert violations(*make(num_hidden_layers=layers, q_lora_rank=rank), "llama.cpp") == []


def exported(dtype="F32", eps=1e-6, **block):
    config, tensors = make(dtype, q_lora_rank=48)
    return {**config, "rms_norm_eps": eps, "kvfold": {**NEUTRAL, **block}}, tensors


def topics(engine, **said):
    return {(one.topic, one.severity) for one in violations(*exported(**said), engine)}


def test_the_neutral_norm_in_narrow_weights():
    assert topics("transformers") == topics("vllm") == set()
    assert topics("vllm", dtype="F16") == {("dtype", "refuse")}
    assert topics("vllm", dtype="BF16") == set()
    assert topics("llama.cpp") == {("dtype", "warn")}, "F16 and Q8_0 are chosen after the export"
    config, tensors = exported()
    quantised = violations({**config, "quantization_config": {"quant_method": "gptq"}}, tensors, "vllm")
    assert [one.topic for one in quantised] == ["dtype"]


def test_the_large_eps_form_is_for_those_who_follow_the_config():
    large = {"readers": ["llama.cpp"], "residual_scale": 100.0, "eps": 1e-1, "latent_scale": 2.0**-6}
    assert topics("llama.cpp", dtype="F16", **large) == topics("vllm", dtype="F16", **large) == set()
    assert topics("transformers", **large) == topics("vllm-transformers", **large) == {("latent norm", "refuse")}
    (one,) = violations(*exported(**large), "transformers")
    assert "with eps 0.1, but transformers runs it with 1e-06 (fixed there)" in one.wrong


def test_an_export_for_transformers_alone_keeps_its_eps_and_is_not_for_vllm():
    alone = {"readers": ["transformers"], "residual_scale": 1.0, "eps": 1e-5}
    assert topics("transformers", **alone) == set()
    assert topics("vllm", **alone) == {("latent norm", "refuse")}


def test_what_engines_say_alike_is_said_once():
    engines, checkpoint = ("vllm", "vllm-transformers"), make(q_lora_rank=48, v_head_dim=64)
    found = [one for engine in engines for one in violations(*checkpoint, engine)]
    (line,) = demands.spelled(found)
    assert line == f"vllm, vllm-transformers: {found[0].wrong}; {found[0].mend}"
    different = violations(*make(q_lora_rank=48, kv_lora_rank=24), "sglang")
    assert len(demands.spelled([*found, *different])) == 2


def test_a_larger_cache_than_the_sources_is_said():
    narrow = {**NEUTRAL["source"], "num_key_value_heads": 2}
    assert topics("vllm", source=narrow) == {("cache", "warn")}
    (one,) = violations(*exported(source=narrow), "vllm")
    assert "it caches 576 elements a token and layer, more than the source's 384" in one.wrong
    assert "without --pad-to-engine, which vLLM alone needs" in one.mend, "a smaller rank is padded to the same"
    whole = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
    (one,) = violations(*exported(source=narrow, plain=whole), "vllm")
    assert one.mend == "convert the source to smaller sizes"
    assert topics("vllm", format_version=2) == {("format", "warn")}


def test_every_row_of_the_table_is_violated_by_some_case():
    seen = []
    for engine, case, change, *_ in CASES:
        config, tensors = deepcopy(RIGHT[case])
        config |= change.get("change", {})
        for key in change.get("drop", ()):
            del (config if key in config else tensors)[key]
        seen.append(demands.Seen(engine, config, {**tensors, **infos(change.get("tensors", {}))}))
    for engine, rank, rope, nope, value, _ in SHAPES:
        sizes = {"kv_lora_rank": rank, "qk_rope_head_dim": rope, "qk_nope_head_dim": nope, "v_head_dim": value}
        seen.append(demands.Seen(engine, *make(q_lora_rank=48, **sizes)))
    large = {"readers": ["llama.cpp"], "residual_scale": 100.0, "eps": 1e-1}
    narrow = {**NEUTRAL["source"], "num_key_value_heads": 2}
    whole = {"source": narrow, "plain": {"kv_lora_rank": 512, "qk_rope_head_dim": 64}}
    for said in ({"dtype": "F16"}, {"source": narrow}, whole, {"format_version": 2}, large):
        seen += [demands.Seen(engine, *exported(**said)) for engine in ("llama.cpp", "transformers")]
    seen.append(demands.Seen("vllm", {**exported()[0], "quantization_config": {}}, exported()[1]))
    edited, tensors = exported()
    edited["kvfold"] = {**edited["kvfold"], "written": {**edited, "hidden_act": "gelu"}}
    seen.append(demands.Seen("transformers", edited, tensors))
    broken_llama = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **NEUTRAL["source"]}
    seen.append(demands.Seen("vllm", broken_llama, {}))
    for row in demands._TABLE["demands"]:
        wanted = row.get("form", "deepseek_v3")
        mended = {
            demands._mend(row, one)
            for one in seen
            if demands.form_of(one.config, one.engine) == wanted
            and one.engine in row.get("engines", ENGINES)
            and list(demands._findings(row, one))
        }
        mends = [row["mend"]] if isinstance(row["mend"], str) else [one["say"] for one in row["mend"]]
        assert mended == set(mends), row["wrong"]


def test_the_table_names_only_what_there_is():
    for row in demands._TABLE["demands"]:
        assert set(row) <= {"engines", "form", "topic", "severity", "if", "needs", "find", "match", "wrong", "mend"}
        assert set(row.get("engines", [])) <= set(ENGINES)
        assert row.get("severity", "refuse") in ("refuse", "warn")
        assert row.get("find", "stored") in demands.FINDERS
        mends = row["mend"] if isinstance(row["mend"], list) else []
        assert not any("if" not in one for one in mends[:-1]) and all("if" not in one for one in mends[-1:])
        assert all(set(one) <= {"if", "say"} for one in mends)
        for condition in chain(row.get("if", []), row.get("needs", []), *(one.get("if", []) for one in mends)):
            assert set(condition) - {"key", "each"} <= {*demands.OPERATORS, "present"}
            assert len(condition) == 2
        re.compile(row.get("match", ""))


@pytest.mark.parametrize("value", [None, "x", [], {}, {"x": {}}, -1, 1.5, True, 10**9], ids=str)
def test_a_config_of_any_kind_gets_an_answer(value):
    config, tensors = exported()
    for key in config:
        assert all(one.wrong for one in violations({**config, key: value}, tensors, "llama.cpp"))
    for key in NEUTRAL:
        violations({**config, "kvfold": {**NEUTRAL, key: value}}, tensors, "transformers")


def test_an_unknown_engine_is_a_users_error():
    with pytest.raises(UserError, match="did you mean vllm"):
        check(MODEL_DIR, engine="vlm")


# On disk.


def save(folder, config, tensors):
    folder.mkdir()
    zeros = {name: torch.zeros(info.shape) for name, info in tensors.items()}
    save_file(zeros, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_the_report(tmp_path):
    config, tensors = exported(source={**NEUTRAL["source"], "num_key_value_heads": 1})
    report = check(save(tmp_path / "out", {**config, "num_nextn_predict_layers": 1}, tensors), engine="vllm")
    assert not report.passed
    assert "num_nextn_predict_layers is 1" in report.reason
    assert [one.severity for one in report.violations] == ["refuse", "warn"]
    assert report.checked == "all that vllm is known to demand of MLA in config.json and headers"
    cached = report.unpadded_kv_elements_per_token_per_layer, report.kv_elements_per_token_per_layer
    assert (*cached, report.source_kv_elements_per_token_per_layer) == (32, 576, 192)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_stock_checkpoint_of_a_known_family_passes(engine):
    report = check(MODEL_DIR, engine=engine)
    assert report.passed
    assert report.violations == []
    assert report.architecture == "LlamaForCausalLM"
    assert report.checked.startswith(f"only that {engine} has a class for LlamaForCausalLM")
    assert report.kv_elements_per_token_per_layer is None


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt_bigcode", "stablelm"])
def test_families_that_save_less_than_their_config_says_are_held_against_their_table(kind, tmp_path):
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    special = {"vocab_size": 97, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes, **special)).save_pretrained(tmp_path)
    assert check(tmp_path, engine="sglang").passed
    config = json.loads((tmp_path / "config.json").read_text())
    config["n_layer" if kind == "gpt_bigcode" else "num_hidden_layers"] = 3
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert re.search("is missing|`num_hidden_layers` .3. must be", check(tmp_path, engine="sglang").reason)


def test_a_gguf_file_is_refused(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(UserError, match="check the directory that it was made from"):
        check(tmp_path / "model.gguf", engine="llama.cpp")


def test_mla_is_checked_without_torch(tmp_path):
    folder = save(tmp_path / "out", *make(q_lora_rank=48))
    code = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = None\n"
        "from kvfold.convert.check import check; print(check(sys.argv[1], engine='sglang').passed)"
    )
    done = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True)
    assert done.stdout == "True\n", done.stderr

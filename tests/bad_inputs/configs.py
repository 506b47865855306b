"""What config.json can say wrong: told from the file itself, before anything large is imported."""

# ruff: noqa: E501  a row a case, as of any table
from __future__ import annotations

import json

from .case import CHECK, COMMANDS, COPY, GQA, INSPECT, MLA, PPL, Case
from .world import both, config, drop, put

CONFIGS = [
    *(
        Case(f"config is cut off, {name}", put("src/config.json", '{"model_type": "llama", "hidd'), command, "src/config.json", COPY)
        for name, command in COMMANDS.items()
    ),
    Case("config is empty", put("src/config.json", ""), GQA, "src/config.json", COPY),
    Case("config is a list", put("src/config.json", "[1, 2]"), INSPECT, "src/config.json", "is not a JSON object"),
    Case("config is binary", put("src/config.json", b"\x80\x04\xff\x00" * 50), MLA, "src/config.json", COPY),
    Case("config is UTF-16", put("src/config.json", '{"model_type": "llama"'.encode("utf-16")), INSPECT, "src/config.json", COPY),
    Case("config is nested 100,000 deep", put("src/config.json", '{"a":' * 100_000), PPL, "src/config.json", COPY),
    Case("config says a key twice", put("src/config.json", '{"model_type": "llama", "model_type": "gpt2"}'), CHECK, "'model_type' twice", "remove one"),
    Case("config is missing", drop("src/config.json"), GQA, "src has no config.json", "give a transformers checkpoint's directory"),
    Case("config is 50 MB", put("src/config.json", b'{"model_type": "llama", "a": "' + b" " * 50_000_000 + b'"}'), INSPECT, "src/config.json", COPY),
    Case("no model_type", config(model_type=...), GQA, "model_type", "no class can be chosen"),
    Case("model_type is a number", config(model_type=7), MLA, "model_type", "no class can be chosen"),
    Case("10^9 layers", config(num_hidden_layers=10**9), GQA, "num_hidden_layers = 1000000000", "no model has more than 10,000"),
    Case("10^9 layers, inspect", config(num_hidden_layers=10**9), INSPECT, "num_hidden_layers = 1000000000", "no model has more than 10,000"),
    Case("10^9 layers, flops", config(num_hidden_layers=10**9), COMMANDS["flops"], "num_hidden_layers = 1000000000", "no model has more than 10,000"),
    Case("10^30 hidden", config(hidden_size=10**30), MLA, "hidden_size = 1000", "no model has more than"),
    Case("10^30 vocabulary", config(vocab_size=10**30), COMMANDS["memory"], "vocab_size = 1000", "no model has more than"),
    Case("10^4000 heads", config(num_attention_heads=10**4000), INSPECT, "num_attention_heads = 1000", "no model has more than"),
    Case("no heads", config(num_attention_heads=0), GQA, "num_attention_heads = 0", "must be a positive"),
    Case("negative layers", config(num_hidden_layers=-2), INSPECT, "num_hidden_layers = -2", "must be a positive"),
    Case("layers as text", config(num_hidden_layers="2"), MLA, "num_hidden_layers = '2'", "must be a positive"),
    Case("hidden size as a float", config(hidden_size=16.5), INSPECT, "hidden_size = 16.5", "must be a positive"),
    Case("heads as true", config(num_attention_heads=True), GQA, "num_attention_heads = True", "must be a positive"),
    Case("heads as a list", config(num_attention_heads=[4]), GQA, "num_attention_heads = [4]", "must be a positive"),
    Case("width of the MLP as text", config(intermediate_size="wide"), GQA, "intermediate_size = 'wide'", "must be a positive"),
    Case("context below zero", config(max_position_embeddings=-1), PPL, "max_position_embeddings = -1", "must be a positive"),
    Case("heads that do not share evenly", config(num_key_value_heads=3), GQA, "4 query heads cannot share 3 KV heads", "mend the config"),
    Case("eps below zero", config(rms_norm_eps=-1e-6), GQA, "rms_norm_eps = -1e-06", "must be a positive"),
    Case("eps as text", config(rms_norm_eps="1e-6"), MLA, "rms_norm_eps = '1e-6'", "must be a positive"),
    Case("rope_theta is NaN", config(rope_parameters={"rope_theta": float("nan"), "rope_type": "default"}), MLA, "rope_theta = nan", "must be a positive"),
    Case("rope_theta of older configs is infinite", config(rope_theta=float("inf"), rope_parameters=...), INSPECT, "rope_theta = inf", "must be a positive"),
    Case("rope_scaling is text", config(rope_scaling="linear"), INSPECT, "rope_scaling = 'linear'", "must be a table"),
    Case("rope_scaling nested 300 deep", config(rope_scaling=json.loads('{"a":' * 300 + "1" + "}" * 300)), MLA, "rope_scaling", "nested"),
    Case("rope factor is zero", config(rope_scaling={"rope_type": "linear", "factor": 0}), MLA, "factor = 0 in rope_scaling", "must be a positive"),
    Case("layer types as a number", config(layer_types=5), GQA, "layer_types = 5", "must be a list"),
    Case("a window as text", config(sliding_window="big"), GQA, "sliding_window = 'big'", "must be a whole number"),
    Case("an activation as a number", config(hidden_act=3), MLA, "hidden_act = 3", "must be a name"),
    Case("a dtype as a list", config(dtype=[1]), INSPECT, "dtype = [1]", "must be a name"),
    Case("a text config as a list", config(text_config=[1]), PPL, "text_config = [1]", "must be a table"),
    Case("quantised as text", config(quantization_config="gptq"), GQA, "quantization_config = 'gptq'", "must be a table"),
    Case("attention as a list", config(_attn_implementation=[1]), MLA, "_attn_implementation = [1]", "must be a name or a table"),
    Case("rope_type is a number", config(rope_parameters={"rope_type": 7, "rope_theta": 1e4}), GQA, "rope_type = 7 in rope_parameters", "must be a name"),
    Case("longrope's factors as text", config(rope_parameters={"rope_type": "longrope", "short_factor": "a", "long_factor": "b"}), MLA, "long_factor = 'b'", "must be a list"),
    Case("padding beyond the vocabulary", config(pad_token_id=10**6), GQA, "pad_token_id = 1000000", "mend either"),
    Case("unknown family", config(model_type="lama"), GQA, "family 'lama' is not supported", "the nearest name is llama"),
    Case("quantised", config(quantization_config={"quant_method": "gptq"}), GQA, "quantised (gptq)", "convert the unquantised checkpoint"),
    Case("an adapter", both(drop("src/config.json"), put("src/adapter_config.json", "{}")), GQA, "PEFT adapter", "merge it into its base model first"),
]  # fmt: skip

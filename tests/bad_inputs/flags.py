"""Flags and numbers that cannot be: FLAGS by themselves, NUMBERS as far as the model goes."""

# ruff: noqa: E501  a row a case, as of any table
from __future__ import annotations

from .case import CALIBRATE, GQA, INSPECT, MLA, PLAIN, Case
from .world import put, whole

FLAGS = [
    Case("an unknown command", whole, "convrt", "convrt", "--help"),
    Case("an unknown flag", whole, f"{GQA} --metod mean", "--metod", "--method"),
    Case("KV heads that do not divide", whole, "convert gqa src out --kv-heads 3", "2 KV heads cannot form 3 groups", "try 1, 2"),
    Case("KV heads below zero", whole, "convert gqa src out --kv-heads -1", "form -1 groups", "try 1, 2"),
    Case("KV heads as text", whole, "convert gqa src out --kv-heads two", "'two' is not a whole number", "--help"),
    Case("10^400 KV heads", whole, f"convert gqa src out --kv-heads 1{'0' * 400}", "more than there is of anything", "--help"),
    Case("an unknown method", whole, f"{GQA} --method maen", "'maen'", "did you mean mean"),
    Case("an unknown grouping", whole, f"{GQA} --grouping same", "'same'", "known"),
    Case("an unknown dtype", whole, f"{GQA} --dtype int4", "'int4'", "bfloat16"),
    Case("shards of nothing", whole, f"{GQA} --max-shard-size 0", "0 bytes holds nothing", "positive size"),
    Case("no windows to calibrate on", whole, f"{GQA} --calib-windows 0", "0 calibration windows", "at least 1"),
    Case("a text and no need of it", whole, f"{GQA} --method mean --calib text.txt", "mean reads no text", "leave --calib out"),
    Case("a reader that there is not", whole, f"{MLA} --for vlm", "'vlm'", "did you mean vllm"),
    Case("no export to turn back", whole, PLAIN, "src is a llama model", "kvfold convert mla makes it one"),
    Case("an engine that there is not", whole, "check src --engine nobody", "'nobody'", "vllm"),
    Case("a context of nothing", whole, f"{INSPECT} --context 0", "context of 0", "positive number"),
    Case("no text", whole, "eval ppl src", "--text", "--help"),
    Case("an unknown built-in text", whole, "eval ppl src --text builtin:topic", "'topic'", "did you mean topics"),
    Case("a perplexity ratio of nothing", whole, "report src other -o out --max-ratio 0", "ratio of 0", "1.1"),
    Case("a batch below zero, report", whole, "report src other -o out --batch-size -1", "-1", "1 or more"),
    Case("no context to count on", whole, "eval flops src", "--context", "--help"),
    Case("sizes without a model that do not suffice", whole, "eval flops --context 8 --hidden-size 64", "--num-hidden-layers", "give"),
    Case("a memory that is none", whole, "eval speed src --memory lots", "'lots'", "2GiB"),
    Case("no runs", whole, "eval speed src --runs 0", "runs", "1 or more"),
    Case("a model twice", whole, "eval speed src src", "src", "once"),
    Case("a budget of nothing", whole, "uptrain model=src out=out steps=0", "steps is 0", "at least 1"),
    Case("a word that is no pair", whole, "uptrain model=src out", "'out'", "write key=value"),
    Case("a repository that cannot be", whole, "publish src it --dry-run", "'it'", "OWNER/NAME"),
    Case("a folder without a dry run", whole, "publish src me/it --folder out", "--folder", "--dry-run"),
]  # fmt: skip

NUMBERS = [
    Case("a device without memory", whole, "plan recipe.yaml --memory 0", "--memory is 0", "more than 0"),
    Case("a calibration window beyond the context", whole, f"{CALIBRATE} --calib-window 4096", "4096 is longer than the model's context 64", "give 64 or less"),
    Case("no size", whole, "convert mla src out", "how large the cache may be", "--kv-elements"),
    Case("two sizes", whole, f"{MLA} --kv-ratio 0.5", "kv-ratio", "give one of them"),
    Case("a ratio that is no number", whole, "convert mla src out --kv-ratio nan", "ratio of nan", "more than 0 and at most 1"),
    Case("a ratio above one", whole, "convert mla src out --kv-ratio 2", "ratio of 2", "more than 0 and at most 1"),
    Case("an odd rotary key", whole, "convert mla src out --kv-rank 4 --rope-dim 3", "3 numbers", "even number"),
    Case("a rotary key wider than a head", whole, "convert mla src out --kv-rank 4 --rope-dim 64", "64 numbers", "2 to 4"),
    Case("a context of nothing, cache", whole, "eval cache src --context 0", "context of 0", "give 1 or more"),
    Case("a device that there is not", whole, "eval cache src --device tpu9", "'tpu9'", "--device cpu"),
    Case("a threshold that is no number", whole, "verify src other --text text.txt --threshold nan", "threshold of nan", "0.5"),
    Case("a size below zero", whole, "eval memory src --context 8 --num-key-value-heads -2", "-2", "1 or more"),
    Case("a passkey at no depth", whole, "eval long src --text text.txt --depth 2", "depths 2.0", "try 0.1"),
    Case("a task that there is not", whole, "eval tasks src --task task.yaml", "no task file task.yaml", "give a YAML file"),
    Case("no batch to calibrate in", whole, f"{CALIBRATE} --batch-size 0", "batch of 0", "give 1 or more"),
    Case("calibrate on nothing", whole, f"{CALIBRATE} --calib none", "--calib none", "is for convert"),
    Case("windows that do not divide", put("recipe.yaml", "batch_size: 3\n"), "uptrain recipe.yaml model=src out=out steps=1 --num-processes 2", "3 does not divide among 2", "try 4"),
    Case("a window beyond the context", whole, "eval ppl src --text text.txt --window 4096", "4096 is longer than the model's context 64", "give 64 or less"),
    Case("a context beyond the model's", whole, "eval cache src --context 4096", "4096 is longer than the model's context 64", "give 64 or less"),
    Case("a stride beyond the window", whole, "eval ppl src --text text.txt --window 8 --stride 9", "stride 9", "give 1 to 8"),
    Case("a batch of nothing", whole, "eval ppl src --text text.txt --batch-size 0", "batch size 0", "1 or more"),
]  # fmt: skip

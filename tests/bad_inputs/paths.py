"""Names that lead nowhere, or to what is no file; targets that cannot be written; what leads out of a checkpoint."""

# ruff: noqa: E501  a row a case, as of any table
from __future__ import annotations

import os
from pathlib import Path

from .case import CALIBRATE, COMMANDS, COPY, GQA, INSPECT, MLA, PPL, Case
from .world import Spoil, both, config, fifo, instead, link, put, sharded, whole


def named(name: str) -> Spoil:
    return lambda folder: (folder / "src").rename(folder / name)


PATHS = [
    Case("no such folder", whole, "inspect nowhere/at/all", "nowhere/at/all", "give a checkpoint directory"),
    Case("an empty name", whole, ("inspect", ""), "SOURCE is empty", "shell variable unset"),
    Case("a text file as a SOURCE", whole, "inspect text.txt", "text.txt", "give a checkpoint's directory"),
    Case("a FIFO as a SOURCE", lambda f: fifo(f / "pipe"), "inspect pipe", "pipe is a pipe or a device", "give a checkpoint directory"),
    Case("a device as a SOURCE", whole, "eval cache /dev/zero", "/dev/zero is a pipe or a device", "give a checkpoint directory"),
    Case("a link that leads nowhere as a SOURCE", link("to", "nowhere"), "convert gqa to out --kv-heads 1", "to is a link that leads nowhere", "mend it"),
    Case("a name with a newline", whole, ("inspect", "no\nsuch/thing/here"), "no such/thing/here", "give a checkpoint directory"),
    Case("a name that colours the terminal", whole, ("inspect", "\x1b[31mred/or/not\x1b]0;x\x07"), "red/or/not", "give a checkpoint directory"),
    Case("a name that turns the text round", whole, ("inspect", "a/b/\u202egnp.exe"), "gnp.exe", "give a checkpoint directory"),
    Case("a name that is no UTF-8", whole, ("inspect", os.fsdecode(b"x/\xff\xfe/y")), "\\udcff", "give a checkpoint directory"),
    Case("a broken checkpoint whose name is no UTF-8", both(config(num_hidden_layers=0), named(os.fsdecode(b"s\xff"))), ("convert", "gqa", os.fsdecode(b"s\xff"), "out", "--kv-heads", "1"), "\\udcff", "must be a positive"),
    Case("a broken checkpoint whose name has two lines", both(config(num_hidden_layers=0), named("s\nkvfold: done\x1b[2J")), ("eval", "ppl", "s\nkvfold: done\x1b[2J", "--text", "text.txt"), "num_hidden_layers = 0", "must be a positive"),
    Case("a name of 300 signs", whole, ("inspect", "y" * 300), "File name too long", "name another"),
    Case("a folder as the config", instead("src/config.json", Path.mkdir), GQA, "src/config.json is no file", COPY),
    Case("a FIFO as the config", instead("src/config.json", fifo), GQA, "src/config.json is no file", COPY),
    Case("a FIFO as the config, ppl", instead("src/config.json", fifo), PPL, "src/config.json is no file", COPY),
    Case("a FIFO as the weights", instead("src/model.safetensors", fifo), INSPECT, "src/model.safetensors is a pipe", COPY),
    Case("a folder as the weights", instead("src/model.safetensors", Path.mkdir), GQA, "model.safetensors", "fetch"),
    Case("a FIFO as the index", both(sharded(), instead("src/model.safetensors.index.json", fifo)), GQA, "index.json is a pipe", COPY),
    Case("a FIFO as the tokenizer", instead("src/tokenizer.json", fifo), PPL, "src/tokenizer.json is a pipe", COPY),
    Case("a FIFO as the GGUF file", instead("m.gguf", fifo), "inspect m.gguf", "m.gguf", "give a checkpoint directory"),
    Case("a GGUF file without a header", put("m.gguf", b"GG"), "inspect m.gguf", "m.gguf", "give a checkpoint's directory"),
    Case("a file that leads out of the checkpoint", link("src/notes.txt", "../text.txt"), GQA, "src/notes.txt is a link to", "put the file itself there"),
    Case("a tokenizer that leads out of the checkpoint", link("src/tokenizer.json", "../other/tokenizer.json"), MLA, "src/tokenizer.json is a link to", "put the file itself there"),
    Case("the weights are a device", link("src/model.safetensors", "/dev/zero"), GQA, "src/model.safetensors is a pipe or a device", COPY),
    Case("the weights are a link that leads nowhere", link("src/model.safetensors", "nowhere"), GQA, "src holds no weights", "give the folder that does"),
    Case("a revision of a folder", whole, f"{INSPECT} --revision main", "no revision main", "leave --revision out"),
    Case("OUT exists", put("out/config.json", "{}"), GQA, "out exists", "--overwrite"),
    Case("OUT is a file", put("out", "x"), GQA, "out is a file", "OUT is the directory to create"),
    Case("OUT is a file, mla", put("out", "x"), MLA, "out is a file", "OUT is the directory to create"),
    Case("OUT is a FIFO", lambda f: fifo(f / "out"), GQA, "out is a", "OUT is the directory to create"),
    Case("OUT is no checkpoint", put("out/mine.txt", "x"), f"{GQA} --overwrite", "out is not a checkpoint", "move it away"),
    Case("OUT is SOURCE", whole, "convert gqa src src --kv-heads 1 --overwrite", "src and the source src lie inside one another", "choose an OUT elsewhere"),
    Case("OUT is inside SOURCE", whole, "convert mla src src/out --kv-elements 8", "src/out and the source src", "choose an OUT elsewhere"),
    Case("SOURCE is inside OUT", whole, "convert plain src . --overwrite", "current directory", "--overwrite does not replace that"),
    Case("OUT is SOURCE by a link", link("to", "src"), "convert gqa src to --kv-heads 1 --overwrite", "to and the source src", "choose an OUT elsewhere"),
    Case("OUT is a link that leads nowhere", link("out", "gone/away"), GQA, "out is a link that leads nowhere", "choose another OUT"),
    Case("OUT is a link to itself", link("out", "out"), GQA, "out", "choose another OUT"),
    Case("OUT is below a file", put("file", "x"), "convert gqa src file/out --kv-heads 1", "file is a file", "choose another OUT"),
    Case("OUT is below a device", whole, "convert gqa src /dev/null/out --kv-heads 1", "/dev/null is a file", "choose another OUT"),
    Case("OUT is empty", whole, ("convert", "gqa", "src", "", "--kv-heads", "1"), "OUT is empty", "shell variable unset"),
    Case("OUT is the root", whole, "convert gqa src / --kv-heads 1 --overwrite", "/ holds the current directory", "--overwrite does not replace that"),
    Case("statistics into a folder", whole, "calibrate src -o other", "other is a directory", "name a file"),
    Case("statistics over another file", whole, "calibrate src -o text.txt --overwrite", "text.txt holds no statistics", "move it away"),
    Case("statistics over a file", put("stats", "x"), CALIBRATE, "stats exists", "--overwrite"),
    Case("statistics into a device", whole, "calibrate src -o /dev/null", "/dev/null is a device", "name a file"),
    Case("statistics below a file", whole, "calibrate src -o text.txt/stats", "text.txt is a file", "choose another"),
    Case("statistics that are none", whole, f"{GQA} --stats text.txt", "text.txt", "calibrate"),
    Case("statistics that are a FIFO", lambda f: fifo(f / "s"), f"{GQA} --stats s", "s is", "kvfold calibrate"),
    Case("a report into a file", whole, "report src other -o text.txt", "text.txt is a file", "OUT is the directory to create"),
    Case("a report over a checkpoint", whole, "report src other -o src --overwrite", "src is not a report", "move it away"),
    Case("the same result twice", whole, "report src other ./other -o out", "named twice", "every result once"),
    Case("publish what kvfold did not write", whole, COMMANDS["publish"], "kvfold.json", "kvfold"),
    Case("uptrain to its own model", whole, "uptrain model=src out=src steps=1", "out src is the model itself", "another directory"),
    Case("uptrain into a file", whole, "uptrain model=src out=text.txt steps=1", "text.txt is a file", "OUT is the directory to create"),
    Case("run in a file", whole, "run recipe.yaml -o text.txt", "text.txt is a file", "name a folder"),
    Case("run in its source", whole, "run recipe.yaml -o src", "lies in the folder of the run", "name another with -o"),
    Case("copy a recipe to a file", whole, "recipes copy embedded-gqa text.txt", "text.txt is a file", "name the folder to copy to"),
    Case("copy a recipe that is there", put("embedded-gqa.yaml", "mine"), "recipes copy embedded-gqa", "embedded-gqa.yaml exists", "move it away"),
    Case("demo into a folder that is there", whole, "demo --out src", "src exists", "choose another"),
    Case("a text that is a folder", whole, "eval ppl src --text other", "other is a directory", "name its files"),
    Case("a text that is not there", whole, "verify src other --text no.txt", "no.txt does not exist", "give a path"),
    Case("a folder of a config that is not there", whole, "plan nobody/here --config no", "--config no is no directory", "config.json is in"),
    Case("no text where one is needed", whole, "eval ppl src --text none", "text none does not exist", "give a path"),
    Case("a text to calibrate on that is not there", whole, f"{GQA} --calib no.txt", "no.txt does not exist", "give a path"),
    Case("a text to calibrate on that is not there, calibrate", whole, f"{CALIBRATE} --calib no.txt", "no.txt does not exist", "give a path"),
    Case("a text to train on that is not there", whole, "uptrain model=src out=out steps=1 data=no.txt", "no.txt does not exist", "give a path"),
    Case("a text that is a FIFO", lambda f: fifo(f / "t"), "eval ppl src --text t", "text t is a pipe", "give the path of a file"),
    Case("a text that is a device", whole, "eval compare src other --text /dev/zero", "/dev/zero is a pipe or a device", "give the path of a file"),
    Case("a text that is empty", put("t", b""), "eval long src --text t", "t holds no text", "give another file"),
    Case("an unset text", whole, ("eval", "ppl", "src", "--text", ""), "an empty name", "name its files"),
    Case("a Hub id offline", whole, "inspect some/repo", "there is no some/repo here", "check the path, or unset it", 3),
    Case("a Hub id offline, convert", whole, "convert gqa some/repo out --kv-heads 1", "there is no some/repo here", "check the path, or unset it", 3),
    Case("a Hub id offline, ppl", whole, "eval ppl some/repo --text text.txt", "there is no some/repo here", "check the path, or unset it", 3),
]  # fmt: skip

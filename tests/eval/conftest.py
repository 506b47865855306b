"""Tiny random models and a byte tokenizer, made on the spot: no network, no files in the repository."""

from __future__ import annotations

import string

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

torch.set_num_threads(1)  # threads cost these models more than they give, the more so beside other tests

BOS_ID = 256
VOCABULARY = 258
CONTEXT = 64

LLAMA_LIKE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.3,  # wide, so that losses differ well from token to token
    "bos_token_id": BOS_ID,
    "eos_token_id": BOS_ID + 1,
    "pad_token_id": None,
}
GPT2_LIKE = {
    "vocab_size": VOCABULARY,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": CONTEXT,
    "initializer_range": 0.3,
    "bos_token_id": BOS_ID,
    "eos_token_id": BOS_ID + 1,
}


def make_model(model_type: str, **settings):
    """A random model of a family, the same at every call."""
    base = GPT2_LIKE if model_type in ("gpt2", "gpt_bigcode") else LLAMA_LIKE
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **{**base, **settings})).eval()


def make_tokenizer(bos: bool = True) -> PreTrainedTokenizerFast:
    """One token a byte, ids in the order of the byte alphabet, then BOS and EOS.

    With a BOS, it puts one before every text unless told not to, as Llama's does.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={byte: i for i, byte in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    if not bos:
        return PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    tokenizer.add_special_tokens([AddedToken("<s>"), AddedToken("</s>")])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS_ID)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


@pytest.fixture
def save(tmp_path):
    """Write a model, and a tokenizer unless told not to, as a checkpoint directory."""

    def write(model, name: str = "model", *, bos: bool = True, tokenizer: bool = True) -> str:
        model.save_pretrained(tmp_path / name)
        if tokenizer:
            make_tokenizer(bos).save_pretrained(tmp_path / name)
        return str(tmp_path / name)

    return write


@pytest.fixture
def llama():
    return make_model("llama")


@pytest.fixture
def text_file(tmp_path):
    """A text of 203 bytes, four of them in two characters."""
    path = tmp_path / "text.txt"
    letters = string.ascii_letters + " \n"
    drawn = torch.randint(len(letters), (199,), generator=torch.Generator().manual_seed(1)).tolist()
    path.write_text("".join(letters[i] for i in drawn) + "éü", encoding="utf-8")
    return str(path)

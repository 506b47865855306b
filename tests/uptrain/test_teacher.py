"""What a teacher shows, and which teachers a student can learn from."""

from __future__ import annotations

import pytest
import torch

from kvfold.common.errors import UserError
from kvfold.common.scoring import head_logits, hidden_states
from kvfold.uptrain.selection import attention_modules
from kvfold.uptrain.teacher import Teacher, check_pair

from ..common.tiny import VOCABULARY, make_model

IDS = torch.randint(VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("kind", ["llama", "gemma2", "phi", "gpt2"])
def test_a_view(kind):
    model = make_model(kind).train()
    teacher = Teacher(model, attention_modules(model))
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    view = teacher.view(IDS, layers=True)
    assert not view.hidden.requires_grad
    assert torch.equal(view.hidden, hidden_states(model, IDS))
    assert torch.equal(view.logits(slice(3, 7)), head_logits(model, view.hidden[:, 3:7]))
    assert [tuple(output.shape) for output in view.attention] == [(2, 12, 32)] * 2
    assert teacher.view(IDS).attention == ()
    assert not any(module._forward_hooks for module in model.modules())


def test_attention_outputs_are_those_of_the_layers():
    model = make_model("llama")
    view = Teacher(model, attention_modules(model)).view(IDS, layers=True)
    output = model(input_ids=IDS, output_hidden_states=True)
    layer, entering = model.model.layers[1], output.hidden_states[1]
    turned = model.model.rotary_emb(entering, torch.arange(12)[None])
    attended, _ = layer.self_attn(layer.input_layernorm(entering), position_embeddings=turned, attention_mask=None)
    torch.testing.assert_close(view.attention[1], attended)


def test_positions_reach_the_model():
    teacher = Teacher(make_model("llama"))
    positions = torch.arange(12).remainder(5).expand(2, 12)
    assert not torch.allclose(teacher.view(IDS, positions).hidden[:, 5:], teacher.view(IDS).hidden[:, 5:])


def test_its_precision_is_its_own():
    teacher = Teacher(make_model("llama"))
    exact = teacher.view(IDS)
    logits = exact.logits(slice(0, 12))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(teacher.view(IDS).hidden, exact.hidden)
        assert torch.equal(exact.logits(slice(0, 12)), logits)


@pytest.mark.parametrize(("change", "layers", "said"), [
    ({"vocab_size": 128}, False, r"big has vocab_size 128, the student 97; use a model of the same"),
    ({"num_hidden_layers": 3}, True, r"num_hidden_layers 3, the student 2; layer_share=0"),
    ({"hidden_size": 64}, True, r"hidden_size 64, the student 32; layer_share=0"),
    ({"max_position_embeddings": 8}, False, r"big has a context of 8 tokens, and a window 16; lower window"),
])  # fmt: skip
def test_pairs(change, layers, said):
    student, teacher = (make_model("llama", **extra).config for extra in ({}, change))
    with pytest.raises(UserError, match=said):
        check_pair("big", student, teacher, layers=layers, window=16)
    if layers:
        check_pair("big", student, teacher, layers=False, window=16)
    check_pair("big", student, student, layers=True, window=16)

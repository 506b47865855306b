"""An export turned back is the plain model again."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvfold.common.errors import UserError
from kvfold.convert.plain import convert_plain

from .plain_models import CASES, load, logits, make_plain, multiply
from .test_stock import SHAPE, form, write

FORMS = {
    "": {},
    "padded": {"pad": True},
    "with a query rank": {"readers": ["llama.cpp", "transformers"]},
    "large eps": {"readers": ["llama.cpp"]},
}


def weights(folder):
    return load_file(folder / "model.safetensors")


def config(folder):
    return json.loads((folder / "config.json").read_text())


@pytest.fixture
def tiny_engine(monkeypatch):
    monkeypatch.setattr(form, "ENGINE_SHAPES", (SHAPE,))


def there_and_back(tmp_path, **arguments):
    made = write(tmp_path / "plain", tmp_path / "stock", **arguments)
    return made, convert_plain(tmp_path / "stock", tmp_path / "back")


STOCK = [case for case in CASES if case != "stablelm"]
STRICT = [case for case in STOCK if case not in ("qwen2", "llama3", "linear")]  # llama.cpp reads those


@pytest.mark.parametrize(
    ("case", "what"),
    [(case, what) for what in FORMS for case in (STRICT if "readers" in FORMS[what] else STOCK)],
)
def test_export_and_back_is_the_same_model(tmp_path, tiny_engine, case, what):
    make_plain(tmp_path / "plain", case)
    there_and_back(tmp_path, **FORMS[what])
    before, after = weights(tmp_path / "plain"), weights(tmp_path / "back")
    assert before.keys() == after.keys()  # a tied head is tied again, phi3's gate and up are one tensor
    for name, tensor in before.items():
        torch.testing.assert_close(after[name], tensor, rtol=1e-14, atol=0, msg=name)
    assert config(tmp_path / "back") == config(tmp_path / "plain")


@pytest.mark.parametrize("readers", [["transformers"], ["transformers", "llama.cpp"]])
def test_every_layer_has_its_own_scales(tmp_path, readers):
    make_plain(tmp_path / "plain")
    multiply(tmp_path / "plain", "layers.0.self_attn.kv_a_proj_with_mqa.weight", 100.0)
    multiply(tmp_path / "plain", "layers.1.input_layernorm.weight", 10.0)
    made, _ = there_and_back(tmp_path, readers=readers)
    for scales in ("latent_scales", "query_scales")[: len(readers)]:
        assert len(set(made.config["kvfold"][scales])) == 2
    before, after = weights(tmp_path / "plain"), weights(tmp_path / "back")
    for name, tensor in before.items():
        torch.testing.assert_close(after[name], tensor, rtol=1e-14, atol=0, msg=name)


@pytest.mark.parametrize("case", ["llama-tied", "qwen2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_is_all_that_is_lost(tmp_path, case, dtype):
    make_plain(tmp_path / "plain", case, dtype=dtype, rms_norm_eps=1e-5)
    there_and_back(tmp_path)
    before, after = weights(tmp_path / "plain"), weights(tmp_path / "back")
    for name, tensor in before.items():
        assert after[name].dtype == dtype
        rounding = torch.finfo(dtype).eps  # one unit in the last place
        # The shared key's rows and the latent's only meet powers of two; the head is the embedding, unscaled.
        exact = "kv_a_proj" in name or "norm" in name or "gate" in name or (case == "llama-tied" and "embed" in name)
        torch.testing.assert_close(after[name], tensor, rtol=0 if exact else rounding, atol=0, msg=name)


def test_dtype_comes_back_where_the_export_changed_it(tmp_path):
    make_plain(tmp_path / "plain", dtype=torch.bfloat16)
    _, report = there_and_back(tmp_path, dtype="float32")
    assert weights(tmp_path / "stock")["model.norm.weight"].dtype == torch.float32
    assert report.dtype == "bfloat16"
    before, after = weights(tmp_path / "plain"), weights(tmp_path / "back")
    for name, tensor in before.items():  # the export had bits to spare, so that even the last place survives
        assert after[name].dtype == torch.bfloat16 and after[name].equal(tensor), name
    convert_plain(tmp_path / "stock", tmp_path / "wide", dtype="float64")
    assert {tensor.dtype for tensor in weights(tmp_path / "wide").values()} == {torch.float64}
    assert config(tmp_path / "wide")["dtype"] == "float64"


def test_an_export_with_lossy_queries_gives_the_queries_it_had(tmp_path):
    make_plain(tmp_path / "plain")
    there_and_back(tmp_path, q_rank=20)
    name = "model.layers.0.self_attn.q_proj.weight"
    before, after = weights(tmp_path / "plain")[name], weights(tmp_path / "back")[name]
    assert torch.linalg.matrix_rank(after) == 20
    best = torch.linalg.svdvals(before)[20:].norm()
    torch.testing.assert_close((after - before).norm(), best, rtol=1e-6, atol=0)


def test_a_trained_norm_comes_back_in_the_weights(tmp_path):
    make_plain(tmp_path / "plain")
    write(tmp_path / "plain", tmp_path / "stock")
    stored = weights(tmp_path / "stock")
    stored["model.layers.0.self_attn.kv_a_layernorm.weight"][3] *= 2
    save_file(stored, tmp_path / "stock" / "model.safetensors", {"format": "pt"})
    convert_plain(tmp_path / "stock", tmp_path / "back")
    name = "model.layers.0.self_attn.kv_b_proj.weight"
    before, after = weights(tmp_path / "plain")[name], weights(tmp_path / "back")[name]
    torch.testing.assert_close(after[:, 3], 2 * before[:, 3], rtol=1e-14, atol=0)


def test_report_counts_and_a_dry_run_writes_nothing(tmp_path):
    make_plain(tmp_path / "plain", rope_parameters={"rope_type": "default", "rope_theta": 10.0})
    write(tmp_path / "plain", tmp_path / "stock", readers=["vllm"], pad=True)
    report = convert_plain(tmp_path / "stock", tmp_path / "back", dry_run=True)
    assert not (tmp_path / "back").exists()
    assert (report.source_kv_elements_per_token_per_layer, report.kv_elements_per_token_per_layer) == (576, 16)
    assert (report.family, report.kv_lora_rank, report.qk_rope_head_dim) == ("mla_llama", 12, 4)
    assert report.bytes == sum(tensor.nbytes for tensor in weights(tmp_path / "plain").values())
    assert report.tensors_computed + report.tensors_copied == len(weights(tmp_path / "plain"))


def test_it_is_a_checkpoint_that_loads(tmp_path):
    make_plain(tmp_path / "plain", "phi3")
    there_and_back(tmp_path)
    torch.testing.assert_close(
        logits(load(tmp_path / "back")), logits(load(tmp_path / "plain")), rtol=1e-12, atol=1e-12
    )


def test_a_head_that_was_trained_apart_is_not_tied_again(tmp_path):
    make_plain(tmp_path / "plain", "llama-tied")
    write(tmp_path / "plain", tmp_path / "stock")
    stored = weights(tmp_path / "stock")
    stored["lm_head.weight"][5, 5] += 0.1
    save_file(stored, tmp_path / "stock" / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match="no longer a multiple of the embedding"):
        convert_plain(tmp_path / "stock", tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_what_is_no_export_is_refused(tmp_path):
    make_plain(tmp_path / "plain")
    with pytest.raises(UserError, match="in the plain form already"):
        convert_plain(tmp_path / "plain", tmp_path / "back")
    write(tmp_path / "plain", tmp_path / "stock")
    said = config(tmp_path / "stock")
    for change, message in (
        (said["kvfold"] | {"format_version": 2}, "update kvfold"),
        ({k: v for k, v in said["kvfold"].items() if k != "latent_scales"}, "block of config.json is damaged"),
        (None, "has no kvfold block"),
    ):
        (tmp_path / "stock" / "config.json").write_text(json.dumps({**said, "kvfold": change}))
        with pytest.raises(UserError, match=message):
            convert_plain(tmp_path / "stock", tmp_path / "back")

"""The recipes that come with kvfold: what their heads say is what the calculator says, and what they ask for can be."""

import json
import re
from functools import cache
from pathlib import Path

import pytest

from kvfold.common.embedded import EMBEDDED, MODEL_DIR
from kvfold.common.errors import UserError
from kvfold.convert.config import from_raw
from kvfold.convert.families import FAMILIES
from kvfold.convert.gqa import convert_gqa
from kvfold.convert.mla.convert import convert_mla
from kvfold.recipes.pipeline.catalogue import RECIPES
from kvfold.recipes.pipeline.read import read_pipeline
from kvfold.recipes.plan.plan import plan, said
from kvfold.uptrain.launch import CONFIGS

CONFIG_FACTS = Path(__file__).parent / "configs"
NAMES = sorted(path.stem for path in RECIPES.glob("*.yaml"))
# As the Hub counts them, from the headers of the published weights.
PARAMETERS = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": 134_515_008,
    "HuggingFaceTB/SmolLM2-1.7B": 1_711_376_384,
    "meta-llama/Llama-2-7b-hf": 6_738_415_616,
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "Qwen/Qwen2.5-7B": 7_615_616_512,
    "mistralai/Mistral-7B-v0.3": 7_248_023_552,
    "allenai/OLMo-1B-hf": 1_176_764_416,
    "microsoft/phi-2": 2_779_683_840,
    "TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T": 1_100_048_384,
    EMBEDDED: 2_361_024,
}


def raw_config(model):
    """config.json of a recipe's source, as far as it matters."""
    path = MODEL_DIR / "config.json" if model == EMBEDDED else CONFIG_FACTS / f"{model.rpartition('/')[2]}.json"
    return json.loads(path.read_text())


@cache
def planned(name):
    sections = read_pipeline(name).sections
    return plan(sections, from_raw(raw_config(sections["source"]["model"])))


@pytest.fixture
def checkpoint(tmp_path):
    """Makes a source of a recipe's true shape, whose weights are a hole in a file: headers are all that is read."""

    def make(model):
        raw = raw_config(model)
        row, bits = FAMILIES[raw["model_type"]], {"float32": ("F32", 4), "float16": ("F16", 2), "bfloat16": ("BF16", 2)}
        dtype, width = bits[raw.get("torch_dtype") or raw["dtype"]]
        header, end = {}, 0
        for name, promise in row.promises(from_raw(raw), (row.weights[0].template,)).items():
            if not promise.optional:
                size = width
                for axis in promise.shape:
                    size *= axis
                shape = list(promise.shape)
                header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
                end += size
        folder = tmp_path / "source"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(raw))
        text = json.dumps(header).encode()
        with (folder / "model.safetensors").open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + end)
        return folder

    return make


def test_every_model_of_the_issue_has_a_recipe():
    assert {read_pipeline(name).sections["source"]["model"] for name in NAMES} == set(PARAMETERS)


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_says_all_of_its_stages(name):
    recipe = read_pipeline(name)
    assert {"source", "convert", "uptrain", "eval", "report", "publish"} <= recipe.sections.keys()
    publish = recipe.sections["publish"]
    assert publish["private"] and not {"repo_id", "accept_license"} & publish.keys()  # which only a user can say
    assert recipe.sections["uptrain"]["teacher"] == "source"
    accelerate = recipe.sections["uptrain"].get("accelerate")
    assert accelerate is None or (CONFIGS / f"{accelerate}.yaml").is_file()


@pytest.mark.parametrize("name", NAMES)
def test_what_a_head_says_is_what_is_planned(name):
    """If this fails, write the lines that `kvfold plan` gives into the recipe's head."""
    head = [line.removeprefix("# ") for line in read_pipeline(name).head.splitlines()]
    training, cache_line = said(planned(name))
    assert f"  kvfold run {name}" in "\n".join(head)
    assert cache_line in head
    assert any(line.startswith("Expected: ") for line in head)
    if read_pipeline(name).sections["source"]["model"] != EMBEDDED:
        assert "Not run here." in head
        assert training in head
        assert any(line.startswith(f"(kvfold plan {name};") for line in head)


@pytest.mark.parametrize("name", NAMES)
def test_the_plan_is_of_the_model_that_is_meant_and_fits_its_devices(name):
    made = planned(name)
    assert made.source_parameters == PARAMETERS[made.source]
    assert made.fits
    assert made.training.layer_steps == round(0.2 * made.training.steps)
    # Where the head wants devices of another size, it says so.
    wanted = re.search(r"GPUs of (\d+) GB", read_pipeline(name).head)
    assert made.training.device_bytes < (int(wanted[1]) if wanted else 40) * 1e9


@pytest.mark.parametrize("name", NAMES)
def test_the_conversion_can_be_and_its_readers_will_read_it(name, tmp_path, checkpoint):
    recipe, made = read_pipeline(name), planned(name)
    convert = recipe.sections["convert"]
    source = checkpoint(recipe.sections["source"]["model"])
    knobs = {"dtype": convert.get("dtype"), "calib": ("none",), "dry_run": True}
    if convert["to"] == "gqa":
        report = convert_gqa(source, tmp_path / "out", kv_heads=convert["kv_heads"], **knobs)
    else:
        sizes = {"kv_rank": made.kv_lora_rank, "rope_dim": made.qk_rope_head_dim, "rope_select": "high"}
        readers = convert["for"]
        report = convert_mla(source, tmp_path / "out", readers=readers, **sizes, **knobs)
        assert set(readers) <= set(report.readable_by)
    assert report.bytes == made.result_bytes
    for name in ("kv_elements_per_token_per_layer", "kv_bytes_per_token", "source_kv_bytes_per_token"):
        assert getattr(report, name) == getattr(made, name)


@pytest.mark.parametrize(
    ("model", "reader", "why"),
    [
        ("meta-llama/Llama-3.1-8B", "vllm", "llama3"),
        ("meta-llama/Llama-3.1-8B", "sglang", "llama3"),
        ("Qwen/Qwen2.5-7B", "vllm", "bias"),
        ("Qwen/Qwen2.5-7B", "sglang", "bias"),
    ],
)
def test_readers_that_a_recipe_leaves_out_are_refused(tmp_path, checkpoint, model, reader, why):
    sizes = {"kv_rank": 512, "rope_dim": 64, "rope_select": "fold"}
    with pytest.raises(UserError, match=f"{reader} would not read it right: .*{why}"):
        convert_mla(checkpoint(model), tmp_path / "out", readers=(reader,), **sizes, calib=("none",), dry_run=True)

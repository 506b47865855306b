"""Results of the embedded model, which a source in the wild would have come with a README and a licence."""

import shutil

import pytest

from kvfold.convert.gqa import convert_gqa
from kvfold.convert.mla.convert import convert_mla
from kvfold.recipes.tiny import MODEL_DIR

README = """---
license: apache-2.0
language:
- en
- "no"
datasets:
- some/corpus
---
# The source
"""


@pytest.fixture(scope="session")
def results(tmp_path_factory):
    """A folder with source, gqa, mla (padded, so that vLLM reads it) and plain, none of which a test may change."""
    folder = tmp_path_factory.mktemp("results")
    source = shutil.copytree(MODEL_DIR, folder / "source")
    (source / "README.md").write_text(README)
    (source / "LICENSE").write_text("the licence")
    convert_gqa(source, folder / "gqa", kv_heads=2, method="mean")
    latent = {"kv_rank": 40, "rope_dim": 24, "rope_select": "high", "calib": ["none"]}
    convert_mla(source, folder / "mla", **latent, readers=["transformers", "sglang"])
    convert_mla(source, folder / "plain", **latent, form="plain")
    return folder


@pytest.fixture
def gqa(results, tmp_path):
    """A copy that a test may change."""
    return shutil.copytree(results / "gqa", tmp_path / "gqa")

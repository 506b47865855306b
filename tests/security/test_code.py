"""No code of a checkpoint, of a run or of the working directory is run, wherever it is put.

Whatever would run makes a file; none may be there afterwards.
"""

from __future__ import annotations

import builtins
import json
import os
import pickle
import shutil
import sys
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator

from kvfold.common.embedded import MODEL_DIR
from kvfold.common.errors import UserError
from kvfold.common.launcher import Command, launch
from kvfold.common.loading import load_model, load_tokenizer
from kvfold.common.tokens import render_chat
from kvfold.convert.checkpoint import Checkpoint
from kvfold.convert.gguf import dequantise
from kvfold.convert.gqa import convert_gqa
from kvfold.publish.contents import take_inventory
from kvfold.publish.facts import read_record
from kvfold.uptrain.launch import read_settings
from kvfold.uptrain.state import Checkpoints
from kvfold.uptrain.tables import TABLE, check_tables

from ..gguf_file import write_gguf
from ..hub import hub_server, use

CLASSES = {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M", "AutoTokenizer": ["evil.T", None]}


@pytest.fixture
def ran(tmp_path, monkeypatch):
    """The file that code would make. Whoever is asked whether it may run says yes."""
    path = tmp_path / "ran"
    monkeypatch.setattr(builtins, "input", lambda *_: "y")
    yield path
    assert not path.exists()


@pytest.fixture
def evil(tmp_path, ran):
    """A folder with code in all the places that transformers knows of; the caller adds the model."""
    folder = tmp_path / "evil"
    code = f"open({str(ran)!r}, 'w')\nclass C: pass\nclass M: pass\nclass T: pass\ndef generate(*_, **__): pass\n"
    for name in ("evil.py", "modeling_evil.py", "custom_generate/generate.py", "sitecustomize.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(code)
    return folder


def put_model(folder: Path, **config) -> Path:
    """The embedded model with other things in its config; ... takes one out."""
    shutil.copytree(MODEL_DIR, folder, dirs_exist_ok=True)
    change(folder / "config.json", **config)
    return folder


def change(path: Path, **values) -> None:
    table = json.loads(path.read_text()) | values
    path.write_text(json.dumps({key: value for key, value in table.items() if value is not ...}))


class Code:
    """Runs as it is unpickled."""

    def __init__(self, ran: Path):
        self.ran = ran

    def __reduce__(self):
        return open, (str(self.ran), "w")


def test_classes_of_a_checkpoint_are_not_loaded(evil, tmp_path):
    """Of a model that transformers knows, its own class is taken; and nobody who gets the result loads the other."""
    put_model(evil, auto_map=CLASSES)
    load_model(evil)
    load_tokenizer(evil)
    convert_gqa(evil, tmp_path / "out", kv_heads=2, method="mean")
    load_model(tmp_path / "out")
    assert "auto_map" not in json.loads((tmp_path / "out/config.json").read_text())
    left_out = take_inventory(tmp_path / "out", read_record(tmp_path / "out")).left_out
    assert {left_out[name] for name in ("evil.py", "custom_generate/generate.py")} == {"may run code when it is loaded"}


@pytest.mark.parametrize("reader", [load_model, load_tokenizer])
def test_what_only_a_checkpoint_knows_is_refused(evil, reader):
    put_model(evil, model_type="evil", auto_map=CLASSES)
    with pytest.raises(UserError, match="brings its own code"):
        reader(evil)


def test_a_tokenizer_that_only_a_checkpoint_knows_is_refused(evil):
    put_model(evil)
    change(evil / "tokenizer_config.json", auto_map=CLASSES, tokenizer_class="T")
    with pytest.raises(UserError, match="custom code"):
        load_tokenizer(evil)


def test_code_beside_a_gguf_file_is_not_asked_for(evil):
    write_gguf(evil / "model.gguf")
    (evil / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": CLASSES}))
    (evil / "tokenizer_config.json").write_text(json.dumps({"auto_map": CLASSES, "tokenizer_class": "T"}))
    with pytest.raises(UserError, match="custom code"):
        dequantise(evil / "model.gguf", evil.parent)


NAMED = [
    ({"attn_implementation": "evil/kernel"}, "is code on the Hub"),
    ({"_attn_implementation": "paged|evil/kernel@main:forward"}, "is code on the Hub"),
    ({"text_config": {"attn_implementation": {"": "sdpa", "vision_config": "evil/kernel"}}}, "is code on the Hub"),
    ({"experts_implementation": "evil/kernel"}, "is code on the Hub"),
]


@pytest.mark.parametrize(("config", "said"), NAMED, ids=range(len(NAMED)))
@pytest.mark.parametrize("where", ["here", "on the Hub"])
def test_code_and_models_elsewhere_are_not_fetched(tmp_path, monkeypatch, config, said, where):
    folder = put_model(tmp_path / "model", **config)
    with hub_server() as hub:
        use(hub, tmp_path / "home", monkeypatch)
        hub.add("me/model").add_folder(folder)
        with pytest.raises(UserError, match=said):
            load_model(folder if where == "here" else "me/model")
        assert not hub.requests(".*(evil|safetensors)")


def test_an_adapter_does_not_lead_elsewhere(tmp_path, monkeypatch):
    folder = put_model(tmp_path / "model")
    (folder / "adapter_config.json").write_text(
        json.dumps({"base_model_name_or_path": str(MODEL_DIR), "peft_type": "LORA"})
    )
    write_gguf(folder / "model.gguf")
    with hub_server() as hub:
        use(hub, tmp_path / "home", monkeypatch)
        hub.add("me/model").add_folder(folder)
        for name in (folder, folder / "model.gguf", "me/model"):
            with pytest.raises(
                UserError, match="holds a PEFT adapter" if isinstance(name, Path) else f"^{name} holds a PEFT adapter"
            ):
                load_model(name)


@pytest.mark.parametrize("reader", [load_model, Checkpoint.open])
def test_pickled_weights_are_weights(tmp_path, ran, reader):
    folder = put_model(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"lm_head.weight": Code(ran)}))
    with pytest.raises(UserError, match="cannot be read as plain weights"):
        reader(folder)


@pytest.mark.parametrize("name", ["optimizer.bin", "model.safetensors", TABLE])
def test_a_run_goes_on_from_tensors_alone(tmp_path, ran, name):
    """A checkpoint whose hashes are right: made by somebody who knows how."""
    model = torch.nn.Linear(3, 3)
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    checkpoints = Checkpoints(tmp_path / "run", {}, accelerator, ["weight", "bias"], 2)
    save = accelerator.save_state

    def save_evil(folder: str) -> None:
        save(folder)
        for path in (Path(folder) / name, Path(folder) / f"pytorch_{name.replace('safetensors', 'bin')}"):
            path.write_bytes(pickle.dumps(Code(ran)))

    accelerator.save_state = save_evil
    checkpoints.save(1)
    with pytest.raises(Exception, match=r"(?i)weights.only|header|could be code"):
        checkpoints.restore(checkpoints.latest(print))


def test_tables_of_sharded_checkpoints_are_let_through(tmp_path):
    import torch.distributed.checkpoint as sharded

    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "half": torch.ones(3).half()}
    sharded.save(state, checkpoint_id=tmp_path / "a/b", no_dist=True)
    check_tables(tmp_path)
    (tmp_path / "a/b" / TABLE).write_bytes(pickle.dumps(shutil.rmtree))
    with pytest.raises(UserError, match=r"it names shutil.rmtree\), and could be code"):
        check_tables(tmp_path)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python knows no way before 3.11")
def test_processes_take_nothing_from_the_working_directory(tmp_path, ran, monkeypatch):
    """`kvfold run` and `kvfold uptrain`, started in the folder of a checkpoint that holds a json.py."""
    (tmp_path / "json").mkdir()
    for name in ("json/__init__.py", "argparse.py"):
        (tmp_path / name).write_text(f"open({str(ran)!r}, 'w')")
    monkeypatch.chdir(tmp_path)
    with Path(os.devnull).open("wb") as nowhere:
        command = Command((sys.executable, "-m", "json.tool", "--help"), dict(os.environ))
        assert launch(command, stdout=nowhere, short_of_memory="") == 0


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ (messages|attr('__class__')).__base__.__subclasses__() }}",
        "{{ raise_exception.__globals__['os'].system('touch ran') }}",
        "{{ '{0.__class__.__init__.__globals__}'.format(raise_exception) }}",
        "{% set _ = messages.append(1) %}",
    ],
)
def test_chat_templates_cannot_leave_their_sandbox(ran, template):
    tokenizer = load_tokenizer(MODEL_DIR)
    tokenizer.chat_template = template
    with pytest.raises(UserError, match="the chat template refuses"):
        render_chat(tokenizer, "a text", [{"role": "user", "content": "hello"}])


def test_task_files_run_when_they_are_asked_for_and_not_before(tmp_path, ran):
    pytest.importorskip("lm_eval")
    from kvfold.eval.tasks import _check_file, _open, _read

    (tmp_path / "evil.py").write_text(f"open({str(ran)!r}, 'w')\ndef f(doc): return doc\n")
    path = tmp_path / "task.yaml"
    path.write_text("task: mine\nprocess_docs: !function evil.f\ndoc_to_text: !function evil.f\n")
    _read(str(path))
    with pytest.raises(UserError, match="has no data"):
        _check_file(str(path), {})
    path.write_text(path.read_text() + "x: !!python/object/apply:os.system ['touch ran']\n")
    with pytest.raises(UserError, match=r"is not YAML|cannot be run"):
        _open([str(path)], [])


@pytest.mark.parametrize(
    "line", ["compute_environment: AMAZON_SAGEMAKER", "commands: [touch ran]", "command_file: x.sh"]
)
def test_accelerate_configs_start_nothing_else(tmp_path, line):
    path = tmp_path / "accelerate.yaml"
    path.write_text(f"distributed_type: MULTI_GPU\nnum_processes: 1\n{line}\n")
    with pytest.raises(UserError, match="runs something else or elsewhere"):
        read_settings(path)

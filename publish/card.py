"""The model card: what a result is, how it was made, how to load it, and what it must not be taken for.

Every foreign word in it (names, figures, records) goes through `words.words`, or stands in a fenced block.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined

from .. import __version__
from ..common.embedded import EMBEDDED
from ..common.text import BUILTIN, HUB
from ..convert.check import CheckReport
from ..eval.report.plain import cleaned, plain
from ..eval.report.record import Report, Result
from ..eval.report.say import NOTHING, say_bytes, say_number, say_ratio
from ..eval.report.write import CHARTS, FIGURES, PAGE
from .contents import RECIPE, REPORT_FOLDER, public_recipe
from .facts import SOURCE_README, Facts
from .licences import GIVEN, Licence
from .words import HUB_ID, fenced, public_name, words

MARKER = "<!-- written by kvfold publish -->"
TEMPLATE = "card.md.j2"
_LONGEST_RECORD = 20_000  # letters of a step's record that the card shows
_FIGURES = {"perplexity": "Perplexity", "kl": "KL divergence from the source", "top1_agreement": "Top-1 agreement"}


@dataclass(frozen=True)
class Loading:
    """How one engine loads the result: a block of code, and what it needs."""

    title: str
    code: str
    notes: str


# What to type for each engine of `convert.demands.ENGINES`.
_LOADING = {
    "transformers": (
        "transformers",
        "python",
        """from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{repo}"{revision})
tokenizer = AutoTokenizer.from_pretrained("{repo}"{revision})
prompt = tokenizer("The key/value cache", return_tensors="pt")
print(tokenizer.decode(model.generate(**prompt, max_new_tokens=32)[0]))""",
    ),
    "vllm": ("vLLM", "bash", "vllm serve {repo}{revision}"),
    "vllm-transformers": (
        "vLLM, through its transformers backend",
        "bash",
        "vllm serve {repo}{revision} --model-impl transformers",
    ),
    "sglang": ("SGLang", "bash", "python -m sglang.launch_server --model-path {repo}{revision}"),
    "llama.cpp": (
        "llama.cpp",
        "bash",
        """hf download {repo}{revision} --local-dir {name}
python convert_hf_to_gguf.py {name} --outtype {outtype} --outfile {name}.gguf
llama-cli -m {name}.gguf -p "The key/value cache\"""",
    ),
}


_PLAIN = """import kvfold.attention.plain  # makes the form known to transformers
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("{repo}"{revision})"""


def card_text(
    facts: Facts,
    licence: Licence,
    repo_id: str,
    *,
    report: Report | None,
    recipe: bool,
    revision: str | None = None,
) -> str:
    """The model card, metadata and body.

    Args:
        facts: of the result.
        licence: its licence.
        repo_id: where it goes.
        report: figures that are published, made `contents.publishable`.
        recipe: whether the recipe of a pipeline goes along.
        revision: the branch, where it is not main.
    """
    from huggingface_hub import ModelCard, ModelCardData

    data = metadata(facts, licence, repo_id, report)
    body = _body(facts, licence, repo_id, report=report, recipe=recipe, revision=revision)
    template = "---\n{{ card_data }}\n---\n\n{{ body }}"
    return str(ModelCard.from_template(ModelCardData(**data), template_str=template, body=body))


def metadata(facts: Facts, licence: Licence, repo_id: str, report: Report | None) -> dict[str, Any]:
    """The keywords of huggingface_hub's ModelCardData."""
    kind = facts.inspected.attention_kind.lower()
    folded = {"gqa", "mqa", "mla"} & {kind}
    data: dict[str, Any] = {
        "license": licence.id,
        "library_name": None if facts.is_plain else "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["kvfold", "kv-cache", *sorted(folded)],
    }
    if licence.id == "other":
        data |= {"license_name": licence.name, "license_link": licence.link}
    if facts.base:
        data |= {"base_model": facts.base, "base_model_relation": "finetune"}
    if facts.head.language:
        data["language"] = list(facts.head.language)
    if facts.datasets:
        data["datasets"] = list(facts.datasets)
    if report is not None and facts.row is not None and (found := eval_results(report, facts.row)):
        data |= {"model_name": repo_id.rpartition("/")[2], "eval_results": found}
    return data


def eval_results(report: Report, row: int) -> list[Any]:
    """The figures of one row, each with the text that it was measured on, as the Hub's metadata has them."""
    from huggingface_hub import EvalResult

    result, protocol = report.results[row], report.protocol
    found = []
    for name, title in _FIGURES.items():
        if (value := getattr(result, name)) is not None:
            found.append(
                EvalResult(
                    task_type="text-generation",
                    task_name="Text generation",
                    metric_type=name,
                    metric_name=title,
                    metric_value=value,
                    metric_args={"window": protocol.window, "stride": protocol.stride, "tokens": report.tokens},
                    **dataset_of(protocol.texts),
                )
            )
    return found


def dataset_of(texts: Sequence[str]) -> dict[str, str]:
    """The texts that something was measured on, as one dataset of the Hub's metadata."""
    if len(texts) == 1 and texts[0].startswith(HUB):
        dataset, config, split = [*texts[0][len(HUB) :].split(":"), "", ""][:3]
        if HUB_ID.fullmatch(dataset):
            found = {"dataset_type": dataset, "dataset_name": dataset}
            return found | ({"dataset_config": config} if config else {}) | ({"dataset_split": split} if split else {})
    names = [text[len(HUB) :] if text.startswith(HUB) else public_name(text) for text in texts]
    return {"dataset_type": "text", "dataset_name": ", ".join(names) or "text"}


def _body(
    facts: Facts,
    licence: Licence,
    repo_id: str,
    *,
    report: Report | None,
    recipe: bool,
    revision: str | None,
) -> str:
    text = (files(__package__) / TEMPLATE).read_text(encoding="utf-8")
    environment = Environment(undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    name = repo_id.rpartition("/")[2]
    exact = all(line.exact for line in facts.commands)
    return environment.from_string(text).render(
        marker=MARKER,
        name=words(name),
        lead=_lead(facts, report),
        built_with=licence.terms.built_with,
        is_plain=facts.is_plain,
        table=_table(facts, report),
        protocol=_protocol(report),
        plot=f"{REPORT_FOLDER}/{CHARTS}/trade-off.png" if report is not None else None,
        report_page=f"{REPORT_FOLDER}/{PAGE}",
        report_figures=f"{REPORT_FOLDER}/{FIGURES}",
        steps=[words(line) for line in facts.recipes],
        made=_made(facts, exact=exact),
        commands=fenced("\n".join(line.text for line in facts.commands), "bash"),
        recipe=RECIPE if recipe else None,
        records="\n\n".join(_record(step.recipe, {facts.base} if facts.base else ()) for step in facts.steps),
        engines=_loadings(facts, repo_id, revision),
        limits=_limits(facts, report),
        licence=_licence(facts, licence),
    )


def _source(facts: Facts) -> str:
    """What it was made from: a link where it is on the Hub."""
    if not facts.base:
        return "The model inside kvfold," if facts.source == EMBEDDED else f"A local checkpoint, {words(facts.source)},"
    commit = facts.base_revision
    at = f" at commit `{commit[:12]}`" if commit and commit.isalnum() else ""
    return f"[{words(facts.base)}](https://huggingface.co/{facts.base}){at}"


def _holds(facts: Facts) -> str:
    """Kind of attention, and what it caches."""
    seen = facts.inspected
    if seen.attention_kind == "MLA":
        return f"a latent of rank {seen.kv_lora_rank} and a rotary key of {seen.qk_rope_head_dim}"
    heads = seen.num_key_value_heads
    return f"{heads} key/value {'head' if heads == 1 else 'heads'}"


def _lead(facts: Facts, report: Report | None) -> str:
    """What it is, in two sentences."""
    seen, source = facts.inspected, facts.source_cache
    kinds = {
        "MLA": "multi-head latent attention",
        "MQA": "multi-query attention",
        "GQA": "grouped-query attention",
        "MHA": "multi-head attention",
    }
    healed = " and healed by a short training" if any(step.command == "uptrain" for step in facts.steps) else ""
    first = (
        f"{_source(facts)} converted to {kinds[seen.attention_kind]} ({_holds(facts)}){healed} by kvfold "
        f"{words(facts.steps[-1].kvfold)}."
    )
    ours, theirs = seen.kv_elements_per_token_per_layer, source.kv_elements_per_token_per_layer
    second = f"It caches {say_number(ours)} numbers a token and layer"
    if theirs:
        second += f", {_times(ours / theirs)} its source's {say_number(theirs)}"
    row = _row(facts, report)
    if row is None or row.perplexity is None:
        return f"{first} {second}; how well it predicts was not measured for this card."
    second += f", at a perplexity of {say_number(row.perplexity)}"
    if row.perplexity_ratio is not None and report is not None and report.source.perplexity is not None:
        said = f"{say_ratio(row.perplexity_ratio)} the source's {say_number(report.source.perplexity)}"
        second += f", {said}"
    return f"{first} {second}."


def _times(ratio: float) -> str:
    return "as many as" if ratio == 1 else f"{ratio:.3g} times"


def _row(facts: Facts, report: Report | None) -> Result | None:
    return report.results[facts.row] if report is not None and facts.row is not None else None


def _table(facts: Facts, report: Report | None) -> str:
    """Cache and quality of the source and of what was measured beside it; this result in bold."""
    head = (
        "",
        "attention",
        "numbers cached a token and layer",
        "cache bytes a token",
        "perplexity",
        "x source",
    )
    if report is None:
        source, seen = facts.source_cache, facts.inspected
        ours = (seen.attention_kind, seen.kv_elements_per_token_per_layer, seen.kv_bytes_per_token)
        cells = [
            _cells("source", source.attention_kind, source.kv_elements_per_token_per_layer, source.kv_bytes_per_token),
            _cells("this model", *ours, bold=True),
        ]
    else:
        cells = [
            _cells(
                "this model" if place == facts.row else "source" if place == 0 else row.name,
                row.attention_kind,
                row.kv_elements_per_token_per_layer,
                row.kv_bytes_per_token,
                row.perplexity,
                row.perplexity_ratio,
                bold=place == facts.row,
            )
            for place, row in enumerate(report.results)
        ]
    lines = [f"| {' | '.join(head)} |", "|:--|:--|--:|--:|--:|--:|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in cells)])


def _cells(
    name: str,
    kind: str | None,
    elements: int | None,
    size: int | None,
    perplexity: float | None = None,
    ratio: float | None = None,
    *,
    bold: bool = False,
) -> list[str]:
    said = [
        words(name),
        words(kind or NOTHING),
        NOTHING if elements is None else say_number(elements),
        NOTHING if size is None else say_bytes(size),
        NOTHING if perplexity is None else say_number(perplexity),
        NOTHING if ratio is None else say_ratio(ratio),
    ]
    return [f"**{one}**" if bold else one for one in said]


def _protocol(report: Report | None) -> str:
    if report is None:
        return "No report was published with it: its perplexity is not known here."
    asked = report.protocol
    texts = ", ".join(words(text) for text in asked.texts)
    return (
        f"Perplexity on {texts} (text hash {words(asked.text_hash)}): {say_number(report.tokens)} tokens scored in "
        f"{say_number(report.windows)} windows of {say_number(asked.window)}, stride {say_number(asked.stride)}, in "
        f"{words(asked.dtype)} on {words(asked.device)}, by kvfold {words(report.kvfold_version)}. Figures compare "
        "with others where the text, the protocol and the tokenizer are the same."
    )


def _made(facts: Facts, *, exact: bool) -> str:
    name = words(facts.source)
    known = facts.base or facts.source == EMBEDDED
    said = "" if known else f" {name} is a checkpoint on the machine that made it."
    rest = "" if exact else " The record of a step is too old to tell every option; what it tells is said."
    return f"By these commands (files are named without their folders):{said}{rest}"


def _record(recipe: Mapping[str, Any], known: Collection[str]) -> str:
    text = json.dumps(_plain(public_recipe(dict(recipe), known)), indent=2, ensure_ascii=True)
    if len(text) > _LONGEST_RECORD:
        text = f"{text[:_LONGEST_RECORD]}\n... (the rest is in kvfold.json)"
    return fenced(text, "json")


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {plain(str(key)): _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list) else cleaned(value)


def _loadings(facts: Facts, repo_id: str, revision: str | None) -> list[Loading]:
    """One for each engine that reads it; vLLM's second way only where its first one does not."""
    if facts.is_plain:
        code = _PLAIN.format(repo=repo_id, revision=_at("python", revision))
        return [Loading("kvfold, for training", fenced(code, "python"), "- Nothing else reads this form.")]
    read_by = {engine.engine: engine for engine in facts.read_by}
    if "vllm" in read_by:
        read_by.pop("vllm-transformers", None)
    return [_loading(engine, facts, repo_id, revision) for engine in read_by.values()]


def _loading(engine: CheckReport, facts: Facts, repo_id: str, revision: str | None) -> Loading:
    title, language, code = _LOADING[engine.engine]
    said = code.format(
        repo=repo_id,
        name=repo_id.rpartition("/")[2],
        revision=_at(language, revision),
        outtype=_outtype(facts),
    )
    needs = [f"Passes `kvfold check`, by {words(engine.read_from)}; what is checked is {words(engine.checked)}."]
    needs += [f"{words(one.wrong)}; {words(one.mend)}." for one in engine.violations]
    if engine.engine == "transformers" and facts.inspected.attention_kind == "MLA":
        needs.append(
            "transformers caches the latent and expands all of it at every step; `kvfold.attention.absorb` attends to "
            "it as it is."
        )
    return Loading(title, fenced(said, language), "\n".join(f"- {one}" for one in needs))


def _at(language: str, revision: str | None) -> str:
    """How a branch is said to a loader."""
    if not revision:
        return ""
    return f", revision={json.dumps(revision)}" if language == "python" else f" --revision {shlex.quote(revision)}"


def _outtype(facts: Facts) -> str:
    """Weights that the latent norm survives, see docs/engines.md: narrow ones only where it was made for them."""
    seen = facts.inspected
    if seen.attention_kind != "MLA":
        return "auto"
    return "f16" if seen.readers == ["llama.cpp"] else "f32"


def _limits(facts: Facts, report: Report | None) -> list[str]:
    seen = facts.inspected
    found = ["The weights were changed: it is not its source, and what was found out about that need not hold here."]
    if report is None:
        found.append("Nothing was measured for this card.")
    else:
        texts = ", ".join(words(text) for text in report.protocol.texts)
        found.append(
            f"Its quality was measured as perplexity on {texts}, in windows of {say_number(report.protocol.window)} "
            "tokens, and in no other way: not on tasks, not in conversation, not for safety."
        )
        row = _row(facts, report)
        if row is not None and row.reason:
            found.append(words(row.reason))
    if calibrated := _calibrated(facts):
        found.append(f"It was fitted to {calibrated}; other kinds of text lose more.")
    if seen.max_position_embeddings:
        known = ""
        if report is not None and report.protocol.window < seen.max_position_embeddings:
            known = f", of which {say_number(report.protocol.window)} were measured"
        found.append(f"Its config allows {say_number(seen.max_position_embeddings)} tokens of context{known}.")
    rows = [*(report.warnings if report is not None else []), *seen.warnings]
    return [*found, *(words(one) for one in dict.fromkeys(rows))]


def _calibrated(facts: Facts) -> str:
    """The texts that its calibration, refinement and training read."""
    names: dict[str, None] = {}
    for step in facts.steps:
        for part in ("calibration", "refine"):
            table = step.recipe.get(part)
            kinds = table.get("kinds") if isinstance(table, Mapping) else None
            names |= dict.fromkeys(map(public_name, kinds)) if isinstance(kinds, Mapping) else {}
        data = step.recipe.get("data")
        names |= dict.fromkeys(public_name(str(one)) for one in data) if isinstance(data, list) else {}
    builtin = [name for name in names if name.partition(":")[0] == BUILTIN]
    others = [words(name) for name in names if name not in builtin]
    said = "English and code that comes with Python installations" if builtin else ""
    return ", ".join([*others, *([said] if said else [])])


def _licence(facts: Facts, licence: Licence) -> str:
    terms = licence.terms
    name = f"[{words(terms.title)}]({licence.link})" if licence.link and _is_link(licence.link) else words(terms.title)
    who = (
        "which whoever published it says is that of its source"
        if licence.found == GIVEN
        else f"the licence of its source, as {words(licence.found)} says"
    )
    said = (
        f"{name} (`{plain(terms.id)}`), {who}. It asks, in short: {words(terms.asks)}. The licence itself counts, not "
        "this line."
    )
    if facts.readme:
        said += f" The source's own card is [{SOURCE_README}]({SOURCE_README}); what it says is about the source."
    changed = (
        f"The weights were changed by kvfold; `kvfold.json` says which tensors. This card is by kvfold {__version__}."
    )
    return f"{said}\n\n{changed}"


def _is_link(link: str) -> bool:
    return link.startswith(("https://", "http://")) and not set(link) & set("()<>[]\\\"'` \t\n")

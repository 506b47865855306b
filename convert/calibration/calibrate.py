"""From a checkpoint and text to statistics, computed once: the entry to calibration."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from ...common.cache import cache_folder
from ...common.errors import EnvironmentFailure, UserError
from ...common.loading import load_tokenizer, resolve_device
from ...common.parallel import Workers, is_main_process
from ...common.progress import Stages, silent
from ...common.sources import one_line_errors
from ...common.text import text_name
from ..checkpoint import torch_dtype
from ..checks import account, latent_obstacle, obstacle
from ..families import Sizes
from ..headers import FLOATS, main_dtype
from ..projections import projections
from ..source import Source, open_source
from .collect import collect
from .knobs import Calibration
from .layers import LayeredModel
from .reader import full_names, model_reader
from .recognise import check_new_statistics
from .store import About, Statistics, statistics_file
from .text import CalibText, Windows, calibration_windows


@dataclass(frozen=True)
class CalibrateReport:
    """What `calibrate` made.

    Attributes:
        model: the statistics' file.
        tokens, windows: how many the model read, and `kinds`, how many windows of each kind.
        effective_ranks: for every layer, how many of the `hidden_size + 1` directions of the attention's inputs the
            text has shown; merges fall back to the weights alone in the others.
        key: hash of all that decides the statistics.
        reused: whether the file was there already.
    """

    model: str
    source: str
    tokens: int
    windows: int
    kinds: dict[str, int]
    fisher: bool
    dtype: str
    hidden_size: int
    effective_ranks: list[int]
    bytes: int
    key: str
    reused: bool


class Runner:
    """A source made ready to run: its windows of text, and its layers.

    Args:
        source: an opened checkpoint.
        how: see `Calibration`.
    """

    def __init__(self, source: Source, how: Calibration):
        if reason := obstacle(source.config):
            raise UserError(f"{source.name} cannot be calibrated: {reason}")
        self.source, self.how = source, how
        self.promised = account(source.family, source.config, source.checkpoint.tensors)
        self.sizes = Sizes(source.config)
        self.workers = Workers(resolve_device(how.device))
        self.device = self.workers.device
        if (kind := torch.device(self.device).type) == "mps":
            raise UserError(f"device {self.device} has no float64, in which statistics are summed; try --device cpu")
        if (stored := main_dtype(source.checkpoint.tensors.values())) not in FLOATS:
            raise UserError(f"{source.name} is stored in {stored}; only {', '.join(FLOATS)} can be computed with")
        named = {"auto": torch.float32 if kind == "cpu" else torch_dtype(stored), "checkpoint": torch_dtype(stored)}
        self.dtype = named[how.dtype] if how.dtype in named else getattr(torch, how.dtype)

    @property
    def experts(self) -> int:
        """How many experts a layer has, where transformers joins in memory what the checkpoint holds apart."""
        return self.sizes["E"] if self.source.family.in_memory else 0

    @property
    def still(self) -> bool:
        """Whether gradients at keys without position are taken: where they mean something, see `still`."""
        return self.how.fisher and latent_obstacle(self.source.family, self.source.config.full) is None

    def windows(self, count: int | None = None) -> Windows:
        """The windows of the calibration text: as many as `how` says, or as are asked for."""
        text = self.how.text if count is None else replace(self.how.text, windows=count)
        return calibration_windows(load_tokenizer(self.source.folder), text, self.source.config.full)

    def shares(self, windows: Windows) -> list[Windows]:
        """Every process's part of the windows."""
        size = self.workers.size
        return [Windows(windows.ids[rank::size], windows.kinds[rank::size]) for rank in range(size)]

    def share(self, windows: Windows) -> Windows:
        """This process's part of the windows."""
        return self.shares(windows)[self.workers.rank]

    def read(self, name: str) -> Tensor:
        """A tensor of the source by its name there."""
        return self.source.checkpoint.tensor(self.source.checkpoint.tensors[name])

    def model(self, dtype: torch.dtype | None = None) -> LayeredModel:
        """The source, its layers not yet loaded."""
        family = self.source.family
        read = model_reader(family, full_names(self.promised), self.read, self.experts)
        config = self.source.config.full
        if any(promise.weight.rule == "untied" for promise in self.promised.values()):
            config = deepcopy(config)  # a head that is stored counts, whatever the config says; so in transformers
            config.tie_word_embeddings = False
        with one_line_errors(self.source.name):  # what a config says is only known when a model is made of it
            return LayeredModel(config, family.layers, read, dtype=dtype or self.dtype, device=self.device)

    def about(self, windows: Windows) -> About:
        return About(
            source=self.source.digest(),
            text=windows.digest,
            tokens=windows.tokens,
            windows=len(windows),
            kinds=published(windows.counts),
            fisher=self.how.fisher,
            still=self.still,
            dtype=str(self.dtype).removeprefix("torch."),
            hidden_size=self.sizes["D"],
            kv_size=self.sizes["K"],
            num_hidden_layers=self.sizes["L"],
        )


def published(counts: dict[str, int]) -> dict[str, int]:
    """Windows of each kind, without the folders in which a user keeps texts."""
    published: Counter[str] = Counter()
    for name, count in counts.items():
        published[text_name(name)] += count
    return dict(published)


def find_statistics(runner: Runner, path: Path | None, progress: Stages) -> Statistics:
    """The statistics that a conversion needs: those of a file, or those in the cache, where they are put if need be.

    Args:
        path: a file of the user's.

    Raises:
        UserError: the file is none, or of another checkpoint.
    """
    if path is None:
        windows = runner.windows()
        about = runner.about(windows)
        path = cache_folder() / "statistics" / f"{about.key}.safetensors"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            return _collect_to(path, runner, windows, about, overwrite=True, wait=True, progress=progress)[0]
        except OSError as error:
            raise EnvironmentFailure(
                f"statistics cannot be kept in {path.parent} ({error.strerror}); set KVFOLD_CACHE to another, or "
                "give --stats"
            ) from error
    statistics = Statistics.open(path)
    if statistics.about.source != runner.source.digest():
        raise UserError(
            f"{path} holds the statistics of another checkpoint than {runner.source.name}; calibrate that one"
        )
    return statistics


def _collect_to(
    path: Path,
    runner: Runner,
    windows: Windows,
    about: About,
    *,
    overwrite: bool,
    wait: bool = False,
    progress: Stages,
) -> tuple[Statistics, bool]:
    """The statistics in a file that is made unless it is there already, and whether it was.

    Args:
        wait: for another process that is writing it, rather than to fail.
    """
    found = None
    if path.is_file():
        with suppress(UserError):  # it holds something else
            found = Statistics.open(path)
    if runner.workers.agree(found is not None and found.about.key == about.key and found.is_whole()):
        return Statistics.open(path), True
    batches = runner.share(windows).batches(runner.how.batch_size)
    places = projections(runner.source.family, runner.sizes)
    with ExitStack() as stack:
        writer = None
        if is_main_process():
            writer = stack.enter_context(statistics_file(path, about, overwrite=overwrite, wait=wait))
        advance = stack.enter_context(progress("calibrating"))
        collect(
            runner.model(),
            batches,
            places,
            emit=writer or (lambda layer, statistics: None),
            fisher=runner.how.fisher,
            still=runner.still,
            segment=1 if runner.how.offload else None,
            reduce=runner.workers.sum,
            progress=advance,
        )
    runner.workers.wait()
    return Statistics.open(path), False


def calibrate(
    src: str | Path,
    out: str | Path,
    *,
    calib: Sequence[str] = (),
    calib_windows: int = CalibText.windows,
    calib_window: int | None = None,
    calib_builtin: bool = True,
    chat: bool = False,
    fisher: bool = True,
    offload: bool = False,
    batch_size: int = 1,
    device: str = "auto",
    dtype: str = "auto",
    overwrite: bool = False,
    revision: str | None = None,
    progress: Stages = silent,
) -> CalibrateReport:
    """Collect the statistics of a checkpoint on text once, for many conversions.

    Args:
        src: a checkpoint directory, a GGUF file, or a Hub id.
        out: the file to create.
        calib: texts, see `text.CalibText`; the built-in ones if empty.
        calib_windows, calib_window: how many windows, and how many tokens each.
        calib_builtin: mix the built-in kinds of text into the user's.
        chat: render the text through the chat template.
        fisher, offload, batch_size, device, dtype: see `Calibration`.
        overwrite: replace an existing file of statistics. One of the same content is used as it is.
        revision: of a Hub repository.
        progress: opens a progress for the stage.

    Raises:
        UserError: the source or a text cannot be used. Nothing was written.
        EnvironmentFailure: no room on the disk or in memory, or the Hub cannot be reached.
    """
    text = CalibText(calib, calib_windows, calib_window, calib_builtin, chat)
    how = Calibration(text, fisher, offload, batch_size, device, dtype)
    if text.weights_only:
        raise UserError("--calib none is for convert: there is nothing to calibrate on")
    out = Path(out)
    check_new_statistics(out, overwrite=overwrite)
    with open_source(str(src), revision=revision) as source:
        runner = Runner(source, how)
        windows = runner.windows()
        about = runner.about(windows)
        statistics, reused = _collect_to(out, runner, windows, about, overwrite=overwrite, progress=progress)
    return CalibrateReport(
        model=str(out),
        source=str(src),
        tokens=about.tokens,
        windows=about.windows,
        kinds=about.kinds,
        fisher=about.fisher,
        dtype=about.dtype,
        hidden_size=about.hidden_size,
        effective_ranks=statistics.effective_ranks(),
        bytes=statistics.path.stat().st_size,
        key=about.key,
        reused=reused,
    )

"""The stages of a pipeline before its uptraining: memory, disk and time of each, by the closed forms of `convert.plan`.

Operations of calibration, with T tokens of all windows: forward and, weights being frozen, backward once each, another
forward pass where one layer is held at a time, and the products of the sums: 2 T n^2 of a moment [n, n]. Refinement:
both models' layers once, and the result's again for each pass and each look at its error, twice of that backward.
Factors take n^3 operations some times over, which was timed, not counted: of `mla` mostly one eigenvalue problem of the
hidden size and one of singular values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...common.kvcache import ELEMENT_BYTES, fit_context
from ...convert import plan as forms
from ...convert.calibration.knobs import RefineKnobs
from ...convert.calibration.text import DEFAULT_WINDOW, CalibText
from ...convert.checks import latent_obstacle
from ...convert.families import Sizes
from ...convert.merge.methods import METHODS
from ...convert.mla.convert import REFINING
from ...uptrain.plan import layer_bytes, logit_bytes
from ...uptrain.plan import shape_of as activations_of
from .flops import forward_flops
from .machine import DEVICES, DISK_BYTES_PER_SECOND, MACHINE_DEVICES, Machine
from .models import Planned, dtype_of, elements

# n^3 operations that the factors of a layer take, in units of the inputs' moment and of the keys'.
_CUBES = {"whole": (0, 0), "mixed": (4, 60), "latent": (60, 120)}


@dataclass(frozen=True)
class StagePlan:
    """What one stage will take.

    Attributes:
        stage: calibrate, convert, refine or uptrain.
        processes: that share it, one a device.
        device_bytes: of each device at the peak. On a CPU it is the process's whole memory.
        host_bytes: of one machine's own memory, all of its processes together.
        disk_bytes: what it writes, temporary files included.
        seconds: by the machine's rate; reading texts comes on top.
        fits: whether devices and host hold that, as far as the host's memory is known.
        how: keys of the recipe that it is planned with and that were not asked for.
    """

    stage: str
    processes: int
    device_bytes: int
    host_bytes: int
    disk_bytes: int
    seconds: float
    fits: bool
    how: tuple[str, ...] = ()


@dataclass(frozen=True)
class Work:
    """What the stages are of.

    Attributes:
        before, after: source and result.
        sections: of the recipe.
        machine: where they run.
    """

    before: Planned
    after: Planned
    sections: Mapping[str, Mapping[str, Any]]
    machine: Machine

    @property
    def convert(self) -> Mapping[str, Any]:
        return self.sections["convert"]

    @property
    def calibrate(self) -> Mapping[str, Any]:
        """How the source is calibrated: in a stage of its own, or by the conversion."""
        return self.sections.get("calibrate", self.convert)

    @property
    def method(self) -> str:
        """How factors are found, a key of `convert.plan.FACTORS`."""
        if self.convert["to"] == "mla":
            return "latent"
        return "mixed" if METHODS[self.convert.get("method", "svd")].mixes_channels else "whole"

    @property
    def calibrates(self) -> bool:
        compares = self.method != "whole" or self.convert.get("grouping") == "similar"
        return compares and tuple(self.convert.get("calib", ())) != ("none",) and "stats" not in self.convert

    @property
    def stored(self) -> int:
        """Bytes of an element of the source."""
        return ELEMENT_BYTES[dtype_of(self.before.config)]

    @property
    def width(self) -> int:
        """Bytes of an element in which the source is run."""
        said = self.calibrate.get("dtype" if "calibrate" in self.sections else "calib_dtype", "auto")
        usual = 4 if self.machine.on_cpu else self.stored
        return {"auto": usual, "checkpoint": self.stored}.get(said) or ELEMENT_BYTES[said]

    @property
    def window(self) -> int:
        return fit_context(self.before.config, "window", self.calibrate.get("calib_window"), DEFAULT_WINDOW)

    def extent(self) -> forms.Extent:
        config, row = self.before.config, self.before.row
        layers: dict[int, int] = {}
        for promise in self.before.promises.values():
            if "layer" in promise.slots:
                number = promise.slots["layer"]
                layers[number] = layers.get(number, 0) + math.prod(promise.shape)
        sizes, whole = Sizes(config), elements(self.before.promises.values())
        embedding = config.vocab_size * config.hidden_size
        return forms.Extent(
            layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            keys=sizes["K"],
            queries=sizes["Q"],
            layer=max(layers.values()),
            others=whole - sum(layers.values()),
            largest=max(embedding if self.method == "latent" else 0, config.hidden_size * sizes["Q"]),
            vocabulary=config.vocab_size,
            still=latent_obstacle(row, config) is None,
        )

    def layer_activations(self, width: int) -> int:
        """Bytes that a layer keeps of one window for its backward pass."""
        return self.window * layer_bytes(activations_of(self.before.config), width=width, norms=False, mlp=False)

    def row(
        self, stage: str, held: forms.Held, *, processes: int = 1, seconds: float, how: tuple[str, ...] = ()
    ) -> StagePlan:
        """A row of the plan. On a CPU device and host are one memory, which all processes of a machine share."""
        here, machine = min(processes, MACHINE_DEVICES), self.machine
        device = held.device + (held.host if machine.on_cpu else 0)
        host = here * (device if machine.on_cpu else held.host)
        fits = (host if machine.on_cpu else device) <= machine.memory_bytes
        fits = fits and (machine.host_bytes is None or host <= machine.host_bytes)
        return StagePlan(stage, processes, device, host, held.disk, seconds, fits, how)


def shortage(row: StagePlan, machine: Machine) -> str:
    """What a stage that does not fit takes, and what there is of it."""
    if row.device_bytes > machine.memory_bytes:
        return f"{_size(row.device_bytes)} of a device, which has {_size(machine.memory_bytes)}"
    there = machine.memory_bytes if machine.host_bytes is None else machine.host_bytes
    return f"{_size(row.host_bytes)} of a machine's memory, which has {_size(there)}"


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 10**8 else f"{count / 1e6:.1f} MB"


def calibrate_stage(work: Work) -> StagePlan:
    """Of calibration, layer by layer if it does not fit otherwise, unless the recipe says how."""
    from ...common.scoring import chunk_elements

    asked, extent, machine = work.calibrate, work.extent(), work.machine
    windows, fisher = asked.get("calib_windows", CalibText.windows), not asked.get("no_fisher", False)
    tokens, processes = windows * work.window, min(machine.devices or 1, windows)
    share = -(-windows // processes) * work.window
    moments = forms.sums_bytes(extent, fisher=fisher) // forms.FP64  # elements of all sums of a layer
    rows = []
    for offload in (True,) if asked.get("offload") else (False, True):
        held = forms.calibration(
            extent,
            tokens=share,
            width=work.width,
            offload=offload,
            fisher=fisher,
            activations=work.layer_activations(work.width),
            logits=logit_bytes(extent.vocabulary, work.window, chunk=chunk_elements(machine.kind), teacher=False),
        )
        runs = windows * forward_flops(work.before.shape, work.window, head=fisher)
        flops = runs * (1 + fisher + (offload and fisher))
        sums = 2 * tokens * moments * extent.layers / DEVICES[machine.kind].fp32
        reading = work.stored * (extent.layers * extent.layer + extent.others) / DISK_BYTES_PER_SECOND
        seconds = (flops + sums) / (processes * machine.rate) + reading * (1 + (offload and fisher))
        how = ("offload=true",) if offload and not asked.get("offload") else ()
        rows.append(work.row("calibrate", held, processes=processes, seconds=seconds, how=how))
        if rows[-1].fits:
            break
    return rows[-1]


def convert_stage(work: Work, result_bytes: int) -> StagePlan:
    """Of the conversion, its statistics given."""
    extent, machine = work.extent(), work.machine
    held = forms.conversion(extent, method=work.method, width=work.stored, on_cpu=machine.on_cpu)
    inputs, keys = _CUBES[work.method]
    cubes = extent.layers * (inputs * (extent.hidden + 1) ** 3 + keys * extent.keys**3)
    source = work.stored * elements(work.before.promises.values())
    seconds = (source + result_bytes) / DISK_BYTES_PER_SECOND
    seconds += cubes / (machine.rate * DEVICES[machine.kind].fp64)
    return work.row("convert", forms.Held(held.device, held.host, result_bytes), seconds=seconds)


def refine_stage(work: Work) -> StagePlan:
    """Of refinement, which is a part of the conversion's command."""
    extent, machine = work.extent(), work.machine
    knobs = RefineKnobs(work.convert["refine"], **(REFINING if work.method == "latent" else {}))
    passes = work.convert.get("refine_passes") or knobs.passes
    tokens, processes = knobs.windows * work.window, min(machine.devices or 1, knobs.windows)
    attention = sum(
        math.prod(one.shape)
        for name, one in work.after.promises.items()
        if one.slots.get("layer") == 0 and (".self_attn." in name or ".attn." in name)
    )
    held = forms.refinement(
        extent,
        tokens=-(-tokens // processes),
        attention=attention,
        width=work.stored,
        activations=work.layer_activations(4),
        method=work.method,
        on_cpu=machine.on_cpu,
    )
    layers = forward_flops(work.before.shape, work.window, head=False)
    share = 1.0 if knobs.through_mlp else attention / extent.layer
    flops = knobs.windows * layers * (2 + share * (2 + 3 * passes))
    seconds = flops / DEVICES[machine.kind].fp32 / (processes * machine.rate)
    return work.row("refine", held, processes=processes, seconds=seconds)

"""The machine that a plan is for: how many devices, what each holds, and how fast it is."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ...common.errors import UserError
from ...uptrain.launch import read_settings

MOST_DEVICES = 4096
MACHINE_DEVICES = 8  # devices of one machine, where more are asked for than a config says machines for
UTILIZATION = 0.4
DISK_BYTES_PER_SECOND = 1e9  # that conversion reads and writes


@dataclass(frozen=True)
class Kind:
    """A type of device.

    Attributes:
        memory_bytes: that it has.
        flops_per_second: products at its peak, in the dtype that models are trained in.
        fp32, fp64: the share of that peak at which it computes in these.
    """

    memory_bytes: float
    flops_per_second: float
    fp32: float
    fp64: float


# An A100 of 80 GB with dense bf16 products, and a small machine of two cores that was measured.
DEVICES = {"cuda": Kind(80e9, 312e12, 1 / 16, 1 / 16), "cpu": Kind(16e9, 2e11, 1, 1 / 2)}


@dataclass(frozen=True)
class Machine:
    """What a plan is made for.

    Attributes:
        kind: of device, a key of `DEVICES`.
        devices: how many, over all machines; None for as many as a recipe says, else its accelerate config, else one.
        memory_bytes: of a device.
        host_bytes: of one machine's own memory; None where that is not known.
        flops_per_second: of a device at its peak.
        utilization: the share of it that is reached.
    """

    kind: str
    devices: int | None
    memory_bytes: int
    host_bytes: int | None
    flops_per_second: float
    utilization: float

    @property
    def rate(self) -> float:
        """Operations that a device gets done in a second."""
        return self.flops_per_second * self.utilization

    @property
    def on_cpu(self) -> bool:
        return self.kind == "cpu"


def machine_of(
    uptrain: dict[str, Any],
    *,
    devices: int | None = None,
    memory: float | None = None,
    host_memory: float | None = None,
    device_flops: float | None = None,
    utilization: float = UTILIZATION,
) -> Machine:
    """The machine that is asked for; what is not said is that of `DEVICES`.

    Args:
        uptrain: the section of a recipe, which may say that it is for the CPU.
        devices: over all machines.
        memory: bytes of a device.
        host_memory: bytes of one machine's own memory.
        device_flops: operations a second of a device at its peak.
        utilization: the share of the peak that is reached.

    Raises:
        UserError: a number is out of range, or the section names no accelerate config.
    """
    _check(devices=devices, memory=memory, host_memory=host_memory, device_flops=device_flops, utilization=utilization)
    settings = read_settings(uptrain["accelerate"]) if uptrain.get("accelerate") else None
    kind = "cpu" if uptrain.get("device") == "cpu" or (settings and settings.on_cpu) else "cuda"
    usual = DEVICES[kind]
    return Machine(
        kind,
        devices,
        int(memory or usual.memory_bytes),
        None if host_memory is None else int(host_memory),
        device_flops or usual.flops_per_second,
        utilization,
    )


def _check(**numbers: float | None) -> None:
    for name, number in numbers.items():
        least, most = _BOUNDS.get(name, (0.0, math.inf))
        if number is not None and not (math.isfinite(number) and number > 0 and least <= number <= most):
            least_said = f"at least {least:g}" if least else "more than 0"
            most_said = f" and at most {most:g}" if most < math.inf else ""
            raise UserError(f"--{name.replace('_', '-')} is {number:g}; it must be {least_said}{most_said}")


# Of options, what can be divided by, and what the ways to train are made for.
_BOUNDS = {"utilization": (1e-4, 1.0), "device_flops": (1e6, math.inf), "devices": (1, MOST_DEVICES)}

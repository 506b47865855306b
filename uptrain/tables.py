"""What a sharded checkpoint says of its tensors is a pickle, which torch loads as it stands: looked through before."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch

from ..common.errors import UserError

TABLE = ".metadata"  # as torch.distributed.checkpoint calls it
_CHECKPOINT = "torch.distributed.checkpoint"
# All that its pickles are made of, but for dtypes.
_KNOWN = frozenset(
    {
        *(
            (f"{_CHECKPOINT}.metadata", name)
            for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties")
        ),
        *((f"{_CHECKPOINT}.metadata", f"{kind}StorageMetadata") for kind in ("Bytes", "Chunk", "Tensor")),
        (f"{_CHECKPOINT}.metadata", "_MEM_FORMAT_ENCODING"),
        (f"{_CHECKPOINT}.filesystem", "_StorageInfo"),
        ("torch.serialization", "_get_layout"),
        ("torch", "Size"),
        ("collections", "OrderedDict"),
        ("pathlib", "PosixPath"),
        ("pathlib._local", "PosixPath"),  # Python 3.13
    }
)


class _Reader(pickle.Unpickler):
    """Makes what is known, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _KNOWN or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def check_tables(folder: Path) -> None:
    """Refuse a checkpoint with a table that makes anything else than tables do, which could be code.

    Raises:
        UserError: names the file.
    """
    for path in sorted(folder.rglob(TABLE)):
        try:
            with path.open("rb") as file:
                _Reader(file).load()
        except OSError:
            raise
        except Exception as error:  # a damaged pickle can raise anything
            raise UserError(
                f"{path} is no table of a checkpoint ({error}), and could be code; start the run anew"
            ) from None

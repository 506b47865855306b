"""One process of a run: `accelerate launch -m kvfold.uptrain --config recipe.yaml [key=value ...]`.

`kvfold uptrain` starts as many as there are to be; see `launch`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from ..common.launcher import end_with_launcher
from ..common.output import print_report
from ..common.progress import show_progress
from ..common.status import leave, prepare_process, status_of
from .recipe import read_recipe


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="kvfold.uptrain", description=__doc__.partition("\n")[0])
    parser.add_argument("--config", metavar="FILE", help="the recipe; may be left out where pairs say it all")
    parser.add_argument("--dry-run", action="store_true", help="say what the run will take, and take no step")
    parser.add_argument("--overwrite", action="store_true", help="the same as overwrite=true")
    parser.add_argument("--json", action="store_true", help="print exactly one JSON object")
    parser.add_argument("pairs", nargs="*", metavar="key=value", help="values that win over the file's")
    options = parser.parse_intermixed_args(arguments)
    recipe = read_recipe(options.config, [*options.pairs, *["overwrite=true"] * options.overwrite])
    from .run import foresee, uptrain

    report = (foresee if options.dry_run else uptrain)(recipe, progress=show_progress)
    print_report(report, as_json=options.json)
    return 0


if __name__ == "__main__":
    prepare_process()
    end_with_launcher()
    leave(status_of(main))

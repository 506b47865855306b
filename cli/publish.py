"""`kvfold publish`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ..common.output import print_report, print_warnings
from . import options

_PATH = click.Path(path_type=Path)


@click.command(cls=options.Command)
@click.argument("out", type=options.result)
@click.argument("repo_id")
@click.option("--report", type=_PATH, metavar="DIR", help="A report on OUT, whose figures and page go along.")
@click.option("--recipe", type=_PATH, metavar="FILE", help="The recipe of the pipeline that made OUT.")
@click.option("--base-model", metavar="ID", help="What OUT was made from, on the Hub.  [by kvfold.json]")
@click.option("--license", metavar="ID", help="Such as apache-2.0.  [that of the source's README.md]")
@click.option("--accept-license", is_flag=True, help="You have read the licence and keep to what it asks.")
@click.option("--private", is_flag=True, help="Of a repository that is made.")
@click.option("--revision", metavar="BRANCH", help="Made if it is not there.  [main]")
@click.option("--tag", help="To set on the commit.")
@click.option("--overwrite", is_flag=True, help="Replace other files there; its history keeps them.")
@click.option("--dry-run", is_flag=True, help="Write what would be uploaded to a folder; no network.")
@click.option("--folder", type=_PATH, metavar="DIR", help="Of a dry run.  [OUT.publish]")
@options.as_json
def publish(out: str, repo_id: str, as_json: bool, **knobs: Any) -> None:
    """Bring OUT, which kvfold wrote, to the repository REPO_ID of the Hub, with a model card.

    The token is that of hf auth login, or HF_TOKEN. An upload that was stopped is gone on with by the same command.
    """
    from ..common.progress import show_progress
    from ..publish.publish import publish as hand_on

    report = hand_on(out, repo_id, progress=show_progress, **knobs)
    print_warnings(report.warnings)
    print_report(report, as_json=as_json, hide=["warnings"])

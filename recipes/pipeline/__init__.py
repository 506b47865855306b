"""Recipes of whole pipelines: a checkpoint is calibrated, converted, uptrained, judged, reported on and published."""

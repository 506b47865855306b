"""The engines lane: exported checkpoints in real engines on a CPU, against stock transformers.

    python -m kvfold.recipes.engines [--only CASE ...] [--cache DIR]

Each engine has a virtual environment of its own in kvfold's cache folder, made at the first run (vLLM: 2.5 GB and some
minutes). A case exports a model, holds it against `kvfold check`, lets the engine read it and compares what it says
with what stock transformers says of the same tokens. What was exported or measured before is used again as long as the
code and the checkpoint are the same, so a lane that was stopped goes on where it was.

The files `run_*.py` are run by the engines' own interpreters, which know no kvfold.
"""

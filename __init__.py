"""kvfold folds the key/value cache of pretrained language models.

Checkpoints come in by `kvfold.convert`, are judged by `kvfold.eval`, and are healed by `kvfold.uptrain`;
`kvfold.recipes` combine them and `kvfold.cli` is the door to all of it.
"""

__version__ = "0.1.0"

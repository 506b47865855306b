"""llama.cpp's own converter, for one more tokenizer: `python run_to_gguf.py LLAMA_CPP CHECKPOINT OUT.gguf OUTTYPE`.

The converter knows tokenizers by the hash of a text that they encode, and refuses others. The split of words into
pieces is what it wants to know, and tokenizer.json says it: where that is GPT-2's own, as in kvfold's embedded model,
the name for it is `gpt-2`. Nothing else is changed.
"""

import json
import runpy
import sys
from pathlib import Path

GPT2_SPLIT = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def main() -> None:
    llama_cpp, checkpoint, out, outtype = sys.argv[1:]
    sys.path[:0] = [llama_cpp, str(Path(llama_cpp) / "gguf-py")]
    from conversion.base import TextModel

    known = TextModel.get_vocab_base_pre

    def split_name(self, tokenizer) -> str:
        saved = json.loads((Path(checkpoint) / "tokenizer.json").read_text(encoding="utf-8"))
        return "gpt-2" if saved["pre_tokenizer"] == GPT2_SPLIT else known(self, tokenizer)

    TextModel.get_vocab_base_pre = split_name
    script = str(Path(llama_cpp) / "convert_hf_to_gguf.py")
    sys.argv = [script, checkpoint, "--outtype", outtype, "--outfile", out]
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()

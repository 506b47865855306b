"""The embedded demo model: a tiny multi-head Llama, its tokenizer, and the script that trained both."""

"""Build a tokenizer from any format: `load.load_tokenizer`; chat templates in `chat_template` (no torch)."""

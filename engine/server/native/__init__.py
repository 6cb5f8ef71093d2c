"""The engine's own routes, with the names and shapes that users of SGLang know."""

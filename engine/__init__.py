"""LLM inference engine: what users touch, and what every process shares. Importing it loads nothing heavy."""

__version__ = "0.1.0"

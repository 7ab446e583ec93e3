"""`headrace bench`: a load generator for any OpenAI-compatible server, light enough to run beside it.

settings → prompts → requests → load ──► client ──► samples → results → table, JSON
           words of a seed      when     one HTTP exchange            percentiles
"""

from .command import main

__all__ = ["main"]

"""Tokens per second of the decoding core, without Redis: `python bench/detok_core.py tokenizer.json`.

Each row decodes one output of `--tokens` random ids through `DecodeState`, in chunks as a worker sends them. The last
column is the cost per token at position 8,000 over that at position 100, of an output of their own.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from headrace.detok.state import DecodeState
from headrace.detok.vocab import Vocabulary
from headrace.shared.chunks import TokenChunk, TokenLogprob
from headrace.shared.messages import DecodeParams
from tokenizers import Tokenizer

CASES = {
    "plain": DecodeParams("", 0),
    "four stops": DecodeParams("", 0, stop=("\n\nHuman:", "<|im_end|>", "Observation", "###")),
    "logprobs, top 5": DecodeParams("", 0, return_logprob=True),
}


def chunks_of(ids: Sequence[int], size: int, logprobs: bool) -> list[TokenChunk]:
    one = TokenLogprob(-0.5, tuple((i, -1.0) for i in range(100, 105)))
    return [
        TokenChunk("r", at, tuple(ids[at : at + size]), (one,) * size if logprobs else None)
        for at in range(0, len(ids), size)
    ]


def seconds(vocab: Vocabulary, params: DecodeParams, chunks: Sequence[TokenChunk]) -> list[float]:
    """When each chunk was done, in seconds of CPU since the first began."""
    state = DecodeState("r", params, vocab)
    start = time.process_time()
    done = []
    for chunk in chunks:
        if state.push(chunk) is not None:
            state.encode()
        done.append(time.process_time() - start)
    return done


def growth(vocab: Vocabulary, params: DecodeParams, chunks: Sequence[TokenChunk], size: int, repeats: int) -> float:
    """Median cost of the 200 tokens around position 8,000, over that around position 100."""
    ratios = []
    for _ in range(repeats):
        steps = [b - a for a, b in itertools.pairwise(seconds(vocab, params, chunks))]
        early, late = (steps[at // size : (at + 200) // size] for at in (100, 7_900))
        ratios.append(statistics.median(late) / statistics.median(early))
    return statistics.median(ratios)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    start = time.process_time()
    vocab = Vocabulary.from_blob(args.tokenizer.read_bytes())
    loaded = time.process_time() - start
    text = "The quick brown fox — naïve, 世界 — jumps over 13 lazy dogs; "
    ids = Tokenizer.from_file(str(args.tokenizer)).encode(text * 50).ids * (args.tokens // 500 + 1)
    random.Random(1).shuffle(ids)
    ids = ids[: args.tokens]
    rows = []
    for (name, params), size in itertools.product(CASES.items(), (1, 8)):
        chunks = chunks_of(ids, size, params.return_logprob)
        best = min(seconds(vocab, params, chunks)[-1] for _ in range(args.repeats))
        ratio = growth(vocab, params, chunks, size, args.repeats)
        rows.append({"case": name, "tokens_per_chunk": size, "tokens_per_s": round(len(ids) / best), "growth": ratio})
    if args.json:
        print(json.dumps({"kind": vocab.kind, "vocab": vocab.size, "load_s": loaded, "rows": rows}))
        return
    print(f"{vocab.kind}, {vocab.size} ids, loaded in {loaded:.2f} s")
    for row in rows:
        speed = f"{row['tokens_per_s']:>9,} tokens/s  {row['growth']:.2f}"
        print(f"{row['case']:>16}  {row['tokens_per_chunk']} a chunk  {speed}")


if __name__ == "__main__":
    main()

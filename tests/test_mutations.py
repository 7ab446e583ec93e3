"""Checks that are taken out are missed: each mutation applies once, and a few, other ones each time, are run."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from kit.mutations import ROOT, Tree, share
from kit.mutations_list import MUTATIONS, Mutation

SAMPLE = 3


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_mutation_applies_once_and_its_tests_are_there(mutation: Mutation) -> None:
    assert (ROOT / mutation.file).read_text().count(mutation.old) == 1
    assert mutation.old != mutation.new
    for test in mutation.tests:
        file, _, name = test.partition("::")
        assert f"def {name}" in (ROOT / file).read_text()


def test_names_are_unique() -> None:
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS)


def test_shares_are_all_of_them_once() -> None:
    shares = [share(MUTATIONS, f"{k}/5") for k in range(1, 6)]
    assert sorted(m.name for part in shares for m in part) == sorted(m.name for m in MUTATIONS)
    assert share(MUTATIONS, "") == MUTATIONS
    with pytest.raises(ValueError, match="got '6/5'"):
        share(MUTATIONS, "6/5")


def test_a_few_of_them_are_noticed(tmp_path: Path, seed: int) -> None:
    tree = Tree(tmp_path / "copy")
    for mutation in random.Random(seed).sample(MUTATIONS, SAMPLE):
        assert tree.survives(mutation) is None, mutation.name


def test_the_copys_own_modules_are_tested(tmp_path: Path) -> None:
    tree = Tree(tmp_path / "copy")
    (tree.folder / "shared" / "ids.py").write_text("raise RuntimeError('of the copy')")
    done = tree.test(["tests/test_fences.py"])
    assert "of the copy" in done.stdout + done.stderr

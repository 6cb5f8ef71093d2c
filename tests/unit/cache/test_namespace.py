"""Namespaces differ whenever any field does, however the fields are spelled."""

from __future__ import annotations

import itertools

from scheduler_proc.cache.namespace import namespace


def test_equal_fields_give_equal_names() -> None:
    assert namespace("v1", "tone", 3, "tenant") == namespace("v1", "tone", 3, "tenant")
    assert len(namespace("v1", None, 0, None)) == 16


def test_different_fields_never_meet() -> None:
    texts = ["", "a", "ab", "abc", "b", "bc", "c", "0", "\0", "\1", "a\0b"]
    optional = [None, *texts]
    fields = list(itertools.product(texts, optional, [0, 1, 10], optional))
    assert len({namespace(*each) for each in fields}) == len(fields)


def test_any_text_of_a_client_is_taken() -> None:
    assert namespace("v", None, 0, "\ud800") != namespace("v", None, 0, "?")

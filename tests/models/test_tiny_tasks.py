"""The generated questions and stories of spice-tiny: right answers, held-out questions, whole sentences."""

from __future__ import annotations

import random
import re

import pytest

from models.tiny import stories, tasks


@pytest.mark.parametrize("task", tasks.SHARES, ids=lambda t: t.__name__)
def test_tasks_depend_on_the_seed_alone(task: tasks.Task) -> None:
    draw = [tasks.draw(random.Random(5), task=task) for _ in range(2)]
    assert draw[0] == draw[1]
    assert all(text == text.strip() and text for text in draw[0])


@pytest.mark.parametrize("task", tasks.COMBINATORIAL, ids=lambda t: t.__name__)
def test_held_out_questions_are_never_trained_on(task: tasks.Task) -> None:
    r = random.Random(0)
    trained = {task(r)[2] for _ in range(3000)}
    assert {tasks.is_held_out(key) for key in trained} == {True, False}
    for flag in (True, False):
        question, answer = tasks.draw(r, held_out=flag, task=task)
        assert question and answer
    asked = [tasks.draw(r, held_out=True, task=task)[0] for _ in range(50)]
    known = [tasks.draw(r, held_out=False, task=task)[0] for _ in range(500)]
    assert not set(asked) & set(known)


def test_sums_and_differences_are_right() -> None:
    r = random.Random(1)
    for task in (tasks.add, tasks.subtract):
        for _ in range(100):
            _, answer = tasks.draw(r, task=task)
            left, right = answer.split(" = ")
            a, sign, b = left.split()
            assert int(right) == (int(a) + int(b) if sign == "+" else int(a) - int(b))


def test_lists_are_sorted_reversed_and_counted() -> None:
    r = random.Random(2)
    for _ in range(50):
        question, answer = tasks.draw(r, task=tasks.sort_numbers)
        numbers = list(map(int, re.findall(r"\d+", question)))
        assert list(map(int, answer.split(", "))) == sorted(numbers)
        question, answer = tasks.draw(r, task=tasks.reverse_list)
        assert question.split(": ")[1].split(", ") == answer.split(", ")[::-1]
        question, answer = tasks.draw(r, task=tasks.count_list)
        assert f" {question.count(',') + 1} " in answer


def test_small_talk_lists_all_its_answers() -> None:
    r = random.Random(3)
    for _ in range(50):
        question, answer = tasks.draw(r, task=tasks.talk)
        assert answer in tasks.accepted(question)
    assert tasks.accepted("What is 1 + 1?") == ()


def test_stories_are_about_what_was_asked() -> None:
    r = random.Random(4)
    for _ in range(200):
        text = stories.story(r, "owl", "lantern")
        assert "owl" in text and "lantern" in text and "{" not in text
        assert text[0].isupper() and text[-1] == "."
        assert not re.search(r"\ba [aeio]\w", text)


@pytest.mark.parametrize(("noun", "said"), [("owl", "an owl"), ("key", "a key"), ("apple", "an apple")])
def test_articles(noun: str, said: str) -> None:
    assert tasks.article(noun) == said

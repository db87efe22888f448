"""The choice of heads by their answers, by hand."""

from __future__ import annotations

import numpy as np

from guidance.probes.steering import Answers, chosen_heads, held_out, ranks, worst_ranks


def answers(right: str, nats: float = -1.0) -> Answers:
    return Answers(np.array([letter == "1" for letter in right]), np.full(len(right), nats))


def test_heads_are_ranked_by_right_answers_then_by_log_probability_then_in_their_order() -> None:
    heads = [answers("1000"), answers("1100", -3), answers("0011", -2), answers("0110", -2)]
    assert ranks(heads).tolist() == [4, 3, 1, 2]


def test_chosen_are_the_heads_that_all_tasks_have_among_their_first() -> None:
    one = [answers("111"), answers("110"), answers("100"), answers("000")]
    two = [answers("000"), answers("110"), answers("111"), answers("100")]
    heads = list(zip(one, two, strict=True))
    assert worst_ranks(heads).tolist() == [4, 2, 3, 4]
    assert [chosen_heads(heads, top) for top in (1, 2, 3, 4)] == [[], [1], [1, 2], [0, 1, 2, 3]]


def test_each_prompt_is_answered_with_heads_that_the_other_half_chose() -> None:
    """Head 0 is right on the even prompts, so it is chosen for the odd ones."""
    heads = [[answers("10101")], [answers("01010")]]

    def steered(chosen: list[int]) -> list[Answers]:
        (head,) = chosen
        return [Answers(heads[head][0].right_N, np.full(5, -1.0 - head))]

    (found,) = held_out(heads, 1, steered)
    assert not found.right_N.any()
    assert found.nats_N.tolist() == [-2, -1, -2, -1, -2]

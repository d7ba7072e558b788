"""Where `strict_xml`, `soft_xml` and `xml_count` agree with the pattern-matching rewards of the widespread GRPO tutorial for GSM8K,
and where they differ on purpose. docs/how-to/rewards.md says it in short."""

import re

import pytest

from groupwise.rewards.functions import soft_xml, strict_xml, xml_count

TUTORIAL_STRICT = re.compile(r"^<reasoning>\n.*?\n</reasoning>\n<answer>\n.*?\n</answer>\n$")
TUTORIAL_SOFT = re.compile(r"<reasoning>.*?</reasoning>\s*<answer>.*?</answer>")
FORM = "<reasoning>\n{}\n</reasoning>\n<answer>\n{}\n</answer>\n"


def tutorial_count(text):
    """An eighth for each tag with the line breaks around it; a thousandth off for what follows, counted at both closing marks."""
    points = 0.125 * (text.count("<reasoning>\n") == 1) + 0.125 * (text.count("\n</reasoning>\n") == 1)
    if text.count("\n<answer>\n") == 1:
        points += 0.125 - 0.001 * len(text.split("\n</answer>\n")[-1])
    if text.count("\n</answer>") == 1:
        points += 0.125 - 0.001 * (len(text.split("\n</answer>")[-1]) - 1)
    return points


CASES = {
    # name: (completion, ours: strict, soft; tutorial's: strict, soft)
    "the form": (FORM.format("2 + 2", "4"), (1, 1), (1, 0)),  # its soft pattern has no line breaks in blocks
    "all on one line": ("<reasoning>2 + 2</reasoning><answer>4</answer>", (1, 1), (0, 1)),
    "reasoning over two lines": (FORM.format("2 + 2\nis 4", "4"), (1, 1), (0, 0)),
    "no line break at the end": (FORM.format("2 + 2", "4").rstrip("\n"), (1, 1), (0, 0)),
    "a blank line between the blocks": (FORM.format("2 + 2", "4").replace("\n<answer>", "\n\n<answer>"), (1, 1), (0, 0)),
    "words before": ("Sure! <reasoning>2</reasoning> <answer>4</answer>", (0, 1), (0, 0)),
    "words after": ("<reasoning>2</reasoning> <answer>4</answer> Bye.", (0, 1), (0, 1)),
    "words between": ("<reasoning>2</reasoning> so <answer>4</answer>", (0, 1), (0, 0)),
    "nothing in the blocks": ("<reasoning></reasoning><answer></answer>", (0, 0), (0, 1)),
    "the prompt's dots copied": (FORM.format("...", "..."), (0, 0), (1, 0)),
    "a block repeated": ("<reasoning>2</reasoning><answer>4</answer><answer>5</answer>", (0, 0), (0, 1)),
    "reasoning opened twice": (FORM.format("<reasoning>2", "4"), (0, 0), (1, 0)),
    "the answer first": ("<answer>4</answer><reasoning>2</reasoning>", (0, 0), (0, 0)),
    "not closed": ("<reasoning>\n2\n</reasoning>\n<answer>\n4", (0, 0), (0, 0)),
    "no tags": ("4", (0, 0), (0, 0)),
}


@pytest.mark.parametrize(("text", "ours", "theirs"), CASES.values(), ids=CASES)
def test_whole_form(text, ours, theirs):
    assert (strict_xml([text], score=1.0)[0], soft_xml([text], score=1.0)[0]) == ours
    assert (bool(TUTORIAL_STRICT.match(text)), bool(TUTORIAL_SOFT.match(text))) == theirs


COUNTS = {
    # name: (completion, ours, the tutorial's)
    "the form": (FORM.format("2 + 2", "4"), 0.5, 0.5),
    "reasoning over two lines": (FORM.format("2 + 2\nis 4", "4"), 0.5, 0.5),
    "no line break at the end": (FORM.format("2 + 2", "4").rstrip("\n"), 0.5, 0.501 - 0.051),  # takes off the whole text
    "ten letters after": (FORM.format("2 + 2", "4") + "a" * 10, 0.49, 0.48),  # it takes them off twice
    "a thousand letters after": (FORM.format("2 + 2", "4") + "a" * 1000, 0.0, 0.5 - 2.0),  # less than for no form at all
    "all on one line": ("<reasoning>2</reasoning><answer>4</answer>", 0.0, 0.0),
    "reasoning alone": ("<reasoning>\n2\n</reasoning>\n", 0.25, 0.25),
    "answer alone": ("<answer>\n4\n</answer>\n", 0.25, 0.125),  # its opening mark wants a line before it
    "an answer twice": (FORM.format("2", "4") + "<answer>\n5\n</answer>\n", 0.25, 0.25),
    "blanks around tags": (FORM.format("2", "4").replace("<answer>", "  <answer> "), 0.5, 0.375),
    "no tags": ("4", 0.0, 0.0),
    "empty": ("", 0.0, 0.0),
}


@pytest.mark.parametrize(("text", "ours", "theirs"), COUNTS.values(), ids=COUNTS)
def test_partial_credit(text, ours, theirs):
    assert xml_count([text]) == [pytest.approx(ours, abs=1e-12)]
    assert tutorial_count(text) == pytest.approx(theirs, abs=1e-12)

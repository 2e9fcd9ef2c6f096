"""Text that users read has none of the habits that docs/style.md advises against."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "papers/README.md", "Makefile")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "src").rglob("*.yaml")),
    *sorted((ROOT / "papers").rglob("*.yaml")),
]
MODULES = [path for folder in ("src", "papers/src") for path in sorted((ROOT / folder).rglob("*.py"))]
NEXT = "\n"  # ends a text, so that no pattern matches across two of them
ENDS = r"(?=$|[.,:;)]| (and|or|that|which)\b)"  # the end of a phrase

VERBS = (
    "author|categor|character|custom|diagonal|discret|emphas|factor|final|general|initial|linear|local|maxim|memor|minim"
    "|normal|optim|organ|orthogonal|parallel|penal|priorit|quant|random|real|recogn|regular|serial|special|stabil|standard"
    "|summar|symmetr|synchron|token|util|vector|visual"
)


@dataclass(frozen=True)
class Habit:
    """A pattern in lower case, an example of it, and better words."""

    pattern: str
    example: str
    better: str


HABITS = [
    Habit(r"(?<!\bno )\bsuch\b(?! (as|that)\b)", "such a start", 'this start; a start like this; "such as" is fine'),
    Habit(r"\b(here|there|where)(by|in|of|to|upon|with)\b", "the length thereof", "its length"),
    Habit(r"\bso many\b", "only the first so many", "the first N points"),
    Habit(r"\ball that\b", "all that is missing", "everything that is missing"),
    Habit(rf", too{ENDS}", "SM does, too", "SM also does"),
    Habit(r"\bwhere nothing is said\b", "TRADES where nothing is said", "TRADES unless noted"),
    Habit(r"\ba word on\b", "with a word on vacuity", "and whether they are vacuous"),
    Habit(rf"\bof (its|their|your|our) own{ENDS}", "a file of your own", "your own file; a separate file"),
    Habit(rf"\bas (it is|they are|it was|they were){ENDS}", "left as it was", "unchanged; restores its state"),
    Habit(r"\bby far\b", "by far the slowest", "the slowest, with the ratio"),
    Habit(r"\b(is|are|was|were) (that|those) of\b", "the value is that of the batch", "has the value of the batch"),
    Habit(r"\bbeside\b", "TrH beside AWP", "compared with, next to, in addition to"),
    Habit(r"\bin place of\b", "MNIST in place of digits", "instead of"),
    Habit(r"\bwho(m|so)?ever\b", "whoever doubts it", "if you doubt it"),
    Habit(r"\b(if need be|for want of|lest|whence|thence|hitherto|whilst|amongst)\b", "if need be", "if necessary"),
    Habit(r"\bin the mean\b", "0.6 in the mean", "0.6 on average"),
    Habit(r"\bdiffers? in (\w+ ){1,4}only\b", "differ in their loss only", "differ only in their loss"),
    Habit(r"\bset in relation\b", "set in relation to a step", "compared with a step"),
    Habit(r"\bbelongs? into\b", "belongs into the model", "belongs in the model"),
    Habit(r"\btaken further\b", "chapter 6, taken further", "chapter 6, extended"),
    Habit(r"\d \w+s an? (class|image|point|row|seed|step)\b", "60 prototypes a class", "60 prototypes per class"),
    Habit(rf"\b(will|would) do{ENDS}", "any model will do", "works with any model"),
    Habit(r"\bsays? what (it|they) saw\b", "says what it saw", "reports its findings"),
    Habit(r"\b(goes|go) on (where|with the same)\b", "goes on where it was", "resumes"),
    Habit(r"\bsame bits\b", "ends with the same bits", "produces bit-identical results"),
    Habit(r"\balarms?\b", "an alarm", "a warning"),
    Habit(r"\b(book|row of a book) of recipes\b", "a book of recipes", "a recipe grid"),
    Habit(r"\b(points?|ones?|none|images?) (falls?|fell)\b", "until a point falls", "until the attack succeeds"),
    Habit(
        r"(^|[.:;] )(attacked|compared|counted|explained|given|kept|left out|listed|measured|shown|stored|taken|told)"
        r" (are|is|was|were)\b",
        "explained is the predicted class.",
        "the method explains the predicted class",
    ),
    Habit(rf"\b({VERBS})is(e|ed|er|ers|es|ing|ation|ations)\b", "normalise", "normalize, as in PyTorch"),
    Habit(r"\b(analys(e|ed|ing)|catalys\w+)\b", "analysed", "analyzed"),
    Habit(r"\b(un)?(behaviou|colou|favou|flavou|harbou|honou|labou|neighbou|rigou)r", "neighbouring", "neighboring"),
    Habit(r"\b(centre|fibre|metre|theatre)(s|d)?\b|\bcentring\b", "centred", "centered"),
    Habit(r"\b\w*(cancel|label|level|model|signal|total|travel)l(ed|ing)\b", "labelled", "labeled"),
    Habit(r"\b(artefact|defence|grey|judgement|learnt|licence|per cent|programme)s?\b", "learnt", "learned"),
]


def prose(path: Path) -> str:
    """A page without code: inline code is not English, and the style page shows the habits themselves."""
    text = path.read_text()
    if path.name == "style.md":
        text = re.sub(r"^\|.*\|(.*\|)$", r"\1", text, flags=re.MULTILINE)
    return re.sub(r"`[^`\n]*`", "`", text)


def strings(tree: ast.AST) -> Iterator[str]:
    """Docstrings and other strings of several words."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value.split()) > 1:
            yield node.value


@cache
def texts() -> dict[Path, str]:
    """What users read, by file: in lower case, paragraphs in one line."""
    pages = {path: re.split(r"\n\s*\n|\n\s*[-|]|\|", prose(path)) for path in PAGES}
    modules = {path: strings(ast.parse(path.read_text())) for path in MODULES}
    return {
        path: NEXT.join(" ".join(re.sub(r"^\s*#", "", part, flags=re.MULTILINE).split()) for part in parts).lower()
        for path, parts in {**pages, **modules}.items()
    }


@pytest.mark.parametrize("habit", HABITS, ids=lambda habit: habit.example)
def test_no_text_has_the_habit(habit):
    pattern = re.compile(habit.pattern, re.MULTILINE)
    places = [
        f"{path.relative_to(ROOT)}: ...{text[max(0, match.start() - 40) : match.end() + 30]!r}"
        for path, text in texts().items()
        for match in pattern.finditer(text)
    ]
    assert not places, f"write instead: {habit.better}\n" + "\n".join(places)


@pytest.mark.parametrize("habit", HABITS, ids=lambda habit: habit.example)
def test_patterns_match_their_examples_and_not_the_better_words(habit):
    assert re.search(habit.pattern, habit.example)
    assert not re.search(habit.pattern, habit.better)


def test_strings_are_checked():
    code = '"""One\nword."""\nx = "key", f"such a {1}", 2'
    assert list(strings(ast.parse(code))) == ["One\nword.", "such a "]
    assert "style.md" in {path.name for path in texts()}
    assert "one idea per sentence" in texts()[ROOT / "docs/style.md"]

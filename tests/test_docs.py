"""Every code block of README.md and docs: Python is run on two ranks, data is parsed, commands are run by some test.

``docs_setup.py`` tells how a page says what its blocks take for granted. A block of a language that is not treated here
is an error, not left out.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib.util
import io
import json
import os
import re
import sys
import tempfile
import textwrap
import traceback
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import docs_setup
import pytest
import torch
import yaml
from ranks import Ranks

import adaptive_ddp

ROOT = Path(__file__).parent.parent
PAGES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "README.md", *ROOT.glob("docs/**/*.md")))
PARSED = {"yaml": yaml.safe_load, "json": json.loads}
LANGUAGES = {"python", "bash", "text", *PARSED}
TEST_COMMAND = "python -m pytest"
_FENCE = re.compile(r"^(?P<indent>\s*)(?P<marks>`{3,}|~{3,})(?P<info>.*)$")
_COMMENT = re.compile(r"^\s*<!-- (setup|raises|output)(?:: (\S+))? -->\s*$")
# What a bash block may install: the extras of this package.
_EXTRA = re.compile(r'pip install "?adaptive-ddp\[(\w+)\]"?')


@dataclass(frozen=True)
class Block:
    """A fenced block, the line of its first line, and the comments right before it."""

    page: str
    line: int
    language: str
    source: str
    comments: dict[str, str | None] = field(default_factory=dict)

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


def read_blocks(page: str, text: str) -> list[Block]:
    blocks: list[Block] = []
    comments: dict[str, str | None] = {}
    lines = enumerate(text.splitlines(), start=1)
    for number, line in lines:
        if comment := _COMMENT.match(line):
            comments[comment[1]] = comment[2]
        elif fence := _FENCE.match(line):
            inside: list[str] = []
            for _, inner in lines:
                if inner.strip() == fence["marks"]:
                    break
                inside.append(inner)
            else:
                raise ValueError(f"{page}:{number}: this block does not end")
            language = fence["info"].split(" ")[0]
            if language not in LANGUAGES:
                raise ValueError(f"{page}:{number}: a block of {language!r}, of which no test knows what to do")
            blocks.append(Block(page, number + 1, language, textwrap.dedent("\n".join(inside)), comments))
            comments = {}
        elif line.strip():
            if comments:
                raise ValueError(f"{page}:{number}: a comment on a code block, but no block follows")
            comments = {}
    return blocks


def blocks_of(page: str) -> list[Block]:
    return read_blocks(page, (ROOT / page).read_text(encoding="utf-8"))


def pages_with(*languages: str) -> list[str]:
    """By the text alone, so that what is wrong with a page fails a test instead of the collection."""
    fence = re.compile(rf"^\s*(```|~~~)({'|'.join(languages)})\b", re.MULTILINE)
    return [page for page in PAGES if fence.search((ROOT / page).read_text(encoding="utf-8"))]


def read_like_a_reader(text: str) -> str:
    """Whether a line is broken here or there makes no difference."""
    return " ".join(text.split())


def run_blocks(blocks: list[Block]) -> None:
    """On one rank: run a page's Python in a fresh namespace and folder, and compare the output that it shows."""
    namespace: dict[str, Any] = {"__name__": "__main__", "__builtins__": builtins}
    printed = io.StringIO()
    environment, folder = dict(os.environ), os.getcwd()
    torch.manual_seed(0)
    try:
        with (
            tempfile.TemporaryDirectory() as temporary,
            contextlib.redirect_stdout(printed),
            contextlib.redirect_stderr(printed),
            warnings.catch_warnings(),
        ):
            os.chdir(temporary)
            # Otherwise what an earlier page warned of would not be said again.
            warnings.simplefilter("always")
            warnings.showwarning = lambda message, *args, **kwargs: print(message, file=printed)
            try:
                for block in blocks:
                    _run(block, namespace, printed)
            finally:
                os.chdir(folder)
    finally:
        os.environ.clear()
        os.environ.update(environment)


def _run(block: Block, namespace: dict[str, Any], printed: io.StringIO) -> None:
    comments = block.comments
    if block.language == "text" and "output" in comments:
        name = comments["output"]
        shown = getattr(docs_setup, name)(namespace) if name else printed.getvalue()
        # Only rank zero prints and warns.
        if name or os.environ["RANK"] == "0":
            assert read_like_a_reader(block.source) in read_like_a_reader(shown), f"{block.place} is not in: {shown}"
    if block.language != "python":
        return
    if name := comments.get("setup"):
        getattr(docs_setup, name)(namespace)
    # So that a traceback has the line of the page.
    code = compile("\n" * (block.line - 1) + block.source, str(ROOT / block.page), "exec")
    expected = comments.get("raises")
    try:
        exec(code, namespace)
    except Exception as error:
        if type(error).__name__ != expected:
            raise
        printed.write("".join(traceback.format_exception_only(error)))
    else:
        assert expected is None, f"{block.place} did not raise {expected}"


@pytest.mark.parametrize("page", pages_with("python", "text"))
def test_the_python_of_a_page_runs_on_two_ranks_and_shows_what_it_says(ranks: Ranks, page: str) -> None:
    ranks(2).run(run_blocks, [block for block in blocks_of(page) if block.language in ("python", "text")])


@pytest.mark.parametrize("page", PAGES)
def test_every_block_is_of_a_known_language_and_data_can_be_parsed(page: str) -> None:
    for block in blocks_of(page):
        if block.language in PARSED:
            assert PARSED[block.language](block.source) is not None, block.place


@pytest.mark.parametrize("page", pages_with("bash"))
def test_every_command_is_one_that_something_runs(page: str) -> None:
    for block in blocks_of(page):
        if block.language != "bash":
            continue
        for command in filter(None, map(str.strip, block.source.replace("\\\n", " ").splitlines())):
            if extra := _EXTRA.fullmatch(command):
                assert f"\n{extra[1]} = [" in (ROOT / "pyproject.toml").read_text(), f"{block.place}: no such extra"
                continue
            runner = docs_setup.COMMANDS.get(" ".join(command.split()))
            assert runner, f"{block.place}: nothing runs {command!r}; if something does, name it in docs_setup.COMMANDS"
            path, _, test = runner.partition("::")
            # .ci/run takes the test command from the README itself.
            wanted = f"def {test}(" if test else TEST_COMMAND if command.endswith(TEST_COMMAND) else command
            assert wanted in (ROOT / path).read_text(), f"{block.place}: {runner} no longer runs {command!r}"


def page(*blocks: str) -> str:
    return "\n\n".join(blocks)


def python(*lines: str, comment: str = "") -> str:
    return "\n".join(filter(None, (comment, "```python", *lines, "```")))


def text(*lines: str, comment: str = "<!-- output -->") -> str:
    return "\n".join((comment, "```text", *lines, "```"))


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (page("```ruby\nputs 1\n```"), "page.md:1: a block of 'ruby'"),
        (page("```\nuntold\n```"), "a block of ''"),
        (page("```python\nx = 1"), "does not end"),
        (page("<!-- setup: model_and_data -->", "Text between them."), "no block follows"),
    ],
)
def test_a_block_that_would_be_left_out_is_an_error(source: str, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        read_blocks("page.md", source)


@pytest.mark.parametrize(
    ("source", "error", "said"),
    [
        (page(python("x = 1"), python("", "x.y")), AttributeError, "'int' object has no attribute 'y'"),
        (page(python("print(1)"), text("2")), AssertionError, "page.md:7 is not in: 1"),
        (page(python("x = 1", comment="<!-- raises: KeyError -->")), AssertionError, "did not raise KeyError"),
        (page(python("x", comment="<!-- setup: nobody -->")), AttributeError, "nobody"),
    ],
)
def test_a_page_that_is_wrong_fails(
    monkeypatch: pytest.MonkeyPatch, source: str, error: type[Exception], said: str
) -> None:
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(error, match=re.escape(said)):
        run_blocks(read_blocks("page.md", source))


def test_a_page_that_is_right_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    raising = python("{}[word]", comment="<!-- raises: KeyError -->")
    source = page(
        python("word = 'spoken'", "print(word, end='')"),
        text("spoken"),
        raising,
        text("KeyError: 'spoken'"),
        python("import warnings", "warnings.warn('of this')"),
        text("of this"),
    )
    run_blocks(read_blocks("page.md", source))


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Where dataclasses look.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def test_the_timelines_are_what_was_measured() -> None:
    timelines = script("timelines")
    drawn = timelines.pictures(json.loads(timelines.MEASURED.read_text())["scenes"])
    assert drawn == {path.name: path.read_text() for path in (ROOT / "docs" / "images").glob("timeline_*.svg")}


def test_the_reference_has_every_public_name() -> None:
    reference = "\n".join(path.read_text() for path in (ROOT / "docs" / "api").glob("*.md"))
    assert adaptive_ddp.__all__
    for name in adaptive_ddp.__all__:
        assert re.search(rf"^::: adaptive_ddp\.{name}$", reference, re.MULTILINE), name


def test_sphinx_roles_become_links_in_the_reference() -> None:
    text = script("roles").without_roles("See :class:`~a.b.Name`, and ``code`` stays.")
    assert text == 'See <autoref optional identifier="a.b.Name"><code>Name</code></autoref>, and ``code`` stays.'

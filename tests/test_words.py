"""The words of README and docs: pages are short, and in the voice of the field's documentation."""

import re

import pytest

from tests.harness import FILES, ROOT

PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
}
MOST_WORDS = {"docs/rl-algorithms/": 1_200, "README.md": 570, "docs/": 2_100}
UPSTREAM = "[CleanRL v1 (upstream)](https://github.com/vwxyzjn/cleanrl)"
RULED_OUT = r"""
needs nothing but itself|goes? on where it|with a memory|that speak tensors|stops paying
store of past steps|nobody's business|who knows one|make a run again|do not fit together
comes? to the same|what CUDA has recorded|and no others|give no others|policy that acted may
slow day|when that machine|it was tried|was over, |public v1|whoever|whatever you copy
""".strip().replace("\n", "|")


def visible_words(text):
    """Words that a reader sees: no code blocks, generated tables, addresses and marks."""
    text = re.sub(r"^ *```.*?^ *```$", "", text, flags=re.M | re.S)
    text = re.sub(r"<!-- results: .*?<!-- end of results -->", "", text, flags=re.S)
    text = re.sub(r"<!-- ablations -->.*?<!-- end of ablations -->", "", text, flags=re.S)
    text = re.sub(r"\$\$.*?\$\$", "", text, flags=re.S)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    return re.findall(r"[^\W_][\w.,'%±+/-]*", re.sub(r"</?[a-z][^>\n]*>", "", text))


def headings(text):
    text = re.sub(r"^ *```.*?^ *```$", "", text, flags=re.M | re.S)
    return re.findall(r"^#+ (.*)$", text, re.M)


@pytest.mark.parametrize("name", PAGES)
def test_words_of_a_page(name):
    text = PAGES[name]
    most = next(most for start, most in MOST_WORDS.items() if name.startswith(start))
    assert len(visible_words(text)) <= most, "too long: move how numbers came about to NOTES.md"
    prose = re.sub(r"\s+", " ", re.sub(r"`test_\w+`", "", text))
    found = re.findall(RULED_OUT, prose, re.I)
    assert not found, f"not in the field's words: {found}"
    twice = {heading for heading in headings(text) if headings(text).count(heading) > 1}
    assert not twice, f"headings that get anchors such as results_1: {twice}"


@pytest.mark.parametrize("name", PAGES)
def test_a_sentence_after_a_code_block_stands_on_its_own(name):
    """It is not the end of one that began before the block."""
    blocks = re.split(r"^ *```\w*(?: .*)?$", PAGES[name], flags=re.M)
    begins = [re.match(r"\s*([a-z]+) ", text) for text in blocks[2::2]]  # text, code, text, ...
    assert not [found[1] for found in begins if found and found[1] != "uv"]


def test_the_limit_counts_what_is_read():
    text = "# A page\n\n[Two words](https://a.b/c) and `code`.\n\n```bash\nnot these\n```\n"
    text += "<!-- results: x -->\n| 1 |\n<!-- end of results -->\n$$a + b$$\n"
    assert visible_words(text) == ["A", "page", "Two", "words", "and", "code"]


@pytest.mark.parametrize("name", [name for name in PAGES if name.startswith("docs/rl-algorithms/")])
def test_upstream_is_explained_once(name):
    text = PAGES[name]
    if re.search(r"(?<![-\w])v1\b", text):
        links = re.findall(r"\]\(https://github.com/vwxyzjn/cleanrl\)", text)
        assert len(links) == 1, "say once what v1 is: CleanRL v1 (upstream), with its link"


@pytest.mark.parametrize("file", FILES)
def test_every_file_has_a_page_in_one_form(file):
    (text,) = [text for text in PAGES.values() if re.match(rf"# .* \({file}\.py\)\n", text)]
    wanted = ["Run", "Results", "Implementation details", "Hyperparameters", "Logged metrics"]
    own = headings(text)[1:]
    assert [heading for heading in own if heading in wanted] == wanted
    assert own[-1] == "Limitations" and "$$" in text and "<!-- hyperparameters -->" in text


def test_the_fields_words_are_there():
    everything = " ".join(PAGES.values()).lower()
    for word in ("hyperparameters", "off-policy", "throughput", "sample efficiency", "gae"):
        assert everything.count(word) >= 3, word


def test_an_overview_leads_to_every_file():
    """The README names kinds of algorithms; a row of their overviews says when to use a file."""
    kinds = re.findall(r"\]\(docs/(rl-algorithms/[\w-]+\.md)\)", PAGES["README.md"])
    told = "".join(PAGES[f"docs/{page}"] for page in kinds)
    assert [file for file in FILES if f"[`{file}.py`](" not in told] == []

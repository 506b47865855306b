"""Which licence a result is under, what that asks, and who has to say yes to it."""

import pytest

from kvfold.common.errors import UserError
from kvfold.publish import licences
from kvfold.publish.licences import Head, check_licence, check_name, find_licence, missing_files, read_head, terms_of

FREE = ["apache-2.0", "mit", "bsd-3-clause", "cc0-1.0", "cc-by-4.0", "unlicense"]
SHARE_ALIKE = ["cc-by-sa-4.0", "gpl-3.0", "mpl-2.0"]
CONDITIONAL = ["llama2", "llama3.1", "llama4", "gemma", "cc-by-nc-4.0", "cc-by-nd-4.0", "bigscience-openrail-m"]
CONDITIONAL += ["other", "unknown", "never-heard-of-it", "mrl", "qwen-research"]


def test_every_row_is_whole():
    for name in licences._TABLE["licences"]:
        terms = terms_of(name)
        assert terms.title and terms.kind in ("free", "share-alike", "conditional")
        assert terms.asks and "\n" not in terms.asks
        assert set(terms.files) <= set(licences.FILES)
    assert set(licences._TABLE["also"].values()) <= set(licences._TABLE["licences"])


@pytest.mark.parametrize(
    ("names", "kind"), [(FREE, "free"), (SHARE_ALIKE, "share-alike"), (CONDITIONAL, "conditional")]
)
def test_who_needs_accept_license(names, kind):
    for name in names:
        licence = find_licence(Head(license=name))
        assert licence.terms.kind == kind, name
        if kind == "conditional":
            with pytest.raises(UserError, match="say --accept-license"):
                check_licence(licence, accepted=False, gated=False, name="out")
        else:
            check_licence(licence, accepted=False, gated=False, name="out")
        check_licence(licence, accepted=True, gated=True, name="out")


@pytest.mark.parametrize(
    ("name", "shown", "prefix", "notice"),
    [
        ("llama2", None, None, "Llama 2 is licensed under the LLAMA 2 Community License, "),
        ("llama3", "Built with Meta Llama 3", "Llama-3", "Meta Llama 3 is licensed under the Meta Llama 3 Community "),
        ("llama3.1", "Built with Llama", "Llama", "Llama 3.1 is licensed under the Llama 3.1 Community License, "),
        ("llama3.3", "Built with Llama", "Llama", "Llama 3.3 is licensed under the Llama 3.3 Community License, "),
        ("llama4", "Built with Llama", "Llama", "Llama 4 is licensed under the Llama 4 Community License, "),
        ("gemma", None, None, "Gemma is provided under and subject to the Gemma Terms of Use found at "),
        ("qwen", "Built with Qwen", None, "Qwen is licensed under the Qwen LICENSE AGREEMENT, Copyright (c) Alibaba "),
        ("qwen-research", "Built with Qwen", None, "Qwen is licensed under the Qwen RESEARCH LICENSE AGREEMENT, "),
    ],
)
def test_what_llama_gemma_and_qwen_ask(name, shown, prefix, notice):
    terms = terms_of(name)
    assert (terms.built_with, terms.prefix) == (shown, prefix)
    assert terms.notice.startswith(notice)
    assert terms.files == ("licence",)
    assert missing_files(terms, ["model.safetensors", "LICENSE.txt"]) == []
    assert missing_files(terms, ["model.safetensors", "tokenizer.json"]) == ["licence"]


def test_names_begin_as_the_licence_asks():
    llama = find_licence(Head(license="llama3"))
    for name in ("me/Llama-3-8B-mla", "me/llama3-mla"):
        assert check_name(llama, name, private=False) is None
    with pytest.raises(UserError, match="call the repository me/Llama-3-my-8B"):
        check_name(llama, "me/my-8B", private=False)
    assert "before you make it public" in check_name(llama, "me/my-8B", private=True)
    assert check_name(find_licence(Head(license="mit")), "me/x", private=False) is None


def test_own_licences_are_known_by_their_names():
    head = read_head(b"---\nlicense: other\nlicense_name: Qwen-Research\nlicense_link: LICENSE\n---\n")
    licence = find_licence(head, base="Qwen/Qwen2.5-3B")
    assert (licence.id, licence.name, licence.terms.title) == (
        "other",
        "qwen-research",
        "Qwen Research License Agreement",
    )
    assert licence.link == "https://huggingface.co/Qwen/Qwen2.5-3B/blob/main/LICENSE"
    assert find_licence(head).link is None  # LICENSE of what
    odd = find_licence(read_head(b"---\nlicense: other\nlicense_link: javascript:alert(1)\n---\n"), base="a/b")
    assert (odd.id, odd.name, odd.link) == ("other", None, None)


def test_the_user_comes_first_then_the_readme_then_the_hub():
    readme, hub = Head(license="mit"), Head(license="gemma")
    assert find_licence(readme, given="cc0-1.0", hub=hub).terms.id == "cc0-1.0"
    assert find_licence(readme, base="a/b", hub=hub).found == "the README.md of its source"
    assert find_licence(Head(), base="a/b", hub=hub).found == "the card of a/b on the Hub"
    with pytest.raises(UserError, match="say it with --license"):
        find_licence(Head(problem="the head is no YAML"))


def test_another_name_frees_nothing():
    licence = find_licence(Head(license="llama3.1"), given="mit")
    with pytest.raises(UserError, match=r"Llama 3.1 Community License \(llama3.1, says the README.md"):
        check_licence(licence, accepted=False, gated=False, name="out")


def test_a_gated_source_needs_leave_whatever_its_licence():
    head = read_head(b"---\nlicense: apache-2.0\nextra_gated_prompt: who are you\n---\n")
    assert head.gated
    with pytest.raises(UserError, match="its source is gated"):
        check_licence(find_licence(head), accepted=False, gated=head.gated, name="out")


@pytest.mark.parametrize(
    "readme",
    [
        b"no head",
        b"---\n- a list\n---\n",
        b"---\nlicense: [mit\n---\n",
        b"---\nlicense: mit\nlicense: gpl\n---\n",
        b"---\nlicense: {a: b}\n---\n",
        b"---\nlicense: [mit, gpl-3.0]\n---\n",
        b"---\n" + b"[" * 5000 + b"\n---\n",
        b"\xff\xfe",
    ],
    ids=["none", "list", "broken", "twice", "table", "two", "deep", "bytes"],
)
def test_heads_that_say_nothing_of_use(readme):
    assert not read_head(readme).license


def test_languages_are_codes():
    head = read_head(b'---\nlicense: mit\nlanguage: [en, no, "<script>", code, zh-Hans]\n---\n')
    assert head.language == ("en", "no", "code", "zh-Hans")

"""The documentation site, as far as it can be held without building it: navigation, links out of docs/, formulas, examples."""

import importlib.util
import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]


class Lenient(yaml.SafeLoader):
    """YAML with MkDocs' tags for Python objects, which are left unread."""


Lenient.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: None)


@pytest.fixture(scope="module")
def hooks():
    spec = importlib.util.spec_from_file_location("site_hooks", ROOT / "scripts" / "site" / "hooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def site():
    return yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader=Lenient)


def named(nav):
    for entry in nav:
        for target in entry.values() if isinstance(entry, dict) else [entry]:
            yield from named(target) if isinstance(target, list) else [target]


def test_the_navigation_has_every_page_and_only_pages_that_exist(hooks, site):
    shown = list(named(hooks.on_config({"nav": site["nav"]})["nav"]))
    assert len(shown) == len(set(shown))
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    pages |= {hooks.site_uri(file) for file in hooks.linked_files() if file.endswith((".md", ".ipynb"))}
    assert {page for page in shown if not page.startswith("modules/")} == pages
    assert {"modules/training.md", "modules/algorithm.md", "modules/evaluation.md"} <= set(shown)


def test_links_are_as_the_site_has_them(hooks):
    page = "[types](../../src/groupwise/types.py), [`a`](../../README.md#start), ![a](../figures/a.svg) `[no](link)` [up](scale.md#kl)"
    assert hooks.rewritten("docs/explanation/questions.md", "explanation/questions.md", page) == (
        "[types](../src/groupwise/types.py), [`a`](../index.md#start), ![a](../figures/a.svg) `[no](link)` [up](scale.md#kl)"
    )
    readme = "[a](docs/how-to/data.md#columns) [b](CONTRIBUTING.md) [c](LICENSE) [d](https://example.org/x.md) [e](#start)"
    assert hooks.rewritten("README.md", "index.md", readme) == (
        "[a](how-to/data.md#columns) [b](contributing.md) [c](LICENSE) [d](https://example.org/x.md) [e](#start)"
    )
    assert (
        hooks.rewritten("docs/reference/algorithms/ppo.md", "reference/algorithms/ppo.md", "[x](../data.md)") == "[x](../data.md)"
    )


def test_files_that_pages_link_to_come_along(hooks):
    found = hooks.linked_files()
    assert {"README.md", "LICENSE", "examples/rewards/equations.py", "examples/notebooks/01-first-grpo-run.ipynb"} <= found
    assert all((ROOT / file).is_file() and not file.startswith("docs/") for file in found)


def test_formulas_become_mathml_and_code_stays(hooks):
    pytest.importorskip("latex2mathml")
    page = "Each $A_i$ costs `$5`.\n\n```math\n\\frac{1}{2}\n```\n\n```sh\necho $HOME $PATH\n```\nand $5 or $6 each"
    made = hooks.with_formulas(page)
    assert made.count("<math") == 2
    assert "`$5`" in made
    assert "echo $HOME $PATH" in made
    assert "and $5 or $6 each" in made


def test_a_notebook_is_a_page_with_its_words_and_code(hooks):
    page = hooks.notebook_page("examples/notebooks/02-your-own-reward.ipynb")
    assert page.startswith("# Your own reward\n")
    assert "\n\n```python\nfrom groupwise import" in page
    assert "\n```math\n\\delta_t" in hooks.notebook_page("examples/notebooks/04-ppo-against-grpo.ipynb")
    link = hooks.rewritten("examples/notebooks/README.md", "examples/notebooks/README.md", "[a](02-your-own-reward.ipynb)")
    assert link == "[a](02-your-own-reward.md)"


def test_the_reference_has_the_modules_with_public_names(hooks):
    rooms = hooks.modules_with_words()
    assert "groupwise.training.loop" in rooms["training"]
    assert "groupwise.algorithm.advantages" in rooms["algorithm"]
    assert "cli" not in rooms
    assert ":::" in hooks.module_page("training", rooms["training"])


def test_formulas_in_pages_are_closed():
    for path in (ROOT / "docs").rglob("*.md"):
        text = re.sub(r"^```.*?^```$|`[^`\n]+`", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        for line in text.splitlines():
            assert line.count("$") % 2 == 0, f"{path.name}: {line}"

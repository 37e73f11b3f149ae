"""The repository that model_repo/ shows. Run `python -m tests.support.model_repo` to write it anew."""

from __future__ import annotations

from pathlib import Path

from sits_trt.recipe import load_recipe
from sits_trt.repository import render_repository
from sits_trt.repository.config import RepositoryPaths

SHOWN = Path(__file__).resolve().parents[2] / "model_repo"
DEFAULT_RECIPE = "a100"


def rendered() -> dict[str, str]:
    """Return the text of each file by its path in the repository of the default recipe."""
    recipe = load_recipe(DEFAULT_RECIPE)
    paths = RepositoryPaths(engine="../engine", tokenizer="../quantized")
    return render_repository(paths, recipe.serving, recipe.kv_cache)


def main() -> None:
    for name, text in rendered().items():
        path = SHOWN / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

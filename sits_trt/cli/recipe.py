"""`sits-trt recipe ...`: look at recipes."""

from __future__ import annotations

import typer

from sits_trt.cli.app import RecipeArgument, SetOption, app, print_json
from sits_trt.recipe import SKUS, Recipe, load_recipe

recipe_app = typer.Typer(no_args_is_help=True, help="Look at recipes.")
app.add_typer(recipe_app, name="recipe")


@recipe_app.command("show")
def recipe_show(recipe: RecipeArgument, overrides: SetOption = None) -> None:
    """Print a recipe with its blocks, overrides and defaults resolved, as JSON (which is YAML, too)."""
    print(load_recipe(recipe, overrides or ()).model_dump_json(indent=2))


@recipe_app.command("schema")
def recipe_schema() -> None:
    """Print the JSON Schema of recipes, for editors."""
    print_json(Recipe.model_json_schema())


@recipe_app.command("skus")
def recipe_skus() -> None:
    """Print the targets that a recipe may name."""
    print_json({name: {key: value for key, value in vars(sku).items() if key != "name"} for name, sku in SKUS.items()})

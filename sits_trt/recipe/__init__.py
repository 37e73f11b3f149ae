"""Recipes: what a build is asked for, as data."""

from sits_trt.recipe.load import load_recipe as load_recipe
from sits_trt.recipe.load import recipe_of_build as recipe_of_build
from sits_trt.recipe.schema import Recipe as Recipe
from sits_trt.recipe.skus import SKUS as SKUS
from sits_trt.recipe.skus import Sku as Sku
from sits_trt.recipe.skus import find_sku as find_sku
